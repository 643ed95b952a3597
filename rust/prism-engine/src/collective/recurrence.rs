//! Rings and chains message by message: the definition itself, for where no closed form holds.
//!
//! With flow-control credits a connection has `K` slots, and message `j` can leave only when the receiver has taken message
//! `j - K` and its credit is back a credit latency `c` later:
//!
//! ```text
//! X(p,j) = max( X(p,j-1), a(p), D(p-1,j-q) + l(p), X(p+1,j-K+q) + c  for K <= j < J )
//! D(p,j) = max( D(p,j-1), X(p,j) ) + o(p)              F(p) = max( X(p,J+q-1), D(p,J-1) )
//! ```
//!
//! (a chain forwards within the message: `D(p-1,j)` and `X(p+1,j-K)`). Exact for any links, phases, slices and slots, at
//! O(ranks x messages) time and O(ranks x (slots + slices)) memory, both bounded. [`super::ring`], [`super::chain`] and
//! [`super::credits`] give the same numbers in less time where they hold.

use super::window::LIMIT;
use super::{chain, ring};
use thiserror::Error;

/// Flow control of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Messages a connection holds, at least 1.
    pub slots: i64,
    /// Time until a freed slot is known to the sender, in the unit of the links.
    pub latency: i64,
}

/// Why a recurrence is not evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecurrenceError {
    /// More messages over all ranks than [`MOST_MESSAGES`], or more of them to remember than [`MOST_REMEMBERED`].
    #[error("{ranks} ranks with {messages} messages each are too many to be evaluated one by one")]
    TooMany {
        /// Ranks.
        ranks: usize,
        /// Messages every rank sends.
        messages: i64,
    },
    /// Every rank waits for a slot before it takes what would free one.
    #[error(
        "a ring whose connections hold {slots} messages cannot send {slices} slices per step: every rank waits for a slot \
         before it receives; credits must exceed the slices per step"
    )]
    TooFewSlots {
        /// Slots of a connection.
        slots: i64,
        /// Slices per step.
        slices: i64,
    },
    /// Some time may exceed 2^60.
    #[error("times may exceed 2^60")]
    OutOfRange,
}

/// Messages over all ranks that are evaluated at most (some seconds).
pub const MOST_MESSAGES: i64 = 1 << 30;

/// Times kept at most (256 MiB).
pub const MOST_REMEMBERED: i64 = 1 << 25;

/// Rows of times of all ranks, of which only the latest are kept.
struct Rows {
    ranks: usize,
    kept: usize,
    times: Vec<i64>,
}

impl Rows {
    fn new(ranks: usize, kept: i64) -> Self {
        // `kept` was compared with MOST_REMEMBERED.
        let kept = kept as usize;
        Self { ranks, kept, times: vec![i64::MIN; ranks * kept] }
    }

    /// Where a row begins in `times`, if it is kept.
    fn begin(&self, row: i64) -> usize {
        (row as usize % self.kept) * self.ranks
    }

    fn row(&self, row: i64) -> &[i64] {
        let begin = self.begin(row);
        &self.times[begin..begin + self.ranks]
    }
}

fn check(
    ranks: usize,
    messages: i64,
    remembered: i64,
    costs: impl Iterator<Item = i64>,
    arrivals: &[i64],
) -> Result<(), RecurrenceError> {
    let too_many = RecurrenceError::TooMany { ranks, messages };
    let all = messages.saturating_mul(ranks as i64);
    if all > MOST_MESSAGES || remembered.saturating_mul(ranks as i64) > MOST_REMEMBERED {
        return Err(too_many);
    }
    // Every edge of the recurrence moves on by a message, at the cost of one link or credit.
    let slowest = i128::from(costs.max().unwrap_or(0));
    let latest = i128::from(arrivals.iter().copied().max().unwrap_or(0));
    let in_range = latest + slowest * (i128::from(messages) + ranks as i128 + 1) <= i128::from(LIMIT);
    if in_range { Ok(()) } else { Err(RecurrenceError::OutOfRange) }
}

/// When each position of a ring has sent and received everything. Times are below 2^60, costs not negative.
pub fn ring(ring: &ring::Ring<'_>, credits: Option<Credits>, arrivals: &[i64]) -> Result<Vec<i64>, RecurrenceError> {
    let n = arrivals.len();
    let total: i64 = ring.phases.iter().fold(0, |sum, phase| sum.saturating_add(phase.messages.max(0)));
    if n < 2 || total == 0 {
        return Ok(arrivals.to_vec());
    }
    // More slices than messages mean the same as one per message, and slots for all messages never run out.
    let slices = ring.slices.clamp(1, total);
    let credits = credits.filter(|credits| credits.slots < total);
    if let Some(Credits { slots, .. }) = credits.filter(|credits| credits.slots <= slices) {
        return Err(RecurrenceError::TooFewSlots { slots, slices: ring.slices });
    }
    let behind = credits.map_or(1, |credits| credits.slots - slices);
    let slowest = ring.phases.iter().flat_map(|phase| phase.occupancy).max().copied().unwrap_or(0);
    let hop = slowest + ring.latency.iter().max().copied().unwrap_or(0);
    let costs = [hop, credits.map_or(0, |credits| credits.latency)].into_iter();
    check(n, total.saturating_add(slices), behind + slices + 2, costs, arrivals)?;
    let mut ready = Rows::new(n, behind + 1);
    let mut departed = Rows::new(n, slices + 1);
    let first = ready.begin(behind);
    ready.times[first..first + n].copy_from_slice(arrivals);
    let phases = ring.phases.iter().flat_map(|phase| (0..phase.messages).map(move |_| phase.occupancy));
    // `ready` is shifted by one row, so that the arrivals are row `-1`.
    let row = |j: i64| j + behind + 1;
    for (j, occupancy) in (0..).zip(phases.map(Some).chain((0..slices).map(|_| None))) {
        let (now, before) = (ready.begin(row(j)), ready.begin(row(j - 1)));
        let received = (j >= slices).then(|| departed.begin(j - slices));
        let credit = credits.filter(|credits| (credits.slots..total).contains(&j));
        let credit = credit.map(|credits| (ready.begin(row(j - behind)), credits.latency));
        let (sent, port) = (departed.begin(j), (j > 0).then(|| departed.begin(j - 1)));
        for p in 0..n {
            let mut time = ready.times[before + p];
            if let Some(received) = received {
                let from = if p == 0 { n - 1 } else { p - 1 };
                time = time.max(departed.times[received + from] + ring.latency[p]);
            }
            if let Some((taken, latency)) = credit {
                time = time.max(ready.times[taken + if p + 1 == n { 0 } else { p + 1 }] + latency);
            }
            ready.times[now + p] = time;
            if let Some(occupancy) = occupancy {
                let port = port.map_or(i64::MIN, |port| departed.times[port + p]);
                departed.times[sent + p] = port.max(time) + occupancy[p];
            }
        }
    }
    let last = ready.row(row(total + slices - 1)).iter().zip(departed.row(total - 1));
    Ok(last.map(|(received, sent)| *received.max(sent)).collect())
}

/// When each position of a chain has received everything and sent everything on. Times are below 2^60, costs not negative.
pub fn chain(
    chain: &chain::Chain<'_>,
    credits: Option<Credits>,
    arrivals: &[i64],
) -> Result<Vec<i64>, RecurrenceError> {
    let (n, total) = (arrivals.len(), chain.chunks);
    if n < 2 || total < 1 {
        return Ok(arrivals.to_vec());
    }
    let credits = credits.filter(|credits| credits.slots < total);
    let behind = credits.map_or(1, |credits| credits.slots);
    let (slowest, longest) = (chain.occupancy.iter().max(), chain.latency.iter().max());
    let hop = slowest.copied().unwrap_or(0) + longest.copied().unwrap_or(0);
    check(n, total, behind + 3, [hop, credits.map_or(0, |credits| credits.latency)].into_iter(), arrivals)?;
    let mut ready = Rows::new(n, behind + 1);
    let mut departed = Rows::new(n, 2);
    let first = ready.begin(behind);
    ready.times[first..first + n].copy_from_slice(arrivals);
    let row = |j: i64| j + behind + 1;
    for j in 0..total {
        let (now, before) = (ready.begin(row(j)), ready.begin(row(j - 1)));
        let credit = credits.filter(|credits| j >= credits.slots);
        let credit = credit.map(|credits| (ready.begin(row(j - behind)), credits.latency));
        let (sent, port) = (departed.begin(j), (j > 0).then(|| departed.begin(j - 1)));
        for p in 0..n {
            let mut time = ready.times[before + p];
            if p > 0 {
                time = time.max(departed.times[sent + p - 1] + chain.latency[p]);
            }
            if let Some((taken, latency)) = credit.filter(|_| p + 1 < n) {
                time = time.max(ready.times[taken + p + 1] + latency);
            }
            ready.times[now + p] = time;
            let port = port.map_or(i64::MIN, |port| departed.times[port + p]);
            departed.times[sent + p] = port.max(time) + chain.occupancy[p];
        }
    }
    let mut ends = ready.row(row(total - 1)).to_vec();
    let sent = departed.row(total - 1);
    ends.iter_mut().zip(sent).take(n - 1).for_each(|(end, sent)| *end = (*end).max(*sent));
    Ok(ends)
}
