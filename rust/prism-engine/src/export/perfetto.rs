//! Perfetto's protobuf: a process for each rank, a thread for each stream, flows between the slices of one collective, a counter
//! for memory.
//!
//! Field numbers: perfetto_trace.proto (`TracePacket`, `TrackDescriptor`, `TrackEvent`, `InternedData`). Only what is written
//! here is encoded, by hand: varints, fixed 64-bit words and length-prefixed fields.

use super::{Detail, Slice, Timeline, Track};
use crate::units::SimTime;
use std::io::{self, Write};

const SEQUENCE: u64 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED`, `SEQ_NEEDS_INCREMENTAL_STATE`.
const CLEARED: u64 = 1;
const NEEDS_STATE: u64 = 2;
/// `TrackEvent.Type`.
const BEGIN: u64 = 1;
const END: u64 = 2;
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;
/// `CounterDescriptor.Unit`.
const SIZE_BYTES: u64 = 3;

/// Names of annotations and categories, in the order of their numbers (from 1).
const ANNOTATIONS: [&str; 3] = ["communicator", "group size", "bytes"];
const CATEGORIES: [&str; 3] = ["kernel", "communication", "wait"];

/// Fields of a message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(mut self, field: u64, value: u64) -> Self {
        self.raw(field << 3);
        self.raw(value);
        self
    }

    fn fixed(mut self, field: u64, value: u64) -> Self {
        self.raw(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.raw(field << 3 | 2);
        self.raw(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    fn message(self, field: u64, value: &Message) -> Self {
        self.bytes(field, &value.0)
    }
}

/// Writes the timeline. Streams it: memory does not grow with its length.
pub fn write(timeline: &Timeline, out: &mut impl Write) -> io::Result<()> {
    let mut packet = |packet: Message| out.write_all(&Message::default().message(1, &packet).0);
    packet(header(timeline))?;
    for rank in &timeline.ranks {
        let process = Message::default().number(1, pid(*rank)).text(6, &format!("rank {rank}"));
        packet(descriptor(&Message::default().number(1, process_track(*rank)).message(3, &process)))?;
        let counter = Message::default().number(3, SIZE_BYTES);
        let track = Message::default().number(1, counter_track(*rank)).text(2, "device memory");
        packet(descriptor(&track.number(5, process_track(*rank)).message(8, &counter)))?;
    }
    // Threads of different ranks must not have one number, none may have a process's, and readers may keep 32 bits of it.
    let mut tid = timeline.ranks.iter().max().map_or(0, |rank| pid(*rank));
    let mut last = None;
    for slice in &timeline.slices {
        if last != Some((slice.rank, slice.track)) {
            last = Some((slice.rank, slice.track));
            tid += 1;
            packet(thread(slice, tid))?;
        }
        packet(event(slice.start, &begin(slice)))?;
        packet(event(slice.end, &Message::default().number(9, END).number(11, track_of(slice))))?;
    }
    for mark in &timeline.marks {
        let body = Message::default().number(9, INSTANT).number(11, process_track(mark.rank));
        packet(event(mark.time, &body.number(10, u64::from(mark.name) + 1)))?;
    }
    for counter in &timeline.counters {
        let body = Message::default().number(9, COUNTER).number(11, counter_track(counter.rank));
        packet(event(counter.time, &body.number(30, counter.bytes)))?;
    }
    Ok(())
}

/// The first packet: all names.
fn header(timeline: &Timeline) -> Message {
    let mut interned = Message::default();
    for (field, names) in [(1, &CATEGORIES[..]), (3, &ANNOTATIONS[..])] {
        for (number, name) in names.iter().enumerate() {
            interned = interned.message(field, &Message::default().number(1, number as u64 + 1).text(2, name));
        }
    }
    for (number, name) in timeline.names.iter().enumerate() {
        interned = interned.message(2, &Message::default().number(1, number as u64 + 1).text(2, name));
    }
    Message::default().number(10, SEQUENCE).number(13, CLEARED | NEEDS_STATE).message(12, &interned)
}

fn descriptor(track: &Message) -> Message {
    Message::default().number(10, SEQUENCE).message(60, track)
}

fn event(time: SimTime, body: &Message) -> Message {
    let time = time.as_ns().max(0) as u64;
    Message::default().number(8, time).number(10, SEQUENCE).number(13, NEEDS_STATE).message(11, body)
}

fn begin(slice: &Slice) -> Message {
    let body = Message::default().number(9, BEGIN).number(11, track_of(slice)).number(10, u64::from(slice.name) + 1);
    let body = match &slice.detail {
        Detail::Compute(_) => body.number(3, 1),
        Detail::Communication { comm, members, bytes } => {
            let values = [u64::from(*comm), u64::from(*members), *bytes];
            let annotate = |body: Message, (number, value): (usize, u64)| {
                body.message(4, &Message::default().number(1, number as u64 + 1).number(3, value))
            };
            values.into_iter().enumerate().fold(body.number(3, 2), annotate)
        }
        Detail::Wait => body.number(3, 3),
    };
    match slice.flow {
        Some(flow) => body.fixed(47, flow),
        None => body,
    }
}

fn thread(slice: &Slice, tid: u64) -> Message {
    let name = match slice.track {
        Track::Host => "host waits".to_owned(),
        Track::Stream(stream) => format!("stream {stream}"),
    };
    let thread = Message::default().number(1, pid(slice.rank)).number(2, tid).text(5, &name);
    descriptor(&Message::default().number(1, track_of(slice)).number(5, process_track(slice.rank)).message(4, &thread))
}

/// Process 0 is the kernel's in Perfetto.
fn pid(rank: u32) -> u64 {
    u64::from(rank) + 1
}

fn process_track(rank: u32) -> u64 {
    pid(rank) << 32
}

fn counter_track(rank: u32) -> u64 {
    process_track(rank) | 1
}

fn track_of(slice: &Slice) -> u64 {
    process_track(slice.rank)
        | match slice.track {
            Track::Host => 2,
            Track::Stream(stream) => u64::from(stream) + 3,
        }
}
