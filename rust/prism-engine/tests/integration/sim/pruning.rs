//! Pruning removes participants, never dependencies: for any sandbox its ranks are timed as in the replay of all ranks
//! (`live.rs`), whoever is materialised; here, who that is.

use super::jobs::{job, profile};
use super::laws::{replayed, times};
use super::live::feed;
use prism_engine::graph::Graph;
use prism_engine::graph::op::OpKind;
use prism_engine::ids::{CommId, Rank};
use prism_engine::prune::materialised;
use prism_engine::sim::{Peers, SimOptions, Simulation};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn message_peers(graph: &Graph, rank: Rank) -> BTreeSet<Rank> {
    let slots = graph.rank_slots(rank);
    let peer = |kind| match kind {
        OpKind::PointToPoint { slot, peer, .. } => {
            Some(Rank(graph.comm_members(CommId(slots[slot.index()]))[peer as usize]))
        }
        _ => None,
    };
    graph.template(graph.rank_template(rank)).iter().filter_map(|op| peer(op.kind)).collect()
}

/// Ranks that share a communicator with the rank.
fn reachable(graph: &Graph, rank: Rank) -> BTreeSet<Rank> {
    let members = graph.rank_slots(rank).iter().flat_map(|comm| graph.comm_members(CommId(*comm)));
    members.copied().map(Rank).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn who_is_materialised_follows_from_each_sandbox_rank_alone(
        job in job(), chosen in prop::collection::btree_set(0..12u32, 1..5),
    ) {
        let graph = job.graph();
        let sandbox: BTreeSet<Rank> = chosen.into_iter().map(|rank| Rank(rank % graph.world_size())).collect();
        let kept = materialised(&graph, &sandbox, &profile());
        let mut each = BTreeSet::new();
        for rank in &sandbox {
            let own = materialised(&graph, &BTreeSet::from([*rank]), &profile());
            prop_assert!(own.contains(rank));
            prop_assert!(own.is_superset(&message_peers(&graph, *rank)));
            let mut near = reachable(&graph, *rank);
            near.insert(*rank);
            prop_assert!(own.is_subset(&near), "{:?} is not in {:?}", own, near);
            each.extend(own);
        }
        prop_assert_eq!(kept, each);
    }

    /// Several sandboxes of one job: each sees the iteration times of all its ranks real, slow ranks beyond it included.
    #[test]
    fn every_sandbox_of_a_job_sees_the_same_job(job in job(), order in prop::collection::vec(any::<u8>(), 1..20)) {
        prop_assume!(!job.steps.iter().any(|step| matches!(step, super::jobs::Step::IterationEnd { .. })));
        let graph = job.graph();
        let whole = times(&replayed(&job));
        let world = graph.world_size();
        let sandboxes = [vec![0], vec![world - 1], (0..world).step_by(2).collect::<Vec<_>>(), (0..world).collect()];
        for sandbox in sandboxes {
            let live = sandbox.iter().copied().map(Rank).collect();
            let options = SimOptions { live, slow: job.slow.clone(), ..SimOptions::new(profile()) };
            let mut simulation = Simulation::new(Peers::Graph(Arc::clone(&graph)), world, options).expect("valid");
            feed(&mut simulation, &graph, &sandbox, &order).expect("no deadlock");
            prop_assert_eq!(times(&simulation.report()), whole.clone(), "sandbox {:?}", sandbox);
        }
    }
}

#[test]
fn a_straggler_that_is_not_materialised_is_felt() {
    let step = TransformerStep { dp: 16, tp: 8, pp: 2, microbatches: 2, ..TransformerStep::default() };
    let graph = Arc::new(step.graph().expect("valid"));
    let kept = materialised(&graph, &(0..8).map(Rank).collect(), &profile());
    let far = (0..graph.world_size()).map(Rank).find(|rank| !kept.contains(rank)).expect("most ranks are pruned");
    let end_of_rank_0 = |slow: BTreeMap<Rank, f64>| {
        let live = (0..8).map(Rank).collect();
        let options = SimOptions { live, slow, ..SimOptions::new(profile()) };
        let mut simulation =
            Simulation::new(Peers::Graph(Arc::clone(&graph)), graph.world_size(), options).expect("valid");
        feed(&mut simulation, &graph, &(0..8).collect::<Vec<_>>(), &[0, 5, 3]).expect("no deadlock");
        simulation.report().ranks[0].final_time
    };
    assert!(end_of_rank_0(BTreeMap::from([(far, 2.0)])) > end_of_rank_0(BTreeMap::new()), "rank {far}");
}

/// Published counts of neighbours: of a job without and with experts, by ring, pipeline and double tree, every rank a node of its
/// own. Pipelines are interleaved, so that the first stage has messages with the last.
#[test]
fn experts_add_their_group_and_nobody_else() {
    let count = |ranks: u32, tp: u32, pp: u32, ep: u32, sandbox: u32| {
        let (dp, layers, microbatches) = (ranks / tp / pp, 2, pp);
        let degrees = TransformerStep { dp, tp, pp, ep, ..TransformerStep::default() };
        let step = TransformerStep { layers, microbatches, interleave: 2, ..degrees };
        let sandbox: BTreeSet<Rank> = (0..sandbox).map(Rank).collect();
        let kept = materialised(&step.graph().expect("valid"), &sandbox, &flat_profile(5_000, 50_000_000_000));
        (kept.len() - sandbox.len()) as u32
    };
    // Ranks, degrees, sandbox; and the published counts without and with the all-to-all of the experts.
    let rows = [
        (8_192, 8, 16, 1, 8, 41, 41),
        (8_192, 8, 8, 8, 8, 41, 89),
        (8_192, 2, 8, 64, 8, 30, 144),
        (8_192, 8, 16, 1, 32, 108, 108),
        (65_536, 2, 8, 64, 32, 90, 180),
    ];
    for (ranks, tp, pp, ep, sandbox, without, with) in rows {
        // The published jobs have a group over the ranks of each model replica as well, and the step has not: one neighbour less for
        // each replica in the sandbox.
        let replicas = sandbox / tp;
        let found = (count(ranks, tp, pp, 1, sandbox), count(ranks, tp, pp, ep, sandbox));
        assert_eq!(found, (without - replicas, with - replicas), "{ranks} ranks, {tp} x {pp} x {ep}, {sandbox} real");
    }
}
