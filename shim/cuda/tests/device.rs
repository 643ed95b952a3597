//! The library under `LD_PRELOAD`: a C program (`driver.c`) uses it against a small engine in this process.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "tests report what they measure or skip")]

mod support;

use prism_wire::control::ControlKind;
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use support::{Engine, OPERATION_NS, PROFILE, Sent};

/// The library, which cargo has built beside this test.
fn library() -> PathBuf {
    let library = std::env::current_exe().expect("a path").with_file_name("libprism_cuda.so");
    assert!(library.is_file(), "{} is missing: build the crate first", library.display());
    library
}

/// The C program, compiled once.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver.c");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{}", std::process::id()));
        let status = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-pthread", "-o"])
            .args([program.as_path(), source.as_path(), library().as_path()])
            .args(["-ldl"])
            .status()
            .expect("a C compiler");
        assert!(status.success());
        program
    })
}

fn command(scenario: &str) -> Command {
    let mut command = Command::new(driver());
    command.arg(scenario).env("LD_PRELOAD", library()).env_remove("PRISM_SESSION");
    command.env("PRISM_RANK", "5").env("PRISM_WORLD_SIZE", "16");
    command
}

fn text(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn passed(output: &Output) -> (String, String) {
    let (stdout, stderr) = text(output);
    assert!(output.status.success(), "{:?}\n{stdout}\n{stderr}", output.status);
    (stdout, stderr)
}

/// Runs a scenario against an engine with the test profile. What was sent, stdout, stderr.
fn run_with(scenario: &str, profile: &str) -> (Vec<Sent>, Output) {
    let dir = tempfile_dir();
    let engine = Engine::start(&dir, profile);
    let output = command(scenario).env("PRISM_SESSION", engine.path()).output().expect("the driver runs");
    let sent = engine.finish();
    let _ = std::fs::remove_dir(&dir);
    (sent, output)
}

fn run(scenario: &str) -> (Sent, String, String) {
    let (mut sent, output) = run_with(scenario, PROFILE);
    let (stdout, stderr) = passed(&output);
    assert_eq!(sent.len(), 1, "one session");
    (sent.remove(0), stdout, stderr)
}

fn tempfile_dir() -> PathBuf {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    std::env::temp_dir().join(format!("prism-cuda-test-{}-{number}", std::process::id()))
}

fn kinds(records: &[Record]) -> Vec<RecordKind> {
    records.iter().map(|record| RecordKind::from_u16(record.kind).expect("known kind")).collect()
}

#[test]
fn without_a_session_there_is_no_device_and_time_is_real() {
    let output = command("inert").output().expect("the driver runs");
    let (stdout, stderr) = passed(&output);
    assert_eq!((stdout.as_str(), stderr.as_str()), ("", ""));
}

#[test]
fn a_missing_engine_is_said_loudly() {
    let output = command("no_engine").env("PRISM_SESSION", "/nonexistent/socket").output().expect("the driver runs");
    let (_, stderr) = passed(&output);
    assert!(stderr.contains("prism: cannot use the session /nonexistent/socket"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "said once");
}

#[test]
fn a_profile_without_a_key_is_an_error_that_names_it() {
    let profile = PROFILE.replace("device.sm_count=132\n", "");
    let (_, output) = run_with("no_engine", &profile);
    let (_, stderr) = passed(&output);
    assert!(stderr.contains("the profile has no key device.sm_count"), "{stderr}");
}

#[test]
fn a_missing_rank_is_an_error_that_names_it() {
    let dir = tempfile_dir();
    let engine = Engine::start(&dir, PROFILE);
    let output =
        command("no_engine").env("PRISM_SESSION", engine.path()).env_remove("PRISM_RANK").output().expect("runs");
    let (_, stderr) = passed(&output);
    assert!(stderr.contains("PRISM_RANK is not set"), "{stderr}");
    assert!(engine.finish().is_empty());
    let _ = std::fs::remove_dir(&dir);
}

#[test]
fn calls_become_records() {
    let (sent, _, stderr) = run("records");
    assert_eq!(stderr, "");
    let kernels = sent.of(RecordKind::Kernel);
    let names = sent.names();
    assert_eq!(names.values().collect::<Vec<_>>(), ["_Z7kernel_aPf", "_Z7kernel_bPf"]);
    let first = kernels[0];
    assert_eq!((first.a, first.b, first.c), (3 | 2 << 32, 1 | 128 << 32, 256));
    assert_eq!((names[&first.e].as_str(), first.stream), ("_Z7kernel_aPf", 1));
    assert_eq!((kernels[1].b >> 32, kernels[1].stream), (1_024, 0));
    assert_eq!(kernels.len(), 3, "a refused launch is no record");
    let order = kinds(&sent.records);
    assert_eq!(
        order[..7],
        [
            RecordKind::Kernel,
            RecordKind::Kernel,
            RecordKind::EventRecord,
            RecordKind::EventQuery,
            RecordKind::StreamQuery,
            RecordKind::EventQuery,
            RecordKind::EventWait
        ]
    );
    assert!(sent.records.windows(2).all(|pair| pair[0].host_ns <= pair[1].host_ns), "the clock never goes back");
    let marker = sent.of(RecordKind::Marker)[0];
    assert_eq!((marker.e, marker.stream), (2, 0));
    let stats = sent.of(RecordKind::MemoryStats)[0];
    assert_eq!((stats.a, stats.b), (11, 22));
    let groups = sent.controls.iter().find(|(kind, _)| *kind == ControlKind::Groups).expect("told at the end");
    assert_eq!(groups.1, [&[16, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0][..], b"dp_0"].concat());
    assert!(sent.records.iter().all(|record| record.flags & FLAG_BACKGROUND == 0));
}

#[test]
fn memory_is_accounted_and_bytes_move() {
    let (sent, _, stderr) = run("memory");
    assert_eq!(stderr, "");
    let taken: u64 = sent.of(RecordKind::Alloc).iter().map(|record| record.a).sum();
    let freed: u64 = sent.of(RecordKind::Free).iter().map(|record| record.a).sum();
    assert_eq!(taken - freed, (4 + 8 + 6) << 20, "what is still allocated");
    let copies = sent.of(RecordKind::Memcpy);
    assert!(copies.iter().any(|copy| (copy.a, copy.b, copy.c) == (30, 1, 0)), "rows count their bytes");
    let pinned = copies.iter().position(|copy| copy.c == 1).expect("a copy to pinned memory");
    assert_eq!((copies[pinned].a, copies[pinned].b), (64, 2));
}

#[test]
fn pageable_reads_wait_and_pinned_ones_do_not() {
    let (sent, _, _) = run("memory");
    let order = kinds(&sent.records);
    for (index, record) in sent.records.iter().enumerate() {
        if record.kind == RecordKind::Memcpy as u16 && record.b == 2 {
            let waits = order.get(index + 1) == Some(&RecordKind::StreamSync);
            assert_eq!(waits, record.c == 0, "record {index}");
        }
    }
}

#[test]
fn virtual_memory_is_mapped_and_accounted() {
    let (sent, _, stderr) = run("virtual_memory");
    assert!(stderr.contains("cuMemMap of a part of a handle"), "{stderr}");
    let total = |kind| sent.of(kind).iter().map(|record| record.a).sum::<u64>();
    assert_eq!((total(RecordKind::Alloc), total(RecordKind::Free)), (6 << 20, 6 << 20));
}

#[test]
fn time_is_virtual_and_the_same_on_every_run() {
    let (first, stdout, stderr) = run("clocks");
    assert_eq!(stderr, "");
    let (second, again, _) = run("clocks");
    assert_eq!(stdout, again);
    let foreground = |sent: &Sent| -> Vec<Record> {
        let is_foreground = |record: &&Record| record.flags & FLAG_BACKGROUND == 0;
        sent.records.iter().filter(is_foreground).map(|record| Record { h: 0, ..*record }).collect()
    };
    assert_eq!(foreground(&first), foreground(&second));
    // The other thread's thousand queries of an event that is not complete.
    let background = |sent: &Sent| sent.records.len() - foreground(sent).len();
    assert_eq!((background(&first), background(&second)), (1_000, 1_000));
    let kernels = first.of(RecordKind::Kernel);
    assert!(kernels[..10].windows(2).all(|pair| pair[1].host_ns - pair[0].host_ns == 4_000));
    const { assert!(OPERATION_NS == 50_000) };
}

#[test]
fn background_threads_wait_in_virtual_time_and_act_at_the_same_points() {
    let (_, first, stderr) = run("handover");
    assert_eq!(stderr, "");
    assert_eq!(first.lines().count(), 50);
    assert_eq!(first, run("handover").1);
}

#[test]
fn however_slow_a_background_thread_is_the_driver_waits_for_it() {
    let (_, _, stderr) = run("slow");
    assert_eq!(stderr, "");
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let (sent, _, _) = run("streams");
    let links = |index: usize| kinds(&sent.records[index..index + 3]);
    let link_then_kernel = [RecordKind::EventRecord, RecordKind::EventWait, RecordKind::Kernel];
    // blocking; legacy after blocking; independent; blocking after legacy; legacy after blocking.
    assert_eq!(kinds(&sent.records[..1]), [RecordKind::Kernel]);
    assert_eq!(links(1), link_then_kernel);
    let streams: Vec<u32> = sent.records[1..4].iter().map(|record| record.stream).collect();
    assert_eq!(streams, [1, 0, 0]);
    assert_eq!(kinds(&sent.records[4..5]), [RecordKind::Kernel]);
    assert_eq!(links(5), link_then_kernel);
    assert_eq!(links(8), link_then_kernel);
    assert_eq!(sent.of(RecordKind::Kernel).len(), 6);
    assert_eq!(sent.of(RecordKind::EventRecord).len(), 3, "no more once the blocking stream is gone");
}

#[test]
fn a_graph_happens_at_every_launch_and_costs_the_host_one() {
    use RecordKind as K;
    let (sent, _, stderr) = run("graphs");
    assert_eq!(stderr, "");
    let order = kinds(&sent.records);
    let start = order.iter().position(|kind| *kind == K::Alloc).expect("memory") + 1;
    let launch = [K::Kernel, K::EventRecord, K::EventWait, K::Memcpy, K::Memset, K::EventRecord, K::EventWait];
    let rest = [K::StreamSync, K::Marker];
    // The kernel on a stream that is not captured goes out at once.
    let expected = [&[K::Kernel][..], &launch, &rest, &launch, &rest].concat();
    assert_eq!(order[start..start + expected.len()], expected);
    assert_eq!(order.len(), start + expected.len(), "mistakes send nothing");
    let first = &sent.records[start + 1..start + 8];
    let streams: Vec<u32> = first.iter().map(|record| record.stream).collect();
    let (on, private) = (streams[0], streams[2]);
    assert_eq!(streams, [on, on, private, private, on, private, on]);
    assert_eq!(sent.records[start].stream, on, "launched on the third stream");
    assert!(private > on, "a stream that the program cannot name");
    let events: Vec<u32> = [1, 2, 5, 6].map(|index| first[index].e).to_vec();
    assert_eq!((events[0], events[2]), (events[1], events[3]));
    assert!(events[0] != events[2]);
    assert!(first.iter().all(|record| record.host_ns == first[0].host_ns), "one launch, one cost");
}

#[test]
fn unsupported_calls_fail_loudly_with_their_name() {
    let (sent, _, stderr) = run("unsupported");
    let line = "prism: cudaStreamBeginCaptureToGraph is not supported by the emulated device";
    assert_eq!(stderr.matches(line).count(), 1, "{stderr}");
    assert!(stderr.contains("prism: cufftPlan1d is not supported"), "{stderr}");
    let told: Vec<_> = sent.controls.iter().map(|(kind, name)| (*kind, name.as_slice())).collect();
    let unsupported = ControlKind::Unsupported;
    assert_eq!(
        told,
        [
            (unsupported, &b"cudaStreamBeginCaptureToGraph"[..]),
            (unsupported, b"cudaStreamBeginCaptureToGraph"),
            (unsupported, b"cufftPlan1d")
        ]
    );
}

#[test]
fn a_forked_child_has_no_device_and_real_time() {
    run("forked");
}

#[test]
fn calls_after_exit_are_harmless() {
    let (_, stdout, stderr) = run("exiting");
    assert_eq!((stdout.as_str(), stderr.as_str()), ("ended\n", ""));
}

/// Two Python threads that fight for the interpreter lock, and what the main one sees of the time that takes.
const LOCK_PROGRAM: &str = "
import ctypes, threading, time
cuda = ctypes.CDLL(None)
pointer = ctypes.c_void_p()
assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(100)) == 0
count = 0
def work():
    global count
    for _ in range(2_000_000):
        count += 1
thread = threading.Thread(target=work)
before = time.monotonic_ns()
thread.start()
for _ in range(2_000_000):
    pass
thread.join()
print(time.monotonic_ns() - before)
";

#[test]
fn waiting_for_pythons_interpreter_lock_takes_no_virtual_time() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return;
    }
    let dir = tempfile_dir();
    let engine = Engine::start(&dir, PROFILE);
    let output = Command::new("python3")
        .args(["-S", "-c", LOCK_PROGRAM])
        .env("LD_PRELOAD", library())
        .env("PRISM_SESSION", engine.path())
        .env("PRISM_RANK", "0")
        .env("PRISM_WORLD_SIZE", "1")
        .output()
        .expect("python3 runs");
    let (stdout, _) = passed(&output);
    assert_eq!(stdout, "0\n");
    drop(engine);
    let _ = std::fs::remove_dir(&dir);
}

/// Names that must be there because a framework was seen to call them, one `count name` a line.
const CALLED: &str = "../../../shared/data/cuda/called-in-all-probes.txt";

#[test]
fn every_function_seen_in_training_is_exported() {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join(CALLED);
    let Ok(called) = std::fs::read_to_string(&list) else {
        eprintln!("skipped: {} is not here", list.display());
        return;
    };
    let functions = passed(&command("functions").output().expect("the driver runs")).0;
    let known: BTreeSet<&str> = functions.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    let missing: Vec<&str> = called
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| {
            ["cuda", "__cuda", "cuCtx", "cuDevice", "cuLogs", "cuMem", "cuTensor"]
                .iter()
                .any(|family| name.starts_with(family))
        })
        .filter(|name| !known.contains(name) && !known.contains(format!("{name}_v2").as_str()))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Timings on the machine at hand; run with `--ignored --nocapture` on a release build.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let (_, stdout, _) = run("speed");
    println!("{stdout}");
}
