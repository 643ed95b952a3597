//! The system calls this crate needs and `std` lacks.
//!
//! Sleeping and polling go straight to the kernel: the program's own `poll`, `nanosleep` and clocks may be replaced by
//! ones that follow the virtual clock, and a wait of the session must take real time.

use crate::sync::AtomicU32;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Turns the `-1` of a system call into its error.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Turns the descriptor a system call returned into an owned one.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel just returned this descriptor to us, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn timespec(timeout: Duration) -> libc::timespec {
    let seconds = libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX);
    libc::timespec { tv_sec: seconds, tv_nsec: libc::c_long::from(timeout.subsec_nanos()) }
}

/// Sleeps while `word` holds `expected`, at most `timeout`. Returns early on signals and wake-ups.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = timespec(timeout);
    // SAFETY: `word` and `timeout` are live for the whole call; the kernel only reads them. The word may lie in a shared
    // mapping, hence no FUTEX_PRIVATE_FLAG. Every error (changed value, signal, timeout) means: look again.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout);
    }
}

/// Wakes every sleeper of `word` in every process.
pub(crate) fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses the address of the live word as a key and does not touch memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}

/// What `poll` found: one bit set per descriptor, 0 where nothing happened. `None` waits for ever.
pub(crate) fn poll<const N: usize>(fds: [(RawFd, i16); N], timeout: Option<Duration>) -> io::Result<[i16; N]> {
    let mut polled = fds.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    let timeout = timeout.map(timespec);
    let timeout_ptr = timeout.as_ref().map_or(std::ptr::null(), |timeout| &raw const *timeout);
    // SAFETY: `polled` holds N initialised entries and the timeout is null or live; no signal mask is passed.
    let result = unsafe {
        libc::syscall(libc::SYS_ppoll, polled.as_mut_ptr(), N, timeout_ptr, std::ptr::null::<libc::sigset_t>(), 0usize)
    };
    match check(result) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([0; N]),
        Err(error) => Err(error),
        Ok(_) => Ok(polled.map(|entry| entry.revents)),
    }
}

/// Number of CPUs this process may run on.
pub(crate) fn num_cpus() -> usize {
    // SAFETY: an all-zero cpu_set_t is a valid empty set, and the kernel fills at most its size.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return 1;
        }
        usize::try_from(libc::CPU_COUNT(&set)).unwrap_or(1)
    }
}

/// Lets another thread run.
pub(crate) fn yield_now() {
    // SAFETY: takes no arguments and always succeeds.
    unsafe {
        libc::sched_yield();
    }
}

/// Process id and user of the process at the other end of a socket.
pub(crate) fn peer_credentials(socket: &UnixStream) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option's value is a ucred and the buffer is exactly one.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut bytes,
        )
    };
    check(result.into()).map(|_| credentials)
}

/// A descriptor that becomes readable when process `pid` ends.
pub(crate) fn pidfd_open(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers. The descriptor is close-on-exec by definition.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Anonymous shared memory of a size that nobody can change any more.
pub(crate) fn sealed_memory(bytes: usize) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a NUL-terminated literal.
    let memory = owned(unsafe { libc::memfd_create(c"prism-session".as_ptr(), flags) }.into())?;
    let size = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: plain calls on a descriptor we own.
    unsafe {
        check(libc::ftruncate(memory.as_raw_fd(), size).into())?;
        check(libc::fcntl(memory.as_raw_fd(), libc::F_ADD_SEALS, SEALS).into())?;
    }
    Ok(memory)
}

/// Size of shared memory that cannot be cut, or `None` where the descriptor gives no such promise: a mapping of it could
/// fault at any time.
pub(crate) fn sealed_size(memory: &OwnedFd) -> io::Result<Option<usize>> {
    // SAFETY: plain calls on a live descriptor; `stat` is large enough and zero is a valid value of it.
    unsafe {
        let seals = libc::fcntl(memory.as_raw_fd(), libc::F_GET_SEALS);
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Ok(None);
        }
        let mut stat: libc::stat = zeroed();
        check(libc::fstat(memory.as_raw_fd(), &raw mut stat).into())?;
        Ok(usize::try_from(stat.st_size).ok())
    }
}

/// A mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: std::ptr::NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory owned by this value; what is done with its contents is its users' affair.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of shared memory, readable and writable.
    pub(crate) fn shared(memory: &OwnedFd, bytes: usize, populate: bool) -> io::Result<Self> {
        let populate = if populate { libc::MAP_POPULATE } else { 0 };
        Self::new(bytes, libc::MAP_SHARED | populate, memory.as_raw_fd())
    }

    /// Maps fresh zeroed memory of this process alone.
    pub(crate) fn private(bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn new(bytes: usize, flags: libc::c_int, fd: RawFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = std::ptr::NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    /// Asks the kernel to zero the mapping in every child of this process.
    pub(crate) fn wipe_on_fork(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping.
        let result = unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, libc::MADV_WIPEONFORK) };
        check(result.into()).map(|_| ())
    }

    /// First byte; page aligned.
    pub(crate) fn base(&self) -> std::ptr::NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly what mmap returned, and references into it borrow from `self`.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

/// Bytes of a control message that carries one descriptor.
const CONTROL_BYTES: usize = 64;

/// Aligned space for a control message.
#[repr(C, align(16))]
struct ControlSpace([u8; CONTROL_BYTES]);

const FD_BYTES: u32 = size_of::<RawFd>() as u32;

/// Sends as much of `bytes` as fits, never raising SIGPIPE and never blocking; with `fd` beside the first byte.
pub(crate) fn send(socket: RawFd, bytes: &[u8], fd: Option<RawFd>) -> io::Result<usize> {
    let mut space = ControlSpace([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all of msghdr may be zero; its pointers are to locals (and `bytes`) that outlive the call. The kernel
    // does not write through `iov_base` when sending. CMSG_FIRSTHDR lies in `space`, which has room for one descriptor.
    let sent = unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if let Some(fd) = fd {
            message.msg_control = space.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(FD_BYTES) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(FD_BYTES) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    check(sent as libc::c_long).map(|sent| sent as usize)
}

/// Receives what is there, without blocking, and the first descriptor that comes with it (others are closed).
pub(crate) fn receive(socket: RawFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = ControlSpace([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: as in `send`; the kernel writes at most `bytes.len()` bytes and `CONTROL_BYTES` of control data, and the
    // headers it wrote are walked with the macros made for that. Each descriptor in them is new and ours.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        let received = libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
        let received = check(received as libc::c_long)?;
        let mut first = None;
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data_bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header);
                for index in 0..data_bytes / size_of::<RawFd>() {
                    let fd =
                        OwnedFd::from_raw_fd(data.add(index * size_of::<RawFd>()).cast::<RawFd>().read_unaligned());
                    first.get_or_insert(fd);
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        Ok((received as usize, first))
    }
}

/// Ends both directions of a socket, for every process that has it.
pub(crate) fn shutdown(socket: RawFd) {
    // SAFETY: a plain call; an error means that it is closed already.
    unsafe {
        libc::shutdown(socket, libc::SHUT_RDWR);
    }
}
