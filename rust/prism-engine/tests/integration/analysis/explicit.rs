//! A job as a list of "not before that, plus so much": written from the definition, solved by relaxing every edge until
//! nothing changes, forwards and backwards.

use crate::sim::reference::{count_of, launch};
use crate::sim::turns;
use prism_engine::collective::{self, CollectiveCall, CommShape, Scratch};
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, Op, OpKind};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Node {
    Start,
    /// The host issues the op.
    Issue(u32, usize),
    /// The op ends; a single collective or message of a launch.
    End(u32, usize),
    /// A rank comes to the launch whose first op this is.
    Arrive(u32, usize),
    /// The launch ends.
    Over(u32, usize),
}

pub(crate) struct Edge {
    pub(crate) from: Node,
    pub(crate) to: Node,
    pub(crate) least: i64,
}

pub(crate) struct Explicit {
    edges: Vec<Edge>,
    pub(crate) times: BTreeMap<Node, i64>,
    limits: BTreeMap<Node, i64>,
    /// First op of the launch of each communication op.
    pub(crate) launches: BTreeMap<(u32, usize), usize>,
}

fn slot_of(op: &Op) -> Option<SlotId> {
    match op.kind {
        OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. } => Some(slot),
        _ => None,
    }
}

fn group_of(op: &Op) -> u32 {
    match op.kind {
        OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
        _ => 0,
    }
}

fn is_sync(op: &Op) -> bool {
    matches!(op.kind, OpKind::StreamSync | OpKind::EventSync { .. } | OpKind::DeviceSync)
}

fn is_on_stream(op: &Op) -> bool {
    !is_sync(op) && !matches!(op.kind, OpKind::Alloc { .. } | OpKind::Free { .. })
}

struct RankWriter<'a> {
    rank: u32,
    ops: &'a [Op],
    edges: &'a mut Vec<Edge>,
}

impl RankWriter<'_> {
    fn edge(&mut self, from: Node, to: Node, least: SimTime) {
        self.edges.push(Edge { from, to, least: least.as_ps() });
    }

    fn group(&self, i: usize) -> std::ops::Range<usize> {
        let group = group_of(&self.ops[i]);
        if group == 0 {
            return i..i + 1;
        }
        let from = (0..i).rev().take_while(|j| group_of(&self.ops[*j]) == group).last().unwrap_or(i);
        let to = (i..self.ops.len()).take_while(|j| group_of(&self.ops[*j]) == group).last().unwrap_or(i);
        from..to + 1
    }

    /// First op of the launch of op `i`.
    fn launch(&self, i: usize) -> usize {
        self.group(i).find(|j| slot_of(&self.ops[*j]) == slot_of(&self.ops[i])).expect("i itself")
    }

    /// What the stream has to finish before op `i`.
    fn before(&self, stream: StreamId, i: usize) -> Vec<Node> {
        let Some(last) = (0..i).rev().find(|j| self.ops[*j].stream == stream && is_on_stream(&self.ops[*j])) else {
            return vec![];
        };
        if slot_of(&self.ops[last]).is_none() {
            return vec![Node::End(self.rank, last)];
        }
        let own = self.group(last).filter(|j| self.ops[*j].stream == stream);
        own.map(|j| Node::Over(self.rank, self.launch(j))).collect()
    }

    fn record(&self, event: EventId, i: usize) -> Option<Node> {
        let found = (0..i).rev().find(|j| self.ops[*j].kind == OpKind::EventRecord { event });
        found.map(|j| Node::End(self.rank, j))
    }

    fn write(&mut self, duration: &dyn Fn(usize, SimTime) -> SimTime) {
        for i in 0..self.ops.len() {
            let op = self.ops[i];
            let issue = Node::Issue(self.rank, i);
            let before = match i.checked_sub(1) {
                None => Node::Start,
                Some(p) if is_sync(&self.ops[p]) => Node::End(self.rank, p),
                Some(p) => Node::Issue(self.rank, p),
            };
            self.edge(before, issue, op.host_gap);
            if slot_of(&op).is_some() {
                self.write_launch(i);
                continue;
            }
            if !is_on_stream(&op) && !is_sync(&op) {
                continue;
            }
            let mut needs = vec![issue];
            match op.kind {
                OpKind::EventWait { event } | OpKind::EventSync { event } => needs.extend(self.record(event, i)),
                OpKind::DeviceSync => (0..8).for_each(|s| needs.extend(self.before(StreamId(s), i))),
                _ => {}
            }
            if is_on_stream(&op) || op.kind == OpKind::StreamSync {
                needs.extend(self.before(op.stream, i));
            }
            let own =
                if let OpKind::Compute { duration: own, .. } = op.kind { duration(i, own) } else { SimTime::ZERO };
            for need in needs {
                self.edge(need, Node::End(self.rank, i), own);
            }
        }
    }

    fn write_launch(&mut self, i: usize) {
        let (group, first) = (self.group(i), self.launch(i));
        let (arrive, over) = (Node::Arrive(self.rank, first), Node::Over(self.rank, first));
        let mut needs = vec![Node::Issue(self.rank, group.end - 1)];
        needs.extend(self.before(self.ops[i].stream, group.start));
        let slot = slot_of(&self.ops[i]);
        needs.extend(
            (0..group.start)
                .rev()
                .find(|j| slot_of(&self.ops[*j]) == slot)
                .map(|j| Node::Over(self.rank, self.launch(j))),
        );
        for need in needs {
            self.edge(need, arrive, SimTime::ZERO);
        }
        self.edge(arrive, over, SimTime::ZERO);
        self.edge(Node::End(self.rank, i), over, SimTime::ZERO);
    }

    /// What a single collective or message starts from, and how long after that, without its kernel's launch where that is
    /// paid.
    fn from(&self, i: usize, profile: &Profile, members: &[u32]) -> (Node, i64) {
        let is_call = |j: &usize| matches!(self.ops[*j].kind, OpKind::Collective { .. });
        let same = |j: &usize| slot_of(&self.ops[*j]) == slot_of(&self.ops[i]);
        let group = self.group(i);
        let to = if is_call(&i) { i } else { group.end };
        let earlier: Vec<usize> = (group.start..to).filter(is_call).filter(same).collect();
        let mut lead = SimTime::ZERO;
        if earlier.iter().any(|j| count_of(&self.ops[*j]) > 0) {
            lead = lead - launch(profile, members, &[self.ops[i]]);
        }
        if !is_call(&i) {
            lead += self.turn(i, profile, members);
        }
        let from = earlier.last().map_or(Node::Arrive(self.rank, self.launch(i)), |j| Node::End(self.rank, *j));
        (from, lead.as_ps())
    }

    fn turn(&self, i: usize, profile: &Profile, members: &[u32]) -> SimTime {
        let own = self.group(i).filter(|j| slot_of(&self.ops[*j]) == slot_of(&self.ops[i]));
        let half = |j: usize| match self.ops[j].kind {
            OpKind::PointToPoint { is_send, peer, count, dtype, .. } => {
                Some((j, turns::Half { is_send, peer, bytes: count * dtype.size_bytes() }))
            }
            _ => None,
        };
        let (places, halves): (Vec<usize>, Vec<turns::Half>) = own.filter_map(half).unzip();
        let me = members.iter().position(|member| *member == self.rank).expect("a member") as u32;
        turns::leads(profile, members, me, &halves)[places.iter().position(|j| *j == i).expect("a message")]
    }
}

/// One side of a collective or message: start and how long after that, and end.
type Side = (u32, (Node, i64), Node, Op);

impl Explicit {
    pub(crate) fn of(graph: &Graph, profile: &Profile, slow: &BTreeMap<Rank, f64>) -> Self {
        let mut edges = Vec::new();
        let mut launches = BTreeMap::new();
        let mut calls: BTreeMap<(u32, usize), Vec<Side>> = BTreeMap::new();
        let mut messages: BTreeMap<(u32, u32, u32, usize), Vec<Side>> = BTreeMap::new();
        for rank in 0..graph.world_size() {
            let ops: Vec<Op> = graph.template(graph.rank_template(Rank(rank))).iter().collect();
            let own: BTreeMap<u32, SimTime> = graph.rank_overrides(Rank(rank)).collect();
            let factor = slow.get(&Rank(rank)).copied().unwrap_or(1.0);
            let duration = |i: usize, common| own.get(&(i as u32)).copied().unwrap_or(common).scaled(factor);
            let mut writer = RankWriter { rank, ops: &ops, edges: &mut edges };
            writer.write(&duration);
            let mut counts: BTreeMap<(u32, u32, u32), usize> = BTreeMap::new();
            for (i, op) in ops.iter().enumerate() {
                let Some(slot) = slot_of(op) else { continue };
                launches.insert((rank, i), writer.launch(i));
                let comm = graph.rank_slots(Rank(rank))[slot.index()];
                let members = graph.comm_members(CommId(comm));
                let me = members.iter().position(|member| *member == rank).expect("a member") as u32;
                let end = Node::End(rank, i);
                let from = writer.from(i, profile, members);
                let key = match op.kind {
                    OpKind::PointToPoint { is_send: true, peer, .. } => (comm, me, peer),
                    OpKind::PointToPoint { peer, .. } => (comm, peer, me),
                    _ => (comm, u32::MAX, 0),
                };
                let count = counts.entry(key).or_default();
                if key.1 == u32::MAX {
                    calls.entry((comm, *count)).or_default().push((me, from, end, *op));
                } else {
                    messages.entry((key.0, key.1, key.2, *count)).or_default().push((me, from, end, *op));
                }
                *count += 1;
            }
        }
        for ((comm, _), sides) in calls {
            add_call(&mut edges, graph.comm_members(CommId(comm)), profile, &sides);
        }
        for ((comm, source, destination, _), sides) in messages {
            let members = graph.comm_members(CommId(comm));
            add_message(&mut edges, (members[source as usize], members[destination as usize]), profile, &sides);
        }
        let mut explicit = Self { edges, times: BTreeMap::new(), limits: BTreeMap::new(), launches };
        explicit.solve();
        explicit
    }

    fn solve(&mut self) {
        self.times.insert(Node::Start, 0);
        self.edges.iter().for_each(|edge| _ = self.times.insert(edge.to, 0));
        loop {
            let mut has_changed = false;
            for edge in &self.edges {
                let least = self.times[&edge.from] + edge.least;
                let time = self.times.get_mut(&edge.to).expect("every node is a target");
                has_changed |= least > *time;
                *time = least.max(*time);
            }
            if !has_changed {
                break;
            }
        }
        let end = self.end();
        // An issue that nothing waits for may be any time.
        let limit = |node: &Node| if matches!(node, Node::Issue(..)) { i64::MAX / 4 } else { end };
        self.limits = self.times.keys().map(|node| (*node, limit(node))).collect();
        loop {
            let mut has_changed = false;
            for edge in self.edges.iter().rev() {
                let most = self.limits[&edge.to] - edge.least;
                let limit = self.limits.get_mut(&edge.from).expect("every node is there");
                has_changed |= most < *limit;
                *limit = most.min(*limit);
            }
            if !has_changed {
                break;
            }
        }
    }

    /// When the last rank is through: the issue of ops on the host is not waited for.
    pub(crate) fn end(&self) -> i64 {
        let counts = |node: &Node| !matches!(node, Node::Issue(..));
        self.times.iter().filter(|(node, _)| counts(node)).map(|(_, time)| *time).max().unwrap_or(0)
    }

    pub(crate) fn slack(&self, node: Node) -> i64 {
        self.limits[&node] - self.times[&node]
    }

    /// The node at which op `i` of a rank is over.
    pub(crate) fn over(&self, rank: u32, i: usize) -> Node {
        self.launches.get(&(rank, i)).map_or(Node::End(rank, i), |first| Node::Over(rank, *first))
    }
}

fn add_call(edges: &mut Vec<Edge>, members: &[u32], profile: &Profile, sides: &[Side]) {
    use CollectiveKind as K;
    let OpKind::Collective { kind, dtype, root, count, .. } = sides[0].3.kind else { unreachable!("a collective") };
    let own = count * dtype.size_bytes();
    let bytes = if matches!(kind, K::AllReduce | K::Broadcast | K::Reduce) { own } else { own * members.len() as u64 };
    let shape = CommShape::new(members, profile);
    let call = CollectiveCall { kind, bytes, root, ops: 1 };
    for (me, (from, lead), _, _) in sides {
        let mut arrivals = vec![SimTime::from_ps(-(1 << 58)); members.len()];
        arrivals[*me as usize] = SimTime::ZERO;
        let mut ends = arrivals.clone();
        collective::completion(&shape, &call, &arrivals, &mut ends, &mut Scratch::default());
        for (other, _, to, _) in sides {
            let least = ends[*other as usize].as_ps();
            if least >= 0 {
                edges.push(Edge { from: *from, to: *to, least: least + lead });
            }
        }
    }
}

fn add_message(edges: &mut Vec<Edge>, (from, to): (u32, u32), profile: &Profile, sides: &[Side]) {
    let OpKind::PointToPoint { dtype, count, .. } = sides[0].3.kind else { unreachable!("a message") };
    let zero = SimTime::ZERO;
    let (sent, received) = collective::message(profile, from, to, count * dtype.size_bytes(), zero, zero);
    for (_, (start, lead), _, _) in sides {
        for (_, _, end, op) in sides {
            let is_send = matches!(op.kind, OpKind::PointToPoint { is_send: true, .. });
            let least = if is_send { sent } else { received }.as_ps();
            edges.push(Edge { from: *start, to: *end, least: least + lead });
        }
    }
}
