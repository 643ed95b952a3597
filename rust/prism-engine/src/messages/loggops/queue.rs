//! The event queue: a radix heap.
//!
//! Times never go back, so an event lies in the bucket of the highest bit in which its time differs from the time reached.
//! When the lowest buckets are empty, the lowest that is not is dealt out again around its earliest time; an event moves down
//! at most once per bit. Pushing is an append. Within a bucket events keep the order they were pushed in; only events put
//! back with an earlier order need sorting, once their time has come.

/// Something to happen at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) time: u64,
    /// Number of creation, then kind and rank of the op (see [`Event::pack`]).
    pub(super) order: u64,
    /// The op, counted over all ranks.
    pub(super) op: u32,
    /// The rank it happens on.
    pub(super) host: u32,
}

/// Kinds of events: those of ops, and the arrival of a message.
pub(super) const MESSAGE: u8 = 3;
const RANK_BITS: u32 = 24;
const KIND_BITS: u32 = 2;
/// Ranks are below this.
pub(super) const MAX_RANKS: u32 = 1 << RANK_BITS;
/// Events created are fewer than this.
pub(super) const MAX_EVENTS: u64 = 1 << (64 - RANK_BITS - KIND_BITS);

impl Event {
    /// An event's order: its number of creation above its kind and the rank of its op.
    #[inline]
    pub(super) fn pack(number: u64, kind: u8, rank: u32) -> u64 {
        number << (RANK_BITS + KIND_BITS) | u64::from(kind) << RANK_BITS | u64::from(rank)
    }

    #[inline]
    pub(super) fn kind(self) -> u8 {
        (self.order >> RANK_BITS) as u8 & 3
    }

    /// The rank whose op it is.
    #[inline]
    pub(super) fn owner(self) -> u32 {
        self.order as u32 & (MAX_RANKS - 1)
    }
}

/// How many events ahead memory is asked for: a few hundred nanoseconds.
const AHEAD: usize = 16;

/// Buckets for times below 2^63; amortised O(63) moves per event, 3 or so in practice.
pub(super) struct Queue {
    /// The time reached: that of the events in bucket 0.
    now: u64,
    /// Next event of bucket 0.
    head: usize,
    buckets: Vec<Vec<Event>>,
    /// Bit `b`: bucket `b` (from 1) holds events.
    filled: u64,
    spare: Vec<Event>,
    /// Bucket 0 is being filled, and sorted after that.
    is_dealing: bool,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self { now: 0, head: 0, buckets: vec![Vec::new(); 64], filled: 0, spare: Vec::new(), is_dealing: false }
    }

    /// Adds an event, not before the last one taken.
    #[inline]
    pub(super) fn push(&mut self, event: Event) {
        debug_assert!(event.time >= self.now, "time goes on");
        let bucket = (u64::BITS - (event.time ^ self.now).leading_zeros()) as usize;
        self.filled |= 1 << bucket;
        let events = &mut self.buckets[bucket];
        if bucket == 0 && events.last().is_some_and(|last| last.order > event.order) && !self.is_dealing {
            // An old event at the time reached: where it belongs among those left.
            let place = events[self.head..].partition_point(|other| other.order < event.order);
            return events.insert(self.head + place, event);
        }
        events.push(event);
    }

    /// Takes the first event by time, then order. `soon` is told of events that come soon after.
    #[inline]
    pub(super) fn pop(&mut self, soon: impl Fn(&Event)) -> Option<Event> {
        if let Some(event) = self.buckets[0].get(self.head) {
            self.head += 1;
            if let Some(later) = self.buckets[0].get(self.head + AHEAD) {
                soon(later);
            }
            return Some(*event);
        }
        self.refill(soon)
    }

    fn refill(&mut self, soon: impl Fn(&Event)) -> Option<Event> {
        self.buckets[0].clear();
        self.head = 0;
        self.filled &= !1;
        if self.filled == 0 {
            return None;
        }
        let lowest = self.filled.trailing_zeros() as usize;
        self.filled &= self.filled - 1;
        let mut dealt = std::mem::replace(&mut self.buckets[lowest], std::mem::take(&mut self.spare));
        self.now = dealt.iter().map(|event| event.time).min()?;
        self.is_dealing = true;
        for event in &dealt {
            self.push(*event);
        }
        self.is_dealing = false;
        dealt.iter().take(2 * AHEAD).for_each(soon);
        dealt.clear();
        self.spare = dealt;
        let first = &mut self.buckets[0];
        if !first.is_sorted_by_key(|event| event.order) {
            first.sort_unstable_by_key(|event| event.order);
        }
        self.head = 1;
        first.first().copied()
    }
}
