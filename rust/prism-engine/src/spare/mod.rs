//! SPARe: stacked parallelism with adaptive reordering, a scheme that lets data-parallel training go on when groups of GPUs
//! fail (arXiv 2603.00357), and what it is to be compared with.
//!
//! `N` model-parallel *groups* train on `N` *shard types*, one per group. Every group holds the data of `r` types, its
//! *stack*, and computes the first `S` entries of it; then one all-reduce sums the gradients of all types. When a group
//! fails, the others still cover its types, if need be after reordering their stacks or computing one entry more. Only when a
//! type has lost all its hosts (*wipe-out*) does the job restart from a checkpoint.
//!
//! - [`ruler`], [`placement`]: which group holds which types;
//! - [`matching`], [`layout`]: the controller: who computes what after a failure;
//! - [`job`]: what a collected graph says about all that, and its steps after failures, for replay;
//! - [`laws`]: closed forms, each with the range in which it holds;
//! - [`simulate`]: discrete-event simulation of SPARe and of other policies on one failure trace;
//! - [`plan`]: redundancy, placement and checkpoint interval for the least expected time.
//!
//! Times are seconds: a job takes weeks, and no input is known to a nanosecond.

pub mod job;
pub mod laws;
pub mod layout;
pub mod matching;
pub mod placement;
pub mod plan;
pub mod ruler;
pub mod simulate;

use thiserror::Error;

/// An input that makes no sense, or a job that cannot get anywhere.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SpareError {
    /// An input is out of its range.
    #[error("{field} is {value}: {expected}")]
    Invalid {
        /// Which input.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// The job would never end.
    #[error("no progress: {0}")]
    NoProgress(String),
}

impl SpareError {
    pub(crate) fn invalid(field: &'static str, value: impl std::fmt::Display, expected: impl Into<String>) -> Self {
        Self::Invalid { field, value: value.to_string(), expected: expected.into() }
    }
}

/// Refuses numbers that are not finite and above zero.
pub(crate) fn positive(field: &'static str, value: f64) -> Result<f64, SpareError> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(SpareError::invalid(field, value, "it must be a finite number above 0"))
}

/// Refuses numbers that are not finite or below zero.
pub(crate) fn not_negative(field: &'static str, value: f64) -> Result<f64, SpareError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(SpareError::invalid(field, value, "it must be a finite number of at least 0"))
}

/// Largest number of groups: every layout is kept in memory.
pub const MAX_GROUPS: u32 = 1 << 20;

/// Refuses numbers of groups that are no job.
pub(crate) fn check_groups(n: u32) -> Result<(), SpareError> {
    if (2..=MAX_GROUPS).contains(&n) {
        return Ok(());
    }
    Err(SpareError::invalid("n", n, format!("there must be 2 to {MAX_GROUPS} groups")))
}

/// Refuses redundancies that `n` groups cannot have.
pub(crate) fn check_redundancy(n: u32, r: u32) -> Result<(), SpareError> {
    check_groups(n)?;
    if (1..=n).contains(&r) {
        return Ok(());
    }
    Err(SpareError::invalid("r", r, format!("a shard type has 1 to {n} hosts among {n} groups")))
}
