//! Sleeping and waking across processes: a gate over one shared word, and the bounded spin that comes before it.

use crate::sync::{AtomicU32, Ordering, fence, spin_loop};
use core::time::Duration;

/// How long one sleep lasts at most before the sleeper looks whether its peer still lives.
pub(crate) const LIVENESS_SLICE: Duration = Duration::from_millis(100);

/// The two operations of a futex. Abstract, so that the protocols on top can be model-checked.
pub(crate) trait Park {
    /// Sleeps while `word` holds `expected`, at most `timeout`. May return early for no reason.
    fn park(&self, word: &AtomicU32, expected: u32, timeout: Duration);
    /// Wakes every sleeper of `word`.
    fn unpark(&self, word: &AtomicU32);
}

/// The kernel's futex, usable through a mapping that several processes share.
#[cfg(not(prism_loom))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Futex;

#[cfg(not(prism_loom))]
impl Park for Futex {
    fn park(&self, word: &AtomicU32, expected: u32, timeout: Duration) {
        crate::sys::futex_wait(word, expected, timeout);
    }

    fn unpark(&self, word: &AtomicU32) {
        crate::sys::futex_wake_all(word);
    }
}

/// The bit of a gate's word that says that somebody sleeps or is about to.
const ASLEEP: u32 = 1;

/// A place to sleep until a condition over shared memory holds. Any number of threads may sleep at one gate.
///
/// The side that makes conditions true pays one fence and one load while nobody sleeps; the system call to wake is only
/// made when somebody announced that it sleeps. Zeroed memory is a valid gate.
///
/// The word is [`ASLEEP`] plus twice the number of wake-ups. Counting them keeps a sleeper whose wake-up came between its
/// look at the condition and its sleep from going to sleep on the announcement of the next one.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Gate {
    word: AtomicU32,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU32::new(0) }
    }

    /// Sleeps once, at most `timeout`, unless `ready` holds. Says whether `ready` holds at the end; a caller that wants
    /// it to hold calls again.
    ///
    /// The announcement stays when the sleep ends by its timeout: another thread may rely on it, and a stale one costs
    /// one needless wake-up where a lost one would cost a full timeout.
    pub(crate) fn sleep_unless(&self, park: &impl Park, timeout: Duration, mut ready: impl FnMut() -> bool) -> bool {
        let announced = self.word.fetch_or(ASLEEP, Ordering::Relaxed) | ASLEEP;
        // Pairs with the fence in `notify`: either the notifier sees the announcement or `ready` sees its change.
        fence(Ordering::SeqCst);
        if ready() {
            return true;
        }
        park.park(&self.word, announced, timeout);
        ready()
    }

    /// Wakes whoever sleeps here. To be called after the change that may make a sleeper's condition true.
    #[inline]
    pub(crate) fn notify(&self, park: &impl Park) {
        fence(Ordering::SeqCst);
        let word = self.word.load(Ordering::Relaxed);
        if word & ASLEEP != 0 {
            self.wake(park, word);
        }
    }

    #[cold]
    fn wake(&self, park: &impl Park, word: u32) {
        // Where this fails another notifier is waking everybody who announced before our change.
        let next = word.wrapping_add(1);
        if self.word.compare_exchange(word, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            park.unpark(&self.word);
        }
    }
}

/// Rounds of a full spin: some tens of microseconds, the time of a round trip between two running processes.
const SPIN_ROUNDS: u32 = 1000;
/// Rounds of a spin that is not expected to succeed.
const SPIN_ROUNDS_SHORT: u32 = 32;
/// Fruitless full spins in a row after which spinning is given up for a while.
const MISSES_ALLOWED: u32 = 8;
/// While given up, one wait in this many spins fully, to notice that it is worth it again.
const RETRY_EVERY: u32 = 16;

/// Bounded spinning that stops where it does not pay: with one CPU, or where the answers take long anyway.
#[derive(Debug)]
pub(crate) struct Spin {
    /// Fruitless spins in a row. Always a `core` atomic: a heuristic is no part of any modelled protocol.
    misses: core::sync::atomic::AtomicU32,
    enabled: bool,
}

impl Spin {
    pub(crate) fn new(num_cpus: usize) -> Self {
        Self { misses: core::sync::atomic::AtomicU32::new(0), enabled: num_cpus > 1 }
    }

    /// Spins until `ready` holds or the budget is used up. Says whether `ready` held.
    pub(crate) fn until(&self, mut ready: impl FnMut() -> bool) -> bool {
        if !self.enabled {
            return ready();
        }
        let misses = self.misses.load(core::sync::atomic::Ordering::Relaxed);
        let hopeful = misses < MISSES_ALLOWED || misses.is_multiple_of(RETRY_EVERY);
        let rounds = if hopeful { SPIN_ROUNDS } else { SPIN_ROUNDS_SHORT };
        for _ in 0..rounds {
            if ready() {
                self.misses.store(0, core::sync::atomic::Ordering::Relaxed);
                return true;
            }
            spin_loop();
        }
        self.misses.store(misses.wrapping_add(1), core::sync::atomic::Ordering::Relaxed);
        false
    }
}

#[cfg(all(test, not(prism_loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_sleep_ends_at_its_timeout() {
        let gate = Gate::new();
        let start = Instant::now();
        assert!(!gate.sleep_unless(&Futex, Duration::from_millis(20), || false));
        assert!(start.elapsed() >= Duration::from_millis(19));
    }

    #[test]
    fn a_sleeper_is_woken_long_before_its_timeout() {
        let gate = Gate::new();
        let flag = AtomicU32::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                flag.store(1, Ordering::Release);
                gate.notify(&Futex);
            });
            while !gate.sleep_unless(&Futex, Duration::from_secs(30), || flag.load(Ordering::Acquire) == 1) {}
        });
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn spinning_is_given_up_after_misses_and_taken_up_again() {
        let spin = Spin::new(2);
        let rounds = |spin: &Spin| {
            let mut rounds = 0;
            spin.until(|| {
                rounds += 1;
                false
            });
            rounds
        };
        for _ in 0..MISSES_ALLOWED {
            assert_eq!(rounds(&spin), SPIN_ROUNDS);
        }
        for _ in MISSES_ALLOWED..RETRY_EVERY {
            assert_eq!(rounds(&spin), SPIN_ROUNDS_SHORT);
        }
        assert_eq!(rounds(&spin), SPIN_ROUNDS);
        assert!(spin.until(|| true));
        assert_eq!(rounds(&spin), SPIN_ROUNDS);
    }

    #[test]
    fn one_cpu_never_spins() {
        let mut rounds = 0;
        Spin::new(1).until(|| {
            rounds += 1;
            false
        });
        assert_eq!(rounds, 1);
    }
}
