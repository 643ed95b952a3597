//! One binary for all integration tests: it links once.

mod analysis;
mod collective;
mod contention;
mod cost;
mod graph;
mod hybrid;
mod messages;
mod perturb;
mod sim;
mod slice;
