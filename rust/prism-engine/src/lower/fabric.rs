//! The switches between nodes: leaves, whose cards reach each other through them alone, and uplinks to the switches above.

use crate::profile::Fabric;

/// Numbers of the uplinks of a cluster's leaves, from 0 on; each is two ports, up and down.
#[derive(Clone, Debug)]
pub(crate) struct FabricMap {
    fabric: Fabric,
    /// Network cards of a node.
    nics: u32,
    /// Leaves.
    leaves: u32,
    /// Uplinks of a leaf.
    uplinks: u32,
}

impl FabricMap {
    pub(crate) fn new(fabric: Fabric, nodes: u32, nics: u32) -> Self {
        let (leaves_of_group, cards) =
            if fabric.rails { (nics, fabric.nodes_per_leaf) } else { (1, fabric.nodes_per_leaf.saturating_mul(nics)) };
        // More than the cards there are would never be used.
        let present = fabric.nodes_per_leaf.min(nodes).saturating_mul(if fabric.rails { 1 } else { nics });
        let uplinks = ((f64::from(cards) / fabric.oversubscription) as u32).clamp(1, present.max(1));
        Self { fabric, nics, leaves: nodes.div_ceil(fabric.nodes_per_leaf) * leaves_of_group, uplinks }
    }

    /// Number of ports.
    pub(crate) fn len(&self) -> u32 {
        2 * self.leaves * self.uplinks
    }

    /// The switch that a node's card is at.
    fn leaf(&self, (node, card): (u32, u32)) -> u32 {
        let group = node / self.fabric.nodes_per_leaf;
        if self.fabric.rails { group * self.nics + card } else { group }
    }

    /// The ports that a message between two cards passes besides theirs: up from the one's leaf, down to the other's. `None`
    /// within a leaf.
    ///
    /// Whoever sends to a card takes the same uplink of its own leaf, and cards of a leaf have theirs in turn: the static
    /// routing of InfiniBand's fat trees by destination.
    pub(crate) fn between(&self, from: (u32, u32), to: (u32, u32)) -> Option<(u32, u32)> {
        let (source, destination) = (self.leaf(from), self.leaf(to));
        if source == destination {
            return None;
        }
        let place = to.0 % self.fabric.nodes_per_leaf;
        let turn = if self.fabric.rails { place } else { place * self.nics + to.1 };
        let uplink = turn % self.uplinks;
        Some((2 * (source * self.uplinks + uplink), 2 * (destination * self.uplinks + uplink) + 1))
    }

    /// What a port is.
    pub(crate) fn name(&self, port: u32) -> String {
        let direction = if port.is_multiple_of(2) { "up" } else { "down" };
        let (leaf, uplink) = (port / 2 / self.uplinks, port / 2 % self.uplinks);
        let (group, rail) = if self.fabric.rails { (leaf / self.nics, Some(leaf % self.nics)) } else { (leaf, None) };
        let first = group * self.fabric.nodes_per_leaf;
        let of_rail = rail.map_or_else(String::new, |rail| format!(" on rail {rail}"));
        let last = first + self.fabric.nodes_per_leaf - 1;
        format!("uplink {uplink} of the leaf of nodes {first} to {last}{of_rail}, {direction}")
    }
}
