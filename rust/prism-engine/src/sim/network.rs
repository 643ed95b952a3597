//! Where the ranks meet: communicators, the instance of a collective being gathered, halves of messages.
//!
//! A rank cannot post its next collective on a communicator before the previous one is complete, so one instance per
//! communicator is open at a time and its arrivals and ends live at fixed places of two tables. Communicators of one batch
//! ([`super::batch`]) are posted and completed together.

use super::channel::{Channels, Waiting};
use super::error::SimError;
use super::evaluate::{collective_call, evaluate};
use super::memo::Memo;
use super::perturbed::{NetworkRules, Origin};
use super::program::Launch;
use super::role::Times;
use super::signature::{Call, Half};
use super::vector;
use super::wiring::{Address, Wiring};
use crate::collective::turns::{self, Message, Turns};
use crate::collective::{self, CollectiveCall, CommShape, Scratch, ShapePool, TileWalk};
use crate::cost::comm::{Link, nanoseconds, transfer_time};
use crate::graph::Graph;
use crate::ids::CommId;
use crate::perturb::When;
use crate::profile::Profile;
use crate::units::SimTime;
use std::ops::Range;
use std::sync::Arc;

/// Latest end of communication. Between two communications a rank adds less than a quarter of the range
/// ([`super::program`]), so no time of a simulation that keeps this overflows.
const MAX_TIME: SimTime = SimTime(i64::MAX / 2);

/// Latest arrival at a collective: evaluators take nothing later.
const MAX_ARRIVAL: i64 = 1 << 60;

/// Ports of one role that have a communicator in one slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) role: u32,
    pub(super) slot: u32,
    pub(super) count: u32,
}

impl Part {
    pub(super) fn key(&self) -> (u32, u32) {
        (self.role, self.slot)
    }
}

/// Members of communicators.
#[derive(Debug)]
pub(super) enum Members {
    /// Communicators are those of the graph.
    Graph(Arc<Graph>),
    /// By communicator.
    Own(Vec<Arc<[u32]>>),
}

impl Members {
    /// Global ranks in group-rank order.
    fn of(&self, comm: u32) -> &[u32] {
        match self {
            Self::Graph(graph) => graph.comm_members(CommId(comm)),
            Self::Own(own) => &own[comm as usize],
        }
    }
}

/// Communicators that are alike ([`super::batch`]), and their open collective. Mostly one.
#[derive(Debug)]
pub(super) struct Batch {
    /// By column of the tables.
    pub(super) comms: Vec<u32>,
    /// Members of each.
    size: usize,
    /// First place in the tables: the member of column `c` with group rank `g` is at `base + g * columns + c`.
    base: usize,
    shape: Option<Arc<CommShape>>,
    /// The same without perturbations, where it was needed.
    layout: Option<Arc<CommShape>>,
    /// Group ranks that arrive by themselves, if not all do (the others are absent).
    present: Option<Vec<u32>>,
    /// Ascending by role and slot (ranks of one role may have the communicator in different slots).
    pub(super) parts: Vec<Part>,
    /// Ports that have posted the open collective.
    posted: u32,
    /// Collectives complete, fused ones counted once.
    pub(super) completed: u64,
    /// The same, each of the fused ones counted.
    pub(super) ops: u64,
    call: Option<Call>,
    /// Members have posted different calls: the open collective never completes.
    is_mismatched: bool,
    /// By column, where they were needed.
    memos: Vec<Memo>,
    /// Iteration of the open collective (the latest, if members disagree).
    iteration: u32,
    /// Perturbations that may change it, if they have been looked for.
    reach: Option<u64>,
    /// Those in force for `shape` and `memos`.
    rules: u64,
    /// [`Network::least_time`] of the latest call.
    least: Option<(CollectiveCall, i64)>,
}

impl Batch {
    fn new(comms: Vec<u32>, size: usize, base: usize, present: Option<Vec<u32>>) -> Self {
        Self {
            comms,
            size,
            base,
            shape: None,
            layout: None,
            present,
            parts: Vec::new(),
            posted: 0,
            completed: 0,
            ops: 0,
            call: None,
            is_mismatched: false,
            memos: Vec::new(),
            iteration: 0,
            reach: None,
            rules: 0,
            least: None,
        }
    }

    /// Is a collective called that is not complete?
    pub(super) fn is_open(&self) -> bool {
        self.posted > 0 || self.call.is_some()
    }

    fn expected(&self) -> u32 {
        self.present.as_ref().map_or(self.size * self.comms.len(), Vec::len) as u32
    }

    fn places(&self) -> Range<usize> {
        self.base..self.base + self.size * self.comms.len()
    }

    /// The communicator that errors name.
    fn lowest(&self) -> u32 {
        self.comms.iter().copied().min().unwrap_or_default()
    }

    /// Takes note of the perturbations in force when the last member has come.
    fn follow(&mut self, rules: &NetworkRules, members: &[u32], arrivals: &[SimTime]) {
        let time = arrivals.iter().copied().max().unwrap_or_default();
        let reach = *self.reach.get_or_insert_with(|| rules.reach(members));
        let in_force = rules.rules().network_state(When { iteration: self.iteration, time }) & reach;
        if std::mem::replace(&mut self.rules, in_force) != in_force {
            self.shape = None;
            self.memos.clear();
        }
    }

    /// Group rank of a member.
    pub(super) fn is_present(&self, group_rank: u32) -> bool {
        self.present.as_ref().is_none_or(|present| present.binary_search(&group_rank).is_ok())
    }
}

/// Halves of messages have ended, one per communicator of a batch.
#[derive(Debug)]
pub(super) struct Landed {
    /// The rank of the first.
    pub(super) rank: u32,
    pub(super) slot: u32,
    pub(super) batch: u32,
    /// Their group rank.
    pub(super) position: u32,
    pub(super) ends: Times,
}

/// What a role cannot do before its lanes or its ports have been told apart further.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    /// Post the next launch of a slot: some lanes may have no port there.
    Post { role: u32, slot: u32 },
    /// End the launch of a slot: ports of one lane have ended at different times.
    End { role: u32, slot: u32 },
}

/// See the module's documentation.
pub(super) struct Network {
    profile: Profile,
    pub(super) rules: Option<NetworkRules>,
    is_apart: bool,
    shapes: ShapePool,
    members: Members,
    pub(super) batches: Vec<Batch>,
    /// Batch and column by communicator.
    of_comm: Vec<(u32, u32)>,
    arrivals: Vec<SimTime>,
    ends: Vec<SimTime>,
    channels: Channels,
    scratch: Scratch,
    /// Rows to use again.
    rows: Vec<Times>,
    /// Parts whose collective has completed, not yet told to their roles.
    pub(super) done: Vec<Part>,
    /// Halves that have ended, not yet told.
    pub(super) landed: Vec<Landed>,
    /// Not yet served.
    pub(super) requests: Vec<Request>,
    /// Messages whose halves do not fit and times out of range, by communicator and pair.
    pub(super) broken: Vec<((u32, u32, u32), SimError)>,
    /// Lowest communicator whose members have posted different calls.
    pub(super) mismatched: Option<u32>,
    /// Tests make the checks too strict by this factor.
    #[cfg(test)]
    pub(super) stretch_least: i64,
}

impl Network {
    /// `batches`: may communicators that are alike be evaluated together?
    pub(super) fn new(profile: Profile, rules: Option<NetworkRules>, batches: bool) -> Self {
        Self {
            // Rules may tell communicators apart.
            is_apart: rules.is_some() || !batches,
            rules,
            shapes: ShapePool::new(profile.clone()),
            profile,
            members: Members::Own(Vec::new()),
            batches: Vec::new(),
            of_comm: Vec::new(),
            arrivals: Vec::new(),
            ends: Vec::new(),
            channels: Channels::default(),
            scratch: Scratch::default(),
            rows: Vec::new(),
            done: Vec::new(),
            landed: Vec::new(),
            requests: Vec::new(),
            broken: Vec::new(),
            mismatched: None,
            #[cfg(test)]
            stretch_least: 1,
        }
    }

    /// The communicators will be those of a graph.
    pub(super) fn use_graph(&mut self, graph: &Arc<Graph>) {
        self.members = Members::Graph(Arc::clone(graph));
        self.of_comm = vec![(u32::MAX, 0); graph.num_comms()];
    }

    /// Adds a batch of the graph's communicators, all of `size` members.
    pub(super) fn add_batch(&mut self, comms: Vec<u32>, size: usize) {
        let number = self.batches.len() as u32;
        for (column, comm) in (0..).zip(&comms) {
            self.of_comm[*comm as usize] = (number, column);
        }
        let base = self.grow_tables(size * comms.len());
        self.batches.push(Batch::new(comms, size, base, None));
    }

    /// Adds a communicator that is no graph's. `present` are the group ranks that will arrive, if the others are absent. The
    /// number of its batch is its own.
    pub(super) fn add_comm(&mut self, members: Arc<[u32]>, present: Option<Vec<u32>>) -> u32 {
        let comm = self.batches.len() as u32;
        let base = self.grow_tables(members.len());
        self.batches.push(Batch::new(vec![comm], members.len(), base, present));
        self.of_comm.push((comm, 0));
        match &mut self.members {
            Members::Own(own) => own.push(members),
            Members::Graph(_) => unreachable!("beside a graph, communicators are the graph's"),
        }
        comm
    }

    fn grow_tables(&mut self, more: usize) -> usize {
        let base = self.arrivals.len();
        self.arrivals.resize(base + more, SimTime::ZERO);
        self.ends.resize(base + more, SimTime::ZERO);
        base
    }

    /// Global ranks of a communicator's members in group-rank order.
    pub(super) fn members(&self, comm: u32) -> &[u32] {
        self.members.of(comm)
    }

    /// Communicators by number.
    pub(super) fn num_comms(&self) -> usize {
        self.of_comm.len()
    }

    /// Batch and column of a communicator.
    pub(super) fn batch_of(&self, comm: u32) -> (u32, u32) {
        self.of_comm[comm as usize]
    }

    /// First place and length of a row of a batch.
    pub(super) fn row(&self, batch: u32, position: u32) -> (u32, u32) {
        let batch = &self.batches[batch as usize];
        let width = batch.comms.len() as u32;
        (batch.base as u32 + position * width, width)
    }

    /// Number of places of a batch.
    pub(super) fn num_places(&self, batch: u32) -> u32 {
        self.batches[batch as usize].places().len() as u32
    }

    pub(super) fn comm_at(&self, address: Address) -> u32 {
        self.batches[address.batch as usize].comms[address.column as usize]
    }

    /// Group rank of a member. O(members).
    pub(super) fn group_rank(&self, comm: u32, rank: u32) -> u32 {
        let mut members = self.members(comm).iter();
        members.position(|member| *member == rank).expect("only members have a slot for a communicator") as u32
    }

    /// Adds a communicator in the state of `like`, member by member; its channels are made with its ports.
    pub(super) fn fork_comm(&mut self, like: u32, members: Arc<[u32]>) -> u32 {
        let comm = self.add_comm(members, None);
        let (known, new) = self.batches.split_at_mut(comm as usize);
        let (known, new) = (&known[like as usize], &mut new[0]);
        new.take_after(known, 1);
        let (from, to) = (known.places(), new.base);
        self.arrivals.copy_within(from.clone(), to);
        self.ends.copy_within(from, to);
        comm
    }

    /// The channel of `comm` that is like channel `number` of the communicator it was forked from.
    pub(super) fn fork_channel(&mut self, number: u32, comm: u32) -> u32 {
        let Self { members, channels, .. } = self;
        match members {
            Members::Graph(graph) => channels.fork(number, comm, graph.comm_members(CommId(comm))),
            Members::Own(own) => channels.fork(number, comm, &own[comm as usize]),
        }
    }

    /// Divides a batch of the graph's communicators into these sets of columns, the first of which keeps its number. The new
    /// batches have the parts of the old one.
    pub(super) fn divide(&mut self, number: u32, sets: &[Vec<u32>]) {
        let Members::Graph(graph) = &self.members else { unreachable!("only the graph's communicators share batches") };
        let graph = Arc::clone(graph);
        let members = |comm: u32| graph.comm_members(CommId(comm));
        for columns in sets.iter().skip(1) {
            let old = &self.batches[number as usize];
            let (base, size, width) = (old.base, old.size, old.comms.len());
            let comms: Vec<u32> = columns.iter().map(|column| old.comms[*column as usize]).collect();
            let mut new = Batch::new(comms, size, self.arrivals.len(), None);
            new.take_after(old, width as u32);
            for table in [&mut self.arrivals, &mut self.ends] {
                for position in 0..size {
                    table.extend(
                        columns
                            .iter()
                            .map(|column| base + position * width + *column as usize)
                            .map(|at| table[at])
                            .collect::<Vec<_>>(),
                    );
                }
            }
            let to = self.batches.len() as u32;
            for (column, comm) in (0..).zip(&new.comms) {
                self.of_comm[*comm as usize] = (to, column);
            }
            self.channels.divide(number, to, columns, members(new.comms[0]));
            self.batches.push(new);
        }
        let old = &mut self.batches[number as usize];
        let (base, width, columns) = (old.base, old.comms.len(), &sets[0]);
        old.comms = columns.iter().map(|column| old.comms[*column as usize]).collect();
        old.posted = old.posted / width as u32 * columns.len() as u32;
        old.memos.clear();
        for table in [&mut self.arrivals, &mut self.ends] {
            // Forwards: nothing is overwritten before it has moved.
            for position in 0..old.size {
                for (to, column) in columns.iter().enumerate() {
                    table[base + position * columns.len() + to] = table[base + position * width + *column as usize];
                }
            }
        }
        for (column, comm) in (0..).zip(&old.comms) {
            self.of_comm[*comm as usize] = (number, column);
        }
        self.channels.divide(number, number, columns, members(old.comms[0]));
    }

    pub(super) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The next collective of a launch begins for these members when the last has ended for them. Its kernel need not be launched
    /// if that has been done.
    pub(super) fn arrive_again(&mut self, wiring: &Wiring, next: &Call) {
        let earlier = |batch: u32| if next.continues { self.launch_time(batch, next) } else { SimTime::ZERO };
        let earlier: Vec<SimTime> = wiring.parts.iter().map(|(batch, _)| *batch).map(earlier).collect();
        wiring.copy_earlier(&self.ends, &mut self.arrivals, &earlier);
    }

    /// Time from a member's coming to a collective until it takes part.
    pub(super) fn launch_time(&mut self, batch: u32, call: &Call) -> SimTime {
        let layout = self.layout(batch);
        collective::launch_time(&layout, &collective_call(call, layout.len()), &mut self.scratch)
    }

    /// The same for a message.
    pub(super) fn message_launch(&self) -> SimTime {
        nanoseconds(self.profile.network.collective_launch_ns)
    }

    /// How a batch's communicators lie on the cluster.
    fn layout(&mut self, batch: u32) -> Arc<CommShape> {
        let state = &mut self.batches[batch as usize];
        let members = self.members.of(state.comms[0]);
        Arc::clone(state.layout.get_or_insert_with(|| self.shapes.shape(members)))
    }

    /// The turns of a launch's messages for the members at a position, the first of which comes at `time`.
    pub(super) fn turns(&mut self, (batch, position): (u32, u32), launch: &Launch, time: SimTime) -> Turns {
        let layout = self.layout(batch);
        let members = self.members.of(self.batches[batch as usize].comms[0]);
        let me = members[position as usize];
        let occupancy = |half: &Half| {
            let other = members[half.peer as usize];
            let link = Link::between(&self.profile, me, other);
            let Some(rules) = &self.rules else { return link.occupancy(half.bytes()) };
            let pair = if half.is_send { (me, other) } else { (other, me) };
            let when = When { iteration: launch.origin.iteration, time };
            let (bytes, change) = rules.on_message(pair, members.len(), launch.origin.num_peers, half.bytes(), when);
            change.apply(link).occupancy(bytes)
        };
        let message = |half: &Half| Message { peer: half.peer, is_send: half.is_send, occupancy: occupancy(half) };
        let messages: Vec<Message> = launch.halves.iter().map(message).collect();
        turns::turns(&layout, position, &messages)
    }

    /// Collectives that a communicator is through with.
    pub(super) fn completed(&self, comm: u32) -> u64 {
        self.batches[self.batch_of(comm).0 as usize].completed
    }

    /// Collectives that a communicator is through with, as its members called them.
    pub(super) fn ops(&self, comm: u32) -> u64 {
        self.batches[self.batch_of(comm).0 as usize].ops
    }

    /// Does the member of a communicator arrive by itself?
    pub(super) fn is_present(&self, comm: u32, group_rank: u32) -> bool {
        self.batches[self.batch_of(comm).0 as usize].is_present(group_rank)
    }

    /// An empty row.
    pub(super) fn take_row(&mut self) -> Times {
        let mut row = self.rows.pop().unwrap_or_default();
        row.clear();
        row
    }

    /// Gives a row back.
    pub(super) fn give_row(&mut self, row: Times) {
        if self.rows.len() < 64 && row.capacity() > 0 {
            self.rows.push(row);
        }
    }

    pub(super) fn ends(&self) -> &[SimTime] {
        &self.ends
    }

    pub(super) fn arrivals_mut(&mut self) -> &mut [SimTime] {
        &mut self.arrivals
    }

    /// `count` ports have written their arrivals at the batch's next collective.
    pub(super) fn post(&mut self, batch: u32, count: u32, call: &Call, iteration: u32) {
        let state = &mut self.batches[batch as usize];
        state.iteration = state.iteration.max(iteration);
        state.posted += count;
        match &state.call {
            None => state.call = Some(*call),
            Some(first) if first.matches(call) => {}
            Some(_) => {
                state.is_mismatched = true;
                let comm = state.lowest();
                self.mismatched = Some(self.mismatched.map_or(comm, |lowest| lowest.min(comm)));
            }
        }
        if state.posted == state.expected() && !state.is_mismatched {
            self.complete(batch);
        }
    }

    fn complete(&mut self, batch: u32) {
        let state = &mut self.batches[batch as usize];
        let call = collective_call(state.call.as_ref().expect("posted"), state.size);
        let arrivals = &mut self.arrivals[state.places()];
        if let Some(present) = &state.present {
            join_absent(arrivals, present);
        }
        let members = self.members.of(state.comms[0]);
        if let Some(rules) = &self.rules {
            state.follow(rules, members, arrivals);
        }
        let new_shape = || match &self.rules {
            Some(rules) if state.rules != 0 => {
                Arc::new(CommShape::changed(members, &self.profile, rules.rules(), state.rules))
            }
            _ => self.shapes.shape(members),
        };
        let shape = Arc::clone(state.shape.get_or_insert_with(new_shape));
        if let Some(refusal) = shape.refusal(call.kind) {
            let comm = state.lowest();
            self.broken.push(((comm, 0, 0), refused(comm, &refusal)));
            return;
        }
        let range = state.places();
        let width = state.comms.len();
        let (arrivals, ends) = (&self.arrivals[range.clone()], &mut self.ends[range]);
        let latest = evaluate(&shape, &call, width, (arrivals, ends), &mut state.memos, &mut self.scratch);
        if latest > MAX_TIME {
            let comm = state.lowest();
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return;
        }
        if let Some(rules) = &mut self.rules
            && rules.kills(members.iter().copied().zip(ends.iter().copied()))
        {
            return;
        }
        state.call = None;
        state.posted = 0;
        state.completed += 1;
        state.ops += u64::from(call.ops);
        self.done.extend_from_slice(&state.parts);
    }

    /// A collective of a batch of which all members come at once: `arrivals` and `ends` are in the order of its table. False
    /// (and told by [`Self::broken`]): a time is out of range.
    pub(super) fn run_private(&mut self, batch: u32, call: &Call, arrivals: &[SimTime], ends: &mut [SimTime]) -> bool {
        let state = &mut self.batches[batch as usize];
        let call = collective_call(call, state.size);
        let members = self.members.of(state.comms[0]);
        let shape = Arc::clone(state.shape.get_or_insert_with(|| self.shapes.shape(members)));
        if let Some(refusal) = shape.refusal(call.kind) {
            let comm = state.lowest();
            self.broken.push(((comm, 0, 0), refused(comm, &refusal)));
            return false;
        }
        let width = state.comms.len();
        let latest = evaluate(&shape, &call, width, (arrivals, ends), &mut state.memos, &mut self.scratch);
        if latest > MAX_TIME {
            let comm = state.lowest();
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return false;
        }
        state.completed += 1;
        state.ops += u64::from(call.ops);
        true
    }

    /// Is every communicator evaluated by itself, step by step?
    pub(super) fn is_apart(&self) -> bool {
        self.is_apart
    }

    /// Least time that each member's part in a call takes at its fastest port.
    pub(super) fn least_time(&mut self, batch: u32, call: &Call) -> i64 {
        if self.rules.is_some() {
            return 0;
        }
        let state = &mut self.batches[batch as usize];
        let call = collective_call(call, state.size);
        if let Some((known, least)) = state.least
            && known == call
        {
            return least;
        }
        let members = self.members.of(state.comms[0]);
        let shape = state.shape.get_or_insert_with(|| self.shapes.shape(members));
        let least = collective::least_time(shape, &call, &mut self.scratch).0;
        #[cfg(test)]
        let least = least * self.stretch_least;
        state.least = Some((call, least));
        least
    }

    /// Least time of a message at a member's fastest port.
    pub(super) fn least_message_time(&self, bytes: u64) -> i64 {
        if self.rules.is_some() {
            return 0;
        }
        let (node, network, device) = (&self.profile.node, &self.profile.network, &self.profile.device);
        let rate = node.nvlink_bytes_per_s.max(network.nic_bytes_per_s).max(device.memory_bytes_per_s);
        transfer_time(bytes, rate).0
    }

    /// Communicators of a batch.
    pub(super) fn width(&self, batch: u32) -> usize {
        self.batches[batch as usize].comms.len()
    }

    /// How a call of a batch goes round its rings, if their links are alike and the call is not fused.
    pub(super) fn tile_walk(&mut self, batch: u32, call: &Call) -> Option<TileWalk> {
        let state = &mut self.batches[batch as usize];
        let call = collective_call(call, state.size);
        let members = self.members.of(state.comms[0]);
        let shape = state.shape.get_or_insert_with(|| self.shapes.shape(members));
        if call.ops != 1 || shape.refusal(call.kind).is_some() {
            return None;
        }
        TileWalk::new(shape, &call, &mut self.scratch)
    }

    /// Collectives of a batch have been evaluated elsewhere. False: some arrival was out of range.
    pub(super) fn complete_private(&mut self, batch: u32, count: u32, latest_arrival: SimTime) -> bool {
        let state = &mut self.batches[batch as usize];
        if latest_arrival.0 > MAX_ARRIVAL {
            let comm = state.lowest();
            self.broken.push(((comm, 0, 0), out_of_range(comm)));
            return false;
        }
        state.completed += u64::from(count);
        state.ops += u64::from(count);
        true
    }

    /// So many channels will be asked for, some of them new.
    pub(super) fn expect_channels(&mut self, count: usize) {
        self.channels.reserve(count);
    }

    /// The channel of half a message of the members at a position, to be used for all further ones to or from the same peer.
    pub(super) fn channel(&mut self, batch: u32, position: u32, (peer, is_send): (u32, bool)) -> u32 {
        let state = &self.batches[batch as usize];
        let (source, destination) = if is_send { (position, peer) } else { (peer, position) };
        let members = self.members(state.comms[0]);
        let ranks = (members[source as usize], members[destination as usize]);
        let is_alone = !state.is_present(peer);
        self.channels.get((batch, source, destination), ranks, is_alone)
    }

    /// Ranks post half of a message, one per communicator of the channel's batch.
    pub(super) fn post_half(&mut self, channel: u32, slot: u32, half: &Half, origin: Origin, times: Times) {
        let channel = self.channels.at(channel);
        let rank = if half.is_send { channel.ranks.0 } else { channel.ranks.1 };
        let waiting = Waiting { rank, slot, times, bytes: half.bytes(), is_send: half.is_send, origin };
        let Some((mut send, mut receive)) = channel.meet(waiting) else { return };
        let (batch, source, destination) = channel.key;
        let state = &self.batches[batch as usize];
        if send.bytes != receive.bytes {
            let comm = state.lowest();
            self.broken.push(((comm, source, destination), channel.mismatch(comm, &send, &receive)));
            return;
        }
        let is_in_range = match &self.rules {
            None => {
                let zero = SimTime::ZERO;
                let (ranks, bytes) = (channel.ranks, send.bytes);
                let (sent, received) = collective::message(&self.profile, ranks.0, ranks.1, bytes, zero, zero);
                let latest = vector::meet(&mut send.times, &mut receive.times, sent, received);
                latest + sent.max(received) <= MAX_TIME
            }
            Some(rules) => {
                let (send_end, receive_end) =
                    rules.message(&self.profile, channel.ranks, state.size, (&send, &receive));
                let halves = [(send.rank, send_end), (receive.rank, receive_end)];
                if send_end.max(receive_end) <= MAX_TIME
                    && let Some(left) = rules_left_over(self.rules.as_mut(), halves)
                {
                    channel.orphan(if left == 0 { send } else { receive });
                    return;
                }
                (send.times[0], receive.times[0]) = (send_end, receive_end);
                send_end.max(receive_end) <= MAX_TIME
            }
        };
        if !is_in_range {
            let comm = state.lowest();
            self.broken.push(((comm, source, destination), out_of_range(comm)));
            return;
        }
        for (landed, position, is_send) in [(send, source, true), (receive, destination, false)] {
            if !channel.is_alone || is_send == half.is_send {
                let Waiting { rank, slot, times: ends, .. } = landed;
                self.landed.push(Landed { rank, slot, batch, position, ends });
            }
        }
    }

    /// The half of an ordered pair's messages that waits first: whether it sends, and how many messages were before.
    pub(super) fn waiting_half(&self, comm: u32, source: u32, destination: u32) -> Option<(bool, u64)> {
        self.channels.waiting((self.batch_of(comm).0, source, destination))
    }

    /// A role's slot has ports in these batches.
    pub(super) fn add_parts(&mut self, role: u32, slot: u32, parts: &[(u32, u32)]) {
        for (batch, count) in parts {
            let parts = &mut self.batches[*batch as usize].parts;
            let at = parts.partition_point(|part| part.key() < (role, slot));
            parts.insert(at, Part { role, slot, count: *count });
        }
    }

    /// A role's slot has no ports in these batches any more, or others.
    pub(super) fn remove_parts(&mut self, role: u32, slot: u32, parts: &[(u32, u32)]) {
        for (batch, _) in parts {
            self.batches[*batch as usize].parts.retain(|part| part.key() != (role, slot));
        }
    }
}

impl Batch {
    /// Comes to the state of one that has `width` times as many communicators.
    fn take_after(&mut self, like: &Self, width: u32) {
        self.shape.clone_from(&like.shape);
        self.layout.clone_from(&like.layout);
        self.parts.clone_from(&like.parts);
        self.posted = like.posted / width * self.comms.len() as u32;
        (self.completed, self.ops) = (like.completed, like.ops);
        (self.call, self.is_mismatched) = (like.call, like.is_mismatched);
        self.iteration = like.iteration;
    }
}

/// Which half (the send is 0) waits for ever because the rank of the other is dead before its end.
fn rules_left_over(rules: Option<&mut NetworkRules>, halves: [(u32, SimTime); 2]) -> Option<usize> {
    rules.and_then(|rules| rules.left_over(halves))
}

fn refused(comm: u32, refusal: &collective::tuning::Refusal) -> SimError {
    SimError::invalid(format!("communicator {comm}: {refusal}"))
}

fn out_of_range(comm: u32) -> SimError {
    SimError::too_long(format!("communication on communicator {comm} would end after more than 53 days"))
}

/// Absent members arrive when the (last) present one does.
fn join_absent(arrivals: &mut [SimTime], present: &[u32]) {
    let own: Vec<SimTime> = present.iter().map(|group_rank| arrivals[*group_rank as usize]).collect();
    let Some(last) = own.iter().max() else { return };
    arrivals.fill(*last);
    for (group_rank, time) in present.iter().zip(&own) {
        arrivals[*group_rank as usize] = *time;
    }
}
