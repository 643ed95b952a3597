//! Ranks that cannot be told apart are evaluated once.
//!
//! Ranks of one template with the same speed and the same own durations start as one *lane* of their role. Communicators
//! whose members stand on the cluster in the same way and are, place by place, of the same lanes start as one *kind*: one of
//! them is evaluated for all. This holds as long as nothing differs:
//!
//! * a launch ends at different times for ranks of a lane (they are not at the same place of a ring with a late member, say):
//!   the lane is split by these times, and every vector of the role grows by copies;
//! * a role whose lanes were split posts on a slot: kinds whose communicators are no longer alike, place by place, are
//!   split; the new kind's communicator starts as a copy of the old one's, with everything under way.
//!
//! So the partition is as coarse as the times allow *so far*, not as the whole program would need: one slow rank splits its
//! tensor-parallel group, then the ranks that receive from it, and its data-parallel groups only when these meet.
//! Two ranks of a lane have the same state because they had the same past, and two communicators of a kind likewise: times
//! are those of an evaluation rank by rank, to the picosecond. Errors are not told from here: who wants one explained
//! evaluates rank by rank.

use super::Simulation;
use super::members::Positions;
use super::network::Request;
use super::ports::{Lanes, Ports};
use super::program::Program;
use super::role::Role;
use super::speeds::Speeds;
use super::wiring::Address;
use super::{Place, SimError};
use crate::cost::comm::node_of;
use crate::graph::Graph;
use crate::ids::{CommId, Rank, TemplateId};
use crate::profile::Profile;
use crate::units::SimTime;
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// With fewer ranks per lane there is not enough to save.
const LEAST_RANKS_PER_LANE: usize = 2;

/// Communicators evaluated as one; the kind's number is that of its communicator in the network.
#[derive(Debug)]
struct Kind {
    /// Communicators of the graph; the first is the one that is evaluated.
    comms: Vec<u32>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Symmetry {
    graph: Arc<Graph>,
    /// By communicator, where its members begin in `slots` and `spread`.
    first_member: Vec<usize>,
    /// By member: the slot in which it has the communicator.
    slots: Vec<u32>,
    /// By member: its node, numbered in order of first appearance in the communicator.
    spread: Vec<u32>,
    positions: Positions,
    /// By communicator.
    kind_of: Vec<u32>,
    kinds: Vec<Kind>,
    /// Role and lane by rank.
    lanes: Vec<(u32, u32)>,
    /// By place of the network's tables.
    table: Vec<SimTime>,
}

impl Symmetry {
    fn new(graph: &Arc<Graph>, profile: &Profile) -> Self {
        let num_ranks = graph.world_size();
        let (mut slots, mut spread) = (Vec::new(), Vec::new());
        // By node: the communicator in which it was met last, and its number there.
        let mut nodes = vec![(u32::MAX, 0); (num_ranks / profile.node.gpus) as usize + 1];
        let (mut open, mut num_nodes) = (u32::MAX, 0);
        let positions = Positions::new(graph, |comm, rank, slot| {
            if std::mem::replace(&mut open, comm) != comm {
                num_nodes = 0;
            }
            let node = &mut nodes[node_of(profile, rank) as usize];
            if node.0 != comm {
                *node = (comm, num_nodes);
                num_nodes += 1;
            }
            slots.push(slot);
            spread.push(node.1);
        });
        let mut first_member = vec![0];
        for comm in 0..graph.num_comms() {
            first_member.push(first_member[comm] + graph.comm_members(CommId(comm as u32)).len());
        }
        Self {
            graph: Arc::clone(graph),
            first_member,
            slots,
            spread,
            positions,
            kind_of: vec![0; graph.num_comms()],
            kinds: Vec::new(),
            lanes: vec![(0, 0); num_ranks as usize],
            table: Vec::new(),
        }
    }

    fn members(&self, comm: u32) -> &[u32] {
        self.graph.comm_members(CommId(comm))
    }

    /// Lanes of a communicator's members, in order.
    fn word(&self, comm: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.members(comm).iter().map(|rank| self.lanes[*rank as usize])
    }

    /// Are two communicators alike in everything that does not change?
    fn is_congruent(&self, a: u32, b: u32) -> bool {
        let members = |comm: u32| self.first_member[comm as usize]..self.first_member[comm as usize + 1];
        let (a, b) = (members(a), members(b));
        self.slots[a.clone()] == self.slots[b.clone()] && self.spread[a] == self.spread[b]
    }

    /// Divides communicators into those with equal words (and congruent, if asked), in order of their first.
    fn divide(&self, comms: &[u32], is_asked: bool) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = Vec::new();
        let mut found: FxHashMap<u64, Vec<usize>> = FxHashMap::default();
        let is_alike = |a: u32, b: u32| self.word(a).eq(self.word(b)) && (!is_asked || self.is_congruent(a, b));
        for comm in comms {
            // Most are like the first.
            if groups.first().is_some_and(|group| is_alike(group[0], *comm)) {
                groups[0].push(*comm);
                continue;
            }
            let mut hasher = FxHasher::default();
            self.word(*comm).for_each(|lane| lane.hash(&mut hasher));
            let candidates = found.entry(hasher.finish()).or_default();
            if let Some(known) = candidates.iter().find(|group| is_alike(groups[**group][0], *comm)) {
                groups[*known].push(*comm);
            } else {
                candidates.push(groups.len());
                groups.push(vec![*comm]);
            }
        }
        groups
    }

    /// Place in the network's tables that stands for a rank's in a slot.
    fn position(&self, rank: u32, slot: usize) -> (u32, u32) {
        let comm = self.graph.rank_slots(Rank(rank))[slot];
        (self.kind_of[comm as usize], self.positions.of(rank, slot))
    }
}

/// A member of a communicator that is evaluated.
#[derive(Clone, Copy)]
struct NewPort {
    /// Index in its role.
    at: u32,
    rank: u32,
    kind: u32,
    position: u32,
}

/// What makes compute of a rank differ from that of others of its template.
type Own = (u64, Vec<(usize, u64)>, Vec<(u32, SimTime)>);

impl Simulation {
    /// Adds all ranks, virtual, in lanes. False: there is nothing to save, and nothing was added.
    pub(super) fn add_lanes(&mut self, graph: &Arc<Graph>) -> Result<bool, SimError> {
        let mut ranks_of: Vec<Vec<u32>> = vec![Vec::new(); graph.num_templates()];
        (0..self.world_size).for_each(|rank| ranks_of[graph.rank_template(Rank(rank)).index()].push(rank));
        let mut left = self.world_size as usize / LEAST_RANKS_PER_LANE;
        let mut lanes = Vec::new();
        for ranks in &ranks_of {
            let Some(own) = self.lanes_of(graph, ranks, left) else { return Ok(false) };
            left -= own.1.len();
            lanes.push(own);
        }
        let mut symmetry = Symmetry::new(graph, self.network.profile());
        let names = Arc::new(self.name_masks(graph));
        for (template, (ranks, (lanes, firsts))) in ranks_of.into_iter().zip(lanes).enumerate() {
            if ranks.is_empty() {
                continue;
            }
            let mut program = Program::new(self.stretch(&ranks));
            program.set_names(Arc::clone(&names));
            self.gate.add_program(graph, TemplateId(template as u32), self.programs.len(), &mut program)?;
            self.programs.push(program);
            let speeds = Speeds::of(graph, &firsts, |rank| self.factor(rank))?;
            let role = self.insert_role(Role::new(self.programs.len() - 1, ranks, lanes, speeds));
            symmetry.note_lanes(&self.roles[role as usize]);
        }
        let all: Vec<u32> = (0..graph.num_comms() as u32).collect();
        for comms in symmetry.divide(&all, true) {
            let kind = self.network.add_comm(symmetry.members(comms[0]).into(), None);
            for comm in &comms {
                symmetry.kind_of[*comm as usize] = kind;
            }
            symmetry.kinds.push(Kind { comms });
        }
        self.add_all_ports(&symmetry);
        self.symmetry = Some(Box::new(symmetry));
        Ok(true)
    }

    /// Lanes of a template's ranks, and the first rank of each; `None` if there are more than so many.
    fn lanes_of(&self, graph: &Graph, ranks: &[u32], most: usize) -> Option<(Lanes, Vec<u32>)> {
        let mut known: FxHashMap<Own, u32> = FxHashMap::default();
        // Of ranks that differ in nothing but their speed.
        let mut by_factor: FxHashMap<u64, u32> = FxHashMap::default();
        let (mut firsts, mut of) = (Vec::new(), Vec::with_capacity(ranks.len()));
        for rank in ranks {
            let factor = self.factor(*rank).to_bits();
            let changes = self.perturber.rules().touches(Rank(*rank));
            let mut overrides = graph.rank_overrides(Rank(*rank)).peekable();
            let new_lane = || {
                firsts.push(*rank);
                firsts.len() as u32 - 1
            };
            of.push(if changes.is_empty() && overrides.peek().is_none() {
                *by_factor.entry(factor).or_insert_with(new_lane)
            } else {
                *known.entry((factor, changes, overrides.collect())).or_insert_with(new_lane)
            });
            if firsts.len() > most {
                return None;
            }
        }
        Some((Lanes::new(of), firsts))
    }

    /// Gives every role its slots: ports for the members of the communicators that are evaluated.
    fn add_all_ports(&mut self, symmetry: &Symmetry) {
        // By role and slot.
        let mut found: Vec<Vec<Vec<NewPort>>> = Vec::new();
        for role in &self.roles {
            let template = symmetry.graph.rank_template(Rank(role.ranks[0]));
            found.push(vec![Vec::new(); symmetry.graph.template(template).num_slots() as usize]);
        }
        for (kind, comms) in symmetry.kinds.iter().enumerate() {
            let slots = &symmetry.slots[symmetry.first_member[comms.comms[0] as usize]..];
            let members = symmetry.members(comms.comms[0]).iter().zip(slots);
            for (position, (rank, slot)) in members.enumerate() {
                let Place { role, at } = self.places[*rank as usize];
                if let Some(ports) = found[role as usize].get_mut(*slot as usize) {
                    ports.push(NewPort { at, rank: *rank, kind: kind as u32, position: position as u32 });
                }
            }
        }
        for (role, slots) in self.roles.iter_mut().zip(found) {
            for found in slots {
                let ranks: Vec<(u32, u32)> = found.iter().map(|port| (port.at, port.rank)).collect();
                let address = |port: &NewPort| Address { batch: port.kind, position: port.position, column: 0 };
                let addresses: Vec<Address> = found.iter().map(address).collect();
                let ports = Ports::new(&ranks, role.ranks.len(), &role.lanes);
                let context = (&self.programs[role.program], &mut self.network);
                role.add_slot(&addresses, ports, context);
            }
        }
    }

    /// Tells lanes or kinds apart so that a role can go on.
    pub(super) fn serve(&mut self, request: Request) {
        match request {
            Request::Post { role, slot } => {
                self.split_kinds(role, slot as usize);
                self.with_role(role, |role, context| role.post_next(slot as usize, context));
            }
            Request::End { role, slot } => {
                let slot = slot as usize;
                // May have been served already.
                let Some((group, launch)) = self.roles[role as usize].ending(slot) else { return };
                let state = &mut self.roles[role as usize].groups.get_mut(&group).expect("active").launches;
                let ends = std::mem::take(&mut state[launch as usize].ends);
                self.note_load(role, slot, (group, launch), &ends);
                let ends = self.split_lanes(role, slot, &ends);
                self.with_role(role, |role, context| {
                    role.groups.get_mut(&group).expect("active").launches[launch as usize].ends = ends;
                    role.end_launch(slot, (group, launch), context);
                });
            }
        }
        self.enqueue(match request {
            Request::Post { role, .. } | Request::End { role, .. } => role,
        });
    }

    /// Counts the time from arrival to end of the ports of a launch.
    fn note_load(&mut self, role: u32, slot: usize, (group, launch): (u32, u32), ends: &[SimTime]) {
        let role = &mut self.roles[role as usize];
        let arrival = &role.groups[&group].launches[launch as usize].arrival;
        let slot = &mut role.slots[slot];
        slot.load.busy += slot.ports.total(ends, arrival);
    }

    /// Splits lanes by what ranks have in a slot: `values` by port. Returns the values by lane.
    fn split_lanes(&mut self, id: u32, slot: usize, values: &[SimTime]) -> Vec<SimTime> {
        let symmetry = self.symmetry.as_mut().expect("only lanes are split");
        let role = &mut self.roles[id as usize];
        symmetry.table.resize(self.network.ends().len(), SimTime::ZERO);
        role.slots[slot].wiring.put(values, &mut symmetry.table);
        let mut by_lane: Vec<Option<SimTime>> = vec![None; role.len()];
        let mut origins = Vec::new();
        let mut others: FxHashMap<(u32, SimTime), u32> = FxHashMap::default();
        for (at, rank) in role.ranks.iter().enumerate() {
            let (kind, position) = symmetry.position(*rank, slot);
            let value = symmetry.table[self.network.row(kind, position).0 as usize];
            let lane = role.lanes.of(at);
            match by_lane[lane as usize] {
                None => by_lane[lane as usize] = Some(value),
                Some(first) if first == value => {}
                Some(_) => {
                    let new = *others.entry((lane, value)).or_insert_with(|| {
                        origins.push(lane);
                        by_lane.push(Some(value));
                        by_lane.len() as u32 - 1
                    });
                    role.lanes.reassign(at, new);
                }
            }
        }
        if !origins.is_empty() {
            role.grow(&origins);
            symmetry.note_lanes(role);
            self.perturb_role(id);
        }
        by_lane.into_iter().map(|value| value.expect("a lane has a rank")).collect()
    }

    /// Splits the kinds of a slot's communicators that are no longer alike; then every lane has a port there.
    fn split_kinds(&mut self, id: u32, slot: usize) {
        if !self.roles[id as usize].slots[slot].ports.is_stale(&self.roles[id as usize].lanes) {
            return;
        }
        let kinds: Vec<u32> = self.roles[id as usize].slots[slot].wiring.parts.iter().map(|(kind, _)| *kind).collect();
        for kind in kinds {
            self.split_kind(kind);
        }
        let role = &mut self.roles[id as usize];
        role.slots[slot].ports.refresh(&role.lanes);
    }

    fn split_kind(&mut self, kind: u32) {
        let Some(mut symmetry) = self.symmetry.take() else { return };
        let comms = &symmetry.kinds[kind as usize].comms;
        if comms.len() > 1 {
            let mut groups = symmetry.divide(comms, false).into_iter();
            symmetry.kinds[kind as usize].comms = groups.next().expect("not empty");
            for comms in groups {
                let new = self.fork(&symmetry, kind, comms[0]);
                for comm in &comms {
                    symmetry.kind_of[*comm as usize] = new;
                }
                symmetry.kinds.push(Kind { comms });
            }
        }
        self.symmetry = Some(symmetry);
    }

    /// A communicator of the graph is evaluated by itself from now on.
    fn fork(&mut self, symmetry: &Symmetry, kind: u32, comm: u32) -> u32 {
        let members = symmetry.members(comm);
        let new = self.network.fork_comm(kind, members.into());
        let like = symmetry.members(symmetry.kinds[kind as usize].comms[0]);
        let slots = &symmetry.slots[symmetry.first_member[comm as usize]..];
        let mut roles = Vec::new();
        for (position, ((rank, like), slot)) in members.iter().zip(like).zip(slots).enumerate() {
            let (Place { role, at }, from) = (self.places[*rank as usize], self.places[*like as usize]);
            let state = &mut self.roles[role as usize];
            if (*slot as usize) < state.slots.len() {
                let (slot, member) = (*slot as usize, (new, position as u32));
                state.fork_port(slot, (from.at, at), member, &mut self.network);
                roles.push(role);
            }
        }
        roles.sort_unstable();
        roles.dedup();
        for role in roles {
            self.roles[role as usize].recount(&self.network);
        }
        new
    }

    /// Some ports of a slot could go on and some could not: lanes are split until each could or could not. Marks of lanes.
    pub(super) fn split_lanes_by_readiness(&mut self, id: u32, slot: usize, ready: &[bool]) -> Vec<bool> {
        let values: Vec<SimTime> = ready.iter().map(|ready| SimTime(i64::from(*ready))).collect();
        let by_lane = self.split_lanes(id, slot, &values);
        for slot in 0..self.roles[id as usize].slots.len() {
            self.split_kinds(id, slot);
        }
        by_lane.into_iter().map(|ready| ready == SimTime(1)).collect()
    }

    /// A role's lanes have new numbers.
    pub(super) fn note_lanes(&mut self, id: u32) {
        if let Some(symmetry) = &mut self.symmetry {
            symmetry.note_lanes(&self.roles[id as usize]);
        }
    }
}

impl Symmetry {
    fn note_lanes(&mut self, role: &Role) {
        for (at, rank) in role.ranks.iter().enumerate() {
            self.lanes[*rank as usize] = (role.id, role.lanes.of(at));
        }
    }
}
