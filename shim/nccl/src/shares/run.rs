//! What a collective does once all contributions are there.

use super::{Said, Share, What};
use crate::collective::{copy, reduction_of};
use crate::guard::{Failure, Outcome};
use crate::notes::Tier;
use crate::session::Session;
use crate::values::{MAX_MIRRORED_BYTES, Payload};
use prism_wire::control::Contribution;
use prism_wire::message::CollectiveKind;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

/// Bytes of contributions in memory at a time.
const PIECE_BYTES: usize = 4 << 20;
/// From so many running members on, the first to reduce leaves its result for the others.
const MIN_FOR_RESULT: usize = 4;

/// What virtual members contribute.
enum Absent {
    /// There are none, or nothing of theirs is needed.
    None,
    /// What the running member before them does.
    Mirror,
    /// Nothing is known.
    Shape,
    /// One row, or one for each.
    Rows(Vec<u8>),
}

impl Share {
    /// Takes what others contributed.
    pub(super) fn finish(&self, session: &Session) -> Outcome {
        match &self.what {
            What::Collective(payload) => self.collective(session, payload),
            What::Receive(message) => self.receive(session, message),
            What::Send(_) | What::Split(_) => Ok(()),
        }
    }

    fn collective(&self, session: &Session, payload: &Payload) -> Outcome {
        for need in self.needs() {
            self.shares.check(&need, self.header())?;
        }
        if !payload.receives() {
            give(payload);
            return Ok(());
        }
        let (absent, tier) = self.absent_of(session, payload)?;
        match payload.kind {
            CollectiveKind::AllReduce | CollectiveKind::Reduce | CollectiveKind::ReduceScatter => {
                self.reduce(payload, &absent)?;
            }
            CollectiveKind::Broadcast | CollectiveKind::Scatter => self.receive_from_root(payload, &absent)?,
            CollectiveKind::AllGather | CollectiveKind::Gather => self.gather(payload, &absent)?,
            CollectiveKind::AllToAll => self.all_to_all(payload, &absent)?,
        }
        self.note(session, tier, payload.kind as u32);
        Ok(())
    }

    /// Where the virtual members' values come from, and the tier of the call.
    fn absent_of(&self, session: &Session, payload: &Payload) -> Result<(Absent, Tier), Failure> {
        let is_from_root = matches!(payload.kind, CollectiveKind::Broadcast | CollectiveKind::Scatter);
        if self.shares.is_complete() || is_from_root && self.shares.is_live(payload.root) {
            return Ok((Absent::None, self.exact()));
        }
        let extent = payload.extent();
        let is_small = extent.recv.max(extent.send) <= MAX_MIRRORED_BYTES;
        Ok(match self.ask(session, bytes_of(payload))? {
            Said::Rows(rows) => (Absent::Rows(rows), Tier::Rule),
            Said::Mirror if !is_from_root => (Absent::Mirror, Tier::Mirrored),
            Said::NoRule if !is_from_root && is_small => (Absent::Mirror, Tier::Mirrored),
            _ => (Absent::Shape, Tier::Shape),
        })
    }

    fn reduce(&self, payload: &Payload, absent: &Absent) -> Outcome {
        match absent {
            Absent::Shape => return Ok(()),
            Absent::Mirror if self.shares.live.len() == 1 => {
                // SAFETY: the caller of NCCL gave the buffers.
                unsafe { payload.mirror() };
                return Ok(());
            }
            _ => {}
        }
        let is_shared = payload.kind == CollectiveKind::AllReduce && self.shares.live.len() >= MIN_FOR_RESULT;
        if is_shared && self.read_result(payload)? {
            return Ok(());
        }
        self.fold(payload, absent)?;
        if is_shared {
            self.leave_result(payload);
        }
        Ok(())
    }

    /// Folds the contributions in group-rank order, piece by piece.
    fn fold(&self, payload: &Payload, absent: &Absent) -> Outcome {
        let (shares, size) = (&self.shares, payload.dtype.size_bytes() as usize);
        let (count, one) = (payload.count as usize, bytes_of(payload));
        // Of contributions for everybody, the part for this rank.
        let part = if payload.kind == CollectiveKind::ReduceScatter { payload.rank as usize * one } else { 0 };
        let piece = (PIECE_BYTES / size / shares.live.len()).clamp(1, count);
        let mut others = vec![0_u8; piece * size * (shares.live.len() - 1)];
        let base = others.as_mut_ptr().expose_provenance();
        let reduction = reduction_of(payload);
        let weights = matches!(absent, Absent::Mirror).then(|| self.weights());
        for at in (0..count).step_by(piece) {
            let length = piece.min(count - at);
            let offset = at * size;
            for (index, peer) in shares.others().enumerate() {
                let contribution = shares.of(peer, self.number);
                shares.read(&contribution, part + offset, base + index * piece * size, length * size)?;
            }
            let mut next_other = 0;
            let mut next_absent = 0;
            let mut parts: Vec<*const u8> = Vec::new();
            for member in 0..payload.nranks {
                let address = if member == payload.rank {
                    payload.send + part + offset
                } else if shares.is_live(member) {
                    next_other += 1;
                    base + (next_other - 1) * piece * size
                } else if let Absent::Rows(rows) = absent {
                    let row = if rows.len() == one { 0 } else { next_absent * one };
                    next_absent += 1;
                    rows.as_ptr().expose_provenance() + row + offset
                } else {
                    continue;
                };
                parts.push(core::ptr::with_exposed_provenance(address));
            }
            let into = core::ptr::with_exposed_provenance_mut(payload.recv + offset);
            // SAFETY: the caller of NCCL gave its buffers; the other parts are ours and hold `length` elements.
            unsafe { reduction.fold(&parts, weights.as_deref(), into, length) };
        }
        drop(others);
        Ok(())
    }

    /// How many members every running one stands for: itself and the virtual ones up to the next (the first, also for those
    /// before it).
    fn weights(&self) -> Vec<u32> {
        let live = &self.shares.live;
        let end = |at: usize| live.get(at + 1).copied().unwrap_or(self.shares.nranks);
        let begin = |at: usize| if at == 0 { 0 } else { live[at] };
        (0..live.len()).map(|at| end(at) - begin(at)).collect()
    }

    /// The running member that a virtual one is like.
    fn like(&self, member: u32) -> u32 {
        let live = &self.shares.live;
        live[live.partition_point(|running| *running < member).saturating_sub(1)]
    }

    fn receive_from_root(&self, payload: &Payload, absent: &Absent) -> Outcome {
        let one = bytes_of(payload);
        match absent {
            Absent::None => {
                let scatters = payload.kind == CollectiveKind::Scatter;
                let part = if scatters { payload.rank as usize * one } else { 0 };
                self.shares.read(&self.shares.of(payload.root, self.number), part, payload.recv, one)
            }
            Absent::Rows(rows) => {
                copy(rows.as_ptr().expose_provenance(), payload.recv, one.min(rows.len()));
                Ok(())
            }
            Absent::Mirror | Absent::Shape => Ok(()),
        }
    }

    fn gather(&self, payload: &Payload, absent: &Absent) -> Outcome {
        let one = bytes_of(payload);
        let slot = |member: u32| payload.recv + member as usize * one;
        if payload.send != slot(payload.rank) {
            copy(payload.send, slot(payload.rank), one);
        }
        for peer in self.shares.others() {
            self.shares.read(&self.shares.of(peer, self.number), 0, slot(peer), one)?;
        }
        for (at, member) in self.shares.absent().enumerate() {
            match absent {
                Absent::Mirror => copy(slot(self.like(member)), slot(member), one),
                Absent::Rows(rows) => copy(row_of(rows, at, one), slot(member), one),
                Absent::None | Absent::Shape => {}
            }
        }
        Ok(())
    }

    fn all_to_all(&self, payload: &Payload, absent: &Absent) -> Outcome {
        let one = bytes_of(payload);
        let own = payload.rank as usize * one;
        for (at, member) in self.shares.absent().enumerate() {
            let slot = member as usize * one;
            match absent {
                // It sends what it gets.
                Absent::Mirror => copy(payload.send + slot, payload.recv + slot, one),
                Absent::Rows(rows) => copy(row_of(rows, at, one), payload.recv + slot, one),
                Absent::None | Absent::Shape => {}
            }
        }
        if payload.send != payload.recv {
            copy(payload.send + own, payload.recv + own, one);
        }
        for peer in self.shares.others() {
            let slot = payload.recv + peer as usize * one;
            self.shares.read(&self.shares.of(peer, self.number), own, slot, one)?;
        }
        Ok(())
    }

    /// Takes the result that another member has left, if one has.
    fn read_result(&self, payload: &Payload) -> Result<bool, Failure> {
        let path = self.shares.directory.join(Contribution::result_name(self.shares.exchange, self.number));
        let Ok(file) = File::open(path) else { return Ok(false) };
        let to = core::ptr::with_exposed_provenance_mut::<u8>(payload.recv);
        // SAFETY: the caller of NCCL gave the buffer.
        let to = unsafe { core::slice::from_raw_parts_mut(to, bytes_of(payload)) };
        let read = file.read_exact_at(to, 0);
        read.map(|()| true).map_err(|error| super::lost("cannot read the result of a reduction", &error))
    }

    /// Leaves the result for the others. If that fails they reduce by themselves.
    fn leave_result(&self, payload: &Payload) {
        let name = Contribution::result_name(self.shares.exchange, self.number);
        let draft = self.shares.directory.join(format!("{name}-{}", self.shares.rank));
        let from = core::ptr::with_exposed_provenance::<u8>(payload.recv);
        // SAFETY: the caller of NCCL gave the buffer, and it has just been filled.
        let data = unsafe { core::slice::from_raw_parts(from, bytes_of(payload)) };
        let written = File::create(&draft).and_then(|mut file| file.write_all(data));
        // A link appears complete or not at all.
        if written.is_ok() {
            let _ = std::fs::hard_link(&draft, self.shares.directory.join(name));
        }
        let _ = std::fs::remove_file(draft);
    }
}

/// The root of a broadcast or scatter has its own part; members that only give have nothing to do.
fn give(payload: &Payload) {
    let one = bytes_of(payload);
    match payload.kind {
        CollectiveKind::Broadcast if payload.is_root => copy(payload.send, payload.recv, one),
        CollectiveKind::Scatter if payload.is_root => {
            copy(payload.send + payload.rank as usize * one, payload.recv, one);
        }
        _ => {}
    }
}

/// Bytes of `count` elements.
fn bytes_of(payload: &Payload) -> usize {
    (payload.count * payload.dtype.size_bytes()) as usize
}

/// Address of the row of the virtual member at this place among them.
fn row_of(rows: &[u8], at: usize, one: usize) -> usize {
    let row = if rows.len() == one { 0 } else { at * one };
    rows.as_ptr().expose_provenance() + row
}
