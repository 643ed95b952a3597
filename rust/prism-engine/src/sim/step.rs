//! What one role can do by itself: run its streams and its host until each waits for something.

use super::invariants::{self, Mark};
use super::network::{Landed, Network, Request};
use super::perturbed::{PerturbedOp, Perturber};
use super::ports::Lanes;
use super::program::{Action, Item, Launch, Program, QUESTION, SyncTarget};
use super::role::{GroupState, LaunchState, Record, Role, Slot};
use super::signature::{Half, starts_after};
use super::speeds::Durations;
use super::trace::Tracer;
use super::vector::{self, Spent};
use crate::graph::op::Provenance;
use crate::units::SimTime;

/// What a step needs besides the role.
pub(super) struct Context<'a> {
    pub(super) program: &'a Program,
    pub(super) network: &'a mut Network,
    pub(super) tracer: &'a mut Tracer,
    pub(super) perturber: &'a mut Perturber,
}

impl Role {
    /// Runs until nothing of the role can move.
    pub(super) fn step(&mut self, context: &mut Context<'_>) {
        if self.has_failed {
            return;
        }
        self.fit_streams(context.program);
        loop {
            let mut has_moved = false;
            for stream in 0..self.streams.len() {
                has_moved |= self.step_stream(stream, context);
            }
            has_moved |= self.step_host(context.program);
            if !has_moved {
                return;
            }
        }
    }

    fn step_stream(&mut self, stream: usize, context: &mut Context<'_>) -> bool {
        let mut has_moved = false;
        while let Some(item) = context.program.item(stream, self.streams[stream].next).copied() {
            if item.segment <= self.segment {
                let num_items = self.run_chain(stream, context);
                if self.has_failed {
                    return false;
                }
                if num_items > 0 {
                    self.streams[stream].next += num_items;
                    has_moved = true;
                    continue;
                }
            }
            if item.segment > self.segment || self.dies_before(stream, &item) || !self.step_item(stream, &item, context)
            {
                break;
            }
            self.streams[stream].next += 1;
            has_moved = true;
        }
        has_moved
    }

    /// Evaluates the next item of a stream. False: it has to wait.
    fn step_item(&mut self, stream: usize, item: &Item, context: &mut Context<'_>) -> bool {
        match item.action {
            Action::Compute { duration, class, provenance, iteration, names } => {
                let op = PerturbedOp { op: item.op, stream: stream as u32, class, iteration, names };
                if !self.compute(stream, item, duration, (&op, provenance), context) {
                    return false;
                }
            }
            Action::Record(record) => {
                self.come(stream, item);
                if !context.program.is_spent(record, 0) {
                    let times = self.pool.copy(&self.streams[stream].clock);
                    self.records.insert(record, Record { times, consumed: 0 });
                }
            }
            Action::Wait(record) => {
                let Some(state) = self.records.get(&record) else { return false };
                if self.death.is_some_and(|death| state.times[0] > death) {
                    self.has_died = true;
                    return false;
                }
                let base = &self.bases[(item.segment - self.first_base) as usize];
                vector::raise_to(&mut self.streams[stream].clock, base, item.offset, &state.times);
                self.consume(record, context.program);
            }
            Action::Nothing => self.come(stream, item),
            Action::Communicate(group) => return self.communicate(stream, item, group, context),
            Action::TrainingBegin(number) => {
                self.come(stream, item);
                self.begins.insert(number, self.streams[stream].clock.clone());
                self.note_mark(stream, Mark::Begin(number));
            }
            Action::IterationEnd(number) => {
                self.come(stream, item);
                self.iteration_ends.insert(number, self.streams[stream].clock.clone());
                self.note_mark(stream, Mark::IterationEnd(number));
            }
        }
        if !matches!(item.action, Action::Communicate(_)) && item.op != QUESTION {
            self.account.ops += self.len() as u64;
        }
        true
    }

    /// The stream comes to an op without duration.
    fn come(&mut self, stream: usize, item: &Item) {
        let base = &self.bases[(item.segment - self.first_base) as usize];
        vector::raise(&mut self.streams[stream].clock, base, item.offset);
    }

    fn compute(
        &mut self,
        stream: usize,
        item: &Item,
        duration: SimTime,
        (op, provenance): (&PerturbedOp, Provenance),
        context: &mut Context<'_>,
    ) -> bool {
        let before = self.death.map(|_| self.streams[stream].clock[0]);
        let perturbed = self.perturb(stream, item, duration, op, context);
        let base = &self.bases[(item.segment - self.first_base) as usize];
        let clock = &mut self.streams[stream].clock;
        let mut total = match self.speeds.durations(item.op, duration, clock.len()) {
            Durations::Same => {
                vector::run(clock, base, item.offset, duration);
                i128::from(duration.0) * self.ranks.len() as i128
            }
            Durations::Few(few) => {
                let start = |at: u32| clock[at as usize].0.max(base[at as usize].0 + item.offset.0);
                let ends: Vec<i64> = few.iter().map(|(at, own)| start(*at) + own.0).collect();
                vector::run(clock, base, item.offset, duration);
                for ((at, _), end) in few.iter().zip(ends) {
                    clock[*at as usize].0 = end;
                }
                let more =
                    |(at, own): &(u32, SimTime)| i128::from(own.0 - duration.0) * self.lanes.weight(*at as usize);
                i128::from(duration.0) * self.ranks.len() as i128 + few.iter().map(more).sum::<i128>()
            }
            Durations::Each(each, total) => {
                vector::run_each(clock, base, item.offset, each);
                if self.lanes.is_each() { *total } else { self.lanes.sum(each.iter().map(|time| time.0)) }
            }
        };
        for own in &perturbed {
            clock[own.lane as usize] = own.end;
            total += i128::from(own.duration.0 - own.usual.0) * self.lanes.weight(own.lane as usize);
        }
        if let (Some(death), Some(before)) = (self.death, before)
            && clock[0] > death
        {
            clock[0] = before;
            self.has_died = true;
            return false;
        }
        self.account.compute(op.class, provenance, total);
        self.streams[stream].busy += total;
        let clock = &self.streams[stream].clock;
        if context.tracer.is_on() {
            let durations = self.speeds.durations(item.op, duration, clock.len());
            let mut perturbed = perturbed.iter().peekable();
            for (at, rank) in (0..).zip(&self.ranks) {
                let own = perturbed.next_if(|own| own.lane == at).map(|own| own.duration);
                let length = own.unwrap_or_else(|| durations.of(at, duration));
                let end = clock[at as usize];
                context.tracer.span(*rank, stream as u32, item.op, end - length, end);
            }
        }
        true
    }

    /// Ends of an op on the lanes whose compute is perturbed op by op.
    fn perturb(
        &mut self,
        stream: usize,
        item: &Item,
        duration: SimTime,
        op: &PerturbedOp,
        context: &mut Context<'_>,
    ) -> Vec<Perturbed> {
        if self.touched.is_empty() {
            return Vec::new();
        }
        let base = &self.bases[(item.segment - self.first_base) as usize];
        let clock = &self.streams[stream].clock;
        let durations = self.speeds.durations(item.op, duration, clock.len());
        let mut perturbed = Vec::with_capacity(self.touched.len());
        for &(lane, rank) in &self.touched {
            let start = clock[lane as usize].max(base[lane as usize] + item.offset);
            let usual = durations.of(lane, duration);
            let duration = context.perturber.duration(rank, op, context.program, start, usual);
            perturbed.push(Perturbed { lane, end: start + duration, duration, usual });
        }
        perturbed
    }

    /// Is the role's only rank dead when the stream would come to the item?
    fn dies_before(&mut self, stream: usize, item: &Item) -> bool {
        let Some(death) = self.death else { return false };
        let come = self.streams[stream].clock[0].max(self.base(item.segment)[0] + item.offset);
        self.has_died |= come > death;
        come > death
    }

    /// A wait for a record is done; the last one frees it.
    pub(super) fn consume(&mut self, record: u32, program: &Program) {
        let Some(state) = self.records.get_mut(&record) else { return };
        state.consumed += 1;
        self.forget_if_spent(record, program);
    }

    pub(super) fn forget_if_spent(&mut self, record: u32, program: &Program) {
        if self.records.get(&record).is_some_and(|state| program.is_spent(record, state.consumed)) {
            let state = self.records.remove(&record).expect("just seen");
            self.pool.give(state.times);
        }
    }

    /// Frees records that have become final since they were used last.
    pub(super) fn forget_spent(&mut self, program: &Program) {
        let pool = &mut self.pool;
        self.records.retain(|number, record| {
            let is_spent = program.is_spent(*number, record.consumed);
            if is_spent {
                pool.give(std::mem::take(&mut record.times));
            }
            !is_spent
        });
    }

    fn communicate(&mut self, stream: usize, item: &Item, group: u32, context: &mut Context<'_>) -> bool {
        if !self.streams[stream].has_entered {
            if let [launch] = &context.program.group(group).launches[..]
                && let Some(batch) = self.private_batch(launch, context)
            {
                return self.run_alone(stream, item, launch, batch, context);
            }
            self.streams[stream].has_entered = true;
            self.enter_group(stream, item, group, context);
        }
        let takes_part = |launch: &&Launch| launch.streams.iter().any(|other| other.index() == stream);
        let launches = &context.program.group(group).launches;
        let state = self.groups.get_mut(&group).expect("entered");
        if !launches
            .iter()
            .zip(&state.launches)
            .filter(|(launch, _)| takes_part(launch))
            .all(|(_, state)| state.is_done)
        {
            return false;
        }
        let clock = &mut self.streams[stream].clock;
        if let [launch] = &mut state.launches[..]
            && state.num_left + 1 == context.program.group(group).streams.len()
        {
            // Nobody ends before it has come.
            std::mem::swap(clock, &mut launch.ends);
        } else {
            for (_, state) in launches.iter().zip(&state.launches).filter(|(launch, _)| takes_part(launch)) {
                vector::wait(clock, &state.ends);
            }
        }
        self.streams[stream].has_entered = false;
        state.num_left += 1;
        if state.num_left == context.program.group(group).streams.len() {
            let state = self.groups.remove(&group).expect("just seen");
            for launch in state.launches {
                self.pool.give(launch.arrival);
                self.pool.give(launch.ends);
            }
        }
        true
    }

    /// The batch of a launch that concerns nobody but this role, and could start now.
    fn private_batch(&self, launch: &Launch, context: &Context<'_>) -> Option<u32> {
        let slot = &self.slots[launch.slot.index()];
        let is_idle = slot.active.is_none() && slot.turn == launch.turn;
        let is_simple = launch.streams.len() == 1 && launch.halves.is_empty() && self.lanes.is_each();
        let is_seen = context.network.is_apart() || context.tracer.wants_launches();
        slot.wiring.private.filter(|_| is_idle && is_simple && !is_seen)
    }

    /// Such a launch, from the stream's coming to its leaving. False: a time is out of range, which the network has noted.
    fn run_alone(
        &mut self,
        stream: usize,
        item: &Item,
        launch: &Launch,
        batch: u32,
        context: &mut Context<'_>,
    ) -> bool {
        let (mut arrival, mut ends) = (self.pool.take(), self.pool.take());
        let base = &self.bases[(item.segment - self.first_base) as usize];
        let slot = &mut self.slots[launch.slot.index()];
        let clock = &mut self.streams[stream].clock;
        vector::arrive(&mut arrival, clock, base, item.offset);
        if !launch.follows {
            vector::wait(&mut arrival, &slot.last_end);
        }
        for (at, call) in launch.calls.iter().enumerate() {
            if call.continues {
                let launched = context.network.launch_time(batch, call);
                vector::earlier(clock, launched);
            }
            let from = if at == 0 { &arrival } else { &*clock };
            if !context.network.run_private(batch, call, from, &mut ends) {
                self.has_failed = true;
                return false;
            }
            std::mem::swap(clock, &mut ends);
        }
        if !slot.last_end.is_empty() {
            slot.last_end.copy_from_slice(clock);
        }
        slot.turn += 1;
        slot.calls += launch.calls.len() as u64;
        let Spent { total: busy, least: fastest } = vector::spent(clock, &arrival);
        let least: i64 = launch.calls.iter().map(|call| context.network.least_time(batch, call)).sum();
        if fastest < least {
            self.violation.get_or_insert_with(|| invariants::short_launch(&self.ranks, &arrival, clock, least));
        }
        slot.load.busy += busy;
        slot.load.least += i128::from(least) * clock.len() as i128;
        self.account.communication += busy;
        self.streams[stream].busy += busy;
        let clock = &self.streams[stream].clock;
        self.account.ops += launch.num_ops() * clock.len() as u64;
        self.pool.give(arrival);
        self.pool.give(ends);
        if !slot.arrived.is_empty() {
            self.post_next(launch.slot.index(), context);
        }
        true
    }

    /// A stream has come to a group: launches whose last stream this is have arrived.
    fn enter_group(&mut self, stream: usize, item: &Item, number: u32, context: &mut Context<'_>) {
        let group = context.program.group(number);
        let is_single = group.launches.len() == 1 && group.streams.len() == 1;
        if !is_single {
            self.come(stream, item);
        }
        let base = &self.bases[(item.segment - self.first_base) as usize];
        let pool = &mut self.pool;
        let lanes = self.lanes.len().unwrap_or(self.ranks.len()) as u64;
        let account = &mut self.account;
        let state = self.groups.entry(number).or_insert_with(|| {
            account.ops += group.launches.iter().map(Launch::num_ops).sum::<u64>() * lanes;
            GroupState { launches: group.launches.iter().map(LaunchState::new).collect(), num_left: 0 }
        });
        let clock = &self.streams[stream].clock;
        let mut arrived = Vec::new();
        for (at, (launch, state)) in group.launches.iter().zip(&mut state.launches).enumerate() {
            if !launch.streams.iter().any(|other| other.index() == stream) {
                continue;
            }
            if is_single {
                // The clock will be that of the end.
                state.arrival = pool.take();
                vector::arrive(&mut state.arrival, clock, base, item.offset);
            } else if state.num_arrived == 0 {
                state.arrival = pool.copy(clock);
            } else {
                vector::wait(&mut state.arrival, clock);
            }
            state.num_arrived += 1;
            if state.num_arrived == launch.streams.len() {
                self.slots[launch.slot.index()].arrived.push((number, at as u32));
                arrived.push(launch.slot.index());
            }
        }
        for slot in arrived {
            self.post_next(slot, context);
        }
    }

    /// Posts the slot's next launch if it has arrived and nothing of the slot is under way.
    pub(super) fn post_next(&mut self, slot_index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[slot_index];
        if slot.active.is_some() {
            return;
        }
        let program = context.program;
        let launch_of = |(group, launch): (u32, u32)| &program.group(group).launches[launch as usize];
        let Some(at) = slot.arrived.iter().position(|key| launch_of(*key).turn == slot.turn) else { return };
        if slot.ports.is_stale(&self.lanes) {
            context.network.requests.push(Request::Post { role: self.id, slot: slot_index as u32 });
            return;
        }
        let (group, launch) = slot.arrived.swap_remove(at);
        slot.active = Some((group, launch));
        let definition = launch_of((group, launch));
        let state = &mut self.groups.get_mut(&group).expect("arrived").launches[launch as usize];
        if !definition.follows {
            vector::wait(&mut state.arrival, &slot.last_end);
        }
        let is_each = self.lanes.is_each();
        state.ends = if is_each { self.pool.copy(&state.arrival) } else { slot.ports.spread(&state.arrival) };
        if !definition.calls.is_empty() {
            slot.wiring.put(&state.ends, context.network.arrivals_mut());
        }
        self.go_on(slot_index, context);
    }

    /// The active launch of a slot posts its next collective, its messages after the last one, or ends, if what it waits for has
    /// come.
    pub(super) fn go_on(&mut self, slot_index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[slot_index];
        let Some((group, launch)) = slot.active else { return };
        let definition = &context.program.group(group).launches[launch as usize];
        let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
        if state.calls_pending > 0 {
            return;
        }
        if state.num_posted > state.num_collected {
            state.num_collected = state.num_posted;
            slot.wiring.raise(&mut state.ends, context.network.ends());
            if let Some(next) = definition.calls.get(state.num_posted) {
                context.network.arrive_again(&slot.wiring, next);
            }
        }
        if let Some(call) = definition.calls.get(state.num_posted) {
            state.num_posted += 1;
            state.calls_pending = slot.wiring.num_ports;
            slot.calls += 1;
            let mut of_all = i64::MAX;
            for (batch, count) in &slot.wiring.parts {
                let least = context.network.least_time(*batch, call);
                of_all = of_all.min(least);
                slot.load.least += i128::from(least) * i128::from(*count);
                context.network.post(*batch, *count, call, definition.origin.iteration);
            }
            state.least += of_all;
            return;
        }
        if std::mem::take(&mut state.has_messages_to_come) {
            let is_one = self.lanes.is_each() && definition.calls.is_empty() && definition.halves.len() == 1;
            state.is_one_message = is_one && slot.wiring.is_row();
            post_halves(slot, slot_index as u32, state, definition, context.network);
        }
        if state.messages_pending > 0 {
            return;
        }
        if !self.lanes.is_each() {
            let Some(ends) = slot.ports.fold(&state.ends, &self.lanes) else {
                context.network.requests.push(Request::End { role: self.id, slot: slot_index as u32 });
                return;
            };
            slot.load.busy += slot.ports.total(&state.ends, &state.arrival);
            state.ends = ends;
        }
        self.end_launch(slot_index, (group, launch), context);
    }

    /// The slot's active launch, if it only remains to end it.
    pub(super) fn ending(&self, slot_index: usize) -> Option<(u32, u32)> {
        let (group, launch) = self.slots[slot_index].active?;
        let state = &self.groups[&group].launches[launch as usize];
        let is_over = state.calls_pending == 0 && state.messages_pending == 0 && !state.has_messages_to_come;
        (is_over && state.num_collected == state.num_calls).then_some((group, launch))
    }

    /// Ends a launch of the slot whose ends are those of lanes.
    pub(super) fn end_launch(&mut self, slot_index: usize, (group, launch): (u32, u32), context: &mut Context<'_>) {
        let slot = &mut self.slots[slot_index];
        let definition = &context.program.group(group).launches[launch as usize];
        let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
        state.is_done = true;
        if !slot.last_end.is_empty() {
            slot.last_end.copy_from_slice(&state.ends);
        }
        slot.turn += 1;
        slot.active = None;
        let Spent { total: busy, least } = communication(&self.lanes, state);
        if least < state.least {
            let ranks: Vec<u32> = (0..state.ends.len()).map(|lane| self.lanes.first(lane, &self.ranks)).collect();
            let error = || invariants::short_launch(&ranks, &state.arrival, &state.ends, state.least);
            self.violation.get_or_insert_with(error);
        }
        self.account.communication += busy;
        if self.lanes.is_each() {
            slot.load.busy += busy;
        }
        if let ([_], [stream]) = (&context.program.group(group).launches[..], &definition.streams[..]) {
            self.streams[stream.index()].busy += busy;
        }
        if context.tracer.wants_launches() {
            let op = definition.calls.first().map_or_else(|| definition.halves[0].op, |call| call.op);
            for (at, rank) in self.ranks.iter().enumerate() {
                context.tracer.launch(*rank, definition.streams[0].0, op, state.arrival[at], state.ends[at]);
            }
        }
        self.post_next(slot_index, context);
    }

    /// Collectives of `count` ranks are complete. True: the role may go on.
    pub(super) fn calls_done(&mut self, slot: usize, count: u32, context: &mut Context<'_>) -> bool {
        let Some((group, launch)) = self.slots[slot].active else { return false };
        let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
        state.calls_pending -= count;
        let is_ready = state.calls_pending == 0;
        if is_ready {
            self.go_on(slot, context);
        }
        is_ready
    }

    /// Halves of messages of one strip have ended. True: the role may go on.
    pub(super) fn message_done(&mut self, landed: &mut Landed, context: &mut Context<'_>) -> bool {
        let slot_index = landed.slot as usize;
        let slot = &self.slots[slot_index];
        let Some((group, launch)) = slot.active else { return false };
        let state = &mut self.groups.get_mut(&group).expect("active").launches[launch as usize];
        let number = slot.wiring.find(landed.batch, landed.position);
        if state.is_one_message {
            // Nothing else happens in the launch, and nobody ends before it has come.
            std::mem::swap(&mut state.ends, &mut landed.ends);
        } else {
            slot.wiring.raise_strip(&slot.wiring.strips[number], &mut state.ends, &landed.ends);
        }
        state.messages[number] -= 1;
        state.messages_pending -= 1;
        let is_ready = state.messages_pending == 0;
        if is_ready {
            self.go_on(slot_index, context);
        }
        is_ready
    }

    fn step_host(&mut self, program: &Program) -> bool {
        let mut has_moved = false;
        while let Some(sync) = program.sync(self.segment) {
            let is_ready = match sync.target {
                SyncTarget::Stream(stream) => self.is_stream_idle(program, stream.index()),
                SyncTarget::Event(record) => record.is_none_or(|record| self.records.contains_key(&record)),
                SyncTarget::Device => (0..self.streams.len()).all(|stream| self.is_stream_idle(program, stream)),
            };
            if !is_ready {
                break;
            }
            let mut resume = self.pool.take();
            vector::shift(&mut resume, self.base(self.segment), sync.offset);
            match sync.target {
                SyncTarget::Stream(stream) => vector::wait(&mut resume, &self.streams[stream.index()].clock),
                SyncTarget::Event(Some(record)) => {
                    vector::wait(&mut resume, &self.records[&record].times);
                    self.consume(record, program);
                }
                SyncTarget::Event(None) => {}
                SyncTarget::Device => {
                    self.streams.iter().for_each(|stream| vector::wait(&mut resume, &stream.clock));
                }
            }
            if self.death.is_some_and(|death| resume[0] > death) {
                self.has_died = true;
                self.pool.give(resume);
                break;
            }
            self.bases.push_back(resume);
            self.segment += 1;
            self.account.ops += self.len() as u64;
            self.drop_bases(program);
            has_moved = true;
        }
        has_moved
    }

    /// Frees the starts of segments no stream will ask for.
    pub(super) fn drop_bases(&mut self, program: &Program) {
        let next = |(at, stream): (usize, &super::role::Stream)| program.item(at, stream.next).map(|item| item.segment);
        let oldest = self.streams.iter().enumerate().filter_map(next).min().unwrap_or(self.segment);
        let keep = oldest.min(self.segment).min(self.keep_segment.unwrap_or(u32::MAX));
        while self.first_base < keep {
            let times = self.bases.pop_front().expect("the current segment has a start");
            self.pool.give(times);
            self.first_base += 1;
        }
    }
}

/// Longest time to wait for a turn that can be added to any time; what comes later is out of range anyway.
const MAX_LEAD: SimTime = SimTime(i64::MAX / 4);

/// Posts the messages of a launch, each when it has its turn.
fn post_halves(slot: &mut Slot, number: u32, state: &mut LaunchState, definition: &Launch, network: &mut Network) {
    let per_strip = definition.halves.len() as u32;
    state.messages = vec![per_strip; slot.wiring.strips.len()];
    state.messages_pending = per_strip * slot.wiring.strips.len() as u32;
    let leads = message_leads(slot, state, definition, network);
    for (at, half) in definition.halves.iter().enumerate() {
        slot.make_channels(half, network);
        for (strip_at, (channel, strip)) in slot.channels(half).iter().zip(&slot.wiring.strips).enumerate() {
            // The only message of a launch comes back with the ends.
            let mut times = if state.is_one_message { std::mem::take(&mut state.ends) } else { network.take_row() };
            if !state.is_one_message {
                slot.wiring.take(strip, &state.ends, &mut times);
            }
            if let Some(leads) = leads.get(strip_at) {
                vector::earlier(&mut times, SimTime(-leads[at].0));
            }
            network.post_half(*channel, number, half, definition.origin, times);
        }
    }
}

/// From the end of the launch's collectives to the turn of each message, by strip; nothing if all are posted at once. Counts what
/// the messages take at the ports.
fn message_leads(
    slot: &mut Slot,
    state: &mut LaunchState,
    definition: &Launch,
    network: &mut Network,
) -> Vec<Vec<SimTime>> {
    let started = starts_after(&definition.calls, network.message_launch());
    if !definition.has_turns {
        let bytes = definition.halves.iter().map(Half::bytes).max().unwrap_or(0);
        let least = network.least_message_time(bytes);
        slot.load.least += i128::from(least) * i128::from(slot.wiring.num_ports);
        state.least += least;
        if started == SimTime::ZERO {
            return Vec::new();
        }
        let leads = definition.halves.iter().map(|_| SimTime(-started.0)).collect();
        return vec![leads; slot.wiring.strips.len()];
    }
    let mut by_strip = Vec::with_capacity(slot.wiring.strips.len());
    let mut of_all = i64::MAX;
    for strip in &slot.wiring.strips {
        let turns = network.turns((strip.batch, strip.position), definition, slot.wiring.first(strip, &state.ends));
        let least = if network.rules.is_none() { turns.busiest.0 } else { 0 };
        of_all = of_all.min(least);
        slot.load.least += i128::from(least) * i128::from(strip.width);
        by_strip.push(turns.leads.into_iter().map(|lead| lead.min(MAX_LEAD) - started).collect());
    }
    state.least = state.least.saturating_add(of_all);
    by_strip
}

/// Communication time of a launch over all ranks, and the shortest of any.
fn communication(lanes: &Lanes, state: &LaunchState) -> Spent {
    let spent = vector::spent(&state.ends, &state.arrival);
    if lanes.is_each() {
        return spent;
    }
    let total = lanes.sum(state.ends.iter().zip(&state.arrival).map(|(end, start)| end.0 - start.0));
    Spent { total, ..spent }
}

/// An op on a lane whose compute is perturbed.
struct Perturbed {
    lane: u32,
    end: SimTime,
    duration: SimTime,
    /// Without perturbations.
    usual: SimTime,
}

impl LaunchState {
    fn new(launch: &Launch) -> Self {
        let has_messages_to_come = !launch.halves.is_empty();
        Self { num_calls: launch.calls.len(), has_messages_to_come, ..Self::default() }
    }
}
