//! The allocator of one card's address range: which offsets are taken, and how much of the card that uses.
//!
//! Like the driver it hands out memory in granules of 2 MiB; small requests share a granule.

use std::collections::BTreeMap;

/// The driver's granularity.
pub(crate) const GRANULE: u64 = 2 << 20;
/// Requests below this share granules.
const SMALL: u64 = 1 << 20;
/// Granularity inside a shared granule.
const SMALL_UNIT: u64 = 512;

/// A live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Where it starts.
    pub(crate) offset: u64,
    /// What was asked for.
    pub(crate) bytes: u64,
    /// What it takes of the range.
    pub(crate) reserved: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Heap {
    /// Free extents of the range: offset to length.
    free: BTreeMap<u64, u64>,
    live: BTreeMap<u64, Block>,
    /// Shared granules: offset to their free extents.
    shared: BTreeMap<u64, BTreeMap<u64, u64>>,
}

fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(unit)
}

/// Takes `bytes` from the lowest extent that has them.
fn take(free: &mut BTreeMap<u64, u64>, bytes: u64) -> Option<u64> {
    let (&offset, &length) = free.iter().find(|(_, length)| **length >= bytes)?;
    free.remove(&offset);
    if length > bytes {
        free.insert(offset + bytes, length - bytes);
    }
    Some(offset)
}

/// Gives an extent back, joining its neighbours.
fn give(free: &mut BTreeMap<u64, u64>, mut offset: u64, mut length: u64) {
    if let Some((&before, &before_length)) = free.range(..offset).next_back()
        && before + before_length == offset
    {
        free.remove(&before);
        offset = before;
        length += before_length;
    }
    if let Some(after_length) = free.remove(&(offset + length)) {
        length += after_length;
    }
    free.insert(offset, length);
}

impl Heap {
    /// An empty heap over `length` bytes.
    pub(crate) fn new(length: u64) -> Self {
        Self { free: BTreeMap::from([(0, length)]), live: BTreeMap::new(), shared: BTreeMap::new() }
    }

    /// By how much the use of the card would grow if `bytes` were allocated now; `None` if no card is that large.
    pub(crate) fn growth(&self, bytes: u64) -> Option<u64> {
        if bytes >= SMALL {
            return round_up(bytes, GRANULE);
        }
        let unit = round_up(bytes, SMALL_UNIT)?;
        let fits = self.shared.values().any(|free| free.values().any(|length| *length >= unit));
        Some(if fits { 0 } else { GRANULE })
    }

    /// Allocates; `None` when the address range is exhausted.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<Block> {
        let (offset, reserved) = if bytes >= SMALL {
            let reserved = round_up(bytes, GRANULE)?;
            (take(&mut self.free, reserved)?, reserved)
        } else {
            let reserved = round_up(bytes, SMALL_UNIT)?;
            (self.allocate_small(reserved)?, reserved)
        };
        let block = Block { offset, bytes, reserved };
        self.live.insert(offset, block);
        Some(block)
    }

    fn allocate_small(&mut self, bytes: u64) -> Option<u64> {
        if let Some(offset) = self.shared.values_mut().find_map(|free| take(free, bytes)) {
            return Some(offset);
        }
        let granule = take(&mut self.free, GRANULE)?;
        let mut free = BTreeMap::from([(granule, GRANULE)]);
        let offset = take(&mut free, bytes);
        self.shared.insert(granule, free);
        offset
    }

    /// Frees the block that starts at `offset`. Returns it and the range that is free of the card again, if any.
    pub(crate) fn free(&mut self, offset: u64) -> Option<(Block, Option<(u64, u64)>)> {
        let block = self.live.remove(&offset)?;
        if block.bytes >= SMALL {
            give(&mut self.free, offset, block.reserved);
            return Some((block, Some((offset, block.reserved))));
        }
        let granule = offset / GRANULE * GRANULE;
        let free = self.shared.get_mut(&granule).expect("a small block lies in a shared granule");
        give(free, offset, block.reserved);
        if free.get(&granule) != Some(&GRANULE) {
            return Some((block, None));
        }
        self.shared.remove(&granule);
        give(&mut self.free, granule, GRANULE);
        Some((block, Some((granule, GRANULE))))
    }

    /// The live block that contains `offset`.
    pub(crate) fn find(&self, offset: u64) -> Option<Block> {
        let (_, block) = self.live.range(..=offset).next_back()?;
        (offset < block.offset + block.bytes.max(1)).then_some(*block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn large_blocks_take_whole_granules() {
        let mut heap = Heap::new(100 * MIB);
        assert_eq!(heap.growth(3 * MIB), Some(4 * MIB));
        let block = heap.allocate(3 * MIB).expect("fits");
        assert_eq!(block, Block { offset: 0, bytes: 3 * MIB, reserved: 4 * MIB });
        assert_eq!(heap.find(3 * MIB - 1), Some(block));
        assert_eq!(heap.find(3 * MIB), None);
        assert_eq!(heap.free(0), Some((block, Some((0, 4 * MIB)))));
        assert_eq!(heap.free(0), None);
    }

    #[test]
    fn small_blocks_share_a_granule() {
        let mut heap = Heap::new(10 * MIB);
        assert_eq!(heap.growth(100), Some(GRANULE));
        let first = heap.allocate(100).expect("fits");
        assert_eq!(heap.growth(100), Some(0));
        let second = heap.allocate(1_000).expect("fits");
        assert_eq!((first.offset, second.offset, second.reserved), (0, 512, 1_024));
        assert_eq!(heap.free(first.offset), Some((first, None)));
        assert_eq!(heap.free(second.offset), Some((second, Some((0, GRANULE)))));
        assert_eq!(heap.free, BTreeMap::from([(0, 10 * MIB)]));
    }

    #[test]
    fn freed_neighbours_join() {
        let mut heap = Heap::new(8 * MIB);
        let blocks: Vec<_> = (0..4).map(|_| heap.allocate(2 * MIB).expect("fits")).collect();
        assert_eq!(heap.allocate(2 * MIB), None);
        for index in [0, 2, 1, 3] {
            heap.free(blocks[index].offset).expect("live");
        }
        assert_eq!(heap.allocate(8 * MIB).map(|block| block.offset), Some(0));
    }
}
