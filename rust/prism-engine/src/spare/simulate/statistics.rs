//! What many runs say.

use super::Run;
use serde::Serialize;

/// A quantity over runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Band {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean.
    pub standard_error: f64,
    /// A tenth of the runs is below.
    pub p10: f64,
    /// Half of the runs is below.
    pub p50: f64,
    /// A tenth of the runs is above.
    pub p90: f64,
}

impl Band {
    /// Of some numbers; all zero if there are none. Percentiles by linear interpolation.
    #[must_use]
    pub fn of(numbers: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.collect();
        if sorted.is_empty() {
            return Self::default();
        }
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / count;
        let square = sorted.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
        let standard_error = if sorted.len() > 1 { libm::sqrt(square / (count - 1.0) / count) } else { 0.0 };
        let at = |share: f64| {
            let place = share * (count - 1.0);
            let (low, part) = (place as usize, place.fract());
            let high = (low + 1).min(sorted.len() - 1);
            sorted[low] + part * (sorted[high] - sorted[low])
        };
        Self { mean, standard_error, p10: at(0.1), p50: at(0.5), p90: at(0.9) }
    }
}

/// Many runs of one set-up.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Runs.
    pub runs: usize,
    /// Runs that came to their end.
    pub finished: usize,
    /// Are the first and the second half of the runs no further apart than chance explains (3 standard errors)?
    pub is_converged: bool,
    /// See [`Run`].
    pub total_s: Band,
    /// See [`Run`].
    pub relative_time: Band,
    /// See [`Run`].
    pub availability: Band,
    /// See [`Run`].
    pub goodput: Band,
    /// See [`Run`].
    pub failures: Band,
    /// See [`Run`].
    pub restarts: Band,
    /// See [`Run`].
    pub reorders: Band,
    /// See [`Run`].
    pub repeated_steps: Band,
    /// See [`Run`].
    pub mean_stacks: Band,
    /// See [`Run`].
    pub local_restarts: Band,
    /// See [`Run`].
    pub rejoins: Band,
    /// See [`Run`].
    pub progress: Band,
    /// Runs that went on after the end of the observed failures.
    pub beyond_trace: usize,
}

/// Sums runs up.
#[must_use]
pub fn summarise(runs: &[Run]) -> Summary {
    let band = |of: fn(&Run) -> f64| Band::of(runs.iter().map(of));
    let half = runs.len() / 2;
    let [first, second] = [&runs[..half], &runs[half..]].map(|runs| Band::of(runs.iter().map(|run| run.total_s)));
    let spread = libm::hypot(first.standard_error, second.standard_error);
    Summary {
        runs: runs.len(),
        finished: runs.iter().filter(|run| run.progress >= 1.0).count(),
        is_converged: runs.len() >= 8 && (first.mean - second.mean).abs() <= 3.0 * spread,
        total_s: band(|run| run.total_s),
        relative_time: band(|run| run.relative_time),
        availability: band(|run| run.availability),
        goodput: band(|run| run.goodput),
        failures: band(|run| run.failures as f64),
        restarts: band(|run| run.restarts as f64),
        reorders: band(|run| run.reorders as f64),
        repeated_steps: band(|run| run.repeated_steps as f64),
        mean_stacks: band(|run| run.mean_stacks),
        local_restarts: band(|run| run.local_restarts as f64),
        rejoins: band(|run| run.rejoins as f64),
        progress: band(|run| run.progress),
        beyond_trace: runs.iter().filter(|run| run.beyond_trace_s > 0.0).count(),
    }
}
