//! Changes to a job: slow ranks, hot GPUs, bad links, noise, dead ranks, uneven routing.
//!
//! ```text
//!  TOML ──► Perturbations: rules in order ──► sim: durations of compute ops, links and sizes of communication, deaths
//! ```
//!
//! Every kind of change is one small [`Rule`]. Rules are deterministic: what they do to an op depends on who runs it, which op
//! of which iteration it is, when it starts, and what ran on its stream before. None of that depends on the order of
//! evaluation, so neither does the result. Rules apply in the order they were given, each to the result of the one before,
//! rounded to the picosecond; slow-downs that never change come first, as one factor.
//!
//! A rule that only makes things slower never makes a rank end earlier: waits are maxima, and a collective keeps the algorithm
//! that is chosen for healthy links.

pub mod death;
pub mod imbalance;
pub mod jitter;
pub mod link;
pub(crate) mod maths;
pub(crate) mod random;
pub mod scope;
pub mod straggler;
pub mod throttle;
pub mod toml;
mod world;

pub use self::toml::PerturbError;
pub use death::{Death, RankDeath};
pub use imbalance::Imbalance;
pub use jitter::{Distribution, Jitter, JitterMode};
pub use link::{End, Hop, LinkChange, SlowLink};
pub use scope::{ComputeSite, RankSet, Scope, When, Window};
pub use straggler::Straggler;
pub use throttle::ThermalThrottle;
pub use world::World;

use crate::ids::Rank;
use crate::units::SimTime;
use std::fmt::Debug;
use std::sync::Arc;

/// What a rule remembers of one stream of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamState {
    /// How far its past goes.
    pub time: SimTime,
    /// Temperature in °C.
    pub temperature: f64,
    /// Clock step.
    pub level: u32,
}

/// One kind of change. Every hook has a default that changes nothing.
pub trait Rule: Debug + Send + Sync {
    /// `None` if the rule leaves the rank's own ops alone; ranks with equal keys are changed alike.
    fn touches(&self, rank: Rank) -> Option<u64>;

    /// A slow-down of all compute of the rank that never changes. Such a rule does not [change compute](Self::compute) as well.
    fn constant_factor(&self, _rank: Rank) -> Option<f64> {
        None
    }

    /// Does [`Self::compute`] do anything to the rank?
    fn changes_compute(&self, _rank: Rank) -> bool {
        false
    }

    /// Patterns for the names of the ops that [`Self::compute`] is asked about (none: all ops).
    fn names(&self) -> &[String] {
        &[]
    }

    /// What the rule knows of a stream at the beginning, if it remembers anything.
    fn initial_state(&self) -> Option<StreamState> {
        None
    }

    /// Does what the rule does to an op depend on nothing that came before, and does no rank die of it?
    fn is_memoryless(&self) -> bool {
        self.initial_state().is_none()
    }

    /// The duration of a compute op that would take `duration`. The ops of a stream come in order.
    fn compute(&self, _site: &ComputeSite, duration: SimTime, _state: &mut StreamState) -> SimTime {
        duration
    }

    /// When the rule changes communication, if it ever does. Inside the window the change is always the same.
    fn network_window(&self) -> Option<&Window> {
        None
    }

    /// What happens to a hop inside the window.
    fn link(&self, _hop: &Hop) -> Option<LinkChange> {
        None
    }

    /// By how much the rank's share of all-to-alls grows inside the window.
    fn size(&self, _rank: Rank) -> f64 {
        1.0
    }

    /// When the rank dies.
    fn death(&self, _rank: Rank) -> Option<Death> {
        None
    }
}

/// Most rules that change communication: they are told apart by one bit each.
pub const MAX_NETWORK_RULES: usize = 64;
/// Most distinct lists of name patterns, likewise.
pub const MAX_NAME_FILTERS: usize = 8;

/// Which name filters a name fits: bit `n` is filter `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameMask(pub u8);

#[derive(Clone, Debug)]
struct Entry {
    rule: Arc<dyn Rule>,
    /// Filter the op's name must fit.
    filter: Option<u8>,
}

/// Rules in order.
#[derive(Clone, Debug, Default)]
pub struct Perturbations {
    entries: Vec<Entry>,
    filters: Vec<Vec<String>>,
}

impl Perturbations {
    /// The rules, which were made for a job of this size.
    pub fn new(rules: impl IntoIterator<Item = Arc<dyn Rule>>) -> Result<Self, PerturbError> {
        let mut all = Self::default();
        for rule in rules {
            let filter = all.filter_of(rule.names())?;
            all.entries.push(Entry { rule, filter });
        }
        if all.network_rules().count() > MAX_NETWORK_RULES {
            return Err(PerturbError::TooMany { what: "rules about communication", most: MAX_NETWORK_RULES });
        }
        Ok(all)
    }

    fn filter_of(&mut self, names: &[String]) -> Result<Option<u8>, PerturbError> {
        if names.is_empty() {
            return Ok(None);
        }
        let at = self.filters.iter().position(|known| known == names).unwrap_or_else(|| {
            self.filters.push(names.to_vec());
            self.filters.len() - 1
        });
        if at >= MAX_NAME_FILTERS {
            return Err(PerturbError::TooMany { what: "different lists of names", most: MAX_NAME_FILTERS });
        }
        Ok(Some(at as u8))
    }

    /// Is there no rule?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Is any rule about the names of ops?
    #[must_use]
    pub fn has_name_filters(&self) -> bool {
        !self.filters.is_empty()
    }

    /// Which filters a name fits.
    #[must_use]
    pub fn name_mask(&self, name: &str) -> NameMask {
        let fits = |patterns: &Vec<String>| patterns.iter().any(|pattern| scope::fits(pattern, name));
        let bits = self.filters.iter().enumerate().filter(|(_, patterns)| fits(patterns));
        NameMask(bits.fold(0, |mask, (bit, _)| mask | 1 << bit))
    }

    /// What is done to the ops of a rank: ranks with equal keys, and equal in everything else, are changed alike. Empty if
    /// the rank is left alone. Enough to tell ranks apart unless [`Self::changes_network`].
    #[must_use]
    pub fn touches(&self, rank: Rank) -> Vec<(usize, u64)> {
        let keys = self.entries.iter().enumerate();
        keys.filter_map(|(at, entry)| Some((at, entry.rule.touches(rank)?))).collect()
    }

    /// May the members of one communicator, each with equal ops, come out of it at different times because of a rule? Then
    /// ranks must not be evaluated as one because their own ops are equal.
    #[must_use]
    pub fn changes_network(&self) -> bool {
        self.network_rules().next().is_some()
    }

    /// Do ranks with equal ops and equal keys have equal times as long as what they wait for has? Then they may be evaluated
    /// as one.
    #[must_use]
    pub fn keeps_symmetry(&self) -> bool {
        !self.changes_network() && self.entries.iter().all(|entry| entry.rule.is_memoryless())
    }

    /// The slow-downs of a rank that never change, as one factor.
    #[must_use]
    pub fn constant_factor(&self, rank: Rank) -> Option<f64> {
        let factors = self.entries.iter().filter_map(|entry| entry.rule.constant_factor(rank));
        factors.reduce(|product, factor| product * factor)
    }

    /// The first rule of a job of so many ranks that does more than slow all compute of a rank for good: its name.
    pub(crate) fn first_changing(&self, world_size: u32) -> Option<String> {
        let changes = |rule: &dyn Rule| {
            let touches = |rank: Rank| rule.changes_compute(rank) || rule.death(rank).is_some();
            rule.network_window().is_some() || (0..world_size).map(Rank).any(touches)
        };
        let rule = self.entries.iter().map(|entry| &*entry.rule).find(|rule| changes(*rule))?;
        let text = format!("{rule:?}");
        Some(text.split(|character: char| !character.is_alphanumeric()).next().unwrap_or_default().to_owned())
    }

    /// Do durations of the rank's compute ops depend on the op?
    #[must_use]
    pub fn changes_compute(&self, rank: Rank) -> bool {
        self.entries.iter().any(|entry| entry.rule.changes_compute(rank))
    }

    /// The rules that change a rank's compute ops, by number, with the filter of each.
    pub(crate) fn compute_rules(&self) -> impl Iterator<Item = (usize, &dyn Rule, Option<u8>)> {
        self.entries.iter().enumerate().map(|(at, entry)| (at, &*entry.rule, entry.filter))
    }

    /// The rules that change communication, in order: number `n` has bit `n`.
    pub(crate) fn network_rules(&self) -> impl Iterator<Item = &dyn Rule> {
        self.entries.iter().map(|entry| &*entry.rule).filter(|rule| rule.network_window().is_some())
    }

    /// The rules about communication in force then, one bit each.
    pub(crate) fn network_state(&self, when: When) -> u64 {
        let is_on = |rule: &dyn Rule| rule.network_window().is_some_and(|window| window.contains(when));
        let bits = self.network_rules().enumerate().filter(|(_, rule)| is_on(*rule));
        bits.fold(0, |state, (bit, _)| state | 1 << bit)
    }

    /// The rules about communication that may change something at an end, one bit each.
    pub(crate) fn network_reach(&self, end: &End) -> u64 {
        let hop = |is_inside| Hop { from: *end, to: *end, is_inside };
        let (inside, outside) = (hop(true), hop(false));
        let reaches = |rule: &dyn Rule| {
            rule.link(&inside).is_some()
                || rule.link(&outside).is_some()
                || rule.size(end.rank).to_bits() != 1f64.to_bits()
        };
        let bits = self.network_rules().enumerate().filter(|(_, rule)| reaches(*rule));
        bits.fold(0, |reach, (bit, _)| reach | 1 << bit)
    }

    /// What the rules of a state do to a hop.
    pub(crate) fn link(&self, state: u64, hop: &Hop) -> LinkChange {
        let rules = self.network_rules().enumerate().filter(|(bit, _)| state & (1 << bit) != 0);
        rules.filter_map(|(_, rule)| rule.link(hop)).fold(LinkChange::NONE, LinkChange::and)
    }

    /// By how much the rules of a state scale a rank's share of all-to-alls.
    pub(crate) fn size(&self, state: u64, rank: Rank) -> f64 {
        let rules = self.network_rules().enumerate().filter(|(bit, _)| state & (1 << bit) != 0);
        rules.map(|(_, rule)| rule.size(rank)).product()
    }

    /// When a rank dies: the earliest time, and the fewest iterations, of its deaths.
    #[must_use]
    pub fn deaths(&self, rank: Rank) -> (Option<SimTime>, Option<u32>) {
        let mut found = (None::<SimTime>, None::<u32>);
        for death in self.entries.iter().filter_map(|entry| entry.rule.death(rank)) {
            match death {
                Death::At(time) => found.0 = Some(found.0.map_or(time, |other| other.min(time))),
                Death::AfterIterations(count) => found.1 = Some(found.1.map_or(count, |other| other.min(count))),
            }
        }
        found
    }
}
