//! Blocks of device memory, found by any address inside them without a lock.
//!
//! A block is what the program's allocator hands out (or `cudaMalloc`, where the program has none). Both hand out
//! multiples of 512 bytes, so that one bit for every 512 bytes of device addresses tells where a block starts. The bits
//! have a hierarchy over them (one bit for 64 of the level below), so that the last start before an address is found in
//! a few steps however large a block is. The tables are sparse: pages that are never touched cost nothing.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every block starts at a multiple of this.
const GRANULE: usize = 512;
/// Levels of the hierarchy of bits.
const LEVELS: usize = 6;

/// Bits of a block's word: its size in granules.
const SIZE_BITS: u32 = 31;
/// Some bytes of the block are known (or were, and the block was written since).
const HAS_KNOWN: u64 = 1 << SIZE_BITS;
const WRITER_SHIFT: u32 = 32;

/// A block that contains an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// First address.
    pub(super) start: usize,
    /// Address after the last byte.
    pub(super) end: usize,
    /// Number of who wrote to it last.
    pub(super) writer: u32,
    /// May bytes of it be known?
    pub(super) has_known: bool,
}

/// A table of zeros that only costs what is touched.
struct Sparse {
    words: *const AtomicU64,
    length: usize,
}

// SAFETY: the words are atomic and never unmapped.
unsafe impl Send for Sparse {}
// SAFETY: as above.
unsafe impl Sync for Sparse {}

impl Sparse {
    fn new(length: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh private mapping anywhere.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), length * 8, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
            // SAFETY: the range was mapped above; the advice only concerns cost.
            unsafe { libc::madvise(mapped.cast::<c_void>(), length * 8, advice) };
        }
        Some(Self { words: mapped.cast_const().cast(), length })
    }

    #[inline]
    fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.length, "index of a granule of device memory");
        // SAFETY: inside the mapping, which is zeroed (a valid atomic) and never unmapped.
        unsafe { &*self.words.add(index) }
    }
}

/// The blocks of a range of addresses.
pub(super) struct Blocks {
    base: usize,
    end: usize,
    starts: [Sparse; LEVELS],
    words: Sparse,
}

impl Blocks {
    /// An empty table over `[base, end)`; `None` if there are not enough addresses left for it.
    fn new(base: usize, end: usize) -> Option<Self> {
        let granules = (end - base) / GRANULE;
        let mut length = granules;
        let mut level = || {
            length = length.div_ceil(64);
            Sparse::new(length)
        };
        let starts = [level()?, level()?, level()?, level()?, level()?, level()?];
        Some(Self { base, end, starts, words: Sparse::new(granules)? })
    }

    /// A block starts at `address`. One that started there before is forgotten.
    pub(super) fn insert(&self, address: usize, bytes: usize) {
        if !self.contains(address) || bytes == 0 {
            return;
        }
        let mut index = (address - self.base) / GRANULE;
        let size = (bytes.div_ceil(GRANULE) as u64).min((1 << SIZE_BITS) - 1);
        self.words.at(index).store(size, Ordering::Relaxed);
        for level in &self.starts {
            let before = level.at(index / 64).fetch_or(1 << (index % 64), Ordering::Relaxed);
            if before != 0 {
                return;
            }
            index /= 64;
        }
    }

    /// No block starts at `address` any more.
    pub(super) fn remove(&self, address: usize) {
        if !self.contains(address) {
            return;
        }
        let mut index = (address - self.base) / GRANULE;
        self.words.at(index).store(0, Ordering::Relaxed);
        for level in &self.starts {
            let bit = 1 << (index % 64);
            let before = level.at(index / 64).fetch_and(!bit, Ordering::Relaxed);
            if before != bit {
                return;
            }
            index /= 64;
        }
    }

    /// Does the table cover the address?
    #[inline]
    pub(super) fn contains(&self, address: usize) -> bool {
        (self.base..self.end).contains(&address)
    }

    /// The block that contains an address.
    #[inline]
    pub(super) fn find(&self, address: usize) -> Option<Block> {
        if !self.contains(address) {
            return None;
        }
        let start = self.start((address - self.base) / GRANULE)?;
        let word = self.words.at(start).load(Ordering::Relaxed);
        let begin = self.base + start * GRANULE;
        let end = begin + (word & (HAS_KNOWN - 1)) as usize * GRANULE;
        (address < end).then_some(Block {
            start: begin,
            end,
            writer: (word >> WRITER_SHIFT) as u32,
            has_known: word & HAS_KNOWN != 0,
        })
    }

    /// The last start at or before a granule.
    #[inline]
    fn start(&self, granule: usize) -> Option<usize> {
        let mut index = granule;
        let mut reach = u64::MAX >> (63 - index % 64);
        for (height, level) in self.starts.iter().enumerate() {
            let bits = level.at(index / 64).load(Ordering::Relaxed) & reach;
            if bits != 0 {
                let mut found = index / 64 * 64 + bits.ilog2() as usize;
                for below in self.starts[..height].iter().rev() {
                    // Zero only while another thread removes this very start.
                    let bits = below.at(found).load(Ordering::Relaxed);
                    found = found * 64 + bits.checked_ilog2()? as usize;
                }
                return Some(found);
            }
            index /= 64;
            // On the levels above, the granule's own bit has just been looked into.
            reach = (1 << (index % 64)) - 1;
        }
        None
    }

    /// Somebody wrote to the block.
    #[inline]
    pub(super) fn set_writer(&self, block: &Block, writer: u32) {
        self.set(block, writer, block.has_known);
    }

    /// Sets who wrote to the block last, and whether bytes of it may be known.
    #[inline]
    pub(super) fn set(&self, block: &Block, writer: u32, has_known: bool) {
        let size = ((block.end - block.start) / GRANULE) as u64;
        let flag = if has_known { HAS_KNOWN } else { 0 };
        let word = size | flag | u64::from(writer) << WRITER_SHIFT;
        self.words.at((block.start - self.base) / GRANULE).store(word, Ordering::Relaxed);
    }
}

static BLOCKS: OnceLock<Option<Blocks>> = OnceLock::new();

/// The blocks of all cards, made on first use; `None` if the process may not have so many addresses.
pub(super) fn all() -> Option<&'static Blocks> {
    BLOCKS
        .get_or_init(|| {
            let range = crate::memory::ADDRESSES;
            let blocks = Blocks::new(range.start, range.end);
            if blocks.is_none() {
                crate::real::log("prism: no addresses left for the table of written memory: values are not graded\n");
            }
            blocks
        })
        .as_ref()
}

/// As [`all`], but never makes the table.
#[inline]
pub(super) fn existing() -> Option<&'static Blocks> {
    BLOCKS.get()?.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const BASE: usize = 1 << 40;

    #[test]
    fn blocks_are_found_by_any_address_inside() {
        let blocks = Blocks::new(BASE, BASE + (1 << 42)).expect("addresses");
        assert_eq!(blocks.find(BASE), None);
        blocks.insert(BASE + 1024, 10 << 30);
        let found = blocks.find(BASE + 1024 + (9 << 30)).expect("inside");
        assert_eq!((found.start, found.end), (BASE + 1024, BASE + 1024 + (10 << 30)));
        assert_eq!(blocks.find(BASE + 1023), None);
        assert_eq!(blocks.find(BASE + 1024 + (10 << 30)), None);
        blocks.set(&found, 7, true);
        let found = blocks.find(BASE + 1024).expect("there");
        assert_eq!((found.writer, found.has_known), (7, true));
        blocks.remove(BASE + 1024);
        assert_eq!(blocks.find(BASE + 2048), None);
    }

    proptest! {
        #[test]
        fn agrees_with_an_ordered_map(steps in prop::collection::vec((0_usize..3, 0_usize..1 << 22, 1_usize..4), 1..200)) {
            let blocks = Blocks::new(BASE, BASE + (1 << 40)).expect("addresses");
            let mut model: BTreeMap<usize, usize> = BTreeMap::new();
            for (step, granule, size) in steps {
                let address = BASE + granule * GRANULE;
                match step {
                    0 => {
                        blocks.insert(address, size * GRANULE);
                        model.insert(address, size * GRANULE);
                    }
                    1 => {
                        if let Some((start, _)) = model.range(..=address).next_back().map(|(a, b)| (*a, *b)) {
                            blocks.remove(start);
                            model.remove(&start);
                        }
                    }
                    _ => {}
                }
                let inside = model.range(..=address).next_back().filter(|(start, bytes)| address < **start + **bytes);
                prop_assert_eq!(blocks.find(address).map(|block| block.start), inside.map(|(start, _)| *start));
            }
        }
    }
}
