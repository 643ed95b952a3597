//! The process's session with the engine, wherever it lives.
//!
//! On the emulated device `libprism_cuda.so` owns it and offers a table of functions, on a real one `libprism_gpu.so`; on the
//! host device this library connects by itself. It is looked for when a call first needs it, never at load time: the library is preloaded into
//! every child process, most of which never use NCCL.

use crate::abi::Code;
use crate::channel::{self, interrupted};
use crate::comm;
use crate::config::{self, Device};
use crate::guard::{self, Failure, Outcome};
use crate::host::{Gone, Host};
use core::ffi::{CStr, c_int, c_void};
use prism_wire::control::{CONFIG_LIVE, CONFIG_RULES, CONFIG_TURNS, Contribution};
use prism_wire::device::{Launched, SESSION_SYMBOL, SessionTable};
use prism_wire::frame::{Request, ValuesRequest};
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind, Reply};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, Once};

/// Time one call takes on the host when the configuration does not say (`host.nccl_ns`).
const DEFAULT_CALL_NS: i64 = 2_000;
const CALL_NS_KEY: &CStr = c"host.nccl_ns";

/// Who owns the connection.
enum Link {
    /// `libprism_cuda.so` or `libprism_gpu.so`.
    Table(&'static SessionTable),
    /// We do; the device is the host.
    Host(Box<Host>),
}

/// A connection to the engine.
pub(crate) struct Session {
    link: Link,
    call_ns: i64,
    is_dead: AtomicBool,
    /// Ranks that run for real, as far as the engine told (host device only).
    live: usize,
    is_real: bool,
    /// Do ranks take turns (host device only)?
    has_turns: bool,
    /// Has the user rules for values (host device only)?
    has_rules: bool,
}

/// The session of this process once one was found. Never freed: communicators and a watchdog may still look at it.
static CURRENT: AtomicPtr<Session> = AtomicPtr::new(core::ptr::null_mut());
static OPENING: Mutex<()> = Mutex::new(());

/// The session, if a call has opened one.
#[inline]
pub(crate) fn current() -> Option<&'static Session> {
    // SAFETY: only ever set to a leaked box.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

/// The session a live communicator was made in.
#[inline]
pub(crate) fn of_comm() -> Result<&'static Session, Failure> {
    current().ok_or_else(|| Failure::new(Code::InternalError, "the communicator has outlived its session"))
}

/// The session, opened if need be. Without one the answer is NCCL's on a machine without a GPU.
pub(crate) fn open() -> Result<&'static Session, Failure> {
    if let Some(session) = current() {
        prism_callers::insist();
        return Ok(session);
    }
    let _opening = OPENING.lock();
    if let Some(session) = current() {
        return Ok(session);
    }
    if config::session_path().is_some() {
        prism_callers::insist();
    }
    let session: &'static Session = Box::leak(Box::new(Session::find()?));
    watch_process();
    CURRENT.store(core::ptr::from_ref(session).cast_mut(), Ordering::Release);
    Ok(session)
}

/// Registers what must happen on fork and at exit, once.
fn watch_process() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both handlers are plain functions of this library, which is never unloaded (it exports NCCL).
        unsafe {
            libc::pthread_atfork(None, None, Some(after_fork_in_child));
            libc::atexit(at_exit);
        }
    });
}

/// A child has neither the session nor the communicators of its parent; it may open its own. Only atomics: other threads
/// may have held any lock.
extern "C" fn after_fork_in_child() {
    CURRENT.store(core::ptr::null_mut(), Ordering::Release);
    comm::forget_all();
    channel::forget_all();
    crate::notes::forget_all();
}

extern "C" fn at_exit() {
    if let Some(session) = current().filter(|session| !session.is_dead()) {
        crate::guard::call(|| {
            crate::notes::flush(session);
            comm::flush_tiers(session);
            session.send_aborted()
        });
    }
}

impl Session {
    fn find() -> Result<Self, Failure> {
        let path = config::session_path();
        let device = config::device()
            .map_err(|name| Failure::new(Code::UnhandledCudaError, format!("PRISM_DEVICE={name} is not a device")))?;
        // Before the table: a preloaded device library would connect as an emulated device when asked for it.
        if let (Device::Host, Some(path)) = (device, &path) {
            let host = Host::connect(path)?;
            let call_ns = call_ns(host.config("host.nccl_ns"))?;
            let live = host.config(CONFIG_LIVE).map_or(0, |ranks| ranks.split(',').count());
            let is_on = |key| host.config(key) == Some("1");
            let (has_turns, has_rules) = (is_on(CONFIG_TURNS), is_on(CONFIG_RULES));
            let session = Self { live, has_turns, has_rules, ..Self::new(Link::Host(Box::new(host)), call_ns) };
            if has_turns {
                session.await_contributions(&[], &|| false)?;
            }
            return Ok(session);
        }
        if let Some(table) = exported_table()? {
            // SAFETY: a function of the table; the key is a C string.
            let text = unsafe { (table.config)(CALL_NS_KEY.as_ptr()) };
            // SAFETY: null or a C string that lives for ever, says the contract.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy());
            // SAFETY: a function of the table.
            let is_real = unsafe { (table.is_real)() } != 0;
            return Ok(Self { is_real, ..Self::new(Link::Table(table), call_ns(text.as_deref())?) });
        }
        Err(Failure::new(
            Code::UnhandledCudaError,
            match (path, device) {
                (None, _) => "no CUDA-capable device and no prism session",
                (_, Device::Real) => {
                    "PRISM_DEVICE=real, but the library of the real device (libprism_gpu.so) is not loaded or has no session"
                }
                _ => "PRISM_SESSION is set, but the device library (libprism_cuda.so) is not loaded or has no session",
            },
        ))
    }

    fn new(link: Link, call_ns: i64) -> Self {
        let (is_dead, live) = (AtomicBool::new(false), 0);
        Self { link, call_ns, is_dead, live, is_real: false, has_turns: false, has_rules: false }
    }

    /// Did a call find the engine gone?
    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Acquire)
    }

    /// Is the device a real one?
    #[inline]
    pub(crate) fn is_real(&self) -> bool {
        self.real_table().is_some()
    }

    /// The table of a session on a real device.
    #[inline]
    pub(crate) fn real_table(&self) -> Option<&'static SessionTable> {
        match &self.link {
            Link::Table(table) if self.is_real => Some(table),
            _ => None,
        }
    }

    /// Are the buffers given to NCCL plain host memory?
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.link, Link::Host(_))
    }

    #[cold]
    fn died(&self) -> Failure {
        self.is_dead.store(true, Ordering::Release);
        Failure::new(Code::RemoteError, "the prism engine is gone")
    }

    /// Can all members of a communicator of so many ranks be processes that run for real and meet here?
    pub(crate) fn may_meet(&self, nranks: i32) -> bool {
        nranks >= 1 && self.live >= nranks as usize
    }

    /// Appends a record for a call of the program.
    #[inline]
    pub(crate) fn append(&self, record: &Record) -> Outcome {
        self.append_unless(record, &|| false)
    }

    /// Appends a record for a call of the program; stops waiting for room in the ring when cancelled.
    #[inline]
    pub(crate) fn append_unless(&self, record: &Record, is_cancelled: &dyn Fn() -> bool) -> Outcome {
        if comm::any_aborted() {
            self.send_aborted()?;
        }
        self.push(record, self.call_ns, is_cancelled)
    }

    /// Tells the engine of aborted communicators; that costs the program no time.
    #[cold]
    pub(crate) fn send_aborted(&self) -> Outcome {
        comm::take_aborted().into_iter().try_for_each(|id| {
            let record = Record { kind: RecordKind::CommDestroy as u16, e: id, ..Record::default() };
            self.push(&record, 0, &|| false)
        })
    }

    #[inline]
    fn push(&self, record: &Record, cost_ns: i64, is_cancelled: &dyn Fn() -> bool) -> Outcome {
        let is_sent = match &self.link {
            Link::Table(table) => {
                let context = (&raw const is_cancelled).cast();
                // SAFETY: a function of the table, with a valid record; the context is what the function takes it for.
                match unsafe { (table.append_unless)(record, cost_ns, ask_cancelled, context) } {
                    0 => true,
                    1 => return Err(interrupted()),
                    _ => false,
                }
            }
            Link::Host(host) => match host.append(record, cost_ns, is_cancelled) {
                Ok(Some(())) => true,
                Ok(None) => return Err(interrupted()),
                Err(Gone) => false,
            },
        };
        if is_sent { Ok(()) } else { Err(self.died()) }
    }

    /// Waits until the engine has taken in what was appended so far. Costs the program no time.
    pub(crate) fn settle(&self) -> Outcome {
        let is_settled = match &self.link {
            Link::Table(table) => {
                let flags = FLAG_BACKGROUND;
                let query = Record { kind: RecordKind::StreamQuery as u16, flags, ..Record::default() };
                let mut reply = Reply::default();
                // SAFETY: a function of the table; record and reply are valid.
                unsafe { (table.query)(&raw const query, &raw mut reply) == 0 }
            }
            Link::Host(host) => host.settle().is_ok(),
        };
        if is_settled { Ok(()) } else { Err(self.died()) }
    }

    /// On the host device calls return when they are done: waits until the stream is drained.
    #[inline]
    pub(crate) fn complete(&self, is_cancelled: &dyn Fn() -> bool) -> Outcome {
        match &self.link {
            Link::Table(_) => Ok(()),
            Link::Host(host) => match host.drain(is_cancelled) {
                Ok(()) => Ok(()),
                Err(Code::InProgress) => Err(interrupted()),
                Err(Code::RemoteError) => Err(self.died()),
                Err(code) => Err(Failure::new(code, "the prism session failed; the launcher's log says why")),
            },
        }
    }

    /// Sends a control request and returns the answer. A refusal is the caller's invalid usage, in the engine's words.
    pub(crate) fn control(&self, request: &Request) -> Result<Vec<u8>, Failure> {
        let (kind, payload) = request.encode();
        let table = match &self.link {
            Link::Host(host) => {
                return match host.control(kind, &payload) {
                    Ok(answer) => Ok(answer),
                    Err(Some(text)) => Err(Failure::new(Code::InvalidUsage, text)),
                    Err(None) => Err(self.died()),
                };
            }
            Link::Table(table) => table,
        };
        // Answers are numbers or one sentence.
        let mut answer = vec![0_u8; 4_096];
        // SAFETY: a function of the table; both ranges are valid for their lengths.
        let length =
            unsafe { (table.control)(kind as u32, payload.as_ptr(), payload.len(), answer.as_mut_ptr(), answer.len()) };
        match length {
            0.. => {
                answer.truncate(length as usize);
                Ok(answer)
            }
            -2 => {
                let end = answer.iter().position(|byte| *byte == 0).unwrap_or(answer.len());
                Err(Failure::new(Code::InvalidUsage, String::from_utf8_lossy(&answer[..end]).into_owned()))
            }
            -3 => Err(Failure::new(Code::InternalError, "the engine's answer is too long")),
            _ => Err(self.died()),
        }
    }

    /// Can there be members beside this rank that run, or rules for those that do not?
    pub(crate) fn may_exchange(&self) -> bool {
        self.is_host() && (self.has_rules || self.live > 1)
    }

    /// Do ranks take turns, so that one that waits must give its turn up?
    pub(crate) fn has_turns(&self) -> bool {
        self.has_turns
    }

    /// Has the user rules for what virtual members contribute?
    pub(crate) fn has_rules(&self) -> bool {
        self.has_rules
    }

    /// The engine's number of a communicator, and the group ranks of the members that run.
    pub(crate) fn exchange_of(&self, comm_id: u32) -> Result<(u32, Vec<u32>), Failure> {
        let answer = self.control(&Request::CommExchange { comm_id })?;
        let words = words_of(&answer);
        match words[..] {
            [number, count, ref live @ ..] if live.len() == count as usize => Ok((number, live.to_vec())),
            _ => Err(Failure::new(Code::InternalError, "the engine's answer about members makes no sense")),
        }
    }

    /// Tells the engine of contributions in their files. The rank's turn ends here if it `parks`.
    pub(crate) fn contribute(&self, parks: bool, contributions: Vec<Contribution>) -> Outcome {
        self.control(&Request::Contribute { parks, contributions }).map(|_| ())
    }

    /// Waits for contributions of others, and for a turn.
    pub(crate) fn await_contributions(&self, wanted: &[Contribution], is_cancelled: &dyn Fn() -> bool) -> Outcome {
        let request = Request::Await { contributions: wanted.to_vec() };
        loop {
            let answer = self.control(&request)?;
            let words = words_of(&answer);
            match words[..] {
                [0, _] => {}
                [1, _] => return Ok(()),
                [2, rank] => return Err(Failure::new(Code::RemoteError, format!("rank {rank} is gone"))),
                _ => return Err(Failure::new(Code::InternalError, "the engine's answer about others makes no sense")),
            }
            if is_cancelled() {
                self.contribute(false, Vec::new())?;
                return Err(interrupted());
            }
        }
    }

    /// Contributions have been read.
    pub(crate) fn taken(&self, contributions: Vec<Contribution>) -> Outcome {
        if contributions.is_empty() {
            return Ok(());
        }
        self.control(&Request::Taken { contributions }).map(|_| ())
    }

    /// What the user's rules say of virtual members.
    pub(crate) fn values(&self, request: ValuesRequest) -> Result<Vec<u8>, Failure> {
        self.control(&Request::Values(request))
    }

    /// Dense id of the caller's stream.
    #[inline]
    pub(crate) fn stream_id(&self, stream: *const c_void) -> u32 {
        match &self.link {
            // SAFETY: a function of the table.
            Link::Table(table) => unsafe { (table.stream_id)(stream) },
            Link::Host(_) => 0,
        }
    }

    /// Is the stream being captured into a graph?
    #[inline]
    pub(crate) fn is_capturing(&self, stream: *const c_void) -> bool {
        match &self.link {
            // SAFETY: a function of the table.
            Link::Table(table) => unsafe { (table.is_capturing)(stream) != 0 },
            Link::Host(_) => false,
        }
    }

    /// While the stream with this id is being captured: has `run(data)` called at every launch, and `done(data)` once
    /// after the last. False: nobody will call them.
    pub(crate) fn at_launch(&self, stream: u32, run: Launched, done: Launched, data: *mut c_void) -> bool {
        match &self.link {
            // SAFETY: a function of the table; `run` and `done` take this data.
            Link::Table(table) => unsafe { (table.at_launch)(stream, run, done, data) == 0 },
            Link::Host(_) => false,
        }
    }

    /// The calling thread's current device.
    pub(crate) fn current_device(&self) -> i32 {
        match &self.link {
            // SAFETY: a function of the table.
            Link::Table(table) => unsafe { (table.current_device)() },
            Link::Host(_) => 0,
        }
    }

    /// May `bytes` at `address` be read and written here? On the host device the caller's word has to do.
    #[inline]
    pub(crate) fn is_accessible(&self, address: usize, bytes: u64) -> bool {
        if bytes == 0 {
            return true;
        }
        match &self.link {
            // What is wrong the driver finds.
            Link::Table(_) if self.is_real => address != 0,
            Link::Table(table) => {
                let pointer = core::ptr::without_provenance(address);
                // SAFETY: a function of the table; the pointer is only looked up.
                unsafe { (table.is_device_memory)(pointer, bytes as usize) != 0 }
            }
            Link::Host(_) => address != 0,
        }
    }

    /// Tells the device what a receive buffer holds now: a `RECEIVED_*` number. Nothing is tracked on the host device.
    #[inline]
    pub(crate) fn received(&self, to: (usize, u64), from: (usize, u64), name: &CStr, fate: c_int) {
        if let Link::Table(table) = &self.link {
            let (to, bytes) = (core::ptr::without_provenance(to.0), to.1 as usize);
            let (from, from_bytes) = (core::ptr::without_provenance(from.0), from.1 as usize);
            // SAFETY: a function of the table; the addresses are only looked up.
            unsafe { (table.received)(to, bytes, from, from_bytes, name.as_ptr(), fate) };
        }
    }

    /// Allocates device memory; null when there is no room.
    pub(crate) fn alloc(&self, bytes: usize) -> *mut c_void {
        match &self.link {
            // SAFETY: a function of the table.
            Link::Table(table) => unsafe { (table.device_alloc)(bytes) },
            Link::Host(host) => host.alloc(bytes),
        }
    }

    /// Frees memory of [`Self::alloc`]; false if it is not that.
    pub(crate) fn free(&self, pointer: *mut c_void) -> bool {
        match &self.link {
            // SAFETY: a function of the table.
            Link::Table(table) => unsafe { (table.device_free)(pointer) == 0 },
            Link::Host(host) => host.free(pointer),
        }
    }
}

/// Asks the closure that `context` points to.
unsafe extern "C" fn ask_cancelled(context: *const c_void) -> c_int {
    // SAFETY: [`Session::push`] passes this reference to a closure, which outlives the call.
    let is_cancelled = unsafe { &*context.cast::<&dyn Fn() -> bool>() };
    guard::call(|| c_int::from(is_cancelled()))
}

/// The table offered by another library of this process, if it has a session.
fn exported_table() -> Result<Option<&'static SessionTable>, Failure> {
    // SAFETY: looks up a name in the global scope.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SESSION_SYMBOL.as_ptr()) };
    if symbol.is_null() {
        return Ok(None);
    }
    // SAFETY: the name belongs to a function of this type (prism_wire::device).
    let table_of: extern "C" fn() -> *const SessionTable = unsafe { core::mem::transmute(symbol) };
    // SAFETY: null or a table that lives for ever.
    let Some(table) = (unsafe { table_of().as_ref() }) else { return Ok(None) };
    if table.size < size_of::<SessionTable>() {
        return Err(Failure::new(
            Code::InternalError,
            format!(
                "the device library's session table has {} bytes, {} are needed",
                table.size,
                size_of::<SessionTable>()
            ),
        ));
    }
    Ok(Some(table))
}

fn words_of(answer: &[u8]) -> Vec<u32> {
    answer.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

fn call_ns(text: Option<&str>) -> Result<i64, Failure> {
    let Some(text) = text else { return Ok(DEFAULT_CALL_NS) };
    text.trim()
        .parse()
        .ok()
        .filter(|ns| *ns >= 0)
        .ok_or_else(|| Failure::new(Code::InternalError, format!("host.nccl_ns = {text} is not a time in ns")))
}
