//! The real clocks and the real standard error, whatever the virtual clock does.

use std::time::Duration;

/// Reads a clock of the kernel, never the virtual one. Nanoseconds; 0 if the kernel refuses the clock.
pub(crate) fn clock_ns(id: libc::clockid_t) -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system call writes one timespec, which lives on this stack frame.
    let rc = unsafe { libc::syscall(libc::SYS_clock_gettime, libc::c_long::from(id), &raw mut time) };
    if rc == 0 { time.tv_sec * 1_000_000_000 + time.tv_nsec } else { 0 }
}

/// Really sleeps.
pub(crate) fn sleep(duration: Duration) {
    let mut left =
        libc::timespec { tv_sec: duration.as_secs() as libc::time_t, tv_nsec: i64::from(duration.subsec_nanos()) };
    // SAFETY: both pointers name the timespec above, which the kernel reads and then overwrites with the rest.
    while unsafe { libc::syscall(libc::SYS_nanosleep, &raw const left, &raw mut left) } == -1 {
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return;
        }
    }
}

/// Writes `text` to standard error in one system call.
pub(crate) fn log(text: &str) {
    // SAFETY: the buffer is valid for its length. A failed write to stderr has nowhere to be reported.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}
