//! The session's state: live ranks feed the simulation; `waiting` sends the answers back. No threads here;
//! [`super::session`] owns them.

use super::exchange::Exchange;
use super::identity::{IdentityTable, UniqueId};
use super::nccl_init::init_time;
use super::process::{Memory, Pending, PendingKind, Process, ProcessNames, ReleaseErrors, intern};
use super::translate;
use crate::cost::durations::Durations;
use crate::cost::names::Family;
use crate::graph::op::{Op, OpKind};
use crate::ids::{EventId, Rank, StreamId};
use crate::sim::{Question, SimReport, Simulation};
use crate::slice::recording::{CommOrigin, RankRecording, RecordedComm};
use crate::units::SimTime;
use indexmap::IndexSet;
use prism_wire::frame::{NamedGroup, Request};
use prism_wire::message::{FLAG_BACKGROUND, FLAG_FORESEEN, Record, RecordKind, Reply, ReplyStatus};
use prism_wire::server::ReplyWriter;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A background thread that has asked for the same event so often while the program did nothing is told yes once the
/// completion is known, even if the clock has not reached it: at shutdown the program waits for its watchdog, which asks
/// without a pause, and nothing else would move the clock.
const BACKGROUND_PATIENCE: u32 = 50;
/// Ops a live rank may run ahead before the simulation takes them in.
const RUN_EVERY_OPS: usize = 4096;

/// What a process that says hello is to its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It plays the rank.
    Player,
    /// Another process does: see [`super::helper`].
    Helper,
}

/// Everything the session's threads share.
pub(crate) struct State {
    /// One simulation of all ranks when emulating; one for each live rank when collecting, where every rank runs alone
    /// against absent peers, in its own time.
    pub(super) sims: Vec<Simulation>,
    pub(crate) durations: Durations,
    pub(crate) world_size: u32,
    pub(crate) processes: BTreeMap<u32, Process>,
    pub(crate) identity: IdentityTable,
    pub(crate) names: IndexSet<String>,
    pub(crate) failure: Option<String>,
    pub(crate) exchange: Arc<Exchange>,
    next_ticket: u64,
    pub(super) unprocessed: usize,
}

impl State {
    pub(crate) fn new(
        sims: Vec<Simulation>,
        durations: Durations,
        world_size: u32,
        live: &[u32],
        records: bool,
    ) -> Self {
        let num_sims = sims.len();
        Self {
            sims,
            durations,
            world_size,
            processes: live
                .iter()
                .enumerate()
                .map(|(index, rank)| (*rank, Process::new(*rank, index % num_sims, records)))
                .collect(),
            identity: IdentityTable::default(),
            names: IndexSet::new(),
            failure: None,
            exchange: Arc::new(Exchange::new(live)),
            next_ticket: 0,
            unprocessed: 0,
        }
    }

    /// A process says hello. The text of an error goes back to it.
    pub(crate) fn connect(&mut self, rank: u32, world_size: u32, pid: u32) -> Result<Part, String> {
        if world_size != self.world_size {
            return Err(format!("the program's world has {world_size} ranks, the session's {}", self.world_size));
        }
        let Some(process) = self.processes.get_mut(&rank) else {
            let live: Vec<_> = self.processes.keys().collect();
            return Err(format!("rank {rank} is not played in this session (ranks {live:?} are)"));
        };
        if process.pid.is_some() {
            return Ok(Part::Helper);
        }
        process.pid = Some(pid);
        Ok(Part::Player)
    }

    /// The connection of an admitted process came to nothing.
    pub(crate) fn forget(&mut self, rank: u32) {
        if let Some(process) = self.processes.get_mut(&rank) {
            process.pid = None;
        }
    }

    /// The connection of a process is over. One that issued nothing (a helper which the program started before its own
    /// first call, to ask what the device is) leaves the rank's place free.
    pub(crate) fn disconnect(&mut self, rank: u32) {
        let Some(process) = self.processes.get_mut(&rank) else { return };
        let has_acted = process.last_host_ns > 0 || !process.groups.is_empty() || !process.comms.is_empty();
        if has_acted || process.exited.is_some() {
            self.end(rank, None);
        } else {
            process.replies = None;
            self.forget(rank);
        }
    }

    pub(crate) fn attach(&mut self, rank: u32, replies: ReplyWriter) {
        if let Some(process) = self.processes.get_mut(&rank) {
            process.replies = Some(replies);
        }
    }

    /// One control request. `Ok` is the answer's payload, `Err` the text of the refusal.
    pub(crate) fn control(&mut self, rank: u32, request: Request) -> Result<Vec<u8>, String> {
        let result = self.try_control(rank, request);
        if let Err(message) = &result {
            self.fail(message.clone());
        }
        result
    }

    /// A control request of a second process of `rank`.
    pub(crate) fn control_of_helper(&mut self, rank: u32, request: Request) -> Result<Vec<u8>, String> {
        match request {
            Request::Name { .. } => Ok(Vec::new()),
            Request::Unsupported { .. } | Request::Note { .. } => self.try_control(rank, request),
            _ => {
                let player = self.processes.get(&rank).and_then(|process| process.pid).unwrap_or_default();
                Err(format!("rank {rank} is already played by process {player}: no other can communicate for it"))
            }
        }
    }

    fn try_control(&mut self, rank: u32, request: Request) -> Result<Vec<u8>, String> {
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        match request {
            Request::Hello(_) => return Err("a second hello on one connection".to_owned()),
            Request::Name { id, text } => {
                process.wire_names.insert(id, intern(&mut self.names, &text));
            }
            Request::Group { ranks, name } => process.add_group(ranks, name, self.world_size)?,
            Request::Groups(groups) => {
                for NamedGroup { ranks, name } in groups {
                    process.add_group(ranks, name, self.world_size)?;
                }
            }
            Request::CommInit { comm_id, nranks, group_rank, unique_id } => {
                self.comm_init(rank, comm_id, nranks, group_rank, &unique_id)?;
            }
            Request::CommSplit { comm_id, parent, color, key: _, group_name } => {
                return self.comm_split(rank, comm_id, parent, color, &group_name);
            }
            Request::Unsupported { name } => *process.unsupported.entry(name).or_default() += 1,
            Request::Note { count, text } => *process.notes.entry(text).or_default() += count,
            Request::CommMembers { comm_id, parent, ranks } => {
                return self.comm_members(rank, comm_id, parent, &ranks);
            }
            Request::CommMemory { comm_id } => return self.comm_memory(rank, comm_id),
            Request::Timeline => return self.timeline(rank),
            Request::CommEstimate { comm_id, f, root, count } => {
                return self.comm_estimate(rank, comm_id, f, root, count);
            }
            Request::ReleaseErrors { count, p50_ns, p99_ns, max_ns } => {
                process.release_errors = Some(ReleaseErrors { count, p50_ns, p99_ns, max_ns });
            }
            Request::CommPeers { comm_id } => return self.comm_peers(rank, comm_id),
            Request::CommExchange { comm_id } => return self.comm_exchange(rank, comm_id),
            Request::Tier { comm_id, kind, tier, count } => self.note_tier(rank, comm_id, kind, tier, count)?,
            Request::Contribute { .. } | Request::Await { .. } | Request::Taken { .. } | Request::Values(_) => {
                return Err("a request that waits, where nothing may".to_owned());
            }
        }
        Ok(Vec::new())
    }

    fn comm_init(
        &mut self,
        rank: u32,
        comm_id: u32,
        nranks: u32,
        group_rank: u32,
        id: &UniqueId,
    ) -> Result<(), String> {
        let process = &self.processes[&rank];
        let (members, origin) = process.identify(nranks, group_rank, id, self.world_size, &self.identity)?;
        self.add_comm(rank, comm_id, members, origin, true)
    }

    fn comm_split(&mut self, rank: u32, comm_id: u32, parent: u32, color: i32, group: &str) -> Result<Vec<u8>, String> {
        let process = &self.processes[&rank];
        if !process.comms.contains_key(&parent) {
            return Err(format!("rank {rank} splits communicator {parent}, which it does not have"));
        }
        let (mut nranks, mut group_rank) = (0, 0);
        if color >= 0 {
            if group.is_empty() {
                return Err(format!(
                    "rank {rank} splits a communicator by colour {color}: the colours of ranks that do not run are \
                     known only when the framework hook names the process group"
                ));
            }
            let (ordinal, members) = process.group(group, self.world_size)?;
            nranks = members.len() as u32;
            group_rank = members.iter().position(|member| *member == rank).unwrap_or_default() as u32;
            let origin = CommOrigin::Group { ordinal, instance: process.instances(ordinal, None) };
            self.add_comm(rank, comm_id, members, origin, false)?;
        }
        Ok([nranks.to_le_bytes(), group_rank.to_le_bytes()].concat())
    }

    /// `has_root`: it comes from a unique id; children of a communicator meet through their parent.
    pub(super) fn add_comm(
        &mut self,
        rank: u32,
        comm_id: u32,
        members: Vec<u32>,
        origin: CommOrigin,
        has_root: bool,
    ) -> Result<(), String> {
        let process = self.processes.get_mut(&rank).expect("checked by the caller");
        let slot = self.sims[process.sim].live_comm(Rank(rank), &members).map_err(|error| error.to_string())?;
        process.nccl_init += init_time(members.len(), has_root);
        process.recorded_comms.push(RecordedComm { origin, members });
        process.comms.insert(comm_id, slot);
        Ok(())
    }

    /// Takes in the records of a rank in call order, and answers what can be answered.
    pub(crate) fn feed(&mut self, rank: u32, records: &[Record]) {
        let mut has_query = false;
        for record in records {
            match self.feed_one(rank, record) {
                Ok(is_query) => has_query |= is_query,
                Err(message) => {
                    self.fail(format!("rank {rank}: {message}"));
                    self.refuse_query(rank, record);
                }
            }
        }
        self.unprocessed += records.len();
        if has_query || self.unprocessed >= RUN_EVERY_OPS || self.processes.values().any(Process::has_pending) {
            self.advance();
        }
    }

    fn feed_one(&mut self, rank: u32, record: &Record) -> Result<bool, String> {
        let kind =
            RecordKind::from_u16(record.kind).ok_or_else(|| format!("record kind {} is not known", record.kind))?;
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        process.num_records += 1;
        if self.failure.is_some() {
            if kind.is_query() {
                self.refuse_query(rank, record);
            }
            return Ok(false);
        }
        if record.flags & FLAG_BACKGROUND != 0 && kind.is_query() {
            self.ask_in_background(rank, record, kind);
            return Ok(true);
        }
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        process.background_polls.clear();
        account_memory(&mut process.memory, kind, record);
        let mut names =
            ProcessNames { interner: &mut self.names, wire_names: &process.wire_names, comms: &process.comms };
        if kind == RecordKind::CommDestroy
            && let Some(exchange) = process.exchanges.get(&record.e)
        {
            self.exchange.leave(rank, *exchange);
        }
        let op =
            translate::op_kind(record, kind, &mut self.durations, &mut names).map_err(|error| error.to_string())?;
        if let Some((op, family)) = op {
            self.push(rank, record, op, family)?;
            let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
            if process.timeline.push(record.correlation(kind)) {
                self.sim_of(rank).follow(Rank(rank));
            }
        }
        if kind == RecordKind::GroupEnd {
            self.sim_of(rank).close_group(Rank(rank)).map_err(|error| error.to_string())?;
        }
        if kind == RecordKind::StreamSync && record.flags & FLAG_FORESEEN != 0 {
            self.check_later(rank, record)?;
            return Ok(false);
        }
        if kind.is_query() {
            self.ask(rank, record, kind);
        }
        Ok(kind.is_query())
    }

    /// The process goes on at a time it has foreseen: what it does next counts from there, and the answer must be that.
    fn check_later(&mut self, rank: u32, record: &Record) -> Result<(), String> {
        let foreseen = i64::try_from(record.a).ok().map(SimTime::from_ps);
        let foreseen =
            foreseen.filter(|time| time.as_ns() >= record.host_ns).ok_or("a synchronisation ends before it begins")?;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.sim_of(rank).ask(Rank(rank), Question::Resume, ticket);
        let process = self.processes.get_mut(&rank).expect("checked by the caller");
        process.last_host_ns = process.last_host_ns.max(foreseen.as_ns());
        process.foreseen.insert(ticket, foreseen);
        Ok(())
    }

    fn push(&mut self, rank: u32, record: &Record, kind: OpKind, family: Option<Family>) -> Result<(), String> {
        let process = self.processes.get_mut(&rank).expect("checked by the caller");
        let gap_ns = record.host_ns.saturating_sub(process.last_host_ns).max(0);
        process.last_host_ns = process.last_host_ns.max(record.host_ns);
        process.host_time_ns = process.host_time_ns.saturating_add(gap_ns);
        let op = Op { host_gap: SimTime::from_ns(gap_ns), stream: StreamId(record.stream), kind };
        if let Some(recorder) = &mut process.recorder {
            recorder.push(op);
        }
        if kind == OpKind::IterationEnd {
            process.num_iterations += 1;
        }
        if kind == OpKind::TrainingBegin {
            process.training_since.get_or_insert_with(Instant::now);
        }
        if matches!(kind, OpKind::Collective { .. } | OpKind::PointToPoint { .. } | OpKind::Compute { .. }) {
            process.last_op = Some(kind);
            process.note_use(op.stream, &kind);
        }
        if let (OpKind::Compute { duration, provenance, .. }, Some(family)) = (kind, family) {
            *process.compute_time.entry((family, provenance)).or_default() += duration;
        }
        if let OpKind::Compute { name, .. } = kind
            && self.sims[self.processes[&rank].sim].wants_names()
        {
            let text = self.names.get_index(name.index()).cloned().unwrap_or_default();
            self.sim_of(rank).tell_name(Rank(rank), name, &text).map_err(|error| error.to_string())?;
        }
        self.sim_of(rank).push(Rank(rank), op).map_err(|error| error.to_string())
    }

    fn ask(&mut self, rank: u32, record: &Record, kind: RecordKind) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let at = SimTime::from_ns(record.host_ns);
        let (question, pending) = match kind {
            RecordKind::EventQuery => (Question::EventDone { event: EventId(record.e), at }, PendingKind::Done),
            RecordKind::StreamQuery => {
                (Question::StreamDone { stream: StreamId(record.stream), at }, PendingKind::Done)
            }
            RecordKind::EventElapsed => {
                (Question::Elapsed { from: EventId(record.e), to: EventId(record.f) }, PendingKind::Elapsed)
            }
            _ => (Question::Resume, PendingKind::Resume),
        };
        self.sim_of(rank).ask(Rank(rank), question, ticket);
        let is_background = record.flags & FLAG_BACKGROUND != 0;
        let pending = Pending { reply_slot: record.h, host_ns: record.host_ns, question: pending, is_background };
        self.processes.get_mut(&rank).expect("checked by the caller").pending.insert(ticket, pending);
    }

    /// A thread that does not drive the device asks. It moves no clock and no op: a watchdog's synchronisation is a
    /// question like any other.
    fn ask_in_background(&mut self, rank: u32, record: &Record, kind: RecordKind) {
        let Some(process) = self.processes.get_mut(&rank) else { return };
        if kind == RecordKind::EventQuery {
            let polls = process.background_polls.entry(record.e).or_default();
            *polls += 1;
            let known = self.sims[process.sim].peek_event(Rank(rank), EventId(record.e));
            if *polls >= BACKGROUND_PATIENCE && known.is_some() {
                let reply = Reply { status: ReplyStatus::Ok as u32, reserved: 0, value: 1, host_ns: record.host_ns };
                reply_to(process, record.h, reply);
                return;
            }
        }
        self.ask(rank, record, kind);
    }

    fn refuse_query(&mut self, rank: u32, record: &Record) {
        // What is not known may be a query: somebody would wait for ever.
        if RecordKind::from_u16(record.kind).is_none_or(RecordKind::is_query)
            && let Some(process) = self.processes.get(&rank)
        {
            reply_to(process, record.h, failed_reply(record.host_ns));
        }
    }

    fn sim_of(&mut self, rank: u32) -> &mut Simulation {
        let index = self.processes.get(&rank).map_or(0, |process| process.sim);
        &mut self.sims[index]
    }

    /// What every simulation has to say so far, as one report.
    pub(crate) fn report(&self) -> SimReport {
        let mut reports = self.sims.iter().map(Simulation::report);
        let first = reports.next().expect("a session has a simulation");
        reports.fold(first, merged)
    }

    /// The process has exited (the launcher says so) or its connection is gone.
    pub(crate) fn end(&mut self, rank: u32, exit_code: Option<i32>) {
        if self.processes.get(&rank).is_some_and(|process| !process.foreseen.is_empty()) {
            self.advance();
        }
        let Some(process) = self.processes.get_mut(&rank) else { return };
        process.exited = process.exited.or(exit_code);
        if !std::mem::replace(&mut process.has_ended, true) {
            process.ended_before_failure = self.failure.is_none();
            process.pending.clear();
            self.sim_of(rank).end_live(Rank(rank));
            self.advance();
        }
    }

    /// The session has failed: every waiting call returns an error, every later query too.
    pub(crate) fn fail(&mut self, message: String) {
        if self.failure.is_none() {
            self.failure = Some(message);
        }
        for process in self.processes.values_mut() {
            for pending in std::mem::take(&mut process.pending).into_values() {
                reply_to(process, pending.reply_slot, failed_reply(pending.host_ns));
            }
        }
    }

    pub(crate) fn keep_recordings(&mut self) {
        for process in self.processes.values_mut() {
            process.recorder.get_or_insert_default();
        }
    }

    pub(crate) fn recording(&self, rank: u32) -> Option<RankRecording> {
        self.processes.get(&rank)?.recording(self.world_size, &self.names)
    }
}

/// Two reports of different ranks as one.
fn merged(mut report: SimReport, other: SimReport) -> SimReport {
    let (time, more) = (&mut report.device_time, other.device_time);
    more.by_provenance.into_iter().for_each(|(key, ns)| *time.by_provenance.entry(key).or_default() += ns);
    more.by_class.into_iter().for_each(|(key, ns)| *time.by_class.entry(key).or_default() += ns);
    time.communication += more.communication;
    report.ranks.extend(other.ranks);
    report.ranks.sort_unstable_by_key(|rank| rank.rank);
    report.ops_evaluated += other.ops_evaluated;
    report.roles += other.roles;
    report
}

fn failed_reply(host_ns: i64) -> Reply {
    Reply { status: ReplyStatus::Failed as u32, reserved: 0, value: 0, host_ns }
}

pub(super) fn reply_to(process: &Process, slot: u32, reply: Reply) {
    if let Some(replies) = &process.replies {
        // A bad slot index is the process's own damage: it then waits until it notices our end.
        let _ = replies.answer(slot, reply);
    }
}

fn account_memory(memory: &mut Memory, kind: RecordKind, record: &Record) {
    match kind {
        RecordKind::Alloc => {
            memory.device_bytes = memory.device_bytes.saturating_add(record.a);
            memory.device_peak_bytes = memory.device_peak_bytes.max(memory.device_bytes);
        }
        RecordKind::Free => memory.device_bytes = memory.device_bytes.saturating_sub(record.a),
        RecordKind::MemoryStats => {
            memory.allocated_peak_bytes = memory.allocated_peak_bytes.max(record.a);
            memory.reserved_peak_bytes = memory.reserved_peak_bytes.max(record.b);
            memory.workspace_peak_bytes = memory.workspace_peak_bytes.max(record.c);
        }
        _ => {}
    }
}
