//! CUDA graphs made by capturing streams. Graphs that are built node by node are refused.

use crate::abi::{Error, Outcome};
use crate::capture::{self, Executable, Graph, STATUS_NONE};
use crate::export::{exports, put, put_optional, refused};
use crate::{device, session, stream};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Handles are numbers from here on, never addresses of anything.
const GRAPH_BASE: usize = 0x5054_0000_0000;
const EXECUTABLE_BASE: usize = 0x5055_0000_0000;
const OBJECT_BASE: usize = 0x5056_0000_0000;
/// Nodes: graph number and index.
const NODE_BASE: usize = 0x5100_0000_0000;
const NODES_PER_GRAPH: usize = 1 << 20;
const STRIDE: usize = 16;

/// `cudaGraphExecUpdateSuccess`, `cudaGraphExecUpdateErrorTopologyChanged`.
const UPDATED: c_int = 0;
const TOPOLOGY_CHANGED: c_int = 2;

/// Everything that has a handle.
struct Tables {
    graphs: BTreeMap<usize, Arc<Graph>>,
    executables: BTreeMap<usize, Executable>,
    objects: BTreeMap<usize, UserObject>,
    /// User objects that a graph keeps alive: (graph, object, references).
    retained: Vec<(usize, usize, c_uint)>,
}

/// A `cudaUserObject_t`.
struct UserObject {
    data: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
    references: c_uint,
}

static TABLES: Mutex<Tables> = Mutex::new(Tables {
    graphs: BTreeMap::new(),
    executables: BTreeMap::new(),
    objects: BTreeMap::new(),
    retained: Vec::new(),
});
static NEXT: AtomicUsize = AtomicUsize::new(1);

thread_local! {
    /// What the last `cudaStreamGetCaptureInfo` of this thread points to.
    static DEPENDENCIES: RefCell<Vec<*mut c_void>> = const { RefCell::new(Vec::new()) };
}

fn tables() -> MutexGuard<'static, Tables> {
    TABLES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next() -> usize {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The number behind a handle.
fn number(handle: *const c_void, base: usize) -> Result<usize, Error> {
    let offset = (handle as usize).checked_sub(base).ok_or(Error::INVALID_VALUE)?;
    if offset % STRIDE == 0 { Ok(offset / STRIDE) } else { Err(Error::INVALID_VALUE) }
}

fn add_graph(graph: Arc<Graph>) -> *mut c_void {
    let number = next();
    tables().graphs.insert(number, graph);
    (GRAPH_BASE + number * STRIDE) as *mut c_void
}

fn graph(handle: *const c_void) -> Result<(usize, Arc<Graph>), Error> {
    session::get()?;
    let number = number(handle, GRAPH_BASE)?;
    let graph = tables().graphs.get(&number).cloned().ok_or(Error::INVALID_VALUE)?;
    Ok((number, graph))
}

fn node_handle(graph: usize, index: usize) -> *mut c_void {
    (NODE_BASE + (graph * NODES_PER_GRAPH + index) * STRIDE) as *mut c_void
}

/// The graph and index of a node. Nodes of captures under way (`cudaStreamGetCaptureInfo`) belong to graph 0.
fn node(handle: *const c_void) -> Result<(usize, usize, capture::Node), Error> {
    session::get()?;
    let number = number(handle, NODE_BASE)?;
    let (graph, index) = (number / NODES_PER_GRAPH, number % NODES_PER_GRAPH);
    let node = tables().graphs.get(&graph).and_then(|graph| graph.nodes.get(index).cloned());
    Ok((graph, index, node.ok_or(Error::INVALID_VALUE)?))
}

/// Writes handles as CUDA does: a null array asks for the count, a larger one is filled up with nulls.
///
/// # Safety
/// `count` must be null or valid, `array` null or valid for `*count` handles.
unsafe fn put_handles(array: *mut *mut c_void, count: *mut usize, handles: &[*mut c_void]) -> Outcome {
    if array.is_null() {
        // SAFETY: the contract of this function.
        return unsafe { put(count, handles.len()) };
    }
    // SAFETY: the contract of this function.
    let room = unsafe { count.as_ref() }.copied().ok_or(Error::INVALID_VALUE)?;
    for index in 0..room {
        let handle = handles.get(index).copied().unwrap_or(std::ptr::null_mut());
        // SAFETY: the array has this room by the contract of this function.
        unsafe { array.add(index).write(handle) };
    }
    // SAFETY: not null.
    unsafe { put(count, room.min(handles.len())) }
}

/// Begins a capture.
pub(crate) fn begin(stream: *const c_void, mode: c_int) -> Outcome {
    capture::begin(stream, mode)
}

/// Ends a capture; the graph's handle is null if there is no graph.
///
/// # Safety
/// `result` must be null or valid.
pub(crate) unsafe fn end(stream: *const c_void, result: *mut *mut c_void) -> Outcome {
    // SAFETY: the contract of this function.
    unsafe { put_optional(result, std::ptr::null_mut()) };
    let graph = capture::end(stream)?;
    if graph.nodes.len() >= NODES_PER_GRAPH {
        return Err(Error::OUT_OF_MEMORY);
    }
    // SAFETY: as above.
    unsafe { put(result, add_graph(Arc::new(graph))) }
}

/// What `cudaStreamGetCaptureInfo` writes.
#[derive(Clone, Copy)]
pub(crate) struct CaptureInfo {
    pub(crate) status: *mut c_int,
    pub(crate) id: *mut c_ulonglong,
    pub(crate) graph: *mut *mut c_void,
    pub(crate) dependencies: *mut *const *mut c_void,
    pub(crate) edges: *mut *const c_void,
    pub(crate) count: *mut usize,
}

/// Tells whether a stream is captured. The graph of a capture under way has no handle: nodes cannot be added to it.
///
/// # Safety
/// All pointers must be null or valid.
pub(crate) unsafe fn capture_info(stream: *const c_void, to: CaptureInfo) -> Outcome {
    device::profile()?;
    let (status, id, nodes) = capture::info(stream::get(stream)?.id);
    let (pointer, count) = DEPENDENCIES.with_borrow_mut(|dependencies| {
        *dependencies = nodes.iter().map(|index| node_handle(0, *index)).collect();
        let pointer = if dependencies.is_empty() { std::ptr::null() } else { dependencies.as_ptr() };
        (pointer, dependencies.len())
    });
    // SAFETY: the contract of this function.
    unsafe {
        put(to.status, status)?;
        put_optional(to.id, id);
        put_optional(to.graph, std::ptr::null_mut());
        put_optional(to.dependencies, pointer);
        put_optional(to.edges, std::ptr::null());
        put_optional(to.count, count);
    }
    Ok(())
}

/// Whether a stream is captured, as a status.
pub(crate) fn status(stream: *const c_void) -> Result<c_int, Error> {
    session::get()?;
    if !capture::is_active() {
        return Ok(STATUS_NONE);
    }
    Ok(capture::info(stream::get(stream)?.id).0)
}

/// Makes a graph ready to be launched.
///
/// # Safety
/// `result` must be null or valid.
pub(crate) unsafe fn instantiate(result: *mut *mut c_void, handle: *mut c_void) -> Outcome {
    let (_, graph) = graph(handle)?;
    let number = next();
    // SAFETY: the contract of this function.
    unsafe { put(result, (EXECUTABLE_BASE + number * STRIDE) as *mut c_void)? };
    tables().executables.insert(number, Executable::new(graph));
    Ok(())
}

/// Launches an executable graph.
pub(crate) fn launch(handle: *mut c_void, stream: *mut c_void) -> Outcome {
    let on = stream::checked_id(stream)?;
    let number = number(handle, EXECUTABLE_BASE)?;
    // Taken out while it runs: host functions of the graph may use other graphs.
    let mut executable = tables().executables.remove(&number).ok_or(Error::INVALID_VALUE)?;
    // Which kernel of a graph writes what is not kept. Copies and payloads say so themselves.
    if executable.computes() {
        crate::values::anything_written();
    }
    let result = executable.launch(on);
    tables().executables.insert(number, executable);
    result
}

fn destroy(handle: *mut c_void) -> Outcome {
    let (number, _) = graph(handle)?;
    let released: Vec<(usize, c_uint)> = {
        let mut tables = tables();
        tables.graphs.remove(&number);
        let (gone, kept) = tables.retained.drain(..).partition(|(graph, ..)| *graph == number);
        tables.retained = kept;
        let gone: Vec<(usize, usize, c_uint)> = gone;
        gone.into_iter().map(|(_, object, count)| (object, count)).collect()
    };
    released.into_iter().try_for_each(|(object, count)| release(object, count))
}

fn destroy_executable(handle: *mut c_void) -> Outcome {
    session::get()?;
    let number = number(handle, EXECUTABLE_BASE)?;
    tables().executables.remove(&number).map(|_| ()).ok_or(Error::INVALID_VALUE)
}

/// `cudaGraphExecUpdateResultInfo`.
#[repr(C)]
pub struct UpdateResult {
    result: c_int,
    error_node: *mut c_void,
    error_from_node: *mut c_void,
}

/// # Safety
/// `result` must be null or valid.
unsafe fn update(handle: *mut c_void, from: *mut c_void, result: *mut UpdateResult) -> Outcome {
    let (_, graph) = graph(from)?;
    let number = number(handle, EXECUTABLE_BASE)?;
    let is_updated = tables().executables.get_mut(&number).ok_or(Error::INVALID_VALUE)?.update(graph);
    let code = if is_updated { UPDATED } else { TOPOLOGY_CHANGED };
    let none = std::ptr::null_mut();
    // SAFETY: the contract of this function.
    unsafe { put_optional(result, UpdateResult { result: code, error_node: none, error_from_node: none }) };
    if is_updated { Ok(()) } else { Err(Error::GRAPH_EXEC_UPDATE_FAILURE) }
}

/// # Safety
/// The pointers must be null or valid, the array as long as `*count` says.
unsafe fn nodes(handle: *mut c_void, array: *mut *mut c_void, count: *mut usize, only_roots: bool) -> Outcome {
    let (number, graph) = graph(handle)?;
    let is_listed = |node: &capture::Node| !only_roots || node.dependencies.is_empty();
    let listed = graph.nodes.iter().enumerate().filter(|(_, node)| is_listed(node));
    let handles: Vec<_> = listed.map(|(index, _)| node_handle(number, index)).collect();
    // SAFETY: the contract of this function.
    unsafe { put_handles(array, count, &handles) }
}

/// # Safety
/// The pointers must be null or valid, the array as long as `*count` says.
unsafe fn dependencies(handle: *mut c_void, array: *mut *mut c_void, count: *mut usize) -> Outcome {
    let (graph, _, node) = node(handle)?;
    let handles: Vec<_> = node.dependencies.iter().map(|index| node_handle(graph, *index)).collect();
    // SAFETY: the contract of this function.
    unsafe { put_handles(array, count, &handles) }
}

/// # Safety
/// The pointers must be null or valid, the array as long as `*count` says.
unsafe fn dependents(handle: *mut c_void, array: *mut *mut c_void, count: *mut usize) -> Outcome {
    let (number, index, _) = node(handle)?;
    let graph = tables().graphs.get(&number).cloned().ok_or(Error::INVALID_VALUE)?;
    let after = graph.nodes.iter().enumerate().filter(|(_, node)| node.dependencies.contains(&index));
    let handles: Vec<_> = after.map(|(index, _)| node_handle(number, index)).collect();
    // SAFETY: the contract of this function.
    unsafe { put_handles(array, count, &handles) }
}

type Destroy = unsafe extern "C" fn(*mut c_void);

/// # Safety
/// `result` must be null or valid; `destroy` must be callable with `data`.
unsafe fn user_object(
    result: *mut *mut c_void,
    data: *mut c_void,
    destroy: Option<Destroy>,
    references: c_uint,
) -> Outcome {
    session::get()?;
    let destroy = destroy.filter(|_| references > 0).ok_or(Error::INVALID_VALUE)?;
    let number = next();
    // SAFETY: the contract of this function.
    unsafe { put(result, (OBJECT_BASE + number * STRIDE) as *mut c_void)? };
    tables().objects.insert(number, UserObject { data: data as usize, destroy, references });
    Ok(())
}

fn retain(object: *mut c_void, count: c_uint) -> Outcome {
    let number = number(object, OBJECT_BASE)?;
    let mut tables = tables();
    let object = tables.objects.get_mut(&number).ok_or(Error::INVALID_VALUE)?;
    object.references = object.references.checked_add(count).ok_or(Error::INVALID_VALUE)?;
    Ok(())
}

/// Gives references back; the last one calls the object's destructor.
fn release(number: usize, count: c_uint) -> Outcome {
    let gone = {
        let mut tables = tables();
        let object = tables.objects.get_mut(&number).ok_or(Error::INVALID_VALUE)?;
        object.references = object.references.checked_sub(count).ok_or(Error::INVALID_VALUE)?;
        if object.references > 0 {
            return Ok(());
        }
        tables.objects.remove(&number)
    };
    if let Some(object) = gone {
        // SAFETY: the program gave the destructor for this data; nobody refers to the object any more.
        unsafe { (object.destroy)(object.data as *mut c_void) };
    }
    Ok(())
}

/// `cudaGraphUserObjectMove`: the graph takes over references of the caller.
const MOVE: c_uint = 1;

fn graph_retain(handle: *mut c_void, object: *mut c_void, count: c_uint, flags: c_uint) -> Outcome {
    let (graph, _) = graph(handle)?;
    if flags & MOVE == 0 {
        retain(object, count)?;
    }
    let object = number(object, OBJECT_BASE)?;
    tables().retained.push((graph, object, count));
    Ok(())
}

fn graph_release(handle: *mut c_void, object: *mut c_void, count: c_uint) -> Outcome {
    let (graph, _) = graph(handle)?;
    let object = number(object, OBJECT_BASE)?;
    {
        let mut tables = tables();
        let held =
            tables.retained.iter_mut().find(|(by, which, held)| *by == graph && *which == object && *held >= count);
        held.ok_or(Error::INVALID_VALUE)?.2 -= count;
    }
    release(object, count)
}

exports! { runtime, FUNCTIONS:
    cudaStreamBeginCapture(stream: *mut c_void, mode: c_int) => begin(stream, mode);
    cudaStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) => end(stream, graph);
    cudaStreamIsCapturing(stream: *mut c_void, result: *mut c_int) => put(result, status(stream)?);
    cudaStreamGetCaptureInfo(
        stream: *mut c_void, status: *mut c_int, id: *mut c_ulonglong, graph: *mut *mut c_void,
        dependencies: *mut *const *mut c_void, edges: *mut *const c_void, count: *mut usize,
    ) => capture_info(stream, CaptureInfo { status, id, graph, dependencies, edges, count });
    // The name of CUDA 12; edges have no data there.
    cudaStreamGetCaptureInfo_v2(
        stream: *mut c_void, status: *mut c_int, id: *mut c_ulonglong, graph: *mut *mut c_void,
        dependencies: *mut *const *mut c_void, count: *mut usize,
    ) => capture_info(stream, CaptureInfo { status, id, graph, dependencies, edges: std::ptr::null_mut(), count });
    cudaGraphCreate(result: *mut *mut c_void, _flags: c_uint) => {
        device::using()?;
        put(result, add_graph(Arc::new(Graph::default())))
    };
    cudaGraphDestroy(graph: *mut c_void) => destroy(graph);
    cudaGraphClone(result: *mut *mut c_void, original: *mut c_void) => {
        let (_, graph) = graph(original)?;
        put(result, add_graph(graph))
    };
    cudaGraphInstantiate(result: *mut *mut c_void, graph: *mut c_void, _flags: c_ulonglong) =>
        instantiate(result, graph);
    cudaGraphInstantiateWithFlags(result: *mut *mut c_void, graph: *mut c_void, _flags: c_ulonglong) =>
        instantiate(result, graph);
    cudaGraphUpload(executable: *mut c_void, stream: *mut c_void) => {
        stream::checked_id(stream)?;
        let known = tables().executables.contains_key(&number(executable, EXECUTABLE_BASE)?);
        if known { Ok(()) } else { Err(Error::INVALID_VALUE) }
    };
    cudaGraphLaunch(executable: *mut c_void, stream: *mut c_void) => launch(executable, stream);
    cudaGraphExecDestroy(executable: *mut c_void) => destroy_executable(executable);
    cudaGraphExecUpdate(executable: *mut c_void, graph: *mut c_void, result: *mut UpdateResult) =>
        update(executable, graph, result);
    cudaGraphGetNodes(graph: *mut c_void, array: *mut *mut c_void, count: *mut usize) =>
        nodes(graph, array, count, false);
    cudaGraphGetRootNodes(graph: *mut c_void, array: *mut *mut c_void, count: *mut usize) =>
        nodes(graph, array, count, true);
    cudaGraphNodeGetType(handle: *mut c_void, kind: *mut c_int) => put(kind, node(handle)?.2.kind);
    cudaGraphNodeGetDependencies(
        node: *mut c_void, array: *mut *mut c_void, _edges: *mut c_void, count: *mut usize,
    ) => dependencies(node, array, count);
    cudaGraphNodeGetDependentNodes(
        node: *mut c_void, array: *mut *mut c_void, _edges: *mut c_void, count: *mut usize,
    ) => dependents(node, array, count);
    cudaUserObjectCreate(
        result: *mut *mut c_void, data: *mut c_void, destroy: Option<Destroy>, references: c_uint, _flags: c_uint,
    ) => user_object(result, data, destroy, references);
    cudaUserObjectRetain(object: *mut c_void, count: c_uint) => { session::get()?; retain(object, count) };
    cudaUserObjectRelease(object: *mut c_void, count: c_uint) => {
        session::get()?;
        release(number(object, OBJECT_BASE)?, count)
    };
    cudaGraphRetainUserObject(graph: *mut c_void, object: *mut c_void, count: c_uint, flags: c_uint) =>
        graph_retain(graph, object, count, flags);
    cudaGraphReleaseUserObject(graph: *mut c_void, object: *mut c_void, count: c_uint) =>
        graph_release(graph, object, count);
    cudaGraphDebugDotPrint(graph: *mut c_void, path: *const c_char, _flags: c_uint) => dot(graph, path);
}

/// Writes the graph's nodes and edges in the DOT language.
///
/// # Safety
/// `path` must be null or a C string.
unsafe fn dot(handle: *mut c_void, path: *const c_char) -> Outcome {
    use std::fmt::Write as _;
    let (_, graph) = graph(handle)?;
    if path.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the contract of this function.
    let path = unsafe { std::ffi::CStr::from_ptr(path) }.to_string_lossy();
    let mut text = String::from("digraph {\n");
    for (index, node) in graph.nodes.iter().enumerate() {
        let _ = writeln!(text, "  n{index} [label=\"{index}: type {}\"];", node.kind);
        for before in &node.dependencies {
            let _ = writeln!(text, "  n{before} -> n{index};");
        }
    }
    text.push_str("}\n");
    std::fs::write(&*path, text).map_err(|_| Error::OPERATING_SYSTEM)
}

refused! { runtime, REFUSED:
    cudaStreamBeginCaptureToGraph,
    cudaStreamUpdateCaptureDependencies,
    cudaStreamCopyAttributes,
    cudaStreamGetAttribute,
    cudaStreamSetAttribute,
    cudaGraphInstantiateWithParams,
    cudaGraphGetEdges,
    cudaGraphAddNode,
    cudaGraphAddKernelNode,
    cudaGraphAddMemcpyNode,
    cudaGraphAddMemsetNode,
    cudaGraphAddHostNode,
    cudaGraphAddEmptyNode,
    cudaGraphAddDependencies,
    cudaGraphConditionalHandleCreate,
}
