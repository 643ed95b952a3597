//! The libc functions that read or wait for the host clock. They follow [`crate::clock`] once the process has a session,
//! and are the originals before that, in forked children, and inside this library.
//!
//! A sleep of a thread that drives the device advances virtual time and returns nearly at once: after a real millisecond at
//! most, so that a loop which polls another process meets one that has got on. A timed wait of such a thread (condition
//! variable, semaphore) really waits, for as long as is left of its virtual deadline, and has run out in virtual time once it
//! has run out in real time. Sleeps and timed waits of other threads run out in virtual time: see [`crate::handoff`].
//! The exception is Python's interpreter lock: how long, and how often, a thread waits for it is an accident of the machine,
//! so that costs no virtual time.

use crate::handoff::{self, Wake};
use crate::original::{Original, original};
use crate::{clock, python, real, session};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SECOND: i64 = 1_000_000_000;
/// At the end of the process: real time after which a timed wait looks whether threads have been halted.
const LAST_SLICE: Duration = Duration::from_millis(20);
/// Has a thread been halted by [`pthread_exit`]?
static HAS_HALTED: AtomicBool = AtomicBool::new(false);
/// Real time that a sleep of a thread that drives the device takes at most.
const LONGEST_DRIVER_SLEEP: Duration = Duration::from_millis(1);

static PTHREAD_EXIT: Original = Original::new(c"pthread_exit", None);
static CLOCK_GETTIME: Original = Original::new(c"clock_gettime", None);
static GETTIMEOFDAY: Original = Original::new(c"gettimeofday", None);
static TIME: Original = Original::new(c"time", None);
static COND_TIMEDWAIT: Original = Original::new(c"pthread_cond_timedwait", Some(c"GLIBC_2.3.2"));
static COND_CLOCKWAIT: Original = Original::new(c"pthread_cond_clockwait", None);
static SEM_WAIT: Original = Original::new(c"sem_wait", None);
static SEM_TRYWAIT: Original = Original::new(c"sem_trywait", None);
static SEM_TIMEDWAIT: Original = Original::new(c"sem_timedwait", None);
static SEM_CLOCKWAIT: Original = Original::new(c"sem_clockwait", None);

fn timespec(ns: i64) -> libc::timespec {
    libc::timespec { tv_sec: ns.div_euclid(SECOND), tv_nsec: ns.rem_euclid(SECOND) }
}

/// A timespec in ns, or `None` if it is malformed.
fn nanoseconds(time: &libc::timespec) -> Option<i64> {
    if !(0..SECOND).contains(&time.tv_nsec) {
        return None;
    }
    Some(time.tv_sec.saturating_mul(SECOND).saturating_add(time.tv_nsec))
}

fn set_errno(value: c_int) {
    // SAFETY: the location is the calling thread's own errno.
    unsafe { *libc::__errno_location() = value };
}

/// # Safety
/// As for `clock_gettime(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(id: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    type Function = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> c_int;
    if clock::is_virtual()
        && let Some(base) = clock::base(id)
        && !time.is_null()
    {
        // SAFETY: the caller's pointer, not null.
        unsafe { time.write(timespec(base + clock::read())) };
        return 0;
    }
    original!(CLOCK_GETTIME, Function, -1, (id, time))
}

/// # Safety
/// As for `gettimeofday(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut libc::timeval, zone: *mut c_void) -> c_int {
    type Function = unsafe extern "C" fn(*mut libc::timeval, *mut c_void) -> c_int;
    if clock::is_virtual()
        && let Some(base) = clock::base(libc::CLOCK_REALTIME)
        && !time.is_null()
    {
        let now = timespec(base + clock::read());
        // SAFETY: the caller's pointer, not null.
        unsafe { time.write(libc::timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1_000 }) };
        return 0;
    }
    original!(GETTIMEOFDAY, Function, -1, (time, zone))
}

/// # Safety
/// As for `time(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(result: *mut libc::time_t) -> libc::time_t {
    type Function = unsafe extern "C" fn(*mut libc::time_t) -> libc::time_t;
    if clock::is_virtual()
        && let Some(base) = clock::base(libc::CLOCK_REALTIME)
    {
        let seconds = (base + clock::read()).div_euclid(SECOND);
        if !result.is_null() {
            // SAFETY: the caller's pointer, not null.
            unsafe { result.write(seconds) };
        }
        return seconds;
    }
    original!(TIME, Function, -1, (result))
}

/// Sleeps until `deadline` on the virtual clock.
fn sleep_until(deadline: i64) {
    let left = Duration::from_nanos(u64::try_from(deadline.saturating_sub(clock::thread_now())).unwrap_or(0));
    if clock::is_driver() {
        real::sleep(left.min(LONGEST_DRIVER_SLEEP));
        clock::waited_until(deadline);
        handoff::point();
    } else if let Some(waiter) = handoff::enter(deadline, Wake::Flag) {
        handoff::polled_wait(&waiter, |time| {
            real::sleep(time);
            false
        });
    } else {
        real::sleep(left);
        clock::waited_until(deadline);
    }
}

fn sleep_for(ns: i64) {
    sleep_until(clock::thread_now().saturating_add(ns));
}

/// # Safety
/// As for `nanosleep(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(request: *const libc::timespec, rest: *mut libc::timespec) -> c_int {
    if clock::is_virtual() && !request.is_null() {
        // SAFETY: the caller's pointer, not null.
        let Some(ns) = nanoseconds(unsafe { &*request }).filter(|ns| *ns >= 0) else {
            set_errno(libc::EINVAL);
            return -1;
        };
        sleep_for(ns);
        return 0;
    }
    // SAFETY: the caller's arguments, passed on.
    unsafe { libc::syscall(libc::SYS_nanosleep, request, rest) as c_int }
}

/// # Safety
/// As for `clock_nanosleep(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_nanosleep(
    id: libc::clockid_t,
    flags: c_int,
    request: *const libc::timespec,
    rest: *mut libc::timespec,
) -> c_int {
    if clock::is_virtual()
        && let Some(base) = clock::base(id)
        && !request.is_null()
    {
        // SAFETY: the caller's pointer, not null.
        let Some(ns) = nanoseconds(unsafe { &*request }).filter(|ns| *ns >= 0) else {
            return libc::EINVAL;
        };
        if flags & libc::TIMER_ABSTIME != 0 {
            sleep_until(ns - base);
        } else {
            sleep_for(ns);
        }
        return 0;
    }
    // SAFETY: the caller's arguments, passed on.
    let rc = unsafe {
        libc::syscall(libc::SYS_clock_nanosleep, libc::c_long::from(id), libc::c_long::from(flags), request, rest)
    };
    if rc == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL) }
}

/// As `usleep(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn usleep(microseconds: c_uint) -> c_int {
    let ns = i64::from(microseconds) * 1_000;
    if clock::is_virtual() {
        sleep_for(ns);
        return 0;
    }
    let request = timespec(ns);
    // SAFETY: the request names the timespec above; no rest is asked for.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const request, std::ptr::null_mut::<libc::timespec>()) as c_int }
}

/// As `sleep(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn sleep(seconds: c_uint) -> c_uint {
    if clock::is_virtual() {
        sleep_for(i64::from(seconds) * SECOND);
        return 0;
    }
    let mut left = timespec(i64::from(seconds) * SECOND);
    // SAFETY: both pointers name the timespec above.
    let rc = unsafe { libc::syscall(libc::SYS_nanosleep, &raw const left, &raw mut left) };
    if rc == 0 { 0 } else { (left.tv_sec + i64::from(left.tv_nsec > 0)) as c_uint }
}

/// Which clock an absolute deadline of a condition variable is on. The variable does not tell portably; the real-time
/// clock shows decades, the monotonic one the machine's uptime.
fn deadline_clock(deadline: i64) -> libc::clockid_t {
    const THREE_YEARS: i64 = 100_000_000 * SECOND;
    if deadline > THREE_YEARS { libc::CLOCK_REALTIME } else { libc::CLOCK_MONOTONIC }
}

/// The real form of an absolute deadline on the virtual form of clock `id`: as much later as is left of it.
fn real_deadline(id: libc::clockid_t, deadline: i64) -> libc::timespec {
    let until = deadline.saturating_sub(clock::base(id).unwrap_or(0));
    let left = until.saturating_sub(clock::thread_now()).max(0);
    timespec(real::clock_ns(id).saturating_add(left))
}

/// Waits for Python's interpreter lock with `wait(real deadline)`. Python reads the clock once before each such wait.
fn lock_wait(id: libc::clockid_t, deadline: i64, wait: impl FnOnce(*const libc::timespec) -> c_int) -> c_int {
    let until = real_deadline(id, deadline);
    clock::refund_read();
    wait(&raw const until)
}

/// A moment of the real form of clock `id`: this long from now.
fn real_moment(id: libc::clockid_t, from_now: Duration) -> libc::timespec {
    timespec(real::clock_ns(id).saturating_add(i64::try_from(from_now.as_nanos()).unwrap_or(i64::MAX)))
}

/// Waits on a condition variable with `wait(real deadline)` for an absolute deadline on the virtual form of clock `id`.
fn condition_wait(
    cond: *mut libc::pthread_cond_t,
    id: libc::clockid_t,
    deadline: i64,
    wait: impl FnOnce(*const libc::timespec) -> c_int,
) -> c_int {
    let until = deadline.saturating_sub(clock::base(id).unwrap_or(0));
    if until > clock::thread_now()
        && let Some(waiter) = handoff::enter(until, Wake::Condition(cond as usize))
    {
        return handoff::condition_wait(&waiter, |time| {
            let moment = real_moment(id, time);
            wait(&raw const moment)
        });
    }
    if !clock::is_driver() || (session::is_connected() && !python::is_finalizing()) {
        let moment = real_deadline(id, deadline);
        let result = wait(&raw const moment);
        if result == libc::ETIMEDOUT {
            clock::waited_until(until);
        }
        return result;
    }
    let left = Duration::from_nanos(u64::try_from(until.saturating_sub(clock::thread_now())).unwrap_or(0));
    let moment = real_moment(id, left.min(LAST_SLICE));
    let result = wait(&raw const moment);
    if result != libc::ETIMEDOUT {
        return result;
    }
    // Halted threads cannot be waited for: the wait has run out. Else the caller looks and waits again.
    let is_over = left <= LAST_SLICE || HAS_HALTED.load(Ordering::Relaxed);
    // Only for this thread: others still look at the clock, and hours that passed at once would alarm them.
    clock::waited_alone(if is_over { until } else { clock::thread_now() + LAST_SLICE.as_nanos() as i64 });
    if is_over { result } else { 0 }
}

/// Waits on a semaphore with `wait(real deadline)`, as [`condition_wait`].
fn semaphore_wait(id: libc::clockid_t, deadline: i64, wait: impl Fn(*const libc::timespec) -> c_int) -> c_int {
    let until = deadline.saturating_sub(clock::base(id).unwrap_or(0));
    if until > clock::thread_now()
        && let Some(waiter) = handoff::enter(until, Wake::Flag)
    {
        let is_posted = handoff::polled_wait(&waiter, |time| {
            let moment = real_moment(id, time);
            wait(&raw const moment) == 0
        });
        if is_posted {
            return 0;
        }
        set_errno(libc::ETIMEDOUT);
        return -1;
    }
    let moment = real_deadline(id, deadline);
    let result = wait(&raw const moment);
    if result == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ETIMEDOUT) {
        clock::waited_until(until);
        set_errno(libc::ETIMEDOUT);
    }
    result
}

/// The virtual deadline of a timed wait: `None` if the wait is to be left to libc.
///
/// # Safety
/// `deadline` must be null or readable.
unsafe fn virtual_deadline(deadline: *const libc::timespec) -> Option<i64> {
    if deadline.is_null() || !clock::is_virtual() {
        return None;
    }
    // SAFETY: not null, and readable by the contract of this function.
    nanoseconds(unsafe { &*deadline })
}

/// # Safety
/// As for `pthread_cond_timedwait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_cond_timedwait(
    cond: *mut libc::pthread_cond_t,
    mutex: *mut libc::pthread_mutex_t,
    deadline: *const libc::timespec,
) -> c_int {
    type Function =
        unsafe extern "C" fn(*mut libc::pthread_cond_t, *mut libc::pthread_mutex_t, *const libc::timespec) -> c_int;
    let wait = |deadline| original!(COND_TIMEDWAIT, Function, libc::ENOSYS, (cond, mutex, deadline));
    // SAFETY: the caller's deadline.
    match unsafe { virtual_deadline(deadline) } {
        Some(ns) if python::is_of_interpreter(cond as usize) => lock_wait(deadline_clock(ns), ns, wait),
        Some(ns) => condition_wait(cond, deadline_clock(ns), ns, wait),
        None => wait(deadline),
    }
}

/// # Safety
/// As for `pthread_cond_clockwait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_cond_clockwait(
    cond: *mut libc::pthread_cond_t,
    mutex: *mut libc::pthread_mutex_t,
    id: libc::clockid_t,
    deadline: *const libc::timespec,
) -> c_int {
    type Function = unsafe extern "C" fn(
        *mut libc::pthread_cond_t,
        *mut libc::pthread_mutex_t,
        libc::clockid_t,
        *const libc::timespec,
    ) -> c_int;
    let wait = |deadline| original!(COND_CLOCKWAIT, Function, libc::ENOSYS, (cond, mutex, id, deadline));
    // SAFETY: the caller's deadline.
    match unsafe { virtual_deadline(deadline) } {
        Some(ns) if clock::base(id).is_some() => condition_wait(cond, id, ns, wait),
        _ => wait(deadline),
    }
}

/// # Safety
/// As for `sem_wait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sem_wait(semaphore: *mut libc::sem_t) -> c_int {
    if clock::is_virtual() {
        clock::refund_lock_read();
    }
    original!(SEM_WAIT, unsafe extern "C" fn(*mut libc::sem_t) -> c_int, -1, (semaphore))
}

/// # Safety
/// As for `sem_trywait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sem_trywait(semaphore: *mut libc::sem_t) -> c_int {
    if clock::is_virtual() {
        clock::refund_lock_read();
    }
    original!(SEM_TRYWAIT, unsafe extern "C" fn(*mut libc::sem_t) -> c_int, -1, (semaphore))
}

/// # Safety
/// As for `sem_timedwait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sem_timedwait(semaphore: *mut libc::sem_t, deadline: *const libc::timespec) -> c_int {
    type Function = unsafe extern "C" fn(*mut libc::sem_t, *const libc::timespec) -> c_int;
    let wait = |deadline| original!(SEM_TIMEDWAIT, Function, -1, (semaphore, deadline));
    // SAFETY: the caller's deadline.
    match unsafe { virtual_deadline(deadline) } {
        Some(ns) => semaphore_wait(libc::CLOCK_REALTIME, ns, wait),
        None => wait(deadline),
    }
}

/// # Safety
/// As for `sem_clockwait(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sem_clockwait(
    semaphore: *mut libc::sem_t,
    id: libc::clockid_t,
    deadline: *const libc::timespec,
) -> c_int {
    type Function = unsafe extern "C" fn(*mut libc::sem_t, libc::clockid_t, *const libc::timespec) -> c_int;
    let wait = |deadline| original!(SEM_CLOCKWAIT, Function, -1, (semaphore, id, deadline));
    // SAFETY: the caller's deadline.
    match unsafe { virtual_deadline(deadline) } {
        Some(ns) if clock::base(id).is_some() => semaphore_wait(id, ns, wait),
        _ => wait(deadline),
    }
}

/// As `pthread_exit(3)`, except that Python's interpreter, while it is torn down, halts a thread that asks for its lock
/// instead of ending it, as newer versions do by themselves: ending it unwinds C++ frames that must not be unwound, and the
/// process aborts. An emulated backward pass is over so soon that threads it started are still asking.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pthread_exit(result: *mut c_void) -> ! {
    type Function = unsafe extern "C-unwind" fn(*mut c_void) -> !;
    if session::has_clock() && python::is_finalizing() {
        HAS_HALTED.store(true, Ordering::Relaxed);
        loop {
            // SAFETY: waits for a signal; the end of the process ends it.
            unsafe { libc::pause() };
        }
    }
    original!(PTHREAD_EXIT, Function, std::process::abort(), (result))
}
