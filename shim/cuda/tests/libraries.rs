//! The math libraries under `LD_PRELOAD`: a C program (`libraries.c`) uses them against a small engine in this process.

mod support;

use prism_wire::control::ControlKind;
use prism_wire::message::{DataType, Record, RecordKind};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Engine, PROFILE, Sent};

/// The library, built by cargo beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    let folder = test.ancestors().nth(2).expect("target/PROFILE/deps/test");
    let library = folder.join("libprism_cuda.so");
    assert!(library.is_file(), "{} is missing: build the crate first", library.display());
    library
}

/// Compiles and runs the C program, for the test `name`, against an engine whose card has this compute capability.
fn run(name: &str, capability: &str) -> (Sent, String, bool) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries.c");
    let stem = format!("libraries-{}-{name}", std::process::id());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&stem);
    let status = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .args([program.as_path(), source.as_path(), library().as_path()])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    let folder = std::env::temp_dir().join(format!("prism-cuda-{stem}"));
    let profile = PROFILE.replace("capability=9.0", &format!("capability={capability}"));
    let engine = Engine::start(&folder, &profile);
    let output = Command::new(&program)
        .env("LD_PRELOAD", library())
        .env("PRISM_SESSION", engine.path())
        .envs([("PRISM_RANK", "0"), ("PRISM_WORLD_SIZE", "1")])
        .output()
        .expect("the program runs");
    let mut sent = engine.finish();
    let _ = std::fs::remove_dir(&folder);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(sent.len(), 1, "one session: {text}");
    (sent.remove(0), text, output.status.success())
}

/// m, n, k, batch, input and compute type of a product.
fn product(record: &Record) -> ([u64; 4], Option<DataType>, Option<DataType>) {
    let dtype = |number: u32| DataType::from_u8(number as u8);
    ([record.a, record.b, record.c, record.d], dtype(record.f), dtype(record.g))
}

#[test]
fn library_calls_become_records_of_their_work() {
    let (sent, text, success) = run("records", "9.0");
    assert!(success, "{text}");
    let names = sent.names();
    let gemms: Vec<_> = sent.of(RecordKind::Gemm);
    let shown: Vec<_> = gemms.iter().map(|record| (names[&record.e].as_str(), product(record))).collect();
    let (bf16, f32, tf32) = (Some(DataType::Bfloat16), Some(DataType::Float32), Some(DataType::Tf32));
    let expected = [
        ("cublasGemmEx", ([96, 64, 32, 1], bf16, f32)),
        ("cublasSgemmStridedBatched", ([8, 4, 2, 3], f32, f32)),
        ("cublasSgemmStridedBatched", ([8, 4, 2, 3], f32, tf32)),
        ("cublasLtMatmul", ([16, 32, 48, 1], bf16, f32)),
        ("cublasLtMatmul", ([16, 32, 48, 1], Some(DataType::Float8e4m3), f32)),
    ];
    assert_eq!(shown, expected);
    let operators = sent.of(RecordKind::Operator);
    let shown: Vec<_> = operators.iter().map(|record| (names[&record.e].as_str(), record.a, record.b)).collect();
    let bytes = 2 * 2 * (16 * 8 + 8 * 4 + 16 * 4);
    let expected = [
        ("cublasSdot_v2", 20, 80),
        ("cudnn.matmul", 2 * 2 * 16 * 8 * 4, bytes),
        ("cusolverDnSpotrf", 64 * 64 * 64 / 3, 2 * 64 * 64 * 4),
        ("cusolverDnXgeqrf", 2 * 32 * 32 * (3 * 64 - 32) / 3, 2 * 64 * 32 * 4),
    ];
    assert_eq!(shown, expected);
    assert!(gemms.iter().chain(&operators).all(|record| record.stream == 1), "all on the stream that was set");
    assert!(sent.records.windows(2).all(|pair| pair[0].host_ns <= pair[1].host_ns));
}

#[test]
fn what_is_not_supported_is_named() {
    let (sent, text, _) = run("named", "9.0");
    let named = sent.controls.iter().filter(|(kind, _)| *kind == ControlKind::Unsupported);
    let named: Vec<_> = named.map(|(_, payload)| String::from_utf8_lossy(payload).into_owned()).collect();
    let expected = [
        "cublasSdot_v2 with a result on the host",
        "cublasLtMatmulDescSetAttribute(attribute 99)",
        "cublasLtMatmulDescSetAttribute(attribute 99)",
        "a cuBLASLt product with a grouped layout",
        "cudnnBackendFinalize(graph with an operation of type 28)",
    ];
    assert_eq!(named, expected);
    for name in expected {
        assert!(text.contains(&format!("prism: {name} is not supported by the emulated device")), "{text}");
    }
}

#[test]
fn eight_bit_floats_are_refused_on_an_older_card() {
    let (sent, text, success) = run("older", "8.0");
    assert!(!success);
    assert!(text.contains("cublasLtMatmulAlgoGetHeuristic"), "{text}");
    assert!(sent.of(RecordKind::Gemm).iter().all(|record| record.f != DataType::Float8e4m3 as u32));
}
