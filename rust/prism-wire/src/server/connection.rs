//! One session, in parts that different threads can own.

use crate::control::ControlKind;
use crate::frame::{self, Hello};
use crate::message::{Record, Reply};
use crate::peer::Peer;
use crate::reply::BadSlot;
use crate::ring::Consumer;
use crate::segment::Segment;
use crate::sys;
use crate::wait::{Futex, LIVENESS_SLICE, Spin};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A session with a training process. Move its parts to the threads that need them.
#[derive(Debug)]
pub struct Connection {
    /// How the process introduced itself.
    pub hello: Hello,
    /// Its control requests.
    pub control: ControlChannel,
    /// Its records.
    pub records: RecordReader,
    /// The answers to its queries.
    pub replies: ReplyWriter,
}

impl Connection {
    pub(super) fn new(hello: Hello, segment: Segment, peer: Peer) -> Self {
        let shared = Arc::new(Shared {
            segment,
            peer,
            pid: std::process::id(),
            closed: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
        });
        Self {
            hello,
            control: ControlChannel { shared: Arc::clone(&shared) },
            records: RecordReader {
                shared: Arc::clone(&shared),
                consumer: Consumer::default(),
                spin: Spin::new(sys::num_cpus()),
            },
            replies: ReplyWriter { shared },
        }
    }

    /// A handle that ends the session from any thread.
    pub fn closer(&self) -> SessionCloser {
        self.control.closer()
    }
}

/// What the parts of a session have in common.
#[derive(Debug)]
struct Shared {
    segment: Segment,
    peer: Peer,
    /// A forked child of the engine must not end the engine's session when it drops its copy.
    pid: u32,
    closed: AtomicBool,
    corrupt: AtomicBool,
}

impl Shared {
    fn close(&self) {
        if std::process::id() != self.pid || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.peer.mark_gone();
        self.segment.header().engine_closed.store(1, Ordering::Release);
        sys::shutdown(self.peer.socket_fd());
        self.segment.replies().iter().for_each(|slot| slot.rouse(&Futex));
        self.segment.ring().drained.0.notify(&Futex);
        self.segment.ring().filled.0.notify(&Futex);
    }

    /// Will the process append no more?
    fn is_over(&self) -> bool {
        self.segment.header().client_closed.load(Ordering::Acquire) != 0 || !self.peer.is_alive()
    }
}

/// Ends a session from any thread. See [`ControlChannel::closer`].
#[derive(Clone, Debug)]
pub struct SessionCloser {
    shared: Arc<Shared>,
}

impl SessionCloser {
    /// Ends the session: every waiting call of either side returns, the process gets `Disconnected`. Records already in
    /// the ring can still be read.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// The control requests of a process. Dropping it ends the session.
#[derive(Debug)]
pub struct ControlChannel {
    shared: Arc<Shared>,
}

impl ControlChannel {
    /// The next request, or `None` at the end of the session (closed by either side, or the process died).
    ///
    /// Waits without limit; [`SessionCloser::close`] ends the wait. Each request must be answered, with
    /// [`Self::answer`] or [`Self::refuse`], before the next comes. A frame that makes no sense is an error of kind
    /// [`io::ErrorKind::InvalidData`]; nothing can be read behind it.
    pub fn recv(&mut self) -> Result<Option<(ControlKind, Vec<u8>)>, io::Error> {
        match frame::read_frame(&mut self.shared.peer.stream(None)) {
            // The process died in the middle of a frame.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            other => other,
        }
    }

    /// Answers the last request, which was of kind `kind`.
    pub fn answer(&mut self, kind: ControlKind, payload: &[u8]) -> io::Result<()> {
        frame::write_frame(&mut self.shared.peer.stream(None), kind, payload)
    }

    /// Refuses the last request.
    pub fn refuse(&mut self, text: &str) -> io::Result<()> {
        self.answer(ControlKind::Refused, text.as_bytes())
    }

    /// A handle that ends the session from any thread.
    pub fn closer(&self) -> SessionCloser {
        SessionCloser { shared: Arc::clone(&self.shared) }
    }
}

impl Drop for ControlChannel {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// The records of a process, in the order in which it appended them. Dropping it ends the session.
#[derive(Debug)]
pub struct RecordReader {
    shared: Arc<Shared>,
    consumer: Consumer,
    spin: Spin,
}

impl RecordReader {
    /// The oldest record, or `None` if there is none now.
    pub fn pop(&mut self) -> Option<Record> {
        let segment = &self.shared.segment;
        match self.consumer.pop(segment.ring(), &segment.slots(), &Futex) {
            Ok(record) => record,
            Err(_) => self.fail(),
        }
    }

    /// Moves up to `max` records to the end of `records`; says how many.
    pub fn pop_batch(&mut self, records: &mut Vec<Record>, max: usize) -> usize {
        let before = records.len();
        records.extend(std::iter::from_fn(|| self.pop()).take(max));
        records.len() - before
    }

    /// Waits until there is a record, at most `timeout`. Says whether there is one; false before the timeout means that
    /// the session is over ([`Self::is_closed`]).
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let Self { shared, consumer, spin } = self;
        let (ring, slots) = (shared.segment.ring(), shared.segment.slots());
        // A position that cannot be true counts as a record: the next pop will find out.
        let mut has_items = || consumer.has_items(ring, &slots).unwrap_or(true);
        let found = has_items()
            || (!timeout.is_zero() && (spin.until(&mut has_items) || sleep_until(shared, timeout, &mut has_items)));
        if found && consumer.has_items(ring, &slots).is_err() {
            self.fail();
            return false;
        }
        found
    }

    /// Is the session over, with every record read? Costs a system call while the process lives: ask when
    /// [`Self::pop`] or [`Self::wait`] found nothing.
    pub fn is_closed(&self) -> bool {
        // In this order: a process that appends and then dies has its last records read.
        self.is_corrupt() || (self.shared.is_over() && !self.consumer.peek(self.shared.segment.ring()))
    }

    /// Did the process write nonsense into the ring? Then the session has been ended.
    pub fn is_corrupt(&self) -> bool {
        self.shared.corrupt.load(Ordering::Relaxed)
    }

    /// Ends the session because of what the process wrote.
    #[cold]
    fn fail(&self) -> Option<Record> {
        self.shared.corrupt.store(true, Ordering::Relaxed);
        self.shared.close();
        None
    }
}

impl Drop for RecordReader {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// Sleeps until `has_items`, the end of the session or of `timeout`. Says whether `has_items`.
fn sleep_until(shared: &Shared, timeout: Duration, has_items: &mut impl FnMut() -> bool) -> bool {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let left = deadline.map_or(LIVENESS_SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_zero() || shared.is_over() {
            return has_items();
        }
        if shared.segment.ring().filled.0.sleep_unless(&Futex, left.min(LIVENESS_SLICE), &mut *has_items) {
            return true;
        }
    }
}

/// Answers the queries of a process. Copies may be used by any number of threads.
#[derive(Clone, Debug)]
pub struct ReplyWriter {
    shared: Arc<Shared>,
}

impl ReplyWriter {
    /// Answers the query that named reply slot `slot` (its `h`). An error means that the process named a slot that does
    /// not exist or does not wait for an answer in it; nothing happens then.
    pub fn answer(&self, slot: u32, reply: Reply) -> Result<(), BadSlot> {
        self.shared.segment.replies().get(slot as usize).ok_or(BadSlot)?.answer(&Futex, reply)
    }
}

const _: () = {
    const fn is_movable<T: Send>() {}
    const fn is_shareable<T: Send + Sync>() {}
    is_movable::<Connection>();
    is_shareable::<ReplyWriter>();
    is_shareable::<SessionCloser>();
};
