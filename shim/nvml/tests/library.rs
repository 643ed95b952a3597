//! The library under `LD_PRELOAD`, asked by a C program that brings its own session.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library, which cargo has built beside this test.
fn library() -> PathBuf {
    let library = std::env::current_exe().expect("a path").with_file_name("libprism_nvml.so");
    assert!(library.is_file(), "{} is missing: build the crate first", library.display());
    library
}

fn program(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("cc")
        .args(["-std=gnu11", "-rdynamic", "-o"])
        .args([&program, &source])
        .arg("-ldl")
        .status()
        .expect("a C compiler");
    assert!(status.success());
    program
}

fn run(name: &str, with_session: bool) {
    let mut command = Command::new(program(name));
    command.env("LD_PRELOAD", library());
    if with_session {
        command.env("WITH_SESSION", "1");
    }
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn answers_from_the_profile() {
    run("nvml-with-session", true);
}

#[test]
fn has_no_driver_without_a_session() {
    run("nvml-without-session", false);
}
