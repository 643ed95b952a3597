//! Finds NCCL code in the process that the stand-in does not stand in for.
//!
//! The preload and the audit module (`libprism_audit.so`) catch every client that loads NCCL as a library of its name. What
//! they cannot catch is looked for here, in what the process has mapped (`/proc/self/maps`, all namespaces):
//!
//! * a second `libnccl`, mapped by path without the audit module, or by path into a namespace of its own (`dlmopen`);
//! * a library or program that NCCL is linked into statically, when its calls are bound to that copy;
//! * a stand-in that was itself loaded into a second namespace: it would have a state of its own.
//!
//! A run with one of those would report a graph in which calls are missing, so it ends with [`EXIT_NOT_CAUGHT`] and says
//! why. Looking is cheap when nothing was loaded since the last time (one counter of the loader), and otherwise reads the
//! new files' symbol names and constants.

mod elf;
mod maps;
mod namespace;

use elf::Elf;
use maps::Object;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, TryLockError};

/// Exit code of a process with NCCL code that is not caught. The launcher turns it into an error with the process's words.
pub const EXIT_NOT_CAUGHT: i32 = 98;
/// Path of the real library in runs that pass calls on to it; it may be mapped.
const ENV_REAL_NCCL: &str = "PRISM_REAL_NCCL";
/// Files (`:` between them) with NCCL code of which the user says that this run does not call it.
const ENV_UNUSED_NCCL: &str = "PRISM_UNUSED_NCCL";
/// Functions that make a communicator: without them no other function does anything.
const MAKERS: [&str; 4] = ["ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitAll", "ncclCommInitRankScalable"];

/// Why the calls of some NCCL clients do not reach the stand-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is a libnccl, by file name or SONAME.
    SecondLibrary,
    /// NCCL is linked into it; its version text, or what else tells.
    LinkedIn(String),
    /// It is a stand-in, in a namespace of its own.
    OwnNamespace,
}

/// An object whose NCCL calls do not reach the stand-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intruder {
    /// The mapped file.
    pub path: PathBuf,
    /// What it is.
    pub reason: Reason,
}

impl fmt::Display for Intruder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.reason {
            Reason::SecondLibrary => write!(
                f,
                "a second NCCL is loaded and its calls are not emulated: {path}. It was opened by its path past the preload \
                 (run without PRISM_AUDIT=off, which keeps it out), under another file name (open libnccl.so.2), or by \
                 dlmopen (use dlopen)"
            ),
            Reason::LinkedIn(evidence) => write!(
                f,
                "NCCL is linked statically into {path} ({evidence}) and its calls are not emulated. Use a build that needs \
                 libnccl.so.2 (PyTorch: USE_SYSTEM_NCCL=1 without USE_STATIC_NCCL, Horovod: HOROVOD_NCCL_LINK=SHARED); if \
                 this run never calls it, say {ENV_UNUSED_NCCL}={path}"
            ),
            Reason::OwnNamespace => write!(
                f,
                "{path} was loaded into a namespace of its own (dlmopen) and cannot share the device of this process. Load \
                 the client with dlopen"
            ),
        }
    }
}

/// Objects that were looked at and are harmless, and the loader's count of loads at that time.
struct Known {
    loads: u64,
    harmless: BTreeSet<(u64, u64)>,
}

static KNOWN: Mutex<Known> = Mutex::new(Known { loads: 0, harmless: BTreeSet::new() });

/// The first object whose NCCL calls do not reach the stand-in.
pub fn look() -> Option<Intruder> {
    let mut known = match KNOWN.try_lock() {
        Ok(known) => known,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        // Another thread is looking, or was when this process was forked.
        Err(TryLockError::WouldBlock) => return None,
    };
    let loads = namespace::loads();
    if loads == known.loads {
        return None;
    }
    if let Some(path) = namespace::own_path_if_secondary() {
        return Some(Intruder { path, reason: Reason::OwnNamespace });
    }
    for object in maps::objects() {
        if known.harmless.contains(&object.id) {
            continue;
        }
        if let Some(reason) = reason_against(&object) {
            return Some(Intruder { path: object.path, reason });
        }
        known.harmless.insert(object.id);
    }
    known.loads = loads;
    None
}

/// Ends the process, with a line on standard error and [`EXIT_NOT_CAUGHT`], if it has NCCL code that is not caught.
pub fn insist() {
    let Some(intruder) = look() else { return };
    let text = format!("prism: {intruder}\n");
    // SAFETY: the buffer is valid for its length; `_exit` ends the process without running anything of the program.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::_exit(EXIT_NOT_CAUGHT);
    }
}

fn reason_against(object: &Object) -> Option<Reason> {
    let base = object.path.file_name().map_or(&[][..], OsStr::as_bytes);
    if base.starts_with(b"libprism_") || is_allowed(&object.path) {
        return None;
    }
    // What cannot be read (deleted since, no ELF file) is known by its name only.
    let elf = Elf::open(&object.path).ok();
    let soname = elf.as_ref().and_then(Elf::soname).unwrap_or_default();
    if is_libnccl(base) || is_libnccl(&soname) {
        let is_ours = elf.as_ref().is_some_and(Elf::is_forwarder);
        return (!is_ours).then_some(Reason::SecondLibrary);
    }
    let elf = elf?;
    let evidence = elf.nccl_code(&MAKERS)?;
    if elf.calls_leave(&MAKERS, object.start, object.offset) { None } else { Some(Reason::LinkedIn(evidence)) }
}

fn is_libnccl(name: &[u8]) -> bool {
    name.strip_prefix(b"libnccl.so").is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

fn is_allowed(path: &Path) -> bool {
    let is_it = |named: &Path| path == named || std::fs::canonicalize(named).is_ok_and(|named| named == path);
    std::env::var_os(ENV_REAL_NCCL).is_some_and(|real| is_it(Path::new(&real)))
        || std::env::var_os(ENV_UNUSED_NCCL)
            .is_some_and(|unused| std::env::split_paths(&unused).any(|path| is_it(&path)))
}

#[cfg(test)]
mod tests {
    use super::{Intruder, Reason, is_libnccl, look};
    use std::path::PathBuf;

    #[test]
    fn libnccl_is_known_by_its_name() {
        for name in ["libnccl.so", "libnccl.so.2", "libnccl.so.2.30.7"] {
            assert!(is_libnccl(name.as_bytes()), "{name}");
        }
        for name in ["libnccl_ep.so", "libnccl-net.so", "libnccl.sox", "nccl.so", ""] {
            assert!(!is_libnccl(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_process_without_nccl_has_no_intruder() {
        assert_eq!(look(), None);
        assert_eq!(look(), None);
    }

    #[test]
    fn the_text_names_the_file_and_what_to_do() {
        let text = |reason| Intruder { path: PathBuf::from("/opt/x.so"), reason }.to_string();
        for (reason, remedy) in [
            (Reason::SecondLibrary, "PRISM_AUDIT"),
            (Reason::LinkedIn("it defines ncclCommInitRank".into()), "HOROVOD_NCCL_LINK"),
            (Reason::OwnNamespace, "dlopen"),
        ] {
            let text = text(reason);
            assert!(text.contains("/opt/x.so") && text.contains(remedy), "{text}");
        }
    }
}
