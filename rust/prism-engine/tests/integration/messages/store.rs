//! The stored form: the same program comes back, and nothing else is taken for one.

use super::programs::{Kinds, programs};
use super::workloads::Step;
use prism_engine::messages::loggops::{LogGops, evaluate};
use prism_engine::messages::{FileKind, MessageProgram, file_kind, goal};
use proptest::prelude::*;
use std::fs;
use tempfile::tempdir;

const TEXT: &str = "num_ranks 2\nrank 0 {\nl1: calc 9000000000\nl2: send 5b to 1 tag 3 cpu 1 nic 2\nl2 requires l1\n\
                    l3: calc 1\nl3 irequires l2\nl3 requires l1\n}\nrank 1 {\nl1: recv 5b from -1 tag 3\n}\n";

fn stored(program: &MessageProgram) -> Vec<u8> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.prism");
    let told = program.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!((told, program.stored_bytes()), (bytes.len() as u64, bytes.len() as u64));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");
    bytes
}

fn open(bytes: &[u8]) -> Result<MessageProgram, String> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.prism");
    fs::write(&path, bytes).unwrap();
    MessageProgram::open(&path).map_err(|error| error.to_string())
}

/// Puts the checksums right after a change, as whoever wants to fool the reader would.
fn seal(bytes: &mut [u8]) {
    for entry in (64..64 + 6 * 32).step_by(32) {
        let at = |from: usize| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap()) as usize;
        let (offset, len) = (at(entry + 8), at(entry + 16));
        if let Some(section) = bytes.get(offset..offset.saturating_add(len)) {
            let crc = crc32(section);
            bytes[entry + 24..entry + 28].copy_from_slice(&crc.to_le_bytes());
        }
    }
    let table = crc32(&bytes[64..64 + 6 * 32]);
    bytes[36..40].copy_from_slice(&table.to_le_bytes());
    let header = crc32(&bytes[..60]);
    bytes[60..64].copy_from_slice(&header.to_le_bytes());
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 0 { crc >> 1 } else { (crc >> 1) ^ 0xedb8_8320 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[test]
fn the_kind_of_a_file_is_told_by_its_content() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a file");
    let kind = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        file_kind(&path).unwrap()
    };
    assert_eq!(kind(TEXT.as_bytes()), Some(FileKind::Goal));
    assert_eq!(kind(&stored(&goal::read(TEXT.as_bytes()).unwrap())), Some(FileKind::Stored));
    assert_eq!(kind(b""), None);
    assert_eq!(kind(b"PRISMGR\x1a"), None);
    assert!(file_kind(folder.path()).is_err(), "a folder");
    assert!(file_kind(&folder.path().join("none")).is_err());
}

#[test]
fn a_stored_step_evaluates_the_same() {
    let program = Step::measured(1).program();
    let opened = open(&stored(&program)).unwrap();
    assert!(opened == program);
    let (first, second) = (evaluate(&program, &LogGops::LOGGOPSIM), evaluate(&opened, &LogGops::LOGGOPSIM));
    assert_eq!(first, second);
    assert_eq!((opened.num_ops(), opened.num_ranks(), opened.num_cpus()), (program.num_ops(), 64, 1));
    assert!(opened.stored_bytes() < 17 * opened.num_ops(), "16 bytes an op");
}

#[test]
fn any_flipped_bit_and_any_cut_is_found() {
    let bytes = stored(&goal::read(TEXT.as_bytes()).unwrap());
    for bit in 0..8 * bytes.len() {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(open(&bad).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(open(&bytes[..len]).is_err(), "{len} bytes");
    }
    let mut longer = bytes;
    longer.extend([0; 8]);
    assert!(open(&longer).is_err());
}

#[test]
fn a_sealed_lie_is_found_or_is_a_program() {
    let bytes = stored(&goal::read(TEXT.as_bytes()).unwrap());
    let (mut refused, mut taken) = (0, 0);
    for at in 64 + 6 * 32..bytes.len() {
        for byte in [0, 1, 2, 0x7f, 0x80, 0xff] {
            let mut bad = bytes.clone();
            bad[at] = byte;
            seal(&mut bad);
            match open(&bad) {
                Err(_) => refused += 1,
                Ok(program) => {
                    taken += 1;
                    let _ = evaluate(&program, &LogGops::LOGGOPSIM);
                    let mut text = Vec::new();
                    goal::write(&program, &mut text).unwrap();
                    assert!(goal::read(&text[..]).is_ok(), "byte {at} = {byte}: {}", String::from_utf8_lossy(&text));
                }
            }
        }
    }
    assert!(refused > 500 && taken > 100, "{refused} refused, {taken} taken");
}

#[test]
fn lies_are_named_with_rank_and_op() {
    let program = goal::read(TEXT.as_bytes()).unwrap();
    let bytes = stored(&program);
    let ops = 64 + 6 * 32;
    let change = |at: usize, value: u32| {
        let mut bad = bytes.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        seal(&mut bad);
        open(&bad).unwrap_err()
    };
    let word = |op: usize, word: usize| ops + 16 * op + 4 * word;
    assert!(change(word(1, 1), 2).contains("(rank 0, op 1): it sends to a rank outside the job"));
    assert!(change(word(0, 0), 7).contains("(rank 0, op 0): its value is beyond the table of wide values"));
    assert!(change(word(0, 1), 1).contains("(rank 0, op 0): a calculation with what only messages have"));
    assert!(change(word(1, 2), u32::MAX).contains("(rank 0, op 1): a send needs a tag"));
    assert!(
        change(word(3, 3), 2 << 16 | 1 << 24).contains("(rank 1, op 0): an op beyond the rank's last depends on it")
    );
    assert!(change(word(3, 3), 3 << 16).contains("(rank 1, op 0): an unknown kind of op"));
    assert!(change(word(3, 3), 2 << 16 | 1 << 21).contains("(rank 1, op 0): its number of dependencies"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_stored_program_opens_the_same(program in programs(Kinds { lanes: 3, wildcards: true })) {
        prop_assert!(open(&stored(&program)).unwrap() == program);
    }
}
