//! The mapped binary form.
//!
//! ```text
//! header (64 bytes)   magic, version, endian mark, feature bits, file length, number of sections, checksum of the section
//!                     table, ranks, templates, ops over all ranks, checksum of the header
//! section table       per section: id, bytes per element, offset, length, checksum
//! sections            columns of little-endian integers, each at a multiple of 8 bytes, zero padded
//! ```
//! Sections come in one fixed order without gaps, so every byte of the file is either checksummed or must be zero: any
//! flipped bit is found. Opening ([`GraphFile::open`]) maps the file and checks header and section table, which costs the
//! same for every file. The first use of the graph reads the file once for its checksums (CRC-32, some GB/s) and checks
//! every index, so that a damaged or hostile file is an error that names the section and never a crash. Columns are used where
//! they lie in the map; only names, metadata and member lists are copied, and all allocations are bounded by the size of
//! the file.
//!
//! Lists of integers of different width (`..Heads`, `..Data`) are those of [`super::packed`]: per list four numbers (base,
//! step, first byte, bytes per value), and the values as `(value - base) / step`. Of a list with gaps 0 is no value and the
//! others count from 1.
//!
//! | section | contents |
//! |---|---|
//! | `Names`, `Meta`, `TemplateNames` | number of texts, end of each, bytes |
//! | `TemplateStart`, `OpRow` | first op of each template; per op its row |
//! | `Gap*`, `Group*`, `Duration*` | a list per template: host gaps (ps), groups, durations (ps) |
//! | `Row*` | distinct ops: tag, fields a, b, c, stream, slot, argument, value |
//! | `CommRuns`, `Run*` | per communicator its arithmetic runs of members: first, stride, count |
//! | `Rank*` | per rank its template, and where its communicators are |
//! | `Override*` | durations of single ranks: rank, first entry, op, ps |
//! | `OwnTemplate`, `OwnOp`, `Own*` | a list with gaps per op: durations over the ranks of the template |
//!
//! A file is written under another name and renamed. Nothing writes into an existing graph file; a program that did so
//! while a graph is open would change that graph.

mod file;
mod read;

use crate::graph::columns::Plain;
use crate::graph::{Graph, GraphError};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"PRISMGR\x1a";
const VERSION: u32 = 2;
/// Reads as 0x04030201 where the byte order is the other one.
const ENDIAN_MARK: u32 = 0x0102_0304;
const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 32;
/// The header's checksum is its last field.
const HEADER_CRC_AT: usize = 60;
const ALIGN: usize = 8;
/// Where the header tells ranks, templates and ops.
const RANKS_AT: usize = 40;
const TEMPLATES_AT: usize = 44;
const OPS_AT: usize = 48;

/// Sections in file order; the discriminant is the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Section {
    Names = 1,
    Meta,
    TemplateNames,
    TemplateStart,
    OpRow,
    GapHeads,
    GapData,
    GroupHeads,
    GroupData,
    DurationHeads,
    DurationData,
    RowTag,
    RowA,
    RowB,
    RowC,
    RowStream,
    RowSlot,
    RowArg,
    RowValue,
    CommRuns,
    RunFirst,
    RunStride,
    RunCount,
    RankTemplate,
    RankStart,
    RankSlots,
    OverrideRank,
    OverrideStart,
    OverrideOp,
    OverridePs,
    OwnTemplate,
    OwnOp,
    OwnHeads,
    OwnData,
}

use Section as S;

pub use file::GraphFile;

const SECTIONS: [Section; 34] = [
    S::Names,
    S::Meta,
    S::TemplateNames,
    S::TemplateStart,
    S::OpRow,
    S::GapHeads,
    S::GapData,
    S::GroupHeads,
    S::GroupData,
    S::DurationHeads,
    S::DurationData,
    S::RowTag,
    S::RowA,
    S::RowB,
    S::RowC,
    S::RowStream,
    S::RowSlot,
    S::RowArg,
    S::RowValue,
    S::CommRuns,
    S::RunFirst,
    S::RunStride,
    S::RunCount,
    S::RankTemplate,
    S::RankStart,
    S::RankSlots,
    S::OverrideRank,
    S::OverrideStart,
    S::OverrideOp,
    S::OverridePs,
    S::OwnTemplate,
    S::OwnOp,
    S::OwnHeads,
    S::OwnData,
];

impl Graph {
    /// Opens a stored graph and checks all of it. Cost: one pass over the file for checksums and index bounds; columns are
    /// mapped, not copied. [`GraphFile::open`] puts the pass off until the graph is used.
    pub fn open(path: &Path) -> Result<Self, GraphError> {
        GraphFile::open(path)?.read()
    }

    /// Stores the graph: written beside `path`, flushed to the disk and renamed, so `path` is never half a graph.
    /// Returns the number of bytes.
    pub fn save(&self, path: &Path) -> Result<u64, GraphError> {
        let bytes = self.encode();
        let temporary = temporary_beside(path);
        let io = |action, source| GraphError::Io { action, path: path.to_owned(), source };
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        let written = write().map_err(|source| io("write", source));
        let done = written.and_then(|()| std::fs::rename(&temporary, path).map_err(|source| io("replace", source)));
        if done.is_err() {
            // The first error is the one to tell; a leftover file harms nobody.
            let _ = std::fs::remove_file(&temporary);
        }
        done.map(|()| bytes.len() as u64)
    }

    /// The stored form.
    pub(super) fn encode(&self) -> Vec<u8> {
        let sections: Vec<_> = SECTIONS.iter().map(|section| self.section(*section)).collect();
        let mut out = vec![0; HEADER_BYTES + ENTRY_BYTES * SECTIONS.len()];
        for (index, (section, (width, bytes))) in SECTIONS.iter().zip(&sections).enumerate() {
            let offset = out.len() as u64;
            out.extend_from_slice(bytes);
            out.resize(out.len().next_multiple_of(ALIGN), 0);
            let mut entry = Vec::with_capacity(ENTRY_BYTES);
            (*section as u32).put(&mut entry);
            width.put(&mut entry);
            offset.put(&mut entry);
            (bytes.len() as u64).put(&mut entry);
            crc32fast::hash(bytes).put(&mut entry);
            0_u32.put(&mut entry);
            out[HEADER_BYTES + index * ENTRY_BYTES..][..ENTRY_BYTES].copy_from_slice(&entry);
        }
        let table = crc32fast::hash(&out[HEADER_BYTES..HEADER_BYTES + ENTRY_BYTES * SECTIONS.len()]);
        let header = header(out.len() as u64, table, self);
        out[..HEADER_BYTES].copy_from_slice(&header);
        out
    }

    fn section(&self, section: Section) -> (u32, Vec<u8>) {
        let (ops, templates, overrides) = (&self.ops, &self.templates, &self.overrides);
        match section {
            S::Names => (1, encode_texts(self.names.iter().map(String::as_str))),
            S::Meta => (1, encode_texts(self.meta.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]))),
            S::TemplateNames => (1, encode_texts(templates.names.iter().map(String::as_str))),
            S::TemplateStart => (8, templates.start.to_bytes()),
            S::OpRow => (templates.row.width(), templates.row.to_bytes()),
            S::GapHeads => (8, templates.gap.heads_bytes()),
            S::GapData => (1, templates.gap.data().to_vec()),
            S::GroupHeads => (8, templates.group.heads_bytes()),
            S::GroupData => (1, templates.group.data().to_vec()),
            S::DurationHeads => (8, templates.duration.heads_bytes()),
            S::DurationData => (1, templates.duration.data().to_vec()),
            S::RowTag => (1, ops.tag.to_bytes()),
            S::RowA => (1, ops.a.to_bytes()),
            S::RowB => (1, ops.b.to_bytes()),
            S::RowC => (1, ops.c.to_bytes()),
            S::RowStream => (4, ops.stream.to_bytes()),
            S::RowSlot => (4, ops.slot.to_bytes()),
            S::RowArg => (4, ops.arg.to_bytes()),
            S::RowValue => (8, ops.value.to_bytes()),
            S::CommRuns => {
                let mut end = 0_u32;
                let counts = (0..self.comms.len()).map(|comm| runs(self.comms.members(comm)).count() as u32);
                let ends = counts.map(|count| {
                    end += count;
                    end
                });
                (4, bytes_of(std::iter::once(0).chain(ends)))
            }
            S::RunFirst => (4, bytes_of(self.all_runs().map(|run| run.first))),
            S::RunStride => (4, bytes_of(self.all_runs().map(|run| run.stride))),
            S::RunCount => (4, bytes_of(self.all_runs().map(|run| run.count))),
            S::RankTemplate => (4, self.ranks.template.to_bytes()),
            S::RankStart => (4, self.ranks.start.to_bytes()),
            S::RankSlots => (4, self.ranks.slots.to_bytes()),
            S::OverrideRank => (4, overrides.rank.to_bytes()),
            S::OverrideStart => (8, overrides.start.to_bytes()),
            S::OverrideOp => (4, overrides.op.to_bytes()),
            S::OverridePs => (8, overrides.ps.to_bytes()),
            S::OwnTemplate => (4, overrides.column_template.to_bytes()),
            S::OwnOp => (4, overrides.column_op.to_bytes()),
            S::OwnHeads => (8, overrides.columns.heads_bytes()),
            S::OwnData => (1, overrides.columns.data().to_vec()),
        }
    }

    fn all_runs(&self) -> impl Iterator<Item = Run> + '_ {
        (0..self.comms.len()).flat_map(|comm| runs(self.comms.members(comm)))
    }
}

fn header(file_len: u64, table_crc: u32, graph: &Graph) -> [u8; HEADER_BYTES] {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    bytes.extend_from_slice(MAGIC);
    VERSION.put(&mut bytes);
    ENDIAN_MARK.put(&mut bytes);
    0_u64.put(&mut bytes); // feature bits: none yet
    file_len.put(&mut bytes);
    (SECTIONS.len() as u32).put(&mut bytes);
    table_crc.put(&mut bytes);
    graph.world_size().put(&mut bytes);
    (graph.num_templates() as u32).put(&mut bytes);
    graph.num_ops().put(&mut bytes);
    bytes.resize(HEADER_CRC_AT, 0);
    crc32fast::hash(&bytes).put(&mut bytes);
    bytes.try_into().expect("the fields add up to the header's size")
}

fn temporary_beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn bytes_of(values: impl Iterator<Item = u32>) -> Vec<u8> {
    let mut out = Vec::new();
    values.for_each(|value| value.put(&mut out));
    out
}

/// Texts as: number of texts, end offset of each, bytes.
fn encode_texts<'a>(texts: impl Iterator<Item = &'a str> + Clone) -> Vec<u8> {
    let mut out = Vec::new();
    (texts.clone().count() as u64).put(&mut out);
    let mut end = 0_u64;
    for text in texts.clone() {
        end += text.len() as u64;
        end.put(&mut out);
    }
    texts.for_each(|text| out.extend_from_slice(text.as_bytes()));
    out
}

/// `count` ranks from `first` in steps of `stride` (modulo 2^32, so that steps may go down).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) stride: u32,
    pub(super) count: u32,
}

/// A list as arithmetic runs, each as long as possible.
pub(super) fn runs(list: &[u32]) -> impl Iterator<Item = Run> + '_ {
    let mut rest = list;
    std::iter::from_fn(move || {
        let (&first, tail) = rest.split_first()?;
        let stride = tail.first().map_or(0, |second| second.wrapping_sub(first));
        let follows = |pair: &&[u32]| pair[1].wrapping_sub(pair[0]) == stride;
        let count = 1 + rest.windows(2).take_while(follows).count();
        rest = &rest[count..];
        Some(Run { first, stride, count: count as u32 })
    })
}
