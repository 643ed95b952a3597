//! What the loader says: how often it has loaded something, and in which namespace this code lies.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// `dlinfo(3)`: the namespace of a handle.
const RTLD_DI_LMID: c_int = 1;
const LM_ID_BASE: libc::c_long = 0;

/// How many objects the loader has ever loaded, in all namespaces.
pub(crate) fn loads() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, out: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid description; `out` is the number below.
        unsafe { *out.cast::<u64>() = (*info).dlpi_adds };
        1
    }
    let mut loads = 0_u64;
    // SAFETY: the callback has the right type and writes to a number of this stack frame.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

/// The path of the object this code is linked into, if the loader put it into a namespace other than the program's.
pub(crate) fn own_path_if_secondary() -> Option<PathBuf> {
    // SAFETY: zeros are a value of this struct of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; the result lives on this stack frame.
    if unsafe { libc::dladdr(loads as *const c_void, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    let mut namespace = LM_ID_BASE;
    // SAFETY: the name is a C string of the loader's. A handle of an object that is there is counted and given back; the
    // program itself has no path to be opened by (null) and is in the base namespace.
    unsafe {
        let handle = libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if handle.is_null() {
            libc::dlerror(); // not the program's error
            return None;
        }
        libc::dlinfo(handle, RTLD_DI_LMID, (&raw mut namespace).cast());
        libc::dlclose(handle);
    }
    if namespace == LM_ID_BASE {
        return None;
    }
    // SAFETY: as above.
    Some(PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes())))
}
