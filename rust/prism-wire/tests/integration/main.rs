//! Sessions between real processes, and between this process and peers that do not play by the rules.
//!
//! Where a test needs a second process it runs this binary again, in one of the parts of [`support::play_role`].
#![cfg(not(prism_loom))]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod death;
mod fork;
mod hostile;
mod session;
mod support;
mod traffic;
