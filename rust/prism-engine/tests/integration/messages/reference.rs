//! The evaluator again, as plainly as the rule can be written: one heap, lists searched from the front, every op's own clock.

use prism_engine::ids::Rank;
use prism_engine::messages::loggops::LogGops;
use prism_engine::messages::{Dependency, MessageOp, MessageProgram, OpIndex};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Time, number of creation, whether a message arrives, rank and index of the op.
type Event = (u64, u64, bool, u32, u32);

struct Arrived {
    from: u32,
    op: u32,
    end: u64,
}

struct World<'a> {
    program: &'a MessageProgram,
    p: LogGops,
    events: BinaryHeap<Reverse<Event>>,
    created: u64,
    /// Dependencies left and latest of their times, by rank and op.
    waits: BTreeMap<(u32, u32), (usize, u64)>,
    cpu: BTreeMap<(u32, u8), u64>,
    nic_out: BTreeMap<(u32, u8), u64>,
    nic_in: BTreeMap<(u32, u8), u64>,
    posted: BTreeMap<u32, Vec<u32>>,
    arrived: BTreeMap<u32, Vec<Arrived>>,
    ready: Vec<(u32, u32, u64)>,
    ended: u64,
}

/// When each rank ends; `None` if the job blocks or leaves messages. Parameters per byte must be whole.
pub(crate) fn end_ticks(program: &MessageProgram, parameters: &LogGops) -> Option<Vec<u64>> {
    let mut world = World {
        program,
        p: *parameters,
        events: BinaryHeap::new(),
        created: 0,
        waits: BTreeMap::new(),
        cpu: BTreeMap::new(),
        nic_out: BTreeMap::new(),
        nic_in: BTreeMap::new(),
        posted: BTreeMap::new(),
        arrived: BTreeMap::new(),
        ready: Vec::new(),
        ended: 0,
    };
    for rank in 0..program.num_ranks() {
        let ops = program.rank(Rank(rank));
        for op in 0..ops.len() {
            ops.successors(OpIndex(op)).for_each(|(to, _)| world.waits.entry((rank, to.0)).or_default().0 += 1);
        }
        let free = (0..ops.len()).filter(|op| !world.waits.contains_key(&(rank, *op)));
        world.ready.extend(free.map(|op| (rank, op, 0)));
        world.create();
    }
    while let Some(Reverse(event)) = world.events.pop() {
        world.happen(event);
        world.create();
    }
    let all = world.ended == program.num_ops() && world.arrived.values().all(Vec::is_empty);
    let end = |rank| (0..=u8::MAX).filter_map(|lane| world.cpu.get(&(rank, lane))).copied().max().unwrap_or(0);
    all.then(|| (0..program.num_ranks()).map(end).collect())
}

impl World<'_> {
    fn op(&self, rank: u32, op: u32) -> MessageOp {
        self.program.rank(Rank(rank)).op(OpIndex(op))
    }

    fn is_rendezvous(&self, rank: u32, op: u32) -> bool {
        let ops = self.program.rank(Rank(rank));
        let MessageOp::Send { bytes, .. } = ops.op(OpIndex(op)) else { panic!("a send") };
        bytes > self.p.rendezvous_above || ops.is_rendezvous(OpIndex(op))
    }

    fn happen(&mut self, (time, number, is_message, rank, op): Event) {
        let (what, lanes) = (self.op(rank, op), self.program.rank(Rank(rank)).lanes(OpIndex(op)));
        let host = match what {
            MessageOp::Send { peer, .. } if is_message => peer.0,
            _ => rank,
        };
        let (cpu, nic) = ((host, lanes.cpu), (host, lanes.nic));
        let nics = if is_message { &self.nic_in } else { &self.nic_out };
        let mut available = self.cpu.get(&cpu).copied().unwrap_or(0);
        if matches!(what, MessageOp::Send { .. }) {
            available = available.max(nics.get(&nic).copied().unwrap_or(0));
        }
        if available > time && !matches!(what, MessageOp::Recv { .. }) {
            self.events.push(Reverse((available, number, is_message, rank, op)));
            return;
        }
        let (g, gb, ob) = (self.p.gap, self.p.gap_per_byte as u64, self.p.overhead_per_byte as u64);
        match what {
            MessageOp::Calc { ticks } => {
                self.cpu.insert(cpu, time + ticks);
                self.start(rank, op, time);
                self.end(rank, op, time + ticks);
            }
            MessageOp::Send { bytes, .. } if !is_message => {
                let rest = bytes.saturating_sub(1);
                let end = time + self.p.overhead + rest * ob;
                self.cpu.insert(cpu, end);
                self.nic_out.insert(nic, time + g + rest * gb);
                self.created += 1;
                let arrival = time + self.p.overhead + self.p.latency;
                self.events.push(Reverse((arrival, self.created, true, rank, op)));
                self.start(rank, op, time);
                if !self.is_rendezvous(rank, op) {
                    self.end(rank, op, end);
                }
            }
            MessageOp::Send { bytes, tag, .. } => {
                let rest = bytes.saturating_sub(1);
                let end = time + self.p.overhead + rest * ob.max(gb);
                self.cpu.insert(cpu, end);
                self.nic_in.insert(nic, time + g + rest * gb);
                let posted = self.posted.entry(host).or_default().clone();
                let found = posted.iter().position(|recv| accepts(self.op(host, *recv), rank, tag));
                match found {
                    Some(at) => {
                        self.posted.entry(host).or_default().remove(at);
                        self.end_rendezvous(rank, op, time);
                        self.end(host, posted[at], end);
                    }
                    None => self.arrived.entry(host).or_default().push(Arrived { from: rank, op, end }),
                }
            }
            MessageOp::Recv { .. } => {
                self.start(rank, op, time);
                let tag = |sent: &Arrived| match self.op(sent.from, sent.op) {
                    MessageOp::Send { tag, .. } => tag,
                    other => panic!("{other:?} is not a send"),
                };
                let waiting = self.arrived.get(&rank).map_or(&[][..], Vec::as_slice);
                match waiting.iter().position(|sent| accepts(what, sent.from, tag(sent))) {
                    Some(at) => {
                        let sent = self.arrived.get_mut(&rank).unwrap().remove(at);
                        self.end_rendezvous(sent.from, sent.op, time);
                        self.end(rank, op, time.max(sent.end));
                    }
                    None => self.posted.entry(rank).or_default().push(op),
                }
            }
        }
    }

    fn end_rendezvous(&mut self, rank: u32, op: u32, time: u64) {
        if self.is_rendezvous(rank, op) {
            let lanes = self.program.rank(Rank(rank)).lanes(OpIndex(op));
            let cpu = self.cpu.entry((rank, lanes.cpu)).or_default();
            *cpu = time.max(*cpu);
            let nic = self.nic_out.entry((rank, lanes.nic)).or_default();
            *nic = time.max(*nic);
            self.end(rank, op, time);
        }
    }

    fn start(&mut self, rank: u32, op: u32, time: u64) {
        self.release(rank, op, Dependency::Start, time);
    }

    fn end(&mut self, rank: u32, op: u32, time: u64) {
        self.ended += 1;
        self.release(rank, op, Dependency::End, time);
    }

    fn release(&mut self, rank: u32, op: u32, of: Dependency, time: u64) {
        for (to, kind) in self.program.rank(Rank(rank)).successors(OpIndex(op)) {
            if kind == of {
                let (left, latest) = self.waits.get_mut(&(rank, to.0)).unwrap();
                *left -= 1;
                *latest = time.max(*latest);
                if *left == 0 {
                    self.ready.push((rank, to.0, *latest));
                }
            }
        }
    }

    fn create(&mut self) {
        let order = |op| match op {
            MessageOp::Send { .. } => 0,
            MessageOp::Recv { .. } => 1,
            MessageOp::Calc { .. } => 2,
        };
        let mut ready = std::mem::take(&mut self.ready);
        ready.sort_by_key(|(rank, op, _)| (*rank, order(self.op(*rank, *op))));
        for (rank, op, time) in ready {
            let lanes = self.program.rank(Rank(rank)).lanes(OpIndex(op));
            let mut time = time.max(self.cpu.get(&(rank, lanes.cpu)).copied().unwrap_or(0));
            if matches!(self.op(rank, op), MessageOp::Send { .. }) {
                time = time.max(self.nic_out.get(&(rank, lanes.nic)).copied().unwrap_or(0));
            }
            self.created += 1;
            self.events.push(Reverse((time, self.created, false, rank, op)));
        }
    }
}

fn accepts(recv: MessageOp, from: u32, sent: u32) -> bool {
    let MessageOp::Recv { peer, tag, .. } = recv else { panic!("{recv:?} is not a receive") };
    peer.is_none_or(|peer| peer.0 == from) && tag.is_none_or(|tag| tag == sent)
}
