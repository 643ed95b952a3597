//! What makes the compute durations of a role's ranks differ: slow-down factors and durations of single ranks.

use super::alike::own_durations;
use super::error::SimError;
use super::role::Times;
use crate::graph::Graph;
use crate::ids::Rank;
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Stretched durations kept for use again.
const KEPT: usize = 128;

/// Ranks (lanes, where ranks are evaluated together) are named by their index in the role.
#[derive(Debug, Default)]
pub(super) struct Speeds {
    /// Slow-down factors other than 1, ascending by index.
    slow: Vec<(u32, f64)>,
    /// Ops that the factors do not stretch; kept where there are factors.
    fixed: BTreeSet<u32>,
    /// Durations of single ranks by op, ascending by index.
    overrides: BTreeMap<u32, Vec<(u32, SimTime)>>,
    /// Durations of every rank and their sum, by op, where templates differ.
    own: BTreeMap<u32, (Times, i128)>,
    /// Durations of every rank by the op's own duration, with their sum, where no rank has one of its own.
    stretched: FxHashMap<SimTime, (Times, i128)>,
    /// The latest result.
    few: Vec<(u32, SimTime)>,
    each: (Times, i128),
}

/// Durations of one op.
pub(super) enum Durations<'a> {
    /// The op's own on every rank.
    Same,
    /// The op's own but on these ranks.
    Few(&'a [(u32, SimTime)]),
    /// One per rank, and their sum.
    Each(&'a [SimTime], &'a i128),
}

/// Which of them an op has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    Same,
    Few,
    Each,
}

impl Durations<'_> {
    /// Duration of one rank.
    pub(super) fn of(&self, at: u32, common: SimTime) -> SimTime {
        match self {
            Self::Same => common,
            Self::Few(few) => few.binary_search_by_key(&at, |(at, _)| *at).map_or(common, |found| few[found].1),
            Self::Each(each, _) => each[at as usize],
        }
    }
}

impl Speeds {
    /// A single rank that is `factor` times slower.
    pub(super) fn alone(factor: f64) -> Self {
        let slow = is_slow(factor).then_some((0, factor));
        Self { slow: slow.into_iter().collect(), ..Self::default() }
    }

    /// Those of some ranks of a graph.
    pub(super) fn of(graph: &Graph, ranks: &[u32], factor: impl Fn(u32) -> f64) -> Result<Self, SimError> {
        let mut speeds = Self::default();
        let mut own = own_durations(graph, ranks);
        for (at, rank) in ranks.iter().enumerate() {
            let factor = factor(*rank);
            let mut total = 0i64;
            for (op, duration) in graph.rank_overrides(Rank(*rank)) {
                if let Some(own) = own.get_mut(&op) {
                    own[at] = duration;
                } else {
                    speeds.overrides.entry(op).or_default().push((at as u32, duration));
                }
                total = total.saturating_add(duration.scaled(factor.max(1.0)).0);
            }
            if total > i64::MAX / 8 {
                return Err(SimError::too_long(format!("the durations of rank {rank} add up to more than 13 days")));
            }
            if is_slow(factor) {
                speeds.slow.push((at as u32, factor));
            }
        }
        if let Some((at, _)) = speeds.slow.first() {
            speeds.fixed = graph.fixed_ops(Rank(ranks[*at as usize]));
        }
        for (op, mut own) in own {
            speeds.of_op(op).iter().for_each(|(at, factor)| own[*at as usize] = own[*at as usize].scaled(*factor));
            let total = sum(&own);
            speeds.own.insert(op, (own, total));
        }
        Ok(speeds)
    }

    /// The factors that stretch an op.
    fn of_op(&self, op: u32) -> &[(u32, f64)] {
        if self.fixed.contains(&op) { &[] } else { &self.slow }
    }

    /// Which durations an op has on `len` ranks. Where ranks differ, they are made ready for [`Self::each`]; `None` if those made
    /// ready before would be lost, unless they are free to go.
    pub(super) fn pace(&mut self, op: u32, common: SimTime, len: usize, is_free: bool) -> Option<Pace> {
        if self.own.contains_key(&op) {
            return Some(Pace::Each);
        }
        let num_slow = self.of_op(op).len();
        if self.overrides.contains_key(&op) || (num_slow > 0 && num_slow * 8 <= len) {
            return Some(Pace::Few);
        }
        if num_slow == 0 {
            return Some(Pace::Same);
        }
        if !self.stretched.contains_key(&common) {
            if !is_free && self.stretched.len() >= KEPT {
                return None;
            }
            self.durations(op, common, len);
        }
        Some(Pace::Each)
    }

    /// Durations of every rank, and their sum, that were made ready.
    pub(super) fn each(&self, op: u32, common: SimTime) -> (&[SimTime], i128) {
        let (each, total) = self.own.get(&op).unwrap_or_else(|| &self.stretched[&common]);
        (each, *total)
    }

    /// Durations of an op on `len` ranks.
    pub(super) fn durations(&mut self, op: u32, common: SimTime, len: usize) -> Durations<'_> {
        if let Some((each, total)) = self.own.get(&op) {
            return Durations::Each(each, total);
        }
        let own = self.overrides.get(&op).map_or(&[][..], Vec::as_slice);
        let slow = if self.fixed.contains(&op) { &[][..] } else { &self.slow };
        if own.is_empty() && slow.is_empty() {
            return Durations::Same;
        }
        if (own.len() + slow.len()) * 8 <= len || len == 1 {
            self.few.clear();
            merge(&mut self.few, common, own, slow);
            return Durations::Few(&self.few);
        }
        if own.is_empty() {
            if self.stretched.len() >= KEPT && !self.stretched.contains_key(&common) {
                self.stretched.clear();
            }
            let (each, total) = self.stretched.entry(common).or_insert_with(|| each(common, &[], slow, len));
            return Durations::Each(each, total);
        }
        self.each = each(common, own, slow, len);
        Durations::Each(&self.each.0, &self.each.1)
    }

    /// Adds elements with the durations of `origins`.
    pub(super) fn grow(&mut self, len: usize, origins: &[u32]) {
        let origin = |at: usize| (len + at) as u32;
        let slow = self.slow.clone();
        for (at, from) in origins.iter().enumerate() {
            if let Ok(found) = slow.binary_search_by_key(from, |(at, _)| *at) {
                self.slow.push((origin(at), slow[found].1));
            }
        }
        for entries in self.overrides.values_mut() {
            let own = entries.clone();
            for (at, from) in origins.iter().enumerate() {
                if let Ok(found) = own.binary_search_by_key(from, |(at, _)| *at) {
                    entries.push((origin(at), own[found].1));
                }
            }
        }
        self.stretched.clear();
    }

    /// Takes out the marked ranks.
    pub(super) fn split(&mut self, moved: &[bool]) -> Self {
        let mut index = Vec::with_capacity(moved.len());
        let (mut kept_so_far, mut moved_so_far) = (0u32, 0u32);
        for is_moved in moved {
            let counter = if *is_moved { &mut moved_so_far } else { &mut kept_so_far };
            index.push(*counter);
            *counter += 1;
        }
        let mut other =
            Self { slow: part(&mut self.slow, moved, &index), fixed: self.fixed.clone(), ..Self::default() };
        for (op, entries) in &mut self.overrides {
            let theirs = part(entries, moved, &index);
            if !theirs.is_empty() {
                other.overrides.insert(*op, theirs);
            }
        }
        self.overrides.retain(|_, entries| !entries.is_empty());
        for (op, (each, total)) in &mut self.own {
            let theirs = super::role::part(each, moved);
            *total = sum(each);
            let their_total = sum(&theirs);
            other.own.insert(*op, (theirs, their_total));
        }
        self.stretched.clear();
        other
    }
}

/// Does the factor change anything?
fn is_slow(factor: f64) -> bool {
    factor.to_bits() != 1f64.to_bits()
}

/// Durations of the ranks that have one of their own or a factor, ascending.
fn merge(into: &mut Vec<(u32, SimTime)>, common: SimTime, own: &[(u32, SimTime)], slow: &[(u32, f64)]) {
    let mut own = own.iter().copied().peekable();
    for (at, factor) in slow {
        while let Some(before) = own.next_if(|(other, _)| other < at) {
            into.push(before);
        }
        let duration = own.next_if(|(other, _)| other == at).map_or(common, |(_, own)| own);
        into.push((*at, duration.scaled(*factor)));
    }
    into.extend(own);
}

fn each(common: SimTime, own: &[(u32, SimTime)], slow: &[(u32, f64)], len: usize) -> (Times, i128) {
    let mut few = Vec::with_capacity(own.len() + slow.len());
    merge(&mut few, common, own, slow);
    let mut each = vec![common; len];
    for (at, duration) in few {
        each[at as usize] = duration;
    }
    let total = sum(&each);
    (each, total)
}

fn sum(durations: &[SimTime]) -> i128 {
    durations.iter().map(|duration| i128::from(duration.0)).sum()
}

/// Takes the entries of the marked ranks out and renumbers both halves.
fn part<T: Copy>(entries: &mut Vec<(u32, T)>, moved: &[bool], index: &[u32]) -> Vec<(u32, T)> {
    let renumber = |(rank, value): &(u32, T)| (index[*rank as usize], *value);
    let taken = entries.iter().filter(|(rank, _)| moved[*rank as usize]).map(renumber).collect();
    *entries = entries.iter().filter(|(rank, _)| !moved[*rank as usize]).map(renumber).collect();
    taken
}
