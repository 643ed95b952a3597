//! A small engine for tests: every kernel, copy and collective takes a fixed time, answers are exact for that model, and
//! all that the program sent can be looked at.

use prism_wire::control::ControlKind;
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind, Reply, ReplyStatus};
use prism_wire::server::{Connection, Listener, handshake};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What every operation takes on its stream.
pub(crate) const OPERATION_NS: i64 = 50_000;

/// The profile the engine answers with.
pub(crate) const PROFILE: &str = "device.name=Test Card 9000\ndevice.memory_bytes=1073741824\ndevice.context_bytes=134217728\n\
    device.sm_count=132\ndevice.compute_capability=9.0\ndevice.l2_bytes=52428800\n\
    device.shared_memory_per_sm_bytes=233472\ndevice.shared_memory_per_block_optin_bytes=232448\n\
    device.clock_khz=1980000\ndevice.memory_clock_khz=2619000\ndevice.memory_bus_bits=5120\nnode.gpus=8\n\
    host.kernel_launch_ns=4000\nhost.memcpy_ns=6000\nhost.event_ns=1000\nhost.sync_ns=2000\nhost.malloc_ns=100000\n\
    host.nccl_ns=5000\nhost.clock_read_ns=20\n";

/// What one session sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sent {
    /// Records in order.
    pub(crate) records: Vec<Record>,
    /// Control requests in order.
    pub(crate) controls: Vec<(ControlKind, Vec<u8>)>,
}

impl Sent {
    /// Records of a kind.
    #[allow(dead_code, reason = "not every user of this module asks")]
    pub(crate) fn of(&self, kind: RecordKind) -> Vec<Record> {
        self.records.iter().filter(|record| record.kind == kind as u16).copied().collect()
    }

    /// Names by id.
    #[allow(dead_code, reason = "not every user of this module asks")]
    pub(crate) fn names(&self) -> BTreeMap<u32, String> {
        let name = |payload: &[u8]| {
            let id = u32::from_le_bytes(payload[..4].try_into().expect("four bytes"));
            (id, String::from_utf8_lossy(&payload[4..]).into_owned())
        };
        let names = self.controls.iter().filter(|(kind, _)| *kind == ControlKind::Name);
        names.map(|(_, payload)| name(payload)).collect()
    }
}

/// Streams and events of a program.
#[derive(Default)]
struct Model {
    streams: BTreeMap<u32, i64>,
    events: BTreeMap<u32, i64>,
}

impl Model {
    fn work(&mut self, record: &Record) {
        let end = self.streams.entry(record.stream).or_default();
        *end = (*end).max(record.host_ns) + OPERATION_NS;
    }

    fn end(&self, stream: u32) -> i64 {
        self.streams.get(&stream).copied().unwrap_or(0)
    }

    fn event(&self, event: u32) -> i64 {
        self.events.get(&event).copied().unwrap_or(0)
    }

    /// Applies a record; the answer's value and host time if it is a query.
    fn apply(&mut self, record: &Record) -> Option<(i64, i64)> {
        use RecordKind as K;
        let now = record.host_ns;
        match RecordKind::from_u16(record.kind).expect("known kind") {
            K::Kernel | K::Gemm | K::Operator | K::Memcpy | K::Memset | K::Collective | K::Send | K::Recv => {
                self.work(record);
                None
            }
            K::EventRecord => {
                let end = self.end(record.stream).max(now);
                self.events.insert(record.e, end);
                None
            }
            K::EventWait => {
                let event = self.event(record.e);
                let end = self.streams.entry(record.stream).or_default();
                *end = (*end).max(event);
                None
            }
            K::StreamSync => Some((0, self.end(record.stream).max(now))),
            K::EventSync => Some((0, self.event(record.e).max(now))),
            K::DeviceSync => Some((0, self.streams.values().copied().max().unwrap_or(0).max(now))),
            K::EventQuery => Some((i64::from(self.event(record.e) <= now), now)),
            K::StreamQuery => Some((i64::from(self.end(record.stream) <= now), now)),
            K::EventElapsed => Some((self.event(record.f) - self.event(record.e), now)),
            _ => None,
        }
    }
}

/// A running engine. It serves any number of sessions until it is dropped.
pub(crate) struct Engine {
    path: PathBuf,
    sessions: Arc<Mutex<Vec<Arc<Mutex<Sent>>>>>,
    stop: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Listens in `dir` (made if missing) and answers with `profile`.
    pub(crate) fn start(dir: &Path, profile: &str) -> Self {
        let listener = Listener::bind(dir).expect("private directory");
        let path = listener.path().to_owned();
        let sessions = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (sessions, stop, profile) = (Arc::clone(&sessions), Arc::clone(&stop), profile.to_owned());
            move || serve(&listener, &profile, &sessions, &stop)
        });
        Self { path, sessions, stop, thread: Some(thread) }
    }

    /// The socket, for `PRISM_SESSION`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What each session has sent, in the order of connecting. All sessions must be over.
    pub(crate) fn finish(mut self) -> Vec<Sent> {
        self.stop_thread();
        let sessions = self.sessions.lock().expect("no panic");
        sessions.iter().map(|sent| sent.lock().expect("no panic").clone()).collect()
    }

    fn stop_thread(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the engine's threads do not panic");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop_thread();
    }
}

fn serve(
    listener: &Listener,
    profile: &str,
    sessions: &Mutex<Vec<Arc<Mutex<Sent>>>>,
    stop: &std::sync::atomic::AtomicBool,
) {
    let mut threads = Vec::new();
    loop {
        let Some(stream) = listener.accept(Duration::from_millis(20)).expect("listening") else {
            if stop.load(std::sync::atomic::Ordering::Acquire) {
                break;
            }
            continue;
        };
        let connection = handshake(stream, |_| Ok(profile.to_owned()), 4_096).expect("handshake");
        let sent = Arc::new(Mutex::new(Sent::default()));
        sessions.lock().expect("no panic").push(Arc::clone(&sent));
        threads.push(std::thread::spawn(move || session(connection, &sent)));
    }
    for thread in threads {
        thread.join().expect("sessions do not panic");
    }
}

fn session(connection: Connection, sent: &Arc<Mutex<Sent>>) {
    let Connection { mut control, mut records, replies, .. } = connection;
    let controls = std::thread::spawn({
        let sent = Arc::clone(sent);
        move || {
            while let Ok(Some((kind, payload))) = control.recv() {
                sent.lock().expect("no panic").controls.push((kind, payload));
                if control.answer(kind, &[]).is_err() {
                    break;
                }
            }
            control
        }
    });
    let mut model = Model::default();
    loop {
        while let Some(record) = records.pop() {
            sent.lock().expect("no panic").records.push(record);
            if let Some((value, host_ns)) = model.apply(&record) {
                let is_background = record.flags & FLAG_BACKGROUND != 0;
                let host_ns = if is_background { record.host_ns } else { host_ns };
                let reply = Reply { status: ReplyStatus::Ok as u32, reserved: 0, value, host_ns };
                replies.answer(record.h, reply).expect("a waiting slot");
            }
        }
        if !records.wait(Duration::from_millis(100)) && records.is_closed() {
            break;
        }
    }
    // Kept until here: dropping the channel would end the session.
    drop(controls.join().expect("the control thread does not panic"));
}
