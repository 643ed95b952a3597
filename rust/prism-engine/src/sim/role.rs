//! State of the ranks that run one program in step: vectors over the ranks, one position per stream.
//!
//! Ranks of a role wait for each other where one rank alone would not. That is harmless unless one of them waits for another
//! of the same role (pipeline stages with one program): when nothing else can move, such roles are split into the ranks
//! that can go on and those that cannot ([`Role::split`]). The answer is the same for every way to split.

use super::network::Network;
use super::program::Program;
use super::signature::Half;
use super::speeds::Speeds;
use super::vector;
use crate::graph::op::{ComputeClass, Provenance};
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Times of one thing, one per rank of a role.
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
        if self.free.len() < 64 {
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
    /// Communicator of each rank.
    pub(super) comms: Vec<u32>,
    /// Place of each rank in the network's tables.
    pub(super) places: Vec<u32>,
    /// Distinct communicators and how many ranks of the role each has.
    pub(super) parts: Vec<(u32, u32)>,
    /// End of the latest launch.
    pub(super) last_end: Times,
    /// Launches done.
    pub(super) turn: u32,
    /// Collectives posted.
    pub(super) calls: u64,
    /// The launch that is posted: group and index in it.
    pub(super) active: Option<(u32, u32)>,
    /// Launches whose streams have all come, waiting for their turn.
    pub(super) arrived: Vec<(u32, u32)>,
    /// Channel of each rank by peer and side, for those used so far.
    channels: BTreeMap<(u32, bool), Vec<u32>>,
}

/// Progress of one launch.
#[derive(Debug, Default)]
pub(super) struct LaunchState {
    /// Streams that have come.
    pub(super) num_arrived: usize,
    pub(super) arrival: Times,
    pub(super) ends: Times,
    /// Collectives posted, of how many.
    pub(super) num_posted: usize,
    pub(super) num_calls: usize,
    /// Collectives whose ends have been taken in.
    pub(super) num_collected: usize,
    /// Ranks whose collective is not complete.
    pub(super) calls_pending: u32,
    /// Messages not complete, in all and by rank (empty without messages).
    pub(super) messages_pending: u32,
    pub(super) messages_by_rank: Vec<u32>,
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
    pub(super) by_class: [i128; 5],
    pub(super) communication: i128,
    /// Ops evaluated, each counted once per rank.
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
    pub(super) program: usize,
    pub(super) ranks: Vec<u32>,
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
    /// `TrainingBegin`s and `IterationEnd`s by their number: on several streams they are not met in order.
    pub(super) begins: BTreeMap<u32, Times>,
    pub(super) iteration_ends: BTreeMap<u32, Times>,
    pub(super) account: Account,
    pub(super) pool: Pool,
}

impl Role {
    pub(super) fn new(program: usize, ranks: Vec<u32>, speeds: Speeds) -> Self {
        let zero = vec![SimTime::ZERO; ranks.len()];
        let pool = Pool { len: ranks.len(), free: Vec::new() };
        Self { program, ranks, speeds, bases: VecDeque::from([zero]), pool, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.ranks.len()
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

    /// Adds the next slot: the communicator of each rank.
    pub(super) fn add_slot(&mut self, comms: Vec<u32>, network: &Network) {
        let places = comms.iter().zip(&self.ranks).map(|(comm, rank)| network.place(*comm, *rank)).collect();
        let last_end = vec![SimTime::ZERO; comms.len()];
        let parts = count(&comms);
        self.slots.push(Slot { comms, places, parts, last_end, ..Slot::default() });
    }

    /// Latest time of anything of each rank.
    pub(super) fn final_times(&self) -> Times {
        let mut times = self.bases.back().expect("the current segment has a start").clone();
        self.streams.iter().for_each(|stream| vector::wait(&mut times, &stream.clock));
        times
    }

    /// Which ranks could go on if they were alone, at the slot's active launch?
    pub(super) fn ready(&self, slot: usize, network: &Network) -> Vec<bool> {
        let slot = &self.slots[slot];
        let Some((group, launch)) = slot.active else { return vec![false; self.len()] };
        let state = &self.groups[&group].launches[launch as usize];
        let collective_done =
            |rank: usize| state.calls_pending == 0 || network.completed(slot.comms[rank]) >= slot.calls;
        let has_more_calls = state.num_posted < state.num_calls;
        let messages_done =
            |rank: usize| has_more_calls || state.messages_by_rank.get(rank).is_none_or(|left| *left == 0);
        (0..self.len()).map(|rank| collective_done(rank) && messages_done(rank)).collect()
    }

    /// Moves the marked ranks into a role of their own.
    pub(super) fn split(&mut self, moved: &[bool], network: &Network) -> Self {
        let mut other = Self {
            program: self.program,
            ranks: part(&mut self.ranks, moved),
            segment: self.segment,
            first_base: self.first_base,
            bases: self.bases.iter_mut().map(|times| part(times, moved)).collect(),
            iteration_ends: self.iteration_ends.iter_mut().map(|(k, times)| (*k, part(times, moved))).collect(),
            begins: self.begins.iter_mut().map(|(k, times)| (*k, part(times, moved))).collect(),
            ..Self::default()
        };
        other.streams = self.streams.iter_mut().map(|stream| stream.split(moved)).collect();
        other.slots = self.slots.iter_mut().map(|slot| slot.split(moved)).collect();
        other.speeds = self.speeds.split(moved);
        for (group, state) in &mut self.groups {
            let launches = state.launches.iter_mut().map(|launch| launch.split(moved)).collect();
            other.groups.insert(*group, GroupState { launches, num_left: state.num_left });
        }
        let mut records: Vec<u32> = self.records.keys().copied().collect();
        records.sort_unstable();
        for number in records {
            let record = self.records.get_mut(&number).expect("just listed");
            let times = part(&mut record.times, moved);
            other.records.insert(number, Record { times, consumed: record.consumed });
        }
        for role in [&mut *self, &mut other] {
            role.pool = Pool { len: role.len(), free: Vec::new() };
            role.recount(network);
        }
        other
    }

    /// Counts anew which collectives of the active launches are open.
    fn recount(&mut self, network: &Network) {
        for slot in &self.slots {
            let Some((group, launch)) = slot.active else { continue };
            let state =
                &mut self.groups.get_mut(&group).expect("an active launch has its group").launches[launch as usize];
            if state.calls_pending > 0 {
                let open = slot.parts.iter().filter(|(comm, _)| network.completed(*comm) < slot.calls);
                state.calls_pending = open.map(|(_, count)| count).sum();
            }
            state.messages_pending = state.messages_by_rank.iter().sum();
        }
    }
}

impl Stream {
    fn split(&mut self, moved: &[bool]) -> Self {
        Self { next: self.next, clock: part(&mut self.clock, moved), has_entered: self.has_entered }
    }
}

impl Slot {
    /// Channel of each rank for such a half.
    pub(super) fn channels(&mut self, half: &Half, network: &mut Network) -> &[u32] {
        self.channels.entry((half.peer, half.is_send)).or_insert_with(|| {
            let members = self.comms.iter().zip(&self.places);
            members.map(|(comm, place)| network.channel(*comm, *place, half)).collect()
        })
    }

    fn split(&mut self, moved: &[bool]) -> Self {
        let comms = part(&mut self.comms, moved);
        self.parts = count(&self.comms);
        Self {
            places: part(&mut self.places, moved),
            parts: count(&comms),
            last_end: part(&mut self.last_end, moved),
            turn: self.turn,
            calls: self.calls,
            active: self.active,
            arrived: self.arrived.clone(),
            channels: self.channels.iter_mut().map(|(key, channels)| (*key, part(channels, moved))).collect(),
            comms,
        }
    }
}

impl LaunchState {
    fn split(&mut self, moved: &[bool]) -> Self {
        Self {
            num_arrived: self.num_arrived,
            arrival: part(&mut self.arrival, moved),
            ends: part(&mut self.ends, moved),
            num_posted: self.num_posted,
            num_calls: self.num_calls,
            num_collected: self.num_collected,
            calls_pending: self.calls_pending,
            messages_pending: self.messages_pending,
            messages_by_rank: part(&mut self.messages_by_rank, moved),
            is_done: self.is_done,
        }
    }
}

/// Takes the marked elements out of a vector (an empty vector stays empty).
fn part<T: Copy>(values: &mut Vec<T>, moved: &[bool]) -> Vec<T> {
    let taken = values.iter().zip(moved).filter(|(_, moved)| **moved).map(|(value, _)| *value).collect();
    let mut marks = moved.iter();
    values.retain(|_| !*marks.next().expect("one mark per rank"));
    taken
}

/// Distinct communicators, ascending, and how often each occurs.
fn count(comms: &[u32]) -> Vec<(u32, u32)> {
    let mut sorted = comms.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u32)).collect()
}
