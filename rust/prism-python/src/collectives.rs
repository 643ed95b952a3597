//! Models of collectives and of matching, by name.

use crate::error::{ConfigError, DeadlockError, MismatchError, from_json};
use prism_engine::collective::vectors::{self, VectorError};
use pyo3::prelude::*;

/// What a model answers to its inputs (a JSON object), as JSON. Raises ConfigError naming model and input, and, of explicit
/// jobs, DeadlockError and MismatchError.
#[pyfunction]
pub(crate) fn collective_completion(py: Python<'_>, model: &str, inputs_json: &str) -> PyResult<String> {
    let inputs = serde_json::from_str(inputs_json).map_err(|error| from_json(model, &error))?;
    let answer = py.detach(|| vectors::completion(model, &inputs)).map_err(|error| {
        let text = error.to_string();
        match error {
            VectorError::Deadlock { .. } => DeadlockError::new_err(text),
            VectorError::Mismatch { .. } => MismatchError::new_err(text),
            _ => ConfigError::new_err(text),
        }
    })?;
    serde_json::to_string(&answer).map_err(|error| from_json(model, &error))
}

/// The names of the models.
#[pyfunction]
pub(crate) fn collective_models() -> Vec<&'static str> {
    vectors::MODELS.to_vec()
}
