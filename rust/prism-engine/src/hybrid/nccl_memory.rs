//! Device memory NCCL itself takes, which the program's allocator never sees.

/// Buffers of one connection of one channel: Simple 4 MiB, LL 512 KiB, LL128 4.6875 MiB (NCCL 2.30 `init.cc`).
const CONNECTION_BYTES: u64 = (4 << 20) + (512 << 10) + 4_915_200;
/// Channels NCCL opens on a node with NVSwitch and eight NICs. A modelled value: the real one comes from a topology search.
const NUM_CHANNELS: u64 = 16;
/// A ring connects a rank to two others, a double binary tree to at most three per tree.
const RING_CONNECTIONS: u64 = 2;

/// Bytes NCCL holds on one rank for a communicator it has used (connections are made at first use).
pub(crate) fn communicator_bytes(num_members: usize, is_used: bool) -> u64 {
    if num_members < 2 || !is_used {
        return 0;
    }
    let connections = RING_CONNECTIONS.min(num_members as u64 - 1);
    CONNECTION_BYTES * NUM_CHANNELS * connections
}
