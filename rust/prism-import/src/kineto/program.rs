//! What a rank's host issued and what its streams did, as a program that repeats the recorded times.
//!
//! The host is one line of time: launches at the time of their calls, synchronisations at their returns. A device op starts
//! when its stream, its launch and the events it waits for allow it. Events are taken from the trace where it tells them
//! (`cuda_sync`), and inferred where it does not: a kernel of NCCL waits for the stream it was called from, a stream told to wait
//! waits for the latest communication that was over by then, and an op that starts just as another stream's op ends waited for it.
//! What starts later for no known reason is given a wait of its own, counted in the notes.
//!
//! While the program is written its times are computed as a replay will, so that nothing drifts.

use super::comm::{CommRecord, Launches};
use super::event::{Activity, CallKind, Names, RankTrace};
use crate::notes::Notes;
use prism_engine::graph::op::ComputeClass;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Gaps between ops of a busy stream that belong to the device.
const TURNAROUND: i64 = 4_000;
/// An op that starts so soon after another's end may have waited for it.
const NEAR: i64 = 15_000;
/// Rounding of recorded times.
const ROUNDING: i64 = 2_000;
/// A synchronisation this short waited for nothing.
const SHORT_WAIT: i64 = 3_000;
/// Which share of launches is quicker than the usual latency (1 in so many).
const QUICKEST: usize = 100;

/// One op of the program. Times are ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Host time before it.
    pub gap: i64,
    /// Stream, dense.
    pub stream: u32,
    /// What it does.
    pub what: What,
}

/// What an [`Item`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum What {
    Compute {
        duration: i64,
        name: u32,
        class: ComputeClass,
    },
    /// The rank's part of a communication, by number in the rank's list of parts.
    Communicate(u32),
    Record(u32),
    Wait(u32),
    StreamSync,
    EventSync(u32),
    DeviceSync,
    Begin,
    End,
}

/// The rank's part of a matched communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which one, by number in the matching.
    pub matched: u32,
    /// When the rank comes to it.
    pub arrival: i64,
    /// When the rank is through.
    pub end: i64,
    /// Start as recorded, some microseconds from the arrival.
    pub start: i64,
}

/// A rank's program.
#[derive(Debug, Default)]
pub struct Program {
    /// Ops in the order of their issue.
    pub items: Vec<Item>,
    /// Its parts in communications.
    pub parts: Vec<Part>,
    /// Streams, markers' included.
    pub num_streams: u32,
    /// Start of training and ends of iterations.
    pub begin: i64,
    /// When each iteration is over, host and device.
    pub iteration_ends: Vec<i64>,
    /// When host and streams are through.
    pub end: i64,
    /// Whether iterations are those the profiler marked.
    pub has_marks: bool,
}

/// What a program is made of.
pub struct Source<'a> {
    /// The rank.
    pub rank: u32,
    /// Its trace, repaired.
    pub trace: &'a RankTrace,
    /// Calls behind what ran on the device.
    pub launches: &'a Launches,
    /// Its kernels of NCCL.
    pub records: &'a [CommRecord],
    /// The matched communication of each record, if there is one.
    pub matched: &'a [Option<u32>],
    /// What is subtracted from recorded times.
    pub clock: i64,
    /// Kernels of NCCL that fit to nothing are computations.
    pub keeps_unmatched: bool,
    /// Iterations: begin of the first and ends, on the host.
    pub marks: Option<(i64, Vec<i64>)>,
    /// Number of the name of waits without a known reason.
    pub wait_name: u32,
    /// Names, for notes.
    pub names: &'a Names,
}

/// Something of the host's line of time.
#[derive(Clone, Copy, Debug)]
enum Event {
    Launch(u32),
    /// A call that waits or makes wait, by number.
    Call(u32),
    /// A wait of the host begins.
    Entry(u32),
    Begin,
    End,
}

/// Writes a rank's program. `origin` is the time that becomes 0.
pub fn write(source: &Source<'_>, origin: i64, notes: &mut Notes) -> Program {
    let mut writer = Writer::new(source, origin);
    let events = writer.line();
    for (at, (time, _, event)) in events.iter().enumerate() {
        writer.next_time = events.get(at + 1).map_or(i64::MAX, |(time, ..)| writer.issue_time(*time));
        writer.step(writer.issue_time(*time), *event, notes);
    }
    writer.finish()
}

/// First time of a rank, on the common clock.
#[must_use]
pub fn first_time(source: &Source<'_>) -> Option<i64> {
    let writer = Writer::new(source, 0);
    writer.line().first().map(|(time, ..)| writer.issue_time(*time))
}

struct Writer<'a> {
    source: &'a Source<'a>,
    shift: i64,
    origin: i64,
    /// Record of an activity.
    record_of: FxHashMap<u32, u32>,
    details: FxHashMap<u64, usize>,
    calls_of_records: FxHashMap<u64, i64>,
    streams: BTreeMap<(u32, i64), u32>,
    clocks: Vec<i64>,
    host: i64,
    next_time: i64,
    /// Per stream the ops issued so far: activity, end as computed.
    issued: Vec<Vec<(u32, i64, i64)>>,
    /// The stream that a thread used last, and whether it made some stream wait since.
    last_stream: BTreeMap<u64, u32>,
    has_told_wait: BTreeMap<u64, bool>,
    /// Ops whose end the next op of a stream waits for.
    waits: BTreeMap<u32, Vec<(u32, usize)>>,
    /// What a wait of the host refers to, by call.
    entries: BTreeMap<u32, Vec<usize>>,
    drafts: Vec<Draft>,
    parts: Vec<Part>,
    begin: i64,
    iteration_ends: Vec<i64>,
}

/// An item before events have numbers.
struct Draft {
    gap: i64,
    stream: u32,
    what: DraftWhat,
}

enum DraftWhat {
    Op(What),
    /// The op that ends an activity, for records: position in its stream's list.
    Last {
        op: What,
        at: usize,
    },
    Wait {
        stream: u32,
        at: usize,
    },
    EventSync {
        stream: u32,
        at: usize,
    },
    End(Vec<(u32, usize)>),
}

impl<'a> Writer<'a> {
    fn new(source: &'a Source<'a>, origin: i64) -> Self {
        let record_of = source.records.iter().enumerate().map(|(n, record)| (record.activity, n as u32)).collect();
        let details = source.trace.syncs.iter().enumerate().map(|(n, sync)| (sync.correlation, n)).collect();
        let records = source.trace.calls.iter().filter(|call| call.kind == CallKind::EventRecord);
        let calls_of_records = records.map(|call| (call.correlation, call.start)).collect();
        let shift = launch_latency(source) - source.clock;
        Self {
            source,
            shift,
            origin,
            record_of,
            details,
            calls_of_records,
            streams: BTreeMap::new(),
            clocks: Vec::new(),
            host: 0,
            next_time: 0,
            issued: Vec::new(),
            last_stream: BTreeMap::new(),
            has_told_wait: BTreeMap::new(),
            waits: BTreeMap::new(),
            entries: BTreeMap::new(),
            drafts: Vec::new(),
            parts: Vec::new(),
            begin: 0,
            iteration_ends: Vec::new(),
        }
    }

    /// A time of the host on the program's clock: launches count from when they reach the device.
    fn issue_time(&self, host: i64) -> i64 {
        host + self.shift - self.origin
    }

    /// A time of the device on the program's clock.
    fn device_time(&self, device: i64) -> i64 {
        device - self.source.clock - self.origin
    }

    /// The host's line of time.
    fn line(&self) -> Vec<(i64, u8, Event)> {
        let Source { trace, launches, .. } = self.source;
        let latency = self.shift + self.source.clock;
        let mut events = Vec::with_capacity(trace.activities.len() + trace.calls.len());
        for (index, activity) in (0..).zip(&trace.activities) {
            let call = launches.get(&activity.correlation).map(|call| &trace.calls[*call as usize]);
            events.push((call.map_or(activity.start - latency, |call| call.start), 2, Event::Launch(index)));
            // A copy that returns only when it is done holds the host.
            if let Some(call) = call
                && call.kind == CallKind::Copy
                && call.start + call.duration + ROUNDING >= activity.end()
                && call.duration > SHORT_WAIT
            {
                let number = launches[&activity.correlation];
                events.push((call.start + call.duration, 3, Event::Call(number)));
            }
        }
        for (index, call) in (0..).zip(&trace.calls) {
            match call.kind {
                CallKind::StreamWait => events.push((call.start, 1, Event::Call(index))),
                CallKind::StreamSync | CallKind::EventSync | CallKind::DeviceSync => {
                    events.push((call.start, 1, Event::Entry(index)));
                    events.push((call.start + call.duration, 3, Event::Call(index)));
                }
                CallKind::Launch | CallKind::Copy | CallKind::EventRecord => {}
            }
        }
        if let Some((begin, ends)) = &self.source.marks {
            events.push((*begin, 0, Event::Begin));
            events.extend(ends.iter().map(|end| (*end, 4, Event::End)));
        }
        let start = |event: &Event| match event {
            Event::Launch(index) => trace.activities[*index as usize].start,
            _ => 0,
        };
        events.sort_by_key(|(time, class, event)| (*time, *class, start(event)));
        events
    }

    fn stream(&mut self, key: (u32, i64)) -> u32 {
        let next = self.streams.len() as u32;
        let stream = *self.streams.entry(key).or_insert(next);
        if stream == next {
            self.clocks.push(0);
            self.issued.push(Vec::new());
        }
        stream
    }

    fn step(&mut self, time: i64, event: Event, notes: &mut Notes) {
        match event {
            Event::Launch(index) => self.launch(time, index, notes),
            Event::Entry(call) => {
                let issued = self.issued.iter().map(Vec::len).collect();
                self.entries.insert(call, issued);
            }
            Event::Call(call) => self.call(call, notes),
            Event::Begin => {
                self.begin = self.draft_at(time, 0, DraftWhat::Op(What::Begin));
            }
            Event::End => {
                let lasts = (0..).zip(&self.issued).filter(|(_, list)| !list.is_empty());
                let lasts = lasts.map(|(stream, list)| (stream, list.len() - 1)).collect();
                let host = self.draft_at(time, 0, DraftWhat::End(lasts));
                self.iteration_ends.push(self.clocks.iter().copied().fold(host, i64::max));
            }
        }
    }

    /// Adds an item that the host issues at `time` or, if it is later by now, now; returns when.
    fn draft_at(&mut self, time: i64, stream: u32, what: DraftWhat) -> i64 {
        let gap = (time - self.host).max(0);
        self.host += gap;
        self.drafts.push(Draft { gap, stream, what });
        self.host
    }

    fn launch(&mut self, time: i64, index: u32, notes: &mut Notes) {
        let activity = self.source.trace.activities[index as usize];
        let call = self.source.launches.get(&activity.correlation).map(|call| self.source.trace.calls[*call as usize]);
        let record = self.record_of.get(&index).copied();
        let matched = record.and_then(|record| self.source.matched[record as usize]);
        let stream = self.stream(activity.stream);
        let (start, end) = (self.device_time(activity.start), self.device_time(activity.end()));
        if let Some(call) = call {
            self.infer_told_waits(call.thread, stream, activity.is_nccl, start);
            if !activity.is_nccl {
                self.last_stream.insert(call.thread, stream);
            }
        } else {
            notes.add("launches_not_recorded", || {
                format!("rank {}: {} at {} us", self.source.rank, self.name(&activity), activity.start / 1000)
            });
        }
        if activity.is_nccl && matched.is_none() && !self.source.keeps_unmatched {
            return;
        }
        let waits = self.waits.remove(&stream).unwrap_or_default();
        let mut ready = self.clocks[stream as usize];
        let mut issue = time;
        let mut used: Vec<(u32, usize)> = Vec::new();
        for (other, at) in waits {
            // A wait that contradicts the times is none: the event was another one.
            let over = self.issued[other as usize][at].1;
            if over <= start + ROUNDING {
                ready = ready.max(over);
                used.push((other, at));
            }
        }
        if start - ready.max(issue.max(self.host)) > TURNAROUND {
            if let Some((other, at)) = self.just_over(stream, start) {
                ready = ready.max(self.issued[other as usize][at].1);
                if !used.contains(&(other, at)) {
                    used.push((other, at));
                    notes.add("inferred_waits", || {
                        format!("rank {}: {} at {} us", self.source.rank, self.name(&activity), activity.start / 1000)
                    });
                }
            } else if ready < start {
                // The launch itself was slow, as far as it did not hold up the next one.
                issue = issue.max(start.min(self.next_time));
            }
        }
        for (other, at) in used {
            self.draft_at(issue, stream, DraftWhat::Wait { stream: other, at });
        }
        let issued = issue.max(self.host);
        let mut begin = issued.max(ready);
        if start - begin > TURNAROUND {
            let duration = start - begin;
            let class = ComputeClass::Wait;
            self.draft_at(issue, stream, DraftWhat::Op(What::Compute { duration, name: self.source.wait_name, class }));
            notes.add("unexplained_waits", || {
                let (rank, name, us) = (self.source.rank, self.name(&activity), duration / 1000);
                format!("rank {rank}: {us} us before {name} at {} us", activity.start / 1000)
            });
            begin = start;
        }
        let at = self.issued[stream as usize].len();
        let over = end.max(begin);
        let op = match matched {
            Some(matched) => {
                self.parts.push(Part { matched, arrival: begin, end: over, start });
                What::Communicate(self.parts.len() as u32 - 1)
            }
            None => What::Compute { duration: over - begin, name: activity.name, class: activity.class },
        };
        self.draft_at(issue, stream, DraftWhat::Last { op, at });
        self.clocks[stream as usize] = over;
        self.issued[stream as usize].push((index, over, end));
    }

    fn name(&self, activity: &Activity) -> String {
        self.source.names.text(activity.name).chars().take(80).collect()
    }

    /// Waits that follow from how communication is called and from calls whose event is not told.
    fn infer_told_waits(&mut self, thread: u64, stream: u32, is_nccl: bool, start: i64) {
        let has_told = std::mem::take(self.has_told_wait.entry(thread).or_default());
        if is_nccl {
            let caller = self.last_stream.get(&thread).copied().filter(|caller| *caller != stream);
            // The caller's stream, or the one of another thread's latest work, which the trace does not tell from it.
            if let Some(caller) = caller
                && let Some(at) = self.issued[caller as usize].len().checked_sub(1)
            {
                self.waits.entry(stream).or_default().push((caller, at));
            }
            return;
        }
        if !has_told {
            return;
        }
        let trace = self.source.trace;
        let over = |(other, list): (u32, &Vec<(u32, i64, i64)>)| {
            let at = list.partition_point(|(_, over, _)| *over <= start + ROUNDING).checked_sub(1)?;
            trace.activities[list[at].0 as usize].is_nccl.then_some((list[at].1, other, at))
        };
        let lists = (0..).zip(&self.issued).filter(|(other, _)| *other != stream);
        if let Some((_, other, at)) = lists.filter_map(over).max() {
            self.waits.entry(stream).or_default().push((other, at));
        }
    }

    /// The op of another stream that ended last before `start`, if just before it.
    fn just_over(&self, stream: u32, start: i64) -> Option<(u32, usize)> {
        let lists = (0..).zip(&self.issued).filter(|(other, _)| *other != stream);
        let over = |(other, list): (u32, &Vec<(u32, i64, i64)>)| {
            let at = list.partition_point(|(_, over, _)| *over <= start + ROUNDING).checked_sub(1)?;
            (list[at].1 >= start - NEAR).then_some((list[at].1, other, at))
        };
        lists.filter_map(over).max().map(|(_, other, at)| (other, at))
    }

    fn call(&mut self, number: u32, notes: &mut Notes) {
        let call = self.source.trace.calls[number as usize];
        let detail = self.details.get(&call.correlation).map(|detail| self.source.trace.syncs[*detail]);
        match call.kind {
            CallKind::StreamWait => match detail.and_then(|detail| detail.stream.zip(detail.record)) {
                Some((stream, (record, from))) => {
                    let (stream, from) = (self.stream(stream), self.stream(from));
                    let at = self.recorded(record, from);
                    if let Some(at) = at.filter(|_| from != stream) {
                        self.waits.entry(stream).or_default().push((from, at));
                    }
                }
                None => {
                    self.has_told_wait.insert(call.thread, true);
                }
            },
            CallKind::DeviceSync => self.hold_for_all(number, &call),
            CallKind::StreamSync | CallKind::Copy => {
                let told = detail.and_then(|detail| detail.stream).map(|stream| self.stream(stream));
                if let Some(stream) = told.or_else(|| self.last_stream.get(&call.thread).copied()) {
                    self.hold_for(number, &call, stream);
                }
            }
            CallKind::EventSync => {
                let told = detail.and_then(|detail| detail.record);
                let target = match told {
                    Some((record, from)) => {
                        let from = self.stream(from);
                        self.recorded(record, from).map(|at| (from, at))
                    }
                    None if call.duration >= SHORT_WAIT => {
                        let back = self.device_time(call.start + call.duration);
                        let found = self.just_over(u32::MAX, back);
                        if found.is_some() {
                            notes.add("inferred_waits", || {
                                format!(
                                    "rank {}: the host until {} us",
                                    self.source.rank,
                                    (call.start + call.duration) / 1000
                                )
                            });
                        }
                        found
                    }
                    None => None,
                };
                if let Some((stream, at)) = target {
                    self.hold_for_event(&call, stream, at);
                }
            }
            CallKind::Launch | CallKind::EventRecord => {}
        }
    }

    /// The last op issued to a stream before the call that recorded an event.
    fn recorded(&self, record: u64, stream: u32) -> Option<usize> {
        let at = *self.calls_of_records.get(&record)?;
        let trace = self.source.trace;
        let issued = |(index, ..): &(u32, i64, i64)| {
            let correlation = trace.activities[*index as usize].correlation;
            let call = self.source.launches.get(&correlation);
            call.map_or(trace.activities[*index as usize].start, |call| trace.calls[*call as usize].start)
        };
        self.issued[stream as usize].partition_point(|one| issued(one) <= at).checked_sub(1)
    }

    /// The host comes to a wait at the time of the call, and goes on when what it waits for is over.
    fn hold(&mut self, call_start: i64, stream: u32, what: DraftWhat, over: i64) {
        let time = self.issue_time(call_start);
        self.draft_at(time, stream, what);
        self.host = self.host.max(over);
    }

    fn hold_for_event(&mut self, call: &super::event::Call, stream: u32, at: usize) {
        let over = self.issued[stream as usize][at].1;
        self.hold(call.start, stream, DraftWhat::EventSync { stream, at }, over);
    }

    fn hold_for(&mut self, number: u32, call: &super::event::Call, stream: u32) {
        let issued = self.issued[stream as usize].len();
        let then = self.entries.remove(&number).map_or(issued, |then| then.get(stream as usize).copied().unwrap_or(0));
        if then < issued {
            // Other threads went on while this one waited.
            if let Some(at) = then.checked_sub(1) {
                self.hold_for_event(call, stream, at);
            }
            return;
        }
        let over = self.clocks[stream as usize];
        self.hold(call.start, stream, DraftWhat::Op(What::StreamSync), over);
    }

    fn hold_for_all(&mut self, number: u32, call: &super::event::Call) {
        let then = self.entries.remove(&number).unwrap_or_default();
        let now: Vec<usize> = self.issued.iter().map(Vec::len).collect();
        if then == now {
            let over = self.clocks.iter().copied().max().unwrap_or(0);
            self.hold(call.start, 0, DraftWhat::Op(What::DeviceSync), over);
            return;
        }
        for (stream, at) in (0..).zip(then).filter_map(|(stream, len)| Some((stream, len.checked_sub(1)?))) {
            self.hold_for_event(call, stream, at);
        }
    }

    /// Gives events numbers and puts records behind the ops they stand for.
    fn finish(self) -> Program {
        let mut wanted: BTreeMap<(u32, usize), u32> = BTreeMap::new();
        for draft in &self.drafts {
            let mut want = |key| {
                let next = wanted.len() as u32;
                wanted.entry(key).or_insert(next);
            };
            match &draft.what {
                DraftWhat::Wait { stream, at } | DraftWhat::EventSync { stream, at } => want((*stream, *at)),
                DraftWhat::End(lasts) => lasts.iter().for_each(|last| want(*last)),
                DraftWhat::Op(_) | DraftWhat::Last { .. } => {}
            }
        }
        let marker = self.streams.len() as u32;
        let mut items = Vec::with_capacity(self.drafts.len() + wanted.len());
        for Draft { gap, stream, what } in self.drafts {
            let mut push = |gap, stream, what| items.push(Item { gap, stream, what });
            match what {
                DraftWhat::Op(What::Begin) => push(gap, marker, What::Begin),
                DraftWhat::Op(op) => push(gap, stream, op),
                DraftWhat::Last { op, at } => {
                    push(gap, stream, op);
                    if let Some(event) = wanted.get(&(stream, at)) {
                        push(0, stream, What::Record(*event));
                    }
                }
                DraftWhat::Wait { stream: other, at } => push(gap, stream, What::Wait(wanted[&(other, at)])),
                DraftWhat::EventSync { stream: other, at } => push(gap, stream, What::EventSync(wanted[&(other, at)])),
                DraftWhat::End(lasts) => {
                    let mut gap = gap;
                    for last in lasts {
                        push(std::mem::take(&mut gap), marker, What::Wait(wanted[&last]));
                    }
                    push(gap, marker, What::End);
                }
            }
        }
        Program {
            items,
            parts: self.parts,
            num_streams: marker + 1,
            begin: self.begin,
            iteration_ends: self.iteration_ends,
            end: self.clocks.iter().copied().fold(self.host, i64::max),
            has_marks: self.source.marks.is_some(),
        }
    }
}

/// From a call to the start on the device, when nothing else is in the way: nearly the least there was.
fn launch_latency(source: &Source<'_>) -> i64 {
    let latency = |activity: &Activity| {
        let call = source.launches.get(&activity.correlation)?;
        Some(activity.start - source.trace.calls[*call as usize].start)
    };
    let mut all: Vec<i64> = source.trace.activities.iter().filter_map(latency).collect();
    if all.is_empty() {
        return 0;
    }
    let at = all.len() / QUICKEST;
    let (_, quick, _) = all.select_nth_unstable(at);
    (*quick).max(0)
}
