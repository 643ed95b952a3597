//! Jobs that cannot finish say who, where and why.

use super::jobs::{call, message, profile};
use super::reference::evaluate;
use prism_engine::collective::tuning::NcclSettings;
use prism_engine::graph::op::{CollectiveKind, Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, StreamId};
use prism_engine::replay::{ReplayOptions, replay};
use prism_engine::sim::SimError;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A job of ranks with a program each; slots: the world, then the given communicators (every rank must be in all).
fn job(programs: &[Vec<(u32, OpKind)>], comms: &[Vec<u32>]) -> Arc<Graph> {
    let world = programs.len() as u32;
    let mut builder = GraphBuilder::new(world);
    builder.intern_name("work");
    let comms: Vec<_> = std::iter::once((0..world).collect())
        .chain(comms.iter().cloned())
        .map(|members: Vec<u32>| (members.clone(), builder.add_comm(members.into_iter().map(Rank).collect())))
        .collect();
    for (rank, program) in (0..).zip(programs) {
        let op = |(stream, kind): &(u32, OpKind)| Op {
            host_gap: SimTime::from_ns(5),
            stream: StreamId(*stream),
            kind: *kind,
        };
        let ops: Vec<Op> = program.iter().map(op).collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        let own = comms.iter().filter(|(members, _)| members.contains(&rank)).map(|(_, comm)| *comm).collect();
        builder.set_rank(Rank(rank), template, own);
    }
    Arc::new(builder.finish().expect("valid"))
}

fn outcome(graph: &Arc<Graph>) -> Result<Vec<i64>, SimError> {
    replay(graph, &ReplayOptions::new(profile())).map(|result| result.iteration_time_ns)
}

fn all_reduce(count: u64) -> OpKind {
    call(0, CollectiveKind::AllReduce, count, 0)
}

#[test]
fn the_rank_that_calls_something_else_is_named() {
    let mut programs = vec![vec![(0, all_reduce(8)), (0, all_reduce(64))]; 5];
    programs[3][1] = (0, all_reduce(65));
    let error = outcome(&job(&programs, &[])).expect_err("a mismatch");
    let SimError::Mismatch(found) = &error else { panic!("{error}") };
    let counts = (found.majority.count, found.minority.count);
    assert_eq!((found.sequence, found.minority_ranks.as_slice(), counts), (1, &[Rank(3)][..], (64, 65)));
    assert!(error.to_string().contains("rank 3 called AllReduce of 65 Float32"), "{error}");
}

#[test]
fn a_collective_that_nccls_settings_forbid_is_refused_by_name() {
    let broadcast = call(0, CollectiveKind::Broadcast, 8, 0);
    let graph = job(&[vec![(0, all_reduce(8)), (0, broadcast)], vec![(0, all_reduce(8)), (0, broadcast)]], &[]);
    let mut options = ReplayOptions::new(profile());
    options.profile.network.nccl = NcclSettings::parse([("NCCL_ALGO", "Tree")]).expect("known");
    let error = replay(&graph, &options).expect_err("no tree for a broadcast").to_string();
    let parts = ["communicator 0", "NCCL 2.30 has no algorithm for Broadcast with NCCL_ALGO=Tree", "allow Ring"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn fused_calls_must_match_as_a_whole() {
    let grouped =
        |count| vec![(0, call(0, CollectiveKind::AllReduce, 8, 1)), (0, call(0, CollectiveKind::AllReduce, count, 1))];
    assert!(outcome(&job(&[grouped(9), grouped(9)], &[])).is_ok());
    let error = outcome(&job(&[grouped(9), grouped(9), grouped(10)], &[])).expect_err("a mismatch").to_string();
    assert!(error.contains("AllReduce (2 fused) of 18 Float32") && error.contains("rank 2"), "{error}");
}

#[test]
fn a_different_root_is_a_mismatch() {
    let broadcast = |root: u32| match call(0, CollectiveKind::Broadcast, 8, 0) {
        OpKind::Collective { slot, kind, dtype, reduce, count, group, .. } => {
            OpKind::Collective { slot, kind, dtype, reduce, root, count, group }
        }
        other => other,
    };
    let error = outcome(&job(&[vec![(0, broadcast(0))], vec![(0, broadcast(1))], vec![(0, broadcast(1))]], &[]));
    assert!(matches!(error, Err(SimError::Mismatch(found)) if found.minority_ranks == [Rank(0)]));
}

#[test]
fn message_halves_of_different_size_do_not_match() {
    let programs = [
        vec![(0, message(0, true, 1, 4, 0)), (0, message(0, true, 1, 4, 0))],
        vec![(0, message(0, false, 0, 4, 0)), (0, message(0, false, 0, 8, 0))],
    ];
    let error = outcome(&job(&programs, &[])).expect_err("a mismatch");
    let expected = SimError::MessageMismatch {
        communicator: 0,
        source_rank: Rank(0),
        destination_rank: Rank(1),
        sequence: 1,
        sent_bytes: 16,
        received_bytes: 32,
    };
    assert_eq!(error, expected);
}

#[test]
fn a_missing_call_comes_before_its_victims() {
    // Rank 2 skips its second all-reduce; ranks 0 and 1 also block each other in a pair afterwards on another stream.
    let pair = call(1, CollectiveKind::AllReduce, 8, 0);
    let programs = [
        vec![(0, all_reduce(8)), (0, all_reduce(8)), (1, pair)],
        vec![(0, all_reduce(8)), (0, all_reduce(8)), (0, pair)],
        vec![(0, all_reduce(8))],
    ];
    let Err(SimError::Deadlock { waiting }) = outcome(&job(&programs, &[vec![0, 1]])) else { panic!("no deadlock") };
    assert_eq!((waiting[0].communicator, waiting[0].sequence), (0, 1));
    assert_eq!((waiting[0].missing.as_slice(), waiting[0].ended.as_slice()), (&[Rank(2)][..], &[Rank(2)][..]));
    assert_eq!(waiting[0].waiting, vec![Rank(0), Rank(1)]);
    assert_eq!(waiting.len(), 2);
    assert!(waiting[0].to_string().contains("ended without the call: 2"), "{}", waiting[0]);
}

#[test]
fn a_cycle_comes_before_its_victims() {
    // Ranks 1 and 2 call two communicators in opposite order; rank 0 waits for both.
    let (a, b) = (call(1, CollectiveKind::AllReduce, 8, 0), call(2, CollectiveKind::AllReduce, 8, 0));
    let programs =
        [vec![(0, all_reduce(8))], vec![(0, a), (0, b), (0, all_reduce(8))], vec![(0, b), (0, a), (0, all_reduce(8))]];
    let error = outcome(&job(&programs, &[vec![1, 2], vec![1, 2]])).expect_err("a cycle");
    let SimError::Deadlock { waiting } = &error else { panic!("{error}") };
    let found: Vec<_> = waiting.iter().map(|b| (b.communicator, b.waiting.clone(), b.missing.clone())).collect();
    assert_eq!(
        found,
        vec![
            (1, vec![Rank(1)], vec![Rank(2)]),
            (2, vec![Rank(2)], vec![Rank(1)]),
            (0, vec![Rank(0)], vec![Rank(1), Rank(2)]),
        ]
    );
    assert!(error.to_string().contains("rank 1 at op 0"), "{error}");
}

#[test]
fn two_blocking_sends_face_to_face_are_a_cycle() {
    let program = |peer: u32| vec![(0, message(0, true, peer, 4, 0)), (0, message(0, false, peer, 4, 0))];
    let Err(SimError::Deadlock { waiting }) = outcome(&job(&[program(1), program(0)], &[])) else {
        panic!("no deadlock")
    };
    let found: Vec<_> = waiting.iter().map(|b| (b.rank, b.call.as_str(), b.missing.clone())).collect();
    assert_eq!(found, vec![(Rank(0), "Send", vec![Rank(1)]), (Rank(1), "Send", vec![Rank(0)])]);
}

fn stray_op() -> impl Strategy<Value = (u32, OpKind)> {
    let call = (0..2u32, 1..3u64).prop_map(|(slot, count)| call(slot, CollectiveKind::AllReduce, count, 0));
    let message = (any::<bool>(), 0..3u32).prop_map(|(is_send, peer)| message(0, is_send, peer, 4, 0));
    let other = prop_oneof![Just(OpKind::DeviceSync), Just(OpKind::StreamSync)];
    (0..2u32, prop_oneof![3 => call, 2 => message, 1 => other])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Programs that hardly ever fit: those stuck by definition are those the simulation finds stuck.
    #[test]
    fn exactly_the_stuck_jobs_are_deadlocks(programs in prop::collection::vec(prop::collection::vec(stray_op(), 0..5), 3)) {
        let graph = job(&programs, &[vec![0, 1, 2]]);
        let outcome = outcome(&graph);
        if matches!(outcome, Err(SimError::Mismatch(_))) {
            // The definition does not compare counts.
            return Ok(());
        }
        let expected = evaluate(&graph, &profile(), &BTreeMap::new());
        match (&outcome, &expected) {
            (Ok(_), Ok(_)) => {}
            (Err(SimError::Deadlock { waiting }), Err(stuck)) => {
                for blocked in waiting {
                    prop_assert!(blocked.waiting.iter().all(|rank| stuck.contains(&rank.0)), "{:?} {:?}", waiting, stuck);
                    prop_assert!(!blocked.missing.is_empty());
                }
                prop_assert!(!waiting.is_empty());
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
