//! Memory in which the host and holding kernels see each other: for each hold under way one slot of two words.

use crate::driver::{CudaError, Driver};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};

/// Holds that may be enqueued at a time. A program that has more outstanding waits for room.
const SLOTS: usize = 4_096;
/// A cache line each.
const SLOT_BYTES: usize = 64;
const WORDS: usize = SLOT_BYTES / 4;

/// The slots, and which of them are free.
pub(crate) struct Slots {
    words: &'static [AtomicU32],
    device: u64,
    free: Mutex<Vec<Slot>>,
}

/// A slot with the number of its present use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    index: u32,
    /// What both words become in this use.
    pub(crate) number: u32,
}

impl Slots {
    pub(crate) fn new(driver: &Driver) -> Result<Self, CudaError> {
        let mapped = driver.mapped(SLOTS * SLOT_BYTES)?;
        // SAFETY: mapped memory is page aligned, of this size, zeroed, never freed, and only accessed as atomics.
        let words = unsafe { std::slice::from_raw_parts(mapped.host.cast::<AtomicU32>(), SLOTS * WORDS) };
        let free = (0..SLOTS as u32).rev().map(|index| Slot { index, number: 0 }).collect();
        Ok(Self { words, device: mapped.device, free: Mutex::new(free) })
    }

    /// A free slot with a new number, if there is one.
    pub(crate) fn take(&self) -> Option<Slot> {
        let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Slot { number: slot.number.wrapping_add(1), ..slot })
    }

    /// The kernel of this use has run.
    pub(crate) fn give_back(&self, slot: Slot) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }

    /// Address for the kernel.
    pub(crate) fn device(&self, slot: Slot) -> u64 {
        self.device + u64::from(slot.index) * SLOT_BYTES as u64
    }

    fn word(&self, slot: Slot, word: usize) -> &AtomicU32 {
        &self.words[slot.index as usize * WORDS + word]
    }

    /// Does the kernel run?
    #[inline]
    pub(crate) fn has_arrived(&self, slot: Slot) -> bool {
        self.word(slot, 0).load(Ordering::Acquire) == slot.number
    }

    /// Lets the kernel end.
    pub(crate) fn release(&self, slot: Slot) {
        self.word(slot, 1).store(slot.number, Ordering::Release);
    }
}
