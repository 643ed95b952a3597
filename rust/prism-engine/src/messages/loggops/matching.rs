//! Receives that wait for messages and messages that wait for receives.

use crate::messages::program::ANY;

/// A receive or a message that waits on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The other rank; [`ANY`] for a receive from anyone.
    pub(super) peer: u32,
    /// [`ANY`] for a receive of any tag.
    pub(super) tag: u32,
    /// The receive or the send, counted over all ranks.
    pub(super) op: u32,
    /// When the message was in.
    pub(super) end: u64,
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Node {
    entry: Entry,
    next: u32,
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
}

/// One side of matching: a list per rank, oldest first, in one pool. Finding is linear in the list.
pub(super) struct Waiters {
    lists: Vec<List>,
    nodes: Vec<Node>,
    free: u32,
}

impl Waiters {
    pub(super) fn new(num_ranks: u32) -> Self {
        Self { lists: vec![List { head: NONE, tail: NONE }; num_ranks as usize], nodes: Vec::new(), free: NONE }
    }

    /// Appends to the rank's list.
    #[inline]
    pub(super) fn push(&mut self, rank: u32, entry: Entry) {
        let node = Node { entry, next: NONE };
        let index = if self.free == NONE {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        } else {
            let index = self.free;
            self.free = self.nodes[index as usize].next;
            self.nodes[index as usize] = node;
            index
        };
        let list = &mut self.lists[rank as usize];
        if list.tail == NONE {
            list.head = index;
        } else {
            self.nodes[list.tail as usize].next = index;
        }
        list.tail = index;
    }

    /// Takes the oldest entry of the rank that matches.
    #[inline]
    pub(super) fn take(&mut self, rank: u32, peer: u32, tag: u32) -> Option<Entry> {
        let list = &mut self.lists[rank as usize];
        let (mut before, mut index) = (NONE, list.head);
        while index != NONE {
            let Node { entry, next } = self.nodes[index as usize];
            if matches(entry.peer, peer) && matches(entry.tag, tag) {
                if before == NONE {
                    list.head = next;
                } else {
                    self.nodes[before as usize].next = next;
                }
                if next == NONE {
                    list.tail = before;
                }
                self.nodes[index as usize].next = self.free;
                self.free = index;
                return Some(entry);
            }
            (before, index) = (index, next);
        }
        None
    }

    /// The rank's entries, oldest first.
    pub(super) fn of(&self, rank: u32) -> impl Iterator<Item = Entry> + '_ {
        let mut index = self.lists[rank as usize].head;
        std::iter::from_fn(move || {
            let node = self.nodes.get(index as usize)?;
            index = node.next;
            Some(node.entry)
        })
    }
}

#[inline]
fn matches(a: u32, b: u32) -> bool {
    a == b || a == ANY || b == ANY
}
