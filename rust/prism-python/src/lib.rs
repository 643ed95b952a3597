//! `prism_core._native`: converts, calls the engine, converts back. No logic of its own.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]

mod collectives;
mod cost;
mod diagnose;
mod error;
mod export;
mod graph;
mod imports;
mod messages;
mod replay;
mod session;
mod slice;
mod spare;
mod synthetic;

use pyo3::prelude::*;

/// The engine of prism_core.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::build_info;
    #[pymodule_export]
    use super::collectives::{collective_completion, collective_models};
    #[pymodule_export]
    use super::cost::work_durations_json;
    #[pymodule_export]
    use super::diagnose::{diagnose_json, memory_json, overview_json};
    #[pymodule_export]
    use super::error::{ConfigError, DeadlockError, GraphFormatError, MismatchError, PrismError, ShimError};
    #[pymodule_export]
    use super::export::{export_chakra, export_goal, export_timeline};
    #[pymodule_export]
    use super::graph::{Graph, Recording, assemble};
    #[pymodule_export]
    use super::imports::{ReadCounter, calibrate_comm, import_chakra, import_kineto, import_simai};
    #[pymodule_export]
    use super::messages::MessageProgram;
    #[pymodule_export]
    use super::replay::{
        nccl_setting_names, profile_names, profile_source, profile_toml, profile_with_nccl, replay_json,
    };
    #[pymodule_export]
    use super::session::Session;
    #[pymodule_export]
    use super::slice::{influence_json, repeated_clock_json, shared_clocks_json, solve_clocks_json};
    #[pymodule_export]
    use super::spare::{
        Layout, spare_anatomy_json, spare_expected_masked, spare_frontier_json, spare_intervals, spare_law,
        spare_min_stacks, spare_offsets, spare_plan_json, spare_simulate_json, spare_spread, spare_stack_thresholds,
        spare_stacked, spare_wipe_out_index,
    };
    #[pymodule_export]
    use super::synthetic::transformer_step;
}

/// Version and build of the extension, for bug reports.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, pyo3::types::PyDict>> {
    let info = pyo3::types::PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("revision", env!("PRISM_REVISION"))?;
    info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
    Ok(info)
}
