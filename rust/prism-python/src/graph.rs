//! The execution graph and rank recordings.

use crate::error::{ConfigError, GraphFormatError, from_graph, from_json, from_splice};
use crate::replay::profile_of;
use prism_engine::ids::Rank;
use prism_engine::slice::clocks;
use prism_engine::slice::{recording::RankRecording, splice::splice};
use prism_engine::units::SimTime;
use prism_engine::{graph, prune};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// The execution graph of a job: immutable, memory mapped when opened from a file.
#[pyclass(frozen, module = "prism_core._native")]
pub(crate) struct Graph {
    source: Source,
}

enum Source {
    Built(Arc<graph::Graph>),
    /// Checked when it is first used.
    File(graph::GraphFile),
}

impl From<graph::Graph> for Graph {
    fn from(graph: graph::Graph) -> Self {
        Self { source: Source::Built(Arc::new(graph)) }
    }
}

impl Graph {
    /// The graph; of a file, read and checked by the first call. Raises GraphFormatError if any of it is damaged.
    pub(crate) fn inner(&self, py: Python<'_>) -> PyResult<Arc<graph::Graph>> {
        match &self.source {
            Source::Built(graph) => Ok(Arc::clone(graph)),
            Source::File(file) => py.detach(|| file.graph()).map_err(from_graph),
        }
    }
}

#[pymethods]
impl Graph {
    /// Opens a graph file; what is in it is read and checked at its first use. Raises GraphFormatError for a foreign file
    /// (any method does for a damaged one), OSError when it cannot be read.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let file = py.detach(|| graph::GraphFile::open(&path)).map_err(from_graph)?;
        Ok(Self { source: Source::File(file) })
    }

    /// Reads the text form.
    #[staticmethod]
    fn from_text(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| graph::Graph::from_text(text)).map(Self::from).map_err(from_graph)
    }

    /// Writes the graph file and returns its size in bytes.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        let graph = self.inner(py)?;
        py.detach(|| graph.save(&path)).map_err(from_graph)
    }

    /// The readable form, for diffs and tests.
    fn to_text(&self, py: Python<'_>) -> PyResult<String> {
        let graph = self.inner(py)?;
        Ok(py.detach(|| graph.to_text()))
    }

    /// What is in the graph, as JSON: roles, communicators, ops, bytes, provenance.
    fn summary_json(&self, py: Python<'_>) -> PyResult<String> {
        let graph = self.inner(py)?;
        py.detach(|| serde_json::to_string(&graph.summary())).map_err(|error| from_json("summary", &error))
    }

    /// In what another graph differs from this one, op for op, as JSON. `ignore`: any of `durations`, `host`, `memory`.
    fn difference_json(&self, py: Python<'_>, other: PyRef<'_, Self>, ignore: Vec<String>) -> PyResult<String> {
        let mut chosen = graph::Ignore::default();
        for name in &ignore {
            match name.as_str() {
                "durations" => chosen.durations = true,
                "host" => chosen.host = true,
                "memory" => chosen.memory = true,
                other => {
                    let message = format!("cannot leave '{other}' out of a comparison: durations, host or memory");
                    return Err(ConfigError::new_err(message));
                }
            }
        }
        let (left, right) = (self.inner(py)?, other.inner(py)?);
        py.detach(|| serde_json::to_string(&left.difference(&right, chosen)))
            .map_err(|error| from_json("difference", &error))
    }

    /// The virtual ranks that exchange data with these ranks when they run as a sandbox, ascending. `profile_toml` is
    /// another profile than the graph's. Raises ConfigError for a rank that is not of the job.
    #[pyo3(signature = (sandbox, profile_toml=None))]
    fn materialised_ranks(&self, py: Python<'_>, sandbox: Vec<u32>, profile_toml: Option<&str>) -> PyResult<Vec<u32>> {
        let graph = self.inner(py)?;
        let profile = profile_of(profile_toml, Some(&graph))?;
        if let Some(outside) = sandbox.iter().find(|rank| **rank >= graph.world_size()) {
            let message = format!("rank {outside} is not one of the {} ranks of the job", graph.world_size());
            return Err(ConfigError::new_err(message));
        }
        let sandbox: BTreeSet<Rank> = sandbox.into_iter().map(Rank).collect();
        let kept = py.detach(|| prune::materialised(&graph, &sandbox, &profile));
        Ok(kept.difference(&sandbox).map(|rank| rank.0).collect())
    }

    /// For every rank the number of its role in the summary.
    fn rank_roles(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let graph = self.inner(py)?;
        Ok(py.detach(|| (0..graph.world_size()).map(|rank| graph.rank_template(Rank(rank)).0).collect()))
    }

    /// Ranks of the job.
    #[getter]
    fn world_size(&self) -> u32 {
        match &self.source {
            Source::Built(graph) => graph.world_size(),
            Source::File(file) => file.world_size(),
        }
    }

    /// Ops over all ranks.
    #[getter]
    fn num_ops(&self) -> u64 {
        match &self.source {
            Source::Built(graph) => graph.num_ops(),
            Source::File(file) => file.num_ops(),
        }
    }

    /// Size of the stored form in bytes.
    #[getter]
    fn graph_bytes(&self) -> u64 {
        match &self.source {
            Source::Built(graph) => graph.graph_bytes(),
            Source::File(file) => file.file_bytes(),
        }
    }

    /// How the graph came about: command, profile, ranks run.
    #[getter]
    fn meta(&self) -> PyResult<BTreeMap<String, String>> {
        match &self.source {
            Source::Built(graph) => Ok(graph.meta().clone()),
            Source::File(file) => file.meta().map_err(from_graph),
        }
    }

    fn __repr__(&self) -> String {
        format!("Graph(world_size={}, num_ops={})", self.world_size(), self.num_ops())
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

    /// Hash of the program without the rank's own numbers: equal for ranks of one role. Without `times`, durations and host
    /// time do not count.
    #[pyo3(signature = (*, times=true))]
    fn digest(&self, py: Python<'_>, times: bool) -> String {
        py.detach(|| if times { self.inner.digest() } else { self.inner.digest_without_times() })
    }

    /// The first difference to another recording, in words; None when the programs are equal.
    #[pyo3(signature = (other, *, times=true))]
    fn difference(&self, py: Python<'_>, other: PyRef<'_, Self>, times: bool) -> Option<String> {
        let other = Arc::clone(&other.inner);
        py.detach(|| if times { self.inner.difference(&other) } else { self.inner.difference_without_times(&other) })
    }

    /// How far apart two ranks are that communicate alike, in millionths of what they do in between; None if they do not. Without
    /// `times` ops are counted.
    #[pyo3(signature = (other, *, times=true))]
    fn distance_ppm(&self, py: Python<'_>, other: PyRef<'_, Self>, times: bool) -> Option<u64> {
        let other = Arc::clone(&other.inner);
        py.detach(|| self.inner.distance_ppm(&other, times))
    }

    /// The same recording, knowing when its collectives ended: op and ns since its program began. `assemble` brings such
    /// recordings to one clock.
    fn with_ends(&self, ends: Vec<(u32, i64)>) -> Self {
        let mut recording = (*self.inner).clone();
        let ends: Vec<_> = ends.into_iter().map(|(op, ns)| (op, SimTime::from_ns(ns))).collect();
        clocks::set_ends(&mut recording, &ends);
        Self { inner: Arc::new(recording), info: self.info.clone() }
    }

    /// The same recording with the host time of a machine that is so much faster, in millionths.
    fn at_speed(&self, drift_ppm: f64) -> Self {
        let mut recording = (*self.inner).clone();
        clocks::stretch_host(&mut recording, drift_ppm);
        Self { inner: Arc::new(recording), info: self.info.clone() }
    }

    /// The program in a stored form, with a checksum; `info_json` is not part of it.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.inner.to_bytes()))
    }

    /// What `to_bytes` made, with its `info_json`. Raises GraphFormatError for other bytes.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8], info: String) -> PyResult<Self> {
        let recording = py.detach(|| RankRecording::from_bytes(data));
        let inner = recording.map_err(|error| GraphFormatError::new_err(error.to_string()))?;
        Ok(Self { inner: Arc::new(inner), info })
    }

    /// Communicators, process groups, unsupported calls and iterations, as JSON.
    fn info_json(&self) -> &str {
        &self.info
    }
}

/// Joins recordings into the graph of the whole job. `assignment[rank]` is the index of the recording that stands for
/// the rank; `meta_json` is an object of strings. Recordings that know when their collectives ended are brought to one clock
/// first; meta `clocks` says how. Raises ConfigError naming rank and communicator when they do not fit.
#[pyfunction]
pub(crate) fn assemble(
    py: Python<'_>,
    world_size: u32,
    recordings: Vec<Py<Recording>>,
    assignment: Vec<u32>,
    meta_json: &str,
) -> PyResult<Graph> {
    let mut meta: BTreeMap<String, String> =
        serde_json::from_str(meta_json).map_err(|error| from_json("meta", &error))?;
    if assignment.len() != world_size as usize {
        return Err(PyValueError::new_err(format!(
            "assignment has {} entries, the world {world_size} ranks",
            assignment.len()
        )));
    }
    let recordings: Vec<_> = recordings.iter().map(|recording| Arc::clone(&recording.get().inner)).collect();
    let inner = py.detach(|| {
        let mut recordings: Vec<_> = recordings.iter().map(|recording| (**recording).clone()).collect();
        if let Some(found) = clocks::align(&mut recordings).map_err(ConfigError::new_err)? {
            let names: Vec<_> = recordings.iter().map(|recording| recording.rank.to_string()).collect();
            meta.insert("clocks".to_owned(), crate::slice::clocks_document(&names, &found).to_string());
        }
        splice(world_size, &recordings, &assignment, &meta).map_err(|error| from_splice(&error))
    })?;
    Ok(inner.into())
}
