//! The largest of many normal numbers: when the slowest group has computed.

use crate::perturb::random::Random;
use libm::{expm1, log, sqrt};

/// The largest of `count` standard normal numbers, in one draw: if `U` is uniform, so is the `count`-th power of the
/// distribution function of the maximum.
pub(super) fn largest_normal(random: &mut Random, count: u32) -> f64 {
    let above = -expm1(log(random.uniform()) / f64::from(count.max(1)));
    -normal_quantile(above)
}

/// Inverse of the standard normal distribution function (Acklam's rational approximation, relative error 1.2e-9).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let q = sqrt(-2.0 * log(p));
        poly(&C, q) / (poly(&D, q) * q + 1.0)
    };
    if p < 0.024_25 {
        tail(p)
    } else if p > 1.0 - 0.024_25 {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        poly(&A, q * q) * q / (poly(&B, q * q) * q * q + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_many_normals_has_the_known_mean() {
        for (count, expected) in [(1, 0.0), (200, 2.746), (600, 3.09), (1000, 3.241)] {
            let draw = |n: u64| largest_normal(&mut Random::of(1, &[n]), count);
            let mean = (0..40_000).map(draw).sum::<f64>() / 40_000.0;
            assert!((mean - expected).abs() < 0.02, "{count}: {mean} instead of {expected}");
        }
    }
}
