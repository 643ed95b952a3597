//! Max-min fair shares of ports, in whole numbers.
//!
//! A flow passes some ports, all of which it uses alike, and never uses more than its *cap* of each (what it uses when alone).
//! Shares are *max-min fair*: no flow's share could be raised without lowering that of a flow with an equal or smaller share. They
//! are found by progressive filling: of all ports the one whose flows would get least if it were divided evenly decides for its
//! flows; flows whose cap is below that have their cap.
//!
//! Rounding, exactly:
//! * shares are multiples of 2^-32 of a port, and an even division is rounded down: a port is never used more than fully,
//!   and short of it by less than 2^-32 per flow;
//! * among ports with equal divisions the one with the lowest number comes first;
//! * work is kept as share x picoseconds without rounding, and a flow ends at the first whole picosecond at which its work
//!   is done. A flow that always has its cap ends exactly its occupancy after its start.
//!
//! When flows start or end, shares are found anew for the flows that are connected to them over shared ports, once for all
//! changes at the same time. Cost: O(k log k) for k such flows and their ports; memory O(flows under way + ports).

use super::FULL;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A flow under way.
#[derive(Clone, Debug, Default)]
struct Flow {
    pair: [u32; 2],
    /// All ports, if they are not two.
    more: Vec<u32>,
    cap: u64,
    share: u64,
    /// In units of share x picoseconds, at `since`.
    left: u128,
    since: i64,
    version: u32,
    stamp: u64,
    new_share: u64,
    is_fixed: bool,
}

impl Flow {
    fn ports(&self) -> &[u32] {
        if self.more.is_empty() { &self.pair } else { &self.more }
    }
}

#[derive(Clone, Debug, Default)]
struct Port {
    flows: Vec<u32>,
    stamp: u64,
    left: u64,
    count: u64,
}

/// A foreseen end of a flow; void if the flow has another version by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The flow.
    pub flow: u32,
    /// Its version.
    pub version: u32,
    /// When.
    pub time: i64,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct FairShare {
    flows: Vec<Flow>,
    free: Vec<u32>,
    ports: Vec<Port>,
    /// Ports whose flows have changed.
    changed: Vec<u32>,
    stamp: u64,
    near_flows: Vec<u32>,
    near_ports: Vec<u32>,
    heap: BinaryHeap<Reverse<(u64, u32)>>,
}

impl FairShare {
    /// No flow on so many ports.
    #[must_use]
    pub fn new(num_ports: u32) -> Self {
        Self { ports: vec![Port::default(); num_ports as usize], ..Self::default() }
    }

    /// Starts a flow that alone takes `occupancy` ps, using `cap` of each of `ports`. It has no share before
    /// [`Self::settle`]. Flows are numbered; numbers of ended flows are used again.
    ///
    /// # Panics
    /// If there are no ports, a port is listed twice or does not exist, or the cap is not in `1..=FULL`.
    pub fn start(&mut self, now: i64, ports: &[u32], cap: u64, occupancy: i64) -> u32 {
        assert!((1..=FULL).contains(&cap) && !ports.is_empty(), "cap {cap} of ports {ports:?}");
        let number = self.free.pop().unwrap_or_else(|| {
            self.flows.push(Flow::default());
            self.flows.len() as u32 - 1
        });
        let flow = &mut self.flows[number as usize];
        flow.more.clear();
        match *ports {
            [first, second] => flow.pair = [first, second],
            _ => flow.more.extend(ports),
        }
        (flow.cap, flow.share, flow.since) = (cap, 0, now);
        flow.left = u128::from(occupancy.unsigned_abs()) * u128::from(cap);
        for port in ports {
            let flows = &mut self.ports[*port as usize].flows;
            assert!(flows.last() != Some(&number), "port {port} is listed twice");
            flows.push(number);
        }
        // Two ports are enough to find all others.
        self.changed.push(ports[0]);
        number
    }

    /// Does this end still hold?
    #[must_use]
    pub fn holds(&self, end: &End) -> bool {
        self.flows[end.flow as usize].version == end.version
    }

    /// Takes a flow out, whether or not its work is done.
    pub fn stop(&mut self, number: u32) {
        let Self { flows, ports, changed, .. } = self;
        let flow = &mut flows[number as usize];
        flow.version = flow.version.wrapping_add(1);
        for port in flow.ports() {
            let at = ports[*port as usize].flows.iter().position(|other| *other == number);
            ports[*port as usize].flows.swap_remove(at.expect("a flow is listed at its ports"));
            if !ports[*port as usize].flows.is_empty() {
                changed.push(*port);
            }
        }
        self.free.push(number);
    }

    /// Has anything changed since the last call of [`Self::settle`]?
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.changed.is_empty()
    }

    /// Finds the shares after the changes so far, all of which were at `now`. Tells the new ends of flows whose share has
    /// changed.
    pub fn settle(&mut self, now: i64, ends: &mut Vec<End>) {
        self.stamp = self.stamp.wrapping_add(1);
        while let Some(port) = self.changed.pop() {
            if self.ports[port as usize].stamp == self.stamp || self.ports[port as usize].flows.is_empty() {
                continue;
            }
            self.gather(port);
            self.fill();
            for number in &self.near_flows {
                let flow = &mut self.flows[*number as usize];
                if flow.share == flow.new_share {
                    continue;
                }
                let passed = u128::from((now - flow.since).unsigned_abs());
                flow.left = flow.left.saturating_sub(passed * u128::from(flow.share));
                (flow.share, flow.since) = (flow.new_share, now);
                flow.version = flow.version.wrapping_add(1);
                let left = flow.left.div_ceil(u128::from(flow.share));
                let time = now.saturating_add(i64::try_from(left).unwrap_or(i64::MAX));
                ends.push(End { flow: *number, version: flow.version, time });
            }
        }
    }

    /// Collects the flows and ports connected to a port.
    fn gather(&mut self, port: u32) {
        let Self { flows, ports, near_flows, near_ports, stamp, .. } = self;
        near_flows.clear();
        near_ports.clear();
        near_ports.push(port);
        ports[port as usize].stamp = *stamp;
        let mut next = 0;
        while next < near_ports.len() {
            let at = near_ports[next] as usize;
            next += 1;
            for index in 0..ports[at].flows.len() {
                let number = ports[at].flows[index];
                let flow = &mut flows[number as usize];
                if flow.stamp == *stamp {
                    continue;
                }
                flow.stamp = *stamp;
                near_flows.push(number);
                for other in flow.ports() {
                    let other_port = &mut ports[*other as usize];
                    if other_port.stamp != *stamp {
                        other_port.stamp = *stamp;
                        near_ports.push(*other);
                    }
                }
            }
        }
    }

    /// Progressive filling over the gathered flows.
    fn fill(&mut self) {
        let Self { flows, ports, near_flows, near_ports, heap, .. } = self;
        if let [only] = near_flows[..] {
            let flow = &mut flows[only as usize];
            flow.new_share = flow.cap;
            return;
        }
        heap.clear();
        for number in near_ports.iter() {
            let port = &mut ports[*number as usize];
            (port.left, port.count) = (FULL, port.flows.len() as u64);
            heap.push(Reverse((FULL / port.count, *number)));
        }
        for flow in near_flows.iter() {
            flows[*flow as usize].is_fixed = false;
        }
        near_flows.sort_unstable_by_key(|flow| (flows[*flow as usize].cap, *flow));
        let mut capped = 0;
        while let Some(Reverse((division, number))) = heap.pop() {
            let port = &ports[number as usize];
            if port.count == 0 {
                continue;
            }
            // Divisions only grow while others are fixed: an entry is a lower bound.
            let current = port.left / port.count;
            if current > division {
                heap.push(Reverse((current, number)));
                continue;
            }
            let mut has_capped = false;
            while let Some(flow) = near_flows.get(capped).filter(|flow| flows[**flow as usize].cap <= division) {
                capped += 1;
                has_capped |= fix(&mut flows[*flow as usize], ports, None);
            }
            if has_capped {
                heap.push(Reverse((division, number)));
                continue;
            }
            for index in 0..ports[number as usize].flows.len() {
                let flow = ports[number as usize].flows[index];
                fix(&mut flows[flow as usize], ports, Some(division));
            }
        }
    }

    /// The flow's present share of its ports, in units of 2^-32.
    #[must_use]
    pub fn share(&self, flow: u32) -> u64 {
        self.flows[flow as usize].share
    }
}

/// Gives a flow its share, or its cap. False: it had one.
fn fix(flow: &mut Flow, ports: &mut [Port], share: Option<u64>) -> bool {
    if std::mem::replace(&mut flow.is_fixed, true) {
        return false;
    }
    flow.new_share = share.unwrap_or(flow.cap);
    for port in flow.ports() {
        let port = &mut ports[*port as usize];
        port.left -= flow.new_share;
        port.count -= 1;
    }
    true
}
