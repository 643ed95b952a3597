//! What happens when communication shares the network, and when computing and communication share a GPU: a job message by
//! message ([`crate::lower`]).
//!
//! Three rules for messages that are under way at the same time:
//!
//! * [`Contention::None`]: each has the network to itself. Equals [`crate::replay`] to the picosecond;
//! * [`Contention::FairShare`]: each card, each NVLink port and each uplink of a switch, in each direction, is shared max-min fairly by the messages
//!   that pass it ([`fair`]);
//! * [`Contention::Fifo`]: a port carries one message at a time, in the order in which they are ready (at the receiving port:
//!   in the order in which their first bytes come). This is LogGOPSim's rule.
//!
//! A message never goes faster than alone: it is held back by ports, never sped up, so nothing ends earlier than without
//! contention. Under sharing a later arrival can make *others* end earlier or later, which is why none of the closed forms of
//! [`crate::collective`], no merging of equal ranks and no pruning holds here: every message is an event.
//!
//! *Overlap.* While communication of a rank is under way its computations may be slower ([`Overlap`]).
//!
//! All arithmetic is on integers, and events at the same time are taken in the order in which they were made: the same input
//! gives the same result.

mod events;
pub mod fair;
mod live;
mod network;
pub mod overlap;
mod queue;
mod report;
mod steps;
mod usage;

pub use overlap::Overlap;
pub use report::{OverlapReport, Traffic};
pub use usage::BusiestPort;

use crate::lower::{Job, Work};
use crate::sim::SimError;
use crate::units::SimTime;

/// All of a port, or full speed, in fixed point.
pub const FULL: u64 = 1 << 32;

/// How concurrent communication shares the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contention {
    /// It does not: every operation has the network to itself.
    #[default]
    None,
    /// Messages share ports fairly while they overlap.
    FairShare,
    /// A port carries one message at a time, in order of readiness.
    Fifo,
}

impl Contention {
    /// The rule of this name: `none`, `fair-share` or `fifo`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "none" => Some(Self::None),
            "fair-share" => Some(Self::FairShare),
            "fifo" => Some(Self::Fifo),
            _ => None,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::FairShare => "fair-share",
            Self::Fifo => "fifo",
        }
    }
}

/// Times of a job at message level.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// When each node is reached.
    pub(crate) ends: Vec<SimTime>,
    /// Time that computations ran slowed down, and time that this added, over all ranks.
    pub(crate) stretched: i128,
    pub(crate) added: i128,
}

/// More work than this, over all ranks, could leave the range of time.
const MAX_WORK: i128 = (i64::MAX / 4) as i128;

/// Evaluates a job. Refuses jobs whose work adds up to more than 26 days over all ranks (a factor of [`Overlap`] counted).
/// Fails if ranks wait for each other; a replay without contention says who.
pub fn evaluate(job: &Job, contention: Contention, overlap: &Overlap) -> Result<Evaluation, SimError> {
    check_range(job, overlap)?;
    if contention == Contention::None && overlap.is_none() {
        return steps::evaluate(job);
    }
    events::evaluate(job, contention, overlap)
}

/// The same event by event, whatever the rule.
pub fn evaluate_by_events(job: &Job, contention: Contention, overlap: &Overlap) -> Result<Evaluation, SimError> {
    check_range(job, overlap)?;
    events::evaluate(job, contention, overlap)
}

fn check_range(job: &Job, overlap: &Overlap) -> Result<(), SimError> {
    let nodes = job.nodes.work.iter().zip(&job.nodes.delay);
    let delays: i128 = nodes
        .map(|(work, delay)| {
            let delay = i128::from(delay.as_ps());
            if let Work::Compute(class, _) = work {
                delay * i128::from(overlap.ppm(*class)) / 1_000_000 + 1
            } else {
                delay
            }
        })
        .sum();
    let per_pattern: Vec<i128> = job.patterns.iter().map(crate::lower::Pattern::work).collect();
    let collectives: i128 = job.instances.iter().map(|instance| per_pattern[instance.pattern as usize]).sum();
    let time =
        |message: &crate::lower::Message| i128::from(message.occupancy.as_ps()) + i128::from(message.latency.as_ps());
    let messages: i128 = job.transfers.iter().map(|transfer| time(&transfer.message)).sum();
    if delays.saturating_add(collectives).saturating_add(messages) > MAX_WORK {
        return Err(SimError::invalid(
            "the work of all ranks adds up to more than 26 days: too much to evaluate by message",
        ));
    }
    Ok(())
}

/// Nothing moves any more but some nodes were not reached.
fn stuck(job: &Job, reached: usize) -> SimError {
    let left = job.nodes.len() - reached;
    SimError::invalid(format!(
        "ranks wait for each other: {left} of {} points are never reached; a replay without contention says who waits for whom",
        job.nodes.len()
    ))
}
