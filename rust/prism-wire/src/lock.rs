//! A spin lock for critical sections of a few dozen instructions.

use crate::sys;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Spins before the CPU is given away: the holder may have been preempted.
const SPINS_BEFORE_YIELD: u32 = 128;

/// A lock that never allocates, never poisons and costs one atomic exchange when free.
#[derive(Debug, Default)]
pub(crate) struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Access to the value; gives the lock back on drop.
pub(crate) struct SpinGuard<'a, T>(&'a SpinLock<T>);

impl<T> SpinLock<T> {
    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        while self.taken.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait_until_free();
        }
        SpinGuard(self)
    }

    #[cold]
    fn wait_until_free(&self) {
        let mut spins = 0;
        while self.taken.load(Ordering::Relaxed) {
            if spins < SPINS_BEFORE_YIELD {
                spins += 1;
                std::hint::spin_loop();
            } else {
                sys::yield_now();
            }
        }
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn increments_under_the_lock_are_not_lost() {
        let counter = SpinLock::<u64>::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        *counter.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 80_000);
    }
}
