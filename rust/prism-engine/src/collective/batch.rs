//! Many communicators at once: all of one shape, with one call, side by side in a table.
//!
//! `times[group_rank * width + column]` is the time of a member of the communicator in a column. A ring is walked position by
//! position for a tile of columns at a time, so that what is carried round stays in registers and every step is vector code,
//! whatever the number of members.

use super::plan::{self, BatchForm, CollectiveCall, Scratch};
use super::ring::Uniform;
use super::shape::CommShape;
use super::window::LIMIT;
use crate::units::SimTime;
use crate::wide::wide;
use std::ops::Range;
use std::sync::Arc;

/// Columns of a tile.
const TILE: usize = 32;
/// Columns of a tile at the end of a row.
const NARROW: usize = 8;

/// Ends of all members of `width` communicators from their arrivals, which are not negative; returns the latest end. `None`
/// (with `ends` unspecified) where the call has no form for a whole table or a time may be out of range: to be evaluated
/// communicator by communicator.
pub(crate) fn batch_completion(
    shape: &CommShape,
    call: &CollectiveCall,
    width: usize,
    arrivals: &[SimTime],
    ends: &mut [SimTime],
    scratch: &mut Scratch,
) -> Option<SimTime> {
    assert_eq!(arrivals.len(), shape.len() * width, "one arrival per member and column");
    assert_eq!(ends.len(), arrivals.len(), "one end per arrival");
    let latest = match plan::batch_form(shape, call, scratch)? {
        BatchForm::Ring(ring, launch) => rings(&ring, launch.0, &shape.ring, width, arrivals, ends),
        BatchForm::Together(duration) => together(duration.0, width, arrivals, ends),
    };
    // No arrival is later than the latest end: none was out of range.
    (latest <= LIMIT).then_some(SimTime(latest))
}

/// A collective over rings of equal links, to be walked tile by tile.
#[derive(Clone, Debug)]
pub(crate) struct RingWalk {
    ring: Uniform,
    launch: i64,
    shape: Arc<CommShape>,
}

impl RingWalk {
    /// The walk of a call, if it runs over a ring of equal links.
    pub(crate) fn new(shape: &Arc<CommShape>, call: &CollectiveCall, scratch: &mut Scratch) -> Option<Self> {
        match plan::batch_form(shape, call, scratch)? {
            BatchForm::Ring(ring, launch) => Some(Self { ring, launch: launch.0, shape: Arc::clone(shape) }),
            BatchForm::Together(_) => None,
        }
    }

    /// Members of each communicator.
    pub(crate) fn rows(&self) -> usize {
        self.shape.len()
    }

    /// Time from the last arrival to the last end.
    pub(crate) fn cost(&self) -> i64 {
        let Uniform { all, latency, gain, moves } = self.ring;
        self.launch + all + latency + moves * gain.max(0)
    }

    /// Ends of `T` communicators: row `g` of a tile has the times of group rank `g`.
    #[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
    #[inline(always)]
    pub(crate) fn walk<const T: usize>(&self, arrivals: &[i64], ends: &mut [i64]) {
        let walk = Walk { ring: &self.ring, launch: self.launch, order: &self.shape.ring, width: T };
        walk.tile::<T, i64>(0, arrivals, ends);
    }
}

wide! {
    /// Completion of rings of equal links. `order` are the group ranks by ring position.
    fn rings(
        ring: &Uniform,
        launch: i64,
        order: &[u32],
        width: usize,
        arrivals: &[SimTime],
        ends: &mut [SimTime],
    ) -> i64 {
        let walk = Walk { ring, launch, order, width };
        let (mut column, mut latest) = (0, 0);
        while column < width {
            let rest = width - column;
            let (columns, end) = if rest >= TILE {
                (TILE, walk.tile::<TILE, SimTime>(column, arrivals, ends))
            } else if rest >= NARROW {
                (NARROW, walk.tile::<NARROW, SimTime>(column, arrivals, ends))
            } else {
                (1, walk.tile::<1, SimTime>(column, arrivals, ends))
            };
            column += columns;
            latest = latest.max(end);
        }
        latest
    }

    /// Everybody of a column ends `duration` after its last arrival.
    fn together(duration: i64, width: usize, arrivals: &[SimTime], ends: &mut [SimTime]) -> i64 {
        let (first, others) = ends.split_at_mut(width);
        first.copy_from_slice(&arrivals[..width]);
        for row in arrivals.chunks_exact(width).skip(1) {
            for (last, arrival) in first.iter_mut().zip(row) {
                last.0 = last.0.max(arrival.0);
            }
        }
        let mut latest = 0;
        for last in first.iter_mut() {
            last.0 = last.0.wrapping_add(duration);
            latest = latest.max(last.0);
        }
        for row in others.chunks_exact_mut(width) {
            row.copy_from_slice(first);
        }
        latest
    }
}

/// Rings side by side: see [`Uniform::completion`], which this is for many columns.
struct Walk<'a> {
    ring: &'a Uniform,
    launch: i64,
    order: &'a [u32],
    width: usize,
}

#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
impl Walk<'_> {
    /// Where a row's part in a tile is.
    #[inline(always)]
    fn row<const T: usize>(&self, position: usize, column: usize) -> Range<usize> {
        let start = self.order[position] as usize * self.width + column;
        start..start + T
    }

    /// Returns the latest end.
    #[inline(always)]
    fn tile<const T: usize, P: Picoseconds>(&self, column: usize, arrivals: &[P], ends: &mut [P]) -> i64 {
        let n = self.order.len();
        let &Uniform { all, latency, gain, moves } = self.ring;
        let row = |position: usize| -> &[P; T] {
            arrivals[self.row::<T>(position, column)].try_into().expect("as long as asked for")
        };
        let mut latest = [0; T];
        let mut best: [i64; T];
        if gain <= 0 {
            best = row(0).map(P::get);
            for position in 1..n {
                carry(&mut best, gain, row(position));
            }
            let all = all + self.launch;
            for position in 0..n {
                let row = row(position);
                let into: &mut [P; T] =
                    (&mut ends[self.row::<T>(position, column)]).try_into().expect("as long as asked for");
                for at in 0..T {
                    let next = row[at].get().max(best[at] + gain);
                    // A rank also waits for the last message to come in.
                    let end = next.max(best[at] + latency) + all;
                    into[at] = P::of(end);
                    latest[at] = latest[at].max(end);
                    best[at] = next;
                }
            }
        } else {
            best = row(n - 1).map(P::get);
            for position in (0..n - 1).rev() {
                carry(&mut best, -gain, row(position));
            }
            // What is found at position `p` is what reaches position `p + moves`.
            let all = all + self.launch + moves * gain;
            let mut to = (moves % n as i64) as usize;
            for position in (0..n).rev() {
                let row = row(position);
                let into: &mut [P; T] =
                    (&mut ends[self.row::<T>(to, column)]).try_into().expect("as long as asked for");
                for at in 0..T {
                    let next = row[at].get().max(best[at] - gain);
                    let end = best[at].max(next + latency) + all;
                    into[at] = P::of(end);
                    latest[at] = latest[at].max(end);
                    best[at] = next;
                }
                to = if to == 0 { n - 1 } else { to - 1 };
            }
        }
        latest.into_iter().max().unwrap_or(0)
    }
}

/// A time as tables have it.
trait Picoseconds: Copy {
    fn get(self) -> i64;
    fn of(ps: i64) -> Self;
}

impl Picoseconds for SimTime {
    fn get(self) -> i64 {
        self.0
    }

    fn of(ps: i64) -> Self {
        Self(ps)
    }
}

impl Picoseconds for i64 {
    fn get(self) -> i64 {
        self
    }

    fn of(ps: i64) -> Self {
        ps
    }
}

#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
#[inline(always)]
fn carry<const T: usize, P: Picoseconds>(best: &mut [i64; T], gain: i64, row: &[P; T]) {
    for (best, arrival) in best.iter_mut().zip(row) {
        *best = arrival.get().max(*best + gain);
    }
}
