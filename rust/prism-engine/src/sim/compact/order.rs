//! Slots that are used on more than one stream: their launches run in the order in which they were issued.
//!
//! As long as all launches of a slot are on one stream, that stream keeps their order. From the first launch on another
//! stream on they are counted.

use super::ahead::What;
use super::ops::{Number, OpInfo};
use super::state::{Slot, Turn, via};
use super::{Irregular, Machine};
use std::collections::BTreeMap;

/// The launches of a slot since they are counted.
#[derive(Debug, Default)]
pub(super) struct Turns {
    issued: u32,
    done: u32,
    /// Streams of the latest launch; none: there was none.
    streams: u64,
    /// Launches that have come before their turn, by number.
    waiting: BTreeMap<u32, Waiting>,
}

#[derive(Clone, Copy, Debug)]
enum Waiting {
    Single { slot: u32, info: OpInfo, arrival: i64, follows: bool },
    Group { group: u32, launch: u32 },
}

impl<N: Number> Machine<'_, N> {
    /// A launch of a slot is issued on these streams.
    pub(super) fn issue_launch(&mut self, number: u32, streams: u64) -> Turn {
        let slot = &mut self.tables.slots[number as usize];
        let is_one = streams.is_power_of_two();
        if is_one && (slot.last == streams.trailing_zeros() as u8 || slot.last == Slot::UNUSED) {
            slot.last = streams.trailing_zeros() as u8;
            return Turn::Plain;
        }
        self.issue_counted(number, streams)
    }

    /// The same for one that needs to be counted.
    #[cold]
    pub(super) fn issue_counted(&mut self, number: u32, streams: u64) -> Turn {
        let slot = &mut self.tables.slots[number as usize];
        let last = std::mem::replace(&mut slot.last, Slot::COUNTED);
        let place = slot.place;
        if last != Slot::COUNTED {
            let turns = self.start_counting(number, last);
            self.turns.insert(place, turns);
        }
        let turns = self.turns.get_mut(&place).expect("counted");
        let number = turns.issued;
        turns.issued += 1;
        let follows = turns.streams == 0 || turns.streams & streams != 0;
        turns.streams = streams;
        Turn::Counted { number, follows }
    }

    /// Counts the launches of a slot that have been issued on stream `last` and have not ended.
    fn start_counting(&mut self, number: u32, last: u8) -> Turns {
        let mut turns = Turns::default();
        if last == Slot::UNUSED {
            return turns;
        }
        turns.streams = 1 << last;
        let place = self.tables.slots[number as usize].place;
        if self.tables.via[place as usize] != via::NOWHERE {
            self.tables.via[place as usize] |= via::COUNTED;
            turns.issued += 1;
        }
        let rank = self.members[place as usize];
        let ahead = self.aheads.get_mut(self.tables.ranks[rank as usize].ahead as usize);
        for held in ahead.and_then(|ahead| ahead.queue(last)).into_iter().flatten() {
            if let What::Launch { slot, turn, .. } = &mut held.what
                && *slot == number
            {
                *turn = Turn::Counted { number: turns.issued, follows: true };
                turns.issued += 1;
            }
        }
        turns
    }

    /// The first launch of a slot, or one on another stream than the one before, comes as soon as it is issued.
    #[cold]
    pub(super) fn launch_first(&mut self, slot: u32, info: OpInfo, arrival: i64) -> Result<Option<i64>, Irregular> {
        let turn = self.issue_launch(slot, 1 << info.stream);
        self.launch(slot, info, arrival, turn)
    }

    /// A launch alone on a stream that has come to it: its end, if everybody has come and nothing waits for that but the stream.
    pub(super) fn launch(
        &mut self,
        slot: u32,
        info: OpInfo,
        arrival: i64,
        turn: Turn,
    ) -> Result<Option<i64>, Irregular> {
        match turn {
            Turn::Plain => self.post(slot, info, arrival, info.stream + 1),
            Turn::Counted { number, follows } => {
                let place = self.tables.slots[slot as usize].place;
                let waiting = Waiting::Single { slot, info, arrival, follows };
                self.turns.get_mut(&place).expect("counted").waiting.insert(number, waiting);
                self.take_turn(place)?;
                Ok(None)
            }
        }
    }

    /// A launch of a group has come.
    pub(super) fn launch_grouped(&mut self, place: u32, number: u32, group: u32, launch: u32) -> Result<(), Irregular> {
        let waiting = Waiting::Group { group, launch };
        self.turns.get_mut(&place).expect("counted").waiting.insert(number, waiting);
        self.take_turn(place)
    }

    /// A counted launch has ended.
    pub(super) fn end_turn(&mut self, place: u32) -> Result<(), Irregular> {
        self.turns.get_mut(&place).expect("counted").done += 1;
        self.take_turn(place)
    }

    /// Posts the slot's next launch if it has come.
    fn take_turn(&mut self, place: u32) -> Result<(), Irregular> {
        let turns = self.turns.get_mut(&place).expect("counted");
        match turns.waiting.remove(&turns.done) {
            None => Ok(()),
            Some(Waiting::Single { slot, info, arrival, follows }) => {
                let before = if follows { arrival } else { self.tables.ends[place as usize].0 };
                self.post(slot, info, arrival.max(before), (info.stream + 1) | via::COUNTED).map(drop)
            }
            Some(Waiting::Group { group, launch }) => self.post_launch(group, launch),
        }
    }
}
