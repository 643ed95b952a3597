//! Where ranks meet: collectives and messages.

use super::costs::LATEST;
use super::ops::{Code, Number, OpInfo};
use super::state::{Channel, Comm, NONE, Tables, stall, via};
use super::{Irregular, Machine};
use crate::ids::CommId;
use crate::units::SimTime;

/// Something has ended that more than a stream waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) place: u32,
    pub(super) via: u8,
    pub(super) end: i64,
    pub(super) is_message: bool,
}

impl<N: Number> Machine<'_, N> {
    /// A launch that is one call or half of a message comes to the network: its end, if everybody has come and a stream is all
    /// that waits for it.
    pub(super) fn post(&mut self, slot: u32, info: OpInfo, arrival: i64, via: u8) -> Result<Option<i64>, Irregular> {
        let slot = self.tables.slots[slot as usize];
        if info.code == Code::Call {
            if self.arrive(slot.comm, slot.place, info.number, arrival, via)? {
                return self.complete(slot.comm, slot.place);
            }
            return Ok(None);
        }
        self.post_half(slot.comm, Half::of(info, slot.place), arrival, via)
    }

    /// A member comes to a collective. True: it is the last.
    #[inline]
    pub(super) fn arrive(
        &mut self,
        comm: u32,
        place: u32,
        call: u32,
        arrival: i64,
        via: u8,
    ) -> Result<bool, Irregular> {
        self.tables.arrivals[place as usize] = SimTime(arrival);
        self.tables.via[place as usize] = via;
        let comm = &mut self.tables.comms[comm as usize];
        if comm.arrived == 0 {
            comm.call = call;
        } else if comm.call != call {
            return Err(Irregular);
        }
        comm.arrived += 1;
        Ok(comm.arrived == comm.size)
    }

    /// A collective to which all have come: everybody goes on. Returns the end of `last`, who came last, if a stream is all that
    /// waits for it.
    #[inline(never)]
    pub(super) fn complete(&mut self, number: u32, last: u32) -> Result<Option<i64>, Irregular> {
        let comm = &mut self.tables.comms[number as usize];
        comm.arrived = 0;
        let places = comm.places();
        let members = &self.members[places.clone()];
        if comm.known_call != comm.call {
            comm.known = self.costs.number_of_known(members, comm.call)?;
            comm.known_call = comm.call;
        }
        let (arrivals, ends) = (&self.tables.arrivals[places.clone()], &mut self.tables.ends[places.clone()]);
        let least = self.costs.complete((number, comm.known), arrivals, ends)?;
        // No time is above 2^60: four differences fit.
        let of_four = |(ends, arrivals): (&[SimTime], &[SimTime])| {
            ends.iter().zip(arrivals).map(|(end, arrival)| end.0 - arrival.0).sum::<i64>()
        };
        let busy = ends.chunks(4).zip(arrivals.chunks(4)).map(of_four).map(i128::from).sum::<i128>();
        if busy < i128::from(least) * members.len() as i128 {
            return Err(Irregular);
        }
        self.communication += busy;
        let mut own = None;
        for (at, rank) in members.iter().enumerate().rev() {
            let place = places.start + at;
            let (end, via) = (self.tables.ends[place].0, std::mem::take(&mut self.tables.via[place]));
            if via >= via::COUNTED {
                self.ended.push(Ended { place: place as u32, via, end, is_message: false });
            } else if place as u32 == last {
                own = Some(end);
            } else {
                self.wake(*rank, via - 1, end);
            }
        }
        Ok(own)
    }

    /// A member posts half of a message: its end, if the other half has come and a stream is all that waits for it.
    #[inline(never)]
    pub(super) fn post_half(
        &mut self,
        number: u32,
        half: Half,
        arrival: i64,
        via: u8,
    ) -> Result<Option<i64>, Irregular> {
        let Half { place, is_send, peer, message } = half;
        let comm = self.tables.comms[number as usize];
        let own = place - comm.start;
        let (source, destination) = if is_send { (own, peer) } else { (peer, own) };
        let number = if comm.channels != NONE && own != peer {
            comm.channels + source
        } else {
            self.channel(number, source, destination)
        };
        let channel = &mut self.tables.channels[number as usize];
        if channel.place == NONE || channel.is_send == is_send {
            self.wait_for_half(number, half, arrival, via);
            return Ok(None);
        }
        if channel.message != message {
            return Err(Irregular);
        }
        let (members, start) = (self.members, comm.start);
        let ranks = || (members[(start + source) as usize], members[(start + destination) as usize]);
        let (sent, received) = self.costs.message(message, channel.way, ranks)?;
        let met = arrival.max(channel.arrival);
        if met > LATEST || sent.max(received) > LATEST {
            return Err(Irregular);
        }
        let (own, other) = if is_send { (met + sent, met + received) } else { (met + received, met + sent) };
        let (other_place, other_arrival) = (channel.place, channel.arrival);
        channel.place = NONE;
        if channel.has_more {
            self.next_half(number);
        }
        self.land(other_place, other_arrival, other);
        if via >= via::COUNTED {
            self.communication += if via == via::GROUP { 0 } else { i128::from(own - arrival) };
            self.ended.push(Ended { place, via, end: own, is_message: true });
            return Ok(None);
        }
        self.communication += i128::from(own - arrival);
        self.tables.ends[place as usize] = SimTime(own);
        Ok(Some(own))
    }

    /// Half of a message waits for the other.
    #[inline]
    fn wait_for_half(&mut self, number: u32, half: Half, arrival: i64, via: u8) {
        let Half { place, is_send, message, .. } = half;
        let channel = &mut self.tables.channels[number as usize];
        self.tables.via[place as usize] = via;
        let waiting = Channel { arrival, place, message, is_send, ..*channel };
        if channel.place == NONE {
            *channel = waiting;
        } else {
            channel.has_more = true;
            self.more_halves.entry(number).or_default().push_back(waiting);
        }
    }

    /// The next half of a channel comes to the front.
    #[cold]
    fn next_half(&mut self, number: u32) {
        let more = self.more_halves.entry(number).or_default();
        if let Some(next) = more.pop_front() {
            self.tables.channels[number as usize] = Channel { has_more: !more.is_empty(), ..next };
        }
    }

    /// A half that waited has ended.
    #[inline]
    fn land(&mut self, place: u32, arrival: i64, end: i64) {
        let via = self.tables.via[place as usize];
        if via != via::GROUP {
            self.communication += i128::from(end - arrival);
        }
        if via >= via::COUNTED {
            self.ended.push(Ended { place, via, end, is_message: true });
            return;
        }
        self.tables.via[place as usize] = via::NOWHERE;
        self.tables.ends[place as usize] = SimTime(end);
        self.wake(self.members[place as usize], via - 1, end);
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

    /// A stream's communication has ended: the rank goes on if it waits for that.
    #[inline]
    pub(super) fn wake(&mut self, rank: u32, stream: u8, end: i64) {
        let Tables { ranks, words, .. } = &mut self.tables;
        let state = &mut ranks[rank as usize];
        words[state.words as usize + usize::from(stream)] = end;
        state.blocked &= !(1 << (stream & 63));
        if state.ahead != NONE {
            self.wake_ahead(rank, stream);
        } else if state.stall & !stall::AHEAD == stream || (state.stall == stall::DEVICE && state.blocked == 0) {
            state.stall = stall::RUNNING;
            // It goes on soon, and so do those who are woken with it.
            prefetch(self.rows, state.row as usize);
            prefetch(self.durations, state.durations.place(state.row, state.duration_width));
            self.ready.push(rank);
        }
    }

    /// Tells those who wait for more than a stream.
    pub(super) fn settle(&mut self) -> Result<(), Irregular> {
        while let Some(Ended { place, via, end, is_message }) = self.ended.pop() {
            if via == via::GROUP {
                self.end_part(place, end, is_message)?;
            } else {
                self.tables.via[place as usize] = via::NOWHERE;
                self.tables.ends[place as usize] = SimTime(end);
                self.wake(self.members[place as usize], (via & !via::COUNTED) - 1, end);
                self.end_turn(place)?;
            }
        }
        Ok(())
    }
}

/// Brings what will be read into the first cache.
#[inline]
fn prefetch<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = values.as_ptr().wrapping_add(index).cast::<i8>();
        // SAFETY: a prefetch reads nothing that the program could see, and does not fault whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}

/// Half of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Half {
    pub(super) place: u32,
    pub(super) is_send: bool,
    /// Group rank.
    pub(super) peer: u32,
    /// Number of its size.
    pub(super) message: u32,
}

impl Half {
    /// That of a member which posts the op.
    pub(super) fn of(info: OpInfo, place: u32) -> Self {
        Self { place, is_send: info.code == Code::Send, peer: info.arg, message: info.number }
    }
}

impl Comm {
    /// Where its members are in the tables.
    pub(super) fn places(&self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.size) as usize
    }
}
