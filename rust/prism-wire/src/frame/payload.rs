//! Values for the payloads of control frames.

use super::FrameError;
use crate::control::{ControlKind, UNIQUE_ID_BYTES};
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
    CommInit { comm_id: u32, nranks: u32, group_rank: u32, unique_id: [u8; UNIQUE_ID_BYTES] },
    CommSplit { comm_id: u32, parent: u32, color: i32, key: i32, group_name: String },
    Unsupported { name: String },
    Note { count: u64, text: String },
    CommMembers { comm_id: u32, parent: u32, ranks: Vec<u32> },
    CommMemory { comm_id: u32 },
    CommEstimate { comm_id: u32, f: u32, root: u32, count: u64 },
    Timeline,
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
                out.reserve(4 + 4 * ranks.len() + name.len());
                out.extend((ranks.len() as u32).to_le_bytes());
                out.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
                out.extend(name.as_bytes());
                ControlKind::Group
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
            ControlKind::Timeline => {
                fields.end()?;
                Self::Timeline
            }
            ControlKind::Refused => return Err(FrameError::NotARequest(kind)),
        })
    }
}

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
