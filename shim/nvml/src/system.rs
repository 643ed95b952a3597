//! Initialisation, versions, error texts.

use crate::{Status, exports, put, put_text, session};
use std::ffi::{c_char, c_int, c_uint};

/// The driver that goes with the reported CUDA version.
const DRIVER_VERSION: &std::ffi::CStr = c"580.00.00";
const NVML_VERSION: &std::ffi::CStr = c"13.580.00.00";
const CUDA_VERSION: c_int = 13_000;

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(status: c_int) -> *const c_char {
    let text = match Status(status) {
        Status(0) => c"Success",
        Status::UNINITIALIZED => c"Uninitialized",
        Status::INVALID_ARGUMENT => c"Invalid Argument",
        Status::NOT_SUPPORTED => c"Not Supported",
        Status::NOT_FOUND => c"Not Found",
        Status::INSUFFICIENT_SIZE => c"Insufficient Size",
        Status::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

exports! {
    nvmlInit() => session::check();
    nvmlInit_v2() => session::check();
    nvmlInitWithFlags(_flags: c_uint) => session::check();
    nvmlShutdown() => Ok(());
    nvmlSystemGetDriverVersion(buffer: *mut c_char, length: c_uint) => put_text(buffer, length, DRIVER_VERSION);
    nvmlSystemGetNVMLVersion(buffer: *mut c_char, length: c_uint) => put_text(buffer, length, NVML_VERSION);
    nvmlSystemGetCudaDriverVersion(version: *mut c_int) => put(version, CUDA_VERSION);
    nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) => put(version, CUDA_VERSION);
}
