//! Work on one stream is serial: durations that run past the next start are wrong.

use super::event::{Names, RankTrace};
use serde::Serialize;

/// Overlaps up to this are rounding and early launches of dependent kernels, and not called corrupt.
pub const ROUNDING: i64 = 10_000;

/// Sums of durations on the device before and after repair, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// As recorded.
    pub before_ns: i128,
    /// As used.
    pub after_ns: i128,
}

/// Clips every duration to the next start on its stream, and sorts activities by stream and start.
pub fn clip(trace: &mut RankTrace, rank: u32, names: &Names) -> Totals {
    let mut totals = Totals::default();
    trace.activities.sort_by_key(|activity| (activity.stream, activity.start, activity.end()));
    let mut index = 0_u64;
    for at in 0..trace.activities.len() {
        let activity = trace.activities[at];
        totals.before_ns += i128::from(activity.duration);
        index = if at > 0 && trace.activities[at - 1].stream == activity.stream { index + 1 } else { 0 };
        let next = trace.activities.get(at + 1).filter(|next| next.stream == activity.stream);
        if let Some(excess) = next.map(|next| activity.end() - next.start).filter(|excess| *excess > 0) {
            trace.activities[at].duration = (activity.duration - excess).max(0);
            let (start, duration) = (activity.start / 1000, activity.duration / 1000);
            let text = || {
                format!(
                    "rank {rank}, stream {}, event {} ({}): {duration} us from {start} us run {} us past the next start",
                    activity.stream.1,
                    index + 1,
                    names.text(activity.name),
                    excess / 1000
                )
            };
            trace.notes.add(if excess > ROUNDING { "corrupt_durations" } else { "rounded_durations" }, text);
        }
        totals.after_ns += i128::from(trace.activities[at].duration);
    }
    totals
}
