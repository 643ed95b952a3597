//! Messages of a traced job: when each rank posted them, and who held them.

use super::trace::{Holder, JobTrace, Times};
use crate::collective;
use crate::collective::turns::{self, Message};
use crate::cost::comm::{Link, nanoseconds};
use crate::ids::SlotId;
use crate::perturb::When;
use crate::sim::starts_after;
use crate::units::SimTime;
use std::rc::Rc;

/// Launches whose turns are kept for use again.
const KEPT_LAUNCHES: usize = 4096;

/// One side of a message: a rank, its launch, and when it had its turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) rank: u32,
    pub(crate) launch: u32,
    pub(crate) posted: SimTime,
}

impl JobTrace {
    /// Ends of the two halves of a message between ranks of a communicator if they post it at `times`; the links are as they
    /// were when its sides (sender and receiver) really did.
    pub(crate) fn message(
        &self,
        comm: u32,
        [from, to]: [Side; 2],
        bytes: u64,
        times: (SimTime, SimTime),
    ) -> (SimTime, SimTime) {
        let Some(rules) = &self.rules else {
            return collective::message(&self.profile, from.rank, to.rank, bytes, times.0, times.1);
        };
        let launch = |side: Side| &self.plan(side.rank).launches[side.launch as usize];
        let when =
            When { iteration: launch(from).iteration.max(launch(to).iteration), time: from.posted.max(to.posted) };
        let (pair, members) = ((from.rank, to.rank), self.members(comm).len());
        let (bytes, change) = rules.on_message(pair, members, launch(from).num_peers(), bytes, when);
        collective::message_over(&self.profile, pair, bytes, times, change)
    }

    /// A rank's side of message number `at` of a launch.
    pub(crate) fn side(&self, rank: u32, launch: u32, at: usize) -> Side {
        Side { rank, launch, posted: self.start_of_messages(rank, launch) + self.leads(rank, launch)[at] }
    }

    /// The end of a launch's collectives, or its arrival without any.
    fn start_of_messages(&self, rank: u32, number: u32) -> SimTime {
        let launch = &self.plan(rank).launches[number as usize];
        if launch.calls.is_empty() {
            return self.arrival(rank, number);
        }
        let comm = self.comm_of(rank, launch);
        self.ends(comm, launch.last_call())[self.member(comm, rank)]
    }

    /// Group rank of a member.
    pub(crate) fn member(&self, comm: u32, rank: u32) -> usize {
        let mut members = self.members(comm).iter();
        members.position(|member| *member == rank).expect("a rank is a member of its communicators")
    }

    /// From the start of a launch's messages to the turn of each; less than 0 where collectives have launched the kernel.
    pub(crate) fn leads(&self, rank: u32, number: u32) -> Times {
        if let Some(known) = self.leads.borrow().get(&(rank, number)) {
            return Rc::clone(known);
        }
        let leads = Rc::new(self.fresh_leads(rank, number));
        let mut kept = self.leads.borrow_mut();
        if kept.len() >= KEPT_LAUNCHES {
            kept.clear();
        }
        kept.insert((rank, number), Rc::clone(&leads));
        leads
    }

    fn fresh_leads(&self, rank: u32, number: u32) -> Vec<SimTime> {
        let launch = &self.plan(rank).launches[number as usize];
        let started = starts_after(&launch.calls, nanoseconds(self.profile.network.collective_launch_ns));
        if !turns::has_turns(launch.halves.iter().map(|(half, _)| half.is_send)) {
            return vec![SimTime(-started.0); launch.halves.len()];
        }
        let comm = self.comm_of(rank, launch);
        let members = self.members(comm);
        let num_peers = launch.num_peers();
        let when = When { iteration: launch.iteration, time: self.start_of_messages(rank, number) };
        let messages = launch.halves.iter().map(|(half, _)| {
            let other = members[half.peer as usize];
            let link = Link::port_towards(&self.profile, rank, other);
            let occupancy = match &self.rules {
                None => link.occupancy(half.bytes()),
                Some(rules) => {
                    let pair = if half.is_send { (rank, other) } else { (other, rank) };
                    let (bytes, change) = rules.on_message(pair, members.len(), num_peers, half.bytes(), when);
                    change.apply(link).occupancy(bytes)
                }
            };
            Message { peer: half.peer, is_send: half.is_send, occupancy }
        });
        let me = self.member(comm, rank) as u32;
        let turns = turns::turns(&self.layout(comm), me, &messages.collect::<Vec<_>>());
        turns.leads.into_iter().map(|lead| lead - started).collect()
    }

    /// The other half of a message: its rank and launch, and its place there.
    pub(crate) fn peer(
        &self,
        rank: u32,
        comm: u32,
        slot: SlotId,
        (peer, is_send): (u32, bool),
        sequence: u64,
    ) -> (u32, u32, usize) {
        let members = self.members(comm);
        let other = members[peer as usize];
        let is_mine = |at: &usize| members[*at] == rank && self.slot(comm, *at as u32) == slot;
        let mine = (0..members.len()).find(is_mine).expect("a rank is a member of its communicators") as u32;
        let their_slot = self.slot(comm, peer);
        let launch = self.plan(other).halves[&(their_slot, mine, !is_send)][sequence as usize];
        let is_it =
            |(half, number): &(crate::sim::Half, u64)| (half.peer, half.is_send, *number) == (mine, !is_send, sequence);
        let halves = &self.plan(other).launches[launch as usize].halves;
        (other, launch, halves.iter().position(is_it).expect("the launch has the half"))
    }

    /// Who held a launch that ended at `end`, if message number `at` did.
    pub(super) fn message_holder(
        &self,
        comm: u32,
        (rank, number): (u32, u32),
        at: usize,
        end: SimTime,
    ) -> Option<Holder> {
        let launch = &self.plan(rank).launches[number as usize];
        let (half, sequence) = &launch.halves[at];
        let (other, their_launch, their_at) = self.peer(rank, comm, launch.slot, (half.peer, half.is_send), *sequence);
        let (mine, theirs) = (self.side(rank, number, at), self.side(other, their_launch, their_at));
        let sides = if half.is_send { [mine, theirs] } else { [theirs, mine] };
        let ends = self.message(comm, sides, half.bytes(), (sides[0].posted, sides[1].posted));
        if (if half.is_send { ends.0 } else { ends.1 }) != end {
            return None;
        }
        let later = if theirs.posted > mine.posted { theirs } else { mine };
        let held = &self.plan(later.rank).launches[later.launch as usize];
        if held.calls.is_empty() {
            let time = self.arrival(later.rank, later.launch);
            return Some(Holder { arrival: self.arrive(later.rank, later.launch), time, comm, is_message: true });
        }
        // The collectives before it.
        let start = self.start_of_messages(later.rank, later.launch);
        self.call_holder(comm, held.last_call(), later.rank, start).map(|holder| Holder { is_message: true, ..holder })
    }
}
