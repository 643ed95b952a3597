//! A profiler inside the program asks when its ops ran.

use super::player::{Played, Player, record};
use super::stage::{Stage, program};
use prism_wire::control::TIMELINE_ENTRY_BYTES;
use prism_wire::frame::Request;
use prism_wire::message::{CollectiveKind, RecordKind};
use std::sync::{Arc, Mutex};

/// Correlation, start and end in ns.
type Entry = (u64, i64, i64);

fn timeline(player: &mut Player) -> Played<Vec<Entry>> {
    let answer = player.request(&Request::Timeline)?;
    let (left, entries) = answer.split_first_chunk::<8>().expect("how many are left");
    assert_eq!(u64::from_le_bytes(*left), 0, "all of it fits one answer");
    let number = |entry: &[u8], at: usize| i64::from_le_bytes(entry[at..at + 8].try_into().expect("eight bytes"));
    let entry = |entry: &[u8]| (number(entry, 0) as u64, number(entry, 8), number(entry, 16));
    Ok(entries.chunks_exact(TIMELINE_ENTRY_BYTES).map(entry).collect())
}

/// A fill of so many bytes, followed under this id (0: not).
fn fill(player: &mut Player, stream: u32, bytes: u64, correlation: u32) -> Played {
    let mut fill = record(RecordKind::Memset);
    (fill.stream, fill.a) = (stream, bytes);
    fill.correlate(RecordKind::Memset, correlation);
    player.append(fill, 1_000)
}

#[test]
fn ops_with_an_id_are_told_once_they_are_over() {
    const BYTES: u64 = 1 << 30;
    let told = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&told);
    let stage = Stage::collect(2, &[0]);
    let (summary, outcomes) = stage.run(&program(move |player| {
        player.group("", 0..player.world)?;
        let world = player.comm("")?;
        fill(player, 0, BYTES, 0)?;
        fill(player, 0, BYTES, 7)?;
        fill(player, 1, BYTES, 8)?;
        let mut reduce = record(RecordKind::Collective);
        (reduce.stream, reduce.a, reduce.e) = (0, 1 << 20, world.0);
        reduce.f = CollectiveKind::AllReduce as u32 | 7 << 8;
        reduce.correlate(RecordKind::Collective, 9);
        player.append(reduce, 1_000)?;
        player.sync_device()?;
        let mut kept = kept.lock().expect("no thread has failed");
        kept.push(timeline(player)?);
        fill(player, 0, BYTES, 0)?;
        player.sync_device()?;
        kept.push(timeline(player)?);
        fill(player, 0, BYTES, 10)?;
        player.sync_device()?;
        kept.push(timeline(player)?);
        Ok(())
    }));
    assert_eq!((summary.failed, outcomes[&0].is_ok()), (None, true));
    let told = told.lock().expect("no thread has failed");
    let [first, second, third] = &told[..] else { panic!("{told:?}") };
    let ids: Vec<u64> = first.iter().map(|(id, ..)| *id).collect();
    assert_eq!(ids, [7, 8, 9]);
    let duration = |(_, start, end): &Entry| end - start;
    assert_eq!(duration(&first[0]), duration(&first[1]), "equal fills");
    assert!(first[0].1 >= duration(&first[0]), "after the fill that nobody follows");
    assert!(first[1].1 < first[0].1, "its stream was free");
    assert_eq!(first[2].1, first[0].2, "the collective comes when its stream has got there");
    assert!(second.is_empty(), "{second:?}");
    assert_eq!((third.len(), third[0].0), (1, 10));
    // Start and end are whole nanoseconds of picoseconds.
    assert!((duration(&third[0]) - duration(&first[0])).abs() <= 1, "{third:?} {first:?}");
}
