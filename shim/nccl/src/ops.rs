//! What a call does, once its C arguments have been read.

use crate::Handle;
use crate::abi::{Code, RawUniqueId, data_type};
use crate::collective::Collective;
use crate::comm::{self, Comm, FIRST_USER_OPERATOR, PreMul};
use crate::group::{self, Message, Pending};
use crate::guard::{Failure, Outcome, tell};
use crate::notes::{self, Fate, Tier};
use crate::session::{self, Session};
use crate::values::Payload;
use crate::{config, graphs, guard, passthrough, staged};
use core::ffi::c_int;
use prism_wire::control::{KIND_RECEIVE, UNIQUE_ID_BYTES, UNIQUE_ID_LOCAL_MAGIC};
use prism_wire::device::{RECEIVED_MIRRORED, RECEIVED_NOTHING, RECEIVED_OWN};
use prism_wire::frame::Request;
use prism_wire::message::{CollectiveKind, CopyDirection, DataType, FLAG_CAPTURED, Record, RecordKind, ReduceOp};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What is communicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// All members together.
    Collective(CollectiveKind),
    /// A message to `root`.
    Send,
    /// A message from `root`.
    Recv,
}

/// A communication call as the program made it. Messages carry their buffer in `recv` and their peer in `root`.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) what: What,
    /// NCCL's name of the operation in its messages.
    pub(crate) name: &'static str,
    pub(crate) send: usize,
    pub(crate) recv: usize,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
    pub(crate) op: c_int,
    pub(crate) root: c_int,
    pub(crate) comm: Handle,
    pub(crate) stream: Handle,
}

// SAFETY: the two handles are the program's, passed on and never looked into here.
unsafe impl Send for Call {}

/// Runs a communication call: checked in NCCL's order, then sent or added to the open group.
#[inline]
pub(crate) fn enqueue(call: &Call) -> Outcome {
    let comm = match comm::check(call.comm, call.name) {
        Ok(comm) => comm,
        Err(failure) => {
            group::note_error(failure.code);
            return Err(failure);
        }
    };
    let result = enqueue_on(call, comm);
    if let Err(failure) = &result
        && failure.code != Code::InProgress
    {
        group::note_error(failure.code);
        comm.note_error(failure.code);
    }
    result
}

#[inline]
fn enqueue_on(call: &Call, comm: Comm) -> Outcome {
    ensure_ready(comm, call.name)?;
    let (nranks, rank) = (comm.nranks(), comm.rank());
    if call.root < 0 || call.root >= nranks {
        return Err(invalid(call.name, "root", call.root));
    }
    let Some(dtype) = data_type(call.dtype) else { return Err(invalid(call.name, "type", call.dtype)) };
    let scale = if (0..FIRST_USER_OPERATOR).contains(&call.op) {
        None
    } else {
        Some(comm.operator(call.op).ok_or_else(|| invalid(call.name, "reduction operation", call.op))?)
    };
    let session = session::of_comm()?;
    let kind = match call.what {
        What::Collective(kind) => kind,
        What::Send | What::Recv => return enqueue_message(session, call, comm, dtype),
    };
    if call.count == 0 {
        return Ok(());
    }
    if session.is_real()
        && let Some(done) = enqueue_real(session, call, comm, scale)
    {
        return done;
    }
    if scale.is_some_and(|scale| scale.dtype != call.dtype) {
        return Err(invalid(call.name, "type for this user-defined reduction operation:", call.dtype));
    }
    let op = ReduceOp::from_u8(call.op.min(FIRST_USER_OPERATOR) as u8);
    let mut payload = Payload {
        kind,
        dtype,
        op,
        scale,
        send: call.send,
        recv: call.recv,
        count: call.count as u64,
        nranks: nranks as u32,
        rank: rank as u32,
        root: call.root as u32,
        is_root: rank == call.root,
    };
    if nranks == 1 {
        return run_alone(session, call, comm, &payload);
    }
    let record = Record {
        kind: RecordKind::Collective as u16,
        flags: flags(session, call.stream),
        stream: session.stream_id(call.stream),
        a: call.count as u64,
        e: comm.id(),
        f: kind as u32 | (dtype as u32) << 8 | (op as u32) << 16,
        g: call.root as u32,
        ..Record::default()
    };
    if kind == CollectiveKind::Broadcast && !payload.is_root {
        // What the root sends is what this rank would send, if it was given such a buffer at all.
        let bytes = payload.count.saturating_mul(dtype.size_bytes());
        payload.is_root =
            !session.is_host() && payload.send != payload.recv && session.is_accessible(payload.send, bytes);
    }
    if group::is_open() {
        return group::push(Pending::new(comm, record, Some(payload), None));
    }
    if session.is_host() || comm.is_non_blocking() {
        return group::launch_alone(session, Pending::new(comm, record, Some(payload), None));
    }
    session.fill_before(comm, Some(&payload));
    session.append_unless(&record, &|| comm.is_interrupted_since(record.e))?;
    if record.flags & FLAG_CAPTURED != 0 {
        graphs::keep(session, vec![Pending::new(comm, record, Some(payload), None)], Vec::new());
    } else if !session.is_real() {
        fill(session, comm, &payload);
    }
    Ok(())
}

/// On a real device: an operation of a communicator of the real NCCL, or what cannot be held. `None`: the engine takes part.
fn enqueue_real(session: &'static Session, call: &Call, comm: Comm, scale: Option<PreMul>) -> Option<Outcome> {
    if comm.real().is_some() {
        if !group::is_open() {
            return Some(passthrough::run(&[(comm, *call, scale)]));
        }
        let record = Record { e: comm.id(), ..Record::default() };
        return Some(group::push(Pending { real: Some((*call, scale)), ..Pending::new(comm, record, None, None) }));
    }
    let is_captured = session.is_capturing(call.stream);
    is_captured.then(|| refuse_part(call.name, "with virtual members, captured into a CUDA graph on a real device,"))
}

fn enqueue_message(session: &'static Session, call: &Call, comm: Comm, dtype: DataType) -> Outcome {
    if session.is_real()
        && let Some(done) = enqueue_real(session, call, comm, None)
    {
        return done;
    }
    let is_send = call.what == What::Send;
    let record = Record {
        kind: if is_send { RecordKind::Send } else { RecordKind::Recv } as u16,
        flags: flags(session, call.stream),
        stream: session.stream_id(call.stream),
        a: call.count as u64,
        e: comm.id(),
        f: (dtype as u32) << 8,
        g: call.root as u32,
        ..Record::default()
    };
    let bytes = (call.count as u64).saturating_mul(dtype.size_bytes());
    let is_to_self = call.root == comm.rank();
    let (peer, count) = (call.root as u32, call.count as u64);
    let message = Some(Message { is_send, is_to_self, peer, address: call.recv, bytes, count, dtype });
    if group::is_open() {
        return group::push(Pending::new(comm, record, None, message));
    }
    if is_to_self {
        return Err(group::lonely(is_send));
    }
    if session.is_host() || comm.is_non_blocking() {
        return group::launch_alone(session, Pending::new(comm, record, None, message));
    }
    session.append_unless(&record, &|| comm.is_interrupted_since(record.e))?;
    let operation = Pending::new(comm, record, None, message);
    if graphs::is_captured(&operation) {
        graphs::keep(session, vec![operation], Vec::new());
    } else {
        fill_operation(session, &operation);
    }
    Ok(())
}

/// Fills what an operation receives that nobody sends for real.
pub(crate) fn fill_operation(session: &Session, operation: &Pending) {
    if let Some(payload) = &operation.payload {
        fill(session, operation.comm, payload);
    } else if let Some(message) = operation.message.filter(|message| !message.is_send && !message.is_to_self) {
        group::note_received(session, message.address, message.bytes);
        operation.comm.count_tier(session, Tier::Shape, KIND_RECEIVE);
    }
}

/// Counts an operation whose members all run side by side.
pub(crate) fn note_live(session: &Session, operation: &Pending) {
    let kind = match (&operation.payload, &operation.message) {
        (Some(payload), _) if payload.receives() => payload.kind as u32,
        (None, Some(message)) if !message.is_send && !message.is_to_self => KIND_RECEIVE,
        _ => return,
    };
    operation.comm.count_tier(session, Tier::Live, kind);
}

/// A collective of one rank is a copy on its stream, at once, even inside a group.
fn run_alone(session: &'static Session, call: &Call, comm: Comm, payload: &Payload) -> Outcome {
    if payload.send == payload.recv && payload.op != ReduceOp::PreMulSum {
        return Ok(());
    }
    if session.is_host() {
        Collective::new(*payload).run_alone();
    }
    let flags = flags(session, call.stream);
    let copy = Record {
        kind: RecordKind::Memcpy as u16,
        flags,
        stream: session.stream_id(call.stream),
        a: payload.extent().recv,
        b: CopyDirection::DeviceToDevice as u64,
        ..Record::default()
    };
    session.append(&copy)?;
    if session.is_host() {
        return session.complete(&|| false);
    }
    if flags & FLAG_CAPTURED == 0 {
        fill(session, comm, payload);
    } else {
        let record = Record { e: comm.id(), ..copy };
        graphs::keep(session, vec![Pending::new(comm, record, Some(*payload), None)], Vec::new());
    }
    session.complete(&|| false)
}

#[inline]
fn flags(session: &Session, stream: Handle) -> u16 {
    if session.is_capturing(stream) { FLAG_CAPTURED } else { 0 }
}

impl Session {
    /// What a real device must know before the operation is appended.
    #[inline]
    pub(crate) fn fill_before(&self, comm: Comm, payload: Option<&Payload>) {
        if let (Some(table), Some(payload)) = (self.real_table(), payload) {
            staged::attach(self, table, comm, payload);
        }
    }

    /// What the emulated device does once the operation is appended.
    #[inline]
    pub(crate) fn fill_after(&self, operation: &Pending) {
        if !self.is_host() && !self.is_real() && !graphs::is_captured(operation) {
            fill_operation(self, operation);
        }
    }
}

/// Fills the receive buffer if the payload is small and in memory that may be touched.
#[inline]
pub(crate) fn fill(session: &Session, comm: Comm, payload: &Payload) {
    let extent = payload.extent();
    if extent.recv == 0 {
        if matches!(payload.kind, CollectiveKind::Broadcast | CollectiveKind::Scatter) {
            comm.count_tier(session, Tier::Shape, payload.kind as u32);
        }
        let bytes = payload.received();
        return tell_received(session, payload, (payload.recv, bytes), (0, 0), RECEIVED_NOTHING);
    }
    let (to, from) = ((payload.recv, extent.recv), (payload.send, extent.send));
    if !payload.is_small() {
        tell_received(session, payload, to, from, RECEIVED_NOTHING);
        return notes::count(session, comm, Fate::TooLarge, payload.kind);
    }
    let multiplier = match payload.scale.map(|scale| scale.scalar) {
        Some(comm::Scalar::Device(address)) => address,
        _ => 0,
    };
    let is_accessible = session.is_accessible(payload.send, extent.send)
        && session.is_accessible(payload.recv, extent.recv)
        && (multiplier == 0 || session.is_accessible(multiplier, payload.dtype.size_bytes()));
    if !is_accessible {
        return notes::count(session, comm, Fate::Foreign, payload.kind);
    }
    // SAFETY: the ranges were just found accessible.
    unsafe { payload.mirror() };
    let is_own = payload.nranks == 1 || (payload.kind == CollectiveKind::Broadcast && payload.rank == payload.root);
    tell_received(session, payload, to, from, if is_own { RECEIVED_OWN } else { RECEIVED_MIRRORED });
    notes::count(session, comm, Fate::Mirrored, payload.kind);
}

fn tell_received(session: &Session, payload: &Payload, to: (usize, u64), from: (usize, u64), fate: c_int) {
    if to.1 > 0 {
        session.received(to, from, notes::name(payload.kind), fate);
    }
}

#[cold]
fn invalid(function: &str, what: &str, value: c_int) -> Failure {
    Failure::new(Code::InvalidArgument, format!("{function} : invalid {what} {value}"))
}

/// May operations be issued on the communicator?
#[inline]
pub(crate) fn ensure_ready(comm: Comm, function: &'static str) -> Outcome {
    if comm.is_revoked() {
        return Err(Failure::new(Code::InvalidUsage, format!("{function} : the communicator was revoked")));
    }
    if comm.is_suspended() {
        return Err(Failure::new(Code::InvalidUsage, format!("{function} : the communicator is suspended")));
    }
    match async_error(comm) {
        Code::Success => Ok(()),
        Code::InProgress => Err(Failure::new(
            Code::InvalidArgument,
            format!("{function} : the communicator is used before its previous operation returned ncclSuccess"),
        )),
        code => Err(Failure::again(code)),
    }
}

/// What `ncclCommGetAsyncError` answers. Takes no lock and waits for nobody.
pub(crate) fn poll(comm: Comm) -> Code {
    match comm.poll() {
        Code::Success => async_error(comm),
        code => code,
    }
}

/// The state of a communicator.
#[inline]
pub(crate) fn async_error(comm: Comm) -> Code {
    match comm.async_error() {
        Code::Success if session::current().is_some_and(Session::is_dead) => Code::RemoteError,
        Code::Success => comm.real().map_or(Code::Success, passthrough::async_error),
        code => code,
    }
}

/// An id no other call makes, in this process or in another rank's.
pub(crate) fn unique_id() -> RawUniqueId {
    static COUNTER: AtomicU64 = AtomicU64::new(1);
    let mut id = [0_u8; UNIQUE_ID_BYTES];
    id[..8].copy_from_slice(UNIQUE_ID_LOCAL_MAGIC);
    id[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    id[12..16].copy_from_slice(&config::rank().unwrap_or(u32::MAX).to_le_bytes());
    id[16..24].copy_from_slice(&COUNTER.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    RawUniqueId(id)
}

/// Destroys a communicator, at the end of the open group if there is one.
pub(crate) fn destroy(comm: Comm) -> Outcome {
    if !group::is_open() {
        return destroy_now(comm);
    }
    if group::push_destroyed(comm) { Ok(()) } else { Err(destroyed_before()) }
}

#[cold]
fn destroyed_before() -> Failure {
    Failure::new(Code::InvalidArgument, "ncclCommDestroy : the communicator is already destroyed")
}

/// The end of a communicator. From here on its handle is invalid.
pub(crate) fn destroy_now(comm: Comm) -> Outcome {
    let (id, real) = (comm.id(), comm.real());
    if !comm.close() {
        return Err(destroyed_before());
    }
    if let Some(real) = real {
        passthrough::end(real, false)?;
    }
    // With the engine gone there is nobody to tell, and the program has heard of it.
    let Some(session) = session::current().filter(|session| !session.is_dead()) else { return Ok(()) };
    notes::flush(session);
    comm::flush_tiers(session);
    session.append(&Record { kind: RecordKind::CommDestroy as u16, e: id, ..Record::default() })
}

/// Refuses a function that is not supported, by name.
#[cold]
pub(crate) fn refuse(function: &'static str) -> Outcome {
    refuse_part(function, "")
}

/// Refuses a use of a function, by name.
#[cold]
pub(crate) fn refuse_part(function: &'static str, part: &str) -> Outcome {
    static TOLD: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let what = if part.is_empty() { function.to_owned() } else { format!("{function} {part}") };
    let text = format!("{what} is not supported by the NCCL stand-in");
    if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(function) {
        tell(&text);
    }
    if let Some(session) = session::current().filter(|session| !session.is_dead()) {
        // Only counted for the summary; the caller gets the error either way.
        let _ = session.control(&Request::Unsupported { name: what });
    }
    Err(Failure::new(Code::InvalidUsage, text))
}

/// Answers an export of the table that is refused, with its code. A communicator among the arguments is checked first.
pub(crate) fn refuse_export(function: &'static str, code: Code, comm: Option<Handle>) -> Outcome {
    if let Some(comm) = comm {
        comm::check(comm, function)?;
    }
    refuse(function).map_err(|failure| Failure { code, ..failure })
}

/// Refuses a function that cannot return an error: the text and the line are all it gets.
#[cold]
pub(crate) fn refuse_silently(function: &'static str) {
    if let Err(failure) = refuse(function) {
        guard::set_last_error(&failure.text);
    }
}
