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
                (TILE, walk.tile::<TILE>(column, arrivals, ends))
            } else if rest >= NARROW {
                (NARROW, walk.tile::<NARROW>(column, arrivals, ends))
            } else {
                (1, walk.tile::<1>(column, arrivals, ends))
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
    /// A row's part in a tile.
    #[inline(always)]
    fn row<'a, const T: usize>(&self, times: &'a [SimTime], position: usize, column: usize) -> &'a [SimTime; T] {
        let start = self.order[position] as usize * self.width + column;
        times[start..start + T].try_into().expect("as long as asked for")
    }

    #[inline(always)]
    fn row_mut<'a, const T: usize>(
        &self,
        times: &'a mut [SimTime],
        position: usize,
        column: usize,
    ) -> &'a mut [SimTime; T] {
        let start = self.order[position] as usize * self.width + column;
        (&mut times[start..start + T]).try_into().expect("as long as asked for")
    }

    /// Returns the latest end.
    #[inline(always)]
    fn tile<const T: usize>(&self, column: usize, arrivals: &[SimTime], ends: &mut [SimTime]) -> i64 {
        let n = self.order.len();
        let &Uniform { all, latency, gain, moves } = self.ring;
        let mut latest = [0; T];
        let mut best: [i64; T];
        if gain <= 0 {
            best = self.row::<T>(arrivals, 0, column).map(|time| time.0);
            for position in 1..n {
                carry(&mut best, gain, self.row::<T>(arrivals, position, column));
            }
            let all = all + self.launch;
            for position in 0..n {
                let row = self.row::<T>(arrivals, position, column);
                let into = self.row_mut::<T>(ends, position, column);
                for at in 0..T {
                    let next = row[at].0.max(best[at] + gain);
                    // A rank also waits for the last message to come in.
                    into[at].0 = next.max(best[at] + latency) + all;
                    latest[at] = latest[at].max(into[at].0);
                    best[at] = next;
                }
            }
        } else {
            best = self.row::<T>(arrivals, n - 1, column).map(|time| time.0);
            for position in (0..n - 1).rev() {
                carry(&mut best, -gain, self.row::<T>(arrivals, position, column));
            }
            // What is found at position `p` is what reaches position `p + moves`.
            let all = all + self.launch + moves * gain;
            let mut to = (moves % n as i64) as usize;
            for position in (0..n).rev() {
                let row = self.row::<T>(arrivals, position, column);
                let into = self.row_mut::<T>(ends, to, column);
                for at in 0..T {
                    let next = row[at].0.max(best[at] - gain);
                    into[at].0 = best[at].max(next + latency) + all;
                    latest[at] = latest[at].max(into[at].0);
                    best[at] = next;
                }
                to = if to == 0 { n - 1 } else { to - 1 };
            }
        }
        latest.into_iter().max().unwrap_or(0)
    }
}

#[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
#[inline(always)]
fn carry<const T: usize>(best: &mut [i64; T], gain: i64, row: &[SimTime; T]) {
    for (best, arrival) in best.iter_mut().zip(row) {
        *best = arrival.0.max(*best + gain);
    }
}
