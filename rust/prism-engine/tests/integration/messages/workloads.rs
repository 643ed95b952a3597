//! The two workloads that other simulators were measured on, as message programs.
//!
//! `ring`: one ring all-reduce over N ranks, 2(N - 1) steps of ceil(S / N) bytes. `step`: one training step; a rank is
//! tp + TP x (dp + DP x pp); non-interleaved 1F1B over PP stages and M microbatches; a forward is [a 32 MiB activation comes
//! in], 2L times (1000 us, a ring all-reduce of 32 MiB over TP), [the activation goes out, nobody waits for that]; a backward
//! is the same with 2000 us; at the end a ring all-reduce of 512 MiB over DP.

use prism_engine::ids::Rank;
use prism_engine::messages::loggops::LogGops;
use prism_engine::messages::{Lanes, MessageProgram, MessageProgramBuilder, OpIndex};

/// 5 us latency and 50e9 bytes per second in ticks of 20 ps, all messages eager.
pub(crate) const PARAMETERS: LogGops = LogGops {
    latency: 250_000,
    overhead: 0,
    gap: 0,
    gap_per_byte: 1.0,
    overhead_per_byte: 0.0,
    rendezvous_above: u64::MAX,
    tick_ps: 20,
};

const TICKS_PER_US: u64 = 50_000;
const ACTIVATION: u64 = 32 << 20;
const GRADIENTS: u64 = 512 << 20;
const LANES: Lanes = Lanes { cpu: 0, nic: 0 };

/// Tags keep the uses apart.
const FORWARD: u32 = 1;
const BACKWARD: u32 = 2;
const TENSOR: u32 = 3;
const DATA: u32 = 4;

/// The ops of one rank, each after the one before.
struct RankOps<'a> {
    builder: &'a mut MessageProgramBuilder,
    last: Option<OpIndex>,
}

impl RankOps<'_> {
    fn after_last(&mut self, op: OpIndex) -> OpIndex {
        if let Some(last) = self.last {
            self.builder.requires(op, last).unwrap();
        }
        op
    }

    fn calc(&mut self, us: u64) {
        let op = self.builder.calc(us * TICKS_PER_US, LANES).unwrap();
        self.last = Some(self.after_last(op));
    }

    /// Nothing later waits for the end of a send.
    fn send(&mut self, bytes: u64, peer: u32, tag: u32) {
        let op = self.builder.send(bytes, Rank(peer), tag, LANES).unwrap();
        self.after_last(op);
    }

    fn recv(&mut self, bytes: u64, peer: u32, tag: u32) {
        let op = self.builder.recv(bytes, Some(Rank(peer)), Some(tag), LANES).unwrap();
        self.last = Some(self.after_last(op));
    }

    /// A ring all-reduce over `size` ranks, of which this is number `me`.
    fn ring(&mut self, size: u32, me: u32, member: impl Fn(u32) -> u32, bytes: u64, tag: u32) {
        let part = bytes.div_ceil(size.into());
        let (next, previous) = (member((me + 1) % size), member((me + size - 1) % size));
        for _ in 0..2 * (size - 1) {
            // The receive is posted with the send, and both follow the step before.
            self.send(part, next, tag);
            self.recv(part, previous, tag);
        }
    }
}

/// One ring all-reduce of `bytes` over all ranks.
pub(crate) fn ring(num_ranks: u32, bytes: u64) -> MessageProgram {
    let mut builder = MessageProgramBuilder::new(num_ranks).unwrap();
    for rank in 0..num_ranks {
        builder.begin_rank().unwrap();
        RankOps { builder: &mut builder, last: None }.ring(num_ranks, rank, |member| member, bytes, TENSOR);
    }
    builder.finish().unwrap()
}

/// Sizes of a training step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) dp: u32,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) microbatches: u32,
    pub(crate) layers: u32,
}

impl Step {
    /// The measured form: TP = PP = 8, 16 microbatches, 2 layers.
    pub(crate) fn measured(dp: u32) -> Self {
        Self { dp, tp: 8, pp: 8, microbatches: 16, layers: 2 }
    }

    pub(crate) fn program(self) -> MessageProgram {
        let mut builder = MessageProgramBuilder::new(self.dp * self.tp * self.pp).unwrap();
        for pp in 0..self.pp {
            for dp in 0..self.dp {
                for tp in 0..self.tp {
                    builder.begin_rank().unwrap();
                    self.rank(&mut RankOps { builder: &mut builder, last: None }, tp, dp, pp);
                }
            }
        }
        builder.finish().unwrap()
    }

    fn rank(self, ops: &mut RankOps<'_>, tp: u32, dp: u32, pp: u32) {
        let warm_up = (self.pp - pp - 1).min(self.microbatches);
        for _ in 0..warm_up {
            self.pass(ops, (tp, dp, pp), false);
        }
        for _ in warm_up..self.microbatches {
            self.pass(ops, (tp, dp, pp), false);
            self.pass(ops, (tp, dp, pp), true);
        }
        for _ in 0..warm_up {
            self.pass(ops, (tp, dp, pp), true);
        }
        ops.ring(self.dp, dp, |dp| tp + self.tp * (dp + self.dp * pp), GRADIENTS, DATA);
    }

    fn pass(self, ops: &mut RankOps<'_>, (tp, dp, pp): (u32, u32, u32), is_backward: bool) {
        let rank = |tp, pp| tp + self.tp * (dp + self.dp * pp);
        let (previous, next) = (pp.checked_sub(1), Some(pp + 1).filter(|pp| *pp < self.pp));
        let (from, to, us, tag) =
            if is_backward { (next, previous, 2000, BACKWARD) } else { (previous, next, 1000, FORWARD) };
        if let Some(from) = from {
            ops.recv(ACTIVATION, rank(tp, from), tag);
        }
        for _ in 0..2 * self.layers {
            ops.calc(us);
            ops.ring(self.tp, tp, |tp| rank(tp, pp), ACTIVATION, TENSOR);
        }
        if let Some(to) = to {
            ops.send(ACTIVATION, rank(tp, to), tag);
        }
    }
}
