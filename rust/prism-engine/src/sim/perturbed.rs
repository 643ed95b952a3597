//! What perturbations need to know and remember while a job runs.

use super::channel::Waiting;
use super::error::SimError;
use super::ports::Lanes;
use super::program::Program;
use crate::collective;
use crate::graph::op::ComputeClass;
use crate::ids::{Rank, StreamId};
use crate::perturb::{ComputeSite, End, Hop, LinkChange, NameMask, Perturbations, StreamState, When, World};
use crate::profile::Profile;
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// No perturbed op ends later: what is added to it then still fits.
const MAX_TIME: SimTime = SimTime(i64::MAX / 4);

/// A compute op of a program, as rules see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PerturbedOp {
    pub(super) op: u32,
    pub(super) stream: u32,
    pub(super) class: ComputeClass,
    pub(super) iteration: u32,
    pub(super) names: NameMask,
}

/// The rules about compute, with what they remember of each stream.
#[derive(Debug)]
pub(super) struct Perturber {
    rules: Arc<Perturbations>,
    states: FxHashMap<(usize, u32, u32), StreamState>,
    /// The lowest rank with an op that would end beyond the range.
    too_late: Option<u32>,
}

impl Perturber {
    pub(super) fn new(rules: Arc<Perturbations>) -> Self {
        Self { rules, states: FxHashMap::default(), too_late: None }
    }

    pub(super) fn rules(&self) -> &Arc<Perturbations> {
        &self.rules
    }

    /// Lanes whose durations depend on the op, ascending, with a rank of each.
    pub(super) fn touched(&self, ranks: &[u32], lanes: &Lanes) -> Vec<(u32, u32)> {
        if self.rules.is_empty() {
            return Vec::new();
        }
        let touched = ranks.iter().enumerate().filter(|(_, rank)| self.rules.changes_compute(Rank(**rank)));
        let mut touched: Vec<(u32, u32)> = touched.map(|(at, rank)| (lanes.of(at), *rank)).collect();
        touched.sort_unstable();
        touched.dedup_by_key(|(lane, _)| *lane);
        touched
    }

    /// Duration of an op of a rank that would take `duration` from `start`.
    pub(super) fn duration(
        &mut self,
        rank: u32,
        op: &PerturbedOp,
        program: &Program,
        start: SimTime,
        duration: SimTime,
    ) -> SimTime {
        if op.class.is_fixed() {
            return duration;
        }
        let site = ComputeSite {
            rank: Rank(rank),
            stream: StreamId(op.stream),
            class: op.class,
            when: When { iteration: op.iteration, time: start },
            place: program.place(op.op, op.iteration),
        };
        let mut duration = duration;
        for (number, rule, filter) in self.rules.compute_rules() {
            if !rule.changes_compute(site.rank) || filter.is_some_and(|bit| op.names.0 & (1 << bit) == 0) {
                continue;
            }
            duration = match rule.initial_state() {
                Some(initial) => {
                    let state = self.states.entry((number, rank, op.stream)).or_insert(initial);
                    rule.compute(&site, duration, state)
                }
                None => rule.compute(&site, duration, &mut StreamState::default()),
            };
            if start + duration > MAX_TIME {
                self.too_late = Some(self.too_late.map_or(rank, |lowest| lowest.min(rank)));
                return SimTime::ZERO;
            }
        }
        duration
    }

    pub(super) fn failure(&self) -> Option<SimError> {
        let rank = self.too_late?;
        Some(SimError::too_long(format!("a perturbed op of rank {rank} would end after more than 26 days")))
    }
}

/// Where in its program a launch is, and how many peers it sends to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Origin {
    pub(super) iteration: u32,
    pub(super) num_peers: u32,
}

/// The rules about communication and the deaths of ranks.
#[derive(Debug)]
pub(crate) struct NetworkRules {
    rules: Arc<Perturbations>,
    world: World,
    /// Ranks that die at a time.
    deaths: BTreeMap<u32, SimTime>,
    /// Those that a communication op has found dead.
    pub(super) found_dead: BTreeSet<u32>,
}

impl NetworkRules {
    /// `None` if communication is as it should be.
    pub(crate) fn new(rules: &Arc<Perturbations>, world: World) -> Option<Self> {
        if rules.is_empty() {
            return None;
        }
        let deaths: BTreeMap<u32, SimTime> =
            (0..world.size).filter_map(|rank| Some((rank, rules.deaths(Rank(rank)).0?))).collect();
        let is_needed = rules.changes_network() || !deaths.is_empty();
        is_needed.then(|| Self { rules: Arc::clone(rules), world, deaths, found_dead: BTreeSet::new() })
    }

    pub(crate) fn rules(&self) -> &Arc<Perturbations> {
        &self.rules
    }

    fn end(&self, rank: u32) -> End {
        self.world.end(Rank(rank), rank / self.world.gpus)
    }

    /// The rules that may change the communication of some ranks, one bit each.
    pub(crate) fn reach(&self, members: &[u32]) -> u64 {
        members.iter().fold(0, |reach, rank| reach | self.rules.network_reach(&self.end(*rank)))
    }

    /// Ends of the halves of a message between two ranks of a communicator of `members`.
    pub(super) fn message(
        &self,
        profile: &Profile,
        (source, destination): (u32, u32),
        members: usize,
        (send, receive): (&Waiting, &Waiting),
    ) -> (SimTime, SimTime) {
        let iteration = send.origin.iteration.max(receive.origin.iteration);
        let when = When { iteration, time: send.times[0].max(receive.times[0]) };
        let (bytes, change) = self.on_message((source, destination), members, send.origin.num_peers, send.bytes, when);
        collective::message_over(profile, (source, destination), bytes, (send.times[0], receive.times[0]), change)
    }

    /// Size of a message that both ranks have come to at `when`, and what is done to its link. Its launch sends to
    /// `num_peers` of the communicator's `members`.
    pub(crate) fn on_message(
        &self,
        (source, destination): (u32, u32),
        members: usize,
        num_peers: u32,
        bytes: u64,
        when: When,
    ) -> (u64, LinkChange) {
        let state = self.rules.network_state(when);
        let (from, to) = (self.end(source), self.end(destination));
        let change = self.rules.link(state, &Hop { from, to, is_inside: from.node == to.node });
        // An exchange of everybody with everybody; pairs and neighbours in a pipeline are none.
        let is_exchange = members > 2 && num_peers as usize + 1 >= members;
        if state == 0 || !is_exchange {
            return (bytes, change);
        }
        let factor = self.rules.size(state, Rank(source)).max(self.rules.size(state, Rank(destination)));
        ((bytes as f64 * factor).round() as u64, change)
    }

    /// Which of two halves of a message (with their ranks and ends) waits for ever because the rank of the other is dead.
    pub(super) fn left_over(&mut self, halves: [(u32, SimTime); 2]) -> Option<usize> {
        if !self.kills(halves.into_iter()) {
            return None;
        }
        let alive = halves.iter().position(|(rank, _)| !self.found_dead.contains(rank));
        Some(alive.unwrap_or(0))
    }

    /// Is one of these ranks dead before the end it would see? It is kept in mind.
    pub(super) fn kills(&mut self, ends: impl Iterator<Item = (u32, SimTime)>) -> bool {
        if self.deaths.is_empty() {
            return false;
        }
        let dead = ends.filter(|(rank, end)| self.deaths.get(rank).is_some_and(|death| end > death));
        let dead: Vec<u32> = dead.map(|(rank, _)| rank).collect();
        self.found_dead.extend(&dead);
        !dead.is_empty()
    }
}
