//! What one rank of a job did, as it was observed.

use crate::graph::columns::{OpRow, tag};
use crate::graph::op::{Op, OpKind};
use crate::ids::StreamId;
use crate::units::SimTime;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Program and communicators of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankRecording {
    /// The rank that was observed.
    pub rank: u32,
    /// Number of ranks of the job.
    pub world_size: u32,
    /// What it issued, in program order.
    pub ops: Vec<Op>,
    /// Texts of the ops' name ids.
    pub names: Vec<String>,
    /// Its communicators; the index is the slot.
    pub comms: Vec<RecordedComm>,
    /// All process groups of the job in order of creation, whether the rank is a member or not. The first one that
    /// contains a rank is its default group; an empty list stands for one group of all ranks.
    pub groups: Vec<ProcessGroup>,
    /// Facts about the recording.
    pub meta: BTreeMap<String, String>,
}

/// A communicator of the recorded rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedComm {
    /// How other ranks of the role find theirs.
    pub origin: CommOrigin,
    /// Global ranks in group-rank order, as the recorded rank saw them.
    pub members: Vec<u32>,
}

/// How a rank comes by a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommOrigin {
    /// It spans a process group.
    Group {
        /// Number of the group among those that contain this rank, in order of creation.
        ordinal: u32,
        /// How many communicators the rank made for the group before.
        instance: u32,
    },
    /// It joins two members of a process group for messages.
    Pair {
        /// Number of the group among those that contain this rank, in order of creation.
        ordinal: u32,
        /// Lower group rank (of the process group): group rank 0 of the communicator.
        lo: u32,
        /// Higher group rank (of the process group): group rank 1 of the communicator.
        hi: u32,
        /// How many communicators the rank made for the pair before.
        instance: u32,
    },
    /// Only its members are known.
    Explicit,
}

/// A process group of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessGroup {
    /// The framework's name for it.
    pub name: String,
    /// Global ranks in group-rank order.
    pub ranks: Vec<u32>,
}

/// Bytes that are not a recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// They are of another kind or version.
    #[error("not a rank recording of this version: it begins with {0:?}; record the rank again")]
    Foreign(String),
    /// They are cut or changed.
    #[error("the rank recording is damaged: {0}; record the rank again")]
    Damaged(String),
}

/// First word of a stored recording; the number is the version.
const MAGIC: &str = "prism-recording-1";

/// Stored form: the fields as JSON, ops as arrays of integers.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    rank: u32,
    world_size: u32,
    names: Vec<String>,
    comms: Vec<RecordedComm>,
    groups: Vec<ProcessGroup>,
    meta: BTreeMap<String, String>,
    ops: Vec<StoredOp>,
}

/// gap (ps), stream, tag, a, b, c, slot, arg, value, group.
type StoredOp = (i64, u32, u8, u8, u8, u8, u32, u32, u64, u32);

impl RankRecording {
    /// A digest of what is the same for every rank of a role: the ops with their slots, names by their text. Stable over
    /// versions of this program that read the same recordings. FNV-1a, 128 bit, as hexadecimal digits.
    pub fn digest(&self) -> String {
        self.digest_of(true, true)
    }

    /// As [`Self::digest`], but equal as well for programs that differ in nothing but the durations of computation.
    pub(super) fn digest_of_shape(&self) -> String {
        self.digest_of(false, true)
    }

    /// As [`Self::digest`], but equal as well for programs that differ in nothing but times: where they were measured, no two
    /// are equal.
    pub fn digest_without_times(&self) -> String {
        self.digest_of(false, false)
    }

    fn digest_of(&self, with_durations: bool, with_gaps: bool) -> String {
        let mut hash = Fnv128::default();
        for op in &self.ops {
            let (row, group) = OpRow::pack(op.stream, op.kind);
            if with_gaps {
                hash.write(&op.host_gap.as_ps().to_le_bytes());
            }
            hash.write(&[row.tag, row.a, row.b, row.c]);
            for field in [row.stream, row.slot, group] {
                hash.write(&field.to_le_bytes());
            }
            if with_durations || row.tag != tag::COMPUTE {
                hash.write(&row.value.to_le_bytes());
            }
            if row.tag == tag::COMPUTE {
                let text = self.names.get(row.arg as usize).map_or("", String::as_str);
                hash.write(&(text.len() as u64).to_le_bytes());
                hash.write(text.as_bytes());
            } else {
                hash.write(&row.arg.to_le_bytes());
            }
        }
        hash.hex()
    }

    /// The first thing in which the programs of two recordings differ, in words; `None` if their digests are equal.
    pub fn difference(&self, other: &Self) -> Option<String> {
        self.difference_by(other, |op| op)
    }

    /// As [`Self::difference`], times aside.
    pub fn difference_without_times(&self, other: &Self) -> Option<String> {
        self.difference_by(other, |op| {
            let mut op = Op { host_gap: SimTime::ZERO, ..op };
            if let OpKind::Compute { duration, .. } = &mut op.kind {
                *duration = SimTime::ZERO;
            }
            op
        })
    }

    fn difference_by(&self, other: &Self, seen: impl Fn(Op) -> Op) -> Option<String> {
        let both = self.ops.iter().zip(&other.ops).enumerate();
        for (index, (mine, theirs)) in both {
            if self.describe(&seen(*mine)) != other.describe(&seen(*theirs)) {
                let (mine, theirs) = (self.describe(mine), other.describe(theirs));
                return Some(format!("op {index}: rank {} {mine}; rank {} {theirs}", self.rank, other.rank));
            }
        }
        let (mine, theirs) = (self.ops.len(), other.ops.len());
        let (longer, at) = if mine > theirs { (self, theirs) } else { (other, mine) };
        (mine != theirs).then(|| {
            let next = longer.describe(&longer.ops[at]);
            format!(
                "rank {} has {mine} ops, rank {} has {theirs}; op {at} of rank {}: {next}",
                self.rank, other.rank, longer.rank
            )
        })
    }

    fn describe(&self, op: &Op) -> String {
        let name = |id: u32| self.names.get(id as usize).map_or("", String::as_str);
        crate::graph::op_text(op, &name)
    }

    /// The stored form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let stored_op = |op: &Op| {
            let (row, group) = OpRow::pack(op.stream, op.kind);
            (op.host_gap.as_ps(), row.stream, row.tag, row.a, row.b, row.c, row.slot, row.arg, row.value, group)
        };
        let stored = Stored {
            rank: self.rank,
            world_size: self.world_size,
            names: self.names.clone(),
            comms: self.comms.clone(),
            groups: self.groups.clone(),
            meta: self.meta.clone(),
            ops: self.ops.iter().map(stored_op).collect(),
        };
        let body = serde_json::to_vec(&stored).expect("text keys and integers always serialise");
        let mut bytes = format!("{MAGIC} {:08x}\n", crc32fast::hash(&body)).into_bytes();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// A recording from its stored form.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RecordingError> {
        let head = bytes.len().min(MAGIC.len());
        let foreign = || RecordingError::Foreign(String::from_utf8_lossy(&bytes[..head]).into_owned());
        let damaged = |why: &str| RecordingError::Damaged(why.to_owned());
        let rest = bytes.strip_prefix(MAGIC.as_bytes()).ok_or_else(foreign)?;
        let body_at = MAGIC.len() + " 00000000\n".len();
        let body = bytes.get(body_at..).ok_or_else(|| damaged("it ends early"))?;
        if rest[..body_at - MAGIC.len()] != *format!(" {:08x}\n", crc32fast::hash(body)).as_bytes() {
            return Err(damaged("the checksum differs"));
        }
        let stored: Stored = serde_json::from_slice(body).map_err(|error| damaged(&error.to_string()))?;
        let ops = stored.ops.iter().enumerate().map(|(index, op)| {
            let (gap, stream, tag, a, b, c, slot, arg, value, group) = *op;
            let row = OpRow { tag, a, b, c, stream, slot, arg, value };
            let kind = row.unpack(group).map_err(|what| damaged(&format!("op {index}: {what}")))?;
            Ok(Op { host_gap: SimTime::from_ps(gap), stream: StreamId(stream), kind })
        });
        let ops = ops.collect::<Result<_, RecordingError>>()?;
        let Stored { rank, world_size, names, comms, groups, meta, .. } = stored;
        Ok(Self { rank, world_size, ops, names, comms, groups, meta })
    }
}

/// FNV-1a with 128 bits: simple, the same everywhere, and wide enough that equal digests mean equal programs.
#[derive(Debug)]
pub(crate) struct Fnv128(u128);

impl Default for Fnv128 {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv128 {
    /// Takes eight bytes at once: quicker, and another digest than that of the bytes.
    pub(crate) fn write_word(&mut self, word: u64) {
        self.0 = (self.0 ^ u128::from(word)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }

    pub(crate) fn hex(&self) -> String {
        format!("{:032x}", self.0)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}
