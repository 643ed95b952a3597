//! Events to come, by time and then by order of creation.

use super::network::Event as Traffic;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A delay of a node is over.
    Node(u32),
    /// A computation that may be slowed down may be over.
    Compute { rank: u32, node: u32, version: u32 },
    /// A member takes part in a collective.
    Member(u32),
    /// Something happens to a message.
    Traffic(Traffic),
}

/// A radix heap. Time never goes back, so an event lies in the bucket of the highest bit in which its time differs from the
/// present. When the present is used up, the lowest bucket with events is dealt out again around its earliest time: each event
/// moves down at most once per bit, three times or so in practice. Dealing keeps the order inside a bucket, and events of
/// one time are always in one bucket, so events of one time come in the order in which they were pushed.
pub(super) struct Queue {
    now: i64,
    /// Next event of the present, which is bucket 0.
    next: usize,
    buckets: Vec<Vec<(i64, Event)>>,
    /// Bit `b`: bucket `b` has events.
    filled: u64,
    spare: Vec<(i64, Event)>,
}

impl Default for Queue {
    fn default() -> Self {
        Self { now: 0, next: 0, buckets: vec![Vec::new(); 64], filled: 0, spare: Vec::new() }
    }
}

impl Queue {
    /// Adds an event at a time that is not in the past.
    pub(super) fn push(&mut self, time: i64, event: Event) {
        debug_assert!(time >= self.now, "time goes on");
        let bucket = (u64::BITS - ((time ^ self.now) as u64).leading_zeros()) as usize;
        self.filled |= 1 << bucket;
        self.buckets[bucket].push((time, event));
    }

    /// Is there nothing more at the present time?
    pub(super) fn is_over(&self) -> bool {
        self.next == self.buckets[0].len()
    }

    /// The next event, and its time: the present.
    pub(super) fn pop(&mut self) -> Option<(i64, Event)> {
        if self.is_over() {
            self.deal()?;
        }
        self.next += 1;
        Some(self.buckets[0][self.next - 1])
    }

    /// Goes on to the next time.
    fn deal(&mut self) -> Option<()> {
        self.buckets[0].clear();
        self.next = 0;
        self.filled &= !1;
        if self.filled == 0 {
            return None;
        }
        let lowest = self.filled.trailing_zeros() as usize;
        self.filled &= self.filled - 1;
        let mut dealt = std::mem::replace(&mut self.buckets[lowest], std::mem::take(&mut self.spare));
        self.now = dealt.iter().map(|(time, _)| *time).min()?;
        for (time, event) in dealt.drain(..) {
            self.push(time, event);
        }
        self.spare = dealt;
        Some(())
    }
}
