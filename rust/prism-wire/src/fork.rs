//! Tells a process from its forked children for the price of one load.

use crate::sys::Mapping;
use std::sync::atomic::{AtomicU32, Ordering};

/// True in the process that made it, false in every process forked from it.
///
/// A page that the kernel zeroes in children does it: unlike a fork handler it also sees raw `clone` calls, and unlike
/// comparing process ids it needs no system call.
#[derive(Debug)]
pub(crate) struct Owner {
    page: Option<Mapping>,
    pid: u32,
}

impl Owner {
    pub(crate) fn new() -> Self {
        let page = Mapping::private(size_of::<AtomicU32>()).and_then(|page| page.wipe_on_fork().map(|()| page));
        // A kernel without that advice (before 4.14, some emulated ones) leaves the comparison of process ids.
        let owner = Self { page: page.ok(), pid: std::process::id() };
        if let Some(mark) = owner.mark() {
            mark.store(1, Ordering::Relaxed);
        }
        owner
    }

    /// Is the caller the process that made this value?
    #[inline]
    pub(crate) fn is_caller(&self) -> bool {
        match self.mark() {
            Some(mark) => mark.load(Ordering::Relaxed) == 1,
            None => std::process::id() == self.pid,
        }
    }

    fn mark(&self) -> Option<&AtomicU32> {
        // SAFETY: the mapping is page aligned, at least four bytes long, lives as long as `self` and holds nothing else;
        // every bit pattern is a valid atomic.
        self.page.as_ref().map(|page| unsafe { page.base().cast::<AtomicU32>().as_ref() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_page_process_ids_decide() {
        assert!(Owner { page: None, pid: std::process::id() }.is_caller());
        assert!(!Owner { page: None, pid: std::process::id() + 1 }.is_caller());
    }

    #[test]
    fn a_zeroed_mark_is_a_child() {
        let owner = Owner::new();
        assert!(owner.is_caller());
        owner.mark().expect("this kernel knows MADV_WIPEONFORK").store(0, Ordering::Relaxed);
        assert!(!owner.is_caller());
    }
}
