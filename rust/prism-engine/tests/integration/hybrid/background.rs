//! Threads that do not drive the device (watchdogs) may ask whatever and whenever they like: they change nothing.

use super::player::{Comm, Played, Player, event_query, query, record};
use super::stage::{Program, Stage, collect, live_ranks, program, replayed_ranks, succeed};
use prism_engine::graph::Graph;
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

/// Asks often enough for the engine to give in, if it knows.
const PATIENCE: usize = 50;

type Watch = fn(&mut Player) -> Played;

fn watched(watch: Watch) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.training_begin()?;
        for iteration in 0..4 {
            player.gemm(0, "forward", 2048)?;
            watch(player)?;
            player.all_reduce(0, world, 1 << 20)?;
            player.record_event(0, 1)?;
            watch(player)?;
            player.kernel(0, "optimizer", 100 + iteration)?;
            player.sync_event(1)?;
            watch(player)?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

#[test]
fn background_queries_move_no_clock() {
    let graph = collect(8, &[0], |_| 0, &watched(|_| Ok(())));
    let expected = replayed_ranks(&graph, &[]);
    let asks_all = watched(|player| {
        for kind in [RecordKind::EventQuery, RecordKind::StreamQuery] {
            let reply = player.ask_in_background(Record { e: 1, ..record(kind) })?;
            assert_eq!(reply.host_ns, player.host);
        }
        for kind in [RecordKind::EventSync, RecordKind::StreamSync, RecordKind::DeviceSync] {
            let reply = player.ask_in_background(Record { e: 1, ..record(kind) })?;
            assert!(reply.host_ns >= player.host);
        }
        Ok(())
    });
    let summary = succeed(Stage::emulate(&graph, &[2, 3]).run(&asks_all));
    assert_eq!(live_ranks(&summary), [(2, expected[2].clone()), (3, expected[3].clone())]);
}

/// Plays the program while another thread asks about event 1 at host time 0 without a pause.
fn with_watchdog(body: Program) -> Program {
    program(move |player| {
        let client = Arc::clone(&player.client);
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let watchdog = std::thread::spawn(move || {
            let question = Record { flags: FLAG_BACKGROUND, ..event_query(1) };
            while !seen.load(Ordering::Acquire) {
                query(&client, question)?;
            }
            Ok(())
        });
        let played = body(player);
        is_over.store(true, Ordering::Release);
        watchdog.join().expect("no panic").and(played)
    })
}

#[test]
fn a_watchdog_beside_a_working_driver_changes_nothing() {
    let body = watched(|_| Ok(()));
    let graph = collect(8, &[0], |_| 0, &body);
    let summary = succeed(Stage::emulate(&graph, &[2, 3]).run(&with_watchdog(body)));
    let expected = replayed_ranks(&graph, &[]);
    assert_eq!(live_ranks(&summary), [(2, expected[2].clone()), (3, expected[3].clone())]);
}

#[test]
fn an_idle_driver_is_answered_for_when_patience_ends() {
    let patient = program(|player| {
        player.gemm(0, "long", 8192)?;
        player.record_event(0, 1)?;
        let is_done =
            |player: &mut Player| -> Played<bool> { Ok(player.ask_in_background(event_query(1))?.value == 1) };
        for _ in 1..PATIENCE {
            assert!(!is_done(player)?);
        }
        // The driver does something: the watchdog starts anew.
        player.kernel(1, "short", 1)?;
        for _ in 1..PATIENCE {
            assert!(!is_done(player)?);
        }
        assert!(is_done(player)?);
        // The driver has not moved meanwhile.
        assert!(!player.is_done(1)?);
        player.sync_event(1)?;
        assert!(is_done(player)?);
        Ok(())
    });
    succeed(Stage::collect(4, &[0]).run(&patient));
}

/// Two ranks with a communicator of their own besides the world's.
fn two_comms(body: impl Fn(&mut Player, Comm, Comm) -> Played + Send + Sync + 'static) -> Program {
    program(move |player| {
        player.group("", 0..2)?;
        let (world, pair) = (player.comm("")?, player.pair("", 1 - player.rank)?);
        body(player, world, pair)
    })
}

/// Rank 0 receives on stream 1 and reduces on stream 0, rank 1 reduces and sends.
fn two_ranks() -> Arc<Graph> {
    let program = two_comms(|player, world, pair| {
        if player.rank == 0 {
            player.message(1, pair, false, 1, 1 << 10)?;
        }
        player.all_reduce(0, world, 1 << 10)?;
        if player.rank == 1 {
            player.message(1, pair, true, 0, 1 << 10)?;
        }
        player.sync_device()?;
        player.iteration_end()
    });
    collect(2, &[0, 1], |rank| rank, &program)
}

/// Rank 1 has reduced and asks late whether that is complete; rank 0 asks early, in `ask`'s way, for the message that rank 1
/// has not sent, and then reduces.
fn late_question(ask: fn(&mut Player) -> Played<bool>) -> Program {
    two_comms(move |player, world, pair| {
        if player.rank == 0 {
            player.message(1, pair, false, 1, 1 << 10)?;
            player.record_event(1, 9)?;
            assert!(!ask(player)?);
            player.all_reduce(0, world, 1 << 10)?;
        } else {
            player.all_reduce(0, world, 1 << 10)?;
            player.record_event(0, 1)?;
            player.idle(10_000_000_000);
            // Rank 0 has reduced long before, although it was asked to do so only now.
            assert!(player.is_done(1)?);
            player.message(1, pair, true, 0, 1 << 10)?;
        }
        player.sync_device()?;
        player.iteration_end()
    })
}

#[test]
fn a_late_question_waits_for_ranks_that_are_behind() {
    let graph = two_ranks();
    let polls: [fn(&mut Player) -> Played<bool>; 2] =
        [|player| player.is_done(9), |player| Ok(player.ask_in_background(event_query(9))?.value == 1)];
    for poll in polls {
        succeed(Stage::emulate(&graph, &[0, 1]).run(&late_question(poll)));
    }
}

#[test]
fn a_watchdog_the_driver_waits_for_gets_its_answer() {
    let graph = two_ranks();
    // Rank 0's driver joins a thread that asks about a message rank 1 will only send after the reduction.
    let joins = two_comms(|player, world, pair| {
        if player.rank == 0 {
            player.message(1, pair, false, 1, 1 << 10)?;
            player.record_event(1, 9)?;
            let (client, host_ns) = (&player.client, player.host);
            let question = Record { host_ns, flags: FLAG_BACKGROUND, ..event_query(9) };
            let start = Barrier::new(2);
            let answer = std::thread::scope(|scope| {
                let watchdog = scope.spawn(|| {
                    start.wait();
                    query(client, question)
                });
                start.wait();
                watchdog.join().expect("no panic")
            });
            assert_eq!((answer?.value, host_ns), (0, player.host));
        }
        player.all_reduce(0, world, 1 << 10)?;
        player.sync_stream(0)?;
        if player.rank == 1 {
            player.message(1, pair, true, 0, 1 << 10)?;
        }
        player.sync_device()?;
        player.iteration_end()
    });
    let summary = succeed(Stage::emulate(&graph, &[0, 1]).run(&joins));
    assert_eq!(summary.iteration_time_ns.len(), 1);
}
