//! Rings: one of any links, phases, slices and credits; several at once; and rings inside rings.

use super::VectorError;
use super::fields::{Fields, highest};
use crate::collective::credits::{self, CreditLinks};
use crate::collective::recurrence::{self, Credits};
use crate::collective::ring::{self, Phase, Ring, RingScratch};
use serde::Deserialize;

const MESSAGES: &str = "messages_per_phase";
const OCCUPANCY: &str = "occ_ns_per_phase_per_sender";
const LATENCY: &str = "latency_ns_of_incoming_link";

/// The inputs of one ring, checked.
struct Inputs {
    messages: Vec<i64>,
    occupancy: Vec<Vec<i64>>,
    latency: Vec<i64>,
    slices: i64,
    credits: Option<Credits>,
    arrivals: Vec<i64>,
}

impl Inputs {
    fn read(fields: &mut Fields<'_>) -> Result<Self, VectorError> {
        let arrivals = fields.arrivals()?;
        let n = arrivals.len();
        let messages: Vec<i64> = fields.take(MESSAGES)?;
        let occupancy: Vec<Vec<i64>> = fields.take(OCCUPANCY)?;
        fields.expect_len(OCCUPANCY, occupancy.len(), messages.len())?;
        for (count, costs) in messages.iter().zip(&occupancy) {
            fields.check_number(MESSAGES, *count, 0)?;
            fields.check_costs(OCCUPANCY, costs, n)?;
        }
        if n == 1 && messages.iter().any(|count| *count > 0) {
            return Err(fields.error(MESSAGES, "must be 0 for a ring of one rank, which has nobody to send to"));
        }
        let latency = fields.costs(LATENCY, n)?;
        let slices = fields.at_least("slices_per_step", 1)?;
        let credits = read_credits(fields)?;
        fields.finish()?;
        Ok(Self { messages, occupancy, latency, slices, credits, arrivals })
    }

    /// Messages of every rank.
    fn total(&self) -> i64 {
        self.messages.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Ends by the closed form with credits, if the links are alike and it holds.
    fn closed_with_credits(&self, credits: Credits) -> Option<Vec<i64>> {
        let ([messages], [occupancy]) = (&self.messages[..], &self.occupancy[..]) else { return None };
        let links = CreditLinks {
            messages: *messages,
            slices: self.slices,
            occupancy: only(occupancy)?,
            latency: only(&self.latency)?,
            slots: credits.slots,
            credit_latency: credits.latency,
        };
        credits::ring_completion(&links, &self.arrivals)
    }

    /// Evaluations that the closed form without credits takes: for every change of message size, the square of the slices.
    fn closed_work(&self) -> i128 {
        let phases = self.messages.iter().filter(|count| **count > 0).count();
        let slices = i128::from(self.slices);
        let per_rank = if phases > 1 { slices * slices * phases as i128 } else { slices };
        per_rank * self.arrivals.len() as i128
    }
}

/// `credits` of 0 or null stands for connections that hold everything.
pub(super) fn read_credits(fields: &mut Fields<'_>) -> Result<Option<Credits>, VectorError> {
    let slots: Option<i64> = fields.optional("credits")?;
    let latency = fields.optional("credit_latency_ns")?.unwrap_or(0);
    fields.check_number("credits", slots.unwrap_or(0), 0)?;
    fields.check_number("credit_latency_ns", latency, 0)?;
    Ok(slots.filter(|slots| *slots > 0).map(|slots| Credits { slots, latency }))
}

pub(super) fn one_ring(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    let mut inputs = Inputs::read(&mut fields)?;
    let total = inputs.total();
    // More slices than messages are the same as one slice per message.
    inputs.slices = inputs.slices.min(total.max(1));
    let occupancy = highest(inputs.occupancy.iter().flatten());
    let cost = occupancy + highest(&inputs.latency) + inputs.credits.map_or(0, |credits| i128::from(credits.latency));
    // The unrolled ring of the closed form is two laps long, with `slices` messages per hop.
    let edges = i128::from(total) + (i128::from(inputs.slices) + 2) * 2 * inputs.arrivals.len() as i128;
    fields.check_range(OCCUPANCY, &inputs.arrivals, edges, cost)?;
    let phases: Vec<_> = inputs.messages.iter().zip(&inputs.occupancy).map(phase).collect();
    let ring = Ring { phases: &phases, latency: &inputs.latency, slices: inputs.slices };
    let by_message = |key| {
        recurrence::ring(&ring, inputs.credits, &inputs.arrivals)
            .map_err(|e| fields.error(key, format!("does not fit: {e}")))
    };
    match inputs.credits {
        Some(credits) => inputs.closed_with_credits(credits).map_or_else(|| by_message("credits"), Ok),
        None if inputs.closed_work() > i128::from(recurrence::MOST_REMEMBERED) => by_message("slices_per_step"),
        None => Ok(closed(&ring, &inputs.arrivals)),
    }
}

fn phase<'a>((messages, occupancy): (&i64, &'a Vec<i64>)) -> Phase<'a> {
    Phase { messages: *messages, occupancy }
}

/// The one value of equal links.
pub(super) fn only(costs: &[i64]) -> Option<i64> {
    let first = *costs.first()?;
    costs.iter().all(|cost| *cost == first).then_some(first)
}

fn closed(ring: &Ring<'_>, arrivals: &[i64]) -> Vec<i64> {
    let mut out = vec![0; arrivals.len()];
    ring::completion(ring, arrivals, &mut out, &mut RingScratch::default());
    out
}

/// A ring of equal links over `arrivals.len()` ranks, one slice per step.
fn uniform(steps_per_hop: i64, cost: LinkCost, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let occupancy = vec![cost.occ_ns; n];
    let messages = steps_per_hop * (n as i64 - 1);
    let phases = [Phase { messages, occupancy: &occupancy }];
    closed(&Ring { phases: &phases, latency: &vec![cost.lat_ns; n], slices: 1 }, arrivals)
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkCost {
    occ_ns: i64,
    lat_ns: i64,
}

/// All-reduce on several rings at once, each over all ranks in its own order: a rank ends with its last channel.
pub(super) fn channels(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    let arrivals = fields.arrivals()?;
    let orders: Vec<Vec<usize>> = fields.take("orders")?;
    let cost = LinkCost { occ_ns: fields.at_least("occ_ns", 0)?, lat_ns: fields.at_least("latency_ns", 0)? };
    fields.finish()?;
    let n = arrivals.len();
    let sum = i128::from(cost.occ_ns) + i128::from(cost.lat_ns);
    fields.check_range("occ_ns", &arrivals, 8 * n as i128, sum)?;
    let mut out = arrivals.clone();
    for order in &orders {
        fields.expect_len("orders", order.len(), n)?;
        let mut seen = vec![false; n];
        for rank in order {
            match seen.get_mut(*rank) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(fields.error("orders", format!("names rank {rank} twice in one ring"))),
                None => return Err(fields.error("orders", format!("names rank {rank}, which does not exist"))),
            }
        }
        let along: Vec<_> = order.iter().map(|rank| arrivals[*rank]).collect();
        order.iter().zip(uniform(2, cost, &along)).for_each(|(rank, end)| out[*rank] = out[*rank].max(end));
    }
    Ok(out)
}

/// Reduce-scatter inside the nodes, all-reduce between them for each local index, all-gather inside, one after the other.
pub(super) fn hierarchical(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    let mut times = fields.arrivals()?;
    let local: usize = fields.take("local")?;
    let nodes: usize = fields.take("nodes")?;
    let intra: LinkCost = fields.take("intra")?;
    let inter: LinkCost = fields.take("inter")?;
    fields.finish()?;
    if local.checked_mul(nodes) != Some(times.len()) {
        let got = times.len();
        return Err(
            fields.error("arrival_ns", format!("has {got} entries, expected `local` {local} times `nodes` {nodes}"))
        );
    }
    for (key, cost) in [("intra", intra), ("inter", inter)] {
        fields.check_number(key, cost.occ_ns, 0)?;
        fields.check_number(key, cost.lat_ns, 0)?;
        let edges = 16 * times.len() as i128;
        fields.check_range(key, &times, edges, i128::from(cost.occ_ns) + i128::from(cost.lat_ns))?;
    }
    let inside = |times: &[i64]| -> Vec<i64> { times.chunks(local).flat_map(|node| uniform(1, intra, node)).collect() };
    times = inside(&times);
    for index in 0..local {
        let rail: Vec<_> = times.iter().skip(index).step_by(local).copied().collect();
        let ends = uniform(2, inter, &rail);
        times.iter_mut().skip(index).step_by(local).zip(ends).for_each(|(time, end)| *time = end);
    }
    Ok(inside(&times))
}
