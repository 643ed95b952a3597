//! Ranks evaluated one by one end as they do by roles, in everything a report says.

use super::jobs::{Job, batched_job, compute, exchanging_job, job, job_of, profile, small_nodes};
use prism_engine::graph::op::{Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, StreamId};
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
    check(&job.graph(), &job.slow, profile())
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
