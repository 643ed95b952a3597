//! CUDA graphs: what is issued on a capturing stream is kept instead of sent, and sent on every launch of the graph.
//!
//! A capture keeps the operations in the order of their calls, each with its stream, and the events that order streams
//! among each other. A launch sends them in that order: those of the origin stream on the stream that the graph is launched
//! on, those of the others on streams that belong to the executable graph. Every other stream was forked from the origin by
//! an event and joined to it again, so this is the order that the graph's edges demand.
//!
//! The host pays for one launch, whatever the number of nodes. Copies and fills move their bytes on every launch.

use crate::abi::{Error, Outcome};
use crate::memory::Copy2d;
use crate::session::{HostCost, Session};
use crate::{device, event, memory, stream};
use prism_wire::device::Launched;
use prism_wire::message::{Record, RecordKind};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// `cudaStreamCaptureModeRelaxed`: another thread may end the capture.
const RELAXED: c_int = 2;
/// `cudaStreamCaptureStatus`.
pub(crate) const STATUS_NONE: c_int = 0;
const STATUS_ACTIVE: c_int = 1;
const STATUS_INVALIDATED: c_int = 2;

/// `cudaGraphNodeType`.
const NODE_KERNEL: c_int = 0;
const NODE_MEMCPY: c_int = 1;
const NODE_MEMSET: c_int = 2;
const NODE_HOST: c_int = 3;
const NODE_EVENT_RECORD: c_int = 7;

/// A host function and its argument, as an address: graphs are launched by any thread.
type HostCall = (unsafe extern "C" fn(*mut c_void), usize);

/// What a launch does besides sending the record.
#[derive(Clone, Copy)]
pub(crate) enum Effect {
    /// Nothing: the kernel is not run.
    None,
    /// Bytes move.
    Copy(Copied),
    /// Bytes are set.
    Fill { to: usize, pitch: usize, value: u32, unit: usize, width: usize, height: usize },
    /// A function runs on the host when the stream is there.
    Host(HostCall),
}

/// A captured copy, with addresses as numbers.
#[derive(Clone, Copy)]
pub(crate) struct Copied {
    to: usize,
    to_pitch: usize,
    from: usize,
    from_pitch: usize,
    width: usize,
    height: usize,
}

impl From<&Copy2d> for Copied {
    fn from(rows: &Copy2d) -> Self {
        Self {
            to: rows.to as usize,
            to_pitch: rows.to_pitch,
            from: rows.from as usize,
            from_pitch: rows.from_pitch,
            width: rows.width,
            height: rows.height,
        }
    }
}

/// A function of another library that is to be called at every launch.
pub(crate) struct Call {
    run: Launched,
    done: Launched,
    data: usize,
}

impl Call {
    /// # Safety
    /// `run(data)` may be called by any thread until `done(data)` is called, which happens once, when this is dropped.
    pub(crate) unsafe fn new(run: Launched, done: Launched, data: *mut c_void) -> Self {
        Self { run, done, data: data as usize }
    }

    /// Drops this without calling anything.
    pub(crate) fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // SAFETY: see `new`.
        unsafe { (self.done)(self.data as *mut c_void) };
    }
}

/// One step of a launch.
enum Step {
    /// Another library does something with the bytes of what came before.
    Call(Call),
    /// A node.
    Operation { record: Record, effect: Effect },
    /// The end of an NCCL group.
    GroupEnd(Record),
    /// A point of the program, such as the end of an iteration: every launch comes by.
    Marker(Record),
    /// An event that only orders the streams of the graph.
    Record { event: u32, stream: u32 },
    /// A stream goes on after such an event.
    Wait { event: u32, stream: u32 },
}

/// A node of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// Its `cudaGraphNodeType`.
    pub(crate) kind: c_int,
    /// Indices of the nodes it comes right after.
    pub(crate) dependencies: Vec<usize>,
}

/// What was captured.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    steps: Vec<Step>,
    origin: u32,
}

/// A graph that can be launched.
pub(crate) struct Executable {
    graph: Arc<Graph>,
    /// The streams that belong to it, by captured stream.
    streams: BTreeMap<u32, u32>,
    /// The events that belong to it, by captured event.
    events: BTreeMap<u32, u32>,
}

/// A capture under way.
struct Capture {
    id: u64,
    mode: c_int,
    thread: ThreadId,
    graph: Graph,
    /// The nodes that the next node of each capturing stream comes right after.
    streams: BTreeMap<u32, BTreeSet<usize>>,
    /// The same for what an event stands for.
    events: BTreeMap<u32, BTreeSet<usize>>,
    /// NCCL groups with captured operations that have not ended.
    groups: BTreeSet<u32>,
    is_invalid: bool,
}

static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// How many captures are under way: nobody pays for more than looking at this.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// What the next operation of this thread does on a launch.
    static EFFECT: Cell<Effect> = const { Cell::new(Effect::None) };
}

fn captures() -> MutexGuard<'static, Vec<Capture>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Is any stream being captured?
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed) != 0
}

/// Is the stream with this id being captured?
pub(crate) fn is_capturing(stream: u32) -> bool {
    is_active() && captures().iter().any(|capture| capture.streams.contains_key(&stream))
}

/// What `cudaStreamGetCaptureInfo` tells: status, id of the capture, and the nodes the next one comes right after.
pub(crate) fn info(stream: u32) -> (c_int, u64, Vec<usize>) {
    if is_active()
        && let Some(capture) = captures().iter().find(|capture| capture.streams.contains_key(&stream))
    {
        let status = if capture.is_invalid { STATUS_INVALIDATED } else { STATUS_ACTIVE };
        return (status, capture.id, capture.streams[&stream].iter().copied().collect());
    }
    (STATUS_NONE, 0, Vec::new())
}

/// Starts to capture a stream.
pub(crate) fn begin(stream: *const c_void, mode: c_int) -> Outcome {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    device::using()?;
    let found = stream::get(stream)?;
    if !(0..=RELAXED).contains(&mode) {
        return Err(Error::INVALID_VALUE);
    }
    // As in CUDA: the legacy stream cannot be captured.
    if stream::is_legacy(stream) {
        return Err(Error::CAPTURE_UNSUPPORTED);
    }
    if is_capturing(found.id) {
        return Err(Error::ILLEGAL_STATE);
    }
    let mut captures = captures();
    captures.push(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed) as u64,
        mode,
        thread: std::thread::current().id(),
        graph: Graph { origin: found.id, ..Graph::default() },
        streams: BTreeMap::from([(found.id, BTreeSet::new())]),
        events: BTreeMap::new(),
        groups: BTreeSet::new(),
        is_invalid: false,
    });
    ACTIVE.store(captures.len(), Ordering::Relaxed);
    Ok(())
}

/// Ends the capture that began on this stream.
pub(crate) fn end(stream: *const c_void) -> Result<Graph, Error> {
    let id = stream::get(stream)?.id;
    let mut captures = captures();
    let index = captures.iter().position(|capture| capture.streams.contains_key(&id)).ok_or(Error::ILLEGAL_STATE)?;
    let capture = &captures[index];
    if capture.graph.origin != id {
        return Err(Error::CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(Error::CAPTURE_WRONG_THREAD);
    }
    let capture = captures.remove(index);
    ACTIVE.store(captures.len(), Ordering::Relaxed);
    drop(captures);
    if capture.is_invalid {
        return Err(Error::CAPTURE_INVALIDATED);
    }
    if !capture.is_joined() {
        return Err(Error::CAPTURE_UNJOINED);
    }
    Ok(capture.graph)
}

/// Makes a capture that the stream takes part in useless, as a call that cannot be captured does. `true` if there is one.
pub(crate) fn invalidate(stream: u32) -> bool {
    if !is_active() {
        return false;
    }
    let mut captures = captures();
    let capture = captures.iter_mut().find(|capture| capture.streams.contains_key(&stream));
    capture.map(|capture| capture.is_invalid = true).is_some()
}

/// Makes every capture useless that this thread began, as a synchronisation of the whole device does.
pub(crate) fn invalidate_own() -> bool {
    if !is_active() {
        return false;
    }
    let mut found = false;
    for capture in captures().iter_mut().filter(|capture| capture.thread == std::thread::current().id()) {
        capture.is_invalid = true;
        found = true;
    }
    found
}

/// Sets what the next operation of this thread does on a launch; it must be issued right after.
pub(crate) fn with_effect<T>(effect: Effect, issue: impl FnOnce() -> T) -> T {
    EFFECT.set(effect);
    let result = issue();
    EFFECT.set(Effect::None);
    result
}

/// Keeps the record if it belongs to a capture. Called for every record while there is a capture.
#[cold]
pub(crate) fn take(record: &Record) -> bool {
    let mut captures = captures();
    if record.kind == RecordKind::GroupEnd as u16 {
        let capture = captures.iter_mut().find(|capture| capture.groups.contains(&record.h));
        let keep = |capture: &mut Capture| {
            capture.groups.remove(&record.h);
            capture.graph.steps.push(Step::GroupEnd(*record));
        };
        return capture.map(keep).is_some();
    }
    if record.kind == RecordKind::Marker as u16 {
        let capture = captures.iter_mut().find(|capture| capture.streams.contains_key(&record.stream));
        return capture.map(|capture| capture.graph.steps.push(Step::Marker(*record))).is_some();
    }
    let Some(kind) = node_kind(record) else { return false };
    let Some(capture) = captures.iter_mut().find(|capture| capture.streams.contains_key(&record.stream)) else {
        return false;
    };
    if kind != NODE_MEMCPY && kind != NODE_MEMSET && record.h != 0 {
        capture.groups.insert(record.h);
    }
    capture.add(kind, record.stream, Step::Operation { record: *record, effect: EFFECT.get() });
    true
}

/// The kind of node a record makes; `None` for records that are no work of a stream.
fn node_kind(record: &Record) -> Option<c_int> {
    const WORK: [RecordKind; 6] = [
        RecordKind::Kernel,
        RecordKind::Gemm,
        RecordKind::Operator,
        RecordKind::Collective,
        RecordKind::Send,
        RecordKind::Recv,
    ];
    let is = |kind: RecordKind| record.kind == kind as u16;
    if WORK.into_iter().any(is) {
        Some(NODE_KERNEL)
    } else if is(RecordKind::Memcpy) {
        Some(NODE_MEMCPY)
    } else {
        is(RecordKind::Memset).then_some(NODE_MEMSET)
    }
}

/// Keeps a host function on a capturing stream; `false` if the stream is not captured.
pub(crate) fn take_host(stream: u32, function: HostCall) -> bool {
    let mut captures = captures();
    let Some(capture) = captures.iter_mut().find(|capture| capture.streams.contains_key(&stream)) else { return false };
    let step = Step::Operation { record: Record { stream, ..Record::default() }, effect: Effect::Host(function) };
    capture.add(NODE_HOST, stream, step);
    true
}

/// Keeps a call that follows an operation on a capturing stream; gives it back if the stream is not captured.
pub(crate) fn take_call(stream: u32, call: Call) -> Result<(), Call> {
    let mut captures = captures();
    match captures.iter_mut().find(|capture| capture.streams.contains_key(&stream)) {
        Some(capture) => {
            capture.graph.steps.push(Step::Call(call));
            Ok(())
        }
        None => Err(call),
    }
}

/// Keeps the record of an event on a capturing stream; `false` if the stream is not captured. An external record happens
/// on every launch; any other only orders the streams of the capture.
pub(crate) fn take_event_record(event: u32, stream: u32, is_external: bool) -> bool {
    let mut captures = captures();
    let Some(capture) = captures.iter_mut().find(|capture| capture.streams.contains_key(&stream)) else {
        // Recorded elsewhere: it no longer stands for anything captured.
        for capture in captures.iter_mut() {
            capture.events.remove(&event);
        }
        return false;
    };
    if is_external {
        let record = Record { kind: RecordKind::EventRecord as u16, stream, e: event, ..Record::default() };
        capture.add(NODE_EVENT_RECORD, stream, Step::Operation { record, effect: Effect::None });
    } else {
        let dependencies = capture.streams[&stream].clone();
        capture.events.insert(event, dependencies);
        capture.graph.steps.push(Step::Record { event, stream });
    }
    true
}

/// Lets a stream wait for a captured event, which makes it part of the capture. `None` if neither is captured.
pub(crate) fn take_event_wait(stream: u32, event: u32, was_recorded: bool) -> Option<Outcome> {
    let mut captures = captures();
    let of_stream = captures.iter().position(|capture| capture.streams.contains_key(&stream));
    let of_event = captures.iter().position(|capture| capture.events.contains_key(&event));
    let index = match (of_stream, of_event) {
        (None, None) => return None,
        (Some(stream), Some(event)) if stream != event => return Some(Err(Error::CAPTURE_MERGE)),
        (_, Some(index)) => index,
        // An event of the world outside: CUDA refuses the dependency. One that was never recorded stands for nothing.
        (Some(index), None) if was_recorded => {
            captures[index].is_invalid = true;
            return Some(Err(Error::CAPTURE_ISOLATION));
        }
        (Some(_), None) => return Some(Ok(())),
    };
    let capture = &mut captures[index];
    let dependencies = capture.events[&event].clone();
    capture.streams.entry(stream).or_default().extend(dependencies);
    capture.graph.steps.push(Step::Wait { event, stream });
    Some(Ok(()))
}

/// Does the event stand for captured work, which cannot be waited for or asked about?
pub(crate) fn is_captured_event(event: u32) -> bool {
    is_active() && captures().iter().any(|capture| capture.events.contains_key(&event))
}

impl Capture {
    fn add(&mut self, kind: c_int, stream: u32, step: Step) {
        let index = self.graph.nodes.len();
        let dependencies = self.streams.insert(stream, BTreeSet::from([index])).unwrap_or_default();
        self.graph.nodes.push(Node { kind, dependencies: dependencies.into_iter().collect() });
        self.graph.steps.push(step);
    }

    /// Does the origin stream come after all that was captured?
    fn is_joined(&self) -> bool {
        let mut reached = BTreeSet::new();
        let mut open: Vec<usize> = self.streams[&self.graph.origin].iter().copied().collect();
        while let Some(node) = open.pop() {
            if reached.insert(node) {
                open.extend(&self.graph.nodes[node].dependencies);
            }
        }
        reached.len() == self.graph.nodes.len()
    }
}

impl Graph {
    /// Is it the same but for the arguments of its nodes?
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.nodes == other.nodes
    }
}

impl Executable {
    /// Makes a graph ready to be launched.
    pub(crate) fn new(graph: Arc<Graph>) -> Self {
        Self { graph, streams: BTreeMap::new(), events: BTreeMap::new() }
    }

    /// Are there kernels in it, whose results are not known?
    pub(crate) fn computes(&self) -> bool {
        let kinds = [RecordKind::Kernel, RecordKind::Gemm, RecordKind::Operator];
        let is_kernel = |step: &Step| matches!(step, Step::Operation { record, effect: Effect::None } if kinds.iter().any(|kind| record.kind == *kind as u16));
        self.graph.steps.iter().any(is_kernel)
    }

    /// Exchanges the arguments of the nodes; `false` if the graphs differ in more than that.
    pub(crate) fn update(&mut self, graph: Arc<Graph>) -> bool {
        let is_like = self.graph.is_like(&graph);
        if is_like {
            self.graph = graph;
        }
        is_like
    }

    /// Sends all operations, those of the origin stream on `stream`.
    pub(crate) fn launch(&mut self, stream: u32) -> Outcome {
        let session = device::using()?;
        crate::clock::charge(session.config.host.cost(HostCost::KernelLaunch));
        let graph = Arc::clone(&self.graph);
        for step in &graph.steps {
            match *step {
                // SAFETY: the promise of whoever gave it (`Call::new`).
                Step::Call(ref call) => unsafe { (call.run)(call.data as *mut c_void) },
                Step::Operation { mut record, effect } => {
                    record.stream = self.stream(record.stream, stream);
                    run(session, &record, effect)?;
                }
                Step::GroupEnd(record) => send(session, record)?,
                Step::Marker(mut record) => {
                    record.stream = self.stream(record.stream, stream);
                    send(session, record)?;
                }
                Step::Record { event, stream: captured } => {
                    let (event, stream) = (self.event(event)?, self.stream(captured, stream));
                    send(
                        session,
                        Record { kind: RecordKind::EventRecord as u16, stream, e: event, ..Record::default() },
                    )?;
                }
                Step::Wait { event, stream: captured } => {
                    let (event, stream) = (self.event(event)?, self.stream(captured, stream));
                    send(
                        session,
                        Record { kind: RecordKind::EventWait as u16, stream, e: event, ..Record::default() },
                    )?;
                }
            }
        }
        crate::handoff::point();
        Ok(())
    }

    fn stream(&mut self, captured: u32, launched_on: u32) -> u32 {
        if captured == self.graph.origin {
            return launched_on;
        }
        *self.streams.entry(captured).or_insert_with(stream::private)
    }

    fn event(&mut self, captured: u32) -> Result<u32, Error> {
        if let Some(event) = self.events.get(&captured) {
            return Ok(*event);
        }
        let event = event::private()?;
        self.events.insert(captured, event);
        Ok(event)
    }
}

fn run(session: &Session, record: &Record, effect: Effect) -> Outcome {
    match effect {
        Effect::Host((function, data)) => {
            stream::synchronize_id(record.stream)?;
            // SAFETY: the program gave the function with this argument, to be called on every launch.
            unsafe { function(data as *mut c_void) };
            return Ok(());
        }
        Effect::Copy(copied) => {
            let rows = Copy2d {
                to: copied.to as *mut c_void,
                to_pitch: copied.to_pitch,
                from: copied.from as *const c_void,
                from_pitch: copied.from_pitch,
                width: copied.width,
                height: copied.height,
                kind: 4,
            };
            // SAFETY: device ranges are checked again; host ranges must outlive the graph, as in CUDA.
            unsafe { memory::move_rows(&rows)? };
        }
        Effect::Fill { to, pitch, value, unit, width, height } => {
            memory::fill_rows(to as *mut c_void, pitch, value, unit, width, height)?;
        }
        Effect::None => {}
    }
    send(session, *record)
}

fn send(session: &Session, record: Record) -> Outcome {
    session.append(record, 0).map_err(|()| Error::UNKNOWN)
}
