//! Collectives under way.

use crate::lower::Pattern;

/// No place.
const NOT_UNDER_WAY: u32 = u32::MAX;

/// The state of each instance from its first member's coming to its last member's going. Memory: that of the most at one time,
/// and four bytes per instance.
#[derive(Debug)]
pub(super) struct Collectives {
    /// By instance.
    places: Vec<u32>,
    states: Vec<Live>,
    free: Vec<u32>,
}

impl Collectives {
    pub(super) fn new(num_instances: usize) -> Self {
        Self { places: vec![NOT_UNDER_WAY; num_instances], states: Vec::new(), free: Vec::new() }
    }

    /// An instance under way.
    pub(super) fn of(&mut self, instance: u32) -> &mut Live {
        &mut self.states[self.places[instance as usize] as usize]
    }

    /// An instance to which a member comes.
    pub(super) fn enter(&mut self, instance: u32, pattern: &Pattern) -> &mut Live {
        if self.places[instance as usize] == NOT_UNDER_WAY {
            let place = self.free.pop().unwrap_or_else(|| {
                self.states.push(Live::default());
                self.states.len() as u32 - 1
            });
            self.states[place as usize].reset(pattern);
            self.places[instance as usize] = place;
        }
        self.of(instance)
    }

    /// The last member has gone.
    pub(super) fn end(&mut self, instance: u32) {
        self.free.push(std::mem::replace(&mut self.places[instance as usize], NOT_UNDER_WAY));
    }
}

/// State of the lanes and members of one instance.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// Members that take part.
    is_in: Vec<bool>,
    num_in: u32,
    /// Per lane: messages that have left and arrived, and whether one is on the wire.
    left: Vec<u32>,
    arrived: Vec<u32>,
    is_busy: Vec<bool>,
    /// What each member still waits for.
    waits: Vec<u32>,
    num_through: u32,
    num_out: u32,
}

impl Live {
    /// Makes an instance of a pattern of a used one.
    pub(super) fn reset(&mut self, pattern: &Pattern) {
        let (members, lanes) = (pattern.size as usize, pattern.lanes.len());
        self.is_in.clear();
        self.is_in.resize(members, false);
        for column in [&mut self.left, &mut self.arrived] {
            column.clear();
            column.resize(lanes, 0);
        }
        self.is_busy.clear();
        self.is_busy.resize(lanes, false);
        self.waits = pattern.waits();
        (self.num_in, self.num_through, self.num_out) = (0, 0, 0);
    }

    /// A member takes part. `lanes` are those that may go on, `out` the members that may leave.
    pub(super) fn enter(&mut self, pattern: &Pattern, member: u32, lanes: &mut Vec<u32>, out: &mut Vec<u32>) {
        self.is_in[member as usize] = true;
        self.num_in += 1;
        if !pattern.is_barrier {
            lanes.extend(pattern.lanes_of(member));
        } else if self.num_in == pattern.size {
            lanes.extend(0..pattern.lanes.len() as u32);
        }
        self.leave_if_through(pattern, member, out);
    }

    /// Puts the lane's next message on the wire if it may go; its number.
    pub(super) fn send(&mut self, pattern: &Pattern, lane: u32) -> Option<u32> {
        let at = lane as usize;
        let number = self.left[at];
        if self.is_busy[at] || u64::from(number) >= pattern.lanes[at].count {
            return None;
        }
        let (from, to, _) = pattern.message(lane, u64::from(number));
        let is_there = if pattern.is_barrier {
            self.num_in == pattern.size
        } else {
            self.is_in[from as usize] && (!pattern.is_listed() || self.is_in[to as usize])
        };
        let needed = (u64::from(number) + 1).saturating_sub(pattern.lag);
        let is_fed = |feeder: &u32| u64::from(self.arrived[*feeder as usize]) >= needed;
        if !is_there || !pattern.feeders(lane).iter().all(is_fed) {
            return None;
        }
        self.is_busy[at] = true;
        Some(number)
    }

    /// A message has left.
    pub(super) fn left(&mut self, pattern: &Pattern, lane: u32, number: u32, out: &mut Vec<u32>) {
        let at = lane as usize;
        self.is_busy[at] = false;
        self.left[at] += 1;
        if pattern.is_listed() || u64::from(self.left[at]) == pattern.lanes[at].count {
            let (from, ..) = pattern.message(lane, u64::from(number));
            self.waits[from as usize] -= 1;
            self.leave_if_through(pattern, from, out);
        }
    }

    /// A message has arrived.
    pub(super) fn arrived(&mut self, pattern: &Pattern, lane: u32, number: u32, out: &mut Vec<u32>) {
        let at = lane as usize;
        self.arrived[at] += 1;
        if pattern.is_listed() || u64::from(self.arrived[at]) == pattern.lanes[at].count {
            let (_, to, _) = pattern.message(lane, u64::from(number));
            self.waits[to as usize] -= 1;
            self.leave_if_through(pattern, to, out);
        }
    }

    fn leave_if_through(&mut self, pattern: &Pattern, member: u32, out: &mut Vec<u32>) {
        if !self.is_in[member as usize] || self.waits[member as usize] > 0 {
            return;
        }
        self.num_through += 1;
        if !pattern.is_barrier {
            out.push(member);
        } else if self.num_through == pattern.size {
            out.extend(0..pattern.size);
        }
    }

    /// A member has left. True: it was the last.
    pub(super) fn leave(&mut self, pattern: &Pattern) -> bool {
        self.num_out += 1;
        self.num_out == pattern.size
    }
}
