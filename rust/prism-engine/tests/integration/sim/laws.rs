//! The simulation equals the brute-force evaluator, however its roles are cut.

use super::jobs::{Job, Local, Step, batched_job, exchanging_job, job, profile, small_nodes};
use super::reference::{RankTimes, evaluate};
use prism_engine::collective::tuning::Tuning;
use prism_engine::graph::op::CollectiveKind;
use prism_engine::ids::Rank;
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::sim::{Peers, SimOptions, SimReport, Simulation};
use proptest::prelude::*;
use std::collections::BTreeMap;

pub(crate) fn times(report: &SimReport) -> Vec<RankTimes> {
    let of = |rank: &prism_engine::sim::RankReport| RankTimes {
        begin: rank.training_begin,
        iteration_ends: rank.iteration_ends.clone(),
        final_time: rank.final_time,
    };
    report.ranks.iter().map(of).collect()
}

pub(crate) fn replayed(job: &Job) -> SimReport {
    let options = ReplayOptions { slow: job.slow.clone(), ..ReplayOptions::new(profile()) };
    replay_ranks(&job.graph(), &options).expect("a job without deadlock")
}

/// The same with one wide channel.
pub(crate) fn fastest(mut profile: Profile) -> Profile {
    profile.network.tuning = Tuning::Fastest;
    profile
}

#[test]
fn spans_tell_when_ops_ran() {
    let job = Job {
        roles: 1,
        width: 2,
        steps: vec![
            Step::Local(vec![vec![Local::Compute { stream: 0, us: 100 }]]),
            Step::Call { slot: 0, kind: CollectiveKind::AllReduce, count: 1 << 20, stream: 0 },
        ],
        slow: BTreeMap::from([(Rank(1), 2.0)]),
        overrides: vec![],
        is_scalar: false,
    };
    let options = SimOptions { slow: job.slow.clone(), trace: true, ..SimOptions::new(profile()) };
    let mut simulation = Simulation::new(Peers::Graph(job.graph()), 2, options).expect("valid");
    simulation.run().expect("no deadlock");
    let spans = simulation.take_spans();
    let found: Vec<_> =
        spans.iter().map(|span| (span.rank.0, span.op, (span.end - span.start).as_ps() / 1_000_000)).collect();
    assert_eq!(found[..1], [(0, 1, 100)]);
    assert_eq!((found.len(), found[2]), (4, (1, 1, 200)));
    // Rank 0 waits in the all-reduce for rank 1.
    assert!(found[1].2 >= found[3].2 + 99, "{found:?}");
    assert_eq!(simulation.take_spans(), vec![]);
}

#[test]
fn times_out_of_range_are_refused() {
    let steps = |count: u64| vec![Step::Call { slot: 0, kind: CollectiveKind::AllReduce, count, stream: 0 }; 3];
    let job = |steps| Job { roles: 1, width: 2, steps, slow: BTreeMap::new(), overrides: vec![], is_scalar: false };
    let options = ReplayOptions::new(profile());
    let error = replay_ranks(&job(steps(u64::MAX)).graph(), &options).expect_err("longer than the range");
    assert!(error.to_string().contains("more than 53 days"), "{error}");
    let long = Step::Local(vec![vec![Local::Compute { stream: 0, us: i64::MAX / 1_000_000 }]]);
    let error = replay_ranks(&job(vec![long]).graph(), &options).expect_err("longer than the range");
    assert!(error.to_string().contains("more than 26 days"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fused_groups_run_as_by_definition(job in batched_job()) {
        let report = replayed(&job);
        prop_assert_eq!(times(&report), evaluate(&job.graph(), &profile(), &job.slow).expect("no deadlock"));
    }

    #[test]
    fn groups_of_messages_and_collectives_run_as_by_definition(job in exchanging_job()) {
        for profile in [profile(), small_nodes(), fastest(small_nodes())] {
            let expected = evaluate(&job.graph(), &profile, &job.slow).expect("no deadlock");
            for symmetry in [false, true] {
                let options = ReplayOptions { slow: job.slow.clone(), symmetry, ..ReplayOptions::new(profile.clone()) };
                let report = replay_ranks(&job.graph(), &options).expect("a job without deadlock");
                prop_assert_eq!(times(&report), expected.clone());
            }
        }
    }

    #[test]
    fn every_time_is_what_the_definition_says(job in job()) {
        let graph = job.graph_with_waits();
        let expected = evaluate(&graph, &profile(), &job.slow).expect("a job without deadlock");
        let options = ReplayOptions { slow: job.slow.clone(), ..ReplayOptions::new(profile()) };
        prop_assert_eq!(times(&replay_ranks(&graph, &options).expect("a job without deadlock")), expected);
    }

    #[test]
    fn every_op_is_evaluated_once(job in job()) {
        let options = ReplayOptions { slow: job.slow.clone(), symmetry: false, ..ReplayOptions::new(profile()) };
        let graph = job.graph();
        prop_assert_eq!(replay_ranks(&graph, &options).expect("no deadlock").ops_evaluated, graph.num_ops());
    }

    #[test]
    fn ranks_evaluated_together_end_as_if_alone(job in job()) {
        let together = replayed(&Job { is_scalar: false, ..job.clone() });
        let alone = Job { is_scalar: true, ..job };
        // Programs of equal ops would be put together again.
        let options = SimOptions { slow: alone.slow.clone(), batches: false, ..SimOptions::new(profile()) };
        let graph = alone.graph();
        let world_size = graph.world_size();
        let mut simulation = Simulation::new(Peers::Graph(graph), world_size, options).expect("valid");
        simulation.run().expect("no deadlock");
        let alone = simulation.report();
        prop_assert_eq!(alone.roles, world_size as usize);
        prop_assert_eq!(together.ranks, alone.ranks);
        prop_assert_eq!(together.device_time, alone.device_time);
    }
}

#[test]
fn a_hundred_grouped_all_reduces_are_one_launch() {
    let job = |steps| Job { roles: 1, width: 8, steps, slow: BTreeMap::new(), overrides: vec![], is_scalar: false };
    let calls = vec![(CollectiveKind::AllReduce, 256); 100];
    let grouped = replayed(&job(vec![Step::Batch { slot: 0, calls, stream: 0 }]));
    let single = Step::Call { slot: 0, kind: CollectiveKind::AllReduce, count: 256, stream: 0 };
    let one = replayed(&job(vec![single.clone()]));
    let separate = replayed(&job(vec![single; 100]));
    let end = |report: &SimReport| times(report)[0].final_time.as_ns();
    assert!(end(&separate) > 90 * end(&one));
    // The launch comes after the last of a hundred calls, which the host issues at most 5 us apart.
    let issued = 100 * 5_000;
    assert!(end(&grouped) < issued + 5 * end(&one), "{} ns, one alone {} ns", end(&grouped), end(&one));
    let spread = job(vec![Step::Batch { slot: 0, calls: vec![(CollectiveKind::AllReduce, 25_600)], stream: 0 }]);
    assert!(end(&replayed(&spread)) < end(&grouped), "one call of the same bytes has fewer loops");
}
