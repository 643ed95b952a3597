//! Releases held streams at the engine's nanosecond.
//!
//! Each communication of the program with virtual members is a kernel that holds its stream ([`crate::slots`]). One thread
//! looks which of them run by now. A hold that does has *arrived*: its records go to the engine with the time of that moment,
//! and the engine answers when the communication ends. At that moment the thread lets the kernel end; by how much it was late
//! is kept.
//!
//! Holds of a stream arrive in order, because the stream is one. Holds of a communicator on different streams are told to
//! the engine in the order of the program's calls, whichever arrives first.

use crate::clock::{self, Clock};
use crate::driver::Driver;
use crate::errors::Errors;
use crate::slots::{Slot, Slots};
use prism_wire::client::Client;
use prism_wire::message::{Record, RecordKind, ReplyStatus};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_void;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Stream id of what belongs to no stream; the event in it is the zero of all answers.
pub(crate) const NO_STREAM: u32 = 0;
/// Event id of the zero.
const ZERO: u32 = 0;
/// Event ids in use: more than streams can be waiting for an answer.
const EVENTS: u32 = 1 << 16;
/// Before a moment the thread looks all the time for so long; before that it sleeps.
const SPIN_NS: i64 = 60_000;
/// Sleep between looks while holds are enqueued and none is due soon.
const NAP_NS: u64 = 3_000;

/// What the scheduler's thread does while a stream is held, before it is released: moves data.
pub(crate) struct Job {
    pub(crate) run: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: *mut c_void,
}

// SAFETY: whoever makes a job hands its data over with it.
unsafe impl Send for Job {}

/// A stream is held, or a point of it is looked for.
pub(crate) struct Hold {
    /// Its stream.
    pub(crate) stream: u32,
    /// `None`: it belongs to no stream and has arrived.
    pub(crate) slot: Option<Slot>,
    /// What the engine gets when it arrives, in order.
    pub(crate) records: Vec<Record>,
    /// Communicators in use, with how many holds of theirs come before this one.
    pub(crate) turns: Vec<(u32, u64)>,
    /// Does the stream wait for the engine's answer?
    pub(crate) waits: bool,
    pub(crate) jobs: Vec<Job>,
    pub(crate) context: usize,
}

enum State {
    Enqueued,
    /// The engine was asked for its end.
    Asked,
    /// It ends at this time.
    Due(i64),
}

struct Lane {
    holds: VecDeque<Hold>,
    state: State,
    /// Asks the engine for this lane; made with the first question.
    asker: Option<Sender<Record>>,
}

/// What the program's threads and the scheduler share.
struct Inbox {
    holds: Mutex<Vec<Hold>>,
    came: Condvar,
    /// Communicators that were aborted: what is enqueued on them is released at once.
    aborted: Mutex<BTreeSet<u32>>,
    is_ending: AtomicBool,
    is_empty: AtomicBool,
    errors: Mutex<Errors>,
}

/// Handle of the scheduler's thread.
pub(crate) struct Scheduler(Arc<Inbox>);

/// Where the engine's answers and failures go.
struct Engine {
    client: &'static Client,
    is_lost: &'static AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing is left half-done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scheduler {
    /// Starts the thread.
    pub(crate) fn start(
        client: &'static Client,
        is_lost: &'static AtomicBool,
        clock: Clock,
        slots: &'static Slots,
        driver: &'static Driver,
    ) -> std::io::Result<Self> {
        let inbox = Arc::new(Inbox {
            holds: Mutex::default(),
            came: Condvar::new(),
            aborted: Mutex::default(),
            is_ending: AtomicBool::new(false),
            is_empty: AtomicBool::new(true),
            errors: Mutex::default(),
        });
        let (answered, answers) = channel();
        let worker = Worker {
            engine: Engine { client, is_lost },
            clock,
            slots,
            driver,
            inbox: Arc::clone(&inbox),
            lanes: BTreeMap::new(),
            turns: BTreeMap::new(),
            answered,
            answers,
            zero_ns: None,
            next_event: ZERO,
        };
        std::thread::Builder::new().name("prism-release".to_owned()).spawn(move || worker.run())?;
        Ok(Self(inbox))
    }

    /// Adds a hold that has just been enqueued.
    pub(crate) fn add(&self, hold: Hold) {
        self.0.is_empty.store(false, Ordering::Release);
        lock(&self.0.holds).push(hold);
        self.0.came.notify_one();
    }

    /// Releases everything of an aborted communicator.
    pub(crate) fn abort(&self, comm: u32) {
        lock(&self.0.aborted).insert(comm);
        self.0.came.notify_one();
    }

    /// Waits until all that was enqueued has been told to the engine, at most so long; the release errors.
    pub(crate) fn end(&self, patience: Duration) -> Option<ReleaseErrors> {
        let patience_ns = patience.as_nanos() as u64;
        self.0.came.notify_one();
        for _ in 0..patience_ns / 1_000_000 {
            if self.0.is_empty.load(Ordering::Acquire) {
                break;
            }
            clock::nap(1_000_000);
        }
        self.0.is_ending.store(true, Ordering::Release);
        self.0.came.notify_one();
        let errors = lock(&self.0.errors);
        (errors.total() > 0).then(|| ReleaseErrors {
            count: errors.total(),
            p50_ns: errors.quantile(500),
            p99_ns: errors.quantile(990),
            max_ns: errors.max(),
        })
    }
}

/// How late streams were released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReleaseErrors {
    pub(crate) count: u64,
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) max_ns: u64,
}

/// The thread.
struct Worker {
    engine: Engine,
    clock: Clock,
    slots: &'static Slots,
    driver: &'static Driver,
    inbox: Arc<Inbox>,
    lanes: BTreeMap<u32, Lane>,
    /// Holds of each communicator told so far.
    turns: BTreeMap<u32, u64>,
    answered: Sender<(u32, Option<i64>)>,
    answers: Receiver<(u32, Option<i64>)>,
    /// When the zero of all answers was.
    zero_ns: Option<i64>,
    next_event: u32,
}

impl Worker {
    fn run(mut self) {
        clock::make_sleep_precise();
        while !self.inbox.is_ending.load(Ordering::Acquire) {
            self.take_new();
            let soonest = self.look();
            match soonest {
                None => self.wait_for_new(),
                Some(at) if at - self.clock.now() > SPIN_NS => clock::nap(NAP_NS),
                Some(_) => std::hint::spin_loop(),
            }
        }
    }

    /// Sleeps until a hold comes, if there is none.
    fn wait_for_new(&self) {
        let holds = lock(&self.inbox.holds);
        if !holds.is_empty() {
            return;
        }
        self.inbox.is_empty.store(true, Ordering::Release);
        // The timeout only makes the end of the process certain to be seen.
        let waited = self.inbox.came.wait_timeout(holds, Duration::from_millis(100));
        drop(waited);
    }

    fn take_new(&mut self) {
        let new = std::mem::take(&mut *lock(&self.inbox.holds));
        for hold in new {
            let lane = self.lanes.entry(hold.stream);
            let lane = lane.or_insert_with(|| Lane { holds: VecDeque::new(), state: State::Enqueued, asker: None });
            lane.holds.push_back(hold);
        }
    }

    /// Looks at the first hold of every stream. The time of the next thing to do: `None` when nothing is enqueued, the far
    /// future when it is not known.
    fn look(&mut self) -> Option<i64> {
        while let Ok((stream, end)) = self.answers.try_recv() {
            if let Some(lane) = self.lanes.get_mut(&stream) {
                // A lost engine holds nobody.
                lane.state = State::Due(end.unwrap_or(i64::MIN));
            }
        }
        let mut soonest = None;
        let mut next = self.lanes.keys().next().copied();
        while let Some(stream) = next {
            while self.step(stream) {}
            let lane = &self.lanes[&stream];
            if !lane.holds.is_empty() {
                let at = if let State::Due(at) = lane.state { at } else { i64::MAX };
                soonest = Some(soonest.map_or(at, |other: i64| other.min(at)));
            }
            next = self.lanes.range((Bound::Excluded(stream), Bound::Unbounded)).next().map(|(stream, _)| *stream);
        }
        soonest
    }

    /// Does what can be done with the first hold of a stream; true when it is over.
    fn step(&mut self, stream: u32) -> bool {
        let lane = &self.lanes[&stream];
        let Some(hold) = lane.holds.front() else { return false };
        match lane.state {
            _ if self.is_aborted(hold) => self.finish(stream, None),
            State::Enqueued => {
                let has_arrived = hold.slot.is_none_or(|slot| self.slots.has_arrived(slot));
                has_arrived && self.has_turn(hold) && self.arrive(stream)
            }
            State::Asked => false,
            State::Due(at) => {
                let now = self.clock.now();
                now >= at && self.finish(stream, (at > i64::MIN).then(|| now - at))
            }
        }
    }

    fn is_aborted(&self, hold: &Hold) -> bool {
        let aborted = lock(&self.inbox.aborted);
        !aborted.is_empty() && hold.turns.iter().any(|(comm, _)| aborted.contains(comm))
    }

    fn has_turn(&self, hold: &Hold) -> bool {
        hold.turns.iter().all(|(comm, turn)| self.turns.get(comm).copied().unwrap_or(0) == *turn)
    }

    /// The first hold of a stream runs: tells the engine, and asks for its end. True when it is over.
    fn arrive(&mut self, stream: u32) -> bool {
        let now = self.clock.now();
        let is_told = self.tell(stream, now);
        let lane = self.lanes.get_mut(&stream).expect("a known stream");
        let hold = &mut lane.holds[0];
        for (comm, _) in &hold.turns {
            *self.turns.entry(*comm).or_default() += 1;
        }
        let jobs = std::mem::take(&mut hold.jobs);
        let (waits, context) = (hold.waits, hold.context);
        if waits && is_told {
            lane.state = State::Asked;
            self.ask(stream);
        }
        if !jobs.is_empty() {
            // The jobs' copies need the context; where it is gone they fail and say so.
            let _ = self.driver.enter(context);
        }
        for job in jobs {
            // SAFETY: the maker of the job gave this function for this data.
            unsafe { (job.run)(job.data) };
        }
        if waits && is_told { false } else { self.finish(stream, None) }
    }

    /// Appends the records of a hold that arrived at `now`; false when the engine is gone.
    fn tell(&mut self, stream: u32, now: i64) -> bool {
        if self.engine.is_lost.load(Ordering::Acquire) {
            return false;
        }
        if self.zero_ns.is_none() {
            self.zero_ns = Some(now);
            let zero = Record { kind: RecordKind::EventRecord as u16, e: ZERO, host_ns: now, ..Record::default() };
            if self.engine.client.append(&zero).is_err() {
                self.engine.is_lost.store(true, Ordering::Release);
                return false;
            }
        }
        let records = &self.lanes[&stream].holds[0].records;
        let sent = records.iter().all(|record| {
            let record = Record { host_ns: now, ..*record };
            self.engine.client.append(&record).is_ok()
        });
        if !sent {
            self.engine.is_lost.store(true, Ordering::Release);
        }
        sent
    }

    /// Has the lane's thread ask when all that is on the stream so far ends.
    fn ask(&mut self, stream: u32) {
        let now = self.clock.now();
        self.next_event = if self.next_event + 1 == EVENTS { ZERO + 1 } else { self.next_event + 1 };
        let event = self.next_event;
        let mark = Record { kind: RecordKind::EventRecord as u16, stream, e: event, host_ns: now, ..Record::default() };
        let question =
            Record { kind: RecordKind::EventElapsed as u16, e: ZERO, f: event, host_ns: now, ..Record::default() };
        let is_sent = self.engine.client.append(&mark).is_ok()
            && self.asker(stream).is_some_and(|asker| asker.send(question).is_ok());
        if !is_sent {
            self.engine.is_lost.store(true, Ordering::Release);
            self.lanes.get_mut(&stream).expect("a known stream").state = State::Due(i64::MIN);
        }
    }

    fn asker(&mut self, stream: u32) -> Option<&Sender<Record>> {
        let lane = self.lanes.get_mut(&stream).expect("a known stream");
        if lane.asker.is_none() {
            let (questions, to_ask) = channel::<Record>();
            let (client, is_lost) = (self.engine.client, self.engine.is_lost);
            let (answered, zero_ns) = (self.answered.clone(), self.zero_ns.unwrap_or_default());
            let ask_all = move || {
                for question in to_ask {
                    let reply = client.query(question).ok().filter(|reply| reply.status == ReplyStatus::Ok as u32);
                    if reply.is_none() {
                        is_lost.store(true, Ordering::Release);
                    }
                    if answered.send((stream, reply.map(|reply| zero_ns + reply.value))).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("prism-ask".to_owned()).spawn(ask_all).ok()?;
            lane.asker = Some(questions);
        }
        lane.asker.as_ref()
    }

    /// The first hold of a stream is over. `error`: how late it was released.
    fn finish(&mut self, stream: u32, error: Option<i64>) -> bool {
        let lane = self.lanes.get_mut(&stream).expect("a known stream");
        let hold = lane.holds.pop_front().expect("a hold is under way");
        lane.state = State::Enqueued;
        if let Some(slot) = hold.slot {
            self.slots.release(slot);
            // An aborted one may not have run yet: its slot is not used again.
            if self.slots.has_arrived(slot) {
                self.slots.give_back(slot);
            }
        }
        if let Some(error) = error {
            lock(&self.inbox.errors).add(error);
        }
        true
    }
}
