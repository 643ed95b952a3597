//! Replay speed. Every case checks its result before it is timed; the mean CPU time of many runs counts, because the machine is
//! shared.
//!
//! `cargo bench -p prism-engine --bench replay [-- SECTION]` with the sections `ddp`, `live`, `step`, `growth`,
//! `contention`.

#![allow(clippy::print_stdout, reason = "the numbers are the output")]

use prism_engine::contention::{Contention, Overlap, evaluate};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{EventId, Rank, SlotId, StreamId};
use prism_engine::lower::{LowerOptions, StepMessages, lower};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, ReplayResult, replay};
use prism_engine::sim::{Peers, Question, SimOptions, Simulation};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use prism_engine::units::SimTime;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Asks this program for one size of the growth table.
const SIZE: &str = "dp=";

/// A part of the benchmark.
type Section = fn(&Profile);

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let sections: [(&str, Section); 5] =
        [("ddp", ddp), ("live", live), ("step", step), ("growth", growth), ("contention", contention)];
    let profile = Profile::builtin("h100-sxm").expect("built in");
    if let Some(dp) = wanted.iter().find_map(|wanted| wanted.strip_prefix(SIZE)) {
        return one_size(&profile, dp.parse().expect("a number"));
    }
    for (name, section) in sections {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            section(&profile);
        }
    }
}

fn every_rank(world_size: u32) -> BTreeMap<Rank, f64> {
    (0..world_size).map(|rank| (Rank(rank), 1.0 + f64::from(rank * 7919 % world_size) * 1e-6)).collect()
}

fn one_rank(rank: u32) -> BTreeMap<Rank, f64> {
    BTreeMap::from([(Rank(rank), 1.3)])
}

fn ddp(profile: &Profile) {
    let graph = Arc::new(data_parallel(8192, 3));
    let base = time("DDP 8,192 ranks x 3 iterations", &graph, profile, BTreeMap::new(), true);
    let slowed = time("the same, one straggler", &graph, profile, one_rank(4242), true);
    assert!(slowed.iteration_time_ns[2] > base.iteration_time_ns[2], "a straggler makes the job slower");
    time("the same, every rank evaluated", &graph, profile, one_rank(4242), false);
    time("the same, every rank with its own speed", &graph, profile, every_rank(8192), true);
}

fn transformer(dp: u32) -> Arc<Graph> {
    Arc::new(TransformerStep { dp, ..TransformerStep::default() }.graph().expect("valid"))
}

fn step(profile: &Profile) {
    for dp in [16, 128] {
        let graph = transformer(dp);
        let ranks = graph.world_size();
        time(&format!("transformer step, {ranks} ranks"), &graph, profile, BTreeMap::new(), true);
        time("the same, one straggler", &graph, profile, one_rank(ranks / 2 + 77), true);
        time("the same, every rank evaluated", &graph, profile, one_rank(ranks / 2 + 77), false);
        time("the same, every rank with its own speed", &graph, profile, every_rank(ranks), true);
    }
}

/// The step message by message, on the network without structure.
fn contention(_: &Profile) {
    for (dp, none, fifo) in [(8, 0.550_874_570, 0.553_538_924), (128, 0.554_591_0, 0.557_255)] {
        let profile = flat_profile(5_000, 50_000_000_000);
        let options = LowerOptions { step_messages: StepMessages::Coarse, ..LowerOptions::new(profile) };
        let graph = transformer(dp);
        let job = lower(&graph, &options).expect("fits");
        let lowering = cpu(|| lower(&graph, &options).expect("fits")).as_secs_f64();
        println!("transformer step, {} ranks: lowered in {lowering:.2} s", graph.world_size());
        for (rule, expected) in
            [(Contention::None, none), (Contention::Fifo, fifo), (Contention::FairShare, f64::INFINITY)]
        {
            let run = || evaluate(&job, rule, &Overlap::default()).expect("no deadlock").end(&job);
            let end = run().as_ps() as f64 / 1e12;
            let is_right = if expected.is_finite() { (end / expected - 1.0).abs() < 1e-5 } else { end > fifo };
            assert!(is_right, "{end} s, not {expected}");
            let (taken, messages) = (cpu(run).as_secs_f64(), job.num_messages() as f64);
            let (name, rate, rss) = (rule.name(), messages / taken / 1e6, peak_rss() as f64 / 1e6);
            println!(
                "  {name}: {end:.6} s, {messages} messages in {taken:.2} s, {rate:.1} M messages/s, RSS {rss:.0} MB"
            );
        }
    }
}

/// The step at growing size, every rank with its own speed; each size in a process of its own, for its memory.
fn growth(_: &Profile) {
    println!(
        "{:>6} {:>9} {:>9} {:>10} {:>9} {:>10} {:>9}",
        "ranks", "ops", "build ms", "replay ms", "M ops/s", "bytes/op", "RSS MB"
    );
    let this = std::env::current_exe().expect("running");
    for dp in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] {
        let status = Command::new(&this).arg(format!("{SIZE}{dp}")).status().expect("can be started");
        assert!(status.success(), "dp {dp}");
    }
}

fn one_size(profile: &Profile, dp: u32) {
    let graph = transformer(dp);
    let slow = every_rank(graph.world_size());
    let options = ReplayOptions { slow, ..ReplayOptions::new(profile.clone()) };
    let before = peak_rss();
    let first = replay(&graph, &options).expect("no deadlock");
    let peak = peak_rss();
    assert_eq!(first.ops_evaluated, graph.num_ops(), "every op is evaluated");
    let taken = cpu(|| assert_eq!(replay(&graph, &options).as_ref(), Ok(&first), "the same result every time"));
    println!(
        "{:>6} {:>9} {:>9.1} {:>10.1} {:>9.1} {:>10.2} {:>9.0}",
        graph.world_size(),
        first.ops,
        cpu(|| transformer(dp)).as_secs_f64() * 1e3,
        taken.as_secs_f64() * 1e3,
        first.ops as f64 / taken.as_secs_f64() / 1e6,
        (peak - before) as f64 / first.ops as f64,
        peak as f64 / 1e6,
    );
}

/// Runs something again and again; its CPU time on this thread. The kernel counts that in steps of some milliseconds.
fn cpu<T>(mut f: impl FnMut() -> T) -> Duration {
    let (start, mut runs) = (cpu_time(), 0);
    loop {
        f();
        runs += 1;
        let taken = cpu_time().saturating_sub(start);
        if taken > Duration::from_millis(250) {
            return taken / runs;
        }
    }
}

fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    Duration::from_nanos(text.split(' ').next().and_then(|ns| ns.parse().ok()).expect("a number"))
}

fn peak_rss() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

fn time(what: &str, graph: &Arc<Graph>, profile: &Profile, slow: BTreeMap<Rank, f64>, symmetry: bool) -> ReplayResult {
    let options = ReplayOptions { slow, symmetry, ..ReplayOptions::new(profile.clone()) };
    let first = replay(graph, &options).expect("no deadlock");
    if symmetry {
        let each = replay(graph, &ReplayOptions { symmetry: false, ..options.clone() }).expect("no deadlock");
        assert_eq!(each.ops_evaluated, graph.num_ops(), "every op is evaluated");
        let (rank_classes, ops_evaluated) = (first.rank_classes, first.ops_evaluated);
        assert_eq!(ReplayResult { rank_classes, ops_evaluated, ..each }, first, "the same result either way");
    }
    let taken = cpu(|| assert_eq!(replay(graph, &options).as_ref(), Ok(&first), "the same result every time"));
    let rate = first.ops as f64 / taken.as_secs_f64() / 1e6;
    println!(
        "{what}: {} ops, {} evaluated, {} classes, {:.1} ms, {rate:.0} M ops/s",
        first.ops,
        first.ops_evaluated,
        first.rank_classes,
        taken.as_secs_f64() * 1e3
    );
    first
}

fn live(profile: &Profile) {
    let graph = Arc::new(data_parallel(8192, 3));
    beside_virtual_ranks(&graph, &ReplayOptions::new(profile.clone()));
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
