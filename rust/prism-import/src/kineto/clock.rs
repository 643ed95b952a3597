//! Clocks of hosts differ. All members of a collective end together, so the ends tell by how much.

use super::matching::Matched;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Differences up to this are left alone: members of one collective really end some microseconds apart.
pub const TOLERANCE: i64 = 20_000;

/// A rank's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Offset {
    /// By how much the rank's clock is ahead of the lowest rank's that it shares collectives with, ns.
    pub ahead_ns: i64,
    /// Collectives it was solved from.
    pub collectives: u64,
}

/// Links to follow: collectives in common, from and to whom, and how far the latter is ahead.
type Open = BTreeSet<(u64, Reverse<(u32, u32)>, i64)>;

/// By how much each rank's clock is ahead, solved along the pairs of ranks with the most collectives in common. `end` tells
/// when a record of a rank ended. Ranks that share none keep their clocks.
pub fn offsets(ranks: &BTreeSet<u32>, matched: &[Matched], end: impl Fn(u32, u32) -> i64) -> BTreeMap<u32, Offset> {
    /// Pairs within a group, of neighbours in it and with its first member, are enough to connect everybody.
    fn pairs(members: &[(u32, u32)]) -> impl Iterator<Item = (usize, usize)> {
        (1..members.len()).flat_map(|at| [(at - 1, at), (0, at)].into_iter().take(if at == 1 { 1 } else { 2 }))
    }
    let mut differences: BTreeMap<(u32, u32), Vec<i64>> = BTreeMap::new();
    for one in matched.iter().filter(|one| one.ends.is_none()) {
        for (a, b) in pairs(&one.members) {
            let ((first, mine), (second, theirs)) = (one.members[a], one.members[b]);
            differences.entry((first, second)).or_default().push(end(second, theirs) - end(first, mine));
        }
    }
    let mut links: BTreeMap<u32, Vec<(u32, i64, u64)>> = BTreeMap::new();
    for ((first, second), mut list) in differences {
        let middle = median(&mut list);
        links.entry(first).or_default().push((second, middle, list.len() as u64));
        links.entry(second).or_default().push((first, -middle, list.len() as u64));
    }
    let mut solved: BTreeMap<u32, Offset> = BTreeMap::new();
    for root in ranks {
        if solved.contains_key(root) {
            continue;
        }
        solved.insert(*root, Offset { ahead_ns: 0, collectives: 0 });
        // The strongest link to a rank not yet reached is followed first.
        let mut open: Open = BTreeSet::new();
        let reach = |from: u32, ahead: i64, open: &mut Open| {
            for (to, difference, count) in links.get(&from).into_iter().flatten() {
                open.insert((*count, Reverse((from, *to)), ahead + difference));
            }
        };
        reach(*root, 0, &mut open);
        while let Some((collectives, Reverse((_, to)), ahead)) = open.pop_last() {
            if let Entry::Vacant(entry) = solved.entry(to) {
                entry.insert(Offset { ahead_ns: ahead, collectives });
                reach(to, ahead, &mut open);
            }
        }
    }
    for offset in solved.values_mut().filter(|offset| offset.ahead_ns.abs() <= TOLERANCE) {
        offset.ahead_ns = 0;
    }
    solved
}

/// The middle of a list, which is sorted.
fn median(list: &mut [i64]) -> i64 {
    list.sort_unstable();
    list.get(list.len() / 2).copied().unwrap_or(0)
}
