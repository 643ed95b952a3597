//! The C functions of libcudart, by area. Bodies are one line where the work is done elsewhere.

pub(crate) mod device;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod stream;
