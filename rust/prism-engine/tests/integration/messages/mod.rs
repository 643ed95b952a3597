//! Message programs.

mod blocked;
mod goal;
mod loggops;
mod program;
mod programs;
mod reference;
mod store;
mod workloads;
