//! The functions of libc that this library stands in front of.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// An original function of libc, looked up on first use.
pub(crate) struct Original {
    name: &'static CStr,
    /// Symbol version of the current interface, where an older one of the same name exists (x86-64).
    version: Option<&'static CStr>,
    address: AtomicPtr<c_void>,
}

impl Original {
    /// The function of this name; `version` is needed where libc has an older one of the same name too.
    pub(crate) const fn new(name: &'static CStr, version: Option<&'static CStr>) -> Self {
        Self { name, version, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The function's address; null only on a libc that does not have it.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let mut found = std::ptr::null_mut();
        if let Some(version) = self.version {
            // SAFETY: both names are C strings; RTLD_NEXT finds the definition after this library.
            found = unsafe { libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), version.as_ptr()) };
        }
        if found.is_null() {
            // SAFETY: as above.
            found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        }
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls an [`Original`] of the given type, or returns `$missing` where libc does not have it.
macro_rules! original {
    ($original:expr, $type:ty, $missing:expr, ($($argument:expr),*)) => {{
        let address = $original.address();
        if address.is_null() {
            $missing
        } else {
            // SAFETY: the address is libc's function of that name, which has this type; the arguments are the caller's.
            unsafe { std::mem::transmute::<*mut c_void, $type>(address)($($argument),*) }
        }
    }};
}

pub(crate) use original;
