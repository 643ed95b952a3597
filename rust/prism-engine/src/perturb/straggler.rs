//! Ranks that compute more slowly.

use super::scope::{ComputeSite, Scope};
use super::{Rule, StreamState};
use crate::ids::Rank;
use crate::units::SimTime;

/// Compute ops take `factor` times as long. Without a window and a filter this is the same, to the bit, as a slow-down of
/// the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    /// Which ops.
    pub scope: Scope,
    /// 1.3 = 30 % longer.
    pub factor: f64,
}

impl Rule for Straggler {
    fn touches(&self, rank: Rank) -> Option<u64> {
        self.scope.ranks.contains(rank).then_some(0)
    }

    fn constant_factor(&self, rank: Rank) -> Option<f64> {
        (self.scope.is_everything() && self.scope.ranks.contains(rank)).then_some(self.factor)
    }

    fn names(&self) -> &[String] {
        &self.scope.names
    }

    fn changes_compute(&self, rank: Rank) -> bool {
        !self.scope.is_everything() && self.scope.ranks.contains(rank)
    }

    fn compute(&self, site: &ComputeSite, duration: SimTime, _state: &mut StreamState) -> SimTime {
        if self.scope.covers(site) { duration.scaled(self.factor) } else { duration }
    }
}
