//! Speed of the fault-tolerance simulator and controller. Every case checks its result before it is timed.
//!
//! `cargo bench -p prism-engine --bench spare`

#![allow(clippy::print_stdout, reason = "the numbers are the output")]

mod meter;

use meter::cpu_time;
use prism_engine::spare::layout::{Action, Layout};
use prism_engine::spare::placement::Placement;
use prism_engine::spare::simulate::{Distribution, Failures, Job, Policy, Recovery, Setup, run, run_seeds, summarise};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

fn main() {
    controller();
    simulator();
}

/// One failure after the other until the wipe-out, `N = 1,000`, `r = 20`.
fn controller() {
    let mut layout = Layout::new(Placement::Golomb.stacks(1000, 20).expect("fits"));
    let (mut plans, mut reorders, mut slowest) = (0u32, 0u32, Duration::ZERO);
    let before = cpu_time();
    for index in 0..1000u32 {
        let start = Instant::now();
        let plan = layout.fail(&[index * 617 % 1000]).expect("alive");
        slowest = slowest.max(start.elapsed());
        plans += 1;
        reorders += u32::from(plan.action == Action::Reorder);
        if plan.action == Action::WipeOut {
            break;
        }
    }
    let taken = cpu_time().saturating_sub(before);
    assert!(plans > 100 && reorders > 0, "{plans} plans, {reorders} reorders");
    println!(
        "controller, 1,000 groups, r 20: {plans} failures, {reorders} reorders, {:.1} us each, slowest {:.2} ms wall",
        taken.as_secs_f64() / f64::from(plans) * 1e6,
        slowest.as_secs_f64() * 1e3
    );
}

/// 600,000 GPUs as 1,000 groups of 600: 10,000 steps, 100 seeds, one thread.
fn simulator() {
    for (r, shape) in [(10, None), (10, Some(0.78))] {
        let distribution = shape.map_or(Distribution::Exponential, |shape| Distribution::Weibull { shape });
        let setup = Setup {
            job: Job {
                groups: 1000,
                steps: 10_000,
                compute_s: 64.0,
                all_reduce_s: 10.0,
                jitter: 0.05,
                ..Job::default()
            },
            failures: Failures { group_mtbf_s: 300e3, distribution, ..Failures::default() },
            recovery: Recovery {
                save_s: 58.8,
                stall_s: 58.8,
                checkpoint_steps: 25,
                restart_s: 3600.0,
                detection_s: 0.0,
                shrink_s: 0.1,
                ..Recovery::default()
            },
            policy: Policy::Spare { r, placement: Placement::Golomb },
            published: true,
            give_up: 50.0,
        };
        let first = run_seeds(&setup, 0..1, NonZeroU32::MIN).expect("valid");
        let before = cpu_time();
        let runs: Vec<_> = (0..100).map(|seed| run(&setup, seed)).collect();
        let taken = cpu_time().saturating_sub(before);
        assert_eq!(runs[0], first[0], "the same every time");
        let summary = summarise(&runs);
        assert_eq!(summary.finished, 100);
        println!(
            "simulator, 1,000 groups, r {r}, {distribution:?}: 100 seeds x 10,000 steps in {:.2} s CPU on one thread; time / ideal {:.3} \
             (P10 {:.3}, P90 {:.3}), availability {:.1} %, {:.1} restarts, {:.0} failures, converged: {}",
            taken.as_secs_f64(),
            summary.relative_time.mean,
            summary.relative_time.p10,
            summary.relative_time.p90,
            summary.availability.mean * 100.0,
            summary.restarts.mean,
            summary.failures.mean,
            summary.is_converged
        );
    }
}
