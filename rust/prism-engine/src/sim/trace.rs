//! Spans of ops, kept only if asked for.

use crate::ids::{Rank, StreamId};
use crate::units::SimTime;
use serde::Serialize;

/// When an op ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Span {
    /// Whose.
    pub rank: Rank,
    /// Where (of a group over several streams, the first).
    pub stream: StreamId,
    /// Index in the rank's program (of a group, its first op).
    pub op: u32,
    /// Start; for communication, the arrival.
    pub start: SimTime,
    /// End.
    pub end: SimTime,
}

#[derive(Debug, Default)]
pub(super) struct Tracer {
    spans: Option<Vec<Span>>,
}

impl Tracer {
    pub(super) fn new(is_on: bool) -> Self {
        Self { spans: is_on.then(Vec::new) }
    }

    pub(super) fn is_on(&self) -> bool {
        self.spans.is_some()
    }

    pub(super) fn span(&mut self, rank: u32, stream: u32, op: u32, start: SimTime, end: SimTime) {
        if let Some(spans) = &mut self.spans {
            spans.push(Span { rank: Rank(rank), stream: StreamId(stream), op, start, end });
        }
    }

    /// The spans so far, ordered by rank, stream, op and time.
    pub(super) fn take(&mut self) -> Vec<Span> {
        let mut spans = self.spans.as_mut().map(std::mem::take).unwrap_or_default();
        spans.sort_unstable();
        spans
    }
}
