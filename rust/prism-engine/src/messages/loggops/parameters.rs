//! Parameters of the model, by field and by name.

use super::EvaluateError;
use crate::profile::Profile;
use std::collections::BTreeMap;

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
            latency: network.latency_ns,
            overhead: 0,
            gap: 0,
            gap_per_byte: 1e9 / (network.nic_bytes_per_s as f64 * network.nic_efficiency),
            overhead_per_byte: 0.0,
            rendezvous_above: u64::MAX,
            tick_ps: 1000,
        }
    }

    /// These parameters with those of a text like `L=250000,o=0,G=1,tick_ps=20` in their place; `S=inf` for no rendezvous.
    /// With another tick, `L`, `o`, `g`, `G` and `O` that are not given stay as long as they were (`L`, `o`, `g` rounded to
    /// whole ticks). Fails for a name or number that is none.
    pub fn with_text(self, text: &str) -> Result<Self, EvaluateError> {
        let mut given = BTreeMap::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let Some((name, value)) = item.split_once('=').map(|(name, value)| (name.trim(), value.trim())) else {
                return Err(refuse(format!("{item:?} is not a parameter: write NAME=NUMBER")));
            };
            if !["L", "o", "g", "G", "O", "S", "tick_ps"].contains(&name) {
                return Err(refuse(format!("{name:?} is not a parameter: there are L, o, g, G, O, S and tick_ps")));
            }
            if given.insert(name, value).is_some() {
                return Err(refuse(format!("{name} is given twice")));
            }
        }
        let mut all = self;
        if let Some(value) = given.remove("tick_ps") {
            all = all.in_ticks_of(whole("tick_ps", value)?)?;
        }
        for (name, value) in given {
            match name {
                "L" => all.latency = whole(name, value)?,
                "o" => all.overhead = whole(name, value)?,
                "g" => all.gap = whole(name, value)?,
                "G" => all.gap_per_byte = fraction(name, value)?,
                "O" => all.overhead_per_byte = fraction(name, value)?,
                _ if value == "inf" => all.rendezvous_above = u64::MAX,
                _ => all.rendezvous_above = whole(name, value)?,
            }
        }
        Ok(all)
    }

    /// The same durations in other ticks.
    fn in_ticks_of(self, tick_ps: u64) -> Result<Self, EvaluateError> {
        if tick_ps == 0 {
            return Err(refuse("tick_ps = 0: a tick takes time".into()));
        }
        let ticks = |value: u64| {
            let ps = u128::from(value) * u128::from(self.tick_ps);
            u64::try_from((ps + u128::from(tick_ps / 2)) / u128::from(tick_ps)).unwrap_or(u64::MAX)
        };
        let scale = self.tick_ps as f64 / tick_ps as f64;
        Ok(Self {
            latency: ticks(self.latency),
            overhead: ticks(self.overhead),
            gap: ticks(self.gap),
            gap_per_byte: self.gap_per_byte * scale,
            overhead_per_byte: self.overhead_per_byte * scale,
            tick_ps,
            ..self
        })
    }

    /// The parameters by their names in the model; `S` is infinite if no message is a rendezvous by its size.
    pub fn named(&self) -> BTreeMap<&'static str, f64> {
        let above = if self.rendezvous_above == u64::MAX { f64::INFINITY } else { self.rendezvous_above as f64 };
        BTreeMap::from([
            ("L", self.latency as f64),
            ("o", self.overhead as f64),
            ("g", self.gap as f64),
            ("G", self.gap_per_byte),
            ("O", self.overhead_per_byte),
            ("S", above),
            ("tick_ps", self.tick_ps as f64),
        ])
    }
}

fn whole(name: &str, value: &str) -> Result<u64, EvaluateError> {
    value.parse().map_err(|_| refuse(format!("{name} = {value:?}: a whole number that is not negative")))
}

fn fraction(name: &str, value: &str) -> Result<f64, EvaluateError> {
    let number: Option<f64> = value.parse().ok();
    number
        .filter(|number| *number >= 0.0)
        .ok_or_else(|| refuse(format!("{name} = {value:?}: a number that is not negative")))
}

fn refuse(message: String) -> EvaluateError {
    EvaluateError::Parameter { message }
}
