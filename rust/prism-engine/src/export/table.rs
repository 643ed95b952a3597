//! A timeline as a table of comma-separated values: one line per slice, for data frames.

use crate::export::timeline::{Detail, Timeline, Track};
use crate::graph::op::ComputeClass;
use std::io::{self, Write};

/// The columns. Times are ns from the start of the job; `stream` is empty where the host waits; the last three are empty but
/// for communication.
pub const COLUMNS: &str = "rank,stream,kind,name,start_ns,end_ns,duration_ns,comm,members,bytes";

/// Writes the slices of a timeline, by rank, track and start.
pub fn write(timeline: &Timeline, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{COLUMNS}")?;
    for slice in &timeline.slices {
        let stream = match slice.track {
            Track::Host => String::new(),
            Track::Stream(stream) => stream.to_string(),
        };
        let (kind, comm) = match &slice.detail {
            Detail::Compute(class) => (class_name(*class), ",,".to_owned()),
            Detail::Communication { comm, members, bytes } => ("communication", format!("{comm},{members},{bytes}")),
            Detail::Wait => ("wait", ",,".to_owned()),
        };
        let (start, end) = (slice.start.as_ns(), slice.end.as_ns());
        let name = quoted(timeline.name(slice.name));
        writeln!(out, "{},{stream},{kind},{name},{start},{end},{},{comm}", slice.rank, end - start)?;
    }
    Ok(())
}

fn class_name(class: ComputeClass) -> &'static str {
    match class {
        ComputeClass::Kernel => "kernel",
        ComputeClass::Gemm => "gemm",
        ComputeClass::Operator => "operator",
        ComputeClass::Memcpy => "memcpy",
        ComputeClass::Memset => "memset",
        ComputeClass::Wait => "wait",
    }
}

/// Quoted where it must be (RFC 4180); line breaks become blanks.
fn quoted(text: &str) -> String {
    let plain = text.replace(['\n', '\r'], " ");
    if plain.contains([',', '"']) { format!("\"{}\"", plain.replace('"', "\"\"")) } else { plain }
}
