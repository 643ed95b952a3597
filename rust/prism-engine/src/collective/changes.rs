//! A communicator some of whose links are slower than they should be, or whose members do not exchange equal shares.

use super::p2p;
use super::protocol::ProtocolCosts;
use super::shape::{CommShape, NONE};
use crate::cost::comm::{Link, node_of, transfer_time};
use crate::ids::Rank;
use crate::perturb::{End, Hop, LinkChange, Perturbations, World};
use crate::profile::Profile;
use crate::units::SimTime;
use std::sync::Arc;

/// One whole share of an all-to-all.
const WHOLE_PPM: u128 = 1_000_000;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Changes {
    /// The communicator as it should be: algorithms and protocols are chosen for it.
    pub(crate) healthy: CommShape,
    rules: Arc<Perturbations>,
    /// Which of the rules are in force.
    state: u64,
    /// By group rank, with the rank's own network card.
    own: Vec<End>,
    /// By group rank, with the cards of all members on its node.
    joint: Vec<End>,
    /// Share of all-to-alls by group rank, in millionths.
    shares: Vec<u128>,
}

impl CommShape {
    /// The communicator of `members` while the rules of `state` are in force.
    pub(crate) fn changed(members: &[u32], profile: &Profile, rules: &Arc<Perturbations>, state: u64) -> Self {
        let healthy = Self::new(members, profile);
        let mut shape = Self { id: Self::new_id(), ..healthy.clone() };
        let changes = Changes::new(healthy, members, profile, rules, state);
        let Self { ring, ring_class, trees, node, protocols, .. } = &mut shape;
        let mut classes = Classes::default();
        for (at, class) in ring_class.iter_mut().enumerate() {
            let (from, to) = (ring[at], ring[(at + 1) % ring.len()]);
            let change = changes.on_path(from, to, node);
            *class = classes.of(*class, change, protocols, |costs| &mut costs.ring_links);
        }
        let mut classes = Classes::default();
        for tree in trees {
            for (rank, class) in tree.class.iter_mut().enumerate().filter(|(rank, _)| tree.parent[*rank] != NONE) {
                let change = changes.on_path(rank as u32, tree.parent[rank], node);
                *class = classes.of(*class, change, protocols, |costs| &mut costs.tree_links);
            }
        }
        shape.changes = Some(Box::new(changes));
        shape
    }
}

/// Links that were changed, each once.
#[derive(Default)]
struct Classes(Vec<(u16, LinkChange, u16)>);

impl Classes {
    fn of(
        &mut self,
        class: u16,
        change: LinkChange,
        protocols: &mut [ProtocolCosts],
        links: impl Fn(&mut ProtocolCosts) -> &mut Vec<Link>,
    ) -> u16 {
        if change == LinkChange::NONE {
            return class;
        }
        if let Some((_, _, known)) = self.0.iter().find(|(of, by, _)| (*of, *by) == (class, change)) {
            return *known;
        }
        let mut number = 0;
        for costs in protocols {
            let links = links(costs);
            number = u16::try_from(links.len()).expect("fewer than 2^16 combinations of rules meet in a communicator");
            links.push(change.apply(links[usize::from(class)]));
        }
        self.0.push((class, change, number));
        number
    }
}

impl Changes {
    fn new(healthy: CommShape, members: &[u32], profile: &Profile, rules: &Arc<Perturbations>, state: u64) -> Self {
        let world = World::new(0, profile);
        let own: Vec<End> = members.iter().map(|rank| world.end(Rank(*rank), node_of(profile, *rank))).collect();
        let mut cards = vec![0; healthy.node_sizes.len()];
        healthy.node.iter().zip(&own).for_each(|(node, end)| cards[*node as usize] |= end.cards);
        let joint = healthy.node.iter().zip(&own).map(|(node, end)| End { cards: cards[*node as usize], ..*end });
        let share = |rank: &u32| (rules.size(state, Rank(*rank)) * WHOLE_PPM as f64).round() as u128;
        Self {
            rules: Arc::clone(rules),
            state,
            joint: joint.collect(),
            own,
            shares: members.iter().map(share).collect(),
            healthy,
        }
    }

    /// The hop of a ring or tree between two members.
    fn on_path(&self, from: u32, to: u32, node: &[u32]) -> LinkChange {
        let is_inside = node[from as usize] == node[to as usize];
        self.rules.link(self.state, &Hop { from: self.joint[from as usize], to: self.joint[to as usize], is_inside })
    }

    /// The slowest of the changes on the way round the ring, and the longest.
    pub(super) fn worst(&self, shape: &CommShape) -> LinkChange {
        let hops = shape.ring.iter().zip(shape.ring.iter().cycle().skip(1));
        hops.map(|(from, to)| self.on_path(*from, *to, &shape.node)).fold(LinkChange::NONE, |worst, change| {
            LinkChange {
                bandwidth_factor: worst.bandwidth_factor.min(change.bandwidth_factor),
                latency: worst.latency.max(change.latency),
            }
        })
    }

    /// A message between two members.
    pub(crate) fn between(&self, from: u32, to: u32, is_inside: bool) -> LinkChange {
        self.rules.link(self.state, &Hop { from: self.own[from as usize], to: self.own[to as usize], is_inside })
    }

    /// All-to-all by the port that is busy longest: a member receives its share from everybody and sends everybody theirs (on
    /// the way back, the other way round), over its NVLink port inside the node and the node's cards outside.
    pub(crate) fn all_to_all_duration(&self, shape: &CommShape, bytes_each: u64) -> SimTime {
        let mut nodes = vec![Vec::new(); shape.node_sizes.len()];
        shape.node.iter().enumerate().for_each(|(rank, node)| nodes[*node as usize].push(rank));
        let all: u128 = self.shares.iter().sum();
        nodes.iter().map(|ranks| self.node_duration(shape, ranks, all, bytes_each)).max().unwrap_or_default()
    }

    fn node_duration(&self, shape: &CommShape, ranks: &[usize], all: u128, bytes_each: u64) -> SimTime {
        let (members, outside) = (ranks.len() as u128, (self.shares.len() - ranks.len()) as u128);
        let bytes = |shares: u128| {
            u64::try_from(shares.saturating_mul(u128::from(bytes_each)).div_ceil(WHOLE_PPM)).unwrap_or(u64::MAX)
        };
        let here: u128 = ranks.iter().map(|rank| self.shares[*rank]).sum();
        let port = |rank: &usize| {
            let share = self.shares[*rank];
            let end = self.own[*rank];
            let link = self.rules.link(self.state, &Hop { from: end, to: end, is_inside: true }).apply(shape.nvlink);
            (link.occupancy(bytes((share * (members - 1)).max(here - share))), link.latency)
        };
        let (near, near_latency) =
            ranks.iter().map(port).reduce(|most, other| (most.0.max(other.0), most.1.max(other.1))).unwrap_or_default();
        if outside == 0 {
            return near + near_latency;
        }
        let end = self.joint[ranks[0]];
        let card = self.rules.link(self.state, &Hop { from: end, to: end, is_inside: false }).apply(shape.card);
        let rate = card.bytes_per_s.saturating_mul(u64::from((ranks.len() as u32).min(shape.cards)));
        let far = transfer_time(bytes((here * outside).max((all - here) * members)), rate);
        if shape.tuned.is_none() {
            return near + far + card.latency;
        }
        let waves = i64::try_from(p2p::waves(&shape.node_sizes)).unwrap_or(i64::MAX);
        (near + near_latency).max(far + SimTime(card.latency.0.saturating_mul(waves)))
    }
}
