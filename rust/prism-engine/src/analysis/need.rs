//! Does the job fit onto its cards?

use super::diagnosis::DiagnoseOptions;
use super::overview::{MemoryReport, Ranges};
use crate::graph::Graph;
use serde::Serialize;

/// What the fullest cards need. Without NCCL's buffers, which a graph does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryNeed {
    /// Ranks that need most.
    pub ranks: Ranges,
    /// How many.
    pub num_ranks: u32,
    /// Most bytes the driver has handed out to each of them at a time.
    pub peak_bytes: u64,
    /// Op that reaches it.
    pub peak_op: u32,
    /// Iterations over by then.
    pub peak_iteration: u32,
    /// The work last issued before it, or nothing.
    pub after: String,
    /// What a CUDA context takes beside.
    pub context_bytes: u64,
    /// Memory of a card.
    pub card_bytes: u64,
    /// By how much it is too little; nothing if all fit.
    pub over_by_bytes: Option<u64>,
    /// Ranks that do not fit.
    pub num_over: u32,
}

impl MemoryNeed {
    /// `None` if the graph has no allocations.
    pub(crate) fn of(graph: &Graph, options: &DiagnoseOptions) -> Option<Self> {
        let report = MemoryReport::of(graph, &options.replay.profile, options.card_bytes);
        let fullest = report.fullest()?.clone();
        Some(Self {
            over_by_bytes: report.over_by(),
            ranks: fullest.ranks,
            num_ranks: fullest.num_ranks,
            peak_bytes: fullest.peak_bytes,
            peak_op: fullest.peak_op,
            peak_iteration: fullest.peak_iteration,
            after: fullest.after,
            context_bytes: report.context_bytes,
            card_bytes: report.card_bytes,
            num_over: report.num_over,
        })
    }

    /// The answer, if a card is too small.
    pub(crate) fn headline(&self) -> Option<String> {
        let over = self.over_by_bytes?;
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let after = if self.after.is_empty() { String::new() } else { format!(" (after {})", self.after) };
        let who = match self.ranks.0[..] {
            [(first, last)] if first == last => format!("rank {first} needs"),
            [(first, last)] => format!("ranks {first}-{last} need"),
            _ => format!("rank {} and {} more need", self.ranks.first(), self.num_ranks - 1),
        };
        Some(format!(
            "out of memory: {who} {} at op {}{after} of iteration {}, and {} of context; a card has {}: {} too little",
            gib(self.peak_bytes),
            self.peak_op,
            self.peak_iteration,
            gib(self.context_bytes),
            gib(self.card_bytes),
            gib(over)
        ))
    }

    pub(crate) fn words(&self) -> String {
        let share = 100.0 * (self.peak_bytes + self.context_bytes) as f64 / self.card_bytes.max(1) as f64;
        format!("the fullest card (rank {}) is {share:.0} % full", self.ranks.first())
    }
}
