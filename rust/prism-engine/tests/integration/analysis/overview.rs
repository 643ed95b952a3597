//! The picture of a job: what it shows adds up, and equals what others say.

use prism_engine::analysis::{DiagnoseOptions, JobTrace, MemoryReport, Overview, OverviewOptions, diagnose};
use prism_engine::graph::Graph;
use prism_engine::ids::Rank;
use prism_engine::profile::Profile;
use prism_engine::replay::ReplayOptions;
use prism_engine::synthetic::TransformerStep;
use std::sync::Arc;

fn picture(slow: &[(u32, f64)], fine: &OverviewOptions) -> Overview {
    let step = TransformerStep { dp: 4, tp: 4, pp: 4, microbatches: 8, iterations: 2, ..TransformerStep::default() };
    let mut options = ReplayOptions::new(Profile::builtin("h100-sxm").expect("built in"));
    options.slow = slow.iter().map(|(rank, factor)| (Rank(*rank), *factor)).collect();
    let trace = JobTrace::record(&Arc::new(step.graph().expect("valid")), &options).expect("complete");
    Overview::of(&trace, fine).expect("known")
}

/// Shares of one rank's row, in fifteenths, by state.
fn sums(overview: &Overview, rank: u32) -> [u32; 3] {
    let digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut at = rank / overview.map.ranks_per_row;
    let run = overview.map.runs.iter().find(|(_, count)| {
        let is_it = at < *count;
        at = at.saturating_sub(*count);
        is_it
    });
    let row = &overview.map.rows[run.expect("in the map").0 as usize];
    let values: Vec<u32> = row.chars().map(|c| digits.find(c).expect("a digit") as u32).collect();
    assert_eq!(values.len(), 2 * overview.map.columns);
    values.chunks(2).fold([0; 3], |sums, cell| {
        let value = cell[0] << 6 | cell[1];
        [sums[0] + (value >> 8), sums[1] + (value >> 4 & 15), sums[2] + (value & 15)]
    })
}

#[test]
fn a_picture_adds_up_and_shows_who_is_late() {
    let fine = OverviewOptions::default();
    let healthy = picture(&[], &fine);
    let found = picture(&[(21, 1.2)], &fine);
    for overview in [&healthy, &found] {
        assert_eq!((overview.world_size, overview.ranks_examined, overview.iteration), (64, 64, 1));
        let totals = overview.totals;
        let all = totals.compute_ns + totals.transfer_ns + totals.waiting_ns + totals.idle_ns;
        assert!((all - 64 * overview.length_ns).abs() < 64 * 4, "every moment of every rank counts once");
        let (path, length) = (&overview.path, overview.length_ns);
        assert_eq!((path[0].start_ns, path[path.len() - 1].end_ns), (0, length));
        assert!(path.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns && pair[0].rank != pair[1].rank));
        let exposed: i64 = overview.communication.iter().map(|cost| cost.transfer_ns + cost.waiting_ns).sum();
        assert!((exposed - totals.transfer_ns - totals.waiting_ns).abs() < 64 * 16, "by communicator it is the same");
        let sizes: Vec<(u32, u32)> = overview.communication.iter().map(|cost| (cost.size, cost.count)).collect();
        assert!(sizes.contains(&(4, 16)), "{sizes:?}");
    }
    assert_eq!(found.late[0].rank, Rank(21));
    assert!(found.late[0].waited_ns < found.late[0].usual_waited_ns);
    assert!(found.late[0].compute_ns * 10 > found.late[0].usual_compute_ns * 11);
    assert!(sums(&found, 21)[0] > sums(&found, 22)[0] * 11 / 10, "the slow rank computes longer");
    assert!(sums(&found, 22)[2] > sums(&healthy, 22)[2], "and the others of its group wait");
}

#[test]
fn ranks_share_rows_where_there_are_too_many_different_ones() {
    let slow: Vec<(u32, f64)> = (0..64).map(|rank| (rank, 1.0 + f64::from(rank) / 100.0)).collect();
    let whole = picture(&slow, &OverviewOptions::default());
    let fine = OverviewOptions { max_rows: 8, columns: 32, iteration: Some(0) };
    let coarse = picture(&slow, &fine);
    assert_eq!((whole.map.ranks_per_row, coarse.iteration), (1, 0));
    assert!(coarse.map.ranks_per_row >= 8 && coarse.map.rows.len() <= 8, "{:?}", coarse.map.runs);
    let count: u32 = coarse.map.runs.iter().map(|(_, count)| count).sum();
    assert_eq!(count, 64_u32.div_ceil(coarse.map.ranks_per_row));
    assert_eq!(picture(&slow, &fine), coarse, "the same again");
}

const STAGES: &str = r#"prism-graph 1
world 6
name "embed"
comm 0-5
template "first"
  +0 s0 compute 1000000 Gemm Default "embed"
  +0 s0 alloc 40000000000
  +0 s0 alloc 20000000000
  +0 s0 free 20000000000
  +0 s0 AllReduce c0 Uint8 8 Sum
template "later"
  +0 s0 compute 1000000 Gemm Default "embed"
  +0 s0 alloc 30000000000
  +0 s0 AllReduce c0 Uint8 8 Sum
template "last"
  +0 s0 compute 1000000 Gemm Default "embed"
  +0 s0 alloc 30000000000
  +0 s0 free 30000000000
  +0 s0 AllReduce c0 Uint8 8 Sum
rank 0-1 template 0 comms 0
rank 2-3 template 1 comms 0
rank 4-5 template 2 comms 0
"#;

#[test]
fn memory_is_told_by_stage_and_the_fullest_card_first() {
    let graph = Arc::new(Graph::from_text(STAGES).expect("valid"));
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let report = MemoryReport::of(&graph, &profile, None);
    let groups: Vec<_> = report.groups.iter().map(|group| (group.peak_bytes, group.ranks.0.clone())).collect();
    assert_eq!(groups, [(60_000_000_000, vec![(0, 1)]), (30_000_000_000, vec![(2, 5)])]);
    assert_eq!((report.num_over, report.over_by()), (0, None));
    assert_eq!((report.groups[0].peak_op, report.groups[0].after.as_str()), (2, "embed"));
    assert_eq!(report.groups[0].curve, [0, 40_000_000_000, 60_000_000_000, 40_000_000_000, 40_000_000_000]);

    let mut options = DiagnoseOptions::new(ReplayOptions::new(profile.clone()));
    let fits = diagnose(&graph, &options).expect("complete");
    assert!(
        fits.headline.starts_with("nothing wrong found: no rank holds up the others, the fullest card (rank 0) is")
    );
    options.card_bytes = Some(40 << 30);
    let found = diagnose(&graph, &options).expect("complete");
    let need = found.memory.expect("allocations");
    let context = profile.device.context_bytes;
    assert_eq!(need.over_by_bytes, Some(60_000_000_000 + context - (40 << 30)));
    assert_eq!((need.num_ranks, need.num_over, need.peak_op), (2, 2, 2));
    let text = "out of memory: ranks 0-1 need 55.88 GiB at op 2 (after embed) of iteration 0, and";
    assert!(found.headline.starts_with(text), "{}", found.headline);
}
