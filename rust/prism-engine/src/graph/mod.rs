//! The execution graph: what every rank of a job issues, in what order, and with whom it communicates.
//!
//! Ranks of one role share one op program (a *template*); a rank adds its communicators (one per slot of the template) and,
//! where they differ, its own compute durations. Everything is kept in columns of integers, each in the narrowest width
//! that holds it: an op of a program is a number in a table of distinct ops, a host gap and a duration. Durations of the
//! ranks' own are a column over the ranks of a role where many ranks have one, and single entries elsewhere.
//!
//! ```
//! use prism_engine::graph::{Graph, GraphBuilder, op::{Op, OpKind}};
//! use prism_engine::ids::{Rank, StreamId};
//! use prism_engine::units::SimTime;
//!
//! let mut builder = GraphBuilder::new(2);
//! let op = Op { host_gap: SimTime::from_ns(5), stream: StreamId(0), kind: OpKind::StreamSync };
//! let template = builder.add_template("all", &[op])?;
//! let world = builder.add_comm(vec![Rank(0), Rank(1)]);
//! builder.set_rank(Rank(0), template, vec![world]);
//! builder.set_rank(Rank(1), template, vec![world]);
//! let graph = builder.finish()?;
//! assert_eq!(graph, Graph::from_text(&graph.to_text())?);
//! # Ok::<(), prism_engine::graph::GraphError>(())
//! ```
//!
//! [`Graph::save`] and [`GraphFile::open`] use a mapped binary form, [`Graph::to_text`] a readable one. [`Graph::check`] says
//! whether the ranks' programs fit together; [`Graph::summary`] what is in them.

mod builder;
mod check;
pub(crate) mod columns;
mod difference;
mod error;
pub mod op;
mod overrides;
pub(crate) mod packed;
mod store;
mod summary;
mod text;
mod view;

pub use builder::GraphBuilder;
pub use difference::{GraphDifference, Ignore, OpDifference};
pub use error::GraphError;
pub use store::GraphFile;
pub use summary::{CommFamily, DeviceTime, GraphSummary, KindTotal, RoleSummary};
pub(crate) use text::op_text;
pub(crate) use view::ProgramPlace;
pub use view::TemplateView;

use crate::ids::TemplateId;
use columns::{Column, Indices, OpRow};
use overrides::Overrides;
use packed::Packed;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// An execution graph. Immutable; share it in an `Arc`.
pub struct Graph {
    names: Vec<String>,
    meta: BTreeMap<String, String>,
    ops: OpTable,
    templates: Templates,
    comms: Comms,
    ranks: Ranks,
    overrides: Overrides,
    num_ops: u64,
    stored_bytes: OnceLock<u64>,
}

/// Distinct ops without host gap, group and, for computation, duration.
struct OpTable {
    tag: Column<u8>,
    a: Column<u8>,
    b: Column<u8>,
    c: Column<u8>,
    stream: Column<u32>,
    slot: Column<u32>,
    arg: Column<u32>,
    value: Column<u64>,
}

impl OpTable {
    fn len(&self) -> usize {
        self.tag.len()
    }

    #[inline]
    fn row(&self, index: usize) -> OpRow {
        OpRow {
            tag: self.tag[index],
            a: self.a[index],
            b: self.b[index],
            c: self.c[index],
            stream: self.stream[index],
            slot: self.slot[index],
            arg: self.arg[index],
            value: self.value[index],
        }
    }

    fn rows(&self) -> impl Iterator<Item = OpRow> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}

/// Op programs: ops `start[t]..start[t + 1]` of the row column are template `t`; its gaps (in picoseconds), groups and
/// durations (in picoseconds, of anything for what is no computation) are list `t` of their own.
struct Templates {
    names: Vec<String>,
    start: Column<u64>,
    row: Indices,
    gap: Packed,
    group: Packed,
    duration: Packed,
    shapes: Vec<Shape>,
}

impl Templates {
    fn range(&self, template: usize) -> std::ops::Range<usize> {
        self.start[template] as usize..self.start[template + 1] as usize
    }
}

/// How many streams, events and slots a template uses; derived from its ops.
#[derive(Clone, Copy, Default)]
struct Shape {
    streams: u32,
    events: u32,
    slots: u32,
}

/// Member lists: `members[start[c]..start[c + 1]]`, in group-rank order.
#[derive(PartialEq)]
struct Comms {
    start: Vec<u32>,
    members: Vec<u32>,
}

impl Comms {
    fn len(&self) -> usize {
        self.start.len() - 1
    }

    fn members(&self, comm: usize) -> &[u32] {
        &self.members[self.start[comm] as usize..self.start[comm + 1] as usize]
    }
}

/// Per rank: its template and its communicators `slots[start[r]..start[r + 1]]`.
#[derive(PartialEq)]
struct Ranks {
    template: Column<u32>,
    start: Column<u32>,
    slots: Column<u32>,
}

impl Ranks {
    fn slots(&self, rank: usize) -> &[u32] {
        &self.slots[self.start[rank] as usize..self.start[rank + 1] as usize]
    }
}

/// Same job: equal names, programs, communicators and ranks, however the tables of distinct ops are ordered.
impl PartialEq for Graph {
    fn eq(&self, other: &Self) -> bool {
        self.names == other.names
            && self.meta == other.meta
            && self.templates.names == other.templates.names
            && self.templates.start == other.templates.start
            && self.comms == other.comms
            && self.ranks == other.ranks
            && (0..self.world_size()).map(crate::ids::Rank).all(|r| self.rank_overrides(r).eq(other.rank_overrides(r)))
            && (0..self.num_templates() as u32)
                .map(TemplateId)
                .all(|t| self.template(t).iter().eq(other.template(t).iter()))
    }
}

/// A line, not the tables: [`Graph::to_text`] has everything.
impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph")
            .field("world_size", &self.world_size())
            .field("templates", &self.num_templates())
            .field("comms", &self.num_comms())
            .field("ops", &self.num_ops)
            .finish_non_exhaustive()
    }
}
