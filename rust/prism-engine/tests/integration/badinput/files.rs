//! Files that are empty, promise more than they hold, or hold a great deal: opened and replayed by a child process, whose
//! peak memory is part of the answer.

use super::options;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder, GraphError};
use prism_engine::ids::{Rank, SlotId, StreamId};
use prism_engine::replay::replay;
use prism_engine::units::SimTime;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Tells the child what to open: a folder of files.
const FOLDER: &str = "PRISM_BADINPUT_FOLDER";

/// What the child found in each file, in order of their names, and its peak memory in KiB.
fn opened_by_a_child(folder: &Path) -> (Vec<String>, u64) {
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["badinput::files::child", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .output()
        .expect("the test can start itself");
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
    let tagged =
        |tag: &'static str| text.lines().filter_map(move |line| line.split_once(tag).map(|(_, rest)| rest.to_owned()));
    let peak = tagged("peak_kib=").next().and_then(|kib| kib.parse().ok()).expect("the child's peak");
    (tagged("answer=").collect(), peak)
}

/// Not a test of its own: the child of the tests below.
#[test]
#[ignore = "run by other tests, as a process of its own"]
#[allow(clippy::print_stdout)] // The way to answer.
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    for file in files {
        let answer = match Graph::open(&file) {
            Err(error) => error.to_string(),
            Ok(graph) => {
                let graph = Arc::new(graph);
                let ops = graph.summary().ops;
                match replay(&graph, &options()) {
                    Ok(result) => format!("{ops} ops, {} ns", result.total_time_ns),
                    Err(error) => error.to_string(),
                }
            }
        };
        println!("answer={}", answer.lines().next().unwrap_or_default());
    }
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux tells the peak");
    println!("peak_kib={}", peak.trim().trim_end_matches(" kB"));
}

/// `ranks` ranks that run the same `ops` compute ops of a nanosecond and an all-reduce.
fn long_graph(ranks: u32, ops: usize) -> Graph {
    let mut builder = GraphBuilder::new(ranks);
    let name = builder.intern_name("work");
    let (class, provenance) = (ComputeClass::Gemm, Provenance::Modelled);
    let compute = OpKind::Compute { duration: SimTime::from_ns(1), name, class, provenance };
    let call = OpKind::Collective {
        slot: SlotId(0),
        kind: CollectiveKind::AllReduce,
        dtype: DataType::Float32,
        reduce: ReduceOp::Sum,
        root: 0,
        count: 0,
        group: 0,
    };
    let op = |kind| Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind };
    let mut program = vec![op(compute); ops];
    program.push(op(call));
    let template = builder.add_template("all", &program).expect("valid");
    let world = builder.add_comm((0..ranks).map(Rank).collect());
    (0..ranks).for_each(|rank| builder.set_rank(Rank(rank), template, vec![world]));
    builder.finish().expect("valid")
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Offset and length of every section, as the table after the header tells.
fn sections(bytes: &[u8]) -> Vec<(usize, usize, usize)> {
    let count = u32::from_le_bytes(bytes[32..36].try_into().expect("four bytes")) as usize;
    let entries = (0..count).map(|index| 64 + 32 * index);
    entries.map(|at| (at, number_at(bytes, at + 8) as usize, number_at(bytes, at + 16) as usize)).collect()
}

/// Makes the checksums of a changed file right again.
fn seal(bytes: &mut [u8]) {
    let all = sections(bytes);
    for (at, offset, len) in &all {
        let crc = crc32fast::hash(&bytes[*offset..offset + len]);
        bytes[at + 24..at + 28].copy_from_slice(&crc.to_le_bytes());
    }
    let table = crc32fast::hash(&bytes[64..64 + 32 * all.len()]);
    bytes[36..40].copy_from_slice(&table.to_le_bytes());
    let header = crc32fast::hash(&bytes[..60]);
    bytes[60..64].copy_from_slice(&header.to_le_bytes());
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

#[test]
fn an_empty_file_ends_inside_the_header() {
    let folder = folder();
    let file = folder.path().join("empty.prism");
    std::fs::write(&file, b"").expect("writable");
    let error = Graph::open(&file).expect_err("nothing in it");
    assert!(matches!(error, GraphError::Format { offset: 0, .. }), "{error:?}");
    assert!(error.to_string().contains("the file ends inside the header"), "{error}");
    assert!(Graph::from_text("").expect_err("nothing in it").to_string().contains("ends"), "the same of an empty text");
}

/// Every number of a small file in turn is made a huge one, with checksums as they should be: ops by the hundred million,
/// ranks, members, lengths of texts.
#[test]
fn whatever_a_small_file_promises_it_gets_no_memory_for_it() {
    let folder = folder();
    let path = folder.path().join("small.prism");
    long_graph(4, 3).save(&path).expect("writable");
    let good = std::fs::read(&path).expect("just written");
    std::fs::remove_file(&path).expect("just written");
    let mut resealed = good.clone();
    seal(&mut resealed);
    assert!(resealed == good, "the test's idea of the layout is not the writer's");
    let mut count = 0;
    for (_, offset, len) in sections(&good) {
        for at in (offset..offset + len.next_multiple_of(8)).step_by(4).take_while(|at| *at < good.len()) {
            for (number, huge) in [100_000_001_u64, u64::from(u32::MAX), 1 << 62, u64::MAX].into_iter().enumerate() {
                let mut bytes = good.clone();
                let room = (offset + len).saturating_sub(at).min(if number == 1 { 4 } else { 8 });
                bytes[at..at + room].copy_from_slice(&huge.to_le_bytes()[..room]);
                seal(&mut bytes);
                std::fs::write(folder.path().join(format!("{count:06}.prism")), &bytes).expect("writable");
                count += 1;
            }
        }
    }
    let (answers, peak_kib) = opened_by_a_child(folder.path());
    assert_eq!(answers.len(), count, "an answer for every file");
    let refused =
        answers.iter().filter(|answer| answer.contains("not a usable") || answer.contains("invalid execution"));
    assert!(refused.count() * 2 > count, "most are no graphs: {answers:#?}");
    assert!(peak_kib < 100_000, "{peak_kib} KiB for files of {} bytes", good.len());
}

#[test]
fn a_header_that_promises_a_huge_file_is_compared_with_the_file() {
    let folder = folder();
    let path = folder.path().join("small.prism");
    let graph = long_graph(4, 3);
    graph.save(&path).expect("writable");
    let mut bytes = std::fs::read(&path).expect("just written");
    // Told to be eight gigabytes: once in a small file, once in one that has the size but holds nothing after the graph.
    let told = 8_u64 << 30;
    bytes[24..32].copy_from_slice(&told.to_le_bytes());
    seal(&mut bytes);
    std::fs::write(&path, &bytes).expect("writable");
    std::fs::write(folder.path().join("sparse.prism"), &bytes).expect("writable");
    let sparse =
        std::fs::OpenOptions::new().write(true).open(folder.path().join("sparse.prism")).expect("just written");
    sparse.set_len(told).expect("a sparse file takes no room");
    let (answers, peak_kib) = opened_by_a_child(folder.path());
    assert!(answers[0].contains("its header says 8589934592"), "{answers:?}");
    assert!(answers[1].contains("bytes follow the last section"), "{answers:?}");
    assert!(peak_kib < 100_000, "{peak_kib} KiB");
}

#[test]
fn a_real_job_of_a_hundred_million_ops_is_a_small_file_and_little_memory() {
    let (ranks, ops) = (250, 400_000);
    let folder = folder();
    let path = folder.path().join("long.prism");
    let bytes = long_graph(ranks, ops).save(&path).expect("writable");
    assert!(bytes < 4_000_000, "{bytes} bytes");
    let (answers, peak_kib) = opened_by_a_child(folder.path());
    assert_eq!(answers, [format!("{} ops, {ops} ns", (ops + 1) * ranks as usize)]);
    assert!(peak_kib < 200_000, "{peak_kib} KiB for {bytes} bytes");
}
