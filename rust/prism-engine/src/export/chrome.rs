//! Chrome's trace event JSON, as PyTorch's profiler (Kineto) uses it: a process for each rank, a thread for each stream.
//!
//! Times are microseconds with three decimals. Source: "Trace Event Format" (Chromium) and what Kineto writes.

use super::{Detail, Slice, Timeline, Track};
use crate::units::SimTime;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Thread of the host's waits; streams have their numbers.
const HOST_THREAD: u32 = 1_000_000;

/// Writes the timeline. Streams it: memory does not grow with its length.
pub fn write(timeline: &Timeline, out: &mut impl Write) -> io::Result<()> {
    out.write_all(b"{\"schemaVersion\": 1, \"displayTimeUnit\": \"ns\", \"traceEvents\": [\n")?;
    let mut events = Events { out, is_first: true };
    let mut last = None;
    for rank in &timeline.ranks {
        events
            .put(&json!({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": format!("rank {rank}")}}))?;
        events.put(&json!({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}))?;
    }
    for slice in &timeline.slices {
        if last != Some((slice.rank, slice.track)) {
            last = Some((slice.rank, slice.track));
            let (thread, name) = thread(slice.track);
            let args = json!({"name": name});
            events.put(&json!({"ph": "M", "pid": slice.rank, "tid": thread, "name": "thread_name", "args": args}))?;
        }
        events.slice(timeline, slice)?;
    }
    for mark in &timeline.marks {
        let name = timeline.name(mark.name);
        let (thread, time) = (HOST_THREAD, us(mark.time));
        events.put(&json!({"ph": "i", "s": "p", "pid": mark.rank, "tid": thread, "ts": time, "name": name}))?;
    }
    for counter in &timeline.counters {
        let (time, args) = (us(counter.time), json!({"bytes": counter.bytes}));
        events.put(&json!({"ph": "C", "pid": counter.rank, "ts": time, "name": "device memory", "args": args}))?;
    }
    events.flows(timeline)?;
    out.write_all(b"\n]}\n")
}

fn thread(track: Track) -> (u32, String) {
    match track {
        Track::Host => (HOST_THREAD, "host waits".to_owned()),
        Track::Stream(stream) => (stream, format!("stream {stream}")),
    }
}

/// Microseconds, exact to the nanosecond for days.
fn us(time: SimTime) -> f64 {
    time.as_ns() as f64 / 1_000.0
}

struct Events<'a, W: Write> {
    out: &'a mut W,
    is_first: bool,
}

impl<W: Write> Events<'_, W> {
    fn put(&mut self, event: &serde_json::Value) -> io::Result<()> {
        if !std::mem::take(&mut self.is_first) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut self.out, event)?;
        Ok(())
    }

    fn slice(&mut self, timeline: &Timeline, slice: &Slice) -> io::Result<()> {
        let (thread, _) = thread(slice.track);
        let (category, args) = match &slice.detail {
            Detail::Compute(class) => ("kernel", json!({"stream": thread, "class": class})),
            Detail::Communication { comm, members, bytes } => {
                let args = json!({"stream": thread, "communicator": comm, "group size": members, "bytes": bytes});
                ("communication", args)
            }
            Detail::Wait => ("wait", json!({})),
        };
        let (pid, start) = (slice.rank, us(slice.start));
        // Of the rounded times, so that slices that follow each other do so in the file.
        let duration = (slice.end.as_ns() - slice.start.as_ns()) as f64 / 1_000.0;
        let name = timeline.name(slice.name);
        self.put(&json!({
            "ph": "X", "pid": pid, "tid": thread, "ts": start, "dur": duration, "name": name, "cat": category, "args": args,
        }))
    }

    /// Arrows from the rank that came last to a collective or a message to the others.
    fn flows(&mut self, timeline: &Timeline) -> io::Result<()> {
        let mut together: BTreeMap<u64, Vec<&Slice>> = BTreeMap::new();
        for slice in &timeline.slices {
            if let Some(flow) = slice.flow {
                together.entry(flow).or_default().push(slice);
            }
        }
        for (flow, slices) in together {
            // Of equally late ones the first rank's.
            let Some(last) = slices.iter().rev().max_by_key(|slice| slice.start) else { continue };
            let others = slices.iter().filter(|slice| !std::ptr::eq(**slice, *last));
            for (number, other) in others.enumerate() {
                let id = format!("{flow:#x}.{number}");
                self.flow_end("s", last, last.start, &id)?;
                self.flow_end("f", other, last.start.min(other.end), &id)?;
            }
        }
        Ok(())
    }

    fn flow_end(&mut self, phase: &str, slice: &Slice, time: SimTime, id: &str) -> io::Result<()> {
        let (thread, _) = thread(slice.track);
        self.put(&json!({
            "ph": phase, "bp": "e", "pid": slice.rank, "tid": thread, "ts": us(time), "id": id, "name": "rendezvous",
            "cat": "communication",
        }))
    }
}
