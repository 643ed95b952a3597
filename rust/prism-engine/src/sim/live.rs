//! Ranks that run for real: their ops arrive while the simulation runs, their questions are answered from it.

use super::Simulation;
use super::error::SimError;
use super::gate::FirstCall;
use super::ports::{Lanes, Ports};
use super::program::Program;
use super::role::Role;
use super::speeds::Speeds;
use super::wiring::Address;
use crate::graph::op::{Op, OpKind};
use crate::ids::{EventId, NameId, Rank, SlotId, StreamId};
use crate::units::SimTime;
use std::collections::BTreeMap;

/// Items a live rank's program may hold before what is done is dropped.
const HELD_ITEMS: usize = 1024;

/// What a live rank wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// When does the host continue after the synchronisation pushed last?
    Resume,
    /// Is the event complete?
    EventDone {
        /// Which event.
        event: EventId,
        /// Host time of the question.
        at: SimTime,
    },
    /// Is everything issued to the stream so far complete?
    StreamDone {
        /// Which stream.
        stream: StreamId,
        /// Host time of the question.
        at: SimTime,
    },
    /// Device time between two events.
    Elapsed {
        /// Earlier event.
        from: EventId,
        /// Later event.
        to: EventId,
    },
}

/// The answer to a [`Question`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The host continues then.
    Resume(SimTime),
    /// Whether it is complete.
    Done(bool),
    /// The time between the events.
    Elapsed(SimTime),
}

/// A question, told in the program's own terms.
#[derive(Clone, Copy, Debug)]
enum Pending {
    Resume { segment: u32 },
    Done { record: u32, at: SimTime },
    Elapsed { from: u32, to: u32 },
}

/// What is kept of a live rank besides its role.
#[derive(Debug, Default)]
pub(super) struct LiveRank {
    pub(super) role: u32,
    num_ops: u32,
    /// Communicators made so far, by members.
    instances: BTreeMap<Vec<u32>, usize>,
    /// First communication op after each marker passed; index 0 is `TrainingBegin`.
    markers: Vec<Option<FirstCall>>,
    has_ended: bool,
    pending: BTreeMap<u64, Pending>,
    /// Calls and bytes by communicator.
    pub(super) uses: BTreeMap<u32, (u64, u64)>,
}

impl LiveRank {
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    pub(super) fn has_passed(&self, marker: usize) -> bool {
        self.markers.len() > marker
    }

    pub(super) fn first_call_after(&self, marker: usize) -> Option<&FirstCall> {
        self.markers.get(marker)?.as_ref()
    }

    fn pass_marker(&mut self, kind: &OpKind) {
        // A program without `TrainingBegin` passes it with its first iteration.
        if *kind == OpKind::IterationEnd && self.markers.is_empty() {
            self.markers.push(None);
        }
        self.markers.push(None);
    }
}

impl Simulation {
    pub(super) fn add_live_rank(&mut self, rank: Rank) {
        let mut program = Program::new(self.stretch(&[rank.0]));
        if let Some(count) = self.perturber.rules().deaths(rank).1 {
            program.die_after(count);
        }
        self.programs.push(program);
        let speeds = Speeds::alone(self.factor(rank.0));
        let role = self.insert_role(Role::new(self.programs.len() - 1, vec![rank.0], Lanes::default(), speeds));
        self.live.insert(rank, LiveRank { role, ..LiveRank::default() });
    }

    fn live_mut(&mut self, rank: Rank) -> Result<&mut LiveRank, SimError> {
        let live = self.live.get_mut(&rank).filter(|live| !live.has_ended);
        live.ok_or_else(|| SimError::invalid(format!("rank {rank} is not running")))
    }

    /// A live rank makes a communicator of these members (global ranks in group-rank order): its next slot. With a graph,
    /// the communicator is that of the rank's own slot with the same members that has as many predecessors.
    pub fn live_comm(&mut self, rank: Rank, members: &[u32]) -> Result<SlotId, SimError> {
        let world_size = self.world_size;
        let live = self.live_mut(rank)?;
        let (role, instance) = (live.role, live.instances.get(members).copied().unwrap_or(0));
        check_members(rank, members, world_size)?;
        let comm = self.find_comm(rank, members, instance)?;
        self.live_mut(rank)?.instances.insert(members.to_vec(), instance + 1);
        let state = &mut self.roles[role as usize];
        let slot = state.slots.len() as u32;
        let (batch, column) = self.network.batch_of(comm);
        let position = self.network.group_rank(comm, rank.0);
        let context = (&self.programs[state.program], &mut self.network);
        state.add_slot(&[Address { batch, position, column }], Ports::default(), context);
        Ok(SlotId(slot))
    }

    fn find_comm(&mut self, rank: Rank, members: &[u32], instance: usize) -> Result<u32, SimError> {
        if let Some(graph) = &self.graph {
            let is_same = |comm: &&u32| self.network.members(**comm) == members;
            let unknown = || SimError::UnknownCommunicator { rank, members: members.to_vec(), instance };
            return graph.rank_slots(rank).iter().filter(is_same).nth(instance).copied().ok_or_else(unknown);
        }
        let mut same = (0..self.network.num_comms() as u32).filter(|comm| self.network.members(*comm) == members);
        if let Some(comm) = same.nth(instance) {
            return Ok(comm);
        }
        let is_live = |member: &u32| self.live.contains_key(&Rank(*member));
        let present = (0..members.len() as u32).filter(|at| is_live(&members[*at as usize])).collect();
        Ok(self.network.add_comm(members.into(), Some(present)))
    }

    /// Does the simulation want to know the texts of a live rank's names?
    pub fn wants_names(&self) -> bool {
        self.perturber.rules().has_name_filters()
    }

    /// Tells the text of a name, before the first op of that name is pushed.
    pub fn tell_name(&mut self, rank: Rank, name: NameId, text: &str) -> Result<(), SimError> {
        let mask = self.perturber.rules().name_mask(text);
        let role = self.live_mut(rank)?.role;
        self.programs[self.roles[role as usize].program].set_name(name, mask);
        Ok(())
    }

    /// A live rank issues an op. Synchronisations hold its host until they are answered ([`Question::Resume`]).
    pub fn push(&mut self, rank: Rank, op: Op) -> Result<(), SimError> {
        let live = self.live_mut(rank)?;
        let (role, number) = (live.role, live.num_ops);
        live.num_ops += 1;
        self.note(rank, role, &op.kind)?;
        let state = &mut self.roles[role as usize];
        let program = &mut self.programs[state.program];
        if let Some(superseded) = program.push(&op, number)? {
            state.forget_if_spent(superseded, program);
        }
        self.enqueue(role);
        Ok(())
    }

    /// Keeps what the op says about communication and progress; refuses ops that name what the rank does not have.
    fn note(&mut self, rank: Rank, role: u32, kind: &OpKind) -> Result<(), SimError> {
        let (slot, peer, bytes) = match *kind {
            OpKind::Collective { slot, dtype, root, count, .. } => {
                (slot, root, count.saturating_mul(dtype.size_bytes()))
            }
            OpKind::PointToPoint { slot, dtype, peer, count, .. } => {
                (slot, peer, count.saturating_mul(dtype.size_bytes()))
            }
            OpKind::TrainingBegin | OpKind::IterationEnd => {
                self.live_mut(rank)?.pass_marker(kind);
                return Ok(());
            }
            _ => return Ok(()),
        };
        let Some(strip) = self.roles[role as usize].slots.get(slot.index()).map(|slot| slot.wiring.strips[0]) else {
            return Err(SimError::invalid(format!("rank {rank} has no communicator slot {slot}")));
        };
        // A running rank's communicators are alone in their batches.
        let comm = self.network.batches[strip.batch as usize].comms[0];
        let members = self.network.members(comm);
        if peer as usize >= members.len() {
            let size = members.len();
            return Err(SimError::invalid(format!(
                "rank {rank} names group rank {peer} of communicator {comm}, which has {size}"
            )));
        }
        let live = self.live.get_mut(&rank).expect("was just pushed to");
        let (calls, sum) = live.uses.entry(comm).or_default();
        (*calls, *sum) = (*calls + 1, sum.saturating_add(bytes));
        if let Some(first @ None) = live.markers.last_mut() {
            *first = FirstCall::of(kind, |_| members.into());
        }
        Ok(())
    }

    /// The open group of a live rank is complete. (Any op outside the group says so too.)
    pub fn close_group(&mut self, rank: Rank) -> Result<(), SimError> {
        let role = self.live_mut(rank)?.role;
        self.programs[self.roles[role as usize].program].close_group();
        self.enqueue(role);
        Ok(())
    }

    /// Asks for something; [`Self::take_answers`] has the answer under `ticket` once a run knows it. A ticket is used once
    /// per rank. A question about an event that was never recorded: complete; its time: an error of the next run.
    pub fn ask(&mut self, rank: Rank, question: Question, ticket: u64) {
        let Some(live) = self.live.get_mut(&rank) else { return };
        let role = &mut self.roles[live.role as usize];
        let program = &mut self.programs[role.program];
        if program.is_cut() {
            // The dead are not answered.
            live.pending.insert(ticket, Pending::Resume { segment: u32::MAX });
            return;
        }
        let mut use_of = |event: EventId| {
            let record = program.latest_record(event)?;
            program.add_use(record);
            Some(record)
        };
        let pending = match question {
            Question::Resume => {
                let segment = program.last_segment();
                role.keep_segment = Some(role.keep_segment.map_or(segment, |other| other.min(segment)));
                Pending::Resume { segment }
            }
            Question::EventDone { event, at } => match use_of(event) {
                Some(record) => Pending::Done { record, at },
                None => return self.answers.push((rank, ticket, Answer::Done(true))),
            },
            Question::StreamDone { stream, at } => Pending::Done { record: program.record_for_question(stream), at },
            Question::Elapsed { from, to } => {
                let (Some(first), Some(second)) = (program.latest_record(from), program.latest_record(to)) else {
                    let event = if program.latest_record(from).is_none() { from } else { to };
                    self.failure.get_or_insert(SimError::NeverRecorded { rank, event });
                    return;
                };
                program.add_use(first);
                program.add_use(second);
                Pending::Elapsed { from: first, to: second }
            }
        };
        live.pending.insert(ticket, pending);
        let role = live.role;
        self.enqueue(role);
    }

    /// Answers what has become known.
    pub(super) fn answer_questions(&mut self) {
        for (rank, live) in &mut self.live {
            let role = &mut self.roles[live.role as usize];
            let program = &mut self.programs[role.program];
            let tickets: Vec<u64> = live.pending.keys().copied().collect();
            for ticket in tickets {
                if let Some(answer) = answer(role, live.pending[&ticket]) {
                    release(role, program, live.pending.remove(&ticket));
                    self.answers.push((*rank, ticket, answer));
                }
            }
            let resumes = live.pending.values().filter_map(|pending| match pending {
                Pending::Resume { segment } => Some(*segment),
                _ => None,
            });
            role.keep_segment = resumes.min();
            role.drop_bases(program);
            if program.held() > HELD_ITEMS && role.is_drained(program) && role.groups.is_empty() {
                program.drop_done(|record| role.records.contains_key(&record));
            }
        }
    }

    /// The answers since the last call, in order of rank and ticket.
    pub fn take_answers(&mut self) -> Vec<(Rank, u64, Answer)> {
        let mut answers = std::mem::take(&mut self.answers);
        answers.sort_by_key(|(rank, ticket, _)| (*rank, *ticket));
        answers
    }

    /// Nothing can move and every live rank waits: those of the open questions whether something is complete that `is_meant`
    /// picks by rank and ticket are answered with no, so that programs that poll go on. What they see does not depend on who
    /// was fed first, because the state in which nothing moves does not.
    pub fn settle_questions(&mut self, is_meant: impl Fn(Rank, u64) -> bool) {
        for (rank, live) in &mut self.live {
            let role = &mut self.roles[live.role as usize];
            let program = &mut self.programs[role.program];
            let is_done = |pending: &Pending| matches!(pending, Pending::Done { .. });
            let open = live.pending.iter().filter(|(ticket, pending)| is_done(pending) && is_meant(*rank, **ticket));
            let tickets: Vec<u64> = open.map(|(ticket, _)| *ticket).collect();
            for ticket in tickets {
                release(role, program, live.pending.remove(&ticket));
                self.answers.push((*rank, ticket, Answer::Done(false)));
            }
        }
    }

    /// Completion of the latest record of an event, if it is known. `None` too if it was never recorded.
    pub fn peek_event(&self, rank: Rank, event: EventId) -> Option<SimTime> {
        let live = self.live.get(&rank)?;
        let role = &self.roles[live.role as usize];
        let record = self.programs[role.program].latest_record(event)?;
        role.records.get(&record).map(|record| record.times[0])
    }

    /// The program of a live rank has ended: no more ops, no more questions.
    pub fn end_live(&mut self, rank: Rank) {
        let Some(live) = self.live.get_mut(&rank) else { return };
        live.has_ended = true;
        live.pending.clear();
        let (role, state) = (live.role, &mut self.roles[live.role as usize]);
        state.keep_segment = None;
        self.programs[state.program].finish();
        self.enqueue(role);
    }

    /// Virtual ranks enter what the live ranks allow. True if they did.
    pub(super) fn pass_gates(&mut self) -> Result<bool, SimError> {
        let Some(graph) = self.graph.clone() else { return Ok(false) };
        self.drop_done();
        if !self.gate.pass(&graph, &self.live, &mut self.programs)? {
            return Ok(false);
        }
        let gated: Vec<usize> = self.gate.programs().collect();
        for id in 0..self.roles.len() {
            if gated.contains(&self.roles[id].program) {
                let role = &mut self.roles[id];
                role.forget_spent(&self.programs[role.program]);
                self.enqueue(id as u32);
            }
        }
        Ok(true)
    }
}

impl Simulation {
    /// Drops what all virtual ranks of a program are through with.
    fn drop_done(&mut self) {
        for at in self.gate.programs() {
            if self.programs[at].held() <= HELD_ITEMS {
                continue;
            }
            let program = &mut self.programs[at];
            let roles = self.roles.iter().filter(|role| role.program == at);
            if roles.clone().all(|role| role.is_drained(program) && role.groups.is_empty()) {
                program.drop_done(|record| roles.clone().any(|role| role.records.contains_key(&record)));
            }
        }
    }
}

fn check_members(rank: Rank, members: &[u32], world_size: u32) -> Result<(), SimError> {
    if let Some(outside) = members.iter().find(|member| **member >= world_size) {
        return Err(SimError::invalid(format!("rank {rank} makes a communicator with rank {outside} of {world_size}")));
    }
    let mut sorted = members.to_vec();
    sorted.sort_unstable();
    if sorted.binary_search(&rank.0).is_err() || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        let message = format!("rank {rank} makes a communicator whose members lack it or repeat: {members:?}");
        return Err(SimError::invalid(message));
    }
    Ok(())
}

fn answer(role: &Role, pending: Pending) -> Option<Answer> {
    let time = |record: u32| role.records.get(&record).map(|record| record.times[0]);
    match pending {
        Pending::Resume { segment } => (role.segment >= segment).then(|| Answer::Resume(role.base(segment)[0])),
        Pending::Done { record, at } => Some(Answer::Done(time(record)? <= at)),
        Pending::Elapsed { from, to } => Some(Answer::Elapsed(time(to)? - time(from)?)),
    }
}

/// A question is answered: its records are no longer needed for it.
fn release(role: &mut Role, program: &mut Program, pending: Option<Pending>) {
    let records = match pending {
        Some(Pending::Done { record, .. }) => vec![record],
        Some(Pending::Elapsed { from, to }) => vec![from, to],
        Some(Pending::Resume { .. }) | None => vec![],
    };
    for record in records {
        program.remove_use(record);
        role.forget_if_spent(record, program);
    }
}
