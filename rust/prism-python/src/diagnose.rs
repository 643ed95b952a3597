//! Why a job hangs, or where its time goes.

use crate::error::{ConfigError, from_json, from_sim};
use crate::graph::Graph;
use crate::replay::{perturb_of, profile_of, slow_of};
use prism_engine::analysis::{DiagnoseOptions, Hang, JobTrace, MemoryReport, Overview, OverviewOptions, diagnose};
use prism_engine::ids::Rank;
use prism_engine::replay::ReplayOptions;
use prism_engine::sim::SimError;
use pyo3::prelude::*;
use serde_json::{Value, json};

/// Columns of a picture at most.
const MAX_COLUMNS: u64 = 4096;

/// Explains a job. `options_json`: `slow` (rank to factor), `perturb` (TOML text), `profile` (TOML text), `iteration` (number from 0, or null for the
/// last), `sensitivities` (whether to replay with single things slower), `top` (entries per list), `card_bytes` (memory of a card). Returns the diagnosis as
/// JSON; a job that hangs is an answer. Raises ConfigError.
#[pyfunction]
pub(crate) fn diagnose_json(py: Python<'_>, graph: PyRef<'_, Graph>, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let slow = slow_of(&options)?.into_iter().map(|(rank, factor)| (Rank(rank), factor)).collect();
    let perturb = perturb_of(&options, graph.world_size(), &profile)?;
    let defaults = DiagnoseOptions::new(ReplayOptions { slow, perturb, ..ReplayOptions::new(profile) });
    let options = DiagnoseOptions {
        iteration: number(&options, "iteration")?.map(|number| number as usize),
        card_bytes: number(&options, "card_bytes")?,
        sensitivities: options.get("sensitivities").and_then(Value::as_bool).unwrap_or(defaults.sensitivities),
        top: number(&options, "top")?.map_or(defaults.top, |top| top as usize),
        ..defaults
    };
    let found = py.detach(|| diagnose(&graph, &options)).map_err(|error| from_sim(&error))?;
    serde_json::to_string(&found).map_err(|error| from_json("diagnosis", &error))
}

/// A whole number among the options, if it is there.
fn number(options: &Value, key: &str) -> PyResult<Option<u64>> {
    match options.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(ConfigError::new_err(format!("{key} is {value}: it must be a number from 0"))),
        },
    }
}

/// Every rank over time, and what each needs of its card. `options_json`: `slow`, `perturb`, `profile`, `iteration` and
/// `card_bytes` as for a diagnosis, `columns` (of time), `max_rows` (different rows of ranks). Returns `overview`, or null and `why_not` for
/// jobs that hang or are too large, and `memory`, as JSON. Raises ConfigError.
#[pyfunction]
pub(crate) fn overview_json(py: Python<'_>, graph: PyRef<'_, Graph>, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let slow = slow_of(&options)?.into_iter().map(|(rank, factor)| (Rank(rank), factor)).collect();
    let perturb = perturb_of(&options, graph.world_size(), &profile)?;
    let memory = MemoryReport::of(&graph, &profile, number(&options, "card_bytes")?);
    let how = ReplayOptions { slow, perturb, ..ReplayOptions::new(profile) };
    let defaults = OverviewOptions::default();
    let fine = OverviewOptions {
        iteration: number(&options, "iteration")?.map(|number| number as usize),
        columns: number(&options, "columns")?.map_or(defaults.columns, |columns| columns.min(MAX_COLUMNS) as usize),
        max_rows: number(&options, "max_rows")?.map_or(defaults.max_rows, |rows| rows as usize),
    };
    let picture = || JobTrace::record(&graph, &how).and_then(|trace| Overview::of(&trace, &fine));
    let (overview, why_not) = match py.detach(picture) {
        Ok(overview) => (Some(overview), None),
        Err(error) if Hang::of(&error).is_some() || matches!(error, SimError::Unavailable { .. }) => {
            (None, Some(error.to_string()))
        }
        Err(error) => return Err(from_sim(&error)),
    };
    Ok(json!({ "overview": overview, "why_not": why_not, "memory": memory }).to_string())
}

/// What each rank needs of its card: `memory` as of `overview_json`, without a replay. `options_json`: `profile` and `card_bytes`.
/// Raises ConfigError.
#[pyfunction]
pub(crate) fn memory_json(py: Python<'_>, graph: PyRef<'_, Graph>, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let card_bytes = number(&options, "card_bytes")?;
    let report = py.detach(|| MemoryReport::of(&graph, &profile, card_bytes));
    serde_json::to_string(&report).map_err(|error| from_json("memory", &error))
}
