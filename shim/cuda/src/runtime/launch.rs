//! Registration of kernels by compiled programs, launches, function attributes, occupancy.

use crate::abi::{Dim3, Error, FuncAttributes, LaunchConfig, Outcome};
use crate::export::{Export, Support, exports, put, refused};
use crate::guard::guard;
use crate::kernel::{self, Kernel};
use crate::values::Arguments;
use crate::{device, driver, session, unsupported, values};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::Ordering;

/// A pushed launch configuration.
#[derive(Clone, Copy)]
struct Pushed {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
}

thread_local! {
    static PUSHED: RefCell<Vec<Pushed>> = const { RefCell::new(Vec::new()) };
}

/// Registers a fat binary; the result names it in the calls below.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(image: *mut c_void) -> *mut *mut c_void {
    guard(image.cast(), || kernel::register_module(image))
}

/// Nothing is left to do: what was registered is there at once.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {}

/// Forgets a fat binary.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(handle: *mut *mut c_void) {
    guard((), || kernel::unregister_module(handle));
}

/// Registers a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(
    handle: *mut *mut c_void,
    host: *const c_char,
    _device: *mut c_char,
    name: *const c_char,
    _thread_limit: c_int,
    _thread: *mut c_void,
    _block: *mut c_void,
    _block_dim: *mut c_void,
    _grid_dim: *mut c_void,
    _warp: *mut c_int,
) {
    guard((), || kernel::register_function(handle, host, name));
}

/// Registers a device variable.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar(
    handle: *mut *mut c_void,
    host: *mut c_char,
    _device: *mut c_char,
    _name: *const c_char,
    _external: c_int,
    bytes: usize,
    _constant: c_int,
    _global: c_int,
) {
    guard((), || kernel::register_variable(handle, host, bytes));
}

/// Managed variables are not emulated.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterManagedVar() {
    guard((), || unsupported::call("__cudaRegisterManagedVar"));
}

/// Modules need no initialisation of their own.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(_handle: *mut *mut c_void) -> c_char {
    0
}

/// Keeps a configuration for the launch that follows.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: *mut c_void) -> c_uint {
    guard(1, || {
        PUSHED.with_borrow_mut(|pushed| pushed.push(Pushed { grid, block, shared, stream }));
        0
    })
}

/// # Safety
/// The pointers must be null or valid.
unsafe fn pop(grid: *mut Dim3, block: *mut Dim3, shared: *mut usize, stream: *mut *mut c_void) -> Outcome {
    let pushed = PUSHED.with_borrow_mut(Vec::pop).ok_or(Error::MISSING_CONFIGURATION)?;
    // SAFETY: the contract of this function.
    unsafe {
        put(grid, pushed.grid)?;
        put(block, pushed.block)?;
        put(shared, pushed.shared)?;
        put(stream, pushed.stream)
    }
}

/// Static facts of a kernel. Registers and static shared memory are not known: the code is not read.
fn attributes(function: *const c_void) -> Result<FuncAttributes, Error> {
    let profile = device::profile()?;
    let kernel = kernel::find(function)?;
    let version = profile.major * 10 + profile.minor;
    Ok(FuncAttributes {
        shared_size_bytes: 0,
        const_size_bytes: 0,
        local_size_bytes: 0,
        max_threads_per_block: device::MAX_THREADS_PER_BLOCK,
        num_regs: ASSUMED_REGISTERS,
        ptx_version: version,
        binary_version: version,
        cache_mode_ca: 0,
        max_dynamic_shared_size_bytes: kernel.max_dynamic_shared.load(Ordering::Relaxed),
        preferred_shared_memory_carveout: kernel.carveout.load(Ordering::Relaxed),
        cluster_dim_must_be_set: 0,
        required_cluster: [0; 3],
        cluster_scheduling_policy_preference: 0,
        non_portable_cluster_size_allowed: kernel.non_portable_cluster.load(Ordering::Relaxed),
        reserved: [0; 16],
    })
}

/// Registers per thread that a full multiprocessor of 2,048 threads leaves to each.
pub(crate) const ASSUMED_REGISTERS: c_int = 32;

/// Sets an attribute of a kernel (`cudaFuncAttribute` and `CUfunction_attribute` agree).
pub(crate) fn set_attribute(kernel: &Kernel, attribute: c_int, value: c_int) -> Outcome {
    let profile = device::profile()?;
    match attribute {
        8 if value < 0 || value as u64 > profile.shared_memory_per_block_optin_bytes => Err(Error::INVALID_VALUE),
        8 => {
            kernel.max_dynamic_shared.store(value, Ordering::Relaxed);
            Ok(())
        }
        9 => {
            kernel.carveout.store(value, Ordering::Relaxed);
            Ok(())
        }
        13 => {
            kernel.non_portable_cluster.store(value, Ordering::Relaxed);
            Ok(())
        }
        // Required cluster sizes and their scheduling policy change no duration here.
        10..=12 | 14 | 15 => Ok(()),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn blocks_per_sm(function: *const c_void, threads: c_int, shared: usize) -> Result<c_int, Error> {
    kernel::find(function)?;
    kernel::blocks_per_sm(device::profile()?, threads, shared)
}

/// Clusters of the launch that fit the card at once.
///
/// # Safety
/// `config` must be null or valid.
unsafe fn active_clusters(function: *const c_void, config: *const LaunchConfig) -> Result<c_int, Error> {
    // SAFETY: the contract of this function.
    let config = unsafe { config.as_ref() }.ok_or(Error::INVALID_VALUE)?;
    let threads = config.block.x.saturating_mul(config.block.y).saturating_mul(config.block.z);
    let blocks = blocks_per_sm(function, c_int::try_from(threads).unwrap_or(c_int::MAX), config.shared_bytes)?;
    // The cluster size is in the launch attributes, which are not read: eight is the portable maximum.
    Ok(blocks * device::profile()?.sm_count / 8)
}

fn each(arguments: *mut *mut c_void) -> Arguments {
    Arguments::Each(arguments.cast_const().cast())
}

/// # Safety
/// `config` must be null or valid, the arguments those of the kernel.
unsafe fn launch_config(config: *const LaunchConfig, function: *const c_void, arguments: *mut *mut c_void) -> Outcome {
    // SAFETY: the contract of this function.
    let config = unsafe { config.as_ref() }.ok_or(Error::INVALID_VALUE)?;
    let (kernel, arguments) = (kernel::find(function)?, each(arguments));
    // SAFETY: the contract of this function.
    unsafe { kernel::launch_with(kernel, config.grid, config.block, config.shared_bytes, config.stream, arguments) }
}

/// # Safety
/// `name` must be null or a C string.
unsafe fn entry_point(name: *const c_char, pointer: *mut *mut c_void, version: c_int, status: *mut c_int) -> Outcome {
    if name.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: a C string by the contract of this function.
    let name = unsafe { CStr::from_ptr(name) };
    let found = driver::entry_point(&name.to_string_lossy(), version);
    // SAFETY: pointers of the caller.
    unsafe {
        crate::export::put_optional(status, c_int::from(found.is_none()));
        put(pointer, found.unwrap_or(std::ptr::null()).cast_mut())
    }
}

/// # Safety
/// `name` must be null or a C string, `image` one that is loaded.
unsafe fn library_kernel(image: *const c_void, name: *const c_char) -> Result<*mut c_void, Error> {
    if name.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: a C string by the contract of this function.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_string_lossy().into_owned();
    // SAFETY: the handle of a library is its image.
    let parameters = unsafe { values::loaded_parameters(image) }.remove(&name);
    Ok(kernel::handle(kernel::of_image(name, parameters)))
}

fn get_kernel(function: *const c_void) -> Result<*mut c_void, Error> {
    Ok(kernel::handle(kernel::find(function)?))
}

exports! { runtime, FUNCTIONS:
    __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared: *mut usize, stream: *mut *mut c_void) =>
        pop(grid, block, shared, stream);
    __cudaGetKernel(handle: *mut *mut c_void, function: *const c_void) => put(handle, get_kernel(function)?);
    __cudaLaunchKernel(
        handle: *mut c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void, shared: usize, stream: *mut c_void,
    ) => kernel::launch_with(kernel::of_handle(handle)?, grid, block, shared, stream, each(arguments));
    cudaLaunchKernel(
        function: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void, shared: usize,
        stream: *mut c_void,
    ) => kernel::launch_with(kernel::find(function)?, grid, block, shared, stream, each(arguments));
    cudaLaunchCooperativeKernel(
        function: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void, shared: usize,
        stream: *mut c_void,
    ) => kernel::launch_with(kernel::find(function)?, grid, block, shared, stream, each(arguments));
    cudaLaunchKernelExC(config: *const LaunchConfig, function: *const c_void, arguments: *mut *mut c_void) =>
        launch_config(config, function, arguments);
    cudaGetKernel(handle: *mut *mut c_void, function: *const c_void) => put(handle, get_kernel(function)?);
    cudaGetFuncBySymbol(handle: *mut *mut c_void, function: *const c_void) => put(handle, get_kernel(function)?);
    cudaFuncGetAttributes(result: *mut FuncAttributes, function: *const c_void) => put(result, attributes(function)?);
    cudaFuncSetAttribute(function: *const c_void, attribute: c_int, value: c_int) =>
        set_attribute(kernel::find(function)?, attribute, value);
    cudaFuncSetCacheConfig(function: *const c_void, _config: c_int) => kernel::find(function).map(|_| ());
    cudaFuncSetSharedMemConfig(function: *const c_void, _config: c_int) => kernel::find(function).map(|_| ());
    cudaKernelSetAttributeForDevice(handle: *mut c_void, attribute: c_int, value: c_int, device: c_int) => {
        device::check(device)?;
        set_attribute(kernel::of_handle(handle)?, attribute, value)
    };
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: *const c_void, threads: c_int, shared: usize,
    ) => put(blocks, blocks_per_sm(function, threads, shared)?);
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: *const c_void, threads: c_int, shared: usize, _flags: c_uint,
    ) => put(blocks, blocks_per_sm(function, threads, shared)?);
    cudaOccupancyMaxPotentialClusterSize(size: *mut c_int, function: *const c_void, _config: *const LaunchConfig) => {
        kernel::find(function)?;
        put(size, if device::profile()?.major >= 9 { 8 } else { 1 })
    };
    cudaOccupancyMaxActiveClusters(clusters: *mut c_int, function: *const c_void, config: *const LaunchConfig) =>
        put(clusters, active_clusters(function, config)?);
    cudaGetDriverEntryPoint(name: *const c_char, pointer: *mut *mut c_void, _flags: c_ulonglong, status: *mut c_int) =>
        entry_point(name, pointer, device::CUDA_VERSION, status);
    cudaGetDriverEntryPointByVersion(
        name: *const c_char, pointer: *mut *mut c_void, version: c_uint, _flags: c_ulonglong, status: *mut c_int,
    ) => entry_point(name, pointer, version as c_int, status);
    cudaLibraryLoadData(
        library: *mut *mut c_void, image: *mut c_void, _options: *mut c_int, _values: *mut *mut c_void, _count: c_uint,
        _library_options: *mut c_int, _library_values: *mut *mut c_void, _library_count: c_uint,
    ) => { session::get()?; put(library, image) };
    cudaLibraryUnload(_library: *mut c_void) => session::get().map(|_| ()).map_err(Error::from);
    cudaLibraryGetKernel(handle: *mut *mut c_void, library: *mut c_void, name: *const c_char) => {
        session::get()?;
        put(handle, library_kernel(library, name)?)
    };
}

refused! { runtime, REFUSED:
    cudaFuncGetParamInfo,
    cudaFuncGetName,
    cudaOccupancyAvailableDynamicSMemPerBlock,
    cudaLibraryLoadFromFile,
    cudaLibraryGetGlobal,
    cudaLibraryGetManaged,
    cudaLibraryGetUnifiedFunction,
    cudaLibraryGetKernelCount,
    cudaLibraryEnumerateKernels,
}

const fn served(name: &'static str, address: *const c_void) -> Export {
    Export { name, support: Support::Served, address }
}

/// Functions of this module that are not outcomes.
pub(crate) const PLAIN: &[Export] = &[
    served("__cudaRegisterFatBinary", __cudaRegisterFatBinary as *const c_void),
    served("__cudaRegisterFatBinaryEnd", __cudaRegisterFatBinaryEnd as *const c_void),
    served("__cudaUnregisterFatBinary", __cudaUnregisterFatBinary as *const c_void),
    served("__cudaRegisterFunction", __cudaRegisterFunction as *const c_void),
    served("__cudaRegisterVar", __cudaRegisterVar as *const c_void),
    Export {
        name: "__cudaRegisterManagedVar",
        support: Support::Refused,
        address: __cudaRegisterManagedVar as *const c_void,
    },
    served("__cudaInitModule", __cudaInitModule as *const c_void),
    served("__cudaPushCallConfiguration", __cudaPushCallConfiguration as *const c_void),
];
