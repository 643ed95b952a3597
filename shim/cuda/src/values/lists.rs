//! Lists of tensors that PyTorch's multi-tensor kernels take by value (`MultiTensorApply.cuh`).

use super::signature;
use super::sizes::type_bytes;

/// Elements of a chunk: each block of threads has one.
const CHUNK: u64 = 65_536;

/// Capacities of a build: tensors by number of lists, those where each tensor has a number besides, blocks of threads, and bytes
/// of a tensor's index.
struct Build {
    tensors: [usize; 5],
    with_numbers: [usize; 5],
    blocks: usize,
    index_bytes: usize,
}

/// With CUDA 13 and before.
const BUILDS: [Build; 2] = [
    Build { tensors: [770, 448, 336, 252, 210], with_numbers: [672, 448, 336, 252, 210], blocks: 2240, index_bytes: 2 },
    Build { tensors: [110, 64, 48, 36, 30], with_numbers: [96, 64, 48, 36, 30], blocks: 320, index_bytes: 1 },
];

/// Where a parameter of lists keeps its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Numbers of elements of the tensors.
    elements: usize,
    /// The tensor of each block of threads, and bytes of its index.
    tensor_of_block: usize,
    index_bytes: usize,
    /// Its chunk.
    chunk_of_block: usize,
    tensors: usize,
    blocks: usize,
}

impl Layout {
    /// Of a parameter with this C++ type and size.
    pub(super) fn of(text: &str, bytes: u32) -> Option<Self> {
        let (kind, arguments) = text.split_once("Metadata<")?;
        let has_numbers = kind.ends_with("ScalarList");
        let depth: usize = signature::argument(arguments, usize::from(has_numbers))?.parse().ok()?;
        let besides = match () {
            () if has_numbers => type_bytes(arguments)? as usize,
            () if kind.ends_with("FusedOptimizerTensorList") => 8,
            () => 0,
        };
        BUILDS.iter().find_map(|build| {
            let tensors =
                *(if has_numbers { &build.with_numbers } else { &build.tensors }).get(depth.checked_sub(1)?)?;
            let elements = depth * tensors * 8;
            let tensor_of_block = elements + tensors * (8 + besides);
            let chunk_of_block = (tensor_of_block + build.blocks * build.index_bytes).next_multiple_of(4);
            let end = chunk_of_block + build.blocks * 4 + if has_numbers { 0 } else { 4 };
            (end.next_multiple_of(8) == bytes as usize).then_some(Self {
                elements,
                tensor_of_block,
                index_bytes: build.index_bytes,
                chunk_of_block,
                tensors,
                blocks: build.blocks,
            })
        })
    }

    /// Elements of each list that a launch of so many blocks works on.
    ///
    /// # Safety
    /// `start` must point to a parameter of this layout.
    pub(super) unsafe fn elements(&self, start: *const u8, blocks: u32) -> u64 {
        let one = |block: usize| {
            let index_at = self.tensor_of_block + block * self.index_bytes;
            // SAFETY: `block` is one of the layout's; the places are inside the parameter and need not be aligned.
            let (tensor, chunk) = unsafe {
                let tensor = match self.index_bytes {
                    1 => usize::from(start.add(index_at).read()),
                    _ => usize::from(start.add(index_at).cast::<u16>().read_unaligned()),
                };
                (tensor, start.add(self.chunk_of_block + 4 * block).cast::<u32>().read_unaligned())
            };
            if tensor >= self.tensors {
                return 0;
            }
            // SAFETY: `tensor` is one of the layout's.
            let elements = unsafe { start.add(self.elements + 8 * tensor).cast::<u64>().read_unaligned() };
            elements.saturating_sub(u64::from(chunk) * CHUNK).min(CHUNK)
        };
        (0..self.blocks.min(blocks as usize)).map(one).sum()
    }
}

/// Bytes that the kernel with this name (template arguments included) moves for each element of a list: all lists are read,
/// and results written.
pub(super) fn bytes_per_element(name: &str) -> Option<u32> {
    let (_, lists) = name.split_once("Metadata<")?;
    let has_numbers = name.contains("ScalarListMetadata<");
    let depth: u32 = signature::argument(lists, usize::from(has_numbers))?.parse().ok()?;
    let (_, functor) = name.split_once("Functor<")?;
    let numbers: Vec<u32> = (1..4).map_while(|index| signature::argument(functor, index)?.parse().ok()).collect();
    let written = match numbers[..] {
        _ if name.contains("LpNorm") || name.contains("LpMax") => 0,
        // Parameter and moments, the gradient is read only.
        _ if name.contains("FusedAdam") || name.contains("FusedSgd") || name.contains("FusedAdagrad") => depth - 1,
        _ => 1,
    };
    // Of as many lists as the functor names, `r_args_depth` are read; the result is a list of its own or one of them.
    let read = match numbers[..] {
        [lists, read, _] if lists == depth => read,
        _ => depth,
    };
    Some((read + written) * type_bytes(functor)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_told_by_their_size() {
        let list = "at::native::(anonymous namespace)::TensorListMetadata<4>";
        let bytes = 4 * 36 * 8 + 36 * 8 + 320 + 320 * 4 + 4;
        let layout = Layout::of(list, (bytes as u32).next_multiple_of(8)).expect("before CUDA 13");
        assert_eq!((layout.elements, layout.blocks, layout.index_bytes), (4 * 36 * 8, 320, 1));
        assert_eq!(Layout::of(list, 4096), None);
        let scalars = "at::native::(anonymous namespace)::TensorListScalarListMetadata<float, 2>";
        let bytes = 2 * 448 * 8 + 448 * 12 + 2240 * 2 + 2240 * 4;
        assert_eq!(Layout::of(scalars, bytes).map(|layout| layout.index_bytes), Some(2));
        assert_eq!(Layout::of("at::native::(anonymous namespace)::TensorListMetadata<9>", 4096), None);
    }

    #[test]
    fn chunks_of_tensors_are_counted() {
        let list = "at::native::(anonymous namespace)::TensorListMetadata<1>";
        let bytes: usize = 770 * 16 + 2240 * 6 + 4;
        let layout = Layout::of(list, bytes.next_multiple_of(8) as u32).expect("CUDA 13");
        let mut data = vec![0_u8; bytes.next_multiple_of(8)];
        data[770 * 8..770 * 8 + 8].copy_from_slice(&100_000_u64.to_le_bytes());
        data[770 * 8 + 8..770 * 8 + 16].copy_from_slice(&7_u64.to_le_bytes());
        // Blocks: both chunks of the first tensor, and the second.
        for (block, (tensor, chunk)) in [(0_u16, 0_u32), (0, 1), (1, 0)].into_iter().enumerate() {
            data[layout.tensor_of_block + 2 * block..][..2].copy_from_slice(&tensor.to_le_bytes());
            data[layout.chunk_of_block + 4 * block..][..4].copy_from_slice(&chunk.to_le_bytes());
        }
        // SAFETY: the data have the layout's size.
        let elements = |blocks| unsafe { layout.elements(data.as_ptr(), blocks) };
        assert_eq!((elements(1), elements(2), elements(3)), (65_536, 100_000, 100_007));
    }

    #[test]
    fn results_are_written() {
        let adam = "at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::\
                    FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, float, 4, (ADAM_MODE)0, false>, x>";
        assert_eq!(bytes_per_element(adam), Some((4 + 3) * 4));
        let add = "multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<3>, \
                   at::native::(anonymous namespace)::PointwiseOpScalarFunctor<float, 3, 3, 0>, x>";
        assert_eq!(bytes_per_element(add), Some((3 + 1) * 4));
        let root = "multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, \
                    at::native::(anonymous namespace)::UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, at::native::Sqrt<float> >";
        assert_eq!(bytes_per_element(root), Some((1 + 1) * 2));
        let divide = "multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListScalarListMetadata<float, 1>, \
                      at::native::(anonymous namespace)::BinaryOpScalarListFunctor<float, 1, 1, 0>, std::divides<float> >";
        assert_eq!(bytes_per_element(divide), Some(8));
    }
}
