//! Jobs of explicit programs with fixed costs: what matches, when everybody ends, who is stuck.
//!
//! All communication compiles to posting and waiting at *meetings*:
//!
//! - the `k`-th collective that a rank calls on a communicator meets the `k`-th of every other member (messages are not
//!   counted); it ends for all at the last post plus its cost;
//! - the `k`-th message of an ordered pair of members meets its other half. Rendezvous: both halves end at the later post plus
//!   the cost. Eager: the sender goes on at once, the receiver ends at the send plus the cost or at its own post;
//! - a group posts all its calls at the same time and ends with the last of them; calls of one group do not hold each other.
//!
//! There are no wildcards and no program depends on times, so the result does not depend on the order of evaluation, and
//! one evaluation decides all of them. Calls whose members disagree complete all the same, and are told.

use super::waits::{self, Explanation};
use std::collections::BTreeMap;

/// An explicit job. Ranks are indices into `programs`.
#[derive(Clone, Debug)]
pub struct Job {
    /// Communicators by ascending name: members in group-rank order, distinct, each with a program.
    pub comms: Vec<(String, Vec<u32>)>,
    /// What every rank does. Sums of costs stay below 2^60.
    pub programs: Vec<Vec<Op>>,
    /// Cost of messages.
    pub p2p: P2pCost,
}

/// One step of a program.
#[derive(Clone, Debug)]
pub enum Op {
    /// The rank is busy for so long.
    Compute(i64),
    /// One call, or the calls of a group.
    Calls(Vec<Call>),
}

/// One call on a communicator of which the rank is a member.
#[derive(Clone, Debug)]
pub enum Call {
    /// All members call it.
    Collective(Collective),
    /// The sending half of a message.
    Send {
        /// Index of the communicator.
        comm: usize,
        /// Group rank of the receiver.
        peer: u32,
        /// Size.
        bytes: i64,
    },
    /// The receiving half.
    Recv {
        /// Index of the communicator.
        comm: usize,
        /// Group rank of the sender.
        peer: u32,
        /// Size.
        bytes: i64,
    },
}

/// A collective as a rank calls it.
#[derive(Clone, Debug)]
pub struct Collective {
    /// Index of the communicator.
    pub comm: usize,
    /// Time from the last arrival to everybody's end. Where members disagree, that of the lowest group rank counts.
    pub cost: i64,
    /// What must be equal on all members: kind, count, type, reduction and root, as text.
    pub signature: String,
}

/// Time a message takes: `base + bytes / divisor` (rounded down; without a divisor, `base`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pCost {
    /// For every message.
    pub base: i64,
    /// Bytes per unit of time.
    pub divisor: Option<i64>,
    /// Does the sender go on at once?
    pub is_eager: bool,
}

impl P2pCost {
    /// Cost of a message of so many bytes.
    #[must_use]
    pub fn of(&self, bytes: i64) -> i64 {
        self.base + self.divisor.map_or(0, |divisor| bytes / divisor)
    }
}

/// What identifies a meeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A collective.
    Collective {
        /// Index of the communicator.
        comm: usize,
        /// Collectives of the communicator before it.
        number: u64,
    },
    /// A message.
    Message {
        /// Index of the communicator.
        comm: usize,
        /// Group rank of the sender.
        source: u32,
        /// Group rank of the receiver.
        destination: u32,
        /// Messages of this ordered pair before it.
        number: u64,
    },
}

/// A call whose members disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Which.
    pub key: Key,
    /// What most members called (of equally frequent ones, the lowest member's).
    pub majority: String,
    /// Who called something else, ascending, with what.
    pub minority: Vec<(u32, String)>,
}

/// How a job went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// End of the last op each rank completed; 0 without one.
    pub finish: Vec<i64>,
    /// Ranks that did not complete their programs, ascending.
    pub stuck: Vec<u32>,
    /// Meetings whose members disagree, ascending.
    pub mismatches: Vec<Mismatch>,
    /// Why ranks are stuck.
    pub explanation: Explanation,
}

/// What a member brought to a meeting.
#[derive(Clone, Debug)]
pub(super) struct Post {
    pub(super) actor: u32,
    time: i64,
    cost: i64,
    signature: String,
}

/// Posts by member: group ranks of a communicator, or sender and receiver.
#[derive(Clone, Debug, Default)]
pub(super) struct Meeting {
    pub(super) posts: BTreeMap<u32, Post>,
    /// Who waits for it.
    pub(super) waiting: Vec<u32>,
}

/// Group ranks of the two halves in [`Meeting::posts`].
const SENDER: u32 = 0;
const RECEIVER: u32 = 1;

pub(super) struct Actor {
    /// Index of the op that is under way or next.
    pub(super) at: usize,
    time: i64,
    counts: BTreeMap<(Key, bool), u64>,
    /// The meetings of the op under way.
    pub(super) open: Vec<(Key, bool)>,
}

pub(super) struct State<'a> {
    pub(super) job: &'a Job,
    pub(super) actors: Vec<Actor>,
    pub(super) meetings: BTreeMap<Key, Meeting>,
    /// By communicator and rank.
    group_ranks: BTreeMap<(usize, u32), u32>,
}

impl Job {
    /// Evaluates the job. O(calls x log).
    ///
    /// # Panics
    /// If a rank calls a communicator of which it is no member, or names a peer that does not exist.
    #[must_use]
    pub fn evaluate(&self) -> Outcome {
        let new = || Actor { at: 0, time: 0, counts: BTreeMap::new(), open: Vec::new() };
        let actors: Vec<_> = self.programs.iter().map(|_| new()).collect();
        let memberships = self.comms.iter().enumerate().flat_map(|(comm, (_, members))| {
            (0..).zip(members).map(move |(group_rank, rank)| ((comm, *rank), group_rank))
        });
        let group_ranks = memberships.collect();
        let mut state = State { job: self, actors, meetings: BTreeMap::new(), group_ranks };
        let mut ready: Vec<u32> = (0..self.programs.len() as u32).rev().collect();
        while let Some(actor) = ready.pop() {
            state.run(actor, &mut ready);
        }
        let is_stuck = |actor: &u32| state.actors[*actor as usize].at < self.programs[*actor as usize].len();
        Outcome {
            finish: state.actors.iter().map(|actor| actor.time).collect(),
            stuck: (0..self.programs.len() as u32).filter(is_stuck).collect(),
            mismatches: state.meetings.iter().filter_map(|(key, meeting)| mismatch(*key, meeting)).collect(),
            explanation: waits::explain(&state),
        }
    }

    /// The global rank of a member.
    pub(super) fn member(&self, comm: usize, group_rank: u32) -> u32 {
        self.comms[comm].1[group_rank as usize]
    }

    /// How a key is written in tables of vectors: as a tuple of Python.
    #[must_use]
    pub fn key_text(&self, key: Key) -> String {
        match key {
            Key::Collective { comm, number } => format!("('C', {}, {number})", python_text(&self.comms[comm].0)),
            Key::Message { comm, source, destination, number } => {
                format!("('P', {}, {source}, {destination}, {number})", python_text(&self.comms[comm].0))
            }
        }
    }
}

/// A text as Python writes it.
fn python_text(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

impl State<'_> {
    /// Runs a rank until it has to wait, and wakes those it no longer keeps waiting.
    fn run(&mut self, actor: u32, ready: &mut Vec<u32>) {
        let job = self.job;
        while let Some(op) = job.programs[actor as usize].get(self.actors[actor as usize].at) {
            match op {
                Op::Compute(duration) => self.actors[actor as usize].time += duration,
                Op::Calls(calls) => {
                    if self.actors[actor as usize].open.is_empty() {
                        for call in calls {
                            self.post(actor, call, ready);
                        }
                    }
                    let open = &self.actors[actor as usize].open;
                    if let Some((key, _)) = open.iter().find(|(key, is_send)| !self.is_over(*key, *is_send)) {
                        let key = *key;
                        self.meetings.entry(key).or_default().waiting.push(actor);
                        return;
                    }
                    let ends = open.iter().map(|(key, is_send)| self.end(*key, *is_send));
                    let start = self.actors[actor as usize].time;
                    let end = ends.fold(start, i64::max);
                    let state = &mut self.actors[actor as usize];
                    state.time = end;
                    state.open.clear();
                }
            }
            self.actors[actor as usize].at += 1;
        }
    }

    fn post(&mut self, actor: u32, call: &Call, ready: &mut Vec<u32>) {
        let p2p = self.job.p2p;
        let group_rank = |comm: usize| self.group_ranks[&(comm, actor)];
        let half = |bytes: &i64| (p2p.of(*bytes), format!("{bytes} bytes"));
        let (key, member, is_send, (cost, signature)) = match call {
            Call::Collective(Collective { comm, cost, signature }) => {
                let key = Key::Collective { comm: *comm, number: 0 };
                (key, group_rank(*comm), false, (*cost, signature.clone()))
            }
            Call::Send { comm, peer, bytes } => {
                let (source, destination) = (group_rank(*comm), *peer);
                (Key::Message { comm: *comm, source, destination, number: 0 }, SENDER, true, half(bytes))
            }
            Call::Recv { comm, peer, bytes } => {
                let (source, destination) = (*peer, group_rank(*comm));
                (Key::Message { comm: *comm, source, destination, number: 0 }, RECEIVER, false, half(bytes))
            }
        };
        let state = &mut self.actors[actor as usize];
        let count = state.counts.entry((key, is_send)).or_default();
        let key = numbered(key, *count);
        *count += 1;
        state.open.push((key, is_send));
        let post = Post { actor, time: state.time, cost, signature };
        let meeting = self.meetings.entry(key).or_default();
        meeting.posts.insert(member, post);
        if self.is_over(key, false) {
            ready.extend(std::mem::take(&mut self.meetings.entry(key).or_default().waiting));
        }
    }

    /// Need a member of this meeting wait no longer?
    pub(super) fn is_over(&self, key: Key, is_send: bool) -> bool {
        let Some(meeting) = self.meetings.get(&key) else { return false };
        match key {
            Key::Collective { comm, .. } => meeting.posts.len() == self.job.comms[comm].1.len(),
            Key::Message { .. } if self.job.p2p.is_eager => is_send || meeting.posts.contains_key(&SENDER),
            Key::Message { .. } => meeting.posts.len() == 2,
        }
    }

    /// When a call at a meeting that is over ends. The first member decides what it costs: of a message, the sender.
    fn end(&self, key: Key, is_send: bool) -> i64 {
        let posts = &self.meetings[&key].posts;
        let cost = posts.values().next().map_or(0, |post| post.cost);
        match key {
            Key::Message { .. } if self.job.p2p.is_eager => {
                posts.get(&SENDER).map_or(0, |post| post.time + if is_send { 0 } else { cost })
            }
            _ => posts.values().map(|post| post.time).max().unwrap_or(0) + cost,
        }
    }

    /// Global ranks that have not come to a meeting, ascending.
    pub(super) fn missing(&self, key: Key) -> Vec<u32> {
        let posts = &self.meetings[&key].posts;
        let mut missing: Vec<u32> = match key {
            Key::Collective { comm, .. } => {
                let members = (0..).zip(&self.job.comms[comm].1);
                members.filter(|(member, _)| !posts.contains_key(member)).map(|(_, rank)| *rank).collect()
            }
            Key::Message { comm, source, destination, .. } => {
                let halves = [(SENDER, source), (RECEIVER, destination)];
                let gone = halves.into_iter().filter(|(half, _)| !posts.contains_key(half));
                gone.map(|(_, member)| self.job.member(comm, member)).collect()
            }
        };
        missing.sort_unstable();
        missing
    }
}

fn numbered(key: Key, count: u64) -> Key {
    match key {
        Key::Collective { comm, .. } => Key::Collective { comm, number: count },
        Key::Message { comm, source, destination, .. } => Key::Message { comm, source, destination, number: count },
    }
}

/// The posts that differ from what most say, if any.
fn mismatch(key: Key, meeting: &Meeting) -> Option<Mismatch> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for post in meeting.posts.values() {
        match counts.iter_mut().find(|(signature, _)| *signature == post.signature) {
            Some((_, count)) => *count += 1,
            None => counts.push((&post.signature, 1)),
        }
    }
    if counts.len() < 2 {
        return None;
    }
    let most = counts.iter().map(|(_, count)| *count).max()?;
    let majority = counts.iter().find(|(_, count)| *count == most)?.0.to_owned();
    let others = meeting.posts.values().filter(|post| post.signature != majority);
    let mut minority: Vec<_> = others.map(|post| (post.actor, post.signature.clone())).collect();
    minority.sort_unstable();
    Some(Mismatch { key, majority, minority })
}
