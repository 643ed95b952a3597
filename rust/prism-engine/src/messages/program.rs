//! The program: ops and dependencies of all ranks in few bytes.
//!
//! An op is 16 bytes (its fields, and which of the next eight ops depend on its end), because most ops depend on one just
//! before them. Every other dependency costs 8 bytes in a table sorted by the op it leads from; a duration or size of 2^32
//! or more is kept once per distinct value.

use crate::graph::columns::Column;
use crate::ids::Rank;

/// Index of an op in its rank's program, from 0 in the order of definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpIndex(pub u32);

/// Where an op runs: one op at a time per CPU lane, one message at a time per NIC lane and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lanes {
    /// CPU lane of the rank.
    pub cpu: u8,
    /// NIC lane of the rank.
    pub nic: u8,
}

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageOp {
    /// Occupies its CPU lane.
    Calc {
        /// Duration in ticks. What a tick is, the evaluation says.
        ticks: u64,
    },
    /// Sends a message. A rank may send to itself; that message takes the NIC and the latency as any other.
    Send {
        /// Size.
        bytes: u64,
        /// Receiving rank.
        peer: Rank,
        /// Matched against the receive's.
        tag: u32,
    },
    /// Receives a message.
    Recv {
        /// Expected size. Only the sender's counts for time, as in LogGOPSim.
        bytes: u64,
        /// Sending rank; `None` takes a message from anyone.
        peer: Option<Rank>,
        /// `None` takes a message of any tag.
        tag: Option<u32>,
    },
}

/// When a dependent op may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dependency {
    /// After the end of the other op (GOAL's `requires`).
    End,
    /// After the start of the other op (GOAL's `irequires`).
    Start,
}

/// Ops per rank are fewer than this; the bit marks [`Dependency::Start`] in the table of other dependencies.
pub(crate) const MAX_OPS: u32 = 1 << 31;
/// "Anyone" or "any tag" in an op's words; GOAL's `-1`.
pub(crate) const ANY: u32 = u32::MAX;
/// Words per op.
pub(crate) const WORDS: usize = 4;
/// Dependents by their end this far ahead are in the op itself.
pub(crate) const NEAR: u32 = 8;

pub(crate) mod kind {
    pub(crate) const CALC: u8 = 0;
    pub(crate) const SEND: u8 = 1;
    pub(crate) const RECV: u8 = 2;
    pub(crate) const MASK: u8 = 3;
}

pub(crate) mod flag {
    /// The value word is an index into the table of wide values.
    pub(crate) const WIDE: u8 = 1 << 2;
    /// The sender's op ends when the receive is matched, whatever the size.
    pub(crate) const RENDEZVOUS: u8 = 1 << 3;
    /// Dependents of this op are in the table too.
    pub(crate) const FAR: u8 = 1 << 4;
    /// The op depends on exactly one other, once.
    pub(crate) const ONE: u8 = 1 << 5;
    /// The op has several dependencies.
    pub(crate) const MANY: u8 = 1 << 6;
}

/// An op in its stored form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpWords {
    pub(crate) value: u32,
    pub(crate) peer: u32,
    pub(crate) tag: u32,
    pub(crate) lanes: Lanes,
    pub(crate) flags: u8,
    /// Bit `d`: op `d + 1` ahead depends on this one's end.
    pub(crate) near: u8,
}

impl OpWords {
    #[inline]
    pub(crate) fn pack(self) -> [u32; WORDS] {
        let meta = u32::from_le_bytes([self.lanes.cpu, self.lanes.nic, self.flags, self.near]);
        [self.value, self.peer, self.tag, meta]
    }

    #[inline]
    pub(crate) fn unpack(words: [u32; WORDS]) -> Self {
        let [cpu, nic, flags, near] = words[3].to_le_bytes();
        Self { value: words[0], peer: words[1], tag: words[2], lanes: Lanes { cpu, nic }, flags, near }
    }

    #[inline]
    pub(crate) fn kind(self) -> u8 {
        self.flags & kind::MASK
    }

    /// Does the op depend on nothing?
    #[inline]
    pub(crate) fn is_free(self) -> bool {
        self.flags & (flag::ONE | flag::MANY) == 0
    }

    /// Does the op depend on exactly one other, once?
    #[inline]
    pub(crate) fn has_one(self) -> bool {
        self.flags & flag::ONE != 0
    }
}

/// Ops and dependencies of all ranks of a job; made by [`MessageProgramBuilder`](super::MessageProgramBuilder). Immutable,
/// acyclic within each rank, every peer inside the job. 16 bytes per op, 8 per dependency that is not on one of the eight
/// ops before.
#[derive(PartialEq)]
pub struct MessageProgram {
    /// [`WORDS`] per op, rank after rank.
    pub(crate) ops: Column<u32>,
    pub(crate) wide: Column<u64>,
    /// First op of each rank, and the end.
    pub(crate) rank_start: Column<u64>,
    /// First far dependency of each rank, and the end.
    pub(crate) far_start: Column<u64>,
    /// Ascending (with `far_to`) within a rank.
    pub(crate) far_from: Column<u32>,
    pub(crate) far_to: Column<u32>,
    pub(crate) totals: Totals,
}

/// Sums over a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) sends: u64,
    pub(crate) recvs: u64,
    pub(crate) bytes: u64,
    /// Lanes are numbered below these, on every rank.
    pub(crate) cpus: u16,
    pub(crate) nics: u16,
    /// Does any receive take a message from anyone or of any tag?
    pub(crate) wildcards: bool,
}

impl std::fmt::Debug for MessageProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ranks, ops) = (self.num_ranks(), self.num_ops());
        f.debug_struct("MessageProgram").field("ranks", &ranks).field("ops", &ops).finish_non_exhaustive()
    }
}

/// Ranks and ops that are out of range panic, as for slices.
impl MessageProgram {
    /// Number of ranks of the job, at least 1.
    pub fn num_ranks(&self) -> u32 {
        (self.rank_start.len() - 1) as u32
    }

    /// Ops over all ranks.
    pub fn num_ops(&self) -> u64 {
        (self.ops.len() / WORDS) as u64
    }

    /// Sends over all ranks.
    pub fn num_sends(&self) -> u64 {
        self.totals.sends
    }

    /// Receives over all ranks.
    pub fn num_recvs(&self) -> u64 {
        self.totals.recvs
    }

    /// Bytes of all sends; below 2^63.
    pub fn sent_bytes(&self) -> u64 {
        self.totals.bytes
    }

    /// CPU lanes of every rank: one more than the highest used.
    pub fn num_cpus(&self) -> u32 {
        self.totals.cpus.into()
    }

    /// NIC lanes of every rank: one more than the highest used.
    pub fn num_nics(&self) -> u32 {
        self.totals.nics.into()
    }

    /// Bytes of the tables, as they lie in memory and in a stored file (without its header).
    pub fn table_bytes(&self) -> u64 {
        let words = self.ops.len() + self.far_from.len() + self.far_to.len();
        let longs = self.wide.len() + self.rank_start.len() + self.far_start.len();
        (4 * words + 8 * longs) as u64
    }

    /// One rank's ops.
    pub fn rank(&self, rank: Rank) -> RankProgram<'_> {
        let (ops, far) = (self.rank_start[rank.index()], self.far_start[rank.index()]);
        let end = self.rank_start[rank.index() + 1];
        let far_end = self.far_start[rank.index() + 1];
        RankProgram { program: self, start: ops as usize, len: (end - ops) as u32, far: far as usize..far_end as usize }
    }

    #[inline]
    pub(crate) fn words(&self, op: usize) -> OpWords {
        let words = &self.ops[WORDS * op..WORDS * op + WORDS];
        OpWords::unpack([words[0], words[1], words[2], words[3]])
    }

    #[inline]
    pub(crate) fn value(&self, words: OpWords) -> u64 {
        if words.flags & flag::WIDE == 0 { words.value.into() } else { self.wide[words.value as usize] }
    }
}

/// The ops of one rank.
#[derive(Clone, Debug)]
pub struct RankProgram<'a> {
    program: &'a MessageProgram,
    start: usize,
    len: u32,
    far: std::ops::Range<usize>,
}

impl<'a> RankProgram<'a> {
    /// Number of ops.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Does the rank do nothing?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What an op does. O(1).
    pub fn op(&self, op: OpIndex) -> MessageOp {
        let words = self.words(op);
        let value = self.program.value(words);
        match words.kind() {
            kind::CALC => MessageOp::Calc { ticks: value },
            kind::SEND => MessageOp::Send { bytes: value, peer: Rank(words.peer), tag: words.tag },
            _ => MessageOp::Recv {
                bytes: value,
                peer: (words.peer != ANY).then_some(Rank(words.peer)),
                tag: (words.tag != ANY).then_some(words.tag),
            },
        }
    }

    /// Where an op runs.
    pub fn lanes(&self, op: OpIndex) -> Lanes {
        self.words(op).lanes
    }

    /// Does the op wait for the other half of its message whatever the size?
    pub fn is_rendezvous(&self, op: OpIndex) -> bool {
        self.words(op).flags & flag::RENDEZVOUS != 0
    }

    /// The ops in order of definition.
    pub fn ops(&self) -> impl ExactSizeIterator<Item = MessageOp> + use<'_, 'a> {
        (0..self.len as usize).map(|op| self.op(OpIndex(op as u32)))
    }

    /// The ops that depend on `op`: near ones, other ones on its end, ones on its start; each part ascending. O(log of the
    /// rank's far dependencies)
    /// to find.
    pub fn successors(&self, op: OpIndex) -> impl Iterator<Item = (OpIndex, Dependency)> + use<'a> {
        let words = self.words(op);
        let near = (0..NEAR).filter(move |d| words.near & (1 << d) != 0);
        let near = near.map(move |d| (OpIndex(op.0 + 1 + d), Dependency::End));
        let far = if words.flags & flag::FAR == 0 { 0..0 } else { self.far.clone() };
        let from = &self.program.far_from[far.clone()];
        let first = from.partition_point(|from| *from < op.0);
        let count = from[first..].iter().take_while(|from| **from == op.0).count();
        let far = &self.program.far_to[far.start + first..far.start + first + count];
        near.chain(far.iter().map(|to| decode_far(*to)))
    }

    fn words(&self, op: OpIndex) -> OpWords {
        assert!(op.0 < self.len, "op {} of {}", op.0, self.len);
        self.program.words(self.start + op.0 as usize)
    }
}

#[inline]
pub(crate) fn decode_far(to: u32) -> (OpIndex, Dependency) {
    let kind = if to & MAX_OPS == 0 { Dependency::End } else { Dependency::Start };
    (OpIndex(to & !MAX_OPS), kind)
}

pub(crate) fn encode_far(to: u32, dependency: Dependency) -> u32 {
    if dependency == Dependency::Start { to | MAX_OPS } else { to }
}
