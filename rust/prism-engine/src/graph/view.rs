//! Reading a graph.

use crate::graph::Graph;
use crate::graph::columns::OpRow;
use crate::graph::op::Op;
use crate::ids::{CommId, NameId, Rank, StreamId, TemplateId};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// Indices that are out of range panic, as for slices: the ids come from this graph.
impl Graph {
    /// Number of ranks of the job.
    pub fn world_size(&self) -> u32 {
        self.ranks.template.len() as u32
    }

    /// Number of communicators.
    pub fn num_comms(&self) -> usize {
        self.comms.len()
    }

    /// Global ranks of a communicator's members, in group-rank order.
    pub fn comm_members(&self, comm: CommId) -> &[u32] {
        self.comms.members(comm.index())
    }

    /// Number of op programs.
    pub fn num_templates(&self) -> usize {
        self.templates.names.len()
    }

    /// One op program.
    pub fn template(&self, template: TemplateId) -> TemplateView<'_> {
        let range = self.templates.range(template.index());
        TemplateView { graph: self, index: template.index(), start: range.start, len: range.len() }
    }

    /// The op program a rank runs.
    pub fn rank_template(&self, rank: Rank) -> TemplateId {
        TemplateId(self.ranks.template[rank.index()])
    }

    /// The rank's communicators (as [`CommId`] numbers), one per slot; at least as many as its template uses.
    pub fn rank_slots(&self, rank: Rank) -> &[u32] {
        self.ranks.slots(rank.index())
    }

    /// The rank's own compute durations: op index and duration, ascending by op index. O(log ranks) to find.
    pub fn rank_overrides(&self, rank: Rank) -> impl Iterator<Item = (u32, SimTime)> + '_ {
        let range = self.overrides.range(rank.0);
        let durations = self.overrides.ps[range.clone()].iter().map(|ps| SimTime::from_ps(*ps as i64));
        self.overrides.op[range].iter().copied().zip(durations)
    }

    /// Text of a kernel or operator name.
    pub fn name(&self, name: NameId) -> &str {
        &self.names[name.index()]
    }

    /// Number of names.
    pub fn num_names(&self) -> usize {
        self.names.len()
    }

    /// Free-form facts about the job (device, framework, command line, ...).
    pub fn meta(&self) -> &BTreeMap<String, String> {
        &self.meta
    }

    /// Ops over all ranks.
    pub fn num_ops(&self) -> u64 {
        self.num_ops
    }

    /// Size of the stored form in bytes. The first call on a graph that was built, not opened, encodes it to find out.
    pub fn graph_bytes(&self) -> u64 {
        *self.stored_bytes.get_or_init(|| self.encode().len() as u64)
    }
}

/// One op program of a [`Graph`].
#[derive(Clone, Copy, Debug)]
pub struct TemplateView<'a> {
    graph: &'a Graph,
    index: usize,
    start: usize,
    len: usize,
}

impl<'a> TemplateView<'a> {
    /// Name of the role.
    pub fn name(&self) -> &'a str {
        &self.graph.templates.names[self.index]
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is the program empty?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Op `i` in program order. O(1): three column reads and a decode.
    pub fn op(&self, i: usize) -> Op {
        assert!(i < self.len, "op {i} of {}", self.len);
        let templates = &self.graph.templates;
        let row = self.row(i);
        let gap = self.graph.ops.gaps[templates.gap.get(self.start + i) as usize];
        let kind = row.unpack(templates.group.get(self.start + i)).expect("rows are checked when a graph is made");
        Op { host_gap: SimTime::from_ps(gap as i64), stream: StreamId(row.stream), kind }
    }

    /// The ops in program order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Op> + use<'a> {
        let view = *self;
        (0..view.len).map(move |i| view.op(i))
    }

    /// Streams are numbered below this.
    pub fn num_streams(&self) -> u32 {
        self.graph.templates.shapes[self.index].streams
    }

    /// Events are numbered below this.
    pub fn num_events(&self) -> u32 {
        self.graph.templates.shapes[self.index].events
    }

    /// Slots are numbered below this.
    pub fn num_slots(&self) -> u32 {
        self.graph.templates.shapes[self.index].slots
    }

    /// Ops, ascending, that this template and another of the graph, of as many ops, do not store as the same. All others are
    /// equal; these may be.
    pub(crate) fn differences(&self, other: &Self) -> Vec<usize> {
        assert_eq!(self.len, other.len, "templates of as many ops");
        let templates = &self.graph.templates;
        let mut marks = vec![false; self.len];
        for column in [&templates.row, &templates.gap, &templates.group] {
            column.mark_differences(self.start, other.start, &mut marks);
        }
        (0..self.len).filter(|op| marks[*op]).collect()
    }

    /// Row of op `i`; its row index identifies equal ops of one graph.
    pub(super) fn row(&self, i: usize) -> OpRow {
        self.graph.ops.row(self.row_index(i))
    }

    pub(super) fn row_index(&self, i: usize) -> usize {
        self.graph.templates.row.get(self.start + i) as usize
    }

    pub(super) fn group(&self, i: usize) -> u32 {
        self.graph.templates.group.get(self.start + i)
    }
}
