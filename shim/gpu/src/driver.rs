//! The CUDA driver of the machine, by the few functions that holding a stream needs (cuda.h, driver API 11.0 and later).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUstream`; null is the legacy default stream.
pub(crate) type Stream = *mut c_void;
type Context = *mut c_void;
type Module = *mut c_void;
type Function = *mut c_void;
type Event = *mut c_void;
type DevicePointer = u64;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: every context and the device may use it.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: c_uint = 2;
/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream.
const NON_BLOCKING: c_uint = 1;

const PTX: &str = concat!(include_str!("hold.ptx"), "\0");

/// A driver call failed; in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) String);

type Result<T> = std::result::Result<T, CudaError>;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($ty:ty),*);)*) => {
        /// Functions of the driver.
        struct Table {
            $($field: unsafe extern "C" fn($($ty),*) -> c_int,)*
        }

        impl Table {
            fn load(library: *mut c_void) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: an open library and a C string.
                        let symbol = unsafe { libc::dlsym(library, $symbol.as_ptr()) };
                        if symbol.is_null() {
                            return Err(CudaError(format!("the CUDA driver has no {}", $symbol.to_string_lossy())));
                        }
                        // SAFETY: the driver's function of this name has this type (cuda.h).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_int>(symbol) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init = c"cuInit": fn(c_uint);
    error_name = c"cuGetErrorName": fn(c_int, *mut *const c_char);
    current_context = c"cuCtxGetCurrent": fn(*mut Context);
    set_context = c"cuCtxSetCurrent": fn(Context);
    device_of_context = c"cuCtxGetDevice": fn(*mut c_int);
    host_alloc = c"cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    device_pointer = c"cuMemHostGetDevicePointer_v2": fn(*mut DevicePointer, *mut c_void, c_uint);
    load_module = c"cuModuleLoadData": fn(*mut Module, *const c_void);
    function = c"cuModuleGetFunction": fn(*mut Function, Module, *const c_char);
    launch = c"cuLaunchKernel": fn(Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void);
    create_event = c"cuEventCreate": fn(*mut Event, c_uint);
    record_event = c"cuEventRecord": fn(Event, Stream);
    destroy_event = c"cuEventDestroy_v2": fn(Event);
    wait_event = c"cuStreamWaitEvent": fn(Stream, Event, c_uint);
    create_stream = c"cuStreamCreate": fn(*mut Stream, c_uint);
    synchronize = c"cuStreamSynchronize": fn(Stream);
    is_capturing = c"cuStreamIsCapturing": fn(Stream, *mut c_int);
    copy = c"cuMemcpyAsync": fn(DevicePointer, DevicePointer, usize, Stream);
    alloc = c"cuMemAlloc_v2": fn(*mut DevicePointer, usize);
    free = c"cuMemFree_v2": fn(DevicePointer);
}

/// The driver, loaded on first use.
pub(crate) struct Driver(Table);

/// The driver of this machine; the error is the same for ever.
pub(crate) fn get() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(Driver::load).as_ref().map_err(Clone::clone)
}

/// A context with the kernel that holds streams in it.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) context: usize,
    function: usize,
}

/// Memory of the host that the device sees at the same address.
pub(crate) struct Mapped {
    pub(crate) host: *mut c_void,
    pub(crate) device: u64,
}

impl Driver {
    fn load() -> Result<Self> {
        // SAFETY: a C string; the driver is never unloaded.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(CudaError("libcuda.so.1 cannot be loaded: there is no CUDA driver on this machine".to_owned()));
        }
        let driver = Self(Table::load(library)?);
        // SAFETY: takes a number.
        driver.check("cuInit", unsafe { (driver.0.init)(0) })?;
        Ok(driver)
    }

    fn check(&self, function: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is writable.
        let known = unsafe { (self.0.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        // SAFETY: a name the driver gave is a C string that lives for ever.
        let name = if known { unsafe { CStr::from_ptr(name) }.to_string_lossy() } else { "unknown error".into() };
        Err(CudaError(format!("{function}: {name} ({code})")))
    }

    /// The calling thread's context; an error where the program has none yet.
    pub(crate) fn context(&self) -> Result<usize> {
        let mut context: Context = std::ptr::null_mut();
        // SAFETY: `context` is writable.
        self.check("cuCtxGetCurrent", unsafe { (self.0.current_context)(&raw mut context) })?;
        if context.is_null() {
            return Err(CudaError("the calling thread has no CUDA context".to_owned()));
        }
        Ok(context.expose_provenance())
    }

    /// Makes a context that of the calling thread.
    pub(crate) fn enter(&self, context: usize) -> Result<()> {
        let context = std::ptr::with_exposed_provenance_mut(context);
        // SAFETY: a context the driver gave.
        self.check("cuCtxSetCurrent", unsafe { (self.0.set_context)(context) })
    }

    /// Index of the calling thread's device; 0 where it has no context.
    pub(crate) fn device(&self) -> c_int {
        let mut device = 0;
        // SAFETY: `device` is writable.
        if unsafe { (self.0.device_of_context)(&raw mut device) } == 0 { device } else { 0 }
    }

    /// Host memory for both sides, zeroed. Lives as long as the process.
    pub(crate) fn mapped(&self, bytes: usize) -> Result<Mapped> {
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: `host` is writable.
        self.check("cuMemHostAlloc", unsafe { (self.0.host_alloc)(&raw mut host, bytes, PORTABLE_AND_MAPPED) })?;
        // SAFETY: just allocated with this size.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        let mut device = 0;
        // SAFETY: `device` is writable, `host` is mapped memory.
        self.check("cuMemHostGetDevicePointer", unsafe { (self.0.device_pointer)(&raw mut device, host, 0) })?;
        Ok(Mapped { host, device })
    }

    /// The holding kernel, loaded into the calling thread's context.
    pub(crate) fn kernel(&self) -> Result<Kernel> {
        let context = self.context()?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the image is a C string of PTX, the results are writable.
        unsafe {
            self.check("cuModuleLoadData", (self.0.load_module)(&raw mut module, PTX.as_ptr().cast()))?;
            let name = c"prism_hold".as_ptr();
            self.check("cuModuleGetFunction", (self.0.function)(&raw mut function, module, name))?;
        }
        Ok(Kernel { context, function: function.expose_provenance() })
    }

    /// Enqueues the holding kernel: `blocks` of `threads` stay until word 1 of the slot becomes `number`.
    pub(crate) fn hold(&self, kernel: Kernel, slot: u64, number: u32, shape: (u32, u32), stream: Stream) -> Result<()> {
        let (mut slot, mut number) = (slot, number);
        let mut arguments: [*mut c_void; 2] = [(&raw mut slot).cast(), (&raw mut number).cast()];
        let function = std::ptr::with_exposed_provenance_mut(kernel.function);
        let (blocks, threads) = shape;
        let none = std::ptr::null_mut();
        // SAFETY: the function takes a pointer and a number, copied by the call; the stream is the program's.
        let code =
            unsafe { (self.0.launch)(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.as_mut_ptr(), none) };
        self.check("cuLaunchKernel", code)
    }

    /// What is enqueued on `later` from now on waits for what is on `earlier` now.
    pub(crate) fn order(&self, earlier: Stream, later: Stream) -> Result<()> {
        let mut event: Event = std::ptr::null_mut();
        // SAFETY: `event` is writable; the streams are the program's; an event may be destroyed while it is waited for.
        unsafe {
            self.check("cuEventCreate", (self.0.create_event)(&raw mut event, NO_TIMING))?;
            let done = self
                .check("cuEventRecord", (self.0.record_event)(event, earlier))
                .and_then(|()| self.check("cuStreamWaitEvent", (self.0.wait_event)(later, event, 0)));
            self.check("cuEventDestroy", (self.0.destroy_event)(event)).and(done)
        }
    }

    /// A stream of ours in the calling thread's context.
    pub(crate) fn own_stream(&self) -> Result<usize> {
        let mut stream: Stream = std::ptr::null_mut();
        // SAFETY: `stream` is writable.
        self.check("cuStreamCreate", unsafe { (self.0.create_stream)(&raw mut stream, NON_BLOCKING) })?;
        Ok(stream.expose_provenance())
    }

    /// Copies between any two places the driver knows, and waits for it.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize, stream: usize) -> Result<()> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: the driver checks addresses; the stream is ours.
        unsafe {
            self.check("cuMemcpyAsync", (self.0.copy)(to, from, bytes, stream))?;
            self.check("cuStreamSynchronize", (self.0.synchronize)(stream))
        }
    }

    /// Is the stream being captured into a graph?
    pub(crate) fn is_capturing(&self, stream: Stream) -> bool {
        let mut status = 0;
        // SAFETY: `status` is writable. A stream that cannot be asked (the legacy one, while another captures) is none.
        unsafe { (self.0.is_capturing)(stream, &raw mut status) == 0 && status != 0 }
    }

    /// Device memory; `None` when the card is full.
    pub(crate) fn alloc(&self, bytes: usize) -> Option<u64> {
        let mut address = 0;
        // SAFETY: `address` is writable.
        (unsafe { (self.0.alloc)(&raw mut address, bytes) } == 0).then_some(address)
    }

    /// Gives device memory back; false if the driver does not know it.
    pub(crate) fn free(&self, address: u64) -> bool {
        // SAFETY: the driver checks the address.
        unsafe { (self.0.free)(address) == 0 }
    }
}
