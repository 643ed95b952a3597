//! Vector, matrix-vector and triangular calls of cuBLAS.

use super::{INVALID_VALUE, NOT_SUPPORTED, POINTER_MODE_DEVICE, Settings, Status, answer, settings};
use crate::libs::work::{self, Element, Name, Operator};
use crate::{unsupported, values};
use prism_wire::message::DataType;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

const FLOAT32: Element = Element::real(DataType::Float32);
const FLOAT64: Element = Element::real(DataType::Float64);
const COMPLEX64: Element = Element::complex(DataType::Float32);
const COMPLEX128: Element = Element::complex(DataType::Float64);

fn submit(settings: &Settings, name: &Name, element: Element, products: u64, elements: u64) {
    let operator = Operator {
        flop: 2 * products * element.products,
        bytes: elements * element.size_bytes(),
        input: element.dtype,
    };
    work::operator(settings.stream(), name, operator);
}

/// A scalar product whose result stays on the device. A result on the host would be read at once, and it is not known.
fn dot(
    handle: *const c_void,
    text: &str,
    name: &Name,
    element: Element,
    n: c_int,
    to: *mut c_void,
) -> Result<(), Status> {
    let settings = settings(handle)?;
    if settings.pointer_mode.load(Relaxed) != POINTER_MODE_DEVICE {
        unsupported::call(&format!("{text} with a result on the host"));
        return Err(NOT_SUPPORTED);
    }
    submit(settings, name, element, n.max(0) as u64, 2 * n.max(0) as u64);
    values::library_wrote(to, name.text());
    Ok(())
}

macro_rules! dot {
    ($name:ident, $element:expr) => {
        /// The scalar product of two vectors.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            n: c_int,
            _x: *const c_void,
            _incx: c_int,
            _y: *const c_void,
            _incy: c_int,
            result: *mut c_void,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| dot(handle, stringify!($name), &NAME, $element, n, result))
        }
    };
}

dot!(cublasSdot_v2, FLOAT32);
dot!(cublasDdot_v2, FLOAT64);
dot!(cublasCdotu_v2, COMPLEX64);
dot!(cublasCdotc_v2, COMPLEX64);
dot!(cublasZdotu_v2, COMPLEX128);
dot!(cublasZdotc_v2, COMPLEX128);

/// The scalar product of two vectors of given types.
#[unsafe(no_mangle)]
pub extern "C" fn cublasDotEx(
    handle: *const c_void,
    n: c_int,
    _x: *const c_void,
    x_type: c_int,
    _incx: c_int,
    _y: *const c_void,
    y_type: c_int,
    _incy: c_int,
    result: *mut c_void,
    _result_type: c_int,
    _execution_type: c_int,
) -> Status {
    static NAME: Name = Name::new("cublasDotEx");
    answer(|| {
        let element = Element::from_cuda(x_type).filter(|_| x_type == y_type).ok_or(NOT_SUPPORTED)?;
        dot(handle, "cublasDotEx", &NAME, element, n, result)
    })
}

macro_rules! gemv {
    ($name:ident, $element:expr) => {
        /// y = alpha · op(A) · x + beta · y.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            trans: c_int,
            m: c_int,
            n: c_int,
            _alpha: *const c_void,
            _a: *const c_void,
            lda: c_int,
            _x: *const c_void,
            incx: c_int,
            _beta: *const c_void,
            y: *mut c_void,
            incy: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                let settings = settings(handle)?;
                if m < 0 || n < 0 || lda < m.max(1) || incx == 0 || incy == 0 || !(0..=2).contains(&trans) {
                    return Err(INVALID_VALUE);
                }
                let (m, n) = (m as u64, n as u64);
                if m > 0 && n > 0 {
                    submit(settings, &NAME, $element, m * n, m * n + m + n);
                    values::library_wrote(y, NAME.text());
                }
                Ok(())
            })
        }
    };
}

gemv!(cublasSgemv_v2, FLOAT32);
gemv!(cublasDgemv_v2, FLOAT64);
gemv!(cublasCgemv_v2, COMPLEX64);
gemv!(cublasZgemv_v2, COMPLEX128);

/// A triangular solve of a batch: `side` 0 has an m × m triangle on the left, 1 an n × n triangle on the right.
fn trsm(
    handle: *const c_void,
    name: &Name,
    element: Element,
    side: c_int,
    [m, n, batch]: [c_int; 3],
    [lda, ldb]: [c_int; 2],
) -> Result<(), Status> {
    let settings = settings(handle)?;
    if m < 0 || n < 0 || batch < 0 || !(0..=1).contains(&side) {
        return Err(INVALID_VALUE);
    }
    let order = if side == 0 { m } else { n };
    if lda < order.max(1) || ldb < m.max(1) {
        return Err(INVALID_VALUE);
    }
    let (m, n, batch, order) = (m as u64, n as u64, batch as u64, order as u64);
    if m * n * batch > 0 {
        // Half of the triangle's square times every column, and the triangle, and the right-hand side read and written.
        let products = batch * m * n * order / 2;
        submit(settings, name, element, products, batch * (order * order / 2 + 2 * m * n));
    }
    Ok(())
}

macro_rules! trsm {
    ($name:ident, $batched:ident, $element:expr) => {
        /// Solves op(A) · X = alpha · B or X · op(A) = alpha · B for a triangular A.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            side: c_int,
            _uplo: c_int,
            _trans: c_int,
            _diag: c_int,
            m: c_int,
            n: c_int,
            _alpha: *const c_void,
            _a: *const c_void,
            lda: c_int,
            b: *mut c_void,
            ldb: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                trsm(handle, &NAME, $element, side, [m, n, 1], [lda, ldb])?;
                values::library_wrote(b, NAME.text());
                Ok(())
            })
        }

        /// A batch of triangular solves given by arrays of pointers.
        #[unsafe(no_mangle)]
        pub extern "C" fn $batched(
            handle: *const c_void,
            side: c_int,
            _uplo: c_int,
            _trans: c_int,
            _diag: c_int,
            m: c_int,
            n: c_int,
            _alpha: *const c_void,
            _a: *const *const c_void,
            lda: c_int,
            _b: *const *mut c_void,
            ldb: c_int,
            batch: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($batched));
            answer(|| {
                trsm(handle, &NAME, $element, side, [m, n, batch], [lda, ldb])?;
                values::anything_written();
                Ok(())
            })
        }
    };
}

trsm!(cublasStrsm_v2, cublasStrsmBatched, FLOAT32);
trsm!(cublasDtrsm_v2, cublasDtrsmBatched, FLOAT64);
trsm!(cublasCtrsm_v2, cublasCtrsmBatched, COMPLEX64);
trsm!(cublasZtrsm_v2, cublasZtrsmBatched, COMPLEX128);
