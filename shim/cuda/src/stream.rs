//! Streams: dense ids behind opaque handles.
//!
//! A handle is an address that nothing lives at, so the id is found by arithmetic and a stale handle cannot be
//! dereferenced. Ids are never reused. Id 0 is the legacy default stream of device 0; the default streams of other devices
//! and per-thread default streams get ids when first used.
//!
//! The legacy default stream waits for the *blocking* streams of its device and they for it, as in CUDA: while such a
//! stream exists, an operation on either side first records an event on the streams that have got work since, and waits
//! for it. PyTorch's streams are non-blocking; a process without blocking streams pays nothing for this.

use crate::abi::{Error, Outcome};
use crate::session::HostCost;
use crate::{capture, clock, device, event, handoff, session};
use prism_wire::message::{Record, RecordKind};
use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const HANDLE_BASE: usize = 0x5052_0000_0000;
const HANDLE_STRIDE: usize = 16;
/// `cudaStreamPerThread`, the greatest handle of a default stream (`cudaStreamLegacy` is 1).
const PER_THREAD: usize = 2;
/// `cudaStreamNonBlocking`.
pub(crate) const NON_BLOCKING: c_uint = 1;
/// Lowest and highest priority.
pub(crate) const PRIORITIES: (c_int, c_int) = (0, -5);

/// What is known of a created stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// Its dense id.
    pub(crate) id: u32,
    /// The card it belongs to.
    pub(crate) device: c_int,
    /// Its creation flags.
    pub(crate) flags: c_uint,
    /// Its priority.
    pub(crate) priority: c_int,
    /// Blocking streams only: has it got work that the legacy stream has not waited for?
    ahead_of_legacy: bool,
    /// Blocking streams only: has the legacy stream got work that this one has not waited for?
    behind_legacy: bool,
}

/// Streams by id; `None` for ids of default streams and of destroyed streams.
static STREAMS: Mutex<Vec<Option<Stream>>> = Mutex::new(Vec::new());
static HAS_BLOCKING: AtomicBool = AtomicBool::new(false);
/// Ids of the legacy default streams by device; 0 = not used yet, except for device 0.
static LEGACY_IDS: [AtomicU32; device::MAX_DEVICES] = [const { AtomicU32::new(0) }; device::MAX_DEVICES];

thread_local! {
    /// Per-thread default streams of this thread: (device, id).
    static THREAD_IDS: RefCell<Vec<(c_int, u32)>> = const { RefCell::new(Vec::new()) };
}

fn streams() -> MutexGuard<'static, Vec<Option<Stream>>> {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if streams.is_empty() {
        // Id 0: the legacy default stream of device 0.
        streams.push(None);
    }
    streams
}

fn new_id(streams: &mut Vec<Option<Stream>>, stream: impl FnOnce(u32) -> Option<Stream>) -> u32 {
    let id = streams.len() as u32;
    streams.push(stream(id));
    id
}

/// Dense id of a `cudaStream_t` of the calling thread's current device (null or 1 = legacy, 2 = per-thread default
/// stream), for an operation on it: brings the legacy stream and the blocking streams into order first.
#[inline]
pub(crate) fn id(stream: *const c_void) -> u32 {
    let address = stream as usize;
    let id = if address > HANDLE_BASE { ((address - HANDLE_BASE) / HANDLE_STRIDE) as u32 } else { default_id(address) };
    // What is captured is ordered when it is launched.
    if HAS_BLOCKING.load(Ordering::Relaxed) && !capture::is_capturing(id) {
        order_with_legacy(id);
    }
    id
}

fn default_id(address: usize) -> u32 {
    let device = device::current();
    if address == PER_THREAD { thread_id(device) } else { legacy_id(device) }
}

fn legacy_id(device: c_int) -> u32 {
    if device == 0 {
        return 0;
    }
    let slot = &LEGACY_IDS[device as usize];
    let known = slot.load(Ordering::Acquire);
    if known != 0 {
        return known;
    }
    let mut streams = streams();
    // Another thread may have been faster.
    let known = slot.load(Ordering::Acquire);
    if known != 0 {
        return known;
    }
    let id = new_id(&mut streams, |_| None);
    slot.store(id, Ordering::Release);
    id
}

/// Per-thread default streams are taken as non-blocking.
fn thread_id(device: c_int) -> u32 {
    THREAD_IDS.with_borrow_mut(|ids| {
        if let Some((_, id)) = ids.iter().find(|(owner, _)| *owner == device) {
            return *id;
        }
        let id = new_id(&mut streams(), |_| None);
        ids.push((device, id));
        id
    })
}

/// Is it the legacy default stream?
pub(crate) fn is_legacy(stream: *const c_void) -> bool {
    (stream as usize) < PER_THREAD
}

/// A stream without a handle, for an executable graph.
pub(crate) fn private() -> u32 {
    new_id(&mut streams(), |_| None)
}

/// Creates a stream on the current device and returns its handle.
pub(crate) fn create(flags: c_uint, priority: c_int) -> Result<*mut c_void, Error> {
    device::using()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (lowest, highest) = PRIORITIES;
    let id = new_id(&mut streams(), |id| {
        Some(Stream {
            id,
            device: device::current(),
            flags,
            priority: priority.clamp(highest, lowest),
            ahead_of_legacy: false,
            behind_legacy: false,
        })
    });
    if flags & NON_BLOCKING == 0 {
        HAS_BLOCKING.store(true, Ordering::Relaxed);
    }
    Ok((HANDLE_BASE + id as usize * HANDLE_STRIDE) as *mut c_void)
}

/// What is known of a stream; default streams belong to the current device.
pub(crate) fn get(stream: *const c_void) -> Result<Stream, Error> {
    session::get()?;
    let address = stream as usize;
    if address <= PER_THREAD {
        let flags = if address == PER_THREAD { NON_BLOCKING } else { 0 };
        let id = default_id(address);
        return Ok(Stream {
            id,
            device: device::current(),
            flags,
            priority: 0,
            ahead_of_legacy: false,
            behind_legacy: false,
        });
    }
    let offset = address.checked_sub(HANDLE_BASE).ok_or(Error::INVALID_HANDLE)?;
    if offset % HANDLE_STRIDE != 0 {
        return Err(Error::INVALID_HANDLE);
    }
    streams().get(offset / HANDLE_STRIDE).copied().flatten().ok_or(Error::INVALID_HANDLE)
}

/// Checks that `stream` is usable, before an operation on it that is not on the hot path.
pub(crate) fn checked_id(stream: *const c_void) -> Result<u32, Error> {
    get(stream)?;
    Ok(id(stream))
}

/// Destroys a stream. Work on it goes on; the id is not used again.
pub(crate) fn destroy(stream: *const c_void) -> Outcome {
    let found = get(stream)?;
    if (stream as usize) <= PER_THREAD {
        return Err(Error::INVALID_HANDLE);
    }
    let mut streams = streams();
    if let Some(slot) = streams.get_mut(found.id as usize) {
        *slot = None;
    }
    let blocking = streams.iter().flatten().any(|stream| stream.flags & NON_BLOCKING == 0);
    HAS_BLOCKING.store(blocking, Ordering::Relaxed);
    Ok(())
}

/// Waits until `stream` is drained.
pub(crate) fn synchronize(stream: *const c_void) -> Outcome {
    let id = checked_id(stream)?;
    if capture::invalidate(id) {
        return Err(Error::CAPTURE_UNSUPPORTED);
    }
    synchronize_id(id)
}

/// Waits until the stream with this id is drained.
pub(crate) fn synchronize_id(id: u32) -> Outcome {
    wait(Record { kind: RecordKind::StreamSync as u16, stream: id, ..Record::default() })
}

/// Waits for every stream of the current device.
pub(crate) fn synchronize_device() -> Outcome {
    device::using()?;
    if capture::invalidate_own() {
        return Err(Error::CAPTURE_UNSUPPORTED);
    }
    let id = id(std::ptr::null());
    wait(Record { kind: RecordKind::DeviceSync as u16, stream: id, ..Record::default() })
}

fn wait(record: Record) -> Outcome {
    let session = session::get()?;
    clock::charge_if_driver(session.config.host.cost(HostCost::Sync));
    session.query(record, clock::is_driver()).ok_or(Error::UNKNOWN)?;
    handoff::point();
    Ok(())
}

/// Success if `stream` is drained, else "not ready".
pub(crate) fn query(stream: *const c_void) -> Outcome {
    let id = checked_id(stream)?;
    if capture::invalidate(id) {
        return Err(Error::CAPTURE_UNSUPPORTED);
    }
    let session = session::get()?;
    clock::charge_if_driver(session.config.host.cost(HostCost::Query));
    let record = Record { kind: RecordKind::StreamQuery as u16, stream: id, ..Record::default() };
    let reply = session.query(record, clock::is_driver()).ok_or(Error::UNKNOWN)?;
    if reply.value == 0 { Err(Error::NOT_READY) } else { Ok(()) }
}

/// Orders an operation about to be issued on stream `id` after the streams that the legacy rule puts before it.
#[cold]
fn order_with_legacy(id: u32) {
    let mut links = Vec::new();
    {
        let mut streams = streams();
        match streams.get(id as usize).copied().flatten() {
            Some(stream) if stream.flags & NON_BLOCKING == 0 => {
                if let Some(Some(stream)) = streams.get_mut(id as usize) {
                    stream.ahead_of_legacy = true;
                    if std::mem::take(&mut stream.behind_legacy) {
                        links.push((legacy_id_of(stream.device), id));
                    }
                }
            }
            None => {
                let Some(device) = device_of_legacy(id) else { return };
                for stream in streams.iter_mut().flatten().filter(|stream| stream.device == device) {
                    if stream.flags & NON_BLOCKING == 0 {
                        stream.behind_legacy = true;
                        if std::mem::take(&mut stream.ahead_of_legacy) {
                            links.push((stream.id, id));
                        }
                    }
                }
            }
            Some(_) => {}
        }
    }
    for (before, after) in links {
        event::link(before, after);
    }
}

/// The legacy stream of a device that has used it.
fn legacy_id_of(device: c_int) -> u32 {
    LEGACY_IDS[device as usize].load(Ordering::Acquire)
}

/// The device whose legacy stream has this id.
fn device_of_legacy(id: u32) -> Option<c_int> {
    if id == 0 {
        return Some(0);
    }
    LEGACY_IDS.iter().position(|slot| slot.load(Ordering::Acquire) == id).map(|device| device as c_int)
}
