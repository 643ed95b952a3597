//! cuSOLVER: dense factorisations and decompositions, one operator each.
//!
//! Nothing is factored: the matrices a call writes are unknown afterwards, and its status on the device (`info`) says that
//! it went well, a provided value. Operation counts are those of Golub and Van Loan, *Matrix Computations*; workspaces are
//! LAPACK's with blocks of 32 columns, as cuSOLVER does not say how it computes its own.
//!
//! [`typed`] has the calls with the type in their name, [`generic`] those with the type as an argument. What is in neither
//! is not exported, and a stand-in refuses it by name: symmetric indefinite factorisations (`sytrf`, `sytrs`),
//! general eigenvalues (`Xgeev`), and batched Jacobi eigenvalues (`syevjBatched`).

mod generic;
mod typed;

use super::handles::Table;
use super::work::{self, Element, Name, Operator};
use crate::guard::guard;
use crate::{memory, values};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A `cusolverStatus_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 3;
const INTERNAL_ERROR: Status = 7;
/// `CUSOLVER_EIG_MODE_VECTOR`.
const WITH_VECTORS: c_int = 1;
/// Columns of a block in LAPACK's blocked algorithms.
const BLOCK: u64 = 32;

/// Address of the stream of each handle; 0 is the default stream.
static HANDLES: Table<AtomicUsize> = Table::new();
/// Parameter objects (`cusolverDnParams_t`, `gesvdjInfo_t`, `syevjInfo_t`). Nothing that they say changes what a call costs here.
static PARAMETERS: Table<()> = Table::new();

fn answer(body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || body().err().unwrap_or(SUCCESS))
}

/// Writes an output argument.
///
/// # Safety
/// `target` must be null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T) -> Result<(), Status> {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(value) };
    Ok(())
}

/// More rows than any matrix has; products of three sizes below it fit into 128 bits.
const LARGEST: u64 = 1 << 40;

/// A size as a count; negative ones are invalid.
fn size(value: impl TryInto<u64>) -> Result<u64, Status> {
    value.try_into().ok().filter(|size| *size < LARGEST).ok_or(INVALID_VALUE)
}

/// What one call does to matrices of `m` × `n`, `k` of something (right-hand sides, reflectors).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routine {
    /// A = L·Lᵀ, n × n.
    Cholesky,
    /// A·X = B by one triangular solve forth and one back, `k` right-hand sides.
    Solve,
    /// P·A = L·U.
    Lu,
    /// A = Q·R.
    Qr,
    /// Q made of `k` reflectors.
    MakeQ,
    /// Q·C of `k` reflectors, C of m × n.
    ApplyQ,
    /// Eigenvalues of a symmetric matrix.
    Eigenvalues,
    /// Eigenvalues and vectors of a symmetric matrix.
    Eigenvectors,
    /// Singular values.
    SingularValues,
    /// Singular values and vectors.
    SingularVectors,
}

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    m: u64,
    n: u64,
    k: u64,
    batch: u64,
}

impl Routine {
    fn eigen(mode: c_int) -> Self {
        if mode == WITH_VECTORS { Self::Eigenvectors } else { Self::Eigenvalues }
    }

    fn singular(with_vectors: bool) -> Self {
        if with_vectors { Self::SingularVectors } else { Self::SingularValues }
    }

    /// Multiplications and additions on real numbers, for one matrix.
    fn flop(self, shape: Shape) -> u128 {
        let (m, n, k) = (u128::from(shape.m), u128::from(shape.n), u128::from(shape.k));
        let (long, short) = (m.max(n), m.min(n));
        match self {
            Self::Cholesky => n * n * n / 3,
            Self::Solve => 2 * n * n * k,
            // n²(m - n/3) for m ≥ n, and the mirror image.
            Self::Lu => short * short * (3 * long - short) / 3,
            Self::Qr => 2 * short * short * (3 * long - short) / 3,
            Self::MakeQ => (4 * m * n * k + 4 * k * k * k / 3).saturating_sub(2 * (m + n) * k * k),
            Self::ApplyQ => 4 * m * n * k - (2 * n * k * k).min(2 * m * n * k),
            Self::Eigenvalues => 4 * n * n * n / 3,
            Self::Eigenvectors => 9 * n * n * n,
            Self::SingularValues => 2 * long * short * short + 2 * short * short * short,
            Self::SingularVectors => 4 * long * short * short + 22 * short * short * short,
        }
    }

    /// Elements read and written once each.
    fn elements(self, shape: Shape) -> u128 {
        let (m, n, k) = (u128::from(shape.m), u128::from(shape.n), u128::from(shape.k));
        match self {
            Self::Solve => n * n + 2 * n * k,
            Self::ApplyQ => m * k + 2 * m * n,
            Self::SingularVectors => 2 * m * n + m * m.min(n) + n * m.min(n),
            _ => 2 * m * n,
        }
    }

    /// Workspace of LAPACK's routine, in elements.
    fn workspace(self, shape: Shape) -> u64 {
        let Shape { m, n, k, batch } = shape;
        let one = match self {
            Self::Solve => 0,
            Self::Cholesky | Self::Qr | Self::MakeQ => n.saturating_mul(BLOCK),
            Self::Lu => m.saturating_mul(BLOCK),
            Self::ApplyQ => m.max(n).max(k).saturating_mul(BLOCK),
            Self::Eigenvalues => 2 * n + 1,
            Self::Eigenvectors => n.saturating_mul(2 * n + 6).saturating_add(1),
            Self::SingularValues | Self::SingularVectors => {
                (m + n).saturating_mul(BLOCK).saturating_add(3 * m.min(n)).saturating_add(m.max(n))
            }
        };
        one.saturating_mul(batch.max(1)).max(1)
    }

    fn operator(self, shape: Shape, element: Element) -> Operator {
        let products = if element.products == 1 { 1 } else { 4 };
        let total = |one: u128| u64::try_from(one.saturating_mul(u128::from(shape.batch))).unwrap_or(u64::MAX);
        Operator {
            flop: total(self.flop(shape).saturating_mul(products)),
            bytes: total(self.elements(shape).saturating_mul(u128::from(element.size_bytes()))),
            input: element.dtype,
        }
    }
}

/// Records a call: its work, the matrices it writes, and that its `batch` statuses say "success".
fn run(
    handle: *const c_void,
    name: &Name,
    (routine, shape, element): (Routine, Shape, Element),
    written: &[*mut c_void],
    info: *mut c_int,
) -> Result<(), Status> {
    let stream = HANDLES.get(handle).ok_or(NOT_INITIALIZED)?.load(Relaxed);
    work::operator(std::ptr::without_provenance(stream), name, routine.operator(shape, element));
    for matrix in written {
        values::library_wrote(*matrix, name.text());
    }
    let bytes = usize::try_from(shape.batch.max(1)).map_err(|_| INVALID_VALUE)?.saturating_mul(size_of::<c_int>());
    if memory::contains(info.cast(), bytes) {
        // SAFETY: `bytes` of device memory lie there, which is memory of this process.
        unsafe { std::ptr::write_bytes(info.cast::<u8>(), 0, bytes) };
        values::provided(info.addr(), bytes, "cuSOLVER's status: every call succeeds");
    }
    Ok(())
}

/// Creates a handle.
///
/// # Safety
/// `handle` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cusolverDnCreate(handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    answer(|| unsafe { put(handle, HANDLES.insert(AtomicUsize::new(0))) })
}

/// Destroys a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnDestroy(handle: *mut c_void) -> Status {
    answer(|| HANDLES.remove(handle).map(drop).ok_or(NOT_INITIALIZED))
}

/// Sets the stream of a handle.
#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnSetStream(handle: *mut c_void, stream: *mut c_void) -> Status {
    answer(|| HANDLES.get(handle).map(|own| own.store(stream.addr(), Relaxed)).ok_or(NOT_INITIALIZED))
}

/// The stream of a handle.
///
/// # Safety
/// `stream` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cusolverDnGetStream(handle: *mut c_void, stream: *mut *mut c_void) -> Status {
    answer(|| {
        let own = HANDLES.get(handle).ok_or(NOT_INITIALIZED)?.load(Relaxed);
        // SAFETY: the caller's contract.
        unsafe { put(stream, std::ptr::without_provenance_mut(own)) }
    })
}

macro_rules! parameters {
    ($($create:ident, $destroy:ident;)*) => { $(
        /// Creates an object of parameters.
        ///
        /// # Safety
        /// `object` must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $create(object: *mut *mut c_void) -> Status {
            // SAFETY: the caller's contract.
            answer(|| unsafe { put(object, PARAMETERS.insert(())) })
        }

        /// Destroys an object of parameters.
        #[unsafe(no_mangle)]
        pub extern "C" fn $destroy(object: *mut c_void) -> Status {
            answer(|| PARAMETERS.remove(object).map(drop).ok_or(INVALID_VALUE))
        }
    )* };
}

parameters! {
    cusolverDnCreateParams, cusolverDnDestroyParams;
    cusolverDnCreateGesvdjInfo, cusolverDnDestroyGesvdjInfo;
    cusolverDnCreateSyevjInfo, cusolverDnDestroySyevjInfo;
}

/// Sets when Jacobi's method stops; its work is not modelled by sweeps.
#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnXgesvdjSetTolerance(object: *mut c_void, _tolerance: f64) -> Status {
    answer(|| PARAMETERS.get(object).map(drop).ok_or(INVALID_VALUE))
}

/// Sets how long Jacobi's method tries; its work is not modelled by sweeps.
#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnXgesvdjSetMaxSweeps(object: *mut c_void, _sweeps: c_int) -> Status {
    answer(|| PARAMETERS.get(object).map(drop).ok_or(INVALID_VALUE))
}

/// Sets whether singular values are sorted.
#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnXgesvdjSetSortEig(object: *mut c_void, _sort: c_int) -> Status {
    answer(|| PARAMETERS.get(object).map(drop).ok_or(INVALID_VALUE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use prism_wire::message::DataType;

    #[test]
    fn operations_are_those_of_the_textbook() {
        let square = Shape { m: 30, n: 30, k: 0, batch: 1 };
        assert_eq!(Routine::Cholesky.flop(square), 9_000);
        assert_eq!(Routine::Lu.flop(square), 18_000);
        assert_eq!(Routine::Qr.flop(square), 36_000);
        let tall = Shape { m: 60, n: 30, k: 30, batch: 1 };
        assert_eq!(Routine::Qr.flop(tall), 90_000);
        assert_eq!(Routine::Qr.flop(Shape { m: 30, n: 60, ..tall }), 90_000, "the same the other way round");
        assert_eq!(Routine::MakeQ.flop(tall), 90_000);
        assert_eq!(Routine::ApplyQ.flop(Shape { n: 5, ..tall }), 4 * 60 * 5 * 30 - 2 * 5 * 900);
        let four = Shape { batch: 4, ..square };
        let complex = Routine::Cholesky.operator(four, Element::complex(DataType::Float32));
        assert_eq!(complex, Operator { flop: 4 * 4 * 9_000, bytes: 4 * 2 * 900 * 8, input: DataType::Float32 });
    }

    #[test]
    fn no_size_overflows() {
        let vast = Shape { m: LARGEST - 1, n: LARGEST - 1, k: LARGEST - 1, batch: u64::MAX };
        for routine in [Routine::Lu, Routine::MakeQ, Routine::ApplyQ, Routine::SingularVectors, Routine::Eigenvectors] {
            assert_eq!(routine.operator(vast, Element::real(DataType::Float64)).bytes, u64::MAX, "{routine:?}");
            assert!(routine.workspace(vast) > 0);
        }
        assert_eq!(size(-1_i32), Err(INVALID_VALUE));
        assert_eq!(size(i64::MAX), Err(INVALID_VALUE));
    }

    #[test]
    fn handles_and_parameters_are_told_apart() {
        let (mut handle, mut object) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both are valid for a write.
        unsafe {
            assert_eq!(cusolverDnCreate(&raw mut handle), SUCCESS);
            assert_eq!(cusolverDnCreateParams(&raw mut object), SUCCESS);
            assert_eq!(cusolverDnCreate(std::ptr::null_mut()), INVALID_VALUE);
        }
        assert_eq!(cusolverDnSetStream(handle, std::ptr::without_provenance_mut(16)), SUCCESS);
        assert_eq!(cusolverDnDestroy(handle), SUCCESS);
        assert_eq!(cusolverDnSetStream(handle, std::ptr::null_mut()), NOT_INITIALIZED);
        assert_eq!(cusolverDnDestroyParams(object), SUCCESS);
        assert_eq!(cusolverDnXgesvdjSetMaxSweeps(object, 3), INVALID_VALUE);
    }
}
