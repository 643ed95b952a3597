//! Records of library work: one per call, with the shape that the engine turns into a duration.

use crate::session::{self, HostCost};
use crate::stream;
use prism_wire::message::{DataType, Record, RecordKind};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

/// A name for records whose id is looked up once.
pub(crate) struct Name {
    text: &'static str,
    id: AtomicU32,
}

impl Name {
    /// The name `text`.
    pub(crate) const fn new(text: &'static str) -> Self {
        Self { text, id: AtomicU32::new(0) }
    }

    /// The name itself.
    pub(crate) fn text(&self) -> &'static str {
        self.text
    }

    fn id(&self) -> u32 {
        match self.id.load(Ordering::Relaxed) {
            0 => {
                let id = session::name_id(self.text);
                self.id.store(id, Ordering::Relaxed);
                id
            }
            id => id,
        }
    }
}

/// A matrix product: `batch` times C(m × n) = A(m × k) · B(k × n).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gemm {
    pub(crate) m: u64,
    pub(crate) n: u64,
    pub(crate) k: u64,
    pub(crate) batch: u64,
    /// Type of A and B.
    pub(crate) input: DataType,
    /// Type the product is computed in.
    pub(crate) compute: DataType,
}

/// An operator known by its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operator {
    pub(crate) flop: u64,
    pub(crate) bytes: u64,
    pub(crate) input: DataType,
}

/// Appends a matrix product on `stream`. An empty product launches nothing.
pub(crate) fn gemm(stream: *const c_void, name: &Name, gemm: Gemm) {
    if gemm.m == 0 || gemm.n == 0 || gemm.batch == 0 {
        return;
    }
    let record = Record {
        kind: RecordKind::Gemm as u16,
        a: gemm.m,
        b: gemm.n,
        c: gemm.k,
        d: gemm.batch,
        e: name.id(),
        f: gemm.input as u32,
        g: gemm.compute as u32,
        ..Record::default()
    };
    submit(stream, record);
}

/// Appends an operator on `stream`.
pub(crate) fn operator(stream: *const c_void, name: &Name, operator: Operator) {
    let record = Record {
        kind: RecordKind::Operator as u16,
        a: operator.flop,
        b: operator.bytes,
        e: name.id(),
        f: operator.input as u32,
        ..Record::default()
    };
    submit(stream, record);
}

fn submit(stream: *const c_void, mut record: Record) {
    record.stream = stream::id(stream);
    session::append(record, session::host_cost(HostCost::KernelLaunch));
}

/// A numeric type as the engine knows it, and how many real multiplications one of its products takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) dtype: DataType,
    /// 1 for real numbers, 4 for complex ones.
    pub(crate) products: u64,
}

impl Element {
    pub(crate) const fn real(dtype: DataType) -> Self {
        Self { dtype, products: 1 }
    }

    pub(crate) const fn complex(dtype: DataType) -> Self {
        Self { dtype, products: 4 }
    }

    /// Size of one element in bytes.
    pub(crate) fn size_bytes(self) -> u64 {
        self.dtype.size_bytes() * if self.products == 1 { 1 } else { 2 }
    }

    /// The type with number `value` of `cudaDataType` (library_types.h). Types below one byte have no [`DataType`].
    pub(crate) fn from_cuda(value: c_int) -> Option<Self> {
        use DataType as D;
        Some(match value {
            0 => Self::real(D::Float32),
            1 => Self::real(D::Float64),
            2 => Self::real(D::Float16),
            3 => Self::real(D::Int8),
            4 => Self::complex(D::Float32),
            5 => Self::complex(D::Float64),
            6 => Self::complex(D::Float16),
            8 => Self::real(D::Uint8),
            10 => Self::real(D::Int32),
            12 => Self::real(D::Uint32),
            14 => Self::real(D::Bfloat16),
            15 => Self::complex(D::Bfloat16),
            24 => Self::real(D::Int64),
            26 => Self::real(D::Uint64),
            28 => Self::real(D::Float8e4m3),
            29 => Self::real(D::Float8e5m2),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complex_elements_are_twice_as_large() {
        assert_eq!(Element::from_cuda(0).map(Element::size_bytes), Some(4));
        assert_eq!(Element::from_cuda(5).map(Element::size_bytes), Some(16));
        assert_eq!(Element::from_cuda(28).map(Element::size_bytes), Some(1));
        assert_eq!(Element::from_cuda(33), None);
    }
}
