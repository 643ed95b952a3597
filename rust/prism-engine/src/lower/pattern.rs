//! The messages of one collective.
//!
//! A *lane* carries messages one after the other. Message `j` of a lane may leave when message `j - 1` has left, when its
//! sender takes part, and when each lane that feeds it has delivered message `j - lag`. Rings, trees and chains have lanes of
//! equal messages, or equal ones and then some smaller ones; the messages between pairs (all-to-all, gather, scatter) are
//! listed one by one.
//!
//! *Channels.* NCCL's channels are alike but for the last one of a call, so a link has a lane for all full ones, and perhaps
//! one for the last. A message of a lane stands for one of each of its channels, and takes as long as the closed forms say;
//! meanwhile it uses the share of its ports that the call's channels have of the communicator's, and the rest is for others.
//!
//! *Formulas.* What takes NCCL's own formula for its time (NVLS and so on) has no messages of its own. Every member is taken to
//! send one to the next of the ring, which is under way for the formula's time, between the coming of the last member and
//! the leaving of all, and to use of its ports what the buffer needs in that time.

use super::StepMessages;
use crate::collective::shape::NONE;
use crate::collective::{
    CollectiveCall, CollectiveKind, CommShape, ProtocolCosts, Run, Stream, Streams, Wiring, p2p, ring_steps, streams,
};
use crate::contention::FULL;
use crate::cost::comm::{Link, transfer_time};
use crate::units::SimTime;

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
    /// How many.
    pub(crate) count: u64,
    /// Where messages are listed, the first of them.
    start: u64,
    /// Indices into [`Pattern::messages`]: of so many, and of the others.
    full: u64,
    message: u32,
    last: u32,
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
    /// Most messages of a lane; where they are listed, those of every lane.
    pub(crate) per_lane: u64,
    pub(crate) lag: u64,
    /// Nobody sends before everybody takes part, and nobody leaves before everybody is through.
    pub(crate) is_barrier: bool,
    messages: Vec<Message>,
    /// Numbers at which lanes go over to their last messages.
    changes: Vec<u64>,
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
        self.lanes.iter().fold(0, |sum: u64, lane| sum.saturating_add(lane.count))
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
        if let Some(single) = self.singles.get((self.lanes[lane as usize].start + number) as usize) {
            return (single.from, single.to, &self.messages[single.message as usize]);
        }
        let lane = &self.lanes[lane as usize];
        let message = if number < lane.full { lane.message } else { lane.last };
        (lane.from, lane.to, &self.messages[message as usize])
    }

    /// Number of a message's route: messages of one route pass the same ports.
    pub(crate) fn route(&self, lane: u32, number: u32) -> u32 {
        if self.is_listed() { self.lanes[lane as usize].start as u32 + number } else { lane }
    }

    /// A message of every route, in order.
    pub(crate) fn routes(&self) -> impl Iterator<Item = (u32, u32, &Message)> {
        let listed = |single: &Single| (single.from, single.to, &self.messages[single.message as usize]);
        let equal = |lane: &Lane| (lane.from, lane.to, &self.messages[lane.message as usize]);
        let lanes = if self.is_listed() { &[][..] } else { &self.lanes[..] };
        self.singles.iter().map(listed).chain(lanes.iter().map(equal))
    }

    /// Number of the first message of a lane of each kind, how many there are of it: for sums over equal ones.
    pub(crate) fn kinds(&self, lane: u32) -> impl Iterator<Item = (u64, u64)> {
        let Lane { count, full, .. } = self.lanes[lane as usize];
        let (listed, equal) = if self.is_listed() { (count, [0, 0]) } else { (0, [full, count - full]) };
        let equal = [(0, equal[0]), (full, equal[1])].into_iter().filter(|(_, times)| *times > 0);
        (0..listed).map(|number| (number, 1)).chain(equal)
    }

    /// May messages of this number be of other kinds than those before?
    pub(crate) fn is_change(&self, number: u64) -> bool {
        number == 0 || self.changes.contains(&number)
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
    let all = |streams: &[Stream]| streams.iter().fold(0, |sum: u64, stream| sum.saturating_add(stream.messages()));
    match streams(shape, call).0 {
        Streams::Ring { stream, lag } => n.saturating_mul(ring((stream, lag), (n, call), step).0.messages()),
        Streams::Trees(trees) => (2 * (n - 1)).saturating_mul(all(&trees[0]).saturating_add(all(&trees[1]))),
        Streams::Chain(chain) => (n - 1).saturating_mul(all(&chain)),
        Streams::Direct if call.kind == CollectiveKind::AllToAll => n.saturating_mul(n - 1),
        Streams::Direct => n - 1,
        Streams::Formula(..) => n,
    }
}

/// A ring's stream and lag at this fineness.
fn ring((stream, lag): (Stream, u64), (n, call): (u64, &CollectiveCall), step: StepMessages) -> (Stream, u64) {
    if step == StepMessages::Fine {
        return (stream, lag);
    }
    let steps = ring_steps(n, call.kind);
    let bytes = match stream.part {
        (1, 1) => call.bytes.div_ceil(n),
        _ => stream.runs.iter().map(|run| run.messages.saturating_mul(run.bytes)).sum::<u64>().div_ceil(steps),
    };
    (Stream { runs: [Run { messages: steps, bytes }, Run::default()], ..stream }, 1)
}

/// The messages of a call with data.
pub(super) fn pattern(shape: &CommShape, call: &CollectiveCall, step: StepMessages) -> Pattern {
    let (streams, costs) = streams(shape, call);
    let n = shape.len() as u64;
    let mut writer = Writer::new(shape.len() as u32, costs.launch);
    if n < 2 {
        return writer.finish(0);
    }
    match streams {
        Streams::Ring { stream, lag } => {
            let (stream, lag) = ring((stream, lag), (n, call), step);
            writer.ring(shape, &stream, costs);
            writer.finish(lag)
        }
        Streams::Trees(trees) => {
            for (tree, streams) in trees.iter().enumerate() {
                for stream in streams {
                    writer.tree(shape, tree, stream, costs);
                }
            }
            writer.finish(0)
        }
        Streams::Chain(chain) => {
            for stream in &chain {
                writer.chain(shape, call, stream, costs);
            }
            writer.finish(0)
        }
        Streams::Direct => {
            let each = call.bytes.div_ceil(n);
            if call.kind == CollectiveKind::AllToAll {
                writer.all_to_all(shape, each);
            } else {
                writer.star(shape, call, each);
            }
            writer.finish(0)
        }
        Streams::Formula(wire, latency) => {
            writer.formula(shape, call.bytes, (wire, latency), costs);
            writer.finish(0)
        }
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
            changes: Vec::new(),
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

    /// A lane of listed messages, if there are any.
    fn listed(&mut self, ends: (u32, u32), messages: Vec<Single>) {
        if messages.is_empty() {
            return;
        }
        let (count, start) = (messages.len() as u64, self.pattern.singles.len() as u64);
        let lane = self.lane(ends, (count, count), [0, 0], Vec::new());
        self.pattern.lanes[lane as usize].start = start;
        self.pattern.singles.extend(messages);
    }

    fn lane(
        &mut self,
        (from, to): (u32, u32),
        (count, full): (u64, u64),
        [message, last]: [u32; 2],
        feeders: Vec<u32>,
    ) -> u32 {
        self.pattern.lanes.push(Lane { from, to, count, start: 0, full, message, last, feeders: (0, 0), fed: (0, 0) });
        self.lane_feeders.push(feeders);
        self.pattern.lanes.len() as u32 - 1
    }

    /// A lane of a stream's messages over a hop.
    fn stream(&mut self, ends: (u32, u32), hop: Hop, stream: &Stream, feeders: Vec<u32>) -> u32 {
        let kinds = stream.runs.map(|run| self.hop(hop, run.bytes, stream.part));
        self.lane(ends, (stream.messages(), stream.runs[0].messages), kinds, feeders)
    }

    fn hop(&mut self, (link, wire, share): Hop, bytes: u64, (part, whole): (u64, u64)) -> u32 {
        let (occupancy, latency) = (link.occupancy(bytes), link.latency);
        // Rounded down, as the share of the hop is.
        let share = u128::from(share) * u128::from(part) / u128::from(whole.max(1));
        let share = u64::try_from(share).unwrap_or(FULL).clamp(1, FULL);
        self.message(Message { bytes, occupancy, latency, wire, share })
    }

    fn ring(&mut self, shape: &CommShape, stream: &Stream, costs: &ProtocolCosts) {
        let n = shape.len();
        for at in 0..n {
            let before = (at + n - 1) % n;
            let ends = (shape.ring[at], shape.ring[(at + 1) % n]);
            self.stream(ends, ring_hop(shape, costs, at), stream, vec![before as u32]);
        }
    }

    fn chain(&mut self, shape: &CommShape, call: &CollectiveCall, stream: &Stream, costs: &ProtocolCosts) {
        let n = shape.len();
        // A broadcast starts at the root; a reduce starts behind it and ends there.
        let root = shape.position[call.root as usize] as usize;
        let first = if call.kind == CollectiveKind::Reduce { (root + 1) % n } else { root };
        let mut feeder = None;
        for hop in 0..n - 1 {
            let at = (first + hop) % n;
            let ends = (shape.ring[at], shape.ring[(at + 1) % n]);
            let feeders = feeder.into_iter().collect();
            feeder = Some(self.stream(ends, ring_hop(shape, costs, at), stream, feeders));
        }
    }

    fn tree(&mut self, shape: &CommShape, tree: usize, stream: &Stream, costs: &ProtocolCosts) {
        let tree = &shape.trees[tree];
        let (root, others) = tree.order.split_first().expect("a tree has a root");
        let mut up: Vec<Vec<u32>> = vec![Vec::new(); shape.len()];
        for rank in others.iter().rev() {
            let parent = tree.parent[*rank as usize];
            let feeders = std::mem::take(&mut up[*rank as usize]);
            let lane = self.stream((*rank, parent), tree_hop(costs, tree.class[*rank as usize]), stream, feeders);
            up[parent as usize].push(lane);
        }
        let mut down = vec![NONE; shape.len()];
        for rank in others {
            let parent = tree.parent[*rank as usize];
            let feeders = if parent == *root { up[*root as usize].clone() } else { vec![down[parent as usize]] };
            let hop = tree_hop(costs, tree.class[*rank as usize]);
            down[*rank as usize] = self.stream((parent, *rank), hop, stream, feeders);
        }
    }

    /// Every member to the next of the ring.
    fn formula(&mut self, shape: &CommShape, bytes: u64, time: (SimTime, SimTime), costs: &ProtocolCosts) {
        self.pattern.is_barrier = true;
        let (occupancy, latency) = time;
        for at in 0..shape.len() {
            let (link, wire, share) = ring_hop(shape, costs, at);
            // What the buffer takes at the hop's full speed, of the time it has.
            let needed = u128::from(link.occupancy(bytes).as_ps().unsigned_abs()) * u128::from(share);
            let share = needed / u128::from(occupancy.as_ps().unsigned_abs().max(1));
            let share = u64::try_from(share).unwrap_or(FULL).clamp(1, FULL);
            let message = self.message(Message { bytes, occupancy, latency, wire, share });
            let (from, to) = (shape.ring[at], shape.ring[(at + 1) % shape.len()]);
            self.listed((from, to), vec![Single { from, to, message }]);
        }
    }

    /// Every member to every other: those of its node first, then node after node; with NCCL's channels those of its node and
    /// the others side by side. Members of a node begin with different members of the other, so that nobody receives from two
    /// at once where nodes are alike.
    fn all_to_all(&mut self, shape: &CommShape, each: u64) {
        self.pattern.is_barrier = true;
        let mut nodes: Vec<Vec<u32>> = vec![Vec::new(); shape.node_sizes.len()];
        shape.node.iter().enumerate().for_each(|(rank, node)| nodes[*node as usize].push(rank as u32));
        let mut place = vec![0; shape.len()];
        nodes.iter().flat_map(|ranks| ranks.iter().enumerate()).for_each(|(at, rank)| place[*rank as usize] = at);
        let waves = if shape.tuned.is_some() { p2p::waves(&shape.node_sizes) } else { 1 };
        let far_latency = SimTime(shape.card.latency.0.saturating_mul(i64::try_from(waves).unwrap_or(i64::MAX)));
        for rank in 0..shape.len() as u32 {
            let (own, members) = (shape.node[rank as usize] as usize, nodes[shape.node[rank as usize] as usize].len());
            let cards = (members as u32).min(shape.cards);
            let far_rate = shape.card.bytes_per_s.saturating_mul(u64::from(cards));
            let near = |count: u64| shape.nvlink.occupancy(each.saturating_mul(count));
            let far = |count: u64| transfer_time(each.saturating_mul(count).saturating_mul(members as u64), far_rate);
            let far_share = (FULL * u64::from(cards) / members as u64).max(1);
            let mut lists = [Vec::new(), Vec::new()];
            for distance in 0..nodes.len() {
                let peers = &nodes[(own + distance) % nodes.len()];
                let shift = place[rank as usize];
                let list = &mut lists[usize::from(distance > 0)];
                for at in usize::from(distance == 0)..peers.len() {
                    let to = peers[(shift + at) % peers.len()];
                    let sent = list.len() as u64;
                    // Rounded over all messages of the port so far, so that the sum is what all bytes take.
                    let message = if distance == 0 {
                        let (occupancy, latency) = (near(sent + 1) - near(sent), shape.nvlink.latency);
                        Message { bytes: each, occupancy, latency, wire: Wire::NvLink, share: FULL }
                    } else {
                        let (occupancy, latency) = (far(sent + 1) - far(sent), far_latency);
                        Message { bytes: each, occupancy, latency, wire: Wire::Spread(cards), share: far_share }
                    };
                    let message = self.message(message);
                    list.push(Single { from: rank, to, message });
                }
            }
            let [inside, outside] = lists;
            if shape.tuned.is_some() {
                self.listed((rank, rank), inside);
                self.listed((rank, rank), outside);
            } else {
                self.listed((rank, rank), inside.into_iter().chain(outside).collect());
            }
        }
    }

    /// Gather and scatter: one message after the other, in order of distance from the root.
    fn star(&mut self, shape: &CommShape, call: &CollectiveCall, each: u64) {
        let n = shape.len() as u32;
        let mut messages = Vec::new();
        for distance in 1..n {
            let peer = (call.root + distance) % n;
            let is_inside = shape.node[peer as usize] == shape.node[call.root as usize];
            let hop =
                if is_inside { (shape.pair, Wire::NvLink, shape.pair_share()) } else { (shape.card, Wire::Card, FULL) };
            let message = self.hop(hop, each, (1, 1));
            let (from, to) = if call.kind == CollectiveKind::Gather { (peer, call.root) } else { (call.root, peer) };
            messages.push(Single { from, to, message });
        }
        self.listed((call.root, call.root), messages);
    }

    fn finish(mut self, lag: u64) -> Pattern {
        let pattern = &mut self.pattern;
        pattern.lag = lag;
        pattern.per_lane = pattern.lanes.iter().map(|lane| lane.count).max().unwrap_or(0);
        pattern.changes = pattern.lanes.iter().map(|lane| lane.full).collect();
        pattern.changes.dedup();
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
