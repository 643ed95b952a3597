//! What work costs on the device of a profile, when nobody measured it.
pub mod comm;
pub mod compute;
pub mod durations;
pub mod kernels;
pub mod names;
