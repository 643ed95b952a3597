//! The job message by message: equal to the closed forms without contention, and what sharing and overlap do.

mod alone;
mod fabric;
mod fair;
mod goal;
mod overlap;
mod rules;
mod step;

use crate::sim::jobs::{call, compute};
use prism_engine::collective::tuning::Tuning;
use prism_engine::graph::op::{CollectiveKind, Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use std::sync::Arc;

pub(crate) fn op(stream: u32, kind: OpKind) -> Op {
    Op { host_gap: SimTime::ZERO, stream: StreamId(stream), kind }
}

/// The network whose messages are lowered: one wide channel.
pub(crate) fn profile() -> Profile {
    let mut profile = crate::sim::jobs::profile();
    profile.network.tuning = Tuning::Fastest;
    profile
}

pub(crate) fn us(us: i64) -> SimTime {
    SimTime::from_ns(us * 1000)
}

/// A program per rank, and communicators by their members; a rank's slots are the communicators it is in, in order.
pub(crate) fn graph(programs: &[Vec<Op>], comms: &[Vec<u32>]) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(programs.len() as u32);
    builder.intern_name("work");
    let made: Vec<_> =
        comms.iter().map(|members| builder.add_comm(members.iter().copied().map(Rank).collect())).collect();
    for (rank, program) in programs.iter().enumerate() {
        let template = builder.add_template(&format!("rank {rank}"), program).expect("valid");
        let own = comms.iter().zip(&made).filter(|(members, _)| members.contains(&(rank as u32)));
        builder.set_rank(Rank(rank as u32), template, own.map(|(_, comm)| *comm).collect());
    }
    Arc::new(builder.finish().expect("valid"))
}

/// One collective of some of the ranks, each of which computes for some µs before.
pub(crate) fn collective_graph(
    world: u32,
    members: &[(u32, i64)],
    kind: CollectiveKind,
    count: u64,
    root: u32,
) -> Arc<Graph> {
    let mut collective = call(0, kind, count, 0);
    if let OpKind::Collective { root: place, .. } = &mut collective {
        *place = root;
    }
    let program = |rank: u32| match members.iter().find(|(member, _)| *member == rank) {
        Some((_, time)) => vec![op(0, compute(us(*time))), op(0, collective)],
        None => Vec::new(),
    };
    let programs: Vec<_> = (0..world).map(program).collect();
    graph(&programs, &[members.iter().map(|(rank, _)| *rank).collect()])
}
