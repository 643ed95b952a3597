//! The reply slots of a segment: where threads of the training process wait for the answers to their queries.
//!
//! A slot goes `FREE → WAITING → (ASLEEP →) READY → FREE`. The client makes every step but the one to `READY`. Which
//! slots are taken is known only to the client ([`SlotAllocator`]); the engine answers the slot a query names.

use crate::message::Reply;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wait::Park;
use core::time::Duration;

/// Number of reply slots: queries that can be under way at once in one process.
pub(crate) const NUM_REPLY_SLOTS: usize = 64;

const FREE: u32 = 0;
const WAITING: u32 = 1;
const ASLEEP: u32 = 2;
const READY: u32 = 3;

/// One slot, on a cache line of its own. Zeroed memory is a free slot.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct ReplySlot {
    state: AtomicU32,
    status: AtomicU32,
    value: AtomicU64,
    host_ns: AtomicU64,
}

/// An answer to a slot that does not exist or in which nobody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadSlot;

impl core::fmt::Display for BadSlot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("no query waits in this reply slot")
    }
}

impl core::error::Error for BadSlot {}

impl ReplySlot {
    #[cfg(any(test, prism_loom))]
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
            status: AtomicU32::new(0),
            value: AtomicU64::new(0),
            host_ns: AtomicU64::new(0),
        }
    }

    /// Client: opens the slot for an answer. Before the query is appended.
    pub(crate) fn begin(&self) {
        self.state.store(WAITING, Ordering::Relaxed);
    }

    /// Client: takes the answer if it is there.
    #[inline]
    pub(crate) fn take(&self) -> Option<Reply> {
        if self.state.load(Ordering::Acquire) != READY {
            return None;
        }
        let reply = Reply {
            status: self.status.load(Ordering::Relaxed),
            reserved: 0,
            value: self.value.load(Ordering::Relaxed) as i64,
            host_ns: self.host_ns.load(Ordering::Relaxed) as i64,
        };
        self.state.store(FREE, Ordering::Relaxed);
        Some(reply)
    }

    /// Client: is the answer there?
    pub(crate) fn is_answered(&self) -> bool {
        self.state.load(Ordering::Acquire) == READY
    }

    /// Client: sleeps until the answer is there, at most `timeout`.
    pub(crate) fn sleep(&self, park: &impl Park, timeout: Duration) {
        // Fails if the answer came meanwhile, or if the slot says so already from an earlier sleep.
        let announced = self.state.compare_exchange(WAITING, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
        if announced.is_ok() || announced == Err(ASLEEP) {
            park.park(&self.state, ASLEEP, timeout);
        }
    }

    /// Either side: makes a sleeper look around (the session ended).
    pub(crate) fn rouse(&self, park: &impl Park) {
        if self.state.load(Ordering::Relaxed) == ASLEEP {
            park.unpark(&self.state);
        }
    }

    /// Engine: gives the answer.
    pub(crate) fn answer(&self, park: &impl Park, reply: Reply) -> Result<(), BadSlot> {
        if !matches!(self.state.load(Ordering::Relaxed), WAITING | ASLEEP) {
            return Err(BadSlot);
        }
        self.status.store(reply.status, Ordering::Relaxed);
        self.value.store(reply.value as u64, Ordering::Relaxed);
        self.host_ns.store(reply.host_ns as u64, Ordering::Relaxed);
        if self.state.swap(READY, Ordering::Release) == ASLEEP {
            park.unpark(&self.state);
        }
        Ok(())
    }
}

/// Hands the slots to the threads of the client: one bit per slot, set while taken.
#[derive(Debug, Default)]
pub(crate) struct SlotAllocator {
    taken: core::sync::atomic::AtomicU64,
}

impl SlotAllocator {
    /// A slot index below [`NUM_REPLY_SLOTS`], or `None` while all are taken.
    pub(crate) fn acquire(&self) -> Option<usize> {
        let mut taken = self.taken.load(core::sync::atomic::Ordering::Relaxed);
        loop {
            let index = (!taken).trailing_zeros();
            if index as usize >= NUM_REPLY_SLOTS {
                return None;
            }
            // Acquire: what the previous holder did to the slot is over.
            match self.taken.compare_exchange_weak(
                taken,
                taken | 1 << index,
                core::sync::atomic::Ordering::Acquire,
                core::sync::atomic::Ordering::Relaxed,
            ) {
                Ok(_) => return Some(index as usize),
                Err(now) => taken = now,
            }
        }
    }

    /// Gives a slot back.
    pub(crate) fn release(&self, index: usize) {
        self.taken.fetch_and(!(1 << index), core::sync::atomic::Ordering::Release);
    }
}

#[cfg(all(test, not(prism_loom)))]
mod tests {
    use super::*;
    use crate::wait::Futex;

    #[test]
    fn an_answer_is_taken_once() {
        let slot = ReplySlot::new();
        let reply = Reply { status: 1, reserved: 0, value: -5, host_ns: i64::MIN };
        slot.begin();
        assert_eq!(slot.take(), None);
        slot.answer(&Futex, reply).unwrap();
        assert_eq!(slot.take(), Some(reply));
        assert_eq!(slot.take(), None);
    }

    #[test]
    fn answers_nobody_waits_for_are_refused() {
        let slot = ReplySlot::new();
        assert_eq!(slot.answer(&Futex, Reply::default()), Err(BadSlot));
        slot.begin();
        slot.answer(&Futex, Reply::default()).unwrap();
        assert_eq!(slot.answer(&Futex, Reply::default()), Err(BadSlot));
    }

    #[test]
    fn a_second_sleep_of_one_wait_sleeps_again() {
        let slot = ReplySlot::new();
        slot.begin();
        let start = std::time::Instant::now();
        for _ in 0..3 {
            slot.sleep(&Futex, Duration::from_millis(10));
        }
        assert!(start.elapsed() >= Duration::from_millis(29));
    }

    #[test]
    fn every_slot_is_handed_out_once() {
        let slots = SlotAllocator::default();
        let mut indices: Vec<_> = (0..NUM_REPLY_SLOTS).map(|_| slots.acquire().unwrap()).collect();
        assert_eq!(slots.acquire(), None);
        indices.sort_unstable();
        assert!(indices.iter().copied().eq(0..NUM_REPLY_SLOTS));
        slots.release(17);
        assert_eq!(slots.acquire(), Some(17));
    }
}
