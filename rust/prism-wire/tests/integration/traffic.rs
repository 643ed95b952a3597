//! Many records and queries between two processes.

use crate::support::{self, Role, expected_reply, kernel, query};
use prism_wire::client::Client;
use prism_wire::message::{Record, RecordKind};
use prism_wire::server::Listener;
use std::path::Path;
use std::time::Duration;

const THREADS: u64 = 8;
const APPENDS: u64 = 20_000;
const QUERY_EVERY: u64 = 50;
const FLOOD: u64 = 3_000_000;

/// A record that says who sent it, and can be checked as a whole.
fn flood_record(n: u64) -> Record {
    Record {
        kind: RecordKind::Gemm as u16,
        flags: n as u16,
        stream: (n >> 3) as u32,
        host_ns: n as i64,
        a: n,
        b: n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        c: !n,
        d: n.rotate_left(32),
        e: n as u32,
        f: !n as u32,
        g: (n >> 16) as u32,
        h: n as u32 ^ 0xffff,
    }
}

pub(crate) fn play_client(socket: &Path) {
    let client = Client::connect(socket, &support::hello()).unwrap();
    assert_eq!(client.config(), "key=value\n");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let client = &client;
            scope.spawn(move || {
                for n in 0..APPENDS {
                    let id = thread << 32 | n;
                    if n % QUERY_EVERY == 0 {
                        assert_eq!(client.query(query(id)), Ok(expected_reply(&query(id))));
                    } else {
                        client.append(&kernel(id)).unwrap();
                    }
                }
            });
        }
    });
}

pub(crate) fn play_flood(socket: &Path) {
    let client = Client::connect(socket, &support::hello()).unwrap();
    for n in 0..FLOOD {
        client.append(&flood_record(n)).unwrap();
    }
}

#[test]
fn threads_of_a_process_append_and_query_at_once() {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    let client = Role::spawn("traffic", dir.path());
    let connection = support::accept(&listener, 256);
    let mut next = [0; THREADS as usize];
    support::answer_queries(connection.records, &connection.replies, |record| {
        let next = &mut next[(record.a >> 32) as usize];
        assert_eq!(record.a & 0xffff_ffff, *next, "records of a thread stay in order");
        *next += 1;
    });
    assert_eq!(next, [APPENDS; THREADS as usize]);
    client.assert_success();
}

#[test]
fn more_queries_at_once_than_there_are_slots() {
    let (client, connection) = support::session(1024);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..100u64)
            .map(|thread| {
                let client = &client;
                scope.spawn(move || {
                    for n in 0..20 {
                        let query = query(thread << 32 | n);
                        assert_eq!(client.query(query), Ok(expected_reply(&query)));
                    }
                })
            })
            .collect();
        scope.spawn(move || support::answer_queries(connection.records, &connection.replies, |_| {}));
        for thread in threads {
            thread.join().unwrap();
        }
        client.close();
    });
}

#[test]
fn millions_of_records_through_a_small_ring_arrive_whole_and_in_order() {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    let client = Role::spawn("flood", dir.path());
    let mut records = support::accept(&listener, 1024);
    let mut expected = 0;
    let mut batch = Vec::new();
    while !records.records.is_closed() {
        records.records.wait(Duration::from_secs(10));
        // An odd size, so that batches end everywhere in the ring.
        records.records.pop_batch(&mut batch, 333);
        for record in batch.drain(..) {
            assert_eq!(record, flood_record(expected));
            expected += 1;
        }
    }
    assert_eq!(expected, FLOOD);
    client.assert_success();
}
