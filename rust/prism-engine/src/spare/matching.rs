//! How many stack entries must the survivors compute?
//!
//! `S` entries suffice if every type can be given to a live host with no host getting more than `S`: a bipartite matching in
//! which a group stands for `S` slots. Hopcroft and Karp's algorithm, with groups of capacity `S` instead of copies.

use super::SpareError;
use super::placement::{Stacks, check_offsets};
use std::collections::{BTreeMap, VecDeque};

/// No group.
pub(crate) const NOBODY: u32 = u32::MAX;

/// A matching of types to live hosts.
#[derive(Clone, Debug)]
pub(crate) struct Matching<'a> {
    hosts: &'a [Vec<u32>],
    is_live: &'a [bool],
    /// Group of each type, or [`NOBODY`].
    pub(crate) group: Vec<u32>,
    /// Types of each group.
    pub(crate) shards: Vec<Vec<u32>>,
    depth: Vec<u32>,
}

impl<'a> Matching<'a> {
    pub(crate) fn new(hosts: &'a [Vec<u32>], is_live: &'a [bool]) -> Self {
        let n = hosts.len();
        Self { hosts, is_live, group: vec![NOBODY; n], shards: vec![Vec::new(); n], depth: Vec::new() }
    }

    fn give(&mut self, shard: u32, group: u32) {
        let before = std::mem::replace(&mut self.group[shard as usize], group);
        if before != NOBODY {
            self.shards[before as usize].retain(|other| *other != shard);
        }
        self.shards[group as usize].push(shard);
    }

    fn live_hosts(&self, shard: u32) -> impl Iterator<Item = u32> + use<'a> {
        let is_live = self.is_live;
        self.hosts[shard as usize].iter().copied().filter(|group| is_live[*group as usize])
    }

    /// Extends the matching to as many types as groups of `capacity` can take. True if that is all.
    pub(crate) fn grow(&mut self, capacity: u32) -> bool {
        loop {
            let free: Vec<u32> =
                (0..).zip(&self.group).filter(|(_, group)| **group == NOBODY).map(|(s, _)| s).collect();
            if free.is_empty() {
                return true;
            }
            if !self.measure(&free, capacity) {
                return false;
            }
            let mut has_grown = false;
            for shard in free {
                has_grown |= self.augment(shard, capacity);
            }
            if !has_grown {
                return false;
            }
        }
    }

    /// Depth of every type on shortest alternating paths from the free ones. False: no path ends at a free slot.
    fn measure(&mut self, free: &[u32], capacity: u32) -> bool {
        self.depth.clear();
        self.depth.resize(self.group.len(), u32::MAX);
        for shard in free {
            self.depth[*shard as usize] = 0;
        }
        let mut queue: VecDeque<u32> = free.iter().copied().collect();
        let mut seen = vec![false; self.shards.len()];
        let mut last = u32::MAX;
        while let Some(shard) = queue.pop_front() {
            let depth = self.depth[shard as usize];
            if depth >= last {
                break;
            }
            for group in self.live_hosts(shard) {
                if std::mem::replace(&mut seen[group as usize], true) {
                    continue;
                }
                if (self.shards[group as usize].len() as u32) < capacity {
                    last = depth + 1;
                }
                for other in &self.shards[group as usize] {
                    if self.depth[*other as usize] == u32::MAX {
                        self.depth[*other as usize] = depth + 1;
                        queue.push_back(*other);
                    }
                }
            }
        }
        last != u32::MAX
    }

    /// Finds a path for a free type along the measured depths and flips it. Iterative: paths may be as long as the job is wide.
    fn augment(&mut self, shard: u32, capacity: u32) -> bool {
        // Each frame: a type, its live hosts still to be tried, and the types of the host under trial.
        struct Frame {
            shard: u32,
            hosts: Vec<u32>,
            group: u32,
            others: Vec<u32>,
        }
        let frame = |shard: u32, this: &Self| {
            let mut hosts: Vec<u32> = this.live_hosts(shard).collect();
            hosts.reverse();
            Frame { shard, hosts, group: NOBODY, others: Vec::new() }
        };
        let mut path = vec![frame(shard, self)];
        while let Some(top) = path.last_mut() {
            let depth = self.depth[top.shard as usize];
            if let Some(other) = top.others.pop() {
                if self.depth[other as usize] == depth + 1 {
                    let next = frame(other, self);
                    path.push(next);
                }
            } else if let Some(group) = top.hosts.pop() {
                top.group = group;
                if (self.shards[group as usize].len() as u32) < capacity {
                    for step in path.iter().rev() {
                        self.give(step.shard, step.group);
                    }
                    return true;
                }
                top.others = self.shards[group as usize].iter().rev().copied().collect();
            } else {
                // A dead end, for everybody in this phase.
                self.depth[top.shard as usize] = u32::MAX;
                path.pop();
            }
        }
        false
    }
}

/// Least number of entries that the live groups must compute so that every type is covered, not below `at_least`; `None` if
/// a type has lost all its hosts.
#[must_use]
pub fn min_stacks_of(stacks: &Stacks, is_live: &[bool], at_least: u32) -> Option<u32> {
    let live = is_live.iter().filter(|live| **live).count() as u32;
    let has_host = |hosts: &Vec<u32>| hosts.iter().any(|group| is_live[*group as usize]);
    if live == 0 || !stacks.hosts.iter().all(has_host) {
        return None;
    }
    let mut capacity = at_least.max(stacks.len().div_ceil(live)).max(1);
    let mut matching = Matching::new(&stacks.hosts, is_live);
    // At most as many rounds as a stack has entries: with all of them, every type is covered.
    while !matching.grow(capacity) {
        capacity += 1;
    }
    Some(capacity)
}

/// Least number of entries for a cyclic placement (group `g` holds types `g + offset`) after some groups have failed; `None`
/// is a wipe-out.
pub fn min_stacks(n: u32, offsets: &[u32], failed: &[u32]) -> Result<Option<u32>, SpareError> {
    check_offsets(n, offsets)?;
    let mut is_live = vec![true; n as usize];
    for group in failed {
        fail(&mut is_live, *group, "failed")?;
    }
    Ok(min_stacks_of(&Stacks::cyclic(n, offsets), &is_live, 1))
}

fn fail(is_live: &mut [bool], group: u32, field: &'static str) -> Result<(), SpareError> {
    match is_live.get_mut(group as usize) {
        None => Err(SpareError::invalid(field, group, format!("the groups are 0 to {}", is_live.len() - 1))),
        Some(false) => Err(SpareError::invalid(field, group, "the group fails twice")),
        Some(live) => {
            *live = false;
            Ok(())
        }
    }
}

/// Number (from 1) of the failure that wipes a type out when groups fail in this order, or `None` if none does.
pub fn wipe_out_index(n: u32, offsets: &[u32], failure_order: &[u32]) -> Result<Option<u32>, SpareError> {
    check_offsets(n, offsets)?;
    let stacks = Stacks::cyclic(n, offsets);
    let mut is_live = vec![true; n as usize];
    let mut hosts: Vec<usize> = stacks.hosts.iter().map(Vec::len).collect();
    let mut wiped = None;
    for (index, group) in (1..).zip(failure_order) {
        fail(&mut is_live, *group, "failure_order")?;
        for shard in &stacks.of_group[*group as usize] {
            hosts[*shard as usize] -= 1;
            if hosts[*shard as usize] == 0 {
                wiped = wiped.or(Some(index));
            }
        }
    }
    Ok(wiped)
}

/// The last number of failures up to which `s` entries are enough, for each `s` that ever is the least, before the wipe-out.
pub fn stack_thresholds(n: u32, offsets: &[u32], failure_order: &[u32]) -> Result<BTreeMap<u32, u32>, SpareError> {
    let end = wipe_out_index(n, offsets, failure_order)?;
    let stacks = Stacks::cyclic(n, offsets);
    let mut is_live = vec![true; n as usize];
    let mut thresholds = BTreeMap::from([(1, 0)]);
    let mut least = 1;
    for (count, group) in (1..).zip(failure_order) {
        is_live[*group as usize] = false;
        if end.is_some_and(|end| count >= end) {
            break;
        }
        // Fewer survivors never need less.
        least = min_stacks_of(&stacks, &is_live, least).unwrap_or(least);
        thresholds.insert(least, count);
    }
    Ok(thresholds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_takes_two_entries() {
        assert_eq!(min_stacks(20, &[0, 1, 3], &[]).unwrap(), Some(1));
        assert_eq!(min_stacks(20, &[0, 1, 3], &[4]).unwrap(), Some(2));
        assert_eq!(min_stacks(20, &[0, 1, 3], &[4, 3, 1]).unwrap(), None);
    }

    #[test]
    fn failures_of_nobody_or_twice_are_refused() {
        assert!(min_stacks(20, &[0], &[20]).unwrap_err().to_string().contains("0 to 19"));
        assert!(min_stacks(20, &[0], &[2, 2]).unwrap_err().to_string().contains("twice"));
        assert_eq!(wipe_out_index(20, &[0, 1, 3], &[4, 3, 9, 1]).unwrap(), Some(4));
    }
}
