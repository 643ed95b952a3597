//! Exponential and logarithm from additions, multiplications and divisions alone. Those are the same to the last bit on
//! every machine; the ones of a platform's mathematics library are not.

use std::f64::consts::{LN_2, LOG2_E, SQRT_2};

/// `LN_2` in two parts; the first has so few bits that its product with an exponent is exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// `e^x`, to about one unit in the last place.
pub(crate) fn exp(x: f64) -> f64 {
    if x.is_nan() || x > 709.0 {
        return if x.is_nan() { x } else { f64::INFINITY };
    }
    if x < -708.0 {
        return 0.0;
    }
    let k = (x * LOG2_E).round();
    let rest = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    // |rest| <= ln(2) / 2: 14 terms of the series are enough.
    let series = (1..=14).rev().fold(1.0, |sum, n| 1.0 + sum * rest / f64::from(n));
    series * power_of_two(k as i64)
}

/// Natural logarithm of a positive, normal number, to about two units in the last place.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | (1023 << 52));
    if mantissa > SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln(m) = 2 artanh((m - 1) / (m + 1)), with an argument of at most 0.1716.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let series = (0..12).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n + 1));
    2.0 * t * series + exponent as f64 * LN_2
}

/// `base^exponent` of a positive base.
pub(crate) fn power(base: f64, exponent: f64) -> f64 {
    exp(exponent * ln(base))
}

/// `2^k` for an exponent of a normal number.
fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_agree_with_the_library() {
        for step in -6000..6000 {
            let x = f64::from(step) * 0.0117;
            let (own, library) = (exp(x), x.exp());
            assert!((own - library).abs() <= 4e-16 * library, "exp({x}) = {own}, not {library}");
            let positive = library.max(1e-300);
            let (own, library) = (ln(positive), positive.ln());
            assert!((own - library).abs() <= 4e-16 * library.abs().max(1e-3), "ln({positive}) = {own}, not {library}");
        }
        assert_eq!((exp(0.0), ln(1.0), exp(-1e9)), (1.0, 0.0, 0.0));
        assert!(exp(1e9).is_infinite());
        assert!((power(8.0, 1.0 / 3.0) - 2.0).abs() < 1e-15);
    }
}
