//! The table of NCCL's functions: name, first version that has it, and what it does here.
//!
//! Everything else about the list of exports is made from it: the functions themselves and their `pnccl*` twins (lib.rs), and
//! the tests that compare it with the built library, with the recorded exports of NCCL and with what torch needs.
//!
//! * `emulated`: arguments, result and the function that does it.
//! * `without_twin`: the same, but NCCL exports no `pnccl*` of it.
//! * `refused`: the code it answers, with its own name in `ncclGetLastError`. `comm`: the first argument is a communicator,
//!   checked first; `plain`: nothing is looked at.
//!
//! No function is passed through to a real NCCL. Names newer than the version answered by `ncclGetVersion` resolve too, as
//! they do for a client that finds a newer NCCL than it was built for.

/// Calls the macro `$user` with the table.
macro_rules! api_table {
    ($user:ident) => {
        $user! {
            emulated {
                2.18 ncclGetVersion(version: *mut c_int) -> c_int = exports_init::get_version;
                2.18 ncclGetErrorString(code: c_int) -> *const c_char = exports_init::get_error_string;
                2.18 ncclGetLastError(comm: Handle) -> *const c_char = exports_init::get_last_error;
                2.18 ncclGetUniqueId(id: *mut RawUniqueId) -> c_int = exports_init::get_unique_id;
                2.18 ncclCommInitRank(comm: *mut Handle, nranks: c_int, id: RawUniqueId, rank: c_int) -> c_int = exports_init::init_rank;
                2.18 ncclCommInitRankConfig(comm: *mut Handle, nranks: c_int, id: RawUniqueId, rank: c_int, config: *const c_void) -> c_int = exports_init::init_rank_config;
                2.23 ncclCommInitRankScalable(comm: *mut Handle, nranks: c_int, rank: c_int, num_ids: c_int, ids: *const RawUniqueId, config: *const c_void) -> c_int = exports_init::init_rank_scalable;
                2.18 ncclCommInitAll(comms: *mut Handle, num_devices: c_int, devices: *const c_int) -> c_int = exports_init::init_all;
                2.18 ncclCommSplit(comm: Handle, color: c_int, key: c_int, new_comm: *mut Handle, config: *const c_void) -> c_int = exports_init::split;
                2.18 ncclCommFinalize(comm: Handle) -> c_int = exports_init::finalize;
                2.18 ncclCommDestroy(comm: Handle) -> c_int = exports_init::destroy;
                2.18 ncclCommAbort(comm: Handle) -> c_int = exports_init::abort;
                2.28 ncclCommRevoke(comm: Handle, flags: c_int) -> c_int = exports_init::revoke;
                2.18 ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int = exports_init::get_async_error;
                2.18 ncclCommCount(comm: Handle, count: *mut c_int) -> c_int = exports_init::count;
                2.18 ncclCommUserRank(comm: Handle, rank: *mut c_int) -> c_int = exports_init::user_rank;
                2.18 ncclCommCuDevice(comm: Handle, device: *mut c_int) -> c_int = exports_init::cu_device;

                2.18 ncclGroupStart() -> c_int = exports::group_start;
                2.18 ncclGroupEnd() -> c_int = exports::group_end;
                2.22 ncclGroupSimulateEnd(info: *mut SimInfo) -> c_int = exports::group_simulate_end;
                2.18 ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_reduce;
                2.18 ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_gather;
                2.18 ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) -> c_int = exports::reduce_scatter;
                2.18 ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::broadcast;
                2.18 ncclBcast(buffer: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::bcast;
                2.18 ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::reduce;
                2.28 ncclAlltoAll(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle) -> c_int = exports::all_to_all;
                2.28 ncclGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::gather;
                2.28 ncclScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int = exports::scatter;
                2.18 ncclSend(buffer: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int = exports::send;
                2.18 ncclRecv(buffer: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) -> c_int = exports::recv;

                2.31 ncclAllReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_reduce_config;
                2.31 ncclAllGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_gather_config;
                2.31 ncclReduceScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::reduce_scatter_config;
                2.31 ncclBroadcastConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::broadcast_config;
                2.31 ncclReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::reduce_config;
                2.31 ncclAlltoAllConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::all_to_all_config;
                2.31 ncclGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::gather_config;
                2.31 ncclScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: *const CollConfig) -> c_int = exports::scatter_config;

                2.18 ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: *const c_void, dtype: c_int, residence: c_int, comm: Handle) -> c_int = exports_rest::red_op_create;
                2.18 ncclRedOpDestroy(op: c_int, comm: Handle) -> c_int = exports_rest::red_op_destroy;
                2.19 ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> c_int = exports_rest::mem_alloc;
                2.19 ncclMemFree(pointer: *mut c_void) -> c_int = exports_rest::mem_free;
                2.19 ncclCommRegister(comm: Handle, buffer: *mut c_void, bytes: usize, handle: *mut *mut c_void) -> c_int = exports_rest::register;
                2.19 ncclCommDeregister(comm: Handle, handle: *mut c_void) -> c_int = exports_rest::deregister;
                2.29 ncclCommQueryProperties(comm: Handle, properties: *mut c_void) -> c_int = exports_rest::query_properties;
                2.28 ncclTeamWorld(comm: Handle) -> Team = exports_rest::team_world;
                2.28 ncclTeamLsa(comm: Handle) -> Team = exports_rest::team_lsa;
                2.28 ncclTeamRail(comm: Handle) -> Team = exports_rest::team_rail;
                2.31 ncclTeamCft(comm: Handle, mode: c_int) -> Team = exports_rest::team_cft;
                2.31 ncclTeamCftMultimem(comm: Handle) -> Team = exports_rest::team_cft_multimem;
                2.28 ncclTeamRankToWorld(comm: Handle, team: Team, rank: c_int) -> c_int = exports_rest::team_rank_to_world;
                2.28 ncclTeamRankToLsa(comm: Handle, team: Team, rank: c_int) -> c_int = exports_rest::team_rank_to_lsa;
                2.28 ncclLLA2ACalcSlots(max_elements: c_int, max_element_bytes: c_int) -> c_int = exports_rest::lla2a_slots;
                2.30 ncclParamDumpAll() -> () = exports_rest::param_dump_all;
                2.24 ncclResetDebugInit() -> () = exports_rest::reset_debug_init;
                2.27 ncclCommShrink(comm: Handle, excluded: *const c_int, num_excluded: c_int, new_comm: *mut Handle, config: *const c_void, flags: c_int) -> c_int = exports_init::shrink;
                2.29 ncclCommGetUniqueId(comm: Handle, id: *mut RawUniqueId) -> c_int = exports_init::comm_get_unique_id;
                2.29 ncclCommGrow(comm: Handle, nranks: c_int, id: *const RawUniqueId, rank: c_int, new_comm: *mut Handle, config: *const c_void) -> c_int = exports_init::grow;
                2.29 ncclCommSuspend(comm: Handle, flags: c_int) -> c_int = exports_rest::suspend;
                2.29 ncclCommResume(comm: Handle) -> c_int = exports_rest::resume;
                2.29 ncclCommMemStats(comm: Handle, stat: c_int, value: *mut u64) -> c_int = exports_rest::mem_stats;
                2.27 ncclCommWindowRegister(comm: Handle, buffer: *mut c_void, bytes: usize, window: *mut *mut c_void, flags: c_int) -> c_int = exports_rest::window_register;
                2.27 ncclCommWindowDeregister(comm: Handle, window: *mut c_void) -> c_int = exports_rest::window_deregister;
                2.29 ncclWinGetUserPtr(comm: Handle, window: *mut c_void, pointer: *mut *mut c_void) -> c_int = exports_rest::win_get_user_ptr;

                2.30 ncclParamBind(out: *mut Handle, key: *const c_char) -> c_int = params::bind;
                2.30 ncclParamGet(handle: Handle, out: *mut c_void, max_bytes: c_int, length: *mut c_int) -> c_int = params::get;
                2.30 ncclParamGetStr(handle: Handle, out: *mut *const c_char) -> c_int = params::get_str;
                2.30 ncclParamGetParameter(key: *const c_char, value: *mut *const c_char, length: *mut c_int) -> c_int = params::get_parameter;
                2.30 ncclParamGetAllParameterKeys(table: *mut *mut *const c_char, length: *mut c_int) -> c_int = params::all_keys;
                2.30 ncclParamGetI8(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetI16(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetI32(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetI64(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetU8(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetU16(handle: Handle, out: *mut c_void) -> c_int = params::no_such_type;
                2.30 ncclParamGetU32(handle: Handle, out: *mut u32) -> c_int = params::get_u32;
                2.30 ncclParamGetU64(handle: Handle, out: *mut u64) -> c_int = params::get_u64;

                2.28 ncclDevCommCreate(comm: Handle, requirements: *const c_void, out: *mut c_void) -> c_int = one_sided::dev_comm_create;
                2.28 ncclDevCommDestroy(comm: Handle, device_comm: *const c_void) -> c_int = one_sided::dev_comm_destroy;
                2.29 ncclGetLsaDevicePointer(window: *mut c_void, offset: usize, rank: c_int, out: *mut *mut c_void) -> c_int = one_sided::lsa_pointer;
                2.29 ncclGetPeerDevicePointer(window: *mut c_void, offset: usize, peer: c_int, out: *mut *mut c_void) -> c_int = one_sided::peer_pointer;
                2.29 ncclGetLsaMultimemDevicePointer(window: *mut c_void, offset: usize, out: *mut *mut c_void) -> c_int = one_sided::multimem_pointer;
                2.29 ncclPutSignal(local: *const c_void, count: usize, dtype: c_int, peer: c_int, window: *mut c_void, offset: usize, signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: Handle) -> c_int = one_sided::put_signal;
                2.29 ncclSignal(peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: Handle) -> c_int = one_sided::signal;
                2.29 ncclWaitSignal(count: c_int, waits: *const c_void, comm: Handle, stream: Handle) -> c_int = one_sided::wait_signal;
            }
            without_twin {
                2.28 ncclResetDebugInitInternal() -> () = exports_rest::reset_debug_init;
            }
            refused {
                2.29 plain ncclGetMultimemDevicePointer InvalidUsage;
                2.31 plain ncclGetMultimemDeviceLeInfo InvalidUsage;
                2.31 plain ncclGetCftDeviceLeInfo InvalidUsage;
                2.31 plain ncclGetPeerDeviceLeInfo InvalidUsage;
                2.28 plain ncclLsaBarrierCreateRequirement InvalidUsage;
                2.28 plain ncclGinBarrierCreateRequirement InvalidUsage;
                2.28 plain ncclLLA2ACreateRequirement InvalidUsage;
                2.29 plain ncclGinOutboxCreateRequirement InvalidUsage;
                2.29 plain ncclGinInboxA2ACreateRequirement InvalidUsage;
                2.32 plain ncclSetEncryption InvalidUsage;
            }
        }
    };
}
