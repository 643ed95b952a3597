//! The process's connection to the engine, and the streams the program named so far.

use crate::clock::Clock;
use crate::driver::{self, CudaError, Driver, Kernel, Stream};
use crate::scheduler::{Hold, Job, NO_STREAM, ReleaseErrors, Scheduler};
use crate::slots::{Slot, Slots};
use prism_wire::client::Client;
use prism_wire::control::{ENV_RANK, ENV_SESSION, ENV_WORLD_SIZE};
use prism_wire::frame::{DeviceMode, Hello, Request};
use prism_wire::message::{Record, RecordKind};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Blocks and threads of the kernel that holds a stream: those of NCCL's own with its 16 channels (an assumption).
const SHAPE: (u32, u32) = (16, 512);
const ENV_BLOCKS: &str = "PRISM_HOLD_BLOCKS";
/// How long the end of the process waits for what is still enqueued.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the process has when it is connected.
pub(crate) struct Session {
    client: &'static Client,
    clock: Clock,
    driver: &'static Driver,
    slots: &'static Slots,
    scheduler: Scheduler,
    shape: (u32, u32),
    streams: Mutex<Streams>,
    kernels: Mutex<BTreeMap<usize, Kernel>>,
    /// Streams of ours for copies, by context.
    copy_streams: Mutex<BTreeMap<usize, usize>>,
    /// Holds of each communicator so far. Held while one is enqueued, so that the order on streams is that of the numbers.
    turns: Mutex<BTreeMap<u32, u64>>,
    config: Mutex<BTreeMap<CString, Option<&'static CString>>>,
}

/// Dense ids of streams.
struct Streams {
    ids: BTreeMap<usize, u32>,
    /// Address of the stream with id `n + 1`.
    addresses: Vec<usize>,
}

static CURRENT: AtomicPtr<Session> = AtomicPtr::new(std::ptr::null_mut());
/// The engine is gone, or the session has failed.
static IS_LOST: AtomicBool = AtomicBool::new(false);
static IS_FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Operations of the open group.
    static GROUP: RefCell<Vec<Record>> = const { RefCell::new(Vec::new()) };
    /// Jobs for the next hold of this thread.
    static JOBS: RefCell<Vec<Job>> = const { RefCell::new(Vec::new()) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One line for the user on standard error.
#[cold]
pub(crate) fn tell(text: &str) {
    // Nothing better can be done if standard error is closed.
    let _ = std::io::stderr().write_all(format!("prism: {text}\n").as_bytes());
}

/// The session, connecting on the first call. `None`: there is none in this process, and why was said.
pub(crate) fn get() -> Option<&'static Session> {
    static CONNECTING: OnceLock<Option<&'static Session>> = OnceLock::new();
    // SAFETY: only ever set to a leaked box, or null.
    if let Some(session) = unsafe { CURRENT.load(Ordering::Acquire).as_ref() } {
        return Some(session);
    }
    if IS_FORKED.load(Ordering::Acquire) {
        return None;
    }
    *CONNECTING.get_or_init(|| {
        let path = std::env::var_os(ENV_SESSION).filter(|path| !path.is_empty())?;
        prism_callers::insist();
        let session = Session::open(Path::new(&path)).inspect_err(|reason| {
            tell(&format!("cannot use the session {}: {reason}", Path::new(&path).display()));
        });
        let session: &'static Session = Box::leak(Box::new(session.ok()?));
        CURRENT.store(std::ptr::from_ref(session).cast_mut(), Ordering::Release);
        // SAFETY: both handlers are plain functions of this library, which is never unloaded (it is preloaded).
        unsafe {
            libc::pthread_atfork(None, None, Some(after_fork));
            libc::atexit(at_exit);
        }
        Some(session)
    })
}

extern "C" fn after_fork() {
    IS_FORKED.store(true, Ordering::Release);
    CURRENT.store(std::ptr::null_mut(), Ordering::Release);
}

extern "C" fn at_exit() {
    // SAFETY: as in `get`; taken away, so that calls after this find no session.
    let session = unsafe { CURRENT.swap(std::ptr::null_mut(), Ordering::AcqRel).as_ref() };
    if let Some(session) = session {
        crate::guard((), || {
            prism_callers::insist();
            session.end();
        });
    }
}

fn environment_number(name: &str) -> Result<u32, String> {
    let text = std::env::var(name).map_err(|_| format!("{name} is not set"))?;
    text.trim().parse().map_err(|_| format!("{name}={text} is not a number"))
}

fn shape() -> Result<(u32, u32), String> {
    let (blocks, threads) = SHAPE;
    let blocks = if std::env::var_os(ENV_BLOCKS).is_some() { environment_number(ENV_BLOCKS)? } else { blocks };
    if (1..=1_024).contains(&blocks) {
        Ok((blocks, threads))
    } else {
        Err(format!("{ENV_BLOCKS}={blocks} is not 1 to 1024"))
    }
}

/// A job for the stream that this thread's next communication holds.
pub(crate) fn attach(job: Job) {
    JOBS.with_borrow_mut(|jobs| jobs.push(job));
}

/// Is the engine gone, or has the session failed?
pub(crate) fn is_lost() -> bool {
    IS_LOST.load(Ordering::Acquire)
}

impl Session {
    fn open(path: &Path) -> Result<Self, String> {
        let in_words = |error: CudaError| error.0;
        let driver = driver::get().map_err(in_words)?;
        let (rank, world_size) = (environment_number(ENV_RANK)?, environment_number(ENV_WORLD_SIZE)?);
        let clock = Clock::from_environment()?;
        let shape = shape()?;
        let slots: &'static Slots = Box::leak(Box::new(Slots::new(driver).map_err(in_words)?));
        let hello = Hello::new(rank, world_size, DeviceMode::Real);
        let client = Client::connect(path, &hello).map_err(|error| error.to_string())?;
        let client: &'static Client = Box::leak(Box::new(client));
        let scheduler = Scheduler::start(client, &IS_LOST, clock, slots, driver)
            .map_err(|error| format!("no thread for the scheduler: {error}"))?;
        Ok(Self {
            client,
            clock,
            driver,
            slots,
            scheduler,
            shape,
            streams: Mutex::new(Streams { ids: BTreeMap::new(), addresses: Vec::new() }),
            kernels: Mutex::default(),
            copy_streams: Mutex::default(),
            turns: Mutex::default(),
            config: Mutex::default(),
        })
    }

    pub(crate) fn client(&self) -> &'static Client {
        self.client
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Time since the session's epoch, ns.
    pub(crate) fn now(&self) -> i64 {
        self.clock.now()
    }

    /// Dense id of a stream; ids start at 1.
    pub(crate) fn stream_id(&self, stream: Stream) -> u32 {
        let address = stream.expose_provenance();
        let mut streams = lock(&self.streams);
        if let Some(id) = streams.ids.get(&address) {
            return *id;
        }
        streams.addresses.push(address);
        let id = streams.addresses.len() as u32;
        streams.ids.insert(address, id);
        id
    }

    fn stream(&self, id: u32) -> Option<Stream> {
        let index = (id as usize).checked_sub(1)?;
        lock(&self.streams).addresses.get(index).map(|address| std::ptr::with_exposed_provenance_mut(*address))
    }

    /// Value of a key of the configuration; lives for ever.
    pub(crate) fn config(&self, key: &std::ffi::CStr) -> Option<&'static CString> {
        let mut known = lock(&self.config);
        if let Some(value) = known.get(key) {
            return *value;
        }
        let value = self.client.config_value(&key.to_string_lossy()).and_then(|text| CString::new(text).ok());
        let value: Option<&'static CString> = value.map(|value| &*Box::leak(Box::new(value)));
        known.insert(key.to_owned(), value);
        value
    }

    /// Copies memory of the calling thread's context; for jobs.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        let context = self.driver.context()?;
        let stream = {
            let mut streams = lock(&self.copy_streams);
            match streams.get(&context) {
                Some(stream) => *stream,
                None => *streams.entry(context).or_insert(self.driver.own_stream()?),
            }
        };
        self.driver.copy(to, from, bytes, stream)
    }

    /// Takes a record of the NCCL stand-in: a communication holds its stream from here on.
    ///
    /// `is_free`: the call belongs to no call of the program (an abort).
    pub(crate) fn append(&self, record: &Record, is_free: bool) -> Result<(), String> {
        use RecordKind as K;
        if is_lost() {
            return Err("the engine is gone, or the session has failed".to_owned());
        }
        match RecordKind::from_u16(record.kind) {
            Some(K::Collective | K::Send | K::Recv) if record.h != 0 => {
                GROUP.with_borrow_mut(|group| group.push(*record));
                Ok(())
            }
            Some(K::Collective | K::Send | K::Recv) => self.hold(vec![*record]),
            Some(K::GroupEnd) => {
                let mut records = GROUP.with_borrow_mut(std::mem::take);
                if records.is_empty() {
                    return Ok(());
                }
                records.push(*record);
                self.hold(records)
            }
            Some(K::CommDestroy) if is_free => {
                self.scheduler.abort(record.e);
                Ok(())
            }
            Some(K::CommDestroy) => {
                let turns = vec![(record.e, lock(&self.turns).get(&record.e).copied().unwrap_or(0))];
                self.add_loose(*record, turns);
                Ok(())
            }
            // A copy of a communicator of one rank is the program's own on a real device.
            Some(K::Memcpy) => Err("a copy is not the session's on a real device".to_owned()),
            _ => {
                self.add_loose(*record, Vec::new());
                Ok(())
            }
        }
    }

    /// Hands over a record that belongs to no stream.
    fn add_loose(&self, record: Record, turns: Vec<(u32, u64)>) {
        let records = vec![record];
        let hold = Hold { stream: NO_STREAM, slot: None, records, turns, waits: false, jobs: Vec::new(), context: 0 };
        self.scheduler.add(hold);
    }

    /// Marks a point of a stream for the engine.
    pub(crate) fn mark(&self, record: Record, stream: Stream) -> Result<(), String> {
        let id = self.stream_id(stream);
        let records = vec![Record { stream: id, ..record }];
        let turns = lock(&self.turns);
        let added = self.enqueue(&[id], records, Vec::new(), false);
        drop(turns);
        added
    }

    fn hold(&self, records: Vec<Record>) -> Result<(), String> {
        let mut streams: Vec<u32> = Vec::new();
        let mut comms: Vec<u32> = Vec::new();
        for record in records.iter().filter(|record| record.kind != RecordKind::GroupEnd as u16) {
            if !streams.contains(&record.stream) {
                streams.push(record.stream);
            }
            if !comms.contains(&record.e) {
                comms.push(record.e);
            }
        }
        let mut all = lock(&self.turns);
        let turns = comms.iter().map(|comm| (*comm, all.get(comm).copied().unwrap_or(0))).collect();
        self.enqueue(&streams, records, turns, true)?;
        for comm in comms {
            *all.entry(comm).or_default() += 1;
        }
        Ok(())
    }

    /// Enqueues the kernel on the first of the streams, with all others waiting for it and it for them.
    fn enqueue(
        &self,
        streams: &[u32],
        records: Vec<Record>,
        turns: Vec<(u32, u64)>,
        waits: bool,
    ) -> Result<(), String> {
        let in_words = |error: CudaError| error.0;
        let jobs = JOBS.with_borrow_mut(std::mem::take);
        let known: Option<Vec<Stream>> = streams.iter().map(|id| self.stream(*id)).collect();
        let known = known.ok_or("a record names a stream nobody asked the id of")?;
        let (first, others) = known.split_first().ok_or("a communication has no stream")?;
        if known.iter().any(|stream| self.driver.is_capturing(*stream)) {
            return Err(
                "communication with virtual members cannot be captured into a CUDA graph on a real device".to_owned()
            );
        }
        let kernel = self.kernel().map_err(in_words)?;
        let slot = self.take_slot()?;
        if !waits {
            self.slots.release(slot);
        }
        for other in others {
            self.driver.order(*other, *first).map_err(in_words)?;
        }
        let shape = if waits { self.shape } else { (1, 32) };
        self.driver.hold(kernel, self.slots.device(slot), slot.number, shape, *first).map_err(in_words)?;
        self.scheduler.add(Hold {
            stream: streams[0],
            slot: Some(slot),
            records,
            turns,
            waits,
            jobs,
            context: kernel.context,
        });
        for other in others {
            self.driver.order(*first, *other).map_err(in_words)?;
        }
        Ok(())
    }

    /// A slot; waits while very many are in use.
    fn take_slot(&self) -> Result<Slot, String> {
        loop {
            if let Some(slot) = self.slots.take() {
                return Ok(slot);
            }
            if is_lost() {
                return Err("the engine is gone".to_owned());
            }
            crate::clock::nap(50_000);
        }
    }

    fn kernel(&self) -> Result<Kernel, CudaError> {
        let context = self.driver.context()?;
        let mut kernels = lock(&self.kernels);
        if let Some(kernel) = kernels.get(&context) {
            return Ok(*kernel);
        }
        let kernel = self.driver.kernel()?;
        kernels.insert(context, kernel);
        Ok(kernel)
    }

    fn end(&self) {
        if let Some(ReleaseErrors { count, p50_ns, p99_ns, max_ns }) = self.scheduler.end(PATIENCE) {
            let request = Request::ReleaseErrors { count, p50_ns, p99_ns, max_ns };
            let (kind, payload) = request.encode();
            // With the engine gone nobody is there to hear it.
            let _ = self.client.control(kind, &payload);
        }
        self.client.close();
    }
}
