//! Fault tolerance: published and computed values, and the controller against an oracle.

mod controller;
mod policies;
mod vectors;
