//! What follows what inside one launch: the part of an `ncclGroup` on one communicator.
//!
//! NCCL runs a group on a communicator as one kernel, whose launch is paid once. Its collectives come first; messages between
//! pairs only when they are through. Source: `ncclLaunchPrepare` in `src/enqueue.cc`. (It cuts a group into several kernels only
//! where the description of its work does not fit into its buffer, some thousand ops; that is not modelled.)
//!
//! Messages take turns in the order of NCCL's schedule ([`super::p2p::rounds`]): round by round, in which a rank sends to one
//! peer and receives from another, and again from the first round for peers that have more than one message. Source:
//! `scheduleP2pTasksToPlan`. All of them are under way at once on channels of their own, so that nobody waits for the peer of an
//! earlier message, but they share the rank's ports: one for sending and one for receiving, over NVLink and over the network.
//! So the *lead* of a message is what the messages before it take at its port, and
//!
//! ```text
//! message leaves = occupancy + max over both ranks of (start of the rank's messages + its lead)
//! ```
//!
//! If all come together and messages are of one size, this is the recurrence of ports that serve one message after the other;
//! otherwise messages end no later than by that recurrence, because a late peer holds up its own message only. No port
//! is ever faster than its bytes. What a rank sends to itself is a copy inside the device and passes no port.

use super::p2p::{BATCH, CHANNELS, channels_per_peer, schedule_group};
use super::shape::CommShape;
use crate::units::SimTime;

/// A message of a launch as its rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Group rank of the other end.
    pub peer: u32,
    /// Does the rank send it?
    pub is_send: bool,
    /// Time it occupies the rank's port.
    pub occupancy: SimTime,
}

/// When the messages of a launch have their turns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// From the start of the rank's messages to the turn of each, in the order they were given.
    pub leads: Vec<SimTime>,
    /// Time at the busiest port.
    pub busiest: SimTime,
}

/// Does the order matter: is there more than one message in a direction?
pub(crate) fn has_turns(is_send: impl Iterator<Item = bool>) -> bool {
    let mut count = [0, 0];
    is_send.for_each(|is_send| count[usize::from(is_send)] += 1);
    count.iter().any(|count| *count > 1)
}

/// The turns of the messages that group rank `me` of a communicator posts in one launch. O(messages x log messages).
#[must_use]
pub fn turns(shape: &CommShape, me: u32, messages: &[Message]) -> Turns {
    let mut turns = Turns { leads: vec![SimTime::ZERO; messages.len()], busiest: SimTime::ZERO };
    for is_send in [false, true] {
        let mut ports = Ports::default();
        for (round, at) in in_order(shape, me, messages, is_send) {
            let message = &messages[at];
            if message.peer != me {
                turns.leads[at] =
                    ports.serve(shape, shape.node[me as usize] == shape.node[message.peer as usize], round, message);
            }
        }
        turns.busiest = turns.busiest.max(ports.near).max(ports.far);
    }
    turns
}

/// Time spent so far at the two ports of one direction, and where in the channels the messages are.
#[derive(Default)]
struct Ports {
    near: SimTime,
    far: SimTime,
    batches: usize,
    batch: Option<(u32, u32)>,
}

impl Ports {
    /// The lead of the next message.
    fn serve(&mut self, shape: &CommShape, is_near: bool, (epoch, round): (u32, u32), message: &Message) -> SimTime {
        let batch = (epoch, round / shape.rounds.batch);
        if self.batch.replace(batch) != Some(batch) {
            self.batches += 1;
        }
        let port = if is_near { &mut self.near } else { &mut self.far };
        let before = *port;
        *port = SimTime(before.0.saturating_add(message.occupancy.0));
        if is_near || shape.tuned.is_none() {
            return before;
        }
        // Each wave of the channels shows the latency of the network once more.
        let wave = (self.batches - 1) * shape.rounds.channels_per_peer / CHANNELS;
        SimTime(before.0.saturating_add(shape.card.latency.0.saturating_mul(wave as i64)))
    }
}

/// Messages of one direction in the order of their turns: epoch and round, and the place in `messages`.
fn in_order(shape: &CommShape, me: u32, messages: &[Message], is_send: bool) -> Vec<((u32, u32), usize)> {
    let own = (0..messages.len()).filter(|at| messages[*at].is_send == is_send);
    let mut by_peer: Vec<(u32, usize)> = own.map(|at| (messages[at].peer, at)).collect();
    by_peer.sort_unstable();
    let position = |rank: u32| shape.position[rank as usize];
    let mut epoch = 0;
    let mut order: Vec<((u32, u32), usize)> = Vec::with_capacity(by_peer.len());
    for (number, (peer, at)) in by_peer.iter().enumerate() {
        let is_again = number.checked_sub(1).is_some_and(|before| by_peer[before].0 == *peer);
        epoch = if is_again { epoch + 1 } else { 0 };
        let (from, to) = if is_send { (me, *peer) } else { (*peer, me) };
        order.push(((epoch, shape.rounds.of(position(from), position(to))), *at));
    }
    order.sort_unstable();
    order
}

/// NCCL's schedule of messages, looked up by pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rounds {
    /// Neighbours that take turns together.
    size: u32,
    /// Place of a distance between groups of neighbours in the quadratic sequence.
    place: Vec<u32>,
    /// Rounds whose messages share a batch of work.
    batch: u32,
    channels_per_peer: usize,
}

impl Rounds {
    /// The schedule of a communicator with so many members on each node. O(members / 8).
    pub(crate) fn new(node_sizes: &[u32]) -> Self {
        let ranks = node_sizes.iter().sum::<u32>();
        let size = schedule_group(node_sizes) as u32;
        let groups = (ranks / size) as usize;
        let mut place = vec![0; groups];
        let modulus = groups.next_power_of_two();
        let (mut distance, mut next) = (0, 0);
        for step in 1..=modulus {
            if distance < groups {
                place[distance] = next;
                next += 1;
            }
            distance = (distance + step) % modulus;
        }
        let (batch, channels_per_peer) = (size.min(BATCH as u32), channels_per_peer(ranks as usize));
        Self { size, place, batch, channels_per_peer }
    }

    /// Round in which one ring position sends to another.
    pub(crate) fn of(&self, from: u32, to: u32) -> u32 {
        let (size, groups) = (self.size, self.place.len() as u32);
        let distance = (to / size + groups - from / size) % groups;
        self.place[distance as usize] * size + (to % size + size - from % size) % size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::p2p;

    #[test]
    fn rounds_are_those_of_the_schedule() {
        for node_sizes in [&[1][..], &[5], &[8], &[8, 8], &[8, 8, 8], &[4, 4, 4], &[6, 4], &[1; 9], &[8; 37]] {
            let rounds = Rounds::new(node_sizes);
            for (number, round) in p2p::rounds(node_sizes).iter().enumerate() {
                for (from, to) in round.iter().enumerate() {
                    assert_eq!(rounds.of(from as u32, *to as u32), number as u32, "{node_sizes:?}: {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn a_port_serves_one_message_of_a_peer_after_the_other() {
        let profile = crate::profile::Profile::builtin("h100-sxm").expect("built in");
        let shape = CommShape::new(&(0..16).collect::<Vec<_>>(), &profile);
        let send = |peer, ns| Message { peer, is_send: true, occupancy: SimTime::from_ns(ns) };
        let receive = |peer, ns| Message { is_send: false, ..send(peer, ns) };
        // Rounds 2, 1, 8 and 9 (the second node); 3 is asked for twice.
        let messages =
            [send(3, 10), send(2, 20), send(3, 40), send(9, 80), send(10, 160), receive(2, 320), send(1, 640)];
        let turns = turns(&shape, 1, &messages);
        assert_eq!(turns.leads.iter().map(|lead| lead.as_ns()).collect::<Vec<_>>(), [20, 0, 30, 0, 80, 0, 0]);
        assert_eq!(turns.busiest, SimTime::from_ns(320));
        assert!(has_turns(messages.iter().map(|message| message.is_send)));
        assert!(!has_turns([true, false].into_iter()));
    }
}
