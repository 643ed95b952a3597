//! Memory of the emulated cards: address ranges of the host that only the pages really written to cost anything.
//!
//! Every card has a range of addresses of its own, the same in every process and on every run. What the program allocates
//! is accounted exactly against the card's memory; what it writes is really there. Pages of freed memory are given back
//! to the system and read as zero when allocated again.

mod copy;
mod heap;
mod host;
pub(crate) mod nccl;
mod vmm;

pub(crate) use copy::{Copy2d, copy, copy_2d, fill, fill_2d, fill_rows, move_rows};
pub(crate) use host::{alloc_host, free_host, host_range, register_host, unregister_host};
pub(crate) use vmm::{
    address_free, address_reserve, create, granularity, map, properties_of_handle, release, retain, set_access, unmap,
};

use crate::abi::{Error, Outcome};
use crate::config::DeviceProfile;
use crate::session::HostCost;
use crate::{device, session, stream, values};
use heap::Heap;
use prism_wire::message::{Record, RecordKind};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// First address of card 0.
const BASE: usize = 0x2000_0000_0000;
/// Addresses of each card: more than its memory, so that no allocation fails for want of a gap.
const STRIDE: usize = 1 << 39;
/// Addresses for the driver's virtual memory management, of all cards.
const VIRTUAL_BASE: usize = 0x3000_0000_0000;
const VIRTUAL_END: usize = 0x4000_0000_0000;
/// Every address of device memory.
pub(crate) const ADDRESSES: std::ops::Range<usize> = BASE..VIRTUAL_END;
const _: () = assert!(BASE + device::MAX_DEVICES * STRIDE <= VIRTUAL_BASE);

/// Heaps by device, made on first use.
static HEAPS: Mutex<[Option<Heap>; device::MAX_DEVICES]> = Mutex::new([const { None }; device::MAX_DEVICES]);
/// Bytes in use by device, of heaps and virtual memory together, without the context.
static USED: [AtomicU64; device::MAX_DEVICES] = [const { AtomicU64::new(0) }; device::MAX_DEVICES];

/// What an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The card.
    pub(crate) device: c_int,
    /// First address of the allocation.
    pub(crate) base: usize,
    /// Its size.
    pub(crate) bytes: usize,
}

/// Does `pointer` lie in emulated device memory?
#[inline]
pub(crate) fn is_device(pointer: *const c_void) -> bool {
    ADDRESSES.contains(&(pointer as usize))
}

/// The allocation that contains `pointer`.
pub(crate) fn find(pointer: *const c_void) -> Option<Place> {
    let address = pointer as usize;
    if (VIRTUAL_BASE..VIRTUAL_END).contains(&address) {
        return vmm::find(address);
    }
    let offset = address.checked_sub(BASE)?;
    let device = offset / STRIDE;
    let heaps = heaps();
    let block = heaps.get(device)?.as_ref()?.find((offset % STRIDE) as u64)?;
    Some(Place {
        device: device as c_int,
        base: BASE + device * STRIDE + block.offset as usize,
        bytes: block.bytes as usize,
    })
}

/// Do the `bytes` from `pointer` on lie in one allocation of a card?
pub(crate) fn contains(pointer: *const c_void, bytes: usize) -> bool {
    let mut address = pointer as usize;
    let Some(end) = address.checked_add(bytes) else { return false };
    // Neighbouring mappings of virtual memory make one range.
    while let Some(place) = find(address as *const c_void) {
        let place_end = place.base + place.bytes;
        if end <= place_end {
            return true;
        }
        if !(VIRTUAL_BASE..VIRTUAL_END).contains(&address) {
            return false;
        }
        address = place_end;
    }
    false
}

fn heaps() -> MutexGuard<'static, [Option<Heap>; device::MAX_DEVICES]> {
    HEAPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps the addresses of a card. They cost nothing until written to.
fn open_heap(device: usize) -> Result<Heap, Error> {
    map_range(BASE + device * STRIDE, STRIDE, libc::PROT_READ | libc::PROT_WRITE)?;
    Ok(Heap::new(STRIDE as u64))
}

/// Maps fresh private pages at exactly `address`.
fn map_range(address: usize, bytes: usize, protection: c_int) -> Outcome {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the kernel refuses the mapping if anything lives there already.
    let mapped = unsafe { libc::mmap(address as *mut c_void, bytes, protection, flags, -1, 0) };
    if mapped as usize != address {
        let reason = std::io::Error::last_os_error();
        crate::real::log(&format!("prism: cannot map {bytes} bytes of device addresses at {address:#x}: {reason}\n"));
        return Err(Error::OUT_OF_MEMORY);
    }
    for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        // SAFETY: the range was mapped above. The advice only concerns cost: a kernel without it loses nothing.
        unsafe { libc::madvise(mapped, bytes, advice) };
    }
    Ok(())
}

/// Gives the pages of a range back; they read as zero afterwards.
fn discard(address: usize, bytes: usize) {
    // SAFETY: callers name whole pages of private anonymous mappings made by this module.
    unsafe { libc::madvise(address as *mut c_void, bytes, libc::MADV_DONTNEED) };
}

fn capacity(profile: &DeviceProfile) -> u64 {
    profile.memory_bytes - profile.context_bytes
}

/// How much of a card can be taken beside NCCL's buffers, for an allocation of `bytes`.
fn limit(device: usize, bytes: u64, profile: &DeviceProfile) -> u64 {
    // The engine is asked where it can matter: not while half of the card stays free.
    let is_half_free = USED[device].load(Ordering::Acquire).saturating_add(bytes) <= capacity(profile) / 2;
    capacity(profile).saturating_sub(if is_half_free { 0 } else { nccl::bytes(device) })
}

/// Takes `bytes` of a card, of which at most `most` may be taken ([`limit`]); false if it does not have them.
fn account(device: usize, bytes: u64, most: u64) -> bool {
    USED[device]
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| used.checked_add(bytes).filter(|used| *used <= most))
        .is_ok()
}

fn unaccount(device: usize, bytes: u64) {
    USED[device].fetch_sub(bytes, Ordering::AcqRel);
}

/// Free and total bytes of a card.
pub(crate) fn info(device: c_int) -> Result<(usize, usize), Error> {
    let profile = device::profile()?;
    let device = device::check(device)? as usize;
    let taken = USED[device].load(Ordering::Acquire).saturating_add(nccl::bytes(device));
    Ok((capacity(profile).saturating_sub(taken) as usize, profile.memory_bytes as usize))
}

/// Allocates `bytes` of the current card. Null for zero bytes.
pub(crate) fn malloc(bytes: usize) -> Result<*mut c_void, Error> {
    let session = device::using()?;
    if bytes == 0 {
        return Ok(std::ptr::null_mut());
    }
    let device = device::current() as usize;
    let most = limit(device, bytes as u64, &session.config.device);
    let block = {
        let mut heaps = heaps();
        let heap = match &mut heaps[device] {
            Some(heap) => heap,
            empty => empty.insert(open_heap(device)?),
        };
        let growth = heap.growth(bytes as u64).ok_or(Error::OUT_OF_MEMORY)?;
        if !account(device, growth, most) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let Some(block) = heap.allocate(bytes as u64) else {
            unaccount(device, growth);
            return Err(Error::OUT_OF_MEMORY);
        };
        block
    };
    let address = BASE + device * STRIDE + block.offset as usize;
    values::allocated(address, bytes);
    note(RecordKind::Alloc, block.reserved, address);
    Ok(address as *mut c_void)
}

/// Frees memory of [`malloc`]; null does nothing.
pub(crate) fn free(pointer: *mut c_void) -> Outcome {
    session::get()?;
    if pointer.is_null() {
        return Ok(());
    }
    let offset = (pointer as usize).checked_sub(BASE).ok_or(Error::INVALID_VALUE)?;
    let (device, offset) = (offset / STRIDE, (offset % STRIDE) as u64);
    let block = {
        let mut heaps = heaps();
        let heap = heaps.get_mut(device).and_then(Option::as_mut).ok_or(Error::INVALID_VALUE)?;
        let (block, freed) = heap.free(offset).ok_or(Error::INVALID_VALUE)?;
        if let Some((offset, bytes)) = freed {
            discard(BASE + device * STRIDE + offset as usize, bytes as usize);
            unaccount(device, bytes);
        }
        block
    };
    values::freed(pointer as usize);
    note(RecordKind::Free, block.reserved, pointer as usize);
    Ok(())
}

/// Frees memory after the device is idle, as `cudaFree` does.
pub(crate) fn free_synchronized(pointer: *mut c_void) -> Outcome {
    if !pointer.is_null() && find(pointer).is_some() {
        stream::synchronize_device()?;
    }
    free(pointer)
}

/// Tells the engine of memory taken or given back.
fn note(kind: RecordKind, bytes: u64, address: usize) {
    let record = Record { kind: kind as u16, a: bytes, b: address as u64, ..Record::default() };
    session::append(record, session::host_cost(HostCost::Malloc));
}
