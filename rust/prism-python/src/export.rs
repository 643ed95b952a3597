//! Jobs in the form of other tools.

use crate::error::{ConfigError, from_json, from_sim};
use crate::graph::Graph;
use crate::replay::{perturb_of, profile_of, slow_of, step_messages_of};
use prism_engine::analysis::JobTrace;
use prism_engine::export::{Timeline, chrome, perfetto, table};
use prism_engine::ids::Rank;
use prism_engine::lower::goal::{GoalOptions, program};
use prism_engine::lower::{LowerOptions, lower};
use prism_engine::messages::goal;
use prism_engine::replay::ReplayOptions;
use prism_import::chakra;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Writes what some ranks did when. `options_json`: `format` (`perfetto`, `chrome` or `csv`), `ranks`, and `slow`, `perturb`, `profile`
/// as for a diagnosis. Returns what was written as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn export_timeline(
    py: Python<'_>,
    graph: PyRef<'_, Graph>,
    path: &str,
    options_json: &str,
) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let slow = slow_of(&options)?.into_iter().map(|(rank, factor)| (Rank(rank), factor)).collect();
    let perturb = perturb_of(&options, graph.world_size(), &profile)?;
    let how = ReplayOptions { slow, perturb, ..ReplayOptions::new(profile) };
    let ranks: Vec<u64> = options
        .get("ranks")
        .and_then(Value::as_array)
        .map_or_else(Vec::new, |ranks| ranks.iter().map(|rank| rank.as_u64().unwrap_or(u64::MAX)).collect());
    if let Some(outside) = ranks.iter().find(|rank| **rank >= u64::from(graph.world_size())) {
        return Err(ConfigError::new_err(format!("rank {outside} is none of the {} of the job", graph.world_size())));
    }
    let ranks: Vec<Rank> = ranks.into_iter().map(|rank| Rank(rank as u32)).collect();
    let writer: fn(&Timeline, &mut BufWriter<File>) -> std::io::Result<()> =
        match options.get("format").and_then(Value::as_str) {
            Some("perfetto") => perfetto::write,
            Some("chrome") => chrome::write,
            Some("csv") => table::write,
            other => {
                let given = other.unwrap_or_default();
                return Err(ConfigError::new_err(format!(
                    "format is '{given}': it must be perfetto or chrome, csv or parquet"
                )));
            }
        };
    py.detach(|| {
        let trace = JobTrace::record(&graph, &how).map_err(|error| from_sim(&error))?;
        let timeline = Timeline::of(&trace, &ranks).map_err(|error| from_sim(&error))?;
        let write = || {
            let mut out = BufWriter::new(File::create(path)?);
            writer(&timeline, &mut out)?;
            out.flush()
        };
        write().map_err(|error| PyOSError::new_err(format!("cannot write {path}: {error}")))?;
        let document = json!({
            "ranks": timeline.ranks.len(),
            "slices": timeline.slices.len(),
            "marks": timeline.marks.len(),
            "memory_changes": timeline.counters.len(),
        });
        Ok(document.to_string())
    })
}

/// Most messages of a file: 2 GB of memory while it is made.
const MAX_MESSAGES: u64 = 1 << 26;

/// Writes the job as GOAL text. `options_json`: `messages` (`fine` or `coarse`), `tick_ps`, `rendezvous`, `profile` (TOML
/// text). Returns what was written as JSON. Raises ConfigError or OSError.
#[pyfunction]
pub(crate) fn export_goal(py: Python<'_>, graph: PyRef<'_, Graph>, path: &str, options_json: &str) -> PyResult<String> {
    let options: Value = serde_json::from_str(options_json).map_err(|error| from_json("options", &error))?;
    let graph = graph.inner(py)?;
    let profile = profile_of(options.get("profile").and_then(Value::as_str), Some(&graph))?;
    let tick_ps = options.get("tick_ps").and_then(Value::as_u64).filter(|tick| *tick > 0);
    let goal_options = GoalOptions {
        tick_ps: tick_ps.ok_or_else(|| ConfigError::new_err("tick_ps must be a whole number of at least 1"))?,
        rendezvous: options.get("rendezvous").and_then(Value::as_bool).unwrap_or(true),
    };
    let step_messages = step_messages_of(&options)?;
    // Sizes are what a message program has, and those of NCCL's channels stand for more than they carry.
    let profile = profile.without_channels();
    let lowering = LowerOptions { step_messages, max_messages: MAX_MESSAGES, ..LowerOptions::new(profile) };
    py.detach(|| {
        let job = lower(&graph, &lowering).map_err(|error| from_sim(&error))?;
        let program = program(&job, &goal_options).map_err(|error| ConfigError::new_err(error.to_string()))?;
        drop(job);
        let write = || goal::write(&program, &mut BufWriter::new(File::create(path)?));
        write().map_err(|error| PyOSError::new_err(format!("cannot write {path}: {error}")))?;
        let document = json!({
            "ranks": program.num_ranks(),
            "ops": program.num_ops(),
            "sends": program.num_sends(),
            "sent_bytes": program.sent_bytes(),
            "tick_ps": goal_options.tick_ps,
        });
        Ok(document.to_string())
    })
}

/// Writes ranks as Chakra traces, `PREFIX.RANK.et`, and their groups. Returns what was written as JSON. Raises ConfigError or
/// OSError.
#[pyfunction]
pub(crate) fn export_chakra(
    py: Python<'_>,
    graph: PyRef<'_, Graph>,
    prefix: PathBuf,
    ranks: Vec<u32>,
) -> PyResult<String> {
    let graph = graph.inner(py)?;
    if let Some(outside) = ranks.iter().find(|rank| **rank >= graph.world_size()) {
        return Err(ConfigError::new_err(format!("rank {outside} is none of the {} of the job", graph.world_size())));
    }
    let ranks: Vec<Rank> = ranks.into_iter().map(Rank).collect();
    let written = py.detach(|| chakra::write::write_ranks(&graph, &ranks, &prefix));
    let written = written.map_err(|error| PyOSError::new_err(format!("cannot write {}: {error}", prefix.display())))?;
    serde_json::to_string(&written).map_err(|error| from_json("result", &error))
}
