//! Whole sessions over the real sockets and rings, with scripted ranks instead of training processes.

mod agreement;
mod background;
mod determinism;
mod failures;
mod foreseen;
mod identity;
mod members;
mod player;
mod programs;
mod stage;
mod store;
mod timeline;
