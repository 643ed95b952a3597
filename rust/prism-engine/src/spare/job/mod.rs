//! From a collected graph to fault tolerance: what the planner needs to know of a job, and what its steps take after groups
//! have failed.
//!
//! - [`anatomy`]: which ranks are a model-parallel group, where in an iteration their gradients are summed, what they hold;
//! - [`stacked`]: the graph of the same job with longer stacks and groups that have died, to be replayed like any other.

pub mod anatomy;
pub mod stacked;

use super::SpareError;
use crate::graph::GraphError;
use thiserror::Error;

/// A graph that fault tolerance cannot be planned or replayed from.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JobError {
    /// What was asked makes no sense.
    #[error(transparent)]
    Spare(#[from] SpareError),
    /// The job is not one of groups that train the same model on data of their own.
    #[error("the graph does not fit: {0}")]
    Unfit(String),
    /// The step cannot be cut into a part that is repeated and one that is not.
    #[error("the step cannot be stacked: {0}")]
    Graph(#[from] GraphError),
}
