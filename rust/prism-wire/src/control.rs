//! Requests on the session's Unix socket: rare, of any length, each answered before the next.
//!
//! Frame: `kind: u32, length: u32, payload[length]`, little endian. An answer has the request's kind, or
//! [`ControlKind::Refused`] with a text. All integers little endian; text is UTF-8 and fills the rest of the payload.

/// What a control frame asks for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlKind {
    /// First frame of a process. Payload: `protocol: u32, rank: u32, world_size: u32, pid: u32, device: u32`
    /// (`device`: 0 emulated, 1 real, 2 host). Answer: `protocol: u32, ring_records: u32` then the configuration text
    /// (lines `key=value`), with the file descriptor of the shared segment attached.
    Hello = 1,
    /// Text for a name id. Payload: `name_id: u32`, text. Answer: empty. Sent before the first record that uses the id.
    Name = 2,
    /// Members of a process group about to be created (by the framework hook), on every rank, member or not.
    /// Payload: `count: u32, ranks: [u32; count]` (global ranks in group-rank order), then the group's name.
    /// Answer: empty.
    Group = 3,
    /// A communicator from a unique id. Payload: `comm_id: u32, nranks: u32, group_rank: u32, unique_id: [u8; 128]`.
    /// `comm_id` is chosen by the process, dense from 1. Answer: empty.
    CommInit = 4,
    /// A communicator by split. Payload: `comm_id: u32, parent: u32, color: i32, key: i32`, then the name of the process
    /// group being created, if the framework hook told one (else empty). `color` -1 takes part and gets nothing.
    /// Answer: `nranks: u32, group_rank: u32` (0, 0 for colour -1).
    CommSplit = 5,
    /// A call that is not supported was made. Payload: text (function name). Answer: empty. Counted in the summary.
    Unsupported = 6,
    /// A remark for the summary (for example: control payloads mirrored). Payload: `count: u64`, text. Answer: empty.
    Note = 7,
    /// A communicator whose members the process knows: of a shrink, of a split or an initialisation that all members
    /// joined. Payload: `comm_id: u32, parent: u32, count: u32, ranks: [u32; count]` in group-rank order; the ranks are
    /// group ranks of `parent`, or global ranks where `parent` is 0. Answer: empty.
    CommMembers = 8,
    /// Device memory NCCL holds for a communicator, by what it was used for in the records taken in so far. Payload:
    /// `comm_id: u32`. Answer: `bytes: u64`.
    CommMemory = 9,
    /// How long a collective would take if all members came at once. Payload: `comm_id: u32, f: u32, root: u32,
    /// count: u64` (`f` and the count as in [`crate::message::RecordKind::Collective`]). Answer: `ns: u64`.
    CommEstimate = 10,
    /// When the ops that carried a correlation id ran, of those that are over and have not been told yet. Payload: empty.
    /// Answer: `left: u64` (how many more there are), then entries of [`TIMELINE_ENTRY_BYTES`]: `correlation: u32,
    /// reserved: u32, start_ns: i64, end_ns: i64` in virtual time since the process connected.
    Timeline = 32,
    /// Answer only: the request was refused. Payload: text.
    Refused = 255,
}

impl ControlKind {
    /// The kind with this number.
    #[must_use]
    pub fn from_u32(value: u32) -> Option<Self> {
        use ControlKind as K;
        [
            K::Hello,
            K::Name,
            K::Group,
            K::CommInit,
            K::CommSplit,
            K::Unsupported,
            K::Note,
            K::CommMembers,
            K::CommMemory,
            K::CommEstimate,
            K::Timeline,
            K::Refused,
        ]
        .into_iter()
        .find(|kind| *kind as u32 == value)
    }
}

/// Size of an entry of a [`ControlKind::Timeline`] answer.
pub const TIMELINE_ENTRY_BYTES: usize = 24;

/// Size of an NCCL unique id in bytes (nccl.h).
pub const UNIQUE_ID_BYTES: usize = 128;
/// First 8 bytes of a unique id made by our `ncclGetUniqueId`: the rest is unique per process and call.
pub const UNIQUE_ID_LOCAL_MAGIC: &[u8; 8] = b"PRISMIDL";
/// First 8 bytes of a unique id made by the rendezvous store for an absent root: then a u64 hash of the key, then the
/// key's text, zero padded (cut at 112 bytes).
pub const UNIQUE_ID_STORE_MAGIC: &[u8; 8] = b"PRISMIDS";

/// Key of the configuration text under which the engine lists the ranks that run for real, separated by commas.
pub const CONFIG_LIVE: &str = "live";

/// Key of the configuration text that says how the host's time is found, and its value for measured CPU time; without the
/// key, calls have constant costs.
pub const CONFIG_HOST_TIME: &str = "host_time";
/// See [`CONFIG_HOST_TIME`].
pub const HOST_TIME_MEASURED: &str = "measured";

/// Name of the environment variable that holds the path of the session's socket. Without it every shim is inert.
pub const ENV_SESSION: &str = "PRISM_SESSION";
/// Name of the environment variable that names the rank a process plays (the launcher sets it beside `RANK`).
pub const ENV_RANK: &str = "PRISM_RANK";
/// Name of the environment variable that holds the target job's world size.
pub const ENV_WORLD_SIZE: &str = "PRISM_WORLD_SIZE";
/// Name of the environment variable that picks the device: `emulated`, `real` or `host`.
pub const ENV_DEVICE: &str = "PRISM_DEVICE";
/// Name of the environment variable that overrides the version answered by `ncclGetVersion`.
pub const ENV_NCCL_VERSION: &str = "PRISM_NCCL_VERSION";
