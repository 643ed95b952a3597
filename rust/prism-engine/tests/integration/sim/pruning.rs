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
    let step = prism_engine::synthetic::TransformerStep { dp: 16, tp: 8, pp: 2, microbatches: 2, ..Default::default() };
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

/// Published counts of neighbours: of a job without and with experts, by ring, pipeline and double tree. Pipelines are
/// interleaved, so that the first stage has messages with the last.
#[test]
fn experts_add_their_group_and_nobody_else() {
    let count = |ranks: u32, tp: u32, pp: u32, ep: u32, sandbox: u32| {
        let (dp, layers) = (ranks / tp / pp, 2);
        let step = prism_engine::synthetic::TransformerStep {
            dp,
            tp,
            pp,
            ep,
            layers,
            interleave: 2,
            microbatches: pp,
            ..Default::default()
        };
        let kept = materialised(&step.graph().expect("valid"), &(0..sandbox).map(Rank).collect(), &profile());
        kept.len() as u32 - sandbox
    };
    // Ranks, degrees, sandbox; and the published counts without and with the all-to-all of the experts.
    let rows = [(8_192, 8, 8, 8, 8, 41, 89), (8_192, 2, 8, 64, 8, 30, 144), (65_536, 2, 8, 64, 32, 90, 180)];
    for (ranks, tp, pp, ep, sandbox, without, with) in rows {
        let (dense, experts) = (count(ranks, tp, pp, 1, sandbox), count(ranks, tp, pp, ep, sandbox));
        assert_eq!(experts - dense, with - without, "{ranks} ranks, {tp} x {pp} x {ep}");
        // The step has no collective of the whole job, which is one of the published neighbours; and where several members are on
        // one node, trees are chains there, with fewer neighbours than members that are nodes of their own.
        assert!(dense < without, "{dense} of {without}");
        if tp == 8 {
            assert_eq!(dense + 1, without);
        }
    }
    assert_eq!(count(8_192, 8, 16, 1, 8) + 1, 41);
}
