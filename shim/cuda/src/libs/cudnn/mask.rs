//! Which entries of the score matrix an attention graph leaves out: they are not computed.

use super::descriptor::Descriptor;
use super::graph::visit;
use super::names::{attribute, kind, pointwise};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The shape of a mask. A window that also cuts entries off on the left is counted without that cut, and so are lengths
/// that only the device knows (padding, packed sequences).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mask {
    /// Every entry is computed.
    Full,
    /// Row i sees columns 0..=i.
    TopLeft,
    /// The last row sees every column, each row before it one less.
    BottomRight,
}

/// What the mask is read from: comparisons of positions, and where positions come from.
#[derive(Default)]
struct Positions {
    /// Unique ids of tensors that hold row or column numbers.
    plain: BTreeSet<i64>,
    /// Unique ids of tensors that hold row or column numbers plus something.
    shifted: BTreeSet<i64>,
    /// Sums: (input, output).
    sums: Vec<(i64, i64)>,
    /// "Greater or equal" comparisons of two tensors.
    comparisons: Vec<[i64; 2]>,
    /// Band masks that keep entries on and below a diagonal: is the diagonal placed by sequence lengths?
    bands: Vec<bool>,
}

impl Mask {
    /// The mask of a graph: a causal one is a band mask, or a comparison "row number ≥ column number".
    pub(super) fn of(operations: &[Arc<Descriptor>]) -> Self {
        let mut positions = Positions::default();
        visit(operations, &mut |descriptor| positions.see(descriptor));
        positions.follow_sums();
        let aligned = |is_shifted| if is_shifted { Self::BottomRight } else { Self::TopLeft };
        if let Some(by_lengths) = positions.bands.first() {
            return aligned(*by_lengths);
        }
        let is_position = |id: &i64| positions.plain.contains(id) || positions.shifted.contains(id);
        let causal = positions.comparisons.iter().find(|pair| pair.iter().all(is_position));
        causal.map_or(Self::Full, |pair| aligned(pair.iter().any(|id| positions.shifted.contains(id))))
    }

    /// The part of `flop` that the kept entries of a `rows` × `columns` matrix take.
    pub(super) fn share(self, flop: u64, rows: u64, columns: u64) -> u64 {
        let (rows, columns) = (u128::from(rows), u128::from(columns));
        let square = rows.min(columns);
        let triangle = square * (square + 1) / 2;
        let kept = match self {
            Self::Full => return flop,
            // The rows below the triangle see everything.
            Self::TopLeft => triangle + (rows - square) * columns,
            // Every row sees the columns left of the triangle; rows above it see nothing.
            Self::BottomRight => triangle + (columns - square) * rows,
        };
        if rows * columns == 0 {
            return 0;
        }
        u64::try_from(u128::from(flop) * kept / (rows * columns)).unwrap_or(u64::MAX)
    }
}

impl Positions {
    fn see(&mut self, descriptor: &Descriptor) {
        match descriptor.kind {
            kind::DIAGONAL_BAND_MASK => {
                let mode = descriptor.integer(attribute::BAND_MASK_COMPARISON);
                if mode == Some(i64::from(pointwise::COMPARE_GREATER_EQUAL)) {
                    self.bands.push(descriptor.descriptor(attribute::BAND_MASK_LENGTH_KV).is_some());
                }
            }
            kind::OPERATION_POINTWISE => self.see_pointwise(descriptor),
            _ => {}
        }
    }

    fn see_pointwise(&mut self, descriptor: &Descriptor) {
        let settings = descriptor.descriptor(attribute::OPERATION_POINTWISE_DESC).filter(|d| d.kind == kind::POINTWISE);
        let mode =
            settings.and_then(|d| d.integer(attribute::POINTWISE_MODE)).and_then(|mode| i32::try_from(mode).ok());
        let id = |attribute| descriptor.descriptor(attribute).and_then(|t| t.integer(attribute::TENSOR_UNIQUE_ID));
        let x = id(attribute::OPERATION_POINTWISE_X);
        let b = id(attribute::OPERATION_POINTWISE_B);
        let y = id(attribute::OPERATION_POINTWISE_Y);
        match (mode, x, b, y) {
            (Some(pointwise::GENERATE_INDEX), _, _, Some(y)) => _ = self.plain.insert(y),
            (Some(pointwise::ADD | pointwise::SUB), Some(x), _, Some(y)) => self.sums.push((x, y)),
            (Some(pointwise::COMPARE_GREATER_EQUAL), Some(x), Some(b), _) => self.comparisons.push([x, b]),
            _ => {}
        }
    }

    /// A position plus something is a shifted position, in any number of steps.
    fn follow_sums(&mut self) {
        loop {
            let known = |id: &i64| self.plain.contains(id) || self.shifted.contains(id);
            let new: Vec<_> = self.sums.iter().filter(|(x, y)| known(x) && !known(y)).map(|(_, y)| *y).collect();
            if new.is_empty() {
                return;
            }
            self.shifted.extend(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the kept entries one by one.
    fn counted(rows: i64, columns: i64, shift: i64) -> u64 {
        let kept = |row: i64| (0..columns).filter(|column| *column <= row + shift).count() as u64;
        (0..rows).map(kept).sum()
    }

    #[test]
    fn shares_are_those_of_the_kept_entries() {
        for (rows, columns) in [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1)] {
            let all = (rows * columns) as u64;
            let share = |mask: Mask| mask.share(all, rows as u64, columns as u64);
            assert_eq!(share(Mask::TopLeft), counted(rows, columns, 0));
            assert_eq!(share(Mask::BottomRight), counted(rows, columns, columns - rows));
            assert_eq!(share(Mask::Full), all);
        }
        assert_eq!(Mask::TopLeft.share(8, 0, 4), 0);
    }
}
