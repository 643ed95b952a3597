//! Traces of real jobs, whole and damaged.

use crate::support::{Trace, dlrm, import_folder, shared};
use prism_engine::collective::uniform_cost;
use prism_engine::contention::Contention;
use prism_engine::graph::Graph;
use prism_engine::graph::op::ComputeClass;
use prism_engine::ids::Rank;
use prism_engine::perturb::{Perturbations, World};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use prism_import::kineto::network::profile_of_device;
use prism_import::kineto::{Options, import};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// First number in a file that starts with `key` is replaced; for traces whose times are whole us.
fn move_times(path: &Path, by_us: i64) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(at) = rest.find("\"ts\": ") {
        let (before, after) = rest.split_at(at + 6);
        let end = after.find(|letter: char| !letter.is_ascii_digit()).unwrap();
        out.push_str(before);
        out.push_str(&(after[..end].parse::<i64>().unwrap() + by_us).to_string());
        rest = &after[end..];
    }
    out.push_str(rest);
    std::fs::write(path, out).unwrap();
}

fn file_of(folder: &Path, rank: u32) -> std::path::PathBuf {
    let start = format!("worker{rank}_");
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.file_name().unwrap().to_string_lossy().starts_with(&start)).unwrap()
}

fn replayed(graph: &Arc<Graph>, change: impl FnOnce(&mut ReplayOptions)) -> i64 {
    let mut options = ReplayOptions::new(Profile::from_toml(&graph.meta()["profile"]).unwrap());
    change(&mut options);
    replay(graph, &options).unwrap().iteration_time_ns.iter().sum()
}

#[test]
fn the_dlrm_job_has_the_expected_collectives_and_says_who_is_late() {
    let (Some(folder), Some(table)) = (dlrm(), shared("tables/expected_dlrm8_collectives.csv")) else { return };
    let all = import_folder(folder.path()).summary;
    assert_eq!((all.late[0].spread_ns, all.late[0].rank), (7_624_000, 7));
    assert!(all.late.iter().all(|late| late.end_spread_ns <= 7_000));
    assert_eq!(all.collectives.kernels, 64);
    // The table has six of the eight ranks.
    for rank in [6, 7] {
        std::fs::remove_file(file_of(folder.path(), rank)).unwrap();
    }
    let summary = import_folder(folder.path()).summary;
    let mut expected: BTreeMap<u32, Vec<(i64, u32)>> = BTreeMap::new();
    for line in std::fs::read_to_string(table).unwrap().lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |at: usize| fields[at].parse::<i64>().unwrap();
        expected.entry(number(4) as u32).or_default().push((number(6), number(0) as u32));
    }
    assert_eq!(summary.collectives.kernels, 48);
    assert_eq!((summary.collectives.inferred, summary.collectives.unmatched), (8, 0));
    let spread = |starts: &Vec<(i64, u32)>| {
        let (first, last) = (starts.iter().min().unwrap(), starts.iter().max().unwrap());
        ((last.0 - first.0) * 1000, last.1)
    };
    let mut wanted: Vec<(i64, u32)> = expected.values().map(spread).collect();
    wanted.sort_by_key(|(spread, _)| -spread);
    let found: Vec<(i64, u32)> = summary.late.iter().map(|late| (late.spread_ns, late.rank)).collect();
    assert_eq!(found, wanted);
}

#[test]
fn an_unchanged_replay_takes_as_long_as_the_recording() {
    let mut sources = vec![
        "traces/hta/nccl_parser_config__nccl_data.json.gz",
        "traces/hta/trace_diff__control__control.json.gz",
        "traces/hta/negative_queue_length_values_check__rank0.json.gz",
        "traces/tracelens/b200__eager_trace.json.gz",
        "traces/tracelens/mi300__resnet_act_checkpoint.json.gz",
        "traces/hta/trace_compare__test__test.json.gz",
    ];
    sources.push("traces/hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz");
    for source in sources {
        let Some(path) = shared(source) else { return };
        let summary = import(&[path], &Options::default()).unwrap().summary;
        assert!(
            summary.worst_error < 1e-4,
            "{source}: {} of {:?}",
            summary.worst_error,
            summary.recorded_iteration_time_ns
        );
        assert_eq!(summary.recorded_iteration_time_ns.len(), summary.replayed_iteration_time_ns.len(), "{source}");
        assert!(summary.collectives.kernels == summary.collectives.used_kernels + summary.collectives.unmatched);
    }
    let Some(folder) = dlrm() else { return };
    let summary = import_folder(folder.path()).summary;
    assert_eq!(summary.recorded_iteration_time_ns, [13_311_000]);
    assert_eq!((summary.replayed_iteration_time_ns, summary.worst_rank_end_error_ns), (vec![13_311_000], 0));
}

#[test]
fn an_imported_job_can_be_replayed_with_a_slower_rank_and_with_another_network() {
    let Some(folder) = dlrm() else { return };
    let graph = Arc::new(import_folder(folder.path()).graph);
    let healthy = replayed(&graph, |_| {});
    // The host is what is slow in this job: computing must be a lot slower before it shows.
    let late = replayed(&graph, |options| options.slow = [(Rank(7), 30.0)].into());
    assert!(late > healthy + 200_000, "{healthy} and {late}");
    let early = replayed(&graph, |options| options.slow = [(Rank(2), 1.05)].into());
    assert!((early - healthy).abs() < 100_000, "{healthy} and {early}");
    let slow_network = replayed(&graph, |options| options.profile.node.nvlink_bytes_per_s /= 1000);
    assert!(slow_network > healthy + 200_000, "{healthy} and {slow_network}");
}

#[test]
fn a_clock_that_is_ahead_is_solved_from_shared_collectives() {
    let Some(folder) = dlrm() else { return };
    let honest = import_folder(folder.path()).summary;
    move_times(&file_of(folder.path(), 5), 3_000_000);
    let summary = import_folder(folder.path()).summary;
    let ahead = summary.clocks[&5].ahead_ns;
    assert!((ahead - 3_000_000_000).abs() <= 3_000, "{ahead}");
    assert_eq!(summary.repairs.count("clocks_moved"), 1);
    let difference = summary.replayed_iteration_time_ns[0] - honest.replayed_iteration_time_ns[0];
    assert!(difference.abs() <= 4_000, "{difference}");
    assert!(summary.worst_error < 1e-3);
}

#[test]
fn ranks_without_a_trace_are_absent_and_come_as_the_others_say() {
    let Some(folder) = dlrm() else { return };
    for rank in [3, 6, 7] {
        std::fs::remove_file(file_of(folder.path(), rank)).unwrap();
    }
    let imported = import_folder(folder.path());
    let summary = &imported.summary;
    assert_eq!((summary.world_size, summary.ranks.as_slice()), (8, &[0, 1, 2, 4, 5][..]));
    assert_eq!(summary.repairs.count("absent_ranks"), 3);
    assert_eq!((summary.collectives.kernels, summary.collectives.inferred), (40, 8));
    assert!(summary.worst_error < 1e-3, "{}", summary.worst_error);
    // A rank that was there still holds up those that have no trace.
    let graph = Arc::new(imported.graph);
    let healthy = replayed(&graph, |_| {});
    assert!(replayed(&graph, |options| options.slow = [(Rank(4), 3.0)].into()) > healthy);
}

#[test]
fn a_truncated_file_is_used_as_far_as_it_goes() {
    let Some(folder) = dlrm() else { return };
    let path = file_of(folder.path(), 1);
    let text = std::fs::read(&path).unwrap();
    std::fs::write(&path, &text[..text.len() / 2]).unwrap();
    let summary = import_folder(folder.path()).summary;
    assert_eq!(summary.repairs.count("truncated_files"), 1);
    assert_eq!(summary.collectives.kernels, summary.collectives.used_kernels + summary.collectives.unmatched);
}

#[test]
fn one_damaged_event_does_not_end_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 1);
    trace.kernel("gemm", 7, (1.0, 10.0, 40.0)).kernel("relu", 7, (2.0, 60.0, 10.0));
    let text = trace.text().replace("\"dur\":40.0", "\"dur\":NaN");
    std::fs::write(folder.path().join("t.json"), text).unwrap();
    let summary = import_folder(folder.path()).summary;
    assert_eq!((summary.activities, summary.repairs.count("unreadable_events")), (1, 1));
}

#[test]
fn negative_and_absurd_durations_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 1);
    trace.kernel("a", 7, (1.0, 10.0, -40.0)).kernel("b", 7, (2.0, 60.0, 1e18)).kernel("c", 7, (3.0, 90.0, 5.0));
    trace.write(folder.path(), "t.json");
    let summary = import_folder(folder.path()).summary;
    assert_eq!(summary.repairs.count("negative_durations"), 1);
    assert_eq!(summary.repairs.count("unreadable_events") + summary.repairs.count("absurd_durations"), 1);
}

#[test]
fn mixed_schema_versions_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut old = Trace::new(&serde_json::json!({"schemaVersion": 0, "distributedInfo": {"rank": 0}}));
    old.kernel("a", 7, (1.0, 10.0, 5.0)).write(folder.path(), "a.json");
    let mut new = Trace::of_rank(1, 2);
    new.kernel("a", 7, (1.0, 10.0, 5.0)).write(folder.path(), "b.json");
    assert_eq!(import_folder(folder.path()).summary.repairs.count("mixed_schema_versions"), 1);
}

#[test]
fn a_launch_that_waits_for_the_device_holds_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 1);
    trace
        .span("ProfilerStep#1", 0.0, 1000.0)
        .kernel("long", 7, (10.0, 20.0, 500.0))
        .call("cudaDeviceSynchronize", 30.0, 492.0)
        .kernel("after", 7, (530.0, 540.0, 100.0));
    trace.write(folder.path(), "t.json");
    let graph = Arc::new(import_folder(folder.path()).graph);
    let healthy = replayed(&graph, |_| {});
    let slower = replayed(&graph, |options| options.slow = [(Rank(0), 2.0)].into());
    // 600 us of kernels, all of them behind one another because of the synchronisation, and 360 us of host at the end of which
    // 350 remain beside the last kernel.
    assert_eq!((healthy, slower), (1_000_000, 1_500_000));
}

#[test]
fn what_a_collective_took_beyond_the_profile_stays_with_another_network() {
    let folder = tempfile::tempdir().unwrap();
    let elements = 64 << 20;
    for rank in 0..2 {
        let mut trace = Trace::of_rank(rank, 2);
        let told = Trace::metadata("allreduce", elements, &[0, 1]);
        trace.span("ProfilerStep#1", 0.0, 200.0);
        for k in 0..4 {
            let at = 100.0 + 20_000.0 * f64::from(k);
            let took = if k == 3 { 9_000.0 } else { 3_000.0 };
            trace.kernel_with("ncclDevKernel_AllReduce(x)", 20, (at, at + 10.0, took), &told);
        }
        trace.write(folder.path(), &format!("rank{rank}.json"));
    }
    let profile = Profile::builtin("h100-sxm").unwrap();
    let options = Options { profile: Some(profile), ..Options::default() };
    let imported = import(&[folder.path().to_owned()], &options).unwrap();
    assert_eq!(imported.summary.collectives.matched, 4);
    let scaled = Profile::from_toml(&imported.graph.meta()["profile"]).unwrap();
    let shape = prism_engine::collective::CommShape::new(&[0, 1], &scaled);
    let call = prism_engine::collective::CollectiveCall {
        kind: prism_engine::graph::op::CollectiveKind::AllReduce,
        bytes: elements * 4,
        root: 0,
        ops: 1,
    };
    let modelled = uniform_cost(&shape, &call).as_ns();
    assert!(modelled <= 3_000_000, "the profile must not be slower than the recording: {modelled}");
    assert_eq!(imported.summary.repairs.count("faster_than_profile"), 0);
}

#[test]
fn a_slower_rank_computes_longer_and_communicates_as_long_as_was_recorded() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        let mut trace = Trace::of_rank(rank, 2);
        let told = Trace::metadata("allreduce", 1 << 20, &[0, 1]);
        trace.span("ProfilerStep#1", 0.0, 30_000.0);
        for k in 0..4 {
            // One collective takes far longer than the others, and than any network profile can explain.
            let (at, took) = (100.0 + 6_000.0 * f64::from(k), if k == 1 { 4_000.0 } else { 500.0 });
            trace.kernel("gemm", 7, (at, at + 10.0, 1_000.0));
            trace.kernel_with("ncclDevKernel_AllReduce(x)", 20, (at + 5.0, at + 1_010.0, took), &told);
            trace.call("cudaDeviceSynchronize", at + 20.0, 990.0 + took);
        }
        trace.write(folder.path(), &format!("rank{rank}.json"));
    }
    let imported = import_folder(folder.path());
    assert_eq!((imported.summary.collectives.matched, imported.summary.worst_rank_end_error_ns), (4, 0));
    let graph = Arc::new(imported.graph);
    let profile = Profile::from_toml(&graph.meta()["profile"]).unwrap();
    let report = |change: &dyn Fn(&mut ReplayOptions)| {
        let mut options = ReplayOptions::new(profile.clone());
        change(&mut options);
        replay(&graph, &options).unwrap()
    };
    let healthy = report(&|_| {});
    let beyond = healthy.device_time.by_class[&ComputeClass::Wait];
    assert!(beyond > 2 * 3_400_000, "{beyond}");
    let rule = |more: &str| {
        let text = format!("[[perturb]]\nkind = \"straggler\"\nranks = [1]\nfactor = 2.0\n{more}");
        Perturbations::from_toml(&text, World::new(2, &profile)).unwrap()
    };
    let (always, in_window) = (rule(""), rule("iterations = [0, 10]\n"));
    let changes: [&dyn Fn(&mut ReplayOptions); 5] = [
        &|options| options.slow = [(Rank(1), 2.0)].into(),
        &|options| options.slow = [(Rank(0), 2.0), (Rank(1), 2.0)].into(),
        &|options| options.perturb = always.clone(),
        &|options| options.perturb = in_window.clone(),
        &|options| (options.slow, options.contention) = ([(Rank(1), 2.0)].into(), Contention::FairShare),
    ];
    // Four gemms of 1 ms in a row, each waited for: half as fast adds 4 ms, whoever it is and however it is asked for. Where one
    // rank is late, the other has sent its first pieces by then: a little less.
    for (number, change) in changes.into_iter().enumerate() {
        let slower = report(change);
        assert_eq!(slower.device_time.by_class[&ComputeClass::Wait], beyond, "{number}");
        let more = slower.iteration_time_ns[0] - healthy.iteration_time_ns[0];
        let least = if number == 1 { 4_000_000 } else { 3_900_000 };
        assert!((least..=4_000_000).contains(&more), "{number}: {more}");
    }
}

#[test]
fn devices_are_known_by_a_part_of_their_names() {
    assert_eq!(profile_of_device("NVIDIA GB200"), Some("gb200-nvl72"));
    assert_eq!(profile_of_device("NVIDIA B200"), Some("b200-sxm"));
    assert_eq!(profile_of_device("NVIDIA H100 80GB HBM3"), Some("h100-sxm"));
    assert_eq!(profile_of_device("Tesla V100-SXM2-32GB"), Some("v100-dgx1"));
    assert_eq!(profile_of_device("Tesla V100-PCIE-16GB"), None);
    assert_eq!(profile_of_device("Tesla T4"), None);
}
