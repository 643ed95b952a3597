//! A job spliced from a few recordings is the job recorded from every rank.

use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::ids::{CommId, NameId, Rank, SlotId, StreamId};
use prism_engine::slice::recording::{CommOrigin, ProcessGroup, RankRecording, RecordedComm, RecordingError};
use prism_engine::slice::splice::{SpliceError, splice};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Writes down what a rank of a made-up program does.
struct Tape {
    recording: RankRecording,
}

impl Tape {
    fn new(rank: u32, groups: Vec<Vec<u32>>) -> Self {
        let named = |(index, ranks): (usize, Vec<u32>)| ProcessGroup { name: index.to_string(), ranks };
        let groups: Vec<_> = groups.into_iter().enumerate().map(named).collect();
        let world_size = groups[0].ranks.len() as u32;
        // The names' order differs between ranks: only their texts may count.
        let mut names = vec!["forward".to_owned(), "backward".to_owned()];
        names.rotate_left(rank as usize % 2);
        let meta = BTreeMap::new();
        let recording = RankRecording { rank, world_size, ops: vec![], names, comms: vec![], groups, meta };
        Self { recording }
    }

    fn op(&mut self, stream: u32, kind: OpKind) -> &mut Self {
        self.recording.ops.push(Op { host_gap: SimTime::from_ns(5), stream: StreamId(stream), kind });
        self
    }

    fn compute(&mut self, name: &str, us: i64) -> &mut Self {
        let name = self.recording.names.iter().position(|text| text == name).expect("a known name");
        let kind = OpKind::Compute {
            duration: SimTime::from_ns(1000 * us),
            name: NameId(name as u32),
            class: ComputeClass::Gemm,
            provenance: Provenance::Modelled,
        };
        self.op(0, kind)
    }

    /// Groups that contain this rank, in order.
    fn own_group(&self, ordinal: u32) -> &[u32] {
        let mut own = self.recording.groups.iter().filter(|group| group.ranks.contains(&self.recording.rank));
        &own.nth(ordinal as usize).expect("so many groups").ranks
    }

    fn group_rank(&self, ordinal: u32) -> u32 {
        self.own_group(ordinal).iter().position(|rank| *rank == self.recording.rank).expect("a member") as u32
    }

    fn comm(&mut self, origin: CommOrigin, members: Vec<u32>) -> SlotId {
        let known = self.recording.comms.iter().position(|comm| comm.origin == origin);
        let slot = known.unwrap_or_else(|| {
            self.recording.comms.push(RecordedComm { origin, members });
            self.recording.comms.len() - 1
        });
        SlotId(slot as u32)
    }

    fn collective(&mut self, ordinal: u32, kind: CollectiveKind, count: u64) -> &mut Self {
        let members = self.own_group(ordinal).to_vec();
        let slot = self.comm(CommOrigin::Group { ordinal, instance: 0 }, members);
        let (dtype, reduce) = (DataType::Bfloat16, ReduceOp::Sum);
        self.op(1, OpKind::Collective { slot, kind, dtype, reduce, root: 0, count, group: 0 })
    }

    /// A message to or from another member of a group, over their own communicator as torch makes it.
    fn message(&mut self, ordinal: u32, partner: u32, is_send: bool, count: u64) -> &mut Self {
        let own = self.group_rank(ordinal);
        let (lo, hi) = (own.min(partner), own.max(partner));
        let members = [lo, hi].map(|group_rank| self.own_group(ordinal)[group_rank as usize]).to_vec();
        let slot = self.comm(CommOrigin::Pair { ordinal, lo, hi, instance: 0 }, members);
        let peer = u32::from(partner == hi);
        self.op(2, OpKind::PointToPoint { slot, is_send, dtype: DataType::Bfloat16, peer, count, group: 0 })
    }

    fn finish(&mut self) -> RankRecording {
        self.recording.clone()
    }
}

/// Data parallel training over the world.
fn ddp(world: u32, rank: u32) -> RankRecording {
    let mut tape = Tape::new(rank, vec![(0..world).collect()]);
    for layer in 0..4 {
        tape.compute("forward", 10).compute("backward", 20).collective(0, CollectiveKind::AllReduce, 1 << layer);
    }
    tape.op(0, OpKind::IterationEnd).finish()
}

/// Sharded in rows of `shard` ranks, replicated over columns, groups made as a device mesh makes them.
fn hsdp(world: u32, shard: u32, rank: u32) -> RankRecording {
    let replicas = (0..shard).map(|column| (column..world).step_by(shard as usize).collect());
    let shards = (0..world / shard).map(|row| (row * shard..(row + 1) * shard).collect());
    let groups: Vec<Vec<u32>> = std::iter::once((0..world).collect()).chain(replicas).chain(shards).collect();
    let mut tape = Tape::new(rank, groups);
    for _ in 0..3 {
        tape.collective(2, CollectiveKind::AllGather, 100).compute("forward", 10);
        tape.compute("backward", 20).collective(2, CollectiveKind::ReduceScatter, 100);
        tape.collective(1, CollectiveKind::AllReduce, 100);
    }
    tape.collective(0, CollectiveKind::AllReduce, 1).op(0, OpKind::IterationEnd).finish()
}

/// A pipeline of `stages`, each with `world / stages` data parallel ranks; stages exchange activations.
fn pipeline(world: u32, stages: u32, rank: u32) -> RankRecording {
    let width = world / stages;
    let data = (0..stages).map(|stage| (stage * width..(stage + 1) * width).collect());
    let pipes = (0..width).map(|lane| (lane..world).step_by(width as usize).collect());
    let groups: Vec<Vec<u32>> = std::iter::once((0..world).collect()).chain(data).chain(pipes).collect();
    let mut tape = Tape::new(rank, groups);
    let stage = tape.group_rank(2);
    for _ in 0..3 {
        if stage > 0 {
            tape.message(2, stage - 1, false, 64);
        }
        tape.compute("forward", 10);
        if stage + 1 < stages {
            tape.message(2, stage + 1, true, 64).message(2, stage + 1, false, 64);
        }
        tape.compute("backward", 20);
        if stage > 0 {
            tape.message(2, stage - 1, true, 64);
        }
    }
    tape.collective(1, CollectiveKind::AllReduce, 1000).op(0, OpKind::IterationEnd).finish()
}

/// Every rank passes blocks round its group.
fn ring(world: u32, rank: u32) -> RankRecording {
    let mut tape = Tape::new(rank, vec![(0..world).collect()]);
    tape.message(0, (rank + 1) % world, true, 8).message(0, (rank + world - 1) % world, false, 8);
    tape.finish()
}

/// All ranks recorded, and only the first of each role (by digest).
fn both_ways(record: impl Fn(u32) -> RankRecording, world: u32) -> (Graph, Graph, usize) {
    let meta = BTreeMap::from([("device".to_owned(), "h100-sxm".to_owned())]);
    let all: Vec<_> = (0..world).map(&record).collect();
    let everyone: Vec<u32> = (0..world).collect();
    let full = splice(world, &all, &everyone, &meta).expect("every rank was recorded");
    let mut roles: Vec<(String, RankRecording)> = Vec::new();
    let mut assignment = Vec::new();
    for recording in &all {
        let digest = recording.digest();
        let known = roles.iter().position(|(role, _)| *role == digest);
        assignment.push(known.unwrap_or(roles.len()) as u32);
        if known.is_none() {
            roles.push((digest, recording.clone()));
        }
    }
    let few: Vec<_> = roles.into_iter().map(|(_, recording)| recording).collect();
    let sliced = splice(world, &few, &assignment, &meta).expect("every role was recorded");
    (full, sliced, few.len())
}

/// Each slot of each rank has the members that the rank's own recording saw.
fn assert_members(graph: &Graph, record: impl Fn(u32) -> RankRecording) {
    for rank in 0..graph.world_size() {
        let slots = graph.rank_slots(Rank(rank)).iter();
        let members: Vec<_> = slots.map(|comm| graph.comm_members(CommId(*comm)).to_vec()).collect();
        let recorded: Vec<_> = record(rank).comms.into_iter().map(|comm| comm.members).collect();
        assert_eq!(members, recorded, "rank {rank}");
    }
}

#[test]
fn one_recording_plays_a_data_parallel_job() {
    let (full, sliced, roles) = both_ways(|rank| ddp(16, rank), 16);
    assert_eq!((roles, sliced.num_templates(), sliced.num_comms()), (1, 1, 1));
    assert_eq!(full.to_text(), sliced.to_text());
    assert_eq!(full, sliced);
    assert_members(&sliced, |rank| ddp(16, rank));
    assert_eq!(sliced.meta()["device"], "h100-sxm");
    let template = sliced.template(sliced.rank_template(Rank(9)));
    let OpKind::Compute { name, .. } = template.op(0).kind else { panic!("{:?}", template.op(0)) };
    assert_eq!(sliced.name(name), "forward");
}

#[test]
fn one_recording_plays_a_two_dimensional_mesh() {
    let (full, sliced, roles) = both_ways(|rank| hsdp(24, 4, rank), 24);
    assert_eq!((roles, sliced.num_comms()), (1, 1 + 4 + 6));
    assert_eq!(full, sliced);
    assert_members(&sliced, |rank| hsdp(24, 4, rank));
}

#[test]
fn first_middle_and_last_stage_play_a_pipeline() {
    let (full, sliced, roles) = both_ways(|rank| pipeline(24, 6, rank), 24);
    // Four middle stages share a program; each lane has five pairs.
    assert_eq!((roles, sliced.num_comms()), (3, 6 + 4 * 5));
    assert_eq!(full, sliced);
    assert_members(&sliced, |rank| pipeline(24, 6, rank));
}

#[test]
fn groups_with_equal_members_keep_separate_communicators() {
    // The mesh dimension spans the world: torch has two process groups, and NCCL two communicators, of the same ranks.
    let record = |rank| {
        let mut tape = Tape::new(rank, vec![vec![0, 1], vec![0, 1]]);
        tape.collective(1, CollectiveKind::AllReduce, 5).collective(0, CollectiveKind::AllReduce, 7);
        tape.message(0, 1 - rank, rank == 0, 3).finish()
    };
    let (full, sliced, _) = both_ways(record, 2);
    assert_eq!((sliced.num_comms(), &full), (3, &sliced));
    let mut slots = sliced.rank_slots(Rank(0)).to_vec();
    slots.dedup();
    assert_eq!(slots.len(), 3);
}

#[test]
fn a_ring_needs_the_ranks_at_its_seam() {
    let world = 6;
    let few = [ring(world, 0), ring(world, 2), ring(world, world - 1)];
    let played = splice(world, &few, &[0, 1, 1, 1, 1, 2], &BTreeMap::new()).expect("the seam is recorded");
    assert_members(&played, |rank| ring(world, rank));
    let error = splice(world, &few, &[0, 1, 1, 1, 1, 1], &BTreeMap::new()).expect_err("rank 5 is on the other side");
    let SpliceError::Unknown { rank: 5, recorded: 2, slot: 0, size: 2, .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains("rank 5") && text.contains("slot 0") && text.contains("record rank 5 itself"), "{text}");
}

#[test]
fn an_unknown_group_is_told_with_rank_slot_and_size() {
    // Rank 0 has a group of its own that the others do not have.
    let record = |rank| {
        let mut tape = Tape::new(rank, vec![vec![0, 1, 2, 3], vec![0, 1]]);
        tape.collective(0, CollectiveKind::AllReduce, 1).collective(1, CollectiveKind::AllReduce, 1).finish()
    };
    let error = splice(4, &[record(0)], &[0, 0, 0, 0], &BTreeMap::new()).expect_err("rank 2 has one group only");
    let SpliceError::Unknown { rank: 2, recorded: 0, slot: 1, size: 2, .. } = &error else { panic!("{error}") };
    assert!(error.to_string().contains("1 of the 2 recorded process groups"), "{error}");
}

#[test]
fn explicit_members_serve_only_their_members() {
    let mut recording = ddp(4, 0);
    recording.comms[0] = RecordedComm { origin: CommOrigin::Explicit, members: vec![0, 1, 2, 3] };
    splice(4, &[recording.clone()], &[0, 0, 0, 0], &BTreeMap::new()).expect("all ranks are members");
    recording.comms[0].members = vec![0, 1];
    let error = splice(4, &[recording], &[0, 0, 0, 0], &BTreeMap::new()).expect_err("rank 2 is no member");
    assert!(matches!(error, SpliceError::Unknown { rank: 2, .. }), "{error}");
}

#[test]
fn without_groups_there_is_the_world() {
    let mut recording = ddp(4, 2);
    recording.groups.clear();
    let graph = splice(4, &[recording], &[0, 0, 0, 0], &BTreeMap::new()).expect("only the world is used");
    assert_eq!(graph.comm_members(CommId(0)), [0, 1, 2, 3]);
}

#[test]
fn recordings_that_contradict_themselves_or_each_other_are_refused() {
    let mut recording = ddp(4, 0);
    recording.comms[0].members = vec![0, 1, 3, 2];
    let error = splice(4, &[recording], &[0; 4], &BTreeMap::new()).expect_err("another order than the group's");
    assert!(matches!(&error, SpliceError::Recording { rank: 0, .. }), "{error}");
    assert!(error.to_string().contains("[0, 1, 3, 2]"), "{error}");

    let mut other = ddp(4, 3);
    other.ops.truncate(6);
    let error = splice(4, &[ddp(4, 0), other], &[0, 0, 0, 1], &BTreeMap::new()).expect_err("rank 3 stops early");
    let text = error.to_string();
    assert!(matches!(error, SpliceError::Graph(_)) && text.contains("rank 3 calls nothing more"), "{text}");

    let mut nameless = ddp(4, 0);
    nameless.names.clear();
    let error = splice(4, &[nameless], &[0; 4], &BTreeMap::new()).expect_err("names are missing");
    assert!(error.to_string().contains("op 0 has name 0"), "{error}");

    for (world, assignment) in [(4, vec![0; 3]), (4, vec![0, 0, 0, 1]), (5, vec![0; 5])] {
        let error = splice(world, &[ddp(4, 0)], &assignment, &BTreeMap::new()).expect_err("no such assignment");
        assert!(matches!(error, SpliceError::Assignment(_)), "{error}");
    }
}

#[test]
fn differences_are_told_in_words() {
    let (first, second) = (pipeline(8, 4, 0), pipeline(8, 4, 2));
    assert_eq!(first.difference(&pipeline(8, 4, 1)), None);
    assert_eq!(first.digest(), pipeline(8, 4, 1).digest());
    let text = first.difference(&second).expect("the first stage receives nothing");
    assert!(
        text.contains("op 0") && text.contains("rank 0") && text.contains("forward") && text.contains("Recv"),
        "{text}"
    );
    assert_ne!(first.digest(), second.digest());
    let mut longer = ddp(4, 1);
    longer.ops.push(longer.ops[0]);
    let text = ddp(4, 0).difference(&longer).expect("one op more");
    assert!(text.contains("op 13 of rank 1") && text.contains("forward"), "{text}");
}

#[test]
fn the_digest_stays_the_same_over_versions() {
    // Stored beside recordings: a change of this value makes the stored ones useless.
    assert_eq!(ddp(4, 0).digest(), ddp(4, 3).digest());
    assert_eq!(ddp(4, 0).digest(), "616ddfbd548df5ddcb1febd8815743b1");
}

#[test]
fn recordings_survive_their_stored_form_and_damage_is_found() {
    let mut recording = pipeline(8, 4, 3);
    recording.meta.insert("note".to_owned(), "ünïcode \"quoted\"".to_owned());
    let bytes = recording.to_bytes();
    assert_eq!(RankRecording::from_bytes(&bytes).expect("its own bytes"), recording);
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        assert!(RankRecording::from_bytes(&changed).is_err(), "byte {at}");
        assert!(RankRecording::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
    }
    assert!(matches!(RankRecording::from_bytes(b"prism-recording-9 00000000\n{}"), Err(RecordingError::Foreign(_))));
}

/// Every rank was recorded, and their kernels took different times: one program, durations of the ranks' own.
#[test]
fn recordings_that_differ_in_durations_alone_share_a_program() {
    let timed = |rank: u32| {
        let mut recording = ddp(64, rank);
        for (index, op) in recording.ops.iter_mut().enumerate() {
            if let OpKind::Compute { duration, .. } = &mut op.kind {
                *duration += SimTime::from_ns(i64::from(rank) * index as i64);
            }
        }
        recording
    };
    let recordings: Vec<RankRecording> = (0..64).map(timed).collect();
    assert_ne!(recordings[0].digest(), recordings[1].digest());
    let assignment: Vec<u32> = (0..64).collect();
    let graph = splice(64, &recordings, &assignment, &BTreeMap::new()).expect("they fit");
    assert_eq!(graph.num_templates(), 1);
    for (rank, recording) in (0..).map(Rank).zip(&recordings) {
        let own: BTreeMap<u32, SimTime> = graph.rank_overrides(rank).collect();
        let view = graph.template(graph.rank_template(rank));
        for (index, (stored, recorded)) in view.iter().zip(&recording.ops).enumerate() {
            if let (OpKind::Compute { duration, .. }, OpKind::Compute { duration: recorded, .. }) =
                (stored.kind, recorded.kind)
            {
                assert_eq!(*own.get(&(index as u32)).unwrap_or(&duration), recorded, "rank {rank} op {index}");
            }
        }
    }
    // Other host gaps are another program.
    let mut other = ddp(64, 63);
    other.ops[0].host_gap += SimTime::from_ns(1);
    let graph = splice(64, &[ddp(64, 0), other], &[0, 1].repeat(32), &BTreeMap::new()).expect("they fit");
    assert_eq!(graph.num_templates(), 2);
}

#[test]
fn eight_thousand_ranks_are_spliced_from_one() {
    let graph = splice(8192, &[hsdp(8192, 8, 5)], &vec![0; 8192], &BTreeMap::new()).expect("one role");
    assert_eq!((graph.num_comms(), graph.num_templates()), (1 + 8 + 1024, 1));
    assert_eq!(graph.comm_members(CommId(graph.rank_slots(Rank(8191))[0])), (8184..8192).collect::<Vec<_>>());
    assert_eq!(graph.num_ops(), 8192 * 17);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn slices_equal_the_whole(stages in 1_u32..6, width in 1_u32..5, shard in 1_u32..5, rows in 1_u32..6) {
        let world = stages * width;
        let (full, sliced, roles) = both_ways(|rank| pipeline(world, stages, rank), world);
        prop_assert_eq!(&full, &sliced);
        prop_assert!(roles <= 3);
        assert_members(&sliced, |rank| pipeline(world, stages, rank));
        let world = shard * rows;
        let (full, sliced, roles) = both_ways(|rank| hsdp(world, shard, rank), world);
        prop_assert_eq!(&full, &sliced);
        prop_assert_eq!(roles, 1);
        assert_members(&sliced, |rank| hsdp(world, shard, rank));
    }
}
