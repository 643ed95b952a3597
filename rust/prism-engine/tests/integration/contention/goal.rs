//! Jobs as message programs: what another simulator finds in them.

use super::step::{differ, step};
use crate::sim::jobs::job;
use prism_engine::lower::goal::{GoalOptions, program};
use prism_engine::messages::loggops::{LogGops, evaluate};
use prism_engine::messages::{MessageProgram, goal};
use proptest::prelude::*;

/// 5 µs and 50e9 B/s in ticks of 20 ps.
const FLAT: LogGops = LogGops {
    latency: 250_000,
    overhead: 0,
    gap: 0,
    gap_per_byte: 1.0,
    overhead_per_byte: 0.0,
    rendezvous_above: u64::MAX,
    tick_ps: 20,
};

fn round_trip(program: &MessageProgram) -> MessageProgram {
    let mut text = Vec::new();
    goal::write(program, &mut text).expect("written to memory");
    goal::read(&mut &text[..]).expect("what was written")
}

#[test]
fn the_exported_step_takes_what_loggopsim_says() {
    for (dp, loggopsim) in [(1, 0.534_683), (8, 0.553_544)] {
        for rendezvous in [false, true] {
            let program = program(&step(dp), &GoalOptions { tick_ps: 20, rendezvous }).expect("fits");
            let program = round_trip(&program);
            let found = evaluate(&program, &FLAT).expect("a program that ends").total_seconds();
            assert!(differ(found, loggopsim) < 1e-4, "{found} for {dp}, rendezvous {rendezvous}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every job that replays also ends as messages, whatever it does, and the text says what the program says.
    #[test]
    fn every_job_can_be_told_in_messages(job in job(), rendezvous in any::<bool>(), tuned in any::<bool>()) {
        let profile = if tuned { super::alone::channels() } else { super::profile() };
        let lowered = super::alone::lowered(&job, profile);
        let program = program(&lowered, &GoalOptions { tick_ps: 1000, rendezvous }).expect("fits");
        let found = evaluate(&program, &LogGops { tick_ps: 1000, ..FLAT }).expect("a program that ends");
        prop_assert_eq!(found.messages, program.num_sends());
        prop_assert_eq!(found.messages, lowered.num_messages());
        let again = round_trip(&program);
        prop_assert_eq!(again, program);
    }
}
