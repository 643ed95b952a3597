//! A call on NCCL's channels equals the evaluation of every message of every channel, one by one.

use super::laws::{Case, by_rank, case, cost, ends, nodes};
use super::reference::{self, TreeCase};
use CollectiveKind::{AllGather, AllReduce, Reduce, ReduceScatter};
use prism_engine::collective::tuning::{Chosen, NcclSettings};
use prism_engine::collective::{Algorithm, CollectiveKind, CommShape, Protocol, Scratch, dtree};
use prism_engine::cost::comm::Link;
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use proptest::prelude::*;

/// Settings under which several loops and chunks occur without huge references.
fn profile(pairs: &[(&str, &str)]) -> Profile {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    let buffers = [("NCCL_BUFFSIZE", "1048576"), ("NCCL_LL128_BUFFSIZE", "614400"), ("NCCL_LL_BUFFSIZE", "131072")];
    // What has a formula instead of messages is left out.
    profile.node.nvls = false;
    let buffers = buffers.into_iter().chain([("NCCL_PAT_ENABLE", "0")]).collect::<Vec<_>>();
    profile.network.nccl = NcclSettings::parse(buffers.iter().chain(pairs).copied()).expect("understood");
    profile
}

/// A call as the channels see it.
struct Slow<'a> {
    case: &'a Case,
    profile: &'a Profile,
    nodes: Vec<Vec<usize>>,
    chosen: Chosen,
    /// Channels the communicator would have by itself, and those it has.
    own: u64,
    all: u64,
}

impl Slow<'_> {
    fn n(&self) -> u64 {
        self.case.members.len() as u64
    }

    /// Each channel's part of every link is one of so many.
    fn lanes(&self) -> u64 {
        self.own.max(self.all)
    }

    /// Bytes of the full buffer that each channel in use moves for each of its ops, in order of channels.
    fn parts(&self) -> Vec<Vec<u64>> {
        let (call, n) = (&self.case.call, self.n());
        let ops = u64::from(call.ops);
        let of_op = call.bytes.div_ceil(ops);
        if ops >= self.all {
            let ops_of = |channel| (0..ops).filter(|op| op % self.all == channel).count();
            return (0..self.all).map(|channel| vec![of_op; ops_of(channel)]).collect();
        }
        let blocks = if matches!(call.kind, AllGather | ReduceScatter) { n } else { 1 };
        let traffic = match call.kind {
            AllReduce => 2,
            AllGather | ReduceScatter => n,
            _ => 1,
        } * if self.chosen.protocol == Protocol::Ll { 4 } else { 1 };
        let (mut left, mut parts) = (of_op.div_ceil(blocks), Vec::new());
        let channels = u64::from(self.chosen.channels).min(self.all / ops).max(1);
        let target = (32 * 1024).max(left * traffic).div_ceil(channels).div_ceil(16) * 16;
        let cell = (32 * 1024u64).div_ceil(traffic).div_ceil(16) * 16;
        while left > 0 {
            let mut part = 0;
            while part * traffic < target && left > 0 {
                let taken = cell.min(left);
                (part, left) = (part + taken, left - taken);
            }
            parts.push(part * blocks);
        }
        (0..ops).flat_map(|_| &parts).map(|part| vec![*part]).collect()
    }

    fn chunk(&self) -> u64 {
        match (self.chosen.protocol, self.chosen.algorithm) {
            (Protocol::Simple, Algorithm::Ring) if !self.is_chain() => 524_288,
            (Protocol::Simple, _) => 131_072,
            (Protocol::Ll, _) => 8_192,
            // 76,800 x 15 / 16 is no multiple of the grain of 1,920 bytes.
            (Protocol::Ll128, Algorithm::Ring) => 71_040,
            (Protocol::Ll128, _) => unreachable!("trees under LL128 shrink their chunks: {:?}", self.chosen),
        }
    }

    fn is_chain(&self) -> bool {
        !matches!(self.case.call.kind, AllReduce | AllGather | ReduceScatter)
    }

    fn link(&self, cards: usize, is_tree: bool) -> Link {
        let base = if cards == 0 { Link::nvlink(self.profile) } else { Link::network(self.profile, cards as u32) };
        let network = &self.profile.network;
        let costs = match self.chosen.protocol {
            Protocol::Simple => return base,
            Protocol::Ll => network.ll.expect("chosen"),
            Protocol::Ll128 => network.ll128.expect("chosen"),
        };
        let (limit, latency) = match (cards == 0, is_tree) {
            (true, false) => (costs.nvlink_limit_bytes_per_s, costs.ring_nvlink_latency_ns),
            (true, true) => (costs.nvlink_limit_bytes_per_s, costs.tree_nvlink_latency_ns),
            (false, false) => (costs.network_limit_bytes_per_s, costs.ring_latency_ns),
            (false, true) => (costs.network_limit_bytes_per_s, costs.tree_latency_ns),
        };
        let bytes_per_s = ((base.bytes_per_s as f64 * costs.bandwidth_share).round() as u64).min(limit);
        Link { bytes_per_s, latency: SimTime::from_ns(latency as i64) }
    }

    /// Links out of every ring position.
    fn hops(&self) -> Vec<Link> {
        let nodes = &self.nodes;
        let out = |at: usize| {
            let cards = nodes[at].len().min(nodes[(at + 1) % nodes.len()].len()).min(8);
            self.link(if nodes.len() == 1 { 0 } else { cards }, false)
        };
        let inside = |at: usize| (1..nodes[at].len()).map(|_| self.link(0, false));
        (0..nodes.len()).flat_map(|at| inside(at).chain([out(at)])).collect()
    }

    fn ends(&self) -> Vec<i64> {
        let parts = self.parts();
        let mut out = self.case.arrivals.clone();
        for (channel, part) in parts.iter().enumerate() {
            let ends = match self.chosen.algorithm {
                _ if self.is_chain() => self.chain(part),
                Algorithm::Ring => self.ring(part),
                _ => self.tree(channel as u64, part),
            };
            out.iter_mut().zip(ends).for_each(|(out, end)| *out = end.max(*out));
        }
        let network = &self.profile.network;
        let launch = match self.chosen.protocol {
            Protocol::Simple => network.collective_launch_ns,
            Protocol::Ll => network.ll.expect("chosen").launch_ns,
            Protocol::Ll128 => network.ll128.expect("chosen").launch_ns,
        };
        out.into_iter().map(|end| end + launch as i64 * 1_000).collect()
    }

    fn ring(&self, parts: &[u64]) -> Vec<i64> {
        let n = self.n();
        let slices = if self.chosen.protocol == Protocol::Simple { 2 } else { 1 };
        let steps = if self.case.call.kind == AllReduce { 2 * (n - 1) } else { n - 1 };
        let mut chunks = Vec::new();
        for part in parts {
            let mut left = *part;
            while left > 0 {
                let chunk = if left < n * self.chunk() { left.div_ceil(n).div_ceil(16) * 16 } else { self.chunk() };
                chunks.push(chunk.min(self.chunk()));
                left = left.saturating_sub(n * self.chunk());
            }
        }
        // Of several ops, all full loops come first.
        chunks.sort_by_key(|chunk| std::cmp::Reverse(*chunk));
        let hops = self.hops();
        let bytes = |chunk: u64| chunk.div_ceil(slices) * self.lanes();
        let occupancy: Vec<Vec<i64>> =
            chunks.iter().map(|chunk| hops.iter().map(|link| cost(*link, bytes(*chunk)).0).collect()).collect();
        let mut latency: Vec<i64> = hops.iter().map(|link| cost(*link, 0).1).collect();
        latency.rotate_right(1);
        let order = self.nodes.concat();
        let arrivals: Vec<_> = order.iter().map(|rank| self.case.arrivals[*rank]).collect();
        let messages = vec![(steps * slices) as i64; chunks.len()];
        by_rank(&order, &reference::ring(&messages, &occupancy, &latency, slices as usize, &arrivals))
    }

    /// Equal chunks of each op: their number and the bytes of one.
    fn even(&self, parts: &[u64]) -> (usize, u64) {
        // Under LL and LL128 a quarter of a chunk is passed on as soon as it is there, but no less than a warp's lines.
        let quarter = self.chunk().min(parts[0]).div_ceil(4);
        let piece = match self.chosen.protocol {
            Protocol::Simple => self.chunk(),
            Protocol::Ll => quarter.max(256),
            Protocol::Ll128 => quarter.max(1_920),
        };
        let chunks = parts[0].div_ceil(piece);
        (chunks as usize * parts.len(), parts[0].div_ceil(chunks))
    }

    fn chain(&self, parts: &[u64]) -> Vec<i64> {
        let (mut order, mut hops) = (self.nodes.concat(), self.hops());
        let call = &self.case.call;
        let root = order.iter().position(|rank| *rank == call.root as usize).expect("the root is a member");
        let first = if call.kind == Reduce { (root + 1) % order.len() } else { root };
        order.rotate_left(first);
        hops.rotate_left(first);
        let (chunks, bytes) = self.even(parts);
        let (occupancy, mut latency): (Vec<_>, Vec<_>) =
            hops.into_iter().map(|link| cost(link, bytes * self.lanes())).unzip();
        latency.rotate_right(1);
        let arrivals: Vec<_> = order.iter().map(|rank| self.case.arrivals[*rank]).collect();
        by_rank(&order, &reference::chain(chunks, &occupancy, &latency, &arrivals))
    }

    /// Each half of the communicator's own channels has one of the two trees; further channels repeat them.
    fn tree(&self, channel: u64, parts: &[u64]) -> Vec<i64> {
        let tree = &dtree::double_tree(self.nodes.len())[(channel / (self.own / 2) % 2) as usize];
        let trees = dtree::double_tree(self.nodes.len());
        let edges = |node: usize| -> usize {
            let of = |tree: &dtree::NodeTree| {
                usize::from(tree.parent[node].is_some()) + tree.children[node].iter().flatten().count()
            };
            trees.iter().map(of).sum()
        };
        let streams = (0..self.nodes.len()).map(edges).max().expect("a node") as u32;
        let longest = self.nodes.iter().map(Vec::len).max().expect("a node");
        let (chunks, bytes) = self.even(parts);
        let bytes = bytes * self.lanes().div_ceil(2);
        let n = self.case.members.len();
        let (mut parent, mut edge) = (vec![None; n], vec![(0, 0); n]);
        for (at, node) in self.nodes.iter().enumerate() {
            for (lower, upper) in node[1..].iter().zip(node) {
                parent[*lower] = Some(*upper);
                edge[*lower] = cost(self.link(0, true).shared_by(if longest > 2 { 4 } else { 2 }), bytes);
            }
            if let Some(up) = tree.parent[at] {
                let cards = node.len().min(self.nodes[up].len()).min(8);
                parent[node[0]] = Some(self.nodes[up][0]);
                edge[node[0]] = cost(self.link(cards, true).shared_by(streams), bytes);
            }
        }
        TreeCase { parent, up: edge.clone(), down: edge, chunks }.completion(&self.case.arrivals)
    }
}

/// Channels that a communicator on H100 has by itself.
fn own_channels(nodes: &[Vec<usize>]) -> u64 {
    let cards = nodes.iter().map(Vec::len).min().expect("a node").min(8) as u64;
    match cards {
        _ if nodes.len() == 1 => 24,
        8 => 16,
        _ => 4 * cards,
    }
}

fn check(case: &Case, profile: &Profile, min_max: (u64, u64)) -> Result<bool, TestCaseError> {
    let shape = CommShape::new(&case.members, profile);
    let Some(Ok(chosen)) = shape.chosen(&case.call) else { return Ok(false) };
    if case.members.len() < 2 || (chosen.protocol, chosen.algorithm) == (Protocol::Ll128, Algorithm::Tree) {
        return Ok(false);
    }
    let nodes = nodes(&case.members, profile);
    let own = own_channels(&nodes);
    let all = own.min(min_max.1).max(min_max.0);
    let slow = Slow { case, profile, nodes, chosen, own, all };
    let mut scratch = Scratch::default();
    let expected = slow.ends();
    prop_assert_eq!(&ends(&shape, &case.call, &case.arrivals, &mut scratch), &expected, "{:?}", chosen);
    prop_assert_eq!(&ends(&shape, &case.call, &case.arrivals, &mut scratch), &expected);
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_channel_message_by_message(
        mut case in case(), setting in 0usize..6, ops in prop_oneof![4 => Just(1u32), 1 => 2u32..60]
    ) {
        case.call.bytes = case.call.bytes.min(400_000_000);
        case.call.ops = ops;
        let (pairs, min_max): (&[(&str, &str)], _) = match setting {
            0 | 1 => (&[], (0, 64)),
            2 => (&[("NCCL_ALGO", "Ring")], (0, 64)),
            3 => (&[("NCCL_ALGO", "allreduce:tree"), ("NCCL_PROTO", "^LL128")], (0, 64)),
            4 => (&[("NCCL_MAX_NCHANNELS", "3"), ("NCCL_PROTO", "Simple")], (0, 3)),
            _ => (&[("NCCL_MIN_NCHANNELS", "32"), ("NCCL_PROTO", "LL")], (32, 64)),
        };
        check(&case, &profile(pairs), min_max)?;
    }
}

/// What LL128 trees do, which the reference above leaves out: their chunks halve until there are enough of them.
#[test]
fn chunks_of_ll128_trees_shrink() {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    let pairs = [("NCCL_ALGO", "allreduce:tree"), ("NCCL_PROTO", "allreduce:LL128")];
    profile.network.nccl = NcclSettings::parse(pairs).expect("understood");
    let members: Vec<u32> = (0..64).collect();
    let call = prism_engine::collective::CollectiveCall { kind: AllReduce, bytes: 16 << 20, root: 0, ops: 1 };
    let cost = |profile: &Profile| prism_engine::collective::uniform_cost(&CommShape::new(&members, profile), &call);
    // 1 MiB per channel: 576,000-byte chunks would be two; (1 + 3 + 0.8) x 64 / 8 = 38.4 and 9.6 chunks ask for 72,000 bytes.
    let whole = cost(&profile);
    let pairs = [("NCCL_LL128_BUFFSIZE", "614400")];
    profile.network.nccl = NcclSettings::parse(
        profile
            .network
            .nccl
            .pairs()
            .clone()
            .into_iter()
            .chain(pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))),
    )
    .expect("understood");
    // 71,040 bytes from the start: nearly the same.
    let small = cost(&profile);
    assert!((whole.as_ps() - small.as_ps()).abs() * 50 < whole.as_ps(), "{whole:?} {small:?}");
}
