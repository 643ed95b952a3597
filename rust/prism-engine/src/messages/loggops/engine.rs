//! The event loop.

use super::crowd::{Crowds, Lanes, WAITED};
use super::error::describe;
use super::matching::{Entry, Waiters};
use super::pending::Pending;
use super::queue::{Event, MAX_EVENTS, MAX_RANKS, MESSAGE, Queue};
use super::{EvaluateError, Evaluation, LogGops, blocked};
use crate::ids::Rank;
use crate::messages::program::{Dependency, OpWords, WORDS, decode_far, flag, kind};
use crate::messages::{MessageProgram, OpIndex};
use rustc_hash::FxHashMap;

/// The clock of one NIC lane, and how long it was busy, by direction.
#[derive(Clone, Copy, Default)]
struct Nic {
    send_free: u64,
    recv_free: u64,
    send_busy: u64,
    recv_busy: u64,
}

/// An op that has become ready.
#[derive(Clone, Copy)]
struct Ready {
    rank: u32,
    kind: u8,
    op: u32,
    /// Latest end of what it depends on.
    time: u64,
}

/// State of an evaluation.
pub(super) struct Engine<'a> {
    program: &'a MessageProgram,
    costs: Costs,
    queue: Queue,
    pending: Pending,
    /// Until when each CPU lane is occupied, rank after rank.
    cpu_free: Vec<u64>,
    nics: Vec<Nic>,
    receives: Waiters,
    messages: Waiters,
    crowds: Crowds,
    /// What the event at hand made ready.
    ready: Vec<Ready>,
    /// Latest end so far of what an op depends on, while it waits for more; empty with one CPU lane, whose clock says it.
    latest: FxHashMap<u32, u64>,
    created: u64,
    events: u64,
    done: u64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(program: &'a MessageProgram, parameters: &LogGops) -> Result<Self, EvaluateError> {
        let costs = Costs::new(parameters)?;
        let ranks = program.num_ranks();
        let refuse = |message: String| Err(EvaluateError::Parameter { message });
        if ranks > MAX_RANKS {
            return refuse(format!("{ranks} ranks: a message program of at most {MAX_RANKS} can be evaluated"));
        }
        if u32::try_from(program.num_ops()).is_err() || program.num_ops() >= MAX_EVENTS {
            return refuse(format!("{} ops: a message program of less than 2^32 can be evaluated", program.num_ops()));
        }
        costs.check_range(program)?;
        Ok(Self {
            program,
            costs,
            queue: Queue::new(),
            pending: Pending::new(program),
            cpu_free: vec![0; ranks as usize * program.num_cpus() as usize],
            nics: vec![Nic::default(); ranks as usize * program.num_nics() as usize],
            receives: Waiters::new(ranks, program.totals.wildcards),
            messages: Waiters::new(ranks, false),
            crowds: Crowds::default(),
            ready: Vec::new(),
            latest: FxHashMap::default(),
            created: 0,
            events: 0,
            done: 0,
        })
    }

    pub(super) fn run(mut self) -> Result<Evaluation, EvaluateError> {
        self.begin();
        let (cpus, nics) = (self.program.num_cpus() as usize, self.program.num_nics() as usize);
        let soon = |queue: &mut Queue, ops: &[u32], cpu_free: &[u64], nic: &[Nic]| {
            queue.pop(|event| {
                prefetch(ops, WORDS * event.op as usize);
                prefetch(ops, WORDS * event.op as usize + 2 * WORDS);
                let host = (event.host & !WAITED) as usize;
                prefetch(cpu_free, host * cpus);
                prefetch(nic, host * nics);
            })
        };
        while let Some(event) = soon(&mut self.queue, &self.program.ops, &self.cpu_free, &self.nics) {
            self.events += 1;
            let words = self.program.words(event.op as usize);
            if event.host & WAITED != 0 {
                self.waited(Event { host: event.host & !WAITED, ..event }, words);
            } else {
                self.attempt(event, words);
            }
            self.flush();
        }
        self.finish()
    }

    /// An event whose time has come. True if it found its lanes free; a receive needs none, it is posted.
    #[inline]
    fn attempt(&mut self, event: Event, words: OpWords) -> bool {
        if event.kind() == kind::RECV {
            self.recv(event, words);
            return true;
        }
        let available = self.available(event.host, event.kind(), words);
        if available > event.time {
            let waiting = self.crowds.join(crowd_of(event, words), event, available);
            if let Some(waiting) = waiting {
                self.queue.push(waiting);
            }
            return false;
        }
        match event.kind() {
            kind::CALC => self.calc(event, words),
            kind::SEND => self.send(event, words),
            _ => self.message(event, words),
        }
        true
    }

    /// The first of a crowd is tried again; if it gets the lanes, the next one waits until they are free.
    fn waited(&mut self, event: Event, words: OpWords) {
        let crowd = crowd_of(event, words);
        if !self.crowds.is_valid(crowd, event) || !self.attempt(event, words) {
            return;
        }
        if let Some(next) = self.crowds.next(crowd) {
            let available = self.available(event.host, event.kind(), self.program.words(next as usize));
            let waiting = self.crowds.follow(crowd, available.max(event.time));
            if let Some(waiting) = waiting {
                self.queue.push(waiting);
            }
        }
    }

    /// When the lanes of an event are free.
    #[inline]
    fn available(&self, host: u32, kind: u8, words: OpWords) -> u64 {
        let (cpu, nic) = self.lanes(host, words);
        match kind {
            kind::CALC => self.cpu_free[cpu],
            kind::SEND => self.cpu_free[cpu].max(self.nics[nic].send_free),
            _ => self.cpu_free[cpu].max(self.nics[nic].recv_free),
        }
    }

    /// Every op that depends on nothing, rank by rank.
    fn begin(&mut self) {
        for rank in 0..self.program.num_ranks() {
            for op in self.ops_of(rank) {
                let words = self.program.words(op as usize);
                if words.is_free() {
                    self.ready.push(Ready { rank, kind: words.kind(), op, time: 0 });
                }
            }
            self.flush();
        }
    }

    fn calc(&mut self, event: Event, words: OpWords) {
        let (cpu, _) = self.lanes(event.host, words);
        let end = event.time + self.program.value(words);
        self.cpu_free[cpu] = end;
        self.start(event.host, event.op, words, event.time);
        self.end(event.host, event.op, words, end);
    }

    fn send(&mut self, event: Event, words: OpWords) {
        let (cpu, nic) = self.lanes(event.host, words);
        let bytes = self.program.value(words);
        let end = event.time + self.costs.send_cpu(bytes);
        self.cpu_free[cpu] = end;
        let busy = self.costs.nic(bytes);
        self.nics[nic].send_free = event.time + busy;
        self.nics[nic].send_busy += busy;
        let order = self.create(MESSAGE, event.host);
        self.queue.push(Event { time: event.time + self.costs.flight, order, op: event.op, host: words.peer });
        self.start(event.host, event.op, words, event.time);
        if !self.costs.is_rendezvous(words, bytes) {
            self.end(event.host, event.op, words, end);
        }
    }

    fn message(&mut self, event: Event, words: OpWords) {
        let (cpu, nic) = self.lanes(event.host, words);
        let bytes = self.program.value(words);
        let end = event.time + self.costs.recv_cpu(bytes);
        self.cpu_free[cpu] = end;
        let busy = self.costs.nic(bytes);
        self.nics[nic].recv_free = event.time + busy;
        self.nics[nic].recv_busy += busy;
        let sender = event.owner();
        match self.receives.take(event.host, sender, words.tag) {
            None => self.messages.push(event.host, Entry { peer: sender, tag: words.tag, op: event.op, end }),
            Some(receive) => {
                if self.costs.is_rendezvous(words, bytes) {
                    self.end_rendezvous(sender, event.op, words, event.time);
                }
                let receive_words = self.program.words(receive.op as usize);
                self.end(event.host, receive.op, receive_words, end);
            }
        }
    }

    fn recv(&mut self, event: Event, words: OpWords) {
        self.start(event.host, event.op, words, event.time);
        match self.messages.take(event.host, words.peer, words.tag) {
            None => {
                let entry = Entry { peer: words.peer, tag: words.tag, op: event.op, end: 0 };
                self.receives.push(event.host, entry);
            }
            Some(message) => {
                let sent = self.program.words(message.op as usize);
                if self.costs.is_rendezvous(sent, self.program.value(sent)) {
                    self.end_rendezvous(message.peer, message.op, sent, event.time);
                }
                self.end(event.host, event.op, words, event.time.max(message.end));
            }
        }
    }

    /// The sender goes on when its message is matched.
    fn end_rendezvous(&mut self, sender: u32, op: u32, words: OpWords, time: u64) {
        let (cpu, nic) = self.lanes(sender, words);
        self.cpu_free[cpu] = self.cpu_free[cpu].max(time);
        self.nics[nic].send_free = self.nics[nic].send_free.max(time);
        self.end(sender, op, words, time);
    }

    /// Lets go what waits for the start of an op.
    #[inline]
    fn start(&mut self, rank: u32, op: u32, words: OpWords, time: u64) {
        if words.flags & flag::FAR != 0 {
            self.release_far(rank, op, Dependency::Start, time);
        }
    }

    /// Lets go what waits for the end of an op.
    #[inline]
    fn end(&mut self, rank: u32, op: u32, words: OpWords, time: u64) {
        self.done += 1;
        let mut near = words.near;
        while near != 0 {
            self.release(rank, op + 1 + near.trailing_zeros(), time);
            near &= near - 1;
        }
        if words.flags & flag::FAR != 0 {
            self.release_far(rank, op, Dependency::End, time);
        }
    }

    fn release_far(&mut self, rank: u32, op: u32, dependency: Dependency, time: u64) {
        let program = self.program;
        let start = program.rank_start[rank as usize] as u32;
        let far = program.far_start[rank as usize] as usize..program.far_start[rank as usize + 1] as usize;
        let from = &program.far_from[far.clone()];
        let first = from.partition_point(|from| *from < op - start);
        for (from, to) in from[first..].iter().zip(&program.far_to[far.start + first..]) {
            if *from != op - start {
                break;
            }
            let (to, of) = decode_far(*to);
            if of == dependency {
                self.release(rank, start + to.0, time);
            }
        }
    }

    /// One dependency less for an op of the rank.
    #[inline]
    fn release(&mut self, rank: u32, op: u32, time: u64) {
        let words = self.program.words(op as usize);
        if words.has_one() {
            self.ready.push(Ready { rank, kind: words.kind(), op, time });
        } else {
            self.release_one_of_many(rank, op, words.kind(), time);
        }
    }

    fn release_one_of_many(&mut self, rank: u32, op: u32, kind: u8, mut time: u64) {
        let is_last = self.pending.decrement(op);
        if self.program.num_cpus() > 1 {
            if !is_last {
                let latest = self.latest.entry(op).or_default();
                *latest = time.max(*latest);
                return;
            }
            time = time.max(self.latest.remove(&op).unwrap_or(0));
        }
        if is_last {
            self.ready.push(Ready { rank, kind, op, time });
        }
    }

    /// Makes events of what has become ready.
    #[inline]
    fn flush(&mut self) {
        if self.ready.len() > 1 {
            self.ready.sort_by_key(|ready| (ready.rank, rank_of_kind(ready.kind)));
        }
        for index in 0..self.ready.len() {
            let Ready { rank, kind, op, time } = self.ready[index];
            let words = self.program.words(op as usize);
            let (cpu, nic) = self.lanes(rank, words);
            let mut time = time.max(self.cpu_free[cpu]);
            if kind == kind::SEND {
                time = time.max(self.nics[nic].send_free);
            }
            let order = self.create(kind, rank);
            self.queue.push(Event { time, order, op, host: rank });
        }
        self.ready.clear();
    }

    #[inline]
    fn create(&mut self, kind: u8, rank: u32) -> u64 {
        self.created += 1;
        Event::pack(self.created, kind, rank)
    }

    /// Indices of a rank's CPU and NIC lane.
    #[inline]
    fn lanes(&self, rank: u32, words: OpWords) -> (usize, usize) {
        let cpu = rank as usize * self.program.num_cpus() as usize + words.lanes.cpu as usize;
        (cpu, rank as usize * self.program.num_nics() as usize + words.lanes.nic as usize)
    }

    fn ops_of(&self, rank: u32) -> std::ops::Range<u32> {
        let start = &self.program.rank_start;
        start[rank as usize] as u32..start[rank as usize + 1] as u32
    }

    fn finish(self) -> Result<Evaluation, EvaluateError> {
        let program = self.program;
        if self.done < program.num_ops() {
            let unfinished = program.num_ops() - self.done;
            return Err(blocked::explain(program, &self.costs, &self.receives, &self.messages, unfinished));
        }
        if let Some(error) = blocked::unreceived(program, &self.messages) {
            return Err(error);
        }
        let cpus = program.num_cpus() as usize;
        let end_ticks: Vec<u64> =
            self.cpu_free.chunks(cpus).map(|lanes| lanes.iter().copied().max().unwrap_or(0)).collect();
        let total_ticks = end_ticks.iter().copied().max().unwrap_or(0);
        let critical_rank = end_ticks.iter().position(|end| *end == total_ticks).unwrap_or(0) as u32;
        let last_byte = self.nics.iter().map(|nic| nic.send_free.max(nic.recv_free)).max().unwrap_or(0);
        let busiest = self.nics.iter().map(|nic| nic.send_busy.max(nic.recv_busy)).max().unwrap_or(0);
        let max_nic_utilisation = busiest as f64 / last_byte.max(total_ticks).max(1) as f64;
        assert!(max_nic_utilisation <= 1.0, "a NIC lane does one message at a time");
        Ok(Evaluation {
            end_ticks,
            total_ticks,
            critical_rank,
            ops: program.num_ops(),
            messages: program.num_sends(),
            bytes: program.sent_bytes(),
            events: self.events,
            max_nic_utilisation,
            tick_ps: self.costs.tick_ps,
        })
    }
}

/// The lanes that an event needs, which it shares with others of its kind.
fn crowd_of(event: Event, words: OpWords) -> Lanes {
    (event.host, event.kind(), words.lanes.cpu, words.lanes.nic)
}

/// Sends before receives before calculations.
fn rank_of_kind(kind: u8) -> u8 {
    if kind == kind::CALC { kind::RECV + 1 } else { kind }
}

/// The parameters as the loop uses them.
pub(super) struct Costs {
    overhead: u64,
    gap: u64,
    /// `o + L`: from the start of a send to its first byte's arrival.
    flight: u64,
    /// In 2^-32 ticks.
    gap_per_byte: u64,
    overhead_per_byte: u64,
    rendezvous_above: u64,
    tick_ps: u64,
}

impl Costs {
    fn new(parameters: &LogGops) -> Result<Self, EvaluateError> {
        let refuse = |message: String| EvaluateError::Parameter { message };
        let small = |name: &str, value: u64| match value {
            0..=0xff_ffff_ffff_ffff => Ok(value),
            _ => Err(refuse(format!("{name} = {value}: below 2^56"))),
        };
        let per_byte = |name: &str, value: f64| match value {
            0.0..4e9 => Ok((value * 2_f64.powi(32)).round() as u64),
            _ => Err(refuse(format!("{name} = {value}: ticks per byte from 0 to 4e9"))),
        };
        if parameters.tick_ps == 0 {
            return Err(refuse("tick_ps = 0: a tick takes time".into()));
        }
        let overhead = small("o", parameters.overhead)?;
        Ok(Self {
            overhead,
            gap: small("g", parameters.gap)?,
            flight: overhead + small("L", parameters.latency)?,
            gap_per_byte: per_byte("G", parameters.gap_per_byte)?,
            overhead_per_byte: per_byte("O", parameters.overhead_per_byte)?,
            rendezvous_above: parameters.rendezvous_above,
            tick_ps: parameters.tick_ps,
        })
    }

    /// Checks that no time can pass 2^63: something is always going on, so the end is at most the sum of everything.
    fn check_range(&self, program: &MessageProgram) -> Result<(), EvaluateError> {
        let (mut sum, mut most, mut most_at) = (0_u128, 0_u128, 0_u64);
        let rest = 2 * u128::from(self.overhead) + 2 * u128::from(self.gap) + u128::from(self.flight);
        let per_byte = 2 * (u128::from(self.gap_per_byte) + u128::from(self.overhead_per_byte));
        for op in 0..program.num_ops() {
            let words = program.words(op as usize);
            let value = program.value(words);
            let cost = match words.kind() {
                kind::CALC => value.into(),
                // A small message costs no more than its bytes at 2^32 and a bit; large ones need the width.
                kind::SEND => rest + ((u128::from(value) * per_byte) >> 32) + 4,
                _ => 0,
            };
            sum = sum.saturating_add(cost);
            if cost > most {
                (most, most_at) = (cost, op);
            }
        }
        let limit = 1 << 63;
        let unit = match (sum < limit, sum.saturating_mul(self.tick_ps.into()) < limit) {
            (true, true) => return Ok(()),
            (false, _) => "ticks",
            _ => "picoseconds",
        };
        let (rank, op) = locate(program, most_at);
        let what = describe(program.rank(Rank(rank)).op(OpIndex(op)));
        Err(EvaluateError::Overflow { unit, rank, op, what })
    }

    /// Does a send end only when it is matched?
    #[inline]
    pub(super) fn is_rendezvous(&self, words: OpWords, bytes: u64) -> bool {
        bytes > self.rendezvous_above || words.flags & flag::RENDEZVOUS != 0
    }

    #[inline]
    fn send_cpu(&self, bytes: u64) -> u64 {
        self.overhead + scale(bytes.saturating_sub(1), self.overhead_per_byte)
    }

    #[inline]
    fn recv_cpu(&self, bytes: u64) -> u64 {
        self.overhead + scale(bytes.saturating_sub(1), self.overhead_per_byte.max(self.gap_per_byte))
    }

    #[inline]
    fn nic(&self, bytes: u64) -> u64 {
        self.gap + scale(bytes.saturating_sub(1), self.gap_per_byte)
    }
}

/// `value` times a number of 2^-32 ticks, in ticks rounded down.
#[inline]
fn scale(value: u64, factor: u64) -> u64 {
    ((u128::from(value) * u128::from(factor)) >> 32) as u64
}

/// Rank, and index in its program, of an op counted over all ranks.
pub(super) fn locate(program: &MessageProgram, op: u64) -> (u32, u32) {
    let rank = program.rank_start.partition_point(|start| *start <= op) - 1;
    (rank as u32, (op - program.rank_start[rank]) as u32)
}

/// Asks for an element that is needed soon. A program of many ranks is read in as many places at once, each a cache line and
/// a page of its own: without this, most of the time goes into waiting for memory.
#[inline]
fn prefetch<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(value) = values.get(index) {
        // SAFETY: a hint about an address inside a live slice; it reads and changes nothing.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(value).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}
