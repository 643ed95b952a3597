//! What happens while the program is profiled: calls at once, with their virtual times; device work when the engine has told
//! its times.

use super::activity::{
    Activity, ApiActivity, ExternalActivity, FIRST_STREAM, KernelActivity, MemcpyActivity, MemsetActivity,
    SyncActivity, kind,
};
use super::names;
use super::tsc;
use crate::{clock, device, session};
use prism_wire::control::{ControlKind, TIMELINE_ENTRY_BYTES};
use prism_wire::message::{CopyDirection, Record, RecordKind};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kinds of activity that are recorded now, a bit each.
static ENABLED: AtomicU64 = AtomicU64::new(0);
static NEXT_CORRELATION: AtomicU32 = AtomicU32::new(1);
static STORE: Mutex<Store> = Mutex::new(Store { ready: Vec::new(), open: BTreeMap::new(), dropped: 0 });

/// Records kept before the profiler fetches them: those of some two million launches.
const MOST_RECORDS: usize = 1 << 22;

/// External kinds that are kept apart (`CUpti_ExternalCorrelationKind`).
const EXTERNAL_KINDS: usize = 8;

thread_local! {
    /// External ids of this thread by kind, the innermost last.
    static EXTERNAL: RefCell<[Vec<u64>; EXTERNAL_KINDS]> = const { RefCell::new([const { Vec::new() }; EXTERNAL_KINDS]) };
}

struct Store {
    ready: Vec<Activity>,
    /// Device work by correlation id, without its times.
    open: BTreeMap<u32, (Record, RecordKind, u32)>,
    dropped: u64,
}

fn store() -> MutexGuard<'static, Store> {
    STORE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Is anything recorded?
#[inline]
pub(crate) fn is_on() -> bool {
    ENABLED.load(Ordering::Relaxed) != 0
}

fn wants(kind: u32) -> bool {
    ENABLED.load(Ordering::Relaxed) & (1 << kind) != 0
}

/// Records activities of this kind from now on.
pub(super) fn enable(kind: u32) {
    if ENABLED.fetch_or(1 << kind, Ordering::Relaxed) == 0 {
        // What an earlier profile did not wait for is nobody's any more.
        store().open.clear();
    }
}

/// Records them no more. True: nothing is recorded any more.
pub(super) fn disable(kind: u32) -> bool {
    let before = ENABLED.fetch_and(!(1 << kind), Ordering::Relaxed);
    before != 0 && before & !(1 << kind) == 0
}

/// The calling thread works for `id` of its own kind of id.
pub(super) fn push_external(kind: u32, id: u64) -> bool {
    EXTERNAL.with_borrow_mut(|stacks| stacks.get_mut(kind as usize).map(|stack| stack.push(id)).is_some())
}

/// The end of [`push_external`]; the id.
pub(super) fn pop_external(kind: u32) -> Option<u64> {
    EXTERNAL.with_borrow_mut(|stacks| stacks.get_mut(kind as usize)?.pop())
}

/// Records that were dropped because the profiler never fetched them.
pub(super) fn take_dropped() -> u64 {
    std::mem::take(&mut store().dropped)
}

/// The runtime's function for a record, by its number in `cupti_runtime_cbid.h`.
fn function(kind: RecordKind) -> Option<u32> {
    use RecordKind as K;
    Some(match kind {
        K::Kernel => 211,
        // Libraries and NCCL launch with attributes.
        K::Gemm | K::Operator | K::Collective | K::Send | K::Recv => 430,
        K::Memcpy => 41,
        K::Memset => 51,
        K::StreamSync => 131,
        K::StreamQuery => 132,
        K::EventRecord => 135,
        K::EventSync => 137,
        K::EventQuery => 138,
        K::EventElapsed => 139,
        K::EventWait => 147,
        K::DeviceSync => 165,
        K::Alloc => 20,
        K::Free => 22,
        K::Marker | K::MemoryStats | K::GroupEnd | K::CommDestroy => return None,
    })
}

/// The name of a runtime function as CUPTI has it: with the version of its signature.
pub(super) fn function_name(function: u32) -> Option<&'static CStr> {
    Some(match function {
        20 => c"cudaMalloc_v3020",
        22 => c"cudaFree_v3020",
        41 => c"cudaMemcpyAsync_v3020",
        51 => c"cudaMemsetAsync_v3020",
        131 => c"cudaStreamSynchronize_v3020",
        132 => c"cudaStreamQuery_v3020",
        135 => c"cudaEventRecord_v3020",
        137 => c"cudaEventSynchronize_v3020",
        138 => c"cudaEventQuery_v3020",
        139 => c"cudaEventElapsedTime_v3020",
        147 => c"cudaStreamWaitEvent_v3020",
        165 => c"cudaDeviceSynchronize_v3020",
        211 => c"cudaLaunchKernel_v7000",
        430 => c"cudaLaunchKernelExC_v11060",
        _ => return None,
    })
}

/// A call has been made: `record` is what the engine gets of it. It began `before_ns` before the record's time and ended
/// `after_ns` after it. Gives device work its correlation id.
#[cold]
pub(crate) fn note(record: &mut Record, before_ns: i64, after_ns: i64) {
    let Some(kind) = RecordKind::from_u16(record.kind) else { return };
    let Some(function) = function(kind) else { return };
    super::request_buffer();
    let correlation = NEXT_CORRELATION.fetch_add(1, Ordering::Relaxed);
    let mut store = store();
    if store.ready.len() >= MOST_RECORDS {
        store.dropped += 1;
        return;
    }
    if wants(kind::EXTERNAL_CORRELATION) {
        let tops = EXTERNAL.with_borrow(|stacks| stacks.each_ref().map(|stack| stack.last().copied()));
        let known = (0..).zip(tops).filter_map(|(external_kind, id)| Some((external_kind, id?)));
        store.ready.extend(known.map(|(external_kind, external)| {
            let kind = kind::EXTERNAL_CORRELATION;
            Activity::External(ExternalActivity { kind, external_kind, external, correlation, reserved: 0 })
        }));
    }
    let times = [record.host_ns - before_ns, record.host_ns + after_ns].map(tsc::stamp);
    if wants(kind::RUNTIME) {
        // SAFETY: the call only returns a handle; its low half is what CUPTI reports.
        let thread = unsafe { libc::pthread_self() } as u32;
        store.ready.push(Activity::Api(ApiActivity {
            kind: kind::RUNTIME,
            function,
            start: times[0],
            end: times[1],
            process: std::process::id(),
            thread,
            correlation,
            result: 0,
        }));
    }
    if wants(kind::SYNCHRONIZATION)
        && let Some(sync) = sync(record, kind, times, correlation)
    {
        store.ready.push(Activity::Sync(sync));
    }
    // A profiler may have stopped listening by the time it fetches.
    if kind.is_device_work() && wants(activity_kind(kind)) {
        record.correlate(kind, correlation);
        store.open.insert(correlation, (*record, kind, device::current() as u32));
    }
}

/// `CUpti_ActivitySynchronizationType`: 1 of the host with an event, 2 of a stream with an event, 3 with a stream, 4 with all.
fn sync(record: &Record, kind: RecordKind, times: [u64; 2], correlation: u32) -> Option<SyncActivity> {
    const NONE: u32 = u32::MAX;
    let stream = record.stream + FIRST_STREAM;
    Some(match kind {
        RecordKind::EventSync => SyncActivity::new(1, times, correlation, NONE, record.e),
        RecordKind::EventWait => SyncActivity::new(2, times, correlation, stream, record.e),
        RecordKind::StreamSync => SyncActivity::new(3, times, correlation, stream, NONE),
        RecordKind::DeviceSync => SyncActivity::new(4, times, correlation, NONE, NONE),
        _ => return None,
    })
}

/// Everything that is over, in the order of its calls; device work as the engine tells its times.
pub(super) fn take() -> Vec<Activity> {
    let told = timeline();
    let mut store = store();
    for (correlation, start, end) in told {
        let Some((record, kind, device)) = store.open.remove(&correlation) else { continue };
        store.ready.push(work(&record, kind, device, correlation, [start, end].map(tsc::stamp)));
    }
    std::mem::take(&mut store.ready)
}

/// Correlation, start and end (virtual ns) of the device work that is over.
fn timeline() -> Vec<(u32, i64, i64)> {
    let mut told = Vec::new();
    loop {
        let Ok(answer) = session::control(ControlKind::Timeline, &[]) else {
            // The session is over or has failed, and said so.
            return told;
        };
        let Some((left, entries)) = answer.split_first_chunk::<8>() else { return told };
        for entry in entries.chunks_exact(TIMELINE_ENTRY_BYTES) {
            let number = |at: usize| i64::from_le_bytes(std::array::from_fn(|byte| entry[at + byte]));
            told.push((number(0) as u32, number(8), number(16)));
        }
        if u64::from_le_bytes(*left) == 0 {
            return told;
        }
    }
}

/// The kind of activity that device work is.
fn activity_kind(kind: RecordKind) -> u32 {
    match kind {
        RecordKind::Memcpy => kind::MEMCPY,
        RecordKind::Memset => kind::MEMSET,
        _ => kind::CONCURRENT_KERNEL,
    }
}

fn work(record: &Record, kind: RecordKind, device: u32, correlation: u32, times: [u64; 2]) -> Activity {
    let stream = record.stream;
    match kind {
        RecordKind::Memcpy => {
            let mut copy = MemcpyActivity::new(device, stream, correlation, times, record.a);
            (copy.copy_kind, copy.from_kind, copy.to_kind) = copy_kinds(record.b, record.c == 1);
            Activity::Memcpy(copy)
        }
        RecordKind::Memset => Activity::Memset(MemsetActivity::new(device, stream, correlation, times, record.a)),
        _ => {
            let mut kernel = KernelActivity::new(device, stream, correlation, times);
            kernel.name = names::of(record, kind);
            if kind == RecordKind::Kernel {
                kernel.grid = [record.a as i32, (record.a >> 32) as i32, record.b as i32];
                kernel.block = [(record.b >> 32) as i32, 1, 1];
                kernel.dynamic_shared = record.c as i32;
            }
            Activity::Kernel(kernel)
        }
    }
}

/// `CUpti_ActivityMemcpyKind`, and `CUpti_ActivityMemoryKind` of source and destination.
fn copy_kinds(direction: u64, is_pinned: bool) -> (u8, u8, u8) {
    const DEVICE: u8 = 3;
    let host = if is_pinned { 2 } else { 1 };
    match direction {
        d if d == CopyDirection::HostToDevice as u64 => (1, host, DEVICE),
        d if d == CopyDirection::DeviceToHost as u64 => (2, DEVICE, host),
        d if d == CopyDirection::DeviceToDevice as u64 => (8, DEVICE, DEVICE),
        _ => (9, host, host),
    }
}

/// A synchronisation or query of a thread that drives the device has been answered.
#[cold]
pub(crate) fn note_query(record: &Record) {
    let mut record = *record;
    let after_ns = clock::now() - record.host_ns;
    note(&mut record, 0, after_ns);
}
