//! From a collective call to the recurrence it runs, and to everybody's end.

use super::channels::{self, Share, Tuned};
use super::protocol::{Protocol, ProtocolCosts};
use super::shape::CommShape;
use super::window::LIMIT;
use super::{CollectiveKind, chain, nvls, p2p, ring, tree};
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use serde::Serialize;

/// A collective as all members of a communicator call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CollectiveCall {
    /// Which collective.
    pub kind: CollectiveKind,
    /// Size of the full buffer: count x element size for all-reduce, broadcast and reduce; members x count x element size
    /// for all-gather, reduce-scatter, all-to-all, gather and scatter.
    pub bytes: u64,
    /// Group rank of the root, 0 where there is none.
    pub root: u32,
    /// Collectives of one group that NCCL has fused into this one ([`super::fusion`]); `bytes` are theirs together. 1 for
    /// one alone.
    pub ops: u32,
}

/// How a collective is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// One ring through all members.
    Ring,
    /// Two complementary trees, half of the bytes on each.
    Tree,
    /// A chain along the ring, from or to the root.
    Chain,
    /// Messages between pairs of members.
    Direct,
    /// Reduced and handed out by the switches of one node.
    Nvls,
    /// The same in every node, and trees over the nodes.
    NvlsTree,
    /// Parallel aggregated trees.
    Pat,
}

impl Algorithm {
    /// Is its time that of NCCL's own formula, as nothing finer is modelled ([`super::nvls`])?
    #[must_use]
    pub fn is_formula(self) -> bool {
        matches!(self, Self::Nvls | Self::NvlsTree | Self::Pat)
    }
}

/// Algorithm and protocol of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Choice {
    /// How the bytes travel.
    pub algorithm: Algorithm,
    /// How their arrival is told.
    pub protocol: Protocol,
}

/// Working memory and cache of [`completion`]. One per thread; results do not depend on its history.
#[derive(Debug, Default)]
pub struct Scratch {
    arrivals: Vec<i64>,
    ends: Vec<i64>,
    work: Work,
    cache: Cache,
}

#[derive(Debug, Default)]
struct Work {
    occupancy: Vec<i64>,
    last_occupancy: Vec<i64>,
    latency: Vec<i64>,
    order: Vec<u32>,
    arrivals: Vec<i64>,
    out: Vec<i64>,
    values: Vec<i64>,
    ring: ring::RingScratch,
    tree: tree::TreeScratch,
}

/// An algorithm, the index of a protocol of the shape, and the most channels (0: all of them as one wide one).
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) algorithm: Algorithm,
    pub(super) protocol: usize,
    channels: u32,
}

/// What is known about a call when nobody is late.
#[derive(Clone, Debug)]
struct Outcome {
    way: Way,
    /// End of the last rank after the common arrival, with the launch; [`SimTime::MAX`] if beyond the limit.
    last: SimTime,
    /// Ends after the common arrival, without the launch.
    ends: Ends,
    /// What runs over the ring, if all its links are alike.
    uniform: Option<ring::Uniform>,
}

#[derive(Clone, Debug)]
enum Ends {
    Same(i64),
    Each(Box<[i64]>),
}

#[derive(Debug, Default)]
struct Cache {
    outcomes: FxHashMap<(u64, CollectiveCall), Outcome>,
    stored: usize,
}

/// Ends kept before the cache starts anew (32 MiB).
const CACHED_ENDS: usize = 1 << 22;

/// End of every rank (`out[r]`, group rank `r`) of a collective that rank `r` reaches at `arrivals[r]`.
///
/// Exact under skew for the model of this module. O(members x distinct links); O(members) when all arrive together and
/// the call was seen before. A call of no bytes ends at once and holds nobody, as in NCCL; a communicator of one member
/// only pays the launch.
///
/// # Panics
/// If `arrivals` or `out` has not one entry per member, or `root` is not a member.
pub fn completion(
    shape: &CommShape,
    call: &CollectiveCall,
    arrivals: &[SimTime],
    out: &mut [SimTime],
    scratch: &mut Scratch,
) {
    assert_eq!(arrivals.len(), shape.len(), "one arrival per member");
    assert_eq!(out.len(), shape.len(), "one end per member");
    assert!((call.root as usize) < shape.len(), "root {} of a communicator of {}", call.root, shape.len());
    if call.bytes == 0 {
        out.copy_from_slice(arrivals);
        return;
    }
    if are_all(arrivals, arrivals[0]) {
        together(shape, call, arrivals[0], out, scratch);
        return;
    }
    let way = scratch.outcome(shape, call).way;
    let launch = shape.protocols[way.protocol].launch;
    let Scratch { arrivals: from, ends, work, .. } = scratch;
    from.clear();
    from.extend(arrivals.iter().map(|arrival| at_least_limit(*arrival).as_ps()));
    ends.clear();
    ends.resize(shape.len(), 0);
    if from.iter().any(|arrival| *arrival > LIMIT) || !evaluate(shape, call, way, from, ends, work) {
        out.fill(SimTime::MAX);
        return;
    }
    out.iter_mut().zip(&*ends).for_each(|(out, end)| *out = SimTime::from_ps(*end) + launch);
}

/// Are all of them this one? Without a branch for each: communicators are large, and mostly the answer is yes.
fn are_all(arrivals: &[SimTime], first: SimTime) -> bool {
    const AT_A_TIME: usize = 256;
    let differs = |chunk: &[SimTime]| chunk.iter().fold(0, |bits, one| bits | (one.as_ps() ^ first.as_ps())) != 0;
    !arrivals.chunks(AT_A_TIME).any(differs)
}

/// The ends of members that all come at once; the latest of them.
fn together(
    shape: &CommShape,
    call: &CollectiveCall,
    first: SimTime,
    out: &mut [SimTime],
    scratch: &mut Scratch,
) -> SimTime {
    let outcome = scratch.outcome(shape, call);
    let start = at_least_limit(first) + shape.protocols[outcome.way.protocol].launch;
    match &outcome.ends {
        _ if outcome.last == SimTime::MAX || first.as_ps() > LIMIT => {
            out.fill(SimTime::MAX);
            SimTime::MAX
        }
        Ends::Same(end) => {
            let end = start + SimTime::from_ps(*end);
            out.fill(end);
            end
        }
        Ends::Each(ends) => {
            // Both within the limit, so that the sum cannot overflow; saturating ones would take four times as long.
            out.iter_mut().zip(ends).for_each(|(out, end)| *out = SimTime::from_ps(start.as_ps().wrapping_add(*end)));
            at_least_limit(first) + outcome.last
        }
    }
}

/// [`completion`] where it takes less than to look up an earlier one: nobody is late, or the call runs over a ring of equal
/// links. Returns the latest end (and leaves `out` unspecified if that is [`SimTime::MAX`]), or `None` elsewhere.
pub(crate) fn quick_completion(
    shape: &CommShape,
    call: &CollectiveCall,
    arrivals: &[SimTime],
    out: &mut [SimTime],
    scratch: &mut Scratch,
) -> Option<SimTime> {
    let first = *arrivals.first()?;
    if call.bytes == 0 {
        return None;
    }
    if are_all(arrivals, first) {
        return Some(together(shape, call, first, out, scratch));
    }
    let outcome = scratch.outcome(shape, call);
    let (uniform, launch) = (outcome.uniform?, shape.protocols[outcome.way.protocol].launch);
    let (least, most) = arrivals.iter().fold((first, first), |(least, most), a| (least.min(*a), most.max(*a)));
    if least.as_ps() < -LIMIT || most.as_ps() > LIMIT {
        return None;
    }
    let Scratch { arrivals: from, ends, .. } = scratch;
    from.clear();
    from.extend(shape.ring.iter().map(|rank| arrivals[*rank as usize].as_ps()));
    uniform.completion(from, ends);
    let mut latest = SimTime::ZERO;
    for (rank, end) in shape.ring.iter().zip(&*ends) {
        let end = SimTime::from_ps(*end) + launch;
        out[*rank as usize] = end;
        latest = latest.max(end);
    }
    Some(latest)
}

/// A call whose ends follow from the arrivals of a whole batch of communicators by a few loops.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchForm {
    /// A ring of equal links, and the time before it starts.
    Ring(ring::Uniform, SimTime),
    /// Everybody ends so long after the last one has come.
    Together(SimTime),
}

/// The form of a call, if it has one and moves bytes.
pub(super) fn batch_form(shape: &CommShape, call: &CollectiveCall, scratch: &mut Scratch) -> Option<BatchForm> {
    if call.bytes == 0 || shape.len() < 2 {
        return None;
    }
    let outcome = scratch.outcome(shape, call);
    if outcome.last > SimTime::from_ps(LIMIT) {
        return None;
    }
    if call.kind == CollectiveKind::AllToAll || outcome.way.algorithm.is_formula() {
        return Some(BatchForm::Together(outcome.last));
    }
    Some(BatchForm::Ring(outcome.uniform?, shape.protocols[outcome.way.protocol].launch))
}

/// How a call that moves bytes between members is carried out.
pub(super) fn algorithm(shape: &CommShape, call: &CollectiveCall, scratch: &mut Scratch) -> Option<Algorithm> {
    (call.bytes > 0 && shape.len() > 1).then(|| scratch.outcome(shape, call).way.algorithm)
}

/// Time from the common arrival of all members to the end of the last one.
#[must_use]
pub fn uniform_cost(shape: &CommShape, call: &CollectiveCall) -> SimTime {
    if call.bytes == 0 || shape.is_empty() {
        return SimTime::ZERO;
    }
    decide(shape, call, &mut Work::default()).last
}

/// Time from a rank's coming to a call until it takes part: the kernel's launch, whose length goes by protocol. None if the call
/// moves nothing. Of the collectives of one launch only the first waits for it ([`crate::collective::turns`]).
pub fn launch_time(shape: &CommShape, call: &CollectiveCall, scratch: &mut Scratch) -> SimTime {
    if call.bytes == 0 || shape.is_empty() {
        return SimTime::ZERO;
    }
    shape.protocols[scratch.outcome(shape, call).way.protocol].launch
}

/// How `call` is carried out, as the profile's `network.tuning` says: as NCCL chooses, or the way that ends first when nobody is
/// late (ties go to the ring and to Simple). Where NCCL's settings forbid every way, [`CommShape::refusal`] tells why, the
/// call never ends, and this tells of a ring.
#[must_use]
pub fn choice(shape: &CommShape, call: &CollectiveCall) -> Choice {
    let Way { algorithm, protocol, .. } = decide(shape, call, &mut Work::default()).way;
    Choice { algorithm, protocol: shape.protocols[protocol].protocol }
}

/// The way that `call` takes.
pub(super) fn way(shape: &CommShape, call: &CollectiveCall) -> Way {
    decide(shape, call, &mut Work::default()).way
}

impl Scratch {
    fn outcome(&mut self, shape: &CommShape, call: &CollectiveCall) -> &Outcome {
        let Self { work, cache, .. } = self;
        if cache.stored > CACHED_ENDS {
            *cache = Cache::default();
        }
        cache.outcomes.entry((shape.id, *call)).or_insert_with(|| {
            let mut outcome = decide(shape, call, work);
            outcome.uniform = uniform_ring(shape, call, outcome.way);
            cache.stored += match &outcome.ends {
                Ends::Same(_) => 8,
                Ends::Each(ends) => 8 + ends.len(),
            };
            outcome
        })
    }
}

fn at_least_limit(time: SimTime) -> SimTime {
    time.max(SimTime::from_ps(-LIMIT))
}

/// The algorithms a collective may take.
fn algorithms(kind: CollectiveKind) -> &'static [Algorithm] {
    match kind {
        CollectiveKind::AllReduce => &[Algorithm::Ring, Algorithm::Tree],
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => &[Algorithm::Ring],
        CollectiveKind::Broadcast | CollectiveKind::Reduce => &[Algorithm::Chain],
        CollectiveKind::AllToAll | CollectiveKind::Gather | CollectiveKind::Scatter => &[Algorithm::Direct],
    }
}

/// Evaluates the call with everybody arriving at 0, in every way it may take, and keeps the best.
fn decide(shape: &CommShape, call: &CollectiveCall, work: &mut Work) -> Outcome {
    if let Some(changes) = &shape.changes {
        // Nobody knows of a bad link beforehand.
        let way = decide(&changes.healthy, call, work).way;
        return without_skew(shape, call, way, work);
    }
    if let Some(tuned) = shape.tuned.as_deref() {
        return tuned_outcome(shape, tuned, call, work);
    }
    let mut best: Option<Outcome> = None;
    for &algorithm in algorithms(call.kind) {
        // Messages between pairs are modelled under Simple only.
        let protocols = if algorithm == Algorithm::Direct { 1 } else { shape.protocols.len() };
        for protocol in 0..protocols {
            let outcome = without_skew(shape, call, Way { algorithm, protocol, channels: 0 }, work);
            if best.as_ref().is_none_or(|best| outcome.last < best.last) {
                best = Some(outcome);
            }
        }
    }
    best.expect("every collective has an algorithm, and every shape the Simple protocol")
}

/// The way that NCCL takes.
fn tuned_outcome(shape: &CommShape, tuned: &Tuned, call: &CollectiveCall, work: &mut Work) -> Outcome {
    let alone = Way { algorithm: algorithms(call.kind)[0], protocol: 0, channels: 0 };
    let way = match tuned.choose(call) {
        Some(_) if shape.len() < 2 => alone,
        None => alone,
        Some(Err(_)) => return never(Way { algorithm: Algorithm::Ring, ..alone }),
        Some(Ok(chosen)) => {
            let is_it = |costs: &ProtocolCosts| costs.protocol == chosen.protocol;
            let protocol = shape.protocols.iter().position(is_it).expect("only protocols of the shape are chosen");
            let is_chain = algorithms(call.kind) == [Algorithm::Chain];
            let algorithm = if is_chain { Algorithm::Chain } else { chosen.algorithm };
            Way { algorithm, protocol, channels: chosen.channels }
        }
    };
    without_skew(shape, call, way, work)
}

fn never(way: Way) -> Outcome {
    Outcome { way, last: SimTime::MAX, ends: Ends::Same(i64::MAX), uniform: None }
}

fn without_skew(shape: &CommShape, call: &CollectiveCall, way: Way, work: &mut Work) -> Outcome {
    let arrivals = vec![0; shape.len()];
    let mut ends = vec![0; shape.len()];
    if !evaluate(shape, call, way, &arrivals, &mut ends, work) {
        return never(way);
    }
    let last = ends.iter().copied().max().unwrap_or(0);
    let ends = if ends.iter().all(|end| *end == last) { Ends::Same(last) } else { Ends::Each(ends.into()) };
    Outcome { way, last: shape.protocols[way.protocol].launch + SimTime::from_ps(last), ends, uniform: None }
}

/// The ends without the launch, or false if some time may exceed the limit.
fn evaluate(
    shape: &CommShape,
    call: &CollectiveCall,
    way: Way,
    arrivals: &[i64],
    out: &mut [i64],
    work: &mut Work,
) -> bool {
    if shape.len() == 1 {
        out.copy_from_slice(arrivals);
        return true;
    }
    match way.algorithm {
        Algorithm::Ring => run_ring(shape, call, way, arrivals, out, work),
        Algorithm::Tree => run_trees(shape, call, way, arrivals, out, work),
        Algorithm::Chain => run_chain(shape, call, way, arrivals, out, work),
        Algorithm::Direct => run_direct(shape, call, arrivals, out),
        Algorithm::Nvls | Algorithm::NvlsTree | Algorithm::Pat => {
            nvls::formula(shape, call, way.algorithm, shape.protocols[way.protocol].launch, arrivals, out)
        }
    }
}

/// Can `messages` messages and `hops` hops of the slowest link be added up without leaving the evaluators' range?
fn in_range(messages: u64, hops: usize, occupancy: &[i64], latency: &[i64]) -> bool {
    let slowest = |costs: &[i64]| i128::from(costs.iter().copied().max().unwrap_or(0));
    let edges = i128::from(messages) + 2 * hops as i128;
    edges.saturating_mul(slowest(occupancy) + slowest(latency)) <= i128::from(LIMIT)
}

/// Messages that every rank of a ring sends, and their size.
fn ring_messages(n: u64, costs: &ProtocolCosts, call: &CollectiveCall) -> (u64, u64) {
    let steps = if call.kind == CollectiveKind::AllReduce { 2 * (n - 1) } else { n - 1 };
    // The buffer goes round in loops of one step per member; all loops, steps and slices are of the same size.
    let part = call.bytes.div_ceil(n);
    let loops = part.div_ceil(costs.ring_step_bytes);
    let slice_bytes = part.div_ceil(loops.saturating_mul(costs.slices));
    (loops.saturating_mul(steps).saturating_mul(costs.slices), slice_bytes)
}

/// Messages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) messages: u64,
    /// Of each, counted on all channels' links: a channel has a share of them.
    pub(crate) bytes: u64,
}

/// The share of the fullest channel and its chunk size, if the way is one on channels.
pub(super) fn on_channels<'a>(
    shape: &'a CommShape,
    call: &CollectiveCall,
    way: Way,
) -> Option<(&'a Tuned, Share, u64)> {
    if way.channels == 0 {
        return None;
    }
    let tuned = shape.tuned.as_deref()?;
    let protocol = shape.protocols[way.protocol].protocol;
    let share = tuned.share(call, protocol, way.channels);
    Some((tuned, share, tuned.chunk(way.algorithm, protocol, call, &share)))
}

/// What every rank of a ring sends: full loops, then the last one. Second: slices of a step.
pub(super) fn ring_runs(shape: &CommShape, call: &CollectiveCall, way: Way) -> ([Run; 2], u64) {
    let n = shape.len() as u64;
    let costs = &shape.protocols[way.protocol];
    let Some((tuned, share, chunk)) = on_channels(shape, call, way) else {
        let (messages, bytes) = ring_messages(n, costs, call);
        return ([Run { messages, bytes }, Run::default()], costs.slices);
    };
    let steps = if call.kind == CollectiveKind::AllReduce { 2 * (n - 1) } else { n - 1 };
    let slices = channels::slices(costs.protocol);
    let run = |loops: u64, chunk: u64| Run {
        messages: loops.saturating_mul(share.ops).saturating_mul(steps * slices),
        bytes: chunk.div_ceil(slices).saturating_mul(tuned.lanes()),
    };
    let (full, last) = channels::loops(share.bytes, n, chunk);
    ([run(full, chunk), run(u64::from(last > 0), last)], slices)
}

/// The ring of a call whose links are all alike and whose messages, all of one size, get all round it.
fn uniform_ring(shape: &CommShape, call: &CollectiveCall, way: Way) -> Option<ring::Uniform> {
    let n = shape.len();
    if way.algorithm != Algorithm::Ring || n < 2 || call.bytes == 0 {
        return None;
    }
    let class = shape.ring_class[0];
    let costs = &shape.protocols[way.protocol];
    if shape.ring_class.iter().any(|other| *other != class) {
        return None;
    }
    let (runs, slices) = ring_runs(shape, call, way);
    let ([run, Run { messages: 0, .. }] | [Run { messages: 0, .. }, run]) = runs else { return None };
    let link = costs.ring_links[usize::from(class)];
    let (occupancy, latency) = (link.occupancy(run.bytes).as_ps(), link.latency.as_ps());
    if !in_range(run.messages.saturating_mul(2), n, &[occupancy], &[latency]) {
        return None;
    }
    ring::Uniform::new(n, run.messages as i64, slices as i64, occupancy, latency)
}

fn run_ring(
    shape: &CommShape,
    call: &CollectiveCall,
    way: Way,
    arrivals: &[i64],
    out: &mut [i64],
    work: &mut Work,
) -> bool {
    let n = shape.len();
    let costs = &shape.protocols[way.protocol];
    let (runs, slices) = ring_runs(shape, call, way);
    fill_ring_costs(shape, costs, runs[1].bytes, work);
    work.last_occupancy.clone_from(&work.occupancy);
    fill_ring_costs(shape, costs, runs[0].bytes, work);
    // Each run within half of the range: both together are in it.
    let fits = |run: &Run, occupancy: &[i64]| {
        run.messages == 0 || in_range(run.messages.saturating_mul(2), n, occupancy, &work.latency)
    };
    if !fits(&runs[0], &work.occupancy) || !fits(&runs[1], &work.last_occupancy) {
        return false;
    }
    work.arrivals.clear();
    work.arrivals.extend(shape.ring.iter().map(|rank| arrivals[*rank as usize]));
    work.out.clear();
    work.out.resize(n, 0);
    let phase = |run: &Run, occupancy| ring::Phase { messages: run.messages as i64, occupancy };
    let phases = [phase(&runs[0], &work.occupancy), phase(&runs[1], &work.last_occupancy)];
    // The evaluation of several phases costs more than that of one.
    let phases = match runs {
        [_, Run { messages: 0, .. }] => &phases[..1],
        [Run { messages: 0, .. }, _] => &phases[1..],
        _ => &phases[..],
    };
    let ring = ring::Ring { phases, latency: &work.latency, slices: slices as i64 };
    ring::completion(&ring, &work.arrivals, &mut work.out, &mut work.ring);
    shape.ring.iter().zip(&work.out).for_each(|(rank, end)| out[*rank as usize] = *end);
    true
}

/// Occupancy of the link out of, and latency of the link into, every ring position.
fn fill_ring_costs(shape: &CommShape, costs: &ProtocolCosts, bytes: u64, work: &mut Work) {
    let n = shape.len();
    work.values.clear();
    work.values.extend(costs.ring_links.iter().map(|link| link.occupancy(bytes).as_ps()));
    work.occupancy.clear();
    work.occupancy.extend(shape.ring_class.iter().map(|class| work.values[usize::from(*class)]));
    work.latency.clear();
    work.latency.extend((0..n).map(|p| {
        let class = shape.ring_class[if p == 0 { n - 1 } else { p - 1 }];
        costs.ring_links[usize::from(class)].latency.as_ps()
    }));
}

fn run_chain(
    shape: &CommShape,
    call: &CollectiveCall,
    way: Way,
    arrivals: &[i64],
    out: &mut [i64],
    work: &mut Work,
) -> bool {
    let n = shape.len();
    // A broadcast starts at the root; a reduce starts behind it and ends there.
    let root = shape.position[call.root as usize] as usize;
    let first = if call.kind == CollectiveKind::Reduce { (root + 1) % n } else { root };
    work.order.clear();
    work.order.extend((0..n).map(|at| shape.ring[(first + at) % n]));
    work.arrivals.clear();
    work.arrivals.extend(work.order.iter().map(|rank| arrivals[*rank as usize]));
    out.copy_from_slice(arrivals);
    for run in chain_runs(shape, call, way).into_iter().flatten() {
        fill_ring_costs(shape, &shape.protocols[way.protocol], run.bytes, work);
        if !in_range(run.messages, n, &work.occupancy, &work.latency) {
            return false;
        }
        work.occupancy.rotate_left(first);
        work.latency.rotate_left(first);
        work.out.clear();
        work.out.resize(n, 0);
        let chain = chain::Chain { chunks: run.messages as i64, occupancy: &work.occupancy, latency: &work.latency };
        chain::completion(&chain, &work.arrivals, &mut work.out, &mut work.values);
        for (rank, end) in work.order.iter().zip(&work.out) {
            let out = &mut out[*rank as usize];
            *out = (*out).max(*end);
        }
    }
    true
}

/// What goes through a chain: on most channels, and on the last if it is something else.
pub(super) fn chain_runs(shape: &CommShape, call: &CollectiveCall, way: Way) -> [Option<Run>; 2] {
    let Some((tuned, share, chunk)) = on_channels(shape, call, way) else {
        let chunk = shape.protocols[way.protocol].chain_chunk_bytes;
        return [Some(even_chunks(1, call.bytes, chunk, 1)), None];
    };
    let protocol = shape.protocols[way.protocol].protocol;
    let run = |bytes| even_chunks(share.ops, bytes, channels::piece(protocol, chunk, bytes), tuned.lanes());
    let last = run(share.last);
    [(share.per_op > 1).then(|| run(share.bytes)).filter(|run| *run != last), Some(last)]
}

/// Equal pieces of at most `chunk` bytes of each of `ops` buffers, on links divided into `lanes`.
fn even_chunks(ops: u64, bytes: u64, chunk: u64, lanes: u64) -> Run {
    let chunks = bytes.div_ceil(chunk);
    Run { messages: chunks.saturating_mul(ops), bytes: bytes.div_ceil(chunks).saturating_mul(lanes) }
}

/// What goes through each of the two trees: on most channels, and on the last of an op.
pub(super) fn tree_runs(shape: &CommShape, call: &CollectiveCall, way: Way) -> [[Option<Run>; 2]; 2] {
    let Some((tuned, share, chunk)) = on_channels(shape, call, way) else {
        let chunk = shape.protocols[way.protocol].tree_chunk_bytes;
        return [[Some(even_chunks(1, call.bytes.div_ceil(2), chunk, 1)), None]; 2];
    };
    let protocol = shape.protocols[way.protocol].protocol;
    let run = |ops: u64, bytes| {
        (ops > 0).then(|| even_chunks(ops, bytes, channels::piece(protocol, chunk, bytes), tuned.tree_lanes()))
    };
    tuned.on_trees(&share).map(|[most, last]| {
        let (most, last) = (run(most, share.bytes), run(last, share.last));
        [most, last.filter(|_| most != last)]
    })
}

fn run_trees(
    shape: &CommShape,
    call: &CollectiveCall,
    way: Way,
    arrivals: &[i64],
    out: &mut [i64],
    work: &mut Work,
) -> bool {
    let costs = &shape.protocols[way.protocol];
    out.copy_from_slice(arrivals);
    for (rank_tree, runs) in shape.trees.iter().zip(tree_runs(shape, call, way)) {
        for Run { messages: chunks, bytes } in runs.into_iter().flatten() {
            work.values.clear();
            work.values.extend(costs.tree_links.iter().map(|link| link.occupancy(bytes).as_ps()));
            let links = rank_tree.class.iter().map(|class| usize::from(*class));
            work.occupancy.clear();
            work.occupancy.extend(links.clone().map(|link| work.values[link]));
            work.latency.clear();
            work.latency.extend(links.map(|link| costs.tree_links[link].latency.as_ps()));
            if !in_range(chunks, shape.len(), &work.occupancy, &work.latency) {
                return false;
            }
            let edges = tree::Edges { occupancy: &work.occupancy, latency: &work.latency };
            let (parent, order) = (&rank_tree.parent, &rank_tree.order);
            let tree = tree::Tree { parent, order, up: edges, down: edges, chunks: chunks as i64 };
            tree::raise_completion(&tree, arrivals, out, &mut work.tree);
        }
    }
    true
}

fn run_direct(shape: &CommShape, call: &CollectiveCall, arrivals: &[i64], out: &mut [i64]) -> bool {
    let each = call.bytes.div_ceil(shape.len() as u64);
    match call.kind {
        CollectiveKind::Gather => p2p::gather(shape, call.root, each, arrivals, out),
        CollectiveKind::Scatter => p2p::scatter(shape, call.root, each, arrivals, out),
        _ => {
            let last = SimTime::from_ps(arrivals.iter().copied().max().unwrap_or(0));
            out.fill((last + p2p::all_to_all_duration(shape, each)).as_ps());
        }
    }
    out.iter().all(|end| *end <= LIMIT * 2)
}
