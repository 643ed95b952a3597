//! Numbers of cuDNN's C headers that this library acts on.

use std::ffi::{CStr, c_int};

/// A `cudnnStatus_t`.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const NOT_INITIALIZED: Status = 1001;
pub(super) const BAD_PARAM: Status = 2000;
pub(super) const NULL_POINTER: Status = 2002;
pub(super) const NOT_FINALIZED: Status = 2004;
pub(super) const WRONG_TYPE: Status = 2010;
pub(super) const WRONG_DESCRIPTOR: Status = 2012;
pub(super) const NOT_SUPPORTED: Status = 3000;
pub(super) const UNSUPPORTED_PATTERN: Status = 3001;
pub(super) const INTERNAL_ERROR: Status = 4000;

/// The text of a status.
pub(super) fn status_text(status: Status) -> &'static CStr {
    match status {
        SUCCESS => c"CUDNN_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUDNN_STATUS_NOT_INITIALIZED",
        BAD_PARAM => c"CUDNN_STATUS_BAD_PARAM",
        NULL_POINTER => c"CUDNN_STATUS_BAD_PARAM_NULL_POINTER",
        NOT_FINALIZED => c"CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED",
        WRONG_TYPE => c"CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE",
        WRONG_DESCRIPTOR => c"CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE",
        NOT_SUPPORTED => c"CUDNN_STATUS_NOT_SUPPORTED",
        UNSUPPORTED_PATTERN => c"CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN",
        INTERNAL_ERROR => c"CUDNN_STATUS_INTERNAL_ERROR",
        _ => c"CUDNN_UNKNOWN_STATUS",
    }
}

/// `cudnnBackendDescriptorType_t`.
pub(super) mod kind {
    use std::ffi::c_int;
    pub(in super::super) const POINTWISE: c_int = 0;
    pub(in super::super) const ENGINE: c_int = 2;
    pub(in super::super) const ENGINE_CONFIG: c_int = 3;
    pub(in super::super) const ENGINE_HEURISTIC: c_int = 4;
    pub(in super::super) const EXECUTION_PLAN: c_int = 5;
    pub(in super::super) const CONVOLUTION_FORWARD: c_int = 10;
    pub(in super::super) const CONVOLUTION_BACKWARD_FILTER: c_int = 11;
    pub(in super::super) const CONVOLUTION_BACKWARD_DATA: c_int = 12;
    pub(in super::super) const OPERATION_POINTWISE: c_int = 13;
    pub(in super::super) const OPERATION_GRAPH: c_int = 15;
    pub(in super::super) const VARIANT_PACK: c_int = 16;
    pub(in super::super) const TENSOR: c_int = 17;
    pub(in super::super) const OPERATION_MATMUL: c_int = 19;
    pub(in super::super) const OPERATION_NORM_FORWARD: c_int = 29;
    pub(in super::super) const OPERATION_NORM_BACKWARD: c_int = 30;
    pub(in super::super) const SDPA_FORWARD: c_int = 41;
    pub(in super::super) const MOE_GROUPED_MATMUL: c_int = 42;
    pub(in super::super) const SDPA_BACKWARD: c_int = 43;
    pub(in super::super) const DIAGONAL_BAND_MASK: c_int = 44;
    pub(in super::super) const MOE_GROUPED_MATMUL_BACKWARD: c_int = 48;
    /// The largest number that cuDNN 9 knows.
    pub(in super::super) const LAST: c_int = 50;
}

/// `cudnnBackendAttributeName_t`.
pub(super) mod attribute {
    use std::ffi::c_int;
    pub(in super::super) const POINTWISE_MODE: c_int = 0;
    pub(in super::super) const HEURISTIC_GRAPH: c_int = 201;
    pub(in super::super) const HEURISTIC_RESULTS: c_int = 202;
    pub(in super::super) const CONFIG_ENGINE: c_int = 300;
    pub(in super::super) const CONFIG_INTERMEDIATES: c_int = 301;
    pub(in super::super) const CONFIG_KNOBS: c_int = 302;
    pub(in super::super) const CONFIG_WORKSPACE: c_int = 303;
    pub(in super::super) const CONFIG_SHARED_MEMORY: c_int = 304;
    pub(in super::super) const PLAN_CONFIG: c_int = 401;
    pub(in super::super) const PLAN_WORKSPACE: c_int = 402;
    pub(in super::super) const CONVOLUTION_FORWARD_W: c_int = 703;
    pub(in super::super) const CONVOLUTION_FORWARD_Y: c_int = 705;
    pub(in super::super) const CONVOLUTION_DATA_W: c_int = 709;
    pub(in super::super) const CONVOLUTION_DATA_DY: c_int = 711;
    pub(in super::super) const CONVOLUTION_FILTER_DW: c_int = 715;
    pub(in super::super) const CONVOLUTION_FILTER_DY: c_int = 717;
    pub(in super::super) const OPERATION_POINTWISE_DESC: c_int = 750;
    pub(in super::super) const OPERATION_POINTWISE_X: c_int = 751;
    pub(in super::super) const OPERATION_POINTWISE_B: c_int = 752;
    pub(in super::super) const OPERATION_POINTWISE_Y: c_int = 753;
    pub(in super::super) const GRAPH_OPERATIONS: c_int = 801;
    pub(in super::super) const GRAPH_ENGINE_COUNT: c_int = 802;
    pub(in super::super) const TENSOR_DATA_TYPE: c_int = 901;
    pub(in super::super) const TENSOR_DIMENSIONS: c_int = 902;
    pub(in super::super) const TENSOR_STRIDES: c_int = 903;
    pub(in super::super) const TENSOR_UNIQUE_ID: c_int = 906;
    pub(in super::super) const TENSOR_IS_VIRTUAL: c_int = 907;
    pub(in super::super) const TENSOR_IS_BY_VALUE: c_int = 908;
    pub(in super::super) const PACK_UNIQUE_IDS: c_int = 1000;
    pub(in super::super) const PACK_POINTERS: c_int = 1001;
    pub(in super::super) const ENGINE_GRAPH: c_int = 1300;
    pub(in super::super) const ENGINE_INDEX: c_int = 1301;
    pub(in super::super) const ENGINE_KNOBS: c_int = 1302;
    pub(in super::super) const ENGINE_NUMERICAL_NOTES: c_int = 1303;
    pub(in super::super) const ENGINE_LAYOUTS: c_int = 1304;
    pub(in super::super) const ENGINE_BEHAVIOR_NOTES: c_int = 1305;
    pub(in super::super) const MATMUL_A: c_int = 1520;
    pub(in super::super) const MATMUL_C: c_int = 1522;
    pub(in super::super) const SDPA_FORWARD_Q: c_int = 2800;
    pub(in super::super) const SDPA_FORWARD_K: c_int = 2801;
    pub(in super::super) const SDPA_FORWARD_V: c_int = 2802;
    pub(in super::super) const SDPA_BACKWARD_Q: c_int = 2851;
    pub(in super::super) const SDPA_BACKWARD_K: c_int = 2852;
    pub(in super::super) const SDPA_BACKWARD_V: c_int = 2853;
    pub(in super::super) const MOE_TOKENS: c_int = 2902;
    pub(in super::super) const MOE_WEIGHTS: c_int = 2903;
    pub(in super::super) const MOE_BACKWARD_TOKENS: c_int = 2952;
    pub(in super::super) const MOE_BACKWARD_DWEIGHTS: c_int = 2953;
    pub(in super::super) const BAND_MASK_LENGTH_KV: c_int = 3001;
    pub(in super::super) const BAND_MASK_COMPARISON: c_int = 3007;
}

/// `cudnnPointwiseMode_t`.
pub(super) mod pointwise {
    pub(in super::super) const ADD: i32 = 0;
    pub(in super::super) const SUB: i32 = 9;
    pub(in super::super) const COMPARE_GREATER_EQUAL: i32 = 303;
    pub(in super::super) const GENERATE_INDEX: i32 = 501;
}

/// `cudnnBackendAttributeType_t`.
pub(super) mod element {
    use std::ffi::c_int;
    pub(in super::super) const INT64: c_int = 3;
    pub(in super::super) const NUMERICAL_NOTE: c_int = 11;
    pub(in super::super) const DESCRIPTOR: c_int = 15;
    pub(in super::super) const BEHAVIOR_NOTE: c_int = 19;
    pub(in super::super) const INT32: c_int = 23;

    /// Size of one element of this type in bytes.
    pub(in super::super) fn size_bytes(kind: c_int) -> Option<usize> {
        Some(match kind {
            // Boolean, character.
            2 | 24 => 1,
            // Handle, 64-bit integer, double, pointer, descriptor.
            0 | 3 | 5 | 6 | 15 => 8,
            // Fraction: two 64-bit integers.
            26 => 16,
            // Float, 32-bit integer and the C enumerations.
            1 | 4 | 7..=14 | 16..=23 | 25 | 27..=33 => 4,
            _ => return None,
        })
    }
}
