//! The evaluator against hand-computed cases, a plain second evaluator, LogGOPSim's own answers, and itself.

use super::programs::{Kinds, programs};
use super::reference::end_ticks;
use super::workloads::{PARAMETERS, Step, ring};
use prism_engine::messages::loggops::{EvaluateError, Evaluation, LogGops, evaluate};
use prism_engine::messages::{MessageProgram, goal};
use prism_engine::profile::Profile;
use proptest::prelude::*;

const SMALL: LogGops = LogGops {
    latency: 250,
    overhead: 15,
    gap: 10,
    gap_per_byte: 2.0,
    overhead_per_byte: 1.0,
    rendezvous_above: 500,
    tick_ps: 1000,
};

fn read(text: &str) -> MessageProgram {
    goal::read(text.as_bytes()).unwrap()
}

fn ends(text: &str, parameters: &LogGops) -> Vec<u64> {
    evaluate(&read(text), parameters).unwrap().end_ticks
}

#[test]
fn one_message_by_hand() {
    let text = "num_ranks 2\nrank 0 {\nl1: calc 100\nl2: send 11b to 1\nl2 requires l1\nl3: calc 7\nl3 requires l2\n}\n\
                rank 1 {\nl1: recv 11b from 0\nl2: calc 1\nl2 requires l1\n}\n";
    // Sender: 100, then o + 10 O = 25, then 7. Receiver: arrival 100 + o + L = 365, o + max(10 O, 10 G) = 35, then 1.
    assert_eq!(ends(text, &SMALL), [132, 401]);
}

#[test]
fn the_receiver_takes_one_message_at_a_time_and_none_while_it_computes() {
    let text = "num_ranks 3\nrank 0 {\nl1: send 101b to 2\n}\nrank 1 {\nl1: send 101b to 2\n}\n\
                rank 2 {\nl1: calc 1000\nl2: recv 101b from 1\nl2 requires l1\nl3: recv 101b from 0\nl3 requires l1\n}\n";
    // Both messages wait for the calculation, then each holds the CPU for 15 + 200.
    assert_eq!(ends(text, &SMALL), [115, 115, 1430]);
}

#[test]
fn a_rendezvous_holds_the_sender_until_the_receive_is_posted() {
    let text = "num_ranks 2\nrank 0 {\nl1: send 501b to 1\nl2: calc 1\nl2 requires l1\n}\n\
                rank 1 {\nl1: calc 5000\nl2: recv 501b from 0\nl2 requires l1\n}\n";
    // The message is taken at 5000, 15 + 1000 long, and the receive is posted at 5000 too, first by order of creation.
    assert_eq!(ends(text, &SMALL), [5001, 6015]);
    let eager = LogGops { rendezvous_above: 501, ..SMALL };
    assert_eq!(ends(text, &eager), [516, 6015]);
    let marked = text.replace("l1: send", "// prism: rendezvous\nl1: send");
    assert_eq!(ends(&marked, &eager), [5001, 6015]);
}

#[test]
fn lanes_work_side_by_side_and_dependencies_hold_across_them() {
    let text = "num_ranks 1\nrank 0 {\nl1: calc 100\nl2: calc 50 cpu 1\nl3: calc 7 cpu 1\nl3 requires l1\n}\n";
    assert_eq!(ends(text, &SMALL), [107]);
    let started = text.replace("requires", "irequires");
    assert_eq!(ends(&started, &SMALL), [100], "it follows the start of l1, and its own lane's l2");
}

#[test]
fn a_receive_from_anyone_takes_the_first_message() {
    let text = "num_ranks 3\nrank 0 {\nl1: send 1b to 2 tag 4\n}\nrank 1 {\nl1: calc 900\nl2: send 1b to 2 tag 5\nl2 requires l1\n}\n\
                rank 2 {\nl1: recv 1b from -1 tag -1\nl2: calc 10\nl2 requires l1\nl3: recv 1b from 1 tag 5\nl3 requires l2\n}\n";
    assert_eq!(ends(text, &SMALL), [15, 915, 1180]);
}

#[test]
fn fractions_of_a_tick_per_byte_add_up() {
    let text = "num_ranks 2\nrank 0 {\nl1: send 1000001b to 1\n}\nrank 1 {\nl1: recv 1000001b from 0\n}\n";
    let parameters = LogGops { gap_per_byte: 0.02, rendezvous_above: u64::MAX, latency: 0, overhead: 0, ..SMALL };
    assert_eq!(ends(text, &LogGops { overhead_per_byte: 0.0, ..parameters }), [0, 20_000]);
}

#[test]
fn a_rank_may_send_to_itself() {
    let text = "num_ranks 1\nrank 0 {\nl1: send 1b to 0\nl2: recv 1b from 0\n}\n";
    assert_eq!(ends(text, &SMALL), [15 + 250 + 15]);
}

#[test]
fn zero_bytes_cost_as_much_as_one() {
    let text = "num_ranks 2\nrank 0 {\nl1: send 0b to 1\n}\nrank 1 {\nl1: recv 0b from 0\n}\n";
    assert_eq!(ends(text, &SMALL), ends(&text.replace("0b", "1b"), &SMALL));
}

#[test]
fn ranks_without_ops_end_at_once() {
    let result = evaluate(&read("num_ranks 2\nrank 0 {\n}\nrank 1 {\n}\n"), &SMALL).unwrap();
    assert_eq!((result.end_ticks, result.total_ticks, result.critical_rank), (vec![0, 0], 0, 0));
}

#[test]
fn random_programs_end_as_in_loggopsim() {
    let mut number = 0;
    for block in include_str!("loggopsim.goal").split("// ends ").skip(1) {
        let (expected, text) = block.split_once('\n').unwrap();
        let expected: Vec<u64> = expected.split(' ').map(|end| end.parse().unwrap()).collect();
        assert_eq!(ends(text, &SMALL), expected, "{text}");
        number += 1;
    }
    assert_eq!(number, 40);
}

#[test]
fn the_measured_workloads_take_as_long_as_in_loggopsim() {
    for (program, ticks) in [
        (ring(512, 1 << 30), 2_398_788_322),
        (Step::measured(1).program(), 26_734_169_492),
        (Step::measured(8).program(), 27_677_193_574),
    ] {
        let result = evaluate(&program, &PARAMETERS).unwrap();
        assert_eq!(result.total_ticks, ticks);
        assert!(result.max_nic_utilisation > 0.05 && result.max_nic_utilisation <= 1.0);
        assert_eq!(evaluate(&program, &PARAMETERS).unwrap(), result, "the same every time");
    }
}

#[test]
fn the_default_parameters_are_those_of_the_profile() {
    let parameters = LogGops::of_profile(&Profile::builtin("h100-sxm").unwrap());
    assert_eq!((parameters.latency, parameters.overhead, parameters.gap, parameters.tick_ps), (14_000, 0, 0, 1000));
    assert!((parameters.gap_per_byte - 1.0 / 48.0).abs() < 1e-12, "48 GB/s");
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let program = read("num_ranks 1\nrank 0 {\n}\n");
    let refused = |parameters: LogGops| evaluate(&program, &parameters).unwrap_err().to_string();
    assert!(refused(LogGops { gap_per_byte: f64::NAN, ..SMALL }).starts_with("G = NaN"));
    assert!(refused(LogGops { gap_per_byte: -1.0, ..SMALL }).starts_with("G = -1"));
    assert!(refused(LogGops { overhead_per_byte: f64::INFINITY, ..SMALL }).starts_with("O = inf"));
    assert!(refused(LogGops { latency: u64::MAX, ..SMALL }).starts_with("L = "));
    assert!(refused(LogGops { tick_ps: 0, ..SMALL }).starts_with("tick_ps = 0"));
}

#[test]
fn sums_near_two_to_the_63_are_refused_with_rank_and_op() {
    let text = format!("num_ranks 2\nrank 0 {{\nl1: calc 5\n}}\nrank 1 {{\nl1: calc {}\n}}\n", (1_u64 << 63) - 6);
    let coarse = LogGops { tick_ps: 1, ..SMALL };
    assert_eq!(ends(&text, &coarse), [5, (1 << 63) - 6]);
    let error = evaluate(&read(&text.replace("calc 5", "calc 6")), &coarse).unwrap_err();
    assert!(matches!(error, EvaluateError::Overflow { unit: "ticks", rank: 1, op: 0, .. }), "{error}");
    let error = evaluate(&read(&text), &SMALL).unwrap_err();
    assert!(matches!(error, EvaluateError::Overflow { unit: "picoseconds", rank: 1, op: 0, .. }), "{error}");
    let text = format!("num_ranks 2\nrank 0 {{\nl1: send {}b to 1\n}}\nrank 1 {{\n}}\n", 1_u64 << 62);
    let error = evaluate(&read(&text), &SMALL).unwrap_err();
    assert!(matches!(error, EvaluateError::Overflow { rank: 0, op: 0, .. }), "{error}");
}

fn parameters() -> impl Strategy<Value = LogGops> {
    let small = || prop_oneof![Just(0_u64), 1_u64..40];
    (0_u64..400, small(), small(), 0_u64..4, 0_u64..4, prop_oneof![Just(u64::MAX), 0_u64..1000]).prop_map(
        |(latency, overhead, gap, gap_per_byte, overhead_per_byte, rendezvous_above)| LogGops {
            latency,
            overhead,
            gap,
            gap_per_byte: gap_per_byte as f64,
            overhead_per_byte: overhead_per_byte as f64,
            rendezvous_above,
            tick_ps: 1000,
        },
    )
}

/// The same end on every rank, or no answer from either.
fn agrees(program: &MessageProgram, parameters: &LogGops) -> Result<(), TestCaseError> {
    match (end_ticks(program, parameters), evaluate(program, parameters)) {
        (Some(expected), Ok(Evaluation { end_ticks, max_nic_utilisation, .. })) => {
            prop_assert_eq!(end_ticks, expected);
            prop_assert!(max_nic_utilisation <= 1.0);
        }
        (None, Err(EvaluateError::Blocked { cause, .. })) => prop_assert!(!cause.is_empty()),
        (None, Err(EvaluateError::Unreceived { .. })) => {}
        (expected, found) => prop_assert!(false, "{:?} and {:?}", expected, found),
    }
    Ok(())
}

#[test]
fn thousands_of_messages_to_one_rank_come_in_one_after_the_other() {
    let senders = 3000_u64;
    let mut text = format!("num_ranks {}\nrank 0 {{\n", senders + 1);
    (1..=senders).rev().for_each(|rank| text += &format!("recv 101b from {rank}\n"));
    text += "}\n";
    (1..=senders).for_each(|rank| text += &format!("rank {rank} {{\nsend 101b to 0\n}}\n"));
    let result = evaluate(&read(&text), &SMALL).unwrap();
    assert_eq!(result.end_ticks[0], 15 + 250 + senders * (15 + 200));
    assert!(result.events < 6 * senders, "{} events: none is tried in vain again and again", result.events);
}

#[test]
fn many_waiting_messages_are_matched_as_by_the_plain_evaluator() {
    // A hundred messages of ten tags from two ranks arrive before their receives are posted, in another order; then as many
    // receives wait for their messages; some take any tag or are from anyone.
    for wildcards in [false, true] {
        let mut texts = [String::new(), String::new(), "l1: calc 99999\n".to_owned()];
        for index in 0..100 {
            let (from, tag) = (index % 2, index * 7 % 10);
            texts[from] += &format!("send {index}b to 2 tag {tag}\n");
        }
        for index in (0..100).rev() {
            let (from, tag) = (index % 2, index * 7 % 10);
            let (from, tag) = match index % 5 {
                0 if wildcards => ("-1".to_owned(), tag.to_string()),
                1 if wildcards => (from.to_string(), "-1".to_owned()),
                _ => (from.to_string(), tag.to_string()),
            };
            let line = format!("l{}: recv {index}b from {from} tag {tag}\n", index + 2);
            texts[2] += &(line + &format!("l{} requires l1\n", index + 2));
        }
        for early in [false, true] {
            let [a, b, mut c] = texts.clone();
            if early {
                c = c.lines().filter(|line| !line.contains("requires")).map(|line| line.to_owned() + "\n").collect();
            }
            let text = format!("num_ranks 3\nrank 0 {{\n{a}}}\nrank 1 {{\n{b}}}\nrank 2 {{\n{c}}}\n");
            let program = read(&text);
            let found = evaluate(&program, &SMALL).map(|result| result.end_ticks).ok();
            assert_eq!(found, end_ticks(&program, &SMALL), "{text}");
            assert!(found.is_some() || wildcards, "without wildcards all are matched");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn one_lane_agrees_with_the_plain_evaluator(
        program in programs(Kinds { lanes: 1, wildcards: false }), parameters in parameters(),
    ) {
        agrees(&program, &parameters)?;
    }

    #[test]
    fn lanes_and_wildcards_agree_with_the_plain_evaluator(
        program in programs(Kinds { lanes: 3, wildcards: true }), parameters in parameters(),
    ) {
        agrees(&program, &parameters)?;
    }
}
