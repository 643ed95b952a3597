//! Control frames as bytes: the framing itself, and a typed value for the payload of every [`ControlKind`].
//!
//! Decoding never panics and never allocates more than the bytes it was given, whatever they are.

mod payload;

pub(crate) use payload::append_group;
pub use payload::{
    CommPeersAnswer, CommSplitAnswer, DeviceMode, Hello, HelloAnswer, NamedGroup, Request, ValuesRequest,
};

use crate::control::ControlKind;
use std::io::{self, Read, Write};

/// Longest payload of a frame in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;
/// Size of what precedes a payload: kind and length.
pub const HEADER_BYTES: usize = 8;

/// Bytes that are no frame, or no payload of the kind they claim to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// No [`ControlKind`] has this number.
    UnknownKind(u32),
    /// The payload is longer than [`MAX_PAYLOAD_BYTES`].
    TooLong {
        /// Length of the payload.
        bytes: usize,
    },
    /// The payload ends inside a field.
    Truncated(ControlKind),
    /// The payload goes on behind its last field.
    TrailingBytes(ControlKind),
    /// A text is not UTF-8.
    NotText(ControlKind),
    /// A field has a value that means nothing.
    BadValue {
        /// What the payload was decoded as.
        kind: ControlKind,
        /// Name of the field.
        field: &'static str,
    },
    /// The kind is only used in answers.
    NotARequest(ControlKind),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::UnknownKind(number) => write!(f, "unknown control frame kind {number}"),
            Self::TooLong { bytes } => {
                write!(f, "control frame of {bytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
            }
            Self::Truncated(kind) => write!(f, "payload of {kind:?} frame is cut short"),
            Self::TrailingBytes(kind) => write!(f, "payload of {kind:?} frame is too long"),
            Self::NotText(kind) => write!(f, "text in {kind:?} frame is not UTF-8"),
            Self::BadValue { kind, field } => write!(f, "field {field} of {kind:?} frame has a meaningless value"),
            Self::NotARequest(kind) => write!(f, "{kind:?} frame is not a request"),
        }
    }
}

impl std::error::Error for FrameError {}

impl From<FrameError> for io::Error {
    fn from(error: FrameError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// The bytes before a payload of `payload_bytes` bytes.
pub fn encode_header(kind: ControlKind, payload_bytes: usize) -> Result<[u8; HEADER_BYTES], FrameError> {
    if payload_bytes > MAX_PAYLOAD_BYTES {
        return Err(FrameError::TooLong { bytes: payload_bytes });
    }
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..].copy_from_slice(&(payload_bytes as u32).to_le_bytes());
    Ok(header)
}

/// Kind and payload length that a header announces.
pub fn decode_header(header: [u8; HEADER_BYTES]) -> Result<(ControlKind, usize), FrameError> {
    let [k0, k1, k2, k3, l0, l1, l2, l3] = header;
    let number = u32::from_le_bytes([k0, k1, k2, k3]);
    let bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if bytes > MAX_PAYLOAD_BYTES {
        return Err(FrameError::TooLong { bytes });
    }
    Ok((ControlKind::from_u32(number).ok_or(FrameError::UnknownKind(number))?, bytes))
}

/// Writes one frame.
pub fn write_frame(writer: &mut impl Write, kind: ControlKind, payload: &[u8]) -> io::Result<()> {
    writer.write_all(&encode_header(kind, payload.len())?)?;
    writer.write_all(payload)
}

/// Reads one frame; `None` where the stream ends before it starts.
pub fn read_frame(reader: &mut impl Read) -> io::Result<Option<(ControlKind, Vec<u8>)>> {
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match reader.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let (kind, bytes) = decode_header(header)?;
    Ok(Some((kind, read_payload(reader, bytes)?)))
}

/// Reads a payload of exactly `bytes` bytes. Memory grows with what arrives, not with what was announced.
pub(crate) fn read_payload(reader: &mut impl Read, bytes: usize) -> io::Result<Vec<u8>> {
    let mut payload = Vec::new();
    if reader.take(bytes as u64).read_to_end(&mut payload)? < bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(payload)
}

#[cfg(all(test, not(prism_loom)))]
mod tests;
