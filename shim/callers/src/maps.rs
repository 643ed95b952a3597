//! The files that are mapped with executable code, in whatever namespace of the loader.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A mapped program or library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    /// Device (as the kernel prints it, one number) and inode.
    pub(crate) id: (u64, u64),
    /// The file.
    pub(crate) path: PathBuf,
    /// Lowest address at which a part of the file is mapped.
    pub(crate) start: u64,
    /// Offset in the file of what is mapped there.
    pub(crate) offset: u64,
}

/// One line of `/proc/self/maps`.
struct Line<'a> {
    start: u64,
    is_executable: bool,
    offset: u64,
    id: (u64, u64),
    path: &'a [u8],
}

/// All objects of the process with executable code, in the order of their files' device and inode.
pub(crate) fn objects() -> Vec<Object> {
    parse(&std::fs::read("/proc/self/maps").unwrap_or_default())
}

fn parse(maps: &[u8]) -> Vec<Object> {
    let mut found: BTreeMap<(u64, u64), (Object, bool)> = BTreeMap::new();
    for line in maps.split(|byte| *byte == b'\n').filter_map(parse_line) {
        let (object, is_code) = found.entry(line.id).or_insert_with(|| {
            let path = PathBuf::from(OsStr::from_bytes(line.path));
            (Object { id: line.id, path, start: line.start, offset: line.offset }, false)
        });
        if line.start < object.start {
            (object.start, object.offset) = (line.start, line.offset);
        }
        *is_code |= line.is_executable;
    }
    found.into_values().filter(|(_, is_code)| *is_code).map(|(object, _)| object).collect()
}

/// `start-end perms offset major:minor inode   path`, of lines with a file.
fn parse_line(line: &[u8]) -> Option<Line<'_>> {
    let mut rest = line;
    let mut field = || {
        let begin = rest.iter().position(|byte| *byte != b' ')?;
        let end = rest[begin..].iter().position(|byte| *byte == b' ').map_or(rest.len(), |length| begin + length);
        let field = &rest[begin..end];
        rest = &rest[end..];
        Some(field)
    };
    let (range, permissions, offset, device, inode) = (field()?, field()?, field()?, field()?, field()?);
    let start = hex(range.split(|byte| *byte == b'-').next()?)?;
    let mut device = device.split(|byte| *byte == b':').map(hex);
    let device = device.next()?? << 32 | device.next()??;
    let path = &rest[rest.iter().position(|byte| *byte != b' ')?..];
    let id = (device, std::str::from_utf8(inode).ok()?.parse().ok()?);
    let is_file = path.first() == Some(&b'/');
    is_file.then_some(Line { start, is_executable: permissions.get(2) == Some(&b'x'), offset: hex(offset)?, id, path })
}

fn hex(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::path::Path;

    #[test]
    fn objects_are_files_with_code() {
        let maps = b"\
7f0000003000-7f0000004000 r-xp 00002000 08:01 42                         /opt/a b/libx.so\n\
7f0000001000-7f0000003000 r--p 00000000 08:01 42                         /opt/a b/libx.so\n\
7f0000005000-7f0000006000 r--p 00000000 08:01 43                         /opt/data.bin\n\
7f0000006000-7f0000007000 r-xp 00000000 00:00 0 \n\
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                          [vdso]\n\
nonsense\n";
        let objects = parse(maps);
        assert_eq!(objects.len(), 1);
        assert_eq!(objects[0].path, Path::new("/opt/a b/libx.so"));
        assert_eq!((objects[0].start, objects[0].offset), (0x7f00_0000_1000, 0));
        assert_eq!(objects[0].id, (8 << 32 | 1, 42));
    }
}
