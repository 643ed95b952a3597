//! Devices, their properties, peer access, limits.

use crate::abi::{DeviceProp, DeviceProp12, Error, Outcome};
use crate::export::{exports, put, refused};
use crate::{device, stream};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

/// Pairs (device, peer) with access enabled.
static PEERS: Mutex<BTreeSet<(c_int, c_int)>> = Mutex::new(BTreeSet::new());
/// Limits that were set.
static LIMITS: Mutex<BTreeMap<c_int, usize>> = Mutex::new(BTreeMap::new());

/// Defaults of `cudaLimit`: stack, printf buffer, heap, sync depth, pending launches, L2 fetch, persisting L2.
const LIMIT_DEFAULTS: [usize; 7] = [1_024, 6_848_512, 8 << 20, 2, 2_048, 64, 0];

/// A limit of the device, as set or by default.
pub(crate) fn limit(number: c_int) -> Result<usize, Error> {
    let default = usize::try_from(number).ok().and_then(|index| LIMIT_DEFAULTS.get(index));
    let limits = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    limits.get(&number).or(default).copied().ok_or(Error(215))
}

/// Sets a limit. Nothing that is emulated depends on one.
pub(crate) fn set_limit(number: c_int, value: usize) -> Outcome {
    limit(number)?;
    LIMITS.lock().unwrap_or_else(PoisonError::into_inner).insert(number, value);
    Ok(())
}

/// Every card of a node reaches every other.
fn can_access(device: c_int, peer: c_int) -> Result<bool, Error> {
    Ok(device::check(device)? != device::check(peer)?)
}

pub(crate) fn enable_peer(peer: c_int, flags: c_uint) -> Outcome {
    let device = device::current();
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if !can_access(device, peer)? {
        return Err(Error::INVALID_DEVICE);
    }
    let fresh = PEERS.lock().unwrap_or_else(PoisonError::into_inner).insert((device, peer));
    if fresh { Ok(()) } else { Err(Error::PEER_ACCESS_ALREADY_ENABLED) }
}

fn disable_peer(peer: c_int) -> Outcome {
    let known = PEERS.lock().unwrap_or_else(PoisonError::into_inner).remove(&(device::current(), peer));
    if known { Ok(()) } else { Err(Error::PEER_ACCESS_NOT_ENABLED) }
}

/// Writes a text of at most `length` bytes, the closing zero included.
///
/// # Safety
/// `buffer` must be null or writable for `length` bytes.
pub(crate) unsafe fn put_text(buffer: *mut c_char, length: c_int, text: &str) -> Outcome {
    let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1)).ok_or(Error::INVALID_VALUE)?;
    if buffer.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let bytes = &text.as_bytes()[..text.len().min(room)];
    // SAFETY: not null, and writable for more than the bytes copied.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len());
        buffer.add(bytes.len()).write(0);
    }
    Ok(())
}

/// The card with a bus address.
///
/// # Safety
/// `address` must be null or a C string.
pub(crate) unsafe fn by_bus_address(address: *const c_char) -> Result<c_int, Error> {
    if address.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: a C string by the contract of this function.
    device::by_bus_address(unsafe { CStr::from_ptr(address) }.to_str().map_err(|_| Error::INVALID_VALUE)?)
}

/// `cudaDevP2PAttr`: performance rank 0, access, native atomics, array access.
fn peer_attribute(number: c_int, from: c_int, to: c_int) -> Result<c_int, Error> {
    let reachable = c_int::from(can_access(from, to)?);
    match number {
        1 | 4 => Ok(0),
        2 | 3 => Ok(reachable),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn set_device_flags(flags: c_uint) -> Outcome {
    device::profile()?;
    if flags & !0x1F == 0 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

exports! { runtime, FUNCTIONS:
    cudaGetDeviceCount(count: *mut c_int) => match device::profile() {
        Ok(profile) => put(count, profile.count),
        Err(error) => {
            put(count, 0)?;
            Err(error)
        }
    };
    cudaGetDevice(device: *mut c_int) => {
        device::profile()?;
        put(device, device::current())
    };
    cudaSetDevice(device: c_int) => device::set_current(device);
    cudaInitDevice(device: c_int, _device_flags: c_uint, _flags: c_uint) => device::retain_context(device).map(|_| ());
    cudaSetValidDevices(_devices: *mut c_int, _count: c_int) => device::profile().map(|_| ());
    cudaSetDeviceFlags(flags: c_uint) => set_device_flags(flags);
    cudaGetDeviceFlags(flags: *mut c_uint) => { device::profile()?; put(flags, 8) };
    cudaChooseDevice(device: *mut c_int, _prop: *const c_void) => { device::profile()?; put(device, 0) };
    cudaGetDeviceProperties(prop: *mut DeviceProp, device: c_int) => put(prop, device::properties(device)?);
    // The name of CUDA 12, with the struct of CUDA 12.
    cudaGetDeviceProperties_v2(prop: *mut DeviceProp12, device: c_int) => {
        let (now, profile) = (device::properties(device)?, device::profile()?);
        put(prop, DeviceProp12::new(&now, profile.clock_khz, profile.memory_clock_khz))
    };
    cudaDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) =>
        put(value, device::attribute(number, device)?);
    cudaDeviceGetPCIBusId(buffer: *mut c_char, length: c_int, device: c_int) =>
        put_text(buffer, length, &device::bus_address(device::check(device)?));
    cudaDeviceGetByPCIBusId(device: *mut c_int, address: *const c_char) => put(device, by_bus_address(address)?);
    cudaDeviceGetP2PAttribute(value: *mut c_int, number: c_int, from: c_int, to: c_int) =>
        put(value, peer_attribute(number, from, to)?);
    cudaDeviceCanAccessPeer(answer: *mut c_int, device: c_int, peer: c_int) =>
        put(answer, c_int::from(can_access(device, peer)?));
    cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) => enable_peer(peer, flags);
    cudaDeviceDisablePeerAccess(peer: c_int) => disable_peer(peer);
    cudaDeviceSynchronize() => stream::synchronize_device();
    cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) => {
        device::profile()?;
        crate::export::put_optional(least, stream::PRIORITIES.0);
        crate::export::put_optional(greatest, stream::PRIORITIES.1);
        Ok(())
    };
    cudaDeviceGetLimit(value: *mut usize, number: c_int) => { device::profile()?; put(value, limit(number)?) };
    cudaDeviceSetLimit(number: c_int, value: usize) => { device::profile()?; set_limit(number, value) };
    cudaDeviceGetCacheConfig(config: *mut c_int) => { device::profile()?; put(config, 0) };
    cudaDeviceSetCacheConfig(_config: c_int) => device::profile().map(|_| ());
    cudaDeviceGetSharedMemConfig(config: *mut c_int) => { device::profile()?; put(config, 1) };
    cudaDeviceSetSharedMemConfig(_config: c_int) => device::profile().map(|_| ());
    cudaCtxResetPersistingL2Cache() => device::profile().map(|_| ());
    cudaProfilerStart() => device::profile().map(|_| ());
    cudaProfilerStop() => device::profile().map(|_| ());
}

refused! { runtime, REFUSED:
    cudaDeviceReset,
    cudaDeviceFlushGPUDirectRDMAWrites,
    cudaIpcGetEventHandle,
    cudaIpcOpenEventHandle,
    cudaIpcGetMemHandle,
    cudaIpcOpenMemHandle,
    cudaIpcCloseMemHandle,
}
