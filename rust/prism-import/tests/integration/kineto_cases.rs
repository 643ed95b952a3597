//! Troubles that users of trace tools reported; the numbers are those of the case list.

use crate::support::{Trace, import_folder};
use flate2::Compression;
use flate2::write::GzEncoder;
use prism_engine::graph::op::OpKind;
use prism_engine::ids::Rank;
use prism_import::kineto::{Options, import};
use serde_json::json;
use std::io::Write;

fn small(rank: Option<u32>) -> Trace {
    let mut trace = match rank {
        Some(rank) => Trace::of_rank(rank, 2),
        None => Trace::new(&json!({"schemaVersion": 1})),
    };
    trace.span("ProfilerStep#1", 0.0, 100.0).kernel("gemm", 7, (1.0, 10.0, 40.0));
    trace
}

#[test]
fn trace_01_a_file_alone_without_rank_information_is_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(small(None).text().as_bytes()).unwrap();
    std::fs::write(folder.path().join("t.json.gz"), packed.finish().unwrap()).unwrap();
    let imported = import_folder(folder.path());
    assert_eq!(imported.summary.ranks, [0]);
    assert_eq!(imported.summary.repairs.count("ranks_assumed"), 1);
    assert_eq!(imported.summary.recorded_iteration_time_ns, [100_000]);
}

#[test]
fn trace_01_ranks_come_from_file_names_and_can_be_overridden() {
    let folder = tempfile::tempdir().unwrap();
    small(None).write(folder.path(), "rank_0.json");
    small(None).write(folder.path(), "rank_1.json");
    let imported = import_folder(folder.path());
    assert_eq!(imported.summary.ranks, [0, 1]);
    assert_eq!(imported.summary.repairs.count("ranks_from_file_names"), 2);
    let ranks = [("rank_1.json".to_owned(), 5)].into();
    let imported = import(&[folder.path().to_owned()], &Options { ranks, ..Options::default() }).unwrap();
    assert_eq!((imported.summary.ranks, imported.summary.world_size), (vec![0, 5], 6));
}

#[test]
fn trace_01_two_files_of_one_rank_are_an_error_that_names_both() {
    let folder = tempfile::tempdir().unwrap();
    small(Some(0)).write(folder.path(), "a.json");
    small(Some(0)).write(folder.path(), "b.json");
    let error = import(&[folder.path().to_owned()], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("a.json and b.json both claim rank 0"), "{error}");
}

#[test]
fn trace_01_files_without_any_rank_are_an_error_that_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    small(None).write(folder.path(), "a.json");
    small(None).write(folder.path(), "b.json");
    let error = import(&[folder.path().to_owned()], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("--rank a.json=RANK"), "{error}");
}

#[test]
fn trace_03_a_duration_past_the_next_start_is_clipped_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 1);
    trace.kernel("a", 7, (-5.0, 0.0, 5.0)).kernel("b", 7, (-4.0, 10.0, 3_400_000.0)).kernel("c", 7, (-3.0, 20.0, 5.0));
    trace.write(folder.path(), "t.json");
    let summary = import_folder(folder.path()).summary;
    let note = &summary.repairs.0["corrupt_durations"];
    assert_eq!(note.count, 1);
    assert!(note.listed[0].contains("stream 7, event 2 (b)"), "{}", note.listed[0]);
    assert_eq!((summary.device_time.before_ns, summary.device_time.after_ns), (3_400_010_000, 20_000));
}

#[test]
fn trace_03_seven_of_many_kernels_on_several_streams() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 1);
    let mut excess = 0.0;
    for k in 0..3000_u32 {
        let start = f64::from(k) * 10.0;
        // Every eighth on a stream of its own, and every 400th runs far past the next one of its stream.
        let is_corrupt = k % 400 == 100 && k < 2900;
        let duration = if is_corrupt { 2_000_000.0 } else { 8.0 };
        excess += if is_corrupt { 2_000_000.0 - 40.0 } else { 0.0 };
        trace.kernel("k", 7 + k % 4, (start - 5.0, start, duration));
    }
    trace.write(folder.path(), "t.json");
    let summary = import_folder(folder.path()).summary;
    assert_eq!(summary.repairs.count("corrupt_durations"), 7);
    assert_eq!(summary.device_time.before_ns - summary.device_time.after_ns, (excess * 1000.0) as i128);
}

/// All-reduce with metadata, all-gather without, and a message without.
fn two_ranks(folder: &std::path::Path) {
    for rank in 0..2 {
        let late = f64::from(rank) * 3.0;
        let mut trace = Trace::of_rank(rank, 2);
        let all_reduce = Trace::metadata("allreduce", 1 << 20, &[0, 1]);
        trace
            .span("ProfilerStep#1", 0.0, 800.0)
            .kernel_with(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                20,
                (10.0, 20.0 + late, 100.0 - late),
                &all_reduce,
            )
            .kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, (200.0, 210.0 + late, 90.0 - late))
            .span(if rank == 0 { "nccl:send" } else { "nccl:recv" }, 399.0, 10.0)
            .kernel("ncclDevKernel_SendRecv(x)", 20, (400.0, 410.0, 50.0));
        trace.write(folder, &format!("rank{rank}.json"));
    }
}

#[test]
fn trace_07_kernels_without_metadata_are_matched_by_group_and_order_or_listed() {
    let folder = tempfile::tempdir().unwrap();
    two_ranks(folder.path());
    let imported = import_folder(folder.path());
    let counts = imported.summary.collectives;
    assert_eq!((counts.matched, counts.inferred, counts.unmatched), (1, 1, 2));
    assert_eq!(counts.kernels, counts.used_kernels + counts.unmatched);
    let [send, receive] = imported.summary.unmatched.as_slice() else { panic!("{:?}", imported.summary.unmatched) };
    assert!(send.starts_with("rank 0, 410 us") && send.contains("a send"), "{send}");
    assert!(receive.starts_with("rank 1, 410 us") && receive.contains("a receive"), "{receive}");
}

#[test]
fn trace_07_unmatched_kernels_are_computations_only_if_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    two_ranks(folder.path());
    let computes = |keeps_unmatched| {
        let options = Options { keeps_unmatched, ..Options::default() };
        let graph = import(&[folder.path().to_owned()], &options).unwrap().graph;
        let is_message = |op: &prism_engine::graph::op::Op| {
            matches!(op.kind,
            OpKind::Compute { name, .. } if graph.name(name).contains("SendRecv"))
        };
        graph.template(graph.rank_template(Rank(0))).iter().filter(is_message).count()
    };
    assert_eq!((computes(false), computes(true)), (0, 1));
}

#[test]
fn trace_07_nothing_is_matched_across_groups() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        let mut trace = Trace::of_rank(rank, 4);
        let ranks = if rank == 0 { [0, 2] } else { [1, 3] };
        let all_reduce = Trace::metadata("allreduce", 64, &ranks);
        trace.kernel_with("ncclDevKernel_AllReduce(x)", 20, (10.0, 20.0, 30.0), &all_reduce);
        trace.write(folder.path(), &format!("rank{rank}.json"));
    }
    let imported = import_folder(folder.path());
    assert_eq!(imported.summary.collectives.matched, 2);
    assert_eq!(imported.graph.num_comms(), 2);
    assert_eq!(imported.summary.repairs.count("absent_ranks"), 2);
}
