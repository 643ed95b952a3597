//! Programs that differ in nothing but the durations of compute.
//!
//! A job may have a template for every rank because each was measured by itself. Where the ops are otherwise the same, one by
//! one, such ranks can still run one program in step: what differs becomes a duration per rank and op.

use super::program::MAX_TOTAL;
use crate::graph::op::{Op, OpKind};
use crate::graph::{Graph, TemplateView};
use crate::ids::{Rank, TemplateId};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// With more ranks per template it is not worth to look.
const MOST_RANKS_PER_TEMPLATE: usize = 4;

/// With more sets than this, of which most have one template, nothing is compared any more: comparing all with all is dear.
const FEW_SETS: usize = 32;
/// With more sets than this, nothing is compared any more either.
const MOST_SETS: usize = 64;

/// Durations of an op by the rank's index in its role.
pub(super) type OwnDurations = BTreeMap<u32, Vec<SimTime>>;

/// Ranks of templates that are alike.
pub(super) struct Alike {
    /// The first of the templates: its program stands for all.
    pub(super) template: TemplateId,
    /// Ascending.
    pub(super) ranks: Vec<u32>,
}

/// Sets of ranks that can run one program, from the ranks of each template. `stretch` is the largest slow-down; templates
/// are compared only if it `may_look`.
pub(super) fn alike(graph: &Graph, ranks_of: Vec<Vec<u32>>, stretch: f64, may_look: bool) -> Vec<Alike> {
    let num_ranks: usize = ranks_of.iter().map(Vec::len).sum();
    let used = ranks_of.iter().filter(|ranks| !ranks.is_empty()).count();
    let looks = may_look && used > 1 && num_ranks < used * MOST_RANKS_PER_TEMPLATE;
    let mut sets: Vec<(Alike, Option<Known<'_>>)> = Vec::new();
    let (mut latest, mut seen) = (0, 0);
    for (template, ranks) in ranks_of.into_iter().enumerate().filter(|(_, ranks)| !ranks.is_empty()) {
        let template = TemplateId(template as u32);
        let view = graph.template(template);
        let is_like = |known: &Option<Known<'_>>| known.as_ref().is_some_and(|known| is_alike(view, known, stretch));
        let is_hopeless = sets.len() > MOST_SETS || (sets.len() > FEW_SETS && sets.len() * 2 > seen);
        let looks = looks && !is_hopeless;
        seen += 1;
        // Ranks next to each other mostly do the same.
        let is_latest = looks && sets.get(latest).is_some_and(|(_, known)| is_like(known));
        let any = || sets.iter().position(|(_, known)| is_like(known));
        let set = if looks { is_latest.then_some(latest).or_else(any) } else { None };
        latest = set.unwrap_or(sets.len());
        let Some(set) = set else {
            let known = looks.then(|| Known::new(view, stretch));
            sets.push((Alike { template, ranks }, known));
            continue;
        };
        sets[set].0.ranks.extend(ranks);
    }
    let mut sets: Vec<Alike> = sets.into_iter().map(|(set, _)| set).collect();
    for set in &mut sets {
        set.ranks.sort_unstable();
    }
    sets
}

/// Durations of the ops that differ between the templates of some ranks, which are alike.
pub(super) fn own_durations(graph: &Graph, ranks: &[u32]) -> OwnDurations {
    let template_of = |rank: &u32| graph.rank_template(Rank(*rank));
    let Some(first) = ranks.first().map(template_of) else { return OwnDurations::new() };
    if ranks.iter().all(|rank| template_of(rank) == first) {
        return OwnDurations::new();
    }
    let like = graph.template(first);
    let common: Vec<Option<SimTime>> = like.iter().map(|op| duration_of(&op)).collect();
    let mut own: Vec<Vec<SimTime>> = vec![Vec::new(); common.len()];
    for (at, template) in ranks.iter().map(template_of).enumerate().filter(|(_, template)| *template != first) {
        let view = graph.template(template);
        for op in view.differences(&like) {
            if let (Some(duration), Some(common)) = (duration_of(&view.op(op)), common[op]) {
                if own[op].is_empty() {
                    own[op].resize(ranks.len(), common);
                }
                own[op][at] = duration;
            }
        }
    }
    (0..).zip(own).filter(|(_, own)| !own.is_empty()).collect()
}

fn duration_of(op: &Op) -> Option<SimTime> {
    match op.kind {
        OpKind::Compute { duration, .. } => Some(duration),
        _ => None,
    }
}

/// Does a template have the ops of another but for durations? No if its durations are out of range: then it fails by itself.
fn is_alike(template: TemplateView<'_>, like: &Known<'_>, stretch: f64) -> bool {
    if template.len() != like.view.len() {
        return false;
    }
    // Longer than the other by so much.
    let mut longer = 0i64;
    template.differences(&like.view).into_iter().all(|at| {
        let (mut op, like) = (template.op(at), &like.ops[at]);
        if let (OpKind::Compute { duration, .. }, OpKind::Compute { duration: other, .. }) = (&mut op.kind, &like.kind)
        {
            if *duration < SimTime::ZERO {
                return false;
            }
            longer = longer.saturating_add((*duration - *other).scaled(stretch).0.max(0));
            *duration = *other;
        }
        op == *like
    }) && like.total.saturating_add(longer) <= MAX_TOTAL / 2
}

/// The first template of a set.
struct Known<'a> {
    view: TemplateView<'a>,
    ops: Vec<Op>,
    /// Its gaps and durations.
    total: i64,
}

impl<'a> Known<'a> {
    fn new(view: TemplateView<'a>, stretch: f64) -> Self {
        let ops: Vec<Op> = view.iter().collect();
        let length = |op: &Op| {
            let duration = duration_of(op).unwrap_or_default().scaled(stretch);
            op.host_gap.0.max(0).saturating_add(duration.0.max(0))
        };
        let total = ops.iter().map(length).fold(0, i64::saturating_add);
        Self { view, ops, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::GraphBuilder;
    use crate::graph::op::{ComputeClass, Provenance};
    use crate::ids::{EventId, NameId, StreamId};

    fn compute(us: i64, class: ComputeClass) -> Op {
        let (name, provenance) = (NameId(0), Provenance::Modelled);
        let kind = OpKind::Compute { duration: SimTime::from_ns(us * 1000), name, class, provenance };
        Op { host_gap: SimTime::from_ns(5), stream: StreamId(0), kind }
    }

    /// A graph of one rank per program, and the sets of ranks that are alike.
    fn sets(programs: &[Vec<Op>]) -> (Graph, Vec<Vec<u32>>) {
        let mut builder = GraphBuilder::new(programs.len() as u32);
        builder.intern_name("work");
        for (rank, ops) in programs.iter().enumerate() {
            let template = builder.add_template(&format!("{rank}"), ops).expect("valid");
            builder.set_rank(Rank(rank as u32), template, vec![]);
        }
        let graph = builder.finish().expect("valid");
        let ranks_of = (0..programs.len() as u32).map(|rank| vec![rank]).collect();
        let sets = alike(&graph, ranks_of, 1.0, true).into_iter().map(|set| set.ranks).collect();
        (graph, sets)
    }

    #[test]
    fn only_durations_may_differ() {
        let kernel = |us| compute(us, ComputeClass::Kernel);
        let record = Op { kind: OpKind::EventRecord { event: EventId(0) }, ..kernel(0) };
        let late = Op { host_gap: SimTime::from_ns(6), ..kernel(3) };
        let (graph, sets) = sets(&[
            vec![kernel(3), record, kernel(7)],
            vec![kernel(3), kernel(7), record],
            vec![kernel(3), record, kernel(8)],
            vec![kernel(3), record, compute(7, ComputeClass::Gemm)],
            vec![late, record, kernel(7)],
            vec![kernel(3), record, kernel(9)],
            vec![kernel(3), record],
        ]);
        assert_eq!(sets, [vec![0, 2, 5], vec![1], vec![3], vec![4], vec![6]]);
        let own = own_durations(&graph, &sets[0]);
        let us = |us: i64| SimTime::from_ns(us * 1000);
        assert_eq!(own, OwnDurations::from([(2, vec![us(7), us(8), us(9)])]));
        assert!(own_durations(&graph, &sets[1]).is_empty());
    }

    #[test]
    fn durations_out_of_range_stay_by_themselves() {
        let long = compute(i64::MAX / 2_000_000, ComputeClass::Kernel);
        let (_, sets) =
            sets(&[vec![compute(1, ComputeClass::Kernel)], vec![long], vec![compute(2, ComputeClass::Kernel)]]);
        assert_eq!(sets, [vec![0, 2], vec![1]]);
    }
}
