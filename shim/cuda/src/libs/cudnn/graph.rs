//! What an operation graph computes: floating-point operations, bytes, a name.

use super::descriptor::Descriptor;
use super::mask::Mask;
use super::names::{BAD_PARAM, Status, UNSUPPORTED_PATTERN, attribute, kind};
use crate::libs::work::{Name, Operator};
use crate::unsupported;
use prism_wire::message::DataType;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::Arc;

static SDPA_FORWARD: Name = Name::new("cudnn.sdpa_forward");
static SDPA_BACKWARD: Name = Name::new("cudnn.sdpa_backward");
static CONVOLUTION_FORWARD: Name = Name::new("cudnn.convolution_forward");
static CONVOLUTION_BACKWARD_FILTER: Name = Name::new("cudnn.convolution_backward_filter");
static CONVOLUTION_BACKWARD_DATA: Name = Name::new("cudnn.convolution_backward_data");
static MATMUL: Name = Name::new("cudnn.matmul");
static GROUPED_MATMUL: Name = Name::new("cudnn.grouped_matmul");
static NORM_FORWARD: Name = Name::new("cudnn.norm_forward");
static NORM_BACKWARD: Name = Name::new("cudnn.norm_backward");
static POINTWISE: Name = Name::new("cudnn.graph");

/// The work of one execution of a graph.
pub(super) struct Work {
    pub(super) name: &'static Name,
    pub(super) operator: Operator,
    /// Unique ids of the tensors that an execution must give an address to.
    pub(super) inputs: BTreeSet<i64>,
}

/// A tensor descriptor, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tensor {
    dimensions: Vec<u64>,
    strides: Vec<u64>,
    data_type: i64,
    is_virtual: bool,
    is_by_value: bool,
}

impl Tensor {
    fn read(descriptor: &Descriptor) -> Self {
        let sizes = |id| descriptor.integers(id).into_iter().map(|value| u64::try_from(value).unwrap_or(0)).collect();
        Self {
            dimensions: sizes(attribute::TENSOR_DIMENSIONS),
            strides: sizes(attribute::TENSOR_STRIDES),
            data_type: descriptor.integer(attribute::TENSOR_DATA_TYPE).unwrap_or(0),
            is_virtual: descriptor.integer(attribute::TENSOR_IS_VIRTUAL).unwrap_or(0) != 0,
            is_by_value: descriptor.integer(attribute::TENSOR_IS_BY_VALUE).unwrap_or(0) != 0,
        }
    }

    /// The dimension `back` places from the last one; 1 where there is none.
    fn last(&self, back: usize) -> u64 {
        self.dimensions.iter().rev().nth(back).copied().unwrap_or(1)
    }

    /// Elements in memory: a dimension with stride 0 repeats the same ones.
    fn elements(&self) -> u64 {
        let stored = self.dimensions.iter().enumerate().filter(|(axis, _)| self.strides.get(*axis) != Some(&0));
        stored.map(|(_, size)| size).product()
    }

    fn bytes(&self) -> u64 {
        // Two sub-byte elements share a byte.
        match self.data_type {
            16..=18 => self.elements().div_ceil(2),
            other => self.elements() * element_bytes(other),
        }
    }
}

/// Bytes of one element of a `cudnnDataType_t`.
pub(super) fn element_bytes(data_type: i64) -> u64 {
    match data_type {
        2 | 9 => 2,
        3 | 6 | 11..=13 | 15 | 22 | 23 => 1,
        1 | 10 | 20 => 8,
        21 => 16,
        _ => 4,
    }
}

/// The engine's type for a `cudnnDataType_t`; float32 for those it has no number for.
pub(super) fn engine_type(data_type: i64) -> DataType {
    match data_type {
        1 => DataType::Float64,
        2 => DataType::Float16,
        3 => DataType::Int8,
        4 => DataType::Int32,
        6 | 11 | 22 => DataType::Uint8,
        9 => DataType::Bfloat16,
        10 => DataType::Int64,
        12 | 15 | 16 | 23 => DataType::Float8e4m3,
        13 => DataType::Float8e5m2,
        19 => DataType::Uint32,
        _ => DataType::Float32,
    }
}

/// FLOP of one operation and its main input.
struct Contraction {
    flop: u64,
    input: Tensor,
}

impl Work {
    /// Analyses the operations of a graph. An operation whose work is not known is refused, with its number.
    pub(super) fn of(operations: &[Arc<Descriptor>]) -> Result<Self, Status> {
        if operations.is_empty() {
            return Err(BAD_PARAM);
        }
        let tensors = tensors(operations);
        let mut flop = 0;
        let mut input = None;
        for operation in operations {
            if let Some(contraction) = contraction(operation)? {
                flop += contraction.flop;
                // A virtual input is a fused intermediate; the type that counts is that of the data in memory.
                if input.is_none()
                    || (input.as_ref().is_some_and(|t: &Tensor| t.is_virtual) && !contraction.input.is_virtual)
                {
                    input = Some(contraction.input);
                }
            }
        }
        let real = || tensors.values().filter(|tensor| !tensor.is_virtual && !tensor.is_by_value);
        let data_type = input.as_ref().or_else(|| real().next()).map_or(0, |tensor| tensor.data_type);
        if let Some((rows, columns)) = score_shape(operations) {
            flop = Mask::of(operations).share(flop, rows, columns);
        }
        Ok(Self {
            name: name(operations),
            operator: Operator { flop, bytes: real().map(Tensor::bytes).sum(), input: engine_type(data_type) },
            inputs: tensors.iter().filter(|(_, t)| !t.is_virtual && !t.is_by_value).map(|(id, _)| *id).collect(),
        })
    }
}

/// Every tensor that the operations and what they refer to name, by unique id.
fn tensors(operations: &[Arc<Descriptor>]) -> BTreeMap<i64, Tensor> {
    let mut found = BTreeMap::new();
    visit(operations, &mut |descriptor| {
        if descriptor.kind == kind::TENSOR {
            let id = descriptor.integer(attribute::TENSOR_UNIQUE_ID).unwrap_or(0);
            found.entry(id).or_insert_with(|| Tensor::read(descriptor));
        }
    });
    found
}

/// Calls `see` for each descriptor reachable from `roots` (subgraphs of fused attention included).
pub(super) fn visit(roots: &[Arc<Descriptor>], see: &mut impl FnMut(&Descriptor)) {
    let mut seen = BTreeSet::new();
    let mut waiting: Vec<_> = roots.iter().rev().cloned().collect();
    while let Some(descriptor) = waiting.pop() {
        if seen.insert(Arc::as_ptr(&descriptor).addr()) {
            see(&descriptor);
            waiting.extend(descriptor.neighbours().into_iter().rev());
        }
    }
}

fn tensor(operation: &Descriptor, id: c_int) -> Result<Tensor, Status> {
    operation.descriptor(id).map(|descriptor| Tensor::read(&descriptor)).ok_or(BAD_PARAM)
}

/// The multiplications of one operation, `None` for one that has none worth counting.
fn contraction(operation: &Descriptor) -> Result<Option<Contraction>, Status> {
    use attribute as a;
    let found = match operation.kind {
        kind::OPERATION_MATMUL => {
            let (input, output) = (tensor(operation, a::MATMUL_A)?, tensor(operation, a::MATMUL_C)?);
            Contraction { flop: 2 * output.dimensions.iter().product::<u64>() * input.last(0), input }
        }
        kind::CONVOLUTION_FORWARD => convolution(operation, a::CONVOLUTION_FORWARD_Y, a::CONVOLUTION_FORWARD_W)?,
        kind::CONVOLUTION_BACKWARD_DATA => convolution(operation, a::CONVOLUTION_DATA_DY, a::CONVOLUTION_DATA_W)?,
        kind::CONVOLUTION_BACKWARD_FILTER => {
            convolution(operation, a::CONVOLUTION_FILTER_DY, a::CONVOLUTION_FILTER_DW)?
        }
        kind::SDPA_FORWARD => attention(operation, [a::SDPA_FORWARD_Q, a::SDPA_FORWARD_K, a::SDPA_FORWARD_V], 1, 1)?,
        // Q·Kᵀ again, dS·K and dSᵀ·Q have the depth of Q; dO·Vᵀ and Pᵀ·dO that of V.
        kind::SDPA_BACKWARD => {
            attention(operation, [a::SDPA_BACKWARD_Q, a::SDPA_BACKWARD_K, a::SDPA_BACKWARD_V], 3, 2)?
        }
        kind::MOE_GROUPED_MATMUL => grouped(operation, a::MOE_TOKENS, a::MOE_WEIGHTS)?,
        kind::MOE_GROUPED_MATMUL_BACKWARD => grouped(operation, a::MOE_BACKWARD_TOKENS, a::MOE_BACKWARD_DWEIGHTS)?,
        // Elementwise work, reductions, norms, resampling, layout and random numbers: bound by memory.
        kind::OPERATION_POINTWISE
        | 14
        | 20
        | 22
        | 23
        | 25..=27
        | 29..=31
        | 33
        | 35..=37
        | 39
        | 40
        | 44..=47
        | 49
        | 50 => {
            return Ok(None);
        }
        other => {
            unsupported::call(&format!("cudnnBackendFinalize(graph with an operation of type {other})"));
            return Err(UNSUPPORTED_PATTERN);
        }
    };
    Ok(Some(found))
}

/// Every output (or output gradient) element takes one pass over a filter: channels per group × window.
fn convolution(operation: &Descriptor, output: c_int, filter: c_int) -> Result<Contraction, Status> {
    let (input, filter) = (tensor(operation, output)?, tensor(operation, filter)?);
    let window: u64 = filter.dimensions.iter().skip(1).product();
    Ok(Contraction { flop: 2 * input.dimensions.iter().product::<u64>() * window, input })
}

/// `over_q` products of Q's depth and `over_v` of V's depth for every entry of the score matrix.
fn attention(operation: &Descriptor, [q, k, v]: [c_int; 3], over_q: u64, over_v: u64) -> Result<Contraction, Status> {
    let (q, k, v) = (tensor(operation, q)?, tensor(operation, k)?, tensor(operation, v)?);
    let batch_and_heads: u64 = q.dimensions.iter().rev().skip(2).product();
    let scores = batch_and_heads * q.last(1) * k.last(1);
    // K comes as (.., sequence, depth) in some clients and as (.., depth, sequence) in others; Q's depth is not in doubt.
    let scores = if k.last(0) == q.last(0) { scores } else { batch_and_heads * q.last(1) * k.last(0) };
    Ok(Contraction { flop: 2 * scores * (over_q * q.last(0) + over_v * v.last(0)), input: q })
}

/// Every token meets one expert's matrix.
fn grouped(operation: &Descriptor, tokens: c_int, weights: c_int) -> Result<Contraction, Status> {
    let (tokens, weights) = (tensor(operation, tokens)?, tensor(operation, weights)?);
    let rows: u64 = tokens.dimensions.iter().rev().skip(1).product();
    Ok(Contraction { flop: 2 * rows * weights.last(0) * weights.last(1), input: tokens })
}

/// Rows and columns of the score matrix of an attention graph.
fn score_shape(operations: &[Arc<Descriptor>]) -> Option<(u64, u64)> {
    let shape = |q: &Tensor, k: &Tensor| {
        let columns = if k.last(0) == q.last(0) { k.last(1) } else { k.last(0) };
        (q.last(1), columns)
    };
    for operation in operations {
        let ids = match operation.kind {
            kind::SDPA_FORWARD => (attribute::SDPA_FORWARD_Q, attribute::SDPA_FORWARD_K),
            kind::SDPA_BACKWARD => (attribute::SDPA_BACKWARD_Q, attribute::SDPA_BACKWARD_K),
            // The first product of a graph of single operations gives the scores.
            kind::OPERATION_MATMUL => {
                let scores = tensor(operation, attribute::MATMUL_C).ok()?;
                return Some((scores.last(1), scores.last(0)));
            }
            _ => continue,
        };
        return Some(shape(&tensor(operation, ids.0).ok()?, &tensor(operation, ids.1).ok()?));
    }
    None
}

fn name(operations: &[Arc<Descriptor>]) -> &'static Name {
    let count = |kind| operations.iter().filter(|operation| operation.kind == kind).count();
    let has = |kind| count(kind) > 0;
    match count(kind::OPERATION_MATMUL) {
        _ if has(kind::SDPA_FORWARD) => &SDPA_FORWARD,
        _ if has(kind::SDPA_BACKWARD) => &SDPA_BACKWARD,
        _ if has(kind::CONVOLUTION_FORWARD) => &CONVOLUTION_FORWARD,
        _ if has(kind::CONVOLUTION_BACKWARD_FILTER) => &CONVOLUTION_BACKWARD_FILTER,
        _ if has(kind::CONVOLUTION_BACKWARD_DATA) => &CONVOLUTION_BACKWARD_DATA,
        _ if has(kind::MOE_GROUPED_MATMUL) || has(kind::MOE_GROUPED_MATMUL_BACKWARD) => &GROUPED_MATMUL,
        // Attention as single operations: two products forward, five backward.
        1 => &MATMUL,
        2 => &SDPA_FORWARD,
        3.. => &SDPA_BACKWARD,
        _ if has(kind::OPERATION_NORM_FORWARD) => &NORM_FORWARD,
        _ if has(kind::OPERATION_NORM_BACKWARD) => &NORM_BACKWARD,
        _ => &POINTWISE,
    }
}
