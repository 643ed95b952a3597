//! Why a program blocks: who waits for whom, from the root.

use super::engine::{Costs, locate};
use super::matching::Waiters;
use super::pending::Pending;
use super::{EvaluateError, Waiting};
use crate::ids::Rank;
use crate::messages::{Dependency, MessageOp, MessageProgram, OpIndex};
use rustc_hash::{FxHashMap, FxHashSet};

/// What is left of an evaluation that cannot go on.
struct Stuck<'a> {
    program: &'a MessageProgram,
    pending: &'a Pending,
    /// Sends and receives that have started and wait for their other half, by rank, ascending by op.
    waiting: FxHashMap<u32, Vec<u32>>,
}

/// The error for a program of which `num_unfinished` ops did not end.
pub(super) fn explain(
    program: &MessageProgram,
    costs: &Costs,
    pending: &Pending,
    receives: &Waiters,
    messages: &Waiters,
    num_unfinished: u64,
) -> EvaluateError {
    let mut waiting: FxHashMap<u32, Vec<u32>> = FxHashMap::default();
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
    waiting.values_mut().for_each(|ops| ops.sort_unstable());
    let stuck = Stuck { program, pending, waiting };
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
        let mut ranks: Vec<u32> = self.waiting.keys().copied().collect();
        ranks.sort_unstable();
        // Each waiting op: the op that would end it, and the waiting op before that one on its rank.
        let mut behind: FxHashMap<(u32, u32), ((u32, u32), (u32, u32))> = FxHashMap::default();
        let nodes: Vec<(u32, u32)> =
            ranks.iter().flat_map(|rank| self.waiting[rank].iter().map(|op| (*rank, *op))).collect();
        let mut ancestors = Ancestors::default();
        for &(rank, op) in &nodes {
            let Some(half) = self.other_half(rank, op) else {
                let mut waiting = self.waiting_op((rank, op), None);
                waiting.note = arrived(messages, rank, &waiting);
                return (vec![waiting], false);
            };
            if let Some(before) = ancestors.waiting_before(self, half) {
                behind.insert((rank, op), (half, (half.0, before)));
            }
        }
        let cycle = shortest_cycle(&nodes, &behind);
        let named = cycle.iter().map(|node| self.waiting_op(*node, behind.get(node).map(|(half, _)| *half)));
        (named.collect(), true)
    }

    fn waiting_op(&self, (rank, op): (u32, u32), waits_for: Option<(u32, u32)>) -> Waiting {
        let what = self.program.rank(Rank(rank)).op(OpIndex(op));
        Waiting { rank, op, what, waits_for, note: String::new() }
    }

    /// The first op, not yet started, that could end a waiting one.
    fn other_half(&self, rank: u32, op: u32) -> Option<(u32, u32)> {
        match self.program.rank(Rank(rank)).op(OpIndex(op)) {
            MessageOp::Recv { peer, tag, .. } => {
                let senders = peer.map_or(0..self.program.num_ranks(), |peer| peer.0..peer.0 + 1);
                senders.into_iter().find_map(|sender| {
                    self.first_unstarted(sender, |other| {
                        matches!(other, MessageOp::Send { peer, tag: sent, .. } if peer.0 == rank && tag.is_none_or(|tag| tag == sent))
                    })
                })
            }
            MessageOp::Send { peer, tag, .. } => self.first_unstarted(peer.0, |other| {
                matches!(other, MessageOp::Recv { peer: from, tag: wanted, .. }
                    if from.is_none_or(|from| from.0 == rank) && wanted.is_none_or(|wanted| wanted == tag))
            }),
            MessageOp::Calc { .. } => None,
        }
    }

    fn first_unstarted(&self, rank: u32, is_it: impl Fn(MessageOp) -> bool) -> Option<(u32, u32)> {
        let (ops, start) = (self.program.rank(Rank(rank)), self.program.rank_start[rank as usize] as u32);
        (0..ops.len()).find(|op| !self.pending.is_free(start + op) && is_it(ops.op(OpIndex(*op)))).map(|op| (rank, op))
    }
}

/// For each rank asked about: of each op, the first waiting op it depends on, directly or not.
#[derive(Default)]
struct Ancestors {
    ranks: FxHashMap<u32, Vec<Option<u32>>>,
}

impl Ancestors {
    fn waiting_before(&mut self, stuck: &Stuck<'_>, (rank, op): (u32, u32)) -> Option<u32> {
        let found = self.ranks.entry(rank).or_insert_with(|| {
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
        });
        found[op as usize]
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

/// The shortest cycle along `behind`, which leads from every node to at most one. Every node leads to another: without a
/// missing half, what a waiting op needs has not started, so it is behind a waiting op itself.
fn shortest_cycle(nodes: &[(u32, u32)], behind: &FxHashMap<(u32, u32), ((u32, u32), (u32, u32))>) -> Vec<(u32, u32)> {
    let mut seen: FxHashSet<(u32, u32)> = FxHashSet::default();
    let mut shortest: Vec<(u32, u32)> = Vec::new();
    for &start in nodes {
        let mut path: Vec<(u32, u32)> = Vec::new();
        let mut on_path: FxHashMap<(u32, u32), usize> = FxHashMap::default();
        let mut node = start;
        while seen.insert(node) {
            on_path.insert(node, path.len());
            path.push(node);
            let Some((_, next)) = behind.get(&node) else { break };
            node = *next;
        }
        if let Some(&first) = on_path.get(&node)
            && behind.contains_key(&node)
            && (shortest.is_empty() || path.len() - first < shortest.len())
        {
            shortest = path.split_off(first);
        }
    }
    if shortest.is_empty() { nodes.first().copied().into_iter().collect() } else { shortest }
}
