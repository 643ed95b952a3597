//! Reading a graph.

use crate::graph::Graph;
use crate::graph::columns::{Indices, OpRow, tag};
use crate::graph::op::{Op, OpKind};
use crate::graph::packed::{Head, Packed};
use crate::ids::{CommId, NameId, Rank, StreamId, TemplateId};
use crate::units::SimTime;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

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
        let (templates, index) = (&self.templates, template.index());
        let range = templates.range(index);
        TemplateView {
            graph: self,
            index,
            start: range.start,
            len: range.len(),
            gap: templates.gap.head(index),
            group: templates.group.head(index),
            duration: templates.duration.head(index),
        }
    }

    /// The op program a rank runs.
    pub fn rank_template(&self, rank: Rank) -> TemplateId {
        TemplateId(self.ranks.template[rank.index()])
    }

    /// The rank's communicators (as [`CommId`] numbers), one per slot; at least as many as its template uses.
    pub fn rank_slots(&self, rank: Rank) -> &[u32] {
        self.ranks.slots(rank.index())
    }

    /// The rank's own compute durations: op index and duration, ascending by op index. O(log(ranks + ops)) to find, O(1)
    /// for each op of the program for which many ranks have one.
    pub fn rank_overrides(&self, rank: Rank) -> impl Iterator<Item = (u32, SimTime)> + '_ {
        self.overrides.of(rank.0, self.ranks.template[rank.index()])
    }

    /// Compute ops of a rank's program that no slow-down of the rank stretches, by index. O(ops of the program).
    pub(crate) fn fixed_ops(&self, rank: Rank) -> BTreeSet<u32> {
        let is_fixed = |op: &Op| matches!(op.kind, OpKind::Compute { class, .. } if class.is_fixed());
        let ops = self.template(self.rank_template(rank));
        (0..).zip(ops.iter()).filter(|(_, op)| is_fixed(op)).map(|(index, _)| index).collect()
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

    /// Size of the tables in memory (mapped from the file, where the graph was opened), without names and metadata.
    pub fn memory_bytes(&self) -> u64 {
        let (ops, templates, ranks) = (&self.ops, &self.templates, &self.ranks);
        let rows = ops.len() * (4 + 3 * 4 + 8);
        let programs = templates.start.memory_bytes()
            + templates.row.memory_bytes()
            + [&templates.gap, &templates.group, &templates.duration].map(Packed::memory_bytes).iter().sum::<usize>()
            + size_of_val(templates.shapes.as_slice());
        let comms = 4 * (self.comms.start.len() + self.comms.members.len());
        let ranks = ranks.template.memory_bytes() + ranks.start.memory_bytes() + ranks.slots.memory_bytes();
        (rows + programs + comms + ranks + self.overrides.memory_bytes()) as u64
    }

    /// Size of the stored form in bytes. The first call on a graph that was built, not opened, encodes it to find out.
    pub fn graph_bytes(&self) -> u64 {
        *self.stored_bytes.get_or_init(|| self.encode().len() as u64)
    }
}

/// Op programs as they are stored, for readers that go through all of them.
pub(crate) struct ProgramColumns<'a> {
    /// By op of all programs one after the other: number in the table of distinct ops.
    pub(crate) rows: &'a Indices,
    /// Bytes of all lists of host gaps, of durations and of groups.
    pub(crate) gaps: &'a [u8],
    pub(crate) durations: &'a [u8],
    pub(crate) groups: &'a [u8],
}

impl Graph {
    /// The columns of all op programs.
    pub(crate) fn program_columns(&self) -> ProgramColumns<'_> {
        let templates = &self.templates;
        let (gaps, durations, groups) = (templates.gap.data(), templates.duration.data(), templates.group.data());
        ProgramColumns { rows: &templates.row, gaps, durations, groups }
    }

    /// The distinct ops, without host gap, group and duration.
    pub(crate) fn distinct_ops(&self) -> impl ExactSizeIterator<Item = OpRow> + '_ {
        (0..self.ops.len()).map(|index| self.ops.row(index))
    }

    /// Where a communicator's members are in the list of the members of all.
    pub(crate) fn comm_places(&self, comm: CommId) -> Range<usize> {
        let start = &self.comms.start;
        start[comm.index()] as usize..start[comm.index() + 1] as usize
    }

    /// The members of all communicators, one after the other.
    pub(crate) fn all_members(&self) -> &[u32] {
        &self.comms.members
    }
}

/// Where the parts of an op program are in the [`ProgramColumns`].
#[derive(Clone, Copy)]
pub(crate) struct ProgramPlace {
    /// First op.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) gap: Head,
    pub(crate) duration: Head,
    pub(crate) group: Head,
}

/// One op program of a [`Graph`].
#[derive(Clone, Copy, Debug)]
pub struct TemplateView<'a> {
    graph: &'a Graph,
    index: usize,
    start: usize,
    len: usize,
    gap: Head,
    group: Head,
    duration: Head,
}

impl<'a> TemplateView<'a> {
    /// Name of the role.
    pub fn name(&self) -> &'a str {
        &self.graph.templates.names[self.index]
    }

    /// Where it is in the columns.
    pub(crate) fn place(&self) -> ProgramPlace {
        let Self { start, len, gap, group, duration, .. } = *self;
        ProgramPlace { start, len, gap, duration, group }
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is the program empty?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Op `i` in program order. O(1): four column reads and a decode.
    pub fn op(&self, i: usize) -> Op {
        assert!(i < self.len, "op {i} of {}", self.len);
        let row = self.row(i);
        let gap = self.gap.get(self.graph.templates.gap.data(), i);
        let kind = row.unpack(self.group(i)).expect("rows are checked when a graph is made");
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
        templates.row.mark_differences(self.start, other.start, &mut marks);
        for (mine, others, data) in [
            (self.gap, other.gap, templates.gap.data()),
            (self.group, other.group, templates.group.data()),
            (self.duration, other.duration, templates.duration.data()),
        ] {
            mine.mark_differences(others, data, &mut marks);
        }
        (0..self.len).filter(|op| marks[*op]).collect()
    }

    /// Row of op `i`, with its duration.
    pub(super) fn row(&self, i: usize) -> OpRow {
        let row = self.graph.ops.row(self.row_index(i));
        if row.tag == tag::COMPUTE {
            OpRow { value: self.duration.get(self.graph.templates.duration.data(), i), ..row }
        } else {
            row
        }
    }

    /// Number of the op in the graph's table of distinct ops; equal numbers differ at most in gap, group and duration.
    pub(super) fn row_index(&self, i: usize) -> usize {
        self.graph.templates.row.get(self.start + i) as usize
    }

    pub(super) fn group(&self, i: usize) -> u32 {
        self.group.get(self.graph.templates.group.data(), i) as u32
    }
}
