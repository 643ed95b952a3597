//! Timed waits of background threads (a watchdog, a data loader's pinning thread) in virtual time.
//!
//! What such a thread does when its wait runs out (a watchdog frees tensors of finished collectives) is part of what the
//! program does, so it must happen at the same point of every run. A background wait therefore does not run out by itself:
//! it is registered with its virtual deadline, and the thread that drives the device, on passing that deadline with a
//! launch, copy or synchronisation, hands over: it wakes the waiting thread and stands still until that waits again.
//! Deadlines are rounded up to a grid, so that the microseconds by which a thread starts sooner or later do not count.
//!
//! Two valves keep this from holding a program up: the driving thread stands still for [`PATIENCE`] at most, and while all
//! threads that drive the device are asleep (they wait for a peer, or for the very thread that waits here), waits run out
//! in real time. A thread that waits for the engine's answer does not count as asleep: time stands still until it comes.

use crate::{clock, real, session};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Deadlines are rounded up to a multiple of this.
const GRID_NS: i64 = 10_000_000;
/// Real time for which a driving thread stands still for one background thread at most.
const PATIENCE: Duration = Duration::from_millis(100);
/// Real time between two looks at a thread that was woken.
const LOOK: Duration = Duration::from_micros(50);
/// Looks, in a row, at a thread asleep elsewhere before it counts as settled.
const LOOKS_ASLEEP: u32 = 10;
/// Real time after which a waiting thread looks whether the drivers are asleep.
const SLICE: Duration = Duration::from_secs(1);

/// How a waiting thread is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// By a broadcast on the condition variable at this address.
    Condition(usize),
    /// It looks at its flag by itself every so often.
    Flag,
}

/// A background thread's registered wait.
#[derive(Debug)]
pub(crate) struct Waiter {
    thread: i64,
    deadline: i64,
    wake: Wake,
    fired: AtomicBool,
    left: AtomicBool,
    /// Virtual time when the slice in progress began, to see whether a driver did anything.
    seen: AtomicI64,
}

static WAITERS: Mutex<Vec<Arc<Waiter>>> = Mutex::new(Vec::new());
/// The earliest registered deadline.
static NEXT: AtomicI64 = AtomicI64::new(i64::MAX);
/// Threads that drive the device.
static DRIVERS: Mutex<Vec<i64>> = Mutex::new(Vec::new());
/// Virtual time at which all drivers were last seen asleep: until it changes, waits need not find that out again.
static ASLEEP_AT: AtomicI64 = AtomicI64::new(-1);
/// Threads that drive the device and wait for the engine now.
static AT_ENGINE: AtomicU32 = AtomicU32::new(0);
/// Handovers that ended by [`PATIENCE`]: their effect may differ between runs.
static IMPATIENT: AtomicU32 = AtomicU32::new(0);
/// Taken by the thread that hands over.
static TURN: Mutex<()> = Mutex::new(());

fn waiters() -> MutexGuard<'static, Vec<Arc<Waiter>>> {
    WAITERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn thread_id() -> i64 {
    // SAFETY: only returns a number.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

/// Notes that the calling thread drives the device. Called once per thread.
#[cold]
pub(crate) fn note_driver() {
    DRIVERS.lock().unwrap_or_else(PoisonError::into_inner).push(thread_id());
}

fn set_next(waiters: &[Arc<Waiter>]) {
    let next = waiters.iter().map(|waiter| waiter.deadline).min().unwrap_or(i64::MAX);
    NEXT.store(next, Ordering::Release);
}

/// Registers a wait of the calling thread for virtual time `deadline`; `None` if it is to be a real wait: the thread
/// drives the device itself, or the device is gone.
pub(crate) fn enter(deadline: i64, wake: Wake) -> Option<Arc<Waiter>> {
    if clock::is_driver() || !session::is_connected() {
        return None;
    }
    let deadline = deadline.div_euclid(GRID_NS).saturating_add(1).saturating_mul(GRID_NS);
    let waiter = Arc::new(Waiter {
        thread: thread_id(),
        deadline,
        wake,
        fired: AtomicBool::new(false),
        left: AtomicBool::new(false),
        seen: AtomicI64::new(clock::now()),
    });
    let mut waiters = waiters();
    waiters.push(Arc::clone(&waiter));
    set_next(&waiters);
    Some(waiter)
}

impl Waiter {
    /// Has the wait run out?
    pub(crate) fn has_fired(&self) -> bool {
        self.fired.load(Ordering::Acquire)
    }

    /// After a slice of real time: may the wait run out although no driver has passed its deadline? Only if no driver has
    /// done anything in the slice and all of them are asleep.
    pub(crate) fn may_give_up(&self) -> bool {
        let now = clock::now();
        if !session::is_connected() {
            return true;
        }
        if self.seen.swap(now, Ordering::Relaxed) != now || AT_ENGINE.load(Ordering::Acquire) > 0 {
            return false;
        }
        let drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
        let asleep = drivers.iter().all(|thread| is_asleep(*thread));
        ASLEEP_AT.store(if asleep { now } else { -1 }, Ordering::Relaxed);
        asleep
    }

    /// Real time to wait before [`Self::may_give_up`] is worth asking: as long as the wait itself where the drivers are
    /// known to be asleep, at most a slice.
    fn slice(&self) -> Duration {
        let now = clock::now();
        if ASLEEP_AT.load(Ordering::Relaxed) != now {
            return SLICE;
        }
        Duration::from_nanos(u64::try_from(self.deadline - clock::thread_now()).unwrap_or(0)).min(SLICE)
    }

    /// Ends the wait. `expired` says that it has run out; returns whether it has, by that or by a handover.
    pub(crate) fn leave(self: &Arc<Self>, expired: bool) -> bool {
        let mut waiters = waiters();
        waiters.retain(|other| !Arc::ptr_eq(other, self));
        set_next(&waiters);
        self.left.store(true, Ordering::Release);
        let ran_out = expired || self.has_fired();
        if ran_out {
            clock::waited_until(self.deadline.max(clock::now()));
        }
        ran_out
    }
}

/// Runs `body`, in which the calling thread waits for the engine.
pub(crate) fn at_engine<T>(body: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            AT_ENGINE.fetch_sub(1, Ordering::AcqRel);
        }
    }
    if !clock::is_driver() {
        return body();
    }
    AT_ENGINE.fetch_add(1, Ordering::AcqRel);
    let _leave = Leave;
    body()
}

/// A point of the program at which the driving thread holds no lock of a framework's allocator: hands over to the
/// background threads whose deadlines have passed.
#[inline]
pub(crate) fn point() {
    if clock::now() >= NEXT.load(Ordering::Relaxed) {
        hand_over();
    }
}

#[cold]
fn hand_over() {
    let Ok(_turn) = TURN.try_lock() else { return };
    if !clock::is_driver() {
        return;
    }
    let now = clock::now();
    while let Some(waiter) = take_due(now) {
        let in_time = wake(&waiter) && settle(waiter.thread);
        if !in_time && IMPATIENT.fetch_add(1, Ordering::Relaxed) == 0 {
            real::log("prism: a background thread did not settle in time; what it does may differ between runs\n");
        }
    }
}

/// The due wait that comes first: by deadline, then by the age of its thread.
fn take_due(now: i64) -> Option<Arc<Waiter>> {
    let mut waiters = waiters();
    let due = waiters.iter().filter(|waiter| waiter.deadline <= now);
    let first = Arc::clone(due.min_by_key(|waiter| (waiter.deadline, waiter.thread))?);
    first.fired.store(true, Ordering::Release);
    waiters.retain(|other| !Arc::ptr_eq(other, &first));
    set_next(&waiters);
    Some(first)
}

/// Wakes a thread; true once it has left its wait.
fn wake(waiter: &Waiter) -> bool {
    for _ in 0..PATIENCE.as_micros() / LOOK.as_micros() {
        if let Wake::Condition(address) = waiter.wake {
            // Under the lock that the waiting thread must take to leave, so the variable still exists.
            let _waiters = waiters();
            if !waiter.left.load(Ordering::Acquire) {
                // SAFETY: the thread is still inside its wait on this condition variable.
                unsafe { libc::pthread_cond_broadcast(address as *mut libc::pthread_cond_t) };
            }
        }
        real::sleep(LOOK);
        if waiter.left.load(Ordering::Acquire) {
            return true;
        }
    }
    false
}

/// Waits until a woken thread waits again (here, or asleep elsewhere) or has ended.
fn settle(thread: i64) -> bool {
    let mut asleep = 0;
    for _ in 0..PATIENCE.as_micros() / LOOK.as_micros() {
        if waiters().iter().any(|waiter| waiter.thread == thread) {
            return true;
        }
        asleep = if is_asleep(thread) { asleep + 1 } else { 0 };
        if asleep >= LOOKS_ASLEEP {
            return true;
        }
        real::sleep(LOOK);
    }
    false
}

/// Is a thread of this process asleep, or gone?
fn is_asleep(thread: i64) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")) else { return true };
    // The state follows the command's name, which is in parentheses and may contain anything.
    text.rsplit(')').next().is_some_and(|rest| matches!(rest.trim_start().as_bytes().first(), Some(b'S' | b'Z' | b'X')))
}

/// Waits on a condition variable with `wait(real timeout)`, which returns `ETIMEDOUT` when the timeout is over.
pub(crate) fn condition_wait(waiter: &Arc<Waiter>, wait: impl FnOnce(Duration) -> c_int) -> c_int {
    if waiter.has_fired() {
        waiter.leave(true);
        return libc::ETIMEDOUT;
    }
    let result = wait(waiter.slice());
    let expired = result == libc::ETIMEDOUT && waiter.may_give_up();
    if waiter.leave(expired) {
        libc::ETIMEDOUT
    } else if result == libc::ETIMEDOUT {
        // The slice is over but the wait is not: the caller looks at its condition and waits again.
        0
    } else {
        result
    }
}

/// Waits with `is_over(real timeout)` until that says that what was waited for has happened (true), or the wait has run
/// out (false).
pub(crate) fn polled_wait(waiter: &Arc<Waiter>, mut is_over: impl FnMut(Duration) -> bool) -> bool {
    const POLL: Duration = Duration::from_millis(1);
    let (mut waited, mut slice) = (Duration::ZERO, waiter.slice());
    loop {
        if is_over(POLL) {
            waiter.leave(false);
            return true;
        }
        waited += POLL;
        let slice_over = waited >= slice;
        let expired = slice_over && waiter.may_give_up();
        if slice_over {
            (waited, slice) = (Duration::ZERO, waiter.slice());
        }
        if expired || waiter.has_fired() {
            waiter.leave(true);
            return false;
        }
    }
}
