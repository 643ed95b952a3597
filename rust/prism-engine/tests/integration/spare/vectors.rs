//! Published and computed values, read from the shared data folder beside the project; skipped where there is none.

use prism_engine::spare::laws::{
    availability, best_redundancy, checkpoint_interval, expected_masked, least_stacks, mean_endurable_failures,
    overhead_lower_bound, redundancy_rule,
};
use prism_engine::spare::layout::{Action, Layout};
use prism_engine::spare::matching::{min_stacks, min_stacks_of, stack_thresholds, wipe_out_index};
use prism_engine::spare::placement::Placement;
use prism_engine::spare::ruler;
use prism_engine::spare::simulate::{Distribution, Failures, Job, Policy, Recovery, Setup, run_seeds, summarise};
use serde_json::Value;
use std::num::NonZeroU32;
use std::path::Path;

/// The groups in a random order.
fn random_order(n: u32, seed: u64) -> Vec<u32> {
    // A small generator of its own: the test must not share the engine's.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut order: Vec<u32> = (0..n).collect();
    for at in (1..n as usize).rev() {
        order.swap(at, (next() % (at as u64 + 1)) as usize);
    }
    order
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = numbers.fold((0.0, 0.0), |(sum, count), x| (sum + x, count + 1.0));
    sum / count
}

fn masked(n: u32, offsets: &[u32], seed: u64) -> u32 {
    wipe_out_index(n, offsets, &random_order(n, seed)).unwrap().expect("everybody fails in the end") - 1
}

/// Mean of the least number of entries over the steps before the wipe-out, over failure orders.
fn mean_stacks(n: u32, placement: &Placement, r: u32, runs: u64) -> f64 {
    let stacks = placement.stacks(n, r).unwrap();
    let (mut sum, mut count) = (0.0, 0.0);
    for seed in 0..runs {
        let mut is_live = vec![true; n as usize];
        let mut least = Some(1);
        for group in random_order(n, seed + 1) {
            let Some(before) = least else { break };
            sum += f64::from(before);
            count += 1.0;
            is_live[group as usize] = false;
            least = min_stacks_of(&stacks, &is_live, before);
        }
    }
    sum / count
}

/// Share of masked failures after which stacks are reordered.
fn patched(n: u32, r: u32, runs: u64) -> f64 {
    let (mut reorders, mut count) = (0.0, 0.0);
    for seed in 0..runs {
        let mut layout = Layout::new(Placement::Golomb.stacks(n, r).unwrap());
        for group in random_order(n, seed + 1) {
            match layout.fail(&[group]).unwrap().action {
                Action::WipeOut => break,
                Action::Reorder => reorders += 1.0,
                Action::Continue => {}
            }
            count += 1.0;
        }
    }
    reorders / count
}

fn published(n: u32, policy: Policy, all_reduce_s: f64, checkpoint_steps: u64) -> Setup {
    Setup {
        job: Job { groups: n, steps: 10_000, compute_s: 64.0, all_reduce_s, jitter: 0.05, ..Job::default() },
        failures: Failures {
            group_mtbf_s: 300.0 * f64::from(n),
            distribution: Distribution::Weibull { shape: 0.78 },
            ..Failures::default()
        },
        recovery: Recovery {
            save_s: 58.8,
            stall_s: 58.8,
            checkpoint_steps,
            restart_s: 3600.0,
            detection_s: 0.0,
            shrink_s: 0.1,
            ..Recovery::default()
        },
        policy,
        published: true,
        give_up: 50.0,
    }
}

fn simulated(id: &str, inputs: &Value) -> Value {
    let number = |key: &str| inputs[key].as_u64().unwrap();
    let (n, r) = (number("N") as u32, number("r") as u32);
    let policy = if id.starts_with("des_spare") {
        Policy::Spare { r, placement: Placement::Golomb }
    } else {
        Policy::Replication { r }
    };
    let all_reduce = if n == 200 { 2.0 } else { 6.0 };
    let setup = published(n, policy, all_reduce, number("ckpt_steps"));
    let summary = summarise(&run_seeds(&setup, 0..16, NonZeroU32::new(2).unwrap()).unwrap());
    serde_json::json!({ "ttt": summary.relative_time.mean, "avail": summary.availability.mean })
}

/// What the engine says to a vector.
fn answer(id: &str, inputs: &Value) -> Value {
    let number = |key: &str| inputs[key].as_u64().unwrap() as u32;
    let float = |key: &str| inputs[key].as_f64().unwrap();
    let list = |key: &str| -> Vec<u32> { serde_json::from_value(inputs[key].clone()).unwrap() };
    let kind = id.split('_').next().unwrap();
    match kind {
        "c" => least_stacks(number("N"), number("k")).into(),
        "mu" => mean_endurable_failures(number("N"), number("r")).unwrap().into(),
        "sbarlb" => overhead_lower_bound(number("N"), number("r")).unwrap().into(),
        "rrule" => redundancy_rule(number("N")).unwrap().into(),
        "rargmin" => {
            let range: Vec<u32> = list("r_range");
            let range = range[0]..=range[1];
            let best = best_redundancy(number("N"), range, float("Ts_s"), float("Tr_s"), float("m_s")).unwrap();
            serde_json::json!({ "r": best.0, "J": best.1 })
        }
        "tc" => checkpoint_interval(float("Ts"), float("Tr"), float("Tf")).unwrap().into(),
        "A" => availability(float("Ts"), float("Tr"), float("Tf")).unwrap().into(),
        "ET" => (expected_masked(number("N"), number("r"), &Placement::Golomb).unwrap().0 + 1.0).into(),
        "ETdis" => expected_masked(number("N"), number("r"), &Placement::Disjoint).unwrap().0.into(),
        "ETcon" => expected_masked(number("N"), number("r"), &Placement::Contiguous).unwrap().0.into(),
        "rmax" => list("N").into_iter().map(ruler::max_order).collect::<Vec<_>>().into(),
        "Smin" | "SminC" => match min_stacks(number("N"), &list("offsets"), &list("failed")).unwrap() {
            Some(stacks) => stacks.into(),
            None => "WIPEOUT".into(),
        },
        "order" => {
            let (n, offsets, order) = (number("N"), list("offsets"), list("failure_order"));
            let end = wipe_out_index(n, &offsets, &order).unwrap();
            let thresholds = stack_thresholds(n, &offsets, &order).unwrap();
            serde_json::json!({ "T": end, "K": thresholds })
        }
        "mcT" => {
            let (n, offsets) = (number("N"), Placement::Golomb.offsets(number("N"), number("r")).unwrap());
            mean((0..4000).map(|seed| f64::from(masked(n, &offsets, seed + 1)))).into()
        }
        "mcS" => {
            let placement = Placement::named(inputs["placement"].as_str().unwrap(), 0).unwrap();
            mean_stacks(number("N"), &placement, number("r"), if id == "mcS_golomb_200_9" { 2000 } else { 60 }).into()
        }
        "patch" => patched(number("N"), number("r"), 100).into(),
        "Treff" => restart_window(number("N"), float("Tr"), float("group_mtbf")).into(),
        "des" => simulated(id, inputs),
        other => panic!("vector {id}: nothing answers {other:?}"),
    }
}

/// Mean time until every group has got through a restart without a failure.
fn restart_window(n: u32, restart_s: f64, group_mtbf_s: f64) -> f64 {
    let mut setup = published(n, Policy::Checkpoint, 2.0, 1);
    setup.failures.group_mtbf_s = group_mtbf_s;
    setup.failures.distribution = Distribution::Exponential;
    setup.recovery.restart_s = restart_s;
    setup.give_up = 3.0;
    let runs = run_seeds(&setup, 0..8, NonZeroU32::MIN).unwrap();
    mean(runs.iter().map(|run| run.total_s * (1.0 - run.availability) / run.restarts as f64))
}

fn is_near(value: &Value, expected: &Value, tolerance: &Value) -> bool {
    match (value, expected) {
        (Value::Object(value), Value::Object(expected)) => {
            value.len() == expected.len()
                && expected.iter().all(|(key, expected)| is_near(&value[key], expected, tolerance))
        }
        (Value::Number(value), Value::Number(expected)) => {
            let (value, expected) = (value.as_f64().unwrap(), expected.as_f64().unwrap());
            let tolerance = match tolerance {
                Value::String(percent) => percent.trim_end_matches('%').parse::<f64>().unwrap() / 100.0 * expected,
                number => number.as_f64().unwrap(),
            };
            (value - expected).abs() <= tolerance.max(1e-12)
        }
        _ => value == expected,
    }
}

/// Vectors of one evidence class: how many there are, and which do not hold.
#[allow(clippy::print_stderr, reason = "says why it is skipped")]
fn check(evidence: &str, expected: usize) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/spare/vectors.json");
    let Ok(text) = std::fs::read_to_string(&file) else {
        eprintln!("skipped: {} is not there", file.display());
        return;
    };
    let vectors: Value = serde_json::from_str(&text).unwrap();
    let of_class = |vector: &&Value| vector["evidence"].as_str().unwrap().starts_with(evidence);
    let vectors: Vec<&Value> = vectors["vectors"].as_array().unwrap().iter().filter(of_class).collect();
    assert_eq!(vectors.len(), expected, "vectors whose evidence is {evidence:?}");
    let mut wrong = Vec::new();
    for vector in vectors {
        let id = vector["id"].as_str().unwrap();
        let value = answer(id, &vector["inputs"]);
        if !is_near(&value, &vector["value"], &vector["tolerance"]) {
            wrong.push(format!("{id}: {value} instead of {} (+- {})", vector["value"], vector["tolerance"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn exact_vectors_hold() {
    check("exact", 31);
}

#[test]
fn vectors_of_the_published_formulas_hold() {
    check("published formula", 13);
}

#[test]
fn vectors_of_simulated_failure_orders_hold() {
    check("monte-carlo", 12);
}

#[test]
fn vectors_of_the_published_simulator_hold() {
    check("authors", 3);
}
