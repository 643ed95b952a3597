//! From an accepted socket to a session.

use super::connection::Connection;
use crate::control::ControlKind;
use crate::frame::{self, FrameError, Hello, HelloAnswer, Request};
use crate::message::PROTOCOL_VERSION;
use crate::peer::Peer;
use crate::segment::{Segment, SegmentError};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a connected process may take over its first frame. It sends it at once; one that does not is no client.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a process that connected got no session.
#[derive(Debug)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The connection failed, or the process was silent ([`io::ErrorKind::TimedOut`]).
    Io(io::Error),
    /// The process hung up.
    HungUp,
    /// Its first frame makes no sense.
    BadHello(FrameError),
    /// Its first frame is not a hello.
    NotHello(ControlKind),
    /// It speaks another version of the protocol.
    WrongProtocol {
        /// The process's version.
        client: u32,
    },
    /// The engine did not want it; the text was sent to it.
    Refused {
        /// How the process introduced itself.
        hello: Hello,
        /// Why it was refused.
        reason: String,
    },
    /// No shared segment could be made.
    Segment(SegmentError),
}

impl std::fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "handshake with a training process: {error}"),
            Self::HungUp => f.write_str("a process connected and hung up"),
            Self::BadHello(error) => write!(f, "first frame of a process makes no sense: {error}"),
            Self::NotHello(kind) => write!(f, "first frame of a process is {kind:?} instead of Hello"),
            Self::WrongProtocol { client } => {
                write!(f, "a process speaks protocol version {client}, the engine {PROTOCOL_VERSION}")
            }
            Self::Refused { hello, reason } => {
                write!(f, "refused process {} (rank {}): {reason}", hello.pid, hello.rank)
            }
            Self::Segment(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for HandshakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::BadHello(error) => Some(error),
            Self::Segment(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(frame_error) => Self::BadHello(*frame_error),
            None => Self::Io(error),
        }
    }
}

/// Opens a session with the process behind `stream`: reads its hello, asks `config_text` for the configuration to answer
/// with (or the reason to refuse it), and shares a segment with a ring of `ring_records` (a power of two) with it.
///
/// A process that is not given a session is told why. Takes at most some seconds, whatever the process does.
pub fn handshake(
    stream: UnixStream,
    config_text: impl FnOnce(&Hello) -> Result<String, String>,
    ring_records: u32,
) -> Result<Connection, HandshakeError> {
    let peer = Peer::new(stream)?;
    let deadline = Instant::now().checked_add(HELLO_TIMEOUT);
    let opened = open(&peer, deadline, config_text, ring_records);
    if let Some(text) = opened.as_ref().err().and_then(refusal) {
        // The process may be gone; the error to report is the one we have.
        let _ = frame::write_frame(&mut peer.stream(deadline), ControlKind::Refused, text.as_bytes());
    }
    opened.map(|(hello, segment)| Connection::new(hello, segment, peer))
}

fn open(
    peer: &Peer,
    deadline: Option<Instant>,
    config_text: impl FnOnce(&Hello) -> Result<String, String>,
    ring_records: u32,
) -> Result<(Hello, Segment), HandshakeError> {
    let mut stream = peer.stream(deadline);
    let (kind, payload) = frame::read_frame(&mut stream)?.ok_or(HandshakeError::HungUp)?;
    let hello = match Request::decode(kind, &payload) {
        Ok(Request::Hello(hello)) => hello,
        Ok(_) => return Err(HandshakeError::NotHello(kind)),
        Err(error) => return Err(HandshakeError::BadHello(error)),
    };
    if hello.protocol != PROTOCOL_VERSION {
        return Err(HandshakeError::WrongProtocol { client: hello.protocol });
    }
    let config = config_text(&hello).map_err(|reason| HandshakeError::Refused { hello, reason })?;
    let (segment, memory) = Segment::create(ring_records).map_err(HandshakeError::Segment)?;
    let payload = HelloAnswer { protocol: PROTOCOL_VERSION, ring_records, config }.encode();
    let header = frame::encode_header(ControlKind::Hello, payload.len()).map_err(io::Error::from)?;
    stream.write_all_with(&[&header, payload.as_slice()].concat(), &memory)?;
    Ok((hello, segment))
}

/// What to tell a process that gets no session; `None` where it does not listen.
fn refusal(error: &HandshakeError) -> Option<String> {
    match error {
        HandshakeError::Io(_) | HandshakeError::HungUp => None,
        HandshakeError::Refused { reason, .. } => Some(reason.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn open_within(millis: u64, stream: UnixStream) -> HandshakeError {
        let deadline = Instant::now().checked_add(Duration::from_millis(millis));
        open(&Peer::new(stream).unwrap(), deadline, |_| Ok(String::new()), 64).map(|_| ()).unwrap_err()
    }

    #[test]
    fn a_silent_process_is_given_up() {
        let (_theirs, ours) = UnixStream::pair().unwrap();
        let error = open_within(30, ours);
        assert!(matches!(error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::TimedOut));
    }

    #[test]
    fn a_process_that_stops_in_its_hello_is_given_up() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        theirs.write_all(&[1, 0, 0, 0, 20, 0, 0, 0, 1]).unwrap();
        let error = open_within(30, ours);
        assert!(matches!(error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::TimedOut));
    }

    #[test]
    fn a_bad_ring_size_is_the_engines_error_and_told_to_the_process() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let hello = Hello::new(0, 1, frame::DeviceMode::Host);
        let (kind, payload) = Request::Hello(hello).encode();
        frame::write_frame(&mut theirs, kind, &payload).unwrap();
        let error = handshake(ours, |_| Ok(String::new()), 1000).map(|_| ()).unwrap_err();
        assert!(matches!(error, HandshakeError::Segment(SegmentError::BadCapacity(1000))));
        assert_eq!(frame::read_frame(&mut theirs).unwrap().unwrap().0, ControlKind::Refused);
    }
}
