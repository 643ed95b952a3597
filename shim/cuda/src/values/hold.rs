//! Operators whose outputs are known better than their kernels tell.
//!
//! Parameters of kernels hold stale pointers: structs are passed with parts that were never set. An operator of the value
//! plane knows what it writes to, so while it runs, launches only name themselves as writers and make nothing unknown.

use super::blocks::{Block, Blocks};
use super::known;
use std::cell::{Cell, RefCell};

thread_local! {
    /// For each operator that runs: number of launches before it.
    static OPERATORS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
    static LAST_WRITER: Cell<u32> = const { Cell::new(0) };
}

/// An operator begins.
pub(super) fn begin() {
    OPERATORS.with_borrow_mut(|operators| operators.push(LAUNCHES.get()));
    DEPTH.set(DEPTH.get() + 1);
}

/// The operator that began last ends. Has it launched anything?
pub(super) fn end() -> bool {
    let before = OPERATORS.with_borrow_mut(Vec::pop);
    DEPTH.set(DEPTH.get().saturating_sub(1));
    before.is_none_or(|before| before != LAUNCHES.get())
}

/// Number of what the calling thread launched last.
pub(super) fn last_writer() -> u32 {
    LAST_WRITER.get()
}

/// Something is launched; does an operator say what it writes?
#[inline]
pub(super) fn launch(writer: u32) -> bool {
    LAUNCHES.set(LAUNCHES.get() + 1);
    LAST_WRITER.set(writer);
    DEPTH.get() > 0
}

/// What is launched may write anywhere in a block.
#[inline]
pub(super) fn written(blocks: &Blocks, block: &Block, writer: u32, is_held: bool) {
    if is_held {
        known::written_by_held(blocks, block, writer);
    } else {
        known::written_by(blocks, block, writer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_may_be_nested() {
        assert!(!launch(5));
        begin();
        begin();
        assert!(!end(), "nothing was launched inside");
        assert!(launch(6));
        begin();
        assert!(!end());
        assert!(end());
        assert_eq!(last_writer(), 6);
        assert!(!launch(7));
    }
}
