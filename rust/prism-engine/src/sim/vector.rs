//! The loops over all ranks of a role. Nearly all time of a large replay is spent here, so they are plain loops over equally
//! long slices that the compiler turns into vector code ([`crate::wide`]).
//!
//! Additions do not saturate: [`super::program`] refuses programs whose durations could leave the range.

use crate::units::SimTime;
use crate::wide::wide;

wide! {
    /// An op without duration: the stream has come to the time the host issued it.
    pub(super) fn raise(clock: &mut [SimTime], issue: &[SimTime], offset: SimTime) {
        for (clock, issue) in clock.iter_mut().zip(issue) {
            clock.0 = clock.0.max(issue.0 + offset.0);
        }
    }

    /// The same for a wait for other times.
    pub(super) fn raise_to(clock: &mut [SimTime], issue: &[SimTime], offset: SimTime, other: &[SimTime]) {
        for ((clock, issue), other) in clock.iter_mut().zip(issue).zip(other) {
            clock.0 = clock.0.max(issue.0 + offset.0).max(other.0);
        }
    }

    /// An op of the same duration on every rank.
    pub(super) fn run(clock: &mut [SimTime], issue: &[SimTime], offset: SimTime, duration: SimTime) {
        for (clock, issue) in clock.iter_mut().zip(issue) {
            clock.0 = clock.0.max(issue.0 + offset.0) + duration.0;
        }
    }

    /// An op with a duration per rank.
    pub(super) fn run_each(clock: &mut [SimTime], issue: &[SimTime], offset: SimTime, durations: &[SimTime]) {
        for ((clock, issue), duration) in clock.iter_mut().zip(issue).zip(durations) {
            clock.0 = clock.0.max(issue.0 + offset.0) + duration.0;
        }
    }

    /// When a stream comes to an op, without its clock being moved.
    pub(super) fn arrive(into: &mut [SimTime], clock: &[SimTime], issue: &[SimTime], offset: SimTime) {
        for ((into, clock), issue) in into.iter_mut().zip(clock).zip(issue) {
            into.0 = clock.0.max(issue.0 + offset.0);
        }
    }

    /// Waits for other times.
    pub(super) fn wait(clock: &mut [SimTime], other: &[SimTime]) {
        for (clock, other) in clock.iter_mut().zip(other) {
            clock.0 = clock.0.max(other.0);
        }
    }

    /// So much earlier.
    pub(super) fn earlier(times: &mut [SimTime], by: SimTime) {
        for time in times {
            time.0 -= by.0;
        }
    }

    /// `into = from + offset`.
    pub(super) fn shift(into: &mut [SimTime], from: &[SimTime], offset: SimTime) {
        for (into, from) in into.iter_mut().zip(from) {
            into.0 = from.0 + offset.0;
        }
    }

    /// Messages of two halves each: `send` and `receive` become their ends, which are so long after both have come. Returns the
    /// latest arrival; ends may have wrapped if that is out of range.
    pub(super) fn meet(send: &mut [SimTime], receive: &mut [SimTime], sent: SimTime, received: SimTime) -> SimTime {
        let mut latest = 0;
        for (send, receive) in send.iter_mut().zip(receive) {
            let arrival = send.0.max(receive.0);
            latest = latest.max(arrival);
            send.0 = arrival.wrapping_add(sent.0);
            receive.0 = arrival.wrapping_add(received.0);
        }
        SimTime(latest)
    }

    /// Sums of the low and of the high 32 bits of `ends - starts`, and the least of them.
    fn halves(ends: &[SimTime], starts: &[SimTime]) -> (u64, u64, i64) {
        let (mut low, mut high, mut least) = (0, 0, i64::MAX);
        for (end, start) in ends.iter().zip(starts) {
            let difference = end.0.wrapping_sub(start.0);
            least = least.min(difference);
            low += difference as u64 & 0xffff_ffff;
            high += difference as u64 >> 32;
        }
        (low, high, least)
    }
}

/// How much later than `before` all of `now` are, if all are by the same.
pub(super) fn lag(now: &[SimTime], before: &[SimTime]) -> Option<SimTime> {
    let lag = now.first()?.0 - before.first()?.0;
    // Whole blocks at a time, so that the comparison is vector code but ends early where the patterns differ.
    let is_same = |(now, before): (&[SimTime], &[SimTime])| {
        now.iter().zip(before).fold(0, |differs, (now, before)| differs | ((now.0 - before.0) ^ lag)) == 0
    };
    now.chunks(64).zip(before.chunks(64)).all(is_same).then_some(SimTime(lag))
}

/// What times differ by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spent {
    /// The sum.
    pub(super) total: i128,
    /// The least of them.
    pub(super) least: i64,
}

/// `ends - starts`. Low and high halves are summed apart, exactly; if some difference is negative, only the least is right.
pub(super) fn spent(ends: &[SimTime], starts: &[SimTime]) -> Spent {
    let mut spent = Spent { total: 0, least: i64::MAX };
    for (ends, starts) in ends.chunks(1 << 16).zip(starts.chunks(1 << 16)) {
        let (low, high, least) = halves(ends, starts);
        spent.total += i128::from(low) + (i128::from(high) << 32);
        spent.least = spent.least.min(least);
    }
    spent
}
