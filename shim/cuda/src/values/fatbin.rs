//! Fat binaries and cubins: which parameters each kernel takes, as its `.nv.info` section says.
//!
//! Layout of the containers: the wrapper that `__cudaRegisterFatBinary` is given names a fat binary (magic
//! `0xBA55ED50`), which is a row of entries, each PTX or an ELF file (a cubin) for one architecture, maybe packed with
//! Zstandard. Attributes of a kernel in `.nv.info.<kernel>` are (format, attribute, length or value) and a payload.

use ruzstd::decoding::StreamingDecoder;
use std::collections::BTreeMap;
use std::io::Read;

/// Magic number of the wrapper given to `__cudaRegisterFatBinary`.
const WRAPPER: u32 = 0x4662_43B1;
/// Magic number of a fat binary.
const FATBIN: u32 = 0xBA55_ED50;
/// Entry kind: an ELF file.
const ELF: u16 = 2;
/// Entry flag: the payload is packed with Zstandard.
const PACKED_ZSTD: u64 = 0x8000;
/// Entry flags of other packings (LZ4), which no current compiler writes.
const PACKED_OTHER: u64 = 0x2000;
/// `EIATTR_KPARAM_INFO`: index, ordinal, offset, and the size above bit 18.
const PARAMETER: u8 = 0x17;
/// The same for large parameters, with a size of its own.
const LARGE_PARAMETER: u8 = 0x45;
/// Format of an attribute with a payload.
const WITH_PAYLOAD: u8 = 4;
/// No cubin is larger; protects against absurd headers.
const MOST_BYTES: usize = 1 << 30;
/// CUDA's limit for all parameters of a kernel.
pub(super) const MOST_PARAMETER_BYTES: u32 = 32_764;

/// One parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Parameter {
    /// Where it lies in the parameter buffer, in bytes.
    pub(crate) offset: u32,
    /// Its size in bytes.
    pub(crate) bytes: u32,
}

/// Parameters of kernels by name, in order.
pub(super) type Kernels = BTreeMap<String, Vec<Parameter>>;

fn bytes<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn u64_at(data: &[u8], at: usize) -> Option<usize> {
    bytes(data, at).map(|bytes| u64::from_le_bytes(bytes) as usize)
}

/// An image given to the driver or runtime, as bytes: a fat binary (maybe behind its wrapper) or an ELF file. `None` for
/// anything else (PTX).
///
/// # Safety
/// `image` must be null or an image as CUDA takes them.
pub(super) unsafe fn image(image: *const u8) -> Option<&'static [u8]> {
    if image.is_null() || !image.addr().is_multiple_of(4) {
        return None;
    }
    // SAFETY: every image starts with at least four bytes.
    let magic = unsafe { image.cast::<u32>().read_unaligned() };
    match magic {
        WRAPPER if image.addr().is_multiple_of(8) => {
            // SAFETY: the wrapper is two 32-bit numbers and the address of the fat binary.
            let inner = unsafe { image.add(8).cast::<*const u8>().read_unaligned() };
            if inner.is_null() || !inner.addr().is_multiple_of(8) {
                return None;
            }
            // SAFETY: as above; the wrapper names a fat binary, which has a header of 16 bytes.
            unsafe { (inner.cast::<u32>().read_unaligned() == FATBIN).then(|| fatbin(inner)) }
        }
        // SAFETY: a fat binary has a header of 16 bytes.
        FATBIN => Some(unsafe { fatbin(image) }),
        // SAFETY: an ELF file has a header of 64 bytes that says where its last part, the table of sections, ends.
        _ if magic == u32::from_le_bytes(*b"\x7fELF") => unsafe {
            let table = image.add(0x28).cast::<u64>().read_unaligned() as usize;
            let count = usize::from(image.add(0x3C).cast::<u16>().read_unaligned());
            let length = table.checked_add(count * 64).filter(|length| *length <= MOST_BYTES)?;
            Some(std::slice::from_raw_parts(image, length))
        },
        _ => None,
    }
}

/// # Safety
/// `image` must be a fat binary.
unsafe fn fatbin(image: *const u8) -> &'static [u8] {
    // SAFETY: the header says how long it is and how long what follows it is.
    unsafe {
        let header = usize::from(image.add(6).cast::<u16>().read_unaligned());
        let body = image.add(8).cast::<u64>().read_unaligned() as usize;
        std::slice::from_raw_parts(image, header + body.min(MOST_BYTES))
    }
}

/// Is this an image with `.nv.info`?
fn is_elf(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// Parameters of the kernels of an image. Cubins are opened, smallest first, until all of `wanted` are found: kernels take
/// the same parameters on every architecture. What cannot be read is left out.
pub(super) fn kernels(image: &[u8], wanted: &[&str]) -> Kernels {
    let mut found = Kernels::new();
    if is_elf(image) {
        read_cubin(image, &mut found);
        return found;
    }
    let mut entries = entries(image);
    entries.sort_by_key(|entry| entry.payload.len());
    for entry in entries {
        let Some(cubin) = entry.unpack() else { continue };
        read_cubin(&cubin, &mut found);
        if !wanted.is_empty() && wanted.iter().all(|name| found.contains_key(*name)) {
            break;
        }
    }
    found
}

/// A cubin in a fat binary.
struct Entry<'a> {
    payload: &'a [u8],
    flags: u64,
    bytes: usize,
}

impl Entry<'_> {
    fn unpack(&self) -> Option<Vec<u8>> {
        if self.flags & PACKED_ZSTD == 0 {
            return (self.flags & PACKED_OTHER == 0).then(|| self.payload.to_vec());
        }
        let mut cubin = Vec::with_capacity(self.bytes.min(MOST_BYTES));
        let decoder = StreamingDecoder::new(self.payload).ok()?;
        decoder.take(MOST_BYTES as u64).read_to_end(&mut cubin).ok()?;
        Some(cubin)
    }
}

fn entries(image: &[u8]) -> Vec<Entry<'_>> {
    let mut found = Vec::new();
    let Some(mut at) = u16_at(image, 6).map(usize::from) else { return found };
    while let Some((entry, next)) = entry(image, at) {
        found.extend(entry);
        at = next;
    }
    found
}

/// The entry at `at`, if it is a cubin, and where the next one starts.
fn entry(image: &[u8], at: usize) -> Option<(Option<Entry<'_>>, usize)> {
    let header = u32_at(image, at + 4)? as usize;
    let padded = u32_at(image, at + 8)? as usize;
    let length = u32_at(image, at + 16)? as usize;
    let flags = u64_at(image, at + 40)? as u64;
    let next = at.checked_add(header)?.checked_add(padded)?;
    if next <= at {
        return None;
    }
    let is_packed = flags & (PACKED_ZSTD | PACKED_OTHER) != 0;
    let start = at + header;
    let payload = image.get(start..start.checked_add(if is_packed { length } else { padded })?)?;
    let is_cubin = u16_at(image, at)? == ELF;
    Some((is_cubin.then(|| Entry { payload, flags, bytes: u64_at(image, at + 56).unwrap_or(0) }), next))
}

/// Adds the kernels of a cubin.
fn read_cubin(cubin: &[u8], found: &mut Kernels) -> Option<()> {
    const PREFIX: &[u8] = b".nv.info.";
    let table = u64_at(cubin, 0x28)?;
    let count = usize::from(u16_at(cubin, 0x3C)?);
    let names = section(cubin, table, usize::from(u16_at(cubin, 0x3E)?))?.1;
    for index in 0..count {
        let (name, body) = section(cubin, table, index)?;
        let name = names.get(name..)?;
        let name = name.split(|byte| *byte == 0).next()?;
        if let Some(kernel) = name.strip_prefix(PREFIX)
            && let Ok(kernel) = std::str::from_utf8(kernel)
            && !found.contains_key(kernel)
            && let Some(parameters) = parameters(body)
        {
            found.insert(kernel.to_owned(), parameters);
        }
    }
    Some(())
}

/// Name and contents of a section. Contents that are not in the file (`.bss`) are empty.
fn section(elf: &[u8], table: usize, index: usize) -> Option<(usize, &[u8])> {
    let header = elf.get(table.checked_add(index * 64)?..)?;
    let offset = u64_at(header, 24)?;
    let length = u64_at(header, 32)?;
    Some((u32_at(header, 0)? as usize, elf.get(offset..offset.checked_add(length)?).unwrap_or(&[])))
}

/// The parameters that a `.nv.info` section lists, in order; `None` if it is damaged.
fn parameters(info: &[u8]) -> Option<Vec<Parameter>> {
    let mut found: BTreeMap<u16, Parameter> = BTreeMap::new();
    let mut at = 0;
    while at < info.len() {
        let (format, attribute, value) = (*info.get(at)?, *info.get(at + 1)?, usize::from(u16_at(info, at + 2)?));
        at += 4;
        if format != WITH_PAYLOAD {
            continue;
        }
        let payload = info.get(at..at + value)?;
        at += value;
        let bytes = match attribute {
            PARAMETER => u32_at(payload, 8)? >> 18,
            LARGE_PARAMETER => u32_at(payload, payload.len().checked_sub(4)?)?,
            _ => continue,
        };
        let (ordinal, offset) = (u16_at(payload, 4)?, u32::from(u16_at(payload, 6)?));
        if offset.checked_add(bytes)? > MOST_PARAMETER_BYTES {
            return None;
        }
        found.insert(ordinal, Parameter { offset, bytes });
    }
    let is_complete = found.keys().copied().eq(0..found.len() as u16);
    is_complete.then(|| found.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(format: u8, number: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![format, number];
        bytes.extend((payload.len() as u16).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    fn parameter(ordinal: u16, offset: u16, size: u32) -> Vec<u8> {
        let mut payload = vec![0; 4];
        payload.extend(ordinal.to_le_bytes());
        payload.extend(offset.to_le_bytes());
        payload.extend((size << 18 | 0x1_F000).to_le_bytes());
        attribute(WITH_PAYLOAD, PARAMETER, &payload)
    }

    /// An ELF file with one `.nv.info` section and the table of section names.
    fn cubin(kernel: &str, info: &[u8]) -> Vec<u8> {
        let names = format!("\0.nv.info.{kernel}\0");
        let mut file = vec![0_u8; 64];
        file[..4].copy_from_slice(b"\x7fELF");
        let info_at = file.len() as u64;
        file.extend(info);
        let names_at = file.len() as u64;
        file.extend(names.as_bytes());
        let table = file.len() as u64;
        for (name, offset, length) in [(1_u32, info_at, info.len()), (0, names_at, names.len())] {
            let mut header = vec![0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[24..32].copy_from_slice(&offset.to_le_bytes());
            header[32..40].copy_from_slice(&(length as u64).to_le_bytes());
            file.extend(header);
        }
        file[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        file[0x3C..0x3E].copy_from_slice(&2_u16.to_le_bytes());
        file[0x3E..0x40].copy_from_slice(&1_u16.to_le_bytes());
        file
    }

    fn fatbin_of(cubin: &[u8]) -> Vec<u8> {
        let mut entry = vec![0_u8; 64];
        entry[..2].copy_from_slice(&ELF.to_le_bytes());
        entry[4..8].copy_from_slice(&64_u32.to_le_bytes());
        entry[8..12].copy_from_slice(&(cubin.len() as u32).to_le_bytes());
        entry.extend(cubin);
        let mut image = FATBIN.to_le_bytes().to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((entry.len() as u64).to_le_bytes());
        image.extend(entry);
        image
    }

    #[test]
    fn parameters_come_in_order() {
        let info = [parameter(1, 8, 624), attribute(3, 0x19, &[])[..4].to_vec(), parameter(0, 0, 4)].concat();
        let expected = vec![Parameter { offset: 0, bytes: 4 }, Parameter { offset: 8, bytes: 624 }];
        assert_eq!(
            kernels(&fatbin_of(&cubin("k", &info)), &["k"]),
            Kernels::from([("k".to_owned(), expected.clone())])
        );
        assert_eq!(kernels(&cubin("k", &info), &[]), Kernels::from([("k".to_owned(), expected)]));
    }

    #[test]
    fn damage_is_left_out_and_never_a_panic() {
        let info = [parameter(0, 0, 8), parameter(2, 8, 8)].concat();
        assert_eq!(kernels(&cubin("gap", &info), &[]), Kernels::new());
        let whole = fatbin_of(&cubin("k", &parameter(0, 0, 8)));
        for length in 0..whole.len() {
            kernels(&whole[..length], &[]);
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xFF;
            kernels(&damaged, &["k"]);
        }
    }
}
