//! Atomics from `core`, or from loom when the crate is built for model checking (`--cfg prism_loom`).
//!
//! Only code whose interleavings are model-checked ([`crate::ring`], [`crate::reply`], [`crate::wait`]) goes through here.

#[cfg(not(prism_loom))]
pub(crate) use core::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

#[cfg(prism_loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};
