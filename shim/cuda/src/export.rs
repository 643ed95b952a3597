//! How the C functions are made: a line of an [`exports!`] list is one exported function and one entry of the table in
//! [`crate::functions`].

use crate::abi::{Error, Outcome};
use crate::guard::guard;
use std::cell::Cell;
use std::ffi::{c_int, c_void};

/// How far the emulated device goes along with a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    /// Does what the CUDA function does, as far as a device that runs no kernels can.
    Served,
    /// Fails loudly, with its name.
    Refused,
}

/// One exported function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    /// Its C name.
    pub(crate) name: &'static str,
    /// Whether it works.
    pub(crate) support: Support,
    /// Where it is.
    pub(crate) address: *const c_void,
}

thread_local! {
    static LAST_ERROR: Cell<c_int> = const { Cell::new(0) };
}

/// The body of a runtime function: its error is remembered for `cudaGetLastError`.
#[inline]
pub(crate) fn runtime(body: impl FnOnce() -> Outcome) -> c_int {
    let code = driver(body);
    if code != 0 {
        LAST_ERROR.set(code);
    }
    code
}

/// The body of a driver function.
#[inline]
pub(crate) fn driver(body: impl FnOnce() -> Outcome) -> c_int {
    match guard(Err(Error::UNKNOWN), body) {
        Ok(()) => 0,
        Err(error) => error.0,
    }
}

/// The calling thread's last runtime error, forgotten if `clear`.
pub(crate) fn last_error(clear: bool) -> c_int {
    if clear { LAST_ERROR.replace(0) } else { LAST_ERROR.get() }
}

/// Writes an output argument; a null pointer is an invalid value.
///
/// # Safety
/// `pointer` must be null or valid for a write of `T`.
#[inline]
pub(crate) unsafe fn put<T>(pointer: *mut T, value: T) -> Outcome {
    if pointer.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and valid by the contract of this function.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes an output argument that the caller may leave out.
///
/// # Safety
/// As for [`put`].
#[inline]
pub(crate) unsafe fn put_optional<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: not null, and valid by the contract of this function.
        unsafe { pointer.write(value) };
    }
}

/// Defines exported functions. `FAMILY, TABLE: name(argument: type, ...) => outcome;` makes an `extern "C"` function that
/// evaluates `outcome`, an [`Outcome`], inside the family's wrapper, and lists it in the constant `TABLE`.
macro_rules! exports {
    ($family:ident, $table:ident: $(
        $(#[$meta:meta])* $name:ident($($argument:ident: $type:ty),* $(,)?) => $body:expr;
    )*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
                #[allow(unused_unsafe, clippy::unused_unit, reason = "not every body needs it")]
                // SAFETY: the C caller keeps the contract of the CUDA function of this name.
                $crate::export::$family(|| unsafe { $body })
            }
        )*
        /// The functions defined by this list.
        pub(crate) const $table: &[$crate::export::Export] = &[$(
            $crate::export::Export {
                name: stringify!($name),
                support: $crate::export::Support::Served,
                address: $name as *const std::ffi::c_void,
            },
        )*];
    };
}

/// Defines exported functions that fail loudly. They take no notice of their arguments.
macro_rules! refused {
    ($family:ident, $table:ident: $($name:ident),* $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> std::ffi::c_int {
                $crate::export::$family(|| {
                    $crate::unsupported::call(stringify!($name));
                    Err($crate::abi::Error::NOT_SUPPORTED)
                })
            }
        )*
        /// The functions defined by this list.
        pub(crate) const $table: &[$crate::export::Export] = &[$(
            $crate::export::Export {
                name: stringify!($name),
                support: $crate::export::Support::Refused,
                address: $name as *const std::ffi::c_void,
            },
        )*];
    };
}

pub(crate) use {exports, refused};
