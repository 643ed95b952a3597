//! Everything there is to say about a job, the culprit first.

use super::blame::{Cause, Culprit, Waiting};
use super::critical_path::{Path, Segment, Spent};
use super::excess::{Named, named};
use super::hang::{Hang, name};
use super::need::MemoryNeed;
use super::sensitivity::{Parameter, Sensitivity, sensitivities};
use super::slack::RankSlack;
use super::trace::JobTrace;
use crate::graph::Graph;
use crate::graph::op::{ComputeClass, OpKind};
use crate::ids::{CommId, Rank, TemplateId};
use crate::replay::ReplayOptions;
use crate::sim::SimError;
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What to look at.
#[derive(Clone, Debug)]
pub struct DiagnoseOptions {
    /// How to replay.
    pub replay: ReplayOptions,
    /// Which iteration, from 0; the last if not said.
    pub iteration: Option<usize>,
    /// Replay again with single things slower.
    pub sensitivities: bool,
    /// Entries of each list at most.
    pub top: usize,
    /// Memory of a card in bytes, if other than the profile's.
    pub card_bytes: Option<u64>,
}

impl DiagnoseOptions {
    /// The last iteration, with sensitivities.
    #[must_use]
    pub fn new(replay: ReplayOptions) -> Self {
        Self { replay, iteration: None, sensitivities: true, top: 8, card_bytes: None }
    }
}

/// Time of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Part {
    /// On what.
    #[serde(flatten)]
    pub spent: Spent,
    /// How long. The parts of a path add up to its length.
    pub ns: i64,
    /// Share of the length.
    pub share: f64,
}

/// Time of the critical path on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankShare {
    /// Which.
    pub rank: Rank,
    /// How long.
    pub ns: i64,
    /// Share of the length.
    pub share: f64,
}

/// One long segment of the critical path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LongSegment {
    /// On which rank it ends.
    pub rank: Rank,
    /// Op at whose end it ends.
    pub op: u32,
    /// Name of the op.
    pub name: String,
    /// On what.
    #[serde(flatten)]
    pub spent: Spent,
    /// Start, after the iteration's start.
    pub start_ns: i64,
    /// How long.
    pub ns: i64,
}

/// The critical path in figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CriticalPath {
    /// Its length: the iteration time.
    pub ns: i64,
    /// Segments.
    pub num_segments: usize,
    /// Ranks it goes over.
    pub num_ranks: usize,
    /// By kind, largest first.
    pub parts: Vec<Part>,
    /// The ranks with most of it.
    pub ranks: Vec<RankShare>,
    /// The longest segments.
    pub longest: Vec<LongSegment>,
}

/// Where the time of one rank goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Account {
    /// Which.
    pub rank: Rank,
    /// Why this one: `ends_last`, `culprit` or `waits_most`.
    pub why: &'static str,
    /// By kind, largest first.
    pub parts: Vec<Part>,
}

/// Slack in figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlackReport {
    /// Ranks that cannot be later anywhere.
    pub ranks_without: u64,
    /// The ranks with most slack.
    pub most: Vec<RankSlack>,
    /// False: lower bounds, because a communicator is large.
    pub is_exact: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The answer in a sentence.
    pub headline: String,
    /// Ranks of the job.
    pub world_size: u32,
    /// Why the job cannot finish, if it cannot; all that follows is empty then.
    pub hang: Option<Hang>,
    /// Duration of every iteration.
    pub iteration_time_ns: Vec<i64>,
    /// The one that is explained.
    pub iteration: Option<usize>,
    /// What makes it as long as it is.
    pub critical_path: Option<CriticalPath>,
    /// Some ranks' own view.
    pub accounts: Vec<Account>,
    /// Who waits for whom.
    pub waiting: Option<Waiting>,
    /// The communicators that all this names.
    pub communicators: Vec<Named>,
    /// What the fullest cards need, if the graph has allocations.
    pub memory: Option<MemoryNeed>,
    /// What could be later, if the job is small enough.
    pub slack: Option<SlackReport>,
    /// What would change the iteration time, strongest first.
    pub sensitivities: Vec<Sensitivity>,
    /// What one should know about this answer.
    pub notes: Vec<String>,
}

/// Explains a job. A job that hangs is an answer, not an error.
pub fn diagnose(graph: &Arc<Graph>, options: &DiagnoseOptions) -> Result<Diagnosis, SimError> {
    let memory = MemoryNeed::of(graph, options);
    let trace = match JobTrace::record(graph, &options.replay) {
        Ok(trace) => trace,
        Err(error) => {
            let hang = Hang::of(&error).map(|hang| hang.with_programs(graph, &error)).ok_or(error)?;
            return Ok(blocked(graph, hang, memory));
        }
    };
    let iteration = options.iteration.unwrap_or(trace.num_iterations() - 1);
    let none = || SimError::Unavailable { what: format!("iteration {iteration} of {}", trace.num_iterations()) };
    let path = trace.critical_path(iteration)?.ok_or_else(none)?;
    let waiting = trace.waiting(iteration)?.ok_or_else(none)?;
    let mut notes = notes(graph);
    if waiting.ranks_examined < graph.world_size() {
        notes.push(format!("waiting was examined on the first {} ranks", waiting.ranks_examined));
    }
    let slack = slack(&trace, options.top, &mut notes)?;
    let accounts = accounts(&trace, &path, &waiting, iteration)?;
    let mut found = Vec::new();
    if options.sensitivities {
        let parameters = parameters(&path, waiting.culprit.as_ref());
        found = sensitivities(graph, &options.replay, iteration, &parameters)?;
        found.sort_by(|a, b| b.elasticity.total_cmp(&a.elasticity));
    }
    let (path_figures, headline) = (figures(&trace, &path, options.top), headline(&path, &waiting, memory.as_ref()));
    let waiting = shortened(waiting, options.top);
    Ok(Diagnosis {
        headline,
        world_size: graph.world_size(),
        hang: None,
        iteration_time_ns: trace.report.iteration_times().into_iter().map(SimTime::as_ns).collect(),
        iteration: Some(iteration),
        communicators: named(graph, &path_figures, &accounts, &waiting),
        critical_path: Some(path_figures),
        accounts,
        waiting: Some(waiting),
        memory,
        slack,
        sensitivities: found,
        notes,
    })
}

fn blocked(graph: &Graph, hang: Hang, memory: Option<MemoryNeed>) -> Diagnosis {
    Diagnosis {
        headline: hang.cause.clone(),
        world_size: graph.world_size(),
        hang: Some(hang),
        iteration_time_ns: Vec::new(),
        iteration: None,
        critical_path: None,
        accounts: Vec::new(),
        waiting: None,
        communicators: Vec::new(),
        memory,
        slack: None,
        sensitivities: Vec::new(),
        notes: Vec::new(),
    }
}

fn share(ns: i64, of: i64) -> f64 {
    ns as f64 / of.max(1) as f64
}

fn parts(path: &Path) -> Vec<Part> {
    let total = path.total_ns();
    path.totals().into_iter().map(|(spent, ns)| Part { spent, ns, share: share(ns, total) }).collect()
}

fn figures(trace: &JobTrace, path: &Path, top: usize) -> CriticalPath {
    let total = path.total_ns();
    let by_rank = path.by_rank();
    let mut longest: Vec<&Segment> = path.segments.iter().collect();
    longest.sort_by_key(|segment| std::cmp::Reverse(segment.end - segment.start));
    let long = |segment: &&Segment| LongSegment {
        rank: segment.rank,
        op: segment.op,
        name: trace.describe(segment),
        spent: segment.spent,
        start_ns: (segment.start - path.start).as_ns(),
        ns: (segment.end - segment.start).as_ns(),
    };
    CriticalPath {
        ns: total,
        num_segments: path.segments.len(),
        num_ranks: by_rank.len(),
        parts: parts(path),
        ranks: by_rank
            .iter()
            .take(top)
            .map(|(rank, ns)| RankShare { rank: *rank, ns: *ns, share: share(*ns, total) })
            .collect(),
        longest: longest.iter().take(top).map(long).collect(),
    }
}

fn accounts(trace: &JobTrace, path: &Path, waiting: &Waiting, iteration: usize) -> Result<Vec<Account>, SimError> {
    let last = path.segments.last().map(|segment| (segment.rank, "ends_last"));
    let culprit = waiting.culprit.as_ref().map(|culprit| (culprit.ranks[0], "culprit"));
    // Of equals, the lowest.
    let most = waiting.by_rank.iter().rev().max_by_key(|(_, time)| *time).map(|(rank, _)| (*rank, "waits_most"));
    let mut accounts: Vec<Account> = Vec::new();
    for (rank, why) in [culprit, last, most].into_iter().flatten() {
        if accounts.iter().any(|account| account.rank == rank) {
            continue;
        }
        if let Some(account) = trace.account(rank, iteration)? {
            accounts.push(Account { rank, why, parts: parts(&account) });
        }
    }
    Ok(accounts)
}

fn shortened(mut waiting: Waiting, top: usize) -> Waiting {
    waiting.blame.truncate(top);
    waiting.communicators.truncate(top);
    waiting
}

fn slack(trace: &JobTrace, top: usize, notes: &mut Vec<String>) -> Result<Option<SlackReport>, SimError> {
    let slack = match trace.slack() {
        Ok(slack) => slack,
        Err(error @ SimError::Unavailable { .. }) => {
            notes.push(error.to_string());
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let ranks = (0..slack.by_rank.len() as u32).map(Rank);
    let mut all: Vec<RankSlack> = ranks
        .filter_map(|rank| Some(RankSlack { rank, slack_ns: slack.of_rank(rank)?.as_ps().div_euclid(1000) }))
        .collect();
    let ranks_without = all.iter().filter(|own| own.slack_ns == 0).count() as u64;
    all.sort_by_key(|own| std::cmp::Reverse(own.slack_ns));
    all.truncate(top);
    all.retain(|own| own.slack_ns > 0);
    Ok(Some(SlackReport { ranks_without, most: all, is_exact: slack.is_exact }))
}

/// Ranks and classes of compute on the path, and the network.
fn parameters(path: &Path, culprit: Option<&Culprit>) -> Vec<Parameter> {
    const RANKS: usize = 3;
    let mut classes: BTreeSet<ComputeClass> = BTreeSet::new();
    let mut uses_network = false;
    for segment in &path.segments {
        match segment.spent {
            Spent::Compute { class } if !class.is_fixed() => _ = classes.insert(class),
            Spent::Collective { .. } | Spent::Message { .. } => uses_network = true,
            _ => {}
        }
    }
    let computes = |segment: &&Segment| matches!(segment.spent, Spent::Compute { .. });
    let compute = path.segments.iter().filter(computes).copied().collect();
    let on_path = Path { segments: compute, ..*path }.by_rank();
    let mut ranks: Vec<Rank> = culprit.map(|culprit| culprit.ranks[0]).into_iter().collect();
    for (rank, _) in on_path.into_iter().take(RANKS) {
        if !ranks.contains(&rank) {
            ranks.push(rank);
        }
    }
    let mut parameters: Vec<Parameter> = ranks.into_iter().map(|rank| Parameter::RankSpeed { rank }).collect();
    parameters.extend(classes.into_iter().map(|class| Parameter::ComputeClass { class }));
    if uses_network {
        use Parameter as P;
        let network =
            [P::NvlinkBandwidth, P::NvlinkLatency, P::NetworkBandwidth, P::NetworkLatency, P::CollectiveLaunch];
        parameters.extend(network);
    }
    parameters
}

fn headline(path: &Path, waiting: &Waiting, memory: Option<&MemoryNeed>) -> String {
    if let Some(too_little) = memory.and_then(MemoryNeed::headline) {
        return too_little;
    }
    let Some(culprit) = &waiting.culprit else {
        let largest = path
            .totals()
            .into_iter()
            .take(3)
            .map(|(spent, ns)| format!("{:.1} % {}", 100.0 * share(ns, path.total_ns()), words(spent)));
        let fits = memory.map_or_else(String::new, |memory| format!(", {}", memory.words()));
        let path = largest.collect::<Vec<_>>().join(", ");
        return format!("nothing wrong found: no rank holds up the others{fits}; the critical path is {path}");
    };
    let ms = |ns: i64| format!("{:.3} ms", ns as f64 / 1e6);
    let who = name(&culprit.ranks);
    let (verb, waits, own) =
        if culprit.ranks.len() == 1 { ("holds", "waits", "its") } else { ("hold", "wait", "their") };
    let why = match culprit.cause {
        Cause::Compute => format!(
            "{own} compute takes {} where {} other{} take{} {}",
            ms(culprit.compute_ns),
            culprit.compared_with,
            if culprit.compared_with == 1 { "" } else { "s" },
            if culprit.compared_with == 1 { "s" } else { "" },
            ms(culprit.usual_compute_ns)
        ),
        Cause::Program => {
            let program = if culprit.ranks.len() == 1 { "its program" } else { "their program" };
            format!(
                "{program} computes {} where the median of the others computes {}",
                ms(culprit.compute_ns),
                ms(culprit.usual_compute_ns)
            )
        }
        Cause::Communication | Cause::Host => match culprit.longer {
            Some(longer) => format!(
                "{own} {} takes {} where the median of others takes {}",
                words_of_all(longer.spent),
                ms(longer.ns),
                ms(longer.usual_ns)
            ),
            None => format!("{own} communication takes longer"),
        },
        Cause::NotCompute => {
            format!("nothing of {own} own takes longer than with others: look at what comes before the iteration")
        }
    };
    format!(
        "{who} {verb} up the others: {waits} {} where the median rank waits {}; {why}",
        ms(culprit.waited_ns),
        ms(culprit.median_waited_ns)
    )
}

/// A kind of time over all communicators, with the one that has most of it.
fn words_of_all(spent: Spent) -> String {
    match spent {
        Spent::Collective { communicator } => {
            format!("time in collectives (most on communicator {communicator})")
        }
        Spent::Message { communicator } => format!("time in messages (most on communicator {communicator})"),
        other => words(other),
    }
}

fn words(spent: Spent) -> String {
    match spent {
        Spent::Compute { class } if class.is_fixed() => "recorded waits".to_owned(),
        Spent::Compute { class } => format!("{class:?} compute").to_lowercase(),
        Spent::Collective { communicator } => format!("collectives of communicator {communicator}"),
        Spent::Message { communicator } => format!("messages of communicator {communicator}"),
        Spent::Waiting { communicator } => format!("waiting on communicator {communicator}"),
        Spent::Bubble { communicator } => format!("waiting for messages of communicator {communicator}"),
        Spent::Host => "host".to_owned(),
        Spent::Idle => "idle".to_owned(),
    }
}

/// Communicators whose members run different programs: that their calls pair the same tensors cannot be told.
fn notes(graph: &Graph) -> Vec<String> {
    let has_collectives = |template: TemplateId, slot: usize| {
        let is_such = |kind| matches!(kind, OpKind::Collective { slot: own, .. } if own.index() == slot);
        graph.template(template).iter().any(|op| is_such(op.kind))
    };
    let is_mixed = |comm: &u32| {
        let members = graph.comm_members(CommId(*comm));
        let template = |rank: u32| graph.rank_template(Rank(rank));
        let Some(first) = members.first() else { return false };
        let slot = graph.rank_slots(Rank(*first)).iter().position(|own| own == comm);
        members.iter().any(|rank| template(*rank) != template(*first))
            && slot.is_some_and(|slot| has_collectives(template(*first), slot))
    };
    let mixed = (0..graph.num_comms() as u32).filter(is_mixed).count();
    if mixed == 0 {
        return Vec::new();
    }
    let plural = if mixed == 1 { "communicator joins" } else { "communicators join" };
    vec![format!(
        "{mixed} {plural} ranks with different programs: their collectives agree in kind, size, type and order; that they \
         carry the same tensors is not recorded"
    )]
}
