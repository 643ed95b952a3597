//! Struct-of-arrays columns that live in memory or in a mapped file, and the row form of an op.

use crate::graph::op::{CollectiveKind, ComputeClass, DataType, OpKind, Provenance, ReduceOp};
use crate::ids::{EventId, NameId, SlotId, StreamId};
use crate::units::SimTime;
use memmap2::Mmap;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// Integers a column may hold: no padding, every bit pattern valid.
pub(crate) trait Plain: Copy + Eq + sealed::Sealed + 'static {
    /// Appends the value in little-endian order.
    fn put(self, out: &mut Vec<u8>);
}

mod sealed {
    pub(crate) trait Sealed {}
}

macro_rules! plain {
    ($($int:ty)*) => {$(
        impl sealed::Sealed for $int {}
        impl Plain for $int {
            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
plain!(u8 u16 u32 u64);

/// An immutable array of integers, owned or inside a mapped file (no copy, shared with other processes by the kernel).
pub(crate) struct Column<T: Plain>(Storage<T>);

enum Storage<T> {
    Owned(Vec<T>),
    Mapped { map: Arc<Mmap>, offset: usize, len: usize, element: PhantomData<T> },
}

impl<T: Plain> Column<T> {
    /// `len` elements at byte `offset` of `map`, or `None` if they do not lie inside it or are not aligned.
    pub(crate) fn mapped(map: &Arc<Mmap>, offset: usize, len: usize) -> Option<Self> {
        let end = len.checked_mul(size_of::<T>())?.checked_add(offset)?;
        let inside = end <= map.len();
        let aligned = map.as_ptr().addr().wrapping_add(offset).is_multiple_of(align_of::<T>());
        let storage = Storage::Mapped { map: Arc::clone(map), offset, len, element: PhantomData };
        (inside && aligned).then_some(Self(storage))
    }

    /// Little-endian bytes of the column.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.memory_bytes());
        self.iter().for_each(|value| value.put(&mut out));
        out
    }

    /// Size in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<T>() * self.len()
    }
}

impl<T: Plain> From<Vec<T>> for Column<T> {
    fn from(values: Vec<T>) -> Self {
        Self(Storage::Owned(values))
    }
}

impl<T: Plain> Deref for Column<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.0 {
            Storage::Owned(values) => values,
            // SAFETY: `mapped` checked that the range is inside the map and aligned; every bit pattern is a `T`; the map
            // is read-only, outlives the borrow through the `Arc`, and graph files are replaced by renaming, never
            // written in place (see `store`).
            Storage::Mapped { map, offset, len, .. } => unsafe {
                std::slice::from_raw_parts(map.as_ptr().add(*offset).cast::<T>(), *len)
            },
        }
    }
}

impl<T: Plain> PartialEq for Column<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// Indices into another table, in the narrowest width that holds the largest; no bytes when all are zero and few.
pub(crate) enum Indices {
    Zero(usize),
    U8(Column<u8>),
    U16(Column<u16>),
    U32(Column<u32>),
}

impl Indices {
    /// Above this length zeros are stored, so that no small file stands for a huge program.
    pub(crate) const MAX_ZERO: usize = 1 << 20;

    pub(crate) fn from_u32s(values: Vec<u32>) -> Self {
        match values.iter().copied().max().unwrap_or(0) {
            0 if values.len() <= Self::MAX_ZERO => Self::Zero(values.len()),
            0..=0xff => Self::U8(values.iter().map(|v| *v as u8).collect::<Vec<_>>().into()),
            0x100..=0xffff => Self::U16(values.iter().map(|v| *v as u16).collect::<Vec<_>>().into()),
            _ => Self::U32(values.into()),
        }
    }

    /// Marks where the elements from `first` on differ from those from `second` on.
    pub(crate) fn mark_differences(&self, first: usize, second: usize, marks: &mut [bool]) {
        fn mark<T: PartialEq>(all: &[T], first: usize, second: usize, marks: &mut [bool]) {
            let pairs = all[first..first + marks.len()].iter().zip(&all[second..second + marks.len()]);
            marks.iter_mut().zip(pairs).for_each(|(mark, (a, b))| *mark |= a != b);
        }
        match self {
            Self::Zero(_) => {}
            Self::U8(all) => mark(all, first, second, marks),
            Self::U16(all) => mark(all, first, second, marks),
            Self::U32(all) => mark(all, first, second, marks),
        }
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> u32 {
        match self {
            Self::Zero(len) => {
                assert!(index < *len, "index {index} of {len}");
                0
            }
            Self::U8(column) => u32::from(column[index]),
            Self::U16(column) => u32::from(column[index]),
            Self::U32(column) => column[index],
        }
    }

    /// Largest index; one pass, no allocation.
    pub(crate) fn max(&self) -> u32 {
        match self {
            Self::Zero(_) => 0,
            Self::U8(column) => column.iter().copied().max().unwrap_or(0).into(),
            Self::U16(column) => column.iter().copied().max().unwrap_or(0).into(),
            Self::U32(column) => column.iter().copied().max().unwrap_or(0),
        }
    }

    /// Bytes per index.
    pub(crate) fn width(&self) -> u32 {
        match self {
            Self::Zero(_) => 0,
            Self::U8(_) => 1,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
        }
    }

    /// Size in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        match self {
            Self::Zero(_) => 0,
            Self::U8(column) => column.memory_bytes(),
            Self::U16(column) => column.memory_bytes(),
            Self::U32(column) => column.memory_bytes(),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Zero(_) => Vec::new(),
            Self::U8(column) => column.to_bytes(),
            Self::U16(column) => column.to_bytes(),
            Self::U32(column) => column.to_bytes(),
        }
    }
}

/// An op without its host gap and group, as one row of integers: the stored form, and what equality of ops means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct OpRow {
    pub(crate) tag: u8,
    /// Collective kind, compute class, or 1 for a send.
    pub(crate) a: u8,
    /// Data type or provenance.
    pub(crate) b: u8,
    /// Reduction.
    pub(crate) c: u8,
    pub(crate) stream: u32,
    pub(crate) slot: u32,
    /// Name, root, peer or event.
    pub(crate) arg: u32,
    /// Picoseconds, elements or bytes. In the table of distinct ops 0 for computation: durations are columns of the
    /// programs.
    pub(crate) value: u64,
}

/// Row tags; part of the stored format.
pub(crate) mod tag {
    pub(crate) const COMPUTE: u8 = 1;
    pub(crate) const COLLECTIVE: u8 = 2;
    pub(crate) const POINT_TO_POINT: u8 = 3;
    pub(crate) const EVENT_RECORD: u8 = 4;
    pub(crate) const EVENT_WAIT: u8 = 5;
    pub(crate) const STREAM_SYNC: u8 = 6;
    pub(crate) const EVENT_SYNC: u8 = 7;
    pub(crate) const DEVICE_SYNC: u8 = 8;
    pub(crate) const ALLOC: u8 = 9;
    pub(crate) const FREE: u8 = 10;
    pub(crate) const TRAINING_BEGIN: u8 = 11;
    pub(crate) const ITERATION_END: u8 = 12;
}

impl OpRow {
    /// Splits an op into its row and its group.
    pub(crate) fn pack(stream: StreamId, kind: OpKind) -> (Self, u32) {
        let row = |tag| Self { tag, stream: stream.0, ..Self::default() };
        match kind {
            OpKind::Compute { duration, name, class, provenance } => {
                let (a, b, value) = (class as u8, provenance as u8, duration.as_ps() as u64);
                (Self { a, b, arg: name.0, value, ..row(tag::COMPUTE) }, 0)
            }
            OpKind::Collective { slot, kind, dtype, reduce, root, count, group } => {
                let (a, b, c) = (kind as u8, dtype as u8, reduce as u8);
                (Self { a, b, c, slot: slot.0, arg: root, value: count, ..row(tag::COLLECTIVE) }, group)
            }
            OpKind::PointToPoint { slot, is_send, dtype, peer, count, group } => {
                let (a, b) = (u8::from(is_send), dtype as u8);
                (Self { a, b, slot: slot.0, arg: peer, value: count, ..row(tag::POINT_TO_POINT) }, group)
            }
            OpKind::EventRecord { event } => (Self { arg: event.0, ..row(tag::EVENT_RECORD) }, 0),
            OpKind::EventWait { event } => (Self { arg: event.0, ..row(tag::EVENT_WAIT) }, 0),
            OpKind::StreamSync => (row(tag::STREAM_SYNC), 0),
            OpKind::EventSync { event } => (Self { arg: event.0, ..row(tag::EVENT_SYNC) }, 0),
            OpKind::DeviceSync => (row(tag::DEVICE_SYNC), 0),
            OpKind::Alloc { bytes } => (Self { value: bytes, ..row(tag::ALLOC) }, 0),
            OpKind::Free { bytes } => (Self { value: bytes, ..row(tag::FREE) }, 0),
            OpKind::TrainingBegin => (row(tag::TRAINING_BEGIN), 0),
            OpKind::IterationEnd => (row(tag::ITERATION_END), 0),
        }
    }

    /// The op the row stands for, or what makes it none.
    pub(crate) fn unpack(self, group: u32) -> Result<OpKind, &'static str> {
        let dtype = || DataType::from_u8(self.b).ok_or("unknown data type");
        let event = EventId(self.arg);
        let kind = match self.tag {
            tag::COMPUTE => OpKind::Compute {
                duration: SimTime::from_ps(self.value as i64),
                name: NameId(self.arg),
                class: compute_class(self.a).ok_or("unknown compute class")?,
                provenance: provenance(self.b).ok_or("unknown provenance")?,
            },
            tag::COLLECTIVE => OpKind::Collective {
                slot: SlotId(self.slot),
                kind: CollectiveKind::from_u8(self.a).ok_or("unknown collective")?,
                dtype: dtype()?,
                reduce: reduction(self.c).ok_or("unknown reduction")?,
                root: self.arg,
                count: self.value,
                group,
            },
            tag::POINT_TO_POINT => OpKind::PointToPoint {
                slot: SlotId(self.slot),
                is_send: match self.a {
                    0 => false,
                    1 => true,
                    _ => return Err("a message is neither sent nor received"),
                },
                dtype: dtype()?,
                peer: self.arg,
                count: self.value,
                group,
            },
            tag::EVENT_RECORD => OpKind::EventRecord { event },
            tag::EVENT_WAIT => OpKind::EventWait { event },
            tag::STREAM_SYNC => OpKind::StreamSync,
            tag::EVENT_SYNC => OpKind::EventSync { event },
            tag::DEVICE_SYNC => OpKind::DeviceSync,
            tag::ALLOC => OpKind::Alloc { bytes: self.value },
            tag::FREE => OpKind::Free { bytes: self.value },
            tag::TRAINING_BEGIN => OpKind::TrainingBegin,
            tag::ITERATION_END => OpKind::IterationEnd,
            _ => return Err("unknown op"),
        };
        Ok(kind)
    }

    /// Does the op use a communicator?
    pub(crate) fn is_comm(self) -> bool {
        matches!(self.tag, tag::COLLECTIVE | tag::POINT_TO_POINT)
    }

    /// Does the op name an event?
    pub(crate) fn is_event(self) -> bool {
        matches!(self.tag, tag::EVENT_RECORD | tag::EVENT_WAIT | tag::EVENT_SYNC)
    }
}

/// The provenance with this number.
pub(crate) fn provenance(value: u8) -> Option<Provenance> {
    use Provenance as P;
    [P::Measured, P::Imported, P::Modelled, P::Default].into_iter().find(|p| *p as u8 == value)
}

/// The compute class with this number.
pub(crate) fn compute_class(value: u8) -> Option<ComputeClass> {
    ComputeClass::ALL.get(usize::from(value)).copied()
}

/// The reduction with this number; unlike NCCL's own numbering nothing above the last is accepted.
pub(crate) fn reduction(value: u8) -> Option<ReduceOp> {
    (value <= ReduceOp::PreMulSum as u8).then(|| ReduceOp::from_u8(value))
}
