//! The C functions of libcuda, by area, and how programs find them by name.

pub(crate) mod context;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod stream;

use crate::export::Export;
use std::ffi::c_void;

/// All driver functions.
pub(crate) const TABLES: &[&[Export]] = &[
    context::FUNCTIONS,
    context::REFUSED,
    memory::FUNCTIONS,
    memory::REFUSED,
    module::FUNCTIONS,
    module::REFUSED,
    stream::FUNCTIONS,
    stream::REFUSED,
];

/// The driver function that stands for `name` in a program built for CUDA `version`. Programs ask by the plain name, which
/// the newest interface may carry with a suffix.
pub(crate) fn entry_point(name: &str, version: i32) -> Option<*const c_void> {
    let suffixes: &[&str] = match name {
        // Two interfaces in use: the driver gives the one of the caller's version.
        "cuGetProcAddress" if version >= 12_000 => &["_v2", ""],
        "cuCtxCreate" => &["_v2"],
        _ => &["", "_v2", "_v3"],
    };
    suffixes.iter().find_map(|suffix| {
        let wanted = format!("{name}{suffix}");
        TABLES.iter().flat_map(|table| table.iter()).find(|export| export.name == wanted).map(|export| export.address)
    })
}
