//! The two complementary binary trees over nodes that NCCL runs half of an all-reduce on each.
//!
//! The first tree is the in-order binary tree over `0..n`: a node whose lowest set bit is `2^k` sits at height `k`. The
//! second is its mirror image for even `n` and the tree shifted by one for odd `n`, which makes the inner nodes of one
//! tree leaves of the other.

/// A tree over nodes `0..n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTree {
    /// Parent by node; `None` for the root.
    pub parent: Vec<Option<usize>>,
    /// Lower and upper child by node.
    pub children: Vec<[Option<usize>; 2]>,
}

impl NodeTree {
    /// Every node after its parent.
    #[must_use]
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.parent.len()).filter(|&node| self.parent[node].is_none()).collect();
        let mut next = 0;
        while next < order.len() {
            order.extend(self.children[order[next]].iter().flatten());
            next += 1;
        }
        order
    }

    /// The same tree with its nodes renamed by the permutation `name`.
    fn renamed(&self, name: impl Fn(usize) -> usize) -> Self {
        let n = self.parent.len();
        let mut tree = Self { parent: vec![None; n], children: vec![[None; 2]; n] };
        for node in 0..n {
            tree.parent[name(node)] = self.parent[node].map(&name);
            tree.children[name(node)] = self.children[node].map(|child| child.map(&name));
        }
        tree
    }
}

/// Both trees over `n` nodes.
#[must_use]
pub fn double_tree(n: usize) -> [NodeTree; 2] {
    let first = binary_tree(n);
    let second = if n % 2 == 1 { first.renamed(|node| (node + 1) % n) } else { first.renamed(|node| n - 1 - node) };
    [first, second]
}

fn binary_tree(n: usize) -> NodeTree {
    let mut tree = NodeTree { parent: vec![None; n], children: vec![[None; 2]; n] };
    for node in 1..n {
        let height = node & node.wrapping_neg();
        // The node above is the neighbour at twice the height: upwards if there is one, else downwards.
        let upper = (node ^ height) | (height << 1);
        let parent = if upper < n { upper } else { node ^ height };
        tree.parent[node] = Some(parent);
        tree.children[parent][usize::from(parent < node)] = Some(node);
    }
    tree
}
