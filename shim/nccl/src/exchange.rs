//! Moves data between the members of communicators that all run for real (host device).
//!
//! Every communicator of a group has a job, a row of stages; a stage posts its sends and receives at once and is over when
//! all of them are. Jobs advance side by side, so ranks may name the communicators of a group in any order. Messages of a
//! pair of members arrive in the order in which they were posted, each behind a tag that says what it belongs to: members
//! that call different things get an error instead of each other's bytes.

use crate::abi::Code;
use crate::channel::{self, Channel, LOOK};
use crate::comm::Comm;
use crate::guard::{Failure, Outcome};
use crate::values::Payload;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, PoisonError};

/// What a message belongs to. Equal on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// Number of the collective, or one of the constants below.
    pub(crate) kind: u8,
    pub(crate) dtype: u8,
    pub(crate) op: u8,
    pub(crate) root: u32,
    /// Elements as given to NCCL.
    pub(crate) count: u64,
}

/// A message of `ncclSend` to `ncclRecv`.
pub(crate) const MESSAGE: u8 = 100;
/// Colour and key of a split.
pub(crate) const SPLIT: u8 = 101;

const NAMES: [&str; 8] =
    ["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter"];
pub(crate) const HEADER_BYTES: usize = 24;

impl Tag {
    /// That of a collective.
    pub(crate) fn of(payload: &Payload) -> Self {
        Self {
            kind: payload.kind as u8,
            dtype: payload.dtype as u8,
            op: payload.op as u8,
            root: payload.root,
            count: payload.count,
        }
    }

    /// As bytes, for `bytes` of data.
    pub(crate) fn header(self, bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..3].copy_from_slice(&[self.kind, self.dtype, self.op]);
        header[4..8].copy_from_slice(&self.root.to_le_bytes());
        header[8..16].copy_from_slice(&self.count.to_le_bytes());
        header[16..].copy_from_slice(&(bytes as u64).to_le_bytes());
        header
    }
}

/// A header in words, for the text of a mismatch.
fn describe(header: &[u8; HEADER_BYTES]) -> String {
    let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    let root = u32::from_le_bytes(header[4..8].try_into().expect("four bytes"));
    match header[0] {
        MESSAGE => format!("a message of {} bytes", long(16)),
        SPLIT => "a split".to_owned(),
        kind => {
            let name = NAMES.get(usize::from(kind)).copied().unwrap_or("an unknown call");
            format!("{name} of {} elements of type {}, operation {}, root {root}", long(8), header[1], header[2])
        }
    }
}

/// Members call different things.
#[cold]
pub(crate) fn mismatch(peer: usize, theirs: &[u8; HEADER_BYTES], own: &[u8; HEADER_BYTES]) -> Failure {
    let text = format!("group rank {peer} calls {} where this rank calls {}", describe(theirs), describe(own));
    Failure::new(Code::InvalidUsage, text)
}

/// One side of a message. Addresses are exposed ones of the caller's or of the stage's own buffers.
struct Part {
    header: [u8; HEADER_BYTES],
    address: usize,
    bytes: usize,
    /// Of header and data.
    done: usize,
}

#[derive(Default)]
struct Flow {
    sends: VecDeque<Part>,
    receives: VecDeque<Part>,
}

/// Sends and receives that are posted together, and what follows them.
#[derive(Default)]
pub(crate) struct Stage {
    flows: Vec<(usize, Flow)>,
    /// Runs when everything has been sent and received.
    finish: Option<Box<dyn FnOnce() + Send>>,
}

impl Stage {
    fn flow(&mut self, peer: usize) -> &mut Flow {
        let at = self.flows.iter().position(|(other, _)| *other == peer).unwrap_or_else(|| {
            self.flows.push((peer, Flow::default()));
            self.flows.len() - 1
        });
        &mut self.flows[at].1
    }

    /// Sends `bytes` from `address` to a member. Nothing is sent for no bytes.
    pub(crate) fn send(&mut self, peer: usize, tag: Tag, address: usize, bytes: usize) {
        if bytes > 0 {
            self.flow(peer).sends.push_back(Part { header: tag.header(bytes), address, bytes, done: 0 });
        }
    }

    /// Receives `bytes` from a member to `address`.
    pub(crate) fn receive(&mut self, peer: usize, tag: Tag, address: usize, bytes: usize) {
        if bytes > 0 {
            self.flow(peer).receives.push_back(Part { header: tag.header(bytes), address, bytes, done: 0 });
        }
    }

    /// What to do with the data afterwards.
    pub(crate) fn then(mut self, finish: impl FnOnce() + Send + 'static) -> Self {
        self.finish = Some(Box::new(finish));
        self
    }
}

/// The stages of an operation, one after the other.
pub(crate) trait Work: Send {
    /// The next stage, once the previous one is over.
    fn next(&mut self) -> Option<Stage>;
}

impl Work for Option<Stage> {
    fn next(&mut self) -> Option<Stage> {
        self.take()
    }
}

/// What one communicator has to do.
pub(crate) struct Job {
    comm: Comm,
    comm_id: u32,
    channel: Arc<Channel>,
    works: VecDeque<Box<dyn Work>>,
    stage: Option<Stage>,
}

impl Job {
    /// Nothing yet.
    pub(crate) fn new(comm: Comm, channel: Arc<Channel>) -> Self {
        Self { comm, comm_id: comm.id(), channel, works: VecDeque::new(), stage: None }
    }

    /// Adds an operation behind those already there.
    pub(crate) fn add(&mut self, work: Box<dyn Work>) {
        self.works.push_back(work);
    }

    /// Goes on as far as possible without waiting. Did anything move?
    fn advance(&mut self) -> Result<bool, Failure> {
        if self.comm.is_interrupted_since(self.comm_id) {
            return Err(channel::interrupted());
        }
        let mut has_moved = false;
        loop {
            if self.stage.is_none() {
                self.stage = loop {
                    let Some(work) = self.works.front_mut() else { return Ok(has_moved) };
                    if let Some(stage) = work.next() {
                        break Some(stage);
                    }
                    self.works.pop_front();
                };
            }
            let Some(stage) = &mut self.stage else { return Ok(has_moved) };
            for (peer, flow) in &mut stage.flows {
                has_moved |= flow.advance(&self.channel, *peer)?;
            }
            if !stage.flows.iter().all(|(_, flow)| flow.is_done()) {
                return Ok(has_moved);
            }
            has_moved = true;
            if let Some(finish) = self.stage.take().and_then(|stage| stage.finish) {
                finish();
            }
        }
    }

    fn is_done(&self) -> bool {
        self.stage.is_none() && self.works.is_empty()
    }

    fn waits(&self, out: &mut Vec<libc::pollfd>) {
        let flows = self.stage.iter().flat_map(|stage| &stage.flows);
        for (peer, flow) in flows.filter(|(_, flow)| !flow.is_done()) {
            let Some(socket) = self.channel.socket(*peer) else { continue };
            let read = if flow.receives.is_empty() { 0 } else { libc::POLLIN };
            let write = if flow.sends.is_empty() { 0 } else { libc::POLLOUT };
            out.push(libc::pollfd { fd: socket.as_raw_fd(), events: read | write, revents: 0 });
        }
    }
}

impl Flow {
    fn is_done(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    fn advance(&mut self, channel: &Channel, peer: usize) -> Result<bool, Failure> {
        if self.is_done() {
            return Ok(false);
        }
        let Some(socket) = channel.socket(peer) else {
            return Err(Failure::new(Code::InternalError, format!("no connection to group rank {peer}")));
        };
        let fd = socket.as_raw_fd();
        let gone = |error: &io::Error| {
            let rank = channel.address(peer).map_or(0, |address| address.rank);
            Failure::new(Code::RemoteError, format!("rank {rank} (group rank {peer}) is gone: {error}"))
        };
        let mut has_moved = false;
        while let Some(part) = self.sends.front_mut() {
            match part.send(fd).map_err(|error| gone(&error))? {
                Moved::All => _ = self.sends.pop_front(),
                Moved::Some => {}
                Moved::Nothing => break,
            }
            has_moved = true;
        }
        while let Some(part) = self.receives.front_mut() {
            match part.receive(fd, peer, &gone)? {
                Moved::All => _ = self.receives.pop_front(),
                Moved::Some => {}
                Moved::Nothing => break,
            }
            has_moved = true;
        }
        Ok(has_moved)
    }
}

enum Moved {
    Nothing,
    Some,
    All,
}

impl Part {
    fn moved(&mut self, bytes: usize) -> Moved {
        self.done += bytes;
        if self.done == HEADER_BYTES + self.bytes { Moved::All } else { Moved::Some }
    }

    fn send(&mut self, fd: i32) -> io::Result<Moved> {
        let data = self.done.saturating_sub(HEADER_BYTES);
        let header = &self.header[self.done.min(HEADER_BYTES)..];
        let iov = [
            libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() },
            libc::iovec {
                iov_base: core::ptr::with_exposed_provenance_mut(self.address + data),
                iov_len: self.bytes - data,
            },
        ];
        // SAFETY: zeroes are a valid empty message.
        let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
        message.msg_iov = iov.as_ptr().cast_mut();
        message.msg_iovlen = iov.len();
        // SAFETY: both ranges are readable: our header, and what the caller of NCCL gave for sending.
        let sent = unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        match usize::try_from(sent) {
            Ok(sent) => Ok(self.moved(sent)),
            Err(_) => nothing_yet(),
        }
    }

    fn receive(&mut self, fd: i32, peer: usize, gone: &impl Fn(&io::Error) -> Failure) -> Result<Moved, Failure> {
        if self.done < HEADER_BYTES {
            let mut header = [0_u8; HEADER_BYTES];
            // Looked at until it is there as a whole; then it leaves the socket.
            let got =
                receive_into(fd, header.as_mut_ptr(), HEADER_BYTES, libc::MSG_PEEK).map_err(|error| gone(&error))?;
            if got < HEADER_BYTES {
                return Ok(Moved::Nothing);
            }
            if header != self.header {
                return Err(mismatch(peer, &header, &self.header));
            }
            receive_into(fd, header.as_mut_ptr(), HEADER_BYTES, 0).map_err(|error| gone(&error))?;
            return Ok(self.moved(HEADER_BYTES));
        }
        let data = self.done - HEADER_BYTES;
        let to = core::ptr::with_exposed_provenance_mut::<u8>(self.address + data);
        match receive_into(fd, to, self.bytes - data, 0).map_err(|error| gone(&error))? {
            0 => Ok(Moved::Nothing),
            got => Ok(self.moved(got)),
        }
    }
}

/// Bytes received, 0 for none yet. The end of the stream is an error.
fn receive_into(fd: i32, to: *mut u8, bytes: usize, flags: i32) -> io::Result<usize> {
    // SAFETY: writable for `bytes`: our header, or what the caller of NCCL gave for receiving.
    let got = unsafe { libc::recv(fd, to.cast(), bytes, flags | libc::MSG_DONTWAIT) };
    match usize::try_from(got) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(got) => Ok(got),
        Err(_) => nothing_yet().map(|_| 0),
    }
}

fn nothing_yet() -> io::Result<Moved> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Moved::Nothing),
        _ => Err(error),
    }
}

/// Runs jobs of different communicators to their ends. An error leaves communicators in which nothing more can be done.
pub(crate) fn run(mut jobs: Vec<Job>) -> Outcome {
    jobs.sort_by_key(|job| job.channel.key());
    let channels: Vec<Arc<Channel>> = jobs.iter().map(|job| Arc::clone(&job.channel)).collect();
    let _turns: Vec<_> =
        channels.iter().map(|channel| channel.turn.lock().unwrap_or_else(PoisonError::into_inner)).collect();
    let result = drive(&mut jobs);
    if let Err(failure) = &result {
        for job in &jobs {
            job.comm.break_off(job.comm_id, failure.code);
        }
    }
    result
}

fn drive(jobs: &mut [Job]) -> Outcome {
    let mut waits = Vec::new();
    loop {
        let mut has_moved = false;
        for job in jobs.iter_mut() {
            has_moved |= job.advance()?;
        }
        if jobs.iter().all(Job::is_done) {
            return Ok(());
        }
        if !has_moved {
            waits.clear();
            for job in jobs.iter() {
                job.waits(&mut waits);
            }
            // SAFETY: a list of its own length.
            unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, LOOK.as_millis() as i32) };
        }
    }
}
