//! Payloads on a real device, tier T1: while the stream is held, a thread of the session fetches what this rank
//! contributes, mirrors it ([`crate::values`]) and puts the result where the program looks for it.

use crate::comm::{Comm, PreMul, Scalar};
use crate::guard;
use crate::notes::{self, Fate};
use crate::session::Session;
use crate::values::Payload;
use core::ffi::c_void;
use prism_wire::device::SessionTable;

/// A payload to be mirrored, and how to reach the card.
struct Staged {
    payload: Payload,
    table: &'static SessionTable,
}

/// Has the payload mirrored when the next communication of this thread holds its stream.
pub(crate) fn attach(session: &Session, table: &'static SessionTable, comm: Comm, payload: &Payload) {
    let extent = payload.extent();
    if extent.recv == 0 {
        return;
    }
    if !payload.is_small() {
        return notes::count(session, comm, Fate::TooLarge, payload.kind);
    }
    let staged = Box::into_raw(Box::new(Staged { payload: *payload, table }));
    // SAFETY: a function of the table; `run` takes back what is handed over, once.
    if unsafe { (table.attach)(run, staged.cast()) } == 0 {
        return notes::count(session, comm, Fate::Mirrored, payload.kind);
    }
    // SAFETY: nobody took it.
    drop(unsafe { Box::from_raw(staged) });
    notes::count(session, comm, Fate::Foreign, payload.kind);
}

unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: made by `attach`, and given to one call only.
    let staged = unsafe { Box::from_raw(data.cast::<Staged>()) };
    guard::call(move || {
        // A copy that fails was told by the session; the buffer is left as it is.
        let _ = staged.mirror();
    });
}

impl Staged {
    fn fetch(&self, to: *mut u8, from: usize, bytes: usize) -> Option<()> {
        // SAFETY: a function of the table; `to` has room for that many bytes, `from` is checked by the driver.
        let code = unsafe { (self.table.copy)(to.cast(), core::ptr::with_exposed_provenance(from), bytes) };
        (code == 0).then_some(())
    }

    fn mirror(&self) -> Option<()> {
        let extent = self.payload.extent();
        let (mut send, mut recv) = (vec![0_u8; extent.send as usize], vec![0_u8; extent.recv as usize]);
        self.fetch(send.as_mut_ptr(), self.payload.send, send.len())?;
        let mut staged = self.payload;
        (staged.send, staged.recv) = (send.as_ptr().expose_provenance(), recv.as_mut_ptr().expose_provenance());
        if let Some(PreMul { dtype, scalar: Scalar::Device(address) }) = staged.scale {
            let mut value = [0_u8; 8];
            self.fetch(value.as_mut_ptr(), address, staged.dtype.size_bytes() as usize)?;
            staged.scale = Some(PreMul { dtype, scalar: Scalar::Value(u64::from_le_bytes(value)) });
        }
        // SAFETY: both buffers have the extents of the payload.
        unsafe { staged.mirror() };
        let to = core::ptr::with_exposed_provenance_mut(self.payload.recv);
        // SAFETY: a function of the table; the driver checks `to`.
        let code = unsafe { (self.table.copy)(to, recv.as_ptr().cast(), recv.len()) };
        (code == 0).then_some(())
    }
}
