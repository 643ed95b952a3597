//! Computing beside communication: how much slower each class of work is.

use crate::graph::op::ComputeClass;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// Largest factor.
const MAX_FACTOR: f64 = 1000.0;
/// A factor of 1.
const ONE: u32 = 1_000_000;

/// Where factors come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FactorProvenance {
    /// Observed on the machine that is emulated.
    Measured,
    /// Chosen by somebody.
    #[default]
    Default,
}

/// Factors that cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum OverlapError {
    /// The text has no such form.
    #[error("overlap: {0}")]
    Text(String),
    /// A factor is out of range.
    #[error("overlap: the factor of {class} is {factor}: it must be at least 1 and at most {MAX_FACTOR}")]
    Range {
        /// Class of work.
        class: String,
        /// The factor.
        factor: f64,
    },
    /// There is no such class of work.
    #[error("overlap: there is no class of work {0:?} (there are gemm, kernel, memcpy, memset, operator)")]
    Class(String),
}

/// How many times longer computations take while any communication of the same rank is under way: from the moment the rank
/// has come to a launch to the launch's end on the rank, waiting for peers included (the kernel occupies its multiprocessors
/// while it waits). Factors are exact to a millionth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Table", into = "Table")]
pub struct Overlap {
    /// In millionths, by class.
    ppm: [u32; ComputeClass::COUNT],
    /// Where the factors come from.
    pub provenance: FactorProvenance,
}

impl Default for Overlap {
    fn default() -> Self {
        Self { ppm: [ONE; ComputeClass::COUNT], provenance: FactorProvenance::Default }
    }
}

/// The table of factors.
#[derive(Deserialize, Serialize)]
struct Table {
    #[serde(default)]
    provenance: FactorProvenance,
    #[serde(flatten)]
    factors: BTreeMap<String, f64>,
}

impl TryFrom<Table> for Overlap {
    type Error = OverlapError;

    fn try_from(table: Table) -> Result<Self, OverlapError> {
        let factors = table.factors.iter().map(|(name, factor)| (name.as_str(), *factor));
        Ok(Self { provenance: table.provenance, ..Self::new(factors)? })
    }
}

impl From<Overlap> for Table {
    fn from(overlap: Overlap) -> Self {
        let named = CLASSES.iter().map(|(name, class)| (*name, overlap.ppm(*class)));
        let factors = named.filter(|(_, ppm)| *ppm != ONE);
        let factors = factors.map(|(name, ppm)| (name.to_owned(), f64::from(ppm) / f64::from(ONE))).collect();
        Self { provenance: overlap.provenance, factors }
    }
}

impl Overlap {
    /// Factors by class of work (`gemm`, `kernel`, `memcpy`, `memset`, `operator`); 1 for those not named.
    pub fn new<'a>(factors: impl IntoIterator<Item = (&'a str, f64)>) -> Result<Self, OverlapError> {
        let mut overlap = Self::default();
        for (name, factor) in factors {
            let class = class_of(name).ok_or_else(|| OverlapError::Class(name.to_owned()))?;
            if !(1.0..=MAX_FACTOR).contains(&factor) {
                return Err(OverlapError::Range { class: name.to_owned(), factor });
            }
            overlap.ppm[class as usize] = (factor * f64::from(ONE)).round() as u32;
        }
        Ok(overlap)
    }

    /// From TOML: a table `[overlap]` with a factor per class and `provenance = "measured"` or `"default"`. A text without
    /// the table has no factors.
    pub fn from_toml(text: &str) -> Result<Self, OverlapError> {
        let document: toml::Table =
            text.parse().map_err(|error: toml::de::Error| OverlapError::Text(error.to_string()))?;
        let Some(section) = document.get("overlap") else { return Ok(Self::default()) };
        let table: Table =
            section.clone().try_into().map_err(|error: toml::de::Error| OverlapError::Text(error.to_string()))?;
        table.try_into()
    }

    /// Does nothing change?
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.ppm == [ONE; ComputeClass::COUNT]
    }

    /// The factor of a class, in millionths.
    pub(crate) fn ppm(&self, class: ComputeClass) -> u32 {
        self.ppm[class as usize]
    }
}

/// Names of the classes.
const CLASSES: [(&str, ComputeClass); 5] = [
    ("gemm", ComputeClass::Gemm),
    ("kernel", ComputeClass::Kernel),
    ("memcpy", ComputeClass::Memcpy),
    ("memset", ComputeClass::Memset),
    ("operator", ComputeClass::Operator),
];

fn class_of(name: &str) -> Option<ComputeClass> {
    CLASSES.iter().find(|(known, _)| *known == name).map(|(_, class)| *class)
}

/// A computation that may be slowed down, in units in which full speed is its factor (in millionths) per picosecond and the
/// slow speed a million: both exact.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) node: u32,
    /// Tells its end from ends foreseen before.
    pub(super) version: u32,
    ppm: u32,
    left: u128,
    since: i64,
}

impl Running {
    /// Starts at `now` to last `duration` at full speed.
    pub(super) fn new(node: u32, ppm: u32, duration: i64, now: i64) -> Self {
        Self { node, version: 0, ppm, left: u128::from(duration.unsigned_abs()) * u128::from(ppm), since: now }
    }

    fn speed(&self, is_slowed: bool) -> u128 {
        u128::from(if is_slowed { ONE } else { self.ppm })
    }

    /// Accounts for the time until `now`; returns it.
    pub(super) fn advance(&mut self, is_slowed: bool, now: i64) -> i64 {
        let passed = now - self.since;
        let done = u128::from(passed.unsigned_abs()) * self.speed(is_slowed);
        self.left = self.left.saturating_sub(done);
        self.since = now;
        passed
    }

    /// When it ends if nothing changes; rounded up.
    pub(super) fn end(&self, is_slowed: bool) -> i64 {
        let left = self.left.div_ceil(self.speed(is_slowed));
        self.since + i64::try_from(left).unwrap_or(i64::MAX / 2)
    }
}
