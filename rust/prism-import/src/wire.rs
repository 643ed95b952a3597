//! Protobuf's wire format: what is needed of it to read and write messages of a known schema.
//! Source: protobuf.dev, "Encoding".

use std::io::{self, BufRead, Write};

/// A field's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Wire type 0.
    Varint(u64),
    /// Wire type 1.
    Fixed64(u64),
    /// Wire type 2.
    Bytes(&'a [u8]),
    /// Wire type 5.
    Fixed32(u32),
}

impl<'a> Value<'a> {
    /// As a whole number, if it is one.
    #[must_use]
    pub fn number(self) -> Option<u64> {
        match self {
            Self::Varint(value) | Self::Fixed64(value) => Some(value),
            Self::Fixed32(value) => Some(u64::from(value)),
            Self::Bytes(_) => None,
        }
    }

    /// As bytes.
    #[must_use]
    pub fn bytes(self) -> Option<&'a [u8]> {
        if let Self::Bytes(bytes) = self { Some(bytes) } else { None }
    }

    /// As text; what is not UTF-8 in it is replaced.
    #[must_use]
    pub fn text(self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

/// The fields of a message: number and value. A damaged message ends with an `Err`.
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Of the bytes of a message.
    #[must_use]
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn value(&mut self, wire_type: u64) -> Option<Value<'a>> {
        match wire_type {
            0 => varint(&mut self.rest).map(Value::Varint),
            1 => self.take(8).map(|bytes| Value::Fixed64(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))),
            2 => {
                let length = usize::try_from(varint(&mut self.rest)?).ok()?;
                self.take(length).map(Value::Bytes)
            }
            5 => self.take(4).map(|bytes| Value::Fixed32(u32::from_le_bytes(bytes.try_into().expect("4 bytes")))),
            _ => None,
        }
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = varint(&mut self.rest).and_then(|tag| {
            let number = u32::try_from(tag >> 3).ok().filter(|number| *number > 0)?;
            Some((number, self.value(tag & 7)?))
        });
        if field.is_none() {
            self.rest = &[];
        }
        Some(field.ok_or("a field is damaged"))
    }
}

/// Numbers of a repeated field, packed or one of them alone.
pub fn numbers(value: Value<'_>, mut add: impl FnMut(u64)) {
    match value {
        Value::Bytes(mut bytes) => {
            while let Some(number) = varint(&mut bytes) {
                add(number);
            }
        }
        other => other.number().into_iter().for_each(add),
    }
}

/// Takes a number of 7-bit groups off the front.
pub fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for (at, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * at).min(63);
        if byte & 0x80 == 0 {
            *bytes = &bytes[at + 1..];
            return Some(value);
        }
    }
    None
}

/// Messages of a stream, each behind its length.
pub struct Messages<R> {
    reader: R,
    buffer: Vec<u8>,
    offset: u64,
    limit: usize,
}

/// Why there is no next message.
#[derive(Debug)]
pub enum StreamError {
    /// Reading failed.
    Io(io::Error),
    /// The stream ends in the middle of a message.
    Truncated,
    /// A length beyond all reason.
    Length(u64),
}

impl<R: BufRead> Messages<R> {
    /// Of a stream whose messages have at most `limit` bytes.
    pub fn new(reader: R, limit: usize) -> Self {
        Self { reader, buffer: Vec::new(), offset: 0, limit }
    }

    /// Bytes consumed so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next message; `None` at the end.
    pub fn next_message(&mut self) -> Result<Option<&[u8]>, StreamError> {
        let Some(length) = self.length()? else { return Ok(None) };
        let length =
            usize::try_from(length).ok().filter(|length| *length <= self.limit).ok_or(StreamError::Length(length))?;
        self.buffer.clear();
        // Grows as bytes come, so that a wrong length takes no memory.
        let mut part = io::Read::take(&mut self.reader, length as u64);
        let read = io::Read::read_to_end(&mut part, &mut self.buffer).map_err(of_io)?;
        self.offset += read as u64;
        if read < length { Err(StreamError::Truncated) } else { Ok(Some(&self.buffer)) }
    }

    fn length(&mut self) -> Result<Option<u64>, StreamError> {
        let mut value = 0_u64;
        for at in 0..10 {
            let mut byte = [0];
            match io::Read::read_exact(&mut self.reader, &mut byte) {
                Ok(()) => self.offset += 1,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && at == 0 => return Ok(None),
                Err(error) => return Err(of_io(error)),
            }
            value |= u64::from(byte[0] & 0x7f) << (7 * at).min(63);
            if byte[0] & 0x80 == 0 {
                return Ok(Some(value));
            }
        }
        Err(StreamError::Length(value))
    }
}

fn of_io(error: io::Error) -> StreamError {
    if error.kind() == io::ErrorKind::UnexpectedEof { StreamError::Truncated } else { StreamError::Io(error) }
}

/// A message being written.
#[derive(Clone, Debug, Default)]
pub struct Message(Vec<u8>);

impl Message {
    /// Adds a number; 0 is left out, as proto3 does.
    pub fn number(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.number_always(field, value);
        }
    }

    /// Adds a number, 0 too: for members of a `oneof`.
    pub fn number_always(&mut self, field: u32, value: u64) {
        push_varint(&mut self.0, u64::from(field) << 3);
        push_varint(&mut self.0, value);
    }

    /// Adds bytes, a text or a message.
    pub fn bytes(&mut self, field: u32, bytes: &[u8]) {
        push_varint(&mut self.0, u64::from(field) << 3 | 2);
        push_varint(&mut self.0, bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// Adds packed numbers, if there are any.
    pub fn packed(&mut self, field: u32, values: &[u64]) {
        if !values.is_empty() {
            let mut bytes = Vec::with_capacity(values.len());
            for value in values {
                push_varint(&mut bytes, *value);
            }
            self.bytes(field, &bytes);
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Writes it behind its length.
    pub fn write_delimited(&self, out: &mut impl Write) -> io::Result<()> {
        let mut length = Vec::with_capacity(5);
        push_varint(&mut length, self.0.len() as u64);
        out.write_all(&length)?;
        out.write_all(&self.0)
    }
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}
