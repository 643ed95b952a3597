//! Device memory NCCL itself takes, which the program's allocator never sees.
//!
//! A communicator costs little until it is used: the buffers of an algorithm's connections are made when the algorithm is
//! first chosen, those of a peer with the first message to or from it (`NCCL_RUNTIME_CONNECT`, the default with CUDA's
//! virtual memory). Every communicator has its own, also the child of a split. Modelled, not measured: the number of
//! channels comes from a topology search in NCCL. The buffers of switches that reduce (NVLS) and of PAT are not known: what is
//! told is the memory of the same collectives over rings and trees.

use crate::collective::{self, Algorithm, CollectiveCall, CommShape};
use crate::cost::comm::node_of;
use crate::graph::op::{CollectiveKind, OpKind};
use crate::profile::Profile;
use std::collections::BTreeSet;

/// Buffers of one connection of one channel: Simple 4 MiB, LL 512 KiB, LL128 4.6875 MiB (NCCL 2.30 `init.cc`).
const CONNECTION_BYTES: u64 = (4 << 20) + (512 << 10) + 4_915_200;
/// Channels NCCL opens on a node with NVSwitch and eight NICs.
const NUM_CHANNELS: u64 = 16;
/// A rank receives from one ring neighbour and sends to another.
const RING_CONNECTIONS: u64 = 2;
/// Channels that carry the messages between two GPUs of a node.
const CHANNELS_PER_PEER: u64 = 2;
/// Messages through network cards share one pool per direction: 16 steps of 128 KiB for each channel (`net.cc`).
const NETWORK_POOL_BYTES: u64 = NUM_CHANNELS * 16 * (128 << 10);

/// What a rank has used a communicator for, as far as it decides about buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Collectives by number of the kind and power of two of the bytes: enough to tell their algorithms.
    collectives: BTreeSet<(u8, u64)>,
    /// Group ranks sent to.
    sends: BTreeSet<u32>,
    /// Group ranks received from.
    receives: BTreeSet<u32>,
}

impl Uses {
    /// Could the call need buffers that no earlier one did? Cheap: it is asked for every call.
    pub(crate) fn is_new(&self, kind: &OpKind) -> bool {
        match *kind {
            OpKind::Collective { kind: CollectiveKind::AllToAll, .. } => self.sends.len() < 2,
            OpKind::Collective { kind, dtype, count, .. } => {
                !self.collectives.contains(&(kind as u8, bucket(count.saturating_mul(dtype.size_bytes()))))
            }
            OpKind::PointToPoint { is_send, peer, .. } => {
                !if is_send { &self.sends } else { &self.receives }.contains(&peer)
            }
            _ => false,
        }
    }

    /// Takes a call into account. Calls without bytes connect nobody.
    pub(crate) fn add(&mut self, kind: &OpKind, num_members: usize, group_rank: u32) {
        let members = 0..num_members as u32;
        match *kind {
            OpKind::Collective { kind, dtype, count, root, .. } if count > 0 => {
                let bytes = count.saturating_mul(dtype.size_bytes());
                match kind {
                    CollectiveKind::AllToAll => {
                        self.sends.extend(members.clone());
                        self.receives.extend(members);
                    }
                    CollectiveKind::Gather if group_rank == root => self.receives.extend(members),
                    CollectiveKind::Scatter if group_rank == root => self.sends.extend(members),
                    CollectiveKind::Gather => _ = self.sends.insert(root),
                    CollectiveKind::Scatter => _ = self.receives.insert(root),
                    _ => _ = self.collectives.insert((kind as u8, bucket(bytes))),
                }
            }
            OpKind::PointToPoint { is_send, count, peer, .. } if count > 0 => {
                if is_send { &mut self.sends } else { &mut self.receives }.insert(peer);
            }
            _ => {}
        }
    }

    fn is_empty(&self) -> bool {
        self.collectives.is_empty() && self.sends.is_empty() && self.receives.is_empty()
    }
}

fn bucket(bytes: u64) -> u64 {
    bytes.checked_next_power_of_two().unwrap_or(bytes)
}

/// Bytes NCCL holds on the member with group rank `group_rank` for a communicator used like this.
pub(crate) fn communicator_bytes(members: &[u32], group_rank: u32, uses: &Uses, profile: &Profile) -> u64 {
    if members.len() < 2 || uses.is_empty() {
        return 0;
    }
    let connections = collective_connections(members, group_rank, uses, profile);
    connections * CONNECTION_BYTES + message_bytes(members, group_rank, uses, profile)
}

/// Connections of ring and trees over all channels.
fn collective_connections(members: &[u32], group_rank: u32, uses: &Uses, profile: &Profile) -> u64 {
    if uses.collectives.is_empty() {
        return 0;
    }
    let mut without_switches = profile.clone();
    without_switches.node.nvls = false;
    let shape = CommShape::new(members, &without_switches);
    let algorithm = |&(kind, bytes): &(u8, u64)| {
        let kind = CollectiveKind::from_u8(kind).expect("the number of a kind");
        // The call states the part of one member where the buffer has a part for each.
        let parts = if matches!(kind, CollectiveKind::AllGather | CollectiveKind::ReduceScatter) {
            members.len() as u64
        } else {
            1
        };
        collective::choice(&shape, &CollectiveCall { kind, bytes: bytes.saturating_mul(parts), root: 0, ops: 1 })
            .algorithm
    };
    let chosen: Vec<Algorithm> = uses.collectives.iter().map(algorithm).collect();
    let ring = chosen.iter().any(|algorithm| matches!(algorithm, Algorithm::Ring | Algorithm::Chain | Algorithm::Pat));
    let tree = chosen.contains(&Algorithm::Tree);
    let neighbours = |tree: &collective::shape::RankTree| {
        let parent = tree.parent[group_rank as usize];
        let above = u64::from((parent as usize) < members.len());
        above + tree.parent.iter().filter(|parent| **parent == group_rank).count() as u64
    };
    // Both directions of an edge; half of the channels run the first tree, half the second.
    let tree_connections = |trees: &[collective::shape::RankTree; 2]| {
        trees.iter().map(|tree| 2 * neighbours(tree) * (NUM_CHANNELS / 2)).sum::<u64>()
    };
    let ring_connections = if ring { RING_CONNECTIONS * NUM_CHANNELS } else { 0 };
    ring_connections + if tree { tree_connections(&shape.trees) } else { 0 }
}

/// Between GPUs of a node the receiver has a buffer for each peer; through the network, one pool per direction.
fn message_bytes(members: &[u32], group_rank: u32, uses: &Uses, profile: &Profile) -> u64 {
    let node = |group_rank: u32| members.get(group_rank as usize).map(|rank| node_of(profile, *rank));
    let own = node(group_rank);
    let others = |peers: &BTreeSet<u32>, is_near: bool| {
        peers.iter().filter(|peer| **peer != group_rank && (node(**peer) == own) == is_near).count() as u64
    };
    let near = others(&uses.receives, true) * CHANNELS_PER_PEER * CONNECTION_BYTES;
    let far = [&uses.sends, &uses.receives].into_iter().filter(|peers| others(peers, false) > 0).count() as u64;
    near + far * NETWORK_POOL_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::op::{DataType, ReduceOp};
    use crate::ids::SlotId;

    const MIB: f64 = (1 << 20) as f64;

    fn profile() -> Profile {
        Profile::builtin("h100-sxm").expect("built in")
    }

    fn collective(kind: CollectiveKind, count: u64) -> OpKind {
        let (slot, dtype, reduce) = (SlotId(0), DataType::Int8, ReduceOp::Sum);
        OpKind::Collective { slot, kind, dtype, reduce, root: 0, count, group: 0 }
    }

    fn message(is_send: bool, peer: u32) -> OpKind {
        OpKind::PointToPoint { slot: SlotId(0), is_send, dtype: DataType::Int8, peer, count: 1, group: 0 }
    }

    fn bytes(members: &[u32], group_rank: u32, ops: &[OpKind]) -> u64 {
        let mut uses = Uses::default();
        for op in ops {
            uses.add(op, members.len(), group_rank);
        }
        communicator_bytes(members, group_rank, &uses, &profile())
    }

    #[test]
    fn a_connection_is_nine_mebibytes() {
        assert!((CONNECTION_BYTES as f64 / MIB - 9.1875).abs() < 1e-9);
    }

    #[test]
    fn nothing_is_held_before_the_first_use() {
        let node: Vec<u32> = (0..8).collect();
        assert_eq!(bytes(&node, 0, &[]), 0);
        assert_eq!(bytes(&node, 0, &[collective(CollectiveKind::AllReduce, 0)]), 0);
        assert_eq!(bytes(&[3], 0, &[collective(CollectiveKind::AllReduce, 8)]), 0);
    }

    #[test]
    fn each_algorithm_connects_once() {
        let world: Vec<u32> = (0..64).collect();
        let gather = collective(CollectiveKind::AllGather, 1 << 20);
        let ring = bytes(&world, 0, &[gather]);
        assert_eq!(ring, RING_CONNECTIONS * NUM_CHANNELS * CONNECTION_BYTES);
        assert_eq!(bytes(&world, 0, &[gather, gather, collective(CollectiveKind::Broadcast, 99)]), ring);
        // A small all-reduce over eight nodes takes the trees, a large one the ring: now both are connected.
        let small = collective(CollectiveKind::AllReduce, 8);
        let trees = bytes(&world, 0, &[small]);
        assert!(trees > 0 && trees.is_multiple_of(NUM_CHANNELS / 2 * CONNECTION_BYTES), "{trees}");
        assert_eq!(bytes(&world, 0, &[small, gather]), ring + trees);
    }

    #[test]
    fn messages_cost_the_receiver_in_the_node_and_a_pool_beyond() {
        let pair = [0, 1];
        assert_eq!(bytes(&pair, 0, &[message(true, 1)]), 0);
        assert_eq!(bytes(&pair, 0, &[message(false, 1), message(false, 0)]), CHANNELS_PER_PEER * CONNECTION_BYTES);
        let stages = [0, 8, 16];
        assert_eq!(bytes(&stages, 1, &[message(true, 2)]), NETWORK_POOL_BYTES);
        assert_eq!(bytes(&stages, 1, &[message(true, 2), message(false, 0), message(true, 0)]), 2 * NETWORK_POOL_BYTES);
        let node: Vec<u32> = (0..8).collect();
        let all_to_all = bytes(&node, 3, &[collective(CollectiveKind::AllToAll, 1)]);
        assert_eq!(all_to_all, 7 * CHANNELS_PER_PEER * CONNECTION_BYTES);
    }
}
