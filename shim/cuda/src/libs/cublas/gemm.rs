//! Matrix products of cuBLAS. Matrices are column-major; C is m × n.

use super::{INVALID_VALUE, NOT_SUPPORTED, Settings, Status, answer, settings};
use crate::libs::work::{self, Element, Gemm, Name};
use crate::values;
use prism_wire::message::DataType;
use std::ffi::{c_int, c_void};

/// Shape of one call, as given.
#[derive(Clone, Copy)]
struct Shape {
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    lda: c_int,
    ldb: c_int,
    ldc: c_int,
    batch: c_int,
}

impl Shape {
    /// The product this call stands for; fails as cuBLAS does on a shape that cannot be.
    fn check(&self, element: Element, compute: DataType) -> Result<Gemm, Status> {
        if self.m < 0 || self.n < 0 || self.k < 0 || self.batch < 0 {
            return Err(INVALID_VALUE);
        }
        if !(0..=2).contains(&self.trans_a) || !(0..=2).contains(&self.trans_b) {
            return Err(INVALID_VALUE);
        }
        let rows_a = if self.trans_a == 0 { self.m } else { self.k };
        let rows_b = if self.trans_b == 0 { self.k } else { self.n };
        if self.lda < rows_a.max(1) || self.ldb < rows_b.max(1) || self.ldc < self.m.max(1) {
            return Err(INVALID_VALUE);
        }
        Ok(Gemm {
            m: self.m as u64,
            n: self.n as u64,
            // A complex product is four real ones.
            k: self.k as u64 * element.products,
            batch: self.batch as u64,
            input: element.dtype,
            compute,
        })
    }
}

/// The type that a product of `element` is computed in when the call does not say.
fn natural_compute(settings: &Settings, element: Element) -> DataType {
    match element.dtype {
        DataType::Float32 => settings.float32_compute(),
        other => other,
    }
}

/// The type named by a `cublasComputeType_t`.
pub(in crate::libs) fn compute_type(value: c_int, tf32: bool) -> Option<DataType> {
    Some(match value {
        64 | 65 | 74 => DataType::Float16,
        68 if tf32 => DataType::Tf32,
        68 | 69 | 78 => DataType::Float32,
        70 | 71 | 79 => DataType::Float64,
        72 | 73 => DataType::Int32,
        75 => DataType::Bfloat16,
        77 => DataType::Tf32,
        _ => return None,
    })
}

/// Where a product is written.
#[derive(Clone, Copy)]
enum Output {
    /// To the block this points into.
    One(*const c_void),
    /// To addresses that are themselves in device memory.
    Anywhere,
}

impl Output {
    fn written(self, name: &Name) {
        match self {
            Self::One(address) => values::library_wrote(address, name.text()),
            Self::Anywhere => values::anything_written(),
        }
    }
}

fn run(handle: *const c_void, name: &Name, element: Element, shape: Shape, c: Output) -> Result<(), Status> {
    let settings = settings(handle)?;
    let gemm = shape.check(element, natural_compute(settings, element))?;
    work::gemm(settings.stream(), name, gemm);
    c.written(name);
    Ok(())
}

/// A product with types given by number.
fn run_typed(
    handle: *const c_void,
    name: &Name,
    types: [c_int; 3],
    compute: Option<c_int>,
    shape: Shape,
    c: Output,
) -> Result<(), Status> {
    let settings = settings(handle)?;
    let element = Element::from_cuda(types[0]).ok_or(NOT_SUPPORTED)?;
    if types[1] != types[0] || Element::from_cuda(types[2]).is_none() {
        return Err(NOT_SUPPORTED);
    }
    let compute = match compute {
        Some(number) => {
            let tf32 = element.dtype == DataType::Float32 && settings.float32_compute() == DataType::Tf32;
            compute_type(number, tf32).ok_or(NOT_SUPPORTED)?
        }
        None if element.dtype == DataType::Float32 => settings.float32_compute(),
        None => DataType::Float32,
    };
    work::gemm(settings.stream(), name, shape.check(element, compute)?);
    c.written(name);
    Ok(())
}

macro_rules! plain {
    ($name:ident, $element:expr) => {
        /// C = alpha · op(A) · op(B) + beta · C.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            trans_a: c_int,
            trans_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            _alpha: *const c_void,
            _a: *const c_void,
            lda: c_int,
            _b: *const c_void,
            ldb: c_int,
            _beta: *const c_void,
            c: *mut c_void,
            ldc: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                run(
                    handle,
                    &NAME,
                    $element,
                    Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch: 1 },
                    Output::One(c),
                )
            })
        }
    };
}

macro_rules! strided {
    ($name:ident, $element:expr) => {
        /// A batch of products at constant distances.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            trans_a: c_int,
            trans_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            _alpha: *const c_void,
            _a: *const c_void,
            lda: c_int,
            _stride_a: i64,
            _b: *const c_void,
            ldb: c_int,
            _stride_b: i64,
            _beta: *const c_void,
            c: *mut c_void,
            ldc: c_int,
            _stride_c: i64,
            batch: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                run(handle, &NAME, $element, Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch }, Output::One(c))
            })
        }
    };
}

macro_rules! pointers {
    ($name:ident, $element:expr) => {
        /// A batch of products given by arrays of pointers.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: *const c_void,
            trans_a: c_int,
            trans_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            _alpha: *const c_void,
            _a: *const *const c_void,
            lda: c_int,
            _b: *const *const c_void,
            ldb: c_int,
            _beta: *const c_void,
            _c: *const *mut c_void,
            ldc: c_int,
            batch: c_int,
        ) -> Status {
            static NAME: Name = Name::new(stringify!($name));
            answer(|| {
                run(
                    handle,
                    &NAME,
                    $element,
                    Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch },
                    Output::Anywhere,
                )
            })
        }
    };
}

plain!(cublasSgemm_v2, Element::real(DataType::Float32));
plain!(cublasDgemm_v2, Element::real(DataType::Float64));
plain!(cublasHgemm, Element::real(DataType::Float16));
plain!(cublasCgemm_v2, Element::complex(DataType::Float32));
plain!(cublasZgemm_v2, Element::complex(DataType::Float64));
strided!(cublasSgemmStridedBatched, Element::real(DataType::Float32));
strided!(cublasDgemmStridedBatched, Element::real(DataType::Float64));
strided!(cublasHgemmStridedBatched, Element::real(DataType::Float16));
strided!(cublasCgemmStridedBatched, Element::complex(DataType::Float32));
strided!(cublasZgemmStridedBatched, Element::complex(DataType::Float64));
pointers!(cublasSgemmBatched, Element::real(DataType::Float32));
pointers!(cublasDgemmBatched, Element::real(DataType::Float64));
pointers!(cublasHgemmBatched, Element::real(DataType::Float16));
pointers!(cublasCgemmBatched, Element::complex(DataType::Float32));
pointers!(cublasZgemmBatched, Element::complex(DataType::Float64));

/// A product with given types, computed in single precision.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSgemmEx(
    handle: *const c_void,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    _alpha: *const f32,
    _a: *const c_void,
    a_type: c_int,
    lda: c_int,
    _b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    _beta: *const f32,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
) -> Status {
    static NAME: Name = Name::new("cublasSgemmEx");
    let shape = Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch: 1 };
    answer(|| run_typed(handle, &NAME, [a_type, b_type, c_type], None, shape, Output::One(c)))
}

/// A product with given types and compute type.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGemmEx(
    handle: *const c_void,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    _alpha: *const c_void,
    _a: *const c_void,
    a_type: c_int,
    lda: c_int,
    _b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    _beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> Status {
    static NAME: Name = Name::new("cublasGemmEx");
    let shape = Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch: 1 };
    answer(|| run_typed(handle, &NAME, [a_type, b_type, c_type], Some(compute), shape, Output::One(c)))
}

/// A batch of products at constant distances, with given types and compute type.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGemmStridedBatchedEx(
    handle: *const c_void,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    _alpha: *const c_void,
    _a: *const c_void,
    a_type: c_int,
    lda: c_int,
    _stride_a: i64,
    _b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    _stride_b: i64,
    _beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    _stride_c: i64,
    batch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> Status {
    static NAME: Name = Name::new("cublasGemmStridedBatchedEx");
    let shape = Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch };
    answer(|| run_typed(handle, &NAME, [a_type, b_type, c_type], Some(compute), shape, Output::One(c)))
}

/// A batch of products given by arrays of pointers, with given types and compute type.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGemmBatchedEx(
    handle: *const c_void,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    _alpha: *const c_void,
    _a: *const *const c_void,
    a_type: c_int,
    lda: c_int,
    _b: *const *const c_void,
    b_type: c_int,
    ldb: c_int,
    _beta: *const c_void,
    _c: *const *mut c_void,
    c_type: c_int,
    ldc: c_int,
    batch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> Status {
    static NAME: Name = Name::new("cublasGemmBatchedEx");
    let shape = Shape { trans_a, trans_b, m, n, k, lda, ldb, ldc, batch };
    answer(|| run_typed(handle, &NAME, [a_type, b_type, c_type], Some(compute), shape, Output::Anywhere))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { trans_a: 1, trans_b: 0, m: 8, n: 5, k: 3, lda: 3, ldb: 3, ldc: 8, batch: 2 };

    #[test]
    fn a_shape_becomes_a_product() {
        let gemm = SHAPE.check(Element::real(DataType::Bfloat16), DataType::Float32);
        let expected = Gemm { m: 8, n: 5, k: 3, batch: 2, input: DataType::Bfloat16, compute: DataType::Float32 };
        assert_eq!(gemm, Ok(expected));
        let complex = SHAPE.check(Element::complex(DataType::Float64), DataType::Float64);
        assert_eq!(complex.map(|gemm| gemm.k), Ok(12));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let element = Element::real(DataType::Float32);
        for bad in [
            Shape { lda: 2, ..SHAPE },
            Shape { ldb: 2, ..SHAPE },
            Shape { ldc: 7, ..SHAPE },
            Shape { m: -1, ..SHAPE },
            Shape { batch: -1, ..SHAPE },
            Shape { trans_b: 9, ..SHAPE },
        ] {
            assert_eq!(bad.check(element, DataType::Float32), Err(INVALID_VALUE));
        }
    }

    #[test]
    fn compute_types_follow_the_header() {
        assert_eq!(compute_type(68, false), Some(DataType::Float32));
        assert_eq!(compute_type(68, true), Some(DataType::Tf32));
        assert_eq!(compute_type(69, true), Some(DataType::Float32));
        assert_eq!(compute_type(77, false), Some(DataType::Tf32));
        assert_eq!(compute_type(1, false), None);
    }
}
