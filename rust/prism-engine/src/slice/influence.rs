//! How much the iteration time depends on each recording: it is replayed with each of them left out.

use crate::replay::{ReplayOptions, replay};
use crate::sim::SimError;
use crate::slice::recording::{CommOrigin, RankRecording};
use crate::slice::splice::{SpliceError, splice};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A recording left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// The rank that was recorded.
    pub rank: u32,
    /// How many ranks it plays.
    pub ranks: u32,
    /// The recorded rank whose durations and host time took the place of its own.
    pub stand_in: u32,
    /// Time of the iterations then, all together, ns.
    pub total_ns: i64,
}

/// What a replay rests on each recording for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Influence {
    /// Time of the iterations with all recordings, all together, ns.
    pub total_ns: i64,
    /// Recordings that do the same as another one, each left out once. Others cannot be: nothing takes their place.
    pub left_out: Vec<LeftOut>,
    /// Recordings that nothing can take the place of.
    pub alone: u32,
    /// The largest change, as a share of the time, in millionths.
    pub largest_ppm: f64,
    /// Jackknife standard error, as a share of the time, in millionths: sqrt((n - 1)/n * sum of squared distances from
    /// the mean).
    pub error_ppm: f64,
}

/// Why there is no such figure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InfluenceError {
    /// The recordings do not give a graph.
    #[error(transparent)]
    Splice(#[from] SpliceError),
    /// The graph cannot be replayed.
    #[error(transparent)]
    Sim(#[from] SimError),
}

/// Recordings that are left out at most: those that play most ranks.
const MOST: usize = 32;

/// Replays the job of `splice(world_size, recordings, assignment)` once with all recordings, and once without the times of each
/// that does the same as another one: ranks that it plays are played by that one then. Equal times are not replayed again.
///
/// # Errors
/// What [`splice`] and [`replay`] refuse.
pub fn influence(
    world_size: u32,
    recordings: &[RankRecording],
    assignment: &[u32],
    options: &ReplayOptions,
) -> Result<Influence, InfluenceError> {
    let meta = BTreeMap::new();
    let time = |assignment: &[u32]| -> Result<i64, InfluenceError> {
        let graph = Arc::new(splice(world_size, recordings, assignment, &meta)?);
        let result = replay(&graph, options)?;
        Ok(result.iteration_time_ns.iter().sum())
    };
    let total_ns = time(assignment)?;
    let mut played = vec![0_u32; recordings.len()];
    for index in assignment {
        played[*index as usize] += 1;
    }
    let alike = alike(recordings);
    let mut with_others: Vec<usize> =
        (0..recordings.len()).filter(|index| played[*index] > 0 && stand_in(&alike, *index).is_some()).collect();
    let alone = played.iter().filter(|ranks| **ranks > 0).count() - with_others.len();
    with_others.sort_by_key(|index| (std::cmp::Reverse(played[*index]), *index));
    with_others.truncate(MOST);
    let mut left_out = Vec::new();
    for index in with_others {
        let other = stand_in(&alike, index).expect("only those with one are here");
        let is_same = alike[index].digest == alike[other].digest;
        let total_ns = if is_same {
            total_ns
        } else {
            let replaced = |of: &u32| if *of as usize == index { other as u32 } else { *of };
            time(&assignment.iter().map(replaced).collect::<Vec<_>>())?
        };
        let (rank, stand_in) = (recordings[index].rank, recordings[other].rank);
        left_out.push(LeftOut { rank, ranks: played[index], stand_in, total_ns });
    }
    Ok(summed_up(total_ns, left_out, alone as u32))
}

fn summed_up(total_ns: i64, left_out: Vec<LeftOut>, alone: u32) -> Influence {
    let share = |ns: f64| if total_ns == 0 { 0.0 } else { ns / total_ns as f64 * 1e6 };
    let changes: Vec<f64> = left_out.iter().map(|left_out| (left_out.total_ns - total_ns) as f64).collect();
    let largest = changes.iter().fold(0.0, |largest: f64, change| largest.max(change.abs()));
    let count = changes.len() as f64;
    let mean = changes.iter().sum::<f64>() / count.max(1.0);
    let squares: f64 = changes.iter().map(|change| (change - mean) * (change - mean)).sum();
    let error = if changes.len() < 2 { largest } else { ((count - 1.0) / count * squares).sqrt() };
    Influence { total_ns, left_out, alone, largest_ppm: share(largest), error_ppm: share(error) }
}

/// What tells whether a recording may take another's place.
struct Alike {
    /// Without times.
    program: String,
    digest: String,
    /// How its communicators came about: a pair in the middle cannot take the place of one at an end.
    comms: Vec<CommOrigin>,
}

fn alike(recordings: &[RankRecording]) -> Vec<Alike> {
    let of = |recording: &RankRecording| Alike {
        program: recording.digest_without_times(),
        digest: recording.digest(),
        comms: recording.comms.iter().map(|comm| without_places(comm.origin)).collect(),
    };
    recordings.iter().map(of).collect()
}

/// Pairs at any place of their group are alike; whether a rank is in the lower half of it is in the program (its peer).
fn without_places(origin: CommOrigin) -> CommOrigin {
    match origin {
        CommOrigin::Pair { ordinal, lo, hi, instance } => {
            CommOrigin::Pair { ordinal, lo: 0, hi: hi.wrapping_sub(lo), instance }
        }
        other => other,
    }
}

/// The next recording that does the same.
fn stand_in(all: &[Alike], index: usize) -> Option<usize> {
    let own = &all[index];
    let others = (index + 1..all.len()).chain(0..index);
    others.into_iter().find(|other| all[*other].program == own.program && all[*other].comms == own.comms)
}
