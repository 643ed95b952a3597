//! NCCL's protocols: what the links of a communicator are worth under each.

use crate::cost::comm::{Link, nanoseconds, share};
use crate::profile::{LowLatency, Profile};
use crate::units::SimTime;
use serde::Serialize;

/// How the messages of a collective tell that they have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// A flag per slice: full bandwidth, high latency.
    Simple,
    /// A flag in every 8 bytes: half the bandwidth, low latency.
    Ll,
    /// A flag in every 128 bytes.
    Ll128,
}

/// A hop of a ring or tree: over NVLink (`cards` 0) or over `cards` network cards, shared by `streams` transfers. `mesh` are the
/// communicator's GPUs of the node, where NVLink's bandwidth depends on them; else 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) cards: u32,
    pub(crate) streams: u32,
    pub(crate) mesh: u32,
}

/// What a link passes, and which share of it a message at the link's speed uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wiring {
    /// Network cards, all used alike; 0: NVLink.
    pub(crate) cards: u32,
    /// Used share of each, as a fraction.
    pub(crate) share: (u64, u64),
}

/// The links of a communicator under one protocol.
#[derive(Clone, Debug)]
pub(crate) struct ProtocolCosts {
    pub(crate) protocol: Protocol,
    /// Time from a rank's arrival at a collective until it takes part.
    pub(crate) launch: SimTime,
    /// Distinct links of the ring.
    pub(crate) ring_links: Vec<Link>,
    /// Distinct links of the trees, each with its static share.
    pub(crate) tree_links: Vec<Link>,
    /// What each healthy link of the ring is made of.
    pub(crate) ring_wires: Vec<Wiring>,
    /// What each healthy link of the trees is made of.
    pub(crate) tree_wires: Vec<Wiring>,
    /// Slices of a ring step.
    pub(crate) slices: u64,
    /// Most bytes of a ring step.
    pub(crate) ring_step_bytes: u64,
    pub(crate) tree_chunk_bytes: u64,
    pub(crate) chain_chunk_bytes: u64,
}

impl ProtocolCosts {
    /// Simple, then the other protocols of the profile.
    pub(crate) fn all(profile: &Profile, ring: &[Hop], tree: &[Hop]) -> Vec<Self> {
        let network = &profile.network;
        let low_latency = [(Protocol::Ll, network.ll), (Protocol::Ll128, network.ll128)];
        let mut all = vec![Self::simple(profile, ring, tree)];
        all.extend(low_latency.into_iter().filter_map(|(protocol, costs)| {
            costs.map(|costs| Self::low_latency(profile, protocol, &costs, ring, tree))
        }));
        all
    }

    fn simple(profile: &Profile, ring: &[Hop], tree: &[Hop]) -> Self {
        let network = &profile.network;
        let wire = |hop: &Hop| wiring(*hop, (base(profile, *hop).bytes_per_s, port(profile, *hop).bytes_per_s));
        let wires = |hops: &[Hop]| hops.iter().map(wire).collect();
        let links = |hops: &[Hop]| hops.iter().map(|hop| base(profile, *hop).shared_by(hop.streams)).collect();
        Self {
            protocol: Protocol::Simple,
            launch: nanoseconds(network.collective_launch_ns),
            ring_links: links(ring),
            tree_links: links(tree),
            ring_wires: wires(ring),
            tree_wires: wires(tree),
            slices: u64::from(network.ring_slices_per_step),
            ring_step_bytes: network.ring_step_bytes,
            tree_chunk_bytes: network.tree_chunk_bytes,
            chain_chunk_bytes: network.chain_chunk_bytes,
        }
    }

    fn low_latency(profile: &Profile, protocol: Protocol, costs: &LowLatency, ring: &[Hop], tree: &[Hop]) -> Self {
        let link = |hop: Hop, nvlink_latency_ns: u64, network_latency_ns: u64| {
            let (limit, latency) = if hop.cards == 0 {
                (costs.nvlink_limit_bytes_per_s, nvlink_latency_ns)
            } else {
                (costs.network_limit_bytes_per_s, network_latency_ns)
            };
            let bytes_per_s = share(base(profile, hop).bytes_per_s, costs.bandwidth_share).min(limit);
            Link { bytes_per_s, latency: nanoseconds(latency) }.shared_by(hop.streams)
        };
        let wires = |hops: &[Hop]| {
            let wire = |hop: &Hop| {
                let limit =
                    if hop.cards == 0 { costs.nvlink_limit_bytes_per_s } else { costs.network_limit_bytes_per_s };
                let [own, whole] = [base(profile, *hop), port(profile, *hop)]
                    .map(|link| share(link.bytes_per_s, costs.bandwidth_share));
                wiring(*hop, (own.min(limit), whole))
            };
            hops.iter().map(wire).collect()
        };
        let ring_link = |hop: &Hop| link(*hop, costs.ring_nvlink_latency_ns, costs.ring_latency_ns);
        let tree_link = |hop: &Hop| link(*hop, costs.tree_nvlink_latency_ns, costs.tree_latency_ns);
        Self {
            protocol,
            launch: nanoseconds(costs.launch_ns),
            ring_links: ring.iter().map(ring_link).collect(),
            tree_links: tree.iter().map(tree_link).collect(),
            ring_wires: wires(ring),
            tree_wires: wires(tree),
            slices: 1,
            ring_step_bytes: costs.chunk_bytes,
            tree_chunk_bytes: costs.chunk_bytes,
            chain_chunk_bytes: costs.chunk_bytes,
        }
    }
}

fn base(profile: &Profile, hop: Hop) -> Link {
    if hop.cards == 0 && hop.mesh > 0 { Link::nvlink_among(profile, hop.mesh) } else { port(profile, hop) }
}

/// All that the GPU or its node has for such a hop.
fn port(profile: &Profile, hop: Hop) -> Link {
    if hop.cards == 0 { Link::nvlink(profile) } else { Link::network(profile, hop.cards) }
}

/// A hop, `share` of whose bandwidth all its streams together can use.
fn wiring(hop: Hop, (part, whole): (u64, u64)) -> Wiring {
    Wiring { cards: hop.cards, share: (part, whole.saturating_mul(u64::from(hop.streams.max(1)))) }
}
