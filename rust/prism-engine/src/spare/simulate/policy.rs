//! The job under each policy.

use super::normal::largest_normal;
use super::timeline::{Activity, Span, Timeline};
use super::trace::FailureStream;
use super::{Policy, Run, Setup};
use crate::perturb::random::Random;
use crate::spare::layout::{Action, Layout, Move};
use libm::sqrt;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Simulates one training. The set-up must have been checked.
#[must_use]
pub fn run(setup: &Setup, seed: u64) -> Run {
    Simulation::new(setup, seed, Timeline::default()).run().0
}

/// Simulates one training, and says what it did when. The set-up must have been checked.
#[must_use]
pub fn run_with_timeline(setup: &Setup, seed: u64) -> (Run, Vec<Span>) {
    Simulation::new(setup, seed, Timeline::recording()).run()
}

/// How failed groups are dealt with.
#[derive(Debug)]
pub(super) enum State {
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
    /// Whatever failed is replaced within the restart.
    Checkpoint,
    Elastic {
        is_live: Vec<bool>,
        live: u32,
    },
    /// Spare groups, perhaps none: the job needs `N` groups that are whole.
    Spares {
        idle: u32,
        /// When each group under repair is whole again.
        back: Vec<f64>,
        /// Groups without which the job cannot go on.
        missing: u32,
    },
}

#[derive(Debug)]
pub(super) struct Simulation<'a> {
    pub(super) setup: &'a Setup,
    pub(super) seed: u64,
    pub(super) failures: FailureStream<'a>,
    random: Random,
    pub(super) state: State,
    /// Failed groups that will join again: when (as bits, which order like the times), who.
    pub(super) broken: BinaryHeap<Reverse<(u64, u32)>>,
    pub(super) now: f64,
    pub(super) limit: f64,
    pub(super) step: u64,
    /// Step of the last checkpoint on the storage, and of the last one anywhere.
    pub(super) saved: u64,
    pub(super) saved_locally: u64,
    /// A save in the background, until it is finished: step and time.
    pub(super) saving: Option<(u64, f64)>,
    pub(super) down: f64,
    stack_sum: f64,
    steps_run: u64,
    pub(super) run: Run,
    pub(super) timeline: Timeline,
}

/// What a step's failures come to.
pub(super) enum Outcome {
    Done,
    /// The step must be repeated.
    Lost,
    /// So many entries must be computed once more, in the same step.
    Patch(u32),
    /// Back to the checkpoint; `true`: every group starts anew.
    Back(bool),
}

impl<'a> Simulation<'a> {
    fn new(setup: &'a Setup, seed: u64, timeline: Timeline) -> Self {
        let n = setup.job.groups;
        let state = match &setup.policy {
            Policy::Spare { r, placement } => {
                let stacks = placement.stacks(n, *r).expect("checked");
                State::Spare { layout: Box::new(Layout::new(stacks)), moves: Vec::new() }
            }
            Policy::Replication { r } => replication(n, *r, setup.published),
            Policy::Checkpoint if setup.recovery.repair_s.is_none() => State::Checkpoint,
            Policy::Checkpoint => State::Spares { idle: 0, back: Vec::new(), missing: 0 },
            Policy::Elastic => State::Elastic { is_live: vec![true; n as usize], live: n },
            Policy::Spares { spares } => State::Spares { idle: *spares, back: Vec::new(), missing: 0 },
        };
        Self {
            setup,
            seed,
            failures: FailureStream::new(&setup.failures, n, seed),
            random: Random::of(seed, &[u64::MAX]),
            state,
            broken: BinaryHeap::new(),
            now: 0.0,
            limit: setup.give_up * setup.job.ideal_s(),
            step: 0,
            saved: 0,
            saved_locally: 0,
            saving: None,
            down: 0.0,
            stack_sum: 0.0,
            steps_run: 0,
            run: Run::default(),
            timeline,
        }
    }

    fn run(mut self) -> (Run, Vec<Span>) {
        while self.step < self.setup.job.steps && self.now < self.limit {
            self.advance();
        }
        (self.result(), self.timeline.spans())
    }

    /// Time passes.
    pub(super) fn spend(&mut self, activity: Activity, time: f64) {
        let (start_s, end_s) = (self.now, self.now + time);
        self.now = end_s;
        let (step, live, stacks) = (self.step, self.live(), self.entries());
        self.timeline.add(Span { activity, start_s, end_s, step, live, stacks });
    }

    pub(super) fn live(&self) -> u32 {
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
        let computed = self.compute(entries).max(self.setup.job.prefetch_s * self.setup.held());
        let all_reduce = self.setup.job.all_reduce_s;
        let struck = self.strike(self.now + computed + all_reduce);
        if struck.is_empty() {
            self.spend(Activity::Train, computed + all_reduce);
            return self.finish_step();
        }
        // The all-reduce that finds a member missing is given up half-way, on average.
        self.spend(Activity::Train, computed + all_reduce / 2.0);
        self.spend(Activity::Detect, self.setup.recovery.detection_s);
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
                    let patched = self.compute(f64::from(entries));
                    self.spend(Activity::Patch, patched);
                    self.spend(Activity::Detect, self.setup.recovery.shrink_s);
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
        if self.step >= self.setup.job.steps {
            return;
        }
        if self.step.is_multiple_of(recovery.checkpoint_steps) {
            let (save, stall) = self.setup.save();
            let done = self.now + save;
            // A save is started only when the last one is finished.
            let done = self.saving.map_or(done, |(_, last)| done.max(last + save));
            self.spend(Activity::Save, stall);
            self.saving = Some((self.step, done));
            self.land();
        } else if let Some(local) = recovery.local.filter(|local| self.step.is_multiple_of(local.checkpoint_steps)) {
            self.spend(Activity::Save, local.save_s);
            self.saved_locally = self.step;
            self.land();
        }
    }

    /// A background save counts when it is finished.
    fn land(&mut self) {
        if let Some((step, done)) = self.saving
            && done <= self.now
        {
            self.saved = step;
            self.saved_locally = self.saved_locally.max(step);
            self.saving = None;
        }
    }

    /// Live groups struck until then, each once.
    fn strike(&mut self, until: f64) -> Vec<u32> {
        let mut struck = Vec::new();
        while let Some((_, groups)) = self.failures.pop(until) {
            for group in groups {
                if !struck.contains(&group) && self.can_fail(group) {
                    struck.push(group);
                }
            }
        }
        self.run.failures += struck.len() as u64;
        struck
    }

    /// Does a failure of the group matter?
    pub(super) fn can_fail(&self, group: u32) -> bool {
        match &self.state {
            State::Spare { layout, .. } => layout.is_live(group),
            State::Replication { is_live, .. } | State::Elastic { is_live, .. } => is_live[group as usize],
            State::Checkpoint | State::Spares { .. } => true,
        }
    }

    /// Live groups fail; it has just been noticed.
    pub(super) fn lose(&mut self, struck: &[u32]) -> Outcome {
        let whole = self.setup.recovery.repair_s.map(|repair| self.now + repair);
        if let Some(whole) = whole
            && !matches!(self.state, State::Spares { .. })
        {
            self.broken.extend(struck.iter().map(|group| Reverse((whole.to_bits(), *group))));
        }
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
            State::Elastic { is_live, live } => {
                for group in struck {
                    is_live[*group as usize] = false;
                    *live -= 1;
                }
                let is_lost = *live == 0;
                self.spend(Activity::Detect, self.setup.recovery.shrink_s);
                if is_lost { Outcome::Back(true) } else { Outcome::Lost }
            }
            State::Spares { idle, back, missing } => {
                let needed = struck.len() as u32;
                back.extend(struck.iter().map(|_| whole.expect("checked: spares have a repair time")));
                *missing += needed.saturating_sub(*idle);
                *idle = idle.saturating_sub(needed);
                Outcome::Back(*missing > 0 || matches!(self.setup.policy, Policy::Checkpoint))
            }
        }
    }

    fn result(&self) -> Run {
        let job = &self.setup.job;
        let progress = (self.step as f64 / job.steps as f64).min(1.0);
        Run {
            total_s: self.now,
            relative_time: self.now / job.ideal_s(),
            availability: 1.0 - self.down / self.now,
            goodput: progress * job.ideal_s() / self.now,
            mean_stacks: self.stack_sum / self.steps_run.max(1) as f64,
            progress,
            beyond_trace_s: self.setup.failures.trace.as_ref().map_or(0.0, |trace| (self.now - trace.until_s).max(0.0)),
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
