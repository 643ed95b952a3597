//! Communicators without members, with too few and with too many; calls that one member lacks or makes twice.

use super::{job, refusal, says, text, text_refusal};
use prism_engine::graph::GraphBuilder;
use prism_engine::ids::Rank;

const SUM: &str = "+5 s0 AllReduce c0 Float32 8 Sum";
const ALL: &[u32] = &[0, 1, 2];

#[test]
fn a_member_that_never_calls_is_named_with_the_ranks_and_the_op_that_wait() {
    let error = refusal(&[ALL], &[SUM, "+5 s0 device_sync", SUM]);
    says(&error, &["rank 0 at op 0", "AllReduce number 0 of communicator 0", "ended without the call: 1"]);
    let error = job(&[ALL], &[SUM, "", SUM]).check().expect_err("programs that do not fit").to_string();
    says(&error, &["rank 1", "collective 0 of communicator 0", "nothing more"]);
}

#[test]
fn a_member_that_calls_twice_is_the_one_left_waiting() {
    let twice = format!("{SUM}\n{SUM}");
    let error = refusal(&[ALL], &[SUM, SUM, &twice]);
    says(&error, &["rank 2 at op 1", "number 1", "ended without the call: 0-1"]);
    let error = job(&[ALL], &[SUM, SUM, &twice]).check().expect_err("programs that do not fit").to_string();
    says(&error, &["rank 2", "op 1", "collective 1 of communicator 0"]);
}

#[test]
fn a_member_listed_twice_is_named() {
    let doubled = text(&[ALL], &[SUM, SUM, SUM]).replace("comm 0 1 2", "comm 0 1 2 1");
    says(&text_refusal(&doubled), &["rank 1", "communicator 0", "listed twice"]);
}

#[test]
fn a_member_without_the_communicator_and_a_stranger_with_it_are_named() {
    let text = text(&[ALL], &[SUM, SUM, SUM]);
    says(&text_refusal(&text.replace("rank 2 template 2 comms 0", "rank 2 template 2 comms")), &["rank 2", "slots"]);
    says(&text_refusal(&text.replace("comm 0 1 2", "comm 0 1")), &["rank 2", "communicator 0", "no member"]);
    says(&text_refusal(&text.replace("comm 0 1 2", "comm 0 1 2 3")), &["at byte", "beyond the 3 ranks"]);
}

#[test]
fn peers_and_roots_that_do_not_exist_are_named_with_rank_and_op() {
    let program = format!("{SUM}\n+5 s0 Send c0 Float32 8 peer 3");
    says(&text_refusal(&text(&[ALL], &[SUM, &program, SUM])), &["rank 1, op 1", "group rank 3", "3 members"]);
    let program = "+5 s0 Broadcast c0 Float32 8 Sum root 7";
    says(&text_refusal(&text(&[ALL], &[program, SUM, SUM])), &["rank 0, op 0", "group rank 7"]);
}

#[test]
fn a_communicator_of_nobody_is_refused() {
    says(&text_refusal(&text(&[ALL, &[]], &[SUM, SUM, SUM])), &["communicator 1 has no members"]);
    let mut builder = GraphBuilder::new(1);
    let template = builder.add_template("idle", &[]).expect("an empty program");
    builder.add_comm(Vec::new());
    builder.set_rank(Rank(0), template, Vec::new());
    says(&builder.finish().expect_err("a communicator of nobody").to_string(), &["communicator 0 has no members"]);
}

#[test]
fn a_world_of_nobody_is_refused() {
    says(&text_refusal("prism-graph 1\nworld 0\n"), &["the world has no ranks"]);
    says(&GraphBuilder::new(0).finish().expect_err("nobody").to_string(), &["the world has no ranks"]);
}

#[test]
fn calls_of_no_elements_are_legal_and_take_no_time() {
    let none = "+5 s0 AllReduce c0 Float32 0 Sum";
    let result = super::outcome(&job(&[ALL], &[none, none, none])).expect("nothing to do");
    assert_eq!(result.total_time_ns, 1, "5 ps, rounded up");
}

#[test]
fn worlds_and_communicators_beyond_all_bounds_are_refused_before_they_are_made() {
    says(&text_refusal("prism-graph 1\nworld 4294967295\n"), &["at byte", "more than"]);
    says(&text_refusal("prism-graph 1\nworld 4294967296\n"), &["at byte", "not a number that fits"]);
    let wide = "comm 0-999999\n".repeat(1_000);
    says(&text_refusal(&format!("prism-graph 1\nworld 1000000\n{wide}")), &["more than", "members"]);
}
