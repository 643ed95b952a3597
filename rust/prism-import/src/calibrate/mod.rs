//! The network of a profile, fitted to measured collectives.
//!
//! Four constants at most: a factor of NVLink's bandwidth and a time that every call takes besides, whatever its protocol; a factor
//! of the network's bandwidth and one of its latency. Those that no row can tell (nothing crosses nodes, or nothing stays
//! inside one) are left alone. More constants fit the rows better and other rank counts worse.
//!
//! The sum over rows of a Huber loss of ln(predicted / measured) is made least: small and large sizes count alike, and rows that
//! are further off than [`OUTLIER`] count by their distance, not by its square.
//!
//! The error that is told is that of rows that were not fitted to: with several files each is left out in turn, with one every
//! fifth row.

pub mod logs;

use crate::ImportError;
use crate::notes::Notes;
use logs::{Hints, Row};
use prism_engine::collective::{CollectiveCall, CommShape, uniform_cost};
use prism_engine::profile::{LowLatency, Profile};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Rows that are fitted to; of more, evenly chosen ones.
const MOST_ROWS: usize = 240;
/// Parts that are left out in turn of a single file.
const FOLDS: usize = 5;
/// Steps of the search for factors, and for the time of every call in microseconds: wide first.
const STEPS: [(f64, f64); 5] = [(1.6, 16.0), (1.2, 4.0), (1.06, 1.0), (1.02, 0.25), (1.005, 0.1)];
/// Bounds of every factor.
const BOUNDS: (f64, f64) = (0.02, 50.0);
/// Most microseconds that a call takes besides, or does not take.
const MOST_LAUNCH_US: f64 = 10_000.0;
/// Distance, as a logarithm, from which a row counts less.
const OUTLIER: f64 = 0.1;

/// What a profile's network is scaled by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Factors {
    /// Of NVLink's bandwidth, and of what protocols move over it at most.
    pub nvlink_bandwidth: f64,
    /// Of latencies inside a node, launches included. Not fitted: 1.
    pub node_latency: f64,
    /// Of the network cards' bandwidth.
    pub network_bandwidth: f64,
    /// Of the latencies of hops over the network.
    pub network_latency: f64,
    /// No factor: microseconds that every call takes besides, under any protocol.
    pub launch_us: f64,
}

impl Factors {
    /// Nothing is changed.
    pub const NONE: Self =
        Self { nvlink_bandwidth: 1.0, node_latency: 1.0, network_bandwidth: 1.0, network_latency: 1.0, launch_us: 0.0 };

    /// With the constant number `at` a step up or down.
    fn moved(mut self, at: usize, (factor, us): (f64, f64), is_up: bool) -> Self {
        let step = if is_up { factor } else { 1.0 / factor };
        let constant = match at {
            0 => &mut self.nvlink_bandwidth,
            1 => {
                let us = if is_up { us } else { -us };
                self.launch_us = (self.launch_us + us).clamp(-MOST_LAUNCH_US, MOST_LAUNCH_US);
                return self;
            }
            2 => &mut self.network_bandwidth,
            _ => &mut self.network_latency,
        };
        *constant = (*constant * step).clamp(BOUNDS.0, BOUNDS.1);
        self
    }
}

/// Relative errors |predicted / measured - 1|.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Half of the rows are better.
    pub median: f64,
    /// Nine of ten are better.
    pub p90: f64,
    /// The worst.
    pub worst: f64,
    /// Rows.
    pub rows: u64,
}

/// How a calibration went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The profile that was scaled.
    pub base: String,
    /// Rows in the files.
    pub rows: u64,
    /// Rows by collective, ranks and nodes.
    pub groups: BTreeMap<String, u64>,
    /// What the profile was changed by.
    pub factors: Factors,
    /// Errors of the profile as it was.
    pub before: Errors,
    /// Errors of the rows fitted to.
    pub fitted: Errors,
    /// Errors of rows left out while fitting to the others.
    pub left_out: Errors,
    /// How they were left out.
    pub left_out_by: &'static str,
    /// Repairs by name.
    pub repairs: Notes,
}

/// Fits the network of `base` to the measurements in files.
///
/// # Errors
/// A file cannot be read or has no measurement; there are too few rows.
pub fn calibrate(paths: &[PathBuf], base: &Profile, hints: &Hints) -> Result<(Profile, Summary), ImportError> {
    let mut notes = Notes::default();
    let mut rows = Vec::new();
    for (number, path) in (0..).zip(paths) {
        rows.extend(logs::read(path, number, hints, &mut notes)?);
    }
    let total = rows.len() as u64;
    let mut groups: BTreeMap<String, u64> = BTreeMap::new();
    for row in &rows {
        *groups.entry(format!("{:?}, {} ranks, {} nodes", row.kind, row.ranks, row.nodes)).or_default() += 1;
    }
    let stride = rows.len().div_ceil(MOST_ROWS).max(1);
    let rows: Vec<Row> = rows.into_iter().step_by(stride).collect();
    if rows.len() < 4 {
        return Err(ImportError::unfit(format!("{} measurements are too few to fit to: give at least 4", rows.len())));
    }
    let fitter = Fitter { base };
    let all: Vec<&Row> = rows.iter().collect();
    let factors = fitter.fit(&all);
    let part = |row: usize| if paths.len() > 1 { rows[row].file as usize } else { row % FOLDS };
    let parts = if paths.len() > 1 { paths.len() } else { FOLDS };
    let mut left_out = Vec::new();
    for out in 0..parts {
        let (held, kept): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(|row| part(*row) == out);
        let kept: Vec<&Row> = kept.into_iter().map(|row| &rows[row]).collect();
        let held: Vec<&Row> = held.into_iter().map(|row| &rows[row]).collect();
        if !held.is_empty() && kept.len() >= 3 {
            left_out.extend(fitter.errors(&scaled(base, fitter.fit(&kept)), &held));
        }
    }
    let profile = scaled(base, factors);
    let summary = Summary {
        base: base.name.clone(),
        rows: total,
        groups,
        factors,
        before: summary(fitter.errors(base, &all)),
        fitted: summary(fitter.errors(&profile, &all)),
        left_out: summary(left_out),
        left_out_by: if paths.len() > 1 { "file" } else { "every fifth row" },
        repairs: notes,
    };
    Ok((profile, summary))
}

fn summary(mut errors: Vec<f64>) -> Errors {
    errors.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = ((errors.len() as f64 * share).ceil() as usize).clamp(1, errors.len().max(1)) - 1;
        errors.get(index).copied().unwrap_or(0.0)
    };
    Errors { median: at(0.5), p90: at(0.9), worst: at(1.0), rows: errors.len() as u64 }
}

struct Fitter<'a> {
    base: &'a Profile,
}

impl Fitter<'_> {
    fn fit(&self, rows: &[&Row]) -> Factors {
        let crosses = rows.iter().any(|row| row.nodes > 1);
        let stays = rows.iter().any(|row| row.ranks > row.nodes);
        let free: Vec<usize> = (0..4).filter(|at| if *at < 2 { stays } else { crosses }).collect();
        let mut best = Factors::NONE;
        let mut least = self.loss(rows, best);
        for step in STEPS {
            loop {
                let before = least;
                for at in &free {
                    for is_up in [true, false] {
                        loop {
                            let candidate = best.moved(*at, step, is_up);
                            let loss = self.loss(rows, candidate);
                            if loss >= least {
                                break;
                            }
                            (least, best) = (loss, candidate);
                        }
                    }
                }
                if least >= before {
                    break;
                }
            }
        }
        best
    }

    fn loss(&self, rows: &[&Row], factors: Factors) -> f64 {
        let profile = scaled(self.base, factors);
        self.ratios(&profile, rows).into_iter().map(|ratio| huber(ratio.ln().abs())).sum()
    }

    fn errors(&self, profile: &Profile, rows: &[&Row]) -> Vec<f64> {
        self.ratios(profile, rows).into_iter().map(|ratio| (ratio - 1.0).abs()).collect()
    }

    /// Predicted over measured.
    fn ratios(&self, profile: &Profile, rows: &[&Row]) -> Vec<f64> {
        let mut shapes: BTreeMap<(u32, u32), CommShape> = BTreeMap::new();
        let ratio = |row: &&Row| {
            let shape = shapes
                .entry((row.ranks, row.nodes))
                .or_insert_with(|| CommShape::new(&members(row.ranks, row.nodes, self.base.node.gpus), profile));
            let call = CollectiveCall { kind: row.kind, bytes: row.bytes, root: 0, ops: 1 };
            uniform_cost(shape, &call).as_ns().max(1) as f64 / row.time_ns
        };
        rows.iter().map(ratio).collect()
    }
}

/// The square of a small distance, and of a large one as much as goes on straight from there.
fn huber(distance: f64) -> f64 {
    if distance <= OUTLIER { distance * distance / (2.0 * OUTLIER) } else { distance - OUTLIER / 2.0 }
}

/// Global ranks spread evenly over nodes of so many GPUs.
fn members(ranks: u32, nodes: u32, gpus: u32) -> Vec<u32> {
    let each = ranks.div_ceil(nodes.max(1)).min(gpus).max(1);
    (0..ranks).map(|rank| (rank / each) * gpus + rank % each).collect()
}

/// The profile with its network scaled.
#[must_use]
pub fn scaled(profile: &Profile, factors: Factors) -> Profile {
    let mut profile = profile.clone();
    let times = |number: &mut u64, factor: f64| *number = (*number as f64 * factor).round() as u64;
    let launch = |ns: &mut u64| {
        times(ns, factors.node_latency);
        *ns = (*ns as f64 + 1_000.0 * factors.launch_us).round().max(0.0) as u64;
    };
    let rate = |number: &mut u64, factor: f64| *number = ((*number as f64 * factor).round() as u64).max(1);
    rate(&mut profile.node.nvlink_bytes_per_s, factors.nvlink_bandwidth);
    times(&mut profile.node.nvlink_latency_ns, factors.node_latency);
    let network = &mut profile.network;
    rate(&mut network.nic_bytes_per_s, factors.network_bandwidth);
    times(&mut network.latency_ns, factors.network_latency);
    launch(&mut network.collective_launch_ns);
    let protocol = |protocol: &mut LowLatency| {
        rate(&mut protocol.nvlink_limit_bytes_per_s, factors.nvlink_bandwidth);
        rate(&mut protocol.network_limit_bytes_per_s, factors.network_bandwidth);
        launch(&mut protocol.launch_ns);
        times(&mut protocol.ring_nvlink_latency_ns, factors.node_latency);
        times(&mut protocol.tree_nvlink_latency_ns, factors.node_latency);
        times(&mut protocol.ring_latency_ns, factors.network_latency);
        times(&mut protocol.tree_latency_ns, factors.network_latency);
    };
    network.ll.iter_mut().for_each(protocol);
    network.ll128.iter_mut().for_each(protocol);
    profile
}
