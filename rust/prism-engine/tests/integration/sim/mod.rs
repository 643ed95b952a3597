//! The simulation against a brute-force evaluator, fed in every order, split in every way.

mod batches;
mod failures;
pub(crate) mod jobs;
pub(crate) mod laws;
pub(crate) mod live;
mod pruning;
mod ranks;
pub(crate) mod reference;
mod symmetry;
mod synthetic;
pub(crate) mod turns;
