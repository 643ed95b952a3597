//! How long each port is used in all: a bound for every rule that shares ports.

use super::FULL;
use crate::lower::{Job, Message};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// The port that is used longest.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BusiestPort {
    /// Which.
    pub port: String,
    /// For how long its messages use it at full speed, ns.
    pub used_ns: i64,
}

/// Work of a message at each of its ports, in units of 2^-32 ps.
fn work(message: &Message) -> u128 {
    u128::from(message.occupancy.as_ps().unsigned_abs()) * u128::from(message.share)
}

impl Job {
    /// The port whose messages would keep it busy longest, one after the other at full speed (of several, the first): with
    /// shared ports the job cannot end before. `None` without messages. O(distinct collectives x their lanes + messages between
    /// ranks).
    #[must_use]
    pub fn busiest_port(&self) -> Option<(String, SimTime)> {
        let mut used = vec![0u128; self.ports.len() as usize];
        let mut ports = Vec::new();
        let mut add = |ports: &mut Vec<u32>, work: u128| {
            for port in ports.drain(..) {
                used[port as usize] += work;
            }
        };
        for transfer in self.transfers.iter().filter(|transfer| transfer.ranks.0 != transfer.ranks.1) {
            self.ports.of_ranks(transfer.ranks, transfer.message.wire, &mut ports);
            add(&mut ports, work(&transfer.message));
        }
        let mut times: BTreeMap<(u32, u32), (u32, u128)> = BTreeMap::new();
        for (number, instance) in (0..).zip(&self.instances) {
            times.entry((instance.comm, instance.pattern)).or_insert((number, 0)).1 += 1;
        }
        for (number, times) in times.into_values() {
            let (pattern, comm) = (self.pattern(number), self.comm(number));
            let layout = self.ports.layout(&comm.members, &comm.shape);
            let place = (&comm.members[..], &*comm.shape, &layout);
            for lane in 0..pattern.lanes.len() as u32 {
                for (number, equal) in pattern.kinds(lane) {
                    let (from, to, message) = pattern.message(lane, number);
                    self.ports.of_members(place, (from, to), message.wire, &mut ports);
                    add(&mut ports, work(message) * u128::from(equal) * times);
                }
            }
        }
        let most = used.iter().copied().max().filter(|most| *most > 0)?;
        let port = used.iter().position(|used| *used == most)? as u32;
        let time = i64::try_from(most / u128::from(FULL)).unwrap_or(i64::MAX);
        Some((self.ports.name(port), SimTime::from_ps(time)))
    }
}
