//! A second process of a live rank: a helper that the program started while it uses the device itself (a compiler's worker
//! that asks what the device is). It sees a device; what it does there is no part of the job, and the summary says so.

use super::state::State;
use prism_wire::frame::Request;
use prism_wire::message::{RecordKind, Reply, ReplyStatus};
use prism_wire::server::{ControlChannel, RecordReader, ReplyWriter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const BATCH: usize = 1024;
const NOTE: &str = "another process of the rank used the device: what it did there is not part of the job";

/// Serves its control requests. None of them can end the session.
pub(super) fn control_loop(rank: u32, mut control: ControlChannel, state: &Mutex<State>) {
    while let Ok(Some((kind, payload))) = control.recv() {
        let answer = Request::decode(kind, &payload)
            .map_err(|error| error.to_string())
            .and_then(|request| state.lock().unwrap_or_else(PoisonError::into_inner).control_of_helper(rank, request));
        let sent = match answer {
            Ok(payload) => control.answer(kind, &payload),
            Err(text) => control.refuse(&text),
        };
        if sent.is_err() {
            break;
        }
    }
}

/// Answers its queries (everything is complete at once) and counts the rest.
pub(super) fn record_loop(
    rank: u32,
    mut records: RecordReader,
    replies: &ReplyWriter,
    state: &Mutex<State>,
    stop: &AtomicBool,
    poll: Duration,
) {
    let mut num_ops = 0;
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        let has_records = records.wait(poll);
        batch.clear();
        records.pop_batch(&mut batch, BATCH);
        for record in &batch {
            if RecordKind::from_u16(record.kind).is_none_or(RecordKind::is_query) {
                let done = Reply { status: ReplyStatus::Ok as u32, reserved: 0, value: 1, host_ns: record.host_ns };
                // A bad slot index is the process's own damage.
                let _ = replies.answer(record.h, done);
            } else {
                num_ops += 1;
            }
        }
        if batch.is_empty() && !has_records && (records.is_closed() || stop.load(Ordering::Acquire)) {
            break;
        }
    }
    if num_ops > 0 {
        let note = Request::Note { count: num_ops, text: NOTE.to_owned() };
        let _ = state.lock().unwrap_or_else(PoisonError::into_inner).control_of_helper(rank, note);
    }
}
