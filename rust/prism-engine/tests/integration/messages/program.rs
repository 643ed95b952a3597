//! Building and reading programs, and what the builder refuses.

use prism_engine::ids::Rank;
use prism_engine::messages::{Dependency, Lanes, MessageError, MessageOp, MessageProgramBuilder, OpIndex};

const LANES: Lanes = Lanes { cpu: 0, nic: 0 };

fn one_rank() -> MessageProgramBuilder {
    let mut builder = MessageProgramBuilder::new(1).unwrap();
    builder.begin_rank().unwrap();
    builder
}

fn text<T: std::fmt::Debug>(result: Result<T, MessageError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn fields_and_dependencies_are_read_as_built() {
    let mut builder = MessageProgramBuilder::new(2).unwrap();
    assert_eq!(builder.begin_rank().unwrap(), Rank(0));
    let lanes = Lanes { cpu: 3, nic: 1 };
    let first = builder.calc(u64::from(u32::MAX) + 7, lanes).unwrap();
    let mut last = first;
    for _ in 0..20 {
        last = builder.send(5, Rank(1), 9, LANES).unwrap();
        builder.requires(last, OpIndex(last.0 - 1)).unwrap();
    }
    builder.set_rendezvous(last).unwrap();
    builder.requires(last, first).unwrap();
    builder.requires(last, first).unwrap();
    builder.irequires(OpIndex(1), first).unwrap();
    builder.begin_rank().unwrap();
    builder.recv(5, None, None, LANES).unwrap();
    builder.recv(5, Some(Rank(0)), Some(9), LANES).unwrap();
    let program = builder.finish().unwrap();
    let rank = program.rank(Rank(0));
    assert_eq!((program.num_ranks(), program.num_ops(), rank.len()), (2, 23, 21));
    assert_eq!((program.num_cpus(), program.num_nics(), program.sent_bytes()), (4, 1, 100));
    assert_eq!(rank.op(first), MessageOp::Calc { ticks: u64::from(u32::MAX) + 7 });
    assert_eq!(rank.lanes(first), Lanes { cpu: 3, nic: 0 }, "a calculation takes no NIC");
    assert!(rank.is_rendezvous(last) && !rank.is_rendezvous(OpIndex(1)));
    let of_first: Vec<_> = rank.successors(first).collect();
    let expected = [(OpIndex(1), Dependency::End), (OpIndex(20), Dependency::End), (OpIndex(1), Dependency::Start)];
    assert_eq!(of_first, expected);
    let receives: Vec<_> = program.rank(Rank(1)).ops().collect();
    assert_eq!(receives[0], MessageOp::Recv { bytes: 5, peer: None, tag: None });
    assert_eq!(receives[1], MessageOp::Recv { bytes: 5, peer: Some(Rank(0)), tag: Some(9) });
}

#[test]
fn a_cycle_is_named_op_by_op() {
    let mut builder = one_rank();
    let ops: Vec<_> = (0..5).map(|_| builder.calc(1, LANES).unwrap()).collect();
    for (op, before) in [(1, 0), (2, 1), (3, 2), (1, 3), (4, 3)] {
        builder.requires(ops[op], ops[before]).unwrap();
    }
    assert_eq!(
        text(builder.finish()),
        "invalid message program (rank 0, op 1): cyclic dependency: op 1, op 3, op 2 (each on the next)"
    );
    let mut builder = one_rank();
    let op = builder.calc(1, LANES).unwrap();
    builder.irequires(op, op).unwrap();
    assert!(text(builder.finish()).contains("cyclic dependency: op 0 "));
}

#[test]
fn forward_dependencies_without_a_cycle_are_fine() {
    let mut builder = one_rank();
    let ops: Vec<_> = (0..3).map(|_| builder.calc(1, LANES).unwrap()).collect();
    builder.requires(ops[0], ops[2]).unwrap();
    builder.requires(ops[1], ops[0]).unwrap();
    let program = builder.finish().unwrap();
    assert_eq!(program.rank(Rank(0)).successors(ops[2]).collect::<Vec<_>>(), [(ops[0], Dependency::End)]);
}

#[test]
fn what_cannot_be_is_refused_with_rank_and_op() {
    assert!(text(MessageProgramBuilder::new(0).map(|_| ())).contains("zero ranks"));
    let mut builder = one_rank();
    builder.calc(1, LANES).unwrap();
    let outside = text(builder.send(1, Rank(1), 0, LANES));
    assert_eq!(outside, "invalid message program (rank 0, op 1): send: rank 1 is outside the job of 1 ranks");
    assert!(text(builder.recv(1, Some(Rank(9)), None, LANES)).contains("rank 0, op 1"));
    assert!(text(builder.requires(OpIndex(0), OpIndex(1))).contains("(rank 0, op 1)"));
    assert!(text(builder.calc((1 << 63) - 1, LANES)).contains("(rank 0, op 1): calc 9223372036854775807"));
    builder.send(1 << 62, Rank(0), 0, LANES).unwrap();
    assert!(text(builder.send(1 << 62, Rank(0), 0, LANES)).contains("(rank 0, op 2)"));
    assert!(text(builder.send(1, Rank(0), u32::MAX, LANES)).contains("tag"));
    assert!(text(builder.set_rendezvous(OpIndex(0))).contains("(rank 0, op 0)"));
    assert!(text(builder.begin_rank().map(|_| ())).contains("rank 1"));
    let mut short = MessageProgramBuilder::new(3).unwrap();
    short.begin_rank().unwrap();
    assert_eq!(text(short.finish()), "invalid message program (rank 1): the job has 3 ranks, and this one is missing");
}
