//! The keys of one table: each is taken once, what is left over is unknown.

use super::{PerturbError, World};
use std::collections::BTreeSet;
use toml::{Table, Value};

pub(super) struct Fields {
    number: usize,
    kind: String,
    /// Where the table is inside the entry.
    path: String,
    table: Table,
    world: World,
    known: BTreeSet<String>,
}

type Found<T> = Result<T, PerturbError>;

impl Fields {
    /// The table of perturbation `number`.
    pub(super) fn new(number: usize, mut table: Table, world: World) -> Found<Self> {
        let kind = table.remove("kind");
        let mut fields = Self::of_kind(number, "no kind", table, world);
        match kind {
            Some(Value::String(kind)) => fields.kind = kind,
            Some(other) => return Err(fields.error(format!("`kind` is {}, not a name", show(&other)))),
            None => return Err(fields.missing("kind")),
        }
        Ok(fields)
    }

    pub(super) fn of_kind(number: usize, kind: &str, table: Table, world: World) -> Self {
        Self { number, kind: kind.to_owned(), path: String::new(), table, world, known: BTreeSet::new() }
    }

    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn world(&self) -> World {
        self.world
    }

    pub(super) fn keys(&self) -> Vec<String> {
        self.table.keys().cloned().collect()
    }

    pub(super) fn error(&self, message: String) -> PerturbError {
        PerturbError::Entry { number: self.number, kind: self.kind.clone(), message }
    }

    pub(super) fn missing(&self, key: &str) -> PerturbError {
        self.error(format!("`{}{key}` is missing", self.path))
    }

    fn wrong(&self, key: &str, expected: &str, value: &Value) -> PerturbError {
        self.error(format!("`{}{key}` must be {expected}, not {}", self.path, show(value)))
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.known.insert(key.to_owned());
        self.table.remove(key)
    }

    /// Nothing may be left over.
    pub(super) fn finish(self) -> Found<()> {
        let Some(unknown) = self.table.keys().next() else { return Ok(()) };
        let known: Vec<&str> = self.known.iter().map(String::as_str).collect();
        Err(self.error(format!("unknown key `{}{unknown}`; there are {}", self.path, known.join(", "))))
    }

    pub(super) fn table(&mut self, key: &str) -> Found<Option<Self>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Table(table)) => {
                let path = format!("{}{key}.", self.path);
                let kind = self.kind.clone();
                Ok(Some(Self { number: self.number, kind, path, table, world: self.world, known: BTreeSet::new() }))
            }
            Some(other) => Err(self.wrong(key, "a table", &other)),
        }
    }

    pub(super) fn string_if_any(&mut self, key: &str) -> Found<Option<String>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", &other)),
        }
    }

    pub(super) fn string(&mut self, key: &str) -> Found<String> {
        self.string_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    fn float_of(&self, key: &str, value: &Value) -> Found<f64> {
        match value {
            Value::Float(number) if number.is_finite() => Ok(*number),
            Value::Integer(number) => Ok(*number as f64),
            other => Err(self.wrong(key, "a number", other)),
        }
    }

    /// A number that must be there and be fine.
    pub(super) fn float_in(&mut self, key: &str, is_fine: impl Fn(f64) -> bool, expected: &str) -> Found<f64> {
        let value = self.take(key).ok_or_else(|| self.missing(key))?;
        let number = self.float_of(key, &value)?;
        if is_fine(number) { Ok(number) } else { Err(self.wrong(key, expected, &value)) }
    }

    pub(super) fn floats(&mut self, key: &str) -> Found<Option<Vec<f64>>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let Value::Array(items) = value else { return Err(self.wrong(key, "a list of numbers", &value)) };
        items.iter().map(|item| self.float_of(key, item)).collect::<Found<_>>().map(Some)
    }

    fn integer_of(&self, key: &str, value: &Value) -> Found<u64> {
        let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| self.wrong(key, "a whole number from 0", value))
    }

    pub(super) fn integer_if_any(&mut self, key: &str) -> Found<Option<u64>> {
        self.take(key).map(|value| self.integer_of(key, &value)).transpose()
    }

    pub(super) fn integer(&mut self, key: &str) -> Found<u64> {
        self.integer_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn integers(&mut self, key: &str) -> Found<Option<Vec<u64>>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let Value::Array(items) = value else { return Err(self.wrong(key, "a list of whole numbers", &value)) };
        if items.is_empty() {
            return Err(self.error(format!("`{}{key}` is empty", self.path)));
        }
        items.iter().map(|item| self.integer_of(key, item)).collect::<Found<_>>().map(Some)
    }

    /// `[from, to)` with something in it.
    pub(super) fn pair(&mut self, key: &str) -> Found<Option<(u64, u64)>> {
        match self.integers(key)?.as_deref() {
            None => Ok(None),
            Some([from, to]) if from < to => Ok(Some((*from, *to))),
            Some(_) => Err(self.error(format!("`{key}` must be [from, to] with from below to; `to` is not in it"))),
        }
    }

    pub(super) fn strings(&mut self, key: &str) -> Found<Option<Vec<String>>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let texts =
            value.as_array().and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        match texts {
            Some(texts) if !Vec::is_empty(&texts) => Ok(Some(texts)),
            _ => Err(self.wrong(key, "a list of names", &value)),
        }
    }

    /// A rank of the world.
    pub(super) fn rank(&self, rank: u64) -> Found<u32> {
        let size = self.world.size;
        let found = u32::try_from(rank).ok().filter(|rank| *rank < size);
        found.ok_or_else(|| self.error(format!("rank {rank} does not exist: the world has {size} ranks")))
    }

    pub(super) fn rank_named(&self, text: &str) -> Found<u32> {
        let rank = text.trim().parse().map_err(|_| self.error(format!("{text:?} is not a rank")))?;
        self.rank(rank)
    }

    /// Ranks chosen by `ranks`, `nodes` and `stride` together, ascending. There must be one.
    pub(super) fn selected_ranks(&mut self) -> Found<Vec<u32>> {
        let mut ranks = self.selected_ranks_in_order()?;
        ranks.sort_unstable();
        ranks.dedup();
        Ok(ranks)
    }

    /// The same in the order they are written in.
    pub(super) fn selected_ranks_in_order(&mut self) -> Found<Vec<u32>> {
        let mut ranks = match self.take("ranks") {
            None => Vec::new(),
            Some(Value::String(text)) => self.ranks_of(&text)?,
            Some(Value::Array(items)) => {
                let rank = |item: &Value| self.rank(self.integer_of("ranks", item)?);
                items.iter().map(rank).collect::<Found<_>>()?
            }
            Some(other) => {
                return Err(self.wrong("ranks", "a list of ranks, or a text like \"0-7,64\" or \"all\"", &other));
            }
        };
        for node in self.integers("nodes")?.unwrap_or_default() {
            let World { size, gpus, .. } = self.world;
            let nodes = size.div_ceil(gpus);
            let node = u32::try_from(node).ok().filter(|node| *node < nodes);
            let node =
                node.ok_or_else(|| self.error(format!("`nodes`: the world has {nodes} nodes, 0 to {}", nodes - 1)))?;
            ranks.extend(node * gpus..(node * gpus).saturating_add(gpus).min(size));
        }
        if let Some(mut stride) = self.table("stride")? {
            let (first, step) = (stride.integer("first")?, stride.integer("step")?);
            let first = stride.rank(first)?;
            if step == 0 {
                return Err(stride.error("`stride.step` must be at least 1".to_owned()));
            }
            stride.finish()?;
            ranks.extend((first..self.world.size).step_by(usize::try_from(step).unwrap_or(usize::MAX)));
        }
        if ranks.is_empty() {
            return Err(self.error("it names no rank: give `ranks`, `nodes` or `stride`".to_owned()));
        }
        Ok(ranks)
    }

    fn ranks_of(&self, text: &str) -> Found<Vec<u32>> {
        if text.trim() == "all" {
            return Ok((0..self.world.size).collect());
        }
        let mut ranks = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (self.rank_named(first)?, self.rank_named(last)?);
            if first > last {
                return Err(self.error(format!("`ranks`: {part:?} ends before it begins")));
            }
            ranks.extend(first..=last);
        }
        Ok(ranks)
    }
}

/// A value as it was written, nearly.
fn show(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(truth) => truth.to_string(),
        Value::Datetime(time) => time.to_string(),
        Value::Array(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(", ")),
        Value::Table(_) => "a table".to_owned(),
    }
}
