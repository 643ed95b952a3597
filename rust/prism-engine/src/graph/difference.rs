//! In what two graphs of one job differ, op for op.
//!
//! Templates, communicators and names are numbered as it suits each graph; they are compared by what they stand for: ops by
//! kind, stream, event, peer, bytes and text of the name, communicators by their members and by which calls share one. Facts
//! about how a graph came about (`meta`) are no part of the job.

mod align;

use crate::graph::op::{Op, OpKind, OpKind as K};
use crate::graph::store::runs;
use crate::graph::{Graph, TemplateView, op_text};
use crate::ids::{CommId, NameId, Rank, TemplateId};
use crate::units::SimTime;
use align::{Program, Span, align};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use std::collections::BTreeMap;

/// What is left out of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignore {
    /// Durations of computation and what they rest on.
    pub durations: bool,
    /// Host time between calls.
    pub host: bool,
    /// Allocations from and returns to the driver: an allocator that asks whether the device is done answers by time.
    pub memory: bool,
}

/// Where two graphs differ first, for ranks that differ there in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpDifference {
    /// The lowest rank.
    pub rank: u32,
    /// How many ranks.
    pub ranks: u32,
    /// Index of the op in the rank's program in the left graph; in the right one it may be another.
    pub op: u32,
    /// What differs: `kind`, `stream`, `event`, `communicator`, `peer`, `bytes`, `root`, `reduction`, `group`, `name`,
    /// `class`, `provenance`, `duration`, `host_gap`, or `ops` where one has ops that the other does not.
    pub what: &'static str,
    /// What the left graph has there.
    pub left: String,
    /// What the right graph has there.
    pub right: String,
}

/// Result of [`Graph::difference`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GraphDifference {
    /// Nothing differs.
    pub equal: bool,
    /// Ranks of both.
    pub world_size: [u32; 2],
    /// Op instances of both.
    pub ops: [u64; 2],
    /// Ranks with any difference.
    pub ranks_differing: u32,
    /// Differing ops over all ranks, by what differs.
    pub differing: BTreeMap<&'static str, u64>,
    /// The first of them.
    pub first: Vec<OpDifference>,
}

/// Differences told in full, per pair of programs and in all.
const PER_PAIR: usize = 8;
const TOLD: usize = 64;
/// Pairs of programs that are remembered: jobs with more have a program per rank, which nobody else runs.
const KEPT: usize = 1024;

impl Graph {
    /// In what `other` differs from this graph, rank by rank and op by op. Ops that only one of them has are found by what
    /// both have before and behind them.
    ///
    /// Cost: O(ops) for every pair of templates that a rank has here and there, O(slots + own durations) for every rank.
    #[must_use]
    pub fn difference(&self, other: &Graph, ignore: Ignore) -> GraphDifference {
        let mut comparison = Comparison::new([self, other], ignore);
        if self.world_size() == other.world_size() {
            (0..self.world_size()).for_each(|rank| comparison.add_rank(rank));
        }
        comparison.finish()
    }
}

/// What is common to all ranks with the same two templates.
#[derive(Default)]
struct Pair {
    findings: Vec<Finding>,
    counts: BTreeMap<&'static str, u64>,
    /// Slots that stand for each other, with the op that says so.
    slots: Vec<([u32; 2], [u32; 2])>,
    /// Computations that stand for each other, where ranks have durations of their own.
    compute: Vec<([u32; 2], [SimTime; 2])>,
}

impl Pair {
    fn note(&mut self, finding: Finding, count: u64) {
        *self.counts.entry(finding.what).or_default() += count;
        if self.findings.len() < PER_PAIR {
            self.findings.push(finding);
        }
    }
}

struct Finding {
    ops: [u32; 2],
    what: &'static str,
    texts: [String; 2],
}

struct Comparison<'a> {
    graphs: [&'a Graph; 2],
    ignore: Ignore,
    has_own: bool,
    pairs: FxHashMap<[TemplateId; 2], (usize, Pair)>,
    num_pairs: usize,
    /// Communicators that stand for each other, both ways.
    comms: [FxHashMap<u32, u32>; 2],
    told: BTreeMap<(usize, u32, &'static str), OpDifference>,
    counts: BTreeMap<&'static str, u64>,
    ranks_differing: u32,
}

impl<'a> Comparison<'a> {
    fn new(graphs: [&'a Graph; 2], ignore: Ignore) -> Self {
        let has_own = !ignore.durations && graphs.iter().any(|graph| graph.has_own_durations());
        let (comms, told) = ([FxHashMap::default(), FxHashMap::default()], BTreeMap::new());
        Self {
            graphs,
            ignore,
            has_own,
            pairs: FxHashMap::default(),
            num_pairs: 0,
            comms,
            told,
            counts: BTreeMap::new(),
            ranks_differing: 0,
        }
    }

    fn add_rank(&mut self, rank: u32) {
        let key = self.graphs.map(|graph| graph.rank_template(Rank(rank)));
        let known = self.pairs.remove(&key);
        self.num_pairs += usize::from(known.is_none());
        let (number, pair) = known.unwrap_or_else(|| (self.num_pairs, self.compare(key)));
        let own = self.of_rank(rank, &pair);
        if !own.is_empty() || !pair.counts.is_empty() {
            self.ranks_differing += 1;
        }
        for (what, count) in &pair.counts {
            *self.counts.entry(what).or_default() += count;
        }
        for finding in &own {
            *self.counts.entry(finding.what).or_default() += 1;
        }
        for finding in pair.findings.iter().chain(own.iter().take(PER_PAIR)) {
            self.tell(rank, number, finding);
        }
        if self.pairs.len() < KEPT {
            self.pairs.insert(key, (number, pair));
        }
    }

    fn tell(&mut self, rank: u32, pair: usize, finding: &Finding) {
        let key = (pair, finding.ops[0], finding.what);
        if let Some(known) = self.told.get_mut(&key) {
            known.ranks += 1;
        } else if self.told.len() < TOLD {
            let [left, right] = finding.texts.clone();
            let entry = OpDifference { rank, ranks: 1, op: finding.ops[0], what: finding.what, left, right };
            self.told.insert(key, entry);
        }
    }

    /// Two programs.
    fn compare(&self, templates: [TemplateId; 2]) -> Pair {
        let programs =
            [0, 1].map(|side| Program::new(&self.graphs[side].template(templates[side]), self.ignore.memory));
        let names = [0, 1].map(|side| &self.graphs[side].names);
        let mut pair = Pair::default();
        let mut known = FxHashSet::default();
        for span in align(&programs, &names) {
            match span {
                Span::Both { at, len } => {
                    for step in 0..len {
                        let both = [programs[0].get(at[0] + step), programs[1].get(at[1] + step)];
                        self.compare_ops(both, names, &mut known, &mut pair);
                    }
                }
                Span::Apart { at, len } => {
                    let texts = [0, 1].map(|side| programs[side].excerpt(at[side], len[side], names[side]));
                    let ops = [0, 1].map(|side| programs[side].index_at(at[side]));
                    pair.note(Finding { ops, what: "ops", texts }, len[0].max(len[1]) as u64);
                }
            }
        }
        pair
    }

    /// Two ops that stand for each other.
    fn compare_ops(
        &self,
        [(left, one), (right, other)]: [(u32, Op); 2],
        names: [&Vec<String>; 2],
        known: &mut FxHashSet<[u32; 2]>,
        pair: &mut Pair,
    ) {
        let ops = [left, right];
        if let (Some(a), Some(b)) = (slot_of(&one.kind), slot_of(&other.kind))
            && known.insert([a, b])
        {
            pair.slots.push(([a, b], ops));
        }
        if let (true, Some(a), Some(b)) = (self.has_own, duration_of(&one.kind), duration_of(&other.kind)) {
            pair.compute.push((ops, [a, b]));
        }
        for what in unlike(&one, &other, names, self.ignore) {
            // Where ranks have durations of their own, those are compared rank by rank.
            if what != "duration" || !self.has_own {
                let texts = [text_of(&one, names[0]), text_of(&other, names[1])];
                pair.note(Finding { ops, what, texts }, 1);
            }
        }
    }

    /// What is a rank's own: communicators and durations.
    fn of_rank(&mut self, rank: u32, pair: &Pair) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (slots, ops) in &pair.slots {
            let comms = [0, 1].map(|side| self.graphs[side].rank_slots(Rank(rank))[slots[side] as usize]);
            if let Some(texts) = self.unlike_comms(comms) {
                findings.push(Finding { ops: *ops, what: "communicator", texts });
            }
        }
        if self.has_own {
            self.own_durations(rank, pair, &mut findings);
        }
        findings
    }

    /// Communicators must have equal members, and stand for each other wherever they are used.
    fn unlike_comms(&mut self, comms: [u32; 2]) -> Option<[String; 2]> {
        let members = [0, 1].map(|side| self.graphs[side].comm_members(CommId(comms[side])));
        if members[0] != members[1] {
            return Some(members.map(members_text));
        }
        let here = *self.comms[0].entry(comms[0]).or_insert(comms[1]);
        let there = *self.comms[1].entry(comms[1]).or_insert(comms[0]);
        (here != comms[1] || there != comms[0]).then(|| {
            let text = |side: usize, before: u32| {
                let other = if before == comms[side] {
                    String::new()
                } else {
                    format!(", number {before} where the other graph has number {}", comms[1 - side])
                };
                format!("communicator {} of {}{other}", comms[side], members_text(members[side]))
            };
            [text(0, there), text(1, here)]
        })
    }

    fn own_durations(&self, rank: u32, pair: &Pair, findings: &mut Vec<Finding>) {
        let own = self.graphs.map(|graph| graph.rank_overrides(Rank(rank)).collect::<FxHashMap<_, _>>());
        for (ops, templates) in &pair.compute {
            let [left, right] = [0, 1].map(|side| own[side].get(&ops[side]).copied().unwrap_or(templates[side]));
            if left != right {
                let texts = [left, right].map(|duration| format!("{} ps", duration.as_ps()));
                findings.push(Finding { ops: *ops, what: "duration", texts });
            }
        }
    }

    fn finish(self) -> GraphDifference {
        let [left, right] = self.graphs;
        let world_size = self.graphs.map(Graph::world_size);
        let mut first: Vec<_> = self.told.into_values().collect();
        first.sort_by_key(|entry| (entry.rank, entry.op));
        GraphDifference {
            equal: world_size[0] == world_size[1] && self.counts.is_empty(),
            world_size,
            ops: [left.num_ops(), right.num_ops()],
            ranks_differing: self.ranks_differing,
            differing: self.counts,
            first,
        }
    }
}

fn slot_of(kind: &OpKind) -> Option<u32> {
    match kind {
        OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. } => Some(slot.0),
        _ => None,
    }
}

fn duration_of(kind: &OpKind) -> Option<SimTime> {
    match kind {
        OpKind::Compute { duration, .. } => Some(*duration),
        _ => None,
    }
}

fn name_of(names: &[String], name: NameId) -> &str {
    names.get(name.index()).map_or("", String::as_str)
}

fn text_of(op: &Op, names: &[String]) -> String {
    op_text(op, &|name| name_of(names, NameId(name)))
}

fn members_text(members: &[u32]) -> String {
    const RUNS: usize = 6;
    let run_text = |run: crate::graph::store::Run| match (run.count, run.stride) {
        (1, _) => run.first.to_string(),
        (count, 1) => format!("{}-{}", run.first, run.first + (count - 1)),
        (count, stride) => {
            let last = run.first.wrapping_add(stride.wrapping_mul(count - 1));
            // Steps may go down.
            if last < run.first {
                format!("{}-{last}/-{}", run.first, stride.wrapping_neg())
            } else {
                format!("{}-{last}/{stride}", run.first)
            }
        }
    };
    let texts: Vec<_> = runs(members).take(RUNS + 1).map(run_text).collect();
    let more = if texts.len() > RUNS { ",..." } else { "" };
    format!("ranks {}{more} ({})", texts[..texts.len().min(RUNS)].join(","), members.len())
}

/// In what two ops of one kind differ, communicators and, where ranks have their own, durations aside.
fn unlike(left: &Op, right: &Op, names: [&Vec<String>; 2], ignore: Ignore) -> Vec<&'static str> {
    let mut found = Vec::new();
    let mut check = |equal: bool, what: &'static str| {
        if !equal {
            found.push(what);
        }
    };
    check(left.stream == right.stream, "stream");
    check(ignore.host || left.host_gap == right.host_gap, "host_gap");
    match (left.kind, right.kind) {
        (
            K::Compute { duration: d1, name: n1, class: c1, provenance: p1 },
            K::Compute { duration: d2, name: n2, class: c2, provenance: p2 },
        ) => {
            check(name_of(names[0], n1) == name_of(names[1], n2), "name");
            check(c1 == c2, "class");
            check(ignore.durations || p1 == p2, "provenance");
            check(ignore.durations || d1 == d2, "duration");
        }
        (
            K::Collective { kind: k1, dtype: d1, reduce: r1, root: o1, count: n1, group: g1, .. },
            K::Collective { kind: k2, dtype: d2, reduce: r2, root: o2, count: n2, group: g2, .. },
        ) => {
            check(k1 == k2, "kind");
            check(d1 == d2 && n1 == n2, "bytes");
            check(r1 == r2, "reduction");
            check(o1 == o2, "root");
            check(g1 == g2, "group");
        }
        (
            K::PointToPoint { is_send: s1, dtype: d1, peer: p1, count: n1, group: g1, .. },
            K::PointToPoint { is_send: s2, dtype: d2, peer: p2, count: n2, group: g2, .. },
        ) => {
            check(s1 == s2, "kind");
            check(d1 == d2 && n1 == n2, "bytes");
            check(p1 == p2, "peer");
            check(g1 == g2, "group");
        }
        (K::EventRecord { event: a }, K::EventRecord { event: b })
        | (K::EventWait { event: a }, K::EventWait { event: b })
        | (K::EventSync { event: a }, K::EventSync { event: b }) => check(a == b, "event"),
        (K::Alloc { bytes: a }, K::Alloc { bytes: b }) | (K::Free { bytes: a }, K::Free { bytes: b }) => {
            check(a == b, "bytes");
        }
        (a, b) => check(std::mem::discriminant(&a) == std::mem::discriminant(&b), "kind"),
    }
    found
}

impl Graph {
    /// Has any rank durations of its own?
    fn has_own_durations(&self) -> bool {
        !self.overrides.rank.is_empty() || !self.overrides.column_op.is_empty()
    }
}

impl Program {
    fn new(view: &TemplateView<'_>, without_memory: bool) -> Self {
        let mut program = Self { ops: Vec::with_capacity(view.len()), index: Vec::with_capacity(view.len()) };
        let mut carried = SimTime::ZERO;
        for (index, op) in view.iter().enumerate() {
            if without_memory && matches!(op.kind, OpKind::Alloc { .. } | OpKind::Free { .. }) {
                carried += op.host_gap; // the host's time of the call stays
                continue;
            }
            program.ops.push(Op { host_gap: op.host_gap + carried, ..op });
            program.index.push(index as u32);
            carried = SimTime::ZERO;
        }
        program
    }
}
