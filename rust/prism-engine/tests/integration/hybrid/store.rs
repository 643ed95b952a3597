//! The launcher's rendezvous store, as far as NCCL ids need it.

use prism_engine::hybrid::Session;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A generous bound for what takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Keys and values of all live ranks.
pub(crate) struct Store {
    live: BTreeSet<u32>,
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store {
    pub(crate) fn new(live: &[u32]) -> Self {
        Self { live: live.iter().copied().collect(), values: Mutex::default(), changed: Condvar::new() }
    }

    pub(crate) fn set(&self, session: &Session, key: &str, value: &[u8]) {
        let kept = session.store_set(key, value);
        self.values.lock().expect("no panic").insert(key.to_owned(), kept);
        self.changed.notify_all();
    }

    /// Waits for a value that `writer` sets, or makes it up if `writer` does not run.
    pub(crate) fn get(&self, session: &Session, key: &str, writer: u32) -> Vec<u8> {
        if !self.live.contains(&writer) {
            return session.absent_value(key).expect("an NCCL key");
        }
        let values = self.values.lock().expect("no panic");
        let is_missing = |values: &mut BTreeMap<String, Vec<u8>>| !values.contains_key(key);
        let (values, timeout) = self.changed.wait_timeout_while(values, PATIENCE, is_missing).expect("no panic");
        assert!(!timeout.timed_out(), "rank {writer} never set {key}");
        values[key].clone()
    }
}
