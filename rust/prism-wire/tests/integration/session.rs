//! Opening, using and ending a session between two parties that play by the rules.

use crate::support::{self, Role, hello, kernel, query};
use prism_wire::client::{Client, ConnectError, ControlError, Disconnected};
use prism_wire::control::ControlKind;
use prism_wire::frame::{CommSplitAnswer, NamedGroup, Request};
use prism_wire::message::Reply;
use prism_wire::server::{Connection, HandshakeError, Listener, handshake};
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) fn play_exiting_client(socket: &Path) {
    let client = Client::connect(socket, &hello()).unwrap();
    for n in 0..50 {
        client.append(&kernel(n)).unwrap();
    }
    // No close, no destructor: as when a program calls exit.
    std::process::exit(0);
}

#[test]
fn control_requests_are_answered_or_refused() {
    let (client, mut connection) = support::session(64);
    std::thread::scope(|scope| {
        let engine = scope.spawn(move || {
            let mut seen = Vec::new();
            while let Some((kind, payload)) = connection.control.recv().unwrap() {
                let request = Request::decode(kind, &payload).unwrap();
                match &request {
                    Request::CommSplit { color: -1, .. } => connection.control.refuse("no such parent").unwrap(),
                    Request::CommSplit { .. } => {
                        let answer = CommSplitAnswer { nranks: 4, group_rank: 2 }.encode();
                        connection.control.answer(kind, &answer).unwrap();
                    }
                    _ => connection.control.answer(kind, &[]).unwrap(),
                }
                seen.push(request);
            }
            seen
        });
        let split = |color| Request::CommSplit { comm_id: 2, parent: 1, color, key: 0, group_name: "tp".into() };
        let group = Request::Group { ranks: (0..100_000).collect(), name: "dp".into() };
        let send = |request: &Request| {
            let (kind, payload) = request.encode();
            client.control(kind, &payload)
        };
        assert_eq!(send(&group), Ok(vec![]));
        let answer = send(&split(0)).unwrap();
        assert_eq!(CommSplitAnswer::decode(&answer), Ok(CommSplitAnswer { nranks: 4, group_rank: 2 }));
        assert_eq!(send(&split(-1)), Err(ControlError::Refused("no such parent".into())));
        assert_eq!(send(&split(1)), Ok(answer), "a refusal does not end the session");
        let too_long = vec![0; prism_wire::frame::MAX_PAYLOAD_BYTES + 1];
        assert!(matches!(client.control(ControlKind::Unsupported, &too_long), Err(ControlError::Refused(_))));
        client.close();
        assert_eq!(engine.join().unwrap(), [group, split(0), split(-1), split(1)]);
    });
}

#[test]
fn groups_of_others_are_told_together_before_what_may_need_them() {
    let (client, mut connection) = support::session(64);
    std::thread::scope(|scope| {
        let engine = scope.spawn(move || {
            let mut seen = Vec::new();
            while let Some((kind, payload)) = connection.control.recv().unwrap() {
                connection.control.answer(kind, &[]).unwrap();
                seen.push(Request::decode(kind, &payload).unwrap());
            }
            seen
        });
        let (rank, others) = (hello().rank, [hello().rank + 1, hello().rank + 2]);
        client.note_group(&others, "a").unwrap();
        client.note_group(&[others[0]], "b").unwrap();
        client.note_group(&[rank, others[0]], "own").unwrap();
        client.note_group(&others, "c").unwrap();
        client.flush_groups().unwrap();
        client.flush_groups().unwrap();
        client.note_group(&others, "d").unwrap();
        client.close();
        assert!(client.note_group(&others, "e").is_err() && client.flush_groups().is_err());
        let named = |ranks: &[u32], name: &str| NamedGroup { ranks: ranks.to_vec(), name: name.to_owned() };
        let expected = [
            Request::Groups(vec![named(&others, "a"), named(&others[..1], "b")]),
            Request::Group { ranks: vec![rank, others[0]], name: "own".to_owned() },
            Request::Groups(vec![named(&others, "c")]),
            Request::Groups(vec![named(&others, "d")]),
        ];
        assert_eq!(engine.join().unwrap(), expected);
    });
}

#[test]
fn many_groups_of_others_are_told_in_pieces() {
    let (client, mut connection) = support::session(64);
    std::thread::scope(|scope| {
        let engine = scope.spawn(move || {
            let (mut frames, mut names) = (0, Vec::new());
            while let Some((kind, payload)) = connection.control.recv().unwrap() {
                connection.control.answer(kind, &[]).unwrap();
                let Request::Groups(groups) = Request::decode(kind, &payload).unwrap() else { panic!("groups only") };
                frames += 1;
                names.extend(groups.into_iter().map(|group| group.name));
            }
            (frames, names)
        });
        let names: Vec<String> = (0..20_000).map(|number| number.to_string()).collect();
        let others: Vec<u32> = (1..17).map(|distance| hello().rank + distance).collect();
        for name in &names {
            client.note_group(&others, name).unwrap();
        }
        client.close();
        let (frames, told) = engine.join().unwrap();
        assert_eq!(told, names, "all of them, in order");
        assert!((2..20).contains(&frames), "{frames} frames");
    });
}

#[test]
fn threads_take_turns_on_the_control_socket() {
    let (client, mut connection) = support::session(64);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while let Some((kind, payload)) = connection.control.recv().unwrap() {
                connection.control.answer(kind, &payload).unwrap();
            }
        });
        let threads: Vec<_> = (0..8u8)
            .map(|thread| {
                let client = &client;
                scope.spawn(move || {
                    for n in 0..100 {
                        let payload = vec![thread; 20_000];
                        assert_eq!(client.control(ControlKind::Note, &payload[..n * 200]).unwrap(), payload[..n * 200]);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        client.close();
    });
}

#[test]
fn a_refused_process_is_told_why() {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| Client::connect(listener.path(), &hello()));
        let stream = listener.accept(Duration::from_secs(10)).unwrap().unwrap();
        let refused = handshake(stream, |hello| Err(format!("rank {} is no sandbox rank", hello.rank)), 64);
        assert!(matches!(refused, Err(HandshakeError::Refused { hello, .. }) if hello.rank == 3));
        let refused = client.join().unwrap();
        assert!(matches!(refused, Err(ConnectError::Refused(text)) if text == "rank 3 is no sandbox rank"));
    });
}

#[test]
fn no_listener_is_an_error() {
    let dir = support::private_dir();
    assert!(matches!(Client::connect(&dir.path().join("session.sock"), &hello()), Err(ConnectError::Io(_))));
}

#[test]
fn hello_and_config_arrive() {
    let (client, connection) = support::session(64);
    assert_eq!(client.config(), "key=value\n");
    assert_eq!((client.config_value("key"), client.config_value("value")), (Some("value"), None));
    assert_eq!(connection.hello, hello());
    assert_eq!(connection.hello.pid, std::process::id());
}

#[test]
fn records_appended_before_the_program_exits_are_read() {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    let client = Role::spawn("exiting client", dir.path());
    let Connection { records, replies, control: _control, .. } = support::accept(&listener, 64);
    client.assert_success();
    let mut seen = 0;
    support::answer_queries(records, &replies, |_| seen += 1);
    assert_eq!(seen, 50);
}

#[test]
fn the_engine_ends_every_wait_at_once() {
    let (client, Connection { mut control, mut records, replies, .. }) = support::session(64);
    let closer = control.closer();
    std::thread::scope(|scope| {
        let waits = [
            scope.spawn(|| assert_eq!(client.query(query(1)), Err(Disconnected))),
            scope.spawn(|| assert_eq!(client.control(ControlKind::Name, &[]), Err(ControlError::Disconnected))),
            scope.spawn(move || {
                let asked = control.recv().unwrap();
                assert!(asked.is_some() && control.recv().unwrap().is_none());
            }),
            scope.spawn(move || {
                assert!(records.wait(Duration::from_secs(60)) && records.pop().is_some());
                assert!(!records.wait(Duration::from_secs(60)));
                assert!(records.is_closed());
            }),
        ];
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        closer.close();
        for wait in waits {
            wait.join().unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(1));
    });
    assert_eq!(client.append(&kernel(1)), Err(Disconnected));
    drop(replies);
}

#[test]
fn the_process_ends_every_wait_at_once() {
    let (client, Connection { mut control, mut records, .. }) = support::session(64);
    std::thread::scope(|scope| {
        let waits = [
            scope.spawn(|| assert_eq!(client.query(query(1)), Err(Disconnected))),
            scope.spawn(move || assert!(control.recv().unwrap().is_none())),
            scope.spawn(move || {
                assert!(records.wait(Duration::from_secs(60)) && records.pop().is_some());
                assert!(!records.wait(Duration::from_secs(60)));
                assert!(records.is_closed());
            }),
        ];
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        client.close();
        for wait in waits {
            wait.join().unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(1));
    });
}

#[test]
fn dropping_the_reader_ends_the_session() {
    let (client, Connection { control: _control, records, replies: _replies, .. }) = support::session(64);
    drop(records);
    assert_eq!(client.query(query(1)), Err(Disconnected));
}

#[test]
fn waiting_for_records_ends_at_its_timeout() {
    let (_client, mut connection) = support::session(64);
    let start = Instant::now();
    assert!(!connection.records.wait(Duration::from_millis(250)));
    assert!(start.elapsed() >= Duration::from_millis(249));
    assert!(!connection.records.is_closed());
    assert!(!connection.records.wait(Duration::ZERO));
}

#[test]
fn answers_to_slots_nobody_waits_in_are_errors() {
    let (_client, connection) = support::session(64);
    for slot in [0, 63, 64, u32::MAX] {
        assert!(connection.replies.answer(slot, Reply::default()).is_err());
    }
}

#[test]
fn a_cancelled_query_gives_its_slot_back_when_the_answer_comes() {
    let (client, Connection { mut records, replies, control: _control, .. }) = support::session(64);
    for round in 0..100 {
        assert_eq!(client.query_unless(query(round), &|| true), Ok(None));
        assert!(records.wait(Duration::from_secs(10)));
        let late = records.pop().unwrap();
        replies.answer(late.h, prism_wire::message::Reply { value: -1, ..Default::default() }).unwrap();
    }
    std::thread::scope(|scope| {
        let next = scope.spawn(|| client.query(query(7)));
        assert!(records.wait(Duration::from_secs(10)));
        let asked = records.pop().unwrap();
        replies.answer(asked.h, prism_wire::message::Reply { value: 7, ..Default::default() }).unwrap();
        assert_eq!(next.join().unwrap().unwrap().value, 7);
    });
}

#[test]
fn a_cancelled_append_to_a_full_ring_leaves_nothing_behind() {
    let (client, Connection { mut records, replies: _replies, control: _control, .. }) = support::session(64);
    while client.append_unless(&kernel(1), &|| true).unwrap() {}
    let mut seen = 0;
    while records.pop().is_some() {
        seen += 1;
    }
    // The reader says how far it is when it looks for more.
    assert!(!records.wait(Duration::from_millis(1)));
    assert!(client.append_unless(&kernel(2), &|| true).unwrap());
    assert_eq!(records.pop().map(|record| record.e), Some(kernel(2).e));
    assert!(seen >= 64 && records.pop().is_none());
}
