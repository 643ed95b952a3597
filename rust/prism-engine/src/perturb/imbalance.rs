//! Mixture-of-experts routing that sends some ranks more tokens than others.

use super::maths::power;
use super::random::Random;
use super::scope::{ComputeSite, Scope, Window};
use super::{Rule, StreamState};
use crate::ids::Rank;
use crate::units::SimTime;
use std::collections::BTreeMap;

/// A rank's tokens are those of the graph times its factor.
///
/// All-to-alls become unequal: what a member receives (and, on the way back, sends) is scaled by its factor, and the
/// collective lasts as long as its busiest port. So do groups of messages in which a rank exchanges with every other
/// member; such a message is scaled by the larger factor of its two ends. Compute ops are scaled only if the scope names
/// classes or names.
#[derive(Clone, Debug, PartialEq)]
pub struct Imbalance {
    /// Which ranks, when, and which compute ops.
    pub scope: Scope,
    /// Factor of each of the ranks.
    pub factors: BTreeMap<Rank, f64>,
}

/// Factors with mean 1 that fall off as `1 / place^exponent`. The places are the order of the factors, or drawn by `seed`.
#[must_use]
pub fn zipf(exponent: f64, count: usize, seed: Option<u64>) -> Vec<f64> {
    let mut weights: Vec<f64> = (1..=count).map(|place| 1.0 / power(place as f64, exponent)).collect();
    let mean = weights.iter().sum::<f64>() / count as f64;
    for weight in &mut weights {
        *weight /= mean;
    }
    if let Some(seed) = seed {
        let mut random = Random::of(seed, &[]);
        for last in (1..count).rev() {
            weights.swap(last, random.below(last + 1));
        }
    }
    weights
}

impl Imbalance {
    fn factor(&self, rank: Rank) -> f64 {
        self.factors.get(&rank).copied().unwrap_or(1.0)
    }

    fn changes_some_compute(&self) -> bool {
        !self.scope.classes.is_empty() || !self.scope.names.is_empty()
    }
}

impl Rule for Imbalance {
    fn touches(&self, rank: Rank) -> Option<u64> {
        self.factors.get(&rank).map(|factor| factor.to_bits())
    }

    fn names(&self) -> &[String] {
        &self.scope.names
    }

    fn changes_compute(&self, rank: Rank) -> bool {
        self.changes_some_compute() && self.factors.contains_key(&rank)
    }

    fn compute(&self, site: &ComputeSite, duration: SimTime, _state: &mut StreamState) -> SimTime {
        if self.scope.covers(site) { duration.scaled(self.factor(site.rank)) } else { duration }
    }

    fn network_window(&self) -> Option<&Window> {
        Some(&self.scope.window)
    }

    fn size(&self, rank: Rank) -> f64 {
        self.factor(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zipf_factors_have_mean_one_and_the_right_ratios() {
        let factors = zipf(1.0, 4, None);
        // 1, 1/2, 1/3, 1/4 have the mean 25/48.
        let expected = [48.0 / 25.0, 24.0 / 25.0, 16.0 / 25.0, 12.0 / 25.0];
        assert!(factors.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-12), "{factors:?}");
        assert!(zipf(0.0, 3, None).iter().all(|factor| (factor - 1.0).abs() < 1e-15));
    }

    #[test]
    fn a_seed_draws_the_places() {
        let (plain, drawn) = (zipf(1.2, 8, None), zipf(1.2, 8, Some(3)));
        assert_ne!(plain, drawn);
        let mut sorted = drawn.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(plain, sorted);
        assert_eq!(drawn, zipf(1.2, 8, Some(3)));
    }
}
