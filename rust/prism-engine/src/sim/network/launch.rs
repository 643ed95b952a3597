//! What follows what inside one launch: collectives, and messages in their turns ([`turns`]).

use super::super::evaluate::collective_call;
use super::super::program::Launch;
use super::super::signature::{Call, Half};
use super::super::wiring::Wiring;
use super::Network;
use crate::collective::turns::{self, Message, Turns};
use crate::collective::{self, CommShape};
use crate::cost::comm::{Link, nanoseconds};
use crate::perturb::When;
use crate::units::SimTime;
use std::sync::Arc;

impl Network {
    /// The next collective of a launch begins for these members when the last has ended for them. Its kernel need not be launched
    /// if that has been done.
    pub(in crate::sim) fn arrive_again(&mut self, wiring: &Wiring, next: &Call) {
        let earlier = |batch: u32| if next.continues { self.launch_time(batch, next) } else { SimTime::ZERO };
        let earlier: Vec<SimTime> = wiring.parts.iter().map(|(batch, _)| *batch).map(earlier).collect();
        wiring.copy_earlier(&self.ends, &mut self.arrivals, &earlier);
    }

    /// Time from a member's coming to a collective until it takes part.
    pub(in crate::sim) fn launch_time(&mut self, batch: u32, call: &Call) -> SimTime {
        let layout = self.layout(batch);
        collective::launch_time(&layout, &collective_call(call, layout.len()), &mut self.scratch)
    }

    /// The same for a message.
    pub(in crate::sim) fn message_launch(&self) -> SimTime {
        nanoseconds(self.profile.network.collective_launch_ns)
    }

    /// How a batch's communicators lie on the cluster.
    fn layout(&mut self, batch: u32) -> Arc<CommShape> {
        let state = &mut self.batches[batch as usize];
        let members = self.members.of(state.comms[0]);
        Arc::clone(state.layout.get_or_insert_with(|| self.shapes.shape(members)))
    }

    /// The turns of a launch's messages for the members at a position, the first of which comes at `time`.
    pub(in crate::sim) fn turns(&mut self, (batch, position): (u32, u32), launch: &Launch, time: SimTime) -> Turns {
        let layout = self.layout(batch);
        let members = self.members.of(self.batches[batch as usize].comms[0]);
        let me = members[position as usize];
        let occupancy = |half: &Half| {
            let other = members[half.peer as usize];
            let link = Link::port_towards(&self.profile, me, other);
            let Some(rules) = &self.rules else { return link.occupancy(half.bytes()) };
            let pair = if half.is_send { (me, other) } else { (other, me) };
            let when = When { iteration: launch.origin.iteration, time };
            let (bytes, change) = rules.on_message(pair, members.len(), launch.origin.num_peers, half.bytes(), when);
            change.apply(link).occupancy(bytes)
        };
        let message = |half: &Half| Message { peer: half.peer, is_send: half.is_send, occupancy: occupancy(half) };
        let messages: Vec<Message> = launch.halves.iter().map(message).collect();
        turns::turns(&layout, position, &messages)
    }
}
