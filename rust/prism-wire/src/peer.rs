//! The process at the other end of a session: is it alive, and the bytes exchanged with it over the socket.

use crate::sys;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HUNG_UP: i16 = libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL;

/// The other process.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: UnixStream,
    /// Needed beside the socket: the socket stays open while a child forked by the peer holds a copy of it.
    process: Option<OwnedFd>,
    gone: AtomicBool,
}

impl Peer {
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        let pid = sys::peer_credentials(&socket)?.pid;
        // A peer outside our PID namespace has no id here, and a sandbox may forbid the call: then the socket must do.
        let process = if pid > 0 { sys::pidfd_open(pid) } else { Err(io::ErrorKind::NotFound.into()) };
        let died = process.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH));
        Ok(Self { socket, process: process.ok(), gone: AtomicBool::new(died) })
    }

    pub(crate) fn socket_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Was the peer found gone? Costs one load.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Ends the session as far as this side is concerned.
    pub(crate) fn mark_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Looks whether the peer lives. Costs a system call until it does not.
    pub(crate) fn is_alive(&self) -> bool {
        if self.is_gone() {
            return false;
        }
        let alive = match self.poll(libc::POLLRDHUP, Some(Duration::ZERO)) {
            Ok((socket, died)) => socket & HUNG_UP == 0 && !died,
            // Out of memory in the kernel: says nothing about the peer, the next look will.
            Err(_) => true,
        };
        if !alive {
            self.mark_gone();
        }
        alive
    }

    /// What happened on the socket, and whether the process ended.
    fn poll(&self, events: i16, timeout: Option<Duration>) -> io::Result<(i16, bool)> {
        let process = self.process.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let [socket, process] = sys::poll([(self.socket_fd(), events), (process, libc::POLLIN)], timeout)?;
        Ok((socket, process != 0))
    }

    /// The socket as a stream of bytes. With a deadline, waits end in [`io::ErrorKind::TimedOut`] when it passes.
    pub(crate) fn stream(&self, deadline: Option<Instant>) -> PeerStream<'_> {
        PeerStream { peer: self, deadline, descriptor: None }
    }
}

/// Reads from and writes to the peer. A peer that ends is the end of the stream.
#[derive(Debug)]
pub(crate) struct PeerStream<'a> {
    peer: &'a Peer,
    deadline: Option<Instant>,
    /// The last descriptor that came with the bytes read.
    pub(crate) descriptor: Option<OwnedFd>,
}

impl PeerStream<'_> {
    /// Waits for one of `events`. False: the process ended and the event will not come.
    fn wait(&self, events: i16) -> io::Result<bool> {
        loop {
            // The clock is only read where there is a deadline: in a training process it may be a virtual one.
            let timeout = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let (socket, died) = self.peer.poll(events, timeout)?;
            if socket & (events | HUNG_UP) != 0 {
                return Ok(true);
            }
            if died {
                return Ok(false);
            }
            if timeout == Some(Duration::ZERO) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Sends `bytes` with `descriptor` beside them.
    pub(crate) fn write_all_with(&mut self, bytes: &[u8], descriptor: &OwnedFd) -> io::Result<()> {
        let sent = self.send(bytes, Some(descriptor.as_raw_fd()))?;
        self.write_all(&bytes[sent..])
    }

    fn send(&self, bytes: &[u8], descriptor: Option<RawFd>) -> io::Result<usize> {
        loop {
            match sys::send(self.peer.socket_fd(), bytes, descriptor) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.wait(libc::POLLOUT)? {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}

impl Read for PeerStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match sys::receive(self.peer.socket_fd(), bytes) {
                Ok((received, descriptor)) => {
                    if descriptor.is_some() {
                        self.descriptor = descriptor;
                    }
                    return Ok(received);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.wait(libc::POLLIN)? {
                        return Ok(0);
                    }
                }
                // The peer closed with bytes of ours unread: it is gone all the same.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Write for PeerStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes, None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
