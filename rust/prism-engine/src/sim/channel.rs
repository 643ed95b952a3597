//! Halves of messages. Of one ordered pair of one communicator, the k-th send meets the k-th receive.
//!
//! Communicators of a batch post halves together: a half here is a row, with a time per communicator.

use super::error::SimError;
use super::perturbed::Origin;
use super::role::Times;
use crate::ids::Rank;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Batch, group rank of the source, group rank of the destination.
pub(super) type Key = (u32, u32, u32);

/// A half of a message.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    /// That of the first communicator.
    pub(super) rank: u32,
    pub(super) slot: u32,
    /// By communicator.
    pub(super) times: Times,
    pub(super) bytes: u64,
    pub(super) is_send: bool,
    pub(super) origin: Origin,
}

/// Messages of one ordered pair. Only halves of one side wait at a time.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) key: Key,
    /// Global ranks of source and destination in the first communicator.
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
            return Some((half.clone(), half));
        }
        match self.first.take() {
            Some(other) if other.is_send != half.is_send && !self.is_broken => {
                self.first = self.more.pop_front();
                self.matched += 1;
                Some(if half.is_send { (half, other) } else { (other, half) })
            }
            Some(other) => {
                self.first = Some(other);
                self.more.push_back(half);
                None
            }
            None => {
                self.first = Some(half);
                None
            }
        }
    }

    /// The halves that met last never end, because the rank of the other half is dead: `left` waits for ever.
    pub(super) fn orphan(&mut self, left: Waiting) {
        self.is_broken = true;
        self.matched -= 1;
        self.first = Some(left);
    }

    /// The halves that met last do not fit: nothing meets here any more. `communicator` is the first of the batch.
    pub(super) fn mismatch(&mut self, communicator: u32, send: &Waiting, receive: &Waiting) -> SimError {
        self.is_broken = true;
        SimError::MessageMismatch {
            communicator,
            source_rank: Rank(send.rank),
            destination_rank: Rank(receive.rank),
            sequence: self.matched - 1,
            sent_bytes: send.bytes,
            received_bytes: receive.bytes,
        }
    }

    /// The same channel of communicators that get a batch of their own: `pick` takes their times out of a row.
    fn divide(&self, key: Key, ranks: (u32, u32), pick: &impl Fn(&Times) -> Times) -> Self {
        let half = |half: &Waiting| Waiting {
            rank: if half.is_send { ranks.0 } else { ranks.1 },
            times: pick(&half.times),
            ..half.clone()
        };
        Self {
            key,
            ranks,
            is_alone: self.is_alone,
            is_broken: self.is_broken,
            matched: self.matched,
            first: self.first.as_ref().map(half),
            more: self.more.iter().map(half).collect(),
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

    /// Number of the channel of `batch` (whose first members are `members`) that is like channel `number`: with its halves.
    pub(super) fn fork(&mut self, number: u32, batch: u32, members: &[u32]) -> u32 {
        let (_, source, destination) = self.channels[number as usize].key;
        if let Some(known) = self.numbers.get(&(batch, source, destination)) {
            return *known;
        }
        self.add_like(number, batch, members, &Times::clone)
    }

    fn add_like(&mut self, number: u32, batch: u32, members: &[u32], pick: &impl Fn(&Times) -> Times) -> u32 {
        let like = &self.channels[number as usize];
        let key = (batch, like.key.1, like.key.2);
        let ranks = (members[key.1 as usize], members[key.2 as usize]);
        self.channels.push(like.divide(key, ranks, pick));
        let number = self.channels.len() as u32 - 1;
        self.numbers.insert(key, number);
        number
    }

    /// The communicators of `batch` in `columns` (the first of which has `members`) get the batch `new`.
    pub(super) fn divide(&mut self, batch: u32, new: u32, columns: &[u32], members: &[u32]) {
        let pick = |times: &Times| columns.iter().map(|column| times[*column as usize]).collect();
        for number in 0..self.channels.len() as u32 {
            let channel = &self.channels[number as usize];
            if channel.key.0 != batch {
                continue;
            }
            if new == batch {
                let ranks = (members[channel.key.1 as usize], members[channel.key.2 as usize]);
                self.channels[number as usize] = channel.divide(channel.key, ranks, &pick);
            } else {
                self.add_like(number, new, members, &pick);
            }
        }
    }

    /// Of the halves that wait in a channel the first: whether it sends, and how many messages were before.
    pub(super) fn waiting(&self, key: Key) -> Option<(bool, u64)> {
        let channel = &self.channels[*self.numbers.get(&key)? as usize];
        Some((channel.first.as_ref()?.is_send, channel.matched))
    }
}
