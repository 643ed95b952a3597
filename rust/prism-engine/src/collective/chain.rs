//! Broadcast and reduce: chunks move along a chain of ranks.
//!
//! The first rank sends `J` chunks to the second, which forwards each as it comes in, and so on. The longest path to a
//! rank starts at some rank before it, passes every link between, and spends `J - 1` further chunks at the slowest link
//! on the way. As for trees ([`super::tree`]), each distinct occupancy gets one pass that carries the best path and the
//! best path that contains such a link: O(ranks x distinct values).

use super::window::{NEVER, distinct};

/// A chain and what runs along it. Times are picoseconds below 2^60.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Chunks, at least 1.
    pub chunks: i64,
    /// Picoseconds a chunk occupies the link from each position to the next (the last is not used).
    pub occupancy: &'a [i64],
    /// Latency of the link into each position (the first is not used).
    pub latency: &'a [i64],
}

/// When each position has received everything and has sent everything on.
pub fn completion(chain: &Chain<'_>, arrivals: &[i64], out: &mut [i64], values: &mut Vec<i64>) {
    out.copy_from_slice(arrivals);
    let Some(hops) = arrivals.len().checked_sub(1) else { return };
    distinct(&chain.occupancy[..hops], values);
    for &value in values.iter() {
        let behind = (chain.chunks - 1) * value;
        let (mut best, mut through) = (arrivals[0], NEVER);
        for p in 0..hops {
            let occupancy = chain.occupancy[p];
            if occupancy == value {
                through = through.max(best);
            }
            // NEVER stays far below every arrival, so these maxima need no test for it.
            out[p] = out[p].max(through + occupancy + behind);
            let hop = occupancy + chain.latency[p + 1];
            through += hop;
            out[p + 1] = out[p + 1].max(through + behind);
            best = (best + hop).max(arrivals[p + 1]);
        }
    }
}
