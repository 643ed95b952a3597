//! Replay of virtual ranks, and the built-in profiles.

use crate::error::{ConfigError, from_json, from_profile, from_sim};
use crate::graph::Graph;
use prism_engine::collective::tuning::NcclSettings;
use prism_engine::contention::{Contention, Overlap};
use prism_engine::ids::Rank;
use prism_engine::lower::{LowerOptions, StepMessages};
use prism_engine::perturb::{Perturbations, World};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use pyo3::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;

pub(crate) fn profile_of(toml: Option<&str>, graph: Option<&prism_engine::graph::Graph>) -> PyResult<Profile> {
    let recorded = || graph.and_then(|graph| graph.meta().get("profile").map(String::as_str));
    match toml.or_else(recorded) {
        Some(text) => Profile::from_toml(text),
        None => Profile::builtin("h100-sxm"),
    }
    .map_err(|error| from_profile(&error))
}

pub(crate) fn slow_of(options: &Value) -> PyResult<BTreeMap<u32, f64>> {
    let slow: BTreeMap<String, f64> = match options.get("slow") {
        None | Some(Value::Null) => BTreeMap::new(),
        Some(value) => serde_json::from_value(value.clone()).map_err(|error| from_json("slow", &error))?,
    };
    slow.into_iter()
        .map(|(rank, factor)| {
            let rank = rank.parse().map_err(|_| ConfigError::new_err(format!("slow: {rank:?} is not a rank")))?;
            Ok((rank, factor))
        })
        .collect()
}

/// The perturbations of a job of so many ranks on the profile's machines.
pub(crate) fn perturb_of(options: &Value, world_size: u32, profile: &Profile) -> PyResult<Perturbations> {
    match options.get("perturb") {
        None | Some(Value::Null) => Ok(Perturbations::default()),
        Some(Value::String(text)) => Perturbations::from_toml(text, World::new(world_size, profile))
            .map_err(|error| ConfigError::new_err(error.to_string())),
        Some(other) => Err(ConfigError::new_err(format!("perturb is {other}: it must be TOML text"))),
    }
}

/// A text among the options.
fn text_of<'a>(options: &'a Value, name: &str, default: &'a str) -> PyResult<&'a str> {
    match options.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(ConfigError::new_err(format!("{name} is {other}: it must be a text"))),
    }
}

fn contention_of(options: &Value) -> PyResult<Contention> {
    let name = text_of(options, "contention", "none")?;
    let message = || ConfigError::new_err(format!("contention is {name:?}: it must be none, fair-share or fifo"));
    Contention::from_name(name).ok_or_else(message)
}

/// The factors asked for, or the profile's own.
fn overlap_of(options: &Value, profile: &Profile) -> PyResult<Overlap> {
    let text = text_of(options, "overlap", "")?;
    if text.is_empty() {
        return Ok(profile.overlap.unwrap_or_default());
    }
    Overlap::from_toml(text).map_err(|error| ConfigError::new_err(error.to_string()))
}

pub(crate) fn step_messages_of(options: &Value) -> PyResult<StepMessages> {
    match text_of(options, "messages", "fine")? {
        "fine" => Ok(StepMessages::Fine),
        "coarse" => Ok(StepMessages::Coarse),
        other => Err(ConfigError::new_err(format!("messages is {other:?}: it must be fine or coarse"))),
    }
}

/// Replays the job from virtual ranks only. `options_json`: `slow` (rank to factor), `perturb` (TOML text), `contention`,
/// `overlap` (TOML text), `messages`, `max_messages`, `symmetry`, `profile` (TOML text). Returns the result as JSON. Raises DeadlockError, MismatchError or ConfigError.
#[pyfunction]
pub(crate) fn replay_json(py: Python<'_>, graph: PyRef<'_, Graph>, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let options = ReplayOptions {
        perturb: perturb_of(&options, graph.world_size(), &profile)?,
        slow: slow_of(&options)?.into_iter().map(|(rank, factor)| (Rank(rank), factor)).collect(),
        symmetry: options.get("symmetry").and_then(Value::as_bool).unwrap_or(true),
        contention: contention_of(&options)?,
        overlap: overlap_of(&options, &profile)?,
        step_messages: step_messages_of(&options)?,
        max_messages: options.get("max_messages").and_then(Value::as_u64).unwrap_or(LowerOptions::MAX_MESSAGES),
        ..ReplayOptions::new(profile)
    };
    let result = py.detach(|| replay(&graph, &options)).map_err(|error| from_sim(&error))?;
    serde_json::to_string(&result).map_err(|error| from_json("result", &error))
}

/// A built-in device and cluster profile as TOML. Raises ConfigError naming the ones there are.
#[pyfunction]
pub(crate) fn profile_toml(name: &str) -> PyResult<String> {
    Profile::builtin(name).map(|profile| profile.to_toml()).map_err(|error| from_profile(&error))
}

/// As `profile_toml`, with the comments that say where every number comes from.
#[pyfunction]
pub(crate) fn profile_source(name: &str) -> PyResult<&'static str> {
    Profile::builtin_text(name).map_err(|error| from_profile(&error))
}

/// A profile with these of NCCL's variables in place of its own, and with another `network.tuning` if one is given. Raises
/// ConfigError naming what cannot be followed.
#[pyfunction]
#[pyo3(signature = (toml, nccl, tuning=None))]
pub(crate) fn profile_with_nccl(
    toml: &str,
    nccl: BTreeMap<String, String>,
    tuning: Option<String>,
) -> PyResult<String> {
    let mut profile = Profile::from_toml(toml).map_err(|error| from_profile(&error))?;
    if let Some(tuning) = tuning {
        profile.network.tuning = tuning.try_into().map_err(ConfigError::new_err)?;
    }
    profile.network.nccl = NcclSettings::parse(nccl).map_err(|error| ConfigError::new_err(error.to_string()))?;
    let text = profile.to_toml();
    Profile::from_toml(&text).map_err(|error| from_profile(&error))?;
    Ok(text)
}

/// NCCL's environment variables that the engine follows.
#[pyfunction]
pub(crate) fn nccl_setting_names() -> Vec<&'static str> {
    NcclSettings::names().to_vec()
}

/// Names of the built-in profiles.
#[pyfunction]
pub(crate) fn profile_names() -> Vec<String> {
    Profile::builtin_names().map(ToString::to_string).collect()
}
