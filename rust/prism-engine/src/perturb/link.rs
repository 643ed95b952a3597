//! Links that are slower than they should be.

use super::Rule;
use super::scope::{RankSet, Window};
use crate::cost::comm::Link;
use crate::ids::Rank;
use crate::units::SimTime;
use std::collections::BTreeMap;

/// What happens to a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkChange {
    /// 0.5 = half the bandwidth.
    pub bandwidth_factor: f64,
    /// More latency.
    pub latency: SimTime,
}

impl LinkChange {
    /// Nothing happens.
    pub const NONE: Self = Self { bandwidth_factor: 1.0, latency: SimTime::ZERO };

    /// Both changes.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { bandwidth_factor: self.bandwidth_factor * other.bandwidth_factor, latency: self.latency + other.latency }
    }

    /// The link after the change; at least 1 B/s is left.
    #[must_use]
    pub fn apply(self, link: Link) -> Link {
        if self == Self::NONE {
            return link;
        }
        let bytes_per_s = (link.bytes_per_s as f64 * self.bandwidth_factor).round() as u64;
        Link { bytes_per_s: bytes_per_s.max(1), latency: link.latency + self.latency }
    }
}

/// One end of a hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The rank.
    pub rank: Rank,
    /// Its node.
    pub node: u32,
    /// Network cards of the node that carry the hop: bit `n` is card `n`.
    pub cards: u64,
}

/// A way from one rank to another: over NVLink inside a node, over network cards between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// One end.
    pub from: End,
    /// The other. A hop from an end to itself stands for everything that goes through its port or cards.
    pub to: End,
    /// It stays inside a node.
    pub is_inside: bool,
}

/// Hops that have one of the ports at either end are changed.
///
/// A transfer over several cards is spread evenly over them and waits for the slowest share, so it is as slow as if all of
/// them were.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowLink {
    /// GPUs whose NVLink ports are changed.
    pub ports: RankSet,
    /// Network cards that are changed, by node: bit `n` is card `n`.
    pub cards: BTreeMap<u32, u64>,
    /// When. A collective is judged as a whole, at its start: when its last member has come.
    pub window: Window,
    /// What happens to the hops.
    pub change: LinkChange,
}

impl Rule for SlowLink {
    fn touches(&self, rank: Rank) -> Option<u64> {
        self.ports.contains(rank).then_some(0)
    }

    fn network_window(&self) -> Option<&Window> {
        Some(&self.window)
    }

    fn link(&self, hop: &Hop) -> Option<LinkChange> {
        let has_card = |end: &End| self.cards.get(&end.node).is_some_and(|cards| cards & end.cards != 0);
        let is_hit = if hop.is_inside {
            self.ports.contains(hop.from.rank) || self.ports.contains(hop.to.rank)
        } else {
            has_card(&hop.from) || has_card(&hop.to)
        };
        is_hit.then_some(self.change)
    }
}
