//! `libprism_audit.so`, an audit module of the dynamic loader (`LD_AUDIT`, rtld-audit(7)).
//!
//! A preloaded stand-in is found by programs that are linked to NCCL and by those that ask the loader for its SONAME. One
//! that opens a path (`ctypes.CDLL("/opt/nccl/lib/libnccl.so.2")`), another name (`libnccl.so`), or a namespace of its own
//! (`dlmopen`) would get the real library. The loader asks this module before it looks for any file; whatever has the
//! base name of a library we stand in for becomes the stand-in beside this module.
//!
//! The loader runs the module in a namespace of its own, with its own libc. It keeps nothing, opens nothing and starts
//! nothing. It has no `la_symbind` and no `la_pltenter`, so calls between libraries are bound as without it.
#![allow(unreachable_pub, reason = "extern \"C\" exports are reached by the dynamic linker, not by Rust paths")]

use std::ffi::{CStr, CString, OsStr, c_char, c_uint, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Newest interface version of `link.h` this module was written for (2, glibc 2.35; version 1 has the same functions).
const NEWEST_INTERFACE: c_uint = 2;
/// Cookie of our own libraries: what they ask for is not replaced, so that a stand-in can open the library it stands for.
const OURS: usize = 1;

/// Stem of the libraries that are replaced, and the file that replaces them. Libraries whose clients refer to versioned
/// symbols (the CUDA runtime, cuBLAS, cuDNN) are not here: the loader insists on a file with those versions.
const STAND_INS: [(&[u8], &str); 3] = [
    (b"libnccl.so", "libprism_nccl.so"),
    (b"libcuda.so", "libprism_cuda.so"),
    (b"libnvidia-ml.so", "libprism_nvml.so"),
];

/// Names without a version under which clients look for a library with `dlopen` alone: a library that is linked is asked for
/// by its SONAME, which has one. What the emulated device has of these libraries is in its one file; what it lacks, the
/// client finds missing by name.
const LOOKED_UP: [&[u8]; 7] = [
    b"libcublas.so",
    b"libcublasLt.so",
    b"libcudart.so",
    b"libcudnn.so",
    b"libcufft.so",
    b"libcurand.so",
    b"libnvrtc.so",
];
/// Index of the emulated device in [`STAND_INS`].
const DEVICE: usize = 1;

/// The first part of `struct link_map` (link.h): the object's load address and path.
#[repr(C)]
pub struct LinkMap {
    address: usize,
    name: *const c_char,
}

/// The loader's handshake: the interface version both sides speak.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(loader: c_uint) -> c_uint {
    loader.min(NEWEST_INTERFACE)
}

/// The loader has mapped an object: marks our own libraries as such. Asks for no notice of symbol bindings (0).
///
/// # Safety
/// Called by the loader: `map` is the object's link map and `cookie` its cookie.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objopen(map: *const LinkMap, _namespace: libc::c_long, cookie: *mut usize) -> c_uint {
    let mark = || {
        // SAFETY: the contract of this function.
        let (Some(map), Some(cookie)) = (unsafe { (map.as_ref(), cookie.as_mut()) }) else { return };
        if map.name.is_null() {
            return;
        }
        // SAFETY: the loader's name of an object is a C string.
        if is_our_file(unsafe { CStr::from_ptr(map.name) }.to_bytes()) {
            *cookie = OURS;
        }
    };
    // A panic would be a defect of the lines above; the object is then not marked.
    let _ = catch_unwind(AssertUnwindSafe(mark));
    0
}

/// The loader looks for an object: the name it shall look for instead, or the one it has.
///
/// # Safety
/// Called by the loader: `name` is a C string, `cookie` that of the object which wants the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(name: *const c_char, cookie: *const usize, _flag: c_uint) -> *const c_char {
    let replace = || {
        // SAFETY: the contract of this function.
        if name.is_null() || unsafe { cookie.as_ref() } == Some(&OURS) {
            return None;
        }
        // SAFETY: as above, not null.
        stand_in_for(unsafe { CStr::from_ptr(name) }.to_bytes())
    };
    catch_unwind(AssertUnwindSafe(replace)).ok().flatten().map_or(name, CStr::as_ptr)
}

/// Does a real GPU compute? Then the driver is the machine's, and NCCL alone (the first entry) is replaced.
fn is_device_real() -> bool {
    // Its own libc has the environment the process was started with.
    std::env::var_os("PRISM_DEVICE").is_some_and(|device| device == "real")
}

/// Is the path that of one of our libraries?
fn is_our_file(path: &[u8]) -> bool {
    base_name(path).starts_with(b"libprism_")
}

fn base_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Path of the stand-in for a library of this name or path. Lives for ever, as the loader keeps it.
fn stand_in_for(name: &[u8]) -> Option<&'static CStr> {
    static PATHS: [OnceLock<Option<CString>>; STAND_INS.len()] = [const { OnceLock::new() }; STAND_INS.len()];
    let base = base_name(name);
    let versioned = STAND_INS.iter().position(|(stem, _)| is_version_of(base, stem));
    let index = versioned.or_else(|| LOOKED_UP.contains(&base).then_some(DEVICE))?;
    if index > 0 && is_device_real() {
        return None;
    }
    PATHS[index]
        .get_or_init(|| CString::new(folder()?.join(STAND_INS[index].1).into_os_string().into_vec()).ok())
        .as_deref()
}

/// Is `base` the stem itself or the stem with version numbers behind it (`libnccl.so`, `libnccl.so.2.30.7`)?
fn is_version_of(base: &[u8], stem: &[u8]) -> bool {
    base.strip_prefix(stem).is_some_and(|version| {
        version.is_empty()
            || version[0] == b'.'
                && version.iter().all(|byte| *byte == b'.' || byte.is_ascii_digit())
                && version.len() > 1
    })
}

/// The folder this module lies in, and the stand-ins beside it.
fn folder() -> Option<PathBuf> {
    // SAFETY: zeros are a value of this struct of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; the result lives on this stack frame.
    let found = unsafe { libc::dladdr(la_version as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the path of a loaded object is a C string.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes()));
    path.parent().map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::{CStr, DEVICE, LOOKED_UP, STAND_INS, base_name, is_our_file, is_version_of, stand_in_for};

    #[test]
    fn names_without_a_version_lead_to_the_device_and_sonames_do_not() {
        assert_eq!(STAND_INS[DEVICE].1, "libprism_cuda.so");
        for name in LOOKED_UP {
            let path = stand_in_for(name).expect("a stand-in").to_bytes();
            assert!(path.ends_with(b"/libprism_cuda.so"), "{path:?}");
            assert_eq!(stand_in_for(&[b"/opt/cuda/lib64/", name].concat()).map(CStr::to_bytes), Some(path));
            assert!(stand_in_for(&[name, b".13"].concat()).is_none());
        }
        assert!(stand_in_for(b"libcudnn_graph.so").is_none());
    }

    #[test]
    fn libraries_are_known_by_base_name_with_any_version() {
        for name in ["libnccl.so", "libnccl.so.2", "libnccl.so.2.30.7"] {
            assert!(is_version_of(base_name(name.as_bytes()), b"libnccl.so"), "{name}");
            assert!(is_version_of(base_name(format!("/opt/a b/{name}").as_bytes()), b"libnccl.so"), "{name}");
        }
        for name in
            ["libnccl.so.", "libnccl.so.x", "libnccl.so.2.bak", "libnccl.so2", "libnccl_ep.so", "libnccl-net.so", ""]
        {
            assert!(!is_version_of(base_name(name.as_bytes()), b"libnccl.so"), "{name}");
        }
        assert!(!is_version_of(b"libcudart.so.13", b"libcuda.so"));
    }

    #[test]
    fn our_files_are_known_wherever_they_lie() {
        assert!(is_our_file(b"/x/libprism_nccl.so") && is_our_file(b"libprism_audit.so"));
        assert!(!is_our_file(b"/libprism_x/libnccl.so.2"));
    }
}
