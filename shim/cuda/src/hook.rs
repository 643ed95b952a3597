//! Functions for other preloaded libraries and for the framework hook (Python, by ctypes).

use crate::export::put;
use crate::guard::guard;
use crate::session::HostCost;
use crate::{capture, clock, device, memory, session, stream, values};
use prism_wire::control::ControlKind;
use prism_wire::device::{Launched, SessionTable};
use prism_wire::group;
use prism_wire::message::{MarkerKind, Record, RecordKind, Reply};
use std::ffi::{CStr, c_char, c_int, c_void};

static TABLE: SessionTable = SessionTable {
    size: size_of::<SessionTable>(),
    append: table_append,
    query: table_query,
    control: table_control,
    stream_id: table_stream_id,
    is_capturing: table_is_capturing,
    current_device: table_current_device,
    is_device_memory: table_is_device_memory,
    device_alloc: table_device_alloc,
    device_free: table_device_free,
    config: table_config,
    is_real: table_is_real,
    attach: table_attach,
    copy: table_copy,
    received: values::received,
    append_unless: table_append_unless,
    at_launch: table_at_launch,
};

/// The session's functions for other preloaded libraries; null when the process has no session. Connects.
#[unsafe(no_mangle)]
pub extern "C" fn prism_session_table_v1() -> *const SessionTable {
    guard(std::ptr::null(), || session::get().map_or(std::ptr::null(), |_| &raw const TABLE))
}

unsafe extern "C" fn table_append(record: *const Record, host_cost_ns: i64) -> c_int {
    guard(-1, || {
        // SAFETY: the table's user passes a valid record (or null, which is refused).
        let Some(record) = (unsafe { record.as_ref() }) else { return -1 };
        session::get().ok().and_then(|session| session.append(*record, host_cost_ns).ok()).map_or(-1, |()| 0)
    })
}

unsafe extern "C" fn table_append_unless(
    record: *const Record,
    host_cost_ns: i64,
    is_cancelled: unsafe extern "C" fn(*const c_void) -> c_int,
    context: *const c_void,
) -> c_int {
    guard(-1, || {
        // SAFETY: the table's user passes a valid record (or null, which is refused).
        let Some(record) = (unsafe { record.as_ref() }) else { return -1 };
        // SAFETY: the function goes with the context.
        let is_cancelled = || unsafe { is_cancelled(context) != 0 };
        let appended = session::get().ok().map(|session| session.append_unless(*record, host_cost_ns, &is_cancelled));
        match appended {
            Some(Ok(true)) => 0,
            Some(Ok(false)) => 1,
            Some(Err(())) | None => -1,
        }
    })
}

unsafe extern "C" fn table_query(record: *const Record, reply: *mut Reply) -> c_int {
    guard(-1, || {
        // SAFETY: the table's user passes valid pointers (or null, which is refused).
        let (Some(record), Some(reply)) = (unsafe { (record.as_ref(), reply.as_mut()) }) else { return -1 };
        clock::charge_if_driver(session::host_cost(HostCost::Sync));
        match session::query(*record) {
            Some(answer) => {
                *reply = answer;
                0
            }
            None => -1,
        }
    })
}

unsafe extern "C" fn table_control(
    kind: u32,
    payload: *const u8,
    payload_len: usize,
    answer: *mut u8,
    capacity: usize,
) -> isize {
    guard(-1, || {
        let Some(kind) = ControlKind::from_u32(kind) else { return -1 };
        memory::nccl::requested(kind);
        let payload = if payload_len == 0 || payload.is_null() {
            &[]
        } else {
            // SAFETY: the table's user passes a valid range.
            unsafe { std::slice::from_raw_parts(payload, payload_len) }
        };
        let (code, text) = match session::control(kind, payload) {
            Ok(bytes) if bytes.len() > capacity => return -3,
            Ok(bytes) => (bytes.len() as isize, bytes),
            Err(session::ControlFailure::Refused(text)) => (-2, text.into_bytes()),
            Err(session::ControlFailure::Gone(_)) => return -1,
        };
        let length = text.len().min(capacity);
        if length > 0 && !answer.is_null() {
            // SAFETY: the table's user passes `capacity` writable bytes.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), answer, length) };
        }
        code
    })
}

unsafe extern "C" fn table_stream_id(stream: *const c_void) -> u32 {
    guard(0, || stream::id(stream))
}

unsafe extern "C" fn table_is_capturing(stream: *const c_void) -> c_int {
    guard(0, || c_int::from(capture::is_active() && capture::is_capturing(stream::id(stream))))
}

unsafe extern "C" fn table_current_device() -> c_int {
    device::current()
}

unsafe extern "C" fn table_is_device_memory(pointer: *const c_void, bytes: usize) -> c_int {
    guard(0, || c_int::from(memory::is_device(pointer) && memory::contains(pointer, bytes)))
}

unsafe extern "C" fn table_device_alloc(bytes: usize) -> *mut c_void {
    guard(std::ptr::null_mut(), || memory::malloc(bytes).unwrap_or(std::ptr::null_mut()))
}

unsafe extern "C" fn table_device_free(pointer: *mut c_void) -> c_int {
    guard(-1, || if memory::free(pointer).is_ok() { 0 } else { -1 })
}

unsafe extern "C" fn table_config(key: *const c_char) -> *const c_char {
    guard(std::ptr::null(), || {
        if key.is_null() {
            return std::ptr::null();
        }
        // SAFETY: the table's user passes a C string.
        let key = unsafe { CStr::from_ptr(key) };
        session::get().ok().and_then(|session| session.config.value(key)).map_or(std::ptr::null(), CStr::as_ptr)
    })
}

unsafe extern "C" fn table_is_real() -> c_int {
    0
}

/// The host reaches the memory of the emulated device by itself.
unsafe extern "C" fn table_attach(_run: unsafe extern "C" fn(*mut c_void), _data: *mut c_void) -> c_int {
    -1
}

unsafe extern "C" fn table_at_launch(stream: u32, run: Launched, done: Launched, data: *mut c_void) -> c_int {
    guard(-1, || {
        // SAFETY: the contract of the table.
        let call = unsafe { capture::Call::new(run, done, data) };
        match capture::take_call(stream, call) {
            Ok(()) => 0,
            Err(call) => {
                call.forget();
                -1
            }
        }
    })
}

/// The host reaches the memory of the emulated device by itself.
unsafe extern "C" fn table_copy(_to: *mut c_void, _from: *const c_void, _bytes: usize) -> c_int {
    -1
}

/// Tells the engine the members of a process group that is about to be created (global ranks in group-rank order), and
/// remembers its name as the calling thread's current group. 0, or -1 (no session, engine gone, or refused).
///
/// # Safety
/// `name` must be a C string, `ranks` point to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_note_group(name: *const c_char, ranks: *const u32, count: u32) -> c_int {
    // SAFETY: the contract of this function.
    guard(-1, || unsafe { group::note(name, ranks, count, session::note_group) })
}

/// Name of the process group being created by the calling thread, or null. Valid until the thread's next call of
/// [`prism_note_group`] or [`prism_clear_group`].
#[unsafe(no_mangle)]
pub extern "C" fn prism_current_group() -> *const c_char {
    guard(std::ptr::null(), group::current)
}

/// The process group has been created. 0.
#[unsafe(no_mangle)]
pub extern "C" fn prism_clear_group() -> c_int {
    guard(-1, || {
        group::clear();
        0
    })
}

/// Has a call of this process needed a device? 1 or 0. Of one that has, no rank can be forked. Connects nothing.
#[unsafe(no_mangle)]
pub extern "C" fn prism_is_touched() -> c_int {
    guard(-1, || c_int::from(session::is_touched()))
}

/// Marks a point of the program (a [`MarkerKind`]) on a stream. 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn prism_marker(kind: u32, stream: *mut c_void) -> c_int {
    guard(-1, || {
        let known = [MarkerKind::TrainingBegin, MarkerKind::IterationEnd].iter().any(|known| *known as u32 == kind);
        let Ok(session) = session::get() else { return -1 };
        if !known {
            return -1;
        }
        values::flush();
        // Libraries that were imported after the first CUDA call.
        prism_callers::insist();
        session::flush_groups();
        let stream = stream::id(stream);
        let record = Record { kind: RecordKind::Marker as u16, stream, e: kind, ..Record::default() };
        session.append(record, 0).map_or(-1, |()| 0)
    })
}

/// Tells the peaks of the program's own allocator since its start. 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn prism_memory_stats(allocated_peak: u64, reserved_peak: u64) -> c_int {
    guard(-1, || {
        session::flush_groups();
        let record = Record {
            kind: RecordKind::MemoryStats as u16,
            a: allocated_peak,
            b: reserved_peak,
            c: crate::libs::workspaces::total_bytes(),
            ..Record::default()
        };
        session::get().ok().and_then(|session| session.append(record, 0).ok()).map_or(-1, |()| 0)
    })
}

/// Writes what another rank would have put into device memory. 0, or -1 for a range outside any allocation.
///
/// # Safety
/// `data` must point to `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_provide(address: *mut c_void, data: *const c_char, bytes: usize) -> c_int {
    guard(-1, || {
        if bytes == 0 {
            return 0;
        }
        if data.is_null() || !memory::is_device(address) || !memory::contains(address, bytes) {
            return -1;
        }
        // SAFETY: the source is the caller's; the destination lies in one allocation of the device.
        unsafe { std::ptr::copy_nonoverlapping(data.cast::<u8>(), address.cast::<u8>(), bytes) };
        values::provided(address.addr(), bytes, "told by another rank");
        0
    })
}

/// Free and total bytes of a card. 0 or -1.
///
/// # Safety
/// The pointers must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_device_memory(device: c_int, free: *mut usize, total: *mut usize) -> c_int {
    guard(-1, || {
        let Ok((free_bytes, total_bytes)) = memory::info(device) else { return -1 };
        // SAFETY: the contract of this function; null is refused.
        let written = unsafe { put(free, free_bytes).and_then(|()| put(total, total_bytes)) };
        written.map_or(-1, |()| 0)
    })
}
