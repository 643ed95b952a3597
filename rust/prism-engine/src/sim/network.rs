//! Where the ranks meet: communicators, the instance of a collective being gathered, halves of messages.
//!
//! A rank cannot post its next collective on a communicator before the previous one is complete, so one instance per
//! communicator is open at a time and its arrivals and ends live at fixed places of two tables.

use super::error::SimError;
use super::signature::{Call, Half};
use super::vector;
use crate::collective::{self, CollectiveCall, CommShape, Scratch};
use crate::profile::Profile;
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Latest end of communication. Between two communications a rank adds less than a quarter of the range
/// ([`super::program`]), so no time of a simulation that keeps this overflows.
const MAX_TIME: SimTime = SimTime(i64::MAX / 2);

/// Ranks of one role that have a communicator in one slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) role: u32,
    pub(super) slot: u32,
    pub(super) count: u32,
}

impl Part {
    pub(super) fn key(&self) -> (u32, u32) {
        (self.role, self.slot)
    }
}

/// A communicator and its open collective.
#[derive(Debug)]
pub(super) struct Comm {
    pub(super) members: Arc<[u32]>,
    base: usize,
    shape: Option<Box<CommShape>>,
    /// Group ranks that arrive by themselves, if not all do (the others are absent).
    present: Option<Vec<u32>>,
    /// Ascending by role and slot (ranks of one role may have the communicator in different slots).
    pub(super) parts: Vec<Part>,
    /// Ranks that have posted the open collective.
    posted: u32,
    /// Collectives complete.
    pub(super) completed: u64,
    call: Option<Call>,
    /// Members have posted different calls: the open collective never completes.
    is_mismatched: bool,
    /// The call of the known arrivals and ends, and the latest of these ends.
    known: Option<CollectiveCall>,
    latest: SimTime,
}

impl Comm {
    fn expected(&self) -> u32 {
        self.present.as_ref().map_or(self.members.len(), Vec::len) as u32
    }

    /// Group rank of a member.
    pub(super) fn is_present(&self, group_rank: u32) -> bool {
        self.present.as_ref().is_none_or(|present| present.binary_search(&group_rank).is_ok())
    }
}

/// A half of a message waiting for the other.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    rank: u32,
    slot: u32,
    time: SimTime,
    bytes: u64,
    is_send: bool,
}

/// Messages of one ordered pair of one communicator. Only halves of one side wait at a time.
#[derive(Debug, Default)]
struct Channel {
    waiting: VecDeque<Waiting>,
    matched: u64,
    is_broken: bool,
}

/// A half of a message has ended on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed {
    pub(super) rank: u32,
    pub(super) slot: u32,
    pub(super) end: SimTime,
}

/// See the module's documentation.
pub(super) struct Network {
    profile: Profile,
    pub(super) comms: Vec<Comm>,
    /// Communicator and group rank of each rank's memberships, ascending by communicator.
    memberships: Vec<Vec<(u32, u32)>>,
    arrivals: Vec<SimTime>,
    ends: Vec<SimTime>,
    /// Arrivals and ends of each communicator's previous collective that was computed, at the same places.
    known_arrivals: Vec<SimTime>,
    known_ends: Vec<SimTime>,
    channels: FxHashMap<(u32, u32, u32), Channel>,
    scratch: Scratch,
    /// Parts whose collective has completed, not yet told to their roles.
    pub(super) done: Vec<Part>,
    /// Halves that have ended, not yet told.
    pub(super) landed: Vec<Landed>,
    /// Messages whose halves do not fit and times out of range, by communicator and pair.
    pub(super) broken: Vec<((u32, u32, u32), SimError)>,
    /// Lowest communicator whose members have posted different calls.
    pub(super) mismatched: Option<u32>,
}

impl Network {
    pub(super) fn new(profile: Profile, world_size: u32) -> Self {
        Self {
            profile,
            comms: Vec::new(),
            memberships: vec![Vec::new(); world_size as usize],
            arrivals: Vec::new(),
            ends: Vec::new(),
            known_arrivals: Vec::new(),
            known_ends: Vec::new(),
            channels: FxHashMap::default(),
            scratch: Scratch::default(),
            done: Vec::new(),
            landed: Vec::new(),
            broken: Vec::new(),
            mismatched: None,
        }
    }

    /// Adds a communicator. `present` are the group ranks that will arrive, if the others are absent.
    pub(super) fn add_comm(&mut self, members: Arc<[u32]>, present: Option<Vec<u32>>) -> u32 {
        let comm = self.comms.len() as u32;
        for (group_rank, rank) in members.iter().enumerate() {
            if present.as_ref().is_none_or(|present| present.binary_search(&(group_rank as u32)).is_ok()) {
                self.memberships[*rank as usize].push((comm, group_rank as u32));
            }
        }
        let base = self.arrivals.len();
        for table in [&mut self.arrivals, &mut self.ends, &mut self.known_arrivals, &mut self.known_ends] {
            table.resize(base + members.len(), SimTime::ZERO);
        }
        self.comms.push(Comm {
            members,
            base,
            shape: None,
            present,
            parts: Vec::new(),
            posted: 0,
            completed: 0,
            call: None,
            is_mismatched: false,
            known: None,
            latest: SimTime::ZERO,
        });
        comm
    }

    /// Group rank of a member that is present.
    pub(super) fn group_rank(&self, comm: u32, rank: u32) -> u32 {
        let memberships = &self.memberships[rank as usize];
        let at = memberships
            .binary_search_by_key(&comm, |(comm, _)| *comm)
            .expect("only members have a slot for a communicator");
        memberships[at].1
    }

    /// Place of a member in the tables.
    pub(super) fn place(&self, comm: u32, rank: u32) -> u32 {
        self.comms[comm as usize].base as u32 + self.group_rank(comm, rank)
    }

    pub(super) fn completed(&self, comm: u32) -> u64 {
        self.comms[comm as usize].completed
    }

    pub(super) fn ends(&self) -> &[SimTime] {
        &self.ends
    }

    pub(super) fn arrivals_mut(&mut self) -> &mut [SimTime] {
        &mut self.arrivals
    }

    /// `count` ranks have written their arrivals at the communicator's next collective.
    pub(super) fn post(&mut self, comm: u32, count: u32, call: &Call) {
        let state = &mut self.comms[comm as usize];
        state.posted += count;
        match &state.call {
            None => state.call = Some(*call),
            Some(first) if first.matches(call) => {}
            Some(_) => {
                state.is_mismatched = true;
                self.mismatched = Some(self.mismatched.map_or(comm, |lowest| lowest.min(comm)));
            }
        }
        if state.posted == state.expected() && !state.is_mismatched {
            self.complete(comm);
        }
    }

    fn complete(&mut self, comm: u32) {
        let state = &mut self.comms[comm as usize];
        let call = state.call.expect("posted");
        let range = state.base..state.base + state.members.len();
        let arrivals = &mut self.arrivals[range.clone()];
        if let Some(present) = &state.present {
            join_absent(arrivals, present);
        }
        let bytes = call.buffer_bytes(state.members.len() as u64);
        let call = CollectiveCall { kind: call.kind, bytes, root: call.root };
        let (known_arrivals, known_ends) =
            (&mut self.known_arrivals[range.clone()], &mut self.known_ends[range.clone()]);
        let ends = &mut self.ends[range];
        // Training repeats itself: the same call with everybody as early or late as before ends as before, only later.
        let lag = vector::lag(arrivals, known_arrivals).filter(|_| state.known == Some(call));
        // Written so that nothing overflows before it is refused.
        if lag.is_some_and(|lag| lag > MAX_TIME - state.latest) {
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return;
        }
        if let Some(lag) = lag {
            vector::shift(ends, known_ends, lag);
        } else {
            let shape = state.shape.get_or_insert_with(|| Box::new(CommShape::new(&state.members, &self.profile)));
            collective::completion(shape, &call, arrivals, ends, &mut self.scratch);
            known_arrivals.copy_from_slice(arrivals);
            known_ends.copy_from_slice(ends);
            state.known = Some(call);
            state.latest = ends.iter().copied().max().unwrap_or_default();
        }
        if state.latest > MAX_TIME {
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return;
        }
        state.call = None;
        state.posted = 0;
        state.completed += 1;
        self.done.extend_from_slice(&state.parts);
    }

    /// A rank, whose place in the communicator is `place`, posts half of a message at `time`.
    pub(super) fn post_half(&mut self, comm: u32, (rank, place): (u32, u32), slot: u32, half: &Half, time: SimTime) {
        let me = place - self.comms[comm as usize].base as u32;
        let waiting = Waiting { rank, slot, time, bytes: half.bytes(), is_send: half.is_send };
        let (source, destination) = if half.is_send { (me, half.peer) } else { (half.peer, me) };
        if !self.comms[comm as usize].is_present(half.peer) {
            let (send_end, receive_end) = self.transfer(comm, source, destination, waiting.bytes, time, time);
            let end = if half.is_send { send_end } else { receive_end };
            if end > MAX_TIME {
                self.broken.push(((comm, source, destination), out_of_range(comm)));
                return;
            }
            self.landed.push(Landed { rank, slot, end });
            return;
        }
        let key = (comm, source, destination);
        let channel = self.channels.entry(key).or_default();
        let meets = !channel.is_broken && channel.waiting.front().is_some_and(|other| other.is_send != half.is_send);
        if !meets {
            channel.waiting.push_back(waiting);
            return;
        }
        let other = channel.waiting.pop_front().expect("just seen");
        let (send, receive) = if half.is_send { (waiting, other) } else { (other, waiting) };
        if send.bytes != receive.bytes {
            channel.is_broken = true;
            let error = SimError::MessageMismatch {
                communicator: comm,
                source_rank: crate::ids::Rank(send.rank),
                destination_rank: crate::ids::Rank(receive.rank),
                sequence: channel.matched,
                sent_bytes: send.bytes,
                received_bytes: receive.bytes,
            };
            self.broken.push((key, error));
            return;
        }
        channel.matched += 1;
        let (send_end, receive_end) = self.transfer(comm, source, destination, send.bytes, send.time, receive.time);
        if send_end.max(receive_end) > MAX_TIME {
            self.broken.push((key, out_of_range(comm)));
            return;
        }
        self.landed.push(Landed { rank: send.rank, slot: send.slot, end: send_end });
        self.landed.push(Landed { rank: receive.rank, slot: receive.slot, end: receive_end });
    }

    fn transfer(
        &mut self,
        comm: u32,
        source: u32,
        destination: u32,
        bytes: u64,
        send: SimTime,
        receive: SimTime,
    ) -> (SimTime, SimTime) {
        let state = &mut self.comms[comm as usize];
        let (source, destination) = (state.members[source as usize], state.members[destination as usize]);
        collective::message(&self.profile, source, destination, bytes, send, receive)
    }

    /// The half of an ordered pair's messages that waits first: whether it sends, and how many messages were before.
    pub(super) fn waiting_half(&self, comm: u32, source: u32, destination: u32) -> Option<(bool, u64)> {
        let channel = self.channels.get(&(comm, source, destination))?;
        let front = channel.waiting.front()?;
        Some((front.is_send, channel.matched))
    }

    /// Ranks of role `from` now belong to the new role `to`, which has these communicators in the slot.
    pub(super) fn move_parts(&mut self, slot: u32, from: u32, to: u32, moved: &[(u32, u32)]) {
        for (comm, count) in moved {
            let parts = &mut self.comms[*comm as usize].parts;
            let at = parts.binary_search_by_key(&(from, slot), Part::key).expect("the role had the communicator");
            parts[at].count -= count;
            if parts[at].count == 0 {
                parts.remove(at);
            }
            // Roles get ever higher numbers, and slots are moved in order: the new part belongs at the end.
            parts.push(Part { role: to, slot, count: *count });
        }
    }
}

fn out_of_range(comm: u32) -> SimError {
    SimError::invalid(format!("communication on communicator {comm} would end after more than 53 days"))
}

/// Absent members arrive when the (last) present one does.
fn join_absent(arrivals: &mut [SimTime], present: &[u32]) {
    let own: Vec<SimTime> = present.iter().map(|group_rank| arrivals[*group_rank as usize]).collect();
    let Some(last) = own.iter().max() else { return };
    arrivals.fill(*last);
    for (group_rank, time) in present.iter().zip(&own) {
        arrivals[*group_rank as usize] = *time;
    }
}
