//! Which redundancy, which placement, which checkpoint interval: the least expected time to train.
//!
//! Closed forms rank all candidates; the best few are simulated, on the same failures, and the winner's interval is varied.
//! What the recommendation is compared with is simulated too. Nothing is invented: what would need an input that is not
//! given (money, memory) is left out of the answer.

use super::laws::{availability_at, checkpoint_interval, expected_masked, intervals, with_repair};
use super::layout::{Action, Layout};
use super::placement::Placement;
use super::simulate::{Failures, Job, Policy, Recovery, Setup, Summary, run_seeds, summarise};
use super::{SpareError, ruler};
use crate::perturb::random::Random;
use serde::Serialize;
use std::num::NonZeroU32;

/// What is asked.
#[derive(Clone, Debug)]
pub struct Question {
    /// The job.
    pub job: Job,
    /// Its failures.
    pub failures: Failures,
    /// What they cost; `checkpoint_steps` 0 asks for the best.
    pub recovery: Recovery,
    /// Redundancies to be considered: from, to.
    pub redundancy: (u32, u32),
    /// Placements to be considered.
    pub placements: Vec<Placement>,
    /// Most spare groups of the alternative that has some, which is tried with fewer, too; 0: it is left out.
    pub spares: u32,
    /// Largest redundancy that fits into memory, if known.
    pub fits_memory: Option<u32>,
    /// Simulated trainings of each finalist.
    pub seeds: u64,
    /// Threads to simulate on.
    pub threads: NonZeroU32,
}

/// One way to run the job, and how it does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// `spare`, `replication`, `checkpoint`, `elastic` or `spares`.
    pub policy: &'static str,
    /// Hosts of a type, where that is a parameter.
    pub r: Option<u32>,
    /// Placement, where that is a parameter.
    pub placement: Option<String>,
    /// Spare groups, where that is a parameter.
    pub spares: Option<u32>,
    /// Steps between checkpoints.
    pub checkpoint_steps: u64,
    /// Time over ideal time by the closed forms, where there are some.
    pub expected_relative_time: Option<f64>,
    /// Simulated; `None` if it would get nowhere.
    pub simulated: Option<Summary>,
    /// Why it gets nowhere.
    pub no_progress: Option<String>,
}

/// How much the time of the recommended set-up depends on an input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// Which input.
    pub input: &'static str,
    /// Relative time with the input a fifth lower.
    pub lower: f64,
    /// Relative time with the input a fifth higher.
    pub higher: f64,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// What to do.
    pub best: Choice,
    /// The other finalists, best first.
    pub finalists: Vec<Choice>,
    /// Other policies, on the same failures.
    pub alternatives: Vec<Choice>,
    /// What the answer depends on most, first.
    pub sensitivities: Vec<Sensitivity>,
    /// What to know about the answer.
    pub warnings: Vec<String>,
}

/// Candidates that are simulated at all, and those of them simulated with all seeds.
const SIMULATED: usize = 6;
const FINALISTS: usize = 3;
/// Numbers of spare groups that are tried at most.
const SPARE_COUNTS: usize = 4;

/// Answers the question.
pub fn plan(question: &Question) -> Result<Recommendation, SpareError> {
    check(question)?;
    let mut candidates = candidates(question)?;
    let key = |choice: &Candidate| choice.expected;
    candidates.sort_by(|a, b| key(a).total_cmp(&key(b)));
    candidates.truncate(SIMULATED);
    let few = (question.seeds / 4).max(4).min(question.seeds);
    let mut tried: Vec<Tried> =
        candidates.into_iter().map(|candidate| candidate.attempt(question, few)).collect::<Result<_, _>>()?;
    tried.sort_by(|a, b| a.mean().total_cmp(&b.mean()));
    tried.truncate(FINALISTS);
    let mut finalists = Vec::new();
    for (place, tried) in tried.into_iter().enumerate() {
        let scales: &[f64] =
            if place == 0 && question.recovery.checkpoint_steps == 0 { &[0.5, 1.0, 2.0] } else { &[1.0] };
        for scale in scales {
            let mut candidate = tried.candidate.clone();
            candidate.checkpoint_steps = ((candidate.checkpoint_steps as f64 * scale).round() as u64).max(1);
            finalists.push(candidate.attempt(question, question.seeds)?);
        }
    }
    finalists.sort_by(|a, b| a.mean().total_cmp(&b.mean()));
    let mut finalists = finalists.into_iter();
    let best = finalists.next().expect("at least one candidate");
    if best.summary.finished < best.summary.runs {
        return Err(SpareError::NoProgress(format!(
            "even {} gets through only {:.1} % of the steps in {} times the time without failures",
            best.candidate.name(),
            best.summary.progress.mean * 100.0,
            GIVE_UP
        )));
    }
    let sensitivities = sensitivities(question, &best.candidate, few)?;
    let alternatives = alternatives(question)?;
    let warnings = warnings(question, &best);
    let finalists = finalists.map(Tried::choice).collect();
    Ok(Recommendation { best: best.choice(), finalists, alternatives, sensitivities, warnings })
}

/// A training is given up at this multiple of the time without failures.
const GIVE_UP: f64 = 30.0;

#[derive(Clone, Debug)]
struct Candidate {
    r: u32,
    placement: Placement,
    checkpoint_steps: u64,
    expected: f64,
}

struct Tried {
    candidate: Candidate,
    summary: Summary,
}

impl Candidate {
    fn name(&self) -> String {
        format!("r {} with placement {}", self.r, placement_name(&self.placement))
    }

    fn policy(&self) -> Policy {
        Policy::Spare { r: self.r, placement: self.placement.clone() }
    }

    fn attempt(self, question: &Question, seeds: u64) -> Result<Tried, SpareError> {
        let summary = simulate(question, self.policy(), self.checkpoint_steps, seeds)?;
        Ok(Tried { candidate: self, summary })
    }
}

impl Tried {
    /// Mean time, counting what was not done as never done.
    fn mean(&self) -> f64 {
        self.summary.relative_time.mean / self.summary.progress.mean.max(1e-9)
    }

    fn choice(self) -> Choice {
        Choice {
            policy: "spare",
            r: Some(self.candidate.r),
            placement: Some(placement_name(&self.candidate.placement)),
            spares: None,
            checkpoint_steps: self.candidate.checkpoint_steps,
            expected_relative_time: Some(self.candidate.expected),
            simulated: Some(self.summary),
            no_progress: None,
        }
    }
}

/// Name of a placement, as [`Placement::named`] takes it where it has one.
#[must_use]
pub fn placement_name(placement: &Placement) -> String {
    match placement {
        Placement::Golomb => "golomb".to_owned(),
        Placement::Contiguous => "contiguous".to_owned(),
        Placement::Disjoint => "disjoint".to_owned(),
        Placement::Random { .. } => "random".to_owned(),
        Placement::Offsets(offsets) => format!("{offsets:?}"),
    }
}

fn check(question: &Question) -> Result<(), SpareError> {
    let (low, high) = question.redundancy;
    if low < 2 || low > high {
        return Err(SpareError::invalid(
            "r",
            format!("{low} to {high}"),
            "the range must start at 2 or above, and not be empty",
        ));
    }
    if question.placements.is_empty() {
        return Err(SpareError::invalid("placements", "[]", "there must be at least one"));
    }
    if question.seeds == 0 {
        return Err(SpareError::invalid("seeds", 0, "there must be at least one"));
    }
    // Everything else is checked as a set-up without redundancy.
    setup(question, Policy::Checkpoint, question.recovery.checkpoint_steps.max(1)).check()
}

fn setup(question: &Question, policy: Policy, checkpoint_steps: u64) -> Setup {
    let recovery = Recovery { checkpoint_steps, ..question.recovery.clone() };
    let (job, failures) = (question.job.clone(), question.failures.clone());
    Setup { job, failures, recovery, policy, published: false, give_up: GIVE_UP }
}

fn simulate(question: &Question, policy: Policy, checkpoint_steps: u64, seeds: u64) -> Result<Summary, SpareError> {
    let setup = setup(question, policy, checkpoint_steps);
    Ok(summarise(&run_seeds(&setup, 0..seeds, question.threads)?))
}

/// Mean time between failures of anything, seconds.
fn system_mtbf(question: &Question) -> f64 {
    question.failures.system_mtbf_s(question.job.groups)
}

/// All redundancies and placements that can be had, with what the closed forms say.
fn candidates(question: &Question) -> Result<Vec<Candidate>, SpareError> {
    let n = question.job.groups;
    let (low, high) = question.redundancy;
    let high = high.min(question.fits_memory.unwrap_or(u32::MAX));
    let mut candidates = Vec::new();
    for placement in &question.placements {
        for r in low..=high {
            if placement.offsets(n, r).is_err() && *placement != Placement::Disjoint || r > n {
                continue;
            }
            candidates.push(candidate(question, r, placement)?);
        }
    }
    if candidates.is_empty() {
        let limit = question.fits_memory.map_or_else(String::new, |most| format!(", and memory for {most}"));
        let expected = format!("a Golomb placement of {n} groups allows at most {}{limit}", ruler::max_order(n));
        return Err(SpareError::invalid("r", format!("{low} to {high}"), expected));
    }
    Ok(candidates)
}

fn candidate(question: &Question, r: u32, placement: &Placement) -> Result<Candidate, SpareError> {
    let n = question.job.groups;
    let profile = stack_profile(n, r, placement)?;
    let (to_wipe_out, stacks) = match question.recovery.repair_s {
        Some(repair) => repaired(n, r, system_mtbf(question), repair, &profile)?,
        None => unrepaired(n, system_mtbf(question), expected_masked(n, r, placement)?.0, &profile),
    };
    let (checkpoint_steps, expected) = closed_form(question, stacks, to_wipe_out)?;
    Ok(Candidate { r, placement: placement.clone(), checkpoint_steps, expected })
}

/// Longest time between restarts that is told apart from for ever, seconds.
const FOR_EVER_S: f64 = 1e12;

/// Mean time to a wipe-out, and mean stack entries until then, if so many failures are masked and nothing is repaired.
fn unrepaired(n: u32, system_mtbf_s: f64, masked: f64, profile: &[f64]) -> (f64, f64) {
    // Failures come ever more slowly as groups are lost.
    let endured = (masked as u32).min(n - 1);
    let every = system_mtbf_s * (0..=endured).map(|k| f64::from(n) / f64::from(n - k)).sum::<f64>();
    (every, mean_to(profile, endured))
}

/// The same if failed groups are repaired: their number soon settles.
fn repaired(n: u32, r: u32, system_mtbf_s: f64, repair_s: f64, profile: &[f64]) -> Result<(f64, f64), SpareError> {
    let (every, failed) = with_repair(n, r, system_mtbf_s * f64::from(n), repair_s)?;
    let at = |k: f64| profile[(k as usize).min(profile.len() - 1)];
    let (low, part) = (libm::floor(failed), failed.fract());
    Ok((every.min(FOR_EVER_S), at(low) + part * (at(low + 1.0) - at(low))))
}

/// Entries that the controller has the survivors compute after 0, 1, ... failures, averaged over a few random orders of failures
/// (the same every time) as far as they go. No closed form is known but for a lower bound, which only Golomb placements reach.
fn stack_profile(n: u32, r: u32, placement: &Placement) -> Result<Vec<f64>, SpareError> {
    /// Groups whose failures are followed, over all orders.
    const FAILURES: u32 = 1 << 14;
    let mut layout = Layout::new(placement.stacks(n, r)?);
    let (mut sums, mut counts, mut moves) = (Vec::new(), Vec::new(), Vec::new());
    for order in 0..(FAILURES / n).clamp(1, 24) {
        layout.reset();
        let mut random = Random::of(0, &[u64::from(order), u64::from(n)]);
        let mut groups: Vec<u32> = (0..n).collect();
        for k in 0..n as usize {
            if k == sums.len() {
                sums.push(0.0);
                counts.push(0.0);
            }
            sums[k] += f64::from(layout.stacks());
            counts[k] += 1.0;
            groups.swap(k, k + random.below(n as usize - k));
            if layout.lose(&groups[k..=k], &mut moves) == Action::WipeOut {
                break;
            }
        }
    }
    Ok(sums.iter().zip(&counts).map(|(sum, count)| sum / count).collect())
}

/// Mean of a profile up to an index, its last value standing for what is beyond.
fn mean_to(profile: &[f64], last: u32) -> f64 {
    let known = profile.len().min(last as usize + 1);
    let beyond = (last as usize + 1 - known) as f64 * profile.last().copied().unwrap_or(1.0);
    (profile[..known].iter().sum::<f64>() + beyond) / f64::from(last + 1)
}

/// Steps between saves, and time over ideal time, of a job of `stacks` entries per step that restarts every `mtbf_s`.
fn closed_form(question: &Question, stacks: f64, mtbf_s: f64) -> Result<(u64, f64), SpareError> {
    let (job, recovery) = (&question.job, &question.recovery);
    let step = stacks * (job.compute_s + job.data_s) + job.all_reduce_s;
    let save = recovery.stall_s.max(1e-6 * step);
    let steps = if recovery.checkpoint_steps > 0 {
        recovery.checkpoint_steps
    } else {
        let interval = checkpoint_interval(save, recovery.restart_s, mtbf_s)?;
        (((interval - save) / step).round() as u64).clamp(1, job.steps)
    };
    let interval = steps as f64 * step + save;
    let available = availability_at(interval, save, recovery.restart_s, mtbf_s)?;
    Ok((steps, step / (job.compute_s + job.all_reduce_s) / available))
}

/// Why a job that restarts every `mtbf_s` on average gets nowhere, if so.
fn stuck(question: &Question, stacks: f64, mtbf_s: f64) -> Option<String> {
    let (job, recovery) = (&question.job, &question.recovery);
    let step = stacks * (job.compute_s + job.data_s) + job.all_reduce_s;
    let every = format!("every {mtbf_s:.0} s a failure stops the job");
    if mtbf_s < step {
        return Some(format!("{every}, before one step of {step:.0} s is done"));
    }
    if mtbf_s < recovery.stall_s {
        return Some(format!("{every}, before one checkpoint of {:.0} s is written", recovery.stall_s));
    }
    (mtbf_s < recovery.restart_s).then(|| format!("{every}, before one restart of {:.0} s is over", recovery.restart_s))
}

/// Replication, checkpoints only, elastic shrinking, and hot spares.
fn alternatives(question: &Question) -> Result<Vec<Choice>, SpareError> {
    let n = question.job.groups;
    let mtbf = system_mtbf(question);
    let mut choices = Vec::new();
    let few = (question.seeds / 4).max(4).min(question.seeds);
    let mut best: Option<(f64, u32, u64, f64)> = None;
    for r in 2..=4.min(n) {
        let masked = expected_masked(n, r, &Placement::Disjoint)?.0;
        let (steps, expected) = closed_form(question, f64::from(r), mtbf * (masked + 1.0))?;
        let summary = simulate(question, Policy::Replication { r }, steps, few)?;
        let time = summary.relative_time.mean / summary.progress.mean.max(1e-9);
        if best.is_none_or(|(least, ..)| time < least) {
            best = Some((time, r, steps, expected));
        }
    }
    if let Some((_, r, steps, expected)) = best {
        let simulated = simulate(question, Policy::Replication { r }, steps, question.seeds)?;
        choices.push(Choice { r: Some(r), ..other("replication", steps, Some(expected), Some(simulated)) });
    }
    let (steps, expected) = closed_form(question, 1.0, mtbf)?;
    if let Some(reason) = stuck(question, 1.0, mtbf) {
        choices.push(Choice { no_progress: Some(reason), ..other("checkpoint", steps, None, None) });
    } else {
        let simulated = simulate(question, Policy::Checkpoint, steps, question.seeds)?;
        choices.push(other("checkpoint", steps, Some(expected), Some(simulated)));
    }
    // Without a repair time nobody knows how much smaller the job is meanwhile.
    if question.recovery.repair_s.is_some() {
        let simulated = simulate(question, Policy::Elastic, steps, question.seeds)?;
        choices.push(other("elastic", steps, None, Some(simulated)));
    }
    for spares in spare_counts(question.spares) {
        let simulated = simulate(question, Policy::Spares { spares }, steps, question.seeds)?;
        choices.push(Choice { spares: Some(spares), ..other("spares", steps, None, Some(simulated)) });
    }
    Ok(choices)
}

/// How many spare groups are tried: the most, and what halving it leaves. More are never slower but cost more, so which of
/// them is best depends on what counts; the answer has them all.
fn spare_counts(most: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(most), |count| Some(count / 2)).take_while(|&count| count > 0).take(SPARE_COUNTS)
}

fn other(policy: &'static str, checkpoint_steps: u64, expected: Option<f64>, simulated: Option<Summary>) -> Choice {
    Choice {
        policy,
        r: None,
        placement: None,
        spares: None,
        checkpoint_steps,
        expected_relative_time: expected,
        simulated,
        no_progress: None,
    }
}

/// The recommended set-up with one input changed, on the same failures.
fn sensitivities(question: &Question, best: &Candidate, seeds: u64) -> Result<Vec<Sensitivity>, SpareError> {
    type Change = fn(&mut Question, f64);
    let inputs: [(&'static str, Change); 5] = [
        ("mtbf", |question, by| {
            question.failures.group_mtbf_s *= by;
            question.failures.domains.iter_mut().for_each(|domain| domain.mtbf_s *= by);
        }),
        ("restart", |question, by| question.recovery.restart_s *= by),
        ("checkpoint", |question, by| {
            question.recovery.save_s *= by;
            question.recovery.stall_s *= by;
        }),
        ("jitter", |question, by| question.job.jitter *= by),
        ("all_reduce", |question, by| question.job.all_reduce_s *= by),
    ];
    let mut found = Vec::new();
    for (input, change) in inputs {
        let time = |by: f64| {
            let mut question = question.clone();
            change(&mut question, by);
            // Over the ideal time of the question as asked.
            let scale = question.job.ideal_s();
            simulate(&question, best.policy(), best.checkpoint_steps, seeds)
                .map(|found| found.relative_time.mean * scale)
        };
        let ideal = question.job.ideal_s();
        found.push(Sensitivity { input, lower: time(0.8)? / ideal, higher: time(1.2)? / ideal });
    }
    found.sort_by(|a, b| (b.higher - b.lower).abs().total_cmp(&(a.higher - a.lower).abs()));
    Ok(found)
}

fn warnings(question: &Question, best: &Tried) -> Vec<String> {
    let mut warnings = Vec::new();
    let mtbf = system_mtbf(question);
    let step = question.job.compute_s + question.job.all_reduce_s;
    if mtbf < step {
        warnings.push(format!("a group fails every {mtbf:.0} s, more often than a step of {step:.0} s ends"));
    }
    if let Ok(found) = intervals(question.recovery.save_s.max(1e-3), question.recovery.restart_s, mtbf)
        && found.is_young_off
    {
        warnings.push(format!(
            "saving ({:.0} s) is not short against the time between failures ({mtbf:.0} s): Young's interval for checkpoints \
             without redundancy ({:.0} s) is off, the best is {:.0} s",
            question.recovery.save_s, found.young_s, found.exact_s
        ));
    }
    if !best.summary.is_converged {
        warnings.push(format!("{} simulated trainings have not converged: ask for more seeds", best.summary.runs));
    }
    warnings
}

/// What the closed forms say about one redundancy and placement. No step time is needed: everything is relative.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FrontierRow {
    /// Hosts of a type; 1: none to spare.
    pub r: u32,
    /// Placement.
    pub placement: String,
    /// Mean failures masked between restarts.
    pub masked: f64,
    /// Mean time between restarts, seconds.
    pub restart_every_s: f64,
    /// Mean stack entries computed per step: the controller's, over some random orders of failures.
    pub stacks: f64,
    /// Best time between the ends of two checkpoints, seconds.
    pub interval_s: f64,
    /// Share of the time that is progress.
    pub availability: f64,
    /// Compute over that without failures, divided by `availability`.
    pub relative_time: f64,
    /// Least and most `relative_time` if restarts were as far apart as the earliest tenth of them, the mean, or the latest tenth.
    pub band: (f64, f64),
}

/// Closed forms for a range of redundancies, in the order of the placements and of `r`. What does not fit is left out.
pub fn frontier(
    n: u32,
    redundancy: (u32, u32),
    placements: &[Placement],
    (save_s, restart_s, system_mtbf_s): (f64, f64, f64),
    repair_s: Option<f64>,
) -> Result<Vec<FrontierRow>, SpareError> {
    super::check_groups(n)?;
    super::positive("system_mtbf_s", system_mtbf_s)?;
    let mut rows = Vec::new();
    for placement in placements {
        for r in redundancy.0.max(1)..=redundancy.1.min(n) {
            if placement.offsets(n, r).is_err() && *placement != Placement::Disjoint {
                continue;
            }
            let profile = stack_profile(n, r, placement)?;
            let masked = expected_masked(n, r, placement)?.0;
            let (every, stacks) = match repair_s {
                Some(repair) => repaired(n, r, system_mtbf_s, repair, &profile)?,
                None => unrepaired(n, system_mtbf_s, masked, &profile),
            };
            let at = |every: f64, stacks: f64| -> Result<(f64, f64, f64), SpareError> {
                let interval = checkpoint_interval(save_s, restart_s, every)?;
                let available = availability_at(interval, save_s, restart_s, every)?;
                Ok((interval, available, stacks / available))
            };
            // Quantiles of the time between restarts: the Weibull law of the failures endured, scaled to the mean of this
            // placement; with repairs a wipe-out is without memory.
            let quantile = |share: f64| {
                if repair_s.is_some() {
                    return (every * -libm::log(1.0 - share), stacks);
                }
                let of = |x: f64| libm::pow(x, 1.0 / f64::from(r));
                let endured = masked * of(-libm::log(1.0 - share)) / libm::tgamma(1.0 + 1.0 / f64::from(r));
                unrepaired(n, system_mtbf_s, endured, &profile)
            };
            let (interval_s, availability, usual) = at(every, stacks)?;
            let relative = |share: f64| {
                let (every, stacks) = quantile(share);
                at(every, stacks).map(|(_, _, relative)| relative)
            };
            let (early, late) = (relative(0.1)?, relative(0.9)?);
            let masked = if repair_s.is_some() { every / system_mtbf_s - 1.0 } else { masked };
            let restart_every_s = every;
            rows.push(FrontierRow {
                r,
                placement: placement_name(placement),
                masked,
                restart_every_s,
                stacks,
                interval_s,
                availability,
                relative_time: usual,
                band: (early.min(usual).min(late), early.max(usual).max(late)),
            });
        }
    }
    if rows.is_empty() {
        let expected = format!("a Golomb placement of {n} groups allows at most {}", ruler::max_order(n));
        return Err(SpareError::invalid("r", format!("{} to {}", redundancy.0, redundancy.1), expected));
    }
    Ok(rows)
}
