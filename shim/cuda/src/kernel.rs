//! Kernels: what the fat binaries register, and launches.
//!
//! Importing a framework registers some 71,000 functions and 48,000 variables: each costs two stored pointers, and nothing
//! is looked at before the first launch of a kernel asks for its name.

use crate::abi::{Dim3, Error, Outcome};
use crate::config::DeviceProfile;
use crate::session::HostCost;
use crate::values::{self, Arguments, Parameter, Plan};
use crate::{demangle, device, handoff, session, stream};
use prism_wire::control::ENV_SESSION;
use prism_wire::message::{Record, RecordKind};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// A kernel that was asked for.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Its name in the device code (mangled).
    pub(crate) name: String,
    /// The name's id; 0 until the first launch.
    name_id: AtomicU32,
    /// What a launch does to the values on the device, found out at the first launch.
    pub(crate) plan: OnceLock<Plan>,
    source: Source,
    /// Most dynamic shared memory it may be launched with, by `cudaFuncSetAttribute`.
    pub(crate) max_dynamic_shared: AtomicI32,
    /// Preferred carveout, by `cudaFuncSetAttribute`.
    pub(crate) carveout: AtomicI32,
    /// May it be launched with clusters of more than eight blocks?
    pub(crate) non_portable_cluster: AtomicI32,
}

/// Where a kernel's parameters are described.
#[derive(Debug)]
enum Source {
    /// In the fat binary at this address.
    Registered(usize),
    /// They were read when its image was loaded, if they could be.
    Loaded(Option<Vec<Parameter>>),
}

impl Kernel {
    /// Its parameters, if they are known.
    pub(crate) fn parameters(&self) -> Option<Vec<Parameter>> {
        match &self.source {
            Source::Registered(image) => values::registered_parameters(*image, &self.name),
            Source::Loaded(parameters) => parameters.clone(),
        }
    }
}

/// The functions and variables of one registered fat binary.
#[derive(Debug)]
struct Module {
    handle: usize,
    functions: Vec<(usize, usize)>,
    variables: Vec<(usize, usize)>,
    /// Least and greatest function address: one comparison rules most modules out.
    bounds: (usize, usize),
}

static MODULES: Mutex<Vec<Module>> = Mutex::new(Vec::new());
/// Kernels by the address they are launched with: of the host function, and of the kernel itself as a handle.
static KERNELS: LazyLock<RwLock<HashMap<usize, &'static Kernel>>> = LazyLock::new(RwLock::default);
/// Device memory of variables by host address: (address, bytes).
static VARIABLES: Mutex<Option<HashMap<usize, (usize, usize)>>> = Mutex::new(None);

fn modules() -> MutexGuard<'static, Vec<Module>> {
    MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set in a process that ranks are forked from: it has no session, they will.
const ENV_FORKS: &str = "PRISM_FORKS";

/// Without a session nothing is kept.
fn keeps() -> bool {
    static KEEPS: OnceLock<bool> = OnceLock::new();
    *KEEPS.get_or_init(|| [ENV_SESSION, ENV_FORKS].iter().any(|name| std::env::var_os(name).is_some()))
}

/// A fat binary starts to register. Its handle is its address.
pub(crate) fn register_module(image: *mut c_void) -> *mut *mut c_void {
    if keeps() {
        let module =
            Module { handle: image as usize, functions: Vec::new(), variables: Vec::new(), bounds: (usize::MAX, 0) };
        modules().push(module);
    }
    image.cast()
}

/// A fat binary goes away (its library is unloaded, or the process ends).
pub(crate) fn unregister_module(handle: *mut *mut c_void) {
    // At the end of the process nobody looks again.
    if keeps() && session::get().is_ok() {
        modules().retain(|module| module.handle != handle as usize);
    }
}

/// The module that registers now: nearly always the last.
fn registering(modules: &mut [Module], handle: usize) -> Option<&mut Module> {
    modules.iter_mut().rev().find(|module| module.handle == handle)
}

/// A kernel: host function and device name, both of which live as long as the module.
pub(crate) fn register_function(handle: *mut *mut c_void, host: *const c_char, name: *const c_char) {
    if keeps()
        && let Some(module) = registering(&mut modules(), handle as usize)
    {
        let host = host as usize;
        module.bounds = (module.bounds.0.min(host), module.bounds.1.max(host));
        module.functions.push((host, name as usize));
    }
}

/// A device variable: the host's shadow and the size.
pub(crate) fn register_variable(handle: *mut *mut c_void, host: *const c_char, bytes: usize) {
    if keeps()
        && let Some(module) = registering(&mut modules(), handle as usize)
    {
        module.variables.push((host as usize, bytes));
    }
}

fn new_kernel(name: String, source: Source) -> &'static Kernel {
    Box::leak(Box::new(Kernel {
        name,
        name_id: AtomicU32::new(0),
        plan: OnceLock::new(),
        source,
        max_dynamic_shared: AtomicI32::new(device::SHARED_PER_BLOCK as c_int),
        carveout: AtomicI32::new(-1),
        non_portable_cluster: AtomicI32::new(0),
    }))
}

/// The kernel with this host function, or whose handle this is.
pub(crate) fn find(address: *const c_void) -> Result<&'static Kernel, Error> {
    let address = address as usize;
    if let Some(kernel) = KERNELS.read().unwrap_or_else(PoisonError::into_inner).get(&address) {
        return Ok(kernel);
    }
    session::get()?;
    let (image, name) = {
        let modules = modules();
        let mut near = modules.iter().filter(|module| (module.bounds.0..=module.bounds.1).contains(&address));
        near.find_map(|module| {
            let (_, name) = module.functions.iter().find(|(host, _)| *host == address)?;
            Some((module.handle, *name as *const c_char))
        })
        .ok_or(Error::INVALID_DEVICE_FUNCTION)?
    };
    // SAFETY: registered as a C string by a module that is still registered.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut kernels = KERNELS.write().unwrap_or_else(PoisonError::into_inner);
    let kernel = kernels.entry(address).or_insert_with(|| new_kernel(name, Source::Registered(image)));
    let kernel: &'static Kernel = kernel;
    kernels.insert(handle(kernel) as usize, kernel);
    Ok(kernel)
}

/// A kernel of a loaded image (Triton, NVRTC), by name. Whether the image has it is not known: its code is not read.
pub(crate) fn of_image(name: String, parameters: Option<Vec<Parameter>>) -> &'static Kernel {
    let kernel = new_kernel(name, Source::Loaded(parameters));
    KERNELS.write().unwrap_or_else(PoisonError::into_inner).insert(handle(kernel) as usize, kernel);
    kernel
}

/// The handle (`cudaKernel_t`, `CUfunction`, `CUkernel`) of a kernel.
pub(crate) fn handle(kernel: &'static Kernel) -> *mut c_void {
    std::ptr::from_ref(kernel).cast_mut().cast()
}

/// The kernel of a handle made by [`handle`].
///
/// # Safety
/// `handle` must come from [`handle`].
#[inline]
pub(crate) unsafe fn of_handle(handle: *const c_void) -> Result<&'static Kernel, Error> {
    if handle.is_null() {
        return Err(Error::INVALID_DEVICE_FUNCTION);
    }
    // SAFETY: kernels are never freed.
    Ok(unsafe { &*handle.cast::<Kernel>() })
}

/// The fat binaries that are registered: address and names of their kernels.
pub(crate) fn registered() -> Vec<(usize, Vec<String>)> {
    // SAFETY: registered as C strings by modules that are still registered.
    let text = |name: usize| unsafe { CStr::from_ptr(name as *const c_char) }.to_string_lossy().into_owned();
    let names = |module: &Module| module.functions.iter().map(|(_, name)| text(*name)).collect();
    modules().iter().map(|module| (module.handle, names(module))).collect()
}

/// Launches a kernel: it is recorded, not run, with the bytes that its arguments say it moves; what it may write is unknown
/// from here on.
///
/// # Safety
/// The arguments must be those of the kernel.
#[inline]
pub(crate) unsafe fn launch_with(
    kernel: &Kernel,
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *const c_void,
    arguments: Arguments,
) -> Outcome {
    let session = device::using()?;
    let threads = u64::from(block.x) * u64::from(block.y) * u64::from(block.z);
    let is_empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
    if is_empty || threads == 0 || threads > device::MAX_THREADS_PER_BLOCK as u64 {
        return Err(Error::INVALID_CONFIGURATION);
    }
    let mut name = kernel.name_id.load(Ordering::Relaxed);
    if name == 0 {
        name = session::name_id(&demangle::plain(&kernel.name));
        kernel.name_id.store(name, Ordering::Relaxed);
    }
    let record = Record {
        kind: RecordKind::Kernel as u16,
        stream: stream::id(stream),
        a: u64::from(grid.x) | u64::from(grid.y) << 32,
        b: u64::from(grid.z) | threads << 32,
        c: shared as u64,
        // SAFETY: the contract of this function.
        d: unsafe { values::launched(kernel, grid, block, arguments) },
        e: name,
        ..Record::default()
    };
    session.append(record, session.config.host.cost(HostCost::KernelLaunch)).map_err(|()| Error::UNKNOWN)?;
    handoff::point();
    Ok(())
}

/// Device address and size of a registered variable, made on first use.
pub(crate) fn variable(host: *const c_void) -> Result<(usize, usize), Error> {
    session::get()?;
    let mut variables = VARIABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let variables = variables.get_or_insert_with(HashMap::new);
    if let Some(found) = variables.get(&(host as usize)) {
        return Ok(*found);
    }
    let bytes = modules()
        .iter()
        .find_map(|module| module.variables.iter().find(|(address, _)| *address == host as usize))
        .map(|(_, bytes)| *bytes)
        .ok_or(Error::INVALID_SYMBOL)?;
    let address = crate::memory::malloc(bytes)? as usize;
    variables.insert(host as usize, (address, bytes));
    Ok((address, bytes))
}

/// How many blocks of `threads` threads and `shared` bytes of dynamic shared memory a multiprocessor holds. Registers are
/// not known and not counted.
pub(crate) fn blocks_per_sm(profile: &DeviceProfile, threads: c_int, shared: usize) -> Result<c_int, Error> {
    if threads <= 0 || threads > device::MAX_THREADS_PER_BLOCK {
        return Err(Error::INVALID_VALUE);
    }
    let warps = (threads + 31) / 32;
    let by_threads = device::max_threads_per_sm(profile) / (warps * 32);
    let by_shared = if shared as u64 > profile.shared_memory_per_block_optin_bytes {
        0
    } else {
        (profile.shared_memory_per_sm_bytes as usize / (shared + device::SHARED_RESERVED)) as c_int
    };
    Ok(by_threads.min(by_shared).min(device::max_blocks_per_sm(profile)))
}
