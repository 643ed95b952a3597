//! One binary for all integration tests: it links once.

mod graph;
mod slice;
mod sim;
mod collective;
mod cost;
