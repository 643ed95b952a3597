//! Files: found, unpacked, read as a stream.

use crate::ImportError;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes read at a time.
const CHUNK: usize = 1 << 18;
/// Most files of one import.
pub const MAX_FILES: usize = 1 << 20;

/// The file's content, unpacked if it is gzipped (told by its first bytes).
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, ImportError> {
    open_counted(path, None)
}

/// A file, and how much of it has been read.
struct Counted {
    file: File,
    read: Option<Arc<AtomicU64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.file.read(buffer)?;
        if let Some(read) = &self.read {
            read.fetch_add(length as u64, Ordering::Relaxed);
        }
        Ok(length)
    }
}

/// The same; the bytes read of the file as it is are added to `read`.
pub fn open_counted(path: &Path, read: Option<Arc<AtomicU64>>) -> Result<Box<dyn BufRead>, ImportError> {
    let io = |source| ImportError::Io { path: path.to_owned(), source };
    let mut plain = BufReader::with_capacity(CHUNK, Counted { file: File::open(path).map_err(io)?, read });
    let is_gzip = plain.fill_buf().map_err(io)?.starts_with(&[0x1f, 0x8b]);
    Ok(if is_gzip { Box::new(BufReader::with_capacity(CHUNK, MultiGzDecoder::new(plain))) } else { Box::new(plain) })
}

/// The files themselves, and of every folder the files (not those of folders in it) whose names end in one of `endings`, by
/// name. An error names a path that does not exist, and says so if nothing is left.
pub fn find(paths: &[PathBuf], endings: &[&str]) -> Result<Vec<PathBuf>, ImportError> {
    let mut found = Vec::new();
    for path in paths {
        let io = |source| ImportError::Io { path: path.clone(), source };
        if !std::fs::metadata(path).map_err(io)?.is_dir() {
            found.push(path.clone());
            continue;
        }
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(path).map_err(io)? {
            let entry = entry.map_err(io)?.path();
            let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if entry.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
                inside.push(entry);
            }
            if inside.len() > MAX_FILES {
                return Err(ImportError::unfit(format!("{} has more than {MAX_FILES} files", path.display())));
            }
        }
        inside.sort();
        found.extend(inside);
    }
    if found.is_empty() {
        let names = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(ImportError::unfit(format!("no file in {names} ends in {}", endings.join(" or "))));
    }
    Ok(found)
}

/// At most `limit` bytes of a file, unpacked. For forms that are small by nature.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, ImportError> {
    let mut bytes = Vec::new();
    let read = open(path)?.take(limit + 1).read_to_end(&mut bytes);
    read.map_err(|source| ImportError::Io { path: path.to_owned(), source })?;
    if bytes.len() as u64 > limit {
        let limit = limit >> 20;
        return Err(ImportError::unfit(format!(
            "{} is larger than {limit} MiB, the most for its form",
            path.display()
        )));
    }
    Ok(bytes)
}
