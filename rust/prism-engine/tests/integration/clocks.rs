//! Clocks of slices are recovered from what they saw together.

use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::ids::{NameId, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::ReplayOptions;
use prism_engine::slice::clocks::{
    Clock, ClockError, ClockOptions, Clocks, Tie, align, compare_repeated, ends_of, set_ends, solve, stretch_host,
};
use prism_engine::slice::influence::influence;
use prism_engine::slice::recording::{CommOrigin, RankRecording, RecordedComm};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;

const US: i64 = 1_000_000;
const SECOND: i64 = 1_000_000 * US;

/// Truth: the reference's time of each event, and for each slice its offset (ps) and rate (ppb) against the reference.
#[derive(Debug)]
struct Job {
    /// When each event was, and who saw it.
    events: Vec<(i64, Vec<u32>)>,
    skews: Vec<(i64, i64)>,
}

impl Job {
    /// What slice `slice` reads at a moment, exactly rounded.
    fn reading(&self, slice: u32, moment: i64) -> i64 {
        let (offset, ppb) = self.skews[slice as usize];
        moment + offset + i64::try_from(i128::from(moment) * i128::from(ppb) / 1_000_000_000).expect("small")
    }

    fn ties(&self, mut noise: impl FnMut() -> i64) -> Vec<Tie> {
        let mut ties = Vec::new();
        for (event, (moment, slices)) in self.events.iter().enumerate() {
            for &slice in slices {
                let time = SimTime::from_ps(self.reading(slice, *moment) + noise());
                ties.push(Tie { slice, event: event as u64, time });
            }
        }
        ties
    }

    /// The largest error of any clock over the time that was observed, ps.
    fn worst(&self, found: &Clocks) -> i64 {
        let moments = self.events.iter().map(|(moment, _)| *moment);
        let (first, last) = (moments.clone().min().expect("some"), moments.max().expect("some"));
        let error = |slice: u32, clock: &Clock, moment: i64| {
            let read = SimTime::from_ps(self.reading(slice, moment));
            (clock.to_reference(read).as_ps() - moment).abs()
        };
        let clocks = found.clocks.iter().enumerate();
        let worst = clocks.flat_map(|(slice, clock)| [first, last].map(|moment| error(slice as u32, clock, moment)));
        worst.max().expect("some")
    }
}

/// Slices that see collectives of all of them and of neighbours.
fn any_job() -> impl Strategy<Value = Job> {
    let skew = (-10 * SECOND..=10 * SECOND, -200_000..=200_000_i64);
    let slices = 2..9_usize;
    slices.prop_flat_map(move |slices| {
        let skews = prop::collection::vec(skew.clone(), slices);
        let steps = prop::collection::vec((1..2000 * US, any::<bool>()), 80..160);
        (skews, steps).prop_map(move |(mut skews, steps)| {
            skews[0] = (0, 0);
            let mut now = 3 * SECOND;
            let event = |(number, (step, all)): (usize, (i64, bool))| {
                now += step;
                let first = (number % (slices - 1)) as u32;
                let seen = if all { (0..slices as u32).collect() } else { vec![first, first + 1] };
                (now, seen)
            };
            Job { events: steps.into_iter().enumerate().map(event).collect(), skews }
        })
    })
}

/// Numbers that look random and are the same every time (splitmix64), within `-limit..=limit`.
fn noise_of(seed: u64, limit: i64) -> impl FnMut() -> i64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed % (2 * limit as u64 + 1)) as i64 - limit
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn skew_of_ten_seconds_and_200_ppm_is_recovered_within_a_microsecond(job in any_job(), seed in any::<u64>()) {
        let found = solve(job.skews.len() as u32, &job.ties(noise_of(seed, US / 2)), &ClockOptions::default())
            .expect("connected");
        prop_assert!(job.worst(&found) <= US, "{} ps", job.worst(&found));
        // What the solver says of itself is of the right size.
        prop_assert!(found.fits.iter().all(|fit| fit.rms_ns <= 500.0 && fit.error_ns <= 500.0), "{:?}", found.fits);
    }

    #[test]
    fn a_few_wrong_ties_do_not_matter(job in any_job(), seed in any::<u64>(), late in 100 * US..5000 * US) {
        let mut ties = job.ties(noise_of(seed, US / 2));
        // Every fifteenth reading comes late: the process was preempted.
        ties.iter_mut().skip(7).step_by(15).for_each(|tie| tie.time += SimTime::from_ps(late));
        let found = solve(job.skews.len() as u32, &ties, &ClockOptions::default()).expect("connected");
        prop_assert!(job.worst(&found) <= US, "{} ps", job.worst(&found));
        prop_assert!(found.fits.iter().map(|fit| fit.set_aside).sum::<u32>() > 0);
    }

    #[test]
    fn without_noise_clocks_are_exact(job in any_job()) {
        let found = solve(job.skews.len() as u32, &job.ties(|| 0), &ClockOptions::default()).expect("connected");
        // Readings are rounded to picoseconds.
        prop_assert!(job.worst(&found) <= 10, "{} ps", job.worst(&found));
    }
}

#[test]
fn a_reference_slice_that_is_run_again_ties_what_shares_no_collective() {
    // Slices 1 and 2 share nothing with each other; the reference's runs (0 and 3) share the moments of their own ops.
    let events = vec![
        (SECOND, vec![0, 1]),
        (2 * SECOND, vec![0, 1]),
        (3 * SECOND, vec![0, 3]),
        (4 * SECOND, vec![0, 3]),
        (5 * SECOND, vec![2, 3]),
        (6 * SECOND, vec![2, 3]),
    ];
    let job = Job { events, skews: vec![(0, 0), (7 * SECOND, 100_000), (-9 * SECOND, -150_000), (SECOND, 50_000)] };
    let found = solve(4, &job.ties(|| 0), &ClockOptions::default()).expect("connected");
    assert!(job.worst(&found) <= 100, "{} ps", job.worst(&found));
    assert!((found.clocks[1].drift_ppm() + 100.0).abs() < 0.1, "{}", found.clocks[1].drift_ppm());
    let reference = &found.clocks[0];
    assert_eq!((reference.offset(), reference.stretch(SimTime::from_ns(7))), (SimTime::ZERO, SimTime::from_ns(7)));
}

#[test]
fn slices_without_a_tie_are_named() {
    let tie = |slice, event, us: i64| Tie { slice, event, time: SimTime::from_ps(us * US) };
    let ties = [tie(0, 0, 1), tie(2, 0, 1), tie(0, 1, 9), tie(2, 1, 9), tie(1, 5, 1), tie(3, 5, 1), tie(4, 6, 2)];
    let error = solve(5, &ties, &ClockOptions::default()).expect_err("1 and 3 are apart, 4 is alone");
    let ClockError::Disconnected { parts } = &error else { panic!("{error}") };
    assert_eq!(*parts, [vec![0, 2], vec![1, 3], vec![4]]);
    let text = error.to_string();
    let parts = "no event ties slice 0, slice 2 to slice 1, slice 3, nor to slice 4: record an event that both see";
    assert!(text.starts_with(parts), "{text}");
    let named = error.describe(&|slice| format!("rank {}", 10 * slice));
    assert!(named.starts_with("no event ties rank 0, rank 20 to rank 10, rank 30, nor to rank 40"), "{named}");
}

#[test]
fn what_tells_no_clock_is_an_error() {
    let tie = |slice, event, us: i64| Tie { slice, event, time: SimTime::from_ps(us * US) };
    let once = [tie(0, 0, 1), tie(1, 0, 4)];
    let error = solve(2, &once, &ClockOptions::default()).expect_err("one event");
    assert!(matches!(error, ClockError::TooFew { slice: 1 }), "{error}");
    // The same moment twice tells no rate.
    let still = [tie(0, 0, 1), tie(1, 0, 4), tie(0, 1, 1), tie(1, 1, 4)];
    let error = solve(2, &still, &ClockOptions::default()).expect_err("one moment");
    assert!(matches!(error, ClockError::TooFew { slice: 1 }), "{error}");
    // Twice as fast is no drift.
    let fast: Vec<_> = (0..9).flat_map(|k| [tie(0, k, 1000 * k as i64), tie(1, k, 600 * k as i64)]).collect();
    let error = solve(2, &fast, &ClockOptions::default()).expect_err("no clock");
    assert!(matches!(error, ClockError::Drift { slice: 1, .. }) && error.to_string().contains("ppm"), "{error}");
    for (slices, options, ties) in [
        (2, ClockOptions { reference: 2, ..ClockOptions::default() }, vec![]),
        (1, ClockOptions::default(), vec![tie(1, 0, 0)]),
        (2000, ClockOptions::default(), vec![]),
        (1, ClockOptions::default(), vec![tie(0, 0, i64::MAX / US)]),
    ] {
        let error = solve(slices, &ties, &options).expect_err("out of range");
        assert!(matches!(error, ClockError::Input(_)), "{error}");
    }
}

#[test]
fn one_slice_is_its_own_clock() {
    let found = solve(1, &[], &ClockOptions::default()).expect("nothing to solve");
    assert_eq!(found.clocks[0].to_reference(SimTime::from_ns(5)), SimTime::from_ns(5));
}

/// A rank that computes and joins collectives of all four ranks; its clock reads its own time.
fn recording(rank: u32, us: i64) -> RankRecording {
    let compute = OpKind::Compute {
        duration: SimTime::from_ns(us * 1000),
        name: NameId(0),
        class: ComputeClass::Gemm,
        provenance: Provenance::Measured,
    };
    let collective = OpKind::Collective {
        slot: SlotId(0),
        kind: CollectiveKind::AllReduce,
        dtype: DataType::Float32,
        reduce: ReduceOp::Sum,
        root: 0,
        count: 4,
        group: 0,
    };
    let op = |kind| Op { host_gap: SimTime::from_ns(1000), stream: StreamId(0), kind };
    let ops = (0..20).flat_map(|_| [op(compute), op(collective)]).collect();
    let members = vec![0, 1];
    let comms = vec![RecordedComm { origin: CommOrigin::Group { ordinal: 0, instance: 0 }, members }];
    let (names, groups, meta) = (vec!["gemm".to_owned()], vec![], BTreeMap::new());
    RankRecording { rank, world_size: 2, ops, names, comms, groups, meta }
}

#[test]
fn recordings_that_know_when_collectives_ended_are_brought_to_one_clock() {
    // Rank 1 began 5 ms later, and its clock gains 100 ppm.
    let mut recordings = vec![recording(0, 100), recording(1, 100)];
    let ends = |late: i64, ppm: i64| -> Vec<(u32, SimTime)> {
        (0..20)
            .map(|k| 20_000_000_000 + k * 100_000_000 - late)
            .zip(0..)
            .map(|(ps, k)| (2 * k + 1, SimTime::from_ps(ps + ps * ppm / 1_000_000)))
            .collect()
    };
    set_ends(&mut recordings[0], &ends(0, 0));
    set_ends(&mut recordings[1], &ends(5_000_000_000, 100));
    let stored = RankRecording::from_bytes(&recordings[1].to_bytes()).expect("its own form");
    assert_eq!(ends_of(&stored).expect("well-formed").expect("kept")[3], ends(5_000_000_000, 100)[3]);
    let found = align(&mut recordings).expect("tied").expect("they know");
    assert!((found.clocks[1].drift_ppm() + 99.99).abs() < 0.01, "{}", found.clocks[1].drift_ppm());
    let begin = |index: usize| recordings[index].ops[0].host_gap.as_ns();
    assert_eq!((begin(0), begin(1)), (1000, 5_001_000));
    let OpKind::Compute { duration, .. } = recordings[1].ops[0].kind else { panic!("computes first") };
    assert_eq!(duration.as_ps(), 100_000_000 - 9999, "100 us, less 100 ppm of them");
    assert_eq!(recordings[0].ops[0].kind, recording(0, 100).ops[0].kind);

    // Nobody knows, only one knows, or they share nothing.
    assert_eq!(align(&mut [recording(0, 1), recording(1, 1)]), Ok(None));
    let mut one = [recording(0, 1), recording(1, 1)];
    set_ends(&mut one[0], &ends(0, 0));
    assert!(align(&mut one).expect_err("rank 1 does not know").contains("rank 1 has no ends of collectives"));
    set_ends(&mut one[1], &[(0, SimTime::ZERO)]);
    assert!(align(&mut one).expect_err("a computation").contains("1 of the 1 ends of rank 1 are of no collective"));
    set_ends(&mut one[1], &[]);
    assert!(align(&mut one).expect_err("no ties").contains("no event ties rank 0 to rank 1"));
    one[1].meta.insert("collective_ends_ps".to_owned(), "1:x".to_owned());
    assert!(align(&mut one).expect_err("damaged").contains("rank 1 are damaged"));
}

#[test]
fn a_recording_left_out_moves_the_time_by_what_it_differs() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let options = ReplayOptions::new(profile);
    let times = |us: [i64; 2]| {
        let recordings = [recording(0, us[0]), recording(1, us[1])];
        influence(2, &recordings, &[0, 1], &options).expect("it fits")
    };
    let equal = times([100, 100]);
    assert_eq!((equal.left_out.len(), equal.alone, equal.largest_ppm.to_bits()), (2, 0, 0.0_f64.to_bits()));
    // Without the slow one the job is as fast as the other; without the fast one nothing changes.
    let apart = times([100, 110]);
    assert_eq!(apart.left_out.iter().map(|left| (left.rank, left.stand_in)).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
    assert_eq!(apart.left_out[0].total_ns, apart.total_ns);
    assert_eq!(apart.left_out[1].total_ns, equal.total_ns);
    assert_eq!(apart.total_ns - equal.total_ns, 20 * 10_000);
    let moved = 200_000.0 / apart.total_ns as f64 * 1e6;
    assert!((apart.largest_ppm - moved).abs() < 1e-6 && (apart.error_ppm - moved / 2.0).abs() < 1e-6, "{apart:?}");
    // One recording for both ranks: nothing can take its place.
    let single = influence(2, &[recording(0, 100)], &[0, 0], &options).expect("it fits");
    assert_eq!((single.left_out.len(), single.alone), (0, 1));
}

/// A rank whose host takes 10 to 110 us between calls, on a machine that starts late and whose clock gains `ppm`.
fn repeated(late: i64, ppm: i64, noise_ps: i64) -> RankRecording {
    let mut recording = recording(0, 100);
    let ops = recording.ops.clone();
    recording.ops = ops.iter().cycle().take(40_000).copied().collect();
    let mut state = 7_u64;
    for (index, op) in recording.ops.iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let gap = 10 * US + (index as i64 % 101) * US;
        let noise = if noise_ps == 0 { 0 } else { (state >> 33) as i64 % noise_ps };
        op.host_gap = SimTime::from_ps(gap + gap * ppm / 1_000_000 + noise);
    }
    recording.ops[0].host_gap += SimTime::from_ps(late);
    recording
}

#[test]
fn a_repeated_slice_tells_offset_and_drift() {
    for (late, ppm) in [(10 * SECOND, 200), (10 * SECOND, -200), (0, 50), (SECOND, 0)] {
        let (first, again) = (repeated(0, 0, 0), repeated(late, ppm, 0));
        let found = compare_repeated(&first, &again, 1000).expect("the same calls");
        let (mut own, mut other) = (SimTime::ZERO, SimTime::ZERO);
        for (mine, theirs) in first.ops.iter().zip(&again.ops) {
            (own, other) = (own + mine.host_gap, other + theirs.host_gap);
            let error = (found.clocks[1].to_reference(other) - own).as_ps().abs();
            assert!(error < US, "{late} {ppm}: {error} ps");
        }
    }
    let noisy = compare_repeated(&repeated(0, 0, 0), &repeated(-10 * SECOND, 200, 100_000), 2000);
    let drift = noisy.expect("the same calls").clocks[1].drift_ppm();
    // Noise that only ever adds, 50 ns to 60 us on average, is a slower machine: 833 ppm.
    assert!((drift + 200.0 + 833.0).abs() < 20.0, "{drift}");
}

#[test]
fn what_is_no_repetition_is_refused() {
    let (first, mut again) = (repeated(0, 0, 0), repeated(0, 0, 0));
    again.ops.truncate(100);
    let refused = compare_repeated(&first, &again, 1000).expect_err("it ended early");
    assert!(refused.contains("rank 0 did something else when it was run again"), "{refused}");
    let refused = compare_repeated(&first, &repeated(0, 50_000, 0), 1000).expect_err("5 % slower");
    assert!(refused.contains("the clock of rank 0 run again would gain"), "{refused}");
}

#[test]
fn host_time_is_brought_to_the_reference_and_device_time_stays() {
    let mut again = repeated(0, 200, 0);
    let found = compare_repeated(&repeated(0, 0, 0), &again, 1000).expect("the same calls");
    stretch_host(&mut again, found.clocks[1].drift_ppm());
    for (brought, first) in again.ops.iter().zip(&repeated(0, 0, 0).ops) {
        assert!((brought.host_gap - first.host_gap).as_ps().abs() <= 2, "{:?} {:?}", brought.host_gap, first.host_gap);
        assert_eq!(brought.kind, first.kind);
    }
}
