//! Turns of messages by definition: NCCL's scheduler, round by round, with a queue per peer and a clock per port.

use super::jobs::{compute, exchanging_job, message, profile, small_nodes};
use super::laws::{fastest, times};
use prism_engine::collective::p2p;
use prism_engine::cost::comm::{Link, node_of};
use prism_engine::graph::op::{CollectiveKind, Op};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay_ranks};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

/// Half of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Half {
    pub(crate) is_send: bool,
    pub(crate) peer: u32,
    pub(crate) bytes: u64,
}

/// Members of each node in the order in which nodes are met.
fn nodes(profile: &Profile, members: &[u32]) -> Vec<Vec<u32>> {
    let mut nodes: Vec<(u32, Vec<u32>)> = Vec::new();
    for (member, rank) in (0..).zip(members) {
        let node = node_of(profile, *rank);
        match nodes.iter_mut().find(|(known, _)| *known == node) {
            Some((_, own)) => own.push(member),
            None => nodes.push((node, vec![member])),
        }
    }
    nodes.into_iter().map(|(_, own)| own).collect()
}

/// From the start of the messages of member `me` to the turn of each.
pub(crate) fn leads(profile: &Profile, members: &[u32], me: u32, messages: &[Half]) -> Vec<SimTime> {
    let nodes = nodes(profile, members);
    let order: Vec<u32> = nodes.iter().flatten().copied().collect();
    let sizes: Vec<u32> = nodes.iter().map(|own| own.len() as u32).collect();
    let schedule = p2p::rounds(&sizes);
    let position = |member: u32| order.iter().position(|other| *other == member).expect("a member");
    let mut queues: Vec<VecDeque<usize>> = vec![VecDeque::new(); 2 * members.len()];
    let queue = |half: &Half| 2 * half.peer as usize + usize::from(half.is_send);
    messages.iter().enumerate().for_each(|(at, half)| queues[queue(half)].push_back(at));
    let mut leads = vec![SimTime::ZERO; messages.len()];
    let batch_size = sizes.iter().fold(if sizes.len() > 1 { 8 } else { sizes[0].min(8) }, |a, b| gcd(a, *b));
    let ports = |far: bool, is_send: bool| 2 * usize::from(far) + usize::from(is_send);
    let mut clock = [SimTime::ZERO; 4];
    let mut batches: [Vec<(usize, usize)>; 2] = [Vec::new(), Vec::new()];
    let mut epoch = 0;
    while queues.iter().any(|queue| !queue.is_empty()) {
        for (number, round) in schedule.iter().enumerate() {
            let to = order[round[position(me)]];
            let from = order[round.iter().position(|to| *to == position(me)).expect("a permutation")];
            for (peer, is_send) in [(to, true), (from, false)] {
                let Some(at) = queues[2 * peer as usize + usize::from(is_send)].pop_front() else { continue };
                if peer == me {
                    continue;
                }
                let batches = &mut batches[usize::from(is_send)];
                let batch = (epoch, number / batch_size as usize);
                if batches.last() != Some(&batch) {
                    batches.push(batch);
                }
                let (own, other) = (members[me as usize], members[peer as usize]);
                let far = node_of(profile, own) != node_of(profile, other);
                let clock = &mut clock[ports(far, is_send)];
                leads[at] = *clock;
                if far && profile.network.tuning != prism_engine::collective::tuning::Tuning::Fastest {
                    // Few ranks have two channels per peer, of 32.
                    assert!(members.len() <= 64);
                    let waves = ((batches.len() - 1) * 2 / 32) as i64;
                    leads[at] += SimTime(Link::network(profile, 1).latency.0 * waves);
                }
                *clock += Link::between(profile, own, other).occupancy(messages[at].bytes);
            }
        }
        epoch += 1;
    }
    leads
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Everybody sends `count` numbers to everybody else of `ranks` ranks in one group, after a computation of its own.
fn exchange(ranks: u32, count: u64, ns: &[i64]) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(ranks);
    builder.intern_name("work");
    let world = builder.add_comm((0..ranks).map(Rank).collect());
    let op = |kind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind };
    for rank in 0..ranks {
        let mut ops = vec![op(compute(SimTime::from_ns(ns[rank as usize])))];
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            ops.extend([true, false].map(|is_send| op(message(0, is_send, peer, count, 1))));
        }
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, vec![world]);
    }
    Arc::new(builder.finish().expect("valid"))
}

fn ends(graph: &Arc<Graph>, profile: &Profile) -> Vec<SimTime> {
    let report = replay_ranks(graph, &ReplayOptions::new(profile.clone())).expect("no deadlock");
    report.ranks.iter().map(|rank| rank.final_time).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// With equal links: as fast as ports that serve one message after the other if nobody is late, no slower if somebody is,
    /// and never faster than a port passes its bytes.
    #[test]
    fn an_exchange_is_between_its_bounds(ranks in 2..9u32, count in 1..(1u64 << 22), late in prop::collection::vec(0..2_000_000i64, 9)) {
        let profile = profile();
        let link = Link::nvlink(&profile);
        let (bytes, launch) = (4 * count, SimTime::from_ns(profile.network.collective_launch_ns as i64));
        let (cost, rounds) = (link.occupancy(bytes).0, p2p::rounds(&[ranks]));
        let one_by_one = |arrivals: &[i64]| {
            let ends = p2p::scheduled_all_to_all(&rounds, |_, _| cost, arrivals);
            ends.into_iter().map(|end| SimTime(end) + launch + link.latency).collect::<Vec<_>>()
        };
        prop_assert_eq!(ends(&exchange(ranks, count, &[0; 9]), &profile), one_by_one(&vec![0; ranks as usize]));
        let arrivals: Vec<i64> = late[..ranks as usize].iter().map(|ns| ns * 1000).collect();
        let found = ends(&exchange(ranks, count, &late), &profile);
        for ((end, slow), own) in found.iter().zip(one_by_one(&arrivals)).zip(&arrivals) {
            prop_assert!(*end <= slow);
            prop_assert!(*end >= SimTime(own + cost * i64::from(ranks - 1)) + launch);
        }
    }

    #[test]
    fn nobody_ends_earlier_because_somebody_is_later(job in exchanging_job(), rank in 0..24u32) {
        let rank = Rank(rank % job.world_size());
        for profile in [small_nodes(), fastest(small_nodes())] {
            let replayed = |slow| {
                let options = ReplayOptions { slow, ..ReplayOptions::new(profile.clone()) };
                times(&replay_ranks(&job.graph(), &options).expect("no deadlock"))
            };
            let before = replayed(job.slow.clone());
            let mut slow = job.slow.clone();
            *slow.entry(rank).or_insert(1.0) *= 3.0;
            for (before, after) in before.iter().zip(replayed(slow)) {
                prop_assert!(before.final_time <= after.final_time);
            }
        }
    }
}

/// A group of messages over 128 ranks of 16 nodes takes as long as the collective that NCCL makes of the same messages.
#[test]
fn an_all_to_all_is_its_messages() {
    let profile = profile();
    for ranks in [8u32, 16, 128] {
        let count = 1 << 20;
        let found = ends(&exchange(ranks, count, &vec![0; ranks as usize]), &profile);
        let shape = prism_engine::collective::CommShape::new(&(0..ranks).collect::<Vec<_>>(), &profile);
        let bytes = 4 * count * u64::from(ranks);
        let call = prism_engine::collective::CollectiveCall { kind: CollectiveKind::AllToAll, bytes, root: 0, ops: 1 };
        let whole = prism_engine::collective::uniform_cost(&shape, &call);
        let last = found.into_iter().max().expect("ranks");
        let rounding = SimTime(i64::from(ranks));
        assert!(last <= whole + rounding && whole <= last + rounding, "{ranks}: {last:?} {whole:?}");
    }
}

/// NCCL runs all messages of a group at once: one whose peer waits for another of them does not stop it.
#[test]
fn a_message_does_not_wait_for_the_peer_of_an_earlier_one() {
    let mut builder = GraphBuilder::new(3);
    builder.intern_name("work");
    let world = builder.add_comm((0..3).map(Rank).collect());
    let op = |kind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind };
    // Rank 0 sends to both in one group, to 1 first; 1 takes it only when 2, which has got its own, has told it.
    let programs = [
        vec![op(message(0, true, 1, 1 << 20, 1)), op(message(0, true, 2, 1 << 20, 1))],
        vec![op(message(0, false, 2, 1, 0)), op(message(0, false, 0, 1 << 20, 0))],
        vec![op(message(0, false, 0, 1 << 20, 0)), op(message(0, true, 1, 1, 0))],
    ];
    for (rank, ops) in (0..).zip(programs) {
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, vec![world]);
    }
    let graph = Arc::new(builder.finish().expect("valid"));
    let ends = ends(&graph, &profile());
    assert!(ends[1] > ends[2] && ends[2] > SimTime::ZERO, "{ends:?}");
}
