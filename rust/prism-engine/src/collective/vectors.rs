//! The closed forms by name, with their inputs as JSON: for checking them against independently computed tables.
//!
//! Times are unit-free integers. Inputs outside the conditions of a closed form are refused.

use super::credits::{self, CreditLinks};
use super::{chain, dtree, p2p, ring, tree};
use serde::Deserialize;
use serde_json::Value;

/// The models that [`completion`] evaluates.
pub const MODELS: [&str; 12] = [
    "ring_allreduce_uniform",
    "ring_reduce_scatter_or_all_gather",
    "ring_two_level",
    "ring_hetero_two_phase",
    "ring_credits",
    "ring_multi_channel",
    "hierarchical_allreduce",
    "tree_allreduce",
    "double_tree_allreduce",
    "chain_broadcast",
    "alltoall_round_sync",
    "alltoallv_port",
];

/// Completion of every rank under `model` with the named `inputs`. The error says what is wrong or not supported.
pub fn completion(model: &str, inputs: &Value) -> Result<Vec<i64>, String> {
    match model {
        "ring_allreduce_uniform" | "ring_reduce_scatter_or_all_gather" | "ring_two_level" | "ring_hetero_two_phase" => {
            ring_phases(&read(inputs)?)
        }
        "ring_credits" => ring_with_credits(&read(inputs)?),
        "ring_multi_channel" => ring_channels(&read(inputs)?),
        "hierarchical_allreduce" => hierarchical(&read(inputs)?),
        "tree_allreduce" => single_tree(&read(inputs)?),
        "double_tree_allreduce" => both_trees(&read(inputs)?),
        "chain_broadcast" => chain_broadcast(&read(inputs)?),
        "alltoall_round_sync" => round_synchronous(&read(inputs)?),
        "alltoallv_port" => unequal_all_to_all(&read(inputs)?),
        other => Err(format!("model `{other}` is not supported (there are: {})", MODELS.join(", "))),
    }
}

fn read<'a, T: Deserialize<'a>>(inputs: &'a Value) -> Result<T, String> {
    T::deserialize(inputs).map_err(|error| error.to_string())
}

fn expect_len(name: &str, got: usize, expected: usize) -> Result<(), String> {
    if got == expected { Ok(()) } else { Err(format!("`{name}` has {got} entries, expected {expected}")) }
}

#[derive(Deserialize)]
struct RingInputs {
    messages_per_phase: Vec<i64>,
    occ_ns_per_phase_per_sender: Vec<Vec<i64>>,
    slices_per_step: i64,
    credits: i64,
    credit_latency_ns: i64,
    arrival_ns: Vec<i64>,
    latency_ns_of_incoming_link: Vec<i64>,
}

fn ring_phases(inputs: &RingInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len();
    if inputs.credits != 0 {
        return Err("credits make it another model: ring_credits".to_owned());
    }
    if inputs.slices_per_step < 1 {
        return Err("`slices_per_step` must be at least 1".to_owned());
    }
    expect_len("latency_ns_of_incoming_link", inputs.latency_ns_of_incoming_link.len(), n)?;
    expect_len(
        "occ_ns_per_phase_per_sender",
        inputs.occ_ns_per_phase_per_sender.len(),
        inputs.messages_per_phase.len(),
    )?;
    for phase in &inputs.occ_ns_per_phase_per_sender {
        expect_len("occ_ns_per_phase_per_sender[]", phase.len(), n)?;
    }
    let phases: Vec<_> = inputs
        .messages_per_phase
        .iter()
        .zip(&inputs.occ_ns_per_phase_per_sender)
        .map(|(&messages, occupancy)| ring::Phase { messages, occupancy })
        .collect();
    Ok(run_ring(&phases, &inputs.latency_ns_of_incoming_link, inputs.slices_per_step, &inputs.arrival_ns))
}

fn ring_with_credits(inputs: &RingInputs) -> Result<Vec<i64>, String> {
    let ([messages], [occupancy]) = (&inputs.messages_per_phase[..], &inputs.occ_ns_per_phase_per_sender[..]) else {
        return Err("a ring with credits must have one phase".to_owned());
    };
    let links = CreditLinks {
        messages: *messages,
        slices: inputs.slices_per_step,
        occupancy: only(occupancy)?,
        latency: only(&inputs.latency_ns_of_incoming_link)?,
        slots: inputs.credits,
        credit_latency: inputs.credit_latency_ns,
    };
    credits::ring_completion(&links, &inputs.arrival_ns).ok_or_else(|| format!("no closed form for {links:?}"))
}

/// The one value of equal links.
fn only(costs: &[i64]) -> Result<i64, String> {
    let first = *costs.first().ok_or("no links")?;
    if costs.iter().all(|cost| *cost == first) { Ok(first) } else { Err("links with credits must be alike".to_owned()) }
}

fn run_ring(phases: &[ring::Phase<'_>], latency: &[i64], slices: i64, arrivals: &[i64]) -> Vec<i64> {
    let mut out = vec![0; arrivals.len()];
    let ring = ring::Ring { phases, latency, slices };
    ring::completion(&ring, arrivals, &mut out, &mut ring::RingScratch::default());
    out
}

/// A ring of equal links over `arrivals.len()` ranks, one slice per step.
fn uniform_ring(steps_per_hop: i64, cost: LinkCost, arrivals: &[i64]) -> Vec<i64> {
    let n = arrivals.len();
    let occupancy = vec![cost.occ_ns; n];
    let messages = steps_per_hop * (n as i64 - 1);
    run_ring(&[ring::Phase { messages, occupancy: &occupancy }], &vec![cost.lat_ns; n], 1, arrivals)
}

#[derive(Clone, Copy, Deserialize)]
struct LinkCost {
    occ_ns: i64,
    lat_ns: i64,
}

#[derive(Deserialize)]
struct ChannelInputs {
    orders: Vec<Vec<usize>>,
    occ_ns: i64,
    latency_ns: i64,
    arrival_ns: Vec<i64>,
}

/// All-reduce on several rings at once, each over all ranks in its own order: a rank ends with its last channel.
fn ring_channels(inputs: &ChannelInputs) -> Result<Vec<i64>, String> {
    let arrivals = &inputs.arrival_ns;
    let cost = LinkCost { occ_ns: inputs.occ_ns, lat_ns: inputs.latency_ns };
    let mut out = arrivals.clone();
    for order in &inputs.orders {
        expect_len("orders[]", order.len(), arrivals.len())?;
        if order.iter().any(|rank| *rank >= arrivals.len()) {
            return Err("`orders` names a rank that does not exist".to_owned());
        }
        let along: Vec<_> = order.iter().map(|rank| arrivals[*rank]).collect();
        let ends = uniform_ring(2, cost, &along);
        order.iter().zip(ends).for_each(|(rank, end)| out[*rank] = out[*rank].max(end));
    }
    Ok(out)
}

#[derive(Deserialize)]
struct HierarchicalInputs {
    local: usize,
    nodes: usize,
    intra: LinkCost,
    inter: LinkCost,
    arrival_ns: Vec<i64>,
}

/// Reduce-scatter inside the nodes, all-reduce between them for each local index, all-gather inside, one after the other.
fn hierarchical(inputs: &HierarchicalInputs) -> Result<Vec<i64>, String> {
    let HierarchicalInputs { local, nodes, intra, inter, arrival_ns } = inputs;
    expect_len("arrival_ns", arrival_ns.len(), local * nodes)?;
    let mut times = arrival_ns.clone();
    let inside = |times: &mut Vec<i64>| {
        *times = times.chunks(*local).flat_map(|node| uniform_ring(1, *intra, node)).collect();
    };
    inside(&mut times);
    for index in 0..*local {
        let rail: Vec<_> = times.iter().skip(index).step_by(*local).copied().collect();
        let ends = uniform_ring(2, *inter, &rail);
        times.iter_mut().skip(index).step_by(*local).zip(ends).for_each(|(time, end)| *time = end);
    }
    inside(&mut times);
    Ok(times)
}

#[derive(Deserialize)]
struct TreeInputs {
    parent: Vec<i64>,
    chunks: i64,
    mode: String,
    occ_ns_edge_to_parent_and_back: Vec<i64>,
    latency_ns_edge: Vec<i64>,
    arrival_ns: Vec<i64>,
}

fn single_tree(inputs: &TreeInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len();
    if inputs.mode != "split" {
        return Err(format!("tree mode `{}` is not supported", inputs.mode));
    }
    expect_len("parent", inputs.parent.len(), n)?;
    expect_len("occ_ns_edge_to_parent_and_back", inputs.occ_ns_edge_to_parent_and_back.len(), n)?;
    expect_len("latency_ns_edge", inputs.latency_ns_edge.len(), n)?;
    let parent: Vec<_> = inputs.parent.iter().map(|parent| u32::try_from(*parent).unwrap_or(u32::MAX)).collect();
    let order = top_down(&parent)?;
    let edges = tree::Edges { occupancy: &inputs.occ_ns_edge_to_parent_and_back, latency: &inputs.latency_ns_edge };
    let tree = tree::Tree { parent: &parent, order: &order, up: edges, down: edges, chunks: inputs.chunks };
    let mut out = inputs.arrival_ns.clone();
    tree::raise_completion(&tree, &inputs.arrival_ns, &mut out, &mut tree::TreeScratch::default());
    Ok(out)
}

/// Ranks, each after its parent; `u32::MAX` marks the one root.
fn top_down(parent: &[u32]) -> Result<Vec<u32>, String> {
    let mut children = vec![Vec::new(); parent.len()];
    let mut order = Vec::new();
    for (rank, &up) in parent.iter().enumerate() {
        match children.get_mut(up as usize) {
            Some(siblings) => siblings.push(rank as u32),
            None if up == u32::MAX => order.push(rank as u32),
            None => return Err(format!("`parent` of {rank} does not exist")),
        }
    }
    let roots = order.len();
    let mut next = 0;
    while next < order.len() {
        order.extend(&children[order[next] as usize]);
        next += 1;
    }
    if roots == 1 && order.len() == parent.len() { Ok(order) } else { Err("`parent` is not one tree".to_owned()) }
}

#[derive(Deserialize)]
struct DoubleTreeInputs {
    chunks_per_tree: i64,
    occ_ns: i64,
    latency_ns: i64,
    arrival_ns: Vec<i64>,
}

fn both_trees(inputs: &DoubleTreeInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len();
    let (occupancy, latency) = (vec![inputs.occ_ns; n], vec![inputs.latency_ns; n]);
    let edges = tree::Edges { occupancy: &occupancy, latency: &latency };
    let mut out = inputs.arrival_ns.clone();
    for node_tree in dtree::double_tree(n) {
        let parent: Vec<_> = node_tree.parent.iter().map(|up| up.map_or(u32::MAX, |up| up as u32)).collect();
        let order = top_down(&parent)?;
        let tree =
            tree::Tree { parent: &parent, order: &order, up: edges, down: edges, chunks: inputs.chunks_per_tree };
        tree::raise_completion(&tree, &inputs.arrival_ns, &mut out, &mut tree::TreeScratch::default());
    }
    Ok(out)
}

#[derive(Deserialize)]
struct ChainInputs {
    chunks: i64,
    credits: i64,
    credit_latency_ns: i64,
    occ_ns_of_sender: Vec<i64>,
    latency_ns_of_incoming_link: Vec<i64>,
    arrival_ns: Vec<i64>,
}

fn chain_broadcast(inputs: &ChainInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len();
    expect_len("occ_ns_of_sender", inputs.occ_ns_of_sender.len(), n)?;
    expect_len("latency_ns_of_incoming_link", inputs.latency_ns_of_incoming_link.len(), n)?;
    if inputs.credits != 0 {
        let links = CreditLinks {
            messages: inputs.chunks,
            slices: 1,
            occupancy: only(&inputs.occ_ns_of_sender)?,
            latency: only(&inputs.latency_ns_of_incoming_link)?,
            slots: inputs.credits,
            credit_latency: inputs.credit_latency_ns,
        };
        return credits::chain_completion(&links, &inputs.arrival_ns)
            .ok_or_else(|| format!("no closed form for {links:?}"));
    }
    let chain = chain::Chain {
        chunks: inputs.chunks,
        occupancy: &inputs.occ_ns_of_sender,
        latency: &inputs.latency_ns_of_incoming_link,
    };
    let mut out = vec![0; n];
    chain::completion(&chain, &inputs.arrival_ns, &mut out, &mut Vec::new());
    Ok(out)
}

#[derive(Deserialize)]
struct RoundInputs {
    cost_ns: i64,
    rounds: i64,
    arrival_ns: Vec<i64>,
}

/// All-to-all whose round `k` starts when the round before is over for both ends of the message a rank waits for, the
/// one from the rank `k` before it: after `k` rounds a rank knows of the `k (k+1) / 2` ranks before it.
fn round_synchronous(inputs: &RoundInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len() as i64;
    if inputs.rounds < 0 || inputs.rounds > n {
        return Err("`rounds` must be between 0 and the number of ranks".to_owned());
    }
    let reach = (inputs.rounds * (inputs.rounds + 1) / 2).min(n - 1);
    let latest = |rank: i64| {
        let seen = (0..=reach).map(|back| inputs.arrival_ns[(rank - back).rem_euclid(n) as usize]);
        seen.max().unwrap_or(0)
    };
    Ok((0..n).map(|rank| latest(rank) + inputs.rounds * inputs.cost_ns).collect())
}

#[derive(Deserialize)]
struct UnequalInputs {
    cost_ns_src_dst: Vec<Vec<i64>>,
    arrival_ns: Vec<i64>,
}

fn unequal_all_to_all(inputs: &UnequalInputs) -> Result<Vec<i64>, String> {
    let n = inputs.arrival_ns.len();
    expect_len("cost_ns_src_dst", inputs.cost_ns_src_dst.len(), n)?;
    for row in &inputs.cost_ns_src_dst {
        expect_len("cost_ns_src_dst[]", row.len(), n)?;
    }
    Ok(p2p::unequal_all_to_all(|from, to| inputs.cost_ns_src_dst[from][to], &inputs.arrival_ns))
}
