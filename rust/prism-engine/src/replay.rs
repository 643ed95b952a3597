//! Replay of a whole job from its graph: every rank virtual.

mod limits;

pub use crate::contention::Contention;
pub(crate) use limits::{check_events, placed};

use crate::contention::{Overlap, Traffic, evaluate};
use crate::graph::Graph;
use crate::ids::Rank;
use crate::lower::{LowerOptions, StepMessages, lower};
use crate::perturb::Perturbations;
use crate::profile::Profile;
use crate::sim::{
    DeviceTime, Peers, SimError, SimOptions, SimReport, Simulation, Summary, add_constant_factors, compact,
};
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who evaluates a job without contention. Has no effect on results but for their speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Evaluator {
    /// Ranks that have a program each are evaluated one by one, others by roles.
    #[default]
    Auto,
    /// Ranks of one program together.
    Roles,
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
    /// Who evaluates a job without contention.
    pub evaluator: Evaluator,
    /// How concurrent communication shares the network. With any sharing every message is evaluated, rank by rank.
    pub contention: Contention,
    /// How much slower computations are beside communication. The same cost as contention, if there is any factor.
    pub overlap: Overlap,
    /// How finely collectives are cut where messages are evaluated.
    pub step_messages: StepMessages,
    /// Most messages that are evaluated.
    pub max_messages: u64,
}

impl ReplayOptions {
    /// Full speed, no contention; overlap as the profile has it.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let (slow, perturb) = (BTreeMap::new(), Perturbations::default());
        Self {
            overlap: profile.overlap.unwrap_or_default(),
            profile,
            slow,
            perturb,
            symmetry: true,
            evaluator: Evaluator::Auto,
            contention: Contention::None,
            step_messages: StepMessages::Fine,
            max_messages: LowerOptions::MAX_MESSAGES,
        }
    }
}

impl ReplayOptions {
    /// Is every operation evaluated by itself?
    fn is_alone(&self) -> bool {
        self.contention == Contention::None && self.overlap.is_none()
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
    /// Where messages were evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// Replays the job. Deterministic: depends on nothing but the arguments.
pub fn replay(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<ReplayResult, SimError> {
    let (summary, traffic) = if options.is_alone() {
        (run(graph, options)?.into_summary(), None)
    } else {
        let (report, traffic) = replay_messages(graph, options)?;
        (report.into_summary(), Some(traffic))
    };
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
        traffic,
    })
}

/// Replays the job and tells about every rank.
///
/// # Errors
/// What the simulation refuses; waits for events that were not recorded before; times that do not fit.
pub fn replay_ranks(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<SimReport, SimError> {
    if options.is_alone() { Ok(run(graph, options)?.into_report()) } else { Ok(replay_messages(graph, options)?.0) }
}

/// A job evaluated to the end.
enum Evaluated {
    ByRoles(Box<Simulation>),
    ByRanks(SimReport),
}

impl Evaluated {
    fn into_summary(self) -> Summary {
        match self {
            Self::ByRoles(simulation) => simulation.summary(),
            Self::ByRanks(report) => report.into_summary(),
        }
    }

    fn into_report(self) -> SimReport {
        match self {
            Self::ByRoles(simulation) => simulation.report(),
            Self::ByRanks(report) => report,
        }
    }
}

/// Replays rank by rank without contention, which is the faster way where hardly two ranks have one program; the same report
/// but for the number of roles. `None` where this cannot be: perturbations other than constant slow-downs, and jobs
/// that do not get through.
#[must_use]
pub fn replay_rank_by_rank(graph: &Arc<Graph>, options: &ReplayOptions) -> Option<SimReport> {
    if options.perturb.first_changing(graph.world_size()).is_some() {
        return None;
    }
    let mut slow = options.slow.clone();
    add_constant_factors(graph.world_size(), &mut slow, &options.perturb);
    compact::evaluate(graph, &options.profile, &slow)
}

/// Replays without contention: operation by operation.
fn run(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<Evaluated, SimError> {
    if options.evaluator == Evaluator::Auto
        && has_hardly_roles(graph)
        && let Some(report) = replay_rank_by_rank(graph, options)
    {
        return Ok(Evaluated::ByRanks(report));
    }
    Ok(Evaluated::ByRoles(Box::new(by_roles(graph, options)?)))
}

/// Do hardly two ranks have one program?
fn has_hardly_roles(graph: &Graph) -> bool {
    let mut used = vec![false; graph.num_templates()];
    (0..graph.world_size()).for_each(|rank| used[graph.rank_template(Rank(rank)).index()] = true);
    let used = used.into_iter().filter(|used| *used).count();
    (graph.world_size() as usize) < 2 * used
}

fn by_roles(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<Simulation, SimError> {
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

/// Replays message by message, after a replay without contention has shown that everybody gets through.
fn replay_messages(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<(SimReport, Traffic), SimError> {
    if let Some(rule) = options.perturb.first_changing(graph.world_size()) {
        let what = format!("the perturbation {rule} together with contention or overlap (constant stragglers are)");
        return Err(SimError::Unavailable { what });
    }
    let alone = run(graph, options)?.into_summary().final_time;
    let mut slow = options.slow.clone();
    add_constant_factors(graph.world_size(), &mut slow, &options.perturb);
    let lowering = LowerOptions {
        slow,
        step_messages: options.step_messages,
        max_messages: options.max_messages,
        ..LowerOptions::new(options.profile.clone())
    };
    let job = lower(graph, &lowering)?;
    let evaluation = evaluate(&job, options.contention, &options.overlap)?;
    let traffic = Traffic::new(&job, &evaluation, options.contention, &options.overlap, alone);
    Ok((evaluation.report(&job), traffic))
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
