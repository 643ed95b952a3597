//! How large a job is at message level, before anything of it is made.

use super::LowerOptions;
use super::pattern::count;
use crate::collective::{CollectiveCall, ShapePool};
use crate::graph::Graph;
use crate::graph::op::OpKind;
use crate::ids::{CommId, Rank, SlotId, TemplateId};
use crate::sim::{Call, SimError, fuse};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Most nodes of a job: 4 GB.
const MAX_NODES: u64 = 1 << 26;
/// Most messages of one collective that are listed pair by pair: 0.4 GB.
const MAX_PAIRS: u64 = 1 << 24;

/// What one op program adds to every rank that runs it.
#[derive(Default)]
struct Share {
    nodes: u64,
    sends: u64,
    /// Collectives by slot, with how often each is called.
    calls: Vec<Vec<(Call, u64)>>,
}

/// Counts the messages of some ranks, all of which are there. Refuses jobs that are too large. O(ops of all programs + ranks'
/// communicators).
pub(super) fn count_messages(graph: &Graph, options: &LowerOptions, ranks: &[u32]) -> Result<u64, SimError> {
    let mut shares: BTreeMap<TemplateId, Share> = BTreeMap::new();
    let mut shapes = ShapePool::new(options.profile.clone());
    let mut known: FxHashMap<(u64, CollectiveCall), u64> = FxHashMap::default();
    let (mut nodes, mut messages) = (0u64, 0u64);
    for rank in ranks {
        let template = graph.rank_template(Rank(*rank));
        let share = shares.entry(template).or_insert_with(|| Share::of(graph, template));
        nodes += share.nodes;
        messages = messages.saturating_add(share.sends);
        for (calls, comm) in share.calls.iter().zip(graph.rank_slots(Rank(*rank))) {
            let members = graph.comm_members(CommId(*comm));
            // Every member calls the same; the first counts for all.
            if members.first() != Some(rank) || calls.is_empty() {
                continue;
            }
            let shape = shapes.shape(members);
            for (call, times) in calls {
                if let Some(refusal) = shape.refusal(call.kind) {
                    return Err(SimError::invalid(format!("a communicator of {} ranks: {refusal}", members.len())));
                }
                let bytes = call.buffer_bytes(members.len() as u64);
                let call = CollectiveCall { kind: call.kind, bytes, root: call.root, ops: call.ops };
                let each =
                    *known.entry((shape.id, call)).or_insert_with(|| count(&shape, &call, options.step_messages));
                if crate::collective::CollectiveKind::AllToAll == call.kind && each > MAX_PAIRS {
                    return Err(too_many_pairs(members.len(), each));
                }
                messages = messages.saturating_add(each.saturating_mul(*times));
            }
        }
    }
    if messages > options.max_messages {
        return Err(too_many(messages, options.max_messages));
    }
    if nodes > MAX_NODES {
        return Err(too_large(nodes, ranks.len()));
    }
    Ok(messages)
}

impl Share {
    fn of(graph: &Graph, template: TemplateId) -> Self {
        let view = graph.template(template);
        let mut share = Self { calls: vec![Vec::new(); view.num_slots() as usize], ..Self::default() };
        // The collectives of the open group by slot: they are fused when it ends.
        let mut open: (u32, BTreeMap<SlotId, Vec<Call>>) = (0, BTreeMap::new());
        for op in view.iter() {
            let group = match op.kind {
                OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
                _ => 0,
            };
            if group == 0 || group != open.0 {
                share.close(std::mem::take(&mut open.1));
                open.0 = group;
            }
            // An issue time of its own, and what it is.
            share.nodes += match op.kind {
                OpKind::Alloc { .. } | OpKind::Free { .. } => 0,
                OpKind::Collective { .. } => 3,
                OpKind::PointToPoint { .. } => 4,
                _ => 2,
            };
            match op.kind {
                OpKind::PointToPoint { is_send: true, .. } => share.sends += 1,
                OpKind::Collective { slot, kind, dtype, reduce, root, count, .. } => {
                    let call = Call { op: 0, kind, dtype, reduce, root, count, ops: 1, continues: false };
                    open.1.entry(slot).or_default().push(call);
                }
                _ => {}
            }
        }
        share.close(open.1);
        share
    }

    /// A group has ended: its collectives are fused.
    fn close(&mut self, group: BTreeMap<SlotId, Vec<Call>>) {
        for (slot, calls) in group {
            let known = &mut self.calls[slot.index()];
            for call in fuse(&calls) {
                match known.iter_mut().find(|(other, _)| *other == call) {
                    Some((_, times)) => *times += 1,
                    None => known.push((call, 1)),
                }
            }
        }
    }
}

fn too_many(messages: u64, most: u64) -> SimError {
    SimError::invalid(format!(
        "the job is {messages} messages, and at most {most} are evaluated one by one: lower it with one message per ring step \
         (coarse), take fewer iterations or ranks, or replay without contention and overlap, which needs no messages"
    ))
}

fn too_many_pairs(ranks: usize, messages: u64) -> SimError {
    SimError::invalid(format!(
        "an all-to-all of {ranks} ranks is {messages} messages, each between another pair, and at most {MAX_PAIRS} are \
         listed: take fewer ranks, or replay without contention and overlap"
    ))
}

fn too_large(nodes: u64, ranks: usize) -> SimError {
    SimError::invalid(format!(
        "the programs of {ranks} ranks have about {nodes} points of time, and at most {MAX_NODES} are kept: take fewer \
         iterations or ranks, or replay without contention and overlap"
    ))
}
