//! Labels of one rank.

use crate::messages::OpIndex;
use rustc_hash::FxHashMap;

/// A label as it stands in the text.
#[derive(Clone, Copy)]
pub(super) struct Label<'a> {
    pub(super) text: &'a [u8],
    /// The number of a label `l<number>` without leading zeros; otherwise [`NO_NUMBER`].
    number: u64,
}

const NO_NUMBER: u64 = u64::MAX;

impl<'a> Label<'a> {
    #[inline]
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, number: number(text).unwrap_or(NO_NUMBER) }
    }

    pub(super) fn to_text(self) -> String {
        String::from_utf8_lossy(self.text).into_owned()
    }
}

/// The number of `l<number>`, which says as much as the text: no leading zeros, at most 18 digits.
#[inline]
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(b"l")?;
    if digits.is_empty() || digits.len() > 18 || (digits[0] == b'0' && digits.len() > 1) {
        return None;
    }
    let mut value = 0;
    for byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = 10 * value + u64::from(digit);
    }
    Some(value)
}

/// Which op a label names. While the ops of a rank are labelled `l<k>`, `l<k+1>`, ..., no table is needed.
#[derive(Default)]
pub(super) struct Labels {
    /// The first op's number, and how many ops follow it in sequence.
    base: u64,
    in_sequence: u32,
    others: FxHashMap<Box<[u8]>, u32>,
}

impl Labels {
    /// Forgets all labels: the next rank begins.
    pub(super) fn clear(&mut self) {
        (self.base, self.in_sequence) = (0, 0);
        // A big rank's table is not kept for the small ones.
        self.others = FxHashMap::default();
    }

    /// Labels an op, later than all labelled so far. False if the label is taken.
    #[inline]
    pub(super) fn define(&mut self, label: Label<'_>, op: OpIndex) -> bool {
        if op.0 == 0 && label.number != NO_NUMBER {
            (self.base, self.in_sequence) = (label.number, 1);
            return true;
        }
        if op.0 == self.in_sequence && label.number == self.base + u64::from(op.0) && op.0 > 0 && self.others.is_empty()
        {
            self.in_sequence += 1;
            return true;
        }
        self.get(label).is_none() && self.others.insert(label.text.into(), op.0).is_none()
    }

    #[inline]
    pub(super) fn get(&self, label: Label<'_>) -> Option<OpIndex> {
        let index = label.number.wrapping_sub(self.base);
        if label.number != NO_NUMBER && index < u64::from(self.in_sequence) {
            return Some(OpIndex(index as u32));
        }
        self.others.get(label.text).copied().map(OpIndex)
    }
}
