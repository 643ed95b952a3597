//! Without contention messages end where the closed forms say, to the picosecond; with it, never earlier.

use super::collective_graph;
use super::profile;
use crate::sim::jobs::{Job, exchanging_job, job};
use prism_engine::collective::tuning::Tuning;
use prism_engine::contention::{Contention, Evaluation, Overlap, evaluate, evaluate_by_events};
use prism_engine::graph::Graph;
use prism_engine::graph::op::CollectiveKind;
use prism_engine::lower::{LowerOptions, StepMessages, lower};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::sim::SimReport;
use prism_engine::synthetic::flat_profile;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::sync::Arc;

/// With NCCL's choice of algorithms, and its channels.
pub(super) fn channels() -> Profile {
    let profile = crate::sim::jobs::profile();
    assert!(matches!(profile.network.tuning, Tuning::Nccl(_)), "the jobs' profile has NCCL's tuning");
    profile
}

pub(super) fn lowered(job: &Job, profile: Profile) -> prism_engine::lower::Job {
    let options = LowerOptions { slow: job.slow.clone(), ..LowerOptions::new(profile) };
    lower(&job.graph(), &options).expect("a job that fits together")
}

fn none() -> Overlap {
    Overlap::default()
}

pub(super) fn finals(evaluation: &Evaluation, job: &prism_engine::lower::Job) -> Vec<SimTime> {
    let times = |report: SimReport| {
        report
            .ranks
            .into_iter()
            .flat_map(|rank| rank.iteration_ends.into_iter().chain(rank.training_begin).chain([rank.final_time]))
            .collect()
    };
    times(evaluation.report(job))
}

/// A collective that ranks come to at different times: by replay, and by messages in every way.
fn check_collective(graph: &Arc<Graph>, profile: &Profile, step: StepMessages, kind: CollectiveKind) {
    let expected = replay_ranks(graph, &ReplayOptions::new(profile.clone())).expect("no deadlock").ranks;
    let job = lower(graph, &LowerOptions { step_messages: step, ..LowerOptions::new(profile.clone()) }).expect("fits");
    let steps = evaluate(&job, Contention::None, &none()).expect("no deadlock").report(&job).ranks;
    assert_eq!(steps, expected, "{kind:?} step by step");
    let events = evaluate_by_events(&job, Contention::None, &none()).expect("no deadlock").report(&job).ranks;
    assert_eq!(events, expected, "{kind:?} by events");
    // Alone on the network, it has all of it (a node's members may use its cards unevenly in an all-to-all).
    let shared = evaluate(&job, Contention::FairShare, &none()).expect("no deadlock").report(&job).ranks;
    if kind != CollectiveKind::AllToAll {
        assert_eq!(shared, expected, "{kind:?} with nobody to share with");
    }
}

fn kind() -> impl Strategy<Value = CollectiveKind> {
    use CollectiveKind as K;
    let all =
        [K::AllReduce, K::AllGather, K::ReduceScatter, K::Broadcast, K::Reduce, K::AllToAll, K::Gather, K::Scatter];
    prop::sample::select(all.to_vec())
}

/// Some of 40 ranks (five machines), in any order, and when each comes.
fn members() -> impl Strategy<Value = Vec<(u32, i64)>> {
    let chosen = prop::sample::subsequence((0..40u32).collect::<Vec<_>>(), 1..24).prop_shuffle();
    chosen.prop_flat_map(|ranks| {
        let count = ranks.len();
        prop::collection::vec(prop_oneof![Just(0), 0..3000i64], count)
            .prop_map(move |us| ranks.iter().copied().zip(us).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn messages_end_where_replay_says(job in prop_oneof![job(), exchanging_job()], tuned in any::<bool>()) {
        let profile = if tuned { channels() } else { profile() };
        let lowered = lowered(&job, profile.clone());
        let options = ReplayOptions { slow: job.slow.clone(), ..ReplayOptions::new(profile) };
        let expected = replay_ranks(&job.graph(), &options).expect("a job without deadlock");
        let steps = evaluate(&lowered, Contention::None, &none()).expect("no deadlock").report(&lowered);
        prop_assert_eq!(&steps.ranks, &expected.ranks);
        prop_assert_eq!(&steps.device_time, &expected.device_time);
        let events = evaluate_by_events(&lowered, Contention::None, &none()).expect("no deadlock");
        prop_assert_eq!(&events.report(&lowered), &steps);
    }

    #[test]
    fn collectives_end_where_closed_forms_say(
        members in members(),
        kind in kind(),
        count in prop::sample::select(vec![1u64, 5000, 1 << 20, 40_000_000]),
        root in 0..24u32,
    ) {
        let root = if matches!(kind, CollectiveKind::AllReduce) { 0 } else { root % members.len() as u32 };
        let graph = collective_graph(40, &members, kind, count, root);
        check_collective(&graph, &profile(), StepMessages::Fine, kind);
        check_collective(&graph, &channels(), StepMessages::Fine, kind);
        // Where rings have one slice and one loop, coarse messages are the same.
        check_collective(&graph, &flat_profile(5_000, 50_000_000_000), StepMessages::Coarse, kind);
    }

    #[test]
    fn nothing_ends_earlier_for_sharing(job in prop_oneof![job(), exchanging_job()], tuned in any::<bool>()) {
        let lowered = lowered(&job, if tuned { channels() } else { profile() });
        let alone = finals(&evaluate(&lowered, Contention::None, &none()).expect("no deadlock"), &lowered);
        for rule in [Contention::FairShare, Contention::Fifo] {
            let evaluation = evaluate(&lowered, rule, &none()).expect("no deadlock");
            let shared = finals(&evaluation, &lowered);
            let used = lowered.busiest_port().map_or(SimTime::ZERO, |(_, used)| used);
            prop_assert!(evaluation.end(&lowered) >= used, "{:?}: bytes went faster than their port", rule);
            prop_assert!(alone.iter().zip(&shared).all(|(alone, shared)| alone <= shared), "{:?}", rule);
            let again = evaluate(&lowered, rule, &none()).expect("no deadlock");
            prop_assert_eq!(again.report(&lowered), evaluation.report(&lowered));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_mesh_of_nvlinks_is_no_exception(
        members in members(),
        kind in kind(),
        count in prop::sample::select(vec![1u64, 5000, 1 << 20]),
    ) {
        let graph = collective_graph(40, &members, kind, count, 0);
        let mesh = Profile::builtin("v100-dgx1").expect("built in");
        check_collective(&graph, &mesh, StepMessages::Fine, kind);
        check_collective(&graph, &mesh.without_channels(), StepMessages::Fine, kind);
    }
}
