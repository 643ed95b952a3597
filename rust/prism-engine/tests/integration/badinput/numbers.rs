//! Durations below zero, and times beyond what fits.

use super::{job, options, outcome, refusal, says, text, text_refusal};
use prism_engine::analysis::{DiagnoseOptions, diagnose};
use prism_engine::graph::op::{Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, StreamId};
use prism_engine::replay::{ReplayOptions, replay};
use prism_engine::units::SimTime;
use std::collections::BTreeMap;
use std::sync::Arc;

const PAIR: &[u32] = &[0, 1];
const SUM: &str = "+5 s0 AllReduce c0 Float32 8 Sum";
/// A ninth of all time, in ps.
const LONG: &str = "+0 s0 compute 1000000000000000000 Gemm Modelled \"work\"";

#[test]
fn durations_and_gaps_below_zero_are_refused_with_their_op() {
    let work = "+5 s0 compute 7 Gemm Modelled \"work\"";
    let compute = text(&[PAIR], &[SUM, &format!("{SUM}\n{}", work.replace('7', "-7"))]);
    says(&text_refusal(&compute), &["op 1", "rank 1", "its duration is negative"]);
    let gap = text(&[PAIR], &[SUM, &work.replace("+5", "+-5")]);
    says(&text_refusal(&gap), &["op 0", "rank 1", "its host gap is negative"]);
    let own = text(&[PAIR], &[SUM, work]) + "override 1 op 0 -1\n";
    says(&text_refusal(&own), &["rank 1, op 0", "its own duration is negative"]);
    let mut builder = GraphBuilder::new(1);
    let op = Op { host_gap: SimTime::from_ps(-1), stream: StreamId(0), kind: OpKind::StreamSync };
    says(&builder.add_template("role", &[op]).expect_err("negative").to_string(), &["op 0", "\"role\"", "negative"]);
}

#[test]
fn numbers_that_do_not_fit_are_refused_with_their_line() {
    for huge in ["9223372036854775808", "99999999999999999999999", "-9223372036854775809", "1e9", "NaN", ""] {
        let program = format!("+5 s0 compute {huge} Gemm Modelled \"work\"");
        says(&text_refusal(&text(&[], &[&program])), &["at byte"]);
    }
    says(&text_refusal(&text(&[PAIR], &[SUM, &SUM.replace('8', "18446744073709551616")])), &["at byte"]);
    says(&text_refusal(&text(&[], &["+5 s4294967295 stream_sync"])), &["stream number"]);
    says(&text_refusal(&text(&[], &["+5 s0 event_record e4294967295"])), &["event number"]);
}

#[test]
fn sums_up_to_a_quarter_of_all_time_are_exact() {
    let work = "+0 s0 compute 2305843009213693440 Gemm Modelled \"work\"";
    let result = outcome(&job(&[], &[work])).expect("as long as can be");
    assert_eq!(result.total_time_ns, 2_305_843_009_213_694, "rounded up");
    says(&refusal(&[], &[&work.replace("440", "952")]), &["rank 0, op 0", "26 days"]);
}

#[test]
fn sums_beyond_it_name_rank_and_op() {
    let program = [LONG; 10].join("\n");
    let sum = "the durations of a program add up to more than 26 days";
    says(&refusal(&[PAIR], &["+5 s0 device_sync", &program]), &["rank 1, op 2", sum]);
    // Rank 0 only waits for rank 1.
    let late = format!("{program}\n{SUM}");
    says(&refusal(&[PAIR], &[SUM, &late]), &["rank 1, op 2", sum]);
    let gaps = "+5 s0 device_sync\n+9223372036854775807 s0 device_sync\n+9223372036854775807 s0 device_sync";
    says(&refusal(&[], &[gaps]), &["rank 0, op 1", sum]);
    let graph = job(&[PAIR], &[SUM, &late]);
    let error = diagnose(&graph, &DiagnoseOptions::new(options())).expect_err("times that cannot be told");
    says(&error.to_string(), &["rank 1, op 2", sum]);
}

#[test]
fn waits_that_add_up_beyond_it_name_the_call_at_which_they_do() {
    // Three ranks take turns, twice: no program is long, but everybody waits for everybody. Collectives are evaluated up to
    // 2^60 ps, which the second of them passes.
    let turn = |rank: usize| {
        let part = |at| if at == rank { format!("{LONG}\n{SUM}\n") } else { format!("{SUM}\n") };
        (0..3).map(part).collect::<Vec<String>>().concat()
    };
    let programs: Vec<String> = (0..3).map(|rank| turn(rank).repeat(2)).collect();
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let error = refusal(&[&[0, 1, 2]], &programs);
    says(&error, &["rank 0, op 2", "communication on communicator 0 would end after more than 53 days"]);
}

#[test]
fn factors_and_own_durations_count() {
    let graph = job(&[], &[LONG, LONG]);
    assert!(outcome(&graph).is_ok());
    let slow = ReplayOptions { slow: BTreeMap::from([(Rank(1), 4.0)]), ..options() };
    says(&replay(&graph, &slow).expect_err("beyond").to_string(), &["rank 1, op 0", "26 days"]);
    let own = text(&[], &[LONG, LONG]) + "override 1 op 0 9223372036854775807\n";
    let graph = Arc::new(Graph::from_text(&own).expect("valid"));
    says(&outcome(&graph).expect_err("beyond").to_string(), &["rank 1, op 0", "13 days"]);
}

#[test]
fn a_call_that_takes_forever_is_named() {
    let idle = "+5 s0 device_sync";
    for huge in [SUM.replace('8', "18446744073709551615"), SUM.replace('8', "4611686018427387904")] {
        let program = format!("{idle}\n{huge}");
        says(&refusal(&[PAIR], &[&program, &program]), &["rank 0, op 1", "communicator 0", "53 days"]);
    }
    let half = |half: &str, peer: u32| format!("{idle}\n+5 s0 {half} c0 Float32 18446744073709551615 peer {peer}");
    says(&refusal(&[PAIR], &[&half("Send", 1), &half("Recv", 0)]), &["rank 0, op 1", "communicator 0", "53 days"]);
}

#[test]
fn factors_that_are_none_are_refused_with_their_rank() {
    for factor in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        let slow = ReplayOptions { slow: BTreeMap::from([(Rank(1), factor)]), ..options() };
        says(&replay(&job(&[PAIR], &[SUM, SUM]), &slow).expect_err("no factor").to_string(), &["rank 1"]);
    }
}
