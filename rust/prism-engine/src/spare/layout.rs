//! The controller: which group computes which types, and what changes when groups fail.
//!
//! Every live group computes the first `S` entries of its stack. After a failure:
//!
//! 0. if these entries still cover every type, nothing changes;
//! 1. else the least `S* >= S` is found for which the survivors can cover every type (matching);
//! 2. stacks are reordered so that they do, moving as few entries into the computed part as possible (minimum-cost flow,
//!    cost 1 per moved entry), and the groups that got a new entry compute it at once (the *patch*);
//! 3. if a type has no live host left, the job must restart from a checkpoint (*wipe-out*).
//!
//! Deterministic: ties go to the lower group and the lower type.

use super::SpareError;
use super::matching::NOBODY;
use super::placement::Stacks;
use std::collections::VecDeque;

/// What a failure means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The entries computed anyway cover every type.
    Continue,
    /// Stacks were reordered; the moved entries must be computed for the current step.
    Reorder,
    /// A type has no host left: restart from a checkpoint.
    WipeOut,
}

/// An entry that came into the computed part of a group's stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Move {
    /// Group that now computes the type.
    pub group: u32,
    /// The type.
    pub shard: u32,
}

/// What the survivors are to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the failure means.
    pub action: Action,
    /// Entries that every live group computes from now on.
    pub stacks: u32,
    /// Entries to be computed for the current step, by group.
    pub moves: Vec<Move>,
    /// The live group whose gradient of each type counts; empty after a wipe-out.
    pub computed_by: Vec<u32>,
    /// Types without a live host, after a wipe-out.
    pub lost: Vec<u32>,
}

/// Stacks of all groups, as far as failures have reordered them.
#[derive(Clone, Debug)]
pub struct Layout {
    initial: Stacks,
    /// Types of each group, the computed ones first.
    order: Vec<Vec<u32>>,
    is_live: Vec<bool>,
    live: u32,
    stacks: u32,
    /// Live groups that compute each type.
    cover: Vec<u32>,
    /// Live hosts of each type.
    hosts_left: Vec<u32>,
    search: Search,
}

impl Layout {
    /// Nothing has failed yet: every group computes its first entry.
    #[must_use]
    pub fn new(stacks: Stacks) -> Self {
        let n = stacks.len();
        let hosts_left = stacks.hosts.iter().map(|hosts| hosts.len() as u32).collect();
        let mut layout = Self {
            order: stacks.of_group.clone(),
            is_live: vec![true; n as usize],
            live: n,
            stacks: 1,
            cover: vec![0; n as usize],
            hosts_left,
            search: Search::new(n as usize),
            initial: stacks,
        };
        layout.count_cover();
        layout
    }

    /// Everybody is back, in the initial order.
    pub fn reset(&mut self) {
        self.order.clone_from(&self.initial.of_group);
        self.is_live.fill(true);
        self.live = self.initial.len();
        self.stacks = 1;
        for (left, hosts) in self.hosts_left.iter_mut().zip(&self.initial.hosts) {
            *left = hosts.len() as u32;
        }
        self.count_cover();
    }

    /// Entries that every live group computes.
    #[must_use]
    pub fn stacks(&self) -> u32 {
        self.stacks
    }

    /// Number of live groups.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Is the group alive? A group that does not exist is not.
    #[must_use]
    pub fn is_live(&self, group: u32) -> bool {
        self.is_live.get(group as usize).copied().unwrap_or(false)
    }

    /// The types a group computes, in order.
    #[must_use]
    pub fn computed(&self, group: u32) -> &[u32] {
        let stack = &self.order[group as usize];
        &stack[..stack.len().min(self.stacks as usize)]
    }

    /// Groups fail: what now? Every group may be named once, and must be alive.
    pub fn fail(&mut self, groups: &[u32]) -> Result<Plan, SpareError> {
        for (at, group) in groups.iter().enumerate() {
            if *group >= self.initial.len() {
                let expected = format!("the groups are 0 to {}", self.initial.len() - 1);
                return Err(SpareError::invalid("groups", group, expected));
            }
            if !self.is_live(*group) || groups[..at].contains(group) {
                return Err(SpareError::invalid("groups", group, "the group has failed already"));
            }
        }
        let mut moves = Vec::new();
        let action = self.lose(groups, &mut moves);
        let lost: Vec<u32> = self.lost().collect();
        let action = if lost.is_empty() { action } else { Action::WipeOut };
        let computed_by = if action == Action::WipeOut { Vec::new() } else { self.computed_by() };
        Ok(Plan { action, stacks: self.stacks, moves, computed_by, lost })
    }

    /// [`Self::fail`] without checks and without the table of who computes what.
    pub(crate) fn lose(&mut self, groups: &[u32], moves: &mut Vec<Move>) -> Action {
        moves.clear();
        let (mut is_lost, mut orphans) = (false, Vec::new());
        for group in groups {
            self.is_live[*group as usize] = false;
            self.live -= 1;
            for shard in &self.initial.of_group[*group as usize] {
                self.hosts_left[*shard as usize] -= 1;
                is_lost |= self.hosts_left[*shard as usize] == 0;
            }
            for at in 0..self.computed(*group).len() {
                let shard = self.order[*group as usize][at];
                self.cover[shard as usize] -= 1;
                if self.cover[shard as usize] == 0 {
                    orphans.push(shard);
                }
            }
        }
        if is_lost {
            return Action::WipeOut;
        }
        if orphans.is_empty() {
            return Action::Continue;
        }
        orphans.sort_unstable();
        self.reorder(&orphans, moves);
        Action::Reorder
    }

    /// Groups that had failed are live again, with their initial stacks. Stacks become as short as they can be: from the next
    /// step on every live group computes the new `stacks` entries. Every group may be named once, and must have failed.
    pub fn rejoin(&mut self, groups: &[u32]) -> Result<Plan, SpareError> {
        for (at, group) in groups.iter().enumerate() {
            if *group >= self.initial.len() {
                let expected = format!("the groups are 0 to {}", self.initial.len() - 1);
                return Err(SpareError::invalid("groups", group, expected));
            }
            if self.is_live(*group) || groups[..at].contains(group) {
                return Err(SpareError::invalid("groups", group, "the group has not failed"));
            }
        }
        let (before, mut moves) = (self.stacks, Vec::new());
        self.revive(groups, &mut moves);
        let lost: Vec<u32> = self.lost().collect();
        let action = match (lost.is_empty(), moves.is_empty() && self.stacks == before) {
            (false, _) => Action::WipeOut,
            (true, true) => Action::Continue,
            (true, false) => Action::Reorder,
        };
        let computed_by = if lost.is_empty() { self.computed_by() } else { Vec::new() };
        Ok(Plan { action, stacks: self.stacks, moves, computed_by, lost })
    }

    /// [`Self::rejoin`] without checks and without the table of who computes what.
    pub(crate) fn revive(&mut self, groups: &[u32], moves: &mut Vec<Move>) {
        moves.clear();
        for group in groups {
            let at = *group as usize;
            self.is_live[at] = true;
            self.live += 1;
            self.order[at].clone_from(&self.initial.of_group[at]);
            for shard in &self.initial.of_group[at] {
                self.hosts_left[*shard as usize] += 1;
            }
        }
        self.shorten(moves);
    }

    /// The live groups begin anew with their initial stacks, as short as they can be.
    pub(crate) fn reorder_anew(&mut self) {
        for (group, order) in self.order.iter_mut().enumerate() {
            order.clone_from(&self.initial.of_group[group]);
        }
        self.shorten(&mut Vec::new());
    }

    /// Has every type a live host?
    #[must_use]
    pub fn is_covered(&self) -> bool {
        self.hosts_left.iter().all(|left| *left > 0)
    }

    fn lost(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.hosts_left).filter(|(_, left)| **left == 0).map(|(shard, _)| shard)
    }

    /// Finds the least number of entries with which the live groups cover every type.
    fn shorten(&mut self, moves: &mut Vec<Move>) {
        if !self.is_covered() {
            return self.count_cover();
        }
        // With all its entries every group covers what it can, so this ends.
        let most = self.order.iter().map(Vec::len).max().unwrap_or(1) as u32;
        let mut search = std::mem::take(&mut self.search);
        for stacks in self.initial.len().div_ceil(self.live)..=most {
            self.stacks = stacks;
            self.count_cover();
            let orphans: Vec<u32> = (0..).zip(&self.cover).filter(|(_, n)| **n == 0).map(|(shard, _)| shard).collect();
            search.begin(self);
            if search.seat(self, &orphans, stacks) {
                search.moved(self, moves);
                self.apply(stacks, &search, moves);
                break;
            }
        }
        self.search = search;
    }

    /// The first of the live groups that compute each type.
    fn computed_by(&self) -> Vec<u32> {
        let mut by = vec![NOBODY; self.initial.len() as usize];
        for group in (0..self.initial.len()).filter(|group| self.is_live(*group)) {
            for shard in self.computed(group) {
                by[*shard as usize] = by[*shard as usize].min(group);
            }
        }
        by
    }

    fn count_cover(&mut self) {
        self.cover.fill(0);
        for group in 0..self.order.len() {
            if self.is_live[group] {
                let stack = &self.order[group];
                stack[..stack.len().min(self.stacks as usize)].iter().for_each(|s| self.cover[*s as usize] += 1);
            }
        }
    }

    fn reorder(&mut self, orphans: &[u32], moves: &mut Vec<Move>) {
        let mut capacity = self.stacks.max(self.initial.len().div_ceil(self.live));
        let mut search = std::mem::take(&mut self.search);
        loop {
            search.begin(self);
            // With all its entries every group covers everything it can, so this ends.
            if search.seat(self, orphans, capacity) {
                break;
            }
            capacity += 1;
        }
        search.moved(self, moves);
        self.apply(capacity, &search, moves);
        self.search = search;
    }

    fn apply(&mut self, capacity: u32, search: &Search, moves: &[Move]) {
        let computed = capacity as usize;
        for group in moves.chunk_by(|a, b| a.group == b.group) {
            let stack = &mut self.order[group[0].group as usize];
            let reach = computed.min(stack.len());
            let is_owned = |shard: u32| search.owner[shard as usize] == group[0].group;
            for moved in group {
                let at = stack.iter().position(|shard| *shard == moved.shard).expect("hosts hold the type");
                if at >= reach {
                    // Later slots first: the entries computed all along keep theirs.
                    let slot = (0..reach).rev().find(|slot| !is_owned(stack[*slot]));
                    stack.swap(slot.expect("a group owns no more than it computes"), at);
                }
            }
        }
        self.stacks = capacity;
        self.count_cover();
    }
}

/// Minimum-cost seating of orphaned types: shortest augmenting paths, one type at a time.
///
/// A type costs nothing at a group that computes it already and 1 at its other hosts. All types that are still computed
/// start where they are, at cost 0; each orphan is then given the cheapest alternating path to a group with room. The result
/// is optimal: the start is, and a shortest path keeps it so.
#[derive(Clone, Debug, Default)]
struct Search {
    /// Group of each type.
    owner: Vec<u32>,
    /// Types of each group.
    owned: Vec<Vec<u32>>,
    /// Distance of each group, valid if its stamp is current.
    distance: Vec<i32>,
    stamp: Vec<u32>,
    now: u32,
    /// Type through which a group was reached.
    through: Vec<u32>,
    queue: VecDeque<u32>,
    is_queued: Vec<bool>,
}

impl Search {
    fn new(n: usize) -> Self {
        Self {
            owner: vec![NOBODY; n],
            owned: vec![Vec::new(); n],
            distance: vec![0; n],
            stamp: vec![0; n],
            now: 0,
            through: vec![NOBODY; n],
            queue: VecDeque::new(),
            is_queued: vec![false; n],
        }
    }

    /// Every type that is computed belongs to the first group that computes it.
    fn begin(&mut self, layout: &Layout) {
        self.owner.fill(NOBODY);
        self.owned.iter_mut().for_each(Vec::clear);
        for group in (0..layout.initial.len()).filter(|group| layout.is_live[*group as usize]) {
            for shard in layout.computed(group) {
                if self.owner[*shard as usize] == NOBODY {
                    self.owner[*shard as usize] = group;
                    self.owned[group as usize].push(*shard);
                }
            }
        }
    }

    /// Gives every orphan a group of at most `capacity` types. False if that is impossible.
    fn seat(&mut self, layout: &Layout, orphans: &[u32], capacity: u32) -> bool {
        let mut cost = 0;
        for (seated, orphan) in (0..).zip(orphans) {
            // Every orphan costs at least 1 in the end, so the cheapest path cannot cost less than this.
            let least = seated + 1 - cost;
            let Some((group, distance)) = self.nearest(layout, *orphan, capacity, least) else { return false };
            cost += distance;
            self.flip(*orphan, group);
        }
        true
    }

    fn weight(layout: &Layout, shard: u32, group: u32) -> i32 {
        i32::from(!layout.computed(group).contains(&shard))
    }

    /// The group with room that is cheapest to reach, and the cost.
    fn nearest(&mut self, layout: &Layout, orphan: u32, capacity: u32, least: i32) -> Option<(u32, i32)> {
        self.now += 1;
        self.queue.clear();
        let mut best: Option<(i32, u32)> = None;
        self.relax(layout, orphan, NOBODY, 0);
        while let Some(group) = self.queue.pop_front() {
            self.is_queued[group as usize] = false;
            let distance = self.distance[group as usize];
            if (self.owned[group as usize].len() as u32) < capacity {
                if best.is_none_or(|best| (distance, group) < best) {
                    best = Some((distance, group));
                }
                if distance <= least {
                    break;
                }
                continue;
            }
            for at in 0..self.owned[group as usize].len() {
                let shard = self.owned[group as usize][at];
                let back = distance - Self::weight(layout, shard, group);
                self.relax(layout, shard, group, back);
            }
        }
        while let Some(group) = self.queue.pop_front() {
            self.is_queued[group as usize] = false;
        }
        best.map(|(distance, group)| (group, distance))
    }

    /// A type can leave `from` at this cost: to its other live hosts.
    fn relax(&mut self, layout: &Layout, shard: u32, from: u32, cost: i32) {
        for group in &layout.initial.hosts[shard as usize] {
            if *group == from || !layout.is_live[*group as usize] {
                continue;
            }
            let at = *group as usize;
            let weight = Self::weight(layout, shard, *group);
            if self.stamp[at] == self.now && self.distance[at] <= cost + weight {
                continue;
            }
            self.stamp[at] = self.now;
            self.distance[at] = cost + weight;
            self.through[at] = shard;
            if !std::mem::replace(&mut self.is_queued[at], true) {
                if weight == 0 { self.queue.push_front(*group) } else { self.queue.push_back(*group) }
            }
        }
    }

    /// Moves the types along the path that ends at `group`.
    fn flip(&mut self, orphan: u32, mut group: u32) {
        loop {
            let shard = self.through[group as usize];
            let before = std::mem::replace(&mut self.owner[shard as usize], group);
            self.owned[group as usize].push(shard);
            if shard == orphan {
                return;
            }
            self.owned[before as usize].retain(|other| *other != shard);
            group = before;
        }
    }

    /// Types at groups that did not compute them, by group and type.
    fn moved(&self, layout: &Layout, moves: &mut Vec<Move>) {
        for (group, owned) in (0..).zip(&self.owned) {
            let new = owned.iter().filter(|shard| Self::weight(layout, **shard, group) > 0);
            moves.extend(new.map(|shard| Move { group, shard: *shard }));
        }
        moves.sort_unstable();
    }
}
