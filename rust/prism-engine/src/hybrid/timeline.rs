//! When the ops of a live rank ran on the device: asked for by a profiler inside the program.

use super::state::State;
use crate::ids::Rank;
use prism_wire::control::TIMELINE_ENTRY_BYTES;
use prism_wire::frame::MAX_PAYLOAD_BYTES;
use std::collections::BTreeMap;

/// The ops of one rank that somebody wants to know the times of.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// Ops pushed so far.
    num_ops: u32,
    /// Correlation ids of ops that are not known to be over.
    open: BTreeMap<u32, u32>,
    /// The latest op whose times are known.
    latest: u32,
    /// Correlation, start and end in ns, of ops that have not been told.
    done: Vec<(u32, i64, i64)>,
}

impl Timeline {
    /// The next op of the rank. True: it is the first that somebody follows.
    pub(crate) fn push(&mut self, correlation: u32) -> bool {
        let op = self.num_ops;
        self.num_ops = self.num_ops.wrapping_add(1);
        if correlation == 0 {
            return false;
        }
        let is_first = self.open.is_empty();
        self.open.insert(op, correlation);
        is_first
    }
}

impl State {
    /// Keeps the spans that have become known.
    fn take_spans(&mut self) {
        for sim in &mut self.sims {
            for span in sim.take_spans() {
                let Some(process) = self.processes.get_mut(&span.rank.0) else { continue };
                if let Some(correlation) = process.timeline.open.remove(&span.op) {
                    process.timeline.done.push((correlation, span.start.as_ns(), span.end.as_ns()));
                    process.timeline.latest = process.timeline.latest.max(span.op);
                }
            }
        }
    }

    /// The answer to a request for the rank's timeline.
    pub(super) fn timeline(&mut self, rank: u32) -> Result<Vec<u8>, String> {
        const MOST: usize = (MAX_PAYLOAD_BYTES - 8) / TIMELINE_ENTRY_BYTES;
        self.advance();
        self.take_spans();
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        let timeline = &mut process.timeline;
        // A profiler asks when the device is drained: ops before the latest that have no times of their own were launched
        // together with another.
        let latest = timeline.latest;
        timeline.open.retain(|op, _| *op > latest);
        timeline.done.sort_unstable();
        let told: Vec<_> = timeline.done.drain(..timeline.done.len().min(MOST)).collect();
        let left = timeline.done.len() as u64;
        if timeline.open.is_empty() {
            let sim = process.sim;
            self.sims[sim].leave(Rank(rank));
        }
        let mut answer = left.to_le_bytes().to_vec();
        for (correlation, start, end) in told {
            answer.extend(u64::from(correlation).to_le_bytes());
            answer.extend(start.to_le_bytes());
            answer.extend(end.to_le_bytes());
        }
        Ok(answer)
    }
}
