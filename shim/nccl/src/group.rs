//! `ncclGroupStart` ... `ncclGroupEnd`: nesting per thread, a sticky error, and operations that wait for the end.

use crate::abi::Code;
use crate::collective::Collective;
use crate::comm::{Comm, PreMul};
use crate::exchange::{self, Job, MESSAGE, Stage, Tag};
use crate::graphs;
use crate::guard::{Failure, Outcome};
use crate::ops::Call;
use crate::passthrough;
use crate::session::{self, Session};
use crate::shares::{self, Share};
use crate::values::Payload;
use prism_wire::device::{RECEIVED_MIRRORED, RECEIVED_NOTHING, RECEIVED_OWN};
use prism_wire::frame::Request;
use prism_wire::message::{CollectiveKind, DataType, Record, RecordKind};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};

/// Group ordinals of this process; 0 means "not in a group".
static NEXT_ORDINAL: AtomicU32 = AtomicU32::new(1);

/// An operation that waits for the end of its group.
#[derive(Clone)]
pub(crate) struct Pending {
    pub(crate) comm: Comm,
    pub(crate) record: Record,
    pub(crate) payload: Option<Payload>,
    /// Of a send or a receive.
    pub(crate) message: Option<Message>,
    /// For a communicator of the real NCCL: nothing else of this counts.
    pub(crate) real: Option<(Call, Option<PreMul>)>,
}

impl Pending {
    /// An operation that the engine takes part in.
    pub(crate) fn new(comm: Comm, record: Record, payload: Option<Payload>, message: Option<Message>) -> Self {
        Self { comm, record, payload, message, real: None }
    }
}

/// One side of a message.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) is_send: bool,
    pub(crate) is_to_self: bool,
    pub(crate) peer: u32,
    pub(crate) address: usize,
    pub(crate) bytes: u64,
    /// Elements as given to NCCL.
    pub(crate) count: u64,
    pub(crate) dtype: DataType,
}

#[derive(Default)]
struct Group {
    operations: Vec<Pending>,
    /// Communicators destroyed inside the group: they end with it.
    destroyed: Vec<Comm>,
    /// Communicators made inside the group: their members meet at its end.
    meetings: Vec<Meeting>,
    /// Does the group wait for its end? That of the first communicator decides.
    is_blocking: Option<bool>,
}

/// What makes a communicator whose members have to meet.
pub(crate) type Meeting = Box<dyn FnOnce() -> Outcome + Send>;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static ERROR: Cell<Code> = const { Cell::new(Code::Success) };
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Is the calling thread inside a group?
#[inline]
pub(crate) fn is_open() -> bool {
    DEPTH.get() != 0
}

/// Opens a group or nests in the open one.
pub(crate) fn start() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Keeps the error of a call inside the group: the end of the group returns it and launches nothing.
#[cold]
pub(crate) fn note_error(code: Code) {
    if is_open() && code != Code::InProgress {
        ERROR.set(code);
    }
}

/// Adds an operation to the open group.
pub(crate) fn push(pending: Pending) -> Outcome {
    GROUP.with_borrow_mut(|group| {
        let is_blocking = !pending.comm.is_non_blocking();
        if *group.is_blocking.get_or_insert(is_blocking) != is_blocking {
            let text = "blocking and non-blocking communicators are used in one group";
            return Err(Failure::new(Code::InvalidArgument, text));
        }
        group.operations.push(pending);
        Ok(())
    })
}

/// Has the members of a communicator meet at the end of the open group.
pub(crate) fn push_meeting(meeting: Meeting) {
    GROUP.with_borrow_mut(|group| group.meetings.push(meeting));
}

/// Destroys a communicator at the end of the open group; false if that was asked for already.
pub(crate) fn push_destroyed(comm: Comm) -> bool {
    GROUP.with_borrow_mut(|group| {
        let is_new = group.destroyed.iter().all(|other| other.id() != comm.id());
        if is_new {
            group.destroyed.push(comm);
        }
        is_new
    })
}

/// Closes the group; the outermost end launches its operations.
pub(crate) fn end() -> Outcome {
    close(launch_all)
}

/// Closes the group; the outermost end runs `check`, launches nothing, and answers how long the last collective would take,
/// ns. NCCL estimates no messages, and of several collectives the last.
pub(crate) fn simulate_end(check: impl FnOnce() -> Outcome) -> Result<Option<u64>, Failure> {
    let mut estimate = None;
    close(|operations, _| {
        check()?;
        estimate = estimated(&operations)?;
        Ok(())
    })?;
    Ok(estimate)
}

fn estimated(operations: &[Pending]) -> Result<Option<u64>, Failure> {
    let is_collective = |operation: &&Pending| operation.record.kind == RecordKind::Collective as u16;
    let Some(last) = operations.iter().rfind(is_collective).map(|operation| operation.record) else { return Ok(None) };
    let request = Request::CommEstimate { comm_id: last.e, f: last.f, root: last.g, count: last.a };
    let answer = session::of_comm()?.control(&request)?;
    let ns = answer.try_into().map(u64::from_le_bytes);
    ns.map(Some).map_err(|_| Failure::new(Code::InternalError, "the engine's estimate makes no sense"))
}

/// `then` gets the operations of the outermost group, and a place where the emptied vector may be left for the next one.
fn close(then: impl FnOnce(Vec<Pending>, &mut Vec<Pending>) -> Outcome) -> Outcome {
    let depth = DEPTH.get();
    if depth == 0 {
        return Err(Failure::new(Code::InvalidUsage, "ncclGroupEnd: not in a group call."));
    }
    DEPTH.set(depth - 1);
    if depth > 1 {
        return Ok(());
    }
    let error = ERROR.replace(Code::Success);
    let mut group = GROUP.take();
    let operations = core::mem::take(&mut group.operations);
    let meetings = core::mem::take(&mut group.meetings);
    let result = if error == Code::Success {
        meet(meetings).and_then(|()| then(operations, &mut group.operations))
    } else {
        Err(Failure::again(error))
    };
    let destroyed = group.destroyed.iter().map(|comm| crate::ops::destroy_now(*comm)).fold(Ok(()), Outcome::and);
    let result = result.and(destroyed);
    // Keep the room for the next group.
    group.destroyed.clear();
    group.is_blocking = None;
    GROUP.set(group);
    result
}

/// Members of several communicators meet at once: other ranks may come to them in another order.
fn meet(mut meetings: Vec<Meeting>) -> Outcome {
    let Some(last) = meetings.pop() else { return Ok(()) };
    std::thread::scope(|scope| {
        let others: Vec<_> = meetings.into_iter().map(|meeting| scope.spawn(meeting)).collect();
        let result = last();
        let join = |other: std::thread::ScopedJoinHandle<'_, Outcome>| {
            other.join().unwrap_or_else(|_| Err(Failure::new(Code::InternalError, "a communicator's thread panicked")))
        };
        others.into_iter().map(join).fold(result, Outcome::and)
    })
}

/// Launches one operation outside any group, where the call waits or has somebody wait for it.
pub(crate) fn launch_alone(session: &'static Session, operation: Pending) -> Outcome {
    let cancelled = cancelled_with(core::slice::from_ref(&operation));
    session.fill_before(operation.comm, operation.payload.as_ref());
    session.append_unless(&operation.record, &cancelled)?;
    session.fill_after(&operation);
    if graphs::is_captured(&operation) {
        graphs::keep(session, vec![operation.clone()], Vec::new());
    }
    finish(session, vec![operation])
}

/// `room` gets the emptied vector back, for the next group, if that is possible.
fn launch_all(operations: Vec<Pending>, room: &mut Vec<Pending>) -> Outcome {
    if operations.is_empty() {
        return Ok(());
    }
    if !operations.iter().all(|operation| operation.comm.is_live()) {
        return Err(Failure::new(
            Code::InvalidUsage,
            "a communicator was aborted before the group of its operations ended",
        ));
    }
    let session = session::of_comm()?;
    let operations = if session.is_real() { run_real(operations)? } else { operations };
    if operations.is_empty() {
        return Ok(());
    }
    let messages = pair_self_messages(&operations)?;
    let ordinal = next_ordinal();
    let is_host = session.is_host();
    {
        let is_interrupted = |operation: &Pending| operation.comm.is_interrupted_since(operation.record.e);
        let cancelled = || operations.iter().any(is_interrupted);
        for operation in &operations {
            session.append_unless(&Record { h: ordinal, ..operation.record }, &cancelled)?;
            session.fill_before(operation.comm, operation.payload.as_ref());
            session.fill_after(operation);
        }
        // The calls of a group are captured together, or none of them is.
        if operations.iter().any(graphs::is_captured) {
            graphs::keep(session, operations.clone(), messages);
        } else {
            for (send, recv) in messages {
                copy_message(session, send, recv);
            }
            if !is_host {
                mirror_messages(session, &operations);
                mirror_broadcasts(session, &operations);
            }
        }
        let end = Record { kind: RecordKind::GroupEnd as u16, h: ordinal, ..Record::default() };
        session.append_unless(&end, &cancelled)?;
    }
    if is_host || operations[0].comm.is_non_blocking() {
        return finish(session, operations);
    }
    *room = operations;
    room.clear();
    Ok(())
}

/// Hands the operations of real communicators to the real NCCL; the others.
fn run_real(operations: Vec<Pending>) -> Result<Vec<Pending>, Failure> {
    let (real, others): (Vec<_>, Vec<_>) = operations.into_iter().partition(|operation| operation.real.is_some());
    let calls: Vec<_> =
        real.iter().filter_map(|pending| pending.real.map(|(call, op)| (pending.comm, call, op))).collect();
    if !calls.is_empty() {
        passthrough::run(&calls)?;
    }
    Ok(others)
}

/// Was a communicator of these operations aborted or revoked?
fn cancelled_with(operations: &[Pending]) -> impl Fn() -> bool + use<> {
    let comms: Vec<(Comm, u32)> = operations.iter().map(|operation| (operation.comm, operation.record.e)).collect();
    move || comms.iter().any(|(comm, id)| comm.is_interrupted_since(*id))
}

/// Waits for operations that have been appended and does what they do; on non-blocking communicators, in a thread.
fn finish(session: &'static Session, operations: Vec<Pending>) -> Outcome {
    if !operations[0].comm.is_non_blocking() {
        return finish_now(session, &operations);
    }
    let mut comms: Vec<Comm> = operations.iter().map(|operation| operation.comm).collect();
    comms.dedup_by_key(|comm| comm.id());
    let underway: Vec<_> = comms.iter().map(|comm| comm.begin()).collect();
    let work = move || {
        let result = finish_now(session, &operations);
        let code = result.as_ref().map_or_else(|failure| failure.code, |()| Code::Success);
        for operation in &underway {
            operation.end(code);
        }
        result
    };
    in_background(session.is_host(), work)
}

/// Runs what a non-blocking communicator does, in a thread if it may take long. The answer is "in progress".
pub(crate) fn in_background(may_wait: bool, work: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    let work = move || {
        crate::guard::call(work);
    };
    if may_wait {
        let thread = std::thread::Builder::new().name("prism-nccl".to_owned()).spawn(work);
        thread.map_err(|error| Failure::new(Code::SystemError, format!("no thread: {error}")))?;
    } else {
        work();
    }
    Err(Failure::again(Code::InProgress))
}

fn finish_now(session: &Session, operations: &[Pending]) -> Outcome {
    let is_cancelled = cancelled_with(operations);
    let complete = || session.complete(&is_cancelled);
    let shares: Vec<Share> = operations.iter().filter_map(share_of).collect();
    if shares.is_empty() {
        complete()?;
    } else {
        shares::run(session, &shares, complete, &is_cancelled)?;
    }
    if !session.is_host() {
        return Ok(());
    }
    let mut jobs: Vec<(u32, Job, Stage)> = Vec::new();
    for operation in operations {
        let Some(channel) = operation.comm.channel() else {
            if operation.comm.shares().is_none() {
                crate::ops::fill_operation(session, operation);
            }
            continue;
        };
        crate::ops::note_live(session, operation);
        let id = operation.record.e;
        let at = jobs.iter().position(|(other, ..)| *other == id).unwrap_or_else(|| {
            jobs.push((id, Job::new(operation.comm, channel), Stage::default()));
            jobs.len() - 1
        });
        let (_, job, messages) = &mut jobs[at];
        if let Some(payload) = operation.payload {
            job.add(Box::new(Collective::new(payload)));
        }
        if let Some(message) = operation.message.filter(|message| !message.is_to_self) {
            let tag = Tag { kind: MESSAGE, dtype: 0, op: 0, root: 0, count: message.bytes };
            let post = if message.is_send { Stage::send } else { Stage::receive };
            post(messages, message.peer as usize, tag, message.address, message.bytes as usize);
        }
    }
    // Collectives come before messages, as in NCCL.
    let ready = jobs.into_iter().map(|(_, mut job, messages)| {
        job.add(Box::new(Some(messages)));
        job
    });
    exchange::run(ready.collect())
}

/// What an operation exchanges through files, if that is how its communicator does it.
fn share_of(operation: &Pending) -> Option<Share> {
    let shares = operation.comm.shares()?;
    Share::new(operation.comm, operation.record.e, shares, operation.payload, operation.message)
}

fn next_ordinal() -> u32 {
    loop {
        let ordinal = NEXT_ORDINAL.fetch_add(1, Ordering::Relaxed);
        if ordinal != 0 {
            return ordinal;
        }
    }
}

/// Matches a rank's messages to itself: the k-th send of a communicator with its k-th receive.
fn pair_self_messages(operations: &[Pending]) -> Result<Vec<(Message, Message)>, Failure> {
    let messages: Vec<_> = operations
        .iter()
        .filter_map(|operation| Some((operation.comm.id(), operation.message.filter(|message| message.is_to_self)?)))
        .collect();
    let mut pairs = Vec::new();
    let mut is_taken = vec![false; messages.len()];
    for (index, (comm, first)) in messages.iter().enumerate() {
        if is_taken[index] {
            continue;
        }
        let is_partner = |other: &usize| {
            let (other_comm, message) = &messages[*other];
            !is_taken[*other] && other_comm == comm && message.is_send != first.is_send
        };
        let Some(other) = (index + 1..messages.len()).find(is_partner) else {
            return Err(lonely(first.is_send));
        };
        is_taken[other] = true;
        let second = messages[other].1;
        pairs.push(if first.is_send { (*first, second) } else { (second, *first) });
    }
    Ok(pairs)
}

/// A message to oneself needs its other half in the same group.
#[cold]
pub(crate) fn lonely(is_send: bool) -> Failure {
    let text = if is_send { "send to self without a matching recv" } else { "recv from self without a matching send" };
    Failure::new(Code::InvalidUsage, text)
}

/// A message to oneself is real data.
pub(crate) fn copy_message(session: &Session, send: Message, recv: Message) {
    let bytes = send.bytes.min(recv.bytes);
    let may_copy = !session.is_real()
        && (session.is_host() || bytes <= crate::values::MAX_MIRRORED_BYTES)
        && session.is_accessible(send.address, bytes)
        && session.is_accessible(recv.address, bytes);
    if may_copy && bytes > 0 {
        let from = core::ptr::with_exposed_provenance::<u8>(send.address);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(recv.address);
        // SAFETY: both ranges were just found accessible; `copy` allows overlap.
        unsafe { to.copy_from(from, bytes as usize) };
        session.received((recv.address, bytes), (send.address, bytes), c"ncclRecv", RECEIVED_OWN);
    } else {
        note_received(session, recv.address, recv.bytes);
    }
}

/// A message has come whose sender does not run: its bytes are not known.
pub(crate) fn note_received(session: &Session, address: usize, bytes: u64) {
    session.received((address, bytes), (0, 0), c"ncclRecv", RECEIVED_NOTHING);
}

/// Broadcasts of one group with this rank as a root among others: an all-gather into a list of tensors. What another root
/// sends as its k-th is then taken to be what this rank sends as its k-th, if as long and small.
pub(crate) fn mirror_broadcasts(session: &Session, operations: &[Pending]) {
    let mut own: BTreeMap<u32, Vec<Payload>> = BTreeMap::new();
    let mut seen: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    let of_comm = |operation: &Pending| Some((operation.comm.id(), operation.payload?));
    let broadcasts = || operations.iter().filter_map(of_comm).filter(|(_, one)| one.kind == CollectiveKind::Broadcast);
    for (comm, payload) in broadcasts().filter(|(_, payload)| payload.is_root) {
        own.entry(comm).or_default().push(payload);
    }
    for (comm, payload) in broadcasts().filter(|(_, payload)| !payload.is_root) {
        let Some(own) = own.get(&comm) else { continue };
        let index = seen.entry((comm, payload.root)).or_default();
        let Some(source) = own.get(*index) else { continue };
        *index += 1;
        let bytes = payload.received();
        let is_like = (source.count, source.dtype) == (payload.count, payload.dtype) && source.is_small();
        if !is_like || !session.is_accessible(source.send, bytes) || !session.is_accessible(payload.recv, bytes) {
            continue;
        }
        let from = core::ptr::with_exposed_provenance::<u8>(source.send);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(payload.recv);
        // SAFETY: both ranges were just found accessible; `copy` allows overlap.
        unsafe { to.copy_from(from, bytes as usize) };
        session.received((payload.recv, bytes), (source.send, bytes), c"ncclBroadcast", RECEIVED_MIRRORED);
    }
}

/// Messages from peers, on the emulated device, if they are not large (an exchange of counts or shapes between equals). Of
/// an all-to-all, in which every peer is taken to send what this rank does, a peer's message is what this rank sends
/// itself. Without such a message the k-th from a peer is the k-th that this rank sends to it in the group, if as long.
pub(crate) fn mirror_messages(session: &Session, operations: &[Pending]) {
    let messages = |is_send: bool| {
        let of_comm = |operation: &Pending| Some((operation.comm.id(), operation.message?));
        let messages = operations.iter().filter_map(of_comm);
        messages.filter(move |(_, message)| message.is_send == is_send && !message.is_to_self)
    };
    let is_small = |message: &Message| message.bytes <= crate::values::MAX_MIRRORED_BYTES;
    let of_self = |operation: &&Pending| operation.message.is_some_and(|message| message.is_send && message.is_to_self);
    let own: BTreeMap<u32, Message> = operations
        .iter()
        .filter(of_self)
        .filter_map(|operation| Some((operation.comm.id(), operation.message?)))
        .collect();
    let mut sends: BTreeMap<(u32, u32), VecDeque<Message>> = BTreeMap::new();
    if messages(false).any(|(_, message)| is_small(&message)) {
        for (comm, send) in messages(true) {
            sends.entry((comm, send.peer)).or_default().push_back(send);
        }
    }
    for (comm, recv) in messages(false) {
        let send = sends.get_mut(&(comm, recv.peer)).and_then(VecDeque::pop_front);
        let is_like = |send: &Message| send.bytes == recv.bytes && is_small(&recv);
        let is_here = |send: &Message| {
            session.is_accessible(send.address, send.bytes) && session.is_accessible(recv.address, recv.bytes)
        };
        let send = own.get(&comm).copied().filter(is_like).or(send);
        let Some(send) = send.filter(|send| is_like(send) && is_here(send)) else {
            note_received(session, recv.address, recv.bytes);
            continue;
        };
        let from = core::ptr::with_exposed_provenance::<u8>(send.address);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(recv.address);
        // SAFETY: both ranges were just found accessible; `copy` allows overlap.
        unsafe { to.copy_from(from, recv.bytes as usize) };
        session.received((recv.address, recv.bytes), (send.address, send.bytes), c"ncclRecv", RECEIVED_MIRRORED);
    }
}
