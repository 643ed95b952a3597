//! How late streams were released: a histogram of 1/8 octaves, so that it needs no memory however long a run is.

/// Steps per doubling.
const STEPS: usize = 8;
const BUCKETS: usize = 64 * STEPS;

/// Distribution of a time in ns.
pub(crate) struct Errors {
    counts: Box<[u64; BUCKETS]>,
    total: u64,
    max: u64,
}

impl Default for Errors {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), total: 0, max: 0 }
    }
}

fn bucket(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let octave = ns.ilog2() as usize;
    let step = (ns >> (octave - 3)) as usize & (STEPS - 1);
    (octave - 2) * STEPS + step
}

/// Largest value of a bucket.
fn upper(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let (octave, step) = (bucket / STEPS + 2, (bucket % STEPS) as u128);
    (((STEPS as u128 + step + 1) << (octave - 3)) - 1).min(u128::from(u64::MAX)) as u64
}

impl Errors {
    pub(crate) fn add(&mut self, ns: i64) {
        let ns = ns.max(0) as u64;
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.max = self.max.max(ns);
    }

    /// How many there are.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The largest.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// No more than `permille` thousandths are above this, to an eighth of an octave.
    pub(crate) fn quantile(&self, permille: u64) -> u64 {
        let wanted = (self.total * permille).div_ceil(1_000).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return upper(index).min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_an_eighth_of_an_octave_wide() {
        for ns in (0..4_096).chain([1 << 20, (1 << 40) + 12_345, u64::MAX]) {
            let upper = upper(bucket(ns));
            assert!(upper >= ns && upper - ns <= ns / 8, "{ns} {upper}");
            assert!(ns == 0 || super::upper(bucket(ns) - usize::from(bucket(ns) > 0)) < ns || bucket(ns) == 0, "{ns}");
        }
    }

    #[test]
    fn quantiles_are_of_what_was_added() {
        let mut errors = Errors::default();
        (1..=1_000).for_each(|ns| errors.add(ns));
        assert_eq!((errors.total(), errors.max()), (1_000, 1_000));
        for (permille, ns) in [(500, 500), (990, 990), (1_000, 1_000)] {
            let found = errors.quantile(permille);
            assert!((ns..=ns + ns / 8).contains(&found), "{permille}: {found}");
        }
        errors.add(-5);
        assert_eq!(errors.quantile(1), 1);
    }
}
