//! The emulated cards: which is current, what they answer about themselves.

use crate::abi::{DeviceProp, Error};
use crate::config::DeviceProfile;
use crate::session::{self, Session};
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Most cards of a node.
pub(crate) const MAX_DEVICES: usize = 32;
/// The CUDA version that driver and runtime report.
pub(crate) const CUDA_VERSION: c_int = 13_000;
/// Context handles of the cards: never dereferenced.
const CONTEXT_BASE: usize = 0x5054_0000_0000;
const CONTEXT_STRIDE: usize = 16;

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
    /// Did this thread choose a device (then its context is current in the driver's interface)?
    static HAS_CONTEXT: Cell<bool> = const { Cell::new(false) };
}

/// Bit `i`: the primary context of card `i` is active.
static ACTIVE: AtomicU64 = AtomicU64::new(0);

/// The profile of the cards.
pub(crate) fn profile() -> Result<&'static DeviceProfile, Error> {
    Ok(&session::get()?.config.device)
}

/// The session, for a call that uses the current card: its primary context becomes active.
#[inline]
pub(crate) fn using() -> Result<&'static Session, Error> {
    let session = session::get()?;
    if !HAS_CONTEXT.get() {
        activate(CURRENT.get());
    }
    Ok(session)
}

fn activate(device: c_int) {
    ACTIVE.fetch_or(1 << device, Ordering::Relaxed);
    HAS_CONTEXT.set(true);
}

/// The calling thread's current card.
#[inline]
pub(crate) fn current() -> c_int {
    CURRENT.get()
}

/// Makes `device` current for the calling thread and its primary context active.
pub(crate) fn set_current(device: c_int) -> Result<(), Error> {
    check(device)?;
    CURRENT.set(device);
    activate(device);
    Ok(())
}

/// `device` if there is such a card.
pub(crate) fn check(device: c_int) -> Result<c_int, Error> {
    if (0..profile()?.count).contains(&device) { Ok(device) } else { Err(Error::INVALID_DEVICE) }
}

/// Is the primary context of a card active?
pub(crate) fn is_active(device: c_int) -> bool {
    ACTIVE.load(Ordering::Relaxed) & (1 << device) != 0
}

/// Activates the primary context of a card and returns its handle.
pub(crate) fn retain_context(device: c_int) -> Result<*mut c_void, Error> {
    check(device)?;
    ACTIVE.fetch_or(1 << device, Ordering::Relaxed);
    Ok(context(device))
}

fn context(device: c_int) -> *mut c_void {
    (CONTEXT_BASE + device as usize * CONTEXT_STRIDE) as *mut c_void
}

/// The context current in the calling thread; null if there is none.
pub(crate) fn current_context() -> *mut c_void {
    if HAS_CONTEXT.get() { context(CURRENT.get()) } else { std::ptr::null_mut() }
}

/// Makes a context handle (or none: null) current.
pub(crate) fn set_context(handle: *mut c_void) -> Result<(), Error> {
    if handle.is_null() {
        session::get()?;
        HAS_CONTEXT.set(false);
        return Ok(());
    }
    set_current(device_of_context(handle)?)
}

/// The card of a context handle.
pub(crate) fn device_of_context(handle: *mut c_void) -> Result<c_int, Error> {
    let offset = (handle as usize).checked_sub(CONTEXT_BASE).ok_or(Error::INVALID_CONTEXT)?;
    if offset % CONTEXT_STRIDE != 0 {
        return Err(Error::INVALID_CONTEXT);
    }
    c_int::try_from(offset / CONTEXT_STRIDE).map_err(|_| Error::INVALID_CONTEXT).and_then(check)
}

/// Threads a multiprocessor holds, by architecture.
pub(crate) fn max_threads_per_sm(profile: &DeviceProfile) -> c_int {
    match (profile.major, profile.minor) {
        (7, 5) => 1_024,
        (8, 6 | 7 | 9) | (12, _) => 1_536,
        _ => 2_048,
    }
}

/// Blocks a multiprocessor holds, by architecture.
pub(crate) fn max_blocks_per_sm(profile: &DeviceProfile) -> c_int {
    match (profile.major, profile.minor) {
        (7, 5) | (8, 6 | 7) => 16,
        (8, 9) | (12, _) => 24,
        _ => 32,
    }
}

/// Shared memory of a block without opting in.
pub(crate) const SHARED_PER_BLOCK: usize = 48 << 10;
/// Shared memory the driver keeps of every block.
pub(crate) const SHARED_RESERVED: usize = 1 << 10;
/// Registers of a multiprocessor and of a block.
pub(crate) const REGISTERS: c_int = 65_536;
/// Threads of a block.
pub(crate) const MAX_THREADS_PER_BLOCK: c_int = 1_024;
const MAX_GRID_X: c_int = c_int::MAX;
const MAX_GRID_YZ: c_int = 65_535;
const MAX_PITCH: c_int = c_int::MAX;
const CONSTANT_BYTES: c_int = 64 << 10;
const ASYNC_ENGINES: c_int = 3;
/// Bus number of the first card; the others follow.
const FIRST_BUS: c_int = 0x18;
/// Handle type "POSIX file descriptor" of memory that can be shared; the emulated device shares none.
const NO_HANDLE_TYPES: c_int = 0;

/// The bus number of a card.
pub(crate) fn bus(device: c_int) -> c_int {
    FIRST_BUS + device
}

/// The bus address of a card, as NVIDIA's libraries write it.
pub(crate) fn bus_address(device: c_int) -> String {
    format!("0000:{:02X}:00.0", bus(device))
}

/// The card with the given bus address (`domain:bus:device.function`, domain and function may be missing).
pub(crate) fn by_bus_address(address: &str) -> Result<c_int, Error> {
    let parts: Vec<&str> = address.split(':').collect();
    let number = match parts.as_slice() {
        [_, bus, _] | [bus, _] => *bus,
        _ => return Err(Error::INVALID_VALUE),
    };
    let number = c_int::from_str_radix(number, 16).map_err(|_| Error::INVALID_VALUE)?;
    check(number - FIRST_BUS)
}

/// A universally unique id that is the same on every run: the card's number under a fixed text.
pub(crate) fn uuid(device: c_int) -> [u8; 16] {
    let mut uuid = *b"PRISM-EMULATED\0\0";
    uuid[15] = device as u8;
    uuid
}

/// Persisting L2 share: three quarters, as on sm_80 and later.
fn persisting_l2(profile: &DeviceProfile) -> c_int {
    if profile.major >= 8 { profile.l2_bytes / 4 * 3 } else { 0 }
}

/// A device attribute by its number (`cudaDeviceAttr` and `CUdevice_attribute` agree).
pub(crate) fn attribute(number: c_int, device: c_int) -> Result<c_int, Error> {
    let profile = profile()?;
    check(device)?;
    let hopper = c_int::from(profile.major >= 9);
    Ok(match number {
        1..=3 => MAX_THREADS_PER_BLOCK,
        4 => 64,
        5 => MAX_GRID_X,
        6 | 7 => MAX_GRID_YZ,
        8 => SHARED_PER_BLOCK as c_int,
        9 => CONSTANT_BYTES,
        10 | 51 => 32,
        11 => MAX_PITCH,
        12 | 82 => REGISTERS,
        13 => profile.clock_khz,
        14 | 30 => 512,
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 98 | 99 | 102 | 113 | 115 => 1,
        16 => profile.sm_count,
        33 => bus(device),
        36 => profile.memory_clock_khz,
        37 => profile.memory_bus_bits,
        38 => profile.l2_bytes,
        39 => max_threads_per_sm(profile),
        40 => ASYNC_ENGINES,
        75 => profile.major,
        76 => profile.minor,
        81 => profile.shared_memory_per_sm_bytes as c_int,
        87 => 2,
        97 => profile.shared_memory_per_block_optin_bytes as c_int,
        106 => max_blocks_per_sm(profile),
        108 => persisting_l2(profile),
        109 => 128 << 20,
        111 => SHARED_RESERVED as c_int,
        119 => NO_HANDLE_TYPES,
        120 => hopper,
        126 => {
            if hopper == 1 {
                4
            } else {
                1
            }
        }
        131 | 134 => -1,
        // Textures, surfaces, sparse arrays, sharing of handles, GPUDirect, multicast: none.
        _ if (1..=150).contains(&number) => 0,
        _ => return Err(Error::INVALID_VALUE),
    })
}

/// Everything `cudaGetDeviceProperties` tells.
pub(crate) fn properties(device: c_int) -> Result<DeviceProp, Error> {
    let profile = profile()?;
    check(device)?;
    // SAFETY: the struct is made of integers, for which zero is a value.
    let mut prop: DeviceProp = unsafe { std::mem::zeroed() };
    for (to, from) in prop.name.iter_mut().take(255).zip(profile.name.bytes()) {
        *to = from as c_char;
    }
    prop.uuid = uuid(device);
    prop.total_global_mem = profile.memory_bytes as usize;
    prop.shared_mem_per_block = SHARED_PER_BLOCK;
    prop.regs_per_block = REGISTERS;
    prop.warp_size = 32;
    prop.mem_pitch = MAX_PITCH as usize;
    prop.max_threads_per_block = MAX_THREADS_PER_BLOCK;
    prop.max_threads_dim = [MAX_THREADS_PER_BLOCK, MAX_THREADS_PER_BLOCK, 64];
    prop.max_grid_size = [MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ];
    prop.total_const_mem = CONSTANT_BYTES as usize;
    prop.major = profile.major;
    prop.minor = profile.minor;
    prop.texture_alignment = 512;
    prop.texture_pitch_alignment = 32;
    prop.surface_alignment = 512;
    prop.multi_processor_count = profile.sm_count;
    prop.memory_bus_width = profile.memory_bus_bits;
    prop.l2_cache_size = profile.l2_bytes;
    prop.persisting_l2_cache_max_size = persisting_l2(profile);
    prop.max_threads_per_multi_processor = max_threads_per_sm(profile);
    prop.max_blocks_per_multi_processor = max_blocks_per_sm(profile);
    prop.shared_mem_per_multiprocessor = profile.shared_memory_per_sm_bytes as usize;
    prop.shared_mem_per_block_optin = profile.shared_memory_per_block_optin_bytes as usize;
    prop.reserved_shared_mem_per_block = SHARED_RESERVED;
    prop.regs_per_multiprocessor = REGISTERS;
    prop.async_engine_count = ASYNC_ENGINES;
    prop.access_policy_max_window_size = attribute(109, device)?;
    prop.pci_bus_id = bus(device);
    prop.cluster_launch = attribute(120, device)?;
    prop.device_numa_id = -1;
    prop.host_numa_id = -1;
    for flag in [
        &mut prop.can_map_host_memory,
        &mut prop.concurrent_kernels,
        &mut prop.ecc_enabled,
        &mut prop.unified_addressing,
        &mut prop.stream_priorities_supported,
        &mut prop.global_l1_cache_supported,
        &mut prop.local_l1_cache_supported,
        &mut prop.managed_memory,
        &mut prop.concurrent_managed_access,
        &mut prop.compute_preemption_supported,
        &mut prop.can_use_host_pointer_for_registered_mem,
        &mut prop.cooperative_launch,
        &mut prop.host_register_supported,
        &mut prop.host_register_read_only_supported,
        &mut prop.memory_pools_supported,
    ] {
        *flag = 1;
    }
    Ok(prop)
}
