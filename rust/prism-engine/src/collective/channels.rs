//! NCCL's channels: how a call is spread over them, and into what pieces each cuts its part.
//!
//! A channel is a thread block with connections of its own. Channels do not wait for each other: a communicator that would
//! have `n` channels by itself gives each one `n`-th of every hop's bandwidth (its own card, or its share of one), whether or
//! not the other channels are used. All channels of a call have equal parts, except that the last one may have less: so one
//! or two evaluations tell the end of all of them. A ring's time grows with its bytes, and the fullest one is enough.

use super::protocol::Protocol;
use super::shape::CommShape;
use super::tuning::{self, Chosen, CpuVendor, Function, LinkKind, NcclSettings, Refusal, Table, Topology, Tuning};
use super::{Algorithm, CollectiveCall, nvls};
use crate::profile::{Profile, SwitchTrees};

/// Least traffic for which a channel is used. Source: `scheduleCollTasksToPlan` in `src/enqueue.cc`.
const LEAST_TRAFFIC: u64 = 32 << 10;
/// Steps that a connection's buffer is divided into. Source: `src/include/device.h`.
const STEPS: u64 = 8;
/// Steps of a chunk of a ring under Simple, and slices it is sent in. Source: `src/include/collectives.h`.
const CHUNK_STEPS: u64 = 4;
pub(super) const SLICES: u64 = 2;
/// Pieces of a chunk that are passed on one by one under LL and LL128, whose lines tell of their own arrival: each warp of a block
/// passes its lines on when it has them. Sixteen warps would do so in sixteen pieces; with four, which cost a
/// quarter, times of trees over two nodes are as near to published ones (docs/accuracy.md).
const LINE_PIECES: u64 = 4;
/// Data bytes that a warp moves at a time, by protocol number. Source: `src/device/prims_ll.h`, `src/device/prims_ll128.h`.
const WARP_BYTES: [u64; 2] = [256, 1_920];
/// Chunks of the last loop of a ring are cut to a multiple of this. Source: `src/device/all_reduce.h`.
const ALIGNMENT: u64 = 16;

/// The tuning of one communicator.
#[derive(Clone, Debug)]
pub(crate) struct Tuned {
    table: Table,
    settings: NcclSettings,
    nodes: u64,
    ranks: u64,
    nvls_tree: Option<SwitchTrees>,
    /// Microseconds that a call takes beyond what NCCL counts for it.
    besides: f64,
    /// Parts into which the channels divide every link.
    lanes: u64,
    /// Channels of the first of the two trees.
    first_tree: u64,
    tree_chunk_by_depth: bool,
    /// By function: the settings leave no way.
    forbidden: [bool; 5],
}

/// How a call is spread over channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Channels in use.
    pub(crate) channels: u64,
    /// Channels that one op is spread over.
    pub(crate) per_op: u64,
    /// Bytes of the full buffer per op, on every channel of it but the last.
    pub(crate) bytes: u64,
    /// The same on the last one: at most as much.
    pub(crate) last: u64,
    /// Ops that each of the first `fuller` channels runs one after the other; the others run one less.
    pub(crate) ops: u64,
    pub(crate) fuller: u64,
}

impl Tuned {
    /// `None` if the profile asks for the fastest way.
    pub(crate) fn new(profile: &Profile, node_sizes: &[u32]) -> Option<Self> {
        let Tuning::Nccl(version) = profile.network.tuning else { return None };
        let topology = topology(profile, node_sizes);
        let settings = profile.network.nccl.clone();
        let table = tuning::model(version, &topology, &settings);
        let lanes = u64::from(topology.channels.max(table.channels()));
        Some(Self {
            nodes: u64::from(topology.nodes),
            ranks: u64::from(topology.ranks),
            nvls_tree: profile.network.nvls_tree,
            besides: (profile.network.collective_launch_ns as f64 / 1e3 - version.constants().base_latency.ring[2])
                .max(0.0),
            lanes,
            // Source: `connectTrees` in `src/graph/connect.cc`; further channels repeat the first ones.
            first_tree: u64::from(topology.channels / 2).max(1),
            tree_chunk_by_depth: version.constants().rules.tree_chunk_by_depth,
            forbidden: Function::ALL.map(|function| topology.ranks > 1 && table.choose(function, 1, 1).is_err()),
            table,
            settings,
        })
    }

    pub(crate) fn lanes(&self) -> u64 {
        self.lanes
    }

    /// Latency and time of the bytes that NCCL expects of a call by an algorithm under Simple, in microseconds, with what a launch
    /// of the profile takes longer than NCCL's; that of NVLS trees with what NCCL leaves out.
    pub(crate) fn expected(&self, call: &CollectiveCall, algorithm: Algorithm) -> Option<(f64, f64)> {
        let ops = call.ops.max(1).div_ceil(self.table.channels());
        let (latency, bytes) = self.table.parts(Function::of(call.kind)?, algorithm, 2, call.bytes, ops)?;
        match self.nvls_tree {
            Some(SwitchTrees { fill, bandwidth }) if algorithm == Algorithm::NvlsTree => {
                let bytes = bytes / bandwidth;
                Some((latency + self.besides, bytes + fill * (latency * bytes).sqrt()))
            }
            _ => Some((latency + self.besides, bytes)),
        }
    }

    /// What NCCL takes for a call, `None` for those made of messages.
    pub(crate) fn choose(&self, call: &CollectiveCall) -> Option<Result<Chosen, Refusal>> {
        let function = Function::of(call.kind)?;
        let ops = call.ops.max(1).div_ceil(self.table.channels());
        Some(self.table.choose(function, call.bytes, ops))
    }

    /// Ops of a channel of each of the two trees: of those with `bytes`, and of those with `last`; 0 without such channels.
    pub(crate) fn on_trees(&self, share: &Share) -> [[u64; 2]; 2] {
        let mut found = [[0; 2]; 2];
        for channel in 0..share.channels {
            let tree = (channel / self.first_tree % 2) as usize;
            let is_last = (channel + 1).is_multiple_of(share.per_op);
            let ops = if channel < share.fuller { share.ops } else { share.ops - 1 };
            let most: &mut u64 = &mut found[tree][usize::from(is_last)];
            *most = ops.max(*most);
        }
        found
    }

    /// Channels of each of the two trees: those with `bytes`, and those with `last`.
    pub(crate) fn channels_of_trees(&self, share: &Share) -> [[u64; 2]; 2] {
        let mut found = [[0; 2]; 2];
        for channel in 0..share.channels {
            let tree = (channel / self.first_tree % 2) as usize;
            found[tree][usize::from((channel + 1).is_multiple_of(share.per_op))] += 1;
        }
        found
    }

    /// Parts into which the channels of one tree divide every edge of it.
    pub(crate) fn tree_lanes(&self) -> u64 {
        self.lanes.div_ceil(2)
    }

    /// The call on at most `most` channels. They get cells of 32 KiB of traffic in order, each as many as an even share
    /// needs; of several ops, each gets as many whole ones. Source: `scheduleCollTasksToPlan` in `src/enqueue.cc`.
    pub(crate) fn share(&self, call: &CollectiveCall, protocol: Protocol, most: u32) -> Share {
        let ops = u64::from(call.ops.max(1));
        let all = u64::from(self.table.channels());
        let of_op = call.bytes.div_ceil(ops).max(1);
        if ops >= all {
            let fuller = if ops.is_multiple_of(all) { all } else { ops % all };
            let ops = ops.div_ceil(all);
            return Share { channels: all, per_op: 1, bytes: of_op, last: of_op, ops, fuller };
        }
        let function = Function::of(call.kind).unwrap_or(Function::Broadcast);
        let is_blocks = matches!(function, Function::AllGather | Function::ReduceScatter);
        let blocks = if is_blocks { self.ranks } else { 1 };
        let count = of_op.div_ceil(blocks);
        let low_latency = if protocol == Protocol::Ll { 4 } else { 1 };
        let per_byte = function.traffic_per_byte(self.ranks) * low_latency;
        // Ops of a batch share the channels evenly.
        let most = u64::from(most).min(all / ops).max(1);
        let per_channel = LEAST_TRAFFIC.max(count.saturating_mul(per_byte)).div_ceil(most).next_multiple_of(ALIGNMENT);
        let cell = LEAST_TRAFFIC.div_ceil(per_byte).next_multiple_of(ALIGNMENT);
        let cells = count.div_ceil(cell);
        let fullest = per_channel.div_ceil(cell * per_byte).min(cells);
        let per_op = cells.div_ceil(fullest);
        let bytes = fullest.saturating_mul(cell).min(count);
        let last = count - (per_op - 1).saturating_mul(bytes);
        let [bytes, last] = [bytes, last].map(|bytes| bytes.saturating_mul(blocks));
        Share { channels: per_op * ops, per_op, bytes, last, ops: 1, fuller: per_op * ops }
    }

    /// Bytes of a chunk. Source: `calcCollChunking` in `src/enqueue.cc`.
    pub(crate) fn chunk(&self, algorithm: Algorithm, protocol: Protocol, call: &CollectiveCall, share: &Share) -> u64 {
        let step = self.settings.buffer_bytes(tuning::protocol_number(protocol)) / STEPS;
        match protocol {
            Protocol::Ll => grains(step / 2, 16),
            // Of 16 words of a line one is the flag.
            Protocol::Ll128 if algorithm == Algorithm::Tree => grains(self.tree_ll128(step / 16 * 15, share), 1_920),
            Protocol::Ll128 => grains(step / 16 * 15, 1_920),
            Protocol::Simple if algorithm == Algorithm::Ring => grains(step * CHUNK_STEPS, 512),
            Protocol::Simple if algorithm == Algorithm::Tree && self.tree_chunk_by_depth => {
                grains(self.tree_by_depth(step, call.bytes / share.channels.max(1)), 512)
            }
            Protocol::Simple => grains(step, 512),
        }
    }

    fn tree_ll128(&self, mut chunk: u64, share: &Share) -> u64 {
        let per_node = self.ranks as f64 / self.nodes as f64;
        let levels = 1.0 + f64::from(self.nodes.max(1).ilog2()) + 0.1 * per_node;
        for (chunks, least) in [(64.0, 131_072), (16.0, 32_768)] {
            while chunk > least && ((share.bytes / chunk) as f64) < levels * chunks / per_node {
                chunk /= 2;
            }
        }
        chunk
    }

    fn tree_by_depth(&self, mut chunk: u64, bytes: u64) -> u64 {
        let depth = self.ranks / self.nodes - 1 + u64::from(self.nodes.max(1).ilog2());
        for (chunks, least) in [(8, 131_072), (4, 65_536), (1, 32_768)] {
            while chunk > least && bytes / chunk < depth * chunks {
                chunk /= 2;
            }
        }
        chunk
    }
}

/// The largest multiple of `grain` in `bytes`, at least one.
fn grains(bytes: u64, grain: u64) -> u64 {
    (bytes / grain).max(1) * grain
}

/// Bytes that go through a tree or chain at once, of `bytes` in chunks of `chunk`.
pub(super) fn piece(protocol: Protocol, chunk: u64, bytes: u64) -> u64 {
    match WARP_BYTES.get(tuning::protocol_number(protocol)) {
        Some(least) => chunk.min(bytes).div_ceil(LINE_PIECES).max(*least).min(chunk),
        None => chunk,
    }
}

/// Slices that a chunk of a ring is sent in.
pub(crate) fn slices(protocol: Protocol) -> u64 {
    if protocol == Protocol::Simple { SLICES } else { 1 }
}

/// Chunks of the full loops of a ring of `n`, how many such loops there are, and the chunk of the last one (0: none).
pub(crate) fn loops(bytes: u64, n: u64, chunk: u64) -> (u64, u64) {
    let whole = n.saturating_mul(chunk);
    let last = (bytes % whole).div_ceil(n).next_multiple_of(ALIGNMENT).min(chunk);
    (bytes / whole, if bytes.is_multiple_of(whole) { 0 } else { last })
}

/// What NCCL's search finds, if all GPUs of a node are alike to each other: one channel per card that the communicator can use
/// on its nodes; up to four are doubled if their bandwidth allows it, before Hopper any number. Source:
/// `ncclTopoDupChannels` in `src/graph/search.cc`, `ncclTopoPostset` in `src/graph/connect.cc`.
fn topology(profile: &Profile, node_sizes: &[u32]) -> Topology {
    const GIGA: f64 = 1e9;
    let (network, node) = (&profile.network, &profile.node);
    let [major, minor] = profile.device.compute_capability;
    let compute_capability = 10 * major + minor;
    let nodes = node_sizes.len().max(1) as u32;
    let nvlink = node.nvlink_bytes_per_s as f64 * node.nvlink_efficiency / GIGA;
    let smallest = node_sizes.iter().copied().min().unwrap_or(1);
    let (searched_channels, channels, bandwidth) = if nodes == 1
        && let Some(rings) = node.rings_among(smallest)
    {
        // A channel per ring of the mesh, and as many again for the second tree.
        let searched = rings.ceil().max(1.0) as u32;
        (searched, 2 * searched, nvlink * node.nvlink_share(smallest) / f64::from(searched))
    } else if nodes == 1 {
        let searched = (network.node_channels / 2).max(1);
        (searched, network.node_channels.max(1), nvlink / f64::from(searched))
    } else {
        let cards = smallest.min(node.nics).max(1);
        let card = network.nic_bytes_per_s as f64 * network.nic_efficiency / GIGA;
        let stays_single = card < 25.0 || (compute_capability > 80 && card < 50.0 && cards > 4);
        let (searched, bandwidth) = if stays_single { (cards, card) } else { (2 * cards, card / 2.0) };
        // With fewer than eight fast cards, four channels run on each searched one.
        let is_wide = compute_capability >= 90 && bandwidth > 45.0 && 2 * searched < 16;
        (searched, if is_wide { 4 } else { 2 } * searched, bandwidth)
    };
    let of_mesh = nvlink * node.nvlink_share(smallest) / f64::from(searched_channels);
    Topology {
        ranks: node_sizes.iter().sum::<u32>().max(1),
        nodes,
        searched_channels,
        channels,
        intra_bandwidth: if node.nvlink_rings.is_empty() { bandwidth } else { bandwidth.min(of_mesh) },
        inter_bandwidth: bandwidth,
        intra: LinkKind::NvLink,
        cpu: node.cpu.unwrap_or(CpuVendor::Intel),
        compute_capability,
        protocols: [network.ll.is_some(), network.ll128.is_some(), true],
        switches: nvls::search(profile, node_sizes, nvlink),
    }
}

impl CommShape {
    /// Why the settings forbid a collective, if they do.
    #[must_use]
    pub fn refusal(&self, kind: super::CollectiveKind) -> Option<Refusal> {
        let tuned = self.tuned.as_ref()?;
        if !tuned.forbidden[Function::of(kind)? as usize] {
            return None;
        }
        let call = CollectiveCall { kind, bytes: 1, root: 0, ops: 1 };
        tuned.choose(&call)?.err()
    }

    /// What NCCL takes for a call; `None` where its tuning is not asked for or the call is made of messages.
    #[must_use]
    pub fn chosen(&self, call: &CollectiveCall) -> Option<Result<Chosen, Refusal>> {
        self.tuned.as_ref()?.choose(call)
    }
}
