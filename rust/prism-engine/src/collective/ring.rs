//! Rings under skewed arrivals.
//!
//! Rank `p` sends messages `0..J` to rank `p + 1`, one after the other. Message `j` can leave when the rank has arrived,
//! when message `j - 1` has left, and when message `j - q` of rank `p - 1` has come in (`q` slices per step: a step's
//! slices are forwarded one by one):
//!
//! ```text
//! X(p,j) = max( X(p,j-1), a(p), D(p-1,j-q) + l(p) )      D(p,j) = max( D(p,j-1), X(p,j) ) + o(p)
//! F(p)   = max( D(p,J-1), D(p-1,J-1) + l(p) )
//! ```
//!
//! `D(p,j)` is a longest path whose edges are *moves* (to the next rank, `q` messages on, cost `o + l` of the entered
//! rank) and *stays* (next message of the same rank, cost `o`). With `d` moves there are `j - q d` stays, all of them best
//! spent at the slowest link on the way:
//!
//! ```text
//! D(p,j) = max over 0 <= d <= j/q, s = p-d:  a(s) + o(s) + sum of (o+l) over s+1..=p  +  (j - q d) * max of o over s..=p
//! ```
//!
//! The inner maximum is replaced by one term per distinct `o`, restricted to paths that contain it (a smaller value than
//! the true maximum only lowers the term). Then for each value both ends of the window of `s` move forward with `p`, and
//! a monotone queue answers in O(1): O(ranks x distinct values), whatever the number of messages. Going round more than
//! once adds a constant per lap, so only the first or the last `n` values of `d` beyond a full lap matter.

use super::window::{MaxWindow, NEVER, distinct, is_never};

/// A run of equal messages.
#[derive(Clone, Copy, Debug)]
pub struct Phase<'a> {
    /// Messages every rank sends.
    pub messages: i64,
    /// Picoseconds a message occupies the link from each position to the next.
    pub occupancy: &'a [i64],
}

/// A ring and what runs over it. All times are picoseconds below 2^60.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    /// The messages: phases follow each other without a pause.
    pub phases: &'a [Phase<'a>],
    /// Latency of the link *into* each position.
    pub latency: &'a [i64],
    /// Slices per step, at least 1.
    pub slices: i64,
}

/// Working memory of [`completion`], to be reused.
#[derive(Debug, Default)]
pub struct RingScratch {
    window: MaxWindow,
    values: Vec<i64>,
    start: Vec<i64>,
    stay: Vec<i64>,
    tail: Vec<Vec<i64>>,
    next: Vec<Vec<i64>>,
}

/// When each position has sent and received everything: O(positions x distinct occupancies), times the square of the
/// slices for every change of message size.
pub fn completion(ring: &Ring<'_>, arrivals: &[i64], out: &mut [i64], scratch: &mut RingScratch) {
    let n = arrivals.len();
    if let Some(duration) = uniform_duration(ring)
        && arrivals.windows(2).all(|pair| pair[0] == pair[1])
    {
        out.fill(arrivals.first().map_or(0, |arrival| arrival + duration));
        return;
    }
    let slices = ring.slices as usize;
    for side in [&mut scratch.tail, &mut scratch.next] {
        side.resize_with(slices, Vec::new);
        for column in side.iter_mut().take(slices) {
            column.clear();
            column.resize(n, NEVER);
        }
    }
    scratch.stay.clear();
    scratch.stay.extend_from_slice(arrivals);
    let phases = ring.phases.iter().filter(|phase| phase.messages > 0);
    let last = phases.clone().count();
    if last == 0 || n < 2 {
        out.copy_from_slice(arrivals);
        return;
    }
    for (at, phase) in phases.enumerate() {
        run_phase(ring, phase, at == 0, at + 1 == last, scratch);
    }
    let departed = &scratch.tail[slices - 1];
    for (p, out) in out.iter_mut().enumerate() {
        *out = departed[p].max(departed[before(p, n)] + ring.latency[p]);
    }
}

/// Time from the common arrival to the common end if all links are alike and nobody is late: O(positions) to check.
fn uniform_duration(ring: &Ring<'_>) -> Option<i64> {
    let [phase] = ring.phases else { return None };
    let (&occupancy, &latency) = (phase.occupancy.first()?, ring.latency.first()?);
    let alike = phase.occupancy.iter().all(|o| *o == occupancy) && ring.latency.iter().all(|l| *l == latency);
    if !alike || phase.messages == 0 || phase.occupancy.len() < 2 {
        return None;
    }
    let moves = (phase.messages - 1) / ring.slices;
    let gain = occupancy + latency - ring.slices * occupancy;
    Some(phase.messages * occupancy + (moves * gain).max(0) + latency)
}

/// A ring of equal links on which one kind of messages gets all round. Times are picoseconds below 2^60.
///
/// With equal links the slowest one is everywhere: `D(p, J-1) = J o + max over d of (a(p-d) + d g)` with the gain
/// `g = o + l - q o` of a move over `q` stays. If it is negative the shortest way from each rank wins, otherwise the longest:
/// in both cases a maximum that is carried once round the ring, and once more to be complete. O(ranks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uniform {
    /// Picoseconds that all messages of a rank occupy its link.
    pub(super) all: i64,
    pub(super) latency: i64,
    pub(super) gain: i64,
    /// Most moves of a path.
    pub(super) moves: i64,
}

impl Uniform {
    /// `None` where messages do not get all round, so that ranks do not feel all others.
    #[must_use]
    pub fn new(ranks: usize, messages: i64, slices: i64, occupancy: i64, latency: i64) -> Option<Self> {
        let moves = (messages - 1) / slices;
        let gain = occupancy + latency - slices * occupancy;
        let gets_round = ranks >= 2 && messages >= 1 && moves >= ranks as i64 - 1;
        gets_round.then_some(Self { all: messages * occupancy, latency, gain, moves })
    }

    /// As [`completion`]. `ends` gets one entry per position.
    pub fn completion(&self, arrivals: &[i64], ends: &mut Vec<i64>) {
        let n = arrivals.len();
        ends.clear();
        ends.resize(n, 0);
        let mut best = NEVER;
        if self.gain <= 0 {
            for arrival in arrivals {
                best = (*arrival).max(best + self.gain);
            }
            for (arrival, end) in arrivals.iter().zip(ends.iter_mut()) {
                best = (*arrival).max(best + self.gain);
                *end = best + self.all;
            }
        } else {
            for arrival in arrivals.iter().rev() {
                best = (*arrival).max(best - self.gain);
            }
            // What is found at position `p` is what reaches position `p + moves`.
            let (lap, all) = ((self.moves % n as i64) as usize, self.all + self.moves * self.gain);
            let mut to = (n - 1 + lap) % n;
            for arrival in arrivals.iter().rev() {
                best = (*arrival).max(best - self.gain);
                ends[to] = best + all;
                to = if to == 0 { n - 1 } else { to - 1 };
            }
        }
        // Until here, when the last message leaves; a rank also waits for the last one to come in.
        let mut before = ends[n - 1];
        for end in ends {
            let received = before + self.latency;
            before = *end;
            *end = received.max(before);
        }
    }
}

/// Advances `scratch.tail` (departure of each rank's last `slices` messages) and `scratch.stay` over one phase. In the
/// last phase only the very last departure is computed.
fn run_phase(ring: &Ring<'_>, phase: &Phase<'_>, is_first: bool, is_last: bool, scratch: &mut RingScratch) {
    let (n, slices) = (ring.latency.len(), ring.slices as usize);
    let RingScratch { window, values, start, stay, tail, next } = scratch;
    distinct(phase.occupancy, values);
    let links = Links { occupancy: phase.occupancy, latency: ring.latency, slices: ring.slices, values };
    let first_wanted = if is_last { slices - 1 } else { 0 };
    for column in first_wanted..slices {
        let message = phase.messages - ring.slices + column as i64;
        let into = &mut next[column];
        if message < 0 {
            into.copy_from_slice(&tail[column + phase.messages as usize]);
            continue;
        }
        into.fill(NEVER);
        // The first message of a phase may follow the rank's own previous one; the others of the first step start with
        // the reception of a message of the phase before.
        let starts = if is_first { 1 } else { slices.min(message as usize + 1) };
        for (from, sent) in tail.iter().enumerate().take(starts) {
            start.clear();
            start.extend((0..n).map(|p| {
                let received = sent[before(p, n)] + ring.latency[p];
                if from == 0 { stay[p].max(received) } else { received }
            }));
            reach(&links, start, message - from as i64, into, window);
        }
    }
    std::mem::swap(tail, next);
    stay.copy_from_slice(&tail[slices - 1]);
}

fn before(p: usize, n: usize) -> usize {
    if p == 0 { n - 1 } else { p - 1 }
}

/// The links of one phase.
struct Links<'a> {
    occupancy: &'a [i64],
    latency: &'a [i64],
    slices: i64,
    /// Distinct occupancies, ascending.
    values: &'a [i64],
}

impl Links<'_> {
    /// Cost of moving on to position `p`.
    fn enter(&self, p: usize) -> i64 {
        self.occupancy[p] + self.latency[p]
    }
}

/// Raises `into[p]` to the departure of message `budget` of rank `p`, if rank `s` may start message 0 at `start[s]`.
fn reach(links: &Links<'_>, start: &[i64], budget: i64, into: &mut [i64], window: &mut MaxWindow) {
    let n = start.len() as i64;
    let moves = budget / links.slices;
    for &value in links.values {
        reach_within_lap(links, start, budget, moves.min(n - 2), value, into, window);
    }
    if moves >= n - 1 {
        reach_beyond_lap(links, start, budget, moves, into, window);
    }
}

/// Paths of at most `moves` moves, so that not every link is passed; stays at a link of occupancy `value`.
fn reach_within_lap(
    links: &Links<'_>,
    start: &[i64],
    budget: i64,
    moves: i64,
    value: i64,
    into: &mut [i64],
    window: &mut MaxWindow,
) {
    let n = start.len();
    let rank = |unrolled: usize| if unrolled < n { unrolled } else { unrolled - n };
    window.clear();
    // Positions are unrolled: `n..2n` are the ranks asked for, the `moves` before them the starts in front of rank 0.
    let first = n - moves as usize;
    let (mut queued, mut queued_path, mut path) = (first, 0, 0);
    for at in first..2 * n {
        let p = rank(at);
        path += links.enter(p);
        if links.occupancy[p] == value {
            // Starts up to here pass a link of this occupancy on their way to every later position.
            while queued <= at {
                let s = rank(queued);
                queued_path += links.enter(s);
                if !is_never(start[s]) {
                    let tilt = links.slices * queued as i64 * value;
                    window.push(queued as i64, start[s] + links.occupancy[s] - queued_path + tilt);
                }
                queued += 1;
            }
        }
        if at >= n {
            let key = window.max_from(at as i64 - moves);
            if !is_never(key) {
                into[p] = into[p].max(key + path + (budget - links.slices * at as i64) * value);
            }
        }
    }
}

/// Paths of `n - 1` moves or more, up to `moves`: they pass every link, so all stays are at the slowest one.
fn reach_beyond_lap(
    links: &Links<'_>,
    start: &[i64],
    budget: i64,
    moves: i64,
    into: &mut [i64],
    window: &mut MaxWindow,
) {
    let n = start.len();
    let laps = n as i64;
    let slowest = *links.values.last().expect("a ring has links");
    let lap: i64 = (0..n).map(|p| links.enter(p)).sum();
    // A further lap costs `lap` and takes away `slices * n` stays: its sign says whether the longest or the shortest of
    // these paths win.
    let (least, most) = if lap > links.slices * laps * slowest {
        ((laps - 1).max(moves - laps + 1), moves)
    } else {
        (laps - 1, moves.min(2 * laps - 2))
    };
    window.clear();
    // Unrolled position `x` is rank `x - most` (mod n); rank `p` sits at `p + most`, its starts at `p..=p + most - least`.
    let rank = |x: i64| (x - most).rem_euclid(laps) as usize;
    let mut path: i64 = (1..=most % laps).map(|x| links.enter(rank(x))).sum::<i64>() + most / laps * lap;
    let (mut queued, mut queued_path) = (0, 0);
    for (p, into) in into.iter_mut().enumerate() {
        if p > 0 {
            path += links.enter(p);
        }
        while queued <= p as i64 + most - least {
            let s = rank(queued);
            if queued > 0 {
                queued_path += links.enter(s);
            }
            if !is_never(start[s]) {
                let tilt = links.slices * queued * slowest;
                window.push(queued, start[s] + links.occupancy[s] - queued_path + tilt);
            }
            queued += 1;
        }
        let key = window.max_from(p as i64);
        if !is_never(key) {
            *into = (*into).max(key + path + (budget - links.slices * (p as i64 + most)) * slowest);
        }
    }
}
