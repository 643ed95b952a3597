//! C functions of the value plane and the framework hook, and the allocator's reports.

use super::known::{self, Grade};
use super::{allocated as block_allocated, freed as block_freed, hold, is_on, provided, reads};
use crate::guard::guard;
use crate::memory::ADDRESSES;
use crate::original::Original;
use crate::{memory, session};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Codes of grades in the functions below: unknown, known; any other number is a rule that provides the value.
const UNKNOWN: c_int = 0;
const KNOWN: c_int = -1;

/// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`: PyTorch's allocator calls it for
/// every block it hands out (a positive size) and takes back (a negative one). It goes on to PyTorch's own.
#[unsafe(no_mangle)]
pub extern "C" fn _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(
    pointer: *mut c_void,
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    static REAL: Original = Original::new(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE", None);
    type Report = extern "C" fn(*mut c_void, i64, usize, usize, u16);
    guard((), || {
        if session::is_connected() && memory::is_device(pointer) {
            match usize::try_from(bytes) {
                Ok(bytes) => block_allocated(pointer.addr(), bytes),
                Err(_) => block_freed(pointer.addr()),
            }
        }
    });
    let address = REAL.address();
    if !address.is_null() {
        // SAFETY: PyTorch's function of this name, which has this type.
        unsafe { std::mem::transmute::<*mut c_void, Report>(address)(pointer, bytes, allocated, reserved, device) };
    }
}

/// What `bytes` from `pointer` on are worth: 0 unknown, -1 known, any other number is that of the rule that provides them.
/// Memory of the host is known; so is everything where values are not graded.
#[unsafe(no_mangle)]
pub extern "C" fn prism_value_grade(pointer: *const c_void, bytes: usize) -> c_int {
    guard(UNKNOWN, || {
        if !is_on() || bytes == 0 || !ADDRESSES.contains(&pointer.addr()) {
            return KNOWN;
        }
        // What is captured runs later, on values that are not there yet: the CPU must not run it now.
        if crate::capture::is_active() {
            return UNKNOWN;
        }
        match known::grade(pointer.addr(), bytes) {
            Grade::Unknown(_) => UNKNOWN,
            Grade::Provided(rule) => rule as c_int,
            Grade::Known => KNOWN,
        }
    })
}

/// Says what `bytes` from `pointer` on are worth, in the numbers of [`prism_value_grade`]. Bytes that become unknown are
/// taken to be written by what the calling thread launched last.
#[unsafe(no_mangle)]
pub extern "C" fn prism_value_set(pointer: *const c_void, bytes: usize, grade: c_int) {
    guard((), || {
        if !is_on() || !ADDRESSES.contains(&pointer.addr()) {
            return;
        }
        match grade {
            UNKNOWN => known::unknown(pointer.addr(), bytes, hold::last_writer()),
            KNOWN => known::known(pointer.addr(), bytes, None),
            rule => known::known(pointer.addr(), bytes, Some(rule as u32)),
        }
    });
}

/// From here on to the matching [`prism_value_release`], launches of the calling thread leave known values known: the
/// caller says by [`prism_value_set`] what its operator has written. Pairs may be nested.
#[unsafe(no_mangle)]
pub extern "C" fn prism_value_hold() {
    guard((), hold::begin);
}

/// See [`prism_value_hold`]. 1 if the thread has launched anything since, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn prism_value_release() -> c_int {
    guard(1, || c_int::from(hold::end()))
}

/// The number of a rule by its name; -1 for no name.
///
/// # Safety
/// `name` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_value_rule(name: *const c_char) -> c_int {
    guard(KNOWN, || {
        if name.is_null() {
            return KNOWN;
        }
        // SAFETY: the contract of this function.
        known::number(&unsafe { CStr::from_ptr(name) }.to_string_lossy()) as c_int
    })
}

/// While `is_on` is not 0, reads of up to eight bytes by the calling thread find `value`.
#[unsafe(no_mangle)]
pub extern "C" fn prism_value_script(value: i64, is_on: c_int) {
    guard((), || reads::script((is_on != 0).then_some(value)));
}

/// Writes the value that a rule provides: `bytes` from `data` to `pointer`. 0, or -1 for a range outside any allocation.
///
/// # Safety
/// `data` must point to `bytes` bytes, `rule` be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_value_provide(
    pointer: *mut c_void,
    data: *const c_void,
    bytes: usize,
    rule: *const c_char,
) -> c_int {
    guard(-1, || {
        if data.is_null() || rule.is_null() || !memory::is_device(pointer) || !memory::contains(pointer, bytes) {
            return -1;
        }
        // SAFETY: the source and the rule are the caller's; the destination lies in one allocation of the device.
        let rule = unsafe {
            std::ptr::copy_nonoverlapping(data.cast::<u8>(), pointer.cast::<u8>(), bytes);
            CStr::from_ptr(rule)
        };
        provided(pointer.addr(), bytes, &rule.to_string_lossy());
        0
    })
}

/// A remark about a value for the run's summary, sent at once.
///
/// # Safety
/// `text` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prism_value_note(text: *const c_char) {
    guard((), || {
        if !text.is_null() {
            // SAFETY: the contract of this function.
            reads::remark(&unsafe { CStr::from_ptr(text) }.to_string_lossy());
        }
    });
}

/// The number of a name that lives for ever, looked up once for each address.
///
/// # Safety
/// `name` must be a C string that lives for ever.
unsafe fn number_of(name: *const c_char) -> u32 {
    const MOST: usize = 16;
    static ADDS: Mutex<()> = Mutex::new(());
    static KNOWN_NAMES: [(AtomicUsize, AtomicU32); MOST] = [const { (AtomicUsize::new(0), AtomicU32::new(0)) }; MOST];
    for (address, number) in &KNOWN_NAMES {
        match address.load(Ordering::Acquire) {
            0 => break,
            known if known == name.addr() => return number.load(Ordering::Relaxed),
            _ => {}
        }
    }
    // SAFETY: the contract of this function.
    let number = known::number(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
    let _guard = ADDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(free) = KNOWN_NAMES.iter().find(|(address, _)| address.load(Ordering::Relaxed) == 0) {
        free.1.store(number, Ordering::Relaxed);
        free.0.store(name.addr(), Ordering::Release);
    }
    number
}

/// For the NCCL stand-in (`SessionTable::received`).
pub(crate) unsafe extern "C" fn received(
    to: *const c_void,
    bytes: usize,
    from: *const c_void,
    from_bytes: usize,
    name: *const c_char,
    fate: c_int,
) {
    guard((), || {
        if !is_on() || !ADDRESSES.contains(&to.addr()) || name.is_null() {
            return;
        }
        if fate == prism_wire::device::RECEIVED_NOTHING {
            // SAFETY: the table's user passes a C string that lives for ever.
            return known::unknown(to.addr(), bytes, unsafe { number_of(name) });
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let sent = if from.is_null() { Grade::Known } else { known::grade(from.addr(), from_bytes) };
        match (fate, sent) {
            (_, Grade::Unknown(writer)) => known::unknown(to.addr(), bytes, writer),
            (prism_wire::device::RECEIVED_OWN, Grade::Known) => known::known(to.addr(), bytes, None),
            (_, Grade::Provided(rule)) => known::known(to.addr(), bytes, Some(rule)),
            (_, Grade::Known) => known::known(to.addr(), bytes, Some(known::number(&format!("mirrored {name}")))),
        }
    });
}
