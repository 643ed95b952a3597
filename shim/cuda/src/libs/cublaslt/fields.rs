//! Attribute stores that live in the program's own memory.
//!
//! cuBLASLt descriptors are structs of a fixed size that a program may put on its stack, so their attributes are kept
//! inside the struct: a mark, then each attribute at a fixed offset.

use crate::libs::cublas::{INVALID_VALUE, Status};
use std::ffi::{c_int, c_void};
use std::ptr;

/// One attribute: its number in the C header, where it is kept, its size in bytes.
#[derive(Clone, Copy)]
pub(super) struct Field {
    id: c_int,
    offset: usize,
    size: usize,
}

/// A kind of descriptor.
pub(super) struct Kind {
    /// First eight bytes of an initialised descriptor.
    mark: u64,
    /// Size of the struct in the C header.
    pub(super) size: usize,
    fields: &'static [Field],
}

/// Places attributes of the given (number, size) one after the other behind the mark.
pub(super) const fn place<const N: usize>(spec: [(c_int, usize); N]) -> [Field; N] {
    let mut fields = [Field { id: 0, offset: 0, size: 0 }; N];
    let (mut index, mut offset) = (0, size_of::<u64>());
    while index < N {
        fields[index] = Field { id: spec[index].0, offset, size: spec[index].1 };
        offset += spec[index].1;
        index += 1;
    }
    fields
}

impl Kind {
    /// A kind whose struct has `size` bytes. Fails to compile when the attributes do not fit.
    pub(super) const fn new(mark: u64, size: usize, fields: &'static [Field]) -> Self {
        let last = fields[fields.len() - 1];
        assert!(last.offset + last.size <= size, "the attributes do not fit into the struct");
        Self { mark, size, fields }
    }

    /// Makes `memory` of `size` bytes an empty descriptor: every attribute zero.
    ///
    /// # Safety
    /// `memory` must be null or valid for writes of `size` bytes.
    pub(super) unsafe fn initialise(&self, memory: *mut c_void, size: usize) -> Result<(), Status> {
        if memory.is_null() || size < self.size {
            return Err(INVALID_VALUE);
        }
        // SAFETY: valid for `size` bytes by the contract, and the mark is the first eight of at least `self.size`.
        unsafe {
            ptr::write_bytes(memory.cast::<u8>(), 0, size);
            ptr::copy_nonoverlapping((&raw const self.mark).cast::<u8>(), memory.cast(), size_of::<u64>());
        }
        Ok(())
    }

    /// Checks that `memory` is an initialised descriptor of this kind.
    ///
    /// # Safety
    /// `memory` must be null or valid for reads of eight bytes.
    pub(super) unsafe fn check(&self, memory: *const c_void) -> Result<(), Status> {
        if memory.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: valid for eight bytes by the contract; the read may be unaligned.
        if unsafe { memory.cast::<u64>().read_unaligned() } == self.mark { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Is there an attribute with this number?
    pub(super) fn knows(&self, id: c_int) -> bool {
        self.field(id).is_ok()
    }

    fn field(&self, id: c_int) -> Result<Field, Status> {
        self.fields.iter().find(|field| field.id == id).copied().ok_or(INVALID_VALUE)
    }

    /// Sets attribute `id` from a buffer of exactly its size.
    ///
    /// # Safety
    /// `memory` must be null or a struct of this kind's size, `buffer` null or readable for `size` bytes.
    pub(super) unsafe fn set(
        &self,
        memory: *mut c_void,
        id: c_int,
        buffer: *const c_void,
        size: usize,
    ) -> Result<(), Status> {
        // SAFETY: the caller's contract.
        unsafe { self.check(memory)? };
        let field = self.field(id)?;
        if buffer.is_null() || size != field.size {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the field lies inside the struct (checked in `new`), the buffer has `size` bytes.
        unsafe { ptr::copy_nonoverlapping(buffer.cast::<u8>(), memory.cast::<u8>().add(field.offset), size) };
        Ok(())
    }

    /// Copies attribute `id` to a buffer. With `size` 0 only its size is told.
    ///
    /// # Safety
    /// As for [`Kind::set`], with `buffer` writable; `written` must be null or valid for a write.
    pub(super) unsafe fn get(
        &self,
        memory: *const c_void,
        id: c_int,
        buffer: *mut c_void,
        size: usize,
        written: *mut usize,
    ) -> Result<(), Status> {
        // SAFETY: the caller's contract.
        unsafe { self.check(memory)? };
        let field = self.field(id)?;
        if !written.is_null() {
            // SAFETY: valid by the contract.
            unsafe { written.write(field.size) };
        }
        if size == 0 {
            return if written.is_null() { Err(INVALID_VALUE) } else { Ok(()) };
        }
        if buffer.is_null() || size < field.size {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the field lies inside the struct, the buffer has at least `field.size` bytes.
        unsafe { ptr::copy_nonoverlapping(memory.cast::<u8>().add(field.offset), buffer.cast(), field.size) };
        Ok(())
    }

    /// Reads an attribute whose size is that of `T`.
    ///
    /// # Safety
    /// As for [`Kind::set`]. `T` must be a plain number.
    pub(super) unsafe fn read<T: Copy + Default>(&self, memory: *const c_void, id: c_int) -> Result<T, Status> {
        let mut value = T::default();
        // SAFETY: `value` is writable for its size; the rest is the caller's contract.
        unsafe { self.get(memory, id, (&raw mut value).cast(), size_of::<T>(), ptr::null_mut())? };
        Ok(value)
    }

    /// Sets an attribute whose size is that of `T`.
    ///
    /// # Safety
    /// As for [`Kind::set`].
    pub(super) unsafe fn write<T: Copy>(&self, memory: *mut c_void, id: c_int, value: T) -> Result<(), Status> {
        // SAFETY: `value` is readable for its size; the rest is the caller's contract.
        unsafe { self.set(memory, id, (&raw const value).cast(), size_of::<T>()) }
    }

    /// Allocates an empty descriptor, to be freed by [`Kind::free`].
    pub(super) fn allocate(&self) -> *mut c_void {
        // u64 gives the alignment of the C struct.
        let words = self.size.div_ceil(size_of::<u64>());
        let memory = Box::into_raw(vec![0_u64; words].into_boxed_slice()).cast::<c_void>();
        // SAFETY: just allocated with at least `self.size` bytes.
        let outcome = unsafe { self.initialise(memory, self.size) };
        debug_assert_eq!(outcome, Ok(()));
        memory
    }

    /// Frees a descriptor from [`Kind::allocate`].
    ///
    /// # Safety
    /// `memory` must be null or come from [`Kind::allocate`] of this kind and not be used afterwards.
    pub(super) unsafe fn free(&self, memory: *mut c_void) -> Result<(), Status> {
        // SAFETY: the caller's contract.
        unsafe { self.check(memory)? };
        let words = self.size.div_ceil(size_of::<u64>());
        // SAFETY: allocated as a boxed slice of this many words. The mark goes first, so that a stale pointer to memory
        // that is not reused yet is recognised.
        unsafe {
            memory.cast::<u64>().write(0);
            drop(Box::from_raw(ptr::slice_from_raw_parts_mut(memory.cast::<u64>(), words)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static KIND: Kind = Kind::new(77, 32, &place([(0, 4), (5, 8), (9, 2)]));

    #[test]
    fn attributes_are_kept_apart() {
        let memory = KIND.allocate();
        // SAFETY: `memory` is a descriptor of this kind until it is freed.
        unsafe {
            assert_eq!(KIND.write(memory, 5, u64::MAX), Ok(()));
            assert_eq!(KIND.write(memory, 9, 3_u16), Ok(()));
            assert_eq!(KIND.read::<u32>(memory, 0), Ok(0));
            assert_eq!(KIND.read::<u64>(memory, 5), Ok(u64::MAX));
            assert_eq!(KIND.read::<u16>(memory, 9), Ok(3));
            assert_eq!(KIND.free(memory), Ok(()));
        }
    }

    #[test]
    fn wrong_sizes_numbers_and_descriptors_are_refused() {
        let mut memory = [0_u64; 4];
        let memory = (&raw mut memory).cast::<c_void>();
        // SAFETY: `memory` has 32 bytes.
        unsafe {
            assert_eq!(KIND.write(memory, 0, 1_u32), Err(INVALID_VALUE), "not initialised");
            assert_eq!(KIND.initialise(memory, 31), Err(INVALID_VALUE));
            assert_eq!(KIND.initialise(memory, 32), Ok(()));
            assert_eq!(KIND.write(memory, 0, 1_u64), Err(INVALID_VALUE));
            assert_eq!(KIND.write(memory, 1, 1_u32), Err(INVALID_VALUE));
            assert_eq!(KIND.read::<u32>(memory, 5), Err(INVALID_VALUE), "buffer too small");
            let mut written = 0;
            assert_eq!(KIND.get(memory, 5, ptr::null_mut(), 0, &raw mut written), Ok(()));
            assert_eq!(written, 8);
            assert_eq!(KIND.set(ptr::null_mut(), 0, (&raw const written).cast(), 4), Err(INVALID_VALUE));
        }
    }
}
