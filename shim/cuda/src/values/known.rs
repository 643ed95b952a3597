//! Which bytes of device memory are known, and who wrote the others last.

use super::blocks::{self, Block, Blocks};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a range of bytes is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Grade {
    /// Last written by something that was not run; by whom is a number of [`name_of`].
    Unknown(u32),
    /// Given by a rule; which is a number of [`name_of`].
    Provided(u32),
    /// The bytes that a GPU would have written.
    Known,
}

/// Number of the writer of memory that nobody wrote.
const NOBODY: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    end: usize,
    /// Number of the rule, or none where the bytes are known.
    rule: Option<u32>,
}

#[derive(Default)]
struct State {
    /// Ranges that are known or provided: start to end. They do not overlap.
    spans: BTreeMap<usize, Span>,
    /// Writers and rules by number, from 1.
    names: Vec<String>,
    numbers: BTreeMap<String, u32>,
}

static STATE: Mutex<State> = Mutex::new(State { spans: BTreeMap::new(), names: Vec::new(), numbers: BTreeMap::new() });
/// Number of spans: lets a kernel that may write anything skip the lock where nothing is known anyway.
static SPANS: AtomicU32 = AtomicU32::new(0);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.names.push(name.to_owned());
        let number = self.names.len() as u32;
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// Forgets what is known of a range.
    fn cut(&mut self, start: usize, end: usize) {
        if let Some((&before, &span)) = self.spans.range(..start).next_back()
            && span.end > start
        {
            self.spans.insert(before, Span { end: start, ..span });
            if span.end > end {
                self.spans.insert(end, span);
            }
        }
        let inside: Vec<(usize, Span)> = self.spans.range(start..end).map(|(at, span)| (*at, *span)).collect();
        for (at, span) in inside {
            self.spans.remove(&at);
            if span.end > end {
                self.spans.insert(end, span);
            }
        }
        self.count();
    }

    fn add(&mut self, start: usize, end: usize, rule: Option<u32>) {
        self.cut(start, end);
        self.spans.insert(start, Span { end, rule });
        self.count();
    }

    fn count(&self) {
        SPANS.store(u32::try_from(self.spans.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// The parts of a range that are known.
    fn parts(&self, start: usize, end: usize) -> Vec<(usize, Span)> {
        let from = self.spans.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let overlapping = self.spans.range(from..end).filter(|(_, span)| span.end > start);
        overlapping.map(|(at, span)| ((*at).max(start), Span { end: span.end.min(end), ..*span })).collect()
    }
}

/// The number of a writer or a rule.
pub(super) fn number(name: &str) -> u32 {
    state().number(name)
}

/// Name of a writer or a rule.
pub(super) fn name_of(number: u32) -> String {
    match number {
        NOBODY => "nobody".to_owned(),
        number => state().names.get(number as usize - 1).cloned().unwrap_or_default(),
    }
}

/// The program's allocator hands out a block. What lies in it is of no defined value.
pub(super) fn allocated(address: usize, bytes: usize) {
    if let Some(blocks) = blocks::all() {
        forget(blocks, address);
        blocks.insert(address, bytes);
    }
}

/// A block is given back.
pub(super) fn freed(address: usize) {
    if let Some(blocks) = blocks::existing() {
        forget(blocks, address);
        blocks.remove(address);
    }
}

fn forget(blocks: &Blocks, address: usize) {
    if let Some(block) = blocks.find(address)
        && block.start == address
        && block.has_known
    {
        state().cut(block.start, block.end);
    }
}

/// A kernel may have written anywhere in a block.
#[inline]
pub(super) fn written_by(blocks: &Blocks, block: &Block, writer: u32) {
    if block.has_known {
        state().cut(block.start, block.end);
    }
    blocks.set(block, writer, false);
}

/// As [`written_by`], but what is known stays so.
pub(super) fn written_by_held(blocks: &Blocks, block: &Block, writer: u32) {
    if !block.has_known {
        blocks.set(block, writer, false);
    }
}

/// A kernel may have written anywhere at all.
pub(super) fn everything_written() {
    if SPANS.load(Ordering::Relaxed) > 0 {
        let mut state = state();
        state.spans.clear();
        state.count();
    }
}

/// The blocks that a range lies in, in order. Parts of the range that are in no block are left out.
fn blocks_of(blocks: &Blocks, start: usize, end: usize) -> Vec<Block> {
    let mut found = Vec::new();
    let mut at = start;
    while let Some(block) = (at < end).then(|| blocks.find(at)).flatten() {
        at = block.end;
        found.push(block);
    }
    found
}

/// Exactly these bytes were written by something that was not run.
pub(super) fn unknown(address: usize, bytes: usize, writer: u32) {
    let Some(blocks) = blocks::existing().filter(|_| bytes > 0) else { return };
    let end = address.saturating_add(bytes);
    for block in blocks_of(blocks, address, end) {
        if block.has_known {
            state().cut(block.start.max(address), block.end.min(end));
        }
        blocks.set_writer(&block, writer);
    }
}

/// Exactly these bytes are known now, or provided by a rule.
pub(super) fn known(address: usize, bytes: usize, rule: Option<u32>) {
    let Some(blocks) = blocks::existing().filter(|_| bytes > 0) else { return };
    let end = address.saturating_add(bytes);
    for block in blocks_of(blocks, address, end) {
        state().add(block.start.max(address), block.end.min(end), rule);
        blocks.set(&block, block.writer, true);
    }
}

/// What a range is worth: as much as its worst byte.
pub(super) fn grade(address: usize, bytes: usize) -> Grade {
    let end = address.saturating_add(bytes);
    let parts = state().parts(address, end);
    let mut at = address;
    let mut worst = Grade::Known;
    for (start, span) in parts {
        if start > at {
            return Grade::Unknown(writer_at(at));
        }
        worst = span.rule.map_or(worst, |rule| worst.min(Grade::Provided(rule)));
        at = span.end;
    }
    if at < end { Grade::Unknown(writer_at(at)) } else { worst }
}

fn writer_at(address: usize) -> u32 {
    blocks::existing().and_then(|blocks| blocks.find(address)).map_or(NOBODY, |block| block.writer)
}

/// A copy within device memory: the destination is worth what the source is.
pub(super) fn copied(to: usize, from: usize, bytes: usize) {
    let parts = state().parts(from, from.saturating_add(bytes));
    unknown(to, bytes, writer_at(from));
    for (start, span) in parts {
        known(to + (start - from), span.end - start, span.rule);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_cut_and_joined() {
        let mut state = State::default();
        state.add(100, 200, None);
        state.cut(120, 130);
        state.add(150, 160, Some(1));
        let parts: Vec<_> = state.parts(0, 300).iter().map(|(at, span)| (*at, span.end, span.rule)).collect();
        assert_eq!(parts, [(100, 120, None), (130, 150, None), (150, 160, Some(1)), (160, 200, None)]);
        assert_eq!(state.parts(125, 135), [(130, Span { end: 135, rule: None })]);
        state.cut(0, 155);
        assert_eq!(state.parts(0, 300).len(), 2);
        state.cut(155, 1000);
        assert!(state.spans.is_empty());
    }

    #[test]
    fn worth_of_a_range() {
        // Addresses of the last card, that no other test uses.
        let base = crate::memory::ADDRESSES.end - (1 << 30);
        let (kernel, rule) = (number("some_kernel"), number("some rule"));
        assert_eq!((name_of(kernel), name_of(0)), ("some_kernel".to_owned(), "nobody".to_owned()));
        allocated(base, 4096);
        assert_eq!(grade(base, 8), Grade::Unknown(0));
        known(base, 16, None);
        assert_eq!(grade(base, 16), Grade::Known);
        known(base + 8, 4, Some(rule));
        assert_eq!(grade(base, 16), Grade::Provided(rule));
        let blocks = blocks::existing().expect("made");
        written_by(blocks, &blocks.find(base + 4000).expect("inside"), kernel);
        assert_eq!(grade(base, 8), Grade::Unknown(kernel));
        known(base + 512, 100, None);
        copied(base + 1024, base + 512, 200);
        assert_eq!(grade(base + 1024, 100), Grade::Known);
        assert_eq!(grade(base + 1024, 101), Grade::Unknown(kernel));
        unknown(base + 1030, 2, kernel);
        assert_eq!(grade(base + 1024, 6), Grade::Known);
        assert_eq!(grade(base + 1032, 92), Grade::Known);
        freed(base);
        allocated(base, 4096);
        assert_eq!(grade(base + 512, 4), Grade::Unknown(0));
        freed(base);
        known(base, 8, None);
        assert_eq!(grade(base, 8), Grade::Unknown(0), "memory of no block is never known");
    }
}
