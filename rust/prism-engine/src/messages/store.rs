//! The stored form of a message program, mapped when opened.
//!
//! ```text
//! header (64 bytes)   magic, version, endian mark, feature bits, file length, number of sections, checksums
//! section table       per section: id, bytes per element, offset, length, checksum
//! sections            columns of little-endian integers, each at a multiple of 8 bytes, zero padded
//! ```
//! As with execution graphs, sections come in one fixed order without gaps, so every byte is checksummed or must be zero.
//! Opening reads the file once for its checksums (CRC-32) and once for the program's own rules: a damaged or hostile file is
//! an error, never a crash, and takes no more memory than its ranks. A file is written under another name and renamed.

use super::check;
use super::program::{MessageProgram, Totals};
use super::{MessageError, goal};
use crate::graph::columns::{Column, Plain};
use memmap2::Mmap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"PRISMMP\x1a";
const VERSION: u32 = 1;
const ENDIAN_MARK: u32 = 0x0102_0304;
const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 32;
/// The header's checksum is its last field.
const HEADER_CRC_AT: usize = 60;
const ALIGN: usize = 8;
const NAMES: [&str; 6] = ["ops", "wide values", "rank starts", "far starts", "far from", "far to"];
const TABLE_END: usize = HEADER_BYTES + ENTRY_BYTES * NAMES.len();
/// Enough of a file to tell what it is.
const BEGINNING: u64 = 1 << 16;

/// What kind of file a message program is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// The stored form.
    Stored,
    /// GOAL text.
    Goal,
}

/// Tells from its beginning whether a file holds a message program; `None` for any other.
pub fn file_kind(path: &Path) -> Result<Option<FileKind>, MessageError> {
    let mut beginning = Vec::new();
    let file = open_file(path)?;
    file.take(BEGINNING).read_to_end(&mut beginning).map_err(|source| io("read", path, source))?;
    Ok(match () {
        () if beginning.starts_with(MAGIC) => Some(FileKind::Stored),
        () if goal::is_goal(&beginning) => Some(FileKind::Goal),
        () => None,
    })
}

/// A file opened to be mapped or read as a whole.
fn open_file(path: &Path) -> Result<File, MessageError> {
    let file = File::open(path).map_err(|source| io("open", path, source))?;
    let metadata = file.metadata().map_err(|source| io("open", path, source))?;
    if !metadata.is_file() {
        return Err(io("open", path, std::io::Error::other("not a regular file")));
    }
    Ok(file)
}

impl MessageProgram {
    /// Opens a stored program; its columns are mapped, not copied. Fails for a damaged or foreign file, with the place.
    pub fn open(path: &Path) -> Result<Self, MessageError> {
        let file = open_file(path)?;
        let len = file.metadata().map_err(|source| io("open", path, source))?.len();
        if len < HEADER_BYTES as u64 {
            return Err(format(len, "the file ends inside the header"));
        }
        // SAFETY: the map is read-only and private to this program; stored files are replaced by renaming, never written or
        // cut in place (see the module's text).
        let map = unsafe { Mmap::map(&file) }.map_err(|source| io("map", path, source))?;
        read(&Arc::new(map))
    }

    /// Stores the program: written beside `path`, flushed to the disk and renamed. Returns the number of bytes.
    pub fn save(&self, path: &Path) -> Result<u64, MessageError> {
        let temporary = temporary_beside(path);
        let write = || {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(&temporary)?);
            let bytes = self.write_stored(&mut out)?;
            out.into_inner()?.sync_all()?;
            Ok(bytes)
        };
        let written = write().map_err(|source| io("write", path, source));
        let done = written.and_then(|bytes| match std::fs::rename(&temporary, path) {
            Ok(()) => Ok(bytes),
            Err(source) => Err(io("replace", path, source)),
        });
        if done.is_err() {
            // The first error is the one to tell; a leftover file harms nobody.
            let _ = std::fs::remove_file(&temporary);
        }
        done
    }

    /// Size of the stored form.
    pub fn stored_bytes(&self) -> u64 {
        let lengths = self.section_lengths();
        (TABLE_END + lengths.iter().map(|len| len.next_multiple_of(ALIGN)).sum::<usize>()) as u64
    }

    fn section_lengths(&self) -> [usize; NAMES.len()] {
        [
            4 * self.ops.len(),
            8 * self.wide.len(),
            8 * self.rank_start.len(),
            8 * self.far_start.len(),
            4 * self.far_from.len(),
            4 * self.far_to.len(),
        ]
    }

    /// Hands the bytes of a section on, in pieces.
    fn section(&self, index: usize, take: &mut impl FnMut(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
        match index {
            0 => pieces(&self.ops, take),
            1 => pieces(&self.wide, take),
            2 => pieces(&self.rank_start, take),
            3 => pieces(&self.far_start, take),
            4 => pieces(&self.far_from, take),
            _ => pieces(&self.far_to, take),
        }
    }

    fn write_stored(&self, out: &mut (impl Write + Seek)) -> std::io::Result<u64> {
        let mut table = Vec::with_capacity(TABLE_END - HEADER_BYTES);
        out.write_all(&[0; TABLE_END])?;
        let mut offset = TABLE_END;
        for (index, len) in self.section_lengths().into_iter().enumerate() {
            let mut crc = crc32fast::Hasher::new();
            self.section(index, &mut |bytes| {
                crc.update(bytes);
                out.write_all(bytes)
            })?;
            (index as u32 + 1).put(&mut table);
            width(index).put(&mut table);
            (offset as u64).put(&mut table);
            (len as u64).put(&mut table);
            crc.finalize().put(&mut table);
            0_u32.put(&mut table);
            out.write_all(&[0; ALIGN][..len.next_multiple_of(ALIGN) - len])?;
            offset += len.next_multiple_of(ALIGN);
        }
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        VERSION.put(&mut header);
        ENDIAN_MARK.put(&mut header);
        0_u64.put(&mut header); // feature bits: none yet
        (offset as u64).put(&mut header);
        (NAMES.len() as u32).put(&mut header);
        crc32fast::hash(&table).put(&mut header);
        header.resize(HEADER_CRC_AT, 0);
        crc32fast::hash(&header).put(&mut header);
        out.seek(SeekFrom::Start(0))?;
        out.write_all(&header)?;
        out.write_all(&table)?;
        Ok(offset as u64)
    }
}

/// Bytes per element of a section.
fn width(index: usize) -> u32 {
    if matches!(index, 1..=3) { 8 } else { 4 }
}

fn pieces<T: Plain>(values: &[T], take: &mut impl FnMut(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    for piece in values.chunks(1 << 13) {
        bytes.clear();
        for value in piece {
            value.put(&mut bytes);
        }
        take(&bytes)?;
    }
    Ok(())
}

fn read(map: &Arc<Mmap>) -> Result<MessageProgram, MessageError> {
    check_header(map)?;
    let mut next = TABLE_END;
    let mut sections = Vec::with_capacity(NAMES.len());
    for index in 0..NAMES.len() {
        let section = check_entry(map, index, next)?;
        next = (section.0 + section.1).next_multiple_of(ALIGN);
        sections.push(section);
    }
    if next != map.len() {
        return Err(format(next as u64, "bytes follow the last section"));
    }
    let mut program = MessageProgram {
        ops: column(map, sections[0])?,
        wide: column(map, sections[1])?,
        rank_start: column(map, sections[2])?,
        far_start: column(map, sections[3])?,
        far_from: column(map, sections[4])?,
        far_to: column(map, sections[5])?,
        totals: Totals::default(),
    };
    program.totals = check::check(&program)?;
    Ok(program)
}

fn column<T: Plain>(map: &Arc<Mmap>, (offset, len): (usize, usize)) -> Result<Column<T>, MessageError> {
    let column =
        len.is_multiple_of(size_of::<T>()).then(|| Column::mapped(map, offset, len / size_of::<T>())).flatten();
    column.ok_or_else(|| format(offset as u64, "the column does not hold whole elements"))
}

fn check_header(bytes: &[u8]) -> Result<(), MessageError> {
    if !bytes.starts_with(MAGIC) {
        return Err(format(0, "the file does not begin as a stored message program does"));
    }
    if u32_at(bytes, 12) != ENDIAN_MARK || cfg!(target_endian = "big") {
        return Err(format(12, "the byte order of the file is not this machine's"));
    }
    if u32_at(bytes, 8) != VERSION {
        return Err(format(8, format!("format version {}, this program reads version {VERSION}", u32_at(bytes, 8))));
    }
    if crc32fast::hash(&bytes[..HEADER_CRC_AT]) != u32_at(bytes, HEADER_CRC_AT) {
        return Err(format(HEADER_CRC_AT as u64, "the header is damaged (checksum)"));
    }
    if u64_at(bytes, 16) != 0 {
        return Err(format(16, "the file needs features this program does not have"));
    }
    let (told, is) = (u64_at(bytes, 24), bytes.len() as u64);
    if told != is {
        return Err(format(told.min(is), format!("the file has {is} bytes, its header says {told}")));
    }
    if u32_at(bytes, 32) != NAMES.len() as u32 {
        return Err(format(32, format!("{} sections where {} belong", u32_at(bytes, 32), NAMES.len())));
    }
    let table = bytes.get(HEADER_BYTES..TABLE_END);
    let table = table.ok_or_else(|| format(is, "the file ends inside the section table"))?;
    if crc32fast::hash(table) != u32_at(bytes, 36) {
        return Err(format(HEADER_BYTES as u64, "the section table is damaged (checksum)"));
    }
    Ok(())
}

/// Offset and length of a section, which must begin at `next`.
fn check_entry(bytes: &[u8], index: usize, next: usize) -> Result<(usize, usize), MessageError> {
    let at = HEADER_BYTES + index * ENTRY_BYTES;
    let error = |at: usize, message: &str| format(at as u64, format!("section {:?}: {message}", NAMES[index]));
    if u32_at(bytes, at) != index as u32 + 1 || u32_at(bytes, at + 4) != width(index) || u32_at(bytes, at + 28) != 0 {
        return Err(error(at, "its table entry is another section's"));
    }
    if u64_at(bytes, at + 8) != next as u64 {
        return Err(error(at + 8, "it does not begin where the one before ends"));
    }
    let len = usize::try_from(u64_at(bytes, at + 16)).ok();
    let end = len.and_then(|len| len.checked_add(next)).filter(|end| *end <= bytes.len());
    let Some((len, end)) = len.zip(end) else { return Err(error(at + 16, "it reaches beyond the end of the file")) };
    if crc32fast::hash(&bytes[next..end]) != u32_at(bytes, at + 24) {
        return Err(error(next, "it is damaged (checksum)"));
    }
    let padding = bytes.get(end..end.next_multiple_of(ALIGN));
    if padding.is_none_or(|padding| padding.iter().any(|byte| *byte != 0)) {
        return Err(error(end, "its padding is not zero"));
    }
    Ok((next, len))
}

fn temporary_beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> MessageError {
    MessageError::Io { action, path: path.to_owned(), source }
}

fn format(offset: u64, message: impl Into<String>) -> MessageError {
    MessageError::Format { offset, message: message.into() }
}

/// The caller has checked that the file reaches that far.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
