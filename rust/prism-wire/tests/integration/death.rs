//! Either side dies without a word; the other notices in time, wherever it waits.

use crate::support::{self, DEATH_LIMIT, Role, fork_idle_child, hello, kernel, query};
use prism_wire::client::{Client, ControlError, Disconnected};
use prism_wire::control::ControlKind;
use prism_wire::server::{Connection, Listener};
use std::path::Path;
use std::time::{Duration, Instant};

/// Ring of the engine that does not read.
const IDLE_RING_RECORDS: u32 = 4096;

pub(crate) fn play_idle_client(socket: &Path, with_child: bool) {
    let client = Client::connect(socket, &hello()).unwrap();
    if with_child {
        fork_idle_child();
    }
    for n in 0..10 {
        client.append(&kernel(n)).unwrap();
    }
    std::thread::sleep(Duration::from_secs(30));
}

pub(crate) fn play_idle_engine(dir: &Path, with_child: bool) {
    let listener = Listener::bind(dir).unwrap();
    let _connection = support::accept(&listener, IDLE_RING_RECORDS);
    if with_child {
        fork_idle_child();
    }
    std::thread::sleep(Duration::from_secs(30));
}

fn engine_notices(role: &str) {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    let mut client = Role::spawn(role, dir.path());
    let Connection { mut control, mut records, replies, .. } = support::accept(&listener, 64);
    support::wait_until(Duration::from_secs(20), || records.wait(Duration::from_secs(1)));
    // Time to fork, and for both waits to be deep in sleep.
    std::thread::sleep(Duration::from_millis(300));
    std::thread::scope(|scope| {
        let control = scope.spawn(move || {
            assert!(control.recv().unwrap().is_none());
            (Instant::now(), control)
        });
        let reader = scope.spawn(move || {
            let mut popped = 0;
            while !records.is_closed() {
                records.wait(Duration::from_secs(60));
                popped += records.pop_batch(&mut Vec::new(), 100);
            }
            assert_eq!(popped, 10, "what it appended before it died is read");
            Instant::now()
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!control.is_finished() && !reader.is_finished());
        let killed = Instant::now();
        client.kill();
        assert!(reader.join().unwrap() - killed < DEATH_LIMIT);
        assert!(control.join().unwrap().0 - killed < DEATH_LIMIT);
    });
    assert!(replies.answer(0, prism_wire::message::Reply::default()).is_err());
}

#[test]
fn engine_notices_that_a_process_is_killed() {
    engine_notices("idle client");
}

#[test]
fn engine_notices_although_a_child_of_the_process_lives_on() {
    engine_notices("idle client with child");
}

fn client_notices(role: &str) {
    let dir = support::private_dir();
    let mut engine = Role::spawn(role, dir.path());
    let socket = dir.path().join("session.sock");
    support::wait_until(Duration::from_secs(20), || socket.exists());
    let mut client = None;
    // The file is there a moment before somebody listens.
    support::wait_until(Duration::from_secs(20), || {
        client = Client::connect(&socket, &hello()).ok();
        client.is_some()
    });
    let client = client.unwrap();
    std::thread::sleep(Duration::from_millis(300));
    std::thread::scope(|scope| {
        let waits = [
            scope.spawn(|| {
                assert_eq!(client.query(query(1)), Err(Disconnected));
                Instant::now()
            }),
            scope.spawn(|| {
                // Nobody reads: this fills the ring and then waits for space.
                while client.append(&kernel(1)).is_ok() {}
                Instant::now()
            }),
            scope.spawn(|| {
                assert_eq!(client.control(ControlKind::Unsupported, b"f"), Err(ControlError::Disconnected));
                Instant::now()
            }),
        ];
        std::thread::sleep(Duration::from_millis(300));
        assert!(waits.iter().all(|wait| !wait.is_finished()));
        let killed = Instant::now();
        engine.kill();
        for wait in waits {
            assert!(wait.join().unwrap() - killed < DEATH_LIMIT);
        }
    });
    assert_eq!(client.append(&kernel(0)), Err(Disconnected));
    assert_eq!(client.query(query(0)), Err(Disconnected));
}

#[test]
fn process_notices_that_the_engine_is_killed() {
    client_notices("idle engine");
}

#[test]
fn process_notices_although_a_child_of_the_engine_lives_on() {
    client_notices("idle engine with child");
}

#[test]
fn a_program_that_only_appends_notices_too() {
    let dir = support::private_dir();
    let mut engine = Role::spawn("idle engine", dir.path());
    let socket = dir.path().join("session.sock");
    let mut client = None;
    support::wait_until(Duration::from_secs(20), || {
        client = Client::connect(&socket, &hello()).ok();
        client.is_some()
    });
    engine.kill();
    std::thread::sleep(Duration::from_millis(100));
    let client = client.unwrap();
    let start = Instant::now();
    let mut appended = 0;
    while client.append(&kernel(0)).is_ok() {
        appended += 1;
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < DEATH_LIMIT);
    }
    assert!(appended < IDLE_RING_RECORDS, "noticed before the ring was full");
}
