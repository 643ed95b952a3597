//! A scripted training rank: speaks to a session exactly as the preloaded libraries do, with a host clock of its own.

use super::store::Store;
use prism_engine::hybrid::Session;
use prism_wire::client::{Client, ConnectError, ControlError};
use prism_wire::control::{UNIQUE_ID_BYTES, UNIQUE_ID_LOCAL_MAGIC};
use prism_wire::frame::{CommSplitAnswer, DeviceMode, Hello, NamedGroup, Request};
use prism_wire::message::{
    CollectiveKind, DataType, FLAG_BACKGROUND, MarkerKind, Record, RecordKind, ReduceOp, Reply, ReplyStatus,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Host time of a call that only enqueues.
const CALL_NS: i64 = 2_000;
/// Host time of a synchronisation after its wait.
const SYNC_NS: i64 = 1_000;

/// Why a rank stopped playing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The session did not let it in, or refused a request.
    Refused(String),
    /// A query was answered with a failure.
    Failed,
    /// The session is gone.
    Disconnected,
}

pub(crate) type Played<T = ()> = Result<T, Stop>;

impl From<ControlError> for Stop {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Refused(text) => Self::Refused(text),
            ControlError::Disconnected => Self::Disconnected,
        }
    }
}

/// A communicator of the player.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comm(pub(crate) u32);

/// A source of small real pauses, to move the threads of a session against each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Jitter(pub(crate) u64);

impl Jitter {
    fn pause(&mut self) {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        if self.0.is_multiple_of(6) {
            std::thread::sleep(Duration::from_micros(self.0 >> 8 & 0x1ff));
        }
    }
}

/// See the module's documentation.
pub(crate) struct Player {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Any thread of the process may use it.
    pub(crate) client: Arc<Client>,
    pub(crate) session: Arc<Session>,
    pub(crate) store: Arc<Store>,
    pub(crate) jitter: Option<Jitter>,
    /// Virtual host clock, ns.
    pub(crate) host: i64,
    groups: BTreeMap<String, Vec<u32>>,
    names: BTreeMap<String, u32>,
    num_comms: u32,
    num_ids: u32,
    ordinal: u32,
    open_group: u32,
}

impl Player {
    pub(crate) fn connect(
        socket: &Path,
        rank: u32,
        world: u32,
        session: Arc<Session>,
        store: Arc<Store>,
    ) -> Played<Self> {
        let client =
            Client::connect(socket, &Hello::new(rank, world, DeviceMode::Emulated)).map_err(|error| match error {
                ConnectError::Refused(text) => Stop::Refused(text),
                other => panic!("{other}"),
            })?;
        Ok(Self {
            rank,
            world,
            client: Arc::new(client),
            session,
            store,
            jitter: None,
            host: 0,
            groups: BTreeMap::new(),
            names: BTreeMap::new(),
            num_comms: 0,
            num_ids: 0,
            ordinal: 0,
            open_group: 0,
        })
    }

    // ---- requests ----

    pub(crate) fn request(&mut self, request: &Request) -> Played<Vec<u8>> {
        let (kind, payload) = request.encode();
        Ok(self.client.control(kind, &payload)?)
    }

    /// The framework hook tells a process group; the first one is the default group.
    pub(crate) fn group(&mut self, name: &str, ranks: impl IntoIterator<Item = u32>) -> Played {
        let ranks: Vec<u32> = ranks.into_iter().collect();
        let name = name.to_owned();
        if ranks.contains(&self.rank) {
            self.groups.insert(name.clone(), ranks.clone());
            self.request(&Request::Group { ranks, name })?;
        } else {
            self.request(&Request::Groups(vec![NamedGroup { ranks, name }]))?;
        }
        Ok(())
    }

    /// Group rank in a group told before.
    pub(crate) fn group_rank(&self, name: &str) -> u32 {
        self.groups[name].iter().position(|rank| *rank == self.rank).expect("a member") as u32
    }

    fn name(&mut self, text: &str) -> Played<u32> {
        if let Some(id) = self.names.get(text) {
            return Ok(*id);
        }
        let id = self.names.len() as u32 + 1;
        self.request(&Request::Name { id, text: text.to_owned() })?;
        self.names.insert(text.to_owned(), id);
        Ok(id)
    }

    pub(crate) fn make_unique_id(&mut self) -> [u8; UNIQUE_ID_BYTES] {
        self.num_ids += 1;
        let mut id = [0; UNIQUE_ID_BYTES];
        id[..8].copy_from_slice(UNIQUE_ID_LOCAL_MAGIC);
        id[8..12].copy_from_slice(&self.rank.to_le_bytes());
        id[12..16].copy_from_slice(&self.num_ids.to_le_bytes());
        id
    }

    pub(crate) fn comm_init(&mut self, nranks: u32, group_rank: u32, unique_id: [u8; UNIQUE_ID_BYTES]) -> Played<Comm> {
        let comm_id = self.num_comms + 1;
        self.request(&Request::CommInit { comm_id, nranks, group_rank, unique_id })?;
        self.num_comms = comm_id;
        Ok(Comm(comm_id))
    }

    /// The communicator of a process group (the default group has the key without a name), as torch makes it: the root
    /// sets the id and goes on with its own bytes, the others get what the store has.
    pub(crate) fn comm(&mut self, group: &str) -> Played<Comm> {
        let members = self.groups[group].clone();
        let id = self.exchange(&group_key(group, "0"), members[0]);
        self.comm_init(members.len() as u32, self.group_rank(group), id)
    }

    /// The communicator of two members of a group for messages.
    pub(crate) fn pair(&mut self, group: &str, partner: u32) -> Played<Comm> {
        let own = self.group_rank(group);
        let (lo, hi) = (own.min(partner), own.max(partner));
        let root = self.groups[group][lo as usize];
        let id = self.exchange(&group_key(group, &format!("{lo}:{hi}")), root);
        self.comm_init(2, u32::from(own == hi), id)
    }

    /// A unique id by way of the store.
    pub(crate) fn exchange(&mut self, key: &str, root: u32) -> [u8; UNIQUE_ID_BYTES] {
        if root == self.rank {
            let id = self.make_unique_id();
            self.store.set(&self.session, key, &id);
            return id;
        }
        self.store.get(&self.session, key, root).try_into().expect("an id")
    }

    pub(crate) fn split(&mut self, parent: Comm, color: i32, group: &str) -> Played<(Comm, CommSplitAnswer)> {
        let comm_id = self.num_comms + 1;
        let request = Request::CommSplit { comm_id, parent: parent.0, color, key: 0, group_name: group.to_owned() };
        let answer = CommSplitAnswer::decode(&self.request(&request)?).expect("two numbers");
        self.num_comms = comm_id;
        Ok((Comm(comm_id), answer))
    }

    // ---- records ----

    /// Appends a record after `cost_ns` of host time.
    pub(crate) fn append(&mut self, mut record: Record, cost_ns: i64) -> Played {
        if let Some(jitter) = &mut self.jitter {
            jitter.pause();
        }
        self.host += cost_ns;
        record.host_ns = self.host;
        self.client.append(&record).map_err(|_| Stop::Disconnected)
    }

    /// Asks and goes on at the answer's time.
    pub(crate) fn ask(&mut self, record: Record) -> Played<Reply> {
        let reply = self.ask_with(record, 0)?;
        self.host = reply.host_ns + SYNC_NS;
        Ok(reply)
    }

    /// Asks as a thread that does not drive the device.
    pub(crate) fn ask_in_background(&mut self, record: Record) -> Played<Reply> {
        self.ask_with(record, FLAG_BACKGROUND)
    }

    fn ask_with(&mut self, mut record: Record, flags: u16) -> Played<Reply> {
        if let Some(jitter) = &mut self.jitter {
            jitter.pause();
        }
        record.host_ns = self.host;
        record.flags |= flags;
        query(&self.client, record)
    }

    pub(crate) fn idle(&mut self, ns: i64) {
        self.host += ns;
    }

    pub(crate) fn kernel(&mut self, stream: u32, name: &str, blocks: u32) -> Played {
        let e = self.name(name)?;
        let (a, b) = (u64::from(blocks) | 1 << 32, 1 | 256 << 32);
        self.append(Record { stream, a, b, e, ..record(RecordKind::Kernel) }, CALL_NS)
    }

    pub(crate) fn gemm(&mut self, stream: u32, name: &str, n: u64) -> Played {
        let (e, f) = (self.name(name)?, DataType::Bfloat16 as u32);
        let record = Record { stream, a: n, b: n, c: n, d: 1, e, f, g: f, ..record(RecordKind::Gemm) };
        self.append(record, CALL_NS)
    }

    /// A copy: direction 1 to the device, 2 back.
    pub(crate) fn copy(&mut self, stream: u32, bytes: u64, direction: u64) -> Played {
        self.append(Record { stream, a: bytes, b: direction, c: 1, ..record(RecordKind::Memcpy) }, CALL_NS)
    }

    pub(crate) fn record_event(&mut self, stream: u32, event: u32) -> Played {
        self.append(Record { stream, e: event, ..record(RecordKind::EventRecord) }, CALL_NS)
    }

    pub(crate) fn wait_event(&mut self, stream: u32, event: u32) -> Played {
        self.append(Record { stream, e: event, ..record(RecordKind::EventWait) }, CALL_NS)
    }

    pub(crate) fn collective(&mut self, stream: u32, comm: Comm, kind: CollectiveKind, count: u64) -> Played {
        let f = kind as u32 | (DataType::Bfloat16 as u32) << 8 | (ReduceOp::Sum as u32) << 16;
        let record = Record { stream, a: count, e: comm.0, f, h: self.open_group, ..record(RecordKind::Collective) };
        self.append(record, CALL_NS)
    }

    pub(crate) fn all_reduce(&mut self, stream: u32, comm: Comm, count: u64) -> Played {
        self.collective(stream, comm, CollectiveKind::AllReduce, count)
    }

    pub(crate) fn message(&mut self, stream: u32, comm: Comm, is_send: bool, peer: u32, count: u64) -> Played {
        let kind = if is_send { RecordKind::Send } else { RecordKind::Recv };
        let f = (DataType::Bfloat16 as u32) << 8;
        let record = Record { stream, a: count, e: comm.0, f, g: peer, h: self.open_group, ..record(kind) };
        self.append(record, CALL_NS)
    }

    pub(crate) fn group_start(&mut self) {
        self.ordinal += 1;
        self.open_group = self.ordinal;
    }

    pub(crate) fn group_end(&mut self) -> Played {
        let h = std::mem::take(&mut self.open_group);
        self.append(Record { h, ..record(RecordKind::GroupEnd) }, CALL_NS)
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> Played {
        self.append(Record { a: bytes, ..record(RecordKind::Alloc) }, CALL_NS)
    }

    pub(crate) fn free(&mut self, bytes: u64) -> Played {
        self.append(Record { a: bytes, ..record(RecordKind::Free) }, CALL_NS)
    }

    pub(crate) fn memory_stats(&mut self, allocated: u64, reserved: u64) -> Played {
        self.append(Record { a: allocated, b: reserved, ..record(RecordKind::MemoryStats) }, 0)
    }

    pub(crate) fn training_begin(&mut self) -> Played {
        self.append(Record { e: MarkerKind::TrainingBegin as u32, ..record(RecordKind::Marker) }, 0)
    }

    pub(crate) fn iteration_end(&mut self) -> Played {
        self.append(Record { e: MarkerKind::IterationEnd as u32, ..record(RecordKind::Marker) }, 0)
    }

    // ---- queries ----

    pub(crate) fn sync_stream(&mut self, stream: u32) -> Played<Reply> {
        self.ask(Record { stream, ..record(RecordKind::StreamSync) })
    }

    pub(crate) fn sync_event(&mut self, event: u32) -> Played<Reply> {
        self.ask(Record { e: event, ..record(RecordKind::EventSync) })
    }

    pub(crate) fn sync_device(&mut self) -> Played<Reply> {
        self.ask(record(RecordKind::DeviceSync))
    }

    pub(crate) fn is_done(&mut self, event: u32) -> Played<bool> {
        Ok(self.ask(event_query(event))?.value == 1)
    }

    pub(crate) fn elapsed_ns(&mut self, from: u32, to: u32) -> Played<i64> {
        Ok(self.ask(Record { e: from, f: to, ..record(RecordKind::EventElapsed) })?.value)
    }
}

pub(crate) fn query(client: &Client, record: Record) -> Played<Reply> {
    let reply = client.query(record).map_err(|_| Stop::Disconnected)?;
    if reply.status == ReplyStatus::Ok as u32 { Ok(reply) } else { Err(Stop::Failed) }
}

pub(crate) fn record(kind: RecordKind) -> Record {
    Record { kind: kind as u16, ..Record::default() }
}

pub(crate) fn event_query(event: u32) -> Record {
    Record { e: event, ..record(RecordKind::EventQuery) }
}

/// The store key under which torch passes an NCCL id.
pub(crate) fn group_key(group: &str, suffix: &str) -> String {
    if group.is_empty() {
        format!("default_pg/0//cuda//{suffix}")
    } else {
        format!("default_pg/0//{group}//cuda//{suffix}")
    }
}
