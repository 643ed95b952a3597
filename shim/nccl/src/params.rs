//! `ncclParam*`: the parameters that NCCL 2.30 has registered, read from the environment (`src/param/`, `src/debug.cc`).
//!
//! Values are read at every call; NCCL keeps two of them from its first look (`NCCL_SET_THREAD_NAME`, `NCCL_NO_CACHE`).

use crate::abi::Code;
use crate::exports_init::own_version;
use crate::guard::{Failure, Outcome};
use crate::ops::refuse_part;
use core::ffi::{CStr, c_char, c_int, c_void};
use std::cell::RefCell;
use std::ffi::CString;

/// Names of bits or of a level's numbers.
type Options = &'static [(&'static str, u64)];

/// What a parameter's value is.
enum Kind {
    /// A text, with its default.
    Text(Option<&'static str>),
    /// Yes or no; no by default.
    Flag,
    /// One of these, as a C enum; 0 by default.
    Level(Options),
    /// A mask of 32 bits, with its default.
    Mask32(Options, u64),
    /// A mask of 64 bits, with its default.
    Mask64(Options, u64),
}

struct Parameter {
    key: &'static str,
    kind: Kind,
    /// Is it in NCCL's documentation?
    is_published: bool,
}

const LEVELS: Options = &[("VERSION", 1), ("WARN", 2), ("INFO", 3), ("ABORT", 4), ("TRACE", 5)];
const LEVEL_BITS: Options =
    &[("VERSION", 2), ("WARN", 4), ("INFO", 8), ("ABORT", 16), ("TRACE", 32), ("ALL", 2 | 4 | 8 | 16 | 32)];
const SUBSYSTEMS: Options = &[
    ("INIT", 0x1),
    ("COLL", 0x2),
    ("P2P", 0x4),
    ("SHM", 0x8),
    ("NET", 0x10),
    ("GRAPH", 0x20),
    ("TUNING", 0x40),
    ("ENV", 0x80),
    ("ALLOC", 0x100),
    ("ALLOC_HOST", 0x2_0000),
    ("CALL", 0x200),
    ("PROXY", 0x400),
    ("NVLS", 0x800),
    ("BOOTSTRAP", 0x1000),
    ("REG", 0x2000),
    ("PROFILE", 0x4000),
    ("RAS", 0x8000),
    ("DESTROY", 0x1_0000),
    ("ALL", u64::MAX),
];

/// In the order of their keys.
static PARAMETERS: [Parameter; 9] = [
    Parameter { key: "NCCL_DEBUG", kind: Kind::Level(LEVELS), is_published: true },
    Parameter { key: "NCCL_DEBUG_FILE", kind: Kind::Text(None), is_published: true },
    Parameter { key: "NCCL_DEBUG_SUBSYS", kind: Kind::Mask64(SUBSYSTEMS, 0x1 | 0x1000 | 0x80), is_published: true },
    Parameter { key: "NCCL_DEBUG_TIMESTAMP_FORMAT", kind: Kind::Text(Some("[%F %T] ")), is_published: true },
    Parameter { key: "NCCL_DEBUG_TIMESTAMP_LEVELS", kind: Kind::Mask32(LEVEL_BITS, 4), is_published: true },
    Parameter { key: "NCCL_NO_CACHE", kind: Kind::Text(None), is_published: false },
    Parameter { key: DUMP_ALL, kind: Kind::Flag, is_published: false },
    Parameter { key: "NCCL_SET_THREAD_NAME", kind: Kind::Flag, is_published: true },
    Parameter { key: "NCCL_WARN_ENABLE_DEBUG_INFO", kind: Kind::Flag, is_published: false },
];
const DUMP_ALL: &str = "NCCL_PARAM_DUMP_ALL";

impl Parameter {
    fn given(&self) -> Option<String> {
        std::env::var(self.key).ok()
    }

    fn text(&self) -> Option<String> {
        let Kind::Text(default) = self.kind else { return None };
        self.given().or_else(|| default.map(str::to_owned))
    }

    /// The value as a number; texts have none. What cannot be read is the default.
    fn number(&self) -> u64 {
        let given = self.given();
        let given = given.as_deref();
        match self.kind {
            Kind::Text(_) => 0,
            Kind::Flag => given.and_then(flag).map_or(0, u64::from),
            Kind::Level(options) => given.and_then(|name| value_of(options, name.trim())).unwrap_or(0),
            Kind::Mask32(options, default) => {
                given.and_then(|names| mask(options, names)).unwrap_or(default) & 0xffff_ffff
            }
            Kind::Mask64(options, default) => given.and_then(|names| mask(options, names)).unwrap_or(default),
        }
    }

    fn describe(&self) -> String {
        let number = self.number();
        match self.kind {
            Kind::Text(_) => self.text().unwrap_or_default(),
            Kind::Flag => if number == 1 { "TRUE" } else { "FALSE" }.to_owned(),
            Kind::Level(options) => {
                options.iter().find(|(_, value)| *value == number).map_or("<unknown>", |(name, _)| name).to_owned()
            }
            Kind::Mask32(options, _) | Kind::Mask64(options, _) => names_of(options, number),
        }
    }

    /// The value as C stores it.
    fn bytes(&self) -> Vec<u8> {
        let number = self.number().to_le_bytes();
        match self.kind {
            Kind::Text(_) => self.text().unwrap_or_default().into_bytes().into_iter().chain([0]).collect(),
            Kind::Flag => number[..1].to_vec(),
            Kind::Level(_) | Kind::Mask32(..) => number[..4].to_vec(),
            Kind::Mask64(..) => number.to_vec(),
        }
    }
}

fn flag(text: &str) -> Option<bool> {
    let is = |names: &[&str]| names.iter().any(|name| name.eq_ignore_ascii_case(text));
    if is(&["1", "T", "TRUE"]) {
        return Some(true);
    }
    is(&["0", "F", "FALSE"]).then_some(false)
}

fn value_of(options: Options, name: &str) -> Option<u64> {
    options.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| *value)
}

/// The bits of names separated by commas; all others after a `^`. None if a name is unknown.
fn mask(options: Options, names: &str) -> Option<u64> {
    let (names, is_inverted) = names.strip_prefix('^').map_or((names, false), |rest| (rest, true));
    let mut bits = 0;
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        bits |= value_of(options, name)?;
    }
    Some(if is_inverted { !bits } else { bits })
}

fn names_of(options: Options, bits: u64) -> String {
    if let Some((name, _)) = options.iter().find(|(_, value)| *value == bits) {
        return (*name).to_owned();
    }
    let is_set = |value: u64| value.is_power_of_two() && bits & value != 0;
    let names: Vec<&str> = options.iter().filter(|(_, value)| is_set(*value)).map(|(name, _)| *name).collect();
    if names.is_empty() { "NONE".to_owned() } else { names.join(",") }
}

/// The parameter behind a handle; handles are looked up, never read.
fn parameter(handle: *mut c_void) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|one| core::ptr::from_ref(*one).addr() == handle.addr())
}

fn bad(function: &str, what: &str) -> Failure {
    Failure::new(Code::InvalidArgument, format!("{function} : {what}"))
}

/// # Safety
/// `key` is null or a C string.
unsafe fn find(function: &'static str, key: *const c_char) -> Result<&'static Parameter, Failure> {
    if key.is_null() {
        return Err(Failure::null(function, "key"));
    }
    // SAFETY: promised by the caller.
    let key = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    if let Some(known) = PARAMETERS.iter().find(|one| one.key == key) {
        return Ok(known);
    }
    // Which of its variables later versions have registered is not known here.
    if key.starts_with("NCCL_") && own_version() >= crate::abi::version_code(2, 31, 0) {
        refuse_part(function, &format!("of {key}"))?;
    }
    Err(bad(function, &format!("key \"{key}\" is not registered")))
}

/// # Safety
/// `out` is null or writable; `key` is null or a C string.
pub(crate) unsafe fn bind(out: *mut *mut c_void, key: *const c_char) -> Outcome {
    const NAME: &str = "ncclParamBind";
    if out.is_null() {
        return Err(Failure::null(NAME, "out"));
    }
    // SAFETY: promised by the caller.
    unsafe {
        let found = find(NAME, key)?;
        out.write(core::ptr::from_ref(found).cast_mut().cast());
    }
    Ok(())
}

/// # Safety
/// `out` is null or writable for `max_bytes`; `length` is null or writable.
pub(crate) unsafe fn get(handle: *mut c_void, out: *mut c_void, max_bytes: c_int, length: *mut c_int) -> Outcome {
    const NAME: &str = "ncclParamGet";
    let found = parameter(handle).ok_or_else(|| bad(NAME, "the handle is not one of ncclParamBind"))?;
    if out.is_null() || length.is_null() || max_bytes <= 0 {
        return Err(bad(NAME, "no room for the value"));
    }
    let value = found.bytes();
    let fits = value.len() <= max_bytes as usize;
    // SAFETY: promised by the caller; the value is no longer than the room.
    unsafe {
        length.write(if fits { value.len() as c_int } else { 0 });
        if fits {
            out.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len());
        }
    }
    if fits { Ok(()) } else { Err(bad(NAME, "the value is longer than the room for it")) }
}

macro_rules! getters {
    ($($name:ident $c_name:literal $int:ty = $kind:pat,)*) => {$(
        /// # Safety
        /// `out` is null or writable.
        pub(crate) unsafe fn $name(handle: *mut c_void, out: *mut $int) -> Outcome {
            let found = parameter(handle).filter(|_| !out.is_null());
            let found = found.ok_or_else(|| bad($c_name, "an argument is NULL or no handle"))?;
            if !matches!(found.kind, $kind) {
                return Err(bad($c_name, &format!("{} has another type", found.key)));
            }
            // SAFETY: promised by the caller.
            unsafe { out.write(found.number() as $int) };
            Ok(())
        }
    )*};
}

getters! {
    get_u32 "ncclParamGetU32" u32 = Kind::Mask32(..),
    get_u64 "ncclParamGetU64" u64 = Kind::Mask64(..),
}

/// No parameter of 2.30 has one of the other types.
pub(crate) fn no_such_type(handle: *mut c_void, _out: *mut c_void) -> Outcome {
    let key = parameter(handle).map_or("the handle", |found| found.key);
    Err(bad("ncclParamGet*", &format!("{key} has another type")))
}

thread_local! {
    /// Texts handed out, valid until the next call of their function on this thread.
    static TEXT: RefCell<CString> = RefCell::default();
    static VALUE: RefCell<CString> = RefCell::default();
    static KEYS: RefCell<(Vec<CString>, Vec<*const c_char>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

fn keep(place: &'static std::thread::LocalKey<RefCell<CString>>, text: String) -> (*const c_char, usize) {
    // A variable of the environment holds no zero byte.
    place.set(CString::new(text).unwrap_or_default());
    place.with_borrow(|text| (text.as_ptr(), text.as_bytes().len()))
}

/// # Safety
/// `out` is null or writable.
pub(crate) unsafe fn get_str(handle: *mut c_void, out: *mut *const c_char) -> Outcome {
    const NAME: &str = "ncclParamGetStr";
    let found = parameter(handle).filter(|_| !out.is_null());
    let found = found.ok_or_else(|| bad(NAME, "an argument is NULL or no handle"))?;
    if !matches!(found.kind, Kind::Text(_)) {
        return Err(bad(NAME, &format!("{} has another type", found.key)));
    }
    // SAFETY: promised by the caller.
    unsafe { out.write(keep(&TEXT, found.describe()).0) };
    Ok(())
}

/// # Safety
/// `key` is null or a C string; `value` and `length` are null or writable.
pub(crate) unsafe fn get_parameter(key: *const c_char, value: *mut *const c_char, length: *mut c_int) -> Outcome {
    const NAME: &str = "ncclParamGetParameter";
    if value.is_null() || length.is_null() {
        return Err(Failure::null(NAME, "value or valueLen"));
    }
    // SAFETY: promised by the caller.
    unsafe {
        let found = find(NAME, key);
        let (text, bytes) = match &found {
            Ok(found) => keep(&VALUE, found.describe()),
            Err(_) if key.is_null() => return found.map(|_| ()),
            Err(_) => (core::ptr::null(), 0),
        };
        value.write(text);
        length.write(bytes as c_int);
        found.map(|_| ())
    }
}

/// # Safety
/// Both are null or writable.
pub(crate) unsafe fn all_keys(table: *mut *mut *const c_char, length: *mut c_int) -> Outcome {
    if table.is_null() || length.is_null() {
        return Err(Failure::null("ncclParamGetAllParameterKeys", "table or tableLen"));
    }
    let shows_all = std::env::var(DUMP_ALL).ok().and_then(|text| flag(&text)).unwrap_or(false);
    let shown = PARAMETERS.iter().filter(|one| shows_all || one.is_published);
    let keys: Vec<CString> = shown.filter_map(|one| CString::new(one.key).ok()).collect();
    let pointers = keys.iter().map(|key| key.as_ptr()).collect();
    KEYS.set((keys, pointers));
    KEYS.with_borrow_mut(|(_, pointers)| {
        // SAFETY: promised by the caller.
        unsafe {
            table.write(pointers.as_mut_ptr());
            length.write(pointers.len() as c_int);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_read_and_written_as_names() {
        assert_eq!(mask(SUBSYSTEMS, "init, NET"), Some(0x11));
        assert_eq!(mask(SUBSYSTEMS, "^INIT"), Some(!1));
        assert_eq!(mask(SUBSYSTEMS, "INIT,NONSENSE"), None);
        assert_eq!(names_of(SUBSYSTEMS, 0x1 | 0x1000 | 0x80), "INIT,ENV,BOOTSTRAP");
        assert_eq!(names_of(SUBSYSTEMS, u64::MAX), "ALL");
        assert_eq!(names_of(LEVEL_BITS, 0), "NONE");
        assert_eq!(names_of(LEVEL_BITS, 4), "WARN");
    }

    #[test]
    fn keys_are_sorted_and_handles_are_looked_up() {
        assert!(PARAMETERS.is_sorted_by_key(|one| one.key));
        let first = core::ptr::from_ref(&PARAMETERS[0]).cast_mut().cast::<c_void>();
        assert_eq!(parameter(first).map(|one| one.key), Some("NCCL_DEBUG"));
        assert!(parameter(first.wrapping_byte_add(1)).is_none() && parameter(core::ptr::null_mut()).is_none());
    }
}
