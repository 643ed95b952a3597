//! Jobs at the level of messages: per rank a graph of calculations, sends and receives.
//!
//! ```text
//!  GOAL text ──goal::read──► MessageProgram ──loggops::evaluate──► end time of every rank
//!  (LogGOPSim)◄─goal::write──      ▲
//!                                  └── MessageProgramBuilder (exports, generators)
//! ```
//!
//! The execution graph (`crate::graph`) knows collectives and streams; a message program knows only point-to-point
//! messages and dependencies. It is what LogGOPSim reads, so both tools can be asked the same question.

mod builder;
mod check;
mod error;
pub mod goal;
pub mod loggops;
mod program;
mod report;
mod store;

pub use builder::MessageProgramBuilder;
pub use error::MessageError;
pub use program::{Dependency, Lanes, MessageOp, MessageProgram, OpIndex, RankProgram};
pub use report::{MessageReplay, ProgramSummary};
pub use store::{FileKind, file_kind};
