//! The closed forms of the collectives, the layout of communicators, and the cost model under them.

mod channels;
mod forms;
mod fused;
mod laws;
mod layout;
mod matching;
mod mesh;
mod reference;
mod steps;
mod tables;
mod tuned;
