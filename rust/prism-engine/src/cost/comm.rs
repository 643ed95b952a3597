//! Links: how long bytes occupy one, and how much later they arrive.

use crate::profile::Profile;
use crate::units::SimTime;

/// A one-way connection. Messages occupy it one after the other and arrive `latency` after they left it; the latency of
/// a message overlaps with the messages behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Bandwidth.
    pub bytes_per_s: u64,
    /// Time from the end of the occupancy to the arrival.
    pub latency: SimTime,
}

impl Link {
    /// All of one GPU's NVLinks.
    #[must_use]
    pub fn nvlink(profile: &Profile) -> Self {
        let node = &profile.node;
        Self {
            bytes_per_s: share(node.nvlink_bytes_per_s, node.nvlink_efficiency),
            latency: nanoseconds(node.nvlink_latency_ns),
        }
    }

    /// The same as far as `ranks` GPUs of a node can use it together: a mesh of NVLinks has other rings for each number.
    #[must_use]
    pub fn nvlink_among(profile: &Profile, ranks: u32) -> Self {
        let node = &profile.node;
        let efficiency = node.nvlink_efficiency * node.nvlink_share(ranks);
        Self { bytes_per_s: share(node.nvlink_bytes_per_s, efficiency), ..Self::nvlink(profile) }
    }

    /// Between two nodes, over `cards` network cards at once.
    #[must_use]
    pub fn network(profile: &Profile, cards: u32) -> Self {
        let network = &profile.network;
        Self {
            bytes_per_s: share(network.nic_bytes_per_s, network.nic_efficiency).saturating_mul(u64::from(cards.max(1))),
            latency: nanoseconds(network.latency_ns),
        }
    }

    /// Between two global ranks: NVLink inside a node (of a mesh what two GPUs have), one network card otherwise.
    #[must_use]
    pub fn between(profile: &Profile, from: u32, to: u32) -> Self {
        if node_of(profile, from) == node_of(profile, to) {
            Self::nvlink_among(profile, 2)
        } else {
            Self::network(profile, 1)
        }
    }

    /// What all messages of a rank to others share on the way to `to`: its NVLinks, or its network card.
    #[must_use]
    pub fn port_towards(profile: &Profile, from: u32, to: u32) -> Self {
        if node_of(profile, from) == node_of(profile, to) { Self::nvlink(profile) } else { Self::network(profile, 1) }
    }

    /// The same link when `streams` transfers always share it evenly.
    #[must_use]
    pub fn shared_by(self, streams: u32) -> Self {
        Self { bytes_per_s: (self.bytes_per_s / u64::from(streams.max(1))).max(1), ..self }
    }

    /// How long `bytes` occupy the link: `ceil(bytes / bandwidth)` in picoseconds.
    #[must_use]
    pub fn occupancy(self, bytes: u64) -> SimTime {
        transfer_time(bytes, self.bytes_per_s)
    }
}

/// Node of a global rank: ranks fill the nodes in order.
#[must_use]
pub fn node_of(profile: &Profile, rank: u32) -> u32 {
    rank / profile.node.gpus
}

/// `ceil(bytes / bytes_per_s)` in picoseconds, saturating.
#[must_use]
pub fn transfer_time(bytes: u64, bytes_per_s: u64) -> SimTime {
    let ps = (u128::from(bytes) * 1_000_000_000_000).div_ceil(u128::from(bytes_per_s.max(1)));
    SimTime::from_ps(i64::try_from(ps).unwrap_or(i64::MAX))
}

/// `efficiency` of `bytes_per_s`, rounded to a whole number, at least 1.
pub(crate) fn share(bytes_per_s: u64, efficiency: f64) -> u64 {
    ((bytes_per_s as f64 * efficiency).round() as u64).max(1)
}

/// A number of a profile as a duration, saturating.
pub(crate) fn nanoseconds(ns: u64) -> SimTime {
    SimTime::from_ns(i64::try_from(ns).unwrap_or(i64::MAX))
}
