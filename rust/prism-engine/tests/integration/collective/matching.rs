//! The algebra of explicit programs against the replay of the same programs as a graph.

use prism_engine::collective::vectors::{Call, Collective, Job, Key, Op, P2pCost};
use prism_engine::graph::op::{CollectiveKind, DataType, Op as GraphOp, OpKind, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{Rank, SlotId, StreamId};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use prism_engine::sim::SimError;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Communicators by name, in ascending order.
const COMMS: [(&str, &[u32]); 4] = [("w", &[0, 1, 2, 3]), ("x", &[0, 1]), ("y", &[1, 0]), ("z", &[3, 1, 2])];

/// One call of a rank: communicator, then the peer (group rank) and direction of a message, and a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    comm: usize,
    half: Option<(bool, u32)>,
    count: i64,
}

type Program = Vec<Vec<Step>>;

fn group_rank(comm: usize, rank: u32) -> Option<u32> {
    COMMS[comm].1.iter().position(|member| *member == rank).map(|at| at as u32)
}

/// What everybody does at one point of a job: a collective of a communicator, a message of a pair, or messages both ways in
/// one group, perhaps with a collective of another communicator beside them.
fn everybody() -> impl Strategy<Value = Vec<(u32, Vec<Step>)>> {
    let comm = 0..COMMS.len();
    let call = comm.clone().prop_map(|comm| {
        let step = Step { comm, half: None, count: 4 };
        COMMS[comm].1.iter().map(|rank| (*rank, vec![step])).collect()
    });
    let pair = comm.prop_flat_map(|comm| {
        let size = COMMS[comm].1.len() as u32;
        (Just(comm), 0..size, 0..size)
    });
    let message = pair.clone().prop_map(|(comm, from, to)| {
        let half = |is_send, peer| Step { comm, half: Some((is_send, peer)), count: 4 };
        let (source, destination) = (COMMS[comm].1[from as usize], COMMS[comm].1[to as usize]);
        if from == to {
            return vec![(source, vec![half(true, to), half(false, from)])];
        }
        vec![(source, vec![half(true, to)]), (destination, vec![half(false, from)])]
    });
    let exchange = (pair, prop::option::of(0..COMMS.len())).prop_map(|((comm, a, b), beside)| {
        let halves = |peer| [true, false].map(|is_send| Step { comm, half: Some((is_send, peer)), count: 4 }).to_vec();
        let mut groups = vec![(COMMS[comm].1[a as usize], halves(b))];
        if a != b {
            groups.push((COMMS[comm].1[b as usize], halves(a)));
        }
        if let Some(beside) = beside.filter(|beside| *beside != comm) {
            let call = Step { comm: beside, half: None, count: 4 };
            for member in COMMS[beside].1 {
                match groups.iter_mut().find(|(rank, _)| rank == member) {
                    Some((_, steps)) => steps.push(call),
                    None => groups.push((*member, vec![call])),
                }
            }
        }
        groups
    });
    prop_oneof![3 => call, 2 => message, 2 => exchange]
}

/// Four programs that fit together, but for up to three mistakes.
fn programs() -> impl Strategy<Value = Vec<Program>> {
    let mistakes = prop::collection::vec((0..5u8, 0..4usize, any::<prop::sample::Index>(), 1..3i64), 0..4);
    (prop::collection::vec(everybody(), 0..7), mistakes).prop_map(|(steps, mistakes)| {
        let mut programs = vec![Program::new(); 4];
        for (rank, group) in steps.into_iter().flatten() {
            programs[rank as usize].push(group);
        }
        for (kind, rank, at, by) in mistakes {
            let program = &mut programs[rank];
            if program.is_empty() {
                continue;
            }
            let at = at.index(program.len());
            let other = (at + by as usize) % program.len();
            match kind {
                0 => program.swap(at, other),
                1 => drop(program.remove(at)),
                2 => program.insert(at, program[other].clone()),
                3 => program[at][0].count += by,
                // A group falls apart.
                _ => {
                    let calls = program.remove(at);
                    program.splice(at..at, calls.into_iter().map(|call| vec![call]));
                }
            }
        }
        programs
    })
}

fn job(programs: &[Program]) -> Job {
    let call = |step: &Step| match step.half {
        None => Call::Collective(Collective { comm: step.comm, cost: 1_000, signature: step.count.to_string() }),
        Some((true, peer)) => Call::Send { comm: step.comm, peer, bytes: step.count * 4 },
        Some((false, peer)) => Call::Recv { comm: step.comm, peer, bytes: step.count * 4 },
    };
    let program = |program: &Program| program.iter().map(|group| Op::Calls(group.iter().map(call).collect())).collect();
    Job {
        comms: COMMS.iter().map(|(name, members)| ((*name).to_owned(), members.to_vec())).collect(),
        programs: programs.iter().map(program).collect(),
        p2p: P2pCost { base: 500, divisor: Some(10), is_eager: false },
    }
}

fn graph(programs: &[Program]) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(4);
    let comms: Vec<_> =
        COMMS.iter().map(|(_, members)| builder.add_comm(members.iter().copied().map(Rank).collect())).collect();
    for (rank, program) in (0..).zip(programs) {
        let own: Vec<_> = (0..COMMS.len()).filter(|comm| group_rank(*comm, rank).is_some()).collect();
        let slot = |comm| SlotId(own.iter().position(|own| *own == comm).expect("a member") as u32);
        let ops: Vec<_> = (1..)
            .zip(program)
            .flat_map(|(group, calls)| calls.iter().map(move |step| (group, *step)))
            .map(|(group, step)| {
                let (slot, dtype, count) = (slot(step.comm), DataType::Float32, step.count as u64);
                let kind = match step.half {
                    None => {
                        let (kind, reduce) = (CollectiveKind::AllReduce, ReduceOp::Sum);
                        OpKind::Collective { slot, kind, dtype, reduce, root: 0, count, group }
                    }
                    Some((is_send, peer)) => OpKind::PointToPoint { slot, is_send, dtype, peer, count, group },
                };
                GraphOp { host_gap: SimTime::ZERO, stream: StreamId(0), kind }
            })
            .collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, own.iter().map(|comm| comms[*comm]).collect());
    }
    Arc::new(builder.finish().expect("valid"))
}

fn comm_of(key: Key) -> usize {
    match key {
        Key::Collective { comm, .. } | Key::Message { comm, .. } => comm,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_replay_finds_what_the_algebra_finds(programs in programs()) {
        let outcome = job(&programs).evaluate();
        let replayed = replay(&graph(&programs), &ReplayOptions::new(Profile::builtin("h100-sxm").expect("built in")));
        match &replayed {
            Ok(_) => {
                prop_assert_eq!(&outcome.stuck, &Vec::<u32>::new());
                prop_assert!(outcome.mismatches.is_empty(), "{:?}", outcome.mismatches);
            }
            Err(SimError::Deadlock { waiting }) => {
                let stuck: BTreeSet<u32> = waiting.iter().flat_map(|blocked| &blocked.waiting).map(|rank| rank.0).collect();
                prop_assert_eq!(stuck.into_iter().collect::<Vec<_>>(), outcome.stuck);
                let reasons = &outcome.explanation;
                prop_assert!(!reasons.cycle.is_empty() || !reasons.missing.is_empty());
            }
            Err(SimError::Mismatch(found)) => {
                let key = Key::Collective { comm: found.communicator as usize, number: found.sequence };
                let known = outcome.mismatches.iter().find(|mismatch| mismatch.key == key);
                prop_assert!(known.is_some(), "{:?} {:?}", found, outcome.mismatches);
                if found.majority_ranks.len() > found.minority_ranks.len() {
                    let minority = known.map(|mismatch| mismatch.minority.iter().map(|(rank, _)| Rank(*rank)).collect());
                    let named = |rank: &Rank| minority.as_ref().is_some_and(|ranks: &Vec<Rank>| ranks.contains(rank));
                    prop_assert!(found.minority_ranks.iter().all(named), "{:?} {:?}", found, outcome.mismatches);
                }
            }
            Err(SimError::MessageMismatch { communicator, .. }) => {
                let is_here = outcome.mismatches.iter().any(|mismatch| comm_of(mismatch.key) == *communicator as usize);
                prop_assert!(is_here, "{:?}", outcome.mismatches);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    /// The order in which ranks are looked at does not matter: renaming them gives the renamed outcome.
    #[test]
    fn renamed_ranks_get_the_renamed_outcome(
        programs in programs(), names in Just(vec![0u32, 1, 2, 3]).prop_shuffle(), eager in any::<bool>()
    ) {
        let mut job = job(&programs);
        job.p2p.is_eager = eager;
        let mut renamed = job.clone();
        for (_, members) in &mut renamed.comms {
            *members = members.iter().map(|member| names[*member as usize]).collect();
        }
        for (rank, program) in job.programs.iter().enumerate() {
            renamed.programs[names[rank] as usize].clone_from(program);
        }
        let (plain, other) = (job.evaluate(), renamed.evaluate());
        for (rank, finish) in plain.finish.iter().enumerate() {
            prop_assert_eq!(*finish, other.finish[names[rank] as usize]);
        }
        let stuck: BTreeSet<u32> = plain.stuck.iter().map(|rank| names[*rank as usize]).collect();
        prop_assert_eq!(stuck.into_iter().collect::<Vec<_>>(), other.stuck.clone());
        let keys = |outcome: &prism_engine::collective::vectors::Outcome| -> Vec<Key> {
            outcome.mismatches.iter().map(|mismatch| mismatch.key).collect()
        };
        prop_assert_eq!(keys(&plain), keys(&other));
        prop_assert_eq!(plain.explanation.cycle.len(), other.explanation.cycle.len());
        prop_assert_eq!(plain.explanation.missing.len(), other.explanation.missing.len());
        prop_assert!(plain.stuck.is_empty() == (plain.explanation.cycle.is_empty() && plain.explanation.missing.is_empty()));
    }
}
