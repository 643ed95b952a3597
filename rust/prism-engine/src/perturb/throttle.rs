//! GPUs that get too hot and lower their clock.

use super::maths::exp;
use super::scope::{ComputeSite, RankSet};
use super::{Rule, StreamState};
use crate::graph::op::ComputeClass;
use crate::ids::Rank;
use crate::units::SimTime;

const FULL_PPM: i64 = 1_000_000;

/// One thermal mass per GPU: `capacitance * dT/dt = power - (T - ambient) / resistance`, in closed form between changes of
/// power. Every `period` (on a fixed grid of virtual time) the clock goes one step down if the temperature has reached
/// `throttle_c`, one step up if it is `hysteresis_c` or more below. Work takes `1 / clock` times as long; power above idle
/// goes with the third power of the clock.
///
/// Compute ops heat; everything between them, communication included, is idle. Each stream of a rank heats as if it had the
/// GPU to itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ThermalThrottle {
    /// Whose GPUs.
    pub ranks: RankSet,
    /// Temperature around, in °C.
    pub ambient_c: f64,
    /// Temperature at the start; at rest it is `ambient_c + idle_w * resistance_c_per_w`.
    pub initial_c: f64,
    /// Temperature at which the clock goes down.
    pub throttle_c: f64,
    /// How far below it the clock goes up again.
    pub hysteresis_c: f64,
    /// Thermal resistance to the surroundings.
    pub resistance_c_per_w: f64,
    /// Heat capacity.
    pub capacitance_j_per_c: f64,
    /// Power at rest.
    pub idle_w: f64,
    /// Power at full clock by class of work, in the order of the classes.
    pub power_w: [f64; ComputeClass::COUNT],
    /// Clock steps in millionths of the full clock, falling; the first is the full clock.
    pub clocks_ppm: Vec<u32>,
    /// Time between two decisions about the clock.
    pub period: SimTime,
}

/// Clock, power, and how they develop.
impl ThermalThrottle {
    /// Temperature after `time` at constant power.
    fn after(&self, temperature: f64, power: f64, time: SimTime) -> f64 {
        let limit = self.ambient_c + power * self.resistance_c_per_w;
        let seconds = time.0 as f64 * 1e-12;
        limit + (temperature - limit) * exp(-seconds / (self.resistance_c_per_w * self.capacitance_j_per_c))
    }

    fn power(&self, full_power: f64, level: u32) -> f64 {
        let clock = f64::from(self.clocks_ppm[level as usize]) / FULL_PPM as f64;
        self.idle_w + (full_power - self.idle_w) * clock * clock * clock
    }

    fn decide(&self, state: &mut StreamState) {
        if state.temperature >= self.throttle_c {
            state.level = (state.level + 1).min(self.clocks_ppm.len() as u32 - 1);
        } else if state.temperature <= self.throttle_c - self.hysteresis_c {
            state.level = state.level.saturating_sub(1);
        }
    }

    fn next_decision(&self, time: SimTime) -> SimTime {
        SimTime((time.0.div_euclid(self.period.0) + 1).saturating_mul(self.period.0))
    }

    /// Lets time pass without work. At full clock below the threshold it takes one step: only work heats.
    fn rest(&self, state: &mut StreamState, until: SimTime) {
        while state.time < until {
            let is_settled = state.level == 0 && state.temperature < self.throttle_c;
            let next = if is_settled { until } else { self.next_decision(state.time).min(until) };
            state.temperature = self.after(state.temperature, self.idle_w, next - state.time);
            let is_decision = !is_settled && next.0 % self.period.0 == 0;
            state.time = next;
            if is_decision {
                self.decide(state);
            }
        }
    }

    /// Does work that takes `work` at full clock.
    fn work(&self, state: &mut StreamState, full_power: f64, work: SimTime) {
        let mut left = i128::from(work.0) * i128::from(FULL_PPM);
        while left > 0 {
            let clock = i128::from(self.clocks_ppm[state.level as usize]);
            let next = self.next_decision(state.time);
            let slot = i128::from((next - state.time).0);
            let needed = (left + clock - 1) / clock;
            let step = needed.min(slot);
            let power = self.power(full_power, state.level);
            state.temperature = self.after(state.temperature, power, SimTime(step as i64));
            state.time = SimTime(state.time.0.saturating_add(step as i64));
            left -= step * clock;
            if step == slot {
                self.decide(state);
            }
        }
    }
}

impl Rule for ThermalThrottle {
    fn touches(&self, rank: Rank) -> Option<u64> {
        self.ranks.contains(rank).then_some(0)
    }

    fn changes_compute(&self, rank: Rank) -> bool {
        self.ranks.contains(rank)
    }

    fn initial_state(&self) -> Option<StreamState> {
        Some(StreamState { time: SimTime::ZERO, temperature: self.initial_c, level: 0 })
    }

    fn compute(&self, site: &ComputeSite, duration: SimTime, state: &mut StreamState) -> SimTime {
        self.rest(state, site.when.time);
        self.work(state, self.power_w[site.class as usize], duration);
        state.time - site.when.time
    }
}
