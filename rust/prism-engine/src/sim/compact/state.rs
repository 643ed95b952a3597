//! What is kept of ranks, communicators and messages while they run.

use super::Irregular;
use super::costs::{Costs, Way};
use super::ops::{Reader, most_total};
use crate::graph::{Graph, TemplateView};
use crate::ids::{CommId, Rank};
use crate::sim::program::MAX_TOTAL;
use crate::units::SimTime;

/// No number.
pub(super) const NONE: u32 = u32::MAX;

/// The event was never recorded.
pub(super) const NEVER: i64 = i64::MIN;

/// What the walk over a rank's program waits for; of what is below, a stream's number.
pub(super) mod stall {
    /// It runs, or is about to.
    pub(crate) const RUNNING: u8 = 255;
    /// Every op has been issued.
    pub(crate) const DONE: u8 = 254;
    /// For all streams.
    pub(crate) const DEVICE: u8 = 253;
    /// For a record that is held.
    pub(crate) const EVENT: u8 = 252;
    /// Added to a stream's number: the host could go on if it ran ahead of the stream.
    pub(crate) const AHEAD: u8 = 64;
}

/// What waits for the communication at a place: one more than a stream's number, and perhaps more.
pub(super) mod via {
    /// There is none.
    pub(crate) const NOWHERE: u8 = 0;
    /// Added: the slot's launches are counted.
    pub(crate) const COUNTED: u8 = 128;
    /// A launch of a group, and no stream.
    pub(crate) const GROUP: u8 = 255;
}

/// Place of a launch among those of its slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// Its stream keeps the order.
    Plain,
    /// Its number, and whether it has waited for the one before by itself: no launch is before it, or it was on a stream of this.
    Counted { number: u32, follows: bool },
}

/// Where a rank is in its program: two lines of the cache. Its times are elsewhere, in [`Tables::words`].
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(super) struct RankState {
    /// The next op, and the end of the program.
    pub(super) row: u64,
    pub(super) end: u64,
    /// Host time.
    pub(super) host: i64,
    /// Host time at the end of the last wait.
    pub(super) base: i64,
    /// Streams that wait for communication, one bit each.
    pub(super) blocked: u64,
    /// First of its words: a clock per stream, then a time per event.
    pub(super) words: u32,
    /// First of its slots.
    pub(super) slots: u32,
    /// Number of its durations that are not its template's, if any.
    pub(super) odd: u32,
    /// Number of what it holds, if it may.
    pub(super) ahead: u32,
    pub(super) streams: u8,
    pub(super) stall: u8,
    /// Does its program have groups?
    pub(super) has_groups: bool,
    /// Bytes of a host gap and of a duration.
    pub(super) gap_width: u8,
    pub(super) duration_width: u8,
    pub(super) gaps: Reader,
    pub(super) durations: Reader,
    /// Markers passed.
    pub(super) begins: u32,
    pub(super) iterations: u32,
}

impl RankState {
    /// Word of an event.
    #[inline]
    pub(super) fn event(&self, event: u32) -> usize {
        self.words as usize + usize::from(self.streams) + event as usize
    }
}

/// A rank's communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// The rank's place in the tables by member.
    pub(super) place: u32,
    pub(super) comm: u32,
    /// Stream of the latest launch, or one of the following.
    pub(super) last: u8,
}

impl Slot {
    /// There was no launch.
    pub(super) const UNUSED: u8 = 255;
    /// Launches are counted ([`super::order`]).
    pub(super) const COUNTED: u8 = 254;
}

/// A communicator and its open collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm {
    pub(super) start: u32,
    pub(super) size: u32,
    /// Members that have come to the open collective, and what they called.
    pub(super) arrived: u32,
    pub(super) call: u32,
    /// The latest call, and what it costs.
    pub(super) known_call: u32,
    pub(super) known: u32,
    /// Of two members: the first of its channels, which are numbered by source.
    pub(super) channels: u32,
}

/// Half of a message that waits for the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channel {
    pub(super) arrival: i64,
    /// Whose half it is; [`NONE`]: there is none.
    pub(super) place: u32,
    pub(super) message: u32,
    pub(super) is_send: bool,
    pub(super) way: Way,
    /// Others wait behind it.
    pub(super) has_more: bool,
}

/// Durations of a rank that are not its template's.
#[derive(Clone, Debug)]
pub(super) struct Odd {
    factor: f64,
    /// First op of the program.
    start: u64,
    /// By op, ascending.
    own: Vec<(u32, SimTime)>,
    next: usize,
}

impl Odd {
    /// Duration of the compute op at `row`; a fixed one is not stretched. Asked for in program order.
    pub(super) fn duration(&mut self, row: u64, common: i64, is_fixed: bool) -> i64 {
        let op = (row - self.start) as u32;
        let duration = match self.own.get(self.next) {
            Some((at, own)) if *at == op => {
                self.next += 1;
                *own
            }
            _ => SimTime(common),
        };
        if is_fixed || self.factor.to_bits() == 1f64.to_bits() { duration.0 } else { duration.scaled(self.factor).0 }
    }
}

/// All state.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) ranks: Vec<RankState>,
    /// Clocks and event times.
    pub(super) words: Vec<i64>,
    pub(super) slots: Vec<Slot>,
    pub(super) comms: Vec<Comm>,
    pub(super) channels: Vec<Channel>,
    pub(super) odd: Vec<Odd>,
    /// By member of a communicator: arrival at its open collective, end of its latest launch, and one more than the stream
    /// that it waits on.
    pub(super) arrivals: Vec<SimTime>,
    pub(super) ends: Vec<SimTime>,
    pub(super) via: Vec<u8>,
}

impl Tables {
    pub(super) fn new(graph: &Graph, factor: impl Fn(u32) -> f64, costs: &Costs) -> Result<Self, Irregular> {
        let mut tables = Self::default();
        let num_members = graph.all_members().len();
        tables.arrivals.resize(num_members, SimTime::ZERO);
        tables.ends.resize(num_members, SimTime::ZERO);
        tables.via.resize(num_members, 0);
        tables.ranks.reserve_exact(graph.world_size() as usize);
        // Numbers of events need not be dense.
        let most_words = 4 * graph.num_ops() + 64 * u64::from(graph.world_size());
        let mut num_slots = 0;
        for rank in 0..graph.world_size() {
            tables.add_rank(graph, rank, factor(rank), num_slots)?;
            num_slots += graph.rank_slots(Rank(rank)).len();
            let most_words = most_words.min(u64::from(NONE));
            if tables.words.len() as u64 > most_words || num_slots >= NONE as usize {
                return Err(Irregular);
            }
        }
        tables.add_comms(graph, num_slots, costs);
        Ok(tables)
    }

    fn add_rank(&mut self, graph: &Graph, rank: u32, factor: f64, first_slot: usize) -> Result<(), Irregular> {
        let view = graph.template(graph.rank_template(Rank(rank)));
        let place = view.place();
        if most_total(&place, factor.max(1.0)) > MAX_TOTAL as f64 * 0.99 && total(&view, factor) > MAX_TOTAL.into() {
            return Err(Irregular);
        }
        let own: Vec<(u32, SimTime)> = graph.rank_overrides(Rank(rank)).collect();
        let sum = own.iter().fold(0i64, |sum, (_, own)| sum.saturating_add(own.scaled(factor.max(1.0)).0));
        if sum > i64::MAX / 8 {
            return Err(Irregular);
        }
        let mut odd = NONE;
        if !own.is_empty() || factor.to_bits() != 1f64.to_bits() {
            odd = self.odd.len() as u32;
            self.odd.push(Odd { factor, start: place.start as u64, own, next: 0 });
        }
        let streams = view.num_streams().min(super::ops::MAX_STREAMS);
        self.ranks.push(RankState {
            row: place.start as u64,
            end: (place.start + place.len) as u64,
            host: 0,
            base: 0,
            blocked: 0,
            words: self.words.len() as u32,
            slots: first_slot as u32,
            streams: streams as u8,
            stall: stall::RUNNING,
            has_groups: !place.group.is_zero(),
            odd,
            ahead: NONE,
            gap_width: place.gap.width as u8,
            duration_width: place.duration.width as u8,
            gaps: Reader::new(place.gap, place.start),
            durations: Reader::new(place.duration, place.start),
            begins: 0,
            iterations: 0,
        });
        self.words.resize(self.words.len() + streams as usize, 0);
        self.words.resize(self.words.len() + view.num_events() as usize, NEVER);
        Ok(())
    }

    fn add_comms(&mut self, graph: &Graph, num_slots: usize, costs: &Costs) {
        self.slots.resize(num_slots, Slot { place: NONE, comm: NONE, last: Slot::UNUSED });
        self.comms.reserve_exact(graph.num_comms());
        for comm in 0..graph.num_comms() as u32 {
            let members = graph.comm_members(CommId(comm));
            let start = graph.comm_places(CommId(comm)).start as u32;
            for (place, rank) in (start..).zip(members) {
                let own = graph.rank_slots(Rank(*rank)).iter().position(|own| *own == comm);
                let slot = own.expect("a graph's members have a slot") + self.ranks[*rank as usize].slots as usize;
                self.slots[slot] = Slot { place, comm, last: Slot::UNUSED };
            }
            let mut channels = NONE;
            if let [first, second] = *members {
                channels = self.channels.len() as u32;
                self.channels.extend([costs.way(first, second), costs.way(second, first)].map(Channel::new));
            }
            let size = members.len() as u32;
            self.comms.push(Comm { start, size, arrived: 0, call: NONE, known_call: NONE, known: NONE, channels });
        }
    }
}

impl Channel {
    pub(super) fn new(way: Way) -> Self {
        Self { arrival: 0, place: NONE, message: NONE, is_send: false, way, has_more: false }
    }
}

/// Sum of the gaps and durations of a program.
fn total(view: &TemplateView<'_>, factor: f64) -> i128 {
    view.iter()
        .map(|op| {
            let duration = match op.kind {
                crate::graph::op::OpKind::Compute { duration, .. } => duration.scaled(factor.max(1.0)).0,
                _ => 0,
            };
            i128::from(op.host_gap.0) + i128::from(duration)
        })
        .sum()
}
