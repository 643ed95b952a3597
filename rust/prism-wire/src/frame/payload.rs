//! Values for the payloads of control frames.

use super::FrameError;
use crate::control::{Contribution, ControlKind, UNIQUE_ID_BYTES};
use crate::message::PROTOCOL_VERSION;

/// What plays the accelerator of a training process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMode {
    /// The emulated CUDA device.
    Emulated,
    /// A real CUDA device.
    Real,
    /// No device: tensors live in host memory.
    Host,
}

impl DeviceMode {
    const ALL: [(Self, u32, &'static str); 3] =
        [(Self::Emulated, 0, "emulated"), (Self::Real, 1, "real"), (Self::Host, 2, "host")];

    /// The mode with the name used in [`crate::control::ENV_DEVICE`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.2 == name).map(|mode| mode.0)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|mode| mode.0 == self).expect("ALL lists every mode").2
    }

    fn from_u32(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.1 == number).map(|mode| mode.0)
    }

    fn as_u32(self) -> u32 {
        Self::ALL.into_iter().find(|mode| mode.0 == self).expect("ALL lists every mode").1
    }
}

/// How a training process introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The process's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// The rank it plays.
    pub rank: u32,
    /// World size of the target job, as the process understands it.
    pub world_size: u32,
    /// Its process id, as it sees it itself.
    pub pid: u32,
    /// What plays its accelerator.
    pub device: DeviceMode,
}

impl Hello {
    /// The introduction of the calling process.
    pub fn new(rank: u32, world_size: u32, device: DeviceMode) -> Self {
        Self { protocol: PROTOCOL_VERSION, rank, world_size, pid: std::process::id(), device }
    }
}

/// A request of a training process. See [`ControlKind`] for what each one means.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are described with ControlKind")]
pub enum Request {
    Hello(Hello),
    Name { id: u32, text: String },
    Group { ranks: Vec<u32>, name: String },
    Groups(Vec<NamedGroup>),
    CommInit { comm_id: u32, nranks: u32, group_rank: u32, unique_id: [u8; UNIQUE_ID_BYTES] },
    CommSplit { comm_id: u32, parent: u32, color: i32, key: i32, group_name: String },
    Unsupported { name: String },
    Note { count: u64, text: String },
    CommMembers { comm_id: u32, parent: u32, ranks: Vec<u32> },
    CommMemory { comm_id: u32 },
    CommEstimate { comm_id: u32, f: u32, root: u32, count: u64 },
    ReleaseErrors { count: u64, p50_ns: u64, p99_ns: u64, max_ns: u64 },
    CommPeers { comm_id: u32 },
    CommExchange { comm_id: u32 },
    Contribute { parks: bool, contributions: Vec<Contribution> },
    Await { contributions: Vec<Contribution> },
    Taken { contributions: Vec<Contribution> },
    Values(ValuesRequest),
    Tier { comm_id: u32, kind: u32, tier: u32, count: u64 },
    Timeline,
}

/// A process group of [`ControlKind::Groups`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are described with ControlKind::Group")]
pub struct NamedGroup {
    pub ranks: Vec<u32>,
    pub name: String,
}

/// See [`ControlKind::Values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are described with ControlKind")]
pub struct ValuesRequest {
    pub comm_id: u32,
    pub kind: u32,
    pub dtype: u32,
    pub op: u32,
    pub root: u32,
    pub number: u64,
    pub count: u64,
    pub row_bytes: u64,
}

impl Request {
    /// Kind and payload of the frame.
    pub fn encode(&self) -> (ControlKind, Vec<u8>) {
        let mut out = Vec::new();
        let kind = match self {
            Self::Hello(hello) => {
                for field in [hello.protocol, hello.rank, hello.world_size, hello.pid, hello.device.as_u32()] {
                    out.extend(field.to_le_bytes());
                }
                ControlKind::Hello
            }
            Self::Name { id, text } => {
                out.extend(id.to_le_bytes());
                out.extend(text.as_bytes());
                ControlKind::Name
            }
            Self::Group { ranks, name } => {
                encode_group(&mut out, ranks, name.as_bytes());
                ControlKind::Group
            }
            Self::Groups(groups) => {
                for group in groups {
                    append_group(&mut out, &group.ranks, group.name.as_bytes());
                }
                ControlKind::Groups
            }
            Self::CommInit { comm_id, nranks, group_rank, unique_id } => {
                for field in [comm_id, nranks, group_rank] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(unique_id);
                ControlKind::CommInit
            }
            Self::CommSplit { comm_id, parent, color, key, group_name } => {
                out.extend(comm_id.to_le_bytes());
                out.extend(parent.to_le_bytes());
                out.extend(color.to_le_bytes());
                out.extend(key.to_le_bytes());
                out.extend(group_name.as_bytes());
                ControlKind::CommSplit
            }
            Self::Unsupported { name } => {
                out.extend(name.as_bytes());
                ControlKind::Unsupported
            }
            Self::Note { count, text } => {
                out.extend(count.to_le_bytes());
                out.extend(text.as_bytes());
                ControlKind::Note
            }
            Self::CommMembers { comm_id, parent, ranks } => {
                out.reserve(12 + 4 * ranks.len());
                for field in [*comm_id, *parent, ranks.len() as u32] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
                ControlKind::CommMembers
            }
            Self::CommMemory { comm_id } => {
                out.extend(comm_id.to_le_bytes());
                ControlKind::CommMemory
            }
            Self::CommEstimate { comm_id, f, root, count } => {
                for field in [comm_id, f, root] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(count.to_le_bytes());
                ControlKind::CommEstimate
            }
            Self::ReleaseErrors { count, p50_ns, p99_ns, max_ns } => {
                for field in [count, p50_ns, p99_ns, max_ns] {
                    out.extend(field.to_le_bytes());
                }
                ControlKind::ReleaseErrors
            }
            Self::CommPeers { comm_id } => {
                out.extend(comm_id.to_le_bytes());
                ControlKind::CommPeers
            }
            Self::CommExchange { comm_id } => {
                out.extend(comm_id.to_le_bytes());
                ControlKind::CommExchange
            }
            Self::Contribute { parks, contributions } => {
                encode_contributions(&mut out, *parks, contributions);
                ControlKind::Contribute
            }
            Self::Await { contributions } => {
                encode_contributions(&mut out, false, contributions);
                ControlKind::Await
            }
            Self::Taken { contributions } => {
                encode_contributions(&mut out, false, contributions);
                ControlKind::Taken
            }
            Self::Values(values) => {
                for field in [values.comm_id, values.kind, values.dtype, values.op, values.root] {
                    out.extend(field.to_le_bytes());
                }
                for field in [values.number, values.count, values.row_bytes] {
                    out.extend(field.to_le_bytes());
                }
                ControlKind::Values
            }
            Self::Tier { comm_id, kind, tier, count } => {
                for field in [comm_id, kind, tier] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(count.to_le_bytes());
                ControlKind::Tier
            }
            Self::Timeline => ControlKind::Timeline,
        };
        (kind, out)
    }

    /// The request in a frame.
    pub fn decode(kind: ControlKind, payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields { kind, rest: payload };
        Ok(match kind {
            ControlKind::Hello => Self::Hello(fields.hello()?),
            ControlKind::Name => Self::Name { id: fields.u32()?, text: fields.text()? },
            ControlKind::Group => Self::Group { ranks: fields.u32_list()?, name: fields.text()? },
            ControlKind::Groups => Self::Groups(fields.groups()?),
            ControlKind::CommInit => {
                let request = Self::CommInit {
                    comm_id: fields.u32()?,
                    nranks: fields.u32()?,
                    group_rank: fields.u32()?,
                    unique_id: fields.array()?,
                };
                fields.end()?;
                request
            }
            ControlKind::CommSplit => Self::CommSplit {
                comm_id: fields.u32()?,
                parent: fields.u32()?,
                color: fields.i32()?,
                key: fields.i32()?,
                group_name: fields.text()?,
            },
            ControlKind::Unsupported => Self::Unsupported { name: fields.text()? },
            ControlKind::Note => Self::Note { count: u64::from_le_bytes(fields.array()?), text: fields.text()? },
            ControlKind::CommMembers => {
                let request =
                    Self::CommMembers { comm_id: fields.u32()?, parent: fields.u32()?, ranks: fields.u32_list()? };
                fields.end()?;
                request
            }
            ControlKind::CommMemory => {
                let request = Self::CommMemory { comm_id: fields.u32()? };
                fields.end()?;
                request
            }
            ControlKind::CommEstimate => {
                let request = Self::CommEstimate {
                    comm_id: fields.u32()?,
                    f: fields.u32()?,
                    root: fields.u32()?,
                    count: u64::from_le_bytes(fields.array()?),
                };
                fields.end()?;
                request
            }
            ControlKind::ReleaseErrors => {
                let mut field = || fields.array().map(u64::from_le_bytes);
                let request =
                    Self::ReleaseErrors { count: field()?, p50_ns: field()?, p99_ns: field()?, max_ns: field()? };
                fields.end()?;
                request
            }
            ControlKind::CommPeers => {
                let request = Self::CommPeers { comm_id: fields.u32()? };
                fields.end()?;
                request
            }
            ControlKind::CommExchange => {
                let request = Self::CommExchange { comm_id: fields.u32()? };
                fields.end()?;
                request
            }
            ControlKind::Contribute => {
                let (parks, contributions) = fields.contributions(true)?;
                Self::Contribute { parks, contributions }
            }
            ControlKind::Await => Self::Await { contributions: fields.contributions(false)?.1 },
            ControlKind::Taken => Self::Taken { contributions: fields.contributions(false)?.1 },
            ControlKind::Values => {
                let values = ValuesRequest {
                    comm_id: fields.u32()?,
                    kind: fields.u32()?,
                    dtype: fields.u32()?,
                    op: fields.u32()?,
                    root: fields.u32()?,
                    number: fields.u64()?,
                    count: fields.u64()?,
                    row_bytes: fields.u64()?,
                };
                fields.end()?;
                Self::Values(values)
            }
            ControlKind::Tier => {
                let (comm_id, kind, tier) = (fields.u32()?, fields.u32()?, fields.u32()?);
                let request = Self::Tier { comm_id, kind, tier, count: fields.u64()? };
                fields.end()?;
                request
            }
            ControlKind::Timeline => {
                fields.end()?;
                Self::Timeline
            }
            ControlKind::Refused => return Err(FrameError::NotARequest(kind)),
        })
    }
}

fn encode_group(out: &mut Vec<u8>, ranks: &[u32], name: &[u8]) {
    out.reserve(4 + 4 * ranks.len() + name.len());
    out.extend((ranks.len() as u32).to_le_bytes());
    out.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
    out.extend(name);
}

/// Adds a group to the payload of a [`ControlKind::Groups`] frame.
pub(crate) fn append_group(out: &mut Vec<u8>, ranks: &[u32], name: &[u8]) {
    out.extend((4 + 4 * ranks.len() as u32 + name.len() as u32).to_le_bytes());
    encode_group(out, ranks, name);
}

fn encode_contributions(out: &mut Vec<u8>, parks: bool, contributions: &[Contribution]) {
    out.reserve(8 + CONTRIBUTION_BYTES * contributions.len());
    out.extend(u32::from(parks).to_le_bytes());
    out.extend((contributions.len() as u32).to_le_bytes());
    for contribution in contributions {
        out.extend(contribution.exchange.to_le_bytes());
        out.extend(contribution.from.to_le_bytes());
        out.extend(contribution.number.to_le_bytes());
        out.extend(contribution.readers.to_le_bytes());
    }
}

const CONTRIBUTION_BYTES: usize = 20;

/// Answer to [`Request::Hello`]; the descriptor of the shared segment travels beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloAnswer {
    /// The engine's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// Capacity of the ring in records.
    pub ring_records: u32,
    /// Configuration: lines `key=value`.
    pub config: String,
}

impl HelloAnswer {
    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.config.len());
        out.extend(self.protocol.to_le_bytes());
        out.extend(self.ring_records.to_le_bytes());
        out.extend(self.config.as_bytes());
        out
    }

    /// The answer in a payload.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields { kind: ControlKind::Hello, rest: payload };
        Ok(Self { protocol: fields.u32()?, ring_records: fields.u32()?, config: fields.text()? })
    }
}

/// Answer to [`Request::CommSplit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommSplitAnswer {
    /// Size of the new communicator; 0 for colour -1.
    pub nranks: u32,
    /// The process's rank in it; 0 for colour -1.
    pub group_rank: u32,
}

impl CommSplitAnswer {
    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8);
        out.extend(self.nranks.to_le_bytes());
        out.extend(self.group_rank.to_le_bytes());
        out
    }

    /// The answer in a payload.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields { kind: ControlKind::CommSplit, rest: payload };
        let answer = Self { nranks: fields.u32()?, group_rank: fields.u32()? };
        fields.end()?;
        Ok(answer)
    }
}

/// Answer to [`Request::CommPeers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommPeersAnswer {
    /// Every member is a process of this session.
    pub all_live: bool,
    /// The same for all members, different for each communicator of the session.
    pub key: [u8; 16],
}

impl CommPeersAnswer {
    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        [&u32::from(self.all_live).to_le_bytes()[..], &self.key].concat()
    }

    /// The answer in a payload.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields { kind: ControlKind::CommPeers, rest: payload };
        let all_live = match fields.u32()? {
            0 => false,
            1 => true,
            _ => return Err(FrameError::BadValue { kind: ControlKind::CommPeers, field: "all_live" }),
        };
        let answer = Self { all_live, key: fields.array()? };
        fields.end()?;
        Ok(answer)
    }
}

/// Takes fields from the front of a payload.
struct Fields<'a> {
    kind: ControlKind,
    rest: &'a [u8],
}

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(FrameError::Truncated(self.kind))?;
        self.rest = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, FrameError> {
        self.array().map(i32::from_le_bytes)
    }

    fn u32_list(&mut self) -> Result<Vec<u32>, FrameError> {
        let count = self.u32()? as usize;
        let bytes = count.checked_mul(4).ok_or(FrameError::Truncated(self.kind))?;
        let (list, rest) = self.rest.split_at_checked(bytes).ok_or(FrameError::Truncated(self.kind))?;
        self.rest = rest;
        Ok(list.chunks_exact(4).map(|item| u32::from_le_bytes([item[0], item[1], item[2], item[3]])).collect())
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    /// All that is left: groups, each behind its length.
    fn groups(&mut self) -> Result<Vec<NamedGroup>, FrameError> {
        let mut groups = Vec::new();
        while !self.rest.is_empty() {
            let bytes = self.u32()? as usize;
            let (group, rest) = self.rest.split_at_checked(bytes).ok_or(FrameError::Truncated(self.kind))?;
            let mut fields = Fields { kind: self.kind, rest: group };
            groups.push(NamedGroup { ranks: fields.u32_list()?, name: fields.text()? });
            self.rest = rest;
        }
        Ok(groups)
    }

    /// All that is left: whether the process parks (if it may), and the list.
    fn contributions(&mut self, may_park: bool) -> Result<(bool, Vec<Contribution>), FrameError> {
        let (parks, count) = (self.u32()?, self.u32()? as usize);
        if parks > u32::from(may_park) {
            return Err(FrameError::BadValue { kind: self.kind, field: "parks" });
        }
        if self.rest.len() < count.saturating_mul(CONTRIBUTION_BYTES) {
            return Err(FrameError::Truncated(self.kind));
        }
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            let (exchange, from, number) = (self.u32()?, self.u32()?, self.u64()?);
            list.push(Contribution { exchange, from, number, readers: self.u32()? });
        }
        self.end()?;
        Ok((parks == 1, list))
    }

    /// The rest of the payload.
    fn text(&mut self) -> Result<String, FrameError> {
        let text = std::str::from_utf8(self.rest).map_err(|_| FrameError::NotText(self.kind))?;
        self.rest = &[];
        Ok(text.to_owned())
    }

    fn hello(&mut self) -> Result<Hello, FrameError> {
        let (protocol, rank, world_size, pid) = (self.u32()?, self.u32()?, self.u32()?, self.u32()?);
        let device = DeviceMode::from_u32(self.u32()?)
            .ok_or(FrameError::BadValue { kind: ControlKind::Hello, field: "device" })?;
        self.end()?;
        Ok(Hello { protocol, rank, world_size, pid, device })
    }

    fn end(&self) -> Result<(), FrameError> {
        if self.rest.is_empty() { Ok(()) } else { Err(FrameError::TrailingBytes(self.kind)) }
    }
}
