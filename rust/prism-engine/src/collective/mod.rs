//! When does every rank of a communicator get out of a collective, given when each got in?
//!
//! A collective is a recurrence over messages on links: a message occupies its link for `ceil(bytes / bandwidth)` and
//! arrives a latency later; a rank forwards a message when it has it. Evaluating that recurrence costs ranks x messages.
//! This module evaluates the *same* numbers, to the picosecond, in closed form: every completion is
//! `F(p) = max over s of (arrival(s) + W(p, s))`, and for rings, trees and chains the maximum has enough structure to be
//! found in O(ranks x distinct link speeds).
//!
//! What is modelled, and what is not:
//! - bandwidth of a link is fixed while a collective runs. Concurrent communicators do not slow each other; transfers of
//!   one collective that share a card have a static share of it;
//! - the messages of a ring have one size, or one until the last loop and another in it; those of trees and chains have one
//!   size (the buffer is cut evenly);
//! - flow-control credits are left out: in a bandwidth-bound ring a late rank may hold early ranks upstream a little
//!   longer than told here. The end of the latest rank is not affected. [`credits`] has the forms with credits, and
//!   [`recurrence`] the definition itself for where they do not hold;
//! - the inter-node part of a ring or tree runs over `min(members on the node, cards of the node)` network cards, because
//!   NCCL runs one channel per card and a communicator's channels start from different members;
//! - algorithm, protocol (Simple, LL, LL128), channels and chunks are those of a version of NCCL ([`tuning`], [`fusion`]), or
//!   those that end first when nobody is late (ring or trees). Reduction by NVSwitch (NVLS, NVLS trees) and PAT take as long as
//!   NCCL's own formula says, after the last member has come; reduction in the network (SHARP) is left out;
//! - channels do not wait for each other, and each has a fixed share of every link: its own card, or its part of one.
//!
//! The laws every form obeys (tested): monotone in the arrivals, `F(a + c) = F(a) + c`, nobody ends before it arrived.
//! Times beyond 2^60 ps (13 days) saturate to [`SimTime::MAX`](crate::units::SimTime::MAX).

pub mod chain;
pub mod credits;
pub mod dtree;
pub mod fusion;
pub mod p2p;
pub mod recurrence;
pub mod ring;
pub mod shape;
pub mod tree;
pub mod tuning;
pub mod turns;
pub mod vectors;

mod batch;
mod changes;
mod channels;
mod nvls;
mod plan;
mod protocol;
mod streams;
mod window;

pub(crate) use batch::{TileWalk, batch_completion, least_time};
pub use p2p::{message, message_over};
pub use plan::{Algorithm, Choice, CollectiveCall, Scratch, choice, completion, launch_time, uniform_cost};
pub(crate) use plan::{Run, quick_completion};
pub use prism_wire::message::CollectiveKind;
pub use protocol::Protocol;
pub(crate) use protocol::{ProtocolCosts, Wiring};
pub use shape::{CommShape, ShapePool};
pub(crate) use streams::{Stream, Streams, ring_steps, streams};
