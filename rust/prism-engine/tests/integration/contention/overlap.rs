//! Computing beside communication.

use super::alone::{finals, lowered};
use super::profile;
use super::{graph, op, us};
use crate::sim::jobs::{call, compute, job};
use prism_engine::contention::overlap::FactorProvenance;
use prism_engine::contention::{Contention, Overlap, evaluate, evaluate_by_events};
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, OpKind, Provenance};
use prism_engine::ids::{EventId, NameId};
use prism_engine::lower::{LowerOptions, lower};
use prism_engine::replay::{ReplayOptions, ReplayResult, replay, replay_ranks};
use proptest::prelude::*;
use std::sync::Arc;

fn kernels(factor: f64) -> Overlap {
    Overlap::new([("kernel", factor)]).expect("in range")
}

/// A computation of 1,000 µs on stream 0 of both ranks beside an all-reduce on stream 1 that rank 1 comes to after `late` µs.
/// The iteration ends with the all-reduce.
fn beside(late: i64) -> Arc<Graph> {
    let (reduce, end) = (op(1, call(0, CollectiveKind::AllReduce, 1 << 20, 0)), op(1, OpKind::IterationEnd));
    let (class, provenance) = (ComputeClass::Memset, Provenance::Measured);
    let late = op(1, OpKind::Compute { duration: us(late), name: NameId(0), class, provenance });
    let work = op(0, compute(us(1000)));
    graph(&[vec![reduce, end, work], vec![late, reduce, end, work]], &[vec![0, 1]])
}

fn replayed(late: i64, overlap: Overlap) -> ReplayResult {
    replay(&beside(late), &ReplayOptions { overlap, ..ReplayOptions::new(profile()) }).expect("no deadlock")
}

/// When rank 0 leaves the all-reduce, ns.
fn reduced(late: i64) -> i64 {
    let report = replay_ranks(&beside(late), &ReplayOptions::new(profile())).expect("no deadlock");
    report.ranks[0].iteration_ends[0].as_ns()
}

#[test]
fn work_is_stretched_while_communication_is_under_way() {
    let plain = replayed(0, Overlap::default());
    assert_eq!((plain.total_time_ns, plain.traffic), (1_000_000, None));
    let reduce = reduced(0);
    // While the all-reduce runs, half of the work is done; the rest is done at full speed.
    let slowed = replayed(0, kernels(2.0));
    let expected = 1_000_000 + reduce / 2;
    assert!((slowed.total_time_ns - expected).abs() <= 1, "{} {expected}", slowed.total_time_ns);
    let found = slowed.traffic.expect("by messages").overlap.expect("a factor");
    assert!((found.stretched_ns - 2 * reduce).abs() <= 2 && (found.added_ns - reduce).abs() <= 2, "{found:?}");
    assert_eq!(found.stretched_ppm, found.stretched_ns * 1_000_000 / found.compute_ns);
}

#[test]
fn waiting_for_a_peer_counts_as_communication() {
    // Rank 0 waits in its launch for 300 µs, and rank 1 comes late.
    let slowed = replayed(300, kernels(1.5));
    // Of the time that rank 0 is in the launch, a third is lost.
    assert!(reduced(300) > 300_000);
    let expected = 1_000_000 + reduced(300) / 3;
    assert!((slowed.total_time_ns - expected).abs() <= 1, "{} {expected}", slowed.total_time_ns);
}

#[test]
fn work_within_communication_takes_its_factor() {
    // 100 µs inside a wait of 2,000 µs.
    let programs = [
        vec![op(1, call(0, CollectiveKind::AllReduce, 4, 0)), op(0, compute(us(100)))],
        vec![op(1, compute(us(2000))), op(1, call(0, CollectiveKind::AllReduce, 4, 0))],
    ];
    let job = lower(&graph(&programs, &[vec![0, 1]]), &LowerOptions::new(profile())).expect("fits");
    let evaluation = evaluate(&job, Contention::FairShare, &kernels(1.3)).expect("no deadlock");
    let found = evaluation.overlap_report(&job, &kernels(1.3)).expect("a factor");
    assert_eq!((found.stretched_ns, found.added_ns, found.compute_ns), (130_000, 30_000, 2_130_000));
}

/// Kernel A holds back the second all-reduce. The slower A, the later that begins, and the less kernel B has to share with it.
#[test]
fn a_larger_factor_may_end_something_earlier() {
    let reduce = || op(1, call(0, CollectiveKind::AllReduce, 4, 0));
    let late = |time| op(1, compute(us(time)));
    let (a, b) = (op(0, compute(us(1000))), op(2, compute(us(500))));
    let (done, wait) = (EventId(0), EventId(1));
    let waits = [op(1, OpKind::EventRecord { event: wait }), op(2, OpKind::EventWait { event: wait })];
    let after_a = [op(0, OpKind::EventRecord { event: done }), op(1, OpKind::EventWait { event: done })];
    let first = [&[reduce()][..], &waits, &[a], &after_a, &[reduce(), b, op(2, OpKind::IterationEnd)]].concat();
    let second = vec![late(1000), reduce(), late(2000), reduce()];
    let graph = graph(&[first, second], &[vec![0, 1]]);
    let end = |factor| {
        let options = ReplayOptions { overlap: kernels(factor), ..ReplayOptions::new(profile()) };
        replay_ranks(&graph, &options).expect("no deadlock").ranks[0].iteration_ends[0].as_ns()
    };
    assert!(end(1.0) < end(2.0) && end(2.0) < end(1.5), "{} {} {}", end(1.0), end(1.5), end(2.0));
}

#[test]
fn only_classes_with_a_factor_are_slowed() {
    assert_eq!(replayed(0, Overlap::new([("gemm", 3.0)]).expect("in range")).total_time_ns, 1_000_000);
}

#[test]
fn factors_come_from_text() {
    let text = "[overlap]\ngemm = 1.15\nkernel = 1.3\nprovenance = \"measured\"\n";
    let overlap = Overlap::from_toml(text).expect("valid");
    let mut expected = Overlap::new([("gemm", 1.15), ("kernel", 1.3)]).expect("valid");
    expected.provenance = FactorProvenance::Measured;
    assert_eq!(overlap, expected);
    let mut own = profile();
    own.overlap = Some(overlap);
    let again = prism_engine::profile::Profile::from_toml(&own.to_toml()).expect("valid");
    assert_eq!((again.overlap, ReplayOptions::new(again).overlap), (Some(overlap), overlap));
    for (text, expected) in [
        ("[overlap]\ngem = 1.1\n", "overlap: there is no class of work \"gem\""),
        ("[overlap]\ngemm = 0.9\n", "overlap: the factor of gemm is 0.9"),
        ("[overlap]\ngemm = \"much\"\n", "overlap: "),
        ("[overlap\n", "overlap: "),
    ] {
        let error = Overlap::from_toml(text).expect_err("not valid").to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn factors_of_one_change_nothing(job in job()) {
        let lowered = lowered(&job, profile());
        let ones = Overlap::new([("kernel", 1.0), ("gemm", 1.0)]).expect("in range");
        for rule in [Contention::None, Contention::FairShare, Contention::Fifo] {
            let plain = evaluate(&lowered, rule, &Overlap::default()).expect("no deadlock").report(&lowered);
            let factored = evaluate_by_events(&lowered, rule, &ones).expect("no deadlock").report(&lowered);
            prop_assert_eq!(plain, factored);
        }
    }

    #[test]
    fn nothing_ends_earlier_for_factors(job in job(), factor in prop::sample::select(vec![1.000_001, 1.2, 2.0, 5.0])) {
        let lowered = lowered(&job, profile());
        let times = |overlap| finals(&evaluate(&lowered, Contention::None, &overlap).expect("no deadlock"), &lowered);
        let (before, after) = (times(Overlap::default()), times(kernels(factor)));
        prop_assert!(before.iter().zip(&after).all(|(before, after)| before <= after));
    }
}
