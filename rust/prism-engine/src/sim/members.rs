//! Where ranks are among the members of their communicators.

use crate::graph::Graph;
use crate::ids::{CommId, Rank};

/// Group ranks by rank and slot.
#[derive(Debug)]
pub(super) struct Positions {
    /// By rank, where its slots begin.
    first_slot: Vec<usize>,
    positions: Vec<u32>,
}

impl Positions {
    /// Passes over all members of all communicators once; `visit` is told communicator, rank and slot of each.
    pub(super) fn new(graph: &Graph, mut visit: impl FnMut(u32, u32, u32)) -> Self {
        let mut first_slot = Vec::with_capacity(graph.world_size() as usize + 1);
        first_slot.push(0);
        for rank in 0..graph.world_size() {
            first_slot.push(first_slot[rank as usize] + graph.rank_slots(Rank(rank)).len());
        }
        let mut positions = vec![0; first_slot[graph.world_size() as usize]];
        for comm in 0..graph.num_comms() as u32 {
            for (position, rank) in graph.comm_members(CommId(comm)).iter().enumerate() {
                let slots = graph.rank_slots(Rank(*rank));
                let slot = slots.iter().position(|own| *own == comm).expect("a graph's members have a slot");
                positions[first_slot[*rank as usize] + slot] = position as u32;
                visit(comm, *rank, slot as u32);
            }
        }
        Self { first_slot, positions }
    }

    /// Group rank of a rank in the communicator of a slot.
    pub(super) fn of(&self, rank: u32, slot: usize) -> u32 {
        self.positions[self.first_slot[rank as usize] + slot]
    }
}
