//! Timed waits of background threads (a watchdog, a data loader's pinning thread) in virtual time.
//!
//! What such a thread does when its wait runs out (a watchdog frees tensors of finished collectives) is part of what the
//! program does, so it must happen at the same point of every run. A background wait therefore does not run out by itself:
//! it is registered with its virtual deadline, and the thread that drives the device, on passing that deadline with a
//! launch, copy or synchronisation, hands over: it wakes the waiting thread and stands still until that waits again.
//! Deadlines are rounded up to a grid, so that the microseconds by which a thread starts sooner or later do not count.
//!
//! How fast the machine is does not count: the driving thread stands still until the other one waits again, or sleeps for
//! another reason while nobody else of the process does anything, and one that waits for the engine's answer does neither.
//! Two valves keep this from holding a program up, and are made so that a busy machine does not open them: the driving
//! thread stands still for [`PATIENCE`] at most, which is said, and while all threads that drive the device are asleep (they
//! wait for the very thread that waits here), waits run out in as much real time. Sleep in a call on a descriptor is a wait
//! for another process, which may be slow: then waits only begin to run out after [`ELSEWHERE`].

use crate::{clock, real, session};
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Deadlines are rounded up to a multiple of this.
const GRID_NS: i64 = 10_000_000;
/// Real time for which a driving thread stands still for one background thread at most: it never stopped computing.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for a thread that was too slow for [`PATIENCE`] before.
const LITTLE_PATIENCE: Duration = Duration::from_millis(100);
/// Real time after which a thread that sleeps is at rest, whatever others do.
const SURELY_ASLEEP: Duration = Duration::from_secs(1);
/// Real time after which the engine's answer depends on what this process does next.
const AT_ENGINE_FOR_GOOD: Duration = Duration::from_secs(10);
/// Real time for which drivers may wait for another process before other threads' waits run out.
const ELSEWHERE: Duration = Duration::from_secs(10);
/// Real time between two looks at a thread that was woken.
const LOOK: Duration = Duration::from_micros(50);
/// Looks, in a row, at a thread asleep elsewhere before it counts as settled.
const LOOKS_ASLEEP: u32 = 10;
/// Looks at a thread that was woken and does not leave its wait. One that polls does so every millisecond.
const LOOKS_TO_LEAVE: u32 = 200;
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
}

/// How long nothing has moved while a thread waits. It outlives the [`Waiter`], which is made anew for each slice of a wait.
#[derive(Clone, Copy)]
struct Still {
    deadline: i64,
    /// Virtual time.
    now: i64,
    /// Real time since when both have been so, and the drivers asleep.
    since: i64,
}

thread_local! {
    static STILL: Cell<Still> = const { Cell::new(Still { deadline: -1, now: -1, since: 0 }) };
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
/// Other threads that wait for the engine now.
static OTHERS_AT_ENGINE: AtomicU32 = AtomicU32::new(0);
/// Virtual time at which the drivers were found to have waited for another process for longer than [`ELSEWHERE`].
static ELSEWHERE_AT: AtomicI64 = AtomicI64::new(-1);
/// Threads that were too slow for [`PATIENCE`].
static RESTLESS: Mutex<Vec<i64>> = Mutex::new(Vec::new());
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
    if clock::is_driver() || !session::has_clock() {
        return None;
    }
    let deadline = deadline.div_euclid(GRID_NS).saturating_add(1).saturating_mul(GRID_NS);
    let waiter = Arc::new(Waiter {
        thread: thread_id(),
        deadline,
        wake,
        fired: AtomicBool::new(false),
        left: AtomicBool::new(false),
    });
    let (now, before) = (clock::now(), STILL.get());
    if (before.deadline, before.now) != (deadline, now) {
        STILL.set(Still { deadline, now, since: real_ns() });
    }
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
    /// done anything for as long as is left of the wait, and all of them are asleep.
    pub(crate) fn may_give_up(&self) -> bool {
        if !session::has_clock() {
            return true;
        }
        let (now, real, still) = (clock::now(), real_ns(), STILL.get());
        let is_still = (still.deadline, still.now) == (self.deadline, now) && AT_ENGINE.load(Ordering::Acquire) == 0;
        let sleep = if is_still { drivers_sleep() } else { Sleep::Awake };
        ASLEEP_AT.store(if sleep == Sleep::Awake { -1 } else { now }, Ordering::Relaxed);
        if sleep == Sleep::Awake {
            STILL.set(Still { deadline: self.deadline, now, since: real });
            return false;
        }
        let asleep = real - still.since;
        if sleep == Sleep::Elsewhere && ELSEWHERE_AT.load(Ordering::Relaxed) != now {
            if asleep < ELSEWHERE.as_nanos() as i64 {
                return false;
            }
            ELSEWHERE_AT.store(now, Ordering::Relaxed);
        }
        asleep >= self.deadline - clock::thread_now()
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
    struct Leave(&'static AtomicU32);
    impl Drop for Leave {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
    let count = if clock::is_driver() { &AT_ENGINE } else { &OTHERS_AT_ENGINE };
    count.fetch_add(1, Ordering::AcqRel);
    let _leave = Leave(count);
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
    let has_left = || {
        if let Wake::Condition(address) = waiter.wake {
            // Under the lock that the waiting thread must take to leave, so the variable still exists.
            let _waiters = waiters();
            if !waiter.left.load(Ordering::Acquire) {
                // SAFETY: the thread is still inside its wait on this condition variable.
                unsafe { libc::pthread_cond_broadcast(address as *mut libc::pthread_cond_t) };
            }
        }
        real::sleep(LOOK);
        waiter.left.load(Ordering::Acquire)
    };
    // One that does not leave wants a lock that this thread holds.
    watch(waiter.thread, LOOKS_TO_LEAVE, has_left) == Rest::Done
}

/// Waits until a woken thread waits again (here, or asleep elsewhere) or has ended.
fn settle(thread: i64) -> bool {
    let waits_again = || waiters().iter().any(|waiter| waiter.thread == thread);
    let rest = watch(thread, LOOKS_ASLEEP, || {
        waits_again() || {
            real::sleep(LOOK);
            waits_again()
        }
    });
    rest != Rest::None
}

/// How looking at a thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// It has done what it was looked at for.
    Done,
    /// It sleeps, and nobody is about to wake it.
    Asleep,
    /// It never came to rest.
    None,
}

/// Looks at a thread until `is_done`, or it has slept for so many looks and all others sleep, too.
fn watch(thread: i64, looks: u32, mut is_done: impl FnMut() -> bool) -> Rest {
    let is_restless = RESTLESS.lock().unwrap_or_else(PoisonError::into_inner).contains(&thread);
    let patience = if is_restless { LITTLE_PATIENCE } else { PATIENCE }.as_nanos() as i64;
    let start = real_ns();
    let (mut awake_at, mut busy_at, mut asleep) = (start, start, 0);
    loop {
        if is_done() {
            return Rest::Done;
        }
        let now = real_ns();
        let is_awake = sleep_of(thread) == Sleep::Awake;
        if is_awake || OTHERS_AT_ENGINE.load(Ordering::Acquire) > 0 {
            (busy_at, asleep) = (now, 0);
        } else {
            asleep += 1;
        }
        if is_awake {
            awake_at = now;
        } else if now - awake_at >= AT_ENGINE_FOR_GOOD.as_nanos() as i64 {
            return Rest::Asleep;
        }
        if asleep >= looks && (now - busy_at >= SURELY_ASLEEP.as_nanos() as i64 || all_others_sleep()) {
            return Rest::Asleep;
        }
        if now - start >= patience {
            RESTLESS.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
            return Rest::None;
        }
    }
}

fn real_ns() -> i64 {
    real::clock_ns(libc::CLOCK_MONOTONIC)
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sleep {
    /// Waits for another thread of the process, as far as one can tell, or has ended.
    Here,
    /// Waits for a descriptor or a child: another process.
    Elsewhere,
    /// Runs, or would if it had a processor.
    Awake,
}

/// What a thread of this process does.
fn sleep_of(thread: i64) -> Sleep {
    let Ok(text) = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")) else { return Sleep::Here };
    // The state follows the command's name, which is in parentheses and may contain anything.
    match text.rsplit(')').next().and_then(|rest| rest.trim_start().as_bytes().first()) {
        Some(b'Z' | b'X') => return Sleep::Here,
        Some(b'S') => {}
        _ => return Sleep::Awake,
    }
    // The number of the system call it is in; not every kernel tells.
    let Ok(call) = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")) else { return Sleep::Here };
    let number = call.split_whitespace().next().and_then(|number| number.parse::<libc::c_long>().ok());
    let is_elsewhere = number.is_some_and(|number| ELSEWHERE_CALLS.contains(&number));
    if is_elsewhere { Sleep::Elsewhere } else { Sleep::Here }
}

/// System calls in which a thread waits for another process.
const ELSEWHERE_CALLS: [libc::c_long; 16] = [
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_pwait,
    libc::SYS_wait4,
    libc::SYS_waitid,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(not(target_arch = "x86_64"))]
    libc::SYS_accept,
];

/// The least sleepy of the threads that drive the device.
fn drivers_sleep() -> Sleep {
    let drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    drivers.iter().map(|thread| sleep_of(*thread)).max().unwrap_or(Sleep::Here)
}

/// Do all threads but the calling one sleep?
fn all_others_sleep() -> bool {
    let own = thread_id();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return true };
    let ids = threads.flatten().filter_map(|thread| thread.file_name().to_str()?.parse::<i64>().ok());
    ids.filter(|id| *id != own).all(|id| sleep_of(id) != Sleep::Awake)
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
