//! Traces of other tools.

use crate::error::{ConfigError, from_json, from_profile};
use crate::graph::Graph;
use prism_engine::profile::Profile;
use prism_import::{ImportError, kineto};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

fn from_import(error: &ImportError) -> PyErr {
    match error {
        ImportError::Io { .. } => PyOSError::new_err(error.to_string()),
        _ => ConfigError::new_err(error.to_string()),
    }
}

fn profile_of(toml: Option<&str>) -> PyResult<Option<Profile>> {
    toml.map(Profile::from_toml).transpose().map_err(|error| from_profile(&error))
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
}

/// Makes a graph of profiler traces, one per rank. `options_json`: `ranks` (file name to rank), `world_size`, `profile` (TOML
/// text), `keep_unmatched`. Returns the graph and the account as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn import_kineto(py: Python<'_>, paths: Vec<PathBuf>, options_json: &str) -> PyResult<(Graph, String)> {
    let options: KinetoOptions = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let options = kineto::Options {
        ranks: options.ranks,
        world_size: options.world_size,
        profile: profile_of(options.profile.as_deref())?,
        keeps_unmatched: options.keep_unmatched,
    };
    let imported = py.detach(|| kineto::import(&paths, &options)).map_err(|error| from_import(&error))?;
    let account = serde_json::to_string(&imported.summary).map_err(|error| from_json("account", &error))?;
    Ok((imported.graph.into(), account))
}
