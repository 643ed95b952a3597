//! Replay speed. Every case checks its result before it is timed; the best of a few runs counts, because the machine is shared.
//!
//! `cargo bench -p prism-engine --bench replay`

#![allow(clippy::print_stdout, reason = "the numbers are the output")]

use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{EventId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, ReplayResult, replay};
use prism_engine::sim::{Peers, Question, SimOptions, Simulation};
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RUNS: usize = 3;

fn main() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let graph = Arc::new(data_parallel(8192, 3));
    let plain = ReplayOptions::new(profile.clone());
    let one = ReplayOptions { slow: BTreeMap::from([(Rank(4242), 1.3)]), ..plain.clone() };
    let every = ReplayOptions { slow: every_rank(8192), ..plain.clone() };
    let base = time("DDP 8,192 ranks x 3 iterations", &graph, &plain).iteration_time_ns;
    let slowed = time("the same, one straggler", &graph, &one).iteration_time_ns;
    assert!(slowed[2] > base[2], "a straggler makes the job slower");
    time("the same, every rank with its own speed", &graph, &every);
    beside_virtual_ranks(&graph, &plain);
    for dp in [16, 128] {
        let graph = Arc::new(TransformerStep { dp, ..TransformerStep::default() }.graph().expect("valid"));
        time(&format!("transformer step, {} ranks", graph.world_size()), &graph, &plain);
        let every = ReplayOptions { slow: every_rank(graph.world_size()), ..plain.clone() };
        time("the same, every rank with its own speed", &graph, &every);
    }
}

fn every_rank(world_size: u32) -> BTreeMap<Rank, f64> {
    (0..world_size).map(|rank| (Rank(rank), 1.0 + f64::from(rank % 97) * 1e-4)).collect()
}

fn time(what: &str, graph: &Arc<Graph>, options: &ReplayOptions) -> ReplayResult {
    let mut best = Duration::MAX;
    let first = replay(graph, options).expect("no deadlock");
    assert_eq!(first.ops_evaluated, graph.num_ops(), "every op is evaluated");
    for _ in 0..RUNS {
        let start = Instant::now();
        let result = replay(graph, options).expect("no deadlock");
        best = best.min(start.elapsed());
        assert_eq!(result, first, "the same result every time");
    }
    let rate = first.ops_evaluated as f64 / best.as_secs_f64() / 1e6;
    println!("{what}: {} ops, {:.1} ms, {rate:.0} M ops/s", first.ops_evaluated, best.as_secs_f64() * 1e3);
    first
}

/// One live rank that does what was recorded, beside 8,191 virtual ones; then many host waits in a row.
fn beside_virtual_ranks(graph: &Arc<Graph>, options: &ReplayOptions) {
    let rank = Rank(5);
    let sim_options = SimOptions { live: vec![rank], ..SimOptions::new(options.profile.clone()) };
    let mut simulation =
        Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), sim_options).expect("valid");
    let members: Vec<u32> = (0..graph.world_size()).collect();
    simulation.live_comm(rank, &members).expect("in the graph");
    let start = Instant::now();
    for op in graph.template(graph.rank_template(rank)).iter() {
        simulation.push(rank, op).expect("valid");
        if op.kind == OpKind::StreamSync {
            simulation.ask(rank, Question::Resume, 0);
            simulation.run().expect("fits");
            assert_eq!(simulation.take_answers().len(), 1, "nobody else is missing");
        }
    }
    println!("a live rank beside 8,191 virtual ranks x 3 iterations: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let (sync, count) = (Op { host_gap: SimTime::from_ns(500), stream: StreamId(0), kind: OpKind::StreamSync }, 10_000);
    let start = Instant::now();
    for ticket in 0..count {
        simulation.push(rank, sync).expect("valid");
        simulation.ask(rank, Question::Resume, ticket);
        simulation.run().expect("fits");
        assert_eq!(simulation.take_answers().len(), 1, "nothing to wait for");
    }
    println!("a host wait: {:.2} us", start.elapsed().as_secs_f64() * 1e6 / count as f64);
}

/// Data-parallel training: per iteration 900 kernels, 24 gradient buckets reduced on a second stream, one loss value read.
fn data_parallel(world_size: u32, iterations: usize) -> Graph {
    let mut builder = GraphBuilder::new(world_size);
    let name = builder.intern_name("kernel");
    let world = builder.add_comm((0..world_size).map(Rank).collect());
    let mut ops = Vec::new();
    let mut add = |stream, kind| ops.push(Op { host_gap: SimTime::from_ns(4_000), stream: StreamId(stream), kind });
    let kernel = |us: i64| OpKind::Compute {
        duration: SimTime::from_ns(us * 1000),
        name,
        class: ComputeClass::Kernel,
        provenance: Provenance::Modelled,
    };
    add(0, OpKind::TrainingBegin);
    for _ in 0..iterations {
        for index in 0..900 {
            add(0, kernel(5 + index % 40));
            if index >= 420 && index % 20 == 0 {
                add(0, OpKind::EventRecord { event: EventId(0) });
                add(1, OpKind::EventWait { event: EventId(0) });
                let (kind, dtype, reduce) = (CollectiveKind::AllReduce, DataType::Bfloat16, ReduceOp::Sum);
                add(1, OpKind::Collective { slot: SlotId(0), kind, dtype, reduce, root: 0, count: 13 << 20, group: 0 });
            }
        }
        add(1, OpKind::EventRecord { event: EventId(1) });
        add(0, OpKind::EventWait { event: EventId(1) });
        add(0, kernel(300));
        add(0, OpKind::StreamSync);
        add(0, OpKind::IterationEnd);
    }
    let template = builder.add_template("ddp", &ops).expect("valid");
    (0..world_size).for_each(|rank| builder.set_rank(Rank(rank), template, vec![world]));
    builder.finish().expect("valid")
}
