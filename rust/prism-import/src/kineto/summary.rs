//! The account of an import.

use super::clock::Offset;
use super::execution::Joined;
use super::matching::{Counts, Matching};
use super::network::Scale;
use super::program::Program;
use super::repair::Totals;
use super::{Imported, Recorded};
use crate::ImportError;
use crate::notes::Notes;
use prism_engine::graph::Graph;
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay, replay_ranks};
use prism_engine::units::SimTime;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Communications named in the list of who is late.
const MOST_LATE: usize = 20;

/// Who came last to a communication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Late {
    /// Ranks of its group.
    pub group: String,
    /// Which one.
    pub kind: String,
    /// When the first came, ns from the start of the job.
    pub first_arrival_ns: i64,
    /// From the first arrival to the last, ns.
    pub spread_ns: i64,
    /// The rank that came last.
    pub rank: u32,
    /// From the first rank's end to the last's, ns.
    pub end_spread_ns: i64,
}

/// How an import went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Ranks of the job.
    pub world_size: u32,
    /// Ranks with a trace.
    pub ranks: Vec<u32>,
    /// Ops of the graph.
    pub ops: u64,
    /// Events in all files.
    pub events: u64,
    /// What ran on devices.
    pub activities: u64,
    /// Kernels of NCCL and what became of them.
    pub collectives: Counts,
    /// How execution traces fit to the profiler's.
    pub execution_traces: Joined,
    /// Those that fit to nothing: rank, time and name, and why.
    pub unmatched: Vec<String>,
    /// Time on the device before and after repair.
    pub device_time: Totals,
    /// Iterations of the recording: from the last rank's end of the previous one to the last rank's end, ns.
    pub recorded_iteration_time_ns: Vec<i64>,
    /// The same of an unchanged replay.
    pub replayed_iteration_time_ns: Vec<i64>,
    /// Largest relative difference of these.
    pub worst_error: f64,
    /// Largest difference of the end of a rank's iteration, ns.
    pub worst_rank_end_error_ns: i64,
    /// Clocks.
    pub clocks: BTreeMap<u32, Offset>,
    /// What the profile's network was scaled by.
    pub network_scale: Scale,
    /// Communications with the largest spread of arrivals.
    pub late: Vec<Late>,
    /// Repairs by name.
    pub repairs: Notes,
}

pub(super) fn summarise(
    recorded: &Recorded,
    matching: &Matching,
    clocks: BTreeMap<u32, Offset>,
    programs: &BTreeMap<u32, Program>,
    graph: Graph,
    network_scale: Scale,
    repairs: Notes,
) -> Result<Imported, ImportError> {
    let counts = matching.counts;
    if counts.kernels != counts.used_kernels + counts.unmatched {
        return Err(ImportError::unfit(format!("a bug of the importer: collectives are lost ({counts:?})")));
    }
    let graph = Arc::new(graph);
    let (replayed, worst_rank_end_error_ns) = check(&graph, programs)?;
    let recorded_times = recorded_times(programs);
    let relative = |(a, b): (&i64, &i64)| (a - b).abs() as f64 / (*a).max(1) as f64;
    let worst_error = recorded_times.iter().zip(&replayed).map(relative).fold(0.0, f64::max);
    let summary = Summary {
        world_size: recorded.world_size,
        ranks: recorded.traces.keys().copied().collect(),
        ops: graph.num_ops(),
        events: recorded.traces.values().map(|trace| trace.num_events).sum(),
        activities: recorded.traces.values().map(|trace| trace.activities.len() as u64).sum(),
        unmatched: unmatched(recorded, matching),
        late: late(recorded, matching, programs),
        collectives: counts,
        execution_traces: recorded.joined,
        device_time: recorded.totals,
        recorded_iteration_time_ns: recorded_times,
        replayed_iteration_time_ns: replayed,
        worst_error,
        worst_rank_end_error_ns,
        clocks,
        network_scale,
        repairs,
    };
    let graph = Arc::into_inner(graph).expect("the replay is over");
    Ok(Imported { graph, summary })
}

/// Iteration times of a replay, and how far a rank's ends of iterations are off.
fn check(graph: &Arc<Graph>, programs: &BTreeMap<u32, Program>) -> Result<(Vec<i64>, i64), ImportError> {
    let unfit =
        |error: &dyn std::fmt::Display| ImportError::unfit(format!("the imported job does not replay: {error}"));
    let profile = Profile::from_toml(&graph.meta()["profile"]).map_err(|error| unfit(&error))?;
    let options = ReplayOptions::new(profile);
    let result = replay(graph, &options).map_err(|error| unfit(&error))?;
    let report = replay_ranks(graph, &options).map_err(|error| unfit(&error))?;
    let mut worst = 0;
    for rank in &report.ranks {
        let Some(program) = programs.get(&rank.rank.0) else { continue };
        let ends = rank.iteration_ends.iter().copied().map(SimTime::as_ns);
        worst = ends.zip(&program.iteration_ends).map(|(a, b)| (a - b).abs()).fold(worst, i64::max);
    }
    Ok((result.iteration_time_ns, worst))
}

fn recorded_times(programs: &BTreeMap<u32, Program>) -> Vec<i64> {
    let count = programs.values().map(|program| program.iteration_ends.len()).max().unwrap_or(0);
    if count == 0 {
        return programs.values().map(|program| program.end).max().into_iter().collect();
    }
    let marked = programs.values().filter(|program| program.has_marks);
    let mut before = marked.map(|program| program.begin).max().unwrap_or(0);
    let last = |k: usize| programs.values().filter_map(|program| program.iteration_ends.get(k)).max().copied();
    (0..count).filter_map(last).map(|end| end - std::mem::replace(&mut before, end)).collect()
}

fn unmatched(recorded: &Recorded, matching: &Matching) -> Vec<String> {
    let line = |(rank, record, why): &(u32, u32, String)| {
        let activity = &recorded.traces[rank].activities[recorded.records[rank][*record as usize].activity as usize];
        let name: String = recorded.names.text(activity.name).chars().take(60).collect();
        format!("rank {rank}, {} us, {name}: {why}", activity.start / 1000)
    };
    matching.unmatched.iter().take(crate::notes::LISTED).map(line).collect()
}

fn late(recorded: &Recorded, matching: &Matching, programs: &BTreeMap<u32, Program>) -> Vec<Late> {
    let mut arrivals: Vec<Vec<(i64, u32, i64)>> = vec![Vec::new(); matching.matched.len()];
    for (rank, program) in programs {
        for part in &program.parts {
            arrivals[part.matched as usize].push((part.start, *rank, part.end));
        }
    }
    let entry = |(one, parts): (&super::matching::Matched, &Vec<(i64, u32, i64)>)| {
        let (first, last) = (parts.iter().min()?, parts.iter().max()?);
        let ends = || parts.iter().map(|(.., end)| *end);
        Some(Late {
            group: group_text(&recorded.groups.key(one.group).ranks),
            kind: format!("{:?}", one.kind),
            first_arrival_ns: first.0,
            spread_ns: last.0 - first.0,
            rank: last.1,
            end_spread_ns: ends().max()? - ends().min()?,
        })
    };
    let mut late: Vec<Late> =
        matching.matched.iter().zip(&arrivals).filter(|(_, parts)| parts.len() > 1).filter_map(entry).collect();
    late.sort_by_key(|one| (std::cmp::Reverse(one.spread_ns), one.first_arrival_ns));
    late.truncate(MOST_LATE);
    late
}

fn group_text(ranks: &[u32]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(ToString::to_string).collect();
    if ranks.len() > SHOWN { format!("{}, ... ({} ranks)", shown.join(","), ranks.len()) } else { shown.join(",") }
}
