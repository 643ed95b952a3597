//! Workloads made up by formula, to compare with other simulators and to measure speed on.

use crate::collective::tuning::Tuning;
use crate::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use crate::graph::{Graph, GraphBuilder, GraphError};
use crate::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use crate::profile::Profile;
use crate::units::SimTime;
use serde::Deserialize;

/// A cluster without structure, on which the made-up workloads are compared with other simulators: every rank is a node
/// with one card of this bandwidth and latency, collectives are plain rings (one loop, one slice per step, no launch
/// time, one protocol), and trees never win.
#[must_use]
pub fn flat_profile(latency_ns: u64, bytes_per_s: u64) -> Profile {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    "flat".clone_into(&mut profile.name);
    (profile.node.gpus, profile.node.nics) = (1, 1);
    let network = &mut profile.network;
    network.tuning = Tuning::Fastest;
    network.nic_bytes_per_s = bytes_per_s;
    network.nic_efficiency = 1.0;
    network.latency_ns = latency_ns;
    network.collective_launch_ns = 0;
    network.ring_slices_per_step = 1;
    network.ring_step_bytes = 1 << 40;
    network.tree_chunk_bytes = 1 << 40;
    (network.ll, network.ll128) = (None, None);
    profile
}

/// One training step of a transformer with tensor, data, pipeline and expert parallelism.
///
/// Rank `tp + TP * (dp + DP * pp)`. Pipeline schedule 1F1B, with several blocks of layers per stage if interleaved. Forward of a
/// microbatch: receive the activation, then per half layer compute and a tensor-parallel all-reduce, then send without
/// waiting. Backward the same with gradients. At the end one data-parallel all-reduce. Messages have streams of their own: a
/// receive waits only for the one before, a send for what it sends. With experts, the second half of a layer is
/// surrounded by two all-to-alls between `ep` neighbouring data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransformerStep {
    /// Data-parallel degree.
    pub dp: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Layers of a stage.
    pub layers: u32,
    /// Expert-parallel degree, a divisor of `dp`; 1: no experts.
    pub ep: u32,
    /// Blocks of consecutive layers that a stage has, a divisor of `layers`; 1: not interleaved.
    pub interleave: u32,
    /// Steps in a row.
    pub iterations: u32,
    /// Compute of half a layer in the forward pass.
    pub forward: SimTime,
    /// Compute of half a layer in the backward pass.
    pub backward: SimTime,
    /// Size of a tensor-parallel all-reduce.
    pub tensor_bytes: u64,
    /// Size of the message between two stages.
    pub activation_bytes: u64,
    /// Size of the data-parallel all-reduce of one rank.
    pub gradient_bytes: u64,
    /// What one rank sends in an all-to-all between experts, its own share included.
    pub expert_bytes: u64,
}

impl Default for TransformerStep {
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 8,
            pp: 8,
            microbatches: 16,
            layers: 2,
            ep: 1,
            interleave: 1,
            iterations: 1,
            forward: SimTime::from_ns(1_000_000),
            backward: SimTime::from_ns(2_000_000),
            tensor_bytes: 32 << 20,
            activation_bytes: 32 << 20,
            gradient_bytes: 512 << 20,
            expert_bytes: 32 << 20,
        }
    }
}

/// Largest number of ranks; the graph has several communicators per rank.
const MAX_RANKS: u64 = 1 << 22;
/// Most ops of one stage.
const MAX_OPS: u64 = 1 << 28;

/// Streams of a rank.
const COMPUTE: StreamId = StreamId(0);
/// Slots of a rank. Those of the message ways exist towards existing stages only, that of the experts comes after them: a
/// rank's own numbers are looked up.
const TENSOR: u32 = 0;
const DATA: u32 = 1;
const FIRST_WAY: u32 = 2;
/// Message ways: activations and gradients, in and out. Way `w` has stream `1 + w` and event `w`.
const WAYS: [Way; 4] = [
    Way { number: 0, is_send: false, peer: 0 },
    Way { number: 1, is_send: true, peer: 1 },
    Way { number: 2, is_send: false, peer: 1 },
    Way { number: 3, is_send: true, peer: 0 },
];
const ACTIVATION_IN: usize = 0;
const ACTIVATION_OUT: usize = 1;
const GRADIENT_IN: usize = 2;
const GRADIENT_OUT: usize = 3;
/// Index of the experts' communicator behind those of the ways.
const EXPERT: usize = 6;

/// One direction of messages; the stage before has group rank 0 in its pair.
#[derive(Clone, Copy)]
struct Way {
    number: u32,
    is_send: bool,
    peer: u32,
}

impl TransformerStep {
    /// The step as a graph: one template per stage. An error names a degree that does not fit.
    pub fn graph(&self) -> Result<Graph, GraphError> {
        self.build(None)
    }

    /// The same, to be replayed on this cluster unless another is asked for.
    pub fn graph_on(&self, profile: &Profile) -> Result<Graph, GraphError> {
        self.build(Some(profile))
    }

    fn build(&self, profile: Option<&Profile>) -> Result<Graph, GraphError> {
        self.check().map_err(|what| GraphError::invalid(None, None, what))?;
        let mut builder = GraphBuilder::new(self.dp * self.tp * self.pp);
        if let Some(profile) = profile {
            builder.set_meta("profile", profile.to_toml());
        }
        let names = [builder.intern_name("forward"), builder.intern_name("backward")];
        let slots = self.comms(&mut builder);
        for stage in 0..self.pp {
            let program = StageProgram { step: self, stage, names, ops: Vec::new() };
            let template = builder.add_template(&format!("stage {stage}"), &program.write())?;
            for rank in self.ranks_of(stage) {
                let own = slots[rank as usize].iter().flatten().copied().collect();
                builder.set_rank(Rank(rank), template, own);
            }
        }
        builder.finish()
    }

    fn check(&self) -> Result<(), String> {
        let &Self { dp, tp, pp, microbatches, layers, ep, interleave, .. } = self;
        for (name, degree) in [("dp", dp), ("tp", tp), ("pp", pp), ("ep", ep), ("interleave", interleave)] {
            if degree == 0 {
                return Err(format!("{name} is 0: it must be at least 1"));
            }
        }
        let ranks = u64::from(dp).checked_mul(u64::from(tp)).and_then(|ranks| ranks.checked_mul(u64::from(pp)));
        if ranks.is_none_or(|ranks| ranks > MAX_RANKS) {
            return Err(format!("dp {dp} x tp {tp} x pp {pp} is more than {MAX_RANKS} ranks"));
        }
        let halves = u64::from(self.iterations) * u64::from(microbatches);
        if halves.saturating_mul(12 * (u64::from(layers) + 1)) > MAX_OPS {
            return Err(format!("a stage would have more than {MAX_OPS} ops"));
        }
        if dp % ep != 0 {
            return Err(format!("ep {ep} does not divide dp {dp}"));
        }
        if interleave > 1 && pp == 1 {
            return Err(format!("interleave is {interleave} but there is one stage"));
        }
        if layers % interleave != 0 || (interleave > 1 && layers == 0) {
            return Err(format!("interleave {interleave} does not divide layers {layers}"));
        }
        if interleave > 1 && microbatches % pp != 0 {
            return Err(format!("interleaved, but pp {pp} does not divide microbatches {microbatches}"));
        }
        if self.forward < SimTime::ZERO || self.backward < SimTime::ZERO {
            return Err("a compute time is negative".to_owned());
        }
        Ok(())
    }

    fn rank(&self, tp: u32, dp: u32, pp: u32) -> u32 {
        tp + self.tp * (dp + self.dp * pp)
    }

    fn ranks_of(&self, stage: u32) -> std::ops::Range<u32> {
        self.rank(0, 0, stage)..self.rank(0, 0, stage + 1)
    }

    /// Stages that send activations on; interleaved, the last sends to the first.
    fn sending_stages(&self) -> u32 {
        if self.interleave > 1 { self.pp } else { self.pp - 1 }
    }

    /// Communicators of each rank: tensor, data, the four ways, experts.
    fn comms(&self, builder: &mut GraphBuilder) -> Vec<[Option<CommId>; 7]> {
        let mut slots = vec![[None; 7]; (self.dp * self.tp * self.pp) as usize];
        let mut add = |at: &[usize], members: Vec<u32>| {
            let comm = builder.add_comm(members.iter().copied().map(Rank).collect());
            for (index, rank) in members.iter().enumerate() {
                slots[*rank as usize][at[index.min(at.len() - 1)]] = Some(comm);
            }
        };
        for pp in 0..self.pp {
            for dp in 0..self.dp {
                add(&[TENSOR as usize], (0..self.tp).map(|tp| self.rank(tp, dp, pp)).collect());
            }
            for tp in 0..self.tp {
                add(&[DATA as usize], (0..self.dp).map(|dp| self.rank(tp, dp, pp)).collect());
            }
            if self.ep > 1 {
                for (tp, first) in (0..self.tp).flat_map(|tp| (0..self.dp / self.ep).map(move |group| (tp, group))) {
                    let dps = first * self.ep..(first + 1) * self.ep;
                    add(&[EXPERT], dps.map(|dp| self.rank(tp, dp, pp)).collect());
                }
            }
        }
        for stage in 0..self.sending_stages() {
            let way = FIRST_WAY as usize;
            for (from, to) in self.ranks_of(stage).zip(self.ranks_of((stage + 1) % self.pp)) {
                add(&[way + ACTIVATION_OUT, way + ACTIVATION_IN], vec![from, to]);
                add(&[way + GRADIENT_IN, way + GRADIENT_OUT], vec![from, to]);
            }
        }
        slots
    }
}

/// Writes the program of one stage.
struct StageProgram<'a> {
    step: &'a TransformerStep,
    stage: u32,
    names: [NameId; 2],
    ops: Vec<Op>,
}

impl StageProgram<'_> {
    fn write(mut self) -> Vec<Op> {
        self.add(COMPUTE, OpKind::TrainingBegin);
        let (pp, blocks) = (self.step.pp, self.step.interleave);
        let all = self.step.microbatches * blocks;
        let ahead = pp - self.stage - 1;
        let warmup = if blocks == 1 { ahead } else { 2 * ahead + (blocks - 1) * pp }.min(all);
        for _ in 0..self.step.iterations {
            (0..warmup).for_each(|number| self.forward(number));
            for number in warmup..all {
                self.forward(number);
                self.backward(number - warmup);
            }
            (all - warmup..all).for_each(|number| self.backward(number));
            self.all_reduce(DATA, self.step.dp, self.step.gradient_bytes);
            self.add(COMPUTE, OpKind::IterationEnd);
        }
        self.ops
    }

    /// Block of the `number`-th forward pass of the stage: `pp` microbatches per block in turn.
    fn block(&self, number: u32) -> u32 {
        number % (self.step.pp * self.step.interleave) / self.step.pp
    }

    fn forward(&mut self, number: u32) {
        let block = self.block(number);
        if self.stage > 0 || block > 0 {
            self.receive(WAYS[ACTIVATION_IN]);
        }
        self.half_layers(self.step.forward, self.names[0]);
        if self.stage + 1 < self.step.pp || block + 1 < self.step.interleave {
            self.send(WAYS[ACTIVATION_OUT]);
        }
    }

    fn backward(&mut self, number: u32) {
        let block = self.step.interleave - 1 - self.block(number);
        if self.stage + 1 < self.step.pp || block + 1 < self.step.interleave {
            self.receive(WAYS[GRADIENT_IN]);
        }
        self.half_layers(self.step.backward, self.names[1]);
        if self.stage > 0 || block > 0 {
            self.send(WAYS[GRADIENT_OUT]);
        }
    }

    /// One block of layers.
    fn half_layers(&mut self, duration: SimTime, name: NameId) {
        for half in 0..2 * (self.step.layers / self.step.interleave) {
            let is_expert = half % 2 == 1 && self.step.ep > 1;
            if is_expert {
                self.all_to_all();
            }
            let (class, provenance) = (ComputeClass::Gemm, Provenance::Default);
            self.add(COMPUTE, OpKind::Compute { duration, name, class, provenance });
            if is_expert {
                self.all_to_all();
            }
            self.all_reduce(TENSOR, self.step.tp, self.step.tensor_bytes);
        }
    }

    fn all_reduce(&mut self, slot: u32, members: u32, bytes: u64) {
        if members > 1 {
            self.collective(slot, CollectiveKind::AllReduce, bytes);
        }
    }

    fn all_to_all(&mut self) {
        let slot = FIRST_WAY + WAYS.iter().filter(|way| self.has(**way)).count() as u32;
        self.collective(slot, CollectiveKind::AllToAll, self.step.expert_bytes / u64::from(self.step.ep));
    }

    fn collective(&mut self, slot: u32, kind: CollectiveKind, count: u64) {
        let (dtype, reduce, slot) = (DataType::Uint8, ReduceOp::Sum, SlotId(slot));
        self.add(COMPUTE, OpKind::Collective { slot, kind, dtype, reduce, root: 0, count, group: 0 });
    }

    fn receive(&mut self, way: Way) {
        self.message(way);
        let event = EventId(way.number);
        self.add(StreamId(1 + way.number), OpKind::EventRecord { event });
        self.add(COMPUTE, OpKind::EventWait { event });
    }

    fn send(&mut self, way: Way) {
        let event = EventId(way.number);
        self.add(COMPUTE, OpKind::EventRecord { event });
        self.add(StreamId(1 + way.number), OpKind::EventWait { event });
        self.message(way);
    }

    /// Is there a stage before or behind?
    fn has(&self, way: Way) -> bool {
        let is_wrapped = self.step.interleave > 1;
        is_wrapped || if way.peer == 0 { self.stage > 0 } else { self.stage + 1 < self.step.pp }
    }

    fn message(&mut self, way: Way) {
        // Slots of ways that do not exist are left out of the rank's table.
        let before = WAYS.iter().filter(|other| other.number < way.number && self.has(**other)).count();
        let slot = SlotId(FIRST_WAY + before as u32);
        let kind = OpKind::PointToPoint {
            slot,
            is_send: way.is_send,
            dtype: DataType::Uint8,
            peer: way.peer,
            count: self.step.activation_bytes,
            group: 0,
        };
        self.add(StreamId(1 + way.number), kind);
    }

    fn add(&mut self, stream: StreamId, kind: OpKind) {
        self.ops.push(Op { host_gap: SimTime::ZERO, stream, kind });
    }
}
