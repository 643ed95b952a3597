//! Compute ops whose durations scatter.

use super::maths::exp;
use super::random::Random;
use super::scope::{ComputeSite, Scope};
use super::{Rule, StreamState};
use crate::ids::Rank;
use crate::units::SimTime;

/// Distribution of a draw. Draws below 0 count as 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Normal.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// `exp` of a normal.
    LogNormal {
        /// Mean of the logarithm.
        mu: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
    /// Uniform.
    Uniform {
        /// Least.
        low: f64,
        /// Most.
        high: f64,
    },
    /// Gamma; its mean is `shape * scale`.
    Gamma {
        /// Shape.
        shape: f64,
        /// Scale.
        scale: f64,
    },
}

/// What becomes of a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JitterMode {
    /// The duration is multiplied by it.
    Multiply,
    /// It is added, in ns.
    Add,
}

/// Every compute op of every iteration of every rank has a draw of its own, named by seed, rank, iteration and place of
/// the op in its iteration: the same on every run, whichever ranks are live.
#[derive(Clone, Debug, PartialEq)]
pub struct Jitter {
    /// Which ops.
    pub scope: Scope,
    /// How they are drawn.
    pub distribution: Distribution,
    /// What becomes of the draw.
    pub mode: JitterMode,
    /// Two rules with one seed draw the same numbers.
    pub seed: u64,
}

impl Jitter {
    /// The draw of an op.
    #[must_use]
    pub fn draw(&self, rank: Rank, iteration: u32, place: u32) -> f64 {
        let mut random = Random::of(self.seed, &[u64::from(rank.0), u64::from(iteration), u64::from(place)]);
        let draw = match self.distribution {
            Distribution::Normal { mean, std } => mean + std * random.normal(),
            Distribution::LogNormal { mu, sigma } => exp(mu + sigma * random.normal()),
            Distribution::Uniform { low, high } => low + (high - low) * random.uniform(),
            Distribution::Gamma { shape, scale } => scale * random.gamma(shape),
        };
        draw.max(0.0)
    }
}

impl Rule for Jitter {
    fn touches(&self, rank: Rank) -> Option<u64> {
        // Every rank draws for itself.
        self.scope.ranks.contains(rank).then_some(u64::from(rank.0))
    }

    fn names(&self) -> &[String] {
        &self.scope.names
    }

    fn changes_compute(&self, rank: Rank) -> bool {
        self.scope.ranks.contains(rank)
    }

    fn compute(&self, site: &ComputeSite, duration: SimTime, _state: &mut StreamState) -> SimTime {
        if !self.scope.covers(site) {
            return duration;
        }
        let draw = self.draw(site.rank, site.when.iteration, site.place);
        match self.mode {
            JitterMode::Multiply => duration.scaled(draw),
            JitterMode::Add => duration + SimTime::from_ns(1).scaled(draw),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perturb::scope::RankSet;

    fn jitter(distribution: Distribution) -> Jitter {
        Jitter { scope: Scope::of(RankSet::of([0])), distribution, mode: JitterMode::Multiply, seed: 42 }
    }

    /// The numbers are part of the format: a file of perturbations means the same in every version.
    #[test]
    fn golden_draws() {
        let draw = |distribution| jitter(distribution).draw(Rank(5), 2, 17);
        let found = [
            draw(Distribution::Uniform { low: 0.0, high: 1.0 }),
            draw(Distribution::Normal { mean: 1.0, std: 0.1 }),
            draw(Distribution::LogNormal { mu: 0.0, sigma: 0.5 }),
            draw(Distribution::Gamma { shape: 2.0, scale: 3.0 }),
        ];
        assert_eq!(found.map(f64::to_bits), GOLDEN.map(f64::to_bits), "{found:?}");
    }

    const GOLDEN: [f64; 4] =
        [0.183_483_475_191_714_76, 0.944_717_918_271_71, 0.758_501_571_273_895_4, 3.150_004_304_855_147_4];

    #[test]
    fn draws_below_zero_count_as_zero() {
        let rule = jitter(Distribution::Normal { mean: 0.0, std: 1.0 });
        let draws: Vec<f64> = (0..200).map(|place| rule.draw(Rank(0), 0, place)).collect();
        assert!(draws.iter().all(|draw| *draw >= 0.0));
        assert!((60..140).contains(&draws.iter().filter(|draw| **draw == 0.0).count()), "about half");
    }
}
