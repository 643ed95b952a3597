//! Evaluating a message program by LogGOPSim's rule.
//!
//! The LogGOPS model: `L` latency, `o` and `O` CPU time per message and per byte, `g` and `G` NIC time per message and per
//! byte, `S` the size above which a message is a rendezvous. As LogGOPSim (Hoefler, Schneider, Lumsdaine: "LogGOPSim -
//! Simulating Large-Scale Applications in the LogGOPS Model", 2010; `LogGOPSim.cpp`) has it, with *b* = bytes - 1:
//!
//! * A calculation occupies its CPU lane for its ticks.
//! * A send starts when its CPU lane and its NIC lane (sending) are free, and occupies them for o + *b*·O and g + *b*·G. Its
//!   first byte is at the receiver o + L later. It ends when the CPU lane is free again; a rendezvous ends when the receiver
//!   has matched it (the answer takes no time).
//! * A message that has arrived waits until the receiver's CPU lane and NIC lane (receiving) are free, those with the send's
//!   numbers, and occupies them for o + max(*b*·O, *b*·G) and g + *b*·G: the CPU is busy while the bytes come in.
//! * A receive ends when its message is in. Receives and messages match by (rank, tag) in order, `-1` matching any.
//! * Events are taken by time, equal times by order of creation; what one event makes ready is created rank by rank, sends
//!   before receives before calculations. The end of a rank is when its last CPU lane is free.
//!
//! Three things differ, where LogGOPSim's answer has no meaning: an op that depends on one of another CPU lane waits for that
//! one's end (there, only for its start); a message of 0 bytes costs what one of 1 byte costs (there, one `G` less than
//! nothing); and only the send's size says whether a message is a rendezvous (there, also that of the receive it meets).
//! Operating-system noise and topologies are not modelled.
//!
//! Cost: one event per op and per message, and one more for each that finds its lane occupied; per rank some hundred bytes
//! beside the program, and one byte per op if an op has several dependencies.

mod blocked;
mod crowd;
mod engine;
mod error;
mod matching;
mod parameters;
mod pending;
mod queue;

pub use error::{EvaluateError, Waiting};
pub use parameters::LogGops;

use crate::messages::MessageProgram;

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// When each rank ends, in ticks.
    pub end_ticks: Vec<u64>,
    /// When the last rank ends, in ticks.
    pub total_ticks: u64,
    /// The first rank that ends last.
    pub critical_rank: u32,
    /// Ops evaluated: all of them.
    pub ops: u64,
    /// Messages delivered.
    pub messages: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Events taken from the queue.
    pub events: u64,
    /// The busiest NIC direction's share of the time; at most 1.
    pub max_nic_utilisation: f64,
    /// Picoseconds per tick.
    pub tick_ps: u64,
}

impl Evaluation {
    /// When the last rank ends, in nanoseconds, rounded down.
    pub fn total_time_ns(&self) -> u64 {
        (u128::from(self.total_ticks) * u128::from(self.tick_ps) / 1000) as u64
    }

    /// When the last rank ends, in seconds.
    pub fn total_seconds(&self) -> f64 {
        self.total_ticks as f64 * self.tick_ps as f64 * 1e-12
    }
}

/// Evaluates a program. Deterministic. Fails for parameters that are none, for times that could pass 2^63 ticks or
/// picoseconds, and for a program that blocks or leaves messages unreceived.
pub fn evaluate(program: &MessageProgram, parameters: &LogGops) -> Result<Evaluation, EvaluateError> {
    engine::Engine::new(program, parameters)?.run()
}
