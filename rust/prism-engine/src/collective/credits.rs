//! Rings and chains whose links hold a limited number of messages.
//!
//! A connection has `K` slots; a slot is free again a credit latency after its message was taken. With equal links and
//! enough slots to cover the round trip, the ends are still maxima over single paths: those of [`super::ring`] and
//! [`super::chain`], and paths that go *back* from a late rank to the ranks upstream, which wait for its slots.
//! Outside these conditions there is no closed form, and the functions say so instead of answering; [`super::recurrence`]
//! answers there, message by message.
//!
//! [`super::completion`] does not use this module: in a ring the end of the latest rank is the same with and without
//! credits.

use super::window::{MaxWindow, is_never};
use super::{chain, ring};

/// Equal links with credits. Times are picoseconds below 2^60.
#[derive(Clone, Copy, Debug)]
pub struct CreditLinks {
    /// Messages every rank sends.
    pub messages: i64,
    /// Slices per ring step.
    pub slices: i64,
    /// Time a message occupies a link.
    pub occupancy: i64,
    /// Time from leaving to arriving.
    pub latency: i64,
    /// Slots of a connection.
    pub slots: i64,
    /// Time until a freed slot is known to the sender.
    pub credit_latency: i64,
}

impl CreditLinks {
    /// Do the slots cover the round trip of a message and its credit?
    fn covers_round_trip(&self) -> bool {
        self.slots * self.occupancy >= self.occupancy + self.latency + self.credit_latency
    }
}

/// Ends of a ring, or `None` where the closed form does not hold: it needs `K o >= o + l + c` and `c <= (K - q) o`
/// (occupancy o, latency l, credit latency c, q slices per step, K slots). O(ranks).
#[must_use]
pub fn ring_completion(links: &CreditLinks, arrivals: &[i64]) -> Option<Vec<i64>> {
    let &CreditLinks { messages, slices, occupancy, latency, slots, credit_latency } = links;
    let n = arrivals.len();
    let stride = slots - slices;
    if n < 2 || messages < 1 || stride < 1 || !links.covers_round_trip() || credit_latency > stride * occupancy {
        return None;
    }
    let mut ends = vec![0; n];
    let costs = vec![occupancy; n];
    let phases = [ring::Phase { messages, occupancy: &costs }];
    let forward = ring::Ring { phases: &phases, latency: &vec![latency; n], slices };
    ring::completion(&forward, arrivals, &mut ends, &mut ring::RingScratch::default());
    // A path that goes back `h` ranks gains `h` credit latencies and loses `h` strides of messages; the condition makes
    // that a loss, so going back a whole lap is never better and `n` hops are enough.
    let tilt = credit_latency - stride * occupancy;
    let spare = messages - 1 - slots;
    let hops = if spare < 0 { 0 } else { (spare / stride + 1).min(n as i64) };
    let back = latest_ahead(arrivals, hops, tilt);
    let departures: Vec<_> = (0..n)
        .map(|p| {
            let straight = back[p].map(|key| key + (messages - slices) * occupancy);
            // First back to the rank before this one, then one hop forward.
            let turned = back[(p + n - 1) % n].map(|key| key + (messages - slices + 1) * occupancy + latency);
            straight.max(turned)
        })
        .collect();
    for p in 0..n {
        let received = departures[(p + n - 1) % n].map(|departure| departure + latency);
        if let Some(held) = departures[p].max(received) {
            ends[p] = ends[p].max(held);
        }
    }
    Some(ends)
}

/// For each `p`, the maximum over `1 <= h <= hops` of `arrivals[p + h] + h tilt` (indices modulo the length).
fn latest_ahead(arrivals: &[i64], hops: i64, tilt: i64) -> Vec<Option<i64>> {
    let n = arrivals.len() as i64;
    let mut window = MaxWindow::default();
    let mut latest = vec![None; arrivals.len()];
    // From the back: position `u` enters the window as `-u`, so that positions ascend.
    for u in (1..2 * n).rev() {
        window.push(-u, arrivals[(u % n) as usize] + u * tilt);
        let p = u - 1;
        if p < n {
            let key = window.max_from(-(p + hops));
            if hops > 0 && !is_never(key) {
                latest[p as usize] = Some(key - p * tilt);
            }
        }
    }
    latest
}

/// Ends of a chain (`slices` is not used), or `None` where the closed form does not hold: it needs `K o >= o + l + c`.
/// O(ranks).
#[must_use]
pub fn chain_completion(links: &CreditLinks, arrivals: &[i64]) -> Option<Vec<i64>> {
    let &CreditLinks { messages, occupancy, latency, slots, credit_latency, .. } = links;
    let n = arrivals.len();
    if n < 2 || messages < 1 || slots < 1 || !links.covers_round_trip() {
        return None;
    }
    let mut ends = vec![0; n];
    let chain = chain::Chain { chunks: messages, occupancy: &vec![occupancy; n], latency: &vec![latency; n] };
    chain::completion(&chain, arrivals, &mut ends, &mut Vec::new());
    // Every hop back takes a credit latency and `K` messages off what is left to send.
    let hops = (messages - 1) / slots;
    let tilt = credit_latency - slots * occupancy;
    let mut window = MaxWindow::default();
    for p in (0..n - 1).rev() {
        let ahead = p as i64 + 1;
        window.push(-ahead, arrivals[p + 1] + ahead * tilt);
        let key = window.max_from(-(p as i64 + hops));
        if hops > 0 && !is_never(key) {
            ends[p] = ends[p].max(key - p as i64 * tilt + messages * occupancy);
        }
    }
    if messages > slots {
        let held = arrivals[n - 1] + credit_latency + (messages - slots) * occupancy + latency;
        ends[n - 1] = ends[n - 1].max(held);
    }
    Some(ends)
}
