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
    /// `comm_id: u32`, 0 for all communicators of the process. Answer: `bytes: u64`.
    CommMemory = 9,
    /// How long a collective would take if all members came at once. Payload: `comm_id: u32, f: u32, root: u32,
    /// count: u64` (`f` and the count as in [`crate::message::RecordKind::Collective`]). Answer: `ns: u64`.
    CommEstimate = 10,
    /// Where the running members of a communicator exchange data through files. Payload: `comm_id: u32`. Answer:
    /// `exchange: u32` (equal on all members), then `count: u32, group_ranks: [u32; count]` of the members that run.
    CommExchange = 11,
    /// Contributions that lie ready in their files. Payload: `parks: u32, count: u32`, then of each `exchange: u32,
    /// from: u32, number: u64, readers: u32` ([`Contribution`]). `parks` 1: the process gives up its turn; 0: it runs on,
    /// turn or not. Answer: empty.
    Contribute = 12,
    /// Waits a little for contributions, and for a turn. Payload: as [`Self::Contribute`] (`parks` and `readers` are 0).
    /// Answer: `state: u32, rank: u32`: state 0 not yet, 1 all are there and the process has a turn, 2 `rank` (of the job)
    /// has ended or left the communicator without contributing.
    Await = 13,
    /// Contributions were read. Payload: as [`Self::Await`]. Answer: empty. A file is removed after its last reader.
    Taken = 14,
    /// What virtual members contribute, by the user's rules. Payload: `comm_id: u32, kind: u32, dtype: u32, op: u32,
    /// root: u32, number: u64, count: u64, row_bytes: u64`. `kind` is that of a collective, 100 for a receive (`root`: the
    /// peer), 101 for the colour and key of a split. Answer: `verdict: u32` (0 no rule, 1 mirror, 2 shape only, 3 rows), then
    /// one row of `row_bytes` for all virtual members, or one for each in group-rank order.
    Values = 15,
    /// How payloads of a communicator came about. Payload: `comm_id: u32, kind: u32, tier: u32, count: u64`. Answer: empty.
    Tier = 16,
    /// On a real device, at the end of a process: how late held streams were released. Payload: `count: u64, p50_ns: u64,
    /// p99_ns: u64, max_ns: u64`. Answer: empty.
    ReleaseErrors = 17,
    /// Who else is in a communicator of this process. Payload: `comm_id: u32`. Answer: `all_live: u32` (1 when every member is
    /// a process of this session), `key: [u8; 16]`, the same for all members and different for each communicator.
    CommPeers = 18,
    /// Several process groups that the process is no member of, in the order in which they were made. Payload: of each
    /// `bytes: u32` and then what [`Self::Group`] has. Answer: empty.
    Groups = 19,
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
            K::ReleaseErrors,
            K::CommPeers,
            K::CommExchange,
            K::Contribute,
            K::Await,
            K::Taken,
            K::Values,
            K::Tier,
            K::Groups,
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

/// `kind` of [`ControlKind::Values`] and [`ControlKind::Tier`] for a message received.
pub const KIND_RECEIVE: u32 = 100;
/// `kind` of [`ControlKind::Values`] for the colour and key of a split.
pub const KIND_SPLIT: u32 = 101;
/// How a payload came about, as numbered in [`ControlKind::Tier`]: T0 shape only, T1 mirrored, T2 by a rule, T3 exact from
/// ranks played in turns, and live: exact from ranks that run side by side.
pub const TIERS: [&str; 5] = ["T0", "T1", "T2", "T3", "live"];

/// What a member of a communicator gives to the others, in a file of the session's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Contribution {
    /// Number of the communicator, as the engine counts them.
    pub exchange: u32,
    /// Group rank of the member.
    pub from: u32,
    /// Which operation: see [`Self::message`] for messages; collectives are counted from 0.
    pub number: u64,
    /// Members that will read it.
    pub readers: u32,
}

impl Contribution {
    /// The number of the `k`-th message of a member to group rank `to`.
    #[must_use]
    pub fn message(to: u32, k: u64) -> u64 {
        1 << 63 | u64::from(to) << 40 | k & ((1 << 40) - 1)
    }

    /// Is it that of a message?
    #[must_use]
    pub fn is_message(&self) -> bool {
        self.number >> 63 != 0
    }

    /// Its file in the session's directory.
    #[must_use]
    pub fn file_name(&self) -> String {
        format!("x{}-{:x}-{}", self.exchange, self.number, self.from)
    }

    /// The file with what the members' contributions were reduced to, if one of them has left it.
    #[must_use]
    pub fn result_name(exchange: u32, number: u64) -> String {
        format!("x{exchange}-{number:x}-result")
    }
}

/// Key of the configuration text that is `1` where only some of the live ranks run at a time.
pub const CONFIG_TURNS: &str = "turns";
/// Key of the configuration text that is `1` where the user has rules for values.
pub const CONFIG_RULES: &str = "rules";

/// Key of the configuration text under which the engine lists the ranks that run for real, separated by commas.
pub const CONFIG_LIVE: &str = "live";

/// Key of the configuration text that says how the host's time is found, and its value for measured CPU time; without the
/// key, calls have constant costs.
pub const CONFIG_HOST_TIME: &str = "host_time";
/// See [`CONFIG_HOST_TIME`].
pub const HOST_TIME_MEASURED: &str = "measured";

/// Key of the configuration text that is `1` where equal work on an idle stream takes equal time, so that a process may
/// foresee answers ([`FLAG_FORESEEN`](crate::message::FLAG_FORESEEN)).
pub const CONFIG_FORESIGHT: &str = "foresight";

/// Name of the environment variable that holds the path of the session's socket. Without it every shim is inert.
pub const ENV_SESSION: &str = "PRISM_SESSION";
/// Name of the environment variable that names the rank a process plays (the launcher sets it beside `RANK`).
pub const ENV_RANK: &str = "PRISM_RANK";
/// Name of the environment variable that holds the target job's world size.
pub const ENV_WORLD_SIZE: &str = "PRISM_WORLD_SIZE";
/// Name of the environment variable that picks the device: `emulated`, `real` or `host`.
pub const ENV_DEVICE: &str = "PRISM_DEVICE";
/// Name of the environment variable with the path of a real NCCL, for communicators of ranks that all run on real devices.
pub const ENV_REAL_NCCL: &str = "PRISM_REAL_NCCL";
/// Name of the environment variable that overrides the version answered by `ncclGetVersion`.
pub const ENV_NCCL_VERSION: &str = "PRISM_NCCL_VERSION";
