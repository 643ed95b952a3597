//! The training process's side of a session. Used inside preloaded libraries: nothing here panics, reads a clock or
//! raises a signal, and the hot path does not allocate.

use crate::control::ControlKind;
use crate::fork::Owner;
use crate::frame::{self, FrameError, Hello, HelloAnswer, Request};
use crate::lock::SpinLock;
use crate::message::{PROTOCOL_VERSION, Record, Reply};
use crate::peer::{Peer, PeerStream};
use crate::reply::{ReplySlot, SlotAllocator};
use crate::ring::{Producer, PushError};
use crate::segment::{Segment, SegmentError};
use crate::sys;
use crate::wait::{Futex, Gate, LIVENESS_SLICE, Spin};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The session is over: the engine died or closed it, or the caller is a forked child of the process that opened it.
/// Final: every later call answers the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disconnected;

impl std::fmt::Display for Disconnected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the session with the engine is over")
    }
}

impl std::error::Error for Disconnected {}

/// Why no session came about.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConnectError {
    /// The socket could not be reached or used.
    Io(io::Error),
    /// The engine does not want this process; the text says why.
    Refused(String),
    /// The engine speaks another version of the protocol.
    WrongProtocol {
        /// The engine's version.
        engine: u32,
    },
    /// The engine's answer makes no sense.
    BadAnswer(FrameError),
    /// The engine hung up, or sent no segment.
    NoAnswer,
    /// The shared segment is unusable.
    Segment(SegmentError),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "session socket: {error}"),
            Self::Refused(text) => write!(f, "the engine refused this process: {text}"),
            Self::WrongProtocol { engine } => {
                write!(f, "the engine speaks protocol version {engine}, this library {PROTOCOL_VERSION}")
            }
            Self::BadAnswer(error) => write!(f, "the engine's answer makes no sense: {error}"),
            Self::NoAnswer => f.write_str("the engine hung up instead of opening a session"),
            Self::Segment(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::BadAnswer(error) => Some(error),
            Self::Segment(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<FrameError> for ConnectError {
    fn from(error: FrameError) -> Self {
        Self::BadAnswer(error)
    }
}

impl From<SegmentError> for ConnectError {
    fn from(error: SegmentError) -> Self {
        Self::Segment(error)
    }
}

/// Why a control request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// The engine understood the request and refused it; the text says why. The session goes on.
    Refused(String),
    /// See [`Disconnected`].
    Disconnected,
}

impl std::fmt::Display for ControlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(text) => write!(f, "the engine refused the request: {text}"),
            Self::Disconnected => Disconnected.fmt(f),
        }
    }
}

impl std::error::Error for ControlError {}

/// Appends after which the engine's liveness is looked at, so that a program that only appends notices its death too.
const APPENDS_PER_LIVENESS_CHECK: u32 = 256;

/// Groups of others are told when they take this many bytes together.
const GROUPS_BYTES: usize = 256 << 10;

/// The producer's end of the ring, shared by the threads of the process.
#[derive(Debug, Default)]
struct Appender {
    producer: Producer,
    since_check: u32,
}

/// A session of this process with the engine. Any number of threads may use it at once.
///
/// After `fork` the child has no session: every call there returns [`Disconnected`] at once, and dropping the value does
/// not disturb the parent's session.
#[derive(Debug)]
pub struct Client {
    owner: Owner,
    segment: Segment,
    peer: Peer,
    appender: SpinLock<Appender>,
    slots: SlotAllocator,
    /// Slots, one bit each, whose queries were cancelled before the answer came.
    abandoned: AtomicU64,
    /// Where threads wait while all reply slots are taken.
    slot_released: Gate,
    spin: Spin,
    /// Held during a control request and its answer: process groups that are still to be told, as the payload of a
    /// [`ControlKind::Groups`] frame.
    control: Mutex<Vec<u8>>,
    rank: u32,
    config: String,
}

impl Client {
    /// Opens a session through the socket at `socket_path`. Waits for the engine as long as that lives.
    pub fn connect(socket_path: &Path, hello: &Hello) -> Result<Self, ConnectError> {
        let peer = Peer::new(UnixStream::connect(socket_path)?)?;
        let mut stream = peer.stream(None);
        let (kind, payload) = Request::Hello(*hello).encode();
        // A refusal may already be there when the engine hung up on us, so a failed write is not the last word.
        let written = frame::write_frame(&mut stream, kind, &payload);
        let answer = Self::read_hello_answer(&mut stream)?;
        written?;
        let memory = stream.descriptor.take().ok_or(ConnectError::NoAnswer)?;
        let segment = Segment::open(&memory, answer.ring_records)?;
        Ok(Self {
            owner: Owner::new(),
            segment,
            peer,
            appender: SpinLock::default(),
            slots: SlotAllocator::default(),
            abandoned: AtomicU64::new(0),
            slot_released: Gate::new(),
            spin: Spin::new(sys::num_cpus()),
            control: Mutex::default(),
            rank: hello.rank,
            config: answer.config,
        })
    }

    fn read_hello_answer(stream: &mut PeerStream<'_>) -> Result<HelloAnswer, ConnectError> {
        let (kind, payload) = match frame::read_frame(stream) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(ConnectError::NoAnswer),
            Err(error) => return Err(frame_error(&error).map_or(ConnectError::Io(error), ConnectError::BadAnswer)),
        };
        match kind {
            ControlKind::Refused => Err(ConnectError::Refused(String::from_utf8_lossy(&payload).into_owned())),
            ControlKind::Hello => {
                let answer = HelloAnswer::decode(&payload)?;
                if answer.protocol != PROTOCOL_VERSION {
                    return Err(ConnectError::WrongProtocol { engine: answer.protocol });
                }
                Ok(answer)
            }
            other => Err(FrameError::BadValue { kind: other, field: "kind" }.into()),
        }
    }

    /// The configuration text of the engine's welcome: lines `key=value`.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// The value of `key` in the configuration text.
    pub fn config_value(&self, key: &str) -> Option<&str> {
        self.config
            .lines()
            .filter_map(|line| line.split_once('='))
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value)
    }

    /// Appends a record. Waits while the ring is full.
    #[inline]
    pub fn append(&self, record: &Record) -> Result<(), Disconnected> {
        self.append_unless(record, &|| false).map(|_| ())
    }

    /// Appends a record. Waits while the ring is full, until `is_cancelled`: then the record is not appended and the answer
    /// is false. Looks at `is_cancelled` at least every tenth of a second.
    #[inline]
    pub fn append_unless(&self, record: &Record, is_cancelled: &dyn Fn() -> bool) -> Result<bool, Disconnected> {
        loop {
            if !self.is_usable() {
                return Err(Disconnected);
            }
            let mut appender = self.appender.lock();
            match appender.producer.push(self.segment.ring(), &self.segment.slots(), &Futex, record) {
                Ok(()) => {
                    appender.since_check += 1;
                    if appender.since_check < APPENDS_PER_LIVENESS_CHECK {
                        return Ok(true);
                    }
                    appender.since_check = 0;
                    drop(appender);
                    return if self.peer.is_alive() { Ok(true) } else { Err(Disconnected) };
                }
                Err(PushError::Full) => {
                    drop(appender);
                    if !self.wait_for_space(is_cancelled)? {
                        return Ok(false);
                    }
                }
                Err(PushError::Corrupt) => {
                    drop(appender);
                    self.disconnect();
                    return Err(Disconnected);
                }
            }
        }
    }

    /// Appends a query and waits for its answer. The record's `h` is overwritten with the number of a reply slot.
    pub fn query(&self, record: Record) -> Result<Reply, Disconnected> {
        self.query_unless(record, &|| false)?.ok_or(Disconnected)
    }

    /// Like [`Self::query`], but waits only until `is_cancelled`: then there is no answer. Looks at `is_cancelled` at least
    /// every tenth of a second.
    pub fn query_unless(
        &self,
        mut record: Record,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Reply>, Disconnected> {
        self.reclaim_abandoned();
        let index = self.take_slot()?;
        let slot = &self.segment.replies()[index];
        slot.begin();
        record.h = index as u32;
        // Where this fails the session is over, and nobody needs the slot again.
        if !self.append_unless(&record, is_cancelled)? {
            self.release_slot(index);
            return Ok(None);
        }
        let reply = self.wait_for_reply(slot, is_cancelled)?;
        if reply.is_some() {
            self.release_slot(index);
        } else {
            // The answer may still come, and must not be taken for that of another query.
            self.abandoned.fetch_or(1 << index, Ordering::Release);
        }
        Ok(reply)
    }

    fn release_slot(&self, index: usize) {
        self.slots.release(index);
        self.slot_released.notify(&Futex);
    }

    /// Gives back the slots of cancelled queries whose answers have come.
    #[inline]
    fn reclaim_abandoned(&self) {
        let mut left = self.abandoned.load(Ordering::Acquire);
        while left != 0 {
            let index = left.trailing_zeros() as usize;
            left &= left - 1;
            let is_mine = || self.abandoned.fetch_and(!(1 << index), Ordering::AcqRel) & (1 << index) != 0;
            if self.segment.replies()[index].is_answered() && is_mine() {
                self.segment.replies()[index].take();
                self.release_slot(index);
            }
        }
    }

    /// Sends a control request and waits for its answer.
    pub fn control(&self, kind: ControlKind, payload: &[u8]) -> Result<Vec<u8>, ControlError> {
        if !self.is_usable() {
            return Err(ControlError::Disconnected);
        }
        if payload.len() > frame::MAX_PAYLOAD_BYTES {
            return Err(ControlError::Refused(FrameError::TooLong { bytes: payload.len() }.to_string()));
        }
        let mut groups = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        self.tell_groups(&mut groups)?;
        self.ask(kind, payload)
    }

    /// Tells the engine a process group (global ranks in group-rank order). Those of others are told together, before the
    /// next control request or the end: a program may make tens of thousands of them, and nothing depends on when.
    pub fn note_group(&self, ranks: &[u32], name: &str) -> Result<(), ControlError> {
        if ranks.contains(&self.rank) {
            let (kind, payload) = Request::Group { ranks: ranks.to_vec(), name: name.to_owned() }.encode();
            return self.control(kind, &payload).map(|_| ());
        }
        if !self.is_usable() {
            return Err(ControlError::Disconnected);
        }
        let bytes = 8 + 4 * ranks.len() + name.len();
        if bytes > frame::MAX_PAYLOAD_BYTES {
            return Err(ControlError::Refused(FrameError::TooLong { bytes }.to_string()));
        }
        let mut groups = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.len() + bytes > GROUPS_BYTES {
            self.tell_groups(&mut groups)?;
        }
        frame::append_group(&mut groups, ranks, name.as_bytes());
        Ok(())
    }

    /// Tells the engine the groups of others that it has not been told yet.
    pub fn flush_groups(&self) -> Result<(), ControlError> {
        if !self.is_usable() {
            return Err(ControlError::Disconnected);
        }
        self.tell_groups(&mut self.control.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tell_groups(&self, groups: &mut Vec<u8>) -> Result<(), ControlError> {
        if groups.is_empty() {
            return Ok(());
        }
        let payload = std::mem::take(groups);
        self.ask(ControlKind::Groups, &payload).map(|_| ())
    }

    /// A request and its answer. The lock of control requests is held.
    fn ask(&self, kind: ControlKind, payload: &[u8]) -> Result<Vec<u8>, ControlError> {
        let mut stream = self.peer.stream(None);
        let answer = frame::write_frame(&mut stream, kind, payload).and_then(|()| frame::read_frame(&mut stream));
        match answer {
            Ok(Some((ControlKind::Refused, text))) => {
                Err(ControlError::Refused(String::from_utf8_lossy(&text).into_owned()))
            }
            Ok(Some((answered, payload))) if answered == kind => Ok(payload),
            // An answer to something else, a broken frame, a broken connection: question and answer are out of step.
            _ => {
                self.disconnect();
                Err(ControlError::Disconnected)
            }
        }
    }

    /// Ends the session: the engine sees the records appended so far and then the end. Threads that wait for an answer
    /// get [`Disconnected`]. In a forked child does nothing.
    pub fn close(&self) {
        if !self.owner.is_caller() {
            return;
        }
        // Whoever makes a request at this moment tells the groups first.
        if let Ok(mut groups) = self.control.try_lock()
            && self.is_usable()
        {
            // The session ends in any case.
            let _ = self.tell_groups(&mut groups);
        }
        self.disconnect();
    }

    fn disconnect(&self) {
        self.peer.mark_gone();
        self.segment.header().client_closed.store(1, Ordering::Release);
        self.segment.ring().filled.0.notify(&Futex);
        sys::shutdown(self.peer.socket_fd());
        self.segment.replies().iter().for_each(|slot| slot.rouse(&Futex));
        self.segment.ring().drained.0.notify(&Futex);
        self.slot_released.notify(&Futex);
    }

    #[inline]
    fn is_usable(&self) -> bool {
        self.owner.is_caller()
            && !self.peer.is_gone()
            && self.segment.header().engine_closed.load(Ordering::Relaxed) == 0
    }

    /// Like [`Self::is_usable`], but looks at the engine process.
    fn is_session_alive(&self) -> bool {
        self.is_usable() && self.peer.is_alive()
    }

    #[cold]
    fn wait_for_space(&self, is_cancelled: &dyn Fn() -> bool) -> Result<bool, Disconnected> {
        // A position that cannot be true counts as space: the next push will find out.
        let has_space = || {
            let has_space = self.appender.lock().producer.has_space(self.segment.ring(), &self.segment.slots());
            has_space.unwrap_or(true)
        };
        while self.is_session_alive() {
            if self.segment.ring().drained.0.sleep_unless(&Futex, LIVENESS_SLICE, has_space) {
                return Ok(true);
            }
            if is_cancelled() {
                return Ok(false);
            }
        }
        Err(Disconnected)
    }

    fn wait_for_reply(&self, slot: &ReplySlot, is_cancelled: &dyn Fn() -> bool) -> Result<Option<Reply>, Disconnected> {
        let mut reply = None;
        let mut answered = || {
            reply = slot.take();
            reply.is_some()
        };
        if self.spin.until(&mut answered) {
            return reply.map(Some).ok_or(Disconnected);
        }
        while self.is_session_alive() {
            slot.sleep(&Futex, LIVENESS_SLICE);
            if let Some(reply) = slot.take() {
                return Ok(Some(reply));
            }
            if is_cancelled() {
                return Ok(None);
            }
        }
        // The answer may have come just before the end.
        slot.take().map(Some).ok_or(Disconnected)
    }

    fn take_slot(&self) -> Result<usize, Disconnected> {
        if let Some(index) = self.slots.acquire() {
            return Ok(index);
        }
        let mut index = None;
        while self.is_session_alive() {
            let mut acquire = || {
                index = self.slots.acquire();
                index.is_some()
            };
            if self.slot_released.sleep_unless(&Futex, LIVENESS_SLICE, &mut acquire) {
                return index.ok_or(Disconnected);
            }
        }
        Err(Disconnected)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

/// The frame error inside an error of reading a frame.
fn frame_error(error: &io::Error) -> Option<FrameError> {
    error.get_ref()?.downcast_ref().copied()
}

const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Client>();
};
