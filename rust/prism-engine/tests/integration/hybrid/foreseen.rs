//! A process that knows when a synchronisation ends goes on without an answer; the engine looks whether it was right.

use super::player::{Played, Player, Stop, record};
use super::stage::{Program, Stage, program, record as record_ranks};
use prism_wire::message::{FLAG_FORESEEN, Record, RecordKind};
use std::sync::{Arc, Mutex};

/// Work with many waits; `wait` is told the number of each.
fn waiting(wait: impl Fn(&mut Player, usize) -> Played + Send + Sync + 'static) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.training_begin()?;
        for number in 0..40 {
            player.kernel(0, "compare", 100 + number as u32 % 3)?;
            wait(player, number)?;
            player.idle(700);
        }
        player.all_reduce(0, world, 1 << 20)?;
        player.sync_stream(0)?;
        player.iteration_end()
    })
}

/// The same, with what the engine answered: when the stream was drained, in ps.
fn asking(answers: &Arc<Mutex<Vec<i64>>>) -> Program {
    let answers = Arc::clone(answers);
    waiting(move |player, _| {
        let reply = player.sync_stream(0)?;
        assert!((0..1000).contains(&reply.value), "{reply:?}");
        answers.lock().expect("no panic").push(reply.host_ns * 1000 - reply.value);
        Ok(())
    })
}

/// The same without asking; every answer is `late_ps` too late.
fn foreseeing(answers: &Arc<Mutex<Vec<i64>>>, late_ps: i64) -> Program {
    let answers = Arc::clone(answers);
    waiting(move |player, number| {
        let ps = answers.lock().expect("no panic")[number] + late_ps;
        let told = Record { flags: FLAG_FORESEEN, a: ps.cast_unsigned(), ..record(RecordKind::StreamSync) };
        player.append(told, 0)?;
        // As after an answer: the end of the call itself takes a microsecond.
        player.host = ps.div_euclid(1000) + i64::from(ps.rem_euclid(1000) != 0) + 1_000;
        Ok(())
    })
}

#[test]
fn foreseen_waits_leave_the_recording_of_waits_that_were_asked_for() {
    let answers = Arc::default();
    let asked = record_ranks(4, &[1], &asking(&answers));
    let foreseen = record_ranks(4, &[1], &foreseeing(&answers, 0));
    assert_eq!(asked[0].difference(&foreseen[0]), None);
    assert_eq!(asked, foreseen);
}

#[test]
fn a_wrong_foresight_fails_the_session() {
    let answers = Arc::default();
    record_ranks(4, &[1], &asking(&answers));
    let (summary, outcomes) = Stage::collect(4, &[1]).run(&foreseeing(&answers, 1));
    let failure = summary.failed.expect("the session says so");
    assert!(failure.contains("was foreseen to end at") && failure.contains("rank 1"), "{failure}");
    assert_eq!(outcomes[&1], Err(Stop::Failed));
}

#[test]
fn a_wait_that_ends_before_it_begins_is_refused() {
    let backwards = waiting(|player, _| {
        player.idle(1_000_000);
        player.append(Record { flags: FLAG_FORESEEN, a: 5, ..record(RecordKind::StreamSync) }, 0)
    });
    let (summary, _) = Stage::collect(4, &[1]).run(&backwards);
    assert!(summary.failed.expect("the session says so").contains("ends before it begins"));
}
