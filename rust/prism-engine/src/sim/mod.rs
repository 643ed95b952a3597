//! Timed evaluation of a job: virtual ranks from the graph, live ranks op by op, in one deterministic simulation.
//!
//! ```text
//!  push / live_comm / ask                    take_answers / report / blocked
//!        │                                          ▲
//!        ▼            one program per template      │
//!    programs ──► roles: vectors over ranks ──► worklist to the fixed point
//!                  │ host  │ streams              ▲
//!                  └───────┴──► network: collectives and messages ─┘
//! ```
//!
//! *Actors.* The host of a rank issues ops in program order and only synchronisations hold it; a stream runs its ops in issue
//! order, each from `max(stream clock, issue time)`. A communication op occupies its stream from its arrival to its
//! completion. `program.rs` tells how an issue time is known before the op runs, `role.rs` has the vectors, `network.rs` is
//! where ranks meet.
//!
//! *One answer.* No op chooses between peers and none branches on a time, so the order of evaluation cannot change a result
//! (a Kahn network). The worklist, the order in which live ranks are fed and the splitting of roles are therefore free.
//!
//! *Symmetry.* Ranks of a role whose times have been equal so far may be evaluated as one ([`SimOptions::symmetry`],
//! `symmetry.rs`).
//!
//! *Together.* Communicators that are alike are evaluated side by side (`batch.rs`, `wiring.rs`), runs of ops that concern one role
//! alone tile by tile (`chain.rs`), and programs that differ in durations only as one (`alike.rs`). The operations on each time are
//! the same; [`SimOptions::batches`] turns all of it off.
//!
//! *Rank by rank.* Where hardly two ranks have one program, a replay does without roles (`compact/`): the same results, and
//! nothing explained.
//!
//! *Checks.* A complete result that contradicts itself is an error (`invariants.rs`).
//!
//! *Iterations of virtual ranks.* Beside live ranks, a virtual rank enters iteration `k` only when the lowest live rank has
//! passed marker `k` (`gate.rs`), and repeats its last recorded iteration for as long as the live ranks iterate.
//!
//! Cost: O(ops x roles) steps over vectors, O(ranks x (streams + events in flight + communicators)) memory.

mod alike;
mod batch;
mod blocked;
mod chain;
mod channel;
pub(crate) mod compact;
mod error;
mod evaluate;
mod gate;
mod invariants;
mod live;
mod members;
mod memo;
mod network;
mod perturbed;
mod ports;
mod program;
mod report;
mod role;
mod signature;
mod speeds;
mod step;
mod symmetry;
mod trace;
mod vector;
mod wiring;

pub use blocked::Blocked;
pub(crate) use blocked::{list, shortest_cycle};
pub use error::{Mismatch, SimError};
pub use live::{Answer, Question};
pub(crate) use report::Summary;
pub use report::{CommUse, DeviceTime, RankReport, SimReport};
pub use signature::Signature;
pub(crate) use signature::{Call, Half, fuse, starts_after};
pub use trace::{LaunchSpan, Span};

use crate::graph::Graph;
use crate::ids::{CommId, NameId, Rank, TemplateId};
use crate::perturb::{NameMask, Perturbations, World};
use crate::profile::Profile;
use alike::{Alike, alike};
use batch::Former;
use gate::Gate;
use live::LiveRank;
use members::Positions;
use network::Network;
pub(crate) use perturbed::NetworkRules;
use perturbed::Perturber;
use ports::{Lanes, Ports};
use program::Program;
pub(crate) use program::num_peers;
use role::Role;
use speeds::Speeds;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use step::Context;
use symmetry::Symmetry;
use trace::Tracer;

/// Slowest a rank may be made.
const MAX_SLOW_FACTOR: f64 = 1e6;
/// Instead of a role: the rank is absent.
const NOWHERE: u32 = u32::MAX;

/// Who the ranks are that do not run.
#[derive(Clone)]
pub enum Peers {
    /// Virtual ranks, replayed from the graph.
    Graph(Arc<Graph>),
    /// Nobody (while collecting): a peer that does not run arrives exactly when the running rank does; of several running
    /// ranks, when the last does.
    Absent,
}

/// How to simulate.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Costs of communication.
    pub profile: Profile,
    /// Slow-down of a rank's compute ops (1.3 = 30 % longer).
    pub slow: BTreeMap<Rank, f64>,
    /// Changes to the job.
    pub perturb: Perturbations,
    /// Ranks whose ops are pushed instead of replayed.
    pub live: Vec<Rank>,
    /// Keep the span of every op (memory grows with every op).
    pub trace: bool,
    /// Evaluate together communicators that are alike, and ranks whose programs differ in durations only. Has no effect on
    /// results but for their speed.
    pub batches: bool,
    /// Evaluate ranks that have had the same times so far as one. Has no effect on times; without it, and beside live ranks,
    /// with a trace, or where hardly any ranks are alike, every rank is evaluated. Errors are not explained with it.
    pub symmetry: bool,
}

impl SimOptions {
    /// All ranks virtual, at full speed.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let (slow, perturb) = (BTreeMap::new(), Perturbations::default());
        Self { profile, slow, perturb, live: Vec::new(), trace: false, batches: true, symmetry: false }
    }
}

/// Where the state of a rank is.
#[derive(Clone, Copy, Debug)]
struct Place {
    role: u32,
    at: u32,
}

/// See the module's documentation.
pub struct Simulation {
    graph: Option<Arc<Graph>>,
    world_size: u32,
    programs: Vec<Program>,
    roles: Vec<Role>,
    places: Vec<Place>,
    network: Network,
    queue: VecDeque<u32>,
    is_queued: Vec<bool>,
    live: BTreeMap<Rank, LiveRank>,
    gate: Gate,
    /// Slow-downs by rank; 1 beyond the end.
    slow: Vec<f64>,
    perturber: Perturber,
    tracer: Tracer,
    answers: Vec<(Rank, u64, Answer)>,
    failure: Option<SimError>,
    /// Roles of whose ranks some have come further than others since the last look.
    uneven: BTreeSet<u32>,
    /// Only when ranks are evaluated in lanes.
    symmetry: Option<Box<Symmetry>>,
}

impl Simulation {
    /// A simulation of `world_size` ranks; nothing runs before [`Self::run`].
    pub fn new(peers: Peers, world_size: u32, options: SimOptions) -> Result<Self, SimError> {
        let graph = match peers {
            Peers::Graph(graph) => Some(graph),
            Peers::Absent => None,
        };
        let mut options = options;
        add_constant_factors(world_size, &mut options.slow, &options.perturb);
        check_options(graph.as_deref(), world_size, &options)?;
        let mut slow = Vec::new();
        if let Some((last, _)) = options.slow.last_key_value() {
            slow.resize(last.index() + 1, 1.0);
            options.slow.iter().for_each(|(rank, factor)| slow[rank.index()] = *factor);
        }
        let rules = Arc::new(options.perturb);
        let keeps_symmetry = rules.keeps_symmetry();
        let network_rules = NetworkRules::new(&rules, World::new(world_size, &options.profile));
        let mut simulation = Self {
            world_size,
            programs: Vec::new(),
            roles: Vec::new(),
            places: vec![Place { role: NOWHERE, at: 0 }; world_size as usize],
            network: Network::new(options.profile, network_rules, options.batches),
            queue: VecDeque::new(),
            is_queued: Vec::new(),
            live: BTreeMap::new(),
            gate: Gate::default(),
            slow,
            perturber: Perturber::new(rules),
            tracer: Tracer::new(options.trace),
            answers: Vec::new(),
            failure: None,
            uneven: BTreeSet::new(),
            symmetry: None,
            graph,
        };
        if let Some(graph) = simulation.graph.clone() {
            simulation.gate = Gate::new(&graph, &options.live)?;
            let may_share = options.symmetry && options.live.is_empty() && !options.trace && keeps_symmetry;
            if !may_share || !simulation.add_lanes(&graph)? {
                simulation.add_virtual_ranks(&graph, &options.live)?;
            }
        }
        for rank in options.live {
            simulation.add_live_rank(rank);
        }
        Ok(simulation)
    }

    fn add_virtual_ranks(&mut self, graph: &Arc<Graph>, live: &[Rank]) -> Result<(), SimError> {
        let mut ranks_of: Vec<Vec<u32>> = vec![Vec::new(); graph.num_templates()];
        for rank in (0..self.world_size).filter(|rank| !live.contains(&Rank(*rank))) {
            ranks_of[graph.rank_template(Rank(rank)).index()].push(rank);
        }
        let names = Arc::new(self.name_masks(graph));
        let mut parties: Vec<(TemplateId, Vec<u32>)> = Vec::new();
        let stretch = self.slow.iter().copied().fold(1.0, f64::max);
        for Alike { template, ranks } in alike(graph, ranks_of, stretch, !self.network.is_apart()) {
            // Ranks that die have a program and a role of their own.
            let (dying, others): (Vec<u32>, Vec<u32>) = ranks.into_iter().partition(|rank| self.is_mortal(*rank));
            let others = if others.is_empty() { Vec::new() } else { vec![others] };
            for ranks in dying.into_iter().map(|rank| vec![rank]).chain(others) {
                let mut program = Program::new(self.stretch(&ranks));
                program.set_names(Arc::clone(&names));
                if let Some(count) = self.perturber.rules().deaths(Rank(ranks[0])).1 {
                    program.die_after(count);
                }
                self.gate.add_program(graph, template, self.programs.len(), &mut program)?;
                self.programs.push(program);
                parties.push((template, ranks));
            }
        }
        self.add_parties(graph, parties)
    }

    /// Adds the communicators, and a role for each set of ranks, which have the programs in order.
    fn add_parties(&mut self, graph: &Arc<Graph>, mut parties: Vec<(TemplateId, Vec<u32>)>) -> Result<(), SimError> {
        for (role, (_, ranks)) in parties.iter().enumerate() {
            self.note_places(role as u32, ranks);
        }
        let mut former = Former::new(self.network.profile(), &self.places, self.network.is_apart());
        let positions = Positions::new(graph, |comm, rank, slot| former.visit(comm, rank, slot));
        let mut formed = former.finish();
        let private = formed.private();
        for (role, (_, ranks)) in parties.iter_mut().enumerate() {
            let slots = self.programs[role].slots_by_use();
            let batches = slots.iter().filter_map(|slot| private.get(&(role as u32, *slot)).copied());
            formed.order(graph, batches, ranks);
            self.note_places(role as u32, ranks);
        }
        formed.sort_columns(graph, &self.places);
        self.network.use_graph(graph);
        for comms in formed.batches {
            let size = graph.comm_members(CommId(comms[0])).len();
            self.network.add_batch(comms, size);
        }
        for (program, (template, ranks)) in parties.into_iter().enumerate() {
            let speeds = Speeds::of(graph, &ranks, |rank| self.factor(rank))?;
            let id = self.insert_role(Role::new(program, ranks, Lanes::default(), speeds));
            for slot in 0..graph.template(template).num_slots() as usize {
                let ranks = &self.roles[id as usize].ranks;
                let addresses = self.addresses(graph, ranks, slot, &positions);
                let context = (&self.programs[program], &mut self.network);
                self.roles[id as usize].add_slot(&addresses, Ports::default(), context);
            }
        }
        Ok(())
    }

    fn note_places(&mut self, role: u32, ranks: &[u32]) {
        for (at, rank) in (0..).zip(ranks) {
            self.places[*rank as usize] = Place { role, at };
        }
    }

    fn is_mortal(&self, rank: u32) -> bool {
        self.perturber.rules().deaths(Rank(rank)) != (None, None)
    }

    /// Which name filters the names of a graph fit.
    fn name_masks(&self, graph: &Graph) -> Vec<NameMask> {
        let rules = self.perturber.rules();
        if !rules.has_name_filters() {
            return Vec::new();
        }
        (0..graph.num_names()).map(|name| rules.name_mask(graph.name(NameId(name as u32)))).collect()
    }

    /// Largest slow-down of some ranks.
    fn stretch(&self, ranks: &[u32]) -> f64 {
        ranks.iter().fold(1.0, |most, rank| most.max(self.factor(*rank)))
    }

    /// Slow-down of a rank.
    fn factor(&self, rank: u32) -> f64 {
        self.slow.get(rank as usize).copied().unwrap_or(1.0)
    }

    fn insert_role(&mut self, mut role: Role) -> u32 {
        let id = self.roles.len() as u32;
        role.id = id;
        self.note_places(id, &role.ranks);
        self.roles.push(role);
        self.perturb_role(id);
        self.is_queued.push(false);
        self.enqueue(id);
        id
    }

    /// Finds out which lanes of a role are perturbed.
    fn perturb_role(&mut self, id: u32) {
        let role = &mut self.roles[id as usize];
        role.touched = self.perturber.touched(&role.ranks, &role.lanes);
        if let [rank] = role.ranks[..] {
            role.death = self.perturber.rules().deaths(Rank(rank)).0;
        }
    }

    fn enqueue(&mut self, role: u32) {
        if !std::mem::replace(&mut self.is_queued[role as usize], true) {
            self.queue.push_back(role);
        }
    }

    /// Evaluates everything that can be. An error is final; without live ranks, so is the result.
    pub fn run(&mut self) -> Result<(), SimError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let result = self.run_to_fixed_point();
        if let Err(error) = &result {
            self.failure = Some(error.clone());
        }
        result
    }

    fn run_to_fixed_point(&mut self) -> Result<(), SimError> {
        loop {
            self.run_queue();
            let has_entered = self.pass_gates()?;
            if !has_entered && !self.split_stuck_roles() {
                break;
            }
        }
        self.answer_questions();
        if let Some(failure) = self.perturber.failure() {
            return Err(failure);
        }
        if self.symmetry.is_some() {
            let is_right = self.network.mismatched.is_none() && self.network.broken.is_empty() && self.is_finished();
            return if is_right {
                self.check_invariants()
            } else {
                Err(SimError::invalid("the ranks do not get through"))
            };
        }
        if let Some(mismatch) = self.find_mismatch() {
            return Err(mismatch);
        }
        if self.live.is_empty() && !self.is_finished() {
            return Err(SimError::Deadlock { waiting: self.blocked() });
        }
        let is_over = self.live.values().all(LiveRank::has_ended) && self.is_finished();
        if is_over { self.check_invariants() } else { Ok(()) }
    }

    fn is_finished(&self) -> bool {
        self.roles.iter().all(|role| role.is_finished(&self.programs[role.program]) || self.has_role_died(role))
    }

    fn run_queue(&mut self) {
        while let Some(id) = self.queue.pop_front() {
            self.is_queued[id as usize] = false;
            let role = &mut self.roles[id as usize];
            let program = &self.programs[role.program];
            let (network, tracer, perturber) = (&mut self.network, &mut self.tracer, &mut self.perturber);
            role.step(&mut Context { program, network, tracer, perturber });
            self.deliver();
        }
    }

    /// Tells the roles what the network completed.
    fn deliver(&mut self) {
        loop {
            if let Some(part) = self.network.done.pop() {
                let is_ready =
                    self.with_role(part.role, |role, context| role.calls_done(part.slot as usize, part.count, context));
                self.note_progress(part.role, is_ready);
            } else if let Some(mut landed) = self.network.landed.pop() {
                let role = self.places[landed.rank as usize].role;
                let is_ready = self.with_role(role, |role, context| role.message_done(&mut landed, context));
                self.network.give_row(landed.ends);
                self.note_progress(role, is_ready);
            } else if let Some(request) = self.network.requests.pop() {
                self.serve(request);
            } else {
                return;
            }
        }
    }

    fn note_progress(&mut self, role: u32, is_ready: bool) {
        if is_ready {
            self.enqueue(role);
        } else if self.roles[role as usize].ranks.len() > 1 {
            self.uneven.insert(role);
        }
    }

    fn with_role<T>(&mut self, id: u32, f: impl FnOnce(&mut Role, &mut Context<'_>) -> T) -> T {
        let role = &mut self.roles[id as usize];
        let program = &self.programs[role.program];
        let (network, tracer, perturber) = (&mut self.network, &mut self.tracer, &mut self.perturber);
        f(role, &mut Context { program, network, tracer, perturber })
    }

    /// Nothing moves: a role whose ranks could go on in part is split. True if one was.
    fn split_stuck_roles(&mut self) -> bool {
        let mut has_split = false;
        for id in std::mem::take(&mut self.uneven) {
            let role = &self.roles[id as usize];
            let is_mixed = |ready: &Vec<bool>| ready.contains(&true) && ready.contains(&false);
            let ready = (0..role.slots.len()).map(|slot| role.ready(slot, &self.network));
            if let Some((slot, ready)) = ready.enumerate().find(|(_, ready)| is_mixed(ready)) {
                let ready = if role.lanes.is_each() { ready } else { self.split_lanes_by_readiness(id, slot, &ready) };
                self.split(id, &ready);
                has_split = true;
            }
        }
        has_split
    }

    fn split(&mut self, id: u32, ready: &[bool]) {
        self.roles[id as usize].unwire(&mut self.network);
        let other = self.roles[id as usize].split(ready);
        for (at, rank) in self.roles[id as usize].ranks.iter().enumerate() {
            self.places[*rank as usize].at = at as u32;
        }
        self.perturb_role(id);
        let new_id = self.insert_role(other);
        for role in [id, new_id] {
            self.note_lanes(role);
        }
        self.rejoin([id, new_id]);
        // Either half may be uneven at another slot.
        self.uneven.extend([id, new_id]);
        for role in [id, new_id] {
            for slot in 0..self.roles[role as usize].slots.len() {
                self.with_role(role, |role, context| role.go_on(slot, context));
            }
            self.enqueue(role);
        }
        self.deliver();
    }

    /// Keeps when every rank came to and left every launch of communication: 24 bytes each. To be called before the run, and
    /// only where every rank is evaluated ([`SimOptions::symmetry`]).
    pub(crate) fn keep_launches(&mut self) {
        assert!(self.symmetry.is_none(), "launches are kept rank by rank");
        self.tracer.keep_launches(self.world_size);
    }

    /// The launches of every rank in program order, if [`Self::keep_launches`] was called.
    pub(crate) fn take_launches(&mut self) -> Vec<Vec<LaunchSpan>> {
        self.tracer.take_launches()
    }

    /// Sets of ranks that were evaluated as one and have had the same times in everything.
    pub(crate) fn num_classes(&self) -> usize {
        self.roles.iter().map(Role::len).sum()
    }

    /// Is the rank dead?
    pub fn is_dead(&self, rank: Rank) -> bool {
        let place = self.places[rank.index()];
        self.roles.get(place.role as usize).is_some_and(|role| self.has_role_died(role))
    }

    fn has_role_died(&self, role: &Role) -> bool {
        let program = &self.programs[role.program];
        let is_found = |rules: &NetworkRules| role.ranks.iter().all(|rank| rules.found_dead.contains(rank));
        role.has_died
            || (program.is_cut() && role.is_drained(program))
            || self.network.rules.as_ref().is_some_and(is_found)
    }

    /// From now on, keeps spans of a rank that runs for real; [`Self::take_spans`] has them.
    pub fn follow(&mut self, rank: Rank) {
        if self.live.contains_key(&rank) {
            self.tracer.follow(rank.0);
        }
    }

    /// Keeps no spans of the rank any more. What has been kept is to be taken first.
    pub fn leave(&mut self, rank: Rank) {
        self.tracer.leave(rank.0);
    }

    /// The spans since the last call, if [`SimOptions::trace`] is set or ranks are followed; ordered by rank, stream, op and time.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.tracer.take()
    }
}

/// Slow-downs that never change are slow-downs.
pub(crate) fn add_constant_factors(world_size: u32, slow: &mut BTreeMap<Rank, f64>, perturb: &Perturbations) {
    if perturb.is_empty() {
        return;
    }
    for rank in (0..world_size).map(Rank) {
        if let Some(factor) = perturb.constant_factor(rank) {
            *slow.entry(rank).or_insert(1.0) *= factor;
        }
    }
}

/// May a rank be made slower by this factor?
fn is_factor(factor: f64) -> bool {
    factor > 0.0 && factor <= MAX_SLOW_FACTOR
}

fn check_options(graph: Option<&Graph>, world_size: u32, options: &SimOptions) -> Result<(), SimError> {
    if let Some(graph) = graph.filter(|graph| graph.world_size() != world_size) {
        let have = graph.world_size();
        return Err(SimError::invalid(format!("the graph has {have} ranks, the simulation {world_size}")));
    }
    if graph.is_none() && options.live.is_empty() {
        return Err(SimError::invalid("neither a graph nor a running rank: nothing to simulate"));
    }
    if let Some(rank) = options.live.iter().chain(options.slow.keys()).find(|rank| rank.0 >= world_size) {
        return Err(SimError::invalid(format!("rank {rank} does not exist: the world has {world_size} ranks")));
    }
    let mut live = options.live.clone();
    live.sort_unstable();
    if let Some([rank, ..]) = live.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(SimError::invalid(format!("rank {rank} is to run twice")));
    }
    if let Some((rank, factor)) = options.slow.iter().find(|(_, factor)| !is_factor(**factor)) {
        let message = format!("slow-down of rank {rank} is {factor}: it must be above 0 and at most {MAX_SLOW_FACTOR}");
        return Err(SimError::invalid(message));
    }
    Ok(())
}
