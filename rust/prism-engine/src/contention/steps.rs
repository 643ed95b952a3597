//! Without contention: every message of every collective, step by step, but in no order of time.

use super::{Evaluation, stuck};
use crate::lower::{Enter, Job, NO_NODE, Pattern, Work};
use crate::sim::SimError;
use crate::units::SimTime;

/// Times of all nodes: O(nodes + messages).
pub(super) fn evaluate(job: &Job) -> Result<Evaluation, SimError> {
    let mut steps = Steps::new(job);
    let mut reached = 0;
    while let Some(node) = steps.ready.pop() {
        reached += 1;
        steps.reach(node);
    }
    if reached < job.nodes.len() {
        return Err(stuck(job, reached));
    }
    Ok(Evaluation { ends: steps.times, stretched: 0, added: 0 })
}

struct Steps<'a> {
    job: &'a Job,
    after: (Vec<u32>, Vec<u32>),
    pending: Vec<u32>,
    /// Of a node not reached: the latest release so far.
    times: Vec<SimTime>,
    ready: Vec<u32>,
    /// When each member takes part, and how many do, by instance.
    entered: Vec<SimTime>,
    num_entered: Vec<u32>,
    columns: Columns,
}

impl<'a> Steps<'a> {
    fn new(job: &'a Job) -> Self {
        let pending = job.nodes.pending();
        let ready = (0..job.nodes.len() as u32).filter(|node| pending[*node as usize] == 0).collect();
        Self {
            after: job.nodes.after(),
            pending,
            times: vec![SimTime::ZERO; job.nodes.len()],
            ready,
            entered: vec![SimTime::ZERO; job.exits.len()],
            num_entered: vec![0; job.instances.len()],
            columns: Columns::default(),
            job,
        }
    }

    fn release(&mut self, node: u32, time: SimTime) {
        let node_index = node as usize;
        self.times[node_index] = self.times[node_index].max(time);
        self.pending[node_index] -= 1;
        if self.pending[node_index] == 0 {
            self.ready.push(node);
        }
    }

    fn reach(&mut self, node: u32) {
        let at = node as usize;
        let time = self.times[at] + self.job.nodes.delay[at];
        self.times[at] = time;
        match self.job.nodes.work[at] {
            Work::Begin { enter } | Work::Enter { enter } if enter != NO_NODE => self.enter(enter, time),
            Work::Transfer(transfer) => {
                let transfer = &self.job.transfers[transfer as usize];
                let left = time + transfer.message.occupancy;
                self.release(transfer.ends.0, left);
                self.release(transfer.ends.1, left + transfer.message.latency);
            }
            _ => {}
        }
        for next in self.after.0[at]..self.after.0[at + 1] {
            self.release(self.after.1[next as usize], time);
        }
    }

    fn enter(&mut self, enter: u32, time: SimTime) {
        let Enter { instance: number, member, launch } = self.job.enters[enter as usize];
        let instance = &self.job.instances[number as usize];
        let pattern = &self.job.patterns[instance.pattern as usize];
        self.entered[(instance.exits + member) as usize] = time + launch;
        self.num_entered[number as usize] += 1;
        if self.num_entered[number as usize] < pattern.size {
            return;
        }
        let entered = &self.entered[instance.exits as usize..(instance.exits + pattern.size) as usize];
        if pattern.is_listed() {
            self.columns.run_listed(pattern, entered);
        } else {
            self.columns.run(pattern, entered);
        }
        for member in 0..pattern.size {
            let time = self.columns.ends[member as usize];
            self.release(self.job.exit(number, member), time);
        }
    }
}

/// Working memory of one collective: a value per lane.
#[derive(Default)]
struct Columns {
    entered: Vec<SimTime>,
    occupancy: Vec<SimTime>,
    latency: Vec<SimTime>,
    left: Vec<SimTime>,
    /// Arrivals of the latest `lag + 1` messages, column after column.
    arrived: Vec<SimTime>,
    ends: Vec<SimTime>,
}

impl Columns {
    /// The recurrence: message `j` leaves when the one before has, its sender takes part, and what feeds it has come.
    fn run(&mut self, pattern: &Pattern, entered: &[SimTime]) {
        let lanes = pattern.lanes.len();
        let Self { entered: from, occupancy, latency, left, arrived, ends } = self;
        for column in [&mut *from, latency] {
            column.clear();
        }
        for lane in 0..lanes as u32 {
            let (sender, _, message) = pattern.message(lane, 0);
            from.push(entered[sender as usize]);
            latency.push(message.latency);
        }
        left.clone_from(from);
        let depth = pattern.lag + 1;
        arrived.clear();
        arrived.resize(lanes * depth as usize, SimTime::ZERO);
        for number in 0..pattern.per_lane {
            let (column, fed) = ((number % depth) as usize * lanes, number >= pattern.lag);
            let source = ((number + 1) % depth) as usize * lanes;
            if pattern.is_change(number) {
                occupancy.clear();
                occupancy.extend((0..lanes as u32).map(|lane| pattern.message(lane, number).2.occupancy));
            }
            for lane in 0..lanes {
                if number >= pattern.lanes[lane].count {
                    continue;
                }
                let mut ready = left[lane];
                if fed {
                    for feeder in pattern.feeders(lane as u32) {
                        ready = ready.max(arrived[source + *feeder as usize]);
                    }
                }
                left[lane] = ready + occupancy[lane];
                arrived[column + lane] = left[lane] + latency[lane];
            }
        }
        ends.clear();
        ends.extend_from_slice(entered);
        for (at, lane) in pattern.lanes.iter().enumerate() {
            let sender = &mut ends[lane.from as usize];
            *sender = (*sender).max(left[at]);
            let receiver = &mut ends[lane.to as usize];
            *receiver = (*receiver).max(left[at] + latency[at]);
        }
    }

    /// Messages between pairs.
    fn run_listed(&mut self, pattern: &Pattern, entered: &[SimTime]) {
        let all = entered.iter().copied().max().unwrap_or_default();
        let ends = &mut self.ends;
        ends.clear();
        ends.extend_from_slice(entered);
        for lane in 0..pattern.lanes.len() as u32 {
            let mut left = SimTime::ZERO;
            for number in 0..pattern.lanes[lane as usize].count {
                let (from, to, message) = pattern.message(lane, number);
                let together = if pattern.is_barrier { all } else { entered[from as usize].max(entered[to as usize]) };
                left = left.max(together) + message.occupancy;
                ends[from as usize] = ends[from as usize].max(left);
                ends[to as usize] = ends[to as usize].max(left + message.latency);
            }
        }
        if pattern.is_barrier {
            let last = ends.iter().copied().max().unwrap_or_default();
            ends.fill(last);
        }
    }
}
