//! The calls that take the type as an argument and sizes of 64 bits.

use super::{INVALID_VALUE, Routine, Shape, Status, answer, put, run, size};
use crate::libs::work::{Element, Name};
use std::ffi::{c_int, c_void};

type Pointer = *mut c_void;

/// Writes the workspaces of a call in bytes, on the device and on the host; there is none on the host.
///
/// # Safety
/// Both must be null or valid for a write.
unsafe fn put_workspaces(
    (device, host): (*mut usize, *mut usize),
    routine: Routine,
    shape: Shape,
    cuda_type: c_int,
) -> Result<(), Status> {
    let bytes = routine.workspace(shape).saturating_mul(element(cuda_type)?.size_bytes());
    // SAFETY: the caller's contract.
    unsafe {
        put(device, usize::try_from(bytes).map_err(|_| INVALID_VALUE)?)?;
        put(host, 0)
    }
}

fn element(cuda_type: c_int) -> Result<Element, Status> {
    Element::from_cuda(cuda_type).ok_or(INVALID_VALUE)
}

fn shape(m: i64, n: i64, k: i64, batch: i64) -> Result<Shape, Status> {
    Ok(Shape { m: size(m)?, n: size(n)?, k: size(k)?, batch: size(batch)? })
}

/// Tells the size of a workspace: `NAME(arguments) => routine, shape, type of the matrix;`. The two results follow the
/// arguments, and `more` the results.
macro_rules! workspaces {
    ($($name:ident($($argument:ident: $type:ty),*; $($more:ident: $more_type:ty),*) =>
       $routine:expr, $shape:expr, $cuda_type:ident;)*) => { $(
        /// The workspaces of the call of this name, in bytes.
        ///
        /// # Safety
        /// The pointers to the results must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            _handle: *const c_void, _parameters: Pointer, $($argument: $type,)* device: *mut usize, host: *mut usize,
            $($more: $more_type),*
        ) -> Status {
            // SAFETY: the caller's contract.
            answer(|| unsafe { put_workspaces((device, host), $routine, $shape?, $cuda_type) })
        }
    )* };
}

workspaces! {
    cusolverDnXpotrf_bufferSize(
        _uplo: c_int, n: i64, cuda_type: c_int, _a: Pointer, _lda: i64, _compute: c_int;
    ) => Routine::Cholesky, shape(n, n, 0, 1), cuda_type;
    cusolverDnXgeqrf_bufferSize(
        m: i64, n: i64, cuda_type: c_int, _a: Pointer, _lda: i64, _tau_type: c_int, _tau: Pointer, _compute: c_int;
    ) => Routine::Qr, shape(m, n, 0, 1), cuda_type;
    cusolverDnXsyevd_bufferSize(
        mode: c_int, _uplo: c_int, n: i64, cuda_type: c_int, _a: Pointer, _lda: i64, _w_type: c_int, _w: Pointer,
        _compute: c_int;
    ) => Routine::eigen(mode), shape(n, n, 0, 1), cuda_type;
    cusolverDnXsyevBatched_bufferSize(
        mode: c_int, _uplo: c_int, n: i64, cuda_type: c_int, _a: Pointer, _lda: i64, _w_type: c_int, _w: Pointer,
        _compute: c_int; batch: i64
    ) => Routine::eigen(mode), shape(n, n, 0, batch), cuda_type;
}

/// Records a call: `NAME(arguments) => routine, shape, type of the matrix, [matrices it writes], info;`.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) => $routine:expr, $shape:expr, $cuda_type:ident,
       [$($written:ident),*], $info:ident;)*) => { $(
        /// Records the call of this name; see [`Routine`].
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(handle: *const c_void, _parameters: Pointer, $($argument: $type),*) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                let work = ($routine, $shape?, element($cuda_type)?);
                run(handle, &NAME, work, &[$($written),*], $info)
            })
        }
    )* };
}

calls! {
    cusolverDnXpotrf(
        _uplo: c_int, n: i64, cuda_type: c_int, a: Pointer, _lda: i64, _compute: c_int, _device: Pointer,
        _device_bytes: usize, _host: Pointer, _host_bytes: usize, info: *mut c_int
    ) => Routine::Cholesky, shape(n, n, 0, 1), cuda_type, [a], info;
    cusolverDnXpotrs(
        _uplo: c_int, n: i64, k: i64, cuda_type: c_int, _a: Pointer, _lda: i64, _b_type: c_int, b: Pointer, _ldb: i64,
        info: *mut c_int
    ) => Routine::Solve, shape(n, n, k, 1), cuda_type, [b], info;
    cusolverDnXgeqrf(
        m: i64, n: i64, cuda_type: c_int, a: Pointer, _lda: i64, _tau_type: c_int, tau: Pointer, _compute: c_int,
        _device: Pointer, _device_bytes: usize, _host: Pointer, _host_bytes: usize, info: *mut c_int
    ) => Routine::Qr, shape(m, n, 0, 1), cuda_type, [a, tau], info;
    cusolverDnXsyevd(
        mode: c_int, _uplo: c_int, n: i64, cuda_type: c_int, a: Pointer, _lda: i64, _w_type: c_int, w: Pointer,
        _compute: c_int, _device: Pointer, _device_bytes: usize, _host: Pointer, _host_bytes: usize, info: *mut c_int
    ) => Routine::eigen(mode), shape(n, n, 0, 1), cuda_type, [a, w], info;
    cusolverDnXsyevBatched(
        mode: c_int, _uplo: c_int, n: i64, cuda_type: c_int, a: Pointer, _lda: i64, _w_type: c_int, w: Pointer,
        _compute: c_int, _device: Pointer, _device_bytes: usize, _host: Pointer, _host_bytes: usize, info: *mut c_int,
        batch: i64
    ) => Routine::eigen(mode), shape(n, n, 0, batch), cuda_type, [a, w], info;
}
