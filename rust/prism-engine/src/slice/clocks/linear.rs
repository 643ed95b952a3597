//! Systems of linear equations with a symmetric positive definite matrix.

/// Lower triangle of a symmetric matrix.
pub(super) struct Symmetric {
    size: usize,
    values: Vec<f64>,
}

/// Its Cholesky factor.
pub(super) struct Factor(Symmetric);

/// A pivot that is so much smaller than what it was before elimination is nothing but rounding.
const RANK_TOLERANCE: f64 = 1e-11;

impl Symmetric {
    pub(super) fn new(size: usize) -> Self {
        Self { size, values: vec![0.0; size * (size + 1) / 2] }
    }

    fn at(row: usize, column: usize) -> usize {
        row * (row + 1) / 2 + column
    }

    /// Adds to the element in `row` and `column`, which is not above the diagonal.
    pub(super) fn add(&mut self, row: usize, column: usize, value: f64) {
        self.values[Self::at(row, column)] += value;
    }

    /// The factor, or the first unknown that the equations do not tell from those before.
    pub(super) fn factor(self) -> Result<Factor, usize> {
        let mut values = self.values;
        for row in 0..self.size {
            let start = Self::at(row, 0);
            let before = values[start + row];
            for column in 0..=row {
                let other = Self::at(column, 0);
                let (done, own) = values.split_at(start);
                let theirs = if column == row { own } else { &done[other..] };
                let product: f64 = own[..column].iter().zip(&theirs[..column]).map(|(a, b)| a * b).sum();
                let rest = own[column] - product;
                values[start + column] = if column < row {
                    rest / values[other + column]
                } else if rest > before.max(f64::MIN_POSITIVE) * RANK_TOLERANCE {
                    rest.sqrt()
                } else {
                    return Err(row);
                };
            }
        }
        Ok(Factor(Symmetric { size: self.size, values }))
    }
}

impl Factor {
    pub(super) fn solve(&self, right: &[f64]) -> Vec<f64> {
        let Symmetric { size, values } = &self.0;
        let mut x = right.to_vec();
        for row in 0..*size {
            let own = &values[Symmetric::at(row, 0)..];
            let known: f64 = own[..row].iter().zip(&x).map(|(a, b)| a * b).sum();
            x[row] = (x[row] - known) / own[row];
        }
        for row in (0..*size).rev() {
            let known: f64 = (row + 1..*size).map(|below| values[Symmetric::at(below, row)] * x[below]).sum();
            x[row] = (x[row] - known) / values[Symmetric::at(row, row)];
        }
        x
    }

    /// An element of the inverse's diagonal.
    pub(super) fn inverse_at(&self, index: usize) -> f64 {
        let mut unit = vec![0.0; self.0.size];
        unit[index] = 1.0;
        self.solve(&unit)[index]
    }
}
