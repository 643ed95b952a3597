//! Compute durations that are single ranks' own.

use crate::graph::columns::{Column, tag};
use crate::graph::packed::{Packed, PackedBuilder, Spread};
use crate::graph::{Graph, GraphError, Ranks};
use crate::ids::{Rank, TemplateId};
use crate::units::SimTime;
use std::collections::BTreeMap;
use std::ops::Range;

/// Two forms, for every op of a template the smaller one: a column over the ranks of the template (ascending) where many
/// have a duration of their own, entries by rank where few do. No op has both.
pub(super) struct Overrides {
    /// Entries `start[i]..start[i + 1]` belong to `rank[i]` (ascending).
    pub(super) rank: Column<u32>,
    pub(super) start: Column<u64>,
    pub(super) op: Column<u32>,
    pub(super) ps: Column<u64>,
    /// Column `i` is of op `column_op[i]` of template `column_template[i]` (ascending).
    pub(super) column_template: Column<u32>,
    pub(super) column_op: Column<u32>,
    pub(super) columns: Packed,
    /// Place of every rank among those of its template; derived, and empty when there are no columns.
    place: Vec<u32>,
}

/// Bytes of an entry, and of a column besides its values.
const ENTRY_BYTES: usize = 12;
const COLUMN_BYTES: usize = 40;

/// Durations by rank, and of each rank by op.
pub(super) type OwnDurations = BTreeMap<Rank, Vec<(u32, SimTime)>>;

impl Overrides {
    /// From stored columns, which must be [checked](check).
    pub(super) fn from_columns(
        [rank, op, column_template, column_op]: [Column<u32>; 4],
        [start, ps]: [Column<u64>; 2],
        columns: Packed,
        ranks: &Ranks,
    ) -> Self {
        let place = if columns.len() == 0 { Vec::new() } else { places(&ranks.template) };
        Self { rank, start, op, ps, column_template, column_op, columns, place }
    }

    /// The smaller form for every op. Ranks, ops and durations must have been checked; of two durations of one op the
    /// later one counts.
    pub(super) fn new(mut own: OwnDurations, ranks: &Ranks) -> Self {
        for durations in own.values_mut() {
            durations.reverse();
            durations.sort_by_key(|(op, _)| *op);
            durations.dedup_by_key(|(op, _)| *op);
        }
        let mut by_template: BTreeMap<u32, Vec<Rank>> = BTreeMap::new();
        for rank in own.keys() {
            by_template.entry(ranks.template[rank.index()]).or_default().push(*rank);
        }
        let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
        if !own.is_empty() {
            ranks.template.iter().for_each(|template| *sizes.entry(*template).or_default() += 1);
        }
        let mut columns = ColumnBuilder::default();
        for (template, owners) in &by_template {
            let place = |rank: &Rank| rank.0;
            let members: Vec<u32> = if owners.len() == sizes[template] {
                owners.iter().map(place).collect()
            } else {
                (0..ranks.template.len() as u32).filter(|rank| ranks.template[*rank as usize] == *template).collect()
            };
            columns.add_template(*template, &members, &own);
        }
        columns.finish(own, ranks)
    }

    /// Own durations of a rank, ascending by op.
    pub(super) fn of(&self, rank: u32, template: u32) -> impl Iterator<Item = (u32, SimTime)> + '_ {
        let range = self.entries(rank);
        let mut entries = self.op[range.clone()].iter().copied().zip(self.ps[range].iter().copied()).peekable();
        let place = self.place.get(rank as usize).map_or(0, |place| *place as usize);
        let mut columns = self.columns_of(template).filter_map(move |column| {
            let ps = self.columns.head(column).get_if_any(self.columns.data(), place)?;
            Some((self.column_op[column], ps))
        });
        let mut waiting = columns.next();
        std::iter::from_fn(move || {
            let next = match (waiting, entries.peek()) {
                (Some((column, _)), Some((entry, _))) if entry < &column => entries.next(),
                (Some(_), _) => std::mem::replace(&mut waiting, columns.next()),
                (None, _) => entries.next(),
            };
            next.map(|(op, ps)| (op, SimTime::from_ps(ps as i64)))
        })
    }

    fn entries(&self, rank: u32) -> Range<usize> {
        self.rank.binary_search(&rank).map_or(0..0, |i| self.start[i] as usize..self.start[i + 1] as usize)
    }

    fn columns_of(&self, template: u32) -> Range<usize> {
        let first = self.column_template.partition_point(|of| *of < template);
        first..first + self.column_template[first..].partition_point(|of| *of == template)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let entries =
            self.rank.memory_bytes() + self.start.memory_bytes() + self.op.memory_bytes() + self.ps.memory_bytes();
        let ids = self.column_template.memory_bytes() + self.column_op.memory_bytes();
        entries + ids + self.columns.memory_bytes() + 4 * self.place.len()
    }
}

/// Place of every rank among those of its template.
fn places(template: &[u32]) -> Vec<u32> {
    let mut next: BTreeMap<u32, u32> = BTreeMap::new();
    let mut place = |template: &u32| {
        let next = next.entry(*template).or_default();
        *next += 1;
        *next - 1
    };
    template.iter().map(&mut place).collect()
}

#[derive(Default)]
struct ColumnBuilder {
    template: Vec<u32>,
    op: Vec<u32>,
    columns: PackedBuilder,
}

impl ColumnBuilder {
    /// Columns of those ops of a template for which that is the smaller form.
    fn add_template(&mut self, template: u32, members: &[u32], own: &OwnDurations) {
        let lists: Vec<&[(u32, SimTime)]> =
            members.iter().map(|rank| own.get(&Rank(*rank)).map_or(&[][..], Vec::as_slice)).collect();
        let mut spreads: BTreeMap<u32, Spread> = BTreeMap::new();
        let ops = lists.iter().filter_map(|list| list.last()).map(|(op, _)| op + 1).max().unwrap_or(0);
        let mut dense = vec![Spread::default(); ops as usize];
        for (op, duration) in lists.iter().copied().flatten() {
            dense[*op as usize].add(duration.as_ps() as u64);
        }
        for (op, spread) in dense.into_iter().enumerate() {
            if COLUMN_BYTES + spread.width(1) * members.len() < ENTRY_BYTES * spread.count() {
                spreads.insert(op as u32, spread);
            }
        }
        let mut cursors = vec![0_usize; lists.len()];
        for (op, spread) in spreads {
            let values = lists.iter().zip(&mut cursors).map(|(list, cursor)| {
                *cursor += list[*cursor..].iter().take_while(|(other, _)| *other < op).count();
                list.get(*cursor).filter(|(other, _)| *other == op).map(|(_, duration)| duration.as_ps() as u64)
            });
            self.columns.push_with_gaps(spread, values);
            self.template.push(template);
            self.op.push(op);
        }
    }

    /// Entries for the rest.
    fn finish(self, own: OwnDurations, ranks: &Ranks) -> Overrides {
        let is_column = |template: u32, op: u32| {
            let first = self.template.partition_point(|of| *of < template);
            let last = self.template.partition_point(|of| *of <= template);
            self.op[first..last].binary_search(&op).is_ok()
        };
        let (mut rank, mut start, mut op, mut ps) = (Vec::new(), vec![0], Vec::new(), Vec::new());
        for (owner, durations) in own {
            let template = ranks.template[owner.index()];
            let before = op.len();
            for (index, duration) in durations.into_iter().filter(|(index, _)| !is_column(template, *index)) {
                op.push(index);
                ps.push(duration.as_ps() as u64);
            }
            if op.len() > before {
                rank.push(owner.0);
                start.push(op.len() as u64);
            }
        }
        let entries = [rank.into(), op.into(), self.template.into(), self.op.into()];
        Overrides::from_columns(entries, [start.into(), ps.into()], self.columns.finish(), ranks)
    }
}

/// Is the op one that can have a duration of a rank's own?
pub(super) fn owner(graph: &Graph, rank: u32, op: u32, ps: i64) -> Result<(), GraphError> {
    let error = |op: Option<u32>, message: &str| Err(GraphError::invalid(Some(rank), op, message));
    let Some(&template) = graph.ranks.template.get(rank as usize) else {
        return error(None, "it has overrides but is not a rank of the world");
    };
    if !is_compute(graph, template, op) {
        return error(Some(op), "only compute ops can have a duration of their own");
    }
    if ps < 0 { error(Some(op), "its own duration is negative") } else { Ok(()) }
}

fn is_compute(graph: &Graph, template: u32, op: u32) -> bool {
    let view = graph.template(TemplateId(template));
    (op as usize) < view.len() && view.row(op as usize).tag == tag::COMPUTE
}

/// Entries and columns are of compute ops of the graph, and no op has both; values of columns are in range already.
pub(super) fn check(graph: &Graph) -> Result<(), GraphError> {
    let own = &graph.overrides;
    for (&template, &op) in own.column_template.iter().zip(own.column_op.iter()) {
        if template as usize >= graph.num_templates() || !is_compute(graph, template, op) {
            let message = format!("template {template}: only compute ops can have a duration of their own");
            return Err(GraphError::invalid(None, Some(op), message));
        }
    }
    for &rank in own.rank.iter() {
        let columns = graph.ranks.template.get(rank as usize).map_or(0..0, |template| own.columns_of(*template));
        for entry in own.entries(rank) {
            let op = own.op[entry];
            owner(graph, rank, op, own.ps[entry] as i64)?;
            if own.column_op[columns.clone()].binary_search(&op).is_ok() {
                return Err(GraphError::invalid(Some(rank), Some(op), "its own duration is stored twice"));
            }
        }
    }
    Ok(())
}
