//! What a session reports: while it runs ([`Status`]) and at its end ([`Summary`]). Only virtual time: two runs of the
//! same session give the same bytes.

use super::process::{Process, ReleaseErrors, describe};
use super::state::State;
use super::values::TierUse;
use super::{SessionMode, SessionOptions};
use crate::cost::names::Family;
use crate::graph::Graph;
use crate::graph::op::{OpKind, Provenance};
use crate::ids::Rank;
use crate::prune;
use crate::sim::{DeviceTime, RankReport, SimReport};
use crate::slice::recording::{CommOrigin, ProcessGroup, RankRecording};
use crate::units::SimTime;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Where a session is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Why the session failed, if it did.
    pub failed: Option<String>,
    /// Live ranks by rank.
    pub ranks: BTreeMap<u32, RankStatus>,
}

/// Where a live rank is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankStatus {
    /// Its process has connected.
    pub connected: bool,
    /// No more ops will come.
    pub finished: bool,
    /// It ended while the session was well, so no failure of the session is the reason.
    pub ended_before_failure: bool,
    /// Records taken in.
    pub records: u64,
    /// Iterations enqueued completely.
    pub iterations: u32,
    /// Real time since its first iteration began, ns; none before.
    pub training_for_ns: Option<u64>,
    /// The last op, in words.
    pub last_op: Option<String>,
}

/// A communicator of a live rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommunicatorSummary {
    /// Number of members.
    pub size: u32,
    /// First members in group-rank order (eight at most).
    pub members: Vec<u32>,
    /// Collectives and halves of messages.
    pub calls: u64,
    /// Bytes as the calls state them.
    pub bytes: u64,
}

/// A live rank at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: u32,
    /// Duration of each iteration: from the end of the previous one on the device (training's begin for the first).
    pub iteration_time_ns: Vec<i64>,
    /// Peak of the program's own allocator, allocated.
    pub peak_allocated_bytes: u64,
    /// Peak of the program's own allocator, reserved.
    pub peak_reserved_bytes: u64,
    /// Peak the driver handed out.
    pub peak_device_bytes: u64,
    /// Most that the program gave to cuBLAS and cuBLASLt as workspaces, of its allocator's memory.
    pub workspace_bytes: u64,
    /// Modelled memory of NCCL's connections, which no allocator of the program sees.
    pub nccl_buffer_bytes: u64,
    /// Modelled time to make its communicators, ns. No part of the iterations: making them takes no time here.
    pub nccl_init_ns: i64,
    /// Time on the device.
    pub device_time: Option<DeviceTime>,
    /// Compute, communication and host time by what they rest on, ns.
    pub time_by_provenance: BTreeMap<Provenance, i64>,
    /// Device time of its computations at full speed, by what they are for and by what their durations rest on, ns.
    pub compute_time_ns: BTreeMap<Family, BTreeMap<Provenance, i64>>,
    /// Communicators in order of creation.
    pub communicators: Vec<CommunicatorSummary>,
    /// How the values of its payloads came about.
    pub tiers: Vec<TierUse>,
    /// Calls that are not supported, with how often they were made.
    pub unsupported: BTreeMap<String, u64>,
    /// Remarks of the shims, with counts.
    pub notes: BTreeMap<String, u64>,
    /// How late its streams were released, on a real device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release_errors: Option<ReleaseErrors>,
    /// Where it was when the session ended.
    pub iterations: u32,
    /// The last op, in words.
    pub last_op: Option<String>,
    /// Digest of its collectives and halves of messages in their order: communicator (by order of creation), stream, kind,
    /// root or peer, type, count, group. Equal for two runs in which the rank makes the same calls.
    pub nccl_digest: String,
    /// Exit code of the process, if the launcher told.
    pub exit_code: Option<i32>,
}

/// The end of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Ranks of the job.
    pub world_size: u32,
    /// Duration of each iteration of the job: over all ranks when virtual ranks took part, over the live ones else.
    pub iteration_time_ns: Vec<i64>,
    /// Live ranks.
    pub ranks: Vec<RankSummary>,
    /// Ops of the graph, over all ranks (0 when collecting).
    pub ops: u64,
    /// Ops evaluated, counted once per rank.
    pub ops_evaluated: u64,
    /// Live ranks and the virtual ranks they exchange data with.
    pub ranks_materialised: u64,
    /// Time on the device of all ranks that took part.
    pub device_time: DeviceTime,
    /// Why the session failed, if it did.
    pub failed: Option<String>,
}

/// Facts about a recording that decide which other ranks must be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecordingInfo {
    /// Communicators in order of creation.
    pub comms: Vec<CommInfo>,
    /// Process groups of the job as this rank saw them created.
    pub groups: Vec<ProcessGroup>,
    /// Groups (by their number among the rank's own) that carry messages: in them, the group rank makes the role.
    pub p2p_ordinals: BTreeSet<u32>,
    /// How the values of its payloads came about.
    pub tiers: Vec<TierUse>,
    /// Calls that are not supported.
    pub unsupported: BTreeMap<String, u64>,
    /// Remarks of the shims.
    pub notes: BTreeMap<String, u64>,
    /// Iterations enqueued completely.
    pub iterations: u32,
    /// Peak of the program's own allocator, allocated.
    pub peak_allocated_bytes: u64,
    /// Peak of the program's own allocator, reserved.
    pub peak_reserved_bytes: u64,
    /// Peak the driver handed out.
    pub peak_device_bytes: u64,
    /// As in [`RankSummary`].
    pub workspace_bytes: u64,
    /// As in [`RankSummary`].
    pub nccl_buffer_bytes: u64,
    /// The rank's place in a pipeline: its group rank in the last group in which messages go one way at a time. None
    /// where there is no such group.
    pub pipeline_stage: Option<u32>,
}

/// A communicator of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommInfo {
    /// `group`, `pair` or `explicit`.
    pub kind: &'static str,
    /// Number of the process group among the rank's own.
    pub ordinal: Option<u32>,
    /// Number of members.
    pub size: usize,
    /// The rank's place in it.
    pub group_rank: Option<usize>,
}

pub(crate) fn status(state: &State) -> Status {
    let rank_status = |process: &Process| RankStatus {
        connected: process.pid.is_some(),
        finished: process.has_ended,
        ended_before_failure: process.ended_before_failure,
        records: process.num_records,
        iterations: process.num_iterations,
        training_for_ns: process
            .training_since
            .map(|since| u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        last_op: last_op(process, state),
    };
    Status {
        failed: state.failure.clone(),
        ranks: state.processes.iter().map(|(rank, process)| (*rank, rank_status(process))).collect(),
    }
}

fn last_op(process: &Process, state: &State) -> Option<String> {
    process.last_op.as_ref().map(|kind| describe(kind, &state.names))
}

pub(crate) fn recording_info(state: &State, rank: u32) -> Option<RecordingInfo> {
    let process = state.processes.get(&rank)?;
    let recording = state.recording(rank)?;
    let comm_info = |comm: &crate::slice::recording::RecordedComm| {
        let (kind, ordinal) = match comm.origin {
            CommOrigin::Group { ordinal, .. } => ("group", Some(ordinal)),
            CommOrigin::Pair { ordinal, .. } => ("pair", Some(ordinal)),
            CommOrigin::Explicit => ("explicit", None),
        };
        let group_rank = comm.members.iter().position(|member| *member == rank);
        CommInfo { kind, ordinal, size: comm.members.len(), group_rank }
    };
    let p2p_ordinals = recording.ops.iter().filter_map(|op| match op.kind {
        OpKind::PointToPoint { slot, .. } => match recording.comms.get(slot.index())?.origin {
            CommOrigin::Group { ordinal, .. } | CommOrigin::Pair { ordinal, .. } => Some(ordinal),
            CommOrigin::Explicit => None,
        },
        _ => None,
    });
    Some(RecordingInfo {
        comms: recording.comms.iter().map(comm_info).collect(),
        p2p_ordinals: p2p_ordinals.collect(),
        tiers: process.tier_uses(),
        groups: recording.groups.clone(),
        unsupported: process.unsupported.clone(),
        notes: process.notes.clone(),
        iterations: process.num_iterations,
        peak_allocated_bytes: process.memory.allocated_peak_bytes,
        peak_reserved_bytes: process.memory.reserved_peak_bytes,
        peak_device_bytes: process.memory.device_peak_bytes,
        workspace_bytes: process.memory.workspace_peak_bytes,
        nccl_buffer_bytes: process.nccl_bytes(state.durations.profile()),
        pipeline_stage: pipeline_stage(&recording),
    })
}

/// See [`RecordingInfo::pipeline_stage`]. In an exchange (an all-to-all made of messages) every group of calls sends and
/// receives; in a pipeline some only do one of both, if only before the first backward pass.
fn pipeline_stage(recording: &RankRecording) -> Option<u32> {
    // By process group and group of calls (a number of its own for a call outside one): sends, receives.
    let mut ways: BTreeMap<(u32, u32, usize), (bool, bool)> = BTreeMap::new();
    for (index, op) in recording.ops.iter().enumerate() {
        let OpKind::PointToPoint { slot, is_send, group, .. } = op.kind else { continue };
        let origin = &recording.comms.get(slot.index())?.origin;
        let (CommOrigin::Group { ordinal, .. } | CommOrigin::Pair { ordinal, .. }) = *origin else { continue };
        let alone = if group == 0 { index } else { 0 };
        let way = ways.entry((ordinal, group, alone)).or_default();
        *way = (way.0 || is_send, way.1 || !is_send);
    }
    let one_way = ways.iter().filter(|(_, (sends, receives))| sends != receives);
    let ordinal = one_way.map(|((ordinal, ..), _)| *ordinal).max()?;
    let mut own = recording.groups.iter().filter(|group| group.ranks.contains(&recording.rank));
    let group = own.nth(ordinal as usize)?;
    group.ranks.iter().position(|rank| *rank == recording.rank).map(|place| place as u32)
}

pub(crate) fn summarise(state: &mut State, options: &SessionOptions, graph: Option<&Graph>) -> Summary {
    state.advance();
    let report = state.report();
    let live: Vec<Rank> = options.live.iter().copied().map(Rank).collect();
    let is_complete = state.failure.is_none() && state.processes.values().all(|process| process.has_ended);
    let materialised = match (options.mode, graph) {
        (SessionMode::Emulate, Some(graph)) => {
            prune::materialised(graph, &live.iter().copied().collect(), &options.profile).len()
        }
        _ => live.len(),
    };
    let host = if options.measured_host_time { Provenance::Measured } else { Provenance::Default };
    Summary {
        world_size: options.world_size,
        iteration_time_ns: job_iterations(&report, &live, is_complete),
        ranks: state.processes.values().map(|process| rank_summary(process, &report, state, host)).collect(),
        ops: graph.map_or(0, Graph::num_ops),
        ops_evaluated: report.ops_evaluated,
        ranks_materialised: materialised as u64,
        device_time: report.device_time.clone(),
        failed: state.failure.clone(),
    }
}

/// Iterations that every rank which took part has finished; a run that ends early stops there. A complete run without
/// markers is one iteration.
fn job_iterations(report: &SimReport, live: &[Rank], is_complete: bool) -> Vec<i64> {
    let finished =
        report.ranks.iter().filter(|rank| live.contains(&rank.rank)).map(|rank| rank.iteration_ends.len()).min();
    if is_complete && report.ranks.iter().all(|rank| rank.iteration_ends.is_empty()) {
        return report.iteration_times().into_iter().map(SimTime::as_ns).collect();
    }
    report.iteration_times().into_iter().take(finished.unwrap_or(0)).map(SimTime::as_ns).collect()
}

fn rank_iterations(report: &RankReport) -> Vec<i64> {
    let mut before = report.training_begin.unwrap_or_default();
    let ends = report.iteration_ends.iter();
    ends.map(|end| (*end - std::mem::replace(&mut before, *end)).as_ns()).collect()
}

/// Communication is modelled from the profile; host time is a constant per call that nobody measured, or measured.
fn time_by_provenance(
    device: Option<&DeviceTime>,
    (host, host_time_ns): (Provenance, i64),
) -> BTreeMap<Provenance, i64> {
    let mut shares = device.map(|device| device.by_provenance.clone()).unwrap_or_default();
    *shares.entry(Provenance::Modelled).or_default() += device.map_or(0, |device| device.communication);
    *shares.entry(host).or_default() += host_time_ns;
    shares
}

fn compute_time(process: &Process) -> BTreeMap<Family, BTreeMap<Provenance, i64>> {
    let mut shares: BTreeMap<Family, BTreeMap<Provenance, i64>> = BTreeMap::new();
    for ((family, provenance), time) in &process.compute_time {
        shares.entry(*family).or_default().insert(*provenance, time.as_ns());
    }
    shares
}

fn rank_summary(process: &Process, report: &SimReport, state: &State, host: Provenance) -> RankSummary {
    const MEMBERS_SHOWN: usize = 8;
    let own = report.ranks.iter().find(|rank| rank.rank.0 == process.rank);
    let uses = own.map_or(&[][..], |own| &own.comms);
    let communicators = uses.iter().map(|comm| CommunicatorSummary {
        size: comm.members.len() as u32,
        members: comm.members.iter().copied().take(MEMBERS_SHOWN).collect(),
        calls: comm.calls,
        bytes: comm.bytes,
    });
    let device_time = own.and_then(|own| own.device_time.as_ref());
    RankSummary {
        rank: process.rank,
        iteration_time_ns: own.map(rank_iterations).unwrap_or_default(),
        peak_allocated_bytes: process.memory.allocated_peak_bytes,
        peak_reserved_bytes: process.memory.reserved_peak_bytes,
        peak_device_bytes: process.memory.device_peak_bytes,
        workspace_bytes: process.memory.workspace_peak_bytes,
        nccl_buffer_bytes: process.nccl_bytes(state.durations.profile()),
        nccl_init_ns: process.nccl_init.as_ns(),
        device_time: own.and_then(|own| own.device_time.clone()),
        time_by_provenance: time_by_provenance(device_time, (host, process.host_time_ns)),
        compute_time_ns: compute_time(process),
        communicators: communicators.collect(),
        tiers: process.tier_uses(),
        unsupported: process.unsupported.clone(),
        notes: process.notes.clone(),
        release_errors: process.release_errors,
        iterations: process.num_iterations,
        last_op: last_op(process, state),
        nccl_digest: process.nccl_digest.hex(),
        exit_code: process.exited,
    }
}
