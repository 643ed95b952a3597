//! `libprism_gpu.so`: owns the session of a process that runs on a real GPU.
//!
//! Compute runs for real and untouched. What the NCCL stand-in tells through the session's table
//! ([`prism_wire::device::SessionTable`]) holds the program's streams by a kernel of ours, and a thread releases them when
//! the engine says that the communication ends: `session.rs` enqueues, `scheduler.rs` releases, `slots.rs` is the memory
//! both sides see, `hold.ptx` the kernel, `driver.rs` the CUDA driver, `errors.rs` how late the releases were.
//!
//! Inert unless `PRISM_SESSION` is set; nothing runs in constructors.
#![allow(unreachable_pub, reason = "extern \"C\" exports are reached by the dynamic linker, not by Rust paths")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod clock;
mod driver;
mod errors;
mod hook;
mod scheduler;
mod session;
mod slots;
mod table;

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function; a panic (already reported on stderr by the panic hook) becomes `on_panic`.
fn guard<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(on_panic)
}
