//! Perturbations as text. Unknown kinds and keys, values out of range and ranks outside the world are errors that name the
//! perturbation (by number, from 0, and kind) and the key.

use super::death::{Death, RankDeath};
use super::imbalance::{Imbalance, zipf};
use super::jitter::{Distribution, Jitter, JitterMode};
use super::link::{LinkChange, SlowLink};
use super::scope::{RankSet, Scope, Window};
use super::straggler::Straggler;
use super::throttle::ThermalThrottle;
use super::world::{World, card_bit};
use super::{Perturbations, Rule};
use crate::graph::op::ComputeClass;
use crate::ids::Rank;
use crate::units::SimTime;
use fields::Fields;
use std::collections::BTreeMap;
use std::sync::Arc;
use thiserror::Error;

mod fields;

/// Slowest a rank may be made, and fastest (its inverse).
const MAX_FACTOR: f64 = 1e6;
/// Decisions of a thermal rule must not outnumber its ops beyond measure.
const MIN_PERIOD_NS: u64 = 100_000;

/// Perturbations that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PerturbError {
    /// The text is not TOML.
    #[error("perturbations: {message}")]
    Syntax {
        /// Where and what.
        message: String,
    },
    /// One of them is wrong.
    #[error("perturb[{number}] ({kind}): {message}")]
    Entry {
        /// Which, from 0.
        number: usize,
        /// Its kind.
        kind: String,
        /// What is wrong; names the key.
        message: String,
    },
    /// More than there is room for.
    #[error("perturbations: at most {most} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
}

impl Perturbations {
    /// Reads `[[perturb]]` tables, and a table `[slow]` of `RANK = FACTOR` as the short form of constant stragglers.
    pub fn from_toml(text: &str, world: World) -> Result<Self, PerturbError> {
        let syntax = |message: String| PerturbError::Syntax { message };
        let document: toml::Table = text.parse().map_err(|error: toml::de::Error| syntax(error.to_string()))?;
        let mut rules: Vec<Arc<dyn Rule>> = Vec::new();
        for (key, value) in document {
            match (key.as_str(), value) {
                ("perturb", toml::Value::Array(entries)) => {
                    for (number, entry) in entries.into_iter().enumerate() {
                        let toml::Value::Table(table) = entry else {
                            return Err(syntax(format!("perturb[{number}] must be a table: write [[perturb]]")));
                        };
                        rules.push(rule(Fields::new(number, table, world)?)?);
                    }
                }
                ("slow", toml::Value::Table(table)) => {
                    let mut fields = Fields::of_kind(rules.len(), "slow", table, world);
                    for rank in fields.keys() {
                        let factor =
                            fields.float_in(&rank, |factor| factor > 0.0 && factor <= MAX_FACTOR, "above 0")?;
                        let rank = fields.rank_named(&rank)?;
                        rules.push(Arc::new(Straggler { scope: Scope::of(RankSet::of([rank])), factor }));
                    }
                }
                ("perturb", _) => return Err(syntax("`perturb` must be a list of tables: write [[perturb]]".into())),
                ("group_failure" | "spare", _) => {
                    let message =
                        format!("`{key}` makes other steps of a job: only a replay takes it (`prism replay`)");
                    return Err(syntax(message));
                }
                (other, _) => return Err(syntax(format!("unknown key `{other}`: there are `perturb` and `slow`"))),
            }
        }
        Self::new(rules)
    }
}

type Parsed = Result<Arc<dyn Rule>, PerturbError>;

fn rule(mut fields: Fields) -> Parsed {
    let rule: Arc<dyn Rule> = match fields.kind() {
        "straggler" => Arc::new(straggler(&mut fields)?),
        "thermal-throttle" => Arc::new(throttle(&mut fields)?),
        "slow-link" => Arc::new(slow_link(&mut fields)?),
        "jitter" => Arc::new(jitter(&mut fields)?),
        "rank-death" => Arc::new(death(&mut fields)?),
        "imbalance" => Arc::new(imbalance(&mut fields)?),
        _ => {
            let known = "straggler, thermal-throttle, slow-link, jitter, rank-death and imbalance";
            return Err(fields.error(format!("unknown kind; there are {known}")));
        }
    };
    fields.finish()?;
    Ok(rule)
}

fn window(fields: &mut Fields) -> Result<Window, PerturbError> {
    let iterations = fields.pair("iterations")?;
    let time = fields.pair("time_ns")?;
    let limit = |key: &str, value: u64, most: u64| {
        if value <= most { Ok(value) } else { Err(fields.error(format!("`{key}` must be at most {most}"))) }
    };
    let mut window = Window::default();
    if let Some((from, to)) = iterations {
        let most = u64::from(u32::MAX);
        window.iterations = Some(limit("iterations", from, most)? as u32..limit("iterations", to, most)? as u32);
    }
    if let Some((from, to)) = time {
        let most = (i64::MAX / 1000) as u64;
        let at = |value: u64| Ok::<_, PerturbError>(SimTime::from_ns(limit("time_ns", value, most)? as i64));
        window.time = Some(at(from)?..at(to)?);
    }
    Ok(window)
}

fn scope(fields: &mut Fields) -> Result<Scope, PerturbError> {
    let ranks = RankSet::of(fields.selected_ranks()?);
    let classes = fields.strings("classes")?.unwrap_or_default();
    let classes = classes.iter().map(|class| class_of(fields, class)).collect::<Result<_, _>>()?;
    let names = fields.strings("names")?.unwrap_or_default();
    Ok(Scope { ranks, window: window(fields)?, classes, names })
}

/// Classes by name, in their order.
const CLASSES: [(&str, ComputeClass); 5] = [
    ("kernel", ComputeClass::Kernel),
    ("gemm", ComputeClass::Gemm),
    ("operator", ComputeClass::Operator),
    ("memcpy", ComputeClass::Memcpy),
    ("memset", ComputeClass::Memset),
];

fn class_of(fields: &Fields, name: &str) -> Result<ComputeClass, PerturbError> {
    let found = CLASSES.iter().find(|(known, _)| *known == name).map(|(_, class)| *class);
    let known = CLASSES.map(|(known, _)| known).join(", ");
    found.ok_or_else(|| fields.error(format!("`classes` has {name:?}; there are {known}")))
}

fn factor(fields: &mut Fields, key: &str) -> Result<f64, PerturbError> {
    fields.float_in(key, |factor| factor > 0.0 && factor <= MAX_FACTOR, "above 0 and at most 1e6")
}

fn straggler(fields: &mut Fields) -> Result<Straggler, PerturbError> {
    Ok(Straggler { scope: scope(fields)?, factor: factor(fields, "factor")? })
}

fn jitter(fields: &mut Fields) -> Result<Jitter, PerturbError> {
    let name = fields.string("distribution")?;
    let mut number = |key: &str, least: f64| fields.float_in(key, |x| x >= least && x.abs() <= 1e12, "in range");
    let distribution = match name.as_str() {
        "normal" => Distribution::Normal { mean: number("mean", -1e12)?, std: number("std", 0.0)? },
        "lognormal" => Distribution::LogNormal { mu: number("mu", -100.0)?, sigma: number("sigma", 0.0)? },
        "uniform" => Distribution::Uniform { low: number("low", -1e12)?, high: number("high", -1e12)? },
        "gamma" => Distribution::Gamma { shape: number("shape", 1e-3)?, scale: number("scale", 0.0)? },
        other => {
            let message = format!("`distribution` is {other:?}; there are normal, lognormal, uniform and gamma");
            return Err(fields.error(message));
        }
    };
    if matches!(distribution, Distribution::Uniform { low, high } if low > high) {
        return Err(fields.error("`low` is above `high`".into()));
    }
    let mode = match fields.string("mode")?.as_str() {
        "multiply" => JitterMode::Multiply,
        "add" => JitterMode::Add,
        other => return Err(fields.error(format!("`mode` is {other:?}: it must be multiply or add"))),
    };
    Ok(Jitter { scope: scope(fields)?, distribution, mode, seed: fields.integer("seed")? })
}

fn death(fields: &mut Fields) -> Result<RankDeath, PerturbError> {
    let rank = fields.integer("rank")?;
    let rank = Rank(fields.rank(rank)?);
    let death = match (fields.integer_if_any("time_ns")?, fields.integer_if_any("iteration")?) {
        (Some(time), None) => Death::At(SimTime::from_ns(i64::try_from(time).unwrap_or(i64::MAX))),
        (None, Some(count)) => Death::AfterIterations(u32::try_from(count).unwrap_or(u32::MAX)),
        _ => return Err(fields.error("either `time_ns` or `iteration` must be given".into())),
    };
    Ok(RankDeath { rank, death })
}

fn imbalance(fields: &mut Fields) -> Result<Imbalance, PerturbError> {
    let ranks = fields.selected_ranks_in_order()?;
    let one = fields.has("factor").then(|| factor(fields, "factor")).transpose()?;
    let each = fields.floats("factors")?;
    let exponent = fields.has("zipf").then(|| fields.float_in("zipf", |x| (0.0..=16.0).contains(&x), "0 to 16"));
    let exponent = exponent.transpose()?;
    let seed = fields.integer_if_any("seed")?;
    if seed.is_some() && exponent.is_none() {
        return Err(fields.error("`seed` goes with `zipf`".into()));
    }
    let factors = match (one, each, exponent) {
        (Some(factor), None, None) => vec![factor; ranks.len()],
        (None, Some(each), None) => each,
        (None, None, Some(exponent)) => zipf(exponent, ranks.len(), seed),
        _ => return Err(fields.error("one of `factor`, `factors` and `zipf` must be given".into())),
    };
    if factors.len() != ranks.len() {
        return Err(fields.error(format!("`factors` has {} entries for {} ranks", factors.len(), ranks.len())));
    }
    if let Some(bad) = factors.iter().find(|factor| !(**factor >= 0.0 && **factor <= MAX_FACTOR)) {
        return Err(fields.error(format!("`factors` has {bad}: they must be 0 to 1e6")));
    }
    let factors: BTreeMap<Rank, f64> = ranks.iter().copied().map(Rank).zip(factors).collect();
    if factors.len() != ranks.len() {
        return Err(fields.error("`ranks` names a rank twice".into()));
    }
    Ok(Imbalance { scope: scope_of(fields, RankSet::of(ranks))?, factors })
}

fn scope_of(fields: &mut Fields, ranks: RankSet) -> Result<Scope, PerturbError> {
    let classes = fields.strings("classes")?.unwrap_or_default();
    let classes = classes.iter().map(|class| class_of(fields, class)).collect::<Result<_, _>>()?;
    let names = fields.strings("names")?.unwrap_or_default();
    Ok(Scope { ranks, window: window(fields)?, classes, names })
}

fn slow_link(fields: &mut Fields) -> Result<SlowLink, PerturbError> {
    let world = fields.world();
    let nics = fields.integers("nics")?;
    let scope = fields.string_if_any("scope")?.unwrap_or_else(|| if nics.is_some() { "inter" } else { "both" }.into());
    let (is_intra, is_inter) = match scope.as_str() {
        "intra" => (true, false),
        "inter" => (false, true),
        "both" => (true, true),
        other => return Err(fields.error(format!("`scope` is {other:?}: it must be intra, inter or both"))),
    };
    if nics.is_some() && is_intra {
        return Err(fields.error("`nics` are between nodes: `scope` must be inter".into()));
    }
    if let Some(bad) = nics.iter().flatten().find(|nic| **nic >= u64::from(world.nics)) {
        return Err(fields.error(format!("`nics` has {bad}: a node has {} cards", world.nics)));
    }
    let ranks = fields.selected_ranks()?;
    let mut cards = BTreeMap::new();
    if is_inter {
        for rank in &ranks {
            let node: &mut u64 = cards.entry(rank / world.gpus).or_default();
            match &nics {
                Some(nics) => nics.iter().for_each(|nic| *node |= card_bit(*nic as u32)),
                None => *node |= card_bit(world.nic_of(Rank(*rank))),
            }
        }
    }
    let ports = if is_intra { RankSet::of(ranks) } else { RankSet::of([]) };
    if !fields.has("bandwidth_factor") && !fields.has("added_latency_ns") {
        return Err(fields.error("`bandwidth_factor` or `added_latency_ns` must be given".into()));
    }
    let mut change = LinkChange::NONE;
    if fields.has("bandwidth_factor") {
        let is_fine = |factor| (1e-6..=1e3).contains(&factor);
        change.bandwidth_factor = fields.float_in("bandwidth_factor", is_fine, "1e-6 to 1000")?;
    }
    if let Some(latency) = fields.integer_if_any("added_latency_ns")? {
        change.latency = SimTime::from_ns(i64::try_from(latency).unwrap_or(i64::MAX));
    }
    Ok(SlowLink { ports, cards, window: window(fields)?, change })
}

fn throttle(fields: &mut Fields) -> Result<ThermalThrottle, PerturbError> {
    let ranks = RankSet::of(fields.selected_ranks()?);
    let mut number = |key: &str, least: f64| fields.float_in(key, |x| x >= least && x <= 1e9, "a number in range");
    let ambient_c = number("ambient_c", -100.0)?;
    let throttle_c = number("throttle_c", -100.0)?;
    let hysteresis_c = number("hysteresis_c", 0.0)?;
    let resistance_c_per_w = number("resistance_c_per_w", 1e-6)?;
    let capacitance_j_per_c = number("capacitance_j_per_c", 1e-6)?;
    let idle_w = number("idle_w", 0.0)?;
    let power = number("power_w", idle_w)?;
    let resting_c = ambient_c + idle_w * resistance_c_per_w;
    if resting_c >= throttle_c - hysteresis_c {
        let message = "an idle GPU would stay throttled: ambient_c + idle_w * resistance_c_per_w";
        return Err(fields.error(format!("{message} is {resting_c}, throttle_c - hysteresis_c not above it")));
    }
    let initial_c = if fields.has("initial_c") {
        fields.float_in("initial_c", |x| (-100.0..1e4).contains(&x), "-100 to 10000")?
    } else {
        resting_c
    };
    let mut power_w = [power; ComputeClass::COUNT];
    if let Some(mut by_class) = fields.table("class_power_w")? {
        for ((name, _), power) in CLASSES.iter().zip(&mut power_w) {
            if by_class.has(name) {
                *power = by_class.float_in(name, |x| x >= idle_w && x <= 1e9, "at least idle_w")?;
            }
        }
        by_class.finish()?;
    }
    let period_ns = fields.integer("period_ns")?;
    if !(MIN_PERIOD_NS..=3_600_000_000_000).contains(&period_ns) {
        return Err(fields.error(format!("`period_ns` must be {MIN_PERIOD_NS} to 3600000000000")));
    }
    Ok(ThermalThrottle {
        ranks,
        ambient_c,
        initial_c,
        throttle_c,
        hysteresis_c,
        resistance_c_per_w,
        capacitance_j_per_c,
        idle_w,
        power_w,
        clocks_ppm: clocks(fields)?,
        period: SimTime::from_ns(period_ns as i64),
    })
}

fn clocks(fields: &mut Fields) -> Result<Vec<u32>, PerturbError> {
    let clocks = fields.floats("clocks")?.ok_or_else(|| fields.missing("clocks"))?;
    let ppm: Vec<u32> = clocks.iter().map(|clock| (clock * 1e6).round() as u32).collect();
    let is_falling = ppm.windows(2).all(|pair| pair[0] > pair[1]);
    if ppm.first() != Some(&1_000_000) || !is_falling || ppm.last().is_some_and(|least| *least < 1000) {
        return Err(fields.error("`clocks` must fall from 1.0 and stay above 0.001".into()));
    }
    Ok(ppm)
}
