//! The messages of one collective.
//!
//! A *lane* carries messages one after the other. Message `j` of a lane may leave when message `j - 1` has left, when its
//! sender takes part, and when each lane that feeds it has delivered message `j - lag`. Rings, trees and chains have lanes of
//! equal messages; the messages between pairs (all-to-all, gather, scatter) are listed one by one.

use super::StepMessages;
use crate::collective::shape::NONE;
use crate::collective::{
    Algorithm, CollectiveCall, CollectiveKind, CommShape, ProtocolCosts, Wiring, ring_messages, way_of,
};
use crate::contention::FULL;
use crate::cost::comm::{Link, transfer_time};
use crate::units::SimTime;

/// Why only rings, trees, chains and pairs are lowered.
const NO_FORMULAS: &str = "jobs are lowered without NCCL's tuning, and nothing else takes a formula";

/// What carries a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// The NVLink ports of two GPUs.
    NvLink,
    /// The sender's own network card and the receiver's.
    Card,
    /// One card on each side, chosen so that the members of a node use so many cards evenly.
    Spread(u32),
    /// So many cards on each side at once.
    Striped(u32),
}

/// One message: how long it takes alone, and which share of its ports it then uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Size.
    pub bytes: u64,
    /// Time on the wire.
    pub occupancy: SimTime,
    /// From then to its arrival.
    pub latency: SimTime,
    /// What carries it.
    pub wire: Wire,
    /// Share of each port that the message uses at this speed, in units of 2^-32.
    pub share: u64,
}

/// A lane of equal messages.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Index into [`Pattern::messages`].
    message: u32,
    feeders: (u32, u32),
    fed: (u32, u32),
}

/// A message between a pair, in its lane's order.
#[derive(Clone, Copy, Debug)]
struct Single {
    from: u32,
    to: u32,
    message: u32,
}

/// The messages of a collective call on a communicator of some shape.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// Time from a member's arrival until it takes part.
    pub(crate) launch: SimTime,
    pub(crate) size: u32,
    pub(crate) lanes: Vec<Lane>,
    /// Messages of every lane.
    pub(crate) per_lane: u64,
    pub(crate) lag: u64,
    /// Nobody sends before everybody takes part, and nobody leaves before everybody is through.
    pub(crate) is_barrier: bool,
    messages: Vec<Message>,
    singles: Vec<Single>,
    feeders: Vec<u32>,
    fed: Vec<u32>,
    /// Lanes of each sender.
    from_start: Vec<u32>,
    from_lanes: Vec<u32>,
}

impl Pattern {
    /// Number of messages.
    #[must_use]
    pub fn num_messages(&self) -> u64 {
        self.per_lane.saturating_mul(self.lanes.len() as u64)
    }

    /// Time on wires of all messages one after the other, and all launches.
    pub(crate) fn work(&self) -> i128 {
        let time = |message: &Message| i128::from(message.occupancy.as_ps()) + i128::from(message.latency.as_ps());
        let launches = i128::from(self.launch.as_ps()) * i128::from(self.size);
        let slowest = self.messages.iter().map(time).max().unwrap_or(0);
        launches.saturating_add(slowest.saturating_mul(i128::from(self.num_messages())))
    }

    /// Are the messages listed one by one, each with its own ends?
    pub(crate) fn is_listed(&self) -> bool {
        !self.singles.is_empty()
    }

    /// Sender and receiver of a message, and the message.
    pub(crate) fn message(&self, lane: u32, number: u64) -> (u32, u32, &Message) {
        if let Some(single) = self.singles.get((u64::from(lane) * self.per_lane + number) as usize) {
            return (single.from, single.to, &self.messages[single.message as usize]);
        }
        let lane = &self.lanes[lane as usize];
        (lane.from, lane.to, &self.messages[lane.message as usize])
    }

    /// Lanes that feed a lane.
    pub(crate) fn feeders(&self, lane: u32) -> &[u32] {
        let (from, to) = self.lanes[lane as usize].feeders;
        &self.feeders[from as usize..to as usize]
    }

    /// Lanes that a lane feeds.
    pub(crate) fn fed(&self, lane: u32) -> &[u32] {
        let (from, to) = self.lanes[lane as usize].fed;
        &self.fed[from as usize..to as usize]
    }

    /// Lanes that may go on when a member takes part.
    pub(crate) fn lanes_of(&self, member: u32) -> &[u32] {
        let at = member as usize;
        &self.from_lanes[self.from_start[at] as usize..self.from_start[at + 1] as usize]
    }

    /// What each member waits for before it leaves: lanes sent and received, or messages where they are listed.
    pub(crate) fn waits(&self) -> Vec<u32> {
        let mut waits = vec![0; self.size as usize];
        if self.is_listed() {
            for single in &self.singles {
                waits[single.from as usize] += 1;
                waits[single.to as usize] += 1;
            }
        } else {
            for lane in &self.lanes {
                waits[lane.from as usize] += 1;
                waits[lane.to as usize] += 1;
            }
        }
        waits
    }
}

/// Messages of a call, without making them.
pub(super) fn count(shape: &CommShape, call: &CollectiveCall, step: StepMessages) -> u64 {
    let n = shape.len() as u64;
    if n < 2 || call.bytes == 0 {
        return 0;
    }
    let (algorithm, costs) = way_of(shape, call);
    match algorithm {
        Algorithm::Ring => n.saturating_mul(ring(n, costs, call, step).0),
        Algorithm::Tree => (4 * (n - 1)).saturating_mul(call.bytes.div_ceil(2).div_ceil(costs.tree_chunk_bytes)),
        Algorithm::Chain => (n - 1).saturating_mul(call.bytes.div_ceil(costs.chain_chunk_bytes)),
        Algorithm::Direct if call.kind == CollectiveKind::AllToAll => n.saturating_mul(n - 1),
        Algorithm::Direct => n - 1,
        Algorithm::Nvls | Algorithm::NvlsTree | Algorithm::Pat => unreachable!("{NO_FORMULAS}"),
    }
}

/// Messages per rank, slices, and bytes of a message.
fn ring(n: u64, costs: &ProtocolCosts, call: &CollectiveCall, step: StepMessages) -> (u64, u64, u64) {
    let (messages, bytes) = ring_messages(n, costs, call);
    match step {
        StepMessages::Fine => (messages, costs.slices, bytes),
        StepMessages::Coarse => {
            let steps = if call.kind == CollectiveKind::AllReduce { 2 * (n - 1) } else { n - 1 };
            (steps, 1, call.bytes.div_ceil(n))
        }
    }
}

/// The messages of a call with data.
pub(super) fn pattern(shape: &CommShape, call: &CollectiveCall, step: StepMessages) -> Pattern {
    let (algorithm, costs) = way_of(shape, call);
    let mut writer = Writer::new(shape.len() as u32, costs.launch);
    if shape.len() < 2 {
        return writer.finish(0, 0);
    }
    match algorithm {
        Algorithm::Ring => {
            let (messages, slices, bytes) = ring(shape.len() as u64, costs, call, step);
            writer.ring(shape, bytes, costs);
            writer.finish(messages, slices)
        }
        Algorithm::Tree => {
            let half = call.bytes.div_ceil(2);
            let chunks = half.div_ceil(costs.tree_chunk_bytes);
            writer.trees(shape, half.div_ceil(chunks), costs);
            writer.finish(chunks, 0)
        }
        Algorithm::Chain => {
            let chunks = call.bytes.div_ceil(costs.chain_chunk_bytes);
            writer.chain(shape, call, call.bytes.div_ceil(chunks), costs);
            writer.finish(chunks, 0)
        }
        Algorithm::Direct => {
            let each = call.bytes.div_ceil(shape.len() as u64);
            if call.kind == CollectiveKind::AllToAll {
                writer.all_to_all(shape, each);
                return writer.finish(shape.len() as u64 - 1, 0);
            }
            writer.star(shape, call, each);
            writer.finish(shape.len() as u64 - 1, 0)
        }
        Algorithm::Nvls | Algorithm::NvlsTree | Algorithm::Pat => unreachable!("{NO_FORMULAS}"),
    }
}

/// The link of a hop, its wire, and its share of the wire's ports.
type Hop = (Link, Wire, u64);

struct Writer {
    pattern: Pattern,
    lane_feeders: Vec<Vec<u32>>,
}

impl Writer {
    fn new(size: u32, launch: SimTime) -> Self {
        let pattern = Pattern {
            launch,
            size,
            lanes: Vec::new(),
            per_lane: 0,
            lag: 0,
            is_barrier: false,
            messages: Vec::new(),
            singles: Vec::new(),
            feeders: Vec::new(),
            fed: Vec::new(),
            from_start: Vec::new(),
            from_lanes: Vec::new(),
        };
        Self { pattern, lane_feeders: Vec::new() }
    }

    fn message(&mut self, message: Message) -> u32 {
        let messages = &mut self.pattern.messages;
        // Few kinds of links: the latest ones are looked at first.
        let known = messages.iter().rev().take(64).position(|known| *known == message);
        if known.is_none() {
            messages.push(message);
        }
        (messages.len() - 1 - known.unwrap_or(0)) as u32
    }

    fn lane(&mut self, from: u32, to: u32, message: u32, feeders: Vec<u32>) -> u32 {
        self.pattern.lanes.push(Lane { from, to, message, feeders: (0, 0), fed: (0, 0) });
        self.lane_feeders.push(feeders);
        self.pattern.lanes.len() as u32 - 1
    }

    fn hop(&mut self, (link, wire, share): Hop, bytes: u64) -> u32 {
        let (occupancy, latency) = (link.occupancy(bytes), link.latency);
        self.message(Message { bytes, occupancy, latency, wire, share })
    }

    fn ring(&mut self, shape: &CommShape, bytes: u64, costs: &ProtocolCosts) {
        let n = shape.len();
        for at in 0..n {
            let message = self.hop(ring_hop(shape, costs, at), bytes);
            let before = (at + n - 1) % n;
            self.lane(shape.ring[at], shape.ring[(at + 1) % n], message, vec![before as u32]);
        }
    }

    fn chain(&mut self, shape: &CommShape, call: &CollectiveCall, bytes: u64, costs: &ProtocolCosts) {
        let n = shape.len();
        // A broadcast starts at the root; a reduce starts behind it and ends there.
        let root = shape.position[call.root as usize] as usize;
        let first = if call.kind == CollectiveKind::Reduce { (root + 1) % n } else { root };
        for hop in 0..n - 1 {
            let at = (first + hop) % n;
            let message = self.hop(ring_hop(shape, costs, at), bytes);
            let feeders = hop.checked_sub(1).map(|before| before as u32);
            self.lane(shape.ring[at], shape.ring[(at + 1) % n], message, feeders.into_iter().collect());
        }
    }

    fn trees(&mut self, shape: &CommShape, bytes: u64, costs: &ProtocolCosts) {
        for tree in &shape.trees {
            let (root, others) = tree.order.split_first().expect("a tree has a root");
            let mut up: Vec<Vec<u32>> = vec![Vec::new(); shape.len()];
            for rank in others.iter().rev() {
                let parent = tree.parent[*rank as usize];
                let message = self.hop(tree_hop(costs, tree.class[*rank as usize]), bytes);
                let feeders = std::mem::take(&mut up[*rank as usize]);
                let lane = self.lane(*rank, parent, message, feeders);
                up[parent as usize].push(lane);
            }
            let mut down = vec![NONE; shape.len()];
            for rank in others {
                let parent = tree.parent[*rank as usize];
                let message = self.hop(tree_hop(costs, tree.class[*rank as usize]), bytes);
                let feeders = if parent == *root { up[*root as usize].clone() } else { vec![down[parent as usize]] };
                down[*rank as usize] = self.lane(parent, *rank, message, feeders);
            }
        }
    }

    /// Every member to every other: those of its node first, then node after node. Members of a node begin with different
    /// members of the other, so that nobody receives from two at once where nodes are alike.
    fn all_to_all(&mut self, shape: &CommShape, each: u64) {
        self.pattern.is_barrier = true;
        let mut nodes: Vec<Vec<u32>> = vec![Vec::new(); shape.node_sizes.len()];
        shape.node.iter().enumerate().for_each(|(rank, node)| nodes[*node as usize].push(rank as u32));
        let mut place = vec![0; shape.len()];
        nodes.iter().flat_map(|ranks| ranks.iter().enumerate()).for_each(|(at, rank)| place[*rank as usize] = at);
        for rank in 0..shape.len() as u32 {
            let (own, members) = (shape.node[rank as usize] as usize, nodes[shape.node[rank as usize] as usize].len());
            let cards = (members as u32).min(shape.cards);
            let far_rate = shape.card.bytes_per_s.saturating_mul(u64::from(cards));
            let near = |count: u64| shape.nvlink.occupancy(each.saturating_mul(count));
            let far = |count: u64| transfer_time(each.saturating_mul(count).saturating_mul(members as u64), far_rate);
            let far_share = (FULL * u64::from(cards) / members as u64).max(1);
            let lane = self.lane(rank, rank, 0, Vec::new());
            debug_assert_eq!(lane, rank);
            for distance in 0..nodes.len() {
                let peers = &nodes[(own + distance) % nodes.len()];
                let shift = place[rank as usize];
                for at in usize::from(distance == 0)..peers.len() {
                    let to = peers[(shift + at) % peers.len()];
                    let sent = (self.pattern.singles.len() as u64) - u64::from(rank) * (shape.len() as u64 - 1);
                    // Rounded over all messages of the port so far, so that the sum is what all bytes take.
                    let message = if distance == 0 {
                        let (occupancy, latency) = (near(sent + 1) - near(sent), shape.nvlink.latency);
                        Message { bytes: each, occupancy, latency, wire: Wire::NvLink, share: FULL }
                    } else {
                        let sent = sent - (members as u64 - 1);
                        let (occupancy, latency) = (far(sent + 1) - far(sent), shape.card.latency);
                        Message { bytes: each, occupancy, latency, wire: Wire::Spread(cards), share: far_share }
                    };
                    let message = self.message(message);
                    self.pattern.singles.push(Single { from: rank, to, message });
                }
            }
        }
    }

    /// Gather and scatter: one message after the other, in order of distance from the root.
    fn star(&mut self, shape: &CommShape, call: &CollectiveCall, each: u64) {
        let n = shape.len() as u32;
        self.lane(call.root, call.root, 0, Vec::new());
        for distance in 1..n {
            let peer = (call.root + distance) % n;
            let is_inside = shape.node[peer as usize] == shape.node[call.root as usize];
            let hop = if is_inside { (shape.nvlink, Wire::NvLink, FULL) } else { (shape.card, Wire::Card, FULL) };
            let message = self.hop(hop, each);
            let (from, to) = if call.kind == CollectiveKind::Gather { (peer, call.root) } else { (call.root, peer) };
            self.pattern.singles.push(Single { from, to, message });
        }
    }

    fn finish(mut self, per_lane: u64, lag: u64) -> Pattern {
        let pattern = &mut self.pattern;
        (pattern.per_lane, pattern.lag) = (per_lane, lag);
        let mut fed = vec![Vec::new(); pattern.lanes.len()];
        for (lane, feeders) in self.lane_feeders.iter().enumerate() {
            let start = pattern.feeders.len() as u32;
            pattern.feeders.extend(feeders);
            pattern.lanes[lane].feeders = (start, pattern.feeders.len() as u32);
            for feeder in feeders {
                fed[*feeder as usize].push(lane as u32);
            }
        }
        for (lane, fed) in fed.into_iter().enumerate() {
            let start = pattern.fed.len() as u32;
            pattern.fed.extend(fed);
            pattern.lanes[lane].fed = (start, pattern.fed.len() as u32);
        }
        let mut from = vec![Vec::new(); pattern.size as usize];
        if pattern.is_listed() && pattern.lanes.len() == 1 {
            // Whoever comes may be the one that is waited for.
            for lanes in &mut from {
                lanes.push(0);
            }
        } else {
            pattern.lanes.iter().enumerate().for_each(|(at, lane)| from[lane.from as usize].push(at as u32));
        }
        pattern.from_start.push(0);
        for lanes in from {
            pattern.from_lanes.extend(lanes);
            pattern.from_start.push(pattern.from_lanes.len() as u32);
        }
        self.pattern
    }
}

/// The hop from a position of the ring to the next.
fn ring_hop(shape: &CommShape, costs: &ProtocolCosts, at: usize) -> Hop {
    let class = usize::from(shape.ring_class[at]);
    hop(costs.ring_links[class], costs.ring_wires[class])
}

/// The hop between a rank and its parent.
fn tree_hop(costs: &ProtocolCosts, class: u16) -> Hop {
    let class = usize::from(class);
    hop(costs.tree_links[class], costs.tree_wires[class])
}

fn hop(link: Link, wiring: Wiring) -> Hop {
    let wire = if wiring.cards == 0 { Wire::NvLink } else { Wire::Striped(wiring.cards) };
    let (part, whole) = wiring.share;
    // Rounded down, so that shares never add up to more than a port.
    let share = u128::from(FULL) * u128::from(part) / u128::from(whole.max(1));
    (link, wire, u64::try_from(share).unwrap_or(FULL).clamp(1, FULL))
}
