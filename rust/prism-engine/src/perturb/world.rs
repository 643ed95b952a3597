//! Where ranks are: which machine, which network card.

use super::link::End;
use crate::ids::Rank;
use crate::profile::Profile;

/// A job on a cluster, as far as rules name parts of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Ranks of the job.
    pub size: u32,
    /// GPUs of a node.
    pub gpus: u32,
    /// Network cards of a node.
    pub nics: u32,
}

impl World {
    /// A job of `size` ranks on the profile's machines.
    #[must_use]
    pub fn new(size: u32, profile: &Profile) -> Self {
        Self { size, gpus: profile.node.gpus, nics: profile.node.nics }
    }

    /// The network card of a rank: the GPUs of a node share its cards evenly.
    #[must_use]
    pub fn nic_of(&self, rank: Rank) -> u32 {
        (u64::from(rank.0 % self.gpus) * u64::from(self.nics) / u64::from(self.gpus)) as u32
    }

    /// The end of a message at a rank: one network card.
    pub(crate) fn end(&self, rank: Rank, node: u32) -> End {
        End { rank, node, cards: card_bit(self.nic_of(rank)) }
    }
}

/// Bit of a card. Beyond 64 cards of one machine the last bit stands for the rest.
pub(crate) fn card_bit(card: u32) -> u64 {
    1 << card.min(63)
}
