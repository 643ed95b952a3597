//! Traces of other tools.

use crate::error::{ConfigError, from_json, from_profile};
use crate::graph::Graph;
use prism_engine::profile::Profile;
use prism_import::{ImportError, calibrate, chakra, kineto, simai};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn from_import(error: &ImportError) -> PyErr {
    match error {
        ImportError::Io { .. } => PyOSError::new_err(error.to_string()),
        _ => ConfigError::new_err(error.to_string()),
    }
}

fn profile_of(toml: Option<&str>) -> PyResult<Option<Profile>> {
    toml.map(Profile::from_toml).transpose().map_err(|error| from_profile(&error))
}

/// Bytes of traces that an import has read so far, as they are on disk; may be asked for by another thread.
#[pyclass(frozen)]
#[derive(Default)]
pub(crate) struct ReadCounter(Arc<AtomicU64>);

#[pymethods]
impl ReadCounter {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Bytes.
    fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KinetoOptions {
    #[serde(default)]
    ranks: BTreeMap<String, u32>,
    world_size: Option<u32>,
    profile: Option<String>,
    #[serde(default)]
    keep_unmatched: bool,
    #[serde(default)]
    execution_traces: Vec<PathBuf>,
}

/// Makes a graph of profiler traces, one per rank. `options_json`: `ranks` (file name to rank), `world_size`, `profile` (TOML
/// text), `keep_unmatched`, `execution_traces` (paths). `counter` counts bytes read. Returns the graph and the account as JSON. Raises ConfigError or OSError.
#[pyfunction]
#[pyo3(signature = (paths, options_json, counter=None))]
pub(crate) fn import_kineto(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    options_json: &str,
    counter: Option<&ReadCounter>,
) -> PyResult<(Graph, String)> {
    let options: KinetoOptions = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let options = kineto::Options {
        ranks: options.ranks,
        world_size: options.world_size,
        profile: profile_of(options.profile.as_deref())?,
        keeps_unmatched: options.keep_unmatched,
        execution_traces: options.execution_traces,
        progress: counter.map(|counter| Arc::clone(&counter.0)),
    };
    let imported = py.detach(|| kineto::import(&paths, &options)).map_err(|error| from_import(&error))?;
    let account = serde_json::to_string(&imported.summary).map_err(|error| from_json("account", &error))?;
    Ok((imported.graph.into(), account))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChakraOptions {
    world_size: Option<u32>,
    groups: Option<String>,
    profile: Option<String>,
}

/// Makes a graph of Chakra traces, one per rank. `options_json`: `world_size`, `groups` (JSON text), `profile` (TOML text).
/// Returns the graph and the account as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn import_chakra(py: Python<'_>, paths: Vec<PathBuf>, options_json: &str) -> PyResult<(Graph, String)> {
    let options: ChakraOptions = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let options = chakra::Options {
        world_size: options.world_size,
        groups: options.groups,
        profile: profile_of(options.profile.as_deref())?,
    };
    let (graph, summary) = py.detach(|| chakra::import(&paths, &options)).map_err(|error| from_import(&error))?;
    let account = serde_json::to_string(&summary).map_err(|error| from_json("account", &error))?;
    Ok((graph.into(), account))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SimaiOptions {
    world_size: Option<u32>,
    expert_parallel: Option<u32>,
    #[serde(default)]
    iterations: u32,
    profile: Option<String>,
}

/// Makes a graph of a SimAI workload. `options_json`: `world_size`, `expert_parallel`, `iterations`, `profile` (TOML text).
/// Returns the graph and the account as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn import_simai(py: Python<'_>, path: PathBuf, options_json: &str) -> PyResult<(Graph, String)> {
    let options: SimaiOptions = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let options = simai::Options {
        world_size: options.world_size,
        expert_parallel: options.expert_parallel,
        iterations: options.iterations,
        profile: profile_of(options.profile.as_deref())?,
    };
    let (graph, summary) = py.detach(|| simai::import(&path, &options)).map_err(|error| from_import(&error))?;
    let account = serde_json::to_string(&summary).map_err(|error| from_json("account", &error))?;
    Ok((graph.into(), account))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CalibrateOptions {
    profile: String,
    collective: Option<String>,
    ranks: Option<u32>,
    nodes: Option<u32>,
}

/// Fits the network of a profile to measured collectives. `options_json`: `profile` (TOML text), and what files do not tell:
/// `collective`, `ranks`, `nodes`. Returns the profile as TOML text and the account as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn calibrate_comm(py: Python<'_>, paths: Vec<PathBuf>, options_json: &str) -> PyResult<(String, String)> {
    let options: CalibrateOptions = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let profile = Profile::from_toml(&options.profile).map_err(|error| from_profile(&error))?;
    let kind = match &options.collective {
        None => None,
        Some(name) => match kineto::read::kind_of_call(name) {
            Some(kineto::event::CommKind::Collective(kind)) => Some(kind),
            _ => return Err(ConfigError::new_err(format!("collective is {name:?}: it must be such as all_reduce"))),
        },
    };
    let hints = calibrate::logs::Hints { kind, ranks: options.ranks, nodes: options.nodes };
    let fitted = py.detach(|| calibrate::calibrate(&paths, &profile, &hints)).map_err(|error| from_import(&error))?;
    let account = serde_json::to_string(&fitted.1).map_err(|error| from_json("account", &error))?;
    Ok((fitted.0.to_toml(), account))
}
