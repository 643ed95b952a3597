//! How many bytes a launch moves, as far as its arguments tell.
//!
//! Most kernels of PyTorch take the number of elements they work on as a parameter, or of a row where each block has one: by
//! their C++ signature these numbers, times the sizes of the types behind their pointers, are the bytes. Signatures are those
//! of PyTorch's sources (`aten/src/ATen/native/cuda`). Where no rule knows a kernel (Triton's, libraries'), the blocks of
//! memory behind its pointers bound what it can touch.

use super::blocks::Blocks;
use super::fatbin::Parameter;
use super::lists;
use super::signature;
use super::{Arguments, Step};
use crate::abi::Dim3;
use std::sync::atomic::{AtomicU32, Ordering};

/// A number among the parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    index: u16,
    offset: u32,
    is_long: bool,
}

/// What the bytes of a launch follow from.
#[derive(Debug)]
pub(crate) enum Size {
    /// Numbers multiplied, with the blocks along x where each has a row, and the bytes per element.
    Product { numbers: Box<[Number]>, is_row_per_block: bool, bytes: u32 },
    /// A reduction, whose numbers lie somewhere in its one parameter.
    Reduction {
        parameter: Step,
        /// Bytes of an input.
        bytes: u32,
        /// Where the numbers were found in an earlier launch, plus one.
        at: AtomicU32,
    },
    /// A concatenation: the numbers of elements of its inputs, at `counts` in parameter 1.
    Concatenation { parameter: Step, counts: u32, most: u32, bytes: u32 },
    /// PyTorch's lists of tensors, cut into chunks.
    Lists { parameter: Step, layout: lists::Layout, bytes: u32 },
    /// The blocks of memory behind its pointers.
    Blocks,
    /// Nothing: its blocks are larger than what it touches of them.
    Unknown,
}

/// Which parameters of a kernel are its numbers of elements and which of its types count.
struct Rule {
    /// Last part of the name.
    kernel: &'static str,
    numbers: &'static [usize],
    is_row_per_block: bool,
    /// Parameters that point to as many elements (a type stands twice where it is read and written).
    tensors: &'static [usize],
    /// Bytes besides for each element.
    besides: u32,
}

const fn rows(kernel: &'static str, length: &'static [usize], tensors: &'static [usize]) -> Rule {
    Rule { kernel, numbers: length, is_row_per_block: true, tensors, besides: 0 }
}

const fn elements(kernel: &'static str, numbers: &'static [usize], tensors: &'static [usize]) -> Rule {
    Rule { kernel, numbers, is_row_per_block: false, tensors, besides: 0 }
}

const fn plain(kernel: &'static str, numbers: &'static [usize], besides: u32) -> Rule {
    Rule { kernel, numbers, is_row_per_block: false, tensors: &[], besides }
}

const RULES: &[Rule] = &[
    rows("vectorized_layer_norm_kernel", &[0], &[2, 7]),
    rows("layer_norm_grad_input_kernel", &[6], &[0, 1, 5]),
    rows("layer_norm_grad_input_kernel_vectorized", &[6], &[0, 1, 5]),
    rows("RowwiseMomentsCUDAKernel", &[0], &[3]),
    rows("LayerNormForwardCUDAKernel", &[0], &[1, 6]),
    elements("GammaBetaBackwardCUDAKernelTemplate", &[0, 1], &[2, 3]),
    rows("cunn_SoftMaxForward", &[2], &[0, 1]),
    rows("cunn_SoftMaxForwardReg", &[2], &[0, 1]),
    rows("cunn_SoftMaxForwardSmem", &[2], &[0, 1]),
    rows("cunn_SoftMaxForwardGmem", &[2], &[0, 1]),
    rows("cunn_SoftMaxBackward", &[3], &[0, 1, 2]),
    rows("cunn_SoftMaxBackwardSmem", &[3], &[0, 1, 2]),
    elements("softmax_warp_forward", &[2, 4], &[0, 1]),
    elements("softmax_warp_backward", &[3, 5], &[0, 1, 2]),
    elements("cunn_SpatialSoftMaxForward", &[2, 3, 4], &[0, 1]),
    elements("cunn_SpatialSoftMaxBackward", &[3, 4, 5], &[0, 1, 2]),
    // The second number is the bytes of a row.
    plain("vectorized_gather_kernel", &[3, 4], 2),
    // Of each row one element, in a sector of its own, and the index.
    plain("nll_loss_forward_reduce_cuda_kernel_2d", &[6], 40),
    plain("nll_loss_backward_reduce_cuda_kernel_2d", &[6], 40),
    elements("embedding_backward_feature_kernel", &[3, 4], &[1, 2, 2]),
    elements("indexSelectLargeIndex", &[5], &[0, 1]),
    elements("fused_dropout_kernel", &[3], &[0, 1, 2]),
    elements("fused_dropout_kernel_vec", &[3], &[0, 1, 2]),
    elements("tensor_kernel_scan_innermost_dim", &[2, 3], &[0, 1]),
    elements("tensor_kernel_scan_outer_dim", &[2, 3, 4], &[0, 1]),
];

/// Kernels whose first parameter is the number of elements, whose type the name says first: how often each is moved, and
/// bytes besides (an index).
const FIRST: &[(&str, u32, u32)] = &[
    ("index_elementwise_kernel", 2, 8),
    ("_scatter_gather_elementwise_kernel", 2, 8),
    ("elementwise_kernel_with_index", 1, 0),
    ("distribution_elementwise_grid_stride_kernel", 1, 0),
];

/// Parts of the names of kernels that touch a part of the blocks they have pointers to, chosen by values.
const PARTS: &[&str] = &["nll_loss", "gather", "scatter", "index", "Index", "embedding", "grad_weight"];

impl Size {
    /// Of the kernel with this demangled signature.
    pub(super) fn new(signature: &str, parameters: &[Parameter]) -> Self {
        Self::of_signature(signature, parameters).unwrap_or(Self::Blocks)
    }

    /// Do all pointers count, read or written?
    pub(super) fn is_blocks(&self) -> bool {
        matches!(self, Self::Blocks)
    }

    fn of_signature(signature: &str, parameters: &[Parameter]) -> Option<Self> {
        let (name, types) = signature::split(signature).filter(|(_, types)| types.len() == parameters.len())?;
        let kernel = signature::base(name).rsplit("::").next()?;
        let number = |index: usize| {
            let parameter = parameters.get(index)?;
            let is_long = parameter.bytes == 8;
            (is_long || parameter.bytes == 4).then_some(Number {
                index: index as u16,
                offset: parameter.offset,
                is_long,
            })
        };
        let whole = |index: usize| {
            let parameter = parameters.get(index)?;
            let words = (parameter.bytes / 8) as u16;
            Some(Step { index: index as u16, offset: parameter.offset, words, access: signature::Access::Reads })
        };
        if let Some((_, times, besides)) = FIRST.iter().find(|(first, ..)| *first == kernel) {
            let bytes = times * first_type_bytes(name)? + besides;
            return Some(Self::Product { numbers: [number(0)?].into(), is_row_per_block: false, bytes });
        }
        if kernel == "reduce_kernel" {
            let (_, op) = name.split_once("ReduceOp<")?;
            return Some(Self::Reduction { parameter: whole(0)?, bytes: type_bytes(op)?, at: AtomicU32::new(0) });
        }
        if kernel.starts_with("CatArrayBatchedCopy") {
            let (_, metadata) = types.get(1)?.split_once("Metadata<")?;
            let most: u32 = signature::argument(metadata, 2)?.parse().ok()?;
            // Addresses, then offsets, sizes along the dimension, and numbers of elements, of four bytes each.
            let is_short = metadata.contains("unsigned int");
            let (counts, bytes) = (most * 16, type_bytes(metadata)?);
            return is_short.then_some(Self::Concatenation { parameter: whole(1)?, counts, most, bytes });
        }
        if kernel == "multi_tensor_apply_kernel" {
            let lists = || {
                let index =
                    types.iter().position(|text| text.starts_with("at::native::") && text.contains("Metadata<"))?;
                let layout = lists::Layout::of(types[index], parameters.get(index)?.bytes)?;
                Some(Self::Lists { parameter: whole(index)?, layout, bytes: lists::bytes_per_element(name)? })
            };
            return Some(lists().unwrap_or(Self::Unknown));
        }
        // Element-wise kernels: name and grid say as much, to the block, and do not depend on who allocated what.
        if kernel.ends_with("elementwise_kernel") {
            return Some(Self::Unknown);
        }
        if PARTS.iter().any(|part| kernel.contains(part)) && !RULES.iter().any(|rule| rule.kernel == kernel) {
            return Some(Self::Unknown);
        }
        let rule = RULES.iter().find(|rule| rule.kernel == kernel)?;
        let numbers = rule.numbers.iter().map(|index| number(*index)).collect::<Option<_>>()?;
        let tensors = rule.tensors.iter().map(|index| pointee_bytes(types.get(*index)?));
        let bytes = tensors.sum::<Option<u32>>()? + rule.besides;
        Some(Self::Product { numbers, is_row_per_block: rule.is_row_per_block, bytes })
    }

    /// Bytes of a launch by its numbers; 0 where they are not known.
    ///
    /// # Safety
    /// The arguments must be those of the kernel.
    #[inline]
    pub(super) unsafe fn bytes(&self, arguments: Arguments, grid: Dim3, block: Dim3) -> u64 {
        match self {
            Self::Blocks | Self::Unknown => 0,
            Self::Lists { parameter, layout, bytes } => {
                // SAFETY: the contract of this function.
                let start = unsafe { arguments.parameter(parameter) }.cast::<u8>();
                // SAFETY: the parameter has the size of this layout.
                let elements = if start.is_null() { 0 } else { unsafe { layout.elements(start, grid.x) } };
                elements.saturating_mul(u64::from(*bytes))
            }
            Self::Product { numbers, is_row_per_block, bytes } => {
                let rows = if *is_row_per_block { u64::from(grid.x) } else { 1 };
                numbers.iter().fold(rows.saturating_mul(u64::from(*bytes)), |product, number| {
                    // SAFETY: the contract of this function.
                    product.saturating_mul(unsafe { arguments.number(number) })
                })
            }
            // SAFETY: the contract of this function.
            Self::Reduction { parameter, bytes, at } => unsafe { reduction(arguments, parameter, at, block) }
                .map_or(0, |elements| elements.saturating_mul(u64::from(*bytes))),
            Self::Concatenation { parameter, counts, most, bytes } => {
                // SAFETY: the contract of this function.
                let start = unsafe { arguments.parameter(parameter) }.cast::<u8>();
                if start.is_null() || (counts + 4 * most) / 8 > u32::from(parameter.words) {
                    return 0;
                }
                let count = |input: u32| {
                    // SAFETY: inside the parameter, as was checked.
                    u64::from(unsafe { start.add((counts + 4 * input) as usize).cast::<u32>().read_unaligned() })
                };
                // Blocks along y have an input each, which is read and written.
                2 * u64::from(*bytes) * (0..grid.y.min(*most)).map(count).sum::<u64>()
            }
        }
    }
}

impl Arguments {
    /// A number among the arguments; 0 if it is negative or not there.
    ///
    /// # Safety
    /// The arguments must be those of a kernel with this parameter.
    #[inline]
    unsafe fn number(self, number: &Number) -> u64 {
        let bytes = if number.is_long { 8 } else { 4 };
        // SAFETY: the contract of this function.
        let address = unsafe { self.address(number.index, number.offset, bytes) };
        if address.is_null() {
            return 0;
        }
        // SAFETY: the parameter is this long; it need not be aligned.
        let value = unsafe {
            if number.is_long {
                address.cast::<i64>().read_unaligned()
            } else {
                i64::from(address.cast::<i32>().read_unaligned())
            }
        };
        u64::try_from(value).unwrap_or(0)
    }
}

/// Ints of PyTorch's `ReduceConfig` (`Reduce.cuh`): after its element size the numbers of inputs for each output and of
/// outputs; width, height and threads of a block further on.
const CONFIG_INTS: usize = 14;
const INPUTS: usize = 1;
const OUTPUTS: usize = 2;
const WIDTH: usize = 11;

/// Elements that a reduction reads and writes. Its configuration stands behind a functor whose size depends on the kernel: it
/// is found by the block's dimensions, which the launch has as well.
///
/// # Safety
/// The arguments must be those of a kernel with this parameter.
unsafe fn reduction(arguments: Arguments, parameter: &Step, found: &AtomicU32, block: Dim3) -> Option<u64> {
    // SAFETY: the contract of this function.
    let start = unsafe { arguments.parameter(parameter) }.cast::<u8>();
    let bytes = usize::from(parameter.words) * 8;
    if start.is_null() || block.z != 1 {
        return None;
    }
    let elements = |at: usize| {
        // SAFETY: `at` leaves room for the configuration in the parameter.
        let int = |index: usize| unsafe { start.add(at + 4 * index).cast::<i32>().read_unaligned() };
        let [width, height, threads] = [int(WIDTH), int(WIDTH + 1), int(WIDTH + 2)].map(i64::from);
        let fits = width == i64::from(block.x) && height == i64::from(block.y) && threads == width * height;
        let (inputs, outputs) = (u64::try_from(int(INPUTS)).ok()?, u64::try_from(int(OUTPUTS)).ok()?);
        (fits && inputs > 0 && outputs > 0 && (1..=32).contains(&int(0)))
            .then(|| inputs.saturating_mul(outputs).saturating_add(outputs))
    };
    let last = bytes.checked_sub(4 * CONFIG_INTS)?;
    let known = found.load(Ordering::Relaxed) as usize;
    if let Some(elements) = known.checked_sub(1).filter(|at| *at <= last).and_then(elements) {
        return Some(elements);
    }
    let (at, elements) = (0..=last).step_by(4).find_map(|at| Some((at, elements(at)?)))?;
    found.store(at as u32 + 1, Ordering::Relaxed);
    Some(elements)
}

/// Most different blocks that are told apart; more are counted each time.
const DISTINCT: usize = 8;
/// PyTorch's allocator leaves a block whole when less than this remains of it: a block of twice the size and more is taken to
/// be used up to a multiple.
const SLACK: usize = 1 << 20;
/// Bytes that a thread of a kernel is taken to move at most through pointers into the middle of blocks, where no other pointer
/// of the launch tells of sizes.
const THREAD_BYTES: u64 = 128;

/// The blocks behind the pointers of a launch.
#[derive(Debug)]
pub(super) struct Touched {
    starts: [usize; DISTINCT],
    count: usize,
    /// Bytes of blocks pointed to at their start, and the largest.
    whole: u64,
    largest: u64,
    /// Bytes behind pointers into blocks, by block; those beyond [`DISTINCT`] are left out.
    parts: [u64; DISTINCT],
}

impl Touched {
    pub(super) const fn new() -> Self {
        Self { starts: [0; DISTINCT], count: 0, whole: 0, largest: 0, parts: [0; DISTINCT] }
    }

    /// The launch has this pointer.
    #[inline]
    pub(super) fn add(&mut self, blocks: &Blocks, address: usize) {
        let Some(block) = blocks.find(address) else { return };
        if self.starts[..self.count.min(DISTINCT)].contains(&block.start) {
            return;
        }
        let bytes = block.end - address;
        let bytes = if bytes >= 2 * SLACK { bytes / SLACK * SLACK } else { bytes } as u64;
        let place = self.count;
        self.count += 1;
        if let Some(start) = self.starts.get_mut(place) {
            *start = block.start;
        }
        if address == block.start {
            self.whole = self.whole.saturating_add(bytes);
            self.largest = self.largest.max(bytes);
        } else if let Some(part) = self.parts.get_mut(place) {
            *part = bytes;
        }
    }

    /// Bytes of the launch at most: of a pointer into a block, whose tensor may be a small part of it, no more than the
    /// largest block that another pointer has the start of.
    pub(super) fn bytes(&self, grid: Dim3, block: Dim3) -> u64 {
        let sides = [grid.x, grid.y, grid.z, block.x, block.y, block.z];
        let most = match self.largest {
            0 => sides.iter().fold(THREAD_BYTES, |product, side| product.saturating_mul(u64::from(*side))),
            largest => largest,
        };
        self.parts.iter().fold(self.whole, |sum, part| sum.saturating_add((*part).min(most)))
    }
}

/// Types with their sizes.
const TYPES: &[(&str, u32)] = &[
    ("c10::BFloat16", 2),
    ("c10::Half", 2),
    ("__nv_bfloat16", 2),
    ("__half", 2),
    ("c10::Float8", 1),
    ("c10::complex<float>", 8),
    ("c10::complex<double>", 16),
    ("c10::complex<c10::Half>", 4),
    ("float", 4),
    ("double", 8),
    ("bool", 1),
    ("char", 1),
    ("signed char", 1),
    ("unsigned char", 1),
    ("short", 2),
    ("unsigned short", 2),
    ("int", 4),
    ("unsigned int", 4),
    ("long", 8),
    ("unsigned long", 8),
];

/// Size of the type that a text starts with.
pub(super) fn type_bytes(text: &str) -> Option<u32> {
    let text = text.trim_start();
    let text = text.strip_prefix("at::native::").unwrap_or(text);
    let text = text.strip_prefix("(anonymous namespace)::").unwrap_or(text);
    if let Some(opaque) = text.strip_prefix("OpaqueType<") {
        return opaque[..opaque.find(|letter: char| !letter.is_ascii_digit())?].parse().ok();
    }
    let ends = |rest: &str| !rest.starts_with(|letter: char| letter.is_alphanumeric() || letter == '_');
    let fits =
        |(name, _): &&(&str, u32)| text.strip_prefix(name).is_some_and(|rest| *name == "c10::Float8" || ends(rest));
    // The longest, because "unsigned int" starts with "unsigned".
    TYPES.iter().filter(fits).max_by_key(|(name, _)| name.len()).map(|(_, bytes)| *bytes)
}

/// Size of what a parameter points to: a pointer, or a view with the element's type as first template argument.
fn pointee_bytes(text: &str) -> Option<u32> {
    match text.split_once("TensorInfo<") {
        Some((_, arguments)) => type_bytes(arguments),
        None => type_bytes(text),
    }
}

/// Size of the first type that a name's template arguments mention.
fn first_type_bytes(name: &str) -> Option<u32> {
    let (_, arguments) = name.split_once('<')?;
    let starts = |(at, _): &(usize, char)| {
        let before = arguments[..*at].chars().next_back();
        !before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_' || letter == ':')
    };
    let word = |(at, letter): &(usize, char)| letter.is_alphabetic().then(|| type_bytes(&arguments[*at..])).flatten();
    arguments.char_indices().filter(starts).find_map(|place| word(&place)).or_else(|| {
        // Only names in a namespace are left.
        let (_, opaque) = arguments.split_once("OpaqueType<")?;
        opaque[..opaque.find(|letter: char| !letter.is_ascii_digit())?].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

    const GRID: Dim3 = Dim3 { x: 100, y: 2, z: 1 };
    const BLOCK: Dim3 = Dim3 { x: 32, y: 4, z: 1 };

    fn bytes(signature: &str, sizes: &[u32], values: &[&[i32]]) -> Option<u64> {
        let parameters: Vec<Parameter> = sizes.iter().map(|bytes| Parameter { offset: 0, bytes: *bytes }).collect();
        let size = Size::of_signature(signature, &parameters)?;
        let addresses: Vec<*const c_void> = values.iter().map(|value| value.as_ptr().cast()).collect();
        // SAFETY: an address for each parameter, which is as long as its size says.
        Some(unsafe { size.bytes(Arguments::Each(addresses.as_ptr()), GRID, BLOCK) })
    }

    #[test]
    fn numbers_of_elements_are_parameters() {
        let norm = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, \
                    float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)";
        let values: [&[i32]; 8] = [&[512], &[0], &[0, 0], &[0, 0], &[0, 0], &[0, 0], &[0, 0], &[0, 0]];
        assert_eq!(bytes(norm, &[4, 4, 8, 8, 8, 8, 8, 8], &values), Some(100 * 512 * 4));
        assert_eq!(bytes(norm, &[4, 4, 8], &values), None, "another number of parameters");
        let gather = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)";
        let values: [&[i32]; 9] = [&[0, 0], &[0, 0], &[0, 0], &[10], &[4096, 0], &[0, 0], &[0, 0], &[0, 0], &[0]];
        assert_eq!(bytes(gather, &[8, 8, 8, 4, 8, 8, 8, 8, 1], &values), Some(2 * 10 * 4096));
        let index = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::\
                     index_kernel_impl<at::native::OpaqueType<2> >(x)::{lambda(int)#1}>(long, f)";
        assert_eq!(bytes(index, &[8, 64], &[&[1000, 0], &[0; 16]]), Some(1000 * (2 * 2 + 8)));
    }

    #[test]
    fn a_reduction_tells_its_numbers_wherever_they_stand() {
        let name = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::MeanOps<float>, \
                    unsigned int, float, 4> >(at::native::ReduceOp<c10::BFloat16, at::native::MeanOps<float>, unsigned int, float, 4>)";
        for before in [1, 4, 7] {
            let mut value = vec![-7; before];
            value.extend([4, 1000, 30, 1, 1, 1, 0, 0, 0, 0, 0, 32, 4, 128, 1, 1]);
            value.resize(64, 0);
            assert_eq!(bytes(name, &[256], &[&value]), Some((1000 * 30 + 30) * 2));
        }
        assert_eq!(bytes(name, &[256], &[&[0; 64]]), Some(0));
    }

    #[test]
    fn inputs_of_a_concatenation_are_counted() {
        let name = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, \
                    unsigned int, 1, 4, 4>(at::native::(anonymous namespace)::OpaqueType<2u>*, at::native::(anonymous \
                    namespace)::CatArrInputTensorMetadata<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 4, \
                    4>, at::native::(anonymous namespace)::TensorSizeStride<unsigned int, 4u>, int, unsigned int)";
        let mut metadata = [0; 40];
        metadata[16..20].copy_from_slice(&[70, 30, 5, 5]);
        // Two blocks along y: the other two are left from somebody else.
        let values: [&[i32]; 5] = [&[0, 0], &metadata, &[0; 8], &[0], &[0]];
        assert_eq!(bytes(name, &[8, 160, 32, 4, 4], &values), Some(2 * 2 * 100));
    }

    #[test]
    fn sizes_of_types() {
        let cases = [
            ("float const*", Some(4)),
            ("unsigned int>", Some(4)),
            ("c10::Float8_e4m3fn*", Some(1)),
            ("float2*", None),
            ("at::native::OpaqueType<16>*", Some(16)),
        ];
        for (text, expected) in cases {
            assert_eq!(type_bytes(text), expected, "{text}");
        }
        assert_eq!(pointee_bytes("at::cuda::detail::TensorInfo<c10::Half const, unsigned int>"), Some(2));
    }

    #[test]
    fn blocks_bound_what_is_not_known() {
        let blocks = super::super::blocks::all().expect("addresses");
        // Addresses of the last card, that no other test uses.
        let base = crate::memory::ADDRESSES.end - (3 << 30);
        blocks.insert(base, 5 << 20 | 512);
        blocks.insert(base + (8 << 20), 1 << 30);
        let touched = |addresses: &[usize]| {
            let mut touched = Touched::new();
            addresses.iter().for_each(|address| touched.add(blocks, *address));
            touched.bytes(GRID, BLOCK)
        };
        assert_eq!(touched(&[base, base + 8]), 5 << 20, "one block, without the allocator's slack");
        assert_eq!(touched(&[base, base + (9 << 20)]), 10 << 20, "a view is no larger than what has a size");
        assert_eq!(touched(&[base + (9 << 20)]), 100 * 2 * 128 * THREAD_BYTES);
        assert_eq!(touched(&[base - 8]), 0);
        blocks.remove(base);
        blocks.remove(base + (8 << 20));
    }
}
