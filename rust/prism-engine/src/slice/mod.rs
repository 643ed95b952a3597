//! From recordings of a few ranks to the graph of all of them.
//!
//! A [`recording::RankRecording`] is what one rank did. [`splice::splice`] lets each rank of the job be played by one of
//! the recordings: the op program is taken as it is, the communicators are found by how the recorded rank came by them.
//! [`likeness`] says how far two ranks are apart that are not equal.
//! [`clocks`] brings recordings with measured times to one clock first; [`influence`] says how much the answer depends on each.

pub mod clocks;
pub mod influence;
pub mod likeness;
pub mod recording;
pub mod splice;
