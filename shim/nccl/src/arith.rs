//! NCCL's arithmetic: what one step of a reduction does to two elements, type by type (`src/device/reduce_kernel.h`).
//!
//! Every step rounds to the element's type, as every hop of a ring does: sums and products of bfloat16 and float16 once
//! per step, those of the 8-bit floats through float16. Integers wrap.

use crate::floats::{Brain, E4m3, E5m2, Half, Small};
use crate::values::Number;
use prism_wire::message::{DataType, ReduceOp};

/// An element NCCL reduces. Every bit pattern is a value.
pub(crate) trait Element: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// The factor of an average over `n` members, for types that are scaled before they are added.
    fn reciprocal(n: u32) -> Option<Self>;
    /// The sum over `n` members becomes their average, for types that are divided afterwards.
    fn divided(self, n: u32) -> Self;
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Element for $int {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            fn reciprocal(_: u32) -> Option<Self> {
                None
            }
            /// Towards zero. A number of members that the type cannot hold is larger than any sum it can.
            fn divided(self, n: u32) -> Self {
                <$int>::try_from(n).map_or(0, |n| self.wrapping_div(n))
            }
        }
    )*};
}
integers!(i8 u8 i32 u32 i64 u64);

macro_rules! floats {
    ($($float:ty)*) => {$(
        impl Element for $float {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn mul(self, other: Self) -> Self {
                self * other
            }
            /// A number, if one of the two is.
            fn min(self, other: Self) -> Self {
                <$float>::min(self, other)
            }
            fn max(self, other: Self) -> Self {
                <$float>::max(self, other)
            }
            #[allow(clippy::cast_possible_truncation, reason = "NCCL computes the factor in double, too")]
            fn reciprocal(n: u32) -> Option<Self> {
                Some((1.0 / f64::from(n)) as $float)
            }
            fn divided(self, _: u32) -> Self {
                self
            }
        }
    )*};
}
floats!(f32 f64);

/// A two-byte float in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Word<F>(u16, core::marker::PhantomData<F>);

/// A one-byte float in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Byte<F>(u8, core::marker::PhantomData<F>);

macro_rules! small_floats {
    ($($holder:ident: $int:ty, $through:expr;)*) => {$(
        impl<const E: u32, const M: u32, const I: bool, const S: bool> $holder<Small<E, M, I, S>> {
            /// The value, exactly.
            pub(crate) fn value(self) -> f32 {
                Small::<E, M, I, S>(u16::from(self.0)).to_f32()
            }
            /// The nearest value.
            pub(crate) fn from_value(value: f32) -> Self {
                let through: fn(f32) -> f32 = $through;
                Self(Small::<E, M, I, S>::from_f32(through(value)).0 as $int, core::marker::PhantomData)
            }
        }
        impl<const E: u32, const M: u32, const I: bool, const S: bool> Element for $holder<Small<E, M, I, S>> {
            fn add(self, other: Self) -> Self {
                Self::from_value(self.value() + other.value())
            }
            fn mul(self, other: Self) -> Self {
                Self::from_value(self.value() * other.value())
            }
            fn min(self, other: Self) -> Self {
                Self::from_value(self.value().min(other.value()))
            }
            fn max(self, other: Self) -> Self {
                Self::from_value(self.value().max(other.value()))
            }
            fn reciprocal(n: u32) -> Option<Self> {
                let factor = (1.0 / f64::from(n)) as f32;
                Some(Self(Small::<E, M, I, S>::from_f32(factor).0 as $int, core::marker::PhantomData))
            }
            fn divided(self, _: u32) -> Self {
                self
            }
        }
    )*};
}
small_floats! {
    Word: u16, |value| value;
    Byte: u8, |value| Half::from_f32(value).to_f32();
}

/// What to do with the elements of all members.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) dtype: DataType,
    pub(crate) op: ReduceOp,
    /// Number of members.
    pub(crate) n: u32,
    /// Multiplier of a user-defined operator, little endian in the low bytes.
    pub(crate) multiplier: u64,
}

macro_rules! by_type {
    ($dtype:expr, $call:ident::<_>($($arg:expr),*)) => {
        match $dtype {
            DataType::Int8 => $call::<i8>($($arg),*),
            DataType::Uint8 => $call::<u8>($($arg),*),
            DataType::Int32 => $call::<i32>($($arg),*),
            DataType::Uint32 => $call::<u32>($($arg),*),
            DataType::Int64 => $call::<i64>($($arg),*),
            DataType::Uint64 => $call::<u64>($($arg),*),
            DataType::Float32 | DataType::Tf32 => $call::<f32>($($arg),*),
            DataType::Float64 => $call::<f64>($($arg),*),
            DataType::Float16 => $call::<Word<Half>>($($arg),*),
            DataType::Bfloat16 => $call::<Word<Brain>>($($arg),*),
            DataType::Float8e4m3 => $call::<Byte<E4m3>>($($arg),*),
            DataType::Float8e5m2 => $call::<Byte<E5m2>>($($arg),*),
        }
    };
}

impl Reduction {
    /// `into[i] = parts[0][i] op parts[1][i] op ...`, in that order. `into` may be one of the parts. A part with a weight
    /// stands for so many members with equal contributions, rounded once.
    ///
    /// # Safety
    /// Every part is readable and `into` writable for `count` elements; they need not be aligned.
    pub(crate) unsafe fn fold(&self, parts: &[*const u8], weights: Option<&[u32]>, into: *mut u8, count: usize) {
        // SAFETY: passed on to the caller.
        unsafe { by_type!(self.dtype, fold::<_>(self, parts, weights, into, count)) }
    }
}

/// # Safety
/// As for [`Reduction::fold`].
unsafe fn fold<T: Element + Number>(
    reduction: &Reduction,
    parts: &[*const u8],
    weights: Option<&[u32]>,
    into: *mut u8,
    count: usize,
) {
    let n = reduction.n;
    // SAFETY: eight bytes, no element is larger.
    let multiplier = || unsafe { (&raw const reduction.multiplier).cast::<T>().read_unaligned() };
    let scale = match reduction.op {
        ReduceOp::Avg => T::reciprocal(n),
        ReduceOp::PreMulSum => Some(multiplier()),
        _ => None,
    };
    let step: fn(T, T) -> T = match reduction.op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => T::add,
        ReduceOp::Prod => T::mul,
        ReduceOp::Min => T::min,
        ReduceOp::Max => T::max,
    };
    let is_average = reduction.op == ReduceOp::Avg;
    let weigh: fn(T, u32) -> T = match reduction.op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => T::times,
        ReduceOp::Prod => T::power,
        ReduceOp::Min | ReduceOp::Max => |value, _| value,
    };
    for index in 0..count {
        // SAFETY: within the ranges the caller vouches for.
        let element = |part: &*const u8| unsafe { part.cast::<T>().add(index).read_unaligned() };
        let scaled = |value: T| scale.map_or(value, |factor| value.mul(factor));
        let elements = parts.iter().map(element).map(scaled);
        let folded = match weights {
            Some(weights) => elements.zip(weights).map(|(value, weight)| weigh(value, *weight)).reduce(step),
            None => elements.reduce(step),
        };
        let Some(folded) = folded else { return };
        let result = if is_average { folded.divided(n) } else { folded };
        // SAFETY: as above; the elements of this index have been read.
        unsafe { into.cast::<T>().add(index).write_unaligned(result) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded<T: Copy + Default, const N: usize>(dtype: DataType, op: ReduceOp, multiplier: u64, parts: [T; N]) -> T {
        let mut result = T::default();
        let pointers: Vec<*const u8> = parts.iter().map(|part| core::ptr::from_ref(part).cast()).collect();
        let reduction = Reduction { dtype, op, n: N as u32, multiplier };
        // SAFETY: one element each.
        unsafe { reduction.fold(&pointers, None, (&raw mut result).cast(), 1) };
        result
    }

    #[test]
    fn every_step_rounds() {
        // 256 + 1 is 256 in bfloat16 (8 bits of precision), however often.
        let (big, one) = (Brain::from_f32(256.0).0, Brain::from_f32(1.0).0);
        assert_eq!(folded(DataType::Bfloat16, ReduceOp::Sum, 0, [big, one, one, one]), big);
        // The other way round the ones add up first.
        assert_eq!(
            folded(DataType::Bfloat16, ReduceOp::Sum, 0, [one, one, one, big]),
            Brain::from_f32(260.0).0,
            "3 + 256 = 259 lies between 258 and 260"
        );
        let e4m3 = |value| E4m3::from_f32(value).0 as u8;
        assert_eq!(folded(DataType::Float8e4m3, ReduceOp::Sum, 0, [e4m3(448.0), e4m3(448.0)]), e4m3(448.0));
        assert_eq!(folded(DataType::Float8e4m3, ReduceOp::Prod, 0, [e4m3(3.0), e4m3(1.5)]), e4m3(4.5));
    }

    #[test]
    fn averages_scale_floats_first_and_divide_integers_last() {
        assert_eq!(folded(DataType::Int32, ReduceOp::Avg, 0, [-3_i32, 0]), -1);
        assert_eq!(folded(DataType::Uint8, ReduceOp::Avg, 0, [200_u8, 100]), 22, "the sum wraps first");
        let average = |values: [f32; 3]| folded(DataType::Float32, ReduceOp::Avg, 0, values).to_bits();
        assert_eq!(average([f32::MAX; 3]), (f32::MAX / 3.0 + f32::MAX / 3.0 + f32::MAX / 3.0).to_bits());
        let third = 1.0_f32 / 3.0;
        assert_eq!(average([1.0, 1.0, 1.0]), (third + third + third).to_bits());
        assert_eq!(folded(DataType::Int8, ReduceOp::Avg, 0, [1_i8; 200]), 0);
    }

    #[test]
    fn a_weight_stands_for_equal_members() {
        let (one, ten) = (1.5_f32, 10.0_f32);
        let parts = [(&raw const one).cast(), (&raw const ten).cast()];
        for (op, expected) in
            [(ReduceOp::Sum, 34.5), (ReduceOp::Prod, 3375.0), (ReduceOp::Max, 10.0), (ReduceOp::Avg, 6.9)]
        {
            let mut result = 0.0_f32;
            let reduction = Reduction { dtype: DataType::Float32, op, n: 5, multiplier: 0 };
            // SAFETY: one element each.
            unsafe { reduction.fold(&parts, Some(&[3, 3]), (&raw mut result).cast(), 1) };
            assert!((result - expected).abs() < 1e-5, "{op:?}: {result}");
        }
    }

    #[test]
    fn a_multiplier_is_read_in_the_elements_type() {
        let brain = |value| Brain::from_f32(value).0;
        let half = u64::from(brain(0.5));
        assert_eq!(folded(DataType::Bfloat16, ReduceOp::PreMulSum, half, [brain(1.0), brain(2.0)]), brain(1.5));
        // The low half of a float: what a caller gets who passes four bytes where two are read.
        let wrong = u64::from(0.5_f32.to_bits());
        assert_eq!(folded(DataType::Bfloat16, ReduceOp::PreMulSum, wrong, [brain(1.0), brain(2.0)]), 0);
        let tenth = u64::from(0.1_f32.to_bits());
        assert_eq!(
            folded(DataType::Bfloat16, ReduceOp::PreMulSum, tenth, [brain(1.0)]),
            0xcccd,
            "-107479040 as bfloat16"
        );
    }
}
