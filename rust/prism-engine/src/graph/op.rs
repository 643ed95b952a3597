//! One op of a rank's program.

use crate::ids::{EventId, NameId, SlotId, StreamId};
use crate::units::SimTime;
pub use prism_wire::message::{CollectiveKind, DataType, ReduceOp};
use serde::Serialize;

/// Where a duration or a byte count comes from. Every result says how much of it rests on each.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// Observed on the machine that is emulated.
    Measured = 0,
    /// Taken from somebody's trace.
    Imported = 1,
    /// Computed by a model of the device or the network.
    Modelled = 2,
    /// A constant nobody measured.
    #[default]
    Default = 3,
}

/// An op as the program issued it. The host of a rank issues its ops one after the other; each stream runs its ops in
/// that order. `host_gap` is the host time between the previous op's issue (or the end of the host's wait, if the previous
/// op was a synchronisation) and this op's issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// Host time before this op is issued.
    pub host_gap: SimTime,
    /// The stream it runs on (or, for synchronisations, waits for).
    pub stream: StreamId,
    /// What it does.
    pub kind: OpKind,
}

/// What an [`Op`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Occupies the stream for `duration`: a kernel, copy or fill. A rank's slow-down factor stretches it.
    Compute {
        /// Time on the device at full speed.
        duration: SimTime,
        /// Kernel or operator name.
        name: NameId,
        /// Class of work, for shares in reports.
        class: ComputeClass,
        /// Where the duration comes from.
        provenance: Provenance,
    },
    /// A collective over the communicator in `slot`.
    Collective {
        /// The rank's communicator.
        slot: SlotId,
        /// Which collective.
        kind: CollectiveKind,
        /// Element type.
        dtype: DataType,
        /// Reduction (Sum where there is none).
        reduce: ReduceOp,
        /// Root group rank (0 where there is none).
        root: u32,
        /// Element count as given to NCCL (per rank for AllGather/AllToAll input, ReduceScatter output).
        count: u64,
        /// 0, or the group this op is fused with: equal on consecutive ops of one ncclGroupStart/End.
        group: u32,
    },
    /// Half of a message.
    PointToPoint {
        /// The rank's communicator.
        slot: SlotId,
        /// True for the sending half.
        is_send: bool,
        /// Element type.
        dtype: DataType,
        /// Group rank of the other half.
        peer: u32,
        /// Element count.
        count: u64,
        /// As for collectives.
        group: u32,
    },
    /// The event now stands for everything issued to the stream so far.
    EventRecord {
        /// Which event.
        event: EventId,
    },
    /// The stream waits for the latest record of the event.
    EventWait {
        /// Which event.
        event: EventId,
    },
    /// The host waits until the stream is drained.
    StreamSync,
    /// The host waits for the event.
    EventSync {
        /// Which event.
        event: EventId,
    },
    /// The host waits for every stream.
    DeviceSync,
    /// Device memory reserved from the driver.
    Alloc {
        /// How much.
        bytes: u64,
    },
    /// Device memory given back.
    Free {
        /// How much.
        bytes: u64,
    },
    /// Training begins; the time of the point is that of everything issued to the stream so far.
    TrainingBegin,
    /// An iteration ends; the time of the point is that of everything issued to the stream so far.
    IterationEnd,
}

/// Class of device work.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeClass {
    /// A launched kernel without a better class.
    Kernel = 0,
    /// Matrix multiplication.
    Gemm = 1,
    /// Attention, convolution and other operators of a vendor library.
    Operator = 2,
    /// Copy.
    Memcpy = 3,
    /// Fill.
    Memset = 4,
    /// A wait of known length that is no work of the device: what a recorded communication took beyond the network's model, or
    /// what a recording does not explain. Nothing that makes computing slower stretches it.
    Wait = 5,
}

impl ComputeClass {
    /// How many there are; they are numbered from 0.
    pub const COUNT: usize = 6;

    /// All, by number.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Kernel, Self::Gemm, Self::Operator, Self::Memcpy, Self::Memset, Self::Wait];

    /// Does it last equally long on a rank that computes slower?
    #[must_use]
    pub const fn is_fixed(self) -> bool {
        matches!(self, Self::Wait)
    }
}
