//! Calls and messages that are posted together.

use super::ahead::{Held, What};
use super::meet::Half;
use super::ops::{Code, Number, OpInfo};
use super::state::{NONE, Turn, stall, via};
use super::{Irregular, Machine};
use crate::ids::Rank;
use crate::sim::signature::{Call, fuse};
use crate::units::SimTime;

/// A group under way. Launches are removed with it.
#[derive(Debug, Default)]
pub(super) struct Group {
    rank: u32,
    issue: i64,
    launches: Vec<Launch>,
    /// Streams that have not left.
    streams: u64,
}

/// What a group has on one communicator.
#[derive(Debug)]
struct Launch {
    /// First of its ops.
    slot: u32,
    place: u32,
    comm: u32,
    streams: u64,
    number: u32,
    follows: bool,
    ops: Vec<Call>,
    /// Calls as they run: number, and whether the kernel runs already.
    calls: Vec<(u32, bool)>,
    /// Messages, which come after them, and how much later each has its turn.
    halves: Vec<Half>,
    /// Less than nothing where collectives have launched the kernel.
    leads: Vec<i64>,
    /// Streams that have not come.
    awaited: u64,
    arrival: i64,
    end: i64,
    /// From coming to end, of the calls so far.
    counted: i64,
    /// When it came to its latest call.
    came: i64,
    /// Calls and messages that have not ended.
    left: usize,
    /// Next call.
    next: usize,
}

/// Where a walk is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    pub(super) row: u64,
    pub(super) end: u64,
    pub(super) host: i64,
}

/// What became of the group at a walk's next op.
pub(super) enum Step {
    /// There is none, or the op is alone in it.
    Alone,
    /// The rank has to stop.
    Stopped(u8),
    Issued(Cursor),
}

impl<N: Number> Machine<'_, N> {
    /// Issues the group that starts at a walk's next op, which communicates.
    #[cold]
    pub(super) fn walk_group(&mut self, rank: u32, cursor: Cursor) -> Result<Step, Irregular> {
        let place = self.graph.template(self.graph.rank_template(Rank(rank))).place();
        let group_of = |row: u64| place.group.get(self.groups_data, row as usize - place.start);
        let group = group_of(cursor.row);
        let len = (cursor.row..cursor.end).take_while(|row| group != 0 && group_of(*row) == group).count() as u64;
        if len < 2 {
            return Ok(Step::Alone);
        }
        let infos: Vec<OpInfo> =
            (cursor.row..cursor.row + len).map(|row| self.ops[self.rows[row as usize].index()]).collect();
        let streams = infos.iter().fold(0u64, |streams, info| streams | 1 << info.stream);
        let state = self.tables.ranks[rank as usize];
        if state.blocked & streams != 0 && !self.may_hold(rank) {
            return Ok(Step::Stopped((state.blocked & streams).trailing_zeros() as u8 | stall::AHEAD));
        }
        let gaps: i64 = (cursor.row..cursor.row + len).map(|row| self.gap(rank, row)).sum();
        let next = Cursor { row: cursor.row + len, host: cursor.host + gaps, ..cursor };
        self.issue_group(rank, next.host, &infos)?;
        Ok(Step::Issued(next))
    }

    fn issue_group(&mut self, rank: u32, issue: i64, infos: &[OpInfo]) -> Result<(), Irregular> {
        let mut group = Group { rank, issue, launches: Vec::new(), streams: 0 };
        let mut order: Vec<u8> = Vec::new();
        for (op, info) in (0..).zip(infos) {
            if !order.contains(&info.stream) {
                order.push(info.stream);
                group.streams |= 1 << info.stream;
            }
            let launch = self.launch_of(&mut group, info);
            launch.streams |= 1 << info.stream;
            if info.code == Code::Call {
                launch.ops.push(Call { op, ..self.costs.call(info.number) });
            } else {
                let (is_send, peer, message) = (info.code == Code::Send, info.arg, info.number);
                launch.halves.push(Half { place: launch.place, is_send, peer, message });
            }
        }
        for launch in &mut group.launches {
            let calls = fuse(&launch.ops);
            launch.calls = calls.iter().map(|call| (self.costs.number_of_call(call), call.continues)).collect();
            launch.left = launch.calls.len() + launch.halves.len();
            launch.awaited = launch.streams;
            let members = &self.members[self.tables.comms[launch.comm as usize].places()];
            let me = launch.place - self.tables.comms[launch.comm as usize].start;
            launch.leads = self.costs.leads(members, me, &calls, &launch.halves)?;
            if let Turn::Counted { number, follows } = self.issue_counted(launch.slot, launch.streams) {
                (launch.number, launch.follows) = (number, follows);
            }
        }
        let number = self.free_groups.pop().unwrap_or_else(|| {
            self.groups.push(Group::default());
            self.groups.len() as u32 - 1
        });
        self.groups[number as usize] = group;
        for stream in order {
            if self.tables.ranks[rank as usize].blocked >> stream & 1 != 0 {
                self.push_held(rank, stream, Held { issue, what: What::Group { group: number } });
            } else {
                self.enter_group(number, stream)?;
            }
        }
        Ok(())
    }

    fn launch_of<'a>(&self, group: &'a mut Group, info: &OpInfo) -> &'a mut Launch {
        let slot = self.tables.ranks[group.rank as usize].slots + info.slot;
        let at = group.launches.iter().position(|launch| launch.slot == slot).unwrap_or_else(|| {
            let found = self.tables.slots[slot as usize];
            group.launches.push(Launch {
                slot,
                place: found.place,
                comm: found.comm,
                streams: 0,
                number: 0,
                follows: true,
                ops: Vec::new(),
                calls: Vec::new(),
                halves: Vec::new(),
                leads: Vec::new(),
                counted: 0,
                came: 0,
                awaited: 0,
                arrival: 0,
                end: 0,
                left: 0,
                next: 0,
            });
            group.launches.len() - 1
        });
        &mut group.launches[at]
    }

    /// A free stream comes to a group, and waits for it.
    pub(super) fn enter_group(&mut self, number: u32, stream: u8) -> Result<(), Irregular> {
        let group = &mut self.groups[number as usize];
        let state = &mut self.tables.ranks[group.rank as usize];
        let clock = &mut self.tables.words[state.words as usize + usize::from(stream)];
        let come = group.issue.max(*clock);
        *clock = come;
        state.blocked |= 1 << stream;
        let mut ready = Vec::new();
        for (at, launch) in (0..).zip(&mut group.launches) {
            if launch.streams >> stream & 1 != 0 {
                launch.arrival = launch.arrival.max(come);
                launch.awaited &= !(1 << stream);
                if launch.awaited == 0 {
                    ready.push((launch.place, launch.number, at));
                }
            }
        }
        for (place, turn, at) in ready {
            self.launch_grouped(place, turn, number, at)?;
        }
        Ok(())
    }

    /// A launch whose turn it is comes to the network.
    pub(super) fn post_launch(&mut self, group: u32, at: u32) -> Result<(), Irregular> {
        let launch = &mut self.groups[group as usize].launches[at as usize];
        let place = launch.place;
        if !launch.follows {
            launch.arrival = launch.arrival.max(self.tables.ends[place as usize].0);
        }
        launch.end = launch.arrival;
        self.active.insert(place, (group, at));
        self.go_on(group, at)
    }

    /// A launch posts its next call, or its messages after the last one.
    fn go_on(&mut self, group: u32, at: u32) -> Result<(), Irregular> {
        let launch = &mut self.groups[group as usize].launches[at as usize];
        let (comm, place) = (launch.comm, launch.place);
        if let Some((call, continues)) = launch.calls.get(launch.next).copied() {
            launch.came = launch.end;
            if continues {
                let members = &self.members[self.tables.comms[comm as usize].places()];
                launch.came -= self.costs.launch_time(members, call);
            }
            launch.next += 1;
            let came = launch.came;
            if self.arrive(comm, place, call, came, via::GROUP)? {
                self.complete(comm, NONE)?;
            }
            return Ok(());
        }
        let (end, halves) = (launch.end, std::mem::take(&mut launch.halves));
        let leads = std::mem::take(&mut launch.leads);
        for (half, lead) in halves.into_iter().zip(leads) {
            self.post_half(comm, half, end + lead, via::GROUP)?;
        }
        Ok(())
    }

    /// A call or a message of a launch has ended.
    pub(super) fn end_part(&mut self, place: u32, end: i64, is_message: bool) -> Result<(), Irregular> {
        let (number, at) = *self.active.get(&place).ok_or(Irregular)?;
        let launch = &mut self.groups[number as usize].launches[at as usize];
        launch.end = launch.end.max(end);
        launch.left -= 1;
        if !is_message {
            launch.counted += end - launch.came;
        }
        if launch.left > 0 {
            return if is_message { Ok(()) } else { self.go_on(number, at) };
        }
        self.communication += i128::from(launch.end - launch.arrival) - i128::from(launch.counted);
        let (end, streams) = (launch.end, launch.streams);
        self.active.remove(&place);
        self.tables.via[place as usize] = via::NOWHERE;
        self.tables.ends[place as usize] = SimTime(end);
        self.leave_group(number, streams);
        self.end_turn(place)
    }

    /// Streams of a launch that has ended go on when all their launches have.
    fn leave_group(&mut self, number: u32, streams: u64) {
        let group = &mut self.groups[number as usize];
        let rank = group.rank;
        let mut woken = Vec::new();
        let here = streams & group.streams;
        for stream in (0..64).filter(|stream| here >> stream & 1 != 0) {
            let own = group.launches.iter().filter(|launch| launch.streams >> stream & 1 != 0);
            if own.clone().all(|launch| launch.left == 0) {
                let end = own.map(|launch| launch.end).fold(0, i64::max);
                group.streams &= !(1 << stream);
                woken.push((stream as u8, end));
            }
        }
        if group.streams == 0 {
            *group = Group::default();
            self.free_groups.push(number);
        }
        for (stream, end) in woken {
            self.wake(rank, stream, end);
        }
    }
}
