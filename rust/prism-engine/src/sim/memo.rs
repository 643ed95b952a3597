//! Collectives a communicator has computed before.
//!
//! Completion obeys `F(a + c) = F(a) + c` to the picosecond. Training repeats itself, so most calls find everybody exactly as
//! early or late as some call before did: they end as that one did, only later.

use super::vector;
use crate::collective::CollectiveCall;
use crate::units::SimTime;

/// Calls kept per communicator: forward and backward, each after compute and after communication.
const KEPT: usize = 4;

#[derive(Debug)]
struct Known {
    call: CollectiveCall,
    arrivals: Vec<SimTime>,
    ends: Vec<SimTime>,
    latest: SimTime,
}

/// See the module's documentation. 16 bytes per member and call kept.
#[derive(Debug, Default)]
pub(super) struct Memo {
    known: Vec<Known>,
    /// The entry to replace next.
    oldest: usize,
}

impl Memo {
    /// Writes the ends of a call with these arrivals if they are known; their maximum, saturated, or `None`.
    pub(super) fn recall(&self, call: &CollectiveCall, arrivals: &[SimTime], ends: &mut [SimTime]) -> Option<SimTime> {
        let lag_of = |known: &&Known| vector::lag(arrivals, &known.arrivals).filter(|_| known.call == *call);
        let (known, lag) = self.known.iter().find_map(|known| Some((known, lag_of(&known)?)))?;
        let latest = known.latest + lag;
        if latest < SimTime::MAX {
            vector::shift(ends, &known.ends, lag);
        }
        Some(latest)
    }

    /// Keeps a computed call in place of the oldest; returns the maximum of its ends.
    pub(super) fn keep(&mut self, call: CollectiveCall, arrivals: &[SimTime], ends: &[SimTime]) -> SimTime {
        let latest = ends.iter().copied().max().unwrap_or_default();
        if self.known.len() < KEPT {
            self.known.push(Known { call, arrivals: arrivals.to_vec(), ends: ends.to_vec(), latest });
        } else {
            let known = &mut self.known[self.oldest];
            known.arrivals.copy_from_slice(arrivals);
            known.ends.copy_from_slice(ends);
            (known.call, known.latest) = (call, latest);
            self.oldest = (self.oldest + 1) % KEPT;
        }
        latest
    }
}
