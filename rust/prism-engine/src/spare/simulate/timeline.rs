//! What a simulated training did when, for a picture of it.

use serde::Serialize;

/// What all groups are busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Steps.
    Train,
    /// Saving that holds the job.
    Save,
    /// A failure is being noticed, and communicators shrink.
    Detect,
    /// Moved stack entries are computed for the current step.
    Patch,
    /// Waiting for the repair of a group without which no restart is possible.
    Repair,
    /// A restart.
    Restart,
    /// A spare group takes over.
    Swap,
    /// Repaired groups join again.
    Rejoin,
}

/// A stretch of time in which nothing changes but the steps done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// What is done.
    pub activity: Activity,
    /// From, seconds.
    pub start_s: f64,
    /// To, seconds.
    pub end_s: f64,
    /// Steps done at the end; falls at restarts.
    pub step: u64,
    /// Live groups.
    pub live: u32,
    /// Stack entries per step.
    pub stacks: f64,
}

/// Most spans of one timeline; what comes later is left out (the last span then ends before the training).
pub const MAX_SPANS: usize = 1 << 20;

/// Spans, neighbours of one kind as one.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    spans: Option<Vec<Span>>,
}

impl Timeline {
    pub(super) fn recording() -> Self {
        Self { spans: Some(Vec::new()) }
    }

    pub(super) fn add(&mut self, span: Span) {
        let Some(spans) = &mut self.spans else { return };
        if span.end_s <= span.start_s {
            return;
        }
        if let Some(last) = spans.last_mut()
            && last.activity == span.activity
            && last.live == span.live
            && last.stacks.to_bits() == span.stacks.to_bits()
            && last.end_s.to_bits() == span.start_s.to_bits()
        {
            (last.end_s, last.step) = (span.end_s, span.step);
        } else if spans.len() < MAX_SPANS {
            spans.push(span);
        }
    }

    pub(super) fn spans(self) -> Vec<Span> {
        self.spans.unwrap_or_default()
    }
}
