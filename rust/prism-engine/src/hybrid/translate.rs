//! Facts from the wire become ops: the device profile turns grids and matrix shapes into durations.

use crate::cost::compute::Work;
use crate::cost::durations::Durations;
use crate::cost::names::Family;
use crate::graph::op::{CollectiveKind, DataType, OpKind, ReduceOp};
use crate::ids::{EventId, NameId, SlotId};
use prism_wire::message::{CopyDirection, MarkerKind, Record, RecordKind};

/// A record that cannot be understood: a shim of another version, or damage.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {kind}: {field} = {value} is not known")]
pub(crate) struct BadRecord {
    pub(crate) kind: u16,
    pub(crate) field: &'static str,
    pub(crate) value: u64,
}

/// What the names and communicators of a process are called in the engine.
pub(crate) trait Names {
    fn name(&mut self, wire_id: u32) -> NameId;
    fn builtin(&mut self, text: &'static str) -> NameId;
    fn text(&self, name: NameId) -> &str;
    fn slot(&self, comm_id: u32) -> Option<SlotId>;
}

fn bad(record: &Record, field: &'static str, value: u64) -> BadRecord {
    BadRecord { kind: record.kind, field, value }
}

/// The op of a record, with the family of its work if it computes; `None` for records that are not ops (queries that hold
/// nobody, statistics).
pub(crate) fn op_kind(
    record: &Record,
    kind: RecordKind,
    durations: &mut Durations,
    names: &mut impl Names,
) -> Result<Option<(OpKind, Option<Family>)>, BadRecord> {
    let op = match kind {
        RecordKind::Kernel | RecordKind::Gemm | RecordKind::Operator | RecordKind::Memcpy | RecordKind::Memset => {
            let (op, family) = compute_op(record, kind, durations, names)?;
            return Ok(Some((op, Some(family))));
        }
        RecordKind::EventRecord => OpKind::EventRecord { event: EventId(record.e) },
        RecordKind::EventWait => OpKind::EventWait { event: EventId(record.e) },
        RecordKind::StreamSync => OpKind::StreamSync,
        RecordKind::EventSync => OpKind::EventSync { event: EventId(record.e) },
        RecordKind::DeviceSync => OpKind::DeviceSync,
        RecordKind::Alloc => OpKind::Alloc { bytes: record.a },
        RecordKind::Free => OpKind::Free { bytes: record.a },
        RecordKind::Marker if record.e == MarkerKind::TrainingBegin as u32 => OpKind::TrainingBegin,
        RecordKind::Marker if record.e == MarkerKind::IterationEnd as u32 => OpKind::IterationEnd,
        RecordKind::Marker => return Err(bad(record, "marker", u64::from(record.e))),
        RecordKind::Collective => {
            let slot = names.slot(record.e).ok_or_else(|| bad(record, "communicator", u64::from(record.e)))?;
            OpKind::Collective {
                slot,
                kind: CollectiveKind::from_u8(record.f as u8)
                    .ok_or_else(|| bad(record, "collective", u64::from(record.f & 0xff)))?,
                dtype: data_type(record, record.f >> 8)?,
                reduce: ReduceOp::from_u8((record.f >> 16) as u8),
                root: record.g,
                count: record.a,
                group: record.h,
            }
        }
        RecordKind::Send | RecordKind::Recv => {
            let slot = names.slot(record.e).ok_or_else(|| bad(record, "communicator", u64::from(record.e)))?;
            OpKind::PointToPoint {
                slot,
                is_send: kind == RecordKind::Send,
                dtype: data_type(record, record.f >> 8)?,
                peer: record.g,
                count: record.a,
                group: record.h,
            }
        }
        RecordKind::EventQuery
        | RecordKind::StreamQuery
        | RecordKind::EventElapsed
        | RecordKind::MemoryStats
        | RecordKind::GroupEnd
        | RecordKind::CommDestroy => return Ok(None),
    };
    Ok(Some((op, None)))
}

fn data_type(record: &Record, value: u32) -> Result<DataType, BadRecord> {
    DataType::from_u8(value as u8).ok_or_else(|| bad(record, "data type", u64::from(value & 0xff)))
}

fn compute_op(
    record: &Record,
    kind: RecordKind,
    durations: &mut Durations,
    names: &mut impl Names,
) -> Result<(OpKind, Family), BadRecord> {
    let (work, name) = match kind {
        RecordKind::Kernel => (
            Work::Kernel {
                grid: [record.a as u32, (record.a >> 32) as u32, record.b as u32],
                threads_per_block: (record.b >> 32) as u32,
                bytes: record.d,
            },
            names.name(record.e),
        ),
        RecordKind::Gemm => (
            Work::Gemm {
                m: record.a,
                n: record.b,
                k: record.c,
                batch: record.d,
                input: data_type(record, record.f)?,
                compute: data_type(record, record.g)?,
            },
            names.name(record.e),
        ),
        RecordKind::Operator => (
            Work::Operator { flops: record.a, bytes: record.b, input: data_type(record, record.f)? },
            names.name(record.e),
        ),
        RecordKind::Memcpy => {
            let (direction, text) = match record.b {
                0 => (CopyDirection::HostToHost, "Memcpy HtoH"),
                1 => (CopyDirection::HostToDevice, "Memcpy HtoD"),
                2 => (CopyDirection::DeviceToHost, "Memcpy DtoH"),
                3 => (CopyDirection::DeviceToDevice, "Memcpy DtoD"),
                other => return Err(bad(record, "copy direction", other)),
            };
            (Work::Memcpy { bytes: record.a, direction, pinned: record.c == 1 }, names.builtin(text))
        }
        _ => (Work::Memset { bytes: record.a }, names.builtin("Memset")),
    };
    let found = durations.estimate(&work, name, || names.text(name));
    let op = OpKind::Compute { duration: found.duration, name, class: found.class, provenance: found.provenance };
    Ok((op, found.family))
}
