//! NVML for the emulated device: answers what frameworks ask about the cards, from the session's profile.
//!
//! The session belongs to `libprism_cuda.so`, which must be preloaded too; without it, or without a session, the driver
//! "is not loaded". What an emulated card does not have (power, temperature, utilisation) is "not supported".
#![allow(non_snake_case, reason = "exported names are those of NVML")]
#![allow(unreachable_pub, reason = "extern \"C\" exports are reached by the dynamic linker, not by Rust paths")]

mod device;
mod session;
mod system;

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `nvmlReturn_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(c_int);

impl Status {
    const UNINITIALIZED: Self = Self(1);
    const INVALID_ARGUMENT: Self = Self(2);
    const NOT_SUPPORTED: Self = Self(3);
    const NOT_FOUND: Self = Self(6);
    const INSUFFICIENT_SIZE: Self = Self(7);
    const DRIVER_NOT_LOADED: Self = Self(9);
    const UNKNOWN: Self = Self(999);
}

/// The body of a function: an error or a panic becomes its code.
fn answer(body: impl FnOnce() -> Result<(), Status>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Status::UNKNOWN)) {
        Ok(()) => 0,
        Err(status) => status.0,
    }
}

/// Writes an output argument; null is an invalid argument.
///
/// # Safety
/// `pointer` must be null or valid for a write.
unsafe fn put<T>(pointer: *mut T, value: T) -> Result<(), Status> {
    if pointer.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and valid by the contract of this function.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes a text and its closing zero into a buffer of `length` bytes.
///
/// # Safety
/// `buffer` must be null or writable for `length` bytes.
unsafe fn put_text(buffer: *mut c_char, length: u32, text: &CStr) -> Result<(), Status> {
    let bytes = text.to_bytes_with_nul();
    if buffer.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    if bytes.len() > length as usize {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    // SAFETY: not null, and long enough.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buffer, bytes.len()) };
    Ok(())
}

/// Defines exported functions: `name(argument: type, ...) => outcome;`.
macro_rules! exports {
    ($($(#[$meta:meta])* $name:ident($($argument:ident: $type:ty),* $(,)?) => $body:expr;)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            #[allow(unused_unsafe, reason = "not every body needs it")]
            // SAFETY: the C caller keeps the contract of the NVML function of this name.
            $crate::answer(|| unsafe { $body })
        }
    )*};
}

/// Defines exported functions that an emulated card answers with "not supported", as real cards do for what they lack.
macro_rules! not_supported {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> std::ffi::c_int {
            $crate::Status::NOT_SUPPORTED.0
        }
    )*};
}

use {exports, not_supported};
