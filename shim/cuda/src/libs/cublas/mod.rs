//! cuBLAS: handles and their settings. The products are in [`gemm`], the vector and triangular calls in [`vector`].

pub(super) mod gemm;
mod vector;

use super::handles::Table;
use crate::guard::guard;
use prism_wire::message::DataType;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize};

/// A `cublasStatus_t`.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
pub(super) const INVALID_VALUE: Status = 7;
pub(super) const INTERNAL_ERROR: Status = 14;
pub(super) const NOT_SUPPORTED: Status = 15;

/// The version of the cuBLAS that CUDA 13.0 comes with: major × 10000 + minor × 100 + patch.
pub(super) const VERSION: c_int = 130_101;

const POINTER_MODE_HOST: c_int = 0;
const POINTER_MODE_DEVICE: c_int = 1;
/// `CUBLAS_TF32_TENSOR_OP_MATH`; the higher flag bits may be combined with it.
const TF32_MATH: c_int = 3;
const MATH_MODE_MASK: c_int = 15;

/// What a program has set on a handle. Never freed, so that a lookup needs no lock: handles are few.
#[derive(Debug)]
struct Settings {
    /// False once the handle is destroyed.
    is_alive: AtomicBool,
    /// Address of the stream; 0 is the default stream.
    stream: AtomicUsize,
    math_mode: AtomicI32,
    pointer_mode: AtomicI32,
    atomics_mode: AtomicI32,
    sm_count_target: AtomicI32,
}

impl Settings {
    const fn new() -> Self {
        Self {
            is_alive: AtomicBool::new(true),
            stream: AtomicUsize::new(0),
            math_mode: AtomicI32::new(0),
            pointer_mode: AtomicI32::new(POINTER_MODE_HOST),
            atomics_mode: AtomicI32::new(0),
            sm_count_target: AtomicI32::new(0),
        }
    }

    fn stream(&self) -> *const c_void {
        std::ptr::without_provenance(self.stream.load(Relaxed))
    }

    /// The type that a single-precision product is computed in.
    fn float32_compute(&self) -> DataType {
        if self.math_mode.load(Relaxed) & MATH_MODE_MASK == TF32_MATH { DataType::Tf32 } else { DataType::Float32 }
    }
}

static HANDLES: Table<&'static Settings> = Table::new();

thread_local! {
    /// The handle this thread used last: a program sets several things on a handle before every product.
    static LAST: Cell<(usize, Option<&'static Settings>)> = const { Cell::new((0, None)) };
}

/// The settings of a handle, or the status to return.
fn settings(handle: *const c_void) -> Result<&'static Settings, Status> {
    if let (address, Some(settings)) = LAST.get()
        && address == handle.addr()
        && settings.is_alive.load(Relaxed)
    {
        return Ok(settings);
    }
    let settings = *HANDLES.get(handle).ok_or(NOT_INITIALIZED)?;
    LAST.set((handle.addr(), Some(settings)));
    Ok(settings)
}

/// Runs the body of an exported function; an `Err` is the status to return.
fn answer(body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || body().err().unwrap_or(SUCCESS))
}

/// Writes `value` to `target` unless it is null.
///
/// # Safety
/// `target` must be null or valid for a write.
unsafe fn write<T>(target: *mut T, value: T) -> Result<(), Status> {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: valid for a write by the contract of this function, and not null.
    unsafe { target.write(value) };
    Ok(())
}

/// Creates a handle.
///
/// # Safety
/// `handle` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> Status {
    answer(|| {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        let settings: &'static Settings = Box::leak(Box::new(Settings::new()));
        // SAFETY: the caller's contract.
        unsafe { write(handle, HANDLES.insert(settings)) }
    })
}

/// Destroys a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> Status {
    answer(|| {
        HANDLES.remove(handle).ok_or(NOT_INITIALIZED)?.is_alive.store(false, Relaxed);
        Ok(())
    })
}

/// The version, see [`VERSION`].
///
/// # Safety
/// `version` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasGetVersion_v2(_handle: *mut c_void, version: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { write(version, VERSION) })
}

/// One part of the version: 0 major, 1 minor, 2 patch.
///
/// # Safety
/// `value` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasGetProperty(part: c_int, value: *mut c_int) -> Status {
    answer(|| {
        let number = version_part(part).ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's contract.
        unsafe { write(value, number) }
    })
}

pub(super) fn version_part(part: c_int) -> Option<c_int> {
    match part {
        0 => Some(VERSION / 10_000),
        1 => Some(VERSION / 100 % 100),
        2 => Some(VERSION % 100),
        _ => None,
    }
}

/// The CUDA runtime this cuBLAS was made for.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetCudartVersion() -> usize {
    13_000
}

/// Sets the stream of a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> Status {
    answer(|| {
        settings(handle)?.stream.store(stream.addr(), Relaxed);
        Ok(())
    })
}

/// The stream of a handle.
///
/// # Safety
/// `stream` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasGetStream_v2(handle: *mut c_void, stream: *mut *const c_void) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { write(stream, settings(handle)?.stream()) })
}

/// Accepts a workspace; products are not run, so it is not used.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSetWorkspace_v2(handle: *mut c_void, workspace: *mut c_void, bytes: usize) -> Status {
    answer(|| {
        settings(handle)?;
        // cuBLAS asks for 256-byte alignment.
        if (workspace.is_null() && bytes > 0) || !workspace.addr().is_multiple_of(256) {
            return Err(INVALID_VALUE);
        }
        super::workspaces::note(workspace, bytes);
        Ok(())
    })
}

macro_rules! setting {
    ($set:ident, $get:ident, $field:ident, $valid:expr) => {
        /// Sets the setting of this name.
        #[unsafe(no_mangle)]
        pub extern "C" fn $set(handle: *mut c_void, value: c_int) -> Status {
            answer(|| {
                let valid: fn(c_int) -> bool = $valid;
                if !valid(value) {
                    return Err(INVALID_VALUE);
                }
                settings(handle)?.$field.store(value, Relaxed);
                Ok(())
            })
        }

        /// The setting of this name.
        ///
        /// # Safety
        /// `value` must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(handle: *mut c_void, value: *mut c_int) -> Status {
            // SAFETY: the caller's contract.
            answer(|| unsafe { write(value, settings(handle)?.$field.load(Relaxed)) })
        }
    };
}

setting!(cublasSetMathMode, cublasGetMathMode, math_mode, |value| (0..32).contains(&value));
setting!(cublasSetPointerMode_v2, cublasGetPointerMode_v2, pointer_mode, |value| (0..2).contains(&value));
setting!(cublasSetAtomicsMode, cublasGetAtomicsMode, atomics_mode, |value| (0..2).contains(&value));
setting!(cublasSetSmCountTarget, cublasGetSmCountTarget, sm_count_target, |value| value >= 0);

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusString(status: Status) -> *const c_char {
    status_text(status).1.as_ptr()
}

/// The name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusName(status: Status) -> *const c_char {
    status_text(status).0.as_ptr()
}

/// Name and text of a status.
pub(super) fn status_text(status: Status) -> (&'static std::ffi::CStr, &'static std::ffi::CStr) {
    match status {
        SUCCESS => (c"CUBLAS_STATUS_SUCCESS", c"success"),
        NOT_INITIALIZED => (c"CUBLAS_STATUS_NOT_INITIALIZED", c"the handle is not one that cublasCreate returned"),
        3 => (c"CUBLAS_STATUS_ALLOC_FAILED", c"out of memory"),
        INVALID_VALUE => (c"CUBLAS_STATUS_INVALID_VALUE", c"an argument has an invalid value"),
        8 => (c"CUBLAS_STATUS_ARCH_MISMATCH", c"the device lacks a needed feature"),
        11 => (c"CUBLAS_STATUS_MAPPING_ERROR", c"device memory could not be reached"),
        13 => (c"CUBLAS_STATUS_EXECUTION_FAILED", c"the operation failed on the device"),
        INTERNAL_ERROR => (c"CUBLAS_STATUS_INTERNAL_ERROR", c"internal error of the emulated cuBLAS"),
        NOT_SUPPORTED => (c"CUBLAS_STATUS_NOT_SUPPORTED", c"not supported by the emulated cuBLAS"),
        16 => (c"CUBLAS_STATUS_LICENSE_ERROR", c"licence error"),
        _ => (c"CUBLAS_STATUS_UNKNOWN", c"unknown status"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_keeps_its_settings() {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` and `value` are valid for writes.
        unsafe {
            assert_eq!(cublasCreate_v2(&raw mut handle), SUCCESS);
            let mut value = -1;
            assert_eq!(cublasGetMathMode(handle, &raw mut value), SUCCESS);
            assert_eq!(value, 0);
            assert_eq!(cublasSetMathMode(handle, TF32_MATH | 16), SUCCESS);
            assert_eq!(cublasGetMathMode(handle, &raw mut value), SUCCESS);
            assert_eq!(value, TF32_MATH | 16);
            assert_eq!(settings(handle).map(Settings::float32_compute), Ok(DataType::Tf32));
            assert_eq!(cublasSetPointerMode_v2(handle, 2), INVALID_VALUE);
            assert_eq!(cublasSetWorkspace_v2(handle, std::ptr::null_mut(), 1), INVALID_VALUE);
            let mut stream = std::ptr::null();
            assert_eq!(cublasSetStream_v2(handle, std::ptr::without_provenance_mut(64)), SUCCESS);
            assert_eq!(cublasGetStream_v2(handle, &raw mut stream), SUCCESS);
            assert_eq!(stream.addr(), 64);
            assert_eq!(cublasDestroy_v2(handle), SUCCESS);
            assert_eq!(cublasSetMathMode(handle, 0), NOT_INITIALIZED);
            assert_eq!(cublasDestroy_v2(handle), NOT_INITIALIZED);
            assert_eq!(cublasCreate_v2(std::ptr::null_mut()), INVALID_VALUE);
        }
    }

    #[test]
    fn the_version_has_three_parts() {
        assert_eq!((version_part(0), version_part(1), version_part(2)), (Some(13), Some(1), Some(1)));
        assert_eq!(version_part(3), None);
    }
}
