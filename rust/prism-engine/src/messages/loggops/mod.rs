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
//! Two things differ, where LogGOPSim's answer has no meaning: an op that depends on one of another CPU lane waits for that
//! one's end (there, only for its start), and a message of 0 bytes costs what one of 1 byte costs (there, one `G` less than
//! nothing). Operating-system noise and topologies are not modelled.
//!
//! Cost: about three queue operations per message, two per op; per op one byte, per rank some hundred, beside the program.

mod blocked;
mod engine;
mod error;
mod matching;
mod pending;
mod queue;

pub use error::{EvaluateError, Waiting};

use crate::messages::MessageProgram;
use crate::profile::Profile;

/// Parameters of the model, in ticks. What a tick is, `tick_ps` says; the program's calculations are in ticks too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogGops {
    /// `L`: ticks from NIC to NIC.
    pub latency: u64,
    /// `o`: CPU ticks per message, on either side.
    pub overhead: u64,
    /// `g`: NIC ticks per message.
    pub gap: u64,
    /// `G`: NIC ticks per byte; kept to 2^-32 of a tick.
    pub gap_per_byte: f64,
    /// `O`: CPU ticks per byte; kept to 2^-32 of a tick.
    pub overhead_per_byte: f64,
    /// `S`: a message of more bytes is a rendezvous.
    pub rendezvous_above: u64,
    /// Picoseconds per tick.
    pub tick_ps: u64,
}

impl LogGops {
    /// LogGOPSim's defaults: L 2500, o 1500, g 1000, G 6, O 0, S 65535, and a tick of 1 ns.
    pub const LOGGOPSIM: Self = Self {
        latency: 2500,
        overhead: 1500,
        gap: 1000,
        gap_per_byte: 6.0,
        overhead_per_byte: 0.0,
        rendezvous_above: 65535,
        tick_ps: 1000,
    };

    /// A profile's network: `L` its latency, `G` one byte at its NIC's usable bandwidth, nothing else costs, no message is a
    /// rendezvous by its size; a tick is 1 ns.
    pub fn of_profile(profile: &Profile) -> Self {
        let network = &profile.network;
        Self {
            latency: network.latency_ns.max(0) as u64,
            overhead: 0,
            gap: 0,
            gap_per_byte: 1e9 / (network.nic_bytes_per_s as f64 * network.nic_efficiency),
            overhead_per_byte: 0.0,
            rendezvous_above: u64::MAX,
            tick_ps: 1000,
        }
    }
}

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
