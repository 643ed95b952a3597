//! Waits that point nowhere, and waits in a circle.

use super::{job, options, outcome, refusal, says};
use prism_engine::analysis::{DiagnoseOptions, diagnose};
use prism_engine::cost::kernels::KernelTable;
use prism_engine::hybrid::{Session, SessionMode, SessionOptions};
use std::collections::BTreeMap;

const WORK: &str = "+5 s0 compute 1000 Gemm Modelled \"work\"";
const WORLD: &[u32] = &[0, 1];

#[test]
fn a_wait_for_an_event_that_is_never_recorded_names_rank_and_op() {
    for wait in ["+5 s1 event_wait e3", "+5 s1 event_sync e3"] {
        let program = format!("+5 s0 event_record e0\n{WORK}\n+5 s1 event_wait e0\n{wait}");
        let error = refusal(&[WORLD], &[WORK, &program]);
        says(&error, &["rank 1, op 3", "event 3", "never records"]);
    }
}

#[test]
fn a_wait_for_a_record_that_comes_later_names_both_ops() {
    let program = format!("{WORK}\n+5 s1 event_wait e0\n{WORK}\n+5 s0 event_record e0");
    says(&refusal(&[WORLD], &[&program, WORK]), &["rank 0, op 1", "event 0", "only after it, at op 3"]);
}

#[test]
fn an_event_recorded_anew_may_be_waited_for_at_any_time_after_its_first_record() {
    let program =
        format!("+5 s0 event_record e0\n+5 s1 event_wait e0\n{WORK}\n+5 s0 event_record e0\n+5 s0 event_sync e0");
    assert!(outcome(&job(&[WORLD], &[&program, WORK])).is_ok());
}

#[test]
fn a_diagnosis_refuses_what_a_replay_refuses() {
    let graph = job(&[WORLD], &[WORK, "+5 s1 event_wait e3"]);
    let error = diagnose(&graph, &DiagnoseOptions::new(options())).expect_err("a wait that points nowhere");
    assert_eq!(error, outcome(&graph).expect_err("the same"));
}

#[test]
fn an_emulation_refuses_what_a_replay_refuses() {
    let graph = job(&[WORLD], &[WORK, "+5 s1 event_wait e3"]);
    let options = SessionOptions {
        mode: SessionMode::Emulate,
        world_size: 2,
        profile: options().profile,
        kernels: KernelTable::default(),
        measured_host_time: false,
        live: vec![0],
        slow: BTreeMap::new(),
        perturb: options().perturb,
    };
    let Err(error) = Session::new(options, Some(graph)) else { panic!("accepted") };
    says(&error.to_string(), &["rank 1, op 0", "event 3", "never records"]);
}

#[test]
fn streams_of_two_ranks_that_wait_for_each_other_are_told() {
    // Each rank lets one stream wait for a collective that the other rank only comes to after its own.
    let call = |first: u32, second: u32| {
        format!(
            "+5 s1 AllReduce c{first} Float32 8 Sum\n+5 s1 event_record e0\n+5 s0 event_wait e0\n\
             +5 s0 AllReduce c{second} Float32 8 Sum"
        )
    };
    let error = refusal(&[WORLD, WORLD], &[&call(0, 1), &call(1, 0)]);
    says(&error, &["deadlock", "rank 0 at op 0", "waits for rank 1", "rank 1 at op 0", "waits for rank 0"]);
}

#[test]
fn messages_in_a_circle_of_three_are_told() {
    let program =
        |from: u32, to: u32| format!("+5 s0 Recv c0 Float32 8 peer {from}\n+5 s0 Send c0 Float32 8 peer {to}");
    let programs = [program(2, 1), program(0, 2), program(1, 0), WORK.to_owned()];
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let error = refusal(&[&[0, 1, 2, 3]], &programs);
    let waits = ["rank 0 at op 0", "waits for rank 2", "rank 2 at op 0", "waits for rank 1", "rank 1 at op 0"];
    says(&error, &waits);
    assert!(!error.contains("rank 3 "), "{error}");
}

#[test]
fn a_rank_that_waits_for_itself_is_told() {
    says(&refusal(&[&[0]], &["+5 s0 Send c0 Float32 8 peer 0"]), &["rank 0 at op 0", "in Send", "waits for rank 0"]);
}
