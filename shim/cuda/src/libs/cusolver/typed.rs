//! The calls that have the type in their name: S and D for real, C and Z for complex numbers.

use super::{INVALID_VALUE, Routine, Shape, Status, answer, put, run, size};
use crate::libs::work::{Element, Name};
use crate::values;
use prism_wire::message::DataType;
use std::ffi::{c_char, c_int, c_longlong, c_void};

const FLOAT32: Element = Element::real(DataType::Float32);
const FLOAT64: Element = Element::real(DataType::Float64);
const COMPLEX64: Element = Element::complex(DataType::Float32);
const COMPLEX128: Element = Element::complex(DataType::Float64);

type Pointer = *mut c_void;

/// Writes the workspace of a call, in elements.
///
/// # Safety
/// `target` must be null or valid for a write.
unsafe fn put_workspace(target: *mut c_int, routine: Routine, shape: Shape) -> Result<(), Status> {
    let elements = c_int::try_from(routine.workspace(shape)).map_err(|_| INVALID_VALUE)?;
    // SAFETY: the caller's contract.
    unsafe { put(target, elements) }
}

/// `m` × `n`, `k`, `batch`, as the C functions take them.
fn shape(m: c_int, n: c_int, k: c_int, batch: c_int) -> Result<Shape, Status> {
    Ok(Shape { m: size(m)?, n: size(n)?, k: size(k)?, batch: size(batch)? })
}

/// Tells the size of a workspace: `NAME(arguments) => routine, shape, result;`.
macro_rules! workspaces {
    ($($name:ident($($argument:ident: $type:ty),*) => $routine:expr, $shape:expr, $result:ident;)*) => { $(
        /// The workspace of the call of this name, in elements.
        ///
        /// # Safety
        /// The pointer to the result must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_handle: *const c_void, $($argument: $type),*) -> Status {
            // SAFETY: the caller's contract.
            answer(|| unsafe { put_workspace($result, $routine, $shape?) })
        }
    )* };
}

/// Records a call: `NAME(arguments) => element, routine, shape, [matrices it writes], info;`.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) => $element:expr, $routine:expr, $shape:expr,
       [$($written:ident),*], $info:ident;)*) => { $(
        /// Records the call of this name; see [`Routine`].
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(handle: *const c_void, $($argument: $type),*) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| run(handle, &NAME, ($routine, $shape?, $element), &[$($written),*], $info))
        }
    )* };
}

/// All functions of one type. The names of complex types differ where LAPACK's do.
macro_rules! of_type {
    ($element:expr;
     $potrf_size:ident $potrf:ident $potrf_batched:ident $potrs:ident $potrs_batched:ident
     $getrf_size:ident $getrf:ident $getrs:ident
     $geqrf_size:ident $geqrf:ident $orgqr_size:ident $orgqr:ident $ormqr_size:ident $ormqr:ident
     $syevd_size:ident $syevd:ident
     $syevj_size:ident $syevj:ident $syevj_batched_size:ident $syevj_batched:ident
     $gesvd_size:ident $gesvd:ident $gesvdj_size:ident $gesvdj:ident
     $gesvdj_batched_size:ident $gesvdj_batched:ident $gesvda_size:ident $gesvda:ident) => {
        workspaces! {
            $potrf_size(_uplo: c_int, n: c_int, _a: Pointer, _lda: c_int, result: *mut c_int) =>
                Routine::Cholesky, shape(n, n, 0, 1), result;
            $getrf_size(m: c_int, n: c_int, _a: Pointer, _lda: c_int, result: *mut c_int) =>
                Routine::Lu, shape(m, n, 0, 1), result;
            $geqrf_size(m: c_int, n: c_int, _a: Pointer, _lda: c_int, result: *mut c_int) =>
                Routine::Qr, shape(m, n, 0, 1), result;
            $orgqr_size(m: c_int, n: c_int, k: c_int, _a: Pointer, _lda: c_int, _tau: Pointer, result: *mut c_int) =>
                Routine::MakeQ, shape(m, n, k, 1), result;
            $ormqr_size(
                side: c_int, _operation: c_int, m: c_int, n: c_int, k: c_int, _a: Pointer, _lda: c_int, _tau: Pointer,
                _c: Pointer, _ldc: c_int, result: *mut c_int
            ) => Routine::ApplyQ, sided(side, m, n, k), result;
            $syevd_size(
                mode: c_int, _uplo: c_int, n: c_int, _a: Pointer, _lda: c_int, _w: Pointer, result: *mut c_int
            ) => Routine::eigen(mode), shape(n, n, 0, 1), result;
            $syevj_size(
                mode: c_int, _uplo: c_int, n: c_int, _a: Pointer, _lda: c_int, _w: Pointer, result: *mut c_int,
                _parameters: Pointer
            ) => Routine::eigen(mode), shape(n, n, 0, 1), result;
            $syevj_batched_size(
                mode: c_int, _uplo: c_int, n: c_int, _a: Pointer, _lda: c_int, _w: Pointer, result: *mut c_int,
                _parameters: Pointer, batch: c_int
            ) => Routine::eigen(mode), shape(n, n, 0, batch), result;
            $gesvd_size(m: c_int, n: c_int, result: *mut c_int) => Routine::SingularVectors, shape(m, n, 0, 1), result;
            $gesvdj_size(
                mode: c_int, _economy: c_int, m: c_int, n: c_int, _a: Pointer, _lda: c_int, _s: Pointer, _u: Pointer,
                _ldu: c_int, _v: Pointer, _ldv: c_int, result: *mut c_int, _parameters: Pointer
            ) => Routine::singular(mode == 1), shape(m, n, 0, 1), result;
            $gesvdj_batched_size(
                mode: c_int, m: c_int, n: c_int, _a: Pointer, _lda: c_int, _s: Pointer, _u: Pointer, _ldu: c_int,
                _v: Pointer, _ldv: c_int, result: *mut c_int, _parameters: Pointer, batch: c_int
            ) => Routine::singular(mode == 1), shape(m, n, 0, batch), result;
            $gesvda_size(
                mode: c_int, rank: c_int, m: c_int, n: c_int, _a: Pointer, _lda: c_int, _stride_a: c_longlong,
                _s: Pointer, _stride_s: c_longlong, _u: Pointer, _ldu: c_int, _stride_u: c_longlong, _v: Pointer,
                _ldv: c_int, _stride_v: c_longlong, result: *mut c_int, batch: c_int
            ) => Routine::singular(mode == 1), shape(m, n, rank, batch), result;
        }
        calls! {
            $potrf(
                _uplo: c_int, n: c_int, a: Pointer, _lda: c_int, _work: Pointer, _work_size: c_int, info: *mut c_int
            ) => $element, Routine::Cholesky, shape(n, n, 0, 1), [a], info;
            $potrs(
                _uplo: c_int, n: c_int, k: c_int, _a: Pointer, _lda: c_int, b: Pointer, _ldb: c_int, info: *mut c_int
            ) => $element, Routine::Solve, shape(n, n, k, 1), [b], info;
            $getrf(m: c_int, n: c_int, a: Pointer, _lda: c_int, _work: Pointer, pivots: Pointer, info: *mut c_int) =>
                $element, Routine::Lu, shape(m, n, 0, 1), [a, pivots], info;
            $getrs(
                _operation: c_int, n: c_int, k: c_int, _a: Pointer, _lda: c_int, _pivots: Pointer, b: Pointer,
                _ldb: c_int, info: *mut c_int
            ) => $element, Routine::Solve, shape(n, n, k, 1), [b], info;
            $geqrf(
                m: c_int, n: c_int, a: Pointer, _lda: c_int, tau: Pointer, _work: Pointer, _work_size: c_int,
                info: *mut c_int
            ) => $element, Routine::Qr, shape(m, n, 0, 1), [a, tau], info;
            $orgqr(
                m: c_int, n: c_int, k: c_int, a: Pointer, _lda: c_int, _tau: Pointer, _work: Pointer,
                _work_size: c_int, info: *mut c_int
            ) => $element, Routine::MakeQ, shape(m, n, k, 1), [a], info;
            $ormqr(
                side: c_int, _operation: c_int, m: c_int, n: c_int, k: c_int, _a: Pointer, _lda: c_int, _tau: Pointer,
                c: Pointer, _ldc: c_int, _work: Pointer, _work_size: c_int, info: *mut c_int
            ) => $element, Routine::ApplyQ, sided(side, m, n, k), [c], info;
            $syevd(
                mode: c_int, _uplo: c_int, n: c_int, a: Pointer, _lda: c_int, w: Pointer, _work: Pointer,
                _work_size: c_int, info: *mut c_int
            ) => $element, Routine::eigen(mode), shape(n, n, 0, 1), [a, w], info;
            $syevj(
                mode: c_int, _uplo: c_int, n: c_int, a: Pointer, _lda: c_int, w: Pointer, _work: Pointer,
                _work_size: c_int, info: *mut c_int, _parameters: Pointer
            ) => $element, Routine::eigen(mode), shape(n, n, 0, 1), [a, w], info;
            $syevj_batched(
                mode: c_int, _uplo: c_int, n: c_int, a: Pointer, _lda: c_int, w: Pointer, _work: Pointer,
                _work_size: c_int, info: *mut c_int, _parameters: Pointer, batch: c_int
            ) => $element, Routine::eigen(mode), shape(n, n, 0, batch), [a, w], info;
            $gesvd(
                job_u: c_char, job_v: c_char, m: c_int, n: c_int, a: Pointer, _lda: c_int, s: Pointer, u: Pointer,
                _ldu: c_int, v: Pointer, _ldv: c_int, _work: Pointer, _work_size: c_int, _real: Pointer,
                info: *mut c_int
            ) => $element, Routine::singular((job_u, job_v) != (NONE, NONE)), shape(m, n, 0, 1), [a, s, u, v], info;
            $gesvdj(
                mode: c_int, _economy: c_int, m: c_int, n: c_int, a: Pointer, _lda: c_int, s: Pointer, u: Pointer,
                _ldu: c_int, v: Pointer, _ldv: c_int, _work: Pointer, _work_size: c_int, info: *mut c_int,
                _parameters: Pointer
            ) => $element, Routine::singular(mode == 1), shape(m, n, 0, 1), [a, s, u, v], info;
            $gesvdj_batched(
                mode: c_int, m: c_int, n: c_int, a: Pointer, _lda: c_int, s: Pointer, u: Pointer, _ldu: c_int,
                v: Pointer, _ldv: c_int, _work: Pointer, _work_size: c_int, info: *mut c_int, _parameters: Pointer,
                batch: c_int
            ) => $element, Routine::singular(mode == 1), shape(m, n, 0, batch), [a, s, u, v], info;
            $gesvda(
                mode: c_int, rank: c_int, m: c_int, n: c_int, _a: Pointer, _lda: c_int, _stride_a: c_longlong,
                s: Pointer, _stride_s: c_longlong, u: Pointer, _ldu: c_int, _stride_u: c_longlong, v: Pointer,
                _ldv: c_int, _stride_v: c_longlong, _work: Pointer, _work_size: c_int, info: *mut c_int,
                _norms: *mut f64, batch: c_int
            ) => $element, Routine::singular(mode == 1), shape(m, n, rank, batch), [s, u, v], info;
        }
        batched!($potrf_batched, $potrs_batched, $element);
    };
}

/// Batched Cholesky calls. The matrices are behind a list of addresses on the device, which kernels may have written, so
/// that everything on the device counts as written.
macro_rules! batched {
    ($factor:ident, $solve:ident, $element:expr) => {
        /// Records a batch of Cholesky factorisations.
        #[unsafe(no_mangle)]
        pub extern "C" fn $factor(
            handle: *const c_void,
            _uplo: c_int,
            n: c_int,
            _a: *mut Pointer,
            _lda: c_int,
            info: *mut c_int,
            batch: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($factor));
            answer(|| {
                let shape = shape(n, n, 0, batch)?;
                values::anything_written();
                run(handle, &NAME, (Routine::Cholesky, shape, $element), &[], info)
            })
        }

        /// Records a batch of solutions with one status.
        #[unsafe(no_mangle)]
        pub extern "C" fn $solve(
            handle: *const c_void,
            _uplo: c_int,
            n: c_int,
            k: c_int,
            _a: *mut Pointer,
            _lda: c_int,
            _b: *mut Pointer,
            _ldb: c_int,
            info: *mut c_int,
            batch: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($solve));
            answer(|| {
                let shape = shape(n, n, k, batch)?;
                values::anything_written();
                run(handle, &NAME, (Routine::Solve, shape, $element), &[], info)
            })
        }
    };
}

/// The letter N of a job: no vectors.
const NONE: c_char = b'N' as c_char;
/// `CUBLAS_SIDE_RIGHT`.
const RIGHT: c_int = 1;

/// C of m × n times Q from a side: seen from the right, C is n × m.
fn sided(side: c_int, m: c_int, n: c_int, k: c_int) -> Result<Shape, Status> {
    if side == RIGHT { shape(n, m, k, 1) } else { shape(m, n, k, 1) }
}

of_type! { FLOAT32;
    cusolverDnSpotrf_bufferSize cusolverDnSpotrf cusolverDnSpotrfBatched cusolverDnSpotrs cusolverDnSpotrsBatched
    cusolverDnSgetrf_bufferSize cusolverDnSgetrf cusolverDnSgetrs cusolverDnSgeqrf_bufferSize cusolverDnSgeqrf
    cusolverDnSorgqr_bufferSize cusolverDnSorgqr cusolverDnSormqr_bufferSize cusolverDnSormqr
    cusolverDnSsyevd_bufferSize cusolverDnSsyevd
    cusolverDnSsyevj_bufferSize cusolverDnSsyevj cusolverDnSsyevjBatched_bufferSize cusolverDnSsyevjBatched
    cusolverDnSgesvd_bufferSize cusolverDnSgesvd
    cusolverDnSgesvdj_bufferSize cusolverDnSgesvdj cusolverDnSgesvdjBatched_bufferSize cusolverDnSgesvdjBatched
    cusolverDnSgesvdaStridedBatched_bufferSize cusolverDnSgesvdaStridedBatched
}
of_type! { FLOAT64;
    cusolverDnDpotrf_bufferSize cusolverDnDpotrf cusolverDnDpotrfBatched cusolverDnDpotrs cusolverDnDpotrsBatched
    cusolverDnDgetrf_bufferSize cusolverDnDgetrf cusolverDnDgetrs cusolverDnDgeqrf_bufferSize cusolverDnDgeqrf
    cusolverDnDorgqr_bufferSize cusolverDnDorgqr cusolverDnDormqr_bufferSize cusolverDnDormqr
    cusolverDnDsyevd_bufferSize cusolverDnDsyevd
    cusolverDnDsyevj_bufferSize cusolverDnDsyevj cusolverDnDsyevjBatched_bufferSize cusolverDnDsyevjBatched
    cusolverDnDgesvd_bufferSize cusolverDnDgesvd
    cusolverDnDgesvdj_bufferSize cusolverDnDgesvdj cusolverDnDgesvdjBatched_bufferSize cusolverDnDgesvdjBatched
    cusolverDnDgesvdaStridedBatched_bufferSize cusolverDnDgesvdaStridedBatched
}
of_type! { COMPLEX64;
    cusolverDnCpotrf_bufferSize cusolverDnCpotrf cusolverDnCpotrfBatched cusolverDnCpotrs cusolverDnCpotrsBatched
    cusolverDnCgetrf_bufferSize cusolverDnCgetrf cusolverDnCgetrs cusolverDnCgeqrf_bufferSize cusolverDnCgeqrf
    cusolverDnCungqr_bufferSize cusolverDnCungqr cusolverDnCunmqr_bufferSize cusolverDnCunmqr
    cusolverDnCheevd_bufferSize cusolverDnCheevd
    cusolverDnCheevj_bufferSize cusolverDnCheevj cusolverDnCheevjBatched_bufferSize cusolverDnCheevjBatched
    cusolverDnCgesvd_bufferSize cusolverDnCgesvd
    cusolverDnCgesvdj_bufferSize cusolverDnCgesvdj cusolverDnCgesvdjBatched_bufferSize cusolverDnCgesvdjBatched
    cusolverDnCgesvdaStridedBatched_bufferSize cusolverDnCgesvdaStridedBatched
}
of_type! { COMPLEX128;
    cusolverDnZpotrf_bufferSize cusolverDnZpotrf cusolverDnZpotrfBatched cusolverDnZpotrs cusolverDnZpotrsBatched
    cusolverDnZgetrf_bufferSize cusolverDnZgetrf cusolverDnZgetrs cusolverDnZgeqrf_bufferSize cusolverDnZgeqrf
    cusolverDnZungqr_bufferSize cusolverDnZungqr cusolverDnZunmqr_bufferSize cusolverDnZunmqr
    cusolverDnZheevd_bufferSize cusolverDnZheevd
    cusolverDnZheevj_bufferSize cusolverDnZheevj cusolverDnZheevjBatched_bufferSize cusolverDnZheevjBatched
    cusolverDnZgesvd_bufferSize cusolverDnZgesvd
    cusolverDnZgesvdj_bufferSize cusolverDnZgesvdj cusolverDnZgesvdjBatched_bufferSize cusolverDnZgesvdjBatched
    cusolverDnZgesvdaStridedBatched_bufferSize cusolverDnZgesvdaStridedBatched
}
