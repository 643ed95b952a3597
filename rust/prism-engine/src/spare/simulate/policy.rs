//! The job under each policy.

use super::trace::Trace;
use super::{Policy, Run, Setup};
use crate::perturb::random::Random;
use crate::spare::layout::{Action, Layout, Move};
use libm::{expm1, log, sqrt};

/// Simulates one training. The set-up must have been checked.
#[must_use]
pub fn run(setup: &Setup, seed: u64) -> Run {
    let mut simulation = Simulation::new(setup, seed);
    while simulation.step < setup.job.steps && simulation.now < simulation.limit {
        simulation.advance();
    }
    simulation.result()
}

/// How failed groups are dealt with.
#[derive(Debug)]
enum State {
    Spare {
        layout: Box<Layout>,
        moves: Vec<Move>,
    },
    /// Live groups of every block.
    Replication {
        r: u32,
        blocks: Vec<u32>,
        sizes: Vec<u32>,
        block_of: Vec<u32>,
        is_live: Vec<bool>,
        live: u32,
    },
    Checkpoint,
    /// When each failed group joins again.
    Elastic {
        back: Vec<f64>,
        live: u32,
    },
    /// When each used spare is whole again.
    Spares {
        idle: u32,
        back: Vec<f64>,
    },
}

#[derive(Debug)]
struct Simulation<'a> {
    setup: &'a Setup,
    trace: Trace<'a>,
    random: Random,
    state: State,
    now: f64,
    limit: f64,
    step: u64,
    saved: u64,
    /// A save in the background, until it is finished: step and time.
    saving: Option<(u64, f64)>,
    down: f64,
    stack_sum: f64,
    steps_run: u64,
    run: Run,
}

/// What a step's failures come to.
enum Outcome {
    Done,
    /// The step must be repeated.
    Lost,
    /// So many entries must be computed once more, in the same step.
    Patch(u32),
    /// Back to the checkpoint; `true`: every group starts anew.
    Back(bool),
}

impl<'a> Simulation<'a> {
    fn new(setup: &'a Setup, seed: u64) -> Self {
        let n = setup.job.groups;
        let state = match &setup.policy {
            Policy::Spare { r, placement } => {
                let stacks = placement.stacks(n, *r).expect("checked");
                State::Spare { layout: Box::new(Layout::new(stacks)), moves: Vec::new() }
            }
            Policy::Replication { r } => replication(n, *r, setup.published),
            Policy::Checkpoint => State::Checkpoint,
            Policy::Elastic => State::Elastic { back: vec![0.0; n as usize], live: n },
            Policy::Spares { spares } => State::Spares { idle: *spares, back: Vec::new() },
        };
        Self {
            setup,
            trace: Trace::new(&setup.failures, n, seed),
            random: Random::of(seed, &[u64::MAX]),
            state,
            now: 0.0,
            limit: setup.give_up * setup.job.ideal_s(),
            step: 0,
            saved: 0,
            saving: None,
            down: 0.0,
            stack_sum: 0.0,
            steps_run: 0,
            run: Run::default(),
        }
    }

    fn live(&self) -> u32 {
        match &self.state {
            State::Spare { layout, .. } => layout.live(),
            State::Replication { live, .. } | State::Elastic { live, .. } => *live,
            State::Checkpoint | State::Spares { .. } => self.setup.job.groups,
        }
    }

    /// Time until the slowest of the live groups has computed `entries` entries, each with a jitter of its own.
    fn compute(&mut self, entries: f64) -> f64 {
        let job = &self.setup.job;
        let spread = match (&self.state, self.setup.published) {
            // One draw for all entries of a block.
            (State::Replication { .. }, true) => entries,
            _ => sqrt(entries),
        };
        let live = self.live();
        let latest = if job.jitter == 0.0 { 0.0 } else { largest_normal(&mut self.random, live) };
        let job = &self.setup.job;
        (job.compute_s * (entries + spread * job.jitter * latest)).max(0.0) + job.data_s * entries
    }

    fn entries(&self) -> f64 {
        match &self.state {
            State::Spare { layout, .. } => f64::from(layout.stacks()),
            State::Replication { r, .. } => f64::from(*r),
            State::Checkpoint | State::Spares { .. } => 1.0,
            // The work of those that are missing is shared evenly.
            State::Elastic { live, .. } => f64::from(self.setup.job.groups) / f64::from((*live).max(1)),
        }
    }

    fn advance(&mut self) {
        self.rejoin();
        let entries = self.entries();
        self.stack_sum += entries;
        self.steps_run += 1;
        let computed = self.compute(entries);
        let all_reduce = self.setup.job.all_reduce_s;
        let struck = self.strike(self.now + computed + all_reduce);
        if struck.is_empty() {
            self.now += computed + all_reduce;
            return self.finish_step();
        }
        // The all-reduce that finds a member missing is given up half-way, on average.
        self.now += computed + all_reduce / 2.0 + self.setup.recovery.detection_s;
        let mut outcome = self.lose(&struck);
        loop {
            match outcome {
                Outcome::Done => return self.finish_step(),
                Outcome::Lost => {
                    self.run.repeated_steps += 1;
                    return;
                }
                Outcome::Patch(entries) => {
                    self.run.reorders += 1;
                    self.now += self.compute(f64::from(entries)) + self.setup.recovery.shrink_s;
                    let struck = self.strike(self.now);
                    outcome = if struck.is_empty() { Outcome::Done } else { self.lose(&struck) };
                }
                Outcome::Back(everybody) => return self.go_back(everybody),
            }
        }
    }

    fn finish_step(&mut self) {
        self.step += 1;
        let recovery = &self.setup.recovery;
        self.land();
        if self.step.is_multiple_of(recovery.checkpoint_steps) && self.step < self.setup.job.steps {
            let done = self.now + recovery.save_s;
            self.now += recovery.stall_s;
            // A save is started only when the last one is finished.
            let begins = self.saving.map_or(done, |(_, last)| done.max(last + recovery.save_s));
            self.saving = Some((self.step, begins));
            self.land();
        }
    }

    /// A background save counts when it is finished.
    fn land(&mut self) {
        if let Some((step, done)) = self.saving
            && done <= self.now
        {
            self.saved = step;
            self.saving = None;
        }
    }

    /// Live groups struck until then, each once.
    fn strike(&mut self, until: f64) -> Vec<u32> {
        let mut struck = Vec::new();
        while let Some((time, groups)) = self.trace.pop(until) {
            for group in groups {
                if !struck.contains(&group) && self.is_struck(group, time) {
                    struck.push(group);
                }
            }
        }
        self.run.failures += struck.len() as u64;
        struck
    }

    fn is_struck(&self, group: u32, time: f64) -> bool {
        match &self.state {
            State::Spare { layout, .. } => layout.is_live(group),
            State::Replication { is_live, .. } => is_live[group as usize],
            State::Checkpoint | State::Spares { .. } => true,
            State::Elastic { back, .. } => back[group as usize] <= time,
        }
    }

    fn lose(&mut self, struck: &[u32]) -> Outcome {
        let repair = self.setup.recovery.repair_s;
        let now = self.now;
        match &mut self.state {
            State::Spare { layout, moves } => match layout.lose(struck, moves) {
                Action::Continue => Outcome::Done,
                Action::WipeOut => Outcome::Back(true),
                Action::Reorder => {
                    let most = moves.chunk_by(|a, b| a.group == b.group).map(<[Move]>::len).max().unwrap_or(1);
                    Outcome::Patch(if self.setup.published { 1 } else { most as u32 })
                }
            },
            State::Replication { blocks, block_of, is_live, live, .. } => {
                let mut is_lost = false;
                for group in struck {
                    is_live[*group as usize] = false;
                    *live -= 1;
                    let left = &mut blocks[block_of[*group as usize] as usize];
                    *left -= 1;
                    is_lost |= *left == 0;
                }
                if is_lost { Outcome::Back(true) } else { Outcome::Done }
            }
            State::Checkpoint => Outcome::Back(true),
            State::Elastic { back, live } => {
                for group in struck {
                    back[*group as usize] = now + repair;
                    *live -= 1;
                }
                self.now += self.setup.recovery.shrink_s;
                if *live == 0 { Outcome::Back(true) } else { Outcome::Lost }
            }
            State::Spares { idle, back } => {
                let needed = struck.len() as u32;
                back.extend(struck.iter().map(|_| now + repair));
                let is_covered = *idle >= needed;
                *idle = idle.saturating_sub(needed);
                Outcome::Back(!is_covered)
            }
        }
    }

    /// Repaired groups are back.
    fn rejoin(&mut self) {
        let now = self.now;
        match &mut self.state {
            State::Elastic { back, live } if *live < self.setup.job.groups => {
                *live = back.iter().filter(|back| **back <= now).count() as u32;
            }
            State::Spares { idle, back } if !back.is_empty() => {
                let before = back.len();
                back.retain(|time| *time > now);
                let most = match self.setup.policy {
                    Policy::Spares { spares } => spares,
                    _ => 0,
                };
                *idle = (*idle + (before - back.len()) as u32).min(most);
            }
            _ => {}
        }
    }

    /// Back to the checkpoint.
    fn go_back(&mut self, everybody: bool) {
        self.run.restarts += 1;
        self.run.repeated_steps += self.step + 1 - self.saved;
        self.step = self.saved;
        self.saving = None;
        let start = self.now;
        let dead = if everybody {
            self.restart()
        } else {
            self.now += self.setup.recovery.swap_s;
            Vec::new()
        };
        self.down += self.now - start;
        match &mut self.state {
            State::Spare { layout, .. } => layout.reset(),
            State::Replication { blocks, sizes, is_live, live, .. } => {
                blocks.clone_from(sizes);
                is_live.fill(true);
                *live = self.setup.job.groups;
            }
            State::Elastic { back, live } => {
                back.fill(0.0);
                *live = self.setup.job.groups;
            }
            State::Checkpoint | State::Spares { .. } => {}
        }
        if let Policy::Spares { spares } = self.setup.policy
            && everybody
            && let State::Spares { idle, back } = &mut self.state
        {
            *idle = spares;
            back.clear();
        }
        if !dead.is_empty() && !matches!(self.state, State::Checkpoint | State::Spares { .. }) {
            self.run.failures += dead.len() as u64;
            match self.lose(&dead) {
                Outcome::Back(everybody) => self.go_back(everybody),
                Outcome::Patch(_) => self.run.reorders += 1,
                Outcome::Done | Outcome::Lost => {}
            }
        }
    }

    /// Every group restarts until it gets through without a failure; the job goes on when the last has. Returns the groups
    /// that have failed since they were ready.
    fn restart(&mut self) -> Vec<u32> {
        let window = self.setup.recovery.restart_s;
        let start = self.now;
        let mut ready = std::collections::BTreeMap::new();
        let mut all = start + window;
        let mut dead = std::collections::BTreeSet::new();
        // A window may be broken again and again; what is given up is told by the progress.
        while let Some((time, groups)) = self.trace.pop(all.min(self.limit)) {
            for group in groups {
                let end = ready.entry(group).or_insert(start + window);
                if time < *end {
                    *end = time + window;
                    all = all.max(*end);
                } else {
                    dead.insert(group);
                }
            }
        }
        self.now = all;
        dead.into_iter().collect()
    }

    fn result(self) -> Run {
        let job = &self.setup.job;
        let progress = (self.step as f64 / job.steps as f64).min(1.0);
        Run {
            total_s: self.now,
            relative_time: self.now / job.ideal_s(),
            availability: 1.0 - self.down / self.now,
            goodput: progress * job.ideal_s() / self.now,
            mean_stacks: self.stack_sum / self.steps_run.max(1) as f64,
            progress,
            ..self.run
        }
    }
}

fn replication(n: u32, r: u32, published: bool) -> State {
    let (count, block_of): (u32, Vec<u32>) = if published {
        (n.div_ceil(r), (0..n).map(|group| group / r).collect())
    } else {
        // No block below r: the rest of the groups make some blocks larger.
        let count = n / r;
        (count, (0..n).map(|group| group % count).collect())
    };
    let mut sizes = vec![0; count as usize];
    for block in &block_of {
        sizes[*block as usize] += 1;
    }
    State::Replication { r, blocks: sizes.clone(), sizes, block_of, is_live: vec![true; n as usize], live: n }
}

/// The largest of `count` standard normal numbers, in one draw: if `U` is uniform, so is the `count`-th power of the
/// distribution function of the maximum.
fn largest_normal(random: &mut Random, count: u32) -> f64 {
    let above = -expm1(log(random.uniform()) / f64::from(count.max(1)));
    -normal_quantile(above)
}

/// Inverse of the standard normal distribution function (Acklam's rational approximation, relative error 1.2e-9).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let q = sqrt(-2.0 * log(p));
        poly(&C, q) / (poly(&D, q) * q + 1.0)
    };
    if p < 0.024_25 {
        tail(p)
    } else if p > 1.0 - 0.024_25 {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        poly(&A, q * q) * q / (poly(&B, q * q) * q * q + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_many_normals_has_the_known_mean() {
        for (count, expected) in [(1, 0.0), (200, 2.746), (600, 3.09), (1000, 3.241)] {
            let draw = |n: u64| largest_normal(&mut Random::of(1, &[n]), count);
            let mean = (0..40_000).map(draw).sum::<f64>() / 40_000.0;
            assert!((mean - expected).abs() < 0.02, "{count}: {mean} instead of {expected}");
        }
    }
}
