//! The readable form: for tests, diffs and small graphs by hand.
//!
//! ```text
//! prism-graph 1
//! world 4
//! meta "device" "h100-sxm"
//! name "gemm"
//! comm 0-3
//! comm 0-2/2
//! template "stage 0"
//!   +5000 s0 compute 1000000 Gemm Modelled "gemm"
//!   +5000 s1 AllReduce c0 Float32 1024 Sum
//!   +0 s1 Send c1 Bfloat16 4096 peer 1 group 1
//! rank 0-3 template 0 comms 0
//! override 3 op 0 1300000
//! ```
//! One line per thing, in order of their ids; times in picoseconds; `#` begins a comment line. Member lists are runs
//! `first-last` or `first-last/step`. Neighbouring ranks with equal template and communicators share a line. A root or
//! group of 0 is not written.

use crate::graph::columns::{compute_class, provenance, reduction};
use crate::graph::op::{CollectiveKind, DataType, Op, OpKind};
use crate::graph::store::runs;
use crate::graph::{Graph, GraphBuilder, GraphError};
use crate::ids::{CommId, EventId, NameId, Rank, SlotId, StreamId, TemplateId};
use crate::units::SimTime;
use std::fmt::{Debug, Write};
use std::str::{FromStr, SplitAsciiWhitespace};

const FIRST_LINE: &str = "prism-graph 1";
/// The text form is for people: no short text may stand for more ranks, or more members, than these.
const MAX_RANKS: u32 = 1 << 20;
const MAX_MEMBERS: usize = 1 << 24;

impl Graph {
    /// The readable form; [`Graph::from_text`] gives back an equal graph.
    pub fn to_text(&self) -> String {
        let mut out = format!("{FIRST_LINE}\nworld {}\n", self.world_size());
        self.write_tables(&mut out).expect("writing to a string cannot fail");
        out
    }

    fn write_tables(&self, out: &mut String) -> std::fmt::Result {
        for (key, value) in &self.meta {
            writeln!(out, "meta {} {}", quoted(key), quoted(value))?;
        }
        for name in &self.names {
            writeln!(out, "name {}", quoted(name))?;
        }
        for comm in 0..self.num_comms() {
            out.push_str("comm");
            write_runs(out, self.comms.members(comm))?;
            out.push('\n');
        }
        for template in 0..self.num_templates() {
            let view = self.template(TemplateId(template as u32));
            writeln!(out, "template {}", quoted(view.name()))?;
            for op in view.iter() {
                writeln!(out, "  {}", op_text(&op, &|name| self.names[name as usize].as_str()))?;
            }
        }
        self.write_ranks(out)
    }

    fn write_ranks(&self, out: &mut String) -> std::fmt::Result {
        let same = |a: u32, b: u32| {
            self.ranks.template[a as usize] == self.ranks.template[b as usize]
                && self.ranks.slots(a as usize) == self.ranks.slots(b as usize)
        };
        let mut rank = 0;
        while rank < self.world_size() {
            let last = (rank..self.world_size()).take_while(|other| same(rank, *other)).last().unwrap_or(rank);
            let range = if last > rank { format!("{rank}-{last}") } else { rank.to_string() };
            write!(out, "rank {range} template {} comms", self.ranks.template[rank as usize])?;
            for comm in self.ranks.slots(rank as usize) {
                write!(out, " {comm}")?;
            }
            out.push('\n');
            rank = last + 1;
        }
        for rank in 0..self.world_size() {
            for (op, duration) in self.rank_overrides(Rank(rank)) {
                writeln!(out, "override {rank} op {op} {}", duration.as_ps())?;
            }
        }
        Ok(())
    }

    /// A graph from its readable form. Limits: 2^20 ranks, 2^24 communicator members.
    pub fn from_text(text: &str) -> Result<Self, GraphError> {
        let mut parser = Parser::default();
        let mut offset = 0;
        for line in text.split_inclusive('\n') {
            parser.line(line.trim()).map_err(|message| GraphError::format(offset, message))?;
            offset += line.len() as u64;
        }
        parser.finish().map_err(|message| GraphError::format(offset, message))?.finish()
    }
}

/// An op as a line of text; `name` gives the text of a name id.
pub(crate) fn op_text<'a>(op: &Op, name: &dyn Fn(u32) -> &'a str) -> String {
    let what = match op.kind {
        OpKind::Compute { duration, name: id, class, provenance } => {
            format!("compute {} {class:?} {provenance:?} {}", duration.as_ps(), quoted(name(id.0)))
        }
        OpKind::Collective { slot, kind, dtype, reduce, root, count, group } => {
            format!(
                "{kind:?} c{slot} {dtype:?} {count} {reduce:?}{}{}",
                not_zero("root", root),
                not_zero("group", group)
            )
        }
        OpKind::PointToPoint { slot, is_send, dtype, peer, count, group } => {
            let kind = if is_send { "Send" } else { "Recv" };
            format!("{kind} c{slot} {dtype:?} {count} peer {peer}{}", not_zero("group", group))
        }
        OpKind::EventRecord { event } => format!("event_record e{event}"),
        OpKind::EventWait { event } => format!("event_wait e{event}"),
        OpKind::StreamSync => "stream_sync".to_owned(),
        OpKind::EventSync { event } => format!("event_sync e{event}"),
        OpKind::DeviceSync => "device_sync".to_owned(),
        OpKind::Alloc { bytes } => format!("alloc {bytes}"),
        OpKind::Free { bytes } => format!("free {bytes}"),
        OpKind::TrainingBegin => "training_begin".to_owned(),
        OpKind::IterationEnd => "iteration_end".to_owned(),
    };
    format!("+{} s{} {what}", op.host_gap.as_ps(), op.stream)
}

fn not_zero(word: &str, value: u32) -> String {
    if value == 0 { String::new() } else { format!(" {word} {value}") }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string always serialises")
}

fn write_runs(out: &mut String, members: &[u32]) -> std::fmt::Result {
    let mut rest = members;
    for run in runs(members) {
        let (listed, tail) = rest.split_at(run.count as usize);
        rest = tail;
        let step = run.stride;
        match listed {
            // Steps down wrap; they are written one by one, as are repeated members (which only a broken list has).
            [first, .., last] if last > first && step <= last - first => {
                write!(out, " {first}-{last}")?;
                if step > 1 {
                    write!(out, "/{step}")?;
                }
            }
            singles => singles.iter().try_for_each(|member| write!(out, " {member}"))?,
        }
    }
    Ok(())
}

#[derive(Default)]
struct Parser {
    begun: bool,
    builder: Option<GraphBuilder>,
    world_size: u32,
    members: usize,
    /// The template being read; it ends with the next line that is no op.
    template: Option<(String, Vec<Op>)>,
}

type Parsed<T> = Result<T, String>;

impl Parser {
    fn line(&mut self, line: &str) -> Parsed<()> {
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if !self.begun {
            self.begun = line == FIRST_LINE;
            return if self.begun { Ok(()) } else { Err(format!("the first line is not \"{FIRST_LINE}\"")) };
        }
        if line.starts_with('+') {
            let (_, ops) = self.template.as_mut().ok_or("an op outside of a template")?;
            let builder = self.builder.as_mut().ok_or("an op before the world size")?;
            ops.push(parse_op(line, builder)?);
            return Ok(());
        }
        self.end_template()?;
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        if word == "world" {
            return self.world(rest);
        }
        let builder = self.builder.as_mut().ok_or("the second line is not \"world <number of ranks>\"")?;
        let mut words = rest.split_ascii_whitespace();
        match word {
            "meta" => {
                let [key, value] = strings(rest)?;
                builder.set_meta(key, value);
            }
            "name" => {
                let [name] = strings(rest)?;
                builder.intern_name(&name);
            }
            "comm" => {
                let members = parse_runs(words, self.world_size, MAX_MEMBERS - self.members)?;
                self.members += members.len();
                builder.add_comm(members.into_iter().map(Rank).collect());
            }
            "template" => {
                let [name] = strings(rest)?;
                self.template = Some((name, Vec::new()));
            }
            "rank" => self.members += parse_ranks(words, builder, self.world_size, MAX_MEMBERS - self.members)?,
            "override" => {
                let rank = Rank(number(words.next())?);
                let op = labelled(&mut words, "op")?;
                let duration = SimTime::from_ps(number(words.next())?);
                end_of(words)?;
                builder.override_duration(rank, op, duration);
            }
            other => return Err(format!("\"{other}\" begins no line of this form")),
        }
        Ok(())
    }

    fn world(&mut self, rest: &str) -> Parsed<()> {
        self.world_size = number(Some(rest.trim()))?;
        if self.world_size > MAX_RANKS {
            return Err(format!("more than {MAX_RANKS} ranks, the limit of the text form"));
        }
        match self.builder.replace(GraphBuilder::new(self.world_size)) {
            None => Ok(()),
            Some(_) => Err("a second world size".to_owned()),
        }
    }

    fn end_template(&mut self) -> Parsed<()> {
        if let (Some((name, ops)), Some(builder)) = (self.template.take(), &mut self.builder) {
            builder.add_template(&name, &ops).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn finish(mut self) -> Parsed<GraphBuilder> {
        self.end_template()?;
        self.builder.ok_or_else(|| "the text ends before the world size".to_owned())
    }
}

fn number<T: FromStr>(word: Option<&str>) -> Parsed<T> {
    let word = word.ok_or("the line ends where a number belongs")?;
    word.parse().map_err(|_| format!("\"{word}\" is not a number that fits here"))
}

/// The number after `letter`, as in `s3`.
fn lettered(word: Option<&str>, letter: char) -> Parsed<u32> {
    let word = word.ok_or_else(|| format!("the line ends where {letter}<number> belongs"))?;
    number(Some(word.strip_prefix(letter).ok_or_else(|| format!("\"{word}\" is not {letter}<number>"))?))
}

/// The number after the word `label`.
fn labelled(words: &mut SplitAsciiWhitespace, label: &str) -> Parsed<u32> {
    match words.next() {
        Some(word) if word == label => number(words.next()),
        other => Err(format!("\"{}\" where \"{label} <number>\" belongs", other.unwrap_or(""))),
    }
}

/// The number after `label` if the line goes on with it, else 0.
fn optional(words: &mut SplitAsciiWhitespace, label: &str) -> Parsed<u32> {
    if words.clone().next() == Some(label) { labelled(words, label) } else { Ok(0) }
}

fn end_of(mut words: SplitAsciiWhitespace) -> Parsed<()> {
    words.next().map_or(Ok(()), |word| Err(format!("\"{word}\" is too much on this line")))
}

/// The value among `values` whose name is `word`.
fn named<T: Debug + Copy>(word: Option<&str>, values: impl Fn(u8) -> Option<T>, what: &str) -> Parsed<T> {
    let word = word.ok_or_else(|| format!("the line ends where a {what} belongs"))?;
    let mut all = (0..=u8::MAX).filter_map(values);
    all.find(|value| format!("{value:?}") == word).ok_or_else(|| format!("\"{word}\" is no {what}"))
}

fn strings<const N: usize>(text: &str) -> Parsed<[String; N]> {
    let parsed: Result<Vec<String>, _> = serde_json::Deserializer::from_str(text).into_iter().collect();
    let parsed = parsed.map_err(|error| format!("not {N} quoted text(s): {error}"))?;
    parsed.try_into().map_err(|found: Vec<_>| format!("{} quoted texts where {N} belong", found.len()))
}

fn parse_runs(words: SplitAsciiWhitespace, world_size: u32, limit: usize) -> Parsed<Vec<u32>> {
    let mut members = Vec::new();
    for word in words {
        let (range, step) = word.split_once('/').unwrap_or((word, "1"));
        let step: u32 = number(Some(step))?;
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (number(Some(first))?, number(Some(last))?);
        if last >= world_size {
            return Err(format!("{word} reaches beyond the {world_size} ranks"));
        }
        let leads = last >= first && step > 0 && (last - first).is_multiple_of(step);
        if !leads {
            return Err(format!("{word} does not lead from its first to its last rank"));
        }
        if members.len() + ((last - first) / step) as usize >= limit {
            return Err(format!("more than {MAX_MEMBERS} members, the limit of the text form"));
        }
        members.extend((first..=last).step_by(step as usize));
    }
    Ok(members)
}

/// Sets the ranks of a line; the answer is the number of memberships.
fn parse_ranks(
    mut words: SplitAsciiWhitespace,
    builder: &mut GraphBuilder,
    world_size: u32,
    limit: usize,
) -> Parsed<usize> {
    let range = words.next().ok_or("the line ends where ranks belong")?;
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let (first, last): (u32, u32) = (number(Some(first))?, number(Some(last))?);
    let template = TemplateId(labelled(&mut words, "template")?);
    if words.next() != Some("comms") {
        return Err("\"comms\" and the communicators of the slots belong at the end of the line".to_owned());
    }
    let comms = words.map(|word| number(Some(word)).map(CommId)).collect::<Parsed<Vec<_>>>()?;
    if last < first || last >= world_size {
        return Err(format!("{range} are not ranks of the {world_size}"));
    }
    let memberships = (last - first + 1) as usize * comms.len();
    if memberships > limit {
        return Err(format!("more than {MAX_MEMBERS} members, the limit of the text form"));
    }
    (first..=last).for_each(|rank| builder.set_rank(Rank(rank), template, comms.clone()));
    Ok(memberships)
}

fn parse_op(line: &str, builder: &mut GraphBuilder) -> Parsed<Op> {
    let mut words = line.split_ascii_whitespace();
    let gap = words.next().and_then(|word| word.strip_prefix('+'));
    let host_gap = SimTime::from_ps(number(gap)?);
    let stream = StreamId(lettered(words.next(), 's')?);
    let word = words.next().ok_or("the line ends where an op belongs")?;
    let mut event = || lettered(words.next(), 'e').map(EventId);
    let kind = match word {
        "compute" => return parse_compute(words, line, builder).map(|kind| Op { host_gap, stream, kind }),
        "event_record" => OpKind::EventRecord { event: event()? },
        "event_wait" => OpKind::EventWait { event: event()? },
        "event_sync" => OpKind::EventSync { event: event()? },
        "stream_sync" => OpKind::StreamSync,
        "device_sync" => OpKind::DeviceSync,
        "alloc" => OpKind::Alloc { bytes: number(words.next())? },
        "free" => OpKind::Free { bytes: number(words.next())? },
        "training_begin" => OpKind::TrainingBegin,
        "iteration_end" => OpKind::IterationEnd,
        _ => parse_comm(word, &mut words)?,
    };
    end_of(words)?;
    Ok(Op { host_gap, stream, kind })
}

fn parse_compute(mut words: SplitAsciiWhitespace, line: &str, builder: &mut GraphBuilder) -> Parsed<OpKind> {
    let duration = SimTime::from_ps(number(words.next())?);
    let class = named(words.next(), compute_class, "compute class")?;
    let provenance = named(words.next(), provenance, "provenance")?;
    // The name is the rest of the line: it may contain spaces.
    let [name] = strings(line.find('"').map_or("", |at| &line[at..]))?;
    let name: NameId = builder.intern_name(&name);
    Ok(OpKind::Compute { duration, name, class, provenance })
}

fn parse_comm(word: &str, words: &mut SplitAsciiWhitespace) -> Parsed<OpKind> {
    let slot = SlotId(lettered(words.next(), 'c')?);
    let dtype = named(words.next(), DataType::from_u8, "data type")?;
    let count = number(words.next())?;
    if let "Send" | "Recv" = word {
        let peer = labelled(words, "peer")?;
        let group = optional(words, "group")?;
        return Ok(OpKind::PointToPoint { slot, is_send: word == "Send", dtype, peer, count, group });
    }
    let kind = named(Some(word), CollectiveKind::from_u8, "op")?;
    let reduce = named(words.next(), reduction, "reduction")?;
    let root = optional(words, "root")?;
    let group = optional(words, "group")?;
    Ok(OpKind::Collective { slot, kind, dtype, reduce, root, count, group })
}
