//! A forked child has no session and does not disturb its parent's.

use crate::support::{self, expected_reply, kernel, query};
use prism_wire::client::{Client, ControlError, Disconnected};
use prism_wire::control::ControlKind;
use prism_wire::server::Connection;
use std::mem::ManuallyDrop;

/// Exit status of a child that runs `body`.
fn in_child(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs calls that neither allocate nor take locks of other threads, and leaves with _exit.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::_exit(i32::from(!body()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    }
}

fn everything_is_disconnected(client: &Client) -> bool {
    client.append(&kernel(1)) == Err(Disconnected)
        && client.query(query(1)) == Err(Disconnected)
        && client.control(ControlKind::Note, &[]) == Err(ControlError::Disconnected)
}

#[test]
fn children_have_no_session_and_leave_the_parents_alone() {
    let (client, Connection { records, replies, control: _control, .. }) = support::session(64);
    let mut client = ManuallyDrop::new(client);
    std::thread::scope(|scope| {
        let engine = scope.spawn(move || {
            let mut seen = Vec::new();
            support::answer_queries(records, &replies, |record| seen.push(record.a));
            seen
        });
        assert_eq!(client.query(query(1)), Ok(expected_reply(&query(1))));
        assert_eq!(in_child(|| everything_is_disconnected(&client)), 0);
        let closed_in_child = in_child(|| {
            client.close();
            // SAFETY: the child does not use the client again.
            unsafe { ManuallyDrop::drop(&mut client) };
            true
        });
        assert_eq!(closed_in_child, 0);
        assert_eq!(client.query(query(2)), Ok(expected_reply(&query(2))));
        client.close();
        assert_eq!(engine.join().unwrap(), [1, 2]);
    });
    // SAFETY: dropped once, here.
    unsafe { ManuallyDrop::drop(&mut client) };
}
