//! Clocks of slices that were recorded at different times or on different machines, brought to one.
//!
//! A slice `s` reads `t` where the reference reads `t + offset_s + rate_s * (t - centre_s)`. What is known are *ties*: events
//! that several slices saw at one moment, such as the end of a collective that all members wait for, or any op of a reference
//! slice that is run again between others. [`solve`] finds the offsets and rates for which the ties of each event agree best:
//! iteratively reweighted least squares, so that a few wrong ties (a member that was preempted before it read its clock)
//! count for little.
//!
//! Residuals are exact: times are integers of picoseconds, rates are fixed-point with 50 binary digits, and sums are
//! 128 bits wide. Only the small corrections to them are floating-point, in a fixed order, so equal ties give equal clocks.

mod apply;
mod linear;
mod repeated;
mod shared;

pub use apply::{align, ends_of, place, set_ends, ties_of};
pub use repeated::{compare_repeated, stretch_host};
pub use shared::{Seen, SharedPart, compare_shared};

use crate::units::SimTime;
use linear::Symmetric;
use serde::Serialize;
use std::collections::BTreeMap;

/// An event that a slice saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Which slice.
    pub slice: u32,
    /// Which event; ties of one event are of one moment.
    pub event: u64,
    /// When, on the slice's own clock.
    pub time: SimTime,
}

/// How to solve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOptions {
    /// The slice whose clock all others are brought to.
    pub reference: u32,
    /// A rate beyond this is no clock's.
    pub max_drift_ppm: u32,
    /// Ties are not expected to agree better than this.
    pub noise_floor: SimTime,
}

impl Default for ClockOptions {
    fn default() -> Self {
        Self { reference: 0, max_drift_ppm: 1000, noise_floor: SimTime::from_ns(1) }
    }
}

/// Binary digits of a rate's fraction.
const RATE_BITS: u32 = 50;

/// How a slice's clock goes against the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// What the reference is ahead at `centre`.
    offset_ps: i64,
    /// What it gains per unit of the slice's time, in 2^-50.
    rate: i64,
    /// The middle of what was observed, on the slice's clock.
    centre_ps: i64,
}

impl Clock {
    /// A moment of the slice on the reference's clock; to the nearest picosecond.
    #[must_use]
    pub fn to_reference(&self, time: SimTime) -> SimTime {
        let exact = self.exact(time) + (1_i128 << (RATE_BITS - 1));
        SimTime::from_ps(i64::try_from(exact >> RATE_BITS).unwrap_or(if exact < 0 { i64::MIN } else { i64::MAX }))
    }

    /// A duration of the slice on the reference's clock; to the nearest picosecond.
    #[must_use]
    pub fn stretch(&self, duration: SimTime) -> SimTime {
        let ps = i128::from(duration.as_ps());
        let exact = (ps << RATE_BITS) + ps * i128::from(self.rate) + (1_i128 << (RATE_BITS - 1));
        SimTime::from_ps(i64::try_from(exact >> RATE_BITS).unwrap_or(i64::MAX))
    }

    /// How much the reference is ahead of the slice when the slice reads zero.
    #[must_use]
    pub fn offset(&self) -> SimTime {
        self.to_reference(SimTime::ZERO)
    }

    /// How much faster the reference goes, in millionths.
    #[must_use]
    pub fn drift_ppm(&self) -> f64 {
        self.rate as f64 / (1_u64 << RATE_BITS) as f64 * 1e6
    }

    /// In units of 2^-50 ps: i64 times fit with room.
    fn exact(&self, time: SimTime) -> i128 {
        let ps = i128::from(time.as_ps());
        ((ps + i128::from(self.offset_ps)) << RATE_BITS) + (ps - i128::from(self.centre_ps)) * i128::from(self.rate)
    }
}

/// How well a slice's ties agree with all others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SliceFit {
    /// Ties with other slices.
    pub ties: u32,
    /// Those that count for less than a tenth because they disagree.
    pub set_aside: u32,
    /// Root mean square of what the others miss the events' moments by, ns.
    pub rms_ns: f64,
    /// Standard error of the clock in the middle of what was observed, ns; 0 for the reference.
    pub error_ns: f64,
}

/// Clocks of all slices.
#[derive(Clone, Debug, PartialEq)]
pub struct Clocks {
    /// By slice.
    pub clocks: Vec<Clock>,
    /// By slice.
    pub fits: Vec<SliceFit>,
    /// Rounds until nothing moved.
    pub rounds: u32,
}

/// Ties that give no clocks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ClockError {
    /// There are parts of the job without a tie between them.
    Disconnected {
        /// Slices that are tied to each other, the reference's first.
        parts: Vec<Vec<u32>>,
    },
    /// A slice's ties do not tell offset and rate apart.
    TooFew {
        /// The slice.
        slice: u32,
    },
    /// The solution is no clock.
    Drift {
        /// The slice.
        slice: u32,
        /// The rate.
        drift_ppm: f64,
        /// The limit.
        max_ppm: u32,
    },
    /// Input out of range.
    Input(String),
}

impl ClockError {
    /// In words, with the slices' names.
    #[must_use]
    pub fn describe(&self, name: &dyn Fn(u32) -> String) -> String {
        match self {
            Self::Disconnected { parts } => {
                let parts: Vec<_> = parts.iter().map(|part| listed(part, name)).collect();
                format!(
                    "no event ties {} to {}: record an event that both see (a collective of all ranks, or the reference \
                     slice again)",
                    parts.first().map_or("", String::as_str),
                    parts[1..].join(", nor to ")
                )
            }
            Self::TooFew { slice } => format!(
                "the ties of {} do not tell its clock: it needs two events or more, at different times",
                name(*slice)
            ),
            Self::Drift { slice, drift_ppm, max_ppm } => format!(
                "the clock of {} would gain {drift_ppm:.0} ppm, more than {max_ppm}: that is no clock's drift, its ties \
                 are of different events",
                name(*slice)
            ),
            Self::Input(text) => text.clone(),
        }
    }
}

impl std::fmt::Display for ClockError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe(&|slice| format!("slice {slice}")))
    }
}

impl std::error::Error for ClockError {}

fn listed(slices: &[u32], name: &dyn Fn(u32) -> String) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = slices.iter().take(SHOWN).map(|slice| name(*slice)).collect();
    let more = if slices.len() > SHOWN { format!(" and {} more", slices.len() - SHOWN) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Two numbers per slice: the matrix stays within 34 MB.
const MAX_SLICES: u32 = 1024;
/// Times within a quarter of what fits, so that offsets do.
const MAX_PS: i64 = i64::MAX / 4;
const MAX_ROUNDS: u32 = 100;
/// Most rounds with weights that keep the problem convex, before wrong ties are let go.
const CONVEX_ROUNDS: u32 = 40;
/// They may end when nothing moves further than this, ps: little against any noise.
const CONVEX_ENOUGH_PS: f64 = 10_000.0;

/// The clocks of `slices` slices. Slices are numbered from 0; events that only one slice saw say nothing.
///
/// Cost: O(ties * slices of an event + slices^3) per round, some ten rounds.
///
/// # Errors
/// Slices without ties to the others (named), with too few of them, or that contradict each other too much for a clock.
pub fn solve(slices: u32, ties: &[Tie], options: &ClockOptions) -> Result<Clocks, ClockError> {
    check(slices, ties, options)?;
    let events = events_of(ties);
    check_connected(slices, &events, options.reference)?;
    Solver::new(slices, events, *options).run()
}

fn check(slices: u32, ties: &[Tie], options: &ClockOptions) -> Result<(), ClockError> {
    let input = |text: String| Err(ClockError::Input(text));
    if slices > MAX_SLICES {
        return input(format!(
            "{slices} slices are more than {MAX_SLICES}: solve the clocks of machines, not of ranks"
        ));
    }
    if options.reference >= slices {
        return input(format!("the reference, slice {}, is none of the {slices} slices", options.reference));
    }
    if let Some(tie) = ties.iter().find(|tie| tie.slice >= slices) {
        return input(format!("a tie is of slice {}, which is none of the {slices} slices", tie.slice));
    }
    match ties.iter().find(|tie| tie.time.as_ps().unsigned_abs() > MAX_PS.unsigned_abs()) {
        Some(tie) => input(format!("a time of slice {} is more than 26 days from zero", tie.slice)),
        None => Ok(()),
    }
}

/// Ties of each event that several slices saw, ordered. Of several ties of a slice the first counts.
fn events_of(ties: &[Tie]) -> Vec<Vec<Tie>> {
    let mut by_event: BTreeMap<u64, BTreeMap<u32, Tie>> = BTreeMap::new();
    for tie in ties {
        by_event.entry(tie.event).or_default().entry(tie.slice).or_insert(*tie);
    }
    by_event.into_values().filter(|ties| ties.len() > 1).map(|ties| ties.into_values().collect()).collect()
}

/// The slice that stands for all that are known to be tied to this one.
fn find(part: &mut [u32], slice: u32) -> u32 {
    let mut root = slice;
    while part[root as usize] != root {
        part[root as usize] = part[part[root as usize] as usize];
        root = part[root as usize];
    }
    root
}

fn check_connected(slices: u32, events: &[Vec<Tie>], reference: u32) -> Result<(), ClockError> {
    let mut part: Vec<u32> = (0..slices).collect();
    for event in events {
        let first = find(&mut part, event[0].slice);
        for tie in &event[1..] {
            let other = find(&mut part, tie.slice);
            part[other as usize] = first;
        }
    }
    let mut parts: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for slice in 0..slices {
        parts.entry(find(&mut part, slice)).or_default().push(slice);
    }
    if parts.len() <= 1 {
        return Ok(());
    }
    let mut parts: Vec<_> = parts.into_values().collect();
    parts.sort_by_key(|part| (!part.contains(&reference), part[0]));
    Err(ClockError::Disconnected { parts })
}

struct Solver {
    events: Vec<Vec<Tie>>,
    options: ClockOptions,
    clocks: Vec<Clock>,
    /// Half of what was observed, by slice: rates are solved for in its unit, which keeps the matrix well-scaled.
    half_span: Vec<f64>,
    weights: Vec<Vec<f64>>,
}

impl Solver {
    fn new(slices: u32, events: Vec<Vec<Tie>>, options: ClockOptions) -> Self {
        let mut range = vec![(i64::MAX, i64::MIN); slices as usize];
        for tie in events.iter().flatten() {
            let (first, last) = &mut range[tie.slice as usize];
            (*first, *last) = ((*first).min(tie.time.as_ps()), (*last).max(tie.time.as_ps()));
        }
        let middle = |(first, last): &(i64, i64)| if first > last { 0 } else { first / 2 + last / 2 };
        let half = |(first, last): &(i64, i64)| if first >= last { 1.0 } else { (*last - *first) as f64 / 2.0 };
        let clocks = range.iter().map(|range| Clock { centre_ps: middle(range), ..Clock::default() }).collect();
        let half_span = range.iter().map(half).collect();
        let weights = events.iter().map(|event| vec![1.0; event.len()]).collect();
        Self { events, options, clocks, half_span, weights }
    }

    fn run(mut self) -> Result<Clocks, ClockError> {
        let (mut rounds, mut redescends) = (0, false);
        loop {
            rounds += 1;
            // Where nothing is solved yet, what ties miss says nothing about them.
            if rounds > 2 {
                let residuals = self.residuals();
                self.weigh(&residuals, redescends);
            }
            let (normal, right) = self.normal(&self.residuals());
            let factor = normal.factor().map_err(|unknown| self.too_few(unknown))?;
            let moved = self.correct(&factor.solve(&right))?;
            let is_settled = redescends && moved < 2.0;
            redescends |= rounds > 2 && (moved < CONVEX_ENOUGH_PS || rounds >= CONVEX_ROUNDS);
            if is_settled || rounds == MAX_ROUNDS {
                let fits = self.fits(&factor);
                self.check_drift()?;
                return Ok(Clocks { clocks: self.clocks, fits, rounds });
            }
        }
    }

    /// What each tie misses its event's moment by, ps: the moment is the mean of its ties by weight.
    fn residuals(&self) -> Vec<Vec<f64>> {
        let scale = 1.0 / (1_u64 << RATE_BITS) as f64;
        let of_event = |(event, weights): (&Vec<Tie>, &Vec<f64>)| {
            let exact = |tie: &Tie| self.clocks[tie.slice as usize].exact(tie.time);
            let first = exact(&event[0]);
            // Differences are small: nothing is lost by the conversion.
            let apart: Vec<f64> = event.iter().map(|tie| (exact(tie) - first) as f64 * scale).collect();
            let sum: f64 = weights.iter().sum();
            let mean = apart.iter().zip(weights).map(|(apart, weight)| apart * weight).sum::<f64>() / sum;
            apart.iter().map(|apart| apart - mean).collect()
        };
        self.events.iter().zip(&self.weights).map(of_event).collect()
    }

    /// Weights by how much a tie misses: all that do not miss more than usual count fully.
    fn weigh(&mut self, residuals: &[Vec<f64>], redescends: bool) {
        let mut sizes: Vec<f64> = residuals.iter().flatten().map(|residual| residual.abs()).collect();
        if sizes.is_empty() {
            return;
        }
        sizes.sort_by(f64::total_cmp);
        // The median of what normal noise misses is 0.6745 of its deviation.
        let usual = (sizes[sizes.len() / 2] / 0.6745).max(self.options.noise_floor.as_ps() as f64);
        for (weight, residual) in self.weights.iter_mut().flatten().zip(residuals.iter().flatten()) {
            let size = residual.abs() / usual;
            *weight = if redescends {
                let far = size / 4.0;
                let weight = 1.0 / ((1.0 + far * far) * (1.0 + far * far));
                // What pulls a thousandth of what a usual tie may: no slice is left without any tie.
                weight.max(1e-3 / size.max(1.0))
            } else {
                1.5 / size.max(1.5)
            };
        }
    }

    /// Normal equations of the corrections: per slice but the reference, one of the offset and one of the rate in units of
    /// the half span.
    fn normal(&self, residuals: &[Vec<f64>]) -> (Symmetric, Vec<f64>) {
        let unknowns = 2 * (self.clocks.len() - 1);
        let (mut normal, mut right) = (Symmetric::new(unknowns), vec![0.0; unknowns]);
        for ((event, weights), residuals) in self.events.iter().zip(&self.weights).zip(residuals) {
            let sum: f64 = weights.iter().sum();
            for (i, tie) in event.iter().enumerate() {
                let Some(row) = self.unknown_of(tie.slice) else { continue };
                let u = self.lever(tie);
                right[row] -= weights[i] * residuals[i];
                right[row + 1] -= weights[i] * residuals[i] * u;
                for (j, other) in event.iter().enumerate() {
                    let Some(column) = self.unknown_of(other.slice).filter(|column| *column <= row) else { continue };
                    // Of the others, summed up: what is left of the sum without its own may be nothing but rounding.
                    let others = || weights.iter().enumerate().filter(|(k, _)| *k != i).map(|(_, weight)| weight);
                    let factor = if i == j { others().sum() } else { -weights[j] };
                    let weight = weights[i] * factor / sum;
                    let v = self.lever(other);
                    normal.add(row, column, weight);
                    normal.add(row + 1, column, weight * u);
                    normal.add(row + 1, column + 1, weight * u * v);
                    if row != column {
                        normal.add(row, column + 1, weight * v);
                    }
                }
            }
        }
        (normal, right)
    }

    fn unknown_of(&self, slice: u32) -> Option<usize> {
        let reference = self.options.reference;
        (slice != reference).then(|| 2 * (slice as usize - usize::from(slice > reference)))
    }

    fn slice_of(&self, unknown: usize) -> usize {
        let place = unknown / 2;
        place + usize::from(place >= self.options.reference as usize)
    }

    /// Distance from the centre, in half spans.
    fn lever(&self, tie: &Tie) -> f64 {
        let slice = tie.slice as usize;
        (tie.time.as_ps() - self.clocks[slice].centre_ps) as f64 / self.half_span[slice]
    }

    /// Moves the clocks; returns the longest way, ps.
    fn correct(&mut self, corrections: &[f64]) -> Result<f64, ClockError> {
        let mut moved: f64 = 0.0;
        for unknown in (0..corrections.len()).step_by(2) {
            let slice = self.slice_of(unknown);
            let (offset, lever) = (corrections[unknown], corrections[unknown + 1]);
            let rate = lever / self.half_span[slice] * (1_u64 << RATE_BITS) as f64;
            let one = (1_u64 << RATE_BITS) as f64;
            // A rate of one doubles time: no clock, and beyond what is exact.
            if !offset.is_finite() || offset.abs() > MAX_PS as f64 || rate.abs() >= one {
                let (drift_ppm, max_ppm) = (rate / one * 1e6, self.options.max_drift_ppm);
                return Err(ClockError::Drift { slice: slice as u32, drift_ppm, max_ppm });
            }
            moved = moved.max(offset.abs()).max(lever.abs());
            let clock = &mut self.clocks[slice];
            clock.offset_ps = clock.offset_ps.saturating_add(offset.round() as i64);
            clock.rate = clock.rate.saturating_add(rate.round() as i64);
        }
        Ok(moved)
    }

    fn too_few(&self, unknown: usize) -> ClockError {
        ClockError::TooFew { slice: self.slice_of(unknown) as u32 }
    }

    fn check_drift(&self) -> Result<(), ClockError> {
        let max_ppm = self.options.max_drift_ppm;
        for (slice, clock) in self.clocks.iter().enumerate() {
            let drift_ppm = clock.drift_ppm();
            if drift_ppm.abs() > f64::from(max_ppm) {
                return Err(ClockError::Drift { slice: slice as u32, drift_ppm, max_ppm });
            }
        }
        Ok(())
    }

    fn fits(&self, factor: &linear::Factor) -> Vec<SliceFit> {
        let residuals = self.residuals();
        let mut sums = vec![(0_u32, 0_u32, 0.0_f64); self.clocks.len()];
        let (mut squares, mut weight_sum) = (0.0, 0.0);
        for ((event, weights), residuals) in self.events.iter().zip(&self.weights).zip(&residuals) {
            for ((tie, weight), residual) in event.iter().zip(weights).zip(residuals) {
                let (ties, aside, sum) = &mut sums[tie.slice as usize];
                *ties += 1;
                *aside += u32::from(*weight < 0.1);
                *sum += residual * residual;
                squares += weight * residual * residual;
                weight_sum += weight;
            }
        }
        // Every event's moment and every clock was fitted: so many ties fewer say how far they scatter.
        let freedom = (weight_sum - self.events.len() as f64 - 2.0 * (self.clocks.len() as f64 - 1.0)).max(1.0);
        let variance = squares / freedom;
        let fit = |(slice, (ties, set_aside, sum)): (usize, &(u32, u32, f64))| {
            let unknown = self.unknown_of(slice as u32);
            let error = unknown.map_or(0.0, |unknown| (variance * factor.inverse_at(unknown)).sqrt());
            let rms = if *ties == 0 { 0.0 } else { (sum / f64::from(*ties)).sqrt() };
            SliceFit { ties: *ties, set_aside: *set_aside, rms_ns: rms / 1e3, error_ns: error / 1e3 }
        };
        sums.iter().enumerate().map(fit).collect()
    }
}
