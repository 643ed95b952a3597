//! The simulation against a brute-force evaluator, fed in every order, split in every way.

mod failures;
mod jobs;
mod laws;
mod live;
mod reference;
mod synthetic;
