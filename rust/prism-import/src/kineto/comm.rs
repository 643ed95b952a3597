//! Communication of one rank: what each kernel of NCCL is, as far as the trace tells.

use super::event::{Activity, CommKind, CommMeta, Names, RankTrace};
use super::read::{kind_of_kernel, reduce_of_kernel};
use indexmap::IndexMap;
use prism_engine::graph::op::{CollectiveKind, DataType, ReduceOp};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A process group: its ranks in group-rank order, and its name where it has one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    /// Global ranks.
    pub ranks: Arc<[u32]>,
    /// Name, or how the group was inferred.
    pub label: String,
}

/// A kernel of NCCL.
#[derive(Clone, Debug)]
pub struct CommRecord {
    /// Index into the rank's activities.
    pub activity: u32,
    /// Which communication; none if it cannot be told.
    pub kind: Option<CommKind>,
    /// Its group, as a number in [`Groups`]; none if it cannot be told.
    pub group: Option<u32>,
    /// Elements as NCCL counts them (see [`count`]).
    pub count: Option<u64>,
    /// Element type.
    pub dtype: Option<DataType>,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Root: group rank.
    pub root: u32,
    /// Source and destination of a message: global ranks.
    pub ends: Option<(u32, u32)>,
    /// Number in the group.
    pub sequence: Option<u64>,
    /// Group and size are in the trace.
    pub has_metadata: bool,
}

/// Groups of all ranks.
#[derive(Debug, Default)]
pub struct Groups(IndexMap<GroupKey, ()>);

impl Groups {
    fn number(&mut self, key: GroupKey) -> u32 {
        self.0.insert_full(key, ()).0 as u32
    }

    /// A group by number.
    pub fn key(&self, number: u32) -> &GroupKey {
        self.0.get_index(number as usize).expect("numbers are handed out by this table").0
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Host positions of launches: index into the calls by correlation.
pub type Launches = FxHashMap<u64, u32>;

/// The call behind every number that something on the device has, too. Of several calls with one number the first counts.
pub fn launches(trace: &RankTrace) -> Launches {
    let used: BTreeSet<u64> =
        trace.activities.iter().map(|activity| activity.correlation).filter(|id| *id != 0).collect();
    let mut launches = Launches::default();
    for (index, call) in trace.calls.iter().enumerate() {
        if used.contains(&call.correlation) {
            launches.entry(call.correlation).or_insert(index as u32);
        }
    }
    launches
}

/// The rank's kernels of NCCL in the order of their launches.
pub fn records(trace: &RankTrace, rank: u32, world_size: u32, names: &Names, groups: &mut Groups) -> Vec<CommRecord> {
    let launches = launches(trace);
    let launch_of = |activity: &Activity| launches.get(&activity.correlation).map(|call| &trace.calls[*call as usize]);
    let mut found: Vec<(i64, u32)> = trace
        .activities
        .iter()
        .enumerate()
        .filter(|(_, activity)| activity.is_nccl)
        .map(|(index, activity)| (launch_of(activity).map_or(activity.start, |call| call.start), index as u32))
        .collect();
    found.sort_unstable_by_key(|(at, index)| (*at, trace.activities[*index as usize].start, *index));
    let by_thread = annotations_by_thread(trace);
    let config: BTreeMap<&str, &Arc<[u32]>> =
        trace.groups.iter().map(|group| (group.name.as_str(), &group.ranks)).collect();
    let mut metas: Vec<CommMeta> = Vec::with_capacity(found.len());
    for (_, index) in &found {
        let activity = &trace.activities[*index as usize];
        let mut meta = activity.meta.map(|meta| trace.metas[meta as usize].clone()).unwrap_or_default();
        if let Some(call) = launch_of(activity) {
            for annotation in enclosing(by_thread.get(&call.thread).map_or(&[][..], Vec::as_slice), call.start, trace) {
                meta.fill_from(&trace.metas[annotation as usize]);
            }
        }
        if let Some(name) = &meta.group_name
            && let Some(ranks) = config.get(name.as_str())
        {
            meta.ranks = Some(Arc::clone(ranks));
        }
        let name = names.text(activity.name);
        meta.kind = meta.kind.or_else(|| kind_of_kernel(name));
        meta.reduce = Some(reduce_of_kernel(name));
        metas.push(meta);
    }
    let keys = group_keys(trace, rank, world_size, &found, &metas);
    let record = |((index, meta), key): (((_, u32), CommMeta), Option<GroupKey>)| {
        let size = key.as_ref().map(|key| key.ranks.len() as u64);
        CommRecord {
            activity: index.1,
            kind: meta.kind,
            count: meta.kind.zip(size).and_then(|(kind, size)| count(kind, meta.input, meta.output, size)),
            dtype: meta.dtype,
            reduce: meta.reduce.unwrap_or(ReduceOp::Sum),
            root: meta.root.filter(|root| u64::from(*root) < size.unwrap_or(0)).unwrap_or(0),
            ends: meta.ends,
            sequence: meta.sequence,
            has_metadata: meta.is_complete(),
            group: key.map(|key| groups.number(key)),
        }
    };
    let with_keys = found.iter().map(|(at, index)| (*at, *index)).zip(metas).zip(keys);
    with_keys.map(record).collect()
}

/// Elements as NCCL counts them: of the whole buffer for all-reduce and broadcast, of one rank's share for all-gather,
/// reduce-scatter, gather and scatter, of what goes to one peer for all-to-all. None if the sizes are not known.
fn count(kind: CommKind, input: Option<u64>, output: Option<u64>, size: u64) -> Option<u64> {
    use CollectiveKind as C;
    let per_rank = |elements: u64| elements / size.max(1);
    match kind {
        CommKind::Collective(C::AllGather | C::Gather) => input.or(output.map(per_rank)),
        CommKind::Collective(C::ReduceScatter | C::Scatter) => output.or(input.map(per_rank)),
        CommKind::Collective(C::AllToAll) => input.map(|elements| elements.div_ceil(size.max(1))),
        CommKind::Receive => output.or(input),
        _ => input.or(output),
    }
}

fn annotations_by_thread(trace: &RankTrace) -> BTreeMap<u64, Vec<u32>> {
    let mut by_thread: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (index, annotation) in trace.annotations.iter().enumerate() {
        by_thread.entry(annotation.thread).or_default().push(index as u32);
    }
    for list in by_thread.values_mut() {
        list.sort_by_key(|index| trace.annotations[*index as usize].start);
    }
    by_thread
}

/// What the annotations tell in which a time lies, innermost first.
fn enclosing<'a>(sorted: &'a [u32], at: i64, trace: &'a RankTrace) -> impl Iterator<Item = u32> + 'a {
    const NESTED: usize = 8;
    let end = sorted.partition_point(|index| trace.annotations[*index as usize].start <= at);
    let inside = move |index: &&u32| {
        let annotation = &trace.annotations[**index as usize];
        annotation.start + annotation.duration >= at
    };
    sorted[..end].iter().rev().take(NESTED).filter(inside).map(move |index| trace.annotations[*index as usize].meta)
}

/// The group of every kernel: as told; else that of the other kernels on its stream, because a process group has a stream of its
/// own; else, where no kernel tells any, the whole world once per stream.
fn group_keys(
    trace: &RankTrace,
    rank: u32,
    world_size: u32,
    found: &[(i64, u32)],
    metas: &[CommMeta],
) -> Vec<Option<GroupKey>> {
    let told = |meta: &CommMeta| {
        let ranks = meta.ranks.clone().filter(|ranks| ranks.contains(&rank) && is_set(ranks))?;
        Some(GroupKey { ranks, label: meta.group_name.clone().unwrap_or_default() })
    };
    let mut by_stream: BTreeMap<(u32, i64), BTreeSet<GroupKey>> = BTreeMap::new();
    let mut streams: Vec<(u32, i64)> = Vec::new();
    for ((_, index), meta) in found.iter().zip(metas) {
        let stream = trace.activities[*index as usize].stream;
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        by_stream.entry(stream).or_default().extend(told(meta));
    }
    let nobody_tells = by_stream.values().all(BTreeSet::is_empty);
    let inferred = |stream: &(u32, i64)| {
        let known = &by_stream[stream];
        if let (1, Some(only)) = (known.len(), known.first()) {
            return Some(only.clone());
        }
        let ordinal = streams.iter().position(|other| other == stream)?;
        let label = format!("assumed: the world, stream {ordinal} of NCCL");
        (nobody_tells && world_size > 1).then(|| GroupKey { ranks: (0..world_size).collect(), label })
    };
    let keys = found.iter().zip(metas);
    keys.map(|((_, index), meta)| told(meta).or_else(|| inferred(&trace.activities[*index as usize].stream))).collect()
}

fn is_set(ranks: &[u32]) -> bool {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|pair| pair[0] != pair[1])
}
