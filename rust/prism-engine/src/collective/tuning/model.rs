//! Latency and bandwidth that NCCL expects of every function, algorithm and protocol of a communicator.

use super::tables::{Constants, PerAlgorithm, Version};
use super::{Function, NcclSettings};
use crate::collective::Algorithm;
use crate::collective::nvls::Switches;
use serde::{Deserialize, Serialize};

/// Most GPUs of a node in all-gather and reduce-scatter by switches. Source: `NCCL_MAX_NVLS_ARITY` in `src/include/device.h`.
const MOST_GATHERED: u32 = 32;

/// Who made the host's processor: NCCL expects less of LL over the network beside an AMD one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuVendor {
    /// Intel, and all that are not AMD.
    #[default]
    Intel,
    /// AMD.
    Amd,
}

/// What connects the GPUs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// NVLink, to every other GPU of the node.
    NvLink,
    /// The PCI bus.
    Pci,
}

/// What NCCL's search for channels found on a communicator, and what else its model asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Topology {
    /// Members, at least 1.
    pub ranks: u32,
    /// Nodes, at least 1.
    pub nodes: u32,
    /// Channels of the search.
    pub searched_channels: u32,
    /// Channels that collectives run on: usually twice as many, since a second tree needs channels of its own.
    pub channels: u32,
    /// Bandwidth of a searched channel inside a node, in GB/s.
    pub intra_bandwidth: f64,
    /// Bandwidth of a searched channel between nodes, in GB/s.
    pub inter_bandwidth: f64,
    /// What connects the GPUs of a node.
    pub intra: LinkKind,
    /// The host's processor.
    pub cpu: CpuVendor,
    /// Compute capability of the GPUs: 90 for 9.0.
    pub compute_capability: u32,
    /// Protocols there are, by number (LL, LL128, Simple).
    pub protocols: [bool; 3],
    /// What the search found for switches that reduce, if there are any.
    pub switches: Option<Switches>,
}

/// Latency and bandwidth by function, algorithm and protocol: what [`model`] computes and [`Table::choose`] reads.
#[derive(Clone, Debug)]
pub struct Table {
    pub(super) topology: Topology,
    pub(super) version: Version,
    pub(super) settings: NcclSettings,
    /// By function, algorithm ([`ALGORITHMS`]), and protocol number; `None`: not to be used.
    entries: [[[Option<Entry>; 3]; 5]; 5],
}

/// What NCCL expects of one way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    /// In microseconds.
    pub(super) latency: f64,
    /// Bytes of the buffer per time, in GB/s.
    pub(super) bandwidth: f64,
}

/// NCCL's model for one communicator. Source: `ncclTopoTuneModel` in `src/graph/tuning.cc`.
#[must_use]
pub fn model(version: Version, topology: &Topology, settings: &NcclSettings) -> Table {
    let mut table = Table { topology: *topology, version, settings: settings.clone(), entries: [[[None; 3]; 5]; 5] };
    let terms = Terms { constants: version.constants(), topology, settings };
    for function in Function::ALL {
        for algorithm in ALGORITHMS {
            for protocol in 0..3 {
                let is_allowed = settings.allows(function, algorithm) && terms.allows(function, protocol);
                let entry = is_allowed.then(|| match algorithm {
                    Algorithm::Tree | Algorithm::Ring => terms.entry(function, algorithm, protocol),
                    _ if protocol != 2 => None,
                    Algorithm::Pat => terms.pat(function),
                    _ => terms.switched(function, algorithm == Algorithm::NvlsTree),
                });
                table.entries[function as usize][row(algorithm)][protocol] = entry.flatten();
            }
        }
        let rows = &mut table.entries[function as usize];
        if terms.constants.rules.falls_back_to_ring && rows.iter().flatten().all(Option::is_none) {
            rows[row(Algorithm::Ring)] = std::array::from_fn(|protocol| {
                let is_allowed = terms.allows(function, protocol);
                is_allowed.then(|| terms.entry(function, Algorithm::Ring, protocol)).flatten()
            });
        }
    }
    table
}

/// Those of the table, in NCCL's order.
pub(super) const ALGORITHMS: [Algorithm; 5] =
    [Algorithm::Tree, Algorithm::Ring, Algorithm::Nvls, Algorithm::NvlsTree, Algorithm::Pat];

/// Broadcast and reduce over a ring are chains.
fn row(algorithm: Algorithm) -> usize {
    ALGORITHMS.iter().position(|known| *known == algorithm).unwrap_or(1)
}

impl Table {
    /// Latency in microseconds and bandwidth in GB/s of the buffer; `None` where the way is not to be used.
    #[must_use]
    pub fn entry(&self, function: Function, algorithm: Algorithm, protocol: usize) -> Option<(f64, f64)> {
        self.get(function, algorithm, protocol).map(|entry| (entry.latency, entry.bandwidth))
    }

    pub(super) fn get(&self, function: Function, algorithm: Algorithm, protocol: usize) -> Option<Entry> {
        self.entries[function as usize][row(algorithm)][protocol]
    }

    /// Expected microseconds of a call of `bytes` (of the full buffer) that is made of `ops` fused ones per channel.
    #[must_use]
    pub fn time(&self, function: Function, algorithm: Algorithm, protocol: usize, bytes: u64, ops: u32) -> Option<f64> {
        self.parts(function, algorithm, protocol, bytes, ops).map(|(latency, transfer)| latency + transfer)
    }

    /// [`Table::time`] by its two terms: the latencies, and the time of the bytes.
    pub(crate) fn parts(
        &self,
        function: Function,
        algorithm: Algorithm,
        protocol: usize,
        bytes: u64,
        ops: u32,
    ) -> Option<(f64, f64)> {
        let Entry { mut latency, mut bandwidth } = self.get(function, algorithm, protocol)?;
        let (constants, topology) = (self.version.constants(), &self.topology);
        let is_all_reduce = function == Function::AllReduce;
        let is_ring = row(algorithm) == row(Algorithm::Ring);
        let is_corrected = match algorithm {
            Algorithm::Tree => true,
            Algorithm::NvlsTree => constants.nvls.corrects_blackwell_trees && topology.compute_capability >= 100,
            _ => false,
        };
        if is_corrected && is_all_reduce {
            bandwidth *= constants.tree_correction.of(protocol, bytes);
        }
        let per_rank = bytes / u64::from(topology.channels * topology.ranks).max(1);
        if is_ring && protocol == 2 && topology.nodes > 1 && is_all_reduce && per_rank >= 64 {
            let rules = &constants.rules;
            let is_old = topology.compute_capability < 80;
            latency *= if is_old { rules.ring_plateau_before_ampere } else { rules.ring_plateau };
        }
        let latencies = if is_ring { ops } else { ops.div_ceil(constants.rules.tree_ops_per_latency) };
        Some((latency * f64::from(latencies), bytes as f64 / (1_000.0 * bandwidth)))
    }
}

/// What the entries are made of.
struct Terms<'a> {
    constants: &'a Constants,
    topology: &'a Topology,
    settings: &'a NcclSettings,
}

impl Terms<'_> {
    /// May the function use the protocol?
    fn allows(&self, function: Function, protocol: usize) -> bool {
        let default = || {
            let only = &self.constants.rules.ll128_only_on;
            let capability = self.topology.compute_capability;
            let knows = if only.is_empty() { capability >= 70 } else { only.contains(&capability) };
            protocol != 1 || (knows && self.topology.intra == LinkKind::NvLink)
        };
        self.topology.protocols[protocol] && self.settings.allows_protocol(function, protocol).unwrap_or_else(default)
    }

    fn entry(&self, function: Function, algorithm: Algorithm, protocol: usize) -> Option<Entry> {
        if algorithm == Algorithm::Tree && function != Function::AllReduce {
            return None;
        }
        let is_tree = algorithm == Algorithm::Tree;
        let bus = if is_tree { self.tree_bandwidth(protocol) } else { self.ring_bandwidth(function, protocol) };
        let ranks = f64::from(self.topology.ranks);
        let bandwidth = bus * if is_tree { 0.5 } else { ranks / f64::from(self.steps(function)) };
        let latency = if is_tree { self.tree_latency(protocol) } else { self.ring_latency(function, protocol) };
        Some(Entry { latency, bandwidth })
    }

    /// Switches that reduce: inside the only node, or in every node with trees over the nodes.
    fn switched(&self, function: Function, is_tree: bool) -> Option<Entry> {
        let (topology, nvls) = (self.topology, &self.constants.nvls);
        let switches = topology.switches?;
        let is_all_reduce = function == Function::AllReduce;
        let is_function = is_all_reduce || matches!(function, Function::AllGather | Function::ReduceScatter);
        let is_here = if is_tree { is_all_reduce && topology.nodes > 1 } else { is_function && topology.nodes == 1 };
        let is_on = self.settings.switch("NCCL_NVLS_ENABLE");
        let is_large = switches.gpus >= nvls.least_gpus && switches.channels >= 2;
        if !is_here || !is_on || !is_large || (!is_all_reduce && switches.gpus > MOST_GATHERED) {
            return None;
        }
        let channels = f64::from(switches.channels);
        let per_node = f64::from(topology.ranks) / f64::from(topology.nodes);
        let (inside, outside) = (switches.intra_bandwidth, switches.inter_bandwidth);
        let bandwidth = if let Some(efficiency) = &nvls.efficiency {
            let twice = if topology.nodes <= 2 && is_tree { 2.0 } else { 1.0 };
            let both_ways = if is_all_reduce { 2.0 } else { (per_node - 1.0) / per_node };
            let inside = inside * efficiency.of(topology.compute_capability) * (channels - 1.0) / channels * both_ways;
            let limit =
                nvls.tree_limit.filter(|_| is_tree).map(|limit| limit.of(topology.compute_capability)[self.scale()]);
            let bus = channels * inside.min(outside * twice).min(limit.unwrap_or(f64::INFINITY));
            if is_all_reduce { bus * f64::from(topology.ranks) / f64::from(self.steps(function)) } else { bus }
        } else if is_tree {
            let half = if topology.nodes <= 2 { outside } else { outside / 2.0 };
            channels * inside.min(half) * nvls.ratio
        } else if is_all_reduce {
            channels * inside.min(outside) * nvls.ratio
        } else if nvls.gathers_without_own {
            channels * (inside * (per_node - 1.0) / per_node).min(outside * 0.9) * nvls.gather_ratio
        } else {
            channels * inside.min(outside) * nvls.gather_ratio
        };
        let levels = if is_tree { 2.0 * f64::from(topology.nodes.ilog2()) } else { 0.0 };
        Some(Entry { latency: nvls.latency + levels * nvls.tree_network_latency, bandwidth })
    }

    /// Parallel aggregated trees: where each rank is a node.
    fn pat(&self, function: Function) -> Option<Entry> {
        let (topology, pat) = (self.topology, self.constants.pat.as_ref()?);
        let is_function = matches!(function, Function::AllGather | Function::ReduceScatter);
        if !is_function
            || topology.nodes < 2
            || topology.ranks != topology.nodes
            || !self.settings.switch("NCCL_PAT_ENABLE")
        {
            return None;
        }
        let levels = f64::from(topology.nodes.ilog2());
        let hop = self.constants.hop_latency.network.tree[2];
        let latency =
            pat.base_latency + levels * hop / pat.levels_per_latency + f64::from(topology.ranks) * pat.latency_per_rank;
        Some(Entry { latency, bandwidth: self.of_all_channels() * pat.share })
    }

    /// One node, two nodes, more.
    fn scale(&self) -> usize {
        (self.topology.nodes.clamp(1, 3) - 1) as usize
    }

    fn of_all_channels(&self) -> f64 {
        let topology = self.topology;
        let channel = if topology.nodes <= 2 { topology.intra_bandwidth } else { topology.inter_bandwidth };
        f64::from(topology.searched_channels) * channel
    }

    fn ll_limit(&self) -> f64 {
        let limit = &self.constants.ll_limit;
        let row = match self.topology.cpu {
            _ if self.topology.nodes == 1 => limit.of(self.topology.compute_capability),
            CpuVendor::Intel => &limit.volta,
            CpuVendor::Amd => &limit.ampere,
        };
        row[self.scale()]
    }

    /// Of a table of limits of one channel.
    fn limit(&self, table: &super::tables::PerArchitecture) -> f64 {
        f64::from(self.topology.searched_channels) * table.of(self.topology.compute_capability)[self.scale()]
    }

    fn ring_bandwidth(&self, function: Function, protocol: usize) -> f64 {
        let (share, bus) = (&self.constants.share, self.of_all_channels());
        let is_one_way = matches!(function, Function::Broadcast | Function::AllGather | Function::ReduceScatter);
        match protocol {
            0 if is_one_way && self.topology.nodes == 1 => (bus * share.ring_ll_one_way_one_node).min(self.ll_limit()),
            0 => (bus * share.ring_ll).min(self.ll_limit()),
            1 => {
                let is_sparse = self.topology.ranks < 2 * self.topology.nodes;
                let share = if is_sparse { share.ring_ll128_one_per_node } else { share.ring_ll128 };
                (bus * share).min(self.limit(&self.constants.ring_ll128_limit))
            }
            _ => bus,
        }
    }

    fn tree_bandwidth(&self, protocol: usize) -> f64 {
        let share = &self.constants.share;
        let bus = (self.of_all_channels() * share.tree).min(self.limit(&self.constants.tree_limit));
        match protocol {
            0 => (bus * share.tree_ll).min(self.ll_limit()),
            1 => {
                let share = if self.topology.nodes == 1 { share.tree_ll128_one_node } else { share.tree_ll128 };
                (bus * share).min(self.limit(&self.constants.tree_ll128_limit))
            }
            _ => bus,
        }
    }

    /// Steps of a ring.
    fn steps(&self, function: Function) -> u32 {
        let ranks = self.topology.ranks;
        match function {
            Function::AllReduce => 2 * (ranks - 1),
            Function::AllGather | Function::ReduceScatter => ranks - 1,
            Function::Broadcast | Function::Reduce => ranks,
        }
    }

    fn inside(&self) -> &PerAlgorithm {
        let hops = &self.constants.hop_latency;
        if self.topology.intra == LinkKind::NvLink { &hops.nvlink } else { &hops.pci }
    }

    fn network_latency(&self, is_tree: bool, protocol: usize) -> f64 {
        let network = &self.constants.hop_latency.network;
        let is_exposed =
            self.constants.rules.one_per_node_takes_tree_latency && self.topology.ranks == self.topology.nodes;
        (if is_tree || is_exposed { network.tree } else { network.ring })[protocol]
    }

    fn ring_latency(&self, function: Function, protocol: usize) -> f64 {
        let (constants, nodes) = (self.constants, self.topology.nodes);
        let base = constants.base_latency.ring[protocol];
        if matches!(function, Function::Broadcast | Function::Reduce) {
            // Every channel takes the same way through a node, so that one hop is exposed.
            let hop = if nodes == 1 { self.inside().ring } else { constants.hop_latency.network.ring };
            return base + hop[protocol];
        }
        let mut inside = self.inside().ring[protocol];
        let mut over_network = 0;
        if nodes > 1 {
            let rules = &constants.rules;
            let own = match self.topology.cpu {
                CpuVendor::Intel => rules.network_overhead_intel,
                CpuVendor::Amd => rules.network_overhead_amd,
            };
            let overhead = self.settings.network_overhead().unwrap_or(own);
            inside = inside.max(if protocol == 2 { 3.0 * overhead } else { overhead });
            over_network = match function {
                Function::AllReduce => 2 * (nodes - 1) + rules.all_reduce_extra_network_steps,
                _ => nodes - 1,
            };
        }
        // Where every step crosses the network the older rule counts more of them than there are.
        let steps_inside = f64::from(self.steps(function)) - f64::from(over_network);
        base + steps_inside * inside + f64::from(over_network) * self.network_latency(false, protocol)
    }

    fn tree_latency(&self, protocol: usize) -> f64 {
        let topology = self.topology;
        let inside = f64::from(topology.ranks / topology.nodes) - 1.0;
        let levels = f64::from(topology.nodes.max(1).ilog2());
        let hops = inside * self.inside().tree[protocol] + levels * self.network_latency(true, protocol);
        self.constants.base_latency.tree[protocol] + 2.0 * hops
    }
}
