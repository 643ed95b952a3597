//! Parameters of the kernels of whole libraries, kept in a file.
//!
//! Reading the fat binaries of PyTorch's largest library takes seconds, so it is done once for each build of a library
//! and kept in `PRISM_CACHE_DIR`. Without that folder only the fat binary of the kernel that is asked for is read.

use super::fatbin::{self, Kernels, Parameter};
use crate::kernel;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// First bytes of a file; the number is the layout's version.
const MAGIC: &[u8; 8] = b"PRISMKP1";
/// Set by the launcher.
const ENV_CACHE: &str = "PRISM_CACHE_DIR";
/// Entry in the index: hash of the name, position of the parameters.
const ENTRY: usize = 12;

/// The table of one library: names are kept as hashes, sorted.
pub(super) struct Table(Vec<u8>);

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

impl Table {
    /// Bytes of the file: magic, check sum of the rest, number of kernels, index, parameters (each distinct list once).
    fn encode(kernels: &Kernels) -> Self {
        let index: BTreeMap<u64, &Vec<Parameter>> =
            kernels.iter().map(|(name, parameters)| (hash(name.as_bytes()), parameters)).collect();
        let mut places: BTreeMap<&Vec<Parameter>, u32> = BTreeMap::new();
        let (mut entries, mut lists) = (Vec::new(), Vec::new());
        for (hash, parameters) in &index {
            let place = *places.entry(parameters).or_insert_with(|| {
                let place = lists.len() as u32;
                lists.extend((parameters.len() as u32).to_le_bytes());
                for parameter in *parameters {
                    lists.extend(parameter.offset.to_le_bytes());
                    lists.extend(parameter.bytes.to_le_bytes());
                }
                place
            });
            entries.extend(hash.to_le_bytes());
            entries.extend(place.to_le_bytes());
        }
        let mut body = (index.len() as u32).to_le_bytes().to_vec();
        body.extend(entries);
        body.extend(lists);
        let mut file = MAGIC.to_vec();
        file.extend(hash(&body).to_le_bytes());
        file.extend(body);
        Self(file)
    }

    /// A table from a file; `None` if it is damaged or of another version.
    fn decode(file: Vec<u8>) -> Option<Self> {
        let sum = u64::from_le_bytes(file.get(8..16)?.try_into().ok()?);
        (file.starts_with(MAGIC) && hash(&file[16..]) == sum).then_some(Self(file))
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.0.get(at..at + 4)?.try_into().ok()?))
    }

    /// Parameters of a kernel.
    fn get(&self, name: &str) -> Option<Vec<Parameter>> {
        let count = self.u32_at(16)? as usize;
        let entries = self.0.get(20..20 + count * ENTRY)?;
        let entry = |index: usize| entries[index * ENTRY..].first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
        let wanted = hash(name.as_bytes());
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = usize::midpoint(low, high);
            if entry(middle)? < wanted { low = middle + 1 } else { high = middle }
        }
        if low == count || entry(low)? != wanted {
            return None;
        }
        let lists = 20 + count * ENTRY;
        let at = lists + self.u32_at(20 + low * ENTRY + 8)? as usize;
        let length = self.u32_at(at)? as usize;
        let parameter = |index: usize| {
            let at = at + 4 + index * 8;
            Some(Parameter { offset: self.u32_at(at)?, bytes: self.u32_at(at + 4)? })
        };
        (0..length).map(parameter).collect()
    }
}

/// Tables by the address where the library starts; none where no file can be kept.
static TABLES: Mutex<BTreeMap<usize, Option<Arc<Table>>>> = Mutex::new(BTreeMap::new());

/// Parameters of a registered kernel; `None` if they cannot be found out.
pub(super) fn parameters(image: usize, name: &str) -> Option<Vec<Parameter>> {
    if let Some((base, path)) = library(image)
        && let Some(table) = table(base, &path)
    {
        return table.get(name);
    }
    // SAFETY: a fat binary that is registered.
    let image = unsafe { fatbin::image(image as *const u8) }?;
    fatbin::kernels(image, &[name]).remove(name)
}

/// Start and file of the library that an address lies in.
fn library(address: usize) -> Option<(usize, PathBuf)> {
    // SAFETY: zeros are a value of this struct of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the result lives on this stack frame.
    if unsafe { libc::dladdr(address as *const c_void, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr's names are C strings of loaded libraries.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_str().ok()?;
    Some((info.dli_fbase as usize, PathBuf::from(path)))
}

fn table(base: usize, path: &Path) -> Option<Arc<Table>> {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    tables.entry(base).or_insert_with(|| open(base, path).map(Arc::new)).clone()
}

/// The library's table from its file, which is made if there is none.
fn open(base: usize, path: &Path) -> Option<Table> {
    let folder = PathBuf::from(std::env::var_os(ENV_CACHE).filter(|folder| !folder.is_empty())?);
    let meta = fs::metadata(path).ok()?;
    let name = path.file_name()?.to_string_lossy().into_owned();
    let build = format!("{}|{}|{}|{}", path.display(), meta.size(), meta.mtime(), meta.mtime_nsec());
    let file = folder.join(format!("{name}-{:016x}.kernels", hash(build.as_bytes())));
    if let Some(table) = fs::read(&file).ok().and_then(Table::decode) {
        return Some(table);
    }
    fs::create_dir_all(&folder).ok()?;
    let table = Table::encode(&read_library(base));
    // Other ranks may be at the same: each writes its own file, and the last one stays.
    let draft = folder.join(format!("{name}-{}.draft", std::process::id()));
    fs::write(&draft, &table.0).ok()?;
    fs::rename(&draft, &file).ok()?;
    Some(table)
}

/// Kernels of all fat binaries that are registered by the library at `base`.
fn read_library(base: usize) -> Kernels {
    let mut found = Kernels::new();
    for (address, names) in kernel::registered() {
        if library(address).is_none_or(|(other, _)| other != base) {
            continue;
        }
        // SAFETY: a fat binary that is registered.
        if let Some(image) = unsafe { fatbin::image(address as *const u8) } {
            let wanted: Vec<&str> = names.iter().map(String::as_str).collect();
            found.extend(fatbin::kernels(image, &wanted));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let list = |sizes: &[u32]| -> Vec<Parameter> {
            sizes.iter().map(|bytes| Parameter { offset: 8, bytes: *bytes }).collect()
        };
        let kernels: Kernels = (0..50)
            .map(|index| (format!("kernel_{index}"), list(&[index % 3, 4][..(index % 2 + 1) as usize])))
            .collect();
        let table = Table::encode(&kernels);
        for (name, parameters) in &kernels {
            assert_eq!(table.get(name).as_ref(), Some(parameters));
        }
        assert_eq!(table.get("other"), None);
        assert!(Table::decode(table.0.clone()).is_some());
        for at in 0..table.0.len() {
            let mut damaged = table.0.clone();
            damaged[at] ^= 1;
            assert!(Table::decode(damaged).is_none());
        }
        assert!(Table::decode(table.0[..12].to_vec()).is_none());
    }
}
