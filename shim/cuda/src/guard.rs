//! The wrapper of every exported body: a panic never crosses into C.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; a panic (already reported on stderr by the panic hook) becomes `on_panic`, the caller's family's error code.
///
/// `guard(CUBLAS_STATUS_INTERNAL_ERROR, || { ... })`
#[inline]
pub(crate) fn guard<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(on_panic)
}
