//! Random jobs whose programs fit together.
//!
//! `roles x width` ranks; rank `role * width + index`. Every rank has the same five slots: 0 the world, 1 its role, 2 the ranks
//! of its index in all roles, 3 and 4 the pairs with its neighbours in a ring through its role. Communication is laid out
//! step by step for everybody, so that no job deadlocks; what lies between is random per role.

use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// One thing a role does for itself.
#[derive(Clone, Debug)]
pub(crate) enum Local {
    Compute { stream: u32, us: i64 },
    Record { stream: u32, event: u32 },
    Wait { stream: u32, event: u32 },
    SyncStream { stream: u32 },
    SyncEvent { event: u32 },
    SyncDevice,
    Alloc,
}

/// One thing everybody does.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Local(Vec<Vec<Local>>),
    Call {
        slot: u32,
        kind: CollectiveKind,
        count: u64,
        stream: u32,
    },
    /// Two calls, of different or the same communicator, in one group.
    Pair {
        slots: (u32, u32),
        count: u64,
        streams: (u32, u32),
    },
    /// Collectives of one communicator in one group.
    Batch {
        slot: u32,
        calls: Vec<(CollectiveKind, u64)>,
        stream: u32,
    },
    /// Every rank sends to the next and receives from the previous in its role, in one group.
    Ring {
        count: u64,
        streams: (u32, u32),
    },
    /// Among the ranks of an index in all roles, in one group: collectives, and every rank sends to those at some distances and
    /// receives from those as far on the other side.
    Exchange {
        calls: Vec<(CollectiveKind, u64)>,
        messages: Vec<(u32, u64)>,
        streams: (u32, u32),
    },
    /// One role sends to another.
    Cross {
        from: u32,
        to: u32,
        count: u64,
        stream: u32,
    },
    /// All-reduces over both pairs of a rank, on two streams.
    Neighbours {
        count: u64,
    },
    IterationEnd {
        stream: u32,
    },
}

/// A random job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) roles: u32,
    pub(crate) width: u32,
    pub(crate) steps: Vec<Step>,
    pub(crate) slow: BTreeMap<Rank, f64>,
    pub(crate) overrides: Vec<(u32, usize, i64)>,
    /// Every rank gets a template of its own.
    pub(crate) is_scalar: bool,
}

pub(crate) fn profile() -> Profile {
    Profile::builtin("h100-sxm").expect("built in")
}

fn local() -> impl Strategy<Value = Local> {
    prop_oneof![
        4 => (0..3u32, 0..400i64).prop_map(|(stream, us)| Local::Compute { stream, us }),
        2 => (0..3u32, 0..3u32).prop_map(|(stream, event)| Local::Record { stream, event }),
        2 => (0..3u32, 0..3u32).prop_map(|(stream, event)| Local::Wait { stream, event }),
        1 => (0..3u32).prop_map(|stream| Local::SyncStream { stream }),
        1 => (0..3u32).prop_map(|event| Local::SyncEvent { event }),
        1 => Just(Local::SyncDevice),
        1 => Just(Local::Alloc),
    ]
}

fn kind() -> impl Strategy<Value = CollectiveKind> {
    use CollectiveKind as K;
    prop::sample::select(vec![K::AllReduce, K::AllGather, K::ReduceScatter, K::Broadcast, K::Reduce, K::AllToAll])
}

fn step(roles: u32) -> impl Strategy<Value = Step> {
    let count = prop::sample::select(vec![1u64, 1000, 1 << 20]);
    let streams = (0..3u32, 0..3u32);
    let own = prop::collection::vec(prop::collection::vec(local(), 0..4), roles as usize);
    prop_oneof![
        4 => own.prop_map(Step::Local),
        3 => (0..3u32, kind(), count.clone(), 0..3u32).prop_map(|(slot, kind, count, stream)| Step::Call { slot, kind, count, stream }),
        1 => ((0..3u32, 0..3u32), count.clone(), streams.clone())
            .prop_map(|(slots, count, streams)| Step::Pair { slots, count, streams }),
        1 => (count.clone(), streams).prop_map(|(count, streams)| Step::Ring { count, streams }),
        1 => (0..roles, 0..roles, count.clone(), 0..3u32)
            .prop_map(|(from, to, count, stream)| Step::Cross { from, to, count, stream }),
        1 => count.prop_map(|count| Step::Neighbours { count }),
        1 => (0..3u32).prop_map(|stream| Step::IterationEnd { stream }),
    ]
}

pub(crate) fn job() -> impl Strategy<Value = Job> {
    job_of(1..4, 1..5)
}

/// A job with groups of collectives that NCCL may fuse.
pub(crate) fn batched_job() -> impl Strategy<Value = Job> {
    let count = prop::sample::select(vec![1u64, 3, 100, 1_000, 3_000, 1 << 20]);
    let batch = (0..3u32, prop::collection::vec((kind(), count), 1..7), 0..3u32);
    let batches = prop::collection::vec((any::<prop::sample::Index>(), batch), 1..4);
    (job(), batches).prop_map(|(mut job, batches)| {
        for (at, (slot, calls, stream)) in batches {
            job.steps.insert(at.index(job.steps.len() + 1), Step::Batch { slot, calls, stream });
        }
        job
    })
}

/// A job with groups of collectives and messages.
pub(crate) fn exchanging_job() -> impl Strategy<Value = Job> {
    let count = || prop::sample::select(vec![0u64, 1, 1_000, 100_000, 1 << 20]);
    let calls = prop::collection::vec((kind(), count()), 0..3);
    let messages = prop::collection::vec((0..8u32, count()), 1..9);
    let exchange = (calls, messages, (0..3u32, 0..3u32));
    let exchanges = prop::collection::vec((any::<prop::sample::Index>(), exchange), 1..4);
    (job_of(1..9, 1..4), exchanges).prop_map(|(mut job, exchanges)| {
        for (at, (calls, messages, streams)) in exchanges {
            job.steps.insert(at.index(job.steps.len() + 1), Step::Exchange { calls, messages, streams });
        }
        job
    })
}

/// Nodes so small that communicators of few ranks have several.
pub(crate) fn small_nodes() -> Profile {
    let mut profile = profile();
    (profile.node.gpus, profile.node.nics) = (3, 3);
    profile
}

/// A job of so many roles of so many ranks.
pub(crate) fn job_of(roles: Range<u32>, width: Range<u32>) -> impl Strategy<Value = Job> {
    (roles, width).prop_flat_map(|(roles, width)| {
        let factor = prop::sample::select(vec![0.5, 1.0, 1.3, 7.0]);
        let slow = prop::collection::btree_map((0..roles * width).prop_map(Rank), factor, 0..3);
        let overrides = prop::collection::vec((0..roles * width, 0..40usize, 0..1000i64), 0..4);
        (prop::collection::vec(step(roles), 1..14), slow, overrides, any::<bool>()).prop_map(
            move |(steps, slow, overrides, is_scalar)| Job { roles, width, steps, slow, overrides, is_scalar },
        )
    })
}

pub(crate) fn compute(duration: SimTime) -> OpKind {
    OpKind::Compute { duration, name: NameId(0), class: ComputeClass::Kernel, provenance: Provenance::Measured }
}

pub(crate) fn call(slot: u32, kind: CollectiveKind, count: u64, group: u32) -> OpKind {
    let (dtype, reduce) = (DataType::Float32, ReduceOp::Sum);
    OpKind::Collective { slot: SlotId(slot), kind, dtype, reduce, root: 0, count, group }
}

pub(crate) fn message(slot: u32, is_send: bool, peer: u32, count: u64, group: u32) -> OpKind {
    OpKind::PointToPoint { slot: SlotId(slot), is_send, dtype: DataType::Float32, peer, count, group }
}

impl Job {
    pub(crate) fn world_size(&self) -> u32 {
        self.roles * self.width
    }

    pub(crate) fn graph(&self) -> Arc<Graph> {
        self.graph_of(&self.programs())
    }

    /// The same job, but that one in four of its compute ops is a wait, which no slow-down touches.
    pub(crate) fn graph_with_waits(&self) -> Arc<Graph> {
        let mut programs = self.programs();
        for op in programs.iter_mut().flatten() {
            if let OpKind::Compute { duration, class, .. } = &mut op.kind
                && duration.as_ns() / 1000 % 4 == 3
            {
                *class = ComputeClass::Wait;
            }
        }
        self.graph_of(&programs)
    }

    fn programs(&self) -> Vec<Vec<Op>> {
        (0..self.roles).map(|role| self.program(role)).collect()
    }

    fn graph_of(&self, programs: &[Vec<Op>]) -> Arc<Graph> {
        let mut builder = GraphBuilder::new(self.world_size());
        builder.intern_name("work");
        let slots = self.comms(&mut builder);
        let mut templates = Vec::new();
        for rank in 0..self.world_size() {
            let role = rank / self.width;
            if self.is_scalar || rank % self.width == 0 {
                templates.push(builder.add_template(&format!("role {role}"), &programs[role as usize]).expect("valid"));
            }
            builder.set_rank(Rank(rank), *templates.last().expect("pushed"), slots[rank as usize].clone());
        }
        for (rank, number, us) in &self.overrides {
            let ops = programs[(rank / self.width) as usize].iter().enumerate();
            let mut compute = ops.filter(|(_, op)| matches!(op.kind, OpKind::Compute { .. }));
            if let Some((op, _)) = compute.nth(*number) {
                builder.override_duration(Rank(*rank), op as u32, SimTime::from_ns(us * 1000));
            }
        }
        let graph = builder.finish().expect("a valid graph");
        graph.check().expect("programs that fit together");
        Arc::new(graph)
    }

    fn comms(&self, builder: &mut GraphBuilder) -> Vec<Vec<CommId>> {
        let (roles, width) = (self.roles, self.width);
        let world = builder.add_comm((0..roles * width).map(Rank).collect());
        let mut slots = vec![vec![world]; (roles * width) as usize];
        for role in 0..roles {
            let comm = builder.add_comm((0..width).map(|index| Rank(role * width + index)).collect());
            (0..width).for_each(|index| slots[(role * width + index) as usize].push(comm));
        }
        for index in 0..width {
            let comm = builder.add_comm((0..roles).map(|role| Rank(role * width + index)).collect());
            (0..roles).for_each(|role| slots[(role * width + index) as usize].push(comm));
        }
        if width > 1 {
            for role in 0..roles {
                let at = |index: u32| role * width + index % width;
                let pairs: Vec<CommId> =
                    (0..width).map(|index| builder.add_comm(vec![Rank(at(index)), Rank(at(index + 1))])).collect();
                for index in 0..width {
                    let previous = pairs[((index + width - 1) % width) as usize];
                    slots[at(index) as usize].extend([previous, pairs[index as usize]]);
                }
            }
        }
        slots
    }

    /// Op program of a role.
    pub(crate) fn program(&self, role: u32) -> Vec<Op> {
        let mut writer = Writer { ops: Vec::new(), group: 0, gap_ns: i64::from(role) };
        writer.add(0, OpKind::TrainingBegin);
        for step in &self.steps {
            self.write(role, step, &mut writer);
        }
        writer.ops
    }

    fn write(&self, role: u32, step: &Step, writer: &mut Writer) {
        match step {
            Step::Local(own) => own[role as usize].iter().for_each(|local| writer.local(local)),
            Step::Call { slot, kind, count, stream } => writer.add(*stream, call(*slot, *kind, *count, 0)),
            Step::Pair { slots, count, streams } => {
                writer.group += 1;
                writer.add(streams.0, call(slots.0, CollectiveKind::AllReduce, *count, writer.group));
                writer.add(streams.1, call(slots.1, CollectiveKind::AllGather, *count, writer.group));
            }
            Step::Batch { slot, calls, stream } => {
                writer.group += 1;
                for (kind, count) in calls {
                    writer.add(*stream, call(*slot, *kind, *count, writer.group));
                }
            }
            Step::Exchange { calls, messages, streams } => {
                writer.group += 1;
                for (distance, count) in messages {
                    let (distance, roles) = (distance % self.roles, self.roles);
                    let (to, from) = ((role + distance) % roles, (role + roles - distance) % roles);
                    writer.add(streams.0, message(2, true, to, *count, writer.group));
                    writer.add(streams.1, message(2, false, from, *count, writer.group));
                }
                for (kind, count) in calls {
                    writer.add(streams.0, call(2, *kind, *count, writer.group));
                }
            }
            Step::Ring { count, streams } if self.width > 1 => {
                writer.group += 1;
                writer.add(streams.0, message(4, true, 1, *count, writer.group));
                writer.add(streams.1, message(3, false, 0, *count, writer.group));
            }
            Step::Cross { from, to, count, stream } if from != to => {
                if role == *from {
                    writer.add(*stream, message(2, true, *to, *count, 0));
                } else if role == *to {
                    writer.add(*stream, message(2, false, *from, *count, 0));
                }
            }
            Step::Neighbours { count } if self.width > 1 => {
                writer.group += 1;
                writer.add(0, call(3, CollectiveKind::AllReduce, *count, writer.group));
                writer.add(1, call(4, CollectiveKind::AllReduce, *count, writer.group));
            }
            Step::IterationEnd { stream } => writer.add(*stream, OpKind::IterationEnd),
            Step::Ring { .. } | Step::Cross { .. } | Step::Neighbours { .. } => {}
        }
    }
}

struct Writer {
    ops: Vec<Op>,
    group: u32,
    gap_ns: i64,
}

impl Writer {
    fn add(&mut self, stream: u32, kind: OpKind) {
        self.gap_ns = (self.gap_ns * 7 + 13) % 5000;
        self.ops.push(Op { host_gap: SimTime::from_ns(self.gap_ns), stream: StreamId(stream), kind });
    }

    fn local(&mut self, local: &Local) {
        if let Local::Wait { event, .. } | Local::SyncEvent { event } = *local {
            // A graph has no waits for what was never recorded.
            let record = OpKind::EventRecord { event: EventId(event) };
            if !self.ops.iter().any(|op| op.kind == record) {
                return;
            }
        }
        match *local {
            Local::Compute { stream, us } => self.add(stream, compute(SimTime::from_ns(us * 1000))),
            Local::Record { stream, event } => self.add(stream, OpKind::EventRecord { event: EventId(event) }),
            Local::Wait { stream, event } => self.add(stream, OpKind::EventWait { event: EventId(event) }),
            Local::SyncStream { stream } => self.add(stream, OpKind::StreamSync),
            Local::SyncEvent { event } => self.add(0, OpKind::EventSync { event: EventId(event) }),
            Local::SyncDevice => self.add(0, OpKind::DeviceSync),
            Local::Alloc => self.add(0, OpKind::Alloc { bytes: 1 }),
        }
    }
}
