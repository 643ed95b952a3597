//! The forms of a Chakra trace: a stream of protobuf messages (`.et`), and JSON.

use super::node::{Attribute, Node};
use crate::ImportError;
use crate::json::{self, Elements, Frame, FrameError, Frames};
use crate::notes::Notes;
use crate::wire::{Fields, Messages, StreamError, Value, numbers};
use std::io::BufRead;
use std::path::Path;

/// Most bytes of a message.
const MAX_MESSAGE: usize = 64 << 20;
/// Longest duration that is believed: 28 hours.
const MAX_DURATION: i64 = 100_000_000_000_000;

/// A rank's file.
#[derive(Debug, Default)]
pub struct File {
    /// Version of the schema, as it says.
    pub schema: Option<String>,
    /// Its nodes.
    pub nodes: Vec<Node>,
}

/// Reads a file in whatever form it has.
pub fn read(path: &Path, notes: &mut Notes) -> Result<File, ImportError> {
    let mut reader = crate::input::open(path)?;
    let first = reader.fill_buf().map_err(|source| ImportError::Io { path: path.to_owned(), source })?.first().copied();
    let is_json = match first {
        None => return Err(unreadable(path, 0, "it is empty")),
        Some(b'{') => is_object(reader.fill_buf().unwrap_or_default()),
        Some(_) => false,
    };
    if is_json { read_json(reader, path, notes) } else { read_messages(reader, path, notes) }
}

/// `{` is also the length of a message of 123 bytes; a text goes on with a name.
fn is_object(bytes: &[u8]) -> bool {
    matches!(bytes[1..].iter().find(|byte| !byte.is_ascii_whitespace()), Some(b'"' | b'}') | None)
}

fn unreadable(path: &Path, offset: u64, message: &str) -> ImportError {
    let (path, message) = (path.to_owned(), message.to_owned());
    ImportError::Format { path, expected: "Chakra execution trace", offset, message }
}

fn read_messages(reader: impl BufRead, path: &Path, notes: &mut Notes) -> Result<File, ImportError> {
    let mut messages = Messages::new(reader, MAX_MESSAGE);
    let mut file = File::default();
    let mut count = 0_u64;
    loop {
        let offset = messages.offset();
        let message = match messages.next_message() {
            Ok(Some(message)) => message,
            Ok(None) => break,
            Err(error) => {
                let what = match error {
                    StreamError::Io(source) => return Err(ImportError::Io { path: path.to_owned(), source }),
                    StreamError::Truncated => "it ends in the middle of a message".to_owned(),
                    StreamError::Length(length) => format!("a message of {length} bytes"),
                };
                if file.nodes.is_empty() {
                    return Err(unreadable(path, offset, &what));
                }
                let nodes = file.nodes.len();
                notes.add("truncated_files", || {
                    format!("{}: {what} (byte {offset}); its first {nodes} nodes are used", path.display())
                });
                break;
            }
        };
        if count == 0 {
            file.schema = metadata(message).map_err(|what| unreadable(path, offset, what))?;
        } else {
            match node(message, notes) {
                Ok(node) => file.nodes.push(node),
                Err(what) if file.nodes.is_empty() => return Err(unreadable(path, offset, what)),
                Err(what) => notes.add("unreadable_nodes", || format!("{}: byte {offset}: {what}", path.display())),
            }
        }
        count += 1;
    }
    if file.nodes.is_empty() {
        return Err(unreadable(path, messages.offset(), "it has no nodes"));
    }
    Ok(file)
}

/// The version in the first message: a text of its own, or the attribute `schema`.
fn metadata(message: &[u8]) -> Result<Option<String>, &'static str> {
    let mut schema = None;
    for field in Fields::new(message) {
        let (number, value) = field?;
        let bytes = value.bytes().ok_or("its first message is no metadata")?;
        match attribute(bytes) {
            Ok((name, Attribute::Text(text))) if name == "schema" => schema = Some(text),
            Err(_) if number == 1 => schema = value.text(),
            _ => {}
        }
    }
    Ok(schema)
}

fn node(message: &[u8], notes: &mut Notes) -> Result<Node, &'static str> {
    let mut node = Node::default();
    for field in Fields::new(message) {
        let (number, value) = field?;
        match number {
            1 => node.id = value.number().ok_or("an id that is no number")?,
            2 => node.name = value.text().ok_or("a name that is no text")?,
            3 => node.node_type = value.number().ok_or("a type that is no number")?,
            4 | 5 => numbers(value, |id| node.dependencies.push(id)),
            6 => node.start = nanoseconds(value.number().ok_or("a time that is no number")?),
            7 => node.duration = nanoseconds(value.number().ok_or("a duration that is no number")?),
            10 => {
                if let Ok((name, attribute)) = attribute(value.bytes().ok_or("an attribute that is no message")?) {
                    node.set(&name, attribute);
                }
            }
            _ => {}
        }
    }
    limit(&mut node, notes);
    Ok(node)
}

fn nanoseconds(microseconds: u64) -> i64 {
    i64::try_from(microseconds).unwrap_or(i64::MAX).saturating_mul(1000)
}

fn limit(node: &mut Node, notes: &mut Notes) {
    if !(0..=MAX_DURATION).contains(&node.duration) {
        let (id, us) = (node.id, node.duration / 1000);
        notes.add("absurd_durations", || format!("node {id} ({}): {us} us", node.name));
        node.duration = 0;
    }
}

fn attribute(message: &[u8]) -> Result<(String, Attribute), &'static str> {
    let (mut name, mut found) = (None, None);
    for field in Fields::new(message) {
        let (number, value) = field?;
        match (number, value) {
            (1, value) => name = value.text(),
            // Zigzag coded.
            (15 | 17, Value::Varint(bits)) => {
                found = Some(Attribute::Number(i128::from((bits >> 1) as i64 ^ -((bits & 1) as i64))));
            }
            (7 | 9, Value::Varint(bits)) => found = Some(Attribute::Number(i128::from(bits as i64))),
            (11 | 13 | 19 | 21 | 23 | 25 | 27, value) => {
                found = value.number().map(|number| Attribute::Number(i128::from(number)));
            }
            (3, Value::Fixed64(bits)) => found = Some(Attribute::Number(f64::from_bits(bits) as i128)),
            (5, Value::Fixed32(bits)) => found = Some(Attribute::Number(f32::from_bits(bits) as i128)),
            (29 | 31, value) => found = value.text().map(Attribute::Text),
            _ => {}
        }
    }
    match (name, found) {
        (Some(name), Some(value)) => Ok((name, value)),
        _ => Err("no attribute"),
    }
}

fn read_json(reader: impl BufRead, path: &Path, notes: &mut Notes) -> Result<File, ImportError> {
    let mut frames = Frames::new(reader, "workload_graph");
    let mut file = File::default();
    let mut has_pytorch_nodes = false;
    loop {
        match frames.next_frame() {
            Ok(Some(Frame::Element(element))) => {
                let node = json_node(element, notes);
                file.nodes.push(node);
            }
            Ok(Some(Frame::Member(b"schema", value))) => file.schema = json::text(value).map(Into::into),
            Ok(Some(Frame::Member(b"nodes", _))) => has_pytorch_nodes = true,
            Ok(Some(Frame::Member(..))) => {}
            Ok(Some(Frame::Oversized)) => has_pytorch_nodes |= file.schema.is_some(),
            Ok(None) => break,
            Err(error) => {
                let what = match error {
                    FrameError::Io(source) => return Err(ImportError::Io { path: path.to_owned(), source }),
                    FrameError::Truncated => "it ends in the middle".to_owned(),
                    FrameError::Syntax(message) => message,
                };
                let offset = frames.offset();
                if file.nodes.is_empty() {
                    return Err(unreadable(path, offset, &what));
                }
                let nodes = file.nodes.len();
                notes.add("truncated_files", || {
                    format!("{}: {what} (byte {offset}); its first {nodes} nodes are used", path.display())
                });
                break;
            }
        }
    }
    if file.nodes.is_empty() && has_pytorch_nodes {
        let schema = file.schema.as_deref().unwrap_or("unknown");
        return Err(ImportError::unfit(format!(
            "{} is an execution trace of PyTorch (schema {schema}), which has no times: import the profiler's trace of the \
             same run (prism import kineto), or convert both to Chakra first",
            path.display()
        )));
    }
    if file.nodes.is_empty() {
        return Err(unreadable(path, frames.offset(), "it has no list `workload_graph` with nodes"));
    }
    Ok(file)
}

fn json_node(element: &[u8], notes: &mut Notes) -> Node {
    let mut node = Node::default();
    for (key, value) in json::Fields::new(element) {
        let key = String::from_utf8_lossy(key).to_lowercase().replace('_', "");
        let number = || json::integer(value).and_then(|number| u64::try_from(number).ok());
        match key.as_str() {
            "id" => node.id = number().unwrap_or(0),
            "name" => node.name = json::text(value).map(Into::into).unwrap_or_default(),
            "nodetype" | "type" => node.node_type = number().unwrap_or(0),
            "ctrldeps" | "datadeps" => {
                let ids = Elements::new(value).filter_map(json::integer).chain(json::integer(value));
                node.dependencies.extend(ids.filter_map(|id| u64::try_from(id).ok()));
            }
            "runtime" | "durationmicros" => node.duration = json::microseconds(value).unwrap_or(-1),
            "starttimemicros" => node.start = json::microseconds(value).unwrap_or(0),
            _ => {
                let name = match key.as_str() {
                    "iscpuop" => "is_cpu_op",
                    "commtype" => "comm_type",
                    "commsize" => "comm_size",
                    "commsrc" => "comm_src",
                    "commdst" => "comm_dst",
                    "pgname" | "commgroup" => "pg_name",
                    _ => continue,
                };
                let attribute = match value {
                    b"true" => Attribute::Number(1),
                    b"false" => Attribute::Number(0),
                    _ => match (json::integer(value), json::text(value)) {
                        (Some(number), _) => Attribute::Number(i128::from(number)),
                        (None, Some(text)) => Attribute::Text(text.into_owned()),
                        (None, None) => continue,
                    },
                };
                node.set(name, attribute);
            }
        }
    }
    limit(&mut node, notes);
    node
}
