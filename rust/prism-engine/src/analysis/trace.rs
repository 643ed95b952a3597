//! A replay kept well enough to ask why every moment of it came when it did.
//!
//! Kept are the arrival and end of every launch of communication of every rank, 24 bytes each. Everything else of a rank
//! follows from those and its program, and is worked out when it is asked for. Who held a collective follows from its
//! algebra: every end is `max over s of (arrival(s) + W(p, s))`.

use super::plan::{Launch, NodeKind, Plan};
use crate::collective::{self, CollectiveCall, CommShape, Scratch, ShapePool};
use crate::graph::Graph;
use crate::ids::{CommId, Rank, SlotId, TemplateId};
use crate::perturb::{When, World};
use crate::profile::Profile;
use crate::replay::{Contention, ReplayOptions, check_events, placed};
use crate::sim::{Call, LaunchSpan, NetworkRules, Peers, SimError, SimOptions, SimReport, Simulation, Span};
use crate::units::SimTime;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// Most launches (one per rank that takes part) a trace may have: 768 MiB.
pub const MAX_LAUNCHES: u64 = 1 << 25;
/// Most ops of a perturbed job: the durations of all of them are kept, 40 bytes each.
const MAX_PERTURBED_OPS: u64 = 1 << 24;
/// Ranks whose times are kept for use again.
const KEPT_RANKS: usize = 64;
/// Collectives whose ends are kept for use again.
const KEPT_CALLS: usize = 64;
/// So early that it holds nobody.
pub(crate) const NEVER: SimTime = SimTime(-(1 << 59));

/// Durations by op, ascending.
type Durations = Vec<(u32, SimTime)>;

/// Times that several askers share.
pub(super) type Times = Rc<Vec<SimTime>>;

/// A moment of one rank: a node of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment {
    pub(crate) rank: u32,
    pub(crate) node: u32,
}

/// What held the end of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    /// The arrival that was waited for.
    pub(crate) arrival: Moment,
    pub(crate) time: SimTime,
    pub(crate) comm: u32,
    pub(crate) is_message: bool,
}

/// A member's place at a collective: its launch, and whether that launch has collectives before this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) launch: u32,
    pub(crate) is_first: bool,
}

/// See the module's documentation.
pub struct JobTrace {
    pub(crate) graph: Arc<Graph>,
    pub(crate) profile: Profile,
    slow: BTreeMap<Rank, f64>,
    plans: Vec<Plan>,
    launches: Vec<Vec<LaunchSpan>>,
    /// How long every op of every rank really took, if anything was perturbed. Ascending by op.
    perturbed: Option<Vec<Rc<Durations>>>,
    /// Slot of each member of each communicator.
    slots: Vec<Vec<SlotId>>,
    pub(crate) report: SimReport,
    times: RefCell<BTreeMap<u32, Times>>,
    ends: RefCell<BTreeMap<(u32, u64), Times>>,
    /// Rules about links and message sizes, if there are any.
    pub(super) rules: Option<NetworkRules>,
    /// Turns of the messages of ranks' launches.
    pub(super) leads: RefCell<BTreeMap<(u32, u32), Times>>,
    shapes: RefCell<ShapePool>,
    /// Communicators under rules, by the rules in force.
    changed: RefCell<BTreeMap<(u32, u64), Arc<CommShape>>>,
    scratch: RefCell<Scratch>,
}

impl JobTrace {
    /// Replays the job and keeps its launches. Refuses jobs with more than [`MAX_LAUNCHES`], and contention, by name.
    pub fn record(graph: &Arc<Graph>, options: &ReplayOptions) -> Result<Self, SimError> {
        if options.contention != Contention::None || !options.overlap.is_none() {
            return Err(SimError::Unavailable { what: "an analysis under contention or overlap".to_owned() });
        }
        let plans: Vec<Plan> =
            (0..graph.num_templates()).map(|t| Plan::of(graph.template(TemplateId(t as u32)))).collect();
        let ranks = (0..graph.world_size()).map(Rank);
        let count: u64 = ranks.map(|rank| plans[graph.rank_template(rank).index()].launches.len() as u64).sum();
        if count > MAX_LAUNCHES {
            let what = format!("an analysis of {count} launches of communication (at most {MAX_LAUNCHES})");
            return Err(SimError::Unavailable { what });
        }
        check_events(graph)?;
        let rules = &options.perturb;
        let is_changed = |rank: Rank| rules.changes_compute(rank) || rules.constant_factor(rank).is_some();
        let is_perturbed = (0..graph.world_size()).map(Rank).any(is_changed);
        if is_perturbed && graph.num_ops() > MAX_PERTURBED_OPS {
            let what = format!("an analysis of {} perturbed ops (at most {MAX_PERTURBED_OPS})", graph.num_ops());
            return Err(SimError::Unavailable { what });
        }
        let sim_options = SimOptions {
            slow: options.slow.clone(),
            perturb: options.perturb.clone(),
            trace: is_perturbed,
            ..SimOptions::new(options.profile.clone())
        };
        let simulation = Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), sim_options);
        let mut simulation = simulation.map_err(|error| placed(error, graph, options, None))?;
        simulation.keep_launches();
        simulation.run().map_err(|error| placed(error, graph, options, Some(&simulation)))?;
        Ok(Self {
            graph: Arc::clone(graph),
            profile: options.profile.clone(),
            slow: options.slow.clone(),
            plans,
            launches: simulation.take_launches(),
            perturbed: is_perturbed.then(|| durations(graph.world_size(), simulation.take_spans())),
            slots: slots(graph),
            rules: NetworkRules::new(
                &Arc::new(options.perturb.clone()),
                World::new(graph.world_size(), &options.profile),
            ),
            leads: RefCell::default(),
            changed: RefCell::default(),
            report: simulation.report(),
            times: RefCell::default(),
            ends: RefCell::default(),
            shapes: RefCell::new(ShapePool::new(options.profile.clone())),
            scratch: RefCell::default(),
        })
    }

    pub(crate) fn plan(&self, rank: u32) -> &Plan {
        &self.plans[self.graph.rank_template(Rank(rank)).index()]
    }

    /// The rank's launches in program order.
    pub(crate) fn launches(&self, rank: u32) -> &[LaunchSpan] {
        &self.launches[rank as usize]
    }

    /// Durations of a rank's compute ops: as traced, if anything was perturbed, else from the graph.
    pub(crate) fn duration_of(&self, rank: u32) -> impl Fn(u32, SimTime) -> SimTime + use<> {
        let traced = self.perturbed.as_ref().map(|by_rank| Rc::clone(&by_rank[rank as usize]));
        let own: Durations = self.graph.rank_overrides(Rank(rank)).collect();
        let factor = self.slow.get(&Rank(rank)).copied().filter(|factor| factor.to_bits() != 1f64.to_bits());
        let fixed = if factor.is_some() { self.graph.fixed_ops(Rank(rank)) } else { BTreeSet::new() };
        let find = |among: &Durations, op: u32| {
            let at = among.binary_search_by_key(&op, |(op, _)| *op).ok()?;
            Some(among[at].1)
        };
        move |op, common| {
            if let Some(duration) = traced.as_ref().and_then(|traced| find(traced, op)) {
                return duration;
            }
            let duration = find(&own, op).unwrap_or(common);
            factor.filter(|_| !fixed.contains(&op)).map_or(duration, |factor| duration.scaled(factor))
        }
    }

    /// Are the rank's durations those of its program?
    pub(super) fn has_common_durations(&self, rank: u32) -> bool {
        let rank = Rank(rank);
        self.perturbed.is_none() && !self.slow.contains_key(&rank) && self.graph.rank_overrides(rank).next().is_none()
    }

    /// Time of every node of a rank. O(ops) unless the rank was asked for lately.
    pub(crate) fn times(&self, rank: u32) -> Result<Times, SimError> {
        if let Some(times) = self.times.borrow().get(&rank) {
            return Ok(Rc::clone(times));
        }
        let times = Rc::new(self.fresh_times(rank)?);
        let mut kept = self.times.borrow_mut();
        if kept.len() >= KEPT_RANKS {
            kept.clear();
        }
        kept.insert(rank, Rc::clone(&times));
        Ok(times)
    }

    /// As [`Self::times`], without keeping them.
    pub(crate) fn fresh_times(&self, rank: u32) -> Result<Vec<SimTime>, SimError> {
        self.plan(rank).times(self.launches(rank), self.duration_of(rank))
    }

    /// Communicator of a launch.
    pub(crate) fn comm_of(&self, rank: u32, launch: &Launch) -> u32 {
        self.graph.rank_slots(Rank(rank))[launch.slot.index()]
    }

    /// Slot of a communicator's member.
    pub(crate) fn slot(&self, comm: u32, member: u32) -> SlotId {
        self.slots[comm as usize][member as usize]
    }

    pub(crate) fn members(&self, comm: u32) -> &[u32] {
        self.graph.comm_members(CommId(comm))
    }

    /// Where member number `at` is at collective number `sequence`.
    pub(crate) fn place(&self, comm: u32, sequence: u64, at: usize) -> Place {
        let rank = self.members(comm)[at];
        let plan = self.plan(rank);
        let launch = plan.calls[self.slots[comm as usize][at].index()][sequence as usize];
        Place { rank, launch, is_first: plan.launches[launch as usize].first_call == sequence }
    }

    /// A collective as its first member calls it.
    pub(crate) fn call(&self, comm: u32, sequence: u64) -> (Call, CollectiveCall) {
        let place = self.place(comm, sequence, 0);
        let launch = &self.plan(place.rank).launches[place.launch as usize];
        let call = launch.calls[(sequence - launch.first_call) as usize];
        let bytes = call.buffer_bytes(self.members(comm).len() as u64);
        (call, CollectiveCall { kind: call.kind, bytes, root: call.root, ops: call.ops })
    }

    pub(crate) fn arrival(&self, rank: u32, launch: u32) -> SimTime {
        self.launches[rank as usize][self.plan(rank).launches[launch as usize].traced].arrival
    }

    /// When every member came to a collective.
    pub(crate) fn arrivals(&self, comm: u32, sequence: u64) -> Vec<SimTime> {
        let places = (0..self.members(comm).len()).map(|at| self.place(comm, sequence, at));
        let mut before = None;
        let arrival = |(at, place): (usize, Place)| {
            if place.is_first {
                return self.arrival(place.rank, place.launch);
            }
            before.get_or_insert_with(|| self.ends(comm, sequence - 1))[at] - self.launched(&place, comm, sequence)
        };
        places.enumerate().map(arrival).collect()
    }

    /// By how much earlier a collective that is not its launch's first begins for a member, whose kernel runs already.
    pub(crate) fn launched(&self, place: &Place, comm: u32, sequence: u64) -> SimTime {
        let launch = &self.plan(place.rank).launches[place.launch as usize];
        let call = launch.calls[(sequence - launch.first_call) as usize];
        if !call.continues {
            return SimTime::ZERO;
        }
        let shape = self.layout(comm);
        collective::launch_time(&shape, &self.call(comm, sequence).1, &mut self.scratch.borrow_mut())
    }

    /// A communicator's place on the cluster.
    pub(super) fn layout(&self, comm: u32) -> Arc<CommShape> {
        self.shapes.borrow_mut().shape(self.members(comm))
    }

    /// When every member got out of a collective.
    pub(crate) fn ends(&self, comm: u32, sequence: u64) -> Times {
        if let Some(ends) = self.ends.borrow().get(&(comm, sequence)) {
            return Rc::clone(ends);
        }
        // From the latest collective that everybody came to by itself: collectives of one launch follow each other.
        let members = self.members(comm).len();
        let is_fresh = |sequence: &u64| (0..members).all(|at| self.place(comm, *sequence, at).is_first);
        let mut number = (0..=sequence).rev().find(is_fresh).unwrap_or(0);
        let mut arrivals = self.arrivals(comm, number);
        let ends_of = |number: u64, arrivals: &[SimTime]| {
            self.completion(&self.shape_for(comm, number, arrivals), comm, number, arrivals)
        };
        let mut ends = ends_of(number, &arrivals);
        while number < sequence {
            number += 1;
            for (at, arrival) in arrivals.iter_mut().enumerate() {
                let place = self.place(comm, number, at);
                *arrival = if place.is_first {
                    self.arrival(place.rank, place.launch)
                } else {
                    ends[at] - self.launched(&place, comm, number)
                };
            }
            ends = ends_of(number, &arrivals);
        }
        let ends = Rc::new(ends);
        let mut kept = self.ends.borrow_mut();
        if kept.len() >= KEPT_CALLS {
            kept.clear();
        }
        kept.insert((comm, sequence), Rc::clone(&ends));
        ends
    }

    /// A communicator as it was at a collective that its members came to at `arrivals`.
    fn shape_for(&self, comm: u32, sequence: u64, arrivals: &[SimTime]) -> Arc<CommShape> {
        let members = self.members(comm);
        let Some(rules) = &self.rules else { return self.shapes.borrow_mut().shape(members) };
        let launches = (0..members.len()).map(|at| self.place(comm, sequence, at));
        let iteration = launches.map(|place| self.plan(place.rank).launches[place.launch as usize].iteration).max();
        let time = arrivals.iter().copied().max().unwrap_or_default();
        let in_force = rules.rules().network_state(When { iteration: iteration.unwrap_or(0), time });
        let state = if in_force == 0 { 0 } else { in_force & rules.reach(members) };
        if state == 0 {
            return self.shapes.borrow_mut().shape(members);
        }
        let mut changed = self.changed.borrow_mut();
        let shape = changed
            .entry((comm, state))
            .or_insert_with(|| Arc::new(CommShape::changed(members, &self.profile, rules.rules(), state)));
        Arc::clone(shape)
    }

    /// A communicator as it was at a collective.
    pub(crate) fn shape(&self, comm: u32, sequence: u64) -> Arc<CommShape> {
        match self.rules {
            Some(_) => self.shape_for(comm, sequence, &self.arrivals(comm, sequence)),
            None => self.shapes.borrow_mut().shape(self.members(comm)),
        }
    }

    /// Ends of a collective for any arrivals, on links as they were.
    pub(crate) fn completion(&self, shape: &CommShape, comm: u32, sequence: u64, arrivals: &[SimTime]) -> Vec<SimTime> {
        let mut ends = vec![SimTime::ZERO; arrivals.len()];
        let (_, call) = self.call(comm, sequence);
        collective::completion(shape, &call, arrivals, &mut ends, &mut self.scratch.borrow_mut());
        ends
    }

    /// What a rank's launch ended for. An error if no arrival explains the end.
    pub(crate) fn holder(&self, rank: u32, number: u32) -> Result<Holder, SimError> {
        let launch = &self.plan(rank).launches[number as usize];
        let comm = self.comm_of(rank, launch);
        let span = self.launches(rank)[launch.traced];
        for at in 0..launch.halves.len() {
            if let Some(holder) = self.message_holder(comm, (rank, number), at, span.end) {
                return Ok(holder);
            }
        }
        if !launch.calls.is_empty()
            && let Some(holder) = self.call_holder(comm, launch.last_call(), rank, span.end)
        {
            return Ok(holder);
        }
        Err(SimError::Unavailable {
            what: format!(
                "an analysis of communication that the cost model does not explain (rank {rank} op {})",
                launch.op()
            ),
        })
    }

    pub(super) fn arrive(&self, rank: u32, launch: u32) -> Moment {
        Moment { rank, node: self.plan(rank).launches[launch as usize].arrive }
    }

    /// The arrival that made a rank leave a collective at `end`; through earlier collectives of the same launch to the
    /// arrival at the launch.
    pub(super) fn call_holder(&self, comm: u32, mut sequence: u64, rank: u32, mut end: SimTime) -> Option<Holder> {
        let mut at = self.members(comm).iter().position(|member| *member == rank)?;
        loop {
            let arrivals = self.arrivals(comm, sequence);
            at = self.held_by(comm, sequence, &arrivals, at, end)?;
            let place = self.place(comm, sequence, at);
            if place.is_first {
                let arrival = self.arrive(place.rank, place.launch);
                return Some(Holder { arrival, time: arrivals[at], comm, is_message: false });
            }
            (sequence, end) = (sequence - 1, arrivals[at] + self.launched(&place, comm, sequence));
        }
    }

    /// A member whose arrival alone makes member `at` leave at `end`: the latest if it does, else found by halving the
    /// candidates. O(members x log members).
    fn held_by(&self, comm: u32, sequence: u64, arrivals: &[SimTime], at: usize, end: SimTime) -> Option<usize> {
        let mut candidates: Vec<usize> = (0..arrivals.len()).collect();
        candidates.sort_by_key(|member| std::cmp::Reverse(arrivals[*member]));
        let shape = self.shape_for(comm, sequence, arrivals);
        let explains = |among: &[usize]| {
            let mut only = vec![NEVER; arrivals.len()];
            for member in among {
                only[*member] = arrivals[*member];
            }
            self.completion(&shape, comm, sequence, &only)[at] == end
        };
        if explains(&candidates[..1]) {
            return Some(candidates[0]);
        }
        if !explains(&candidates) {
            return None;
        }
        while candidates.len() > 1 {
            let half = candidates.len().div_ceil(2);
            let later = candidates.split_off(half);
            if !explains(&candidates) {
                candidates = later;
            }
        }
        candidates.first().copied()
    }

    /// Start and end of an iteration of the job: the last rank's ends of the previous and of this one.
    pub(crate) fn window(&self, iteration: usize) -> Option<(SimTime, SimTime)> {
        let latest = |k: usize| self.report.ranks.iter().filter_map(|rank| rank.iteration_ends.get(k)).max().copied();
        if self.num_marked() == 0 {
            let end = self.report.ranks.iter().map(|rank| rank.final_time).max().unwrap_or_default();
            return (iteration == 0).then_some((SimTime::ZERO, end));
        }
        let begin = || self.report.ranks.iter().filter_map(|rank| rank.training_begin).max().unwrap_or_default();
        let start = if iteration == 0 { begin() } else { latest(iteration - 1)? };
        // Markers on different streams may come in the wrong order: such an iteration takes no time.
        let end = latest(iteration)?;
        Some((start.min(end), end))
    }

    /// Iterations with markers; none: the job counts as one.
    pub(crate) fn num_marked(&self) -> usize {
        self.report.ranks.iter().map(|rank| rank.iteration_ends.len()).max().unwrap_or(0)
    }

    /// Iterations of the job.
    #[must_use]
    pub fn num_iterations(&self) -> usize {
        self.num_marked().max(1)
    }

    /// The moment at which an iteration ends on a rank (its last moment, without markers).
    pub(crate) fn end_of(&self, rank: u32, iteration: usize) -> Result<Option<Moment>, SimError> {
        if self.num_marked() > 0 {
            let node = self.plan(rank).iteration_ends.get(iteration);
            return Ok(node.map(|node| Moment { rank, node: *node }));
        }
        let times = self.times(rank)?;
        let last = (0..times.len()).rev().max_by_key(|node| times[*node]);
        Ok(last.map(|node| Moment { rank, node: node as u32 }))
    }

    /// Compute time of a rank in a window, from its own durations.
    pub(crate) fn compute_in(&self, rank: u32, times: &[SimTime], window: (SimTime, SimTime)) -> SimTime {
        let duration = self.duration_of(rank);
        let own = self.plan(rank).nodes.iter().zip(times).filter(|(_, time)| **time > window.0 && **time <= window.1);
        own.fold(SimTime::ZERO, |sum, (node, _)| match node.kind {
            NodeKind::Compute { duration: common, class } if !class.is_fixed() => sum + duration(node.op, common),
            _ => sum,
        })
    }
}

fn durations(world_size: u32, spans: Vec<Span>) -> Vec<Rc<Durations>> {
    let mut by_rank = vec![Durations::new(); world_size as usize];
    for span in spans {
        by_rank[span.rank.index()].push((span.op, span.end - span.start));
    }
    let sorted = |mut own: Durations| {
        own.sort_unstable();
        Rc::new(own)
    };
    by_rank.into_iter().map(sorted).collect()
}

/// Slot of each member of each communicator.
fn slots(graph: &Graph) -> Vec<Vec<SlotId>> {
    let slot_of = |comm: u32, rank: u32| {
        let slot = graph.rank_slots(Rank(rank)).iter().position(|own| *own == comm);
        SlotId(slot.unwrap_or(0) as u32)
    };
    let members = (0..graph.num_comms() as u32).map(|comm| (comm, graph.comm_members(CommId(comm))));
    members.map(|(comm, members)| members.iter().map(|rank| slot_of(comm, *rank)).collect()).collect()
}
