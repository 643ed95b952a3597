//! What can be wrong with a message program.

use std::path::PathBuf;

/// Failure to build, read or store a message program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The ops or their dependencies contradict each other.
    #[error("invalid message program{}: {message}", place(*rank, *op))]
    Invalid {
        /// Rank concerned, if it is one.
        rank: Option<u32>,
        /// Index of the op in the rank's program, if it is one.
        op: Option<u32>,
        /// What is wrong.
        message: String,
    },
    /// GOAL text that cannot be read.
    #[error("not usable as GOAL text: line {line}{}: {message}", inside(*rank, label))]
    Text {
        /// Line, from 1.
        line: u64,
        /// The rank whose block it is, if inside one.
        rank: Option<u32>,
        /// The label of the op concerned, if it has one.
        label: String,
        /// What is wrong there.
        message: String,
    },
    /// The bytes are not a stored message program of this version.
    #[error("not a usable message program: {message} (at byte {offset}); import the GOAL file again")]
    Format {
        /// Byte offset into the file.
        offset: u64,
        /// What is wrong there.
        message: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// `open`, `write`, ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl MessageError {
    pub(crate) fn invalid(
        rank: impl Into<Option<u32>>,
        op: impl Into<Option<u32>>,
        message: impl Into<String>,
    ) -> Self {
        Self::Invalid { rank: rank.into(), op: op.into(), message: message.into() }
    }
}

fn place(rank: Option<u32>, op: Option<u32>) -> String {
    match (rank, op) {
        (Some(rank), Some(op)) => format!(" (rank {rank}, op {op})"),
        (Some(rank), None) => format!(" (rank {rank})"),
        (None, _) => String::new(),
    }
}

fn inside(rank: Option<u32>, label: &str) -> String {
    let rank = rank.map_or(String::new(), |rank| format!(", rank {rank}"));
    if label.is_empty() { rank } else { format!("{rank}, {label}") }
}
