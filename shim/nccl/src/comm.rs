//! The communicators of this process, behind opaque pointers.
//!
//! An `ncclComm_t` points into a fixed table, so any pointer can be checked by arithmetic alone: unknown memory is never
//! read. All that the hot path and a watchdog thread need is atomic.

mod extras;

pub(crate) use extras::{FIRST_USER_OPERATOR, PreMul, Scalar};

use crate::Handle;
use crate::abi::{Code, CommConfig};
use crate::channel::Channel;
use crate::guard::Failure;
use crate::notes::Tier;
use crate::passthrough::Real;
use crate::session::Session;
use crate::shares::Shares;
use extras::Extras;
use prism_wire::control::{KIND_RECEIVE, TIERS};
use prism_wire::frame::Request;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Communicators a process can have at a time.
const MAX_COMMS: usize = 32_768;
/// In a live slot's first word.
const MAGIC: u64 = 0x5052_4953_4d43_4d31;

/// Calls return at once and errors are asked for.
const NON_BLOCKING: u32 = 1;
const REVOKED: u32 = 2;
const FINALIZED: u32 = 4;
/// Aborted, and the engine does not know yet.
const ABORTED: u32 = 8;
/// All members run for real and are connected.
const CONNECTED: u32 = 16;
const SUSPENDED: u32 = 32;
/// A communicator of the real NCCL is behind it.
const REAL: u32 = 128;
/// It exchanges through files.
const SHARED: u32 = 64;

/// Collectives and receives, by [`CollectiveKind`]'s numbers and then the receive.
const KINDS: usize = 9;
/// In a counter of [`Slot::tiers`]: something was reported of it before.
const REPORTED: u32 = 1 << 31;

/// No outcome of the operation under way yet; else its code plus one, so that an unused slot is all zero.
const NO_OUTCOME: i32 = 0;

/// One entry of the table. All zero when never used, so that the table costs no memory until then.
#[repr(C, align(128))]
struct Slot {
    magic: AtomicU64,
    id: AtomicU32,
    nranks: AtomicI32,
    rank: AtomicI32,
    device: AtomicI32,
    flags: AtomicU32,
    async_error: AtomicI32,
    /// Result of the operation under way on a non-blocking communicator, shown with the next poll.
    outcome: AtomicI32,
    extras: Mutex<Option<Box<Extras>>>,
    /// Payloads by tier and kind that the engine was not told of yet.
    tiers: [[AtomicU32; KINDS]; TIERS.len()],
}

const _: () = assert!(size_of::<Slot>() == 256);

static SLOTS: [Slot; MAX_COMMS] = [const {
    Slot {
        magic: AtomicU64::new(0),
        id: AtomicU32::new(0),
        nranks: AtomicI32::new(0),
        rank: AtomicI32::new(0),
        device: AtomicI32::new(0),
        flags: AtomicU32::new(0),
        async_error: AtomicI32::new(0),
        outcome: AtomicI32::new(NO_OUTCOME),
        extras: Mutex::new(None),
        tiers: [const { [const { AtomicU32::new(0) }; KINDS] }; TIERS.len()],
    }
}; MAX_COMMS];

/// Slots handed out, and those given back (oldest first, so that a stale handle stays invalid for long).
struct Free {
    used: usize,
    returned: VecDeque<usize>,
    next_id: u32,
}

static FREE: Mutex<Free> = Mutex::new(Free { used: 0, returned: VecDeque::new(), next_id: 1 });
/// Copy of `Free::used` for those who may not lock.
static USED: AtomicU32 = AtomicU32::new(0);
/// Is any slot [`ABORTED`]?
static ANY_ABORTED: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done under these locks, so a panic elsewhere does not spoil the data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A live communicator.
#[derive(Clone, Copy)]
pub(crate) struct Comm(&'static Slot);

/// An operation of a non-blocking communicator that has begun.
#[derive(Clone, Copy)]
pub(crate) struct Underway {
    comm: Comm,
    id: u32,
}

impl Underway {
    /// The operation has ended; the next poll shows it. Nothing, if the communicator was ended before.
    pub(crate) fn end(self, code: Code) {
        if self.is_of_this_life() {
            self.comm.0.outcome.store(code as i32 + 1, Ordering::Release);
        }
    }

    fn is_of_this_life(self) -> bool {
        self.comm.is_live() && self.comm.id() == self.id
    }
}

/// The facts of a communicator to be made.
pub(crate) struct NewComm {
    pub(crate) nranks: i32,
    pub(crate) rank: i32,
    pub(crate) device: i32,
    pub(crate) config: CommConfig,
}

/// Makes a communicator. `register` tells the engine, given the id; its failure leaves no trace, so ids stay dense.
pub(crate) fn create(register: impl FnOnce(u32) -> Result<NewComm, Failure>) -> Result<Comm, Failure> {
    create_with(register, Code::Success)
}

/// Makes a communicator that nobody but [`Comm::settle`] makes usable: its members have to meet first.
pub(crate) fn create_unsettled(new: NewComm) -> Result<(Comm, Underway), Failure> {
    let comm = create_with(|_| Ok(new), Code::InProgress)?;
    Ok((comm, Underway { comm, id: comm.id() }))
}

fn create_with(register: impl FnOnce(u32) -> Result<NewComm, Failure>, state: Code) -> Result<Comm, Failure> {
    let mut free = lock(&FREE);
    let fresh = free.used < MAX_COMMS;
    let Some(index) = (if fresh { Some(free.used) } else { free.returned.front().copied() }) else {
        return Err(Failure::new(Code::SystemError, format!("more than {MAX_COMMS} communicators are alive")));
    };
    let id = free.next_id;
    let new = register(id)?;
    free.next_id += 1;
    if fresh {
        free.used += 1;
        USED.store(free.used as u32, Ordering::Release);
    } else {
        free.returned.pop_front();
    }
    let slot = &SLOTS[index];
    slot.id.store(id, Ordering::Relaxed);
    slot.nranks.store(new.nranks, Ordering::Relaxed);
    slot.rank.store(new.rank, Ordering::Relaxed);
    slot.device.store(new.device, Ordering::Relaxed);
    slot.flags.store(if new.config.blocking { 0 } else { NON_BLOCKING }, Ordering::Relaxed);
    slot.async_error.store(state as i32, Ordering::Relaxed);
    slot.outcome.store(NO_OUTCOME, Ordering::Relaxed);
    for counter in slot.tiers.iter().flatten() {
        counter.store(0, Ordering::Relaxed);
    }
    *lock(&slot.extras) = None;
    slot.magic.store(MAGIC, Ordering::Release);
    Ok(Comm(slot))
}

/// The communicator behind a handle of the caller.
#[inline]
pub(crate) fn check(handle: Handle, function: &str) -> Result<Comm, Failure> {
    let offset = handle.addr().wrapping_sub(SLOTS.as_ptr().addr());
    match SLOTS.get(offset / size_of::<Slot>()) {
        Some(slot) if offset.is_multiple_of(size_of::<Slot>()) && slot.magic.load(Ordering::Acquire) == MAGIC => {
            Ok(Comm(slot))
        }
        _ if handle.is_null() => Err(Failure::null(function, "comm")),
        _ => Err(Failure::new(Code::InvalidArgument, format!("{function} : {handle:p} is not a live communicator"))),
    }
}

/// Forgets every communicator: in a forked child they belong to the parent. Async-signal-safe.
pub(crate) fn forget_all() {
    for slot in SLOTS.iter().take(USED.load(Ordering::Acquire) as usize) {
        slot.magic.store(0, Ordering::Relaxed);
        slot.flags.store(0, Ordering::Relaxed);
        for counter in slot.tiers.iter().flatten() {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

/// Were communicators aborted since the last [`take_aborted`]?
#[inline]
pub(crate) fn any_aborted() -> bool {
    ANY_ABORTED.load(Ordering::Relaxed)
}

/// Ids of the communicators aborted since the last call.
#[cold]
pub(crate) fn take_aborted() -> Vec<u32> {
    ANY_ABORTED.store(false, Ordering::Relaxed);
    let slots = SLOTS.iter().take(USED.load(Ordering::Acquire) as usize);
    let aborted = slots.filter(|slot| slot.flags.fetch_and(!ABORTED, Ordering::AcqRel) & ABORTED != 0);
    aborted.map(|slot| slot.id.load(Ordering::Relaxed)).collect()
}

/// Tells the engine what [`Comm::count_tier`] has counted, of all communicators.
pub(crate) fn flush_tiers(session: &Session) {
    for slot in SLOTS.iter().take(USED.load(Ordering::Acquire) as usize) {
        for (tier, counters) in slot.tiers.iter().enumerate() {
            for (column, _) in
                counters.iter().enumerate().filter(|(_, one)| one.load(Ordering::Relaxed) & !REPORTED != 0)
            {
                Comm(slot).report_tier(session, tier, column);
            }
        }
    }
}

impl Comm {
    /// The opaque pointer for C.
    pub(crate) fn handle(self) -> Handle {
        core::ptr::from_ref(self.0).cast_mut().cast()
    }

    /// Has nobody destroyed or aborted it yet?
    pub(crate) fn is_live(self) -> bool {
        self.0.magic.load(Ordering::Acquire) == MAGIC
    }

    /// The id the engine knows.
    pub(crate) fn id(self) -> u32 {
        self.0.id.load(Ordering::Relaxed)
    }

    /// Number of members.
    pub(crate) fn nranks(self) -> i32 {
        self.0.nranks.load(Ordering::Relaxed)
    }

    /// Group rank of this process.
    pub(crate) fn rank(self) -> i32 {
        self.0.rank.load(Ordering::Relaxed)
    }

    /// Device the communicator was made on.
    pub(crate) fn device(self) -> i32 {
        self.0.device.load(Ordering::Relaxed)
    }

    fn has(self, flag: u32) -> bool {
        self.0.flags.load(Ordering::Relaxed) & flag != 0
    }

    /// Sets `flag`; false if it was set before.
    fn set(self, flag: u32) -> bool {
        self.0.flags.fetch_or(flag, Ordering::AcqRel) & flag == 0
    }

    /// Its configuration, for children that inherit it.
    pub(crate) fn config(self) -> CommConfig {
        CommConfig { blocking: !self.has(NON_BLOCKING) }
    }

    /// Was it revoked?
    pub(crate) fn is_revoked(self) -> bool {
        self.has(REVOKED)
    }

    /// Revokes it; false if it was revoked or finalized before.
    pub(crate) fn revoke(self) -> bool {
        !self.has(FINALIZED) && self.set(REVOKED) && self.finalize()
    }

    /// Finalizes it; false the second time.
    pub(crate) fn finalize(self) -> bool {
        self.set(FINALIZED)
    }

    fn end(self) -> bool {
        self.0.magic.compare_exchange(MAGIC, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Ends its life; false if another thread did so first.
    pub(crate) fn close(self) -> bool {
        let is_first = self.end();
        if is_first {
            // Whom it is connected to notices.
            if self.has(CONNECTED | SHARED) {
                self.extras(|extras| (extras.channel, extras.shares) = (None, None));
            }
            let index = (self.handle().addr() - SLOTS.as_ptr().addr()) / size_of::<Slot>();
            lock(&FREE).returned.push_back(index);
        }
        is_first
    }

    /// Ends its life without waiting for anybody; [`take_aborted`] will name it. Its slot is not used again.
    pub(crate) fn abort(self) {
        if self.end() {
            // Whom it is connected to notices; or, if the lock is taken now, once the call in it comes back.
            if let Ok(mut extras) = self.0.extras.try_lock()
                && let Some(channel) = extras.as_mut().and_then(|extras| extras.channel.take())
            {
                channel.shut_down();
            }
            self.set(ABORTED);
            ANY_ABORTED.store(true, Ordering::Release);
        }
    }

    /// Its state, without a lock. While an operation is under way it is in progress until a poll has seen its end.
    #[inline]
    pub(crate) fn async_error(self) -> Code {
        Code::from_i32(self.0.async_error.load(Ordering::Acquire))
    }

    /// What a poll gets: like [`Self::async_error`], but sees the end of the operation under way.
    pub(crate) fn poll(self) -> Code {
        let state = self.async_error();
        if state != Code::InProgress {
            return state;
        }
        match self.0.outcome.swap(NO_OUTCOME, Ordering::AcqRel) {
            NO_OUTCOME => state,
            outcome => {
                let code = Code::from_i32(outcome - 1);
                self.0.async_error.store(code as i32, Ordering::Release);
                code
            }
        }
    }

    /// Does it return before its operations are done?
    #[inline]
    pub(crate) fn is_non_blocking(self) -> bool {
        self.has(NON_BLOCKING)
    }

    /// An operation of a non-blocking communicator begins: it is in progress from now on.
    pub(crate) fn begin(self) -> Underway {
        self.0.outcome.store(NO_OUTCOME, Ordering::Relaxed);
        self.0.async_error.store(Code::InProgress as i32, Ordering::Release);
        Underway { comm: self, id: self.id() }
    }

    /// A communicator of [`create_unsettled`] may be used now, or never.
    pub(crate) fn settle(self, underway: Underway, code: Code) {
        if self.has(NON_BLOCKING) {
            underway.end(code);
        } else if underway.is_of_this_life() {
            self.0.async_error.store(code as i32, Ordering::Release);
        }
    }

    /// Keeps `code` for later polls, if that is how this communicator reports errors.
    pub(crate) fn note_error(self, code: Code) {
        if self.has(NON_BLOCKING) && self.async_error() == Code::Success {
            self.0.async_error.store(code as i32, Ordering::Release);
        }
    }

    /// Was the life that had this id ended, or all its operations called off?
    pub(crate) fn is_interrupted_since(self, id: u32) -> bool {
        !self.is_live() || self.id() != id || self.is_revoked()
    }

    /// Nothing more can be exchanged: its members are out of step, or one is gone.
    #[cold]
    pub(crate) fn break_off(self, id: u32, code: Code) {
        if self.is_live() && self.id() == id && !self.is_revoked() {
            self.0.async_error.store(code as i32, Ordering::Release);
        }
        // The other members notice; the addresses stay, for a shrink.
        self.extras(|extras| extras.channel.as_deref().map(Channel::shut_down));
    }

    /// It may be used at once: its parent said that it was under way.
    pub(crate) fn make_ready(self) {
        self.0.async_error.store(Code::Success as i32, Ordering::Release);
    }

    /// Keeps the connections to its members.
    pub(crate) fn set_channel(self, channel: Channel) {
        self.extras(|extras| extras.channel = Some(Arc::new(channel)));
        self.set(CONNECTED);
    }

    /// The connections to its members, if all of them run for real.
    #[inline]
    pub(crate) fn channel(self) -> Option<Arc<Channel>> {
        if !self.has(CONNECTED) {
            return None;
        }
        self.extras(|extras| extras.channel.clone())
    }

    /// Keeps the real communicator behind it.
    pub(crate) fn set_real(self, real: Real) {
        self.extras(|extras| extras.real = Some(real));
        self.set(REAL);
    }

    /// The real communicator behind it.
    #[inline]
    pub(crate) fn real(self) -> Option<Real> {
        if !self.has(REAL) {
            return None;
        }
        self.extras(|extras| extras.real)
    }

    /// Has it exchange through files.
    pub(crate) fn set_shares(self, shares: Shares) {
        self.extras(|extras| extras.shares = Some(Arc::new(shares)));
        self.set(SHARED);
    }

    /// Its exchange through files, if it has one.
    #[inline]
    pub(crate) fn shares(self) -> Option<Arc<Shares>> {
        if !self.has(SHARED) {
            return None;
        }
        self.extras(|extras| extras.shares.clone())
    }

    /// Counts a payload whose values came about by `tier`. The first of its sort is told at once, so that a program that
    /// dies is covered; the others with [`flush_tiers`].
    #[inline]
    pub(crate) fn count_tier(self, session: &Session, tier: Tier, kind: u32) {
        let column = (kind as usize).min(KINDS - 1);
        let counter = &self.0.tiers[tier as usize][column];
        if counter.fetch_add(1, Ordering::Relaxed) & REPORTED == 0 {
            self.report_tier(session, tier as usize, column);
        }
    }

    #[cold]
    fn report_tier(self, session: &Session, tier: usize, column: usize) {
        let count = self.0.tiers[tier][column].swap(REPORTED, Ordering::Relaxed) & !REPORTED;
        if count == 0 {
            return;
        }
        let kind = if column == KINDS - 1 { KIND_RECEIVE } else { column as u32 };
        // A dead engine is reported by the calls that need it.
        let _ = session.control(&Request::Tier { comm_id: self.id(), kind, tier: tier as u32, count: count.into() });
    }

    /// Was it suspended?
    pub(crate) fn is_suspended(self) -> bool {
        self.has(SUSPENDED)
    }

    /// Suspends or resumes it.
    pub(crate) fn set_suspended(self, is_suspended: bool) {
        if is_suspended {
            self.set(SUSPENDED);
        } else {
            self.0.flags.fetch_and(!SUSPENDED, Ordering::AcqRel);
        }
    }

    fn extras<T>(self, use_them: impl FnOnce(&mut Extras) -> T) -> T {
        use_them(lock(&self.0.extras).get_or_insert_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn new(nranks: i32) -> Comm {
        create(|_| Ok(NewComm { nranks, rank: 0, device: 0, config: CommConfig::DEFAULT })).unwrap()
    }

    #[test]
    fn an_end_that_comes_late_is_not_that_of_the_next_life() {
        let comm = new(2);
        let underway = comm.begin();
        assert_eq!(comm.poll(), Code::InProgress);
        underway.end(Code::Success);
        assert_eq!((comm.async_error(), comm.poll()), (Code::InProgress, Code::Success));
        let late = comm.begin();
        assert!(comm.close());
        late.end(Code::RemoteError);
        assert_eq!(comm.0.outcome.load(Ordering::Relaxed), NO_OUTCOME);
        // What was never used costs no memory: the whole table starts as zeroes.
        assert_eq!(SLOTS[MAX_COMMS - 1].outcome.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn only_live_handles_are_accepted() {
        let comm = new(4);
        let address = comm.handle().addr();
        assert_eq!(check(comm.handle(), "f").ok().map(Comm::nranks), Some(4));
        for wrong in [0, 1, 8, address + 8, address - 1, address + MAX_COMMS * 256, usize::MAX] {
            assert!(check(core::ptr::without_provenance_mut(wrong), "f").is_err(), "{wrong:#x}");
        }
        assert!(comm.close());
        assert!(!comm.close());
        assert!(check(comm.handle(), "f").is_err());
    }

    #[test]
    fn a_failed_registration_leaves_no_id_behind() {
        let before = new(1).id();
        assert!(create(|_| Err(Failure::new(Code::InvalidUsage, "no"))).is_err());
        assert!(new(1).id() > before);
    }
}
