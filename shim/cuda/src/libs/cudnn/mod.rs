//! cuDNN: handles and the backend (graph) interface.
//!
//! A program describes tensors and operations by attributes of descriptors, asks the heuristics for an engine
//! configuration, builds a plan and executes it. There is one engine here, without knobs, notes or workspace; what a
//! plan costs comes from its graph (see [`graph`]). Of the older interface there is batch normalisation ([`norm`]).

mod descriptor;
mod graph;
mod mask;
mod names;
mod norm;

use super::handles::Table;
use super::work;
use crate::guard::guard;
use crate::values;
use descriptor::{DESCRIPTORS, Descriptor};
use names::{
    BAD_PARAM, INTERNAL_ERROR, NOT_FINALIZED, NOT_INITIALIZED, NOT_SUPPORTED, NULL_POINTER, SUCCESS, Status,
    WRONG_DESCRIPTOR, attribute, kind, status_text,
};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The newest cuDNN that a supported torch is built with, 2.15's: major × 10000 + minor × 100 + patch. torch refuses an older
/// one than its own.
const VERSION: usize = 92_600;

/// Handles, each with the address of its stream.
static HANDLES: Table<AtomicUsize> = Table::new();

thread_local! {
    /// Why the last call of this thread failed.
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of the exported function `name`; an `Err` is the status to return, and the thread's last error.
fn answer(name: &str, body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || match body() {
        Ok(()) => SUCCESS,
        Err(status) => {
            let text = format!("{name}: {}", status_text(status).to_string_lossy());
            LAST_ERROR.with(|error| *error.borrow_mut() = text);
            status
        }
    })
}

/// The version, see [`VERSION`].
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    VERSION
}

/// The CUDA runtime this library was made for.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetCudartVersion() -> usize {
    13_000
}

/// One part of the version: 0 major, 1 minor, 2 patch.
///
/// # Safety
/// `value` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetProperty(part: c_int, value: *mut c_int) -> Status {
    answer("cudnnGetProperty", || {
        let number = match part {
            0 => VERSION / 10_000,
            1 => VERSION / 100 % 100,
            2 => VERSION % 100,
            _ => return Err(BAD_PARAM),
        };
        if value.is_null() {
            return Err(NULL_POINTER);
        }
        // SAFETY: not null, valid by the contract.
        unsafe { value.write(number as c_int) };
        Ok(())
    })
}

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetErrorString(status: Status) -> *const c_char {
    status_text(status).as_ptr()
}

/// Copies the text of the calling thread's last error.
///
/// # Safety
/// `message` must be null or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetLastErrorString(message: *mut c_char, size: usize) {
    guard((), || {
        if message.is_null() || size == 0 {
            return;
        }
        LAST_ERROR.with(|error| {
            let error = error.borrow();
            let length = error.len().min(size - 1);
            // SAFETY: `length + 1` bytes fit into `size`.
            unsafe {
                std::ptr::copy_nonoverlapping(error.as_ptr().cast(), message, length);
                message.add(length).write(0);
            }
        });
    });
}

/// Creates a handle.
///
/// # Safety
/// `handle` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreate(handle: *mut *mut c_void) -> Status {
    answer("cudnnCreate", || {
        if handle.is_null() {
            return Err(NULL_POINTER);
        }
        // SAFETY: not null, valid by the contract.
        unsafe { handle.write(HANDLES.insert(AtomicUsize::new(0))) };
        Ok(())
    })
}

/// Destroys a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroy(handle: *mut c_void) -> Status {
    answer("cudnnDestroy", || HANDLES.remove(handle).map(drop).ok_or(NOT_INITIALIZED))
}

/// Sets the stream of a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnSetStream(handle: *mut c_void, stream: *mut c_void) -> Status {
    answer("cudnnSetStream", || {
        HANDLES.get(handle).ok_or(NOT_INITIALIZED)?.store(stream.addr(), Ordering::Relaxed);
        Ok(())
    })
}

/// The stream of a handle.
///
/// # Safety
/// `stream` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetStream(handle: *mut c_void, stream: *mut *const c_void) -> Status {
    answer("cudnnGetStream", || {
        let found = stream_of(handle)?;
        if stream.is_null() {
            return Err(NULL_POINTER);
        }
        // SAFETY: not null, valid by the contract.
        unsafe { stream.write(found) };
        Ok(())
    })
}

/// The stream of a handle.
fn stream_of(handle: *const c_void) -> Result<*const c_void, Status> {
    let stream = HANDLES.get(handle).ok_or(NOT_INITIALIZED)?.load(Ordering::Relaxed);
    Ok(std::ptr::without_provenance(stream))
}

/// Creates a backend descriptor.
///
/// # Safety
/// `descriptor` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut *mut c_void) -> Status {
    answer("cudnnBackendCreateDescriptor", || {
        if descriptor.is_null() {
            return Err(NULL_POINTER);
        }
        let handle = DESCRIPTORS.insert(Descriptor::new(kind)?);
        // SAFETY: not null, valid by the contract.
        unsafe { descriptor.write(handle) };
        Ok(())
    })
}

/// Destroys a backend descriptor; what other descriptors know of it stays.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> Status {
    answer("cudnnBackendDestroyDescriptor", || DESCRIPTORS.remove(descriptor).map(drop).ok_or(BAD_PARAM))
}

/// Makes a backend descriptor final.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendFinalize(descriptor: *mut c_void) -> Status {
    answer("cudnnBackendFinalize", || DESCRIPTORS.get(descriptor).ok_or(BAD_PARAM)?.finalize())
}

/// Sets an attribute of a backend descriptor.
///
/// # Safety
/// `elements` must be null or readable for `count` elements of the type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendSetAttribute(
    descriptor: *mut c_void,
    id: c_int,
    element: c_int,
    count: i64,
    elements: *const c_void,
) -> Status {
    answer("cudnnBackendSetAttribute", || {
        let descriptor = DESCRIPTORS.get(descriptor).ok_or(BAD_PARAM)?;
        // SAFETY: the caller's contract.
        unsafe { descriptor.set(id, element, count, elements) }
    })
}

/// Copies an attribute of a backend descriptor.
///
/// # Safety
/// `count` must be null or valid for a write, `elements` null or an array of `requested` elements of the type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendGetAttribute(
    descriptor: *const c_void,
    id: c_int,
    element: c_int,
    requested: i64,
    count: *mut i64,
    elements: *mut c_void,
) -> Status {
    answer("cudnnBackendGetAttribute", || {
        let descriptor = DESCRIPTORS.get(descriptor).ok_or(BAD_PARAM)?;
        // SAFETY: the caller's contract.
        unsafe { descriptor.get(id, element, requested, count, elements) }
    })
}

/// Executes a plan on the addresses of a variant pack.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendExecute(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) -> Status {
    answer("cudnnBackendExecute", || {
        let stream = stream_of(handle)?;
        let plan = checked(plan, kind::EXECUTION_PLAN)?;
        let pack = checked(pack, kind::VARIANT_PACK)?;
        let work = plan.plan_work().ok_or(NOT_SUPPORTED)?;
        let ids = pack.integers(attribute::PACK_UNIQUE_IDS);
        if ids.len() != pack.integers(attribute::PACK_POINTERS).len() {
            return Err(BAD_PARAM);
        }
        if work.inputs.iter().any(|input| !ids.contains(input)) {
            return Err(BAD_PARAM);
        }
        work::operator(stream, work.name, work.operator);
        // Which of them are outputs is the plan's affair: all count as written.
        for address in pack.integers(attribute::PACK_POINTERS) {
            values::library_wrote(std::ptr::without_provenance(address as usize), work.name.text());
        }
        Ok(())
    })
}

/// The final descriptor of this kind behind a handle.
fn checked(handle: *const c_void, kind: c_int) -> Result<std::sync::Arc<Descriptor>, Status> {
    let descriptor = DESCRIPTORS.get(handle).ok_or(BAD_PARAM)?;
    if descriptor.kind != kind {
        return Err(WRONG_DESCRIPTOR);
    }
    if descriptor.is_final() { Ok(descriptor) } else { Err(NOT_FINALIZED) }
}

#[cfg(test)]
mod tests;
