//! Peers that send nonsense get an error; nothing crashes or hangs.

use crate::support::{self, hello};
use prism_wire::client::{Client, ConnectError};
use prism_wire::control::ControlKind;
use prism_wire::frame::{self, FrameError, HelloAnswer, Request};
use prism_wire::message::PROTOCOL_VERSION;
use prism_wire::server::{Connection, HandshakeError, Listener, handshake};
use std::fs::File;
use std::io::{Read, Write};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Control space for one descriptor, aligned.
type Space = [u64; 4];
const FD_BYTES: u32 = size_of::<RawFd>() as u32;

fn send_with_fd(stream: &UnixStream, bytes: &[u8], file: &File) {
    let mut space: Space = [0; 4];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: a plain use of sendmsg with pointers to live locals; the space holds one descriptor's message.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(FD_BYTES) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(FD_BYTES) as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file.as_raw_fd());
        assert_eq!(libc::sendmsg(stream.as_raw_fd(), &raw const message, 0), bytes.len() as isize);
    }
}

/// Reads the engine's first bytes and the segment that comes with them.
fn receive_segment(stream: &UnixStream) -> File {
    let mut bytes = [0u8; 4096];
    let mut space: Space = [0; 4];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a plain use of recvmsg with pointers to live locals; the descriptor received is ours.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = size_of::<Space>() as _;
        assert!(libc::recvmsg(stream.as_raw_fd(), &raw mut message, 0) > 0);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        assert!(!header.is_null());
        File::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())
    }
}

/// What a client makes of an engine that reads the hello and then does `reply`.
fn connect_to(reply: impl FnOnce(UnixStream) + Send) -> ConnectError {
    let dir = support::private_dir();
    let path = dir.path().join("session.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            frame::read_frame(&mut stream).unwrap().unwrap();
            reply(stream);
        });
        Client::connect(&path, &hello()).map(|_| ()).unwrap_err()
    })
}

fn hello_answer(protocol: u32, ring_records: u32) -> Vec<u8> {
    let payload = HelloAnswer { protocol, ring_records, config: String::new() }.encode();
    let mut bytes = Vec::new();
    frame::write_frame(&mut bytes, ControlKind::Hello, &payload).unwrap();
    bytes
}

#[test]
fn engines_that_send_nonsense_are_errors() {
    let sends = |bytes: Vec<u8>| connect_to(move |mut stream| stream.write_all(&bytes).unwrap());
    assert!(matches!(sends(vec![]), ConnectError::NoAnswer));
    assert!(matches!(sends(vec![1, 0, 0]), ConnectError::Io(_)));
    assert!(matches!(sends(vec![77; 8]), ConnectError::BadAnswer(FrameError::TooLong { .. })));
    assert!(matches!(sends(vec![77, 0, 0, 0, 0, 0, 0, 0]), ConnectError::BadAnswer(FrameError::UnknownKind(77))));
    assert!(matches!(sends(vec![7, 0, 0, 0, 0, 0, 0, 0]), ConnectError::BadAnswer(_)));
    assert!(matches!(sends(vec![1, 0, 0, 0, 2, 0, 0, 0, 1, 2]), ConnectError::BadAnswer(FrameError::Truncated(_))));
    assert!(matches!(sends(hello_answer(PROTOCOL_VERSION, 64)), ConnectError::NoAnswer));
    assert!(matches!(sends(hello_answer(99, 64)), ConnectError::WrongProtocol { engine: 99 }));
}

#[test]
fn engines_that_share_nonsense_are_errors() {
    let shares = |file: File, ring_records: u32| {
        connect_to(move |stream| send_with_fd(&stream, &hello_answer(PROTOCOL_VERSION, ring_records), &file))
    };
    let plain = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file
    };
    for ring_records in [0, 3, 64, u32::MAX] {
        assert!(matches!(shares(plain(), ring_records), ConnectError::Segment(_)));
    }
    let (pipe, _end) = UnixStream::pair().unwrap();
    // SAFETY: a duplicate of a descriptor we hold, owned by the new value.
    let not_memory = unsafe { File::from_raw_fd(libc::dup(pipe.as_raw_fd())) };
    assert!(matches!(shares(not_memory, 64), ConnectError::Segment(_)));
}

/// What an engine makes of a process that sends `bytes` and hangs up, and what it answers.
fn handshake_with(bytes: &[u8]) -> (HandshakeError, Vec<u8>) {
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let error = handshake(ours, |_| Ok(String::new()), 64).map(|_| ()).unwrap_err();
    let mut answer = Vec::new();
    // Ends in a reset where bytes of ours were left unread.
    let _ = theirs.read_to_end(&mut answer);
    (error, answer)
}

#[test]
fn processes_that_send_nonsense_get_no_session() {
    assert!(matches!(handshake_with(&[]).0, HandshakeError::HungUp));
    assert!(matches!(handshake_with(&[1, 0]).0, HandshakeError::Io(_)));
    assert!(matches!(handshake_with(&[255; 64]).0, HandshakeError::BadHello(FrameError::TooLong { .. })));
    assert!(matches!(handshake_with(b"GET / HTTP/1.1\r\n\r\n").0, HandshakeError::BadHello(_)));
    let (error, answer) = handshake_with(&[7, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(matches!(error, HandshakeError::NotHello(ControlKind::Note)));
    let (kind, text) = frame::read_frame(&mut answer.as_slice()).unwrap().unwrap();
    assert_eq!(kind, ControlKind::Refused);
    assert!(String::from_utf8(text).unwrap().contains("Note"));
}

#[test]
fn processes_of_another_version_are_told_so() {
    let mut old = hello();
    old.protocol = 99;
    let (kind, payload) = Request::Hello(old).encode();
    let mut bytes = Vec::new();
    frame::write_frame(&mut bytes, kind, &payload).unwrap();
    let (error, answer) = handshake_with(&bytes);
    assert!(matches!(error, HandshakeError::WrongProtocol { client: 99 }));
    let (kind, text) = frame::read_frame(&mut answer.as_slice()).unwrap().unwrap();
    assert_eq!(kind, ControlKind::Refused);
    assert!(String::from_utf8(text).unwrap().contains("99"));
}

/// A session whose process writes into the segment what it likes.
fn session_with_raw_segment() -> (UnixStream, File, Connection) {
    let dir = support::private_dir();
    let listener = Listener::bind(dir.path()).unwrap();
    let mut stream = UnixStream::connect(listener.path()).unwrap();
    let (kind, payload) = Request::Hello(hello()).encode();
    frame::write_frame(&mut stream, kind, &payload).unwrap();
    let connection = support::accept(&listener, 64);
    let segment = receive_segment(&stream);
    (stream, segment, connection)
}

#[test]
fn a_process_that_scribbles_over_the_segment_ends_its_session_only() {
    for byte in [0xffu8, 0x41, 0x01] {
        let (_stream, segment, mut connection) = session_with_raw_segment();
        let bytes = segment.metadata().unwrap().len();
        segment.write_all_at(&vec![byte; bytes as usize], 0).unwrap();
        connection.records.wait(Duration::from_millis(50));
        assert_eq!(connection.records.pop(), None);
        assert!(connection.records.is_corrupt() && connection.records.is_closed());
        for slot in 0..64 {
            // Some of these look as if somebody waited; either way it is just an answer.
            let _ = connection.replies.answer(slot, prism_wire::message::Reply::default());
        }
        assert!(connection.control.recv().unwrap().is_none());
    }
}

#[test]
fn nobody_can_cut_the_segment_of_a_session() {
    let (_stream, segment, mut connection) = session_with_raw_segment();
    assert!(segment.set_len(0).is_err());
    assert!(!connection.records.wait(Duration::from_millis(1)));
    assert_eq!(connection.records.pop(), None);
    assert!(!connection.records.is_corrupt());
}

#[test]
fn nonsense_on_the_control_socket_is_an_error() {
    let (mut stream, _segment, mut connection) = session_with_raw_segment();
    stream.write_all(&[200; 8]).unwrap();
    assert_eq!(connection.control.recv().unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    let (mut stream, _segment, mut connection) = session_with_raw_segment();
    stream.write_all(&[1, 0, 0, 0, 50, 0, 0, 0, 1]).unwrap();
    drop(stream);
    assert!(connection.control.recv().unwrap().is_none());
}
