//! Reading the stored form: nothing in a file is believed before it is checked.

use super::{
    ALIGN, ENDIAN_MARK, ENTRY_BYTES, HEADER_BYTES, HEADER_CRC_AT, MAGIC, OPS_AT, RANKS_AT, SECTIONS, Section,
    Section as S, TEMPLATES_AT, VERSION,
};
use crate::graph::columns::{Column, Indices, Plain, tag};
use crate::graph::overrides::Overrides;
use crate::graph::packed::Packed;
use crate::graph::{Comms, Graph, GraphError, OpTable, Ranks, Templates, check};
use memmap2::Mmap;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A file whose header and section table are right; its sections are looked at when they are read.
pub(super) struct Reader {
    map: Arc<Mmap>,
    entries: Vec<Entry>,
}

/// An entry of the section table.
#[derive(Clone, Copy)]
struct Entry {
    /// Bytes per element.
    width: u32,
    offset: usize,
    bytes: usize,
    crc: u32,
}

impl Reader {
    pub(super) fn new(map: Arc<Mmap>) -> Result<Self, GraphError> {
        check_header(&map)?;
        let table_end = HEADER_BYTES + ENTRY_BYTES * SECTIONS.len();
        let table = map
            .get(HEADER_BYTES..table_end)
            .ok_or_else(|| GraphError::format(map.len() as u64, "the file ends inside the section table"))?;
        if crc32fast::hash(table) != u32_at(&map, 36) {
            return Err(GraphError::format(HEADER_BYTES as u64, "the section table is damaged (checksum)"));
        }
        let mut entries = Vec::with_capacity(SECTIONS.len());
        let mut next = table_end;
        for (index, section) in SECTIONS.iter().enumerate() {
            let at = HEADER_BYTES + index * ENTRY_BYTES;
            let entry = check_entry(&map, at, *section, next)?;
            next = (entry.offset + entry.bytes).next_multiple_of(ALIGN);
            entries.push(entry);
        }
        if next != map.len() {
            return Err(GraphError::format(next as u64, "bytes follow the last section"));
        }
        Ok(Self { map, entries })
    }

    /// Ranks the header tells.
    pub(super) fn world_size(&self) -> u32 {
        u32_at(&self.map, RANKS_AT)
    }

    /// Templates the header tells.
    pub(super) fn num_templates(&self) -> u32 {
        u32_at(&self.map, TEMPLATES_AT)
    }

    /// Ops over all ranks the header tells.
    pub(super) fn num_ops(&self) -> u64 {
        u64_at(&self.map, OPS_AT)
    }

    /// Length of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// All of the graph, checked.
    pub(super) fn graph(&self) -> Result<Graph, GraphError> {
        SECTIONS.iter().try_for_each(|section| self.verify(*section))?;
        let names = self.texts(S::Names)?;
        let distinct: FxHashSet<&str> = names.iter().map(String::as_str).collect();
        if distinct.len() != names.len() {
            return Err(self.error(S::Names, 0, "a name comes twice"));
        }
        let meta = self.texts_of_meta()?;
        let ops = self.op_table(names.len())?;
        let templates = self.templates(&ops)?;
        let ranks = self.ranks()?;
        let comms = self.comms(ranks.slots.len())?;
        let overrides = self.overrides(&ranks)?;
        let graph = Graph::from_tables(names, meta, ops, templates, comms, ranks, overrides)?;
        let told = (self.world_size(), self.num_templates(), self.num_ops());
        if told != (graph.world_size(), graph.num_templates() as u32, graph.num_ops()) {
            return Err(GraphError::format(RANKS_AT as u64, "the header tells other numbers than the sections"));
        }
        graph.stored_bytes.set(self.map.len() as u64).expect("a new graph's size is not known yet");
        Ok(graph)
    }

    /// Facts about the job alone.
    pub(super) fn meta(&self) -> Result<BTreeMap<String, String>, GraphError> {
        self.verify(S::Meta)?;
        self.texts_of_meta()
    }

    /// A section's checksum is right, and what pads it is zero.
    fn verify(&self, section: Section) -> Result<(), GraphError> {
        let Entry { offset, bytes, crc, .. } = self.entry(section);
        let end = offset + bytes;
        if crc32fast::hash(&self.map[offset..end]) != crc {
            return Err(self.error(section, 0, "it is damaged (checksum)"));
        }
        let padding = self.map.get(end..end.next_multiple_of(ALIGN));
        if padding.is_none_or(|padding| padding.iter().any(|byte| *byte != 0)) {
            return Err(self.error(section, bytes, "its padding is not zero"));
        }
        Ok(())
    }

    fn entry(&self, section: Section) -> Entry {
        self.entries[section as usize - 1]
    }

    fn error(&self, section: Section, byte: usize, message: &str) -> GraphError {
        GraphError::format((self.entry(section).offset + byte) as u64, format!("section {section:?}: {message}"))
    }

    fn column<T: Plain>(&self, section: Section) -> Result<Column<T>, GraphError> {
        let Entry { width, offset, bytes, .. } = self.entry(section);
        if width as usize != size_of::<T>() || !bytes.is_multiple_of(size_of::<T>()) {
            return Err(self.error(section, 0, "elements have another size than this version's"));
        }
        let column = Column::mapped(&self.map, offset, bytes / size_of::<T>());
        column.ok_or_else(|| self.error(section, 0, "the column does not lie in the file"))
    }

    /// A column of `len` elements.
    fn sized<T: Plain>(&self, section: Section, len: usize) -> Result<Column<T>, GraphError> {
        let column = self.column(section)?;
        if column.len() != len {
            return Err(self.error(section, 0, &format!("{} elements where {len} belong", column.len())));
        }
        Ok(column)
    }

    /// Start offsets: from 0, rising, to `end`.
    fn check_starts(&self, section: Section, starts: &[u64], end: usize) -> Result<(), GraphError> {
        if starts.first() != Some(&0) || starts.last() != Some(&(end as u64)) {
            return Err(self.error(section, 0, &format!("does not lead from 0 to {end}")));
        }
        match starts.windows(2).position(|pair| pair[0] > pair[1]) {
            Some(index) => Err(self.error(section, 8 * index, "starts are not in order")),
            None => Ok(()),
        }
    }

    fn starts_u32(&self, section: Section, len: usize, end: usize) -> Result<Column<u32>, GraphError> {
        let column: Column<u32> = self.sized(section, len)?;
        let wide: Vec<u64> = column.iter().map(|start| u64::from(*start)).collect();
        self.check_starts(section, &wide, end)?;
        Ok(column)
    }

    fn texts(&self, section: Section) -> Result<Vec<String>, GraphError> {
        let Entry { offset, bytes, .. } = self.entry(section);
        let bytes = &self.map[offset..offset + bytes];
        let short = || self.error(section, 0, "texts do not fill the section");
        let (count, rest) = bytes.split_first_chunk().ok_or_else(short)?;
        let count = usize::try_from(u64::from_le_bytes(*count)).map_err(|_| short())?;
        let ends_len = count.checked_mul(8).filter(|len| *len <= rest.len()).ok_or_else(short)?;
        let (ends, blob) = rest.split_at(ends_len);
        let mut start = 0;
        let mut texts = Vec::with_capacity(count);
        for (index, end) in ends.chunks_exact(8).enumerate() {
            let end = u64::from_le_bytes(end.try_into().expect("chunks of eight"));
            let end = usize::try_from(end).map_err(|_| short())?;
            let text = blob.get(start..end).ok_or_else(|| self.error(section, 8 + 8 * index, "a text lies outside"))?;
            let text = std::str::from_utf8(text);
            let text = text.map_err(|_| self.error(section, 8 + 8 * index, "a text is not UTF-8"))?;
            texts.push(text.to_owned());
            start = end;
        }
        if start == blob.len() { Ok(texts) } else { Err(short()) }
    }

    fn texts_of_meta(&self) -> Result<BTreeMap<String, String>, GraphError> {
        let mut texts = self.texts(S::Meta)?.into_iter();
        let mut meta = BTreeMap::new();
        while let Some(key) = texts.next() {
            let value = texts.next().ok_or_else(|| self.error(S::Meta, 0, "a key has no value"))?;
            if meta.insert(key, value).is_some() {
                return Err(self.error(S::Meta, 0, "a key comes twice"));
            }
        }
        Ok(meta)
    }

    fn op_table(&self, num_names: usize) -> Result<OpTable, GraphError> {
        let tag: Column<u8> = self.column(S::RowTag)?;
        let len = tag.len();
        let ops = OpTable {
            tag,
            a: self.sized(S::RowA, len)?,
            b: self.sized(S::RowB, len)?,
            c: self.sized(S::RowC, len)?,
            stream: self.sized(S::RowStream, len)?,
            slot: self.sized(S::RowSlot, len)?,
            arg: self.sized(S::RowArg, len)?,
            value: self.sized(S::RowValue, len)?,
        };
        for (index, row) in ops.rows().enumerate() {
            check::row(row, num_names).map_err(|what| self.error(S::RowTag, index, &format!("op {index}: {what}")))?;
            if row.tag == tag::COMPUTE && row.value != 0 {
                return Err(self.error(S::RowValue, 8 * index, "computation has its duration elsewhere"));
            }
        }
        Ok(ops)
    }

    fn indices(&self, section: Section, len: usize, limit: usize) -> Result<Indices, GraphError> {
        let indices = match self.entry(section).width {
            0 if self.entry(section).bytes == 0 && len <= Indices::MAX_ZERO => Indices::Zero(len),
            1 => Indices::U8(self.sized(section, len)?),
            2 => Indices::U16(self.sized(section, len)?),
            4 => Indices::U32(self.sized(section, len)?),
            _ => return Err(self.error(section, 0, "indices have an unknown width")),
        };
        if len > 0 && indices.max() as usize >= limit {
            return Err(self.error(section, 0, &format!("an index is {}, the table has {limit}", indices.max())));
        }
        Ok(indices)
    }

    fn templates(&self, ops: &OpTable) -> Result<Templates, GraphError> {
        let names = self.texts(S::TemplateNames)?;
        let start: Column<u64> = self.sized(S::TemplateStart, names.len() + 1)?;
        let total = usize::try_from(start[names.len()]).unwrap_or(usize::MAX);
        self.check_starts(S::TemplateStart, &start, total)?;
        if start.windows(2).any(|pair| pair[1] - pair[0] > u64::from(u32::MAX)) {
            return Err(self.error(S::TemplateStart, 0, "a template has more ops than can be"));
        }
        let row = self.indices(S::OpRow, total, ops.len())?;
        let list = |heads: Section, data: Section, limit: u64| {
            let lens = start.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
            self.packed(heads, data, lens, 0, limit)
        };
        let gap = list(S::GapHeads, S::GapData, i64::MAX as u64)?;
        let group = list(S::GroupHeads, S::GroupData, u64::from(u32::MAX))?;
        let duration = list(S::DurationHeads, S::DurationData, i64::MAX as u64)?;
        Ok(Templates { names, start, row, gap, group, duration, shapes: Vec::new() })
    }

    /// Lists of these lengths; see [`Packed::check`].
    fn packed(
        &self,
        heads: Section,
        data: Section,
        lens: impl ExactSizeIterator<Item = usize>,
        first: u64,
        limit: u64,
    ) -> Result<Packed, GraphError> {
        let lists = Packed::from_columns(self.column(heads)?, self.column(data)?);
        match lists.check(lens, first, limit) {
            Ok(()) => Ok(lists),
            Err((list, what)) => Err(self.error(heads, 0, &format!("list {list}: {what}"))),
        }
    }

    fn ranks(&self) -> Result<Ranks, GraphError> {
        let template: Column<u32> = self.column(S::RankTemplate)?;
        let slots: Column<u32> = self.column(S::RankSlots)?;
        let world = u32::try_from(template.len());
        world.map_err(|_| self.error(S::RankTemplate, 0, "more ranks than can be numbered"))?;
        let start = self.starts_u32(S::RankStart, template.len() + 1, slots.len())?;
        Ok(Ranks { template, start, slots })
    }

    /// Expands the member lists. Every membership is also in a slot table, which bounds what a small file can ask for.
    fn comms(&self, memberships: usize) -> Result<Comms, GraphError> {
        let first: Column<u32> = self.column(S::RunFirst)?;
        let stride: Column<u32> = self.sized(S::RunStride, first.len())?;
        let count: Column<u32> = self.sized(S::RunCount, first.len())?;
        let total: u64 = count.iter().map(|count| u64::from(*count)).sum();
        if total != memberships as u64 {
            let message = format!("{total} members in all, but the ranks' slots are {memberships}");
            return Err(self.error(S::RunCount, 0, &message));
        }
        let comms: Column<u32> = self.column(S::CommRuns)?;
        let comm_runs = self.starts_u32(S::CommRuns, comms.len(), first.len())?;
        let mut members = Vec::with_capacity(memberships);
        let mut start = vec![0_u32];
        for pair in comm_runs.windows(2) {
            for run in pair[0] as usize..pair[1] as usize {
                members.extend((0..count[run]).map(|k| first[run].wrapping_add(stride[run].wrapping_mul(k))));
            }
            start.push(members.len() as u32);
        }
        Ok(Comms { start, members })
    }

    fn overrides(&self, ranks: &Ranks) -> Result<Overrides, GraphError> {
        let rank: Column<u32> = self.column(S::OverrideRank)?;
        let op: Column<u32> = self.column(S::OverrideOp)?;
        let ps: Column<u64> = self.sized(S::OverridePs, op.len())?;
        let start: Column<u64> = self.sized(S::OverrideStart, rank.len() + 1)?;
        self.check_starts(S::OverrideStart, &start, op.len())?;
        if rank.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(self.error(S::OverrideRank, 0, "ranks are not ascending"));
        }
        let ascending = |pair: &[u64]| op[pair[0] as usize..pair[1] as usize].windows(2).all(|ops| ops[0] < ops[1]);
        if !start.windows(2).all(ascending) {
            return Err(self.error(S::OverrideOp, 0, "op numbers of a rank are not ascending"));
        }
        let template: Column<u32> = self.column(S::OwnTemplate)?;
        let column_op: Column<u32> = self.sized(S::OwnOp, template.len())?;
        let order = || template.iter().zip(column_op.iter());
        if order().zip(order().skip(1)).any(|(one, next)| one >= next) {
            return Err(self.error(S::OwnTemplate, 0, "templates and their ops are not ascending"));
        }
        let mut members: FxHashMap<u32, usize> = FxHashMap::default();
        if !template.is_empty() {
            ranks.template.iter().for_each(|template| *members.entry(*template).or_default() += 1);
        }
        let lens = template.iter().map(|template| members.get(template).copied().unwrap_or(0));
        let columns = self.packed(S::OwnHeads, S::OwnData, lens, 1, i64::MAX as u64)?;
        Ok(Overrides::from_columns([rank, op, template, column_op], [start, ps], columns, ranks))
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn check_header(bytes: &[u8]) -> Result<(), GraphError> {
    if &bytes[..8] != MAGIC {
        return Err(GraphError::format(0, "this is another kind of file"));
    }
    if u32_at(bytes, 12) != ENDIAN_MARK || cfg!(target_endian = "big") {
        return Err(GraphError::format(12, "the byte order of the file is not this machine's"));
    }
    if u32_at(bytes, 8) != VERSION {
        let message = format!("format version {}, this program reads version {VERSION}", u32_at(bytes, 8));
        return Err(GraphError::format(8, message));
    }
    if crc32fast::hash(&bytes[..HEADER_CRC_AT]) != u32_at(bytes, HEADER_CRC_AT) {
        return Err(GraphError::format(HEADER_CRC_AT as u64, "the header is damaged (checksum)"));
    }
    if u64_at(bytes, 16) != 0 {
        return Err(GraphError::format(16, "the file needs features this program does not have"));
    }
    let (told, is) = (u64_at(bytes, 24), bytes.len() as u64);
    if told != is {
        let message = format!("the file has {is} bytes, its header says {told}");
        return Err(GraphError::format(told.min(is), message));
    }
    if u32_at(bytes, 32) != SECTIONS.len() as u32 {
        return Err(GraphError::format(32, format!("{} sections where {} belong", u32_at(bytes, 32), SECTIONS.len())));
    }
    Ok(())
}

/// The section whose table entry is at `at` and which must begin at `next`.
fn check_entry(bytes: &[u8], at: usize, section: Section, next: usize) -> Result<Entry, GraphError> {
    let error = |at: usize, message: &str| GraphError::format(at as u64, format!("section {section:?}: {message}"));
    if u32_at(bytes, at) != section as u32 || u32_at(bytes, at + 28) != 0 {
        return Err(error(at, "its table entry is another section's"));
    }
    if u64_at(bytes, at + 8) != next as u64 {
        return Err(error(at + 8, "it does not begin where the one before ends"));
    }
    let len = usize::try_from(u64_at(bytes, at + 16)).ok();
    let fits = len.filter(|len| len.checked_add(next).is_some_and(|end| end <= bytes.len()));
    let len = fits.ok_or_else(|| error(at + 16, "it reaches beyond the end of the file"))?;
    Ok(Entry { width: u32_at(bytes, at + 4), offset: next, bytes: len, crc: u32_at(bytes, at + 24) })
}
