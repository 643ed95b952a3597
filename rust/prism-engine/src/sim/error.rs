//! What can go wrong in a simulation. A program that does not fit its peers is a result like any other: it says who and where.

use super::blocked::{Blocked, list};
use super::signature::Signature;
use crate::ids::{EventId, Rank};
use serde::Serialize;
use thiserror::Error;

/// Why a simulation cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SimError {
    /// The options or the graph cannot be simulated.
    #[error("{message}")]
    Invalid {
        /// What is wrong.
        message: String,
    },
    /// A running rank made a communicator that the graph does not have.
    #[error(
        "rank {rank} makes communicator number {instance} of ranks {}, which the graph does not have",
        list(members)
    )]
    UnknownCommunicator {
        /// Who.
        rank: Rank,
        /// Members in group-rank order.
        members: Vec<u32>,
        /// How many communicators of the same members the rank made before.
        instance: usize,
    },
    /// Members of a communicator called different collectives.
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
    /// The two halves of a message have different sizes.
    #[error(
        "message {sequence} of communicator {communicator}: rank {source_rank} sends {sent_bytes} bytes, \
         rank {destination_rank} receives {received_bytes} bytes"
    )]
    MessageMismatch {
        /// Communicator of the simulation.
        communicator: u32,
        /// Who sends.
        source_rank: Rank,
        /// Who receives.
        destination_rank: Rank,
        /// Messages of this ordered pair before this one.
        sequence: u64,
        /// Size of the sending half.
        sent_bytes: u64,
        /// Size of the receiving half.
        received_bytes: u64,
    },
    /// Nothing can move and no rank can add anything.
    #[error("deadlock: nothing can move{}", lines(waiting))]
    Deadlock {
        /// Who waits for whom: a missing participant or the members of one cycle first, then all others.
        waiting: Vec<Blocked>,
    },
    /// The time between events was asked, one of which was never recorded.
    #[error("rank {rank} asks for the time of event {event}, which was never recorded")]
    NeverRecorded {
        /// Who.
        rank: Rank,
        /// Which event.
        event: EventId,
    },
    /// Times that do not fit into 2^63 ps with room for waits.
    #[error("{}{what}", place(*rank, *op))]
    TooLong {
        /// Whose.
        rank: Option<Rank>,
        /// Index of the op in the program of `rank` at which they grow too long.
        op: Option<u32>,
        /// What grows too long.
        what: String,
    },
    /// A result contradicts itself: a bug of the engine.
    #[error("bug of the engine, please report it: rank {rank}{}: {what}", of_communicator(*communicator))]
    Invariant {
        /// What is not as it must be.
        what: String,
        /// The rank concerned, or the first of its role.
        rank: Rank,
        /// The communicator concerned, if one is.
        communicator: Option<u32>,
    },
    /// An option that does not exist yet.
    #[error("{what} is not available")]
    Unavailable {
        /// Which.
        what: String,
    },
}

/// Members of a communicator called different collectives.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize)]
#[error(
    "collective {sequence} of communicator {communicator} ({} ranks): {} called {} (op {majority_op}), but {} called {} \
     (op {minority_op})",
    members.len(), ranks(majority_ranks), majority, ranks(minority_ranks), minority
)]
pub struct Mismatch {
    /// Communicator of the simulation.
    pub communicator: u32,
    /// Its members in group-rank order.
    pub members: Vec<u32>,
    /// Collectives of the communicator before this one.
    pub sequence: u64,
    /// Index of the op in the program of the first of `majority_ranks`.
    pub majority_op: u32,
    /// What most members called (of two equally frequent calls, the one of the lowest group rank).
    pub majority: Signature,
    /// Who did.
    pub majority_ranks: Vec<Rank>,
    /// Index of the op in the program of the first of `minority_ranks`.
    pub minority_op: u32,
    /// What others called.
    pub minority: Signature,
    /// Who did: the culprits.
    pub minority_ranks: Vec<Rank>,
}

impl SimError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid { message: message.into() }
    }

    pub(super) fn too_long(what: impl Into<String>) -> Self {
        Self::TooLong { rank: None, op: None, what: what.into() }
    }
}

fn place(rank: Option<Rank>, op: Option<u32>) -> String {
    match (rank, op) {
        (Some(rank), Some(op)) => format!("rank {rank}, op {op}: "),
        (Some(rank), None) => format!("rank {rank}: "),
        _ => String::new(),
    }
}

fn of_communicator(communicator: Option<u32>) -> String {
    communicator.map_or_else(String::new, |communicator| format!(", communicator {communicator}"))
}

fn lines(waiting: &[Blocked]) -> String {
    waiting.iter().fold(String::new(), |text, blocked| text + "\n  " + &blocked.to_string())
}

fn ranks(ranks: &[Rank]) -> String {
    let plain: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
    if plain.len() == 1 { format!("rank {}", plain[0]) } else { format!("ranks {}", list(&plain)) }
}
