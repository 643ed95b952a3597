//! A communicator laid out on a cluster: ring order, trees, and the link behind every hop.

use super::changes::Changes;
use super::channels::Tuned;
use super::dtree;
use super::protocol::{Hop, ProtocolCosts};
use super::turns::Rounds;
use crate::contention::FULL;
use crate::cost::comm::{Link, node_of};
use crate::profile::Profile;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// No parent, or no child.
pub(crate) const NONE: u32 = u32::MAX;

/// A directed tree over group ranks. Both directions of an edge have the same link.
#[derive(Clone, Debug)]
pub(crate) struct RankTree {
    /// Parent by group rank, [`NONE`] for the root.
    pub(crate) parent: Vec<u32>,
    /// Children by group rank, [`NONE`] in unused places: at most two nodes below, and the next rank of the chain.
    children: Vec<[u32; 3]>,
    /// Index into [`ProtocolCosts::tree_links`] of the edge to the parent.
    pub(crate) class: Vec<u16>,
    /// Every rank after its parent.
    pub(crate) order: Vec<u32>,
}

/// Everything about a communicator's place on the cluster that its collectives need, computed once: O(members) memory.
#[derive(Clone, Debug)]
pub struct CommShape {
    /// Distinguishes shapes in caches; equal for clones.
    pub(crate) id: u64,
    /// Group rank by ring position: node after node, and group-rank order inside a node.
    pub(crate) ring: Vec<u32>,
    /// Ring position by group rank.
    pub(crate) position: Vec<u32>,
    /// Index into [`ProtocolCosts::ring_links`] of the link from each position to the next.
    pub(crate) ring_class: Vec<u16>,
    /// The two trees; each carries half of the bytes.
    pub(crate) trees: [RankTree; 2],
    /// Members on each node, nodes in ring order.
    pub(crate) node_sizes: Vec<u32>,
    /// Index into `node_sizes` by group rank.
    pub(crate) node: Vec<u32>,
    /// In which round of NCCL's schedule two members exchange messages.
    pub(crate) rounds: Rounds,
    /// One GPU's way to the other GPUs of its node; in a mesh, of the node where it is widest.
    pub(crate) nvlink: Link,
    /// One GPU's way to one other GPU of its node.
    pub(crate) pair: Link,
    /// All NVLinks of one GPU.
    pub(crate) port: Link,
    /// One network card.
    pub(crate) card: Link,
    /// Network cards of a node.
    pub(crate) cards: u32,
    /// What can carry a collective: NCCL's Simple protocol first, then the others of the profile.
    pub(crate) protocols: Vec<ProtocolCosts>,
    /// NCCL's tuning, if the profile asks for it.
    pub(crate) tuned: Option<Arc<Tuned>>,
    /// What perturbations have made of it.
    pub(crate) changes: Option<Box<Changes>>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl CommShape {
    /// Lays out the communicator whose group ranks `0..` are the global ranks `members`.
    #[must_use]
    pub fn new(members: &[u32], profile: &Profile) -> Self {
        let by_node = group_by_node(members, profile);
        let ring: Vec<u32> = by_node.iter().flatten().copied().collect();
        let mut position = vec![0; ring.len()];
        for (at, &rank) in ring.iter().enumerate() {
            position[rank as usize] = at as u32;
        }
        let mut node = vec![0; ring.len()];
        for (at, ranks) in by_node.iter().enumerate() {
            for &rank in ranks {
                node[rank as usize] = at as u32;
            }
        }
        let node_sizes: Vec<_> = by_node.iter().map(|ranks| ranks.len() as u32).collect();
        let (ring_hops, ring_class) = ring_hops(&node_sizes, profile);
        let (tree_hops, trees) = rank_trees(&by_node, profile);
        let ways = node_sizes.iter().map(|members| Link::nvlink_among(profile, *members));
        let nvlink = ways.max_by_key(|link| link.bytes_per_s).unwrap_or_else(|| Link::nvlink(profile));
        Self {
            id: Self::new_id(),
            ring,
            position,
            ring_class,
            trees,
            tuned: Tuned::new(profile, &node_sizes).map(Arc::new),
            rounds: Rounds::new(&node_sizes),
            node_sizes,
            node,
            nvlink,
            pair: Link::nvlink_among(profile, 2),
            port: Link::nvlink(profile),
            card: Link::network(profile, 1),
            cards: profile.node.nics,
            protocols: ProtocolCosts::all(profile, &ring_hops, &tree_hops),
            changes: None,
        }
    }

    /// An id no other shape has.
    pub(super) fn new_id() -> u64 {
        NEXT_ID.fetch_add(1, Ordering::Relaxed)
    }

    /// Share of a GPU's NVLink port, of [`FULL`], that a message to another GPU of its node has.
    pub(crate) fn pair_share(&self) -> u64 {
        let share = u128::from(FULL) * u128::from(self.pair.bytes_per_s) / u128::from(self.port.bytes_per_s.max(1));
        u64::try_from(share).unwrap_or(FULL).clamp(1, FULL)
    }

    /// Number of members.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// Has it no member?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Group ranks with which `group_rank` exchanges data in rings and trees: previous and next on the ring, parent and
    /// children in both trees. Sorted, without `group_rank` itself.
    #[must_use]
    pub fn data_neighbours(&self, group_rank: u32) -> Vec<u32> {
        let n = self.len() as u32;
        let at = self.position[group_rank as usize];
        let mut peers = vec![self.ring[((at + n - 1) % n) as usize], self.ring[((at + 1) % n) as usize]];
        for tree in &self.trees {
            peers.push(tree.parent[group_rank as usize]);
            peers.extend(tree.children[group_rank as usize]);
        }
        peers.retain(|&peer| peer != NONE && peer != group_rank);
        peers.sort_unstable();
        peers.dedup();
        peers
    }
}

/// Group ranks by node; nodes in order of their first member, members in group-rank order.
fn group_by_node(members: &[u32], profile: &Profile) -> Vec<Vec<u32>> {
    let mut index = BTreeMap::new();
    let mut nodes: Vec<Vec<u32>> = Vec::new();
    for (rank, &global) in members.iter().enumerate() {
        let at = *index.entry(node_of(profile, global)).or_insert_with(|| {
            nodes.push(Vec::new());
            nodes.len() - 1
        });
        nodes[at].push(rank as u32);
    }
    nodes
}

/// A table of distinct hops.
#[derive(Default)]
struct Classes(Vec<Hop>);

impl Classes {
    fn of(&mut self, hop: Hop) -> u16 {
        let at = self.0.iter().position(|known| *known == hop).unwrap_or_else(|| {
            self.0.push(hop);
            self.0.len() - 1
        });
        u16::try_from(at).expect("a cluster has few kinds of hops: one per number of cards of a node")
    }
}

/// The cards that carry the hop between two nodes.
fn cards_between(members: u32, other_members: u32, profile: &Profile) -> u32 {
    members.min(other_members).min(profile.node.nics)
}

/// The communicator's GPUs of a node, if NVLink's bandwidth depends on them.
fn mesh(profile: &Profile, members: u32) -> u32 {
    if profile.node.nvlink_rings.is_empty() { 0 } else { members }
}

fn ring_hops(nodes: &[u32], profile: &Profile) -> (Vec<Hop>, Vec<u16>) {
    let mut hops = Classes::default();
    let mut class = Vec::new();
    for (at, &node) in nodes.iter().enumerate() {
        let inside = Hop { cards: 0, streams: 1, mesh: mesh(profile, node) };
        class.extend((1..node).map(|_| hops.of(inside)));
        let next = nodes[(at + 1) % nodes.len()];
        let out = Hop { cards: cards_between(node, next, profile), streams: 1, mesh: 0 };
        class.push(hops.of(if nodes.len() == 1 { inside } else { out }));
    }
    (hops.0, class)
}

/// The two trees over the nodes, continued inside every node by a chain that starts at its first member.
///
/// A card carries, in each direction, one stream per tree edge of its node (an inner node of one tree is a leaf of the
/// other, so there are at most four; two for two nodes), and a GPU one stream per chain edge. Each stream has an equal,
/// static share.
fn rank_trees(by_node: &[Vec<u32>], profile: &Profile) -> (Vec<Hop>, [RankTree; 2]) {
    let node_trees = dtree::double_tree(by_node.len());
    let network_streams = max_degree(&node_trees, by_node.len());
    let longest = by_node.iter().map(Vec::len).max().unwrap_or(0);
    let inside = |node: usize| {
        let mesh = mesh(profile, by_node[node].len() as u32);
        Hop { cards: 0, streams: if longest > 2 { 4 } else { 2 }, mesh }
    };
    let members = |node: usize| by_node[node].len() as u32;
    let mut hops = Classes::default();
    let trees = node_trees.map(|node_tree| {
        let mut tree = RankTree::unconnected(by_node.iter().map(Vec::len).sum());
        for node in node_tree.order() {
            let ranks = &by_node[node];
            for (at, &rank) in ranks.iter().enumerate() {
                tree.order.push(rank);
                if at > 0 {
                    tree.connect(rank, ranks[at - 1], hops.of(inside(node)));
                } else if let Some(up) = node_tree.parent[node] {
                    let cards = cards_between(members(node), members(up), profile);
                    tree.connect(rank, by_node[up][0], hops.of(Hop { cards, streams: network_streams, mesh: 0 }));
                }
            }
        }
        tree
    });
    (hops.0, trees)
}

impl RankTree {
    fn unconnected(n: usize) -> Self {
        let order = Vec::with_capacity(n);
        Self { parent: vec![NONE; n], children: vec![[NONE; 3]; n], class: vec![0; n], order }
    }

    fn connect(&mut self, rank: u32, parent: u32, class: u16) {
        self.parent[rank as usize] = parent;
        self.class[rank as usize] = class;
        let place = self.children[parent as usize].iter_mut().find(|child| **child == NONE);
        *place.expect("two nodes below and the next rank of the chain") = rank;
    }
}

/// Most edges of one node over both trees.
fn max_degree(trees: &[dtree::NodeTree; 2], nodes: usize) -> u32 {
    let mut degree = vec![0; nodes];
    for tree in trees {
        for (child, parent) in tree.parent.iter().enumerate() {
            if let Some(parent) = *parent {
                degree[child] += 1;
                degree[parent] += 1;
            }
        }
    }
    degree.into_iter().max().unwrap_or(0)
}

/// Shapes of many communicators on one cluster. Communicators whose members are spread over nodes in the same way share
/// one shape, and with it every cached result: a job has thousands of communicators and a handful of shapes.
#[derive(Debug)]
pub struct ShapePool {
    profile: Profile,
    shapes: BTreeMap<Vec<u32>, Arc<CommShape>>,
}

impl ShapePool {
    /// An empty pool for a cluster.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        Self { profile, shapes: BTreeMap::new() }
    }

    /// The shape of the communicator whose group ranks `0..` are the global ranks `members`.
    pub fn shape(&mut self, members: &[u32]) -> Arc<CommShape> {
        // Nodes numbered in order of first appearance: all that a shape depends on, besides the profile.
        let mut numbers = BTreeMap::new();
        let spread: Vec<_> = members
            .iter()
            .map(|&rank| {
                let next = numbers.len() as u32;
                *numbers.entry(node_of(&self.profile, rank)).or_insert(next)
            })
            .collect();
        let Self { profile, shapes } = self;
        Arc::clone(shapes.entry(spread).or_insert_with(|| Arc::new(CommShape::new(members, profile))))
    }
}
