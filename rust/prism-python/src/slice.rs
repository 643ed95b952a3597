//! Clocks of slices, and what the answer owes to each recording.

use crate::error::{ConfigError, from_json, from_sim, from_splice};
use crate::graph::Recording;
use crate::replay::profile_of;
use prism_engine::replay::ReplayOptions;
use prism_engine::slice::clocks::{
    ClockOptions, Clocks, Seen, SharedPart, Tie, compare_repeated, compare_shared, solve,
};
use prism_engine::slice::influence::{InfluenceError, influence};
use prism_engine::units::SimTime;
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;

/// Clocks by the names of their slices.
pub(crate) fn clocks_document(names: &[String], found: &Clocks) -> Value {
    let slices = names.iter().zip(&found.clocks).zip(&found.fits).map(|((name, clock), fit)| {
        json!({
            "slice": name,
            "offset_ns": clock.offset().as_ps() as f64 / 1e3,
            "drift_ppm": clock.drift_ppm(),
            "ties": fit.ties,
            "set_aside": fit.set_aside,
            "rms_ns": fit.rms_ns,
            "error_ns": fit.error_ns,
        })
    });
    json!({ "rounds": found.rounds, "slices": slices.collect::<Vec<_>>() })
}

/// Clocks of slices from ties (slice, event, ns), as JSON. Slices are named by their place in `names`.
#[pyfunction]
pub(crate) fn solve_clocks_json(
    py: Python<'_>,
    names: Vec<String>,
    ties: Vec<(u32, u64, i64)>,
    reference: u32,
    max_drift_ppm: u32,
) -> PyResult<String> {
    let options = ClockOptions { reference, max_drift_ppm, ..ClockOptions::default() };
    let tie = |(slice, event, ns): (u32, u64, i64)| {
        let ps = ns.checked_mul(1000).ok_or_else(|| ConfigError::new_err(format!("{ns} ns is out of range")))?;
        Ok(Tie { slice, event, time: SimTime::from_ps(ps) })
    };
    let ties = ties.into_iter().map(tie).collect::<PyResult<Vec<_>>>()?;
    let found = py.detach(|| solve(names.len() as u32, &ties, &options));
    let name = |slice: u32| names.get(slice as usize).cloned().unwrap_or_default();
    let found = found.map_err(|error| ConfigError::new_err(error.describe(&name)))?;
    Ok(clocks_document(&names, &found).to_string())
}

/// Clock of a rank that was recorded again against its first recording, as JSON. Raises ConfigError where the two are not of the
/// same calls.
#[pyfunction]
pub(crate) fn repeated_clock_json(
    py: Python<'_>,
    first: PyRef<'_, Recording>,
    again: PyRef<'_, Recording>,
    max_drift_ppm: u32,
) -> PyResult<String> {
    let (first, again) = (Arc::clone(&first.inner), Arc::clone(&again.inner));
    let names = [format!("rank {}", first.rank), format!("rank {} again", first.rank)];
    let found = py.detach(|| compare_repeated(&first, &again, max_drift_ppm)).map_err(ConfigError::new_err)?;
    Ok(clocks_document(&names, &found)["slices"][1].to_string())
}

/// Clocks of recordings by the collectives that they share, as JSON: a list of parts that are tied to each other, each against
/// its first member.
#[pyfunction]
pub(crate) fn shared_clocks_json(
    py: Python<'_>,
    recordings: Vec<Py<Recording>>,
    max_drift_ppm: u32,
) -> PyResult<String> {
    let recordings: Vec<_> = recordings.iter().map(|recording| Arc::clone(&recording.get().inner)).collect();
    let parts = py.detach(|| {
        let recordings: Vec<_> = recordings.iter().map(|recording| &**recording).collect();
        compare_shared(&recordings, max_drift_ppm)
    });
    let parts = parts.map_err(ConfigError::new_err)?;
    let document = |part: &SharedPart| {
        let names: Vec<_> = part.members.iter().map(|place| recordings[*place].rank.to_string()).collect();
        let (slices, problem) = match &part.clocks {
            Ok(found) => (clocks_document(&names, found)["slices"].take(), Value::Null),
            Err(text) => (json!([]), json!(text)),
        };
        let ranks: Vec<_> = part.members.iter().map(|place| recordings[*place].rank).collect();
        json!({
            "seen": if part.seen == Seen::Ends { "ends" } else { "starts" },
            "ranks": ranks, "slices": slices, "halves_ppm": part.halves_ppm, "problem": problem,
        })
    };
    Ok(Value::Array(parts.iter().map(document).collect()).to_string())
}

/// How much the replayed time depends on each recording, as JSON. `assignment` as for `assemble`, `profile` as TOML.
#[pyfunction]
pub(crate) fn influence_json(
    py: Python<'_>,
    world_size: u32,
    recordings: Vec<Py<Recording>>,
    assignment: Vec<u32>,
    profile: &str,
) -> PyResult<String> {
    let options = ReplayOptions::new(profile_of(Some(profile), None)?);
    let recordings: Vec<_> = recordings.iter().map(|recording| Arc::clone(&recording.get().inner)).collect();
    let found = py.detach(|| {
        let recordings: Vec<_> = recordings.iter().map(|recording| (**recording).clone()).collect();
        influence(world_size, &recordings, &assignment, &options)
    });
    let found = found.map_err(|error| match error {
        InfluenceError::Splice(error) => from_splice(&error),
        InfluenceError::Sim(error) => from_sim(&error),
        other => ConfigError::new_err(other.to_string()),
    })?;
    serde_json::to_string(&found).map_err(|error| from_json("influence", &error))
}
