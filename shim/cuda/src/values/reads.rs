//! What the host reads from the device: graded, counted by place, replaced or refused by rules.
//!
//! Rules (`PRISM_VALUE_RULES`) are lines of fields with tabs between them; the first that fits applies:
//!
//! ```text
//! allow <TAB> WRITER <TAB> PLACE
//! stop  <TAB> WRITER <TAB> PLACE
//! value <TAB> WRITER <TAB> PLACE <TAB> NAME <TAB> TYPE <TAB> NUMBER,NUMBER,...
//! ```
//!
//! WRITER and PLACE are patterns with `*` for any text: of the kernel that wrote last, and of `file:line` of the Python
//! code that reads. A value rule gives one number for each reading in turn, the last one for all further ones.

use super::known::{self, Grade};
use super::{MODE, Mode, is_on};
use crate::{python, real, session};
use prism_wire::control::ControlKind;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// How notes about values begin; the rest are fields with tabs between them.
const NOTE: &str = "value";
/// Exit code of a program that a strict run has ended.
const EXIT_UNKNOWN_VALUE: i32 = 96;
/// Larger unknown reads (checkpoints, logits) steer nothing: a strict run lets them pass.
const STRICT_BYTES: usize = 64 << 10;
/// Places told apart; more are counted together.
const MOST_PLACES: usize = 256;
/// Reads between two reports.
const REPORT_EVERY: u64 = 4_096;

thread_local! {
    /// What the next small reads of this thread find: the number of results that an operator is about to ask for.
    static SCRIPT: Cell<Option<i64>> = const { Cell::new(None) };
}

/// What happens at an unknown read.
#[derive(Clone, Debug, PartialEq)]
enum Policy {
    Allow,
    Stop,
    Value { name: String, number: Number, values: Vec<f64>, next: usize },
}

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    writer: String,
    place: String,
    policy: Policy,
}

/// Type of a value that a rule gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Float32,
    Float64,
    Int32,
    Int64,
    Byte,
}

impl Number {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "float32" => Self::Float32,
            "float64" => Self::Float64,
            "int32" => Self::Int32,
            "int64" => Self::Int64,
            "uint8" | "bool" => Self::Byte,
            _ => return None,
        })
    }

    #[allow(clippy::cast_possible_truncation, reason = "the rule's number is cut to the type it names")]
    fn bytes(self, value: f64) -> Vec<u8> {
        match self {
            Self::Float32 => (value as f32).to_le_bytes().to_vec(),
            Self::Float64 => value.to_le_bytes().to_vec(),
            Self::Int32 => (value as i32).to_le_bytes().to_vec(),
            Self::Int64 => (value as i64).to_le_bytes().to_vec(),
            Self::Byte => vec![value as u8],
        }
    }
}

impl Rule {
    fn parse(line: &str) -> Result<Self, String> {
        let fields: Vec<&str> = line.split('\t').collect();
        let policy = match fields[..] {
            ["allow", _, _] => Policy::Allow,
            ["stop", _, _] => Policy::Stop,
            ["value", _, _, name, number, values] => {
                let number = Number::parse(number).ok_or_else(|| format!("type {number}"))?;
                let values: Result<Vec<f64>, _> = values.split(',').map(str::parse).collect();
                let values = values.map_err(|error| error.to_string())?;
                Policy::Value { name: name.to_owned(), number, values, next: 0 }
            }
            _ => return Err("fields".to_owned()),
        };
        Ok(Self { writer: fields[1].to_owned(), place: fields[2].to_owned(), policy })
    }
}

/// Does `text` fit a pattern in which `*` stands for any text?
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// The rules, read on the first unknown value. A rule that cannot be read ends the program: the launcher checks them.
static RULES: LazyLock<Mutex<Vec<Rule>>> = LazyLock::new(|| {
    let Some(path) = std::env::var_os("PRISM_VALUE_RULES").filter(|path| !path.is_empty()) else {
        return Mutex::default();
    };
    let parsed = std::fs::read_to_string(&path)
        .map_err(|error| error.to_string())
        .and_then(|text| text.lines().filter(|line| !line.is_empty()).map(Rule::parse).collect::<Result<Vec<_>, _>>());
    match parsed {
        Ok(rules) => Mutex::new(rules),
        Err(reason) => stop(&format!("cannot use the rules for values in {}: {reason}", path.display())),
    }
});

#[derive(Default)]
struct Counts {
    /// Reads by the text of their note, since the last report.
    pending: BTreeMap<String, u64>,
    /// Texts that were ever reported.
    places: BTreeSet<String>,
    num_pending: u64,
}

static COUNTS: Mutex<Counts> = Mutex::new(Counts { pending: BTreeMap::new(), places: BTreeSet::new(), num_pending: 0 });

fn counts() -> MutexGuard<'static, Counts> {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next reads of up to eight bytes by the calling thread find this number, until it is taken back.
pub(super) fn script(value: Option<i64>) {
    SCRIPT.set(value);
}

/// The host has copied rows of `width` bytes from device memory to `to`.
///
/// # Safety
/// The rows must be valid, as the copy that has just been made.
pub(crate) unsafe fn read(
    to: *mut c_void,
    to_pitch: usize,
    from: usize,
    from_pitch: usize,
    width: usize,
    height: usize,
) {
    if !is_on() {
        return;
    }
    let bytes = width * height;
    if bytes <= 8
        && let Some(value) = SCRIPT.get()
    {
        // SAFETY: the destination is valid for this many bytes, which are no more than the number has.
        return unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to.cast(), bytes) };
    }
    let mut grade = Grade::Known;
    for row in 0..height {
        grade = grade.min(known::grade(from + row * from_pitch, width));
    }
    match grade {
        Grade::Known => count(format!("{NOTE}\tknown")),
        Grade::Provided(rule) => {
            let place = python::location().unwrap_or_default();
            count(format!("{NOTE}\tprovided\t{bytes}\t{}\t{place}", known::name_of(rule)));
        }
        Grade::Unknown(writer) => {
            let place = python::location().unwrap_or_default();
            let replacement = unknown(&known::name_of(writer), &place, bytes);
            if let Some(value) = replacement.filter(|_| height == 1 || to_pitch == width) {
                // SAFETY: the destination is valid for `bytes` bytes; the value repeats until they are full.
                let target = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
                target.chunks_mut(value.len()).for_each(|chunk| chunk.copy_from_slice(&value[..chunk.len()]));
            }
        }
    }
}

/// An unknown value is read: what a rule gives instead, if one does.
#[cold]
fn unknown(writer: &str, place: &str, bytes: usize) -> Option<Vec<u8>> {
    let mut rules = RULES.lock().unwrap_or_else(PoisonError::into_inner);
    let rule = rules.iter_mut().find(|rule| fits(&rule.writer, writer) && fits(&rule.place, place));
    let policy = rule.map(|rule| &mut rule.policy);
    let stops = match policy {
        Some(Policy::Value { name, number, values, next }) => {
            let value = number.bytes(values.get(*next).or(values.last()).copied().unwrap_or_default());
            if bytes.is_multiple_of(value.len()) {
                *next += 1;
                count(format!("{NOTE}\tprovided\t{bytes}\t{name}\t{place}"));
                return Some(value);
            }
            false
        }
        Some(Policy::Allow) => false,
        Some(Policy::Stop) => true,
        None => *MODE == Mode::Strict && bytes <= STRICT_BYTES,
    };
    count(format!("{NOTE}\tunknown\t{bytes}\t{writer}\t{place}"));
    if stops {
        flush();
        stop(&format!(
            "the host reads {bytes} bytes that are not known, last written by {writer} (python: {}): let a rule provide \
             them, allow the place, or run without --strict-values",
            if place.is_empty() { "unknown place" } else { place }
        ));
    }
    None
}

/// Ends the program with a reason that the launcher repeats.
#[cold]
fn stop(reason: &str) -> ! {
    real::log(&format!("prism: {reason}\n"));
    // SAFETY: ends the process at once; nothing of the program can go on meaningfully.
    unsafe { libc::_exit(EXIT_UNKNOWN_VALUE) }
}

fn count(text: String) {
    let mut counts = counts();
    match counts.pending.get_mut(&text) {
        Some(number) => *number += 1,
        None => counts.begin(text),
    }
    counts.num_pending += 1;
    if counts.num_pending >= REPORT_EVERY {
        drop(counts);
        flush();
    }
}

impl Counts {
    /// Counts the first read with this text since the last report.
    fn begin(&mut self, text: String) {
        let is_new = !self.places.contains(&text);
        let text = if is_new && self.places.len() >= MOST_PLACES {
            let grade: Vec<&str> = text.split('\t').take(2).collect();
            format!("{}\t0\tother places\t", grade.join("\t"))
        } else {
            text
        };
        if is_new {
            self.places.insert(text.clone());
        }
        *self.pending.entry(text).or_default() += 1;
    }
}

/// Tells the engine what was counted since the last time.
pub(crate) fn flush() {
    if !session::is_connected() {
        return;
    }
    let pending = {
        let mut counts = counts();
        counts.num_pending = 0;
        std::mem::take(&mut counts.pending)
    };
    for (text, count) in pending {
        send(count, &text);
    }
}

/// A remark for the run's summary.
pub(super) fn remark(text: &str) {
    if session::is_connected() {
        send(1, text);
    }
}

fn send(count: u64, text: &str) {
    let mut payload = count.to_le_bytes().to_vec();
    payload.extend_from_slice(text.as_bytes());
    // A dead engine is reported by the calls that need it; a remark is not worth an error.
    let _ = session::control(ControlKind::Note, &payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("a*c", "abc", true),
            ("a*c", "ab", false),
            ("*train.py:*", "/home/x/train.py:12", true),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "acb", false),
        ] {
            assert_eq!(fits(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn rules_are_read() {
        assert_eq!(Rule::parse("allow\t*\ta.py:*").map(|rule| rule.policy), Ok(Policy::Allow));
        let rule = Rule::parse("value\t*\t*\tloss\tfloat32\t2.5,2").expect("well formed");
        let expected =
            Policy::Value { name: "loss".to_owned(), number: Number::Float32, values: vec![2.5, 2.0], next: 0 };
        assert_eq!(rule.policy, expected);
        for bad in ["", "allow\t*", "value\t*\t*\tloss\tcomplex\t1", "value\t*\t*\tloss\tfloat32\tx"] {
            assert!(Rule::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Number::Int32.bytes(-2.0), [254, 255, 255, 255]);
    }
}
