//! How many dependencies an op with several still waits for.

use crate::messages::MessageProgram;
use crate::messages::program::{MAX_OPS, NEAR, flag};
use rustc_hash::FxHashMap;

/// One byte per op, in memory only where an op has several dependencies; counts from 255 are in a table.
pub(super) struct Pending {
    counts: Vec<u8>,
    large: FxHashMap<u32, u32>,
}

const LARGE: u8 = u8::MAX;

impl Pending {
    /// Counts of a program's ops. O(ops + dependencies).
    pub(super) fn new(program: &MessageProgram) -> Self {
        let num_ops = program.num_ops() as usize;
        let mut pending = Self { counts: Vec::new(), large: FxHashMap::default() };
        if !(0..num_ops).any(|op| program.words(op).flags & flag::MANY != 0) {
            return pending;
        }
        pending.counts = vec![0; num_ops];
        for op in 0..num_ops {
            let near = program.words(op).near;
            for ahead in (0..NEAR as usize).filter(|ahead| near & (1 << ahead) != 0) {
                pending.increment(program, op + 1 + ahead);
            }
        }
        for (starts, far) in program.rank_start.windows(2).zip(program.far_start.windows(2)) {
            for to in &program.far_to[far[0] as usize..far[1] as usize] {
                pending.increment(program, starts[0] as usize + (to & !MAX_OPS) as usize);
            }
        }
        pending
    }

    fn increment(&mut self, program: &MessageProgram, op: usize) {
        if program.words(op).has_one() {
            return;
        }
        let count = &mut self.counts[op];
        if *count == LARGE {
            *self.large.entry(op as u32).or_default() += 1;
            return;
        }
        *count += 1;
        if *count == LARGE {
            self.large.insert(op as u32, LARGE.into());
        }
    }

    /// One dependency less for an op with several; true if it was the last.
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
