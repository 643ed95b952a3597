//! Collectives of one `ncclGroup` on one communicator: which run as one.
//!
//! NCCL launches one kernel for all of them. It sorts them by size, bins them by function, type and reduction, and fuses those
//! of a bin that are within four times the smallest's size: a fused batch is chosen algorithm and protocol for by its total
//! size and spread over the channels as a whole. What is made of messages (all-to-all, gather, scatter) comes after all others.
//! Source: `ncclPrepareTasks` in `src/enqueue.cc`, from version 2.22 on; the versions before fused by another rule, which
//! is not modelled.
//!
//! Unlike NCCL, calls with different roots are not fused: their batch would not be one recurrence. Batches of one kernel are
//! evaluated one after the other.

use super::CollectiveKind;
use super::tuning::Function;

/// Ops whose size is below this times the smallest of the batch join it.
const MOST_RATIO: u64 = 4;

/// What fusion asks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groupable<K> {
    /// Which collective.
    pub kind: CollectiveKind,
    /// Type, reduction and root: only equal ones are fused.
    pub key: K,
    /// Bytes of the buffer.
    pub bytes: u64,
}

/// Batches of one group in the order they run, each the places of its calls in `calls`, the smallest call first. A group that
/// was called in another order gives the same batches, but for calls of equal size, whose order follows the calls.
#[must_use]
pub fn fuse<K: PartialEq>(calls: &[Groupable<K>]) -> Vec<Vec<usize>> {
    let is_tuned = |at: &usize| Function::of(calls[*at].kind).is_some();
    let (mut order, messages): (Vec<usize>, Vec<usize>) = (0..calls.len()).partition(is_tuned);
    order.sort_by_key(|at| std::cmp::Reverse(calls[*at].bytes));
    // A bin comes at the place of its largest call, and is filled from there downwards.
    let mut bins: Vec<Vec<usize>> = Vec::new();
    for at in order {
        let is_alike =
            |bin: &&mut Vec<usize>| (calls[bin[0]].kind, &calls[bin[0]].key) == (calls[at].kind, &calls[at].key);
        match bins.iter_mut().find(is_alike) {
            Some(bin) => bin.push(at),
            None => bins.push(vec![at]),
        }
    }
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for mut bin in bins {
        bin.reverse();
        let mut rest = bin.as_slice();
        while let Some(first) = rest.first() {
            let limit = calls[*first].bytes.saturating_mul(MOST_RATIO);
            let joins = |at: &usize| calls[*at].bytes < limit || calls[*at].bytes == calls[*first].bytes;
            let length = rest.iter().take_while(|at| joins(at)).count();
            batches.push(rest[..length].to_vec());
            rest = &rest[length..];
        }
    }
    batches.extend(messages.into_iter().map(|at| vec![at]));
    batches
}
