//! What can be wrong with an execution graph.

use std::path::PathBuf;

/// Failure to build, read, write or check a graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The bytes (or the text) are not a graph of this version. `offset` is the byte where that shows.
    #[error("not a usable execution graph: {message} (at byte {offset}); fetch the file again or collect it anew")]
    Format {
        /// Byte offset into the file or the text.
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
    /// The tables contradict each other, or the ranks' programs do.
    #[error("invalid execution graph{}: {message}", place(*rank, *op))]
    Invalid {
        /// Global rank concerned, if it is one.
        rank: Option<u32>,
        /// Index of the op in the rank's (or the template's) program, if it is one.
        op: Option<u32>,
        /// What is wrong, with the template or communicator it concerns.
        message: String,
    },
}

impl GraphError {
    pub(crate) fn format(offset: u64, message: impl Into<String>) -> Self {
        Self::Format { offset, message: message.into() }
    }

    pub(crate) fn invalid(rank: Option<u32>, op: Option<u32>, message: impl Into<String>) -> Self {
        Self::Invalid { rank, op, message: message.into() }
    }
}

fn place(rank: Option<u32>, op: Option<u32>) -> String {
    match (rank, op) {
        (Some(rank), Some(op)) => format!(" (rank {rank}, op {op})"),
        (Some(rank), None) => format!(" (rank {rank})"),
        (None, Some(op)) => format!(" (op {op})"),
        (None, None) => String::new(),
    }
}
