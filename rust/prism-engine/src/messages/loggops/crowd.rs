//! Events that wait for the same lanes.
//!
//! By the rule every one of them is tried again whenever the lanes become free, and the first by order of creation gets them.
//! That is quadratic where thousands of messages come in at one rank. All others are bound to fail, so only the first of a
//! crowd is in the queue, and the next one follows when it has got the lanes.

use super::queue::Event;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bit of an event's host: the event is the first of a crowd.
pub(super) const WAITED: u32 = 1 << 31;

/// Whom a crowd waits for: host, kind of event, CPU and NIC lane.
pub(super) type Lanes = (u32, u8, u8, u8);

struct Crowd {
    /// When the first is tried again: not after the lanes are free.
    wake: u64,
    first: Event,
    /// Order and op.
    rest: BinaryHeap<Reverse<(u64, u32)>>,
}

/// The crowds there are. Joining and following are O(log of the crowd).
#[derive(Default)]
pub(super) struct Crowds {
    crowds: FxHashMap<Lanes, Crowd>,
}

impl Crowds {
    /// Is an event with [`WAITED`] what it was when it was put in the queue? If not, another one stands for the crowd.
    pub(super) fn is_valid(&self, lanes: Lanes, event: Event) -> bool {
        let crowd = self.crowds.get(&lanes);
        crowd.is_some_and(|crowd| crowd.first.order == event.order && crowd.wake == event.time)
    }

    /// An event that found its lanes occupied until `available`. Returns what to put in the queue.
    pub(super) fn join(&mut self, lanes: Lanes, event: Event, available: u64) -> Option<Event> {
        let waiting = Event { time: available, host: lanes.0 | WAITED, ..event };
        match self.crowds.get_mut(&lanes) {
            None => {
                self.crowds.insert(lanes, Crowd { wake: available, first: waiting, rest: BinaryHeap::new() });
            }
            // It was the first, or comes before the first; the crowd's event in the queue is void.
            Some(crowd) if event.order <= crowd.first.order => {
                if event.order < crowd.first.order {
                    crowd.rest.push(Reverse((crowd.first.order, crowd.first.op)));
                }
                (crowd.first, crowd.wake) = (waiting, available);
            }
            Some(crowd) => {
                crowd.rest.push(Reverse((event.order, event.op)));
                return None;
            }
        }
        Some(waiting)
    }

    /// The first of a crowd has got the lanes: the op of the next, whose turn it is; then [`follow`](Self::follow) it.
    pub(super) fn next(&mut self, lanes: Lanes) -> Option<u32> {
        let crowd = self.crowds.get_mut(&lanes)?;
        if let Some(Reverse((order, op))) = crowd.rest.pop() {
            crowd.first = Event { time: 0, order, op, host: lanes.0 | WAITED };
            return Some(op);
        }
        self.crowds.remove(&lanes);
        None
    }

    /// The first of a crowd is tried when its lanes are free. Returns what to put in the queue.
    pub(super) fn follow(&mut self, lanes: Lanes, available: u64) -> Option<Event> {
        let crowd = self.crowds.get_mut(&lanes)?;
        crowd.wake = available;
        crowd.first.time = available;
        Some(crowd.first)
    }
}
