//! Cards: handles, identity, memory, processes.

use crate::{Status, exports, not_supported, put, put_text, session};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};

/// Handles: never dereferenced.
const HANDLE_BASE: usize = 0x5057_0000_0000;
const HANDLE_STRIDE: usize = 16;
/// Bus number of the first card, as the CUDA side reports it.
const FIRST_BUS: c_uint = 0x18;

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_sub_system_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV1 {
    pid: c_uint,
    used_bytes: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t` and later.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV2 {
    pid: c_uint,
    used_bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The fields that all versions of `nvmlGpuFabricInfoV_t` have.
#[repr(C)]
pub struct FabricInfo {
    version: c_uint,
    cluster_uuid: [u8; 16],
    status: c_int,
    clique_id: c_uint,
    state: u8,
    health_mask: c_uint,
}

const _: () = {
    assert!(size_of::<FabricInfo>() == 36);
    assert!(size_of::<PciInfo>() == 68);
    assert!(size_of::<ProcessV1>() == 16);
    assert!(size_of::<ProcessV2>() == 24);
};

fn count() -> Result<c_uint, Status> {
    Ok(session::number(c"node.gpus")? as c_uint)
}

fn handle(index: c_uint) -> Result<*mut c_void, Status> {
    if index < count()? {
        Ok((HANDLE_BASE + index as usize * HANDLE_STRIDE) as *mut c_void)
    } else {
        Err(Status::INVALID_ARGUMENT)
    }
}

fn index(handle: *mut c_void) -> Result<c_uint, Status> {
    let offset = (handle as usize).checked_sub(HANDLE_BASE).ok_or(Status::INVALID_ARGUMENT)?;
    let index = c_uint::try_from(offset / HANDLE_STRIDE).map_err(|_| Status::INVALID_ARGUMENT)?;
    if offset.is_multiple_of(HANDLE_STRIDE) && index < count()? { Ok(index) } else { Err(Status::INVALID_ARGUMENT) }
}

/// The id that CUDA reports, written NVML's way.
fn uuid(index: c_uint) -> CString {
    let mut bytes = *b"PRISM-EMULATED\0\0";
    bytes[15] = index as u8;
    let number = |part: &[u8]| part.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let text = format!(
        "GPU-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        number(&bytes[..4]),
        number(&bytes[4..6]),
        number(&bytes[6..8]),
        number(&bytes[8..10]),
        number(&bytes[10..])
    );
    CString::new(text).expect("hexadecimal digits and dashes")
}

/// # Safety
/// `text` must be null or a C string.
unsafe fn by_uuid(text: *const c_char) -> Result<*mut c_void, Status> {
    if text.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: the contract of this function.
    let wanted = unsafe { CStr::from_ptr(text) };
    let index = (0..count()?).find(|index| uuid(*index).as_c_str() == wanted).ok_or(Status::NOT_FOUND)?;
    handle(index)
}

/// # Safety
/// `text` must be null or a C string.
unsafe fn by_bus(text: *const c_char) -> Result<*mut c_void, Status> {
    if text.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: the contract of this function.
    let text = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Status::INVALID_ARGUMENT)?;
    let parts: Vec<&str> = text.split(':').collect();
    let number = match parts.as_slice() {
        [_, bus, _] | [bus, _] => *bus,
        _ => return Err(Status::INVALID_ARGUMENT),
    };
    let bus = c_uint::from_str_radix(number, 16).map_err(|_| Status::INVALID_ARGUMENT)?;
    bus.checked_sub(FIRST_BUS).map_or(Err(Status::NOT_FOUND), |index| handle(index).map_err(|_| Status::NOT_FOUND))
}

fn memory(handle: *mut c_void) -> Result<Memory, Status> {
    let (free, total) = session::memory(index(handle)? as c_int)?;
    Ok(Memory { total, free, used: total - free })
}

/// # Safety
/// `result` must be null or valid, its version set by the caller.
unsafe fn memory_v2(handle: *mut c_void, result: *mut MemoryV2) -> Result<(), Status> {
    let memory = memory(handle)?;
    // SAFETY: the contract of this function.
    let result = unsafe { result.as_mut() }.ok_or(Status::INVALID_ARGUMENT)?;
    *result =
        MemoryV2 { version: result.version, total: memory.total, reserved: 0, free: memory.free, used: memory.used };
    Ok(())
}

fn pci_info(handle: *mut c_void) -> Result<PciInfo, Status> {
    let bus = FIRST_BUS + index(handle)?;
    let mut info = PciInfo {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus,
        device: 0,
        pci_device_id: 0,
        pci_sub_system_id: 0,
        bus_id: [0; 32],
    };
    for (to, from) in info.bus_id_legacy.iter_mut().zip(format!("0000:{bus:02X}:00.0").bytes()) {
        *to = from as c_char;
    }
    for (to, from) in info.bus_id.iter_mut().zip(format!("00000000:{bus:02X}:00.0").bytes()) {
        *to = from as c_char;
    }
    Ok(info)
}

/// The processes on a card: this one, if it uses memory there. Others are not known.
///
/// # Safety
/// `count` must be null or valid, `processes` null or as long as `count` says.
unsafe fn processes<T>(
    handle: *mut c_void,
    count: *mut c_uint,
    processes: *mut T,
    entry: impl FnOnce(c_uint, c_ulonglong) -> T,
) -> Result<(), Status> {
    let used = memory(handle)?.used;
    // SAFETY: the contract of this function.
    unsafe {
        let room = count.as_mut().ok_or(Status::INVALID_ARGUMENT)?;
        let available = std::mem::replace(room, c_uint::from(used > 0));
        if used == 0 {
            return Ok(());
        }
        if available == 0 || processes.is_null() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        processes.write(entry(std::process::id(), used));
    }
    Ok(())
}

fn process_v2(pid: c_uint, used_bytes: c_ulonglong) -> ProcessV2 {
    // No instances: all bits set.
    ProcessV2 { pid, used_bytes, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX }
}

/// The cards are in no multi-node fabric: state "not supported".
///
/// # Safety
/// `result` must be null or valid, its version set by the caller.
unsafe fn fabric_info(handle: *mut c_void, result: *mut FabricInfo) -> Result<(), Status> {
    index(handle)?;
    // SAFETY: the contract of this function.
    let result = unsafe { result.as_mut() }.ok_or(Status::INVALID_ARGUMENT)?;
    *result = FabricInfo {
        version: result.version,
        cluster_uuid: [0; 16],
        status: 0,
        clique_id: 0,
        state: 0,
        health_mask: 0,
    };
    Ok(())
}

/// `nvmlClockType_t`: graphics, multiprocessors, memory, video.
fn clock_mhz(handle: *mut c_void, kind: c_int) -> Result<c_uint, Status> {
    index(handle)?;
    let key = match kind {
        0 | 1 => c"device.clock_khz",
        2 => c"device.memory_clock_khz",
        _ => return Err(Status::NOT_SUPPORTED),
    };
    Ok((session::number(key)? / 1_000) as c_uint)
}

fn capability(handle: *mut c_void) -> Result<(c_int, c_int), Status> {
    index(handle)?;
    let text = session::text(c"device.compute_capability")?.to_str().map_err(|_| Status::UNKNOWN)?;
    let (major, minor) = text.split_once('.').ok_or(Status::UNKNOWN)?;
    Ok((major.parse().map_err(|_| Status::UNKNOWN)?, minor.parse().map_err(|_| Status::UNKNOWN)?))
}

exports! {
    nvmlDeviceGetCount(result: *mut c_uint) => put(result, count()?);
    nvmlDeviceGetCount_v2(result: *mut c_uint) => put(result, count()?);
    nvmlDeviceGetHandleByIndex(number: c_uint, result: *mut *mut c_void) => put(result, handle(number)?);
    nvmlDeviceGetHandleByIndex_v2(number: c_uint, result: *mut *mut c_void) => put(result, handle(number)?);
    nvmlDeviceGetHandleByUUID(text: *const c_char, result: *mut *mut c_void) => put(result, by_uuid(text)?);
    nvmlDeviceGetHandleByPciBusId(text: *const c_char, result: *mut *mut c_void) => put(result, by_bus(text)?);
    nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, result: *mut *mut c_void) => put(result, by_bus(text)?);
    nvmlDeviceGetIndex(device: *mut c_void, result: *mut c_uint) => put(result, index(device)?);
    nvmlDeviceGetMinorNumber(device: *mut c_void, result: *mut c_uint) => put(result, index(device)?);
    nvmlDeviceGetName(device: *mut c_void, buffer: *mut c_char, length: c_uint) => {
        index(device)?;
        put_text(buffer, length, session::text(c"device.name")?)
    };
    nvmlDeviceGetUUID(device: *mut c_void, buffer: *mut c_char, length: c_uint) =>
        put_text(buffer, length, &uuid(index(device)?));
    nvmlDeviceGetPciInfo(device: *mut c_void, result: *mut PciInfo) => put(result, pci_info(device)?);
    nvmlDeviceGetPciInfo_v3(device: *mut c_void, result: *mut PciInfo) => put(result, pci_info(device)?);
    nvmlDeviceGetMemoryInfo(device: *mut c_void, result: *mut Memory) => put(result, memory(device)?);
    nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, result: *mut MemoryV2) => memory_v2(device, result);
    nvmlDeviceGetCudaComputeCapability(device: *mut c_void, major: *mut c_int, minor: *mut c_int) => {
        let capability = capability(device)?;
        put(major, capability.0)?;
        put(minor, capability.1)
    };
    nvmlDeviceGetClockInfo(device: *mut c_void, kind: c_int, result: *mut c_uint) => put(result, clock_mhz(device, kind)?);
    nvmlDeviceGetMaxClockInfo(device: *mut c_void, kind: c_int, result: *mut c_uint) =>
        put(result, clock_mhz(device, kind)?);
    nvmlDeviceGetComputeRunningProcesses(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV1) =>
        processes(device, count, list, |pid, used_bytes| ProcessV1 { pid, used_bytes });
    nvmlDeviceGetComputeRunningProcesses_v2(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV2) =>
        processes(device, count, list, process_v2);
    nvmlDeviceGetComputeRunningProcesses_v3(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV2) =>
        processes(device, count, list, process_v2);
    nvmlDeviceGetGpuFabricInfoV(device: *mut c_void, result: *mut FabricInfo) => fabric_info(device, result);
    // Every card of a node reaches every other.
    nvmlDeviceGetP2PStatus(from: *mut c_void, to: *mut c_void, _capability: c_int, result: *mut c_int) => {
        index(from)?;
        index(to)?;
        put(result, 0)
    };
}

not_supported! {
    nvmlDeviceGetNvLinkState,
    nvmlDeviceGetNvLinkRemoteDeviceType,
    nvmlDeviceGetNvLinkRemotePciInfo_v2,
    nvmlDeviceGetNvLinkCapability,
    nvmlDeviceGetGpuFabricInfo,
    nvmlDeviceGetFieldValues,
    nvmlDeviceGetUtilizationRates,
    nvmlDeviceGetPowerUsage,
    nvmlDeviceGetTotalEnergyConsumption,
    nvmlDeviceGetTemperature,
    nvmlDeviceGetEccMode,
    nvmlDeviceGetCpuAffinity,
    nvmlDeviceGetMemoryAffinity,
    nvmlDeviceGetTopologyCommonAncestor,
    nvmlDeviceGetMigMode,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_by_card_and_look_like_nvmls() {
        let text = uuid(3).into_string().expect("ASCII");
        assert_eq!(text, "GPU-50524953-4d2d-454d-554c-415445440003");
        assert_ne!(uuid(0), uuid(1));
    }

    #[test]
    fn without_a_session_the_driver_is_not_loaded() {
        assert_eq!(count(), Err(Status::DRIVER_NOT_LOADED));
        assert_eq!(memory(HANDLE_BASE as *mut c_void).err(), Some(Status::DRIVER_NOT_LOADED));
    }
}
