//! Waits for descriptors with a timeout. They really wait; when one has run out, that time has passed for the calling thread,
//! so that a caller who then looks at the clock sees its deadline behind it.

use crate::clock;
use crate::original::{Original, original};
use std::ffi::{c_int, c_void};

static POLL: Original = Original::new(c"poll", None);
static PPOLL: Original = Original::new(c"ppoll", None);
static SELECT: Original = Original::new(c"select", None);
static PSELECT: Original = Original::new(c"pselect", None);
static EPOLL_WAIT: Original = Original::new(c"epoll_wait", None);
static EPOLL_PWAIT: Original = Original::new(c"epoll_pwait", None);

/// Calls `wait`, which returns 0 when its timeout of `timeout_ns` (negative: none) has run out.
fn wait_at_most(timeout_ns: i64, wait: impl FnOnce() -> c_int) -> c_int {
    if timeout_ns <= 0 || !clock::is_virtual() {
        return wait();
    }
    let until = clock::thread_now().saturating_add(timeout_ns);
    let result = wait();
    if result == 0 {
        clock::waited_until(until);
    }
    result
}

fn milliseconds(timeout: c_int) -> i64 {
    i64::from(timeout) * 1_000_000
}

/// A timeout in ns; none for null.
///
/// # Safety
/// `timeout` must be null or valid.
unsafe fn timespec(timeout: *const libc::timespec) -> i64 {
    // SAFETY: the contract of this function.
    unsafe { timeout.as_ref() }
        .map_or(-1, |time| time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec))
}

/// # Safety
/// As for `poll(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(list: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    type Function = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
    wait_at_most(milliseconds(timeout), || original!(POLL, Function, -1, (list, count, timeout)))
}

/// # Safety
/// As for `ppoll(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    list: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    signals: *const libc::sigset_t,
) -> c_int {
    type Function =
        unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t) -> c_int;
    // SAFETY: the caller's timeout.
    let timeout_ns = unsafe { timespec(timeout) };
    wait_at_most(timeout_ns, || original!(PPOLL, Function, -1, (list, count, timeout, signals)))
}

/// # Safety
/// As for `select(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    type Set = *mut libc::fd_set;
    type Function = unsafe extern "C" fn(c_int, Set, Set, Set, *mut libc::timeval) -> c_int;
    // SAFETY: the caller's timeout, null or valid. Read before the call, which overwrites it with what is left.
    let timeout_ns = unsafe { timeout.as_ref() }
        .map_or(-1, |time| time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_usec * 1_000));
    wait_at_most(timeout_ns, || original!(SELECT, Function, -1, (count, read, write, except, timeout)))
}

/// # Safety
/// As for `pselect(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *const libc::timespec,
    signals: *const libc::sigset_t,
) -> c_int {
    type Set = *mut libc::fd_set;
    type Function = unsafe extern "C" fn(c_int, Set, Set, Set, *const libc::timespec, *const libc::sigset_t) -> c_int;
    // SAFETY: the caller's timeout.
    let timeout_ns = unsafe { timespec(timeout) };
    wait_at_most(timeout_ns, || original!(PSELECT, Function, -1, (count, read, write, except, timeout, signals)))
}

/// # Safety
/// As for `epoll_wait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(instance: c_int, events: *mut c_void, count: c_int, timeout: c_int) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *mut c_void, c_int, c_int) -> c_int;
    wait_at_most(milliseconds(timeout), || original!(EPOLL_WAIT, Function, -1, (instance, events, count, timeout)))
}

/// # Safety
/// As for `epoll_pwait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    instance: c_int,
    events: *mut c_void,
    count: c_int,
    timeout: c_int,
    signals: *const libc::sigset_t,
) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *mut c_void, c_int, c_int, *const libc::sigset_t) -> c_int;
    wait_at_most(milliseconds(timeout), || {
        original!(EPOLL_PWAIT, Function, -1, (instance, events, count, timeout, signals))
    })
}
