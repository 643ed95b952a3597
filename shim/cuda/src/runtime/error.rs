//! Errors and versions.

use crate::abi::Error;
use crate::device::CUDA_VERSION;
use crate::export::{Export, Support, exports, last_error, put};
use std::ffi::{CStr, c_char, c_int, c_void};

/// Runtime name, driver name and text of every code this library returns, and of those a program may ask about.
const CODES: &[(c_int, &CStr, &CStr, &CStr)] = &[
    (0, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
    (1, c"cudaErrorInvalidValue", c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"cudaErrorMemoryAllocation", c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"cudaErrorInitializationError", c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"cudaErrorCudartUnloading", c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (9, c"cudaErrorInvalidConfiguration", c"CUDA_ERROR_UNKNOWN", c"invalid configuration argument"),
    (12, c"cudaErrorInvalidPitchValue", c"CUDA_ERROR_UNKNOWN", c"invalid pitch argument"),
    (13, c"cudaErrorInvalidSymbol", c"CUDA_ERROR_UNKNOWN", c"invalid device symbol"),
    (21, c"cudaErrorInvalidMemcpyDirection", c"CUDA_ERROR_UNKNOWN", c"invalid copy direction for memcpy"),
    (
        35,
        c"cudaErrorInsufficientDriver",
        c"CUDA_ERROR_UNKNOWN",
        c"CUDA driver version is insufficient for CUDA runtime version",
    ),
    (
        46,
        c"cudaErrorDevicesUnavailable",
        c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        c"all CUDA-capable devices are busy or unavailable",
    ),
    (52, c"cudaErrorMissingConfiguration", c"CUDA_ERROR_UNKNOWN", c"__global__ function call is not configured"),
    (98, c"cudaErrorInvalidDeviceFunction", c"CUDA_ERROR_UNKNOWN", c"invalid device function"),
    (100, c"cudaErrorNoDevice", c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"cudaErrorInvalidDevice", c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"cudaErrorInvalidKernelImage", c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"cudaErrorDeviceUninitialized", c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (
        209,
        c"cudaErrorNoKernelImageForDevice",
        c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        c"no kernel image is available for execution on the device",
    ),
    (
        217,
        c"cudaErrorPeerAccessUnsupported",
        c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"peer access is not supported between these two devices",
    ),
    (301, c"cudaErrorFileNotFound", c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
    (
        304,
        c"cudaErrorOperatingSystem",
        c"CUDA_ERROR_OPERATING_SYSTEM",
        c"OS call failed or operation not supported on this OS",
    ),
    (400, c"cudaErrorInvalidResourceHandle", c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (500, c"cudaErrorSymbolNotFound", c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"cudaErrorNotReady", c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"cudaErrorIllegalAddress", c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (
        704,
        c"cudaErrorPeerAccessAlreadyEnabled",
        c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        c"peer access is already enabled",
    ),
    (705, c"cudaErrorPeerAccessNotEnabled", c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled"),
    (
        712,
        c"cudaErrorHostMemoryAlreadyRegistered",
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"cudaErrorHostMemoryNotRegistered",
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (719, c"cudaErrorLaunchFailure", c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (801, c"cudaErrorNotSupported", c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (802, c"cudaErrorSystemNotReady", c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (
        900,
        c"cudaErrorStreamCaptureUnsupported",
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"cudaErrorStreamCaptureInvalidated",
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (999, c"cudaErrorUnknown", c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// The text of a code.
pub(crate) fn text(code: c_int) -> Option<&'static CStr> {
    CODES.iter().find(|entry| entry.0 == code).map(|entry| entry.3)
}

/// The driver's name of a code.
pub(crate) fn driver_name(code: c_int) -> Option<&'static CStr> {
    CODES.iter().find(|entry| entry.0 == code).map(|entry| entry.2)
}

/// The runtime's name of an error code.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    CODES.iter().find(|entry| entry.0 == code).map_or(c"unrecognized error code", |entry| entry.1).as_ptr()
}

/// The text of an error code.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    text(code).unwrap_or(c"unrecognized error code").as_ptr()
}

/// The thread's last error, which is then forgotten.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    last_error(true)
}

/// The thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    last_error(false)
}

const fn served(name: &'static str, address: *const c_void) -> Export {
    Export { name, support: Support::Served, address }
}

/// Functions of this module that are not outcomes.
pub(crate) const PLAIN: &[Export] = &[
    served("cudaGetErrorName", cudaGetErrorName as *const c_void),
    served("cudaGetErrorString", cudaGetErrorString as *const c_void),
    served("cudaGetLastError", cudaGetLastError as *const c_void),
    served("cudaPeekAtLastError", cudaPeekAtLastError as *const c_void),
];

exports! { runtime, FUNCTIONS:
    cudaRuntimeGetVersion(version: *mut c_int) => put(version, CUDA_VERSION);
    cudaDriverGetVersion(version: *mut c_int) => put(version, driver_version());
    cudaGetExportTable(table: *mut *const c_void, _id: *const c_void) => {
        put(table, std::ptr::null())?;
        Err(Error::NOT_FOUND)
    };
}

/// Zero without a session: no driver is there.
fn driver_version() -> c_int {
    if crate::session::get().is_ok() { CUDA_VERSION } else { 0 }
}
