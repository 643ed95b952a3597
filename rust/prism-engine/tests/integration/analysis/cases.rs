//! Problems people reported, by the id of the case; the programs are built from the case's description.

use prism_engine::analysis::{
    Cause, DiagnoseOptions, Diagnosis, Hang, HangKind, JobTrace, Parameter, Spent, diagnose, sensitivities,
};
use prism_engine::collective::tuning::Tuning;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, NameId, Rank, SlotId, StreamId};
use prism_engine::perturb::{Perturbations, World};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use prism_engine::sim::{Peers, SimError, SimOptions, Simulation};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use prism_engine::units::SimTime;
use std::path::Path;
use std::sync::Arc;

/// What the collection of cases expects; nothing where it is not at hand.
fn expected(id: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/cases.json");
    let Ok(text) = std::fs::read_to_string(file) else { return String::new() };
    let cases: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let case = cases["cases"].as_array().expect("a list").iter().find(|case| case["id"] == id).expect("the case");
    case["expected"].as_str().expect("text").to_owned()
}

/// Does the collection say so, if it is at hand?
fn says(id: &str, text: &str) -> bool {
    let expected = expected(id);
    expected.is_empty() || expected.contains(text)
}

/// Eight GPUs on one node, links without latency: a ring takes `2 (n - 1) / n * bytes / bandwidth`.
fn cluster(bytes_per_s: u64) -> Profile {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    profile.network.tuning = Tuning::Fastest;
    profile.node.gpus = 8;
    profile.node.nvlink_bytes_per_s = bytes_per_s;
    profile.node.nvlink_efficiency = 1.0;
    profile.node.nvlink_latency_ns = 0;
    profile.network.collective_launch_ns = 0;
    profile.network.ring_slices_per_step = 1;
    profile.network.ring_step_bytes = 1 << 40;
    profile.network.tree_chunk_bytes = 1 << 40;
    (profile.network.ll, profile.network.ll128) = (None, None);
    profile
}

fn compute(ms: i64) -> OpKind {
    let (name, class, provenance) = (NameId(0), ComputeClass::Gemm, Provenance::Default);
    OpKind::Compute { duration: SimTime::from_ns(ms * 1_000_000), name, class, provenance }
}

fn call(slot: u32, kind: CollectiveKind, dtype: DataType, count: u64) -> OpKind {
    OpKind::Collective { slot: SlotId(slot), kind, dtype, reduce: ReduceOp::Sum, root: 0, count, group: 0 }
}

fn message(is_send: bool, peer: u32, count: u64, group: u32) -> OpKind {
    OpKind::PointToPoint { slot: SlotId(0), is_send, dtype: DataType::Float32, peer, count, group }
}

/// One program per rank, all on one stream; every rank's slots are the communicators it is in, in order.
fn job(programs: &[Vec<OpKind>], comms: &[Vec<u32>]) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(programs.len() as u32);
    builder.intern_name("work");
    let ids: Vec<_> =
        comms.iter().map(|members| builder.add_comm(members.iter().copied().map(Rank).collect())).collect();
    for (rank, program) in (0..).zip(programs) {
        let op = |kind: &OpKind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind: *kind };
        let ops: Vec<Op> = program.iter().map(op).collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops);
        let own = comms.iter().zip(&ids).filter(|(members, _)| members.contains(&rank)).map(|(_, id)| *id).collect();
        builder.set_rank(Rank(rank), template.expect("valid"), own);
    }
    Arc::new(builder.finish().expect("valid"))
}

fn world(size: u32) -> Vec<Vec<u32>> {
    vec![(0..size).collect()]
}

fn explained(graph: &Arc<Graph>) -> Diagnosis {
    diagnose(graph, &DiagnoseOptions::new(ReplayOptions::new(cluster(50_000_000_000)))).expect("an answer")
}

fn hang(graph: &Arc<Graph>) -> Hang {
    explained(graph).hang.expect("a hang")
}

#[test]
fn hang_01_both_send_first() {
    let apart = |peer: u32| vec![message(true, peer, 4, 0), message(false, peer, 4, 0)];
    let found = hang(&job(&[apart(1), apart(0)], &world(2)));
    assert!(says("hang-01", "cycle {0: send->1, 1: send->0}, both at op 0"));
    assert_eq!(found.kind, HangKind::Cycle);
    let cycle: Vec<_> = found.roots.iter().map(|r| (r.rank.0, r.call.as_str(), r.missing[0].0, r.op)).collect();
    assert_eq!(cycle, [(0, "Send", 1, 0), (1, "Send", 0, 0)]);
    assert!(found.victims.is_empty());
    assert_eq!(
        found.cause,
        "a circle of waits: rank 0 in Send number 0 of communicator 0 (op 0) for rank 1, \
         rank 1 in Send number 0 of communicator 0 (op 0) for rank 0"
    );
    let together = |peer: u32| vec![message(true, peer, 4, 1), message(false, peer, 4, 1)];
    assert_eq!(explained(&job(&[together(1), together(0)], &world(2))).hang, None);
}

/// Not a case of the collection: rank 1 of a group of four reduces over the job first, everybody else over the group.
#[test]
fn one_rank_with_its_calls_in_another_order_is_the_one_to_look_at() {
    let reduce = |slot: u32| call(slot, CollectiveKind::AllReduce, DataType::Float32, 1 << 10);
    let program = |rank: u32| if rank == 1 { vec![reduce(0), reduce(1)] } else { vec![reduce(1), reduce(0)] };
    let programs: Vec<_> = (0..16).map(program).collect();
    let mut comms = world(16);
    comms.extend((0..4).map(|group| (4 * group..4 * group + 4).collect::<Vec<u32>>()));
    let found = hang(&job(&programs, &comms));
    assert_eq!((found.kind, found.culprits), (HangKind::Cycle, vec![Rank(1)]));
}

const EXPERT: u64 = 4096;
const ROUTER: u64 = 512;

fn experts(active: usize) -> Vec<OpKind> {
    let scatter = |count| call(0, CollectiveKind::ReduceScatter, DataType::Bfloat16, count);
    let mut ops = vec![scatter(EXPERT); active];
    ops.push(scatter(ROUTER));
    ops
}

#[test]
fn hang_03_only_some_ranks_launch_for_an_expert() {
    let found = hang(&job(&[experts(3), experts(2)], &world(2)));
    assert!(says("hang-03", "op 3 pairs expert size with router size -> size mismatch"));
    assert_eq!(found.kind, HangKind::Mismatch);
    let mismatch = found.mismatch.as_ref().expect("a mismatch");
    // The third call, op 2 from 0. Two against nobody: both are named.
    assert_eq!((mismatch.sequence, mismatch.majority_op, mismatch.minority_op), (2, 2, 2));
    assert_eq!((mismatch.majority.count, mismatch.minority.count), (EXPERT, ROUTER));
    assert_eq!(found.culprits, [Rank(0), Rank(1)]);
    for part in [
        "rank 0 called ReduceScatter of 4096 Bfloat16, 8192 bytes",
        "rank 1 called ReduceScatter of 512 Bfloat16, 1024 bytes",
        "(op 2)",
        "tensors",
    ] {
        assert!(found.cause.contains(part), "{part}: {}", found.cause);
    }
    assert!(found.cause.ends_with("what rank 1 calls is the next call of rank 0: it left one out"), "{}", found.cause);
    assert!(found.advice.contains("no tokens for an expert"));
}

#[test]
fn hang_03_variant_b_is_not_called_correct() {
    // The ranks activate as many experts, but others: the programs differ before the calls only.
    let with_own_work = |ms| [vec![compute(ms)], experts(2)].concat();
    let answer = explained(&job(&[with_own_work(1), with_own_work(2)], &world(2)));
    assert!(says("hang-03", "without tags it must at least not claim the run is correct"));
    assert_eq!(answer.hang, None);
    assert!(answer.notes[0].ends_with("that they carry the same tensors is not recorded"), "{:?}", answer.notes);
}

#[test]
fn hang_04_one_rank_reduces_another_size() {
    assert!(says("hang-04", "Odd one out = rank 0"));
    for (odd, others) in [(409_600, 32_768_000), (409_600, 409_598)] {
        let reduce = |count| vec![call(0, CollectiveKind::AllReduce, DataType::Float32, count)];
        let mut programs = vec![reduce(others); 8];
        programs[0] = reduce(odd);
        let found = hang(&job(&programs, &world(8)));
        assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::Mismatch, &[Rank(0)][..]));
        let text = format!(
            "collective 0 of communicator 0 (8 ranks): ranks 1-7 called AllReduce of {others} Float32, {} bytes (Sum, root \
             0) (op 0), but rank 0 called AllReduce of {odd} Float32, {} bytes (Sum, root 0) (op 0)",
            4 * others,
            4 * odd
        );
        assert_eq!(found.cause, text);
    }
}

#[test]
fn hang_08_messages_without_a_counterpart() {
    let programs = [
        vec![message(true, 1, 5, 0), message(false, 1, 5, 0)],
        vec![message(false, 0, 5, 0), message(true, 2, 5, 0)],
        vec![message(false, 1, 5, 0), message(true, 1, 5, 0)],
    ];
    let found = hang(&job(&programs, &world(3)));
    assert!(says("hang-08", "rank 0 blocked at op 1 (recv from 1, no counterpart); rank 2 blocked at op 1 (send to 1"));
    assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::MissingCall, &[Rank(1)][..]));
    let waits: Vec<_> =
        found.roots.iter().map(|r| (r.rank.0, r.call.as_str(), r.op, r.ended.as_slice(), r.bytes)).collect();
    assert_eq!(waits, [(0, "Recv", 1, &[Rank(1)][..], 20), (2, "Send", 1, &[Rank(1)][..], 20)]);
    assert!(found.cause.starts_with("rank 1 ended without the send that rank 0 waits for at op 1"), "{}", found.cause);
    assert!(found.victims.is_empty());
}

fn sub_group(members: std::ops::Range<u32>, callers: std::ops::Range<u32>) -> Arc<Graph> {
    let comms = vec![(0..8).collect(), members.collect::<Vec<u32>>()];
    let program = |rank: u32| {
        let mut ops = Vec::new();
        if callers.contains(&rank) {
            ops.push(call(1, CollectiveKind::AllReduce, DataType::Uint8, 1024));
        }
        ops.push(call(0, CollectiveKind::AllGather, DataType::Uint8, 128));
        ops
    };
    job(&(0..8).map(program).collect::<Vec<_>>(), &comms)
}

#[test]
fn sim_07_a_sub_group_of_its_own() {
    // 6 steps of 256 bytes: 1 ms. 7 steps of 128 bytes: 7/12 ms.
    let profile = cluster(1_536_000);
    let graph = sub_group(4..8, 4..8);
    let options = ReplayOptions::new(profile.clone());
    // Every message is rounded up to the picosecond, and a time to the ns.
    let (reduce, gather) = (1_000_001, 583_333);
    assert_eq!(replay(&graph, &options).expect("complete").total_time_ns, reduce + gather);
    let sim_options = SimOptions { trace: true, ..SimOptions::new(profile) };
    let mut simulation = Simulation::new(Peers::Graph(Arc::clone(&graph)), 8, sim_options).expect("valid");
    simulation.run().expect("complete");
    assert!(says("sim-07", "4 + 8 node completions"));
    assert_eq!(simulation.take_spans().len(), 4 + 8);
    let waiting = JobTrace::record(&graph, &options).expect("complete").waiting(0).expect("known").expect("there");
    let waited: Vec<i64> = waiting.by_rank.iter().map(|(_, time)| time.as_ns()).collect();
    assert_eq!(waited, [reduce, reduce, reduce, reduce, 0, 0, 0, 0]);
}

#[test]
fn sim_07_a_member_that_never_calls() {
    let found = hang(&sub_group(3..8, 4..8));
    assert!(says("sim-07", "root cause = rank 3"));
    assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::MissingCall, &[Rank(3)][..]));
    let root = &found.roots[0];
    assert_eq!((found.roots.len(), root.call.as_str(), root.communicator), (1, "AllReduce", 1));
    assert_eq!((root.never.as_slice(), root.ended.len()), (&[Rank(3)][..], 0));
    let victim = &found.victims[0];
    assert_eq!((found.victims.len(), victim.call.as_str(), victim.communicator), (1, "AllGather", 0));
    assert_eq!(victim.missing, [4, 5, 6, 7].map(Rank));
    assert!(
        found.cause.starts_with("rank 3 never makes the call that ranks 4-7 wait for at op 0: AllReduce"),
        "{}",
        found.cause
    );
}

#[test]
fn slow_01_the_rank_that_waits_least() {
    let program = [compute(100), call(0, CollectiveKind::AllReduce, DataType::Uint8, 80_000_000)];
    let mut builder = GraphBuilder::new(8);
    builder.intern_name("work");
    let comm = builder.add_comm((0..8).map(Rank).collect());
    let ops: Vec<Op> =
        program.iter().map(|kind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind: *kind }).collect();
    let template = builder.add_template("all", &ops).expect("valid");
    (0..8).for_each(|rank| builder.set_rank(Rank(rank), template, vec![comm]));
    let graph = Arc::new(builder.finish().expect("valid"));
    let mut options = ReplayOptions::new(cluster(14_000_000_000));
    // 14 messages are rounded up to the picosecond, and the sum to the ns.
    let reduce = 10_000_001;
    assert_eq!(replay(&graph, &options).expect("complete").total_time_ns, 100_000_000 + reduce);
    options.slow.insert(Rank(5), 1.3);

    let answer = diagnose(&graph, &DiagnoseOptions::new(options.clone())).expect("complete");
    assert!(says("slow-01", "Culprit = the rank that waits least = 5; cause = compute, not network"));
    assert_eq!(answer.iteration_time_ns, [130_000_000 + reduce]);
    let waiting = answer.waiting.as_ref().expect("complete");
    let culprit = waiting.culprit.as_ref().expect("one");
    assert_eq!((culprit.ranks.as_slice(), culprit.cause), (&[Rank(5)][..], Cause::Compute));
    assert_eq!((culprit.waited_ns, culprit.median_waited_ns), (0, 30_000_000));
    assert_eq!((culprit.compute_ns, culprit.usual_compute_ns, culprit.compared_with), (130_000_000, 100_000_000, 7));
    assert_eq!((waiting.blame[0].rank, waiting.blame[0].waited_ns), (Rank(5), 7 * 30_000_000));
    assert_eq!((waiting.communicators[0].least_rank, waiting.communicators[0].least_ns), (Rank(5), 0));
    assert!(answer.headline.starts_with("rank 5 holds up the others"), "{}", answer.headline);

    let path = answer.critical_path.as_ref().expect("complete");
    let parts: Vec<_> = path.parts.iter().map(|part| (part.spent, part.ns)).collect();
    let gemm = Spent::Compute { class: ComputeClass::Gemm };
    assert_eq!(parts, [(gemm, 130_000_000), (Spent::Collective { communicator: 0 }, reduce)]);
    // The others spend 40 ms in the collective, 30 of them waiting.
    let trace = JobTrace::record(&graph, &options).expect("complete");
    let account = trace.account(Rank(0), 0).expect("known").expect("there").totals();
    let wait = Spent::Waiting { communicator: 0 };
    assert_eq!(account, [(gemm, 100_000_000), (wait, 30_000_000), (Spent::Collective { communicator: 0 }, reduce)]);
    let slack = trace.slack().expect("small");
    assert_eq!([0, 5].map(|rank| slack.of_rank(Rank(rank))), [Some(SimTime::ZERO), Some(SimTime::ZERO)]);
    assert_eq!(slack.by_rank[0][0], (0, SimTime::from_ns(30_000_000)));
    assert_eq!(slack.by_rank[5][0], (0, SimTime::ZERO));

    // 0.1 % of 130 ms, of nothing, and of 10 ms.
    let parameters = [
        Parameter::RankSpeed { rank: Rank(5) },
        Parameter::RankSpeed { rank: Rank(0) },
        Parameter::NvlinkBandwidth,
        Parameter::NetworkBandwidth,
    ];
    let found = sensitivities(&graph, &options, 0, &parameters).expect("complete");
    let changes: Vec<i64> = found.iter().map(|found| found.change_ns).collect();
    assert_eq!((changes[0], changes[1], changes[3]), (130_000, 0, 0));
    assert!((found[2].elasticity - 10.0 / 140.0).abs() < 1e-6, "{found:?}");
}

#[test]
fn slow_02_a_table_of_delays() {
    // Ranks compute for 1 ms; a factor of 1 + d delays one by d ms.
    let program = vec![compute(1), call(0, CollectiveKind::AllReduce, DataType::Uint8, 100_000_000)];
    let graph = job(&vec![program; 8], &world(8));
    let delays = |table: [u64; 8]| {
        let mut options = ReplayOptions::new(cluster(50_000_000_000));
        options.slow = (0..8).map(|rank| (Rank(rank), 1.0 + table[rank as usize] as f64 / 1000.0)).collect();
        options
    };
    assert!(says("slow-02", "Total 5.5 ms; waits 2.0 ms on 7 ranks, 0 on rank 3"));
    let options = delays([0, 0, 0, 2000, 0, 0, 0, 0]);
    let trace = JobTrace::record(&graph, &options).expect("complete");
    let waiting = trace.waiting(0).expect("known").expect("there");
    let waited: Vec<i64> = waiting.by_rank.iter().map(|(_, time)| time.as_ns()).collect();
    assert_eq!(waited, [2_000_000, 2_000_000, 2_000_000, 0, 2_000_000, 2_000_000, 2_000_000, 2_000_000]);
    assert_eq!(waiting.culprit.expect("one").ranks, [Rank(3)]);
    let mut seed = 7u64;
    for _ in 0..20 {
        let table = [(); 8].map(|()| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) % 5000
        });
        let most = *table.iter().max().expect("eight") as i64;
        let result = replay(&graph, &delays(table)).expect("complete");
        assert_eq!(result.total_time_ns, 1_000_000 + most * 1000 + 3_500_000);
        let trace = JobTrace::record(&graph, &delays(table)).expect("complete");
        let last = table.iter().position(|delay| *delay as i64 == most).expect("one");
        let path = trace.critical_path(0).expect("known").expect("there");
        assert_eq!(path.by_rank().iter().map(|(rank, _)| rank.index()).find(|rank| *rank == last), Some(last));
    }
}

/// Step time in ns of a pipeline of eight stages, of one layer each, on links that cost nothing.
fn pipeline_ns(microbatches: u32, forward_ns: i64) -> i64 {
    let step = TransformerStep {
        dp: 1,
        tp: 1,
        pp: 8,
        microbatches,
        layers: 1,
        forward: SimTime::from_ns(forward_ns),
        backward: SimTime::from_ns(2 * forward_ns),
        activation_bytes: 0,
        gradient_bytes: 0,
        ..TransformerStep::default()
    };
    let graph = Arc::new(step.graph().expect("valid"));
    replay(&graph, &ReplayOptions::new(flat_profile(0, 1 << 60))).expect("complete").total_time_ns
}

#[test]
fn cfg_01_smaller_kernels_or_a_larger_bubble() {
    assert!(says("cfg-01", "m = 64,32,16,8; bubble/ideal (p-1)/m = 10.94%, 21.88%, 43.75%, 87.50%"));
    // Micro batch 1, 2, 4, 8: a stage's forward takes 2 x 100 us times the micro batch, backward twice that.
    let mut with_bubble = Vec::new();
    for (microbatches, bubble) in [(64, 0.1094), (32, 0.2188), (16, 0.4375), (8, 0.8750)] {
        let micro_batch = 64 / i64::from(microbatches);
        let time = pipeline_ns(microbatches, 100_000 * micro_batch);
        let ideal = i64::from(microbatches) * 6 * 100_000 * micro_batch;
        assert!(((time - ideal) as f64 / ideal as f64 - bubble).abs() < 1e-4, "{microbatches}: {time} of {ideal}");
        with_bubble.push(((time - ideal) as f64 / time as f64 * 1e4).round() as u32);
    }
    assert_eq!(with_bubble, [986, 1795, 3043, 4667], "hundredths of a per cent of the step");
    assert!(says("cfg-01", "1.000, 0.879, 0.926, 1.166 -> choose 2"));
    // Kernels of larger micro batches are faster: 1.0, 1.25, 1.4, 1.45 times.
    let time = |microbatches, faster: f64| {
        let forward = 1_000_000.0 * 64.0 / f64::from(microbatches) / faster;
        pipeline_ns(microbatches, forward.round() as i64) as f64
    };
    let times = [time(64, 1.0), time(32, 1.25), time(16, 1.4), time(8, 1.45)];
    let relative = times.map(|time| (time / times[0] * 1000.0).round() as u32);
    assert_eq!(relative, [1000, 879, 926, 1166], "thousandths of the first");
}

#[test]
fn sim_01_no_all_reduce_beats_what_a_port_can_carry() {
    assert!(says("sim-01", "Both move 2*(7/8)*100 MB out of each port: 3.500 ms; ring adds 14 latency steps (0.28 us"));
    let graph = job(&vec![vec![call(0, CollectiveKind::AllReduce, DataType::Uint8, 100_000_000)]; 8], &world(8));
    // 10 ns per hop, two hops over a switch.
    let mut profile = cluster(50_000_000_000);
    profile.node.nvlink_latency_ns = 20;
    let time = replay(&graph, &ReplayOptions::new(profile)).expect("complete").total_time_ns;
    assert_eq!(time, 3_500_000 + 14 * 20);
    assert!((time - 3_500_000) as f64 / 3_500_000.0 < 1e-4);
}

#[test]
fn sim_04_no_collective_vanishes_whatever_the_degrees() {
    assert!(says("sim-04", "Per rank 8 all-to-all and 2 expert-gradient reductions"));
    let exchanges = |graph: &Graph| graph.summary().communication.get("all_to_all").map_or(0, |total| total.calls);
    for (dp, tp, pp, ep) in [
        (16, 1, 1, 8),
        (16, 1, 1, 1),
        (8, 2, 1, 8),
        (8, 1, 2, 4),
        (4, 2, 2, 2),
        (1, 1, 1, 1),
        (1, 1, 16, 1),
        (2, 8, 1, 2),
    ] {
        let step = TransformerStep { dp, tp, pp, ep, layers: 2, microbatches: 1, ..TransformerStep::default() };
        let graph = Arc::new(step.graph().expect("valid"));
        let ranks = u64::from(dp * tp * pp);
        // Two exchanges around the experts of each of two layers, forward and backward.
        let expected = if ep > 1 { ranks * 8 } else { 0 };
        assert_eq!(exchanges(&graph), expected, "dp {dp} tp {tp} pp {pp} ep {ep}");
        let options = SimOptions { trace: true, ..SimOptions::new(flat_profile(5000, 50_000_000_000)) };
        let mut simulation =
            Simulation::new(Peers::Graph(Arc::clone(&graph)), graph.world_size(), options).expect("valid");
        simulation.run().expect("complete");
        let called = |rank: u32| {
            let view = graph.template(graph.rank_template(Rank(rank)));
            view.iter().filter(|op| matches!(op.kind, OpKind::Collective { .. } | OpKind::PointToPoint { .. })).count()
        };
        let spans = simulation.take_spans();
        for rank in 0..graph.world_size() {
            let view = graph.template(graph.rank_template(Rank(rank)));
            let is_communication =
                |op: u32| matches!(view.op(op as usize).kind, OpKind::Collective { .. } | OpKind::PointToPoint { .. });
            let done = spans.iter().filter(|span| span.rank == Rank(rank) && is_communication(span.op)).count();
            assert_eq!(done, called(rank), "rank {rank}: what is called is what completes");
        }
    }
    // The groups of the case: 2 of experts, 8 of the ranks that hold the same ones.
    let step =
        TransformerStep { dp: 16, tp: 1, pp: 1, ep: 8, layers: 2, microbatches: 1, ..TransformerStep::default() };
    let graph = step.graph().expect("valid");
    let members = |comm: u32| graph.comm_members(CommId(comm)).to_vec();
    let groups: Vec<Vec<u32>> = (0..graph.num_comms() as u32).map(members).collect();
    assert!(groups.contains(&(0..8).collect()) && groups.contains(&(8..16).collect()), "{groups:?}");
}

#[test]
fn nccl_01_messages_of_no_bytes() {
    const ROW: u64 = 24 * 2304 * 128;
    assert!(says("nccl-01", "14,155,776 B cross ranks, nothing flows 1 -> 0"));
    let half = |is_send: bool, peer: u32, count: u64| OpKind::PointToPoint {
        slot: SlotId(0),
        is_send,
        dtype: DataType::Bfloat16,
        peer,
        count,
        group: 1,
    };
    // Rank 0 sends a row to itself and one to rank 1, and gets nothing from it.
    let with_zeros = [
        vec![half(true, 0, ROW), half(false, 0, ROW), half(true, 1, ROW), half(false, 1, 0)],
        vec![half(true, 0, 0), half(false, 0, ROW), half(true, 1, 0), half(false, 1, 0)],
    ];
    let without = [vec![half(true, 0, ROW), half(false, 0, ROW), half(true, 1, ROW)], vec![half(false, 0, ROW)]];
    let options = ReplayOptions::new(cluster(50_000_000_000));
    let times = [with_zeros, without].map(|programs| {
        let graph = job(&programs, &world(2));
        let crossing = graph.summary().communication["send"].payload_bytes - 2 * ROW;
        assert_eq!(crossing, 14_155_776);
        assert_eq!(explained(&graph).hang, None);
        replay(&graph, &options).expect("complete").total_time_ns
    });
    assert_eq!(times[0], times[1], "what is empty costs nothing");
    assert_eq!(times[0], (14_155_776_i64 * 20 + 999) / 1000, "one row at 50 GB/s");
}

#[test]
fn nccl_05_buffers_beyond_four_gibibytes() {
    assert!(says("nccl-05", "result 4,294,967,296 B; ring traffic per rank 3,758,096,384 B"));
    let options = ReplayOptions::new(cluster(50_000_000_000));
    let gather = |dtype, count| job(&vec![vec![call(0, CollectiveKind::AllGather, dtype, count)]; 8], &world(8));
    let time = |graph: &Arc<Graph>| replay(graph, &options).expect("complete").total_time_ns;
    let graph = gather(DataType::Float32, 134_217_728);
    assert_eq!(graph.summary().communication["all_gather"].payload_bytes, 4_294_967_296);
    // A time is rounded up seven times.
    let bytes_at = |bytes: i64| (bytes / 50 + 1)..=(bytes / 50 + 2);
    assert!(bytes_at(3_758_096_384).contains(&time(&graph)), "{}", time(&graph));
    for count in [1_u64 << 31, 1 << 33] {
        let graph = gather(DataType::Int8, count);
        assert!(bytes_at(7 * count as i64).contains(&time(&graph)), "{count}: {}", time(&graph));
        let template = graph.template(graph.rank_template(Rank(7)));
        assert!(matches!(template.op(0).kind, OpKind::Collective { count: stored, .. } if stored == count));
        // One rank with a count that is the same in 32 bits is told apart.
        let other = vec![call(0, CollectiveKind::AllGather, DataType::Int8, count + (1 << 32))];
        let mut programs = vec![vec![call(0, CollectiveKind::AllGather, DataType::Int8, count)]; 8];
        programs[6] = other;
        assert_eq!(hang(&job(&programs, &world(8))).culprits, [Rank(6)]);
    }
}

#[test]
fn calls_in_another_order_are_told_from_calls_left_out() {
    let reduce = |count| call(0, CollectiveKind::AllReduce, DataType::Float32, count);
    let gather = call(0, CollectiveKind::AllGather, DataType::Float32, 8);
    let usual = vec![reduce(1), reduce(2), gather, reduce(3)];
    for (odd, what) in [
        (vec![reduce(1), gather, reduce(2), reduce(3)], "; rank 5 makes this call and the next the other way round"),
        (vec![reduce(1), gather, reduce(3)], "; what rank 5 calls is the next call of rank 0: it left one out"),
        (vec![reduce(1), reduce(7), reduce(2)], "; the next call of rank 5 is that of rank 0: it makes one too many"),
        (vec![reduce(1), reduce(7), reduce(8)], "does not show that the tensors are the same"),
    ] {
        let mut programs = vec![usual.clone(); 8];
        programs[5] = odd;
        let found = hang(&job(&programs, &world(8)));
        assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::Mismatch, &[Rank(5)][..]));
        assert_eq!(found.mismatch.as_ref().map(|mismatch| mismatch.sequence), Some(1));
        assert!(found.cause.ends_with(what), "{}", found.cause);
    }
}

#[test]
fn halves_of_unequal_size_are_named_with_their_places() {
    let programs = [
        vec![compute(1), message(true, 1, 4, 0), message(true, 1, 5, 0)],
        vec![message(false, 0, 4, 0), compute(1), compute(1), message(false, 0, 6, 0)],
    ];
    let found = hang(&job(&programs, &world(2)));
    assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::MessageMismatch, &[Rank(0), Rank(1)][..]));
    let text =
        "message 1 of communicator 0: rank 0 sends 20 bytes, rank 1 receives 24 bytes (rank 0 at op 2, rank 1 at op 3)";
    assert_eq!(found.cause, text);
}

#[test]
fn a_dead_rank_is_the_root_cause() {
    let reduce = |slot| call(slot, CollectiveKind::AllReduce, DataType::Float32, 1024);
    // Ranks 0 to 3 reduce among themselves and then all eight; rank 2 dies before.
    let program =
        |rank: u32| if rank < 4 { vec![compute(1), reduce(1), reduce(0)] } else { vec![compute(1), reduce(0)] };
    let graph = job(&(0..8).map(program).collect::<Vec<_>>(), &[(0..8).collect(), (0..4).collect()]);
    let mut options = ReplayOptions::new(cluster(50_000_000_000));
    let text = "[[perturb]]\nkind = \"rank-death\"\nrank = 2\ntime_ns = 500000\n";
    options.perturb = Perturbations::from_toml(text, World::new(8, &options.profile)).expect("valid");
    let found = diagnose(&graph, &DiagnoseOptions::new(options)).expect("an answer").hang.expect("a hang");
    assert_eq!((found.kind, found.culprits.as_slice()), (HangKind::DeadRank, &[Rank(2)][..]));
    assert!(
        found.cause.starts_with("rank 2 is dead, and ranks 0-1,3 wait at op 1: AllReduce number 0"),
        "{}",
        found.cause
    );
    let victim = &found.victims[0];
    assert_eq!((victim.communicator, victim.waiting.as_slice()), (0, &[4, 5, 6, 7].map(Rank)[..]));
}

#[test]
fn a_rank_on_a_slow_link_is_told_from_one_that_computes_more() {
    let step = TransformerStep { dp: 4, tp: 2, pp: 2, microbatches: 8, ..TransformerStep::default() };
    let graph = Arc::new(step.graph().expect("valid"));
    let mut options = ReplayOptions::new(flat_profile(5000, 50_000_000_000));
    let culprit = |options: &ReplayOptions| {
        let answer = diagnose(&graph, &DiagnoseOptions::new(options.clone())).expect("complete");
        let culprit = answer.waiting.expect("complete").culprit.expect("one");
        assert!(answer.communicators.windows(2).all(|pair| pair[0].communicator < pair[1].communicator));
        (culprit, answer.headline)
    };
    let text = "[[perturb]]\nkind = \"slow-link\"\nranks = [5]\nbandwidth_factor = 0.2\n";
    options.perturb = Perturbations::from_toml(text, World::new(16, &options.profile)).expect("valid");
    let (found, headline) = culprit(&options);
    assert_eq!((found.ranks.as_slice(), found.cause), (&[4, 5].map(Rank)[..], Cause::Communication));
    let longer = found.longer.expect("communication");
    assert!(matches!(longer.spent, Spent::Collective { .. }) && longer.ns > 2 * longer.usual_ns, "{longer:?}");
    assert!(headline.contains("their time in collectives (most on communicator 2) takes"), "{headline}");
    options.perturb = Perturbations::default();
    options.slow.insert(Rank(5), 1.5);
    let (found, _) = culprit(&options);
    assert_eq!((found.ranks.as_slice(), found.cause), (&[Rank(5)][..], Cause::Compute));
    assert!(matches!(found.longer.expect("compute").spent, Spent::Compute { class: ComputeClass::Gemm }));
}

#[test]
fn a_rank_whose_host_is_slow_is_told() {
    // All the same, but rank 3 takes 30 ms more to issue its kernel.
    let mut builder = GraphBuilder::new(8);
    builder.intern_name("work");
    let comm = builder.add_comm((0..8).map(Rank).collect());
    let mut template = |name: &str, gap_ms: i64| {
        let op = |kind, gap_ms: i64| Op { host_gap: SimTime::from_ns(gap_ms * 1_000_000), stream: StreamId(0), kind };
        let reduce = call(0, CollectiveKind::AllReduce, DataType::Uint8, 80_000_000);
        builder.add_template(name, &[op(compute(100), gap_ms), op(reduce, 0)]).expect("valid")
    };
    let (usual, late) = (template("usual", 0), template("late", 30));
    (0..8).for_each(|rank| builder.set_rank(Rank(rank), if rank == 3 { late } else { usual }, vec![comm]));
    let answer = explained(&Arc::new(builder.finish().expect("valid")));
    let culprit = answer.waiting.as_ref().expect("complete").culprit.as_ref().expect("one");
    assert_eq!((culprit.ranks.as_slice(), culprit.cause), (&[Rank(3)][..], Cause::Host));
    let longer = culprit.longer.expect("the host");
    assert_eq!((longer.spent, longer.ns, longer.usual_ns), (Spent::Host, 30_000_000, 0));
    let text = "rank 3 holds up the others: waits 0.000 ms where the median rank waits 30.000 ms; its host takes 30.000 ms \
                where the median of others takes 0.000 ms";
    assert_eq!(answer.headline, text);
}

#[test]
fn errors_that_are_no_hang_stay_errors() {
    let mut options = ReplayOptions::new(cluster(1_000_000));
    options.slow.insert(Rank(9), 2.0);
    let error = diagnose(&job(&[vec![], vec![]], &world(2)), &DiagnoseOptions::new(options)).expect_err("no such rank");
    assert!(matches!(error, SimError::Invalid { .. }), "{error}");
    assert_eq!(Hang::of(&error), None);
}
