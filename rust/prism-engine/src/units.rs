//! Quantities with their unit in the type.

use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign, Sub};

/// Virtual time or duration: i64 picoseconds inside (106 days), nanoseconds at every interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SimTime(pub i64);

impl SimTime {
    /// The beginning.
    pub const ZERO: Self = Self(0);
    /// Later than everything.
    pub const MAX: Self = Self(i64::MAX);

    /// From picoseconds.
    #[must_use]
    pub const fn from_ps(ps: i64) -> Self {
        Self(ps)
    }

    /// From nanoseconds.
    #[must_use]
    pub const fn from_ns(ns: i64) -> Self {
        Self(ns.saturating_mul(1000))
    }

    /// From seconds as a model computes them, rounded to the nearest picosecond.
    #[must_use]
    pub fn from_secs_f64(seconds: f64) -> Self {
        Self((seconds * 1e12).round() as i64)
    }

    /// Picoseconds.
    #[must_use]
    pub const fn as_ps(self) -> i64 {
        self.0
    }

    /// Whole nanoseconds, rounded up: nothing is reported before it is over.
    #[must_use]
    pub const fn as_ns(self) -> i64 {
        self.0.div_euclid(1000) + (self.0.rem_euclid(1000) != 0) as i64
    }

    /// Scaled by a speed factor (1.3 = 30 % longer), rounded to the nearest picosecond.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self((self.0 as f64 * factor).round() as i64)
    }
}

impl Add for SimTime {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for SimTime {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for SimTime {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}
