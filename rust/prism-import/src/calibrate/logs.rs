//! Measured times of collectives: output of nccl-tests, records of NCCL's Inspector, look-up tables.

use crate::ImportError;
use crate::input::read_small;
use crate::kineto::event::CommKind;
use crate::kineto::read::kind_of_call;
use crate::notes::Notes;
use prism_engine::graph::op::CollectiveKind;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Largest file.
const MAX_BYTES: u64 = 256 << 20;
/// Largest communicator that is believed.
const MAX_RANKS: u64 = 1 << 20;

/// The Inspector's metric of how long collectives took on average, in Prometheus' text form.
const PROMETHEUS_TIME: &str = "nccl_collective_exec_time_microseconds{";

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Number of the file it is from.
    pub file: u32,
    /// Which collective.
    pub kind: CollectiveKind,
    /// Whole buffer, bytes.
    pub bytes: u64,
    /// Members.
    pub ranks: u32,
    /// Nodes they are spread over.
    pub nodes: u32,
    /// Time, ns.
    pub time_ns: f64,
}

/// What the caller knows that a file may not tell.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints {
    /// Which collective.
    pub kind: Option<CollectiveKind>,
    /// Members.
    pub ranks: Option<u32>,
    /// Nodes.
    pub nodes: Option<u32>,
}

/// The measurements in a file of any of the forms. Lines that are none are passed over; those that are damaged are noted.
///
/// # Errors
/// The file cannot be read, has no measurement, or does not tell collective or ranks.
pub fn read(path: &Path, file: u32, hints: &Hints, notes: &mut Notes) -> Result<Vec<Row>, ImportError> {
    let bytes = read_small(path, MAX_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut rows = match text.trim_start().chars().next() {
        Some('{') => inspector(&text, file, &name, notes),
        Some('n' | '#') if text.lines().any(|line| line.starts_with(PROMETHEUS_TIME)) => {
            prometheus(&text, file, &name, notes)
        }
        Some('s') if text.starts_with("size(B)") => table(&text, file, &name, hints, notes)?,
        _ => nccl_tests(&text, file, &name, hints, notes)?,
    };
    rows.retain(|row| row.bytes > 0 && row.time_ns > 0.0 && row.time_ns.is_finite() && row.ranks > 1);
    if rows.is_empty() {
        return Err(ImportError::unfit(format!(
            "{name} has no measurement: it must be output of nccl-tests, JSON or Prometheus text of NCCL's Inspector, or a table that begins with size(B)"
        )));
    }
    Ok(rows)
}

fn collective(name: &str) -> Option<CollectiveKind> {
    match kind_of_call(name)? {
        CommKind::Collective(kind) => Some(kind),
        CommKind::Send | CommKind::Receive => None,
    }
}

/// The collective in a file's name; `AR` stands for all-reduce.
fn collective_of_file(name: &str) -> Option<CollectiveKind> {
    let parts: Vec<&str> = name.split(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    collective(name).or_else(|| parts.contains(&"AR").then_some(CollectiveKind::AllReduce))
}

fn nccl_tests(text: &str, file: u32, name: &str, hints: &Hints, notes: &mut Notes) -> Result<Vec<Row>, ImportError> {
    let mut kind = hints.kind;
    let (mut ranks, mut hosts) = (0_u32, BTreeSet::new());
    let mut columns: Vec<usize> = Vec::new();
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix('#') {
            let words: Vec<&str> = comment.split_whitespace().collect();
            if words.first() == Some(&"Rank") && words.contains(&"on") {
                ranks += 1;
                hosts.extend(words.iter().skip_while(|word| **word != "on").nth(1).map(|host| (*host).to_owned()));
            } else if words.first() == Some(&"size") {
                columns = words.iter().enumerate().filter(|(_, word)| **word == "time").map(|(at, _)| at).collect();
            } else if kind.is_none() && comment.contains("test starting") {
                kind = words.last().and_then(|test| collective(test));
            }
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(bytes) = words.first().and_then(|word| word.parse::<u64>().ok()) else { continue };
        let times = columns.iter().filter_map(|at| words.get(*at).and_then(|time| time.parse::<f64>().ok()));
        let times: Vec<f64> = times.collect();
        if times.is_empty() {
            notes.add("unreadable_lines", || format!("{name}: line {}", number + 1));
        }
        found.extend(times.into_iter().map(|time| (bytes, time * 1000.0)));
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let kind = kind.or_else(|| collective_of_file(name)).ok_or_else(|| {
        ImportError::unfit(format!("{name} does not tell which collective it measured: name it with --collective"))
    })?;
    let ranks = hints.ranks.or(Some(ranks).filter(|ranks| *ranks > 0)).ok_or_else(|| {
        ImportError::unfit(format!("{name} does not list its ranks (# Rank ...): name their number with --ranks"))
    })?;
    let nodes = hints.nodes.unwrap_or_else(|| (hosts.len() as u32).max(1));
    Ok(found.into_iter().map(|(bytes, time_ns)| Row { file, kind, bytes, ranks, nodes, time_ns }).collect())
}

/// `size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)`; the file's name says how many GPUs (`AR_GPU4`).
fn table(text: &str, file: u32, name: &str, hints: &Hints, notes: &mut Notes) -> Result<Vec<Row>, ImportError> {
    let kind = hints.kind.or_else(|| collective_of_file(name));
    let kind = kind.ok_or_else(|| ImportError::unfit(format!("{name}: name the collective with --collective")))?;
    let told = name.split(['_', '.', '-']).find_map(|part| part.strip_prefix("GPU")?.parse().ok());
    let ranks = hints.ranks.or(told).ok_or_else(|| {
        ImportError::unfit(format!("{name} does not tell its number of GPUs (GPU4 in its name): name it with --ranks"))
    })?;
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let columns: Vec<usize> =
        header.iter().enumerate().filter(|(_, word)| **word == "time(ns)").map(|(at, _)| at).collect();
    let mut rows = Vec::new();
    for (number, line) in lines.enumerate() {
        let words: Vec<&str> = line.split(',').map(str::trim).collect();
        let bytes = words[0].parse::<u64>().ok();
        for at in &columns {
            match (bytes, words.get(*at).and_then(|time| time.parse::<f64>().ok())) {
                (Some(bytes), Some(time_ns)) => {
                    rows.push(Row { file, kind, bytes, ranks, nodes: hints.nodes.unwrap_or(1), time_ns });
                }
                _ if line.trim().is_empty() => {}
                _ => notes.add("unreadable_lines", || format!("{name}: line {}", number + 2)),
            }
        }
    }
    Ok(rows)
}

/// Objects one after the other, each with `header` and `coll_perf`.
fn inspector(text: &str, file: u32, name: &str, notes: &mut Notes) -> Vec<Row> {
    let mut rows = Vec::new();
    for record in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let Ok(record) = record else {
            notes.add("unreadable_lines", || format!("{name}: the rest after record {} is no JSON", rows.len()));
            break;
        };
        let number = |part: &str, field: &str| record.get(part)?.get(field)?.as_u64();
        let time = record.get("coll_perf").and_then(|perf| perf.get("coll_exec_time_us")).and_then(Value::as_f64);
        let kind =
            record.get("coll_perf").and_then(|perf| perf.get("coll")).and_then(Value::as_str).and_then(collective);
        let ranks = number("header", "n_ranks").filter(|ranks| *ranks <= MAX_RANKS);
        let (Some(kind), Some(time), Some(ranks), Some(bytes)) =
            (kind, time, ranks, number("coll_perf", "coll_msg_size_bytes"))
        else {
            notes.add("unreadable_lines", || format!("{name}: record {} has no collective", rows.len() + 1));
            continue;
        };
        // The Inspector tells a rank's share of what is gathered or scattered.
        let whole = match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => bytes.saturating_mul(ranks),
            _ => bytes,
        };
        let nodes = number("header", "nnodes").unwrap_or(1).clamp(1, ranks.max(1)) as u32;
        rows.push(Row { file, kind, bytes: whole, ranks: ranks as u32, nodes, time_ns: time * 1000.0 });
    }
    rows
}

/// Prometheus text: a line per communicator, collective and range of sizes. A range stands for its middle.
fn prometheus(text: &str, file: u32, name: &str, notes: &mut Notes) -> Vec<Row> {
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate() {
        // Times of messages and bandwidths are other metrics; a bandwidth says the same again.
        let Some(rest) = line.trim().strip_prefix(PROMETHEUS_TIME) else { continue };
        match prometheus_row(rest, file) {
            Some((row, is_range)) => {
                if is_range {
                    notes.add("sizes_from_ranges", || format!("{name}: line {}: {} bytes", number + 1, row.bytes));
                }
                rows.push(row);
            }
            None => notes.add("unreadable_lines", || format!("{name}: line {}", number + 1)),
        }
    }
    rows
}

/// `label="value",...} number`, and whether its size is the middle of a range.
fn prometheus_row(rest: &str, file: u32) -> Option<(Row, bool)> {
    let (labels, value) = rest.rsplit_once('}')?;
    let label = |wanted: &str| {
        labels.split("\",").find_map(|pair| {
            let (key, value) = pair.split_once("=\"")?;
            (key.trim() == wanted).then(|| value.trim_end_matches('"'))
        })
    };
    let time_ns = value.split_whitespace().next()?.parse::<f64>().ok()? * 1000.0;
    let kind = collective(label("collective")?)?;
    let ranks = label("nranks")?.parse::<u64>().ok().filter(|ranks| *ranks <= MAX_RANKS)?;
    let nodes = label("n_nodes").and_then(|nodes| nodes.parse::<u64>().ok()).unwrap_or(1).clamp(1, ranks.max(1));
    let (bytes, is_range) = size_of(label("message_size")?)?;
    let whole = match kind {
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => bytes.checked_mul(ranks)?,
        _ => bytes,
    };
    Some((Row { file, kind, bytes: whole, ranks: ranks as u32, nodes: nodes as u32, time_ns }, is_range))
}

/// `4-5GB` or `512B`, in powers of 1024 as the Inspector cuts them: bytes, the middle of a range.
fn size_of(text: &str) -> Option<(u64, bool)> {
    let digits = text.find(|letter: char| letter.is_ascii_alphabetic())?;
    let unit: u64 = match &text[digits..] {
        "B" => 1,
        "KB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        "TB" => 1 << 40,
        _ => return None,
    };
    let Some((low, high)) = text[..digits].split_once('-') else {
        return Some((text[..digits].parse::<u64>().ok()?.checked_mul(unit)?, false));
    };
    let (low, high) = (low.parse::<u64>().ok()?.checked_mul(unit)?, high.parse::<u64>().ok()?.checked_mul(unit)?);
    (low <= high).then_some((low + (high - low) / 2, true))
}
