//! Who waits for whom when nothing moves.
//!
//! Ranks wait at *instances*: a collective or a message. An instance waits for its missing members; each of them stands at other
//! instances, is still running, or has ended. So a blocked job is a graph over instances, and the reason for all of it is a
//! missing call of an ended rank or a cycle. Those come first.

use super::Simulation;
use super::error::{Mismatch, SimError};
use super::program::Program;
use super::role::{LaunchState, Role, Slot};
use super::signature::Call;
use crate::graph::op::{Op, OpKind};
use crate::ids::{Rank, StreamId};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// Ranks that wait at one collective or message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Blocked {
    /// Lowest rank that waits.
    pub rank: Rank,
    /// All ranks that wait, ascending.
    pub waiting: Vec<Rank>,
    /// Index of the op in the program of `rank`.
    pub op: u32,
    /// Stream of `rank`.
    pub stream: StreamId,
    /// Communicator of the simulation.
    pub communicator: u32,
    /// Its members in group-rank order.
    pub members: Vec<u32>,
    /// Which collective, `Send` or `Recv`.
    pub call: String,
    /// Collectives of the communicator (messages of the ordered pair) before this one.
    pub sequence: u64,
    /// Payload as the call states it.
    pub bytes: u64,
    /// Element type.
    pub dtype: String,
    /// Members that have not come, ascending.
    pub missing: Vec<Rank>,
    /// Those of them whose programs have ended: they will never come.
    pub ended: Vec<Rank>,
    /// Those of them whose programs have not ended but do not have the call any more: they will never come either.
    pub never: Vec<Rank>,
    /// Those of them that have died.
    pub dead: Vec<Rank>,
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, op, call, sequence, communicator, bytes, dtype, .. } = self;
        let waiting: Vec<u32> = self.waiting.iter().map(|rank| rank.0).collect();
        let missing: Vec<u32> = self.missing.iter().map(|rank| rank.0).collect();
        write!(
            f,
            "rank {rank} at op {op} ({} waiting: {}) in {call} number {sequence} of communicator {communicator} ({} ranks, \
             {bytes} bytes, {dtype}) waits for rank {}",
            waiting.len(),
            list(&waiting),
            self.members.len(),
            list(&missing)
        )?;
        let reasons =
            [(&self.dead, "dead"), (&self.ended, "ended without the call"), (&self.never, "never makes the call")];
        for (ranks, what) in reasons {
            if !ranks.is_empty() {
                let plain: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
                write!(f, "; {what}: {}", list(&plain))?;
            }
        }
        Ok(())
    }
}

/// Ranks as ranges, cut after eight.
pub(crate) fn list(ranks: &[u32]) -> String {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let runs: Vec<&[u32]> = sorted.chunk_by(|a, b| a + 1 == *b).collect();
    let show = |run: &&[u32]| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    let mut text = runs.iter().take(8).map(show).collect::<Vec<_>>().join(",");
    if runs.len() > 8 {
        text.push_str(",… (");
        text.push_str(&ranks.len().to_string());
        text.push_str(" in all)");
    }
    text
}

/// What identifies an instance: communicator, then source and destination of a message.
type Key = (u32, Option<(u32, u32)>);

impl Simulation {
    /// Everything that waits for other ranks. Reasons first: a call that an ended rank never made, or the members of a cycle.
    pub fn blocked(&self) -> Vec<Blocked> {
        let mut found = BTreeMap::new();
        for role in &self.roles {
            for (at, slot) in role.slots.iter().enumerate() {
                self.blocked_at(role, at, slot, &mut found);
            }
        }
        let mut found: Vec<Blocked> = found.into_values().collect();
        for blocked in &mut found {
            self.complete(blocked);
        }
        reasons_first(found)
    }

    fn blocked_at(&self, role: &Role, at: usize, slot: &Slot, found: &mut BTreeMap<Key, Blocked>) {
        let Some((group, launch)) = slot.active else { return };
        let program = &self.programs[role.program];
        let state = &role.groups[&group].launches[launch as usize];
        if state.calls_pending > 0 {
            self.blocked_calls(role, at, program, (group, launch), state, found);
        }
        if state.messages_pending > 0 {
            self.blocked_messages(role, at, program, (group, launch), state, found);
        }
    }

    fn blocked_calls(
        &self,
        role: &Role,
        at: usize,
        program: &Program,
        (group, launch): (u32, u32),
        state: &LaunchState,
        found: &mut BTreeMap<Key, Blocked>,
    ) {
        let definition = &program.group(group).launches[launch as usize];
        let call = &definition.calls[state.num_posted - 1];
        for (rank, comm) in role.ranks.iter().zip(role.comms(at, &self.network)) {
            let completed = self.network.completed(comm);
            // A dead rank may have come to a call that never ends because of it.
            if completed >= role.slots[at].calls || self.is_dead(Rank(*rank)) {
                continue;
            }
            let blocked = found.entry((comm, None)).or_insert_with(|| Blocked {
                rank: Rank(*rank),
                waiting: Vec::new(),
                op: call.op,
                stream: definition.streams[0],
                communicator: comm,
                members: self.network.members(comm).to_vec(),
                call: format!("{:?}", call.kind),
                sequence: self.network.ops(comm),
                bytes: call.bytes(),
                dtype: format!("{:?}", call.dtype),
                missing: Vec::new(),
                ended: Vec::new(),
                never: Vec::new(),
                dead: Vec::new(),
            });
            blocked.add(*rank, call.op, definition.streams[0]);
        }
    }

    fn blocked_messages(
        &self,
        role: &Role,
        at: usize,
        program: &Program,
        (group, launch): (u32, u32),
        state: &LaunchState,
        found: &mut BTreeMap<Key, Blocked>,
    ) {
        let definition = &program.group(group).launches[launch as usize];
        let pending = role.slots[at].wiring.spread(&state.messages);
        let waiting = role.ranks.iter().zip(role.comms(at, &self.network)).zip(pending).filter(|(_, left)| *left > 0);
        for ((rank, comm), _) in waiting {
            if self.is_dead(Rank(*rank)) {
                continue;
            }
            let me = self.network.group_rank(comm, *rank);
            for half in &definition.halves {
                let (source, destination) = if half.is_send { (me, half.peer) } else { (half.peer, me) };
                let waiting = self.network.waiting_half(comm, source, destination);
                let Some((_, sequence)) = waiting.filter(|(is_send, _)| *is_send == half.is_send) else { continue };
                let members = self.network.members(comm);
                found.entry((comm, Some((source, destination)))).or_insert_with(|| Blocked {
                    rank: Rank(*rank),
                    waiting: vec![Rank(*rank)],
                    op: half.op,
                    stream: definition.streams[0],
                    communicator: comm,
                    members: members.to_vec(),
                    call: if half.is_send { "Send" } else { "Recv" }.to_owned(),
                    sequence,
                    bytes: half.bytes(),
                    dtype: format!("{:?}", half.dtype),
                    missing: vec![Rank(members[half.peer as usize])],
                    ended: Vec::new(),
                    never: Vec::new(),
                    dead: Vec::new(),
                });
            }
        }
    }

    /// Sorts the ranks that wait and fills in those that do not.
    fn complete(&self, blocked: &mut Blocked) {
        blocked.waiting.sort_unstable();
        let comm = blocked.communicator;
        if blocked.missing.is_empty() {
            let members = self.network.members(comm).iter().enumerate();
            let members = members.filter(|(at, _)| self.network.is_present(comm, *at as u32));
            let members = members.map(|(_, rank)| Rank(*rank));
            blocked.missing = members.filter(|rank| blocked.waiting.binary_search(rank).is_err()).collect();
            blocked.missing.sort_unstable();
        }
        let (dead, alive): (Vec<Rank>, Vec<Rank>) = blocked.missing.iter().partition(|rank| self.is_dead(**rank));
        blocked.dead = dead;
        let (ended, running): (Vec<Rank>, Vec<Rank>) = alive.into_iter().partition(|rank| self.has_rank_ended(*rank));
        blocked.ended = ended;
        let never = running.into_iter().filter(|rank| !self.may_come(*rank, blocked));
        blocked.never = never.collect();
    }

    /// Does a rank that has not ended have the call still before it? Known of virtual ranks without live ones beside them,
    /// because their programs are all there; all others may come.
    fn may_come(&self, rank: Rank, blocked: &Blocked) -> bool {
        let Some(graph) = self.graph.as_ref().filter(|_| self.live.is_empty()) else { return true };
        let Some(slot) = graph.rank_slots(rank).iter().position(|own| *own == blocked.communicator) else {
            return false;
        };
        let waits_for_message = blocked.call == "Send" || blocked.call == "Recv";
        let waiting = blocked.members.iter().position(|member| *member == blocked.rank.0);
        let is_such = |op: &Op| match op.kind {
            OpKind::Collective { slot: own, .. } => !waits_for_message && own.index() == slot,
            OpKind::PointToPoint { slot: own, is_send, peer, .. } => {
                let is_other_half = is_send == (blocked.call == "Recv") && Some(peer as usize) == waiting;
                waits_for_message && own.index() == slot && is_other_half
            }
            _ => false,
        };
        let calls = graph.template(graph.rank_template(rank)).iter().filter(is_such).count();
        calls as u64 > blocked.sequence
    }

    /// The mismatch of the lowest communicator that has one, or of the lowest pair whose message halves do not fit.
    pub(super) fn find_mismatch(&self) -> Option<SimError> {
        if let Some(comm) = self.network.mismatched {
            return Some(self.mismatch(comm));
        }
        self.network.broken.iter().min_by_key(|(key, _)| *key).map(|(_, error)| error.clone())
    }

    fn mismatch(&self, comm: u32) -> SimError {
        let members = self.network.members(comm);
        // Variants in order of their lowest group rank.
        let mut variants: Vec<(Call, Vec<Rank>)> = Vec::new();
        for rank in members {
            let Some(call) = self.posted_call(comm, *rank) else { continue };
            match variants.iter_mut().find(|(other, _)| other.matches(&call)) {
                Some((_, ranks)) => ranks.push(Rank(*rank)),
                None => variants.push((call, vec![Rank(*rank)])),
            }
        }
        // Stable: of equally frequent variants the first stays first.
        variants.sort_by_key(|(_, ranks)| Reverse(ranks.len()));
        let mut variants = variants.into_iter();
        let (majority, majority_ranks) = variants.next().expect("a mismatch has two variants");
        let (minority, minority_ranks) = variants.next_back().expect("a mismatch has two variants");
        SimError::Mismatch(Box::new(Mismatch {
            communicator: comm,
            members: members.to_vec(),
            sequence: self.network.ops(comm),
            majority_op: majority.op,
            majority: majority.signature(),
            majority_ranks,
            minority_op: minority.op,
            minority: minority.signature(),
            minority_ranks,
        }))
    }

    /// What a rank has posted on a communicator's open collective.
    fn posted_call(&self, comm: u32, rank: u32) -> Option<Call> {
        let place = self.places[rank as usize];
        let role = self.roles.get(place.role as usize)?;
        let has_comm = |slot: &usize| role.comms(*slot, &self.network)[place.at as usize] == comm;
        let slot = &role.slots[(0..role.slots.len()).find(has_comm)?];
        let (group, launch) = slot.active?;
        let state = &role.groups[&group].launches[launch as usize];
        let has_posted = state.calls_pending > 0 && slot.calls > self.network.completed(comm);
        let calls = &self.programs[role.program].group(group).launches[launch as usize].calls;
        has_posted.then(|| calls[state.num_posted - 1])
    }

    fn has_rank_ended(&self, rank: Rank) -> bool {
        let role = self.roles.get(self.places[rank.index()].role as usize);
        role.is_some_and(|role| role.is_finished(&self.programs[role.program]))
    }
}

impl Blocked {
    /// Will a member never make the call?
    #[must_use]
    pub fn is_hopeless(&self) -> bool {
        !self.dead.is_empty() || !self.ended.is_empty() || !self.never.is_empty()
    }

    fn add(&mut self, rank: u32, op: u32, stream: StreamId) {
        self.waiting.push(Rank(rank));
        if rank < self.rank.0 {
            (self.rank, self.op, self.stream) = (Rank(rank), op, stream);
        }
    }
}

/// Puts calls that will never be made first; without one, the shortest cycle through the first instance that lies on one.
fn reasons_first(mut found: Vec<Blocked>) -> Vec<Blocked> {
    let order: Vec<usize> = if found.iter().any(Blocked::is_hopeless) {
        let mut order: Vec<usize> = (0..found.len()).filter(|at| found[*at].is_hopeless()).collect();
        order.sort_by_key(|at| found[*at].dead.is_empty());
        order
    } else {
        shortest_cycle(&found)
    };
    let mut place = vec![usize::MAX; found.len()];
    order.iter().enumerate().for_each(|(position, at)| place[*at] = position);
    let mut keyed: Vec<(usize, Blocked)> = place.into_iter().zip(found.drain(..)).collect();
    keyed.sort_by_key(|(place, _)| *place);
    keyed.into_iter().map(|(_, blocked)| blocked).collect()
}

/// The shortest cycle through the first of these that lies on one, in order of who waits for whom; empty without a cycle.
pub(crate) fn shortest_cycle(found: &[Blocked]) -> Vec<usize> {
    let mut stands_at: BTreeMap<Rank, Vec<usize>> = BTreeMap::new();
    for (at, blocked) in found.iter().enumerate() {
        blocked.waiting.iter().for_each(|rank| stands_at.entry(*rank).or_default().push(at));
    }
    let next: Vec<Vec<usize>> = found
        .iter()
        .map(|blocked| {
            let mut next: Vec<usize> =
                blocked.missing.iter().filter_map(|rank| stands_at.get(rank)).flatten().copied().collect();
            next.sort_unstable();
            next.dedup();
            next
        })
        .collect();
    on_cycle(&next).map_or_else(Vec::new, |start| cycle_through(start, &next))
}

/// Lowest node on any cycle: what is left when nodes without successors are taken away again and again, then those without
/// predecessors.
fn on_cycle(next: &[Vec<usize>]) -> Option<usize> {
    let mut back = vec![Vec::new(); next.len()];
    next.iter().enumerate().for_each(|(from, to)| to.iter().for_each(|to| back[*to].push(from)));
    let mut is_gone = vec![false; next.len()];
    for (forward, backward) in [(next, &back[..]), (&back[..], next)] {
        let mut left: Vec<usize> = forward.iter().map(|to| to.iter().filter(|to| !is_gone[**to]).count()).collect();
        let mut ready: Vec<usize> = (0..next.len()).filter(|node| !is_gone[*node] && left[*node] == 0).collect();
        while let Some(node) = ready.pop() {
            is_gone[node] = true;
            for from in backward[node].iter().filter(|from| !is_gone[**from]) {
                left[*from] -= 1;
                if left[*from] == 0 {
                    ready.push(*from);
                }
            }
        }
    }
    let on_some_cycle = |node: &usize| !is_gone[*node] && !cycle_through(*node, next).is_empty();
    (0..next.len()).find(on_some_cycle)
}

/// Nodes of a shortest cycle through `start`, in order; empty if there is none.
fn cycle_through(start: usize, next: &[Vec<usize>]) -> Vec<usize> {
    let mut from = vec![None; next.len()];
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for to in &next[node] {
            if *to == start {
                let mut cycle = vec![node];
                while let Some(before) = from[*cycle.last().expect("not empty")] {
                    cycle.push(before);
                }
                cycle.reverse();
                return cycle;
            }
            if from[*to].is_none() {
                from[*to] = Some(node);
                queue.push_back(*to);
            }
        }
    }
    Vec::new()
}
