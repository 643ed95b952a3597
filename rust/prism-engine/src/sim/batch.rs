//! Communicators that are alike are evaluated together, side by side.
//!
//! Two communicators of equal size are *alike* if, place by place, their members are of the same roles and have them in the same
//! slots, and are spread over nodes in the same way. A role posts a slot for all its ranks at once, so communicators that are
//! alike are complete at the same moment of the evaluation: putting them in one *batch* delays nothing, and one walk over
//! its members serves all of them ([`crate::collective::batch_completion`]).
//!
//! Ranks are put in order inside their role so that the batch of the slot used most is in the order of its table: it then needs
//! no copies. A role that is split divides its batches.

use super::members::Positions;
use super::wiring::Address;
use super::{NOWHERE, Place, Simulation};
use crate::cost::comm::node_of;
use crate::graph::Graph;
use crate::ids::{CommId, Rank};
use crate::profile::Profile;
use rustc_hash::{FxHashMap, FxHasher};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

/// What must be equal of two members: role, slot, and the node by order of first appearance in the communicator.
type Letter = (u32, u32, u32);

/// Finds out which communicators are alike while they are passed over once.
pub(super) struct Former<'a> {
    profile: &'a Profile,
    places: &'a [Place],
    /// By node: the communicator in which it was met last, and its number there.
    nodes: Vec<(u32, u32)>,
    num_nodes: u32,
    open: u32,
    word: Vec<Letter>,
    /// Only if no communicator may share a batch.
    is_apart: bool,
    found: FxHashMap<u64, Vec<u32>>,
    /// By batch: its communicators, and the word of all of them.
    batches: Vec<Vec<u32>>,
    words: Vec<Vec<Letter>>,
    latest: usize,
}

/// Batches, each with its communicators.
pub(super) struct Formed {
    pub(super) batches: Vec<Vec<u32>>,
    words: Vec<Vec<Letter>>,
}

impl<'a> Former<'a> {
    /// `places` must have the role of every rank. Communicators with a rank that has none are alone in their batches.
    pub(super) fn new(profile: &'a Profile, places: &'a [Place], is_apart: bool) -> Self {
        Self {
            profile,
            places,
            nodes: vec![(NOWHERE, 0); places.len() / profile.node.gpus.max(1) as usize + 1],
            num_nodes: 0,
            open: NOWHERE,
            word: Vec::new(),
            is_apart,
            found: FxHashMap::default(),
            batches: Vec::new(),
            words: Vec::new(),
            latest: 0,
        }
    }

    /// The next member of a communicator, which follow each other.
    pub(super) fn visit(&mut self, comm: u32, rank: u32, slot: u32) {
        if self.open != comm {
            self.close();
            self.open = comm;
            self.num_nodes = 0;
        }
        let node = &mut self.nodes[node_of(self.profile, rank) as usize];
        if node.0 != comm {
            *node = (comm, self.num_nodes);
            self.num_nodes += 1;
        }
        self.word.push((self.places[rank as usize].role, slot, node.1));
    }

    /// The open communicator is complete.
    fn close(&mut self) {
        if self.open == NOWHERE {
            return;
        }
        let is_alone = self.is_apart || self.word.iter().any(|(role, ..)| *role == NOWHERE);
        // Most are like the one before.
        if !is_alone && self.words.get(self.latest).is_some_and(|word| *word == self.word) {
            self.batches[self.latest].push(self.open);
            self.word.clear();
            return;
        }
        let mut known = None;
        if !is_alone {
            let mut hasher = FxHasher::default();
            self.word.hash(&mut hasher);
            let candidates = self.found.entry(hasher.finish()).or_default();
            known = candidates.iter().copied().find(|batch| self.words[*batch as usize] == self.word);
            if known.is_none() {
                candidates.push(self.batches.len() as u32);
            }
        }
        self.latest = known.map_or(self.batches.len(), |batch| batch as usize);
        if known.is_some() {
            self.batches[self.latest].push(self.open);
        } else {
            self.batches.push(vec![self.open]);
            self.words.push(if is_alone { Vec::new() } else { self.word.clone() });
        }
        self.word.clear();
    }

    /// All communicators have been visited. Those of no members stay without a batch.
    pub(super) fn finish(mut self) -> Formed {
        self.close();
        Formed { batches: self.batches, words: self.words }
    }
}

impl Formed {
    /// The batches whose members are all of one role and slot, by these.
    pub(super) fn private(&self) -> BTreeMap<(u32, u32), usize> {
        let words = self.words.iter().enumerate();
        let only = |(at, word): (usize, &Vec<Letter>)| {
            let (role, slot, _) = *word.first()?;
            word.iter().all(|letter| (letter.0, letter.1) == (role, slot)).then_some(((role, slot), at))
        };
        words.filter_map(only).collect()
    }

    /// The ranks of a role in the order of the table of the first of these batches that all of them are in.
    pub(super) fn order(&self, graph: &Graph, batches: impl Iterator<Item = usize>, ranks: &mut Vec<u32>) {
        let mut batches = batches;
        let is_all = |batch: &usize| self.words[*batch].len() * self.batches[*batch].len() == ranks.len();
        let Some(batch) = batches.find(is_all) else { return };
        let comms = &self.batches[batch];
        ranks.clear();
        for position in 0..self.words[batch].len() {
            ranks.extend(comms.iter().map(|comm| graph.comm_members(CommId(*comm))[position]));
        }
    }

    /// Puts the columns of every batch in the order of the ranks at position 0 in their role.
    pub(super) fn sort_columns(&mut self, graph: &Graph, places: &[Place]) {
        let mut by_rank: Vec<u32> = Vec::new();
        for comms in self.batches.iter_mut().filter(|comms| comms.len() > 1) {
            let at = |comm: u32| places[graph.comm_members(CommId(comm))[0] as usize].at;
            if comms.is_sorted_by_key(|comm| at(*comm)) {
                continue;
            }
            by_rank.clear();
            for comm in comms.iter() {
                let at = at(*comm) as usize;
                by_rank.resize(by_rank.len().max(at + 1), NOWHERE);
                by_rank[at] = *comm;
            }
            // A rank has one communicator per slot: none has been lost.
            comms.clear();
            comms.extend(by_rank.iter().filter(|comm| **comm != NOWHERE));
        }
    }
}

impl Simulation {
    /// Addresses of the ranks of a role in a slot.
    pub(super) fn addresses(&self, graph: &Graph, ranks: &[u32], slot: usize, positions: &Positions) -> Vec<Address> {
        let address = |rank: &u32| {
            let (batch, column) = self.network.batch_of(graph.rank_slots(Rank(*rank))[slot]);
            Address { batch, position: positions.of(*rank, slot), column }
        };
        ranks.iter().map(address).collect()
    }

    /// A role that has left the network was split: divides the batches whose communicators are no longer alike, and brings
    /// all roles back.
    pub(super) fn rejoin(&mut self, roles: [u32; 2]) {
        let slots = roles.iter().flat_map(|role| &self.roles[*role as usize].slots);
        let touched: BTreeSet<u32> = slots.flat_map(|slot| &slot.addresses).map(|address| address.batch).collect();
        let mut unwired = BTreeSet::from(roles);
        let mut moved: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for batch in touched {
            let sets = self.sets_of_columns(batch);
            if sets.len() < 2 {
                continue;
            }
            let parts = self.network.batches[batch as usize].parts.clone();
            for part in parts {
                if unwired.insert(part.role) {
                    self.roles[part.role as usize].unwire(&mut self.network);
                }
            }
            moved.insert(batch, self.network.batches[batch as usize].comms.clone());
            self.network.divide(batch, &sets);
        }
        for role in &unwired {
            let role = &mut self.roles[*role as usize];
            for address in role.slots.iter_mut().flat_map(|slot| &mut slot.addresses) {
                if let Some(comms) = moved.get(&address.batch) {
                    (address.batch, address.column) = self.network.batch_of(comms[address.column as usize]);
                }
            }
        }
        for role in unwired {
            self.roles[role as usize].wire(&mut self.network);
        }
    }

    /// Columns of a batch whose members are of the same roles, the largest set first.
    fn sets_of_columns(&self, batch: u32) -> Vec<Vec<u32>> {
        let comms = &self.network.batches[batch as usize].comms;
        if comms.len() == 1 {
            return Vec::new();
        }
        let mut sets: Vec<Vec<u32>> = Vec::new();
        let mut found: FxHashMap<Vec<u32>, usize> = FxHashMap::default();
        for (column, comm) in (0..).zip(comms) {
            let word = self.network.members(*comm).iter().map(|rank| self.places[*rank as usize].role).collect();
            let set = *found.entry(word).or_insert_with(|| {
                sets.push(Vec::new());
                sets.len() - 1
            });
            sets[set].push(column);
        }
        sets.sort_by_key(|set| std::cmp::Reverse(set.len()));
        sets
    }
}
