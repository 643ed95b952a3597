//! The execution graph and rank recordings.

use crate::error::{from_graph, from_json, from_splice};
use prism_engine::graph;
use prism_engine::slice::{recording::RankRecording, splice::splice};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The execution graph of a job: immutable, memory mapped when opened from a file.
#[pyclass(frozen, module = "prism_core._native")]
pub(crate) struct Graph {
    pub(crate) inner: Arc<graph::Graph>,
}

#[pymethods]
impl Graph {
    /// Opens a graph file. Raises GraphFormatError for a damaged or foreign one, OSError when it cannot be read.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| graph::Graph::open(&path)).map_err(from_graph)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Reads the text form.
    #[staticmethod]
    fn from_text(py: Python<'_>, text: &str) -> PyResult<Self> {
        let inner = py.detach(|| graph::Graph::from_text(text)).map_err(from_graph)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Writes the graph file and returns its size in bytes.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        py.detach(|| self.inner.save(&path)).map_err(from_graph)
    }

    /// The readable form, for diffs and tests.
    fn to_text(&self, py: Python<'_>) -> String {
        py.detach(|| self.inner.to_text())
    }

    /// What is in the graph, as JSON: roles, communicators, ops, bytes, provenance.
    fn summary_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| serde_json::to_string(&self.inner.summary())).map_err(|error| from_json("summary", &error))
    }

    /// Ranks of the job.
    #[getter]
    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    /// Ops over all ranks.
    #[getter]
    fn num_ops(&self) -> u64 {
        self.inner.num_ops()
    }

    /// Size of the stored form in bytes.
    #[getter]
    fn graph_bytes(&self) -> u64 {
        self.inner.graph_bytes()
    }

    /// How the graph came about: command, profile, ranks run.
    #[getter]
    fn meta(&self) -> BTreeMap<String, String> {
        self.inner.meta().clone()
    }

    fn __repr__(&self) -> String {
        format!("Graph(world_size={}, num_ops={})", self.inner.world_size(), self.inner.num_ops())
    }
}

/// What one rank did while it was collected.
#[pyclass(frozen, module = "prism_core._native")]
pub(crate) struct Recording {
    pub(crate) inner: Arc<RankRecording>,
    pub(crate) info: String,
}

#[pymethods]
impl Recording {
    /// The rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// Ops of the rank's program.
    #[getter]
    fn num_ops(&self) -> usize {
        self.inner.ops.len()
    }

    /// Hash of the program without the rank's own numbers: equal for ranks of one role.
    fn digest(&self, py: Python<'_>) -> String {
        py.detach(|| self.inner.digest())
    }

    /// The first difference to another recording, in words; None when the programs are equal.
    fn difference(&self, py: Python<'_>, other: PyRef<'_, Self>) -> Option<String> {
        let other = Arc::clone(&other.inner);
        py.detach(|| self.inner.difference(&other))
    }

    /// Communicators, process groups, unsupported calls and iterations, as JSON.
    fn info_json(&self) -> &str {
        &self.info
    }
}

/// Joins recordings into the graph of the whole job. `assignment[rank]` is the index of the recording that stands for
/// the rank; `meta_json` is an object of strings. Raises ConfigError naming rank and communicator when they do not fit.
#[pyfunction]
pub(crate) fn assemble(
    py: Python<'_>,
    world_size: u32,
    recordings: Vec<Py<Recording>>,
    assignment: Vec<u32>,
    meta_json: &str,
) -> PyResult<Graph> {
    let meta: BTreeMap<String, String> = serde_json::from_str(meta_json).map_err(|error| from_json("meta", &error))?;
    if assignment.len() != world_size as usize {
        return Err(PyValueError::new_err(format!(
            "assignment has {} entries, the world {world_size} ranks",
            assignment.len()
        )));
    }
    let recordings: Vec<_> = recordings.iter().map(|recording| Arc::clone(&recording.get().inner)).collect();
    let inner = py
        .detach(|| {
            let recordings: Vec<_> = recordings.iter().map(|recording| (**recording).clone()).collect();
            splice(world_size, &recordings, &assignment, &meta)
        })
        .map_err(|error| from_splice(&error))?;
    Ok(Graph { inner: Arc::new(inner) })
}
