//! Problems people reported, by the id of the case; the programs are built from the case's description.

use prism_engine::analysis::{
    Cause, DiagnoseOptions, Diagnosis, Hang, HangKind, JobTrace, Parameter, Spent, diagnose, sensitivities,
};
use prism_engine::collective::tuning::Tuning;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{NameId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use prism_engine::sim::{Peers, SimError, SimOptions, Simulation};
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
    for part in ["rank 0 called ReduceScatter of 4096", "rank 1 called ReduceScatter of 512", "(op 2)", "tensors"] {
        assert!(found.cause.contains(part), "{part}: {}", found.cause);
    }
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
            "collective 0 of communicator 0 (8 ranks): ranks 1-7 called AllReduce of {others} Float32 (Sum, root 0) (op 0), \
             but rank 0 called AllReduce of {odd} Float32 (Sum, root 0) (op 0)"
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

#[test]
fn errors_that_are_no_hang_stay_errors() {
    let mut options = ReplayOptions::new(cluster(1_000_000));
    options.slow.insert(Rank(9), 2.0);
    let error = diagnose(&job(&[vec![], vec![]], &world(2)), &DiagnoseOptions::new(options)).expect_err("no such rank");
    assert!(matches!(error, SimError::Invalid { .. }), "{error}");
    assert_eq!(Hang::of(&error), None);
}
