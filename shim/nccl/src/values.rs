//! Payloads in tier T1, "mirror": every peer is taken to contribute what this rank contributes.
//!
//! The values are therefore not real. They are consistent, though: counts that all ranks agree on, flags, shapes and
//! pickled objects survive, a sum is `n` times one's own value. What cannot be known that way (a receive, a broadcast to
//! this rank) leaves the buffer as it is. NCCL's rounding is not imitated: a sum is one multiplication.

use crate::arith::{Byte, Word};
use crate::comm::{PreMul, Scalar};
use crate::floats::{Brain, E4m3, E5m2, Half, Small};
use prism_wire::message::{CollectiveKind, DataType, ReduceOp};

/// Larger payloads are left alone: values that steer a program are small.
pub(crate) const MAX_MIRRORED_BYTES: u64 = 1 << 20;
/// The same for integers: one's own sizes and pickled objects in place of those of thousands of peers.
const MAX_MIRRORED_INTEGER_BYTES: u64 = 1 << 24;

/// A collective's buffers and what to do with them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    pub(crate) kind: CollectiveKind,
    pub(crate) dtype: DataType,
    pub(crate) op: ReduceOp,
    /// For [`ReduceOp::PreMulSum`].
    pub(crate) scale: Option<PreMul>,
    pub(crate) send: usize,
    pub(crate) recv: usize,
    /// Elements as given to NCCL.
    pub(crate) count: u64,
    pub(crate) nranks: u32,
    pub(crate) rank: u32,
    /// Group rank of the root, 0 where there is none.
    pub(crate) root: u32,
    pub(crate) is_root: bool,
}

/// Bytes of a payload that are read and written on this rank (0 = that side is not touched).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) send: u64,
    pub(crate) recv: u64,
}

impl Payload {
    /// How much memory the payload covers on this rank. Saturates: an absurd count is simply too large.
    pub(crate) fn extent(&self) -> Extent {
        let one = self.count.saturating_mul(self.dtype.size_bytes());
        let all = one.saturating_mul(u64::from(self.nranks));
        let root = |bytes| if self.is_root { bytes } else { 0 };
        let (send, recv) = match self.kind {
            CollectiveKind::AllReduce => (one, one),
            CollectiveKind::AllGather => (one, all),
            CollectiveKind::ReduceScatter => (all, one),
            CollectiveKind::Broadcast | CollectiveKind::Reduce => (root(one), root(one)),
            CollectiveKind::AllToAll => (all, all),
            CollectiveKind::Gather => (root(one), root(all)),
            CollectiveKind::Scatter => (root(all), root(one)),
        };
        Extent { send, recv }
    }

    /// Does this rank get anything from others?
    pub(crate) fn receives(&self) -> bool {
        match self.kind {
            CollectiveKind::Reduce | CollectiveKind::Gather => self.is_root,
            CollectiveKind::Broadcast | CollectiveKind::Scatter => !self.is_root,
            _ => true,
        }
    }

    /// Bytes that NCCL would write to this rank's receive buffer.
    pub(crate) fn received(&self) -> u64 {
        match self.kind {
            // From a root that is not this rank.
            CollectiveKind::Broadcast | CollectiveKind::Scatter => self.count.saturating_mul(self.dtype.size_bytes()),
            _ => self.extent().recv,
        }
    }

    /// Is it small enough to be mirrored?
    pub(crate) fn is_small(&self) -> bool {
        let Extent { send, recv } = self.extent();
        let is_integer = !matches!(
            self.dtype,
            DataType::Float16
                | DataType::Float32
                | DataType::Float64
                | DataType::Bfloat16
                | DataType::Float8e4m3
                | DataType::Float8e5m2
                | DataType::Tf32
        );
        send.max(recv) <= if is_integer { MAX_MIRRORED_INTEGER_BYTES } else { MAX_MIRRORED_BYTES }
    }

    /// Fills the receive buffer.
    ///
    /// # Safety
    /// `[send, send + extent().send)` is readable and `[recv, recv + extent().recv)` writable, and so is the multiplier
    /// of a user-defined operator if it lies in memory.
    pub(crate) unsafe fn mirror(&self) {
        let extent = self.extent();
        if extent.recv == 0 {
            return;
        }
        let one = (self.count * self.dtype.size_bytes()) as usize;
        let send = core::ptr::with_exposed_provenance::<u8>(self.send);
        let recv = core::ptr::with_exposed_provenance_mut::<u8>(self.recv);
        let slot = self.rank as usize * one;
        // SAFETY: every range lies in the extents that the caller vouches for; `copy` allows overlap (in-place calls).
        unsafe {
            match self.kind {
                CollectiveKind::AllReduce | CollectiveKind::Reduce => self.reduce(send, recv),
                CollectiveKind::ReduceScatter => self.reduce(send.add(slot), recv),
                CollectiveKind::Broadcast => recv.copy_from(send, one),
                // What a peer that sends the same has for this rank is what this rank has for itself.
                CollectiveKind::AllToAll => {
                    for peer in 0..self.nranks as usize {
                        recv.add(peer * one).copy_from(send.add(slot), one);
                    }
                }
                CollectiveKind::Scatter => recv.copy_from(send.add(slot), one),
                CollectiveKind::AllGather | CollectiveKind::Gather => {
                    // One's own slot first: in place it is the source of the others.
                    recv.add(slot).copy_from(send, one);
                    for peer in (0..self.nranks as usize).filter(|peer| *peer != self.rank as usize) {
                        recv.add(peer * one).copy_from(recv.add(slot), one);
                    }
                }
            }
        }
    }

    /// `recv = reduction over nranks equal contributions of send`, `count` elements.
    ///
    /// # Safety
    /// As for [`Self::mirror`].
    unsafe fn reduce(&self, send: *const u8, recv: *mut u8) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.dtype {
                DataType::Int8 => self.reduce_as::<i8>(send, recv),
                DataType::Uint8 => self.reduce_as::<u8>(send, recv),
                DataType::Int32 => self.reduce_as::<i32>(send, recv),
                DataType::Uint32 => self.reduce_as::<u32>(send, recv),
                DataType::Int64 => self.reduce_as::<i64>(send, recv),
                DataType::Uint64 => self.reduce_as::<u64>(send, recv),
                DataType::Float32 | DataType::Tf32 => self.reduce_as::<f32>(send, recv),
                DataType::Float64 => self.reduce_as::<f64>(send, recv),
                DataType::Float16 => self.reduce_as::<Word<Half>>(send, recv),
                DataType::Bfloat16 => self.reduce_as::<Word<Brain>>(send, recv),
                DataType::Float8e4m3 => self.reduce_as::<Byte<E4m3>>(send, recv),
                DataType::Float8e5m2 => self.reduce_as::<Byte<E5m2>>(send, recv),
            }
        }
    }

    /// # Safety
    /// As for [`Self::mirror`].
    unsafe fn reduce_as<T: Number>(&self, send: *const u8, recv: *mut u8) {
        let n = self.nranks;
        // SAFETY: passed on to the caller.
        unsafe {
            match self.op {
                ReduceOp::Sum => self.map::<T>(send, recv, |x| x.times(n)),
                ReduceOp::Prod => self.map::<T>(send, recv, |x| x.power(n)),
                ReduceOp::Max | ReduceOp::Min | ReduceOp::Avg => {
                    recv.copy_from(send, self.count as usize * size_of::<T>());
                }
                ReduceOp::PreMulSum => {
                    let factor: T = self.factor();
                    self.map::<T>(send, recv, |x| x.scaled(factor).times(n));
                }
            }
        }
    }

    /// The multiplier of a user-defined operator.
    ///
    /// # Safety
    /// A multiplier in memory is readable.
    unsafe fn factor<T: Number>(&self) -> T {
        match self.scale.expect("a user-defined operator carries its multiplier").scalar {
            // SAFETY: the value holds eight bytes, no number is larger.
            Scalar::Value(bits) => unsafe { (&raw const bits).cast::<T>().read_unaligned() },
            // SAFETY: passed on to the caller.
            Scalar::Device(address) => unsafe { core::ptr::with_exposed_provenance::<T>(address).read_unaligned() },
        }
    }

    /// # Safety
    /// As for [`Self::mirror`].
    unsafe fn map<T: Number>(&self, send: *const u8, recv: *mut u8, apply: impl Fn(T) -> T) {
        let (send, recv) = (send.cast::<T>(), recv.cast::<T>());
        for index in 0..self.count as usize {
            // SAFETY: within the ranges the caller vouches for; buffers need not be aligned.
            unsafe { recv.add(index).write_unaligned(apply(send.add(index).read_unaligned())) };
        }
    }
}

/// A number NCCL reduces. Every bit pattern is a value.
pub(crate) trait Number: Copy {
    /// The sum of `n` equal numbers.
    fn times(self, n: u32) -> Self;
    /// The product of `n` equal numbers.
    fn power(self, n: u32) -> Self;
    /// `factor * self`.
    fn scaled(self, factor: Self) -> Self;
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Number for $int {
            #[allow(clippy::cast_lossless, reason = "lossless for some of the types only")]
            fn times(self, n: u32) -> Self {
                self.wrapping_mul(n as Self)
            }
            fn power(self, n: u32) -> Self {
                self.wrapping_pow(n)
            }
            fn scaled(self, factor: Self) -> Self {
                self.wrapping_mul(factor)
            }
        }
    )*};
}
integers!(i8 u8 i32 u32 i64 u64);

impl Number for f32 {
    fn times(self, n: u32) -> Self {
        (f64::from(self) * f64::from(n)) as Self
    }
    fn power(self, n: u32) -> Self {
        f64::from(self).powi(n as i32) as Self
    }
    fn scaled(self, factor: Self) -> Self {
        self * factor
    }
}

impl Number for f64 {
    fn times(self, n: u32) -> Self {
        self * Self::from(n)
    }
    fn power(self, n: u32) -> Self {
        self.powi(n as i32)
    }
    fn scaled(self, factor: Self) -> Self {
        self * factor
    }
}

macro_rules! small_floats {
    ($($holder:ident)*) => {$(
        impl<const E: u32, const M: u32, const I: bool, const S: bool> Number for $holder<Small<E, M, I, S>> {
            fn times(self, n: u32) -> Self {
                Self::from_value(self.value().times(n))
            }
            fn power(self, n: u32) -> Self {
                Self::from_value(self.value().power(n))
            }
            fn scaled(self, factor: Self) -> Self {
                Self::from_value(self.value() * factor.value())
            }
        }
    )*};
}
small_floats!(Word Byte);
