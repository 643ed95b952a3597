//! Names of device work in a profile: those of kernels as the program has them, those of NCCL's kernels as NCCL has them.

use crate::session;
use prism_wire::message::{CollectiveKind, DataType, Record, RecordKind, ReduceOp};
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Names that were given out: a profiler keeps the pointers.
static GIVEN: LazyLock<Mutex<HashMap<String, &'static CString>>> = LazyLock::new(Mutex::default);

fn keep(text: String) -> *const c_char {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = given.get(&text) {
        return kept.as_ptr();
    }
    let kept: &'static CString = Box::leak(Box::new(CString::new(text.replace('\0', "")).unwrap_or_default()));
    given.insert(text, kept);
    kept.as_ptr()
}

/// The name of a piece of device work; lives as long as the process.
pub(super) fn of(record: &Record, kind: RecordKind) -> *const c_char {
    keep(match kind {
        RecordKind::Collective => collective(record),
        RecordKind::Send | RecordKind::Recv => nccl("SendRecv"),
        _ => session::name_text(record.e).unwrap_or_else(|| "(unnamed)".to_owned()),
    })
}

fn nccl(what: &str) -> String {
    format!("ncclDevKernel_{what}(ncclDevKernelArgsStorage<4096ul>)")
}

/// As NCCL names its kernels (`src/device/generate.py`), without algorithm and protocol, which are the engine's to choose.
fn collective(record: &Record) -> String {
    let dtype = DataType::from_u8((record.f >> 8) as u8).map_or("u8", type_name);
    let reduce = match ReduceOp::from_u8((record.f >> 16) as u8) {
        ReduceOp::Sum => "Sum",
        ReduceOp::Prod => "Prod",
        ReduceOp::Max | ReduceOp::Min => "MinMax",
        ReduceOp::Avg if matches!(dtype, "i8" | "u8" | "i32" | "u32" | "i64" | "u64") => "SumPostDiv",
        ReduceOp::Avg | ReduceOp::PreMulSum => "PreMulSum",
    };
    match CollectiveKind::from_u8(record.f as u8) {
        Some(CollectiveKind::AllReduce) => nccl(&format!("AllReduce_{reduce}_{dtype}")),
        Some(CollectiveKind::ReduceScatter) => nccl(&format!("ReduceScatter_{reduce}_{dtype}")),
        Some(CollectiveKind::Reduce) => nccl(&format!("Reduce_{reduce}_{dtype}")),
        Some(CollectiveKind::AllGather) => nccl("AllGather"),
        Some(CollectiveKind::Broadcast) => nccl("Broadcast"),
        Some(CollectiveKind::AllToAll | CollectiveKind::Gather | CollectiveKind::Scatter) | None => nccl("SendRecv"),
    }
}

fn type_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Int8 => "i8",
        DataType::Uint8 => "u8",
        DataType::Int32 => "i32",
        DataType::Uint32 => "u32",
        DataType::Int64 => "i64",
        DataType::Uint64 => "u64",
        DataType::Float16 => "f16",
        DataType::Float32 | DataType::Tf32 => "f32",
        DataType::Float64 => "f64",
        DataType::Bfloat16 => "bf16",
        DataType::Float8e4m3 => "f8e4m3",
        DataType::Float8e5m2 => "f8e5m2",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_are_called_as_nccl_calls_them() {
        let record = |kind: CollectiveKind, dtype: DataType, reduce: ReduceOp| Record {
            f: kind as u32 | (dtype as u32) << 8 | (reduce as u32) << 16,
            ..Record::default()
        };
        let name = |record: Record| collective(&record);
        let all_reduce = record(CollectiveKind::AllReduce, DataType::Bfloat16, ReduceOp::Sum);
        assert_eq!(name(all_reduce), "ncclDevKernel_AllReduce_Sum_bf16(ncclDevKernelArgsStorage<4096ul>)");
        let average = record(CollectiveKind::ReduceScatter, DataType::Float32, ReduceOp::Avg);
        assert!(name(average).starts_with("ncclDevKernel_ReduceScatter_PreMulSum_f32("));
        let gather = record(CollectiveKind::AllGather, DataType::Float32, ReduceOp::Sum);
        assert!(name(gather).starts_with("ncclDevKernel_AllGather("));
    }
}
