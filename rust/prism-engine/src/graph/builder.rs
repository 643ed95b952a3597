//! Making a graph.

use crate::graph::columns::{Indices, OpRow, tag};
use crate::graph::op::Op;
use crate::graph::overrides::{self, Overrides, OwnDurations};
use crate::graph::packed::PackedBuilder;
use crate::graph::{Comms, Graph, GraphError, OpTable, Ranks, Templates, check};
use crate::ids::{CommId, NameId, Rank, TemplateId};
use crate::units::SimTime;
use indexmap::{IndexMap, IndexSet};
use rustc_hash::FxBuildHasher;
use std::collections::BTreeMap;
use std::sync::OnceLock;

type FxIndexSet<T> = IndexSet<T, FxBuildHasher>;

/// Collects the tables of a [`Graph`]. Distinct ops and names are stored once; memory is linear in template ops, in
/// communicator members and in durations of the ranks' own, never in ops over all ranks.
#[derive(Debug)]
pub struct GraphBuilder {
    world_size: u32,
    names: FxIndexSet<String>,
    meta: BTreeMap<String, String>,
    rows: FxIndexSet<OpRow>,
    template_names: Vec<String>,
    start: Vec<u64>,
    row: Vec<u32>,
    gap: PackedBuilder,
    group: PackedBuilder,
    duration: PackedBuilder,
    comms: Vec<Vec<Rank>>,
    ranks: IndexMap<Rank, (TemplateId, Vec<CommId>), FxBuildHasher>,
    overrides: OwnDurations,
}

impl GraphBuilder {
    /// A graph of `world_size` ranks, all of which must be set before [`Self::finish`].
    pub fn new(world_size: u32) -> Self {
        Self {
            world_size,
            names: FxIndexSet::default(),
            meta: BTreeMap::new(),
            rows: FxIndexSet::default(),
            template_names: Vec::new(),
            start: vec![0],
            row: Vec::new(),
            gap: PackedBuilder::default(),
            group: PackedBuilder::default(),
            duration: PackedBuilder::default(),
            comms: Vec::new(),
            ranks: IndexMap::default(),
            overrides: BTreeMap::new(),
        }
    }

    /// The id of a name; equal texts have one id.
    pub fn intern_name(&mut self, name: &str) -> NameId {
        let index = self.names.get_index_of(name).unwrap_or_else(|| self.names.insert_full(name.to_owned()).0);
        NameId(index as u32)
    }

    /// A communicator with these members, in group-rank order. Every call makes a new one: two communicators may have the
    /// same members.
    pub fn add_comm(&mut self, members: Vec<Rank>) -> CommId {
        self.comms.push(members);
        CommId(self.comms.len() as u32 - 1)
    }

    /// An op program. Names must have been interned before; gaps and durations must not be negative; ops of one group must
    /// be neighbours and group numbers must rise.
    pub fn add_template(&mut self, name: &str, ops: &[Op]) -> Result<TemplateId, GraphError> {
        let invalid =
            |op: usize, what: &str| GraphError::invalid(None, Some(op as u32), format!("template \"{name}\": {what}"));
        if u32::try_from(ops.len()).is_err() {
            return Err(GraphError::invalid(None, None, format!("template \"{name}\" has more than 2^32 ops")));
        }
        let mut group_order = check::GroupOrder::default();
        let (mut rows, mut groups, mut durations) = (Vec::new(), Vec::new(), Vec::new());
        for (index, op) in ops.iter().enumerate() {
            let (mut row, group) = OpRow::pack(op.stream, op.kind);
            check::row(row, self.names.len()).map_err(|what| invalid(index, what))?;
            check::gap(op.host_gap.as_ps()).map_err(|what| invalid(index, what))?;
            group_order.next(group).map_err(|what| invalid(index, what))?;
            let duration = (row.tag == tag::COMPUTE).then(|| std::mem::take(&mut row.value));
            rows.push(self.rows.insert_full(row).0 as u32);
            groups.push(Some(u64::from(group)));
            durations.push(duration);
        }
        self.row.extend(rows);
        self.gap.push(ops.iter().map(|op| Some(op.host_gap.as_ps() as u64)));
        self.group.push(groups.into_iter());
        self.duration.push(durations.into_iter());
        self.start.push(self.row.len() as u64);
        self.template_names.push(name.to_owned());
        Ok(TemplateId(self.template_names.len() as u32 - 1))
    }

    /// Says what a rank runs and which communicators its slots are. The last call for a rank counts.
    pub fn set_rank(&mut self, rank: Rank, template: TemplateId, slots: Vec<CommId>) {
        self.ranks.insert(rank, (template, slots));
    }

    /// Gives one rank's compute op its own duration. Of several for one op the last counts.
    pub fn override_duration(&mut self, rank: Rank, op: u32, duration: SimTime) {
        self.overrides.entry(rank).or_default().push((op, duration));
    }

    /// Notes a fact about the job.
    pub fn set_meta(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.meta.insert(key.into(), value.into());
    }

    /// The graph, with its structure checked (see [`Graph::check`] for whether the programs fit together).
    pub fn finish(self) -> Result<Graph, GraphError> {
        let ranks = rank_tables(self.world_size, self.ranks)?;
        let rows = self.rows;
        let ops = OpTable {
            tag: rows.iter().map(|r| r.tag).collect::<Vec<_>>().into(),
            a: rows.iter().map(|r| r.a).collect::<Vec<_>>().into(),
            b: rows.iter().map(|r| r.b).collect::<Vec<_>>().into(),
            c: rows.iter().map(|r| r.c).collect::<Vec<_>>().into(),
            stream: rows.iter().map(|r| r.stream).collect::<Vec<_>>().into(),
            slot: rows.iter().map(|r| r.slot).collect::<Vec<_>>().into(),
            arg: rows.iter().map(|r| r.arg).collect::<Vec<_>>().into(),
            value: rows.iter().map(|r| r.value).collect::<Vec<_>>().into(),
        };
        let templates = Templates {
            names: self.template_names,
            start: self.start.into(),
            row: Indices::from_u32s(self.row),
            gap: self.gap.finish(),
            group: self.group.finish(),
            duration: self.duration.finish(),
            shapes: Vec::new(),
        };
        let names = self.names.into_iter().collect();
        let none = Overrides::new(OwnDurations::new(), &ranks);
        let mut graph = Graph::from_tables(names, self.meta, ops, templates, comm_tables(&self.comms)?, ranks, none)?;
        for (rank, durations) in &self.overrides {
            durations.iter().try_for_each(|(op, ps)| overrides::owner(&graph, rank.0, *op, ps.as_ps()))?;
        }
        graph.overrides = Overrides::new(self.overrides, &graph.ranks);
        Ok(graph)
    }
}

impl Graph {
    /// Puts tables together whose indices are known to be in range, derives what is not stored and checks the structure.
    pub(super) fn from_tables(
        names: Vec<String>,
        meta: BTreeMap<String, String>,
        ops: OpTable,
        templates: Templates,
        comms: Comms,
        ranks: Ranks,
        overrides: Overrides,
    ) -> Result<Self, GraphError> {
        let stored_bytes = OnceLock::new();
        let mut graph = Self { names, meta, ops, templates, comms, ranks, overrides, num_ops: 0, stored_bytes };
        graph.templates.shapes = check::shapes(&graph)?;
        check::structure(&graph)?;
        let ranks = graph.ranks.template.iter();
        graph.num_ops = ranks.map(|t| graph.templates.range(*t as usize).len() as u64).sum();
        Ok(graph)
    }
}

fn rank_tables(
    world_size: u32,
    mut set: IndexMap<Rank, (TemplateId, Vec<CommId>), FxBuildHasher>,
) -> Result<Ranks, GraphError> {
    set.sort_unstable_keys();
    if let Some((rank, _)) = set.iter().find(|(rank, _)| rank.0 >= world_size) {
        return Err(GraphError::invalid(Some(rank.0), None, format!("the world has only {world_size} ranks")));
    }
    if set.len() != world_size as usize {
        let missing = (0..world_size).find(|rank| !set.contains_key(&Rank(*rank)));
        return Err(GraphError::invalid(missing, None, "no program was set for this rank"));
    }
    let mut start = vec![0_u32];
    let mut slots = Vec::new();
    for (rank, (_, comms)) in &set {
        slots.extend(comms.iter().map(|comm| comm.0));
        let end = u32::try_from(slots.len());
        start
            .push(end.map_err(|_| GraphError::invalid(Some(rank.0), None, "more than 2^32 communicator memberships"))?);
    }
    let template = set.values().map(|(template, _)| template.0).collect::<Vec<_>>().into();
    Ok(Ranks { template, start: start.into(), slots: slots.into() })
}

fn comm_tables(comms: &[Vec<Rank>]) -> Result<Comms, GraphError> {
    let mut start = vec![0_u32];
    let mut members = Vec::new();
    for comm in comms {
        members.extend(comm.iter().map(|rank| rank.0));
        let end = u32::try_from(members.len());
        start.push(end.map_err(|_| GraphError::invalid(None, None, "more than 2^32 communicator memberships"))?);
    }
    Ok(Comms { start, members })
}
