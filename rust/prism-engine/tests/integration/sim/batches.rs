//! Communicators evaluated together end as they do one at a time.

use super::jobs::{call, compute, job_of, profile};
use prism_engine::graph::op::{CollectiveKind, DataType, Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId};
use prism_engine::sim::{Peers, SimError, SimOptions, SimReport, Simulation};
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

fn run(graph: &Arc<Graph>, slow: &BTreeMap<Rank, f64>, batches: bool) -> Result<SimReport, SimError> {
    let options = SimOptions { slow: slow.clone(), batches, ..SimOptions::new(profile()) };
    let mut simulation = Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), options)?;
    simulation.run()?;
    Ok(simulation.report())
}

/// The outcome, which must not depend on batches.
fn checked(graph: &Arc<Graph>, slow: &BTreeMap<Rank, f64>) -> Result<Result<SimReport, SimError>, TestCaseError> {
    let (together, alone) = (run(graph, slow, true), run(graph, slow, false));
    match (&together, &alone) {
        (Ok(together), Ok(alone)) => {
            prop_assert_eq!(&together.ranks, &alone.ranks);
            prop_assert_eq!(&together.device_time, &alone.device_time);
            prop_assert_eq!(together.ops_evaluated, alone.ops_evaluated);
        }
        (Err(together), Err(alone)) => prop_assert_eq!(together, alone),
        _ => prop_assert!(false, "{together:?} together, {alone:?} alone"),
    }
    Ok(together)
}

/// One thing all ranks of a grid do.
#[derive(Clone, Debug)]
enum Act {
    Compute {
        stream: u32,
        us: i64,
    },
    /// In the communicator of the rank's row (slot 0) or column (slot 1).
    Call {
        slot: u32,
        stream: u32,
        kind: CollectiveKind,
        count: u64,
    },
    /// Two calls in one group.
    Twice {
        slots: (u32, u32),
        stream: u32,
    },
    /// Everybody sends to the next of its row and receives from the one before.
    Ring {
        stream: u32,
        count: u64,
    },
    Order {
        from: u32,
        to: u32,
    },
    Sync,
    IterationEnd,
}

/// `rows x columns` ranks in a random order; the members of a row are in an order of their own.
#[derive(Clone, Debug)]
struct Grid {
    rows: u32,
    columns: u32,
    ranks: Vec<u32>,
    turn: u32,
    acts: Vec<Act>,
    gap_ns: i64,
    slow: BTreeMap<Rank, f64>,
    /// The rows whose ranks have a program of their own, so that columns have members of two roles.
    second: u32,
    /// A rank that leaves out its last op.
    missing: Option<u32>,
}

fn act() -> impl Strategy<Value = Act> {
    use CollectiveKind as K;
    let kinds = vec![K::AllReduce, K::AllGather, K::ReduceScatter, K::AllToAll, K::Broadcast];
    let count = prop::sample::select(vec![1u64, 1000, 1 << 20]);
    prop_oneof![
        4 => (0..2u32, 0..400i64).prop_map(|(stream, us)| Act::Compute { stream, us }),
        4 => (0..2u32, 0..2u32, prop::sample::select(kinds), count.clone())
            .prop_map(|(slot, stream, kind, count)| Act::Call { slot, stream, kind, count }),
        1 => ((0..2u32, 0..2u32), 0..2u32).prop_map(|(slots, stream)| Act::Twice { slots, stream }),
        1 => (0..2u32, count).prop_map(|(stream, count)| Act::Ring { stream, count }),
        1 => (0..2u32, 0..2u32).prop_map(|(from, to)| Act::Order { from, to }),
        1 => Just(Act::Sync),
        1 => Just(Act::IterationEnd),
    ]
}

fn grid() -> impl Strategy<Value = Grid> {
    (1..10u32, 1..40u32).prop_flat_map(|(rows, columns)| {
        let world = rows * columns;
        let slow = prop::collection::btree_map((0..world).prop_map(Rank), 0.5..4.0, 0..(world as usize).min(60));
        let rest = (0..columns, prop::collection::vec(act(), 1..16), 0..3000i64, slow, 0..=rows);
        let ranks = Just((0..world).collect::<Vec<u32>>());
        let ranks = prop_oneof![ranks.clone(), ranks.prop_shuffle()];
        (ranks, rest, prop::option::weighted(0.2, 0..world)).prop_map(move |(ranks, rest, missing)| {
            let (turn, acts, gap_ns, slow, second) = rest;
            Grid { rows, columns, ranks, turn, acts, gap_ns, slow, second, missing }
        })
    })
}

impl Grid {
    fn at(&self, row: u32, column: u32) -> u32 {
        self.ranks[(row * self.columns + column) as usize]
    }

    fn graph(&self) -> Arc<Graph> {
        let world = self.rows * self.columns;
        let mut builder = GraphBuilder::new(world);
        builder.intern_name("work");
        let mut slots: Vec<Vec<CommId>> = vec![Vec::new(); world as usize];
        let mut add = |members: Vec<u32>| {
            let comm = builder.add_comm(members.iter().copied().map(Rank).collect());
            for rank in members {
                slots[rank as usize].push(comm);
            }
        };
        for row in 0..self.rows {
            add((0..self.columns).map(|column| self.at(row, (column + self.turn) % self.columns)).collect());
        }
        for column in 0..self.columns {
            add((0..self.rows).map(|row| self.at(row, column)).collect());
        }
        // Messages name peers by group rank, so their programs differ from column to column.
        let has_messages = self.acts.iter().any(|act| matches!(act, Act::Ring { .. }));
        let mut templates = BTreeMap::new();
        for row in 0..self.rows {
            for column in 0..self.columns {
                let rank = self.at(row, column);
                let position = (column + self.columns - self.turn) % self.columns;
                let is_missing = self.missing == Some(rank);
                let key = (row < self.second, is_missing, if has_messages { position } else { 0 });
                let template = *templates.entry(key).or_insert_with(|| {
                    let mut ops = self.program(position, row < self.second);
                    if is_missing {
                        ops.pop();
                    }
                    builder.add_template(&format!("{key:?}"), &ops).expect("valid")
                });
                builder.set_rank(Rank(rank), template, slots[rank as usize].clone());
            }
        }
        Arc::new(builder.finish().expect("valid"))
    }

    fn program(&self, position: u32, is_second: bool) -> Vec<Op> {
        let mut ops = Vec::new();
        let mut add = |stream: u32, kind: OpKind| {
            ops.push(Op { host_gap: SimTime::from_ns(self.gap_ns), stream: StreamId(stream), kind });
        };
        for (number, act) in self.acts.iter().enumerate() {
            let group = number as u32 + 1;
            match act.clone() {
                Act::Compute { stream, us } => {
                    add(stream, compute(SimTime::from_ns(us * 1000 + i64::from(is_second))));
                }
                Act::Call { slot, stream, kind, count } => add(stream, call(slot, kind, count, 0)),
                Act::Twice { slots: (first, second), stream } => {
                    add(stream, call(first, CollectiveKind::AllReduce, 5000, group));
                    add(stream, call(second, CollectiveKind::AllGather, 300, group));
                }
                Act::Ring { stream, count } => {
                    let message = |is_send: bool, peer: u32| OpKind::PointToPoint {
                        slot: SlotId(0),
                        is_send,
                        dtype: DataType::Float32,
                        peer: peer % self.columns,
                        count,
                        group,
                    };
                    add(stream, message(true, position + 1));
                    add(stream, message(false, position + self.columns - 1));
                }
                Act::Order { from, to } => {
                    add(from, OpKind::EventRecord { event: EventId(0) });
                    add(to, OpKind::EventWait { event: EventId(0) });
                }
                Act::Sync => add(0, OpKind::DeviceSync),
                Act::IterationEnd => add(0, OpKind::IterationEnd),
            }
        }
        add(0, call(0, CollectiveKind::AllReduce, 100, 0));
        ops
    }
}

fn every_rank(world_size: u32, percent: u32) -> BTreeMap<Rank, f64> {
    let factor = |rank: u32| 1.0 + f64::from(rank.wrapping_mul(7919) % (percent + 1)) / 100.0;
    (0..world_size).map(|rank| (Rank(rank), factor(rank))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn grids_end_alike_together_and_alone(grid in grid()) {
        let outcome = checked(&grid.graph(), &grid.slow)?;
        if grid.missing.is_none() {
            prop_assert!(outcome.is_ok(), "{outcome:?}");
        } else if grid.columns > 1 {
            prop_assert!(matches!(outcome, Err(SimError::Deadlock { .. })), "{outcome:?}");
        }
    }

    #[test]
    fn transformer_steps_end_alike_together_and_alone(
        dp in 1..6u32, tp in 1..10u32, pp in 1..4u32, ep in 1..3u32, layers in 1..3u32, percent in 1..60u32,
        bytes in prop::sample::select(vec![1000u64, 1 << 20, 1 << 28]),
    ) {
        let (tensor_bytes, activation_bytes) = (bytes, bytes);
        let step = TransformerStep {
            dp: dp * ep, tp, pp, ep, layers, microbatches: 2, tensor_bytes, activation_bytes, ..TransformerStep::default()
        };
        let graph = Arc::new(step.graph().expect("valid"));
        prop_assert!(checked(&graph, &every_rank(graph.world_size(), percent))?.is_ok());
    }

    #[test]
    fn jobs_of_one_program_end_alike_together_and_alone(job in job_of(1..4, 1..20)) {
        prop_assert!(checked(&job.graph_with_waits(), &job.slow)?.is_ok());
    }
}

#[test]
fn roles_that_split_divide_their_batches() {
    for (stages, width) in [(2, 4), (5, 3), (7, 20)] {
        let graph = super::synthetic::chain(stages, width, 3);
        let slow = every_rank(graph.world_size(), 37);
        let outcome = checked(&graph, &slow).expect("alike").expect("no deadlock");
        assert!(outcome.roles > 1, "{} roles", outcome.roles);
    }
}
