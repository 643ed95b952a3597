//! Where the time of an iteration went.
//!
//! Two views, both of segments that follow each other without a gap, so that their sum is the iteration time to the
//! picosecond:
//!
//! * the *critical path* of the job goes back from the end of the last rank, and at every collective or message on to the rank
//!   whose arrival it ended for. Nothing on it waits; shortening anything on it shortens the iteration until another path
//!   takes over;
//! * the *account* of one rank stays on the rank: the part of a collective or message before the arrival it ended for is
//!   waiting (for messages: the pipeline's bubble), the rest is transfer. Communication counts only as far as nothing else
//!   hides it.

use super::plan::{Back, NodeKind};
use super::trace::{Holder, JobTrace, Moment};
use crate::graph::op::{ComputeClass, OpKind};
use crate::ids::Rank;
use crate::sim::SimError;
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;

/// What a stretch of time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Spent {
    /// Compute of a class.
    Compute {
        /// Which.
        class: ComputeClass,
    },
    /// A collective runs and nothing hides it.
    Collective {
        /// Communicator of the graph.
        communicator: u32,
    },
    /// A message is under way and nothing hides it.
    Message {
        /// Communicator of the graph.
        communicator: u32,
    },
    /// A collective waits for another member (accounts of one rank only).
    Waiting {
        /// Communicator of the graph.
        communicator: u32,
    },
    /// A message waits for its other half (accounts of one rank only).
    Bubble {
        /// Communicator of the graph.
        communicator: u32,
    },
    /// The host issues ops.
    Host,
    /// The rank is through before the iteration is (accounts of one rank only).
    Idle,
}

/// A stretch of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// On which rank it ends.
    pub rank: Rank,
    /// Op at whose end it ends.
    pub op: u32,
    /// On what.
    pub spent: Spent,
    /// From.
    pub start: SimTime,
    /// To.
    pub end: SimTime,
    /// Of waiting, bubbles, collectives and messages: the rank whose arrival counted.
    pub held_by: Option<Rank>,
}

/// How an iteration went, from its start to its end without gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// When the iteration starts.
    pub start: SimTime,
    /// When it ends.
    pub end: SimTime,
    /// In order of time.
    pub segments: Vec<Segment>,
}

impl Path {
    /// Time of each kind, largest first. Whole ns that add up to the path's length in whole ns.
    #[must_use]
    pub fn totals(&self) -> Vec<(Spent, i64)> {
        let mut totals = BTreeMap::new();
        for segment in &self.segments {
            *totals.entry(segment.spent).or_insert(0) += self.length_ns(segment);
        }
        largest_first(totals)
    }

    /// Time on each rank, largest first. Adds up as [`Self::totals`] does.
    #[must_use]
    pub fn by_rank(&self) -> Vec<(Rank, i64)> {
        let mut totals = BTreeMap::new();
        for segment in &self.segments {
            *totals.entry(segment.rank).or_insert(0) += self.length_ns(segment);
        }
        largest_first(totals)
    }

    /// Length in whole ns.
    #[must_use]
    pub fn total_ns(&self) -> i64 {
        (self.end - self.start).as_ns()
    }

    /// Cut at whole ns since the start of the path, so that rounding does not add up.
    fn length_ns(&self, segment: &Segment) -> i64 {
        (segment.end - self.start).as_ns() - (segment.start - self.start).as_ns()
    }
}

fn largest_first<K: Ord>(totals: BTreeMap<K, i64>) -> Vec<(K, i64)> {
    let mut totals: Vec<(K, i64)> = totals.into_iter().filter(|(_, time)| *time > 0).collect();
    totals.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    totals
}

impl JobTrace {
    /// The critical path of an iteration. `None` if the job has fewer iterations.
    pub fn critical_path(&self, iteration: usize) -> Result<Option<Path>, SimError> {
        let Some(window) = self.window(iteration) else { return Ok(None) };
        let Some(rank) = self.last_rank(iteration, window.1) else { return Ok(None) };
        let Some(from) = self.end_of(rank, iteration)? else { return Ok(None) };
        self.walk(from, window, true).map(Some)
    }

    /// What one rank did with the time of an iteration. `None` if the job, or the rank, has fewer iterations.
    pub fn account(&self, rank: Rank, iteration: usize) -> Result<Option<Path>, SimError> {
        let Some(window) = self.window(iteration) else { return Ok(None) };
        let Some(from) = self.end_of(rank.0, iteration)? else { return Ok(None) };
        self.walk(from, window, false).map(Some)
    }

    /// Lowest rank that ends an iteration last.
    fn last_rank(&self, iteration: usize, end: SimTime) -> Option<u32> {
        let is_last = |rank: &&crate::sim::RankReport| match rank.iteration_ends.get(iteration) {
            Some(time) => *time == end,
            None => self.num_marked() == 0 && rank.final_time == end,
        };
        self.report.ranks.iter().find(is_last).map(|rank| rank.rank.0)
    }

    fn walk(&self, from: Moment, (start, end): (SimTime, SimTime), crosses: bool) -> Result<Path, SimError> {
        let mut walk = Walk { trace: self, floor: start, segments: Vec::new() };
        let own_end = self.times(from.rank)?[from.node as usize];
        walk.add(from, Spent::Idle, own_end, end, None);
        if crosses {
            let mut at = from;
            while let Some(next) = walk.step(at)? {
                at = next;
            }
        } else {
            walk.stay(from)?;
        }
        walk.segments.reverse();
        Ok(Path { start, end, segments: walk.segments })
    }
}

struct Walk<'a> {
    trace: &'a JobTrace,
    /// What is before does not count.
    floor: SimTime,
    /// Latest first.
    segments: Vec<Segment>,
}

impl Walk<'_> {
    /// Adds what of a stretch counts.
    fn add(&mut self, at: Moment, spent: Spent, start: SimTime, end: SimTime, held_by: Option<u32>) {
        let start = start.max(self.floor);
        if end > start {
            let op = self.trace.plan(at.rank).nodes[at.node as usize].op;
            self.segments.push(Segment { rank: Rank(at.rank), op, spent, start, end, held_by: held_by.map(Rank) });
        }
    }

    /// From a moment to the one it waited for, on whatever rank. `None`: the start is reached.
    fn step(&mut self, at: Moment) -> Result<Option<Moment>, SimError> {
        let times = self.trace.times(at.rank)?;
        let plan = self.trace.plan(at.rank);
        let time = times[at.node as usize];
        if time <= self.floor {
            return Ok(None);
        }
        if let NodeKind::End(launch) = plan.nodes[at.node as usize].kind {
            let holder = self.trace.holder(at.rank, launch)?;
            self.add(at, transfer(&holder), holder.time, time, Some(holder.arrival.rank));
            return Ok(Some(holder.arrival));
        }
        let edges = plan.edges(at.node);
        let ready = edges.iter().map(|edge| times[edge.from as usize] + edge.offset).max().unwrap_or_default();
        self.compute(at, ready, time);
        let Some(edge) = edges.iter().find(|edge| times[edge.from as usize] + edge.offset == ready) else {
            return Ok(None);
        };
        self.add(at, Spent::Host, times[edge.from as usize], ready, None);
        Ok(Some(Moment { rank: at.rank, node: edge.from }))
    }

    fn compute(&mut self, at: Moment, start: SimTime, end: SimTime) {
        if let NodeKind::Compute { class, .. } = self.trace.plan(at.rank).nodes[at.node as usize].kind {
            self.add(at, Spent::Compute { class }, start, end, None);
        }
    }

    /// All the way back on one rank.
    fn stay(&mut self, from: Moment) -> Result<(), SimError> {
        let (trace, start) = (self.trace, self.floor);
        let times = trace.times(from.rank)?;
        let plan = trace.plan(from.rank);
        for step in Back::new(plan, &times, from.node, start) {
            let at = Moment { rank: from.rank, node: step.node };
            let time = times[step.node as usize];
            self.floor = step.floor;
            if let NodeKind::End(launch) = plan.nodes[step.node as usize].kind {
                let holder = trace.holder(at.rank, launch)?;
                let (held_by, communicator) = (Some(holder.arrival.rank), holder.comm);
                let waiting =
                    if holder.is_message { Spent::Bubble { communicator } } else { Spent::Waiting { communicator } };
                let held_until = holder.time.max(step.ready);
                self.add(at, transfer(&holder), held_until, time, held_by);
                self.add(at, waiting, step.ready, held_until, held_by);
                continue;
            }
            self.compute(at, step.ready, time);
            self.add(at, Spent::Host, step.before, step.ready, None);
        }
        Ok(())
    }
}

fn transfer(holder: &Holder) -> Spent {
    let communicator = holder.comm;
    if holder.is_message { Spent::Message { communicator } } else { Spent::Collective { communicator } }
}

impl JobTrace {
    /// Name of the work at whose end a segment ends, for people.
    #[must_use]
    pub fn describe(&self, segment: &Segment) -> String {
        let view = self.graph.template(self.graph.rank_template(segment.rank));
        match view.op(segment.op as usize).kind {
            OpKind::Compute { name, .. } => self.graph.name(name).to_owned(),
            OpKind::Collective { kind, .. } => format!("{kind:?}"),
            OpKind::PointToPoint { is_send, .. } => if is_send { "Send" } else { "Recv" }.to_owned(),
            _ => "synchronisation".to_owned(),
        }
    }
}
