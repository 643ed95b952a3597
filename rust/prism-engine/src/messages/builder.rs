//! Building a message program, rank after rank.

use super::MessageError;
use super::program::{
    ANY, Dependency, Lanes, MAX_OPS, MessageOp, MessageProgram, NEAR, OpIndex, OpWords, Totals, WORDS, encode_far,
    flag, kind,
};
use crate::ids::Rank;
use rustc_hash::FxHashMap;

/// Sums of ticks on a rank and of bytes in the job stay below this.
pub(super) const LIMIT: u64 = 1 << 63;

/// Appends ops rank by rank, then [`finish`](Self::finish)es.
///
/// ```
/// use prism_engine::ids::Rank;
/// use prism_engine::messages::{Lanes, MessageOp, MessageProgramBuilder, OpIndex};
///
/// let mut builder = MessageProgramBuilder::new(2)?;
/// builder.begin_rank()?;
/// let calc = builder.calc(1_000, Lanes::default())?;
/// let send = builder.send(4096, Rank(1), 7, Lanes::default())?;
/// builder.requires(send, calc)?;
/// builder.begin_rank()?;
/// builder.recv(4096, Some(Rank(0)), Some(7), Lanes::default())?;
/// let program = builder.finish()?;
/// assert_eq!(program.rank(Rank(0)).op(OpIndex(0)), MessageOp::Calc { ticks: 1_000 });
/// # Ok::<(), prism_engine::messages::MessageError>(())
/// ```
pub struct MessageProgramBuilder {
    num_ranks: u32,
    ops: Vec<u32>,
    wide: Vec<u64>,
    wide_index: FxHashMap<u64, u32>,
    rank_start: Vec<u64>,
    far_start: Vec<u64>,
    far_from: Vec<u32>,
    far_to: Vec<u32>,
    totals: Totals,
    /// Of the rank being built: its far dependencies, its ticks, and whether an op depends on a later one.
    far: Vec<(u32, u32)>,
    ticks: u64,
    looks_ahead: bool,
}

impl MessageProgramBuilder {
    /// A job of `num_ranks` ranks; allocates nothing per rank until it comes. Fails for zero ranks.
    pub fn new(num_ranks: u32) -> Result<Self, MessageError> {
        if num_ranks == 0 {
            return Err(MessageError::invalid(None, None, "a job of zero ranks"));
        }
        let totals = Totals { cpus: 1, nics: 1, ..Totals::default() };
        Ok(Self {
            num_ranks,
            ops: Vec::new(),
            wide: Vec::new(),
            wide_index: FxHashMap::default(),
            rank_start: Vec::new(),
            far_start: Vec::new(),
            far_from: Vec::new(),
            far_to: Vec::new(),
            totals,
            far: Vec::new(),
            ticks: 0,
            looks_ahead: false,
        })
    }

    /// Begins the next rank, from 0, and returns it. Fails when all ranks have come, or when the dependencies of the rank
    /// before are cyclic.
    pub fn begin_rank(&mut self) -> Result<Rank, MessageError> {
        self.end_rank()?;
        let rank = self.rank_start.len() as u32;
        if rank == self.num_ranks {
            let text = format!("a rank more than the {} of the job", self.num_ranks);
            return Err(MessageError::invalid(rank, None, text));
        }
        self.rank_start.push(self.num_ops());
        self.far_start.push(self.far_from.len() as u64);
        (self.ticks, self.looks_ahead) = (0, false);
        Ok(Rank(rank))
    }

    /// The rank being built and its number of ops so far; `None` before the first [`begin_rank`](Self::begin_rank).
    pub fn current(&self) -> Option<(Rank, u32)> {
        let start = self.rank_start.last()?;
        Some((Rank(self.rank_start.len() as u32 - 1), (self.num_ops() - start) as u32))
    }

    /// Adds a calculation, which takes no NIC lane. Fails when the rank's calculations pass 2^63 ticks.
    pub fn calc(&mut self, ticks: u64, lanes: Lanes) -> Result<OpIndex, MessageError> {
        self.ticks = match self.ticks.checked_add(ticks) {
            Some(sum) if sum < LIMIT => sum,
            _ => return Err(self.here(format!("calc {ticks}: the rank's calculations pass 2^63 ticks"))),
        };
        self.push(kind::CALC, ticks, 0, 0, Lanes { nic: 0, ..lanes })
    }

    /// Adds a send. Fails for a peer outside the job, for the reserved tag 2^32 - 1, and when all sends pass 2^63 bytes.
    pub fn send(&mut self, bytes: u64, peer: Rank, tag: u32, lanes: Lanes) -> Result<OpIndex, MessageError> {
        self.check_peer("send", peer)?;
        if tag == ANY {
            return Err(self.here("a send needs a tag; only a receive may take any (-1)".into()));
        }
        self.totals.bytes = match self.totals.bytes.checked_add(bytes) {
            Some(sum) if sum < LIMIT => sum,
            _ => return Err(self.here(format!("send of {bytes} bytes: the job's messages pass 2^63 bytes"))),
        };
        self.totals.sends += 1;
        self.push(kind::SEND, bytes, peer.0, tag, lanes)
    }

    /// Adds a receive; `None` as the peer or tag takes any. Fails for a peer outside the job.
    pub fn recv(
        &mut self,
        bytes: u64,
        peer: Option<Rank>,
        tag: Option<u32>,
        lanes: Lanes,
    ) -> Result<OpIndex, MessageError> {
        if let Some(peer) = peer {
            self.check_peer("receive", peer)?;
        }
        if bytes >= LIMIT {
            return Err(self.here(format!("receive of {bytes} bytes: more than 2^63")));
        }
        if tag == Some(ANY) {
            return Err(self.here("tag 4294967295 is reserved for any tag".into()));
        }
        self.totals.recvs += 1;
        self.totals.wildcards |= peer.is_none() || tag.is_none();
        self.push(kind::RECV, bytes, peer.map_or(ANY, |peer| peer.0), tag.unwrap_or(ANY), lanes)
    }

    /// Adds an op of any kind.
    pub fn op(&mut self, op: MessageOp, lanes: Lanes) -> Result<OpIndex, MessageError> {
        match op {
            MessageOp::Calc { ticks } => self.calc(ticks, lanes),
            MessageOp::Send { bytes, peer, tag } => self.send(bytes, peer, tag, lanes),
            MessageOp::Recv { bytes, peer, tag } => self.recv(bytes, peer, tag, lanes),
        }
    }

    /// Makes a send of the current rank wait for its receive whatever the size, as NCCL's do: it ends when the receive is
    /// matched. A receive may be marked too, which changes nothing: it waits for its message anyway.
    pub fn set_rendezvous(&mut self, op: OpIndex) -> Result<(), MessageError> {
        let at = self.locate(op)?;
        let mut words = self.words(at);
        if words.kind() == kind::CALC {
            return Err(self.at(op, "only a message can be a rendezvous".into()));
        }
        words.flags |= flag::RENDEZVOUS;
        self.store(at, words);
        Ok(())
    }

    /// `op` starts after the end of `before`; both of the current rank, in either order. Said twice it counts once.
    #[inline]
    pub fn requires(&mut self, op: OpIndex, before: OpIndex) -> Result<(), MessageError> {
        let (to, from) = (self.locate(op)?, self.locate(before)?);
        // Wraps for a dependency on a later op, which is far by that.
        let ahead = (to as u64).wrapping_sub(from as u64 + 1);
        if ahead < u64::from(NEAR) {
            let (meta, bit) = (&mut self.ops[WORDS * from + 3], 1 << (24 + ahead));
            if *meta & bit == 0 {
                *meta |= bit;
                self.count(to);
            }
            return Ok(());
        }
        self.add_far(op, before, Dependency::End);
        Ok(())
    }

    /// `op` starts after the start of `before`; both of the current rank, in either order. Said twice it counts once.
    pub fn irequires(&mut self, op: OpIndex, before: OpIndex) -> Result<(), MessageError> {
        self.locate(op)?;
        self.locate(before)?;
        self.add_far(op, before, Dependency::Start);
        Ok(())
    }

    /// Checks what is left to check and hands the program over. Fails when ranks are missing.
    pub fn finish(mut self) -> Result<MessageProgram, MessageError> {
        self.end_rank()?;
        let (ranks, all) = (self.rank_start.len() as u32, self.num_ranks);
        if ranks != all {
            let text = format!("the job has {all} ranks, and this one is missing");
            return Err(MessageError::invalid(ranks, None, text));
        }
        self.rank_start.push(self.num_ops());
        self.far_start.push(self.far_from.len() as u64);
        Ok(MessageProgram {
            ops: self.ops.into(),
            wide: self.wide.into(),
            rank_start: self.rank_start.into(),
            far_start: self.far_start.into(),
            far_from: self.far_from.into(),
            far_to: self.far_to.into(),
            totals: self.totals,
        })
    }

    fn num_ops(&self) -> u64 {
        (self.ops.len() / WORDS) as u64
    }

    #[inline]
    fn push(&mut self, kind: u8, value: u64, peer: u32, tag: u32, lanes: Lanes) -> Result<OpIndex, MessageError> {
        let Some((_, index)) = self.current() else {
            return Err(MessageError::invalid(None, None, "an op before the first rank"));
        };
        if index >= MAX_OPS - 1 {
            return Err(self.here("more ops than a rank may have (2^31)".into()));
        }
        let (value, flags) = match u32::try_from(value) {
            Ok(value) => (value, kind),
            Err(_) => (self.wide(value), kind | flag::WIDE),
        };
        self.totals.cpus = self.totals.cpus.max(u16::from(lanes.cpu) + 1);
        self.totals.nics = self.totals.nics.max(u16::from(lanes.nic) + 1);
        self.ops.extend_from_slice(&OpWords { value, peer, tag, lanes, flags, near: 0 }.pack());
        Ok(OpIndex(index))
    }

    /// Index of a value of 2^32 or more.
    fn wide(&mut self, value: u64) -> u32 {
        *self.wide_index.entry(value).or_insert_with(|| {
            self.wide.push(value);
            self.wide.len() as u32 - 1
        })
    }

    #[inline]
    fn locate(&self, op: OpIndex) -> Result<usize, MessageError> {
        match (self.rank_start.last(), self.current()) {
            (Some(start), Some((_, len))) if op.0 < len => Ok(*start as usize + op.0 as usize),
            _ => Err(self.at(op, "a dependency on an op that the rank does not have".into())),
        }
    }

    /// One dependency more for an op.
    #[inline]
    fn count(&mut self, op: usize) {
        let meta = &mut self.ops[WORDS * op + 3];
        let (one, many) = (u32::from(flag::ONE) << 16, u32::from(flag::MANY) << 16);
        *meta = if *meta & (one | many) == 0 { *meta | one } else { *meta & !one | many };
    }

    #[cold]
    fn add_far(&mut self, op: OpIndex, before: OpIndex, dependency: Dependency) {
        self.looks_ahead |= before >= op;
        self.far.push((before.0, encode_far(op.0, dependency)));
    }

    /// Closes the rank being built: its far dependencies go to the table.
    fn end_rank(&mut self) -> Result<(), MessageError> {
        let Some(&start) = self.rank_start.last() else { return Ok(()) };
        self.far.sort_unstable();
        self.far.dedup();
        let far = std::mem::take(&mut self.far);
        for &(from, to) in &far {
            self.ops[WORDS * (start as usize + from as usize) + 3] |= u32::from(flag::FAR) << 16;
            self.count(start as usize + (to & !MAX_OPS) as usize);
            self.far_from.push(from);
            self.far_to.push(to);
        }
        if self.looks_ahead {
            self.check_acyclic(start as usize, &far)?;
        }
        self.far = far;
        self.far.clear();
        Ok(())
    }

    /// An op may depend on a later one, so look for a cycle. O(ops + dependencies) of the rank.
    fn check_acyclic(&self, start: usize, far: &[(u32, u32)]) -> Result<(), MessageError> {
        let len = self.num_ops() as usize - start;
        match find_cycle(len, |op| self.words(start + op as usize).near, far) {
            None => Ok(()),
            Some(cycle) => {
                let names: Vec<_> = cycle.iter().map(|op| format!("op {op}")).collect();
                Err(self.at(OpIndex(cycle[0]), format!("cyclic dependency: {} (each on the next)", names.join(", "))))
            }
        }
    }

    fn words(&self, op: usize) -> OpWords {
        let words = &self.ops[WORDS * op..WORDS * op + WORDS];
        OpWords::unpack([words[0], words[1], words[2], words[3]])
    }

    fn store(&mut self, op: usize, words: OpWords) {
        self.ops[WORDS * op..WORDS * op + WORDS].copy_from_slice(&words.pack());
    }

    fn check_peer(&self, verb: &str, peer: Rank) -> Result<(), MessageError> {
        if peer.0 < self.num_ranks {
            return Ok(());
        }
        Err(self.here(format!("{verb}: rank {peer} is outside the job of {} ranks", self.num_ranks)))
    }

    /// An error at the op about to be added.
    #[cold]
    fn here(&self, message: String) -> MessageError {
        self.at(OpIndex(self.current().map_or(0, |(_, len)| len)), message)
    }

    #[cold]
    fn at(&self, op: OpIndex, message: String) -> MessageError {
        let rank = self.current().map(|(rank, _)| rank.0);
        MessageError::invalid(rank, rank.map(|_| op.0), message)
    }
}

/// Ops of one rank that depend on each other in a circle, each on the next, if there are any. `near` gives an op's mask of
/// near dependents, `far` the other dependencies ascending.
pub(super) fn find_cycle(len: usize, near: impl Fn(u32) -> u8, far: &[(u32, u32)]) -> Option<Vec<u32>> {
    let successors = |op: u32| {
        let mask = near(op);
        let first = far.partition_point(|(from, _)| *from < op);
        let far = far[first..].iter().take_while(move |(from, _)| *from == op).map(|(_, to)| to & !MAX_OPS);
        (0..NEAR).filter(move |d| mask & (1 << d) != 0).map(move |d| op + 1 + d).chain(far)
    };
    let mut waits = vec![0_u32; len];
    for op in 0..len as u32 {
        successors(op).for_each(|to| waits[to as usize] += 1);
    }
    let mut ready: Vec<u32> = (0..len as u32).filter(|op| waits[*op as usize] == 0).collect();
    while let Some(op) = ready.pop() {
        for to in successors(op) {
            waits[to as usize] -= 1;
            if waits[to as usize] == 0 {
                ready.push(to);
            }
        }
    }
    // Every op left waits for one that is left: follow that until an op comes again.
    let mut waits_for = vec![None; len];
    for op in (0..len as u32).rev().filter(|op| waits[*op as usize] > 0) {
        successors(op).for_each(|to| waits_for[to as usize] = Some(op));
    }
    let mut op = (0..len as u32).find(|op| waits[*op as usize] > 0)?;
    let mut seen = vec![false; len];
    while !std::mem::replace(&mut seen[op as usize], true) {
        op = waits_for[op as usize]?;
    }
    let mut cycle = vec![op];
    while let Some(next) = waits_for[*cycle.last()? as usize].filter(|next| *next != op) {
        cycle.push(next);
    }
    Some(cycle)
}
