//! Which ranks a communicator has, and who is let in.

use super::player::{Comm, Played, Player, Stop, group_key};
use super::programs::{ddp, pipeline};
use super::stage::{Program, Stage, collect, live_ranks, program, record, replayed_ranks, succeed};
use prism_engine::slice::recording::{CommOrigin, RecordedComm};
use prism_wire::control::UNIQUE_ID_BYTES;
use std::sync::Arc;
use std::time::Duration;

/// What one rank of a world of 8 records of its communicators.
fn comms_of(rank: u32, body: impl Fn(&mut Player) -> Played + Send + Sync + 'static) -> Vec<RecordedComm> {
    record(8, &[rank], &program(body)).remove(0).comms
}

/// The text with which a session of ranks 0 and 5 of 8 refuses what rank 0 does. The session has failed with it.
fn refusal(body: impl Fn(&mut Player) -> Played + Send + Sync + 'static) -> String {
    let stage = Stage::collect(8, &[0, 5]);
    let played = stage.play_on(&[0], &program(body)).remove(&0).expect("played");
    let Err(Stop::Refused(text)) = played else { panic!("{played:?}") };
    assert_eq!(stage.session.finish().failed.as_deref(), Some(text.as_str()));
    text
}

fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn a_running_root_and_an_absent_one_give_the_same_communicator() {
    for program in [ddp(1), pipeline()] {
        let with_root = record(4, &[0, 2, 3], &program);
        assert_eq!(with_root[2], record(4, &[3], &program)[0]);
    }
    let (with_root, without) = (Stage::collect(4, &[0]), Stage::collect(4, &[1]));
    let key = group_key("", "0");
    let mut root = with_root.connect(0).expect("let in");
    let id = root.make_unique_id();
    root.store.set(&root.session, &key, &id);
    assert_eq!(root.store.get(&root.session, &key, 0), without.session.absent_value(&key).expect("an id"));
    assert_eq!(without.session.absent_value("default_pg/0//rank_count"), None);
    with_root.session.finish();
    without.session.finish();
}

/// The root makes the communicator of a group while its id is still on the way to the store.
fn with_late_id(player: &mut Player, group: &str, nranks: u32) -> Played<Comm> {
    let id = player.make_unique_id();
    let (store, session, key) = (Arc::clone(&player.store), Arc::clone(&player.session), group_key(group, "0"));
    let setter = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(40));
        store.set(&session, &key, &id);
    });
    let comm = player.comm_init(nranks, 0, id);
    setter.join().expect("set");
    comm
}

#[test]
fn a_root_whose_id_comes_late_is_waited_for() {
    let comms = comms_of(0, |player| {
        player.group("", 0..8)?;
        player.group("evens", [0, 2, 4, 6])?;
        // As many members as the world, but not the default group.
        player.group("all", (0..8).rev())?;
        player.group("again", 0..8)?;
        with_late_id(player, "evens", 4)?;
        with_late_id(player, "again", 8)?;
        Ok(())
    });
    let of_group = |ordinal| CommOrigin::Group { ordinal, instance: 0 };
    let expected = [(of_group(1), vec![0, 2, 4, 6]), (of_group(3), (0..8).collect())];
    assert_eq!(comms, expected.map(|(origin, members)| RecordedComm { origin, members }));
}

#[test]
fn the_world_is_told_by_its_size() {
    let comms = comms_of(3, |player| player.comm_init(8, 3, [9; UNIQUE_ID_BYTES]).map(|_| ()));
    assert_eq!((comms[0].origin, comms[0].members.len()), (CommOrigin::Group { ordinal: 0, instance: 0 }, 8));
}

#[test]
fn pairwise_keys_join_two_members_of_a_group() {
    let comms = comms_of(4, |player| {
        player.group("", 0..8)?;
        player.group("odds", [1, 3, 5, 7])?;
        player.group("evens", [0, 2, 4, 6])?;
        player.pair("evens", 3)?;
        player.pair("evens", 0)?;
        player.pair("", 3)?;
        player.pair("evens", 3)?;
        Ok(())
    });
    let pair = |ordinal, lo, hi, instance| CommOrigin::Pair { ordinal, lo, hi, instance };
    let expected = [
        (pair(1, 2, 3, 0), vec![4, 6]),
        (pair(1, 0, 2, 0), vec![0, 4]),
        (pair(0, 3, 4, 0), vec![3, 4]),
        (pair(1, 2, 3, 1), vec![4, 6]),
    ];
    assert_eq!(comms, expected.map(|(origin, members)| RecordedComm { origin, members }));
}

fn split_program() -> Program {
    program(|player| {
        player.group("", 0..8)?;
        let world = player.comm("")?;
        let half = player.rank / 4;
        for other in 0..2 {
            player.group(&format!("half{other}"), other * 4..other * 4 + 4)?;
        }
        let (own, answer) = player.split(world, half as i32, &format!("half{half}"))?;
        assert_eq!((answer.nranks, answer.group_rank), (4, player.rank % 4));
        let (_, nothing) = player.split(world, -1, "")?;
        assert_eq!((nothing.nranks, nothing.group_rank), (0, 0));
        for _ in 0..2 {
            player.gemm(0, "work", 2048)?;
            player.all_reduce(0, own, 1 << 20)?;
            player.all_reduce(0, world, 1 << 10)?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

#[test]
fn a_split_with_the_name_of_the_group_is_that_groups_communicator() {
    let graph = collect(8, &[6], |_| 0, &split_program());
    assert_eq!(graph.num_comms(), 3);
    let summary = succeed(Stage::emulate(&graph, &[0, 5]).run(&split_program()));
    let ranks = replayed_ranks(&graph, &[]);
    assert_eq!(live_ranks(&summary), [(0, ranks[0].clone()), (5, ranks[5].clone())]);
    assert_eq!(summary.ranks[1].communicators[1].members, [4, 5, 6, 7]);
}

#[test]
fn a_split_that_cannot_be_understood_is_refused() {
    let without_name = refusal(|player| {
        player.group("", 0..8)?;
        let world = player.comm("")?;
        player.split(world, 1, "").map(|_| ())
    });
    assert_says(&without_name, &["rank 0", "colour 1", "framework hook"]);
    let without_parent = refusal(|player| player.split(Comm(9), 1, "x").map(|_| ()));
    assert_says(&without_parent, &["rank 0", "communicator 9", "does not have"]);
}

#[test]
fn groups_and_communicators_that_do_not_fit_are_refused_with_the_reason() {
    let outside = refusal(|player| player.group("mine", [0, 9]));
    assert_says(&outside, &["\"mine\"", "rank 9", "8 ranks"]);
    let untold = refusal(|player| {
        let id = player.exchange(&group_key("ghost", "0"), 1);
        player.comm_init(2, 0, id).map(|_| ())
    });
    assert_says(&untold, &["rank 0", "\"ghost\"", "hook did not tell"]);
    let other_size = refusal(|player| {
        player.group("", 0..8)?;
        player.group("four", 0..4)?;
        let id = player.exchange(&group_key("four", "0"), 0);
        player.comm_init(3, 0, id).map(|_| ())
    });
    assert_says(&other_size, &["3 ranks", "\"four\"", "has 4"]);
    let other_place = refusal(|player| {
        player.group("", 0..8)?;
        player.group("four", 0..4)?;
        let id = player.exchange(&group_key("four", "0"), 1);
        player.comm_init(4, 2, id).map(|_| ())
    });
    assert_says(&other_place, &["rank 0", "group rank 2", "\"four\""]);
    let beyond = refusal(|player| {
        player.group("", 0..8)?;
        let id = player.exchange(&group_key("", "2:11"), 2);
        player.comm_init(2, 0, id).map(|_| ())
    });
    assert_says(&beyond, &["pair 2:11", "8 members"]);
}

#[test]
fn an_id_that_did_not_come_through_the_store_is_refused() {
    let text = refusal(|player| {
        player.group("", 0..8)?;
        player.comm_init(4, 0, [1; UNIQUE_ID_BYTES]).map(|_| ())
    });
    assert_says(&text, &["rank 0", "4 ranks", "store"]);
}

#[test]
fn only_the_sessions_ranks_are_let_in() {
    let stage = Stage::collect(8, &[0, 5]);
    let refused = |played: Played<Player>| match played.map(|_| ()) {
        Err(Stop::Refused(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_says(&refused(stage.connect_as(0, 16)), &["16 ranks", "session's 8"]);
    assert_says(&refused(stage.connect(3)), &["rank 3", "[0, 5]"]);
    let first = stage.connect(5).expect("let in");
    // A second process of a rank that runs (a compile worker asking for the device count) is a helper: let in, and harmless.
    let helper = stage.connect(5).expect("a helper is let in");
    let status = stage.session.status();
    assert_eq!(status.ranks.values().map(|rank| rank.connected).collect::<Vec<_>>(), [false, true]);
    // Nobody who was sent away harms those who are in.
    assert_eq!(status.failed, None);
    drop(helper);
    drop(first);
    assert_eq!(stage.session.finish().failed, None);
}

/// Two communicators of the world, the younger group's made first.
fn twice_the_world() -> Program {
    program(|player| {
        player.group("", 0..player.world)?;
        player.group("again", 0..player.world)?;
        let (again, default) = (player.comm("again")?, player.comm("")?);
        for _ in 0..2 {
            player.all_reduce(0, again, 1 << 20)?;
            player.all_reduce(1, default, 1 << 10)?;
            player.sync_device()?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

#[test]
fn communicators_of_the_same_ranks_are_told_apart() {
    let graph = collect(4, &[2], |_| 0, &twice_the_world());
    assert_eq!(graph.num_comms(), 2);
    let summary = succeed(Stage::emulate(&graph, &[1, 2]).run(&twice_the_world()));
    let ranks = replayed_ranks(&graph, &[]);
    assert_eq!(live_ranks(&summary), [(1, ranks[1].clone()), (2, ranks[2].clone())]);
}
