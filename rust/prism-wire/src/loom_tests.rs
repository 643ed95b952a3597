//! Model checks of what two sides do to the shared words, in every order loom can find.
//!
//! Built with `--cfg prism_loom`. A lost wake-up shows as a deadlock, which loom reports; a slot read while it is written
//! shows as a race on the cells. The bounds keep the state space small enough to be searched completely.

use crate::message::Reply;
use crate::reply::{BadSlot, ReplySlot};
use crate::ring::{Consumer, Producer, PushError, RingWords, Slots};
use crate::sync::{AtomicU32, Ordering};
use crate::wait::Park;
use core::time::Duration;
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// A futex that never times out: whoever is not woken sleeps for ever.
struct ModelFutex {
    lock: Mutex<()>,
    sleepers: Condvar,
}

impl ModelFutex {
    fn new() -> Self {
        Self { lock: Mutex::new(()), sleepers: Condvar::new() }
    }
}

impl Park for ModelFutex {
    fn park(&self, word: &AtomicU32, expected: u32, _timeout: Duration) {
        // The kernel compares and goes to sleep under one lock, which the waker takes too.
        let guard = self.lock.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected {
            drop(self.sleepers.wait(guard).unwrap());
        }
    }

    fn unpark(&self, _word: &AtomicU32) {
        drop(self.lock.lock().unwrap());
        self.sleepers.notify_all();
    }
}

/// Storage on which loom reports a read that is concurrent with a write.
struct Cells(Vec<UnsafeCell<u64>>);

// SAFETY: the protocol under test keeps accesses to one cell apart; loom fails the test where it does not.
unsafe impl Sync for Cells {}
// SAFETY: plain integers.
unsafe impl Send for Cells {}

impl Slots for Cells {
    type Item = u64;

    fn capacity(&self) -> u64 {
        self.0.len() as u64
    }

    fn write(&self, index: usize, item: &u64) {
        // SAFETY: see the type; loom checks it.
        self.0[index].with_mut(|cell| unsafe { *cell = *item });
    }

    fn read(&self, index: usize) -> u64 {
        // SAFETY: see the type; loom checks it.
        self.0[index].with(|cell| unsafe { *cell })
    }
}

struct Ring {
    words: RingWords,
    slots: Cells,
    /// One futex per gate: in the kernel they are different addresses.
    filled: ModelFutex,
    drained: ModelFutex,
}

impl Ring {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            words: RingWords::new(),
            slots: Cells((0..capacity).map(|_| UnsafeCell::new(0)).collect()),
            filled: ModelFutex::new(),
            drained: ModelFutex::new(),
        })
    }

    fn push(&self, producer: &mut Producer, item: u64) -> Result<(), PushError> {
        producer.push(&self.words, &self.slots, &self.filled, &item)
    }

    fn push_or_sleep(&self, producer: &mut Producer, item: u64) {
        while self.push(producer, item) == Err(PushError::Full) {
            let has_space = || producer.has_space(&self.words, &self.slots).unwrap();
            self.words.drained.0.sleep_unless(&self.drained, Duration::MAX, has_space);
        }
    }

    fn pop(&self, consumer: &mut Consumer) -> Option<u64> {
        consumer.pop(&self.words, &self.slots, &self.drained).unwrap()
    }

    fn pop_or_sleep(&self, consumer: &mut Consumer) -> u64 {
        loop {
            if let Some(item) = self.pop(consumer) {
                return item;
            }
            let has_items = || consumer.has_items(&self.words, &self.slots).unwrap();
            self.words.filled.0.sleep_unless(&self.filled, Duration::MAX, has_items);
        }
    }
}

fn model(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

#[test]
fn loom_ring_wraps_without_races() {
    model(3, || {
        let ring = Ring::new(2);
        let side = Arc::clone(&ring);
        let pusher = thread::spawn(move || {
            let mut producer = Producer::default();
            let mut pushed = 0;
            for _ in 0..4 {
                if side.push(&mut producer, pushed).is_ok() {
                    pushed += 1;
                }
            }
            pushed
        });
        let mut consumer = Consumer::default();
        let mut popped = 0;
        for _ in 0..4 {
            if let Some(item) = ring.pop(&mut consumer) {
                assert_eq!(item, popped);
                popped += 1;
            }
        }
        let pushed = pusher.join().unwrap();
        while let Some(item) = ring.pop(&mut consumer) {
            assert_eq!(item, popped);
            popped += 1;
        }
        assert!(popped == pushed && pushed >= 2);
    });
}

#[test]
fn loom_sleeping_consumer_is_always_woken() {
    model(3, || {
        let ring = Ring::new(4);
        let side = Arc::clone(&ring);
        let pusher = thread::spawn(move || {
            let mut producer = Producer::default();
            for item in 0..2 {
                assert_eq!(side.push(&mut producer, item), Ok(()));
            }
        });
        let mut consumer = Consumer::default();
        for item in 0..2 {
            assert_eq!(ring.pop_or_sleep(&mut consumer), item);
        }
        pusher.join().unwrap();
    });
}

#[test]
fn loom_sleeping_producer_is_always_woken() {
    model(3, || {
        let ring = Ring::new(2);
        let side = Arc::clone(&ring);
        let pusher = thread::spawn(move || {
            let mut producer = Producer::default();
            for item in 0..4 {
                side.push_or_sleep(&mut producer, item);
            }
        });
        let mut consumer = Consumer::default();
        for item in 0..4 {
            assert_eq!(ring.pop_or_sleep(&mut consumer), item);
        }
        pusher.join().unwrap();
    });
}

#[test]
fn loom_two_sleepers_at_one_gate_are_both_woken() {
    model(3, || {
        let gate = Arc::new((crate::wait::Gate::new(), ModelFutex::new(), AtomicU32::new(0)));
        let sleepers: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || {
                    while !gate.0.sleep_unless(&gate.1, Duration::MAX, || gate.2.load(Ordering::Acquire) == 1) {}
                })
            })
            .collect();
        gate.2.store(1, Ordering::Release);
        gate.0.notify(&gate.1);
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    });
}

#[test]
fn loom_answer_reaches_its_waiter_whole() {
    model(3, || {
        let slot = Arc::new((ReplySlot::new(), ModelFutex::new()));
        // The query that tells the engine of the slot travels through the ring; here through thread creation and join.
        slot.0.begin();
        let side = Arc::clone(&slot);
        let first = Reply { status: 1, reserved: 0, value: 2, host_ns: 3 };
        let engine = thread::spawn(move || {
            side.0.answer(&side.1, first).unwrap();
            // Nobody waits any more, or the waiter has not taken the answer yet: both refuse a second one.
            assert_eq!(side.0.answer(&side.1, Reply::default()), Err(BadSlot));
        });
        let reply = loop {
            if let Some(reply) = slot.0.take() {
                break reply;
            }
            slot.0.sleep(&slot.1, Duration::MAX);
        };
        assert_eq!(reply, first);
        engine.join().unwrap();
        assert_eq!(slot.0.take(), None);
    });
}
