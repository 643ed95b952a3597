//! What can be wrong with a trace.

use prism_engine::graph::GraphError;
use std::path::PathBuf;

/// Failure to import.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The operating system refused.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The bytes are not of the form that was asked for.
    #[error("{path} is not a {expected} (at byte {offset}): {message}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The form.
        expected: &'static str,
        /// Byte offset into the (unpacked) file.
        offset: u64,
        /// What is wrong there.
        message: String,
    },
    /// The files do not fit together, or lack what is needed. The text says what to do.
    #[error("{0}")]
    Unfit(String),
    /// The graph made of them is not one: a bug of the importer, or a job that cannot run.
    #[error("the imported job is no execution graph: {0}")]
    Graph(#[from] GraphError),
}

impl ImportError {
    pub(crate) fn unfit(message: impl Into<String>) -> Self {
        Self::Unfit(message.into())
    }
}
