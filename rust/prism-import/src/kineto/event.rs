//! What is kept of a rank's trace. Times are ns on the trace's own clock.

use crate::notes::Notes;
use indexmap::IndexSet;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, ReduceOp};
use std::sync::Arc;

/// Texts that occur often, stored once.
#[derive(Debug, Default)]
pub struct Names(IndexSet<String>);

impl Names {
    /// The number of a text.
    pub fn number(&mut self, text: &str) -> u32 {
        let known = self.0.get_index_of(text);
        known.unwrap_or_else(|| self.0.insert_full(text.to_owned()).0) as u32
    }

    /// The text of a number.
    pub fn text(&self, number: u32) -> &str {
        self.0.get_index(number as usize).map_or("", String::as_str)
    }
}

/// Something that ran on the device.
#[derive(Clone, Copy, Debug)]
pub struct Activity {
    /// Start.
    pub start: i64,
    /// How long.
    pub duration: i64,
    /// Number that the launching call has, too; 0 if none.
    pub correlation: u64,
    /// Device and stream.
    pub stream: (u32, i64),
    /// Name.
    pub name: u32,
    /// Class of work.
    pub class: ComputeClass,
    /// Is it a kernel of NCCL (or RCCL)?
    pub is_nccl: bool,
    /// What the trace says about the communication, as a number in [`RankTrace::metas`].
    pub meta: Option<u32>,
}

impl Activity {
    /// End.
    pub fn end(&self) -> i64 {
        self.start + self.duration
    }
}

/// A call of the CUDA (or HIP) API that may matter.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Start.
    pub start: i64,
    /// How long.
    pub duration: i64,
    /// Number that what it caused has, too.
    pub correlation: u64,
    /// Which thread.
    pub thread: u64,
    /// What it does.
    pub kind: CallKind,
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Launches, copies, fills; or is unknown, and launches if something on the device has its number.
    Launch,
    /// Copies, and may hold the host until the copy is done.
    Copy,
    /// Waits for a stream.
    StreamSync,
    /// Waits for an event.
    EventSync,
    /// Waits for the device.
    DeviceSync,
    /// Records an event.
    EventRecord,
    /// Makes a stream wait for an event.
    StreamWait,
}

/// What the profiler tells of a synchronisation beyond the call.
#[derive(Clone, Copy, Debug)]
pub struct SyncDetail {
    /// Number of the call.
    pub correlation: u64,
    /// The stream concerned, if it has one.
    pub stream: Option<(u32, i64)>,
    /// Number of the call that recorded the event waited for, and the stream it was recorded on.
    pub record: Option<(u64, (u32, i64))>,
}

/// A span on a host thread that tells about a communication.
#[derive(Clone, Copy, Debug)]
pub struct Annotation {
    /// Start.
    pub start: i64,
    /// How long.
    pub duration: i64,
    /// Which thread.
    pub thread: u64,
    /// What it tells, as a number in [`RankTrace::metas`].
    pub meta: u32,
}

/// A span of a communication on a host thread, whatever it tells.
#[derive(Clone, Copy, Debug)]
pub struct CommSpan {
    /// Start.
    pub start: i64,
    /// How long.
    pub duration: i64,
    /// Which thread.
    pub thread: u64,
    /// Name.
    pub name: u32,
    /// Record-function id, which execution traces have, too.
    pub record: Option<u64>,
    /// External id.
    pub external: Option<u64>,
}

/// What a communication is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CommKind {
    /// A collective.
    Collective(CollectiveKind),
    /// The sending half of a message.
    Send,
    /// The receiving half.
    Receive,
}

/// What a trace says about a communication. Everything may be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommMeta {
    /// Which one.
    pub kind: Option<CommKind>,
    /// Elements that go in.
    pub input: Option<u64>,
    /// Elements that come out.
    pub output: Option<u64>,
    /// Element type.
    pub dtype: Option<DataType>,
    /// How elements are reduced.
    pub reduce: Option<ReduceOp>,
    /// Name of the process group.
    pub group_name: Option<String>,
    /// Its ranks.
    pub ranks: Option<Arc<[u32]>>,
    /// How many they are.
    pub group_size: Option<u32>,
    /// Global ranks at the ends of a message.
    pub ends: Option<(u32, u32)>,
    /// Number of the call in its group.
    pub sequence: Option<u64>,
    /// Root of a collective that has one: group rank.
    pub root: Option<u32>,
}

impl CommMeta {
    /// Does it tell group and size?
    pub fn is_complete(&self) -> bool {
        self.kind.is_some() && self.ranks.is_some() && self.input.is_some()
    }

    /// Takes from another what is missing here.
    pub fn fill_from(&mut self, other: &Self) {
        self.kind = self.kind.or(other.kind);
        self.input = self.input.or(other.input);
        self.output = self.output.or(other.output);
        self.dtype = self.dtype.or(other.dtype);
        self.reduce = self.reduce.or(other.reduce);
        self.group_size = self.group_size.or(other.group_size);
        self.ends = self.ends.or(other.ends);
        self.sequence = self.sequence.or(other.sequence);
        self.root = self.root.or(other.root);
        if self.group_name.is_none() {
            self.group_name.clone_from(&other.group_name);
        }
        if self.ranks.is_none() {
            self.ranks.clone_from(&other.ranks);
        }
    }
}

/// An iteration as the profiler marks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number behind `ProfilerStep#`.
    pub number: u64,
    /// Start on the host.
    pub start: i64,
    /// End on the host.
    pub end: i64,
}

/// A process group as the trace's header lists it.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Its name.
    pub name: String,
    /// Its ranks.
    pub ranks: Arc<[u32]>,
}

/// A rank's trace.
#[derive(Debug, Default)]
pub struct RankTrace {
    /// The file's name, for messages.
    pub file: String,
    /// The rank that the file claims.
    pub claimed_rank: Option<u32>,
    /// Size of the world that the file claims.
    pub world_size: Option<u32>,
    /// Version of the form.
    pub schema_version: Option<i64>,
    /// The device's name.
    pub device: Option<String>,
    /// What ran on the device.
    pub activities: Vec<Activity>,
    /// Calls of the host.
    pub calls: Vec<Call>,
    /// Details of synchronisations.
    pub syncs: Vec<SyncDetail>,
    /// Spans that tell about communications.
    pub annotations: Vec<Annotation>,
    /// Spans of communications.
    pub comm_spans: Vec<CommSpan>,
    /// Number of the process that communicates.
    pub process: Option<i64>,
    /// What is told of communications.
    pub metas: Vec<CommMeta>,
    /// Iterations.
    pub steps: Vec<Step>,
    /// Process groups.
    pub groups: Vec<GroupConfig>,
    /// Events in the file, of whatever kind.
    pub num_events: u64,
    /// What was repaired while reading.
    pub notes: Notes,
}
