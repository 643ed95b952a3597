//! Slow, obvious evaluators: every message of every collective, one by one.

use prism_engine::collective::credits::CreditLinks;
use std::collections::VecDeque;

/// `X` and `D` of the ring's definition, for every message of every rank. `occupancy[phase][sender]`.
pub(crate) fn ring(
    messages: &[i64],
    occupancy: &[Vec<i64>],
    latency: &[i64],
    slices: usize,
    arrivals: &[i64],
) -> Vec<i64> {
    let n = arrivals.len();
    let costs: Vec<&Vec<i64>> =
        messages.iter().zip(occupancy).flat_map(|(count, costs)| (0..*count).map(move |_| costs)).collect();
    let mut departed: Vec<Vec<i64>> = Vec::new();
    let mut ready = arrivals.to_vec();
    for (j, cost) in costs.iter().enumerate() {
        let row = (0..n)
            .map(|p| {
                if j >= slices {
                    ready[p] = ready[p].max(departed[j - slices][(p + n - 1) % n] + latency[p]);
                }
                let port = if j > 0 { departed[j - 1][p] } else { i64::MIN };
                port.max(ready[p]) + cost[p]
            })
            .collect();
        departed.push(row);
    }
    let Some(last) = departed.last() else { return arrivals.to_vec() };
    (0..n).map(|p| last[p].max(last[(p + n - 1) % n] + latency[p]).max(ready[p])).collect()
}

/// A tree all-reduce: `parent[rank]`, `None` for the root; edge costs by child. Chunk `j` leaves for the parent when it
/// has come from all children, and for a child when it has come from the parent.
pub(crate) struct TreeCase {
    pub(crate) parent: Vec<Option<usize>>,
    pub(crate) up: Vec<(i64, i64)>,
    pub(crate) down: Vec<(i64, i64)>,
    pub(crate) chunks: usize,
}

impl TreeCase {
    fn reduced(&self, rank: usize, chunk: usize, arrivals: &[i64], sent: &[Vec<i64>]) -> i64 {
        let from_children = (0..arrivals.len())
            .filter(|child| self.parent[*child] == Some(rank))
            .map(|c| sent[c][chunk] + self.up[c].1);
        from_children.chain([arrivals[rank]]).max().expect("the rank itself")
    }

    /// Ranks, parents first.
    fn order(&self) -> Vec<usize> {
        let depth = |rank: usize| std::iter::successors(Some(rank), |at| self.parent[*at]).count();
        let mut order: Vec<_> = (0..self.parent.len()).collect();
        order.sort_by_key(|rank| depth(*rank));
        order
    }

    /// The way down of a chunk starts when it has been reduced.
    pub(crate) fn completion(&self, arrivals: &[i64]) -> Vec<i64> {
        self.run(arrivals, false)
    }

    /// The way down starts, at every rank, when its own last chunk has left upwards (and at the root when all are reduced).
    pub(crate) fn up_then_down(&self, arrivals: &[i64]) -> Vec<i64> {
        self.run(arrivals, true)
    }

    fn run(&self, arrivals: &[i64], waits: bool) -> Vec<i64> {
        let n = arrivals.len();
        let order = self.order();
        let mut sent_up = vec![vec![0; self.chunks]; n];
        for chunk in 0..self.chunks {
            for &rank in order.iter().rev() {
                let port = if chunk > 0 { sent_up[rank][chunk - 1] } else { i64::MIN };
                sent_up[rank][chunk] = port.max(self.reduced(rank, chunk, arrivals, &sent_up)) + self.up[rank].0;
            }
        }
        let mut has = vec![vec![0; self.chunks]; n];
        let mut sent_down = vec![vec![0; self.chunks]; n];
        for chunk in 0..self.chunks {
            for &rank in &order {
                let Some(parent) = self.parent[rank] else {
                    let reduced = if waits { self.chunks - 1 } else { chunk };
                    has[rank][chunk] = self.reduced(rank, reduced, arrivals, &sent_up);
                    continue;
                };
                let mut port = if chunk > 0 { sent_down[rank][chunk - 1] } else { i64::MIN };
                if waits && self.parent[parent].is_some() {
                    port = port.max(sent_up[parent][self.chunks - 1]);
                }
                sent_down[rank][chunk] = port.max(has[parent][chunk]) + self.down[rank].0;
                has[rank][chunk] = sent_down[rank][chunk] + self.down[rank].1;
            }
        }
        let last = self.chunks - 1;
        (0..n)
            .map(|rank| {
                let to_children = (0..n).filter(|child| self.parent[*child] == Some(rank)).map(|c| sent_down[c][last]);
                let to_parent = self.parent[rank].map(|_| sent_up[rank][last]);
                to_children.chain(to_parent).chain([has[rank][last]]).max().expect("the rank itself")
            })
            .collect()
    }
}

/// A chain: chunk `j` leaves a rank when it has come in.
pub(crate) fn chain(chunks: usize, occupancy: &[i64], latency: &[i64], arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let mut ends = arrivals.to_vec();
    let mut has = vec![arrivals[0]; chunks];
    for p in 0..n - 1 {
        let mut port = i64::MIN;
        for chunk in &mut has {
            port = port.max(*chunk) + occupancy[p];
            *chunk = (port + latency[p + 1]).max(arrivals[p + 1]);
        }
        ends[p] = ends[p].max(port);
        ends[p + 1] = ends[p + 1].max(port + latency[p + 1]);
    }
    ends
}

/// All-to-all with one send port and one receive port per rank and equal messages: round `k` sends to `r + k`.
pub(crate) fn all_to_all(cost: i64, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let (mut send, mut receive) = (arrivals.to_vec(), arrivals.to_vec());
    for k in 1..n {
        let ends: Vec<_> = (0..n).map(|r| send[r].max(receive[(r + k) % n]) + cost).collect();
        for r in 0..n {
            send[r] = ends[r];
            receive[(r + k) % n] = ends[r];
        }
    }
    send.iter().zip(&receive).map(|(send, receive)| *send.max(receive)).collect()
}

/// A ring of equal links whose connections have `slots` slots, each known to be free `credit` after its message is taken.
pub(crate) fn ring_with_credits(links: &CreditLinks, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let (q, k) = (links.slices as usize, links.slots as usize);
    let total = links.messages as usize;
    let mut ready = vec![vec![0; n]; total + q];
    let mut departed = vec![vec![0; n]; total];
    for j in 0..total + q {
        for p in 0..n {
            let mut time = if j > 0 { ready[j - 1][p].max(arrivals[p]) } else { arrivals[p] };
            if j >= q {
                time = time.max(departed[j - q][(p + n - 1) % n] + links.latency);
            }
            if (k..total).contains(&j) {
                time = time.max(ready[j + q - k][(p + 1) % n] + links.credit_latency);
            }
            ready[j][p] = time;
            if j < total {
                let port = if j > 0 { departed[j - 1][p] } else { i64::MIN };
                departed[j][p] = port.max(time) + links.occupancy;
            }
        }
    }
    (0..n).map(|p| ready[total + q - 1][p].max(departed[total - 1][p])).collect()
}

/// The same for a chain.
pub(crate) fn chain_with_credits(links: &CreditLinks, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let (total, k) = (links.messages as usize, links.slots as usize);
    let mut ready = vec![vec![0; n]; total];
    let mut departed = vec![vec![0; n]; total];
    for j in 0..total {
        for p in 0..n {
            let mut time = if j > 0 { ready[j - 1][p].max(arrivals[p]) } else { arrivals[p] };
            if p > 0 {
                time = time.max(departed[j][p - 1] + links.latency);
            }
            if p + 1 < n && j >= k {
                time = time.max(ready[j - k][p + 1] + links.credit_latency);
            }
            ready[j][p] = time;
            let port = if j > 0 { departed[j - 1][p] } else { i64::MIN };
            departed[j][p] = port.max(time) + links.occupancy;
        }
    }
    (0..n)
        .map(|p| if p + 1 < n { departed[total - 1][p].max(ready[total - 1][p]) } else { ready[total - 1][p] })
        .collect()
}

/// Ranks in a line or in a circle as machines that carry out one instruction after the other. Instruction `i` takes message
/// `i - lag` from the rank before and sends message `i` to the rank after; it starts when that message is there and a slot for
/// its own is free. Taking a message frees its slot for the sender a credit latency later.
#[derive(Debug)]
pub(crate) struct Machines<'a> {
    pub(crate) is_ring: bool,
    /// Instructions between sending a message and taking the one of the same number: slices of a ring, 0 in a line.
    pub(crate) lag: usize,
    /// Time that message `i` keeps the link of each sender busy.
    pub(crate) occupancy: Vec<&'a [i64]>,
    /// Latency of the link into each rank.
    pub(crate) latency: &'a [i64],
    /// Slots of a connection and credit latency.
    pub(crate) credits: Option<(usize, i64)>,
}

struct Machine {
    instruction: usize,
    time: i64,
    port: i64,
    inbox: VecDeque<i64>,
    slots: VecDeque<i64>,
}

impl Machines<'_> {
    /// Ends, or `None` if the machines block each other.
    pub(crate) fn run(&self, arrivals: &[i64]) -> Option<Vec<i64>> {
        let (n, total) = (arrivals.len(), self.occupancy.len());
        let slots = self.credits.map_or(total, |(slots, _)| slots);
        let new = |arrival: &i64| Machine {
            instruction: 0,
            time: *arrival,
            port: *arrival,
            inbox: VecDeque::new(),
            slots: std::iter::repeat_n(i64::MIN, slots).collect(),
        };
        let mut machines: Vec<_> = arrivals.iter().map(new).collect();
        while (0..n).any(|p| self.step(&mut machines, p)) {}
        machines
            .iter()
            .all(|machine| machine.instruction == total + self.lag)
            .then(|| machines.iter().map(|machine| machine.time.max(machine.port)).collect())
    }

    fn step(&self, machines: &mut [Machine], p: usize) -> bool {
        let (n, total) = (machines.len(), self.occupancy.len());
        let machine = &mut machines[p];
        let i = machine.instruction;
        let takes = i >= self.lag && (self.is_ring || p > 0);
        let sends = i < total && (self.is_ring || p + 1 < n);
        if i == total + self.lag || (takes && machine.inbox.is_empty()) || (sends && machine.slots.is_empty()) {
            return false;
        }
        machine.instruction += 1;
        if takes {
            machine.time = machine.time.max(machine.inbox.pop_front().expect("looked at above"));
        }
        if sends {
            machine.time = machine.time.max(machine.slots.pop_front().expect("looked at above"));
            machine.port = machine.port.max(machine.time) + self.occupancy[i][p];
        }
        let (time, port) = (machine.time, machine.port);
        if takes {
            let credit = self.credits.map_or(0, |(_, latency)| latency);
            machines[(p + n - 1) % n].slots.push_back(time + credit);
        }
        if sends {
            let next = (p + 1) % n;
            machines[next].inbox.push_back(port + self.latency[next]);
        }
        true
    }
}

/// All-to-all with a message of its own cost for every pair, round by round: in round `k` rank `r` sends to `r + k`.
pub(crate) fn unequal_all_to_all(costs: &[Vec<i64>], arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    // When the send port and the receive port of every rank are free.
    let (mut out, mut into) = (arrivals.to_vec(), arrivals.to_vec());
    for k in 1..n {
        let ends: Vec<_> = (0..n).map(|r| out[r].max(into[(r + k) % n]) + costs[r][(r + k) % n]).collect();
        out.clone_from(&ends);
        (0..n).for_each(|r| into[(r + k) % n] = ends[r]);
    }
    (0..n).map(|r| out[r].max(into[r])).collect()
}

/// All-to-all whose round `k` starts at a rank when its own round before and that of the rank `k` before it are over.
pub(crate) fn synchronous_all_to_all(cost: i64, rounds: usize, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    (1..=rounds)
        .fold(arrivals.to_vec(), |now, k| (0..n).map(|r| now[r].max(now[(r + n * rounds - k) % n]) + cost).collect())
}
