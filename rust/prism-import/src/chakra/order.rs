//! Nodes in an order in which each comes after those it depends on.

use super::node::Node;
use crate::notes::Notes;
use std::collections::{BTreeMap, BTreeSet};

/// Positions of nodes in order, and of each the positions of those it depends on. Among those that can come next, the one that
/// started first comes, then the one with the lowest number. Dependencies on nodes that do not exist are dropped; of a cycle,
/// the node that would come first goes without what it waits for. O((nodes + dependencies) log nodes).
pub fn order(nodes: &[Node], rank: u32, notes: &mut Notes) -> (Vec<u32>, Vec<Vec<u32>>) {
    let mut position: BTreeMap<u64, u32> = BTreeMap::new();
    for (at, node) in (0..).zip(nodes) {
        if position.insert(node.id, at).is_some() {
            notes.add("duplicate_ids", || format!("rank {rank}: node {}: the last of that number counts", node.id));
        }
    }
    let mut before: Vec<Vec<u32>> = Vec::with_capacity(nodes.len());
    let mut after: Vec<Vec<u32>> = vec![Vec::new(); nodes.len()];
    for (at, node) in (0..).zip(nodes) {
        let mut mine = Vec::with_capacity(node.dependencies.len());
        for id in &node.dependencies {
            match position.get(id) {
                Some(other) if *other == at => {
                    notes.add("cyclic_dependencies", || format!("rank {rank}: node {} waits for itself", node.id));
                }
                Some(other) if !mine.contains(other) => {
                    mine.push(*other);
                    after[*other as usize].push(at);
                }
                Some(_) => {}
                None => notes.add("dangling_dependencies", || format!("rank {rank}: node {} waits for {id}", node.id)),
            }
        }
        before.push(mine);
    }
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let key = |at: u32| (nodes[at as usize].start, nodes[at as usize].id, at);
    let mut open: BTreeSet<(i64, u64, u32)> = BTreeSet::new();
    let mut waiting: BTreeSet<(i64, u64, u32)> = BTreeSet::new();
    for at in 0..nodes.len() as u32 {
        if missing[at as usize] == 0 {
            open.insert(key(at))
        } else {
            waiting.insert(key(at))
        };
    }
    let mut done = vec![false; nodes.len()];
    let mut sorted = Vec::with_capacity(nodes.len());
    loop {
        let at = if let Some((.., at)) = open.pop_first() {
            at
        } else if let Some((.., at)) = waiting.pop_first() {
            let dropped: Vec<u64> = before[at as usize]
                .iter()
                .filter(|other| !done[**other as usize])
                .map(|o| nodes[*o as usize].id)
                .collect();
            notes.add("cyclic_dependencies", || {
                format!("rank {rank}: node {} goes without waiting for {dropped:?}", nodes[at as usize].id)
            });
            before[at as usize].retain(|other| done[*other as usize]);
            missing[at as usize] = 0;
            at
        } else {
            return (sorted, before);
        };
        done[at as usize] = true;
        sorted.push(at);
        for next in &after[at as usize] {
            let left = &mut missing[*next as usize];
            if *left > 0 {
                *left -= 1;
                if *left == 0 && !done[*next as usize] {
                    waiting.remove(&key(*next));
                    open.insert(key(*next));
                }
            }
        }
    }
}
