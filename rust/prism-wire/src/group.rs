//! The process group that the calling thread is creating, as the framework hook told: whoever makes a communicator in
//! the meantime makes it for that group.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

thread_local! {
    static GROUP: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Remembers the group's name, and has its members (global ranks in group-rank order) told to the engine: `tell` gets them
/// and the name. What it returned: 0, or -1 when nobody was told; also -1 for null pointers.
///
/// # Safety
/// `name` must be null or a C string, `ranks` point to `count` numbers.
pub unsafe fn note(
    name: *const c_char,
    ranks: *const u32,
    count: u32,
    tell: impl FnOnce(&[u32], &str) -> bool,
) -> c_int {
    if name.is_null() || (ranks.is_null() && count > 0) {
        return -1;
    }
    // SAFETY: the contract of this function.
    let (name, ranks) = unsafe {
        let ranks = if count == 0 { &[][..] } else { std::slice::from_raw_parts(ranks, count as usize) };
        (CStr::from_ptr(name), ranks)
    };
    GROUP.set(Some(name.to_owned()));
    if tell(ranks, &name.to_string_lossy()) { 0 } else { -1 }
}

/// Name of the calling thread's group, or null. Valid until the thread's next [`note`] or [`clear`].
pub fn current() -> *const c_char {
    GROUP.with_borrow(|group| group.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()))
}

/// The group has been created.
pub fn clear() {
    GROUP.set(None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_told_and_remembered_until_it_exists() {
        let told = |ranks: &[u32], name: &str| ranks == [3, 5] && name == "tp";
        // SAFETY: a C string and two numbers.
        assert_eq!(unsafe { note(c"tp".as_ptr(), [3, 5].as_ptr(), 2, told) }, 0);
        // SAFETY: nothing changed it since.
        assert_eq!(unsafe { CStr::from_ptr(current()) }, c"tp");
        clear();
        assert!(current().is_null());
    }

    #[test]
    fn null_pointers_and_a_lost_engine_are_failures() {
        let never = |_: &[u32], _: &str| unreachable!("nothing to tell");
        // SAFETY: null is refused.
        unsafe {
            assert_eq!(note(std::ptr::null(), [1].as_ptr(), 1, never), -1);
            assert_eq!(note(c"tp".as_ptr(), std::ptr::null(), 1, never), -1);
            assert_eq!(note(c"none".as_ptr(), std::ptr::null(), 0, |_, _| false), -1);
        }
        assert!(!current().is_null(), "the group is being made all the same");
        clear();
    }
}
