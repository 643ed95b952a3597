//! Replay of a whole job from its graph: every rank virtual.

mod limits;

pub(crate) use limits::{check_events, placed};

use crate::graph::Graph;
use crate::ids::Rank;
use crate::perturb::Perturbations;
use crate::profile::Profile;
use crate::sim::{DeviceTime, Peers, SimError, SimOptions, SimReport, Simulation};
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How concurrent communication shares the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contention {
    /// It does not: every operation has the network to itself.
    #[default]
    None,
    /// Operations share links fairly while they overlap.
    FairShare,
}

/// How to replay.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Costs of communication.
    pub profile: Profile,
    /// Slow-down of a rank's compute ops (1.3 = 30 % longer).
    pub slow: BTreeMap<Rank, f64>,
    /// Changes to the job.
    pub perturb: Perturbations,
    /// Evaluate ranks that cannot be told apart once, for as long as they cannot. Times are the same either way.
    pub symmetry: bool,
    /// How concurrent communication shares the network.
    pub contention: Contention,
}

impl ReplayOptions {
    /// Full speed, no contention.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let (slow, perturb) = (BTreeMap::new(), Perturbations::default());
        Self { profile, slow, perturb, symmetry: true, contention: Contention::None }
    }
}

/// Result of a replay. Times are whole ns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReplayResult {
    /// Ranks of the job.
    pub world_size: u32,
    /// Duration of each iteration of the job: from the last rank's end of the previous one to the last rank's end.
    pub iteration_time_ns: Vec<i64>,
    /// When the last rank is through with everything.
    pub total_time_ns: i64,
    /// Ops of all ranks.
    pub ops: u64,
    /// Ops evaluated, counted once per class of ranks that could not be told apart at that op.
    pub ops_evaluated: u64,
    /// Classes of ranks that were evaluated as one to the end: all times of two ranks of a class are equal.
    pub rank_classes: u64,
    /// Size of the graph.
    pub graph_bytes: u64,
    /// Wall time of the replay; filled in by the caller, who has a clock.
    pub wall_ns: u64,
    /// Peak memory of the process; filled in by the caller.
    pub peak_rss_bytes: u64,
    /// Compute and communication of all ranks, ns.
    pub device_time: DeviceTime,
    /// The same as `device_time.by_provenance`.
    pub device_time_by_provenance: BTreeMap<crate::graph::op::Provenance, i64>,
    /// The rank whose last iteration ends last; of several, the lowest.
    pub critical_rank: Option<Rank>,
}

/// Replays the job. Deterministic: depends on nothing but the arguments.
pub fn replay(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<ReplayResult, SimError> {
    let summary = run(graph, options)?.summary();
    Ok(ReplayResult {
        world_size: graph.world_size(),
        iteration_time_ns: summary.iteration_times.into_iter().map(SimTime::as_ns).collect(),
        total_time_ns: summary.final_time.as_ns(),
        ops: graph.num_ops(),
        ops_evaluated: summary.ops_evaluated,
        rank_classes: summary.classes as u64,
        graph_bytes: graph.graph_bytes(),
        wall_ns: 0,
        peak_rss_bytes: 0,
        device_time_by_provenance: summary.device_time.by_provenance.clone(),
        critical_rank: summary.critical_rank,
        device_time: summary.device_time,
    })
}

/// Replays the job and tells about every rank.
///
/// # Errors
/// What the simulation refuses; waits for events that were not recorded before; times that do not fit.
pub fn replay_ranks(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<SimReport, SimError> {
    run(graph, options).map(|simulation| simulation.report())
}

fn run(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<Simulation, SimError> {
    if options.contention == Contention::FairShare {
        return Err(SimError::Unavailable { what: "contention \"fair-share\"".to_owned() });
    }
    check_events(graph)?;
    if options.symmetry {
        let mut simulation = simulation(graph, options, true)?;
        match simulation.run() {
            Ok(()) => return Ok(simulation),
            Err(error @ SimError::Invariant { .. }) => return Err(error),
            // What went wrong is told of ranks.
            Err(_) => {}
        }
    }
    let mut simulation = simulation(graph, options, false)?;
    simulation.run().map_err(|error| placed(error, graph, options, Some(&simulation)))?;
    Ok(simulation)
}

fn simulation(graph: &Arc<Graph>, options: &ReplayOptions, symmetry: bool) -> Result<Simulation, SimError> {
    let sim_options = SimOptions {
        slow: options.slow.clone(),
        perturb: options.perturb.clone(),
        symmetry,
        ..SimOptions::new(options.profile.clone())
    };
    Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), sim_options)
        .map_err(|error| placed(error, graph, options, None))
}
