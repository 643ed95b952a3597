//! Events.

use crate::event;
use crate::export::{exports, put};
use std::ffi::{c_uint, c_void};

exports! { runtime, FUNCTIONS:
    cudaEventCreate(event: *mut *mut c_void) => put(event, event::create(0)?);
    cudaEventCreateWithFlags(event: *mut *mut c_void, flags: c_uint) => put(event, event::create(flags)?);
    cudaEventDestroy(event: *mut c_void) => event::destroy(event);
    cudaEventRecord(event: *mut c_void, stream: *mut c_void) => event::record(event, stream, 0);
    cudaEventRecordWithFlags(event: *mut c_void, stream: *mut c_void, flags: c_uint) =>
        event::record(event, stream, flags);
    cudaEventQuery(event: *mut c_void) => event::query(event);
    cudaEventSynchronize(event: *mut c_void) => event::synchronize(event);
    cudaEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) =>
        put(milliseconds, (event::elapsed_ns(start, end)? as f64 / 1e6) as f32);
}
