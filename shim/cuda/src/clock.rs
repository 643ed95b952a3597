//! The process's virtual host clock.
//!
//! One clock per process, in ns since the session was made. Threads that *drive* the device (have launched, copied or
//! allocated) advance it: by a constant per call, by the answers of queries, by sleeping and, a little, by reading clocks,
//! so that loops which wait for a time end. Nothing else moves it: neither real time nor other threads.
//!
//! Other threads (a watchdog, a data loader's pinning thread) read the same clock. So that their timed waits can end
//! although they may not move it, each has a floor of its own: a wait that has run out (see [`crate::handoff`]) lifts the
//! thread's floor to its deadline, and the thread reads the later of the two. A driver has such a floor at the end of the
//! process only ([`waited_alone`]).
//!
//! The clocks of libc (see [`crate::interpose`]) are the virtual clock plus what they showed when the session was made.

use crate::{handoff, real, session};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

static NOW: AtomicI64 = AtomicI64::new(0);
static BASE_REALTIME: AtomicI64 = AtomicI64::new(0);
static BASE_MONOTONIC: AtomicI64 = AtomicI64::new(0);
static BASE_RAW: AtomicI64 = AtomicI64::new(0);
static BASE_BOOT: AtomicI64 = AtomicI64::new(0);
static READ_COST: AtomicI64 = AtomicI64::new(0);
/// A driver's readings of the clock since it last did something with the device.
static READS: AtomicU32 = AtomicU32::new(0);
/// So many of them are free.
const FREE_READS: u32 = 1000;

thread_local! {
    static IS_DRIVER: Cell<bool> = const { Cell::new(false) };
    static FLOOR: Cell<i64> = const { Cell::new(0) };
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    /// Has the thread read the clock since it last waited for a semaphore?
    static HAS_READ: Cell<bool> = const { Cell::new(false) };
}

/// Starts the clock: virtual time continues from the real time of this moment. Called once, while the session is made.
pub(crate) fn start(read_cost_ns: i64) {
    BASE_REALTIME.store(real::clock_ns(libc::CLOCK_REALTIME), Ordering::Relaxed);
    BASE_MONOTONIC.store(real::clock_ns(libc::CLOCK_MONOTONIC), Ordering::Relaxed);
    BASE_RAW.store(real::clock_ns(libc::CLOCK_MONOTONIC_RAW), Ordering::Relaxed);
    BASE_BOOT.store(real::clock_ns(libc::CLOCK_BOOTTIME), Ordering::Relaxed);
    READ_COST.store(read_cost_ns, Ordering::Relaxed);
    // The main thread of a program that uses the device drives it from the start.
    // SAFETY: both calls only return a number.
    if unsafe { libc::syscall(libc::SYS_gettid) == libc::c_long::from(libc::getpid()) } {
        set_driver();
    }
}

/// Virtual time in ns since the session was made.
#[inline]
pub(crate) fn now() -> i64 {
    NOW.load(Ordering::Acquire)
}

/// Lets `ns` pass and returns the new time.
#[inline]
pub(crate) fn charge(ns: i64) -> i64 {
    NOW.fetch_add(ns, Ordering::AcqRel) + ns
}

/// Moves the clock forward to `ns`; never back.
#[inline]
pub(crate) fn advance_to(ns: i64) {
    NOW.fetch_max(ns, Ordering::AcqRel);
}

/// Does the calling thread drive the device?
#[inline]
pub(crate) fn is_driver() -> bool {
    IS_DRIVER.get()
}

/// From now on the calling thread drives the device.
#[inline]
pub(crate) fn set_driver() {
    if !IS_DRIVER.replace(true) {
        handoff::note_driver();
    }
}

/// Charges a call that only drivers pay for (queries, getters). Returns the time at which the call is made.
#[inline]
pub(crate) fn charge_if_driver(ns: i64) -> i64 {
    if is_driver() { charge(ns) } else { now() }
}

/// Runs `body` with the real clocks: code of this library must not read, and so move, the virtual one.
#[inline]
pub(crate) fn inside<T>(body: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            INSIDE.set(INSIDE.get() - 1);
        }
    }
    INSIDE.set(INSIDE.get() + 1);
    let _leave = Leave;
    body()
}

/// Do the libc clocks of the calling thread follow the virtual clock?
#[inline]
pub(crate) fn is_virtual() -> bool {
    session::has_clock() && INSIDE.get() == 0
}

/// The base of a libc clock: what it showed when the session was made. `None` for clocks that stay real (CPU time).
pub(crate) fn base(id: libc::clockid_t) -> Option<i64> {
    let base = match id {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE | libc::CLOCK_TAI => &BASE_REALTIME,
        libc::CLOCK_MONOTONIC | libc::CLOCK_MONOTONIC_COARSE => &BASE_MONOTONIC,
        libc::CLOCK_MONOTONIC_RAW => &BASE_RAW,
        libc::CLOCK_BOOTTIME => &BASE_BOOT,
        _ => return None,
    };
    Some(base.load(Ordering::Relaxed))
}

/// A program's reading of the clock. A driver's readings are free, because how often a library reads the clock depends on
/// the machine, until it has read [`FREE_READS`] times without doing anything else: then it waits for a time, and each
/// reading costs a little, so that the wait ends. Another thread pays from its own floor.
pub(crate) fn read() -> i64 {
    HAS_READ.set(true);
    let cost = READ_COST.load(Ordering::Relaxed);
    if is_driver() {
        let is_free = READS.fetch_add(1, Ordering::Relaxed) < FREE_READS;
        if is_free { now() } else { charge(cost) }.max(FLOOR.get())
    } else {
        let time = now().max(FLOOR.get() + cost);
        FLOOR.set(time);
        time
    }
}

/// Takes back the calling thread's last reading of the clock.
pub(crate) fn refund_read() {
    let cost = READ_COST.load(Ordering::Relaxed);
    if is_driver() {
        // Another driver may have reset the count in between: it does not fall below zero.
        let reads = READS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reads| Some(reads.saturating_sub(1)));
        if reads.is_ok_and(|reads| reads > FREE_READS) {
            charge(-cost);
        }
    } else {
        FLOOR.set(FLOOR.get() - cost);
    }
}

/// The calling thread waits for a semaphore, without a deadline. Python reads the clock before each such wait, as for every
/// lock, and modules take locks while they are imported: how many depends on what has been imported already.
pub(crate) fn refund_lock_read() {
    if HAS_READ.replace(false) {
        refund_read();
    }
}

/// A driver has done something: its next readings are free again.
#[inline]
pub(crate) fn forget_reads() {
    READS.store(0, Ordering::Relaxed);
}

/// The time the calling thread believes it is, without the cost of a reading.
pub(crate) fn thread_now() -> i64 {
    now().max(FLOOR.get())
}

/// A wait of the calling thread for time `ns` has ended: it is at least that late for the thread.
pub(crate) fn waited_until(ns: i64) {
    if is_driver() {
        advance_to(ns);
    } else {
        FLOOR.set(FLOOR.get().max(ns));
    }
}

/// The same, but the clock of the process stays where it is, whoever waited.
pub(crate) fn waited_alone(ns: i64) {
    FLOOR.set(FLOOR.get().max(ns));
}
