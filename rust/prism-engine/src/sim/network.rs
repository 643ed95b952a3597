//! Where the ranks meet: communicators, the instance of a collective being gathered, halves of messages.
//!
//! A rank cannot post its next collective on a communicator before the previous one is complete, so one instance per
//! communicator is open at a time and its arrivals and ends live at fixed places of two tables.

use super::channel::{Channels, Waiting};
use super::error::SimError;
use super::memo::Memo;
use super::perturbed::{NetworkRules, Origin};
use super::signature::{Call, Half};
use crate::collective::{self, CollectiveCall, CommShape, Scratch, ShapePool};
use crate::perturb::When;
use crate::profile::Profile;
use crate::units::SimTime;
use std::sync::Arc;

/// Latest end of communication. Between two communications a rank adds less than a quarter of the range
/// ([`super::program`]), so no time of a simulation that keeps this overflows.
const MAX_TIME: SimTime = SimTime(i64::MAX / 2);

/// Ports of one role that have a communicator in one slot.
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
    shape: Option<Arc<CommShape>>,
    /// Group ranks that arrive by themselves, if not all do (the others are absent).
    present: Option<Vec<u32>>,
    /// Ascending by role and slot (ranks of one role may have the communicator in different slots).
    pub(super) parts: Vec<Part>,
    /// Ports that have posted the open collective.
    posted: u32,
    /// Collectives complete, fused ones counted once.
    pub(super) completed: u64,
    /// The same, each of the fused ones counted.
    pub(super) ops: u64,
    call: Option<Call>,
    /// Members have posted different calls: the open collective never completes.
    is_mismatched: bool,
    memo: Memo,
    /// Iteration of the open collective (the latest, if members disagree).
    iteration: u32,
    /// Perturbations that may change it, if they have been looked for.
    reach: Option<u64>,
    /// Those in force for `shape` and `memo`.
    rules: u64,
}

impl Comm {
    fn expected(&self) -> u32 {
        self.present.as_ref().map_or(self.members.len(), Vec::len) as u32
    }

    /// Takes note of the perturbations in force when the last member has come.
    fn follow(&mut self, rules: &NetworkRules, arrivals: &[SimTime]) {
        let time = arrivals.iter().copied().max().unwrap_or_default();
        let reach = *self.reach.get_or_insert_with(|| rules.reach(&self.members));
        let in_force = rules.rules().network_state(When { iteration: self.iteration, time }) & reach;
        if std::mem::replace(&mut self.rules, in_force) != in_force {
            self.shape = None;
            self.memo = Memo::default();
        }
    }

    /// Group rank of a member.
    pub(super) fn is_present(&self, group_rank: u32) -> bool {
        self.present.as_ref().is_none_or(|present| present.binary_search(&group_rank).is_ok())
    }
}

/// A half of a message has ended on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed {
    pub(super) rank: u32,
    pub(super) slot: u32,
    pub(super) end: SimTime,
}

/// What a role cannot do before its lanes or its ports have been told apart further.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    /// Post the next launch of a slot: some lanes may have no port there.
    Post { role: u32, slot: u32 },
    /// End the launch of a slot: ports of one lane have ended at different times.
    End { role: u32, slot: u32 },
}

/// See the module's documentation.
pub(super) struct Network {
    profile: Profile,
    pub(super) rules: Option<NetworkRules>,
    shapes: ShapePool,
    pub(super) comms: Vec<Comm>,
    arrivals: Vec<SimTime>,
    ends: Vec<SimTime>,
    channels: Channels,
    scratch: Scratch,
    /// Parts whose collective has completed, not yet told to their roles.
    pub(super) done: Vec<Part>,
    /// Halves that have ended, not yet told.
    pub(super) landed: Vec<Landed>,
    /// Not yet served.
    pub(super) requests: Vec<Request>,
    /// Messages whose halves do not fit and times out of range, by communicator and pair.
    pub(super) broken: Vec<((u32, u32, u32), SimError)>,
    /// Lowest communicator whose members have posted different calls.
    pub(super) mismatched: Option<u32>,
}

impl Network {
    pub(super) fn new(profile: Profile, rules: Option<NetworkRules>) -> Self {
        Self {
            rules,
            shapes: ShapePool::new(profile.clone()),
            profile,
            comms: Vec::new(),
            arrivals: Vec::new(),
            ends: Vec::new(),
            channels: Channels::default(),
            scratch: Scratch::default(),
            done: Vec::new(),
            landed: Vec::new(),
            requests: Vec::new(),
            broken: Vec::new(),
            mismatched: None,
        }
    }

    /// Adds a communicator. `present` are the group ranks that will arrive, if the others are absent.
    pub(super) fn add_comm(&mut self, members: Arc<[u32]>, present: Option<Vec<u32>>) -> u32 {
        let comm = self.comms.len() as u32;
        let base = self.arrivals.len();
        self.arrivals.resize(base + members.len(), SimTime::ZERO);
        self.ends.resize(base + members.len(), SimTime::ZERO);
        self.comms.push(Comm {
            members,
            base,
            shape: None,
            present,
            parts: Vec::new(),
            posted: 0,
            completed: 0,
            ops: 0,
            call: None,
            is_mismatched: false,
            memo: Memo::default(),
            iteration: 0,
            reach: None,
            rules: 0,
        });
        comm
    }

    /// Group rank of a member. O(members).
    pub(super) fn group_rank(&self, comm: u32, rank: u32) -> u32 {
        let mut members = self.comms[comm as usize].members.iter();
        members.position(|member| *member == rank).expect("only members have a slot for a communicator") as u32
    }

    /// Place of a member in the tables.
    pub(super) fn place(&self, comm: u32, rank: u32) -> u32 {
        self.comms[comm as usize].base as u32 + self.group_rank(comm, rank)
    }

    /// Adds a communicator in the state of `like`, member by member; its channels are made with its ports.
    pub(super) fn fork_comm(&mut self, like: u32, members: Arc<[u32]>) -> u32 {
        let comm = self.add_comm(members, None);
        let (known, new) = self.comms.split_at_mut(comm as usize);
        let (known, new) = (&known[like as usize], &mut new[0]);
        new.shape.clone_from(&known.shape);
        new.parts.clone_from(&known.parts);
        (new.posted, new.completed, new.ops) = (known.posted, known.completed, known.ops);
        new.call = known.call;
        (new.is_mismatched, new.iteration) = (known.is_mismatched, known.iteration);
        let (from, to) = (known.base..known.base + known.members.len(), new.base);
        self.arrivals.copy_within(from.clone(), to);
        self.ends.copy_within(from, to);
        comm
    }

    /// The channel of `comm` that is like channel `number` of the communicator it was forked from.
    pub(super) fn fork_channel(&mut self, number: u32, comm: u32) -> u32 {
        self.channels.fork(number, comm, &self.comms[comm as usize].members)
    }

    pub(super) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// First place of a communicator in the tables.
    pub(super) fn base(&self, comm: u32) -> u32 {
        self.comms[comm as usize].base as u32
    }

    /// The next collective begins for these members when the last has ended for them.
    pub(super) fn arrive_again(&mut self, places: &[u32]) {
        for place in places {
            self.arrivals[*place as usize] = self.ends[*place as usize];
        }
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
    pub(super) fn post(&mut self, comm: u32, count: u32, call: &Call, iteration: u32) {
        let state = &mut self.comms[comm as usize];
        state.iteration = state.iteration.max(iteration);
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
        if let Some(rules) = &self.rules {
            state.follow(rules, arrivals);
        }
        let bytes = call.buffer_bytes(state.members.len() as u64);
        let call = CollectiveCall { kind: call.kind, bytes, root: call.root, ops: call.ops };
        let ends = &mut self.ends[range];
        let new_shape = || match &self.rules {
            Some(rules) if state.rules != 0 => {
                Arc::new(CommShape::changed(&state.members, &self.profile, rules.rules(), state.rules))
            }
            _ => self.shapes.shape(&state.members),
        };
        let shape = state.shape.get_or_insert_with(new_shape);
        if let Some(refusal) = shape.refusal(call.kind) {
            self.broken.push(((comm, 0, 0), SimError::invalid(format!("communicator {comm}: {refusal}"))));
            return;
        }
        let quick = collective::quick_completion(shape, &call, arrivals, ends, &mut self.scratch);
        let latest = quick.or_else(|| state.memo.recall(&call, arrivals, ends)).unwrap_or_else(|| {
            collective::completion(shape, &call, arrivals, ends, &mut self.scratch);
            state.memo.keep(call, arrivals, ends)
        });
        if latest > MAX_TIME {
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return;
        }
        if let Some(rules) = &mut self.rules
            && rules.kills(state.members.iter().copied().zip(ends.iter().copied()))
        {
            return;
        }
        state.call = None;
        state.posted = 0;
        state.completed += 1;
        state.ops += u64::from(call.ops);
        self.done.extend_from_slice(&state.parts);
    }

    /// So many channels will be asked for, some of them new.
    pub(super) fn expect_channels(&mut self, count: usize) {
        self.channels.reserve(count);
    }

    /// The channel of half a message of the member at `place`, to be used for all further ones to or from the same peer.
    pub(super) fn channel(&mut self, comm: u32, place: u32, half: &Half) -> u32 {
        let state = &self.comms[comm as usize];
        let me = place - state.base as u32;
        let (source, destination) = if half.is_send { (me, half.peer) } else { (half.peer, me) };
        let rank = |group_rank: u32| state.members[group_rank as usize];
        let is_alone = !state.is_present(half.peer);
        self.channels.get((comm, source, destination), (rank(source), rank(destination)), is_alone)
    }

    /// A rank posts half of a message at `time`.
    pub(super) fn post_half(
        &mut self,
        channel: u32,
        (rank, slot): (u32, u32),
        half: &Half,
        origin: Origin,
        time: SimTime,
    ) {
        let waiting = Waiting { rank, slot, time, bytes: half.bytes(), is_send: half.is_send, origin };
        let channel = self.channels.at(channel);
        let Some((send, receive)) = channel.meet(waiting) else { return };
        if send.bytes != receive.bytes {
            self.broken.push((channel.key, channel.mismatch(&send, &receive)));
            return;
        }
        let (source, destination) = channel.ranks;
        let (send_end, receive_end) = match &self.rules {
            None => collective::message(&self.profile, source, destination, send.bytes, send.time, receive.time),
            Some(rules) => {
                let members = self.comms[channel.key.0 as usize].members.len();
                rules.message(&self.profile, channel.ranks, members, (&send, &receive))
            }
        };
        if send_end.max(receive_end) > MAX_TIME {
            self.broken.push((channel.key, out_of_range(channel.key.0)));
            return;
        }
        let halves = [(send, send_end, true), (receive, receive_end, false)];
        if let Some(rules) = &mut self.rules
            && let Some(left) = rules.left_over([(send, send_end), (receive, receive_end)])
        {
            channel.orphan(left);
            return;
        }
        for (half, end, is_send) in halves {
            if !channel.is_alone || is_send == waiting.is_send {
                self.landed.push(Landed { rank: half.rank, slot: half.slot, end });
            }
        }
    }

    /// The half of an ordered pair's messages that waits first: whether it sends, and how many messages were before.
    pub(super) fn waiting_half(&self, comm: u32, source: u32, destination: u32) -> Option<(bool, u64)> {
        self.channels.waiting((comm, source, destination))
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
    SimError::too_long(format!("communication on communicator {comm} would end after more than 53 days"))
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
