//! Leaves and uplinks between nodes: who shares what, worked out by hand; full bisection changes nothing.

use super::alone::{channels, finals, lowered};
use super::collective_graph;
use super::rules::at_once;
use crate::sim::jobs::{exchanging_job, job};
use prism_engine::contention::{Contention, Overlap, evaluate};
use prism_engine::graph::Graph;
use prism_engine::graph::op::CollectiveKind;
use prism_engine::lower::{LowerOptions, lower};
use prism_engine::profile::{Fabric, Profile};
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::synthetic::flat_profile;
use proptest::prelude::*;
use std::sync::Arc;

fn with(mut profile: Profile, nodes_per_leaf: u32, rails: bool, oversubscription: f64) -> Profile {
    profile.network.fabric = Some(Fabric { nodes_per_leaf, rails, oversubscription });
    profile
}

/// One GPU and one card per node; a message alone takes 1 ms and 5 us.
fn flat(nodes_per_leaf: u32, oversubscription: f64) -> Profile {
    with(flat_profile(5_000, 50_000_000_000), nodes_per_leaf, false, oversubscription)
}

/// When each rank is through, us.
fn ends(graph: &Arc<Graph>, profile: &Profile, contention: Contention) -> Vec<i64> {
    let options = ReplayOptions { contention, ..ReplayOptions::new(profile.clone()) };
    let report = replay_ranks(graph, &options).expect("no deadlock");
    report.ranks.iter().map(|rank| rank.final_time.as_ps() / 1_000_000).collect()
}

#[test]
fn two_to_one_halves_what_crosses_leaves() {
    // Four nodes a leaf with two uplinks: cards 0 and 2 of a leaf are reached through its first.
    let crossing = at_once(8, &[(0, 4), (1, 5), (2, 6), (3, 7)]);
    for rule in [Contention::FairShare, Contention::Fifo] {
        assert_eq!(ends(&crossing, &flat(4, 1.0), rule), [1000, 1000, 1000, 1000, 1005, 1005, 1005, 1005], "{rule:?}");
    }
    let shared = ends(&crossing, &flat(4, 2.0), Contention::FairShare);
    assert_eq!(shared, [2000, 2000, 2000, 2000, 2005, 2005, 2005, 2005]);
    assert_eq!(ends(&crossing, &flat(4, 2.0), Contention::Fifo), [1000, 1000, 2000, 2000, 1005, 1005, 2005, 2005]);
    // Within the leaves nothing is shared, and without contention nothing is known of them.
    let inside = at_once(8, &[(0, 1), (2, 3), (4, 5), (6, 7)]);
    assert_eq!(ends(&inside, &flat(4, 4.0), Contention::FairShare), [1000, 1005, 1000, 1005, 1000, 1005, 1000, 1005]);
    assert_eq!(ends(&crossing, &flat(4, 4.0), Contention::None), ends(&crossing, &flat(4, 1.0), Contention::None));
}

#[test]
fn another_destination_takes_another_uplink() {
    // To the first and the second card of the other leaf: two uplinks, nothing shared. To the first and the third: one.
    assert_eq!(ends(&at_once(8, &[(0, 4), (1, 5)]), &flat(4, 2.0), Contention::FairShare)[..2], [1000, 1000]);
    assert_eq!(ends(&at_once(8, &[(0, 4), (1, 6)]), &flat(4, 2.0), Contention::FairShare)[..2], [2000, 2000]);
}

#[test]
fn static_routing_has_messages_meet_in_a_fabric_of_full_bisection() {
    // To the first cards of two other leaves: both are reached through the first uplink, and the second is free.
    let apart = at_once(6, &[(0, 2), (1, 4)]);
    assert_eq!(ends(&apart, &flat(2, 1.0), Contention::FairShare)[..2], [2000, 2000]);
    let beside = at_once(6, &[(0, 2), (1, 5)]);
    assert_eq!(ends(&beside, &flat(2, 1.0), Contention::FairShare)[..2], [1000, 1000]);
}

#[test]
fn a_ring_through_neighbours_does_not_feel_oversubscription() {
    // From the last node of a leaf to the first of the next, with all cards: as many uplinks as there are cards are left.
    let members: Vec<_> = (0..64).map(|rank| (rank, 0)).collect();
    let ring = collective_graph(64, &members, CollectiveKind::AllGather, 1 << 20, 0);
    let plain = channels();
    let alone = ends(&ring, &plain, Contention::FairShare);
    assert_eq!(ends(&ring, &with(plain.clone(), 4, false, 4.0), Contention::FairShare), alone);
    // An all-to-all does: three quarters of its bytes and more cross.
    let exchange = collective_graph(64, &members, CollectiveKind::AllToAll, 1 << 20, 0);
    let (free, held) = (
        ends(&exchange, &plain, Contention::FairShare),
        ends(&exchange, &with(plain, 4, false, 4.0), Contention::FairShare),
    );
    assert!(held.iter().zip(&free).all(|(held, free)| held > free), "{held:?} {free:?}");
}

#[test]
fn rails_stay_apart() {
    // Two nodes of eight, one leaf per rail with one uplink: ranks 0 and 8 are on rail 0, ranks 1 and 9 on rail 1.
    let rails = |oversubscription| with(super::profile(), 2, true, oversubscription);
    let same = at_once(16, &[(0, 8), (1, 9)]);
    let alone = ends(&same, &rails(1.0), Contention::None);
    assert_eq!(ends(&same, &rails(2.0), Contention::FairShare), alone);
    // Both of rail 0 to rail 1: up through the one uplink of the leaf of rail 0.
    let across = at_once(16, &[(0, 9), (8, 1)]);
    let alone = ends(&across, &rails(1.0), Contention::None);
    assert_eq!(ends(&across, &rails(1.0), Contention::FairShare), alone);
    let shared = ends(&across, &rails(2.0), Contention::FairShare);
    assert!(shared[0] > 19 * alone[0] / 10 && shared[8] > 19 * alone[8] / 10, "{shared:?} {alone:?}");
    // One leaf for both nodes: nothing leaves it.
    let tree = with(super::profile(), 2, false, 2.0);
    assert_eq!(ends(&across, &tree, Contention::FairShare), alone);
}

#[test]
fn an_uplink_can_be_the_busiest_port() {
    let name = |profile: Profile, messages: &[(u32, u32)], world| {
        let job = lower(&at_once(world, messages), &LowerOptions::new(profile)).expect("fits");
        let (port, used) = job.busiest_port().expect("there are messages");
        (port, used.as_ns() / 1_000_000)
    };
    let crossing = [(0, 4), (1, 5), (2, 6), (3, 7)];
    let expected = ("uplink 0 of the leaf of nodes 0 to 3, up".to_owned(), 4);
    assert_eq!(name(flat(4, 4.0), &crossing, 8), expected);
    let rails = with(super::profile(), 2, true, 2.0);
    let (port, _) = name(rails, &[(0, 9), (8, 1)], 16);
    assert_eq!(port, "uplink 0 of the leaf of nodes 0 to 1 on rail 0, up");
}

#[test]
fn fabrics_that_cannot_be_are_refused() {
    let refused = |nodes_per_leaf: &str, oversubscription: &str| {
        let text = Profile::builtin("h100-sxm").expect("built in").to_toml();
        let table =
            format!("[network.fabric]\nnodes_per_leaf = {nodes_per_leaf}\noversubscription = {oversubscription}\n");
        Profile::from_toml(&(text + &table)).err().map(|error| error.to_string())
    };
    assert_eq!(refused("32", "2.0"), None);
    assert!(
        refused("0", "1.0")
            .is_some_and(|text| text.contains("`network.fabric.nodes_per_leaf` must be from 1 to 65536"))
    );
    for oversubscription in ["0.5", "5.0", "nan"] {
        let text = refused("4", oversubscription).expect("refused");
        assert!(
            text.contains("`network.fabric.oversubscription` must be from 1 to network.fabric.nodes_per_leaf"),
            "{text}"
        );
    }
    let read = Profile::from_toml(&flat(4, 2.0).to_toml()).expect("a profile");
    assert_eq!(read, flat(4, 2.0), "written and read");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn full_bisection_between_two_leaves_is_no_fabric(
        job in prop_oneof![job(), exchanging_job()],
        tuned in any::<bool>(),
    ) {
        let profile = if tuned { channels() } else { super::profile() };
        let nodes = job.graph().world_size().div_ceil(profile.node.gpus);
        let fabric = with(profile.clone(), nodes.div_ceil(2), false, 1.0);
        let (plain, tree) = (lowered(&job, profile), lowered(&job, fabric));
        let times = |job| evaluate(job, Contention::FairShare, &Overlap::default()).expect("no deadlock").report(job);
        prop_assert_eq!(times(&plain), times(&tree));
    }

    #[test]
    fn a_narrower_fabric_is_never_faster_than_none_at_all(
        job in prop_oneof![job(), exchanging_job()],
        nodes_per_leaf in 2..5u32,
        rails in any::<bool>(),
        rule in prop::sample::select(vec![Contention::FairShare, Contention::Fifo]),
    ) {
        let fabric = with(channels(), nodes_per_leaf, rails, f64::from(nodes_per_leaf));
        let job = lowered(&job, fabric);
        let alone = finals(&evaluate(&job, Contention::None, &Overlap::default()).expect("no deadlock"), &job);
        let evaluation = evaluate(&job, rule, &Overlap::default()).expect("no deadlock");
        let used = job.busiest_port().map_or(prism_engine::units::SimTime::ZERO, |(_, used)| used);
        prop_assert!(evaluation.end(&job) >= used, "{:?}: bytes went faster than their port", rule);
        prop_assert!(alone.iter().zip(&finals(&evaluation, &job)).all(|(alone, shared)| alone <= shared));
    }
}
