//! The transformer step of `synthetic` under each rule.

use prism_engine::contention::{Contention, Overlap, evaluate};
use prism_engine::lower::{Job, LowerOptions, StepMessages, lower};
use prism_engine::synthetic::{TransformerStep, flat_profile};

/// The step with `dp` data-parallel ranks on the network without structure.
pub(super) fn step(dp: u32) -> Job {
    let graph = TransformerStep { dp, ..TransformerStep::default() }.graph().expect("valid");
    let profile = flat_profile(5_000, 50_000_000_000);
    let options = LowerOptions { step_messages: StepMessages::Coarse, ..LowerOptions::new(profile) };
    lower(&graph, &options).expect("fits")
}

fn seconds(job: &Job, contention: Contention) -> f64 {
    let evaluation = evaluate(job, contention, &Overlap::default()).expect("no deadlock");
    evaluation.end(job).as_ps() as f64 / 1e12
}

pub(super) fn differ(one: f64, other: f64) -> f64 {
    (one - other).abs() / other
}

#[test]
fn the_step_takes_what_other_simulators_say() {
    // Data-parallel ranks; seconds by a contention-free formula; seconds by LogGOPSim, whose NICs send and receive one message
    // at a time.
    for (dp, formula, loggopsim) in [(1, 0.532_014, 0.534_683), (8, 0.550_875, 0.553_544)] {
        let job = step(dp);
        let (alone, fifo) = (seconds(&job, Contention::None), seconds(&job, Contention::Fifo));
        let fair = seconds(&job, Contention::FairShare);
        assert!(differ(alone, formula) < 1e-6, "{alone} without contention");
        assert!(differ(fifo, loggopsim) < 1e-4, "{fifo} first come, first served");
        // Messages that share a port hold up each other, not only the later one the earlier.
        assert!(fair > fifo && differ(fair, formula) < 0.03, "{fair} shared fairly");
    }
}
