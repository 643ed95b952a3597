//! The C side of reduction operators, memory, properties and teams.

use crate::Handle;
use crate::abi::{API_MAGIC, Code, Team, data_type, properties};
use crate::comm::{self, FIRST_USER_OPERATOR, PreMul, Scalar};
use crate::exports_init::device;
use crate::guard::{Failure, Outcome};
use crate::life::begun;
use crate::ops::{ensure_ready, refuse_silently};
use crate::{notes, session};
use core::ffi::{c_int, c_void};
use prism_wire::frame::Request;

/// `ncclScalarHostImmediate`: the multiplier is read at once.
const HOST_IMMEDIATE: c_int = 1;
/// Device memory comes in pages of this size.
const PAGE_BYTES: usize = 2 << 20;

/// # Safety
/// `op` is null or writable; `scalar` is null or, if immediate, points to one element of the type.
pub(crate) unsafe fn red_op_create(
    op: *mut c_int,
    scalar: *const c_void,
    dtype: c_int,
    residence: c_int,
    comm: Handle,
) -> Outcome {
    const NAME: &str = "ncclRedOpCreatePreMulSum";
    let comm = comm::check(comm, NAME)?;
    // SAFETY: promised by the caller.
    let Some(op) = (unsafe { op.as_mut() }) else { return Err(Failure::null(NAME, "op")) };
    if scalar.is_null() {
        return Err(Failure::null(NAME, "scalar"));
    }
    let Some(kind) = data_type(dtype) else {
        return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : invalid type {dtype}")));
    };
    let scalar = if residence == HOST_IMMEDIATE {
        let mut bytes = [0_u8; 8];
        // SAFETY: promised by the caller; no type is larger than eight bytes.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(scalar.cast(), kind.size_bytes() as usize) };
        Scalar::Value(u64::from_le_bytes(bytes))
    } else {
        Scalar::Device(scalar.expose_provenance())
    };
    *op = comm.add_operator(PreMul { dtype, scalar })?;
    Ok(())
}

pub(crate) fn red_op_destroy(op: c_int, comm: Handle) -> Outcome {
    let text = if (0..FIRST_USER_OPERATOR).contains(&op) {
        "ncclRedOpDestroy : the operator is one of NCCL's own"
    } else if comm.is_null() {
        "ncclRedOpDestroy : comm argument is NULL"
    } else if comm::check(comm, "ncclRedOpDestroy")?.remove_operator(op) {
        return Ok(());
    } else {
        "ncclRedOpDestroy : the operator is unknown to this communicator"
    };
    Err(Failure::new(Code::InvalidArgument, text))
}

/// # Safety
/// `pointer` is null or writable.
pub(crate) unsafe fn mem_alloc(pointer: *mut *mut c_void, bytes: usize) -> Outcome {
    let session = device()?;
    // SAFETY: promised by the caller.
    let Some(pointer) = (unsafe { pointer.as_mut() }) else {
        return Err(Failure::new(Code::UnhandledCudaError, "ncclMemAlloc : ptr argument is NULL"));
    };
    if bytes == 0 {
        *pointer = core::ptr::null_mut();
        return Ok(());
    }
    let memory = bytes.checked_next_multiple_of(PAGE_BYTES).map_or(core::ptr::null_mut(), |bytes| session.alloc(bytes));
    if memory.is_null() {
        return Err(Failure::new(Code::UnhandledCudaError, format!("ncclMemAlloc : no room for {bytes} bytes")));
    }
    *pointer = memory;
    Ok(())
}

pub(crate) fn mem_free(pointer: *mut c_void) -> Outcome {
    let session = device()?;
    if pointer.is_null() || session.free(pointer) {
        return Ok(());
    }
    Err(Failure::new(Code::UnhandledCudaError, format!("ncclMemFree : {pointer:p} is not memory of ncclMemAlloc")))
}

/// # Safety
/// `handle` is null or writable.
pub(crate) unsafe fn register(comm: Handle, buffer: *mut c_void, bytes: usize, handle: *mut *mut c_void) -> Outcome {
    const NAME: &str = "ncclCommRegister";
    let comm = comm::check(comm, NAME)?;
    // SAFETY: promised by the caller.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return Err(Failure::null(NAME, "handle")) };
    if buffer.is_null() || bytes == 0 {
        return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : no buffer ({buffer:p}, {bytes} bytes)")));
    }
    *handle = core::ptr::without_provenance_mut(comm.register(buffer.addr(), bytes));
    notes::remark("ncclCommRegister: buffers are registered and change no time");
    Ok(())
}

pub(crate) fn deregister(comm: Handle, handle: *mut c_void) -> Outcome {
    let comm = comm::check(comm, "ncclCommDeregister")?;
    if handle.is_null() || comm.deregister(handle.addr()) {
        return Ok(());
    }
    Err(Failure::new(Code::InvalidUsage, "ncclCommDeregister : unknown handle"))
}

/// # Safety
/// `window` is null or writable.
pub(crate) unsafe fn window_register(
    comm: Handle,
    buffer: *mut c_void,
    bytes: usize,
    window: *mut *mut c_void,
    _flags: c_int,
) -> Outcome {
    const NAME: &str = "ncclCommWindowRegister";
    let comm = comm::check(comm, NAME)?;
    // SAFETY: promised by the caller.
    let Some(window) = (unsafe { window.as_mut() }) else { return Err(Failure::null(NAME, "win")) };
    *window = core::ptr::null_mut();
    if buffer.is_null() || bytes == 0 {
        return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : no buffer ({buffer:p}, {bytes} bytes)")));
    }
    ensure_ready(comm, NAME)?;
    *window = core::ptr::without_provenance_mut(comm.add_window(buffer.expose_provenance(), bytes));
    notes::remark(&format!("{NAME}: windows are registered and change no time"));
    Ok(())
}

pub(crate) fn window_deregister(comm: Handle, window: *mut c_void) -> Outcome {
    let comm = comm::check(comm, "ncclCommWindowDeregister")?;
    if window.is_null() || comm.remove_window(window.addr()) {
        return Ok(());
    }
    Err(Failure::new(Code::InvalidArgument, "ncclCommWindowDeregister : unknown window"))
}

/// # Safety
/// `pointer` is null or writable.
pub(crate) unsafe fn win_get_user_ptr(comm: Handle, window: *mut c_void, pointer: *mut *mut c_void) -> Outcome {
    const NAME: &str = "ncclWinGetUserPtr";
    let comm = comm::check(comm, NAME)?;
    // SAFETY: promised by the caller.
    let Some(pointer) = (unsafe { pointer.as_mut() }) else { return Err(Failure::null(NAME, "outUserPtr")) };
    *pointer = core::ptr::null_mut();
    let Some(address) = comm.window(window.addr()) else {
        return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : unknown window")));
    };
    *pointer = core::ptr::with_exposed_provenance_mut(address);
    Ok(())
}

/// The communicator keeps its (modelled) memory and must be resumed before it is used.
pub(crate) fn suspend(comm: Handle, flags: c_int) -> Outcome {
    const MEMORY: c_int = 1;
    let comm = comm::check(comm, "ncclCommSuspend")?;
    ensure_ready(comm, "ncclCommSuspend")?;
    if flags & MEMORY != 0 {
        comm.set_suspended(true);
    }
    begun(comm)
}

pub(crate) fn resume(comm: Handle) -> Outcome {
    let comm = comm::check(comm, "ncclCommResume")?;
    comm.set_suspended(false);
    ensure_ready(comm, "ncclCommResume")?;
    begun(comm)
}

/// What `ncclCommMemStats` is asked for.
mod memory_stat {
    use core::ffi::c_int;
    pub(super) const SUSPENDABLE: c_int = 0;
    pub(super) const IS_SUSPENDED: c_int = 1;
    pub(super) const PERSISTENT: c_int = 2;
    pub(super) const TOTAL: c_int = 3;
}

/// The engine's model of the communicator's buffers, which can all be suspended.
///
/// # Safety
/// `value` is null or writable.
pub(crate) unsafe fn mem_stats(comm: Handle, stat: c_int, value: *mut u64) -> Outcome {
    const NAME: &str = "ncclCommMemStats";
    let comm = comm::check(comm, NAME)?;
    if !comm.is_suspended() {
        ensure_ready(comm, NAME)?;
    }
    // SAFETY: promised by the caller.
    let Some(value) = (unsafe { value.as_mut() }) else { return Err(Failure::null(NAME, "value")) };
    *value = match stat {
        memory_stat::IS_SUSPENDED => u64::from(comm.is_suspended()),
        memory_stat::PERSISTENT => 0,
        memory_stat::SUSPENDABLE | memory_stat::TOTAL => {
            let session = session::of_comm()?;
            session.settle()?;
            let answer = session.control(&Request::CommMemory { comm_id: comm.id() })?;
            let bytes = answer.try_into().map(u64::from_le_bytes);
            bytes.map_err(|_| Failure::new(Code::InternalError, "the engine's answer about memory makes no sense"))?
        }
        _ => return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : unknown statistic {stat}"))),
    };
    Ok(())
}

/// Who and where, and none of the capabilities that would make a client use NCCL from the device.
///
/// # Safety
/// `out` is null or points to an `ncclCommProperties_t` of the size it says.
pub(crate) unsafe fn query_properties(comm: Handle, out: *mut c_void) -> Outcome {
    const NAME: &str = "ncclCommQueryProperties";
    let comm = comm::check(comm, NAME)?;
    if out.is_null() {
        return Err(Failure::null(NAME, "props"));
    }
    let out = out.cast::<u8>();
    // SAFETY: every NCCL struct of this kind starts with its size and the magic.
    let (size, magic) =
        unsafe { (out.cast::<usize>().read_unaligned(), out.add(properties::MAGIC).cast::<u32>().read_unaligned()) };
    if magic != API_MAGIC || size < properties::CAPABILITIES {
        return Err(Failure::new(
            Code::InvalidUsage,
            format!("{NAME} : ncclCommProperties_t was not made by NCCL_COMM_PROPERTIES_INITIALIZER"),
        ));
    }
    let facts = [comm.rank(), comm.nranks(), comm.device(), comm.device()];
    // SAFETY: within the size the caller states.
    unsafe {
        out.add(properties::RANK).cast::<[c_int; 4]>().write_unaligned(facts);
        let capabilities = size.min(properties::MAX_BYTES) - properties::CAPABILITIES;
        out.add(properties::CAPABILITIES).write_bytes(0, capabilities);
    }
    Ok(())
}

pub(crate) fn team_world(comm: Handle) -> Team {
    comm::check(comm, "ncclTeamWorld").map_or(Team::EMPTY, |comm| Team {
        nranks: comm.nranks(),
        rank: comm.rank(),
        stride: 1,
    })
}

fn no_team(function: &'static str) -> Team {
    refuse_silently(function);
    Team::EMPTY
}

pub(crate) fn team_lsa(_comm: Handle) -> Team {
    no_team("ncclTeamLsa")
}

pub(crate) fn team_rail(_comm: Handle) -> Team {
    no_team("ncclTeamRail")
}

pub(crate) fn team_cft(_comm: Handle, _mode: c_int) -> Team {
    no_team("ncclTeamCft")
}

pub(crate) fn team_cft_multimem(_comm: Handle) -> Team {
    no_team("ncclTeamCftMultimem")
}

pub(crate) fn team_rank_to_world(comm: Handle, team: Team, rank: c_int) -> c_int {
    comm::check(comm, "ncclTeamRankToWorld")
        .map_or(-1, |comm| comm.rank().wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride)))
}

pub(crate) fn team_rank_to_lsa(_comm: Handle, _team: Team, _rank: c_int) -> c_int {
    refuse_silently("ncclTeamRankToLsa");
    -1
}

/// Slots of eight bytes for that many elements.
pub(crate) fn lla2a_slots(max_elements: c_int, max_element_bytes: c_int) -> c_int {
    max_elements.wrapping_mul(max_element_bytes.wrapping_add(7) / 8)
}

pub(crate) fn param_dump_all() {
    refuse_silently("ncclParamDumpAll");
}

/// `NCCL_DEBUG` is not read here, so there is nothing to read again.
pub(crate) fn reset_debug_init() {}
