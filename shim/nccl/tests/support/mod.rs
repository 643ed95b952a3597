//! Builds C programs against the library under test.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A compiled C program, and a directory in which the library has NCCL's file name.
pub(crate) struct Build {
    /// The program.
    pub(crate) program: PathBuf,
    dir: tempfile::TempDir,
}

impl Build {
    /// For `LD_LIBRARY_PATH`.
    pub(crate) fn library_dir(&self) -> &Path {
        self.dir.path()
    }
}

/// The library that cargo built for this test run: beside the test program.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libprism_nccl.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Compiles `tests/c/<source>` and links it with `-lnccl`.
pub(crate) fn compile(source: &str, name: &str, flags: &[&str]) -> Build {
    let dir = tempfile::tempdir().unwrap();
    for link in ["libnccl.so", "libnccl.so.2"] {
        symlink(library(), dir.path().join(link)).unwrap();
    }
    let program = dir.path().join(name);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let output = Command::new("cc")
        .args([
            "-std=gnu11",
            "-D_GNU_SOURCE",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
            "-g",
            "-O1",
            "-pthread",
        ])
        .args(flags)
        .arg(sources.join(source))
        .arg("-o")
        .arg(&program)
        .arg(format!("-L{}", dir.path().display()))
        .arg("-lnccl")
        .output()
        .expect("the tests need a C compiler named cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Build { program, dir }
}
