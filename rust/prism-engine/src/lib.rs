//! Execution graph, collectives, replay and hybrid emulation of distributed training.
pub mod graph;
pub mod ids;
pub mod units;
pub mod slice;
pub mod collective;
pub mod cost;
pub mod profile;
pub mod sim;
pub mod replay;
pub mod prune;
pub mod synthetic;
