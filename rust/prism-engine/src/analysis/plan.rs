//! What an op program depends on inside its rank: a small graph per template, shared by all its ranks.
//!
//! A node is a moment of one rank: the end of an op on a stream, the arrival at a launch of communication, its end, or the
//! host's return from a synchronisation. A node's time is the latest over its edges of (time of the edge's source + the host
//! time in between), plus the op's own duration. Only the end of a launch depends on other ranks; it is taken from a replay.
//! Every edge leads to an earlier node, so one pass in order evaluates a rank.

use crate::graph::TemplateView;
use crate::graph::op::{ComputeClass, Op, OpKind};
use crate::ids::{EventId, SlotId, StreamId};
use crate::sim::{Call, Half, LaunchSpan, SimError, fuse, num_peers};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// What happens at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// The program starts.
    Begin,
    /// The host goes on after a synchronisation.
    Host,
    /// A compute op ends.
    Compute { class: ComputeClass, duration: SimTime },
    /// An op without duration: an event or a marker.
    Point,
    /// A stream waits for an event: its first edge is what it did before, its second the event.
    Wait,
    /// A stream leaves a group of several launches.
    Leave,
    /// The rank comes to launch number `n`.
    Arrive(u32),
    /// Launch number `n` ends.
    End(u32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// Index in the program (of a group, its last op; of a launch, its first).
    pub(crate) op: u32,
    pub(crate) kind: NodeKind,
    first_edge: u32,
}

/// A node waits for `from`, and for `offset` of host time after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) from: u32,
    pub(crate) offset: SimTime,
}

/// The part of a group on one communicator.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) slot: SlotId,
    pub(crate) arrive: u32,
    pub(crate) end: u32,
    pub(crate) calls: Vec<Call>,
    /// Number of the first of them among the slot's collectives.
    pub(crate) first_call: u64,
    /// Halves with their number among those of the same slot, peer and direction.
    pub(crate) halves: Vec<(Half, u64)>,
    /// Place among the rank's launches in a trace.
    pub(crate) traced: usize,
    /// Iterations over when it is launched.
    pub(crate) iteration: u32,
}

/// One step back on a rank: what node `node` waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) node: u32,
    /// Only what comes after this counts.
    pub(crate) floor: SimTime,
    /// The latest of what the node waited for, before the op's own duration.
    pub(crate) ready: SimTime,
    /// Time of the source of the edge that was latest.
    pub(crate) before: SimTime,
}

/// Goes back on one rank from a node to `start`, without a gap, through what was waited for.
///
/// Where a stream waits for an event of another one, it follows the other stream only as far as it did nothing itself, and goes
/// on with its own op before: what the other stream did in the meantime was hidden.
pub(crate) struct Back<'a> {
    plan: &'a Plan,
    times: &'a [SimTime],
    start: SimTime,
    at: Option<u32>,
    /// Streams left for another one: when they had been through with their op, and its node.
    left: Vec<(SimTime, u32)>,
}

impl<'a> Back<'a> {
    pub(crate) fn new(plan: &'a Plan, times: &'a [SimTime], from: u32, start: SimTime) -> Self {
        Self { plan, times, start, at: Some(from), left: Vec::new() }
    }

    /// Goes on at a node, or where the stream was left if the time of that is reached.
    fn go_to(&mut self, mut node: u32) {
        while let Some(at) = self.left.iter().position(|(floor, _)| *floor >= self.times[node as usize]) {
            node = self.left[at].1;
            self.left.truncate(at);
        }
        self.at = Some(node);
    }
}

impl Iterator for Back<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let node = self.at.take().filter(|node| self.times[*node as usize] > self.start)?;
        let floor = self.left.iter().map(|(floor, _)| *floor).fold(self.start, SimTime::max);
        let edges = self.plan.edges(node);
        let time = |edge: &Edge| self.times[edge.from as usize] + edge.offset;
        let ready = edges.iter().map(time).max().unwrap_or_default();
        let Some(edge) = edges.iter().find(|edge| time(edge) == ready).copied() else {
            return Some(Step { node, floor, ready, before: ready });
        };
        if self.plan.nodes[node as usize].kind == NodeKind::Wait && edge.from == edges[1].from {
            self.left.push((self.times[edges[0].from as usize], edges[0].from));
        }
        self.go_to(edge.from);
        Some(Step { node, floor, ready, before: self.times[edge.from as usize] })
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<Node>,
    edges: Vec<Edge>,
    pub(crate) launches: Vec<Launch>,
    /// Launch of each collective, by slot.
    pub(crate) calls: Vec<Vec<u32>>,
    /// Launch of each half by slot, peer and whether it sends.
    pub(crate) halves: BTreeMap<(SlotId, u32, bool), Vec<u32>>,
    /// Node of each `IterationEnd`.
    pub(crate) iteration_ends: Vec<u32>,
}

impl Plan {
    /// The plan of a template. O(ops).
    pub(crate) fn of(view: TemplateView<'_>) -> Self {
        let mut writer = Writer::new(view.num_slots() as usize);
        for (number, op) in view.iter().enumerate() {
            writer.push(&op, number as u32);
        }
        writer.close_group();
        let mut plan = writer.plan;
        let mut order: Vec<usize> = (0..plan.launches.len()).collect();
        order.sort_by_key(|launch| plan.launches[*launch].op());
        order.into_iter().enumerate().for_each(|(place, launch)| plan.launches[launch].traced = place);
        plan
    }

    /// What a node waits for; of equally late edges the first is the one to blame.
    pub(crate) fn edges(&self, node: u32) -> &[Edge] {
        let end = self.nodes.get(node as usize + 1).map_or(self.edges.len(), |next| next.first_edge as usize);
        &self.edges[self.nodes[node as usize].first_edge as usize..end]
    }

    /// Time of every node of a rank: `launches` are its own in program order, `duration` turns a compute op's index and
    /// duration into the rank's. An error if the rank did not come to its launches when it must have.
    pub(crate) fn times(
        &self,
        launches: &[LaunchSpan],
        duration: impl Fn(u32, SimTime) -> SimTime,
    ) -> Result<Vec<SimTime>, SimError> {
        let mut times: Vec<SimTime> = Vec::with_capacity(self.nodes.len());
        for (number, node) in self.nodes.iter().enumerate() {
            let ready = self.edges(number as u32).iter().map(|edge| times[edge.from as usize] + edge.offset).max();
            let ready = ready.unwrap_or_default();
            let time = match node.kind {
                NodeKind::Compute { duration: own, .. } => ready + duration(node.op, own),
                NodeKind::End(launch) => launches[self.launches[launch as usize].traced].end,
                NodeKind::Arrive(launch) if launches[self.launches[launch as usize].traced].arrival != ready => {
                    let what = format!("an analysis of durations that depend on time (op {})", node.op);
                    return Err(SimError::Unavailable { what });
                }
                _ => ready,
            };
            times.push(time);
        }
        Ok(times)
    }
}

impl Launch {
    /// How many peers it sends messages to.
    pub(crate) fn num_peers(&self) -> u32 {
        let halves: Vec<Half> = self.halves.iter().map(|(half, _)| *half).collect();
        num_peers(&halves)
    }

    /// Number of its last collective on the communicator, if it has any.
    pub(crate) fn last_call(&self) -> u64 {
        self.first_call + self.calls.len() as u64 - 1
    }

    /// Index of the op that names the launch.
    pub(crate) fn op(&self) -> u32 {
        self.calls.first().map_or_else(|| self.halves[0].0.op, |call| call.op)
    }
}

struct OpenGroup {
    number: u32,
    last_op: u32,
    streams: Vec<StreamId>,
    launches: Vec<(Launch, Vec<StreamId>)>,
}

struct Writer {
    plan: Plan,
    /// Latest node of each stream.
    streams: BTreeMap<StreamId, u32>,
    events: BTreeMap<EventId, u32>,
    /// End of the latest launch of each slot.
    last_launch: Vec<Option<u32>>,
    resume: u32,
    offset: SimTime,
    open: Option<OpenGroup>,
}

impl Writer {
    fn new(num_slots: usize) -> Self {
        let begin = Node { op: 0, kind: NodeKind::Begin, first_edge: 0 };
        let plan = Plan { nodes: vec![begin], calls: vec![Vec::new(); num_slots], ..Plan::default() };
        Self {
            plan,
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            last_launch: vec![None; num_slots],
            resume: 0,
            offset: SimTime::ZERO,
            open: None,
        }
    }

    fn push(&mut self, op: &Op, number: u32) {
        let group = match op.kind {
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
            _ => 0,
        };
        if group == 0 || self.open.as_ref().is_none_or(|open| open.number != group) {
            self.close_group();
        }
        self.offset += op.host_gap;
        match op.kind {
            OpKind::Compute { duration, class, .. } => {
                self.on_stream(op.stream, number, NodeKind::Compute { class, duration }, None);
            }
            OpKind::Collective { slot, kind, dtype, reduce, root, count, .. } => {
                let call = Call { op: number, kind, dtype, reduce, root, count, ops: 1, continues: false };
                self.launch_of(op.stream, slot, group, number).calls.push(call);
            }
            OpKind::PointToPoint { slot, is_send, dtype, peer, count, .. } => {
                let half = Half { op: number, is_send, dtype, peer, count };
                self.launch_of(op.stream, slot, group, number).halves.push((half, 0));
            }
            OpKind::EventRecord { event } => {
                let node = self.on_stream(op.stream, number, NodeKind::Point, None);
                self.events.insert(event, node);
            }
            OpKind::EventWait { event } => {
                let record = self.events.get(&event).copied();
                let waits = record.is_some() && self.streams.contains_key(&op.stream);
                self.on_stream(op.stream, number, if waits { NodeKind::Wait } else { NodeKind::Point }, record);
            }
            OpKind::StreamSync => {
                let stream = self.streams.get(&op.stream).copied();
                self.hold(number, stream.into_iter().collect());
            }
            OpKind::EventSync { event } => {
                let record = self.events.get(&event).copied();
                self.hold(number, record.into_iter().collect());
            }
            OpKind::DeviceSync => self.hold(number, self.streams.values().copied().collect()),
            OpKind::Alloc { .. } | OpKind::Free { .. } => {}
            OpKind::TrainingBegin => {
                self.on_stream(op.stream, number, NodeKind::Point, None);
            }
            OpKind::IterationEnd => {
                let node = self.on_stream(op.stream, number, NodeKind::Point, None);
                self.plan.iteration_ends.push(node);
            }
        }
        if group == 0 {
            self.close_group();
        }
    }

    /// Adds a node that waits for `device` and for the host.
    fn add(&mut self, op: u32, kind: NodeKind, device: impl IntoIterator<Item = u32>) -> u32 {
        let first_edge = self.plan.edges.len() as u32;
        self.plan.edges.extend(device.into_iter().map(|from| Edge { from, offset: SimTime::ZERO }));
        self.plan.edges.push(Edge { from: self.resume, offset: self.offset });
        self.plan.nodes.push(Node { op, kind, first_edge });
        self.plan.nodes.len() as u32 - 1
    }

    /// Adds a node that only waits for other nodes.
    fn join(&mut self, op: u32, kind: NodeKind, from: impl IntoIterator<Item = u32>) -> u32 {
        let first_edge = self.plan.edges.len() as u32;
        self.plan.edges.extend(from.into_iter().map(|from| Edge { from, offset: SimTime::ZERO }));
        self.plan.nodes.push(Node { op, kind, first_edge });
        self.plan.nodes.len() as u32 - 1
    }

    fn on_stream(&mut self, stream: StreamId, op: u32, kind: NodeKind, record: Option<u32>) -> u32 {
        let before = self.streams.get(&stream).copied();
        let node = self.add(op, kind, before.into_iter().chain(record));
        self.streams.insert(stream, node);
        node
    }

    fn hold(&mut self, op: u32, device: Vec<u32>) {
        self.resume = self.add(op, NodeKind::Host, device);
        self.offset = SimTime::ZERO;
    }

    fn launch_of(&mut self, stream: StreamId, slot: SlotId, group: u32, op: u32) -> &mut Launch {
        let empty = || OpenGroup { number: group, last_op: op, streams: Vec::new(), launches: Vec::new() };
        let open = self.open.get_or_insert_with(empty);
        open.last_op = op;
        if !open.streams.contains(&stream) {
            open.streams.push(stream);
        }
        let at = open.launches.iter().position(|(launch, _)| launch.slot == slot).unwrap_or_else(|| {
            let (calls, halves) = (Vec::new(), Vec::new());
            let launch = Launch { slot, arrive: 0, end: 0, calls, first_call: 0, halves, traced: 0, iteration: 0 };
            open.launches.push((launch, Vec::new()));
            open.launches.len() - 1
        });
        let (launch, streams) = &mut open.launches[at];
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        launch
    }

    fn close_group(&mut self) {
        let Some(open) = self.open.take() else { return };
        let mut ends: Vec<(Vec<StreamId>, u32)> = Vec::new();
        for (mut launch, streams) in open.launches {
            launch.calls = fuse(&launch.calls);
            let number = self.plan.launches.len() as u32;
            let slot = launch.slot.index();
            let before: Vec<u32> = streams.iter().filter_map(|stream| self.streams.get(stream)).copied().collect();
            launch.arrive =
                self.add(launch.op(), NodeKind::Arrive(number), before.into_iter().chain(self.last_launch[slot]));
            launch.end = self.join(launch.op(), NodeKind::End(number), [launch.arrive]);
            self.last_launch[slot] = Some(launch.end);
            launch.first_call = self.plan.calls[slot].len() as u64;
            launch.iteration = self.plan.iteration_ends.len() as u32;
            self.plan.calls[slot].extend(launch.calls.iter().map(|_| number));
            for (half, sequence) in &mut launch.halves {
                let same = self.plan.halves.entry((launch.slot, half.peer, half.is_send)).or_default();
                *sequence = same.len() as u64;
                same.push(number);
            }
            ends.push((streams, launch.end));
            self.plan.launches.push(launch);
        }
        for stream in open.streams {
            let own: Vec<u32> =
                ends.iter().filter(|(streams, _)| streams.contains(&stream)).map(|(_, end)| *end).collect();
            let last = if let [only] = own[..] { only } else { self.join(open.last_op, NodeKind::Leave, own) };
            self.streams.insert(stream, last);
        }
    }
}
