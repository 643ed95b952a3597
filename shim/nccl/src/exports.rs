//! The C side of groups and communication calls.
//!
//! Buffers are carried as addresses: whether they may be touched is decided in `ops.rs`.

#![allow(clippy::too_many_arguments, reason = "NCCL's argument lists are what they are")]

use crate::Handle;
use crate::abi::Code;
use crate::abi::{CollConfig, SIM_MAGIC, SimInfo};
use crate::group;
use crate::guard::{Failure, Outcome};
use crate::ops::{Call, What, enqueue};
use core::ffi::{c_int, c_void};
use prism_wire::message::CollectiveKind;

const SUM: c_int = 0;

#[allow(clippy::unnecessary_wraps, reason = "the call table wants an outcome")]
pub(crate) fn group_start() -> Outcome {
    group::start();
    Ok(())
}

pub(crate) fn group_end() -> Outcome {
    group::end()
}

/// # Safety
/// `info` is null or points to an `ncclSimInfo_t` of the size it says.
pub(crate) unsafe fn group_simulate_end(info: *mut SimInfo) -> Outcome {
    if info.is_null() {
        return group_end();
    }
    let estimate = group::simulate_end(|| {
        // SAFETY: promised by the caller; a struct too short for the magic is not one of NCCL's.
        let has_magic = unsafe { (*info).size >= 12 && (*info).magic == SIM_MAGIC };
        if has_magic {
            return Ok(());
        }
        Err(Failure::new(Code::InvalidArgument, "ncclSimInfo_t was not made by NCCL_SIM_INFO_INITIALIZER"))
    })?;
    if let Some(ns) = estimate {
        // SAFETY: promised by the caller; with the magic comes the whole struct.
        unsafe { (*info).estimated_time = ns as f32 / 1_000.0 };
    }
    Ok(())
}

/// Addresses of the caller's two buffers. Exposed, because payloads are copied later through the address alone.
fn buffers(send: *const c_void, recv: *mut c_void) -> (usize, usize) {
    (send.expose_provenance(), recv.expose_provenance())
}

macro_rules! collectives {
    ($($name:ident, $with_config:ident, $c_name:literal: $kind:ident ($($op:ident)?) ($($root:ident)?);)*) => {$(
        #[inline]
        pub(crate) fn $name(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, $($op: c_int,)? $($root: c_int,)?
            comm: Handle, stream: Handle,
        ) -> Outcome {
            let (send, recv) = buffers(send, recv);
            #[allow(unused_mut, unused_assignments)]
            let (mut operator, mut root_rank) = (SUM, 0);
            $(operator = $op;)?
            $(root_rank = $root;)?
            let what = What::Collective(CollectiveKind::$kind);
            enqueue(&Call {
                what, name: stringify!($kind), send, recv, count, dtype, op: operator, root: root_rank, comm, stream,
            })
        }

        /// # Safety
        /// `config` is null or points to an `ncclCollConfig_t` of the size it says.
        pub(crate) unsafe fn $with_config(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, $($op: c_int,)? $($root: c_int,)?
            comm: Handle, stream: Handle, config: *const CollConfig,
        ) -> Outcome {
            // SAFETY: promised by the caller.
            if let Some(config) = unsafe { config.as_ref() } {
                if let Err(failure) = config.check($c_name) {
                    group::note_error(failure.code);
                    return Err(failure);
                }
            }
            $name(send, recv, count, dtype, $($op,)? $($root,)? comm, stream)
        }
    )*};
}

collectives! {
    all_reduce, all_reduce_config, "ncclAllReduceConfig": AllReduce (op) ();
    all_gather, all_gather_config, "ncclAllGatherConfig": AllGather () ();
    reduce_scatter, reduce_scatter_config, "ncclReduceScatterConfig": ReduceScatter (op) ();
    broadcast, broadcast_config, "ncclBroadcastConfig": Broadcast () (root);
    reduce, reduce_config, "ncclReduceConfig": Reduce (op) (root);
    all_to_all, all_to_all_config, "ncclAlltoAllConfig": AllToAll () ();
    gather, gather_config, "ncclGatherConfig": Gather () (root);
    scatter, scatter_config, "ncclScatterConfig": Scatter () (root);
}

pub(crate) fn bcast(
    buffer: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Handle,
    stream: Handle,
) -> Outcome {
    broadcast(buffer, buffer, count, dtype, root, comm, stream)
}

fn message(
    what: What,
    name: &'static str,
    buffer: usize,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Handle,
) -> Outcome {
    enqueue(&Call { what, name, send: 0, recv: buffer, count, dtype, op: SUM, root: peer, comm, stream })
}

pub(crate) fn send(
    buffer: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Handle,
) -> Outcome {
    message(What::Send, "Send", buffer.expose_provenance(), count, dtype, peer, comm, stream)
}

pub(crate) fn recv(
    buffer: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Handle,
) -> Outcome {
    message(What::Recv, "Recv", buffer.expose_provenance(), count, dtype, peer, comm, stream)
}
