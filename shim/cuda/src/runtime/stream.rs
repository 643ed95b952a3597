//! Streams, host functions on them, and the capture mode of threads.

use crate::abi::{Error, Outcome};
use crate::export::{exports, put};
use crate::{capture, event, session, stream};
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// `cudaStreamCaptureModeRelaxed`, the last mode.
const LAST_MODE: c_int = 2;

thread_local! {
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

type HostFunction = unsafe extern "C" fn(*mut c_void);
type Callback = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void);

/// Runs a host function where the stream is: the calling thread waits for the stream and runs it, before the call returns.
/// CUDA runs it later, on a thread of its own; nothing that a program can do inside one tells the difference, except that
/// here the host waits.
///
/// # Safety
/// `function` must be callable with `data`.
pub(crate) unsafe fn host_function(stream: *mut c_void, function: Option<HostFunction>, data: *mut c_void) -> Outcome {
    let function = function.ok_or(Error::INVALID_VALUE)?;
    if capture::is_active() && capture::take_host(stream::checked_id(stream)?, (function, data as usize)) {
        return Ok(());
    }
    stream::synchronize(stream)?;
    // SAFETY: the contract of this function.
    unsafe { function(data) };
    Ok(())
}

/// As [`host_function`], for the older kind of callback.
///
/// # Safety
/// `callback` must be callable with `stream` and `data`.
unsafe fn callback(stream: *mut c_void, callback: Option<Callback>, data: *mut c_void, flags: c_uint) -> Outcome {
    let callback = callback.filter(|_| flags == 0).ok_or(Error::INVALID_VALUE)?;
    stream::synchronize(stream)?;
    // SAFETY: the contract of this function.
    unsafe { callback(stream, 0, data) };
    Ok(())
}

/// Exchanges the thread's capture mode.
///
/// # Safety
/// `mode` must be null or a valid pointer.
pub(crate) unsafe fn exchange_mode(mode: *mut c_int) -> Outcome {
    // SAFETY: the contract of this function; null is refused below.
    let wanted = unsafe { mode.as_ref() }.copied().filter(|mode| (0..=LAST_MODE).contains(mode));
    let wanted = wanted.ok_or(Error::INVALID_VALUE)?;
    // SAFETY: not null.
    unsafe { put(mode, CAPTURE_MODE.replace(wanted)) }
}

exports! { runtime, FUNCTIONS:
    cudaStreamCreate(stream: *mut *mut c_void) => put(stream, stream::create(0, 0)?);
    cudaStreamCreateWithFlags(stream: *mut *mut c_void, flags: c_uint) => put(stream, stream::create(flags, 0)?);
    cudaStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, priority: c_int) =>
        put(stream, stream::create(flags, priority)?);
    cudaStreamDestroy(stream: *mut c_void) => stream::destroy(stream);
    cudaStreamSynchronize(stream: *mut c_void) => stream::synchronize(stream);
    cudaStreamQuery(stream: *mut c_void) => stream::query(stream);
    cudaStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) => event::wait(stream, event, flags);
    cudaStreamGetPriority(stream: *mut c_void, priority: *mut c_int) => put(priority, stream::get(stream)?.priority);
    cudaStreamGetFlags(stream: *mut c_void, flags: *mut c_uint) => put(flags, stream::get(stream)?.flags);
    cudaStreamGetId(stream: *mut c_void, id: *mut c_ulonglong) => put(id, c_ulonglong::from(stream::get(stream)?.id));
    cudaStreamGetDevice(stream: *mut c_void, device: *mut c_int) => put(device, stream::get(stream)?.device);
    cudaStreamAddCallback(stream: *mut c_void, function: Option<Callback>, data: *mut c_void, flags: c_uint) =>
        callback(stream, function, data, flags);
    cudaLaunchHostFunc(stream: *mut c_void, function: Option<HostFunction>, data: *mut c_void) =>
        host_function(stream, function, data);
    cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) => { session::get()?; exchange_mode(mode) };
}
