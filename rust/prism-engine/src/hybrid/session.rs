//! Threads and sockets around [`super::state::State`]: one listener, and for each process one thread for its control
//! requests and one for its records.

use super::exchange::{Exchange, Waited};
use super::helper;
use super::state::{Part, State};
use super::summary::{self, RecordingInfo, Summary};
use super::values::{Rows, ValueProvider};
use super::{SessionError, SessionMode, SessionOptions, Status};
use crate::cost::durations::Durations;
use crate::graph::Graph;
use crate::ids::Rank;
use crate::sim::{Peers, SimError, SimOptions, Simulation};
use crate::slice::recording::RankRecording;
use prism_wire::control::{
    CONFIG_FORESIGHT, CONFIG_HOST_TIME, CONFIG_LIVE, CONFIG_RULES, CONFIG_TURNS, HOST_TIME_MEASURED, KIND_RECEIVE,
};
use prism_wire::frame::{Request, ValuesRequest};
use prism_wire::server::{Connection, ControlChannel, Listener, RecordReader, SessionCloser, handshake};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Records a process may run ahead of the engine: 64 Ki records are 4 MiB of shared memory.
const RING_RECORDS: u32 = 1 << 16;
/// How often waiting threads look whether the session ends.
const POLL: Duration = Duration::from_millis(100);
const BATCH: usize = 1024;
/// How long a value set in the rendezvous store may take to get here.
const STORE_DELAY: Duration = Duration::from_secs(2);

/// One run of live ranks against virtual (or absent) peers.
pub struct Session {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    graph: Option<Arc<Graph>>,
    options: SessionOptions,
}

struct Shared {
    state: Mutex<State>,
    config_text: String,
    exchange: Arc<Exchange>,
    provider: OnceLock<Arc<dyn ValueProvider>>,
    /// The session ends: threads stop when they have nothing to do.
    stop: AtomicBool,
    /// Processes that still run are cut off: their end says nothing about them.
    is_closing: AtomicBool,
    process_threads: Mutex<Vec<JoinHandle<()>>>,
    closers: Mutex<Vec<SessionCloser>>,
}

/// A panic of one session thread must not hide the state from the others: the failure is reported, not the poison.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// Prepares a session. Emulating needs the graph of the job; collecting has none.
    pub fn new(options: SessionOptions, graph: Option<Arc<Graph>>) -> Result<Self, SessionError> {
        options.check(graph.as_deref())?;
        let sims = simulations(&options, graph.as_ref())?;
        let durations = Durations::new(options.profile.clone(), options.kernels.clone());
        let records = options.mode == SessionMode::Collect;
        let state = State::new(sims, durations, options.world_size, &options.live, records);
        let shared = Shared {
            exchange: Arc::clone(&state.exchange),
            state: Mutex::new(state),
            config_text: config_text(&options),
            provider: OnceLock::new(),
            stop: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            process_threads: Mutex::new(Vec::new()),
            closers: Mutex::new(Vec::new()),
        };
        Ok(Self { shared: Arc::new(shared), threads: Mutex::new(Vec::new()), graph, options })
    }

    /// Listens in `directory` (made with mode 0700) and returns the socket's path for `PRISM_SESSION`.
    pub fn listen(&self, directory: &Path) -> Result<PathBuf, SessionError> {
        let listener =
            Listener::bind(directory).map_err(|source| SessionError::Listen { path: directory.to_owned(), source })?;
        let path = listener.path().to_owned();
        self.shared.exchange.set_directory(directory);
        let shared = Arc::clone(&self.shared);
        lock(&self.threads).push(spawn("prism-listen", move || accept_loop(&listener, &shared)));
        Ok(path)
    }

    /// At most so many live ranks run at a time, the others wait in their NCCL calls (host device only). Before any process
    /// starts; 0 is no limit.
    pub fn play_at_once(&self, ranks: usize) {
        self.shared.exchange.set_at_once(ranks);
    }

    /// May the process of `rank` start? Yes takes a turn, which it keeps until it waits or ends. Always, without a limit.
    pub fn take_turn(&self, rank: u32) -> bool {
        self.shared.exchange.take_turn(rank)
    }

    /// Keeps what live ranks do as recordings, also when emulating. Before any process starts.
    pub fn keep_recordings(&self) {
        lock(&self.shared.state).keep_recordings();
    }

    /// Who says what virtual members contribute (host device only). Before any process starts, and once.
    pub fn set_values(&self, provider: Arc<dyn ValueProvider>) {
        // A second one has nothing to say.
        let _ = self.shared.provider.set(provider);
    }

    /// A live rank sets a key of the rendezvous store; returns what the store should keep.
    pub fn store_set(&self, key: &str, value: &[u8]) -> Vec<u8> {
        lock(&self.shared.state).identity.store_set(key, value)
    }

    /// The value of a key that only an absent rank would set, if the engine can make it up.
    pub fn absent_value(&self, key: &str) -> Option<Vec<u8>> {
        lock(&self.shared.state).identity.absent_value(key)
    }

    /// The launcher saw the process of `rank` exit.
    pub fn process_exited(&self, rank: u32, exit_code: i32) {
        self.shared.exchange.end(rank);
        // Its last records may still be in the ring; the record thread ends the rank once the ring is empty, unless it
        // never connected.
        let mut state = lock(&self.shared.state);
        let Some(process) = state.processes.get_mut(&rank) else { return };
        process.exited = Some(exit_code);
        if process.pid.is_none() {
            process.exited = None;
            state.end(rank, Some(exit_code));
        }
    }

    /// Where every live rank is.
    pub fn status(&self) -> Status {
        summary::status(&lock(&self.shared.state))
    }

    /// What `rank` did, as a recording (when collecting, or if they are [kept](Self::keep_recordings)).
    pub fn recording(&self, rank: u32) -> Option<RankRecording> {
        lock(&self.shared.state).recording(rank)
    }

    /// What other ranks of the role need to know of `rank`'s recording (only when collecting).
    pub fn recording_info(&self, rank: u32) -> Option<RecordingInfo> {
        summary::recording_info(&lock(&self.shared.state), rank)
    }

    /// Ends the session and says what happened. Processes still connected see the engine go.
    pub fn finish(&self) -> Summary {
        self.shared.stop.store(true, Ordering::Release);
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            let _ = thread.join();
        }
        self.await_threads();
        self.cut_off();
        for thread in std::mem::take(&mut *lock(&self.shared.process_threads)) {
            let _ = thread.join();
        }
        summary::summarise(&mut lock(&self.shared.state), &self.options, self.graph.as_deref())
    }
}

/// What a process is told when it connects.
fn config_text(options: &SessionOptions) -> String {
    let live: Vec<String> = options.live.iter().map(u32::to_string).collect();
    let host_time =
        if options.measured_host_time { format!("{CONFIG_HOST_TIME}={HOST_TIME_MEASURED}\n") } else { String::new() };
    let foresight = if is_foreseeable(options) { format!("{CONFIG_FORESIGHT}=1\n") } else { String::new() };
    format!("{}{CONFIG_LIVE}={}\n{host_time}{foresight}", options.profile.config_text(), live.join(","))
}

/// Does equal work on an idle stream take equal time? Then a process need not ask when it is over each time.
fn is_foreseeable(options: &SessionOptions) -> bool {
    !options.measured_host_time && options.perturb.is_empty()
}

/// One simulation for all live ranks beside the virtual ones, or one for each live rank beside absent ones.
fn simulations(options: &SessionOptions, graph: Option<&Arc<Graph>>) -> Result<Vec<Simulation>, SimError> {
    let sim_options = |live: &[u32]| SimOptions {
        profile: options.profile.clone(),
        slow: options.slow.iter().map(|(rank, factor)| (Rank(*rank), *factor)).collect(),
        perturb: options.perturb.clone(),
        live: live.iter().copied().map(Rank).collect(),
        trace: false,
        batches: true,
        symmetry: false,
    };
    match (options.mode, graph) {
        (SessionMode::Emulate, Some(graph)) => {
            crate::replay::check_events(graph)?;
            let peers = Peers::Graph(Arc::clone(graph));
            Ok(vec![Simulation::new(peers, options.world_size, sim_options(&options.live))?])
        }
        _ => options
            .live
            .iter()
            .map(|rank| Simulation::new(Peers::Absent, options.world_size, sim_options(&[*rank])))
            .collect(),
    }
}

impl Session {
    /// Gives the threads of processes that have died time to take their last records in.
    fn await_threads(&self) {
        let deadline = Instant::now() + 3 * POLL;
        while Instant::now() < deadline && !lock(&self.shared.process_threads).iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn cut_off(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        for closer in std::mem::take(&mut *lock(&self.shared.closers)) {
            closer.close();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.cut_off();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread for a process: the system has room")
}

fn accept_loop(listener: &Listener, shared: &Arc<Shared>) {
    while !shared.stop.load(Ordering::Acquire) {
        match listener.accept(POLL) {
            Ok(Some(stream)) => welcome(stream, shared),
            Ok(None) => {}
            Err(error) => {
                lock(&shared.state).fail(format!("the session's socket failed: {error}"));
                return;
            }
        }
    }
}

fn welcome(stream: UnixStream, shared: &Arc<Shared>) {
    let mut admitted = None;
    let admit = |hello: &prism_wire::frame::Hello| {
        let part = lock(&shared.state).connect(hello.rank, hello.world_size, hello.pid)?;
        admitted = Some((hello.rank, part));
        Ok(shared.config_text())
    };
    // A refused or broken handshake is the process's problem; it has been told.
    let connection = handshake(stream, admit, RING_RECORDS);
    let Some((rank, part)) = admitted else { return };
    let Ok(Connection { control, records, replies, .. }) = connection else {
        if part == Part::Player {
            lock(&shared.state).forget(rank);
        }
        return;
    };
    lock(&shared.closers).push(control.closer());
    let mut threads = lock(&shared.process_threads);
    let for_control = Arc::clone(shared);
    let for_records = Arc::clone(shared);
    if part == Part::Helper {
        threads.push(spawn("prism-control", move || helper::control_loop(rank, control, &for_control.state)));
        threads.push(spawn("prism-records", move || {
            helper::record_loop(rank, records, &replies, &for_records.state, &for_records.stop, POLL);
        }));
        return;
    }
    lock(&shared.state).attach(rank, replies);
    threads.push(spawn("prism-control", move || control_loop(rank, control, &for_control)));
    threads.push(spawn("prism-records", move || record_loop(rank, records, &for_records)));
}

fn control_loop(rank: u32, mut control: ControlChannel, shared: &Shared) {
    // A frame that makes no sense ends the connection like a dead peer does: the record thread reports the rank's end.
    while let Ok(Some((kind, payload))) = control.recv() {
        let answer = match Request::decode(kind, &payload) {
            Ok(request) => shared.control(rank, request),
            Err(error) => Err(error.to_string()),
        };
        let sent = match answer {
            Ok(payload) => control.answer(kind, &payload),
            Err(text) => control.refuse(&text),
        };
        if sent.is_err() {
            break;
        }
    }
}

/// The root of a group publishes its unique id in the store and creates the communicator at once, without waiting for the
/// store: the id may still be on its way to us.
fn await_identity(rank: u32, request: &Request, shared: &Shared) {
    let Request::CommInit { nranks, unique_id, .. } = request else { return };
    let deadline = Instant::now() + STORE_DELAY;
    loop {
        let state = lock(&shared.state);
        // Without process groups only the world can be meant, and its size tells it.
        let is_told = *nranks == state.world_size && state.processes.get(&rank).is_none_or(|own| own.groups.is_empty());
        if is_told || state.identity.key_of(unique_id).is_some() || Instant::now() >= deadline {
            return;
        }
        drop(state);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn record_loop(rank: u32, mut records: RecordReader, shared: &Shared) {
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        let has_records = records.wait(POLL);
        batch.clear();
        records.pop_batch(&mut batch, BATCH);
        if !batch.is_empty() {
            lock(&shared.state).feed(rank, &batch);
        } else if !has_records {
            if records.is_closed() {
                break;
            }
            if shared.stop.load(Ordering::Acquire) {
                return;
            }
        }
    }
    // A process that was cut off has not ended by itself: its peers do not wait for it in vain.
    if !shared.is_closing.load(Ordering::Acquire) {
        let mut state = lock(&shared.state);
        state.disconnect(rank);
        if state.processes.get(&rank).is_some_and(|process| process.has_ended) {
            shared.exchange.end(rank);
        }
    }
}

impl Shared {
    /// What a process is told when it connects.
    fn config_text(&self) -> String {
        let turns = if self.exchange.has_turns() { format!("{CONFIG_TURNS}=1\n") } else { String::new() };
        let rules = if self.provider.get().is_some() { format!("{CONFIG_RULES}=1\n") } else { String::new() };
        format!("{}{turns}{rules}", self.config_text)
    }

    /// Answers a request. Those that wait, or that run code of the user, do so without the state.
    fn control(&self, rank: u32, request: Request) -> Result<Vec<u8>, String> {
        match request {
            Request::Contribute { parks, contributions } => {
                self.exchange.contribute(rank, parks, &contributions).map(|()| Vec::new())
            }
            Request::Await { contributions } => self.wait(rank, &contributions),
            Request::Taken { contributions } => {
                self.exchange.taken(&contributions);
                Ok(Vec::new())
            }
            Request::Values(asked) => self.values(rank, &asked),
            request => {
                await_identity(rank, &request, self);
                return lock(&self.state).control(rank, request);
            }
        }
        .inspect_err(|message| lock(&self.state).fail(message.clone()))
    }

    fn wait(&self, rank: u32, contributions: &[prism_wire::control::Contribution]) -> Result<Vec<u8>, String> {
        if let Some(failure) = lock(&self.state).failure.clone() {
            return Err(failure);
        }
        let (state, gone): (u32, u32) = match self.exchange.wait(rank, contributions) {
            Waited::NotYet => (0, 0),
            Waited::Ready => (1, 0),
            Waited::Gone(rank) => (2, rank),
            Waited::Deadlock(text) => return Err(text),
        };
        Ok([state.to_le_bytes(), gone.to_le_bytes()].concat())
    }

    fn values(&self, rank: u32, asked: &ValuesRequest) -> Result<Vec<u8>, String> {
        let (call, exchange) = lock(&self.state).value_call(rank, asked)?;
        let Some(provider) = self.provider.get() else { return Ok(Rows::NoRule.encode()) };
        let ask = || provider.values(&call)?.checked(&call);
        // What is for one member only is nobody else's answer.
        let is_own =
            asked.kind == KIND_RECEIVE || matches!(call.kind.as_str(), "ReduceScatter" | "AlltoAll" | "Scatter");
        if is_own {
            return ask().map(|rows| rows.encode());
        }
        let num_live = call.members.iter().filter(|member| self.is_live(**member)).count();
        let which = (exchange, call.number, asked.kind);
        self.exchange.answer(which, num_live as u32, ask).map(|rows| rows.encode())
    }

    fn is_live(&self, rank: u32) -> bool {
        lock(&self.state).processes.contains_key(&rank)
    }
}
