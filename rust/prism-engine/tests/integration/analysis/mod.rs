//! Explanations of replays against a plain longest-path search, and on cases people reported.

mod cases;
mod explicit;
mod laws;
mod overview;
mod stories;
