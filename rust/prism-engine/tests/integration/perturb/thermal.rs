//! GPUs that get hot.

use super::{compute, ends_ns, job, op};
use prism_engine::graph::op::{ComputeClass, Op, OpKind};
use prism_engine::ids::StreamId;
use prism_engine::units::SimTime;

/// 30 °C around, 0.1 °C/W: 500 W lead to 80 °C with a time constant of 1 s.
const TEXT: &str = "[[perturb]]\nkind = \"thermal-throttle\"\nranks = [0]\nambient_c = 30\nthrottle_c = 70\n\
    hysteresis_c = 5\nresistance_c_per_w = 0.1\ncapacitance_j_per_c = 10\nidle_w = 0\npower_w = 500\n\
    clocks = [1.0, 0.8, 0.5]\nperiod_ns = 100000000\n";

fn gemm(us: i64) -> Op {
    op(0, compute(us, ComputeClass::Gemm, 0))
}

/// What the rule says, in small steps of time: seconds of work to seconds on the clock.
fn by_small_steps(runs: &[(f64, f64)]) -> Vec<f64> {
    const DT: f64 = 1e-5;
    let (clocks, mut level) = ([1.0, 0.8, 0.5], 0usize);
    let (mut temperature, mut ticks) = (30.0, 0u64);
    let mut took = Vec::new();
    for (rest, work) in runs {
        let mut idle = (*rest / DT).round() as u64;
        let (mut left, start) = (*work, ticks + idle);
        while left > DT * 1e-6 {
            let clock: f64 = clocks[level];
            let power = if idle > 0 { 0.0 } else { 500.0 * clock.powi(3) };
            temperature += DT * (power - (temperature - 30.0) / 0.1) / 10.0;
            if idle > 0 {
                idle -= 1;
            } else {
                left -= DT * clock;
            }
            ticks += 1;
            if ticks % 10_000 == 0 {
                if temperature >= 70.0 {
                    level = (level + 1).min(2);
                } else if temperature <= 65.0 {
                    level = level.saturating_sub(1);
                }
            }
        }
        took.push((ticks - start) as f64 * DT);
    }
    took
}

#[test]
fn a_short_run_stays_cool_and_a_long_one_throttles() {
    // 70 °C is reached after ln(5) = 1.609 s; the clock is lowered at 1.7 s.
    assert_eq!(ends_ns(&job(2, &[gemm(1_500_000)]), TEXT), [1_500_000_000; 2]);
    assert_eq!(ends_ns(&job(2, &[gemm(1_700_000)]), TEXT), [1_700_000_000; 2]);
    // The rest at 0.8 of the clock (256 W, at most 55.6 °C): back to full clock once below 65 °C.
    let ends = ends_ns(&job(2, &[gemm(1_740_000)]), TEXT);
    assert_eq!(ends, [1_750_000_000, 1_740_000_000]);
}

#[test]
fn throttling_follows_the_differential_equation() {
    let runs = [(0.0, 6.0), (0.4, 1.0), (3.0, 1.5), (0.05, 4.0)];
    let mut ops = Vec::new();
    for (rest, work) in runs {
        let seconds = |s: f64| SimTime::from_secs_f64(s);
        ops.push(op(0, OpKind::StreamSync));
        ops.push(Op { host_gap: seconds(rest), stream: StreamId(0), ..gemm((work * 1e6) as i64) });
    }
    let ends = ends_ns(&job(2, &ops), TEXT);
    let healthy: f64 = runs.iter().map(|(rest, work)| rest + work).sum();
    assert_eq!(ends[1], (healthy * 1e9) as i64);
    let expected: f64 = runs.iter().map(|(rest, _)| rest).sum::<f64>() + by_small_steps(&runs).iter().sum::<f64>();
    let error = (ends[0] as f64 * 1e-9 - expected).abs();
    assert!(error < 1e-3, "{} s, not {expected}", ends[0] as f64 * 1e-9);
    assert!(expected > healthy * 1.05, "it throttles: {expected} s instead of {healthy}");
}

#[test]
fn rest_cools() {
    let busy = [gemm(1_700_000), gemm(1_000_000)];
    let mut rested = busy.to_vec();
    rested.insert(1, op(0, OpKind::StreamSync));
    rested[2].host_gap = SimTime::from_secs_f64(2.0);
    let (busy, rested) = (ends_ns(&job(1, &busy), TEXT)[0], ends_ns(&job(1, &rested), TEXT)[0]);
    assert!(busy > 2_700_000_000, "{busy}");
    assert_eq!(rested, 4_700_000_000, "full clock after the rest");
}

#[test]
fn classes_have_their_own_power() {
    let ops = [op(0, compute(5_000_000, ComputeClass::Memcpy, 0))];
    assert_eq!(ends_ns(&job(1, &ops), &format!("{TEXT}class_power_w = {{ memcpy = 300.0 }}")), [5_000_000_000]);
    assert!(ends_ns(&job(1, &ops), TEXT)[0] > 5_000_000_000);
}

#[test]
fn cutting_the_work_into_ops_changes_nothing_but_roundings() {
    let whole = ends_ns(&job(1, &[gemm(8_000_000)]), TEXT)[0];
    let cut = ends_ns(&job(1, &vec![gemm(1000); 8000]), TEXT)[0];
    assert!((whole - cut).abs() < 1000, "{whole} {cut}");
}
