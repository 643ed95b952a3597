//! What one rank does in a window of time, as shares of its columns.

use crate::units::SimTime;

/// Levels of a share in a cell: 0 to 15.
const LEVELS: i64 = 15;

/// What a moment of a rank counts as; of several things at once, the first of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// Some stream computes.
    Compute = 0,
    /// Communication runs, and nothing hides it.
    Transfer = 1,
    /// Communication waits for another rank, and nothing hides it.
    Waiting = 2,
}

/// A stretch of time of one stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) start: SimTime,
    pub(super) end: SimTime,
    pub(super) state: State,
    /// Of communication, the rank's slot.
    pub(super) slot: u32,
}

/// Communication of one slot in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotTime {
    pub(super) slot: u32,
    /// From arrival to end, over all launches.
    pub(super) total: SimTime,
    /// Transfer that nothing hides.
    pub(super) transfer: SimTime,
    /// Waiting that nothing hides.
    pub(super) waiting: SimTime,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    /// Compute, transfer and waiting of each column, in fifteenths of the column.
    pub(super) cells: Vec<[u8; 3]>,
    /// Compute, transfer and waiting of the window; the rest is idle.
    pub(super) totals: [SimTime; 3],
    /// By slot.
    pub(super) slots: Vec<SlotTime>,
}

impl Row {
    /// The row of a rank from what its streams do. O(n log n).
    pub(super) fn of(busy: &[Busy], (start, end): (SimTime, SimTime), columns: usize) -> Self {
        let mut row = Self::default();
        let mut painter = Painter::new(start, end, columns);
        let mut events: Vec<(SimTime, bool, usize)> = Vec::with_capacity(2 * busy.len());
        for (at, piece) in busy.iter().enumerate() {
            let (from, to) = (piece.start.max(start), piece.end.min(end));
            if from < to {
                events.push((from, true, at));
                events.push((to, false, at));
                if piece.state != State::Compute {
                    row.slot(piece.slot).total += to - from;
                }
            }
        }
        events.sort_unstable();
        // What runs now, by state, in the order of its beginning.
        let mut active: [Vec<usize>; 3] = Default::default();
        let mut last = start;
        for (time, begins, at) in events {
            if time > last {
                row.account(busy, &active, time - last, |state| painter.paint(last, time, state));
                last = time;
            }
            let own = &mut active[busy[at].state as usize];
            if begins { own.push(at) } else { own.retain(|other| *other != at) }
        }
        row.cells = painter.cells();
        row
    }

    fn account(&mut self, busy: &[Busy], active: &[Vec<usize>; 3], length: SimTime, paint: impl FnOnce(State)) {
        let states = [State::Compute, State::Transfer, State::Waiting];
        let Some(state) = states.into_iter().find(|state| !active[*state as usize].is_empty()) else { return };
        self.totals[state as usize] += length;
        paint(state);
        let slot = busy[active[state as usize][0]].slot;
        match state {
            State::Compute => {}
            State::Transfer => self.slot(slot).transfer += length,
            State::Waiting => self.slot(slot).waiting += length,
        }
    }

    fn slot(&mut self, slot: u32) -> &mut SlotTime {
        let at = self.slots.iter().position(|own| own.slot == slot).unwrap_or_else(|| {
            self.slots.push(SlotTime { slot, ..SlotTime::default() });
            self.slots.len() - 1
        });
        &mut self.slots[at]
    }
}

/// Time by column.
struct Painter {
    start: SimTime,
    length: i64,
    sums: Vec<[i64; 3]>,
}

impl Painter {
    fn new(start: SimTime, end: SimTime, columns: usize) -> Self {
        Self { start, length: (end - start).as_ps().max(1), sums: vec![[0; 3]; columns] }
    }

    /// Where column `at` begins, ps from the start.
    fn edge(&self, at: usize) -> i64 {
        (i128::from(self.length) * at as i128 / self.sums.len() as i128) as i64
    }

    fn paint(&mut self, from: SimTime, to: SimTime, state: State) {
        let (from, to) = ((from - self.start).as_ps(), (to - self.start).as_ps());
        let columns = self.sums.len();
        let mut at = (i128::from(from) * columns as i128 / i128::from(self.length)) as usize;
        at = at.saturating_sub(1);
        while at < columns && self.edge(at) < to {
            let covered = to.min(self.edge(at + 1)) - from.max(self.edge(at));
            self.sums[at][state as usize] += covered.max(0);
            at += 1;
        }
    }

    fn cells(&self) -> Vec<[u8; 3]> {
        let level = |time: i64, width: i64| ((time * LEVELS + width / 2) / width.max(1)).clamp(0, LEVELS) as u8;
        let widths = (0..self.sums.len()).map(|at| self.edge(at + 1) - self.edge(at));
        self.sums.iter().zip(widths).map(|(sums, width)| sums.map(|time| level(time, width))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ns(time: i64) -> SimTime {
        SimTime::from_ns(time)
    }

    #[test]
    fn a_moment_counts_once_and_what_is_hidden_does_not() {
        let piece = |start, end, state, slot| Busy { start: ns(start), end: ns(end), state, slot };
        let busy = [
            piece(0, 40, State::Compute, 0),
            piece(30, 50, State::Transfer, 0),
            piece(50, 80, State::Waiting, 1),
            piece(60, 70, State::Transfer, 2),
            piece(95, 200, State::Compute, 0),
        ];
        let row = Row::of(&busy, (ns(10), ns(110)), 10);
        assert_eq!(row.totals, [ns(45), ns(20), ns(20)]);
        let slot = |slot, total, transfer, waiting| SlotTime {
            slot,
            total: ns(total),
            transfer: ns(transfer),
            waiting: ns(waiting),
        };
        assert_eq!(row.slots, [slot(0, 20, 10, 0), slot(1, 30, 0, 20), slot(2, 10, 10, 0)]);
        let (compute, transfer, waiting, idle) = ([15, 0, 0], [0, 15, 0], [0, 0, 15], [0, 0, 0]);
        let half = [8, 0, 0];
        assert_eq!(row.cells, [compute, compute, compute, transfer, waiting, transfer, waiting, idle, half, compute]);
    }

    #[test]
    fn windows_shorter_than_their_columns_are_painted() {
        let busy = [Busy { start: SimTime(0), end: SimTime(2), state: State::Compute, slot: 0 }];
        let row = Row::of(&busy, (SimTime(0), SimTime(2)), 4);
        assert_eq!(row.cells.len(), 4);
        assert_eq!(row.cells.iter().map(|cell| u32::from(cell[0])).sum::<u32>(), 30, "two columns have a width");
    }
}
