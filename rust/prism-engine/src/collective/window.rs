//! Maxima over moving windows, and the sentinel for "no path".

/// Earlier than every time that is evaluated, with room to add durations to it.
pub(crate) const NEVER: i64 = -(1 << 62);

/// Times and durations beyond this are not evaluated but saturate, so that no sum in the evaluators can overflow.
pub(crate) const LIMIT: i64 = 1 << 60;

/// Is `key` derived from [`NEVER`]?
pub(crate) fn is_never(key: i64) -> bool {
    key < -(1 << 61)
}

/// Maximum over a window of positions whose two ends only move forward: a queue in which every key is smaller than the
/// keys before it. Amortised O(1) per operation.
#[derive(Debug, Default)]
pub(crate) struct MaxWindow {
    items: Vec<(i64, i64)>,
    head: usize,
}

impl MaxWindow {
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.head = 0;
    }

    /// Adds `key` at `position`, which is after all positions so far.
    pub(crate) fn push(&mut self, position: i64, key: i64) {
        while self.items.len() > self.head && self.items[self.items.len() - 1].1 <= key {
            self.items.pop();
        }
        self.items.push((position, key));
    }

    /// The largest key at `first` or later, or [`NEVER`]. Forgets everything before `first`.
    pub(crate) fn max_from(&mut self, first: i64) -> i64 {
        while self.items.get(self.head).is_some_and(|item| item.0 < first) {
            self.head += 1;
        }
        self.items.get(self.head).map_or(NEVER, |item| item.1)
    }
}

/// The distinct values of `values`, ascending, into `into`.
pub(crate) fn distinct<'a>(values: impl IntoIterator<Item = &'a i64>, into: &mut Vec<i64>) {
    into.clear();
    for &value in values {
        // Links come in runs of equal cost: the look-back keeps the list short before it is sorted.
        if into.last() != Some(&value) {
            into.push(value);
        }
    }
    into.sort_unstable();
    into.dedup();
}
