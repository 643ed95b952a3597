//! The session of `libprism_cuda.so`, found at run time.

use crate::Status;
use prism_wire::device::{SESSION_SYMBOL, SessionTable};
use std::ffi::{CStr, c_int, c_void};

type GetTable = unsafe extern "C" fn() -> *const SessionTable;
type GetMemory = unsafe extern "C" fn(c_int, *mut usize, *mut usize) -> c_int;

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

fn table() -> Result<&'static SessionTable, Status> {
    let address = symbol(SESSION_SYMBOL).ok_or(Status::DRIVER_NOT_LOADED)?;
    // SAFETY: the symbol is this function by contract; its result is null or lives as long as the process.
    let table = unsafe { std::mem::transmute::<*mut c_void, GetTable>(address)().as_ref() };
    table.filter(|table| table.size >= size_of::<SessionTable>()).ok_or(Status::DRIVER_NOT_LOADED)
}

/// Is there a session?
pub(crate) fn check() -> Result<(), Status> {
    table().map(|_| ())
}

/// A text of the profile.
pub(crate) fn text(key: &CStr) -> Result<&'static CStr, Status> {
    // SAFETY: the key is a C string; the result is null or a C string that lives as long as the process.
    unsafe {
        let value = (table()?.config)(key.as_ptr());
        if value.is_null() { Err(Status::UNKNOWN) } else { Ok(CStr::from_ptr(value)) }
    }
}

/// A number of the profile.
pub(crate) fn number(key: &CStr) -> Result<u64, Status> {
    text(key)?.to_str().ok().and_then(|text| text.parse().ok()).ok_or(Status::UNKNOWN)
}

/// Free and total memory of a card.
pub(crate) fn memory(device: c_int) -> Result<(u64, u64), Status> {
    check()?;
    let address = symbol(c"prism_device_memory").ok_or(Status::DRIVER_NOT_LOADED)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the function has this type and writes the two numbers above.
    let rc = unsafe { std::mem::transmute::<*mut c_void, GetMemory>(address)(device, &raw mut free, &raw mut total) };
    if rc == 0 { Ok((free as u64, total as u64)) } else { Err(Status::UNKNOWN) }
}
