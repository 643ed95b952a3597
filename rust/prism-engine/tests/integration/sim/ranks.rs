//! Ranks evaluated one by one end as they do by roles, in everything a report says.

use super::jobs::{Job, batched_job, call, compute, exchanging_job, job, job_of, message, profile, small_nodes};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, Op, OpKind, Provenance};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::{Evaluator, ReplayOptions, replay_rank_by_rank, replay_ranks};
use prism_engine::sim::SimReport;
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Evaluates the job either way.
fn check(graph: &Arc<Graph>, slow: &BTreeMap<Rank, f64>, profile: Profile) -> Result<(), TestCaseError> {
    let (slow, evaluator) = (slow.clone(), Evaluator::Roles);
    let options = ReplayOptions { slow, evaluator, symmetry: false, ..ReplayOptions::new(profile) };
    let by_roles = replay_ranks(graph, &options);
    match (by_roles, replay_rank_by_rank(graph, &options)) {
        (Ok(by_roles), Some(by_ranks)) => {
            prop_assert_eq!(by_ranks.roles, by_ranks.ranks.len());
            prop_assert_eq!(SimReport { roles: by_ranks.roles, ..by_roles }, by_ranks);
        }
        (Ok(_), None) => prop_assert!(false, "refused"),
        (Err(_), None) => {}
        (Err(error), Some(_)) => prop_assert!(false, "not found: {error}"),
    }
    Ok(())
}

fn check_job(job: &Job) -> Result<(), TestCaseError> {
    check(&job.graph_with_waits(), &job.slow, profile())
}

/// A job whose ranks do the same but for compute and events of their own between: every rank has a program of its own.
fn apart(step: TransformerStep, extra: &[(u32, usize, i64)]) -> Arc<Graph> {
    let like = step.graph().expect("valid");
    let mut builder = GraphBuilder::new(like.world_size());
    for name in 0..like.num_names() {
        builder.intern_name(like.name(NameId(name as u32)));
    }
    for comm in 0..like.num_comms() {
        builder.add_comm(like.comm_members(CommId(comm as u32)).iter().copied().map(Rank).collect());
    }
    for rank in (0..like.world_size()).map(Rank) {
        let mut ops: Vec<Op> = like.template(like.rank_template(rank)).iter().collect();
        for (_, at, us) in extra.iter().filter(|(owner, ..)| *owner == rank.0) {
            let op = |stream, kind| Op { host_gap: SimTime::from_ns(50), stream: StreamId(stream), kind };
            let (at, event) = (at % ops.len(), EventId(20));
            let own = [
                op(0, compute(SimTime::from_ns(us * 1000))),
                op(0, OpKind::EventRecord { event }),
                op(3, OpKind::EventWait { event }),
                op(3, compute(SimTime::from_ns(us * 100))),
                op(3, if us % 2 == 0 { OpKind::EventSync { event } } else { OpKind::StreamSync }),
            ];
            ops.splice(at..at, own.into_iter().take(1 + *us as usize % 5));
        }
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(rank, template, like.rank_slots(rank).iter().copied().map(CommId).collect());
    }
    Arc::new(builder.finish().expect("valid"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn steps_of_ranks_that_differ_end_alike(
        (dp, tp, pp, ep) in (1..4u32, 1..5u32, 1..5u32, 1..3u32),
        (microbatches, layers, interleave, iterations) in (1..4u32, 1..3u32, 1..3u32, 1..3u32),
        bytes in prop::sample::select(vec![1000u64, 1 << 20, 1 << 28]),
        extra in prop::collection::vec((0..64u32, any::<usize>(), 0..500i64), 0..40),
        slow in prop::collection::btree_map((0..64u32).prop_map(Rank), 0.5..4.0, 0..10),
    ) {
        let interleave = if pp > 1 { interleave } else { 1 };
        let step = TransformerStep {
            dp: dp * ep,
            tp,
            pp,
            ep,
            microbatches: if interleave > 1 { pp * microbatches } else { microbatches },
            layers: layers * interleave,
            interleave,
            iterations,
            tensor_bytes: bytes,
            activation_bytes: bytes,
            expert_bytes: bytes,
            ..TransformerStep::default()
        };
        let world = dp * ep * tp * pp;
        let extra: Vec<(u32, usize, i64)> = extra.into_iter().map(|(rank, at, us)| (rank % world, at, us)).collect();
        let slow = slow.into_iter().filter(|(rank, _)| rank.0 < world).collect();
        check(&apart(step, &extra), &slow, profile())?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn jobs_end_alike(job in job()) {
        check_job(&job)?;
    }

    #[test]
    fn jobs_of_one_role_end_alike(job in job_of(1..2, 2..6)) {
        check_job(&job)?;
    }

    #[test]
    fn jobs_with_messages_in_rounds_end_alike(job in exchanging_job(), is_small in any::<bool>()) {
        check(&job.graph(), &job.slow, if is_small { small_nodes() } else { profile() })?;
    }

    #[test]
    fn jobs_with_fused_collectives_end_alike(job in batched_job()) {
        check_job(&job)?;
    }
}

/// Ranks with a program each, of ops by stream; slot 0 is the world.
fn job_of_programs(programs: &[Vec<(u32, OpKind)>], num_names: usize) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(programs.len() as u32);
    for name in 0..num_names {
        builder.intern_name(&format!("name {name}"));
    }
    let world = builder.add_comm((0..programs.len() as u32).map(Rank).collect());
    for (rank, program) in (0..).zip(programs) {
        let op = |(stream, kind): &(u32, OpKind)| Op {
            host_gap: SimTime::from_ns(5),
            stream: StreamId(*stream),
            kind: *kind,
        };
        let ops: Vec<Op> = program.iter().map(op).collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, vec![world]);
    }
    Arc::new(builder.finish().expect("valid"))
}

fn is_evaluated(programs: &[Vec<(u32, OpKind)>]) -> bool {
    let (graph, options) = (job_of_programs(programs, 1), ReplayOptions::new(profile()));
    let by_ranks = replay_rank_by_rank(&graph, &options);
    let by_roles = replay_ranks(&graph, &ReplayOptions { evaluator: Evaluator::Roles, symmetry: false, ..options });
    assert_eq!(by_ranks.as_ref().map(|report| &report.ranks), by_roles.as_ref().ok().map(|report| &report.ranks));
    by_ranks.is_some()
}

fn all_reduce(count: u64) -> OpKind {
    call(0, CollectiveKind::AllReduce, count, 0)
}

#[test]
fn a_host_runs_as_far_ahead_of_its_streams_as_others_need_it_to() {
    for ahead in [1usize, 2, 7, 8, 9, 40, 300] {
        let work = |stream: u32| (stream, compute(SimTime::from_ns(1000)));
        let messages = |is_send: bool| (2, message(0, is_send, u32::from(is_send), 1 << 20, 0));
        let mut first = vec![messages(true)];
        // Held behind a message that the other takes only when the host has gone past all of it.
        first.extend((0..ahead).flat_map(|_| [work(2), (2, OpKind::EventRecord { event: EventId(0) })]));
        first.extend([(1, OpKind::EventWait { event: EventId(0) }), work(1), (2, OpKind::IterationEnd)]);
        first.extend([(0, compute(SimTime::from_ns(7))), (3, all_reduce(64)), (0, OpKind::DeviceSync), work(0)]);
        let second = vec![work(0), (3, all_reduce(64)), (3, OpKind::StreamSync), messages(false), work(2)];
        // One slot on two streams is in the order of its launches: the message is first, and never taken.
        assert!(!is_evaluated(&[first.clone(), second.clone()]));
        let apart = |program: &[(u32, OpKind)]| -> Vec<(u32, OpKind)> {
            let other = |kind: OpKind| match kind {
                OpKind::Collective { kind, dtype, reduce, root, count, group, .. } => {
                    OpKind::Collective { slot: SlotId(1), kind, dtype, reduce, root, count, group }
                }
                kind => kind,
            };
            program.iter().map(|(stream, kind)| (*stream, other(*kind))).collect()
        };
        let graph = with_second_world(&[apart(&first), apart(&second)]);
        check(&graph, &BTreeMap::from([(Rank(0), 1.7)]), profile()).expect("alike");
        assert!(replay_rank_by_rank(&graph, &ReplayOptions::new(profile())).is_some());
    }
}

/// The same with a second communicator of everybody.
fn with_second_world(programs: &[Vec<(u32, OpKind)>]) -> Arc<Graph> {
    let like = job_of_programs(&programs.iter().map(|_| Vec::new()).collect::<Vec<_>>(), 1);
    let mut builder = GraphBuilder::new(like.world_size());
    builder.intern_name("work");
    let worlds = [0, 1].map(|_| builder.add_comm((0..like.world_size()).map(Rank).collect()));
    for (rank, program) in (0..).zip(programs) {
        let op = |(stream, kind): &(u32, OpKind)| Op {
            host_gap: SimTime::from_ns(3),
            stream: StreamId(*stream),
            kind: *kind,
        };
        let ops: Vec<Op> = program.iter().map(op).collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, worlds.to_vec());
    }
    Arc::new(builder.finish().expect("valid"))
}

#[test]
fn what_cannot_be_evaluated_rank_by_rank_is_left_to_roles() {
    let good = vec![(0, all_reduce(64)), (0, compute(SimTime::from_ns(10)))];
    assert!(is_evaluated(&vec![good.clone(); 3]));
    let other = vec![(0, all_reduce(65))];
    assert!(!is_evaluated(&[good.clone(), other, good.clone()]), "a mismatch");
    assert!(!is_evaluated(&[good.clone(), vec![]]), "a rank that never comes");
    let send = |bytes| vec![(0, message(0, true, 1, bytes, 0))];
    assert!(!is_evaluated(&[send(8), vec![(0, message(0, false, 0, 9, 0))]]), "halves that do not fit");
    assert!(!is_evaluated(&[send(8), send(8)]), "a receive is missing");
    assert!(!is_evaluated(&[vec![(0, OpKind::EventWait { event: EventId(0) })]]), "a wait for nothing");
    let long = vec![(0, compute(SimTime::from_ps(i64::MAX / 3)))];
    assert!(!is_evaluated(&[long, good.clone()]), "too long");
    // Not an error, only more than there are bits for.
    let wide = job_of_programs(&[vec![(70, compute(SimTime::from_ns(10)))]], 1);
    assert!(replay_rank_by_rank(&wide, &ReplayOptions::new(profile())).is_none());
    assert!(replay_ranks(&wide, &ReplayOptions::new(profile())).is_ok());
}

#[test]
fn tables_of_distinct_ops_of_every_width_are_read() {
    for num_names in [1, 300, 70_000] {
        let work = |name: usize| {
            let (class, provenance) = (ComputeClass::Gemm, Provenance::Modelled);
            let (duration, name) = (SimTime::from_ns(name as i64 * 17), NameId(name as u32));
            (name.0 % 3, OpKind::Compute { duration, name, class, provenance })
        };
        let mut program: Vec<(u32, OpKind)> = (0..num_names).map(work).collect();
        program.push((1, all_reduce(1000)));
        let short = program.iter().rev().step_by(2).copied().rev().collect();
        check(&job_of_programs(&[program, short], num_names), &BTreeMap::new(), profile()).expect("alike");
    }
}
