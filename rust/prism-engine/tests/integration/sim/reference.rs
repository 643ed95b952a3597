//! What every op's time is by definition: one table per rank, filled in by passing over all ops until nothing changes.

use super::turns;
use prism_engine::collective::fusion::{self, Groupable};
use prism_engine::collective::{self, CollectiveCall, CommShape, Protocol, Scratch};
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, Op, OpKind};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use std::collections::BTreeMap;

/// Times of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankTimes {
    pub(crate) begin: Option<SimTime>,
    pub(crate) iteration_ends: Vec<SimTime>,
    pub(crate) final_time: SimTime,
}

/// A collective or message some ranks have come to.
#[derive(Default)]
struct Meeting {
    arrivals: BTreeMap<u32, (SimTime, Op)>,
    ends: BTreeMap<u32, SimTime>,
    /// Ops fused, and their elements together.
    fused: (u32, u64),
}

type MessageKey = (u32, u32, u32, usize);

struct RankState {
    rank: u32,
    ops: Vec<Op>,
    durations: BTreeMap<u32, SimTime>,
    factor: f64,
    issue: Vec<Option<SimTime>>,
    /// End of an op; of communication, of its launch.
    end: Vec<Option<SimTime>>,
    /// End of a single communication op.
    own_end: Vec<Option<SimTime>>,
}

fn slot_of(op: &Op) -> Option<SlotId> {
    match op.kind {
        OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. } => Some(slot),
        _ => None,
    }
}

fn group_of(op: &Op) -> u32 {
    match op.kind {
        OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
        _ => 0,
    }
}

fn is_sync(op: &Op) -> bool {
    matches!(op.kind, OpKind::StreamSync | OpKind::EventSync { .. } | OpKind::DeviceSync)
}

fn is_host_only(op: &Op) -> bool {
    is_sync(op) || matches!(op.kind, OpKind::Alloc { .. } | OpKind::Free { .. })
}

impl RankState {
    /// Ops launched together with op `i`: consecutive ones of its group.
    fn group_range(&self, i: usize) -> std::ops::Range<usize> {
        let group = group_of(&self.ops[i]);
        if group == 0 {
            return i..i + 1;
        }
        let (mut from, mut to) = (i, i + 1);
        while from > 0 && group_of(&self.ops[from - 1]) == group {
            from -= 1;
        }
        while to < self.ops.len() && group_of(&self.ops[to]) == group {
            to += 1;
        }
        from..to
    }

    /// When the stream has done everything issued before op `i` (`None`: not known yet).
    fn stream_end(&self, stream: StreamId, i: usize) -> Option<SimTime> {
        let last = (0..i).rev().find(|j| self.ops[*j].stream == stream && !is_host_only(&self.ops[*j]));
        let Some(last) = last else { return Some(SimTime::ZERO) };
        // All launches of its group that have the stream hold it.
        let range = self.group_range(last);
        let slots: Vec<_> =
            range.clone().filter(|j| self.ops[*j].stream == stream).map(|j| slot_of(&self.ops[j])).collect();
        let mut latest = self.end[last]?;
        for j in range.filter(|j| slots.contains(&slot_of(&self.ops[*j]))) {
            latest = latest.max(self.end[j]?);
        }
        Some(latest)
    }

    fn latest_record(&self, event: EventId, i: usize) -> Option<usize> {
        (0..i).rev().find(|j| self.ops[*j].kind == OpKind::EventRecord { event })
    }

    fn set_issue(&mut self, i: usize) {
        let before = match i.checked_sub(1) {
            None => Some(SimTime::ZERO),
            Some(p) if is_sync(&self.ops[p]) => self.end[p],
            Some(p) => self.issue[p],
        };
        self.issue[i] = before.map(|before| before + self.ops[i].host_gap);
    }

    /// Iteration of op `i`, and its place in it.
    fn iteration(&self, i: usize) -> (u32, u32) {
        let is_end = |j: &usize| self.ops[*j].kind == OpKind::IterationEnd;
        let start = (0..i).rev().find(is_end).map_or(0, |end| end + 1);
        ((0..i).filter(is_end).count() as u32, (i - start) as u32)
    }

    fn local_end(&self, i: usize, change: &mut Change<'_>) -> Option<SimTime> {
        let op = self.ops[i];
        let issue = self.issue[i]?;
        let on_stream = || Some(issue.max(self.stream_end(op.stream, i)?));
        Some(match op.kind {
            OpKind::Compute { duration, class: ComputeClass::Wait, .. } => {
                on_stream()? + self.durations.get(&(i as u32)).copied().unwrap_or(duration)
            }
            OpKind::Compute { duration, .. } => {
                let own = self.durations.get(&(i as u32)).copied().unwrap_or(duration);
                let (start, (iteration, place)) = (on_stream()?, self.iteration(i));
                let at = At { rank: self.rank, iteration, place, start };
                start + change(&at, own.scaled(self.factor))
            }
            OpKind::EventRecord { .. } | OpKind::TrainingBegin | OpKind::IterationEnd | OpKind::StreamSync => {
                on_stream()?
            }
            OpKind::EventWait { event } => match self.latest_record(event, i) {
                Some(record) => on_stream()?.max(self.end[record]?),
                None => on_stream()?,
            },
            OpKind::EventSync { event } => match self.latest_record(event, i) {
                Some(record) => issue.max(self.end[record]?),
                None => issue,
            },
            OpKind::DeviceSync => {
                let mut latest = issue;
                for stream in self.ops[..i].iter().filter(|op| !is_host_only(op)).map(|op| op.stream) {
                    latest = latest.max(self.stream_end(stream, i)?);
                }
                latest
            }
            OpKind::Alloc { .. } | OpKind::Free { .. } => issue,
            OpKind::Collective { .. } | OpKind::PointToPoint { .. } => return None,
        })
    }

    /// Arrival of the launch that op `i` belongs to.
    fn launch_arrival(&self, i: usize) -> Option<SimTime> {
        let range = self.group_range(i);
        let slot = slot_of(&self.ops[i]);
        let mut arrival = self.issue[range.end - 1]?;
        for j in range.clone().filter(|j| slot_of(&self.ops[*j]) == slot) {
            arrival = arrival.max(self.stream_end(self.ops[j].stream, range.start)?);
        }
        if let Some(previous) = (0..range.start).rev().find(|j| slot_of(&self.ops[*j]) == slot) {
            arrival = arrival.max(self.end[previous]?);
        }
        Some(arrival)
    }

    /// When a single communication op may begin, without its kernel's launch, and whether that is still to come.
    fn arrival(&self, i: usize) -> Option<(SimTime, bool)> {
        let start = self.launch_arrival(i)?;
        let range = self.group_range(i);
        let count = |j: &usize| match self.ops[*j].kind {
            OpKind::Collective { count, .. } => count,
            _ => 0,
        };
        if matches!(self.ops[i].kind, OpKind::Collective { .. }) {
            let (batches, at) = self.batch(i);
            let before: Vec<_> = batches[..at].iter().filter(|batch| range.contains(&batch[0])).collect();
            let is_launched = before.iter().any(|batch| batch.iter().any(|j| count(j) > 0));
            return match before.last() {
                Some(previous) => Some((self.own_end[previous[0]]?, is_launched)),
                None => Some((start, false)),
            };
        }
        // A message comes after the collectives of its launch.
        let is_before = |j: &usize| {
            slot_of(&self.ops[*j]) == slot_of(&self.ops[i]) && matches!(self.ops[*j].kind, OpKind::Collective { .. })
        };
        let mut latest = (start, false);
        for j in range.filter(is_before) {
            latest = (latest.0.max(self.own_end[j]?), latest.1 || count(&j) > 0);
        }
        Some(latest)
    }

    /// How long after that message `i` has its turn.
    fn turn(&self, i: usize, profile: &Profile, members: &[u32]) -> SimTime {
        let me = members.iter().position(|rank| *rank == self.rank).expect("a member") as u32;
        let own = self.group_range(i).filter(|j| slot_of(&self.ops[*j]) == slot_of(&self.ops[i]));
        let (places, messages): (Vec<usize>, Vec<turns::Half>) = own
            .filter_map(|j| match self.ops[j].kind {
                OpKind::PointToPoint { is_send, peer, count, dtype, .. } => {
                    Some((j, turns::Half { is_send, peer, bytes: count * dtype.size_bytes() }))
                }
                _ => None,
            })
            .unzip();
        let leads = turns::leads(profile, members, me, &messages);
        leads[places.iter().position(|j| *j == i).expect("a message")]
    }

    /// The collectives of the slot of op `i` in the order they run, fused ones together, and which of them op `i` is in.
    fn batch(&self, i: usize) -> (Vec<Vec<usize>>, usize) {
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut next = 0;
        while next < self.ops.len() {
            let range = self.group_range(next);
            next = range.end;
            let is_ours = |j: &usize| slot_of(&self.ops[*j]) == slot_of(&self.ops[i]);
            let (places, calls): (Vec<usize>, Vec<_>) = range
                .filter(is_ours)
                .filter_map(|j| match self.ops[j].kind {
                    OpKind::Collective { kind, dtype, reduce, root, count, .. } => {
                        let bytes = count * dtype.size_bytes();
                        Some((j, Groupable { kind, key: (dtype, reduce, root), bytes }))
                    }
                    _ => None,
                })
                .unzip();
            batches.extend(fusion::fuse(&calls).iter().map(|batch| batch.iter().map(|at| places[*at]).collect()));
        }
        let at = batches.iter().position(|batch| batch.contains(&i)).expect("a collective");
        (batches, at)
    }

    fn launch_end(&self, i: usize) -> Option<SimTime> {
        let slot = slot_of(&self.ops[i]);
        let mut end = self.launch_arrival(i)?;
        for j in self.group_range(i).filter(|j| slot_of(&self.ops[*j]) == slot) {
            end = end.max(self.own_end[j]?);
        }
        Some(end)
    }
}

/// A compute op about to start.
pub(crate) struct At {
    pub(crate) rank: u32,
    pub(crate) iteration: u32,
    pub(crate) place: u32,
    pub(crate) start: SimTime,
}

/// Tells the duration of a compute op that would take a given time. Asked once per op, in the order of each stream.
pub(crate) type Change<'a> = dyn FnMut(&At, SimTime) -> SimTime + 'a;

/// Evaluates a job. `Err` are the ranks that do not finish.
pub(crate) fn evaluate(
    graph: &Graph,
    profile: &Profile,
    slow: &BTreeMap<Rank, f64>,
) -> Result<Vec<RankTimes>, Vec<u32>> {
    evaluate_changed(graph, profile, slow, &mut |_, duration| duration)
}

/// The same with other durations.
pub(crate) fn evaluate_changed(
    graph: &Graph,
    profile: &Profile,
    slow: &BTreeMap<Rank, f64>,
    change: &mut Change<'_>,
) -> Result<Vec<RankTimes>, Vec<u32>> {
    let mut ranks: Vec<RankState> = (0..graph.world_size()).map(|rank| rank_state(graph, rank, slow)).collect();
    let mut calls: BTreeMap<(u32, usize), Meeting> = BTreeMap::new();
    let mut messages: BTreeMap<MessageKey, Meeting> = BTreeMap::new();
    loop {
        let mut has_changed = false;
        for state in &mut ranks {
            for i in 0..state.ops.len() {
                if state.end[i].is_some() {
                    continue;
                }
                state.set_issue(i);
                if slot_of(&state.ops[i]).is_some() {
                    has_changed |= communicate(graph, profile, state, i, &mut calls, &mut messages);
                }
                state.end[i] =
                    if slot_of(&state.ops[i]).is_some() { state.launch_end(i) } else { state.local_end(i, change) };
                has_changed |= state.end[i].is_some();
            }
        }
        if !has_changed {
            break;
        }
    }
    let stuck: Vec<u32> = ranks.iter().filter(|r| r.end.contains(&None)).map(|r| r.rank).collect();
    if stuck.is_empty() { Ok(ranks.iter().map(times).collect()) } else { Err(stuck) }
}

fn rank_state(graph: &Graph, rank: u32, slow: &BTreeMap<Rank, f64>) -> RankState {
    let ops: Vec<Op> = graph.template(graph.rank_template(Rank(rank))).iter().collect();
    RankState {
        rank,
        durations: graph.rank_overrides(Rank(rank)).collect(),
        factor: slow.get(&Rank(rank)).copied().unwrap_or(1.0),
        issue: vec![None; ops.len()],
        end: vec![None; ops.len()],
        own_end: vec![None; ops.len()],
        ops,
    }
}

/// Comes to a meeting if the arrival is known, and leaves it if everyone is there.
fn communicate(
    graph: &Graph,
    profile: &Profile,
    state: &mut RankState,
    i: usize,
    calls: &mut BTreeMap<(u32, usize), Meeting>,
    messages: &mut BTreeMap<MessageKey, Meeting>,
) -> bool {
    if state.own_end[i].is_some() {
        return false;
    }
    let Some((mut arrival, is_launched)) = state.arrival(i) else { return false };
    let op = state.ops[i];
    let slot = slot_of(&op).expect("communication");
    let comm = graph.rank_slots(Rank(state.rank))[slot.index()];
    let members = graph.comm_members(CommId(comm));
    if matches!(op.kind, OpKind::PointToPoint { .. }) {
        arrival += state.turn(i, profile, members);
    }
    let me = members.iter().position(|rank| *rank == state.rank).expect("a member") as u32;
    let before = |same: &dyn Fn(&OpKind) -> bool| {
        state.ops[..i].iter().filter(|other| slot_of(other) == Some(slot) && same(&other.kind)).count()
    };
    let mut batch = vec![i];
    let meeting = if let OpKind::PointToPoint { is_send, peer, .. } = op.kind {
        let same = |kind: &OpKind| matches!(kind, OpKind::PointToPoint { is_send: s, peer: p, .. } if *s == is_send && *p == peer);
        let (from, to) = if is_send { (me, peer) } else { (peer, me) };
        messages.entry((comm, from, to, before(&same))).or_default()
    } else {
        let (batches, at) = state.batch(i);
        batch.clone_from(&batches[at]);
        calls.entry((comm, at)).or_default()
    };
    let key = if let OpKind::PointToPoint { is_send, .. } = op.kind { u32::from(!is_send) } else { me };
    if is_launched {
        // What follows adds the launch, which was paid before.
        let batch: Vec<Op> = batch.iter().map(|j| state.ops[*j]).collect();
        arrival = arrival - launch(profile, members, &batch);
    }
    let is_new = meeting.arrivals.insert(key, (arrival, op)).is_none();
    if let OpKind::PointToPoint { is_send, peer, .. } = op.kind {
        let (from, to) = if is_send { (me, peer) } else { (peer, me) };
        finish_message(profile, members[from as usize], members[to as usize], meeting);
    } else {
        meeting.fused = (batch.len() as u32, batch.iter().map(|j| count_of(&state.ops[*j])).sum());
        finish_call(profile, members, meeting);
    }
    for j in batch {
        state.own_end[j] = meeting.ends.get(&key).copied();
    }
    is_new || state.own_end[i].is_some()
}

/// The launch of a message, or of collectives fused into one.
pub(crate) fn launch(profile: &Profile, members: &[u32], batch: &[Op]) -> SimTime {
    let network = &profile.network;
    let ns = match batch[0].kind {
        OpKind::Collective { .. } => {
            let call = call_of(members, batch[0], (batch.len() as u32, batch.iter().map(count_of).sum()));
            if call.bytes == 0 {
                return SimTime::ZERO;
            }
            match collective::choice(&CommShape::new(members, profile), &call).protocol {
                Protocol::Simple => network.collective_launch_ns,
                Protocol::Ll => network.ll.expect("chosen").launch_ns,
                Protocol::Ll128 => network.ll128.expect("chosen").launch_ns,
            }
        }
        _ => network.collective_launch_ns,
    };
    SimTime::from_ns(i64::try_from(ns).expect("a launch"))
}

pub(crate) fn count_of(op: &Op) -> u64 {
    match op.kind {
        OpKind::Collective { count, .. } => count,
        _ => 0,
    }
}

fn call_of(members: &[u32], op: Op, (ops, count): (u32, u64)) -> CollectiveCall {
    let OpKind::Collective { kind, dtype, root, .. } = op.kind else { unreachable!("a call") };
    let is_whole = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce);
    let bytes = count * dtype.size_bytes() * if is_whole { 1 } else { members.len() as u64 };
    CollectiveCall { kind, bytes, root, ops }
}

fn finish_message(profile: &Profile, from: u32, to: u32, meeting: &mut Meeting) {
    if let (Some((send, op)), Some((receive, _))) = (meeting.arrivals.get(&0), meeting.arrivals.get(&1)) {
        let OpKind::PointToPoint { dtype, count, .. } = op.kind else { unreachable!("a message") };
        let (sent, received) = collective::message(profile, from, to, count * dtype.size_bytes(), *send, *receive);
        meeting.ends = BTreeMap::from([(0, sent), (1, received)]);
    }
}

fn finish_call(profile: &Profile, members: &[u32], meeting: &mut Meeting) {
    if meeting.arrivals.len() < members.len() {
        return;
    }
    let arrivals: Vec<SimTime> = meeting.arrivals.values().map(|(time, _)| *time).collect();
    let mut ends = vec![SimTime::ZERO; members.len()];
    let shape = CommShape::new(members, profile);
    let call = call_of(members, meeting.arrivals[&0].1, meeting.fused);
    collective::completion(&shape, &call, &arrivals, &mut ends, &mut Scratch::default());
    meeting.ends = (0..).zip(ends).collect();
}

fn times(state: &RankState) -> RankTimes {
    let of = |kind: OpKind| {
        state.ops.iter().zip(&state.end).filter(move |(op, _)| op.kind == kind).map(|(_, end)| end.expect("finished"))
    };
    // The host is through when it has issued its last op and done its last wait.
    let host = (0..state.ops.len()).rev().find(|i| is_sync(&state.ops[*i])).and_then(|i| state.end[i]);
    let streams =
        state.ops.iter().zip(&state.end).filter(|(op, _)| !is_host_only(op)).map(|(_, end)| end.expect("finished"));
    RankTimes {
        begin: of(OpKind::TrainingBegin).next_back(),
        iteration_ends: of(OpKind::IterationEnd).collect(),
        final_time: streams.chain(host).max().unwrap_or_default(),
    }
}
