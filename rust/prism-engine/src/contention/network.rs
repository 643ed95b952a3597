//! Messages under way: when each leaves, and when it arrives.

use super::fair::{End, FairShare};
use super::{Contention, FULL};
use crate::lower::{Job, Message};
use rustc_hash::FxHashMap;

/// Not looked up yet.
const UNKNOWN: u32 = u32::MAX;

/// A message of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// The `number`-th of a lane of an instance.
    Lane { instance: u32, lane: u32, number: u32 },
    /// Between two ranks.
    Transfer(u32),
}

/// What happens to messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Its last byte has left.
    Left(Carrier),
    /// Its first byte has come to the receiving port.
    Head(Carrier),
    /// Its last byte has come.
    Arrived(Carrier),
    /// A flow may have ended.
    Flow { flow: u32, version: u32 },
}

/// See the module's documentation.
pub(super) struct Network<'a> {
    job: &'a Job,
    rule: Rule,
    /// By communicator and pattern, where in `route_ports` its index begins; the same by instance.
    routes: FxHashMap<(u32, u32), u32>,
    starts: Vec<u32>,
    /// Indices of ports (where those of a lane begin, and the end), each with its ports behind it.
    route_ports: Vec<u32>,
    ports: Vec<u32>,
    ends: Vec<End>,
}

enum Rule {
    Alone,
    /// When each port is free.
    Fifo(Vec<i64>),
    Fair {
        shares: Box<FairShare>,
        /// By flow.
        carriers: Vec<Carrier>,
    },
}

impl<'a> Network<'a> {
    pub(super) fn new(job: &'a Job, contention: Contention) -> Self {
        let ports = job.ports.len();
        let rule = match contention {
            Contention::None => Rule::Alone,
            Contention::Fifo => Rule::Fifo(vec![0; ports as usize]),
            Contention::FairShare => Rule::Fair { shares: Box::new(FairShare::new(ports)), carriers: Vec::new() },
        };
        let starts = vec![UNKNOWN; job.instances.len()];
        let (routes, route_ports, ports, ends) = (FxHashMap::default(), Vec::new(), Vec::new(), Vec::new());
        Self { job, rule, routes, starts, route_ports, ports, ends }
    }

    pub(super) fn message(&self, carrier: Carrier) -> &'a Message {
        match carrier {
            Carrier::Lane { instance, lane, number } => self.job.pattern(instance).message(lane, u64::from(number)).2,
            Carrier::Transfer(transfer) => &self.job.transfers[transfer as usize].message,
        }
    }

    /// A message is ready. Tells `at` what follows.
    pub(super) fn send(&mut self, now: i64, carrier: Carrier, mut at: impl FnMut(i64, Event)) {
        let message = self.message(carrier);
        let occupancy = message.occupancy.as_ps();
        if occupancy == 0 || matches!(self.rule, Rule::Alone) {
            at(now + occupancy, Event::Left(carrier));
            return;
        }
        self.find_ports(carrier);
        match &mut self.rule {
            Rule::Alone => {}
            Rule::Fifo(free) => {
                let half = self.ports.len() / 2;
                let start = occupy(free, &self.ports[..half], now, message);
                at(start + occupancy, Event::Left(carrier));
                at(start + message.latency.as_ps(), Event::Head(carrier));
            }
            Rule::Fair { shares, carriers } => {
                let flow = shares.start(now, &self.ports, message.share, occupancy) as usize;
                if carriers.len() <= flow {
                    carriers.resize(flow + 1, carrier);
                }
                carriers[flow] = carrier;
            }
        }
    }

    /// A message has left: when it arrives, unless the receiving port decides that.
    pub(super) fn left(&self, now: i64, carrier: Carrier) -> Option<i64> {
        let message = self.message(carrier);
        let decides = matches!(self.rule, Rule::Fifo(_)) && message.occupancy.as_ps() > 0;
        (!decides).then_some(now + message.latency.as_ps())
    }

    /// The first byte of a message is at its receiving port: when the last has come.
    pub(super) fn head(&mut self, now: i64, carrier: Carrier) -> i64 {
        self.find_ports(carrier);
        let message = self.message(carrier);
        let Rule::Fifo(free) = &mut self.rule else { return now + message.occupancy.as_ps() };
        let half = self.ports.len() / 2;
        occupy(free, &self.ports[half..], now, message) + message.occupancy.as_ps()
    }

    /// The message of a flow, if it has ended by now.
    pub(super) fn flow_ended(&mut self, now: i64, flow: u32, version: u32) -> Option<Carrier> {
        let Rule::Fair { shares, carriers } = &mut self.rule else { return None };
        if !shares.holds(&End { flow, version, time: now }) {
            return None;
        }
        shares.stop(flow);
        Some(carriers[flow as usize])
    }

    /// Everything at `now` has happened: foresees the ends of flows.
    pub(super) fn settle(&mut self, now: i64, mut at: impl FnMut(i64, Event)) {
        let Rule::Fair { shares, .. } = &mut self.rule else { return };
        if shares.is_settled() {
            return;
        }
        shares.settle(now, &mut self.ends);
        for End { flow, version, time } in self.ends.drain(..) {
            at(time, Event::Flow { flow, version });
        }
    }

    /// Leaves the ports of a message in `self.ports`, sending ones first.
    fn find_ports(&mut self, carrier: Carrier) {
        self.ports.clear();
        match carrier {
            Carrier::Transfer(transfer) => {
                let transfer = &self.job.transfers[transfer as usize];
                self.job.ports.of_ranks(transfer.ranks, transfer.message.wire, &mut self.ports);
            }
            Carrier::Lane { instance, lane, number } => {
                if self.starts[instance as usize] == UNKNOWN {
                    self.starts[instance as usize] = self.route(instance);
                }
                let pattern = self.job.pattern(instance);
                let at = (self.starts[instance as usize] + pattern.route(lane, number)) as usize;
                let (from, to) = (self.route_ports[at] as usize, self.route_ports[at + 1] as usize);
                self.ports.extend_from_slice(&self.route_ports[from..to]);
            }
        }
    }

    /// Where in `route_ports` it says where the ports of each lane (each message, where they are listed) begin.
    fn route(&mut self, instance: u32) -> u32 {
        let Self { job, routes, route_ports, .. } = self;
        let at = &job.instances[instance as usize];
        let (pattern, comm) = (job.pattern(instance), job.comm(instance));
        *routes.entry((at.comm, at.pattern)).or_insert_with(|| {
            let layout = job.ports.layout(&comm.members, &comm.shape);
            let place = (&comm.members[..], &*comm.shape, &layout);
            let count = pattern.routes().count();
            let start = route_ports.len();
            route_ports.resize(start + count + 1, 0);
            for (index, (from, to, message)) in pattern.routes().enumerate() {
                route_ports[start + index] = route_ports.len() as u32;
                job.ports.of_members(place, (from, to), message.wire, route_ports);
            }
            route_ports[start + count] = route_ports.len() as u32;
            start as u32
        })
    }
}

/// The time at which a message has all of some ports. They are busy for what it would take at full speed: a message that
/// cannot use a whole port leaves the rest to others.
fn occupy(free: &mut [i64], ports: &[u32], now: i64, message: &Message) -> i64 {
    let start = ports.iter().map(|port| free[*port as usize]).fold(now, i64::max);
    let busy = (u128::from(message.occupancy.as_ps().unsigned_abs()) * u128::from(message.share)).div_ceil(FULL.into());
    let until = start + busy as i64;
    for port in ports {
        free[*port as usize] = until;
    }
    start
}
