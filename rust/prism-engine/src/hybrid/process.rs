//! What the session knows of one live rank.

use super::identity::{CommKey, IdentityTable, parse_key};
use super::nccl_memory::{self, Uses};
use super::recorder::Recorder;
use super::timeline::Timeline;
use super::translate::Names;
use crate::cost::names::Family;
use crate::graph::columns::OpRow;
use crate::graph::op::{OpKind, Provenance};
use crate::ids::{NameId, SlotId, StreamId};
use crate::profile::Profile;
use crate::slice::recording::{CommOrigin, Fnv128, ProcessGroup, RankRecording, RecordedComm};
use crate::units::SimTime;
use indexmap::IndexSet;
use prism_wire::control::UNIQUE_ID_BYTES;
use prism_wire::server::ReplyWriter;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// A query whose answer the engine does not know yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) reply_slot: u32,
    pub(crate) host_ns: i64,
    pub(crate) question: PendingKind,
    /// Asked by a thread that does not drive the device.
    pub(crate) is_background: bool,
}

/// What the process asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PendingKind {
    /// A synchronisation: the host continues at the answer.
    Resume,
    /// Is it complete? The host goes on either way.
    Done,
    /// Time between two events.
    Elapsed,
}

/// Bytes on the device, as the driver and the program's allocator see them.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name")]
pub(crate) struct Memory {
    pub(crate) device_bytes: u64,
    pub(crate) device_peak_bytes: u64,
    pub(crate) allocated_peak_bytes: u64,
    pub(crate) reserved_peak_bytes: u64,
    pub(crate) workspace_peak_bytes: u64,
}

/// How late a real device's streams were released, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name")]
pub struct ReleaseErrors {
    /// How many streams were held and released.
    pub count: u64,
    /// The median.
    pub p50_ns: u64,
    /// One of a hundred is later.
    pub p99_ns: u64,
    /// The latest.
    pub max_ns: u64,
}

/// One live rank.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) rank: u32,
    /// Number of the simulation it takes part in.
    pub(crate) sim: usize,
    pub(crate) pid: Option<u32>,
    pub(crate) replies: Option<ReplyWriter>,
    pub(crate) exited: Option<i32>,
    /// Its last record has been taken in. An exit code may be known before that.
    pub(crate) has_ended: bool,
    /// It ended while the session was well.
    pub(crate) ended_before_failure: bool,
    pub(crate) last_host_ns: i64,
    /// Host time of its calls so far, waits not included.
    pub(crate) host_time_ns: i64,
    /// Queries of threads that do not drive the device, by event, since the last call of one that does.
    pub(crate) background_polls: BTreeMap<u32, u32>,
    pub(crate) pending: BTreeMap<u64, Pending>,
    /// Synchronisations whose answers the process has foreseen, until the engine knows them too: times by ticket.
    pub(crate) foreseen: BTreeMap<u64, SimTime>,
    pub(crate) comms: BTreeMap<u32, SlotId>,
    /// Numbers in the exchange, by the process's ids.
    pub(crate) exchanges: BTreeMap<u32, u32>,
    /// Payloads by communicator, kind and tier.
    pub(crate) tiers: BTreeMap<(SlotId, u32, u32), u64>,
    pub(crate) recorded_comms: Vec<RecordedComm>,
    /// Modelled time to make its communicators, which takes none here.
    pub(crate) nccl_init: SimTime,
    /// What its communicators were used for.
    pub(crate) comm_uses: BTreeMap<SlotId, Uses>,
    pub(crate) groups: Vec<ProcessGroup>,
    pub(crate) wire_names: BTreeMap<u32, NameId>,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) memory: Memory,
    pub(crate) num_records: u64,
    pub(crate) num_iterations: u32,
    /// When its first iteration began, in real time: for the launcher's figures only.
    pub(crate) training_since: Option<Instant>,
    pub(crate) last_op: Option<OpKind>,
    /// Of its NCCL calls so far, in their order.
    pub(crate) nccl_digest: Fnv128,
    /// Device time of its computations by family and by what it rests on, at full speed.
    pub(crate) compute_time: BTreeMap<(Family, Provenance), SimTime>,
    pub(crate) timeline: Timeline,
    pub(crate) notes: BTreeMap<String, u64>,
    pub(crate) unsupported: BTreeMap<String, u64>,
    pub(crate) release_errors: Option<ReleaseErrors>,
}

impl Process {
    pub(crate) fn new(rank: u32, sim: usize, records: bool) -> Self {
        Self {
            rank,
            sim,
            pid: None,
            replies: None,
            exited: None,
            has_ended: false,
            ended_before_failure: false,
            last_host_ns: 0,
            host_time_ns: 0,
            background_polls: BTreeMap::new(),
            pending: BTreeMap::new(),
            foreseen: BTreeMap::new(),
            comms: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            tiers: BTreeMap::new(),
            recorded_comms: Vec::new(),
            nccl_init: SimTime::ZERO,
            comm_uses: BTreeMap::new(),
            groups: Vec::new(),
            wire_names: BTreeMap::new(),
            recorder: records.then(Recorder::default),
            memory: Memory::default(),
            num_records: 0,
            num_iterations: 0,
            training_since: None,
            last_op: None,
            nccl_digest: Fnv128::default(),
            compute_time: BTreeMap::new(),
            timeline: Timeline::default(),
            notes: BTreeMap::new(),
            unsupported: BTreeMap::new(),
            release_errors: None,
        }
    }

    /// Remembers an NCCL call, and what its communicator is used for.
    pub(crate) fn note_use(&mut self, stream: StreamId, kind: &OpKind) {
        let (OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. }) = *kind else { return };
        let (row, group) = OpRow::pack(stream, *kind);
        let what = u32::from_le_bytes([row.tag, row.a, row.b, row.c]);
        for [high, low] in [[what, row.stream], [row.slot, row.arg], [group, 0]] {
            self.nccl_digest.write_word((u64::from(high) << 32) | u64::from(low));
        }
        self.nccl_digest.write_word(row.value);
        let Some(comm) = self.recorded_comms.get(slot.index()) else { return };
        let uses = self.comm_uses.entry(slot).or_default();
        if uses.is_new(kind) {
            let group_rank = comm.members.iter().position(|member| *member == self.rank).unwrap_or_default() as u32;
            uses.add(kind, comm.members.len(), group_rank);
        }
    }

    /// Bytes NCCL holds for all its communicators.
    pub(crate) fn nccl_bytes(&self, profile: &Profile) -> u64 {
        let bytes = |(slot, uses): (&SlotId, &Uses)| {
            let members = &self.recorded_comms[slot.index()].members;
            let group_rank = members.iter().position(|member| *member == self.rank).unwrap_or_default() as u32;
            nccl_memory::communicator_bytes(members, group_rank, uses, profile)
        };
        self.comm_uses.iter().map(bytes).sum()
    }

    /// Some thread waits for an answer.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// What the threads that drive the device wait for; while there is any, the program cannot go on.
    pub(crate) fn driver_pending(&self) -> impl Iterator<Item = &Pending> {
        self.pending.values().filter(|pending| !pending.is_background)
    }

    pub(crate) fn recording(&self, world_size: u32, names: &IndexSet<String>) -> Option<RankRecording> {
        let recorder = self.recorder.as_ref()?;
        Some(recorder.finish(self.rank, world_size, names, self.recorded_comms.clone(), self.groups.clone()))
    }

    /// Members of the communicator with this id, and how other ranks of the role find theirs.
    pub(crate) fn identify(
        &self,
        nranks: u32,
        group_rank: u32,
        unique_id: &[u8; UNIQUE_ID_BYTES],
        world_size: u32,
        identity: &IdentityTable,
    ) -> Result<(Vec<u32>, CommOrigin), String> {
        let Some(key) = identity.key_of(unique_id) else {
            return self.identify_without_store(nranks, world_size);
        };
        let CommKey { group, pair } = parse_key(&key).ok_or_else(|| format!("unique id of unknown key {key:?}"))?;
        let (ordinal, ranks) = self.group(&group, world_size)?;
        let (members, origin) = match pair {
            None => (ranks, CommOrigin::Group { ordinal, instance: self.instances(ordinal, None) }),
            Some((lo, hi)) => {
                let member = |group_rank: u32| {
                    ranks.get(group_rank as usize).copied().ok_or_else(|| {
                        format!("pair {lo}:{hi} of process group {group:?}, which has {} members", ranks.len())
                    })
                };
                let instance = self.instances(ordinal, Some((lo, hi)));
                (vec![member(lo)?, member(hi)?], CommOrigin::Pair { ordinal, lo, hi, instance })
            }
        };
        self.check_members(&members, nranks, group_rank, &group)?;
        Ok((members, origin))
    }

    fn check_members(&self, members: &[u32], nranks: u32, group_rank: u32, group: &str) -> Result<(), String> {
        let name =
            if group.is_empty() { "the default process group".to_owned() } else { format!("process group {group:?}") };
        if members.len() != nranks as usize {
            return Err(format!(
                "rank {} creates a communicator of {nranks} ranks for {name}, which has {} in this job: the program and \
                 the session disagree on the world size",
                self.rank,
                members.len()
            ));
        }
        if members.get(group_rank as usize) != Some(&self.rank) {
            return Err(format!(
                "rank {} calls itself group rank {group_rank} of {name}, whose members are {members:?}",
                self.rank
            ));
        }
        Ok(())
    }

    fn identify_without_store(&self, nranks: u32, world_size: u32) -> Result<(Vec<u32>, CommOrigin), String> {
        if nranks != world_size {
            return Err(format!(
                "rank {} creates a communicator of {nranks} ranks whose members are not known: its unique id did not \
                 come through the session's rendezvous store, and only the world ({world_size} ranks) can be told by its size",
                self.rank
            ));
        }
        Ok(((0..world_size).collect(), CommOrigin::Group { ordinal: 0, instance: self.instances(0, None) }))
    }

    /// A process group that the program is making.
    pub(crate) fn add_group(&mut self, ranks: Vec<u32>, name: String, world_size: u32) -> Result<(), String> {
        if let Some(outside) = ranks.iter().find(|member| **member >= world_size) {
            return Err(format!("process group {name:?} has rank {outside}, the world {world_size} ranks"));
        }
        self.groups.push(ProcessGroup { name, ranks });
        Ok(())
    }

    /// A process group by name: its number among the groups with this rank, and its members.
    pub(crate) fn group(&self, name: &str, world_size: u32) -> Result<(u32, Vec<u32>), String> {
        let own = || self.groups.iter().filter(|group| group.ranks.contains(&self.rank));
        if name.is_empty() {
            // The default group comes first; without a hook there is no other.
            let ranks = own().next().map_or_else(|| (0..world_size).collect(), |group| group.ranks.clone());
            return Ok((0, ranks));
        }
        // Names may be reused after a group is destroyed: the latest counts.
        own().enumerate().filter(|(_, group)| group.name == name).last().map_or_else(
            || {
                Err(format!(
                    "rank {} uses process group {name:?}, whose members the framework hook did not tell; \
                     is prism_core's start-up hook on the PYTHONPATH of the program?",
                    self.rank
                ))
            },
            |(ordinal, group)| Ok((ordinal as u32, group.ranks.clone())),
        )
    }

    /// How many communicators this rank made for the same group (and pair) before.
    pub(crate) fn instances(&self, group: u32, pair: Option<(u32, u32)>) -> u32 {
        let same = |origin: &CommOrigin| match (origin, pair) {
            (CommOrigin::Group { ordinal, .. }, None) => *ordinal == group,
            (CommOrigin::Pair { ordinal, lo, hi, .. }, Some(pair)) => *ordinal == group && (*lo, *hi) == pair,
            _ => false,
        };
        self.recorded_comms.iter().filter(|comm| same(&comm.origin)).count() as u32
    }
}

/// An op in words, for "the last thing rank 5 did".
pub(crate) fn describe(kind: &OpKind, names: &IndexSet<String>) -> String {
    match kind {
        OpKind::Compute { name, .. } => names.get_index(name.index()).cloned().unwrap_or_default(),
        OpKind::Collective { kind, count, dtype, .. } => format!("{kind:?} of {count} {dtype:?}"),
        OpKind::PointToPoint { is_send, count, dtype, peer, .. } => {
            format!("{} of {count} {dtype:?}, peer {peer}", if *is_send { "send" } else { "receive" })
        }
        other => format!("{other:?}"),
    }
}

/// The process's names, seen with the session's interner.
pub(crate) struct ProcessNames<'a> {
    pub(crate) interner: &'a mut IndexSet<String>,
    pub(crate) wire_names: &'a BTreeMap<u32, NameId>,
    pub(crate) comms: &'a BTreeMap<u32, SlotId>,
}

pub(crate) fn intern(interner: &mut IndexSet<String>, text: &str) -> NameId {
    let index = interner.get_index_of(text).unwrap_or_else(|| interner.insert_full(text.to_owned()).0);
    NameId(index as u32)
}

impl Names for ProcessNames<'_> {
    fn name(&mut self, wire_id: u32) -> NameId {
        match self.wire_names.get(&wire_id) {
            Some(name) => *name,
            None => intern(self.interner, "(unnamed)"),
        }
    }

    fn builtin(&mut self, text: &'static str) -> NameId {
        intern(self.interner, text)
    }

    fn text(&self, name: NameId) -> &str {
        self.interner.get_index(name.index()).map_or("", String::as_str)
    }

    fn slot(&self, comm_id: u32) -> Option<SlotId> {
        self.comms.get(&comm_id).copied()
    }
}
