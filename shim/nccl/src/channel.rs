//! How members of a communicator that all run for real find each other and talk: sockets in the session's directory.
//!
//! Host device only. A member publishes its address in a file named after the communicator and its group rank, waits for the
//! others' files, connects to the members before it and accepts those after it. Children of a communicator know the
//! addresses already. Every wait looks at the communicator's abort flag, and a peer's death ends it.

use crate::abi::Code;
use crate::comm::Comm;
use crate::config;
use crate::guard::{Failure, tell};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often waits look at flags and files.
pub(crate) const LOOK: Duration = Duration::from_millis(20);
/// After waiting so long for members one line says so.
const TELL_AFTER: Duration = Duration::from_secs(10);
const FIRST_LOOK: Duration = Duration::from_micros(200);

/// Names a communicator; equal on all members.
pub(crate) type Key = [u64; 2];

/// The key of what `parent` (or a unique id) becomes by `step`.
pub(crate) fn derive_key(parent: &[u8], step: &[u8]) -> Key {
    // FNV-1a from two starting points.
    [0xcbf2_9ce4_8422_2325, 0x9e37_79b9_7f4a_7c15].map(|start: u64| {
        let bytes = parent.iter().chain(step);
        bytes.fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
    })
}

fn key_bytes(key: Key) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key[0].to_le_bytes());
    bytes[8..].copy_from_slice(&key[1].to_le_bytes());
    bytes
}

/// Where a member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Rank in the job.
    pub(crate) rank: u32,
    pub(crate) pid: u32,
}

/// Connections of a communicator to its other members.
pub(crate) struct Channel {
    key: Key,
    /// By group rank.
    addresses: Vec<Address>,
    rank: usize,
    /// By group rank; none to oneself.
    sockets: Vec<Option<UnixStream>>,
    /// Children made so far; equal on all members.
    num_children: AtomicU32,
    /// Held while operations run: one at a time.
    pub(crate) turn: Mutex<()>,
}

impl Channel {
    /// Ranks of the members in the job.
    pub(crate) fn members(&self) -> Vec<u32> {
        self.addresses.iter().map(|address| address.rank).collect()
    }

    /// Number of members.
    pub(crate) fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Group rank of this process.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The connection to another member.
    pub(crate) fn socket(&self, peer: usize) -> Option<&UnixStream> {
        self.sockets.get(peer)?.as_ref()
    }

    /// The key of the next child.
    pub(crate) fn child_key(&self, step: &[u8]) -> Key {
        let number = self.num_children.fetch_add(1, Ordering::Relaxed).to_le_bytes();
        derive_key(&key_bytes(self.key), &[number.as_slice(), step].concat())
    }

    /// What [`Self::child_key`] will answer next.
    pub(crate) fn next_child_key(&self, step: &[u8]) -> Key {
        let number = self.num_children.load(Ordering::Relaxed).to_le_bytes();
        derive_key(&key_bytes(self.key), &[number.as_slice(), step].concat())
    }

    /// Has the other members notice that nothing more will come. The addresses stay.
    pub(crate) fn shut_down(&self) {
        for socket in self.sockets.iter().flatten() {
            // A peer that is gone already needs not be told.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// An order in which all members of all communicators can take them one after another.
    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// The address of a member.
    pub(crate) fn address(&self, group_rank: usize) -> Option<Address> {
        self.addresses.get(group_rank).cloned()
    }
}

/// The process's own socket, and connections that nobody here has asked for yet.
struct Hub {
    directory: PathBuf,
    own: Address,
    listener: UnixListener,
    waiting: Mutex<Vec<(Key, u32, UnixStream)>>,
}

/// Never freed; a forked child makes its own.
static HUB: AtomicPtr<Hub> = AtomicPtr::new(core::ptr::null_mut());
static OPENING: Mutex<()> = Mutex::new(());

/// Forgets the parent's socket. Async-signal-safe.
pub(crate) fn forget_all() {
    HUB.store(core::ptr::null_mut(), Ordering::Release);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[allow(clippy::needless_pass_by_value, reason = "used as map_err's argument")]
fn system(error: std::io::Error, what: &str) -> Failure {
    Failure::new(Code::SystemError, format!("{what}: {error}"))
}

fn hub() -> Result<&'static Hub, Failure> {
    // SAFETY: only ever set to a leaked box.
    if let Some(hub) = unsafe { HUB.load(Ordering::Acquire).as_ref() } {
        return Ok(hub);
    }
    let _opening = lock(&OPENING);
    // SAFETY: as above.
    if let Some(hub) = unsafe { HUB.load(Ordering::Acquire).as_ref() } {
        return Ok(hub);
    }
    let hub: &'static Hub = Box::leak(Box::new(Hub::open()?));
    HUB.store(core::ptr::from_ref(hub).cast_mut(), Ordering::Release);
    Ok(hub)
}

impl Hub {
    fn open() -> Result<Self, Failure> {
        let no_session = || Failure::new(Code::SystemError, "no session directory");
        let directory =
            config::session_path().and_then(|path| Some(path.parent()?.to_owned())).ok_or_else(no_session)?;
        let own = Address { rank: config::rank().ok_or_else(no_session)?, pid: std::process::id() };
        let path = socket_path(&directory, &own);
        // Of an earlier process with our pid.
        let _ = std::fs::remove_file(&path);
        let what = "cannot listen for other ranks";
        let listener = UnixListener::bind(path).map_err(|error| system(error, what))?;
        listener.set_nonblocking(true).map_err(|error| system(error, what))?;
        Ok(Self { directory, own, listener, waiting: Mutex::default() })
    }

    /// Takes in new connections and hands out the one of that member, if it is there.
    fn accepted(&self, key: Key, group_rank: usize) -> Option<UnixStream> {
        let mut waiting = lock(&self.waiting);
        while let Ok((mut stream, _)) = self.listener.accept() {
            let mut hello = [0; 20];
            // Written in one piece before the peer does anything else.
            let is_told = stream.set_read_timeout(Some(Duration::from_secs(1))).is_ok()
                && stream.read_exact(&mut hello).is_ok()
                && stream.set_nonblocking(true).is_ok();
            if is_told {
                let word = |at: usize| u64::from_le_bytes(hello[at..at + 8].try_into().expect("eight bytes"));
                let from = u32::from_le_bytes(hello[16..].try_into().expect("four bytes"));
                waiting.push(([word(0), word(8)], from, stream));
            }
        }
        let at = waiting.iter().position(|(other, from, _)| *other == key && *from as usize == group_rank)?;
        Some(waiting.swap_remove(at).2)
    }
}

fn socket_path(directory: &Path, address: &Address) -> PathBuf {
    directory.join(format!("n{}-{}", address.rank, address.pid))
}

/// Waits a little longer each time; an error when the communicator is aborted meanwhile.
struct Patience {
    comm: Comm,
    comm_id: u32,
    next: Duration,
    waited: Duration,
    has_told: bool,
}

impl Patience {
    fn new(comm: Comm) -> Self {
        Self { comm, comm_id: comm.id(), next: FIRST_LOOK, waited: Duration::ZERO, has_told: false }
    }

    fn wait(&mut self) -> Result<(), Failure> {
        if self.comm.is_interrupted_since(self.comm_id) {
            return Err(interrupted());
        }
        if self.waited > TELL_AFTER && !self.has_told {
            self.has_told = true;
            tell(&format!("still waiting for other members of a communicator of {} ranks", self.comm.nranks()));
        }
        std::thread::sleep(self.next);
        self.waited += self.next;
        self.next = (self.next * 2).min(LOOK);
        Ok(())
    }
}

/// What an operation answers whose communicator was aborted under it.
#[cold]
pub(crate) fn interrupted() -> Failure {
    Failure::new(Code::InternalError, "the communicator was aborted or revoked while the call waited for other ranks")
}

/// Joins the communicator with this key as `rank` of `nranks`; waits until all members have.
pub(crate) fn join(comm: Comm, key: Key, nranks: usize, rank: usize) -> Result<Channel, Failure> {
    let addresses = meet(comm, key, nranks, rank)?;
    connect(comm, key, addresses, rank)
}

/// The addresses of all members of the communicator with this key, once all have come.
pub(crate) fn meet(comm: Comm, key: Key, nranks: usize, rank: usize) -> Result<Vec<Address>, Failure> {
    let hub = hub()?;
    let folder = hub.directory.join(format!("c{:016x}{:016x}", key[0], key[1]));
    publish(hub, &folder, nranks, rank)?;
    let mut addresses = Vec::with_capacity(nranks);
    let mut patience = Patience::new(comm);
    while addresses.len() < nranks {
        match read_member(&folder, addresses.len(), nranks)? {
            Some(address) => addresses.push(address),
            None => patience.wait()?,
        }
    }
    if let Some(twice) = addresses.iter().enumerate().find(|(at, one)| addresses[..*at].contains(one)) {
        let text = format!("rank {} joined a communicator as two of its members", twice.1.rank);
        return Err(Failure::new(Code::InvalidUsage, text));
    }
    Ok(addresses)
}

fn publish(hub: &Hub, folder: &Path, nranks: usize, rank: usize) -> Result<(), Failure> {
    let what = "cannot meet the other ranks";
    std::fs::create_dir_all(folder).map_err(|error| system(error, what))?;
    let draft = folder.join(format!("draft-{}-{rank}", hub.own.pid));
    let text = format!("{} {} {nranks}", hub.own.rank, hub.own.pid);
    std::fs::write(&draft, text).map_err(|error| system(error, what))?;
    // A link appears complete or not at all, and never replaces another.
    let linked = std::fs::hard_link(&draft, folder.join(rank.to_string()));
    let _ = std::fs::remove_file(&draft);
    match linked {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Failure::new(
            Code::InvalidUsage,
            format!("rank {rank} of {nranks} was given to two processes, or a unique id was used twice"),
        )),
        other => other.map_err(|error| system(error, what)),
    }
}

fn read_member(folder: &Path, group_rank: usize, nranks: usize) -> Result<Option<Address>, Failure> {
    let text = match std::fs::read_to_string(folder.join(group_rank.to_string())) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(system(error, "cannot meet the other ranks")),
    };
    let numbers: Vec<u32> = text.split(' ').filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [rank, pid, theirs] if theirs as usize == nranks => Ok(Some(Address { rank, pid })),
        [rank, _, theirs] => Err(Failure::new(
            Code::InvalidUsage,
            format!("rank {rank} makes a communicator of {theirs} ranks where this one makes it of {nranks}"),
        )),
        _ => Err(Failure::new(Code::InternalError, "a member's address makes no sense")),
    }
}

/// Connects to all other members, whose addresses are known.
pub(crate) fn connect(comm: Comm, key: Key, addresses: Vec<Address>, rank: usize) -> Result<Channel, Failure> {
    let hub = hub()?;
    let mut sockets = Vec::with_capacity(addresses.len());
    for (peer, address) in addresses.iter().enumerate() {
        sockets.push(match peer.cmp(&rank) {
            core::cmp::Ordering::Less => Some(call(comm, hub, key, address, rank)?),
            core::cmp::Ordering::Equal => None,
            core::cmp::Ordering::Greater => Some(await_call(comm, hub, key, peer)?),
        });
    }
    Ok(Channel { key, addresses, rank, sockets, num_children: AtomicU32::new(0), turn: Mutex::new(()) })
}

fn call(comm: Comm, hub: &Hub, key: Key, address: &Address, rank: usize) -> Result<UnixStream, Failure> {
    let path = socket_path(&hub.directory, address);
    let mut patience = Patience::new(comm);
    loop {
        match UnixStream::connect(&path) {
            Ok(mut stream) => {
                let mut hello = key_bytes(key).to_vec();
                hello.extend((rank as u32).to_le_bytes());
                let greeted = stream.write_all(&hello).and_then(|()| stream.set_nonblocking(true));
                return greeted.map(|()| stream).map_err(|error| gone(address, &error));
            }
            // The queue of connections is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => patience.wait()?,
            Err(error) => return Err(gone(address, &error)),
        }
    }
}

fn await_call(comm: Comm, hub: &Hub, key: Key, peer: usize) -> Result<UnixStream, Failure> {
    let mut patience = Patience::new(comm);
    loop {
        if let Some(stream) = hub.accepted(key, peer) {
            return Ok(stream);
        }
        patience.wait()?;
    }
}

fn gone(address: &Address, error: &std::io::Error) -> Failure {
    Failure::new(Code::RemoteError, format!("rank {} is gone: {error}", address.rank))
}
