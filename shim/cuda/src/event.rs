//! Events: dense ids, never reused, behind opaque handles; their state lives in a table that needs no lock.

use crate::abi::{Error, Outcome};
use crate::session::HostCost;
use crate::{capture, clock, device, handoff, session, stream};
use prism_wire::message::{Record, RecordKind};
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

const HANDLE_BASE: usize = 0x5053_0000_0000;
const HANDLE_STRIDE: usize = 16;

/// `cudaEventDisableTiming`.
const DISABLE_TIMING: c_uint = 2;
/// `cudaEventInterprocess`.
const INTERPROCESS: c_uint = 4;
/// All creation flags that exist.
const FLAGS: c_uint = 1 | DISABLE_TIMING | INTERPROCESS;
/// `cudaEventRecordExternal`, `cudaEventWaitExternal`: only of meaning while capturing.
const EXTERNAL: c_uint = 1;

/// The event exists.
const ALIVE: u64 = 1;
/// It has no time stamps.
const NO_TIMING: u64 = 2;
/// It was recorded at least once.
const RECORDED: u64 = 4;
/// A thread that drives the device knows that the latest record is complete.
const COMPLETE: u64 = 8;
/// Another thread knows it. Kept apart: what background threads learn, and when, must not change what drivers ask.
const COMPLETE_BACKGROUND: u64 = 16;
/// The rest counts the records, so that an answer about an older one is not noted.
const GENERATION: u64 = 32;

const CHUNK: usize = 4_096;
const CHUNKS: usize = 65_536;

/// Chunks by number: the first of [`CHUNK`] states each, or null.
static TABLE: [AtomicPtr<AtomicU64>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The state of event `id`, whose chunk is made if `create`.
fn slot(id: u32, create: bool) -> Option<&'static AtomicU64> {
    let (chunk, index) = (id as usize / CHUNK, id as usize % CHUNK);
    let entry = TABLE.get(chunk)?;
    let mut address = entry.load(Ordering::Acquire);
    if address.is_null() {
        if !create {
            return None;
        }
        let states: Box<[AtomicU64]> = (0..CHUNK).map(|_| AtomicU64::new(0)).collect();
        let fresh = Box::into_raw(states).cast::<AtomicU64>();
        match entry.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => address = fresh,
            Err(other) => {
                // SAFETY: `fresh` was made above, with this length, and never shown to another thread.
                drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(fresh, CHUNK)) });
                address = other;
            }
        }
    }
    // SAFETY: chunks are made above, `CHUNK` long, and never freed; `index` is below that.
    Some(unsafe { &*address.add(index) })
}

fn new_id(state: u64) -> Result<u32, Error> {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    slot(id, true).ok_or(Error::OUT_OF_MEMORY)?.store(state, Ordering::Release);
    Ok(id)
}

/// The id and state of a live event.
#[inline]
fn find(event: *const c_void) -> Result<(u32, &'static AtomicU64, u64), Error> {
    let offset = (event as usize).checked_sub(HANDLE_BASE).ok_or(Error::INVALID_HANDLE)?;
    if offset % HANDLE_STRIDE != 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let id = u32::try_from(offset / HANDLE_STRIDE).map_err(|_| Error::INVALID_HANDLE)?;
    let slot = slot(id, false).ok_or(Error::INVALID_HANDLE)?;
    let state = slot.load(Ordering::Acquire);
    if state & ALIVE == 0 { Err(Error::INVALID_HANDLE) } else { Ok((id, slot, state)) }
}

/// Creates an event and returns its handle. Costs no virtual time: frameworks keep events in pools that other threads fill,
/// so whether a call creates one is an accident.
pub(crate) fn create(flags: c_uint) -> Result<*mut c_void, Error> {
    device::using()?;
    if flags & !FLAGS != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
        return Err(Error::INVALID_VALUE);
    }
    let timing = if flags & DISABLE_TIMING == 0 { 0 } else { NO_TIMING };
    let id = new_id(ALIVE | timing)?;
    Ok((HANDLE_BASE + id as usize * HANDLE_STRIDE) as *mut c_void)
}

/// Destroys an event.
pub(crate) fn destroy(event: *const c_void) -> Outcome {
    session::get()?;
    let (_, slot, _) = find(event)?;
    slot.store(0, Ordering::Release);
    Ok(())
}

/// Records an event on a stream.
pub(crate) fn record(event: *const c_void, stream: *const c_void, flags: c_uint) -> Outcome {
    let session = device::using()?;
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (id, slot, _) = find(event)?;
    let stream = stream::id(stream);
    if capture::is_active() && capture::take_event_record(id, stream, flags & EXTERNAL != 0) {
        clock::charge(session.config.host.cost(HostCost::Event));
        return Ok(());
    }
    // Changed by the owner of the event only; a late answer of another thread fails to note itself.
    let _ = slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
        Some(((state | RECORDED) & !(COMPLETE | COMPLETE_BACKGROUND)).wrapping_add(GENERATION))
    });
    let record = Record { kind: RecordKind::EventRecord as u16, stream, e: id, ..Record::default() };
    session.append(record, session.config.host.cost(HostCost::Event)).map_err(|()| Error::UNKNOWN)
}

/// Lets a stream wait for the latest record of an event.
pub(crate) fn wait(stream: *const c_void, event: *const c_void, flags: c_uint) -> Outcome {
    let session = device::using()?;
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (id, _, state) = find(event)?;
    let stream = stream::id(stream);
    let cost = session.config.host.cost(HostCost::Event);
    if capture::is_active()
        && flags & EXTERNAL == 0
        && let Some(outcome) = capture::take_event_wait(stream, id, state & RECORDED != 0)
    {
        clock::charge(cost);
        return outcome;
    }
    if state & RECORDED == 0 {
        clock::charge_if_driver(cost);
        return Ok(());
    }
    let record = Record { kind: RecordKind::EventWait as u16, stream, e: id, ..Record::default() };
    session.append(record, cost).map_err(|()| Error::UNKNOWN)
}

/// The calling thread's own "known to be complete" bit.
fn complete_bit() -> u64 {
    if clock::is_driver() { COMPLETE } else { COMPLETE_BACKGROUND }
}

/// Notes that the record seen in `state` is complete, unless the event has been recorded again.
fn note_complete(slot: &AtomicU64, state: u64) {
    let mut seen = state;
    while seen / GENERATION == state / GENERATION && seen & ALIVE != 0 {
        match slot.compare_exchange_weak(seen, seen | complete_bit(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return,
            Err(now) => seen = now,
        }
    }
}

/// Success if the latest record of an event is complete (or there is none), else "not ready".
pub(crate) fn query(event: *const c_void) -> Outcome {
    let session = session::get()?;
    let (id, slot, state) = find(event)?;
    if capture::is_captured_event(id) {
        return Err(Error::CAPTURED_EVENT);
    }
    clock::charge_if_driver(session.config.host.cost(HostCost::Query));
    if state & RECORDED == 0 || state & complete_bit() != 0 {
        return Ok(());
    }
    let record = Record { kind: RecordKind::EventQuery as u16, e: id, ..Record::default() };
    let reply = session.query(record, clock::is_driver()).ok_or(Error::UNKNOWN)?;
    if reply.value == 0 {
        return Err(Error::NOT_READY);
    }
    note_complete(slot, state);
    Ok(())
}

/// Waits for the latest record of an event.
pub(crate) fn synchronize(event: *const c_void) -> Outcome {
    let session = session::get()?;
    let (id, slot, state) = find(event)?;
    if capture::is_captured_event(id) {
        return Err(Error::CAPTURED_EVENT);
    }
    clock::charge_if_driver(session.config.host.cost(HostCost::Sync));
    if state & RECORDED == 0 || state & complete_bit() != 0 {
        return Ok(());
    }
    let record = Record { kind: RecordKind::EventSync as u16, e: id, ..Record::default() };
    session.query(record, clock::is_driver()).ok_or(Error::UNKNOWN)?;
    note_complete(slot, state);
    handoff::point();
    Ok(())
}

/// Device time between two events in ns.
pub(crate) fn elapsed_ns(start: *const c_void, end: *const c_void) -> Result<i64, Error> {
    let session = session::get()?;
    let mut ids = [0; 2];
    for (id, event) in ids.iter_mut().zip([start, end]) {
        let (number, _, state) = find(event)?;
        if state & NO_TIMING != 0 || state & RECORDED == 0 {
            return Err(Error::INVALID_HANDLE);
        }
        *id = number;
    }
    // As in CUDA, the call does not wait: an event that is not complete has no time yet.
    query(start)?;
    query(end)?;
    let record = Record { kind: RecordKind::EventElapsed as u16, e: ids[0], f: ids[1], ..Record::default() };
    session.query(record, clock::is_driver()).map(|reply| reply.value).ok_or(Error::UNKNOWN)
}

/// An event without a handle, for an executable graph.
pub(crate) fn private() -> Result<u32, Error> {
    new_id(ALIVE | NO_TIMING | RECORDED)
}

/// Lets stream `after` wait for all that is enqueued on stream `before` now.
pub(crate) fn link(before: u32, after: u32) {
    let Ok(id) = new_id(ALIVE | NO_TIMING | RECORDED) else { return };
    session::append(Record { kind: RecordKind::EventRecord as u16, stream: before, e: id, ..Record::default() }, 0);
    session::append(Record { kind: RecordKind::EventWait as u16, stream: after, e: id, ..Record::default() }, 0);
}
