//! Loaded images and launches: what Triton and NVRTC programs use. Of an image only the parameters of its kernels are
//! read; a kernel is its name.

use crate::abi::{Dim3, DriverLaunchConfig, Error, Outcome};
use crate::export::{exports, put, refused};
use crate::kernel::{self, Kernel};
use crate::runtime::launch::{ASSUMED_REGISTERS, set_attribute};
use crate::values::{self, Arguments, Parameter};
use crate::{device, session};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Module handles: counted, never dereferenced.
const MODULE_BASE: usize = 0x5056_0000_0000;
static NEXT: AtomicUsize = AtomicUsize::new(1);
/// Parameters of the kernels of loaded images, by module handle.
static IMAGES: Mutex<BTreeMap<usize, BTreeMap<String, Vec<Parameter>>>> = Mutex::new(BTreeMap::new());

/// # Safety
/// `image` must be null or an image.
unsafe fn load(image: *const c_void) -> Result<*mut c_void, Error> {
    device::using()?;
    if image.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the contract of this function.
    Ok(keep(unsafe { values::loaded_parameters(image) }))
}

/// A handle for a module with these kernels.
fn keep(kernels: BTreeMap<String, Vec<Parameter>>) -> *mut c_void {
    let handle = MODULE_BASE + NEXT.fetch_add(1, Ordering::Relaxed) * 16;
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, kernels);
    handle as *mut c_void
}

fn unload(module: *mut c_void) -> Outcome {
    session::get()?;
    IMAGES.lock().unwrap_or_else(PoisonError::into_inner).remove(&(module as usize));
    Ok(())
}

/// # Safety
/// `path` must be null or a C string.
unsafe fn load_file(path: *const c_char) -> Result<*mut c_void, Error> {
    if path.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: a C string by the contract of this function.
    let name = unsafe { CStr::from_ptr(path) }.to_string_lossy();
    device::using()?;
    let image = std::fs::read(Path::new(&*name)).map_err(|_| Error::FILE_NOT_FOUND)?;
    // The table of sections ends an ELF file: one that is cut short cannot be read further than it goes.
    Ok(keep(values::parameters_in_file(&image)))
}

/// # Safety
/// `name` must be null or a C string.
unsafe fn function(module: *mut c_void, name: *const c_char) -> Result<*mut c_void, Error> {
    session::get()?;
    if name.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: a C string by the contract of this function.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_string_lossy().into_owned();
    let images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let parameters = images.get(&(module as usize)).and_then(|kernels| kernels.get(&name)).cloned();
    drop(images);
    Ok(kernel::handle(kernel::of_image(name, parameters)))
}

/// `CUfunction_attribute`.
fn attribute(kernel: &Kernel, number: c_int) -> Result<c_int, Error> {
    let profile = device::profile()?;
    match number {
        0 => Ok(device::MAX_THREADS_PER_BLOCK),
        1..=3 | 7 | 10..=12 | 14 => Ok(0),
        4 => Ok(ASSUMED_REGISTERS),
        5 | 6 => Ok(profile.major * 10 + profile.minor),
        8 => Ok(kernel.max_dynamic_shared.load(Ordering::Relaxed)),
        9 => Ok(kernel.carveout.load(Ordering::Relaxed)),
        13 => Ok(kernel.non_portable_cluster.load(Ordering::Relaxed)),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// # Safety
/// `config` must be null or valid, `handle` a kernel of this library and the arguments its own.
unsafe fn launch_config(config: *const DriverLaunchConfig, handle: *mut c_void, arguments: Arguments) -> Outcome {
    // SAFETY: the contract of this function.
    let (config, kernel) = unsafe { (config.as_ref().ok_or(Error::INVALID_VALUE)?, kernel::of_handle(handle)?) };
    let shared = config.shared_bytes as usize;
    // SAFETY: the contract of this function.
    unsafe { kernel::launch_with(kernel, config.grid, config.block, shared, config.stream, arguments) }
}

exports! { driver, FUNCTIONS:
    cuModuleLoad(module: *mut *mut c_void, path: *const c_char) => put(module, load_file(path)?);
    cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) => put(module, load(image)?);
    cuModuleLoadDataEx(
        module: *mut *mut c_void, image: *const c_void, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void,
    ) => put(module, load(image)?);
    cuModuleLoadFatBinary(module: *mut *mut c_void, image: *const c_void) => put(module, load(image)?);
    cuModuleUnload(module: *mut c_void) => unload(module);
    cuModuleGetFunction(result: *mut *mut c_void, module: *mut c_void, name: *const c_char) =>
        put(result, function(module, name)?);
    cuLibraryLoadData(
        library: *mut *mut c_void, image: *const c_void, _options: *mut c_int, _values: *mut *mut c_void,
        _count: c_uint, _library_options: *mut c_int, _library_values: *mut *mut c_void, _library_count: c_uint,
    ) => put(library, load(image)?);
    cuLibraryUnload(library: *mut c_void) => unload(library);
    cuLibraryGetKernel(result: *mut *mut c_void, library: *mut c_void, name: *const c_char) =>
        put(result, function(library, name)?);
    cuKernelGetFunction(result: *mut *mut c_void, handle: *mut c_void) => put(result, handle);
    cuFuncGetAttribute(value: *mut c_int, number: c_int, handle: *mut c_void) =>
        put(value, attribute(kernel::of_handle(handle)?, number)?);
    cuFuncSetAttribute(handle: *mut c_void, number: c_int, value: c_int) =>
        set_attribute(kernel::of_handle(handle)?, number, value);
    cuFuncSetCacheConfig(handle: *mut c_void, _config: c_int) => kernel::of_handle(handle).map(|_| ());
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, handle: *mut c_void, threads: c_int, shared: usize,
    ) => {
        kernel::of_handle(handle)?;
        put(blocks, kernel::blocks_per_sm(device::profile()?, threads, shared)?)
    };
    cuOccupancyMaxActiveClusters(clusters: *mut c_int, handle: *mut c_void, config: *const DriverLaunchConfig) => {
        kernel::of_handle(handle)?;
        let config = config.as_ref().ok_or(Error::INVALID_VALUE)?;
        let threads = config.block.x.saturating_mul(config.block.y).saturating_mul(config.block.z);
        let profile = device::profile()?;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let blocks = kernel::blocks_per_sm(profile, threads, config.shared_bytes as usize)?;
        put(clusters, blocks * profile.sm_count / 8)
    };
    cuLaunchKernel(
        handle: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: *mut c_void, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) => kernel::launch_with(
        kernel::of_handle(handle)?,
        Dim3 { x: grid_x, y: grid_y, z: grid_z },
        Dim3 { x: block_x, y: block_y, z: block_z },
        shared as usize,
        stream,
        Arguments::of_driver(parameters, extra),
    );
    cuLaunchCooperativeKernel(
        handle: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: *mut c_void, parameters: *mut *mut c_void,
    ) => kernel::launch_with(
        kernel::of_handle(handle)?,
        Dim3 { x: grid_x, y: grid_y, z: grid_z },
        Dim3 { x: block_x, y: block_y, z: block_z },
        shared as usize,
        stream,
        Arguments::of_driver(parameters, std::ptr::null_mut()),
    );
    cuLaunchKernelEx(
        config: *const DriverLaunchConfig, handle: *mut c_void, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) => launch_config(config, handle, Arguments::of_driver(parameters, extra));
    // A tensor map is only read by kernels: an opaque value of the right size.
    cuTensorMapEncodeTiled(
        map: *mut [u64; 16], _kind: c_int, rank: c_uint, _address: *mut c_void, _dimensions: *const u64,
        _strides: *const u64, _box: *const c_uint, _element_strides: *const c_uint, _interleave: c_int, _swizzle: c_int,
        _promotion: c_int, _fill: c_int,
    ) => if (1..=5).contains(&rank) { put(map, [0; 16]) } else { Err(Error::INVALID_VALUE) };
}

refused! { driver, REFUSED:
    cuModuleGetGlobal_v2,
    cuFuncGetModule,
    cuFuncGetName,
    cuKernelGetName,
    cuLibraryGetGlobal,
    cuLinkCreate_v2,
    cuLinkAddData_v2,
    cuLinkAddFile_v2,
    cuLinkComplete,
    cuLinkDestroy,
    cuTensorMapEncodeIm2col,
    cuTensorMapReplaceAddress,
}
