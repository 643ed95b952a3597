//! Fixed-size records that a training process sends to the engine, and the answers it waits for.
//!
//! One `Record` is one call of the program (a launch, a collective, a synchronisation). Records are appended to a ring in
//! call order and are never answered, except those whose kind is a *query* ([`RecordKind::is_query`]): the caller waits in
//! a reply slot until the engine knows the answer.

/// Version of everything in this crate that crosses the process boundary. Both sides must agree exactly.
pub const PROTOCOL_VERSION: u32 = 1;

/// What a [`Record`] stands for. The meaning of `a`..`h` is given per kind; fields not named are zero.
///
/// While the program is profiled, the records of device work carry a *correlation id* that is not 0: in `h` those of
/// kernels, library work, copies and fills, in `d` those of collectives and messages. See
/// [`ControlKind::Timeline`](crate::control::ControlKind::Timeline).
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A kernel launch. `a` = grid x | grid y << 32, `b` = grid z | threads per block << 32, `c` = dynamic shared memory
    /// bytes, `d` = bytes read and written if known (0 = unknown), `e` = name id.
    Kernel = 1,
    /// A matrix multiplication. `a` = m, `b` = n, `c` = k, `d` = batch, `e` = name id, `f` = input [`DataType`],
    /// `g` = compute [`DataType`].
    Gemm = 2,
    /// An operator known by its work (attention, convolution). `a` = FLOP, `b` = bytes read and written, `e` = name id,
    /// `f` = input [`DataType`].
    Operator = 3,
    /// A copy. `a` = bytes, `b` = [`CopyDirection`], `c` = 1 if the host side is pinned.
    Memcpy = 4,
    /// A fill. `a` = bytes.
    Memset = 5,
    /// `e` = event id; the event now stands for everything enqueued on `stream` so far.
    EventRecord = 6,
    /// `stream` waits for the latest record of event `e` (nothing if it was never recorded).
    EventWait = 7,
    /// Query: the host waits until `stream` is drained. Answer `value` = by how many ps that is before `host_ns`, which is
    /// rounded up; more than 999: the host came later.
    StreamSync = 8,
    /// Query: the host waits for event `e`.
    EventSync = 9,
    /// Query: the host waits for every stream of the device.
    DeviceSync = 10,
    /// Query: is event `e` complete at `host_ns`? Answer `value` 1 or 0.
    EventQuery = 11,
    /// Query: is `stream` drained at `host_ns`? Answer `value` 1 or 0.
    StreamQuery = 12,
    /// Query: device time from event `e` to event `f`. Answer `value` in ns.
    EventElapsed = 13,
    /// Device memory reserved from the driver. `a` = bytes, `b` = address.
    Alloc = 14,
    /// Device memory given back. `a` = bytes, `b` = address.
    Free = 15,
    /// A point of the program. `e` = [`MarkerKind`]; `stream` = the stream whose progress defines the time of the point.
    Marker = 16,
    /// The program's own allocator: `a` = peak allocated bytes, `b` = peak reserved bytes, since the start of the program;
    /// `c` = bytes of workspaces that it gave to libraries.
    MemoryStats = 17,
    /// A collective. `a` = element count (as given to NCCL), `e` = communicator id, `f` = [`CollectiveKind`] |
    /// [`DataType`] << 8 | [`ReduceOp`] << 16, `g` = root group rank (0 where there is none), `h` = group ordinal.
    Collective = 32,
    /// A send. `a` = element count, `e` = communicator id, `f` = [`DataType`] << 8, `g` = peer group rank, `h` = group ordinal.
    Send = 33,
    /// A receive; fields as for [`RecordKind::Send`].
    Recv = 34,
    /// All operations of group ordinal `h` (> 0) have been sent; they are launched together now.
    GroupEnd = 35,
    /// Communicator `e` is gone.
    CommDestroy = 36,
}

impl RecordKind {
    /// The kind with this number, or `None` for a number this version does not know.
    #[must_use]
    pub fn from_u16(value: u16) -> Option<Self> {
        use RecordKind as K;
        const ALL: [RecordKind; 22] = [
            K::Kernel,
            K::Gemm,
            K::Operator,
            K::Memcpy,
            K::Memset,
            K::EventRecord,
            K::EventWait,
            K::StreamSync,
            K::EventSync,
            K::DeviceSync,
            K::EventQuery,
            K::StreamQuery,
            K::EventElapsed,
            K::Alloc,
            K::Free,
            K::Marker,
            K::MemoryStats,
            K::Collective,
            K::Send,
            K::Recv,
            K::GroupEnd,
            K::CommDestroy,
        ];
        ALL.into_iter().find(|kind| *kind as u16 == value)
    }

    /// Is it work on the device, which takes time there?
    #[must_use]
    pub fn is_device_work(self) -> bool {
        self.is_compute() || matches!(self, Self::Collective | Self::Send | Self::Recv)
    }

    /// Is it device work of this rank alone?
    #[must_use]
    pub fn is_compute(self) -> bool {
        matches!(self, Self::Kernel | Self::Gemm | Self::Operator | Self::Memcpy | Self::Memset)
    }

    /// Does the caller wait for an answer?
    #[must_use]
    pub fn is_query(self) -> bool {
        matches!(
            self,
            Self::StreamSync
                | Self::EventSync
                | Self::DeviceSync
                | Self::EventQuery
                | Self::StreamQuery
                | Self::EventElapsed
        )
    }
}

/// The record `flags` bit of a query asked by a thread that does not drive the device (a watchdog): it never moves the
/// rank's host clock, and is answered when the answer is known or nothing that could change it is running.
pub const FLAG_BACKGROUND: u16 = 1;
/// The record `flags` bit of an operation issued while its stream is being captured into a CUDA graph.
pub const FLAG_CAPTURED: u16 = 2;
/// The record `flags` bit of a [`RecordKind::StreamSync`] whose caller knows the answer and does not wait for it: `a` is
/// when the stream is drained, in ps. The engine works it out all the same, and fails the session if it is another time.
pub const FLAG_FORESEEN: u16 = 4;

/// One call of the program. 64 bytes, little endian, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Record {
    /// A [`RecordKind`].
    pub kind: u16,
    /// `FLAG_*` bits.
    pub flags: u16,
    /// Stream id, dense per process; 0 is the legacy default stream of device 0.
    pub stream: u32,
    /// Virtual host clock of the process when the call was made, ns since it connected.
    pub host_ns: i64,
    /// First 64-bit argument.
    pub a: u64,
    /// Second 64-bit argument.
    pub b: u64,
    /// Third 64-bit argument.
    pub c: u64,
    /// Fourth 64-bit argument.
    pub d: u64,
    /// First 32-bit argument.
    pub e: u32,
    /// Second 32-bit argument.
    pub f: u32,
    /// Third 32-bit argument.
    pub g: u32,
    /// Fourth 32-bit argument. For queries: the reply slot.
    pub h: u32,
}
const _: () = assert!(size_of::<Record>() == 64);

impl Record {
    /// The correlation id of a record of device work; 0 for none.
    #[must_use]
    pub fn correlation(&self, kind: RecordKind) -> u32 {
        match kind {
            kind if kind.is_compute() => self.h,
            kind if kind.is_device_work() => self.d as u32,
            _ => 0,
        }
    }

    /// Gives a record of device work a correlation id.
    pub fn correlate(&mut self, kind: RecordKind, correlation: u32) {
        if kind.is_compute() {
            self.h = correlation;
        } else if kind.is_device_work() {
            self.d = u64::from(correlation);
        }
    }
}

/// Answer to a query.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// A [`ReplyStatus`].
    pub status: u32,
    /// Reserved, zero.
    pub reserved: u32,
    /// The answer; its meaning is given by the kind of the query.
    pub value: i64,
    /// Virtual host clock after the call: the process continues from here.
    pub host_ns: i64,
}
const _: () = assert!(size_of::<Reply>() == 24);

/// How a query ended.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStatus {
    /// `value` and `host_ns` are the answer.
    Ok = 0,
    /// The session failed (deadlock, mismatch, engine error); the text is in the launcher's log. The device reports
    /// `cudaErrorUnknown`, NCCL reports `ncclInternalError`.
    Failed = 1,
    /// The engine is gone.
    Disconnected = 2,
}

/// Direction of a [`RecordKind::Memcpy`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CopyDirection {
    HostToHost = 0,
    HostToDevice = 1,
    DeviceToHost = 2,
    DeviceToDevice = 3,
}

/// Kind of a [`RecordKind::Marker`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkerKind {
    /// Training starts: the first iteration begins here.
    TrainingBegin = 1,
    /// One iteration (optimizer step) has been enqueued completely.
    IterationEnd = 2,
}

/// NCCL data types by NCCL's own numbers (`ncclDataType_t`, nccl.h); also used for GEMM inputs.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DataType {
    Int8 = 0,
    Uint8 = 1,
    Int32 = 2,
    Uint32 = 3,
    Int64 = 4,
    Uint64 = 5,
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
    Float8e4m3 = 10,
    Float8e5m2 = 11,
    /// Not an NCCL type: float32 computed in TF32. Only as a GEMM compute type.
    Tf32 = 100,
}

impl DataType {
    /// The type with NCCL's number `value`.
    #[must_use]
    pub fn from_u8(value: u8) -> Option<Self> {
        use DataType as D;
        [
            D::Int8,
            D::Uint8,
            D::Int32,
            D::Uint32,
            D::Int64,
            D::Uint64,
            D::Float16,
            D::Float32,
            D::Float64,
            D::Bfloat16,
            D::Float8e4m3,
            D::Float8e5m2,
            D::Tf32,
        ]
        .into_iter()
        .find(|dtype| *dtype as u8 == value)
    }

    /// The type a short name stands for: `bf16`, `fp16`, `fp32`, `tf32`, `fp64`, `fp8` or `int8`.
    #[must_use]
    pub fn from_short_name(name: &str) -> Option<Self> {
        Some(match name {
            "bf16" => Self::Bfloat16,
            "fp16" => Self::Float16,
            "fp32" => Self::Float32,
            "tf32" => Self::Tf32,
            "fp64" => Self::Float64,
            "fp8" => Self::Float8e4m3,
            "int8" => Self::Int8,
            _ => return None,
        })
    }

    /// Size of one element in bytes.
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 | Self::Tf32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// Collectives a communicator can run.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum CollectiveKind {
    AllReduce = 0,
    AllGather = 1,
    ReduceScatter = 2,
    Broadcast = 3,
    Reduce = 4,
    AllToAll = 5,
    Gather = 6,
    Scatter = 7,
}

impl CollectiveKind {
    /// The collective with this number.
    #[must_use]
    pub fn from_u8(value: u8) -> Option<Self> {
        use CollectiveKind as C;
        [C::AllReduce, C::AllGather, C::ReduceScatter, C::Broadcast, C::Reduce, C::AllToAll, C::Gather, C::Scatter]
            .into_iter()
            .find(|kind| *kind as u8 == value)
    }
}

/// Reductions by NCCL's own numbers (`ncclRedOp_t`, nccl.h).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum ReduceOp {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
    Avg = 4,
    /// A user-defined operator (`ncclRedOpCreatePreMulSum`).
    PreMulSum = 5,
}

impl ReduceOp {
    /// The reduction with this number; every number above 4 is a user-defined operator.
    #[must_use]
    pub fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Sum,
            1 => Self::Prod,
            2 => Self::Max,
            3 => Self::Min,
            4 => Self::Avg,
            _ => Self::PreMulSum,
        }
    }
}
