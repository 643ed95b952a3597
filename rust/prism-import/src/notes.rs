//! What was repaired, inferred or left out: counted all, listed up to a limit.

use serde::Serialize;
use std::collections::BTreeMap;

/// Entries listed of one kind.
pub const LISTED: usize = 40;

/// One kind of repair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Note {
    /// How often.
    pub count: u64,
    /// The first [`LISTED`] of them in words.
    pub listed: Vec<String>,
}

/// Repairs by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Notes(pub BTreeMap<&'static str, Note>);

impl Notes {
    /// Notes one more.
    pub fn add(&mut self, kind: &'static str, text: impl FnOnce() -> String) {
        let note = self.0.entry(kind).or_default();
        note.count += 1;
        if note.listed.len() < LISTED {
            note.listed.push(text());
        }
    }

    /// Takes over those of another.
    pub fn merge(&mut self, other: Self) {
        for (kind, note) in other.0 {
            let mine = self.0.entry(kind).or_default();
            mine.count += note.count;
            mine.listed.extend(note.listed.into_iter().take(LISTED.saturating_sub(mine.listed.len())));
        }
    }

    /// How often something was noted.
    #[must_use]
    pub fn count(&self, kind: &str) -> u64 {
        self.0.get(kind).map_or(0, |note| note.count)
    }
}
