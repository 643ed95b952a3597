//! The shared segment of a session: header, ring, reply slots.
//!
//! The engine creates it as sealed anonymous memory, so that neither side can make the other fault by cutting it. The
//! header says what the segment contains; a process that opens one accepts exactly the layout of its own version.

use crate::message::{PROTOCOL_VERSION, Record};
use crate::reply::{NUM_REPLY_SLOTS, ReplySlot};
use crate::ring::{RingWords, Slots};
use crate::sys::{self, Mapping};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// "PRISMSEG" in memory order.
const MAGIC: u64 = u64::from_le_bytes(*b"PRISMSEG");
/// Largest ring: 2^24 records are 1 GiB.
const MAX_RING_RECORDS: u32 = 1 << 24;

const RING_OFFSET: usize = 1024;
const REPLIES_OFFSET: usize = 4096;
const RECORDS_OFFSET: usize = 8192;
const _: () = assert!(size_of::<Header>() <= RING_OFFSET);
const _: () = assert!(RING_OFFSET + size_of::<RingWords>() <= REPLIES_OFFSET);
const _: () = assert!(REPLIES_OFFSET + NUM_REPLY_SLOTS * size_of::<ReplySlot>() <= RECORDS_OFFSET);

/// First bytes of the segment. Written once by the engine, except for the last three fields.
#[repr(C)]
pub(crate) struct Header {
    magic: AtomicU64,
    protocol: AtomicU32,
    record_bytes: AtomicU32,
    ring_records: AtomicU32,
    reply_slots: AtomicU32,
    ring_offset: AtomicU32,
    replies_offset: AtomicU32,
    records_offset: AtomicU32,
    engine_pid: AtomicU32,
    segment_bytes: AtomicU64,
    /// Written by the client when it opened the segment.
    client_pid: AtomicU32,
    /// Not 0: the engine ended the session.
    pub(crate) engine_closed: AtomicU32,
    /// Not 0: the training process ended the session.
    pub(crate) client_closed: AtomicU32,
}

/// Why a segment cannot be made or used.
#[derive(Debug)]
#[non_exhaustive]
pub enum SegmentError {
    /// The system refused.
    Io(io::Error),
    /// The capacity of the ring is not a power of two from 2 to 2^24.
    BadCapacity(u32),
    /// The memory could be cut under our feet.
    NotSealed,
    /// Something else than a segment.
    BadMagic,
    /// A segment of another protocol version.
    WrongProtocol(u32),
    /// A header field has not the value this version gives it.
    BadField {
        /// Name of the field.
        field: &'static str,
        /// What it holds.
        found: u64,
        /// What it should hold.
        expected: u64,
    },
}

impl std::fmt::Display for SegmentError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "shared segment: {error}"),
            Self::BadCapacity(records) => {
                write!(f, "a ring of {records} records: not a power of two from 2 to {MAX_RING_RECORDS}")
            }
            Self::NotSealed => f.write_str("shared segment is not sealed against shrinking"),
            Self::BadMagic => f.write_str("shared memory is not a session segment"),
            Self::WrongProtocol(version) => {
                write!(f, "shared segment has protocol version {version}, expected {PROTOCOL_VERSION}")
            }
            Self::BadField { field, found, expected } => {
                write!(f, "shared segment header: {field} is {found}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for SegmentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for SegmentError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A mapped segment.
#[derive(Debug)]
pub(crate) struct Segment {
    mapping: Mapping,
    ring_records: u32,
}

fn segment_bytes(ring_records: u32) -> Result<usize, SegmentError> {
    if !ring_records.is_power_of_two() || !(2..=MAX_RING_RECORDS).contains(&ring_records) {
        return Err(SegmentError::BadCapacity(ring_records));
    }
    Ok(RECORDS_OFFSET + ring_records as usize * size_of::<Record>())
}

impl Segment {
    /// Engine: makes a segment, and the descriptor to send to the client.
    pub(crate) fn create(ring_records: u32) -> Result<(Self, OwnedFd), SegmentError> {
        let bytes = segment_bytes(ring_records)?;
        let memory = sys::sealed_memory(bytes)?;
        // Populated: the pages are there before the program's first call, which otherwise pays for them.
        let segment = Self { mapping: Mapping::shared(&memory, bytes, true)?, ring_records };
        let header = segment.header();
        for (_, field, value) in header.fixed_u32(ring_records) {
            field.store(value, Ordering::Relaxed);
        }
        header.segment_bytes.store(bytes as u64, Ordering::Relaxed);
        header.engine_pid.store(std::process::id(), Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, memory))
    }

    /// Client: maps and checks the segment behind `memory`, which must have a ring of `ring_records`.
    pub(crate) fn open(memory: &OwnedFd, ring_records: u32) -> Result<Self, SegmentError> {
        let expected = segment_bytes(ring_records)?;
        let found = sys::sealed_size(memory)?.ok_or(SegmentError::NotSealed)?;
        if found != expected {
            let (found, expected) = (found as u64, expected as u64);
            return Err(SegmentError::BadField { field: "size of the memory", found, expected });
        }
        let segment = Self { mapping: Mapping::shared(memory, expected, false)?, ring_records };
        segment.header().check(ring_records, expected)?;
        segment.header().client_pid.store(std::process::id(), Ordering::Relaxed);
        Ok(segment)
    }

    /// The header.
    #[inline]
    pub(crate) fn header(&self) -> &Header {
        self.at(0)
    }

    /// The words of the ring.
    #[inline]
    pub(crate) fn ring(&self) -> &RingWords {
        self.at(RING_OFFSET)
    }

    /// The reply slots.
    #[inline]
    pub(crate) fn replies(&self) -> &[ReplySlot; NUM_REPLY_SLOTS] {
        self.at(REPLIES_OFFSET)
    }

    /// The slots of the ring.
    #[inline]
    pub(crate) fn slots(&self) -> RecordSlots<'_> {
        // SAFETY: `segment_bytes` gives the mapping room for `ring_records` records from RECORDS_OFFSET (a multiple of
        // their alignment) on; they are only seen as atomics, for which every bit pattern is valid.
        let words = unsafe {
            let first = self.mapping.base().add(RECORDS_OFFSET).cast::<RecordWords>();
            std::slice::from_raw_parts(first.as_ptr(), self.ring_records as usize)
        };
        RecordSlots { words }
    }

    /// The `T` at `offset`, one of the constants above.
    #[inline]
    fn at<T: SharedPart>(&self, offset: usize) -> &T {
        debug_assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.mapping.bytes());
        // SAFETY: the assertions at the top of the file and the mapping's size (never less than RECORDS_OFFSET) keep the
        // part inside the mapping and apart from the others; a `SharedPart` is valid for all bit patterns and consists of
        // atomics, so that writes of the other process are no data races.
        unsafe { self.mapping.base().add(offset).cast::<T>().as_ref() }
    }
}

/// Types that consist of atomics and are valid for every bit pattern.
trait SharedPart {}
impl SharedPart for Header {}
impl SharedPart for RingWords {}
impl SharedPart for [ReplySlot; NUM_REPLY_SLOTS] {}

impl Header {
    /// The 32-bit fields whose value the version and the capacity determine, with those values.
    fn fixed_u32(&self, ring_records: u32) -> [(&'static str, &AtomicU32, u32); 7] {
        [
            ("protocol", &self.protocol, PROTOCOL_VERSION),
            ("record_bytes", &self.record_bytes, size_of::<Record>() as u32),
            ("ring_records", &self.ring_records, ring_records),
            ("reply_slots", &self.reply_slots, NUM_REPLY_SLOTS as u32),
            ("ring_offset", &self.ring_offset, RING_OFFSET as u32),
            ("replies_offset", &self.replies_offset, REPLIES_OFFSET as u32),
            ("records_offset", &self.records_offset, RECORDS_OFFSET as u32),
        ]
    }

    fn check(&self, ring_records: u32, bytes: usize) -> Result<(), SegmentError> {
        if self.magic.load(Ordering::Acquire) != MAGIC {
            return Err(SegmentError::BadMagic);
        }
        let protocol = self.protocol.load(Ordering::Relaxed);
        if protocol != PROTOCOL_VERSION {
            return Err(SegmentError::WrongProtocol(protocol));
        }
        for (field, value, expected) in self.fixed_u32(ring_records) {
            let (found, expected) = (u64::from(value.load(Ordering::Relaxed)), u64::from(expected));
            if found != expected {
                return Err(SegmentError::BadField { field, found, expected });
            }
        }
        let (found, expected) = (self.segment_bytes.load(Ordering::Relaxed), bytes as u64);
        if found != expected {
            return Err(SegmentError::BadField { field: "segment_bytes", found, expected });
        }
        Ok(())
    }
}

/// A record in the ring, as words: a hostile peer may write it while we read it, which must not be a data race.
type RecordWords = [AtomicU64; 8];
const _: () = assert!(size_of::<RecordWords>() == size_of::<Record>());
const _: () = assert!(offset_of!(Record, h) == 60, "no padding before the last field");

/// The storage of the ring in a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordSlots<'a> {
    words: &'a [RecordWords],
}

impl Slots for RecordSlots<'_> {
    type Item = Record;

    #[inline]
    fn capacity(&self) -> u64 {
        self.words.len() as u64
    }

    #[inline]
    fn write(&self, index: usize, record: &Record) {
        // SAFETY: both are 64 bytes without padding, and any bytes are valid integers.
        let words: [u64; 8] = unsafe { std::mem::transmute(*record) };
        for (slot, word) in self.words[index].iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    #[inline]
    fn read(&self, index: usize) -> Record {
        let mut words = [0u64; 8];
        for (word, slot) in words.iter_mut().zip(&self.words[index]) {
            *word = slot.load(Ordering::Relaxed);
        }
        // SAFETY: as in `write`; all fields of a record are integers.
        unsafe { std::mem::transmute(words) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    fn record(n: u64) -> Record {
        Record {
            kind: n as u16,
            flags: !n as u16,
            stream: n as u32,
            host_ns: -(n as i64),
            a: n,
            b: n << 7,
            c: !n,
            d: n * 3,
            e: 1,
            f: 2,
            g: 3,
            h: n as u32,
        }
    }

    #[test]
    fn both_mappings_see_the_same_records() {
        let (engine, memory) = Segment::create(8).unwrap();
        let client = Segment::open(&memory, 8).unwrap();
        for index in 0..8 {
            client.slots().write(index, &record(index as u64 * 0x1234_5678_9abc));
        }
        for index in 0..8 {
            assert_eq!(engine.slots().read(index), record(index as u64 * 0x1234_5678_9abc));
        }
        assert_eq!(engine.header().client_pid.load(Ordering::Relaxed), std::process::id());
        assert_eq!(client.header().engine_pid.load(Ordering::Relaxed), std::process::id());
    }

    #[test]
    fn odd_capacities_are_refused() {
        for records in [0, 1, 3, 1000, MAX_RING_RECORDS * 2, u32::MAX] {
            assert!(matches!(Segment::create(records), Err(SegmentError::BadCapacity(found)) if found == records));
        }
    }

    #[test]
    fn nobody_can_cut_a_segment() {
        let (_engine, memory) = Segment::create(8).unwrap();
        let file = File::from(memory);
        assert!(file.set_len(0).is_err());
        assert!(file.set_len(1 << 20).is_err());
    }

    #[test]
    fn unsealed_or_foreign_memory_is_refused() {
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(segment_bytes(8).unwrap() as u64).unwrap();
        assert!(matches!(Segment::open(&plain.into(), 8), Err(SegmentError::NotSealed)));
        let zeros = sys::sealed_memory(segment_bytes(8).unwrap()).unwrap();
        assert!(matches!(Segment::open(&zeros, 8), Err(SegmentError::BadMagic)));
        let short = sys::sealed_memory(100).unwrap();
        assert!(matches!(Segment::open(&short, 8), Err(SegmentError::BadField { .. })));
    }

    #[test]
    fn every_changed_header_field_is_noticed() {
        // All fields before `client_pid`, except the engine's process id, which can be any number.
        let free = offset_of!(Header, engine_pid)..offset_of!(Header, engine_pid) + 4;
        for byte in (0..offset_of!(Header, client_pid)).filter(|byte| !free.contains(byte)) {
            let (_engine, memory) = Segment::create(8).unwrap();
            let file = File::from(memory);
            let mut old = [0];
            file.read_exact_at(&mut old, byte as u64).unwrap();
            file.write_all_at(&[old[0] ^ 0x41], byte as u64).unwrap();
            assert!(Segment::open(&file.into(), 8).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let (engine, memory) = Segment::create(8).unwrap();
        engine.header().protocol.store(77, Ordering::Relaxed);
        assert!(matches!(Segment::open(&memory, 8), Err(SegmentError::WrongProtocol(77))));
    }
}
