//! GOAL text in and out.

use super::programs::{Kinds, programs};
use prism_engine::ids::Rank;
use prism_engine::messages::loggops::{LogGops, evaluate};
use prism_engine::messages::{MessageOp, MessageProgram, OpIndex, goal};
use proptest::prelude::*;
use std::io::Read;
use std::path::Path;

fn written(program: &MessageProgram) -> Vec<u8> {
    let mut text = Vec::new();
    goal::write(program, &mut text).unwrap();
    text
}

fn error(text: &str) -> String {
    goal::read(text.as_bytes()).unwrap_err().to_string()
}

#[test]
fn loggopsims_own_example_reads_and_ends_when_it_should() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/traces/goal/binary_tree_32.goal");
    if !path.exists() {
        eprintln!("skipped: {} is not here", path.display());
        return;
    }
    let program = goal::open(&path).unwrap();
    assert_eq!((program.num_ranks(), program.num_ops(), program.num_sends()), (32, 62, 31));
    let result = evaluate(&program, &LogGops::LOGGOPSIM).unwrap();
    assert_eq!((result.total_ticks, result.critical_rank), (27_500, 31), "LogGOPSim's answer");
}

#[test]
fn everything_the_grammar_allows_reads() {
    let text = "/* a job\n of two */ // small\nnum_ranks 2 rank 0 { // comment\n\
                calc 5\n  alpha_1 :send 10 b  to 1 tag 3 cpu 2 nic 1\r\n/* x */l7: calc 1 cpu 3\nalpha_1 requires l7\n\
                l7:calc 2\n}";
    assert!(error(text).contains("line 8, rank 0, l7: label l7 is defined twice"), "{}", error(text));
    let text =
        text.replace("l7:calc 2\n", "l8:calc 2\nl8 irequires alpha_1\n") + "rank 1 { recv 10b from -1 tag -1\n }";
    let program = goal::read(text.as_bytes()).unwrap();
    let rank = program.rank(Rank(0));
    assert_eq!(rank.op(OpIndex(1)), MessageOp::Send { bytes: 10, peer: Rank(1), tag: 3 });
    assert_eq!((rank.lanes(OpIndex(1)).cpu, rank.lanes(OpIndex(1)).nic, rank.lanes(OpIndex(2)).cpu), (2, 1, 3));
    assert_eq!(rank.successors(OpIndex(2)).map(|(op, _)| op.0).collect::<Vec<_>>(), [1]);
    assert_eq!(rank.successors(OpIndex(1)).map(|(op, _)| op.0).collect::<Vec<_>>(), [3]);
    assert_eq!(program.rank(Rank(1)).op(OpIndex(0)), MessageOp::Recv { bytes: 10, peer: None, tag: None });
}

#[test]
fn labels_need_no_order_and_end_with_their_rank() {
    let rank = "l5: calc 1\nl6: calc 2\nl9: calc 3\nl06: calc 4\nl06 requires l9\nl9 requires l6\nl6 requires l5\n";
    let program = goal::read(format!("num_ranks 2\nrank 0 {{\n{rank}}}\nrank 1 {{\n{rank}}}\n").as_bytes()).unwrap();
    for rank in [Rank(0), Rank(1)] {
        let next = |op| program.rank(rank).successors(OpIndex(op)).map(|(op, _)| op.0).collect::<Vec<_>>();
        assert_eq!((next(0), next(1), next(2), next(3)), (vec![1], vec![2], vec![3], vec![]));
    }
    let text = format!("num_ranks 2\nrank 0 {{\n{rank}}}\nrank 1 {{\nl1: calc 1\nl1 requires l5\n}}\n");
    assert!(
        error(&text).ends_with("line 13, rank 1, l1: label l5 is not defined before this line"),
        "{}",
        error(&text)
    );
}

#[test]
fn bad_text_is_refused_with_line_rank_and_label() {
    let in_rank = |line: &str| error(&format!("num_ranks 2\nrank 0 {{\nl1: calc 1\n{line}\n}}\nrank 1 {{\n}}\n"));
    let at = |text: &str| format!("not usable as GOAL text: line 4, rank 0{text}");
    for (line, expected) in [
        ("l2: sned 1b to 1", ", l2: expected 'calc', 'send' or 'recv', found ' '"),
        ("l2: send 1 to 1", ", l2: expected 'b' after the size, found 't'"),
        ("l2: send 1b from 1", ", l2: expected 'to', found 'f'"),
        ("l2: recv 1b to 1", ", l2: expected 'from', found 't'"),
        ("l2: send 1b to 2", ", l2: send: rank 2 is outside the job of 2 ranks"),
        ("l2: send 1b to 99999999999", ", l2: rank 99999999999 is outside the job"),
        ("l2: send 1b to -1", ", l2: expected the receiving rank, a number, found '-'"),
        ("l2: send 1b to 1 tag -1", ", l2: a send of any tag (-1): only a receive may take any"),
        ("l2: send 1b to 1 tag 4294967295", ", l2: a send needs a tag; only a receive may take any (-1)"),
        ("l2: send 1b to 1 tag 4294967296", ", l2: tag 4294967296: at most 2^32 - 1"),
        ("l2: send 1b to 1 cpu 256", ", l2: the CPU lane: 256, at most 255"),
        ("l2: send 1b to 1 tagg", ", l2: expected the tag, a number, found 'g'"),
        ("l2: send 1b to 1 nic 0 cpu 0", ", l2: expected the end of the line, found 'c'"),
        ("l2: calc -5", ", l2: expected the duration, a number, found '-'"),
        ("l2: calc 99999999999999999999", ", l2: the duration: a number of more than 64 bits"),
        ("l2: calc 9223372036854775807", ", l2: calc 9223372036854775807: the rank's calculations pass 2^63 ticks"),
        ("l2 requires l1", ", l2: label l2 is not defined before this line"),
        ("l1 requires l2", ", l1: label l2 is not defined before this line"),
        ("l1 needs l1", ", l1: expected ':', 'requires' or 'irequires' after the label, found 'n'"),
        ("l1: calc 4", ", l1: label l1 is defined twice"),
        ("rank 1 {", ": rank 1 begins inside another rank's block"),
        ("num_ranks 2", ": 'num_ranks' comes twice"),
        ("?", ": expected a label, 'calc', 'send', 'recv', 'rank', 'num_ranks', '}' or a comment, found '?'"),
        ("\u{e9}", ": expected a label, 'calc', 'send', 'recv', 'rank', 'num_ranks', '}' or a comment, found '\\xc3'"),
    ] {
        assert_eq!(in_rank(line), at(expected), "{line}");
    }
}

#[test]
fn jobs_that_are_not_whole_are_refused() {
    for (text, expected) in [
        ("", "line 1: 'num_ranks' is missing"),
        ("\n\n// nothing\n", "line 4: 'num_ranks' is missing"),
        ("rank 0 {\n}\n", "line 1: expected 'num_ranks' before the first rank, found the line's end"),
        ("num_ranks 0\n", "a job of zero ranks"),
        ("num_ranks 4294967296\n", "line 1: 4294967296 ranks: at most 2^32 - 1"),
        ("num_ranks 4294967295\nrank 0 {\n}\n", "(rank 1): the job has 4294967295 ranks, and this one is missing"),
        ("num_ranks 1\nrank 1 {\n}\n", "line 2: rank 1 where rank 0 should come: ranks come in order, each once"),
        ("num_ranks 2\nrank 0 {\n}\nrank 0 {\n}\n", "line 4: rank 0 where rank 1 should come"),
        ("num_ranks 1\nrank 0 {\n}\nrank 1 {\n}\n", "line 4, rank 1: a rank more than the 1 of the job"),
        ("num_ranks 1\ncalc 5\n", "line 2: an op outside a rank's block"),
        ("num_ranks 1\nrank 0 {\ncalc 5\n", "the text ends inside a rank's block ('}' is missing)"),
        ("num_ranks 1\nrank 0 {\n}\n}\n", "line 4: '}' without a rank's '{'"),
        ("num_ranks 1\nrank 0 {\n}\n/* ...\n", "the text ends inside a comment ('*/' is missing)"),
        ("num_ranks 1\nrank 0 {\n// prism: rendezvous\n}\n", "no op follows the rendezvous mark"),
        (
            "num_ranks 1\nrank 0 {\nl1: calc 1\nl2: calc 1\nl1 requires l2\nl2 requires l1\n}\n",
            "op 0, op 1 (each on the next)",
        ),
    ] {
        assert!(error(text).contains(expected), "{text:?}: {}", error(text));
    }
}

#[test]
fn a_line_without_end_is_refused_in_bounded_memory() {
    let endless = "num_ranks 1\n".as_bytes().chain(std::io::repeat(b'x'));
    let error = goal::read(endless).unwrap_err().to_string();
    assert!(error.contains("line 2: a line of more than 262144 bytes"), "{error}");
}

#[test]
fn text_is_told_by_its_first_statement() {
    assert!(goal::is_goal(b"num_ranks 2\n"));
    assert!(goal::is_goal(b"\n // x\n /* num */\t\r\nnum_ranks"));
    assert!(!goal::is_goal(b"PRISMGR\x1a") && !goal::is_goal(b"") && !goal::is_goal(b"// num_ranks"));
}

/// Gives a few bytes at a time, so that lines are cut everywhere.
struct Trickle<'a>(&'a [u8], usize);

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.1.min(buffer.len()).min(self.0.len());
        buffer[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn a_written_program_reads_back_the_same(
        program in programs(Kinds { lanes: 3, wildcards: true }), piece in 1_usize..50,
    ) {
        let text = written(&program);
        prop_assert!(goal::read(&text[..]).unwrap() == program);
        prop_assert!(goal::read(Trickle(&text, piece)).unwrap() == program);
        prop_assert!(goal::is_goal(&text));
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(num_ranks 2\n)?(rank [01] \\{\n|\\}\n|l[0-2]: (calc|send|recv) [0-9]b? ?(to|from)? [01]\n|l[0-2] i?requires l[0-2]\n|[ -~]{0,5}\n){0,12}") {
        // Reading must not panic, whatever comes; what it accepts, it writes and reads again.
        if let Ok(program) = goal::read(text.as_bytes()) {
            prop_assert!(goal::read(&written(&program)[..]).unwrap() == program);
        }
    }
}
