//! Fault tolerance: published and computed values, and the controller against an oracle.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod controller;
mod policies;
mod recovery;
mod vectors;
