//! What every collective obeys on every cluster, and its equality with a message-by-message evaluation over the links
//! that the documentation promises.

use super::forms::arrivals;
use super::reference::{self, TreeCase};
use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter};
use prism_engine::collective::tuning::{NcclSettings, Tuning};
use prism_engine::collective::{
    Algorithm, Choice, CollectiveCall, CollectiveKind, CommShape, Protocol, Scratch, ShapePool, choice, completion,
    message, uniform_cost,
};
use prism_engine::cost::comm::{Link, node_of};
use prism_engine::profile::{LowLatency, Network, Profile};
use prism_engine::units::SimTime;
use proptest::prelude::*;

const KINDS: [CollectiveKind; 8] = [AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll, Gather, Scatter];

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) members: Vec<u32>,
    pub(crate) call: CollectiveCall,
    pub(crate) arrivals: Vec<i64>,
}

/// Communicators of up to 20 members strewn over nodes of eight, buffers from one byte to a gigabyte.
pub(crate) fn case() -> impl Strategy<Value = Case> {
    let contiguous = (1usize..20, 0u32..16).prop_map(|(n, first)| (first..first + n as u32).collect::<Vec<_>>());
    let strided = (1usize..20, 1u32..12).prop_map(|(n, stride)| (0..n as u32).map(|rank| rank * stride).collect());
    let strewn = prop::collection::btree_set(0u32..64, 1..20)
        .prop_flat_map(|members| Just(members.into_iter().collect::<Vec<_>>()).prop_shuffle());
    let bytes = prop_oneof![1u64..100, 1u64..1_000_000, 1u64..(1 << 30)];
    (prop_oneof![contiguous, strided, strewn], prop::sample::select(&KINDS[..]), bytes)
        .prop_flat_map(|(members, kind, bytes)| {
            let n = members.len();
            let times = prop_oneof![arrivals(n), (0i64..1_000_000).prop_map(move |at| vec![at; n])];
            (Just(members), Just(kind), Just(bytes), 0..n as u32, times)
        })
        .prop_map(|(members, kind, bytes, root, arrivals)| Case {
            members,
            call: CollectiveCall { kind, bytes, root, ops: 1 },
            arrivals,
        })
}

/// Small tree and chain chunks, so that several chunks and loops occur without huge references.
fn profile() -> Profile {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    profile.network.ring_step_bytes = 10_000_000;
    profile.network.tree_chunk_bytes = 20_000_000;
    profile.network.chain_chunk_bytes = 30_000_000;
    profile.network.tuning = Tuning::Fastest;
    profile
}

/// On NCCL's channels, with small buffers for the same reason.
fn tuned_profile() -> Profile {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    let buffers = [("NCCL_BUFFSIZE", "1048576"), ("NCCL_LL128_BUFFSIZE", "614400")];
    profile.network.nccl = NcclSettings::parse(buffers).expect("numbers");
    profile
}

pub(crate) fn ends(shape: &CommShape, call: &CollectiveCall, arrivals: &[i64], scratch: &mut Scratch) -> Vec<i64> {
    let arrivals: Vec<_> = arrivals.iter().map(|ps| SimTime::from_ps(*ps)).collect();
    let mut out = vec![SimTime::ZERO; arrivals.len()];
    completion(shape, call, &arrivals, &mut out, scratch);
    out.into_iter().map(SimTime::as_ps).collect()
}

/// Group ranks node by node, nodes by first member.
pub(crate) fn nodes(members: &[u32], profile: &Profile) -> Vec<Vec<usize>> {
    let mut nodes: Vec<(u32, Vec<usize>)> = Vec::new();
    for (rank, &global) in members.iter().enumerate() {
        let node = node_of(profile, global);
        match nodes.iter_mut().find(|known| known.0 == node) {
            Some(known) => known.1.push(rank),
            None => nodes.push((node, vec![rank])),
        }
    }
    nodes.into_iter().map(|(_, ranks)| ranks).collect()
}

pub(crate) fn cost(link: Link, bytes: u64) -> (i64, i64) {
    (link.occupancy(bytes).as_ps(), link.latency.as_ps())
}

/// What a protocol makes of the profile.
struct Rules {
    profile: Profile,
    launch: i64,
    slices: u64,
    ring_step: u64,
    tree_chunk: u64,
    chain_chunk: u64,
    low_latency: Option<LowLatency>,
}

impl Rules {
    fn new(profile: &Profile, protocol: Protocol) -> Self {
        let network = &profile.network;
        let low_latency = match protocol {
            Protocol::Simple => None,
            Protocol::Ll => Some(network.ll.expect("chosen, so it is there")),
            Protocol::Ll128 => Some(network.ll128.expect("chosen, so it is there")),
        };
        let profile = profile.clone();
        match low_latency {
            None => Self {
                launch: network.collective_launch_ns as i64 * 1_000,
                slices: u64::from(network.ring_slices_per_step),
                ring_step: network.ring_step_bytes,
                tree_chunk: network.tree_chunk_bytes,
                chain_chunk: network.chain_chunk_bytes,
                low_latency,
                profile,
            },
            Some(costs) => Self {
                launch: costs.launch_ns as i64 * 1_000,
                slices: 1,
                ring_step: costs.chunk_bytes,
                tree_chunk: costs.chunk_bytes,
                chain_chunk: costs.chunk_bytes,
                low_latency,
                profile,
            },
        }
    }

    /// The hop between GPUs of one node (`cards` 0) or between nodes over some cards.
    fn link(&self, cards: usize, is_tree: bool) -> Link {
        let base = if cards == 0 { Link::nvlink(&self.profile) } else { Link::network(&self.profile, cards as u32) };
        let Some(costs) = self.low_latency else { return base };
        let (limit, latency) = match (cards == 0, is_tree) {
            (true, false) => (costs.nvlink_limit_bytes_per_s, costs.ring_nvlink_latency_ns),
            (true, true) => (costs.nvlink_limit_bytes_per_s, costs.tree_nvlink_latency_ns),
            (false, false) => (costs.network_limit_bytes_per_s, costs.ring_latency_ns),
            (false, true) => (costs.network_limit_bytes_per_s, costs.tree_latency_ns),
        };
        let bytes_per_s = ((base.bytes_per_s as f64 * costs.bandwidth_share).round() as u64).min(limit);
        Link { bytes_per_s, latency: SimTime::from_ns(latency as i64) }
    }

    /// Cards between two nodes with members `a` and `b`.
    fn cards(&self, a: &[usize], b: &[usize]) -> usize {
        a.len().min(b.len()).min(self.profile.node.nics as usize)
    }

    /// The link from each ring position to the next.
    fn ring_links(&self, nodes: &[Vec<usize>]) -> Vec<Link> {
        let mut links = Vec::new();
        for (at, node) in nodes.iter().enumerate() {
            links.extend((1..node.len()).map(|_| self.link(0, false)));
            let cards = if nodes.len() == 1 { 0 } else { self.cards(node, &nodes[(at + 1) % nodes.len()]) };
            links.push(self.link(cards, false));
        }
        links
    }
}

/// Message-by-message ends.
fn slow_ends(case: &Case, profile: &Profile) -> Vec<i64> {
    let nodes = nodes(&case.members, profile);
    let shape = CommShape::new(&case.members, profile);
    let Choice { algorithm, protocol } = choice(&shape, &case.call);
    let rules = Rules::new(profile, protocol);
    let ends = match algorithm {
        _ if case.members.len() == 1 => case.arrivals.clone(),
        Algorithm::Ring => slow_ring(case, &nodes, &rules),
        Algorithm::Tree => slow_trees(case, &nodes, &rules),
        Algorithm::Chain => slow_chain(case, &nodes, &rules),
        Algorithm::Direct => slow_direct(case, &nodes, profile),
        Algorithm::Nvls | Algorithm::NvlsTree | Algorithm::Pat => unreachable!("only NCCL's tuning takes them"),
    };
    ends.into_iter().map(|end| end + rules.launch).collect()
}

fn slow_ring(case: &Case, nodes: &[Vec<usize>], rules: &Rules) -> Vec<i64> {
    let n = case.members.len() as u64;
    let order: Vec<_> = nodes.concat();
    let steps = if case.call.kind == AllReduce { 2 * (n - 1) } else { n - 1 };
    let part = case.call.bytes.div_ceil(n);
    let loops = part.div_ceil(rules.ring_step);
    let slices = rules.slices;
    let bytes = part.div_ceil(loops * slices);
    let (occupancy, out_latency): (Vec<_>, Vec<_>) =
        rules.ring_links(nodes).into_iter().map(|link| cost(link, bytes)).unzip();
    let mut latency = out_latency;
    latency.rotate_right(1);
    let arrivals: Vec<_> = order.iter().map(|rank| case.arrivals[*rank]).collect();
    let messages = (loops * steps * slices) as i64;
    let by_position = reference::ring(&[messages], &[occupancy], &latency, slices as usize, &arrivals);
    by_rank(&order, &by_position)
}

pub(crate) fn by_rank(order: &[usize], by_position: &[i64]) -> Vec<i64> {
    let mut out = vec![0; order.len()];
    order.iter().zip(by_position).for_each(|(rank, end)| out[*rank] = *end);
    out
}

fn slow_chain(case: &Case, nodes: &[Vec<usize>], rules: &Rules) -> Vec<i64> {
    let (mut order, mut hops) = (nodes.concat(), rules.ring_links(nodes));
    let root = order.iter().position(|rank| *rank == case.call.root as usize).expect("the root is a member");
    let first = if case.call.kind == Reduce { (root + 1) % order.len() } else { root };
    order.rotate_left(first);
    hops.rotate_left(first);
    let chunks = case.call.bytes.div_ceil(rules.chain_chunk);
    let bytes = case.call.bytes.div_ceil(chunks);
    let (occupancy, mut latency): (Vec<_>, Vec<_>) = hops.into_iter().map(|link| cost(link, bytes)).unzip();
    latency.rotate_right(1);
    let arrivals: Vec<_> = order.iter().map(|rank| case.arrivals[*rank]).collect();
    by_rank(&order, &reference::chain(chunks as usize, &occupancy, &latency, &arrivals))
}

fn slow_trees(case: &Case, nodes: &[Vec<usize>], rules: &Rules) -> Vec<i64> {
    let trees = prism_engine::collective::dtree::double_tree(nodes.len());
    let degree = |node: usize| -> usize {
        let edges = |tree: &prism_engine::collective::dtree::NodeTree| {
            usize::from(tree.parent[node].is_some()) + tree.children[node].iter().flatten().count()
        };
        trees.iter().map(edges).sum()
    };
    let streams = (0..nodes.len()).map(degree).max().expect("at least one node") as u32;
    let longest = nodes.iter().map(Vec::len).max().expect("at least one node");
    let half = case.call.bytes.div_ceil(2);
    let chunks = half.div_ceil(rules.tree_chunk);
    let bytes = half.div_ceil(chunks);
    let mut out = case.arrivals.clone();
    for tree in &trees {
        let n = case.members.len();
        let mut parent = vec![None; n];
        let mut edge = vec![(0, 0); n];
        for (at, node) in nodes.iter().enumerate() {
            for (lower, upper) in node[1..].iter().zip(node) {
                parent[*lower] = Some(*upper);
                edge[*lower] = cost(rules.link(0, true).shared_by(if longest > 2 { 4 } else { 2 }), bytes);
            }
            if let Some(up) = tree.parent[at] {
                let cards = rules.cards(node, &nodes[up]);
                parent[node[0]] = Some(nodes[up][0]);
                edge[node[0]] = cost(rules.link(cards, true).shared_by(streams), bytes);
            }
        }
        let slow = TreeCase { parent, up: edge.clone(), down: edge, chunks: chunks as usize };
        out.iter_mut().zip(slow.completion(&case.arrivals)).for_each(|(out, end)| *out = (*out).max(end));
    }
    out
}

fn slow_direct(case: &Case, nodes: &[Vec<usize>], profile: &Profile) -> Vec<i64> {
    let n = case.members.len();
    let each = case.call.bytes.div_ceil(n as u64);
    let root = case.call.root as usize;
    let between = |a: usize, b: usize| Link::between(profile, case.members[a], case.members[b]);
    let mut out = case.arrivals.clone();
    if case.call.kind == AllToAll {
        let last = case.arrivals.iter().max().expect("at least one member");
        let busiest = nodes.iter().map(|node| {
            let (near, near_latency) = cost(Link::nvlink(profile), each * (node.len() as u64 - 1));
            let far_bytes = each * (n - node.len()) as u64 * node.len() as u64;
            let cards = node.len().min(profile.node.nics as usize) as u32;
            let (far, far_latency) = cost(Link::network(profile, cards), far_bytes);
            near + if nodes.len() > 1 { far + far_latency } else { near_latency }
        });
        return vec![last + busiest.max().expect("at least one node"); n];
    }
    for distance in 1..n {
        let peer = (root + distance) % n;
        let (occupancy, latency) = cost(between(root, peer), each);
        // `out[root]` plays the root's port, and the last landing is added below.
        let sent = out[root].max(case.arrivals[peer]) + occupancy;
        out[root] = sent;
        out[peer] = if case.call.kind == Scatter { sent + latency } else { sent };
    }
    if case.call.kind == Gather {
        let landed = (0..n).filter(|peer| *peer != root).map(|peer| out[peer] + cost(between(peer, root), each).1);
        out[root] = landed.max().expect("at least two members");
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn completion_equals_every_message_on_the_cluster(case in case()) {
        let profile = profile();
        let shape = CommShape::new(&case.members, &profile);
        let slow = slow_ends(&case, &profile);
        let mut scratch = Scratch::default();
        prop_assert_eq!(&ends(&shape, &case.call, &case.arrivals, &mut scratch), &slow);
        // Again, from a scratch with a history.
        prop_assert_eq!(&ends(&shape, &case.call, &case.arrivals, &mut scratch), &slow);
    }

    #[test]
    fn laws_hold(case in case(), is_tuned in any::<bool>(), shift in 0i64..50_000_000, late in any::<prop::sample::Index>(), delay in 1i64..90_000_000) {
        let profile = if is_tuned { tuned_profile() } else { profile() };
        let shape = CommShape::new(&case.members, &profile);
        let mut scratch = Scratch::default();
        let base = ends(&shape, &case.call, &case.arrivals, &mut scratch);
        prop_assert!(base.iter().zip(&case.arrivals).all(|(end, arrival)| end >= arrival), "nobody ends before it arrives");
        let shifted: Vec<_> = case.arrivals.iter().map(|arrival| arrival + shift).collect();
        let moved: Vec<_> = base.iter().map(|end| end + shift).collect();
        prop_assert_eq!(ends(&shape, &case.call, &shifted, &mut scratch), moved);
        let mut later = case.arrivals.clone();
        later[late.index(case.members.len())] += delay;
        let delayed = ends(&shape, &case.call, &later, &mut scratch);
        prop_assert!(delayed.iter().zip(&base).all(|(after, before)| after >= before), "monotone");
        prop_assert!(delayed.iter().zip(&base).all(|(after, before)| after - before <= delay), "nonexpansive");
    }

    #[test]
    fn uniform_cost_is_the_last_end_of_a_common_arrival(case in case(), is_tuned in any::<bool>(), at in 0i64..1_000_000_000) {
        let profile = if is_tuned { tuned_profile() } else { profile() };
        let shape = CommShape::new(&case.members, &profile);
        let together = vec![at; case.members.len()];
        let last = ends(&shape, &case.call, &together, &mut Scratch::default()).into_iter().max();
        prop_assert_eq!(last, Some(at + uniform_cost(&shape, &case.call).as_ps()));
    }

    #[test]
    fn messages_start_with_the_later_half(
        from in 0u32..32, to in 0u32..32, bytes in 0u64..(1 << 32), send in 0i64..1_000_000_000, recv in 0i64..1_000_000_000
    ) {
        prop_assume!(from != to);
        let profile = profile();
        let (sent, received) = message(&profile, from, to, bytes, SimTime::from_ps(send), SimTime::from_ps(recv));
        let (occupancy, latency) = cost(Link::between(&profile, from, to), bytes);
        let start = send.max(recv) + profile.network.collective_launch_ns as i64 * 1_000;
        prop_assert_eq!((sent.as_ps(), received.as_ps()), (start + occupancy, start + occupancy + latency));
    }
}

#[test]
fn nothing_to_do_takes_no_time_and_holds_nobody() {
    let shape = CommShape::new(&[0, 1, 2], &profile());
    for kind in KINDS {
        let call = CollectiveCall { kind, bytes: 0, root: 0, ops: 1 };
        assert_eq!(ends(&shape, &call, &[5, 900, 7], &mut Scratch::default()), [5, 900, 7]);
        assert_eq!(uniform_cost(&shape, &call), SimTime::ZERO);
    }
}

#[test]
fn absurd_sizes_and_times_saturate() {
    let mut slow = profile();
    slow.network.nic_bytes_per_s = 1;
    slow.network.latency_ns = u64::MAX;
    let members = [0, 1, 8, 9, 17];
    let slow_tuned =
        Profile { network: Network { tuning: tuned_profile().network.tuning, ..slow.network.clone() }, ..slow.clone() };
    for profile in [profile(), tuned_profile(), slow, slow_tuned] {
        let shape = CommShape::new(&members, &profile);
        for kind in KINDS {
            let call = CollectiveCall { kind, bytes: u64::MAX, root: 3, ops: 1 };
            for times in [[0; 5], [0, i64::MAX, 0, 3, 4], [i64::MIN, 0, 1, 2, 3], [i64::MAX; 5], [i64::MIN; 5]] {
                let ends = ends(&shape, &call, &times, &mut Scratch::default());
                assert!(ends.iter().zip(times).all(|(end, arrival)| *end >= arrival), "{kind:?} {ends:?}");
                if profile.network.latency_ns == u64::MAX && !matches!(kind, Broadcast | Gather | Scatter | Reduce) {
                    assert_eq!(ends, [i64::MAX; 5], "{kind:?}");
                }
            }
        }
    }
}

#[test]
fn large_buffers_take_the_ring_and_small_ones_the_trees_across_many_nodes() {
    let members: Vec<_> = (0..512).collect();
    let shape = CommShape::new(&members, &Profile::builtin("h100-sxm").expect("built in"));
    let call = |bytes| CollectiveCall { kind: AllReduce, bytes, root: 0, ops: 1 };
    let way = |algorithm, protocol| Choice { algorithm, protocol };
    assert_eq!(choice(&shape, &call(1 << 10)), way(Algorithm::Tree, Protocol::Ll));
    assert_eq!(choice(&shape, &call(1 << 36)), way(Algorithm::Ring, Protocol::Simple));
}

#[test]
fn communicators_spread_alike_share_a_shape() {
    let mut pool = ShapePool::new(profile());
    let first = pool.shape(&[0, 1, 8, 9]);
    assert!(std::sync::Arc::ptr_eq(&first, &pool.shape(&[18, 23, 0, 1])));
    assert!(!std::sync::Arc::ptr_eq(&first, &pool.shape(&[0, 8, 1, 9])));
}
