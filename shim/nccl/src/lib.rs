//! `libprism_nccl.so`: stands in for `libnccl.so.2`.
//!
//! Every function of NCCL up to 2.32 is exported, so any client binds; the tables below are the complete list. Calls are
//! turned into [`prism_wire::message::Record`]s of the process's session; nothing is communicated. Without a session the
//! library answers as NCCL does on a machine without a GPU.
//!
//! # Payloads: tier T1, "mirror"
//! No peer is running, so what a collective returns is not real: every peer is taken to contribute exactly what this rank
//! contributes (see `values.rs`), for payloads of at most 1 MiB; larger ones and receives leave the buffer as it is.
//!
//! # Files
//! `exports*.rs` read the C arguments; `ops.rs` is what a call does, in safe code; `comm.rs`, `group.rs` and `session.rs`
//! hold the communicators, the group of the thread and the connection; `guard.rs` keeps panics out of C.

// NCCL's own names, as C callers spell them.
#![allow(non_snake_case)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod abi;
mod comm;
mod config;
mod exports;
mod exports_init;
mod exports_rest;
mod floats;
mod group;
mod guard;
mod host;
mod notes;
mod ops;
mod session;
mod values;

use abi::{CollConfig, RawUniqueId, SimInfo, Team};
use core::ffi::{c_char, c_int, c_void};

/// An opaque handle of the caller (`ncclComm_t`, `cudaStream_t`, `ncclWindow_t`).
type Handle = *mut c_void;

/// One line per function: name, C arguments, C result, and what is called. Makes `name` and its twin `pname`.
macro_rules! calls {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $body:path;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "some bodies need no promise of the caller")]
            unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: the caller keeps NCCL's contract for the arguments of this function.
                guard::call(|| unsafe { $body($($arg),*) })
            }
        )*
        mod twins {
            use super::*;
            $(
                #[unsafe(export_name = concat!("p", stringify!($name)))]
                unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                    // SAFETY: as for the function itself.
                    unsafe { super::$name($($arg),*) }
                }
            )*
        }
        #[cfg(test)]
        const CALLS: &[&str] = &[$(stringify!($name)),*];
    };
}

/// Functions that exist so that clients bind, and refuse: `ncclInvalidUsage` (`ncclInvalidArgument` for a bad
/// communicator where that is the first argument) and the function's name in the last-error text.
macro_rules! refused {
    (comm: [$($on_comm:ident),* $(,)?] plain: [$($plain:ident),* $(,)?]) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $on_comm(comm: Handle) -> c_int {
                guard::call(|| ops::refuse_on_comm(stringify!($on_comm), comm))
            }
        )*
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $plain() -> c_int {
                guard::call(|| ops::refuse(stringify!($plain)))
            }
        )*
        mod refused_twins {
            use super::*;
            $(
                #[unsafe(export_name = concat!("p", stringify!($on_comm)))]
                extern "C" fn $on_comm(comm: Handle) -> c_int { super::$on_comm(comm) }
            )*
            $(
                #[unsafe(export_name = concat!("p", stringify!($plain)))]
                extern "C" fn $plain() -> c_int { super::$plain() }
            )*
        }
        #[cfg(test)]
        const REFUSED: &[&str] = &[$(stringify!($on_comm),)* $(stringify!($plain)),*];
    };
}

calls! {
    ncclGetVersion(version: *mut c_int) -> c_int = exports_init::get_version;
    ncclGetErrorString(code: c_int) -> *const c_char = exports_init::get_error_string;
    ncclGetLastError(comm: Handle) -> *const c_char = exports_init::get_last_error;
    ncclGetUniqueId(id: *mut RawUniqueId) -> c_int = exports_init::get_unique_id;
    ncclCommInitRank(comm: *mut Handle, nranks: c_int, id: RawUniqueId, rank: c_int) -> c_int = exports_init::init_rank;
    ncclCommInitRankConfig(comm: *mut Handle, nranks: c_int, id: RawUniqueId, rank: c_int, config: *const c_void) -> c_int = exports_init::init_rank_config;
    ncclCommInitRankScalable(comm: *mut Handle, nranks: c_int, rank: c_int, num_ids: c_int, ids: *const RawUniqueId, config: *const c_void) -> c_int = exports_init::init_rank_scalable;
    ncclCommInitAll(comms: *mut Handle, num_devices: c_int, devices: *const c_int) -> c_int = exports_init::init_all;
    ncclCommSplit(comm: Handle, color: c_int, key: c_int, new_comm: *mut Handle, config: *const c_void) -> c_int = exports_init::split;
    ncclCommFinalize(comm: Handle) -> c_int = exports_init::finalize;
    ncclCommDestroy(comm: Handle) -> c_int = exports_init::destroy;
    ncclCommAbort(comm: Handle) -> c_int = exports_init::abort;
    ncclCommRevoke(comm: Handle, flags: c_int) -> c_int = exports_init::revoke;
    ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int = exports_init::get_async_error;
    ncclCommCount(comm: Handle, count: *mut c_int) -> c_int = exports_init::count;
    ncclCommUserRank(comm: Handle, rank: *mut c_int) -> c_int = exports_init::user_rank;
    ncclCommCuDevice(comm: Handle, device: *mut c_int) -> c_int = exports_init::cu_device;

    ncclGroupStart() -> c_int = exports::group_start;
    ncclGroupEnd() -> c_int = exports::group_end;
    ncclGroupSimulateEnd(info: *mut SimInfo) -> c_int = exports::group_simulate_end;
    ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_reduce;
    ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_gather;
    ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int = exports::reduce_scatter;
    ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::broadcast;
    ncclBcast(buffer: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::bcast;
    ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::reduce;
    ncclAlltoAll(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_to_all;
    ncclGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::gather;
    ncclScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::scatter;
    ncclSend(buffer: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int = exports::send;
    ncclRecv(buffer: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int = exports::recv;

    ncclAllReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_reduce_config;
    ncclAllGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_gather_config;
    ncclReduceScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::reduce_scatter_config;
    ncclBroadcastConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::broadcast_config;
    ncclReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::reduce_config;
    ncclAlltoAllConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_to_all_config;
    ncclGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::gather_config;
    ncclScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::scatter_config;

    ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: *const c_void, dtype: c_int, residence: c_int, comm: Handle) -> c_int = exports_rest::red_op_create;
    ncclRedOpDestroy(op: c_int, comm: Handle) -> c_int = exports_rest::red_op_destroy;
    ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> c_int = exports_rest::mem_alloc;
    ncclMemFree(pointer: *mut c_void) -> c_int = exports_rest::mem_free;
    ncclCommRegister(comm: Handle, buffer: *mut c_void, bytes: usize, handle: *mut *mut c_void) -> c_int = exports_rest::register;
    ncclCommDeregister(comm: Handle, handle: *mut c_void) -> c_int = exports_rest::deregister;
    ncclCommQueryProperties(comm: Handle, properties: *mut c_void) -> c_int = exports_rest::query_properties;
    ncclTeamWorld(comm: Handle) -> Team = exports_rest::team_world;
    ncclTeamLsa(comm: Handle) -> Team = exports_rest::team_lsa;
    ncclTeamRail(comm: Handle) -> Team = exports_rest::team_rail;
    ncclTeamCft(comm: Handle, mode: c_int) -> Team = exports_rest::team_cft;
    ncclTeamCftMultimem(comm: Handle) -> Team = exports_rest::team_cft_multimem;
    ncclTeamRankToWorld(comm: Handle, team: Team, rank: c_int) -> c_int = exports_rest::team_rank_to_world;
    ncclTeamRankToLsa(comm: Handle, team: Team, rank: c_int) -> c_int = exports_rest::team_rank_to_lsa;
    ncclLLA2ACalcSlots(max_elements: c_int, max_element_bytes: c_int) -> c_int = exports_rest::lla2a_slots;
    ncclParamDumpAll() -> () = exports_rest::param_dump_all;
    ncclResetDebugInit() -> () = exports_rest::reset_debug_init;
}

refused! {
    comm: [
        ncclCommShrink, ncclCommGetUniqueId, ncclCommSuspend, ncclCommResume, ncclCommMemStats, ncclCommWindowRegister,
        ncclCommWindowDeregister, ncclWinGetUserPtr, ncclDevCommCreate, ncclDevCommDestroy,
    ]
    plain: [
        ncclCommGrow, ncclPutSignal, ncclSignal, ncclWaitSignal, ncclGetLsaDevicePointer, ncclGetLsaMultimemDevicePointer,
        ncclGetMultimemDevicePointer, ncclGetPeerDevicePointer, ncclGetMultimemDeviceLeInfo, ncclGetCftDeviceLeInfo,
        ncclGetPeerDeviceLeInfo, ncclLsaBarrierCreateRequirement, ncclGinBarrierCreateRequirement,
        ncclLLA2ACreateRequirement, ncclGinOutboxCreateRequirement, ncclGinInboxA2ACreateRequirement, ncclSetEncryption,
        ncclParamBind, ncclParamGet, ncclParamGetStr, ncclParamGetParameter, ncclParamGetAllParameterKeys,
        ncclParamGetI8, ncclParamGetI16, ncclParamGetI32, ncclParamGetI64, ncclParamGetU8, ncclParamGetU16,
        ncclParamGetU32, ncclParamGetU64,
    ]
}

/// Not a public function, but exported by NCCL (and the only one without a twin): it re-reads `NCCL_DEBUG`.
#[unsafe(no_mangle)]
extern "C" fn ncclResetDebugInitInternal() {}

#[cfg(test)]
mod tests {
    use super::{CALLS, REFUSED};
    use std::collections::BTreeSet;

    #[test]
    fn the_table_names_every_function_once() {
        let names: BTreeSet<_> = CALLS.iter().chain(REFUSED).collect();
        assert_eq!(names.len(), CALLS.len() + REFUSED.len());
        // 2.32 exports 97 names; ncclResetDebugInitInternal stands outside the tables.
        assert_eq!(names.len(), 96);
    }
}
