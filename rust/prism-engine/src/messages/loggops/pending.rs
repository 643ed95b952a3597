//! How many dependencies each op still waits for.

use crate::messages::MessageProgram;
use crate::messages::program::{MAX_OPS, NEAR};
use rustc_hash::FxHashMap;

/// One byte per op; counts from 255 are in a table.
pub(super) struct Pending {
    counts: Vec<u8>,
    large: FxHashMap<u32, u32>,
}

const LARGE: u8 = u8::MAX;

impl Pending {
    /// Counts of a program's ops. O(ops + dependencies).
    pub(super) fn new(program: &MessageProgram) -> Self {
        let mut pending = Self { counts: vec![0; program.num_ops() as usize], large: FxHashMap::default() };
        for op in 0..pending.counts.len() {
            let near = program.words(op).near;
            if near == 1 {
                pending.counts[op + 1] += 1;
            } else if near != 0 {
                (0..NEAR as usize).filter(|d| near & (1 << d) != 0).for_each(|d| pending.counts[op + 1 + d] += 1);
            }
        }
        for (starts, far) in program.rank_start.windows(2).zip(program.far_start.windows(2)) {
            for to in &program.far_to[far[0] as usize..far[1] as usize] {
                pending.increment((starts[0] + u64::from(to & !MAX_OPS)) as u32);
            }
        }
        pending
    }

    pub(super) fn is_free(&self, op: u32) -> bool {
        self.counts[op as usize] == 0
    }

    fn increment(&mut self, op: u32) {
        let count = &mut self.counts[op as usize];
        if *count == LARGE {
            *self.large.entry(op).or_default() += 1;
            return;
        }
        *count += 1;
        if *count == LARGE {
            self.large.insert(op, LARGE.into());
        }
    }

    /// One dependency less; true if it was the last.
    #[inline]
    pub(super) fn decrement(&mut self, op: u32) -> bool {
        let count = &mut self.counts[op as usize];
        if *count == LARGE {
            let large = self.large.entry(op).or_default();
            *large -= 1;
            if *large < LARGE.into() {
                *count = *large as u8;
                self.large.remove(&op);
            }
            return false;
        }
        *count -= 1;
        *count == 0
    }
}
