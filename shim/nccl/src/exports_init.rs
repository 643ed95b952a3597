//! The C side of version, errors, and the life of communicators.

use crate::Handle;
use crate::abi::{Code, CommConfig, RawUniqueId, version_code};
use crate::comm::{self, Comm};
use crate::guard::{self, Failure, Outcome, tell};
use crate::life::{self, Target};
use crate::session::Session;
use crate::{config, group, ops, passthrough, session};
use core::ffi::{c_char, c_int, c_void};
use std::sync::Once;

/// # Safety
/// `version` is null or writable.
pub(crate) unsafe fn get_version(version: *mut c_int) -> Outcome {
    // SAFETY: promised by the caller.
    let Some(version) = (unsafe { version.as_mut() }) else { return Err(Failure::null("ncclGetVersion", "version")) };
    *version = own_version();
    Ok(())
}

/// The version to answer. A malformed override is told and not used.
pub(crate) fn own_version() -> c_int {
    config::nccl_version().unwrap_or_else(|text| {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            tell(&format!(
                "PRISM_NCCL_VERSION={text} is not a version (23007 or 2.30.7); answering {}",
                config::DEFAULT_NCCL_VERSION
            ));
        });
        config::DEFAULT_NCCL_VERSION
    })
}

pub(crate) fn get_error_string(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 if own_version() >= version_code(2, 30, 0) => c"timeout",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// The text is the process's; NCCL ignores the communicator too.
pub(crate) fn get_last_error(_comm: Handle) -> *const c_char {
    guard::last_error()
}

/// # Safety
/// `id` is null or writable.
pub(crate) unsafe fn get_unique_id(id: *mut RawUniqueId) -> Outcome {
    if id.is_null() {
        return Err(Failure::null("GetUniqueId", "out"));
    }
    // SAFETY: not null, and promised by the caller; 128 bytes of no particular alignment.
    unsafe { id.write_unaligned(ops::unique_id()) };
    Ok(())
}

/// Makes a communicator inside an implicit group, as NCCL does: an error also spoils an open group.
fn sticky(result: Outcome) -> Outcome {
    result.inspect_err(|failure| {
        if failure.code != Code::InProgress {
            group::note_error(failure.code);
        }
    })
}

/// # Safety
/// `new_comm` is null or writable; `config` is null or an `ncclConfig_t` of the size it says.
unsafe fn init(new_comm: *mut Handle, nranks: c_int, id: &RawUniqueId, rank: c_int, config: *const c_void) -> Outcome {
    sticky(session::open().and_then(|session| {
        // SAFETY: promised by the caller.
        let target = unsafe { target(new_comm, "CommInitRank") }?;
        if nranks < 1 || !(0..nranks).contains(&rank) {
            return Err(Failure::new(Code::InvalidArgument, format!("invalid rank requested : {rank}/{nranks}")));
        }
        // SAFETY: promised by the caller.
        let config = unsafe { read_config(config, CommConfig::DEFAULT) }?;
        life::init(session, id, (nranks, rank), None, config, target)
    }))
}

/// Where the handle goes; it is null until there is one.
///
/// # Safety
/// `new_comm` is null or writable until the communicator is ready or has failed.
unsafe fn target(new_comm: *mut Handle, function: &str) -> Result<Target, Failure> {
    if new_comm.is_null() {
        return Err(Failure::null(function, "newcomm"));
    }
    // SAFETY: promised by the caller.
    unsafe {
        new_comm.write(core::ptr::null_mut());
        Ok(Target::new(new_comm))
    }
}

/// # Safety
/// `config` is null or an `ncclConfig_t` of the size it says.
unsafe fn read_config(config: *const c_void, default: CommConfig) -> Result<CommConfig, Failure> {
    // SAFETY: promised by the caller.
    if config.is_null() { Ok(default) } else { unsafe { CommConfig::read(config) } }
}

/// # Safety
/// As for [`init_rank_config`].
pub(crate) unsafe fn init_rank(new_comm: *mut Handle, nranks: c_int, id: RawUniqueId, rank: c_int) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { init(new_comm, nranks, &id, rank, core::ptr::null()) }
}

/// # Safety
/// `new_comm` is null or writable; `config` is null or an `ncclConfig_t` of the size it says.
pub(crate) unsafe fn init_rank_config(
    new_comm: *mut Handle,
    nranks: c_int,
    id: RawUniqueId,
    rank: c_int,
    config: *const c_void,
) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { init(new_comm, nranks, &id, rank, config) }
}

/// All ids name the same communicator; the first is enough.
///
/// # Safety
/// As for [`init_rank_config`]; `ids` points to `num_ids` ids.
pub(crate) unsafe fn init_rank_scalable(
    new_comm: *mut Handle,
    nranks: c_int,
    rank: c_int,
    num_ids: c_int,
    ids: *const RawUniqueId,
    config: *const c_void,
) -> Outcome {
    if num_ids <= 0 || num_ids > nranks {
        let text = format!("ncclCommInitRankScalable : {num_ids} unique ids for {nranks} ranks");
        return sticky(Err(Failure::new(Code::InvalidArgument, text)));
    }
    if ids.is_null() {
        return sticky(Err(Failure::null("CommInitRankScalable", "commId")));
    }
    // SAFETY: promised by the caller; ids need not be aligned.
    unsafe { init(new_comm, nranks, &ids.read_unaligned(), rank, config) }
}

/// # Safety
/// `comms` is null or has room for `num_devices` handles; `devices` is null or lists as many numbers.
pub(crate) unsafe fn init_all(comms: *mut Handle, num_devices: c_int, devices: *const c_int) -> Outcome {
    let session = session::open()?;
    if comms.is_null() {
        return Err(Failure::null("CommInitAll", "comms"));
    }
    if num_devices < 0 {
        return Err(Failure::new(Code::InvalidArgument, format!("invalid device count requested : {num_devices}")));
    }
    if num_devices == 0 {
        return Ok(());
    }
    if num_devices != 1 {
        return ops::refuse_part("ncclCommInitAll", "for more than one device");
    }
    // SAFETY: promised by the caller.
    let device = unsafe { devices.as_ref() }.copied();
    if device.is_some_and(|device| device < 0) {
        return Err(Failure::new(Code::InvalidArgument, "ncclCommInitAll : invalid device"));
    }
    // SAFETY: promised by the caller.
    let target = unsafe { target(comms, "CommInitAll") }?;
    sticky(life::init(session, &ops::unique_id(), (1, 0), device, CommConfig::DEFAULT, target))
}

/// # Safety
/// `new_comm` is null or writable; `config` is null or an `ncclConfig_t` of the size it says.
pub(crate) unsafe fn split(
    parent: Handle,
    color: c_int,
    key: c_int,
    new_comm: *mut Handle,
    config: *const c_void,
) -> Outcome {
    const NAME: &str = "ncclCommSplit";
    sticky(session::open().and_then(|_| {
        let parent = comm::check(parent, NAME)?;
        // SAFETY: promised by the caller.
        let (target, config) = unsafe { (target(new_comm, NAME)?, read_config(config, parent.config())?) };
        life::split(parent, color, key, config, target)
    }))
}

/// # Safety
/// `excluded` is null or lists `num_excluded` ranks; `new_comm` is null or writable; `config` is null or an
/// `ncclConfig_t` of the size it says.
pub(crate) unsafe fn shrink(
    parent: Handle,
    excluded: *const c_int,
    num_excluded: c_int,
    new_comm: *mut Handle,
    config: *const c_void,
    flags: c_int,
) -> Outcome {
    const NAME: &str = "ncclCommShrink";
    const ABORT: c_int = 1;
    sticky(session::open().and_then(|_| {
        let parent = comm::check(parent, NAME)?;
        // SAFETY: promised by the caller.
        let target = unsafe { target(new_comm, NAME) }?;
        if excluded.is_null() {
            return Err(Failure::null(NAME, "excludeRanksList"));
        }
        let Some(num_excluded) = usize::try_from(num_excluded).ok().filter(|count| *count > 0) else {
            return Err(Failure::new(Code::InvalidArgument, format!("{NAME} : {num_excluded} ranks to exclude")));
        };
        // SAFETY: promised by the caller.
        let excluded = unsafe { core::slice::from_raw_parts(excluded, num_excluded) };
        // SAFETY: as above.
        let config = unsafe { read_config(config, parent.config()) }?;
        life::shrink(parent, excluded, flags & ABORT != 0, config, target)
    }))
}

/// # Safety
/// `id` is null or writable.
pub(crate) unsafe fn comm_get_unique_id(comm: Handle, id: *mut RawUniqueId) -> Outcome {
    let comm = comm::check(comm, "ncclCommGetUniqueId")?;
    ops::ensure_ready(comm, "ncclCommGetUniqueId")?;
    if id.is_null() {
        return Err(Failure::null("CommGetUniqueId", "uniqueId"));
    }
    let made = life::grow_id(comm)?;
    // SAFETY: promised by the caller; 128 bytes of no particular alignment.
    unsafe { id.write_unaligned(made) };
    Ok(())
}

/// # Safety
/// `id` is null or points to an id; `new_comm` is null or writable; `config` is null or an `ncclConfig_t` of the size it says.
pub(crate) unsafe fn grow(
    comm: Handle,
    nranks: c_int,
    id: *const RawUniqueId,
    rank: c_int,
    new_comm: *mut Handle,
    config: *const c_void,
) -> Outcome {
    const NAME: &str = "ncclCommGrow";
    let bad = |text: String| Failure::new(Code::InvalidArgument, format!("{NAME} : {text}"));
    // SAFETY: promised by the caller.
    let target = unsafe { target(new_comm, NAME) }?;
    if nranks <= 0 {
        return Err(bad(format!("{nranks} ranks")));
    }
    // SAFETY: promised by the caller; ids need not be aligned.
    let id = (!id.is_null()).then(|| unsafe { id.read_unaligned() });
    if comm.is_null() {
        let session = session::open()?;
        let Some(id) = id else { return Err(bad("a new rank needs a unique id".to_owned())) };
        if !(0..nranks).contains(&rank) {
            return Err(bad(format!("rank {rank} of {nranks}")));
        }
        // SAFETY: promised by the caller.
        let config = unsafe { read_config(config, CommConfig::DEFAULT) }?;
        return sticky(life::grow_into(session, (nranks, rank), &id, config, target));
    }
    let parent = comm::check(comm, NAME)?;
    if nranks <= parent.nranks() || rank != -1 {
        let now = parent.nranks();
        return Err(bad(format!(
            "an existing member passes rank -1 and more than {now} ranks, not {rank} and {nranks}"
        )));
    }
    // SAFETY: promised by the caller.
    let config = unsafe { read_config(config, parent.config()) }?;
    sticky(life::grow(parent, nranks, id, config, target))
}

pub(crate) fn finalize(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    let finalized = comm::check(comm, "ncclCommFinalize").and_then(|comm| match ops::async_error(comm) {
        Code::Success if comm.finalize() => life::begun(comm),
        Code::Success => Err(Failure::new(Code::InvalidArgument, "ncclCommFinalize : called twice")),
        code => Err(Failure::again(code)),
    });
    sticky(finalized)
}

pub(crate) fn destroy(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    sticky(comm::check(comm, "ncclCommDestroy").and_then(ops::destroy))
}

/// Called by a watchdog while the program may hang anywhere: takes no lock and waits for nobody. The engine learns of it
/// with the next record.
pub(crate) fn abort(comm: Handle) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    let comm = comm::check(comm, "ncclCommAbort")?;
    let real = comm.real();
    comm.abort();
    // On a real device streams are held for it.
    if let Some(session) = session::current().filter(|session| session.is_real() && !session.is_dead()) {
        session.send_aborted()?;
    }
    real.map_or(Ok(()), |real| passthrough::end(real, true))
}

/// Only the local effect: later operations on the communicator are invalid.
pub(crate) fn revoke(comm: Handle, flags: c_int) -> Outcome {
    if comm.is_null() {
        return Ok(());
    }
    let comm = comm::check(comm, "ncclCommRevoke")?;
    if flags == 0 && comm.revoke() {
        return life::begun(comm);
    }
    Err(Failure::new(
        Code::InvalidArgument,
        "ncclCommRevoke : unknown flags, or the communicator is already finalized or revoked",
    ))
}

/// # Safety
/// `error` is null or writable.
pub(crate) unsafe fn get_async_error(comm: Handle, error: *mut c_int) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { fact(comm, error, "ncclGetAsyncError", "asyncError", |comm| ops::poll(comm) as c_int) }
}

/// # Safety
/// `count` is null or writable.
pub(crate) unsafe fn count(comm: Handle, count: *mut c_int) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { fact(comm, count, "CommCount", "count", Comm::nranks) }
}

/// # Safety
/// `rank` is null or writable.
pub(crate) unsafe fn user_rank(comm: Handle, rank: *mut c_int) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { fact(comm, rank, "CommUserRank", "rank", Comm::rank) }
}

/// # Safety
/// `device` is null or writable.
pub(crate) unsafe fn cu_device(comm: Handle, device: *mut c_int) -> Outcome {
    // SAFETY: promised by the caller.
    unsafe { fact(comm, device, "CommCuDevice", "devid", Comm::device) }
}

/// Stores one fact about a communicator.
///
/// # Safety
/// `out` is null or writable.
unsafe fn fact(
    comm: Handle,
    out: *mut c_int,
    function: &str,
    argument: &str,
    of: impl FnOnce(Comm) -> c_int,
) -> Outcome {
    let comm = comm::check(comm, function)?;
    // SAFETY: promised by the caller.
    let Some(out) = (unsafe { out.as_mut() }) else { return Err(Failure::null(function, argument)) };
    *out = of(comm);
    Ok(())
}

/// The session of a call that needs a device; without one it is a CUDA error.
pub(crate) fn device() -> Result<&'static Session, Failure> {
    session::open()
}
