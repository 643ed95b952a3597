//! Workloads made up by formula.

use crate::error::{from_graph, from_json};
use crate::graph::Graph;
use prism_engine::synthetic::{self, TransformerStep};
use pyo3::prelude::*;
use serde_json::Value;

/// One training step of a transformer. `options_json` has the fields of the engine's `TransformerStep` (times in picoseconds),
/// and `latency_ns` and `bytes_per_s` of the flat network it is replayed on. Raises ConfigError naming what does not fit.
#[pyfunction]
pub(crate) fn transformer_step(py: Python<'_>, options_json: &str) -> PyResult<Graph> {
    let parsed = || -> Result<(TransformerStep, u64, u64), serde_json::Error> {
        let mut options: serde_json::Map<String, Value> = serde_json::from_str(options_json)?;
        let mut network = |key: &str| serde_json::from_value(options.remove(key).unwrap_or_default());
        let (latency_ns, bytes_per_s) = (network("latency_ns")?, network("bytes_per_s")?);
        Ok((serde_json::from_value(Value::Object(options))?, latency_ns, bytes_per_s))
    };
    let (step, latency_ns, bytes_per_s) = parsed().map_err(|error| from_json("transformer_step", &error))?;
    let inner = py.detach(|| step.graph_on(&synthetic::flat_profile(latency_ns, bytes_per_s))).map_err(from_graph)?;
    Ok(inner.into())
}
