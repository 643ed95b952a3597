//! Tests of the backend interface through its C functions.

use super::*;
use names::element;

const TENSOR_ELEMENT_BFLOAT16: i64 = 9;

/// A descriptor that a test sets by C calls.
struct Backend(*mut c_void);

impl Backend {
    fn new(kind: c_int) -> Self {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is valid for a write.
        assert_eq!(unsafe { cudnnBackendCreateDescriptor(kind, &raw mut handle) }, SUCCESS);
        Self(handle)
    }

    fn try_set<T>(&self, id: c_int, element: c_int, values: &[T]) -> Status {
        // SAFETY: `values` is readable for its length.
        unsafe { cudnnBackendSetAttribute(self.0, id, element, values.len() as i64, values.as_ptr().cast()) }
    }

    fn integers(self, id: c_int, values: &[i64]) -> Self {
        assert_eq!(self.try_set(id, element::INT64, values), SUCCESS);
        self
    }

    fn enumeration(self, id: c_int, value: i32) -> Self {
        assert_eq!(self.try_set(id, 1, &[value]), SUCCESS);
        self
    }

    fn link(self, id: c_int, others: &[&Backend]) -> Self {
        let handles: Vec<_> = others.iter().map(|other| other.0).collect();
        assert_eq!(self.try_set(id, element::DESCRIPTOR, &handles), SUCCESS);
        self
    }

    fn finish(self) -> Self {
        assert_eq!(cudnnBackendFinalize(self.0), SUCCESS);
        self
    }

    fn work(&self) -> std::sync::Arc<graph::Work> {
        DESCRIPTORS.get(self.0).and_then(|descriptor| descriptor.plan_work()).expect("a plan")
    }

    fn count(&self, id: c_int, element: c_int) -> i64 {
        let mut count = -1;
        // SAFETY: `count` is valid for a write.
        let status = unsafe { cudnnBackendGetAttribute(self.0, id, element, 0, &raw mut count, std::ptr::null_mut()) };
        assert_eq!(status, SUCCESS);
        count
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        assert_eq!(cudnnBackendDestroyDescriptor(self.0), SUCCESS);
    }
}

fn tensor(id: i64, dimensions: &[i64]) -> Backend {
    shaped(id, dimensions, false)
}

fn virtual_tensor(id: i64, dimensions: &[i64]) -> Backend {
    shaped(id, dimensions, true)
}

fn shaped(id: i64, dimensions: &[i64], is_virtual: bool) -> Backend {
    let mut strides = vec![1; dimensions.len()];
    for axis in (1..dimensions.len()).rev() {
        strides[axis - 1] = strides[axis] * dimensions[axis];
    }
    let descriptor = Backend::new(kind::TENSOR)
        .integers(attribute::TENSOR_UNIQUE_ID, &[id])
        .enumeration(attribute::TENSOR_DATA_TYPE, TENSOR_ELEMENT_BFLOAT16 as i32)
        .integers(attribute::TENSOR_DIMENSIONS, dimensions)
        .integers(attribute::TENSOR_STRIDES, &strides);
    assert_eq!(descriptor.try_set(attribute::TENSOR_IS_VIRTUAL, 2, &[is_virtual]), SUCCESS);
    descriptor.finish()
}

fn matmul(a: &Backend, b: &Backend, c: &Backend) -> Backend {
    let operation = Backend::new(kind::OPERATION_MATMUL);
    operation.link(attribute::MATMUL_A, &[a]).link(1521, &[b]).link(attribute::MATMUL_C, &[c]).finish()
}

fn pointwise(mode: i32, x: &Backend, b: Option<&Backend>, y: &Backend) -> Backend {
    let desc = Backend::new(kind::POINTWISE).enumeration(attribute::POINTWISE_MODE, mode).finish();
    let mut operation = Backend::new(kind::OPERATION_POINTWISE)
        .link(attribute::OPERATION_POINTWISE_DESC, &[&desc])
        .link(attribute::OPERATION_POINTWISE_X, &[x])
        .link(attribute::OPERATION_POINTWISE_Y, &[y]);
    if let Some(b) = b {
        operation = operation.link(attribute::OPERATION_POINTWISE_B, &[b]);
    }
    operation.finish()
}

/// Graph, heuristic, configuration and plan, as a client builds them.
fn plan(operations: &[&Backend]) -> Backend {
    let graph = Backend::new(kind::OPERATION_GRAPH).link(attribute::GRAPH_OPERATIONS, operations).finish();
    assert_eq!(graph.count(attribute::GRAPH_ENGINE_COUNT, element::INT64), 1);
    let heuristic = Backend::new(kind::ENGINE_HEURISTIC).link(attribute::HEURISTIC_GRAPH, &[&graph]).finish();
    assert_eq!(heuristic.count(attribute::HEURISTIC_RESULTS, element::DESCRIPTOR), 1);
    let config = Backend::new(kind::ENGINE_CONFIG);
    let (mut count, mut handles) = (0, [config.0]);
    // SAFETY: one handle of a fresh configuration.
    let status = unsafe {
        let results = attribute::HEURISTIC_RESULTS;
        let target = handles.as_mut_ptr().cast();
        cudnnBackendGetAttribute(heuristic.0, results, element::DESCRIPTOR, 1, &raw mut count, target)
    };
    assert_eq!((status, count), (SUCCESS, 1));
    assert_eq!(config.count(attribute::CONFIG_KNOBS, element::DESCRIPTOR), 0);
    let engine = Backend::new(kind::ENGINE);
    let mut handles = [engine.0];
    // SAFETY: one handle of a fresh engine.
    let status = unsafe {
        let target = handles.as_mut_ptr().cast();
        cudnnBackendGetAttribute(config.0, attribute::CONFIG_ENGINE, element::DESCRIPTOR, 1, &raw mut count, target)
    };
    assert_eq!((status, count), (SUCCESS, 1));
    assert_eq!(engine.count(attribute::ENGINE_NUMERICAL_NOTES, element::NUMERICAL_NOTE), 0);
    Backend::new(kind::EXECUTION_PLAN).link(attribute::PLAN_CONFIG, &[&config]).finish()
}

const B: i64 = 2;
const H: i64 = 4;
const S: i64 = 128;
const D: i64 = 64;

#[test]
fn attention_of_single_operations_is_counted() {
    let (q, k) = (tensor(1, &[B, H, S, D]), tensor(2, &[B, H, D, S]));
    let (v, o) = (tensor(3, &[B, H, S, D]), tensor(4, &[B, H, S, D]));
    let (scores, weights) = (virtual_tensor(5, &[B, H, S, S]), virtual_tensor(6, &[B, H, S, S]));
    let (first, exp) = (matmul(&q, &k, &scores), pointwise(12, &scores, None, &weights));
    let second = matmul(&weights, &v, &o);
    let work = plan(&[&first, &exp, &second]).work();
    assert_eq!(work.operator.flop, (2 * 2 * B * H * S * S * D) as u64);
    assert_eq!(work.operator.bytes, (4 * B * H * S * D * 2) as u64);
    assert_eq!(work.operator.input, prism_wire::message::DataType::Bfloat16);
    assert_eq!(work.inputs.iter().copied().collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn a_causal_mask_leaves_the_lower_triangle() {
    let (q, k, scores) = (tensor(1, &[1, 1, 4, D]), tensor(2, &[1, 1, D, 4]), virtual_tensor(5, &[1, 1, 4, 4]));
    let product = matmul(&q, &k, &scores);
    let ids: Vec<_> = (10..14).map(|id| virtual_tensor(id, &[1, 1, 4, 4])).collect();
    let row = pointwise(501, &scores, None, &ids[0]);
    let column = pointwise(501, &scores, None, &ids[2]);
    let compare = pointwise(303, &ids[0], Some(&ids[2]), &ids[3]);
    let full = (2 * 4 * 4 * D) as u64;
    assert_eq!(plan(&[&product, &row, &column]).work().operator.flop, full);
    // 10 of 16 entries lie on or below the diagonal.
    assert_eq!(plan(&[&product, &row, &column, &compare]).work().operator.flop, full * 10 / 16);
    // A comparison with a sequence length is a padding mask.
    let padding = pointwise(303, &ids[0], Some(&q), &ids[3]);
    assert_eq!(plan(&[&product, &row, &padding]).work().operator.flop, full);
}

#[test]
fn a_shifted_causal_mask_ends_at_the_last_column() {
    let (q, k, scores) = (tensor(1, &[1, 1, 2, D]), tensor(2, &[1, 1, D, 4]), virtual_tensor(5, &[1, 1, 2, 4]));
    let product = matmul(&q, &k, &scores);
    let ids: Vec<_> = (10..14).map(|id| virtual_tensor(id, &[1, 1, 2, 4])).collect();
    let row = pointwise(501, &scores, None, &ids[0]);
    let shifted = pointwise(0, &ids[0], Some(&q), &ids[1]);
    let column = pointwise(501, &scores, None, &ids[2]);
    let compare = pointwise(303, &ids[1], Some(&ids[2]), &ids[3]);
    // Rows see 3 and 4 of 4 columns.
    let full = (2 * 2 * 4 * D) as u64;
    assert_eq!(plan(&[&product, &row, &shifted, &column, &compare]).work().operator.flop, full * 7 / 8);
}

#[test]
fn fused_attention_backward_has_five_products() {
    let tensors: Vec<_> = (1..4).map(|id| tensor(id, &[B, H, S, D])).collect();
    let operation = Backend::new(kind::SDPA_BACKWARD)
        .link(attribute::SDPA_BACKWARD_Q, &[&tensors[0]])
        .link(attribute::SDPA_BACKWARD_K, &[&tensors[1]])
        .link(attribute::SDPA_BACKWARD_V, &[&tensors[2]])
        .finish();
    assert_eq!(plan(&[&operation]).work().operator.flop, (5 * 2 * B * H * S * S * D) as u64);
}

#[test]
fn convolutions_are_counted_by_output_and_window() {
    let (y, w) = (tensor(1, &[2, 8, 30, 30]), tensor(2, &[8, 3, 3, 3]));
    let operation = Backend::new(kind::CONVOLUTION_FORWARD)
        .link(attribute::CONVOLUTION_FORWARD_Y, &[&y])
        .link(attribute::CONVOLUTION_FORWARD_W, &[&w])
        .finish();
    assert_eq!(plan(&[&operation]).work().operator.flop, 2 * (2 * 8 * 30 * 30) * 27);
}

#[test]
fn unknown_operations_and_unfinished_graphs_are_refused() {
    let odd = Backend::new(28).finish();
    let graph = Backend::new(kind::OPERATION_GRAPH).link(attribute::GRAPH_OPERATIONS, &[&odd]);
    assert_eq!(cudnnBackendFinalize(graph.0), names::UNSUPPORTED_PATTERN);
    let empty = Backend::new(kind::OPERATION_GRAPH);
    assert_eq!(cudnnBackendFinalize(empty.0), BAD_PARAM);
    let heuristic = Backend::new(kind::ENGINE_HEURISTIC).link(attribute::HEURISTIC_GRAPH, &[&empty]);
    assert_eq!(cudnnBackendFinalize(heuristic.0), NOT_FINALIZED);
}

#[test]
fn final_descriptors_do_not_change() {
    let tensor = tensor(1, &[4]);
    assert_eq!(tensor.try_set(attribute::TENSOR_UNIQUE_ID, element::INT64, &[2_i64]), BAD_PARAM);
}

#[test]
fn wrong_arguments_are_refused() {
    let tensor = Backend::new(kind::TENSOR);
    assert_eq!(tensor.try_set(attribute::TENSOR_UNIQUE_ID, 99, &[2_i64]), names::WRONG_TYPE);
    let null = std::ptr::null_mut();
    // SAFETY: null pointers are allowed and refused.
    unsafe {
        assert_eq!(cudnnBackendCreateDescriptor(kind::TENSOR, std::ptr::null_mut()), NULL_POINTER);
        let mut handle = null;
        assert_eq!(cudnnBackendCreateDescriptor(51, &raw mut handle), NOT_SUPPORTED);
        assert_eq!(cudnnBackendSetAttribute(tensor.0, 901, 1, 1, std::ptr::null()), NULL_POINTER);
        assert_eq!(cudnnBackendSetAttribute(tensor.0, 901, 1, -1, std::ptr::null()), BAD_PARAM);
        assert_eq!(cudnnBackendSetAttribute(null, 901, 1, 0, std::ptr::null()), BAD_PARAM);
        let mut message = [1 as c_char; 8];
        cudnnGetLastErrorString(message.as_mut_ptr(), message.len());
        assert_eq!(std::ffi::CStr::from_ptr(message.as_ptr()), c"cudnnBa");
    }
    assert_eq!(cudnnBackendExecute(null, tensor.0, tensor.0), NOT_INITIALIZED);
}

#[test]
fn a_handle_keeps_its_stream() {
    let (mut handle, mut stream) = (std::ptr::null_mut(), std::ptr::null());
    // SAFETY: both pointers are valid for writes.
    unsafe {
        assert_eq!(cudnnCreate(&raw mut handle), SUCCESS);
        assert_eq!(cudnnSetStream(handle, std::ptr::without_provenance_mut(48)), SUCCESS);
        assert_eq!(cudnnGetStream(handle, &raw mut stream), SUCCESS);
    }
    assert_eq!(stream.addr(), 48);
    assert_eq!(cudnnDestroy(handle), SUCCESS);
    assert_eq!(cudnnSetStream(handle, std::ptr::null_mut()), NOT_INITIALIZED);
}
