//! What communication costs, and who is late.

use super::Rows;
use crate::analysis::visit::describe;
use crate::ids::{CommId, Rank};
use crate::sim::SimError;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Part of the iteration by which a late rank must wait less, or compute more, than its equals.
const NOTICEABLE: i64 = 1000;
/// Late ranks that are listed.
const LATE: usize = 12;

/// Communication among ranks of one shape, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommCost {
    /// Members.
    pub size: u32,
    /// Difference of neighbouring members' ranks, if it is the same for all.
    pub stride: Option<i64>,
    /// Communicators of this shape that are used.
    pub count: u32,
    /// Members of the first of them, up to eight.
    pub example: Vec<u32>,
    /// What is called, in words.
    pub calls: Vec<String>,
    /// From arrival to end.
    pub total_ns: i64,
    /// Transfer that nothing hides.
    pub transfer_ns: i64,
    /// Waiting that nothing hides.
    pub waiting_ns: i64,
}

/// A rank that makes others wait, and waits less or computes more than those with its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LateRank {
    /// Which.
    pub rank: Rank,
    /// Time others waited for it, summed over them.
    pub caused_ns: i64,
    /// What it waited itself.
    pub waited_ns: i64,
    /// What the median of the ranks with its program waited.
    pub usual_waited_ns: i64,
    /// What it computed.
    pub compute_ns: i64,
    /// What the median of the ranks with its program computed.
    pub usual_compute_ns: i64,
}

/// Communicators of one shape while they are counted.
struct Sum {
    cost: CommCost,
    used: BTreeSet<u32>,
    calls: BTreeSet<String>,
}

impl Rows<'_> {
    pub(super) fn communication(&self) -> Vec<CommCost> {
        let graph = &self.trace.graph;
        let mut shapes: BTreeMap<(u32, Option<i64>), Sum> = BTreeMap::new();
        for (rank, row) in (0..).zip(&self.row_of) {
            let plan = self.trace.plan(rank);
            for own in &self.distinct[*row as usize].slots {
                let comm = graph.rank_slots(Rank(rank))[own.slot as usize];
                let members = graph.comm_members(CommId(comm));
                let (size, stride) = (members.len() as u32, stride(members));
                let Sum { cost, used, calls } = shapes.entry((size, stride)).or_insert_with(|| {
                    let example = members.iter().copied().take(8).collect();
                    let (calls, total_ns, transfer_ns, waiting_ns) = (Vec::new(), 0, 0, 0);
                    let cost = CommCost { size, stride, count: 0, example, calls, total_ns, transfer_ns, waiting_ns };
                    Sum { cost, used: BTreeSet::new(), calls: BTreeSet::new() }
                });
                if used.insert(comm) {
                    calls.extend(plan.launches.iter().filter(|launch| launch.slot.0 == own.slot).map(describe));
                }
                cost.total_ns += own.total.as_ns();
                cost.transfer_ns += own.transfer.as_ns();
                cost.waiting_ns += own.waiting.as_ns();
            }
        }
        let finish = |Sum { cost, used, calls }| CommCost {
            count: used.len() as u32,
            calls: calls.into_iter().collect(),
            ..cost
        };
        let mut costs: Vec<CommCost> = shapes.into_values().map(finish).collect();
        costs.sort_by_key(|cost| std::cmp::Reverse(cost.transfer_ns + cost.waiting_ns));
        costs
    }

    pub(super) fn late(&self, iteration: usize) -> Result<Vec<LateRank>, SimError> {
        let Some(waiting) = self.trace.waiting(iteration)? else { return Ok(Vec::new()) };
        let mut caused: BTreeMap<u32, i64> = BTreeMap::new();
        for blame in &waiting.blame {
            *caused.entry(blame.rank.0).or_default() += blame.waited_ns;
        }
        let mut programs: BTreeMap<u32, (Vec<i64>, Vec<i64>)> = BTreeMap::new();
        let computed = |rank: Rank| self.distinct[self.row_of[rank.index()] as usize].totals[0].as_ns();
        let examined: Vec<_> = waiting.by_rank.iter().take(self.row_of.len()).collect();
        for (rank, waited) in &examined {
            let (waits, computes) = programs.entry(self.trace.graph.rank_template(*rank).0).or_default();
            waits.push(waited.as_ns());
            computes.push(computed(*rank));
        }
        let usual: BTreeMap<u32, (i64, i64)> = programs
            .into_iter()
            .map(|(program, (waits, computes))| (program, (median(waits), median(computes))))
            .collect();
        let late = examined.into_iter().map(|(rank, waited)| {
            let (usual_waited_ns, usual_compute_ns) = usual[&self.trace.graph.rank_template(*rank).0];
            LateRank {
                rank: *rank,
                caused_ns: caused.get(&rank.0).copied().unwrap_or(0),
                waited_ns: waited.as_ns(),
                usual_waited_ns,
                compute_ns: computed(*rank),
                usual_compute_ns,
            }
        });
        // A rank that waits as its equals do is waited for by the job's schedule.
        let least = ((self.window.1 - self.window.0).as_ns() / NOTICEABLE).max(1);
        let is_late = |late: &LateRank| {
            let less = late.usual_waited_ns - late.waited_ns;
            late.caused_ns >= least && (less >= least || late.compute_ns - late.usual_compute_ns >= least)
        };
        let mut late: Vec<LateRank> = late.filter(is_late).collect();
        late.sort_by_key(|late| (std::cmp::Reverse(late.caused_ns), late.rank));
        late.truncate(LATE);
        Ok(late)
    }
}

fn median(mut values: Vec<i64>) -> i64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0 } else { *values.select_nth_unstable(middle).1 }
}

fn stride(members: &[u32]) -> Option<i64> {
    let mut steps = members.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0]));
    let first = steps.next()?;
    steps.all(|step| step == first).then_some(first)
}
