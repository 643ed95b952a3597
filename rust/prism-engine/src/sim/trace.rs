//! Spans of ops, kept only if asked for.

use crate::ids::{Rank, StreamId};
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeSet;

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

/// When a launch of communication (the part of a group on one communicator) ran on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct LaunchSpan {
    /// Index of the launch's first collective in the rank's program; of its first message, if it has no collective.
    pub op: u32,
    /// When the rank came to it.
    pub arrival: SimTime,
    /// When it was over for the rank.
    pub end: SimTime,
}

#[derive(Debug, Default)]
pub(super) struct Tracer {
    spans: Option<Vec<Span>>,
    /// Of whom spans are kept; `None`: of everybody.
    only: Option<BTreeSet<u32>>,
    /// Launches by rank.
    launches: Option<Vec<Vec<LaunchSpan>>>,
}

impl Tracer {
    pub(super) fn new(is_on: bool) -> Self {
        Self { spans: is_on.then(Vec::new), only: None, launches: None }
    }

    /// Are spans of (any of) these ranks kept? Ranks that are followed one by one are alone in their roles.
    pub(super) fn sees(&self, ranks: &[u32]) -> bool {
        self.spans.is_some() && self.only.as_ref().is_none_or(|only| ranks.len() == 1 && only.contains(&ranks[0]))
    }

    /// From now on, keeps spans of `rank`.
    pub(super) fn follow(&mut self, rank: u32) {
        if self.spans.is_none() {
            self.spans = Some(Vec::new());
            self.only = Some(BTreeSet::new());
        }
        if let Some(only) = &mut self.only {
            only.insert(rank);
        }
    }

    /// The end of [`Self::follow`].
    pub(super) fn leave(&mut self, rank: u32) {
        let Some(only) = &mut self.only else { return };
        only.remove(&rank);
        if only.is_empty() && self.spans.as_ref().is_some_and(Vec::is_empty) {
            (self.spans, self.only) = (None, None);
        }
    }

    pub(super) fn span(&mut self, rank: u32, stream: u32, op: u32, start: SimTime, end: SimTime) {
        if self.only.as_ref().is_some_and(|only| !only.contains(&rank)) {
            return;
        }
        if let Some(spans) = &mut self.spans {
            spans.push(Span { rank: Rank(rank), stream: StreamId(stream), op, start, end });
        }
    }

    pub(super) fn keep_launches(&mut self, world_size: u32) {
        self.launches = Some(vec![Vec::new(); world_size as usize]);
    }

    /// Is anything kept of these ranks' communication?
    pub(super) fn wants_launches(&self, ranks: &[u32]) -> bool {
        self.launches.is_some() || self.sees(ranks)
    }

    pub(super) fn launch(&mut self, rank: u32, stream: u32, op: u32, arrival: SimTime, end: SimTime) {
        self.span(rank, stream, op, arrival, end);
        if let Some(launches) = &mut self.launches {
            launches[rank as usize].push(LaunchSpan { op, arrival, end });
        }
    }

    /// The launches of every rank in program order.
    pub(super) fn take_launches(&mut self) -> Vec<Vec<LaunchSpan>> {
        let mut launches = self.launches.as_mut().map(std::mem::take).unwrap_or_default();
        // Stable: what is nearly in order is sorted in one pass.
        for own in &mut launches {
            own.sort_by_key(|span| span.op);
        }
        launches
    }

    /// The spans so far, ordered by rank, stream, op and time.
    pub(super) fn take(&mut self) -> Vec<Span> {
        let mut spans = self.spans.as_mut().map(std::mem::take).unwrap_or_default();
        spans.sort_unstable();
        spans
    }
}
