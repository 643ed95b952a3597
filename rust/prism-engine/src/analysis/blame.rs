//! Who makes the others wait.
//!
//! At a collective everybody waits for the last to come, so a slow rank is the one that shows *no* waiting: its peers
//! do. Only waiting that nothing hides counts, taken from each rank's own account of the iteration (`critical_path.rs`),
//! and it is charged, by communicator, to the rank that came last.

use super::critical_path::Spent;
use super::excess::Excess;
use super::plan::{Back, NodeKind};
use super::trace::JobTrace;
use crate::ids::Rank;
use crate::sim::SimError;
use crate::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;

/// Moments evaluated at most; ranks beyond are passed over, and the result says how many were looked at.
const BUDGET: u64 = 1 << 28;
/// Share of the iteration by which the culprit must wait less than the median of its equals.
const NOTICEABLE: f64 = 0.005;
/// Of that difference, how much of it further culprits may wait.
const SAME: f64 = 0.1;
/// More compute than the rank's equals by this share counts as the cause.
const SLOWER: f64 = 0.002;

/// Waiting that a rank caused on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Blame {
    /// Communicator of the graph.
    pub communicator: u32,
    /// The rank that came last.
    pub rank: Rank,
    /// Time others waited for it there, summed over them.
    pub waited_ns: i64,
    /// The longest that one rank waited for it there.
    pub longest_ns: i64,
}

/// Waiting on one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CommWaiting {
    /// Communicator of the graph.
    pub communicator: u32,
    /// Its members.
    pub size: u32,
    /// Time its members waited on it, summed over them.
    pub waited_ns: i64,
    /// The member that waited least.
    pub least_rank: Rank,
    /// How long that was.
    pub least_ns: i64,
}

/// Why a rank is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its compute takes longer than that of ranks with the same program (of all ranks, if it has no equals).
    Compute,
    /// All ranks of its program wait less and compute more than those of other programs: an uneven split of the work.
    Program,
    /// Its communication takes longer than theirs: slow links, or more to send.
    Communication,
    /// Its host takes longer.
    Host,
    /// None of these: it comes late from something before the iteration, or from what it waits for elsewhere.
    NotCompute,
}

/// The ranks that wait least, among ranks with the same program: others may have to wait by the job's schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Culprit {
    /// Which, ascending.
    pub ranks: Vec<Rank>,
    /// What the first of them waited in the iteration.
    pub waited_ns: i64,
    /// What the median of the ranks it is compared with waited.
    pub median_waited_ns: i64,
    /// Why.
    pub cause: Cause,
    /// Compute of the first of them in the iteration.
    pub compute_ns: i64,
    /// Median compute of the ranks it is compared with.
    pub usual_compute_ns: i64,
    /// The ranks it is compared with: those with the same program, if there are others.
    pub compared_with: u32,
    /// What takes it noticeably longer than up to 16 of them; not for a whole program.
    pub longer: Option<Excess>,
}

/// Who waits for whom in an iteration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Ranks whose account was drawn up: the lowest, if the job is too large to examine all.
    pub ranks_examined: u32,
    /// What each of them waited, ascending by rank.
    #[serde(skip)]
    pub by_rank: Vec<(Rank, SimTime)>,
    /// Largest first.
    pub blame: Vec<Blame>,
    /// Largest first.
    pub communicators: Vec<CommWaiting>,
    /// Nobody, if no rank waits noticeably less than the others.
    pub culprit: Option<Culprit>,
}

/// Last arrivals of collectives, by communicator and sequence.
pub(super) type Lasts = BTreeMap<(u32, u64), (SimTime, u32)>;
/// Waits of a rank: communicator, rank waited for, how long.
type Waits = Vec<(u32, u32, SimTime)>;

impl JobTrace {
    /// Who waits for whom in an iteration. `None` if the job has fewer iterations.
    pub fn waiting(&self, iteration: usize) -> Result<Option<Waiting>, SimError> {
        let Some(window) = self.window(iteration) else { return Ok(None) };
        let mut budget = BUDGET;
        let mut lasts = Lasts::new();
        let mut compute = Vec::new();
        let mut sums = Sums::default();
        for rank in 0..self.graph.world_size() {
            let cost = self.plan(rank).nodes.len() as u64;
            if budget < cost {
                break;
            }
            budget -= cost;
            let times = self.fresh_times(rank)?;
            let waits = self.waits(rank, &times, window, iteration, &mut lasts);
            compute.push(self.compute_in(rank, &times, window));
            sums.add(rank, &waits);
        }
        let length = window.1 - window.0;
        let mut culprit = self.culprit(&sums.by_rank, &compute, length);
        if let Some(culprit) = &mut culprit {
            self.explain_culprit(culprit, iteration, length.as_ns())?;
        } else if let Some(mut odd) = Search::among_all(&sums.by_rank, &compute, length).odd_rank() {
            // Somebody with a program of its own, which must be what makes it late: schedules let ranks wait unequally.
            self.explain_culprit(&mut odd, iteration, length.as_ns())?;
            culprit = Some(odd).filter(Culprit::works_longer);
        }
        Ok(Some(sums.finish(self, culprit)))
    }

    /// The waiting in a rank's account that nothing hides, in no order.
    fn waits(
        &self,
        rank: u32,
        times: &[SimTime],
        (start, end): (SimTime, SimTime),
        iteration: usize,
        lasts: &mut Lasts,
    ) -> Waits {
        let plan = self.plan(rank);
        let mut waits = Vec::new();
        let from = match plan.iteration_ends.get(iteration) {
            Some(node) => *node,
            None if self.num_marked() == 0 => {
                (0..times.len() as u32).rev().max_by_key(|n| times[*n as usize]).unwrap_or(0)
            }
            None => return waits,
        };
        for step in Back::new(plan, times, from, start) {
            let NodeKind::End(number) = plan.nodes[step.node as usize].kind else { continue };
            let time = times[step.node as usize];
            let Some((comm, late, until)) = self.last_of(rank, number, time, lasts) else { continue };
            let waited = until.min(end) - step.ready.max(step.floor);
            if waited > SimTime::ZERO {
                waits.push((comm, late, waited));
            }
        }
        waits
    }

    /// Whom a launch waited for and until when: the last to come before it ended.
    pub(super) fn last_of(
        &self,
        rank: u32,
        number: u32,
        end: SimTime,
        lasts: &mut Lasts,
    ) -> Option<(u32, u32, SimTime)> {
        let launch = &self.plan(rank).launches[number as usize];
        let comm = self.comm_of(rank, launch);
        let mut last: Option<(SimTime, u32)> = None;
        let mut take = |time: SimTime, other: u32| {
            if other != rank && time <= end && last.is_none_or(|(latest, _)| time > latest) {
                last = Some((time, other));
            }
        };
        if launch.has_messages() {
            for (half, sequence) in &launch.halves {
                let (other, number, _) = self.peer(rank, comm, launch.slot, (half.peer, half.is_send), *sequence);
                take(self.arrival(other, number), other);
            }
        }
        if !launch.calls.is_empty() {
            let sequence = launch.first_call;
            let members = self.members(comm);
            let (time, late) = *lasts.entry((comm, sequence)).or_insert_with(|| {
                let arrivals = self.arrivals(comm, sequence);
                let latest = arrivals.iter().copied().max().unwrap_or_default();
                let first = arrivals.iter().position(|time| *time == latest).unwrap_or(0);
                (latest, members[first])
            });
            if time <= end {
                take(time, late);
            } else {
                // Left before the last came (a broadcast, for one).
                self.arrivals(comm, sequence).into_iter().zip(members).for_each(|(time, other)| take(time, *other));
            }
        }
        last.map(|(time, late)| (comm, late, time))
    }

    /// Of the ranks with one program, that which waits noticeably less than its equals; else the program that computes more
    /// than the others and whose ranks wait less.
    fn culprit(&self, waited: &[(Rank, SimTime)], compute: &[SimTime], length: SimTime) -> Option<Culprit> {
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, (rank, _)) in waited.iter().enumerate() {
            groups.entry(self.graph.rank_template(*rank).0).or_default().push(at);
        }
        if groups.values().all(|group| group.len() == 1) {
            return Search::among_all(waited, compute, length).odd_rank().filter(Culprit::computes_more);
        }
        let search = Search { groups, ..Search::among_all(waited, compute, length) };
        search.odd_rank().or_else(|| search.odd_group())
    }
}

impl Culprit {
    fn computes_more(&self) -> bool {
        self.cause == Cause::Compute
    }

    fn works_longer(&self) -> bool {
        self.longer.is_some_and(|longer| matches!(longer.spent, Spent::Compute { .. } | Spent::Host))
    }
}

struct Search<'a> {
    waited: &'a [(Rank, SimTime)],
    compute: &'a [SimTime],
    /// What is noticeable, ps.
    least: f64,
    /// Ranks with one program.
    groups: BTreeMap<u32, Vec<usize>>,
}

impl<'a> Search<'a> {
    /// All ranks as equals.
    fn among_all(waited: &'a [(Rank, SimTime)], compute: &'a [SimTime], length: SimTime) -> Self {
        let groups = BTreeMap::from([(0, (0..waited.len()).collect())]);
        Self { waited, compute, least: (length.0 as f64 * NOTICEABLE).max(1.0), groups }
    }
}

impl Search<'_> {
    fn median_wait<'a>(&self, among: impl IntoIterator<Item = &'a usize>) -> Option<SimTime> {
        median(among.into_iter().map(|at| self.waited[*at].1).collect())
    }

    fn median_compute<'a>(&self, among: impl IntoIterator<Item = &'a usize>) -> Option<SimTime> {
        median(among.into_iter().map(|at| self.compute[*at]).collect())
    }

    fn odd_rank(&self) -> Option<Culprit> {
        // How much less than the median of its equals each rank waits.
        let mut less: BTreeMap<usize, (f64, u32)> = BTreeMap::new();
        for (template, group) in &self.groups {
            let median = self.median_wait(group)?;
            less.extend(group.iter().map(|at| (*at, ((median - self.waited[*at].1).0 as f64, *template))));
        }
        let most = less.values().map(|(less, _)| *less).fold(0.0, f64::max);
        if most < self.least {
            return None;
        }
        let odd: Vec<usize> =
            less.iter().filter(|(_, (less, _))| *less >= most * (1.0 - SAME)).map(|(at, _)| *at).collect();
        let first = odd.iter().copied().find(|at| less[at].0 >= most)?;
        let group = &self.groups[&less[&first].1];
        let others: Vec<usize> = group.iter().copied().filter(|at| !odd.contains(at)).collect();
        let usual = self.median_compute(&others)?;
        let is_slower = self.compute[first].0 as f64 > usual.0 as f64 * (1.0 + SLOWER);
        Some(Culprit {
            ranks: odd.iter().map(|at| self.waited[*at].0).collect(),
            waited_ns: self.waited[first].1.as_ns(),
            median_waited_ns: self.median_wait(group)?.as_ns(),
            cause: if is_slower { Cause::Compute } else { Cause::NotCompute },
            compute_ns: self.compute[first].as_ns(),
            usual_compute_ns: usual.as_ns(),
            compared_with: others.len() as u32,
            longer: None,
        })
    }

    fn odd_group(&self) -> Option<Culprit> {
        let busiest = self.groups.values().filter_map(|group| Some((self.median_compute(group)?, group)));
        let (compute, group) = busiest.rev().max_by_key(|(compute, _)| *compute)?;
        let others: Vec<usize> = (0..self.waited.len()).filter(|at| !group.contains(at)).collect();
        let (usual, waited) = (self.median_compute(&others)?, self.median_wait(group)?);
        let median = self.median_wait(&others)?;
        let is_noticeable = |more: SimTime, less: SimTime| (more - less).0 as f64 >= self.least;
        (is_noticeable(compute, usual) && is_noticeable(median, waited)).then(|| Culprit {
            ranks: group.iter().map(|at| self.waited[*at].0).collect(),
            waited_ns: waited.as_ns(),
            median_waited_ns: median.as_ns(),
            cause: Cause::Program,
            compute_ns: compute.as_ns(),
            usual_compute_ns: usual.as_ns(),
            compared_with: others.len() as u32,
            longer: None,
        })
    }
}

fn median(mut times: Vec<SimTime>) -> Option<SimTime> {
    let middle = times.len() / 2;
    (!times.is_empty()).then(|| *times.select_nth_unstable(middle).1)
}

#[derive(Default)]
struct Sums {
    by_rank: Vec<(Rank, SimTime)>,
    blame: BTreeMap<(u32, u32), (SimTime, SimTime)>,
    /// Waiting of each member by communicator.
    comms: BTreeMap<u32, BTreeMap<u32, SimTime>>,
}

impl Sums {
    fn add(&mut self, rank: u32, waits: &[(u32, u32, SimTime)]) {
        let mut total = SimTime::ZERO;
        let mut own: BTreeMap<(u32, u32), SimTime> = BTreeMap::new();
        for (comm, late, time) in waits {
            total += *time;
            *own.entry((*comm, *late)).or_default() += *time;
            *self.comms.entry(*comm).or_default().entry(rank).or_default() += *time;
        }
        for (key, time) in own {
            let (sum, longest) = self.blame.entry(key).or_default();
            (*sum, *longest) = (*sum + time, (*longest).max(time));
        }
        self.by_rank.push((Rank(rank), total));
    }

    fn finish(self, trace: &JobTrace, culprit: Option<Culprit>) -> Waiting {
        let blame = self.blame.into_iter().map(|((communicator, rank), (sum, longest))| Blame {
            communicator,
            rank: Rank(rank),
            waited_ns: sum.as_ns(),
            longest_ns: longest.as_ns(),
        });
        let mut blame: Vec<Blame> = blame.collect();
        blame.sort_by_key(|blame| std::cmp::Reverse(blame.waited_ns));
        let communicators = self.comms.into_iter().filter_map(|(communicator, own)| {
            let members = trace.members(communicator);
            let of = |rank: &u32| own.get(rank).copied().unwrap_or_default();
            let least_rank = members.iter().min_by_key(|rank| (of(rank), **rank)).copied()?;
            Some(CommWaiting {
                communicator,
                size: members.len() as u32,
                waited_ns: own.values().fold(SimTime::ZERO, |sum, time| sum + *time).as_ns(),
                least_rank: Rank(least_rank),
                least_ns: of(&least_rank).as_ns(),
            })
        });
        let mut communicators: Vec<CommWaiting> = communicators.collect();
        communicators.sort_by_key(|comm| std::cmp::Reverse(comm.waited_ns));
        Waiting { ranks_examined: self.by_rank.len() as u32, by_rank: self.by_rank, blame, communicators, culprit }
    }
}
