//! From an execution graph to nodes: what each rank's program waits for, op by op.
//!
//! The same rules as the simulation's ([`crate::sim`]): the host issues ops without waiting except at synchronisations, a
//! stream runs its ops in issue order, a launch of communication starts when all its streams have come to it and the
//! communicator's previous launch has ended on the rank.

use super::pattern::{Message, pattern};
use super::ports::wire_between;
use super::survey::count_messages;
use super::{Comm, Enter, HOST, Instance, Job, LowerOptions, Marks, NO_NODE, Nodes, PortMap, Transfer, Wire, Work};
use crate::collective::{CollectiveCall, ShapePool, turns};
use crate::contention::FULL;
use crate::cost::comm::{Link, nanoseconds, transfer_time};
use crate::graph::Graph;
use crate::graph::op::{Op, OpKind};
use crate::ids::{CommId, EventId, Rank, SlotId, StreamId};
use crate::sim::{Call, Half, SimError, fuse, starts_after};
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Lowers a job. Refuses programs that do not fit together and, before anything is made, jobs with more messages than
/// allowed, with more than 2^26 points of time (some two per op of every rank), or with an all-to-all of more than 2^24 pairs.
pub fn lower(graph: &Graph, options: &LowerOptions) -> Result<Job, SimError> {
    graph.check().map_err(|error| SimError::invalid(error.to_string()))?;
    let ranks = chosen_ranks(graph, options)?;
    let messages = count_messages(graph, options, &ranks)?;
    let mut builder = Builder::new(graph, options, ranks);
    builder.job.messages = messages;
    for at in 0..builder.job.ranks.len() {
        let rank = builder.job.ranks[at];
        let marks = builder.rank(rank);
        builder.job.marks.push(marks);
    }
    Ok(builder.job)
}

/// The ranks asked for, and all they may depend on.
fn chosen_ranks(graph: &Graph, options: &LowerOptions) -> Result<Vec<u32>, SimError> {
    let world = graph.world_size();
    let Some(wanted) = &options.ranks else { return Ok((0..world).collect()) };
    if let Some(rank) = wanted.iter().find(|rank| rank.0 >= world) {
        return Err(SimError::invalid(format!("rank {rank} does not exist: the world has {world} ranks")));
    }
    let (mut has_rank, mut has_comm) = (vec![false; world as usize], vec![false; graph.num_comms()]);
    let mut queue: Vec<u32> = wanted.iter().map(|rank| rank.0).collect();
    while let Some(rank) = queue.pop() {
        if std::mem::replace(&mut has_rank[rank as usize], true) {
            continue;
        }
        for comm in graph.rank_slots(Rank(rank)) {
            if !std::mem::replace(&mut has_comm[*comm as usize], true) {
                queue.extend(graph.comm_members(CommId(*comm)));
            }
        }
    }
    Ok((0..world).filter(|rank| has_rank[*rank as usize]).collect())
}

/// Half of a message that waits for the other: the node that posts it, and the end of its launch.
#[derive(Clone, Copy)]
struct Waiting {
    is_send: bool,
    post: u32,
    end: u32,
}

/// The lane of a stream.
fn lane(stream: StreamId) -> u16 {
    stream.0.saturating_add(1).min(u16::MAX.into()) as u16
}

struct Builder<'a> {
    graph: &'a Graph,
    options: &'a LowerOptions,
    shapes: ShapePool,
    job: Job,
    /// Own number of each communicator of the graph.
    comms: FxHashMap<u32, u32>,
    /// Instances by communicator (own number) and call.
    calls: Vec<Vec<u32>>,
    patterns: FxHashMap<(u64, CollectiveCall), u32>,
    halves: FxHashMap<(u32, u32, u32), VecDeque<Waiting>>,
}

/// One rank's program on its way.
#[derive(Default)]
struct Walk {
    rank: u32,
    factor: Option<f64>,
    base: Option<u32>,
    offset: SimTime,
    /// The node of the latest issue time.
    issue: Option<(SimTime, u32)>,
    streams: Vec<Option<u32>>,
    records: BTreeMap<EventId, u32>,
    /// Per slot: collectives so far, and the end of the latest launch.
    slots: Vec<(usize, Option<u32>)>,
    open: Option<(u32, Vec<Posted>)>,
    marks: Marks,
}

/// The part of a group on one communicator.
struct Posted {
    slot: SlotId,
    streams: Vec<StreamId>,
    calls: Vec<Call>,
    halves: Vec<Half>,
}

impl<'a> Builder<'a> {
    fn new(graph: &'a Graph, options: &'a LowerOptions, ranks: Vec<u32>) -> Self {
        let world_size = graph.world_size();
        let length = |rank: &u32| graph.template(graph.rank_template(Rank(*rank))).len() as u64;
        let job = Job {
            world_size,
            num_ops: ranks.iter().map(length).sum(),
            marks: Vec::with_capacity(ranks.len()),
            ranks,
            nodes: Nodes::default(),
            patterns: Vec::new(),
            comms: Vec::new(),
            instances: Vec::new(),
            exits: Vec::new(),
            enters: Vec::new(),
            transfers: Vec::new(),
            ports: PortMap::new(world_size, &options.profile),
            messages: 0,
        };
        Self {
            graph,
            options,
            shapes: ShapePool::new(options.profile.clone()),
            job,
            comms: FxHashMap::default(),
            calls: Vec::new(),
            patterns: FxHashMap::default(),
            halves: FxHashMap::default(),
        }
    }

    fn rank(&mut self, rank: u32) -> Marks {
        let graph = self.graph;
        let slow = self.options.slow.get(&Rank(rank)).copied();
        let factor = slow.filter(|factor| factor.to_bits() != 1f64.to_bits());
        let slots = vec![(0, None); graph.rank_slots(Rank(rank)).len()];
        let mut walk = Walk { rank, factor, slots, ..Walk::default() };
        let mut own = graph.rank_overrides(Rank(rank)).peekable();
        for (number, op) in graph.template(graph.rank_template(Rank(rank))).iter().enumerate() {
            let duration = own.next_if(|(op, _)| *op == number as u32).map(|(_, duration)| duration);
            self.op(&mut walk, &op, duration);
        }
        self.close_group(&mut walk);
        let before: Vec<u32> = walk.streams.iter().flatten().copied().chain(walk.base).collect();
        walk.marks.last = self.job.nodes.push(rank, HOST, Work::Join, SimTime::ZERO, before);
        walk.marks
    }

    fn op(&mut self, walk: &mut Walk, op: &Op, own: Option<SimTime>) {
        if !walk.continues_group(op) {
            self.close_group(walk);
        }
        walk.offset += op.host_gap;
        match op.kind {
            OpKind::Compute { duration, class, provenance, .. } => {
                let duration = own.unwrap_or(duration);
                let duration =
                    walk.factor.filter(|_| !class.is_fixed()).map_or(duration, |factor| duration.scaled(factor));
                self.on_stream(walk, op.stream, Work::Compute(class, provenance), duration, None);
            }
            OpKind::Collective { slot, kind, dtype, reduce, root, count, group } => {
                let call = Call { op: 0, kind, dtype, reduce, root, count, ops: 1, continues: false };
                walk.posted(op.stream, slot, group).calls.push(call);
                self.close_if_alone(walk, group);
            }
            OpKind::PointToPoint { slot, is_send, dtype, peer, count, group } => {
                let half = Half { op: 0, is_send, dtype, peer, count };
                walk.posted(op.stream, slot, group).halves.push(half);
                self.close_if_alone(walk, group);
            }
            OpKind::EventRecord { event } => {
                let node = self.come(walk, op.stream, None);
                walk.records.insert(event, node);
            }
            OpKind::EventWait { event } => {
                let record = walk.records.get(&event).copied();
                self.come(walk, op.stream, record);
            }
            OpKind::StreamSync => {
                let stream = walk.stream(op.stream).iter().copied().collect();
                self.hold(walk, stream);
            }
            OpKind::EventSync { event } => {
                let record = walk.records.get(&event).copied();
                self.hold(walk, record.into_iter().collect());
            }
            OpKind::DeviceSync => {
                let streams = walk.streams.iter().flatten().copied().collect();
                self.hold(walk, streams);
            }
            OpKind::Alloc { .. } | OpKind::Free { .. } => {}
            OpKind::TrainingBegin => walk.marks.training_begin = Some(self.come(walk, op.stream, None)),
            OpKind::IterationEnd => {
                let node = self.come(walk, op.stream, None);
                walk.marks.iteration_ends.push(node);
            }
        }
    }

    /// The node at which the host issues the next op.
    fn issue(&mut self, walk: &mut Walk) -> Option<u32> {
        if walk.offset == SimTime::ZERO {
            return walk.base;
        }
        if let Some((offset, node)) = walk.issue
            && offset == walk.offset
        {
            return Some(node);
        }
        // Issue times follow each other: the host does one thing at a time.
        let (since, before) = walk.issue.map_or((SimTime::ZERO, walk.base), |(offset, node)| (offset, Some(node)));
        let node = self.job.nodes.push(walk.rank, HOST, Work::Join, walk.offset - since, before);
        walk.issue = Some((walk.offset, node));
        Some(node)
    }

    /// An op of a stream, after the op before it, its issue, and perhaps something else.
    fn on_stream(&mut self, walk: &mut Walk, stream: StreamId, work: Work, delay: SimTime, other: Option<u32>) -> u32 {
        let (issue, last) = (self.issue(walk), *walk.stream(stream));
        let before = last.into_iter().chain(issue).chain(other);
        let node = self.job.nodes.push(walk.rank, lane(stream), work, delay, before);
        *walk.stream(stream) = Some(node);
        node
    }

    fn come(&mut self, walk: &mut Walk, stream: StreamId, other: Option<u32>) -> u32 {
        self.on_stream(walk, stream, Work::Join, SimTime::ZERO, other)
    }

    /// The host waits.
    fn hold(&mut self, walk: &mut Walk, others: Vec<u32>) {
        let issue = self.issue(walk);
        let node = self.job.nodes.push(walk.rank, HOST, Work::Join, SimTime::ZERO, issue.into_iter().chain(others));
        (walk.base, walk.offset, walk.issue) = (Some(node), SimTime::ZERO, None);
    }

    fn close_if_alone(&mut self, walk: &mut Walk, group: u32) {
        if group == 0 {
            self.close_group(walk);
        }
    }

    fn close_group(&mut self, walk: &mut Walk) {
        let Some((_, launches)) = walk.open.take() else { return };
        let issue = self.issue(walk);
        let mut ends: BTreeMap<StreamId, Vec<u32>> = BTreeMap::new();
        for posted in &launches {
            let end = self.launch(walk, posted, issue);
            posted.streams.iter().for_each(|stream| ends.entry(*stream).or_default().push(end));
        }
        for (stream, ends) in ends {
            let end = match ends[..] {
                [end] => end,
                _ => self.job.nodes.push(walk.rank, lane(stream), Work::Join, SimTime::ZERO, ends),
            };
            *walk.stream(stream) = Some(end);
        }
    }

    /// The begin and the end of a launch, with what lies between. Returns its end.
    fn launch(&mut self, walk: &mut Walk, posted: &Posted, issue: Option<u32>) -> u32 {
        let slot = posted.slot.index();
        let comm = self.comm(self.graph.rank_slots(Rank(walk.rank))[slot]);
        let streams: Vec<u32> = posted.streams.iter().filter_map(|stream| *walk.stream(*stream)).collect();
        let first = lane(posted.streams[0]);
        let before = streams.into_iter().chain(issue).chain(walk.slots[slot].1);
        let begin = self.job.nodes.push(walk.rank, first, Work::Begin { enter: NO_NODE }, SimTime::ZERO, before);
        let member = self.member(comm, walk.rank);
        // Collectives follow each other: each one's exit enters the next.
        let mut exit = None;
        for call in &fuse(&posted.calls) {
            let instance = self.instance(comm, walk.slots[slot].0, call);
            walk.slots[slot].0 += 1;
            let Some(instance) = instance else { continue };
            let enter = self.job.enters.len() as u32;
            let launch = if call.continues { SimTime::ZERO } else { self.job.pattern(instance).launch };
            self.job.enters.push(Enter { instance, member, launch });
            if let Some((instance, member)) = exit {
                let node = self.job.nodes.push(walk.rank, first, Work::Enter { enter }, SimTime::ZERO, []);
                self.set_exit(instance, member, node);
            } else {
                self.job.nodes.work[begin as usize] = Work::Begin { enter };
            }
            exit = Some((instance, member));
        }
        // Messages after them.
        let mut start = begin;
        if let (Some((instance, member)), false) = (exit, posted.halves.is_empty()) {
            start = self.job.nodes.push(walk.rank, first, Work::Join, SimTime::ZERO, []);
            self.set_exit(instance, member, start);
        }
        let is_launched = starts_after(&posted.calls, SimTime(1)) > SimTime::ZERO;
        let posts = self.posts((walk.rank, first), (comm, member), &posted.halves, (start, is_launched));
        let before = [begin].into_iter().chain((start != begin).then_some(start));
        let end = self.job.nodes.push(walk.rank, first, Work::End, SimTime::ZERO, before);
        walk.slots[slot].1 = Some(end);
        if let (Some((instance, member)), true) = (exit, posted.halves.is_empty()) {
            self.set_exit(instance, member, end);
        }
        for (half, post) in posted.halves.iter().zip(posts) {
            self.half(comm, member, half, Waiting { is_send: half.is_send, post, end });
        }
        end
    }

    /// The nodes that post a launch's messages, each when it has its turn: one for all that have it at once.
    fn posts(
        &mut self,
        (rank, lane): (u32, u16),
        (comm, member): (u32, u32),
        halves: &[Half],
        (start, is_launched): (u32, bool),
    ) -> Vec<u32> {
        let profile = &self.options.profile;
        let launch = if is_launched { SimTime::ZERO } else { nanoseconds(profile.network.collective_launch_ns) };
        let mut leads = vec![SimTime::ZERO; halves.len()];
        if turns::has_turns(halves.iter().map(|half| half.is_send)) {
            let Comm { members, shape } = &self.job.comms[comm as usize];
            let message = |half: &Half| {
                let occupancy = Link::port_towards(profile, rank, members[half.peer as usize]).occupancy(half.bytes());
                turns::Message { peer: half.peer, is_send: half.is_send, occupancy }
            };
            leads = turns::turns(shape, member, &halves.iter().map(message).collect::<Vec<_>>()).leads;
        }
        let mut known: BTreeMap<SimTime, u32> = BTreeMap::new();
        let nodes = &mut self.job.nodes;
        let mut post =
            |lead| *known.entry(lead).or_insert_with(|| nodes.push(rank, lane, Work::Join, launch + lead, [start]));
        leads.into_iter().map(&mut post).collect()
    }

    fn set_exit(&mut self, instance: u32, member: u32, node: u32) {
        let at = self.job.instances[instance as usize].exits + member;
        self.job.exits[at as usize] = node;
        self.job.nodes.outside[node as usize] += 1;
    }

    fn comm(&mut self, comm: u32) -> u32 {
        let Self { comms, job, shapes, graph, calls, .. } = self;
        *comms.entry(comm).or_insert_with(|| {
            let members = graph.comm_members(CommId(comm)).to_vec();
            let shape = shapes.shape(&members);
            job.comms.push(Comm { members, shape });
            calls.push(Vec::new());
            job.comms.len() as u32 - 1
        })
    }

    fn member(&self, comm: u32, rank: u32) -> u32 {
        let mut members = self.job.comms[comm as usize].members.iter();
        members.position(|member| *member == rank).expect("only members have a slot for a communicator") as u32
    }

    /// The instance of a communicator's `number`-th collective, or none if it moves no data (and holds nobody).
    fn instance(&mut self, comm: u32, number: usize, call: &Call) -> Option<u32> {
        if let Some(known) = self.calls[comm as usize].get(number) {
            return Some(*known).filter(|known| *known != NO_NODE);
        }
        debug_assert_eq!(self.calls[comm as usize].len(), number, "the calls of a rank come in order");
        let size = self.job.comms[comm as usize].members.len();
        let bytes = call.buffer_bytes(size as u64);
        if bytes == 0 {
            self.calls[comm as usize].push(NO_NODE);
            return None;
        }
        let pattern = self.pattern(comm, CollectiveCall { kind: call.kind, bytes, root: call.root, ops: call.ops });
        let exits = self.job.exits.len() as u32;
        self.job.exits.resize(exits as usize + size, NO_NODE);
        self.job.instances.push(Instance { comm, pattern, exits });
        let instance = self.job.instances.len() as u32 - 1;
        self.calls[comm as usize].push(instance);
        Some(instance)
    }

    fn pattern(&mut self, comm: u32, call: CollectiveCall) -> u32 {
        let Self { job, patterns, options, .. } = self;
        let shape = &job.comms[comm as usize].shape;
        *patterns.entry((shape.id, call)).or_insert_with(|| {
            job.patterns.push(pattern(shape, &call, options.step_messages));
            job.patterns.len() as u32 - 1
        })
    }

    /// Half of a message: the message, if the other half was there before.
    fn half(&mut self, comm: u32, member: u32, half: &Half, mine: Waiting) {
        let (from, to) = if half.is_send { (member, half.peer) } else { (half.peer, member) };
        let queue = self.halves.entry((comm, from, to)).or_default();
        if queue.front().is_none_or(|other| other.is_send == half.is_send) {
            queue.push_back(mine);
            return;
        }
        let other = queue.pop_front().expect("just seen");
        let (send, receive) = if half.is_send { (mine, other) } else { (other, mine) };
        let members = &self.job.comms[comm as usize].members;
        let ranks = (members[from as usize], members[to as usize]);
        let (message, copy) = self.message(ranks, half.bytes());
        let transfer = self.job.transfers.len() as u32;
        self.job.transfers.push(Transfer { message, ranks, ends: (send.end, receive.end) });
        self.job.nodes.push(ranks.0, HOST, Work::Transfer(transfer), copy, [send.post, receive.post]);
        for end in [send.end, receive.end] {
            self.job.nodes.outside[end as usize] += 1;
        }
    }

    /// A message between two ranks, and how long after both halves are posted it leaves.
    fn message(&self, (from, to): (u32, u32), bytes: u64) -> (Message, SimTime) {
        let profile = &self.options.profile;
        if from == to {
            // A copy inside the device: it reads and writes every byte, and nothing travels.
            let copy = transfer_time(bytes.saturating_mul(2), profile.device.memory_bytes_per_s);
            let (occupancy, latency, wire) = (SimTime::ZERO, SimTime::ZERO, Wire::NvLink);
            return (Message { bytes, occupancy, latency, wire, share: FULL }, copy);
        }
        let link = Link::between(profile, from, to);
        let wire = wire_between(profile, from, to);
        // In a mesh of NVLinks a message has some of them.
        let part = if wire == Wire::NvLink { profile.node.nvlink_share(2) } else { 1.0 };
        let share = ((FULL as f64 * part) as u64).clamp(1, FULL);
        (Message { bytes, occupancy: link.occupancy(bytes), latency: link.latency, wire, share }, SimTime::ZERO)
    }
}

impl Walk {
    fn stream(&mut self, stream: StreamId) -> &mut Option<u32> {
        if self.streams.len() <= stream.index() {
            self.streams.resize(stream.index() + 1, None);
        }
        &mut self.streams[stream.index()]
    }

    fn continues_group(&self, op: &Op) -> bool {
        let group = match op.kind {
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
            _ => 0,
        };
        group != 0 && self.open.as_ref().is_some_and(|(open, _)| *open == group)
    }

    /// The launch that an op of a group belongs to.
    fn posted(&mut self, stream: StreamId, slot: SlotId, group: u32) -> &mut Posted {
        let launches = &mut self.open.get_or_insert_with(|| (group, Vec::new())).1;
        let at = launches.iter().position(|posted| posted.slot == slot).unwrap_or_else(|| {
            launches.push(Posted { slot, streams: Vec::new(), calls: Vec::new(), halves: Vec::new() });
            launches.len() - 1
        });
        let posted = &mut launches[at];
        if !posted.streams.contains(&stream) {
            posted.streams.push(stream);
        }
        posted
    }
}
