//! What a simulation has to say.

use super::Simulation;
use super::role::{Account, Role, Times};
use crate::graph::op::{ComputeClass, Provenance};
use crate::ids::Rank;
use crate::units::SimTime;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Time on the device, whole ns summed over ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceTime {
    /// Compute by what its durations rest on.
    pub by_provenance: BTreeMap<Provenance, i64>,
    /// Compute by class of work.
    pub by_class: BTreeMap<ComputeClass, i64>,
    /// Communication from arrival to completion, waiting for peers included.
    pub communication: i64,
}

/// Use of a communicator by a live rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommUse {
    /// Communicator of the simulation.
    pub communicator: u32,
    /// Its members in group-rank order.
    pub members: Vec<u32>,
    /// Collectives and halves of messages.
    pub calls: u64,
    /// Bytes as the calls state them.
    pub bytes: u64,
}

/// One rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankReport {
    /// Which.
    pub rank: Rank,
    /// Time of its (last) `TrainingBegin`.
    pub training_begin: Option<SimTime>,
    /// Times of its `IterationEnd`s.
    pub iteration_ends: Vec<SimTime>,
    /// When its host and streams are through.
    pub final_time: SimTime,
    /// Only of a live rank: its time on the device.
    pub device_time: Option<DeviceTime>,
    /// Only of a live rank: its communicators, in order of their numbers.
    pub comms: Vec<CommUse>,
}

/// Result of a simulation so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SimReport {
    /// Every rank that took part, ascending.
    pub ranks: Vec<RankReport>,
    /// Ops evaluated, counted once per set of ranks that was evaluated as one.
    pub ops_evaluated: u64,
    /// Groups of ranks that were evaluated together: one per template and live rank, more if ranks of one template had to be
    /// told apart.
    pub roles: usize,
    /// Sets of ranks evaluated as one: ranks of a set have had the same times. All ranks, where every rank was evaluated.
    pub classes: usize,
    /// Time on the device of all ranks.
    pub device_time: DeviceTime,
}

impl SimReport {
    /// Duration of each iteration of the job: from the last rank's end of the previous one (or `TrainingBegin`, or the start)
    /// to the last rank's end. Without markers, one iteration: everything.
    #[must_use]
    pub fn iteration_times(&self) -> Vec<SimTime> {
        let latest = |time: &dyn Fn(&RankReport) -> Option<SimTime>| self.ranks.iter().filter_map(time).max();
        let num_iterations = self.ranks.iter().map(|rank| rank.iteration_ends.len()).max().unwrap_or(0);
        if num_iterations == 0 {
            return vec![latest(&|rank| Some(rank.final_time)).unwrap_or_default()];
        }
        let mut before = latest(&|rank| rank.training_begin).unwrap_or_default();
        let ends = (0..num_iterations).map(|k| latest(&|rank| rank.iteration_ends.get(k).copied()).unwrap_or_default());
        ends.map(|end| end - std::mem::replace(&mut before, end)).collect()
    }

    /// The rank whose last iteration ends last (or that ends last, without markers); of several, the lowest.
    #[must_use]
    pub fn critical_rank(&self) -> Option<Rank> {
        let time = |rank: &&RankReport| (rank.iteration_ends.last().copied(), rank.final_time);
        let latest = self.ranks.iter().map(|rank| time(&rank)).max()?;
        self.ranks.iter().find(|rank| time(rank) == latest).map(|rank| rank.rank)
    }
}

impl Account {
    fn add(&mut self, other: &Self) {
        self.by_provenance.iter_mut().zip(other.by_provenance).for_each(|(sum, time)| *sum += time);
        self.by_class.iter_mut().zip(other.by_class).for_each(|(sum, time)| *sum += time);
        self.communication += other.communication;
    }

    pub(super) fn device_time(&self) -> DeviceTime {
        const PROVENANCES: [Provenance; 4] =
            [Provenance::Measured, Provenance::Imported, Provenance::Modelled, Provenance::Default];
        let ns = |ps: i128| i64::try_from(ps / 1000).unwrap_or(i64::MAX);
        let provenances = PROVENANCES.into_iter().map(|p| (p, ns(self.by_provenance[p as usize])));
        let classes = ComputeClass::ALL.into_iter().map(|class| (class, ns(self.by_class[class as usize])));
        DeviceTime {
            by_provenance: provenances.filter(|(_, time)| *time > 0).collect(),
            by_class: classes.filter(|(_, time)| *time > 0).collect(),
            communication: ns(self.communication),
        }
    }
}

/// What a replay as a whole came to.
#[derive(Debug)]
pub(crate) struct Summary {
    /// See [`SimReport::iteration_times`].
    pub(crate) iteration_times: Vec<SimTime>,
    /// When the last rank is through.
    pub(crate) final_time: SimTime,
    /// See [`SimReport::critical_rank`].
    pub(crate) critical_rank: Option<Rank>,
    pub(crate) device_time: DeviceTime,
    pub(crate) ops_evaluated: u64,
    pub(crate) classes: usize,
}

impl SimReport {
    /// What all ranks together came to.
    pub(crate) fn into_summary(self) -> Summary {
        Summary {
            iteration_times: self.iteration_times(),
            final_time: self.ranks.iter().map(|rank| rank.final_time).max().unwrap_or_default(),
            critical_rank: self.critical_rank(),
            ops_evaluated: self.ops_evaluated,
            classes: self.classes,
            device_time: self.device_time,
        }
    }
}

impl Simulation {
    /// The summary of [`Self::report`], without a report of every rank.
    pub(crate) fn summary(&self) -> Summary {
        let (total, ops_evaluated) = self.account();
        let latest = |times: &Times| times.iter().copied().max();
        let (mut begin, mut ends): (Option<SimTime>, Vec<SimTime>) = (None, Vec::new());
        let mut critical = None;
        for role in &self.roles {
            begin = begin.max(role.begins.last_key_value().and_then(|(_, times)| latest(times)));
            for (iteration, times) in role.iteration_ends.values().enumerate() {
                let end = latest(times).unwrap_or_default();
                match ends.get_mut(iteration) {
                    Some(known) => *known = end.max(*known),
                    None => ends.push(end),
                }
            }
            let (finals, last) = (role.final_times(), role.iteration_ends.last_key_value());
            for (at, rank) in role.ranks.iter().enumerate() {
                let lane = role.lanes.of(at) as usize;
                let key = (last.map(|(_, times)| times[lane]), finals[lane], Reverse(*rank));
                critical = critical.max(Some(key));
            }
        }
        let final_time = self.roles.iter().filter_map(|role| latest(&role.final_times())).max().unwrap_or_default();
        let mut before = begin.unwrap_or_default();
        let mut iteration_times: Vec<SimTime> =
            ends.into_iter().map(|end| end - std::mem::replace(&mut before, end)).collect();
        if iteration_times.is_empty() {
            iteration_times.push(final_time);
        }
        Summary {
            iteration_times,
            final_time,
            critical_rank: critical.map(|(_, _, Reverse(rank))| Rank(rank)),
            device_time: total.device_time(),
            ops_evaluated,
            classes: self.num_classes(),
        }
    }

    /// Time and ops of all roles.
    fn account(&self) -> (Account, u64) {
        let (mut total, mut ops) = (Account::default(), 0);
        for role in &self.roles {
            total.add(&role.account);
            ops += role.account.ops + self.programs[role.program].host_ops * role.len() as u64;
        }
        (total, ops)
    }

    /// What is known so far.
    pub fn report(&self) -> SimReport {
        let mut ranks = Vec::with_capacity(self.world_size as usize);
        let (total, ops_evaluated) = self.account();
        self.roles.iter().for_each(|role| self.report_role(role, &mut ranks));
        ranks.sort_unstable_by_key(|report| report.rank);
        SimReport {
            ranks,
            ops_evaluated,
            roles: self.roles.len(),
            classes: self.num_classes(),
            device_time: total.device_time(),
        }
    }

    fn report_role(&self, role: &Role, ranks: &mut Vec<RankReport>) {
        let finals = role.final_times();
        for (at, rank) in role.ranks.iter().enumerate() {
            let (at, rank) = (role.lanes.of(at) as usize, Rank(*rank));
            let live = self.live.get(&rank);
            let comms = live.into_iter().flat_map(|live| &live.uses).map(|(comm, (calls, bytes))| CommUse {
                communicator: *comm,
                members: self.network.members(*comm).to_vec(),
                calls: *calls,
                bytes: *bytes,
            });
            ranks.push(RankReport {
                rank,
                training_begin: role.begins.last_key_value().map(|(_, times)| times[at]),
                iteration_ends: role.iteration_ends.values().map(|times| times[at]).collect(),
                final_time: finals[at],
                device_time: live.map(|_| role.account.device_time()),
                comms: comms.collect(),
            });
        }
    }
}
