//! Message programs.

#![allow(clippy::unwrap_used, clippy::format_push_string, clippy::print_stderr, reason = "helpers of tests")]

mod blocked;
mod goal;
mod loggops;
mod program;
mod programs;
mod reference;
mod store;
mod workloads;
