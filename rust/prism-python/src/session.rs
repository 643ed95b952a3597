//! One collect or emulate run.

use crate::cost::table_of;
use crate::error::{ConfigError, from_json, from_session};
use crate::graph::{Graph, Recording};
use crate::replay::{perturb_of, profile_of, slow_of};
use prism_engine::cost::kernels::KernelTable;
use prism_engine::hybrid::values::{Rows, ValueCall, ValueProvider};
use prism_engine::hybrid::{self, SessionMode, SessionOptions};
use prism_engine::profile::Profile;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

/// Live ranks against virtual (emulate) or absent (collect) peers.
#[pyclass(frozen, module = "prism_core._native")]
pub(crate) struct Session {
    inner: hybrid::Session,
}

fn options_of(options: &Value, graph: Option<&prism_engine::graph::Graph>) -> PyResult<SessionOptions> {
    let mode = match options.get("mode").and_then(Value::as_str) {
        Some("collect") => SessionMode::Collect,
        Some("emulate") => SessionMode::Emulate,
        other => return Err(ConfigError::new_err(format!("mode is {other:?}: it must be collect or emulate"))),
    };
    let world_size = options.get("world_size").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
    let world_size = world_size.ok_or_else(|| ConfigError::new_err("world_size must be a number of ranks"))?;
    let live = options.get("live").cloned().unwrap_or_default();
    let profile = profile_of(options.get("profile").and_then(Value::as_str), graph)?;
    Ok(SessionOptions {
        mode,
        world_size,
        perturb: perturb_of(options, world_size, &profile)?,
        kernels: kernels_of(options, &profile)?,
        profile,
        live: serde_json::from_value(live).map_err(|error| from_json("live", &error))?,
        measured_host_time: measures_host(options)?,
        slow: slow_of(options)?,
    })
}

/// `host_time`: `constant` (the default) or `measured`.
fn measures_host(options: &Value) -> PyResult<bool> {
    match options.get("host_time").and_then(Value::as_str) {
        None | Some("constant") => Ok(false),
        Some("measured") => Ok(true),
        Some(other) => Err(ConfigError::new_err(format!("host_time is {other:?}: it must be constant or measured"))),
    }
}

/// `kernels`: texts of kernel tables, the first that knows a kernel holds.
fn kernels_of(options: &Value, profile: &Profile) -> PyResult<KernelTable> {
    let texts: Vec<String> = match options.get("kernels") {
        None | Some(Value::Null) => Vec::new(),
        Some(texts) => serde_json::from_value(texts.clone()).map_err(|error| from_json("kernels", &error))?,
    };
    table_of(&texts, profile)
}

fn text(key: &[u8]) -> PyResult<&str> {
    std::str::from_utf8(key).map_err(|_| ConfigError::new_err("store keys must be UTF-8"))
}

/// A Python callable that says what virtual members contribute: JSON of the call in; `None` (no rule), `"mirror"`, `"shape"` or
/// the bytes of the rows out.
struct PythonValues(Py<PyAny>);

impl ValueProvider for PythonValues {
    fn values(&self, call: &ValueCall) -> Result<Rows, String> {
        let text = serde_json::to_string(call).map_err(|error| error.to_string())?;
        Python::attach(|py| {
            let answer = self.0.bind(py).call1((text,)).map_err(|error| format!("the rules failed: {error}"))?;
            if answer.is_none() {
                return Ok(Rows::NoRule);
            }
            if let Ok(rows) = answer.cast::<PyBytes>() {
                return Ok(Rows::Values(rows.as_bytes().to_vec()));
            }
            match answer.extract::<&str>() {
                Ok("mirror") => Ok(Rows::Mirror),
                Ok("shape") => Ok(Rows::Shape),
                _ => Err(format!("the rules gave {answer}: neither None, 'mirror', 'shape' nor bytes")),
            }
        })
    }
}

/// Processes at a time, 0 for any number.
fn at_once_of(options: &Value) -> PyResult<usize> {
    let at_once = options.get("at_once").map_or(Some(0), Value::as_u64);
    let at_once = at_once.and_then(|number| usize::try_from(number).ok());
    at_once.ok_or_else(|| ConfigError::new_err("at_once must be a number of processes"))
}

#[pymethods]
impl Session {
    /// `options_json`: `mode` (collect or emulate), `world_size`, `profile` (TOML text), `live` (ranks), `slow`,
    /// `host_time`, `kernels` (texts of kernel tables), `perturb` (TOML text, only to emulate), `at_once` (live ranks that run at a time; the others wait in their calls),
    /// `record` (keep recordings when emulating, too).
    /// `values`: called with JSON of each call that virtual members take part in, from the session's threads.
    #[new]
    #[pyo3(signature = (options_json, graph=None, values=None))]
    fn new(
        py: Python<'_>,
        options_json: &str,
        graph: Option<PyRef<'_, Graph>>,
        values: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
        let graph = graph.map(|graph| graph.inner(py)).transpose()?;
        let at_once = at_once_of(&options)?;
        let records = options.get("record").and_then(Value::as_bool).unwrap_or(false);
        let options = options_of(&options, graph.as_deref())?;
        let inner = hybrid::Session::new(options, graph).map_err(|error| from_session(&error))?;
        inner.play_at_once(at_once);
        if records {
            inner.keep_recordings();
        }
        if let Some(values) = values {
            inner.set_values(Arc::new(PythonValues(values)));
        }
        Ok(Self { inner })
    }

    /// Listens in a directory (made with mode 0700); returns the socket's path for PRISM_SESSION.
    fn listen(&self, py: Python<'_>, directory: PathBuf) -> PyResult<String> {
        let path = py.detach(|| self.inner.listen(&directory)).map_err(|error| from_session(&error))?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// A live rank sets a store key; returns the value to keep.
    fn store_set<'py>(&self, py: Python<'py>, key: &[u8], value: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.inner.store_set(text(key)?, value)))
    }

    /// The value of a key only an absent rank would set, if it is an NCCL id.
    fn absent_value<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(self.inner.absent_value(text(key)?).map(|value| PyBytes::new(py, &value)))
    }

    /// May the process of a rank start? If so it has a turn from now on.
    fn take_turn(&self, rank: u32) -> bool {
        self.inner.take_turn(rank)
    }

    /// The process of a rank has exited.
    fn process_exited(&self, py: Python<'_>, rank: u32, returncode: i32) {
        py.detach(|| self.inner.process_exited(rank, returncode));
    }

    /// Where every live rank is, as JSON.
    fn status_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| serde_json::to_string(&self.inner.status())).map_err(|error| from_json("status", &error))
    }

    /// What a rank did (collect, or with `record`). Raises ConfigError when the rank was not run.
    fn recording(&self, py: Python<'_>, rank: u32) -> PyResult<Recording> {
        let recording = py.detach(|| self.inner.recording(rank));
        let recording =
            recording.ok_or_else(|| ConfigError::new_err(format!("rank {rank} was not collected in this session")))?;
        let info = self.inner.recording_info(rank).ok_or_else(|| ConfigError::new_err("the session has ended"))?;
        let info = serde_json::to_string(&info).map_err(|error| from_json("recording", &error))?;
        Ok(Recording { inner: Arc::new(recording), info })
    }

    /// Ends the session; returns the summary as JSON.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| serde_json::to_string(&self.inner.finish())).map_err(|error| from_json("summary", &error))
    }
}
