//! Closed forms: how many failures a placement endures, what that costs, and when to save.
//!
//! Failures strike live groups uniformly and without replacement. `T` is the number of the failure that wipes a type out;
//! `T - 1` failures are *masked*. Published forms are from arXiv 2603.00357; what is ours is said so. If every group failed
//! independently with probability `p`, let `R(p)` be the chance that no type is lost. Then, for any placement,
//! `E[T] = (N + 1) * integral of R(p) over 0 <= p <= 1`, because `1 / C(N,k) = (N + 1) * integral of p^k (1-p)^(N-k)`.

use super::placement::{Placement, Stacks};
use super::{SpareError, check_groups, check_redundancy, not_negative, positive};
use libm::{exp, expm1, floor, lgamma, log, log2, pow, sqrt, tgamma};

/// Euler's constant over ln 2: the constant of [`redundancy_rule`].
const GAMMA_OVER_LN2: f64 = 0.832_746_177_164_357_2;

/// Largest job whose expectation is found by looking at every set of failed groups.
const MAX_BRUTE_FORCE: u32 = 20;

/// Entries a survivor must compute at least after `k` of `n` failures: `c(k) = ceil(n / (n - k))`.
#[must_use]
pub fn least_stacks(n: u32, k: u32) -> Option<u32> {
    (k < n).then(|| n.div_ceil(n - k))
}

/// Published estimate of the failures endured: `mu = Gamma(1 + 1/r) n^(1 - 1/r)`.
///
/// Within 1 % of simulation of the Golomb placement for r >= 3 and n >= 200 (measured); too high by 3 % at r = 2, n = 200.
pub fn mean_endurable_failures(n: u32, r: u32) -> Result<f64, SpareError> {
    check_redundancy(n, r)?;
    let inverse = 1.0 / f64::from(r);
    Ok(tgamma(1.0 + inverse) * pow(f64::from(n), 1.0 - inverse))
}

/// Probability that the first `k` failures are all masked, by the published Weibull law: `exp(-n (k/n)^r)`.
pub fn masked_probability(n: u32, r: u32, k: f64) -> Result<f64, SpareError> {
    check_redundancy(n, r)?;
    not_negative("k", k)?;
    Ok(exp(-f64::from(n) * pow(k / f64::from(n), f64::from(r))))
}

/// Mean entries computed per step until the wipe-out can never be below the mean of `c(k)` over `k < floor(mu)`.
pub fn overhead_lower_bound(n: u32, r: u32) -> Result<f64, SpareError> {
    let endured = (floor(mean_endurable_failures(n, r)?) as u32).clamp(1, n - 1);
    let sum: f64 = (0..endured).filter_map(|k| least_stacks(n, k)).map(f64::from).sum();
    Ok(sum / f64::from(endured))
}

/// Published rule of thumb: `r* = floor(log2 n + gamma / ln 2)`, where about half of the groups may fail.
pub fn redundancy_rule(n: u32) -> Result<u32, SpareError> {
    check_groups(n)?;
    Ok(floor(log2(f64::from(n)) + GAMMA_OVER_LN2) as u32)
}

/// Mean time to a wipe-out, seconds, and mean number of failed groups until then, if every failed group is whole again after
/// `repair_s` and groups fail every `group_mtbf_s` on average.
///
/// Ours: a type is lost when the last of its `r` hosts fails while the others are down. With `p(t)` the chance that a group is
/// down, that happens at the rate `N r (1 - p) p^(r-1) / m`; `p` rises as `1 - exp(-t/m)`, as if nothing were repaired, until
/// it is `repair / (m + repair)`, where it stays. While it rises, the chance that no type is lost is `exp(-N p^r)`. Losses are
/// taken for independent; the placement does not matter here.
pub fn with_repair(n: u32, r: u32, group_mtbf_s: f64, repair_s: f64) -> Result<(f64, f64), SpareError> {
    const PANELS: u32 = 4096;
    /// Chances below `exp(-this)` are none.
    const NEVER: f64 = 40.0;
    check_redundancy(n, r)?;
    let (mtbf, repair) = (positive("group_mtbf_s", group_mtbf_s)?, not_negative("repair_s", repair_s)?);
    let (groups, hosts) = (f64::from(n), f64::from(r));
    let settled = repair / (mtbf + repair);
    let survival = |down: f64| exp(-groups * pow(down, hosts));
    let end = settled.min(pow(NEVER / groups, 1.0 / hosts));
    let (mut time, mut failed) = (0.0, 0.0);
    let step = end / f64::from(PANELS);
    for panel in 0..PANELS {
        let down = (f64::from(panel) + 0.5) * step;
        let passed = survival(down) * mtbf / (1.0 - down) * step;
        (time, failed) = (time + passed, failed + passed * down * groups);
    }
    if end < settled {
        return Ok((time, failed / time));
    }
    let rate = groups * hosts * (1.0 - settled) * pow(settled, hosts - 1.0) / mtbf;
    let rest = survival(settled) / rate;
    if !rest.is_finite() {
        return Ok((f64::INFINITY, settled * groups));
    }
    let total = time + rest;
    Ok((total, (failed + rest * settled * groups) / total))
}

/// Interval between checkpoints, seconds: `Tc = Ts + sqrt(Ts^2 + 2 Ts (Tf + Tr))`, where `Tf` is the mean time to a failure
/// that stops the job. It maximises [`availability`].
pub fn checkpoint_interval(save_s: f64, restart_s: f64, mtbf_s: f64) -> Result<f64, SpareError> {
    let (save, restart, mtbf) = check_times(save_s, restart_s, mtbf_s)?;
    Ok(save + sqrt(save * save + 2.0 * save * (mtbf + restart)))
}

/// Share of the time that is progress at the best interval: `A = (1 - Ts/Tc) Tf / (Tf + Tr + Tc/2)`.
pub fn availability(save_s: f64, restart_s: f64, mtbf_s: f64) -> Result<f64, SpareError> {
    availability_at(checkpoint_interval(save_s, restart_s, mtbf_s)?, save_s, restart_s, mtbf_s)
}

/// Share of the time that is progress when a checkpoint is finished every `interval_s` seconds.
pub fn availability_at(interval_s: f64, save_s: f64, restart_s: f64, mtbf_s: f64) -> Result<f64, SpareError> {
    let (save, restart, mtbf) = check_times(save_s, restart_s, mtbf_s)?;
    let interval = positive("interval_s", interval_s)?;
    if interval <= save {
        let expected = format!("it must be above save_s, {save}, or nothing but saving is done");
        return Err(SpareError::invalid("interval_s", interval, expected));
    }
    Ok((1.0 - save / interval) * mtbf / (mtbf + restart + interval / 2.0))
}

fn check_times(save_s: f64, restart_s: f64, mtbf_s: f64) -> Result<(f64, f64, f64), SpareError> {
    Ok((positive("save_s", save_s)?, not_negative("restart_s", restart_s)?, positive("mtbf_s", mtbf_s)?))
}

/// Expected time over useful time, `J(r) = S / A`: `S` from [`overhead_lower_bound`], `A` at the mean time to a wipe-out of
/// `mu` system failures.
pub fn relative_time(n: u32, r: u32, save_s: f64, restart_s: f64, system_mtbf_s: f64) -> Result<f64, SpareError> {
    let mtbf = positive("system_mtbf_s", system_mtbf_s)? * mean_endurable_failures(n, r)?;
    Ok(overhead_lower_bound(n, r)? / availability(save_s, restart_s, mtbf)?)
}

/// The redundancy of least [`relative_time`] in a range, and that time.
pub fn best_redundancy(
    n: u32,
    range: std::ops::RangeInclusive<u32>,
    save_s: f64,
    restart_s: f64,
    system_mtbf_s: f64,
) -> Result<(u32, f64), SpareError> {
    let mut best: Option<(u32, f64)> = None;
    for r in range.clone() {
        let time = relative_time(n, r, save_s, restart_s, system_mtbf_s)?;
        if best.is_none_or(|(_, least)| time < least) {
            best = Some((r, time));
        }
    }
    best.ok_or_else(|| SpareError::invalid("r", format!("{range:?}"), "the range is empty"))
}

/// Interval between checkpoints without redundancy, three ways. Seconds of work between two saves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Intervals {
    /// Young (1974): `sqrt(2 C M)`.
    pub young_s: f64,
    /// Daly (2006), higher order.
    pub daly_s: f64,
    /// The optimum of [`efficiency`] for exponential failures.
    pub exact_s: f64,
    /// Share of the time that is progress at the exact optimum.
    pub efficiency: f64,
    /// Is Young's interval more than 10 % off, because saving is not short against the mean time between failures?
    pub is_young_off: bool,
}

/// Young's, Daly's and the exact interval for saves of `save_s` and failures every `mtbf_s` on average, exponential.
pub fn intervals(save_s: f64, restart_s: f64, mtbf_s: f64) -> Result<Intervals, SpareError> {
    let (save, restart, mtbf) = check_times(save_s, restart_s, mtbf_s)?;
    let young = sqrt(2.0 * save * mtbf);
    let ratio = sqrt(save / (2.0 * mtbf));
    let daly = if save < 2.0 * mtbf { young * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - save } else { mtbf };
    let exact =
        golden_section(|log_t| -efficiency(exp(log_t), save, restart, mtbf), log(save * 1e-6), log(mtbf * 50.0));
    let exact = exp(exact);
    Ok(Intervals {
        young_s: young,
        daly_s: daly,
        exact_s: exact,
        efficiency: efficiency(exact, save, restart, mtbf),
        is_young_off: (young / exact - 1.0).abs() > 0.1,
    })
}

/// Progress per time with exponential failures, `work_s` of work between saves: `T / (M e^(R/M) (e^((T+C)/M) - 1))`.
#[must_use]
pub fn efficiency(work_s: f64, save_s: f64, restart_s: f64, mtbf_s: f64) -> f64 {
    work_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((work_s + save_s) / mtbf_s))
}

/// Where a function with one minimum has it.
fn golden_section(f: impl Fn(f64) -> f64, low: f64, high: f64) -> f64 {
    let ratio = (sqrt(5.0) - 1.0) / 2.0;
    let (mut low, mut high) = (low, high);
    let (mut a, mut b) = (high - ratio * (high - low), low + ratio * (high - low));
    let (mut at_a, mut at_b) = (f(a), f(b));
    for _ in 0..100 {
        if at_a < at_b {
            (high, b, at_b) = (b, a, at_a);
            a = high - ratio * (high - low);
            at_a = f(a);
        } else {
            (low, a, at_a) = (a, b, at_b);
            b = low + ratio * (high - low);
            at_b = f(b);
        }
    }
    f64::midpoint(low, high)
}

/// How an expectation was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// Exact up to rounding.
    Exact,
    /// Poisson approximation: within 0.7 % for n >= 600 and r >= 4, 1.3 % for n >= 200 and r >= 3 (measured).
    Poisson,
}

/// Mean number of failures masked before the wipe-out.
pub fn expected_masked(n: u32, r: u32, placement: &Placement) -> Result<(f64, Exactness), SpareError> {
    check_redundancy(n, r)?;
    if r == 1 {
        return Ok((0.0, Exactness::Exact));
    }
    match placement {
        Placement::Disjoint => Ok((disjoint(n, r) - 1.0, Exactness::Exact)),
        Placement::Contiguous if n > r => Ok((contiguous(n, r) - 1.0, Exactness::Exact)),
        _ => Ok(cyclic(n, r, &placement.offsets(n, r)?)),
    }
}

fn cyclic(n: u32, r: u32, offsets: &[u32]) -> (f64, Exactness) {
    if n <= MAX_BRUTE_FORCE {
        return (brute_force(&Stacks::cyclic(n, offsets)) - 1.0, Exactness::Exact);
    }
    if r == 2 && offsets[1] - offsets[0] > 0 && gcd(offsets[1] - offsets[0], n) == 1 {
        // Two copies at a constant distance that reaches everybody: neighbours on a renumbered circle.
        return (contiguous(n, 2) - 1.0, Exactness::Exact);
    }
    (poisson(n, r) - 1.0, Exactness::Poisson)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Ours: the expected number of types lost by `k` failures is `n (k)_r / (n)_r`; their number is nearly Poisson.
fn poisson(n: u32, r: u32) -> f64 {
    let lost = |k: u32| {
        if k < r {
            return 0.0;
        }
        let falling = |m: u32| lgamma(f64::from(m) + 1.0) - lgamma(f64::from(m - r) + 1.0);
        f64::from(n) * exp(falling(k) - falling(n))
    };
    (0..=n).map(|k| exp(-lost(k))).sum()
}

/// Ours, exact: every block must keep a member.
fn disjoint(n: u32, r: u32) -> f64 {
    let (blocks, rest) = (n / r, n % r);
    let survival = |p: f64| {
        let whole = pow(1.0 - pow(p, f64::from(r)), f64::from(blocks));
        if rest == 0 { whole } else { whole * (1.0 - pow(p, f64::from(rest))) }
    };
    expectation(n, survival)
}

/// Ours, exact: no `r` neighbours on the circle may all fail. `n > r`.
fn contiguous(n: u32, r: u32) -> f64 {
    let (size, run) = (n as usize, r as usize);
    let mut line = vec![1.0; size + 1];
    expectation_with(n, |p| {
        // line[m]: no run of r failures among m in a line.
        line[run] = 1.0 - pow(p, f64::from(r));
        for m in run + 1..=size {
            line[m] = line[m - 1] - pow(p, f64::from(r)) * (1.0 - p) * line[m - run - 1];
        }
        // The failures around a fixed place of the circle, between two survivors.
        let around = |i: usize| (i + 1) as f64 * pow(p, i as f64) * (1.0 - p) * (1.0 - p) * line[size - i - 2];
        (0..run.min(size - 1)).map(around).sum()
    })
}

/// Exact for small jobs: every set of failed groups.
fn brute_force(stacks: &Stacks) -> f64 {
    let n = stacks.len();
    let masks: Vec<u32> =
        stacks.hosts.iter().map(|hosts| hosts.iter().fold(0, |mask, group| mask | 1 << group)).collect();
    let mut survivors = vec![0u64; n as usize + 1];
    for failed in 0u32..1 << n {
        if masks.iter().all(|mask| failed & mask != *mask) {
            survivors[failed.count_ones() as usize] += 1;
        }
    }
    let mut sets = 1.0;
    let mut sum = 0.0;
    for (k, count) in (0..).zip(&survivors) {
        sum += *count as f64 / sets;
        sets = sets * f64::from(n - k.min(n)) / f64::from(k + 1);
    }
    sum
}

fn expectation(n: u32, survival: impl Fn(f64) -> f64) -> f64 {
    expectation_with(n, survival)
}

/// `(n + 1)` times the integral of `survival` from 0 to 1: Gauss-Legendre on panels; the integrand is a polynomial.
fn expectation_with(n: u32, mut survival: impl FnMut(f64) -> f64) -> f64 {
    const NODES: [f64; 4] =
        [0.183_434_642_495_649_8, 0.525_532_409_916_329, 0.796_666_477_413_626_7, 0.960_289_856_497_536_3];
    const WEIGHTS: [f64; 4] =
        [0.362_683_783_378_362, 0.313_706_645_877_887_3, 0.222_381_034_453_374_5, 0.101_228_536_290_376_26];
    const PANELS: u32 = 256;
    let half = 0.5 / f64::from(PANELS);
    let mut sum = 0.0;
    for panel in 0..PANELS {
        let middle = f64::from(2 * panel + 1) * half;
        for (node, weight) in NODES.iter().zip(WEIGHTS) {
            sum += weight * (survival(middle - half * node) + survival(middle + half * node));
        }
    }
    f64::from(n + 1) * half * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} instead of {b}");
    }

    #[test]
    fn exact_laws_agree_with_every_set_of_failures() {
        for (n, r) in [(9, 2), (12, 3), (12, 4), (13, 5), (14, 4)] {
            for placement in [Placement::Disjoint, Placement::Contiguous] {
                let brute = brute_force(&placement.stacks(n, r).unwrap()) - 1.0;
                near(expected_masked(n, r, &placement).unwrap().0, brute, 1e-9);
            }
        }
        near(expected_masked(7, 3, &Placement::Golomb).unwrap().0, 3.0, 1e-12);
        near(expected_masked(200, 2, &Placement::Golomb).unwrap().0, 12.037_073, 1e-5);
    }

    #[test]
    fn intervals_of_young_and_daly_and_the_optimum() {
        let rows = [
            (30.0, 1800.0, 150.0, 328.63, 308.94, 309.0, 0.7621, false),
            (60.0, 9000.0, 300.0, 1039.23, 999.62, 999.6, 0.8598, false),
            (120.0, 9000.0, 600.0, 1469.69, 1390.78, 1390.8, 0.7909, false),
            (30.0, 180.0, 60.0, 103.92, 84.89, 85.0, 0.3783, true),
        ];
        for (save, mtbf, restart, young, daly, exact, efficiency, off) in rows {
            let found = intervals(save, restart, mtbf).unwrap();
            near(found.young_s, young, 0.005);
            near(found.daly_s, daly, 0.005);
            near(found.exact_s, exact, 0.06);
            near(found.efficiency, efficiency, 5e-5);
            assert_eq!(found.is_young_off, off, "{found:?}");
        }
    }

    #[test]
    fn the_published_interval_is_the_optimum_of_availability() {
        let best = checkpoint_interval(60.0, 3600.0, 31560.0).unwrap();
        let at = |interval| availability_at(interval, 60.0, 3600.0, 31560.0).unwrap();
        assert!(at(best) > at(best * 1.01) && at(best) > at(best * 0.99));
    }

    #[test]
    fn inputs_are_refused_by_name() {
        assert!(checkpoint_interval(-1.0, 0.0, 1.0).unwrap_err().to_string().starts_with("save_s is -1"));
        assert!(checkpoint_interval(1.0, 0.0, f64::NAN).unwrap_err().to_string().starts_with("mtbf_s is NaN"));
        assert!(availability_at(5.0, 60.0, 1.0, 1.0).unwrap_err().to_string().contains("save_s"));
        assert!(mean_endurable_failures(1, 1).is_err());
    }
}
