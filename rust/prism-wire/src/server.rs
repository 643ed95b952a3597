//! The engine's side of sessions: a [`Listener`] for training processes, and one [`Connection`] per process.

mod connection;
mod handshake;
mod listener;

pub use crate::reply::BadSlot;
pub use connection::{Connection, ControlChannel, RecordReader, ReplyWriter, SessionCloser};
pub use handshake::{HandshakeError, handshake};
pub use listener::Listener;
