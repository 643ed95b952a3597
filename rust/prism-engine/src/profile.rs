//! Device profiles: what one GPU, its host, its node and the network can do.
//!
//! A profile is a TOML file. Every key has its unit in its name, and the built-in files say beside every number where it
//! comes from. Nothing in the engine assumes a number that is not in the profile.
//!
//! ```
//! use prism_engine::profile::Profile;
//! let profile = Profile::builtin("h100-sxm").unwrap();
//! assert_eq!(profile.device.sm_count, 132);
//! assert!(profile.config_text().contains("device.compute_capability=9.0\n"));
//! ```

use crate::collective::tuning::{CpuVendor, NcclSettings, SettingError, Tuning};
use crate::contention::Overlap;
use prism_wire::message::DataType;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// Names and texts of the built-in profiles.
const BUILTIN: [(&str, &str); 6] = [
    ("a100-sxm", include_str!("../profiles/a100-sxm.toml")),
    ("b200-sxm", include_str!("../profiles/b200-sxm.toml")),
    ("gb200-nvl72", include_str!("../profiles/gb200-nvl72.toml")),
    ("h100-sxm", include_str!("../profiles/h100-sxm.toml")),
    ("h200-sxm", include_str!("../profiles/h200-sxm.toml")),
    ("v100-dgx1", include_str!("../profiles/v100-dgx1.toml")),
];

/// A profile that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// No built-in profile has this name.
    #[error("no built-in profile `{name}` (there are: {known})")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The text is not a profile: a key is missing, unknown or of the wrong type. The text names it.
    #[error("profile: {0}")]
    Text(#[from] toml::de::Error),
    /// Settings of NCCL that cannot be followed.
    #[error("profile: {0}")]
    Nccl(#[from] crate::collective::tuning::SettingError),
    /// A number is out of its range.
    #[error("profile: `{key}` must be {expected}, got {value}")]
    Range {
        /// Section and key.
        key: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// What was given.
        value: f64,
    },
}

/// One kind of GPU in one kind of cluster.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of the profile.
    pub name: String,
    /// The GPU.
    pub device: Device,
    /// What API calls cost the host.
    pub host: HostCosts,
    /// The machine the GPUs sit in.
    pub node: Node,
    /// Between the machines, and the collectives' own parameters.
    pub network: Network,
    /// How much slower computing is beside communication. Without the table, not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlap>,
}

/// One GPU: the numbers CUDA reports, and how fast it works.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name as CUDA reports it.
    pub name: String,
    /// Major and minor compute capability.
    pub compute_capability: [u32; 2],
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Device memory as CUDA reports it.
    pub memory_bytes: u64,
    /// Level 2 cache.
    pub l2_bytes: u64,
    /// Shared memory of one multiprocessor.
    pub shared_memory_per_sm_bytes: u64,
    /// Most shared memory a block may ask for.
    pub shared_memory_per_block_optin_bytes: u64,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_sm: u32,
    /// Boost clock.
    pub clock_khz: u32,
    /// Memory clock (two transfers per cycle).
    pub memory_clock_khz: u32,
    /// Width of the memory bus.
    pub memory_bus_bits: u32,
    /// Peak memory bandwidth.
    pub memory_bytes_per_s: u64,
    /// Peak dense FLOP per second by input type.
    pub peak_flops: PerType,
    /// Share of the peak a large matrix multiplication reaches, by input type.
    pub gemm_efficiency: PerType,
    /// Share of the peak memory bandwidth a streaming kernel reaches.
    pub memory_efficiency: f64,
    /// Share of the peak an attention or convolution operator reaches.
    pub attention_efficiency: f64,
    /// Least time between the starts of two kernels of a stream.
    pub kernel_overhead_ns: u64,
    /// Memory traffic of one thread of a kernel about which only the launch geometry is known.
    pub kernel_bytes_per_thread: u64,
    /// Device memory that a CUDA context takes.
    pub context_bytes: u64,
}

/// A number per type of matrix input.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PerType {
    pub bf16: f64,
    pub fp16: f64,
    pub tf32: f64,
    pub fp32: f64,
    pub fp64: f64,
    /// Both 8-bit float types.
    pub fp8: f64,
    /// All integer types.
    pub int8: f64,
}

impl PerType {
    /// The number for inputs of type `dtype`.
    #[must_use]
    pub fn of(&self, dtype: DataType) -> f64 {
        match dtype {
            DataType::Bfloat16 => self.bf16,
            DataType::Float16 => self.fp16,
            DataType::Tf32 => self.tf32,
            DataType::Float32 => self.fp32,
            DataType::Float64 => self.fp64,
            DataType::Float8e4m3 | DataType::Float8e5m2 => self.fp8,
            DataType::Int8
            | DataType::Uint8
            | DataType::Int32
            | DataType::Uint32
            | DataType::Int64
            | DataType::Uint64 => self.int8,
        }
    }
}

/// What API calls cost the calling thread. The virtual host clock advances by these and by nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HostCosts {
    /// A kernel launch, with the framework's work around it.
    pub kernel_launch_ns: u64,
    /// Enqueueing a copy or a fill.
    pub memcpy_ns: u64,
    /// Recording an event or waiting for one on a stream.
    pub event_ns: u64,
    /// Returning from a synchronisation, after what it waited for is over.
    pub sync_ns: u64,
    /// Reserving or returning device memory.
    pub malloc_ns: u64,
    /// An NCCL call.
    pub nccl_ns: u64,
    /// Reading a clock.
    pub clock_read_ns: u64,
    /// Asking whether an event or stream is complete.
    pub query_ns: u64,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// GPUs: global ranks `k * gpus .. (k + 1) * gpus` share node `k`.
    pub gpus: u32,
    /// NVLink bandwidth of one GPU in one direction.
    pub nvlink_bytes_per_s: u64,
    /// Share of it that a collective reaches.
    pub nvlink_efficiency: f64,
    /// What one hop over NVLink adds to a collective's step.
    pub nvlink_latency_ns: u64,
    /// Where NVLink is a mesh without switches: the rings that 2, 3, ... `gpus` GPUs of a node find in it. The most of them
    /// have all of `nvlink_bytes_per_s`, fewer their part of it; 1.7 are two of less bandwidth than the others. Two
    /// GPUs' is also what a message between GPUs has. Absent: switches, which give every GPU all of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlink_rings: Vec<f64>,
    /// Network cards.
    pub nics: u32,
    /// The host's processor; only NCCL's tuning asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuVendor>,
    /// Do the NVLink switches reduce and multicast (NVLS)? Only NCCL's tuning asks for it, on GPUs from 9.0 on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvls: bool,
    /// Bandwidth of copies between host and device.
    pub pcie_bytes_per_s: u64,
}

impl Node {
    /// Rings that `ranks` GPUs of the node find in a mesh of NVLinks; `None`: it has switches.
    #[must_use]
    pub fn rings_among(&self, ranks: u32) -> Option<f64> {
        let last = self.nvlink_rings.len().checked_sub(1)?;
        Some(self.nvlink_rings[last.min(ranks.saturating_sub(2) as usize)])
    }

    /// Share of a GPU's NVLink bandwidth that `ranks` GPUs of the node use in a collective.
    #[must_use]
    pub fn nvlink_share(&self, ranks: u32) -> f64 {
        let most = self.nvlink_rings.iter().copied().fold(0.0, f64::max);
        self.rings_among(ranks).map_or(1.0, |rings| rings / most)
    }
}

/// The network and the parameters of the collectives.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bandwidth of one network card in one direction.
    pub nic_bytes_per_s: u64,
    /// Share of it that a collective reaches.
    pub nic_efficiency: f64,
    /// What one hop over the network adds to a collective's step.
    pub latency_ns: u64,
    /// Time from the moment a rank's stream reaches a communication op until it takes part.
    pub collective_launch_ns: u64,
    /// Pieces a ring step is cut into; the next piece is on the wire while this one is reduced.
    pub ring_slices_per_step: u32,
    /// Most bytes a rank sends in one ring step; larger buffers go round several times.
    pub ring_step_bytes: u64,
    /// Size of the pieces that move through a tree.
    pub tree_chunk_bytes: u64,
    /// Size of the pieces that move along a broadcast or reduce chain.
    pub chain_chunk_bytes: u64,
    /// How algorithm and protocol are chosen: `fastest` (the default), or `nccl-2.30` and other versions: as that one
    /// does, and on its channels with its chunks instead of the sizes above.
    #[serde(default)]
    pub tuning: Tuning,
    /// Channels of a communicator inside one node; only NCCL's tuning asks for it.
    #[serde(default)]
    pub node_channels: u32,
    /// NCCL's environment variables; only its tuning follows them.
    #[serde(default, skip_serializing_if = "NcclSettings::is_empty")]
    pub nccl: NcclSettings,
    /// NCCL's LL protocol: half the bandwidth, least latency. Without the table it is never chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ll: Option<LowLatency>,
    /// NCCL's LL128 protocol: most of the bandwidth, low latency. Without the table it is never chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ll128: Option<LowLatency>,
    /// What NCCL's formula for NVLS trees leaves out; it goes on choosing by the formula.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvls_tree: Option<SwitchTrees>,
    /// Switches between the nodes that concurrent messages share. Without the table nothing but the cards holds them back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
}

/// Two levels of switches between nodes. Only contention ([`crate::contention`]) asks for them: a message alone is never
/// slower for them.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// Nodes whose cards reach each other without the upper switches.
    pub nodes_per_leaf: u32,
    /// Rail-optimised: the cards of one number of these nodes have a leaf switch of their own, so that a message to another rail
    /// goes through the upper switches too. Otherwise one leaf has all cards of its nodes (a fat tree).
    #[serde(default)]
    pub rails: bool,
    /// Cards of a leaf for each of its uplinks, which are as fast as a card: 1 is full bisection; at most `nodes_per_leaf`.
    pub oversubscription: f64,
}

/// All-reduces over NVLS trees beside NCCL's formula, a latency and the time of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchTrees {
    /// The pipeline over nodes and switches fills for this many times sqrt(latency x time of the bytes); 0 to 10.
    pub fill: f64,
    /// Bandwidth beside the formula's; 0.1 to 10.
    pub bandwidth: f64,
}

/// A protocol whose messages carry their own arrival flags. What is not said here is as in the tables above, which
/// describe NCCL's Simple protocol.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LowLatency {
    /// Share of every link's bandwidth that carries data.
    pub bandwidth_share: f64,
    /// Most that the threads of one rank can move over NVLink.
    pub nvlink_limit_bytes_per_s: u64,
    /// Most that they can move over the network, all cards together.
    pub network_limit_bytes_per_s: u64,
    /// As `collective_launch_ns`.
    pub launch_ns: u64,
    /// Latency of a hop over NVLink in rings and chains.
    pub ring_nvlink_latency_ns: u64,
    /// Latency of a hop over the network in rings and chains.
    pub ring_latency_ns: u64,
    /// Latency of a hop over NVLink in trees.
    pub tree_nvlink_latency_ns: u64,
    /// Latency of a hop over the network in trees.
    pub tree_latency_ns: u64,
    /// Size of the pieces that move through rings, trees and chains.
    pub chunk_bytes: u64,
}

impl Profile {
    /// The same with `network.tuning = "fastest"`: collectives run over one wide channel.
    #[must_use]
    pub fn without_channels(mut self) -> Self {
        (self.network.tuning, self.network.nccl) = (Tuning::Fastest, NcclSettings::default());
        self
    }

    /// The built-in profile `name`.
    pub fn builtin(name: &str) -> Result<Self, ProfileError> {
        Self::from_toml(Self::builtin_text(name)?)
    }

    /// The built-in profile `name` as it was written: a comment on every number says where it comes from.
    pub fn builtin_text(name: &str) -> Result<&'static str, ProfileError> {
        match BUILTIN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Ok(text),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                known: Self::builtin_names().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Names of the built-in profiles, in order.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// Reads a profile. Unknown, missing and ill-typed keys are errors that name the key.
    pub fn from_toml(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)?;
        profile.validate()?;
        Ok(profile)
    }

    /// The profile as TOML that [`Profile::from_toml`] reads back unchanged.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml_lines("", &self.to_json()).join("\n") + "\n"
    }

    /// Lines `section.key=value` for the preloaded libraries: sections joined by dots, the compute capability as
    /// `major.minor`, numbers without exponent.
    #[must_use]
    pub fn config_text(&self) -> String {
        flat_lines("", &self.to_json()).join("\n") + "\n"
    }

    fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("a profile has only string keys")
    }

    fn validate(&self) -> Result<(), ProfileError> {
        let (device, node, network) = (&self.device, &self.node, &self.network);
        let positive = [
            ("device.sm_count", u64::from(device.sm_count)),
            ("device.clock_khz", u64::from(device.clock_khz)),
            ("device.memory_bytes", device.memory_bytes),
            ("device.memory_bytes_per_s", device.memory_bytes_per_s),
            ("node.gpus", u64::from(node.gpus)),
            ("node.nvlink_bytes_per_s", node.nvlink_bytes_per_s),
            ("node.nics", u64::from(node.nics)),
            ("node.pcie_bytes_per_s", node.pcie_bytes_per_s),
            ("network.nic_bytes_per_s", network.nic_bytes_per_s),
            ("network.ring_slices_per_step", u64::from(network.ring_slices_per_step)),
            ("network.ring_step_bytes", network.ring_step_bytes),
            ("network.tree_chunk_bytes", network.tree_chunk_bytes),
            ("network.chain_chunk_bytes", network.chain_chunk_bytes),
        ];
        if let Some(&(key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(ProfileError::Range { key, expected: "at least 1", value: 0.0 });
        }
        self.validate_rings()?;
        self.validate_tuning()?;
        self.validate_fabric()?;
        if let Some(trees) = network.nvls_tree {
            if !(0.0..=10.0).contains(&trees.fill) {
                let (key, expected) = ("network.nvls_tree.fill", "from 0 to 10");
                return Err(ProfileError::Range { key, expected, value: trees.fill });
            }
            if !(0.1..=10.0).contains(&trees.bandwidth) {
                let (key, expected) = ("network.nvls_tree.bandwidth", "from 0.1 to 10");
                return Err(ProfileError::Range { key, expected, value: trees.bandwidth });
            }
        }
        if network.ring_slices_per_step > MAX_RING_SLICES {
            let value = f64::from(network.ring_slices_per_step);
            return Err(ProfileError::Range { key: "network.ring_slices_per_step", expected: "at most 16", value });
        }
        for protocol in [network.ll, network.ll128].into_iter().flatten() {
            let share = protocol.bandwidth_share;
            if !(share > 0.0 && share <= 1.0) {
                let (key, expected) = ("network.ll*.bandwidth_share", "above 0 and at most 1");
                return Err(ProfileError::Range { key, expected, value: share });
            }
            if protocol.chunk_bytes == 0 {
                return Err(ProfileError::Range { key: "network.ll*.chunk_bytes", expected: "at least 1", value: 0.0 });
            }
        }
        let gemm = device.gemm_efficiency;
        let shares = [
            ("device.memory_efficiency", device.memory_efficiency),
            ("device.attention_efficiency", device.attention_efficiency),
            ("device.gemm_efficiency.bf16", gemm.bf16),
            ("device.gemm_efficiency.fp16", gemm.fp16),
            ("device.gemm_efficiency.tf32", gemm.tf32),
            ("device.gemm_efficiency.fp32", gemm.fp32),
            ("device.gemm_efficiency.fp64", gemm.fp64),
            ("device.gemm_efficiency.fp8", gemm.fp8),
            ("device.gemm_efficiency.int8", gemm.int8),
            ("node.nvlink_efficiency", node.nvlink_efficiency),
            ("network.nic_efficiency", network.nic_efficiency),
        ];
        if let Some(&(key, value)) = shares.iter().find(|(_, value)| !(*value > 0.0 && *value <= 1.0)) {
            return Err(ProfileError::Range { key, expected: "above 0 and at most 1", value });
        }
        let peak = device.peak_flops;
        let peaks = [
            ("device.peak_flops.bf16", peak.bf16),
            ("device.peak_flops.fp16", peak.fp16),
            ("device.peak_flops.tf32", peak.tf32),
            ("device.peak_flops.fp32", peak.fp32),
            ("device.peak_flops.fp64", peak.fp64),
            ("device.peak_flops.fp8", peak.fp8),
            ("device.peak_flops.int8", peak.int8),
        ];
        match peaks.iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            Some(&(key, value)) => Err(ProfileError::Range { key, expected: "above 0", value }),
            None => Ok(()),
        }
    }

    /// A mesh of NVLinks tells of every number of GPUs from two on.
    fn validate_rings(&self) -> Result<(), ProfileError> {
        let rings = &self.node.nvlink_rings;
        let key = "node.nvlink_rings";
        if !rings.is_empty() && rings.len() + 1 != self.node.gpus as usize {
            let (expected, value) = ("one number for each of 2, 3, ... node.gpus GPUs", rings.len() as f64);
            return Err(ProfileError::Range { key, expected, value });
        }
        match rings.iter().find(|rings| !(0.1..=f64::from(MAX_CHANNELS / 2)).contains(*rings)) {
            Some(&value) => Err(ProfileError::Range { key, expected: "from 0.1 to 32 each", value }),
            None => Ok(()),
        }
    }

    /// No card of a node shares an uplink with another one of it.
    fn validate_fabric(&self) -> Result<(), ProfileError> {
        let Some(Fabric { nodes_per_leaf, oversubscription, .. }) = self.network.fabric else { return Ok(()) };
        if !(1..=MAX_NODES_PER_LEAF).contains(&nodes_per_leaf) {
            let (key, expected) = ("network.fabric.nodes_per_leaf", "from 1 to 65536");
            return Err(ProfileError::Range { key, expected, value: f64::from(nodes_per_leaf) });
        }
        if !(1.0..=f64::from(nodes_per_leaf)).contains(&oversubscription) {
            let (key, expected) = ("network.fabric.oversubscription", "from 1 to network.fabric.nodes_per_leaf");
            return Err(ProfileError::Range { key, expected, value: oversubscription });
        }
        Ok(())
    }

    /// What NCCL's tuning needs is there, and its settings can be followed.
    fn validate_tuning(&self) -> Result<(), ProfileError> {
        let network = &self.network;
        let Tuning::Nccl(version) = network.tuning else {
            return match network.nccl.pairs().iter().next() {
                Some((name, value)) => Err(ProfileError::Nccl(SettingError {
                    name: name.clone(),
                    value: value.clone(),
                    reason: "only followed under NCCL's tuning (network.tuning = \"nccl-2.30\")".to_owned(),
                })),
                None => Ok(()),
            };
        };
        if !(1..=MAX_CHANNELS).contains(&network.node_channels) {
            let (key, value) = ("network.node_channels", f64::from(network.node_channels));
            return Err(ProfileError::Range { key, expected: "from 1 to 64 under NCCL's tuning", value });
        }
        Ok(network.nccl.check(version)?)
    }
}

/// Most channels a communicator has.
const MAX_CHANNELS: u32 = 64;

/// Most nodes of a leaf switch.
const MAX_NODES_PER_LEAF: u32 = 1 << 16;

/// Most slices a ring step may be cut into: the cost of evaluating a change of message size is their square.
const MAX_RING_SLICES: u32 = 16;

/// Lines of `value`'s plain keys, then of its tables (TOML wants them in this order).
fn toml_lines(path: &str, value: &Value) -> Vec<String> {
    let Value::Object(map) = value else { unreachable!("only tables are passed here") };
    let (tables, plain_keys): (Vec<_>, Vec<_>) = map.iter().partition(|(_, value)| value.is_object());
    let mut lines: Vec<_> =
        plain_keys.into_iter().map(|(key, value)| format!("{key} = {}", plain(value, ", ", "[", "]"))).collect();
    for (key, table) in tables {
        let path = join(path, key);
        lines.push(format!("\n[{path}]"));
        lines.extend(toml_lines(&path, table));
    }
    lines
}

fn flat_lines(path: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => map.iter().flat_map(|(key, value)| flat_lines(&join(path, key), value)).collect(),
        Value::String(string) => vec![format!("{path}={string}")],
        // A version is its numbers with points between them; numbers that have points themselves are a list.
        Value::Array(items) if items.iter().any(Value::is_f64) => vec![format!("{path}={}", plain(value, ",", "", ""))],
        other => vec![format!("{path}={}", plain(other, ".", "", ""))],
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn plain(value: &Value, separator: &str, open: &str, close: &str) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| plain(item, separator, open, close)).collect();
            format!("{open}{}{close}", items.join(separator))
        }
        Value::Number(number) if number.is_f64() => decimal(number.as_f64().expect("checked to be f64")),
        other => other.to_string(),
    }
}

/// A float without exponent and, so that TOML keeps it a float, with a point.
fn decimal(value: f64) -> String {
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}
