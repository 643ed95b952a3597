//! Recordings that were made at different times and took part in the same collectives: these tie their clocks.

use super::apply::{ends_of, ties_of};
use super::{ClockError, ClockOptions, Clocks, Tie, find, solve};
use crate::graph::op::OpKind;
use crate::slice::recording::RankRecording;
use crate::slice::splice::comm_number;
use crate::units::SimTime;
use std::collections::BTreeMap;

/// Collectives of a recording that are looked at, at most: more say nothing new.
const MOST_TIES: usize = 4096;

/// What was seen of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// When it ended, which all members that wait for it see at one moment.
    Ends,
    /// How much host time had passed when it was called. Ranks that make the same calls need the same for that, on machines of
    /// the same speed; device time does not count.
    Starts,
}

/// Recordings that collectives tie to each other.
#[derive(Clone, Debug)]
pub struct SharedPart {
    /// What their ties are.
    pub seen: Seen,
    /// Places of the recordings among those that were given, ascending; the first is the reference.
    pub members: Vec<usize>,
    /// Their clocks, or why they have none.
    pub clocks: Result<Clocks, String>,
    /// How much faster the reference goes by the first and by the second half of the ties alone, millionths: how far they
    /// are apart is the noise of the drift. `None` where half of the ties do not tell.
    pub halves_ppm: Vec<Option<[f64; 2]>>,
}

/// Clocks of recordings by the collectives that they share. Those that know when their collectives ended are all compared by
/// that. Else those that make the same calls are compared by the host time that had passed when they called, from the begin
/// of training on. Recordings without a collective of another one are in no part.
///
/// # Errors
/// Ends that [`super::set_ends`] did not write.
pub fn compare_shared(recordings: &[&RankRecording], max_drift_ppm: u32) -> Result<Vec<SharedPart>, String> {
    let ends = recordings.iter().map(|recording| ends_of(recording)).collect::<Result<Vec<_>, _>>()?;
    if !ends.is_empty() && ends.iter().all(Option::is_some) {
        let ends: Vec<_> = ends.into_iter().flatten().collect();
        let ties = ties_of(recordings, &ends)?;
        let all: Vec<usize> = (0..recordings.len()).collect();
        return Ok(parts_of(&ties, &all, Seen::Ends, recordings, max_drift_ppm));
    }
    let mut alike: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (place, recording) in recordings.iter().enumerate() {
        alike.entry(recording.digest_without_times()).or_default().push(place);
    }
    let mut parts: Vec<SharedPart> = Vec::new();
    for places in alike.into_values().filter(|places| places.len() > 1) {
        let members: Vec<_> = places.iter().map(|place| recordings[*place]).collect();
        parts.extend(parts_of(&start_ties(&members)?, &places, Seen::Starts, recordings, max_drift_ppm));
    }
    parts.sort_by_key(|part| part.members[0]);
    Ok(parts)
}

/// Calls of collectives at equal distances, of recordings that make the same calls. The slice is the recording's number.
fn start_ties(recordings: &[&RankRecording]) -> Result<Vec<Tie>, String> {
    let mut events: BTreeMap<(&[u32], u32, u32), u64> = BTreeMap::new();
    let mut ties = Vec::new();
    for (slice, recording) in recordings.iter().enumerate() {
        let ops = &recording.ops;
        let begin = ops.iter().position(|op| op.kind == OpKind::TrainingBegin).unwrap_or(0);
        let is_collective = |kind: &OpKind| matches!(kind, OpKind::Collective { .. });
        let count = ops[begin..].iter().filter(|op| is_collective(&op.kind)).count();
        let step = count.div_ceil(MOST_TIES).max(1);
        let numbers: Vec<u32> = (0..recording.comms.len()).map(|slot| comm_number(&recording.comms, slot)).collect();
        let mut calls = vec![0_u32; recording.comms.len()];
        let (mut time, mut seen) = (SimTime::ZERO, 0_usize);
        for (index, op) in ops.iter().enumerate() {
            time += op.host_gap;
            let OpKind::Collective { slot, .. } = op.kind else { continue };
            let comm = recording.comms.get(slot.index());
            let comm = comm.ok_or_else(|| format!("op {index} of rank {} has no communicator", recording.rank))?;
            let call = calls[slot.index()];
            calls[slot.index()] += 1;
            if index < begin {
                continue;
            }
            if seen.is_multiple_of(step) {
                let next = events.len() as u64;
                let event = *events.entry((&comm.members, numbers[slot.index()], call)).or_insert(next);
                ties.push(Tie { slice: slice as u32, event, time });
            }
            seen += 1;
        }
    }
    Ok(ties)
}

/// Solves for each set of recordings that events tie together. `places` are the places of the ties' slices.
fn parts_of(
    ties: &[Tie],
    places: &[usize],
    seen: Seen,
    recordings: &[&RankRecording],
    max_drift_ppm: u32,
) -> Vec<SharedPart> {
    let mut part: Vec<u32> = (0..places.len() as u32).collect();
    let mut first: BTreeMap<u64, u32> = BTreeMap::new();
    for tie in ties {
        let other = *first.entry(tie.event).or_insert(tie.slice);
        let (low, high) = (find(&mut part, other), find(&mut part, tie.slice));
        part[low.max(high) as usize] = low.min(high);
    }
    let mut together: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for slice in 0..places.len() as u32 {
        together.entry(find(&mut part, slice)).or_default().push(slice);
    }
    let options = ClockOptions { max_drift_ppm, ..ClockOptions::default() };
    let solve_for = |slices: &Vec<u32>| {
        let number: BTreeMap<u32, u32> = slices.iter().copied().zip(0..).collect();
        let own = ties.iter().filter_map(|tie| Some(Tie { slice: *number.get(&tie.slice)?, ..*tie }));
        let own: Vec<Tie> = own.collect();
        let count = slices.len() as u32;
        let name = |slice: u32| format!("rank {}", recordings[places[slices[slice as usize] as usize]].rank);
        let clocks = solve(count, &own, &options).map_err(|error: ClockError| error.describe(&name));
        let halves = halves_of(&own).map(|half| solve(count, &half, &options).ok());
        let drift = |half: &Option<Clocks>, slice: usize| half.as_ref().map(|half| half.clocks[slice].drift_ppm());
        SharedPart {
            seen,
            members: slices.iter().map(|slice| places[*slice as usize]).collect(),
            clocks,
            halves_ppm: (0..slices.len())
                .map(|slice| Some([drift(&halves[0], slice)?, drift(&halves[1], slice)?]))
                .collect(),
        }
    };
    together.values().filter(|slices| slices.len() > 1).map(solve_for).collect()
}

/// Ties of earlier and of later events, by when the first slice that saw them did.
fn halves_of(ties: &[Tie]) -> [Vec<Tie>; 2] {
    let mut times: BTreeMap<u64, SimTime> = BTreeMap::new();
    for tie in ties {
        times.entry(tie.event).or_insert(tie.time);
    }
    let mut order: Vec<(SimTime, u64)> = times.into_iter().map(|(event, time)| (time, event)).collect();
    order.sort_unstable();
    let later: BTreeMap<u64, bool> =
        order.iter().enumerate().map(|(place, (_, event))| (*event, place >= order.len() / 2)).collect();
    let (second, first): (Vec<Tie>, Vec<Tie>) = ties.iter().partition(|tie| later[&tie.event]);
    [first, second]
}
