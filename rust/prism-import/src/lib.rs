//! Readers of traces that other tools recorded, and what becomes of them: execution graphs of `prism-engine`.
//!
//! ```text
//!  files ──json / wire──► records of one rank ──repair──► groups, matching, clocks ──► programs ──► Graph + summary
//! ```
//!
//! Input is read as a stream: memory grows with the records that matter (launches, device activities, collectives), never with
//! the size of a file. What has to be repaired or left out is counted and listed in the summary; *collectives in =
//! collectives out + listed* is checked. Nothing that a file contains can make a reader panic.

pub mod aicb;
pub mod calibrate;
pub mod chakra;
mod cluster;
pub mod error;
pub mod input;
pub mod json;
pub mod kineto;
pub mod notes;
pub mod simai;
pub mod wire;

pub use error::ImportError;
pub use notes::Notes;
