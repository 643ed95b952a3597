//! What collectives and messages take: the functions of [`crate::collective`], looked up once per shape and call.

use super::Irregular;
use super::meet::Half;
use crate::collective::turns::{self, Message};
use crate::collective::{self, CollectiveCall, CommShape, Scratch, ShapePool, TileWalk};
use crate::cost::comm::{Link, nanoseconds, node_of, transfer_time};
use crate::profile::Profile;
use crate::sim::evaluate::{collective_call, evaluate};
use crate::sim::memo::Memo;
use crate::sim::signature::{Call, starts_after};
use crate::units::SimTime;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Latest end that is taken here; what is later is left to the evaluation of roles, which tells what is too late and where.
pub(super) const LATEST: i64 = 1 << 60;

/// How a call of communicators of one shape ends.
enum Form {
    /// Over a ring of equal links, or everybody together.
    Walk(TileWalk),
    Other,
}

struct Known {
    form: Form,
    shape: Arc<CommShape>,
    call: CollectiveCall,
    /// Least time between a member's arrival and its end.
    least: i64,
}

/// Sizes of messages that are equal.
struct MessageKind {
    bytes: u64,
    /// From the later of both arrivals to the ends of send and receive, by [`Way`].
    ends: [Option<(i64, i64)>; 3],
    least: i64,
}

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Itself,
    Node,
    Network,
}

/// See the module's documentation.
pub(super) struct Costs {
    profile: Profile,
    shapes: ShapePool,
    calls: Vec<Call>,
    call_numbers: FxHashMap<Call, u32>,
    messages: Vec<MessageKind>,
    message_numbers: FxHashMap<u64, u32>,
    known: Vec<Known>,
    known_numbers: FxHashMap<(u64, u32), u32>,
    memos: FxHashMap<u32, Vec<Memo>>,
    scratch: Scratch,
}

impl Costs {
    pub(super) fn new(profile: Profile) -> Self {
        Self {
            shapes: ShapePool::new(profile.clone()),
            profile,
            calls: Vec::new(),
            call_numbers: FxHashMap::default(),
            messages: Vec::new(),
            message_numbers: FxHashMap::default(),
            known: Vec::new(),
            known_numbers: FxHashMap::default(),
            memos: FxHashMap::default(),
            scratch: Scratch::default(),
        }
    }

    /// Number of a call: calls that match have the same.
    pub(super) fn number_of_call(&mut self, call: &Call) -> u32 {
        let call = Call { op: 0, continues: false, ..*call };
        *self.call_numbers.entry(call).or_insert_with(|| {
            self.calls.push(call);
            self.calls.len() as u32 - 1
        })
    }

    /// Number of a size of messages.
    pub(super) fn number_of_message(&mut self, bytes: u64) -> u32 {
        *self.message_numbers.entry(bytes).or_insert_with(|| {
            let rates = (self.profile.node.nvlink_bytes_per_s, self.profile.network.nic_bytes_per_s);
            let rate = rates.0.max(rates.1).max(self.profile.device.memory_bytes_per_s);
            let least = transfer_time(bytes, rate).0;
            self.messages.push(MessageKind { bytes, ends: [None; 3], least });
            self.messages.len() as u32 - 1
        })
    }

    pub(super) fn way(&self, from: u32, to: u32) -> Way {
        if from == to {
            Way::Itself
        } else if node_of(&self.profile, from) == node_of(&self.profile, to) {
            Way::Node
        } else {
            Way::Network
        }
    }

    /// The call with this number.
    pub(super) fn call(&self, number: u32) -> Call {
        self.calls[number as usize]
    }

    /// From the later of both arrivals to the ends of send and receive of a message between two such ranks.
    #[inline]
    pub(super) fn message(
        &mut self,
        message: u32,
        way: Way,
        ranks: impl Fn() -> (u32, u32),
    ) -> Result<(i64, i64), Irregular> {
        let kind = &mut self.messages[message as usize];
        if let Some(ends) = kind.ends[way as usize] {
            return Ok(ends);
        }
        let ((from, to), zero) = (ranks(), SimTime::ZERO);
        let (sent, received) = collective::message(&self.profile, from, to, kind.bytes, zero, zero);
        if sent.0.min(received.0) < kind.least {
            return Err(Irregular);
        }
        kind.ends[way as usize] = Some((sent.0, received.0));
        Ok((sent.0, received.0))
    }

    /// How much later than the start of a launch's messages each has its turn, as group rank `me` of `members` posts them after
    /// `calls`.
    pub(super) fn leads(
        &mut self,
        members: &[u32],
        me: u32,
        calls: &[Call],
        halves: &[Half],
    ) -> Result<Vec<i64>, Irregular> {
        let launch = nanoseconds(self.profile.network.collective_launch_ns);
        let started = starts_after(calls, launch).0;
        if !turns::has_turns(halves.iter().map(|half| half.is_send)) {
            return Ok(vec![-started; halves.len()]);
        }
        let rank = members[me as usize];
        let messages = halves.iter().map(|half| {
            let link = Link::port_towards(&self.profile, rank, members[half.peer as usize]);
            let occupancy = link.occupancy(self.messages[half.message as usize].bytes);
            Message { peer: half.peer, is_send: half.is_send, occupancy }
        });
        let leads = turns::turns(&self.shapes.shape(members), me, &messages.collect::<Vec<_>>()).leads;
        leads.into_iter().map(|lead| if lead.0 > LATEST { Err(Irregular) } else { Ok(lead.0 - started) }).collect()
    }

    /// Time from a member's coming to a call until it takes part.
    pub(super) fn launch_time(&mut self, members: &[u32], call: u32) -> i64 {
        let shape = self.shapes.shape(members);
        let call = collective_call(&self.calls[call as usize], members.len());
        collective::launch_time(&shape, &call, &mut self.scratch).0
    }

    /// Number of what is known about a call of a communicator of these members.
    pub(super) fn number_of_known(&mut self, members: &[u32], call: u32) -> Result<u32, Irregular> {
        let shape = self.shapes.shape(members);
        if let Some(known) = self.known_numbers.get(&(shape.id, call)) {
            return Ok(*known);
        }
        let full = collective_call(&self.calls[call as usize], members.len());
        if shape.refusal(full.kind).is_some() {
            return Err(Irregular);
        }
        let scratch = &mut self.scratch;
        let form = TileWalk::new(&shape, &full, scratch).map_or(Form::Other, Form::Walk);
        let least = collective::least_time(&shape, &full, scratch).0;
        let number = self.known.len() as u32;
        self.known_numbers.insert((shape.id, call), number);
        self.known.push(Known { form, shape, call: full, least });
        Ok(number)
    }

    /// Ends of a collective of communicator `comm`. Returns the least time that each member's part takes.
    #[inline]
    pub(super) fn complete(
        &mut self,
        (comm, known): (u32, u32),
        arrivals: &[SimTime],
        ends: &mut [SimTime],
    ) -> Result<i64, Irregular> {
        let Known { form, shape, call, least } = &self.known[known as usize];
        let latest = match form {
            Form::Walk(walk) => walk.walk_one(arrivals, ends),
            Form::Other => {
                let memos = self.memos.entry(comm).or_default();
                evaluate(shape, call, 1, (arrivals, ends), memos, &mut self.scratch).0
            }
        };
        if latest <= LATEST { Ok(*least) } else { Err(Irregular) }
    }
}
