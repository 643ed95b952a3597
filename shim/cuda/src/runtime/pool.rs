//! Stream-ordered allocation. A pool keeps nothing back: an allocation is made, and a free takes effect, when it is called.

use crate::abi::{Error, MemAccessDesc, Outcome};
use crate::export::{exports, put, refused};
use crate::{device, memory};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Handles of the default pools: never dereferenced.
const POOL_BASE: usize = 0x5055_0000_0000;
const POOL_STRIDE: usize = 16;

/// `cudaMemPoolAttr`: what is reserved now and at most, what is used now and at most.
const RESERVED_CURRENT: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED_CURRENT: c_int = 7;
const USED_HIGH: c_int = 8;

static USED: [AtomicU64; device::MAX_DEVICES] = [const { AtomicU64::new(0) }; device::MAX_DEVICES];
static HIGH: [AtomicU64; device::MAX_DEVICES] = [const { AtomicU64::new(0) }; device::MAX_DEVICES];
/// Settings by (device, attribute); they change nothing here but are read back.
static SETTINGS: Mutex<BTreeMap<(c_int, c_int), u64>> = Mutex::new(BTreeMap::new());

/// The default pool of a card.
pub(crate) fn pool(device: c_int) -> Result<*mut c_void, Error> {
    Ok((POOL_BASE + device::check(device)? as usize * POOL_STRIDE) as *mut c_void)
}

fn device_of(pool: *mut c_void) -> Result<c_int, Error> {
    let offset = (pool as usize).checked_sub(POOL_BASE).ok_or(Error::INVALID_VALUE)?;
    if offset % POOL_STRIDE != 0 {
        return Err(Error::INVALID_VALUE);
    }
    device::check(c_int::try_from(offset / POOL_STRIDE).map_err(|_| Error::INVALID_VALUE)?)
}

/// Allocates on the current card.
pub(crate) fn malloc_async(bytes: usize) -> Result<*mut c_void, Error> {
    let pointer = memory::malloc(bytes)?;
    let device = device::current() as usize;
    let used = USED[device].fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    HIGH[device].fetch_max(used, Ordering::Relaxed);
    Ok(pointer)
}

/// Frees without waiting.
pub(crate) fn free_async(pointer: *mut c_void) -> Outcome {
    if let Some(place) = memory::find(pointer) {
        let used = &USED[place.device as usize];
        // Memory of cudaMalloc may be freed this way too: the pool's figure does not fall below zero.
        let _ = used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| Some(used.saturating_sub(place.bytes as u64)));
    }
    memory::free(pointer)
}

/// Is the attribute a 64-bit one? The others (reuse policies) are integers.
fn is_wide(attribute: c_int) -> bool {
    (4..=USED_HIGH).contains(&attribute)
}

/// # Safety
/// `value` must be null or point to the attribute's type.
unsafe fn get(pool: *mut c_void, attribute: c_int, value: *mut c_void) -> Outcome {
    let device = device_of(pool)?;
    let index = device as usize;
    let answer = match attribute {
        RESERVED_CURRENT | USED_CURRENT => USED[index].load(Ordering::Relaxed),
        RESERVED_HIGH | USED_HIGH => HIGH[index].load(Ordering::Relaxed),
        // Reuse policies are on by default, the release threshold is zero.
        1..=3 => setting(device, attribute).unwrap_or(1),
        4 => setting(device, attribute).unwrap_or(0),
        _ => return Err(Error::INVALID_VALUE),
    };
    // SAFETY: the contract of this function.
    unsafe {
        if is_wide(attribute) { put(value.cast::<u64>(), answer) } else { put(value.cast::<c_int>(), answer as c_int) }
    }
}

fn setting(device: c_int, attribute: c_int) -> Option<u64> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner).get(&(device, attribute)).copied()
}

/// # Safety
/// `value` must be null or point to the attribute's type.
unsafe fn set(pool: *mut c_void, attribute: c_int, value: *const c_void) -> Outcome {
    let device = device_of(pool)?;
    if value.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and of the attribute's type by the contract of this function.
    let value = unsafe { if is_wide(attribute) { *value.cast::<u64>() } else { *value.cast::<c_int>() as u64 } };
    match attribute {
        1..=4 => {
            SETTINGS.lock().unwrap_or_else(PoisonError::into_inner).insert((device, attribute), value);
            Ok(())
        }
        // High-water marks can only be reset.
        RESERVED_HIGH | USED_HIGH if value == 0 => {
            let index = device as usize;
            HIGH[index].store(USED[index].load(Ordering::Relaxed), Ordering::Relaxed);
            Ok(())
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Nothing is captured into graphs, so their memory is always nothing.
///
/// # Safety
/// `value` must be null or point to a 64-bit integer.
unsafe fn graph_memory(device: c_int, attribute: c_int, value: *mut u64) -> Outcome {
    device::check(device)?;
    if !(0..=3).contains(&attribute) {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the contract of this function.
    unsafe { put(value, 0) }
}

exports! { runtime, FUNCTIONS:
    cudaMallocAsync(pointer: *mut *mut c_void, bytes: usize, _stream: *mut c_void) => put(pointer, malloc_async(bytes)?);
    cudaMallocFromPoolAsync(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, _stream: *mut c_void) => {
        device_of(pool)?;
        put(pointer, malloc_async(bytes)?)
    };
    cudaFreeAsync(pointer: *mut c_void, _stream: *mut c_void) => free_async(pointer);
    cudaDeviceGetDefaultMemPool(result: *mut *mut c_void, device: c_int) => put(result, pool(device)?);
    cudaDeviceGetMemPool(result: *mut *mut c_void, device: c_int) => put(result, pool(device)?);
    cudaDeviceSetMemPool(device: c_int, pool: *mut c_void) =>
        if device_of(pool)? == device { Ok(()) } else { Err(Error::INVALID_VALUE) };
    cudaMemPoolTrimTo(pool: *mut c_void, _keep: usize) => device_of(pool).map(|_| ());
    cudaMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) => get(pool, attribute, value);
    cudaMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) => set(pool, attribute, value);
    cudaMemPoolSetAccess(pool: *mut c_void, _access: *const MemAccessDesc, _count: usize) => device_of(pool).map(|_| ());
    cudaMemPoolGetAccess(flags: *mut c_int, pool: *mut c_void, _location: *mut c_void) => {
        device_of(pool)?;
        put(flags, 3)
    };
    cudaDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) =>
        graph_memory(device, attribute, value);
    cudaDeviceSetGraphMemAttribute(device: c_int, _attribute: c_int, _value: *mut u64) =>
        device::check(device).map(|_| ());
    cudaDeviceGraphMemTrim(device: c_int) => device::check(device).map(|_| ());
}

refused! { runtime, REFUSED:
    cudaMemPoolCreate,
    cudaMemPoolDestroy,
    cudaMemPoolExportToShareableHandle,
    cudaMemPoolImportFromShareableHandle,
    cudaMemPoolExportPointer,
    cudaMemPoolImportPointer,
}
