//! Repairs, local checkpoints, restart storms, domains, observed failures.

use super::policies::{setup, spare};
use prism_engine::spare::laws::with_repair;
use prism_engine::spare::layout::{Action, Layout};
use prism_engine::spare::placement::Placement;
use prism_engine::spare::simulate::{
    Activity, Domain, LocalLevel, Policy, Run, Setup, Trace, TracedFailure, run, run_seeds, run_with_timeline,
};
use proptest::prelude::*;
use std::num::NonZeroU32;

fn runs(setup: &Setup, seeds: u64) -> Vec<Run> {
    run_seeds(setup, 0..seeds, NonZeroU32::MIN).unwrap()
}

fn mean(runs: &[Run], of: impl Fn(&Run) -> f64) -> f64 {
    runs.iter().map(of).sum::<f64>() / runs.len() as f64
}

/// A job without jitter, with these failures.
fn traced(policy: Policy, failures: &[(f64, u32)]) -> Setup {
    let mut setup = setup(policy);
    setup.job.jitter = 0.0;
    let failures = failures.iter().map(|(time_s, group)| TracedFailure { time_s: *time_s, group: *group }).collect();
    setup.failures.trace = Some(Trace { failures, until_s: 1e9 });
    setup
}

/// 2,000 steps of 11 s and 99 saves of 20 s.
const CALM: f64 = 2000.0 * 11.0 + 99.0 * 20.0;

#[test]
fn every_second_of_one_failure_is_accounted_for() {
    // At 100 s, in step 9, nothing is saved: 9 steps, the broken one to the middle of its reduction, 5 s of detection.
    let until_noticed = 9.0 * 11.0 + 10.5 + 5.0;
    let total = |policy, change: fn(&mut Setup)| {
        let mut setup = traced(policy, &[(100.0, 7)]);
        change(&mut setup);
        setup.check().unwrap();
        run(&setup, 1).total_s
    };
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} instead of {b}");
    near(total(Policy::Checkpoint, |_| ()), until_noticed + 300.0 + CALM);
    // Without a replacement the job waits for the repair.
    near(
        total(Policy::Checkpoint, |setup| setup.recovery.repair_s = Some(700.0)),
        until_noticed + 700.0 + 300.0 + CALM,
    );
    near(total(Policy::Spares { spares: 1 }, |_| ()), until_noticed + 30.0 + CALM);
    near(
        total(Policy::Checkpoint, |setup| setup.recovery.restart_square_s = 0.5),
        until_noticed + 300.0 + 1800.0 + CALM,
    );
    near(
        total(Policy::Checkpoint, |setup| {
            (setup.recovery.save_per_type_s, setup.recovery.restart_per_type_s) = (1.0, 7.0);
        }),
        until_noticed + 307.0 + CALM + 99.0,
    );
    // Local checkpoints every 2 steps: the one after step 8 serves; 900 of them fall between those on the storage.
    let local = |setup: &mut Setup| {
        setup.recovery.local = Some(LocalLevel { save_s: 0.0, checkpoint_steps: 2, restart_s: 10.0, share: 1.0 });
    };
    near(total(Policy::Checkpoint, local), until_noticed + 10.0 + CALM - 8.0 * 11.0);
    // A masked failure: one entry more in the step, then two in all that follow.
    near(total(spare(4), |_| ()), until_noticed + 10.0 + 0.1 + (CALM - 10.0 * 11.0) + 1990.0 * 10.0);
    // Whole again in the 38th of the longer steps (with two saves among them): then stacks are short again.
    let whole = |setup: &mut Setup| (setup.recovery.repair_s, setup.recovery.rejoin_s) = (Some(840.0), 9.0);
    near(total(spare(4), whole), until_noticed + 10.0 + 0.1 + (CALM - 10.0 * 11.0) + 38.0 * 10.0 + 9.0);
    // Data of the 4 types held takes 24 s in the background: no step is shorter than 25 s. The failure is in the fourth.
    let read = 3.0 * 25.0 + 24.5 + 5.0 + 10.0 + 0.1 + 1996.0 * 25.0 + 99.0 * 20.0;
    near(total(spare(4), |setup| setup.job.prefetch_s = 6.0), read);
}

#[test]
fn all_policies_get_their_groups_back() {
    for policy in [spare(4), Policy::Replication { r: 3 }, Policy::Elastic] {
        let mut setup = setup(policy.clone());
        (setup.failures.group_mtbf_s, setup.recovery.repair_s) = (60.0 * 400.0, Some(600.0));
        let repaired = runs(&setup, 6);
        assert!(mean(&repaired, |run| run.rejoins as f64) > 10.0, "{policy:?}");
        assert!(repaired.iter().all(|run| run.progress >= 1.0), "{policy:?}");
        if policy != Policy::Elastic {
            setup.recovery.repair_s = None;
            let replaced = runs(&setup, 6);
            assert!(mean(&replaced, |run| run.rejoins as f64) == 0.0);
            let restarts = |runs: &[Run]| mean(runs, |run| run.restarts as f64);
            assert!(restarts(&repaired) < 0.6 * restarts(&replaced), "{policy:?}");
        }
    }
}

#[test]
fn wipe_outs_with_repairs_come_as_often_as_the_law_says() {
    let mut setup = setup(spare(3));
    (setup.failures.group_mtbf_s, setup.recovery.repair_s) = (60.0 * 300.0, Some(1500.0));
    (setup.recovery.restart_s, setup.recovery.detection_s, setup.job.jitter) = (0.0, 0.0, 0.0);
    let found = runs(&setup, 80);
    let every = mean(&found, |run| run.total_s * run.availability) / mean(&found, |run| run.restarts as f64);
    let (expected, failed) = with_repair(60, 3, 60.0 * 300.0, 1500.0).unwrap();
    assert!((every / expected - 1.0).abs() < 0.2, "every {every} s instead of {expected}");
    assert!((failed - 60.0 * 1500.0 / (18_000.0 + 1500.0)).abs() < 1.0, "{failed}");
    // Repairs without an end are none: 255 failures are masked, ever more slowly.
    let (never, _) = with_repair(600, 8, 600.0 * 300.0, 1e12).unwrap();
    let masked: f64 = (0..=255).map(|k| 300.0 * 600.0 / (600.0 - f64::from(k))).sum();
    assert!((never / masked - 1.0).abs() < 0.03, "{never} instead of {masked}");
}

#[test]
fn storms_make_restarts_longer() {
    let restart = |together| {
        let mut setup = setup(Policy::Checkpoint);
        setup.failures.group_mtbf_s = 60.0 * 400.0;
        (setup.recovery.restarts_together, setup.give_up, setup.job.steps) = (together, 8.0, 300);
        let found = runs(&setup, 8);
        let down = |run: &Run| run.total_s * (1.0 - run.availability);
        mean(&found, down) / mean(&found, |run| run.restarts as f64)
    };
    let (alone, together) = (restart(false), restart(true));
    // A window of 300 s without a failure when one comes every 400 s on average takes 400 (e^0.75 - 1) s.
    assert!((together / 446.8 - 1.0).abs() < 0.15, "{together}");
    assert!(alone < together && alone > 300.0, "{alone}");
}

#[test]
fn domains_of_several_sizes_fail_on_their_own() {
    let mut setup = setup(Policy::Elastic);
    setup.failures.group_mtbf_s = 1e12;
    setup.failures.domains = vec![Domain { groups: 6, mtbf_s: 20_000.0 }, Domain { groups: 20, mtbf_s: 40_000.0 }];
    setup.recovery.repair_s = Some(100.0);
    let found = runs(&setup, 24);
    let rate = mean(&found, |run| run.failures as f64) / mean(&found, |run| run.total_s);
    // Ten domains of six and three of twenty; less where a domain that is down fails again.
    let expected = 60.0 / 20_000.0 + 60.0 / 40_000.0;
    assert!((rate / expected - 1.0).abs() < 0.25, "{rate} instead of {expected}");
    assert!((setup.failures.system_mtbf_s(60) - 1.0 / (60e-12 + 10.0 / 20_000.0 + 3.0 / 40_000.0)).abs() < 1.0);
}

#[test]
fn a_timeline_has_no_gaps_and_the_run_is_the_same() {
    let mut setup = setup(spare(4));
    (setup.failures.group_mtbf_s, setup.recovery.repair_s) = (60.0 * 300.0, Some(900.0));
    let (found, spans) = run_with_timeline(&setup, 3);
    assert_eq!(found, run(&setup, 3));
    assert!(spans.windows(2).all(|pair| pair[0].end_s.to_bits() == pair[1].start_s.to_bits()));
    assert!((spans.last().unwrap().end_s - found.total_s).abs() < 1e-6);
    let down: f64 = spans
        .iter()
        .filter(|span| matches!(span.activity, Activity::Restart | Activity::Repair))
        .map(|span| span.end_s - span.start_s)
        .sum();
    assert!((down / found.total_s - (1.0 - found.availability)).abs() < 1e-9);
    assert!(spans.iter().any(|span| span.activity == Activity::Patch));
}

#[test]
fn traces_and_details_that_make_no_sense_are_refused_by_name() {
    fn trace(setup: &mut Setup, at: usize, time_s: f64, group: u32) {
        setup.failures.trace.as_mut().unwrap().failures[at] = TracedFailure { time_s, group };
    }
    let refuse = |change: fn(&mut Setup), what: &str| {
        let mut setup = traced(spare(4), &[(5.0, 3), (9.0, 2)]);
        setup.check().unwrap();
        change(&mut setup);
        let error = setup.check().expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
    };
    refuse(|setup| trace(setup, 1, 4.0, 2), "failure 1 (from 0) must not be before");
    refuse(|setup| trace(setup, 0, -4.0, 2), "trace is -4");
    refuse(|setup| trace(setup, 1, f64::NAN, 2), "trace is NaN");
    refuse(|setup| trace(setup, 1, 9.0, 60), "the groups are 0 to 59");
    refuse(|setup| setup.failures.trace.as_mut().unwrap().until_s = 8.0, "after the end of the observation");
    refuse(|setup| setup.recovery.rejoin_s = -1.0, "rejoin_s is -1");
    refuse(|setup| setup.policy = Policy::Elastic, "repair_s is missing");
    refuse(|setup| setup.failures.domains = vec![Domain { groups: 0, mtbf_s: 1.0 }], "domain_groups is 0");
    refuse(
        |setup| {
            setup.recovery.local = Some(LocalLevel { save_s: 1.0, checkpoint_steps: 0, restart_s: 1.0, share: 0.5 });
        },
        "local.checkpoint_steps is 0",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn after_repairs_stacks_are_as_short_as_they_can_be(
        order in proptest::collection::vec((0u32..24, any::<bool>()), 1..60),
        contiguous in any::<bool>(),
    ) {
        let placement = if contiguous { Placement::Contiguous } else { Placement::Golomb };
        let stacks = placement.stacks(24, 4).unwrap();
        let mut layout = Layout::new(stacks.clone());
        let mut live = vec![true; 24];
        for (group, comes_back) in order {
            if live[group as usize] == comes_back {
                continue;
            }
            live[group as usize] = comes_back;
            let plan = if comes_back { layout.rejoin(&[group]) } else { layout.fail(&[group]) }.unwrap();
            prop_assert_eq!(layout.live() as usize, live.iter().filter(|live| **live).count());
            let least = prism_engine::spare::matching::min_stacks_of(&stacks, &live, 1);
            if plan.action == Action::WipeOut {
                prop_assert_eq!(least, None);
                continue;
            }
            if comes_back {
                prop_assert_eq!(Some(plan.stacks), least);
            } else if layout.is_covered() {
                prop_assert!(Some(plan.stacks) >= least);
            }
            for (shard, by) in (0..).zip(&plan.computed_by) {
                prop_assert!(live[*by as usize] && layout.computed(*by).contains(&shard));
            }
        }
    }
}
