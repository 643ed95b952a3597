//! Where ranks meet: collectives and messages.

use super::costs::LATEST;
use super::ops::{Code, Number, OpInfo};
use super::state::{Channel, NONE, Slot, stall};
use super::{Irregular, Machine};
use crate::ids::CommId;
use crate::units::SimTime;

impl<N: Number> Machine<'_, N> {
    /// A member comes to a collective. True: it is the last.
    #[inline]
    pub(super) fn arrive(&mut self, slot: &Slot, info: OpInfo, arrival: i64) -> Result<bool, Irregular> {
        self.tables.arrivals[slot.place as usize] = SimTime(arrival);
        self.tables.via[slot.place as usize] = info.stream + 1;
        let comm = &mut self.tables.comms[slot.comm as usize];
        if comm.arrived == 0 {
            comm.call = info.number;
        } else if comm.call != info.number {
            return Err(Irregular);
        }
        comm.arrived += 1;
        Ok(comm.arrived == comm.size)
    }

    /// A collective to which all have come: everybody goes on. Returns the end of `last`, who came last.
    pub(super) fn complete(&mut self, number: u32, last: u32) -> Result<i64, Irregular> {
        let comm = &mut self.tables.comms[number as usize];
        comm.arrived = 0;
        let places = comm.start as usize..(comm.start + comm.size) as usize;
        let members = &self.members[places.clone()];
        if comm.known_call != comm.call {
            comm.known = self.costs.number_of_known(members, comm.call)?;
            comm.known_call = comm.call;
        }
        let (arrivals, ends) = (&self.tables.arrivals[places.clone()], &mut self.tables.ends[places.clone()]);
        let least = self.costs.complete((number, comm.known), arrivals, ends)?;
        let busy = ends.iter().zip(arrivals).map(|(end, arrival)| i128::from(end.0 - arrival.0)).sum::<i128>();
        if busy < i128::from(least) * members.len() as i128 {
            return Err(Irregular);
        }
        self.communication += busy;
        let mut own = 0;
        for (at, rank) in members.iter().enumerate().rev() {
            let place = places.start + at;
            let (end, via) = (self.tables.ends[place].0, std::mem::take(&mut self.tables.via[place]));
            if *rank == last {
                own = end;
            } else {
                wake(&mut self.tables, &mut self.ready, *rank, via - 1, end);
            }
        }
        Ok(own)
    }

    /// A member posts half of a message: its end, if the other half has come.
    pub(super) fn post_half(&mut self, slot: &Slot, info: OpInfo, arrival: i64) -> Result<Option<i64>, Irregular> {
        let is_send = info.code == Code::Send;
        let comm = self.tables.comms[slot.comm as usize];
        let (own, peer) = (slot.place - comm.start, info.arg);
        let (source, destination) = if is_send { (own, peer) } else { (peer, own) };
        let number = if comm.channels != NONE && own != peer {
            comm.channels + source
        } else {
            self.channel(slot.comm, source, destination)
        };
        let channel = &mut self.tables.channels[number as usize];
        if channel.place == NONE {
            let way = channel.way;
            *channel = Channel { arrival, place: slot.place, message: info.number, is_send, way };
            self.tables.via[slot.place as usize] = info.stream + 1;
            return Ok(None);
        }
        if channel.is_send == is_send || channel.message != info.number {
            return Err(Irregular);
        }
        let (members, start) = (self.members, comm.start);
        let ranks = || (members[(start + source) as usize], members[(start + destination) as usize]);
        let (sent, received) = self.costs.message(info.number, channel.way, ranks);
        let met = arrival.max(channel.arrival);
        if met > LATEST || sent.max(received) > LATEST {
            return Err(Irregular);
        }
        let (own, other) = if is_send { (sent, received) } else { (received, sent) };
        self.communication += i128::from(met + own - arrival) + i128::from(met + other - channel.arrival);
        let place = std::mem::replace(&mut channel.place, NONE) as usize;
        let via = std::mem::take(&mut self.tables.via[place]);
        wake(&mut self.tables, &mut self.ready, members[place], via - 1, met + other);
        Ok(Some(met + own))
    }

    /// Number of a channel of a communicator of more than two members.
    fn channel(&mut self, comm: u32, source: u32, destination: u32) -> u32 {
        let (costs, tables, graph) = (&self.costs, &mut self.tables, self.graph);
        *self.channel_numbers.entry((comm, source, destination)).or_insert_with(|| {
            let members = graph.comm_members(CommId(comm));
            let way = costs.way(members[source as usize], members[destination as usize]);
            tables.channels.push(Channel::new(way));
            tables.channels.len() as u32 - 1
        })
    }
}

/// A stream's communication has ended: the rank goes on if it waits for that.
#[inline]
fn wake(tables: &mut super::state::Tables, ready: &mut Vec<u32>, rank: u32, stream: u8, end: i64) {
    let state = &mut tables.ranks[rank as usize];
    tables.words[state.words as usize + usize::from(stream)] = end;
    state.blocked &= !(1 << (stream & 63));
    if state.stall == stream || (state.stall == stall::DEVICE && state.blocked == 0) {
        state.stall = stall::RUNNING;
        ready.push(rank);
    }
}
