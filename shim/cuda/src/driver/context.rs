//! Initialisation, devices, contexts, errors, finding functions.

use crate::abi::{Error, Outcome};
use crate::device::CUDA_VERSION;
use crate::export::{exports, put, put_optional, refused};
use crate::runtime::device::{by_bus_address, enable_peer, put_text};
use crate::runtime::device::{limit, set_limit};
use crate::runtime::{error, pool};
use crate::{device, driver, memory, session, stream};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

thread_local! {
    /// Contexts under the current one.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn push(context: *mut c_void) -> Outcome {
    let below = device::current_context() as usize;
    device::set_context(context)?;
    STACK.with_borrow_mut(|stack| stack.push(below));
    Ok(())
}

fn pop() -> Result<*mut c_void, Error> {
    let popped = device::current_context();
    let below = STACK.with_borrow_mut(Vec::pop).unwrap_or(0);
    device::set_context(below as *mut c_void)?;
    Ok(popped)
}

fn current_device() -> Result<c_int, Error> {
    session::get()?;
    if device::current_context().is_null() { Err(Error::INVALID_CONTEXT) } else { Ok(device::current()) }
}

/// # Safety
/// `name` must be null or a C string, the pointers null or valid.
unsafe fn proc_address(name: *const c_char, pointer: *mut *mut c_void, version: c_int, status: *mut c_int) -> Outcome {
    if name.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the contract of this function.
    unsafe {
        let found = driver::entry_point(&CStr::from_ptr(name).to_string_lossy(), version);
        put_optional(status, c_int::from(found.is_none()));
        put(pointer, found.unwrap_or(std::ptr::null()).cast_mut())?;
        if found.is_some() { Ok(()) } else { Err(Error::NOT_FOUND) }
    }
}

/// # Safety
/// `result` must be null or valid.
unsafe fn put_error_text(text: Option<&'static CStr>, result: *mut *const c_char) -> Outcome {
    // SAFETY: the contract of this function.
    unsafe { put(result, text.map_or(std::ptr::null(), CStr::as_ptr))? };
    if text.is_some() { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

exports! { driver, FUNCTIONS:
    cuInit(flags: c_uint) => {
        session::get()?;
        if flags == 0 { Ok(()) } else { Err(Error::INVALID_VALUE) }
    };
    cuCtxGetLimit(value: *mut usize, number: c_int) => { device::profile()?; put(value, limit(number)?) };
    cuCtxSetLimit(number: c_int, value: usize) => { device::profile()?; set_limit(number, value) };
    cuDriverGetVersion(version: *mut c_int) => put(version, CUDA_VERSION);
    cuDeviceGet(device: *mut c_int, ordinal: c_int) => put(device, device::check(ordinal)?);
    cuDeviceGetCount(count: *mut c_int) => put(count, device::profile()?.count);
    cuDeviceGetName(buffer: *mut c_char, length: c_int, device: c_int) => {
        device::check(device)?;
        put_text(buffer, length, &device::profile()?.name)
    };
    cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) => put(uuid, device::uuid(device::check(device)?));
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) => put(uuid, device::uuid(device::check(device)?));
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) => put(bytes, memory::info(device)?.1);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) =>
        put(value, device::attribute(attribute, device)?);
    cuDeviceGetPCIBusId(buffer: *mut c_char, length: c_int, device: c_int) =>
        put_text(buffer, length, &device::bus_address(device::check(device)?));
    cuDeviceGetByPCIBusId(device: *mut c_int, address: *const c_char) => put(device, by_bus_address(address)?);
    cuDeviceCanAccessPeer(answer: *mut c_int, device: c_int, peer: c_int) =>
        put(answer, c_int::from(device::check(device)? != device::check(peer)?));
    cuDeviceGetDefaultMemPool(result: *mut *mut c_void, device: c_int) => put(result, pool::pool(device)?);
    cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) =>
        put(context, device::retain_context(device)?);
    cuDevicePrimaryCtxRelease_v2(device: c_int) => device::check(device).map(|_| ());
    cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) => device::check(device).map(|_| ());
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) => {
        let is_active = device::is_active(device::check(device)?);
        put(flags, 0)?;
        put(active, c_int::from(is_active))
    };
    cuCtxGetCurrent(context: *mut *mut c_void) => { session::get()?; put(context, device::current_context()) };
    cuCtxSetCurrent(context: *mut c_void) => device::set_context(context);
    cuCtxPushCurrent_v2(context: *mut c_void) => push(context);
    cuCtxPopCurrent_v2(context: *mut *mut c_void) => {
        let popped = pop()?;
        put_optional(context, popped);
        Ok(())
    };
    cuCtxGetDevice(device: *mut c_int) => put(device, current_device()?);
    cuCtxGetFlags(flags: *mut c_uint) => { current_device()?; put(flags, 0) };
    cuCtxGetApiVersion(_context: *mut c_void, version: *mut c_uint) => put(version, CUDA_VERSION as c_uint);
    cuCtxSynchronize() => stream::synchronize_device();
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) => {
        put_optional(least, stream::PRIORITIES.0);
        put_optional(greatest, stream::PRIORITIES.1);
        Ok(())
    };
    cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) => enable_peer(device::device_of_context(peer)?, flags);
    cuGetErrorString(code: c_int, result: *mut *const c_char) => put_error_text(error::text(code), result);
    cuGetErrorName(code: c_int, result: *mut *const c_char) => put_error_text(error::driver_name(code), result);
    cuGetProcAddress(name: *const c_char, pointer: *mut *mut c_void, version: c_int, _flags: c_ulonglong) =>
        proc_address(name, pointer, version, std::ptr::null_mut());
    cuGetProcAddress_v2(
        name: *const c_char, pointer: *mut *mut c_void, version: c_int, _flags: c_ulonglong, status: *mut c_int,
    ) => proc_address(name, pointer, version, status);
    cuGetExportTable(table: *mut *const c_void, _id: *const c_void) => {
        put(table, std::ptr::null())?;
        Err(Error::NOT_FOUND)
    };
    // The emulated driver writes no log, so a callback is never called.
    cuLogsRegisterCallback(_function: *mut c_void, _data: *mut c_void, handle: *mut *mut c_void) => {
        session::get()?;
        put_optional(handle, std::ptr::without_provenance_mut(1));
        Ok(())
    };
    cuLogsUnregisterCallback(_handle: *mut c_void) => session::get().map(|_| ()).map_err(Error::from);
}

refused! { driver, REFUSED:
    cuDevicePrimaryCtxReset_v2,
    cuCtxCreate_v2,
    cuCtxCreate_v4,
    cuCtxDestroy_v2,
    cuCtxFromGreenCtx,
    cuGreenCtxCreate,
    cuGreenCtxDestroy,
    cuGreenCtxStreamCreate,
    cuDevSmResourceSplitByCount,
    cuDeviceGetDevResource,
    cuDevResourceGenerateDesc,
}
