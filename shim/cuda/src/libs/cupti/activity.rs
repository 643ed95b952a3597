//! The activity records that a profiler reads, and the buffers they travel in.
//!
//! The layouts are those of CUPTI 13.0 (`cupti_activity.h`: `CUpti_ActivityKernel10`, `CUpti_ActivityMemcpy6`,
//! `CUpti_ActivityMemset4`, `CUpti_ActivityAPI`, `CUpti_ActivityExternalCorrelation`, `CUpti_ActivitySynchronization2`).
//! Those of CUPTI 12 begin alike, and the step from one record to the next is ours (`cuptiActivityGetNextRecord`), so
//! programs built for either read them.

use std::ffi::{c_char, c_void};

/// `CUpti_ActivityKind` of the records there are.
pub(super) mod kind {
    pub(in crate::libs::cupti) const MEMCPY: u32 = 1;
    pub(in crate::libs::cupti) const MEMSET: u32 = 2;
    pub(in crate::libs::cupti) const KERNEL: u32 = 3;
    pub(in crate::libs::cupti) const DRIVER: u32 = 4;
    pub(in crate::libs::cupti) const RUNTIME: u32 = 5;
    pub(in crate::libs::cupti) const CONCURRENT_KERNEL: u32 = 10;
    pub(in crate::libs::cupti) const OVERHEAD: u32 = 17;
    pub(in crate::libs::cupti) const CUDA_EVENT: u32 = 36;
    pub(in crate::libs::cupti) const SYNCHRONIZATION: u32 = 38;
    pub(in crate::libs::cupti) const EXTERNAL_CORRELATION: u32 = 39;
}

/// Context of every record: the emulated device has one.
const CONTEXT: u32 = 1;

/// Stream numbers of a profile: the default stream is 7 there.
pub(super) const FIRST_STREAM: u32 = 7;

/// `CUpti_ActivityKernel10`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelActivity {
    pub(super) kind: u32,
    cache_config: u8,
    shared_memory_config: u8,
    registers_per_thread: u16,
    partitioned_cache: [u32; 2],
    pub(super) start: u64,
    pub(super) end: u64,
    completed: u64,
    pub(super) device: u32,
    context: u32,
    pub(super) stream: u32,
    pub(super) grid: [i32; 3],
    pub(super) block: [i32; 3],
    static_shared: i32,
    pub(super) dynamic_shared: i32,
    local_per_thread: u32,
    local_total: u32,
    pub(super) correlation: u32,
    pub(super) grid_id: i64,
    pub(super) name: *const c_char,
    reserved: *const c_void,
    queued: u64,
    submitted: u64,
    launch_type: u8,
    carveout: [u8; 2],
    padding: u8,
    shared_executed: u32,
    graph_node: u64,
    shared_limit: u32,
    graph: u32,
    access_policy: *const c_void,
    channel: u32,
    channel_type: u32,
    cluster: [u32; 3],
    cluster_policy: u32,
    local_total_v2: u64,
    cluster_limits: [u32; 2],
    is_device_launched: u8,
    padding_end: [u8; 7],
}
const _: () = assert!(size_of::<KernelActivity>() == 216);
const _: () = assert!(std::mem::offset_of!(KernelActivity, correlation) == 92);
const _: () = assert!(std::mem::offset_of!(KernelActivity, name) == 104);

/// `CUpti_ActivityMemcpy6`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MemcpyActivity {
    pub(super) kind: u32,
    pub(super) copy_kind: u8,
    pub(super) from_kind: u8,
    pub(super) to_kind: u8,
    pub(super) flags: u8,
    pub(super) bytes: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) device: u32,
    context: u32,
    pub(super) stream: u32,
    pub(super) correlation: u32,
    runtime_correlation: u32,
    pad: u32,
    reserved: *const c_void,
    graph_node: u64,
    graph: u32,
    channel: u32,
    channel_type: u32,
    is_device_launched: u8,
    padding: [u8; 3],
    copy_count: u64,
}
const _: () = assert!(size_of::<MemcpyActivity>() == 96);

/// `CUpti_ActivityMemset4`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MemsetActivity {
    pub(super) kind: u32,
    value: u32,
    pub(super) bytes: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) device: u32,
    context: u32,
    pub(super) stream: u32,
    pub(super) correlation: u32,
    flags: u16,
    memory_kind: u16,
    pad: u32,
    reserved: *const c_void,
    graph_node: u64,
    graph: u32,
    channel: u32,
    channel_type: u32,
    is_device_launched: u8,
    padding: [u8; 3],
}
const _: () = assert!(size_of::<MemsetActivity>() == 88);

/// `CUpti_ActivityAPI`: a call of the runtime.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ApiActivity {
    pub(super) kind: u32,
    pub(super) function: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) process: u32,
    pub(super) thread: u32,
    pub(super) correlation: u32,
    pub(super) result: u32,
}
const _: () = assert!(size_of::<ApiActivity>() == 40);

/// `CUpti_ActivityExternalCorrelation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ExternalActivity {
    pub(super) kind: u32,
    pub(super) external_kind: u32,
    pub(super) external: u64,
    pub(super) correlation: u32,
    pub(super) reserved: u32,
}
const _: () = assert!(size_of::<ExternalActivity>() == 24);

/// `CUpti_ActivitySynchronization2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SyncActivity {
    pub(super) kind: u32,
    pub(super) sync_type: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) correlation: u32,
    pub(super) context: u32,
    pub(super) stream: u32,
    pub(super) event: u32,
    event_sync: u64,
    result: u32,
    pad: u32,
}
const _: () = assert!(size_of::<SyncActivity>() == 56);

impl KernelActivity {
    /// A kernel; what is not said stays 0.
    pub(super) fn new(device: u32, stream: u32, correlation: u32, [start, end]: [u64; 2]) -> Self {
        Self {
            kind: kind::CONCURRENT_KERNEL,
            cache_config: 0,
            shared_memory_config: 0,
            registers_per_thread: 0,
            partitioned_cache: [0; 2],
            start,
            end,
            completed: end,
            device,
            context: CONTEXT,
            stream: stream + FIRST_STREAM,
            grid: [1; 3],
            block: [1; 3],
            static_shared: 0,
            dynamic_shared: 0,
            local_per_thread: 0,
            local_total: 0,
            correlation,
            grid_id: i64::from(correlation),
            name: std::ptr::null(),
            reserved: std::ptr::null(),
            queued: 0,
            submitted: 0,
            launch_type: 0,
            carveout: [0; 2],
            padding: 0,
            shared_executed: 0,
            graph_node: 0,
            shared_limit: 0,
            graph: 0,
            access_policy: std::ptr::null(),
            channel: 0,
            channel_type: 0,
            cluster: [0; 3],
            cluster_policy: 0,
            local_total_v2: 0,
            cluster_limits: [0; 2],
            is_device_launched: 0,
            padding_end: [0; 7],
        }
    }
}

impl MemcpyActivity {
    /// A copy; what is not said stays 0.
    pub(super) fn new(device: u32, stream: u32, correlation: u32, [start, end]: [u64; 2], bytes: u64) -> Self {
        Self {
            kind: kind::MEMCPY,
            copy_kind: 0,
            from_kind: 0,
            to_kind: 0,
            flags: 1,
            bytes,
            start,
            end,
            device,
            context: CONTEXT,
            stream: stream + FIRST_STREAM,
            correlation,
            runtime_correlation: 0,
            pad: 0,
            reserved: std::ptr::null(),
            graph_node: 0,
            graph: 0,
            channel: 0,
            channel_type: 0,
            is_device_launched: 0,
            padding: [0; 3],
            copy_count: 1,
        }
    }
}

impl MemsetActivity {
    /// A fill of device memory.
    pub(super) fn new(device: u32, stream: u32, correlation: u32, [start, end]: [u64; 2], bytes: u64) -> Self {
        const DEVICE_MEMORY: u16 = 3;
        Self {
            kind: kind::MEMSET,
            value: 0,
            bytes,
            start,
            end,
            device,
            context: CONTEXT,
            stream: stream + FIRST_STREAM,
            correlation,
            flags: 1,
            memory_kind: DEVICE_MEMORY,
            pad: 0,
            reserved: std::ptr::null(),
            graph_node: 0,
            graph: 0,
            channel: 0,
            channel_type: 0,
            is_device_launched: 0,
            padding: [0; 3],
        }
    }
}

impl SyncActivity {
    /// A synchronisation of `stream` (`u32::MAX`: of none) with `event` (likewise).
    pub(super) fn new(sync_type: u32, [start, end]: [u64; 2], correlation: u32, stream: u32, event: u32) -> Self {
        Self {
            kind: kind::SYNCHRONIZATION,
            sync_type,
            start,
            end,
            correlation,
            context: CONTEXT,
            stream,
            event,
            event_sync: 0,
            result: 0,
            pad: 0,
        }
    }
}

/// Size of the record of this kind; `None` for kinds that are never written.
pub(super) fn size(kind: u32) -> Option<usize> {
    Some(match kind {
        kind::CONCURRENT_KERNEL => size_of::<KernelActivity>(),
        kind::MEMCPY => size_of::<MemcpyActivity>(),
        kind::MEMSET => size_of::<MemsetActivity>(),
        kind::RUNTIME => size_of::<ApiActivity>(),
        kind::EXTERNAL_CORRELATION => size_of::<ExternalActivity>(),
        kind::SYNCHRONIZATION => size_of::<SyncActivity>(),
        _ => return None,
    })
}

/// One record of any kind.
#[derive(Clone, Copy)]
pub(super) enum Activity {
    Kernel(KernelActivity),
    Memcpy(MemcpyActivity),
    Memset(MemsetActivity),
    Api(ApiActivity),
    External(ExternalActivity),
    Sync(SyncActivity),
}

// SAFETY: the pointers in records are null or name strings that are never freed.
unsafe impl Send for Activity {}

impl Activity {
    /// Bytes the record takes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Kernel(_) => size_of::<KernelActivity>(),
            Self::Memcpy(_) => size_of::<MemcpyActivity>(),
            Self::Memset(_) => size_of::<MemsetActivity>(),
            Self::Api(_) => size_of::<ApiActivity>(),
            Self::External(_) => size_of::<ExternalActivity>(),
            Self::Sync(_) => size_of::<SyncActivity>(),
        }
    }

    /// Writes the record.
    ///
    /// # Safety
    /// `target` must be valid for writes of [`Self::size`] bytes.
    pub(super) unsafe fn write(&self, target: *mut u8) {
        // SAFETY: the contract of this function; the target need not be aligned.
        unsafe {
            match self {
                Self::Kernel(record) => target.cast::<KernelActivity>().write_unaligned(*record),
                Self::Memcpy(record) => target.cast::<MemcpyActivity>().write_unaligned(*record),
                Self::Memset(record) => target.cast::<MemsetActivity>().write_unaligned(*record),
                Self::Api(record) => target.cast::<ApiActivity>().write_unaligned(*record),
                Self::External(record) => target.cast::<ExternalActivity>().write_unaligned(*record),
                Self::Sync(record) => target.cast::<SyncActivity>().write_unaligned(*record),
            }
        }
    }
}
