//! What few communicators have: operators, registered buffers and windows, connections.

use super::Comm;
use crate::abi::Code;
use crate::channel::Channel;
use crate::guard::Failure;
use crate::passthrough::Real;
use crate::shares::Shares;
use core::ffi::c_int;
use prism_wire::control::UNIQUE_ID_BYTES;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Value of the multiplier of a user-defined operator, with its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PreMul {
    /// NCCL's number of the data type.
    pub(crate) dtype: c_int,
    /// The multiplier in that type, or the device address where it will be.
    pub(crate) scalar: Scalar,
}

/// Where a multiplier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    /// Here, little endian in the low bytes.
    Value(u64),
    /// At this device address when the operation runs.
    Device(usize),
}

/// What few communicators need.
#[derive(Default)]
pub(super) struct Extras {
    operators: Vec<Option<PreMul>>,
    /// Handle to (address, bytes).
    registrations: BTreeMap<usize, (usize, usize)>,
    /// Handle to (address, bytes).
    windows: BTreeMap<usize, (usize, usize)>,
    next_registration: usize,
    pub(super) channel: Option<Arc<Channel>>,
    pub(super) real: Option<Real>,
    pub(super) shares: Option<Arc<Shares>>,
    /// A unique id for growing was made and not used yet.
    grow_id: Option<[u8; UNIQUE_ID_BYTES]>,
}

impl Comm {
    /// Adds a user-defined operator and returns its number.
    pub(crate) fn add_operator(self, operator: PreMul) -> Result<c_int, Failure> {
        let index = self.extras(|extras| {
            let operators = &mut extras.operators;
            let index = operators.iter().position(Option::is_none).unwrap_or(operators.len());
            if index == OPERATORS_PER_COMM as usize {
                return None;
            }
            operators.resize(operators.len().max(index + 1), None);
            operators[index] = Some(operator);
            Some(index as c_int)
        });
        match index {
            Some(index) => Ok(self.operator_base() + index),
            None => Err(Failure::new(Code::SystemError, format!("more than {OPERATORS_PER_COMM} reduction operators"))),
        }
    }

    /// The user-defined operator with this number, if it belongs to this communicator.
    pub(crate) fn operator(self, number: c_int) -> Option<PreMul> {
        let index = usize::try_from(number.checked_sub(self.operator_base())?).ok()?;
        self.extras(|extras| extras.operators.get(index).copied().flatten())
    }

    /// Removes a user-defined operator; false if this communicator has no such operator.
    pub(crate) fn remove_operator(self, number: c_int) -> bool {
        let Some(index) = number.checked_sub(self.operator_base()).and_then(|index| usize::try_from(index).ok()) else {
            return false;
        };
        self.extras(|extras| extras.operators.get_mut(index).and_then(Option::take).is_some())
    }

    /// Numbers of user-defined operators differ between communicators, so that a mix-up is found.
    fn operator_base(self) -> c_int {
        FIRST_USER_OPERATOR + (self.id() % 0x7_ffff) as c_int * OPERATORS_PER_COMM
    }

    /// Registers a buffer; the handle is what [`Self::deregister`] takes.
    pub(crate) fn register(self, address: usize, bytes: usize) -> usize {
        self.extras(|extras| {
            extras.next_registration += 1;
            extras.registrations.insert(extras.next_registration, (address, bytes));
            extras.next_registration
        })
    }

    /// Makes a window of a buffer; its handle.
    pub(crate) fn add_window(self, address: usize, bytes: usize) -> usize {
        self.extras(|extras| {
            extras.next_registration += 1;
            extras.windows.insert(extras.next_registration, (address, bytes));
            extras.next_registration
        })
    }

    /// Removes a window; false if there is none.
    pub(crate) fn remove_window(self, handle: usize) -> bool {
        self.extras(|extras| extras.windows.remove(&handle).is_some())
    }

    /// Address of the buffer behind a window.
    pub(crate) fn window(self, handle: usize) -> Option<usize> {
        self.extras(|extras| extras.windows.get(&handle).map(|(address, _)| *address))
    }

    /// Removes a registration; false if there is none.
    pub(crate) fn deregister(self, handle: usize) -> bool {
        self.extras(|extras| extras.registrations.remove(&handle).is_some())
    }

    /// Keeps the id that new members will come with; false if there is one that was not used.
    pub(crate) fn set_grow_id(self, id: [u8; UNIQUE_ID_BYTES]) -> bool {
        self.extras(|extras| extras.grow_id.is_none() && extras.grow_id.replace(id).is_none())
    }

    /// The id that new members come with, which is used up.
    pub(crate) fn take_grow_id(self) -> Option<[u8; UNIQUE_ID_BYTES]> {
        self.extras(|extras| extras.grow_id.take())
    }
}

/// The first number that is not one of NCCL's own operators.
pub(crate) const FIRST_USER_OPERATOR: c_int = 5;
const OPERATORS_PER_COMM: c_int = 4_096;

#[cfg(test)]
mod tests {
    use super::super::tests::new;
    use super::*;

    #[test]
    fn operators_belong_to_one_communicator() {
        let (one, two) = (new(2), new(2));
        let operator = PreMul { dtype: 7, scalar: Scalar::Value(1) };
        let number = one.add_operator(operator).unwrap();
        assert!(number >= FIRST_USER_OPERATOR);
        assert_eq!(one.operator(number), Some(operator));
        assert_eq!(two.operator(number), None);
        assert!(!two.remove_operator(number));
        assert!(one.remove_operator(number));
        assert_eq!(one.operator(number), None);
        assert_eq!(one.add_operator(operator).unwrap(), number);
    }
}
