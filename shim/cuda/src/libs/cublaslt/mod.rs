//! cuBLASLt: descriptors, one heuristic result, products.

mod exports;
mod fields;

use super::cublas::gemm::compute_type;
use super::cublas::{INVALID_VALUE, NOT_SUPPORTED, Status};
use super::work::{Element, Gemm};
use crate::unsupported;
use fields::{Kind, place};
use prism_wire::message::DataType;
use std::ffi::{c_int, c_void};

/// `cublasLtMatrixLayoutAttribute_t`.
mod layout {
    use std::ffi::c_int;
    pub(super) const TYPE: c_int = 0;
    pub(super) const ORDER: c_int = 1;
    pub(super) const ROWS: c_int = 2;
    pub(super) const COLS: c_int = 3;
    pub(super) const LD: c_int = 4;
    pub(super) const BATCH_COUNT: c_int = 5;
    pub(super) const BATCH_MODE: c_int = 8;
    /// A batch mode beside those of the C header: a group of matrices whose shapes lie in device memory.
    pub(super) const GROUPED: u32 = 0x5052_0001;
}

/// `cublasLtMatmulDescAttributes_t`.
mod desc {
    use std::ffi::c_int;
    pub(super) const COMPUTE_TYPE: c_int = 0;
    pub(super) const SCALE_TYPE: c_int = 1;
    pub(super) const TRANS_A: c_int = 3;
    pub(super) const TRANS_B: c_int = 4;
    pub(super) const FILL_MODE: c_int = 6;
    pub(super) const EPILOGUE: c_int = 7;
}

static LAYOUT: Kind = Kind::new(
    0x5052_4953_4d4c_4159,
    64,
    &place([(0, 4), (1, 4), (2, 8), (3, 8), (4, 8), (5, 4), (6, 8), (7, 8), (8, 4)]),
);
static DESC: Kind = Kind::new(
    0x5052_4953_4d44_4553,
    256,
    &place([
        // Compute and scale type, pointer mode, the three transpositions, fill mode, epilogue.
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
        (4, 4),
        (5, 4),
        (6, 4),
        (7, 4),
        // Bias and auxiliary pointers and strides, alpha's stride, the target number of multiprocessors.
        (8, 8),
        (10, 8),
        (11, 8),
        (12, 8),
        (13, 8),
        (14, 8),
        (15, 4),
        // Scale and maximum pointers, the auxiliary type, fast accumulation, the bias type.
        (17, 8),
        (18, 8),
        (19, 8),
        (20, 8),
        (21, 8),
        (22, 4),
        (23, 8),
        (24, 8),
        (25, 1),
        (26, 4),
        // Scale modes, the output scale, the emulation descriptor.
        (31, 4),
        (32, 4),
        (33, 4),
        (34, 4),
        (35, 4),
        (36, 8),
        (37, 4),
        (38, 8),
    ]),
);
static PREFERENCE: Kind = Kind::new(
    0x5052_4953_4d50_5245,
    64,
    &place([(0, 4), (1, 8), (3, 4), (5, 4), (6, 4), (7, 4), (8, 4), (9, 4), (12, 8)]),
);
static TRANSFORM: Kind = Kind::new(0x5052_4953_4d54_5241, 64, &place([(0, 4), (1, 4), (2, 4), (3, 4)]));
static EMULATION: Kind = Kind::new(0x5052_4953_4d45_4d55, 64, &place([(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (5, 8)]));
/// `cublasLtMatmulAlgo_t`: the configuration attributes.
static ALGORITHM: Kind = Kind::new(
    0x5052_4953_4d41_4c47,
    64,
    &place([(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4), (7, 2), (8, 2)]),
);

const EPILOGUE_DEFAULT: u32 = 1;
const FILL_MODE_FULL: u32 = 2;

/// What a layout says about a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrix {
    cuda_type: c_int,
    rows: u64,
    cols: u64,
    batch: u64,
}

impl Matrix {
    /// # Safety
    /// `memory` must be null or a layout struct.
    unsafe fn read(memory: *const c_void) -> Result<Self, Status> {
        // SAFETY: the caller's contract.
        unsafe {
            if LAYOUT.read::<u32>(memory, layout::BATCH_MODE)? == layout::GROUPED {
                unsupported::call("a cuBLASLt product with a grouped layout");
                return Err(NOT_SUPPORTED);
            }
            Ok(Self {
                cuda_type: LAYOUT.read::<u32>(memory, layout::TYPE)? as c_int,
                rows: LAYOUT.read(memory, layout::ROWS)?,
                cols: LAYOUT.read(memory, layout::COLS)?,
                batch: u64::try_from(LAYOUT.read::<i32>(memory, layout::BATCH_COUNT)?).map_err(|_| INVALID_VALUE)?,
            })
        }
    }

    fn transposed(self, transposition: u32) -> Self {
        if transposition == 0 { self } else { Self { rows: self.cols, cols: self.rows, ..self } }
    }
}

/// The five descriptors of one product.
#[derive(Clone, Copy)]
struct Call {
    desc: *const c_void,
    a: *const c_void,
    b: *const c_void,
    c: *const c_void,
    d: *const c_void,
}

impl Call {
    /// The product that the descriptors stand for; fails as cuBLASLt does when they contradict each other.
    ///
    /// # Safety
    /// Every pointer must be null or a struct of its kind.
    unsafe fn product(&self, capability: (i32, i32)) -> Result<Gemm, Status> {
        // SAFETY: the caller's contract.
        let (compute, trans_a, trans_b, a, b, c, d) = unsafe {
            (
                DESC.read::<u32>(self.desc, desc::COMPUTE_TYPE)? as c_int,
                DESC.read::<u32>(self.desc, desc::TRANS_A)?,
                DESC.read::<u32>(self.desc, desc::TRANS_B)?,
                Matrix::read(self.a)?,
                Matrix::read(self.b)?,
                Matrix::read(self.c)?,
                Matrix::read(self.d)?,
            )
        };
        let (left, right) = (a.transposed(trans_a), b.transposed(trans_b));
        let shapes_agree = left.cols == right.rows
            && (d.rows, d.cols) == (left.rows, right.cols)
            && (c.rows, c.cols) == (d.rows, d.cols);
        let batches_agree = [a.batch, b.batch, c.batch].iter().all(|batch| *batch == d.batch);
        if !shapes_agree || !batches_agree {
            return Err(INVALID_VALUE);
        }
        let element = Element::from_cuda(a.cuda_type).ok_or(NOT_SUPPORTED)?;
        let other = Element::from_cuda(b.cuda_type).ok_or(NOT_SUPPORTED)?;
        if element.size_bytes() != other.size_bytes() || !is_supported(element.dtype, capability) {
            return Err(NOT_SUPPORTED);
        }
        Ok(Gemm {
            m: d.rows,
            n: d.cols,
            k: left.cols * element.products,
            batch: d.batch,
            input: element.dtype,
            compute: compute_type(compute, false).ok_or(NOT_SUPPORTED)?,
        })
    }
}

/// Do tensor cores of this compute capability multiply this type?
fn is_supported(dtype: DataType, capability: (i32, i32)) -> bool {
    match dtype {
        DataType::Float8e4m3 | DataType::Float8e5m2 => capability >= (8, 9),
        DataType::Bfloat16 => capability >= (8, 0),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: (i32, i32) = (9, 0);

    struct Descriptors([*mut c_void; 5]);

    impl Descriptors {
        /// A (k × m, transposed), B (k × n), C and D (m × n) of `cuda_type`.
        fn new(cuda_type: u32, [m, n, k]: [u64; 3], batch: i32) -> Self {
            let desc = DESC.allocate();
            let shapes = [(k, m), (k, n), (m, n), (m, n)];
            // SAFETY: freshly allocated descriptors of their kinds.
            unsafe {
                DESC.write(desc, desc::COMPUTE_TYPE, 68_u32).expect("a live descriptor");
                DESC.write(desc, desc::TRANS_A, 1_u32).expect("a live descriptor");
                let layouts = shapes.map(|(rows, cols)| {
                    let memory = LAYOUT.allocate();
                    LAYOUT.write(memory, layout::TYPE, cuda_type).expect("a live descriptor");
                    LAYOUT.write(memory, layout::ROWS, rows).expect("a live descriptor");
                    LAYOUT.write(memory, layout::COLS, cols).expect("a live descriptor");
                    LAYOUT.write(memory, layout::BATCH_COUNT, batch).expect("a live descriptor");
                    memory
                });
                Self([desc, layouts[0], layouts[1], layouts[2], layouts[3]])
            }
        }

        fn product(&self, capability: (i32, i32)) -> Result<Gemm, Status> {
            let [desc, a, b, c, d] = self.0.map(<*mut c_void>::cast_const);
            // SAFETY: live descriptors of their kinds.
            unsafe { Call { desc, a, b, c, d }.product(capability) }
        }
    }

    impl Drop for Descriptors {
        fn drop(&mut self) {
            // SAFETY: allocated in `new`, not used afterwards.
            unsafe {
                DESC.free(self.0[0]).expect("a live descriptor");
                for layout in &self.0[1..] {
                    LAYOUT.free(*layout).expect("a live descriptor");
                }
            }
        }
    }

    #[test]
    fn the_product_has_the_shape_of_the_layouts() {
        let descriptors = Descriptors::new(14, [8, 5, 3], 2);
        let expected = Gemm { m: 8, n: 5, k: 3, batch: 2, input: DataType::Bfloat16, compute: DataType::Float32 };
        assert_eq!(descriptors.product(HOPPER), Ok(expected));
    }

    #[test]
    fn contradicting_shapes_are_refused() {
        let descriptors = Descriptors::new(14, [8, 5, 3], 1);
        // SAFETY: a live layout.
        unsafe { LAYOUT.write(descriptors.0[1], layout::ROWS, 4_u64).expect("a live descriptor") };
        assert_eq!(descriptors.product(HOPPER), Err(INVALID_VALUE));
        let descriptors = Descriptors::new(14, [8, 5, 3], 1);
        // SAFETY: a live layout.
        unsafe { LAYOUT.write(descriptors.0[2], layout::BATCH_COUNT, 7_i32).expect("a live descriptor") };
        assert_eq!(descriptors.product(HOPPER), Err(INVALID_VALUE));
    }

    #[test]
    fn eight_bit_floats_need_the_architecture() {
        let descriptors = Descriptors::new(28, [16, 16, 16], 1);
        assert!(descriptors.product((8, 9)).is_ok());
        assert_eq!(descriptors.product((8, 0)), Err(NOT_SUPPORTED));
    }
}
