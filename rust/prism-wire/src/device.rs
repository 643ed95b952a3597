//! The C table through which one preloaded library uses the session that another one owns.
//!
//! On the emulated device `libprism_cuda.so` owns the session (connection, host clock, stream ids), on a real one
//! `libprism_gpu.so`, and exports
//! [`SESSION_SYMBOL`]; `libprism_nccl.so` finds it with `dlsym(RTLD_DEFAULT, ...)`. Where the symbol is absent (host
//! device) `libprism_nccl.so` connects by itself with [`crate::client::Client`].

use crate::message::{Record, Reply};
use core::ffi::{c_char, c_int, c_void};

/// Name of the exported function that returns the table: `extern "C" fn() -> *const SessionTable`, null when the process
/// has no session.
pub const SESSION_SYMBOL: &core::ffi::CStr = c"prism_session_table_v1";

/// Functions of the library that owns the session. All are thread safe and never unwind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionTable {
    /// Size of this struct, to be checked by the user of the table.
    pub size: usize,
    /// Appends `record`; the owner fills in `host_ns` and charges `host_cost_ns` to the host clock first. 0 or -1 (engine gone).
    pub append: unsafe extern "C" fn(record: *const Record, host_cost_ns: i64) -> c_int,
    /// Appends a query record and waits for the answer. 0 or -1 (engine gone).
    pub query: unsafe extern "C" fn(record: *const Record, reply: *mut Reply) -> c_int,
    /// Sends a control request (see [`crate::control`]) and waits for its answer. Writes at most `capacity` bytes to
    /// `answer`. Returns the length of the answer, or -1 when the engine is gone, -2 when the request was refused
    /// (the text is then in `answer`), -3 when `capacity` is too small.
    pub control: unsafe extern "C" fn(
        kind: u32,
        payload: *const u8,
        payload_len: usize,
        answer: *mut u8,
        capacity: usize,
    ) -> isize,
    /// Dense id of a `cudaStream_t` of the calling thread's current device (null = default stream).
    pub stream_id: unsafe extern "C" fn(stream: *const c_void) -> u32,
    /// Is the stream being captured into a CUDA graph? 1 or 0.
    pub is_capturing: unsafe extern "C" fn(stream: *const c_void) -> c_int,
    /// Index of the calling thread's current device.
    pub current_device: unsafe extern "C" fn() -> c_int,
    /// Does `[pointer, pointer + bytes)` lie in emulated device memory (which is readable by the host)? 1 or 0.
    pub is_device_memory: unsafe extern "C" fn(pointer: *const c_void, bytes: usize) -> c_int,
    /// Allocates emulated device memory; null when the card is full.
    pub device_alloc: unsafe extern "C" fn(bytes: usize) -> *mut c_void,
    /// Frees memory of `device_alloc`. 0 or -1 (not such a pointer).
    pub device_free: unsafe extern "C" fn(pointer: *mut c_void) -> c_int,
    /// Value of a key of the configuration text of the welcome message, or null. Valid for ever.
    pub config: unsafe extern "C" fn(key: *const c_char) -> *const c_char,
    /// Is the device a real one, whose memory the host cannot reach? 1 or 0.
    pub is_real: unsafe extern "C" fn() -> c_int,
    /// On a real device: runs `run(data)` once in a thread of the session, while the stream of the calling thread's next
    /// communication is held and before it goes on. 0 or -1 (no such thing here; `run` is not called).
    pub attach: unsafe extern "C" fn(run: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> c_int,
    /// On a real device, in a function given to `attach`: copies between any two places and waits for it. 0 or -1.
    pub copy: unsafe extern "C" fn(to: *mut c_void, from: *const c_void, bytes: usize) -> c_int,
    /// A collective or a message has put `bytes` into `to` of what `from` (`from_bytes` long) contributed, as one of the
    /// `RECEIVED_*` numbers says; `name` is the call's. For memory of the emulated device, to keep track of what is known.
    pub received: unsafe extern "C" fn(
        to: *const c_void,
        bytes: usize,
        from: *const c_void,
        from_bytes: usize,
        name: *const c_char,
        fate: c_int,
    ),
    /// Like `append`, but while the ring is full it waits only until `is_cancelled(context)` is not 0, at which it looks at
    /// least every tenth of a second: then the answer is 1, and nothing was appended.
    pub append_unless: unsafe extern "C" fn(
        record: *const Record,
        host_cost_ns: i64,
        is_cancelled: unsafe extern "C" fn(context: *const c_void) -> c_int,
        context: *const c_void,
    ) -> c_int,
    /// On the emulated device, while the stream with this id is being captured into a CUDA graph: `run(data)` is called at
    /// every launch, after what was captured before, and `done(data)` once when there will be no more launches. 0 or -1
    /// (not captured; neither is called). Nothing happens until the capture has ended.
    pub at_launch: unsafe extern "C" fn(stream: u32, run: Launched, done: Launched, data: *mut c_void) -> c_int,
}

/// A function that is called with the data it was registered with.
pub type Launched = unsafe extern "C" fn(data: *mut c_void);

/// What a receive buffer holds ([`SessionTable::received`]): nothing of what its sender sent, so its bytes are stale.
pub const RECEIVED_NOTHING: c_int = 0;
/// Data of this rank: a copy of what it sent.
pub const RECEIVED_OWN: c_int = 1;
/// Made from data of this rank in place of its peers'.
pub const RECEIVED_MIRRORED: c_int = 2;
