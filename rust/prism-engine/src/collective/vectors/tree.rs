//! All-reduce on one tree or on NCCL's two.

use super::VectorError;
use super::fields::{Fields, highest};
use crate::collective::dtree;
use crate::collective::tree::{self, Edges, Tree, TreeScratch};

/// What `trees` must be where it is given: how the two trees are laid over the ranks.
const NCCL_TREES: &str = "NCCL ncclGetDtree";

/// When the way down starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// With the first reduced chunk (`runTreeSplit`).
    Split,
    /// With the last one (`runTreeUpDown`).
    UpThenDown,
}

impl Mode {
    /// `split` or `up_then_down`, in any spelling that says so; split where nothing is said.
    fn read(fields: &mut Fields<'_>) -> Result<Self, VectorError> {
        let Some(text) = fields.optional::<String>("mode")? else { return Ok(Self::Split) };
        let letters: String = text.chars().filter(char::is_ascii_alphabetic).collect::<String>().to_ascii_lowercase();
        let says = |words: &[&str]| words.iter().any(|word| letters.contains(word));
        if says(&["updown", "upthendown", "nosplit", "notsplit", "nonsplit", "unsplit", "seq", "serial"]) {
            Ok(Self::UpThenDown)
        } else if says(&["split"]) {
            Ok(Self::Split)
        } else {
            Err(fields.error("mode", format!("is {text:?}: it must be \"split\" or \"up_then_down\"")))
        }
    }

    fn raise(self, tree: &Tree<'_>, arrivals: &[i64], out: &mut [i64]) {
        let scratch = &mut TreeScratch::default();
        match self {
            Self::Split => tree::raise_completion(tree, arrivals, out, scratch),
            Self::UpThenDown => tree::raise_completion_up_then_down(tree, arrivals, out, scratch),
        }
    }
}

pub(super) fn single(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    const OCCUPANCY: &str = "occ_ns_edge_to_parent_and_back";
    let arrivals = fields.arrivals()?;
    let n = arrivals.len();
    let parents: Vec<i64> = fields.take("parent")?;
    fields.expect_len("parent", parents.len(), n)?;
    let chunks = fields.at_least("chunks", 1)?;
    let mode = Mode::read(&mut fields)?;
    let occupancy = fields.costs(OCCUPANCY, n)?;
    let latency = fields.costs("latency_ns_edge", n)?;
    fields.finish()?;
    let edges = i128::from(chunks) * 2 + 4 * n as i128;
    fields.check_range(OCCUPANCY, &arrivals, edges, highest(&occupancy) + highest(&latency))?;
    let parent: Vec<_> = parents.iter().map(|up| u32::try_from(*up).unwrap_or(u32::MAX)).collect();
    if let Some(rank) = parents.iter().position(|up| *up < -1 || *up >= n as i64) {
        let what = format!("of rank {rank} is {}, neither a rank nor -1 for the root", parents[rank]);
        return Err(fields.error("parent", what));
    }
    let order = top_down(&parent).ok_or_else(|| fields.error("parent", "is not one tree with one root"))?;
    let edges = Edges { occupancy: &occupancy, latency: &latency };
    let tree = Tree { parent: &parent, order: &order, up: edges, down: edges, chunks };
    let mut out = arrivals.clone();
    mode.raise(&tree, &arrivals, &mut out);
    Ok(out)
}

/// Ranks, each after its parent; `u32::MAX` marks the one root. `None` if that is not one tree.
fn top_down(parent: &[u32]) -> Option<Vec<u32>> {
    let mut children = vec![Vec::new(); parent.len()];
    let mut order = Vec::new();
    for (rank, &up) in parent.iter().enumerate() {
        match children.get_mut(up as usize) {
            Some(siblings) => siblings.push(rank as u32),
            None => order.push(rank as u32),
        }
    }
    let roots = order.len();
    let mut next = 0;
    while next < order.len() {
        order.extend(&children[order[next] as usize]);
        next += 1;
    }
    (roots == 1 && order.len() == parent.len()).then_some(order)
}

pub(super) fn double(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    let arrivals = fields.arrivals()?;
    let n = arrivals.len();
    let chunks = fields.at_least("chunks_per_tree", 1)?;
    let (occ, lat) = (fields.at_least("occ_ns", 0)?, fields.at_least("latency_ns", 0)?);
    let mode = Mode::read(&mut fields)?;
    if let Some(trees) = fields.optional::<String>("trees")?
        && trees != NCCL_TREES
    {
        return Err(fields.error("trees", format!("is {trees:?}: only {NCCL_TREES:?} is known")));
    }
    fields.finish()?;
    let edges = i128::from(chunks) * 2 + 4 * n as i128;
    fields.check_range("occ_ns", &arrivals, edges, i128::from(occ) + i128::from(lat))?;
    let (occupancy, latency) = (vec![occ; n], vec![lat; n]);
    let edges = Edges { occupancy: &occupancy, latency: &latency };
    let mut out = arrivals.clone();
    for layout in dtree::double_tree(n) {
        let parent: Vec<_> = layout.parent.iter().map(|up| up.map_or(u32::MAX, |up| up as u32)).collect();
        let order: Vec<_> = layout.order().into_iter().map(|rank| rank as u32).collect();
        let tree = Tree { parent: &parent, order: &order, up: edges, down: edges, chunks };
        mode.raise(&tree, &arrivals, &mut out);
    }
    Ok(out)
}
