//! `ncclGroupStart` ... `ncclGroupEnd`: nesting per thread, a sticky error, and operations that wait for the end.

use crate::abi::Code;
use crate::comm::Comm;
use crate::guard::{Failure, Outcome};
use crate::session::{self, Session};
use crate::values::Payload;
use prism_wire::message::{Record, RecordKind};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, Ordering};

/// Group ordinals of this process; 0 means "not in a group".
static NEXT_ORDINAL: AtomicU32 = AtomicU32::new(1);

/// An operation that waits for the end of its group.
pub(crate) struct Pending {
    pub(crate) comm: Comm,
    pub(crate) record: Record,
    pub(crate) payload: Option<Payload>,
    /// Set for a message of a rank to itself.
    pub(crate) to_self: Option<SelfMessage>,
}

/// One side of a message of a rank to itself.
#[derive(Clone, Copy)]
pub(crate) struct SelfMessage {
    pub(crate) is_send: bool,
    pub(crate) address: usize,
    pub(crate) bytes: u64,
}

#[derive(Default)]
struct Group {
    operations: Vec<Pending>,
    /// Communicators destroyed inside the group: they end with it.
    destroyed: Vec<Comm>,
}

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
    if is_open() {
        ERROR.set(code);
    }
}

/// Adds an operation to the open group.
pub(crate) fn push(pending: Pending) {
    GROUP.with_borrow_mut(|group| group.operations.push(pending));
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

/// Closes the group. `check` runs only at the outermost end, before anything is launched; `launch` false drops the
/// operations instead.
pub(crate) fn end(launch: bool, check: impl FnOnce() -> Outcome) -> Outcome {
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
    let result = if error == Code::Success { check() } else { Err(Failure::again(error)) }
        .and_then(|()| if launch { launch_all(&group.operations) } else { Ok(()) });
    let destroyed = group.destroyed.iter().map(|comm| crate::ops::destroy_now(*comm)).fold(Ok(()), Outcome::and);
    let result = result.and(destroyed);
    // Keep the room for the next group.
    group.operations.clear();
    group.destroyed.clear();
    GROUP.set(group);
    result
}

fn launch_all(operations: &[Pending]) -> Outcome {
    if operations.is_empty() {
        return Ok(());
    }
    if !operations.iter().all(|operation| operation.comm.is_live()) {
        return Err(Failure::new(
            Code::InvalidUsage,
            "a communicator was aborted before the group of its operations ended",
        ));
    }
    let messages = pair_self_messages(operations)?;
    let session = session::of_comm()?;
    let ordinal = next_ordinal();
    for operation in operations {
        session.append(&Record { h: ordinal, ..operation.record })?;
        if let Some(payload) = &operation.payload {
            crate::ops::fill(session, payload);
        }
    }
    for (send, recv) in messages {
        copy_message(session, send, recv);
    }
    session.append(&Record { kind: RecordKind::GroupEnd as u16, h: ordinal, ..Record::default() })?;
    session.complete()
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
fn pair_self_messages(operations: &[Pending]) -> Result<Vec<(SelfMessage, SelfMessage)>, Failure> {
    let messages: Vec<_> =
        operations.iter().filter_map(|operation| Some((operation.comm.id(), operation.to_self?))).collect();
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
fn copy_message(session: &Session, send: SelfMessage, recv: SelfMessage) {
    let bytes = send.bytes.min(recv.bytes);
    let may_copy = bytes <= crate::values::MAX_MIRRORED_BYTES
        && session.is_accessible(send.address, bytes)
        && session.is_accessible(recv.address, bytes);
    if may_copy && bytes > 0 {
        let from = core::ptr::with_exposed_provenance::<u8>(send.address);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(recv.address);
        // SAFETY: both ranges were just found accessible; `copy` allows overlap.
        unsafe { to.copy_from(from, bytes as usize) };
    }
}
