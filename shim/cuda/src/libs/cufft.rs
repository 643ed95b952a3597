//! cuFFT: plans that remember their transform, executions as one operator.

use super::work::{self, Element, Name, Operator};
use crate::guard::guard;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A `cufftResult`.
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_PLAN: Status = 1;
const INVALID_TYPE: Status = 3;
const INVALID_VALUE: Status = 4;
const INTERNAL_ERROR: Status = 5;

/// A plan; plans are numbers in C.
#[derive(Clone, Copy, Default)]
struct Plan {
    /// Address of the stream; 0 is the default stream.
    stream: usize,
    /// What one execution does, once the plan is made.
    work: Option<Operator>,
}

#[derive(Default)]
struct Plans {
    last: c_int,
    plans: BTreeMap<c_int, Plan>,
}

static PLANS: Mutex<Plans> = Mutex::new(Plans { last: 0, plans: BTreeMap::new() });

fn plans() -> MutexGuard<'static, Plans> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(body: impl FnOnce() -> Result<(), Status>) -> Status {
    guard(INTERNAL_ERROR, || body().err().unwrap_or(SUCCESS))
}

fn change(plan: c_int, apply: impl FnOnce(&mut Plan)) -> Result<(), Status> {
    plans().plans.get_mut(&plan).map(apply).ok_or(INVALID_PLAN)
}

/// The work of `batch` transforms over `sizes`: five operations per point and binary digit of the points (half of that
/// for real input), each axis read and written once.
fn transform(sizes: &[i64], batch: i64, element: Element) -> Result<Operator, Status> {
    let positive = |value: i64| u64::try_from(value).ok().filter(|value| *value > 0).ok_or(INVALID_VALUE);
    let points =
        sizes.iter().try_fold(1_u64, |points, size| points.checked_mul(positive(*size)?).ok_or(INVALID_VALUE))?;
    let batch = positive(batch)?;
    let digits = u64::from(points.next_power_of_two().trailing_zeros());
    let per_point = if element.products == 1 { 5 * digits / 2 } else { 5 * digits };
    let total = points.checked_mul(batch).ok_or(INVALID_VALUE)?;
    Ok(Operator {
        flop: total.saturating_mul(per_point),
        bytes: total.saturating_mul(2 * element.size_bytes() * sizes.len() as u64),
        input: element.dtype,
    })
}

/// Creates a plan.
///
/// # Safety
/// `plan` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cufftCreate(plan: *mut c_int) -> Status {
    answer(|| {
        if plan.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut all = plans();
        all.last += 1;
        let number = all.last;
        all.plans.insert(number, Plan::default());
        // SAFETY: not null, valid by the contract.
        unsafe { plan.write(number) };
        Ok(())
    })
}

/// Destroys a plan.
#[unsafe(no_mangle)]
pub extern "C" fn cufftDestroy(plan: c_int) -> Status {
    answer(|| plans().plans.remove(&plan).map(drop).ok_or(INVALID_PLAN))
}

/// Says who allocates the work area; there is none.
#[unsafe(no_mangle)]
pub extern "C" fn cufftSetAutoAllocation(plan: c_int, _allocate: c_int) -> Status {
    answer(|| change(plan, |_| ()))
}

/// Gives a work area; it is not used.
#[unsafe(no_mangle)]
pub extern "C" fn cufftSetWorkArea(plan: c_int, _area: *mut c_void) -> Status {
    answer(|| change(plan, |_| ()))
}

/// Sets the stream of a plan.
#[unsafe(no_mangle)]
pub extern "C" fn cufftSetStream(plan: c_int, stream: *mut c_void) -> Status {
    answer(|| change(plan, |plan| plan.stream = stream.addr()))
}

/// Makes a plan for `batch` transforms of `rank` dimensions.
///
/// # Safety
/// `sizes` must be null or readable for `rank` numbers, `work_bytes` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cufftXtMakePlanMany(
    plan: c_int,
    rank: c_int,
    sizes: *const i64,
    _input_embed: *const i64,
    _input_stride: i64,
    _input_distance: i64,
    input_type: c_int,
    _output_embed: *const i64,
    _output_stride: i64,
    _output_distance: i64,
    _output_type: c_int,
    batch: i64,
    work_bytes: *mut usize,
    _execution_type: c_int,
) -> Status {
    answer(|| {
        if sizes.is_null() || work_bytes.is_null() || !(1..=3).contains(&rank) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, `rank` numbers by the contract.
        let sizes = unsafe { std::slice::from_raw_parts(sizes, rank as usize) };
        let work = transform(sizes, batch, Element::from_cuda(input_type).ok_or(INVALID_TYPE)?)?;
        change(plan, |plan| plan.work = Some(work))?;
        // SAFETY: not null, valid by the contract.
        unsafe { work_bytes.write(0) };
        Ok(())
    })
}

/// Executes a plan.
#[unsafe(no_mangle)]
pub extern "C" fn cufftXtExec(plan: c_int, _input: *mut c_void, output: *mut c_void, _direction: c_int) -> Status {
    static NAME: Name = Name::new("cufftXtExec");
    answer(|| {
        let plan = plans().plans.get(&plan).copied().ok_or(INVALID_PLAN)?;
        work::operator(std::ptr::without_provenance(plan.stream), &NAME, plan.work.ok_or(INVALID_PLAN)?);
        crate::values::library_wrote(output, NAME.text());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use prism_wire::message::DataType;

    #[test]
    fn a_transform_is_counted_by_its_points() {
        let complex = Element::complex(DataType::Float32);
        let expected = Operator { flop: 3 * 1024 * 50, bytes: 3 * 1024 * 2 * 8, input: DataType::Float32 };
        assert_eq!(transform(&[1024], 3, complex), Ok(expected));
        assert_eq!(transform(&[32, 32], 1, complex).map(|work| work.bytes), Ok(1024 * 2 * 2 * 8));
        assert_eq!(transform(&[0], 1, complex), Err(INVALID_VALUE));
        assert_eq!(transform(&[i64::MAX, 4], 1, complex), Err(INVALID_VALUE));
    }

    #[test]
    fn plans_are_made_before_they_run() {
        let mut plan = 0;
        // SAFETY: `plan` is valid for a write.
        assert_eq!(unsafe { cufftCreate(&raw mut plan) }, SUCCESS);
        assert_eq!(cufftXtExec(plan, std::ptr::null_mut(), std::ptr::null_mut(), 1), INVALID_PLAN);
        assert_eq!(cufftDestroy(plan), SUCCESS);
        assert_eq!(cufftSetStream(plan, std::ptr::null_mut()), INVALID_PLAN);
    }
}
