//! Which ops of two programs stand for each other.

use super::{name_of, text_of};
use crate::graph::op::{Op, OpKind};
use std::mem::discriminant;

/// Ops of a program, with their indices in it.
pub(super) struct Program {
    pub(super) ops: Vec<Op>,
    pub(super) index: Vec<u32>,
}

/// A part of two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// As many ops of both, each the counterpart of the other.
    Both { at: [usize; 2], len: usize },
    /// Ops without counterparts.
    Apart { at: [usize; 2], len: [usize; 2] },
}

impl Program {
    /// Op number `at`, with its index in the template.
    pub(super) fn get(&self, at: usize) -> (u32, Op) {
        (self.index[at], self.ops[at])
    }

    /// Index in the template of op `at`, also of the end.
    pub(super) fn index_at(&self, at: usize) -> u32 {
        self.index.get(at).or(self.index.last()).copied().unwrap_or(0)
    }

    /// What is at a place that the other program does not have.
    pub(super) fn excerpt(&self, at: usize, len: usize, names: &[String]) -> String {
        match len {
            0 => "nothing".to_owned(),
            1 => format!("1 op: {}", text_of(&self.ops[at], names)),
            _ => format!("{len} ops, the first: {}", text_of(&self.ops[at], names)),
        }
    }
}

/// How far to look for the place where two programs meet again.
const REACH: usize = 256;
/// So many ops in a row must agree there, or up to the end.
const AGREE: usize = 4;

/// Cuts two programs into parts. Greedy: ops are counterparts while they are alike; where they are not, the nearest place at
/// which several in a row are alike again ends the part without counterparts. O(ops), and O([`REACH`]^2) for each such place.
pub(super) fn align(programs: &[Program; 2], names: &[&Vec<String>; 2]) -> Vec<Span> {
    let [left, right] = programs;
    let ends = [left.ops.len(), right.ops.len()];
    let alike = |at: [usize; 2]| is_alike(&left.ops[at[0]], &right.ops[at[1]], names);
    let mut spans = Vec::new();
    let mut at = [0, 0];
    while at[0] < ends[0] && at[1] < ends[1] {
        let longest = (ends[0] - at[0]).min(ends[1] - at[1]);
        let len = (0..longest).take_while(|step| alike([at[0] + step, at[1] + step])).count();
        if len > 0 {
            spans.push(Span::Both { at, len });
            at = at.map(|at| at + len);
            continue;
        }
        let skip = meet(at, ends, &alike);
        // One op against one op: the same place in both, of another kind.
        spans.push(if skip == [1, 1] { Span::Both { at, len: 1 } } else { Span::Apart { at, len: skip } });
        at = [at[0] + skip[0], at[1] + skip[1]];
    }
    if at != ends {
        spans.push(Span::Apart { at, len: [ends[0] - at[0], ends[1] - at[1]] });
    }
    spans
}

/// How many ops of both to leave out until they agree again; all that is left if they do not within reach.
fn meet(at: [usize; 2], ends: [usize; 2], alike: &impl Fn([usize; 2]) -> bool) -> [usize; 2] {
    let left = [ends[0] - at[0], ends[1] - at[1]];
    for distance in 1..=2 * REACH {
        // The most even split first: replaced ops are likelier than moved ones.
        let mut splits: Vec<usize> = (0..=distance).collect();
        splits.sort_by_key(|first| (2 * first).abs_diff(distance));
        for first in splits {
            let skip = [first, distance - first];
            if skip[0] > left[0] || skip[1] > left[1] || skip[0] > REACH || skip[1] > REACH {
                continue;
            }
            let place = [at[0] + skip[0], at[1] + skip[1]];
            let room = (ends[0] - place[0]).min(ends[1] - place[1]);
            let agree = room.min(AGREE);
            let is_end = place == ends;
            if is_end || (agree > 0 && (0..agree).all(|step| alike([place[0] + step, place[1] + step]))) {
                return skip;
            }
        }
    }
    left
}

/// Are they the same call, whatever its sizes, communicator and times?
fn is_alike(left: &Op, right: &Op, names: &[&Vec<String>; 2]) -> bool {
    use OpKind as K;
    match (left.kind, right.kind) {
        (K::Compute { name: a, .. }, K::Compute { name: b, .. }) => name_of(names[0], a) == name_of(names[1], b),
        (K::Collective { kind: a, .. }, K::Collective { kind: b, .. }) => a == b,
        (K::PointToPoint { is_send: a, .. }, K::PointToPoint { is_send: b, .. }) => a == b,
        (a, b) => discriminant(&a) == discriminant(&b),
    }
}
