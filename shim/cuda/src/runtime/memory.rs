//! Allocation, copies, fills, pointers, symbols.

use crate::abi::{Error, Outcome, PointerAttributes};
use crate::export::{exports, put, put_optional, refused};
use crate::memory::{self, Copy2d};
use crate::{device, kernel, session};
use std::ffi::{c_int, c_uint, c_void};

const NULL: *const c_void = std::ptr::null();

/// `cudaMemoryType`.
const UNREGISTERED: c_int = 0;
const HOST: c_int = 1;
const DEVICE: c_int = 2;
const MANAGED: c_int = 3;

fn attributes(pointer: *const c_void) -> Result<PointerAttributes, Error> {
    device::profile()?;
    let address = pointer.cast_mut();
    let (kind, device, device_pointer, host_pointer) = if let Some(place) = memory::find(pointer) {
        (DEVICE, place.device, address, std::ptr::null_mut())
    } else if let Some(range) = memory::host_range(pointer) {
        (if range.is_managed { MANAGED } else { HOST }, range.device, address, address)
    } else {
        // The device is "invalid": cudaInvalidDeviceId is -2.
        (UNREGISTERED, -2, std::ptr::null_mut(), address)
    };
    Ok(PointerAttributes { kind, device, device_pointer, host_pointer, reserved: [0; 8] })
}

/// Address of a part of a variable.
fn part_of_symbol(symbol: *const c_void, bytes: usize, offset: usize) -> Result<*mut c_void, Error> {
    let (address, size) = kernel::variable(symbol)?;
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok((address + offset) as *mut c_void),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn malloc_pitch(width: usize, height: usize) -> Result<(*mut c_void, usize), Error> {
    let pitch = width.checked_next_multiple_of(512).ok_or(Error::INVALID_VALUE)?;
    Ok((memory::malloc(pitch.checked_mul(height).ok_or(Error::INVALID_VALUE)?)?, pitch))
}

fn host_device_pointer(pointer: *mut c_void, flags: c_uint) -> Result<*mut c_void, Error> {
    session::get()?;
    if flags != 0 || memory::host_range(pointer).is_none() { Err(Error::INVALID_VALUE) } else { Ok(pointer) }
}

/// A copy between cards is a copy: their addresses tell them apart.
///
/// # Safety
/// As for [`memory::copy`].
unsafe fn copy_peer(
    to: *mut c_void,
    to_device: c_int,
    from: *const c_void,
    from_device: c_int,
    bytes: usize,
    stream: *mut c_void,
    is_async: bool,
) -> Outcome {
    device::check(to_device)?;
    device::check(from_device)?;
    // SAFETY: the same contract.
    unsafe { memory::copy(to, from, bytes, 3, stream, is_async) }
}

fn fill(to: *mut c_void, value: c_int, bytes: usize, stream: *mut c_void) -> Outcome {
    memory::fill(to, value as u32 & 0xFF, 1, bytes, stream)
}

exports! { runtime, FUNCTIONS:
    cudaMalloc(pointer: *mut *mut c_void, bytes: usize) => put(pointer, memory::malloc(bytes)?);
    cudaMallocPitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) => {
        let (address, bytes) = malloc_pitch(width, height)?;
        put(pointer, address)?;
        put(pitch, bytes)
    };
    cudaMallocManaged(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) =>
        put(pointer, memory::alloc_host(bytes, flags, true)?);
    cudaFree(pointer: *mut c_void) => match memory::host_range(pointer) {
        Some(range) if range.is_managed => memory::free_host(pointer),
        _ => memory::free_synchronized(pointer),
    };
    cudaMemGetInfo(free: *mut usize, total: *mut usize) => {
        device::using()?;
        let (free_bytes, total_bytes) = memory::info(device::current())?;
        put_optional(free, free_bytes);
        put_optional(total, total_bytes);
        Ok(())
    };
    cudaMallocHost(pointer: *mut *mut c_void, bytes: usize) => put(pointer, memory::alloc_host(bytes, 0, false)?);
    cudaHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) =>
        put(pointer, memory::alloc_host(bytes, flags, false)?);
    cudaFreeHost(pointer: *mut c_void) => memory::free_host(pointer);
    cudaHostRegister(pointer: *mut c_void, bytes: usize, flags: c_uint) => memory::register_host(pointer, bytes, flags);
    cudaHostUnregister(pointer: *mut c_void) => memory::unregister_host(pointer);
    cudaHostGetDevicePointer(device_pointer: *mut *mut c_void, pointer: *mut c_void, flags: c_uint) =>
        put(device_pointer, host_device_pointer(pointer, flags)?);
    cudaHostGetFlags(flags: *mut c_uint, pointer: *mut c_void) => {
        session::get()?;
        put(flags, memory::host_range(pointer).ok_or(Error::INVALID_VALUE)?.flags)
    };
    cudaPointerGetAttributes(result: *mut PointerAttributes, pointer: *const c_void) =>
        put(result, attributes(pointer)?);

    cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) =>
        memory::copy(to, from, bytes, kind, NULL, false);
    cudaMemcpyAsync(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int, stream: *mut c_void) =>
        memory::copy(to, from, bytes, kind, stream, true);
    cudaMemcpyPeer(to: *mut c_void, to_device: c_int, from: *const c_void, from_device: c_int, bytes: usize) =>
        copy_peer(to, to_device, from, from_device, bytes, std::ptr::null_mut(), false);
    cudaMemcpyPeerAsync(
        to: *mut c_void, to_device: c_int, from: *const c_void, from_device: c_int, bytes: usize, stream: *mut c_void,
    ) => copy_peer(to, to_device, from, from_device, bytes, stream, true);
    cudaMemcpy2D(
        to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, height: usize,
        kind: c_int,
    ) => memory::copy_2d(&Copy2d { to, to_pitch, from, from_pitch, width, height, kind }, NULL, false);
    cudaMemcpy2DAsync(
        to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, height: usize,
        kind: c_int, stream: *mut c_void,
    ) => memory::copy_2d(&Copy2d { to, to_pitch, from, from_pitch, width, height, kind }, stream, true);
    cudaMemset(to: *mut c_void, value: c_int, bytes: usize) => fill(to, value, bytes, std::ptr::null_mut());
    cudaMemsetAsync(to: *mut c_void, value: c_int, bytes: usize, stream: *mut c_void) => fill(to, value, bytes, stream);
    cudaMemset2D(to: *mut c_void, pitch: usize, value: c_int, width: usize, height: usize) =>
        memory::fill_2d(to, pitch, value as u32 & 0xFF, 1, width, height, NULL);
    cudaMemset2DAsync(
        to: *mut c_void, pitch: usize, value: c_int, width: usize, height: usize, stream: *mut c_void,
    ) => memory::fill_2d(to, pitch, value as u32 & 0xFF, 1, width, height, stream);

    cudaGetSymbolAddress(pointer: *mut *mut c_void, symbol: *const c_void) =>
        put(pointer, kernel::variable(symbol)?.0 as *mut c_void);
    cudaGetSymbolSize(bytes: *mut usize, symbol: *const c_void) => put(bytes, kernel::variable(symbol)?.1);
    cudaMemcpyToSymbol(symbol: *const c_void, from: *const c_void, bytes: usize, offset: usize, kind: c_int) =>
        memory::copy(part_of_symbol(symbol, bytes, offset)?, from, bytes, kind, NULL, false);
    cudaMemcpyToSymbolAsync(
        symbol: *const c_void, from: *const c_void, bytes: usize, offset: usize, kind: c_int, stream: *mut c_void,
    ) => memory::copy(part_of_symbol(symbol, bytes, offset)?, from, bytes, kind, stream, true);
    cudaMemcpyFromSymbol(to: *mut c_void, symbol: *const c_void, bytes: usize, offset: usize, kind: c_int) =>
        memory::copy(to, part_of_symbol(symbol, bytes, offset)?, bytes, kind, NULL, false);
    cudaMemcpyFromSymbolAsync(
        to: *mut c_void, symbol: *const c_void, bytes: usize, offset: usize, kind: c_int, stream: *mut c_void,
    ) => memory::copy(to, part_of_symbol(symbol, bytes, offset)?, bytes, kind, stream, true);
}

refused! { runtime, REFUSED:
    cudaMalloc3D,
    cudaMallocArray,
    cudaMemcpy3D,
    cudaMemcpy3DAsync,
    cudaMemcpy3DPeer,
    cudaMemcpy3DPeerAsync,
    cudaMemcpyBatchAsync,
    cudaMemset3D,
    cudaMemset3DAsync,
    cudaMemPrefetchAsync,
    cudaMemAdvise,
    cudaMemRangeGetAttribute,
    cudaStreamAttachMemAsync,
}
