//! Programs that block say why.

use prism_engine::messages::goal;
use prism_engine::messages::loggops::{EvaluateError, LogGops, evaluate};

fn error(text: &str) -> EvaluateError {
    evaluate(&goal::read(text.as_bytes()).unwrap(), &LogGops::LOGGOPSIM).unwrap_err()
}

#[test]
fn a_cycle_of_receives_is_named_from_its_lowest_rank() {
    let rank =
        |from: u32, to: u32| format!("l1: recv 8b from {from} tag 3\nl2: send 8b to {to} tag 3\nl2 requires l1\n");
    let text = format!(
        "num_ranks 4\nrank 0 {{\n{}}}\nrank 1 {{\n{}}}\nrank 2 {{\n{}}}\nrank 3 {{\nl1: recv 1b from 0 tag 9\n}}\n",
        rank(2, 1),
        rank(0, 2),
        rank(1, 0) + "l3: send 1b to 3 tag 9\nl3 requires l2\n"
    )
    .replace("from 0 tag 9", "from 2 tag 9");
    let error = error(&text);
    let EvaluateError::Blocked { cause, is_cycle, num_waiting, num_unfinished } = &error else { panic!("{error}") };
    assert!(is_cycle);
    assert_eq!(cause.iter().map(|waiting| waiting.rank).collect::<Vec<_>>(), [0, 2, 1]);
    assert_eq!((*num_waiting, *num_unfinished), (4, 8));
    assert_eq!(
        error.to_string(),
        "the job blocks: rank 0's op 0 (receive of 8 bytes from rank 2, tag 3) waits for rank 2's op 1, behind \
         rank 2's op 0 (receive of 8 bytes from rank 1, tag 3) waits for rank 1's op 1, behind \
         rank 1's op 0 (receive of 8 bytes from rank 0, tag 3) waits for rank 0's op 1, behind the first; 1 more wait"
    );
}

#[test]
fn rendezvous_sends_to_each_other_block() {
    let rank = |peer: u32| format!("l1: send 70000b to {peer}\nl2: recv 70000b from {peer}\nl2 requires l1\n");
    let text = format!("num_ranks 2\nrank 0 {{\n{}}}\nrank 1 {{\n{}}}\n", rank(1), rank(0));
    let error = error(&text);
    let EvaluateError::Blocked { cause, is_cycle: true, .. } = &error else { panic!("{error}") };
    assert_eq!(cause.len(), 2);
    assert!(error.to_string().contains("rank 0's op 0 (send of 70000 bytes to rank 1, tag 0) waits for rank 1's op 1"));
}

#[test]
fn a_missing_send_is_the_cause_however_many_wait_behind_it() {
    let text = "num_ranks 3\nrank 0 {\nl1: recv 4b from 1 tag 1\nl2: send 4b to 2\nl2 requires l1\n}\n\
                rank 1 {\nl1: recv 4b from 2\nl2: send 4b to 0 tag 1\nl2 requires l1\n}\n\
                rank 2 {\nl1: send 4b to 1 tag 6\nl2: recv 4b from 0\n}\n";
    assert_eq!(
        error(text).to_string(),
        "the job blocks: rank 1's op 0 (receive of 4 bytes from rank 2, tag 0) waits for a send that no rank has \
         (a message of tag 6 from rank 2 is there, unmatched); 2 more wait"
    );
}

#[test]
fn a_message_nobody_receives_is_named() {
    let error = error("num_ranks 2\nrank 0 {\nl1: calc 1\nl2: send 4b to 1 tag 2\n}\nrank 1 {\n}\n");
    assert_eq!(
        error.to_string(),
        "1 message(s) are never received; the first: rank 0's op 1 (send of 4 bytes to rank 1, tag 2)"
    );
}

#[test]
fn a_rendezvous_nobody_receives_blocks() {
    let error = error("num_ranks 2\nrank 0 {\nl1: send 70000b to 1 tag 2\n}\nrank 1 {\n}\n");
    assert!(error.to_string().contains("waits for a receive that no rank has"), "{error}");
}
