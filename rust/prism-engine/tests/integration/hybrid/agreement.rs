//! A job has one answer, whoever of its ranks runs: collected from a few ranks, replayed, run in part, run by all.

use super::programs::{ddp, gathering, hsdp, peaks, pipeline};
use super::stage::{
    Program, Stage, collect, collect_all, live_ranks, profile, record, replayed, replayed_ranks, succeed,
};
use prism_engine::graph::Graph;
use prism_engine::hybrid::{SessionMode, Summary};
use prism_engine::ids::Rank;
use prism_engine::prune::materialised;
use std::collections::BTreeSet;
use std::sync::Arc;

fn emulated(graph: &Arc<Graph>, live: &[u32], slow: &[(u32, f64)], program: &Program) -> Summary {
    succeed(Stage::new(SessionMode::Emulate, graph.world_size(), live, Some(graph), slow).run(program))
}

/// The job and each live rank take exactly as long as in the replay. Returns the times of the job.
fn assert_agrees(graph: &Arc<Graph>, live: &[u32], slow: &[(u32, f64)], program: &Program) -> Vec<i64> {
    let summary = emulated(graph, live, slow, program);
    let ranks = replayed_ranks(graph, slow);
    assert_eq!(summary.iteration_time_ns, replayed(graph, slow).iteration_time_ns, "live {live:?}");
    let expected: Vec<_> = live.iter().map(|rank| (*rank, ranks[*rank as usize].clone())).collect();
    assert_eq!(live_ranks(&summary), expected);
    assert!(summary.iteration_time_ns.iter().all(|time| *time > 100_000), "{:?}", summary.iteration_time_ns);
    summary.iteration_time_ns
}

#[test]
fn a_data_parallel_job_takes_as_long_with_two_real_ranks_as_replayed() {
    let graph = collect(64, &[0, 5], |rank| u32::from(rank > 0), &ddp(3));
    assert_eq!((graph.num_templates(), graph.num_comms()), (1, 1));
    assert_eq!(assert_agrees(&graph, &[0, 5], &[], &ddp(3)).len(), 3);
}

#[test]
fn a_pipeline_takes_as_long_with_two_real_ranks_as_replayed() {
    for world in [8, 32] {
        let width = world / 2;
        let graph = collect(world, &[0, width], |rank| rank / width, &pipeline());
        assert_eq!((graph.num_templates(), graph.num_comms() as u32), (2, 2 + width));
        assert_agrees(&graph, &[0, 5], &[], &pipeline());
        assert_agrees(&graph, &[width - 1, 2 * width - 1], &[], &pipeline());
    }
}

#[test]
fn a_two_dimensional_mesh_takes_as_long_with_two_real_ranks_as_replayed() {
    let graph = collect(32, &[0, 31], |rank| u32::from(rank == 31), &hsdp(8));
    assert_eq!((graph.num_templates(), graph.num_comms()), (1, 8 + 4));
    assert_agrees(&graph, &[0, 5], &[], &hsdp(8));
}

#[test]
fn a_job_of_real_ranks_only_is_the_same_job() {
    for (program, representatives, role) in [
        (ddp(3), vec![0], (|_| 0) as fn(u32) -> u32),
        (pipeline(), vec![0, 2], |rank| rank / 2),
        (hsdp(2), vec![0], |_| 0),
    ] {
        let graph = collect(4, &representatives, role, &program);
        assert_eq!(*graph, *collect_all(4, &program));
        let real = emulated(&graph, &[0, 1, 2, 3], &[], &program);
        for live in [vec![0], vec![3], vec![0, 2], vec![1, 2, 3]] {
            let partly = emulated(&graph, &live, &[], &program);
            assert_eq!(partly.iteration_time_ns, real.iteration_time_ns);
            let of_all = live_ranks(&real).into_iter().filter(|(rank, _)| live.contains(rank)).collect::<Vec<_>>();
            assert_eq!(live_ranks(&partly), of_all);
        }
    }
}

#[test]
fn a_recording_is_the_same_whoever_is_recorded_beside_it() {
    let alone = record(8, &[5], &pipeline());
    let together = record(8, &[0, 1, 4, 5], &pipeline());
    assert_eq!(alone[0], together[3]);
    assert_eq!(alone[0].digest(), together[2].digest());
    assert_ne!(alone[0].digest(), together[0].digest());
}

#[test]
fn more_iterations_than_recorded_take_as_long_as_if_they_were() {
    let graph = collect(8, &[0], |_| 0, &ddp(2));
    let summary = emulated(&graph, &[0, 5], &[], &ddp(6));
    let longer = collect(8, &[0], |_| 0, &ddp(6));
    assert_eq!(summary.iteration_time_ns, replayed(&longer, &[]).iteration_time_ns);
}

/// The loss is gathered after every iteration, the last one included: the same op begins a body and the epilogue.
#[test]
fn an_op_after_every_iteration_does_not_begin_one_more() {
    let graph = collect(8, &[0], |_| 0, &gathering(3));
    assert_agrees(&graph, &[0, 5], &[], &gathering(3));
}

#[test]
fn peaks_and_uses_are_passed_through() {
    let graph = collect(8, &[0], |_| 0, &ddp(3));
    let summary = emulated(&graph, &[0, 5], &[], &ddp(3));
    for rank in &summary.ranks {
        assert_eq!((rank.peak_allocated_bytes, rank.peak_reserved_bytes), peaks(rank.rank));
        assert_eq!((rank.peak_device_bytes, rank.iterations), (1 << 30, 3));
        let comm = &rank.communicators[0];
        let elements = (1 << 20) + 3 * ((1 << 18) + (1 << 19) + (1 << 20));
        assert_eq!((comm.size, comm.calls, comm.bytes), (8, 1 + 9, 2 * elements));
        assert!(rank.nccl_buffer_bytes > 0);
    }
    assert_eq!(summary.ops, graph.num_ops());
    assert!(summary.ops_evaluated > 0 && summary.ranks_materialised > 2);
}

#[test]
fn a_straggler_beyond_the_neighbours_delays_the_sandbox_as_replayed() {
    let graph = collect(16, &[0], |_| 0, &hsdp(4));
    let level = assert_agrees(&graph, &[0], &[], &hsdp(4));
    assert!(!materialised(&graph, &BTreeSet::from([Rank(0)]), &profile()).contains(&Rank(15)));
    let slowed = assert_agrees(&graph, &[0], &[(15, 2.0)], &hsdp(4));
    assert!(slowed[2] > level[2], "{slowed:?} {level:?}");
    let own = |slow: &[(u32, f64)]| emulated(&graph, &[0], slow, &hsdp(4)).ranks[0].iteration_time_ns[2];
    assert!(own(&[(15, 2.0)]) > own(&[]));
}

#[test]
fn a_slow_sandbox_rank_delays_the_job_as_replayed() {
    let graph = collect(16, &[0, 8], |rank| rank / 8, &pipeline());
    let level = assert_agrees(&graph, &[0, 5], &[], &pipeline());
    let slowed = assert_agrees(&graph, &[0, 5], &[(5, 1.7)], &pipeline());
    assert!(slowed.iter().zip(&level).all(|(slowed, level)| slowed > level), "{slowed:?} {level:?}");
    assert_agrees(&graph, &[0, 5, 13], &[(5, 1.7), (9, 0.5), (13, 3.0)], &pipeline());
}
