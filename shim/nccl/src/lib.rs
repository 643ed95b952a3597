//! `libprism_nccl.so`: stands in for `libnccl.so.2`.
//!
//! Every function of NCCL up to 2.32 is exported, so any client binds; `api_table.rs` is the complete list. Calls are
//! turned into [`prism_wire::message::Record`]s of the process's session. Without a session the library answers as NCCL does
//! on a machine without a GPU.
//!
//! # Payloads
//! On the host device, members of a communicator that all run exchange real data. Everywhere else it is tier T1, "mirror": what
//! a collective returns is not real; every peer is taken to contribute exactly what this rank contributes (see `values.rs`),
//! for payloads of at most 1 MiB; larger ones and receives leave the buffer as it is.
//!
//! # Files
//! `exports*.rs` read the C arguments; `ops.rs` is what a call does, in safe code; `life.rs` is how communicators come to be;
//! `comm.rs`, `group.rs` and `session.rs` hold the communicators, the group of the thread and the connection; `guard.rs` keeps
//! panics out of C. Real data: `channel.rs` has members find each other, `exchange.rs` moves messages, `collective.rs` makes
//! stages of them, `arith.rs` reduces.

// NCCL's own names, as C callers spell them.
#![allow(non_snake_case)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

#[macro_use]
mod api_table;

mod abi;
mod arith;
mod channel;
mod collective;
mod comm;
mod config;
mod exchange;
mod exports;
mod exports_init;
mod exports_rest;
mod floats;
mod graphs;
mod group;
mod guard;
mod host;
mod life;
mod notes;
mod one_sided;
mod ops;
mod params;
mod passthrough;
mod session;
mod shares;
mod staged;
mod values;

use abi::{Code, CollConfig, RawUniqueId, SimInfo, Team};
use core::ffi::{c_char, c_int, c_uint, c_void};

/// An opaque handle of the caller (`ncclComm_t`, `cudaStream_t`, `ncclWindow_t`).
type Handle = *mut c_void;

/// Exports every function of the table.
macro_rules! export {
    (
        emulated { $($since:literal $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $body:path;)* }
        without_twin { $($one_since:literal $one:ident() -> () = $one_body:path;)* }
        refused { $($no_since:literal $on:ident $no:ident $code:ident;)* }
    ) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "some bodies need no promise of the caller")]
            unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: the caller keeps NCCL's contract for the arguments of this function.
                guard::call(|| unsafe { $body($($arg),*) })
            }
        )*
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $one() {
                guard::call($one_body)
            }
        )*
        $(
            // Arguments beyond the first lie where this function does not look.
            #[unsafe(no_mangle)]
            extern "C" fn $no(comm: Handle) -> c_int {
                guard::call(|| ops::refuse_export(stringify!($no), Code::$code, on_comm!($on comm)))
            }
        )*
        mod twins {
            use super::*;
            $(
                #[unsafe(export_name = concat!("p", stringify!($name)))]
                unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                    // SAFETY: as for the function itself.
                    unsafe { super::$name($($arg),*) }
                }
            )*
            $(
                #[unsafe(export_name = concat!("p", stringify!($no)))]
                extern "C" fn $no(comm: Handle) -> c_int {
                    super::$no(comm)
                }
            )*
        }
        /// Name and first version of every function.
        #[cfg(test)]
        const FUNCTIONS: &[(&str, &str)] = &[
            $((stringify!($name), stringify!($since)),)*
            $((stringify!($one), stringify!($one_since)),)*
            $((stringify!($no), stringify!($no_since)),)*
        ];
    };
}

/// The communicator that a refused function checks first, if it does.
macro_rules! on_comm {
    (comm $comm:ident) => {
        Some($comm)
    };
    (plain $comm:ident) => {{
        let _ = $comm;
        None
    }};
}

api_table!(export);

#[cfg(test)]
mod tests {
    use super::FUNCTIONS;
    use std::collections::BTreeSet;

    /// How many functions each version of NCCL exports.
    const COUNTS: [(&str, usize); 10] = [
        ("2.18", 27),
        ("2.19", 31),
        ("2.22", 32),
        ("2.23", 33),
        ("2.24", 34),
        ("2.27", 37),
        ("2.28", 53),
        ("2.29", 69),
        ("2.30", 83),
        ("2.32", 97),
    ];

    #[test]
    fn the_table_has_what_each_version_has() {
        let names: BTreeSet<_> = FUNCTIONS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), FUNCTIONS.len());
        for (version, count) in COUNTS {
            let known = FUNCTIONS.iter().filter(|(_, since)| *since <= version).count();
            assert_eq!(known, count, "{version}");
        }
    }
}
