//! Why ranks are stuck: a graph over meetings.
//!
//! A meeting waits for *all* members that have not come. A member that is through with its program will never come: a missing
//! call. One that waits elsewhere hands the blame on to the meetings it waits at. So whoever is stuck waits, in the end,
//! for a missing call or for a cycle of meetings: a strongly connected part of the graph that leads to no other cycle.
//! Everything else is a victim.

use super::explicit::{Key, State};
use std::collections::{BTreeMap, VecDeque};

/// A rank that waits for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Where it waits.
    pub key: Key,
    /// Lowest rank that is there.
    pub rank: u32,
    /// Index of the op it is at.
    pub op: usize,
    /// Lowest rank that is not there and stands at the next meeting of the cycle.
    pub for_rank: u32,
    /// Index of the op where that one is.
    pub at_op: usize,
}

/// The reasons of a deadlock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    /// The shortest cycle of meetings, one wait each; empty without one.
    pub cycle: Vec<Wait>,
    /// Calls that a rank which is through with its program never made: the meeting and the rank, ascending.
    pub missing: Vec<(Key, u32)>,
}

pub(super) fn explain(state: &State<'_>) -> Explanation {
    let open = |actor: usize| {
        let open = &state.actors[actor].open;
        open.iter().filter(|(key, is_send)| !state.is_over(*key, *is_send)).map(|(key, _)| *key)
    };
    let mut keys: Vec<Key> = (0..state.actors.len()).flat_map(open).collect();
    keys.sort_unstable();
    keys.dedup();
    let number: BTreeMap<Key, usize> = keys.iter().enumerate().map(|(at, key)| (*key, at)).collect();
    let mut missing = Vec::new();
    let mut next: Vec<Vec<usize>> = Vec::new();
    for key in &keys {
        let mut to = Vec::new();
        for member in state.missing(*key) {
            let actor = member as usize;
            if state.actors[actor].at == state.job.programs[actor].len() {
                missing.push((*key, member));
            }
            to.extend(open(actor).map(|key| number[&key]));
        }
        to.sort_unstable();
        to.dedup();
        next.push(to);
    }
    let cycle = final_cycles(&next).into_iter().filter_map(|part| shortest_cycle(&part, &next));
    // Of equally short cycles the one with the lowest meeting.
    let cycle = cycle.min_by_key(|cycle| (cycle.len(), cycle[0])).unwrap_or_default();
    let waits = (0..cycle.len()).map(|at| {
        let (key, after) = (keys[cycle[at]], keys[cycle[(at + 1) % cycle.len()]]);
        let rank = state.meetings[&key].posts.values().map(|post| post.actor).min().unwrap_or_default();
        let absent = state.missing(key);
        let for_rank = absent.into_iter().find(|member| open(*member as usize).any(|key| key == after));
        let for_rank = for_rank.unwrap_or_default();
        let op = |rank: u32| state.actors[rank as usize].at;
        Wait { key, rank, op: op(rank), for_rank, at_op: op(for_rank) }
    });
    Explanation { cycle: waits.collect(), missing }
}

/// The strongly connected parts with a cycle from which no other such part can be reached, each ascending (Tarjan).
fn final_cycles(next: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let parts = components(next);
    let mut part_of = vec![0; next.len()];
    parts.iter().enumerate().for_each(|(part, nodes)| nodes.iter().for_each(|node| part_of[*node] = part));
    // Parts come in reverse topological order: whatever a part leads to was looked at before it.
    let mut leads_to_cycle = vec![false; parts.len()];
    let mut found = Vec::new();
    for (part, nodes) in parts.iter().enumerate() {
        let targets = || nodes.iter().flat_map(|node| &next[*node]);
        let is_cyclic = nodes.len() > 1 || targets().any(|to| *to == nodes[0]);
        let leads_on = targets().any(|to| part_of[*to] != part && leads_to_cycle[part_of[*to]]);
        leads_to_cycle[part] = is_cyclic || leads_on;
        if is_cyclic && !leads_on {
            let mut nodes = nodes.clone();
            nodes.sort_unstable();
            found.push(nodes);
        }
    }
    found
}

/// Strongly connected components, in reverse topological order. Without recursion: the graph may be deep.
fn components(next: &[Vec<usize>]) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let mut index = vec![NEW; next.len()];
    let mut low = vec![0; next.len()];
    let mut is_open = vec![false; next.len()];
    let (mut parts, mut open, mut count) = (Vec::new(), Vec::new(), 0);
    for root in 0..next.len() {
        let mut path: Vec<(usize, usize)> = Vec::new();
        if index[root] == NEW {
            path.push((root, 0));
        }
        while let Some((node, edge)) = path.pop() {
            if edge == 0 {
                (index[node], low[node]) = (count, count);
                count += 1;
                open.push(node);
                is_open[node] = true;
            } else {
                let child = next[node][edge - 1];
                low[node] = low[node].min(low[child]);
            }
            let fresh = (edge..next[node].len()).find(|at| {
                let to = next[node][*at];
                if index[to] != NEW && is_open[to] {
                    low[node] = low[node].min(index[to]);
                }
                index[to] == NEW
            });
            if let Some(at) = fresh {
                path.extend([(node, at + 1), (next[node][at], 0)]);
            } else if low[node] == index[node] {
                let start = open.iter().rposition(|other| *other == node).expect("it was opened above");
                let part = open.split_off(start);
                for node in &part {
                    is_open[*node] = false;
                }
                parts.push(part);
            }
        }
    }
    parts
}

/// A shortest cycle inside a strongly connected part, starting at its lowest node.
fn shortest_cycle(part: &[usize], next: &[Vec<usize>]) -> Option<Vec<usize>> {
    let cycles = part.iter().filter_map(|start| cycle_through(*start, part, next));
    let mut cycle = cycles.min_by_key(|cycle| (cycle.len(), cycle.iter().copied().min()))?;
    let lowest = (0..cycle.len()).min_by_key(|at| cycle[*at])?;
    cycle.rotate_left(lowest);
    Some(cycle)
}

/// A shortest cycle through `start` inside `part`, breadth first.
fn cycle_through(start: usize, part: &[usize], next: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut from: BTreeMap<usize, usize> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for to in next[node].iter().filter(|to| part.binary_search(to).is_ok()) {
            if *to == start {
                let mut cycle = vec![node];
                while let Some(before) = cycle.last().filter(|at| **at != start).and_then(|at| from.get(at)) {
                    cycle.push(*before);
                }
                cycle.reverse();
                return Some(cycle);
            }
            if !from.contains_key(to) {
                from.insert(*to, node);
                queue.push_back(*to);
            }
        }
    }
    None
}
