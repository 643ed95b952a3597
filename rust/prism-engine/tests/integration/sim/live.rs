//! Live ranks: a rank that pushes its own recorded ops is told, and leaves everybody else, exactly what a replay says.

use super::jobs::{Job, Step, call, compute, job, profile};
use super::laws::{replayed, times};
use prism_engine::graph::op::{CollectiveKind, Op, OpKind};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId};
use prism_engine::sim::{Answer, Peers, Question, SimError, SimOptions, Simulation};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

fn simulation(graph: &Arc<Graph>, live: &[u32], slow: BTreeMap<Rank, f64>) -> Simulation {
    let live = live.iter().copied().map(Rank).collect();
    let options = SimOptions { live, slow, ..SimOptions::new(profile()) };
    Simulation::new(Peers::Graph(Arc::clone(graph)), graph.world_size(), options).expect("valid")
}

/// A live rank makes all communicators of its recorded program.
fn make_comms(simulation: &mut Simulation, graph: &Graph, rank: u32) {
    for (slot, comm) in graph.rank_slots(Rank(rank)).iter().enumerate() {
        let made = simulation.live_comm(Rank(rank), graph.comm_members(CommId(*comm))).expect("in the graph");
        assert_eq!(made, SlotId(slot as u32));
    }
}

/// A program as the rank itself would issue it: compute ops with the durations this rank has.
fn own_ops(graph: &Graph, rank: u32) -> Vec<Op> {
    let mut ops: Vec<Op> = graph.template(graph.rank_template(Rank(rank))).iter().collect();
    for (op, own) in graph.rank_overrides(Rank(rank)) {
        if let OpKind::Compute { duration, .. } = &mut ops[op as usize].kind {
            *duration = own;
        }
    }
    ops
}

/// Feeds the live ranks in an order drawn from `order`, running now and then, until all have ended.
pub(crate) fn feed(simulation: &mut Simulation, graph: &Graph, live: &[u32], order: &[u8]) -> Result<(), SimError> {
    for rank in live {
        make_comms(simulation, graph, *rank);
    }
    let mut left: Vec<(u32, std::vec::IntoIter<Op>)> =
        live.iter().map(|rank| (*rank, own_ops(graph, *rank).into_iter())).collect();
    let mut draws = order.iter().cycle();
    while !left.is_empty() {
        let draw = *draws.next().expect("endless") as usize;
        let at = draw % left.len();
        let (rank, ops) = &mut left[at];
        if let Some(op) = ops.next() {
            simulation.push(Rank(*rank), op)?;
        } else {
            simulation.end_live(Rank(*rank));
            left.remove(at);
        }
        if draw.is_multiple_of(5) {
            simulation.run()?;
        }
    }
    simulation.run()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_live_rank_changes_nothing_if_it_does_what_was_recorded(
        mut job in job(), chosen in prop::collection::btree_set(0..12u32, 1..4), order in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let live: Vec<u32> = chosen.into_iter().map(|rank| rank % job.world_size()).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
        // What follows the last iteration may look like another one.
        if let Some(last) = job.steps.iter().rposition(|step| matches!(step, Step::IterationEnd { .. })) {
            job.steps.truncate(last + 1);
        }
        let graph = job.graph();
        let mut simulation = simulation(&graph, &live, job.slow.clone());
        feed(&mut simulation, &graph, &live, &order).expect("no deadlock");
        prop_assert_eq!(simulation.blocked(), vec![]);
        prop_assert_eq!(times(&simulation.report()), times(&replayed(&job)));
    }
}

#[test]
fn a_live_rank_in_the_middle_of_a_pipeline_splits_its_former_role() {
    let graph = super::synthetic::chain(6, 3, 4);
    for live in [vec![4], vec![3, 10], vec![0, 17], (0..18).collect()] {
        let mut simulation = simulation(&graph, &live, BTreeMap::new());
        feed(&mut simulation, &graph, &live, &[5, 1, 0, 10, 3, 25]).expect("no deadlock");
        assert_eq!(times(&simulation.report()), times(&replay(&graph)));
    }
}

fn op(gap_ns: i64, stream: u32, kind: OpKind) -> Op {
    Op { host_gap: SimTime::from_ns(gap_ns), stream: StreamId(stream), kind }
}

fn us(us: i64) -> SimTime {
    SimTime::from_ns(us * 1000)
}

/// Four ranks: `before`, then iterations of compute and an all-reduce, then `after`.
fn loop_job(iterations: usize, epilogue: bool) -> (Arc<Graph>, Vec<Op>) {
    let mut builder = GraphBuilder::new(4);
    builder.intern_name("work");
    let world = builder.add_comm((0..4).map(Rank).collect());
    let ops = loop_program(iterations, epilogue);
    let template = builder.add_template("loop", &ops).expect("valid");
    (0..4).for_each(|rank| builder.set_rank(Rank(rank), template, vec![world]));
    (Arc::new(builder.finish().expect("valid")), ops)
}

fn loop_program(iterations: usize, epilogue: bool) -> Vec<Op> {
    let mut ops = vec![op(10, 0, call(0, CollectiveKind::Broadcast, 8, 0)), op(0, 0, OpKind::TrainingBegin)];
    for _ in 0..iterations {
        ops.push(op(100, 0, compute(us(50))));
        ops.push(op(100, 0, call(0, CollectiveKind::AllReduce, 1 << 20, 0)));
        ops.push(op(0, 0, OpKind::StreamSync));
        ops.push(op(0, 0, OpKind::IterationEnd));
    }
    if epilogue {
        ops.push(op(10, 0, call(0, CollectiveKind::AllReduce, 1, 0)));
    }
    ops
}

fn live_loop(graph: &Arc<Graph>, ops: &[Op]) -> Simulation {
    let mut simulation = simulation(graph, &[1], BTreeMap::new());
    make_comms(&mut simulation, graph, 1);
    for op in ops {
        simulation.push(Rank(1), *op).expect("valid");
        simulation.run().expect("fits");
    }
    simulation.end_live(Rank(1));
    simulation.run().expect("fits");
    simulation
}

#[test]
fn virtual_ranks_repeat_their_last_iteration_while_the_live_rank_iterates() {
    for epilogue in [false, true] {
        let (graph, _) = loop_job(2, epilogue);
        let simulation = live_loop(&graph, &loop_program(7, epilogue));
        let (longer, _) = loop_job(7, epilogue);
        let expected = super::laws::times(&replay(&longer));
        assert_eq!(simulation.blocked(), vec![]);
        assert_eq!(times(&simulation.report()), expected);
    }
}

#[test]
fn virtual_ranks_stop_with_the_live_rank() {
    let (graph, _) = loop_job(5, true);
    let simulation = live_loop(&graph, &loop_program(2, true));
    let (shorter, _) = loop_job(2, true);
    assert_eq!(simulation.blocked(), vec![]);
    assert_eq!(times(&simulation.report()), times(&replay(&shorter)));
}

fn replay(graph: &Arc<Graph>) -> prism_engine::sim::SimReport {
    prism_engine::replay::replay_ranks(graph, &prism_engine::replay::ReplayOptions::new(profile()))
        .expect("no deadlock")
}

#[test]
fn a_body_without_communication_repeats_with_the_markers() {
    let program = |iterations: usize| {
        let mut ops = vec![op(0, 0, OpKind::TrainingBegin)];
        for _ in 0..iterations {
            ops.extend([op(5, 0, compute(us(50))), op(0, 0, OpKind::IterationEnd)]);
        }
        ops.push(op(0, 0, call(0, CollectiveKind::AllReduce, 4, 0)));
        ops
    };
    let job = |iterations: usize| {
        let mut builder = GraphBuilder::new(2);
        builder.intern_name("work");
        let world = builder.add_comm(vec![Rank(0), Rank(1)]);
        let template = builder.add_template("loop", &program(iterations)).expect("valid");
        (0..2).for_each(|rank| builder.set_rank(Rank(rank), template, vec![world]));
        Arc::new(builder.finish().expect("valid"))
    };
    let simulation = live_loop(&job(1), &program(4));
    assert_eq!(times(&simulation.report()), times(&replay(&job(4))));
}

#[test]
fn virtual_ranks_wait_at_the_gate() {
    let (graph, ops) = loop_job(3, false);
    let mut simulation = simulation(&graph, &[1], BTreeMap::new());
    make_comms(&mut simulation, &graph, 1);
    simulation.push(Rank(1), ops[0]).expect("valid");
    simulation.run().expect("fits");
    let virtual_rank = &simulation.report().ranks[0];
    assert_eq!((virtual_rank.iteration_ends.len(), virtual_rank.training_begin.is_some()), (0, true));
    // The virtual ranks have not come to the all-reduce of iteration 0.
    assert_eq!(simulation.blocked(), vec![]);
    simulation.push(Rank(1), ops[1]).expect("valid");
    simulation.run().expect("fits");
    assert_eq!(simulation.blocked()[0].missing, vec![Rank(1)]);
}

#[test]
fn questions_are_answered_from_the_device_clock() {
    let (graph, ops) = loop_job(1, false);
    let mut simulation = simulation(&graph, &[1], BTreeMap::new());
    make_comms(&mut simulation, &graph, 1);
    let record = |event: u32| op(0, 0, OpKind::EventRecord { event: EventId(event) });
    let push = |simulation: &mut Simulation, op: Op| simulation.push(Rank(1), op).expect("valid");
    push(&mut simulation, ops[0]);
    push(&mut simulation, ops[1]);
    push(&mut simulation, record(3));
    push(&mut simulation, ops[2]);
    push(&mut simulation, record(4));
    simulation.ask(Rank(1), Question::Elapsed { from: EventId(3), to: EventId(4) }, 1);
    simulation.ask(Rank(1), Question::StreamDone { stream: StreamId(0), at: us(1) }, 2);
    simulation.ask(Rank(1), Question::StreamDone { stream: StreamId(0), at: SimTime::MAX }, 3);
    simulation.ask(Rank(1), Question::EventDone { event: EventId(4), at: us(1) }, 4);
    simulation.ask(Rank(1), Question::EventDone { event: EventId(9), at: us(1) }, 5);
    assert_eq!(simulation.take_answers(), vec![(Rank(1), 5, Answer::Done(true))]);
    simulation.run().expect("fits");
    let done = |ticket, is_done| (Rank(1), ticket, Answer::Done(is_done));
    let answers = simulation.take_answers();
    assert!(matches!(answers[0], (Rank(1), 1, Answer::Elapsed(time)) if time >= us(50)), "{answers:?}");
    assert_eq!(answers[1..], [done(2, false), done(3, true), done(4, false)]);
    let known = simulation.peek_event(Rank(1), EventId(4)).expect("evaluated");
    push(&mut simulation, op(0, 0, OpKind::EventSync { event: EventId(4) }));
    simulation.ask(Rank(1), Question::Resume, 6);
    simulation.run().expect("fits");
    assert_eq!(simulation.take_answers(), vec![(Rank(1), 6, Answer::Resume(known))]);
}

#[test]
fn a_question_nobody_can_answer_yet_is_settled_with_no() {
    let (graph, ops) = loop_job(1, false);
    // Rank 2 is live too and does not come.
    let mut simulation = simulation(&graph, &[1, 2], BTreeMap::new());
    make_comms(&mut simulation, &graph, 1);
    simulation.push(Rank(1), ops[0]).expect("valid");
    simulation.ask(Rank(1), Question::StreamDone { stream: StreamId(0), at: SimTime::MAX }, 7);
    simulation.run().expect("fits");
    assert_eq!(simulation.take_answers(), vec![]);
    simulation.settle_questions(|_, _| true);
    assert_eq!(simulation.take_answers(), vec![(Rank(1), 7, Answer::Done(false))]);
    assert_eq!(simulation.blocked()[0].missing, vec![Rank(2)]);
}

#[test]
fn time_of_an_event_never_recorded_is_an_error() {
    let (graph, _) = loop_job(1, false);
    let mut simulation = simulation(&graph, &[1], BTreeMap::new());
    simulation.ask(Rank(1), Question::Elapsed { from: EventId(3), to: EventId(4) }, 1);
    assert_eq!(simulation.run(), Err(SimError::NeverRecorded { rank: Rank(1), event: EventId(3) }));
}

#[test]
fn communicators_are_found_by_members_and_number() {
    let (graph, _) = loop_job(1, false);
    let mut simulation = simulation(&graph, &[1], BTreeMap::new());
    let all = [0, 1, 2, 3];
    assert_eq!(simulation.live_comm(Rank(1), &all), Ok(SlotId(0)));
    let second = SimError::UnknownCommunicator { rank: Rank(1), members: all.to_vec(), instance: 1 };
    assert_eq!(simulation.live_comm(Rank(1), &all), Err(second));
    let other = SimError::UnknownCommunicator { rank: Rank(1), members: vec![1, 3], instance: 0 };
    assert_eq!(simulation.live_comm(Rank(1), &[1, 3]), Err(other.clone()));
    assert!(other.to_string().contains("ranks 1,3"), "{other}");
}

#[test]
fn absent_peers_arrive_when_the_running_rank_does() {
    let job = Job {
        roles: 1,
        width: 4,
        steps: vec![
            Step::Call { slot: 0, kind: CollectiveKind::AllReduce, count: 1 << 20, stream: 0 },
            Step::Ring { count: 1 << 20, streams: (1, 2) },
            Step::IterationEnd { stream: 0 },
            Step::IterationEnd { stream: 2 },
        ],
        slow: BTreeMap::new(),
        overrides: vec![],
        is_scalar: false,
    };
    let graph = job.graph();
    let options = SimOptions { live: vec![Rank(2)], ..SimOptions::new(profile()) };
    let mut simulation = Simulation::new(Peers::Absent, 4, options).expect("valid");
    feed(&mut simulation, &graph, &[2], &[1]).expect("nobody to wait for");
    let alone = simulation.report();
    assert_eq!(alone.ranks.len(), 1);
    // All four ranks do the same at the same time, so being alone makes no difference.
    assert_eq!(times(&alone)[0], times(&replayed(&job))[2]);
    assert_eq!(alone.ranks[0].comms[0].bytes, 4 << 20);
}
