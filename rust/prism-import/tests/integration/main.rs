//! One binary for all integration tests: it links once.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod calibrate;
mod chakra;
mod execution;
mod hostile;
mod kineto;
mod kineto_cases;
mod simai;
mod support;
