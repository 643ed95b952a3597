//! How far virtual ranks may go beside live ones.
//!
//! A virtual rank's program is its prologue (up to and with the marker `TrainingBegin`), one body per recorded iteration (up to
//! and with `IterationEnd`), and an epilogue. The prologue runs freely. Marker 0 is `TrainingBegin`, marker `k` the `k`-th
//! `IterationEnd`. The *decider* is the lowest live rank that has not ended without passing the marker in question:
//!
//! * iteration 0 may be entered when the decider has passed marker 0;
//! * iteration `k`, when it has passed marker `k` and its next communication op tells that it goes on: the op must equal
//!   (members, kind, count) the first one of the body that virtual ranks would run, i.e. of recorded iteration `k`, or of the last
//!   recorded one when the graph has no more, and must not equal the epilogue's first then. For recorded iterations it is
//!   enough that the op is not the epilogue's first.
//!   A body without communication is entered when the decider passes marker `k + 1`;
//! * otherwise, and when every live rank has ended, virtual ranks run the epilogue.
//!
//! So a program may do fewer or more iterations than were recorded. Without markers in the graph everything is prologue.

use super::error::SimError;
use super::live::LiveRank;
use super::program::Program;
use crate::graph::Graph;
use crate::graph::op::{CollectiveKind, OpKind};
use crate::ids::{CommId, Rank, TemplateId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A communication op as far as programs are compared by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FirstCall {
    members: Arc<[u32]>,
    what: What,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Collective(CollectiveKind),
    Message { is_send: bool, peer: u32 },
}

impl FirstCall {
    /// `None` if the op is no communication.
    pub(super) fn of(kind: &OpKind, members: impl FnOnce(u32) -> Arc<[u32]>) -> Option<Self> {
        let (slot, what, count) = match *kind {
            OpKind::Collective { slot, kind, count, .. } => (slot, What::Collective(kind), count),
            OpKind::PointToPoint { slot, is_send, peer, count, .. } => (slot, What::Message { is_send, peer }, count),
            _ => return None,
        };
        Some(Self { members: members(slot.0), what, count })
    }
}

/// Parts of a template, as op ranges.
#[derive(Clone, Debug)]
struct Parts {
    prologue: Range<usize>,
    bodies: Vec<Range<usize>>,
    epilogue: Range<usize>,
    has_begin: bool,
}

impl Parts {
    fn of(graph: &Graph, template: TemplateId) -> Self {
        let view = graph.template(template);
        let mut parts = Self { prologue: 0..0, bodies: Vec::new(), epilogue: 0..view.len(), has_begin: false };
        for (index, op) in view.iter().enumerate() {
            let rest = parts.epilogue.start;
            match op.kind {
                OpKind::TrainingBegin if parts.bodies.is_empty() => {
                    parts.prologue = 0..index + 1;
                    parts.has_begin = true;
                }
                OpKind::IterationEnd => parts.bodies.push(rest..index + 1),
                _ => continue,
            }
            parts.epilogue = index + 1..view.len();
        }
        if parts.bodies.is_empty() {
            (parts.prologue, parts.epilogue) = (0..view.len(), 0..0);
        }
        parts
    }
}

#[derive(Clone, Debug)]
struct Plan {
    template: TemplateId,
    program: usize,
    parts: Parts,
}

/// What a live rank's own recorded program does first in each part.
#[derive(Clone, Debug)]
struct Expected {
    bodies: Vec<Option<FirstCall>>,
    epilogue: Option<FirstCall>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Gate {
    is_open: bool,
    plans: Vec<Plan>,
    expected: BTreeMap<Rank, Expected>,
    num_iterations: usize,
    has_begin: bool,
    /// Next iteration to enter.
    next: usize,
    is_done: bool,
}

/// What virtual ranks do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Wait,
    Enter,
    Finish,
}

impl Gate {
    /// A gate that is open if there is no live rank.
    pub(super) fn new(graph: &Graph, live: &[Rank]) -> Result<Self, SimError> {
        let mut gate = Self { is_open: live.is_empty(), ..Self::default() };
        if gate.is_open {
            return Ok(gate);
        }
        let parts: Vec<Parts> = (0..graph.num_templates()).map(|t| Parts::of(graph, TemplateId(t as u32))).collect();
        let Some(first) = parts.first() else { return Ok(gate) };
        if let Some(other) = parts.iter().position(|parts| parts.bodies.len() != first.bodies.len()) {
            return Err(SimError::invalid(format!(
                "template {other} has {} iterations, template 0 has {}: roles of one job iterate together",
                parts[other].bodies.len(),
                first.bodies.len()
            )));
        }
        gate.num_iterations = first.bodies.len();
        gate.has_begin = parts.iter().any(|parts| parts.has_begin);
        for rank in live {
            let parts = &parts[graph.rank_template(*rank).index()];
            let first_call = |range: &Range<usize>| first_call(graph, *rank, range.clone());
            let bodies = parts.bodies.iter().map(first_call).collect();
            gate.expected.insert(*rank, Expected { bodies, epilogue: first_call(&parts.epilogue) });
        }
        Ok(gate)
    }

    /// Fills a new program with what its ranks may run at once.
    pub(super) fn add_program(
        &mut self,
        graph: &Graph,
        template: TemplateId,
        program: usize,
        into: &mut Program,
    ) -> Result<(), SimError> {
        if self.is_open {
            append(graph, template, 0..graph.template(template).len(), into)?;
            into.finish();
            return Ok(());
        }
        let parts = Parts::of(graph, template);
        append(graph, template, parts.prologue.clone(), into)?;
        if self.num_iterations == 0 {
            into.finish();
        }
        self.plans.push(Plan { template, program, parts });
        Ok(())
    }

    /// Lets virtual ranks go on if they may. True if anything was added to their programs.
    pub(super) fn pass(
        &mut self,
        graph: &Graph,
        live: &BTreeMap<Rank, LiveRank>,
        programs: &mut [Program],
    ) -> Result<bool, SimError> {
        if self.is_open || self.is_done || self.num_iterations == 0 {
            return Ok(false);
        }
        let decision = self.decide(live);
        match decision {
            Decision::Wait => return Ok(false),
            Decision::Enter => {
                let body = self.next.min(self.num_iterations - 1);
                for plan in &self.plans {
                    append(graph, plan.template, plan.parts.bodies[body].clone(), &mut programs[plan.program])?;
                }
                self.next += 1;
            }
            Decision::Finish => {
                for plan in &self.plans {
                    append(graph, plan.template, plan.parts.epilogue.clone(), &mut programs[plan.program])?;
                    programs[plan.program].finish();
                }
                self.is_done = true;
            }
        }
        Ok(true)
    }

    /// Programs that follow the gate.
    pub(super) fn programs(&self) -> impl Iterator<Item = usize> + '_ {
        self.plans.iter().map(|plan| plan.program)
    }

    fn decide(&self, live: &BTreeMap<Rank, LiveRank>) -> Decision {
        if self.next == 0 && !self.has_begin {
            return Decision::Enter;
        }
        let Some((rank, decider)) = live.iter().find(|(_, live)| !live.has_ended() || live.has_passed(self.next))
        else {
            return Decision::Finish;
        };
        if !decider.has_passed(self.next) {
            return Decision::Wait;
        }
        if self.next == 0 {
            return Decision::Enter;
        }
        let expected = &self.expected[rank];
        let body = &expected.bodies[self.next.min(self.num_iterations - 1)];
        match decider.first_call_after(self.next) {
            // After the recorded iterations, an op that may begin either the epilogue or a body ends the program: most
            // programs do as many iterations as they did when they were recorded.
            Some(call) if self.next >= self.num_iterations && expected.epilogue.as_ref() == Some(call) => {
                Decision::Finish
            }
            Some(call) if body.as_ref() == Some(call) => Decision::Enter,
            Some(call) if self.next < self.num_iterations && expected.epilogue.as_ref() != Some(call) => {
                Decision::Enter
            }
            Some(_) => Decision::Finish,
            None if decider.has_passed(self.next + 1) => Decision::Enter,
            None if decider.has_ended() => Decision::Finish,
            None => Decision::Wait,
        }
    }
}

/// The first communication op of a rank in a part of its recorded program.
fn first_call(graph: &Graph, rank: Rank, range: Range<usize>) -> Option<FirstCall> {
    let view = graph.template(graph.rank_template(rank));
    let members = |slot: u32| graph.comm_members(CommId(graph.rank_slots(rank)[slot as usize])).into();
    range.into_iter().find_map(|op| FirstCall::of(&view.op(op).kind, members))
}

fn append(graph: &Graph, template: TemplateId, range: Range<usize>, into: &mut Program) -> Result<(), SimError> {
    let view = graph.template(template);
    for index in range {
        into.push(&view.op(index), index as u32)?;
    }
    into.close_group();
    Ok(())
}
