//! The walk over the programs: each rank's ops in the order in which its host issues them, until it has to wait.

use super::groups::{Cursor, Step};
use super::ops::{ACCOUNTS, Code, Number, OpInfo, Reader};
use super::state::{NEVER, NONE, stall};
use super::{Irregular, Machine};

/// What a list of equal values is read from.
static ZEROS: [u8; 8] = [0; 8];

fn source<'a>(reader: &Reader, data: &'a [u8]) -> &'a [u8] {
    if reader.is_constant() { &ZEROS } else { data }
}

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

    fn walk(&mut self, rank: u32) -> Result<(), Irregular> {
        let state = self.tables.ranks[rank as usize];
        let (mut row, end, mut host, mut base) = (state.row, state.end, state.host, state.base);
        let (mut gaps, mut durations, mut blocked) = (state.gaps, state.durations, state.blocked);
        let (gap_data, duration_data) = (source(&gaps, self.gaps), source(&durations, self.durations));
        let (words, events) = (state.words as usize, state.event(0));
        let reason = loop {
            if row == end {
                break stall::DONE;
            }
            let info: OpInfo = self.ops[self.rows[row as usize].index()];
            let stream = usize::from(info.stream);
            if state.has_groups && matches!(info.code, Code::Call | Code::Send | Code::Receive) {
                self.tables.ranks[rank as usize].blocked = blocked;
                let step = self.walk_group(rank, Cursor { row, end, host, gaps, durations }, gap_data)?;
                blocked = self.tables.ranks[rank as usize].blocked;
                match step {
                    Step::Alone => {}
                    Step::Stopped(reason) => break reason,
                    Step::Issued(next) => {
                        (row, host, gaps, durations) = (next.row, next.host, next.gaps, next.durations);
                        continue;
                    }
                }
            }
            let issue = host + gaps.peek(gap_data);
            // Does the op have to wait for its stream, or for an event?
            let mut is_early = blocked >> (info.stream & 63) & 1 != 0;
            let mut next_host = issue;
            if !is_early {
                match info.code {
                    Code::Compute => {
                        let mut duration = durations.peek(duration_data);
                        if state.odd != NONE {
                            duration = self.tables.odd[state.odd as usize].duration(row, duration);
                        }
                        let clock = &mut self.tables.words[words + stream];
                        *clock = issue.max(*clock) + duration;
                        self.sums[usize::from(info.account) % ACCOUNTS] += i128::from(duration);
                    }
                    Code::Call | Code::Send | Code::Receive => {
                        let slot = state.slots + info.slot;
                        let arrival = issue.max(self.tables.words[words + stream]);
                        let turn = self.issue_launch(slot, 1 << info.stream);
                        match self.launch(slot, info, arrival, turn)? {
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
                if !self.hold(rank, row, info, issue, durations.peek(duration_data))? {
                    break if info.code == Code::StreamSync { info.stream } else { info.stream | stall::AHEAD };
                }
                blocked = self.tables.ranks[rank as usize].blocked;
            }
            host = next_host;
            gaps.advance();
            durations.advance();
            row += 1;
        };
        let state = &mut self.tables.ranks[rank as usize];
        (state.row, state.host, state.base, state.blocked) = (row, host, base, blocked);
        (state.gaps, state.durations, state.stall) = (gaps, durations, reason);
        Ok(())
    }

    /// Number of a rank's next marker.
    pub(super) fn next_marker(&mut self, rank: u32, is_begin: bool) -> u32 {
        let state = &mut self.tables.ranks[rank as usize];
        let next = if is_begin { &mut state.begins } else { &mut state.iterations };
        *next += 1;
        *next - 1
    }
}
