//! The constants of NCCL's tuning model, version by version: data files beside the sources.

use serde::Deserialize;
use std::fmt;
use std::sync::LazyLock;

/// The data files, oldest first; one per run of versions with equal constants.
const FILES: [&str; 11] = [
    include_str!("../../../tuning/nccl-2.19.toml"),
    include_str!("../../../tuning/nccl-2.20.toml"),
    include_str!("../../../tuning/nccl-2.21.toml"),
    include_str!("../../../tuning/nccl-2.22.toml"),
    include_str!("../../../tuning/nccl-2.23.toml"),
    include_str!("../../../tuning/nccl-2.24.toml"),
    include_str!("../../../tuning/nccl-2.25.toml"),
    include_str!("../../../tuning/nccl-2.27.toml"),
    include_str!("../../../tuning/nccl-2.28.toml"),
    include_str!("../../../tuning/nccl-2.29.toml"),
    include_str!("../../../tuning/nccl-2.30.toml"),
];

static TABLES: LazyLock<Vec<Constants>> = LazyLock::new(|| {
    let read = |text: &&str| toml::from_str(text).expect("the tables in the binary are well-formed");
    FILES.iter().map(read).collect()
});

/// A minor version of NCCL whose constants are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    minor: u16,
}

impl Version {
    /// Reads `2.27`. `None` if the constants of that version are not known.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let version = Self { minor: minor(text)? };
        version.find().map(|_| version)
    }

    /// Every version there is, oldest first.
    pub fn all() -> impl Iterator<Item = Self> {
        let range = |table: &Constants| Some(minor(&table.first)?..=minor(&table.last)?);
        TABLES.iter().filter_map(range).flatten().map(|minor| Self { minor })
    }

    /// Its constants.
    #[must_use]
    pub fn constants(self) -> &'static Constants {
        self.find().expect("a version is only made where its constants are known")
    }

    fn find(self) -> Option<&'static Constants> {
        let holds = |table: &&Constants| {
            minor(&table.first).is_some_and(|first| first <= self.minor)
                && minor(&table.last).is_some_and(|last| self.minor <= last)
        };
        TABLES.iter().find(holds)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "2.{}", self.minor)
    }
}

/// `27` of `2.27`.
fn minor(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("2.")?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// LL, LL128, Simple; or one node, two nodes, more.
pub type Triple = [f64; 3];

/// One data file. Latencies in microseconds, bandwidths in GB/s (10^9 bytes per second).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    first: String,
    last: String,
    /// Paid once, by protocol.
    pub base_latency: PerAlgorithm,
    /// Paid per hop, by protocol.
    pub hop_latency: PerHop,
    /// Most that LL moves on all channels, by number of nodes.
    pub ll_limit: PerArchitecture,
    /// Most that LL128 moves on one channel of a ring, by number of nodes.
    pub ring_ll128_limit: PerArchitecture,
    /// The same in a tree.
    pub tree_ll128_limit: PerArchitecture,
    /// Most that any protocol moves on one channel of a tree, by number of nodes.
    pub tree_limit: PerArchitecture,
    /// Shares of the bandwidth.
    pub share: Shares,
    /// Factors on the bandwidth of trees by size.
    pub tree_correction: Correction,
    /// What else differs between versions.
    pub rules: Rules,
    /// Reduction by NVSwitch.
    pub nvls: Nvls,
    /// Parallel aggregated trees; versions before 2.23 have none.
    pub pat: Option<Pat>,
}

/// Reduction in the network by NVSwitch. With `efficiency` (2.28 on) bandwidth is told by it, else by `ratio`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Nvls {
    pub latency: f64,
    pub tree_network_latency: f64,
    pub efficiency: Option<PerSwitch<f64>>,
    pub tree_limit: Option<PerSwitch<Triple>>,
    #[serde(default)]
    pub ratio: f64,
    #[serde(default)]
    pub gather_ratio: f64,
    #[serde(default)]
    pub gathers_without_own: bool,
    pub least_gpus: u32,
    pub corrects_blackwell_trees: bool,
}

/// Something per architecture whose switches reduce.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PerSwitch<T> {
    pub hopper: T,
    pub blackwell: T,
}

impl<T> PerSwitch<T> {
    /// That of a compute capability.
    #[must_use]
    pub fn of(&self, compute_capability: u32) -> &T {
        if compute_capability >= 100 { &self.blackwell } else { &self.hopper }
    }
}

/// All-gather and reduce-scatter by trees whose messages carry the data of several ranks.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Pat {
    pub base_latency: f64,
    pub latency_per_rank: f64,
    pub levels_per_latency: f64,
    pub share: f64,
}

/// A triple per algorithm.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PerAlgorithm {
    pub tree: Triple,
    pub ring: Triple,
}

/// Latencies per kind of hop.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PerHop {
    pub nvlink: PerAlgorithm,
    pub pci: PerAlgorithm,
    pub network: PerAlgorithm,
}

/// A triple per GPU architecture.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PerArchitecture {
    pub volta: Triple,
    pub ampere: Triple,
    pub hopper: Triple,
    pub blackwell: Triple,
}

impl PerArchitecture {
    /// The triple of a compute capability (90 for 9.0).
    #[must_use]
    pub fn of(&self, compute_capability: u32) -> &Triple {
        match compute_capability {
            100.. => &self.blackwell,
            90.. => &self.hopper,
            80.. => &self.ampere,
            _ => &self.volta,
        }
    }
}

/// Shares of the bandwidth that carry data.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Shares {
    pub ring_ll: f64,
    pub ring_ll_one_way_one_node: f64,
    pub ring_ll128: f64,
    pub ring_ll128_one_per_node: f64,
    pub tree: f64,
    pub tree_ll: f64,
    pub tree_ll128: f64,
    pub tree_ll128_one_node: f64,
}

/// Factors by power of two, from 64 bytes on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Correction {
    pub ll: Vec<f64>,
    pub ll128: Vec<f64>,
    pub simple: Vec<f64>,
}

impl Correction {
    /// The factor for a protocol's number and a size.
    #[must_use]
    pub fn of(&self, protocol: usize, bytes: u64) -> f64 {
        let row = [&self.ll, &self.ll128, &self.simple][protocol];
        let power = (bytes >> 6).checked_ilog2();
        power.and_then(|power| row.get(power as usize)).copied().unwrap_or(1.0)
    }
}

/// What else differs between versions; the data files say what each is.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about a version")]
pub struct Rules {
    pub ring_plateau: f64,
    pub ring_plateau_before_ampere: f64,
    pub all_reduce_extra_network_steps: u32,
    pub one_per_node_takes_tree_latency: bool,
    pub network_overhead_intel: f64,
    pub network_overhead_amd: f64,
    pub ll128_only_on: Vec<u32>,
    pub falls_back_to_ring: bool,
    pub settings_by_function: bool,
    pub tree_ops_per_latency: u32,
    pub tree_uses_all_threads: bool,
    pub tree_chunk_by_depth: bool,
    pub most_channels: u32,
}
