//! Real values where not all members of a communicator run at once (host device): some are virtual, or ranks take turns.
//!
//! A member leaves what it contributes in a file of the session's directory, tells the engine, and waits there for the
//! others' files; while it waits its turn is free (`prism_engine::hybrid`). What virtual members contribute is mirrored
//! (tier T1) or comes from the user's rules (T2); what nobody can tell leaves the buffer as it is (T0). Between members that
//! run, every value is exact: live, or, with turns, T3.

mod run;

use crate::abi::Code;
use crate::collective::copy;
use crate::comm::Comm;
use crate::config;
use crate::exchange::{HEADER_BYTES, MESSAGE, SPLIT, Tag, mismatch};
use crate::group::Message;
use crate::guard::{Failure, Outcome};
use crate::notes::Tier;
use crate::session::Session;
use crate::values::Payload;
use prism_wire::control::{Contribution, KIND_RECEIVE, KIND_SPLIT};
use prism_wire::frame::ValuesRequest;
use prism_wire::message::CollectiveKind;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// How a communicator exchanges through files.
pub(crate) struct Shares {
    /// The engine's number of the communicator.
    exchange: u32,
    rank: u32,
    nranks: u32,
    /// Group ranks of the members that run, this one among them.
    live: Vec<u32>,
    directory: PathBuf,
    has_turns: bool,
    counters: Mutex<Counters>,
}

/// Operations so far.
#[derive(Default)]
struct Counters {
    collectives: u64,
    sent: BTreeMap<u32, u64>,
    received: BTreeMap<u32, u64>,
}

/// What the user's rules say of virtual members.
enum Said {
    NoRule,
    Mirror,
    Shape,
    Rows(Vec<u8>),
}

/// Gives a communicator its exchange, if it needs one: some members run here and now, and not all of them side by side.
pub(crate) fn attach(session: &Session, comm: Comm) -> Outcome {
    if !session.may_exchange() || comm.nranks() < 2 {
        return Ok(());
    }
    let (exchange, live) = session.exchange_of(comm.id())?;
    if live.len() < 2 && !session.has_rules() {
        return Ok(());
    }
    let missing = || Failure::new(Code::SystemError, "no session directory");
    let directory = config::session_path().and_then(|path| Some(path.parent()?.to_owned())).ok_or_else(missing)?;
    comm.set_shares(Shares {
        exchange,
        rank: comm.rank() as u32,
        nranks: comm.nranks() as u32,
        live,
        directory,
        has_turns: session.has_turns(),
        counters: Mutex::default(),
    });
    Ok(())
}

/// What an operation is.
enum What {
    Collective(Payload),
    Send(Message),
    Receive(Message),
    /// Colour and key.
    Split([i32; 2]),
}

/// One operation of a communicator with an exchange.
pub(crate) struct Share {
    comm: Comm,
    comm_id: u32,
    shares: Arc<Shares>,
    number: u64,
    what: What,
}

impl Shares {
    /// Do all members run?
    pub(crate) fn is_complete(&self) -> bool {
        self.live.len() == self.nranks as usize
    }

    fn is_live(&self, group_rank: u32) -> bool {
        self.live.binary_search(&group_rank).is_ok()
    }

    fn others(&self) -> impl Iterator<Item = u32> + '_ {
        self.live.iter().copied().filter(|peer| *peer != self.rank)
    }

    /// Virtual members in group-rank order.
    fn absent(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.nranks).filter(|member| !self.is_live(*member))
    }

    fn count(&self, pick: impl FnOnce(&mut Counters) -> &mut u64) -> u64 {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let counter = pick(&mut counters);
        *counter += 1;
        *counter - 1
    }

    fn of(&self, from: u32, number: u64) -> Contribution {
        Contribution { exchange: self.exchange, from, number, readers: 0 }
    }

    /// Reads bytes of a contribution, from `offset` on, to `address`.
    fn read(&self, contribution: &Contribution, offset: usize, address: usize, bytes: usize) -> Outcome {
        let path = self.directory.join(contribution.file_name());
        let to = core::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: writable for `bytes`: our own buffer, or what the caller of NCCL gave for receiving.
        let to = unsafe { core::slice::from_raw_parts_mut(to, bytes) };
        let read = File::open(path).and_then(|file| file.read_exact_at(to, (HEADER_BYTES + offset) as u64));
        read.map_err(|error| lost("cannot read what another rank contributed", &error))
    }

    /// A contribution must be of the operation that this rank calls.
    fn check(&self, contribution: &Contribution, wanted: [u8; HEADER_BYTES]) -> Outcome {
        let mut header = [0; HEADER_BYTES];
        let path = self.directory.join(contribution.file_name());
        let read = File::open(path).and_then(|file| file.read_exact_at(&mut header, 0));
        read.map_err(|error| lost("cannot read what another rank contributed", &error))?;
        if header == wanted { Ok(()) } else { Err(mismatch(contribution.from as usize, &header, &wanted)) }
    }
}

#[cold]
fn lost(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(Code::SystemError, format!("{what}: {error}"))
}

impl Share {
    /// An operation that has just been launched; none where nothing is exchanged.
    pub(crate) fn new(
        comm: Comm,
        comm_id: u32,
        shares: Arc<Shares>,
        payload: Option<Payload>,
        message: Option<Message>,
    ) -> Option<Self> {
        let (what, number) = match (payload, message) {
            (Some(payload), _) => (What::Collective(payload), shares.count(|counters| &mut counters.collectives)),
            (None, Some(message)) if message.is_to_self || message.bytes == 0 => return None,
            (None, Some(message)) if message.is_send => {
                let k = shares.count(|counters| counters.sent.entry(message.peer).or_default());
                (What::Send(message), Contribution::message(message.peer, k))
            }
            (None, Some(message)) => {
                let k = shares.count(|counters| counters.received.entry(message.peer).or_default());
                (What::Receive(message), Contribution::message(shares.rank, k))
            }
            (None, None) => return None,
        };
        Some(Self { comm, comm_id, shares, number, what })
    }

    /// Colour and key of a split.
    pub(crate) fn split(comm: Comm, shares: Arc<Shares>, choice: [i32; 2]) -> Self {
        let number = shares.count(|counters| &mut counters.collectives);
        Self { comm, comm_id: comm.id(), shares, number, what: What::Split(choice) }
    }

    pub(crate) fn is_message(&self) -> bool {
        matches!(self.what, What::Send(_) | What::Receive(_))
    }

    fn tag(&self) -> Tag {
        match &self.what {
            What::Collective(payload) => Tag::of(payload),
            What::Send(message) | What::Receive(message) => {
                Tag { kind: MESSAGE, dtype: 0, op: 0, root: 0, count: message.bytes }
            }
            What::Split(_) => Tag { kind: SPLIT, dtype: 0, op: 0, root: 0, count: 0 },
        }
    }

    /// What lies before the data in the file, equal for all members.
    fn header(&self) -> [u8; HEADER_BYTES] {
        let tag = self.tag();
        tag.header(if tag.kind == MESSAGE { tag.count as usize } else { 0 })
    }

    /// Bytes this rank gives to others: where, how many, and how many members read them.
    fn own(&self) -> (usize, usize, u32) {
        let everybody = self.shares.live.len() as u32 - 1;
        match &self.what {
            What::Collective(payload) => {
                let one = (payload.count * payload.dtype.size_bytes()) as usize;
                let all = one * payload.nranks as usize;
                let to_root = u32::from(!payload.is_root && self.shares.is_live(payload.root));
                let (bytes, readers) = match payload.kind {
                    CollectiveKind::AllReduce | CollectiveKind::AllGather => (one, everybody),
                    CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => (all, everybody),
                    CollectiveKind::Reduce | CollectiveKind::Gather => (one, to_root),
                    CollectiveKind::Broadcast if payload.is_root => (one, everybody),
                    CollectiveKind::Scatter if payload.is_root => (all, everybody),
                    CollectiveKind::Broadcast | CollectiveKind::Scatter => (0, 0),
                };
                (payload.send, bytes, readers)
            }
            What::Send(message) => {
                (message.address, message.bytes as usize, u32::from(self.shares.is_live(message.peer)))
            }
            What::Receive(_) => (0, 0, 0),
            What::Split(choice) => (core::ptr::from_ref(choice).expose_provenance(), size_of_val(choice), everybody),
        }
    }

    /// Writes what this rank contributes to its file; none if nobody reads it.
    fn write(&self) -> Result<Option<Contribution>, Failure> {
        let (address, bytes, readers) = self.own();
        if readers == 0 {
            return Ok(None);
        }
        let contribution = Contribution { readers, ..self.shares.of(self.shares.rank, self.number) };
        let from = core::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: readable for `bytes`: what the caller of NCCL gave for sending, or a value of ours.
        let data = unsafe { core::slice::from_raw_parts(from, bytes) };
        let path = self.shares.directory.join(contribution.file_name());
        let written = File::create(path).and_then(|mut file| {
            file.write_all(&self.header())?;
            file.write_all(data)
        });
        written.map_err(|error| lost("cannot keep what this rank contributes for the others", &error))?;
        Ok(Some(contribution))
    }

    /// What this rank needs of others that run.
    fn needs(&self) -> Vec<Contribution> {
        let shares = &self.shares;
        let all = || shares.others().map(|peer| shares.of(peer, self.number)).collect();
        let only = |peer: u32| {
            if shares.is_live(peer) { vec![shares.of(peer, self.number)] } else { Vec::new() }
        };
        match &self.what {
            What::Collective(payload) => match payload.kind {
                CollectiveKind::Reduce | CollectiveKind::Gather if !payload.is_root => Vec::new(),
                CollectiveKind::Broadcast | CollectiveKind::Scatter if payload.is_root => Vec::new(),
                CollectiveKind::Broadcast | CollectiveKind::Scatter => only(payload.root),
                _ => all(),
            },
            What::Send(_) => Vec::new(),
            What::Receive(message) => only(message.peer),
            What::Split(_) => all(),
        }
    }

    /// What the rules say of the virtual members.
    fn ask(&self, session: &Session, row_bytes: usize) -> Result<Said, Failure> {
        if !session.has_rules() {
            return Ok(Said::NoRule);
        }
        let tag = self.tag();
        let (kind, root, number, count) = match &self.what {
            What::Collective(payload) => (payload.kind as u32, payload.root, self.number, payload.count),
            What::Send(message) | What::Receive(message) => {
                (KIND_RECEIVE, message.peer, self.number & ((1 << 40) - 1), message.count)
            }
            What::Split(_) => (KIND_SPLIT, 0, self.number, 2),
        };
        let dtype = match &self.what {
            What::Send(message) | What::Receive(message) => message.dtype as u32,
            What::Split(_) => 2,
            What::Collective(_) => u32::from(tag.dtype),
        };
        let request = ValuesRequest {
            comm_id: self.comm_id,
            kind,
            dtype,
            op: u32::from(tag.op),
            root,
            number,
            count,
            row_bytes: row_bytes as u64,
        };
        let mut answer = session.values(request)?;
        let nonsense = || Failure::new(Code::InternalError, "the engine's answer about values makes no sense");
        let verdict = answer.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes)).ok_or_else(nonsense)?;
        Ok(match verdict {
            0 => Said::NoRule,
            1 => Said::Mirror,
            2 => Said::Shape,
            3 => Said::Rows(answer.split_off(4)),
            _ => return Err(nonsense()),
        })
    }

    fn note(&self, session: &Session, tier: Tier, kind: u32) {
        if self.comm.is_live() && self.comm.id() == self.comm_id {
            self.comm.count_tier(session, tier, kind);
        }
    }

    fn exact(&self) -> Tier {
        if self.shares.has_turns { Tier::Turns } else { Tier::Live }
    }

    /// Receives a message.
    fn receive(&self, session: &Session, message: &Message) -> Outcome {
        let bytes = message.bytes as usize;
        if self.shares.is_live(message.peer) {
            let contribution = self.shares.of(message.peer, self.number);
            self.shares.check(&contribution, self.header())?;
            self.shares.read(&contribution, 0, message.address, bytes)?;
            self.note(session, self.exact(), KIND_RECEIVE);
            return Ok(());
        }
        let tier = match self.ask(session, bytes)? {
            Said::Rows(row) => {
                copy(row.as_ptr().expose_provenance(), message.address, bytes.min(row.len()));
                Tier::Rule
            }
            _ => Tier::Shape,
        };
        self.note(session, tier, KIND_RECEIVE);
        Ok(())
    }

    /// Colours and keys of all members; of the virtual ones, by a rule.
    fn choices(&self, session: &Session, own: [i32; 2]) -> Result<Vec<[i32; 2]>, Failure> {
        const CHOICE_BYTES: usize = size_of::<[i32; 2]>();
        let mut choices = vec![own; self.shares.nranks as usize];
        let base = choices.as_mut_ptr().expose_provenance();
        for peer in self.shares.others() {
            let contribution = self.shares.of(peer, self.number);
            self.shares.check(&contribution, self.header())?;
            self.shares.read(&contribution, 0, base + peer as usize * CHOICE_BYTES, CHOICE_BYTES)?;
        }
        if !self.shares.is_complete() {
            let Said::Rows(rows) = self.ask(session, CHOICE_BYTES)? else {
                let text =
                    "ncclCommSplit : the colours of members that do not run are not known: give a rule for Split";
                return Err(Failure::new(Code::InvalidUsage, text));
            };
            for (at, member) in self.shares.absent().enumerate() {
                let row = if rows.len() == CHOICE_BYTES { 0 } else { at * CHOICE_BYTES };
                let word = |at: usize| i32::from_le_bytes(rows[at..at + 4].try_into().expect("four bytes"));
                choices[member as usize] = [word(row), word(row + 4)];
            }
        }
        Ok(choices)
    }
}

/// Runs operations that have been launched, of any communicators with an exchange: contributes, waits for `complete` and for
/// the others, and takes what they contributed. The calling rank's turn is free while it waits.
pub(crate) fn run(
    session: &Session,
    shares: &[Share],
    complete: impl FnOnce() -> Outcome,
    is_cancelled: &dyn Fn() -> bool,
) -> Outcome {
    let result = waited_for(session, shares, complete, is_cancelled).and_then(|needs| {
        let collectives = shares.iter().filter(|share| !share.is_message());
        // Collectives come before messages, as in NCCL.
        for share in collectives.chain(shares.iter().filter(|share| share.is_message())) {
            share.finish(session)?;
        }
        session.taken(needs)
    });
    if let Err(failure) = &result {
        for share in shares {
            share.comm.break_off(share.comm_id, failure.code);
        }
    }
    result
}

/// Waits until all that these operations need is there; what that is.
fn waited_for(
    session: &Session,
    shares: &[Share],
    complete: impl FnOnce() -> Outcome,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Contribution>, Failure> {
    let written: Result<Vec<_>, _> = shares.iter().map(Share::write).collect();
    let written: Vec<Contribution> = written?.into_iter().flatten().collect();
    let needs: Vec<Contribution> = shares.iter().flat_map(Share::needs).collect();
    let parks = session.has_turns();
    if parks || !written.is_empty() {
        session.contribute(parks, written)?;
    }
    if let Err(failure) = complete() {
        if parks {
            session.contribute(false, Vec::new())?;
        }
        return Err(failure);
    }
    if parks || !needs.is_empty() {
        session.await_contributions(&needs, is_cancelled)?;
    }
    Ok(needs)
}

/// Colours and keys of all members of `parent`.
pub(crate) fn all_choices(
    session: &Session,
    parent: Comm,
    shares: &Arc<Shares>,
    own: [i32; 2],
) -> Result<Vec<[i32; 2]>, Failure> {
    let id = parent.id();
    let share = Share::split(parent, Arc::clone(shares), own);
    let is_cancelled = move || parent.is_interrupted_since(id);
    let needs = waited_for(session, core::slice::from_ref(&share), || Ok(()), &is_cancelled)?;
    let choices = share.choices(session, own)?;
    session.taken(needs)?;
    Ok(choices)
}
