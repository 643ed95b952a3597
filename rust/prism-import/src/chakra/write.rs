//! Ranks of a graph as Chakra traces, for simulators that read them, and for [`super::import`].
//!
//! Every op is a node; host time between issues is a node of the host. Streams, events and synchronisations become
//! dependencies. `start_time_micros` is left at 0: the graph says what comes after what, not when.

use super::node::collective_number;
use super::{BEGIN_NAME, END_NAME};
use crate::wire::Message;
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, Op, OpKind};
use prism_engine::ids::{CommId, Rank, SlotId};
use prism_engine::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Version of the schema that is written.
pub const SCHEMA: &str = "0.0.4";

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Written {
    /// Ranks.
    pub ranks: u64,
    /// Nodes of all of them.
    pub nodes: u64,
    /// Collectives and halves of messages.
    pub communications: u64,
    /// Ops that the schema has nothing for: memory that is reserved or given back.
    pub left_out: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
}

/// Writes `PREFIX.RANK.et` for every rank asked for, and the members of all groups as `PREFIX.groups.json`.
pub fn write_ranks(graph: &Graph, ranks: &[Rank], prefix: &Path) -> io::Result<Written> {
    let path = |ending: String| {
        let mut name = prefix.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let mut written = Written::default();
    for rank in ranks {
        let path = path(format!(".{rank}.et"));
        let mut out = BufWriter::new(File::create(&path)?);
        write_rank(graph, *rank, &mut out, &mut written)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?;
        written.file_bytes += path.metadata()?.len();
    }
    let groups: BTreeMap<String, &[u32]> =
        (0..graph.num_comms() as u32).map(|comm| (comm.to_string(), graph.comm_members(CommId(comm)))).collect();
    let path = path(".groups.json".to_owned());
    std::fs::write(&path, serde_json::to_vec(&groups)?)?;
    written.file_bytes += path.metadata()?.len();
    Ok(written)
}

/// Writes one rank's trace.
pub fn write_rank(graph: &Graph, rank: Rank, out: &mut impl Write, written: &mut Written) -> io::Result<()> {
    let view = graph.template(graph.rank_template(rank));
    let mut own = graph.rank_overrides(rank).peekable();
    let mut metadata = Message::default();
    metadata.bytes(1, SCHEMA.as_bytes());
    metadata.write_delimited(out)?;
    let mut writer = Writer::new(graph, rank, view.num_streams(), out);
    for (number, mut op) in (0..).zip(view.iter()) {
        if let Some((_, duration)) = own.next_if(|(at, _)| *at == number)
            && let OpKind::Compute { duration: recorded, .. } = &mut op.kind
        {
            *recorded = duration;
        }
        writer.op(&op)?;
    }
    written.ranks += 1;
    written.nodes += writer.next_id - 1;
    written.communications += writer.communications;
    written.left_out += writer.left_out;
    Ok(())
}

/// Nodes by stream.
type ByStream = BTreeMap<u32, Vec<u64>>;

struct Writer<'a, W> {
    graph: &'a Graph,
    rank: Rank,
    out: &'a mut W,
    next_id: u64,
    host_stream: u32,
    /// The host's last node.
    host: Option<u64>,
    /// What the next node of a stream comes after, besides the host.
    streams: Vec<Vec<u64>>,
    /// What an event stands for.
    events: BTreeMap<u32, Vec<u64>>,
    /// The open group: its number, what its members come after, and its nodes by stream.
    group: Option<(u32, ByStream, ByStream)>,
    communications: u64,
    left_out: u64,
}

impl<'a, W: Write> Writer<'a, W> {
    fn new(graph: &'a Graph, rank: Rank, num_streams: u32, out: &'a mut W) -> Self {
        Self {
            graph,
            rank,
            out,
            next_id: 1,
            host_stream: num_streams,
            host: None,
            streams: vec![Vec::new(); num_streams as usize],
            events: BTreeMap::new(),
            group: None,
            communications: 0,
            left_out: 0,
        }
    }

    fn op(&mut self, op: &Op) -> io::Result<()> {
        let group = match op.kind {
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => group,
            _ => 0,
        };
        if self.group.as_ref().is_some_and(|(open, ..)| *open != group) {
            self.close_group();
        }
        if op.host_gap > SimTime::ZERO {
            let after = self.host.into_iter().collect::<Vec<_>>();
            let mut node = self.node("host", 4, op.host_gap, &after);
            attribute(&mut node, "is_cpu_op", Attribute::Flag(true));
            attribute(&mut node, "stream", Attribute::Number(u64::from(self.host_stream)));
            self.host = Some(self.push(&node)?);
        }
        let stream = op.stream.index();
        match op.kind {
            OpKind::Compute { duration, name, class, .. } => {
                let after = self.after(stream);
                let name = self.graph.name(name);
                let mut node = self.node(name, 4, duration, &after);
                attribute(&mut node, "is_cpu_op", Attribute::Flag(false));
                if matches!(class, ComputeClass::Memcpy | ComputeClass::Memset) {
                    attribute(&mut node, "is_memory_op", Attribute::Flag(true));
                }
                attribute(&mut node, "stream", Attribute::Number(u64::from(op.stream.0)));
                let id = self.push(&node)?;
                self.streams[stream] = vec![id];
            }
            OpKind::Collective { slot, kind, dtype, root, count, .. } => {
                let members = self.members(slot).len() as u64;
                let bytes = size_in(kind, count.saturating_mul(dtype.size_bytes()), members);
                let numbers =
                    [("comm_type", collective_number(kind)), ("comm_size", bytes), ("root_rank", u64::from(root))];
                self.communicate(op, group, 7, &format!("{kind:?}"), slot, &numbers)?;
            }
            OpKind::PointToPoint { slot, is_send, dtype, peer, count, .. } => {
                let (me, peer) = (u64::from(self.rank.0), u64::from(self.members(slot)[peer as usize]));
                let (source, destination) = if is_send { (me, peer) } else { (peer, me) };
                let bytes = count.saturating_mul(dtype.size_bytes());
                let numbers = [("comm_src", source), ("comm_dst", destination), ("comm_tag", 0), ("comm_size", bytes)];
                let (node_type, name) = if is_send { (5, "send") } else { (6, "receive") };
                self.communicate(op, group, node_type, name, slot, &numbers)?;
            }
            OpKind::EventRecord { event } => {
                let after = self.after(stream);
                self.events.insert(event.0, after);
            }
            OpKind::EventWait { event } => {
                let waited = self.events.get(&event.0).cloned().unwrap_or_default();
                self.streams[stream].extend(waited);
            }
            OpKind::StreamSync => {
                let waited = self.streams[stream].clone();
                self.hold(waited)?;
            }
            OpKind::EventSync { event } => {
                let waited = self.events.get(&event.0).cloned().unwrap_or_default();
                self.hold(waited)?;
            }
            OpKind::DeviceSync => {
                let waited = self.streams.concat();
                self.hold(waited)?;
            }
            OpKind::Alloc { .. } | OpKind::Free { .. } => self.left_out += 1,
            OpKind::TrainingBegin | OpKind::IterationEnd => {
                let name = if op.kind == OpKind::TrainingBegin { BEGIN_NAME } else { END_NAME };
                let after = self.after(stream);
                let mut node = self.node(name, 1, SimTime::ZERO, &after);
                attribute(&mut node, "stream", Attribute::Number(u64::from(op.stream.0)));
                let id = self.push(&node)?;
                self.streams[stream] = vec![id];
            }
        }
        Ok(())
    }

    fn members(&self, slot: SlotId) -> &'a [u32] {
        self.graph.comm_members(CommId(self.graph.rank_slots(self.rank)[slot.index()]))
    }

    /// What the next node of a stream comes after.
    fn after(&self, stream: usize) -> Vec<u64> {
        let mut after = self.streams[stream].clone();
        after.extend(self.host);
        after
    }

    /// Ops of one group come after what was before the group, not after each other.
    fn communicate(
        &mut self,
        op: &Op,
        group: u32,
        node_type: u64,
        name: &str,
        slot: SlotId,
        numbers: &[(&str, u64)],
    ) -> io::Result<()> {
        let stream = op.stream.index();
        let now = self.after(stream);
        if group != 0 && self.group.is_none() {
            self.group = Some((group, BTreeMap::new(), BTreeMap::new()));
        }
        let after = match &mut self.group {
            Some((_, before, _)) => before.entry(op.stream.0).or_insert(now).clone(),
            None => now,
        };
        let mut node = self.node(name, node_type, SimTime::ZERO, &after);
        attribute(&mut node, "is_cpu_op", Attribute::Flag(false));
        let comm = self.graph.rank_slots(self.rank)[slot.index()].to_string();
        attribute(&mut node, "pg_name", Attribute::Text(&comm));
        for (name, value) in numbers {
            attribute(&mut node, name, Attribute::Number(*value));
        }
        if node_type == 5 {
            attribute(&mut node, "is_blocking", Attribute::Flag(true));
        }
        if group == 0 {
            attribute(&mut node, "stream", Attribute::Number(u64::from(op.stream.0)));
        }
        self.communications += 1;
        let id = self.push(&node)?;
        match &mut self.group {
            Some((.., nodes)) => nodes.entry(op.stream.0).or_default().push(id),
            None => self.streams[stream] = vec![id],
        }
        Ok(())
    }

    fn close_group(&mut self) {
        if let Some((.., nodes)) = self.group.take() {
            for (stream, ids) in nodes {
                self.streams[stream as usize] = ids;
            }
        }
    }

    /// The host goes on after these.
    fn hold(&mut self, mut waited: Vec<u64>) -> io::Result<()> {
        waited.extend(self.host);
        let mut node = self.node("host waits", 1, SimTime::ZERO, &waited);
        attribute(&mut node, "is_cpu_op", Attribute::Flag(true));
        attribute(&mut node, "stream", Attribute::Number(u64::from(self.host_stream)));
        self.host = Some(self.push(&node)?);
        Ok(())
    }

    fn node(&self, name: &str, node_type: u64, duration: SimTime, after: &[u64]) -> Message {
        let mut node = Message::default();
        node.number(1, self.next_id);
        node.bytes(2, name.as_bytes());
        node.number(3, node_type);
        let mut after = after.to_vec();
        after.sort_unstable();
        after.dedup();
        node.packed(5, &after);
        let ns = (duration.as_ps().max(0) as u64 + 500) / 1000;
        node.number(7, (ns + 500) / 1000);
        if ns > 0 {
            attribute(&mut node, "duration_ns", Attribute::Number(ns));
        }
        node
    }

    fn push(&mut self, node: &Message) -> io::Result<u64> {
        node.write_delimited(self.out)?;
        self.next_id += 1;
        Ok(self.next_id - 1)
    }
}

/// What goes in, of what NCCL counts.
fn size_in(kind: CollectiveKind, bytes: u64, members: u64) -> u64 {
    use CollectiveKind as C;
    match kind {
        C::ReduceScatter | C::AllToAll | C::Scatter => bytes.saturating_mul(members),
        C::AllReduce | C::AllGather | C::Broadcast | C::Reduce | C::Gather => bytes,
    }
}

#[derive(Clone, Copy)]
enum Attribute<'a> {
    Flag(bool),
    Number(u64),
    Text(&'a str),
}

fn attribute(node: &mut Message, name: &str, value: Attribute<'_>) {
    let mut message = Message::default();
    message.bytes(1, name.as_bytes());
    match value {
        Attribute::Flag(flag) => message.number_always(27, u64::from(flag)),
        Attribute::Number(number) => message.number_always(9, number),
        Attribute::Text(text) => message.bytes(29, text.as_bytes()),
    }
    node.bytes(10, message.as_bytes());
}
