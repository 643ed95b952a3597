//! Training programs, small but with everything a session has to deal with.

use super::player::{Comm, Played, Player};
use super::stage::{Program, program};
use prism_wire::message::CollectiveKind;

const ITERATIONS: u32 = 3;
const COMPUTE: u32 = 0;
const COMMUNICATE: u32 = 1;

/// Peaks a rank reports.
pub(crate) fn peaks(rank: u32) -> (u64, u64) {
    (1_000_000 + u64::from(rank), 2_000_000 + u64::from(rank))
}

/// The end of an iteration: the loss goes to the host.
fn end_iteration(player: &mut Player) -> Played {
    player.kernel(COMPUTE, "optimizer", 500)?;
    player.copy(COMPUTE, 4, 2)?;
    player.sync_stream(COMPUTE)?;
    let (allocated, reserved) = peaks(player.rank);
    player.memory_stats(allocated, reserved)?;
    player.iteration_end()
}

/// Runs `call` on the communication stream between what was and what will be computed.
fn beside(player: &mut Player, event: u32, call: impl FnOnce(&mut Player) -> Played) -> Played {
    player.record_event(COMPUTE, event)?;
    player.wait_event(COMMUNICATE, event)?;
    call(player)?;
    player.record_event(COMMUNICATE, event + 1)
}

/// Data parallel over the world: buckets are reduced while the backward pass goes on.
pub(crate) fn ddp(iterations: u32) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.alloc(1 << 30)?;
        player.collective(COMMUNICATE, world, CollectiveKind::Broadcast, 1 << 20)?;
        player.sync_device()?;
        player.training_begin()?;
        for iteration in 0..iterations {
            player.copy(COMPUTE, 1 << 20, 1)?;
            for layer in 0..3u32 {
                player.gemm(COMPUTE, "forward", 1024 << (layer % 2))?;
            }
            for layer in 0..3u32 {
                player.gemm(COMPUTE, "backward", 2048)?;
                let event = (iteration * 3 + layer) * 2;
                beside(player, event, |player| player.all_reduce(COMMUNICATE, world, 1 << (18 + layer)))?;
            }
            player.wait_event(COMPUTE, iteration * 6 + 5)?;
            end_iteration(player)?;
        }
        player.free(1 << 30)?;
        player.alloc(1 << 20)
    })
}

/// Gradients are reduced in every iteration, and the loss is gathered after it; a barrier at the end.
pub(crate) fn gathering(iterations: u32) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        player.training_begin()?;
        for _ in 0..iterations {
            player.gemm(COMPUTE, "forward", 4096)?;
            player.all_reduce(COMPUTE, world, 1 << 18)?;
            end_iteration(player)?;
            player.collective(COMPUTE, world, CollectiveKind::AllGather, 1)?;
        }
        player.all_reduce(COMPUTE, world, 1)
    })
}

/// Two stages of `world / 2` data parallel ranks each; activations and gradients go through pair communicators.
pub(crate) fn pipeline() -> Program {
    program(|player| {
        let width = player.world / 2;
        player.group("", 0..player.world)?;
        for stage in 0..2 {
            player.group(&format!("stage{stage}"), stage * width..(stage + 1) * width)?;
        }
        for lane in 0..width {
            player.group(&format!("lane{lane}"), [lane, lane + width])?;
        }
        let (stage, lane) = (player.rank / width, format!("lane{}", player.rank % width));
        let replicas = player.comm(&format!("stage{stage}"))?;
        let pair = player.pair(&lane, 1 - stage)?;
        player.training_begin()?;
        for _ in 0..ITERATIONS {
            (0..4).try_for_each(|micro| micro_batch(player, pair, stage, micro))?;
            player.all_reduce(COMMUNICATE, replicas, 1 << 20)?;
            player.record_event(COMMUNICATE, 1)?;
            player.wait_event(COMPUTE, 1)?;
            end_iteration(player)?;
        }
        Ok(())
    })
}

fn micro_batch(player: &mut Player, pair: Comm, stage: u32, micro: u32) -> Played {
    let exchange = |player: &mut Player, is_send: bool| player.message(COMPUTE, pair, is_send, 1 - stage, 1 << 18);
    if stage == 0 {
        player.gemm(COMPUTE, "forward", 2048)?;
        exchange(player, true)?;
        exchange(player, false)?;
        return player.gemm(COMPUTE, "backward", 2048);
    }
    exchange(player, false)?;
    player.gemm(COMPUTE, "forward", 1024)?;
    player.gemm(COMPUTE, "backward", 1024)?;
    // A fused launch of one half is still a launch.
    if micro == 0 {
        player.group_start();
        exchange(player, true)?;
        return player.group_end();
    }
    exchange(player, true)
}

/// Sharded over rows of `shard` ranks, replicated over columns; no communication over the world.
pub(crate) fn hsdp(shard: u32) -> Program {
    program(move |player| {
        player.group("", 0..player.world)?;
        let (row, column) = (player.rank / shard, player.rank % shard);
        for other in 0..shard {
            player.group(&format!("replicas{other}"), (other..player.world).step_by(shard as usize))?;
        }
        for other in 0..player.world / shard {
            player.group(&format!("shards{other}"), other * shard..(other + 1) * shard)?;
        }
        let shards = player.comm(&format!("shards{row}"))?;
        let replicas = player.comm(&format!("replicas{column}"))?;
        player.training_begin()?;
        for _ in 0..ITERATIONS {
            for _ in 0..2 {
                player.collective(COMMUNICATE, shards, CollectiveKind::AllGather, 1 << 18)?;
                player.record_event(COMMUNICATE, 1)?;
                player.wait_event(COMPUTE, 1)?;
                player.gemm(COMPUTE, "forward", 4096)?;
                player.gemm(COMPUTE, "backward", 4096)?;
                beside(player, 2, |player| {
                    player.collective(COMMUNICATE, shards, CollectiveKind::ReduceScatter, 1 << 18)?;
                    player.all_reduce(COMMUNICATE, replicas, 1 << 18)
                })?;
            }
            player.wait_event(COMPUTE, 3)?;
            player.idle(20_000);
            end_iteration(player)?;
        }
        Ok(())
    })
}
