//! Workloads made up by formula, to compare with other simulators and to measure speed on.

use crate::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use crate::graph::{Graph, GraphBuilder, GraphError};
use crate::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use crate::units::SimTime;

/// One training step of a transformer with tensor, data and pipeline parallelism.
///
/// Rank `tp + TP * (dp + DP * pp)`. Pipeline schedule 1F1B without interleaving. Forward of a microbatch: receive the
/// activation, then per half layer compute and a tensor-parallel all-reduce, then send without waiting. Backward the same with
/// gradients. At the end one data-parallel all-reduce. Messages have streams of their own: a receive waits only for the
/// one before, a send for what it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

impl Default for TransformerStep {
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 8,
            pp: 8,
            microbatches: 16,
            layers: 2,
            iterations: 1,
            forward: SimTime::from_ns(1_000_000),
            backward: SimTime::from_ns(2_000_000),
            tensor_bytes: 32 << 20,
            activation_bytes: 32 << 20,
            gradient_bytes: 512 << 20,
        }
    }
}

/// Streams of a rank.
const COMPUTE: StreamId = StreamId(0);
/// Slots of a rank; the message slots exist towards existing stages only, so a rank's own numbers are looked up.
const TENSOR: usize = 0;
const DATA: usize = 1;
/// Message ways: activations and gradients, in and out. Way `w` has slot index `2 + w`, stream `1 + w` and event `w`.
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

/// One direction of messages; the lower stage has group rank 0 in its pair.
#[derive(Clone, Copy)]
struct Way {
    number: u32,
    is_send: bool,
    peer: u32,
}

impl TransformerStep {
    /// The step as a graph: one template per stage.
    pub fn graph(&self) -> Result<Graph, GraphError> {
        let mut builder = GraphBuilder::new(self.dp * self.tp * self.pp);
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

    fn rank(&self, tp: u32, dp: u32, pp: u32) -> u32 {
        tp + self.tp * (dp + self.dp * pp)
    }

    fn ranks_of(&self, stage: u32) -> std::ops::Range<u32> {
        self.rank(0, 0, stage)..self.rank(0, 0, stage + 1)
    }

    /// Communicators of each rank: tensor, data, then the four ways.
    fn comms(&self, builder: &mut GraphBuilder) -> Vec<[Option<CommId>; 6]> {
        let mut slots = vec![[None; 6]; (self.dp * self.tp * self.pp) as usize];
        let mut add = |at: &[usize], members: Vec<u32>| {
            let comm = builder.add_comm(members.iter().copied().map(Rank).collect());
            for (index, rank) in members.iter().enumerate() {
                slots[*rank as usize][at[index.min(at.len() - 1)]] = Some(comm);
            }
        };
        for pp in 0..self.pp {
            for dp in 0..self.dp {
                add(&[TENSOR], (0..self.tp).map(|tp| self.rank(tp, dp, pp)).collect());
            }
            for tp in 0..self.tp {
                add(&[DATA], (0..self.dp).map(|dp| self.rank(tp, dp, pp)).collect());
            }
        }
        for low in 0..self.pp.saturating_sub(1) {
            for (from, to) in self.ranks_of(low).zip(self.ranks_of(low + 1)) {
                add(&[2 + ACTIVATION_OUT, 2 + ACTIVATION_IN], vec![from, to]);
                add(&[2 + GRADIENT_IN, 2 + GRADIENT_OUT], vec![from, to]);
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
        for _ in 0..self.step.iterations {
            let warmup = (self.step.pp - self.stage - 1).min(self.step.microbatches);
            (0..warmup).for_each(|_| self.forward());
            for _ in warmup..self.step.microbatches {
                self.forward();
                self.backward();
            }
            (0..warmup).for_each(|_| self.backward());
            self.all_reduce(DATA, self.step.dp, self.step.gradient_bytes);
            self.add(COMPUTE, OpKind::IterationEnd);
        }
        self.ops
    }

    fn forward(&mut self) {
        self.receive(WAYS[ACTIVATION_IN]);
        self.half_layers(self.step.forward, self.names[0]);
        self.send(WAYS[ACTIVATION_OUT]);
    }

    fn backward(&mut self) {
        self.receive(WAYS[GRADIENT_IN]);
        self.half_layers(self.step.backward, self.names[1]);
        self.send(WAYS[GRADIENT_OUT]);
    }

    fn half_layers(&mut self, duration: SimTime, name: NameId) {
        for _ in 0..2 * self.step.layers {
            let (class, provenance) = (ComputeClass::Gemm, Provenance::Default);
            self.add(COMPUTE, OpKind::Compute { duration, name, class, provenance });
            self.all_reduce(TENSOR, self.step.tp, self.step.tensor_bytes);
        }
    }

    fn all_reduce(&mut self, slot: usize, members: u32, bytes: u64) {
        if members > 1 {
            let (kind, dtype, reduce) = (CollectiveKind::AllReduce, DataType::Uint8, ReduceOp::Sum);
            let slot = SlotId(slot as u32);
            self.add(COMPUTE, OpKind::Collective { slot, kind, dtype, reduce, root: 0, count: bytes, group: 0 });
        }
    }

    fn receive(&mut self, way: Way) {
        if self.message(way) {
            let event = EventId(way.number);
            self.add(StreamId(1 + way.number), OpKind::EventRecord { event });
            self.add(COMPUTE, OpKind::EventWait { event });
        }
    }

    fn send(&mut self, way: Way) {
        if self.has(way) {
            let event = EventId(way.number);
            self.add(COMPUTE, OpKind::EventRecord { event });
            self.add(StreamId(1 + way.number), OpKind::EventWait { event });
            self.message(way);
        }
    }

    fn has(&self, way: Way) -> bool {
        if way.peer == 0 { self.stage > 0 } else { self.stage + 1 < self.step.pp }
    }

    /// Adds the message if there is such a neighbour.
    fn message(&mut self, way: Way) -> bool {
        if !self.has(way) {
            return false;
        }
        // Slots of ways that do not exist are left out of the rank's table.
        let before = WAYS.iter().filter(|other| other.number < way.number && self.has(**other)).count();
        let slot = SlotId(2 + before as u32);
        let kind = OpKind::PointToPoint {
            slot,
            is_send: way.is_send,
            dtype: DataType::Uint8,
            peer: way.peer,
            count: self.step.activation_bytes,
            group: 0,
        };
        self.add(StreamId(1 + way.number), kind);
        true
    }

    fn add(&mut self, stream: StreamId, kind: OpKind) {
        self.ops.push(Op { host_gap: SimTime::ZERO, stream, kind });
    }
}
