//! Why a job hangs, or where its time goes.

use crate::error::{ConfigError, from_json, from_sim};
use crate::graph::Graph;
use crate::replay::{perturb_of, profile_of, slow_of};
use prism_engine::analysis::{DiagnoseOptions, diagnose};
use prism_engine::ids::Rank;
use prism_engine::replay::ReplayOptions;
use pyo3::prelude::*;
use serde_json::Value;

/// Explains a job. `options_json`: `slow` (rank to factor), `perturb` (TOML text), `profile` (TOML text), `iteration` (number from 0, or null for the
/// last), `sensitivities` (whether to replay with single things slower), `top` (entries per list). Returns the diagnosis as
/// JSON; a job that hangs is an answer. Raises ConfigError.
#[pyfunction]
pub(crate) fn diagnose_json(py: Python<'_>, graph: PyRef<'_, Graph>, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let slow = slow_of(&options)?.into_iter().map(|(rank, factor)| (Rank(rank), factor)).collect();
    let perturb = perturb_of(&options, graph.world_size(), &profile)?;
    let defaults = DiagnoseOptions::new(ReplayOptions { slow, perturb, ..ReplayOptions::new(profile) });
    let number = |key: &str| match options.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) => Ok(Some(number as usize)),
            None => Err(ConfigError::new_err(format!("{key} is {value}: it must be a number from 0"))),
        },
    };
    let options = DiagnoseOptions {
        iteration: number("iteration")?,
        sensitivities: options.get("sensitivities").and_then(Value::as_bool).unwrap_or(defaults.sensitivities),
        top: number("top")?.unwrap_or(defaults.top),
        ..defaults
    };
    let found = py.detach(|| diagnose(&graph, &options)).map_err(|error| from_sim(&error))?;
    serde_json::to_string(&found).map_err(|error| from_json("diagnosis", &error))
}
