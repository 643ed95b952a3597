//! CPU time of evaluating message programs. Every number comes after an assertion that the result is right: LogGOPSim's own
//! on the same programs.
//!
//! `cargo bench -p prism-engine --bench messages [-- SECTION]` with the sections `ring`, `step`, `goal-file`. Each size runs
//! in a process of its own, for its memory; the text of `goal-file` (2 GB) is written under `target/tmp` and removed.

#![allow(clippy::print_stdout, reason = "the numbers are the output")]
#![allow(clippy::unwrap_used, reason = "a benchmark may stop anywhere")]

#[path = "../tests/integration/messages/workloads.rs"]
mod workloads;

mod meter;

use meter::{cpu_time, peak_rss};
use prism_engine::messages::loggops::{Evaluation, evaluate};
use prism_engine::messages::{MessageProgram, goal};
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use workloads::{PARAMETERS, Step};

/// Ranks of a ring over 1 GiB; seconds and allowed relative difference.
const RINGS: [(u32, f64, f64); 3] =
    [(512, 0.047_975_766, 1e-8), (1024, 0.053_137_689, 1e-8), (4096, 0.083_889_023, 1e-8)];
/// Data-parallel degree of a step (64 ranks each); seconds.
const STEPS: [(u32, f64); 5] = [(1, 0.534_683), (8, 0.553_544), (16, 0.554_966), (64, 0.556_453), (128, 0.557_260)];
/// The table's numbers have six decimals.
const STEP_TOLERANCE: f64 = 2e-6;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    if let Some((what, size)) = arguments.first().and_then(|argument| argument.split_once('=')) {
        return child(what, size);
    }
    let wanted = |section: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == section);
    if wanted("ring") {
        header("ring");
        for (ranks, ..) in RINGS {
            start("ring", &ranks.to_string());
        }
    }
    if wanted("step") {
        header("step");
        for (dp, _) in STEPS {
            start("step", &dp.to_string());
        }
    }
    if wanted("goal-file") {
        for (dp, _) in STEPS.iter().skip(1) {
            let file = text_file(*dp);
            start("write", &dp.to_string());
            start("read", &dp.to_string());
            fs::remove_file(file).unwrap();
        }
    }
}

fn header(section: &str) {
    let columns = ["ranks", "ops", "seconds", "CPU s", "M ops/s", "B/op", "RSS MB"];
    let [ranks, ops, seconds, cpu, rate, bytes, rss] = columns;
    println!("{section}\n{ranks:>6} {ops:>9} {seconds:>11} {cpu:>7} {rate:>8} {bytes:>6} {rss:>7}");
}

/// Runs one size in a process of its own.
fn start(what: &str, size: &str) {
    let status = Command::new(std::env::current_exe().unwrap()).arg(format!("{what}={size}")).status().unwrap();
    assert!(status.success(), "{what} {size}");
}

fn child(what: &str, size: &str) {
    let size: u32 = size.parse().unwrap();
    let expected = |dp| STEPS.iter().find(|(of, _)| *of == dp).unwrap().1;
    match what {
        "ring" => {
            let (ranks, seconds, tolerance) = *RINGS.iter().find(|(ranks, ..)| *ranks == size).unwrap();
            row(&workloads::ring(ranks, 1 << 30), seconds, tolerance);
        }
        "step" => row(&Step::measured(size).program(), expected(size), STEP_TOLERANCE),
        "write" => write_text(&Step::measured(size).program(), &text_file(size)),
        _ => read_text(&text_file(size), expected(size)),
    }
}

fn evaluated(program: &MessageProgram, seconds: f64, tolerance: f64) -> (Evaluation, Duration) {
    let start = cpu_time();
    let result = evaluate(program, &PARAMETERS).unwrap();
    let taken = cpu_time().saturating_sub(start);
    let difference = result.total_seconds() / seconds - 1.0;
    assert!(difference.abs() <= tolerance, "{} s instead of {seconds}", result.total_seconds());
    (result, taken)
}

fn row(program: &MessageProgram, seconds: f64, tolerance: f64) {
    let (result, taken) = evaluated(program, seconds, tolerance);
    println!(
        "{:>6} {:>9} {:>11.9} {:>7.2} {:>8.1} {:>6.2} {:>7.0}",
        program.num_ranks(),
        result.ops,
        result.total_seconds(),
        taken.as_secs_f64(),
        result.ops as f64 / taken.as_secs_f64() / 1e6,
        program.table_bytes() as f64 / result.ops as f64,
        peak_rss() as f64 / 1e6,
    );
}

fn text_file(dp: u32) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("step-{dp}.goal"))
}

fn write_text(program: &MessageProgram, path: &Path) {
    let start = cpu_time();
    goal::write(program, &mut BufWriter::with_capacity(1 << 20, File::create(path).unwrap())).unwrap();
    let (taken, bytes) = (cpu_time().saturating_sub(start).as_secs_f64(), fs::metadata(path).unwrap().len() as f64);
    let ranks = program.num_ranks();
    println!(
        "goal-file of {ranks} ranks: {:.2} GB, written in {taken:.2} CPU s, {:.0} MB/s",
        bytes / 1e9,
        bytes / taken / 1e6
    );
}

fn read_text(path: &Path, seconds: f64) {
    let start = cpu_time();
    let program = goal::open(path).unwrap();
    let load = cpu_time().saturating_sub(start).as_secs_f64();
    let loaded_rss = peak_rss();
    let (result, taken) = evaluated(&program, seconds, STEP_TOLERANCE);
    let (taken, bytes) = (taken.as_secs_f64(), fs::metadata(path).unwrap().len() as f64);
    println!(
        "  {} ops, {:.6} s: load {load:.2} CPU s ({:.0} MB/s, RSS {:.0} MB) + evaluate {taken:.2} CPU s = {:.2} CPU s, RSS {:.0} MB",
        result.ops,
        result.total_seconds(),
        bytes / load / 1e6,
        loaded_rss as f64 / 1e6,
        load + taken,
        peak_rss() as f64 / 1e6
    );
}
