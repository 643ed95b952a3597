//! On a real device: communicators whose members all run are those of the real NCCL (`PRISM_REAL_NCCL`).
//!
//! The stand-in keeps its own communicator for each (handles, errors, groups are checked as always) and a real one behind
//! it. Members meet by the real unique id, which the one with group rank 0 leaves as a file in the session's directory: the
//! job's own store carries the ids of communicators whose root may be virtual.

use crate::Handle;
use crate::abi::{Code, RawUniqueId, data_type};
use crate::comm::{Comm, PreMul, Scalar};
use crate::config;
use crate::guard::{Failure, Outcome};
use crate::ops::{Call, What};
use crate::session::Session;
use core::ffi::{c_char, c_int, c_void};
use prism_wire::frame::{CommPeersAnswer, Request};
use prism_wire::message::CollectiveKind as Kind;
use std::ffi::{CStr, CString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a member waits for the id from the one with group rank 0.
const PATIENCE: Duration = Duration::from_secs(600);

type Buffer = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($ty:ty),*);)*) => {
        /// Functions of the real library.
        struct Table {
            $($field: unsafe extern "C" fn($($ty),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
        }

        impl Table {
            fn load(library: *mut c_void, path: &Path) -> Result<Self, String> {
                let symbol = |name: &CStr| {
                    // SAFETY: an open library and a C string.
                    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
                    if symbol.is_null() {
                        return Err(format!("{} has no {}", path.display(), name.to_string_lossy()));
                    }
                    Ok(symbol)
                };
                Ok(Self {
                    $($field: {
                        let symbol = symbol($symbol)?;
                        // SAFETY: NCCL's function of this name has this type (nccl.h).
                        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_int>(symbol) }
                    },)*
                    error_string: {
                        let symbol = symbol(c"ncclGetErrorString")?;
                        // SAFETY: as above.
                        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> *const c_char>(symbol) }
                    },
                })
            }
        }
    };
}

functions! {
    unique_id = c"ncclGetUniqueId": fn(*mut RawUniqueId);
    init = c"ncclCommInitRank": fn(*mut Handle, c_int, RawUniqueId, c_int);
    destroy = c"ncclCommDestroy": fn(Handle);
    abort = c"ncclCommAbort": fn(Handle);
    async_error = c"ncclCommGetAsyncError": fn(Handle, *mut c_int);
    group_start = c"ncclGroupStart": fn();
    group_end = c"ncclGroupEnd": fn();
    create_operator = c"ncclRedOpCreatePreMulSum": fn(*mut c_int, *const c_void, c_int, c_int, Handle);
    destroy_operator = c"ncclRedOpDestroy": fn(c_int, Handle);
    all_reduce = c"ncclAllReduce": fn(Buffer, Buffer, usize, c_int, c_int, Handle, Handle);
    all_gather = c"ncclAllGather": fn(Buffer, Buffer, usize, c_int, Handle, Handle);
    reduce_scatter = c"ncclReduceScatter": fn(Buffer, Buffer, usize, c_int, c_int, Handle, Handle);
    broadcast = c"ncclBroadcast": fn(Buffer, Buffer, usize, c_int, c_int, Handle, Handle);
    reduce = c"ncclReduce": fn(Buffer, Buffer, usize, c_int, c_int, c_int, Handle, Handle);
    send = c"ncclSend": fn(Buffer, usize, c_int, c_int, Handle, Handle);
    receive = c"ncclRecv": fn(Buffer, usize, c_int, c_int, Handle, Handle);
}

/// The real NCCL, loaded on first use.
struct Library(Table);

fn library() -> Result<&'static Library, Failure> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let loaded = LIBRARY.get_or_init(|| {
        let path = config::real_nccl().ok_or_else(|| {
            "PRISM_REAL_NCCL does not name the real libnccl.so.2, which communicators of ranks that all run need on a \
             real device"
                .to_owned()
        })?;
        let name =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| "PRISM_REAL_NCCL has a zero byte".to_owned())?;
        // SAFETY: a C string; the library is never unloaded.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: dlerror gives null or a C string.
            let text = unsafe { libc::dlerror().as_ref() };
            // SAFETY: as above, not null.
            let text =
                text.map_or_else(String::new, |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
            return Err(format!("PRISM_REAL_NCCL={}: {text}", path.display()));
        }
        Table::load(library, &path).map(Library)
    });
    loaded.as_ref().map_err(|text| Failure::new(Code::InvalidUsage, text.clone()))
}

impl Library {
    fn check(&self, function: &str, code: c_int) -> Outcome {
        match Code::from_i32(code) {
            Code::Success => Ok(()),
            code => {
                // SAFETY: NCCL's text for any code is a C string that lives for ever.
                let text = unsafe { CStr::from_ptr((self.0.error_string)(code as c_int)) };
                Err(Failure::new(code, format!("{function} of the real NCCL: {}", text.to_string_lossy())))
            }
        }
    }
}

/// A real communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Real(usize);

impl Real {
    fn handle(self) -> Handle {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// Gives a new communicator a real one, if all its members run on real devices.
pub(crate) fn join(session: &Session, comm: Comm) -> Outcome {
    if !session.is_real() {
        return Ok(());
    }
    let answer = session.control(&Request::CommPeers { comm_id: comm.id() })?;
    let peers = CommPeersAnswer::decode(&answer)
        .map_err(|_| Failure::new(Code::InternalError, "the engine's answer about a communicator makes no sense"))?;
    if !peers.all_live {
        return Ok(());
    }
    let library = library()?;
    let id = if comm.rank() == 0 { publish_id(library, &peers.key)? } else { await_id(comm, &peers.key)? };
    let mut handle: Handle = core::ptr::null_mut();
    // SAFETY: `handle` is writable; the id came from this library.
    let code = unsafe { (library.0.init)(&raw mut handle, comm.nranks(), id, comm.rank()) };
    library.check("ncclCommInitRank", code)?;
    comm.set_real(Real(handle.expose_provenance()));
    Ok(())
}

fn path_of(key: &[u8; 16]) -> Result<PathBuf, Failure> {
    let session = config::session_path();
    let folder = session.as_deref().and_then(Path::parent);
    let folder = folder.ok_or_else(|| Failure::new(Code::InternalError, "the session has no directory"))?;
    let mut name = "nccl-".to_owned();
    for byte in key {
        // Writing to a string cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    Ok(folder.join(name))
}

fn publish_id(library: &Library, key: &[u8; 16]) -> Result<RawUniqueId, Failure> {
    let mut id = RawUniqueId([0; _]);
    // SAFETY: `id` is writable.
    library.check("ncclGetUniqueId", unsafe { (library.0.unique_id)(&raw mut id) })?;
    let path = path_of(key)?;
    let part = path.with_extension("part");
    let written = std::fs::write(&part, id.0).and_then(|()| std::fs::rename(&part, &path));
    written.map_err(|error| Failure::new(Code::SystemError, format!("{}: {error}", path.display())))?;
    Ok(id)
}

fn await_id(comm: Comm, key: &[u8; 16]) -> Result<RawUniqueId, Failure> {
    let path = path_of(key)?;
    let (start, id) = (Instant::now(), comm.id());
    loop {
        if let Ok(bytes) = std::fs::read(&path)
            && let Ok(bytes) = bytes.try_into()
        {
            return Ok(RawUniqueId(bytes));
        }
        if comm.is_interrupted_since(id) {
            return Err(Failure::again(Code::InvalidUsage));
        }
        if start.elapsed() > PATIENCE {
            let text = "the member with group rank 0 of a communicator has not come for ten minutes";
            return Err(Failure::new(Code::RemoteError, text));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Runs operations of real communicators, as one group of the real NCCL.
pub(crate) fn run(calls: &[(Comm, Call, Option<PreMul>)]) -> Outcome {
    let library = library()?;
    // SAFETY: takes nothing.
    library.check("ncclGroupStart", unsafe { (library.0.group_start)() })?;
    let issued = calls.iter().try_for_each(|(comm, call, operator)| match comm.real() {
        Some(real) => issue(library, (*comm, real), call, *operator),
        None => Err(Failure::new(Code::InvalidArgument, format!("{} : the communicator is gone", call.name))),
    });
    // SAFETY: as above. The group is ended whatever happened in it.
    let ended = library.check("ncclGroupEnd", unsafe { (library.0.group_end)() });
    issued.and(ended)
}

fn issue(library: &Library, (comm, real): (Comm, Real), call: &Call, operator: Option<PreMul>) -> Outcome {
    if let What::Collective(kind @ (Kind::AllToAll | Kind::Gather | Kind::Scatter)) = call.what {
        return messages_of(library, (comm, real), call, kind);
    }
    let Some(operator) = operator else { return issue_with(library, real, call, call.op) };
    let (mut number, value) = (
        0,
        match operator.scalar {
            Scalar::Value(value) => value,
            Scalar::Device(_) => 0,
        },
    );
    let (scalar, residence): (*const c_void, c_int) = match operator.scalar {
        Scalar::Value(_) => ((&raw const value).cast(), 1),
        Scalar::Device(address) => (core::ptr::with_exposed_provenance(address), 0),
    };
    // SAFETY: `number` is writable; the scalar is here, or where the program said.
    let code =
        unsafe { (library.0.create_operator)(&raw mut number, scalar, operator.dtype, residence, real.handle()) };
    library.check("ncclRedOpCreatePreMulSum", code)?;
    let issued = issue_with(library, real, call, number);
    // SAFETY: just made; NCCL keeps what it needs of it.
    issued.and(library.check("ncclRedOpDestroy", unsafe { (library.0.destroy_operator)(number, real.handle()) }))
}

/// All-to-alls, gathers and scatters are messages, as in NCCL itself (which has functions for them since 2.28).
fn messages_of(library: &Library, (comm, real): (Comm, Real), call: &Call, kind: Kind) -> Outcome {
    let bytes = data_type(call.dtype).map_or(0, |dtype| dtype.size_bytes() as usize) * call.count;
    let is_root = comm.rank() == call.root;
    let message = |what: What, address: usize, peer: c_int| {
        issue_with(library, real, &Call { what, recv: address, root: peer, ..*call }, call.op)
    };
    let peers = 0..comm.nranks();
    let part = |base: usize, peer: c_int| base + peer as usize * bytes;
    match kind {
        Kind::Gather => {
            message(What::Send, call.send, call.root)?;
            if !is_root {
                return Ok(());
            }
            peers.into_iter().try_for_each(|peer| message(What::Recv, part(call.recv, peer), peer))
        }
        Kind::Scatter => {
            if is_root {
                peers.into_iter().try_for_each(|peer| message(What::Send, part(call.send, peer), peer))?;
            }
            message(What::Recv, call.recv, call.root)
        }
        _ => peers.into_iter().try_for_each(|peer| {
            message(What::Send, part(call.send, peer), peer)?;
            message(What::Recv, part(call.recv, peer), peer)
        }),
    }
}

fn issue_with(library: &Library, real: Real, call: &Call, op: c_int) -> Outcome {
    let buffer = core::ptr::with_exposed_provenance_mut::<c_void>;
    let (send, recv) = (buffer(call.send), buffer(call.recv));
    let Call { count, dtype, root, stream, .. } = *call;
    let (comm, table) = (real.handle(), &library.0);
    // SAFETY: the program's own arguments, to the function it called.
    let code = unsafe {
        match call.what {
            What::Send => (table.send)(recv, count, dtype, root, comm, stream),
            What::Recv => (table.receive)(recv, count, dtype, root, comm, stream),
            What::Collective(Kind::AllReduce) => (table.all_reduce)(send, recv, count, dtype, op, comm, stream),
            What::Collective(Kind::AllGather) => (table.all_gather)(send, recv, count, dtype, comm, stream),
            What::Collective(Kind::ReduceScatter) => (table.reduce_scatter)(send, recv, count, dtype, op, comm, stream),
            What::Collective(Kind::Broadcast) => (table.broadcast)(send, recv, count, dtype, root, comm, stream),
            What::Collective(Kind::Reduce) => (table.reduce)(send, recv, count, dtype, op, root, comm, stream),
            What::Collective(Kind::AllToAll | Kind::Gather | Kind::Scatter) => {
                return Err(Failure::new(Code::InternalError, "an all-to-all consists of messages"));
            }
        }
    };
    library.check(call.name, code)
}

/// Ends a real communicator: waits for its operations, or not.
pub(crate) fn end(real: Real, is_abort: bool) -> Outcome {
    let library = library()?;
    // SAFETY: a live communicator of this library; it is not used again.
    unsafe {
        if is_abort {
            library.check("ncclCommAbort", (library.0.abort)(real.handle()))
        } else {
            library.check("ncclCommDestroy", (library.0.destroy)(real.handle()))
        }
    }
}

/// The state of a real communicator.
pub(crate) fn async_error(real: Real) -> Code {
    let Ok(library) = library() else { return Code::InternalError };
    let mut code = 0;
    // SAFETY: a live communicator of this library; `code` is writable.
    let asked = unsafe { (library.0.async_error)(real.handle(), &raw mut code) };
    Code::from_i32(if asked == 0 { code } else { asked })
}
