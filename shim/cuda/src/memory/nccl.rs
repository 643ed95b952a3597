//! What NCCL takes of the card: it allocates past the program's allocator, and only the engine's model knows how much.

use crate::{device, session};
use prism_wire::control::ControlKind;
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind};
use std::sync::atomic::{AtomicI32, Ordering};

/// No communicator was made.
const NONE: i32 = -1;
/// The card that was current when the first communicator was made; all are counted there, as a rank has one card.
static CARD: AtomicI32 = AtomicI32::new(NONE);
/// In a request for the memory of a communicator: of all that the process has.
const ALL: u32 = 0;

/// A request of NCCL's stand-in passes: does it make a communicator?
pub(crate) fn requested(kind: ControlKind) {
    if matches!(kind, ControlKind::CommInit | ControlKind::CommSplit | ControlKind::CommMembers) {
        // The first one's card stays.
        let _ = CARD.compare_exchange(NONE, device::current(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Bytes of NCCL's buffers on a card, by what communicators were used for up to here. It takes no virtual time.
pub(super) fn bytes(card: usize) -> u64 {
    if usize::try_from(CARD.load(Ordering::Acquire)) != Ok(card) {
        return 0;
    }
    // Answered when the engine has taken in every record before it.
    let settle = Record { kind: RecordKind::StreamQuery as u16, flags: FLAG_BACKGROUND, ..Record::default() };
    let settled = session::get().ok().and_then(|session| session.query(settle, false));
    // A session that is lost says so itself, and its run has failed.
    let answer = settled.and_then(|_| session::control(ControlKind::CommMemory, &ALL.to_le_bytes()).ok());
    answer.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}
