//! Chains and all-to-alls.

use super::VectorError;
use super::fields::{Fields, highest};
use super::ring::{only, read_credits};
use crate::collective::credits::{self, CreditLinks};
use crate::collective::recurrence::{self, Credits};
use crate::collective::window::MaxWindow;
use crate::collective::{chain, p2p};

/// Broadcast along a chain, rank 0 first.
pub(super) fn chain_broadcast(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    const OCCUPANCY: &str = "occ_ns_of_sender";
    let arrivals = fields.arrivals()?;
    let n = arrivals.len();
    let chunks = fields.at_least("chunks", 1)?;
    let credits = read_credits(&mut fields)?;
    let occupancy = fields.costs(OCCUPANCY, n)?;
    let latency = fields.costs("latency_ns_of_incoming_link", n)?;
    fields.finish()?;
    let credit_latency = credits.map_or(0, |credits| i128::from(credits.latency));
    let cost = highest(&occupancy) + highest(&latency) + credit_latency;
    fields.check_range(OCCUPANCY, &arrivals, i128::from(chunks) + 2 * n as i128, cost)?;
    let chain = chain::Chain { chunks, occupancy: &occupancy, latency: &latency };
    if let Some(credits) = credits {
        return match closed_with_credits(&chain, credits, &arrivals) {
            Some(ends) => Ok(ends),
            None => recurrence::chain(&chain, Some(credits), &arrivals)
                .map_err(|error| fields.error("credits", format!("does not fit: {error}"))),
        };
    }
    let mut out = vec![0; n];
    chain::completion(&chain, &arrivals, &mut out, &mut Vec::new());
    Ok(out)
}

/// Ends by the closed form with credits, if the links that are used are alike and it holds.
fn closed_with_credits(chain: &chain::Chain<'_>, credits: Credits, arrivals: &[i64]) -> Option<Vec<i64>> {
    let used = arrivals.len() - 1;
    let links = CreditLinks {
        messages: chain.chunks,
        slices: 1,
        occupancy: only(&chain.occupancy[..used])?,
        latency: only(&chain.latency[1..])?,
        slots: credits.slots,
        credit_latency: credits.latency,
    };
    credits::chain_completion(&links, arrivals)
}

/// All-to-all whose round `k` starts when the round before is over for both ends of the message a rank waits for, the
/// one from the rank `k` before it: after `k` rounds a rank knows of the `k (k+1) / 2` ranks before it.
pub(super) fn round_synchronous(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    let arrivals = fields.arrivals()?;
    let n = arrivals.len() as i64;
    let cost = fields.at_least("cost_ns", 0)?;
    let rounds = fields.at_least("rounds", 0)?;
    fields.finish()?;
    if rounds > n {
        return Err(fields.error("rounds", format!("is {rounds}, more than the {n} ranks")));
    }
    fields.check_range("cost_ns", &arrivals, i128::from(rounds), i128::from(cost))?;
    let reach = (rounds * (rounds + 1) / 2).min(n - 1);
    let mut window = MaxWindow::default();
    let mut out = Vec::with_capacity(arrivals.len());
    for at in n - reach..2 * n {
        window.push(at, arrivals[(at % n) as usize]);
        if at >= n {
            out.push(window.max_from(at - reach) + rounds * cost);
        }
    }
    Ok(out)
}

/// All-to-all with a message of its own cost from every rank to every other.
pub(super) fn unequal(mut fields: Fields<'_>) -> Result<Vec<i64>, VectorError> {
    const COSTS: &str = "cost_ns_src_dst";
    let arrivals = fields.arrivals()?;
    let n = arrivals.len();
    let costs: Vec<Vec<i64>> = fields.take(COSTS)?;
    fields.finish()?;
    fields.expect_len(COSTS, costs.len(), n)?;
    for row in &costs {
        fields.check_costs(COSTS, row, n)?;
    }
    fields.check_range(COSTS, &arrivals, 2 * n as i128, highest(costs.iter().flatten()))?;
    Ok(p2p::unequal_all_to_all(|from, to| costs[from][to], &arrivals))
}
