//! Restarts, and groups that come back.

use super::Policy;
use super::policy::{Outcome, Simulation, State};
use super::timeline::Activity;
use crate::perturb::random::Random;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

impl Simulation<'_> {
    /// Repaired groups are back.
    pub(super) fn rejoin(&mut self) {
        let now = self.now;
        if let State::Spares { idle, back, .. } = &mut self.state {
            let before = back.len();
            back.retain(|time| *time > now);
            let most = match self.setup.policy {
                Policy::Spares { spares } => spares,
                _ => 0,
            };
            *idle = (*idle + (before - back.len()) as u32).min(most);
            return;
        }
        let mut groups = Vec::new();
        while let Some(Reverse((bits, group))) = self.broken.peek()
            && f64::from_bits(*bits) <= now
        {
            groups.push(*group);
            self.broken.pop();
        }
        if !groups.is_empty() {
            self.revive(&groups);
            self.spend(Activity::Rejoin, self.setup.recovery.rejoin_s);
        }
    }

    /// Groups that had failed are live again.
    fn revive(&mut self, groups: &[u32]) {
        self.run.rejoins += groups.len() as u64;
        match &mut self.state {
            State::Spare { layout, moves } => layout.revive(groups, moves),
            State::Replication { blocks, block_of, is_live, live, .. } => {
                for group in groups {
                    is_live[*group as usize] = true;
                    blocks[block_of[*group as usize] as usize] += 1;
                    *live += 1;
                }
            }
            State::Elastic { is_live, live } => {
                for group in groups {
                    is_live[*group as usize] = true;
                    *live += 1;
                }
            }
            State::Checkpoint | State::Spares { .. } => {}
        }
    }

    /// Back to the checkpoint.
    pub(super) fn go_back(&mut self, mut everybody: bool) {
        loop {
            let is_local = self.is_local_copy_left();
            self.run.restarts += 1;
            self.run.local_restarts += u64::from(is_local);
            let target = if is_local { self.saved_locally } else { self.saved };
            self.run.repeated_steps += self.step + 1 - target;
            self.step = target;
            self.saved_locally = target;
            self.saving = None;
            let start = self.now;
            let dead = if everybody {
                self.gather();
                self.restart(self.setup.restart(is_local))
            } else {
                self.spend(Activity::Swap, self.setup.recovery.swap_s);
                Vec::new()
            };
            self.down += self.now - start;
            if dead.is_empty() || matches!(self.state, State::Checkpoint | State::Spares { .. }) {
                return;
            }
            self.run.failures += dead.len() as u64;
            match self.lose(&dead) {
                Outcome::Back(again) if self.now < self.limit => everybody = again,
                Outcome::Patch(_) => {
                    self.run.reorders += 1;
                    return;
                }
                Outcome::Back(_) | Outcome::Done | Outcome::Lost => return,
            }
        }
    }

    /// Is there a newer checkpoint on the groups' own machines, and have all of its parts survived?
    fn is_local_copy_left(&self) -> bool {
        self.setup.recovery.local.is_some_and(|local| {
            let mut random = Random::of(self.seed, &[u64::MAX - 1, self.run.restarts]);
            self.saved_locally > self.saved && random.uniform() < local.share
        })
    }

    /// The groups of the restart. Without a repair time all failed ones are replaced; else it waits for those it needs.
    fn gather(&mut self) {
        if self.setup.recovery.repair_s.is_none() {
            return self.replace_all();
        }
        let start = self.now;
        if matches!(self.state, State::Spares { .. }) {
            self.wait_for_missing();
        } else {
            while !self.is_complete()
                && let Some(Reverse((bits, group))) = self.broken.pop()
            {
                self.now = self.now.max(f64::from_bits(bits));
                self.revive(&[group]);
            }
            if let State::Spare { layout, .. } = &mut self.state {
                layout.reorder_anew();
            }
        }
        let waited = self.now - start;
        self.now = start;
        self.spend(Activity::Repair, waited);
    }

    fn replace_all(&mut self) {
        let n = self.setup.job.groups;
        match &mut self.state {
            State::Spare { layout, .. } => layout.reset(),
            State::Replication { blocks, sizes, is_live, live, .. } => {
                blocks.clone_from(sizes);
                is_live.fill(true);
                *live = n;
            }
            State::Elastic { .. } | State::Checkpoint | State::Spares { .. } => {}
        }
    }

    /// Can the live groups do the whole work?
    fn is_complete(&self) -> bool {
        match &self.state {
            State::Spare { layout, .. } => layout.is_covered(),
            State::Replication { blocks, .. } => blocks.iter().all(|left| *left > 0),
            State::Elastic { live, .. } => *live > 0,
            State::Checkpoint | State::Spares { .. } => true,
        }
    }

    /// A job that needs all its groups waits for repairs; groups that fail meanwhile are waited for as well.
    fn wait_for_missing(&mut self) {
        let repair = self.setup.recovery.repair_s.unwrap_or(0.0);
        let State::Spares { back, missing, .. } = &mut self.state else { return };
        while *missing > 0 && self.now < self.limit {
            let Some(first) = back.iter().copied().min_by(f64::total_cmp) else { break };
            let until = first.max(self.now);
            while let Some((time, groups)) = self.failures.pop(until) {
                self.run.failures += u64::from(groups.end - groups.start);
                *missing += groups.end - groups.start;
                back.extend(groups.map(|_| time + repair));
            }
            self.now = until;
            let at = back.iter().position(|time| time.to_bits() == first.to_bits());
            back.swap_remove(at.expect("found among them"));
            *missing -= 1;
        }
    }

    /// Every group restarts until it gets through without a failure; the job goes on when the last has. Returns the groups
    /// that have failed since they were ready.
    fn restart(&mut self, window: f64) -> Vec<u32> {
        let start = self.now;
        let mut ready = BTreeMap::new();
        let mut all = start + window;
        let mut dead = BTreeSet::new();
        // A window may be broken again and again; what is given up is told by the progress.
        while let Some((time, groups)) = self.failures.pop(all.min(self.limit)) {
            for group in groups.filter(|group| self.can_fail(*group)) {
                let end = ready.entry(group).or_insert(start + window);
                if self.setup.recovery.restarts_together {
                    all = all.max(time + window);
                } else if time < *end {
                    *end = time + window;
                    all = all.max(*end);
                } else {
                    dead.insert(group);
                }
            }
        }
        self.spend(Activity::Restart, all - start);
        dead.into_iter().collect()
    }
}
