//! Tells the extension from which revision it is built, for bug reports.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=PRISM_REVISION");
    let given = std::env::var("PRISM_REVISION").ok().filter(|revision| !revision.is_empty());
    let revision = given.or_else(from_git).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=PRISM_REVISION={revision}");
}

/// The commit of the working tree, marked where files differ from it; nothing outside a repository of our own.
fn from_git() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    let head = git(&["rev-parse", "--git-path", "HEAD"])?;
    let logs = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    for path in [head, logs, "src".to_owned(), "build.rs".to_owned()] {
        println!("cargo:rerun-if-changed={path}");
    }
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let revision = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { revision } else { format!("{revision}+") })
}
