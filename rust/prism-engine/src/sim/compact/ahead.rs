//! Hosts that run ahead of their streams.
//!
//! A walk stops at the first op whose stream waits for communication: mostly what it waits for comes soon, and nothing has to be
//! kept. Where everybody has stopped, some rank needs what another issues later: then each may go on for a number of ops, which
//! are held until their stream is free.

use super::ops::{Code, Number, OpInfo};
use super::state::{NEVER, NONE, Tables, Turn, stall};
use super::{Irregular, Machine};
use std::collections::VecDeque;

/// Ops that a rank may hold when everybody has stopped for the first time.
const FIRST_PERMIT: u32 = 8;
/// So often everybody may stop before ranks may hold more without that.
const STOPS_PER_RAISE: u32 = 16;

/// An op whose stream is not free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// When the host issued it.
    pub(super) issue: i64,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Compute {
        duration: i64,
        account: u8,
    },
    Record {
        event: u32,
        record: u32,
    },
    /// Waits for a record that is held.
    Wait {
        record: u32,
    },
    WaitUntil {
        time: i64,
    },
    Launch {
        slot: u32,
        info: OpInfo,
        turn: Turn,
    },
    Group {
        group: u32,
    },
    Begin {
        number: u32,
    },
    IterationEnd {
        number: u32,
    },
}

/// A record that was held.
#[derive(Clone, Copy, Debug)]
struct Record {
    time: i64,
    /// Streams that wait for it.
    waiting: u64,
}

/// What a rank holds.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// By stream.
    queues: Vec<VecDeque<Held>>,
    /// Streams with ops, and those of them that can go on.
    queued: u64,
    runnable: u64,
    held: u32,
    permit: u32,
    records: Vec<Record>,
}

impl Ahead {
    pub(super) fn queue(&mut self, stream: u8) -> Option<&mut VecDeque<Held>> {
        self.queues.get_mut(usize::from(stream))
    }
}

/// How far hosts may run ahead.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// Always, and since the latest stop.
    most_held: u32,
    permit: u32,
    stops: u32,
    /// Ranks that hold ops have gone on since then.
    has_moved: bool,
}

impl Limits {
    /// May any rank hold ops without being asked to?
    pub(super) fn is_open(&self) -> bool {
        self.most_held > 0
    }
}

/// The event's latest record is held.
fn held_record(record: u32) -> i64 {
    NEVER + 1 + i64::from(record)
}

impl<N: Number> Machine<'_, N> {
    /// Nobody can go on: lets those who have stopped at a stream that is not free run ahead. False: there are none.
    pub(super) fn run_ahead(&mut self) -> bool {
        let limits = &mut self.limits;
        limits.stops += 1;
        let is_again = limits.permit > 0 && !std::mem::take(&mut limits.has_moved);
        limits.permit = if is_again { limits.permit.saturating_mul(2) } else { FIRST_PERMIT.max(limits.most_held) };
        if limits.stops.is_multiple_of(STOPS_PER_RAISE) {
            limits.most_held = limits.most_held.max(FIRST_PERMIT / 2).saturating_mul(2);
        }
        let permit = limits.permit;
        let has_stopped = |tables: &Tables, rank: u32| {
            let reason = tables.ranks[rank as usize].stall;
            reason < stall::EVENT && reason & stall::AHEAD != 0
        };
        let before = self.ready.len();
        for rank in (0..self.tables.ranks.len() as u32).rev() {
            if has_stopped(&self.tables, rank) {
                let ahead = self.ahead_of(rank);
                ahead.permit = ahead.held + permit;
                self.tables.ranks[rank as usize].stall = stall::RUNNING;
                self.ready.push(rank);
            }
        }
        self.ready.len() > before
    }

    fn ahead_of(&mut self, rank: u32) -> &mut Ahead {
        let state = &mut self.tables.ranks[rank as usize];
        if state.ahead == NONE {
            state.ahead = self.aheads.len() as u32;
            let queues = vec![VecDeque::new(); usize::from(state.streams)];
            self.aheads.push(Ahead { queues, ..Ahead::default() });
        }
        &mut self.aheads[state.ahead as usize]
    }

    /// May a rank hold one more op?
    pub(super) fn may_hold(&self, rank: u32) -> bool {
        let ahead = self.aheads.get(self.tables.ranks[rank as usize].ahead as usize);
        ahead.map_or(self.limits.most_held > 0, |ahead| ahead.held < ahead.permit.max(self.limits.most_held))
    }

    /// Holds an op whose stream is not free, or which waits for a record that is held. False: the rank has to stop.
    #[cold]
    pub(super) fn hold(&mut self, rank: u32, row: u64, info: OpInfo, issue: i64) -> Result<bool, Irregular> {
        if info.code == Code::StreamSync || !self.may_hold(rank) {
            return Ok(false);
        }
        let state = self.tables.ranks[rank as usize];
        let event = state.event(info.arg);
        let what = match info.code {
            Code::Compute => {
                let (is_odd, common) = (state.odd != NONE, self.duration(rank, row));
                let odd = is_odd.then(|| &mut self.tables.odd[state.odd as usize]);
                let duration = odd.map_or(common, |odd| odd.duration(row, common, info.is_fixed()));
                What::Compute { duration, account: info.account }
            }
            Code::Call | Code::Send | Code::Receive => {
                let slot = state.slots + info.slot;
                let turn = self.issue_launch(slot, 1 << info.stream);
                What::Launch { slot, info, turn }
            }
            Code::Record => {
                let records = &mut self.ahead_of(rank).records;
                let record = records.len() as u32;
                records.push(Record { time: NEVER, waiting: 0 });
                self.tables.words[event] = held_record(record);
                What::Record { event: info.arg, record }
            }
            Code::Wait => match self.tables.words[event] {
                NEVER => return Err(Irregular),
                time if time >= 0 => What::WaitUntil { time },
                held => What::Wait { record: (held - NEVER - 1) as u32 },
            },
            Code::Begin => What::Begin { number: self.next_marker(rank, true) },
            Code::IterationEnd => What::IterationEnd { number: self.next_marker(rank, false) },
            Code::StreamSync | Code::EventSync | Code::DeviceSync | Code::Host => return Err(Irregular),
        };
        self.push_held(rank, info.stream, Held { issue, what });
        Ok(true)
    }

    /// Puts an op at the end of what a stream has to do.
    pub(super) fn push_held(&mut self, rank: u32, stream: u8, held: Held) {
        let bit = 1 << stream;
        let state = &mut self.tables.ranks[rank as usize];
        let is_free = state.blocked & bit == 0;
        state.blocked |= bit;
        let ahead = self.ahead_of(rank);
        ahead.queues[usize::from(stream)].push_back(held);
        ahead.held += 1;
        ahead.queued |= bit;
        if let (true, What::Wait { record }) = (is_free, held.what) {
            ahead.records[record as usize].waiting |= bit;
        }
    }

    /// The communication of a stream has ended, and the rank may hold ops.
    #[cold]
    pub(super) fn wake_ahead(&mut self, rank: u32, stream: u8) {
        let state = &mut self.tables.ranks[rank as usize];
        let ahead = &mut self.aheads[state.ahead as usize];
        let bit = 1 << stream;
        if ahead.queued & bit != 0 {
            state.blocked |= bit;
            ahead.runnable |= bit;
        }
        if state.stall != stall::RUNNING {
            state.stall = stall::RUNNING;
            self.ready.push(rank);
        }
    }

    /// Evaluates what a rank holds, as far as its streams are free.
    #[cold]
    pub(super) fn drain(&mut self, rank: u32) -> Result<(), Irregular> {
        self.limits.has_moved = true;
        let number = self.tables.ranks[rank as usize].ahead as usize;
        while self.aheads[number].runnable != 0 {
            let stream = self.aheads[number].runnable.trailing_zeros() as u8;
            let bit = 1 << stream;
            while self.aheads[number].runnable & bit != 0 {
                let Some(held) = self.aheads[number].queues[usize::from(stream)].front().copied() else {
                    let ahead = &mut self.aheads[number];
                    ahead.queued &= !bit;
                    ahead.runnable &= !bit;
                    self.tables.ranks[rank as usize].blocked &= !bit;
                    break;
                };
                if let What::Wait { record } = held.what {
                    let record = &mut self.aheads[number].records[record as usize];
                    if record.time == NEVER {
                        record.waiting |= bit;
                        self.aheads[number].runnable &= !bit;
                        break;
                    }
                }
                let ahead = &mut self.aheads[number];
                ahead.queues[usize::from(stream)].pop_front();
                ahead.held -= 1;
                if !self.run_held(rank, stream, held)? {
                    self.aheads[number].runnable &= !bit;
                }
            }
        }
        let ahead = &mut self.aheads[number];
        if ahead.held == 0 {
            ahead.records.clear();
            (ahead.queued, ahead.permit) = (0, 0);
        }
        Ok(())
    }

    /// Evaluates an op of a free stream. False: the stream waits for communication now.
    fn run_held(&mut self, rank: u32, stream: u8, Held { issue, what }: Held) -> Result<bool, Irregular> {
        let state = self.tables.ranks[rank as usize];
        let word = state.words as usize + usize::from(stream);
        let come = issue.max(self.tables.words[word]);
        match what {
            What::Compute { duration, account } => {
                self.tables.words[word] = come + duration;
                self.sums[usize::from(account)] += i128::from(duration);
                return Ok(true);
            }
            What::Wait { record } => {
                let time = self.aheads[state.ahead as usize].records[record as usize].time;
                self.tables.words[word] = come.max(time);
                return Ok(true);
            }
            What::WaitUntil { time } => {
                self.tables.words[word] = come.max(time);
                return Ok(true);
            }
            What::Launch { slot, info, turn } => {
                let end = self.launch(slot, info, come, turn)?;
                if let Some(end) = end {
                    self.tables.words[word] = end;
                }
                return Ok(end.is_some());
            }
            What::Group { group } => {
                self.enter_group(group, stream)?;
                return Ok(false);
            }
            What::Record { event, record } => {
                let event = state.event(event);
                if self.tables.words[event] == held_record(record) {
                    self.tables.words[event] = come;
                }
                let ahead = &mut self.aheads[state.ahead as usize];
                let record = &mut ahead.records[record as usize];
                record.time = come;
                ahead.runnable |= std::mem::take(&mut record.waiting);
            }
            What::Begin { number } => self.begins.push((rank, number, come)),
            What::IterationEnd { number } => self.iteration_ends.push((rank, number, come)),
        }
        self.tables.words[word] = come;
        Ok(true)
    }
}
