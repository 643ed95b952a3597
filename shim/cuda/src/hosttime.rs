//! What a call of the program costs its host: a constant of the profile, or, if the session asks for it, the CPU time that
//! the calling thread has used since its call before.
//!
//! Constants make runs repeatable and know nothing of the program; measured time knows how long this machine's Python takes
//! between two launches, with the noise of that. CPU time does not count while the thread waits for the engine, or for its
//! turn on a busy machine.

use crate::real;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_MEASURED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// CPU time of this thread when it last left the library; below 0: never.
    static LEFT: Cell<i64> = const { Cell::new(-1) };
}

/// From now on host time is measured.
pub(crate) fn measure() {
    IS_MEASURED.store(true, Ordering::Relaxed);
}

/// The cost of a call whose constant is `constant_ns`.
#[inline]
pub(crate) fn cost(constant_ns: i64) -> i64 {
    if IS_MEASURED.load(Ordering::Relaxed) { measured().unwrap_or(constant_ns) } else { constant_ns }
}

/// What has passed before a call that costs nothing by itself.
#[inline]
pub(crate) fn passed() -> i64 {
    if IS_MEASURED.load(Ordering::Relaxed) { measured().unwrap_or(0) } else { 0 }
}

/// The calling thread has waited for the engine: what that took of its time is not the program's.
#[inline]
pub(crate) fn restart() {
    if IS_MEASURED.load(Ordering::Relaxed) {
        LEFT.set(real::clock_ns(libc::CLOCK_THREAD_CPUTIME_ID));
    }
}

#[cold]
fn measured() -> Option<i64> {
    let now = real::clock_ns(libc::CLOCK_THREAD_CPUTIME_ID);
    let before = LEFT.replace(now);
    (before >= 0).then(|| (now - before).max(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_measured_from_call_to_call() {
        assert_eq!((cost(70), passed()), (70, 0), "constants unless asked for");
        measure();
        assert_eq!(cost(70), 70, "nothing to measure from");
        let mut sum = 0u64;
        for number in 0..2_000_000u64 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(number));
        }
        let first = cost(70);
        assert!(first > 100_000, "{first} ns for two million steps ({sum})");
        restart();
        assert!(passed() < first);
    }
}
