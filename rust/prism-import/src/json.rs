//! JSON in pieces: a stream is cut into the members of its object and the elements of one list in it, and only such a piece is
//! ever in memory.
//!
//! Cutting looks at strings, brackets and commas only, so that one element with bad contents (a lone `NaN`, a wrong escape)
//! does not end the file. [`Fields`] looks at a piece.

use std::borrow::Cow;
use std::io::{self, BufRead};

/// Most bytes of one piece; what is larger is passed over and reported.
pub const MAX_PIECE: usize = 16 << 20;

/// A piece of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A member of the outer object other than the list.
    Member(&'a [u8], &'a [u8]),
    /// An element of the list.
    Element(&'a [u8]),
    /// A piece larger than [`MAX_PIECE`].
    Oversized,
}

/// Why there are no more pieces before the end.
#[derive(Debug)]
pub enum FrameError {
    /// Reading failed (a damaged gzip file, too).
    Io(io::Error),
    /// The stream ends in the middle.
    Truncated,
    /// This is not JSON.
    Syntax(String),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Object,
    List { is_outer: bool },
    End,
}

/// Cuts a stream.
pub struct Frames<R> {
    reader: R,
    list: &'static [u8],
    state: State,
    key: Vec<u8>,
    value: Vec<u8>,
    offset: u64,
}

impl<R: BufRead> Frames<R> {
    /// Of `reader`, which is a list, or an object with a list of this name.
    pub fn new(reader: R, list: &'static str) -> Self {
        let (key, value) = (Vec::new(), Vec::new());
        Self { reader, list: list.as_bytes(), state: State::Start, key, value, offset: 0 }
    }

    /// Bytes consumed so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next piece; `None` at the end of the outermost value.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        loop {
            match self.state {
                State::End => return Ok(None),
                State::Start => {
                    self.state = match self.peek()? {
                        Some(b'{') => State::Object,
                        Some(b'[') => State::List { is_outer: true },
                        Some(0xef) => {
                            self.bump(1);
                            continue;
                        }
                        Some(0xbb | 0xbf) if self.offset < 3 => {
                            self.bump(1);
                            continue;
                        }
                        Some(other) => return Err(unexpected(other, "an object or a list")),
                        None => return Err(FrameError::Syntax("it is empty".to_owned())),
                    };
                    self.bump(1);
                }
                State::Object => match self.peek()?.ok_or(FrameError::Truncated)? {
                    b',' => self.bump(1),
                    b'}' => self.state = State::End,
                    b'"' => {
                        if !self.take_value(true)? {
                            return Err(FrameError::Syntax("a name is too long".to_owned()));
                        }
                        match self.peek()?.ok_or(FrameError::Truncated)? {
                            b':' => self.bump(1),
                            other => return Err(unexpected(other, "a colon")),
                        }
                        let is_list = self.peek()?.ok_or(FrameError::Truncated)? == b'[';
                        if is_list && trimmed(&self.key) == self.list {
                            self.bump(1);
                            self.state = State::List { is_outer: false };
                            continue;
                        }
                        let is_whole = self.take_value(false)?;
                        let frame = Frame::Member(trimmed(&self.key), &self.value);
                        return Ok(Some(if is_whole { frame } else { Frame::Oversized }));
                    }
                    other => return Err(unexpected(other, "a name")),
                },
                State::List { is_outer } => match self.peek()?.ok_or(FrameError::Truncated)? {
                    b',' => self.bump(1),
                    b']' => {
                        self.bump(1);
                        self.state = if is_outer { State::End } else { State::Object };
                    }
                    _ => {
                        let is_whole = self.take_value(false)?;
                        return Ok(Some(if is_whole { Frame::Element(&self.value) } else { Frame::Oversized }));
                    }
                },
            }
        }
    }

    fn bump(&mut self, bytes: usize) {
        self.reader.consume(bytes);
        self.offset += bytes as u64;
    }

    /// The next byte that is not white space, not consumed.
    fn peek(&mut self) -> Result<Option<u8>, FrameError> {
        loop {
            let buffer = fill(&mut self.reader)?;
            if buffer.is_empty() {
                return Ok(None);
            }
            if let Some(at) = buffer.iter().position(|byte| !byte.is_ascii_whitespace()) {
                let byte = buffer[at];
                self.bump(at);
                return Ok(Some(byte));
            }
            let all = buffer.len();
            self.bump(all);
        }
    }

    /// Takes a value (or a name) off the stream; false if it was too large to keep.
    fn take_value(&mut self, is_key: bool) -> Result<bool, FrameError> {
        let Self { reader, key, value, offset, .. } = self;
        let into = if is_key { key } else { value };
        into.clear();
        let mut scan = Scan::default();
        let mut is_whole = true;
        loop {
            let buffer = fill(reader)?;
            if buffer.is_empty() {
                return Err(FrameError::Truncated);
            }
            let (used, is_over) = scan.advance(buffer).map_err(|byte| unexpected(byte, "a value"))?;
            if into.len() + used > MAX_PIECE {
                is_whole = false;
            }
            if is_whole {
                into.extend_from_slice(&buffer[..used]);
            }
            reader.consume(used);
            *offset += used as u64;
            if is_over {
                return Ok(is_whole);
            }
        }
    }
}

fn fill(reader: &mut impl BufRead) -> Result<&[u8], FrameError> {
    // A borrow that is returned must not be held over the retry, so the buffer is asked for again.
    loop {
        match reader.fill_buf() {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(FrameError::Truncated),
            Err(error) => return Err(FrameError::Io(error)),
        }
    }
    reader.fill_buf().map_err(FrameError::Io)
}

fn unexpected(byte: u8, wanted: &str) -> FrameError {
    FrameError::Syntax(format!("{:?} where {wanted} must be", char::from(byte)))
}

/// A name without its quotation marks.
fn trimmed(key: &[u8]) -> &[u8] {
    key.strip_prefix(b"\"").and_then(|key| key.strip_suffix(b"\"")).unwrap_or(key)
}

/// Where in a value one is.
#[derive(Default)]
struct Scan {
    depth: u64,
    is_in_string: bool,
    is_escaped: bool,
    /// A number or word at depth 0.
    is_in_word: bool,
}

impl Scan {
    /// Looks at more bytes of the value: how many belong to it, and whether it is over. An error is a byte with which no value
    /// starts.
    fn advance(&mut self, bytes: &[u8]) -> Result<(usize, bool), u8> {
        let mut at = 0;
        while at < bytes.len() {
            let byte = bytes[at];
            if self.is_in_string {
                if self.is_escaped {
                    self.is_escaped = false;
                } else if byte == b'\\' {
                    self.is_escaped = true;
                } else if byte == b'"' {
                    self.is_in_string = false;
                    if self.depth == 0 {
                        return Ok((at + 1, true));
                    }
                }
                at += 1;
                continue;
            }
            match byte {
                b'"' if self.is_in_word => return Ok((at, true)),
                b'"' => self.is_in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth == 0 => return if self.is_in_word { Ok((at, true)) } else { Err(byte) },
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Ok((at + 1, true));
                    }
                }
                b',' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 => {
                    return if self.is_in_word { Ok((at, true)) } else { Err(byte) };
                }
                b':' if self.depth == 0 => return Err(byte),
                _ if self.depth == 0 => self.is_in_word = true,
                _ => {}
            }
            at += 1;
        }
        Ok((at, false))
    }
}

/// The members of an object in memory: name without quotation marks (escapes kept), value as it is written. Ends early at
/// bytes that are not an object.
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Of the text of an object.
    #[must_use]
    pub fn new(object: &'a [u8]) -> Self {
        let object = object.trim_ascii_start();
        Self { rest: object.strip_prefix(b"{").unwrap_or(b"") }
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let separator = |byte: &u8| byte.is_ascii_whitespace() || *byte == b',';
        let start = self.rest.iter().position(|byte| !separator(byte))?;
        let (key, rest) = split_value(&self.rest[start..])?;
        let key = key.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        let (value, rest) = split_value(rest.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start())?;
        self.rest = rest;
        Some((key, value))
    }
}

/// The elements of a list in memory, as they are written.
pub struct Elements<'a> {
    rest: &'a [u8],
}

impl<'a> Elements<'a> {
    /// Of the text of a list.
    #[must_use]
    pub fn new(list: &'a [u8]) -> Self {
        let list = list.trim_ascii_start();
        Self { rest: list.strip_prefix(b"[").unwrap_or(b"") }
    }
}

impl<'a> Iterator for Elements<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        let separator = |byte: &u8| byte.is_ascii_whitespace() || *byte == b',';
        let start = self.rest.iter().position(|byte| !separator(byte))?;
        let (value, rest) = split_value(&self.rest[start..])?;
        self.rest = rest;
        Some(value)
    }
}

fn split_value(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (used, is_over) = Scan::default().advance(bytes).ok()?;
    (is_over && used > 0).then(|| bytes.split_at(used))
}

/// A string's text, with escapes resolved; `None` for other values.
#[must_use]
pub fn text(value: &[u8]) -> Option<Cow<'_, str>> {
    let inside = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if inside.contains(&b'\\') {
        return serde_json::from_slice::<String>(value).ok().map(Cow::Owned);
    }
    Some(String::from_utf8_lossy(inside))
}

/// A whole number, or a string of one.
#[must_use]
pub fn integer(value: &[u8]) -> Option<i64> {
    let value = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
    let text = std::str::from_utf8(value).ok()?.trim();
    text.parse().ok().or_else(|| {
        let float: f64 = text.parse().ok()?;
        (float.fract() == 0.0 && float.abs() < 9e15).then_some(float as i64)
    })
}

/// A decimal number of microseconds as nanoseconds, without the rounding of a float; `None` if it is no finite number or
/// beyond 2^62 ns.
#[must_use]
pub fn microseconds(value: &[u8]) -> Option<i64> {
    const LIMIT: i64 = 1 << 62;
    let text = std::str::from_utf8(value).ok()?.trim_matches('"').trim();
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_plain = !whole.is_empty() && whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit());
    if is_plain {
        let whole = whole.parse::<i64>().ok()?.checked_mul(1000)?;
        let thousandths =
            fraction.bytes().chain(*b"000").take(3).fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0'));
        let ns = whole.checked_add(thousandths)?;
        return (ns <= LIMIT).then_some(sign * ns);
    }
    let ns = text.parse::<f64>().ok()? * 1000.0;
    (ns.is_finite() && ns.abs() <= LIMIT as f64).then(|| ns.round() as i64)
}
