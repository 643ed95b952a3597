//! An op program made ready for evaluation: per stream the ops in issue order, and the host's waits between them.
//!
//! The host issues ops without waiting, except at synchronisations. So everything about it is known beforehand but the
//! times at which it continues: the program is cut into *segments* at the synchronisations, and an op is issued at the start
//! of its segment plus a fixed offset. Which record of an event a wait refers to follows from issue order alone, so events
//! become numbered records. Programs grow at their end: a running rank's with every call, a virtual rank's with every
//! iteration it may enter.

use super::error::SimError;
use super::perturbed::Origin;
use super::signature::{Call, Half, fuse};
use crate::collective::turns;
use crate::graph::op::{ComputeClass, Op, OpKind, Provenance};
use crate::ids::{EventId, NameId, SlotId, StreamId};
use crate::perturb::NameMask;
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Op number of what a question puts on a stream: it is no op of the rank.
pub(super) const QUESTION: u32 = u32::MAX;

/// Streams a rank may have; a damaged record must not make us allocate without bound.
const MAX_STREAMS: u32 = 1 << 16;
/// Longest sum of gaps and durations of one program: a quarter of the range, so that waits on others still fit.
pub(super) const MAX_TOTAL: i64 = i64::MAX / 4;

/// A queue whose elements keep their number when earlier ones are dropped.
#[derive(Debug)]
pub(super) struct Numbered<T> {
    first: usize,
    items: VecDeque<T>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { first: 0, items: VecDeque::new() }
    }
}

impl<T> Numbered<T> {
    pub(super) fn get(&self, number: usize) -> Option<&T> {
        self.items.get(number.checked_sub(self.first)?)
    }

    fn push(&mut self, item: T) {
        self.items.push_back(item);
    }

    /// Number of the next element.
    pub(super) fn end(&self) -> usize {
        self.first + self.items.len()
    }

    fn clear(&mut self) {
        self.first = self.end();
        self.items.clear();
    }
}

/// One op on a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) segment: u32,
    pub(super) op: u32,
    pub(super) offset: SimTime,
    pub(super) action: Action,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    Compute {
        duration: SimTime,
        class: ComputeClass,
        provenance: Provenance,
        iteration: u32,
        names: NameMask,
    },
    /// Fixes record number `n`.
    Record(u32),
    /// Waits for record number `n`.
    Wait(u32),
    /// A wait for an event that was never recorded.
    Nothing,
    /// Takes part in group number `n`.
    Communicate(u32),
    /// The `n`-th `TrainingBegin` of the program.
    TrainingBegin(u32),
    /// The `n`-th `IterationEnd` of the program.
    IterationEnd(u32),
}

/// Communication posted together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) launches: Vec<Launch>,
    /// Distinct streams, in order of first use.
    pub(super) streams: Vec<StreamId>,
}

/// The part of a group on one communicator: what NCCL launches as one kernel. It starts when all its streams have come to it
/// and the communicator's previous launch has ended; collectives follow each other, and messages them ([`turns`]).
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) slot: SlotId,
    /// Launches of the slot before this one.
    pub(super) turn: u32,
    pub(super) streams: Vec<StreamId>,
    /// There is no previous launch of the slot, or one of the streams had it, and so has waited for its end.
    pub(super) follows: bool,
    pub(super) calls: Vec<Call>,
    pub(super) halves: Vec<Half>,
    /// More than one message goes the same way.
    pub(super) has_turns: bool,
    /// For perturbations.
    pub(super) origin: Origin,
}

impl Launch {
    /// Ops of the program.
    pub(super) fn num_ops(&self) -> u64 {
        self.calls.iter().map(|call| u64::from(call.ops)).sum::<u64>() + self.halves.len() as u64
    }
}

/// A wait of the host; ends its segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sync {
    pub(super) offset: SimTime,
    pub(super) target: SyncTarget,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum SyncTarget {
    Stream(StreamId),
    /// A record, or nothing if the event was never recorded.
    Event(Option<u32>),
    Device,
}

/// Who still needs a record.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    waits: u32,
    /// A later record of the event exists, or nothing more will come: no further wait can refer to this one.
    is_final: bool,
}

/// A compiled program.
#[derive(Debug, Default)]
pub(super) struct Program {
    streams: Vec<Numbered<Item>>,
    syncs: Numbered<Sync>,
    groups: Numbered<Group>,
    records: FxHashMap<u32, Uses>,
    next_record: u32,
    events: FxHashMap<EventId, u32>,
    /// Launches so far by slot.
    turns: Vec<u32>,
    /// Streams of the latest launch by slot.
    last_streams: Vec<Vec<StreamId>>,
    /// Slots with a launch that waits for the one before.
    waiting_slots: BTreeSet<u32>,
    num_begins: u32,
    num_iterations: u32,
    segment: u32,
    offset: SimTime,
    total: i64,
    /// Largest slow-down of a rank of the program, or 1.
    stretch: f64,
    open: Option<OpenGroup>,
    /// Number of the first op of each iteration.
    starts: Vec<u32>,
    /// Which name filters a name fits, by name; none if it is beyond the end.
    names: Arc<Vec<NameMask>>,
    /// Nothing is issued after so many iterations.
    last_iteration: Option<u32>,
    /// Something was not issued because of that.
    is_cut: bool,
    /// Ops of the host alone (memory) not yet counted in a segment, and ops of which a rank is still to be told.
    pub(super) host_ops: u64,
    has_ended: bool,
}

#[derive(Debug)]
struct OpenGroup {
    number: u32,
    op: u32,
    group: Group,
}

impl Program {
    /// An empty program for ranks that are at most `stretch` times slower than the graph says.
    pub(super) fn new(stretch: f64) -> Self {
        Self { stretch: stretch.max(1.0), ..Self::default() }
    }

    /// Tells which name filters names fit.
    pub(super) fn set_names(&mut self, names: Arc<Vec<NameMask>>) {
        self.names = names;
    }

    /// Tells which name filters one name fits.
    pub(super) fn set_name(&mut self, name: NameId, mask: NameMask) {
        let names = Arc::make_mut(&mut self.names);
        if names.len() <= name.index() {
            names.resize(name.index() + 1, NameMask::default());
        }
        names[name.index()] = mask;
    }

    /// The ranks of the program die after so many iterations.
    pub(super) fn die_after(&mut self, iterations: u32) {
        self.last_iteration = Some(iterations);
    }

    /// Has the program been cut short?
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Place of an op in its iteration.
    pub(super) fn place(&self, op: u32, iteration: u32) -> u32 {
        self.starts.get(iteration as usize).map_or(op, |start| op.wrapping_sub(*start))
    }

    /// Items of a stream (none for a stream not used so far).
    pub(super) fn item(&self, stream: usize, number: usize) -> Option<&Item> {
        self.streams.get(stream)?.get(number)
    }

    pub(super) fn num_streams(&self) -> usize {
        self.streams.len()
    }

    pub(super) fn stream_end(&self, stream: usize) -> usize {
        self.streams.get(stream).map_or(0, Numbered::end)
    }

    pub(super) fn sync(&self, segment: u32) -> Option<&Sync> {
        self.syncs.get(segment as usize)
    }

    /// Number of the segment that ops are added to.
    pub(super) fn last_segment(&self) -> u32 {
        self.segment
    }

    pub(super) fn group(&self, number: u32) -> &Group {
        self.groups.get(number as usize).expect("groups are dropped only when all items are done")
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Slots, those with the most launches first.
    pub(super) fn slots_by_use(&self) -> Vec<u32> {
        let mut slots: Vec<u32> = (0..self.turns.len() as u32).filter(|slot| self.turns[*slot as usize] > 0).collect();
        slots.sort_by_key(|slot| std::cmp::Reverse(self.turns[*slot as usize]));
        slots
    }

    /// May a launch have to wait for the end of the slot's previous one?
    pub(super) fn keeps_end(&self, slot: usize) -> bool {
        !self.has_ended || self.waiting_slots.contains(&(slot as u32))
    }

    /// May a record with `consumed` waits done be forgotten?
    pub(super) fn is_spent(&self, record: u32, consumed: u32) -> bool {
        self.records.get(&record).is_none_or(|uses| uses.is_final && uses.waits == consumed)
    }

    /// The latest record of an event.
    pub(super) fn latest_record(&self, event: EventId) -> Option<u32> {
        self.events.get(&event).copied()
    }

    /// Announces a use of a record beyond those of the program itself.
    pub(super) fn add_use(&mut self, record: u32) {
        self.records.entry(record).or_default().waits += 1;
    }

    /// Takes back one such use.
    pub(super) fn remove_use(&mut self, record: u32) {
        if let Some(uses) = self.records.get_mut(&record) {
            uses.waits -= 1;
        }
    }

    /// Adds an op. Returns the record that it made final, if any.
    pub(super) fn push(&mut self, op: &Op, number: u32) -> Result<Option<u32>, SimError> {
        self.check(op)?;
        if self.last_iteration.is_some_and(|last| self.num_iterations >= last) {
            self.is_cut = true;
            return Ok(None);
        }
        if self.starts.len() <= self.num_iterations as usize {
            self.starts.push(number);
        }
        if !self.continues_group(op) {
            self.close_group();
        }
        self.offset += op.host_gap;
        let mut superseded = None;
        match op.kind {
            OpKind::Compute { duration, class, provenance, name } => {
                let (iteration, names) =
                    (self.num_iterations, self.names.get(name.index()).copied().unwrap_or_default());
                self.issue(op.stream, number, Action::Compute { duration, class, provenance, iteration, names });
            }
            OpKind::Collective { slot, kind, dtype, reduce, root, count, group } => {
                let call = Call { op: number, kind, dtype, reduce, root, count, ops: 1, continues: false };
                self.launch_of(op.stream, slot, group, number).calls.push(call);
                self.close_if_alone(group);
            }
            OpKind::PointToPoint { slot, is_send, dtype, peer, count, group } => {
                let half = Half { op: number, is_send, dtype, peer, count };
                self.launch_of(op.stream, slot, group, number).halves.push(half);
                self.close_if_alone(group);
            }
            OpKind::EventRecord { event } => superseded = self.record(op.stream, number, event),
            OpKind::EventWait { event } => {
                let action = self.use_of(event).map_or(Action::Nothing, Action::Wait);
                self.issue(op.stream, number, action);
            }
            OpKind::StreamSync => self.hold(SyncTarget::Stream(op.stream)),
            OpKind::EventSync { event } => {
                let record = self.use_of(event);
                self.hold(SyncTarget::Event(record));
            }
            OpKind::DeviceSync => self.hold(SyncTarget::Device),
            OpKind::Alloc { .. } | OpKind::Free { .. } => self.host_ops += 1,
            OpKind::TrainingBegin => {
                self.issue(op.stream, number, Action::TrainingBegin(self.num_begins));
                self.num_begins += 1;
            }
            OpKind::IterationEnd => {
                self.issue(op.stream, number, Action::IterationEnd(self.num_iterations));
                self.num_iterations += 1;
            }
        }
        Ok(superseded)
    }

    fn check(&mut self, op: &Op) -> Result<(), SimError> {
        if op.stream.0 >= MAX_STREAMS {
            return Err(SimError::invalid(format!("stream {} is beyond the limit of {MAX_STREAMS}", op.stream)));
        }
        let duration = if let OpKind::Compute { duration, .. } = op.kind { duration } else { SimTime::ZERO };
        if op.host_gap < SimTime::ZERO || duration < SimTime::ZERO {
            return Err(SimError::invalid("an op has a negative duration or host gap"));
        }
        self.total = self.total.saturating_add(op.host_gap.0).saturating_add(duration.scaled(self.stretch).0);
        if self.total > MAX_TOTAL {
            return Err(SimError::too_long("the durations of a program add up to more than 26 days"));
        }
        Ok(())
    }

    /// The program issues no more: nothing will refer to the records any more.
    pub(super) fn finish(&mut self) {
        self.close_group();
        self.has_ended = true;
        #[allow(clippy::iter_over_hash_type, reason = "every value gets the same flag")]
        for uses in self.records.values_mut() {
            uses.is_final = true;
        }
    }

    /// The operations of the open group are launched.
    pub(super) fn close_group(&mut self) {
        let Some(OpenGroup { op, mut group, .. }) = self.open.take() else { return };
        for launch in &mut group.launches {
            launch.calls = fuse(&launch.calls);
            launch.has_turns = turns::has_turns(launch.halves.iter().map(|half| half.is_send));
            launch.origin = Origin { iteration: self.num_iterations, num_peers: num_peers(&launch.halves) };
            let last = &mut self.last_streams[launch.slot.index()];
            launch.follows = launch.turn == 0 || launch.streams.iter().any(|stream| last.contains(stream));
            if !launch.follows {
                self.waiting_slots.insert(launch.slot.0);
            }
            if *last != launch.streams {
                last.clone_from(&launch.streams);
            }
        }
        let number = self.groups.end() as u32;
        for stream in &group.streams {
            let item = Item { segment: self.segment, op, offset: self.offset, action: Action::Communicate(number) };
            self.streams[stream.index()].push(item);
        }
        self.groups.push(group);
    }

    fn continues_group(&self, op: &Op) -> bool {
        let group = match op.kind {
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
            _ => 0,
        };
        group != 0 && self.open.as_ref().is_some_and(|open| open.number == group)
    }

    fn close_if_alone(&mut self, group: u32) {
        if group == 0 {
            self.close_group();
        }
    }

    fn launch_of(&mut self, stream: StreamId, slot: SlotId, group: u32, op: u32) -> &mut Launch {
        self.grow_streams(stream);
        if self.turns.len() <= slot.index() {
            self.turns.resize(slot.index() + 1, 0);
            self.last_streams.resize_with(slot.index() + 1, Vec::new);
        }
        let empty = || OpenGroup { number: group, op, group: Group { launches: Vec::new(), streams: Vec::new() } };
        let open = &mut self.open.get_or_insert_with(empty).group;
        if !open.streams.contains(&stream) {
            open.streams.push(stream);
        }
        let index = open.launches.iter().position(|launch| launch.slot == slot).unwrap_or_else(|| {
            let turn = self.turns[slot.index()];
            self.turns[slot.index()] += 1;
            let (streams, calls, halves) = (Vec::new(), Vec::new(), Vec::new());
            let (follows, has_turns, origin) = (false, false, Origin::default());
            open.launches.push(Launch { slot, turn, streams, follows, calls, halves, has_turns, origin });
            open.launches.len() - 1
        });
        let launch = &mut open.launches[index];
        if !launch.streams.contains(&stream) {
            launch.streams.push(stream);
        }
        launch
    }

    fn grow_streams(&mut self, stream: StreamId) {
        if self.streams.len() <= stream.index() {
            self.streams.resize_with(stream.index() + 1, Numbered::default);
        }
    }

    fn issue(&mut self, stream: StreamId, op: u32, action: Action) {
        self.grow_streams(stream);
        self.streams[stream.index()].push(Item { segment: self.segment, op, offset: self.offset, action });
    }

    fn record(&mut self, stream: StreamId, op: u32, event: EventId) -> Option<u32> {
        let record = self.next_record;
        self.next_record += 1;
        self.records.insert(record, Uses::default());
        self.issue(stream, op, Action::Record(record));
        let superseded = self.events.insert(event, record)?;
        self.records.entry(superseded).or_default().is_final = true;
        Some(superseded)
    }

    /// A record of everything issued to a stream so far, for one question: made and used by nobody else.
    pub(super) fn record_for_question(&mut self, stream: StreamId) -> u32 {
        let record = self.next_record;
        self.next_record += 1;
        self.records.insert(record, Uses { waits: 1, is_final: true });
        self.issue(stream, QUESTION, Action::Record(record));
        record
    }

    fn use_of(&mut self, event: EventId) -> Option<u32> {
        let record = self.latest_record(event)?;
        self.add_use(record);
        Some(record)
    }

    fn hold(&mut self, target: SyncTarget) {
        if let SyncTarget::Stream(stream) = target {
            self.grow_streams(stream);
        }
        self.syncs.push(Sync { offset: self.offset, target });
        self.segment += 1;
        self.offset = SimTime::ZERO;
    }

    /// Drops everything evaluated. Only when every rank of the program is through with it; `keeps` tells which records are
    /// still held.
    pub(super) fn drop_done(&mut self, keeps: impl Fn(u32) -> bool) {
        self.records.retain(|record, _| keeps(*record));
        self.streams.iter_mut().for_each(Numbered::clear);
        self.groups.clear();
        self.syncs.clear();
    }

    /// Number of items held in memory.
    pub(super) fn held(&self) -> usize {
        self.streams.iter().map(|stream| stream.items.len()).sum()
    }
}

/// Number of distinct peers that are sent to.
pub(crate) fn num_peers(halves: &[Half]) -> u32 {
    if halves.len() <= 1 {
        return halves.iter().filter(|half| half.is_send).count() as u32;
    }
    let mut peers: Vec<u32> = halves.iter().filter(|half| half.is_send).map(|half| half.peer).collect();
    peers.sort_unstable();
    peers.dedup();
    peers.len() as u32
}
