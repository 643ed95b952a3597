//! The ports messages pass: network cards of nodes, NVLink ports of GPUs and uplinks of switches, each in two directions.

use super::fabric::FabricMap;
use super::pattern::Wire;
use crate::collective::CommShape;
use crate::cost::comm::node_of;
use crate::ids::Rank;
use crate::perturb::World;
use crate::profile::Profile;

/// Numbers of the ports of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct PortMap {
    world: World,
    profile_gpus: u32,
    nodes: u32,
    /// `None`: nothing between the cards holds messages back.
    fabric: Option<FabricMap>,
}

impl PortMap {
    pub(crate) fn new(world_size: u32, profile: &Profile) -> Self {
        let nodes = world_size.div_ceil(profile.node.gpus.max(1));
        let fabric = profile.network.fabric.map(|fabric| FabricMap::new(fabric, nodes, profile.node.nics));
        Self { world: World::new(world_size, profile), profile_gpus: profile.node.gpus, nodes, fabric }
    }

    /// Number of ports.
    pub(crate) fn len(&self) -> u32 {
        self.first_uplink() + self.fabric.as_ref().map_or(0, FabricMap::len)
    }

    fn first_uplink(&self) -> u32 {
        2 * (self.nodes * self.world.nics + self.world.size)
    }

    /// What a port is.
    pub(crate) fn name(&self, port: u32) -> String {
        if let (Some(fabric), Some(port)) = (&self.fabric, port.checked_sub(self.first_uplink())) {
            return fabric.name(port);
        }
        let direction = if port.is_multiple_of(2) { "sending" } else { "receiving" };
        let cards = self.nodes * self.world.nics;
        if let Some(rank) = (port / 2).checked_sub(cards) {
            return format!("NVLink of rank {rank}, {direction}");
        }
        let (node, card) = (port / 2 / self.world.nics, port / 2 % self.world.nics);
        format!("network card {card} of node {node}, {direction}")
    }

    fn card(&self, (node, card): (u32, u32)) -> u32 {
        2 * (node * self.world.nics + card)
    }

    fn nvlink(&self, rank: u32) -> u32 {
        2 * (self.nodes * self.world.nics + rank)
    }

    /// What is needed to find the ports of a communicator's messages.
    pub(crate) fn layout(&self, members: &[u32], shape: &CommShape) -> Layout {
        let mut cards = vec![Vec::new(); shape.node_sizes.len()];
        let mut place = vec![0; members.len()];
        let mut count = vec![0; shape.node_sizes.len()];
        let mut number = vec![0; shape.node_sizes.len()];
        for (member, rank) in members.iter().enumerate() {
            let node = shape.node[member] as usize;
            let own = self.world.nic_of(Rank(*rank));
            if !cards[node].contains(&own) {
                cards[node].push(own);
            }
            place[member] = count[node];
            count[node] += 1;
            number[node] = rank / self.profile_gpus;
        }
        // The members' own cards first, then the others of the node.
        for own in &mut cards {
            let others: Vec<u32> = (0..self.world.nics).filter(|card| !own.contains(card)).collect();
            own.extend(others);
        }
        Layout { cards, place, number }
    }

    /// The ports of a message between two members, sending ones first; appended to `into`.
    pub(crate) fn of_members(
        &self,
        (members, shape, layout): (&[u32], &CommShape, &Layout),
        (from, to): (u32, u32),
        wire: Wire,
        into: &mut Vec<u32>,
    ) {
        let (source, destination) = (members[from as usize], members[to as usize]);
        let (from, to) = (from as usize, to as usize);
        match wire {
            Wire::NvLink | Wire::Card => self.of_ranks((source, destination), wire, into),
            Wire::Spread(cards) => {
                let end = |member: usize| {
                    let node = shape.node[member] as usize;
                    (layout.number[node], layout.cards[node][(layout.place[member] % cards) as usize])
                };
                self.of_cards(|_| (end(from), end(to)), 1, into);
            }
            Wire::Striped(cards) => {
                let end = |member: usize, number: usize| {
                    let node = shape.node[member] as usize;
                    (layout.number[node], layout.cards[node][number])
                };
                self.of_cards(|number| (end(from, number), end(to, number)), cards as usize, into);
            }
        }
    }

    /// The ports of a message over so many pairs of cards (node and card) at once.
    fn of_cards(&self, pair: impl Fn(usize) -> ((u32, u32), (u32, u32)), count: usize, into: &mut Vec<u32>) {
        let uplinks = self.first_uplink();
        let crossing = |number| {
            let (from, to) = pair(number);
            self.fabric.as_ref().and_then(|fabric| fabric.between(from, to))
        };
        into.extend((0..count).map(|number| self.card(pair(number).0)));
        into.extend((0..count).filter_map(crossing).map(|(up, _)| uplinks + up));
        into.extend((0..count).filter_map(crossing).map(|(_, down)| uplinks + down));
        into.extend((0..count).map(|number| self.card(pair(number).1) + 1));
    }

    /// The ports of a message between two ranks.
    pub(crate) fn of_ranks(&self, (source, destination): (u32, u32), wire: Wire, into: &mut Vec<u32>) {
        if wire == Wire::NvLink {
            into.extend([self.nvlink(source), self.nvlink(destination) + 1]);
            return;
        }
        let end = |rank: u32| (rank / self.profile_gpus, self.world.nic_of(Rank(rank)));
        self.of_cards(|_| (end(source), end(destination)), 1, into);
    }
}

/// Where the members of a communicator are.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Cards of each node of the shape, the members' own first.
    cards: Vec<Vec<u32>>,
    /// Members on the same node before each member.
    place: Vec<u32>,
    /// Node of the cluster, by node of the shape.
    number: Vec<u32>,
}

/// The wire between two ranks.
pub(super) fn wire_between(profile: &Profile, from: u32, to: u32) -> Wire {
    if node_of(profile, from) == node_of(profile, to) { Wire::NvLink } else { Wire::Card }
}
