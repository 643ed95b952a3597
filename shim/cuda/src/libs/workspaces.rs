//! Memory that a program gives to cuBLAS and cuBLASLt to work in. It is the program's own, of its allocator, and listed
//! apart in the run's summary because it depends on settings and versions and not on the model.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Sizes by address, in bytes: one workspace may serve several handles.
static GIVEN: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
/// Address of the workspace that was noted last: most calls come with the same.
static LAST: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// A library is given `bytes` at `address`. A smaller size at the same address changes nothing.
#[inline]
pub(super) fn note(address: *const c_void, bytes: usize) {
    let address = address.addr();
    if address != 0 && bytes != 0 && LAST.swap(address, Ordering::Relaxed) != address {
        add(address, bytes);
    }
}

#[cold]
fn add(address: usize, bytes: usize) {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let size = given.entry(address).or_default();
    *size = (*size).max(bytes);
    TOTAL.store(given.values().sum::<usize>() as u64, Ordering::Relaxed);
}

/// Bytes of all workspaces so far.
pub(crate) fn total_bytes() -> u64 {
    TOTAL.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_counts_once_at_its_largest() {
        let place = |address: usize| std::ptr::without_provenance(address);
        for (address, bytes) in [(0x1000, 100), (0x2000, 50), (0x1000, 80), (0x2000, 70), (0, 9), (0x3000, 0)] {
            note(place(address), bytes);
        }
        assert_eq!(total_bytes(), 170);
    }
}
