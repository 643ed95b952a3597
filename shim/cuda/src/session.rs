//! The process's one connection to the engine. Nothing happens before the first call that needs a device.

use crate::config::Config;
use crate::foresight::{Foresight, Moment, State as Foreseen};
use crate::libs::cupti::{collector, tsc};
use crate::{capture, clock, handoff, hosttime, real};
use prism_wire::client::{Client, ControlError};
use prism_wire::control::{ControlKind, ENV_RANK, ENV_SESSION, ENV_WORLD_SIZE};
use prism_wire::frame::{DeviceMode, Hello};
use prism_wire::message::{FLAG_BACKGROUND, FLAG_FORESEEN, PROTOCOL_VERSION, Record, Reply, ReplyStatus};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unavailable {
    /// `PRISM_SESSION` is not set: no device in this process.
    Inert,
    /// The connection failed or the engine is gone (said on stderr).
    Failed,
    /// A forked child of a process with a session: as with CUDA, the device cannot be used.
    Forked,
    /// The process is ending.
    Exiting,
}

/// Call costs of the host, from the `[host]` table of the profile.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostCost {
    /// A kernel launch, and any library call that stands for one (GEMM, attention).
    KernelLaunch,
    /// A copy or fill.
    Memcpy,
    /// An event or stream call that does not wait.
    Event,
    /// The host's part of a synchronisation.
    Sync,
    /// A driver allocation or free.
    Malloc,
    /// Reading a clock.
    ClockRead,
    /// Asking whether an event or a stream is complete.
    Query,
}

/// The connection and what was learned from its welcome message.
pub(crate) struct Session {
    client: Client,
    /// The device and host profile.
    pub(crate) config: Config,
    names: Mutex<HashMap<String, u32>>,
    /// Where equal work takes equal time.
    foresight: Option<Foresight>,
}

/// `0`: every synchronisation asks the engine.
const ENV_FORESIGHT: &str = "PRISM_FORESIGHT";

const UNCONNECTED: u8 = 0;
const CONNECTED: u8 = 1;
const FORKED: u8 = 2;
const EXITING: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(UNCONNECTED);
static SESSION: AtomicPtr<Session> = AtomicPtr::new(std::ptr::null_mut());
static OUTCOME: OnceLock<Result<(), Unavailable>> = OnceLock::new();

/// The session, connecting on the first call.
#[inline]
pub(crate) fn get() -> Result<&'static Session, Unavailable> {
    if STATE.load(Ordering::Acquire) == CONNECTED {
        // SAFETY: SESSION is set before STATE becomes CONNECTED, to a leaked box that is never freed.
        return Ok(unsafe { &*SESSION.load(Ordering::Acquire) });
    }
    get_slow()
}

/// Is there a usable session? Never connects.
#[inline]
pub(crate) fn is_connected() -> bool {
    STATE.load(Ordering::Acquire) == CONNECTED
}

/// Has any call of this process needed a device, whether there was one or not?
pub(crate) fn is_touched() -> bool {
    OUTCOME.get().is_some()
}

/// Has this process ever connected, and not been forked since? True until the very end: the virtual clock goes on after
/// the device is gone.
#[inline]
pub(crate) fn has_clock() -> bool {
    matches!(STATE.load(Ordering::Acquire), CONNECTED | EXITING)
}

#[cold]
fn get_slow() -> Result<&'static Session, Unavailable> {
    match STATE.load(Ordering::Acquire) {
        FORKED => return Err(Unavailable::Forked),
        // A watchdog looks on while the process takes itself apart. An error would have it write a report with strings that
        // are destroyed already; what it asks changes nothing.
        EXITING if !clock::is_driver() && !SESSION.load(Ordering::Acquire).is_null() => {}
        EXITING => return Err(Unavailable::Exiting),
        _ => {}
    }
    clock::inside(|| *OUTCOME.get_or_init(connect))?;
    // SAFETY: a successful `connect` has stored a leaked box.
    Ok(unsafe { &*SESSION.load(Ordering::Acquire) })
}

fn connect() -> Result<(), Unavailable> {
    let Some(path) = std::env::var_os(ENV_SESSION).filter(|path| !path.is_empty()) else {
        return Err(Unavailable::Inert);
    };
    prism_callers::insist();
    match open(Path::new(&path)) {
        Ok(session) => {
            clock::start(session.config.host.cost(HostCost::ClockRead));
            if session.config.measures_host {
                hosttime::measure();
            }
            SESSION.store(Box::into_raw(Box::new(session)), Ordering::Release);
            // SAFETY: both handlers are plain functions of this library, which is never unloaded (it is preloaded).
            unsafe {
                libc::pthread_atfork(None, None, Some(after_fork));
                libc::atexit(at_exit);
            }
            STATE.store(CONNECTED, Ordering::Release);
            Ok(())
        }
        Err(reason) => {
            real::log(&format!("prism: cannot use the session {}: {reason}\n", Path::new(&path).display()));
            Err(Unavailable::Failed)
        }
    }
}

fn open(path: &Path) -> Result<Session, String> {
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        rank: env_number(ENV_RANK)?,
        world_size: env_number(ENV_WORLD_SIZE)?,
        pid: std::process::id(),
        device: DeviceMode::Emulated,
    };
    let client = Client::connect(path, &hello).map_err(|error| error.to_string())?;
    let config = Config::parse(client.config())?;
    let is_wanted = std::env::var_os(ENV_FORESIGHT).is_none_or(|value| value != "0");
    let foresight = (config.foresees && is_wanted).then(Foresight::default);
    Ok(Session { client, config, names: Mutex::default(), foresight })
}

fn env_number(name: &str) -> Result<u32, String> {
    let text = std::env::var(name).map_err(|_| format!("{name} is not set"))?;
    text.parse().map_err(|_| format!("{name}={text} is not a number"))
}

extern "C" fn after_fork() {
    STATE.store(FORKED, Ordering::Release);
    tsc::after_fork();
}

extern "C" fn at_exit() {
    crate::values::flush();
    let was = STATE.swap(EXITING, Ordering::AcqRel);
    // What was loaded after the connection; a forked child is not the rank.
    if was == CONNECTED {
        clock::inside(prism_callers::insist);
    }
}

/// Charges `host_cost_ns` to the host clock, stamps `record` with it and appends it. Makes the calling thread one that
/// drives the device. A lost engine is said once on stderr; later queries then fail.
#[inline]
pub(crate) fn append(record: Record, host_cost_ns: i64) {
    if let Ok(session) = get() {
        // The error is kept by `lost`, which every query looks at.
        let _ = session.append(record, host_cost_ns);
    }
}

/// Asks the engine and waits; `None` when there is no session, the engine is gone, or the session has failed.
///
/// A thread that drives the device continues at the answer's time; the query of any other thread is a background query
/// and moves nothing. The caller charges what the call itself costs ([`clock::charge_if_driver`]).
pub(crate) fn query(record: Record) -> Option<Reply> {
    get().ok()?.query(record, clock::is_driver())
}

/// Why a control request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlFailure {
    /// The engine refused; the text says why.
    Refused(String),
    /// There is no session, or the engine is gone.
    Gone(Unavailable),
}

/// Sends a control request and waits for its answer. A lost engine is said once on stderr.
pub(crate) fn control(kind: ControlKind, payload: &[u8]) -> Result<Vec<u8>, ControlFailure> {
    let session = get().map_err(ControlFailure::Gone)?;
    at_engine(|| session.client.control(kind, payload)).map_err(|error| match error {
        ControlError::Refused(text) => ControlFailure::Refused(text),
        ControlError::Disconnected => {
            lost(&error.to_string());
            ControlFailure::Gone(Unavailable::Failed)
        }
    })
}

/// Tells the engine a process group, sooner or later. False: it will not hear of it.
pub(crate) fn note_group(ranks: &[u32], name: &str) -> bool {
    get().is_ok_and(|session| at_engine(|| session.client.note_group(ranks, name)).is_ok())
}

/// Tells the engine now what process groups it has not been told.
pub(crate) fn flush_groups() {
    if let Ok(session) = get()
        && let Err(ControlError::Disconnected) = at_engine(|| session.client.flush_groups())
    {
        lost("the engine is gone");
    }
}

/// The id of a name, told to the engine on its first use. 0 without a session.
pub(crate) fn name_id(name: &str) -> u32 {
    get().map_or(0, |session| session.name_id(name))
}

/// The cost of a kind of call in ns of host time. 0 without a session.
#[inline]
pub(crate) fn host_cost(cost: HostCost) -> i64 {
    get().map_or(0, |session| session.config.host.cost(cost))
}

/// The text of a name id.
pub(crate) fn name_text(id: u32) -> Option<String> {
    let names = get().ok()?.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    names.iter().find(|(_, known)| **known == id).map(|(text, _)| text.clone())
}

impl Session {
    /// See [`append`].
    #[inline]
    pub(crate) fn append(&self, record: Record, host_cost_ns: i64) -> Result<(), ()> {
        let Some(record) = Self::stamped(record, host_cost_ns) else { return Ok(()) };
        let _order = self.noted(&record);
        // `Client::append` reads no clock, so the hot path can do without `clock::inside`.
        self.client.append(&record).map_err(|error| lost(&error.to_string()))
    }

    /// The record with the host clock of its call, charged for it. `None`: a graph that is being captured has taken it.
    #[inline]
    fn stamped(mut record: Record, host_cost_ns: i64) -> Option<Record> {
        clock::set_driver();
        clock::forget_reads();
        let host_cost_ns = hosttime::cost(host_cost_ns);
        record.host_ns = clock::charge(host_cost_ns);
        if capture::is_active() && capture::take(&record) {
            return None;
        }
        if collector::is_on() {
            collector::note(&mut record, host_cost_ns, 0);
        }
        Some(record)
    }

    /// Like [`Self::append`], but waits for room in the ring only until `is_cancelled`: then false.
    pub(crate) fn append_unless(
        &self,
        record: Record,
        host_cost_ns: i64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<bool, ()> {
        let Some(record) = Self::stamped(record, host_cost_ns) else { return Ok(true) };
        let _order = self.noted(&record);
        self.client.append_unless(&record, is_cancelled).map_err(|error| lost(&error.to_string()))
    }

    /// See [`query`]; `drives` says whether the answer moves the host clock.
    pub(crate) fn query(&self, mut record: Record, drives: bool) -> Option<Reply> {
        if drives {
            clock::charge(hosttime::passed());
        }
        record.host_ns = clock::now();
        if !drives {
            record.flags |= FLAG_BACKGROUND;
        }
        if drives && let Some(host_ns) = self.foresee(&record) {
            return Some(Reply { host_ns, ..Reply::default() });
        }
        let reply = match at_engine(|| self.client.query(record)) {
            Ok(reply) => reply,
            Err(error) => {
                lost(&error.to_string());
                return None;
            }
        };
        if reply.status != ReplyStatus::Ok as u32 {
            lost(if reply.status == ReplyStatus::Failed as u32 {
                "the session has failed; the reason is in the launcher's log"
            } else {
                "the engine is gone"
            });
            return None;
        }
        if drives {
            clock::advance_to(reply.host_ns);
            hosttime::restart();
            if let Some(foresight) = &self.foresight {
                foresight.lock().learn(&record, Moment::of(&reply));
            }
            if collector::is_on() {
                collector::note_query(&record);
            }
        }
        Some(reply)
    }

    /// Looks at a record that is about to be appended; no other thread appends one while the guard lives.
    #[inline]
    fn noted(&self, record: &Record) -> Option<MutexGuard<'_, Foreseen>> {
        let mut state = self.foresight.as_ref()?.lock();
        state.note(record);
        Some(state)
    }

    /// Goes on after a synchronisation whose end is known; tells the engine.
    fn foresee(&self, record: &Record) -> Option<i64> {
        let mut state = self.foresight.as_ref()?.lock();
        if collector::is_on() {
            state.forget();
            return None;
        }
        let Moment { ps, host_ns } = state.foresee(record)?;
        let told = Record { flags: FLAG_FORESEEN, a: ps.cast_unsigned(), ..*record };
        self.client.append(&told).map_err(|error| lost(&error.to_string())).ok()?;
        clock::advance_to(host_ns);
        Some(host_ns)
    }

    fn name_id(&self, name: &str) -> u32 {
        let mut names = self.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(id) = names.get(name) {
            return *id;
        }
        let id = names.len() as u32 + 1;
        let mut payload = id.to_le_bytes().to_vec();
        payload.extend_from_slice(name.as_bytes());
        // The table stays locked, so that no other thread uses the id before the engine knows it.
        if let Err(error) = at_engine(|| self.client.control(ControlKind::Name, &payload)) {
            lost(&error.to_string());
        }
        names.insert(name.to_owned(), id);
        id
    }
}

/// Runs `body`, which waits for the engine: with the real clocks, and without background threads losing patience.
fn at_engine<T>(body: impl FnOnce() -> T) -> T {
    clock::inside(|| handoff::at_engine(body))
}

/// Says once that the engine cannot be used any more.
#[cold]
fn lost(reason: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        real::log(&format!("prism: {reason}\n"));
    }
}
