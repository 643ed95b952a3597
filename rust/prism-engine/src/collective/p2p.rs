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
    let link = if is_inside { shape.nvlink } else { shape.card };
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
/// wait for the whole group. GPUs of a node share its cards evenly.
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
        let latency = if outside > 0 { shape.card.latency } else { shape.nvlink.latency };
        near + far + latency
    };
    shape.node_sizes.iter().map(|&members| node_time(members)).max().unwrap_or(SimTime::ZERO)
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
