//! What goes wrong is told, by name, and nobody waits for ever.

use super::player::{Comm, Played, Player, Stop, event_query, query, record};
use super::programs::ddp;
use super::stage::{Program, Stage, collect, profile, program, replayed};
use prism_engine::cost::kernels::KernelTable;
use prism_engine::graph::Graph;
use prism_engine::hybrid::{Session, SessionError, SessionMode, SessionOptions, Summary};
use prism_wire::message::{CollectiveKind, FLAG_BACKGROUND, Record, RecordKind};
use std::sync::Arc;

/// What a rank does at the beginning of an iteration besides its duty. False: it ends there.
type Fault = fn(&mut Player, Comm, u32) -> Played<bool>;

/// Three iterations of compute and an all-reduce over the world.
fn toy(fault: Fault) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.training_begin()?;
        for iteration in 0..3 {
            player.gemm(0, "forward", 4096)?;
            if !fault(player, world, iteration)? {
                return Ok(());
            }
            player.all_reduce(0, world, 1 << 20)?;
            player.sync_stream(0)?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

fn toy_graph() -> Arc<Graph> {
    collect(8, &[0], |_| 0, &toy(|_, _, _| Ok(true)))
}

/// Two ranks that exchange messages with their neighbour, through the pair 0:1 of a group of two.
fn exchange(receives_first: fn(&Player) -> bool, wait: fn(&mut Player) -> Played) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        for first in (0..player.world).step_by(2) {
            player.group(&format!("pair{first}"), [first, first + 1])?;
        }
        let group = format!("pair{}", player.rank / 2 * 2);
        let peer = 1 - player.group_rank(&group);
        let pair = player.pair(&group, peer)?;
        player.record_event(0, 1)?;
        let receives_first = receives_first(player);
        for is_send in [!receives_first, receives_first] {
            player.message(0, pair, is_send, peer, 1 << 16)?;
            player.record_event(0, 2)?;
            wait(player)?;
        }
        player.iteration_end()
    })
}

fn exchange_graph() -> Arc<Graph> {
    let program = exchange(|player| player.rank % 2 == 1, |player| player.sync_stream(0).map(|_| ()));
    collect(4, &[0, 1], |rank| rank % 2, &program)
}

fn failure(summary: &Summary, parts: &[&str]) {
    let text = summary.failed.as_deref().expect("a failure");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn a_rank_that_dies_in_an_iteration_ends_the_session_with_what_was_done() {
    let graph = toy_graph();
    let dies = toy(|player, _, iteration| Ok(player.rank != 5 || iteration == 0));
    let (summary, outcomes) = Stage::emulate(&graph, &[0, 3, 5]).run(&dies);
    assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Err(Stop::Failed), Err(Stop::Failed), Ok(())]);
    failure(
        &summary,
        &["deadlock", "AllReduce number 1 of communicator 0", "waits for rank 5", "ended without the call: 5"],
    );
    assert_eq!(summary.iteration_time_ns, replayed(&graph, &[]).iteration_time_ns[..1]);
    let ends: Vec<_> = summary.ranks.iter().map(|rank| (rank.iterations, rank.last_op.as_deref())).collect();
    let all_reduce = Some("AllReduce of 1048576 Bfloat16");
    assert_eq!(ends, [(1, all_reduce), (1, all_reduce), (1, Some("forward"))]);
}

#[test]
fn an_exit_that_is_told_before_the_last_records_are_in_cuts_nothing_off() {
    let told_early = toy(|player, _, iteration| {
        if player.rank == 5 && iteration == 0 {
            player.session.process_exited(5, 9);
        }
        Ok(player.rank != 5 || iteration < 2)
    });
    let (summary, outcomes) = Stage::emulate(&toy_graph(), &[0, 5]).run(&told_early);
    assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Err(Stop::Failed), Ok(())]);
    failure(&summary, &["AllReduce number 2", "ended without the call: 5"]);
    assert_eq!((summary.iteration_time_ns.len(), summary.ranks[1].exit_code), (2, Some(9)));
}

#[test]
fn a_rank_that_never_came_is_told_as_well() {
    let stage = Stage::emulate(&toy_graph(), &[0, 5]);
    stage.session.process_exited(5, 127);
    assert_eq!(stage.play_on(&[0], &toy(|_, _, _| Ok(true)))[&0], Err(Stop::Failed));
    let summary = stage.session.finish();
    failure(&summary, &["AllReduce number 0", "ended without the call: 5"]);
    assert_eq!((summary.iteration_time_ns, summary.ranks[1].exit_code), (vec![], Some(127)));
}

#[test]
fn a_deadlock_of_running_ranks_names_them_and_what_they_wait_in() {
    let waits: [fn(&mut Player) -> Played; 3] = [
        |player| player.sync_stream(0).map(|_| ()),
        |player| player.sync_event(2).map(|_| ()),
        |player| player.elapsed_ns(1, 2).map(|_| ()),
    ];
    let graph = exchange_graph();
    for wait in waits {
        let (summary, outcomes) = Stage::emulate(&graph, &[0, 1]).run(&exchange(|_| true, wait));
        assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Err(Stop::Failed), Err(Stop::Failed)]);
        let recv = "in Recv number 0 of communicator 0";
        failure(&summary, &["deadlock", "rank 0 at op", "rank 1 at op", recv, "waits for rank 1", "waits for rank 0"]);
    }
}

/// Waits for the stream while another thread asks about event 2 without a pause.
fn sync_under_watch(player: &mut Player) -> Played {
    let (client, host_ns) = (&player.client, player.host);
    std::thread::scope(|scope| {
        let watchdog = scope.spawn(move || {
            let question = Record { host_ns, flags: FLAG_BACKGROUND, ..event_query(2) };
            while query(client, question)?.value == 0 {}
            Ok(())
        });
        let synced = query(client, Record { host_ns, ..record(RecordKind::StreamSync) });
        watchdog.join().expect("no panic").and(synced).map(|_| ())
    })
}

#[test]
fn a_watchdog_that_asks_all_the_time_hides_no_deadlock() {
    let (summary, outcomes) = Stage::emulate(&exchange_graph(), &[0, 1]).run(&exchange(|_| true, sync_under_watch));
    assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Err(Stop::Failed), Err(Stop::Failed)]);
    failure(&summary, &["deadlock", "Recv number 0"]);
}

#[test]
fn a_call_that_differs_from_the_graph_names_the_communicator_and_the_ranks() {
    let graph = toy_graph();
    let other_count: Fault = |player, world, iteration| {
        if player.rank == 3 && iteration == 1 {
            player.all_reduce(0, world, 77)?;
        }
        Ok(true)
    };
    let other_kind: Fault = |player, world, iteration| {
        if player.rank == 3 && iteration == 1 {
            player.collective(0, world, CollectiveKind::AllGather, 1 << 20)?;
        }
        Ok(true)
    };
    for (fault, parts) in [(other_count, ["77", "AllReduce"]), (other_kind, ["AllGather", "AllReduce"])] {
        let (summary, outcomes) = Stage::emulate(&graph, &[3]).run(&toy(fault));
        assert_eq!(outcomes[&3], Err(Stop::Failed));
        failure(&summary, &["collective 1 of communicator 0 (8 ranks)", "ranks 0-2,4-7 called", "rank 3 called"]);
        failure(&summary, &parts);
        assert_eq!(summary.iteration_time_ns.len(), 1);
    }
}

#[test]
fn a_message_that_differs_from_the_graph_names_the_communicator_and_the_ranks() {
    let longer = program(|player| {
        player.group("", 0..4)?;
        player.group("pair0", [0, 1])?;
        let pair = player.pair("pair0", 1)?;
        player.message(0, pair, true, 1, 1 << 17)?;
        player.sync_device().map(|_| ())
    });
    let (summary, outcomes) = Stage::emulate(&exchange_graph(), &[0]).run(&longer);
    assert_eq!(outcomes[&0], Err(Stop::Failed));
    failure(&summary, &["communicator 0", "rank 0 sends 262144 bytes", "rank 1 receives 131072 bytes"]);
}

#[test]
fn a_communicator_the_graph_does_not_have_is_refused() {
    let other = program(|player| {
        player.group("", 0..8)?;
        player.group("half", 0..4)?;
        player.comm("half").map(|_| ())
    });
    let (summary, outcomes) = Stage::emulate(&toy_graph(), &[0]).run(&other);
    failure(&summary, &["rank 0", "ranks 0-3", "the graph does not have"]);
    assert_eq!(outcomes[&0], Err(Stop::Refused(summary.failed.expect("failed"))));
}

#[test]
fn options_that_do_not_fit_are_refused_before_anything_runs() {
    let graph = toy_graph();
    let options = |world_size, live: &[u32], slow: &[(u32, f64)]| SessionOptions {
        mode: SessionMode::Emulate,
        world_size,
        profile: profile(),
        kernels: KernelTable::default(),
        measured_host_time: false,
        live: live.to_vec(),
        slow: slow.iter().copied().collect(),
        perturb: prism_engine::perturb::Perturbations::default(),
    };
    let refused = |options: SessionOptions, graph: Option<&Arc<Graph>>| match Session::new(options, graph.cloned()) {
        Err(SessionError::Config(text)) => text,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("accepted"),
    };
    let mut overlapped = options(8, &[0], &[]);
    overlapped.profile.overlap = prism_engine::contention::Overlap::new([("gemm", 1.1)]).ok();
    let cases = [
        (refused(overlapped, Some(&graph)), "only replay knows"),
        (refused(options(16, &[0], &[]), Some(&graph)), "the graph has 8 ranks, the job 16"),
        (refused(options(8, &[0], &[]), None), "needs the graph"),
        (refused(options(0, &[0], &[]), Some(&graph)), "world size is 0"),
        (refused(options(8, &[], &[]), Some(&graph)), "at least one"),
        (refused(options(8, &[8], &[]), Some(&graph)), "rank 8 does not exist"),
        (refused(options(8, &[0], &[(9, 1.5)]), Some(&graph)), "rank 9 does not exist"),
        (refused(options(8, &[0], &[(3, -1.0)]), Some(&graph)), "rank 3 is -1"),
        (refused(options(8, &[0], &[(3, f64::NAN)]), Some(&graph)), "rank 3 is NaN"),
    ];
    for (text, part) in cases {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    assert!(Session::new(options(8, &[0, 0], &[]), Some(graph)).is_err());
}

/// Records that mean nothing, and what the session says about each.
fn damaged() -> Vec<(Record, &'static str)> {
    let of = record;
    let all_reduce = 7 << 8;
    vec![
        (Record { kind: 999, ..Record::default() }, "record kind 999 is not known"),
        (Record { e: 77, f: all_reduce, ..of(RecordKind::Collective) }, "communicator = 77"),
        (Record { e: 77, f: all_reduce, ..of(RecordKind::Send) }, "communicator = 77"),
        (Record { e: 1, f: all_reduce + 99, ..of(RecordKind::Collective) }, "collective = 99"),
        (Record { e: 1, f: 200 << 8, ..of(RecordKind::Collective) }, "data type = 200"),
        (Record { e: 1, f: 200 << 8, ..of(RecordKind::Recv) }, "data type = 200"),
        (Record { f: 55, ..of(RecordKind::Gemm) }, "data type = 55"),
        (Record { g: 55, ..of(RecordKind::Gemm) }, "data type = 55"),
        (Record { f: 55, ..of(RecordKind::Operator) }, "data type = 55"),
        (Record { b: 9, ..of(RecordKind::Memcpy) }, "copy direction = 9"),
        (Record { e: 9, ..of(RecordKind::Marker) }, "marker = 9"),
        (Record { e: 1, f: all_reduce, g: 99, ..of(RecordKind::Send) }, "group rank 99"),
        (Record { e: 1, f: all_reduce, g: 99, ..of(RecordKind::Collective) }, "group rank 99"),
        (Record { stream: u32::MAX, ..of(RecordKind::Memset) }, "stream 4294967295"),
        (Record { host_ns: i64::MAX, ..of(RecordKind::Memset) }, "26 days"),
        (Record { a: u64::MAX, ..of(RecordKind::Memset) }, "26 days"),
        (Record { a: u64::MAX, b: u64::MAX, c: u64::MAX, d: u64::MAX, ..of(RecordKind::Gemm) }, "26 days"),
        (Record { e: 1, f: all_reduce, a: u64::MAX, ..of(RecordKind::Collective) }, "days"),
        (Record { e: 4, f: 5, ..of(RecordKind::EventElapsed) }, "event 4, which was never recorded"),
    ]
}

/// Ends at the first answer.
fn damage(player: &mut Player, damaged: Record) -> Played {
    player.group("", 0..4)?;
    player.comm("")?;
    if RecordKind::from_u16(damaged.kind).is_none_or(RecordKind::is_query) {
        query(&player.client, damaged)?;
    } else {
        player.client.append(&damaged).expect("connected");
    }
    player.sync_device().map(|_| ())
}

#[test]
fn a_damaged_record_fails_the_session_and_says_what_is_wrong() {
    for (damaged, says) in damaged() {
        let (summary, outcomes) = Stage::collect(4, &[1]).run(&program(move |player| damage(player, damaged)));
        assert_eq!(outcomes[&1], Err(Stop::Failed), "{damaged:?}");
        failure(&summary, &[says]);
    }
}

#[test]
fn odd_but_harmless_records_do_no_harm() {
    let odd = program(|player| {
        let odd = [
            Record { host_ns: i64::MIN, ..record(RecordKind::Memset) },
            Record { e: u32::MAX, ..record(RecordKind::EventRecord) },
            Record { e: 5, ..record(RecordKind::EventWait) },
            Record { h: u32::MAX, ..record(RecordKind::GroupEnd) },
            Record { a: u64::MAX, ..record(RecordKind::Free) },
            Record { a: u64::MAX, ..record(RecordKind::Alloc) },
            Record { a: u64::MAX, ..record(RecordKind::Alloc) },
            Record { e: 9, ..record(RecordKind::CommDestroy) },
            Record { e: 9, ..record(RecordKind::Kernel) },
        ];
        for record in odd {
            player.client.append(&record).expect("connected");
        }
        assert!(player.is_done(77)?);
        player.sync_event(78)?;
        player.sync_stream(3)?;
        player.sync_device().map(|_| ())
    });
    let summary = super::stage::succeed(Stage::collect(4, &[1]).run(&odd));
    assert_eq!(
        (summary.ranks[0].peak_device_bytes, summary.ranks[0].last_op.as_deref()),
        (u64::MAX, Some("(unnamed)"))
    );
}

#[test]
fn after_a_failure_every_query_fails_at_once() {
    use RecordKind as K;
    let stubborn = program(|player| {
        assert_eq!(damage(player, Record { kind: 999, ..Record::default() }), Err(Stop::Failed));
        for kind in [K::StreamSync, K::EventSync, K::DeviceSync, K::EventQuery, K::StreamQuery, K::EventElapsed] {
            player.kernel(0, "more", 1)?;
            assert_eq!(player.ask(record(kind)).map(|_| ()), Err(Stop::Failed));
            assert_eq!(player.ask_in_background(record(kind)).map(|_| ()), Err(Stop::Failed));
        }
        // Whoever has not yet noticed is not confused further.
        player.group("late", 0..4)
    });
    let (summary, outcomes) = Stage::collect(4, &[0, 1]).run(&stubborn);
    assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Ok(()), Ok(())]);
    failure(&summary, &["record kind 999"]);
}

#[test]
fn ending_a_session_cuts_running_ranks_off_without_blaming_them() {
    let stage = Stage::emulate(&toy_graph(), &[0, 5]);
    let idle = stage.connect(5).expect("let in");
    let mut waiting = stage.connect(0).expect("let in");
    let waiter = std::thread::spawn(move || {
        waiting.group("", 0..8)?;
        let world = waiting.comm("")?;
        waiting.all_reduce(0, world, 1 << 20)?;
        waiting.sync_stream(0).map(|_| ())
    });
    stage.wait_until(|session| session.status().ranks[&0].records == 2);
    let summary = stage.session.finish();
    assert_eq!((summary.failed, summary.iteration_time_ns), (None, vec![]));
    assert_eq!(waiter.join().expect("no panic"), Err(Stop::Disconnected));
    assert!(idle.client.append(&record(RecordKind::Memset)).is_err());
}

#[test]
fn a_clean_run_has_no_failure() {
    let graph = collect(8, &[0], |_| 0, &ddp(2));
    let (summary, outcomes) = Stage::emulate(&graph, &[0, 5]).run(&ddp(2));
    assert_eq!((summary.failed, outcomes.into_values().all(|played| played.is_ok())), (None, true));
}
