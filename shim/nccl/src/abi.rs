//! NCCL's types as C programs lay them out, by version.
//!
//! Structs of the caller are never trusted to have our size: they say their own size and the version they were compiled
//! with, and only what both sides know is read.

use crate::guard::{Failure, Outcome};
use core::ffi::{c_char, c_int, c_uint, c_void};
use prism_wire::message::DataType;

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Success = 0,
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
}

impl Code {
    /// The code with this number; anything unknown is an internal error.
    pub(crate) fn from_i32(value: i32) -> Self {
        match value {
            0 => Self::Success,
            1 => Self::UnhandledCudaError,
            2 => Self::SystemError,
            4 => Self::InvalidArgument,
            5 => Self::InvalidUsage,
            6 => Self::RemoteError,
            7 => Self::InProgress,
            _ => Self::InternalError,
        }
    }
}

/// NCCL's version code.
pub(crate) const fn version_code(major: i32, minor: i32, patch: i32) -> i32 {
    if major <= 2 && minor <= 8 { major * 1_000 + minor * 100 + patch } else { major * 10_000 + minor * 100 + patch }
}

/// `ncclUniqueId`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawUniqueId(pub(crate) [u8; prism_wire::control::UNIQUE_ID_BYTES]);

/// `ncclTeam_t`, passed and returned by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Team {
    pub(crate) nranks: c_int,
    pub(crate) rank: c_int,
    pub(crate) stride: c_int,
}
const _: () = assert!(size_of::<Team>() == 12);

impl Team {
    /// No team.
    pub(crate) const EMPTY: Self = Self { nranks: 0, rank: 0, stride: 0 };
}

/// NCCL's data types by number.
const TYPES: [DataType; 12] = {
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
    ]
};

/// The data type a caller named.
#[inline]
pub(crate) fn data_type(number: c_int) -> Option<DataType> {
    TYPES.get(usize::try_from(number).ok()?).copied()
}

/// Marks a struct made by one of NCCL's initializer macros.
pub(crate) const API_MAGIC: u32 = 0xcafe_beef;
/// The same for [`SimInfo`].
pub(crate) const SIM_MAGIC: u32 = 0x7468_5283;
/// "Not set" of an integer option.
pub(crate) const UNDEF_INT: i32 = i32::MIN;
/// Colour of a rank that takes part in a split and gets no communicator.
pub(crate) const SPLIT_NOCOLOR: i32 = -1;

/// `ncclSimInfo_t`.
#[repr(C)]
pub(crate) struct SimInfo {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) estimated_time: f32,
}
const _: () = assert!(size_of::<SimInfo>() == 24);

/// `ncclCollConfig_t` (2.32).
#[repr(C)]
pub(crate) struct CollConfig {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) ext: *const c_void,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) nvls_ctas: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) alg_selection: *const c_char,
    pub(crate) force_alg_selection: c_int,
    pub(crate) cta_policy: c_int,
    pub(crate) profiler_tag: u64,
    pub(crate) launch_completion_event: *const c_void,
}
const _: () = assert!(size_of::<CollConfig>() == 72);

/// Size of the largest `ncclConfig_t` we know (2.32).
const CONFIG_BYTES: usize = 120;

/// An integer option of `ncclConfig_t`.
struct Field {
    name: &'static str,
    offset: usize,
    /// Version that introduced it: a caller compiled with an older one has padding or nothing there.
    since: i32,
    valid: fn(i32) -> bool,
}

const fn field(name: &'static str, offset: usize, minor: i32, patch: i32, valid: fn(i32) -> bool) -> Field {
    Field { name, offset, since: version_code(2, minor, patch), valid }
}

fn any(_: i32) -> bool {
    true
}
fn boolean(value: i32) -> bool {
    value == 0 || value == 1
}
fn positive(value: i32) -> bool {
    value > 0
}
fn not_negative(value: i32) -> bool {
    value >= 0
}

const BLOCKING: usize = 16;
const MIN_CTAS: usize = 24;
const MAX_CTAS: usize = 28;

/// Checked options. Pointers (`netName` at 32, `commName` at 48) are not read.
const FIELDS: [Field; 21] = [
    field("blocking", BLOCKING, 14, 0, boolean),
    field("cgaClusterSize", 20, 17, 0, not_negative),
    field("minCTAs", MIN_CTAS, 17, 0, positive),
    field("maxCTAs", MAX_CTAS, 17, 0, positive),
    field("splitShare", 40, 18, 0, boolean),
    field("trafficClass", 44, 25, 0, any),
    field("collnetEnable", 56, 27, 0, boolean),
    field("CTAPolicy", 60, 27, 0, |value| (0..=3).contains(&value)),
    field("shrinkShare", 64, 27, 0, boolean),
    field("nvlsCTAs", 68, 27, 0, positive),
    field("nChannelsPerNetPeer", 72, 28, 0, |value| (1..=64).contains(&value)),
    field("nvlinkCentricSched", 76, 28, 0, boolean),
    field("graphUsageMode", 80, 29, 0, |value| (0..=2).contains(&value)),
    field("numRmaCtx", 84, 29, 0, not_negative),
    field("maxP2pPeers", 88, 30, 0, positive),
    field("graphStreamOrdering", 92, 30, 5, boolean),
    field("launchOrderImplicit", 96, 31, 0, any),
    field("numRmaSig", 100, 31, 0, any),
    field("rmaEagerInit", 104, 31, 0, any),
    field("hostCftMode", 108, 31, 0, any),
    field("nvlsHostMode", 112, 32, 0, any),
];

/// What we use of `ncclConfig_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommConfig {
    /// Do calls return only when they are done? (They do anyway: nothing takes time here.)
    pub(crate) blocking: bool,
}

impl CommConfig {
    /// What no configuration at all means.
    pub(crate) const DEFAULT: Self = Self { blocking: true };

    /// Reads the caller's `ncclConfig_t`.
    ///
    /// # Safety
    /// `config` points to a `size_t` and to as many bytes as that says (or to [`CONFIG_BYTES`], if it says more).
    pub(crate) unsafe fn read(config: *const c_void) -> Result<Self, Failure> {
        let mut bytes = [0_u8; CONFIG_BYTES];
        // SAFETY: promised by the caller; the struct may be unaligned for all we know.
        let size = unsafe { config.cast::<usize>().read_unaligned() }.min(CONFIG_BYTES);
        // SAFETY: as above, and `size` is within `bytes`.
        unsafe { core::ptr::copy_nonoverlapping(config.cast::<u8>(), bytes.as_mut_ptr(), size) };
        Self::parse(&bytes[..size])
    }

    fn parse(bytes: &[u8]) -> Result<Self, Failure> {
        let word = |offset: usize| {
            let bytes = bytes.get(offset..offset + 4)?;
            Some(i32::from_le_bytes(bytes.try_into().expect("four bytes were taken")))
        };
        if word(8) != Some(API_MAGIC as i32) {
            return Err(Failure::new(Code::InvalidArgument, "ncclConfig_t was not made by NCCL_CONFIG_INITIALIZER"));
        }
        let version = word(12).unwrap_or(0);
        let value = |field: &Field| word(field.offset).filter(|_| version >= field.since).unwrap_or(UNDEF_INT);
        for field in &FIELDS {
            let value = value(field);
            if value != UNDEF_INT && !(field.valid)(value) {
                let text = format!("value {value} of config attribute {} is invalid", field.name);
                return Err(Failure::new(Code::InvalidArgument, text));
            }
        }
        let by_offset = |offset| FIELDS.iter().find(|field| field.offset == offset).map_or(UNDEF_INT, value);
        // As in NCCL, a minimum without a maximum is above it: "not set" is the smallest integer.
        let (min_ctas, max_ctas) = (by_offset(MIN_CTAS), by_offset(MAX_CTAS));
        if min_ctas > max_ctas {
            let text = format!("config minCTAs {min_ctas} is above maxCTAs {max_ctas}");
            return Err(Failure::new(Code::InvalidArgument, text));
        }
        Ok(Self { blocking: by_offset(BLOCKING) != 0 })
    }
}

impl CollConfig {
    /// Can this configuration be honoured? Limits on channels and CTAs are hints and change nothing here; a forced
    /// algorithm, an extension or a completion event would be silently lost and are refused.
    pub(crate) fn check(&self, function: &'static str) -> Outcome {
        if self.magic != API_MAGIC {
            return Err(Failure::new(
                Code::InvalidArgument,
                format!("{function}: ncclCollConfig_t was not made by NCCL_COLLCONFIG_INITIALIZER"),
            ));
        }
        // The completion event came with the full 2.32 struct; a shorter one ends before it.
        let has_event = self.size >= size_of::<Self>() && !self.launch_completion_event.is_null();
        let has_algorithm = self.force_alg_selection == 1 && !self.alg_selection.is_null();
        if has_event || has_algorithm || !self.ext.is_null() {
            return crate::ops::refuse_part(function, "with algSelection, ext or launchCompletionEvent");
        }
        Ok(())
    }
}

/// Offsets in `ncclCommProperties_t`.
pub(crate) mod properties {
    /// `magic`.
    pub(crate) const MAGIC: usize = 8;
    /// `rank`, `nRanks`, `cudaDev`, `nvmlDev`: four integers.
    pub(crate) const RANK: usize = 16;
    /// The capabilities start here.
    pub(crate) const CAPABILITIES: usize = 32;
    /// Size of the largest version we know, rounded up.
    pub(crate) const MAX_BYTES: usize = 160;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A config of `size` bytes as `NCCL_CONFIG_INITIALIZER` of `version` makes it.
    fn config(size: usize, version: i32) -> Vec<u8> {
        let mut bytes = vec![0; size];
        bytes[..8].copy_from_slice(&(size as u64).to_le_bytes());
        bytes[8..12].copy_from_slice(&API_MAGIC.to_le_bytes());
        bytes[12..16].copy_from_slice(&version.to_le_bytes());
        for field in FIELDS.iter().filter(|field| field.offset + 4 <= size && version >= field.since) {
            bytes[field.offset..field.offset + 4].copy_from_slice(&UNDEF_INT.to_le_bytes());
        }
        bytes
    }

    fn with(mut bytes: Vec<u8>, offset: usize, value: i32) -> Vec<u8> {
        bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    const SIZES: [(usize, i32); 7] =
        [(48, 21_803), (72, 22_707), (80, 22_809), (88, 22_907), (96, 23_007), (112, 23_102), (120, 23_203)];

    #[test]
    fn every_size_is_read() {
        for (size, version) in SIZES {
            assert_eq!(CommConfig::parse(&config(size, version)).unwrap(), CommConfig::DEFAULT);
            let non_blocking = with(config(size, version), BLOCKING, 0);
            assert!(!CommConfig::parse(&non_blocking).unwrap().blocking);
            let bad = with(config(size, version), BLOCKING, 2);
            assert_eq!(CommConfig::parse(&bad).unwrap_err().code, Code::InvalidArgument);
        }
    }

    #[test]
    fn newer_fields_of_an_older_caller_are_padding() {
        // 2.18 has 48 bytes as 2.25 does, but what is trafficClass there is padding in 2.18.
        let bytes = with(config(48, 21_803), 44, 0x5555);
        assert_eq!(CommConfig::parse(&bytes).unwrap(), CommConfig::DEFAULT);
        // graphStreamOrdering came with 2.30.5.
        assert!(CommConfig::parse(&with(config(96, 23_004), 92, 77)).is_ok());
        assert!(CommConfig::parse(&with(config(96, 23_005), 92, 77)).is_err());
    }

    #[test]
    fn data_types_are_in_the_order_of_their_numbers() {
        assert!(TYPES.iter().enumerate().all(|(number, dtype)| *dtype as usize == number));
        assert_eq!((data_type(-1), data_type(12)), (None, None));
    }

    #[test]
    fn wrong_magic_and_bad_limits_are_refused() {
        assert!(CommConfig::parse(&with(config(96, 23_007), 8, 0)).is_err());
        assert!(CommConfig::parse(&config(96, 23_007)[..10]).is_err());
        assert!(CommConfig::parse(&with(config(96, 23_007), MIN_CTAS, 4)).is_err());
        let both = with(with(config(96, 23_007), MIN_CTAS, 4), MAX_CTAS, 8);
        assert!(CommConfig::parse(&both).is_ok());
    }
}
