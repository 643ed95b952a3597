//! A C program linked against the library as against NCCL, with a session owner of its own (`c/session.h`).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::process::Command;

#[test]
fn c_program_on_an_emulated_device() {
    let build = support::compile("driver.c", "driver", &["-rdynamic"]);
    let output = Command::new(&build.program).env("LD_LIBRARY_PATH", build.library_dir()).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}{stderr}");
    assert_eq!(stdout.lines().filter(|line| line.ends_with(" ok")).count(), 13, "{stdout}{stderr}");
    // One line for the user per refused function.
    let refused = stderr.lines().filter(|line| line.contains("ncclPutSignal")).count();
    assert_eq!(refused, 1, "{stderr}");
}
