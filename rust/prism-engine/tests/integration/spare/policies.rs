//! What must hold between policies on one failure trace.

use prism_engine::spare::placement::Placement;
use prism_engine::spare::simulate::{
    Distribution, Domain, Failures, Job, Policy, Recovery, Run, Setup, run, run_seeds, summarise,
};
use std::num::NonZeroU32;

pub(super) fn setup(policy: Policy) -> Setup {
    let needs_repair = matches!(policy, Policy::Elastic | Policy::Spares { .. });
    Setup {
        job: Job { groups: 60, steps: 2000, compute_s: 10.0, all_reduce_s: 1.0, jitter: 0.05, ..Job::default() },
        failures: Failures {
            group_mtbf_s: 60.0 * 2000.0,
            distribution: Distribution::Exponential,
            ..Failures::default()
        },
        recovery: Recovery {
            save_s: 20.0,
            stall_s: 20.0,
            checkpoint_steps: 20,
            restart_s: 300.0,
            detection_s: 5.0,
            shrink_s: 0.1,
            repair_s: needs_repair.then_some(3600.0),
            swap_s: 30.0,
            ..Recovery::default()
        },
        policy,
        published: false,
        give_up: 50.0,
    }
}

pub(super) fn spare(r: u32) -> Policy {
    Policy::Spare { r, placement: Placement::Golomb }
}

#[test]
fn without_failures_a_job_takes_its_time() {
    for (policy, entries) in [
        (spare(4), 1.0),
        (Policy::Replication { r: 2 }, 2.0),
        (Policy::Checkpoint, 1.0),
        (Policy::Elastic, 1.0),
        (Policy::Spares { spares: 3 }, 1.0),
    ] {
        let mut setup = setup(policy);
        setup.failures.group_mtbf_s = 1e15;
        setup.job.jitter = 0.0;
        let run = run(&setup, 1);
        // 99 saves: none is needed at the end.
        let expected = 2000.0 * (10.0 * entries + 1.0) + 99.0 * 20.0;
        assert!((run.total_s - expected).abs() < 1e-6, "{run:?}");
        assert_eq!((run.failures, run.restarts, run.progress), (0, 0, 1.0));
    }
}

#[test]
fn a_run_depends_on_its_seed_alone() {
    let setup = setup(spare(4));
    let one = run_seeds(&setup, 0..12, NonZeroU32::MIN).unwrap();
    let three = run_seeds(&setup, 0..12, NonZeroU32::new(3).unwrap()).unwrap();
    assert_eq!(one, three);
    assert_ne!(one[0], one[1]);
    assert_eq!(one[5], run(&setup, 5));
}

#[test]
fn redundancy_beats_restarting_when_failures_are_many() {
    let time = |policy| {
        let mut setup = setup(policy);
        setup.failures.group_mtbf_s = 60.0 * 400.0;
        summarise(&run_seeds(&setup, 0..8, NonZeroU32::MIN).unwrap()).relative_time.mean
    };
    let (spare, replication, checkpoint) =
        (time(spare(6)), time(Policy::Replication { r: 3 }), time(Policy::Checkpoint));
    assert!(spare < replication && replication < checkpoint, "{spare} {replication} {checkpoint}");
}

#[test]
fn more_redundancy_means_fewer_restarts() {
    let restarts = |r| {
        let runs = run_seeds(&setup(spare(r)), 0..8, NonZeroU32::MIN).unwrap();
        runs.iter().map(|run| run.restarts).sum::<u64>()
    };
    let counts = [2, 3, 4, 6].map(restarts);
    assert!(counts.windows(2).all(|pair| pair[0] > pair[1]), "{counts:?}");
}

#[test]
fn domains_that_fail_together_hurt_neighbours_most() {
    let restarts = |placement: Placement, domain_mtbf_s| {
        let mut setup = setup(Policy::Spare { r: 4, placement });
        setup.failures.group_mtbf_s = 1e12;
        if domain_mtbf_s > 0.0 {
            setup.failures.domains = vec![Domain { groups: 4, mtbf_s: domain_mtbf_s }];
        }
        run_seeds(&setup, 0..4, NonZeroU32::MIN).unwrap().iter().map(|run| run.restarts).sum::<u64>()
    };
    assert_eq!(restarts(Placement::Contiguous, 0.0), 0);
    let golomb = restarts(Placement::Golomb, 60_000.0);
    let contiguous = restarts(Placement::Contiguous, 60_000.0);
    assert!(golomb < contiguous, "{golomb} {contiguous}");
}

#[test]
fn a_job_that_gets_nowhere_is_given_up_and_says_how_far_it_came() {
    let mut setup = setup(Policy::Checkpoint);
    setup.failures.group_mtbf_s = 60.0 * 20.0;
    setup.recovery.restart_s = 3600.0;
    setup.give_up = 5.0;
    let run: Run = run(&setup, 1);
    assert!(run.progress < 0.1 && run.relative_time >= 5.0, "{run:?}");
}

#[test]
fn set_ups_that_make_no_sense_are_refused_by_name() {
    let refuse = |change: fn(&mut Setup), what: &str| {
        let mut setup = setup(spare(4));
        change(&mut setup);
        let error = setup.check().expect_err(what).to_string();
        assert!(error.starts_with(what), "{error}");
    };
    refuse(|setup| setup.job.groups = 1, "n is 1");
    refuse(|setup| setup.job.steps = 0, "steps is 0");
    refuse(|setup| setup.job.compute_s = -1.0, "compute_s is -1");
    refuse(|setup| setup.job.jitter = 2.0, "jitter is 2");
    refuse(|setup| setup.recovery.restart_s = f64::NAN, "restart_s is NaN");
    refuse(|setup| setup.recovery.stall_s = 90.0, "stall_s is 90");
    refuse(|setup| setup.recovery.checkpoint_steps = 0, "checkpoint_steps is 0");
    refuse(|setup| setup.failures.group_mtbf_s = 0.0, "group_mtbf_s is 0");
    refuse(|setup| setup.failures.distribution = Distribution::Weibull { shape: 0.0 }, "shape is 0");
    refuse(|setup| setup.failures.domains = vec![Domain { groups: 61, mtbf_s: 1.0 }], "domain_groups is 61");
    refuse(|setup| setup.policy = spare(9), "r is 9: a Golomb placement of 60 groups allows at most 7");
    refuse(|setup| setup.give_up = 0.5, "give_up is 0.5");
}
