//! Which ranks of a role are evaluated together, and which of them stand at the network.

use super::role::part;
use crate::units::SimTime;

/// The rank has no port.
const NONE: u32 = u32::MAX;

/// Lanes of a role: sets of ranks that have had the same times so far. The default: every rank is a lane of its own.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// Lane by index of the rank.
    of: Vec<u32>,
    /// Ranks by lane.
    weights: Vec<u32>,
}

impl Lanes {
    /// Lanes by index of the rank; numbered from 0, none empty.
    pub(super) fn new(of: Vec<u32>) -> Self {
        let mut weights = vec![0; of.iter().max().map_or(0, |last| *last as usize + 1)];
        for lane in &of {
            weights[*lane as usize] += 1;
        }
        Self { of, weights }
    }

    /// Is every rank a lane of its own?
    pub(super) fn is_each(&self) -> bool {
        self.of.is_empty()
    }

    /// Number of lanes, unless every rank is one.
    pub(super) fn len(&self) -> Option<usize> {
        (!self.is_each()).then_some(self.weights.len())
    }

    /// Lane of the rank with index `at`.
    pub(super) fn of(&self, at: usize) -> u32 {
        self.of.get(at).copied().unwrap_or(at as u32)
    }

    /// A rank of a lane.
    pub(super) fn first(&self, lane: usize, ranks: &[u32]) -> u32 {
        let at = (0..ranks.len()).find(|at| self.of(*at) as usize == lane);
        ranks[at.expect("a lane has a rank")]
    }

    /// Number of ranks of a lane.
    pub(super) fn weight(&self, lane: usize) -> i128 {
        self.weights.get(lane).map_or(1, |weight| i128::from(*weight))
    }

    /// Sum over ranks of a number per lane.
    pub(super) fn sum(&self, numbers: impl Iterator<Item = i64>) -> i128 {
        numbers.enumerate().map(|(lane, number)| i128::from(number) * self.weight(lane)).sum()
    }

    /// Gives the rank with index `at` to another lane, which may be the first that does not exist yet.
    pub(super) fn reassign(&mut self, at: usize, lane: u32) {
        self.weights[self.of[at] as usize] -= 1;
        if lane as usize == self.weights.len() {
            self.weights.push(0);
        }
        self.weights[lane as usize] += 1;
        self.of[at] = lane;
    }

    /// Marks of lanes as marks of ranks.
    pub(super) fn marks_of_ranks(&self, moved: &[bool]) -> Vec<bool> {
        if self.is_each() {
            return moved.to_vec();
        }
        self.of.iter().map(|lane| moved[*lane as usize]).collect()
    }

    /// Takes out the marked lanes.
    pub(super) fn split(&mut self, moved: &[bool]) -> Self {
        if self.is_each() {
            return Self::default();
        }
        let ranks = self.marks_of_ranks(moved);
        let numbers = renumber(moved);
        let mut of = part(&mut self.of, &ranks);
        for lane in of.iter_mut().chain(&mut self.of) {
            *lane = numbers[*lane as usize];
        }
        Self { of, weights: part(&mut self.weights, moved) }
    }
}

/// New number of each element among the marked or among the others.
fn renumber(moved: &[bool]) -> Vec<u32> {
    let mut next = [0; 2];
    let number = |is_moved: &bool| {
        let next = &mut next[usize::from(*is_moved)];
        *next += 1;
        *next - 1
    };
    moved.iter().map(number).collect()
}

/// The ranks that stand at the network for a slot's communicators. The default: every rank does, in order.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// Index of each port's rank in the role.
    at: Vec<u32>,
    /// The ranks themselves.
    pub(super) ranks: Vec<u32>,
    lanes: Vec<u32>,
    /// Port by index of the rank.
    port: Vec<u32>,
    /// Lanes of the role when the ports were chosen. If there are more now, some may have no port.
    num_lanes: usize,
}

impl Ports {
    /// Ports of these ranks (index and rank) in a role.
    pub(super) fn new(ranks: &[(u32, u32)], num_ranks: usize, lanes: &Lanes) -> Self {
        let mut ports = Self { port: vec![NONE; num_ranks], ..Self::default() };
        for (at, rank) in ranks {
            ports.add(*at, *rank, lanes.of(*at as usize));
        }
        ports.num_lanes = lanes.weights.len();
        ports
    }

    fn add(&mut self, at: u32, rank: u32, lane: u32) {
        self.port[at as usize] = self.at.len() as u32;
        self.at.push(at);
        self.ranks.push(rank);
        self.lanes.push(lane);
    }

    /// Adds a port like that of the rank at index `from`; returns the number of that.
    pub(super) fn fork(&mut self, from: u32, at: u32, rank: u32, lane: u32) -> usize {
        self.add(at, rank, lane);
        self.port[from as usize] as usize
    }

    /// Have lanes been split since the ports were chosen?
    pub(super) fn is_stale(&self, lanes: &Lanes) -> bool {
        !lanes.is_each() && self.num_lanes != lanes.weights.len()
    }

    /// Every lane has a port again.
    pub(super) fn refresh(&mut self, lanes: &Lanes) {
        for (lane, at) in self.lanes.iter_mut().zip(&self.at) {
            *lane = lanes.of(*at as usize);
        }
        self.num_lanes = lanes.weights.len();
    }

    /// Times of lanes as times of ports.
    pub(super) fn spread(&self, times: &[SimTime]) -> Vec<SimTime> {
        self.lanes.iter().map(|lane| times[*lane as usize]).collect()
    }

    /// Sum over ports of `ends`, which are theirs, less `starts`, which are those of their lanes.
    pub(super) fn total(&self, ends: &[SimTime], starts: &[SimTime]) -> i128 {
        self.lanes.iter().zip(ends).map(|(lane, end)| i128::from(end.0 - starts[*lane as usize].0)).sum()
    }

    /// Times of ports as times of lanes, if the ports of each lane agree.
    pub(super) fn fold(&self, times: &[SimTime], lanes: &Lanes) -> Option<Vec<SimTime>> {
        if self.is_stale(lanes) {
            return None;
        }
        let mut folded = vec![SimTime::ZERO; lanes.weights.len()];
        for (lane, time) in self.lanes.iter().zip(times) {
            folded[*lane as usize] = *time;
        }
        let agree = self.lanes.iter().zip(times).all(|(lane, time)| folded[*lane as usize] == *time);
        agree.then_some(folded)
    }

    /// Marks of ranks as marks of ports.
    pub(super) fn marks(&self, moved_ranks: &[bool]) -> Vec<bool> {
        if self.port.is_empty() {
            return moved_ranks.to_vec();
        }
        self.at.iter().map(|at| moved_ranks[*at as usize]).collect()
    }

    /// Takes out the marked lanes, which were the marked ranks and have the marked ports.
    pub(super) fn split(&mut self, moved: &[bool], moved_ranks: &[bool], moved_ports: &[bool]) -> Self {
        if self.port.is_empty() {
            return Self::default();
        }
        let (lanes, ranks, ports) = (renumber(moved), renumber(moved_ranks), renumber(moved_ports));
        self.at.iter_mut().for_each(|at| *at = ranks[*at as usize]);
        self.lanes.iter_mut().for_each(|lane| *lane = lanes[*lane as usize]);
        self.port.iter_mut().filter(|port| **port != NONE).for_each(|port| *port = ports[*port as usize]);
        let num_moved = moved.iter().filter(|moved| **moved).count();
        self.num_lanes = moved.len() - num_moved;
        Self {
            at: part(&mut self.at, moved_ports),
            ranks: part(&mut self.ranks, moved_ports),
            lanes: part(&mut self.lanes, moved_ports),
            port: part(&mut self.port, moved_ranks),
            num_lanes: num_moved,
        }
    }
}
