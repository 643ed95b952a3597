//! What must hold in a graph.
//!
//! *Structure* is checked whenever a graph is built or opened, so that readers may index without looking. *Matching*
//! ([`Graph::check`]) says whether the ranks' programs fit together: a graph that fails it would hang or exchange
//! messages of unequal size.

use crate::graph::columns::{OpRow, tag};
use crate::graph::op::{DataType, Op, OpKind};
use crate::graph::{Graph, GraphError, Shape, overrides};
use crate::ids::{CommId, Rank, TemplateId};
use std::collections::BTreeMap;

/// A row is an op, in the one way it is written, and its name exists.
pub(super) fn row(row: OpRow, num_names: usize) -> Result<(), &'static str> {
    let kind = row.unpack(0)?;
    if OpRow::pack(crate::ids::StreamId(row.stream), kind).0 != row {
        return Err("a field that the op does not have is not zero");
    }
    match kind {
        OpKind::Compute { name, .. } if name.index() >= num_names => Err("its name was never interned"),
        OpKind::Compute { duration, .. } if duration.as_ps() < 0 => Err("its duration is negative"),
        // Readers size tables by the highest number.
        _ if row.stream >= MAX_STREAMS => Err("its stream number is not dense (2^16 or more)"),
        _ if row.is_event() && row.arg >= MAX_EVENTS => Err("its event number is not dense (2^24 or more)"),
        _ => Ok(()),
    }
}

const MAX_STREAMS: u32 = 1 << 16;
const MAX_EVENTS: u32 = 1 << 24;

/// A host gap is not negative.
pub(super) fn gap(ps: i64) -> Result<(), &'static str> {
    if ps < 0 { Err("its host gap is negative") } else { Ok(()) }
}

/// Watches that ops of one group are neighbours and group numbers rise.
#[derive(Default)]
pub(super) struct GroupOrder {
    previous: u32,
    last: u32,
}

impl GroupOrder {
    pub(super) fn next(&mut self, group: u32) -> Result<(), &'static str> {
        if group != 0 && group != self.previous && group <= self.last {
            return Err("its group was closed before; ops of one group must be neighbours and group numbers must rise");
        }
        self.previous = group;
        self.last = self.last.max(group);
        Ok(())
    }
}

/// Streams, events and slots of every template; checks its groups.
pub(super) fn shapes(graph: &Graph) -> Result<Vec<Shape>, GraphError> {
    let shape_of = |template: usize| {
        let view = graph.template(TemplateId(template as u32));
        let mut shape = Shape::default();
        let mut groups = GroupOrder::default();
        for op in 0..view.len() {
            let row = view.row(op);
            shape.streams = shape.streams.max(row.stream + 1);
            if row.is_event() {
                shape.events = shape.events.max(row.arg + 1);
            }
            if row.is_comm() {
                let slots = row.slot.checked_add(1);
                shape.slots =
                    shape.slots.max(slots.ok_or_else(|| of_template(view.name(), op, "its slot is 2^32 - 1"))?);
            } else if view.group(op) != 0 {
                return Err(of_template(view.name(), op, "only communication can be grouped"));
            }
            groups.next(view.group(op)).map_err(|what| of_template(view.name(), op, what))?;
        }
        Ok(shape)
    };
    (0..graph.num_templates()).map(shape_of).collect()
}

fn of_template(name: &str, op: usize, what: &str) -> GraphError {
    GraphError::invalid(None, Some(op as u32), format!("template \"{name}\": {what}"))
}

/// Tables agree: templates and communicators exist, slots suffice, members are distinct ranks that have the communicator
/// in their slots, peers and roots are members, overrides are of compute ops. O(template ops + memberships).
pub(super) fn structure(graph: &Graph) -> Result<(), GraphError> {
    if graph.world_size() == 0 {
        return Err(GraphError::invalid(None, None, "the world has no ranks"));
    }
    let limits = peer_limits(graph);
    for rank in 0..graph.world_size() {
        let template = graph.ranks.template[rank as usize] as usize;
        let Some(limits) = limits.get(template) else {
            return Err(GraphError::invalid(Some(rank), None, format!("template {template} does not exist")));
        };
        check_slots(graph, rank, graph.templates.shapes[template].slots, limits)?;
    }
    members(graph)?;
    overrides::check(graph)
}

/// Highest peer or root of one slot, and the op that names it.
struct PeerLimit {
    slot: u32,
    peer: u32,
    op: usize,
}

/// Per template, the limits of the slots it uses.
fn peer_limits(graph: &Graph) -> Vec<Vec<PeerLimit>> {
    let mut seen_in = vec![usize::MAX; graph.ops.len()];
    let mut limits_of = |template: usize| {
        let view = graph.template(TemplateId(template as u32));
        let mut limits: BTreeMap<u32, (u32, usize)> = BTreeMap::new();
        for op in 0..view.len() {
            if std::mem::replace(&mut seen_in[view.row_index(op)], template) == template {
                continue;
            }
            let row = view.row(op);
            if row.is_comm() {
                let limit = limits.entry(row.slot).or_insert((row.arg, op));
                if row.arg > limit.0 {
                    *limit = (row.arg, op);
                }
            }
        }
        limits.into_iter().map(|(slot, (peer, op))| PeerLimit { slot, peer, op }).collect()
    };
    (0..graph.num_templates()).map(&mut limits_of).collect()
}

fn check_slots(graph: &Graph, rank: u32, used: u32, limits: &[PeerLimit]) -> Result<(), GraphError> {
    let slots = graph.ranks.slots(rank as usize);
    if slots.len() < used as usize {
        let message = format!("its program uses {used} communicator slots, but only {} are set", slots.len());
        return Err(GraphError::invalid(Some(rank), None, message));
    }
    if let Some(comm) = slots.iter().find(|comm| **comm as usize >= graph.num_comms()) {
        return Err(GraphError::invalid(Some(rank), None, format!("communicator {comm} does not exist")));
    }
    for &PeerLimit { slot, peer, op } in limits {
        let comm = slots[slot as usize];
        let size = graph.comms.members(comm as usize).len();
        if peer as usize >= size {
            let message =
                format!("group rank {peer} does not exist in communicator {comm} (slot {slot}, {size} members)");
            return Err(GraphError::invalid(Some(rank), Some(op as u32), message));
        }
    }
    Ok(())
}

/// Every membership is in a member list and in a slot table, once in each.
fn members(graph: &Graph) -> Result<(), GraphError> {
    let owners = SlotOwners::new(graph);
    let mut mark = vec![u32::MAX; graph.world_size() as usize];
    for comm in 0..graph.num_comms() {
        let members = graph.comms.members(comm);
        if members.is_empty() {
            return Err(GraphError::invalid(None, None, format!("communicator {comm} has no members")));
        }
        for rank in members {
            let what = match mark.get_mut(*rank as usize) {
                None => "is not a rank of the world",
                Some(mark) if *mark == comm as u32 => "is listed twice",
                Some(mark) => {
                    *mark = comm as u32;
                    continue;
                }
            };
            return Err(GraphError::invalid(Some(*rank), None, format!("communicator {comm}: the member {what}")));
        }
        for (rank, slot) in owners.of(comm) {
            if std::mem::replace(&mut mark[rank as usize], u32::MAX) != comm as u32 {
                let message = format!("slot {slot} is communicator {comm}, of which it is no member, or has it twice");
                return Err(GraphError::invalid(Some(rank), None, message));
            }
        }
        if let Some(rank) = members.iter().find(|rank| mark[**rank as usize] == comm as u32) {
            let message = format!("it is a member of communicator {comm} but has no slot for it");
            return Err(GraphError::invalid(Some(*rank), None, message));
        }
    }
    Ok(())
}

/// Ranks and slots by communicator, ranks ascending.
struct SlotOwners {
    start: Vec<usize>,
    entries: Vec<(u32, u32)>,
}

impl SlotOwners {
    fn new(graph: &Graph) -> Self {
        let mut start = vec![0; graph.num_comms() + 1];
        graph.ranks.slots.iter().for_each(|comm| start[*comm as usize + 1] += 1);
        (1..start.len()).for_each(|comm| start[comm] += start[comm - 1]);
        let mut next = start.clone();
        let mut entries = vec![(0, 0); graph.ranks.slots.len()];
        for rank in 0..graph.world_size() {
            for (slot, comm) in graph.ranks.slots(rank as usize).iter().enumerate() {
                entries[next[*comm as usize]] = (rank, slot as u32);
                next[*comm as usize] += 1;
            }
        }
        Self { start, entries }
    }

    fn of(&self, comm: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.entries[self.start[comm]..self.start[comm + 1]].iter().copied()
    }
}

/// What one slot of a template does, for comparison with the same communicator's slots on other ranks.
#[derive(Default)]
struct SlotProfile {
    collectives: Sequence,
    /// Messages by (peer, is_send): of one ordered pair the k-th send meets the k-th receive.
    messages: BTreeMap<(u32, bool), Sequence>,
}

/// Length and hash of a sequence; collisions are found by nobody but an adversary, who gains a graph that hangs.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Sequence {
    len: u64,
    hash: u64,
}

impl Sequence {
    fn push(&mut self, value: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        self.len += 1;
        let mixed = (self.hash.rotate_left(23) ^ value).wrapping_mul(ODD);
        self.hash = mixed ^ (mixed >> 29);
    }
}

impl Graph {
    /// Do the programs fit together? Members of a communicator must call the same collectives in the same order, and
    /// every send must meet a receive of the same size. Compares per distinct template and slot: O(template ops +
    /// memberships + messages' ordered pairs).
    pub fn check(&self) -> Result<(), GraphError> {
        let mut profiles: BTreeMap<u32, Vec<SlotProfile>> = BTreeMap::new();
        for template in self.ranks.template.iter() {
            profiles.entry(*template).or_insert_with(|| slot_profiles(self, *template));
        }
        let owners = SlotOwners::new(self);
        let unused = SlotProfile::default();
        let profile =
            |rank: u32, slot: u32| profiles[&self.ranks.template[rank as usize]].get(slot as usize).unwrap_or(&unused);
        let mut slot_of = vec![0; self.world_size() as usize];
        for comm in 0..self.num_comms() {
            owners.of(comm).for_each(|(rank, slot)| slot_of[rank as usize] = slot);
            let members = self.comms.members(comm);
            let Some(&first) = members.first() else { continue };
            let expected = profile(first, slot_of[first as usize]);
            for (group_rank, &rank) in members.iter().enumerate() {
                let mine = profile(rank, slot_of[rank as usize]);
                if mine.collectives != expected.collectives {
                    let slots = (slot_of[first as usize], slot_of[rank as usize]);
                    return Err(self.collective_mismatch(comm, (first, slots.0), (rank, slots.1)));
                }
                for (&(peer, is_send), sequence) in &mine.messages {
                    let other = members[peer as usize];
                    let theirs = profile(other, slot_of[other as usize]);
                    let theirs = theirs.messages.get(&(group_rank as u32, !is_send)).copied().unwrap_or_default();
                    if theirs != *sequence {
                        return Err(message_mismatch(comm, rank, other, is_send, *sequence, theirs));
                    }
                }
            }
        }
        Ok(())
    }

    fn collective_mismatch(&self, comm: usize, first: (u32, u32), second: (u32, u32)) -> GraphError {
        let calls = |(rank, slot): (u32, u32)| {
            let view = self.template(self.rank_template(Rank(rank)));
            (0..view.len()).filter(move |op| {
                let row = view.row(*op);
                row.tag == tag::COLLECTIVE && row.slot == slot
            })
        };
        let tell = |rank: u32, op: Option<usize>| match op {
            Some(op) => describe(&self.template(self.rank_template(Rank(rank))).op(op)),
            None => "nothing more".to_owned(),
        };
        let (mut left, mut right) = (calls(first), calls(second));
        let mut number = 0;
        loop {
            let (a, b) = (left.next(), right.next());
            let (mine, theirs) = (tell(second.0, b), tell(first.0, a));
            if mine != theirs || (a.is_none() && b.is_none()) {
                let size = self.comm_members(CommId(comm as u32)).len();
                let message = format!(
                    "collective {number} of communicator {comm} ({size} members): rank {} calls {mine}, but rank {} calls {theirs}",
                    second.0, first.0
                );
                return GraphError::invalid(Some(second.0), b.map(|op| op as u32), message);
            }
            number += 1;
        }
    }
}

fn slot_profiles(graph: &Graph, template: u32) -> Vec<SlotProfile> {
    let view = graph.template(TemplateId(template));
    let mut profiles: Vec<SlotProfile> = Vec::new();
    profiles.resize_with(view.num_slots() as usize, SlotProfile::default);
    for op in 0..view.len() {
        let row = view.row(op);
        if row.tag == tag::COLLECTIVE {
            let sequence = &mut profiles[row.slot as usize].collectives;
            sequence.push(u64::from_le_bytes([row.a, row.b, row.c, 0, 0, 0, 0, 0]) | u64::from(row.arg) << 32);
            sequence.push(row.value);
        } else if row.tag == tag::POINT_TO_POINT {
            let size = DataType::from_u8(row.b).map_or(0, DataType::size_bytes);
            let profile = &mut profiles[row.slot as usize];
            profile.messages.entry((row.arg, row.a == 1)).or_default().push(row.value.wrapping_mul(size));
        }
    }
    profiles
}

fn message_mismatch(comm: usize, rank: u32, other: u32, is_send: bool, mine: Sequence, theirs: Sequence) -> GraphError {
    let (does, undone) = if is_send { ("sends", "receives") } else { ("receives", "sends") };
    let message = if mine.len == theirs.len {
        format!(
            "communicator {comm}: what rank {rank} {does} and rank {other} {undone} differs in size ({} messages)",
            mine.len
        )
    } else {
        let direction = if is_send { "to" } else { "from" };
        format!(
            "communicator {comm}: rank {rank} {does} {} messages {direction} rank {other}, which {undone} {}",
            mine.len, theirs.len
        )
    };
    GraphError::invalid(Some(rank), None, message)
}

/// A collective in words, without what may differ between ranks (stream, slot, group).
fn describe(op: &Op) -> String {
    match op.kind {
        OpKind::Collective { kind, dtype, reduce, root, count, .. } => {
            format!("{kind:?} of {count} {dtype:?} ({reduce:?}, root {root})")
        }
        other => format!("{other:?}"),
    }
}
