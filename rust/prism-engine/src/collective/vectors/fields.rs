//! Inputs by name, each looked at once, none overlooked.

use super::VectorError;
use crate::collective::window::LIMIT;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Remarks that go with an input and do not matter.
const REMARKS: [&str; 2] = ["name", "note"];

/// The inputs of a model.
pub(super) struct Fields<'a> {
    model: &'static str,
    inputs: &'a Map<String, Value>,
    asked: BTreeSet<&'static str>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(model: &'static str, inputs: &'a Value) -> Result<Self, VectorError> {
        let Some(inputs) = inputs.as_object() else {
            return Err(VectorError::Input {
                model: model.to_owned(),
                key: "inputs".to_owned(),
                what: "must be an object of named inputs".to_owned(),
            });
        };
        let fields = Self { model, inputs, asked: BTreeSet::new() };
        for remark in REMARKS {
            if inputs.get(remark).is_some_and(|value| !value.is_string()) {
                return Err(fields.error(remark, "must be text"));
            }
        }
        Ok(fields)
    }

    pub(super) fn model(&self) -> &'static str {
        self.model
    }

    pub(super) fn error(&self, key: &str, what: impl Into<String>) -> VectorError {
        VectorError::Input { model: self.model.to_owned(), key: key.to_owned(), what: what.into() }
    }

    /// An input that must be there.
    pub(super) fn take<T: Deserialize<'a>>(&mut self, key: &'static str) -> Result<T, VectorError> {
        self.optional(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// An input that may be absent or null.
    pub(super) fn optional<T: Deserialize<'a>>(&mut self, key: &'static str) -> Result<Option<T>, VectorError> {
        self.asked.insert(key);
        let Some(value) = self.inputs.get(key) else { return Ok(None) };
        Option::deserialize(value).map_err(|error| self.error(key, format!("does not fit: {error}")))
    }

    /// When every rank arrives: `n` of them, where `n` is given.
    pub(super) fn arrivals(&mut self) -> Result<Vec<i64>, VectorError> {
        let arrivals: Vec<i64> = self.take("arrival_ns")?;
        if let Some(n) = self.optional::<usize>("n")? {
            self.expect_len("arrival_ns", arrivals.len(), n)?;
        }
        if arrivals.is_empty() {
            return Err(self.error("arrival_ns", "is empty: there must be at least one rank"));
        }
        if let Some(rank) = arrivals.iter().position(|arrival| !(-LIMIT..=LIMIT).contains(arrival)) {
            return Err(self.error("arrival_ns", format!("of rank {rank} is {}, beyond 2^60", arrivals[rank])));
        }
        Ok(arrivals)
    }

    /// One cost per rank.
    pub(super) fn costs(&mut self, key: &'static str, n: usize) -> Result<Vec<i64>, VectorError> {
        let costs: Vec<i64> = self.take(key)?;
        self.check_costs(key, &costs, n)?;
        Ok(costs)
    }

    pub(super) fn check_costs(&self, key: &str, costs: &[i64], n: usize) -> Result<(), VectorError> {
        self.expect_len(key, costs.len(), n)?;
        match costs.iter().position(|cost| !(0..=LIMIT).contains(cost)) {
            Some(rank) => Err(self.error(key, format!("of rank {rank} is {}, not within 0 and 2^60", costs[rank]))),
            None => Ok(()),
        }
    }

    /// A number of at least `least`.
    pub(super) fn at_least(&mut self, key: &'static str, least: i64) -> Result<i64, VectorError> {
        let number = self.take(key)?;
        self.check_number(key, number, least)?;
        Ok(number)
    }

    pub(super) fn check_number(&self, key: &str, number: i64, least: i64) -> Result<(), VectorError> {
        if (least..=LIMIT).contains(&number) {
            return Ok(());
        }
        Err(self.error(key, format!("is {number}, not within {least} and 2^60")))
    }

    pub(super) fn expect_len(&self, key: &str, got: usize, expected: usize) -> Result<(), VectorError> {
        if got == expected {
            return Ok(());
        }
        Err(self.error(key, format!("has {got} entries, expected {expected}")))
    }

    /// Can `edges` edges of the highest `cost` be added to the last arrival without leaving the evaluators' range?
    pub(super) fn check_range(&self, key: &str, arrivals: &[i64], edges: i128, cost: i128) -> Result<(), VectorError> {
        let last = i128::from(arrivals.iter().copied().max().unwrap_or(0)).max(0);
        if edges.saturating_mul(cost).saturating_add(last) <= i128::from(LIMIT) {
            return Ok(());
        }
        Err(self.error(key, "is so large that times may exceed 2^60"))
    }

    /// Refuses what was not asked for. To be called when everything was.
    pub(super) fn finish(&self) -> Result<(), VectorError> {
        let is_known = |key: &str| self.asked.contains(key) || REMARKS.contains(&key);
        match self.inputs.keys().find(|key| !is_known(key)) {
            None => Ok(()),
            Some(key) => {
                let known: Vec<_> = self.asked.iter().copied().collect();
                Err(self.error(key, format!("is not an input of the model; its inputs are: {}", known.join(", "))))
            }
        }
    }
}

/// The highest of some costs that are not negative.
pub(super) fn highest<'a>(costs: impl IntoIterator<Item = &'a i64>) -> i128 {
    costs.into_iter().copied().max().unwrap_or(0).into()
}
