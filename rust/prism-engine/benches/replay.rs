//! Replay speed. Every case checks its result before it is timed; the mean CPU time of many runs counts, because the machine is
//! shared.
//!
//! `cargo bench -p prism-engine --bench replay [-- SECTION]` with the sections `ddp`, `live`, `step`, `explicit`, `ring`,
//! `growth`, `contention`.
//!
//! *Instructions per op* come from `perf stat -e instructions:u` over this program itself, once with one replay and once with
//! many, or from Callgrind (which runs the AVX2 code) on a machine without that counter; `-` without both. *Passes* compare with the least a replay of different ranks could
//! do: read one 8-byte time per op, at the read bandwidth of one core, measured by the same run.

#![allow(clippy::print_stdout, reason = "the numbers are the output")]

mod meter;

use meter::{cpu, cpu_time, peak_rss};
use prism_engine::collective::ring::{self, Phase, Ring, RingScratch};
use prism_engine::collective::{self, CollectiveCall, CommShape, Scratch, choice, uniform_cost};
use prism_engine::contention::{Contention, Overlap, evaluate};
use prism_engine::cost::comm::Link;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use prism_engine::lower::{LowerOptions, StepMessages, lower};
use prism_engine::profile::Profile;
use prism_engine::replay::{Evaluator, ReplayOptions, ReplayResult, replay};
use prism_engine::sim::{Peers, Question, SimOptions, Simulation};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use prism_engine::units::SimTime;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Asks this program for one size of the growth table.
const SIZE: &str = "dp=";
/// Asks it for a number of replays of a case, and nothing else.
const COUNT: &str = "count=";
/// Size of the case, and whether every rank has a program of its own.
const OF: &str = "of=";
const EXPLICIT: &str = "explicit";

/// Memory in use, and the most there was since the last [`Counting::reset`].
struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
}

#[global_allocator]
static MEMORY: Counting = Counting { now: AtomicUsize::new(0), most: AtomicUsize::new(0) };

impl Counting {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    fn reset(&self) -> usize {
        let now = self.now.load(Ordering::Relaxed);
        self.most.store(now, Ordering::Relaxed);
        now
    }
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: as for this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: as for this function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as for this function.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.add(size);
        self.now.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as for this function.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// The most memory that something needed beyond what there was.
fn memory_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = MEMORY.reset();
    let result = f();
    (result, MEMORY.most.load(Ordering::Relaxed) - before)
}

/// A part of the benchmark.
type Section = fn(&Profile);

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let sections: [(&str, Section); 7] = [
        ("ddp", ddp),
        ("live", live),
        ("step", step),
        (EXPLICIT, explicit),
        ("ring", ring),
        ("growth", growth),
        ("contention", contention),
    ];
    let profile = Profile::builtin("h100-sxm").expect("built in");
    if let Some(dp) = wanted.iter().find_map(|wanted| wanted.strip_prefix(SIZE)) {
        return one_size(&profile, dp.parse().expect("a number"));
    }
    if let Some(runs) = wanted.iter().find_map(|wanted| wanted.strip_prefix(COUNT)) {
        return count(&profile, &wanted, runs.parse().expect("a number"));
    }
    println!("one core reads {:.1} GB/s", read_bandwidth() / 1e9);
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
        tell_instructions(&[format!("{OF}{dp}")], graph.num_ops());
    }
}

/// A job of which every rank has a program of its own: durations differ, and where asked, what the ranks do as well (each
/// records an event at a place of its own).
fn every_program(dp: u32, is_other: bool) -> Arc<Graph> {
    let like = transformer(dp);
    let mut builder = GraphBuilder::new(like.world_size());
    for name in 0..like.num_names() {
        builder.intern_name(like.name(NameId(name as u32)));
    }
    for comm in 0..like.num_comms() {
        builder.add_comm(like.comm_members(CommId(comm as u32)).iter().copied().map(Rank).collect());
    }
    for rank in (0..like.world_size()).map(Rank) {
        let own = |mut op: Op| {
            if let OpKind::Compute { duration, .. } = &mut op.kind {
                *duration = duration.scaled(1.0 + f64::from(rank.0) * 1e-6);
            }
            op
        };
        let mut ops: Vec<Op> = like.template(like.rank_template(rank)).iter().map(own).collect();
        if is_other {
            let (kind, at) = (OpKind::EventRecord { event: EventId(9) }, rank.index() % ops.len());
            ops.insert(at, Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind });
        }
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(rank, template, like.rank_slots(rank).iter().copied().map(CommId).collect());
    }
    Arc::new(builder.finish().expect("valid"))
}

fn explicit(profile: &Profile) {
    every_rank_its_own(profile, 128, false);
    for dp in [16, 128] {
        every_rank_its_own(profile, dp, true);
    }
    let (dp, ops) = (16, every_program(16, true).num_ops());
    tell_instructions(&[EXPLICIT.to_owned(), format!("{OF}{dp}")], ops);
}

fn every_rank_its_own(profile: &Profile, dp: u32, is_other: bool) {
    let graph = every_program(dp, is_other);
    let own: BTreeMap<Rank, f64> = (0..graph.world_size()).map(|r| (Rank(r), 1.0 + f64::from(r) * 1e-6)).collect();
    let options = ReplayOptions::new(profile.clone());
    // Known from the first call on.
    let graph_bytes = graph.graph_bytes();
    let (result, memory) = memory_of(|| replay(&graph, &options).expect("no deadlock"));
    let shared = replay(&transformer(dp), &ReplayOptions { slow: own, ..options.clone() }).expect("no deadlock");
    assert_eq!(result.iteration_time_ns, shared.iteration_time_ns, "the same as with slow-downs");
    // Roles of one rank take a gigabyte where 8,192 ranks differ in what they do.
    if !is_other || graph.world_size() <= 1024 {
        let by_roles = ReplayOptions { evaluator: Evaluator::Roles, symmetry: false, ..options.clone() };
        assert_eq!(replay(&graph, &by_roles).as_ref(), Ok(&result), "the same as by roles");
    }
    let taken = cpu(|| assert_eq!(replay(&graph, &options).as_ref(), Ok(&result), "the same result every time"));
    println!(
        "{} programs that differ {}: {} ops, {:.1} ms, {:.1} M ops/s, graph {:.1} bytes/op, replay {:.1} bytes/op",
        graph.num_templates(),
        if is_other { "in what they do" } else { "in durations" },
        result.ops,
        taken.as_secs_f64() * 1e3,
        result.ops as f64 / taken.as_secs_f64() / 1e6,
        graph_bytes as f64 / result.ops as f64,
        memory as f64 / result.ops as f64,
    );
}

/// A gibibyte gathered over 4,096 ranks, eight to a node: a ring of two kinds of links, every rank at its own time.
fn ring(profile: &Profile) {
    let members: Vec<u32> = (0..4096).collect();
    let shape = CommShape::new(&members, profile);
    let call = CollectiveCall { kind: CollectiveKind::AllGather, bytes: 1 << 30, root: 0, ops: 1 };
    let arrivals: Vec<SimTime> =
        (0..4096u32).map(|rank| SimTime::from_ns(i64::from(rank * 7919 % 4096) * 100)).collect();
    let (mut ends, mut scratch) = (vec![SimTime::ZERO; 4096], Scratch::default());
    collective::completion(&shape, &call, &arrivals, &mut ends, &mut scratch);
    let later: Vec<SimTime> = arrivals.iter().map(|arrival| *arrival + SimTime::from_ns(1)).collect();
    let mut later_ends = ends.clone();
    collective::completion(&shape, &call, &later, &mut later_ends, &mut scratch);
    assert!(
        ends.iter().zip(&later_ends).all(|(end, later)| *end + SimTime::from_ns(1) == *later),
        "F(a + c) = F(a) + c"
    );
    let latest = ends.iter().copied().max().expect("4,096 ranks");
    assert!(latest >= uniform_cost(&shape, &call), "nobody is later than with everybody there at once");
    let taken = cpu(|| collective::completion(&shape, &call, &arrivals, &mut ends, &mut scratch));
    println!(
        "1 GiB gathered by 4,096 ranks, {:?} of two links: {:.2} ms, last end {:.3} ms",
        choice(&shape, &call).algorithm,
        taken.as_secs_f64() * 1e3,
        latest.as_ps() as f64 / 1e9
    );
    // The same ring by itself, against every message of every rank.
    for (n, bytes) in [(64, 16 << 20), (4096, 1 << 30)] {
        let slice = bytes / n as u64 / 2;
        let links = [Link::nvlink(profile), Link::network(profile, 8)];
        let kind = |from: usize| usize::from(from % 8 == 7);
        let occupancy: Vec<i64> = (0..n).map(|p| links[kind(p)].occupancy(slice).as_ps()).collect();
        let latency: Vec<i64> = (0..n).map(|p| links[kind((p + n - 1) % n)].latency.as_ps()).collect();
        let arrivals: Vec<i64> = arrivals[..n].iter().map(|arrival| arrival.as_ps()).collect();
        let messages = 2 * (n as i64 - 1);
        let phase = Phase { messages, occupancy: &occupancy };
        let ring = Ring { phases: &[phase], latency: &latency, slices: 2 };
        let (mut ends, mut scratch) = (vec![0; n], RingScratch::default());
        ring::completion(&ring, &arrivals, &mut ends, &mut scratch);
        let start = cpu_time();
        let expected = every_message(messages, &occupancy, &latency, &arrivals);
        let slow = cpu_time().saturating_sub(start);
        assert_eq!(ends, expected, "as message by message");
        let taken = cpu(|| ring::completion(&ring, &arrivals, &mut ends, &mut scratch));
        println!(
            "ring of {n}: {:.3} ms; every message by itself {:.1} ms, the same ends",
            taken.as_secs_f64() * 1e3,
            slow.as_secs_f64() * 1e3
        );
    }
}

/// The definition of a ring of two slices per step (see `collective::ring`), one message after the other.
fn every_message(messages: i64, occupancy: &[i64], latency: &[i64], arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let before = |p: usize| (p + n - 1) % n;
    let never = vec![i64::MIN / 2; n];
    // When each rank sent its last messages: of the step before in turn.
    let mut sent = [never.clone(), never];
    let mut free = arrivals.to_vec();
    for message in 0..messages as usize {
        let step = &sent[message % 2];
        let row: Vec<i64> = (0..n).map(|p| free[p].max(step[before(p)] + latency[p]) + occupancy[p]).collect();
        free.copy_from_slice(&row);
        sent[message % 2] = row;
    }
    let last = &sent[(messages as usize - 1) % 2];
    (0..n).map(|p| last[p].max(last[before(p)] + latency[p])).collect()
}

/// So many replays of a case whose every rank differs.
fn count(profile: &Profile, wanted: &[String], runs: u32) {
    let dp = wanted.iter().find_map(|wanted| wanted.strip_prefix(OF)).expect("a size").parse().expect("a number");
    let mut options = ReplayOptions::new(profile.clone());
    let graph = if wanted.iter().any(|wanted| wanted == EXPLICIT) {
        every_program(dp, true)
    } else {
        let graph = transformer(dp);
        options.slow = every_rank(graph.world_size());
        graph
    };
    (0..runs).for_each(|_| drop(replay(&graph, &options).expect("no deadlock")));
}

fn tell_instructions(case: &[String], ops: u64) {
    match instructions(case) {
        Some(count) => println!("  {:.2} instructions per op", count / ops as f64),
        None => println!("  instructions per op: - (neither perf nor valgrind counts on this machine)"),
    }
}

/// Instructions of one replay of a case for [`count`]: as `perf` counts them, or Callgrind where the machine has no counter.
fn instructions(case: &[String]) -> Option<f64> {
    let this = std::env::current_exe().ok()?;
    let told = |tool: &mut Command, runs: u32| {
        tool.arg(&this).args(case).arg(format!("{COUNT}{runs}"));
        String::from_utf8(tool.output().ok()?.stderr).ok()
    };
    let by_perf = |runs| -> Option<f64> {
        let text = told(Command::new("perf").args(["stat", "-x,", "-e", "instructions:u"]), runs)?;
        text.lines().find(|line| line.contains("instructions"))?.split(',').next()?.parse().ok()
    };
    let by_callgrind = |runs| -> Option<f64> {
        let text = told(Command::new("valgrind").args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]), runs)?;
        text.lines().find_map(|line| line.split_once("Collected :"))?.1.trim().parse().ok()
    };
    let difference = |of: &dyn Fn(u32) -> Option<f64>, runs: u32| Some((of(runs + 1)? - of(1)?) / f64::from(runs));
    difference(&by_perf, 20).or_else(|| difference(&by_callgrind, 2))
}

/// Bytes a second that one core reads from memory.
fn read_bandwidth() -> f64 {
    let words = vec![1u64; 1 << 25];
    let taken = cpu(|| assert_eq!(black_box(&words).iter().sum::<u64>(), 1 << 25));
    (words.len() * 8) as f64 / taken.as_secs_f64()
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
        "{:>6} {:>9} {:>9} {:>10} {:>9} {:>10} {:>9} {:>7}",
        "ranks", "ops", "build ms", "replay ms", "M ops/s", "bytes/op", "RSS MB", "passes"
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
    assert!(graph.graph_bytes() > 0, "known from the first call on");
    let (first, memory) = memory_of(|| replay(&graph, &options).expect("no deadlock"));
    assert_eq!(first.ops_evaluated, graph.num_ops(), "every op is evaluated");
    let taken = cpu(|| assert_eq!(replay(&graph, &options).as_ref(), Ok(&first), "the same result every time"));
    println!(
        "{:>6} {:>9} {:>9.1} {:>10.2} {:>9.1} {:>10.2} {:>9.0} {:>7.2}",
        graph.world_size(),
        first.ops,
        cpu(|| transformer(dp)).as_secs_f64() * 1e3,
        taken.as_secs_f64() * 1e3,
        first.ops as f64 / taken.as_secs_f64() / 1e6,
        memory as f64 / first.ops as f64,
        peak_rss() as f64 / 1e6,
        taken.as_secs_f64() / (first.ops as f64 * 8.0 / read_bandwidth()),
    );
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
        "{what}: {} ops, {} evaluated, {} classes, {:.2} ms, {rate:.0} M ops/s",
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
