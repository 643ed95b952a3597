//! What the benchmarks measure with: CPU time of a thread, and memory of the process.

#![allow(dead_code, reason = "not every benchmark asks for everything")]

use std::fs;
use std::time::Duration;

/// Runs something again and again; its CPU time on this thread. The kernel counts that in steps of some milliseconds.
pub(crate) fn cpu<T>(mut f: impl FnMut() -> T) -> Duration {
    let (start, mut runs) = (cpu_time(), 0);
    loop {
        f();
        runs += 1;
        let taken = cpu_time().saturating_sub(start);
        if taken > Duration::from_millis(250) {
            return taken / runs;
        }
    }
}

/// CPU time of this thread so far.
pub(crate) fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    Duration::from_nanos(text.split(' ').next().and_then(|ns| ns.parse().ok()).expect("a number"))
}

/// Most memory the process has had so far, bytes.
pub(crate) fn peak_rss() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}
