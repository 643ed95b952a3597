//! One file of the profiler: an object with `traceEvents`, or just the list.

use super::event::{
    Activity, Annotation, Call, CallKind, CommKind, CommMeta, CommSpan, GroupConfig, Names, RankTrace, Step, SyncDetail,
};
use crate::ImportError;
use crate::json::{Elements, Fields, Frame, FrameError, Frames, integer, microseconds, text};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, ReduceOp};
use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

/// Longest duration that is believed: 28 hours.
const MAX_DURATION: i64 = 100_000_000_000_000;
/// Most ranks of a group.
const MAX_RANKS: u64 = 1 << 22;

/// Reads a file as a stream. What cannot be read of it is noted; an error says that nothing of it can.
pub fn read(path: &Path, names: &mut Names) -> Result<RankTrace, ImportError> {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    read_stream(crate::input::open(path)?, path, file, names)
}

/// The same of any stream.
pub fn read_stream(
    stream: impl BufRead,
    path: &Path,
    file: String,
    names: &mut Names,
) -> Result<RankTrace, ImportError> {
    let mut trace = RankTrace { file, ..RankTrace::default() };
    let mut frames = Frames::new(stream, "traceEvents");
    let mut reader = Reader { trace: &mut trace, names, lists: BTreeMap::new(), base: None };
    let format = |offset, message: String| ImportError::Format {
        path: path.to_owned(),
        expected: "profiler trace (JSON)",
        offset,
        message,
    };
    loop {
        match frames.next_frame() {
            Ok(Some(Frame::Element(event))) => reader.event(event),
            Ok(Some(Frame::Member(key, value))) => reader.member(key, value),
            Ok(Some(Frame::Oversized)) => {
                let file = &reader.trace.file;
                let text = || format!("{file}: a piece of more than {} MiB", crate::json::MAX_PIECE >> 20);
                reader.trace.notes.add("oversized_pieces", text);
            }
            Ok(None) => break,
            Err(error) => {
                let offset = frames.offset();
                let what = match error {
                    FrameError::Io(source) if reader.trace.num_events == 0 => {
                        return Err(ImportError::Io { path: path.to_owned(), source });
                    }
                    FrameError::Io(source) => source.to_string(),
                    FrameError::Truncated => "it ends in the middle".to_owned(),
                    FrameError::Syntax(message) => message,
                };
                if reader.trace.num_events == 0 {
                    return Err(format(offset, what));
                }
                let (file, events) = (&reader.trace.file, reader.trace.num_events);
                let text = || format!("{file}: {what} (byte {offset}); its first {events} events are used");
                reader.trace.notes.add("truncated_files", text);
                break;
            }
        }
    }
    let base = reader.base.unwrap_or(0);
    if trace.num_events == 0 {
        return Err(format(frames.offset(), "it has no list `traceEvents` with events".to_owned()));
    }
    shift(&mut trace, base);
    Ok(trace)
}

/// Newer profilers write times from a base that differs by rank.
fn shift(trace: &mut RankTrace, base: i64) {
    trace.activities.iter_mut().for_each(|activity| activity.start = activity.start.saturating_add(base));
    trace.calls.iter_mut().for_each(|call| call.start = call.start.saturating_add(base));
    trace.annotations.iter_mut().for_each(|annotation| annotation.start = annotation.start.saturating_add(base));
    trace.comm_spans.iter_mut().for_each(|span| span.start = span.start.saturating_add(base));
    for step in &mut trace.steps {
        (step.start, step.end) = (step.start.saturating_add(base), step.end.saturating_add(base));
    }
}

struct Reader<'a> {
    trace: &'a mut RankTrace,
    names: &'a mut Names,
    /// Lists of ranks as they are written.
    lists: BTreeMap<String, Arc<[u32]>>,
    base: Option<i64>,
}

/// The members of an event that matter, as they are written.
#[derive(Default)]
struct Raw<'a> {
    phase: &'a [u8],
    name: &'a [u8],
    thread: &'a [u8],
    process: &'a [u8],
    start: &'a [u8],
    duration: &'a [u8],
    arguments: &'a [u8],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Category {
    Device(ComputeClass),
    Runtime,
    Sync,
    Span,
}

fn category(value: &[u8]) -> Option<Category> {
    Some(match value {
        br#""kernel""# | br#""Kernel""# => Category::Device(ComputeClass::Kernel),
        br#""gpu_memcpy""# | br#""Memcpy""# => Category::Device(ComputeClass::Memcpy),
        br#""gpu_memset""# | br#""Memset""# => Category::Device(ComputeClass::Memset),
        br#""cuda_runtime""# | br#""cuda_driver""# | br#""Runtime""# | br#""hip_runtime""# => Category::Runtime,
        br#""cuda_sync""# => Category::Sync,
        br#""cpu_op""# | br#""Operator""# | br#""user_annotation""# => Category::Span,
        _ => return None,
    })
}

impl Reader<'_> {
    fn member(&mut self, key: &[u8], value: &[u8]) {
        match key {
            b"schemaVersion" => self.trace.schema_version = integer(value),
            b"baseTimeNanoseconds" => self.base = integer(value),
            b"distributedInfo" => self.distributed(value),
            b"deviceProperties" => {
                let name =
                    |device| Fields::new(device).find(|(key, _)| *key == b"name").and_then(|(_, name)| text(name));
                self.trace.device = Elements::new(value).next().and_then(name).map(std::borrow::Cow::into_owned);
            }
            _ => {}
        }
    }

    fn distributed(&mut self, value: &[u8]) {
        for (key, value) in Fields::new(value) {
            match key {
                b"rank" => self.trace.claimed_rank = integer(value).and_then(|rank| u32::try_from(rank).ok()),
                b"world_size" => {
                    let size = integer(value).and_then(|size| u32::try_from(size).ok());
                    self.trace.world_size = size.filter(|size| *size > 0 && u64::from(*size) <= MAX_RANKS);
                }
                b"pg_config" => {
                    for group in Elements::new(value) {
                        let (mut name, mut ranks) = (None, None);
                        for (key, value) in Fields::new(group) {
                            match key {
                                b"pg_name" => name = text(value),
                                b"ranks" => ranks = self.ranks(value),
                                _ => {}
                            }
                        }
                        if let (Some(name), Some(ranks)) = (name, ranks) {
                            self.trace.groups.push(GroupConfig { name: name.into_owned(), ranks });
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn event(&mut self, event: &[u8]) {
        self.trace.num_events += 1;
        let mut raw = Raw::default();
        let mut kind = None;
        let mut is_object = false;
        for (key, value) in Fields::new(event) {
            is_object = true;
            match key {
                b"cat" => match category(value) {
                    Some(category) => kind = Some(category),
                    None => return,
                },
                b"ph" => raw.phase = value,
                b"name" => raw.name = value,
                b"tid" => raw.thread = value,
                b"pid" => raw.process = value,
                b"ts" => raw.start = value,
                b"dur" => raw.duration = value,
                b"args" => raw.arguments = value,
                _ => {}
            }
        }
        if !is_object {
            let (file, number) = (&self.trace.file, self.trace.num_events);
            self.trace.notes.add("unreadable_events", || format!("{file}: event {number} is not an object"));
            return;
        }
        let Some(kind) = kind else { return };
        if raw.phase != br#""X""# {
            return;
        }
        let (start, duration) = (microseconds(raw.start), microseconds(raw.duration));
        let (Some(start), Some(mut duration)) = (start, duration) else {
            let (file, number) = (&self.trace.file, self.trace.num_events);
            let what = || format!("{file}: event {number}: ts or dur is missing or no number");
            self.trace.notes.add("unreadable_events", what);
            return;
        };
        if !(0..=MAX_DURATION).contains(&duration) {
            let (file, number) = (&self.trace.file, self.trace.num_events);
            let name = String::from_utf8_lossy(raw.name);
            let us = duration / 1000;
            let what = || format!("{file}: event {number} ({name}): duration {us} us");
            self.trace.notes.add(if duration < 0 { "negative_durations" } else { "absurd_durations" }, what);
            duration = 0;
        }
        match kind {
            Category::Device(class) => self.activity(&raw, start, duration, class),
            Category::Runtime => self.call(&raw, start, duration),
            Category::Sync => self.sync(&raw),
            Category::Span => self.span(&raw, start, duration),
        }
    }

    fn activity(&mut self, raw: &Raw<'_>, start: i64, duration: i64, class: ComputeClass) {
        let name = text(raw.name).unwrap_or_default();
        let (mut device, mut stream, mut correlation) = (0, None, 0);
        for (key, value) in Fields::new(raw.arguments) {
            match key {
                b"device" => device = integer(value).and_then(|device| u32::try_from(device).ok()).unwrap_or(0),
                b"stream" => stream = integer(value),
                b"correlation" | b"Correlation ID" => correlation = unsigned(value),
                _ => {}
            }
        }
        let stream = stream.or_else(|| integer(raw.thread)).unwrap_or(0);
        let is_nccl = class == ComputeClass::Kernel && is_nccl(&name);
        let meta = if is_nccl { self.meta(raw.arguments) } else { None };
        let class = if class == ComputeClass::Kernel { class_of(&name) } else { class };
        let name = self.names.number(&name);
        let stream = (device, stream);
        self.trace.activities.push(Activity { start, duration, correlation, stream, name, class, is_nccl, meta });
    }

    fn call(&mut self, raw: &Raw<'_>, start: i64, duration: i64) {
        let Some(kind) = call_kind(raw.name) else { return };
        let find =
            |(key, value): (&[u8], &[u8])| (key == b"correlation" || key == b"Correlation ID").then(|| unsigned(value));
        let correlation = Fields::new(raw.arguments).find_map(find).unwrap_or(0);
        self.trace.calls.push(Call { start, duration, correlation, thread: thread(raw), kind });
    }

    fn sync(&mut self, raw: &Raw<'_>) {
        let (mut device, mut stream, mut correlation) = (0, None, 0);
        let (mut waited, mut record) = (None, None);
        for (key, value) in Fields::new(raw.arguments) {
            match key {
                b"device" => device = integer(value).and_then(|device| u32::try_from(device).ok()).unwrap_or(0),
                b"stream" => stream = integer(value).filter(|stream| *stream >= 0),
                b"correlation" => correlation = unsigned(value),
                b"wait_on_stream" => waited = integer(value).filter(|stream| *stream >= 0),
                b"wait_on_cuda_event_record_corr_id" => record = integer(value).and_then(|id| u64::try_from(id).ok()),
                _ => {}
            }
        }
        let stream = stream.map(|stream| (device, stream));
        let record = record.zip(waited.map(|stream| (device, stream)));
        self.trace.syncs.push(SyncDetail { correlation, stream, record });
    }

    fn span(&mut self, raw: &Raw<'_>, start: i64, duration: i64) {
        let name = raw.name.strip_prefix(b"\"").and_then(|name| name.strip_suffix(b"\"")).unwrap_or(b"");
        if let Some(number) = name.strip_prefix(b"ProfilerStep#") {
            let number = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
            if let Some(number) = number {
                self.trace.steps.push(Step { number, start, end: start + duration });
            }
            return;
        }
        if name == b"record_param_comms" || name.starts_with(b"nccl:") {
            self.comm_span(raw, start, duration);
        }
        let meta = if name == b"record_param_comms" {
            self.meta(raw.arguments)
        } else if let Some(call) = name.strip_prefix(b"nccl:") {
            self.meta_of_annotation(&String::from_utf8_lossy(call), raw.arguments)
        } else {
            None
        };
        if let Some(meta) = meta {
            self.trace.annotations.push(Annotation { start, duration, thread: thread(raw), meta });
        }
    }

    fn comm_span(&mut self, raw: &Raw<'_>, start: i64, duration: i64) {
        let (mut record, mut external) = (None, None);
        for (key, value) in Fields::new(raw.arguments) {
            let number = || integer(value).and_then(|number| u64::try_from(number).ok());
            match key {
                b"Record function id" => record = number(),
                b"External id" => external = number(),
                _ => {}
            }
        }
        self.trace.process = self.trace.process.or_else(|| integer(raw.process));
        let name = self.names.number(&text(raw.name).unwrap_or_default());
        self.trace.comm_spans.push(CommSpan { start, duration, thread: thread(raw), name, record, external });
    }

    fn push_meta(&mut self, meta: CommMeta) -> u32 {
        if self.trace.metas.last() != Some(&meta) {
            self.trace.metas.push(meta);
        }
        self.trace.metas.len() as u32 - 1
    }

    /// What the arguments of a kernel or of `record_param_comms` tell.
    fn meta(&mut self, arguments: &[u8]) -> Option<u32> {
        let mut meta = CommMeta::default();
        let (mut first, mut stride, mut ends) = (None, None, (None, None));
        for (key, value) in Fields::new(arguments) {
            let number = || integer(value).and_then(|number| u64::try_from(number).ok());
            match key {
                b"Collective name" => meta.kind = text(value).and_then(|name| kind_of_call(&name)),
                b"In msg nelems" => meta.input = number(),
                b"Out msg nelems" => meta.output = number(),
                b"Group size" => meta.group_size = number().and_then(|size| u32::try_from(size).ok()),
                b"dtype" => meta.dtype = text(value).and_then(|name| data_type(&name)),
                b"Process Group Name" => meta.group_name = text(value).map(std::borrow::Cow::into_owned),
                b"Process Group Ranks" => meta.ranks = self.ranks(value),
                b"Global rank start" => first = number(),
                b"Global rank stride" => stride = number(),
                b"Src Rank" => ends.0 = number(),
                b"Dst Rank" => ends.1 = number(),
                b"Seq" => meta.sequence = number(),
                b"Root Rank" => meta.root = number().and_then(|root| u32::try_from(root).ok()),
                _ => {}
            }
        }
        if meta == CommMeta::default() {
            return None;
        }
        if let (Some(source), Some(destination)) = ends {
            meta.ends = u32::try_from(source).ok().zip(u32::try_from(destination).ok());
        }
        if meta.ranks.is_none()
            && let (Some(first), Some(stride), Some(size)) = (first, stride, meta.group_size)
        {
            meta.ranks = progression(first, stride, u64::from(size));
        }
        Some(self.push_meta(meta))
    }

    /// What an annotation such as `nccl:all_reduce` tells, with the shapes of its tensors.
    fn meta_of_annotation(&mut self, call: &str, arguments: &[u8]) -> Option<u32> {
        let mut meta = CommMeta { kind: kind_of_call(call.split(' ').next().unwrap_or(call)), ..CommMeta::default() };
        let kind = meta.kind?;
        if let Some((source, destination)) = ends_of(call) {
            meta.ends = Some((source, destination));
        }
        for (key, value) in Fields::new(arguments) {
            match key {
                b"Input Dims" | b"Input dims" => meta.input = first_size(value),
                b"Input type" | b"Input Types" => {
                    meta.dtype = Elements::new(value).find_map(|name| text(name).and_then(|name| data_type(&name)));
                }
                _ => {}
            }
        }
        if matches!(kind, CommKind::Collective(CollectiveKind::ReduceScatter)) {
            // Its tensor may be the whole input or the share: not known.
            meta.input = None;
        }
        Some(self.push_meta(meta))
    }

    /// A list of ranks, or a text of one. None if it is abbreviated.
    fn ranks(&mut self, value: &[u8]) -> Option<Arc<[u32]>> {
        let written = text(value).unwrap_or_else(|| String::from_utf8_lossy(value));
        if let Some(known) = self.lists.get(written.as_ref()) {
            return Some(Arc::clone(known));
        }
        let inside = written.trim().strip_prefix('[')?.strip_suffix(']')?;
        let ranks: Option<Vec<u32>> = inside.split(',').map(|rank| rank.trim().parse().ok()).collect();
        let ranks: Arc<[u32]> = ranks.filter(|ranks| !ranks.is_empty())?.into();
        self.lists.insert(written.into_owned(), Arc::clone(&ranks));
        Some(ranks)
    }
}

fn unsigned(value: &[u8]) -> u64 {
    integer(value).map_or(0, |number| number as u64)
}

/// Threads are told apart by process and number, which some writers give as text.
fn thread(raw: &Raw<'_>) -> u64 {
    let hash = |value: &[u8]| {
        integer(value).map_or_else(
            || value.iter().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte))),
            |number| number as u64,
        )
    };
    hash(raw.process).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash(raw.thread)
}

/// Ranks at equal distances.
pub(super) fn progression(first: u64, stride: u64, size: u64) -> Option<Arc<[u32]>> {
    if size == 0 || size > MAX_RANKS || (stride == 0 && size > 1) {
        return None;
    }
    let last = stride.checked_mul(size - 1)?.checked_add(first)?;
    (last < MAX_RANKS).then(|| (0..size).map(|k| (first + k * stride) as u32).collect())
}

/// Product of the first tensor's sides; of the first of a list of tensors, too.
fn first_size(dims: &[u8]) -> Option<u64> {
    let mut first = Elements::new(dims).next()?;
    while Elements::new(first).next().is_some_and(|inner| inner.starts_with(b"[")) {
        first = Elements::new(first).next()?;
    }
    let mut size: Option<u64> = None;
    for side in Elements::new(first) {
        size = Some(size.unwrap_or(1).checked_mul(u64::try_from(integer(side)?).ok()?)?);
    }
    size
}

/// `send 0->1` and `recv 1<-0`: global ranks of source and destination.
pub(super) fn ends_of(call: &str) -> Option<(u32, u32)> {
    let rest = call.split_once(' ')?.1;
    if let Some((source, destination)) = rest.split_once("->") {
        return Some((source.trim().parse().ok()?, destination.trim().parse().ok()?));
    }
    let (destination, source) = rest.split_once("<-")?;
    Some((source.trim().parse().ok()?, destination.trim().parse().ok()?))
}

fn is_nccl(name: &str) -> bool {
    let lower = name.get(..40.min(name.len())).unwrap_or(name);
    (lower.starts_with("nccl") || lower.contains("ncclDevKernel") || lower.contains("ncclKernel"))
        && !lower.starts_with("ncclDevFunc")
}

fn class_of(name: &str) -> ComputeClass {
    const PRODUCTS: [&str; 6] = ["gemm", "Cijk_", "cutlass", "xmma", "matmul", "nvjet"];
    const OPERATORS: [&str; 5] = ["flash", "fmha", "attention", "conv", "cudnn"];
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    match () {
        () if has(&OPERATORS) => ComputeClass::Operator,
        () if has(&PRODUCTS) => ComputeClass::Gemm,
        () => ComputeClass::Kernel,
    }
}

/// Calls that never put anything on the device and wait for nothing.
const IDLE_CALLS: [&str; 12] = [
    "Get",
    "Peek",
    "Occupancy",
    "IsCapturing",
    "Query",
    "Attribute",
    "EventCreate",
    "EventDestroy",
    "Properties",
    "StreamCreate",
    "ElapsedTime",
    "ThreadExchange",
];

fn call_kind(name: &[u8]) -> Option<CallKind> {
    let name = std::str::from_utf8(name).ok()?.trim_matches('"');
    let has = |word: &str| name.contains(word);
    Some(match () {
        () if has("StreamWaitEvent") => CallKind::StreamWait,
        () if has("EventRecord") => CallKind::EventRecord,
        () if has("StreamSynchronize") => CallKind::StreamSync,
        () if has("EventSynchronize") => CallKind::EventSync,
        () if has("DeviceSynchronize") || has("CtxSynchronize") => CallKind::DeviceSync,
        () if has("Memcpy") => CallKind::Copy,
        () if has("Launch") || has("Memset") => CallKind::Launch,
        () if IDLE_CALLS.iter().any(|word| has(word)) => return None,
        () => CallKind::Launch,
    })
}

/// By the names of PyTorch's record_param_comms, of its annotations, and of NCCL.
#[must_use]
pub fn kind_of_call(name: &str) -> Option<CommKind> {
    let plain: String = name.chars().filter(|letter| *letter != '_').collect::<String>().to_lowercase();
    let has = |word: &str| plain.contains(word);
    Some(match () {
        () if has("allreduce") || has("barrier") => CommKind::Collective(CollectiveKind::AllReduce),
        () if has("allgather") => CommKind::Collective(CollectiveKind::AllGather),
        () if has("reducescatter") => CommKind::Collective(CollectiveKind::ReduceScatter),
        () if has("alltoall") => CommKind::Collective(CollectiveKind::AllToAll),
        () if has("broadcast") => CommKind::Collective(CollectiveKind::Broadcast),
        () if has("reduce") => CommKind::Collective(CollectiveKind::Reduce),
        () if has("gather") => CommKind::Collective(CollectiveKind::Gather),
        () if has("scatter") => CommKind::Collective(CollectiveKind::Scatter),
        () if plain.starts_with("send") => CommKind::Send,
        () if plain.starts_with("recv") || plain.starts_with("receive") => CommKind::Receive,
        () => return None,
    })
}

/// What a kernel's name says of the communication.
#[must_use]
pub fn kind_of_kernel(name: &str) -> Option<CommKind> {
    if name.contains("SendRecv") {
        return None;
    }
    kind_of_call(name.split('(').next().unwrap_or(name).trim_start_matches("void "))
}

/// How a kernel reduces, by its name.
#[must_use]
pub fn reduce_of_kernel(name: &str) -> ReduceOp {
    let by_word =
        [("Max", ReduceOp::Max), ("Min", ReduceOp::Min), ("Prod", ReduceOp::Prod), ("SumPostDiv", ReduceOp::Avg)];
    by_word.iter().find(|(word, _)| name.contains(word)).map_or(ReduceOp::Sum, |(_, reduce)| *reduce)
}

/// By PyTorch's names of scalar types and C++'s.
#[must_use]
pub fn data_type(name: &str) -> Option<DataType> {
    Some(match name {
        "Float" | "float" => DataType::Float32,
        "Half" | "c10::Half" => DataType::Float16,
        "BFloat16" | "c10::BFloat16" => DataType::Bfloat16,
        "Double" | "double" => DataType::Float64,
        "Int" | "int" => DataType::Int32,
        "Long" | "long int" | "long" | "int64_t" => DataType::Int64,
        "Byte" | "unsigned char" | "Bool" | "bool" => DataType::Uint8,
        "Char" | "signed char" | "char" => DataType::Int8,
        "Float8_e4m3fn" | "c10::Float8_e4m3fn" | "Float8_e4m3fnuz" => DataType::Float8e4m3,
        "Float8_e5m2" | "c10::Float8_e5m2" | "Float8_e5m2fnuz" => DataType::Float8e5m2,
        _ => return None,
    })
}
