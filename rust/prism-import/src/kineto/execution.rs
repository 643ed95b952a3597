//! Execution traces of PyTorch (its `ExecutionTraceObserver`) beside traces of its profiler: kinds, sizes, types and process groups
//! of communications that the profiler does not tell. Schemas 1.0.1 to 1.1.x of PyTorch's `execution_trace_observer.cpp`.
//!
//! Both write a span per call: `record_param_comms`, and `nccl:...` in it. They are the same call if their record-function ids
//! are the same; older profilers write none, then external ids are tried, and if these fit nothing, the order of calls of one name.

use super::event::{Annotation, CommKind, CommMeta, CommSpan, GroupConfig, Names, RankTrace};
use super::ranks::rank_of_name;
use super::read::{data_type, ends_of, kind_of_call, progression};
use crate::ImportError;
use crate::json::{Elements, Fields, Frame, FrameError, Frames, integer, text};
use crate::notes::Notes;
use prism_engine::graph::op::{CollectiveKind, DataType};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Most ranks of a group that stands for the whole world.
const MAX_RANKS: u64 = 1 << 22;
/// Of a file, so many bytes tell what it is.
const LOOKED_AT: u64 = 4096;

/// How profiler traces and execution traces fit together. Spans = by id + by order + unmatched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Joined {
    /// Execution traces.
    pub files: u64,
    /// Spans of communications in the profiler's traces of their ranks.
    pub spans: u64,
    /// Of these, found by record-function id or external id.
    pub by_id: u64,
    /// Of these, found by the order of calls.
    pub by_order: u64,
    /// Of these, not found, or told differently (`execution_trace_unmatched`, `execution_trace_disagrees`).
    pub unmatched: u64,
    /// Communications of execution traces that no span belongs to (`execution_trace_unused`).
    pub unused: u64,
}

/// What is kept of an execution trace: its communications.
#[derive(Debug, Default)]
pub struct ExecutionTrace {
    /// The file's name, for messages.
    pub file: String,
    /// Number of the process, which the profiler's trace has, too.
    pub process: Option<i64>,
    /// Nodes in the file, of whatever kind.
    pub num_nodes: u64,
    nodes: Vec<Node>,
    groups: Vec<GroupConfig>,
    notes: Notes,
}

/// A communication.
#[derive(Debug)]
struct Node {
    id: u64,
    name: String,
    meta: CommMeta,
}

/// Is the file an execution trace? Its first member is the schema's version, and its nodes follow.
///
/// # Errors
/// The file cannot be read.
pub fn is_execution_trace(path: &Path) -> Result<bool, ImportError> {
    let mut start = Vec::new();
    // A damaged archive is told by whoever reads the whole.
    let _ = crate::input::open(path)?.take(LOOKED_AT).read_to_end(&mut start);
    let start = String::from_utf8_lossy(&start);
    Ok(start.trim_start().starts_with('{')
        && start.contains("\"schema\"")
        && start.contains("\"nodes\"")
        && !start.contains("\"traceEvents\""))
}

/// Reads a file as a stream; its bytes are added to `progress`. Memory: what it says of communications.
///
/// # Errors
/// It cannot be read, or is no execution trace.
pub fn read(path: &Path, progress: Option<Arc<AtomicU64>>) -> Result<ExecutionTrace, ImportError> {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    read_stream(crate::input::open_counted(path, progress)?, path, file)
}

fn read_stream(stream: impl BufRead, path: &Path, file: String) -> Result<ExecutionTrace, ImportError> {
    let mut trace = ExecutionTrace { file, ..ExecutionTrace::default() };
    let mut frames = Frames::new(stream, "nodes");
    loop {
        let what = match frames.next_frame() {
            Ok(Some(Frame::Element(node))) => {
                trace.num_nodes += 1;
                trace.node(node);
                continue;
            }
            Ok(Some(Frame::Member(key, value))) => {
                if key == b"pid" {
                    trace.process = integer(value);
                }
                continue;
            }
            Ok(Some(Frame::Oversized)) => {
                let file = &trace.file;
                trace.notes.add("oversized_pieces", || {
                    format!("{file}: a piece of more than {} MiB", crate::json::MAX_PIECE >> 20)
                });
                continue;
            }
            Ok(None) => break,
            Err(FrameError::Io(source)) if trace.num_nodes == 0 => {
                return Err(ImportError::Io { path: path.to_owned(), source });
            }
            Err(FrameError::Io(source)) => source.to_string(),
            Err(FrameError::Truncated) => "it ends in the middle".to_owned(),
            Err(FrameError::Syntax(message)) => message,
        };
        if trace.num_nodes > 0 {
            let (file, nodes) = (&trace.file, trace.num_nodes);
            trace.notes.add("truncated_files", || format!("{file}: {what}; its first {nodes} nodes are used"));
            break;
        }
        return Err(not_a_trace(path, frames.offset(), what));
    }
    if trace.num_nodes == 0 {
        return Err(not_a_trace(path, frames.offset(), "it has no list `nodes`".to_owned()));
    }
    trace.nodes.sort_by_key(|node| node.id);
    Ok(trace)
}

fn not_a_trace(path: &Path, offset: u64, message: String) -> ImportError {
    ImportError::Format { path: path.to_owned(), expected: "PyTorch execution trace (JSON)", offset, message }
}

/// Values of a node's inputs or outputs, with their types.
#[derive(Clone, Copy, Default)]
struct Values<'a> {
    values: &'a [u8],
    types: &'a [u8],
}

impl<'a> Values<'a> {
    /// Newer schemas have them in one object.
    fn of_object(object: &'a [u8]) -> Self {
        let mut found = Self::default();
        for (key, value) in Fields::new(object) {
            match key {
                b"values" => found.values = value,
                b"types" => found.types = value,
                _ => {}
            }
        }
        found
    }

    fn pairs(self) -> impl Iterator<Item = (&'a [u8], String)> {
        let kinds = Elements::new(self.types).map(|kind| text(kind).unwrap_or_default().into_owned());
        Elements::new(self.values).zip(kinds)
    }

    /// Elements and type, if there is one tensor: of several it depends on the call which counts.
    fn only_tensor(self) -> Option<(u64, Option<DataType>)> {
        let mut tensors = Vec::new();
        for (value, kind) in self.pairs() {
            let dtype = || data_type(kind.split_once("Tensor(")?.1.split_once(')')?.0);
            if kind.starts_with("Tensor(") {
                tensors.push((elements_of(value)?, dtype()));
            } else if kind.starts_with("GenericList[Tensor(") {
                for tensor in Elements::new(value) {
                    tensors.push((elements_of(tensor)?, dtype()));
                }
            }
        }
        if let [tensor] = tensors[..] { Some(tensor) } else { None }
    }
}

/// A tensor is written as `[id, storage, offset, elements, bytes of one, device]`.
fn elements_of(tensor: &[u8]) -> Option<u64> {
    u64::try_from(integer(Elements::new(tensor).nth(3)?)?).ok()
}

impl ExecutionTrace {
    fn node(&mut self, node: &[u8]) {
        let (mut name, mut id, mut attributes) = (None, None, &b""[..]);
        let (mut inputs, mut outputs) = (Values::default(), Values::default());
        for (key, value) in Fields::new(node) {
            match key {
                b"name" => name = text(value).map(std::borrow::Cow::into_owned),
                b"rf_id" => id = integer(value),
                b"attrs" => attributes = value,
                b"inputs" if value.starts_with(b"{") => inputs = Values::of_object(value),
                b"outputs" if value.starts_with(b"{") => outputs = Values::of_object(value),
                b"inputs" => inputs.values = value,
                b"input_types" => inputs.types = value,
                b"outputs" => outputs.values = value,
                b"output_types" => outputs.types = value,
                _ => {}
            }
        }
        let Some(name) = name else { return };
        if name.contains("process_group:init") {
            self.groups(inputs);
            return;
        }
        let is_call = name == "record_param_comms";
        if !is_call && !name.starts_with("nccl:") {
            return;
        }
        let attributes = attributes_of(attributes);
        let number =
            |key: &str| attributes.get(key).and_then(|value| integer(value)).and_then(|n| u64::try_from(n).ok());
        let Some(id) = id.and_then(|id| u64::try_from(id).ok()).or_else(|| number("rf_id")) else {
            let file = &self.file;
            self.notes.add("unreadable_events", || format!("{file}: {name} has no rf_id"));
            return;
        };
        let mut meta = if is_call { of_call(inputs, outputs) } else { of_annotation(&name, inputs) };
        let word = |key: &str| attributes.get(key).and_then(|value| text(value));
        meta.kind = word("collective_name").and_then(|name| kind_of_call(&name)).or(meta.kind);
        if meta.kind.is_some() {
            meta.dtype = word("dtype").and_then(|name| data_type(&name)).or(meta.dtype);
            meta.input = number("in_msg_nelems").or(meta.input);
            meta.output = number("out_msg_nelems").or(meta.output);
            meta.group_name = word("pg_name").map(std::borrow::Cow::into_owned).or(meta.group_name);
            let told = (number("global_rank_start"), number("global_rank_stride"), number("pg_size"));
            if let (Some(first), Some(stride), Some(size)) = told {
                meta.ranks = progression(first, stride, size).or(meta.ranks);
                meta.group_size = u32::try_from(size).ok();
            }
        }
        self.nodes.push(Node { id, name, meta });
    }

    /// The process groups, as a text of JSON. A group of the whole world has an empty list.
    fn groups(&mut self, inputs: Values<'_>) {
        let Some(written) = Elements::new(inputs.values).next().and_then(text) else { return };
        for group in Elements::new(written.as_bytes()) {
            let (mut name, mut ranks, mut size) = (None, None, 0);
            for (key, value) in Fields::new(group) {
                match key {
                    b"pg_name" => name = text(value).map(std::borrow::Cow::into_owned),
                    b"ranks" => ranks = Elements::new(value).map(|rank| u32::try_from(integer(rank)?).ok()).collect(),
                    b"group_size" => size = integer(value).and_then(|size| u64::try_from(size).ok()).unwrap_or(0),
                    _ => {}
                }
            }
            let (Some(name), Some(ranks)) = (name, ranks) else { continue };
            let ranks: Vec<u32> = ranks;
            let ranks: Option<Arc<[u32]>> = match ranks.is_empty() {
                true if size <= MAX_RANKS => progression(0, 1, size),
                true => None,
                false => Some(ranks.into()),
            };
            if let Some(ranks) = ranks {
                self.groups.push(GroupConfig { name, ranks });
            }
        }
    }
}

fn attributes_of(list: &[u8]) -> BTreeMap<String, &[u8]> {
    let one = |attribute| {
        let (mut name, mut value) = (None, None);
        for (key, written) in Fields::new(attribute) {
            match key {
                b"name" => name = text(written),
                b"value" => value = Some(written),
                _ => {}
            }
        }
        Some((name?.into_owned(), value?))
    };
    Elements::new(list).filter_map(one).collect()
}

/// `record_param_comms`: tensors, number, group, rank, name of the call, splits, and in newer schemas first rank, stride and size of the
/// group.
fn of_call(inputs: Values<'_>, outputs: Values<'_>) -> CommMeta {
    let mut meta = CommMeta::default();
    let mut numbers = Vec::new();
    for (value, kind) in inputs.pairs() {
        match kind.as_str() {
            "String" => {
                meta.kind = meta.kind.or_else(|| kind_of_call(&text(value)?));
                numbers.clear();
            }
            "Tuple[String,String]" => {
                let name = Elements::new(value).next().and_then(text);
                meta.group_name = name.filter(|name| !name.is_empty()).map(std::borrow::Cow::into_owned);
            }
            "Int" => numbers.push(integer(value).and_then(|number| u64::try_from(number).ok())),
            _ => {}
        }
    }
    if meta.kind.is_none() {
        // Such as `wait`: no communication, but in the order of calls.
        return CommMeta::default();
    }
    if let ([Some(first), Some(stride), Some(size)], true) = (&numbers[..], meta.group_name.is_some()) {
        meta.ranks = progression(*first, *stride, *size);
        meta.group_size = u32::try_from(*size).ok();
    }
    if let Some((elements, dtype)) = inputs.only_tensor() {
        (meta.input, meta.dtype) = (Some(elements), dtype);
    }
    meta.output = outputs.only_tensor().map(|(elements, _)| elements);
    meta
}

fn of_annotation(name: &str, inputs: Values<'_>) -> CommMeta {
    let call = name.strip_prefix("nccl:").unwrap_or(name);
    let mut meta = CommMeta { kind: kind_of_call(call.split(' ').next().unwrap_or(call)), ..CommMeta::default() };
    let Some(kind) = meta.kind else { return CommMeta::default() };
    meta.ends = ends_of(call);
    if let Some((elements, dtype)) = inputs.only_tensor() {
        // Of a reduce-scatter it may be the whole input or the share.
        meta.input = Some(elements).filter(|_| kind != CommKind::Collective(CollectiveKind::ReduceScatter));
        meta.dtype = dtype;
    }
    meta
}

/// Reads the execution traces and joins each with the profiler's trace of its rank: told by `overrides` (by file name), by its name,
/// by the number of its process.
///
/// # Errors
/// A file cannot be read or is none; its rank cannot be told; two are of one rank.
pub(super) fn join_all(
    files: &[PathBuf],
    progress: Option<&Arc<AtomicU64>>,
    traces: &mut BTreeMap<u32, RankTrace>,
    overrides: &BTreeMap<String, u32>,
    names: &Names,
    notes: &mut Notes,
) -> Result<Joined, ImportError> {
    let mut total = Joined::default();
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    for path in files {
        let mut execution = read(path, progress.cloned())?;
        notes.merge(std::mem::take(&mut execution.notes));
        let rank = rank_of(&execution, traces, overrides)?;
        if let Some(other) = owners.insert(rank, execution.file.clone()) {
            return Err(ImportError::unfit(format!(
                "{other} and {0} are both execution traces of rank {rank}: leave one out, or name its rank with --rank {0}=RANK",
                execution.file
            )));
        }
        total.files += 1;
        let Some(trace) = traces.get_mut(&rank) else {
            notes.add("execution_traces_alone", || format!("{}: rank {rank} has no profiler trace", execution.file));
            continue;
        };
        let one = join(trace, &execution, rank, names, notes);
        total.spans += one.spans;
        total.by_id += one.by_id;
        total.by_order += one.by_order;
        total.unmatched += one.unmatched;
        total.unused += one.unused;
    }
    Ok(total)
}

fn rank_of(
    execution: &ExecutionTrace,
    traces: &BTreeMap<u32, RankTrace>,
    overrides: &BTreeMap<String, u32>,
) -> Result<u32, ImportError> {
    let file = &execution.file;
    if let Some(rank) = overrides.get(file).copied().or_else(|| rank_of_name(file)) {
        return Ok(rank);
    }
    let same = |trace: &RankTrace| execution.process.is_some() && trace.process == execution.process;
    let found: Vec<u32> = traces.iter().filter(|(_, trace)| same(trace)).map(|(rank, _)| *rank).collect();
    match (&found[..], traces.first_key_value()) {
        ([rank], _) => Ok(*rank),
        ([], Some((rank, _))) if traces.len() == 1 => Ok(*rank),
        _ => Err(ImportError::unfit(format!(
            "{file} is an execution trace, and neither its name nor its process tells of which rank: name it with --rank {file}=RANK"
        ))),
    }
}

fn join(trace: &mut RankTrace, execution: &ExecutionTrace, rank: u32, names: &Names, notes: &mut Notes) -> Joined {
    for group in &execution.groups {
        if !trace.groups.iter().any(|known| known.name == group.name) {
            trace.groups.push(group.clone());
        }
    }
    trace.comm_spans.sort_by_key(|span| (span.start, span.thread, std::cmp::Reverse(span.duration)));
    let spans = std::mem::take(&mut trace.comm_spans);
    let nodes = &execution.nodes;
    let by_number = pair_by_id(&spans, nodes, names);
    let is_by_id = by_number.is_some();
    let pairs = by_number.unwrap_or_else(|| pair_by_order(&spans, nodes, names));
    let mut joined = Joined { spans: spans.len() as u64, ..Joined::default() };
    let mut is_used = vec![false; nodes.len()];
    for (span, pair) in spans.iter().zip(pairs) {
        let words = || format!("rank {rank}, {} at {} us", names.text(span.name), span.start / 1000);
        let Some(index) = pair else {
            joined.unmatched += 1;
            notes.add("execution_trace_unmatched", || format!("{}: no such call in {}", words(), execution.file));
            continue;
        };
        is_used[index] = true;
        if complete(trace, span, &nodes[index].meta) {
            *(if is_by_id { &mut joined.by_id } else { &mut joined.by_order }) += 1;
        } else {
            joined.unmatched += 1;
            notes.add("execution_trace_disagrees", || {
                format!("{}: {} has another kind or size; the profiler's is used", words(), execution.file)
            });
        }
    }
    for node in nodes.iter().zip(is_used).filter_map(|(node, used)| (!used).then_some(node)) {
        joined.unused += 1;
        notes.add("execution_trace_unused", || {
            format!("{}: {}, rf_id {}: not in the profiler's trace", execution.file, node.name, node.id)
        });
    }
    trace.comm_spans = spans;
    joined
}

/// The node of every span by its id; none if ids tell nothing. Record-function ids are the profiler's word; external ids have the same
/// values in some versions only, so all of the fewer side must fit.
fn pair_by_id(spans: &[CommSpan], nodes: &[Node], names: &Names) -> Option<Vec<Option<usize>>> {
    let numbers: BTreeMap<u64, usize> = nodes.iter().enumerate().map(|(index, node)| (node.id, index)).collect();
    let pair = |id: fn(&CommSpan) -> Option<u64>| -> Vec<Option<usize>> {
        let find = |span: &CommSpan| {
            let index = *numbers.get(&id(span)?)?;
            (nodes[index].name == names.text(span.name)).then_some(index)
        };
        spans.iter().map(find).collect()
    };
    if spans.iter().any(|span| span.record.is_some()) {
        return Some(pair(|span| span.record));
    }
    let by_external = pair(|span| span.external);
    let fitting = by_external.iter().flatten().count();
    (fitting > 0 && fitting == spans.len().min(nodes.len())).then_some(by_external)
}

/// The node of every span by order among those of its name, if there are as many.
fn pair_by_order(spans: &[CommSpan], nodes: &[Node], names: &Names) -> Vec<Option<usize>> {
    let mut of_name: BTreeMap<&str, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    for (index, span) in spans.iter().enumerate() {
        of_name.entry(names.text(span.name)).or_default().0.push(index);
    }
    for (index, node) in nodes.iter().enumerate() {
        of_name.entry(&node.name).or_default().1.push(index);
    }
    let mut pairs = vec![None; spans.len()];
    for (spans, nodes) in of_name.into_values().filter(|(spans, nodes)| spans.len() == nodes.len()) {
        for (span, node) in spans.into_iter().zip(nodes) {
            pairs[span] = Some(node);
        }
    }
    pairs
}

/// Adds to what the profiler tells of a span; false, and nothing changes, if it tells otherwise.
fn complete(trace: &mut RankTrace, span: &CommSpan, more: &CommMeta) -> bool {
    let is_span = |one: &Annotation| (one.start, one.duration, one.thread) == (span.start, span.duration, span.thread);
    let known = trace.annotations.iter().position(is_span);
    let mut meta = known.map(|at| trace.metas[trace.annotations[at].meta as usize].clone()).unwrap_or_default();
    let differs = |a: Option<u64>, b: Option<u64>| a.zip(b).is_some_and(|(a, b)| a != b);
    if meta.kind.zip(more.kind).is_some_and(|(a, b)| a != b)
        || differs(meta.input, more.input)
        || differs(meta.output, more.output)
    {
        return false;
    }
    meta.fill_from(more);
    if meta == CommMeta::default() {
        return true;
    }
    trace.metas.push(meta);
    let meta = trace.metas.len() as u32 - 1;
    match known {
        Some(at) => trace.annotations[at].meta = meta,
        None => {
            trace.annotations.push(Annotation {
                start: span.start,
                duration: span.duration,
                thread: span.thread,
                meta,
            });
        }
    }
    true
}
