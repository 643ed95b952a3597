//! All-reduce on a tree: chunks are reduced towards the root and come back down while later chunks still go up.
//!
//! The last chunk reaches rank `p` along a longest path that starts at some rank `s`, climbs to the root, descends to `p`,
//! and spends the other `J - 1` chunks at the slowest link on the way:
//!
//! ```text
//! F(p) = max over s:  a(s) + sum of (o+l) along s -> root -> p  +  (J-1) * max of o along that path
//! ```
//!
//! The inner maximum is replaced by one term per distinct `o` over paths that contain it: one pass up and one pass down
//! carry the best path and the best path that contains the value. O(ranks x distinct values), whatever `J`.
//! A rank is done when it has received everything *and* its last chunk to each child has left.

use super::window::{NEVER, distinct};

/// Costs of the edge between a rank and its parent, by rank; the root's are not used.
#[derive(Clone, Copy, Debug)]
pub struct Edges<'a> {
    /// Picoseconds a chunk occupies the edge.
    pub occupancy: &'a [i64],
    /// Latency of the edge.
    pub latency: &'a [i64],
}

/// A tree and what runs over it. Times are picoseconds below 2^60.
#[derive(Clone, Copy, Debug)]
pub struct Tree<'a> {
    /// Parent by rank; anything for the root.
    pub parent: &'a [u32],
    /// All ranks, each after its parent; the first is the root.
    pub order: &'a [u32],
    /// Towards the root.
    pub up: Edges<'a>,
    /// Away from the root.
    pub down: Edges<'a>,
    /// Chunks, at least 1.
    pub chunks: i64,
}

/// Working memory of [`raise_completion`], to be reused.
#[derive(Debug, Default)]
pub struct TreeScratch {
    values: Vec<i64>,
    best: Vec<i64>,
    through: Vec<i64>,
}

/// Raises `out[p]` to the time at which rank `p` is done. `out` is not reset, so that two trees can share it.
pub fn raise_completion(tree: &Tree<'_>, arrivals: &[i64], out: &mut [i64], scratch: &mut TreeScratch) {
    let Some((&root, others)) = tree.order.split_first() else { return };
    let edges = others.iter().map(|&rank| rank as usize);
    let costs = edges.flat_map(|rank| [&tree.up.occupancy[rank], &tree.down.occupancy[rank]]);
    distinct(costs, &mut scratch.values);
    out[root as usize] = out[root as usize].max(arrivals[root as usize]);
    for at in 0..scratch.values.len() {
        let value = scratch.values[at];
        climb(tree, others, arrivals, value, scratch);
        descend(tree, others, value, out, scratch);
    }
}

/// [`raise_completion`] for trees whose way down starts when all chunks have been reduced (NCCL's `runTreeUpDown`):
///
/// ```text
/// R    = max over s:  a(s) + sum of (o+l) along s -> root + (J-1) * max of o along that path
/// F(p) = R + sum of (o+l) along root -> p + (J-1) * max of o along that path
/// ```
///
/// O(ranks x distinct occupancies on the way up).
pub fn raise_completion_up_then_down(tree: &Tree<'_>, arrivals: &[i64], out: &mut [i64], scratch: &mut TreeScratch) {
    let Some((&root, others)) = tree.order.split_first() else { return };
    let root = root as usize;
    distinct(others.iter().map(|&rank| &tree.up.occupancy[rank as usize]), &mut scratch.values);
    let mut reduced = arrivals[root];
    for at in 0..scratch.values.len() {
        let value = scratch.values[at];
        climb(tree, others, arrivals, value, scratch);
        reduced = reduced.max(scratch.through[root] + (tree.chunks - 1) * value);
    }
    out[root] = out[root].max(reduced);
    let TreeScratch { best, through: slowest, .. } = scratch;
    best.resize(arrivals.len(), 0);
    slowest.resize(arrivals.len(), 0);
    (best[root], slowest[root]) = (reduced, 0);
    for &rank in others {
        let rank = rank as usize;
        let parent = tree.parent[rank] as usize;
        let occupancy = tree.down.occupancy[rank];
        slowest[rank] = slowest[parent].max(occupancy);
        let left = best[parent] + occupancy + (tree.chunks - 1) * slowest[rank];
        best[rank] = best[parent] + occupancy + tree.down.latency[rank];
        out[parent] = out[parent].max(left);
        out[rank] = out[rank].max(left + tree.down.latency[rank]);
    }
}

/// Leaves in `best` and `through` of every rank the longest path that ends there, coming from below.
fn climb(tree: &Tree<'_>, others: &[u32], arrivals: &[i64], value: i64, scratch: &mut TreeScratch) {
    let TreeScratch { best, through, .. } = scratch;
    best.clear();
    best.extend_from_slice(arrivals);
    through.clear();
    through.resize(arrivals.len(), NEVER);
    for &rank in others.iter().rev() {
        let rank = rank as usize;
        let parent = tree.parent[rank] as usize;
        let occupancy = tree.up.occupancy[rank];
        let edge = occupancy + tree.up.latency[rank];
        let passing = if occupancy == value { through[rank].max(best[rank]) } else { through[rank] };
        best[parent] = best[parent].max(best[rank] + edge);
        // `passing` may be NEVER plus some edges: still far below every real path.
        through[parent] = through[parent].max(passing + edge);
    }
}

/// Continues the root's paths downwards and raises `out`.
fn descend(tree: &Tree<'_>, others: &[u32], value: i64, out: &mut [i64], scratch: &mut TreeScratch) {
    let TreeScratch { best, through, .. } = scratch;
    let behind = (tree.chunks - 1) * value;
    for &rank in others {
        let rank = rank as usize;
        let parent = tree.parent[rank] as usize;
        let occupancy = tree.down.occupancy[rank];
        let passing = if occupancy == value { through[parent].max(best[parent]) } else { through[parent] };
        out[parent] = out[parent].max(passing + occupancy + behind);
        best[rank] = best[parent] + occupancy + tree.down.latency[rank];
        through[rank] = passing + occupancy + tree.down.latency[rank];
        out[rank] = out[rank].max(through[rank] + behind);
    }
}
