//! Made-up workloads: against a formula, and pruned.

use super::jobs::{call, message};
use super::laws::times;
use super::reference::evaluate;
use prism_engine::graph::op::{CollectiveKind, Op};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, StreamId};
use prism_engine::profile::Profile;
use prism_engine::prune::materialised;
use prism_engine::replay::{ReplayOptions, replay, replay_ranks};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use prism_engine::units::SimTime;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The network of the formulas: 50 GB/s and 5 us.
pub(crate) fn flat() -> Profile {
    flat_profile(5_000, 50_000_000_000)
}

fn step_seconds(step: TransformerStep) -> f64 {
    let graph = Arc::new(step.graph().expect("valid"));
    graph.check().expect("programs that fit together");
    let result = replay(&graph, &ReplayOptions::new(flat())).expect("no deadlock");
    assert!(result.ops_evaluated <= graph.num_ops());
    result.iteration_time_ns.iter().sum::<i64>() as f64 * 1e-9
}

#[test]
fn a_transformer_step_takes_what_the_formula_says() {
    // Seconds by a contention-free formula that plays one rank per stage: rings of 2 (n - 1) steps, messages of
    // latency + size / bandwidth.
    for (dp, expected) in [(1, 0.532_014_088), (8, 0.550_874_570), (16, 0.552_296_747)] {
        let seconds = step_seconds(TransformerStep { dp, ..TransformerStep::default() });
        assert!((seconds / expected - 1.0).abs() < 1e-6, "dp {dp}: {seconds} instead of {expected}");
    }
}

#[test]
fn interleaving_shortens_the_bubble() {
    let step = TransformerStep { dp: 2, tp: 2, pp: 4, microbatches: 8, layers: 4, ..TransformerStep::default() };
    let quick = |interleave| {
        let step = TransformerStep { interleave, activation_bytes: 1, tensor_bytes: 1, gradient_bytes: 1, ..step };
        step_seconds(step)
    };
    // 8 microbatches of 8 half layers of 1 + 2 ms, and 3 bubbles of the same, a half, a quarter of a microbatch.
    for (interleave, bubble) in [(1, 1.0), (2, 0.5), (4, 0.25)] {
        let expected = (8.0 + 3.0 * bubble) * 8.0 * 3e-3;
        let seconds = quick(interleave);
        assert!((seconds / expected - 1.0).abs() < 0.01, "interleave {interleave}: {seconds} instead of {expected}");
    }
}

#[test]
fn experts_exchange_twice_per_layer_and_pass() {
    let step = TransformerStep { dp: 8, tp: 2, pp: 2, microbatches: 4, layers: 2, ..TransformerStep::default() };
    let plain = step_seconds(step);
    let experts = step_seconds(TransformerStep { ep: 4, ..step });
    // Every all-to-all sends three quarters of 32 MiB and waits one latency.
    let exchange = 0.75 * f64::from(32 << 20) / 50e9 + 5e-6;
    // Four microbatches and one bubble of two passes of two layers of two exchanges.
    let expected = 5.0 * 2.0 * 2.0 * 2.0 * exchange;
    assert!(((experts - plain) / expected - 1.0).abs() < 1e-6, "{experts} - {plain} instead of {expected}");
}

#[test]
fn degrees_that_do_not_fit_are_refused_by_name() {
    let step = TransformerStep::default();
    for (step, what) in [
        (TransformerStep { tp: 0, ..step }, "tp is 0"),
        (TransformerStep { dp: 6, ep: 4, ..step }, "ep 4 does not divide dp 6"),
        (TransformerStep { interleave: 3, ..step }, "interleave 3 does not divide layers 2"),
        (TransformerStep { interleave: 2, microbatches: 12, ..step }, "pp 8 does not divide microbatches 12"),
        (TransformerStep { interleave: 2, pp: 1, ..step }, "there is one stage"),
        (TransformerStep { dp: 1 << 31, ..step }, "ranks"),
        (TransformerStep { iterations: u32::MAX, ..step }, "ops"),
    ] {
        let error = step.graph().expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn the_result_has_the_agreed_keys() {
    let step = TransformerStep {
        dp: 1,
        tp: 2,
        pp: 2,
        microbatches: 2,
        layers: 1,
        iterations: 2,
        ..TransformerStep::default()
    };
    let graph = Arc::new(step.graph().expect("valid"));
    let options = ReplayOptions { slow: BTreeMap::from([(Rank(1), 1.5)]), ..ReplayOptions::new(flat()) };
    let result = serde_json::to_value(replay(&graph, &options).expect("no deadlock")).expect("serialisable");
    for key in ["ops", "ops_evaluated", "graph_bytes", "wall_ns", "peak_rss_bytes", "total_time_ns"] {
        assert!(result[key].is_u64(), "{key}: {result}");
    }
    assert_eq!(result["iteration_time_ns"].as_array().map(Vec::len), Some(2));
    // The straggler makes all ranks differ: the messages of its group leave at two times.
    assert_eq!((&result["world_size"], &result["rank_classes"]), (&4.into(), &4.into()));
    // 2 iterations x 2 microbatches x 2 half layers x (1 + 2) ms on three ranks at full speed and one at 1.5.
    assert_eq!(result["device_time_by_provenance"], serde_json::json!({ "default": 24_000_000 * 9 / 2 }));
    assert!(result["critical_rank"].is_u64());
}

#[test]
fn a_ring_takes_what_the_formula_says() {
    let ring = TransformerStep {
        dp: 512,
        tp: 1,
        pp: 1,
        microbatches: 0,
        gradient_bytes: 1 << 30,
        ..TransformerStep::default()
    };
    let seconds = step_seconds(ring);
    assert!((seconds / 0.047_975_787 - 1.0).abs() < 1e-6, "{seconds}");
}

#[test]
fn a_step_of_stragglers_is_what_the_definition_says() {
    let step = TransformerStep {
        dp: 2,
        tp: 2,
        pp: 3,
        microbatches: 4,
        layers: 1,
        iterations: 2,
        ..TransformerStep::default()
    };
    let graph = Arc::new(step.graph().expect("valid"));
    let slow = BTreeMap::from([(Rank(1), 1.7), (Rank(6), 1.2)]);
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let options = ReplayOptions { slow: slow.clone(), ..ReplayOptions::new(profile.clone()) };
    let report = replay_ranks(&graph, &options).expect("no deadlock");
    assert_eq!(times(&report), evaluate(&graph, &profile, &slow).expect("no deadlock"));
}

/// Stages with one program for all but the ends: every rank of the middle waits for one of the same role.
pub(crate) fn chain(stages: u32, replicas: u32, microbatches: usize) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(stages * replicas);
    builder.intern_name("work");
    let mut slots = vec![Vec::new(); (stages * replicas) as usize];
    for stage in 0..stages {
        let members: Vec<u32> = (0..replicas).map(|replica| stage * replicas + replica).collect();
        let comm = builder.add_comm(members.iter().copied().map(Rank).collect());
        for rank in members {
            slots[rank as usize].push(comm);
        }
    }
    for rank in 0..(stages - 1) * replicas {
        let comm = builder.add_comm(vec![Rank(rank), Rank(rank + replicas)]);
        slots[rank as usize].push(comm);
        slots[(rank + replicas) as usize].insert(1, comm);
    }
    let op = |kind| Op { host_gap: SimTime::from_ns(7), stream: StreamId(0), kind };
    let work = super::jobs::compute(SimTime::from_ns(300_000));
    let reduce = call(0, CollectiveKind::AllReduce, 1 << 22, 0);
    let (receive, send_first) = (message(1, false, 0, 1 << 20, 0), message(1, true, 1, 1 << 20, 0));
    let send = message(2, true, 1, 1 << 20, 0);
    let program = |body: &[_]| -> Vec<Op> {
        let bodies = body.iter().cycle().take(body.len() * microbatches);
        bodies.chain([&reduce]).map(|kind| op(*kind)).collect()
    };
    let programs = [program(&[work, send_first]), program(&[receive, work, send]), program(&[receive, work])];
    let templates = programs.map(|ops| builder.add_template("stage", &ops).expect("valid"));
    for rank in 0..stages * replicas {
        let position = match rank / replicas {
            0 => 0,
            stage if stage + 1 == stages => 2,
            _ => 1,
        };
        builder.set_rank(Rank(rank), templates[position], slots[rank as usize].clone());
    }
    Arc::new(builder.finish().expect("valid"))
}

#[test]
fn ranks_of_one_role_that_wait_for_each_other_are_told_apart() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    for (stages, replicas, microbatches) in [(2, 2, 1), (5, 1, 3), (7, 4, 5)] {
        let graph = chain(stages, replicas, microbatches);
        let slow = BTreeMap::from([(Rank(replicas), 1.4)]);
        let options = ReplayOptions { slow: slow.clone(), ..ReplayOptions::new(profile.clone()) };
        let report = replay_ranks(&graph, &options).expect("no deadlock");
        assert_eq!(times(&report), evaluate(&graph, &profile, &slow).expect("no deadlock"));
        let report = replay_ranks(&graph, &ReplayOptions { symmetry: false, ..options }).expect("no deadlock");
        assert_eq!(times(&report), evaluate(&graph, &profile, &slow).expect("no deadlock"));
        // No more than a role per stage is needed (and per replica, once the straggler makes them differ).
        assert!(report.roles <= (stages * replicas) as usize, "{}", report.roles);
    }
}

/// Tensor, data and model-parallel (gradient norm) all-reduces, and messages round the pipeline.
fn megatron(dp: u32) -> Graph {
    let (tp, pp) = (8, 16);
    let rank = |t: u32, d: u32, p: u32| t + tp * (d + dp * p);
    let mut builder = GraphBuilder::new(tp * dp * pp);
    let mut slots = vec![Vec::new(); (tp * dp * pp) as usize];
    let mut add = |members: Vec<u32>| {
        let comm = builder.add_comm(members.iter().copied().map(Rank).collect());
        for rank in members {
            slots[rank as usize].push(comm);
        }
    };
    for d in 0..dp {
        (0..pp).for_each(|p| add((0..tp).map(|t| rank(t, d, p)).collect()));
    }
    for t in 0..tp {
        (0..pp).for_each(|p| add((0..dp).map(|d| rank(t, d, p)).collect()));
    }
    (0..dp).for_each(|d| add((0..pp).flat_map(|p| (0..tp).map(move |t| rank(t, d, p))).collect()));
    for d in 0..dp {
        (0..tp).for_each(|t| add((0..pp).map(|p| rank(t, d, p)).collect()));
    }
    for p in 0..pp {
        let mut kinds: Vec<_> = (0..3).map(|slot| call(slot, CollectiveKind::AllReduce, 1024, 0)).collect();
        kinds.extend([message(3, true, (p + 1) % pp, 4, 1), message(3, false, (p + pp - 1) % pp, 4, 1)]);
        let ops: Vec<Op> =
            kinds.into_iter().map(|kind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind }).collect();
        let template = builder.add_template(&format!("stage {p}"), &ops).expect("valid");
        for d in 0..dp {
            (0..tp)
                .for_each(|t| builder.set_rank(Rank(rank(t, d, p)), template, slots[rank(t, d, p) as usize].clone()));
        }
    }
    builder.finish().expect("valid")
}

#[test]
fn ranks_to_materialise_do_not_depend_on_the_world_size() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    for (dp, ranks, expected) in [(8, 8, 41), (64, 8, 41), (512, 8, 41), (64, 32, 108)] {
        let graph = megatron(dp);
        let sandbox = (0..ranks).map(Rank).collect();
        let kept = materialised(&graph, &sandbox, &profile);
        assert!(kept.is_superset(&sandbox));
        assert_eq!(kept.len() - sandbox.len(), expected, "{} ranks: {kept:?}", graph.world_size());
    }
}
