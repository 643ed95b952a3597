//! A session: training processes (live ranks) run against virtual ranks replayed from the graph, or, while collecting,
//! against absent peers.
//!
//! [`Session`] owns the threads and sockets, `state` is the machine they feed, `waiting` has its answers, `translate` turns
//! facts of the wire into ops, `exchange` has ranks give each other real values, `values` asks the user's rules, `identity` finds out which ranks a communicator has, `recorder` keeps op programs, `helper` serves other processes of a rank, `comms` answers requests about communicators, `summary` reports, `timeline` tells a profiler when ops ran.

mod comms;
mod exchange;
mod helper;
pub mod identity;
mod nccl_init;
mod nccl_memory;
mod process;
mod recorder;
mod session;
mod state;
mod summary;
mod timeline;
mod translate;
pub mod values;
mod waiting;

pub use process::ReleaseErrors;
pub use session::Session;
pub use summary::{CommInfo, CommunicatorSummary, RankStatus, RankSummary, RecordingInfo, Status, Summary};

use crate::cost::kernels::KernelTable;
use crate::graph::Graph;
use crate::perturb::Perturbations;
use crate::profile::Profile;
use crate::sim::SimError;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionMode {
    /// Record live ranks; their peers are absent.
    Collect,
    /// Run live ranks against the virtual ranks of a graph.
    Emulate,
}

/// Everything a session needs to know before it starts.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// What it is for.
    pub mode: SessionMode,
    /// Ranks of the target job.
    pub world_size: u32,
    /// Device and cluster to emulate.
    pub profile: Profile,
    /// Durations of live ranks' kernels that need no model.
    pub kernels: KernelTable,
    /// Ranks that run for real.
    pub live: Vec<u32>,
    /// The host's time is the CPU time that live ranks use, not constants of the profile: runs are not repeatable then.
    pub measured_host_time: bool,
    /// Slow-down of the compute of single ranks (1.3 = 30 % longer).
    pub slow: BTreeMap<u32, f64>,
    /// Changes to the job, of virtual and live ranks alike. Only when emulating.
    pub perturb: Perturbations,
}

impl SessionOptions {
    fn check(&self, graph: Option<&Graph>) -> Result<(), SessionError> {
        let config = |message: String| Err(SessionError::Config(message));
        if self.world_size == 0 {
            return config("the world size is 0".into());
        }
        if self.live.is_empty() {
            return config("no rank is to run: name at least one sandbox rank".into());
        }
        if let Some(rank) = self.live.iter().chain(self.slow.keys()).find(|rank| **rank >= self.world_size) {
            return config(format!("rank {rank} does not exist: the world has {} ranks", self.world_size));
        }
        if let Some((rank, factor)) = self.slow.iter().find(|(_, factor)| !factor.is_finite() || **factor <= 0.0) {
            return config(format!("slow-down of rank {rank} is {factor}: it must be a positive number"));
        }
        if self.mode == SessionMode::Collect && !self.perturb.is_empty() {
            return config("a graph is collected without perturbations".into());
        }
        if self.mode == SessionMode::Emulate && self.profile.overlap.is_some_and(|overlap| !overlap.is_none()) {
            return config("the profile has a table `overlap`, which only replay knows: emulate without it".into());
        }
        match (self.mode, graph) {
            (SessionMode::Emulate, None) => config("emulating needs the graph of the job".into()),
            (SessionMode::Emulate, Some(graph)) if graph.world_size() != self.world_size => config(format!(
                "the graph has {} ranks, the job {}: collect a graph with --world-size {}",
                graph.world_size(),
                self.world_size,
                self.world_size
            )),
            _ => Ok(()),
        }
    }
}

/// Why a session cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The options do not fit together.
    #[error("{0}")]
    Config(String),
    /// The socket cannot be made.
    #[error("cannot listen in {}: {source}", path.display())]
    Listen {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The simulation refuses the graph.
    #[error(transparent)]
    Sim(#[from] SimError),
}
