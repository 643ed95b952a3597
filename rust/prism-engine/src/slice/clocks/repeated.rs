//! A slice that was recorded twice tells how the speed of the machine changed in between.

use super::{Clock, ClockError, ClockOptions, Clocks, RATE_BITS, Tie, solve};
use crate::graph::op::OpKind;
use crate::slice::recording::RankRecording;
use crate::units::SimTime;

/// Ops that are looked at, at most: more say nothing new.
const MOST_TIES: usize = 4096;

/// Clocks of two recordings of one rank: the first one (the reference) and the one made again. Every op is an event that both
/// saw, at the host time that had passed before it. What comes before training, which is different in a process that finds
/// files in the cache, does not count.
///
/// # Errors
/// The recordings are not of the same calls (the first difference is named), or no clocks fit ([`solve`]).
pub fn compare_repeated(first: &RankRecording, again: &RankRecording, max_drift_ppm: u32) -> Result<Clocks, String> {
    if let Some(difference) = first.difference_without_times(again) {
        return Err(format!("rank {} did something else when it was run again: {difference}", first.rank));
    }
    let ties: Vec<_> =
        [first, again].into_iter().zip(0..).flat_map(|(recording, slice)| host_ties(recording, slice)).collect();
    let options = ClockOptions { max_drift_ppm, ..ClockOptions::default() };
    let name = |slice: u32| format!("rank {}{}", first.rank, if slice == 0 { "" } else { " run again" });
    solve(2, &ties, &options).map_err(|error: ClockError| error.describe(&name))
}

/// Host time that had passed before ops at equal distances, from the begin of training on.
fn host_ties(recording: &RankRecording, slice: u32) -> Vec<Tie> {
    let ops = &recording.ops;
    let begin = ops.iter().position(|op| op.kind == OpKind::TrainingBegin).unwrap_or(0);
    let step = (ops.len() - begin).div_ceil(MOST_TIES).max(1);
    let mut time = SimTime::ZERO;
    let mut ties = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        time += op.host_gap;
        if index >= begin && (index - begin).is_multiple_of(step) {
            ties.push(Tie { slice, event: index as u64, time });
        }
    }
    ties
}

/// Brings the host time of a recording to a machine that is so much faster, in millionths, than that of the recording. Durations
/// of the device are no time of this machine, and stay.
pub fn stretch_host(recording: &mut RankRecording, drift_ppm: f64) {
    let rate = (drift_ppm / 1e6 * (1_u64 << RATE_BITS) as f64).round() as i64;
    let clock = Clock { rate, ..Clock::default() };
    for op in &mut recording.ops {
        op.host_gap = clock.stretch(op.host_gap);
    }
}
