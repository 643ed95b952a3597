//! One-sided communication and NCCL's device side: arguments are checked as NCCL checks them, and what is well formed is
//! refused by name. Kernels that communicate by themselves cannot be seen from the host (`src/rma`, `src/dev_runtime.cc`).

#![allow(clippy::too_many_arguments, reason = "NCCL's argument lists are what they are")]

use crate::Handle;
use crate::abi::{API_MAGIC, Code, data_type};
use crate::comm;
use crate::group;
use crate::guard::{Failure, Outcome};
use crate::ops::{ensure_ready, refuse};
use core::ffi::{c_int, c_uint, c_void};

fn bad(function: &str, what: &str) -> Failure {
    Failure::new(Code::InvalidArgument, format!("{function} : {what}"))
}

/// An error in a group spoils the group.
fn sticky(result: Outcome) -> Outcome {
    result.inspect_err(|failure| group::note_error(failure.code))
}

/// # Safety
/// `requirements` is null or points to an `ncclDevCommRequirements_t` of the size it says.
pub(crate) unsafe fn dev_comm_create(comm: Handle, requirements: *const c_void, _out: *mut c_void) -> Outcome {
    const NAME: &str = "ncclDevCommCreate";
    comm::check(comm, NAME)?;
    if requirements.is_null() {
        return Err(Failure::null(NAME, "reqs"));
    }
    // SAFETY: every NCCL struct of this kind starts with its size and the magic.
    let magic = unsafe { requirements.cast::<u8>().add(size_of::<usize>()).cast::<u32>().read_unaligned() };
    if magic != API_MAGIC {
        let text = format!("{NAME} : reqs was not made by NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER");
        return Err(Failure::new(Code::InvalidUsage, text));
    }
    // As where the communicator does not support symmetric memory.
    refuse(NAME)
}

pub(crate) fn dev_comm_destroy(comm: Handle, device_comm: *const c_void) -> Outcome {
    const NAME: &str = "ncclDevCommDestroy";
    comm::check(comm, NAME)?;
    if device_comm.is_null() {
        return Err(Failure::null(NAME, "devComm"));
    }
    refuse(NAME)
}

fn pointer(function: &'static str, window: *mut c_void, out: *mut *mut c_void) -> Outcome {
    if window.is_null() {
        return Err(Failure::null(function, "window"));
    }
    if out.is_null() {
        return Err(Failure::null(function, "outPtr"));
    }
    refuse(function)
}

pub(crate) fn lsa_pointer(window: *mut c_void, _offset: usize, _rank: c_int, out: *mut *mut c_void) -> Outcome {
    pointer("ncclGetLsaDevicePointer", window, out)
}

pub(crate) fn peer_pointer(window: *mut c_void, _offset: usize, _peer: c_int, out: *mut *mut c_void) -> Outcome {
    pointer("ncclGetPeerDevicePointer", window, out)
}

pub(crate) fn multimem_pointer(window: *mut c_void, _offset: usize, out: *mut *mut c_void) -> Outcome {
    pointer("ncclGetLsaMultimemDevicePointer", window, out)
}

/// What NCCL looks at first in every communication call.
fn check(function: &'static str, comm: Handle, peer: c_int, dtype: c_int, flags: c_uint) -> Outcome {
    let comm = comm::check(comm, function)?;
    ensure_ready(comm, function)?;
    if !(0..comm.nranks()).contains(&peer) {
        return Err(bad(function, &format!("invalid peer {peer}")));
    }
    if data_type(dtype).is_none() {
        return Err(bad(function, &format!("invalid type {dtype}")));
    }
    if flags != 0 {
        return Err(bad(function, &format!("flags {flags} are not 0")));
    }
    Ok(())
}

pub(crate) fn put_signal(
    local: *const c_void,
    _count: usize,
    dtype: c_int,
    peer: c_int,
    window: *mut c_void,
    _offset: usize,
    _signal: c_int,
    _context: c_int,
    flags: c_uint,
    comm: Handle,
    _stream: Handle,
) -> Outcome {
    const NAME: &str = "ncclPutSignal";
    sticky(check(NAME, comm, peer, dtype, flags).and_then(|()| match (window.is_null(), local.is_null()) {
        (true, _) => Err(Failure::null(NAME, "peerWin")),
        (_, true) => Err(Failure::null(NAME, "localbuff")),
        _ => refuse(NAME),
    }))
}

pub(crate) fn signal(
    peer: c_int,
    _signal: c_int,
    _context: c_int,
    flags: c_uint,
    comm: Handle,
    _stream: Handle,
) -> Outcome {
    const NAME: &str = "ncclSignal";
    sticky(check(NAME, comm, peer, 0, flags).and_then(|()| refuse(NAME)))
}

pub(crate) fn wait_signal(count: c_int, waits: *const c_void, comm: Handle, _stream: Handle) -> Outcome {
    const NAME: &str = "ncclWaitSignal";
    sticky(check(NAME, comm, 0, 0, 0).and_then(|()| {
        if waits.is_null() || count == 0 {
            return Err(bad(NAME, "nothing to wait for"));
        }
        refuse(NAME)
    }))
}
