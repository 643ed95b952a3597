//! Payloads of calls that are captured into a CUDA graph, on the emulated device: they are mirrored ([`crate::values`]) at
//! every launch of the graph, when the contributions are there, and not when they are captured.

use crate::group::{self, Message, Pending};
use crate::guard;
use crate::notes::{self, Fate};
use crate::ops;
use crate::session::Session;
use core::ffi::c_void;
use prism_wire::message::FLAG_CAPTURED;

/// What one captured call, or group of calls, receives at a launch.
struct Captured {
    session: &'static Session,
    operations: Vec<Pending>,
    /// Messages of this rank to itself: send and receive.
    to_self: Vec<(Message, Message)>,
}

/// Is the operation part of a graph, so that nothing is received now?
pub(crate) fn is_captured(operation: &Pending) -> bool {
    operation.record.flags & FLAG_CAPTURED != 0
}

/// Has what these captured operations receive filled at every launch of their graph.
pub(crate) fn keep(session: &'static Session, operations: Vec<Pending>, to_self: Vec<(Message, Message)>) {
    let Some(first) = operations.first() else { return };
    let (stream, lost) = (first.record.stream, counted(&operations));
    let data = Box::into_raw(Box::new(Captured { session, operations, to_self }));
    if session.at_launch(stream, run, forget, data.cast()) {
        return;
    }
    // SAFETY: nobody took it.
    drop(unsafe { Box::from_raw(data) });
    for (comm, kind) in lost {
        notes::count(session, comm, Fate::Captured, kind);
    }
}

fn counted(operations: &[Pending]) -> Vec<(crate::comm::Comm, prism_wire::message::CollectiveKind)> {
    operations.iter().filter_map(|operation| Some((operation.comm, operation.payload?.kind))).collect()
}

unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: made by `keep`; it lives until `forget`, and is only read.
    let captured = unsafe { &*data.cast::<Captured>() };
    guard::call(|| captured.fill());
}

unsafe extern "C" fn forget(data: *mut c_void) {
    // SAFETY: made by `keep`, and forgotten once.
    drop(unsafe { Box::from_raw(data.cast::<Captured>()) });
}

impl Captured {
    fn fill(&self) {
        // As in NCCL, the communicators have to outlive the graph: what is left of one is not looked at.
        let is_there = |operation: &&Pending| !operation.comm.is_interrupted_since(operation.record.e);
        for operation in self.operations.iter().filter(is_there) {
            ops::fill_operation(self.session, operation);
        }
        for (send, recv) in &self.to_self {
            group::copy_message(self.session, *send, *recv);
        }
        group::mirror_messages(self.session, &self.operations);
        group::mirror_broadcasts(self.session, &self.operations);
    }
}
