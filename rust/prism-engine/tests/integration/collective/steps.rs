//! Every fast form against ranks that carry out one instruction after the other.

use super::forms::{arrivals, costs, tree_case, with_tree};
use super::reference::{self, Machines, TreeCase};
use prism_engine::collective::credits::{self, CreditLinks};
use prism_engine::collective::recurrence::{self, Credits, RecurrenceError};
use prism_engine::collective::vectors::{self, Answer, VectorError};
use prism_engine::collective::{chain, dtree, p2p, ring, tree};
use proptest::prelude::*;
use serde_json::{Value, json};

fn ends(model: &str, inputs: &Value) -> Vec<i64> {
    match vectors::completion(model, inputs) {
        Ok(Answer::Ends(ends)) => ends,
        other => panic!("{model}: {other:?}"),
    }
}

#[derive(Debug)]
struct RingCase {
    messages: Vec<i64>,
    occupancy: Vec<Vec<i64>>,
    latency: Vec<i64>,
    slices: i64,
    credits: Option<Credits>,
    arrivals: Vec<i64>,
}

impl RingCase {
    fn phases(&self) -> Vec<ring::Phase<'_>> {
        let phases = self.messages.iter().zip(&self.occupancy);
        phases.map(|(messages, occupancy)| ring::Phase { messages: *messages, occupancy }).collect()
    }

    fn by_recurrence(&self, credits: Option<Credits>, arrivals: &[i64]) -> Result<Vec<i64>, RecurrenceError> {
        let phases = self.phases();
        let ring = ring::Ring { phases: &phases, latency: &self.latency, slices: self.slices };
        recurrence::ring(&ring, credits, arrivals)
    }

    fn closed(&self) -> Vec<i64> {
        let phases = self.phases();
        let ring = ring::Ring { phases: &phases, latency: &self.latency, slices: self.slices };
        let mut out = vec![0; self.arrivals.len()];
        ring::completion(&ring, &self.arrivals, &mut out, &mut ring::RingScratch::default());
        out
    }

    fn by_machines(&self) -> Option<Vec<i64>> {
        let each = self.messages.iter().zip(&self.occupancy);
        let machines = Machines {
            is_ring: true,
            lag: self.slices as usize,
            occupancy: each.flat_map(|(count, costs)| (0..*count).map(move |_| &costs[..])).collect(),
            latency: &self.latency,
            credits: self.credits.map(|credits| (credits.slots as usize, credits.latency)),
        };
        machines.run(&self.arrivals)
    }

    fn json(&self) -> Value {
        json!({
            "n": self.arrivals.len(),
            "messages_per_phase": self.messages,
            "occ_ns_per_phase_per_sender": self.occupancy,
            "slices_per_step": self.slices,
            "credits": self.credits.map(|credits| credits.slots),
            "credit_latency_ns": self.credits.map_or(0, |credits| credits.latency),
            "arrival_ns": self.arrivals,
            "latency_ns_of_incoming_link": self.latency,
        })
    }
}

fn credits() -> impl Strategy<Value = Option<Credits>> {
    prop::option::weighted(0.7, (1i64..9, 0i64..4_000).prop_map(|(slots, latency)| Credits { slots, latency }))
}

fn ring_case(costs: fn(usize) -> BoxedStrategy<Vec<i64>>) -> impl Strategy<Value = RingCase> {
    (2usize..14, 1usize..=3).prop_flat_map(move |(n, phases)| {
        let messages = prop_oneof![0i64..6, 1i64..(6 * n as i64)];
        (
            prop::collection::vec(messages, phases),
            prop::collection::vec(costs(n), phases),
            costs(n),
            1i64..5,
            credits(),
            arrivals(n),
        )
            .prop_map(|(messages, occupancy, latency, slices, credits, arrivals)| RingCase {
                messages,
                occupancy,
                latency,
                slices,
                credits,
                arrivals,
            })
    })
}

fn any_costs(n: usize) -> BoxedStrategy<Vec<i64>> {
    costs(n).boxed()
}

fn alike(n: usize) -> BoxedStrategy<Vec<i64>> {
    (0i64..5_000).prop_map(move |cost| vec![cost; n]).boxed()
}

fn links(occupancy: &[i64], latency: &[i64], chunks: i64, credits: Credits, slices: i64) -> CreditLinks {
    CreditLinks {
        messages: chunks,
        slices,
        occupancy: occupancy[0],
        latency: latency[0],
        slots: credits.slots,
        credit_latency: credits.latency,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rings_of_any_links_and_credits_are_machines(case in ring_case(any_costs)) {
        let slow = case.by_machines();
        prop_assert_eq!(case.by_recurrence(case.credits, &case.arrivals).ok(), slow.clone());
        let answer = vectors::completion("ring_credits", &case.json());
        if let Some(slow) = slow {
            prop_assert_eq!(answer, Ok(Answer::Ends(slow)));
        } else {
            let is_refused = matches!(answer, Err(VectorError::Input { key, .. }) if key == "credits");
            prop_assert!(is_refused);
        }
        prop_assert_eq!(Ok(case.closed()), case.by_recurrence(None, &case.arrivals));
    }

    #[test]
    fn credits_only_delay_and_more_slots_delay_less(case in ring_case(any_costs)) {
        let Ok(held) = case.by_recurrence(case.credits, &case.arrivals) else { return Ok(()) };
        prop_assert!(case.closed().iter().zip(&held).all(|(free, held)| free <= held), "the form without is a lower bound");
        let roomier = case.credits.map(|credits| Credits { slots: credits.slots + 1, ..credits });
        let roomier = case.by_recurrence(roomier, &case.arrivals).expect("more slots than before");
        prop_assert!(roomier.iter().zip(&held).all(|(roomier, held)| roomier <= held));
    }

    /// Whatever the slices, phases and credits, as long as all links are alike.
    #[test]
    fn the_latest_rank_of_equal_links_waits_for_nobody_but_the_latest(case in ring_case(alike)) {
        let n = case.arrivals.len();
        let Ok(together) = case.by_recurrence(case.credits, &vec![0; n]) else { return Ok(()) };
        let skewed = case.by_recurrence(case.credits, &case.arrivals).expect("enough slots");
        let last = case.arrivals.iter().max().expect("at least two ranks");
        prop_assert_eq!(skewed.into_iter().max(), Some(last + together[0]));
    }

    #[test]
    fn closed_forms_with_credits_answer_only_where_they_hold(case in ring_case(alike)) {
        let (Some(credits), [messages, ..]) = (case.credits, &case.messages[..]) else { return Ok(()) };
        let single = RingCase { messages: vec![*messages], occupancy: vec![case.occupancy[0].clone()], ..case };
        let links = links(&single.occupancy[0], &single.latency, *messages, credits, single.slices);
        if let Some(closed) = credits::ring_completion(&links, &single.arrivals) {
            prop_assert_eq!(Some(closed), single.by_machines());
        }
        if let Some(closed) = credits::chain_completion(&links, &single.arrivals) {
            let machines = Machines {
                is_ring: false,
                lag: 0,
                occupancy: vec![&single.occupancy[0]; *messages as usize],
                latency: &single.latency,
                credits: Some((credits.slots as usize, credits.latency)),
            };
            prop_assert_eq!(Some(closed), machines.run(&single.arrivals));
        }
    }

    #[test]
    fn chains_of_any_links_and_credits_are_machines(
        (occupancy, latency, arrivals, chunks, credits) in
            (1usize..14).prop_flat_map(|n| (costs(n), costs(n), arrivals(n), 1i64..30, credits()))
    ) {
        let machines = Machines {
            is_ring: false,
            lag: 0,
            occupancy: vec![&occupancy; chunks as usize],
            latency: &latency,
            credits: credits.map(|credits| (credits.slots as usize, credits.latency)),
        };
        let slow = machines.run(&arrivals).expect("a line does not block itself");
        let chain = chain::Chain { chunks, occupancy: &occupancy, latency: &latency };
        prop_assert_eq!(recurrence::chain(&chain, credits, &arrivals), Ok(slow.clone()));
        let inputs = json!({
            "chunks": chunks,
            "credits": credits.map_or(0, |credits| credits.slots),
            "credit_latency_ns": credits.map_or(0, |credits| credits.latency),
            "occ_ns_of_sender": occupancy,
            "latency_ns_of_incoming_link": latency,
            "arrival_ns": arrivals,
        });
        prop_assert_eq!(ends("chain_broadcast", &inputs), slow.clone());
        let mut free = vec![0; arrivals.len()];
        chain::completion(&chain, &arrivals, &mut free, &mut Vec::new());
        prop_assert!(free.iter().zip(&slow).all(|(free, held)| free <= held), "the form without credits is a lower bound");
    }

    #[test]
    fn trees_whose_way_down_waits_equal_every_chunk((case, arrivals) in tree_case()) {
        let out = with_tree(&case, |tree, out| {
            tree::raise_completion_up_then_down(tree, &arrivals, out, &mut tree::TreeScratch::default());
        });
        prop_assert_eq!(&out, &case.up_then_down(&arrivals));
        prop_assert!(out.iter().zip(case.completion(&arrivals)).all(|(waits, split)| *waits >= split));
    }

    #[test]
    fn trees_by_name_equal_every_chunk((case, arrivals) in tree_case()) {
        let one_way = TreeCase { down: case.up.clone(), ..case };
        let (occupancy, latency): (Vec<i64>, Vec<i64>) = one_way.up.iter().copied().unzip();
        for (mode, slow) in [("split", one_way.completion(&arrivals)), ("up_then_down", one_way.up_then_down(&arrivals))] {
            let inputs = json!({
                "n": arrivals.len(),
                "parent": one_way.parent.iter().map(|up| up.map_or(-1, |up| up as i64)).collect::<Vec<_>>(),
                "chunks": one_way.chunks,
                "mode": mode,
                "occ_ns_edge_to_parent_and_back": occupancy,
                "latency_ns_edge": latency,
                "arrival_ns": arrivals,
            });
            prop_assert_eq!(ends("tree_allreduce", &inputs), slow);
        }
    }

    #[test]
    fn double_trees_equal_every_chunk(
        (occupancy, latency, chunks, arrivals) in
            (1usize..40).prop_flat_map(|n| (0i64..3_000, 0i64..3_000, 1usize..8, arrivals(n)))
    ) {
        let n = arrivals.len();
        let mut slow = arrivals.clone();
        for layout in dtree::double_tree(n) {
            let edges = vec![(occupancy, latency); n];
            let tree = TreeCase { parent: layout.parent, up: edges.clone(), down: edges, chunks };
            slow.iter_mut().zip(tree.completion(&arrivals)).for_each(|(out, end)| *out = (*out).max(end));
        }
        let inputs =
            json!({ "chunks_per_tree": chunks, "occ_ns": occupancy, "latency_ns": latency, "arrival_ns": arrivals });
        prop_assert_eq!(ends("double_tree_allreduce", &inputs), slow);
    }

    #[test]
    fn channels_are_rings_side_by_side(
        (orders, occupancy, latency, arrivals) in (1usize..12).prop_flat_map(|n| {
            let order = Just((0..n).collect::<Vec<_>>()).prop_shuffle();
            (prop::collection::vec(order, 0..4), 0i64..3_000, 0i64..3_000, arrivals(n))
        })
    ) {
        let n = arrivals.len();
        let mut slow = arrivals.clone();
        for order in &orders {
            let along: Vec<_> = order.iter().map(|rank| arrivals[*rank]).collect();
            let ends = one_ring(2, (occupancy, latency), &along);
            order.iter().zip(ends).for_each(|(rank, end)| slow[*rank] = slow[*rank].max(end));
        }
        let inputs =
            json!({ "n": n, "orders": orders, "occ_ns": occupancy, "latency_ns": latency, "arrival_ns": arrivals });
        prop_assert_eq!(ends("ring_multi_channel", &inputs), slow);
    }

    #[test]
    fn hierarchies_are_rings_one_after_the_other(
        (local, nodes, intra, inter, arrivals) in (1usize..6, 1usize..6).prop_flat_map(|(local, nodes)| {
            let link = || (0i64..3_000, 0i64..3_000);
            (Just(local), Just(nodes), link(), link(), arrivals(local * nodes))
        })
    ) {
        let inside = |times: &mut Vec<i64>| {
            for node in 0..nodes {
                let ranks = node * local..(node + 1) * local;
                let ends = one_ring(1, intra, &times[ranks.clone()]);
                times.splice(ranks, ends);
            }
        };
        let mut slow = arrivals.clone();
        inside(&mut slow);
        for index in 0..local {
            let rail: Vec<_> = (0..nodes).map(|node| slow[node * local + index]).collect();
            let ends = one_ring(2, inter, &rail);
            ends.into_iter().enumerate().for_each(|(node, end)| slow[node * local + index] = end);
        }
        inside(&mut slow);
        let link = |(occupancy, latency): (i64, i64)| json!({ "occ_ns": occupancy, "lat_ns": latency });
        let inputs = json!({
            "local": local, "nodes": nodes, "intra": link(intra), "inter": link(inter), "arrival_ns": arrivals
        });
        prop_assert_eq!(ends("hierarchical_allreduce", &inputs), slow);
    }

    #[test]
    fn unequal_all_to_alls_equal_every_round_and_keep_their_bounds(
        (costs, arrivals) in (1usize..12).prop_flat_map(|n| {
            (prop::collection::vec(prop::collection::vec(0i64..9_000, n), n), arrivals(n))
        })
    ) {
        let n = arrivals.len();
        let slow = reference::unequal_all_to_all(&costs, &arrivals);
        prop_assert_eq!(&p2p::unequal_all_to_all(|from, to| costs[from][to], &arrivals), &slow);
        let inputs = json!({ "cost_ns_src_dst": costs, "arrival_ns": arrivals });
        prop_assert_eq!(&ends("alltoallv_port", &inputs), &slow);
        let others = |r: usize| (0..n).filter(move |other| *other != r);
        for r in 0..n {
            let port = others(r).map(|to| costs[r][to]).sum::<i64>().max(others(r).map(|from| costs[from][r]).sum());
            prop_assert!(slow[r] >= arrivals[r] + port, "a port is busy for all its messages");
        }
        let rounds = (1..n).map(|k| (0..n).map(|r| costs[r][(r + k) % n]).max().expect("at least two ranks"));
        let latest = arrivals.iter().max().expect("a rank") + rounds.sum::<i64>();
        prop_assert!(slow.iter().all(|end| *end <= latest), "no round takes longer than its longest message");
    }

    #[test]
    fn synchronous_all_to_alls_equal_every_round(
        (cost, rounds, arrivals) in (1usize..30).prop_flat_map(|n| (0i64..5_000, 0..=n, arrivals(n)))
    ) {
        let inputs = json!({ "n": arrivals.len(), "cost_ns": cost, "rounds": rounds, "arrival_ns": arrivals });
        let slow = reference::synchronous_all_to_all(cost, rounds, &arrivals);
        prop_assert_eq!(ends("alltoall_round_sync", &inputs), slow);
    }
}

/// A ring of equal links over all of `arrivals`, one slice per step, message by message.
fn one_ring(steps_per_hop: usize, (occupancy, latency): (i64, i64), arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let costs = vec![occupancy; n];
    let machines = Machines {
        is_ring: true,
        lag: 1,
        occupancy: vec![&costs; steps_per_hop * (n - 1)],
        latency: &vec![latency; n],
        credits: None,
    };
    if n == 1 { arrivals.to_vec() } else { machines.run(arrivals).expect("no slots to run out of") }
}

#[test]
fn recurrences_are_bounded() {
    let (costs, latency) = (vec![1; 4], vec![1; 4]);
    let ring = |messages, slices, credits: Option<Credits>| {
        let phases = [ring::Phase { messages, occupancy: &costs }];
        recurrence::ring(&ring::Ring { phases: &phases, latency: &latency, slices }, credits, &[0; 4])
    };
    let slots = |slots| Some(Credits { slots, latency: 3 });
    let too_many = |messages| Err(RecurrenceError::TooMany { ranks: 4, messages });
    assert_eq!(ring(1 << 40, 2, slots(4)), too_many((1 << 40) + 2));
    assert_eq!(ring(1 << 27, 2, slots(1 << 26)), too_many((1 << 27) + 2));
    assert_eq!(ring(i64::MAX, i64::MAX, None), too_many(i64::MAX));
    assert_eq!(ring(9, 4, slots(4)), Err(RecurrenceError::TooFewSlots { slots: 4, slices: 4 }));
    assert!(ring(4, 4, slots(4)).is_ok(), "slots for all messages");
    let dear = vec![1 << 59; 4];
    let chain = chain::Chain { chunks: 9, occupancy: &dear, latency: &latency };
    assert_eq!(recurrence::chain(&chain, slots(2), &[0; 4]), Err(RecurrenceError::OutOfRange));
    let chain = chain::Chain { chunks: i64::MAX, ..chain };
    assert!(matches!(recurrence::chain(&chain, slots(2), &[0; 4]), Err(RecurrenceError::TooMany { .. })));
}
