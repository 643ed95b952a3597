//! Which virtual ranks move data to or from the sandbox.
//!
//! Pruning removes participants, never dependencies: a rank that is not materialised moves no bytes, but it is timed like
//! every other, so a straggler among the pruned ranks is felt. Who exchanges data follows from the algorithms: the previous and
//! next rank of a ring, parents and children in the two trees, the other half of a message; an all-to-all has no neighbours
//! but everybody, and a gather or scatter has its root.

use crate::collective::CommShape;
use crate::graph::Graph;
use crate::graph::op::{CollectiveKind, OpKind};
use crate::ids::{CommId, Rank, SlotId};
use crate::profile::Profile;
use std::collections::{BTreeMap, BTreeSet};

/// The sandbox and every rank that exchanges data with it over a communicator its program uses.
#[must_use]
pub fn materialised(graph: &Graph, sandbox: &BTreeSet<Rank>, profile: &Profile) -> BTreeSet<Rank> {
    let mut kept = sandbox.clone();
    let mut shapes: BTreeMap<CommId, CommShape> = BTreeMap::new();
    for rank in sandbox {
        let slots = graph.rank_slots(*rank);
        for (slot, uses) in uses(graph, *rank) {
            let comm = CommId(slots[slot.index()]);
            let members = graph.comm_members(comm);
            let shape = shapes.entry(comm).or_insert_with(|| CommShape::new(members, profile));
            let me =
                members.iter().position(|member| *member == rank.0).expect("slots are the rank's communicators") as u32;
            kept.extend(uses.peers(shape, me).into_iter().map(|peer| Rank(members[peer as usize])));
        }
    }
    kept
}

/// What a program does with one communicator.
#[derive(Debug, Default)]
struct Uses {
    is_neighbourly: bool,
    is_all_to_all: bool,
    roots: BTreeSet<u32>,
    peers: BTreeSet<u32>,
}

impl Uses {
    /// Group ranks that exchange data with `me`.
    fn peers(&self, shape: &CommShape, me: u32) -> BTreeSet<u32> {
        let mut peers = &self.peers | &self.roots;
        if self.is_all_to_all || self.roots.contains(&me) {
            peers.extend(0..shape.len() as u32);
        } else if self.is_neighbourly {
            peers.extend(shape.data_neighbours(me));
        }
        peers
    }
}

fn uses(graph: &Graph, rank: Rank) -> BTreeMap<SlotId, Uses> {
    let mut uses: BTreeMap<SlotId, Uses> = BTreeMap::new();
    for op in graph.template(graph.rank_template(rank)).iter() {
        match op.kind {
            OpKind::Collective { slot, kind, root, .. } => {
                let uses = uses.entry(slot).or_default();
                match kind {
                    CollectiveKind::AllToAll => uses.is_all_to_all = true,
                    CollectiveKind::Gather | CollectiveKind::Scatter => _ = uses.roots.insert(root),
                    _ => uses.is_neighbourly = true,
                }
            }
            OpKind::PointToPoint { slot, peer, .. } => _ = uses.entry(slot).or_default().peers.insert(peer),
            _ => {}
        }
    }
    uses
}
