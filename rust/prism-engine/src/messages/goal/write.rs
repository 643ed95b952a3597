//! Program to GOAL text.

use super::RENDEZVOUS;
use crate::ids::Rank;
use crate::messages::{Dependency, Lanes, MessageOp, MessageProgram, OpIndex, RankProgram};
use std::io::{Result, Write};

/// Writes a program as text that LogGOPSim and [`read`](super::read) read: labels `l1`, `l2`, ... in order of definition,
/// dependencies as soon as both labels are defined. Memory: the dependencies of one rank. Fails as `out` fails.
pub fn write(program: &MessageProgram, out: &mut impl Write) -> Result<()> {
    writeln!(out, "num_ranks {}", program.num_ranks())?;
    let mut line = Vec::new();
    for rank in 0..program.num_ranks() {
        writeln!(out, "\nrank {rank} {{")?;
        write_rank(&program.rank(Rank(rank)), &mut line, out)?;
        writeln!(out, "}}")?;
    }
    out.flush()
}

fn write_rank(rank: &RankProgram<'_>, line: &mut Vec<u8>, out: &mut impl Write) -> Result<()> {
    // By the later op of the two: where the line goes.
    let mut dependencies: Vec<(u32, u32, u32, Dependency)> = Vec::new();
    for before in (0..rank.len()).map(OpIndex) {
        let lines = rank.successors(before).map(|(op, kind)| (op.max(before).0, op.0, before.0, kind));
        dependencies.extend(lines);
    }
    dependencies.sort_unstable();
    let mut next = dependencies.iter().peekable();
    for op in (0..rank.len()).map(OpIndex) {
        line.clear();
        write_op(rank, op, line)?;
        while let Some((_, to, from, kind)) = next.next_if(|(at, ..)| *at == op.0) {
            let verb = if *kind == Dependency::End { "requires" } else { "irequires" };
            writeln!(line, "l{} {verb} l{}", to + 1, from + 1)?;
        }
        out.write_all(line)?;
    }
    Ok(())
}

fn write_op(rank: &RankProgram<'_>, op: OpIndex, line: &mut Vec<u8>) -> Result<()> {
    if rank.is_rendezvous(op) {
        line.extend_from_slice(RENDEZVOUS);
        line.push(b'\n');
    }
    write!(line, "l{}: ", op.0 + 1)?;
    let Lanes { cpu, nic } = rank.lanes(op);
    match rank.op(op) {
        MessageOp::Calc { ticks } => write!(line, "calc {ticks}")?,
        MessageOp::Send { bytes, peer, tag } => write!(line, "send {bytes}b to {peer} tag {tag}")?,
        MessageOp::Recv { bytes, peer, tag } => {
            // -1: any.
            let (peer, tag) = (peer.map_or(-1, |peer| i64::from(peer.0)), tag.map_or(-1, i64::from));
            write!(line, "recv {bytes}b from {peer} tag {tag}")?;
        }
    }
    if cpu != 0 {
        write!(line, " cpu {cpu}")?;
    }
    if nic != 0 {
        write!(line, " nic {nic}")?;
    }
    line.push(b'\n');
    Ok(())
}
