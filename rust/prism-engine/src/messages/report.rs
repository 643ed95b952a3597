//! What is in a program and what an evaluation found, for printing.

use super::loggops::{Evaluation, LogGops};
use super::{MessageOp, MessageProgram};
use crate::ids::Rank;
use serde::Serialize;
use std::collections::BTreeMap;

/// The value of `level` in both documents.
const LEVEL: &str = "message";

/// What is in a message program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProgramSummary {
    /// `message`.
    pub level: &'static str,
    /// Ranks of the job.
    pub world_size: u32,
    /// Ops of all ranks.
    pub ops: u64,
    /// The same by kind: `calc`, `send`, `recv`.
    pub ops_by_kind: BTreeMap<&'static str, u64>,
    /// Ops of the rank that has fewest, and of the one that has most.
    pub ops_per_rank: (u32, u32),
    /// Bytes of all sends.
    pub sent_bytes: u64,
    /// Ticks of all calculations; what a tick is, an evaluation says. `None` past 2^64.
    pub calc_ticks: Option<u64>,
    /// CPU and NIC lanes of a rank.
    pub cpu_lanes: u32,
    /// NIC lanes of a rank.
    pub nic_lanes: u32,
    /// Does a receive take a message from anyone or of any tag?
    pub has_wildcards: bool,
    /// Size of the stored form.
    pub graph_bytes: u64,
}

impl MessageProgram {
    /// What is in the program. O(ops).
    pub fn summary(&self) -> ProgramSummary {
        let lengths = || (0..self.num_ranks()).map(|rank| self.rank(Rank(rank)).len());
        let calcs = self.num_ops() - self.num_sends() - self.num_recvs();
        let mut ticks = Some(0_u64);
        for rank in 0..self.num_ranks() {
            let rank = self.rank(Rank(rank));
            for op in rank.ops() {
                if let MessageOp::Calc { ticks: more } = op {
                    ticks = ticks.and_then(|sum| sum.checked_add(more));
                }
            }
        }
        ProgramSummary {
            level: LEVEL,
            world_size: self.num_ranks(),
            ops: self.num_ops(),
            ops_by_kind: BTreeMap::from([("calc", calcs), ("send", self.num_sends()), ("recv", self.num_recvs())]),
            ops_per_rank: (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0)),
            sent_bytes: self.sent_bytes(),
            calc_ticks: ticks,
            cpu_lanes: self.num_cpus(),
            nic_lanes: self.num_nics(),
            has_wildcards: self.totals.wildcards,
            graph_bytes: self.stored_bytes(),
        }
    }
}

/// What a replay of a message program found; the keys of an execution graph's replay where they mean the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MessageReplay {
    /// `message`.
    pub level: &'static str,
    /// Ranks of the job.
    pub world_size: u32,
    /// One entry, the total: a message program does not tell iterations apart.
    pub iteration_time_ns: Vec<u64>,
    /// When the last rank ends.
    pub total_time_ns: u64,
    /// The same in ticks, exactly.
    pub total_ticks: u64,
    /// Ops of all ranks, each evaluated.
    pub ops: u64,
    /// Messages delivered.
    pub messages: u64,
    /// Bytes in them.
    pub message_bytes: u64,
    /// Events of the evaluation.
    pub events: u64,
    /// The busiest NIC direction's share of the time.
    pub max_nic_utilisation: f64,
    /// Size of the stored form.
    pub graph_bytes: u64,
    /// Wall time of the replay; filled in by the caller, who has a clock.
    pub wall_ns: u64,
    /// Peak memory of the process; filled in by the caller.
    pub peak_rss_bytes: u64,
    /// The rank that ends last; of several, the lowest.
    pub critical_rank: u32,
    /// The parameters, by their names in the model.
    pub loggops: BTreeMap<&'static str, f64>,
}

impl MessageReplay {
    /// The document for an evaluation of `program`.
    pub fn new(program: &MessageProgram, parameters: &LogGops, found: &Evaluation) -> Self {
        Self {
            level: LEVEL,
            world_size: program.num_ranks(),
            iteration_time_ns: vec![found.total_time_ns()],
            total_time_ns: found.total_time_ns(),
            total_ticks: found.total_ticks,
            ops: found.ops,
            messages: found.messages,
            message_bytes: found.bytes,
            events: found.events,
            max_nic_utilisation: found.max_nic_utilisation,
            graph_bytes: program.stored_bytes(),
            wall_ns: 0,
            peak_rss_bytes: 0,
            critical_rank: found.critical_rank,
            loggops: parameters.named(),
        }
    }
}
