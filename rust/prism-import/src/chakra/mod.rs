//! Chakra execution traces: one file per rank, a graph of nodes in each.
//!
//! Nodes become ops on streams: one for the host's nodes, one for computing, one for moving memory, one per process group and
//! direction of messages (or the streams that the nodes name). Nodes of a stream run in an order that respects all
//! dependencies; dependencies between streams become events. Durations are those of the file; communication takes what the
//! network profile says. What depends on a send waits until it is issued, not until it is received, as the simulators that read these
//! traces have it (the attribute `is_blocking` says otherwise). Ranks without a file come to everything at once.

pub mod node;
pub mod order;
pub mod read;
pub mod write;

use crate::cluster::profile_or_default;
use crate::notes::Notes;
use crate::{ImportError, input};
use indexmap::IndexMap;
use node::{Node, NodeType};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Name of nodes that mark the beginning of training and the end of an iteration, for reading back what was written.
pub const BEGIN_NAME: &str = "prism: training begins";
/// See [`BEGIN_NAME`].
pub const END_NAME: &str = "prism: iteration ends";

/// Largest world that is built.
const MAX_WORLD: u32 = 1 << 20;

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ranks of the job; by default one more than the highest with a file.
    pub world_size: Option<u32>,
    /// Members of process groups by name: text of a JSON object of lists. By default each group is the whole world.
    pub groups: Option<String>,
    /// The network; h100-sxm by default.
    pub profile: Option<Profile>,
}

/// How an import went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Ranks of the job.
    pub world_size: u32,
    /// Ranks with a file.
    pub ranks: Vec<u32>,
    /// Versions of the schema.
    pub schemas: Vec<String>,
    /// Nodes in the files.
    pub nodes: u64,
    /// Nodes by what they are.
    pub nodes_by_type: BTreeMap<String, u64>,
    /// Collectives and halves of messages in the files.
    pub communications: u64,
    /// Of these, those in the graph.
    pub used_communications: u64,
    /// Ops of the graph.
    pub ops: u64,
    /// Repairs by name.
    pub repairs: Notes,
}

/// Reads the files of a job (or folders of `.et` and `.json`), whose names end in the rank: `job.3.et`.
///
/// # Errors
/// A path cannot be read, a file is no Chakra trace, ranks or groups do not fit.
pub fn import(paths: &[PathBuf], options: &Options) -> Result<(Graph, Summary), ImportError> {
    let files = input::find(paths, &[".et", ".et.gz", ".json", ".json.gz"])?;
    let mut notes = Notes::default();
    let mut job: BTreeMap<u32, (String, read::File)> = BTreeMap::new();
    for path in &files {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let rank = match rank_of_name(path) {
            Some(rank) => rank,
            None if files.len() == 1 => {
                notes.add("ranks_assumed", || format!("{name}: no rank in its name; taken as rank 0"));
                0
            }
            None => return Err(ImportError::unfit(format!("{name} has no rank in its name: call it NAME.RANK.et"))),
        };
        let file = read::read(path, &mut notes)?;
        if let Some((other, _)) = job.insert(rank, (name.clone(), file)) {
            return Err(ImportError::unfit(format!("{other} and {name} are both of rank {rank}")));
        }
    }
    let job = job.into_iter().map(|(rank, (_, file))| (rank, file)).collect();
    Importer::new(job, options, notes)?.build(options)
}

/// The last number between dots.
fn rank_of_name(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    let mut parts = name.split('.').rev();
    parts.find_map(|part| part.parse().ok()).or_else(|| crate::kineto::ranks::rank_of_name(name))
}

struct Importer {
    files: BTreeMap<u32, read::File>,
    world_size: u32,
    groups: BTreeMap<String, Vec<u32>>,
    notes: Notes,
}

/// A rank's program before communicators have slots.
#[derive(Default)]
struct Draft {
    ops: Vec<(StreamId, DraftOp)>,
}

enum DraftOp {
    Op(OpKind),
    /// Slot and group ranks are still to come.
    Collective {
        group: String,
        kind: CollectiveKind,
        root: u32,
        bytes: u64,
    },
    Message {
        group: String,
        is_send: bool,
        peer: u32,
        bytes: u64,
    },
}

impl Importer {
    fn new(files: BTreeMap<u32, read::File>, options: &Options, notes: Notes) -> Result<Self, ImportError> {
        let groups: BTreeMap<String, Vec<u32>> = match &options.groups {
            None => BTreeMap::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| {
                ImportError::unfit(format!("the groups are not a JSON object of lists of ranks: {error}"))
            })?,
        };
        let ends = files.values().flat_map(|file| file.nodes.iter().flat_map(|node| [node.source, node.destination]));
        let told = files.keys().copied().chain(groups.values().flatten().copied()).chain(ends.flatten());
        let found = told.max().unwrap_or(0).saturating_add(1);
        let world_size = options.world_size.unwrap_or(found);
        if world_size < found || world_size > MAX_WORLD {
            return Err(ImportError::unfit(format!(
                "a world of {world_size} ranks does not fit: the files are of at least {found}, and at most {MAX_WORLD} are built"
            )));
        }
        Ok(Self { files, world_size, groups, notes })
    }

    fn members(&self, group: &str) -> Vec<u32> {
        self.groups.get(group).cloned().unwrap_or_else(|| (0..self.world_size).collect())
    }

    fn build(mut self, options: &Options) -> Result<(Graph, Summary), ImportError> {
        let mut builder = GraphBuilder::new(self.world_size);
        let profile = profile_or_default(options.profile.as_ref())?;
        builder.set_meta("profile", profile.to_toml());
        builder.set_meta("source", "chakra");
        let files = std::mem::take(&mut self.files);
        let (mut nodes_by_type, mut communications) = (BTreeMap::new(), 0);
        let mut drafts = BTreeMap::new();
        for (rank, file) in &files {
            for node in &file.nodes {
                *nodes_by_type.entry(format!("{:?}", NodeType::from_number(node.node_type))).or_insert(0) += 1;
                communications += u64::from(is_communication(node));
            }
            drafts.insert(*rank, self.draft(*rank, file, &mut builder));
        }
        let used_communications = self.assemble(&mut builder, &drafts)?;
        let graph = builder.finish()?;
        graph.check().map_err(|error| ImportError::unfit(format!("the ranks' traces do not fit together: {error}")))?;
        let listed = self.notes.count("unusable_communications");
        if communications != used_communications + listed {
            let what = format!(
                "a bug of the importer: {communications} communications, {used_communications} used, {listed} listed"
            );
            return Err(ImportError::unfit(what));
        }
        let schemas: BTreeSet<String> =
            files.values().map(|file| file.schema.clone().unwrap_or_else(|| "none".to_owned())).collect();
        if schemas.len() > 1 {
            self.notes.add("mixed_schema_versions", || format!("{schemas:?}"));
        }
        let summary = Summary {
            world_size: self.world_size,
            ranks: files.keys().copied().collect(),
            schemas: schemas.into_iter().collect(),
            nodes: files.values().map(|file| file.nodes.len() as u64).sum(),
            nodes_by_type,
            communications,
            used_communications,
            ops: graph.num_ops(),
            repairs: self.notes,
        };
        Ok((graph, summary))
    }

    /// A rank's nodes as ops on streams.
    fn draft(&mut self, rank: u32, file: &read::File, builder: &mut GraphBuilder) -> Draft {
        let (sorted, before) = order::order(&file.nodes, rank, &mut self.notes);
        let mut streams: IndexMap<String, u32> = IndexMap::new();
        let highest = file.nodes.iter().filter_map(|node| node.stream).max();
        let first_own = highest.filter(|stream| *stream < 4096).map_or(0, |stream| stream + 1);
        let mut place: Vec<Option<(u32, u32)>> = vec![None; file.nodes.len()];
        let mut stream_of = Vec::with_capacity(file.nodes.len());
        for node in &file.nodes {
            let stream = match node.stream.filter(|stream| *stream < first_own) {
                Some(stream) => stream,
                None => first_own + streams.insert_full(stream_name(node), 0).0 as u32,
            };
            stream_of.push(stream);
        }
        // A node is waited for by an event only where the stream's order does not say it already.
        let mut events: BTreeMap<u32, u32> = BTreeMap::new();
        for at in &sorted {
            for other in &before[*at as usize] {
                if stream_of[*other as usize] != stream_of[*at as usize] {
                    let next = events.len() as u32;
                    events.entry(*other).or_insert(next);
                }
            }
        }
        let mut draft = Draft::default();
        // Per stream and other stream: the last op of the other that it is known to come after.
        let mut known: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        for (number, at) in (0..).zip(&sorted) {
            let node = &file.nodes[*at as usize];
            let stream = stream_of[*at as usize];
            place[*at as usize] = Some((stream, number));
            for other in &before[*at as usize] {
                let Some((from, when)) = place[*other as usize].filter(|(from, _)| *from != stream) else { continue };
                let last = known.entry((stream, from)).or_insert(0);
                if *last <= when {
                    *last = when + 1;
                    let event = EventId(events[other]);
                    draft.ops.push((StreamId(stream), DraftOp::Op(OpKind::EventWait { event })));
                }
            }
            let op = self.op(rank, node, builder).map(|op| (StreamId(stream), op));
            let record = |event: &u32| DraftOp::Op(OpKind::EventRecord { event: EventId(*event) });
            let record = events.get(at).map(|event| (StreamId(stream), record(event)));
            // A send is over for its own rank when it is issued, unless it says otherwise.
            let is_eager = NodeType::from_number(node.node_type) == NodeType::Send && !node.is_blocking;
            let both = if is_eager { [record, op] } else { [op, record] };
            draft.ops.extend(both.into_iter().flatten());
        }
        draft
    }

    fn op(&mut self, rank: u32, node: &Node, builder: &mut GraphBuilder) -> Option<DraftOp> {
        if is_communication(node) {
            let op = self.communication(rank, node);
            return match op {
                Ok(op) => Some(op),
                Err(why) => {
                    self.notes.add("unusable_communications", || {
                        format!("rank {rank}: node {} ({}): {why}", node.id, node.name)
                    });
                    None
                }
            };
        }
        match node.name.as_str() {
            BEGIN_NAME => return Some(DraftOp::Op(OpKind::TrainingBegin)),
            END_NAME => return Some(DraftOp::Op(OpKind::IterationEnd)),
            _ if node.duration == 0 => return None,
            _ => {}
        }
        let class = match NodeType::from_number(node.node_type) {
            NodeType::MemLoad | NodeType::MemStore => ComputeClass::Memcpy,
            _ => ComputeClass::Kernel,
        };
        let name = builder.intern_name(&node.name);
        let (duration, provenance) = (SimTime::from_ns(node.duration), Provenance::Imported);
        Some(DraftOp::Op(OpKind::Compute { duration, name, class, provenance }))
    }

    fn communication(&mut self, rank: u32, node: &Node) -> Result<DraftOp, String> {
        let group = node.group.clone().unwrap_or_default();
        let bytes = node.comm_size.unwrap_or(0).max(1);
        let members = self.groups.get(&group);
        let is_member = |rank: u32| members.map_or(rank < self.world_size, |members| members.contains(&rank));
        if !is_member(rank) {
            return Err(format!("the rank is no member of group {group:?}"));
        }
        if NodeType::from_number(node.node_type) == NodeType::Collective {
            let number = node.comm_type.ok_or("its kind is not told (comm_type)")?;
            let kind = node::collective(number).ok_or_else(|| format!("its kind, {number}, is unknown"))?;
            return Ok(DraftOp::Collective { group, kind, root: node.root.unwrap_or(0), bytes });
        }
        let is_send = NodeType::from_number(node.node_type) == NodeType::Send;
        let peer = if is_send { node.destination } else { node.source }.ok_or("its peer is not told")?;
        if peer == rank || !is_member(peer) {
            return Err(format!("its peer, {peer}, does not fit"));
        }
        // Calls of one communicator follow each other; messages of different ways do not.
        let (source, destination) = if is_send { (rank, peer) } else { (peer, rank) };
        let group = format!("{group}, {source} to {destination}");
        self.groups.insert(group.clone(), vec![source, destination]);
        Ok(DraftOp::Message { group, is_send, peer, bytes })
    }

    /// Makes communicators and programs, also of ranks without a file; returns the communications used.
    fn assemble(&mut self, builder: &mut GraphBuilder, drafts: &BTreeMap<u32, Draft>) -> Result<u64, ImportError> {
        let group_of = |op: &DraftOp| match op {
            DraftOp::Collective { group, .. } | DraftOp::Message { group, .. } => Some(group.clone()),
            DraftOp::Op(_) => None,
        };
        let used: BTreeSet<String> =
            drafts.values().flat_map(|draft| draft.ops.iter().filter_map(|(_, op)| group_of(op))).collect();
        let mut comms: BTreeMap<String, (CommId, Vec<u32>)> = BTreeMap::new();
        let mut slots: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for group in used {
            let members = self.members(&group);
            if members.is_empty() {
                return Err(ImportError::unfit(format!("group {group:?} has no members")));
            }
            for rank in &members {
                slots.entry(*rank).or_default().push(group.clone());
            }
            let comm = builder.add_comm(members.iter().map(|rank| Rank(*rank)).collect());
            comms.insert(group, (comm, members));
        }
        let mut communications = 0;
        let shape = Shape { comms: &comms, slots: &slots };
        for (rank, draft) in drafts {
            let ops: Vec<Op> = draft.ops.iter().map(|(stream, op)| shape.op(*rank, *stream, op)).collect();
            communications += draft.ops.iter().filter(|(_, op)| !matches!(op, DraftOp::Op(_))).count() as u64;
            let template = builder.add_template(&format!("rank {rank}"), &ops)?;
            builder.set_rank(Rank(*rank), template, shape.comms_of(*rank));
        }
        for rank in (0..self.world_size).filter(|rank| !drafts.contains_key(rank)) {
            let ops = absent(rank, drafts, &shape);
            if !ops.is_empty() {
                self.notes.add("absent_ranks", || format!("rank {rank}: no file; it comes to everything at once"));
            }
            let template = builder.add_template(&format!("absent rank {rank}"), &ops)?;
            builder.set_rank(Rank(rank), template, shape.comms_of(rank));
        }
        Ok(communications)
    }
}

struct Shape<'a> {
    comms: &'a BTreeMap<String, (CommId, Vec<u32>)>,
    slots: &'a BTreeMap<u32, Vec<String>>,
}

impl Shape<'_> {
    fn comms_of(&self, rank: u32) -> Vec<CommId> {
        self.slots.get(&rank).into_iter().flatten().map(|group| self.comms[group].0).collect()
    }

    fn slot(&self, rank: u32, group: &str) -> SlotId {
        let slot = self.slots[&rank].iter().position(|other| other == group);
        SlotId(slot.expect("members have a slot of every group") as u32)
    }

    fn op(&self, rank: u32, stream: StreamId, op: &DraftOp) -> Op {
        let dtype = DataType::Uint8;
        let kind = match op {
            DraftOp::Op(kind) => *kind,
            DraftOp::Collective { group, kind, root, bytes } => {
                let members = self.comms[group].1.len() as u64;
                let count = count_of(*kind, *bytes, members);
                let root = if u64::from(*root) < members { *root } else { 0 };
                let slot = self.slot(rank, group);
                OpKind::Collective { slot, kind: *kind, dtype, reduce: ReduceOp::Sum, root, count, group: 0 }
            }
            DraftOp::Message { group, is_send, peer, bytes } => {
                let slot = self.slot(rank, group);
                let peer = self.comms[group].1.iter().position(|member| member == peer).expect("checked") as u32;
                OpKind::PointToPoint { slot, is_send: *is_send, dtype, peer, count: *bytes, group: 0 }
            }
        };
        Op { host_gap: SimTime::ZERO, stream, kind }
    }
}

/// The size that goes in, as NCCL counts.
fn count_of(kind: CollectiveKind, bytes: u64, members: u64) -> u64 {
    use CollectiveKind as C;
    match kind {
        C::ReduceScatter | C::AllToAll | C::Scatter => bytes.div_ceil(members),
        C::AllReduce | C::AllGather | C::Broadcast | C::Reduce | C::Gather => bytes,
    }
}

fn is_communication(node: &Node) -> bool {
    use NodeType as T;
    // The host's part of a communication is a call.
    let is_of_device = node.is_cpu != Some(true);
    is_of_device && matches!(NodeType::from_number(node.node_type), T::Collective | T::Send | T::Receive)
}

fn stream_name(node: &Node) -> String {
    let group = node.group.as_deref().unwrap_or_default();
    match NodeType::from_number(node.node_type) {
        _ if node.is_cpu == Some(true) => "host".to_owned(),
        NodeType::Collective => format!("collectives of {group}"),
        // Each direction and peer has a stream of its own, so that no message waits for another's other half.
        NodeType::Send => format!("sends of {group} to {:?}", node.destination),
        NodeType::Receive => format!("receives of {group} from {:?}", node.source),
        NodeType::MemLoad | NodeType::MemStore => "memory".to_owned(),
        NodeType::Compute => "compute".to_owned(),
        NodeType::Invalid | NodeType::Metadata | NodeType::Other => "host".to_owned(),
    }
}

/// What a rank without a file has to do so that the others get through: the collectives of its groups, as a member with a file
/// calls them, and the other halves of messages.
fn absent(rank: u32, drafts: &BTreeMap<u32, Draft>, shape: &Shape<'_>) -> Vec<Op> {
    let mut ops = Vec::new();
    for (number, group) in (0..).zip(shape.slots.get(&rank).into_iter().flatten()) {
        let members = &shape.comms[group].1;
        let example = members.iter().find_map(|member| drafts.get(member));
        for (_, op) in example.into_iter().flat_map(|draft| &draft.ops) {
            if matches!(op, DraftOp::Collective { group: other, .. } if other == group) {
                ops.push(shape.op(rank, StreamId(3 * number), op));
            }
        }
        for (other, draft) in drafts.iter().filter(|(other, _)| members.contains(other)) {
            for (_, op) in &draft.ops {
                let DraftOp::Message { group: of, is_send, peer, bytes } = op else { continue };
                if of == group && *peer == rank {
                    let stream = StreamId(3 * number + if *is_send { 1 } else { 2 });
                    let op = DraftOp::Message { group: of.clone(), is_send: !is_send, peer: *other, bytes: *bytes };
                    ops.push(shape.op(rank, stream, &op));
                }
            }
        }
    }
    ops
}
