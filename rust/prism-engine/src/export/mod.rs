//! What some ranks of a job did when, in the forms that trace viewers read.
//!
//! ```text
//!  analysis::JobTrace ──timeline──► Timeline ──► chrome    JSON: chrome://tracing, Perfetto, Holistic Trace Analysis
//!                                            ├─► perfetto  protobuf: Perfetto
//!                                            └─► table     comma-separated values: data frames
//! ```
//! A track for each stream of each rank, and one for the waits of its host. Communication goes from the rank's arrival to its
//! end; the ends of one collective (or message) carry the same flow, so that a viewer connects them.

pub mod chrome;
pub mod perfetto;
pub mod table;
mod timeline;

pub use timeline::{Counter, Detail, Mark, Slice, TIMELINE_MAX_SLICES, Timeline, Track};
