//! The session's clock on a real device: the machine's, from an epoch that all ranks of the session share.

use std::time::Duration;

/// Environment variable with the epoch: ns of the monotonic clock. The launcher sets it.
const ENV_EPOCH: &str = "PRISM_EPOCH_NS";

/// Nanoseconds since the session's epoch.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    epoch_ns: i64,
}

fn monotonic_ns() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

impl Clock {
    /// From the epoch the environment says, else from now. The error is what it says instead.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let now = monotonic_ns();
        match std::env::var(ENV_EPOCH) {
            Err(_) => Ok(Self { epoch_ns: now }),
            Ok(text) => match text.parse() {
                Ok(epoch_ns) if (0..=now).contains(&epoch_ns) => Ok(Self { epoch_ns }),
                _ => Err(format!("{ENV_EPOCH}={text} is no time of this machine's monotonic clock")),
            },
        }
    }

    /// The time.
    #[inline]
    pub(crate) fn now(self) -> i64 {
        monotonic_ns() - self.epoch_ns
    }
}

/// Lets the calling thread sleep with the kernel's finest timer (the default rounds up by 50 us).
pub(crate) fn make_sleep_precise() {
    // SAFETY: takes numbers; where it fails, sleeps are coarser and the release errors show it.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64, 0_u64, 0_u64, 0_u64) };
}

/// Sleeps for about so long.
pub(crate) fn nap(ns: u64) {
    std::thread::sleep(Duration::from_nanos(ns));
}
