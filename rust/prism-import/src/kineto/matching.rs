//! Which kernels of different ranks are one communication.
//!
//! Collectives of a group are matched by the numbers the trace gives them, else by their order, moved against each other as far as
//! kinds and sizes demand (profilers do not start at the same call everywhere). Messages are matched by sender, receiver and
//! order. Nothing is ever matched across groups.

use super::comm::{CommRecord, Groups};
use super::event::CommKind;
use prism_engine::graph::op::{CollectiveKind, DataType, ReduceOp};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A communication with everything that its ranks recorded of it.
#[derive(Clone, Debug)]
pub struct Matched {
    /// Its group.
    pub group: u32,
    /// A collective, or the sending side of a message.
    pub kind: CommKind,
    /// Elements, 0 if unknown.
    pub count: u64,
    /// Element type.
    pub dtype: DataType,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Root.
    pub root: u32,
    /// Is the size known?
    pub is_sized: bool,
    /// Ranks with a trace that take part (of a message: sender, then receiver), and the number of the record there.
    pub members: Vec<(u32, u32)>,
    /// Sender and receiver of a message: global ranks.
    pub ends: Option<(u32, u32)>,
}

/// What became of the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Kernels of NCCL in the traces.
    pub kernels: u64,
    /// Communications told by the traces on all sides.
    pub matched: u64,
    /// Communications put together by group and order, because a side does not tell group or size.
    pub inferred: u64,
    /// Kernels in these.
    pub used_kernels: u64,
    /// Kernels that fit to nothing.
    pub unmatched: u64,
}

/// Result of matching.
#[derive(Debug, Default)]
pub struct Matching {
    /// In order of group and call.
    pub matched: Vec<Matched>,
    /// Rank, number of the record, and why it fits to nothing.
    pub unmatched: Vec<(u32, u32, String)>,
    /// How many of each.
    pub counts: Counts,
}

/// Halves of messages by group, sender and receiver: sends, receives.
type Messages = BTreeMap<(u32, u32, u32), (Vec<u32>, Vec<u32>)>;
type Records<'a> = BTreeMap<u32, &'a [CommRecord]>;

impl Matching {
    fn count(&mut self, is_told: bool) {
        *(if is_told { &mut self.counts.matched } else { &mut self.counts.inferred }) += 1;
    }
}

/// Matches the records of all ranks.
pub fn match_records(records: &BTreeMap<u32, Vec<CommRecord>>, groups: &Groups) -> Matching {
    let mut matching = Matching::default();
    let all: Records<'_> = records.iter().map(|(rank, list)| (*rank, list.as_slice())).collect();
    let mut by_group: Vec<BTreeMap<u32, Vec<u32>>> = vec![BTreeMap::new(); groups.len()];
    let mut messages: Messages = BTreeMap::new();
    for (rank, list) in &all {
        for (number, record) in (0..).zip(*list) {
            matching.counts.kernels += 1;
            let group = match (record.kind, record.group) {
                (None, _) => Err("what it does is not told"),
                (_, None) => Err("its group is not told"),
                (Some(kind), Some(group)) => Ok((kind, group)),
            };
            match group {
                Err(why) => matching.unmatched.push((*rank, number, why.to_owned())),
                Ok((CommKind::Collective(_), group)) => {
                    by_group[group as usize].entry(*rank).or_default().push(number);
                }
                Ok((kind, group)) => {
                    add_message(&mut messages, &mut matching, (*rank, number, record), kind, group, groups);
                }
            }
        }
    }
    for (group, lists) in (0..).zip(by_group) {
        let silent = groups.key(group).ranks.iter().find(|rank| all.contains_key(rank) && !lists.contains_key(rank));
        match silent {
            None => collectives(group, &lists, &all, &mut matching),
            Some(silent) => {
                let each = lists.iter().flat_map(|(rank, list)| list.iter().map(|number| (*rank, *number)));
                let why = format!("rank {silent} recorded nothing of group {group}");
                matching.unmatched.extend(each.map(|(rank, number)| (rank, number, why.clone())));
            }
        }
    }
    for ((group, source, destination), (sends, receives)) in messages {
        pair_messages((group, source, destination), &sends, &receives, &all, &mut matching);
    }
    matching.counts.used_kernels = matching.matched.iter().map(|one| one.members.len() as u64).sum();
    matching.counts.unmatched = matching.unmatched.len() as u64;
    matching
}

fn add_message(
    messages: &mut Messages,
    matching: &mut Matching,
    (rank, number, record): (u32, u32, &CommRecord),
    kind: CommKind,
    group: u32,
    groups: &Groups,
) {
    let is_send = kind == CommKind::Send;
    let what = if is_send { "a send" } else { "a receive" };
    let Some((source, destination)) = record.ends else {
        matching.unmatched.push((rank, number, format!("{what} whose peer is not told")));
        return;
    };
    let ranks = &groups.key(group).ranks;
    let own = if is_send { source } else { destination };
    if own != rank || !ranks.contains(&source) || !ranks.contains(&destination) || source == destination {
        matching.unmatched.push((rank, number, format!("{what} whose ends, {source} and {destination}, do not fit")));
        return;
    }
    let (sends, receives) = messages.entry((group, source, destination)).or_default();
    if is_send { sends.push(number) } else { receives.push(number) }
}

fn pair_messages(
    (group, source, destination): (u32, u32, u32),
    sends: &[u32],
    receives: &[u32],
    all: &Records<'_>,
    matching: &mut Matching,
) {
    let record = |rank: u32, number: u32| &all[&rank][number as usize];
    // The other side may have no trace: then the message is whole with one half.
    let (has_source, has_destination) = (all.contains_key(&source), all.contains_key(&destination));
    let pairs =
        if has_source && has_destination { sends.len().min(receives.len()) } else { sends.len().max(receives.len()) };
    for k in 0..pairs {
        let halves: Vec<(u32, u32)> =
            sends.get(k).map(|n| (source, *n)).into_iter().chain(receives.get(k).map(|n| (destination, *n))).collect();
        let of: Vec<&CommRecord> = halves.iter().map(|(rank, number)| record(*rank, *number)).collect();
        let bytes = |record: &CommRecord| record.count.map(|n| n.saturating_mul(size_of(record.dtype)));
        let sizes: BTreeSet<u64> = of.iter().filter_map(|record| bytes(record)).collect();
        if sizes.len() > 1 {
            for (rank, number) in &halves {
                matching.unmatched.push((*rank, *number, "its two halves differ in size".to_owned()));
            }
            continue;
        }
        let is_told = of.iter().all(|record| record.has_metadata);
        matching.count(is_told);
        let sized = of.iter().find(|record| record.count.is_some());
        matching.matched.push(Matched {
            group,
            kind: CommKind::Send,
            count: sized.and_then(|record| record.count).unwrap_or(0),
            dtype: sized.and_then(|record| record.dtype).unwrap_or(DataType::Uint8),
            reduce: ReduceOp::Sum,
            root: 0,
            is_sized: sized.is_some(),
            members: halves,
            ends: Some((source, destination)),
        });
    }
    let rest = |rank, list: &[u32], what: &str, matching: &mut Matching| {
        for number in list.iter().skip(pairs) {
            matching.unmatched.push((rank, *number, format!("{what} without its other half")));
        }
    };
    rest(source, sends, "a send", matching);
    rest(destination, receives, "a receive", matching);
}

fn size_of(dtype: Option<DataType>) -> u64 {
    dtype.unwrap_or(DataType::Uint8).size_bytes()
}

/// Do two records look like one collective? What is not known fits to everything; shares of an all-to-all may differ.
fn fits(a: &CommRecord, b: &CommRecord) -> bool {
    let sizes = match (a.count, b.count) {
        (Some(mine), Some(theirs)) => mine.saturating_mul(size_of(a.dtype)) == theirs.saturating_mul(size_of(b.dtype)),
        _ => true,
    };
    let is_uneven = a.kind == Some(CommKind::Collective(CollectiveKind::AllToAll));
    a.kind == b.kind && (sizes || is_uneven)
}

fn collectives(group: u32, lists: &BTreeMap<u32, Vec<u32>>, all: &Records<'_>, matching: &mut Matching) {
    let Some((first, reference)) = lists.iter().max_by_key(|(rank, list)| (list.len(), std::cmp::Reverse(**rank)))
    else {
        return;
    };
    let record = |rank: u32, number: u32| &all[&rank][number as usize];
    let mut partners: Vec<Vec<(u32, u32)>> = reference.iter().map(|number| vec![(*first, *number)]).collect();
    for (rank, list) in lists.iter().filter(|(rank, _)| *rank != first) {
        let mine: Vec<&CommRecord> = reference.iter().map(|number| record(*first, *number)).collect();
        let theirs: Vec<&CommRecord> = list.iter().map(|number| record(*rank, *number)).collect();
        let mut used = vec![false; list.len()];
        for (at, other) in align(&mine, &theirs) {
            partners[at].push((*rank, list[other]));
            used[other] = true;
        }
        for (number, _) in list.iter().zip(&used).filter(|(_, used)| !**used) {
            let why = format!("no such call of rank {first} in its place of group {group}");
            matching.unmatched.push((*rank, *number, why));
        }
    }
    for mut members in partners {
        if members.len() < lists.len() {
            for (rank, number) in members {
                matching.unmatched.push((
                    rank,
                    number,
                    format!("not recorded by all ranks of group {group} with a trace"),
                ));
            }
            continue;
        }
        members.sort_unstable();
        let of: Vec<&CommRecord> = members.iter().map(|(rank, number)| record(*rank, *number)).collect();
        let is_told = of.iter().all(|record| record.has_metadata);
        matching.count(is_told);
        let sized: Vec<u64> = of.iter().filter_map(|record| record.count).collect();
        let mean = sized.iter().map(|count| u128::from(*count)).sum::<u128>().div_ceil((sized.len() as u128).max(1));
        let reference = of[0];
        matching.matched.push(Matched {
            group,
            kind: reference.kind.expect("only records with a kind are listed"),
            count: u64::try_from(mean).unwrap_or(u64::MAX),
            dtype: of.iter().find_map(|record| record.dtype).unwrap_or(DataType::Uint8),
            reduce: reference.reduce,
            root: reference.root,
            is_sized: sized.len() == of.len() && mean > 0,
            members,
            ends: None,
        });
    }
}

/// Pairs of positions that are one collective.
fn align(mine: &[&CommRecord], theirs: &[&CommRecord]) -> Vec<(usize, usize)> {
    if mine.iter().chain(theirs).all(|record| record.sequence.is_some()) {
        let numbers: BTreeMap<Option<u64>, usize> = theirs.iter().enumerate().map(|(at, r)| (r.sequence, at)).collect();
        if numbers.len() == theirs.len() {
            let pair = |(at, record): (usize, &&CommRecord)| {
                let other = *numbers.get(&record.sequence)?;
                fits(record, theirs[other]).then_some((at, other))
            };
            return mine.iter().enumerate().filter_map(pair).collect();
        }
    }
    shifted(mine, theirs).unwrap_or_else(|| step_by_step(mine, theirs))
}

/// One list moved against the other, as little as possible, so that all that overlaps fits; at least half of the shorter does.
fn shifted(mine: &[&CommRecord], theirs: &[&CommRecord]) -> Option<Vec<(usize, usize)>> {
    const FARTHEST: i64 = 4096;
    let farthest = FARTHEST.min(mine.len().max(theirs.len()) as i64);
    let shifts = (0..=farthest).flat_map(|shift| [shift, -shift]);
    for shift in shifts {
        let (from, start) = ((-shift).max(0) as usize, shift.max(0) as usize);
        let len = mine.len().saturating_sub(from).min(theirs.len().saturating_sub(start));
        let is_enough = len > 0 && len * 2 >= mine.len().min(theirs.len());
        if is_enough && (0..len).all(|k| fits(mine[from + k], theirs[start + k])) {
            return Some((0..len).map(|k| (from + k, start + k)).collect());
        }
    }
    None
}

/// Side by side; where two do not fit, the fewest are left out so that the next ones fit.
fn step_by_step(mine: &[&CommRecord], theirs: &[&CommRecord]) -> Vec<(usize, usize)> {
    const AHEAD: usize = 64;
    let mut pairs = Vec::new();
    let (mut at, mut other) = (0, 0);
    while at < mine.len() && other < theirs.len() {
        if fits(mine[at], theirs[other]) {
            pairs.push((at, other));
            (at, other) = (at + 1, other + 1);
            continue;
        }
        let skip = (1..=2 * AHEAD).find_map(|total| {
            let ways = (0..=total.min(AHEAD)).map(|left| (at + left, other + total - left));
            let mut ways = ways.filter(|(at, other)| *at < mine.len() && *other < theirs.len());
            ways.find(|(at, other)| fits(mine[*at], theirs[*other]))
        });
        match skip {
            Some(next) => (at, other) = next,
            None => break,
        }
    }
    pairs
}
