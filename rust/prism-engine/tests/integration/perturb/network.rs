//! Slow links and unequal shares.

use super::{compute, ends_ns, job, op, profile, run};
use crate::sim::jobs::{call, message};
use prism_engine::collective::{self, CollectiveCall, CommShape};
use prism_engine::cost::comm::Link;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, Op, OpKind};
use prism_engine::units::SimTime;

fn collective_op(kind: CollectiveKind, count: u64) -> Op {
    op(0, call(0, kind, count, 0))
}

/// A ring all-reduce chunk by chunk: `occupancy[k][p]` of message `k` and `latency[p]` of the hop out of position `p`.
fn ring_by_chunks(n: usize, slices: usize, occupancy: &[[i64; 4]], latency: &[i64]) -> Vec<i64> {
    let messages = occupancy.len();
    // left[p][k]: when message k has left position p; it needs message k - slices from the position before.
    let mut left = vec![vec![0i64; messages]; n];
    let mut arrived = vec![vec![0i64; messages]; n];
    for k in 0..messages {
        for p in 0..n {
            let has = if k < slices { 0 } else { arrived[p][k - slices] };
            let free = if k == 0 { 0 } else { left[p][k - 1] };
            left[p][k] = has.max(free) + occupancy[k][p];
            arrived[(p + 1) % n][k] = left[p][k] + latency[p];
        }
    }
    (0..n).map(|p| left[p][messages - 1].max(arrived[p][messages - 1])).collect()
}

/// Ranks 0 to 7 share a node; an all-reduce of 1 GiB takes a ring under Simple.
#[test]
fn a_slow_port_slows_the_ring_as_chunk_by_chunk() {
    let profile = profile();
    let members: Vec<u32> = (0..4).collect();
    let bytes = 1u64 << 30;
    let shape = CommShape::new(&members, &profile);
    let whole = CollectiveCall { kind: CollectiveKind::AllReduce, bytes, root: 0, ops: 1 };
    let choice = collective::choice(&shape, &whole);
    assert_eq!(format!("{choice:?}"), "Choice { algorithm: Ring, protocol: Simple }");
    let link = Link::nvlink(&profile);
    let slow = Link {
        bytes_per_s: (link.bytes_per_s as f64 * 0.25).round() as u64,
        latency: link.latency + SimTime::from_ns(500),
    };
    // 24 channels, all but the last with 2,731 cells of 16 KiB: five loops of 2 MiB chunks, then one of 700,416 bytes; two
    // slices per step, each on a 24th of the link.
    // Rank 2's port is an end of the hops 1 -> 2 and 2 -> 3.
    let hop = [link, slow, slow, link];
    let costs = |chunk: u64| hop.map(|link| link.occupancy(chunk / 2 * 24).as_ps());
    let messages = [vec![costs(2 << 20); 5 * 6 * 2], vec![costs(700_416); 6 * 2]].concat();
    let latency = hop.map(|link| link.latency.as_ps());
    let launch = SimTime::from_ns(profile.network.collective_launch_ns as i64);
    let expected: Vec<i64> =
        ring_by_chunks(4, 2, &messages, &latency).iter().map(|end| (SimTime(*end) + launch).as_ns()).collect();
    let graph = job(4, &[collective_op(CollectiveKind::AllReduce, bytes / 4)]);
    let text = "[[perturb]]\nkind = \"slow-link\"\nranks = [2]\nbandwidth_factor = 0.25\nadded_latency_ns = 500\n";
    assert_eq!(ends_ns(&graph, text), expected);
    let healthy = ends_ns(&graph, "");
    assert!(expected[0] > 3 * healthy[0], "{expected:?} {healthy:?}");
    assert_eq!(ends_ns(&graph, &format!("{text}scope = \"inter\"")), healthy, "nothing leaves the node");
    assert_eq!(ends_ns(&graph, &format!("{text}time_ns = [1, 9]")), healthy, "it starts at 0");
    assert_eq!(ends_ns(&graph, &format!("{text}time_ns = [0, 1]")), expected, "and is slow to its end");
    assert_eq!(ends_ns(&graph, &format!("{text}iterations = [1, 2]")), healthy);
}

#[test]
fn windows_open_and_close_between_collectives() {
    // One all-reduce every 10 ms.
    let mut iteration = [collective_op(CollectiveKind::AllReduce, 1 << 26), op(0, OpKind::IterationEnd)];
    iteration[0].host_gap = SimTime::from_ns(10_000_000);
    let graph = job(4, &[&iteration[..]; 4].concat());
    let text = "[[perturb]]\nkind = \"slow-link\"\nranks = [2]\nbandwidth_factor = 0.25\n";
    let lengths = |text: &str| -> Vec<i64> {
        let report = run(&graph, text).expect("no deadlock");
        let ends = report.ranks[1].iteration_ends.iter().map(|end| end.as_ns());
        ends.zip(1..).map(|(end, number)| end - number * 10_000_000).collect()
    };
    let (healthy, slow) = (lengths("")[0], lengths(text)[0]);
    assert!(slow > 3 * healthy && slow < 10_000_000, "{healthy} {slow}");
    assert_eq!(lengths(&format!("{text}iterations = [1, 3]")), [healthy, slow, slow, healthy]);
    assert_eq!(lengths(&format!("{text}time_ns = [30000000, 30000001]")), [healthy, healthy, slow, healthy]);
    assert_eq!(lengths(&format!("{text}time_ns = [30000001, 40000000]")), [healthy; 4]);
}

#[test]
fn messages_over_slow_cards() {
    let profile = profile();
    // Ranks 0 and 8 are on two nodes; 1 and 9 do the same over other cards.
    let mut builder = prism_engine::graph::GraphBuilder::new(16);
    let ranks = |ranks: [u32; 2]| ranks.map(prism_engine::ids::Rank);
    let empty = builder.add_template("idle", &[]).expect("valid");
    let send = builder.add_template("send", &[op(0, message(0, true, 1, 1 << 20, 0))]).expect("valid");
    let receive = builder.add_template("receive", &[op(0, message(0, false, 0, 1 << 20, 0))]).expect("valid");
    (0..16).for_each(|rank| builder.set_rank(prism_engine::ids::Rank(rank), empty, vec![]));
    for pair in [[0, 8], [1, 9]] {
        let comm = builder.add_comm(ranks(pair).to_vec());
        builder.set_rank(ranks(pair)[0], send, vec![comm]);
        builder.set_rank(ranks(pair)[1], receive, vec![comm]);
    }
    let graph = std::sync::Arc::new(builder.finish().expect("valid"));
    let ends = |text: &str| {
        let ends = ends_ns(&graph, text);
        [(ends[0], ends[8]), (ends[1], ends[9])]
    };
    let over = |factor: f64, more_ns: i64| {
        let link = Link::network(&profile, 1);
        let link = Link { bytes_per_s: (link.bytes_per_s as f64 * factor).round() as u64, latency: link.latency };
        let launch = SimTime::from_ns(profile.network.collective_launch_ns as i64);
        let sent = launch + link.occupancy(4 << 20);
        (sent.as_ns(), (sent + link.latency + SimTime::from_ns(more_ns)).as_ns())
    };
    let healthy = over(1.0, 0);
    assert_eq!(ends(""), [healthy; 2]);
    let slow = "[[perturb]]\nkind = \"slow-link\"\nbandwidth_factor = 0.5\nadded_latency_ns = 40\n";
    assert_eq!(ends(&format!("{slow}ranks = [8]")), [over(0.5, 40), healthy]);
    assert_eq!(ends(&format!("{slow}nodes = [0]\nnics = [1]")), [healthy, over(0.5, 40)]);
    assert_eq!(ends(&format!("{slow}nodes = [1]")), [over(0.5, 40); 2]);
    assert_eq!(ends(&format!("{slow}nodes = [1]\nscope = \"intra\"")), [healthy; 2]);
    assert_eq!(ends(&format!("{slow}ranks = [8]\n{slow}ranks = [0]")), [over(0.25, 80), healthy], "both ends");
}

#[test]
fn the_busiest_port_ends_an_unequal_all_to_all() {
    let profile = profile();
    let each = 8u64 << 20;
    let graph = job(4, &[collective_op(CollectiveKind::AllToAll, each / 4)]);
    let launch = SimTime::from_ns(profile.network.collective_launch_ns as i64);
    let link = Link::nvlink(&profile);
    let expected = |busiest: u64| vec![(launch + link.occupancy(busiest) + link.latency).as_ns(); 4];
    let text = "[[perturb]]\nkind = \"imbalance\"\nranks = [2, 3]\n";
    assert_eq!(ends_ns(&graph, ""), expected(3 * each));
    // Rank 2 receives 2.5 shares from three peers; or sends 1 + 1 + 0.5.
    assert_eq!(ends_ns(&graph, &format!("{text}factors = [2.5, 0.5]")), expected(3 * each * 5 / 2));
    // With factors below 1 the others are busiest with what they send and receive.
    assert_eq!(ends_ns(&graph, &format!("{text}factor = 0.5")), expected(3 * each));
    let all = "[[perturb]]\nkind = \"imbalance\"\nranks = \"all\"\nfactor = 3\n";
    assert_eq!(ends_ns(&graph, all), expected(9 * each));
    assert_eq!(ends_ns(&graph, &format!("{all}iterations = [3, 4]")), expected(3 * each));
    assert_eq!(ends_ns(&job(4, &[collective_op(CollectiveKind::AllGather, 1000)]), all), {
        ends_ns(&job(4, &[collective_op(CollectiveKind::AllGather, 1000)]), "")
    });
}

#[test]
fn shares_across_nodes() {
    // 16 ranks on two nodes: what a node's cards carry counts, not the single rank.
    let profile = profile();
    let each = 1u64 << 20;
    let graph = job(16, &[collective_op(CollectiveKind::AllToAll, each / 4)]);
    let text = "[[perturb]]\nkind = \"imbalance\"\nranks = [3]\nfactor = 5\n";
    let (nvlink, card) = (Link::nvlink(&profile), Link::network(&profile, 1));
    let near = nvlink.occupancy(5 * 7 * each);
    let cards = Link { bytes_per_s: card.bytes_per_s * u64::from(profile.node.nics.min(8)), ..card };
    let far = cards.occupancy((7 + 5) * 8 * each);
    let launch = SimTime::from_ns(profile.network.collective_launch_ns as i64);
    // Inside and outside go on at the same time.
    let end = (near + nvlink.latency).max(far + card.latency);
    assert_eq!(ends_ns(&graph, text), vec![(launch + end).as_ns(); 16]);
}

#[test]
fn exchanges_of_messages_and_expert_compute_are_scaled() {
    let exchange = |me: u32| {
        let halves = (0..3).filter(move |peer| *peer != me);
        let both = halves.flat_map(|peer| [message(0, true, peer, 1 << 22, 1), message(0, false, peer, 1 << 22, 1)]);
        both.map(|kind| op(0, kind)).collect::<Vec<Op>>()
    };
    let build = |expert_us: i64| {
        let mut builder = prism_engine::graph::GraphBuilder::new(3);
        builder.intern_name("work");
        builder.intern_name("expert_gemm");
        let world = builder.add_comm((0..3).map(prism_engine::ids::Rank).collect());
        for rank in 0..3 {
            let mut ops = exchange(rank);
            ops.push(op(0, compute(expert_us, ComputeClass::Gemm, 1)));
            ops.push(op(0, compute(10, ComputeClass::Gemm, 0)));
            let template = builder.add_template("one", &ops).expect("valid");
            builder.set_rank(prism_engine::ids::Rank(rank), template, vec![world]);
        }
        std::sync::Arc::new(builder.finish().expect("valid"))
    };
    let text = "[[perturb]]\nkind = \"imbalance\"\nranks = [1]\nfactor = 2\nnames = [\"expert*\"]\n";
    let (healthy, hot) = (ends_ns(&build(100), ""), ends_ns(&build(100), text));
    let link = Link::nvlink(&profile());
    let more = (link.occupancy(2 << 24) - link.occupancy(1 << 24)).as_ns();
    // Everybody exchanges with rank 1, whose port is busy for twice two messages; only rank 1 computes more. Rank 2 sends its last
    // message to rank 1, and does not wait for it to arrive; before, it received last.
    let arrival = link.latency.as_ns();
    let differences: Vec<i64> = hot.iter().zip(&healthy).map(|(hot, healthy)| hot - healthy).collect();
    assert!(
        differences.iter().zip([0, 100_000, -arrival]).all(|(found, compute)| (found - 2 * more - compute).abs() <= 2),
        "{differences:?} {more}"
    );
    // Two ranks are a pair, not an exchange.
    let pair = "[[perturb]]\nkind = \"imbalance\"\nranks = [1]\nfactor = 2\n";
    let mut builder = prism_engine::graph::GraphBuilder::new(2);
    let world = builder.add_comm((0..2).map(prism_engine::ids::Rank).collect());
    for rank in 0..2 {
        let ops = [op(0, message(0, true, 1 - rank, 1 << 22, 1)), op(0, message(0, false, 1 - rank, 1 << 22, 1))];
        let template = builder.add_template("one", &ops).expect("valid");
        builder.set_rank(prism_engine::ids::Rank(rank), template, vec![world]);
    }
    let graph = std::sync::Arc::new(builder.finish().expect("valid"));
    assert_eq!(ends_ns(&graph, pair), ends_ns(&graph, ""));
}
