//! Recordings that say when their collectives ended, and the same on one clock.

use super::{Clock, ClockError, ClockOptions, Clocks, Tie, solve};
use crate::graph::op::{OpKind, Provenance};
use crate::slice::recording::RankRecording;
use crate::slice::splice::comm_number;
use crate::units::SimTime;
use std::borrow::Borrow;
use std::collections::BTreeMap;

/// The recording's fact with the ends of its collectives.
const ENDS: &str = "collective_ends_ps";

/// Keeps with a recording when its collectives ended: op and time on the recording's clock, which reads zero where its program
/// begins.
pub fn set_ends(recording: &mut RankRecording, ends: &[(u32, SimTime)]) {
    let texts: Vec<_> = ends.iter().map(|(op, end)| format!("{op}:{}", end.as_ps())).collect();
    recording.meta.insert(ENDS.to_owned(), texts.join(","));
}

/// When the collectives of a recording ended, if it knows.
///
/// # Errors
/// A text that [`set_ends`] did not write.
pub fn ends_of(recording: &RankRecording) -> Result<Option<Vec<(u32, SimTime)>>, String> {
    let Some(text) = recording.meta.get(ENDS) else { return Ok(None) };
    let entry = |entry: &str| {
        let (op, end) = entry.split_once(':')?;
        Some((op.parse().ok()?, SimTime::from_ps(end.parse().ok()?)))
    };
    let ends: Option<Vec<_>> = text.split(',').filter(|part| !part.is_empty()).map(entry).collect();
    let damaged =
        || format!("the ends of the collectives of rank {} are damaged: record the rank again", recording.rank);
    ends.map(Some).ok_or_else(damaged)
}

/// Brings recordings that know when their collectives ended to one clock, that of the first of them. `None` if none knows.
///
/// # Errors
/// Some know and others do not, or no clocks fit ([`solve`]); the text names ranks.
pub fn align(recordings: &mut [RankRecording]) -> Result<Option<Clocks>, String> {
    let ends = recordings.iter().map(ends_of).collect::<Result<Vec<_>, _>>()?;
    if ends.iter().all(Option::is_none) {
        return Ok(None);
    }
    if let Some(without) = ends.iter().position(Option::is_none) {
        let rank = recordings[without].rank;
        return Err(format!(
            "the recording of rank {rank} has no ends of collectives, others have: their clocks cannot be compared"
        ));
    }
    let ends: Vec<_> = ends.into_iter().flatten().collect();
    let ties = ties_of(recordings, &ends)?;
    let named = |error: ClockError| error.describe(&|slice| format!("rank {}", recordings[slice as usize].rank));
    let clocks = solve(recordings.len() as u32, &ties, &ClockOptions::default()).map_err(named)?;
    place(recordings, &clocks.clocks);
    Ok(Some(clocks))
}

/// Ends of collectives as ties. `ends` has, for every recording, ops and when they ended on the clock of that recording, which
/// reads zero where its program begins; the slice is the recording's number. A collective is the same for all ranks that
/// have its communicator (by members, and by how many of the same members each had before) and called as many collectives
/// on it before.
///
/// # Errors
/// An op that is no collective of its recording.
pub fn ties_of<R: Borrow<RankRecording>>(recordings: &[R], ends: &[Vec<(u32, SimTime)>]) -> Result<Vec<Tie>, String> {
    let mut events: BTreeMap<(&[u32], u32, u32), u64> = BTreeMap::new();
    let mut ties = Vec::new();
    for (slice, (recording, ends)) in recordings.iter().map(Borrow::borrow).zip(ends).enumerate() {
        let ends: BTreeMap<u32, SimTime> = ends.iter().copied().collect();
        let mut calls = vec![0_u32; recording.comms.len()];
        let mut found = 0;
        for (index, op) in recording.ops.iter().enumerate() {
            let OpKind::Collective { slot, .. } = op.kind else { continue };
            let comm = recording.comms.get(slot.index());
            let comm = comm.ok_or_else(|| format!("op {index} of rank {} has no communicator", recording.rank))?;
            let call = calls[slot.index()];
            calls[slot.index()] += 1;
            if let Some(end) = ends.get(&(index as u32)) {
                let number = comm_number(&recording.comms, slot.index());
                let next = events.len() as u64;
                let event = *events.entry((&comm.members, number, call)).or_insert(next);
                ties.push(Tie { slice: slice as u32, event, time: *end });
                found += 1;
            }
        }
        if found < ends.len() {
            return Err(format!(
                "{} of the {} ends of rank {} are of no collective",
                ends.len() - found,
                ends.len(),
                recording.rank
            ));
        }
    }
    Ok(ties)
}

/// Brings recordings to one clock: host time, and durations that were observed, by the rate of each; the beginnings of their
/// programs to where they were against each other. The first one begins at its own zero.
pub fn place(recordings: &mut [RankRecording], clocks: &[Clock]) {
    let begins = clocks.iter().take(recordings.len()).map(Clock::offset);
    let first = begins.min().unwrap_or_default();
    for (recording, clock) in recordings.iter_mut().zip(clocks) {
        for op in &mut recording.ops {
            op.host_gap = clock.stretch(op.host_gap);
            if let OpKind::Compute { duration, provenance: Provenance::Measured | Provenance::Imported, .. } =
                &mut op.kind
            {
                *duration = clock.stretch(*duration);
            }
        }
        if let Some(op) = recording.ops.first_mut() {
            op.host_gap += clock.offset() - first;
        }
    }
}
