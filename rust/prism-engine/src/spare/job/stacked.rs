//! The graph of a job whose groups compute several stack entries per step, and of which some have died.
//!
//! An iteration is cut at its last gradient reduction: what comes before, without the collectives between groups, is one
//! *entry*; what follows (the optimiser) and the collectives themselves are done once per step. A step of `S` entries is
//! `S - 1` entries and then the iteration as it was, so that what overlaps with the reduction still does. Memory is taken
//! from the driver once.
//!
//! In the iteration in which a group dies, the survivors compute their entries, notice the failure (a given delay), compute
//! what was moved to them, and sum all gradients over communicators without the dead ranks, which overlaps with nothing.
//! Dead ranks issue nothing from the iteration of their death on.

use super::JobError;
use super::anatomy::{Anatomy, Body, bodies, cross_calls, end_of_entry};
use crate::graph::op::{CollectiveKind, ComputeClass, Op, OpKind, Provenance};
use crate::graph::{Graph, GraphBuilder};
use crate::ids::{CommId, NameId, Rank, SlotId, StreamId, TemplateId};
use crate::spare::SpareError;
use crate::units::SimTime;
use indexmap::IndexMap;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// One step of the job.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Step {
    /// Entries every live group computes; 0: the reduction between groups alone, to see what it takes.
    pub entries: u32,
    /// Groups that die in this step.
    pub failed: Vec<u32>,
    /// Entries that groups compute on top after the failure.
    pub patches: BTreeMap<u32, u32>,
    /// From the end of the entries to the patch: detection, half of the reduction, shrinking, ns.
    pub delay_ns: u64,
}

/// Most steps, entries of a step, and ops of a program.
const MAX_STEPS: usize = 10_000;
const MAX_ENTRIES: u32 = 1024;
const MAX_OPS: usize = 1 << 26;

/// The job with these steps, cut as its anatomy says. Steps beyond the graph's iterations are like the last of them.
pub fn stacked(graph: &Graph, anatomy: &Anatomy, steps: &[Step]) -> Result<Graph, JobError> {
    check(anatomy, steps)?;
    let mut writer = Writer::new(graph, anatomy, steps);
    for rank in (0..graph.world_size()).map(Rank) {
        writer.rank(rank)?;
    }
    let stacked = writer.builder.finish()?;
    stacked.check()?;
    Ok(stacked)
}

fn check(anatomy: &Anatomy, steps: &[Step]) -> Result<(), JobError> {
    let invalid = |field, value: String, expected: String| JobError::from(SpareError::invalid(field, value, expected));
    let num_groups = anatomy.groups.len() as u32;
    if steps.is_empty() || steps.len() > MAX_STEPS {
        return Err(invalid("steps", steps.len().to_string(), format!("there must be 1 to {MAX_STEPS}")));
    }
    let mut dead = BTreeSet::new();
    for step in steps {
        if step.entries > MAX_ENTRIES || step.patches.values().any(|count| *count > MAX_ENTRIES) {
            return Err(invalid("entries", step.entries.to_string(), format!("at most {MAX_ENTRIES} are replayed")));
        }
        for group in step.failed.iter().chain(step.patches.keys()) {
            if *group >= num_groups {
                return Err(invalid("group", group.to_string(), format!("the groups are 0 to {}", num_groups - 1)));
            }
        }
        if let Some(group) = step.failed.iter().find(|group| !dead.insert(**group)) {
            return Err(invalid("failed", group.to_string(), "the group has failed already".into()));
        }
        if let Some((group, _)) = step.patches.iter().find(|(group, _)| dead.contains(group)) {
            return Err(invalid("patches", group.to_string(), "the group has failed".into()));
        }
    }
    if dead.len() as u32 == num_groups {
        return Err(invalid("failed", format!("{num_groups} groups"), "somebody must survive".into()));
    }
    Ok(())
}

/// What a group does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    Train { entries: u32 },
    Failure { entries: u32, patch: u32, delay_ns: u64 },
    Dead,
}

/// What tells op programs apart: the original one, the sizes of its communicators between groups after each failure (none:
/// not between groups), and the group's parts.
type Key = (TemplateId, Vec<Vec<usize>>, Vec<Part>);

struct Writer<'a> {
    graph: &'a Graph,
    anatomy: &'a Anatomy,
    steps: &'a [Step],
    builder: GraphBuilder,
    names: Vec<NameId>,
    failure: NameId,
    /// Communicators between groups after each failure: by number of failures from 1, then by old number.
    shrunk: Vec<BTreeMap<u32, CommId>>,
    /// In which of the failures, from 1, a group dies.
    death_of: BTreeMap<u32, usize>,
    /// Programs, and for each of their ops that of the original.
    programs: IndexMap<Key, (TemplateId, Vec<u32>)>,
}

impl<'a> Writer<'a> {
    fn new(graph: &'a Graph, anatomy: &'a Anatomy, steps: &'a [Step]) -> Self {
        let mut builder = GraphBuilder::new(graph.world_size());
        for (key, value) in graph.meta() {
            builder.set_meta(key, value);
        }
        let names = (0..graph.num_names() as u32).map(|name| builder.intern_name(graph.name(NameId(name)))).collect();
        let failure = builder.intern_name("failure noticed, communicators shrunk");
        let members = |comm: u32| graph.comm_members(CommId(comm)).iter().copied();
        for comm in 0..graph.num_comms() as u32 {
            builder.add_comm(members(comm).map(Rank).collect());
        }
        let (mut shrunk, mut death_of) = (Vec::new(), BTreeMap::new());
        for step in steps.iter().filter(|step| !step.failed.is_empty()) {
            death_of.extend(step.failed.iter().map(|group| (*group, shrunk.len() + 1)));
            let is_live = |rank: &u32| !death_of.contains_key(&anatomy.group_of[*rank as usize]);
            let mut comms = BTreeMap::new();
            for comm in (0..graph.num_comms() as u32).filter(|comm| anatomy.is_cross[*comm as usize]) {
                let left: Vec<Rank> = members(comm).filter(is_live).map(Rank).collect();
                comms.insert(comm, builder.add_comm(left));
            }
            shrunk.push(comms);
        }
        Self { graph, anatomy, steps, builder, names, failure, shrunk, death_of, programs: IndexMap::new() }
    }

    fn rank(&mut self, rank: Rank) -> Result<(), JobError> {
        let template = self.graph.rank_template(rank);
        let slots = self.graph.rank_slots(rank);
        let group = self.anatomy.group_of[rank.index()];
        let key = (template, slots.iter().map(|comm| self.sizes(*comm)).collect(), self.parts(group));
        if !self.programs.contains_key(&key) {
            let (ops, sources) = self.program(rank, &key.2)?;
            let name = format!("{} {}", self.graph.template(template).name(), self.programs.len());
            let id = self.builder.add_template(&name, &ops)?;
            self.programs.insert(key.clone(), (id, sources));
        }
        let (id, sources) = &self.programs[&key];
        let deaths = self.death_of.get(&group).copied().unwrap_or(usize::MAX);
        let mut comms: Vec<CommId> = slots.iter().copied().map(CommId).collect();
        // A dead rank is in none of the communicators made without it.
        for shrunk in self.shrunk.iter().take(deaths.saturating_sub(1)) {
            comms.extend(slots.iter().filter_map(|comm| shrunk.get(comm)));
        }
        self.builder.set_rank(rank, *id, comms);
        let own: BTreeMap<u32, SimTime> = self.graph.rank_overrides(rank).collect();
        if !own.is_empty() {
            for (op, source) in (0..).zip(sources) {
                if let Some(duration) = own.get(source) {
                    self.builder.override_duration(rank, op, *duration);
                }
            }
        }
        Ok(())
    }

    /// Members of a communicator between groups, at first and after each failure.
    fn sizes(&self, comm: u32) -> Vec<usize> {
        if !self.anatomy.is_cross[comm as usize] {
            return Vec::new();
        }
        let members = self.graph.comm_members(CommId(comm));
        let left = |failures: usize| members.iter().filter(|rank| !self.is_dead(**rank, failures)).count();
        (0..=self.shrunk.len()).map(left).collect()
    }

    /// Has the rank died in one of the first `failures`?
    fn is_dead(&self, rank: u32, failures: usize) -> bool {
        let death = self.death_of.get(&self.anatomy.group_of[rank as usize]);
        death.is_some_and(|death| *death <= failures)
    }

    fn parts(&self, group: u32) -> Vec<Part> {
        let mut is_dead = false;
        let part = |step: &Step| {
            is_dead |= step.failed.contains(&group);
            let entries = step.entries;
            if is_dead {
                Part::Dead
            } else if step.failed.is_empty() {
                Part::Train { entries }
            } else {
                let patch = step.patches.get(&group).copied().unwrap_or(0);
                Part::Failure { entries, patch, delay_ns: step.delay_ns }
            }
        };
        self.steps.iter().map(part).collect()
    }

    /// The ops of a rank, and for each the number of the original (that of none: `u32::MAX`).
    fn program(&self, rank: Rank, parts: &[Part]) -> Result<(Vec<Op>, Vec<u32>), JobError> {
        let view = self.graph.template(self.graph.rank_template(rank));
        let ops: Vec<Op> = view.iter().collect();
        let (prelude, bodies, _) = bodies(&ops);
        let mut text = Text {
            writer: self,
            rank,
            source: &ops,
            ops: Vec::new(),
            sources: Vec::new(),
            groups: (0, 0),
            failures: 0,
        };
        text.copy(prelude, |_| true)?;
        for (number, part) in parts.iter().enumerate() {
            let body = &bodies[number.min(bodies.len() - 1)];
            match part {
                Part::Dead => break,
                Part::Train { entries: 0 } => text.reduction(body)?,
                Part::Train { entries } => {
                    text.entries(body, entries - 1)?;
                    text.copy(body.ops.clone(), |_| true)?;
                }
                Part::Failure { entries, patch, delay_ns } => {
                    text.entries(body, *entries)?;
                    text.notice(*delay_ns);
                    text.entries(body, *patch)?;
                    text.after_failure(body)?;
                }
            }
        }
        Ok((text.ops, text.sources))
    }
}

/// An op program being written.
struct Text<'a> {
    writer: &'a Writer<'a>,
    rank: Rank,
    source: &'a [Op],
    ops: Vec<Op>,
    sources: Vec<u32>,
    /// Fused calls: group of the original (with the copy, so that neighbours are told apart) and of the program.
    groups: (u64, u32),
    /// Failures so far.
    failures: usize,
}

impl Text<'_> {
    fn slots(&self) -> &[u32] {
        self.writer.graph.rank_slots(self.rank)
    }

    /// Where the part of an iteration that is done for every entry ends.
    fn end(&self, body: &Body) -> usize {
        body.ops.start + end_of_entry(&self.source[body.ops.clone()], self.slots(), &self.writer.anatomy.is_cross)
    }

    fn is_cross(&self, op: &Op) -> bool {
        let (OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. }) = op.kind else { return false };
        self.writer.anatomy.is_cross[self.slots()[slot.index()] as usize]
    }

    fn copy(&mut self, range: std::ops::Range<usize>, is_wanted: impl Fn(&Op) -> bool) -> Result<(), JobError> {
        let copy = self.ops.len() as u64;
        for at in range {
            let op = self.source[at];
            if is_wanted(&op) {
                self.push(at as u32, op, copy)?;
            }
        }
        if self.ops.len() > MAX_OPS {
            let expected = format!("a program may have {MAX_OPS} ops: fewer steps, or fewer entries");
            return Err(SpareError::invalid("steps", format!("{} ops", self.ops.len()), expected).into());
        }
        Ok(())
    }

    /// So many entries, without what is done between groups.
    fn entries(&mut self, body: &Body, count: u32) -> Result<(), JobError> {
        let range = body.ops.start..self.end(body);
        let (slots, is_cross) = (self.slots().to_vec(), &self.writer.anatomy.is_cross);
        let between: BTreeSet<usize> = cross_calls(self.source, &slots, is_cross).map(|call| call.at).collect();
        for _ in 0..count {
            let copy = self.ops.len() as u64;
            for at in range.clone().filter(|at| !between.contains(at)) {
                let op = self.source[at];
                if !matches!(op.kind, OpKind::Alloc { .. } | OpKind::Free { .. }) {
                    self.push(at as u32, op, copy)?;
                }
            }
        }
        Ok(())
    }

    /// What is done between groups, alone.
    fn reduction(&mut self, body: &Body) -> Result<(), JobError> {
        let (range, last) = (body.ops.start..self.end(body), body.ops.end - 1);
        let wanted: Vec<usize> = range.filter(|at| self.is_cross(&self.source[*at])).chain([last]).collect();
        let copy = self.ops.len() as u64;
        // Nothing of the step before is left to overlap with.
        self.sync();
        for at in wanted {
            if at == last {
                // The end of the iteration is that of everything issued to its stream, on which nothing is done here.
                self.sync();
                self.insert(OpKind::Compute {
                    duration: SimTime::ZERO,
                    name: self.writer.failure,
                    class: ComputeClass::Kernel,
                    provenance: Provenance::Default,
                });
                if let Some(op) = self.ops.last_mut() {
                    op.stream = self.source[at].stream;
                }
            }
            self.push(at as u32, self.source[at], copy)?;
        }
        Ok(())
    }

    fn notice(&mut self, delay_ns: u64) {
        self.failures += 1;
        self.sync();
        let kind = OpKind::Compute {
            duration: SimTime::from_ns(i64::try_from(delay_ns).unwrap_or(i64::MAX / 1000).min(i64::MAX / 1000)),
            name: self.writer.failure,
            class: ComputeClass::Kernel,
            provenance: Provenance::Default,
        };
        self.insert(kind);
        self.sync();
    }

    /// The reductions of an iteration with nothing beside them, and what follows them.
    fn after_failure(&mut self, body: &Body) -> Result<(), JobError> {
        self.sync();
        let (end, copy) = (self.end(body), self.ops.len() as u64);
        for at in body.ops.start..end {
            let op = self.source[at];
            if self.is_cross(&op) {
                self.push(at as u32, op, copy)?;
            }
        }
        self.sync();
        self.copy(end..body.ops.end, |_| true)
    }

    fn sync(&mut self) {
        self.insert(OpKind::DeviceSync);
    }

    fn insert(&mut self, kind: OpKind) {
        self.ops.push(Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind });
        self.sources.push(u32::MAX);
    }

    fn push(&mut self, at: u32, mut op: Op, copy: u64) -> Result<(), JobError> {
        let is_cross = self.is_cross(&op);
        match &mut op.kind {
            OpKind::Compute { name, .. } => *name = self.writer.names[name.index()],
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } if *group > 0 => {
                // The copy has fewer than 2^32 ops, its original's groups fewer than 2^32 numbers.
                let from = (copy << 32) | u64::from(*group);
                if self.groups.0 != from {
                    self.groups = (from, self.groups.1 + 1);
                }
                *group = self.groups.1;
            }
            _ => {}
        }
        if is_cross && self.failures > 0 {
            self.shrink(&mut op)?;
        }
        self.ops.push(op);
        self.sources.push(at);
        Ok(())
    }

    /// The call over the communicator without the dead ranks.
    fn shrink(&self, op: &mut Op) -> Result<(), JobError> {
        let (slots, graph) = (self.slots(), self.writer.graph);
        let OpKind::Collective { slot, kind, root, count, .. } = &mut op.kind else {
            return Err(JobError::Unfit("messages between groups: they have no meaning without the dead ones".into()));
        };
        let old = slots[slot.index()];
        let before = slots[..slot.index()].iter().filter(|comm| self.writer.anatomy.is_cross[**comm as usize]).count();
        let all = slots.iter().filter(|comm| self.writer.anatomy.is_cross[**comm as usize]).count();
        *slot = SlotId((slots.len() + (self.failures - 1) * all + before) as u32);
        let dead = |rank: &u32| self.writer.is_dead(*rank, self.failures);
        let members = graph.comm_members(CommId(old));
        let left = members.len() - members.iter().filter(|rank| dead(rank)).count();
        match kind {
            // What was shared among all is shared among fewer.
            CollectiveKind::ReduceScatter | CollectiveKind::AllGather => {
                *count = count.saturating_mul(members.len() as u64).div_ceil(left as u64);
            }
            CollectiveKind::Broadcast | CollectiveKind::Reduce => {
                let Some(rank) = members.get(*root as usize).filter(|rank| !dead(rank)) else {
                    return Err(JobError::Unfit(format!(
                        "a group that has died is the root of a {kind:?} between groups"
                    )));
                };
                *root = members.iter().take_while(|other| *other != rank).filter(|other| !dead(other)).count() as u32;
            }
            _ => {}
        }
        Ok(())
    }
}
