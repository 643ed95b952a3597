//! What the programs of a graph add to the explanation of a hang.

use super::hang::Hang;
use crate::graph::Graph;
use crate::graph::op::{Op, OpKind};
use crate::ids::{CommId, Rank};
use crate::sim::{Mismatch, SimError};

impl Hang {
    /// With the places of unequal halves of a message, and how calls that do not fit come to stand beside each other.
    pub(crate) fn with_programs(mut self, graph: &Graph, error: &SimError) -> Self {
        let more = match error {
            SimError::MessageMismatch { .. } => message_places(graph, error),
            SimError::Mismatch(found) => order(graph, found),
            _ => None,
        };
        if let Some(more) = more {
            self.cause.push_str(&more);
        }
        self
    }
}

fn message_places(graph: &Graph, error: &SimError) -> Option<String> {
    let &SimError::MessageMismatch { communicator, source_rank, destination_rank, sequence, .. } = error else {
        return None;
    };
    let place = |rank: Rank, other: Rank, sends: bool| {
        let slots = graph.rank_slots(rank);
        let is_it = |kind: OpKind| match kind {
            OpKind::PointToPoint { slot, is_send, peer, .. } => {
                let comm = slots[slot.index()];
                let members = graph.comm_members(CommId(comm));
                is_send == sends && comm == communicator && members[peer as usize] == other.0
            }
            _ => false,
        };
        let ops = graph.template(graph.rank_template(rank)).iter().enumerate().filter(|(_, op)| is_it(op.kind));
        ops.map(|(at, _)| at).nth(usize::try_from(sequence).ok()?)
    };
    let (send, receive) = (place(source_rank, destination_rank, true)?, place(destination_rank, source_rank, false)?);
    Some(format!(" (rank {source_rank} at op {send}, rank {destination_rank} at op {receive})"))
}

/// Do the calls fit once one is left out, or once two are swapped?
fn order(graph: &Graph, found: &Mismatch) -> Option<String> {
    let (usual, odd) = (*found.majority_ranks.first()?, *found.minority_ranks.first()?);
    let at = usize::try_from(found.sequence).ok()?;
    let two = |rank: Rank| {
        let slots = graph.rank_slots(rank);
        let calls =
            graph.template(graph.rank_template(rank)).iter().filter_map(move |op| call(op, slots, found.communicator));
        let mut calls = calls.skip(at);
        (calls.next(), calls.next())
    };
    let ((first, second), (odd_first, odd_second)) = (two(usual), two(odd));
    let is_next = second.is_some() && odd_first == second;
    let comes_next = odd_second.is_some() && odd_second == first;
    match (is_next, comes_next) {
        (true, true) => Some(format!("; rank {odd} makes this call and the next the other way round")),
        (true, false) => Some(format!("; what rank {odd} calls is the next call of rank {usual}: it left one out")),
        (false, true) => Some(format!("; the next call of rank {odd} is that of rank {usual}: it makes one too many")),
        (false, false) => None,
    }
}

/// A collective on a communicator, without what may differ between ranks (slot and group).
fn call(op: Op, slots: &[u32], communicator: u32) -> Option<OpKind> {
    match op.kind {
        OpKind::Collective { slot, kind, dtype, reduce, root, count, .. } if slots[slot.index()] == communicator => {
            Some(OpKind::Collective { slot: crate::ids::SlotId(0), kind, dtype, reduce, root, count, group: 0 })
        }
        _ => None,
    }
}
