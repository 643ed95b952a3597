//! Programs of all ranks, with those that left no trace, as one execution graph.

use super::comm::Groups;
use super::event::{CommKind, Names};
use super::matching::Matched;
use super::network::{Sample, Scale, fit};
use super::program::{Item, Part, Program, What};
use crate::ImportError;
use crate::notes::Notes;
use prism_engine::collective::{CollectiveCall, CollectiveKind, CommShape, Scratch, completion, message, uniform_cost};
use prism_engine::graph::op::{ComputeClass, Op, OpKind, Provenance};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use std::collections::{BTreeMap, BTreeSet};

/// Name of what a communication took beyond the profile.
pub const BEYOND_MODEL: &str = "communication beyond the network profile";

/// What goes into a graph.
pub struct Job<'a> {
    /// Ranks of the job.
    pub world_size: u32,
    /// Programs of the ranks with a trace.
    pub programs: &'a BTreeMap<u32, Program>,
    /// Communications.
    pub matched: &'a [Matched],
    /// Their groups.
    pub groups: &'a Groups,
    /// Names of kernels.
    pub names: &'a Names,
    /// The network to start from.
    pub profile: &'a Profile,
    /// Facts for the graph's meta.
    pub meta: &'a [(&'static str, String)],
}

/// Times of a communication: per member of its group (of a message: sender and receiver), in order.
struct Meeting {
    arrivals: Vec<i64>,
    /// Recorded ends; none of members without a trace.
    ends: Vec<Option<i64>>,
    ranks: Vec<u32>,
}

/// The graph, and what the profile was scaled by.
pub fn assemble(job: &Job<'_>, notes: &mut Notes) -> Result<(Graph, Scale), ImportError> {
    let mut meetings = meetings(job);
    let (profile, scale) = fit(job.profile, &samples(job, &meetings), |group| job.groups.key(group).ranks.to_vec());
    let mut shapes: BTreeMap<u32, CommShape> = BTreeMap::new();
    let mut scratch = Scratch::default();
    let mut modelled = Vec::with_capacity(meetings.len());
    for (one, meeting) in job.matched.iter().zip(&mut meetings) {
        let members = &job.groups.key(one.group).ranks;
        let shape = shapes.entry(one.group).or_insert_with(|| CommShape::new(members, &profile));
        place_absent(one, meeting, shape, &profile);
        modelled.push(model(one, meeting, shape, &profile, &mut scratch));
    }
    let graph = Builder::new(job, &meetings, &modelled).build(&profile, notes)?;
    Ok((graph, scale))
}

fn members_of(one: &Matched, groups: &Groups) -> Vec<u32> {
    one.ends.map_or_else(|| groups.key(one.group).ranks.to_vec(), |(source, destination)| vec![source, destination])
}

fn meetings(job: &Job<'_>) -> Vec<Meeting> {
    let mut meetings: Vec<Meeting> = job
        .matched
        .iter()
        .map(|one| {
            let ranks = members_of(one, job.groups);
            Meeting { arrivals: vec![i64::MIN; ranks.len()], ends: vec![None; ranks.len()], ranks }
        })
        .collect();
    for (rank, program) in job.programs {
        for Part { matched, arrival, end, .. } in &program.parts {
            let meeting = &mut meetings[*matched as usize];
            if let Some(at) = meeting.ranks.iter().position(|other| other == rank) {
                (meeting.arrivals[at], meeting.ends[at]) = (*arrival, Some(*end));
            }
        }
    }
    meetings
}

impl Meeting {
    fn latest_arrival(&self) -> i64 {
        self.arrivals.iter().copied().max().unwrap_or(0)
    }

    fn first_end(&self) -> i64 {
        self.ends.iter().flatten().copied().min().unwrap_or(0)
    }
}

fn call_of(one: &Matched, members: usize) -> Option<CollectiveCall> {
    use CollectiveKind as C;
    let CommKind::Collective(kind) = one.kind else { return None };
    let each = one.count.max(1).saturating_mul(one.dtype.size_bytes());
    let bytes = match kind {
        C::AllReduce | C::Broadcast | C::Reduce => each,
        C::AllGather | C::ReduceScatter | C::AllToAll | C::Gather | C::Scatter => each.saturating_mul(members as u64),
    };
    Some(CollectiveCall { kind, bytes, root: one.root, ops: 1 })
}

fn message_bytes(one: &Matched) -> u64 {
    one.count.max(1).saturating_mul(one.dtype.size_bytes())
}

fn samples(job: &Job<'_>, meetings: &[Meeting]) -> BTreeMap<Sample, (u64, i64)> {
    let mut samples = BTreeMap::new();
    for (one, meeting) in job.matched.iter().zip(meetings) {
        let took = meeting.first_end() - meeting.latest_arrival();
        let sample = match (call_of(one, meeting.ranks.len()), one.ends) {
            (Some(call), _) => {
                Sample::Collective { group: one.group, kind: call.kind as u8, bytes: call.bytes, root: call.root }
            }
            (None, Some((source, destination))) => Sample::Message { source, destination, bytes: message_bytes(one) },
            (None, None) => continue,
        };
        let known = samples.entry(sample).or_insert((0, i64::MAX));
        known.0 += 1;
        known.1 = took.min(known.1);
    }
    samples
}

/// Members without a trace come when the recorded end says they must have come, or with the last of the others.
fn place_absent(one: &Matched, meeting: &mut Meeting, shape: &CommShape, profile: &Profile) {
    if meeting.arrivals.iter().all(|arrival| *arrival != i64::MIN) {
        return;
    }
    let cost = match (call_of(one, meeting.ranks.len()), one.ends) {
        (Some(call), _) => uniform_cost(shape, &call).as_ns(),
        (None, Some((source, destination))) => {
            message(profile, source, destination, message_bytes(one), SimTime::ZERO, SimTime::ZERO).1.as_ns()
        }
        (None, None) => 0,
    };
    let arrival = meeting.latest_arrival().max(meeting.first_end().saturating_sub(cost));
    meeting.arrivals.iter_mut().filter(|a| **a == i64::MIN).for_each(|a| *a = arrival);
}

/// When the profile lets each member go.
fn model(one: &Matched, meeting: &Meeting, shape: &CommShape, profile: &Profile, scratch: &mut Scratch) -> Vec<i64> {
    let arrivals: Vec<SimTime> = meeting.arrivals.iter().map(|arrival| SimTime::from_ns(*arrival)).collect();
    match (call_of(one, meeting.ranks.len()), one.ends) {
        (Some(call), _) => {
            let mut ends = vec![SimTime::ZERO; arrivals.len()];
            completion(shape, &call, &arrivals, &mut ends, scratch);
            ends.into_iter().map(SimTime::as_ns).collect()
        }
        (None, Some((source, destination))) => {
            let (sent, received) = message(profile, source, destination, message_bytes(one), arrivals[0], arrivals[1]);
            vec![sent.as_ns(), received.as_ns()]
        }
        (None, None) => meeting.arrivals.clone(),
    }
}

struct Builder<'a> {
    job: &'a Job<'a>,
    meetings: &'a [Meeting],
    modelled: &'a [Vec<i64>],
    graph: GraphBuilder,
    /// Communicators by group, and the groups of each rank in order of its slots.
    comms: BTreeMap<u32, CommId>,
    slots: BTreeMap<u32, Vec<u32>>,
    kernel_names: BTreeMap<u32, NameId>,
}

impl<'a> Builder<'a> {
    fn new(job: &'a Job<'a>, meetings: &'a [Meeting], modelled: &'a [Vec<i64>]) -> Self {
        let graph = GraphBuilder::new(job.world_size);
        let mut builder = Self {
            job,
            meetings,
            modelled,
            graph,
            comms: BTreeMap::new(),
            slots: BTreeMap::new(),
            kernel_names: BTreeMap::new(),
        };
        let used: BTreeSet<u32> = job.matched.iter().map(|one| one.group).collect();
        for group in used {
            let ranks = &job.groups.key(group).ranks;
            let comm = builder.graph.add_comm(ranks.iter().map(|rank| Rank(*rank)).collect());
            builder.comms.insert(group, comm);
            ranks.iter().for_each(|rank| builder.slots.entry(*rank).or_default().push(group));
        }
        builder
    }

    fn build(mut self, profile: &Profile, notes: &mut Notes) -> Result<Graph, ImportError> {
        self.graph.set_meta("profile", profile.to_toml());
        for (key, value) in self.job.meta {
            self.graph.set_meta(*key, value.clone());
        }
        let beyond = self.graph.intern_name(BEYOND_MODEL);
        for (rank, program) in self.job.programs {
            let ops = self.ops(*rank, program, beyond, notes);
            let template = self.graph.add_template(&format!("rank {rank}"), &ops)?;
            self.graph.set_rank(Rank(*rank), template, self.comms_of(*rank));
        }
        self.absent(notes)?;
        let graph = self.graph.finish()?;
        graph.check()?;
        Ok(graph)
    }

    fn comms_of(&self, rank: u32) -> Vec<CommId> {
        self.slots.get(&rank).into_iter().flatten().map(|group| self.comms[group]).collect()
    }

    fn slot(&self, rank: u32, group: u32) -> SlotId {
        let slot = self.slots.get(&rank).and_then(|groups| groups.binary_search(&group).ok());
        SlotId(slot.expect("a member has a slot for its group") as u32)
    }

    fn kernel_name(&mut self, number: u32) -> NameId {
        let (graph, names) = (&mut self.graph, self.job.names);
        *self.kernel_names.entry(number).or_insert_with(|| graph.intern_name(names.text(number)))
    }

    fn communication(&self, rank: u32, matched: u32) -> OpKind {
        let one = &self.job.matched[matched as usize];
        let slot = self.slot(rank, one.group);
        let (dtype, count) = (one.dtype, one.count.max(1));
        match (one.kind, one.ends) {
            (CommKind::Collective(kind), _) => {
                OpKind::Collective { slot, kind, dtype, reduce: one.reduce, root: one.root, count, group: 0 }
            }
            (_, ends) => {
                let (source, destination) = ends.expect("a message has two ends");
                let is_send = rank == source;
                let peer = if is_send { destination } else { source };
                let members = &self.job.groups.key(one.group).ranks;
                let peer = members.iter().position(|member| *member == peer).expect("checked while matching") as u32;
                OpKind::PointToPoint { slot, is_send, dtype, peer, count, group: 0 }
            }
        }
    }

    fn ops(&mut self, rank: u32, program: &Program, beyond: NameId, notes: &mut Notes) -> Vec<Op> {
        let mut ops = Vec::with_capacity(program.items.len());
        for Item { gap, stream, what } in &program.items {
            let kind = match *what {
                What::Compute { duration, name, class } => OpKind::Compute {
                    duration: SimTime::from_ns(duration),
                    name: self.kernel_name(name),
                    class,
                    provenance: Provenance::Imported,
                },
                What::Communicate(part) => self.communication(rank, program.parts[part as usize].matched),
                What::Record(event) => OpKind::EventRecord { event: EventId(event) },
                What::Wait(event) => OpKind::EventWait { event: EventId(event) },
                What::StreamSync => OpKind::StreamSync,
                What::EventSync(event) => OpKind::EventSync { event: EventId(event) },
                What::DeviceSync => OpKind::DeviceSync,
                What::Begin => OpKind::TrainingBegin,
                What::End => OpKind::IterationEnd,
            };
            ops.push(Op { host_gap: SimTime::from_ns(*gap), stream: StreamId(*stream), kind });
            if let What::Communicate(part) = *what {
                let rest = self.rest(rank, &program.parts[part as usize], notes);
                if rest > 0 {
                    let kind = OpKind::Compute {
                        duration: SimTime::from_ns(rest),
                        name: beyond,
                        class: ComputeClass::Wait,
                        provenance: Provenance::Imported,
                    };
                    ops.push(Op { host_gap: SimTime::ZERO, stream: StreamId(*stream), kind });
                }
            }
        }
        ops
    }

    /// What a rank's part took beyond the profile.
    fn rest(&self, rank: u32, part: &Part, notes: &mut Notes) -> i64 {
        let meeting = &self.meetings[part.matched as usize];
        let at = meeting.ranks.iter().position(|member| *member == rank).expect("its parts are its own");
        let rest = part.end - self.modelled[part.matched as usize][at];
        if rest < 0 {
            let one = &self.job.matched[part.matched as usize];
            notes.add("faster_than_profile", || {
                format!("rank {rank}: {:?} of {} elements by {} ns", one.kind, one.count, -rest)
            });
        }
        rest.max(0)
    }

    /// Programs of ranks without a trace: they come to what the others share with them, and do nothing else.
    fn absent(&mut self, notes: &mut Notes) -> Result<(), ImportError> {
        let mut by_group: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (number, one) in (0..).zip(self.job.matched) {
            by_group.entry(one.group).or_default().push(number);
        }
        let mut known: BTreeMap<Vec<(i64, u32, OpKindKey)>, prism_engine::ids::TemplateId> = BTreeMap::new();
        for rank in (0..self.job.world_size).filter(|rank| !self.job.programs.contains_key(rank)) {
            let groups = self.slots.get(&rank).cloned().unwrap_or_default();
            let mut calls: Vec<(i64, u32)> = Vec::new();
            for group in &groups {
                let mut last = i64::MIN;
                for number in &by_group[group] {
                    let meeting = &self.meetings[*number as usize];
                    if let Some(at) = meeting.ranks.iter().position(|member| *member == rank) {
                        last = last.max(meeting.arrivals[at]);
                        calls.push((last, *number));
                    }
                }
            }
            calls.sort_by_key(|(arrival, number)| (*arrival, *number));
            let mut ops = Vec::with_capacity(calls.len());
            let mut key = Vec::with_capacity(calls.len());
            let mut host = 0;
            for (arrival, number) in calls {
                let kind = self.communication(rank, number);
                let slot = self.slot(rank, self.job.matched[number as usize].group);
                // Halves of messages and collectives have streams of their own, so that none waits for another's.
                let stream = StreamId(slot.0 * 3 + stream_of(&kind));
                let gap = (arrival - host).max(0);
                host += gap;
                key.push((gap, stream.0, op_key(&kind)));
                ops.push(Op { host_gap: SimTime::from_ns(gap), stream, kind });
            }
            let template = if let Some(template) = known.get(&key) {
                *template
            } else {
                let name =
                    if ops.is_empty() { "absent, unused".to_owned() } else { format!("absent like rank {rank}") };
                let template = self.graph.add_template(&name, &ops)?;
                known.insert(key, template);
                template
            };
            if !ops.is_empty() {
                notes.add("absent_ranks", || format!("rank {rank}: no trace; it comes when the others say it came"));
            }
            let comms = self.comms_of(rank);
            self.graph.set_rank(Rank(rank), template, comms);
        }
        Ok(())
    }
}

type OpKindKey = (u8, u8, u32, u64, u32);

fn stream_of(kind: &OpKind) -> u32 {
    match kind {
        OpKind::PointToPoint { is_send: true, .. } => 1,
        OpKind::PointToPoint { .. } => 2,
        _ => 0,
    }
}

fn op_key(kind: &OpKind) -> OpKindKey {
    match *kind {
        OpKind::Collective { slot, kind, dtype, root, count, .. } => (kind as u8, dtype as u8, root, count, slot.0),
        OpKind::PointToPoint { slot, is_send, dtype, peer, count, .. } => {
            (if is_send { 100 } else { 101 }, dtype as u8, peer, count, slot.0)
        }
        _ => (u8::MAX, 0, 0, 0, 0),
    }
}
