//! Ranks evaluated as one have the times they have when every rank is evaluated.

use super::jobs::{Job, job_of, profile};
use super::synthetic::{chain, flat};
use prism_engine::graph::Graph;
use prism_engine::ids::Rank;
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::sim::{Peers, SimOptions, SimReport, Simulation};
use prism_engine::synthetic::TransformerStep;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The report with symmetry; it is checked against the one without.
fn checked(graph: &Arc<Graph>, profile: &Profile, slow: &BTreeMap<Rank, f64>) -> SimReport {
    let options = ReplayOptions { slow: slow.clone(), ..ReplayOptions::new(profile.clone()) };
    let sim_options = SimOptions { slow: slow.clone(), symmetry: true, ..SimOptions::new(profile.clone()) };
    let mut simulation =
        Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), sim_options).expect("valid");
    simulation.run().expect("no deadlock");
    let shared = simulation.report();
    let each = replay_ranks(graph, &ReplayOptions { symmetry: false, ..options }).expect("no deadlock");
    assert_eq!(each.classes, graph.world_size() as usize);
    assert_eq!(shared.ranks, each.ranks);
    assert_eq!(shared.device_time, each.device_time);
    shared
}

fn step(dp: u32, tp: u32, pp: u32, iterations: u32) -> Arc<Graph> {
    let step = TransformerStep { dp, tp, pp, microbatches: 4, layers: 1, iterations, ..TransformerStep::default() };
    Arc::new(step.graph().expect("valid"))
}

fn straggler(rank: u32) -> BTreeMap<Rank, f64> {
    BTreeMap::from([(Rank(rank), 1.3)])
}

#[test]
fn equal_ranks_are_one_class_per_stage() {
    for (dp, pp) in [(8, 1), (8, 4), (128, 8)] {
        let graph = step(dp, 8, pp, 2);
        let report = checked(&graph, &profile(), &BTreeMap::new());
        assert_eq!(report.classes, pp as usize, "dp {dp} pp {pp}");
        assert_eq!(report.ops_evaluated * u64::from(dp * 8), graph.num_ops());
    }
}

#[test]
fn a_straggler_splits_what_it_touches() {
    for profile in [profile(), flat()] {
        let graph = step(128, 8, 8, 1);
        let report = checked(&graph, &profile, &straggler(4242));
        // Up to the last all-reduce: per stage one class, and one per member of the tensor group of the straggler's replica.
        let per_stage = graph.num_ops() / u64::from(graph.world_size());
        assert!(report.ops_evaluated < 8 * 12 * (per_stage + 20), "{} of {}", report.ops_evaluated, graph.num_ops());
    }
}

#[test]
fn a_straggler_is_felt_in_later_iterations() {
    checked(&step(16, 4, 2, 3), &profile(), &straggler(5));
    checked(&step(64, 1, 1, 3), &profile(), &straggler(63));
}

#[test]
fn jobs_without_symmetry_are_evaluated_as_they_are() {
    let slow: BTreeMap<Rank, f64> = (0..256).map(|rank| (Rank(rank), 1.0 + f64::from(rank) * 1e-3)).collect();
    let report = checked(&step(8, 8, 4, 2), &profile(), &slow);
    assert_eq!(report.classes, 256);
    // One straggler per node, each at another place.
    let slow = (0..32).map(|node| (Rank(node * 8 + node * 5 % 8), 1.2)).collect();
    checked(&step(8, 8, 4, 2), &profile(), &slow);
}

#[test]
fn stages_of_one_program_are_told_apart() {
    for (stages, replicas, microbatches) in [(5, 8, 3), (7, 4, 5), (12, 16, 2)] {
        let graph = chain(stages, replicas, microbatches);
        let report = checked(&graph, &profile(), &BTreeMap::new());
        // Members of a ring over more than one node end at different times.
        let per_stage = if replicas > 8 { replicas } else { 1 };
        assert!(report.classes <= (stages * per_stage) as usize, "{}", report.classes);
        checked(&graph, &profile(), &straggler(replicas + 1));
    }
}

fn check_job(job: &Job) {
    checked(&job.graph_with_waits(), &profile(), &job.slow);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_jobs_have_the_same_times(job in job_of(1..4, 6..20)) {
        check_job(&Job { is_scalar: false, ..job });
    }

    #[test]
    fn random_jobs_of_few_ranks_have_the_same_times(job in job_of(1..4, 1..5)) {
        check_job(&job);
    }
}
