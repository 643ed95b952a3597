//! One binary for all integration tests: it links once.

mod analysis;
mod badinput;
mod clocks;
mod collective;
mod contention;
mod cost;
mod difference;
mod graph;
mod graph_file;
mod graph_size;
mod hybrid;
mod messages;
mod perturb;
mod sim;
mod slice;
mod spare;
