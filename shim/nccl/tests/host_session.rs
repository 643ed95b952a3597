//! The host device: the library connects by itself, to an engine that this test plays with `prism_wire::server`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use prism_wire::control::{ControlKind, KIND_RECEIVE, UNIQUE_ID_LOCAL_MAGIC};
use prism_wire::frame::{CommSplitAnswer, DeviceMode, Request};
use prism_wire::message::{CollectiveKind, DataType, Record, RecordKind, RecordKind as K, Reply, ReplyStatus};
use prism_wire::server::{ControlChannel, Listener, handshake};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

const RANK: u32 = 5;
const NUM_RANKS: u32 = 8;
const NUM_THREADS: u32 = 4;
const NUM_CALLS: u32 = 300;
/// Time the engine of this test takes for everything.
const SYNC_NS: i64 = 10_000;

/// What the program did.
struct Seen {
    requests: Vec<Request>,
    records: Vec<Record>,
}

/// Plays the engine for one program; it hangs up at the query after `answers` answered ones.
fn with_engine(answers: usize, program: impl FnOnce(&Path) -> Output) -> (Seen, Output) {
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
    let listener = Listener::bind(dir.path()).unwrap();
    let path = listener.path().to_owned();
    let engine = spawn(move || engine(&listener, answers));
    let output = program(&path);
    (engine.join().unwrap(), output)
}

fn run(answers: usize, expected_end: u32) -> (Seen, Output) {
    with_engine(answers, |socket| run_client("host_client.c", &[NUM_RANKS, RANK, expected_end], socket))
}

/// Runs a C program as rank [`RANK`] of the session at `socket`.
fn run_client(source: &str, args: &[u32], socket: &Path) -> Output {
    let build = support::compile(source, "client", &[]);
    Command::new(&build.program)
        .args(args.iter().map(u32::to_string))
        .env("LD_LIBRARY_PATH", build.library_dir())
        .env("PRISM_SESSION", socket)
        .env("PRISM_DEVICE", "host")
        .env("PRISM_RANK", RANK.to_string())
        .env("PRISM_WORLD_SIZE", "8192")
        .output()
        .unwrap()
}

fn engine(listener: &Listener, answers: usize) -> Seen {
    let stream = listener.accept(Duration::from_secs(30)).unwrap().expect("the program connects");
    let session = handshake(stream, |_| Ok("device=host\nhost.nccl_ns=700\n".to_owned()), 64).unwrap();
    assert_eq!((session.hello.rank, session.hello.world_size), (RANK, 8_192));
    assert_eq!(session.hello.device, DeviceMode::Host);
    let closer = session.closer();
    let control = answer_requests(session.control);
    let mut reader = session.records;
    let mut records = Vec::new();
    let mut num_answers = 0;
    while !reader.is_closed() {
        reader.wait(Duration::from_millis(20));
        while let Some(record) = reader.pop() {
            records.push(record);
            if RecordKind::from_u16(record.kind).unwrap().is_query() {
                if num_answers == answers {
                    closer.close();
                    continue;
                }
                num_answers += 1;
                let reply =
                    Reply { status: ReplyStatus::Ok as u32, host_ns: record.host_ns + SYNC_NS, ..Reply::default() };
                session.replies.answer(record.h, reply).unwrap();
            }
        }
    }
    Seen { requests: control.join().unwrap(), records }
}

fn answer_requests(mut control: ControlChannel) -> JoinHandle<Vec<Request>> {
    spawn(move || {
        let mut requests = Vec::new();
        while let Ok(Some((kind, payload))) = control.recv() {
            let answer = match kind {
                ControlKind::CommSplit => CommSplitAnswer { nranks: 2, group_rank: 1 }.encode(),
                _ => Vec::new(),
            };
            requests.push(Request::decode(kind, &payload).unwrap());
            // The program may be gone already; then the next request is the end.
            let _ = control.answer(kind, &answer);
        }
        requests
    })
}

fn kinds(records: &[Record]) -> Vec<RecordKind> {
    records.iter().map(|record| RecordKind::from_u16(record.kind).unwrap()).collect()
}

#[test]
fn host_program_runs_and_its_calls_are_done_when_they_return() {
    let (seen, output) = run(usize::MAX, 0);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "count 2, async error 0\n");

    assert_eq!(
        kinds(&seen.records),
        [
            K::Collective,
            K::StreamSync,
            K::Send,
            K::Recv,
            K::GroupEnd,
            K::StreamSync,
            K::Collective,
            K::StreamSync,
            K::CommDestroy,
            K::CommDestroy,
        ]
    );
    let all_reduce = seen.records[0];
    assert_eq!((all_reduce.stream, all_reduce.a, all_reduce.e), (0, 4, 1));
    assert_eq!(all_reduce.f, CollectiveKind::AllReduce as u32 | (DataType::Float32 as u32) << 8);
    let send = seen.records[2];
    assert_eq!((send.g, seen.records[3].g), (RANK + 1, RANK - 1));
    assert!(send.h > 0 && seen.records[3].h == send.h && seen.records[4].h == send.h);
    assert_eq!(seen.records[6].e, 2);
    assert_eq!((seen.records[8].e, seen.records[9].e), (2, 1));
    // The host clock: 700 ns a call, and from where a reply left it.
    let clocks: Vec<_> = seen.records[..5].iter().map(|record| record.host_ns).collect();
    assert_eq!(clocks, [700, 700, 700 + SYNC_NS + 700, 700 + SYNC_NS + 1_400, 700 + SYNC_NS + 2_100]);

    let Request::CommInit { comm_id: 1, nranks: NUM_RANKS, group_rank: RANK, unique_id } = &seen.requests[0] else {
        panic!("{:?}", seen.requests);
    };
    assert_eq!(&unique_id[..8], UNIQUE_ID_LOCAL_MAGIC);
    let split = Request::CommSplit { comm_id: 2, parent: 1, color: 1, key: 0, group_name: String::new() };
    assert!(seen.requests.contains(&split), "{:?}", seen.requests);
    let notes: Vec<_> = seen.requests.iter().filter(|request| matches!(request, Request::Note { .. })).collect();
    // Kind and tier: a mirrored all-reduce, a receive that nobody sends, a mirrored all-gather.
    for (comm_id, kind, tier) in
        [(1, CollectiveKind::AllReduce as u32, 1), (1, KIND_RECEIVE, 0), (2, CollectiveKind::AllGather as u32, 1)]
    {
        assert!(seen.requests.contains(&Request::Tier { comm_id, kind, tier, count: 1 }), "{:?}", seen.requests);
    }
    assert_eq!(notes.len(), 2, "one mirrored all-reduce, one mirrored all-gather: {notes:?}");
}

#[test]
fn a_dying_engine_is_a_remote_error() {
    // It hangs up at the third synchronisation, which is the all-gather's.
    let (seen, output) = run(2, 6);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "count 2, async error 6\n");
    assert_eq!(kinds(&seen.records).last(), Some(&RecordKind::StreamSync));
}

#[test]
fn without_an_engine_the_first_communicator_fails() {
    let output = run_client("host_client.c", &[NUM_RANKS, RANK], Path::new("no.sock"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("is 2: no prism session"), "{stderr}");
}

#[test]
fn threads_with_a_communicator_each_keep_their_order() {
    let (seen, output) =
        with_engine(usize::MAX, |socket| run_client("host_threads.c", &[NUM_THREADS, NUM_CALLS], socket));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let calls = |comm: u32| {
        let records = seen.records.iter().filter(move |record| record.kind == K::Collective as u16 && record.e == comm);
        records.map(|record| record.a).collect::<Vec<_>>()
    };
    let expected: Vec<_> = (1..=u64::from(NUM_CALLS)).collect();
    for comm in 1..=NUM_THREADS {
        assert_eq!(calls(comm), expected, "communicator {comm}");
    }
    let destroyed = seen.records.iter().filter(|record| record.kind == K::CommDestroy as u16).count();
    assert_eq!(destroyed, NUM_THREADS as usize);
}
