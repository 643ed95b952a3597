//! How long making communicators would take on the target cluster. In a session it is virtual and takes no time.
//!
//! Modelled after NCCL 2.30 `bootstrap.cc` and `init.cc`: members of a communicator from a unique id report to one root, spread
//! out in time when there are many; then all members pass their facts around a ring of sockets, both ways at once. Topology
//! search, loading of kernels and the connections of the algorithms are not included: they depend on the machine.

use crate::units::SimTime;

/// Members per root above which they come one after the other (`NCCL_UID_STAGGER_THRESHOLD`).
const STAGGER_ABOVE: u64 = 256;
/// Members a root takes per second (`NCCL_UID_STAGGER_RATE`).
const STAGGER_PER_S: u64 = 7_000;
/// All-gathers over the socket ring: addresses, peer facts, graphs.
const NUM_ALL_GATHERS: u64 = 3;
/// One hop of a small message between two hosts over TCP. An assumption: it depends on the cluster's network.
const HOP_NS: u64 = 30_000;

/// Time to make a communicator of `num_members`; `has_root` where it comes from a unique id and not from a parent.
pub(crate) fn init_time(num_members: usize, has_root: bool) -> SimTime {
    let members = num_members as u64;
    if members < 2 {
        return SimTime::ZERO;
    }
    let stagger_ns =
        if has_root && members > STAGGER_ABOVE { (members - 1) * 1_000_000_000 / STAGGER_PER_S } else { 0 };
    let ring_ns = NUM_ALL_GATHERS * (members / 2) * HOP_NS;
    SimTime::from_ns(i64::try_from(stagger_ns + ring_ns).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_members_come_one_after_the_other() {
        assert_eq!(init_time(1, true), SimTime::ZERO);
        assert_eq!(init_time(256, true), init_time(256, false));
        let world = init_time(8_192, true) - init_time(8_192, false);
        // 8,191 members at 7,000 a second.
        assert_eq!(world.as_ns(), 1_170_142_857);
        assert_eq!(init_time(8_192, false).as_ns(), 3 * 4_096 * 30_000);
    }
}
