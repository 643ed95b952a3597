//! CUPTI's activity interface, as `torch.profiler` uses it: the calls of the program and its work on the device, in virtual
//! time.
//!
//! | module | job |
//! |---|---|
//! | [`activity`] | the records a profiler reads |
//! | [`collector`] | what is recorded while a profiler listens; the engine tells when device work ran |
//! | `exec_lists` | programs started meanwhile from a list of arguments |
//! | [`names`] | names of kernels in a profile |
//! | [`tsc`] | the processor's time stamp counter in virtual time, which profilers stamp their own events with |
//!
//! Everything else (callbacks, metrics, sampling) answers "not supported". The real CUPTI must not be reached: it takes the
//! emulated driver apart.

mod activity;
pub(crate) mod collector;
#[cfg(target_arch = "x86_64")]
mod exec_lists;
mod names;
pub(crate) mod tsc;

use crate::guard::guard;
use crate::{session, unsupported};
use activity::kind;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A `CUptiResult`.
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_PARAMETER: Status = 1;
const MAX_LIMIT_REACHED: Status = 12;
const QUEUE_EMPTY: Status = 18;
const INVALID_KIND: Status = 21;
const NOT_SUPPORTED: Status = 27;
const UNKNOWN: Status = 999;

/// The version of the CUPTI interface that CUDA 13.0 comes with.
const VERSION: u32 = 130_000;

macro_rules! not_supported {
    ($($name:ident),* $(,)?) => { $(
        /// Not supported; named once. Arguments are not looked at.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            static SAID: std::sync::Once = std::sync::Once::new();
            guard(UNKNOWN, || {
                // Some of these are called for every operation of the program.
                SAID.call_once(|| unsupported::call(stringify!($name)));
                NOT_SUPPORTED
            })
        }
    )* };
}

not_supported!(
    cuptiActivityConfigurePCSampling,
    cuptiActivityEnableHWTrace,
    cuptiActivityEnableLatencyTimestamps,
    cuptiActivityFlushPeriod,
    cuptiActivityGetAttribute,
    cuptiEnableAllDomains,
    cuptiEnableDomain,
    cuptiGetCallbackState,
    cuptiProfilerInitialize,
    cuptiSupportedDomains,
);

/// `CUpti_BuffersCallbackRequestFunc`.
type RequestBuffer = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// `CUpti_BuffersCallbackCompleteFunc`.
type CompleteBuffer = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The profiler's functions for buffers, and the buffer that has been asked for.
#[derive(Clone, Copy)]
struct Buffers {
    request: RequestBuffer,
    complete: CompleteBuffer,
    waiting: Option<(usize, usize)>,
}

static BUFFERS: Mutex<Option<Buffers>> = Mutex::new(None);

fn buffers() -> MutexGuard<'static, Option<Buffers>> {
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the profiler for a buffer, so that it knows that there is something to fetch.
fn request_buffer() {
    let Some(Buffers { waiting: None, request, .. }) = *buffers() else { return };
    let fresh = new_buffer(request);
    if let (Some(buffers), Some(fresh)) = (&mut *buffers(), fresh) {
        buffers.waiting = Some(fresh);
    }
}

/// A buffer of the profiler: address and size.
fn new_buffer(request: RequestBuffer) -> Option<(usize, usize)> {
    let (mut address, mut size, mut most) = (std::ptr::null_mut::<u8>(), 0usize, 0usize);
    // SAFETY: the profiler's own function, with valid pointers. No lock is held.
    unsafe { request(&raw mut address, &raw mut size, &raw mut most) };
    (!address.is_null() && size > 0).then_some((address as usize, size))
}

/// Hands everything that is over to the profiler.
fn flush() -> Status {
    let Some(Buffers { request, complete, waiting }) = *buffers() else { return SUCCESS };
    let records = collector::take();
    if let Some(buffers) = &mut *buffers() {
        buffers.waiting = None;
    }
    let mut records = records.as_slice();
    let mut buffer = waiting;
    while !records.is_empty() || buffer.is_some() {
        let Some((address, size)) = buffer.take().or_else(|| new_buffer(request)) else { return SUCCESS };
        let mut used = 0;
        let fitting = records.iter().take_while(|record| {
            let fits = used + record.size() <= size;
            used += if fits { record.size() } else { 0 };
            fits
        });
        let count = fitting.count();
        if count == 0 && !records.is_empty() {
            return MAX_LIMIT_REACHED;
        }
        let mut at = address as *mut u8;
        for record in &records[..count] {
            // SAFETY: the sizes of these records together are within the buffer's size.
            at = unsafe {
                record.write(at);
                at.add(record.size())
            };
        }
        records = &records[count..];
        // SAFETY: the profiler's own function and its own buffer. No lock is held.
        unsafe { complete(std::ptr::null_mut(), 0, address as *mut u8, size, used) };
    }
    SUCCESS
}

/// Kinds that may be asked for; those without records of their own stay empty.
fn is_known(kind: u32) -> bool {
    let quiet = [kind::KERNEL, kind::DRIVER, kind::OVERHEAD, kind::CUDA_EVENT];
    activity::size(kind).is_some() || quiet.contains(&kind)
}

/// Starts to record activities of a kind.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnable(kind: u32) -> Status {
    guard(UNKNOWN, || {
        if !is_known(kind) {
            unsupported::call(&format!("cuptiActivityEnable(kind {kind})"));
            return INVALID_KIND;
        }
        if session::get().is_err() || !tsc::start() {
            return NOT_SUPPORTED;
        }
        collector::enable(if kind == kind::KERNEL { kind::CONCURRENT_KERNEL } else { kind });
        SUCCESS
    })
}

/// Stops to record activities of a kind.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityDisable(kind: u32) -> Status {
    guard(UNKNOWN, || {
        if !is_known(kind) {
            return INVALID_KIND;
        }
        if collector::disable(if kind == kind::KERNEL { kind::CONCURRENT_KERNEL } else { kind }) {
            tsc::stop();
        }
        SUCCESS
    })
}

/// Hands over what has been recorded.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityFlushAll(_flags: u32) -> Status {
    guard(UNKNOWN, || crate::clock::inside(flush))
}

/// The profiler's functions for buffers.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityRegisterCallbacks(
    request: Option<RequestBuffer>,
    complete: Option<CompleteBuffer>,
) -> Status {
    guard(UNKNOWN, || {
        let (Some(request), Some(complete)) = (request, complete) else { return INVALID_PARAMETER };
        let waiting = buffers().and_then(|buffers| buffers.waiting);
        *buffers() = Some(Buffers { request, complete, waiting });
        SUCCESS
    })
}

/// The profiler's clock. Its events are stamped with the time stamp counter; the records here are in the same time.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityRegisterTimestampCallback(callback: *const c_void) -> Status {
    guard(UNKNOWN, || {
        if callback.is_null() {
            return INVALID_PARAMETER;
        }
        if session::get().is_err() || !tsc::start() {
            return NOT_SUPPORTED;
        }
        tsc::use_counter();
        SUCCESS
    })
}

/// The next record of a buffer that was handed over.
///
/// # Safety
/// `buffer` must be one that was handed over with `valid` bytes; `*record` null or a record of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNextRecord(buffer: *mut u8, valid: usize, record: *mut *mut u8) -> Status {
    guard(UNKNOWN, || {
        if buffer.is_null() || record.is_null() {
            return INVALID_PARAMETER;
        }
        // SAFETY: the contract of this function: `record` may be read and written, and what it names is a record of ours.
        unsafe {
            let current = *record;
            let next = if current.is_null() {
                buffer
            } else {
                let Some(size) = activity::size(current.cast::<u32>().read_unaligned()) else { return INVALID_KIND };
                current.add(size)
            };
            let is_inside = (next as usize).checked_sub(buffer as usize).is_some_and(|offset| offset < valid);
            if !is_inside {
                return MAX_LIMIT_REACHED;
            }
            record.write(next);
        }
        SUCCESS
    })
}

/// Records lost because nobody fetched them.
///
/// # Safety
/// `dropped` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNumDroppedRecords(
    _context: *mut c_void,
    _stream: u32,
    dropped: *mut usize,
) -> Status {
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(dropped, collector::take_dropped() as usize) })
}

/// From now on the calling thread works for an id of the profiler's.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityPushExternalCorrelationId(kind: u32, id: u64) -> Status {
    guard(UNKNOWN, || if collector::push_external(kind, id) { SUCCESS } else { INVALID_PARAMETER })
}

/// The end of [`cuptiActivityPushExternalCorrelationId`].
///
/// # Safety
/// `last` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityPopExternalCorrelationId(kind: u32, last: *mut u64) -> Status {
    guard(UNKNOWN, || match collector::pop_external(kind) {
        Some(id) if last.is_null() => {
            let _ = id;
            SUCCESS
        }
        // SAFETY: the caller's contract.
        Some(id) => unsafe { write(last, id) },
        None => QUEUE_EMPTY,
    })
}

/// Buffer sizes and the like: memory is no matter here.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivitySetAttribute(_attribute: c_int, _size: *mut usize, _value: *mut c_void) -> Status {
    SUCCESS
}

/// Whether single runtime functions are recorded: those that are, are.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableRuntimeApi(_function: u32, _enable: u8) -> Status {
    SUCCESS
}

/// As [`cuptiActivityEnableRuntimeApi`], of the driver.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableDriverApi(_function: u32, _enable: u8) -> Status {
    SUCCESS
}

/// Time stamps of events: event records are not among the activities.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableCudaEventDeviceTimestamps(_enable: u8) -> Status {
    SUCCESS
}

/// A subscriber, of which there is one. The only callbacks it may ask for are those of the resource domain: contexts are
/// created before anybody can subscribe, so there are none to make.
///
/// # Safety
/// `subscriber` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiSubscribe(
    subscriber: *mut *mut c_void,
    _callback: *const c_void,
    _data: *mut c_void,
) -> Status {
    static SUBSCRIBER: u8 = 0;
    if session::get().is_err() {
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(subscriber, (&raw const SUBSCRIBER).cast_mut().cast()) })
}

/// The end of [`cuptiSubscribe`].
#[unsafe(no_mangle)]
pub extern "C" fn cuptiUnsubscribe(_subscriber: *mut c_void) -> Status {
    SUCCESS
}

/// `CUPTI_CB_DOMAIN_RESOURCE`.
const RESOURCE_DOMAIN: u32 = 3;

/// `CUPTI_CB_DOMAIN_RUNTIME_API`.
const RUNTIME_DOMAIN: u32 = 2;

/// The name of a function that records name by number.
///
/// # Safety
/// `name` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetCallbackName(domain: u32, function: u32, name: *mut *const c_char) -> Status {
    guard(UNKNOWN, || match collector::function_name(function).filter(|_| domain == RUNTIME_DOMAIN) {
        // SAFETY: the caller's contract.
        Some(text) => unsafe { write(name, text.as_ptr()) },
        None => INVALID_PARAMETER,
    })
}

/// Asks for callbacks, or for none any more. See [`cuptiSubscribe`].
#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableCallback(enable: u32, _subscriber: *mut c_void, domain: u32, _function: u32) -> Status {
    guard(UNKNOWN, || {
        if enable == 0 || domain == RESOURCE_DOMAIN {
            return SUCCESS;
        }
        unsupported::call(&format!("cuptiEnableCallback(domain {domain})"));
        NOT_SUPPORTED
    })
}

/// The end of profiling.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiFinalize() -> Status {
    guard(UNKNOWN, || {
        tsc::stop();
        SUCCESS
    })
}

/// The time now, as records have it.
///
/// # Safety
/// `time` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetTimestamp(time: *mut u64) -> Status {
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(time, tsc::stamp(crate::clock::thread_now())) })
}

/// The version of the interface.
///
/// # Safety
/// `version` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetVersion(version: *mut u32) -> Status {
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(version, VERSION) })
}

/// The text of a result.
///
/// # Safety
/// `text` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetResultString(result: Status, text: *mut *const c_char) -> Status {
    let name: &CStr = match result {
        SUCCESS => c"CUPTI_SUCCESS",
        INVALID_PARAMETER => c"CUPTI_ERROR_INVALID_PARAMETER",
        NOT_SUPPORTED => c"CUPTI_ERROR_NOT_SUPPORTED: the emulated device records activities only",
        _ => c"CUPTI_ERROR_UNKNOWN",
    };
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(text, name.as_ptr()) })
}

/// The last error of the calling thread: none is kept.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetLastError() -> Status {
    SUCCESS
}

/// # Safety
/// `target` must be null or valid for a write.
unsafe fn write<T>(target: *mut T, value: T) -> Status {
    if target.cast::<c_void>().is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(value) };
    SUCCESS
}
