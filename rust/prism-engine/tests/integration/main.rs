//! One binary for all integration tests: it links once.

mod analysis;
mod badinput;
mod collective;
mod contention;
mod cost;
mod graph;
mod graph_file;
mod hybrid;
mod messages;
mod perturb;
mod sim;
mod slice;
mod spare;
