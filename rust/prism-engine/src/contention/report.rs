//! What an evaluation has to say about ranks.

use super::overlap::FactorProvenance;
use super::{BusiestPort, Contention, Evaluation, Overlap};
use crate::graph::op::{ComputeClass, Provenance};
use crate::ids::Rank;
use crate::lower::{Job, Work};
use crate::sim::{DeviceTime, RankReport, SimReport};
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;

/// A replay by messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// How messages share the network.
    pub contention: &'static str,
    /// Messages evaluated.
    pub messages: u64,
    /// The job's end without contention and overlap, ns.
    pub total_time_alone_ns: i64,
    /// The port with most work, if there is any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busiest_port: Option<BusiestPort>,
    /// If computing beside communication is slower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap: Option<OverlapReport>,
}

/// What computing beside communication has cost, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OverlapReport {
    /// Where the factors come from.
    pub provenance: FactorProvenance,
    /// Computing, ns, with what was added.
    pub compute_ns: i64,
    /// Of it, the time during which it was slowed down, ns.
    pub stretched_ns: i64,
    /// What that has added, ns.
    pub added_ns: i64,
    /// `stretched_ns` of `compute_ns`, in millionths.
    pub stretched_ppm: i64,
}

fn whole_ns(ps: i128) -> i64 {
    i64::try_from(ps / 1000).unwrap_or(i64::MAX)
}

fn whole_times<K: Ord>(sums: BTreeMap<K, i128>) -> BTreeMap<K, i64> {
    sums.into_iter().map(|(key, sum)| (key, whole_ns(sum))).filter(|(_, time)| *time > 0).collect()
}

impl Evaluation {
    /// The ranks' times, in the form of a replay.
    #[must_use]
    pub fn report(&self, job: &Job) -> SimReport {
        let time = |node: u32| self.ends[node as usize];
        let ranks = job.ranks.iter().zip(&job.marks).map(|(rank, marks)| RankReport {
            rank: Rank(*rank),
            training_begin: marks.training_begin.map(time),
            iteration_ends: marks.iteration_ends.iter().map(|node| time(*node)).collect(),
            final_time: time(marks.last),
            device_time: None,
            comms: Vec::new(),
        });
        SimReport {
            ranks: ranks.collect(),
            ops_evaluated: job.num_ops,
            roles: job.ranks.len(),
            classes: job.ranks.len(),
            device_time: self.device_time(job),
        }
    }

    /// What overlap has cost, if there is any.
    #[must_use]
    pub fn overlap_report(&self, job: &Job, overlap: &Overlap) -> Option<OverlapReport> {
        if overlap.is_none() {
            return None;
        }
        let compute = self.compute(job).values().sum::<i128>();
        Some(OverlapReport {
            provenance: overlap.provenance,
            compute_ns: whole_ns(compute),
            stretched_ns: whole_ns(self.stretched),
            added_ns: whole_ns(self.added),
            stretched_ppm: i64::try_from(self.stretched * 1_000_000 / compute.max(1)).unwrap_or(0),
        })
    }

    /// When the last rank is through.
    #[must_use]
    pub fn end(&self, job: &Job) -> SimTime {
        job.marks.iter().map(|marks| self.ends[marks.last as usize]).max().unwrap_or_default()
    }

    fn start_of(&self, job: &Job, node: u32) -> SimTime {
        let before = job.nodes.before(node).iter();
        before.map(|before| self.ends[*before as usize]).max().unwrap_or_default()
    }

    fn compute(&self, job: &Job) -> BTreeMap<(ComputeClass, Provenance), i128> {
        let mut sums = BTreeMap::new();
        for (node, work) in job.nodes.work.iter().enumerate() {
            if let Work::Compute(class, provenance) = *work {
                let passed = self.ends[node] - self.start_of(job, node as u32);
                *sums.entry((class, provenance)).or_insert(0) += i128::from(passed.as_ps());
            }
        }
        sums
    }

    fn device_time(&self, job: &Job) -> DeviceTime {
        let (mut classes, mut provenances) = (BTreeMap::new(), BTreeMap::new());
        for ((class, provenance), sum) in self.compute(job) {
            *classes.entry(class).or_insert(0) += sum;
            *provenances.entry(provenance).or_insert(0) += sum;
        }
        let mut communication = 0;
        for (node, work) in job.nodes.work.iter().enumerate() {
            if *work == Work::End {
                let begin = self.ends[job.nodes.before(node as u32)[0] as usize];
                communication += i128::from((self.ends[node] - begin).as_ps());
            }
        }
        DeviceTime {
            by_provenance: whole_times(provenances),
            by_class: whole_times(classes),
            communication: whole_ns(communication),
        }
    }
}

impl Traffic {
    /// Facts about an evaluation of a job that ends at `alone` without contention.
    #[must_use]
    pub fn new(job: &Job, evaluation: &Evaluation, contention: Contention, overlap: &Overlap, alone: SimTime) -> Self {
        Self {
            contention: contention.name(),
            messages: job.num_messages(),
            total_time_alone_ns: alone.as_ns(),
            busiest_port: job.busiest_port().map(|(port, used)| BusiestPort { port, used_ns: used.as_ns() }),
            overlap: evaluation.overlap_report(job, overlap),
        }
    }
}
