//! The walk over the programs: each rank's ops in the order in which its host issues them, until it has to wait.

use super::groups::{Cursor, Step};
use super::ops::{ACCOUNTS, Code, Number, OpInfo};
use super::state::{NEVER, NONE, stall};
use super::{Irregular, Machine};

impl<N: Number> Machine<'_, N> {
    /// Runs every rank as far as it comes. Whether all have come through is not said.
    pub(super) fn run(&mut self) -> Result<(), Irregular> {
        loop {
            while let Some(rank) = self.ready.pop() {
                if self.tables.ranks[rank as usize].ahead != NONE {
                    self.note_move();
                    self.drain(rank)?;
                }
                self.walk(rank)?;
                if !self.ended.is_empty() {
                    self.settle()?;
                }
            }
            if !self.run_ahead() {
                return Ok(());
            }
        }
    }

    #[inline(never)]
    fn walk(&mut self, rank: u32) -> Result<(), Irregular> {
        let state = &self.tables.ranks[rank as usize];
        let (mut row, end, mut host, mut base) = (state.row, state.end, state.host, state.base);
        let (mut blocked, constant_gap) = (state.blocked, state.gaps.constant());
        let (has_gaps, has_groups, odd) = (state.gap_width > 0, state.has_groups, state.odd);
        let (words, events, slots) = (state.words as usize, state.event(0), state.slots);
        let reason = loop {
            if row == end {
                break stall::DONE;
            }
            let info: OpInfo = self.ops[self.rows[row as usize].index()];
            let stream = usize::from(info.stream);
            if has_groups && matches!(info.code, Code::Call | Code::Send | Code::Receive) {
                self.tables.ranks[rank as usize].blocked = blocked;
                let step = self.walk_group(rank, Cursor { row, end, host })?;
                blocked = self.tables.ranks[rank as usize].blocked;
                match step {
                    Step::Alone => {}
                    Step::Stopped(reason) => break reason,
                    Step::Issued(next) => {
                        (row, host) = (next.row, next.host);
                        continue;
                    }
                }
            }
            let issue = host + if has_gaps { self.gap(rank, row) } else { constant_gap };
            // Does the op have to wait for its stream, or for an event?
            let mut is_early = blocked >> (info.stream & 63) & 1 != 0;
            let mut next_host = issue;
            if !is_early {
                match info.code {
                    Code::Compute => {
                        let mut duration = self.duration(rank, row);
                        if odd != NONE {
                            duration = self.tables.odd[odd as usize].duration(row, duration);
                        }
                        let clock = &mut self.tables.words[words + stream];
                        *clock = issue.max(*clock) + duration;
                        self.sums[usize::from(info.account) % ACCOUNTS] += i128::from(duration);
                    }
                    Code::Call | Code::Send | Code::Receive => {
                        let slot = slots + info.slot;
                        let arrival = issue.max(self.tables.words[words + stream]);
                        let end = if self.tables.slots[slot as usize].last == info.stream {
                            self.post(slot, info, arrival, info.stream + 1)?
                        } else {
                            self.launch_first(slot, info, arrival)?
                        };
                        match end {
                            Some(end) => self.tables.words[words + stream] = end,
                            None => blocked |= 1 << info.stream,
                        }
                    }
                    Code::Record => {
                        let clock = &mut self.tables.words[words + stream];
                        let time = issue.max(*clock);
                        *clock = time;
                        self.tables.words[events + info.arg as usize] = time;
                    }
                    Code::Wait => {
                        let time = self.tables.words[events + info.arg as usize];
                        is_early = time < 0;
                        if !is_early {
                            let clock = &mut self.tables.words[words + stream];
                            *clock = issue.max(*clock).max(time);
                        }
                    }
                    Code::StreamSync => {
                        base = issue.max(self.tables.words[words + stream]);
                        next_host = base;
                    }
                    Code::EventSync => {
                        let time = self.tables.words[events + info.arg as usize];
                        if time == NEVER {
                            return Err(Irregular);
                        }
                        if time < 0 {
                            break stall::EVENT;
                        }
                        base = issue.max(time);
                        next_host = base;
                    }
                    Code::DeviceSync => {
                        if blocked != 0 {
                            break stall::DEVICE;
                        }
                        base = self.tables.words[words..events].iter().fold(issue, |latest, clock| latest.max(*clock));
                        next_host = base;
                    }
                    Code::Host => {}
                    Code::Begin | Code::IterationEnd => {
                        let clock = &mut self.tables.words[words + stream];
                        let time = issue.max(*clock);
                        *clock = time;
                        let is_begin = info.code == Code::Begin;
                        let number = self.next_marker(rank, is_begin);
                        let markers = if is_begin { &mut self.begins } else { &mut self.iteration_ends };
                        markers.push((rank, number, time));
                    }
                }
            }
            if is_early {
                self.tables.ranks[rank as usize].blocked = blocked;
                if !self.hold(rank, row, info, issue)? {
                    break if info.code == Code::StreamSync { info.stream } else { info.stream | stall::AHEAD };
                }
                blocked = self.tables.ranks[rank as usize].blocked;
            }
            host = next_host;
            row += 1;
        };
        let state = &mut self.tables.ranks[rank as usize];
        (state.row, state.host, state.base, state.blocked) = (row, host, base, blocked);
        state.stall = reason;
        Ok(())
    }

    /// Host gap of an op.
    #[inline]
    pub(super) fn gap(&self, rank: u32, row: u64) -> i64 {
        let state = &self.tables.ranks[rank as usize];
        state.gaps.get(self.gaps, row, state.gap_width)
    }

    /// Duration of a compute op in the program of a rank.
    #[inline]
    pub(super) fn duration(&self, rank: u32, row: u64) -> i64 {
        let state = &self.tables.ranks[rank as usize];
        state.durations.get(self.durations, row, state.duration_width)
    }

    /// Number of a rank's next marker.
    pub(super) fn next_marker(&mut self, rank: u32, is_begin: bool) -> u32 {
        let state = &mut self.tables.ranks[rank as usize];
        let next = if is_begin { &mut state.begins } else { &mut state.iterations };
        *next += 1;
        *next - 1
    }
}
