//! What must be true of every result, whatever the job: checked when a replay is through.
//!
//! * *Calls.* Of every communicator, each member has made as many collectives as are complete.
//! * *Ports.* No rank's launch took less than its bytes over the rank's fastest port: collectives over rings and all-to-alls (each
//!   member sends its part), and messages (of several in one launch, those of the busiest port together). Checked of every rank
//!   at every launch (where communicators of a slot differ, by the least of them), and of the sum over a role's ranks.
//! * *Streams.* No rank's clock went back: not over a launch (what it is set to is no earlier than what it was), not from one marker
//!   on the stream to the next or to its end; everything else only raises clocks. No stream of a role was busier than it
//!   lasted (of the sum over ranks).
//!
//! Cost: O(ranks x (streams + iterations) + communicators) at the end, and at each launch a minimum in the loop over its ranks
//! that adds up their times anyway. A violation is a bug of the engine, so these say so.

use super::role::{Role, Slot, Stream, Times};
use super::{SimError, Simulation};
use crate::ids::Rank;
use crate::units::SimTime;

/// Sums over the ranks of a role (ports of a slot), in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// From arrival to end.
    pub(super) busy: i128,
    /// What the bytes take over the fastest port.
    pub(super) least: i128,
}

/// The marker a stream has passed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Begin(u32),
    IterationEnd(u32),
}

impl Simulation {
    /// Checks a result that is complete.
    pub(super) fn check_invariants(&self) -> Result<(), SimError> {
        if let Some(error) = self.roles.iter().find_map(|role| role.violation.clone()) {
            return Err(error);
        }
        // The dead leave calls open, and a changed link may be faster than the profile's.
        let is_healthy = self.network.rules.is_none();
        for role in self.roles.iter().filter(|role| !self.has_role_died(role)) {
            for (number, stream) in role.streams.iter().enumerate() {
                role.check_stream(number, stream)?;
            }
            for slot in role.slots.iter().filter(|_| is_healthy) {
                self.check_calls(role, slot)?;
                self.check_ports(role, slot)?;
            }
        }
        Ok(())
    }

    fn check_calls(&self, role: &Role, slot: &Slot) -> Result<(), SimError> {
        for (batch, _) in &slot.wiring.parts {
            let batch = &self.network.batches[*batch as usize];
            if slot.calls != batch.completed || batch.is_open() {
                let (calls, completed) = (slot.calls, batch.completed);
                let what = format!("{calls} collectives were called, {completed} are complete");
                return Err(violated(role.ranks[0], Some(batch.comms[0]), what));
            }
        }
        Ok(())
    }

    fn check_ports(&self, role: &Role, slot: &Slot) -> Result<(), SimError> {
        let Load { busy, least } = slot.load;
        if busy >= least {
            return Ok(());
        }
        let comm = slot.wiring.parts.first().map(|(batch, _)| self.network.batches[*batch as usize].comms[0]);
        let what = format!("communication of the role took {busy} ps where its bytes alone take {least} ps");
        Err(violated(role.ranks[0], comm, what))
    }
}

impl Role {
    fn check_stream(&self, number: usize, stream: &Stream) -> Result<(), SimError> {
        let lasted = self.lanes.sum(stream.clock.iter().map(|time| time.0));
        let lasted =
            if self.lanes.is_each() { stream.clock.iter().map(|time| i128::from(time.0)).sum() } else { lasted };
        if stream.busy > lasted {
            let busy = stream.busy;
            let what = format!("stream {number} of the role was busy for {busy} ps of {lasted} ps");
            return Err(violated(self.ranks[0], None, what));
        }
        match stream.mark.and_then(|mark| self.marked(mark)) {
            Some(before) => self.check_order(number, before, &stream.clock),
            None => Ok(()),
        }
    }

    /// The stream has come to a marker.
    pub(super) fn note_mark(&mut self, stream: usize, mark: Mark) {
        let before = self.streams[stream].mark.replace(mark).and_then(|mark| self.marked(mark));
        if let Some(Err(error)) = before.map(|before| self.check_order(stream, before, &self.streams[stream].clock)) {
            self.violation.get_or_insert(error);
        }
    }

    fn marked(&self, mark: Mark) -> Option<&Times> {
        match mark {
            Mark::Begin(number) => self.begins.get(&number),
            Mark::IterationEnd(number) => self.iteration_ends.get(&number),
        }
    }

    fn check_order(&self, stream: usize, before: &[SimTime], now: &[SimTime]) -> Result<(), SimError> {
        let Some(lane) = before.iter().zip(now).position(|(before, now)| now < before) else { return Ok(()) };
        let at = (0..self.ranks.len()).find(|at| self.lanes.of(*at) as usize == lane).unwrap_or(0);
        let what = format!("stream {stream} went from {} ps back to {} ps", before[lane].0, now[lane].0);
        Err(violated(self.ranks[at], None, what))
    }
}

/// A launch in which some rank was faster than its bytes, which take `least`.
pub(super) fn short_launch(ranks: &[u32], arrivals: &[SimTime], ends: &[SimTime], least: i64) -> SimError {
    let spent = arrivals.iter().zip(ends).map(|(arrival, end)| end.0.saturating_sub(arrival.0));
    let (spent, rank) = spent.zip(ranks).min().unwrap_or((0, &0));
    let what = format!("a launch of the rank took {spent} ps where its bytes alone take {least} ps");
    violated(*rank, None, what)
}

/// The same of a run of collectives of which only the shortfall is known, and a rank of the role.
pub(super) fn too_short(rank: u32, communicator: Option<u32>, short: i64) -> SimError {
    violated(rank, communicator, format!("a collective of the role was {short} ps shorter than its bytes alone take"))
}

fn violated(rank: u32, communicator: Option<u32>, what: String) -> SimError {
    SimError::Invariant { what, rank: Rank(rank), communicator }
}

#[cfg(test)]
mod tests {
    use super::super::vector;
    use super::*;
    use crate::profile::Profile;
    use crate::sim::{Peers, SimOptions};
    use crate::synthetic::TransformerStep;
    use std::sync::Arc;

    /// A finished simulation, by lanes or rank by rank.
    fn finished(symmetry: bool) -> Simulation {
        let mut simulation = started(symmetry, 4, 1);
        simulation.run().expect("no deadlock");
        simulation
    }

    /// One whose check believes that bytes take `stretch` times as long as they do.
    fn started(symmetry: bool, dp: u32, stretch: i64) -> Simulation {
        let step = TransformerStep { dp, tp: 2, pp: 2, microbatches: 2, iterations: 2, ..TransformerStep::default() };
        let graph = Arc::new(step.graph().expect("valid"));
        let profile = Profile::builtin("h100-sxm").expect("built in");
        let options = SimOptions { symmetry, ..SimOptions::new(profile) };
        let mut simulation = Simulation::new(Peers::Graph(graph), 4 * dp, options).expect("valid");
        simulation.network.stretch_least = stretch;
        simulation
    }

    /// The error after something was changed in the second role, whose first rank is 8.
    fn after(symmetry: bool, change: impl FnOnce(&mut Role)) -> String {
        let mut simulation = finished(symmetry);
        assert_eq!(simulation.check_invariants(), Ok(()));
        change(&mut simulation.roles[1]);
        let error = simulation.check_invariants().expect_err("something is wrong");
        assert!(matches!(error, SimError::Invariant { rank: Rank(8..), .. }), "{error:?}");
        assert!(error.to_string().contains("bug of the engine"), "{error}");
        error.to_string()
    }

    #[test]
    fn a_call_that_is_not_complete_is_found() {
        for symmetry in [false, true] {
            let error = after(symmetry, |role| role.slots[0].calls += 1);
            assert!(error.contains("collectives were called") && error.contains("communicator"), "{error}");
        }
    }

    #[test]
    fn bytes_that_came_too_fast_are_found() {
        for symmetry in [false, true] {
            for slot in 0..4 {
                let error = after(symmetry, |role| {
                    assert!(role.slots[slot].load.least > 0, "slot {slot} moved bytes");
                    role.slots[slot].load.busy = role.slots[slot].load.least - 1;
                });
                assert!(error.contains("its bytes alone take"), "{error}");
            }
        }
    }

    #[test]
    fn a_stream_that_is_too_busy_is_found() {
        for symmetry in [false, true] {
            let error = after(symmetry, |role| role.streams[0].busy *= 100);
            assert!(error.contains("stream 0 of the role was busy"), "{error}");
        }
    }

    #[test]
    fn a_stream_that_goes_back_is_found() {
        for symmetry in [false, true] {
            let error = after(symmetry, |role| role.iteration_ends.get_mut(&1).expect("two iterations")[0].0 += 1);
            assert!(error.contains("stream 0 went from"), "{error}");
            let error = after(symmetry, |role| {
                role.streams[0].mark = Some(Mark::IterationEnd(1));
                role.streams[0].clock[0].0 -= 1;
                role.note_mark(0, Mark::IterationEnd(2));
            });
            assert!(error.contains("stream 0 went from"), "{error}");
        }
    }

    #[test]
    fn one_rank_that_is_faster_than_its_bytes_is_found_and_named() {
        let times = |times: [i64; 4]| times.map(SimTime);
        let (arrivals, ends) = (times([5, 9, 7, 0]), times([105, 110, 106, 200]));
        assert_eq!(vector::spent(&ends, &arrivals), vector::Spent { total: 100 + 101 + 99 + 200, least: 99 });
        let error = short_launch(&[8, 12, 10, 11], &arrivals, &ends, 100);
        assert!(matches!(error, SimError::Invariant { rank: Rank(10), .. }), "{error:?}");
        assert!(error.to_string().contains("took 99 ps") && error.to_string().contains("100 ps"), "{error}");
        // An end before the arrival is found by the same.
        assert_eq!(vector::spent(&times([1, 2, 3, 4]), &times([0, 9, 0, 0])).least, -7);
    }

    /// Launches are compared with their bytes wherever they are evaluated.
    #[test]
    fn every_launch_of_every_rank_is_checked() {
        for symmetry in [false, true] {
            let mut simulation = started(symmetry, 16, 100);
            let error = simulation.run().expect_err("messages took less than told");
            assert!(matches!(error, SimError::Invariant { .. }), "{error:?}");
            assert!(error.to_string().contains("its bytes alone take"), "{error}");
        }
    }

    #[test]
    fn streams_are_as_busy_as_their_ops() {
        let simulation = finished(false);
        let role = &simulation.roles[0];
        let busy: i128 = role.streams.iter().map(|stream| stream.busy).sum();
        let account = &role.account;
        assert_eq!(busy, account.by_provenance.iter().sum::<i128>() + account.communication);
        let loads: i128 = role.slots.iter().map(|slot| slot.load.busy).sum();
        assert_eq!(loads, account.communication);
    }
}
