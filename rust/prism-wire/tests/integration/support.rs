//! The second process, and small engines and clients for the tests.

use prism_wire::client::Client;
use prism_wire::frame::{DeviceMode, Hello};
use prism_wire::message::{Record, RecordKind, Reply};
use prism_wire::server::{Connection, Listener, RecordReader, ReplyWriter, handshake};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Within this time a side must notice that the other died.
pub(crate) const DEATH_LIMIT: Duration = Duration::from_secs(2);

const ENV_ROLE: &str = "PRISM_WIRE_TEST_ROLE";
const ENV_DIR: &str = "PRISM_WIRE_TEST_DIR";

/// A directory that a listener accepts.
pub(crate) fn private_dir() -> TempDir {
    tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap()
}

/// Another process; killed when dropped.
pub(crate) struct Role(Child);

impl Role {
    /// Runs this test binary as `role` of a session in `dir`.
    pub(crate) fn spawn(role: &str, dir: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::play_role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ENV_ROLE, role)
            .env(ENV_DIR, dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
    }

    pub(crate) fn assert_success(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // An error means that it ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the part of the second process; run by other tests"]
fn play_role() {
    let role = std::env::var(ENV_ROLE).expect("only run with a role");
    let dir = PathBuf::from(std::env::var_os(ENV_DIR).unwrap());
    let socket = dir.join("session.sock");
    match role.as_str() {
        "traffic" => crate::traffic::play_client(&socket),
        "flood" => crate::traffic::play_flood(&socket),
        "idle client" => crate::death::play_idle_client(&socket, false),
        "idle client with child" => crate::death::play_idle_client(&socket, true),
        "idle engine" => crate::death::play_idle_engine(&dir, false),
        "idle engine with child" => crate::death::play_idle_engine(&dir, true),
        "exiting client" => crate::session::play_exiting_client(&socket),
        other => panic!("unknown role {other}"),
    }
}

pub(crate) fn hello() -> Hello {
    Hello::new(3, 8192, DeviceMode::Host)
}

/// Accepts the next process and opens a session with it.
pub(crate) fn accept(listener: &Listener, ring_records: u32) -> Connection {
    let stream = listener.accept(Duration::from_secs(30)).unwrap().expect("a process connects");
    handshake(stream, |_| Ok("key=value\n".into()), ring_records).unwrap()
}

/// A session within this process.
pub(crate) fn session(ring_records: u32) -> (Client, Connection) {
    let dir = private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| Client::connect(listener.path(), &hello()).unwrap());
        let connection = accept(&listener, ring_records);
        (client.join().unwrap(), connection)
    })
}

/// The answer that [`answer_queries`] gives.
pub(crate) fn expected_reply(query: &Record) -> Reply {
    Reply { status: 0, reserved: 0, value: (query.a ^ 0x5555) as i64, host_ns: query.host_ns + 1 }
}

/// Reads records until the session ends, answers the queries and hands every record to `see`.
pub(crate) fn answer_queries(mut records: RecordReader, replies: &ReplyWriter, mut see: impl FnMut(&Record)) {
    let mut batch = Vec::new();
    while !records.is_closed() {
        records.wait(Duration::from_secs(10));
        records.pop_batch(&mut batch, 256);
        for record in batch.drain(..) {
            see(&record);
            if RecordKind::from_u16(record.kind).is_some_and(RecordKind::is_query) {
                replies.answer(record.h, expected_reply(&record)).unwrap();
            }
        }
    }
}

pub(crate) fn kernel(a: u64) -> Record {
    Record { kind: RecordKind::Kernel as u16, a, ..Record::default() }
}

pub(crate) fn query(a: u64) -> Record {
    Record { kind: RecordKind::StreamSync as u16, a, host_ns: (a << 1) as i64, ..Record::default() }
}

/// Waits until `happened`, which must be within `limit`.
pub(crate) fn wait_until(limit: Duration, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < limit, "did not happen within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Forks a child that keeps copies of all descriptors for some seconds and does nothing else.
pub(crate) fn fork_idle_child() {
    // SAFETY: the child only calls functions that are safe after a fork of a process with threads.
    unsafe {
        if libc::fork() == 0 {
            libc::sleep(6);
            libc::_exit(0);
        }
    }
}
