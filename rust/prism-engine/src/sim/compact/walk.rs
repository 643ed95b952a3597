//! The walk over the programs: each rank's ops in the order in which its host issues them, until it has to wait.

use super::groups::{Cursor, Step};
use super::meet::Half;
use super::ops::{ACCOUNTS, Code, Number, OpInfo};
use super::state::{NEVER, NONE, stall};
use super::{Irregular, Machine};
use std::ops::Range;

/// When a host goes on.
enum Resume {
    At(i64),
    /// The record that it waits for is held.
    Later,
}

impl<N: Number> Machine<'_, N> {
    /// Runs every rank as far as it comes. Whether all have come through is not said.
    pub(super) fn run(&mut self) -> Result<(), Irregular> {
        loop {
            while let Some(rank) = self.ready.pop() {
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

    #[inline]
    fn walk(&mut self, rank: u32) -> Result<(), Irregular> {
        if self.tables.ranks[rank as usize].ahead != NONE {
            self.drain(rank)?;
        }
        let (rows, ops, duration_data) = (self.rows, self.ops, self.durations);
        let state = &self.tables.ranks[rank as usize];
        let (mut row, end, mut host, mut base) = (state.row, state.end, state.host, state.base);
        let (mut blocked, constant_gap) = (state.blocked, state.gaps.constant());
        let (has_gaps, has_groups, odd) = (state.gap_width > 0, state.has_groups, state.odd);
        let (words, events, slots) = (state.words as usize, state.event(0), state.slots);
        let (durations, duration_width) = (state.durations, state.duration_width);
        let may_hold = state.ahead != NONE || self.limits.is_open();
        let reason = loop {
            if row == end {
                break stall::DONE;
            }
            let info: OpInfo = ops[rows[row as usize].index()];
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
                        let mut duration = durations.get(duration_data, row, duration_width);
                        if odd != NONE {
                            duration = self.tables.odd[odd as usize].duration(row, duration, info.is_fixed());
                        }
                        let clock = &mut self.tables.words[words + stream];
                        *clock = issue.max(*clock) + duration;
                        self.sums[usize::from(info.account) % ACCOUNTS] += i128::from(duration);
                    }
                    Code::Call | Code::Send | Code::Receive => {
                        let number = slots + info.slot;
                        let arrival = issue.max(self.tables.words[words + stream]);
                        let slot = self.tables.slots[number as usize];
                        let end = if slot.last != info.stream {
                            self.launch_first(number, info, arrival)?
                        } else if info.code != Code::Call {
                            self.post_half(slot.comm, Half::of(info, slot.place), arrival, info.stream + 1)?
                        } else if self.arrive(slot.comm, slot.place, info.number, arrival, info.stream + 1)? {
                            self.complete(slot.comm, slot.place)?
                        } else {
                            None
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
                    Code::StreamSync | Code::EventSync | Code::DeviceSync => {
                        let clocks = if info.code == Code::DeviceSync { words..events } else { words..words };
                        match self.sync(rank, info, issue, clocks)? {
                            Resume::At(time) if info.code != Code::DeviceSync || blocked == 0 => base = time,
                            Resume::At(_) => break stall::DEVICE,
                            Resume::Later => break stall::EVENT,
                        }
                        next_host = base;
                    }
                    Code::Host => {}
                    Code::Begin | Code::IterationEnd => {
                        let clock = &mut self.tables.words[words + stream];
                        let time = issue.max(*clock);
                        *clock = time;
                        self.mark(rank, info.code == Code::Begin, time);
                    }
                }
            }
            if is_early {
                self.tables.ranks[rank as usize].blocked = blocked;
                if !may_hold || !self.hold(rank, row, info, issue)? {
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

    /// When the host goes on that comes to a wait at `issue`; nothing is in the way on its stream. `clocks` are those of all
    /// streams, if it waits for all.
    #[inline(never)]
    fn sync(&self, rank: u32, info: OpInfo, issue: i64, clocks: Range<usize>) -> Result<Resume, Irregular> {
        let state = &self.tables.ranks[rank as usize];
        let time = match info.code {
            Code::StreamSync => self.tables.words[state.words as usize + usize::from(info.stream)],
            Code::EventSync => self.tables.words[state.event(info.arg)],
            _ => self.tables.words[clocks].iter().copied().fold(issue, i64::max),
        };
        match time {
            NEVER => Err(Irregular),
            time if time < 0 => Ok(Resume::Later),
            time => Ok(Resume::At(issue.max(time))),
        }
    }

    /// A stream has come to a marker.
    #[inline(never)]
    fn mark(&mut self, rank: u32, is_begin: bool, time: i64) {
        let number = self.next_marker(rank, is_begin);
        let markers = if is_begin { &mut self.begins } else { &mut self.iteration_ends };
        markers.push((rank, number, time));
    }

    /// Number of a rank's next marker.
    pub(super) fn next_marker(&mut self, rank: u32, is_begin: bool) -> u32 {
        let state = &mut self.tables.ranks[rank as usize];
        let next = if is_begin { &mut state.begins } else { &mut state.iterations };
        *next += 1;
        *next - 1
    }
}
