//! Fitting a profile's network to measured collectives.

use crate::support::shared;
use prism_engine::collective::{CollectiveCall, CommShape, uniform_cost};
use prism_engine::graph::op::CollectiveKind;
use prism_engine::profile::Profile;
use prism_import::calibrate::logs::{Hints, read};
use prism_import::calibrate::{Factors, calibrate, scaled};
use prism_import::notes::Notes;
use std::fmt::Write;

/// Output of nccl-tests as it would be on a machine of this profile.
fn nccl_tests(profile: &Profile, ranks: u32, nodes: u32) -> String {
    let mut text = format!("# Collective test starting: all_reduce_perf\n# nThread 1 nGpus {ranks} minBytes 1048576\n");
    let each = ranks / nodes;
    let members: Vec<u32> = (0..ranks).map(|rank| (rank / each) * profile.node.gpus + rank % each).collect();
    for rank in 0..ranks {
        writeln!(
            text,
            "#  Rank  {rank} Group  0 Pid  {rank} on  node{} device  {} [0x18] NVIDIA",
            rank / each,
            rank % each
        )
        .unwrap();
    }
    text += "#\n#                                              out-of-place                       in-place\n";
    text += "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n";
    text += "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)\n";
    let shape = CommShape::new(&members, profile);
    for power in 20..30 {
        let bytes = 1_u64 << power;
        let call = CollectiveCall { kind: CollectiveKind::AllReduce, bytes, root: 0, ops: 1 };
        let us = uniform_cost(&shape, &call).as_ns() as f64 / 1000.0;
        writeln!(text, "{bytes:12} {:12} float sum -1 {us:8.2} 1.0 1.0 0 {us:8.2} 1.0 1.0 0", bytes / 4).unwrap();
    }
    text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100\n"
}

#[test]
fn a_machine_of_known_network_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut base = Profile::builtin("h100-sxm").unwrap();
    base.network.tuning = prism_engine::collective::tuning::Tuning::Fastest;
    let truth = Factors {
        nvlink_bandwidth: 0.6,
        network_bandwidth: 0.5,
        network_latency: 2.0,
        launch_us: 21.0,
        ..Factors::NONE
    };
    let machine = scaled(&base, truth);
    let mut paths = Vec::new();
    for (ranks, nodes) in [(4, 1), (8, 1), (16, 2), (32, 4)] {
        let path = folder.path().join(format!("all_reduce_{ranks}.log"));
        std::fs::write(&path, nccl_tests(&machine, ranks, nodes)).unwrap();
        paths.push(path);
    }
    let (profile, summary) = calibrate(&paths, &base, &Hints::default()).unwrap();
    assert_eq!((summary.rows, summary.left_out_by), (80, "file"));
    assert!(summary.before.median > 0.2, "{summary:?}");
    assert!(summary.fitted.median < 0.03, "{summary:?}");
    assert!(summary.left_out.median < 0.06 && summary.left_out.rows == 80, "{summary:?}");
    let ratio = profile.node.nvlink_bytes_per_s as f64 / machine.node.nvlink_bytes_per_s as f64;
    assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
    assert!((summary.factors.launch_us - truth.launch_us).abs() < 1.0, "{summary:?}");
    assert!((summary.factors.node_latency - 1.0).abs() < f64::EPSILON, "not fitted");
    // The same time under every protocol.
    let launches = |profile: &Profile| {
        let network = &profile.network;
        [network.collective_launch_ns, network.ll.unwrap().launch_ns, network.ll128.unwrap().launch_ns]
    };
    let added: Vec<u64> = launches(&profile).iter().zip(launches(&base)).map(|(new, old)| new - old).collect();
    assert!(added.iter().all(|ns| ns.abs_diff(added[0]) <= 1), "{added:?}");
}

#[test]
fn tables_measured_on_a100_nodes_are_predicted_for_rank_counts_left_out() {
    let files: Vec<_> = [3, 4, 7]
        .iter()
        .filter_map(|n| shared(&format!("traces/vtrain/trace__a100__AR_GPU{n}_1M_1024M_LUT")))
        .collect();
    if files.len() < 3 {
        return;
    }
    let (_, summary) = calibrate(&files, &Profile::builtin("a100-sxm").unwrap(), &Hints::default()).unwrap();
    assert!(summary.rows > 1000);
    // The goal for one node whose GPU is calibrated on other rank counts: median 5 %, nine of ten within 13 %.
    assert!(summary.left_out.median <= 0.05 && summary.left_out.p90 <= 0.13, "{summary:?}");
    assert!(summary.fitted.median < summary.before.median, "{summary:?}");
}

#[test]
fn tables_measured_on_a_mesh_are_predicted_for_rank_counts_left_out() {
    let table = |n: &u32| shared(&format!("traces/vtrain/trace__v100__AR_GPU{n}_1M_1024M_LUT"));
    let files: Vec<_> = [2, 4, 6, 7].iter().filter_map(table).collect();
    if files.len() < 4 {
        return;
    }
    let base = Profile::builtin("v100-dgx1").unwrap();
    let (_, summary) = calibrate(&files, &base, &Hints::default()).unwrap();
    assert!(summary.left_out.median <= 0.05 && summary.left_out.p90 <= 0.13, "{summary:?}");
    // The built-in constant is from these rows: there is little to add.
    assert!((summary.factors.nvlink_bandwidth - 1.0).abs() < 0.03, "{summary:?}");
    // As if the mesh had switches, two constants do not describe it.
    let mut switches = base;
    switches.node.nvlink_rings.clear();
    let (_, without) = calibrate(&files, &switches, &Hints::default()).unwrap();
    assert!(without.left_out.median > 0.3, "{without:?}");
}

#[test]
fn records_of_the_inspector_are_read() {
    let Some(path) = shared("traces/nccl_inspector/inspector_sample_records.txt") else { return };
    let text = std::fs::read_to_string(path).unwrap();
    let objects: Vec<&str> = text.split("\n{").skip(1).collect();
    let first = format!("{{{}", objects[0].split("\nexport").next().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.json");
    std::fs::write(&path, first).unwrap();
    let mut notes = Notes::default();
    let rows = read(&path, 0, &Hints::default(), &mut notes).unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].kind, rows[0].bytes, rows[0].ranks), (CollectiveKind::AllReduce, 17_179_869_184, 8));
    assert!((rows[0].time_ns - 61_974_000.0).abs() < 1.0);
}

#[test]
fn the_inspector_s_prometheus_text_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nccl.prom");
    let line = |size: &str, collective: &str, time: &str| {
        format!(
            "nccl_collective_exec_time_microseconds{{version=\"v5.1\",comm_name=\"DP, 0\",n_nodes=\"2\",nranks=\"4\",\
             collective=\"{collective}\",message_size=\"{size}\",algo_proto=\"Ring_ll\"}} {time}\n"
        )
    };
    let text = "# TYPE nccl_collective_exec_time_microseconds gauge\n".to_owned()
        + &line("4-5GB", "AllReduce", "9498.47")
        + "nccl_bus_bandwidth_gbs{nranks=\"4\",collective=\"AllReduce\",message_size=\"4-5GB\"} 678.263\n"
        + &line("512KB", "AllGather", "20 1748030377748")
        + &line("5-4GB", "AllReduce", "1")
        + &line("4-5GB", "AllReduce", "soon");
    std::fs::write(&path, text).unwrap();
    let mut notes = Notes::default();
    let rows = read(&path, 0, &Hints::default(), &mut notes).unwrap();
    let found: Vec<_> =
        rows.iter().map(|row| (row.kind, row.bytes, row.ranks, row.nodes, row.time_ns.round() as i64)).collect();
    let expected = [
        (CollectiveKind::AllReduce, (9 << 30) / 2, 4, 2, 9_498_470),
        (CollectiveKind::AllGather, 4 << 19, 4, 2, 20_000),
    ];
    assert_eq!(found, expected);
    assert_eq!((notes.count("sizes_from_ranges"), notes.count("unreadable_lines")), (1, 2));
    let Some(sample) = shared("traces/nccl_inspector/inspector_sample_records.txt") else { return };
    let rows = read(&sample, 0, &Hints::default(), &mut Notes::default()).unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row.ranks > 1), "{rows:?}");
}

#[test]
fn logs_that_do_not_tell_enough_are_errors_with_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some.log");
    let error = |text: &str, hints: &Hints| {
        std::fs::write(&path, text).unwrap();
        read(&path, 0, hints, &mut Notes::default()).unwrap_err().to_string()
    };
    assert!(error("hello\n", &Hints::default()).contains("has no measurement"));
    let header = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n";
    let rows = format!("{header} 1024 256 float sum -1 10.0 1 1 0 11.0 1 1 0\n");
    assert!(error(&rows, &Hints::default()).contains("--collective"));
    let kind = Some(CollectiveKind::AllReduce);
    assert!(error(&rows, &Hints { kind, ..Hints::default() }).contains("--ranks"));
    std::fs::write(&path, &rows).unwrap();
    let hints = Hints { kind, ranks: Some(8), nodes: None };
    assert_eq!(read(&path, 0, &hints, &mut Notes::default()).unwrap().len(), 2);
    let few =
        calibrate(std::slice::from_ref(&path), &Profile::builtin("h100-sxm").unwrap(), &hints).unwrap_err().to_string();
    assert!(few.contains("too few"), "{few}");
}
