//! Tensor and activation descriptors of the older interface, and batch normalisation, which frameworks still call by it.

use super::graph::{element_bytes, engine_type};
use super::names::{BAD_PARAM, NULL_POINTER, Status};
use super::{answer, stream_of};
use crate::libs::handles::Table;
use crate::libs::work::{self, Name, Operator};
use crate::values;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tensor {
    data_type: c_int,
    dimensions: Vec<c_int>,
    strides: Vec<c_int>,
}

impl Tensor {
    fn elements(&self) -> u64 {
        self.dimensions.iter().map(|size| *size as u64).product()
    }
}

static TENSORS: Table<Mutex<Tensor>> = Table::new();
/// Activations: what they are set to changes nothing that is recorded.
static ACTIVATIONS: Table<Activation> = Table::new();

struct Activation;

fn tensor(handle: *const c_void) -> Result<Tensor, Status> {
    let entry = TENSORS.get(handle).ok_or(BAD_PARAM)?;
    Ok(entry.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// # Safety
/// `target` must be null or valid for a write.
unsafe fn write<T>(target: *mut T, value: T) -> Result<(), Status> {
    if target.is_null() {
        return Err(NULL_POINTER);
    }
    // SAFETY: not null, valid by the contract.
    unsafe { target.write(value) };
    Ok(())
}

/// Creates a tensor descriptor.
///
/// # Safety
/// `descriptor` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreateTensorDescriptor(descriptor: *mut *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    answer("cudnnCreateTensorDescriptor", || unsafe { write(descriptor, TENSORS.insert(Mutex::default())) })
}

/// Destroys a tensor descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroyTensorDescriptor(descriptor: *mut c_void) -> Status {
    answer("cudnnDestroyTensorDescriptor", || TENSORS.remove(descriptor).map(drop).ok_or(BAD_PARAM))
}

/// Sets type, dimensions and strides of a tensor descriptor.
///
/// # Safety
/// `dimensions` and `strides` must be null or readable for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetTensorNdDescriptor(
    descriptor: *mut c_void,
    data_type: c_int,
    count: c_int,
    dimensions: *const c_int,
    strides: *const c_int,
) -> Status {
    answer("cudnnSetTensorNdDescriptor", || {
        let count = usize::try_from(count).ok().filter(|count| *count <= MAX_DIMENSIONS).ok_or(BAD_PARAM)?;
        if dimensions.is_null() || strides.is_null() {
            return Err(NULL_POINTER);
        }
        // SAFETY: not null, `count` numbers each by the contract.
        let (dimensions, strides) = unsafe {
            let read = |numbers| std::slice::from_raw_parts(numbers, count).to_vec();
            (read(dimensions), read(strides))
        };
        if dimensions.iter().any(|size| *size <= 0) {
            return Err(BAD_PARAM);
        }
        let entry = TENSORS.get(descriptor).ok_or(BAD_PARAM)?;
        *entry.lock().unwrap_or_else(PoisonError::into_inner) = Tensor { data_type, dimensions, strides };
        Ok(())
    })
}

/// Reads a tensor descriptor.
///
/// # Safety
/// Pointers must be null or valid for a write, `dimensions` and `strides` for `requested` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetTensorNdDescriptor(
    descriptor: *const c_void,
    requested: c_int,
    data_type: *mut c_int,
    count: *mut c_int,
    dimensions: *mut c_int,
    strides: *mut c_int,
) -> Status {
    answer("cudnnGetTensorNdDescriptor", || {
        let tensor = tensor(descriptor)?;
        let copied = tensor.dimensions.len().min(usize::try_from(requested).map_err(|_| BAD_PARAM)?);
        // SAFETY: the caller's contract; `copied` is at most `requested`.
        unsafe {
            write(data_type, tensor.data_type)?;
            write(count, tensor.dimensions.len() as c_int)?;
            for (target, values) in [(dimensions, &tensor.dimensions), (strides, &tensor.strides)] {
                if target.is_null() {
                    return Err(NULL_POINTER);
                }
                std::ptr::copy_nonoverlapping(values.as_ptr(), target, copied);
            }
        }
        Ok(())
    })
}

/// Creates an activation descriptor.
///
/// # Safety
/// `descriptor` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreateActivationDescriptor(descriptor: *mut *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    answer("cudnnCreateActivationDescriptor", || unsafe { write(descriptor, ACTIVATIONS.insert(Activation)) })
}

/// Sets an activation descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnSetActivationDescriptor(
    descriptor: *mut c_void,
    _mode: c_int,
    _nan: c_int,
    _coefficient: f64,
) -> Status {
    answer("cudnnSetActivationDescriptor", || ACTIVATIONS.get(descriptor).map(drop).ok_or(BAD_PARAM))
}

/// Destroys an activation descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroyActivationDescriptor(descriptor: *mut c_void) -> Status {
    answer("cudnnDestroyActivationDescriptor", || ACTIVATIONS.remove(descriptor).map(drop).ok_or(BAD_PARAM))
}

/// Records a normalisation that goes over its input `passes` times.
fn normalise(
    handle: *const c_void,
    input: *const c_void,
    name: &Name,
    passes: u64,
    outputs: &[*mut c_void],
) -> Result<(), Status> {
    let (stream, tensor) = (stream_of(handle)?, tensor(input)?);
    let data_type = i64::from(tensor.data_type);
    let bytes = passes * tensor.elements() * element_bytes(data_type);
    // A handful of operations per element and pass never limits the speed.
    work::operator(stream, name, Operator { flop: 0, bytes, input: engine_type(data_type) });
    for output in outputs {
        values::library_wrote(*output, name.text());
    }
    Ok(())
}

/// Batch normalisation with statistics of the batch: the input is read for them, read again, and the output written.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBatchNormalizationForwardTrainingEx(
    handle: *const c_void,
    _mode: c_int,
    _operations: c_int,
    _alpha: *const c_void,
    _beta: *const c_void,
    input: *const c_void,
    _x: *const c_void,
    _z_descriptor: *const c_void,
    z: *const c_void,
    _y_descriptor: *const c_void,
    y: *mut c_void,
    _parameters: *const c_void,
    _scale: *const c_void,
    _bias: *const c_void,
    _factor: f64,
    running_mean: *mut c_void,
    running_variance: *mut c_void,
    _epsilon: f64,
    saved_mean: *mut c_void,
    saved_variance: *mut c_void,
    _activation: *const c_void,
    _workspace: *mut c_void,
    _workspace_bytes: usize,
    _reserve: *mut c_void,
    _reserve_bytes: usize,
) -> Status {
    static NAME: Name = Name::new("cudnnBatchNormalizationForwardTrainingEx");
    answer("cudnnBatchNormalizationForwardTrainingEx", || {
        let outputs = [y, running_mean, running_variance, saved_mean, saved_variance];
        normalise(handle, input, &NAME, if z.is_null() { 3 } else { 4 }, &outputs)
    })
}

/// Batch normalisation with given statistics.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBatchNormalizationForwardInference(
    handle: *const c_void,
    _mode: c_int,
    _alpha: *const c_void,
    _beta: *const c_void,
    input: *const c_void,
    _x: *const c_void,
    _y_descriptor: *const c_void,
    y: *mut c_void,
    _parameters: *const c_void,
    _scale: *const c_void,
    _bias: *const c_void,
    _mean: *const c_void,
    _variance: *const c_void,
    _epsilon: f64,
) -> Status {
    static NAME: Name = Name::new("cudnnBatchNormalizationForwardInference");
    answer("cudnnBatchNormalizationForwardInference", || normalise(handle, input, &NAME, 2, &[y]))
}

/// Gradients of batch normalisation: input and output gradient are read twice, the input gradient is written.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBatchNormalizationBackwardEx(
    handle: *const c_void,
    _mode: c_int,
    _operations: c_int,
    _alpha_data: *const c_void,
    _beta_data: *const c_void,
    _alpha_parameters: *const c_void,
    _beta_parameters: *const c_void,
    input: *const c_void,
    _x: *const c_void,
    _y_descriptor: *const c_void,
    _y: *const c_void,
    _dy_descriptor: *const c_void,
    _dy: *const c_void,
    _dz_descriptor: *const c_void,
    dz: *mut c_void,
    _dx_descriptor: *const c_void,
    dx: *mut c_void,
    _parameters: *const c_void,
    _scale: *const c_void,
    _bias: *const c_void,
    dscale: *mut c_void,
    dbias: *mut c_void,
    _epsilon: f64,
    _saved_mean: *const c_void,
    _saved_variance: *const c_void,
    _activation: *const c_void,
    _workspace: *mut c_void,
    _workspace_bytes: usize,
    _reserve: *mut c_void,
    _reserve_bytes: usize,
) -> Status {
    static NAME: Name = Name::new("cudnnBatchNormalizationBackwardEx");
    answer("cudnnBatchNormalizationBackwardEx", || {
        normalise(handle, input, &NAME, if dz.is_null() { 5 } else { 6 }, &[dz, dx, dscale, dbias])
    })
}

/// Writes a size of zero: nothing is run, so nothing is kept.
///
/// # Safety
/// `bytes` must be null or valid for a write.
unsafe fn no_space(name: &str, handle: *const c_void, bytes: *mut usize) -> Status {
    answer(name, || {
        stream_of(handle)?;
        // SAFETY: the caller's contract.
        unsafe { write(bytes, 0) }
    })
}

/// The workspace of a forward pass.
///
/// # Safety
/// `bytes` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    handle: *const c_void,
    _mode: c_int,
    _operations: c_int,
    _x: *const c_void,
    _z: *const c_void,
    _y: *const c_void,
    _parameters: *const c_void,
    _activation: *const c_void,
    bytes: *mut usize,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { no_space("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", handle, bytes) }
}

/// The workspace of a backward pass.
///
/// # Safety
/// `bytes` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    handle: *const c_void,
    _mode: c_int,
    _operations: c_int,
    _x: *const c_void,
    _y: *const c_void,
    _dy: *const c_void,
    _dz: *const c_void,
    _dx: *const c_void,
    _parameters: *const c_void,
    _activation: *const c_void,
    bytes: *mut usize,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { no_space("cudnnGetBatchNormalizationBackwardExWorkspaceSize", handle, bytes) }
}

/// What a forward pass keeps for the backward pass.
///
/// # Safety
/// `bytes` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    handle: *const c_void,
    _mode: c_int,
    _operations: c_int,
    _activation: *const c_void,
    _x: *const c_void,
    bytes: *mut usize,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { no_space("cudnnGetBatchNormalizationTrainingExReserveSpaceSize", handle, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libs::cudnn::names::SUCCESS;

    #[test]
    fn a_tensor_descriptor_gives_back_what_was_set() {
        let mut handle = std::ptr::null_mut();
        let (mut data_type, mut count) = (0, 0);
        let (mut dimensions, mut strides) = ([0; 8], [0; 8]);
        // SAFETY: every pointer is valid for its call.
        unsafe {
            assert_eq!(cudnnCreateTensorDescriptor(&raw mut handle), SUCCESS);
            let (sizes, steps) = ([2, 3, 4, 5], [60, 20, 5, 1]);
            assert_eq!(cudnnSetTensorNdDescriptor(handle, 9, 4, sizes.as_ptr(), steps.as_ptr()), SUCCESS);
            assert_eq!(cudnnSetTensorNdDescriptor(handle, 9, 9, sizes.as_ptr(), steps.as_ptr()), BAD_PARAM);
            let (d, s) = (dimensions.as_mut_ptr(), strides.as_mut_ptr());
            assert_eq!(cudnnGetTensorNdDescriptor(handle, 8, &raw mut data_type, &raw mut count, d, s), SUCCESS);
        }
        assert_eq!((data_type, count), (9, 4));
        assert_eq!((&dimensions[..5], &strides[..5]), (&[2, 3, 4, 5, 0][..], &[60, 20, 5, 1, 0][..]));
        assert_eq!(tensor(handle).map(|tensor| tensor.elements()), Ok(120));
        assert_eq!(cudnnDestroyTensorDescriptor(handle), SUCCESS);
        assert_eq!(tensor(handle), Err(BAD_PARAM));
    }
}
