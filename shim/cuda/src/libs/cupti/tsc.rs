//! The processor's time stamp counter in virtual time.
//!
//! PyTorch's profiler stamps its own events with the counter (`rdtsc`), reads it beside the host clock at both ends of a
//! profile, and takes time as linear in between. Virtual time is not linear in real time, so while a profiler listens the
//! counter has to be virtual, too: the kernel is asked to trap the instruction (`prctl(PR_SET_TSC)`), on every thread, and
//! the handler answers with one tick per virtual nanosecond. Programs started meanwhile get their counter back.
//!
//! Each reading then takes some microseconds of real time and none of virtual time. Where the kernel cannot trap, profiles
//! have no device activities ([`start`] says no).

use crate::original::{Original, original};
use crate::{clock, real, unsupported};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// `PR_TSC_ENABLE`, `PR_TSC_SIGSEGV`.
const FREE: c_int = 1;
const TRAPPED: c_int = 2;

/// What every thread is to have: [`FREE`] or [`TRAPPED`].
static STATE: AtomicI32 = AtomicI32::new(FREE);
/// Counter and virtual time at the first start.
static BASE_TICKS: AtomicU64 = AtomicU64::new(0);
static BASE_NS: AtomicI64 = AtomicI64::new(0);
static HAS_BASE: AtomicBool = AtomicBool::new(false);
/// Are records stamped with the counter? Else with the time of day.
static USES_COUNTER: AtomicBool = AtomicBool::new(false);
/// The signal that asks a thread to take over [`STATE`]; 0: not chosen yet.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Threads that have taken it over.
static ANSWERS: AtomicU32 = AtomicU32::new(0);
/// Serialises starts and stops, and keeps the handler of faults that was there before.
static BEFORE: Mutex<Option<libc::sigaction>> = Mutex::new(None);
/// The same handler for the signal handler itself: action address, flags.
static CHAIN: AtomicU64 = AtomicU64::new(0);
static CHAIN_FLAGS: AtomicI32 = AtomicI32::new(0);

/// The time stamp of a virtual time in a record.
pub(super) fn stamp(virtual_ns: i64) -> u64 {
    if USES_COUNTER.load(Ordering::Relaxed) {
        ticks(virtual_ns)
    } else {
        (virtual_ns + clock::base(libc::CLOCK_REALTIME).unwrap_or(0)) as u64
    }
}

fn ticks(virtual_ns: i64) -> u64 {
    let since = virtual_ns - BASE_NS.load(Ordering::Relaxed);
    BASE_TICKS.load(Ordering::Relaxed).wrapping_add_signed(since)
}

/// From now on records are stamped with the counter.
pub(super) fn use_counter() {
    USES_COUNTER.store(true, Ordering::Relaxed);
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "x86_64")]
fn set(state: c_int) -> bool {
    // SAFETY: the call takes plain numbers and changes how the calling thread may read the counter, nothing else.
    unsafe { libc::prctl(libc::PR_SET_TSC, state, 0, 0, 0) == 0 }
}

/// Other processors' profilers do not use such a counter.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn start() -> bool {
    true
}

/// See [`start`].
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn stop() {}

/// Makes the counter virtual on all threads. False: the kernel cannot.
#[cfg(target_arch = "x86_64")]
pub(super) fn start() -> bool {
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if STATE.load(Ordering::Acquire) == TRAPPED {
        return true;
    }
    if !HAS_BASE.swap(true, Ordering::AcqRel) {
        BASE_TICKS.store(counter(), Ordering::Relaxed);
        BASE_NS.store(clock::now(), Ordering::Relaxed);
    }
    let Some(previous) = install(libc::SIGSEGV, on_fault) else { return refuse() };
    CHAIN.store(previous.sa_sigaction as u64, Ordering::Relaxed);
    CHAIN_FLAGS.store(previous.sa_flags, Ordering::Relaxed);
    *before = Some(previous);
    STATE.store(TRAPPED, Ordering::Release);
    if !set(TRAPPED) {
        STATE.store(FREE, Ordering::Release);
        restore(before.take());
        return refuse();
    }
    tell_threads();
    true
}

fn refuse() -> bool {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| unsupported::call("cuptiActivityEnable (this kernel cannot trap the time stamp counter)"));
    false
}

/// Gives all threads the real counter back.
#[cfg(target_arch = "x86_64")]
pub(super) fn stop() {
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if STATE.swap(FREE, Ordering::AcqRel) != TRAPPED {
        return;
    }
    set(FREE);
    tell_threads();
    // A thread that did not hear of it still needs the handler: it gives the counter back on the next fault.
    let _ = before.take();
}

/// Installs a handler; what was there before.
fn install(signal: c_int, handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)) -> Option<libc::sigaction> {
    // SAFETY: both actions live on this stack frame; the handler is a function of this library, which is never unloaded.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut previous: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        if libc::sigaction(signal, std::ptr::null(), &raw mut previous) != 0 {
            return None;
        }
        if previous.sa_sigaction == action.sa_sigaction {
            previous.sa_sigaction = CHAIN.load(Ordering::Relaxed) as usize;
            previous.sa_flags = CHAIN_FLAGS.load(Ordering::Relaxed);
            return Some(previous);
        }
        (libc::sigaction(signal, &raw const action, std::ptr::null_mut()) == 0).then_some(previous)
    }
}

fn restore(previous: Option<libc::sigaction>) {
    if let Some(previous) = previous {
        // SAFETY: the action that was there before.
        unsafe { libc::sigaction(libc::SIGSEGV, &raw const previous, std::ptr::null_mut()) };
    }
}

/// A real-time signal that nobody handles.
fn free_signal() -> Option<c_int> {
    let known = SIGNAL.load(Ordering::Relaxed);
    if known != 0 {
        return Some(known);
    }
    let found = (libc::SIGRTMIN() + 8..libc::SIGRTMAX()).rev().find(|signal| {
        // SAFETY: the action lives on this stack frame and is only written.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(*signal, std::ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_DFL
        }
    })?;
    install(found, on_signal)?;
    SIGNAL.store(found, Ordering::Relaxed);
    Some(found)
}

/// Lets every other thread take over [`STATE`]. Threads that block signals keep what they have.
fn tell_threads() {
    let Some(signal) = free_signal() else { return };
    // SAFETY: both calls only return numbers.
    let (process, own) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    ANSWERS.store(0, Ordering::Release);
    let mut told = 0;
    for thread in threads.flatten() {
        let Some(id) = thread.file_name().to_str().and_then(|name| name.parse::<libc::c_long>().ok()) else { continue };
        // SAFETY: the signal's handler is ours; a thread that has ended meanwhile is refused.
        if id != own && unsafe { libc::syscall(libc::SYS_tgkill, process, id, signal) } == 0 {
            told += 1;
        }
    }
    for _ in 0..100 {
        if ANSWERS.load(Ordering::Acquire) >= told {
            return;
        }
        real::sleep(Duration::from_micros(100));
    }
}

extern "C" fn on_signal(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread.
    let blocked =
        unsafe { libc::sigismember(&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask, libc::SIGSEGV) };
    let state = STATE.load(Ordering::Acquire);
    // A fault on a thread that blocks faults would end the process.
    if state == FREE || blocked == 0 {
        set(state);
    }
    ANSWERS.fetch_add(1, Ordering::AcqRel);
}

/// A reading of the counter, or a real fault.
#[cfg(target_arch = "x86_64")]
extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = registers[libc::REG_RIP as usize] as *const u8;
    // SI_KERNEL: no address was at fault, as with a trapped instruction; then the instruction can be read.
    // SAFETY: the kernel passes a valid siginfo.
    let is_trap = unsafe { (*info).si_code } == SI_KERNEL;
    let length = if is_trap { counter_instruction(at) } else { 0 };
    if length == 0 {
        pass_on(signal, info, context);
        return;
    }
    let value = if STATE.load(Ordering::Acquire) != TRAPPED {
        // This thread was not told of the end.
        set(FREE);
        return;
    } else if clock::is_virtual() {
        // A thread that has not driven the device yet may be about to: its readings must not run ahead of its calls.
        ticks(if clock::is_driver() { clock::read() } else { clock::now() })
    } else {
        set(FREE);
        let value = counter();
        set(TRAPPED);
        value
    };
    registers[libc::REG_RAX as usize] = (value & 0xffff_ffff) as i64;
    registers[libc::REG_RDX as usize] = (value >> 32) as i64;
    if length == 3 {
        registers[libc::REG_RCX as usize] = 0;
    }
    registers[libc::REG_RIP as usize] += length;
}

/// `SI_KERNEL` (asm-generic/siginfo.h).
const SI_KERNEL: c_int = 0x80;

/// Length of `rdtsc` or `rdtscp` at an address; 0 for any other instruction.
#[cfg(target_arch = "x86_64")]
fn counter_instruction(at: *const u8) -> i64 {
    if at.is_null() {
        return 0;
    }
    // SAFETY: the thread was about to run the instruction here, so its first bytes can be read; the third is read only after
    // the first two of an instruction of three.
    unsafe {
        match (at.read(), at.add(1).read()) {
            (0x0f, 0x31) => 2,
            (0x0f, 0x01) if at.add(2).read() == 0xf9 => 3,
            _ => 0,
        }
    }
}

/// A fault that is none of ours: as if this handler were not there.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let address = CHAIN.load(Ordering::Relaxed) as usize;
    if address == libc::SIG_DFL || address == libc::SIG_IGN {
        // SAFETY: the action lives on this stack frame. The fault happens again and ends the process.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    } else if CHAIN_FLAGS.load(Ordering::Relaxed) & libc::SA_SIGINFO != 0 {
        // SAFETY: the handler that was there before, of this kind by its flags.
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(address) };
        handler(signal, info, context);
    } else {
        // SAFETY: as above.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(address) };
        handler(signal);
    }
}

/// A new program keeps how its parent may read the counter, but not the handler.
fn with_free_counter<T>(start: impl FnOnce() -> T) -> T {
    if STATE.load(Ordering::Acquire) != TRAPPED {
        return start();
    }
    set(FREE);
    let result = start();
    set(TRAPPED);
    result
}

/// A child of `fork` is not profiled.
pub(crate) fn after_fork() {
    if STATE.swap(FREE, Ordering::AcqRel) == TRAPPED {
        set(FREE);
    }
}

macro_rules! starters {
    ($($name:ident ( $($argument:ident : $kind:ty),* ) -> $result:ty = $missing:expr, $original:ident;)*) => { $(
        static $original: Original = Original::new(
            // SAFETY: the text ends with its only zero.
            unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            None,
        );

        /// As libc's function, for a program that may read the counter.
        ///
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            type Function = unsafe extern "C" fn($($kind),*) -> $result;
            with_free_counter(|| original!($original, Function, $missing, ($($argument),*)))
        }
    )* };
}

type Strings = *const *const c_char;

starters! {
    execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int = -1, EXECVE;
    execv(path: *const c_char, argv: Strings) -> c_int = -1, EXECV;
    execvp(file: *const c_char, argv: Strings) -> c_int = -1, EXECVP;
    execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int = -1, EXECVPE;
    fexecve(descriptor: c_int, argv: Strings, envp: Strings) -> c_int = -1, FEXECVE;
    execveat(folder: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int = -1, EXECVEAT;
    posix_spawn(
        child: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, argv: Strings,
        envp: Strings
    ) -> c_int = libc::ENOSYS, POSIX_SPAWN;
    posix_spawnp(
        child: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, argv: Strings,
        envp: Strings
    ) -> c_int = libc::ENOSYS, POSIX_SPAWNP;
    system(command: *const c_char) -> c_int = -1, SYSTEM;
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void = std::ptr::null_mut(), POPEN;
}

/// Has the calling thread's counter trapped, as a profile does. False: the kernel cannot.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) fn trap_for_test() -> bool {
    STATE.store(TRAPPED, Ordering::Release);
    set(TRAPPED)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn only_readings_of_the_counter_are_answered() {
        let length = |code: &[u8]| counter_instruction(code.as_ptr());
        assert_eq!(length(&[0x0f, 0x31, 0]), 2);
        assert_eq!(length(&[0x0f, 0x01, 0xf9]), 3);
        assert_eq!(length(&[0x0f, 0x01, 0xd0]), 0);
        assert_eq!(length(&[0x90, 0x31, 0]), 0);
        assert_eq!(counter_instruction(std::ptr::null()), 0);
    }

    #[test]
    fn a_virtual_nanosecond_is_a_tick() {
        assert_eq!(ticks(1_500).wrapping_sub(ticks(500)), 1_000);
    }
}
