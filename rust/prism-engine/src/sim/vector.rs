//! The loops over all ranks of a role. Nearly all time of a large replay is spent here, so they are plain loops over equally
//! long slices that the compiler turns into vector code.
//!
//! Additions do not saturate: [`super::program`] refuses programs whose durations could leave the range.

use crate::units::SimTime;

/// An op without duration: the stream has come to the time the host issued it.
pub(super) fn raise(clock: &mut [SimTime], issue: &[SimTime], offset: SimTime) {
    for (clock, issue) in clock.iter_mut().zip(issue) {
        clock.0 = clock.0.max(issue.0 + offset.0);
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

/// Waits for other times.
pub(super) fn wait(clock: &mut [SimTime], other: &[SimTime]) {
    for (clock, other) in clock.iter_mut().zip(other) {
        clock.0 = clock.0.max(other.0);
    }
}

/// `into = from + offset`.
pub(super) fn shift(into: &mut [SimTime], from: &[SimTime], offset: SimTime) {
    for (into, from) in into.iter_mut().zip(from) {
        into.0 = from.0 + offset.0;
    }
}

/// `table[place] = value` for every rank.
pub(super) fn scatter(table: &mut [SimTime], places: &[u32], values: &[SimTime]) {
    for (place, value) in places.iter().zip(values) {
        table[*place as usize] = *value;
    }
}

/// `into = max(into, table[place])` for every rank.
pub(super) fn gather_max(into: &mut [SimTime], table: &[SimTime], places: &[u32]) {
    for (into, place) in into.iter_mut().zip(places) {
        into.0 = into.0.max(table[*place as usize].0);
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

/// Sum of `ends - starts`.
pub(super) fn total(ends: &[SimTime], starts: &[SimTime]) -> i128 {
    ends.iter().zip(starts).map(|(end, start)| i128::from(end.0 - start.0)).sum()
}
