//! The ring of records: one producer, one consumer, any memory that both can see.
//!
//! Positions count records since the start and never wrap (2^64 records); the slot of position `p` is `p mod capacity`.
//! `tail` belongs to the producer, `head` to the consumer; each side keeps its own position privately and a possibly old
//! copy of the other's, so that the other side's cache line is only read when the ring looks full or empty. The consumer
//! publishes `head` in steps of an eighth of the ring, and whenever it finds the ring empty.
//!
//! A side believes nothing it reads: a position that cannot be true is [`Corrupt`].

use crate::sync::{AtomicU64, Ordering};
use crate::wait::{Gate, Park};

/// A value on cache lines of its own (two, because CPUs fetch lines in pairs).
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct CacheLine<T>(pub(crate) T);

/// The words of a ring that both sides see. Zeroed memory is an empty ring.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RingWords {
    tail: CacheLine<AtomicU64>,
    head: CacheLine<AtomicU64>,
    /// Where the consumer sleeps while the ring is empty.
    pub(crate) filled: CacheLine<Gate>,
    /// Where producers sleep while the ring is full.
    pub(crate) drained: CacheLine<Gate>,
}

impl RingWords {
    #[cfg(any(test, prism_loom))]
    pub(crate) fn new() -> Self {
        Self {
            tail: CacheLine(AtomicU64::new(0)),
            head: CacheLine(AtomicU64::new(0)),
            filled: CacheLine(Gate::new()),
            drained: CacheLine(Gate::new()),
        }
    }
}

/// The storage of a ring. The ring calls `write` and `read` of one index never at the same time, if both sides are honest.
pub(crate) trait Slots {
    /// What a slot holds.
    type Item;
    /// Number of slots, a power of two.
    fn capacity(&self) -> u64;
    /// Stores `item` at `index < capacity`.
    fn write(&self, index: usize, item: &Self::Item);
    /// Loads the item at `index < capacity`.
    fn read(&self, index: usize) -> Self::Item;
}

/// The other side published a position that cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// Why a push did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PushError {
    /// No free slot; wait at `drained` until [`Producer::has_space`].
    Full,
    /// See [`Corrupt`].
    Corrupt,
}

/// The producer's private state.
#[derive(Debug, Default)]
pub(crate) struct Producer {
    tail: u64,
    seen_head: u64,
}

impl Producer {
    /// Appends `item` and wakes the consumer if it sleeps.
    #[inline]
    pub(crate) fn push<S: Slots>(
        &mut self,
        words: &RingWords,
        slots: &S,
        park: &impl Park,
        item: &S::Item,
    ) -> Result<(), PushError> {
        if !self.fits(slots) && !self.has_space(words, slots).map_err(|Corrupt| PushError::Corrupt)? {
            return Err(PushError::Full);
        }
        slots.write((self.tail & (slots.capacity() - 1)) as usize, item);
        self.tail += 1;
        words.tail.0.store(self.tail, Ordering::Release);
        words.filled.0.notify(park);
        Ok(())
    }

    /// Looks again how far the consumer is. Is there a free slot?
    pub(crate) fn has_space<S: Slots>(&mut self, words: &RingWords, slots: &S) -> Result<bool, Corrupt> {
        let head = words.head.0.load(Ordering::Acquire);
        if self.tail.wrapping_sub(head) > slots.capacity() {
            return Err(Corrupt);
        }
        self.seen_head = head;
        Ok(self.fits(slots))
    }

    fn fits<S: Slots>(&self, slots: &S) -> bool {
        self.tail - self.seen_head < slots.capacity()
    }
}

/// The consumer's private state.
#[derive(Debug, Default)]
pub(crate) struct Consumer {
    head: u64,
    published_head: u64,
    seen_tail: u64,
}

impl Consumer {
    /// Takes the oldest item.
    #[inline]
    pub(crate) fn pop<S: Slots>(
        &mut self,
        words: &RingWords,
        slots: &S,
        park: &impl Park,
    ) -> Result<Option<S::Item>, Corrupt> {
        if self.head == self.seen_tail && !self.has_items(words, slots)? {
            self.publish(words, park);
            return Ok(None);
        }
        let item = slots.read((self.head & (slots.capacity() - 1)) as usize);
        self.head += 1;
        if self.head - self.published_head >= (slots.capacity() / 8).max(1) {
            self.publish(words, park);
        }
        Ok(Some(item))
    }

    /// Looks again how far the producer is. Is there an item?
    pub(crate) fn has_items<S: Slots>(&mut self, words: &RingWords, slots: &S) -> Result<bool, Corrupt> {
        let tail = words.tail.0.load(Ordering::Acquire);
        // Our private head is the truth; a tail behind it wraps to a huge count and is caught as well.
        if tail.wrapping_sub(self.head) > slots.capacity() {
            return Err(Corrupt);
        }
        self.seen_tail = tail;
        Ok(self.head != tail)
    }

    /// Is there an item (or a position that cannot be true)? Changes nothing.
    #[cfg(not(prism_loom))]
    pub(crate) fn peek(&self, words: &RingWords) -> bool {
        words.tail.0.load(Ordering::Acquire) != self.head
    }

    /// Gives the slots of all items taken so far back to the producer, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self, words: &RingWords, park: &impl Park) {
        if self.head != self.published_head {
            self.published_head = self.head;
            words.head.0.store(self.head, Ordering::Release);
            words.drained.0.notify(park);
        }
    }
}

#[cfg(all(test, not(prism_loom)))]
mod tests {
    use super::*;
    use crate::wait::Futex;
    use std::cell::Cell;

    struct Cells(Vec<Cell<u64>>);

    impl Slots for Cells {
        type Item = u64;
        fn capacity(&self) -> u64 {
            self.0.len() as u64
        }
        fn write(&self, index: usize, item: &u64) {
            self.0[index].set(*item);
        }
        fn read(&self, index: usize) -> u64 {
            self.0[index].get()
        }
    }

    fn ring(capacity: usize) -> (RingWords, Cells, Producer, Consumer) {
        (RingWords::new(), Cells(vec![Cell::new(0); capacity]), Producer::default(), Consumer::default())
    }

    #[test]
    fn items_come_out_in_order_over_many_wraps() {
        let (words, slots, mut producer, mut consumer) = ring(8);
        let (mut next_in, mut next_out) = (0u64, 0u64);
        for step in 0u64..10_000 {
            for _ in 0..step % 11 {
                if producer.push(&words, &slots, &Futex, &next_in).is_ok() {
                    next_in += 1;
                }
            }
            for _ in 0..step % 7 {
                if let Some(item) = consumer.pop(&words, &slots, &Futex).unwrap() {
                    assert_eq!(item, next_out);
                    next_out += 1;
                }
            }
        }
        assert!(next_out > 10_000 && next_in - next_out <= 8);
    }

    #[test]
    fn a_full_ring_refuses_and_takes_again_after_a_pop() {
        let (words, slots, mut producer, mut consumer) = ring(4);
        for item in 0..4 {
            producer.push(&words, &slots, &Futex, &item).unwrap();
        }
        assert_eq!(producer.push(&words, &slots, &Futex, &4), Err(PushError::Full));
        assert_eq!(consumer.pop(&words, &slots, &Futex), Ok(Some(0)));
        assert_eq!(producer.push(&words, &slots, &Futex, &4), Ok(()));
    }

    #[test]
    fn an_empty_ring_gives_every_slot_back() {
        let (words, slots, mut producer, mut consumer) = ring(64);
        producer.push(&words, &slots, &Futex, &1).unwrap();
        consumer.pop(&words, &slots, &Futex).unwrap();
        assert_eq!(words.head.0.load(Ordering::Relaxed), 0, "one item of 64 is below the publishing step");
        assert_eq!(consumer.pop(&words, &slots, &Futex), Ok(None));
        assert_eq!(words.head.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn impossible_positions_are_corrupt() {
        for tail in [5, u64::MAX, 1 << 40] {
            let (words, slots, _, mut consumer) = ring(4);
            words.tail.0.store(tail, Ordering::Relaxed);
            assert_eq!(consumer.pop(&words, &slots, &Futex), Err(Corrupt));
        }
        let (words, slots, mut producer, _) = ring(4);
        for item in 0..4 {
            producer.push(&words, &slots, &Futex, &item).unwrap();
        }
        for head in [5, u64::MAX] {
            words.head.0.store(head, Ordering::Relaxed);
            assert_eq!(producer.push(&words, &slots, &Futex, &9), Err(PushError::Corrupt));
        }
    }
}
