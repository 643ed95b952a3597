//! The models of collectives and of matching by name, with inputs and results as JSON: for checking them against
//! independently computed tables, and for asking "when does everybody get out" without a graph.
//!
//! Times are unit-free integers below 2^60. Ranks are numbers from 0. What [`completion`] returns:
//!
//! - rings, trees, chains and all-to-alls: the end of every rank;
//! - `matching`: `finish_ns` (end of the last op every rank completed), `stuck` (ranks that did not complete their program),
//!   `mismatches` (keys of the ops whose members disagree), `cycle_length` (ops of the shortest cycle of waits, or 0) and
//!   `n_missing` (calls that a rank which is through with its program never made);
//! - `job_explicit`: the end of every actor.
//!
//! Every input is checked: unknown, missing and ill-sized inputs are refused by name, as are numbers out of range.

mod direct;
mod explicit;
mod fields;
mod programs;
mod ring;
mod tree;
mod waits;

pub use explicit::{Call, Collective, Job, Key, Op, Outcome, P2pCost};
pub use waits::{Explanation, Wait};

use fields::Fields;
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

/// The models that [`completion`] evaluates.
pub const MODELS: [&str; 14] = [
    "ring_allreduce_uniform",
    "ring_reduce_scatter_or_all_gather",
    "ring_two_level",
    "ring_hetero_two_phase",
    "ring_credits",
    "ring_multi_channel",
    "hierarchical_allreduce",
    "tree_allreduce",
    "double_tree_allreduce",
    "chain_broadcast",
    "alltoall_round_sync",
    "alltoallv_port",
    "matching",
    "job_explicit",
];

/// Why a model gives no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VectorError {
    /// There is no such model.
    #[error("model `{model}` is not known; there are: {}", MODELS.join(", "))]
    UnknownModel {
        /// What was asked for.
        model: String,
    },
    /// An input is missing, unknown, of the wrong kind or out of range.
    #[error("{model}: `{key}` {what}")]
    Input {
        /// The model.
        model: String,
        /// The input.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// The actors of a job wait for each other.
    #[error("{model}: deadlock: {what}")]
    Deadlock {
        /// The model.
        model: String,
        /// Who waits for whom.
        what: String,
    },
    /// The actors of a job disagree about an op.
    #[error("{model}: {what}")]
    Mismatch {
        /// The model.
        model: String,
        /// Who disagrees about what.
        what: String,
    },
}

/// What a model answers; see the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Answer {
    /// The end of every rank, or of every actor.
    Ends(Vec<i64>),
    /// How programs match.
    Matching(Matching),
}

/// What the model `matching` answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Matching {
    /// End of the last op each rank completed; 0 without one.
    pub finish_ns: Vec<i64>,
    /// Ranks that did not complete their programs, ascending.
    pub stuck: Vec<u32>,
    /// Ops whose members disagree, as tuples of Python: `('C', comm, number)` or `('P', comm, source, destination, number)`.
    pub mismatches: Vec<String>,
    /// Ops of the shortest cycle of waits, or 0.
    pub cycle_length: usize,
    /// Calls that a rank which is through with its program never made.
    pub n_missing: usize,
}

/// What `model` answers to the named `inputs`, an object.
///
/// # Errors
/// [`VectorError`]; the message names the model and the input.
pub fn completion(model: &str, inputs: &Value) -> Result<Answer, VectorError> {
    let model = *MODELS
        .iter()
        .find(|known| **known == model)
        .ok_or_else(|| VectorError::UnknownModel { model: model.to_owned() })?;
    let fields = Fields::new(model, inputs)?;
    let ends = match model {
        "ring_multi_channel" => ring::channels(fields)?,
        "hierarchical_allreduce" => ring::hierarchical(fields)?,
        "tree_allreduce" => tree::single(fields)?,
        "double_tree_allreduce" => tree::double(fields)?,
        "chain_broadcast" => direct::chain_broadcast(fields)?,
        "alltoall_round_sync" => direct::round_synchronous(fields)?,
        "alltoallv_port" => direct::unequal(fields)?,
        "matching" => return programs::matching(fields).map(Answer::Matching),
        "job_explicit" => programs::job(fields)?,
        _ => ring::one_ring(fields)?,
    };
    Ok(Answer::Ends(ends))
}
