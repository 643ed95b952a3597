//! A job as a message program, for other simulators of messages (GOAL text: [`crate::messages::goal`]).
//!
//! What a message program can say is less than what a job means:
//!
//! * it has sizes but no links: which wire carries a message is lost, the reader's network carries all alike. A job on one
//!   flat network ([`crate::synthetic::flat_profile`]) loses nothing;
//! * a send of a collective ends when the network has taken it, not when its last byte has left;
//! * an all-to-all has no barriers: everybody sends one message after the other as soon as it takes part;
//! * messages between ranks are rendezvous if asked for. Without, a sender does not wait for its receiver;
//! * a copy of a rank to itself is a calculation. Messages of no bytes become 1 byte.
//!
//! Lanes of a rank: CPU lane `s` for what runs on stream `s`, then one for the host, then some for messages. A message
//! occupies the CPU lane of its *sender's* choice on both sides (as in LogGOPSim), so ranks that send to each other have
//! different ones as far as lanes go: nobody's sends wait for what comes in. All messages have NIC lane 0.

use super::{Enter, HOST, Job, Transfer, Work};
use crate::ids::Rank;
use crate::messages::{Lanes, MessageError, MessageProgram, MessageProgramBuilder, OpIndex};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// Most operations a point without duration is left out for; beyond, it becomes a calculation of no length.
const MAX_BEHIND: usize = 4;

/// How to write a job as a message program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoalOptions {
    /// Picoseconds per tick. Durations are rounded to the nearest tick.
    pub tick_ps: u64,
    /// Mark messages between ranks as rendezvous, as NCCL's are.
    pub rendezvous: bool,
}

impl Default for GoalOptions {
    /// GOAL's usual tick of 1 ns, and rendezvous.
    fn default() -> Self {
        Self { tick_ps: 1000, rendezvous: true }
    }
}

/// Writes a job as a message program. Ranks that were not lowered do nothing. Fails where the program's numbers do not reach:
/// more than 200 streams of a rank, or 2^32 lanes of collectives.
pub fn program(job: &Job, options: &GoalOptions) -> Result<MessageProgram, MessageError> {
    let builder = MessageProgramBuilder::new(job.world_size)?;
    let mut writer = Writer::new(job, *options, builder)?;
    let mut marks = job.ranks.iter().zip(&job.marks).peekable();
    let mut first = 0;
    for rank in 0..job.world_size {
        writer.builder.begin_rank()?;
        if let Some((_, marks)) = marks.next_if(|(own, _)| **own == rank) {
            writer.rank(first, marks.last + 1)?;
            first = marks.last + 1;
        }
    }
    writer.builder.finish()
}

/// Operations that something waits for.
type Behind = Vec<OpIndex>;

/// Messages that members of a pattern receive: lane and number in it (0 where a lane has one receiver).
type Received = Vec<Vec<(u32, u64)>>;

struct Writer<'a> {
    job: &'a Job,
    options: GoalOptions,
    builder: MessageProgramBuilder,
    /// Tag of the first lane of each instance, and of the first message between ranks.
    tags: Vec<u32>,
    transfer_tag: u32,
    /// By the node that posts them: messages between ranks, with their nodes.
    transfers: BTreeMap<u32, Vec<(u32, u32)>>,
    received: BTreeMap<u32, Received>,
    host_lane: u8,
    /// Message lane of each rank.
    message_lane: Vec<u8>,
    /// Of the rank being written: its first node, what stands for each node, and what each node waits for besides.
    first: u32,
    behind: Vec<Behind>,
    others: BTreeMap<u32, Behind>,
}

impl<'a> Writer<'a> {
    fn new(job: &'a Job, options: GoalOptions, builder: MessageProgramBuilder) -> Result<Self, MessageError> {
        let mut next = 0u32;
        let mut tags = Vec::with_capacity(job.instances.len());
        for instance in &job.instances {
            tags.push(next);
            let lanes = job.patterns[instance.pattern as usize].lanes.len() as u32;
            next = next.checked_add(lanes).ok_or_else(|| too_much("lanes of collectives"))?;
        }
        let count = u32::try_from(job.transfers.len()).ok().and_then(|count| next.checked_add(count));
        count.filter(|count| *count < u32::MAX).ok_or_else(|| too_much("messages between ranks"))?;
        let mut transfers: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new();
        for (node, work) in job.nodes.work.iter().enumerate() {
            if let Work::Transfer(transfer) = work {
                for post in job.nodes.before(node as u32) {
                    let own = transfers.entry(*post).or_default();
                    // A rank that sends to itself in one launch has both halves in it.
                    if own.last() != Some(&(*transfer, node as u32)) {
                        own.push((*transfer, node as u32));
                    }
                }
            }
        }
        let streams = job.nodes.lane.iter().copied().max().unwrap_or(0);
        let host_lane = u8::try_from(streams).ok().filter(|lane| *lane <= 200).ok_or_else(|| too_much("streams"))?;
        Ok(Self {
            message_lane: message_lanes(job, host_lane + 1),
            job,
            options,
            builder,
            tags,
            transfer_tag: next,
            transfers,
            received: BTreeMap::new(),
            host_lane,
            first: 0,
            behind: Vec::new(),
            others: BTreeMap::new(),
        })
    }

    fn ticks(&self, time: SimTime) -> u64 {
        let tick = self.options.tick_ps.max(1);
        (time.as_ps().unsigned_abs() + tick / 2) / tick
    }

    fn rank(&mut self, first: u32, end: u32) -> Result<(), MessageError> {
        self.first = first;
        self.behind.clear();
        self.others.clear();
        for node in first..end {
            let behind = self.node(node)?;
            self.behind.push(behind);
        }
        Ok(())
    }

    /// Writes a node; returns what those after it wait for.
    fn node(&mut self, node: u32) -> Result<Behind, MessageError> {
        let at = node as usize;
        if matches!(self.job.nodes.work[at], Work::Transfer(_)) {
            // Written with its halves.
            return Ok(Vec::new());
        }
        let mut before: Behind = Vec::new();
        for other in self.job.nodes.before(node) {
            before.extend(&self.behind[(other - self.first) as usize]);
        }
        let others = self.others.remove(&node).unwrap_or_default();
        before.sort_unstable();
        before.dedup();
        let delay = self.job.nodes.delay[at];
        match self.job.nodes.work[at] {
            Work::Transfer(_) | Work::Compute(..) => Ok(vec![self.calc(node, delay, &before)?]),
            Work::Join => {
                before.extend(others);
                let is_late = delay > SimTime::ZERO;
                let behind = if is_late { vec![self.calc(node, delay, &before)?] } else { self.few(node, before)? };
                self.messages(node, &behind)?;
                Ok(behind)
            }
            Work::Begin { enter } => {
                let before = self.few(node, before)?;
                self.collective(node, enter, &before)?;
                Ok(before)
            }
            Work::Enter { enter } => {
                self.collective(node, enter, &others)?;
                Ok(others)
            }
            Work::End => self.few(node, if others.is_empty() { before } else { others }),
        }
    }

    fn few(&mut self, node: u32, before: Behind) -> Result<Behind, MessageError> {
        if before.len() <= MAX_BEHIND { Ok(before) } else { Ok(vec![self.calc(node, SimTime::ZERO, &before)?]) }
    }

    fn calc(&mut self, node: u32, duration: SimTime, before: &[OpIndex]) -> Result<OpIndex, MessageError> {
        let lane = self.job.nodes.lane[node as usize];
        let cpu = if lane == HOST { self.host_lane } else { (lane - 1) as u8 };
        let op = self.builder.calc(self.ticks(duration), Lanes { cpu, nic: 0 })?;
        before.iter().try_for_each(|before| self.builder.requires(op, *before))?;
        Ok(op)
    }

    /// Messages between ranks that are posted by a node, after `before`.
    fn messages(&mut self, post: u32, before: &[OpIndex]) -> Result<(), MessageError> {
        let rank = self.job.nodes.rank[post as usize];
        for (number, node) in self.transfers.remove(&post).unwrap_or_default() {
            let Transfer { message, ranks, ends } = self.job.transfers[number as usize];
            let delay = self.job.nodes.delay[node as usize];
            if ranks.0 == ranks.1 {
                if self.job.nodes.before(node).iter().any(|half| *half != post) {
                    let text = "the rank sends to itself, but sends and receives in two launches: a message program cannot say that";
                    return Err(MessageError::invalid(rank, None, text));
                }
                let op = self.calc(post, delay, before)?;
                self.others.entry(ends.0).or_default().push(op);
                continue;
            }
            let tag = self.transfer_tag + number;
            let is_send = ranks.0 == rank;
            let op = self.half((ranks, is_send), message.bytes, tag)?;
            if self.options.rendezvous {
                self.builder.set_rendezvous(op)?;
            }
            before.iter().try_for_each(|before| self.builder.requires(op, *before))?;
            self.others.entry(if is_send { ends.0 } else { ends.1 }).or_default().push(op);
        }
        Ok(())
    }

    fn half(&mut self, (ranks, is_send): ((u32, u32), bool), bytes: u64, tag: u32) -> Result<OpIndex, MessageError> {
        let lanes = Lanes { cpu: self.message_lane[ranks.0 as usize], nic: 0 };
        if is_send {
            self.builder.send(bytes.max(1), Rank(ranks.1), tag, lanes)
        } else {
            self.builder.recv(bytes.max(1), Some(Rank(ranks.0)), Some(tag), lanes)
        }
    }

    /// A member's part of a collective that it enters after `before`.
    fn collective(&mut self, node: u32, enter: u32, before: &[OpIndex]) -> Result<(), MessageError> {
        let Some(&Enter { instance, member, launch }) = self.job.enters.get(enter as usize) else { return Ok(()) };
        let pattern = self.job.pattern(instance);
        let start = if launch > SimTime::ZERO { vec![self.calc(node, launch, before)?] } else { before.to_vec() };
        let ends = if pattern.is_listed() {
            self.pairs(instance, member, &start)?
        } else {
            self.lanes(instance, member, &start)?
        };
        let exit = self.job.exit(instance, member);
        self.others.entry(exit).or_default().extend(if ends.is_empty() { start } else { ends });
        Ok(())
    }

    fn received(&mut self, instance: u32) -> &Received {
        let number = self.job.instances[instance as usize].pattern;
        let pattern = self.job.pattern(instance);
        self.received.entry(number).or_insert_with(|| {
            let mut received = vec![Vec::new(); pattern.size as usize];
            for lane in 0..pattern.lanes.len() as u32 {
                for message in 0..if pattern.is_listed() { pattern.lanes[lane as usize].count } else { 1 } {
                    received[pattern.message(lane, message).1 as usize].push((lane, message));
                }
            }
            received
        })
    }

    /// Lanes of equal messages, one number after the other. Returns the last op of each lane.
    fn lanes(&mut self, instance: u32, member: u32, start: &[OpIndex]) -> Result<Behind, MessageError> {
        let (pattern, comm) = (self.job.pattern(instance), self.job.comm(instance));
        let tag = self.tags[instance as usize];
        let incoming: Vec<u32> = self.received(instance)[member as usize].iter().map(|(lane, _)| *lane).collect();
        let outgoing = pattern.lanes_of(member);
        let rank = |member: u32| comm.members[member as usize];
        // Receives of the latest `lag + 1` numbers, by lane.
        let depth = pattern.lag as usize + 1;
        let mut receives: BTreeMap<u32, Vec<Option<OpIndex>>> =
            incoming.iter().map(|lane| (*lane, vec![None; depth])).collect();
        let mut sends: Vec<Option<OpIndex>> = vec![None; outgoing.len()];
        for number in 0..pattern.per_lane {
            let is_on = |lane: u32| number < pattern.lanes[lane as usize].count;
            for lane in incoming.iter().filter(|lane| is_on(**lane)) {
                let (from, to, message) = pattern.message(*lane, number);
                let op = self.half(((rank(from), rank(to)), false), message.bytes, tag + lane)?;
                let own = receives.get_mut(lane).expect("a lane that comes in");
                match own[(number as usize + depth - 1) % depth] {
                    Some(before) if number > 0 => self.builder.requires(op, before)?,
                    _ => start.iter().try_for_each(|before| self.builder.requires(op, *before))?,
                }
                own[number as usize % depth] = Some(op);
            }
            for (lane, sent) in outgoing.iter().zip(&mut sends).filter(|(lane, _)| is_on(**lane)) {
                let (from, to, message) = pattern.message(*lane, number);
                let op = self.half(((rank(from), rank(to)), true), message.bytes, tag + lane)?;
                match *sent {
                    Some(before) => self.builder.requires(op, before)?,
                    None => start.iter().try_for_each(|before| self.builder.requires(op, *before))?,
                }
                *sent = Some(op);
                if number >= pattern.lag {
                    for feeder in pattern.feeders(*lane) {
                        let fed = receives[feeder][(number - pattern.lag) as usize % depth];
                        self.builder.requires(op, fed.expect("received before"))?;
                    }
                }
            }
        }
        let last = |lane: u32| pattern.lanes[lane as usize].count as usize + depth - 1;
        let received = receives.iter().filter_map(|(lane, own)| own[last(*lane) % depth]);
        Ok(received.chain(sends.iter().copied().flatten()).collect())
    }

    /// Messages between pairs: sends one after the other, and receives one after the other. Returns the last of each.
    fn pairs(&mut self, instance: u32, member: u32, start: &[OpIndex]) -> Result<Behind, MessageError> {
        let (pattern, comm) = (self.job.pattern(instance), self.job.comm(instance));
        let tag = self.tags[instance as usize];
        let rank = |member: u32| comm.members[member as usize];
        let received = self.received(instance)[member as usize].clone();
        let own = pattern.lanes_of(member).iter();
        let sent = own.flat_map(|lane| (0..pattern.lanes[*lane as usize].count).map(move |number| (*lane, number)));
        let sent: Vec<_> = sent.filter(|(lane, number)| pattern.message(*lane, *number).0 == member).collect();
        let mut ends = Vec::new();
        for (is_send, messages) in [(false, received), (true, sent)] {
            let mut last = None;
            for (lane, number) in messages {
                let (from, to, message) = pattern.message(lane, number);
                let op = self.half(((rank(from), rank(to)), is_send), message.bytes, tag + lane)?;
                match last {
                    Some(before) => self.builder.requires(op, before)?,
                    None => start.iter().try_for_each(|before| self.builder.requires(op, *before))?,
                }
                last = Some(op);
            }
            ends.extend(last);
        }
        Ok(ends)
    }
}

/// A message lane for every rank, from `first` on: different for ranks between which messages go, as far as there are lanes.
fn message_lanes(job: &Job, first: u8) -> Vec<u8> {
    let mut peers: Vec<Vec<u32>> = vec![Vec::new(); job.world_size as usize];
    let mut connect = |from: u32, to: u32| {
        peers[from as usize].push(to);
        peers[to as usize].push(from);
    };
    let mut known = std::collections::BTreeSet::new();
    for (number, instance) in job.instances.iter().enumerate() {
        if !known.insert((instance.comm, instance.pattern)) {
            continue;
        }
        let (pattern, comm) = (job.pattern(number as u32), job.comm(number as u32));
        for (from, to, _) in pattern.routes() {
            connect(comm.members[from as usize], comm.members[to as usize]);
        }
    }
    job.transfers.iter().for_each(|transfer| connect(transfer.ranks.0, transfer.ranks.1));
    let mut lanes: Vec<Option<u8>> = vec![None; job.world_size as usize];
    for rank in 0..job.world_size as usize {
        peers[rank].sort_unstable();
        peers[rank].dedup();
        let mut taken = [false; 256];
        peers[rank].iter().filter_map(|peer| lanes[*peer as usize]).for_each(|lane| taken[usize::from(lane)] = true);
        let free = (first..=u8::MAX).find(|lane| !taken[usize::from(*lane)]);
        lanes[rank] = Some(free.unwrap_or(first));
    }
    lanes.into_iter().flatten().collect()
}

fn too_much(what: &str) -> MessageError {
    MessageError::invalid(None, None, format!("a message program cannot tell so many {what} apart"))
}
