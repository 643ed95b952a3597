//! The border to C: no panic crosses it, every error becomes a result code and a last-error text.

use crate::abi::{Code, Team};
use core::ffi::{c_char, c_int};
use std::borrow::Cow;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What the caller gets.
    pub(crate) code: Code,
    /// What `ncclGetLastError` says afterwards; empty leaves the text of an earlier failure.
    pub(crate) text: Cow<'static, str>,
}

impl Failure {
    /// A failure with a text.
    #[cold]
    pub(crate) fn new(code: Code, text: impl Into<Cow<'static, str>>) -> Self {
        Self { code, text: text.into() }
    }

    /// A failure that was already explained.
    #[cold]
    pub(crate) fn again(code: Code) -> Self {
        Self { code, text: Cow::Borrowed("") }
    }

    /// A required pointer is null.
    #[cold]
    pub(crate) fn null(function: &str, argument: &str) -> Self {
        Self::new(Code::InvalidArgument, format!("{function} : {argument} argument is NULL"))
    }
}

/// Result of a call before it is turned into an `ncclResult_t`.
pub(crate) type Outcome = Result<(), Failure>;

/// What a function body returns, and how that looks in C.
pub(crate) trait Answer {
    /// The C type.
    type C;
    /// The C value when the body panicked.
    const PANICKED: Self::C;
    /// The C value of an answer.
    fn into_c(self) -> Self::C;
}

impl Answer for Outcome {
    type C = c_int;
    const PANICKED: c_int = Code::InternalError as c_int;

    fn into_c(self) -> c_int {
        match self {
            Ok(()) => Code::Success as c_int,
            Err(failure) => {
                if !failure.text.is_empty() {
                    set_last_error(&failure.text);
                }
                failure.code as c_int
            }
        }
    }
}

impl Answer for *const c_char {
    type C = *const c_char;
    const PANICKED: *const c_char = c"".as_ptr();

    fn into_c(self) -> *const c_char {
        self
    }
}

impl Answer for c_int {
    type C = c_int;
    const PANICKED: c_int = -1;

    fn into_c(self) -> c_int {
        self
    }
}

impl Answer for Team {
    type C = Team;
    const PANICKED: Team = Team::EMPTY;

    fn into_c(self) -> Team {
        self
    }
}

impl Answer for () {
    type C = ();
    const PANICKED: () = ();

    fn into_c(self) {}
}

/// Runs the body of an exported function.
pub(crate) fn call<A: Answer>(body: impl FnOnce() -> A) -> A::C {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => answer.into_c(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            set_last_error(&format!("internal error of the NCCL stand-in: {text}"));
            A::PANICKED
        }
    }
}

/// Room for the last-error text, as in NCCL.
const TEXT_BYTES: usize = 1024;
/// The text C programs read. Bytes are atomic because readers hold the pointer without a lock; the last byte stays 0.
static TEXT: [AtomicU8; TEXT_BYTES] = [const { AtomicU8::new(0) }; TEXT_BYTES];
static WRITING: Mutex<()> = Mutex::new(());

/// Replaces the text of `ncclGetLastError`. A text lost because another thread writes one at this moment is no loss.
#[cold]
pub(crate) fn set_last_error(text: &str) {
    let Ok(_writing) = WRITING.try_lock() else { return };
    let bytes = text.bytes().filter(|byte| *byte != 0).take(TEXT_BYTES - 1).chain(std::iter::once(0));
    for (target, byte) in TEXT.iter().zip(bytes) {
        target.store(byte, Ordering::Relaxed);
    }
}

/// The text of the last failure in this process.
pub(crate) fn last_error() -> *const c_char {
    TEXT.as_ptr().cast()
}

/// One line for the user on standard error.
#[cold]
pub(crate) fn tell(text: &str) {
    // Nothing better can be done if standard error is closed.
    let _ = std::io::stderr().write_all(format!("prism-nccl: {text}\n").as_bytes());
}
