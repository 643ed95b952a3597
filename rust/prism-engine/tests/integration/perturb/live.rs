//! Live ranks are perturbed like virtual ones.

use super::{compute, job, op, options, profile, rules};
use crate::sim::jobs::{Step, call, job as random_job};
use crate::sim::laws::times;
use crate::sim::live::feed;
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, OpKind};
use prism_engine::ids::{NameId, Rank, SlotId};
use prism_engine::perturb::Perturbations;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::sim::{Peers, Question, SimOptions, Simulation};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

fn simulation(graph: &Arc<Graph>, live: &[u32], options: &ReplayOptions, perturb: Perturbations) -> Simulation {
    let live = live.iter().copied().map(Rank).collect();
    let options = SimOptions { live, slow: options.slow.clone(), perturb, ..SimOptions::new(profile()) };
    Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), options).expect("valid")
}

/// Every kind of rule that leaves everybody alive.
fn text(size: u32) -> String {
    format!(
        "[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 1.7\n\
         [[perturb]]\nkind = \"straggler\"\nranks = [{last}]\nfactor = 1.5\niterations = [1, 9]\n\
         [[perturb]]\nkind = \"jitter\"\nranks = \"all\"\ndistribution = \"gamma\"\nshape = 2\nscale = 300\nmode = \"add\"\n\
         seed = 5\n\
         [[perturb]]\nkind = \"slow-link\"\nranks = [{last}]\nbandwidth_factor = 0.5\niterations = [0, 1]\n\
         [[perturb]]\nkind = \"imbalance\"\nranks = [0]\nfactor = 3\n\
         [[perturb]]\nkind = \"thermal-throttle\"\nranks = [0, {last}]\nambient_c = 30\nthrottle_c = 31\nhysteresis_c = 0.5\n\
         resistance_c_per_w = 0.1\ncapacitance_j_per_c = 0.001\nidle_w = 0\npower_w = 500\nclocks = [1.0, 0.7, 0.4]\n\
         period_ns = 100000\n",
        last = size - 1
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn live_ranks_are_perturbed_like_virtual_ones(
        mut job in random_job(), chosen in prop::collection::btree_set(0..12u32, 1..4), order in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let live: BTreeSet<u32> = chosen.into_iter().map(|rank| rank % job.world_size()).collect();
        let live: Vec<u32> = live.into_iter().collect();
        // What follows the last iteration may look like another one.
        if let Some(last) = job.steps.iter().rposition(|step| matches!(step, Step::IterationEnd { .. })) {
            job.steps.truncate(last + 1);
        }
        let graph = job.graph();
        let perturb = rules(job.world_size(), &text(job.world_size()));
        let options = ReplayOptions { slow: job.slow.clone(), ..options(perturb.clone()) };
        let expected = replay_ranks(&graph, &options).expect("no deadlock");
        let mut simulation = simulation(&graph, &live, &options, perturb);
        feed(&mut simulation, &graph, &live, &order).expect("no deadlock");
        prop_assert_eq!(times(&simulation.report()), times(&expected));
    }
}

#[test]
fn names_of_live_ranks_are_those_they_tell() {
    let graph = job(2, &[op(0, compute(100, ComputeClass::Gemm, 1)), op(0, compute(100, ComputeClass::Gemm, 0))]);
    let perturb = rules(2, "[[perturb]]\nkind = \"straggler\"\nranks = [0, 1]\nfactor = 2.0\nnames = [\"expert_*\"]\n");
    let mut simulation = simulation(&graph, &[1], &options(Perturbations::default()), perturb);
    assert!(simulation.wants_names());
    simulation.tell_name(Rank(1), NameId(0), "expert_gemm").expect("it runs");
    simulation.tell_name(Rank(1), NameId(1), "work").expect("it runs");
    for name in [0, 1, 2] {
        simulation.push(Rank(1), op(0, compute(100, ComputeClass::Gemm, name))).expect("valid");
    }
    simulation.end_live(Rank(1));
    simulation.run().expect("no deadlock");
    let ends: Vec<i64> = simulation.report().ranks.iter().map(|rank| rank.final_time.as_ns()).collect();
    assert_eq!(ends, [300_000, 400_000]);
}

/// A live rank of two, perturbed, that works, communicates and waits three times: how many answers it gets.
fn answers_before_death(text: &str) -> (usize, Simulation) {
    let iteration = [
        op(0, compute(100, ComputeClass::Gemm, 0)),
        op(0, call(0, CollectiveKind::AllReduce, 1 << 20, 0)),
        op(0, OpKind::StreamSync),
        op(0, OpKind::IterationEnd),
    ];
    let graph = job(2, &[&iteration[..]; 3].concat());
    let mut simulation = simulation(&graph, &[1], &options(Perturbations::default()), rules(2, text));
    assert_eq!(simulation.live_comm(Rank(1), &[0, 1]).expect("in the graph"), SlotId(0));
    for number in 0..3 {
        for next in iteration {
            simulation.push(Rank(1), next).expect("valid");
            if next.kind == OpKind::StreamSync {
                simulation.ask(Rank(1), Question::Resume, number);
            }
        }
        simulation.run().expect("nothing is wrong");
        if simulation.take_answers().is_empty() {
            return (number as usize, simulation);
        }
    }
    (3, simulation)
}

#[test]
fn a_dead_live_rank_is_not_answered() {
    let (answers, simulation) = answers_before_death("");
    assert_eq!(answers, 3);
    let iteration = simulation.report().ranks[0].iteration_ends[0];
    for (text, alive) in [
        ("iteration = 0".to_owned(), 0),
        ("iteration = 1".to_owned(), 1),
        (format!("time_ns = {}", (iteration + SimTime::from_ns(50_000)).as_ns()), 1),
        (format!("time_ns = {}", iteration.as_ns() - 10), 0),
    ] {
        let (answers, simulation) =
            answers_before_death(&format!("[[perturb]]\nkind = \"rank-death\"\nrank = 1\n{text}"));
        assert_eq!(answers, alive, "{text}");
        assert!(simulation.is_dead(Rank(1)) && !simulation.is_dead(Rank(0)), "{text}");
        let blocked = simulation.blocked();
        let found: Vec<_> = blocked.iter().map(|found| (found.rank, found.sequence, found.dead.clone())).collect();
        assert!(found.is_empty() || found == [(Rank(0), alive as u64, vec![Rank(1)])], "{text}: {found:?}");
    }
}
