//! Allocation, copies, fills, pointers, virtual memory management.

use crate::abi::{DevicePointer, Error, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp, MemLocation, Outcome};
use crate::export::{exports, put, put_optional, refused};
use crate::runtime::pool;
use crate::{device, memory, session};
use std::ffi::{c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

const NULL: *const c_void = std::ptr::null();
/// `cudaMemcpyDefault`: the addresses tell the direction.
const BY_ADDRESS: c_int = 4;

fn host(pointer: DevicePointer) -> *mut c_void {
    pointer as *mut c_void
}

fn prop_of(handle: u64) -> Result<MemAllocationProp, Error> {
    let (device, requested_handle_types) = memory::properties_of_handle(handle)?;
    Ok(MemAllocationProp {
        kind: 1,
        requested_handle_types,
        location: MemLocation { kind: LOCATION_DEVICE, id: device },
        win32_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    })
}

/// # Safety
/// `prop` must be null or valid.
unsafe fn create(bytes: usize, prop: *const MemAllocationProp, flags: c_ulonglong) -> Result<u64, Error> {
    // SAFETY: the contract of this function.
    let prop = unsafe { prop.as_ref() }.filter(|_| flags == 0).ok_or(Error::INVALID_VALUE)?;
    memory::create(bytes, prop)
}

/// # Safety
/// `access` must be null or point to `count` entries.
unsafe fn set_access(address: DevicePointer, bytes: usize, access: *const MemAccessDesc, count: usize) -> Outcome {
    if access.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and `count` long by the contract of this function.
    memory::set_access(address as usize, bytes, unsafe { std::slice::from_raw_parts(access, count) })
}

fn address_range(pointer: DevicePointer) -> Result<(DevicePointer, usize), Error> {
    session::get()?;
    let place = memory::find(host(pointer)).ok_or(Error::NOT_FOUND)?;
    Ok((place.base as DevicePointer, place.bytes))
}

/// Writes a pointer attribute in its own type.
///
/// # Safety
/// `data` must be null or valid for the attribute's type.
unsafe fn pointer_attribute(data: *mut c_void, attribute: c_int, pointer: DevicePointer) -> Outcome {
    device::profile()?;
    let place = memory::find(host(pointer));
    let range = memory::host_range(host(pointer));
    let device = place.map(|place| place.device).or(range.map(|range| range.device)).ok_or(Error::INVALID_VALUE)?;
    let base = place.map_or_else(|| range.map_or(0, |range| range.base), |place| place.base);
    let bytes = place.map_or_else(|| range.map_or(0, |range| range.bytes), |place| place.bytes);
    // SAFETY: the contract of this function.
    unsafe {
        match attribute {
            1 => put(data.cast(), device::retain_context(device)?),
            // CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
            2 => put(data.cast::<c_uint>(), if place.is_some() { 2 } else { 1 }),
            3 => put(data.cast(), pointer),
            4 if range.is_some() => put(data.cast(), host(pointer)),
            6 | 10 | 15 => put(data.cast::<c_int>(), 0),
            7 => put(data.cast::<c_ulonglong>(), base as c_ulonglong),
            8 => put(data.cast::<c_int>(), c_int::from(range.is_some_and(|range| range.is_managed))),
            9 => put(data.cast::<c_int>(), device),
            11 | 19 => put(data.cast(), base as DevicePointer),
            12 | 18 => put(data.cast(), bytes),
            13 => put(data.cast::<c_int>(), 1),
            14 => put(data.cast::<c_ulonglong>(), 0),
            16 => put(data.cast::<c_int>(), 3),
            17 => put(data.cast::<*mut c_void>(), std::ptr::null_mut()),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

exports! { driver, FUNCTIONS:
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => {
        device::using()?;
        let (free_bytes, total_bytes) = memory::info(device::current())?;
        put_optional(free, free_bytes);
        put_optional(total, total_bytes);
        Ok(())
    };
    cuMemAlloc_v2(pointer: *mut DevicePointer, bytes: usize) => put(pointer, memory::malloc(bytes)? as DevicePointer);
    cuMemFree_v2(pointer: DevicePointer) => memory::free_synchronized(host(pointer));
    cuMemAllocAsync(pointer: *mut DevicePointer, bytes: usize, _stream: *mut c_void) =>
        put(pointer, pool::malloc_async(bytes)? as DevicePointer);
    cuMemFreeAsync(pointer: DevicePointer, _stream: *mut c_void) => pool::free_async(host(pointer));
    cuMemGetAddressRange_v2(base: *mut DevicePointer, bytes: *mut usize, pointer: DevicePointer) => {
        let (start, length) = address_range(pointer)?;
        put_optional(base, start);
        put_optional(bytes, length);
        Ok(())
    };
    cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) =>
        put(pointer, memory::alloc_host(bytes, flags, false)?);
    cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) => put(pointer, memory::alloc_host(bytes, 0, false)?);
    cuMemFreeHost(pointer: *mut c_void) => memory::free_host(pointer);
    cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint) =>
        memory::register_host(pointer, bytes, flags);
    cuMemHostUnregister(pointer: *mut c_void) => memory::unregister_host(pointer);
    cuMemHostGetDevicePointer_v2(result: *mut DevicePointer, pointer: *mut c_void, _flags: c_uint) => {
        session::get()?;
        memory::host_range(pointer).ok_or(Error::INVALID_VALUE)?;
        put(result, pointer as DevicePointer)
    };
    cuPointerGetAttribute(data: *mut c_void, attribute: c_int, pointer: DevicePointer) =>
        pointer_attribute(data, attribute, pointer);

    cuMemcpy(to: DevicePointer, from: DevicePointer, bytes: usize) =>
        memory::copy(host(to), host(from), bytes, BY_ADDRESS, NULL, false);
    cuMemcpyAsync(to: DevicePointer, from: DevicePointer, bytes: usize, stream: *mut c_void) =>
        memory::copy(host(to), host(from), bytes, BY_ADDRESS, stream, true);
    cuMemcpyHtoD_v2(to: DevicePointer, from: *const c_void, bytes: usize) =>
        memory::copy(host(to), from, bytes, BY_ADDRESS, NULL, false);
    cuMemcpyHtoDAsync_v2(to: DevicePointer, from: *const c_void, bytes: usize, stream: *mut c_void) =>
        memory::copy(host(to), from, bytes, BY_ADDRESS, stream, true);
    cuMemcpyDtoH_v2(to: *mut c_void, from: DevicePointer, bytes: usize) =>
        memory::copy(to, host(from), bytes, BY_ADDRESS, NULL, false);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: DevicePointer, bytes: usize, stream: *mut c_void) =>
        memory::copy(to, host(from), bytes, BY_ADDRESS, stream, true);
    cuMemcpyDtoD_v2(to: DevicePointer, from: DevicePointer, bytes: usize) =>
        memory::copy(host(to), host(from), bytes, BY_ADDRESS, NULL, false);
    cuMemcpyDtoDAsync_v2(to: DevicePointer, from: DevicePointer, bytes: usize, stream: *mut c_void) =>
        memory::copy(host(to), host(from), bytes, BY_ADDRESS, stream, true);
    cuMemsetD8_v2(to: DevicePointer, value: c_uchar, count: usize) =>
        memory::fill(host(to), u32::from(value), 1, count, NULL);
    cuMemsetD16_v2(to: DevicePointer, value: c_ushort, count: usize) =>
        memory::fill(host(to), u32::from(value), 2, count, NULL);
    cuMemsetD32_v2(to: DevicePointer, value: c_uint, count: usize) => memory::fill(host(to), value, 4, count, NULL);
    cuMemsetD8Async(to: DevicePointer, value: c_uchar, count: usize, stream: *mut c_void) =>
        memory::fill(host(to), u32::from(value), 1, count, stream);
    cuMemsetD16Async(to: DevicePointer, value: c_ushort, count: usize, stream: *mut c_void) =>
        memory::fill(host(to), u32::from(value), 2, count, stream);
    cuMemsetD32Async(to: DevicePointer, value: c_uint, count: usize, stream: *mut c_void) =>
        memory::fill(host(to), value, 4, count, stream);

    cuMemGetAllocationGranularity(result: *mut usize, _prop: *const MemAllocationProp, _option: c_int) =>
        put(result, memory::granularity()?);
    cuMemAddressReserve(
        pointer: *mut DevicePointer, bytes: usize, alignment: usize, _wish: DevicePointer, _flags: c_ulonglong,
    ) => put(pointer, memory::address_reserve(bytes, alignment)? as DevicePointer);
    cuMemAddressFree(pointer: DevicePointer, bytes: usize) => memory::address_free(pointer as usize, bytes);
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const MemAllocationProp, flags: c_ulonglong) =>
        put(handle, create(bytes, prop, flags)?);
    cuMemRelease(handle: u64) => memory::release(handle);
    cuMemMap(pointer: DevicePointer, bytes: usize, offset: usize, handle: u64, _flags: c_ulonglong) =>
        memory::map(pointer as usize, bytes, offset, handle);
    cuMemUnmap(pointer: DevicePointer, bytes: usize) => memory::unmap(pointer as usize, bytes);
    cuMemSetAccess(pointer: DevicePointer, bytes: usize, access: *const MemAccessDesc, count: usize) =>
        set_access(pointer, bytes, access, count);
    cuMemRetainAllocationHandle(handle: *mut u64, pointer: *mut c_void) =>
        put(handle, memory::retain(pointer as usize)?);
    cuMemGetAllocationPropertiesFromHandle(prop: *mut MemAllocationProp, handle: u64) => put(prop, prop_of(handle)?);
}

refused! { driver, REFUSED:
    cuMemGetAccess,
    cuMemExportToShareableHandle,
    cuMemImportFromShareableHandle,
    cuMemMapArrayAsync,
    cuMulticastCreate,
    cuMulticastAddDevice,
    cuMulticastBindMem,
    cuMulticastUnbind,
    cuPointerGetAttributes,
    cuPointerSetAttribute,
    cuIpcGetMemHandle,
    cuIpcOpenMemHandle_v2,
    cuIpcCloseMemHandle,
}
