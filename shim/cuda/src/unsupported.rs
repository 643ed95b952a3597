//! Calls the emulated device does not support: each fails, is counted by the engine, and says its name once on stderr.

use crate::{guard::guard, python, real, session};
use prism_wire::control::ControlKind;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;

static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Reports that `name` was called. The engine counts every call; stderr gets one line per name.
///
/// To be called at every use, by a function that then returns its family's "not supported" code.
pub(crate) fn call(name: &str) {
    let is_new = SEEN.lock().is_ok_and(|mut seen| !seen.contains(name) && seen.insert(name.to_owned()));
    if is_new {
        let place = python::location().unwrap_or_else(|| "unknown place".into());
        real::log(&format!("prism: {name} is not supported by the emulated device (python: {place})\n"));
    }
    if session::is_connected() {
        // A refusal or a dead engine is reported by `control` itself; the call fails in any case.
        let _ = session::control(ControlKind::Unsupported, name.as_bytes());
    }
}

/// Called by the generated libraries that stand in for NVIDIA libraries which are not installed, for every function that
/// this library does not have. Returns -1.
///
/// # Safety
/// `name` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_unsupported_call(name: *const c_char) -> c_int {
    guard(-1, || {
        if name.is_null() {
            call("a function without a name");
        } else {
            // SAFETY: a C string by the contract of this function.
            call(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
        }
        -1
    })
}
