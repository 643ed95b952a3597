//! The host device: no GPU library owns the session, so this one connects, and keeps the host clock and the memory.

use crate::abi::Code;
use crate::config;
use crate::guard::Failure;
use core::ffi::c_void;
use prism_wire::client::{Client, ControlError};
use prism_wire::control::ControlKind;
use prism_wire::frame::{DeviceMode, Hello};
use prism_wire::message::{FLAG_BACKGROUND, Record, RecordKind, ReplyStatus};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Alignment of memory of `ncclMemAlloc`.
const ALIGNMENT: usize = 4_096;

/// The engine is gone.
pub(crate) struct Gone;

/// A session owned by this library.
pub(crate) struct Host {
    client: Client,
    /// Virtual host clock, ns since connected.
    clock_ns: AtomicI64,
    /// Address to layout of memory handed out.
    memory: Mutex<BTreeMap<usize, Layout>>,
}

impl Host {
    /// Connects as the rank that the environment names.
    pub(crate) fn connect(path: &Path) -> Result<Self, Failure> {
        let missing = |name: &str| Failure::new(Code::SystemError, format!("PRISM_SESSION is set, but not {name}"));
        let rank = config::rank().ok_or_else(|| missing("PRISM_RANK"))?;
        let world_size = config::world_size().ok_or_else(|| missing("PRISM_WORLD_SIZE"))?;
        let hello = Hello::new(rank, world_size, DeviceMode::Host);
        let client = Client::connect(path, &hello)
            .map_err(|error| Failure::new(Code::SystemError, format!("no prism session: {error}")))?;
        Ok(Self { client, clock_ns: AtomicI64::new(0), memory: Mutex::default() })
    }

    /// Value of a key of the session's configuration.
    pub(crate) fn config(&self, key: &str) -> Option<&str> {
        let mut lines = self.client.config().lines().filter_map(|line| line.split_once('='));
        lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value)
    }

    /// Appends a record after `cost_ns` on the host. `None` when it was cancelled while the ring was full.
    #[inline]
    pub(crate) fn append(
        &self,
        record: &Record,
        cost_ns: i64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<()>, Gone> {
        let host_ns = self.clock_ns.fetch_add(cost_ns, Ordering::Relaxed) + cost_ns;
        let is_appended = self.client.append_unless(&Record { host_ns, ..*record }, is_cancelled).map_err(|_| Gone)?;
        Ok(is_appended.then_some(()))
    }

    /// Waits until the engine has taken in what was appended so far. Moves no clock.
    pub(crate) fn settle(&self) -> Result<(), Code> {
        let host_ns = self.clock_ns.load(Ordering::Relaxed);
        let query =
            Record { kind: RecordKind::StreamQuery as u16, flags: FLAG_BACKGROUND, host_ns, ..Record::default() };
        self.client.query(query).map(|_| ()).map_err(|_| Code::RemoteError)
    }

    /// Waits until everything appended so far is done; the host clock goes on from there.
    /// When cancelled it stops waiting, with [`Code::InProgress`].
    pub(crate) fn drain(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), Code> {
        let host_ns = self.clock_ns.load(Ordering::Relaxed);
        let query = Record { kind: RecordKind::StreamSync as u16, host_ns, ..Record::default() };
        let reply = self.client.query_unless(query, is_cancelled).map_err(|_| Code::RemoteError)?;
        let reply = reply.ok_or(Code::InProgress)?;
        match reply.status {
            status if status == ReplyStatus::Ok as u32 => {
                self.clock_ns.fetch_max(reply.host_ns, Ordering::Relaxed);
                Ok(())
            }
            status if status == ReplyStatus::Disconnected as u32 => Err(Code::RemoteError),
            _ => Err(Code::InternalError),
        }
    }

    /// Sends a control request. The error is the text of a refusal, or `None` when the engine is gone.
    pub(crate) fn control(&self, kind: ControlKind, payload: &[u8]) -> Result<Vec<u8>, Option<String>> {
        self.client.control(kind, payload).map_err(|error| match error {
            ControlError::Refused(text) => Some(text),
            ControlError::Disconnected => None,
        })
    }

    /// Host memory in place of device memory, zeroed; null when there is no room.
    pub(crate) fn alloc(&self, bytes: usize) -> *mut c_void {
        let Ok(layout) = Layout::from_size_align(bytes, ALIGNMENT) else { return core::ptr::null_mut() };
        if bytes == 0 {
            return core::ptr::null_mut();
        }
        // SAFETY: the size is not zero.
        let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
        if !pointer.is_null() {
            self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(pointer.addr(), layout);
        }
        pointer.cast()
    }

    /// Frees memory of [`Self::alloc`]; false if it is not that.
    pub(crate) fn free(&self, pointer: *mut c_void) -> bool {
        let layout = self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(&pointer.addr());
        match layout {
            Some(layout) => {
                // SAFETY: allocated with this layout, and just removed, so freed once.
                unsafe { std::alloc::dealloc(pointer.cast(), layout) };
                true
            }
            None => false,
        }
    }
}
