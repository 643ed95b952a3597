//! Ranks that die.

use super::{compute, ends_ns, job, op, rules, run};
use crate::sim::jobs::{call, message};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, Op, OpKind};
use prism_engine::ids::Rank;
use prism_engine::sim::{Blocked, SimError};

fn all_reduce() -> Op {
    op(0, call(0, CollectiveKind::AllReduce, 1 << 20, 0))
}

/// Three iterations of 100 us of work and an all-reduce.
fn training() -> Vec<Op> {
    let iteration = [op(0, compute(100, ComputeClass::Gemm, 0)), all_reduce(), op(0, OpKind::IterationEnd)];
    [iteration; 3].concat()
}

fn deadlock(size: u32, ops: &[Op], text: &str) -> (String, Vec<Blocked>) {
    let error = run(&job(size, ops), text).expect_err("somebody waits for the dead");
    let SimError::Deadlock { waiting } = &error else { panic!("{error}") };
    (error.to_string(), waiting.clone())
}

#[test]
fn the_dead_rank_is_the_reason() {
    let (text, waiting) = deadlock(4, &training(), "[[perturb]]\nkind = \"rank-death\"\nrank = 2\niteration = 1");
    assert_eq!((waiting.len(), waiting[0].sequence), (1, 1), "the second all-reduce");
    assert_eq!(waiting[0].waiting, [0, 1, 3].map(Rank));
    assert_eq!((waiting[0].missing.as_slice(), waiting[0].dead.as_slice()), (&[Rank(2)][..], &[Rank(2)][..]));
    assert_eq!(waiting[0].ended, vec![]);
    assert!(text.contains("waits for rank 2; dead: 2"), "{text}");
}

#[test]
fn a_time_of_death_cuts_off_what_has_not_ended() {
    let ends = ends_ns(&job(4, &training()), "");
    let after_first = (ends[0] - 3 * 100_000) / 3 + 100_000;
    let die = |ns: i64| format!("[[perturb]]\nkind = \"rank-death\"\nrank = 1\ntime_ns = {ns}");
    // While it computes, just before the first all-reduce ends, and just before its second compute op ends.
    for (ns, sequence) in [(50_000, 0), (after_first - 1, 0), (after_first + 99_999, 1), (ends[0] - 1, 2)] {
        let (_, waiting) = deadlock(4, &training(), &die(ns));
        assert_eq!((waiting[0].sequence, waiting[0].rank), (sequence, Rank(0)), "at {ns}");
        assert_eq!(
            (waiting[0].dead.clone(), waiting[0].waiting.clone()),
            (vec![Rank(1)], [0, 2, 3].map(Rank).to_vec())
        );
    }
    // Who lives to the end is missed by nobody.
    assert_eq!(ends_ns(&job(4, &training()), &die(ends[0])), ends);
}

#[test]
fn the_lowest_rank_may_be_the_dead_one() {
    let (_, waiting) = deadlock(3, &training(), "[[perturb]]\nkind = \"rank-death\"\nrank = 0\ntime_ns = 100001");
    assert_eq!((waiting[0].rank, waiting[0].op, waiting[0].dead.clone()), (Rank(1), 1, vec![Rank(0)]));
}

#[test]
fn a_message_needs_both_ends_alive() {
    // Rank 1 receives at once, rank 0 sends after 100 us: different programs by two templates.
    let mut builder = prism_engine::graph::GraphBuilder::new(2);
    builder.intern_name("work");
    let world = builder.add_comm(vec![Rank(0), Rank(1)]);
    let send = [op(0, compute(100, ComputeClass::Gemm, 0)), op(0, message(0, true, 1, 1 << 20, 0))];
    let receive = [op(0, message(0, false, 0, 1 << 20, 0))];
    for (rank, ops) in [(0, &send[..]), (1, &receive[..])] {
        let template = builder.add_template("half", ops).expect("valid");
        builder.set_rank(Rank(rank), template, vec![world]);
    }
    let graph = std::sync::Arc::new(builder.finish().expect("valid"));
    let ends = ends_ns(&graph, "");
    let outcome = |rank: u32, ns: i64| {
        let text = format!("[[perturb]]\nkind = \"rank-death\"\nrank = {rank}\ntime_ns = {ns}");
        match run(&graph, &text) {
            Ok(_) => None,
            Err(SimError::Deadlock { waiting }) => {
                assert_eq!(waiting.len(), 1);
                Some((waiting[0].rank.0, waiting[0].call.clone(), waiting[0].dead.clone()))
            }
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(outcome(1, 50_000), Some((0, "Send".to_owned(), vec![Rank(1)])));
    assert_eq!(outcome(1, ends[1] - 1), Some((0, "Send".to_owned(), vec![Rank(1)])));
    assert_eq!(outcome(1, ends[1]), None);
    assert_eq!(outcome(0, 50_000), Some((1, "Recv".to_owned(), vec![Rank(0)])));
    assert_eq!(outcome(0, ends[0] - 1), Some((1, "Recv".to_owned(), vec![Rank(0)])));
}

#[test]
fn nobody_misses_a_rank_that_dies_alone() {
    let ops = [op(0, compute(100, ComputeClass::Gemm, 0)), op(0, compute(100, ComputeClass::Gemm, 0))];
    let text = "[[perturb]]\nkind = \"rank-death\"\nrank = 1\ntime_ns = 150000";
    assert_eq!(ends_ns(&job(3, &ops), text), [200_000, 100_000, 200_000], "its second op does not happen");
    assert_eq!(rules(3, text).deaths(Rank(1)).0.map(prism_engine::units::SimTime::as_ns), Some(150_000));
}

#[test]
fn the_first_of_two_deaths_counts() {
    let text = "[[perturb]]\nkind = \"rank-death\"\nrank = 1\niteration = 2\n\
                [[perturb]]\nkind = \"rank-death\"\nrank = 1\niteration = 1";
    assert_eq!(deadlock(3, &training(), text).1[0].sequence, 1);
}
