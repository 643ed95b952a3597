//! The parts of an ELF file that tell whether it contains NCCL, and whether its calls to it can be interposed.
//!
//! Files come from the program's machine and may be anything: every offset is checked, nothing is read whole but the
//! symbol table of an object that has NCCL's names in it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const HEADER_BYTES: usize = 64;
const SECTION_BYTES: u64 = 64;
const SYMBOL_BYTES: usize = 24;
const RELA_BYTES: usize = 24;
const SEGMENT_BYTES: u64 = 56;
const SHT_STRTAB: u32 = 3;
const SHT_RELA: u32 = 4;
const SHT_DYNAMIC: u32 = 6;
const SHT_DYNSYM: u32 = 11;
const PT_LOAD: u32 = 1;
const DT_SONAME: u64 = 14;
/// Pieces in which files are searched; neighbours overlap by more than what is searched for.
const PIECE_BYTES: usize = 1 << 20;
const OVERLAP_BYTES: usize = 256;
/// Name of a function that the stand-ins of a slim torch look for: they send NCCL's functions on to the preload.
const FORWARDER: &[u8] = b"\0prism_unsupported_call\0";
/// What stubs that open NCCL when it is first used (JAX, TensorFlow) contain.
const LIBRARY: &[u8] = b"libnccl.so";
const BANNER: &[u8] = b"NCCL version ";
/// Longest version text that is looked at, in bytes.
const LONGEST_VERSION: usize = 32;

#[derive(Clone, Debug)]
struct Section {
    name: Vec<u8>,
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

/// An ELF file of this machine's class and byte order.
pub(crate) struct Elf {
    file: File,
    header: [u8; HEADER_BYTES],
    length: u64,
    sections: Vec<Section>,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |field| u16::from_ne_bytes([field[0], field[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn text_at(table: &[u8], at: usize) -> &[u8] {
    let rest = table.get(at..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Position of `needle` in `bytes`.
fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    // SAFETY: both ranges are valid for their lengths.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), needle.as_ptr().cast(), needle.len()) };
    (!found.is_null()).then(|| found as usize - bytes.as_ptr() as usize)
}

/// The version text of NCCL itself, as its code has it: `NCCL version 2.30.7+cuda13.3` (or ` compiled with CUDA 13.3`).
/// Clients have texts that begin alike, but none with a version and CUDA's.
fn banner(bytes: &[u8]) -> Option<String> {
    let mut at = 0;
    while let Some(position) = find(&bytes[at..], BANNER) {
        let start = at + position;
        let text = &bytes[start + BANNER.len()..bytes.len().min(start + BANNER.len() + LONGEST_VERSION)];
        let text = text_at(text, 0);
        let (digits, dots) = text.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').fold(
            (0, 0),
            |(digits, dots), byte| {
                if *byte == b'.' { (digits, dots + 1) } else { (digits + 1, dots) }
            },
        );
        let is_cudas = find(text, b"+cuda").is_some() || find(text, b" compiled with CUDA").is_some();
        if digits >= 3 && dots >= 2 && is_cudas {
            let version = text.split(|byte| *byte == b' ' || *byte == b'\n').next().unwrap_or_default();
            return Some(format!("NCCL version {}", String::from_utf8_lossy(version)));
        }
        at = start + BANNER.len();
    }
    None
}

impl Elf {
    /// Reads the header and the section table.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0)?;
        let order = if cfg!(target_endian = "little") { 1 } else { 2 };
        if header[..6] != [0x7f, b'E', b'L', b'F', 2, order] {
            return Err(io::Error::other("not an ELF file of this machine"));
        }
        let mut elf = Self { file, header, length, sections: Vec::new() };
        elf.sections = elf.read_sections()?;
        Ok(elf)
    }

    fn bytes(&self, offset: u64, size: u64) -> io::Result<Vec<u8>> {
        if offset.checked_add(size).is_none_or(|end| end > self.length) {
            return Err(io::Error::other("the file is shorter than its tables say"));
        }
        let mut bytes = vec![0; size as usize];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    fn read_sections(&self) -> io::Result<Vec<Section>> {
        let (offset, count) = (u64_at(&self.header, 40), u64::from(u16_at(&self.header, 60)));
        let table = self.bytes(offset, count * SECTION_BYTES)?;
        let mut sections: Vec<(usize, Section)> = table
            .chunks_exact(SECTION_BYTES as usize)
            .map(|entry| {
                let section = Section {
                    name: Vec::new(),
                    kind: u32_at(entry, 4),
                    offset: u64_at(entry, 24),
                    size: u64_at(entry, 32),
                    link: u32_at(entry, 40),
                };
                (u32_at(entry, 0) as usize, section)
            })
            .collect();
        if let Some((_, names)) = sections.get(u16_at(&self.header, 62) as usize) {
            let names = self.bytes(names.offset, names.size)?;
            for (name, section) in &mut sections {
                section.name = text_at(&names, *name).to_vec();
            }
        }
        Ok(sections.into_iter().map(|(_, section)| section).collect())
    }

    fn section(&self, kind: u32) -> Option<(usize, &Section)> {
        self.sections.iter().enumerate().find(|(_, section)| section.kind == kind)
    }

    fn contents(&self, section: &Section) -> Vec<u8> {
        self.bytes(section.offset, section.size).unwrap_or_default()
    }

    /// The names of the dynamic symbols.
    fn names(&self) -> Option<&Section> {
        let (_, symbols) = self.section(SHT_DYNSYM)?;
        self.sections.get(symbols.link as usize).filter(|section| section.kind == SHT_STRTAB)
    }

    /// The name the file gives itself.
    pub(crate) fn soname(&self) -> Option<Vec<u8>> {
        let (_, dynamic) = self.section(SHT_DYNAMIC)?;
        let entries = self.contents(dynamic);
        let entry = entries.chunks_exact(16).find(|entry| u64_at(entry, 0) == DT_SONAME)?;
        let names = self.contents(self.sections.get(dynamic.link as usize)?);
        Some(text_at(&names, u64_at(entry, 8) as usize).to_vec())
    }

    /// Is this a stand-in of a slim torch, which sends calls on to the preload?
    pub(crate) fn is_forwarder(&self) -> bool {
        self.names().is_some_and(|names| self.search(names, |piece| find(piece, FORWARDER)).is_some())
    }

    /// Looks at a section piece by piece.
    fn search<T>(&self, section: &Section, mut look: impl FnMut(&[u8]) -> Option<T>) -> Option<T> {
        let end = section.offset.saturating_add(section.size).min(self.length);
        let mut at = section.offset;
        let mut piece = vec![0; PIECE_BYTES.min(section.size as usize)];
        while at < end {
            let size = (end - at).min(PIECE_BYTES as u64) as usize;
            self.file.read_exact_at(&mut piece[..size], at).ok()?;
            if let Some(found) = look(&piece[..size]) {
                return Some(found);
            }
            if at + size as u64 == end {
                return None;
            }
            at += (size - OVERLAP_BYTES) as u64;
        }
        None
    }

    /// The read-only constants; of a file without a section table, everything.
    fn constants(&self) -> Vec<Section> {
        let constants: Vec<Section> =
            self.sections.iter().filter(|section| section.name.starts_with(b".rodata")).cloned().collect();
        if self.sections.is_empty() {
            return vec![Section { name: Vec::new(), kind: 0, offset: 0, size: self.length, link: 0 }];
        }
        constants
    }

    /// What tells that NCCL is linked into this file: the version text of its code, or that the file defines the functions
    /// that make communicators and is no stub that opens the library.
    pub(crate) fn nccl_code(&self, makers: &[&str]) -> Option<String> {
        let constants = self.constants();
        if let Some(banner) = constants.iter().find_map(|section| self.search(section, banner)) {
            return Some(banner);
        }
        let symbols = self.dynamic_symbols(makers);
        let symbol = symbols.iter().find(|symbol| symbol.is_defined)?;
        let is_stub = constants.iter().any(|section| self.search(section, |piece| find(piece, LIBRARY)).is_some());
        (!is_stub).then(|| format!("it defines {}", symbol.name))
    }

    /// The dynamic symbols with one of these names.
    fn dynamic_symbols<'a>(&self, wanted: &[&'a str]) -> Vec<Symbol<'a>> {
        let (Some((_, section)), Some(names)) = (self.section(SHT_DYNSYM), self.names()) else { return Vec::new() };
        let has_one = |piece: &[u8]| wanted.iter().find_map(|name| find(piece, name.as_bytes()));
        if self.search(names, has_one).is_none() {
            return Vec::new();
        }
        let names = self.contents(names);
        let symbols = self.contents(section);
        let entries = symbols.chunks_exact(SYMBOL_BYTES).enumerate();
        entries
            .filter_map(|(index, entry)| {
                let text = text_at(&names, u32_at(entry, 0) as usize);
                let name = wanted.iter().find(|name| name.as_bytes() == text)?;
                let (is_defined, value) = (u16_at(entry, 6) != 0, u64_at(entry, 8));
                Some(Symbol { index: index as u64, name, is_defined, value })
            })
            .collect()
    }

    /// Do the file's own calls of these functions go to the process's first definition (the preload's), though the file
    /// defines them too? True if one of them is called through a slot of the loader and that slot does not hold the file's
    /// own function. `start` and `offset`: where in memory the part of the file at this offset is mapped.
    pub(crate) fn calls_leave(&self, functions: &[&str], start: u64, offset: u64) -> bool {
        let symbols = self.dynamic_symbols(functions);
        let Some(bias) = self.bias(start, offset).filter(|_| !symbols.is_empty()) else { return false };
        let Ok(memory) = File::open("/proc/self/mem") else { return false };
        let Some((dynsym, _)) = self.section(SHT_DYNSYM) else { return false };
        let relocations =
            self.sections.iter().filter(|section| section.kind == SHT_RELA && section.link as usize == dynsym);
        relocations.map(|section| self.contents(section)).any(|table| {
            table.chunks_exact(RELA_BYTES).any(|entry| {
                let Some(symbol) = symbols.iter().find(|symbol| symbol.index == u64_at(entry, 8) >> 32) else {
                    return false;
                };
                let mut slot = [0; 8];
                let is_read = memory.read_exact_at(&mut slot, bias.wrapping_add(u64_at(entry, 0))).is_ok();
                is_read && (!symbol.is_defined || u64::from_ne_bytes(slot) != bias.wrapping_add(symbol.value))
            })
        })
    }

    /// Difference between addresses in memory and in the file.
    fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let (table, count) = (u64_at(&self.header, 32), u64::from(u16_at(&self.header, 56)));
        let segments = self.bytes(table, count * SEGMENT_BYTES).ok()?;
        // SAFETY: asks for a constant of the system.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok().filter(|page| *page > 0)?;
        let segment = segments
            .chunks_exact(SEGMENT_BYTES as usize)
            .find(|entry| u32_at(entry, 0) == PT_LOAD && u64_at(entry, 8) / page == offset / page)?;
        Some(start.wrapping_sub(u64_at(segment, 16) / page * page))
    }
}

/// A dynamic symbol.
struct Symbol<'a> {
    index: u64,
    name: &'a str,
    is_defined: bool,
    /// Address in the file.
    value: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use super::{Elf, banner};
    use std::io::Write;

    /// Put together at run time, from a version with a `v`: this test program must not look like NCCL itself, wherever the
    /// compiler puts its texts.
    fn text(version: &str, cuda: &str) -> String {
        format!("NCCL version {}{cuda}", version.trim_start_matches('v'))
    }

    #[test]
    fn the_version_text_of_nccl_is_told_from_those_of_its_clients() {
        for (version, cuda) in [("v2.30.7", "+cuda13.3"), ("v2.18.3", "+cuda12.1"), ("v2.19.3rc1", "+cuda12.3")] {
            let text = text(version, cuda);
            assert_eq!(banner(format!("x\0{text}\0").as_bytes()), Some(text));
        }
        let other = format!("\0NCCL version: \0{}\n\0", text("v2.30.7", " compiled with CUDA 13.3"));
        assert_eq!(banner(other.as_bytes()), Some(text("v2.30.7", "")));
        for client in [": ", ">= 2.4.", "2.27.0 or later. Found version: ", "", "2.30+cuda13.3"] {
            assert_eq!(banner(format!("{}\0", text("", client)).as_bytes()), None, "{client}");
        }
    }

    #[test]
    fn files_that_are_damaged_or_no_elf_are_not_read() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let folder = std::env::temp_dir().join(format!("prism-callers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("file");
        for bytes in [&b""[..], b"#!/bin/sh\n", &own[..64], &own[..own.len() / 2]] {
            std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
            assert!(Elf::open(&path).is_err());
        }
        for at in 0..64 {
            let mut bytes = own.clone();
            bytes[at] ^= 0xff;
            std::fs::write(&path, bytes).unwrap();
            if let Ok(elf) = Elf::open(&path) {
                elf.soname();
                elf.nccl_code(&["ncclCommInitRank"]);
                elf.calls_leave(&["ncclCommInitRank"], 0, 0);
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
