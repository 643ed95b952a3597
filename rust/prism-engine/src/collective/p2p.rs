//! Messages, and the collectives NCCL builds from them: all-to-all, gather, scatter.

use super::shape::CommShape;
use crate::cost::comm::{Link, nanoseconds, transfer_time};
use crate::perturb::LinkChange;
use crate::profile::Profile;
use crate::units::SimTime;

/// A message of `bytes` from global rank `from` to global rank `to`: the ends of the send and of the receive.
///
/// Rendezvous: nothing moves before both halves are there and launched. The send is over when the bytes have left (they
/// occupy one NVLink port or one network card), the receive when they have arrived.
#[must_use]
pub fn message(
    profile: &Profile,
    from: u32,
    to: u32,
    bytes: u64,
    send_arrival: SimTime,
    recv_arrival: SimTime,
) -> (SimTime, SimTime) {
    transfer(profile, (from, to), bytes, send_arrival.max(recv_arrival), |link| link)
}

/// The same over a link that is not as it should be.
#[must_use]
pub fn message_over(
    profile: &Profile,
    (from, to): (u32, u32),
    bytes: u64,
    (send_arrival, recv_arrival): (SimTime, SimTime),
    change: LinkChange,
) -> (SimTime, SimTime) {
    transfer(profile, (from, to), bytes, send_arrival.max(recv_arrival), |link| change.apply(link))
}

#[inline]
fn transfer(
    profile: &Profile,
    (from, to): (u32, u32),
    bytes: u64,
    arrival: SimTime,
    change: impl FnOnce(Link) -> Link,
) -> (SimTime, SimTime) {
    let start = arrival + nanoseconds(profile.network.collective_launch_ns);
    if from == to {
        // A copy inside the device: it reads and writes every byte.
        let end = start + transfer_time(bytes.saturating_mul(2), profile.device.memory_bytes_per_s);
        return (end, end);
    }
    let link = change(Link::between(profile, from, to));
    let sent = start + link.occupancy(bytes);
    (sent, sent + link.latency)
}

/// The link between two members: the GPU's NVLink port inside a node, one network card otherwise.
fn link(shape: &CommShape, a: u32, b: u32) -> Link {
    let is_inside = shape.node[a as usize] == shape.node[b as usize];
    let link = if is_inside { shape.pair } else { shape.card };
    shape.changes.as_ref().map_or(link, |changes| changes.between(a, b, is_inside).apply(link))
}

/// The other members in the order in which the root serves them.
fn peers(shape: &CommShape, root: u32) -> impl Iterator<Item = u32> {
    let n = shape.len() as u32;
    (1..n).map(move |distance| (root + distance) % n)
}

/// Gather: the root receives from one member after the other, in order of distance from itself; each message is a
/// rendezvous, so a late member holds up those behind it. O(members).
pub(crate) fn gather(shape: &CommShape, root: u32, bytes_each: u64, arrivals: &[i64], out: &mut [i64]) {
    let mut port = SimTime::from_ps(arrivals[root as usize]);
    let mut landed = port;
    for peer in peers(shape, root) {
        let link = link(shape, peer, root);
        port = port.max(SimTime::from_ps(arrivals[peer as usize])) + link.occupancy(bytes_each);
        landed = landed.max(port + link.latency);
        out[peer as usize] = port.as_ps();
    }
    out[root as usize] = landed.as_ps();
}

/// Scatter: the root sends to one member after the other; the mirror image of [`gather`]. O(members).
pub(crate) fn scatter(shape: &CommShape, root: u32, bytes_each: u64, arrivals: &[i64], out: &mut [i64]) {
    let mut port = SimTime::from_ps(arrivals[root as usize]);
    for peer in peers(shape, root) {
        let link = link(shape, root, peer);
        port = port.max(SimTime::from_ps(arrivals[peer as usize])) + link.occupancy(bytes_each);
        out[peer as usize] = (port + link.latency).as_ps();
    }
    out[root as usize] = port.as_ps();
}

/// All-to-all: in round `k` rank `r` sends to `r + k`, receives from `r - k`, and each rank has one port per direction.
///
/// With equal links every rank ends at the last arrival plus all rounds, whatever the skew (each round's recurrence
/// collapses to a ring, and `n - 1` rounds cover everybody). With two kinds of link the port of a rank is busy for the
/// sum over its peers; the result is the last arrival plus the busiest port, an upper form: exact for ranks that next
/// wait for the whole group. GPUs of a node share its cards evenly. Under NCCL's tuning, what goes inside the node and what goes
/// outside are under way at the same time, on channels of their own, and the network's latency shows once per wave of them.
pub(crate) fn all_to_all_duration(shape: &CommShape, bytes_each: u64) -> SimTime {
    if let Some(changes) = &shape.changes {
        return changes.all_to_all_duration(shape, bytes_each);
    }
    let n = shape.len() as u64;
    let node_time = |members: u32| {
        let inside = u64::from(members) - 1;
        let outside = n - u64::from(members);
        let near = shape.nvlink.occupancy(bytes_each.saturating_mul(inside));
        let cards = u64::from(members.min(shape.cards));
        let rate = shape.card.bytes_per_s.saturating_mul(cards);
        let far = transfer_time(bytes_each.saturating_mul(outside).saturating_mul(u64::from(members)), rate);
        if outside == 0 {
            return near + shape.nvlink.latency;
        }
        if shape.tuned.is_none() {
            return near + far + shape.card.latency;
        }
        let waves = i64::try_from(waves(&shape.node_sizes)).unwrap_or(i64::MAX);
        (near + shape.nvlink.latency).max(far + SimTime(shape.card.latency.0.saturating_mul(waves)))
    };
    shape.node_sizes.iter().map(|&members| node_time(members)).max().unwrap_or(SimTime::ZERO)
}

/// Peers of a batch of messages, which one channel has under way at a time. Source: `NCCL_MAX_DEV_WORK_P2P_PER_BATCH` in
/// `src/include/device.h`.
pub(super) const BATCH: usize = 8;
/// Channels for messages, and those that a message over the network is spread over. Source:
/// `ncclTopoComputeP2pChannels` in `src/graph/paths.cc`; as in published logs of eight-GPU nodes.
pub(super) const CHANNELS: usize = 32;
const CHANNELS_PER_PEER: usize = 2;

/// Times that the channels of NCCL go through batches of peers over the network, one after the other: each time the latency of
/// the network shows. Source: `ncclP2pChannelBaseForRound` in `src/include/channel.h`.
pub(crate) fn waves(node_sizes: &[u32]) -> u64 {
    let ranks: usize = node_sizes.iter().map(|size| *size as usize).sum();
    let batches = ranks.div_ceil(schedule_group(node_sizes).min(BATCH));
    (batches * channels_per_peer(ranks)).div_ceil(CHANNELS) as u64
}

/// Channels that a message over the network is spread over on a communicator of so many ranks.
pub(super) fn channels_per_peer(ranks: usize) -> usize {
    let mut per_peer = CHANNELS_PER_PEER;
    while per_peer * ranks.div_ceil(BATCH) > CHANNELS && per_peer > 1 {
        per_peer /= 2;
    }
    per_peer
}

/// Neighbouring ranks that take turns together: eight, or what divides every node.
pub(super) fn schedule_group(node_sizes: &[u32]) -> usize {
    let start = if node_sizes.len() > 1 { BATCH as u32 } else { node_sizes.first().copied().unwrap_or(1) };
    let divide = |group: u32, size: &u32| if size.is_multiple_of(group) { group } else { gcd(group, *size) };
    node_sizes.iter().fold(start.max(1), divide).max(1) as usize
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Whom every rank (by position, node after node) sends to in each round of NCCL's schedule of messages; whoever that is
/// receives from it in the same round. Groups of neighbours come in the order of the quadratic sequence 0, 1, 3, 6, 10, ...,
/// within a group its members in turn. Source: `ncclP2pSchedule` in `src/init.cc`.
#[must_use]
pub fn rounds(node_sizes: &[u32]) -> Vec<Vec<usize>> {
    let ranks: usize = node_sizes.iter().map(|size| *size as usize).sum();
    let size = schedule_group(node_sizes);
    let groups = ranks / size;
    let modulus = groups.next_power_of_two();
    let mut rounds = Vec::with_capacity(ranks);
    let mut distance = 0;
    for step in 1..=modulus {
        // Distances that only the next power of two has are passed over.
        if distance < groups {
            for turn in 0..size {
                let to = |rank: usize| (rank / size + distance) % groups * size + (rank % size + turn) % size;
                rounds.push((0..ranks).map(to).collect());
            }
        }
        distance = (distance + step) % modulus;
    }
    rounds
}

/// All-to-all with a message of its own cost from every rank to every other, in the order of `rounds` ([`rounds`]), with one
/// send port and one receive port per rank. O(ranks squared), the size of the input; there is no shortcut.
#[must_use]
pub fn scheduled_all_to_all(rounds: &[Vec<usize>], cost: impl Fn(usize, usize) -> i64, arrivals: &[i64]) -> Vec<i64> {
    let (mut sends, mut receives) = (arrivals.to_vec(), arrivals.to_vec());
    for round in rounds {
        for (from, &to) in round.iter().enumerate().filter(|(from, to)| from != *to) {
            sends[from] = sends[from].max(receives[to]) + cost(from, to);
            receives[to] = sends[from];
        }
    }
    sends.iter().zip(&receives).map(|(send, receive)| *send.max(receive)).collect()
}

/// All-to-all with a message of its own cost from every rank to every other: in round `k` rank `r` sends to `r + k`, with
/// one send port and one receive port per rank. O(ranks squared), the size of the input; there is no shortcut.
#[must_use]
pub fn unequal_all_to_all(cost: impl Fn(usize, usize) -> i64, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let (mut sends, mut receives) = (arrivals.to_vec(), arrivals.to_vec());
    for round in 1..n {
        for (from, send) in sends.iter_mut().enumerate() {
            let to = (from + round) % n;
            *send = (*send).max(receives[to]) + cost(from, to);
            receives[to] = *send;
        }
    }
    sends.iter().zip(&receives).map(|(send, receive)| *send.max(receive)).collect()
}
