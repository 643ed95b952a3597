//! Where iterations end: as the profiler marked them, or where what is launched repeats.

use super::comm::Launches;
use super::event::RankTrace;
use crate::notes::Notes;

/// Share of launches that must be equal one period later.
const EQUAL: f64 = 0.97;
/// Fewest launches of a period.
const LEAST: usize = 8;
/// Most periods tried.
const MOST_TRIED: usize = 64;

/// Begin of the first iteration and ends of all, on the host's clock; none if there is no structure.
pub fn find(trace: &RankTrace, rank: u32, launches: &Launches, notes: &mut Notes) -> Option<(i64, Vec<i64>)> {
    let mut steps = trace.steps.clone();
    steps.sort_by_key(|step| (step.start, step.end));
    steps.dedup();
    if let Some(first) = steps.first() {
        // A step that its successor overlaps ends where that begins.
        let next = steps.iter().skip(1).map(|step| step.start).chain([i64::MAX]);
        return Some((first.start, steps.iter().zip(next).map(|(step, next)| step.end.min(next)).collect()));
    }
    let found = repeated(trace, launches)?;
    notes
        .add("iterations_by_structure", || format!("rank {rank}: {} iterations, no ProfilerStep marks", found.1.len()));
    Some(found)
}

/// The shortest period after which nearly every launch is the same; at least two of them.
fn repeated(trace: &RankTrace, launches: &Launches) -> Option<(i64, Vec<i64>)> {
    let mut issued: Vec<(i64, i64, u32)> = trace
        .activities
        .iter()
        .map(|activity| {
            let call = launches.get(&activity.correlation).map(|call| trace.calls[*call as usize].start);
            (call.unwrap_or(activity.start), activity.start, activity.name)
        })
        .collect();
    issued.sort_unstable();
    let names: Vec<u32> = issued.iter().map(|(.., name)| *name).collect();
    let period = period(&names)?;
    // Whole periods, counted from the end: warming up comes first.
    let whole = names.len() / period;
    let start = names.len() - whole * period;
    let bounds = (0..=whole).map(|k| start + k * period);
    let times: Vec<i64> = bounds.map(|at| issued.get(at).or(issued.last()).map_or(0, |(at, ..)| *at)).collect();
    Some((times[0], times[1..].to_vec()))
}

fn period(names: &[u32]) -> Option<usize> {
    let last = *names.last()?;
    let distances = names.iter().rev().enumerate().skip(LEAST).filter(|(_, name)| **name == last);
    let is_period = |period: usize| {
        let pairs = names.iter().zip(&names[period..]);
        let equal = pairs.filter(|(a, b)| a == b).count();
        equal as f64 >= EQUAL * (names.len() - period) as f64
    };
    let candidates = distances.map(|(distance, _)| distance).take_while(|distance| distance * 2 <= names.len());
    candidates.take(MOST_TRIED).find(|distance| is_period(*distance))
}
