//! Why an evaluation has no answer.

use crate::messages::MessageOp;
use std::fmt::Write;

/// Failure to evaluate a message program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluateError {
    /// A parameter is out of range.
    #[error("{message}")]
    Parameter {
        /// Which, and what it may be.
        message: String,
    },
    /// Times could pass 2^63.
    #[error(
        "times could pass 2^63 {unit}: rank {rank}'s op {op} ({what}) takes most; use coarser ticks or smaller parameters"
    )]
    Overflow {
        /// Ticks or picoseconds.
        unit: &'static str,
        /// Rank of the op that takes most.
        rank: u32,
        /// The op's index in its rank's program.
        op: u32,
        /// The op.
        what: String,
    },
    /// Nothing can happen any more, and ops are left.
    #[error("the job blocks: {}{}", chain(cause, *is_cycle), others(*num_waiting, cause.len()))]
    Blocked {
        /// The root: a cycle, each waiting for the next and the last for the first, or one op whose other half is missing.
        cause: Vec<Waiting>,
        /// Is it a cycle?
        is_cycle: bool,
        /// Sends and receives that wait, over all ranks.
        num_waiting: usize,
        /// Ops that did not end.
        num_unfinished: u64,
    },
    /// Everything ended, but messages were left.
    #[error("{num_messages} message(s) are never received; the first: {first}")]
    Unreceived {
        /// The first, by receiving rank.
        first: Waiting,
        /// How many.
        num_messages: usize,
    },
}

/// A send or receive that waits.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// Its rank.
    pub rank: u32,
    /// Its index in the rank's program.
    pub op: u32,
    /// What it is.
    pub what: MessageOp,
    /// The op that would end it, as rank and index; `None` if there is none.
    pub waits_for: Option<(u32, u32)>,
    /// What else is known.
    pub note: String,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}'s op {} ({})", self.rank, self.op, describe(self.what))
    }
}

/// An op in words.
pub(super) fn describe(op: MessageOp) -> String {
    match op {
        MessageOp::Calc { ticks } => format!("calc {ticks}"),
        MessageOp::Send { bytes, peer, tag } => format!("send of {bytes} bytes to rank {peer}, tag {tag}"),
        MessageOp::Recv { bytes, peer, tag } => {
            let peer = peer.map_or("any rank".to_owned(), |peer| format!("rank {peer}"));
            let tag = tag.map_or("any".to_owned(), |tag| tag.to_string());
            format!("receive of {bytes} bytes from {peer}, tag {tag}")
        }
    }
}

fn chain(cause: &[Waiting], is_cycle: bool) -> String {
    let mut text = String::new();
    for (index, waiting) in cause.iter().enumerate() {
        let half = if matches!(waiting.what, MessageOp::Send { .. }) { "receive" } else { "send" };
        let goal = match waiting.waits_for {
            Some((rank, op)) => format!("waits for rank {rank}'s op {op}"),
            None => format!("waits for a {half} that no rank has"),
        };
        let then = match (is_cycle, index) {
            (true, _) if index + 1 == cause.len() => ", behind the first",
            (true, _) => ", behind ",
            _ => "",
        };
        // Writing to a string cannot fail.
        let _ = write!(text, "{waiting} {goal}{}{then}", waiting.note);
    }
    text
}

fn others(num_waiting: usize, named: usize) -> String {
    match num_waiting.saturating_sub(named) {
        0 => String::new(),
        others => format!("; {others} more wait"),
    }
}
