//! A job in one picture: what every rank does when, where the critical path runs through it, what communication costs that
//! nothing hides, and who is late.
//!
//! A moment of a rank counts once: as compute if any of its streams computes, else as transfer, else as waiting for another
//! rank, else as idle. So what is shown of communication is what is exposed.

mod memory;
mod ranking;
mod row;

pub use memory::{MemoryGroup, MemoryReport};
pub use ranking::{CommCost, LateRank};

use super::blame::Lasts;
use super::critical_path::Path;
use super::plan::{Launch, NodeKind};
use super::trace::JobTrace;
use crate::ids::Rank;
use crate::sim::SimError;
use crate::units::SimTime;
use row::{Busy, Row, State};
use serde::Serialize;
use std::collections::BTreeMap;

/// Moments evaluated at most; ranks beyond are left out, and the result says how many are in it.
const BUDGET: u64 = 1 << 28;
/// Launches of rows that are kept to find equal ones, 24 bytes each.
const KEPT: usize = 1 << 22;
/// Ranges of a list of ranks at most.
const RANGES: usize = 16;
/// Stretches of the critical path at most.
const PATH_POINTS: usize = 600;
/// A row's characters by value, as in Base64.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// First and last rank of runs of neighbours; cut after 16.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Ranges(pub Vec<(u32, u32)>);

impl Ranges {
    /// Of ranks in ascending order.
    #[must_use]
    pub fn of(ranks: &[u32]) -> Self {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for rank in ranks {
            let is_full = runs.len() == RANGES;
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == *rank => *last = *rank,
                _ if is_full => break,
                _ => runs.push((*rank, *rank)),
            }
        }
        Self(runs)
    }

    /// The lowest rank.
    #[must_use]
    pub fn first(&self) -> u32 {
        self.0.first().map_or(0, |(first, _)| *first)
    }
}

/// How fine the picture is.
#[derive(Clone, Copy, Debug)]
pub struct OverviewOptions {
    /// Which iteration, from 0; the last if not said.
    pub iteration: Option<usize>,
    /// Columns of time, at least 1.
    pub columns: usize,
    /// Different rows at most: with more, neighbouring ranks share a row.
    pub max_rows: usize,
}

impl Default for OverviewOptions {
    fn default() -> Self {
        Self { iteration: None, columns: 240, max_rows: 2048 }
    }
}

/// What every rank does when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankMap {
    /// Columns of equal time.
    pub columns: usize,
    /// Neighbouring ranks in one row.
    pub ranks_per_row: u32,
    /// The different rows, two characters a column: 12 bits in Base64's digits, four each for compute, transfer and waiting in
    /// fifteenths of the column.
    pub rows: Vec<String>,
    /// Rows from rank 0 on: index of the row, and how often it follows.
    pub runs: Vec<(u32, u32)>,
}

/// Times of all ranks in the iteration, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Some stream computes.
    pub compute_ns: i64,
    /// Communication runs and nothing hides it.
    pub transfer_ns: i64,
    /// Communication waits and nothing hides it.
    pub waiting_ns: i64,
    /// Neither.
    pub idle_ns: i64,
}

/// A stretch of the critical path, ns from the iteration's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stretch {
    /// From.
    pub start_ns: i64,
    /// To.
    pub end_ns: i64,
    /// On which rank.
    pub rank: Rank,
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overview {
    /// Ranks of the job.
    pub world_size: u32,
    /// Ranks in this picture: the lowest, if the job is too large for all.
    pub ranks_examined: u32,
    /// Which iteration.
    pub iteration: usize,
    /// How long it takes.
    pub length_ns: i64,
    /// What every rank does when.
    pub map: RankMap,
    /// The critical path through it; neighbouring stretches on one rank are one.
    pub path: Vec<Stretch>,
    /// All ranks together.
    pub totals: Totals,
    /// Most exposed first.
    pub communication: Vec<CommCost>,
    /// Who makes the others wait most, up to 12.
    pub late: Vec<LateRank>,
}

impl Overview {
    /// The picture of an iteration. O(moments of all ranks). An error if there is no such iteration.
    pub fn of(trace: &JobTrace, options: &OverviewOptions) -> Result<Self, SimError> {
        let iteration = options.iteration.unwrap_or(trace.num_iterations() - 1);
        let none = || SimError::Unavailable { what: format!("iteration {iteration} of {}", trace.num_iterations()) };
        let window = trace.window(iteration).ok_or_else(none)?;
        let path = trace.critical_path(iteration)?.ok_or_else(none)?;
        let mut rows = Rows::new(trace, window, options.columns.max(1));
        rows.examine()?;
        let length_ns = (window.1 - window.0).as_ns();
        Ok(Self {
            world_size: trace.graph.world_size(),
            ranks_examined: rows.row_of.len() as u32,
            iteration,
            length_ns,
            map: rows.map(options),
            path: stretches(&path),
            totals: rows.totals(),
            communication: rows.communication(),
            late: rows.late(iteration)?,
        })
    }
}

/// Rows of all ranks, equal ones once.
struct Rows<'a> {
    trace: &'a JobTrace,
    window: (SimTime, SimTime),
    columns: usize,
    distinct: Vec<Row>,
    row_of: Vec<u32>,
}

/// Launches of a rank as far as its row depends on them: arrival, end of waiting, end.
type Spans = Vec<(SimTime, SimTime, SimTime)>;

impl<'a> Rows<'a> {
    fn new(trace: &'a JobTrace, window: (SimTime, SimTime), columns: usize) -> Self {
        Self { trace, window, columns, distinct: Vec::new(), row_of: Vec::new() }
    }

    fn examine(&mut self) -> Result<(), SimError> {
        let graph = &self.trace.graph;
        let (mut budget, mut kept) = (BUDGET, 0);
        let mut lasts = Lasts::new();
        // Ranks with one program and durations as in it, whose launches went alike, have one row.
        let mut alike: BTreeMap<(u32, Spans), u32> = BTreeMap::new();
        for rank in 0..graph.world_size() {
            let spans = self.spans(rank, &mut lasts);
            let key = (graph.rank_template(Rank(rank)).0, spans);
            let is_common = self.trace.has_common_durations(rank);
            if is_common && let Some(known) = alike.get(&key) {
                self.row_of.push(*known);
                continue;
            }
            let cost = self.trace.plan(rank).nodes.len() as u64;
            if budget < cost {
                break;
            }
            budget -= cost;
            let row = self.row(rank, &key.1)?;
            let number = self.distinct.len() as u32;
            self.distinct.push(row);
            self.row_of.push(number);
            if is_common && kept + key.1.len() <= KEPT {
                kept += key.1.len();
                alike.insert(key, number);
            }
        }
        Ok(())
    }

    fn spans(&self, rank: u32, lasts: &mut Lasts) -> Spans {
        let (launches, plan) = (self.trace.launches(rank), self.trace.plan(rank));
        let span = |(number, launch): (usize, &Launch)| {
            let own = launches[launch.traced];
            if own.end <= self.window.0 || own.arrival >= self.window.1 {
                return (own.arrival, own.arrival, own.end);
            }
            let until =
                self.trace.last_of(rank, number as u32, own.end, lasts).map_or(own.arrival, |(_, _, time)| time);
            (own.arrival, until.clamp(own.arrival, own.end), own.end)
        };
        plan.launches.iter().enumerate().map(span).collect()
    }

    fn row(&self, rank: u32, spans: &Spans) -> Result<Row, SimError> {
        let times = self.trace.fresh_times(rank)?;
        let (plan, duration) = (self.trace.plan(rank), self.trace.duration_of(rank));
        let mut busy = Vec::with_capacity(plan.nodes.len());
        for (node, end) in plan.nodes.iter().zip(times) {
            match node.kind {
                NodeKind::Compute { duration: common, class } if end > self.window.0 && !class.is_fixed() => {
                    let start = end - duration(node.op, common);
                    busy.push(Busy { start, end, state: State::Compute, slot: 0 });
                }
                NodeKind::End(number) if end > self.window.0 => {
                    let (start, until, end) = spans[number as usize];
                    let slot = plan.launches[number as usize].slot.0;
                    busy.push(Busy { start, end: until, state: State::Waiting, slot });
                    busy.push(Busy { start: until, end, state: State::Transfer, slot });
                }
                _ => {}
            }
        }
        Ok(Row::of(&busy, self.window, self.columns))
    }

    fn map(&self, options: &OverviewOptions) -> RankMap {
        let mut ranks_per_row = 1;
        let mut found = self.joined(ranks_per_row);
        while found.0.len() > options.max_rows.max(1) {
            // At least so many, and twice as many if neighbours are not alike.
            ranks_per_row *= 2;
            found = self.joined(ranks_per_row);
        }
        let (rows, runs) = found;
        RankMap { columns: self.columns, ranks_per_row, rows, runs }
    }

    /// Different rows of so many neighbours each, and their order.
    fn joined(&self, ranks_per_row: u32) -> (Vec<String>, Vec<(u32, u32)>) {
        let mut numbers: BTreeMap<String, u32> = BTreeMap::new();
        let (mut rows, mut runs): (Vec<String>, Vec<(u32, u32)>) = (Vec::new(), Vec::new());
        let mut texts: BTreeMap<u32, String> = BTreeMap::new();
        for together in self.row_of.chunks(ranks_per_row as usize) {
            let is_one = together.iter().all(|row| *row == together[0]);
            let text = if is_one {
                texts.entry(together[0]).or_insert_with(|| encoded(&self.distinct[together[0] as usize].cells)).clone()
            } else {
                encoded(&self.average(together))
            };
            let number = *numbers.entry(text).or_insert_with_key(|text| {
                rows.push(text.clone());
                rows.len() as u32 - 1
            });
            match runs.last_mut() {
                Some((last, count)) if *last == number => *count += 1,
                _ => runs.push((number, 1)),
            }
        }
        (rows, runs)
    }

    fn average(&self, rows: &[u32]) -> Vec<[u8; 3]> {
        let mean = |column: usize, state: usize| {
            let sum: usize =
                rows.iter().map(|row| usize::from(self.distinct[*row as usize].cells[column][state])).sum();
            ((sum + rows.len() / 2) / rows.len()) as u8
        };
        (0..self.columns).map(|column| [0, 1, 2].map(|state| mean(column, state))).collect()
    }

    fn totals(&self) -> Totals {
        let mut sums = [SimTime::ZERO; 3];
        for row in &self.row_of {
            let own = self.distinct[*row as usize].totals;
            sums.iter_mut().zip(own).for_each(|(sum, time)| *sum += time);
        }
        let [compute, transfer, waiting] = sums;
        let all = i128::from((self.window.1 - self.window.0).as_ps()) * self.row_of.len() as i128;
        let idle = all - i128::from((compute + transfer + waiting).as_ps());
        Totals {
            compute_ns: compute.as_ns(),
            transfer_ns: transfer.as_ns(),
            waiting_ns: waiting.as_ns(),
            idle_ns: i64::try_from(idle / 1000).unwrap_or(i64::MAX),
        }
    }
}

fn encoded(cells: &[[u8; 3]]) -> String {
    let digits = cells.iter().flat_map(|[compute, transfer, waiting]| {
        let value = usize::from(*compute) << 8 | usize::from(*transfer) << 4 | usize::from(*waiting);
        [DIGITS[value >> 6], DIGITS[value & 63]]
    });
    digits.map(char::from).collect()
}

/// The path by ranks; what is shorter than one of 600 stretches is joined to the one before.
fn stretches(path: &Path) -> Vec<Stretch> {
    let least = path.total_ns() / PATH_POINTS as i64;
    let mut found: Vec<Stretch> = Vec::new();
    for segment in &path.segments {
        let (start_ns, end_ns) = ((segment.start - path.start).as_ns(), (segment.end - path.start).as_ns());
        match found.last_mut() {
            Some(last) if last.rank == segment.rank || last.end_ns - last.start_ns < least => {
                if last.rank != segment.rank && end_ns - start_ns > last.end_ns - last.start_ns {
                    last.rank = segment.rank;
                }
                last.end_ns = end_ns;
            }
            _ => found.push(Stretch { start_ns, end_ns, rank: segment.rank }),
        }
    }
    found
}
