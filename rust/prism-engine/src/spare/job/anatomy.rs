//! Groups and steps of a job.
//!
//! A graph does not say which communicators are data-parallel. They are told by what they do in the last iteration: they
//! reduce, and not before a quarter of the computing of their ranks is over (gradients come after the forward pass;
//! tensor-parallel communicators reduce from the first layer on), and gather no more often than they reduce (sharded
//! parameters are gathered twice, for the forward and the backward pass); broadcasts say nothing. All other communicators that are used join their
//! members; what is joined is a *group*. If a reducing communicator then does not reach all groups, its members are joined
//! as well, those that gather first.

use super::JobError;
use crate::graph::Graph;
use crate::graph::op::{CollectiveKind, Op, OpKind};
use crate::ids::{CommId, Rank, SlotId, TemplateId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Share of a rank's computing before which no gradient is summed.
const FORWARD_SHARE: f64 = 0.25;
/// A reduction of less than this share of all bytes reduced between groups is no gradient (losses, counters).
const GRADIENT_SHARE: u64 = 100;

/// What a graph says about a job of groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Anatomy {
    /// Ranks of each group, by their lowest rank.
    pub groups: Vec<Vec<u32>>,
    /// Iterations of the graph.
    pub iterations: u32,
    /// Elements that the ranks of one group reduce with other groups in an iteration: the parameters trained, where every
    /// gradient is reduced once. Of the largest group.
    pub gradient_elements: u64,
    /// The same in bytes.
    pub gradient_bytes: u64,
    /// Calls that gather between groups in an iteration, of the rank with most: 0 unless parameters or optimiser states are
    /// sharded over groups.
    pub gathers: u64,
    /// Most device memory of any rank that its allocator took from the driver, bytes, and that rank; `None` where the graph
    /// has no allocations.
    pub peak_reserved: Option<(u64, u32)>,
    /// Communicators between groups.
    #[serde(skip)]
    pub(super) is_cross: Vec<bool>,
    /// Group of each rank.
    #[serde(skip)]
    pub(super) group_of: Vec<u32>,
}

/// One iteration of a program.
#[derive(Clone, Debug)]
pub(super) struct Body {
    /// Its ops.
    pub(super) ops: Range<usize>,
}

/// The ops before the first iteration, and the iterations; `IterationEnd` is the last op of each.
pub(super) fn bodies(ops: &[Op]) -> (Range<usize>, Vec<Body>, Range<usize>) {
    let begin = ops.iter().position(|op| op.kind == OpKind::TrainingBegin).map_or(0, |at| at + 1);
    let mut start = begin;
    let mut bodies = Vec::new();
    for (at, op) in ops.iter().enumerate().skip(begin) {
        if op.kind == OpKind::IterationEnd {
            bodies.push(Body { ops: start..at + 1 });
            start = at + 1;
        }
    }
    (0..begin, bodies, start..ops.len())
}

/// What a program does in one of its slots.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    reductions: u64,
    gathers: u64,
    others: u64,
    /// Share of the computing before the first reduction.
    first: f64,
}

impl Use {
    fn is_late(&self) -> bool {
        self.reductions > 0 && self.others == 0 && self.gathers <= self.reductions && self.first >= FORWARD_SHARE
    }
}

/// Elements and bytes of a call of one rank among `members`.
pub(super) fn payload(kind: CollectiveKind, count: u64, element: u64, members: u64) -> (u64, u64) {
    let parts = match kind {
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => members,
        _ => 1,
    };
    let elements = count.saturating_mul(parts);
    (elements, elements.saturating_mul(element))
}

pub(super) fn is_reduction(kind: CollectiveKind) -> bool {
    matches!(kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter | CollectiveKind::Reduce)
}

fn uses(ops: &[Op]) -> BTreeMap<u32, Use> {
    let compute = |op: &Op| match op.kind {
        OpKind::Compute { duration, .. } => duration.as_ps() as f64,
        _ => 0.0,
    };
    let total: f64 = ops.iter().map(compute).sum();
    let mut done = 0.0;
    let mut uses: BTreeMap<u32, Use> = BTreeMap::new();
    for op in ops {
        done += compute(op);
        match op.kind {
            OpKind::Collective { slot, kind, .. } => {
                let found = uses.entry(slot.0).or_default();
                if is_reduction(kind) {
                    if found.reductions == 0 {
                        found.first = if total > 0.0 { done / total } else { 1.0 };
                    }
                    found.reductions += 1;
                } else if kind == CollectiveKind::AllGather {
                    found.gathers += 1;
                } else if kind != CollectiveKind::Broadcast {
                    found.others += 1;
                }
            }
            OpKind::PointToPoint { slot, .. } => uses.entry(slot.0).or_default().others += 1,
            _ => {}
        }
    }
    uses
}

/// Disjoint sets of ranks.
struct Sets(Vec<u32>);

impl Sets {
    fn of(&mut self, rank: u32) -> u32 {
        let mut at = rank;
        while self.0[at as usize] != at {
            self.0[at as usize] = self.0[self.0[at as usize] as usize];
            at = self.0[at as usize];
        }
        at
    }

    fn join(&mut self, members: &[u32]) {
        for pair in members.windows(2) {
            let (a, b) = (self.of(pair[0]), self.of(pair[1]));
            self.0[a.max(b) as usize] = a.min(b);
        }
    }
}

impl Anatomy {
    /// Finds the groups, of which there must be `groups` if that is given.
    pub fn of(graph: &Graph, groups: Option<u32>) -> Result<Self, JobError> {
        let programs = Programs::of(graph)?;
        let mut found = programs.cut(graph)?;
        if let Some(asked) = groups
            && asked as usize != found.groups.len()
        {
            let count = found.groups.len();
            return Err(JobError::Unfit(format!("it has {count} groups that reduce gradients, not {asked}")));
        }
        programs.measure(graph, &mut found);
        Ok(found)
    }
}

/// The last iteration of every program.
struct Programs {
    last: Vec<Vec<Op>>,
    uses: Vec<BTreeMap<u32, Use>>,
    iterations: u32,
}

impl Programs {
    fn of(graph: &Graph) -> Result<Self, JobError> {
        let mut programs = Self { last: Vec::new(), uses: Vec::new(), iterations: u32::MAX };
        for template in 0..graph.num_templates() as u32 {
            let view = graph.template(TemplateId(template));
            let ops: Vec<Op> = view.iter().collect();
            let (_, bodies, _) = bodies(&ops);
            let Some(body) = bodies.last() else {
                let message = format!("role {:?} has no iteration: collect at least one", view.name());
                return Err(JobError::Unfit(message));
            };
            programs.iterations = programs.iterations.min(bodies.len() as u32);
            programs.uses.push(uses(&ops[body.ops.clone()]));
            programs.last.push(ops[body.ops.clone()].to_vec());
        }
        Ok(programs)
    }

    /// What the members of a communicator do in it together, if anything.
    fn combined(&self, graph: &Graph) -> Vec<Option<Use>> {
        let mut combined: Vec<Option<Use>> = vec![None; graph.num_comms()];
        for rank in (0..graph.world_size()).map(Rank) {
            let uses = &self.uses[graph.rank_template(rank).index()];
            for (slot, comm) in (0..).zip(graph.rank_slots(rank)) {
                let Some(used) = uses.get(&slot) else { continue };
                let all = combined[*comm as usize].get_or_insert(Use { first: 1.0, ..Use::default() });
                all.reductions = all.reductions.max(used.reductions);
                all.gathers = all.gathers.max(used.gathers);
                all.others = all.others.max(used.others);
                all.first = if used.reductions > 0 { all.first.min(used.first) } else { all.first };
            }
        }
        combined
    }

    fn cut(&self, graph: &Graph) -> Result<Anatomy, JobError> {
        let combined = self.combined(graph);
        let members = |comm: usize| graph.comm_members(CommId(comm as u32));
        let mut sets = Sets((0..graph.world_size()).collect());
        let mut late = BTreeSet::new();
        for (comm, used) in combined.iter().enumerate() {
            match used {
                Some(used) if used.is_late() => {
                    late.insert(comm);
                }
                Some(_) => sets.join(members(comm)),
                None => {}
            }
        }
        loop {
            let num_groups = (0..graph.world_size()).filter(|rank| sets.of(*rank) == *rank).count();
            let mut partial = Vec::new();
            for comm in &late {
                let reached: BTreeSet<u32> = members(*comm).iter().map(|rank| sets.of(*rank)).collect();
                if reached.len() > 1 && reached.len() < num_groups {
                    partial.push((combined[*comm].is_none_or(|used| used.gathers == 0), *comm));
                }
            }
            let Some(gathers_not) = partial.iter().map(|(gathers_not, _)| *gathers_not).min() else { break };
            for (_, comm) in partial.iter().filter(|(not, _)| *not == gathers_not) {
                sets.join(members(*comm));
            }
        }
        let mut by_set: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for rank in 0..graph.world_size() {
            by_set.entry(sets.of(rank)).or_default().push(rank);
        }
        let groups: Vec<Vec<u32>> = by_set.into_values().collect();
        check_groups(&groups)?;
        let mut group_of = vec![0; graph.world_size() as usize];
        for (group, ranks) in (0..).zip(&groups) {
            for rank in ranks {
                group_of[*rank as usize] = group;
            }
        }
        let reaches = |comm: usize| {
            let first = members(comm).first().map(|rank| group_of[*rank as usize]);
            members(comm).iter().any(|rank| Some(group_of[*rank as usize]) != first)
        };
        let is_cross = (0..graph.num_comms()).map(reaches).collect();
        Ok(Anatomy {
            groups,
            iterations: self.iterations,
            gradient_elements: 0,
            gradient_bytes: 0,
            gathers: 0,
            peak_reserved: None,
            is_cross,
            group_of,
        })
    }

    fn measure(&self, graph: &Graph, found: &mut Anatomy) {
        let mut sums = vec![(0_u64, 0_u64); found.groups.len()];
        for rank in (0..graph.world_size()).map(Rank) {
            let template = graph.rank_template(rank);
            let slots = graph.rank_slots(rank);
            let sum = &mut sums[found.group_of[rank.index()] as usize];
            let mut gathers = 0;
            for call in cross_calls(&self.last[template.index()], slots, &found.is_cross) {
                let members = graph.comm_members(CommId(slots[call.slot.index()])).len() as u64;
                let (elements, bytes) = payload(call.kind, call.count, call.element, members);
                if is_reduction(call.kind) {
                    (sum.0, sum.1) = (sum.0.saturating_add(elements), sum.1.saturating_add(bytes));
                }
                gathers += u64::from(call.kind == CollectiveKind::AllGather);
            }
            found.gathers = found.gathers.max(gathers);
        }
        let largest = sums.into_iter().max().unwrap_or_default();
        (found.gradient_elements, found.gradient_bytes) = largest;
        let peaks: Vec<Option<u64>> =
            (0..graph.num_templates() as u32).map(|template| peak(graph, TemplateId(template))).collect();
        for rank in (0..graph.world_size()).map(Rank) {
            if let Some(bytes) = peaks[graph.rank_template(rank).index()]
                && found.peak_reserved.is_none_or(|(most, _)| bytes > most)
            {
                found.peak_reserved = Some((bytes, rank.0));
            }
        }
    }
}

fn check_groups(groups: &[Vec<u32>]) -> Result<(), JobError> {
    if groups.len() < 2 {
        let message = "all ranks are one group: no communicator only sums gradients between groups that each hold the whole \
                       model (with fully sharded parameters none does)";
        return Err(JobError::Unfit(message.to_owned()));
    }
    let size = groups[0].len();
    match groups.iter().find(|group| group.len() != size) {
        None => Ok(()),
        Some(other) => Err(JobError::Unfit(format!(
            "its groups are of different size: that of rank {} has {} ranks, that of rank {} has {size}",
            other[0],
            other.len(),
            groups[0][0]
        ))),
    }
}

/// A collective between groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossCall {
    pub(super) at: usize,
    pub(super) slot: SlotId,
    pub(super) kind: CollectiveKind,
    pub(super) count: u64,
    pub(super) element: u64,
}

pub(super) fn cross_calls<'a>(
    ops: &'a [Op],
    slots: &'a [u32],
    is_cross: &'a [bool],
) -> impl Iterator<Item = CrossCall> + 'a {
    ops.iter().enumerate().filter_map(move |(at, op)| match op.kind {
        OpKind::Collective { slot, kind, dtype, count, .. } if is_cross[slots[slot.index()] as usize] => {
            Some(CrossCall { at, slot, kind, count, element: dtype.size_bytes() })
        }
        _ => None,
    })
}

/// Index after the last gradient reduction of an iteration: what comes before is done for every stack entry, what follows
/// (the optimiser) once per step.
pub(super) fn end_of_entry(body: &[Op], slots: &[u32], is_cross: &[bool]) -> usize {
    let reductions: Vec<CrossCall> =
        cross_calls(body, slots, is_cross).filter(|call| is_reduction(call.kind)).collect();
    let bytes = |call: &CrossCall| call.count.saturating_mul(call.element);
    let all: u64 = reductions.iter().map(bytes).fold(0, u64::saturating_add);
    let last = reductions.iter().rev().find(|call| bytes(call) >= all / GRADIENT_SHARE);
    last.map_or(0, |call| call.at + 1)
}

/// Most memory a program has from the driver at a time.
fn peak(graph: &Graph, template: TemplateId) -> Option<u64> {
    let (mut held, mut most, mut has_any) = (0_u64, 0, false);
    for op in graph.template(template).iter() {
        match op.kind {
            OpKind::Alloc { bytes } => {
                has_any = true;
                held = held.saturating_add(bytes);
                most = most.max(held);
            }
            OpKind::Free { bytes } => held = held.saturating_sub(bytes),
            _ => {}
        }
    }
    has_any.then_some(most)
}
