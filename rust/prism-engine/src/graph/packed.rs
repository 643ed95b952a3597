//! Lists of integers in the narrowest whole number of bytes that holds them exactly.
//!
//! A list stores `(value - base) / step` for each value, where `step` is the largest number that divides all differences:
//! durations of whole nanoseconds lose the three digits that picoseconds add, equal values need no bytes at all.

use crate::graph::columns::Column;

/// Where a list lies and how its values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) base: u64,
    pub(crate) step: u64,
    /// First byte in the data.
    pub(crate) start: usize,
    /// Bytes per value, up to 8.
    pub(crate) width: usize,
}

/// Numbers per head in the stored form.
const HEAD_LEN: usize = 4;

/// Low bytes of a word, by their number.
pub(crate) const MASKS: [u64; 9] = {
    let mut masks = [u64::MAX; 9];
    let mut width = 0;
    while width < 8 {
        masks[width] = (1 << (8 * width)) - 1;
        width += 1;
    }
    masks
};

impl Head {
    /// Are all values zero, as far as the width tells?
    pub(crate) fn is_zero(self) -> bool {
        self.base == 0 && self.width == 0
    }

    /// Value `index` of a list without gaps. Lists are checked when a graph is made: the sum cannot overflow.
    #[inline]
    pub(crate) fn get(self, data: &[u8], index: usize) -> u64 {
        self.base.wrapping_add(self.step.wrapping_mul(self.raw(data, index)))
    }

    /// Marks the values in which this list and another differ, as far as there are marks.
    pub(crate) fn mark_differences(self, other: Self, data: &[u8], marks: &mut [bool]) {
        let bytes = |list: Self| data.get(list.start..list.start + marks.len() * list.width);
        let is_alike = (self.base, self.step, self.width) == (other.base, other.step, other.width);
        if is_alike && bytes(self) == bytes(other) {
            return;
        }
        for (index, mark) in marks.iter_mut().enumerate() {
            *mark |= self.get(data, index) != other.get(data, index);
        }
    }

    /// Value `index` of a list with gaps ([`PackedBuilder::push_with_gaps`]).
    #[inline]
    pub(crate) fn get_if_any(self, data: &[u8], index: usize) -> Option<u64> {
        let number = self.raw(data, index).checked_sub(1)?;
        Some(self.base.wrapping_add(self.step.wrapping_mul(number)))
    }

    #[inline]
    fn raw(self, data: &[u8], index: usize) -> u64 {
        let rest = &data[self.start + index * self.width..];
        if let Some(word) = rest.first_chunk() {
            return u64::from_le_bytes(*word) & MASKS[self.width];
        }
        let mut word = [0; 8];
        word[..self.width].copy_from_slice(&rest[..self.width]);
        u64::from_le_bytes(word)
    }

    /// Bytes of a list of `len` values.
    fn bytes(self, len: usize) -> Option<usize> {
        self.width.checked_mul(len)
    }
}

/// Lists, each with a [`Head`]; their lengths are known elsewhere.
pub(crate) struct Packed {
    heads: Column<u64>,
    data: Column<u8>,
}

impl Packed {
    /// Lists from stored columns. They must be [checked](Self::check) before they are read.
    pub(crate) fn from_columns(heads: Column<u64>, data: Column<u8>) -> Self {
        Self { heads, data }
    }

    /// Number of lists.
    pub(crate) fn len(&self) -> usize {
        self.heads.len() / HEAD_LEN
    }

    pub(crate) fn head(&self, list: usize) -> Head {
        let head = &self.heads[HEAD_LEN * list..HEAD_LEN * (list + 1)];
        Head { base: head[0], step: head[1], start: head[2] as usize, width: head[3] as usize }
    }

    #[inline]
    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }

    pub(crate) fn heads_bytes(&self) -> Vec<u8> {
        self.heads.to_bytes()
    }

    /// Bytes of all columns.
    pub(crate) fn memory_bytes(&self) -> usize {
        8 * self.heads.len() + self.data.len()
    }

    /// Lists of these lengths follow each other and fill the data, and no value is above `limit`. `first` is 1 for lists
    /// with gaps, else 0. Reads a list's values only where the highest its width can hold would be above the limit. The
    /// error is the list and what is wrong with it.
    pub(crate) fn check(
        &self,
        lens: impl ExactSizeIterator<Item = usize>,
        first: u64,
        limit: u64,
    ) -> Result<(), (usize, &'static str)> {
        if !self.heads.len().is_multiple_of(HEAD_LEN) || self.len() != lens.len() {
            return Err((0, "the number of lists is not the number of their lengths"));
        }
        let mut next = 0_usize;
        for (list, len) in lens.enumerate() {
            let stored = &self.heads[HEAD_LEN * list..HEAD_LEN * (list + 1)];
            if stored[2] != next as u64 {
                return Err((list, "a list does not begin where the one before ends"));
            }
            if stored[3] > 8 || stored[3] < first {
                return Err((list, "a list has an impossible width"));
            }
            let head = self.head(list);
            let end = head.bytes(len).and_then(|bytes| bytes.checked_add(next));
            next = end.filter(|end| *end <= self.data.len()).ok_or((list, "a list does not lie in the data"))?;
            let highest =
                |raw: u64| u128::from(head.base) + u128::from(head.step) * u128::from(raw.saturating_sub(first));
            let is_beyond = |raw: u64| highest(raw) > u128::from(limit);
            if is_beyond(MASKS[head.width])
                && is_beyond((0..len).map(|index| head.raw(&self.data, index)).max().unwrap_or(0))
            {
                return Err((list, "a value is higher than can be"));
            }
        }
        if next == self.data.len() { Ok(()) } else { Err((self.len(), "bytes follow the last list")) }
    }
}

/// What decides how a list is stored; taken before the list is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spread {
    /// Lowest and highest value.
    range: Option<(u64, u64)>,
    /// Greatest common divisor of all differences; 0 while there is none.
    step: u64,
    count: usize,
}

impl Spread {
    pub(crate) fn add(&mut self, value: u64) {
        self.count += 1;
        let Some((low, high)) = self.range else {
            self.range = Some((value, value));
            return;
        };
        let difference = value.abs_diff(low);
        if self.step == 0 {
            self.step = difference;
        } else if !difference.is_multiple_of(self.step) {
            self.step = gcd(self.step, difference);
        }
        self.range = Some((low.min(value), high.max(value)));
    }

    /// How many values there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Bytes per value in a list that counts from `first`.
    pub(crate) fn width(&self, first: u64) -> usize {
        let (low, high) = self.range.unwrap_or_default();
        let highest = (high - low) / self.step.max(1) + first;
        (u64::BITS - highest.leading_zeros()).div_ceil(8) as usize
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Collects lists.
#[derive(Debug, Default)]
pub(crate) struct PackedBuilder {
    heads: Vec<u64>,
    data: Vec<u8>,
}

impl PackedBuilder {
    /// A list; entries without a value are never asked for. Values are at most `i64::MAX`.
    pub(crate) fn push(&mut self, values: impl Iterator<Item = Option<u64>> + Clone) {
        let mut spread = Spread::default();
        values.clone().flatten().for_each(|value| spread.add(value));
        self.put(spread, 0, values);
    }

    /// A list in which entries may be missing: 0 is stored for them, and one more than the number for the others.
    /// `spread` is that of the values that are there.
    pub(crate) fn push_with_gaps(&mut self, spread: Spread, values: impl Iterator<Item = Option<u64>>) {
        self.put(spread, 1, values);
    }

    fn put(&mut self, spread: Spread, first: u64, values: impl Iterator<Item = Option<u64>>) {
        let (low, _) = spread.range.unwrap_or_default();
        let (step, width) = (spread.step.max(1), spread.width(first));
        self.heads.extend([low, step, self.data.len() as u64, width as u64]);
        for value in values {
            let number = value.map_or(0, |value| (value - low) / step + first);
            self.data.extend_from_slice(&number.to_le_bytes()[..width]);
        }
    }

    pub(crate) fn finish(mut self) -> Packed {
        self.data.shrink_to_fit();
        Packed { heads: self.heads.into(), data: self.data.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(lists: &[Vec<Option<u64>>]) -> Packed {
        let mut builder = PackedBuilder::default();
        for list in lists {
            let mut spread = Spread::default();
            list.iter().flatten().for_each(|value| spread.add(*value));
            builder.push_with_gaps(spread, list.iter().copied());
        }
        builder.finish()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn lists_come_back(
            lists in prop::collection::vec(
                (0_u64..1 << 62, prop_oneof![Just(1_u64), Just(1000), 1_u64..1 << 30],
                 prop::collection::vec(prop::option::of(0_u64..1 << 32), 0..20), 0_u32..33),
                0..6,
            ),
        ) {
            let lists: Vec<Vec<Option<u64>>> = (lists.into_iter())
                .map(|(base, step, numbers, shift)| {
                    let value = |number: u64| (base + step * (number >> shift)).min(i64::MAX as u64);
                    numbers.into_iter().map(|number| number.map(value)).collect()
                })
                .collect();
            let with_gaps = packed(&lists);
            let mut plain = PackedBuilder::default();
            for list in &lists {
                plain.push(list.iter().copied());
            }
            let plain = plain.finish();
            with_gaps.check(lists.iter().map(Vec::len), 1, i64::MAX as u64).map_err(|e| TestCaseError::fail(format!("{e:?}")))?;
            plain.check(lists.iter().map(Vec::len), 0, i64::MAX as u64).map_err(|e| TestCaseError::fail(format!("{e:?}")))?;
            for (list, values) in lists.iter().enumerate() {
                for (index, value) in values.iter().enumerate() {
                    prop_assert_eq!(with_gaps.head(list).get_if_any(with_gaps.data(), index), *value);
                    if let Some(value) = value {
                        prop_assert_eq!(plain.head(list).get(plain.data(), index), *value);
                    }
                }
            }
        }
    }

    #[test]
    fn whole_nanoseconds_of_a_narrow_range_take_two_bytes_and_equal_values_none() {
        let spread = |values: &[u64]| {
            let mut spread = Spread::default();
            for value in values {
                spread.add(*value);
            }
            spread
        };
        assert_eq!(spread(&[1_000_000_000, 1_050_000_000, 1_049_999_000]).width(1), 2);
        assert_eq!(spread(&[7, 7, 7]).width(0), 0);
        assert_eq!(spread(&[7, 7, 7]).width(1), 1);
        assert_eq!(spread(&[]).width(0), 0);
        assert_eq!(spread(&[0, i64::MAX as u64]).width(1), 1);
        assert_eq!(spread(&[0, 1, i64::MAX as u64]).width(1), 8);
    }

    #[test]
    fn a_list_that_does_not_fit_its_data_is_refused() {
        let good = packed(&[vec![Some(5), None, Some(900)]]);
        let heads: Vec<u64> = good.heads.to_vec();
        let changed = |at: usize, value: u64| {
            let mut heads = heads.clone();
            heads[at] = value;
            Packed::from_columns(heads.into(), good.data.to_vec().into()).check([3].into_iter(), 1, i64::MAX as u64)
        };
        assert_eq!(changed(0, 5), Ok(()));
        for (at, value) in [(0, u64::MAX), (1, u64::MAX), (2, 1), (2, u64::MAX), (3, 0), (3, 9), (3, 2), (3, u64::MAX)]
        {
            assert!(changed(at, value).is_err(), "{at} {value}");
        }
        assert!(good.check([2].into_iter(), 1, i64::MAX as u64).is_err());
        assert!(good.check([3, 0].into_iter(), 1, i64::MAX as u64).is_err());
        assert!(good.check([3].into_iter(), 1, 899).is_err(), "900 is above the limit");
        assert_eq!(good.check([3].into_iter(), 1, 900), Ok(()));
    }
}
