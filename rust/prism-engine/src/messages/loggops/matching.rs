//! Receives that wait for messages and messages that wait for receives.

use crate::messages::program::ANY;
use rustc_hash::FxHashMap;

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
/// A list is searched from its head up to this length, and through an index beyond.
const LONG: u32 = 24;

#[derive(Clone, Copy)]
struct Node {
    entry: Entry,
    before: u32,
    next: u32,
    /// The next entry of the same rank and tag, in a list with an index.
    alike: u32,
    /// Number of the push, to compare ages.
    age: u64,
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
    is_indexed: bool,
}

/// One side of matching: a list per rank, oldest first, in one pool. Finding is O(1), but for a receive from anyone or of any
/// tag, which is linear in the messages that wait.
pub(super) struct Waiters {
    lists: Vec<List>,
    nodes: Vec<Node>,
    free: u32,
    pushed: u64,
    /// Oldest and newest entry by rank, peer and tag, of long lists.
    index: FxHashMap<(u32, u32, u32), (u32, u32)>,
    /// May entries be wildcards?
    has_wildcards: bool,
}

impl Waiters {
    /// `has_wildcards`: may an entry be from anyone or of any tag?
    pub(super) fn new(num_ranks: u32, has_wildcards: bool) -> Self {
        let list = List { head: NONE, tail: NONE, len: 0, is_indexed: false };
        let lists = vec![list; num_ranks as usize];
        Self { lists, nodes: Vec::new(), free: NONE, pushed: 0, index: FxHashMap::default(), has_wildcards }
    }

    /// Appends to the rank's list.
    #[inline]
    pub(super) fn push(&mut self, rank: u32, entry: Entry) {
        let list = &mut self.lists[rank as usize];
        self.pushed += 1;
        let node = Node { entry, before: list.tail, next: NONE, alike: NONE, age: self.pushed };
        let place = if self.free == NONE {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        } else {
            let place = self.free;
            self.free = self.nodes[place as usize].next;
            self.nodes[place as usize] = node;
            place
        };
        if list.tail == NONE {
            list.head = place;
        } else {
            self.nodes[list.tail as usize].next = place;
        }
        list.tail = place;
        list.len += 1;
        if list.is_indexed {
            self.add_to_index(rank, place);
        } else if list.len > LONG {
            self.make_index(rank);
        }
    }

    /// Takes the oldest entry of the rank that matches.
    #[inline]
    pub(super) fn take(&mut self, rank: u32, peer: u32, tag: u32) -> Option<Entry> {
        let list = self.lists[rank as usize];
        let place = if list.is_indexed && peer != ANY && tag != ANY {
            self.find_in_index(rank, peer, tag)
        } else {
            self.find_from_head(list.head, peer, tag)
        };
        (place != NONE).then(|| self.remove(rank, place))
    }

    fn find_from_head(&self, head: u32, peer: u32, tag: u32) -> u32 {
        let mut place = head;
        while place != NONE {
            let Node { entry, next, .. } = self.nodes[place as usize];
            if matches(entry.peer, peer) && matches(entry.tag, tag) {
                break;
            }
            place = next;
        }
        place
    }

    /// The oldest of those that match; wildcards have places of their own in the index.
    fn find_in_index(&self, rank: u32, peer: u32, tag: u32) -> u32 {
        let first = |peer, tag| self.index.get(&(rank, peer, tag)).map_or(NONE, |(oldest, _)| *oldest);
        if !self.has_wildcards {
            return first(peer, tag);
        }
        let places = [first(peer, tag), first(peer, ANY), first(ANY, tag), first(ANY, ANY)];
        let found = places.into_iter().filter(|place| *place != NONE);
        found.min_by_key(|place| self.nodes[*place as usize].age).unwrap_or(NONE)
    }

    fn remove(&mut self, rank: u32, place: u32) -> Entry {
        let Node { entry, before, next, alike, .. } = self.nodes[place as usize];
        let list = &mut self.lists[rank as usize];
        match before {
            NONE => list.head = next,
            before => self.nodes[before as usize].next = next,
        }
        match next {
            NONE => list.tail = before,
            next => self.nodes[next as usize].before = before,
        }
        list.len -= 1;
        if list.is_indexed {
            list.is_indexed = list.len > 0;
            // The oldest that matches is the oldest of those like it.
            let key = (rank, entry.peer, entry.tag);
            if alike == NONE {
                self.index.remove(&key);
            } else if let Some((oldest, _)) = self.index.get_mut(&key) {
                *oldest = alike;
            }
        }
        self.nodes[place as usize].next = self.free;
        self.free = place;
        entry
    }

    #[cold]
    fn make_index(&mut self, rank: u32) {
        self.lists[rank as usize].is_indexed = true;
        let mut place = self.lists[rank as usize].head;
        while place != NONE {
            self.add_to_index(rank, place);
            place = self.nodes[place as usize].next;
        }
    }

    fn add_to_index(&mut self, rank: u32, place: u32) {
        self.nodes[place as usize].alike = NONE;
        let Entry { peer, tag, .. } = self.nodes[place as usize].entry;
        let (_, newest) = self.index.entry((rank, peer, tag)).or_insert((place, NONE));
        let before = std::mem::replace(newest, place);
        if before != NONE {
            self.nodes[before as usize].alike = place;
        }
    }

    /// The rank's entries, oldest first.
    pub(super) fn of(&self, rank: u32) -> impl Iterator<Item = Entry> + '_ {
        let mut place = self.lists[rank as usize].head;
        std::iter::from_fn(move || {
            let node = self.nodes.get(place as usize)?;
            place = node.next;
            Some(node.entry)
        })
    }
}

#[inline]
fn matches(a: u32, b: u32) -> bool {
    a == b || a == ANY || b == ANY
}
