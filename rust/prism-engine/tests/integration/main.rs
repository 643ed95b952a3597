//! One binary for all integration tests: it links once.

mod analysis;
mod graph;
mod hybrid;
mod slice;
mod perturb;
mod sim;
mod collective;
mod cost;
