//! Halves of messages. Of one ordered pair of one communicator, the k-th send meets the k-th receive.

use super::error::SimError;
use super::perturbed::Origin;
use crate::ids::Rank;
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Communicator, group rank of the source, group rank of the destination.
pub(super) type Key = (u32, u32, u32);

/// A half of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) rank: u32,
    pub(super) slot: u32,
    pub(super) time: SimTime,
    pub(super) bytes: u64,
    pub(super) is_send: bool,
    pub(super) origin: Origin,
}

/// Messages of one ordered pair. Only halves of one side wait at a time.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) key: Key,
    /// Global ranks of source and destination.
    pub(super) ranks: (u32, u32),
    /// The peer is absent: it posts its half exactly when the rank that is there does.
    pub(super) is_alone: bool,
    is_broken: bool,
    matched: u64,
    /// The queue's first element, kept outside it because there hardly ever is a second.
    first: Option<Waiting>,
    more: VecDeque<Waiting>,
}

impl Channel {
    /// A half comes: the two halves `(send, receive)` if the other was waiting.
    pub(super) fn meet(&mut self, half: Waiting) -> Option<(Waiting, Waiting)> {
        if self.is_alone {
            return Some((half, half));
        }
        let meets = self.first.filter(|other| other.is_send != half.is_send && !self.is_broken);
        let Some(other) = meets else {
            if self.first.is_none() {
                self.first = Some(half);
            } else {
                self.more.push_back(half);
            }
            return None;
        };
        self.first = self.more.pop_front();
        self.matched += 1;
        Some(if half.is_send { (half, other) } else { (other, half) })
    }

    /// The halves that met last never end, because the rank of the other half is dead: `left` waits for ever.
    pub(super) fn orphan(&mut self, left: Waiting) {
        self.is_broken = true;
        self.matched -= 1;
        self.first = Some(left);
    }

    /// The halves that met last do not fit: nothing meets here any more.
    pub(super) fn mismatch(&mut self, send: &Waiting, receive: &Waiting) -> SimError {
        self.is_broken = true;
        SimError::MessageMismatch {
            communicator: self.key.0,
            source_rank: Rank(send.rank),
            destination_rank: Rank(receive.rank),
            sequence: self.matched - 1,
            sent_bytes: send.bytes,
            received_bytes: receive.bytes,
        }
    }
}

/// All channels. Programs keep the numbers, so that the hash table is not in the way of every message.
#[derive(Debug, Default)]
pub(super) struct Channels {
    numbers: FxHashMap<Key, u32>,
    channels: Vec<Channel>,
}

impl Channels {
    /// Room for so many more.
    pub(super) fn reserve(&mut self, more: usize) {
        self.numbers.reserve(more);
        self.channels.reserve(more);
    }

    /// Number of a channel, made if it is new.
    pub(super) fn get(&mut self, key: Key, ranks: (u32, u32), is_alone: bool) -> u32 {
        *self.numbers.entry(key).or_insert_with(|| {
            let (first, more) = (None, VecDeque::new());
            self.channels.push(Channel { key, ranks, is_alone, is_broken: false, matched: 0, first, more });
            self.channels.len() as u32 - 1
        })
    }

    pub(super) fn at(&mut self, number: u32) -> &mut Channel {
        &mut self.channels[number as usize]
    }

    /// Number of the channel of `comm` (whose members are `members`) that is like channel `number`: with its halves.
    pub(super) fn fork(&mut self, number: u32, comm: u32, members: &[u32]) -> u32 {
        let like = &self.channels[number as usize];
        let (_, source, destination) = like.key;
        let key = (comm, source, destination);
        if let Some(known) = self.numbers.get(&key) {
            return *known;
        }
        let ranks = (members[source as usize], members[destination as usize]);
        let half = |half: &Waiting| Waiting { rank: if half.is_send { ranks.0 } else { ranks.1 }, ..*half };
        let channel = Channel {
            key,
            ranks,
            is_alone: like.is_alone,
            is_broken: like.is_broken,
            matched: like.matched,
            first: like.first.as_ref().map(half),
            more: like.more.iter().map(half).collect(),
        };
        self.channels.push(channel);
        let number = self.channels.len() as u32 - 1;
        self.numbers.insert(key, number);
        number
    }

    /// Of the halves that wait in a channel the first: whether it sends, and how many messages were before.
    pub(super) fn waiting(&self, key: Key) -> Option<(bool, u64)> {
        let channel = &self.channels[*self.numbers.get(&key)? as usize];
        Some((channel.first?.is_send, channel.matched))
    }
}
