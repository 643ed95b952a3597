//! Ends of a collective of all communicators of a batch: all columns together where its form allows, else one by one, and from
//! memory where the arrivals were seen before.

use super::memo::Memo;
use super::signature::Call;
use crate::collective::{self, CollectiveCall, CommShape, Scratch};
use crate::units::SimTime;

/// A call as all members of a communicator of `size` make it.
pub(super) fn collective_call(call: &Call, size: usize) -> CollectiveCall {
    CollectiveCall { kind: call.kind, bytes: call.buffer_bytes(size as u64), root: call.root, ops: call.ops }
}

/// Ends of a collective of a batch, and the latest of them, saturated.
pub(super) fn evaluate(
    shape: &CommShape,
    call: &CollectiveCall,
    width: usize,
    (arrivals, ends): (&[SimTime], &mut [SimTime]),
    memos: &mut Vec<Memo>,
    scratch: &mut Scratch,
) -> SimTime {
    if width > 1
        && let Some(latest) = collective::batch_completion(shape, call, width, arrivals, ends, scratch)
    {
        return latest;
    }
    if width == 1 {
        return evaluate_one(shape, call, (arrivals, ends), (memos, 0, 1), scratch);
    }
    let (mut own, mut own_ends) = (vec![SimTime::ZERO; shape.len()], vec![SimTime::ZERO; shape.len()]);
    let mut latest = SimTime(i64::MIN);
    for column in 0..width {
        let places = || (column..arrivals.len()).step_by(width);
        own.iter_mut().zip(places()).for_each(|(own, place)| *own = arrivals[place]);
        latest = latest.max(evaluate_one(shape, call, (&own, &mut own_ends), (memos, column, width), scratch));
        own_ends.iter().zip(places()).for_each(|(own, place)| ends[place] = *own);
    }
    latest
}

fn evaluate_one(
    shape: &CommShape,
    call: &CollectiveCall,
    (arrivals, ends): (&[SimTime], &mut [SimTime]),
    (memos, column, width): (&mut Vec<Memo>, usize, usize),
    scratch: &mut Scratch,
) -> SimTime {
    if let Some(latest) = collective::quick_completion(shape, call, arrivals, ends, scratch) {
        return latest;
    }
    if memos.is_empty() {
        memos.resize_with(width, Memo::default);
    }
    let memo = &mut memos[column];
    memo.recall(call, arrivals, ends).unwrap_or_else(|| {
        collective::completion(shape, call, arrivals, ends, scratch);
        memo.keep(*call, arrivals, ends)
    })
}
