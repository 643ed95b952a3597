//! Which algorithm and protocol NCCL takes for a collective, on how many channels and threads.
//!
//! NCCL predicts a time for every algorithm and protocol, `latency x latencies + bytes / bandwidth`, and takes the shortest.
//! The constants differ from version to version; [`tables`] has them as data, [`model`] computes latencies and bandwidths
//! for a communicator, [`choose`](Table::choose) takes the shortest and then gives up channels and threads that a small
//! call does not need. [`NcclSettings`] are the environment variables that restrict it.
//!
//! What this knows and does not:
//! - rings, trees, NVLS inside a node, NVLS trees and PAT are in the choice. CollNet (SHARP, and NVLS over nodes) is known by name
//!   and left out: where real NCCL would take it, the best of the others is taken instead. Settings that leave nothing else are
//!   refused. Reductions are taken for such as switches know (sum, minimum, maximum of types of 16 bits and more);
//! - the result of NCCL's search for channels is not computed: it follows from the profile (cards, bandwidths and
//!   `network.node_channels`), as on nodes whose GPUs are all alike to each other;
//! - tuner plugins, `NCCL_THREAD_THRESHOLDS` and the special treatment of 8-bit floats are left out.
//!
//! Sources: NCCL's `src/graph/tuning.cc` and `src/enqueue.cc`, versions as named in the tables.

pub mod settings;
pub mod tables;

mod choose;
mod model;

pub use super::nvls::Switches;
pub use choose::{Chosen, Refusal};
pub use model::{CpuVendor, LinkKind, Table, Topology, model};
pub use settings::{NcclSettings, SettingError};
pub use tables::Version;

use super::CollectiveKind;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How algorithm and protocol of a collective are chosen: `network.tuning` of a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Tuning {
    /// `fastest`: those that end first when nobody is late. All channels are taken for one wide one.
    #[default]
    Fastest,
    /// `nccl-2.30`: those that this version of NCCL takes, on its channels.
    Nccl(Version),
}

impl TryFrom<String> for Tuning {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "fastest" {
            return Ok(Self::Fastest);
        }
        let known = || Version::all().map(|version| format!("nccl-{version}")).collect::<Vec<_>>().join(", ");
        text.strip_prefix("nccl-")
            .and_then(Version::parse)
            .map(Self::Nccl)
            .ok_or_else(|| format!("no tuning `{text}` (there are: fastest, {})", known()))
    }
}

impl From<Tuning> for String {
    fn from(tuning: Tuning) -> Self {
        tuning.to_string()
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fastest => f.write_str("fastest"),
            Self::Nccl(version) => write!(f, "nccl-{version}"),
        }
    }
}

/// The collectives that NCCL tunes. All-to-all, gather and scatter are made of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `ncclBroadcast`.
    Broadcast,
    /// `ncclReduce`.
    Reduce,
    /// `ncclAllGather`.
    AllGather,
    /// `ncclReduceScatter`.
    ReduceScatter,
    /// `ncclAllReduce`.
    AllReduce,
}

impl Function {
    /// All of them, in NCCL's order.
    pub const ALL: [Self; 5] = [Self::Broadcast, Self::Reduce, Self::AllGather, Self::ReduceScatter, Self::AllReduce];

    /// The function of a collective, `None` for those made of messages.
    #[must_use]
    pub fn of(kind: CollectiveKind) -> Option<Self> {
        match kind {
            CollectiveKind::AllReduce => Some(Self::AllReduce),
            CollectiveKind::AllGather => Some(Self::AllGather),
            CollectiveKind::ReduceScatter => Some(Self::ReduceScatter),
            CollectiveKind::Broadcast => Some(Self::Broadcast),
            CollectiveKind::Reduce => Some(Self::Reduce),
            CollectiveKind::AllToAll | CollectiveKind::Gather | CollectiveKind::Scatter => None,
        }
    }

    /// NCCL's name of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"][self as usize]
    }

    /// Bytes that NCCL counts as traffic of a channel per byte of `count`, on `ranks` ranks.
    pub(crate) fn traffic_per_byte(self, ranks: u64) -> u64 {
        match self {
            Self::AllReduce => 2,
            Self::AllGather | Self::ReduceScatter => ranks,
            Self::Broadcast | Self::Reduce => 1,
        }
    }
}

/// NCCL's number of a protocol, also its place in every triple: LL, LL128, Simple.
#[must_use]
pub fn protocol_number(protocol: super::Protocol) -> usize {
    match protocol {
        super::Protocol::Ll => 0,
        super::Protocol::Ll128 => 1,
        super::Protocol::Simple => 2,
    }
}

/// Protocols by number.
pub(crate) const PROTOCOLS: [super::Protocol; 3] =
    [super::Protocol::Ll, super::Protocol::Ll128, super::Protocol::Simple];
