//! How much later each op may end without the job ending later.
//!
//! The replay's recurrence run backwards, over every moment of every rank: a moment's limit is the least over everything
//! that waits for it of (limit there - time in between). Collectives are run backwards through their matrix
//! `W(p, s)`, the end of member `p` when member `s` alone arrives at 0.

use super::plan::{Launch, NodeKind};
use super::trace::{JobTrace, NEVER};
use crate::collective::{self, CollectiveCall};
use crate::ids::Rank;
use crate::sim::SimError;
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Most moments (about one per op of every rank) slack is worked out for: some 200 MiB.
pub const MAX_MOMENTS: u64 = 1 << 21;
/// Largest communicator whose matrix is built. Beyond it every pair is taken as slow as the slowest, and slack is a lower
/// bound.
const MAX_MATRIX: usize = 256;

/// Slack of the ops of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slack {
    /// By rank, the ops that take part (memory ops do not) with how much later each may end. Ascending by op.
    pub by_rank: Vec<Vec<(u32, SimTime)>>,
    /// False: some slack is only a lower bound, because a communicator is too large.
    pub is_exact: bool,
}

impl Slack {
    /// Least slack of a rank's ops: 0 on the critical path.
    #[must_use]
    pub fn of_rank(&self, rank: Rank) -> Option<SimTime> {
        self.by_rank[rank.index()].iter().map(|(_, slack)| *slack).min()
    }
}

/// Slack of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankSlack {
    /// Which.
    pub rank: Rank,
    /// Least slack of its ops, whole ns rounded down.
    pub slack_ns: i64,
}

impl JobTrace {
    /// Slack of every op. Refuses jobs of more than [`MAX_MOMENTS`] moments by name.
    pub fn slack(&self) -> Result<Slack, SimError> {
        let world = self.graph.world_size();
        let count: u64 = (0..world).map(|rank| self.plan(rank).nodes.len() as u64).sum();
        if count > MAX_MOMENTS {
            let what = format!("slack of a job of {count} moments (at most {MAX_MOMENTS})");
            return Err(SimError::Unavailable { what });
        }
        let mut backward = Backward::new(self)?;
        backward.run();
        backward.slack()
    }
}

/// Something several ranks do together: a collective (communicator, sequence) or a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Call { comm: u32, sequence: u64 },
    Message { comm: u32, source: u32, destination: u32, sequence: u64 },
}

/// A meeting not run backwards yet.
struct Open {
    /// Moments that still have to be known.
    pending: u32,
    /// Latest end of each member (source and destination of a message).
    limits: Vec<SimTime>,
}

/// The recurrence on its way back: moments whose limits are known are ready, all others count what they still wait for.
struct Backward<'a> {
    trace: &'a JobTrace,
    /// Number of each rank's first moment.
    base: Vec<usize>,
    times: Vec<SimTime>,
    limits: Vec<SimTime>,
    pending: Vec<u32>,
    ready: Vec<(u32, u32)>,
    open: BTreeMap<Meeting, Open>,
    matrices: BTreeMap<(u64, u64, u8, u32), Rc<Vec<SimTime>>>,
    is_exact: bool,
}

impl<'a> Backward<'a> {
    fn new(trace: &'a JobTrace) -> Result<Self, SimError> {
        let mut base = Vec::new();
        let mut times: Vec<SimTime> = Vec::new();
        for rank in 0..trace.graph.world_size() {
            base.push(times.len());
            times.extend(trace.fresh_times(rank)?);
        }
        let end = times.iter().copied().max().unwrap_or_default();
        let mut backward = Self {
            trace,
            base,
            limits: vec![end; times.len()],
            pending: vec![0; times.len()],
            times,
            ready: Vec::new(),
            open: BTreeMap::new(),
            matrices: BTreeMap::new(),
            is_exact: true,
        };
        (0..trace.graph.world_size()).for_each(|rank| backward.count(rank));
        Ok(backward)
    }

    /// Counts what waits for each moment of a rank.
    fn count(&mut self, rank: u32) {
        let plan = self.trace.plan(rank);
        let base = self.base[rank as usize];
        for node in 0..plan.nodes.len() as u32 {
            plan.edges(node).iter().for_each(|edge| self.pending[base + edge.from as usize] += 1);
        }
        for launch in &plan.launches {
            // Messages come after the collectives.
            let meetings = if launch.calls.is_empty() { launch.halves.len() as u32 } else { 1 };
            self.pending[base + launch.arrive as usize] += meetings;
        }
        let idle = (0..plan.nodes.len() as u32).filter(|node| self.pending[base + *node as usize] == 0);
        self.ready.extend(idle.map(|node| (rank, node)));
    }

    fn run(&mut self) {
        while let Some((rank, node)) = self.ready.pop() {
            let plan = self.trace.plan(rank);
            let limit = self.limits[self.base[rank as usize] + node as usize];
            let kind = plan.nodes[node as usize].kind;
            // Read off the times, so that slow-downs and durations of single ranks are in.
            let ready = plan.edges(node).iter().map(|edge| self.time(rank, edge.from) + edge.offset).max();
            let own = match kind {
                NodeKind::Compute { .. } => self.time(rank, node) - ready.unwrap_or_default(),
                _ => SimTime::ZERO,
            };
            for edge in plan.edges(node) {
                self.lower(rank, edge.from, limit - own - edge.offset);
            }
            if let NodeKind::End(number) = kind {
                self.leave(rank, number, limit);
            }
        }
    }

    fn time(&self, rank: u32, node: u32) -> SimTime {
        self.times[self.base[rank as usize] + node as usize]
    }

    /// One more of what waits for a moment is known.
    fn lower(&mut self, rank: u32, node: u32, limit: SimTime) {
        let at = self.base[rank as usize] + node as usize;
        self.limits[at] = self.limits[at].min(limit);
        self.pending[at] -= 1;
        if self.pending[at] == 0 {
            self.ready.push((rank, node));
        }
    }

    /// The latest end of a launch is known: its meetings learn it.
    fn leave(&mut self, rank: u32, number: u32, limit: SimTime) {
        let trace = self.trace;
        let launch = &trace.plan(rank).launches[number as usize];
        let comm = trace.comm_of(rank, launch);
        let me = trace.members(comm).iter().position(|member| *member == rank).expect("a member");
        for (half, sequence) in &launch.halves {
            let (source, destination) = if half.is_send { (me as u32, half.peer) } else { (half.peer, me as u32) };
            let meeting = Meeting::Message { comm, source, destination, sequence: *sequence };
            self.learn(meeting, usize::from(!half.is_send), limit);
        }
        for index in 0..launch.calls.len() as u64 {
            self.learn(Meeting::Call { comm, sequence: launch.first_call + index }, me, limit);
        }
    }

    fn learn(&mut self, meeting: Meeting, member: usize, limit: SimTime) {
        let open = match self.open.entry(meeting) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let (pending, members) = match meeting {
                    Meeting::Message { .. } => (2, 2),
                    Meeting::Call { comm, sequence } => {
                        let members = self.trace.members(comm).len();
                        (members as u32 + continued(self.trace, comm, sequence), members)
                    }
                };
                entry.insert(Open { pending, limits: vec![SimTime::MAX; members] })
            }
        };
        open.limits[member] = open.limits[member].min(limit);
        open.pending -= 1;
        if open.pending == 0 {
            let open = self.open.remove(&meeting).expect("just seen");
            match meeting {
                Meeting::Message { comm, source, destination, sequence } => {
                    self.close_message(comm, source, destination, sequence, &open.limits);
                }
                Meeting::Call { comm, sequence } => self.close_call(comm, sequence, &open.limits),
            }
        }
    }

    fn close_message(&mut self, comm: u32, source: u32, destination: u32, sequence: u64, limits: &[SimTime]) {
        let trace = self.trace;
        let members = trace.members(comm);
        let (from, to) = (members[source as usize], members[destination as usize]);
        let side = |at: u32, rank: u32, other: u32, (peer, is_send): (u32, bool)| {
            let slot = trace.slot(comm, at);
            let (_, launch, place) = trace.peer(other, comm, trace.slot(comm, peer), (at, !is_send), sequence);
            debug_assert_eq!(launch, trace.plan(rank).halves[&(slot, peer, is_send)][sequence as usize]);
            (trace.side(rank, launch, place), place)
        };
        let (sender, send) = side(source, from, to, (destination, true));
        let (receiver, receive) = side(destination, to, from, (source, false));
        let bytes = trace.plan(from).launches[sender.launch as usize].halves[send].0.bytes();
        let (sent, received) = trace.message(comm, [sender, receiver], bytes, (SimTime::ZERO, SimTime::ZERO));
        let latest = (limits[0] - sent).min(limits[1] - received);
        for (side, half, member) in [(sender, send, source), (receiver, receive, destination)] {
            let latest = latest - trace.leads(side.rank, side.launch)[half];
            let launch = &trace.plan(side.rank).launches[side.launch as usize];
            if launch.calls.is_empty() {
                self.lower(side.rank, launch.arrive, latest);
            } else {
                self.learn(Meeting::Call { comm, sequence: launch.last_call() }, member as usize, latest);
            }
        }
    }

    fn close_call(&mut self, comm: u32, sequence: u64, limits: &[SimTime]) {
        let trace = self.trace;
        let (_, call) = trace.call(comm, sequence);
        for (at, latest) in self.latest_arrivals(comm, sequence, &call, limits).into_iter().enumerate() {
            let place = trace.place(comm, sequence, at);
            if place.is_first {
                let arrive = trace.plan(place.rank).launches[place.launch as usize].arrive;
                self.lower(place.rank, arrive, latest);
            } else {
                let latest = latest + trace.launched(&place, comm, sequence);
                self.learn(Meeting::Call { comm, sequence: sequence - 1 }, at, latest);
            }
        }
    }

    /// Latest arrival of each member, given everybody's latest end.
    fn latest_arrivals(&mut self, comm: u32, sequence: u64, call: &CollectiveCall, limits: &[SimTime]) -> Vec<SimTime> {
        let members = limits.len();
        if call.bytes == 0 {
            return limits.to_vec();
        }
        let shape = self.trace.shape(comm, sequence);
        if members > MAX_MATRIX {
            self.is_exact = false;
            let least = limits.iter().copied().min().unwrap_or_default();
            return vec![least - collective::uniform_cost(&shape, call); members];
        }
        let key = (shape.id, call.bytes, call.kind as u8, call.root);
        let matrix = self.matrices.get(&key).cloned().unwrap_or_else(|| {
            let rows = (0..members).flat_map(|from| {
                let mut arrivals = vec![NEVER; members];
                arrivals[from] = SimTime::ZERO;
                self.trace.completion(&shape, comm, sequence, &arrivals)
            });
            let matrix = Rc::new(rows.collect::<Vec<_>>());
            self.matrices.insert(key, Rc::clone(&matrix));
            matrix
        });
        let latest = |row: &[SimTime]| {
            // Far below 0: the member's end does not depend on this arrival.
            let bound =
                row.iter().zip(limits).filter(|(cost, _)| cost.0 > NEVER.0 / 2).map(|(cost, limit)| *limit - *cost);
            bound.min().unwrap_or(SimTime::MAX)
        };
        matrix.chunks(members).map(latest).collect()
    }

    fn slack(self) -> Result<Slack, SimError> {
        debug_assert!(self.open.is_empty(), "every meeting of a finished job closes");
        let mut by_rank = Vec::new();
        for (rank, base) in self.base.iter().enumerate() {
            let plan = self.trace.plan(rank as u32);
            let counts = plan
                .nodes
                .iter()
                .enumerate()
                .filter(|(_, node)| !matches!(node.kind, NodeKind::Begin | NodeKind::Arrive(_) | NodeKind::Leave));
            let slack = counts.map(|(at, node)| (node.op, self.limits[base + at] - self.times[base + at]));
            let mut own: Vec<_> = slack.collect();
            if let Some((op, _)) = own.iter().find(|(_, slack)| *slack < SimTime::ZERO) {
                return Err(SimError::Unavailable {
                    what: format!("slack (rank {rank} op {op} is late by the cost model)"),
                });
            }
            own.sort_unstable();
            own.dedup_by_key(|(op, _)| *op);
            by_rank.push(own);
        }
        Ok(Slack { by_rank, is_exact: self.is_exact })
    }
}

/// What of a launch comes after a collective, over all members: the next collective, or messages.
fn continued(trace: &JobTrace, comm: u32, sequence: u64) -> u32 {
    let after = |at: usize| {
        let place = trace.place(comm, sequence, at);
        let launch = &trace.plan(place.rank).launches[place.launch as usize];
        if launch.last_call() == sequence { launch.halves.len() as u32 } else { 1 }
    };
    (0..trace.members(comm).len()).map(after).sum()
}

impl Launch {
    /// Does the launch carry messages?
    pub(crate) fn has_messages(&self) -> bool {
        !self.halves.is_empty()
    }
}
