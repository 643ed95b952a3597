//! Message programs: GOAL text, the stored form, and their evaluation.

use crate::error::{ConfigError, DeadlockError, GraphFormatError, from_json};
use crate::replay::profile_of;
use prism_engine::messages::loggops::{EvaluateError, LogGops, evaluate};
use prism_engine::messages::{self, FileKind, MessageError, MessageReplay, file_kind, goal};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::Arc;

fn from_messages(error: MessageError) -> PyErr {
    match error {
        MessageError::Io { .. } => PyOSError::new_err(error.to_string()),
        _ => GraphFormatError::new_err(error.to_string()),
    }
}

fn from_evaluate(error: &EvaluateError) -> PyErr {
    match error {
        EvaluateError::Blocked { .. } | EvaluateError::Unreceived { .. } => DeadlockError::new_err(error.to_string()),
        _ => ConfigError::new_err(error.to_string()),
    }
}

/// Sends, receives and calculations of all ranks of a job, with their dependencies.
#[pyclass(frozen, module = "prism_core._native")]
pub(crate) struct MessageProgram {
    inner: Arc<messages::MessageProgram>,
}

#[pymethods]
impl MessageProgram {
    /// What a file holds: "stored", "goal", or None if it is no message program. Raises OSError when it cannot be read.
    #[staticmethod]
    fn kind_of(py: Python<'_>, path: PathBuf) -> PyResult<Option<&'static str>> {
        let kind = py.detach(|| file_kind(&path)).map_err(from_messages)?;
        Ok(kind.map(|kind| match kind {
            FileKind::Stored => "stored",
            FileKind::Goal => "goal",
        }))
    }

    /// Opens a stored program. Raises GraphFormatError for a damaged or foreign file, OSError when it cannot be read.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| messages::MessageProgram::open(&path)).map_err(from_messages)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Reads a file of GOAL text. Raises GraphFormatError with line, rank and label, OSError when it cannot be read.
    #[staticmethod]
    fn read_goal(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| goal::open(&path)).map_err(from_messages)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Reads GOAL text.
    #[staticmethod]
    fn from_goal(py: Python<'_>, text: &str) -> PyResult<Self> {
        let inner = py.detach(|| goal::read(text.as_bytes())).map_err(from_messages)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Writes the stored form and returns its size in bytes.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        py.detach(|| self.inner.save(&path)).map_err(from_messages)
    }

    /// Writes GOAL text.
    fn write_goal(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| goal::write(&self.inner, &mut BufWriter::with_capacity(1 << 20, File::create(&path)?)))
            .map_err(|error| PyOSError::new_err(format!("cannot write {}: {error}", path.display())))
    }

    /// The GOAL text.
    fn to_goal(&self, py: Python<'_>) -> PyResult<String> {
        let mut text = Vec::new();
        py.detach(|| goal::write(&self.inner, &mut text))?;
        Ok(String::from_utf8(text)?)
    }

    /// Evaluates the program by the LogGOPS model. `loggops` is a text like `L=14000,G=0.02,tick_ps=1000`; what it does
    /// not name comes from the network of the profile (TOML text, or h100-sxm). Returns the result as JSON. Raises
    /// DeadlockError or ConfigError.
    #[pyo3(signature = (loggops = "", profile = None))]
    fn replay_json(&self, py: Python<'_>, loggops: &str, profile: Option<&str>) -> PyResult<String> {
        let parameters = LogGops::of_profile(&profile_of(profile, None)?);
        let parameters = parameters.with_text(loggops).map_err(|error| from_evaluate(&error))?;
        let found = py.detach(|| evaluate(&self.inner, &parameters)).map_err(|error| from_evaluate(&error))?;
        let document = MessageReplay::new(&self.inner, &parameters, &found);
        serde_json::to_string(&document).map_err(|error| from_json("result", &error))
    }

    /// What is in the program, as JSON.
    fn summary_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| serde_json::to_string(&self.inner.summary())).map_err(|error| from_json("summary", &error))
    }

    /// Ranks of the job.
    #[getter]
    fn world_size(&self) -> u32 {
        self.inner.num_ranks()
    }

    /// Ops over all ranks.
    #[getter]
    fn num_ops(&self) -> u64 {
        self.inner.num_ops()
    }

    /// Size of the stored form in bytes.
    #[getter]
    fn graph_bytes(&self) -> u64 {
        self.inner.stored_bytes()
    }

    fn __repr__(&self) -> String {
        format!("MessageProgram(world_size={}, num_ops={})", self.inner.num_ranks(), self.inner.num_ops())
    }
}
