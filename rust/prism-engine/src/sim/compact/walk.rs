//! The walk over the programs: each rank's ops in the order in which its host issues them, until it has to wait.

use super::ops::{Code, Number, OpInfo, Reader};
use super::state::{NEVER, NONE, Slot, stall};
use super::{Irregular, Machine};

/// What a list of equal values is read from.
static ZEROS: [u8; 8] = [0; 8];

fn source<'a>(reader: &Reader, data: &'a [u8]) -> &'a [u8] {
    if reader.is_constant() { &ZEROS } else { data }
}

impl<N: Number> Machine<'_, N> {
    /// Runs every rank as far as it comes.
    pub(super) fn run(&mut self) -> Result<(), Irregular> {
        while let Some(rank) = self.ready.pop() {
            self.walk(rank)?;
        }
        Ok(())
    }

    fn walk(&mut self, rank: u32) -> Result<(), Irregular> {
        let state = self.tables.ranks[rank as usize];
        let (mut row, end, mut host, mut base) = (state.row, state.end, state.host, state.base);
        let (mut gaps, mut durations, mut blocked) = (state.gaps, state.durations, state.blocked);
        let (gap_data, duration_data) = (source(&gaps, self.gaps), source(&durations, self.durations));
        let (words, events) = (state.words as usize, state.words as usize + usize::from(state.streams));
        let reason = loop {
            if row == end {
                break stall::DONE;
            }
            let info: OpInfo = self.ops[self.rows[row as usize].index()];
            let stream = usize::from(info.stream);
            if blocked >> (info.stream & 63) & 1 != 0 {
                break info.stream;
            }
            let issue = host + gaps.peek(gap_data);
            match info.code {
                Code::Compute => {
                    let mut duration = durations.peek(duration_data);
                    if state.odd != NONE {
                        duration = self.tables.odd[state.odd as usize].duration(row, duration);
                    }
                    let clock = &mut self.tables.words[words + stream];
                    *clock = issue.max(*clock) + duration;
                    self.sums[usize::from(info.account) % super::ops::ACCOUNTS] += i128::from(duration);
                }
                Code::Call => {
                    let slot = &mut self.tables.slots[(state.slots + info.slot) as usize];
                    let slot = *slot.come(info.stream)?;
                    let arrival = issue.max(self.tables.words[words + stream]);
                    if self.arrive(&slot, info, arrival)? {
                        self.tables.words[words + stream] = self.complete(slot.comm, rank)?;
                    } else {
                        blocked |= 1 << info.stream;
                    }
                }
                Code::Send | Code::Receive => {
                    let slot = &mut self.tables.slots[(state.slots + info.slot) as usize];
                    let slot = *slot.come(info.stream)?;
                    let arrival = issue.max(self.tables.words[words + stream]);
                    match self.post_half(&slot, info, arrival)? {
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
                    if time == NEVER {
                        return Err(Irregular);
                    }
                    let clock = &mut self.tables.words[words + stream];
                    *clock = issue.max(*clock).max(time);
                }
                Code::StreamSync => {
                    base = issue.max(self.tables.words[words + stream]);
                }
                Code::EventSync => {
                    let time = self.tables.words[events + info.arg as usize];
                    if time == NEVER {
                        return Err(Irregular);
                    }
                    base = issue.max(time);
                }
                Code::DeviceSync => {
                    if blocked != 0 {
                        break stall::DEVICE;
                    }
                    base = self.tables.words[words..events].iter().fold(issue, |latest, clock| latest.max(*clock));
                }
                Code::Host => {}
                Code::Begin | Code::IterationEnd => {
                    let clock = &mut self.tables.words[words + stream];
                    *clock = issue.max(*clock);
                    let time = *clock;
                    self.mark(rank, info.code == Code::Begin, time);
                }
            }
            host = if matches!(info.code, Code::StreamSync | Code::EventSync | Code::DeviceSync) { base } else { issue };
            gaps.advance();
            durations.advance();
            row += 1;
        };
        let state = &mut self.tables.ranks[rank as usize];
        (state.row, state.host, state.base, state.blocked) = (row, host, base, blocked);
        (state.gaps, state.durations, state.stall) = (gaps, durations, reason);
        Ok(())
    }

    fn mark(&mut self, rank: u32, is_begin: bool, time: i64) {
        let state = &mut self.tables.ranks[rank as usize];
        if is_begin {
            self.begins.push((rank, state.begins, time));
            state.begins += 1;
        } else {
            self.iteration_ends.push((rank, state.iterations, time));
            state.iterations += 1;
        }
    }
}

impl Slot {
    /// The rank comes to the slot on a stream that is free.
    #[inline]
    fn come(&mut self, stream: u8) -> Result<&Self, Irregular> {
        if self.last != stream {
            if self.last != Self::UNUSED {
                return Err(Irregular);
            }
            self.last = stream;
        }
        Ok(self)
    }
}
