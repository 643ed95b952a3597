//! Fault tolerance: `prism_core.spare`.

use crate::error::{ConfigError, from_json};
use crate::graph::Graph;
use prism_engine::spare::job::JobError;
use prism_engine::spare::job::anatomy::Anatomy;
use prism_engine::spare::job::stacked::{Step, stacked};
use prism_engine::spare::laws;
use prism_engine::spare::layout::{Action, Layout as EngineLayout, Plan};
use prism_engine::spare::matching;
use prism_engine::spare::placement::{Placement, spread};
use prism_engine::spare::plan::{self, Question};
use prism_engine::spare::simulate::{
    Failures, Job, Policy, Recovery, Run, Setup, run_seeds, run_with_timeline, summarise,
};
use prism_engine::spare::{SpareError, ruler};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value, json};
use std::num::NonZeroU32;

fn from_spare(error: SpareError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// A placement as Python names it: a name, or a list of offsets.
#[derive(FromPyObject)]
pub(crate) enum PlacementName {
    Name(String),
    Offsets(Vec<u32>),
}

impl PlacementName {
    fn placement(self, seed: u64) -> Result<Placement, SpareError> {
        match self {
            Self::Name(name) => Placement::named(&name, seed),
            Self::Offsets(offsets) => Ok(Placement::Offsets(offsets)),
        }
    }
}

#[pyfunction]
pub(crate) fn spare_law(name: &str, arguments: Vec<f64>) -> PyResult<f64> {
    let whole = |at: usize| -> PyResult<u32> {
        let value = arguments[at];
        if value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value) {
            return Ok(value as u32);
        }
        Err(ConfigError::new_err(format!("{value} must be a whole number of at least 0")))
    };
    let result = match (name, arguments.len()) {
        ("mean_endurable_failures", 2) => laws::mean_endurable_failures(whole(0)?, whole(1)?),
        ("overhead_lower_bound", 2) => laws::overhead_lower_bound(whole(0)?, whole(1)?),
        ("redundancy_rule", 1) => laws::redundancy_rule(whole(0)?).map(f64::from),
        ("max_redundancy", 1) => Ok(f64::from(ruler::max_order(whole(0)?))),
        ("checkpoint_interval", 3) => laws::checkpoint_interval(arguments[0], arguments[1], arguments[2]),
        ("availability", 3) => laws::availability(arguments[0], arguments[1], arguments[2]),
        ("masked_probability", 3) => laws::masked_probability(whole(0)?, whole(1)?, arguments[2]),
        ("time_to_wipe_out", 4) => {
            laws::with_repair(whole(0)?, whole(1)?, arguments[2], arguments[3]).map(|found| found.0)
        }
        ("relative_time", 5) => laws::relative_time(whole(0)?, whole(1)?, arguments[2], arguments[3], arguments[4]),
        (name, count) => return Err(ConfigError::new_err(format!("no law {name:?} of {count} arguments"))),
    };
    result.map_err(from_spare)
}

/// Young's, Daly's and the exact interval, as a dictionary.
#[pyfunction]
pub(crate) fn spare_intervals(py: Python<'_>, save_s: f64, restart_s: f64, mtbf_s: f64) -> PyResult<Bound<'_, PyDict>> {
    let found = laws::intervals(save_s, restart_s, mtbf_s).map_err(from_spare)?;
    let result = PyDict::new(py);
    for (key, value) in [
        ("young_s", found.young_s),
        ("daly_s", found.daly_s),
        ("exact_s", found.exact_s),
        ("efficiency", found.efficiency),
    ] {
        result.set_item(key, value)?;
    }
    result.set_item("is_young_off", found.is_young_off)?;
    Ok(result)
}

#[pyfunction]
pub(crate) fn spare_expected_masked(
    py: Python<'_>,
    n: u32,
    r: u32,
    placement: PlacementName,
    seed: u64,
) -> PyResult<(f64, bool)> {
    let placement = placement.placement(seed).map_err(from_spare)?;
    let found = py.detach(|| laws::expected_masked(n, r, &placement)).map_err(from_spare)?;
    Ok((found.0, found.1 == laws::Exactness::Exact))
}

#[pyfunction]
pub(crate) fn spare_offsets(n: u32, r: u32, placement: PlacementName, seed: u64) -> PyResult<Vec<u32>> {
    placement.placement(seed).and_then(|placement| placement.offsets(n, r)).map_err(from_spare)
}

/// Offsets, circle order, types whose hosts share a domain, most hosts of a type in a domain.
#[pyfunction]
pub(crate) fn spare_spread(domains: Vec<u32>, r: u32) -> PyResult<(Vec<u32>, Vec<u32>, u32, u32)> {
    let found = spread(&domains, r).map_err(from_spare)?;
    Ok((found.offsets, found.order, found.shared, found.most_in_domain))
}

#[pyfunction]
pub(crate) fn spare_min_stacks(n: u32, offsets: Vec<u32>, failed: Vec<u32>) -> PyResult<Option<u32>> {
    matching::min_stacks(n, &offsets, &failed).map_err(from_spare)
}

#[pyfunction]
pub(crate) fn spare_wipe_out_index(n: u32, offsets: Vec<u32>, failure_order: Vec<u32>) -> PyResult<Option<u32>> {
    matching::wipe_out_index(n, &offsets, &failure_order).map_err(from_spare)
}

#[pyfunction]
pub(crate) fn spare_stack_thresholds(
    n: u32,
    offsets: Vec<u32>,
    failure_order: Vec<u32>,
) -> PyResult<std::collections::BTreeMap<u32, u32>> {
    matching::stack_thresholds(n, &offsets, &failure_order).map_err(from_spare)
}

/// Stacks of all groups, as far as failures have reordered them.
#[pyclass(module = "prism_core._native")]
pub(crate) struct Layout {
    inner: EngineLayout,
    groups: u32,
}

#[pymethods]
impl Layout {
    #[new]
    fn new(n: u32, r: u32, placement: PlacementName, seed: u64) -> PyResult<Self> {
        let stacks = placement.placement(seed).and_then(|placement| placement.stacks(n, r)).map_err(from_spare)?;
        Ok(Self { inner: EngineLayout::new(stacks), groups: n })
    }

    #[getter]
    fn stacks(&self) -> u32 {
        self.inner.stacks()
    }

    #[getter]
    fn live(&self) -> Vec<u32> {
        (0..self.groups).filter(|group| self.inner.is_live(*group)).collect()
    }

    fn computed(&self, group: u32) -> PyResult<Vec<u32>> {
        if group >= self.groups {
            return Err(ConfigError::new_err(format!("group is {group}: the groups are 0 to {}", self.groups - 1)));
        }
        Ok(self.inner.computed(group).to_vec())
    }

    fn fail(&mut self, py: Python<'_>, groups: Vec<u32>) -> PyResult<Py<PyDict>> {
        let plan = self.inner.fail(&groups).map_err(from_spare)?;
        plan_dict(py, plan)
    }

    /// Groups that had failed are live again.
    fn rejoin(&mut self, py: Python<'_>, groups: Vec<u32>) -> PyResult<Py<PyDict>> {
        let plan = self.inner.rejoin(&groups).map_err(from_spare)?;
        plan_dict(py, plan)
    }

    fn reset(&mut self) {
        self.inner.reset();
    }
}

fn plan_dict(py: Python<'_>, plan: Plan) -> PyResult<Py<PyDict>> {
    let result = PyDict::new(py);
    let action = match plan.action {
        Action::Continue => "continue",
        Action::Reorder => "reorder",
        Action::WipeOut => "wipe-out",
    };
    result.set_item("action", action)?;
    result.set_item("stacks", plan.stacks)?;
    let moves: Vec<(u32, u32)> = plan.moves.iter().map(|moved| (moved.group, moved.shard)).collect();
    result.set_item("moves", moves)?;
    result.set_item("computed_by", plan.computed_by)?;
    result.set_item("lost", plan.lost)?;
    Ok(result.unbind())
}

struct Options(Map<String, Value>);

impl Options {
    fn new(text: &str) -> PyResult<Self> {
        serde_json::from_str(text).map(Self).map_err(|error| from_json("options", &error))
    }

    fn take<T: serde::de::DeserializeOwned>(&mut self, key: &str) -> PyResult<T> {
        serde_json::from_value(self.0.remove(key).unwrap_or_default()).map_err(|error| from_json(key, &error))
    }

    fn placement(value: &Value, seed: u64) -> PyResult<Placement> {
        match value {
            Value::String(name) => Placement::named(name, seed).map_err(from_spare),
            other => {
                let offsets = serde_json::from_value(other.clone()).map_err(|error| from_json("placement", &error))?;
                Ok(Placement::Offsets(offsets))
            }
        }
    }

    fn policy(&mut self) -> PyResult<Policy> {
        let name: String = self.take("policy")?;
        let seed: u64 = self.take("placement_seed")?;
        let redundancy = |options: &mut Self| -> PyResult<u32> {
            let r: Option<u32> = options.take("r")?;
            r.ok_or_else(|| ConfigError::new_err(format!("r is missing: policy {name:?} needs it")))
        };
        match name.as_str() {
            "spare" => {
                let r = redundancy(self)?;
                let placement = Self::placement(&self.take("placement")?, seed)?;
                Ok(Policy::Spare { r, placement })
            }
            "replication" => Ok(Policy::Replication { r: redundancy(self)? }),
            "checkpoint" => Ok(Policy::Checkpoint),
            "elastic" => Ok(Policy::Elastic),
            "spares" => Ok(Policy::Spares { spares: self.take("spares")? }),
            other => Err(ConfigError::new_err(format!(
                "policy is {other:?}: it must be spare, replication, checkpoint, elastic or spares"
            ))),
        }
    }

    fn threads(&mut self) -> PyResult<NonZeroU32> {
        let threads: u32 = self.take("threads")?;
        NonZeroU32::new(threads).ok_or_else(|| ConfigError::new_err("threads is 0: there must be at least one"))
    }
}

/// Simulates trainings: `{"summary": ..., "runs": [...]}`.
#[pyfunction]
pub(crate) fn spare_simulate_json(py: Python<'_>, options_json: &str) -> PyResult<String> {
    let mut options = Options::new(options_json)?;
    let (job, failures, recovery): (Job, Failures, Recovery) =
        (options.take("job")?, options.take("failures")?, options.take("recovery")?);
    let policy = options.policy()?;
    let setup = Setup {
        job,
        failures,
        recovery,
        policy,
        published: options.take("published")?,
        give_up: options.take("give_up")?,
    };
    let (first, count): (u64, u64) = (options.take("first_seed")?, options.take("seeds")?);
    let threads = options.threads()?;
    let runs: Vec<Run> =
        py.detach(|| run_seeds(&setup, first..first.saturating_add(count), threads)).map_err(from_spare)?;
    let mut result = json!({ "summary": summarise(&runs), "runs": runs });
    if options.take::<Option<bool>>("timeline")? == Some(true) {
        result["timeline"] = json!(py.detach(|| run_with_timeline(&setup, first)).1);
    }
    Ok(result.to_string())
}

/// Recommends a set-up.
#[pyfunction]
pub(crate) fn spare_plan_json(py: Python<'_>, options_json: &str) -> PyResult<String> {
    let mut options = Options::new(options_json)?;
    let placements: Vec<Value> = options.take("placements")?;
    let question = Question {
        job: options.take("job")?,
        failures: options.take("failures")?,
        recovery: options.take("recovery")?,
        redundancy: options.take("redundancy")?,
        placements: placements.iter().map(|value| Options::placement(value, 0)).collect::<PyResult<_>>()?,
        spares: options.take("spares")?,
        fits_memory: options.take("fits_memory")?,
        seeds: options.take("seeds")?,
        threads: options.threads()?,
    };
    let found = py.detach(|| plan::plan(&question)).map_err(from_spare)?;
    serde_json::to_string(&found).map_err(|error| from_json("plan", &error))
}

/// Closed forms over a range of redundancies.
#[pyfunction]
pub(crate) fn spare_frontier_json(py: Python<'_>, options_json: &str) -> PyResult<String> {
    let mut options = Options::new(options_json)?;
    let placements: Vec<Value> = options.take("placements")?;
    let placements = placements.iter().map(|value| Options::placement(value, 0)).collect::<PyResult<Vec<_>>>()?;
    let (groups, redundancy): (u32, (u32, u32)) = (options.take("groups")?, options.take("redundancy")?);
    let times: (f64, f64, f64) = (options.take("save_s")?, options.take("restart_s")?, options.take("system_mtbf_s")?);
    let repair: Option<f64> = options.take("repair_s")?;
    let rows = py.detach(|| plan::frontier(groups, redundancy, &placements, times, repair)).map_err(from_spare)?;
    serde_json::to_string(&rows).map_err(|error| from_json("frontier", &error))
}

fn from_job(error: JobError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// Groups and steps of a collected job.
#[pyfunction]
#[pyo3(signature = (graph, groups=None))]
pub(crate) fn spare_anatomy_json(py: Python<'_>, graph: PyRef<'_, Graph>, groups: Option<u32>) -> PyResult<String> {
    let graph = graph.inner(py)?;
    let found = py.detach(|| Anatomy::of(&graph, groups)).map_err(from_job)?;
    serde_json::to_string(&found).map_err(|error| from_json("anatomy", &error))
}

/// The job with steps of several stack entries, and groups that die: a list of the engine's `Step`s.
#[pyfunction]
#[pyo3(signature = (graph, steps_json, groups=None))]
pub(crate) fn spare_stacked(
    py: Python<'_>,
    graph: PyRef<'_, Graph>,
    steps_json: &str,
    groups: Option<u32>,
) -> PyResult<Graph> {
    let steps: Vec<Step> = serde_json::from_str(steps_json).map_err(|error| from_json("steps", &error))?;
    let graph = graph.inner(py)?;
    let found = py.detach(|| Anatomy::of(&graph, groups).and_then(|anatomy| stacked(&graph, &anatomy, &steps)));
    Ok(found.map_err(from_job)?.into())
}
