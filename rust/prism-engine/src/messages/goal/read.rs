//! GOAL text to program, in one pass over pieces of the file.

use super::RENDEZVOUS;
use super::cursor::{Cursor, Digits};
use super::labels::{Label, Labels};
use crate::ids::Rank;
use crate::messages::{Lanes, MessageError, MessageProgram, MessageProgramBuilder, OpIndex};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes read at a time, and the longest line.
const PIECE: usize = 1 << 18;

/// Reads a GOAL file. Memory: the program's, and one piece of the text.
pub fn open(path: &Path) -> Result<MessageProgram, MessageError> {
    let io = |source| MessageError::Io { action: "open", path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(io(std::io::Error::other("not a regular file")));
    }
    read(file).map_err(|error| match error {
        MessageError::Io { action, source, .. } => MessageError::Io { action, path: path.to_owned(), source },
        other => other,
    })
}

/// Reads GOAL text. Fails with line, rank and label where the text or the job is wrong.
pub fn read(mut source: impl Read) -> Result<MessageProgram, MessageError> {
    let mut parser = Parser::default();
    let mut buffer = vec![0; PIECE + 1];
    let mut filled = 0;
    loop {
        let count = match source.read(&mut buffer[filled..PIECE]) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(MessageError::Io { action: "read", path: "GOAL text".into(), source }),
        };
        filled += count;
        let is_last = count == 0;
        if is_last && filled > 0 && buffer[filled - 1] != b'\n' {
            buffer[filled] = b'\n';
            filled += 1;
        }
        let lines = buffer[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        parser.lines(&buffer[..lines])?;
        if is_last {
            return parser.finish();
        }
        buffer.copy_within(lines..filled, 0);
        filled -= lines;
        if filled == PIECE {
            return Err(parser.error("", format!("a line of more than {PIECE} bytes")));
        }
    }
}

/// Does a file that begins with these bytes hold GOAL text? True if its first statement is `num_ranks`.
pub fn is_goal(mut beginning: &[u8]) -> bool {
    loop {
        beginning = beginning.trim_ascii_start();
        if beginning.starts_with(b"//") {
            let Some(end) = beginning.iter().position(|byte| *byte == b'\n') else { return false };
            beginning = &beginning[end..];
        } else if beginning.starts_with(b"/*") {
            let Some(end) = beginning.windows(2).position(|pair| pair == b"*/") else { return false };
            beginning = &beginning[end + 2..];
        } else {
            return beginning.starts_with(b"num_ranks");
        }
    }
}

/// What has been read so far.
#[derive(Default)]
struct Parser {
    builder: Option<MessageProgramBuilder>,
    labels: Labels,
    /// Complete lines behind us.
    line: u64,
    /// Inside a rank's block; inside a comment.
    rank: Option<u32>,
    in_comment: bool,
    /// The next op is a rendezvous.
    rendezvous: bool,
}

/// Why a statement is none.
enum Wrong {
    Expected(&'static str),
    Because(String),
    Op(MessageError),
}

use Wrong::{Because, Expected};

impl From<MessageError> for Wrong {
    fn from(error: MessageError) -> Self {
        Self::Op(error)
    }
}

impl Parser {
    /// Takes complete lines.
    fn lines(&mut self, text: &[u8]) -> Result<(), MessageError> {
        let mut cursor = Cursor::new(text);
        while !cursor.is_at_end() {
            let begin = cursor.rest();
            if let Err(wrong) = self.statement(&mut cursor) {
                return Err(self.wrong(wrong, begin, cursor.peek()));
            }
        }
        Ok(())
    }

    #[inline]
    fn statement(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Wrong> {
        if self.in_comment {
            self.in_comment = !cursor.comment();
            self.line += u64::from(self.in_comment);
            return Ok(());
        }
        cursor.spaces();
        let word = cursor.identifier();
        if word.is_empty() {
            return self.punctuation(cursor);
        }
        let label = Label::new(word);
        cursor.spaces();
        if cursor.peek() == b':' {
            cursor.skip(1);
            cursor.spaces();
            let verb = cursor.identifier();
            return self.op(cursor, verb, Some(label));
        }
        if cursor.eat(b"requires") {
            let (op, before) = self.dependency(cursor, label)?;
            return Ok(self.program()?.requires(op, before)?);
        }
        if cursor.eat(b"irequires") {
            let (op, before) = self.dependency(cursor, label)?;
            return Ok(self.program()?.irequires(op, before)?);
        }
        match word {
            b"rank" => self.begin_rank(cursor),
            b"num_ranks" => self.num_ranks(cursor),
            b"calc" | b"send" | b"recv" => self.op(cursor, word, None),
            _ => Err(Expected("':', 'requires' or 'irequires' after the label")),
        }
    }

    fn punctuation(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Wrong> {
        if cursor.end_of_line() {
            self.line += 1;
        } else if cursor.rest().starts_with(b"//") {
            self.rendezvous |= cursor.line().trim_ascii_end() == RENDEZVOUS;
            self.line += 1;
        } else if cursor.eat(b"/*") {
            self.in_comment = true;
        } else if cursor.eat(b"}") {
            if self.rank.take().is_none() {
                return Err(Because("'}' without a rank's '{'".into()));
            }
            if self.rendezvous {
                return Err(Because("no op follows the rendezvous mark".into()));
            }
        } else {
            return Err(Expected("a label, 'calc', 'send', 'recv', 'rank', 'num_ranks', '}' or a comment"));
        }
        Ok(())
    }

    fn num_ranks(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Wrong> {
        let ranks = number(cursor, "the number of ranks")?;
        if self.builder.is_some() {
            return Err(Because("'num_ranks' comes twice".into()));
        }
        let ranks = u32::try_from(ranks).map_err(|_| Because(format!("{ranks} ranks: at most 2^32 - 1")))?;
        self.builder = Some(MessageProgramBuilder::new(ranks)?);
        Ok(())
    }

    fn begin_rank(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Wrong> {
        let rank = number(cursor, "the rank")?;
        if !cursor.eat_word(b"{") {
            return Err(Expected("'{'"));
        }
        if self.rank.is_some() {
            return Err(Because(format!("rank {rank} begins inside another rank's block")));
        }
        let Some(builder) = &mut self.builder else { return Err(Expected("'num_ranks' before the first rank")) };
        let expected = builder.current().map_or(0, |(rank, _)| u64::from(rank.0) + 1);
        if rank != expected {
            return Err(Because(format!(
                "rank {rank} where rank {expected} should come: ranks come in order, each once"
            )));
        }
        self.labels.clear();
        self.rank = Some(builder.begin_rank()?.0);
        Ok(())
    }

    /// An op, after its label.
    #[inline]
    fn op(&mut self, cursor: &mut Cursor<'_>, verb: &[u8], label: Option<Label<'_>>) -> Result<(), Wrong> {
        let builder = Self::program_of(&mut self.builder, self.rank)?;
        let index = match verb {
            b"send" => {
                let bytes = size(cursor)?;
                if !cursor.eat_word(b"to") {
                    return Err(Expected("'to'"));
                }
                let peer = peer(number(cursor, "the receiving rank")?)?;
                let tag = if cursor.eat_word(b"tag") { tag(cursor)? } else { Some(0) };
                let lanes = lanes(cursor)?;
                let Some(tag) = tag else {
                    return Err(Because("a send of any tag (-1): only a receive may take any".into()));
                };
                builder.send(bytes, peer, tag, lanes)?
            }
            b"recv" => {
                let bytes = size(cursor)?;
                if !cursor.eat_word(b"from") {
                    return Err(Expected("'from'"));
                }
                let any = cursor.eat_word(b"-1");
                let from = if any { None } else { Some(peer(number(cursor, "the sending rank or -1")?)?) };
                let tag = if cursor.eat_word(b"tag") { tag(cursor)? } else { Some(0) };
                let lanes = lanes(cursor)?;
                builder.recv(bytes, from, tag, lanes)?
            }
            b"calc" => {
                let ticks = number(cursor, "the duration")?;
                let lanes = lanes(cursor)?;
                builder.calc(ticks, lanes)?
            }
            _ => return Err(Expected("'calc', 'send' or 'recv'")),
        };
        if self.rendezvous {
            builder.set_rendezvous(index)?;
            self.rendezvous = false;
        }
        if let Some(label) = label
            && !self.labels.define(label, index)
        {
            return Err(Because(format!("label {} is defined twice", label.to_text())));
        }
        self.end_line(cursor)
    }

    /// The other label of a dependency, after `requires`.
    #[inline]
    fn dependency(&mut self, cursor: &mut Cursor<'_>, label: Label<'_>) -> Result<(OpIndex, OpIndex), Wrong> {
        cursor.spaces();
        let other = cursor.identifier();
        if other.is_empty() {
            return Err(Expected("a label"));
        }
        let other = Label::new(other);
        let find = |label: Label<'_>| {
            let undefined = || Because(format!("label {} is not defined before this line", label.to_text()));
            self.labels.get(label).ok_or_else(undefined)
        };
        let pair = (find(label)?, find(other)?);
        self.end_line(cursor)?;
        Ok(pair)
    }

    #[inline]
    fn end_line(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Wrong> {
        if !cursor.end_of_line() {
            return Err(Expected("the end of the line"));
        }
        self.line += 1;
        Ok(())
    }

    #[inline]
    fn program(&mut self) -> Result<&mut MessageProgramBuilder, Wrong> {
        Self::program_of(&mut self.builder, self.rank)
    }

    /// The builder, if a rank's block is open.
    #[inline]
    fn program_of(
        builder: &mut Option<MessageProgramBuilder>,
        rank: Option<u32>,
    ) -> Result<&mut MessageProgramBuilder, Wrong> {
        match builder {
            Some(builder) if rank.is_some() => Ok(builder),
            _ => Err(Because("an op outside a rank's block".into())),
        }
    }

    fn finish(mut self) -> Result<MessageProgram, MessageError> {
        if self.in_comment {
            return Err(self.error("", "the text ends inside a comment ('*/' is missing)".into()));
        }
        if self.rank.is_some() {
            return Err(self.error("", "the text ends inside a rank's block ('}' is missing)".into()));
        }
        let Some(builder) = self.builder.take() else {
            return Err(self.error("", "'num_ranks' is missing".into()));
        };
        builder.finish()
    }

    #[cold]
    fn wrong(&self, wrong: Wrong, statement: &[u8], next: u8) -> MessageError {
        let label = Cursor::new(statement).line().trim_ascii_start();
        let len = label.iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_').unwrap_or(label.len());
        let label = match &label[..len] {
            b"rank" | b"num_ranks" | b"calc" | b"send" | b"recv" => "".into(),
            label => String::from_utf8_lossy(label),
        };
        let found = match next {
            b'\n' | b'\r' => "the line's end".to_owned(),
            byte => format!("'{}'", byte.escape_ascii()),
        };
        // An error after the line's end is about the line behind us.
        match wrong {
            Expected(what) => self.error(&label, format!("expected {what}, found {found}")),
            Because(message) => self.error(&label, message),
            Wrong::Op(MessageError::Invalid { rank, message, .. }) => {
                MessageError::Text { line: self.line + 1, rank: rank.or(self.rank), label: label.into_owned(), message }
            }
            Wrong::Op(other) => other,
        }
    }

    /// An error in the line being read.
    fn error(&self, label: &str, message: String) -> MessageError {
        MessageError::Text { line: self.line + 1, rank: self.rank, label: label.to_owned(), message }
    }
}

#[inline]
fn number(cursor: &mut Cursor<'_>, what: &'static str) -> Result<u64, Wrong> {
    cursor.spaces();
    match cursor.digits() {
        Digits::Number(value) => Ok(value),
        Digits::TooLarge => Err(Because(format!("{what}: a number of more than 64 bits"))),
        Digits::None => Err(Because(format!("expected {what}, a number, found '{}'", cursor.peek().escape_ascii()))),
    }
}

/// A size with its `b`.
#[inline]
fn size(cursor: &mut Cursor<'_>) -> Result<u64, Wrong> {
    let bytes = number(cursor, "the size")?;
    if cursor.eat_word(b"b") { Ok(bytes) } else { Err(Expected("'b' after the size")) }
}

#[inline]
fn peer(rank: u64) -> Result<Rank, Wrong> {
    u32::try_from(rank).map(Rank).map_err(|_| Because(format!("rank {rank} is outside the job")))
}

/// A tag; `None` for `-1`.
#[inline]
fn tag(cursor: &mut Cursor<'_>) -> Result<Option<u32>, Wrong> {
    if cursor.eat_word(b"-1") {
        return Ok(None);
    }
    let tag = number(cursor, "the tag")?;
    u32::try_from(tag).map(Some).map_err(|_| Because(format!("tag {tag}: at most 2^32 - 1")))
}

#[inline]
fn lanes(cursor: &mut Cursor<'_>) -> Result<Lanes, Wrong> {
    let mut lanes = Lanes::default();
    if cursor.eat_word(b"cpu") {
        lanes.cpu = lane(cursor, "the CPU lane")?;
    }
    if cursor.eat_word(b"nic") {
        lanes.nic = lane(cursor, "the NIC lane")?;
    }
    Ok(lanes)
}

fn lane(cursor: &mut Cursor<'_>, what: &'static str) -> Result<u8, Wrong> {
    let lane = number(cursor, what)?;
    u8::try_from(lane).map_err(|_| Because(format!("{what}: {lane}, at most 255")))
}
