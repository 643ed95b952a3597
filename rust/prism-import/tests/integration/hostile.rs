//! Files that are not what they should be, by accident or intent.

use crate::support::Trace;
use prism_import::ImportError;
use prism_import::json::{Elements, Fields, Frame, Frames, MAX_PIECE, integer, microseconds, text};
use prism_import::kineto::event::Names;
use prism_import::kineto::read::read_stream;
use prism_import::kineto::{Options, import};
use proptest::prelude::*;
use std::io::{BufReader, Cursor, Read};
use std::path::Path;

fn error_of(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    std::fs::write(&path, bytes).unwrap();
    import(&[path], &Options::default()).unwrap_err().to_string()
}

#[test]
fn what_is_no_trace_is_an_error_that_says_why() {
    assert!(error_of(b"").contains("it is empty"));
    assert!(error_of(b"hello").contains("an object or a list must be"));
    assert!(error_of(b"{}").contains("no list `traceEvents`"));
    assert!(error_of(b"{\"traceEvents\": []}").contains("no list `traceEvents`"));
    assert!(error_of(b"{\"traceEvents\": [").contains("ends in the middle"));
    assert!(error_of(b"{\"traceEvents\": 5}").contains("no list `traceEvents`"));
    assert!(error_of(&[0x1f, 0x8b, 8, 0, 1, 2]).contains("t.json"));
    assert!(error_of(Trace::of_rank(0, 1).text().as_bytes()).contains("no list `traceEvents`"));
    let idle = Trace::of_rank(0, 1).span("ProfilerStep#1", 0.0, 5.0).text();
    assert!(error_of(idle.as_bytes()).contains("profile with ProfilerActivity.CUDA"));
}

#[test]
fn a_folder_without_traces_and_a_missing_path_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let empty = import(&[folder.path().to_owned()], &Options::default()).unwrap_err();
    assert!(matches!(&empty, ImportError::Unfit(text) if text.contains("no file in")), "{empty}");
    let missing = import(&[folder.path().join("nowhere")], &Options::default()).unwrap_err();
    assert!(matches!(missing, ImportError::Io { .. }));
}

#[test]
fn claims_beyond_all_reason_are_refused() {
    let header = serde_json::json!({"distributedInfo": {"rank": 4_000_000_000_u32, "world_size": 4_100_000_000_u32}});
    let text = Trace::new(&header).kernel("a", 7, (1.0, 10.0, 5.0)).text();
    assert!(error_of(text.as_bytes()).contains("beyond the limit"));
}

/// So many bytes of a stream that repeats one text, never in memory.
struct Repeated {
    head: Cursor<Vec<u8>>,
    text: Vec<u8>,
    at: usize,
    left: u64,
    tail: Cursor<Vec<u8>>,
}

impl Read for Repeated {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.head.read(buffer)?;
        if read > 0 || buffer.is_empty() {
            return Ok(read);
        }
        if self.left == 0 {
            return self.tail.read(buffer);
        }
        let part = &self.text[self.at..];
        let length = part.len().min(buffer.len()).min(usize::try_from(self.left).unwrap_or(usize::MAX));
        buffer[..length].copy_from_slice(&part[..length]);
        self.at = (self.at + length) % self.text.len();
        self.left -= length as u64;
        Ok(length)
    }
}

#[test]
fn events_that_do_not_matter_take_no_memory_and_long_ones_are_passed_over() {
    let call = br#"{"ph":"X","cat":"python_function","name":"f","ts":1,"dur":1,"args":{"Python id":1}},"#.to_vec();
    let repeats = 200_000;
    let kernel = r#"{"ph":"X","cat":"kernel","name":"k","ts":5,"dur":2,"args":{"stream":7}}]}"#;
    let stream = |text: Vec<u8>, times: u64, tail: &str| Repeated {
        head: Cursor::new(br#"{"traceEvents":["#.to_vec()),
        left: text.len() as u64 * times,
        text,
        at: 0,
        tail: Cursor::new(tail.as_bytes().to_vec()),
    };
    let path = Path::new("made up");
    let read = |stream| read_stream(BufReader::new(stream), path, "made up".to_owned(), &mut Names::default()).unwrap();
    let trace = read(stream(call, repeats, kernel));
    assert_eq!((trace.num_events, trace.activities.len(), trace.calls.len()), (repeats + 1, 1, 0));
    // One string of 32 MiB.
    let trace = read(stream(b"x".to_vec(), 2 * MAX_PIECE as u64, &format!("\"}},{kernel}")));
    assert_eq!(trace.activities.len(), 0);
}

#[test]
fn an_oversized_event_is_passed_over_and_told() {
    let mut text = br#"{"traceEvents":[{"ph":"X","cat":"kernel","name":""#.to_vec();
    text.resize(text.len() + MAX_PIECE, b'x');
    text.extend_from_slice(
        br#"","ts":1,"dur":1},{"ph":"X","cat":"kernel","name":"k","ts":5,"dur":2,"args":{"stream":7}}]}"#,
    );
    let trace = read_stream(Cursor::new(text), Path::new("t"), "t".to_owned(), &mut Names::default()).unwrap();
    assert_eq!((trace.activities.len(), trace.notes.count("oversized_pieces")), (1, 1));
}

#[test]
fn times_keep_their_nanoseconds() {
    assert_eq!(microseconds(b"1694128201429795"), Some(1_694_128_201_429_795_000));
    assert_eq!(microseconds(b"1694128201429795.123"), Some(1_694_128_201_429_795_123));
    assert_eq!(microseconds(b"-0.5"), Some(-500));
    assert_eq!(microseconds(b"1e3"), Some(1_000_000));
    assert_eq!(microseconds(b"NaN"), None);
    assert_eq!(microseconds(b"99999999999999999999"), None);
    assert_eq!((integer(b"7"), integer(b"\"7\""), integer(b"7.0"), integer(b"7.5")), (Some(7), Some(7), Some(7), None));
}

#[test]
fn pieces_are_what_a_parser_sees() {
    let value =
        serde_json::json!({"a": [1, {"b": "x,]}\\\" y"}], "c": "é\n", "traceEvents": [1, [2], {"d": {}}], "e": null});
    let written = serde_json::to_vec(&value).unwrap();
    let mut frames = Frames::new(Cursor::new(&written), "traceEvents");
    let (mut members, mut elements) = (Vec::new(), Vec::new());
    while let Some(frame) = frames.next_frame().unwrap() {
        match frame {
            Frame::Member(key, value) => members.push((key.to_vec(), serde_json::from_slice(value).unwrap())),
            Frame::Element(element) => elements.push(serde_json::from_slice::<serde_json::Value>(element).unwrap()),
            Frame::Oversized => unreachable!(),
        }
    }
    assert_eq!(elements, value["traceEvents"].as_array().unwrap().clone());
    for (key, found) in members {
        let found: serde_json::Value = found;
        assert_eq!(found, value[std::str::from_utf8(&key).unwrap()]);
    }
    let fields: Vec<_> = Fields::new(&written).map(|(key, _)| String::from_utf8_lossy(key).into_owned()).collect();
    assert_eq!(fields, ["a", "c", "e", "traceEvents"]);
    assert_eq!(text(br#""a\"b""#).unwrap(), "a\"b");
    assert_eq!(Elements::new(b"[1, [2,3] ,\"x\"]").count(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = read_stream(Cursor::new(bytes), Path::new("t"), String::new(), &mut Names::default());
    }

    #[test]
    fn no_damage_to_a_trace_makes_the_importer_panic(at in 0..4000_usize, byte in any::<u8>(), cut in 0..4000_usize) {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..2 {
            let told = Trace::metadata("allreduce", 1024, &[0, 1]);
            let mut trace = Trace::of_rank(rank, 2);
            trace
                .span("ProfilerStep#1", 0.0, 90.0)
                .kernel("gemm", 7, (1.0, 10.0, 4.0))
                .call("cudaStreamWaitEvent", 12.0, 1.0)
                .kernel_with("ncclDevKernel_AllReduce(x)", 20, (14.0, 20.0, 30.0), &told)
                .call("cudaStreamSynchronize", 30.0, 25.0)
                .kernel("relu", 7, (60.0, 70.0, 4.0));
            let mut text = trace.text().into_bytes();
            if rank == 0 {
                let length = text.len();
                text[at % length] = byte;
                text.truncate(if cut < 500 { cut * 4 } else { length });
            }
            std::fs::write(folder.path().join(format!("rank{rank}.json")), text).unwrap();
        }
        if let Ok(imported) = import(&[folder.path().to_owned()], &Options::default()) {
            let counts = imported.summary.collectives;
            prop_assert_eq!(counts.kernels, counts.used_kernels + counts.unmatched);
        }
    }
}
