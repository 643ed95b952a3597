//! Copies and fills: the bytes really move, and the engine is told.
//!
//! Large copies within device memory and large fills with zero do not touch pages that were never written: such pages are
//! zero and stay so, which keeps a model of many gigabytes from costing as many on the host.

use super::{contains, discard, host_range, is_device};
use crate::abi::{Error, Outcome};
use crate::capture::Effect;
use crate::session::HostCost;
use crate::{capture, device, handoff, stream, values};
use prism_wire::message::{CopyDirection, Record, RecordKind};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// Copies and fills from this size on look at pages.
const SPARSE: usize = 256 << 10;
const PAGE: usize = 4_096;
/// `cudaMemcpyDefault`, the last copy kind.
const LAST_KIND: c_int = 4;

fn direction(to: *const c_void, from: *const c_void) -> CopyDirection {
    match (is_device(from), is_device(to)) {
        (false, false) => CopyDirection::HostToHost,
        (false, true) => CopyDirection::HostToDevice,
        (true, false) => CopyDirection::DeviceToHost,
        (true, true) => CopyDirection::DeviceToDevice,
    }
}

/// Is the range usable: host memory (unchecked), or inside one device allocation?
fn check(pointer: *const c_void, bytes: usize) -> Outcome {
    if pointer.is_null() || (is_device(pointer) && !contains(pointer, bytes)) {
        return Err(Error::INVALID_VALUE);
    }
    Ok(())
}

/// What a copy of rows is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy2d {
    /// Destination.
    pub(crate) to: *mut c_void,
    /// Bytes from one destination row to the next.
    pub(crate) to_pitch: usize,
    /// Source.
    pub(crate) from: *const c_void,
    /// Bytes from one source row to the next.
    pub(crate) from_pitch: usize,
    /// Bytes of a row.
    pub(crate) width: usize,
    /// Rows.
    pub(crate) height: usize,
    /// `cudaMemcpyKind`; only its range matters, the addresses tell the direction.
    pub(crate) kind: c_int,
}

/// Copies `bytes`. `is_async` is false for the calls that return when the copy is done.
///
/// # Safety
/// Host ranges must be valid for the copy.
pub(crate) unsafe fn copy(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    kind: c_int,
    stream: *const c_void,
    is_async: bool,
) -> Outcome {
    let rows = Copy2d { to, to_pitch: bytes, from, from_pitch: bytes, width: bytes, height: 1, kind };
    // SAFETY: the same contract.
    unsafe { copy_2d(&rows, stream, is_async) }
}

/// Copies rows.
///
/// # Safety
/// Host ranges must be valid for the copy.
pub(crate) unsafe fn copy_2d(rows: &Copy2d, stream: *const c_void, is_async: bool) -> Outcome {
    let session = device::using()?;
    if !(0..=LAST_KIND).contains(&rows.kind) {
        return Err(Error::INVALID_COPY_DIRECTION);
    }
    if rows.width == 0 || rows.height == 0 {
        return Ok(());
    }
    if rows.width > rows.to_pitch || rows.width > rows.from_pitch {
        return Err(Error::INVALID_PITCH);
    }
    let extent = |pitch: usize| {
        pitch.checked_mul(rows.height - 1).and_then(|bytes| bytes.checked_add(rows.width)).ok_or(Error::INVALID_VALUE)
    };
    check(rows.to, extent(rows.to_pitch)?)?;
    check(rows.from, extent(rows.from_pitch)?)?;
    let direction = direction(rows.to, rows.from);
    let stream_id = stream::id(stream);
    let is_captured = capture::is_capturing(stream_id);
    if is_captured && !is_async {
        capture::invalidate(stream_id);
        return Err(Error::CAPTURE_UNSUPPORTED);
    }
    if !is_captured {
        // SAFETY: device ranges were checked, host ranges are the caller's.
        unsafe { move_bytes_of(rows, direction) };
        track(rows, direction);
    }
    let pinned = match direction {
        CopyDirection::HostToDevice => host_range(rows.from).is_some(),
        CopyDirection::DeviceToHost => host_range(rows.to).is_some(),
        _ => false,
    };
    let record = Record {
        kind: RecordKind::Memcpy as u16,
        stream: stream_id,
        a: (rows.width * rows.height) as u64,
        b: direction as u64,
        c: u64::from(pinned),
        ..Record::default()
    };
    let issue = || session.append(record, session.config.host.cost(HostCost::Memcpy)).map_err(|()| Error::UNKNOWN);
    if is_captured {
        return capture::with_effect(Effect::Copy(rows.into()), issue);
    }
    issue()?;
    let waits = match direction {
        CopyDirection::DeviceToDevice => false,
        // The host cannot go on before pageable memory has been written.
        CopyDirection::DeviceToHost => !is_async || !pinned,
        CopyDirection::HostToDevice | CopyDirection::HostToHost => !is_async,
    };
    if waits {
        return stream::synchronize_id(stream_id);
    }
    handoff::point();
    Ok(())
}

/// Keeps track of what is known after a copy.
fn track(rows: &Copy2d, direction: CopyDirection) {
    let (to, from) = (rows.to as usize, rows.from as usize);
    match direction {
        CopyDirection::HostToHost => {}
        // SAFETY: the copy has just been made.
        CopyDirection::DeviceToHost => unsafe {
            values::read(rows.to, rows.to_pitch, from, rows.from_pitch, rows.width, rows.height);
        },
        CopyDirection::HostToDevice | CopyDirection::DeviceToDevice => {
            for row in 0..rows.height {
                values::copied(to + row * rows.to_pitch, from + row * rows.from_pitch, rows.width);
            }
        }
    }
}

/// Moves the bytes of a copy that was captured, at a launch of its graph.
///
/// # Safety
/// Host ranges must be valid for the copy.
pub(crate) unsafe fn move_rows(rows: &Copy2d) -> Outcome {
    let extent = |pitch: usize| pitch * (rows.height - 1) + rows.width;
    check(rows.to, extent(rows.to_pitch))?;
    check(rows.from, extent(rows.from_pitch))?;
    let direction = direction(rows.to, rows.from);
    // SAFETY: device ranges were checked, host ranges are the caller's.
    unsafe { move_bytes_of(rows, direction) };
    track(rows, direction);
    Ok(())
}

/// # Safety
/// All ranges must be valid.
unsafe fn move_bytes_of(rows: &Copy2d, direction: CopyDirection) {
    if direction == CopyDirection::DeviceToDevice && rows.height == 1 {
        copy_device(rows.to as usize, rows.from as usize, rows.width);
        return;
    }
    for row in 0..rows.height {
        // SAFETY: the contract of this function; rows may overlap like memmove's.
        unsafe {
            let from = rows.from.byte_add(row * rows.from_pitch);
            let to = rows.to.byte_add(row * rows.to_pitch);
            std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), rows.width);
        }
    }
}

/// Fills `bytes` with the pattern of `unit` bytes (1, 2 or 4) in `value`.
pub(crate) fn fill(to: *mut c_void, value: u32, unit: usize, count: usize, stream: *const c_void) -> Outcome {
    let bytes = count.checked_mul(unit).ok_or(Error::INVALID_VALUE)?;
    fill_2d(to, bytes, value, unit, bytes, 1, stream)
}

/// Fills rows of `width` bytes.
pub(crate) fn fill_2d(
    to: *mut c_void,
    pitch: usize,
    value: u32,
    unit: usize,
    width: usize,
    height: usize,
    stream: *const c_void,
) -> Outcome {
    let session = device::using()?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    if width > pitch {
        return Err(Error::INVALID_PITCH);
    }
    let extent =
        pitch.checked_mul(height - 1).and_then(|bytes| bytes.checked_add(width)).ok_or(Error::INVALID_VALUE)?;
    let writable = is_device(to) || host_range(to).is_some();
    if !writable || !width.is_multiple_of(unit) || !(to as usize).is_multiple_of(unit) {
        return Err(Error::INVALID_VALUE);
    }
    check(to, extent)?;
    let stream = stream::id(stream);
    let record = Record { kind: RecordKind::Memset as u16, stream, a: (width * height) as u64, ..Record::default() };
    let issue = || session.append(record, session.config.host.cost(HostCost::Memcpy)).map_err(|()| Error::UNKNOWN);
    if capture::is_capturing(stream) {
        return capture::with_effect(Effect::Fill { to: to as usize, pitch, value, unit, width, height }, issue);
    }
    fill_rows(to, pitch, value, unit, width, height)?;
    issue()
}

/// Sets the bytes of a fill: now, or at a launch of the graph it was captured in.
pub(crate) fn fill_rows(
    to: *mut c_void,
    pitch: usize,
    value: u32,
    unit: usize,
    width: usize,
    height: usize,
) -> Outcome {
    check(to, pitch * (height - 1) + width)?;
    for row in 0..height {
        fill_row(to as usize + row * pitch, value, unit, width);
        values::filled(to as usize + row * pitch, width);
    }
    Ok(())
}

fn fill_row(address: usize, value: u32, unit: usize, bytes: usize) {
    let pattern = &value.to_le_bytes()[..unit];
    if value == 0 && bytes >= SPARSE && is_device(address as *const c_void) {
        return zero(address, bytes);
    }
    // SAFETY: the caller has checked the range.
    let row = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
    if pattern.iter().all(|byte| *byte == pattern[0]) {
        row.fill(pattern[0]);
    } else {
        row.chunks_exact_mut(unit).for_each(|chunk| chunk.copy_from_slice(pattern));
    }
}

/// Zeroes a range of device memory: whole pages by giving them back.
fn zero(address: usize, bytes: usize) {
    let end = address + bytes;
    let (first, last) = (address.next_multiple_of(PAGE).min(end), (end / PAGE * PAGE).max(address));
    if first >= last {
        // SAFETY: the caller has checked the range.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        return;
    }
    // SAFETY: the parts before the first and after the last whole page belong to the checked range.
    unsafe {
        std::ptr::write_bytes(address as *mut u8, 0, first - address);
        std::ptr::write_bytes(last as *mut u8, 0, end - last);
    }
    discard(first, last - first);
}

/// Copies within device memory.
fn copy_device(to: usize, from: usize, bytes: usize) {
    let overlap = to < from + bytes && from < to + bytes;
    if bytes < SPARSE || overlap {
        return move_bytes(to, from, bytes);
    }
    let mut done = 0;
    while done < bytes {
        // Runs of pages of the source that are alike: written, or never written.
        let (written, run) = page_run(from + done, bytes - done);
        if written {
            move_bytes(to + done, from + done, run);
        } else {
            zero(to + done, run);
        }
        done += run;
    }
}

fn move_bytes(to: usize, from: usize, bytes: usize) {
    // SAFETY: the caller has checked both ranges.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

/// Whether the page at `address` was ever written, and how many of the next `bytes` are alike.
fn page_run(address: usize, bytes: usize) -> (bool, usize) {
    const MOST: usize = 512;
    let first = address / PAGE;
    let pages = ((address + bytes).div_ceil(PAGE) - first).min(MOST);
    let mut entries = [0_u8; MOST * 8];
    let entries = &mut entries[..pages * 8];
    let known = page_map().is_some_and(|file| file.read_exact_at(entries, (first * 8) as u64).is_ok());
    if !known {
        return (true, bytes);
    }
    // Bit 63: in memory; bit 62: swapped out.
    let was_written = |entry: &[u8]| entry[7] & 0xC0 != 0;
    let written = was_written(&entries[..8]);
    let run = entries.chunks_exact(8).take_while(|entry| was_written(entry) == written).count();
    (written, ((first + run) * PAGE - address).min(bytes))
}

/// The kernel's table of this process's pages; `None` where it cannot be read (then every page counts as written).
fn page_map() -> Option<&'static File> {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    FILE.get_or_init(|| File::open("/proc/self/pagemap").ok()).as_ref()
}
