//! Random numbers that depend on what they are for, not on when they are drawn: every draw starts its own sequence from a
//! seed and the numbers that name the draw.

use super::maths::{exp, ln};

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A SplitMix64 sequence.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The sequence of a seed and of what the draw is for.
    pub(crate) fn of(seed: u64, words: &[u64]) -> Self {
        let state = words.iter().fold(seed, |state, word| mix(state.wrapping_add(STEP)) ^ word);
        Self { state }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// Uniform strictly between 0 and 1.
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) * (1.0 / (1u64 << 53) as f64)
    }

    /// A whole number below `bound`. Its bias of `bound / 2^64` does not matter here.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Standard normal (polar method).
    pub(crate) fn normal(&mut self) -> f64 {
        loop {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let square = x * x + y * y;
            if square < 1.0 && square > 0.0 {
                return x * (-2.0 * ln(square) / square).sqrt();
            }
        }
    }

    /// Gamma of the given shape and scale 1 (Marsaglia and Tsang's squeeze-free form).
    pub(crate) fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            // A gamma of shape + 1, times a power of a uniform number.
            let boost = exp(ln(self.uniform()) / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let root = 1.0 + c * x;
            if root <= 0.0 {
                continue;
            }
            let v = root * root * root;
            if ln(self.uniform()) < 0.5 * x * x + d - d * v + d * ln(v) {
                return d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        let mut random = Random::of(1_234_567, &[]);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!([(); 5].map(|()| random.next()), expected);
    }

    #[test]
    fn draws_differ_by_everything_that_names_them() {
        let draws = [(1, [2, 3]), (2, [2, 3]), (1, [3, 2]), (1, [2, 4])].map(|(seed, w)| Random::of(seed, &w).next());
        let mut distinct = draws.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), draws.len());
    }

    fn moments(draw: impl Fn(&mut Random) -> f64) -> (f64, f64) {
        let draws: Vec<f64> = (0..40_000).map(|n| draw(&mut Random::of(7, &[n]))).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / draws.len() as f64;
        (mean, variance)
    }

    #[test]
    fn distributions_have_their_mean_and_variance() {
        let near = |(mean, variance): (f64, f64), expected: (f64, f64)| {
            assert!((mean - expected.0).abs() < 0.02 * (1.0 + expected.0), "mean {mean}, not {}", expected.0);
            assert!((variance - expected.1).abs() < 0.05 * (1.0 + expected.1), "variance {variance}");
        };
        near(moments(Random::uniform), (0.5, 1.0 / 12.0));
        near(moments(Random::normal), (0.0, 1.0));
        near(moments(|random| random.gamma(4.0)), (4.0, 4.0));
        near(moments(|random| random.gamma(0.5)), (0.5, 0.5));
        near(moments(|random| random.below(10) as f64), (4.5, 8.25));
    }
}
