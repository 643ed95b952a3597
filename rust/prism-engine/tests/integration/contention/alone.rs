//! Without contention messages end where the closed forms say, to the picosecond.

use crate::sim::jobs::{Job, job, profile};
use crate::sim::laws::replayed;
use prism_engine::contention::{Contention, Overlap, evaluate, evaluate_by_events};
use prism_engine::lower::{LowerOptions, lower};
use proptest::prelude::*;

fn lowered(job: &Job) -> prism_engine::lower::Job {
    let options = LowerOptions { slow: job.slow.clone(), ..LowerOptions::new(profile()) };
    lower(&job.graph(), &options).expect("a job that fits together")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn messages_end_where_replay_says(job in job()) {
        let lowered = lowered(&job);
        let expected = replayed(&job);
        let steps = evaluate(&lowered, Contention::None, &Overlap::default()).expect("no deadlock").report(&lowered);
        prop_assert_eq!(&steps.ranks, &expected.ranks);
        prop_assert_eq!(&steps.device_time, &expected.device_time);
        let events = evaluate_by_events(&lowered, Contention::None, &Overlap::default()).expect("no deadlock");
        prop_assert_eq!(&events.report(&lowered).ranks, &expected.ranks);
    }
}
