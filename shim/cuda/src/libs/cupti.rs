//! CUPTI: a profiler is told that the device cannot be profiled, and goes on without device events.
//!
//! The real CUPTI must not be reached: it takes the emulated driver apart.

use crate::guard::guard;
use crate::unsupported;
use std::ffi::{CStr, c_char, c_int, c_void};

/// A `CUptiResult`.
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_PARAMETER: Status = 1;
const NOT_SUPPORTED: Status = 27;
const UNKNOWN: Status = 999;

/// The version of the CUPTI interface that CUDA 13.0 comes with.
const VERSION: u32 = 130_000;

macro_rules! not_supported {
    ($($name:ident),* $(,)?) => { $(
        /// Not supported; named once. Arguments are not looked at.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            static SAID: std::sync::Once = std::sync::Once::new();
            guard(UNKNOWN, || {
                // Some of these are called for every operation of the program.
                SAID.call_once(|| unsupported::call(stringify!($name)));
                NOT_SUPPORTED
            })
        }
    )* };
}

not_supported!(
    cuptiActivityConfigurePCSampling,
    cuptiActivityDisable,
    cuptiActivityEnable,
    cuptiActivityEnableCudaEventDeviceTimestamps,
    cuptiActivityEnableDriverApi,
    cuptiActivityEnableHWTrace,
    cuptiActivityEnableLatencyTimestamps,
    cuptiActivityEnableRuntimeApi,
    cuptiActivityFlushAll,
    cuptiActivityFlushPeriod,
    cuptiActivityGetAttribute,
    cuptiActivityGetNextRecord,
    cuptiActivityGetNumDroppedRecords,
    cuptiActivityPopExternalCorrelationId,
    cuptiActivityPushExternalCorrelationId,
    cuptiActivityRegisterCallbacks,
    cuptiActivityRegisterTimestampCallback,
    cuptiActivitySetAttribute,
    cuptiEnableAllDomains,
    cuptiEnableCallback,
    cuptiEnableDomain,
    cuptiFinalize,
    cuptiGetCallbackName,
    cuptiGetCallbackState,
    cuptiGetTimestamp,
    cuptiProfilerInitialize,
    cuptiSubscribe,
    cuptiSubscribe_v2,
    cuptiSupportedDomains,
    cuptiUnsubscribe,
);

/// The version of the interface.
///
/// # Safety
/// `version` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetVersion(version: *mut u32) -> Status {
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(version, VERSION) })
}

/// The text of a result.
///
/// # Safety
/// `text` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetResultString(result: Status, text: *mut *const c_char) -> Status {
    let name: &CStr = match result {
        SUCCESS => c"CUPTI_SUCCESS",
        INVALID_PARAMETER => c"CUPTI_ERROR_INVALID_PARAMETER",
        NOT_SUPPORTED => c"CUPTI_ERROR_NOT_SUPPORTED: the emulated device cannot be profiled",
        _ => c"CUPTI_ERROR_UNKNOWN",
    };
    // SAFETY: the caller's contract.
    guard(UNKNOWN, || unsafe { write(text, name.as_ptr()) })
}

/// The last error of the calling thread: none is kept.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetLastError() -> Status {
    SUCCESS
}

/// # Safety
/// `target` must be null or valid for a write.
unsafe fn write<T>(target: *mut T, value: T) -> Status {
    if target.cast::<c_void>().is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(value) };
    SUCCESS
}
