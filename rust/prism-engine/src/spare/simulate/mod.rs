//! Discrete-event simulation of a training job whose groups fail, under one of several policies.
//!
//! All policies see the same failures: every group (and every failure domain) is a renewal process in absolute time, drawn
//! from the seed alone. A job is a sequence of steps; failures during a step are noticed at its all-reduce. The simulated
//! set-up is that of arXiv 2603.00357 if [`Setup::published`] is set, including what handicaps its baseline: replication draws
//! one jitter for all entries of a step, and `ceil(N/r)` blocks of which the last may be a singleton. Otherwise both are put
//! right.

mod normal;
mod policy;
mod recover;
mod statistics;
mod timeline;
mod trace;

pub use policy::{run, run_with_timeline};
pub use statistics::{Band, Summary, summarise};
pub use timeline::{Activity, MAX_SPANS, Span};
pub use trace::{Distribution, Domain, Failures, MAX_TRACE, Trace, TracedFailure};

use super::placement::Placement;
use super::{SpareError, check_groups, check_redundancy, not_negative, positive};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// The job.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Model-parallel groups, `N`; also the number of shard types.
    pub groups: u32,
    /// Optimiser steps.
    pub steps: u64,
    /// Compute of one stack entry, seconds.
    pub compute_s: f64,
    /// All-reduce of one step, seconds.
    pub all_reduce_s: f64,
    /// Standard deviation of the compute of an entry, relative to `compute_s`.
    pub jitter: f64,
    /// Time to read the data of one more stack entry in every step, seconds; not hidden behind compute.
    pub data_s: f64,
    /// Time to read the data of one type for one step in the background, seconds. A group reads those of all the types it
    /// holds, so that it can take over any of them at once: no step is shorter than `r` times this.
    #[serde(default)]
    pub prefetch_s: f64,
}

/// What a failure costs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// Time to write a checkpoint, seconds.
    pub save_s: f64,
    /// How long a save holds the job, seconds: `save_s`, or less if it is written in the background.
    pub stall_s: f64,
    /// Steps between checkpoints.
    pub checkpoint_steps: u64,
    /// Time to restart from a checkpoint, seconds, per group without a failure in it.
    pub restart_s: f64,
    /// From a failure to its being noticed, seconds, on top of the step.
    pub detection_s: f64,
    /// Time to shrink a communicator, seconds.
    pub shrink_s: f64,
    /// From the moment a failure is noticed until the group is whole again, seconds. Under every policy it then joins again, and a restart that
    /// needs it waits for it. `None`: it is replaced at the next restart, within the restart time, and not before (the
    /// published set-up; elastic shrinking and hot spares need a number).
    pub repair_s: Option<f64>,
    /// To put a spare in the place of a failed group, seconds.
    pub swap_s: f64,
    /// How long all wait when repaired groups join again, seconds: communicators grow, weights come from a peer.
    #[serde(default)]
    pub rejoin_s: f64,
    /// What a restart takes on top, in seconds, for the square of the number of groups: everybody meets everybody.
    #[serde(default)]
    pub restart_square_s: f64,
    /// Restart storms: a failure within a restart makes everybody begin anew instead of the failed group alone.
    #[serde(default)]
    pub restarts_together: bool,
    /// What saving takes on top for each type a group holds, seconds.
    #[serde(default)]
    pub save_per_type_s: f64,
    /// What restarting takes on top for each type a group holds, seconds.
    #[serde(default)]
    pub restart_per_type_s: f64,
    /// Checkpoints on the groups' own machines, between those on the storage.
    #[serde(default)]
    pub local: Option<LocalLevel>,
}

/// Checkpoints on the groups' own machines: quick, but lost with a machine.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalLevel {
    /// Time to write one, seconds; the job waits.
    pub save_s: f64,
    /// Steps between them.
    pub checkpoint_steps: u64,
    /// Time to restart from one, seconds.
    pub restart_s: f64,
    /// Share of restarts for which the local copies of all groups survive; the others go back to the storage.
    pub share: f64,
}

/// What the job does about failures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Stacks of `r` types, reordered after failures.
    Spare {
        /// Hosts of a type.
        r: u32,
        /// Which group hosts what.
        placement: Placement,
    },
    /// Blocks of `r` groups that all do the work of `r` types.
    Replication {
        /// Groups of a block.
        r: u32,
    },
    /// Every failure restarts the job.
    Checkpoint,
    /// A failed group is left out, its work is shared, and it joins again when repaired; the step it failed in is lost.
    Elastic,
    /// A failure restarts the job from the checkpoint, at once if a spare group takes over.
    Spares {
        /// Spare groups, on top of the job's.
        spares: u32,
    },
}

/// A simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// The job.
    pub job: Job,
    /// Its failures.
    pub failures: Failures,
    /// What they cost.
    pub recovery: Recovery,
    /// What is done about them.
    pub policy: Policy,
    /// With the published handicaps of the baseline.
    pub published: bool,
    /// Give up at this multiple of the time without failures.
    pub give_up: f64,
}

/// One simulated training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Run {
    /// From start to end (or until it was given up), seconds.
    pub total_s: f64,
    /// Over the time without failures and redundancy.
    pub relative_time: f64,
    /// Share of the time outside restarts; saving and repeated steps count as up, as published.
    pub availability: f64,
    /// Share of the time that made lasting progress, at the speed without failures and redundancy.
    pub goodput: f64,
    /// Failures of live groups.
    pub failures: u64,
    /// Restarts from a checkpoint.
    pub restarts: u64,
    /// Failures after which stacks were reordered.
    pub reorders: u64,
    /// Steps that had to be repeated.
    pub repeated_steps: u64,
    /// Mean stack entries computed in a step.
    pub mean_stacks: f64,
    /// Restarts from the groups' own checkpoints (counted in `restarts` too).
    pub local_restarts: u64,
    /// Groups that joined again after a repair.
    pub rejoins: u64,
    /// Share of the job that was done: 1 unless it was given up.
    pub progress: f64,
    /// How long the training went on after the end of the observed trace, seconds: nothing failed then. 0 without a trace.
    pub beyond_trace_s: f64,
}

impl Job {
    /// Time without failures and redundancy, seconds.
    #[must_use]
    pub fn ideal_s(&self) -> f64 {
        self.steps as f64 * (self.compute_s + self.all_reduce_s)
    }
}

impl Setup {
    /// Refuses what makes no sense, by name.
    pub fn check(&self) -> Result<(), SpareError> {
        let (job, recovery) = (&self.job, &self.recovery);
        check_groups(job.groups)?;
        if job.steps == 0 {
            return Err(SpareError::invalid("steps", 0, "there must be at least one"));
        }
        if recovery.checkpoint_steps == 0 {
            return Err(SpareError::invalid("checkpoint_steps", 0, "there must be at least one step between saves"));
        }
        positive("compute_s", job.compute_s)?;
        let not_negative_ones = [
            ("all_reduce_s", job.all_reduce_s),
            ("data_s", job.data_s),
            ("prefetch_s", job.prefetch_s),
            ("save_s", recovery.save_s),
            ("stall_s", recovery.stall_s),
            ("restart_s", recovery.restart_s),
            ("detection_s", recovery.detection_s),
            ("shrink_s", recovery.shrink_s),
            ("repair_s", recovery.repair_s.unwrap_or(0.0)),
            ("swap_s", recovery.swap_s),
            ("rejoin_s", recovery.rejoin_s),
            ("restart_square_s", recovery.restart_square_s),
            ("save_per_type_s", recovery.save_per_type_s),
            ("restart_per_type_s", recovery.restart_per_type_s),
        ];
        for (field, value) in not_negative_ones {
            not_negative(field, value)?;
        }
        if !(0.0..=0.3).contains(&job.jitter) {
            return Err(SpareError::invalid("jitter", job.jitter, "it must be between 0 and 0.3"));
        }
        if recovery.stall_s > recovery.save_s {
            let expected = format!("a save holds the job no longer than save_s, {}", recovery.save_s);
            return Err(SpareError::invalid("stall_s", recovery.stall_s, expected));
        }
        if let Some(local) = &recovery.local {
            local.check()?;
        }
        if !(self.give_up > 1.0 && self.give_up <= 1e6) {
            return Err(SpareError::invalid("give_up", self.give_up, "it must be above 1 and at most 1000000"));
        }
        self.failures.check(job.groups)?;
        match &self.policy {
            Policy::Spare { r, placement } => placement.stacks(job.groups, *r).map(|_| ()),
            Policy::Replication { r } => check_redundancy(job.groups, *r),
            Policy::Spares { spares } if *spares > job.groups => {
                Err(SpareError::invalid("spares", spares, format!("more than the {} groups of the job", job.groups)))
            }
            Policy::Elastic | Policy::Spares { .. } if recovery.repair_s.is_none() => {
                let expected = "elastic shrinking and hot spares need the time until a group is whole again";
                Err(SpareError::invalid("repair_s", "missing", expected))
            }
            Policy::Checkpoint | Policy::Elastic | Policy::Spares { .. } => Ok(()),
        }
    }

    /// Types whose data a group holds.
    fn held(&self) -> f64 {
        match self.policy {
            Policy::Spare { r, .. } | Policy::Replication { r } => f64::from(r),
            Policy::Checkpoint | Policy::Elastic | Policy::Spares { .. } => 1.0,
        }
    }

    /// Time to write a checkpoint, and how long that holds the job, seconds.
    fn save(&self) -> (f64, f64) {
        let recovery = &self.recovery;
        let all = recovery.save_s + recovery.save_per_type_s * self.held();
        (all, if recovery.stall_s >= recovery.save_s { all } else { recovery.stall_s })
    }

    /// Time to restart without a failure in it, seconds.
    fn restart(&self, is_local: bool) -> f64 {
        let (recovery, n) = (&self.recovery, f64::from(self.job.groups));
        let base = recovery.local.filter(|_| is_local).map_or(recovery.restart_s, |local| local.restart_s);
        base + recovery.restart_square_s * n * n + recovery.restart_per_type_s * self.held()
    }
}

impl LocalLevel {
    fn check(&self) -> Result<(), SpareError> {
        not_negative("local.save_s", self.save_s)?;
        not_negative("local.restart_s", self.restart_s)?;
        if self.checkpoint_steps == 0 {
            let expected = "there must be at least one step between local saves";
            return Err(SpareError::invalid("local.checkpoint_steps", 0, expected));
        }
        if (0.0..=1.0).contains(&self.share) {
            return Ok(());
        }
        Err(SpareError::invalid("local.share", self.share, "it must be between 0 and 1"))
    }
}

/// Most simulated trainings of one call: their results are kept in memory.
pub const MAX_SEEDS: usize = 1 << 22;

/// Simulates the training once per seed, on `threads` threads. The result does not depend on their number.
pub fn run_seeds(setup: &Setup, seeds: std::ops::Range<u64>, threads: NonZeroU32) -> Result<Vec<Run>, SpareError> {
    setup.check()?;
    let count = seeds.end.saturating_sub(seeds.start);
    if count > MAX_SEEDS as u64 {
        return Err(SpareError::invalid(
            "seeds",
            count,
            format!("at most {MAX_SEEDS} trainings are simulated at once"),
        ));
    }
    let seeds: Vec<u64> = seeds.collect();
    let mut runs = vec![Run::default(); seeds.len()];
    let share = seeds.len().div_ceil(threads.get() as usize).max(1);
    std::thread::scope(|scope| {
        for (seeds, runs) in seeds.chunks(share).zip(runs.chunks_mut(share)) {
            scope.spawn(move || {
                for (seed, result) in seeds.iter().zip(runs) {
                    *result = run(setup, *seed);
                }
            });
        }
    });
    Ok(runs)
}
