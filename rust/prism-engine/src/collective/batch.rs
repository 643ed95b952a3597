//! Many communicators at once: all of one shape, with one call, side by side in a table.
//!
//! `times[group_rank * width + column]` is the time of a member of the communicator in a column. A ring is walked position by
//! position for a tile of columns at a time, so that what is carried round stays in registers and every step is vector code,
//! whatever the number of members.

use super::CollectiveKind;
use super::plan::{self, Algorithm, BatchForm, CollectiveCall, Scratch};
use super::ring::Uniform;
use super::shape::CommShape;
use super::window::LIMIT;
use crate::cost::comm::transfer_time;
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

/// Least time that the bytes which each member must send in a call take at its fastest port, alone; zero where members may
/// have nothing to send (trees, chains, gather and scatter).
pub(crate) fn least_time(shape: &CommShape, call: &CollectiveCall, scratch: &mut Scratch) -> SimTime {
    let algorithm = plan::algorithm(shape, call, scratch);
    let laps = match (algorithm, call.kind) {
        (Some(Algorithm::Ring), CollectiveKind::AllReduce) => 2,
        (Some(Algorithm::Ring), _) | (Some(Algorithm::Direct), CollectiveKind::AllToAll) => 1,
        _ => return SimTime::ZERO,
    };
    // A ring that leaves a node has as many cards there as the node has members at the most.
    let largest = shape.node_sizes.iter().copied().max().unwrap_or(1);
    let cards = shape.card.bytes_per_s.saturating_mul(u64::from(largest.min(shape.cards).max(1)));
    let rate = if largest == 1 { cards } else { cards.max(shape.nvlink.bytes_per_s) };
    let part = call.bytes / shape.len() as u64;
    let once = transfer_time(part.saturating_mul(shape.len() as u64 - 1), rate);
    // Rounded up once; the model rounds up every message.
    SimTime(once.0.saturating_sub(1).max(0).saturating_mul(laps))
}

/// A collective over rings of equal links, or one that everybody leaves together, to be walked tile by tile.
#[derive(Clone, Debug)]
pub(crate) struct TileWalk {
    form: BatchForm,
    /// Are ring positions group ranks?
    is_in_order: bool,
    shape: Arc<CommShape>,
}

impl TileWalk {
    /// The walk of a call, if it has one.
    pub(crate) fn new(shape: &Arc<CommShape>, call: &CollectiveCall, scratch: &mut Scratch) -> Option<Self> {
        let form = plan::batch_form(shape, call, scratch)?;
        let is_in_order = (0..).zip(&shape.ring).all(|(at, rank)| at == *rank);
        Some(Self { form, is_in_order, shape: Arc::clone(shape) })
    }

    /// Ends of one communicator by group rank; returns the latest.
    pub(crate) fn walk_one(&self, arrivals: &[SimTime], ends: &mut [SimTime]) -> i64 {
        let (ring, launch) = match &self.form {
            BatchForm::Ring(ring, launch) => (ring, launch.0),
            BatchForm::Together(duration) => {
                let last = arrivals.iter().max().map_or(0, |last| last.0) + duration.0;
                ends.fill(SimTime(last));
                return last;
            }
        };
        if !self.is_in_order || arrivals.len() != ends.len() {
            let walk = Walk { ring, launch, order: &self.shape.ring, width: 1 };
            return walk.tile::<1, SimTime>(0, arrivals, ends);
        }
        if ring.gain <= 0 {
            walk_shortest(ring, launch, arrivals, ends)
        } else {
            walk_longest(ring, launch, arrivals, ends)
        }
    }

    /// Members of each communicator.
    pub(crate) fn rows(&self) -> usize {
        self.shape.len()
    }

    /// Time from the last arrival to the last end.
    pub(crate) fn cost(&self) -> i64 {
        match self.form {
            BatchForm::Ring(Uniform { all, latency, gain, moves }, launch) => {
                launch.0 + all + latency + moves * gain.max(0)
            }
            BatchForm::Together(duration) => duration.0,
        }
    }

    /// Ends of `T` communicators: row `g` of a tile has the times of group rank `g`.
    #[allow(clippy::inline_always, reason = "to be compiled with the features of the caller")]
    #[inline(always)]
    pub(crate) fn walk<const T: usize>(&self, arrivals: &[i64], ends: &mut [i64]) {
        match &self.form {
            BatchForm::Ring(ring, launch) => {
                let walk = Walk { ring, launch: launch.0, order: &self.shape.ring, width: T };
                walk.tile::<T, i64>(0, arrivals, ends);
            }
            BatchForm::Together(duration) => {
                let mut last = [i64::MIN; T];
                for row in arrivals.chunks_exact(T) {
                    for (last, arrival) in last.iter_mut().zip(row) {
                        *last = (*last).max(*arrival);
                    }
                }
                for last in &mut last {
                    *last += duration.0;
                }
                ends.chunks_exact_mut(T).for_each(|row| row.copy_from_slice(&last));
            }
        }
    }
}

/// Ends of one ring of equal links whose positions are group ranks, where the shortest way from each member wins.
fn walk_shortest(ring: &Uniform, launch: i64, arrivals: &[SimTime], ends: &mut [SimTime]) -> i64 {
    let &Uniform { all, latency, gain, .. } = ring;
    let all = all + launch;
    let mut best = arrivals.iter().fold(i64::MIN / 2, |best, arrival| arrival.0.max(best + gain));
    let mut latest = 0;
    for (arrival, end) in arrivals.iter().zip(ends) {
        let next = arrival.0.max(best + gain);
        end.0 = next.max(best + latency) + all;
        latest = latest.max(end.0);
        best = next;
    }
    latest
}

/// The same where the longest way wins: what is found at position `p` is what reaches position `p + moves`.
fn walk_longest(ring: &Uniform, launch: i64, arrivals: &[SimTime], ends: &mut [SimTime]) -> i64 {
    let &Uniform { all, latency, gain, moves } = ring;
    let (n, all) = (arrivals.len(), all + launch + moves * gain);
    let mut best = arrivals.iter().rev().fold(i64::MIN / 2, |best, arrival| arrival.0.max(best - gain));
    let mut latest = 0;
    let last = (moves % n as i64) as usize;
    let (first_arrivals, last_arrivals) = arrivals.split_at(n - 1 - last);
    let (first_ends, last_ends) = ends.split_at_mut(last + 1);
    for (arrivals, ends) in [(last_arrivals, first_ends), (first_arrivals, last_ends)] {
        for (arrival, end) in arrivals.iter().rev().zip(ends.iter_mut().rev()) {
            let next = arrival.0.max(best - gain);
            end.0 = best.max(next + latency) + all;
            latest = latest.max(end.0);
            best = next;
        }
    }
    latest
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use proptest::prelude::*;

    /// Members of one communicator anywhere on the cluster, how many like it there are, and the arrivals of all.
    fn case() -> impl Strategy<Value = (Vec<u32>, usize, Vec<i64>)> {
        let members = (2..20usize, any::<u64>(), prop::sample::select(vec![1u32, 2, 8]));
        (members, 1..70usize).prop_flat_map(|((size, seed, spread), width)| {
            // Distinct ranks in an order that is not that of their nodes.
            let step = seed % 7 * 2 + 1;
            let members = (0..size as u64).map(|at| ((at * step) % 64) as u32 * spread).collect();
            // From hardly any skew to more than any collective takes.
            let skew = prop::sample::select(vec![1i64, 1_000_000, 1_000_000_000, 1_000_000_000_000]);
            let arrivals = skew.prop_flat_map(move |skew| prop::collection::vec(0..skew, size * width));
            (Just(members), Just(width), arrivals)
        })
    }

    fn kind() -> impl Strategy<Value = CollectiveKind> {
        use CollectiveKind as K;
        prop::sample::select(vec![K::AllReduce, K::AllGather, K::ReduceScatter, K::AllToAll, K::Broadcast, K::Gather])
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_batch_ends_as_its_communicators_do_alone(
            (members, width, arrivals) in case(),
            kind in kind(),
            bytes in prop::sample::select(vec![0u64, 8, 4096, 1 << 20, 1 << 30]),
        ) {
            let shape = CommShape::new(&members, &Profile::builtin("h100-sxm").expect("built in"));
            let call = CollectiveCall { kind, bytes, root: 0, ops: 1 };
            let mut scratch = Scratch::default();
            let arrivals: Vec<SimTime> = arrivals.into_iter().map(SimTime).collect();
            let mut ends = vec![SimTime::ZERO; arrivals.len()];
            let latest = batch_completion(&shape, &call, width, &arrivals, &mut ends, &mut scratch);
            let has_form = plan::batch_form(&shape, &call, &mut scratch).is_some();
            prop_assert_eq!(latest.is_some(), has_form);
            let least = least_time(&shape, &call, &mut scratch);
            for column in 0..width {
                let own: Vec<SimTime> = (0..shape.len()).map(|row| arrivals[row * width + column]).collect();
                let mut alone = own.clone();
                plan::completion(&shape, &call, &own, &mut alone, &mut scratch);
                for (row, end) in alone.iter().enumerate() {
                    prop_assert!(*end >= own[row] + least, "row {} is faster than its port", row);
                    prop_assert!(!has_form || ends[row * width + column] == *end, "column {column} row {row}");
                }
            }
            if has_form {
                prop_assert_eq!(latest, ends.iter().copied().max());
            }
        }

        #[test]
        fn rings_of_any_gain_are_walked_alike(
            size in 2..12usize, width in 1..50usize, messages in 1..200i64, slices in 1..5i64,
            occupancy in 1..1000i64, latency in 0..3000i64, seed in any::<u32>(),
        ) {
            let Some(ring) = Uniform::new(size, messages, slices, occupancy, latency) else { return Ok(()) };
            let turn = seed % size as u32;
            let order: Vec<u32> = (0..size as u32).map(|at| (at + turn) % size as u32).collect();
            let time = |at: usize| SimTime(i64::from((at as u32).wrapping_mul(seed | 1) % 100_000));
            let arrivals: Vec<SimTime> = (0..size * width).map(time).collect();
            let mut ends = vec![SimTime::ZERO; arrivals.len()];
            rings(&ring, 7, &order, width, &arrivals, &mut ends);
            let members: Vec<u32> = (0..size as u32).collect();
            let shape = Arc::new(CommShape::new(&members, &Profile::builtin("h100-sxm").expect("built in")));
            let walk = TileWalk { form: BatchForm::Ring(ring, SimTime(7)), is_in_order: true, shape };
            let mut in_order = Vec::new();
            ring.completion(&arrivals[..size].iter().map(|time| time.0).collect::<Vec<_>>(), &mut in_order);
            let mut walked = vec![SimTime::ZERO; size];
            let latest = walk.walk_one(&arrivals[..size], &mut walked);
            prop_assert_eq!(latest, walked.iter().map(|end| end.0).max().unwrap_or(0));
            prop_assert_eq!(walked.iter().map(|end| end.0 - 7).collect::<Vec<_>>(), in_order);
            for column in 0..width {
                let place = |rank: u32| rank as usize * width + column;
                let own: Vec<i64> = order.iter().map(|rank| arrivals[place(*rank)].0).collect();
                let mut alone = Vec::new();
                ring.completion(&own, &mut alone);
                for (rank, end) in order.iter().zip(alone) {
                    prop_assert_eq!(ends[place(*rank)].0, end + 7);
                }
            }
        }
    }

    #[test]
    fn both_signs_of_the_gain_occur() {
        let gain = |latency| Uniform::new(8, 100, 2, 1000, latency).expect("gets round").gain;
        assert!(gain(10) < 0 && gain(5000) > 0);
    }

    #[test]
    fn times_out_of_range_are_left_to_others() {
        let shape = CommShape::new(&[0, 1, 2, 3], &Profile::builtin("h100-sxm").expect("built in"));
        let call = CollectiveCall { kind: CollectiveKind::AllGather, bytes: 1 << 20, root: 0, ops: 1 };
        let mut arrivals = vec![SimTime::ZERO; 4 * 9];
        arrivals[20] = SimTime(LIMIT + 1);
        let mut ends = arrivals.clone();
        assert_eq!(batch_completion(&shape, &call, 9, &arrivals, &mut ends, &mut Scratch::default()), None);
    }
}
