//! Device memory of all ranks, by how much they need at most.

use super::Ranges;
use crate::graph::Graph;
use crate::graph::op::OpKind;
use crate::ids::{Rank, TemplateId};
use crate::profile::Profile;
use serde::Serialize;
use std::collections::BTreeMap;

/// Points of a curve at most.
const POINTS: usize = 120;
/// Groups that are listed at most: the fullest ones.
const GROUPS: usize = 64;

/// Ranks that need the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryGroup {
    /// How many.
    pub num_ranks: u32,
    /// Which.
    pub ranks: Ranges,
    /// Most bytes the driver has handed out to each of them at a time.
    pub peak_bytes: u64,
    /// Op of the first of them that reaches the peak.
    pub peak_op: u32,
    /// Iterations over by then.
    pub peak_iteration: u32,
    /// The work last issued before it, or nothing.
    pub after: String,
    /// Bytes over the program of the first of them: the most of each of up to 120 equal stretches of ops.
    pub curve: Vec<u64>,
}

/// What all ranks need of their cards. Without NCCL's buffers, which a graph does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Memory of a card.
    pub card_bytes: u64,
    /// What a CUDA context takes of it.
    pub context_bytes: u64,
    /// By lowest rank; the fullest ones if there are many. Nothing if the graph has no allocations.
    pub groups: Vec<MemoryGroup>,
    /// Groups that are not listed.
    pub num_unlisted: u32,
    /// Ranks whose peak and context are more than a card has.
    pub num_over: u32,
}

impl MemoryReport {
    /// Needs of all ranks against the profile's card, or one of `card_bytes`. O(ops of all templates + ranks).
    #[must_use]
    pub fn of(graph: &Graph, profile: &Profile, card_bytes: Option<u64>) -> Self {
        let card_bytes = card_bytes.unwrap_or(profile.device.memory_bytes);
        let context_bytes = profile.device.context_bytes;
        let mut ranks: BTreeMap<TemplateId, Vec<u32>> = BTreeMap::new();
        (0..graph.world_size()).for_each(|rank| ranks.entry(graph.rank_template(Rank(rank))).or_default().push(rank));
        let mut by_peak: BTreeMap<u64, (Peak, Vec<u32>)> = BTreeMap::new();
        for (template, ranks) in ranks {
            let Some(peak) = Peak::of(graph, template) else { continue };
            let (first, together) = by_peak.entry(peak.bytes).or_insert_with(|| (peak.clone(), Vec::new()));
            if together.first().is_some_and(|known| ranks[0] < *known) {
                *first = peak;
            }
            together.extend(ranks);
            together.sort_unstable();
        }
        let is_over = |peak: u64| peak.saturating_add(context_bytes) > card_bytes;
        let over = by_peak.iter().filter(|(peak, _)| is_over(**peak)).map(|(_, (_, ranks))| ranks.len() as u32).sum();
        let num_unlisted = by_peak.len().saturating_sub(GROUPS);
        let mut groups: Vec<MemoryGroup> = by_peak.into_values().skip(num_unlisted).map(group).collect();
        groups.sort_by_key(|group| group.ranks.first());
        Self { card_bytes, context_bytes, groups, num_unlisted: num_unlisted as u32, num_over: over }
    }

    /// The ranks that need most.
    #[must_use]
    pub fn fullest(&self) -> Option<&MemoryGroup> {
        // Of equals (there are none), the lowest.
        self.groups.iter().rev().max_by_key(|group| group.peak_bytes)
    }

    /// Bytes by which the fullest card is too small; nothing if all fit.
    #[must_use]
    pub fn over_by(&self) -> Option<u64> {
        let need = self.fullest()?.peak_bytes.saturating_add(self.context_bytes);
        need.checked_sub(self.card_bytes).filter(|over| *over > 0)
    }
}

fn group((peak, ranks): (Peak, Vec<u32>)) -> MemoryGroup {
    MemoryGroup {
        num_ranks: ranks.len() as u32,
        ranks: Ranges::of(&ranks),
        peak_bytes: peak.bytes,
        peak_op: peak.op,
        peak_iteration: peak.iteration,
        after: peak.after,
        curve: peak.curve,
    }
}

#[derive(Clone)]
struct Peak {
    bytes: u64,
    op: u32,
    iteration: u32,
    after: String,
    curve: Vec<u64>,
}

impl Peak {
    /// `None` if the program allocates nothing.
    fn of(graph: &Graph, template: TemplateId) -> Option<Self> {
        let view = graph.template(template);
        let mut peak = Self { bytes: 0, op: 0, iteration: 0, after: String::new(), curve: Vec::new() };
        let (mut bytes, mut iteration, mut work, mut peak_work) = (0_u64, 0, None, None);
        let stretch = view.len().div_ceil(POINTS).max(1);
        for (number, op) in view.iter().enumerate() {
            match op.kind {
                OpKind::Alloc { bytes: more } => bytes = bytes.saturating_add(more),
                OpKind::Free { bytes: less } => bytes = bytes.saturating_sub(less),
                OpKind::IterationEnd => iteration += 1,
                OpKind::Compute { name, .. } => work = Some(name),
                _ => {}
            }
            if number % stretch == 0 {
                peak.curve.push(bytes);
            } else if let Some(last) = peak.curve.last_mut() {
                *last = bytes.max(*last);
            }
            if bytes > peak.bytes {
                (peak.bytes, peak.op, peak.iteration, peak_work) = (bytes, number as u32, iteration, work);
            }
        }
        peak.after = peak_work.map_or_else(String::new, |name| graph.name(name).to_owned());
        (peak.bytes > 0).then_some(peak)
    }
}
