//! Workload files of SimAI and ASTRA-sim (text, one line per layer), as AICB writes them.
//!
//! A line has a layer's computing and communication in three parts: forward, gradient of the input, gradient of the weights.
//! One pass: all layers forward, then all backward from the last to the first. Communication of the first two parts is waited for
//! at once and runs over the tensor-parallel group; that of weights runs beside the computing and over the data-parallel group,
//! and is waited for at the end. A kind's ending changes the group: `_EP` the expert-parallel one, `_DP_EP` the
//! ranks with the same experts, `_DP` the data-parallel one, `_TP` the tensor-parallel one. `MICRO` files are a list of collectives.
//!
//! Rank = tp + TP x dp; an expert-parallel group is `EP` neighbours in the data-parallel direction. Pipeline stages are not in this
//! form: the file is of one stage, and so is the job.

use crate::cluster::profile_or_default;
use crate::{ImportError, aicb, input};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Largest file: the form is small by nature.
const MAX_BYTES: u64 = 256 << 20;
const MAX_WORLD: u32 = 1 << 20;
/// Longest part of a layer: 28 hours, ns.
const MAX_DURATION: u64 = 100_000_000_000_000;
const COMPUTE: StreamId = StreamId(0);
const WEIGHTS: StreamId = StreamId(1);

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ranks of the job; the file's `all_gpus` if it has that.
    pub world_size: Option<u32>,
    /// Expert-parallel degree; the file's `ep` if it has that, else 1.
    pub expert_parallel: Option<u32>,
    /// Passes in a row.
    pub iterations: u32,
    /// The network; h100-sxm by default.
    pub profile: Option<Profile>,
}

/// How an import went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// First word of the file.
    pub policy: String,
    /// Ranks of the job.
    pub world_size: u32,
    /// Tensor-, expert- and data-parallel degree.
    pub degrees: (u32, u32, u32),
    /// Lines.
    pub layers: u64,
    /// Collectives that one rank calls in a pass, as the file has them.
    pub collectives: u64,
    /// Of these, those in groups of one rank, which do nothing.
    pub collectives_alone: u64,
    /// Ops of the graph.
    pub ops: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Group {
    Tensor,
    Data,
    Expert,
    DataExpert,
}

/// A part of a layer: computing, then perhaps a collective over so many bytes (the whole buffer).
#[derive(Clone, Copy, Debug)]
struct Part {
    compute: u64,
    call: Option<(CollectiveKind, Group, u64)>,
}

#[derive(Clone, Debug)]
struct Layer {
    name: String,
    parts: [Part; 3],
}

/// Reads a workload; of AICB's own form (CSV), too: see [`crate::aicb`].
///
/// # Errors
/// The file cannot be read, is none, or does not fit the options.
pub fn import(path: &Path, options: &Options) -> Result<(Graph, Summary), ImportError> {
    let bytes = input::read_small(path, MAX_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    if aicb::is_aicb(&text) {
        return aicb::import(path, options);
    }
    let wrong = |line: usize, what: String| ImportError::Format {
        path: path.to_owned(),
        expected: "SimAI workload",
        offset: text.lines().take(line).map(|line| line.len() as u64 + 1).sum(),
        message: format!("line {}: {what}", line + 1),
    };
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let (_, first) = lines.next().ok_or_else(|| wrong(0, "it is empty".to_owned()))?;
    let header = header(first);
    let (at, count) = lines.next().ok_or_else(|| wrong(1, "the number of layers is missing".to_owned()))?;
    let count: u64 = count.trim().parse().map_err(|_| wrong(at, format!("{count:?} is no number of layers")))?;
    let is_micro = header.policy == "MICRO";
    let mut layers = Vec::new();
    for (at, line) in lines {
        layers.push(layer(line, is_micro).map_err(|what| wrong(at, what))?);
    }
    if layers.len() as u64 != count {
        return Err(wrong(1, format!("{count} layers are announced, {} are there", layers.len())));
    }
    build(&header, &layers, options)
}

struct Header {
    policy: String,
    values: BTreeMap<String, u32>,
}

fn header(line: &str) -> Header {
    let mut words = line.split_whitespace();
    let policy = words.next().unwrap_or_default().to_owned();
    let words: Vec<&str> = words.collect();
    let pair = |pair: &[&str]| Some((pair[0].strip_suffix(':')?.to_owned(), pair[1].parse().ok()?));
    Header { policy, values: words.windows(2).filter_map(pair).collect() }
}

fn layer(line: &str, is_micro: bool) -> Result<Layer, String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    if fields.len() < 12 {
        return Err(format!("a layer has 12 fields, this one {}", fields.len()));
    }
    let part = |at: usize, default: Group| -> Result<Part, String> {
        let number = |at: usize| {
            fields[at].parse::<u64>().map_err(|_| format!("field {} is no whole number: {}", at + 1, fields[at]))
        };
        let compute = number(at)?;
        if compute > MAX_DURATION {
            return Err(format!("field {}: {compute} ns are too long", at + 1));
        }
        let call = call(fields[at + 1], default)?.map(|(kind, group)| Ok::<_, String>((kind, group, number(at + 2)?)));
        Ok(Part { compute, call: call.transpose()? })
    };
    let whole = if is_micro { Group::Data } else { Group::Tensor };
    Ok(Layer { name: fields[0].to_owned(), parts: [part(2, whole)?, part(5, whole)?, part(8, Group::Data)?] })
}

fn call(text: &str, default: Group) -> Result<Option<(CollectiveKind, Group)>, String> {
    use CollectiveKind as C;
    let endings = [("_DP_EP", Group::DataExpert), ("_EP", Group::Expert), ("_DP", Group::Data), ("_TP", Group::Tensor)];
    let ending = endings.iter().find_map(|(ending, group)| Some((text.strip_suffix(ending)?, *group)));
    let (kind, group) = ending.unwrap_or((text, default));
    let kind = match kind {
        "NONE" => return Ok(None),
        "ALLREDUCE" => C::AllReduce,
        "ALLGATHER" => C::AllGather,
        "REDUCESCATTER" => C::ReduceScatter,
        "REDUCE" => C::Reduce,
        "BROADCAST" => C::Broadcast,
        "ALLTOALL" => C::AllToAll,
        other => return Err(format!("the collective {other} is unknown")),
    };
    Ok(Some((kind, group)))
}

fn build(header: &Header, layers: &[Layer], options: &Options) -> Result<(Graph, Summary), ImportError> {
    let told = |name: &str| header.values.get(name).copied().filter(|value| *value > 0);
    let world_size = options.world_size.or_else(|| told("all_gpus")).ok_or_else(|| {
        ImportError::unfit("the file does not tell the number of ranks (all_gpus): name it with --world-size")
    })?;
    let tensor = if header.policy == "MICRO" { 1 } else { told("model_parallel_NPU_group").unwrap_or(1) };
    let expert = options.expert_parallel.or_else(|| told("ep")).unwrap_or(1);
    if world_size > MAX_WORLD || world_size % tensor != 0 || (world_size / tensor) % expert != 0 || expert == 0 {
        return Err(ImportError::unfit(format!(
            "{world_size} ranks do not divide into tensor-parallel groups of {tensor} and expert-parallel groups of {expert} \
             (at most {MAX_WORLD} ranks)"
        )));
    }
    let data = world_size / tensor;
    let mut graph = GraphBuilder::new(world_size);
    let profile = profile_or_default(options.profile.as_ref())?;
    graph.set_meta("profile", profile.to_toml());
    graph.set_meta("source", "simai");
    let sizes = BTreeMap::from([
        (Group::Tensor, tensor),
        (Group::Data, data),
        (Group::Expert, expert),
        (Group::DataExpert, data / expert),
    ]);
    let mut comms: Vec<Vec<CommId>> = vec![Vec::new(); world_size as usize];
    for (group, size) in &sizes {
        if *size > 1 {
            add_comms(&mut graph, *group, (tensor, data, expert), &mut comms);
        }
    }
    let slots: Vec<Group> = sizes.iter().filter(|(_, size)| **size > 1).map(|(group, _)| *group).collect();
    let names = layers.iter().map(|layer| graph.intern_name(&layer.name)).collect::<Vec<_>>();
    let mut program = Program { slots: &slots, sizes: &sizes, ops: Vec::new(), alone: 0, events: 0 };
    program.push(COMPUTE, OpKind::TrainingBegin);
    for _ in 0..options.iterations.max(1) {
        program.pass(layers, &names, header.policy == "MICRO");
    }
    let alone = program.alone / u64::from(options.iterations.max(1));
    let ops = program.ops;
    let template = graph.add_template("every rank", &ops)?;
    for (rank, comms) in (0..).zip(comms) {
        graph.set_rank(Rank(rank), template, comms);
    }
    let graph = graph.finish()?;
    graph.check()?;
    let collectives = layers.iter().flat_map(|layer| &layer.parts).filter(|part| part.call.is_some()).count() as u64;
    let built = ops.iter().filter(|op| matches!(op.kind, OpKind::Collective { .. })).count() as u64;
    if built != (collectives - alone) * u64::from(options.iterations.max(1)) {
        return Err(ImportError::unfit(format!("a bug of the importer: {collectives} collectives became {built}")));
    }
    let summary = Summary {
        policy: header.policy.clone(),
        world_size,
        degrees: (tensor, expert, data),
        layers: layers.len() as u64,
        collectives,
        collectives_alone: alone,
        ops: graph.num_ops(),
    };
    Ok((graph, summary))
}

pub(crate) fn add_comms(graph: &mut GraphBuilder, group: Group, degrees: (u32, u32, u32), comms: &mut [Vec<CommId>]) {
    let (tensor, data, expert) = degrees;
    let rank = |tp: u32, dp: u32| tp + tensor * dp;
    let lists: Vec<Vec<u32>> = match group {
        Group::Tensor => (0..data).map(|dp| (0..tensor).map(|tp| rank(tp, dp)).collect()).collect(),
        Group::Data => (0..tensor).map(|tp| (0..data).map(|dp| rank(tp, dp)).collect()).collect(),
        Group::Expert => (0..tensor)
            .flat_map(|tp| (0..data / expert).map(move |block| (tp, block)))
            .map(|(tp, block)| (0..expert).map(|k| rank(tp, block * expert + k)).collect())
            .collect(),
        Group::DataExpert => (0..tensor)
            .flat_map(|tp| (0..expert).map(move |k| (tp, k)))
            .map(|(tp, k)| (0..data / expert).map(|block| rank(tp, block * expert + k)).collect())
            .collect(),
    };
    for members in lists {
        let comm = graph.add_comm(members.iter().map(|rank| Rank(*rank)).collect());
        for rank in members {
            comms[rank as usize].push(comm);
        }
    }
}

struct Program<'a> {
    slots: &'a [Group],
    sizes: &'a BTreeMap<Group, u32>,
    ops: Vec<Op>,
    alone: u64,
    events: u32,
}

impl Program<'_> {
    fn push(&mut self, stream: StreamId, kind: OpKind) {
        self.ops.push(Op { host_gap: SimTime::ZERO, stream, kind });
    }

    fn pass(&mut self, layers: &[Layer], names: &[NameId], is_micro: bool) {
        for (layer, name) in layers.iter().zip(names) {
            self.part(COMPUTE, layer.parts[0], *name);
        }
        for (layer, name) in layers.iter().zip(names).rev() {
            self.part(COMPUTE, layer.parts[1], *name);
            let weights = layer.parts[2];
            self.part(COMPUTE, Part { call: None, ..weights }, *name);
            if weights.call.is_some() {
                // What is reduced has been computed by then; nothing waits for it before the end.
                self.wait(COMPUTE, WEIGHTS);
                self.part(WEIGHTS, Part { compute: 0, ..weights }, *name);
            }
        }
        if !is_micro || self.ops.iter().any(|op| op.stream == WEIGHTS) {
            self.wait(WEIGHTS, COMPUTE);
        }
        self.push(COMPUTE, OpKind::IterationEnd);
    }

    /// `to` goes on after what `from` has been given so far.
    fn wait(&mut self, from: StreamId, to: StreamId) {
        let event = EventId(self.events);
        self.events += 1;
        self.push(from, OpKind::EventRecord { event });
        self.push(to, OpKind::EventWait { event });
    }

    fn part(&mut self, stream: StreamId, part: Part, name: NameId) {
        use CollectiveKind as C;
        if part.compute > 0 {
            let duration = SimTime::from_ns(part.compute as i64);
            let (class, provenance) = (ComputeClass::Kernel, Provenance::Imported);
            self.push(stream, OpKind::Compute { duration, name, class, provenance });
        }
        let Some((kind, group, bytes)) = part.call else { return };
        let Some(slot) = self.slots.iter().position(|other| *other == group) else {
            self.alone += 1;
            return;
        };
        let members = u64::from(self.sizes[&group]);
        let count = match kind {
            C::AllReduce | C::Broadcast | C::Reduce => bytes,
            C::AllGather | C::ReduceScatter | C::AllToAll | C::Gather | C::Scatter => bytes.div_ceil(members),
        };
        let (slot, dtype, reduce) = (SlotId(slot as u32), DataType::Uint8, ReduceOp::Sum);
        self.push(stream, OpKind::Collective { slot, kind, dtype, reduce, root: 0, count, group: 0 });
    }
}
