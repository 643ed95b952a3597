//! The network under recorded collectives.
//!
//! A profile gives what a collective takes; the recording says what it took. The profile's latencies and bandwidths are scaled by
//! two common factors so that it explains as much as possible without being slower than what was recorded, and what remains
//! of each collective becomes a wait of its own behind it. So an unchanged replay repeats the recording, and with another network
//! the explained part changes.

use prism_engine::collective::{CollectiveCall, CollectiveKind, CommShape, message, uniform_cost};
use prism_engine::profile::{LowLatency, Profile};
use prism_engine::units::SimTime;
use std::collections::BTreeMap;

/// A communication and the least time it took once everybody was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sample {
    /// Of a group by number.
    Collective {
        /// Which group.
        group: u32,
        /// Kind, by number.
        kind: u8,
        /// Whole buffer.
        bytes: u64,
        /// Root.
        root: u32,
    },
    /// Between two global ranks.
    Message {
        /// Sender.
        source: u32,
        /// Receiver.
        destination: u32,
        /// Size.
        bytes: u64,
    },
}

/// Distinct communications that are looked at; the most frequent ones.
const MOST_SAMPLES: usize = 64;
/// Factors tried of latencies and of bandwidths.
const FACTORS: [f64; 19] =
    [1.0, 0.75, 1.25, 0.5, 1.6, 0.3, 2.0, 0.2, 3.0, 0.1, 4.5, 0.05, 7.0, 0.02, 12.0, 0.01, 25.0, 0.005, 100.0];
/// Times each factor is looked for, the other one kept.
const ROUNDS: usize = 3;
/// How much worse it is to be slower than the recording than to be faster.
const TOO_SLOW: i128 = 20;

/// What a profile was scaled by.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Scale {
    /// Of all latencies of communication.
    pub latency: f64,
    /// Of all its bandwidths.
    pub bandwidth: f64,
}

/// The profile, scaled to the samples: how often each occurred and the least it took, ns.
pub fn fit(
    profile: &Profile,
    samples: &BTreeMap<Sample, (u64, i64)>,
    members: impl Fn(u32) -> Vec<u32>,
) -> (Profile, Scale) {
    let mut chosen: Vec<(&Sample, &(u64, i64))> = samples.iter().collect();
    chosen.sort_by_key(|(sample, (count, _))| (std::cmp::Reverse(*count), **sample));
    chosen.truncate(MOST_SAMPLES);
    let penalty = |scale: Scale| {
        let candidate = scaled(profile, scale);
        let mut shapes: BTreeMap<u32, CommShape> = BTreeMap::new();
        let rest = |(sample, (count, took)): &(&Sample, &(u64, i64))| {
            let modelled = cost(&candidate, &mut shapes, sample, &members).as_ns();
            let rest = i128::from(*took) - i128::from(modelled);
            i128::from(*count) * if rest < 0 { -rest * TOO_SLOW } else { rest }
        };
        chosen.iter().map(rest).sum::<i128>()
    };
    let mut best = Scale { latency: 1.0, bandwidth: 1.0 };
    let mut least = penalty(best);
    for round in 0..2 * ROUNDS {
        for factor in FACTORS {
            let candidate =
                if round % 2 == 0 { Scale { bandwidth: factor, ..best } } else { Scale { latency: factor, ..best } };
            let found = penalty(candidate);
            if found < least {
                (least, best) = (found, candidate);
            }
        }
    }
    (scaled(profile, best), best)
}

fn cost(
    profile: &Profile,
    shapes: &mut BTreeMap<u32, CommShape>,
    sample: &Sample,
    members: &impl Fn(u32) -> Vec<u32>,
) -> SimTime {
    match *sample {
        Sample::Collective { group, kind, bytes, root } => {
            let shape = shapes.entry(group).or_insert_with(|| CommShape::new(&members(group), profile));
            let kind = CollectiveKind::from_u8(kind).expect("made from a kind");
            uniform_cost(shape, &CollectiveCall { kind, bytes, root, ops: 1 })
        }
        Sample::Message { source, destination, bytes } => {
            message(profile, source, destination, bytes, SimTime::ZERO, SimTime::ZERO).1
        }
    }
}

/// The profile with its communication scaled.
#[must_use]
pub fn scaled(profile: &Profile, scale: Scale) -> Profile {
    let mut profile = profile.clone();
    let latency = |ns: &mut u64| *ns = (*ns as f64 * scale.latency).round() as u64;
    let rate = |bytes: &mut u64| *bytes = ((*bytes as f64 * scale.bandwidth).round() as u64).max(1);
    latency(&mut profile.node.nvlink_latency_ns);
    rate(&mut profile.node.nvlink_bytes_per_s);
    let network = &mut profile.network;
    latency(&mut network.latency_ns);
    latency(&mut network.collective_launch_ns);
    rate(&mut network.nic_bytes_per_s);
    let low_latency = |protocol: &mut LowLatency| {
        rate(&mut protocol.nvlink_limit_bytes_per_s);
        rate(&mut protocol.network_limit_bytes_per_s);
        for ns in [
            &mut protocol.launch_ns,
            &mut protocol.ring_nvlink_latency_ns,
            &mut protocol.ring_latency_ns,
            &mut protocol.tree_nvlink_latency_ns,
            &mut protocol.tree_latency_ns,
        ] {
            latency(ns);
        }
    };
    network.ll.iter_mut().for_each(low_latency);
    network.ll128.iter_mut().for_each(low_latency);
    profile
}

/// The built-in profile of a device, by a part of its name.
#[must_use]
pub fn profile_of_device(device: &str) -> Option<&'static str> {
    let known = [
        ("H100", "h100-sxm"),
        ("H200", "h200-sxm"),
        ("A100", "a100-sxm"),
        ("GB200", "gb200-nvl72"),
        ("B200", "b200-sxm"),
        ("V100-SXM2", "v100-dgx1"),
    ];
    known.iter().find(|(word, _)| device.contains(word)).map(|(_, profile)| *profile)
}
