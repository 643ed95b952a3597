//! Random programs.

use prism_engine::ids::Rank;
use prism_engine::messages::{Lanes, MessageOp, MessageProgram, MessageProgramBuilder, OpIndex};
use proptest::collection::vec;
use proptest::prelude::*;

/// A message or calculation, and how it hangs on earlier ops of its rank.
#[derive(Clone, Debug)]
struct Piece {
    from: u32,
    to: u32,
    bytes: u64,
    tag: u32,
    ticks: u64,
    is_calc: bool,
    any: (bool, bool),
    lanes: (u8, u8),
    rendezvous: bool,
    /// Distance back, and whether it is the start that counts.
    after: Vec<(u32, bool)>,
}

/// What programs may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kinds {
    pub(crate) lanes: u8,
    pub(crate) wildcards: bool,
}

fn piece(num_ranks: u32, kinds: Kinds) -> impl Strategy<Value = Piece> {
    let sizes = prop_oneof![Just(0_u64), Just(1), 2_u64..50, 100_u64..2000];
    let lane = || 0..kinds.lanes;
    let flags = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.1), prop::bool::weighted(0.1));
    let after = vec((1_u32..20, prop::bool::weighted(0.3)), 0..4);
    let what = (0..num_ranks, 0..num_ranks, sizes, 0_u32..2, 0_u64..3000);
    (what, flags, (lane(), lane()), after).prop_map(move |(what, flags, lanes, after)| {
        let (from, to, bytes, tag, ticks) = what;
        let (is_calc, rendezvous, any_peer, any_tag) = flags;
        let any = (any_peer && kinds.wildcards, any_tag && kinds.wildcards);
        Piece { from, to, bytes, tag, ticks, is_calc, any, lanes, rendezvous, after }
    })
}

/// Programs whose sends and receives come in pairs. Most can be run to the end; not all, as receives may be out of order.
pub(crate) fn programs(kinds: Kinds) -> impl Strategy<Value = MessageProgram> {
    (1_u32..5).prop_flat_map(move |ranks| vec(piece(ranks, kinds), 0..40).prop_map(move |pieces| build(ranks, &pieces)))
}

fn build(num_ranks: u32, pieces: &[Piece]) -> MessageProgram {
    let mut builder = MessageProgramBuilder::new(num_ranks).unwrap();
    for rank in 0..num_ranks {
        builder.begin_rank().unwrap();
        for piece in pieces {
            let lanes = Lanes { cpu: piece.lanes.0, nic: piece.lanes.1 };
            if piece.is_calc {
                if piece.from == rank {
                    add(&mut builder, MessageOp::Calc { ticks: piece.ticks }, lanes, piece);
                }
                continue;
            }
            if piece.from == rank {
                let send = MessageOp::Send { bytes: piece.bytes, peer: Rank(piece.to), tag: piece.tag };
                let op = add(&mut builder, send, lanes, piece);
                if piece.rendezvous {
                    builder.set_rendezvous(op).unwrap();
                }
            }
            if piece.to == rank {
                let (peer, tag) = ((!piece.any.0).then_some(Rank(piece.from)), (!piece.any.1).then_some(piece.tag));
                add(&mut builder, MessageOp::Recv { bytes: piece.bytes, peer, tag }, lanes, piece);
            }
        }
    }
    builder.finish().unwrap()
}

fn add(builder: &mut MessageProgramBuilder, op: MessageOp, lanes: Lanes, piece: &Piece) -> OpIndex {
    let op = builder.op(op, lanes).unwrap();
    for &(back, is_start) in &piece.after {
        if let Some(before) = op.0.checked_sub(back).map(OpIndex) {
            if is_start { builder.irequires(op, before) } else { builder.requires(op, before) }.unwrap();
        }
    }
    op
}
