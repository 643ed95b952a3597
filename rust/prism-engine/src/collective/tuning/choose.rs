//! The shortest expected time, and the channels and threads it is run on.

use super::model::{ALGORITHMS, Table};
use super::{Function, PROTOCOLS, Version};
use crate::collective::{Algorithm, Protocol};
use thiserror::Error;

/// Bytes per thread below which a call gives up channels and threads, by protocol number.
/// Source: `src/include/comm.h`, `NCCL_*_THREAD_THRESHOLD`.
const BYTES_PER_THREAD: [u64; 3] = [8, 8, 64];
/// Most threads of a block.
const MOST_THREADS: u32 = 640;
const WARP: u32 = 32;

/// What NCCL takes for a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// A broadcast or reduce over a ring is a chain.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// Most channels the call is spread over.
    pub channels: u32,
    /// Threads of each channel's block.
    pub threads: u32,
    /// Time that NCCL expects, in microseconds.
    pub expected_us: f64,
}

/// The settings leave a function without a way to run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("NCCL {version} has no algorithm for {function} with {settings}: {hint}")]
pub struct Refusal {
    /// The version.
    pub version: String,
    /// The function.
    pub function: &'static str,
    /// The settings that restrict it.
    pub settings: String,
    /// What to do.
    pub hint: &'static str,
}

impl Table {
    /// What NCCL takes for a call of `bytes` (of the full buffer), fused from `ops` per channel.
    ///
    /// # Errors
    /// If the settings forbid every way of the function.
    pub fn choose(&self, function: Function, bytes: u64, ops: u32) -> Result<Chosen, Refusal> {
        let mut best: Option<(f64, Algorithm, usize)> = None;
        for algorithm in ALGORITHMS {
            for protocol in 0..PROTOCOLS.len() {
                let time = self.time(function, algorithm, protocol, bytes, ops);
                let is_better = |time: &f64| best.is_none_or(|(least, ..)| *time < least);
                if let Some(time) = time.filter(is_better) {
                    best = Some((time, algorithm, protocol));
                }
            }
        }
        let (expected_us, algorithm, protocol) = best.ok_or_else(|| self.refusal(function))?;
        let (channels, threads) = self.spread(algorithm, protocol, bytes);
        Ok(Chosen { algorithm, protocol: PROTOCOLS[protocol], channels, threads, expected_us })
    }

    /// The version whose constants these are.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Channels that collectives of the communicator may use, after the settings.
    #[must_use]
    pub fn channels(&self) -> u32 {
        self.settings.channels(self.topology.channels, self.version.constants().rules.most_channels)
    }

    fn refusal(&self, function: Function) -> Refusal {
        let pairs =
            self.settings.pairs().iter().filter(|(name, _)| ["NCCL_ALGO", "NCCL_PROTO"].contains(&name.as_str()));
        let settings: Vec<_> = pairs.map(|(name, value)| format!("{name}={value}")).collect();
        Refusal {
            version: self.version.to_string(),
            function: function.name(),
            settings: if settings.is_empty() { "these GPUs".to_owned() } else { settings.join(" ") },
            hint: "allow Ring (or Tree, for AllReduce) and a protocol that the profile describes",
        }
    }

    /// Channels and threads, fewer where there is too little work for each thread. Source: `topoGetAlgoInfo`.
    fn spread(&self, algorithm: Algorithm, protocol: usize, bytes: u64) -> (u32, u32) {
        if matches!(algorithm, Algorithm::Nvls | Algorithm::NvlsTree) {
            return (self.switched_channels(), MOST_THREADS);
        }
        let is_tree = algorithm == Algorithm::Tree;
        let least =
            BYTES_PER_THREAD[protocol] * if !is_tree && protocol == 0 { u64::from(self.topology.ranks) } else { 1 };
        let mut threads = self.settings.threads(protocol, self.own_threads(is_tree, protocol));
        let mut channels = self.channels();
        let is_too_little = |channels: u32, threads: u32| bytes < u64::from(channels) * u64::from(threads) * least;
        if is_too_little(channels, threads) {
            channels = u32::try_from(bytes / (u64::from(threads) * least)).unwrap_or(channels).clamp(1, channels);
        }
        while is_too_little(channels, threads) && threads.is_multiple_of(128) {
            threads /= 2;
        }
        if protocol == 2 {
            threads += if is_tree { 4 * WARP } else { WARP };
        }
        threads = threads.max(3 * WARP);
        let is_wide = is_tree && self.version.constants().rules.tree_uses_all_threads;
        if is_wide || algorithm == Algorithm::Pat {
            threads = MOST_THREADS;
        }
        (channels, threads)
    }

    /// Channels of collectives by switches. Source: `ncclNvlsTuning` in `src/transport/nvls.cc`.
    fn switched_channels(&self) -> u32 {
        match (self.topology.compute_capability, self.topology.nodes) {
            (100.., 1) => 24,
            (100.., _) => 32,
            _ => 16,
        }
    }

    fn own_threads(&self, is_tree: bool, protocol: usize) -> u32 {
        // src/graph/topo.h: PCI_BW is 12 GB/s. Slower rings get by with half of the threads.
        let is_slow = self.topology.intra_bandwidth * f64::from(self.topology.searched_channels) <= 12.0;
        match protocol {
            1 => MOST_THREADS,
            2 if !is_tree && is_slow => 256,
            _ => 512,
        }
    }
}
