//! Communicators whose members the process tells, what NCCL holds for them, and how long a call would take.

use super::player::{Comm, Played, Player, Stop};
use super::stage::{Stage, program, record};
use prism_engine::slice::recording::{CommOrigin, RecordedComm};
use prism_wire::control::UNIQUE_ID_BYTES;
use prism_wire::frame::Request;
use prism_wire::message::{CollectiveKind, DataType};

const CHILD: u32 = 9;

fn world(player: &mut Player) -> Played<Comm> {
    let rank = player.rank;
    player.comm_init(8, rank, [9; UNIQUE_ID_BYTES])
}

fn members(player: &mut Player, parent: u32, ranks: &[u32]) -> Played {
    player.request(&Request::CommMembers { comm_id: CHILD, parent, ranks: ranks.to_vec() }).map(|_| ())
}

fn number(answer: Vec<u8>) -> u64 {
    u64::from_le_bytes(answer.try_into().expect("eight bytes"))
}

fn memory(player: &mut Player, comm: Comm) -> Played<u64> {
    // Answered when everything before it has been taken in.
    player.sync_stream(0)?;
    player.request(&Request::CommMemory { comm_id: comm.0 }).map(number)
}

fn estimate(player: &mut Player, comm: Comm, count: u64) -> Played<u64> {
    let f = CollectiveKind::AllGather as u32 | (DataType::Float32 as u32) << 8;
    player.request(&Request::CommEstimate { comm_id: comm.0, f, root: 0, count }).map(number)
}

#[test]
fn members_are_global_ranks_or_group_ranks_of_a_parent() {
    let body = |player: &mut Player| {
        world(player)?;
        members(player, 0, &[5, 3])?;
        player.request(&Request::CommMembers { comm_id: 10, parent: CHILD, ranks: vec![1] })?;
        player.all_reduce(0, Comm(CHILD), 1 << 10)
    };
    let comms = record(8, &[3], &program(body)).remove(0).comms;
    let explicit = |members: &[u32]| RecordedComm { origin: CommOrigin::Explicit, members: members.to_vec() };
    assert_eq!(comms[1..], [explicit(&[5, 3]), explicit(&[3])]);
}

#[test]
fn members_that_make_no_sense_are_refused() {
    let cases: [(u32, &[u32], &str); 4] = [
        (0, &[0, 8], "none of the world's 8 ranks"),
        (0, &[0, 1, 1], "missing or there twice"),
        (0, &[1, 2], "missing or there twice"),
        (77, &[0], "communicator 77, which it does not have"),
    ];
    for (parent, ranks, text) in cases {
        let stage = Stage::collect(8, &[0]);
        let ranks = ranks.to_vec();
        let played = stage.play(&program(move |player| members(player, parent, &ranks))).remove(&0).expect("played");
        let Err(Stop::Refused(refusal)) = played else { panic!("{played:?}") };
        assert!(refusal.contains(text), "{refusal}");
        assert_eq!(stage.session.finish().failed, Some(refusal));
    }
}

#[test]
fn memory_comes_with_use_and_is_what_the_summary_says() {
    let stage = Stage::collect(8, &[0]);
    let body = |player: &mut Player| {
        let comm = world(player)?;
        assert_eq!(memory(player, comm)?, 0);
        assert!(estimate(player, comm, 1 << 10)? < estimate(player, comm, 1 << 24)?);
        assert_eq!(memory(player, comm)?, 0, "an estimate uses nothing");
        player.collective(0, comm, CollectiveKind::AllGather, 1 << 20)?;
        let ring = memory(player, comm)?;
        assert_eq!(ring, 2 * 16 * 9_633_792);
        player.collective(0, comm, CollectiveKind::AllGather, 1 << 21)?;
        assert_eq!(memory(player, comm)?, ring);
        player.message(0, comm, true, 1, 1 << 10)?;
        assert_eq!(memory(player, comm)?, ring, "in the node the receiver has the buffer");
        player.request(&Request::CommMembers { comm_id: CHILD, parent: comm.0, ranks: vec![0, 4] })?;
        player.collective(0, Comm(CHILD), CollectiveKind::AllGather, 1 << 20)?;
        assert_eq!(memory(player, Comm(CHILD))?, ring, "every communicator has buffers of its own");
        assert_eq!(memory(player, Comm(0))?, 2 * ring, "0 stands for all of them");
        Ok(())
    };
    let (summary, outcomes) = stage.run(&program(body));
    assert_eq!(outcomes[&0], Ok(()));
    assert_eq!(summary.ranks[0].nccl_buffer_bytes, 2 * 2 * 16 * 9_633_792);
}
