//! How communicators come to be: from a unique id, by split, shrink and growth.
//!
//! Where all members run for real (host device) they meet: the call returns when all have come, or at once on a non-blocking
//! communicator. Else the engine knows the members, or they follow from those of the parent.

use crate::Handle;
use crate::abi::{Code, CommConfig, RawUniqueId, SPLIT_NOCOLOR};
use crate::channel::{self, Channel, Key};
use crate::comm::{self, Comm, NewComm, Underway};
use crate::exchange::{self, Job, SPLIT, Stage, Tag};
use crate::guard::{Failure, Outcome};
use crate::ops::{ensure_ready, refuse_part};
use crate::session::{self, Session};
use crate::shares::{self, Shares};
use crate::{config, group, passthrough};
use core::ffi::{CStr, c_char};
use prism_wire::control::{UNIQUE_ID_BYTES, UNIQUE_ID_STORE_MAGIC};
use prism_wire::frame::{CommSplitAnswer, Request};
use std::sync::Arc;

/// First bytes of an id made by `ncclCommGetUniqueId`; the key of the grown communicator follows.
const GROW_MAGIC: &[u8; 8] = b"PRISMIDG";

/// Where the caller wants the handle.
#[derive(Clone, Copy)]
pub(crate) struct Target(usize);

impl Target {
    /// # Safety
    /// `new_comm` is writable until the communicator is ready or has failed.
    pub(crate) unsafe fn new(new_comm: *mut Handle) -> Self {
        Self(new_comm.expose_provenance())
    }

    fn set(self, comm: Option<Comm>) {
        let to = core::ptr::with_exposed_provenance_mut::<Handle>(self.0);
        // SAFETY: promised at the making.
        unsafe { to.write(comm.map_or(core::ptr::null_mut(), Comm::handle)) };
    }
}

/// A non-blocking communicator is ready at the next poll.
pub(crate) fn begun(comm: Comm) -> Outcome {
    if !comm.is_non_blocking() {
        return Ok(());
    }
    comm.begin().end(Code::Success);
    Err(Failure::again(Code::InProgress))
}

/// Runs what members have to do together: now, at the end of the open group, or in a thread.
fn meet(is_blocking: bool, meeting: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    if !is_blocking {
        return group::in_background(true, meeting);
    }
    if group::is_open() {
        group::push_meeting(Box::new(meeting));
        return Ok(());
    }
    meeting()
}

/// A communicator from a unique id, on `device` or else on the thread's current one.
pub(crate) fn init(
    session: &'static Session,
    id: &RawUniqueId,
    (nranks, rank): (i32, i32),
    device: Option<i32>,
    config: CommConfig,
    target: Target,
) -> Outcome {
    let device = device.unwrap_or_else(|| session.current_device());
    let new = NewComm { nranks, rank, device, config };
    if id.0.starts_with(UNIQUE_ID_STORE_MAGIC) || !session.is_host() || !session.may_meet(nranks) {
        let comm = comm::create(|comm_id| {
            let (nranks, group_rank) = (nranks as u32, rank as u32);
            session.control(&Request::CommInit { comm_id, nranks, group_rank, unique_id: id.0 })?;
            Ok(new)
        })?;
        target.set(Some(connected(session, comm)?));
        return begun(comm);
    }
    let key = channel::derive_key(&id.0, b"init");
    found(session, new, target, move |comm| {
        if !session.has_turns() {
            return channel::join(comm, key, nranks as usize, rank as usize).map(Found::Connected);
        }
        meet_in_turns(session, comm, key).map(Found::Known)
    })
}

/// The communicator, with what it needs to reach members that run: the real NCCL, or an exchange through files.
fn connected(session: &Session, comm: Comm) -> Result<Comm, Failure> {
    let made = passthrough::join(session, comm).and_then(|()| shares::attach(session, comm));
    made.map(|()| comm).inspect_err(|_| _ = comm.close())
}

/// How the members of a new communicator reach each other.
enum Found {
    /// By connections.
    Connected(Channel),
    /// They take turns: only their ranks are known.
    Known(Vec<u32>),
}

/// The ranks of all members; those that have not come need this rank's turn.
fn meet_in_turns(session: &Session, comm: Comm, key: Key) -> Result<Vec<u32>, Failure> {
    session.contribute(true, Vec::new())?;
    let addresses = channel::meet(comm, key, comm.nranks() as usize, comm.rank() as usize);
    let addresses = addresses.inspect_err(|_| _ = session.contribute(false, Vec::new()))?;
    let id = comm.id();
    session.await_contributions(&[], &move || comm.is_interrupted_since(id))?;
    Ok(addresses.into_iter().map(|address| address.rank).collect())
}

/// A communicator that its members make by meeting; they learn of each other what they need.
fn found(
    session: &'static Session,
    new: NewComm,
    target: Target,
    join: impl FnOnce(Comm) -> Result<Found, Failure> + Send + 'static,
) -> Outcome {
    let is_blocking = new.config.blocking;
    let (comm, underway) = comm::create_unsettled(new)?;
    // Others may abort it from now on.
    target.set(Some(comm));
    meet(is_blocking, move || {
        let founded = join(comm).and_then(|found| match found {
            Found::Connected(channel) => {
                register_world_or_members(session, comm, channel.members())?;
                comm.set_channel(channel);
                Ok(())
            }
            Found::Known(members) => {
                register_world_or_members(session, comm, members)?;
                shares::attach(session, comm)
            }
        });
        let code = founded.as_ref().map_or_else(|failure| failure.code, |()| Code::Success);
        comm.settle(underway, code);
        if founded.is_err() && is_blocking {
            target.set(None);
            comm.close();
        }
        founded
    })
}

/// Tells the engine of a communicator of these ranks of the job.
fn register_world_or_members(session: &Session, comm: Comm, members: Vec<u32>) -> Outcome {
    let is_world = config::world_size() == u32::try_from(members.len()).ok()
        && members.iter().enumerate().all(|(at, rank)| *rank as usize == at);
    let request = if is_world {
        let (nranks, group_rank) = (comm.nranks() as u32, comm.rank() as u32);
        Request::CommInit { comm_id: comm.id(), nranks, group_rank, unique_id: [0; UNIQUE_ID_BYTES] }
    } else {
        Request::CommMembers { comm_id: comm.id(), parent: 0, ranks: members }
    };
    session.control(&request).map(|_| ())
}

/// A communicator of the members of `parent` with the same colour; none for [`SPLIT_NOCOLOR`].
pub(crate) fn split(parent: Comm, color: i32, key: i32, config: CommConfig, target: Target) -> Outcome {
    target.set(None);
    ensure_ready(parent, "ncclCommSplit")?;
    if color < SPLIT_NOCOLOR {
        return Err(Failure::new(Code::InvalidArgument, format!("ncclCommSplit : invalid color {color}")));
    }
    let session = session::of_comm()?;
    if let Some(parents) = parent.shares().filter(|parents| parents.is_complete() || knows_colors(session)) {
        let underway = parent.is_non_blocking().then(|| parent.begin());
        return meet(underway.is_none(), move || {
            let child = split_in_turns(session, (parent, &parents), (color, key), config);
            end_of_child(child, underway, target)
        });
    }
    let Some(parents) = parent.channel() else {
        let child = match color {
            _ if parent.nranks() > 1 => split_by_engine(session, parent, color, key, config)?,
            SPLIT_NOCOLOR => None,
            _ => Some(subset(session, parent, &[0], config)?),
        };
        target.set(child);
        return begun(parent);
    };
    let step = parents.child_key(b"split");
    let underway = parent.is_non_blocking().then(|| parent.begin());
    meet(underway.is_none(), move || {
        let child = split_by_meeting(session, (parent, &parents), (color, key), step, config);
        end_of_child(child, underway, target)
    })
}

/// A child has been made, or not; the operation of its parent is over.
fn end_of_child(child: Result<Option<Comm>, Failure>, underway: Option<Underway>, target: Target) -> Outcome {
    let made = child.map(|child| target.set(child));
    if let Some(underway) = underway {
        underway.end(made.as_ref().map_or_else(|failure| failure.code, |()| Code::Success));
    }
    made
}

/// Must the rules say which colours virtual members have? Not where the framework tells the members.
fn knows_colors(session: &Session) -> bool {
    session.has_rules() && current_group().is_empty()
}

/// A split whose members exchange through files.
fn split_in_turns(
    session: &Session,
    (parent, parents): (Comm, &Arc<Shares>),
    (color, key): (i32, i32),
    config: CommConfig,
) -> Result<Option<Comm>, Failure> {
    let choices = shares::all_choices(session, parent, parents, [color, key])?;
    if color == SPLIT_NOCOLOR {
        return Ok(None);
    }
    subset(session, parent, &members_of(&choices, color), config).map(Some)
}

/// Members of `parent` with this colour, in the order of their keys.
fn members_of(choices: &[[i32; 2]], color: i32) -> Vec<u32> {
    let with_color = choices.iter().enumerate().filter(|(_, choice)| choice[0] == color);
    let mut members: Vec<(i32, u32)> = with_color.map(|(rank, choice)| (choice[1], rank as u32)).collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

fn split_by_meeting(
    session: &Session,
    (parent, parents): (Comm, &Arc<Channel>),
    (color, key): (i32, i32),
    step: Key,
    config: CommConfig,
) -> Result<Option<Comm>, Failure> {
    let choices = all_choices(parent, parents, [color, key])?;
    if color == SPLIT_NOCOLOR {
        return Ok(None);
    }
    let ranks = members_of(&choices, color);
    let step = channel::derive_key(&[step[0].to_le_bytes(), step[1].to_le_bytes()].concat(), &color.to_le_bytes());
    child_of(session, (parent, parents), &ranks, step, config).map(Some)
}

/// Colour and key of every member.
fn all_choices(parent: Comm, parents: &Arc<Channel>, own: [i32; 2]) -> Result<Vec<[i32; 2]>, Failure> {
    let mut choices = vec![own; parents.len()];
    let tag = Tag { kind: SPLIT, dtype: 0, op: 0, root: 0, count: 0 };
    let mut stage = Stage::default();
    let base = choices.as_mut_ptr().expose_provenance();
    let own_address = (&raw const own).expose_provenance();
    for peer in (0..parents.len()).filter(|peer| *peer != parents.rank()) {
        stage.send(peer, tag, own_address, size_of_val(&own));
        stage.receive(peer, tag, base + peer * size_of_val(&own), size_of_val(&own));
    }
    let mut job = Job::new(parent, Arc::clone(parents));
    job.add(Box::new(Some(stage)));
    exchange::run(vec![job])?;
    Ok(choices)
}

/// A communicator of some members of `parent`, named by their group ranks, who meet for it.
fn child_of(
    session: &Session,
    (parent, parents): (Comm, &Channel),
    ranks: &[u32],
    key: Key,
    config: CommConfig,
) -> Result<Comm, Failure> {
    let new = child_facts(parent, ranks, config)?;
    let rank = new.rank as usize;
    let addresses: Option<Vec<_>> = ranks.iter().map(|rank| parents.address(*rank as usize)).collect();
    let addresses = addresses.ok_or_else(|| Failure::new(Code::InternalError, "a member has no address"))?;
    let (child, _) = comm::create_unsettled(new)?;
    let made = channel::connect(child, key, addresses, rank).and_then(|channel| {
        let ranks = ranks.to_vec();
        session.control(&Request::CommMembers { comm_id: child.id(), parent: parent.id(), ranks })?;
        child.set_channel(channel);
        child.make_ready();
        Ok(child)
    });
    made.inspect_err(|_| _ = child.close())
}

fn child_facts(parent: Comm, ranks: &[u32], config: CommConfig) -> Result<NewComm, Failure> {
    let rank = ranks.iter().position(|rank| *rank == parent.rank() as u32);
    let rank = rank.ok_or_else(|| Failure::new(Code::InternalError, "this rank is no member of its communicator"))?;
    Ok(NewComm { nranks: ranks.len() as i32, rank: rank as i32, device: parent.device(), config })
}

/// A communicator of some members of `parent` where nobody has to meet.
fn subset(session: &Session, parent: Comm, ranks: &[u32], config: CommConfig) -> Result<Comm, Failure> {
    comm::create(|comm_id| {
        let new = child_facts(parent, ranks, config)?;
        session.control(&Request::CommMembers { comm_id, parent: parent.id(), ranks: ranks.to_vec() })?;
        Ok(new)
    })
    .and_then(|comm| connected(session, comm))
}

/// The engine knows the members by the name of the process group.
fn split_by_engine(
    session: &Session,
    parent: Comm,
    color: i32,
    key: i32,
    config: CommConfig,
) -> Result<Option<Comm>, Failure> {
    let group_name = current_group();
    let request = |comm_id| {
        let (parent, group_name) = (parent.id(), group_name.clone());
        session.control(&Request::CommSplit { comm_id, parent, color, key, group_name })
    };
    if color == SPLIT_NOCOLOR {
        // Takes part, but uses up no id.
        return request(0).map(|_| None);
    }
    let comm = comm::create(|comm_id| {
        let answer = request(comm_id)?;
        let answer = CommSplitAnswer::decode(&answer).ok();
        let sizes =
            answer.and_then(|answer| Some((answer.nranks.try_into().ok()?, answer.group_rank.try_into().ok()?)));
        match sizes {
            Some((nranks, rank)) if (0..nranks).contains(&rank) => {
                Ok(NewComm { nranks, rank, device: parent.device(), config })
            }
            _ => Err(Failure::new(Code::InternalError, "the engine's answer to ncclCommSplit makes no sense")),
        }
    });
    comm.and_then(|comm| connected(session, comm)).map(Some)
}

/// A communicator of the members of `parent` without those in `excluded`. With `is_abort` the state of `parent` does not
/// matter.
pub(crate) fn shrink(parent: Comm, excluded: &[i32], is_abort: bool, config: CommConfig, target: Target) -> Outcome {
    const NAME: &str = "ncclCommShrink";
    target.set(None);
    if let Some(bad) = excluded.iter().find(|rank| **rank == parent.rank() || !(0..parent.nranks()).contains(rank)) {
        return Err(Failure::new(
            Code::InvalidArgument,
            format!("{NAME} : rank {bad} cannot be excluded by this rank"),
        ));
    }
    if !is_abort && !parent.is_revoked() {
        ensure_ready(parent, NAME)?;
    }
    let session = session::of_comm()?;
    let is_kept = |rank: &u32| !excluded.contains(&(*rank as i32));
    let ranks: Vec<u32> = (0..parent.nranks() as u32).filter(is_kept).collect();
    let Some(parents) = parent.channel() else {
        target.set(Some(subset(session, parent, &ranks, config)?));
        return begun(parent);
    };
    let key = parents.child_key(b"shrink");
    let underway = parent.is_non_blocking().then(|| parent.begin());
    meet(underway.is_none(), move || {
        let child = child_of(session, (parent, &parents), &ranks, key, config);
        end_of_child(child.map(Some), underway, target)
    })
}

/// An id with which new members join what `parent` grows into.
pub(crate) fn grow_id(parent: Comm) -> Result<RawUniqueId, Failure> {
    const NAME: &str = "ncclCommGetUniqueId";
    ensure_ready(parent, NAME)?;
    let Some(parents) = parent.channel() else { return Err(only_real(NAME)) };
    let key = parents.next_child_key(b"grow");
    let mut id = [0; UNIQUE_ID_BYTES];
    id[..8].copy_from_slice(GROW_MAGIC);
    id[8..16].copy_from_slice(&key[0].to_le_bytes());
    id[16..24].copy_from_slice(&key[1].to_le_bytes());
    if !parent.set_grow_id(id) {
        return Err(Failure::new(Code::InvalidUsage, format!("{NAME} : the previous id was not used yet")));
    }
    Ok(RawUniqueId(id))
}

#[cold]
fn only_real(function: &'static str) -> Failure {
    refuse_part(function, "with members that do not run").err().unwrap_or_else(|| Failure::again(Code::InvalidUsage))
}

fn key_of_grow_id(id: &RawUniqueId) -> Option<Key> {
    let word = |at: usize| Some(u64::from_le_bytes(id.0.get(at..at + 8)?.try_into().ok()?));
    if id.0.starts_with(GROW_MAGIC) { Some([word(8)?, word(16)?]) } else { None }
}

/// A member of `parent` takes part in its growth to `nranks` ranks; one member brings the id.
pub(crate) fn grow(parent: Comm, nranks: i32, id: Option<RawUniqueId>, config: CommConfig, target: Target) -> Outcome {
    const NAME: &str = "ncclCommGrow";
    ensure_ready(parent, NAME)?;
    let session = session::of_comm()?;
    let Some(parents) = parent.channel() else { return Err(only_real(NAME)) };
    let made = parent.take_grow_id();
    if id.is_some_and(|id| made != Some(id.0)) {
        let text = format!("{NAME} : the unique id is not one of this communicator, or was used before");
        return Err(Failure::new(Code::InvalidArgument, text));
    }
    let key = parents.child_key(b"grow");
    let rank = parent.rank();
    let new = NewComm { nranks, rank, device: parent.device(), config };
    found(session, new, target, move |comm| {
        channel::join(comm, key, nranks as usize, rank as usize).map(Found::Connected)
    })
}

/// A new member joins a growing communicator.
pub(crate) fn grow_into(
    session: &'static Session,
    (nranks, rank): (i32, i32),
    id: &RawUniqueId,
    config: CommConfig,
    target: Target,
) -> Outcome {
    let Some(key) = key_of_grow_id(id) else {
        let text = "ncclCommGrow : the unique id is not one of ncclCommGetUniqueId";
        return Err(Failure::new(Code::InvalidArgument, text));
    };
    if !session.is_host() || !session.may_meet(nranks) {
        return Err(only_real("ncclCommGrow"));
    }
    let new = NewComm { nranks, rank, device: session.current_device(), config };
    found(session, new, target, move |comm| {
        channel::join(comm, key, nranks as usize, rank as usize).map(Found::Connected)
    })
}

/// Name of the process group that the framework is just creating, as the hook told the device library; may be empty.
fn current_group() -> String {
    // SAFETY: looks up a name in the global scope.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"prism_current_group".as_ptr()) };
    if symbol.is_null() {
        return String::new();
    }
    // SAFETY: the name belongs to a function of this type.
    let name_of: extern "C" fn() -> *const c_char = unsafe { core::mem::transmute(symbol) };
    let name = name_of();
    if name.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}
