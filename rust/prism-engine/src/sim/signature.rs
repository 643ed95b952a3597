//! What members of a communicator must agree on.

use crate::collective::fusion::{self, Groupable};
use crate::graph::op::{CollectiveKind, DataType, ReduceOp};
use crate::units::SimTime;
use serde::Serialize;
use std::fmt;

/// A collective as one rank called it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Signature {
    /// Which collective.
    pub collective: String,
    /// Element count as given to NCCL.
    pub count: u64,
    /// Element type.
    pub dtype: String,
    /// Bytes of these elements.
    pub bytes: u64,
    /// Reduction.
    pub reduce: String,
    /// Root group rank.
    pub root: u32,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, count, dtype, bytes, reduce, root } = self;
        write!(f, "{collective} of {count} {dtype}, {bytes} bytes ({reduce}, root {root})")
    }
}

/// A collective inside a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) op: u32,
    pub(crate) kind: CollectiveKind,
    pub(crate) dtype: DataType,
    pub(crate) reduce: ReduceOp,
    pub(crate) root: u32,
    /// Of all fused ones together.
    pub(crate) count: u64,
    /// Collectives of one group that NCCL fuses into this one.
    pub(crate) ops: u32,
    /// An earlier collective of the launch has moved bytes: its kernel runs already.
    pub(crate) continues: bool,
}

/// The collectives of one launch as NCCL runs them, see [`fusion`].
pub(crate) fn fuse(calls: &[Call]) -> Vec<Call> {
    let groupable =
        |call: &Call| Groupable { kind: call.kind, key: (call.dtype, call.reduce, call.root), bytes: call.bytes() };
    let calls_of = |batch: Vec<usize>| {
        let first = batch.iter().map(|at| calls[*at]).min_by_key(|call| call.op).expect("a batch has a call");
        let count = batch.iter().fold(0u64, |sum, at| sum.saturating_add(calls[*at].count));
        Call { count, ops: batch.len() as u32, ..first }
    };
    if calls.len() < 2 {
        return calls.to_vec();
    }
    let mut is_running = false;
    let batches = fusion::fuse(&calls.iter().map(groupable).collect::<Vec<_>>());
    let calls = batches.into_iter().map(calls_of).map(|call| {
        let continues = is_running;
        is_running |= call.count > 0;
        Call { continues, ..call }
    });
    calls.collect()
}

/// What the messages of a launch start after: the time by which its kernel runs already when they do, if collectives came first.
pub(crate) fn starts_after(calls: &[Call], launch: SimTime) -> SimTime {
    if calls.iter().any(|call| call.count > 0) { launch } else { SimTime::ZERO }
}

impl Call {
    /// Would the two calls match? Where they stand in their programs and launches does not matter.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        let bare = |call: &Self| Self { op: 0, continues: false, ..*call };
        bare(self) == bare(other)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.dtype.size_bytes())
    }

    /// Size of the whole buffer of a communicator of `members` ranks.
    pub(crate) fn buffer_bytes(&self, members: u64) -> u64 {
        use CollectiveKind as K;
        match self.kind {
            K::AllReduce | K::Broadcast | K::Reduce => self.bytes(),
            K::AllGather | K::ReduceScatter | K::AllToAll | K::Gather | K::Scatter => {
                self.bytes().saturating_mul(members)
            }
        }
    }

    pub(crate) fn signature(&self) -> Signature {
        Signature {
            collective: match self.ops {
                1 => format!("{:?}", self.kind),
                ops => format!("{:?} ({ops} fused)", self.kind),
            },
            count: self.count,
            dtype: format!("{:?}", self.dtype),
            bytes: self.bytes(),
            reduce: format!("{:?}", self.reduce),
            root: self.root,
        }
    }
}

/// Half of a message inside a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half {
    pub(crate) op: u32,
    pub(crate) is_send: bool,
    pub(crate) dtype: DataType,
    pub(crate) peer: u32,
    pub(crate) count: u64,
}

impl Half {
    pub(crate) fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.dtype.size_bytes())
    }
}
