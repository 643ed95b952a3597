//! The rules of a program, checked on tables that come from a file.

use super::MessageError;
use super::builder::{LIMIT, find_cycle};
use super::program::{ANY, MAX_OPS, MessageProgram, NEAR, OpWords, Totals, WORDS, flag, kind};

/// Checks every rule that the builder keeps, and sums up. O(ops + dependencies); memory: a byte per op of the longest rank.
pub(super) fn check(program: &MessageProgram) -> Result<Totals, MessageError> {
    check_starts(program)?;
    let mut totals = Totals { cpus: 1, nics: 1, ..Totals::default() };
    let mut counts = Vec::new();
    for rank in 0..program.num_ranks() {
        check_rank(program, rank, &mut totals, &mut counts)?;
    }
    if program.wide.iter().any(|value| u32::try_from(*value).is_ok() || *value >= LIMIT) {
        return Err(MessageError::invalid(None, None, "a wide value is not between 2^32 and 2^63"));
    }
    Ok(totals)
}

fn check_starts(program: &MessageProgram) -> Result<(), MessageError> {
    let refuse = |text: &str| Err(MessageError::invalid(None, None, text));
    let ranks = program.rank_start.len();
    if ranks < 2 {
        return refuse("a job of zero ranks");
    }
    if u32::try_from(ranks - 1).is_err() || program.far_start.len() != ranks {
        return refuse("the tables of ranks have different lengths");
    }
    if !program.ops.len().is_multiple_of(WORDS) || program.far_from.len() != program.far_to.len() {
        return refuse("the tables of ops or dependencies are not whole");
    }
    let leads = |starts: &[u64], end: u64| starts[0] == 0 && starts.is_sorted() && starts[starts.len() - 1] == end;
    if !leads(&program.rank_start, program.num_ops()) || !leads(&program.far_start, program.far_from.len() as u64) {
        return refuse("the ranks do not cover the tables in order");
    }
    match program.rank_start.windows(2).position(|pair| pair[1] - pair[0] >= u64::from(MAX_OPS)) {
        Some(rank) => Err(MessageError::invalid(rank as u32, None, "more ops than a rank may have (2^31)")),
        None => Ok(()),
    }
}

fn check_rank(
    program: &MessageProgram,
    rank: u32,
    totals: &mut Totals,
    counts: &mut Vec<u8>,
) -> Result<(), MessageError> {
    let start = program.rank_start[rank as usize] as usize;
    let len = program.rank_start[rank as usize + 1] as usize - start;
    counts.clear();
    counts.resize(len, 0);
    let mut ticks = 0_u64;
    let at = |op: usize, message: &str| Err(MessageError::invalid(rank, op as u32, message));
    for op in 0..len {
        let words = program.words(start + op);
        if let Err(message) = check_op(program, words, totals, &mut ticks) {
            return at(op, message);
        }
        let last = NEAR as usize - words.near.leading_zeros() as usize;
        if op + last >= len && words.near != 0 {
            return at(op, "an op beyond the rank's last depends on it");
        }
        let near = (0..NEAR as usize).filter(|ahead| words.near & (1 << ahead) != 0);
        near.for_each(|ahead| counts[op + 1 + ahead] = 2.min(counts[op + 1 + ahead] + 1));
    }
    check_far(program, rank, start, len, counts)?;
    for (op, count) in counts.iter().enumerate() {
        let words = program.words(start + op);
        let told = [words.is_free(), words.has_one(), words.flags & flag::MANY != 0];
        if !told[usize::from(*count)] || told.iter().filter(|told| **told).count() != 1 {
            return at(op, "its number of dependencies is not what it says");
        }
    }
    Ok(())
}

fn check_op(
    program: &MessageProgram,
    words: OpWords,
    totals: &mut Totals,
    ticks: &mut u64,
) -> Result<(), &'static str> {
    if words.flags & 1 << 7 != 0 {
        return Err("an unknown flag");
    }
    if words.flags & flag::WIDE != 0 && words.value as usize >= program.wide.len() {
        return Err("its value is beyond the table of wide values");
    }
    let value = program.value(words);
    let add = |sum: u64| sum.checked_add(value).filter(|sum| *sum < LIMIT);
    totals.cpus = totals.cpus.max(u16::from(words.lanes.cpu) + 1);
    totals.nics = totals.nics.max(u16::from(words.lanes.nic) + 1);
    match words.kind() {
        kind::CALC => {
            if words.peer != 0 || words.tag != 0 || words.lanes.nic != 0 || words.flags & flag::RENDEZVOUS != 0 {
                return Err("a calculation with what only messages have");
            }
            *ticks = add(*ticks).ok_or("the rank's calculations pass 2^63 ticks")?;
        }
        kind::SEND => {
            if words.peer >= program.num_ranks() {
                return Err("it sends to a rank outside the job");
            }
            if words.tag == ANY {
                return Err("a send needs a tag");
            }
            totals.bytes = add(totals.bytes).ok_or("the job's messages pass 2^63 bytes")?;
            totals.sends += 1;
        }
        kind::RECV => {
            if words.peer >= program.num_ranks() && words.peer != ANY {
                return Err("it receives from a rank outside the job");
            }
            totals.recvs += 1;
            totals.wildcards |= words.peer == ANY || words.tag == ANY;
        }
        _ => return Err("an unknown kind of op"),
    }
    Ok(())
}

/// The far dependencies of a rank; adds them to `counts`.
fn check_far(
    program: &MessageProgram,
    rank: u32,
    start: usize,
    len: usize,
    counts: &mut [u8],
) -> Result<(), MessageError> {
    let range = program.far_start[rank as usize] as usize..program.far_start[rank as usize + 1] as usize;
    let pairs = || program.far_from[range.clone()].iter().copied().zip(program.far_to[range.clone()].iter().copied());
    if !pairs().is_sorted_by(|a, b| a < b) {
        return Err(MessageError::invalid(rank, None, "its dependencies are not in order"));
    }
    let mut looks_ahead = false;
    for (from, to) in pairs() {
        let to = to & !MAX_OPS;
        if from as usize >= len || to as usize >= len {
            return Err(MessageError::invalid(rank, from.max(to), "a dependency on an op that the rank does not have"));
        }
        if program.words(start + from as usize).flags & flag::FAR == 0 {
            return Err(MessageError::invalid(rank, from, "dependencies in the table that the op does not know of"));
        }
        counts[to as usize] = 2.min(counts[to as usize] + 1);
        looks_ahead |= to <= from;
    }
    if looks_ahead {
        let far: Vec<_> = pairs().collect();
        if let Some(cycle) = find_cycle(len, |op| program.words(start + op as usize).near, &far) {
            return Err(MessageError::invalid(rank, cycle[0], "cyclic dependency"));
        }
    }
    Ok(())
}
