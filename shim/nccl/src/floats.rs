//! The small floating-point formats NCCL reduces, as conversions from and to `f32`.

/// A format of one sign bit, `EXPONENT` exponent bits and `MANTISSA` mantissa bits.
///
/// `INFINITE`: the largest exponent means infinity and NaN (IEEE); otherwise only the all-ones code is NaN and values
/// saturate. `SATURATE`: too large values become the largest finite one, as NCCL's fp8 conversions do.
#[derive(Clone, Copy)]
pub(crate) struct Small<const EXPONENT: u32, const MANTISSA: u32, const INFINITE: bool, const SATURATE: bool>(
    pub(crate) u16,
);

/// `ncclFloat16`.
pub(crate) type Half = Small<5, 10, true, false>;
/// `ncclFloat8e4m3`.
pub(crate) type E4m3 = Small<4, 3, false, true>;
/// `ncclFloat8e5m2`.
pub(crate) type E5m2 = Small<5, 2, true, true>;
/// `ncclBfloat16`.
pub(crate) type Brain = Small<8, 7, true, false>;

impl<const E: u32, const M: u32, const INFINITE: bool, const SATURATE: bool> Small<E, M, INFINITE, SATURATE> {
    const BIAS: i32 = (1 << (E - 1)) - 1;
    const SIGN: u16 = 1 << (E + M);
    const MANTISSA_MASK: u16 = (1 << M) - 1;
    /// Exponent field of infinity (IEEE formats).
    const TOP_EXPONENT: u32 = (1 << E) - 1;
    const INFINITY: u32 = Self::TOP_EXPONENT << M;
    const LARGEST: u32 = if INFINITE { Self::INFINITY - 1 } else { (1 << (E + M)) - 2 };
    const NAN: u16 = if INFINITE { (Self::INFINITY | (1 << (M - 1))) as u16 } else { Self::SIGN - 1 };

    /// The value, exactly.
    pub(crate) fn to_f32(self) -> f32 {
        let exponent = u32::from((self.0 & (Self::SIGN - 1)) >> M);
        let mantissa = u32::from(self.0 & Self::MANTISSA_MASK);
        let magnitude = if INFINITE && exponent == Self::TOP_EXPONENT {
            if mantissa == 0 { f32::INFINITY } else { f32::NAN }
        } else if !INFINITE && self.0 & (Self::SIGN - 1) == Self::NAN {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 * Self::quantum()
        } else {
            f32::from_bits((exponent.wrapping_add_signed(127 - Self::BIAS) << 23) | (mantissa << (23 - M)))
        };
        if self.0 & Self::SIGN == 0 { magnitude } else { -magnitude }
    }

    /// Distance between subnormal values: `2^(1 - BIAS - M)`.
    fn quantum() -> f32 {
        let exponent = 1 - Self::BIAS - M as i32 + 127;
        // Brain's is itself subnormal in f32.
        if exponent > 0 { f32::from_bits((exponent as u32) << 23) } else { f32::from_bits(1 << (22 + exponent)) }
    }

    /// The nearest value, ties to even.
    pub(crate) fn from_f32(value: f32) -> Self {
        let sign = if value.is_sign_negative() { Self::SIGN } else { 0 };
        if value.is_nan() {
            return Self(sign | Self::NAN);
        }
        let bits = value.abs().to_bits();
        let exponent = (bits >> 23) as i32 - 127;
        let rounded = if exponent < 1 - Self::BIAS {
            (value.abs() / Self::quantum()).round_ties_even() as u32
        } else {
            let dropped = 23 - M;
            let half_to_even = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
            // Infinity's code lies above every finite one, so the test below catches it too.
            ((bits + half_to_even) >> dropped).wrapping_add_signed((Self::BIAS - 127) << M)
        };
        let code = match rounded {
            _ if rounded <= Self::LARGEST => rounded,
            _ if SATURATE => Self::LARGEST,
            _ => Self::INFINITY,
        };
        Self(sign | code as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<const E: u32, const M: u32, const I: bool, const S: bool>() {
        for code in 0..1_u32 << (1 + E + M) {
            let small = Small::<E, M, I, S>(code as u16);
            let value = small.to_f32();
            let back = Small::<E, M, I, S>::from_f32(value);
            if value.is_nan() {
                assert!(back.to_f32().is_nan(), "{code:#x}");
            } else if value.is_infinite() && S {
                assert!(back.to_f32().is_finite(), "{code:#x}");
            } else {
                assert_eq!(u32::from(back.0), code, "{code:#x} = {value}");
            }
        }
    }

    #[test]
    fn every_code_survives_the_way_through_f32() {
        round_trip::<5, 10, true, false>();
        round_trip::<8, 7, true, false>();
        round_trip::<4, 3, false, true>();
        round_trip::<5, 2, true, true>();
    }

    #[test]
    fn known_values() {
        assert_eq!(Half::from_f32(1.0).0, 0x3c00);
        assert_eq!(Half::from_f32(-65_504.0).0, 0xfbff);
        assert_eq!(Half::from_f32(65_520.0).0, 0x7c00);
        assert_eq!(Half::from_f32(2.0_f32.powi(-24)).0, 1);
        // Half way between 1 and the next value: to even.
        assert_eq!(Half::from_f32(1.0 + 2.0_f32.powi(-11)).0, 0x3c00);
        assert_eq!(Half::from_f32(1.0 + 3.0 * 2.0_f32.powi(-11)).0, 0x3c02);
        assert_eq!(Brain::from_f32(3.140_625).0, 0x4049);
        assert_eq!(Brain::from_f32(f32::MAX).0, 0x7f80);
        assert_eq!(E4m3::from_f32(448.0).0, 0x7e);
        assert_eq!(E4m3::from_f32(1e9).0, 0x7e);
        assert_eq!(E4m3::from_f32(0.001_953_125).0, 1);
        assert_eq!(0x7f, E4m3::from_f32(f32::NAN).0);
        assert_eq!(E5m2::from_f32(57_344.0).0, 0x7b);
        assert_eq!(E5m2::from_f32(f32::INFINITY).0, 0x7b);
        assert!(Small::<5, 2, true, true>(0x7c).to_f32().is_infinite());
    }
}
