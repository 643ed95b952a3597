//! Types and numbers of the CUDA C interface that several modules share.

mod cuda12;

pub(crate) use cuda12::DeviceProp12;

use crate::session::Unavailable;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// An error code; the runtime's `cudaError_t` and the driver's `CUresult` use the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) c_int);

impl Error {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const UNLOADING: Self = Self(4);
    pub(crate) const INVALID_CONFIGURATION: Self = Self(9);
    pub(crate) const INVALID_PITCH: Self = Self(12);
    pub(crate) const INVALID_SYMBOL: Self = Self(13);
    pub(crate) const INVALID_COPY_DIRECTION: Self = Self(21);
    pub(crate) const MISSING_CONFIGURATION: Self = Self(52);
    pub(crate) const INVALID_DEVICE_FUNCTION: Self = Self(98);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const FILE_NOT_FOUND: Self = Self(301);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const PEER_ACCESS_NOT_ENABLED: Self = Self(705);
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const CAPTURE_MERGE: Self = Self(902);
    pub(crate) const CAPTURE_UNMATCHED: Self = Self(903);
    pub(crate) const CAPTURE_UNJOINED: Self = Self(904);
    pub(crate) const CAPTURE_ISOLATION: Self = Self(905);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);
    pub(crate) const CAPTURE_WRONG_THREAD: Self = Self(908);
    pub(crate) const GRAPH_EXEC_UPDATE_FAILURE: Self = Self(910);
    pub(crate) const UNKNOWN: Self = Self(999);
}

impl From<Unavailable> for Error {
    fn from(reason: Unavailable) -> Self {
        match reason {
            Unavailable::Inert => Self::NO_DEVICE,
            Unavailable::Failed => Self::UNKNOWN,
            Unavailable::Forked => Self::NOT_INITIALIZED,
            Unavailable::Exiting => Self::UNLOADING,
        }
    }
}

/// What most bodies return: success or a code.
pub(crate) type Outcome = Result<(), Error>;

/// A pointer to device memory in the driver's interface.
pub(crate) type DevicePointer = u64;

/// `dim3`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim3 {
    pub(crate) x: c_uint,
    pub(crate) y: c_uint,
    pub(crate) z: c_uint,
}

/// `cudaLaunchConfig_t` and, with the same layout, `CUlaunchConfig` up to the width of the shared memory size.
#[repr(C)]
pub struct LaunchConfig {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: usize,
    pub(crate) stream: *mut c_void,
    pub(crate) attributes: *mut c_void,
    pub(crate) num_attributes: c_uint,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct DriverLaunchConfig {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: *mut c_void,
    pub(crate) attributes: *mut c_void,
    pub(crate) num_attributes: c_uint,
}

/// `cudaFuncAttributes` (CUDA 13).
#[repr(C)]
pub struct FuncAttributes {
    pub(crate) shared_size_bytes: usize,
    pub(crate) const_size_bytes: usize,
    pub(crate) local_size_bytes: usize,
    pub(crate) max_threads_per_block: c_int,
    pub(crate) num_regs: c_int,
    pub(crate) ptx_version: c_int,
    pub(crate) binary_version: c_int,
    pub(crate) cache_mode_ca: c_int,
    pub(crate) max_dynamic_shared_size_bytes: c_int,
    pub(crate) preferred_shared_memory_carveout: c_int,
    pub(crate) cluster_dim_must_be_set: c_int,
    pub(crate) required_cluster: [c_int; 3],
    pub(crate) cluster_scheduling_policy_preference: c_int,
    pub(crate) non_portable_cluster_size_allowed: c_int,
    pub(crate) reserved: [c_int; 16],
}

/// `cudaPointerAttributes` (CUDA 13).
#[repr(C)]
pub struct PointerAttributes {
    pub(crate) kind: c_int,
    pub(crate) device: c_int,
    pub(crate) device_pointer: *mut c_void,
    pub(crate) host_pointer: *mut c_void,
    pub(crate) reserved: [std::ffi::c_long; 8],
}

/// `CUmemLocation`, `cudaMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: c_int = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: MemLocation,
    pub(crate) win32_meta_data: *mut c_void,
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: c_int,
}

/// `cudaDeviceProp` (CUDA 13).
#[repr(C)]
pub struct DeviceProp {
    pub(crate) name: [c_char; 256],
    pub(crate) uuid: [u8; 16],
    pub(crate) luid: [c_char; 8],
    pub(crate) luid_device_node_mask: c_uint,
    pub(crate) total_global_mem: usize,
    pub(crate) shared_mem_per_block: usize,
    pub(crate) regs_per_block: c_int,
    pub(crate) warp_size: c_int,
    pub(crate) mem_pitch: usize,
    pub(crate) max_threads_per_block: c_int,
    pub(crate) max_threads_dim: [c_int; 3],
    pub(crate) max_grid_size: [c_int; 3],
    pub(crate) total_const_mem: usize,
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
    pub(crate) texture_alignment: usize,
    pub(crate) texture_pitch_alignment: usize,
    pub(crate) multi_processor_count: c_int,
    pub(crate) integrated: c_int,
    pub(crate) can_map_host_memory: c_int,
    /// The texture and surface limits: zero, the emulated device has neither.
    pub(crate) texture_limits: [c_int; 39],
    pub(crate) surface_alignment: usize,
    pub(crate) concurrent_kernels: c_int,
    pub(crate) ecc_enabled: c_int,
    pub(crate) pci_bus_id: c_int,
    pub(crate) pci_device_id: c_int,
    pub(crate) pci_domain_id: c_int,
    pub(crate) tcc_driver: c_int,
    pub(crate) async_engine_count: c_int,
    pub(crate) unified_addressing: c_int,
    pub(crate) memory_bus_width: c_int,
    pub(crate) l2_cache_size: c_int,
    pub(crate) persisting_l2_cache_max_size: c_int,
    pub(crate) max_threads_per_multi_processor: c_int,
    pub(crate) stream_priorities_supported: c_int,
    pub(crate) global_l1_cache_supported: c_int,
    pub(crate) local_l1_cache_supported: c_int,
    pub(crate) shared_mem_per_multiprocessor: usize,
    pub(crate) regs_per_multiprocessor: c_int,
    pub(crate) managed_memory: c_int,
    pub(crate) is_multi_gpu_board: c_int,
    pub(crate) multi_gpu_board_group_id: c_int,
    pub(crate) host_native_atomic_supported: c_int,
    pub(crate) pageable_memory_access: c_int,
    pub(crate) concurrent_managed_access: c_int,
    pub(crate) compute_preemption_supported: c_int,
    pub(crate) can_use_host_pointer_for_registered_mem: c_int,
    pub(crate) cooperative_launch: c_int,
    pub(crate) shared_mem_per_block_optin: usize,
    pub(crate) pageable_memory_access_uses_host_page_tables: c_int,
    pub(crate) direct_managed_mem_access_from_host: c_int,
    pub(crate) max_blocks_per_multi_processor: c_int,
    pub(crate) access_policy_max_window_size: c_int,
    pub(crate) reserved_shared_mem_per_block: usize,
    pub(crate) host_register_supported: c_int,
    pub(crate) sparse_cuda_array_supported: c_int,
    pub(crate) host_register_read_only_supported: c_int,
    pub(crate) timeline_semaphore_interop_supported: c_int,
    pub(crate) memory_pools_supported: c_int,
    pub(crate) gpu_direct_rdma_supported: c_int,
    pub(crate) gpu_direct_rdma_flush_writes_options: c_uint,
    pub(crate) gpu_direct_rdma_writes_ordering: c_int,
    pub(crate) memory_pool_supported_handle_types: c_uint,
    pub(crate) deferred_mapping_cuda_array_supported: c_int,
    pub(crate) ipc_event_supported: c_int,
    pub(crate) cluster_launch: c_int,
    pub(crate) unified_function_pointers: c_int,
    pub(crate) device_numa_config: c_int,
    pub(crate) device_numa_id: c_int,
    pub(crate) mps_enabled: c_int,
    pub(crate) host_numa_id: c_int,
    pub(crate) gpu_pci_device_id: c_uint,
    pub(crate) gpu_pci_subsystem_id: c_uint,
    pub(crate) host_numa_multinode_ipc_supported: c_int,
    pub(crate) reserved: [c_int; 56],
}

// The layouts of the CUDA 13 headers.
const _: () = {
    assert!(size_of::<DeviceProp>() == 1008);
    assert!(std::mem::offset_of!(DeviceProp, multi_processor_count) == 384);
    assert!(std::mem::offset_of!(DeviceProp, surface_alignment) == 552);
    assert!(std::mem::offset_of!(DeviceProp, shared_mem_per_multiprocessor) == 624);
    assert!(std::mem::offset_of!(DeviceProp, reserved_shared_mem_per_block) == 696);
    assert!(std::mem::offset_of!(DeviceProp, reserved) == 784);
    assert!(size_of::<FuncAttributes>() == 144);
    assert!(size_of::<PointerAttributes>() == 88);
    assert!(size_of::<LaunchConfig>() == 56);
    assert!(size_of::<DriverLaunchConfig>() == 56);
    assert!(size_of::<MemAllocationProp>() == 32);
    assert!(size_of::<MemAccessDesc>() == 12);
};
