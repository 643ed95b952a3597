//! State of the ranks that run one program in step: vectors over the ranks, one position per stream.
//!
//! Ranks of a role wait for each other where one rank alone would not. That is harmless unless one of them waits for another
//! of the same role (pipeline stages with one program): when nothing else can move, such roles are split into the ranks
//! that can go on and those that cannot ([`Role::split`]). The answer is the same for every way to split.
//!
//! What a vector has one element for is a *lane*: one rank, or all ranks that have had the same times so far
//! ([`super::symmetry`]). Towards the network a slot has *ports*: one per rank, or the members of the communicators that are
//! evaluated in place of all others like them.

use super::error::SimError;
use super::invariants::{Load, Mark};
use super::network::Network;
use super::ports::{Lanes, Ports};
use super::program::Program;
use super::signature::Half;
use super::speeds::Speeds;
use super::vector;
use super::wiring::{Address, Strip, Wiring};
use crate::graph::op::{ComputeClass, Provenance};
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Times of one thing, one per lane of a role (inside a launch under way, one per port of its slot).
pub(super) type Times = Vec<SimTime>;

/// Vectors to use again, all of the role's length.
#[derive(Debug, Default)]
pub(super) struct Pool {
    len: usize,
    free: Vec<Times>,
}

impl Pool {
    pub(super) fn take(&mut self) -> Times {
        self.free.pop().unwrap_or_else(|| vec![SimTime::ZERO; self.len])
    }

    pub(super) fn copy(&mut self, of: &[SimTime]) -> Times {
        let mut times = self.take();
        times.copy_from_slice(of);
        times
    }

    pub(super) fn give(&mut self, times: Times) {
        if self.free.len() < 64 && times.len() == self.len {
            self.free.push(times);
        }
    }
}

/// One stream.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// Number of the next item.
    pub(super) next: usize,
    pub(super) clock: Times,
    /// The next item is a group this stream has come to.
    pub(super) has_entered: bool,
    /// Compute, and communication that was alone on it, summed over ranks. Picoseconds.
    pub(super) busy: i128,
    pub(super) mark: Option<Mark>,
}

/// One event record.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) times: Times,
    pub(super) consumed: u32,
}

/// A rank's communicators of one slot.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Where the ports are in the network's tables.
    pub(super) wiring: Wiring,
    /// Address of each port, only while the slot is not wired.
    pub(super) addresses: Vec<Address>,
    /// Which ranks the ports are.
    pub(super) ports: Ports,
    /// End of the latest launch; empty where no launch has to wait for it.
    pub(super) last_end: Times,
    pub(super) load: Load,
    /// Launches done.
    pub(super) turn: u32,
    /// Collectives posted.
    pub(super) calls: u64,
    /// The launch that is posted: group and index in it.
    pub(super) active: Option<(u32, u32)>,
    /// Launches whose streams have all come, waiting for their turn.
    pub(super) arrived: Vec<(u32, u32)>,
    /// Channel of each strip by peer and side, for those used so far.
    channels: BTreeMap<(u32, bool), Vec<u32>>,
}

/// Progress of one launch.
#[derive(Debug, Default)]
pub(super) struct LaunchState {
    /// Streams that have come.
    pub(super) num_arrived: usize,
    pub(super) arrival: Times,
    /// Empty until the launch is posted, then one per port, and one per lane when it is done.
    pub(super) ends: Times,
    /// Collectives posted, of how many.
    pub(super) num_posted: usize,
    pub(super) num_calls: usize,
    /// Collectives whose ends have been taken in.
    pub(super) num_collected: usize,
    /// Ports whose collective is not complete.
    pub(super) calls_pending: u32,
    /// What its bytes take at least, of every port.
    pub(super) least: i64,
    /// There are messages, not posted so far.
    pub(super) has_messages_to_come: bool,
    /// Messages not complete, in all and by strip (by port while the slot is not wired; empty without messages).
    pub(super) messages_pending: u32,
    pub(super) messages: Vec<u32>,
    /// One message per port is all that happens, and a strip has all ports in order.
    pub(super) is_one_message: bool,
    pub(super) is_done: bool,
}

/// Progress of one group.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    pub(super) launches: Vec<LaunchState>,
    pub(super) num_left: usize,
}

/// Time on the device by what it rests on and by what was done, summed over ranks. Picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    pub(super) by_provenance: [i128; 4],
    pub(super) by_class: [i128; ComputeClass::COUNT],
    pub(super) communication: i128,
    /// Ops evaluated, each counted once per lane.
    pub(super) ops: u64,
}

impl Account {
    pub(super) fn compute(&mut self, class: ComputeClass, provenance: Provenance, total: i128) {
        self.by_provenance[provenance as usize] += total;
        self.by_class[class as usize] += total;
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Role {
    pub(super) id: u32,
    pub(super) program: usize,
    pub(super) ranks: Vec<u32>,
    pub(super) lanes: Lanes,
    pub(super) streams: Vec<Stream>,
    /// Segment the host is in; its start times are the last of `bases`.
    pub(super) segment: u32,
    pub(super) bases: VecDeque<Times>,
    pub(super) first_base: u32,
    /// Segments whose start is still asked for.
    pub(super) keep_segment: Option<u32>,
    pub(super) records: FxHashMap<u32, Record>,
    pub(super) slots: Vec<Slot>,
    pub(super) groups: BTreeMap<u32, GroupState>,
    pub(super) speeds: Speeds,
    /// Lanes whose compute is perturbed op by op, ascending, with a rank of each.
    pub(super) touched: Vec<(u32, u32)>,
    /// When the role's only rank dies.
    pub(super) death: Option<SimTime>,
    pub(super) has_died: bool,
    /// A time was out of range, which the network has noted: nothing of the role moves any more.
    pub(super) has_failed: bool,
    /// A rank's stream went back in time, or its bytes were faster than its port.
    pub(super) violation: Option<SimError>,
    /// `TrainingBegin`s and `IterationEnd`s by their number: on several streams they are not met in order.
    pub(super) begins: BTreeMap<u32, Times>,
    pub(super) iteration_ends: BTreeMap<u32, Times>,
    pub(super) account: Account,
    pub(super) pool: Pool,
}

impl Role {
    /// A role whose speeds are those of its lanes.
    pub(super) fn new(program: usize, ranks: Vec<u32>, lanes: Lanes, speeds: Speeds) -> Self {
        let len = lanes.len().unwrap_or(ranks.len());
        let pool = Pool { len, free: Vec::new() };
        let bases = VecDeque::from([vec![SimTime::ZERO; len]]);
        Self { program, ranks, lanes, bases, speeds, pool, ..Self::default() }
    }

    /// Number of lanes.
    pub(super) fn len(&self) -> usize {
        self.lanes.len().unwrap_or(self.ranks.len())
    }

    /// Has every op been evaluated?
    pub(super) fn is_finished(&self, program: &Program) -> bool {
        program.has_ended() && self.is_drained(program)
    }

    /// Has every op issued so far been evaluated?
    pub(super) fn is_drained(&self, program: &Program) -> bool {
        self.segment == program.last_segment()
            && (0..program.num_streams())
                .all(|s| self.streams.get(s).map_or(0, |stream| stream.next) == program.stream_end(s))
    }

    /// Is the stream through with everything issued in the host's segment?
    pub(super) fn is_stream_idle(&self, program: &Program, stream: usize) -> bool {
        let next = self.streams.get(stream).map_or(0, |stream| stream.next);
        program.item(stream, next).is_none_or(|item| item.segment > self.segment)
    }

    /// Starts of a segment.
    pub(super) fn base(&self, segment: u32) -> &Times {
        &self.bases[(segment - self.first_base) as usize]
    }

    pub(super) fn fit_streams(&mut self, program: &Program) {
        while self.streams.len() < program.num_streams() {
            let clock = vec![SimTime::ZERO; self.len()];
            self.streams.push(Stream { clock, ..Stream::default() });
        }
    }

    /// Adds the next slot: address of each port.
    pub(super) fn add_slot(
        &mut self,
        addresses: &[Address],
        ports: Ports,
        (program, network): (&Program, &mut Network),
    ) {
        let keeps_end = program.keeps_end(self.slots.len());
        let last_end = if keeps_end { vec![SimTime::ZERO; self.len()] } else { Vec::new() };
        let wiring = Wiring::new(addresses, network);
        network.add_parts(self.id, self.slots.len() as u32, &wiring.parts);
        self.slots.push(Slot { wiring, ports, last_end, ..Slot::default() });
    }

    /// Communicator of each port of a slot.
    pub(super) fn comms(&self, slot: usize, network: &Network) -> Vec<u32> {
        self.slots[slot].wiring.addresses().into_iter().map(|address| network.comm_at(address)).collect()
    }

    /// Latest time of anything of each rank.
    pub(super) fn final_times(&self) -> Times {
        let mut times = self.bases.back().expect("the current segment has a start").clone();
        self.streams.iter().for_each(|stream| vector::wait(&mut times, &stream.clock));
        times
    }

    /// Which ports could go on if they were alone, at the slot's active launch?
    pub(super) fn ready(&self, slot: usize, network: &Network) -> Vec<bool> {
        let slot = &self.slots[slot];
        let Some((group, launch)) = slot.active else { return vec![false; slot.wiring.num_ports as usize] };
        let state = &self.groups[&group].launches[launch as usize];
        let has_more = state.num_posted < state.num_calls || state.has_messages_to_come;
        let is_ready = |(number, strip): (usize, &Strip)| {
            let is_complete = state.calls_pending == 0 || network.batches[strip.batch as usize].completed >= slot.calls;
            is_complete && (has_more || state.messages.get(number).is_none_or(|left| *left == 0))
        };
        let ready: Vec<bool> = slot.wiring.strips.iter().enumerate().map(is_ready).collect();
        slot.wiring.spread(&ready)
    }

    /// Leaves the network: every slot has the addresses of its ports instead of their wiring.
    pub(super) fn unwire(&mut self, network: &mut Network) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            network.remove_parts(self.id, number as u32, &slot.wiring.parts);
            if let Some((group, launch)) = slot.active {
                let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
                if !state.messages.is_empty() {
                    state.messages = slot.wiring.spread(&state.messages);
                }
            }
            slot.addresses = slot.wiring.addresses();
            slot.wiring = Wiring::default();
        }
    }

    /// Comes back to the network, and counts anew what is open.
    pub(super) fn wire(&mut self, network: &mut Network) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            slot.wiring = Wiring::new(&std::mem::take(&mut slot.addresses), network);
            network.add_parts(self.id, number as u32, &slot.wiring.parts);
            slot.channels.iter_mut().for_each(|(way, own)| *own = channels(&slot.wiring, *way, network));
            if let Some((group, launch)) = slot.active {
                let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
                if std::mem::take(&mut state.is_one_message) && state.ends.is_empty() {
                    state.ends.clone_from(&state.arrival);
                }
                if !state.messages.is_empty() {
                    state.messages = slot.wiring.fold(&state.messages);
                }
            }
        }
        self.recount(network);
    }

    /// Moves the marked lanes into a role of their own. Not while it is wired.
    pub(super) fn split(&mut self, moved: &[bool]) -> Self {
        let moved_ranks = self.lanes.marks_of_ranks(moved);
        let mut other = Self {
            program: self.program,
            ranks: part(&mut self.ranks, &moved_ranks),
            segment: self.segment,
            first_base: self.first_base,
            bases: self.bases.iter_mut().map(|times| part(times, moved)).collect(),
            iteration_ends: self.iteration_ends.iter_mut().map(|(k, times)| (*k, part(times, moved))).collect(),
            begins: self.begins.iter_mut().map(|(k, times)| (*k, part(times, moved))).collect(),
            ..Self::default()
        };
        let moved_ports: Vec<Vec<bool>> = self.slots.iter().map(|slot| slot.ports.marks(&moved_ranks)).collect();
        other.streams = self.streams.iter_mut().map(|stream| stream.split(moved)).collect();
        other.speeds = self.speeds.split(moved);
        other.lanes = self.lanes.split(moved);
        for (group, state) in &mut self.groups {
            let active = |at: usize| self.slots.iter().position(|slot| slot.active == Some((*group, at as u32)));
            let launches = state.launches.iter_mut().enumerate();
            let launches =
                launches.map(|(at, launch)| launch.split(moved, active(at).map_or(moved, |slot| &moved_ports[slot])));
            other.groups.insert(*group, GroupState { launches: launches.collect(), num_left: state.num_left });
        }
        let slots = self.slots.iter_mut().zip(&moved_ports);
        other.slots = slots.map(|(slot, ports)| slot.split(moved, &moved_ranks, ports)).collect();
        let mut records: Vec<u32> = self.records.keys().copied().collect();
        records.sort_unstable();
        for number in records {
            let record = self.records.get_mut(&number).expect("just listed");
            let times = part(&mut record.times, moved);
            other.records.insert(number, Record { times, consumed: record.consumed });
        }
        for role in [&mut *self, &mut other] {
            role.pool = Pool { len: role.len(), free: Vec::new() };
        }
        other
    }

    /// There are new lanes, which have had the times of the lanes `origins` so far: every vector grows.
    pub(super) fn grow(&mut self, origins: &[u32]) {
        let grow = |times: &mut Times| {
            if !times.is_empty() {
                times.extend(origins.iter().map(|lane| times[*lane as usize]).collect::<Vec<_>>());
            }
        };
        self.bases.iter_mut().for_each(grow);
        self.streams.iter_mut().for_each(|stream| grow(&mut stream.clock));
        #[allow(clippy::iter_over_hash_type, reason = "every record is treated alike")]
        self.records.values_mut().for_each(|record| grow(&mut record.times));
        self.slots.iter_mut().for_each(|slot| grow(&mut slot.last_end));
        for launch in self.groups.values_mut().flat_map(|group| &mut group.launches) {
            grow(&mut launch.arrival);
            if launch.is_done {
                grow(&mut launch.ends);
            }
        }
        self.begins.values_mut().chain(self.iteration_ends.values_mut()).for_each(grow);
        self.speeds.grow(self.len() - origins.len(), origins);
        self.pool = Pool { len: self.len(), free: Vec::new() };
    }

    /// A port like that of the rank at index `from`, for the rank at index `at`, which is a member of `comm`.
    pub(super) fn fork_port(
        &mut self,
        slot: usize,
        (from, at): (u32, u32),
        (comm, position): (u32, u32),
        network: &mut Network,
    ) {
        let slot = &mut self.slots[slot];
        let port = slot.ports.fork(from, at, self.ranks[at as usize], self.lanes.of(at as usize));
        let strip = slot.wiring.strip_of(port);
        slot.wiring.add(comm, position, network);
        for channels in slot.channels.values_mut() {
            channels.push(network.fork_channel(channels[strip], comm));
        }
        if let Some((group, launch)) = slot.active {
            let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
            state.is_one_message = false;
            state.ends.push(state.ends[port]);
            if !state.messages.is_empty() {
                state.messages.push(state.messages[strip]);
            }
        }
    }

    /// Counts anew which collectives and messages of the active launches are open.
    pub(super) fn recount(&mut self, network: &Network) {
        for slot in &self.slots {
            let Some((group, launch)) = slot.active else { continue };
            let state =
                &mut self.groups.get_mut(&group).expect("an active launch has its group").launches[launch as usize];
            if state.calls_pending > 0 {
                let is_open = |(batch, _): &&(u32, u32)| network.batches[*batch as usize].completed < slot.calls;
                state.calls_pending = slot.wiring.parts.iter().filter(is_open).map(|(_, count)| count).sum();
            }
            state.messages_pending = state.messages.iter().sum();
        }
    }
}

impl Stream {
    fn split(&mut self, moved: &[bool]) -> Self {
        let clock = part(&mut self.clock, moved);
        // The sum over the ranks that stay is not known any more.
        self.busy = 0;
        Self { next: self.next, clock, has_entered: self.has_entered, busy: 0, mark: self.mark }
    }
}

impl Slot {
    /// Makes the channel of each strip for such a half.
    pub(super) fn make_channels(&mut self, half: &Half, network: &mut Network) {
        let way = (half.peer, half.is_send);
        self.channels.entry(way).or_insert_with(|| channels(&self.wiring, way, network));
    }

    /// Channel of each strip for such a half, once made.
    pub(super) fn channels(&self, half: &Half) -> &[u32] {
        &self.channels[&(half.peer, half.is_send)]
    }

    fn split(&mut self, moved: &[bool], moved_ranks: &[bool], moved_ports: &[bool]) -> Self {
        // The sums over the ports that stay are not known any more.
        self.load = Load::default();
        Self {
            addresses: part(&mut self.addresses, moved_ports),
            ports: self.ports.split(moved, moved_ranks, moved_ports),
            last_end: part(&mut self.last_end, moved),
            turn: self.turn,
            calls: self.calls,
            active: self.active,
            arrived: self.arrived.clone(),
            channels: self.channels.keys().map(|way| (*way, Vec::new())).collect(),
            ..Self::default()
        }
    }
}

impl LaunchState {
    /// `moved` are lanes, `moved_ports` what the ends are of.
    fn split(&mut self, moved: &[bool], moved_ports: &[bool]) -> Self {
        Self {
            num_arrived: self.num_arrived,
            arrival: part(&mut self.arrival, moved),
            ends: part(&mut self.ends, moved_ports),
            num_posted: self.num_posted,
            num_calls: self.num_calls,
            num_collected: self.num_collected,
            calls_pending: self.calls_pending,
            least: self.least,
            has_messages_to_come: self.has_messages_to_come,
            messages_pending: self.messages_pending,
            messages: part(&mut self.messages, moved_ports),
            is_one_message: self.is_one_message,
            is_done: self.is_done,
        }
    }
}

/// Channel of each strip to or from a peer.
fn channels(wiring: &Wiring, way: (u32, bool), network: &mut Network) -> Vec<u32> {
    network.expect_channels(wiring.strips.len());
    wiring.strips.iter().map(|strip| network.channel(strip.batch, strip.position, way)).collect()
}

/// Takes the marked elements out of a vector (an empty vector stays empty).
pub(super) fn part<T: Copy>(values: &mut Vec<T>, moved: &[bool]) -> Vec<T> {
    let taken = values.iter().zip(moved).filter(|(_, moved)| **moved).map(|(value, _)| *value).collect();
    let mut marks = moved.iter();
    values.retain(|_| !*marks.next().expect("one mark per rank"));
    taken
}
