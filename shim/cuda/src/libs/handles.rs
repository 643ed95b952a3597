//! Opaque handles that a C program holds and this library looks up.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// First handle value; not a canonical address, so a program that dereferences a handle faults at once.
const BASE: usize = 0x5052_0000_0000_0000;
/// Distance between handle values: programs may expect pointers to be aligned.
const STEP: usize = 16;

/// Objects behind handles. A handle is never used twice, so a stale one is always recognised.
///
/// Lookup is O(log n) under a shared lock.
pub(crate) struct Table<T> {
    next: AtomicUsize,
    entries: RwLock<BTreeMap<usize, Arc<T>>>,
}

impl<T> Table<T> {
    /// An empty table.
    pub(crate) const fn new() -> Self {
        Self { next: AtomicUsize::new(1), entries: RwLock::new(BTreeMap::new()) }
    }

    /// Stores `value` and returns its handle.
    pub(crate) fn insert(&self, value: T) -> *mut c_void {
        let handle = BASE + STEP * self.next.fetch_add(1, Ordering::Relaxed);
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(value));
        std::ptr::without_provenance_mut(handle)
    }

    /// The object behind `handle`, or `None` for null, a stale handle or one of another kind.
    pub(crate) fn get(&self, handle: *const c_void) -> Option<Arc<T>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&handle.addr()).cloned()
    }

    /// Takes the object out; the handle is stale from now on.
    pub(crate) fn remove(&self, handle: *const c_void) -> Option<Arc<T>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_handles_are_unknown() {
        let table = Table::new();
        let first = table.insert(1);
        let second = table.insert(2);
        assert_ne!(first, second);
        assert_eq!(table.get(first).as_deref(), Some(&1));
        assert_eq!(table.remove(first).as_deref(), Some(&1));
        assert!(table.get(first).is_none() && table.remove(first).is_none());
        assert_ne!(table.insert(3), first);
        assert!(table.get(std::ptr::null()).is_none());
    }
}
