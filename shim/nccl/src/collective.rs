//! Collectives of members that all run for real, as stages of sends and receives.
//!
//! Reductions fold the members' contributions in group-rank order, rounding after each, as a chain of ranks would; the
//! order of a real ring differs from chunk to chunk. Large buffers go in pieces, so that the memory needed is bounded.

use crate::arith::Reduction;
use crate::comm::Scalar;
use crate::exchange::{Stage, Tag, Work};
use crate::values::Payload;
use prism_wire::message::{CollectiveKind, ReduceOp};

/// Bytes of contributions kept at a time.
const PIECE_BYTES: usize = 4 << 20;
/// Up to this size an all-reduce sends everything to everybody: one round instead of two.
const SMALL_BYTES: usize = 32 << 10;

/// One call.
pub(crate) struct Collective {
    payload: Payload,
    /// Elements done.
    at: usize,
    /// Of an all-reduce: the reduced parts are to be handed out.
    is_gathering: bool,
    is_over: bool,
}

impl Collective {
    pub(crate) fn new(payload: Payload) -> Self {
        Self { payload, at: 0, is_gathering: false, is_over: false }
    }

    /// The collective of a communicator of one member: a copy, or a multiplication.
    pub(crate) fn run_alone(&self) {
        let payload = &self.payload;
        let (count, bytes) = (payload.count as usize, payload.count as usize * self.element());
        if payload.op != ReduceOp::PreMulSum {
            return copy(payload.send, payload.recv, bytes);
        }
        let own = [core::ptr::with_exposed_provenance(payload.send)];
        // SAFETY: the caller of NCCL gave both buffers.
        unsafe { self.reduction().fold(&own, None, core::ptr::with_exposed_provenance_mut(payload.recv), count) };
    }

    fn tag(&self) -> Tag {
        Tag::of(&self.payload)
    }

    fn element(&self) -> usize {
        self.payload.dtype.size_bytes() as usize
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.payload.rank as usize;
        (0..self.payload.nranks as usize).filter(move |peer| *peer != rank)
    }

    fn reduction(&self) -> Reduction {
        reduction_of(&self.payload)
    }

    /// A stage that receives `count` elements from every other member and folds them with one's own at `own` into `into`.
    fn fold_stage(&self, mut stage: Stage, own: usize, into: usize, count: usize) -> Stage {
        let (tag, bytes) = (self.tag(), count * self.element());
        let rank = self.payload.rank as usize;
        let mut others = vec![0_u8; bytes * (self.payload.nranks as usize - 1)];
        let base = others.as_mut_ptr().expose_provenance();
        let place = move |peer: usize| base + bytes * if peer < rank { peer } else { peer - 1 };
        for peer in self.peers() {
            stage.receive(peer, tag, place(peer), bytes);
        }
        let reduction = self.reduction();
        let nranks = self.payload.nranks as usize;
        stage.then(move || {
            let part = |peer| core::ptr::with_exposed_provenance(if peer == rank { own } else { place(peer) });
            let parts: Vec<*const u8> = (0..nranks).map(part).collect();
            // SAFETY: the caller of NCCL gave `own` and `into`; the other parts are ours, and were just received.
            unsafe { reduction.fold(&parts, None, core::ptr::with_exposed_provenance_mut(into), count) };
            drop(others);
        })
    }

    fn all_reduce(&mut self) -> Stage {
        let (count, size, nranks) = (self.payload.count as usize, self.element(), self.payload.nranks as usize);
        let (send, recv, tag, rank) = (self.payload.send, self.payload.recv, self.tag(), self.payload.rank as usize);
        if count * size <= SMALL_BYTES {
            self.is_over = true;
            let mut stage = Stage::default();
            self.peers().for_each(|peer| stage.send(peer, tag, send, count * size));
            return self.fold_stage(stage, send, recv, count);
        }
        let piece = (count - self.at).min((PIECE_BYTES / size).max(nranks));
        // The part of the piece that a member reduces: from, length.
        let part = |member: usize| {
            let (from, to) = (piece * member / nranks, piece * (member + 1) / nranks);
            ((self.at + from) * size, to - from)
        };
        let (own, own_count) = part(rank);
        let mut stage = Stage::default();
        if self.is_gathering {
            for peer in self.peers() {
                stage.send(peer, tag, recv + own, own_count * size);
                let (at, count) = part(peer);
                stage.receive(peer, tag, recv + at, count * size);
            }
            self.is_gathering = false;
            self.at += piece;
            self.is_over = self.at == count;
            return stage;
        }
        for peer in self.peers() {
            let (at, count) = part(peer);
            stage.send(peer, tag, send + at, count * size);
        }
        self.is_gathering = true;
        self.fold_stage(stage, send + own, recv + own, own_count)
    }

    /// Everybody's part goes to the member it is for; each folds its own.
    fn reduce_scatter(&mut self) -> Stage {
        let (count, size) = (self.payload.count as usize, self.element());
        let piece = (count - self.at).min((PIECE_BYTES / size / self.payload.nranks as usize).max(1));
        let (tag, offset) = (self.tag(), self.at * size);
        let part = |member: usize| self.payload.send + member * count * size + offset;
        let mut stage = Stage::default();
        self.peers().for_each(|peer| stage.send(peer, tag, part(peer), piece * size));
        let own = part(self.payload.rank as usize);
        self.at += piece;
        self.is_over = self.at == count;
        self.fold_stage(stage, own, self.payload.recv + offset, piece)
    }

    fn reduce(&mut self) -> Stage {
        let (count, size) = (self.payload.count as usize, self.element());
        let piece = (count - self.at).min((PIECE_BYTES / size / self.payload.nranks as usize).max(1));
        let (tag, offset) = (self.tag(), self.at * size);
        let mut stage = Stage::default();
        self.at += piece;
        self.is_over = self.at == count;
        if self.payload.is_root {
            let (own, into) = (self.payload.send + offset, self.payload.recv + offset);
            return self.fold_stage(stage, own, into, piece);
        }
        stage.send(self.payload.root as usize, tag, self.payload.send + offset, piece * size);
        stage
    }

    /// Collectives that only move bytes.
    fn moves(&mut self) -> Stage {
        self.is_over = true;
        let payload = &self.payload;
        let (send, recv, tag) = (payload.send, payload.recv, self.tag());
        let one = payload.count as usize * self.element();
        let (rank, root) = (payload.rank as usize, payload.root as usize);
        let mut stage = Stage::default();
        let mut own = None;
        match payload.kind {
            CollectiveKind::AllGather => {
                own = Some((send, recv + rank * one));
                for peer in self.peers() {
                    stage.send(peer, tag, send, one);
                    stage.receive(peer, tag, recv + peer * one, one);
                }
            }
            CollectiveKind::AllToAll => {
                own = Some((send + rank * one, recv + rank * one));
                for peer in self.peers() {
                    stage.send(peer, tag, send + peer * one, one);
                    stage.receive(peer, tag, recv + peer * one, one);
                }
            }
            CollectiveKind::Broadcast if payload.is_root => {
                own = Some((send, recv));
                self.peers().for_each(|peer| stage.send(peer, tag, send, one));
            }
            CollectiveKind::Gather if payload.is_root => {
                own = Some((send, recv + rank * one));
                self.peers().for_each(|peer| stage.receive(peer, tag, recv + peer * one, one));
            }
            CollectiveKind::Scatter if payload.is_root => {
                own = Some((send + rank * one, recv));
                self.peers().for_each(|peer| stage.send(peer, tag, send + peer * one, one));
            }
            CollectiveKind::Gather => stage.send(root, tag, send, one),
            _ => stage.receive(root, tag, recv, one),
        }
        match own {
            Some((from, to)) if from != to => stage.then(move || copy(from, to, one)),
            _ => stage,
        }
    }
}

impl Work for Collective {
    fn next(&mut self) -> Option<Stage> {
        if self.is_over {
            return None;
        }
        Some(match self.payload.kind {
            CollectiveKind::AllReduce => self.all_reduce(),
            CollectiveKind::ReduceScatter => self.reduce_scatter(),
            CollectiveKind::Reduce => self.reduce(),
            _ => self.moves(),
        })
    }
}

/// What a collective does to the members' elements.
pub(crate) fn reduction_of(payload: &Payload) -> Reduction {
    let multiplier = match payload.scale.map(|scale| scale.scalar) {
        Some(Scalar::Value(bits)) => bits,
        Some(Scalar::Device(address)) => {
            let mut bytes = [0_u8; 8];
            let from = core::ptr::with_exposed_provenance::<u8>(address);
            let size = payload.dtype.size_bytes() as usize;
            // SAFETY: the caller of NCCL gave the address of one element of the type; no type is larger than eight bytes.
            unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, size) };
            u64::from_le_bytes(bytes)
        }
        None => 0,
    };
    Reduction { dtype: payload.dtype, op: payload.op, n: payload.nranks, multiplier }
}

/// Copies within this process; the ranges may overlap.
pub(crate) fn copy(from: usize, to: usize, bytes: usize) {
    let from = core::ptr::with_exposed_provenance::<u8>(from);
    let to = core::ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: the caller of NCCL gave both ranges.
    unsafe { to.copy_from(from, bytes) };
}
