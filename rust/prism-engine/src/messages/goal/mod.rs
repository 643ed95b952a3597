//! GOAL, the text form of LogGOPSim: "Group Operation Assembly Language", as its `txt2bin` reads it.
//!
//! ```text
//! num_ranks 2
//! rank 0 {
//! l1: calc 100
//! l2: send 4096b to 1 tag 7 cpu 0 nic 0
//! l2 requires l1
//! }
//! rank 1 {
//! l1: recv 4096b from 0 tag 7
//! }
//! ```
//!
//! * `tag`, `cpu` and `nic` may be left out and then are 0; they come in this order. A receive's rank and tag may be `-1`
//!   for any. Labels are identifiers, known within their rank from where they are defined; an op needs none.
//! * `a requires b`: a starts after the end of b. `a irequires b`: a starts after the start of b.
//! * Comments begin where a statement could: `//` to the end of the line, or `/* ... */`.
//! * Ranks come in order, each once. Numbers are decimal, without sign.
//!
//! One thing is ours: the comment line `// prism: rendezvous` says that the next op waits for the other half of its message
//! whatever the size. To LogGOPSim it is a comment, and its threshold `S` decides.

mod cursor;
mod labels;
mod read;
mod write;

pub use read::{is_goal, open, read};
pub use write::write;

/// The comment that marks the next op as a rendezvous.
const RENDEZVOUS: &[u8] = b"// prism: rendezvous";
