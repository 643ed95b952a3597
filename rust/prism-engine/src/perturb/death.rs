//! Ranks that stop for good.

use super::Rule;
use crate::ids::Rank;
use crate::units::SimTime;

/// When a rank dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// Ops that have not ended on the rank by then do not happen; a communication op whose end the rank does not see does
    /// not happen for its peers either.
    At(SimTime),
    /// It issues nothing after this many `IterationEnd`s.
    AfterIterations(u32),
}

/// A rank dies; whoever needs it afterwards waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankDeath {
    /// Who.
    pub rank: Rank,
    /// When.
    pub death: Death,
}

impl Rule for RankDeath {
    fn touches(&self, rank: Rank) -> Option<u64> {
        (rank == self.rank).then_some(0)
    }

    fn is_memoryless(&self) -> bool {
        false
    }

    fn death(&self, rank: Rank) -> Option<Death> {
        (rank == self.rank).then_some(self.death)
    }
}
