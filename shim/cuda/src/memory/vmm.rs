//! The driver's virtual memory management (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`, ...): what PyTorch's
//! expandable segments are made of.
//!
//! A handle may be mapped once at a time: the same memory at two addresses is not emulated and fails loudly.

use super::{Place, VIRTUAL_BASE, VIRTUAL_END, account, discard, heap::GRANULE, limit, map_range, note, unaccount};
use crate::abi::{Error, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp, Outcome};
use crate::{device, session, unsupported};
use prism_wire::message::RecordKind;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const TYPE_PINNED: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`.
const ACCESS_NONE: c_int = 0;

/// Memory of a card that has no address yet.
#[derive(Clone, Copy, Debug)]
struct Physical {
    bytes: u64,
    device: c_int,
    /// Kinds of handles it may be shared by. Kept for queries only: sharing one is refused.
    handle_types: c_int,
    /// References by `cuMemCreate` and `cuMemRetainAllocationHandle`.
    references: u32,
    /// Where it is mapped.
    mapped: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: usize,
    handle: u64,
    device: c_int,
}

#[derive(Debug, Default)]
struct State {
    /// Reservations: address to size.
    reserved: BTreeMap<usize, usize>,
    /// Mappings: address to mapping.
    mapped: BTreeMap<usize, Mapping>,
    handles: BTreeMap<u64, Physical>,
    next_handle: u64,
}

static STATE: Mutex<State> =
    Mutex::new(State { reserved: BTreeMap::new(), mapped: BTreeMap::new(), handles: BTreeMap::new(), next_handle: 1 });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn aligned(value: usize) -> bool {
    value.is_multiple_of(GRANULE as usize)
}

/// The mapping that contains an address.
pub(super) fn find(address: usize) -> Option<Place> {
    let state = state();
    let (&base, mapping) = state.mapped.range(..=address).next_back()?;
    (address < base + mapping.bytes).then_some(Place { device: mapping.device, base, bytes: mapping.bytes })
}

/// The granularity of sizes and addresses.
pub(crate) fn granularity() -> Result<usize, Error> {
    session::get()?;
    Ok(GRANULE as usize)
}

/// Reserves addresses: the lowest gap that is large enough.
pub(crate) fn address_reserve(bytes: usize, alignment: usize) -> Result<usize, Error> {
    session::get()?;
    let unit = alignment.max(GRANULE as usize);
    if bytes == 0 || !aligned(bytes) || !unit.is_power_of_two() {
        return Err(Error::INVALID_VALUE);
    }
    let mut state = state();
    let mut start = VIRTUAL_BASE;
    for (&address, &length) in &state.reserved {
        if address.checked_sub(start).is_some_and(|gap| gap >= bytes) {
            break;
        }
        start = (address + length).next_multiple_of(unit);
    }
    if start.checked_add(bytes).is_none_or(|end| end > VIRTUAL_END) {
        return Err(Error::OUT_OF_MEMORY);
    }
    map_range(start, bytes, libc::PROT_NONE)?;
    state.reserved.insert(start, bytes);
    Ok(start)
}

/// Gives reserved addresses back.
pub(crate) fn address_free(address: usize, bytes: usize) -> Outcome {
    session::get()?;
    let mut state = state();
    if state.reserved.get(&address) != Some(&bytes) || state.mapped.range(address..address + bytes).next().is_some() {
        return Err(Error::INVALID_VALUE);
    }
    state.reserved.remove(&address);
    // SAFETY: exactly a reservation made above, with nothing mapped in it.
    unsafe { libc::munmap(address as *mut c_void, bytes) };
    Ok(())
}

/// Creates memory of a card and returns its handle.
pub(crate) fn create(bytes: usize, prop: &MemAllocationProp) -> Result<u64, Error> {
    let session = session::get()?;
    if bytes == 0 || !aligned(bytes) || prop.kind != TYPE_PINNED {
        return Err(Error::INVALID_VALUE);
    }
    if prop.location.kind != LOCATION_DEVICE {
        unsupported::call("cuMemCreate with host memory");
        return Err(Error::NOT_SUPPORTED);
    }
    let device = device::check(prop.location.id)?;
    let most = limit(device as usize, bytes as u64, &session.config.device);
    if !account(device as usize, bytes as u64, most) {
        return Err(Error::OUT_OF_MEMORY);
    }
    let handle = {
        let mut state = state();
        let handle = state.next_handle;
        state.next_handle += 1;
        let handle_types = prop.requested_handle_types;
        let physical = Physical { bytes: bytes as u64, device, handle_types, references: 1, mapped: None };
        state.handles.insert(handle, physical);
        handle
    };
    note(RecordKind::Alloc, bytes as u64, handle_address(handle));
    Ok(handle)
}

/// What stands for a handle where records name an address.
fn handle_address(handle: u64) -> usize {
    VIRTUAL_END + handle as usize
}

/// The card and the kinds of shareable handles that a handle was created with.
pub(crate) fn properties_of_handle(handle: u64) -> Result<(c_int, c_int), Error> {
    session::get()?;
    let state = state();
    let physical = state.handles.get(&handle).ok_or(Error::INVALID_VALUE)?;
    Ok((physical.device, physical.handle_types))
}

/// The handle mapped at an address, with one more reference.
pub(crate) fn retain(address: usize) -> Result<u64, Error> {
    session::get()?;
    let mut state = state();
    let (_, mapping) = state.mapped.range(..=address).next_back().ok_or(Error::INVALID_VALUE)?;
    let handle = mapping.handle;
    state.handles.get_mut(&handle).ok_or(Error::INVALID_VALUE)?.references += 1;
    Ok(handle)
}

/// Drops a reference to a handle. Its memory is free once it is neither referenced nor mapped.
pub(crate) fn release(handle: u64) -> Outcome {
    session::get()?;
    let mut state = state();
    let physical = state.handles.get_mut(&handle).ok_or(Error::INVALID_VALUE)?;
    physical.references = physical.references.checked_sub(1).ok_or(Error::INVALID_VALUE)?;
    free_unused(state, handle);
    Ok(())
}

fn free_unused(mut state: MutexGuard<'static, State>, handle: u64) {
    let unused =
        state.handles.get(&handle).copied().filter(|physical| physical.references == 0 && physical.mapped.is_none());
    let Some(physical) = unused else { return };
    state.handles.remove(&handle);
    drop(state);
    unaccount(physical.device as usize, physical.bytes);
    note(RecordKind::Free, physical.bytes, handle_address(handle));
}

/// Maps the whole of a handle at an address of a reservation.
pub(crate) fn map(address: usize, bytes: usize, offset: usize, handle: u64) -> Outcome {
    session::get()?;
    let mut state = state();
    let physical = state.handles.get(&handle).copied().ok_or(Error::INVALID_VALUE)?;
    if offset != 0 || bytes as u64 != physical.bytes || physical.mapped.is_some() {
        drop(state);
        unsupported::call("cuMemMap of a part of a handle or of a handle that is mapped already");
        return Err(Error::NOT_SUPPORTED);
    }
    let end = address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    let inside = state.reserved.range(..=address).next_back().is_some_and(|(base, length)| end <= base + length);
    let free = state.mapped.range(..end).next_back().is_none_or(|(base, mapping)| base + mapping.bytes <= address);
    if !aligned(address) || !inside || !free {
        return Err(Error::INVALID_VALUE);
    }
    state.mapped.insert(address, Mapping { bytes, handle, device: physical.device });
    if let Some(physical) = state.handles.get_mut(&handle) {
        physical.mapped = Some(address);
    }
    Ok(())
}

/// Mappings that lie in a range; an error unless they fill it.
fn mappings(state: &State, address: usize, bytes: usize) -> Result<Vec<(usize, Mapping)>, Error> {
    let end = address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    let found: Vec<_> = state.mapped.range(address..end).map(|(base, mapping)| (*base, *mapping)).collect();
    let filled: usize = found.iter().map(|(_, mapping)| mapping.bytes).sum();
    if found.is_empty() || filled != bytes { Err(Error::INVALID_VALUE) } else { Ok(found) }
}

/// Makes a mapped range accessible (or not).
pub(crate) fn set_access(address: usize, bytes: usize, access: &[MemAccessDesc]) -> Outcome {
    session::get()?;
    let state = state();
    mappings(&state, address, bytes)?;
    for entry in access {
        device::check(entry.location.id)?;
    }
    let open = access.iter().any(|entry| entry.flags != ACCESS_NONE);
    let protection = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    // SAFETY: the range consists of mappings inside reservations of this module.
    match unsafe { libc::mprotect(address as *mut c_void, bytes, protection) } {
        0 => Ok(()),
        _ => Err(Error::OUT_OF_MEMORY),
    }
}

/// Unmaps a range that consists of whole mappings.
pub(crate) fn unmap(address: usize, bytes: usize) -> Outcome {
    session::get()?;
    let found = mappings(&state(), address, bytes)?;
    discard(address, bytes);
    // SAFETY: the range consists of mappings inside reservations of this module.
    unsafe { libc::mprotect(address as *mut c_void, bytes, libc::PROT_NONE) };
    for (base, mapping) in found {
        let mut state = state();
        state.mapped.remove(&base);
        if let Some(physical) = state.handles.get_mut(&mapping.handle) {
            physical.mapped = None;
        }
        free_unused(state, mapping.handle);
    }
    Ok(())
}
