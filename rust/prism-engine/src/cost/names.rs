//! Names of kernels: as people read them, and what they tell about the work of a launch.
//!
//! A kernel of a framework is a template: its name says how many tensors it reads and writes, of which type, and how many
//! elements a thread takes, so that name and grid give the bytes it moves. The rules are those of PyTorch's sources
//! (`aten/src/ATen/native/cuda`: `CUDALoops.cuh`, `Loops.cuh`, `MultiTensorApply.cuh`) and of FlashAttention
//! (`csrc/flash_attn/src/flash_fwd_launch_template.h`). What no rule knows is left to the launch geometry. Names come
//! demangled, as profilers show them.

use crate::graph::op::DataType;
use serde::Serialize;
/// What a kernel is for, in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Family {
    Gemm,
    Attention,
    Convolution,
    Normalization,
    Softmax,
    Optimizer,
    Elementwise,
    Reduction,
    Embedding,
    Copy,
    Fill,
    Other,
}

/// Substrings of plain names, the first that fits wins.
const FAMILIES: [(Family, &[&str]); 9] = [
    (Family::Attention, &["flash_fwd", "flash_bwd", "fmha", "sdpa", "attention"]),
    (Family::Optimizer, &["multi_tensor_apply", "Adam", "adam_", "lamb", "sgd_"]),
    (
        Family::Normalization,
        &["layer_norm", "LayerNorm", "rms_norm", "RMSNorm", "batch_norm", "bn_", "GammaBeta", "norm_"],
    ),
    (Family::Softmax, &["softmax", "SoftMax", "nll_loss", "cross_entropy"]),
    (Family::Gemm, &["gemm", "gemv", "Gemm", "bmm_", "cutlass", "nvjet", "cublas", "splitKreduce", "matmul"]),
    (Family::Convolution, &["conv", "winograd", "implicit_"]),
    (Family::Embedding, &["embedding", "indexSelect", "index_", "gather", "scatter"]),
    (Family::Copy, &["copy", "CatArray", "transpose", "permute"]),
    (Family::Reduction, &["reduce", "Reduce", "scan", "sort", "Sort", "Radix", "topk", "TopK"]),
];

/// What a name says about the work of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LaunchModel {
    /// Every block moves so many bytes, no more than once each.
    Streaming {
        /// Read and written.
        bytes_per_block: u64,
    },
    /// FlashAttention: grid x counts blocks of query (backward: key) rows, y and z sequences and heads.
    Attention {
        /// Rows of one block along x.
        rows_per_block: u64,
        /// Depth of a head.
        head_dim: u64,
        /// FLOP relative to the two products of the forward pass.
        passes: f64,
        /// Type of the matrices.
        input: DataType,
    },
}

/// How a kernel that is bound by memory goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// In order.
    Stream,
    /// In order on one side only: copies between layouts.
    Strided,
    /// Many loads of each thread, in two steps.
    Reduction,
    /// A row is read, reduced and written: norms and softmax.
    Rows,
    /// An address is loaded before what it points to.
    Gather,
}

/// What is known of a kernel by its name alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NameFacts {
    /// What it is for.
    pub family: Family,
    /// How it waits for memory.
    pub pattern: Pattern,
    /// The work of a launch, if a rule knows it.
    pub model: Option<LaunchModel>,
}

impl NameFacts {
    /// The facts of a demangled name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let model = elementwise(name).or_else(|| multi_tensor(name)).or_else(|| flash_attention(name));
        let family = family(name);
        Self { family, pattern: pattern(name, family), model }
    }
}

fn pattern(name: &str, family: Family) -> Pattern {
    // Contiguous copies are no kernels, or vectorized ones that convert.
    let is_strided = name.contains("::elementwise_kernel<") && name.contains("copy_kernel");
    match family {
        Family::Reduction => Pattern::Reduction,
        Family::Normalization | Family::Softmax => Pattern::Rows,
        Family::Embedding => Pattern::Gather,
        Family::Copy if is_strided => Pattern::Strided,
        _ => Pattern::Stream,
    }
}

fn family(name: &str) -> Family {
    if name.contains("elementwise_kernel") {
        return if name.contains("FillFunctor") {
            Family::Fill
        } else if name.contains("copy_kernel") {
            Family::Copy
        } else {
            Family::Elementwise
        };
    }
    if name.contains("reduce_kernel") {
        return Family::Reduction;
    }
    // Generated kernels say their shape first, then the operators fused into them.
    if name.starts_with("triton_poi_") {
        return Family::Elementwise;
    }
    if name.starts_with("triton_tem_") {
        return if name.contains("attention") { Family::Attention } else { Family::Gemm };
    }
    if name.starts_with("triton_red_") || name.starts_with("triton_per_") {
        return Family::Reduction;
    }
    if name.contains("dropout_kernel") || name.contains("rotary_embedding") || name.contains("distribution_elementwise")
    {
        return Family::Elementwise;
    }
    let found = FAMILIES.iter().find(|(_, parts)| parts.iter().any(|part| name.contains(part)));
    found.map_or(Family::Other, |(family, _)| *family)
}

/// Threads of a block of PyTorch's element-wise kernels (`num_threads()`).
const ELEMENTWISE_THREADS: u64 = 128;

fn elementwise(name: &str) -> Option<LaunchModel> {
    let is_vectorized = name.contains("vectorized_elementwise_kernel<");
    let is_unrolled = name.contains("unrolled_elementwise_kernel<");
    let per_thread = if is_vectorized || is_unrolled {
        // `std::array` came with the larger amount of work per thread (PyTorch 2.6); unrolled kernels name theirs.
        match (name.contains("std::array<char*"), is_unrolled) {
            (true, false) => 8,
            (_, true) => number_after_array(name).unwrap_or(4),
            (false, false) => 4,
        }
    } else {
        // elementwise_kernel<threads, elements per thread, function>
        let arguments = name.split_once("elementwise_kernel<")?.1;
        arguments.split(',').nth(1)?.trim().parse().ok()?
    };
    let operands = operands(name)?;
    let size = element_bytes(name)?;
    Some(LaunchModel::Streaming { bytes_per_block: ELEMENTWISE_THREADS * per_thread * operands * size })
}

/// Tensors of an element-wise kernel: from the array of their pointers, or from the function's signature.
fn operands(name: &str) -> Option<u64> {
    for array in ["Array<char*, ", "array<char*, "] {
        if let Some((_, rest)) = name.split_once(array) {
            return leading_number(rest).filter(|count| (1..=8).contains(count));
        }
    }
    // A strided kernel hides its pointers in a closure over the functor: one result, and the functor's arity in inputs.
    let inputs = match name {
        _ if name.contains("BinaryFunctor") || name.contains("CUDAFunctor_add") => 2,
        _ if name.contains("FillFunctor") => 0,
        _ => 1,
    };
    Some(inputs + 1)
}

fn leading_number(text: &str) -> Option<u64> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// The first template argument after the array of pointers, if it is a number.
fn number_after_array(name: &str) -> Option<u64> {
    let rest = name.split_once("rray<char*, ")?.1;
    let after = rest.split_once('>')?.1.trim_start_matches(['>', ' ', ',']);
    leading_number(after).filter(|count| (1..=32).contains(count))
}

/// Type names in a kernel's name with their sizes. The wider compute type of a functor comes after the data's.
const TYPES: [(&str, u64); 10] = [
    ("c10::BFloat16", 2),
    ("c10::Half", 2),
    ("Float8_e", 1),
    ("complex<float>", 8),
    ("complex<double>", 16),
    ("double", 8),
    ("float", 4),
    ("bool", 1),
    ("unsigned char", 1),
    ("long", 8),
];

/// Size of the type that the name mentions first; four bytes for `int` and where it mentions none.
fn element_bytes(name: &str) -> Option<u64> {
    let arguments = name.split_once('<')?.1;
    let first = TYPES.iter().filter_map(|(text, size)| Some((arguments.find(text)?, *size))).min();
    Some(first.map_or(4, |(_, size)| size))
}

/// Elements of one block of PyTorch's and Apex's multi-tensor kernels (`kChunkSize`).
const CHUNK: u64 = 65_536;

/// Lists of tensors, chunk by chunk: all lists are read, and results written.
fn multi_tensor(name: &str) -> Option<LaunchModel> {
    let (_, rest) = name.split_once("multi_tensor_apply_kernel<")?;
    let (_, lists) = rest.split_once("Metadata<")?;
    // A list of numbers names their type first.
    let lists = if rest.contains("ScalarListMetadata<") { lists.split_once(", ")?.1 } else { lists };
    let depth = leading_number(lists).filter(|depth| (1..=6).contains(depth))?;
    let is_norm = rest.contains("LpNorm") || rest.contains("L2Norm") || rest.contains("l2norm");
    let written = match () {
        () if is_norm => 0,
        // Parameter and both moments (the gradient is read only).
        () if rest.contains("Adam") || rest.contains("adam") => depth - 1,
        () => 1,
    };
    Some(LaunchModel::Streaming { bytes_per_block: CHUNK * (depth + written) * element_bytes(rest)? })
}

fn flash_attention(name: &str) -> Option<LaunchModel> {
    let is_forward = name.contains("flash_fwd_kernel<");
    let is_backward = name.contains("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<");
    if !is_forward && !is_backward {
        return None;
    }
    let (_, traits) = name.split_once("_kernel_traits<")?;
    let mut numbers = traits.split(',').map(|part| part.trim().parse::<u64>());
    let mut next = || numbers.next()?.ok().filter(|number| (8..=1024).contains(number));
    let (head_dim, rows, columns) = (next()?, next()?, next()?);
    // After the traits: dropout, causal.
    let after = &traits[matching_bracket(traits)?..];
    let is_causal = after.trim_start_matches(['>', ' ']).split(',').nth(2).is_some_and(|flag| flag.trim() == "true");
    let half = if is_causal { 0.5 } else { 1.0 };
    Some(LaunchModel::Attention {
        rows_per_block: if is_forward { rows } else { columns },
        head_dim,
        passes: if is_forward { half } else { 2.5 * half },
        input: if traits.contains("bfloat16") { DataType::Bfloat16 } else { DataType::Float16 },
    })
}

/// Where the bracket that is open at the start of `text` closes.
fn matching_bracket(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, character) in text.char_indices() {
        match character {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_block(name: &str) -> u64 {
        match NameFacts::of(name).model {
            Some(LaunchModel::Streaming { bytes_per_block }) => bytes_per_block,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn elementwise_kernels_tell_their_bytes() {
        let add = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, \
                   std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)";
        assert_eq!(per_block(add), 128 * 8 * 3 * 2);
        let old = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, \
                   at::detail::Array<char*, 1> >(int, at::native::FillFunctor<float>, at::detail::Array<char*, 1>)";
        assert_eq!(per_block(old), 128 * 4 * 4);
        assert_eq!(NameFacts::of(old).family, Family::Fill);
        let strided = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<x(at::TensorIterator&)::\
                       {lambda(float)#1}>(int)";
        assert_eq!(per_block(strided), 128 * 2 * 2 * 4);
    }

    #[test]
    fn multi_tensor_kernels_read_all_lists_and_write_results() {
        let divide = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::\
                      TensorListScalarListMetadata<float, 1>, at::native::BinaryOpScalarListFunctor<float, 1, 1, 0>, x>";
        assert_eq!(per_block(divide), 65_536 * 2 * 4);
        let adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::\
                    FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4, (ADAM_MODE)0, false>, x>";
        assert_eq!(per_block(adam), 65_536 * 7 * 4);
        assert_eq!(NameFacts::of(adam).family, Family::Optimizer);
    }

    #[test]
    fn flash_attention_tells_its_blocks() {
        let name = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 96, 4, false, false, \
                    cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 96, 4, cutlass::bfloat16_t> >, false, \
                    true, false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)";
        let expected =
            LaunchModel::Attention { rows_per_block: 128, head_dim: 64, passes: 0.5, input: DataType::Bfloat16 };
        assert_eq!(NameFacts::of(name).model, Some(expected));
    }

    #[test]
    fn names_tell_how_a_kernel_waits() {
        let cases = [
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(x)>",
                Pattern::Stream,
            ),
            ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(x)>", Pattern::Strided),
            ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, x> >", Pattern::Reduction),
            ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, x>", Pattern::Rows),
            ("void at::native::vectorized_gather_kernel<16, long>(char*)", Pattern::Gather),
            ("triton_poi_fused_add_0", Pattern::Stream),
            ("triton_red_fused_native_layer_norm_1", Pattern::Reduction),
        ];
        for (name, expected) in cases {
            assert_eq!(NameFacts::of(name).pattern, expected, "{name}");
        }
    }

    #[test]
    fn any_text_is_a_name() {
        for name in
            ["", "<", "elementwise_kernel<", "multi_tensor_apply_kernel<Metadata<9", "flash_fwd_kernel<_kernel_traits<"]
        {
            assert_eq!(NameFacts::of(name).model, None, "{name}");
        }
    }
}
