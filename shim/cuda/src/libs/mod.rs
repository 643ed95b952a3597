//! The C functions of the math libraries, NVRTC and CUPTI.
//!
//! A library call is one operation with its shape, not the kernels inside it: a matrix multiplication becomes one
//! [`RecordKind::Gemm`](prism_wire::message::RecordKind), an attention or convolution one
//! [`RecordKind::Operator`](prism_wire::message::RecordKind) with its FLOP and bytes. A function that is not here is
//! not exported, so that the program meets the real library or a stand-in that names the call and fails.
//!
//! | module | library |
//! |---|---|
//! | [`cublas`] | cuBLAS: handles, matrix products, the vector calls of the frameworks |
//! | [`cublaslt`] | cuBLASLt: attribute stores, one heuristic result, matrix products |
//! | [`cudnn`] | cuDNN: handles, the backend descriptor store, plans that know their work |
//! | [`cufft`] | cuFFT: plans that remember their transform |
//! | [`cusolver`] | cuSOLVER: dense factorisations, recorded; their status says success |
//! | [`cupti`] | CUPTI: activity records in virtual time for a profiler |
//! | [`nvrtc`] | NVRTC: programs that are not compiled, as kernels do not run |
//! | [`handles`], [`work`], [`workspaces`] | opaque handles; records of work; memory given to libraries |

mod cublas;
mod cublaslt;
mod cudnn;
mod cufft;
pub(crate) mod cupti;
mod cusolver;
mod handles;
mod nvrtc;
mod work;
pub(crate) mod workspaces;
