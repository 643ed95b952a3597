//! C++ names of kernels as people and profilers read them.
//!
//! The demangler is that of the C++ library the program has loaded anyway, the same that PyTorch's profiler uses, so that a
//! kernel has the same name here and in a trace of a real device. A process without it keeps mangled names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Names longer than this stay as they are (libkineto's limit).
const LONGEST: usize = 8192;

/// `abi::__cxa_demangle`.
type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;

fn demangler() -> Option<Demangle> {
    static FOUND: OnceLock<Option<Demangle>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: both strings end with a zero; RTLD_NOLOAD loads nothing. The library is never closed.
        let symbol = unsafe {
            let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            let library = if library.is_null() { libc::RTLD_DEFAULT } else { library };
            libc::dlsym(library, c"__cxa_demangle".as_ptr())
        };
        // SAFETY: the C++ ABI fixes the signature of this symbol.
        (!symbol.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Demangle>(symbol) })
    })
}

/// The name as a profiler shows it.
pub(crate) fn plain(name: &str) -> String {
    let readable = || {
        if !name.starts_with("_Z") || name.len() > LONGEST {
            return None;
        }
        let mangled = CString::new(name).ok()?;
        let mut status = 0;
        // SAFETY: a C string; no buffer is given, so the result is allocated with malloc.
        let text =
            unsafe { demangler()?(mangled.as_ptr(), std::ptr::null_mut(), std::ptr::null_mut(), &raw mut status) };
        if text.is_null() {
            return None;
        }
        // SAFETY: a C string from malloc, read before it is freed, and freed once.
        let plain = unsafe {
            let plain = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            plain
        };
        (status == 0).then_some(plain)
    };
    readable().unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mangled_name_stays() {
        for name in ["ampere_sgemm_128x64_nn", "", "_Z", "_Zgarbage", "triton_poi_fused_add_0"] {
            assert_eq!(plain(name), name);
        }
        let long = format!("_Z{}", "N".repeat(LONGEST));
        assert_eq!(plain(&long), long);
    }
}
