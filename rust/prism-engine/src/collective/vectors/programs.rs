//! Explicit programs as JSON: `["comp", time]`, `["coll", comm, kind, count, dtype, redop, root]`,
//! `["send", comm, peer, bytes]`, `["recv", comm, peer, bytes]` and `["group", [call, ...]]`. Peers are group ranks.

use super::explicit::{Call, Collective, Job, Op, P2pCost};
use super::fields::Fields;
use super::{Matching, VectorError};
use crate::collective::window::LIMIT;
use serde_json::Value;
use std::collections::BTreeMap;

/// Where the cost of a collective comes from.
#[derive(Clone, Copy)]
enum CollectiveCost {
    /// The same for all.
    Fixed(i64),
    /// The third entry of the op.
    Stated,
}

/// Matching and deadlock: every collective costs the same.
pub(super) fn matching(mut fields: Fields<'_>) -> Result<Matching, VectorError> {
    let cost = fields.at_least("collective_cost_ns", 0)?;
    let p2p: Value = fields.take("p2p_cost_ns")?;
    let p2p = p2p_cost(&p2p).ok_or_else(|| {
        let what = format!("is {p2p}: it must be a number or like \"500+bytes//10, rendezvous\" (or eager)");
        fields.error("p2p_cost_ns", what)
    })?;
    let job = read_job(&mut fields, CollectiveCost::Fixed(cost), p2p)?;
    fields.finish()?;
    let outcome = job.evaluate();
    let keys = outcome.mismatches.iter().map(|mismatch| job.key_text(mismatch.key));
    Ok(Matching {
        mismatches: keys.collect(),
        finish_ns: outcome.finish,
        stuck: outcome.stuck,
        cycle_length: outcome.explanation.cycle.len(),
        n_missing: outcome.explanation.missing.len(),
    })
}

/// A job with the cost of every op in it, and eager messages: a send costs its sender nothing, and the receiver has it so
/// many ns later as the op's last entry says.
pub(super) fn job(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    for degree in ["tp", "pp", "dp"] {
        if let Some(number) = fields.optional(degree)? {
            fields.check_number(degree, number, 1)?;
        }
    }
    let p2p = P2pCost { base: 0, divisor: Some(1), is_eager: true };
    let job = read_job(&mut fields, CollectiveCost::Stated, p2p)?;
    fields.finish()?;
    let outcome = job.evaluate();
    let model = fields.model().to_owned();
    if !outcome.mismatches.is_empty() {
        return Err(VectorError::Mismatch { model, what: mismatch_text(&job, &outcome) });
    }
    if !outcome.stuck.is_empty() {
        return Err(VectorError::Deadlock { model, what: deadlock_text(&job, &outcome) });
    }
    Ok(outcome.finish)
}

fn mismatch_text(job: &Job, outcome: &super::Outcome) -> String {
    let each = outcome.mismatches.iter().map(|mismatch| {
        let minority = mismatch.minority.iter().map(|(rank, said)| format!("rank {rank} calls {said}"));
        let minority: Vec<_> = minority.collect();
        format!("{}: {}, others {}", job.key_text(mismatch.key), minority.join(", "), mismatch.majority)
    });
    each.collect::<Vec<_>>().join("; ")
}

fn deadlock_text(job: &Job, outcome: &super::Outcome) -> String {
    let explanation = &outcome.explanation;
    let missing = explanation
        .missing
        .iter()
        .map(|(key, rank)| format!("rank {rank} ended without the call that {} waits for", job.key_text(*key)));
    let cycle = explanation.cycle.iter().map(|wait| {
        let key = job.key_text(wait.key);
        format!("rank {} at op {} waits on {key} for rank {} at op {}", wait.rank, wait.op, wait.for_rank, wait.at_op)
    });
    missing.chain(cycle).collect::<Vec<_>>().join("; ")
}

/// `500`, or `500+bytes//10` (either summand alone, `//10` left out), and after a comma `rendezvous` (default) or `eager`.
fn p2p_cost(value: &Value) -> Option<P2pCost> {
    let fixed = |base| (0..=LIMIT).contains(&base).then_some(P2pCost { base, divisor: None, is_eager: false });
    let text = match value {
        Value::Number(number) => return fixed(number.as_i64()?),
        Value::String(text) => text.replace(' ', ""),
        _ => return None,
    };
    let (sum, protocol) = text.split_once(',').unwrap_or((&text, "rendezvous"));
    let is_eager = match protocol {
        "eager" => true,
        "rendezvous" => false,
        _ => return None,
    };
    let mut cost = P2pCost { base: 0, divisor: None, is_eager };
    for (at, term) in sum.split('+').enumerate() {
        match term.strip_prefix("bytes") {
            Some(rest) if cost.divisor.is_none() => {
                let divisor = if rest.is_empty() { Some(1) } else { rest.strip_prefix("//")?.parse().ok() };
                cost.divisor = divisor.filter(|divisor: &i64| *divisor >= 1);
                cost.divisor?;
            }
            None if at == 0 => cost.base = term.parse().ok().filter(|base| (0..=LIMIT).contains(base))?,
            _ => return None,
        }
    }
    Some(cost)
}

fn read_job(fields: &mut Fields<'_>, cost: CollectiveCost, p2p: P2pCost) -> Result<Job, VectorError> {
    // Ordered by name.
    let comms: BTreeMap<String, Vec<u32>> = fields.take("comms")?;
    let programs: Vec<Vec<Value>> = fields.take("programs")?;
    for (name, members) in &comms {
        let mut seen = vec![false; programs.len()];
        for rank in members {
            match seen.get_mut(*rank as usize) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(fields.error("comms", format!("{name:?} has rank {rank} twice"))),
                None => return Err(fields.error("comms", format!("{name:?} has rank {rank}, which has no program"))),
            }
        }
    }
    let comms: Vec<_> = comms.into_iter().collect();
    let mut parser = Parser { comms: &comms, cost, p2p, sum: 0 };
    let mut parsed = Vec::with_capacity(programs.len());
    for (rank, program) in programs.iter().enumerate() {
        let place = |(at, what)| fields.error("programs", format!("of rank {rank}, op {at}: {what}"));
        let ops =
            program.iter().enumerate().map(|(at, op)| parser.op(rank as u32, op).map_err(|what| place((at, what))));
        parsed.push(ops.collect::<Result<Vec<Op>, _>>()?);
    }
    if parser.sum > i128::from(LIMIT) {
        return Err(fields.error("programs", "add up to times that may exceed 2^60"));
    }
    Ok(Job { programs: parsed, p2p, comms })
}

struct Parser<'a> {
    comms: &'a [(String, Vec<u32>)],
    cost: CollectiveCost,
    p2p: P2pCost,
    /// All costs: no time can exceed them.
    sum: i128,
}

impl Parser<'_> {
    fn op(&mut self, rank: u32, op: &Value) -> Result<Op, String> {
        match parts(op)? {
            ("comp", [duration]) => Ok(Op::Compute(self.add(time(duration)?))),
            ("comp", _) => Err("a \"comp\" has one entry: its duration".to_owned()),
            ("group", [Value::Array(calls)]) => {
                let calls = calls.iter().map(|call| self.call(rank, call));
                Ok(Op::Calls(calls.collect::<Result<_, _>>()?))
            }
            ("group", _) => Err("a \"group\" has one entry: a list of calls".to_owned()),
            _ => Ok(Op::Calls(vec![self.call(rank, op)?])),
        }
    }

    fn call(&mut self, rank: u32, call: &Value) -> Result<Call, String> {
        match parts(call)? {
            ("coll", [comm, rest @ ..]) if rest.len() == 5 => {
                let comm = self.comm(rank, comm)?;
                if let Some(odd) = rest.iter().find(|part| part.is_array() || part.is_object()) {
                    return Err(format!("{odd} is neither a number nor a text"));
                }
                let cost = match self.cost {
                    CollectiveCost::Fixed(cost) => cost,
                    CollectiveCost::Stated => time(&rest[0])?,
                };
                let signature = rest.iter().map(Value::to_string).collect::<Vec<_>>().join(" ");
                Ok(Call::Collective(Collective { comm, cost: self.add(cost), signature }))
            }
            (half @ ("send" | "recv"), [comm, peer, bytes]) => {
                let comm = self.comm(rank, comm)?;
                let size = self.comms[comm].1.len() as u64;
                let peer = peer.as_u64().filter(|peer| *peer < size).ok_or_else(|| {
                    format!("peer {peer} is not a group rank of {:?}, which has {size} members", self.comms[comm].0)
                })?;
                let (peer, bytes) = (peer as u32, time(bytes)?);
                self.add(self.p2p.of(bytes));
                Ok(if half == "send" { Call::Send { comm, peer, bytes } } else { Call::Recv { comm, peer, bytes } })
            }
            (kind @ ("coll" | "send" | "recv"), rest) => {
                Err(format!("a \"{kind}\" cannot have {} entries", rest.len()))
            }
            (kind @ ("comp" | "group"), _) => Err(format!("a \"{kind}\" cannot be in a group")),
            (kind, _) => Err(format!("{kind:?} is not known: there are comp, coll, send, recv and group")),
        }
    }

    fn comm(&self, rank: u32, name: &Value) -> Result<usize, String> {
        let name = name.as_str().ok_or_else(|| format!("{name} is not the name of a communicator"))?;
        let at = self.comms.binary_search_by(|(other, _)| other.as_str().cmp(name));
        let at = at.map_err(|_| format!("communicator {name:?} is not in `comms`"))?;
        if self.comms[at].1.contains(&rank) { Ok(at) } else { Err(format!("it is no member of {name:?}")) }
    }

    fn add(&mut self, cost: i64) -> i64 {
        self.sum += i128::from(cost);
        cost
    }
}

fn parts(op: &Value) -> Result<(&str, &[Value]), String> {
    match op.as_array().map(Vec::as_slice) {
        Some([Value::String(kind), rest @ ..]) => Ok((kind, rest)),
        _ => Err(format!("{op} is not a list that begins with what to do")),
    }
}

/// A duration, cost or size.
fn time(value: &Value) -> Result<i64, String> {
    let number = value.as_i64().filter(|number| (0..=LIMIT).contains(number));
    number.ok_or_else(|| format!("{value} is not a whole number within 0 and 2^60"))
}
