//! The session's functions for the NCCL stand-in.

use crate::guard;
use crate::scheduler::Job;
use crate::session::{self, tell};
use prism_wire::client::ControlError;
use prism_wire::control::ControlKind;
use prism_wire::device::{Launched, SessionTable};
use prism_wire::message::{Record, Reply};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

static TABLE: SessionTable = SessionTable {
    size: size_of::<SessionTable>(),
    append,
    query,
    control,
    stream_id,
    is_capturing,
    current_device,
    is_device_memory,
    device_alloc,
    device_free,
    config,
    is_real,
    attach,
    copy,
    received,
    append_unless,
    at_launch,
};

/// The session's functions for other preloaded libraries; null when the process has no session. Connects.
#[unsafe(no_mangle)]
pub extern "C" fn prism_session_table_v1() -> *const SessionTable {
    guard(std::ptr::null(), || session::get().map_or(std::ptr::null(), |_| &raw const TABLE))
}

unsafe extern "C" fn append(record: *const Record, host_cost_ns: i64) -> c_int {
    guard(-1, || {
        // SAFETY: the table's user passes a valid record (or null, which is refused).
        let (Some(session), Some(record)) = (session::get(), unsafe { record.as_ref() }) else { return -1 };
        match session.append(record, host_cost_ns == 0) {
            Ok(()) => 0,
            Err(reason) => {
                static SAID: AtomicBool = AtomicBool::new(false);
                if !SAID.swap(true, Ordering::Relaxed) {
                    tell(&reason);
                }
                -1
            }
        }
    })
}

unsafe extern "C" fn append_unless(
    record: *const Record,
    host_cost_ns: i64,
    is_cancelled: unsafe extern "C" fn(context: *const c_void) -> c_int,
    context: *const c_void,
) -> c_int {
    // SAFETY: the caller's function with the caller's context.
    if unsafe { is_cancelled(context) } != 0 {
        return 1;
    }
    // Holds are appended by the scheduler: nothing here waits for the ring.
    // SAFETY: passed on.
    unsafe { append(record, host_cost_ns) }
}

unsafe extern "C" fn query(record: *const Record, reply: *mut Reply) -> c_int {
    guard(-1, || {
        // SAFETY: the table's user passes valid pointers (or null, which is refused).
        let (Some(record), Some(reply)) = (unsafe { (record.as_ref(), reply.as_mut()) }) else { return -1 };
        let Some(session) = session::get().filter(|_| !session::is_lost()) else { return -1 };
        let record = Record { host_ns: session.now(), ..*record };
        session.client().query(record).map_or(-1, |answer| {
            *reply = answer;
            0
        })
    })
}

unsafe extern "C" fn control(
    kind: u32,
    payload: *const u8,
    payload_len: usize,
    answer: *mut u8,
    capacity: usize,
) -> isize {
    guard(-1, || {
        let (Some(kind), Some(session)) = (ControlKind::from_u32(kind), session::get()) else { return -1 };
        let payload = if payload_len == 0 || payload.is_null() {
            &[]
        } else {
            // SAFETY: the table's user passes a valid range.
            unsafe { std::slice::from_raw_parts(payload, payload_len) }
        };
        let (code, text) = match session.client().control(kind, payload) {
            Ok(bytes) if bytes.len() > capacity => return -3,
            Ok(bytes) => (bytes.len() as isize, bytes),
            Err(ControlError::Refused(text)) => (-2, text.into_bytes()),
            Err(ControlError::Disconnected) => return -1,
        };
        let length = text.len().min(capacity);
        if length > 0 && !answer.is_null() {
            // SAFETY: the table's user passes `capacity` writable bytes.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), answer, length) };
        }
        code
    })
}

unsafe extern "C" fn stream_id(stream: *const c_void) -> u32 {
    guard(0, || session::get().map_or(0, |session| session.stream_id(stream.cast_mut())))
}

unsafe extern "C" fn is_capturing(stream: *const c_void) -> c_int {
    guard(0, || session::get().map_or(0, |session| c_int::from(session.driver().is_capturing(stream.cast_mut()))))
}

unsafe extern "C" fn current_device() -> c_int {
    guard(0, || session::get().map_or(0, |session| session.driver().device()))
}

/// The host cannot reach into the card's memory: data moves by [`attach`] and [`copy`].
unsafe extern "C" fn is_device_memory(_pointer: *const c_void, _bytes: usize) -> c_int {
    0
}

unsafe extern "C" fn device_alloc(bytes: usize) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        let address = session::get().and_then(|session| session.driver().alloc(bytes));
        address.map_or(std::ptr::null_mut(), |address| std::ptr::with_exposed_provenance_mut(address as usize))
    })
}

unsafe extern "C" fn device_free(pointer: *mut c_void) -> c_int {
    guard(-1, || {
        let is_freed = session::get().is_some_and(|session| session.driver().free(pointer.expose_provenance() as u64));
        if is_freed { 0 } else { -1 }
    })
}

unsafe extern "C" fn config(key: *const c_char) -> *const c_char {
    guard(std::ptr::null(), || {
        if key.is_null() {
            return std::ptr::null();
        }
        // SAFETY: the table's user passes a C string.
        let key = unsafe { CStr::from_ptr(key) };
        session::get().and_then(|session| session.config(key)).map_or(std::ptr::null(), |value| value.as_ptr())
    })
}

unsafe extern "C" fn is_real() -> c_int {
    1
}

/// Nobody keeps track of the memory of a real card.
unsafe extern "C" fn received(
    _to: *const c_void,
    _bytes: usize,
    _from: *const c_void,
    _from_bytes: usize,
    _name: *const c_char,
    _fate: c_int,
) {
}

/// Graphs are launched past this library.
unsafe extern "C" fn at_launch(_stream: u32, _run: Launched, _done: Launched, _data: *mut c_void) -> c_int {
    -1
}

unsafe extern "C" fn attach(run: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> c_int {
    guard(-1, || {
        session::get().map_or(-1, |_| {
            session::attach(Job { run, data });
            0
        })
    })
}

unsafe extern "C" fn copy(to: *mut c_void, from: *const c_void, bytes: usize) -> c_int {
    guard(-1, || {
        let Some(session) = session::get() else { return -1 };
        let (to, from) = (to.expose_provenance() as u64, from.expose_provenance() as u64);
        match session.copy(to, from, bytes) {
            Ok(()) => 0,
            Err(error) => {
                tell(&error.0);
                -1
            }
        }
    })
}
