//! The C functions of cuBLASLt.

use super::{
    ALGORITHM, Call, DESC, EMULATION, EPILOGUE_DEFAULT, FILL_MODE_FULL, Kind, LAYOUT, Matrix, PREFERENCE, TRANSFORM,
    desc, layout,
};
use crate::guard::guard;
use crate::libs::cublas::{INTERNAL_ERROR, INVALID_VALUE, NOT_SUPPORTED, SUCCESS, Status, VERSION};
use crate::libs::cublas::{status_text, version_part};
use crate::libs::handles::Table;
use crate::libs::work::{self, Element, Name, Operator};
use crate::libs::workspaces;
use crate::session;
use crate::unsupported;
use crate::values;
use std::ffi::{c_char, c_int, c_void};

/// Handles of [`cublasLtCreate`]. A cuBLAS handle is as good, and no call needs anything from either.
static HANDLES: Table<Handle> = Table::new();

/// Nothing: see [`HANDLES`].
struct Handle;

fn answer(body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || body().err().unwrap_or(SUCCESS))
}

/// Compute capability of the emulated card.
fn capability() -> Result<(i32, i32), Status> {
    let session = session::get().ok().ok_or(INTERNAL_ERROR)?;
    Ok((session.config.device.major, session.config.device.minor))
}

/// Creates a handle.
///
/// # Safety
/// `handle` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut *mut c_void) -> Status {
    answer(|| {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, valid by the contract.
        unsafe { handle.write(HANDLES.insert(Handle)) };
        Ok(())
    })
}

/// Destroys a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: *mut c_void) -> Status {
    answer(|| HANDLES.remove(handle).map(drop).ok_or(INVALID_VALUE))
}

/// The version: that of cuBLAS.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION as usize
}

/// The CUDA runtime this library was made for.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetCudartVersion() -> usize {
    13_000
}

/// One part of the version.
///
/// # Safety
/// `value` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetProperty(part: c_int, value: *mut c_int) -> Status {
    answer(|| {
        let number = version_part(part).filter(|_| !value.is_null()).ok_or(INVALID_VALUE)?;
        // SAFETY: not null, valid by the contract.
        unsafe { value.write(number) };
        Ok(())
    })
}

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: Status) -> *const c_char {
    status_text(status).1.as_ptr()
}

/// The name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: Status) -> *const c_char {
    status_text(status).0.as_ptr()
}

/// Writes a new descriptor of `kind` to `target` after `fill` has set its first attributes.
///
/// # Safety
/// `target` must be null or valid for a write.
unsafe fn create(
    kind: &Kind,
    target: *mut *mut c_void,
    fill: impl FnOnce(*mut c_void) -> Result<(), Status>,
) -> Result<(), Status> {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    let memory = kind.allocate();
    fill(memory)?;
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(memory) };
    Ok(())
}

/// # Safety
/// `memory` must be a layout.
unsafe fn fill_layout(memory: *mut c_void, cuda_type: c_int, rows: u64, cols: u64, ld: i64) -> Result<(), Status> {
    // SAFETY: the caller's contract.
    unsafe {
        LAYOUT.write(memory, layout::TYPE, cuda_type)?;
        LAYOUT.write(memory, layout::ORDER, 0_i32)?;
        LAYOUT.write(memory, layout::ROWS, rows)?;
        LAYOUT.write(memory, layout::COLS, cols)?;
        LAYOUT.write(memory, layout::LD, ld)?;
        LAYOUT.write(memory, layout::BATCH_COUNT, 1_i32)
    }
}

/// # Safety
/// `memory` must be a matmul descriptor.
unsafe fn fill_desc(memory: *mut c_void, compute_type: c_int, scale_type: c_int) -> Result<(), Status> {
    // SAFETY: the caller's contract.
    unsafe {
        DESC.write(memory, desc::COMPUTE_TYPE, compute_type)?;
        DESC.write(memory, desc::SCALE_TYPE, scale_type)?;
        DESC.write(memory, desc::FILL_MODE, FILL_MODE_FULL)?;
        DESC.write(memory, desc::EPILOGUE, EPILOGUE_DEFAULT)
    }
}

/// Creates a matrix layout.
///
/// # Safety
/// `target` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    target: *mut *mut c_void,
    cuda_type: c_int,
    rows: u64,
    cols: u64,
    ld: i64,
) -> Status {
    // SAFETY: the caller's contract; `memory` is a fresh layout.
    answer(|| unsafe { create(&LAYOUT, target, |memory| fill_layout(memory, cuda_type, rows, cols, ld)) })
}

/// Initialises a layout in the program's own memory.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutInit_internal(
    memory: *mut c_void,
    size: usize,
    cuda_type: c_int,
    rows: u64,
    cols: u64,
    ld: i64,
) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        LAYOUT.initialise(memory, size)?;
        fill_layout(memory, cuda_type, rows, cols, ld)
    })
}

/// Initialises the layout of a group of matrices whose shapes lie in device memory, in the program's own memory.
///
/// cuBLAS multiplies such groups on compute capability 10 and later only, and kernels write the shapes: a product of
/// them is refused by name when it is asked for.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGroupedMatrixLayoutInit_internal(
    memory: *mut c_void,
    size: usize,
    cuda_type: c_int,
    groups: c_int,
    rows: *const c_void,
    columns: *const c_void,
    _leading: *const c_void,
) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        if groups < 1 || rows.is_null() || columns.is_null() {
            return Err(INVALID_VALUE);
        }
        LAYOUT.initialise(memory, size)?;
        fill_layout(memory, cuda_type, 0, 0, 0)?;
        LAYOUT.write(memory, layout::BATCH_COUNT, groups)?;
        LAYOUT.write(memory, layout::BATCH_MODE, layout::GROUPED)
    })
}

/// Creates a description of a product.
///
/// # Safety
/// `target` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    target: *mut *mut c_void,
    compute_type: c_int,
    scale_type: c_int,
) -> Status {
    // SAFETY: the caller's contract; `memory` is a fresh description.
    answer(|| unsafe { create(&DESC, target, |memory| fill_desc(memory, compute_type, scale_type)) })
}

/// Initialises a description in the program's own memory.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescInit_internal(
    memory: *mut c_void,
    size: usize,
    compute_type: c_int,
    scale_type: c_int,
) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        DESC.initialise(memory, size)?;
        fill_desc(memory, compute_type, scale_type)
    })
}

/// Creates a preference.
///
/// # Safety
/// `target` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(target: *mut *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { create(&PREFERENCE, target, |_| Ok(())) })
}

/// Initialises a preference in the program's own memory.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceInit_internal(memory: *mut c_void, size: usize) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { PREFERENCE.initialise(memory, size) })
}

/// Creates a description of a layout change.
///
/// # Safety
/// `target` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixTransformDescCreate(target: *mut *mut c_void, scale_type: c_int) -> Status {
    // SAFETY: the caller's contract; `memory` is a fresh description.
    answer(|| unsafe { create(&TRANSFORM, target, |memory| TRANSFORM.write(memory, 0, scale_type)) })
}

/// Initialises a description of a layout change in the program's own memory.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixTransformDescInit_internal(
    memory: *mut c_void,
    size: usize,
    scale_type: c_int,
) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        TRANSFORM.initialise(memory, size)?;
        TRANSFORM.write(memory, 0, scale_type)
    })
}

/// Creates a description of floating-point emulation.
///
/// # Safety
/// `target` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtEmulationDescCreate(target: *mut *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { create(&EMULATION, target, |_| Ok(())) })
}

/// Initialises a description of floating-point emulation in the program's own memory.
///
/// # Safety
/// `memory` must be null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtEmulationDescInit_internal(memory: *mut c_void, size: usize) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { EMULATION.initialise(memory, size) })
}

/// Says which attribute is not known: a newer client asks for something this library would silently ignore.
fn report(name: &str, id: c_int, outcome: Result<(), Status>, kind: &Kind) -> Result<(), Status> {
    if outcome == Err(INVALID_VALUE) && !kind.knows(id) {
        unsupported::call(&format!("{name}(attribute {id})"));
    }
    outcome
}

macro_rules! attributes {
    ($kind:expr, set $set:ident) => {
        /// Sets an attribute.
        ///
        /// # Safety
        /// `memory` must be null or a descriptor of this kind, `buffer` null or readable for `size` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $set(memory: *mut c_void, id: c_int, buffer: *const c_void, size: usize) -> Status {
            // SAFETY: the caller's contract.
            answer(|| report(stringify!($set), id, unsafe { $kind.set(memory, id, buffer, size) }, &$kind))
        }
    };
    ($kind:expr, get $get:ident) => {
        /// Copies an attribute.
        ///
        /// # Safety
        /// `memory` must be null or a descriptor of this kind, `buffer` null or writable for `size` bytes, `written`
        /// null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(
            memory: *const c_void,
            id: c_int,
            buffer: *mut c_void,
            size: usize,
            written: *mut usize,
        ) -> Status {
            // SAFETY: the caller's contract.
            answer(|| report(stringify!($get), id, unsafe { $kind.get(memory, id, buffer, size, written) }, &$kind))
        }
    };
    ($kind:expr, destroy $destroy:ident) => {
        /// Frees a descriptor.
        ///
        /// # Safety
        /// `memory` must be null or come from the matching create function, and not be used afterwards.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $destroy(memory: *mut c_void) -> Status {
            // SAFETY: the caller's contract.
            answer(|| unsafe { $kind.free(memory) })
        }
    };
}

attributes!(LAYOUT, set cublasLtMatrixLayoutSetAttribute);
attributes!(LAYOUT, get cublasLtMatrixLayoutGetAttribute);
attributes!(LAYOUT, destroy cublasLtMatrixLayoutDestroy);
attributes!(DESC, set cublasLtMatmulDescSetAttribute);
attributes!(DESC, get cublasLtMatmulDescGetAttribute);
attributes!(DESC, destroy cublasLtMatmulDescDestroy);
attributes!(PREFERENCE, set cublasLtMatmulPreferenceSetAttribute);
attributes!(PREFERENCE, get cublasLtMatmulPreferenceGetAttribute);
attributes!(PREFERENCE, destroy cublasLtMatmulPreferenceDestroy);
attributes!(TRANSFORM, set cublasLtMatrixTransformDescSetAttribute);
attributes!(TRANSFORM, get cublasLtMatrixTransformDescGetAttribute);
attributes!(TRANSFORM, destroy cublasLtMatrixTransformDescDestroy);
attributes!(EMULATION, set cublasLtEmulationDescSetAttribute);
attributes!(EMULATION, get cublasLtEmulationDescGetAttribute);
attributes!(EMULATION, destroy cublasLtEmulationDescDestroy);
attributes!(ALGORITHM, set cublasLtMatmulAlgoConfigSetAttribute);
attributes!(ALGORITHM, get cublasLtMatmulAlgoConfigGetAttribute);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}
const _: () = assert!(size_of::<HeuristicResult>() == 96);

impl HeuristicResult {
    /// The one algorithm of the emulated device, which needs no workspace.
    fn only() -> Result<Self, Status> {
        let mut algorithm = [0_u64; 8];
        // SAFETY: the array is as large as the struct in the C header.
        unsafe { ALGORITHM.initialise((&raw mut algorithm).cast(), size_of_val(&algorithm))? };
        Ok(Self { algorithm, workspace_bytes: 0, state: SUCCESS, waves: 1.0, reserved: [0; 4] })
    }
}

/// Finds algorithms for a product: one, if the product is possible on the emulated card.
///
/// # Safety
/// Descriptors must be null or of their kinds; `results` must have room for `requested` results, `found` be null or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    desc: *const c_void,
    a: *const c_void,
    b: *const c_void,
    c: *const c_void,
    d: *const c_void,
    preference: *const c_void,
    requested: c_int,
    results: *mut HeuristicResult,
    found: *mut c_int,
) -> Status {
    answer(|| {
        if results.is_null() || found.is_null() || requested < 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract, pointers that are dereferenced here are not null.
        unsafe {
            found.write(0);
            if !preference.is_null() {
                PREFERENCE.check(preference)?;
            }
            Call { desc, a, b, c, d }.product(capability()?)?;
            results.write(HeuristicResult::only()?);
            found.write(1);
        }
        Ok(())
    })
}

/// Checks an algorithm for a product.
///
/// # Safety
/// Descriptors must be null or of their kinds; `result` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    _handle: *mut c_void,
    desc: *const c_void,
    a: *const c_void,
    b: *const c_void,
    c: *const c_void,
    d: *const c_void,
    algorithm: *const c_void,
    result: *mut HeuristicResult,
) -> Status {
    answer(|| {
        if result.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract; `result` is not null.
        unsafe {
            ALGORITHM.check(algorithm)?;
            Call { desc, a, b, c, d }.product(capability()?)?;
            let mut checked = HeuristicResult::only()?;
            std::ptr::copy_nonoverlapping(algorithm.cast(), checked.algorithm.as_mut_ptr(), checked.algorithm.len());
            result.write(checked);
        }
        Ok(())
    })
}

/// Initialises algorithm `id`; the emulated device has one, number 0.
///
/// # Safety
/// `algorithm` must be null or valid for writes of 64 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoInit(
    _handle: *mut c_void,
    _compute_type: c_int,
    _scale_type: c_int,
    _a_type: c_int,
    _b_type: c_int,
    _c_type: c_int,
    _d_type: c_int,
    id: c_int,
    algorithm: *mut c_void,
) -> Status {
    answer(|| {
        if id != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract.
        unsafe { ALGORITHM.initialise(algorithm, ALGORITHM.size) }
    })
}

/// Runs D = alpha · op(A) · op(B) + beta · C.
///
/// # Safety
/// Descriptors must be null or of their kinds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    desc: *const c_void,
    _alpha: *const c_void,
    _a: *const c_void,
    a_layout: *const c_void,
    _b: *const c_void,
    b_layout: *const c_void,
    _beta: *const c_void,
    _c: *const c_void,
    c_layout: *const c_void,
    d: *mut c_void,
    d_layout: *const c_void,
    _algorithm: *const c_void,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *const c_void,
) -> Status {
    static NAME: Name = Name::new("cublasLtMatmul");
    answer(|| {
        let call = Call { desc, a: a_layout, b: b_layout, c: c_layout, d: d_layout };
        // SAFETY: the caller's contract.
        let product = unsafe { call.product(capability()?)? };
        work::gemm(stream, &NAME, product);
        workspaces::note(workspace, workspace_bytes);
        values::library_wrote(d, NAME.text());
        Ok(())
    })
}

/// Changes the layout of a matrix, adding a second one when it is given.
///
/// # Safety
/// Descriptors must be null or of their kinds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixTransform(
    _handle: *mut c_void,
    desc: *const c_void,
    _alpha: *const c_void,
    _a: *const c_void,
    a_layout: *const c_void,
    _beta: *const c_void,
    b: *const c_void,
    _b_layout: *const c_void,
    c: *mut c_void,
    c_layout: *const c_void,
    stream: *const c_void,
) -> Status {
    static NAME: Name = Name::new("cublasLtMatrixTransform");
    answer(|| {
        // SAFETY: the caller's contract.
        let (source, target) = unsafe {
            TRANSFORM.check(desc)?;
            (Matrix::read(a_layout)?, Matrix::read(c_layout)?)
        };
        let element = Element::from_cuda(source.cuda_type).ok_or(NOT_SUPPORTED)?;
        let elements = target.rows * target.cols * target.batch;
        let matrices = if b.is_null() { 2 } else { 3 };
        let bytes = elements * matrices * element.size_bytes();
        work::operator(stream, &NAME, Operator { flop: 0, bytes, input: element.dtype });
        values::library_wrote(c, NAME.text());
        Ok(())
    })
}
