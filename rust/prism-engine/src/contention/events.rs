//! The job event by event, in order of time.

use super::live::Collectives;
use super::network::{Carrier, Event as Traffic, Network};
use super::overlap::{Overlap, Running};
use super::queue::{Event, Queue};
use super::{Contention, Evaluation, stuck};
use crate::lower::{Enter, Job, NO_NODE, Work};
use crate::sim::SimError;
use crate::units::SimTime;

/// Times of all nodes. Some ten queue operations per message, besides what the network's rule costs.
pub(super) fn evaluate(job: &Job, contention: Contention, overlap: &Overlap) -> Result<Evaluation, SimError> {
    let mut engine = Engine::new(job, contention, *overlap);
    engine.run();
    if engine.reached < job.nodes.len() {
        return Err(stuck(job, engine.reached));
    }
    let Gpus { stretched, added, .. } = engine.gpus;
    Ok(Evaluation { ends: engine.ends, stretched, added })
}

/// What runs on each rank's GPU.
#[derive(Default)]
struct Gpus {
    /// Launches of communication under way.
    launches: Vec<u32>,
    /// Computations that may be slowed down.
    running: Vec<Vec<Running>>,
    stretched: i128,
    added: i128,
}

struct Engine<'a> {
    job: &'a Job,
    overlap: Overlap,
    after: (Vec<u32>, Vec<u32>),
    pending: Vec<u32>,
    ends: Vec<SimTime>,
    reached: usize,
    /// Nodes released at the present time.
    ready: Vec<u32>,
    queue: Queue,
    now: i64,
    network: Network<'a>,
    live: Collectives,
    gpus: Gpus,
    lanes: Vec<u32>,
    out: Vec<u32>,
}

impl<'a> Engine<'a> {
    fn new(job: &'a Job, contention: Contention, overlap: Overlap) -> Self {
        let pending = job.nodes.pending();
        let ready = (0..job.nodes.len() as u32).rev().filter(|node| pending[*node as usize] == 0).collect();
        let ranks = if overlap.is_none() { 0 } else { job.world_size as usize };
        Self {
            overlap,
            after: job.nodes.after(),
            pending,
            ends: vec![SimTime::ZERO; job.nodes.len()],
            reached: 0,
            ready,
            queue: Queue::default(),
            now: 0,
            network: Network::new(job, contention),
            live: Collectives::new(job.instances.len()),
            gpus: Gpus { launches: vec![0; ranks], running: vec![Vec::new(); ranks], ..Gpus::default() },
            lanes: Vec::new(),
            out: Vec::new(),
            job,
        }
    }

    fn run(&mut self) {
        self.run_ready();
        loop {
            if self.queue.is_over() {
                let queue = &mut self.queue;
                self.network.settle(self.now, |time, event| queue.push(time, Event::Traffic(event)));
            }
            let Some((time, event)) = self.queue.pop() else { return };
            self.now = time;
            self.handle(event);
            self.run_ready();
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Node(node) => self.reach(node),
            Event::Compute { rank, node, version } => self.end_compute(rank, node, version),
            Event::Member(enter) => self.take_part(enter),
            Event::Traffic(Traffic::Left(carrier)) => self.left(carrier),
            Event::Traffic(Traffic::Arrived(carrier)) => self.arrived(carrier),
            Event::Traffic(Traffic::Head(carrier)) => {
                let time = self.network.head(self.now, carrier);
                self.queue.push(time, Event::Traffic(Traffic::Arrived(carrier)));
            }
            Event::Traffic(Traffic::Flow { flow, version }) => {
                if let Some(carrier) = self.network.flow_ended(self.now, flow, version) {
                    self.left(carrier);
                }
            }
        }
    }

    fn release(&mut self, node: u32) {
        self.pending[node as usize] -= 1;
        if self.pending[node as usize] == 0 {
            self.ready.push(node);
        }
    }

    fn run_ready(&mut self) {
        while let Some(node) = self.ready.pop() {
            let delay = self.job.nodes.delay[node as usize].as_ps();
            if delay == 0 {
                self.reach(node);
                continue;
            }
            match self.job.nodes.work[node as usize] {
                Work::Compute(class, _) if self.overlap.ppm(class) > 1_000_000 => {
                    let rank = self.job.nodes.rank[node as usize];
                    let running = Running::new(node, self.overlap.ppm(class), delay, self.now);
                    let end = running.end(self.gpus.launches[rank as usize] > 0);
                    self.gpus.running[rank as usize].push(running);
                    self.queue.push(end, Event::Compute { rank, node, version: 0 });
                }
                _ => self.queue.push(self.now + delay, Event::Node(node)),
            }
        }
    }

    /// Everything of a node is over.
    fn reach(&mut self, node: u32) {
        let at = node as usize;
        self.reached += 1;
        self.ends[at] = SimTime::from_ps(self.now);
        match self.job.nodes.work[at] {
            Work::Begin { enter } => {
                self.count_launch(self.job.nodes.rank[at], true);
                self.enter(enter);
            }
            Work::Enter { enter } => self.enter(enter),
            Work::End => self.count_launch(self.job.nodes.rank[at], false),
            Work::Transfer(transfer) => self.send(Carrier::Transfer(transfer)),
            Work::Join | Work::Compute(..) => {}
        }
        for next in self.after.0[at]..self.after.0[at + 1] {
            self.release(self.after.1[next as usize]);
        }
    }

    fn enter(&mut self, enter: u32) {
        if enter == NO_NODE {
            return;
        }
        let launch = self.job.enters[enter as usize].launch.as_ps();
        self.queue.push(self.now + launch, Event::Member(enter));
    }

    fn take_part(&mut self, enter: u32) {
        let Enter { instance: number, member, .. } = self.job.enters[enter as usize];
        let pattern = self.job.pattern(number);
        let live = self.live.enter(number, pattern);
        live.enter(pattern, member, &mut self.lanes, &mut self.out);
        self.go_on(number);
    }

    fn send(&mut self, carrier: Carrier) {
        let queue = &mut self.queue;
        self.network.send(self.now, carrier, |time, event| queue.push(time, Event::Traffic(event)));
    }

    fn left(&mut self, carrier: Carrier) {
        if let Some(arrival) = self.network.left(self.now, carrier) {
            self.queue.push(arrival, Event::Traffic(Traffic::Arrived(carrier)));
        }
        match carrier {
            Carrier::Transfer(transfer) => self.release(self.job.transfers[transfer as usize].ends.0),
            Carrier::Lane { instance, lane, number } => {
                let pattern = self.job.pattern(instance);
                let live = self.live.of(instance);
                live.left(pattern, lane, number, &mut self.out);
                self.lanes.push(lane);
                self.go_on(instance);
            }
        }
    }

    fn arrived(&mut self, carrier: Carrier) {
        match carrier {
            Carrier::Transfer(transfer) => self.release(self.job.transfers[transfer as usize].ends.1),
            Carrier::Lane { instance, lane, number } => {
                let pattern = self.job.pattern(instance);
                let live = self.live.of(instance);
                live.arrived(pattern, lane, number, &mut self.out);
                self.lanes.extend(pattern.fed(lane));
                self.go_on(instance);
            }
        }
    }

    /// Sends what may go, and lets members leave that are through.
    fn go_on(&mut self, instance: u32) {
        let pattern = self.job.pattern(instance);
        for index in 0..self.lanes.len() {
            let lane = self.lanes[index];
            let live = self.live.of(instance);
            if let Some(number) = live.send(pattern, lane) {
                self.send(Carrier::Lane { instance, lane, number });
            }
        }
        self.lanes.clear();
        for index in 0..self.out.len() {
            self.release(self.job.exit(instance, self.out[index]));
            let live = self.live.of(instance);
            if live.leave(pattern) {
                self.live.end(instance);
            }
        }
        self.out.clear();
    }

    /// A launch of communication begins or ends on a rank.
    fn count_launch(&mut self, rank: u32, begins: bool) {
        let Some(launches) = self.gpus.launches.get_mut(rank as usize) else { return };
        let was_slowed = *launches > 0;
        *launches = if begins { *launches + 1 } else { *launches - 1 };
        let is_slowed = *launches > 0;
        if was_slowed == is_slowed {
            return;
        }
        for running in &mut self.gpus.running[rank as usize] {
            let passed = running.advance(was_slowed, self.now);
            self.gpus.stretched += if was_slowed { i128::from(passed) } else { 0 };
            running.version += 1;
            let event = Event::Compute { rank, node: running.node, version: running.version };
            self.queue.push(running.end(is_slowed), event);
        }
    }

    fn end_compute(&mut self, rank: u32, node: u32, version: u32) {
        let all = &mut self.gpus.running[rank as usize];
        let Some(at) = all.iter().position(|running| (running.node, running.version) == (node, version)) else {
            return;
        };
        let mut running = all.remove(at);
        let is_slowed = self.gpus.launches[rank as usize] > 0;
        let passed = running.advance(is_slowed, self.now);
        self.gpus.stretched += if is_slowed { i128::from(passed) } else { 0 };
        let start = self.start_of(node);
        self.gpus.added += i128::from(self.now - start) - i128::from(self.job.nodes.delay[node as usize].as_ps());
        self.reach(node);
    }

    /// When everything before a node was over.
    fn start_of(&self, node: u32) -> i64 {
        let before = self.job.nodes.before(node).iter();
        before.map(|before| self.ends[*before as usize].as_ps()).max().unwrap_or(0)
    }
}
