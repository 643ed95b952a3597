//! Stragglers, jitter, and the order of rules.

use super::{compute, ends_ns, job, op, options, profile, rules, run};
use crate::sim::jobs::{Job, job as random_job};
use crate::sim::laws::times;
use crate::sim::reference::{At, evaluate_changed};
use prism_engine::graph::op::{ComputeClass, OpKind};
use prism_engine::ids::Rank;
use prism_engine::perturb::{Distribution, JitterMode, RankSet, Scope, Window};
use prism_engine::perturb::{Jitter, Perturbations, Straggler};
use prism_engine::replay::{ReplayOptions, replay, replay_ranks};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Two iterations of two compute ops of 100 and 10 us; no communication.
fn two_iterations() -> Vec<prism_engine::graph::op::Op> {
    let mut ops = Vec::new();
    for _ in 0..2 {
        ops.push(op(0, compute(100, ComputeClass::Gemm, 1)));
        ops.push(op(0, compute(10, ComputeClass::Memset, 0)));
        ops.push(op(0, OpKind::IterationEnd));
    }
    ops
}

#[test]
fn stragglers_by_rank_node_and_stride() {
    let graph = job(20, &two_iterations());
    let slow = |text: &str| -> Vec<usize> {
        let ends = ends_ns(&graph, &format!("[[perturb]]\nkind = \"straggler\"\nfactor = 2.0\n{text}"));
        assert!(ends.iter().all(|end| [220_000, 440_000].contains(end)), "{ends:?}");
        (0..20).filter(|rank| ends[*rank] == 440_000).collect()
    };
    assert_eq!(slow("ranks = [3, 17]"), [3, 17]);
    assert_eq!(slow("ranks = \"1-3, 19\""), [1, 2, 3, 19]);
    assert_eq!(slow("nodes = [2]"), [16, 17, 18, 19], "the last node is not full");
    assert_eq!(slow("stride = { first = 2, step = 8 }"), [2, 10, 18]);
    assert_eq!(slow("ranks = [0]\nnodes = [2]"), [0, 16, 17, 18, 19], "together");
    assert_eq!(slow("ranks = \"all\""), (0..20).collect::<Vec<_>>());
}

#[test]
fn stragglers_by_class_name_and_window() {
    let graph = job(2, &two_iterations());
    let end = |text: &str| {
        let ends = ends_ns(&graph, &format!("[[perturb]]\nkind = \"straggler\"\nranks = [1]\nfactor = 1.5\n{text}"));
        assert_eq!(ends[0], 220_000, "the other rank is left alone");
        ends[1]
    };
    assert_eq!(end("classes = [\"gemm\"]"), 320_000);
    assert_eq!(end("classes = [\"memset\", \"memcpy\"]"), 230_000);
    assert_eq!(end("names = [\"*gemm\"]"), 320_000);
    assert_eq!(end("names = [\"gemm\"]"), 220_000);
    assert_eq!(end("iterations = [1, 2]"), 275_000);
    assert_eq!(end("iterations = [2, 9]"), 220_000);
    // Ops start at 0, 100, 110 and 210 us.
    assert_eq!(end("time_ns = [100000, 110000]"), 225_000);
    assert_eq!(end("time_ns = [100001, 110000]"), 220_000);
    assert_eq!(end("time_ns = [0, 1]"), 270_000);
    assert_eq!(end("time_ns = [0, 1]\niterations = [1, 2]"), 220_000, "both must hold");
    // The second op starts at 150 us once the first is slow.
    assert_eq!(end("time_ns = [0, 150001]"), 275_000);
}

#[test]
fn rules_apply_one_after_the_other() {
    let graph = job(1, &two_iterations());
    let jitter = "[[perturb]]\nkind = \"jitter\"\nranks = [0]\ndistribution = \"uniform\"\nlow = 7\nhigh = 7\n\
                  mode = \"add\"\nseed = 1\n";
    let slow = "[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 2.0\nclasses = [\"gemm\", \"memset\"]\n";
    assert_eq!(ends_ns(&graph, &format!("{jitter}{slow}")), [440_000 + 2 * 4 * 7]);
    assert_eq!(ends_ns(&graph, &format!("{slow}{jitter}")), [440_000 + 4 * 7]);
}

#[test]
fn jitter_is_a_draw_per_op() {
    let graph = job(2, &two_iterations());
    let scope = Scope::of(RankSet::of([1]));
    let distribution = Distribution::Gamma { shape: 2.0, scale: 0.5 };
    let jitter = Jitter { scope, distribution, mode: JitterMode::Multiply, seed: 9 };
    let mut expected = SimTime::ZERO;
    for iteration in 0..2 {
        for (place, us) in [(0, 100), (1, 10)] {
            expected += SimTime::from_ns(us * 1000).scaled(jitter.draw(Rank(1), iteration, place));
        }
    }
    let perturb = Perturbations::new([Arc::new(jitter) as _]).expect("few rules");
    let report = replay_ranks(&graph, &options(perturb)).expect("no deadlock");
    assert_eq!((report.ranks[0].final_time, report.ranks[1].final_time), (SimTime::from_ns(220_000), expected));
}

#[test]
fn a_constant_straggler_is_a_slow_rank() {
    let graph = job(3, &two_iterations());
    let text = "[[perturb]]\nkind = \"straggler\"\nranks = [1]\nfactor = 1.2345678\n[slow]\n2 = 1.1";
    let perturbed = replay(&graph, &options(rules(3, text))).expect("no deadlock");
    let slow = BTreeMap::from([(Rank(1), 1.234_567_8), (Rank(2), 1.1)]);
    let slowed = replay(&graph, &ReplayOptions { slow, ..ReplayOptions::new(profile()) }).expect("no deadlock");
    assert_eq!(perturbed.rank_classes, 3);
    assert_eq!(perturbed, slowed);
}

#[test]
fn nothing_ends_beyond_the_range() {
    let graph = job(2, &[op(0, compute(1_000_000_000_000, ComputeClass::Gemm, 0))]);
    let text = "[[perturb]]\nkind = \"straggler\"\nranks = [1]\nfactor = 1e6\niterations = [0, 1]";
    let error = run(&graph, text).expect_err("30 years");
    assert_eq!(error.to_string(), "a perturbed op of rank 1 would end after more than 26 days");
}

/// A straggler in a window and jitter, about some ranks of a random job.
fn straggler() -> impl Strategy<Value = (Vec<u32>, f64, std::ops::Range<u32>, std::ops::Range<i64>)> {
    let window = (0..3u32, 1..4u32).prop_map(|(from, len)| from..from + len);
    let time = (0..400i64, 1..2000i64).prop_map(|(from, len)| from * 1_000_000..(from + len) * 1_000_000);
    (prop::collection::vec(0..12u32, 1..4), prop::sample::select(vec![1.0, 1.3, 2.5]), window, time)
}

/// Evaluated with classes of equal ranks and without.
fn perturbed(job: &Job, perturb: &Perturbations) -> prism_engine::sim::SimReport {
    let options = ReplayOptions { slow: job.slow.clone(), ..options(perturb.clone()) };
    let together = replay_ranks(&job.graph(), &options).expect("no deadlock");
    let each = replay_ranks(&job.graph(), &ReplayOptions { symmetry: false, ..options }).expect("no deadlock");
    assert_eq!((&together.ranks, &together.device_time), (&each.ranks, &each.device_time));
    together
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_time_is_what_the_definition_says(job in random_job(), (ranks, factor, iterations, time) in straggler(), seed: u64) {
        let window = Window { iterations: Some(iterations), time: Some(SimTime(time.start)..SimTime(time.end)) };
        let scope = Scope { window: window.clone(), ..Scope::of(RankSet::of(ranks.clone())) };
        let distribution = Distribution::LogNormal { mu: 0.0, sigma: 0.3 };
        let noise = Jitter { scope: Scope::of(RankSet::of([0, 5])), distribution, mode: JitterMode::Multiply, seed };
        let rules: [Arc<dyn prism_engine::perturb::Rule>; 2] = [Arc::new(Straggler { scope, factor }), Arc::new(noise.clone())];
        let perturb = Perturbations::new(rules).expect("few rules");
        let mut change = |at: &At, duration: SimTime| {
            let is_in = iterations_of(&window).contains(&at.iteration) && time.contains(&at.start.0);
            let slowed = if is_in && ranks.contains(&at.rank) { duration.scaled(factor) } else { duration };
            if [0, 5].contains(&at.rank) { slowed.scaled(noise.draw(Rank(at.rank), at.iteration, at.place)) } else { slowed }
        };
        let expected = evaluate_changed(&job.graph(), &profile(), &job.slow, &mut change).expect("no deadlock");
        prop_assert_eq!(times(&perturbed(&job, &perturb)), expected);
        let alone = Job { is_scalar: !job.is_scalar, ..job.clone() };
        prop_assert_eq!(perturbed(&job, &perturb).ranks, perturbed(&alone, &perturb).ranks);
    }

    /// Slower ranks, hotter GPUs and worse links make nothing earlier.
    #[test]
    fn slower_is_never_earlier(job in random_job(), (ranks, factor, iterations, time) in straggler()) {
        let size = job.world_size();
        let ranks: Vec<u32> = ranks.iter().map(|rank| rank % size).collect();
        let (from, to) = (time.start / 1000, time.end / 1000);
        let text = format!(
            "[[perturb]]\nkind = \"straggler\"\nranks = {ranks:?}\nfactor = {factor:?}\niterations = [{}, {}]\n\
             [[perturb]]\nkind = \"slow-link\"\nranks = {ranks:?}\nbandwidth_factor = 0.3\ntime_ns = [{from}, {to}]\n\
             [[perturb]]\nkind = \"slow-link\"\nranks = [0]\nadded_latency_ns = 777\niterations = [{}, {}]\n\
             [[perturb]]\nkind = \"imbalance\"\nranks = {:?}\nfactor = {factor:?}\n\
             [[perturb]]\nkind = \"thermal-throttle\"\nranks = {ranks:?}\nambient_c = 30\nthrottle_c = 31\nhysteresis_c = 0.5\n\
             resistance_c_per_w = 0.1\ncapacitance_j_per_c = 0.001\nidle_w = 0\npower_w = 500\nclocks = [1.0, 0.7, 0.4]\n\
             period_ns = 100000\n",
            iterations.start, iterations.end, iterations.start, iterations.end, &ranks[..1]
        );
        let before = perturbed(&job, &Perturbations::default());
        let after = perturbed(&job, &rules(size, &text));
        for (before, after) in times(&before).iter().zip(times(&after)) {
            prop_assert!(after.final_time >= before.final_time);
            prop_assert!(after.iteration_ends.iter().zip(&before.iteration_ends).all(|(after, before)| after >= before));
        }
        prop_assert_eq!(perturbed(&job, &rules(size, &text)), after, "the same every time");
    }
}

fn iterations_of(window: &Window) -> std::ops::Range<u32> {
    window.iterations.clone().expect("given")
}

#[test]
fn ranks_that_are_changed_alike_are_evaluated_once() {
    let graph = job(64, &two_iterations());
    let classes = |text: &str| {
        let result = replay(&graph, &options(rules(64, text))).expect("no deadlock");
        let each = ReplayOptions { symmetry: false, ..options(rules(64, text)) };
        assert_eq!(replay(&graph, &each).expect("no deadlock").iteration_time_ns, result.iteration_time_ns);
        result.rank_classes
    };
    assert_eq!(classes(""), 1);
    let straggler = "[[perturb]]\nkind = \"straggler\"\nranks = [1, 2, 3]\nfactor = 2.0\niterations = [1, 2]\n";
    assert_eq!(classes(straggler), 2);
    let jitter = "[[perturb]]\nkind = \"jitter\"\nranks = [2, 40]\ndistribution = \"normal\"\nmean = 1\nstd = 0.1\n\
                  mode = \"multiply\"\nseed = 1\n";
    assert_eq!(classes(&format!("{straggler}{jitter}")), 4);
}
