//! Answers that are known before they are asked for: equal work on an idle stream takes equal time.
//!
//! A program that reads thousands of small values back (an object per rank, a flag per tensor) makes the same few calls over
//! and over: launch, copy, wait. Each wait costs two switches between this process and the engine. When the stream that is
//! waited for was drained by the wait before, and has got work of its own only since, the answer depends on nothing but
//! that work and the host time of its calls. Once the engine has given the same answer [`TRUSTED_AFTER`] times, the process
//! goes on with it and tells the engine, which works it out all the same and fails the session if it is another.
//!
//! Calls that append records meanwhile wait for each other, so that the engine sees them in the order they were noted in.

use prism_wire::message::{Record, RecordKind, Reply};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Equal answers to equal work before the next one is foreseen.
const TRUSTED_AFTER: u32 = 2;
/// Records between two waits; longer work is not looked at.
const MOST_RECORDS: usize = 8;
/// Different work that is kept in mind.
const MOST_KNOWN: usize = 4096;

/// What a process knows of its waits.
#[derive(Default)]
pub(crate) struct Foresight {
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// The stream that was waited for last and when it was drained, while nothing has happened since that may matter.
    drained: Option<(u32, Moment)>,
    /// Work on it since, with host times from then on.
    work: Vec<Record>,
    known: HashMap<Vec<Record>, Known>,
    /// The engine is asked, and nothing has been appended since.
    is_asking: bool,
}

/// A time of the engine, and the host time it is rounded up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) ps: i64,
    pub(crate) host_ns: i64,
}

impl Moment {
    fn at(ps: i64) -> Self {
        Self { ps, host_ns: ps.div_euclid(1000) + i64::from(ps.rem_euclid(1000) != 0) }
    }

    /// Of an answer to a wait; `None` if the host came after the stream was drained.
    pub(crate) fn of(reply: &Reply) -> Option<Self> {
        (0..1000).contains(&reply.value).then(|| Self::at(reply.host_ns.saturating_mul(1000) - reply.value))
    }
}

/// How long some work took, from the wait before to its end.
struct Known {
    took_ps: i64,
    /// How often; 0: it differs.
    count: u32,
}

impl Foresight {
    /// Keeps others from appending while the guard lives.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A record is about to be appended.
    pub(crate) fn note(&mut self, record: &Record) {
        self.is_asking = false;
        let Some((stream, since)) = self.drained else { return };
        let is_own = RecordKind::from_u16(record.kind).is_some_and(RecordKind::is_compute) && record.stream == stream;
        if is_own && record.flags == 0 && self.work.len() < MOST_RECORDS {
            self.work.push(Record { host_ns: record.host_ns - since.host_ns, ..*record });
        } else {
            self.forget();
        }
    }

    /// What happened is not to be foreseen from.
    pub(crate) fn forget(&mut self) {
        self.drained = None;
        self.work.clear();
    }

    /// When the wait for a stream will be over, if that is known.
    pub(crate) fn foresee(&mut self, wait: &Record) -> Option<Moment> {
        let since = self.begin(wait);
        let known = self.known.get(&self.work).filter(|known| known.count >= TRUSTED_AFTER);
        let at = since.zip(known).map(|(since, known)| Moment::at(since.ps + known.took_ps));
        match at {
            Some(at) => self.drain(wait.stream, at),
            None => self.is_asking = true,
        }
        at
    }

    /// The engine has said when a wait was over that was not foreseen.
    pub(crate) fn learn(&mut self, wait: &Record, at: Option<Moment>) {
        // Another thread has been busy meanwhile, or it was no wait for one stream.
        let is_asking = std::mem::take(&mut self.is_asking) && wait.kind == RecordKind::StreamSync as u16;
        let Some(at) = at.filter(|_| is_asking) else { return self.forget() };
        // The wait itself is the last of the work.
        if let Some((_, since)) = self.drained {
            let took_ps = at.ps - since.ps;
            let is_new = !self.known.contains_key(&self.work);
            if !is_new || self.known.len() < MOST_KNOWN {
                let known = self.known.entry(std::mem::take(&mut self.work)).or_insert(Known { took_ps, count: 0 });
                if known.took_ps == took_ps && (is_new || known.count > 0) {
                    known.count += 1;
                } else {
                    known.count = 0;
                }
            }
        }
        self.drain(wait.stream, at);
    }

    /// Takes a wait for the stream up into the work; the time since which the work counts.
    fn begin(&mut self, wait: &Record) -> Option<Moment> {
        let is_wait = wait.kind == RecordKind::StreamSync as u16 && wait.flags == 0;
        match self.drained {
            Some((stream, since)) if is_wait && stream == wait.stream => {
                self.work.push(Record { host_ns: wait.host_ns - since.host_ns, h: 0, ..*wait });
                Some(since)
            }
            _ => {
                self.forget();
                None
            }
        }
    }

    fn drain(&mut self, stream: u32, at: Moment) {
        self.drained = Some((stream, at));
        self.work.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(host_ns: i64, bytes: u64) -> Record {
        Record { kind: RecordKind::Memcpy as u16, stream: 3, host_ns, a: bytes, b: 2, ..Record::default() }
    }

    fn wait(host_ns: i64) -> Record {
        Record { kind: RecordKind::StreamSync as u16, stream: 3, host_ns, ..Record::default() }
    }

    /// A copy of some bytes and the wait for it, which the engine would answer with `took` ps; was it foreseen?
    fn read(state: &mut State, now: &mut Moment, bytes: u64, took: i64) -> bool {
        state.note(&copy(now.host_ns + 6, bytes));
        let foreseen = state.foresee(&wait(now.host_ns + 8));
        *now = Moment::at(now.ps + took);
        if foreseen.is_none() {
            let value = now.host_ns * 1000 - now.ps;
            let reply = Reply { value, host_ns: now.host_ns, ..Reply::default() };
            state.learn(&wait(0), Moment::of(&reply));
        }
        foreseen.inspect(|at| assert_eq!(at, now)).is_some()
    }

    #[test]
    fn equal_work_is_foreseen_after_equal_answers() {
        let (mut state, mut now) = (State::default(), Moment::at(100_300));
        let seen: Vec<bool> = (0..5).map(|_| read(&mut state, &mut now, 8, 20_700)).collect();
        assert_eq!(seen, [false, false, false, true, true], "the first one follows no wait");
        assert!(!read(&mut state, &mut now, 16, 30_000), "other work is asked about");
        assert!(read(&mut state, &mut now, 8, 20_700));
    }

    #[test]
    fn different_answers_are_never_foreseen() {
        let (mut state, mut now) = (State::default(), Moment::at(100_300));
        for took in [20_000, 20_000, 20_001, 20_000, 20_000, 20_000, 20_000] {
            assert!(!read(&mut state, &mut now, 8, took));
        }
    }

    #[test]
    fn what_others_do_is_waited_for() {
        let (mut state, mut now) = (State::default(), Moment::at(100_300));
        for _ in 0..4 {
            read(&mut state, &mut now, 8, 20_700);
        }
        let foreign = [
            Record { stream: 4, ..copy(now.host_ns + 2, 8) },
            Record { kind: RecordKind::EventWait as u16, stream: 3, host_ns: now.host_ns + 2, ..Record::default() },
            Record { kind: RecordKind::Collective as u16, stream: 3, host_ns: now.host_ns + 2, ..Record::default() },
        ];
        for record in foreign {
            state.note(&record);
            assert!(!read(&mut state, &mut now, 8, 20_700));
            assert!(read(&mut state, &mut now, 8, 20_700), "the stream is drained again");
        }
        state.note(&copy(now.host_ns + 1, 8));
        assert!(!read(&mut state, &mut now, 8, 25_000), "more work");
        let wait_for_all = Record { kind: RecordKind::DeviceSync as u16, ..wait(now.host_ns) };
        assert!(state.foresee(&wait_for_all).is_none());
        state.learn(&wait_for_all, Some(now));
        assert!(!read(&mut state, &mut now, 8, 20_700), "nothing is known after a wait for all streams");
        assert!(read(&mut state, &mut now, 8, 20_700));
        // Another thread appends while this one waits.
        state.note(&copy(now.host_ns + 1, 64));
        assert!(state.foresee(&wait(now.host_ns + 3)).is_none());
        state.note(&copy(now.host_ns + 4, 8));
        state.learn(&wait(now.host_ns + 3), Some(Moment::at(now.ps + 10_000)));
        assert!(!read(&mut state, &mut now, 8, 20_700));
    }
}
