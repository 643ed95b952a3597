//! The same bytes, however the threads of a session run against each other.

use super::player::Played;
use super::programs::{ddp, hsdp, pipeline};
use super::stage::{Program, Stage, collect, program};
use prism_engine::graph::Graph;
use std::sync::Arc;

const REPETITIONS: u64 = 6;

/// The summary as text, of a run with pauses drawn from `seed`.
fn summary(graph: &Arc<Graph>, live: &[u32], program: &Program, seed: u64) -> String {
    let mut stage = Stage::emulate(graph, live);
    stage.seed = Some(seed);
    let (summary, _) = stage.run(program);
    serde_json::to_string(&summary).expect("text keys")
}

fn assert_deterministic(graph: &Arc<Graph>, live: &[u32], program: &Program) {
    let first = summary(graph, live, program, 1);
    for seed in 2..=REPETITIONS {
        assert_eq!(summary(graph, live, program, seed), first, "seed {seed}");
    }
}

#[test]
fn four_real_ranks_of_a_data_parallel_job_give_the_same_bytes_every_time() {
    assert_deterministic(&collect(16, &[0], |_| 0, &ddp(3)), &[0, 3, 8, 15], &ddp(3));
}

#[test]
fn four_real_ranks_of_a_pipeline_give_the_same_bytes_every_time() {
    assert_deterministic(&collect(8, &[0, 4], |rank| rank / 4, &pipeline()), &[0, 1, 4, 6], &pipeline());
}

#[test]
fn four_real_ranks_of_a_mesh_give_the_same_bytes_every_time() {
    assert_deterministic(&collect(16, &[0], |_| 0, &hsdp(4)), &[0, 5, 6, 15], &hsdp(4));
}

/// Asks again and again whether the reduction is complete, each rank at its own pace.
fn polling() -> Program {
    program(|player| -> Played {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.training_begin()?;
        for _ in 0..2 {
            player.gemm(0, "work", 1024)?;
            player.idle(30_000 * i64::from(player.rank % 4));
            player.all_reduce(0, world, 1 << 20)?;
            player.record_event(0, 1)?;
            let mut polls = 0;
            while !player.is_done(1)? {
                player.idle(7_000);
                polls += 1;
            }
            assert!(polls > 0);
            player.kernel(0, "after", 100)?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

#[test]
fn programs_that_poll_see_the_same_every_time() {
    assert_deterministic(&collect(8, &[0], |_| 0, &polling()), &[0, 1, 2, 7], &polling());
}

/// The rank 2 leaves in its second iteration.
fn leaving() -> Program {
    program(|player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        for iteration in 0..3 {
            player.gemm(0, "work", 1024)?;
            if player.rank == 2 && iteration == 1 {
                return Ok(());
            }
            player.all_reduce(0, world, 1 << 20)?;
            player.sync_stream(0)?;
            player.iteration_end()?;
        }
        Ok(())
    })
}

#[test]
fn a_run_that_fails_fails_the_same_way_every_time() {
    // The representative must not be the one that leaves.
    let graph = collect(8, &[0], |_| 0, &leaving());
    assert!(summary(&graph, &[0, 1, 2, 7], &leaving(), 1).contains("ended without the call: 2"));
    assert_deterministic(&graph, &[0, 1, 2, 7], &leaving());
}
