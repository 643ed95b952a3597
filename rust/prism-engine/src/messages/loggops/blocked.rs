//! Why a program blocks: who waits for whom, from the root.

use super::engine::{Costs, locate};
use super::matching::Waiters;
use super::{EvaluateError, Waiting};
use crate::ids::Rank;
use crate::messages::{Dependency, MessageOp, MessageProgram, OpIndex};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// An op, as rank and index in its program.
type Node = (u32, u32);

/// What a waiting op waits for.
struct Behind {
    /// The op that would end it.
    half: Node,
    /// The waiting op, of the same rank, that this one depends on.
    waiting: Node,
}

/// What is left of an evaluation that cannot go on.
struct Stuck<'a> {
    program: &'a MessageProgram,
    /// Sends and receives that have started and wait for their other half, by rank, ascending by op.
    waiting: BTreeMap<u32, Vec<u32>>,
}

/// The error for a program of which `num_unfinished` ops did not end.
pub(super) fn explain(
    program: &MessageProgram,
    costs: &Costs,
    receives: &Waiters,
    messages: &Waiters,
    num_unfinished: u64,
) -> EvaluateError {
    let mut waiting: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for rank in 0..program.num_ranks() {
        let rendezvous = |op: &u32| {
            let words = program.words(*op as usize);
            costs.is_rendezvous(words, program.value(words))
        };
        for op in
            receives.of(rank).map(|entry| entry.op).chain(messages.of(rank).map(|entry| entry.op).filter(rendezvous))
        {
            let (rank, op) = locate(program, op.into());
            waiting.entry(rank).or_default().push(op);
        }
    }
    for ops in waiting.values_mut() {
        ops.sort_unstable();
    }
    let stuck = Stuck { program, waiting };
    let (cause, is_cycle) = stuck.root(messages);
    let num_waiting = stuck.waiting.values().map(Vec::len).sum();
    EvaluateError::Blocked { cause, is_cycle, num_waiting, num_unfinished }
}

/// The error for messages left when every op has ended.
pub(super) fn unreceived(program: &MessageProgram, messages: &Waiters) -> Option<EvaluateError> {
    let mut left = (0..program.num_ranks()).flat_map(|rank| messages.of(rank));
    let first = left.next()?;
    let (rank, op) = locate(program, first.op.into());
    let what = program.rank(Rank(rank)).op(OpIndex(op));
    let first = Waiting { rank, op, what, waits_for: None, note: String::new() };
    Some(EvaluateError::Unreceived { first, num_messages: 1 + left.count() })
}

impl Stuck<'_> {
    /// An op whose other half nobody has, or else the shortest cycle.
    fn root(&self, messages: &Waiters) -> (Vec<Waiting>, bool) {
        let mut behind: FxHashMap<Node, Behind> = FxHashMap::default();
        let nodes: Vec<Node> = self.waiting.iter().flat_map(|(rank, ops)| ops.iter().map(|op| (*rank, *op))).collect();
        let mut ancestors = Ancestors::default();
        for &(rank, op) in &nodes {
            let Some((half, before)) = self.other_half(rank, op, &mut ancestors) else {
                let mut waiting = self.waiting_op((rank, op), None);
                waiting.note = arrived(messages, rank, &waiting);
                return (vec![waiting], false);
            };
            behind.insert((rank, op), Behind { half, waiting: (half.0, before) });
        }
        let cycle = shortest_cycle(&nodes, &behind);
        let named = cycle.iter().map(|node| self.waiting_op(*node, behind.get(node).map(|behind| behind.half)));
        (named.collect(), true)
    }

    fn waiting_op(&self, (rank, op): Node, waits_for: Option<Node>) -> Waiting {
        let what = self.program.rank(Rank(rank)).op(OpIndex(op));
        Waiting { rank, op, what, waits_for, note: String::new() }
    }

    /// The first op that could end a waiting one, and the waiting op of its rank that it is behind.
    fn other_half(&self, rank: u32, op: u32, ancestors: &mut Ancestors) -> Option<(Node, u32)> {
        let (peers, is_it): (_, Box<dyn Fn(MessageOp) -> bool>) = match self.program.rank(Rank(rank)).op(OpIndex(op)) {
            MessageOp::Recv { peer, tag, .. } => {
                let is_it = move |other| {
                    matches!(other, MessageOp::Send { peer, tag: sent, .. }
                        if peer.0 == rank && tag.is_none_or(|tag| tag == sent))
                };
                (peer.map_or(0..self.program.num_ranks(), |peer| peer.0..peer.0 + 1), Box::new(is_it))
            }
            MessageOp::Send { peer, tag, .. } => {
                let is_it = move |other| {
                    matches!(other, MessageOp::Recv { peer: from, tag: wanted, .. }
                        if from.is_none_or(|from| from.0 == rank) && wanted.is_none_or(|wanted| wanted == tag))
                };
                (peer.0..peer.0 + 1, Box::new(is_it))
            }
            MessageOp::Calc { .. } => return None,
        };
        peers.into_iter().find_map(|peer| {
            let (ops, behind) = (self.program.rank(Rank(peer)), ancestors.of(self, peer));
            let found =
                behind.iter().enumerate().find(|(op, before)| before.is_some() && is_it(ops.op(OpIndex(*op as u32))));
            found.and_then(|(op, before)| Some(((peer, op as u32), (*before)?)))
        })
    }
}

/// For each rank asked about: of each op that has not started, a waiting op it depends on, directly or not.
#[derive(Default)]
struct Ancestors {
    ranks: FxHashMap<u32, Vec<Option<u32>>>,
}

impl Ancestors {
    fn of(&mut self, stuck: &Stuck<'_>, rank: u32) -> &[Option<u32>] {
        self.ranks.entry(rank).or_insert_with(|| {
            let ops = stuck.program.rank(Rank(rank));
            let mut first = vec![None; ops.len() as usize];
            for &waiting in stuck.waiting.get(&rank).into_iter().flatten() {
                let mut todo = vec![waiting];
                while let Some(op) = todo.pop() {
                    for (next, of) in ops.successors(OpIndex(op)) {
                        if op == waiting && of == Dependency::Start {
                            // It has started.
                            continue;
                        }
                        if first[next.0 as usize].is_none() {
                            first[next.0 as usize] = Some(waiting);
                            todo.push(next.0);
                        }
                    }
                }
            }
            first
        })
    }
}

/// What has arrived from the rank a receive waits for, if it is something else.
fn arrived(messages: &Waiters, rank: u32, waiting: &Waiting) -> String {
    let MessageOp::Recv { peer, .. } = waiting.what else { return String::new() };
    let from = |sender: u32| peer.is_none_or(|peer| peer.0 == sender);
    match messages.of(rank).find(|entry| from(entry.peer)) {
        Some(entry) => format!(" (a message of tag {} from rank {} is there, unmatched)", entry.tag, entry.peer),
        None => String::new(),
    }
}

/// The shortest cycle along `behind`, which leads from every node to another.
fn shortest_cycle(nodes: &[Node], behind: &FxHashMap<Node, Behind>) -> Vec<Node> {
    let mut seen: FxHashSet<Node> = FxHashSet::default();
    let mut shortest: Vec<Node> = Vec::new();
    for &start in nodes {
        let mut path: Vec<Node> = Vec::new();
        let mut place: FxHashMap<Node, usize> = FxHashMap::default();
        let mut node = start;
        while seen.insert(node) {
            place.insert(node, path.len());
            path.push(node);
            node = behind[&node].waiting;
        }
        if let Some(&first) = place.get(&node)
            && (shortest.is_empty() || path.len() - first < shortest.len())
        {
            shortest = path.split_off(first);
        }
    }
    shortest
}
