//! What a replay refuses to answer about, by rank and op: waits for what was never recorded, and times that do not fit.

use super::ReplayOptions;
use crate::collective::{CollectiveCall, CommShape, message, uniform_cost};
use crate::graph::Graph;
use crate::graph::op::{Op, OpKind};
use crate::ids::{CommId, EventId, Rank, SlotId, TemplateId};
use crate::sim::{Call, SimError, Simulation};
use crate::units::SimTime;
use std::collections::{BTreeMap, BTreeSet};

/// Every wait for an event of a graph has a record before it in the same program. CUDA lets waits for other events pass,
/// and recordings leave such waits out; in a graph one is a dependency that points nowhere.
pub(crate) fn check_events(graph: &Graph) -> Result<(), SimError> {
    let mut seen = BTreeSet::new();
    for rank in (0..graph.world_size()).map(Rank) {
        let template = graph.rank_template(rank);
        if !seen.insert(template) {
            continue;
        }
        if let Some((op, event)) = first_dangling(graph, template) {
            let records = |op: &Op| matches!(op.kind, OpKind::EventRecord { event: other } if other == event);
            let later = graph.template(template).iter().skip(op).position(|op| records(&op));
            let what = match later {
                Some(ops) => format!("is recorded only after it, at op {}", op + ops),
                None => "its program never records".to_owned(),
            };
            let message = format!("rank {rank}, op {op}: waits for event {event}, which {what}");
            return Err(SimError::Invalid { message });
        }
    }
    Ok(())
}

fn first_dangling(graph: &Graph, template: TemplateId) -> Option<(usize, EventId)> {
    let view = graph.template(template);
    if view.num_events() == 0 {
        return None;
    }
    let mut recorded = vec![false; view.num_events() as usize];
    for (index, op) in view.iter().enumerate() {
        match op.kind {
            OpKind::EventRecord { event } => recorded[event.index()] = true,
            OpKind::EventWait { event } | OpKind::EventSync { event } if !recorded[event.index()] => {
                return Some((index, event));
            }
            _ => {}
        }
    }
    None
}

/// Longest sum of gaps and durations of a rank's program, longest sum of durations of its own, and longest end of a call, as
/// the simulation has them.
const MAX_SUM: i128 = i64::MAX as i128 / 4;
const MAX_OWN: i128 = i64::MAX as i128 / 8;
const MAX_CALL: SimTime = SimTime(i64::MAX / 2);

/// Names rank and op of times that are too long, if that is the error: a rank whose own program is, a call that alone is, or
/// the call at which waits for others have added up to it.
pub(crate) fn placed(
    error: SimError,
    graph: &Graph,
    options: &ReplayOptions,
    simulation: Option<&Simulation>,
) -> SimError {
    let SimError::TooLong { rank: None, op: None, what } = error else { return error };
    // Ranks of one template without numbers of their own add up to the same.
    let mut seen = BTreeSet::new();
    let differs = |rank: &Rank| options.slow.contains_key(rank) || graph.rank_overrides(*rank).next().is_some();
    let mut ranks = (0..graph.world_size()).map(Rank);
    let own = ranks.find_map(|rank| {
        let is_new = differs(&rank) || seen.insert(graph.rank_template(rank));
        is_new.then(|| Some((rank, own_cause(graph, options, rank)?))).flatten()
    });
    // A call that everybody came to and nobody has left.
    let left = || {
        let blocked = simulation?.blocked().into_iter().find(|blocked| blocked.missing.is_empty())?;
        Some((blocked.rank, blocked.op))
    };
    let (rank, op) = own.or_else(left).unzip();
    SimError::TooLong { rank, op, what }
}

/// The op at which a rank's own times grow too long.
fn own_cause(graph: &Graph, options: &ReplayOptions, rank: Rank) -> Option<u32> {
    let own: BTreeMap<u32, SimTime> = graph.rank_overrides(rank).collect();
    let factor = options.slow.get(&rank).copied().unwrap_or(1.0).max(1.0);
    let (mut sum, mut own_sum) = (0_i128, 0_i128);
    for (index, op) in (0..).zip(graph.template(graph.rank_template(rank)).iter()) {
        sum += i128::from(op.host_gap.as_ps());
        if let OpKind::Compute { duration, .. } = op.kind {
            sum += i128::from(duration.scaled(factor).as_ps());
            own_sum += own.get(&index).map_or(0, |duration| i128::from(duration.scaled(factor).as_ps()));
        }
        if sum > MAX_SUM || own_sum > MAX_OWN || takes_too_long(graph, options, rank, &op) {
            return Some(index);
        }
    }
    None
}

fn takes_too_long(graph: &Graph, options: &ReplayOptions, rank: Rank, op: &Op) -> bool {
    let members = |slot: SlotId| graph.comm_members(CommId(graph.rank_slots(rank)[slot.index()]));
    match op.kind {
        OpKind::Collective { slot, kind, dtype, reduce, root, count, .. } => {
            let members = members(slot);
            let call = Call { op: 0, kind, dtype, reduce, root, count, ops: 1, continues: false };
            let bytes = call.buffer_bytes(members.len() as u64);
            let call = CollectiveCall { kind, bytes, root, ops: 1 };
            uniform_cost(&CommShape::new(members, &options.profile), &call) > MAX_CALL
        }
        OpKind::PointToPoint { slot, dtype, peer, count, .. } => {
            let bytes = count.saturating_mul(dtype.size_bytes());
            let to = members(slot)[peer as usize];
            message(&options.profile, rank.0, to, bytes, SimTime::ZERO, SimTime::ZERO).1 > MAX_CALL
        }
        _ => false,
    }
}
