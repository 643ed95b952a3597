//! Streams and events.

use crate::export::{exports, put, refused};
use crate::runtime::graph::{self, CaptureInfo};
use crate::runtime::stream::{exchange_mode, host_function};
use crate::{device, event, session, stream};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

type HostFunction = unsafe extern "C" fn(*mut c_void);

exports! { driver, FUNCTIONS:
    cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) => put(stream, stream::create(flags, 0)?);
    cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, priority: c_int) =>
        put(stream, stream::create(flags, priority)?);
    cuStreamDestroy_v2(stream: *mut c_void) => stream::destroy(stream);
    cuStreamSynchronize(stream: *mut c_void) => stream::synchronize(stream);
    cuStreamQuery(stream: *mut c_void) => stream::query(stream);
    cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) => event::wait(stream, event, flags);
    cuStreamGetPriority(stream: *mut c_void, priority: *mut c_int) => put(priority, stream::get(stream)?.priority);
    cuStreamGetFlags(stream: *mut c_void, flags: *mut c_uint) => put(flags, stream::get(stream)?.flags);
    cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) =>
        put(context, device::retain_context(stream::get(stream)?.device)?);
    cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) => graph::begin(stream, mode);
    cuStreamEndCapture(stream: *mut c_void, result: *mut *mut c_void) => graph::end(stream, result);
    cuStreamIsCapturing(stream: *mut c_void, result: *mut c_int) => put(result, graph::status(stream)?);
    cuStreamGetCaptureInfo_v3(
        stream: *mut c_void, status: *mut c_int, id: *mut c_ulonglong, graph: *mut *mut c_void,
        dependencies: *mut *const *mut c_void, edges: *mut *const c_void, count: *mut usize,
    ) => graph::capture_info(stream, CaptureInfo { status, id, graph, dependencies, edges, count });
    cuGraphInstantiateWithFlags(result: *mut *mut c_void, handle: *mut c_void, _flags: c_ulonglong) =>
        graph::instantiate(result, handle);
    cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) => graph::launch(executable, stream);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int) => { session::get()?; exchange_mode(mode) };
    cuLaunchHostFunc(stream: *mut c_void, function: Option<HostFunction>, data: *mut c_void) =>
        host_function(stream, function, data);
    cuEventCreate(event: *mut *mut c_void, flags: c_uint) => put(event, event::create(flags)?);
    cuEventDestroy_v2(event: *mut c_void) => event::destroy(event);
    cuEventRecord(event: *mut c_void, stream: *mut c_void) => event::record(event, stream, 0);
    cuEventRecordWithFlags(event: *mut c_void, stream: *mut c_void, flags: c_uint) =>
        event::record(event, stream, flags);
    cuEventQuery(event: *mut c_void) => event::query(event);
    cuEventSynchronize(event: *mut c_void) => event::synchronize(event);
    cuEventElapsedTime_v2(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) =>
        put(milliseconds, (event::elapsed_ns(start, end)? as f64 / 1e6) as f32);
    cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) =>
        put(milliseconds, (event::elapsed_ns(start, end)? as f64 / 1e6) as f32);
}

refused! { driver, REFUSED:
    cuStreamWriteValue32_v2,
    cuStreamWriteValue64_v2,
    cuStreamWaitValue32_v2,
    cuStreamWaitValue64_v2,
    cuStreamBatchMemOp_v2,
}
