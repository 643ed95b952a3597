//! Runs of ops that concern one role alone, evaluated tile by tile.
//!
//! Between two messages a stream often has nothing but compute and collectives of a private batch ([`super::wiring::Wiring`]).
//! Op by op, every vector would come from the cache below for every op. Here the run is done for a tile of the
//! batch's columns (of all ranks, without a collective) after the other: clocks stay in the first cache from the first op to
//! the last. The operations on each time are the same.

use super::invariants;
use super::program::{Action, Item};
use super::role::Role;
use super::speeds::Pace;
use super::step::Context;
use crate::collective::TileWalk;
use crate::graph::op::{ComputeClass, Provenance};
use crate::units::SimTime;
use crate::wide::wide;

/// Columns of a tile.
const TILE: usize = 32;
/// Columns of a tile at the end of a row.
const NARROW: usize = 8;
/// Most members of a communicator whose tile still fits the first cache.
const MAX_ROWS: usize = 64;
/// Fewest ranks for which it is worth while.
const LEAST_RANKS: usize = 16;
/// Most that the collectives of a run may take together, so that no sum overflows.
const MAX_COST: i64 = 1 << 60;

/// One op of a run.
enum Link {
    Compute { op: u32, offset: i64, common: SimTime, pace: Pace, class: ComputeClass, provenance: Provenance },
    Ring { offset: i64, walk: TileWalk, least: i64 },
}

/// The run that starts at a stream's next item.
struct Run {
    links: Vec<Link>,
    segment: u32,
    /// Slot and batch of the collectives.
    private: Option<(usize, u32)>,
    num_calls: u32,
    cost: i64,
}

/// An op as the loops need it.
enum Step<'a> {
    Same { offset: i64, duration: i64 },
    Each { offset: i64, durations: &'a [SimTime] },
    Ring { offset: i64, walk: &'a TileWalk, least: i64 },
}

/// Clocks of a tile's ranks, row by row.
struct Tile<'a> {
    rows: usize,
    width: usize,
    now: &'a mut Vec<i64>,
    base: &'a mut Vec<i64>,
    ends: &'a mut Vec<i64>,
}

/// What the collectives of a run came to.
#[derive(Default)]
struct Sums {
    communication: i128,
    latest_arrival: i64,
    /// By how much a rank's part in a collective was shorter than what its bytes take, at the most; 0 if none was.
    short: i64,
}

impl Role {
    /// Evaluates what can be of such a run; the number of items. 0: the next item is to be evaluated by itself.
    pub(super) fn run_chain(&mut self, stream: usize, context: &mut Context<'_>) -> usize {
        let is_plain = self.lanes.is_each() && self.touched.is_empty() && self.death.is_none();
        let is_seen = context.tracer.is_on() || context.tracer.wants_launches() || context.network.is_apart();
        if !is_plain || is_seen || self.len() < LEAST_RANKS || self.streams[stream].has_entered {
            return 0;
        }
        let Some(run) = self.find_run(stream, context) else { return 0 };
        let width = run.private.map_or(self.len(), |(_, batch)| context.network.width(batch));
        let (mut busy, mut least) = (0, 0);
        let steps: Vec<Step<'_>> = run.links.iter().map(|link| link.step(&self.speeds)).collect();
        for link in &run.links {
            match link {
                Link::Compute { op, common, class, provenance, pace, .. } => {
                    let total = match pace {
                        Pace::Each => self.speeds.each(*op, *common).1,
                        _ => i128::from(common.0) * self.ranks.len() as i128,
                    };
                    self.account.compute(*class, *provenance, total);
                    busy += total;
                }
                Link::Ring { least: own, .. } => least += i128::from(*own) * self.ranks.len() as i128,
            }
        }
        let base = &self.bases[(run.segment - self.first_base) as usize];
        let clock = &mut self.streams[stream].clock;
        let (mut now, mut own_base, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut tile = Tile { rows: clock.len() / width, width, now: &mut now, base: &mut own_base, ends: &mut ends };
        let mut no_slot = Vec::new();
        let last_end = run.private.map_or(&mut no_slot, |(slot, _)| &mut self.slots[slot].last_end);
        let sums = run_tiles(&steps, &mut tile, base, clock, last_end);
        self.account.communication += sums.communication;
        self.streams[stream].busy += busy + sums.communication;
        self.account.ops += run.links.len() as u64 * self.ranks.len() as u64;
        if let Some((slot, batch)) = run.private {
            let state = &mut self.slots[slot];
            state.turn += run.num_calls;
            state.calls += u64::from(run.num_calls);
            state.load.busy += sums.communication;
            state.load.least += least;
            if sums.short > 0 {
                self.violation.get_or_insert(invariants::too_short(self.ranks[0], None, sums.short));
            }
            if !context.network.complete_private(batch, run.num_calls, SimTime(sums.latest_arrival)) {
                self.has_failed = true;
            }
            if !self.slots[slot].arrived.is_empty() {
                self.post_next(slot, context);
            }
        }
        run.links.len()
    }

    fn find_run(&mut self, stream: usize, context: &mut Context<'_>) -> Option<Run> {
        let next = self.streams[stream].next;
        let first = *context.program.item(stream, next)?;
        let mut run = Run { links: Vec::new(), segment: first.segment, private: None, num_calls: 0, cost: 0 };
        let is_of_run = |item: &&Item| item.segment == first.segment;
        for number in next.. {
            let Some(item) = context.program.item(stream, number).filter(is_of_run) else { break };
            if !self.add_link(item, &mut run, context) {
                break;
            }
        }
        (run.links.len() > 1).then_some(run)
    }

    /// False: the item is not of the run.
    fn add_link(&mut self, item: &Item, run: &mut Run, context: &mut Context<'_>) -> bool {
        let offset = item.offset.0;
        match item.action {
            Action::Compute { duration: common, class, provenance, .. } => {
                let pace = self.speeds.pace(item.op, common, self.ranks.len(), run.links.is_empty());
                if let Some(pace) = pace.filter(|pace| *pace != Pace::Few) {
                    run.links.push(Link::Compute { op: item.op, offset, common, pace, class, provenance });
                    return true;
                }
                false
            }
            Action::Communicate(number) => {
                let group = context.program.group(number);
                let [launch] = &group.launches[..] else { return false };
                let ([call], [], [_]) = (&launch.calls[..], &launch.halves[..], &launch.streams[..]) else {
                    return false;
                };
                let slot = launch.slot.index();
                let state = &self.slots[slot];
                let Some(batch) = state.wiring.private.filter(|_| launch.follows && state.active.is_none()) else {
                    return false;
                };
                let is_same = run.private.is_none_or(|private| private == (slot, batch));
                if !is_same || state.turn + run.num_calls != launch.turn {
                    return false;
                }
                let Some(walk) = context.network.tile_walk(batch, call).filter(|walk| walk.rows() <= MAX_ROWS) else {
                    return false;
                };
                run.cost = run.cost.saturating_add(walk.cost());
                if run.cost > MAX_COST {
                    return false;
                }
                run.private = Some((slot, batch));
                run.num_calls += 1;
                let least = context.network.least_time(batch, call);
                run.links.push(Link::Ring { offset, walk, least });
                true
            }
            _ => false,
        }
    }
}

impl Link {
    fn step<'a>(&'a self, speeds: &'a super::speeds::Speeds) -> Step<'a> {
        match self {
            Self::Compute { op, offset, common, pace: Pace::Each, .. } => {
                Step::Each { offset: *offset, durations: speeds.each(*op, *common).0 }
            }
            Self::Compute { offset, common, .. } => Step::Same { offset: *offset, duration: common.0 },
            Self::Ring { offset, walk, least } => Step::Ring { offset: *offset, walk, least: *least },
        }
    }
}

wide! {
    fn run_tiles(
        steps: &[Step<'_>],
        tile: &mut Tile<'_>,
        base: &[SimTime],
        clock: &mut [SimTime],
        last_end: &mut [SimTime],
    ) -> Sums {
        let mut sums = Sums::default();
        let mut column = 0;
        while column < tile.width {
            let (rest, times) = (tile.width - column, (base, &mut *clock, &mut *last_end));
            column += if rest >= TILE {
                tile.run::<TILE>(steps, column, times, &mut sums)
            } else if rest >= NARROW {
                tile.run::<NARROW>(steps, column, times, &mut sums)
            } else {
                tile.run::<1>(steps, column, times, &mut sums)
            };
        }
        sums
    }
}

#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
impl Tile<'_> {
    /// Runs the steps for the columns of one tile; their number.
    #[inline(always)]
    fn run<const T: usize>(
        &mut self,
        steps: &[Step<'_>],
        column: usize,
        (base, clock, last_end): (&[SimTime], &mut [SimTime], &mut [SimTime]),
        sums: &mut Sums,
    ) -> usize {
        let (rows, width) = (self.rows, self.width);
        for (into, from) in [(&mut *self.now, &*clock), (&mut *self.base, base)] {
            into.clear();
            for row in 0..rows {
                into.extend(from[row * width + column..][..T].iter().map(|time| time.0));
            }
        }
        self.ends.resize(rows * T, 0);
        let last_ring = steps.iter().rposition(|step| matches!(step, Step::Ring { .. }));
        for (number, step) in steps.iter().enumerate() {
            match step {
                Step::Same { offset, duration } => {
                    for (now, base) in self.now.iter_mut().zip(self.base.iter()) {
                        *now = (*now).max(*base + offset) + duration;
                    }
                }
                Step::Each { offset, durations } => {
                    let rows = self.now.chunks_exact_mut(T).zip(self.base.chunks_exact(T));
                    for (row, (now, base)) in rows.enumerate() {
                        let durations: &[SimTime; T] =
                            durations[row * width + column..][..T].try_into().expect("as long as asked for");
                        for at in 0..T {
                            now[at] = now[at].max(base[at] + offset) + durations[at].0;
                        }
                    }
                }
                Step::Ring { offset, walk, least } => {
                    let mut latest = sums.latest_arrival;
                    for (now, base) in self.now.iter_mut().zip(self.base.iter()) {
                        *now = (*now).max(*base + offset);
                        latest = latest.max(*now);
                    }
                    sums.latest_arrival = latest;
                    walk.walk::<T>(self.now, self.ends);
                    let (total, fastest) = spent(self.ends, self.now);
                    sums.communication += total;
                    sums.short = sums.short.max(least - fastest);
                    std::mem::swap(self.now, self.ends);
                    if Some(number) == last_ring && !last_end.is_empty() {
                        store::<T>(self.now, last_end, width, column);
                    }
                }
            }
        }
        store::<T>(self.now, clock, width, column);
        T
    }
}

#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
#[inline(always)]
fn store<const T: usize>(from: &[i64], into: &mut [SimTime], width: usize, column: usize) {
    for (row, from) in from.chunks_exact(T).enumerate() {
        for (into, from) in into[row * width + column..][..T].iter_mut().zip(from) {
            into.0 = *from;
        }
    }
}

/// Exact sum of `ends - starts`, which are not negative, of at most 2^32 elements; and the least of them.
#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
#[inline(always)]
fn spent(ends: &[i64], starts: &[i64]) -> (i128, i64) {
    let (mut low, mut high, mut least) = (0, 0, i64::MAX);
    for (end, start) in ends.iter().zip(starts) {
        let difference = end.wrapping_sub(*start);
        least = least.min(difference);
        low += difference as u64 & 0xffff_ffff;
        high += difference as u64 >> 32;
    }
    (i128::from(low) + (i128::from(high) << 32), least)
}
