//! Functions for the framework hook (Python, by ctypes), the same as those of `libprism_cuda.so`.

use crate::guard;
use crate::session;
use prism_wire::group;
use prism_wire::message::{MarkerKind, Record, RecordKind};
use std::ffi::{c_char, c_int, c_void};

/// Tells the engine the members of a process group that is about to be created (global ranks in group-rank order), and
/// remembers its name as the calling thread's current group. 0, or -1 (no session, engine gone, or refused).
///
/// # Safety
/// `name` must be a C string, `ranks` point to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_note_group(name: *const c_char, ranks: *const u32, count: u32) -> c_int {
    // SAFETY: the contract of this function.
    guard(-1, || unsafe {
        group::note(name, ranks, count, |ranks, name| {
            session::get().is_some_and(|session| session.client().note_group(ranks, name).is_ok())
        })
    })
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

/// Marks a point of the program (a [`MarkerKind`]) on a stream. 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn prism_marker(kind: u32, stream: *mut c_void) -> c_int {
    guard(-1, || {
        let known = [MarkerKind::TrainingBegin, MarkerKind::IterationEnd].iter().any(|known| *known as u32 == kind);
        let Some(session) = session::get().filter(|_| known) else { return -1 };
        // Libraries that were imported after the first call.
        prism_callers::insist();
        let record = Record { kind: RecordKind::Marker as u16, e: kind, ..Record::default() };
        session.mark(record, stream).map_or(-1, |()| 0)
    })
}

/// Tells the peaks of the program's own allocator since its start. 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn prism_memory_stats(allocated_peak: u64, reserved_peak: u64) -> c_int {
    guard(-1, || {
        let record =
            Record { kind: RecordKind::MemoryStats as u16, a: allocated_peak, b: reserved_peak, ..Record::default() };
        session::get().map_or(-1, |session| session.append(&record, false).map_or(-1, |()| 0))
    })
}
