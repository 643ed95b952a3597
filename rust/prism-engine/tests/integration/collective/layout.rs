//! Rings, trees and links of communicators on a cluster.

use prism_engine::collective::{CommShape, dtree};
use prism_engine::cost::comm::{Link, transfer_time};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use proptest::prelude::*;

fn profile() -> Profile {
    Profile::builtin("h100-sxm").expect("built in")
}

#[test]
fn neighbours_of_a_single_node_are_its_ring_and_its_chain() {
    let shape = CommShape::new(&[0, 1, 2, 3, 4, 5, 6, 7], &profile());
    assert_eq!(shape.len(), 8);
    assert_eq!(shape.data_neighbours(0), [1, 7]);
    assert_eq!(shape.data_neighbours(3), [2, 4]);
}

#[test]
fn neighbours_follow_nodes_and_not_the_order_of_group_ranks() {
    // Group ranks 0 and 2 share node 0, group ranks 1 and 3 share node 1: the ring is 0 2 1 3.
    let shape = CommShape::new(&[0, 8, 1, 9], &profile());
    assert_eq!(shape.data_neighbours(0), [1, 2, 3]);
    assert_eq!(shape.data_neighbours(2), [0, 1]);
}

#[test]
fn one_member_has_no_neighbour_and_two_have_each_other() {
    assert!(CommShape::new(&[5], &profile()).data_neighbours(0).is_empty());
    assert_eq!(CommShape::new(&[5, 77], &profile()).data_neighbours(1), [0]);
}

#[test]
fn a_rank_of_a_large_communicator_has_few_neighbours() {
    let members: Vec<_> = (0..1_024).map(|rank| rank * 8).collect();
    let shape = CommShape::new(&members, &profile());
    for rank in 0..1_024 {
        let peers = shape.data_neighbours(rank);
        assert!(peers.len() <= 8, "two on the ring and at most six in the trees: {peers:?}");
        assert!(peers.iter().all(|peer| shape.data_neighbours(*peer).contains(&rank)));
    }
}

#[test]
fn occupancy_is_rounded_up_and_saturates() {
    assert_eq!(transfer_time(1, 3_000_000_000_000), SimTime::from_ps(1));
    assert_eq!(transfer_time(50_000_000_000, 50_000_000_000), SimTime::from_ns(1_000_000_000));
    assert_eq!(transfer_time(0, 1), SimTime::ZERO);
    assert_eq!(transfer_time(u64::MAX, 1), SimTime::MAX);
}

#[test]
fn cards_of_a_node_add_up() {
    let profile = profile();
    let one = Link::network(&profile, 1);
    assert_eq!(Link::network(&profile, 8).bytes_per_s, 8 * one.bytes_per_s);
    assert_eq!(one.shared_by(4).bytes_per_s, one.bytes_per_s / 4);
    assert_eq!(Link::between(&profile, 6, 7), Link::nvlink(&profile));
    assert_eq!(Link::between(&profile, 7, 8), one);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_trees_hold_every_node_once(n in 1usize..600) {
        for tree in dtree::double_tree(n) {
            let mut order = tree.order();
            let position = |node: usize| order.iter().position(|at| *at == node);
            for node in 0..n {
                if let Some(parent) = tree.parent[node] {
                    prop_assert!(tree.children[parent].contains(&Some(node)));
                    prop_assert!(position(parent) < position(node));
                }
            }
            order.sort_unstable();
            prop_assert!(order.into_iter().eq(0..n));
        }
    }

    #[test]
    fn inner_nodes_of_one_tree_are_leaves_of_the_other_when_even(half in 1usize..300) {
        let n = 2 * half;
        let trees = dtree::double_tree(n);
        let inner = |tree: &dtree::NodeTree, node: usize| tree.children[node].iter().any(Option::is_some);
        // Two nodes are a root and a leaf, exchanged between the trees.
        prop_assert!((0..n).all(|node| !(inner(&trees[0], node) && inner(&trees[1], node))));
    }
}
