//! What the run's summary must say about payloads: how many were mirrored, how many left alone, by collective.

use crate::comm::Comm;
use crate::session::Session;
use core::ffi::CStr;
use prism_wire::frame::Request;
use prism_wire::message::CollectiveKind;
use std::sync::atomic::{AtomicU64, Ordering};

/// What happened to a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Mirrored (tier T1).
    Mirrored,
    /// Larger than the limit.
    TooLarge,
    /// Not memory the host may read.
    Foreign,
    /// Captured into a graph that does not tell of its launches.
    Captured,
}

/// How values came about, in the order of [`prism_wire::control::TIERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    /// T0: nothing is known of the values.
    Shape,
    /// T1: the peers contribute what this rank does.
    Mirrored,
    /// T2: by a rule of the user.
    Rule,
    /// T3: exact, of ranks that take turns.
    Turns,
    /// Exact, of ranks that run side by side.
    Live,
}

const FATES: [(Fate, &str); 4] = [
    (Fate::Mirrored, "payload mirrored (tier T1, values are not real)"),
    (Fate::TooLarge, "payload over 1 MiB left as it is"),
    (Fate::Foreign, "payload outside device memory left as it is"),
    (Fate::Captured, "payload captured into a graph left as it is"),
];

const KINDS: [(CollectiveKind, &str); 8] = [
    (CollectiveKind::AllReduce, "AllReduce"),
    (CollectiveKind::AllGather, "AllGather"),
    (CollectiveKind::ReduceScatter, "ReduceScatter"),
    (CollectiveKind::Broadcast, "Broadcast"),
    (CollectiveKind::Reduce, "Reduce"),
    (CollectiveKind::AllToAll, "AlltoAll"),
    (CollectiveKind::Gather, "Gather"),
    (CollectiveKind::Scatter, "Scatter"),
];

/// NCCL's name of a collective.
pub(crate) fn name(kind: CollectiveKind) -> &'static CStr {
    const NAMES: [&CStr; KINDS.len()] = [
        c"ncclAllReduce",
        c"ncclAllGather",
        c"ncclReduceScatter",
        c"ncclBroadcast",
        c"ncclReduce",
        c"ncclAlltoAll",
        c"ncclGather",
        c"ncclScatter",
    ];
    NAMES[kind as usize]
}

/// Counted and not yet reported.
static PENDING: [[AtomicU64; KINDS.len()]; FATES.len()] =
    [const { [const { AtomicU64::new(0) }; KINDS.len()] }; FATES.len()];
/// Was a first one reported?
static SEEN: [[AtomicU64; KINDS.len()]; FATES.len()] =
    [const { [const { AtomicU64::new(0) }; KINDS.len()] }; FATES.len()];

/// Counts one payload. The first of its sort is reported at once, so that a program that dies is covered; the others
/// with [`flush`]. The counts of notes with one text add up to the total.
#[inline]
pub(crate) fn count(session: &Session, comm: Comm, fate: Fate, kind: CollectiveKind) {
    let tier = if fate == Fate::Mirrored { Tier::Mirrored } else { Tier::Shape };
    comm.count_tier(session, tier, kind as u32);
    let (row, column) = (fate as usize, kind as usize);
    PENDING[row][column].fetch_add(1, Ordering::Relaxed);
    if SEEN[row][column].load(Ordering::Relaxed) == 0 && SEEN[row][column].swap(1, Ordering::Relaxed) == 0 {
        report(session, row, column);
    }
}

/// Reports what was counted since the last report.
pub(crate) fn flush(session: &Session) {
    for row in 0..FATES.len() {
        for column in 0..KINDS.len() {
            report(session, row, column);
        }
    }
}

#[cold]
fn report(session: &Session, row: usize, column: usize) {
    let count = PENDING[row][column].swap(0, Ordering::Relaxed);
    if count == 0 {
        return;
    }
    let text = format!("nccl{}: {}", KINDS[column].1, FATES[row].1);
    // A dead engine is reported by the calls that need it; a remark is not worth an error.
    let _ = session.control(&Request::Note { count, text });
}

/// Counts something rare for the summary.
pub(crate) fn remark(text: &str) {
    if let Some(session) = crate::session::current().filter(|session| !session.is_dead()) {
        // As above.
        let _ = session.control(&Request::Note { count: 1, text: text.to_owned() });
    }
}

/// Forgets the counts of the parent. Async-signal-safe.
pub(crate) fn forget_all() {
    for counter in PENDING.iter().flatten().chain(SEEN.iter().flatten()) {
        counter.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{FATES, KINDS};

    #[test]
    fn tables_are_in_the_order_of_their_numbers() {
        assert!(FATES.iter().enumerate().all(|(index, (fate, _))| *fate as usize == index));
        assert!(KINDS.iter().enumerate().all(|(index, (kind, _))| *kind as usize == index));
        assert!(KINDS.iter().all(|(kind, name)| super::name(*kind).to_str() == Ok(&format!("nccl{name}"))));
    }
}
