//! Collectives by NVSwitch (NVLS, NVLS trees) and parallel aggregated trees (PAT), as far as they are modelled: NCCL's own
//! formula for their time, and what its search for channels finds for the switches.
//!
//! *Under skew* everybody ends that time after the last member has come. For an all-reduce this is exact up to the latencies on
//! the way: nobody has the result before the last one's bytes have passed the switch, all of them. For all-gather and
//! reduce-scatter it is an upper form (who comes first might get rid of others' bytes meanwhile); the last arrival is a
//! lower one.

use super::shape::CommShape;
use super::{Algorithm, CollectiveCall};
use crate::cost::comm::Link;
use crate::perturb::LinkChange;
use crate::profile::Profile;
use crate::units::SimTime;

/// Bandwidths of a channel that NCCL tries inside a node and between nodes, in GB/s, on Hopper and on Blackwell. Source:
/// `sm90SpeedArrayIntra` and so on in `src/graph/search.cc` (2.30).
const INSIDE: [&[f64]; 2] = [
    &[60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0],
    &[90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0],
];
const OUTSIDE: [&[f64]; 2] = [
    &[48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12],
    &[
        96.0, 86.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24,
        0.12,
    ],
];

/// A bandwidth that is so little short of a step is that step: profiles round.
const TOLERANCE: f64 = 1e-6;

/// What the search finds for NVLink switches. Their channels are the GPUs through which the switches reduce.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switches {
    /// GPUs of the smallest node.
    pub gpus: u32,
    /// Channels.
    pub channels: u32,
    /// Bandwidth of a channel inside a node, in GB/s.
    pub intra_bandwidth: f64,
    /// Bandwidth of a channel between nodes, in GB/s.
    pub inter_bandwidth: f64,
}

/// The search of `ncclTopoCompute` in `src/graph/search.cc` for the pattern NVLS, on nodes whose GPUs and cards are alike.
/// `nvlink` is a GPU's bandwidth in GB/s. `None`: the switches do not reduce, or a node has one GPU.
pub(super) fn search(profile: &Profile, node_sizes: &[u32], nvlink: f64) -> Option<Switches> {
    let [major, _] = profile.device.compute_capability;
    let gpus = node_sizes.iter().copied().min().unwrap_or(1);
    if !profile.node.nvls || major < 9 || gpus < 2 {
        return None;
    }
    let generation = usize::from(major >= 10);
    // A GPU sends to every channel's switch once, and twice for its own.
    let fits_inside = |channels: u32, speed: f64| f64::from(channels + 1) * speed <= nvlink * (1.0 + TOLERANCE);
    if node_sizes.len() == 1 {
        let found = INSIDE[generation].iter().find(|speed| fits_inside(gpus, **speed));
        let intra_bandwidth = *found?;
        // Nothing crosses the network, which is then tried for up to twice as much.
        let fastest = INSIDE[generation].iter().rev().find(|speed| **speed >= 2.0 * intra_bandwidth);
        let inter_bandwidth = *fastest.unwrap_or(&INSIDE[generation][0]);
        return Some(Switches { gpus, channels: gpus, intra_bandwidth, inter_bandwidth });
    }
    let card = Link::network(profile, 1).bytes_per_s as f64 / 1e9;
    let cards = gpus.min(profile.node.nics);
    let on_cards = |speed: f64| cards * (card * (1.0 + TOLERANCE) / speed) as u32;
    let on_switches = |speed: f64| (0..=gpus).rev().find(|channels| fits_inside(*channels, speed)).unwrap_or(0);
    let mut best: Option<(u32, f64)> = None;
    for speed in OUTSIDE[generation] {
        if best.is_some_and(|(channels, best)| channels == gpus || speed / best <= 0.49) {
            break;
        }
        let channels = gpus.min(on_cards(*speed)).min(on_switches(*speed));
        let is_better =
            |(most, best): (u32, f64)| channels > most || f64::from(channels) * speed > f64::from(most) * best;
        if channels > 0 && best.is_none_or(is_better) {
            best = Some((channels, *speed));
        }
    }
    let (channels, intra_bandwidth) = best?;
    // The network may take more than the switches, up to twice as much.
    let mut inter_bandwidth = intra_bandwidth;
    for speed in OUTSIDE[generation].iter().rev().filter(|speed| **speed > intra_bandwidth) {
        if on_cards(*speed) < channels || inter_bandwidth >= 2.0 * intra_bandwidth {
            break;
        }
        inter_bandwidth = *speed;
    }
    Some(Switches { gpus, channels, intra_bandwidth, inter_bandwidth })
}

/// Ends by the formula, without the launch, which the formula has in it. False: out of range.
pub(super) fn formula(
    shape: &CommShape,
    call: &CollectiveCall,
    algorithm: Algorithm,
    launch: SimTime,
    arrivals: &[i64],
    out: &mut [i64],
) -> bool {
    let Some((latency, bytes)) = shape.tuned.as_deref().and_then(|tuned| tuned.expected(call, algorithm)) else {
        return false;
    };
    let change = shape.changes.as_deref().map_or(LinkChange::NONE, |changes| changes.worst(shape));
    let us = latency + bytes / change.bandwidth_factor;
    let duration = ((us * 1e6).round() as i64).saturating_add(change.latency.0).saturating_sub(launch.0);
    let last = arrivals.iter().copied().max().unwrap_or(0);
    let end = last.saturating_add(duration.max(0));
    out.fill(end);
    end <= super::window::LIMIT
}
