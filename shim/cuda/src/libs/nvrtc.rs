//! NVRTC: programs that are accepted and not compiled, as kernels do not run.
//!
//! The image of a program is PTX text that has its kernels with their parameters and nothing else: where these lie is what
//! its source says ([`source`]). A name expression is its own lowered name: there is no C++ front end here, and the emulated
//! driver takes any name.

mod source;

use super::handles::Table;
use crate::guard::guard;
use crate::values;
use source::{Kernel, Source};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An `nvrtcResult`.
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_INPUT: Status = 3;
const INVALID_PROGRAM: Status = 4;
const NO_LOWERED_NAMES: Status = 9;
const UNKNOWN_NAME: Status = 10;
const INTERNAL_ERROR: Status = 11;

/// The architectures that the NVRTC of CUDA 13.0 compiles for.
const ARCHITECTURES: [c_int; 11] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120];

#[derive(Default)]
struct Program {
    source: String,
    /// Texts of the headers that were given with it.
    headers: Vec<String>,
    expressions: Vec<CString>,
    /// The image, zero-terminated, once the program is "compiled".
    image: Option<CString>,
}

static PROGRAMS: Table<Mutex<Program>> = Table::new();

fn lock(program: &Arc<Mutex<Program>>) -> MutexGuard<'_, Program> {
    program.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || body().err().unwrap_or(SUCCESS))
}

/// Writes to a pointer that a C program passed.
///
/// # Safety
/// `target` must be null or valid for a write.
unsafe fn write<T>(target: *mut T, value: T) -> Result<(), Status> {
    if target.is_null() {
        return Err(INVALID_INPUT);
    }
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(value) };
    Ok(())
}

/// The kernel that a name expression (`&ns::kernel<float, 4>`) means, without namespaces and arguments.
fn plain_name(expression: &str) -> &str {
    let name = expression.split('<').next().unwrap_or(expression).trim();
    name.rsplit(['&', ':']).next().unwrap_or(name)
}

impl Program {
    fn compile(&mut self) -> Result<(), Status> {
        let kernels = Source::new(std::iter::once(&self.source).chain(&self.headers).map(String::as_str)).kernels();
        let mut text = String::from(".version 9.0\n.target sm_90\n.address_size 64\n");
        let expressions = self.expressions.iter().map(|name| name.to_string_lossy().into_owned());
        let of_expressions = expressions.map(|name| {
            let kernel = kernels.iter().find(|kernel| kernel.name == plain_name(&name));
            (name, kernel)
        });
        let own = kernels.iter().map(|kernel| (kernel.name.clone(), Some(kernel)));
        for (name, kernel) in own.chain(of_expressions) {
            // One whose parameters are not known is not in the image: the driver takes any name, and tells of it when it runs.
            if let Some(Kernel { types, parameters: Some(parameters), .. }) = kernel {
                values::declare(&name, types);
                values::write_kernel(&mut text, &name, parameters);
            }
        }
        self.image = Some(CString::new(text).map_err(|_| INVALID_PROGRAM)?);
        Ok(())
    }
}

/// The version of NVRTC.
///
/// # Safety
/// Both pointers must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        write(major, 13)?;
        write(minor, 0)
    })
}

/// How many architectures [`nvrtcGetSupportedArchs`] names.
///
/// # Safety
/// `count` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { write(count, ARCHITECTURES.len() as c_int) })
}

/// The architectures, as 90 for compute capability 9.0.
///
/// # Safety
/// `architectures` must be null or have room for [`nvrtcGetNumSupportedArchs`] numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetSupportedArchs(architectures: *mut c_int) -> Status {
    answer(|| {
        if architectures.is_null() {
            return Err(INVALID_INPUT);
        }
        // SAFETY: not null, room for all by the contract.
        unsafe { std::ptr::copy_nonoverlapping(ARCHITECTURES.as_ptr(), architectures, ARCHITECTURES.len()) };
        Ok(())
    })
}

/// Creates a program. Headers that are given with it are read, those in files are not.
///
/// # Safety
/// `program` must be null or valid for a write, `source` null or a C string, `headers` null or `header_count` C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    header_count: c_int,
    headers: *const *const c_char,
    _include_names: *const *const c_char,
) -> Status {
    answer(|| {
        if program.is_null() || source.is_null() {
            return Err(INVALID_INPUT);
        }
        let count = if headers.is_null() { 0 } else { usize::try_from(header_count).map_err(|_| INVALID_INPUT)? };
        // SAFETY: so many C strings by the contract.
        let headers = (0..count).map(|index| unsafe { headers.add(index).read() }).filter(|text| !text.is_null());
        // SAFETY: C strings by the contract.
        let text = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        let (source, headers) = (text(source), headers.map(text).collect());
        // SAFETY: the caller's contract.
        unsafe { write(program, PROGRAMS.insert(Mutex::new(Program { source, headers, ..Program::default() }))) }
    })
}

/// Destroys a program and clears the caller's handle.
///
/// # Safety
/// `program` must be null or point to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> Status {
    answer(|| {
        if program.is_null() {
            return Err(INVALID_PROGRAM);
        }
        // SAFETY: not null, valid by the contract.
        let handle = unsafe { program.replace(std::ptr::null_mut()) };
        PROGRAMS.remove(handle).map(drop).ok_or(INVALID_PROGRAM)
    })
}

/// "Compiles" a program: its kernels get names, options are not looked at.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcCompileProgram(
    program: *mut c_void,
    _option_count: c_int,
    _options: *const *const c_char,
) -> Status {
    answer(|| lock(&PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?).compile())
}

/// Adds a name expression, to be asked for by [`nvrtcGetLoweredName`].
///
/// # Safety
/// `expression` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcAddNameExpression(program: *mut c_void, expression: *const c_char) -> Status {
    answer(|| {
        let program = PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        if expression.is_null() {
            return Err(INVALID_INPUT);
        }
        // SAFETY: a C string by the contract.
        let expression = unsafe { CStr::from_ptr(expression) }.to_owned();
        lock(&program).expressions.push(expression);
        Ok(())
    })
}

/// The lowered name of an expression: the expression itself. Valid as long as the program.
///
/// # Safety
/// `expression` must be null or a C string, `lowered` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetLoweredName(
    program: *mut c_void,
    expression: *const c_char,
    lowered: *mut *const c_char,
) -> Status {
    answer(|| {
        let program = PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        if expression.is_null() {
            return Err(INVALID_INPUT);
        }
        let program = lock(&program);
        if program.image.is_none() {
            return Err(NO_LOWERED_NAMES);
        }
        // SAFETY: a C string by the contract.
        let wanted = unsafe { CStr::from_ptr(expression) };
        let found = program.expressions.iter().find(|known| known.as_c_str() == wanted).ok_or(UNKNOWN_NAME)?;
        // SAFETY: the caller's contract.
        unsafe { write(lowered, found.as_ptr()) }
    })
}

/// Size of the image with its terminating zero, 0 before compilation is an error.
///
/// # Safety
/// `size` must be null or valid for a write.
unsafe fn image_size(program: *mut c_void, size: *mut usize) -> Status {
    answer(|| {
        let program = PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        let bytes = lock(&program).image.as_ref().ok_or(INVALID_PROGRAM)?.as_bytes_with_nul().len();
        // SAFETY: the caller's contract.
        unsafe { write(size, bytes) }
    })
}

/// Copies the image.
///
/// # Safety
/// `target` must be null or have room for the image.
unsafe fn image(program: *mut c_void, target: *mut c_char) -> Status {
    answer(|| {
        let program = PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        if target.is_null() {
            return Err(INVALID_INPUT);
        }
        let program = lock(&program);
        let bytes = program.image.as_ref().ok_or(INVALID_PROGRAM)?.as_bytes_with_nul();
        // SAFETY: room for the image by the contract.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), target, bytes.len()) };
        Ok(())
    })
}

macro_rules! images {
    ($size:ident, $get:ident) => {
        /// Size of the image in bytes.
        ///
        /// # Safety
        /// `size` must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(program: *mut c_void, size: *mut usize) -> Status {
            // SAFETY: the caller's contract.
            unsafe { image_size(program, size) }
        }

        /// Copies the image.
        ///
        /// # Safety
        /// `target` must be null or have room for the image.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(program: *mut c_void, target: *mut c_char) -> Status {
            // SAFETY: the caller's contract.
            unsafe { image(program, target) }
        }
    };
}

images!(nvrtcGetPTXSize, nvrtcGetPTX);
images!(nvrtcGetCUBINSize, nvrtcGetCUBIN);

/// Size of the compiler's log: that of an empty text.
///
/// # Safety
/// `size` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut c_void, size: *mut usize) -> Status {
    answer(|| {
        PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        // SAFETY: the caller's contract.
        unsafe { write(size, 1) }
    })
}

/// The compiler's log: empty.
///
/// # Safety
/// `log` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> Status {
    answer(|| {
        PROGRAMS.get(program).ok_or(INVALID_PROGRAM)?;
        // SAFETY: the caller's contract.
        unsafe { write(log, 0) }
    })
}

/// The name of a result.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(status: Status) -> *const c_char {
    let text = match status {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        NO_LOWERED_NAMES => c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        UNKNOWN_NAME => c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        INTERNAL_ERROR => c"NVRTC_ERROR_INTERNAL_ERROR",
        _ => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_an_image_and_lowered_names() {
        let mut program = std::ptr::null_mut();
        let (mut size, mut lowered) = (0, std::ptr::null());
        // SAFETY: every pointer is valid for its call.
        unsafe {
            let (source, null) =
                (c"__global__ void k() {} template <typename T> __global__ void t(P p);", std::ptr::null());
            let header = [c"struct P { int n; float* x; };".as_ptr()];
            let names = [c"p.h".as_ptr()];
            let (headers, names) = (header.as_ptr(), names.as_ptr());
            assert_eq!(nvrtcCreateProgram(&raw mut program, source.as_ptr(), c"k.cu".as_ptr(), 1, headers, names), 0);
            assert_eq!(nvrtcAddNameExpression(program, c"t<int>".as_ptr()), SUCCESS);
            assert_eq!(nvrtcGetLoweredName(program, c"t<int>".as_ptr(), &raw mut lowered), NO_LOWERED_NAMES);
            assert_eq!(nvrtcGetPTXSize(program, &raw mut size), INVALID_PROGRAM);
            assert_eq!(nvrtcCompileProgram(program, 0, null), SUCCESS);
            assert_eq!(nvrtcGetLoweredName(program, c"t<int>".as_ptr(), &raw mut lowered), SUCCESS);
            assert_eq!(CStr::from_ptr(lowered), c"t<int>");
            assert_eq!(nvrtcGetLoweredName(program, c"u<int>".as_ptr(), &raw mut lowered), UNKNOWN_NAME);
            assert_eq!(nvrtcGetCUBINSize(program, &raw mut size), SUCCESS);
            let mut text = vec![0; size];
            assert_eq!(nvrtcGetCUBIN(program, text.as_mut_ptr()), SUCCESS);
            let text = CStr::from_ptr(text.as_ptr()).to_string_lossy();
            assert!(text.contains(".entry k()") && text.contains(".entry t<int>(\n\t.param .align 16 .b8 p0[16])"));
            assert_eq!(nvrtcDestroyProgram(&raw mut program), SUCCESS);
            assert!(program.is_null());
            assert_eq!(nvrtcDestroyProgram(&raw mut program), INVALID_PROGRAM);
        }
    }
}
