//! Pinned host memory: allocated by, or registered with, the driver.

use crate::abi::{Error, Outcome};
use crate::session::HostCost;
use crate::{clock, device, session};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{PoisonError, RwLock};

/// A range of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostRange {
    /// First address.
    pub(crate) base: usize,
    /// Size in bytes.
    pub(crate) bytes: usize,
    /// Flags it was made with.
    pub(crate) flags: c_uint,
    /// The card that was current then.
    pub(crate) device: c_int,
    /// Memory of both host and device (`cudaMallocManaged`).
    pub(crate) is_managed: bool,
    /// Allocated by us (else registered).
    owned: bool,
}

static RANGES: RwLock<BTreeMap<usize, HostRange>> = RwLock::new(BTreeMap::new());

/// The pinned range that contains an address.
pub(crate) fn host_range(pointer: *const c_void) -> Option<HostRange> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let (_, range) = ranges.range(..=pointer as usize).next_back()?;
    ((pointer as usize) < range.base + range.bytes).then_some(*range)
}

fn charge() {
    clock::charge_if_driver(session::host_cost(HostCost::Malloc));
}

/// Allocates pinned (or managed) host memory, zero filled.
pub(crate) fn alloc_host(bytes: usize, flags: c_uint, is_managed: bool) -> Result<*mut c_void, Error> {
    device::using()?;
    if bytes == 0 {
        return Ok(std::ptr::null_mut());
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh private mapping anywhere.
    let pointer =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    if pointer == libc::MAP_FAILED {
        return Err(Error::OUT_OF_MEMORY);
    }
    let range = HostRange { base: pointer as usize, bytes, flags, device: device::current(), is_managed, owned: true };
    RANGES.write().unwrap_or_else(PoisonError::into_inner).insert(range.base, range);
    charge();
    Ok(pointer)
}

/// Frees memory of [`alloc_host`]; null does nothing.
pub(crate) fn free_host(pointer: *mut c_void) -> Outcome {
    session::get()?;
    if pointer.is_null() {
        return Ok(());
    }
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let range = ranges.get(&(pointer as usize)).copied().filter(|range| range.owned).ok_or(Error::INVALID_VALUE)?;
    ranges.remove(&range.base);
    drop(ranges);
    // SAFETY: exactly the mapping made by `alloc_host`, forgotten above.
    unsafe { libc::munmap(pointer, range.bytes) };
    charge();
    Ok(())
}

/// Registers memory of the program as pinned.
pub(crate) fn register_host(pointer: *mut c_void, bytes: usize, flags: c_uint) -> Outcome {
    device::using()?;
    if pointer.is_null() || bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let base = pointer as usize;
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let overlaps = ranges.range(..base + bytes).next_back().is_some_and(|(_, range)| range.base + range.bytes > base);
    if overlaps {
        return Err(Error::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let range = HostRange { base, bytes, flags, device: device::current(), is_managed: false, owned: false };
    ranges.insert(base, range);
    drop(ranges);
    charge();
    Ok(())
}

/// Forgets a registration.
pub(crate) fn unregister_host(pointer: *mut c_void) -> Outcome {
    session::get()?;
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let known = ranges.get(&(pointer as usize)).is_some_and(|range| !range.owned);
    if !known {
        return Err(Error::HOST_MEMORY_NOT_REGISTERED);
    }
    ranges.remove(&(pointer as usize));
    drop(ranges);
    charge();
    Ok(())
}
