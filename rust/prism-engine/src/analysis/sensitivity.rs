//! What would change the iteration time, and by how much.
//!
//! Each answer is the difference of two exact replays: one as the job is, one with a single thing made slower by a small
//! step. Compute behaves in a max-plus way, so the change is never less than the thing's share of the critical path
//! times the step, and equal to it until another path takes over.

use crate::graph::op::{ComputeClass, OpKind};
use crate::graph::{Graph, GraphBuilder, GraphError};
use crate::ids::{CommId, Rank, TemplateId};
use crate::profile::Profile;
use crate::replay::{ReplayOptions, replay_ranks};
use crate::sim::SimError;
use crate::units::SimTime;
use serde::Serialize;
use std::sync::Arc;

/// How much slower a rank, a class of compute or a bandwidth is made.
pub const STEP: f64 = 0.001;
/// How much longer a latency is made: latencies are whole ns.
pub const LATENCY_STEP: f64 = 0.01;

/// One thing to make slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "parameter", rename_all = "snake_case")]
pub enum Parameter {
    /// All compute of a rank.
    RankSpeed {
        /// Which.
        rank: Rank,
    },
    /// Compute of one class on every rank.
    ComputeClass {
        /// Which.
        class: ComputeClass,
    },
    /// Bandwidth of every NVLink port.
    NvlinkBandwidth,
    /// Latency of every hop over NVLink, in every protocol.
    NvlinkLatency,
    /// Bandwidth of every network card.
    NetworkBandwidth,
    /// Latency of every hop over the network, in every protocol.
    NetworkLatency,
    /// Time from a rank's arrival at communication until it takes part, in every protocol.
    CollectiveLaunch,
}

/// How the iteration answers to one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// What was made slower.
    #[serde(flatten)]
    pub parameter: Parameter,
    /// By which share.
    pub step: f64,
    /// Change of the iteration time, ns.
    pub change_ns: i64,
    /// Relative change of the iteration time per relative change of the parameter: 0.4 means that 10 % slower makes the
    /// iteration 4 % longer, as long as nothing else takes over.
    pub elasticity: f64,
}

/// Makes each of `parameters` slower and replays. One replay per parameter, and one for the job as it is.
pub fn sensitivities(
    graph: &Arc<Graph>,
    options: &ReplayOptions,
    iteration: usize,
    parameters: &[Parameter],
) -> Result<Vec<Sensitivity>, SimError> {
    let before = iteration_time(graph, options, iteration)?;
    let mut found = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        let (graph, options, step) = slower(graph, options, *parameter)?;
        let change = iteration_time(&graph, &options, iteration)? - before;
        let relative = change.0 as f64 / before.0.max(1) as f64;
        let elasticity = if step > 0.0 { relative / step } else { 0.0 };
        found.push(Sensitivity { parameter: *parameter, step, change_ns: change.as_ns(), elasticity });
    }
    Ok(found)
}

fn iteration_time(graph: &Arc<Graph>, options: &ReplayOptions, iteration: usize) -> Result<SimTime, SimError> {
    let times = replay_ranks(graph, options)?.iteration_times();
    let missing = || SimError::Unavailable { what: format!("iteration {iteration} of {}", times.len()) };
    times.get(iteration).copied().ok_or_else(missing)
}

/// The job with one thing slower, and by how much it really is.
fn slower(
    graph: &Arc<Graph>,
    options: &ReplayOptions,
    parameter: Parameter,
) -> Result<(Arc<Graph>, ReplayOptions, f64), SimError> {
    let mut options = options.clone();
    let mut graph = Arc::clone(graph);
    let step = match parameter {
        Parameter::RankSpeed { rank } => {
            *options.slow.entry(rank).or_insert(1.0) *= 1.0 + STEP;
            STEP
        }
        Parameter::ComputeClass { class } => {
            let scaled = scaled(&graph, class, 1.0 + STEP);
            graph =
                Arc::new(scaled.map_err(|error| SimError::Unavailable { what: format!("a scaled graph ({error})") })?);
            STEP
        }
        other => slow_network(&mut options.profile, other),
    };
    Ok((graph, options, step))
}

/// Makes one number of the cluster worse; returns by how much.
fn slow_network(profile: &mut Profile, parameter: Parameter) -> f64 {
    let network = &mut profile.network;
    let mut protocols: Vec<_> = network.ll.iter_mut().chain(network.ll128.iter_mut()).collect();
    match parameter {
        Parameter::NvlinkBandwidth => {
            for own in &mut protocols {
                less(&mut own.nvlink_limit_bytes_per_s);
            }
            less(&mut profile.node.nvlink_bytes_per_s)
        }
        Parameter::NetworkBandwidth => {
            for own in &mut protocols {
                less(&mut own.network_limit_bytes_per_s);
            }
            less(&mut network.nic_bytes_per_s)
        }
        Parameter::NvlinkLatency => {
            for own in &mut protocols {
                more(&mut own.ring_nvlink_latency_ns);
                more(&mut own.tree_nvlink_latency_ns);
            }
            more(&mut profile.node.nvlink_latency_ns)
        }
        Parameter::NetworkLatency => {
            for own in &mut protocols {
                more(&mut own.ring_latency_ns);
                more(&mut own.tree_latency_ns);
            }
            more(&mut network.latency_ns)
        }
        Parameter::CollectiveLaunch => {
            for own in &mut protocols {
                more(&mut own.launch_ns);
            }
            more(&mut network.collective_launch_ns)
        }
        Parameter::RankSpeed { .. } | Parameter::ComputeClass { .. } => 0.0,
    }
}

fn less(bandwidth: &mut u64) -> f64 {
    let before = *bandwidth;
    *bandwidth = ((before as f64 / (1.0 + STEP)) as u64).max(1);
    before as f64 / *bandwidth as f64 - 1.0
}

fn more(latency: &mut u64) -> f64 {
    let before = *latency;
    *latency = before + ((before as f64 * LATENCY_STEP).ceil() as u64).max(1);
    (*latency - before) as f64 / before.max(1) as f64
}

/// The same job with all compute of a class longer by a factor. O(template ops + communicator members).
fn scaled(graph: &Graph, class: ComputeClass, factor: f64) -> Result<Graph, GraphError> {
    let mut builder = GraphBuilder::new(graph.world_size());
    for (key, value) in graph.meta() {
        builder.set_meta(key, value);
    }
    for comm in 0..graph.num_comms() as u32 {
        builder.add_comm(graph.comm_members(CommId(comm)).iter().copied().map(Rank).collect());
    }
    for template in 0..graph.num_templates() as u32 {
        let view = graph.template(TemplateId(template));
        let mut ops: Vec<_> = view.iter().collect();
        for op in &mut ops {
            if let OpKind::Compute { duration, name, class: own, .. } = &mut op.kind {
                *name = builder.intern_name(graph.name(*name));
                if *own == class {
                    *duration = duration.scaled(factor);
                }
            }
        }
        builder.add_template(view.name(), &ops)?;
    }
    for rank in (0..graph.world_size()).map(Rank) {
        let template = graph.rank_template(rank);
        builder.set_rank(rank, template, graph.rank_slots(rank).iter().copied().map(CommId).collect());
        for (op, duration) in graph.rank_overrides(rank) {
            let kind = graph.template(template).op(op as usize).kind;
            let is_meant = matches!(kind, OpKind::Compute { class: own, .. } if own == class);
            builder.override_duration(rank, op, if is_meant { duration.scaled(factor) } else { duration });
        }
    }
    builder.finish()
}
