//! Perturbations: each rule against numbers worked out by hand and against the brute-force evaluator.

mod compute;
mod deaths;
mod live;
mod network;
mod text;
mod thermal;

use prism_engine::graph::op::{ComputeClass, Op, OpKind, Provenance};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{NameId, Rank, StreamId};
use prism_engine::perturb::{Perturbations, World};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::sim::{SimError, SimReport};
use prism_engine::units::SimTime;
use std::sync::Arc;

pub(crate) fn profile() -> Profile {
    Profile::builtin("h100-sxm").expect("built in")
}

/// Reads perturbations of a job of `size` ranks.
pub(crate) fn rules(size: u32, text: &str) -> Perturbations {
    Perturbations::from_toml(text, World::new(size, &profile())).expect("valid perturbations")
}

pub(crate) fn options(perturb: Perturbations) -> ReplayOptions {
    ReplayOptions { perturb, ..ReplayOptions::new(profile()) }
}

pub(crate) fn run(graph: &Arc<Graph>, text: &str) -> Result<SimReport, SimError> {
    replay_ranks(graph, &options(rules(graph.world_size(), text)))
}

/// When every rank is through, in ns.
pub(crate) fn ends_ns(graph: &Arc<Graph>, text: &str) -> Vec<i64> {
    let report = run(graph, text).expect("no deadlock");
    report.ranks.iter().map(|rank| rank.final_time.as_ns()).collect()
}

/// An op issued as soon as the host can.
pub(crate) fn op(stream: u32, kind: OpKind) -> Op {
    Op { host_gap: SimTime::ZERO, stream: StreamId(stream), kind }
}

/// A compute op of `name` (0 is `work`, 1 is `expert_gemm`).
pub(crate) fn compute(us: i64, class: ComputeClass, name: u32) -> OpKind {
    let duration = SimTime::from_ns(us * 1000);
    OpKind::Compute { duration, name: NameId(name), class, provenance: Provenance::Measured }
}

/// A job of `size` ranks with one program and one communicator, the world.
pub(crate) fn job(size: u32, ops: &[Op]) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(size);
    builder.intern_name("work");
    builder.intern_name("expert_gemm");
    let world = builder.add_comm((0..size).map(Rank).collect());
    let template = builder.add_template("all", ops).expect("valid");
    (0..size).for_each(|rank| builder.set_rank(Rank(rank), template, vec![world]));
    Arc::new(builder.finish().expect("valid"))
}
