//! What the preloaded libraries and the engine say to each other.
//!
//! One training process has one session with the engine: a Unix socket for rare requests ([`control`]) and a shared
//! segment with a ring of [`message::Record`]s and a table of reply slots for the hot path.
//!
//! ```text
//!  training process                                   engine
//!  Client::append ──► ring of records ──────────────► RecordReader
//!  Client::query  ──► ring, then waits in a slot ◄─── ReplyWriter
//!  Client::control ─► socket, answered one by one ◄─► ControlChannel
//! ```
//!
//! Start with [`client::Client`] (inside a training process) or [`server::Listener`] (in the engine). [`frame::Request`]
//! turns control payloads into values and back. Neither side trusts what the other writes: a hostile or broken peer
//! ends the session, never the process.
//!
//! ```
//! # #[cfg(not(prism_loom))] {
//! use prism_wire::client::Client;
//! use prism_wire::frame::{DeviceMode, Hello};
//! use prism_wire::message::{Record, RecordKind, Reply};
//! use prism_wire::server::{Listener, handshake};
//! use std::time::Duration;
//!
//! # let root = tempfile::tempdir()?;
//! # let dir = root.path().join("session");
//! let listener = Listener::bind(&dir)?;
//! let socket = listener.path().to_owned();
//! let process = std::thread::spawn(move || {
//!     let client = Client::connect(&socket, &Hello::new(5, 8192, DeviceMode::Host)).unwrap();
//!     let sync = Record { kind: RecordKind::StreamSync as u16, host_ns: 100, ..Record::default() };
//!     client.query(sync).unwrap().host_ns
//! });
//!
//! let stream = listener.accept(Duration::from_secs(5))?.expect("the process connects");
//! let mut session = handshake(stream, |hello| Ok(format!("rank={}\n", hello.rank)), 1024)?;
//! while session.records.wait(Duration::from_secs(5)) {
//!     let query = session.records.pop().expect("wait saw it");
//!     session.replies.answer(query.h, Reply { host_ns: query.host_ns + 42, ..Reply::default() })?;
//! }
//! assert!(session.records.is_closed());
//! assert_eq!(process.join().unwrap(), 142);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A session ends when either side closes it or dies. The other side notices at once where it waits on the socket, and
//! within a fraction of a second where it waits in shared memory, because every such wait looks at the peer's liveness.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]
#![cfg_attr(prism_loom, allow(dead_code, unreachable_pub, reason = "most users of these parts are not modelled"))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("prism-wire needs 64-bit little-endian Linux: records cross the process boundary as they lie in memory");

pub mod control;
pub mod device;
pub mod group;
pub mod message;

pub mod frame;

mod reply;
mod ring;
mod sync;
mod wait;

// The rest sits on real memory mappings and system calls, which loom cannot model.
#[cfg(not(prism_loom))]
pub mod client;
#[cfg(not(prism_loom))]
mod fork;
#[cfg(not(prism_loom))]
mod lock;
#[cfg(not(prism_loom))]
mod peer;
#[cfg(not(prism_loom))]
mod segment;
#[cfg(not(prism_loom))]
pub mod server;
#[cfg(not(prism_loom))]
mod sys;

#[cfg(all(test, prism_loom))]
mod loom_tests;
