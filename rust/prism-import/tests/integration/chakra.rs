//! Chakra traces of others, and our own read back.

use crate::support::{shared, unpack};
use prism_engine::graph::Graph;
use prism_engine::graph::op::{CollectiveKind, OpKind};
use prism_engine::ids::Rank;
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, ReplayResult, replay};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use prism_import::chakra::write::write_ranks;
use prism_import::chakra::{Options, Summary, import};
use prism_import::wire::Message;
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;

fn import_ok(paths: &[&Path], options: &Options) -> (Arc<Graph>, Summary) {
    let paths: Vec<_> = paths.iter().map(|path| path.to_path_buf()).collect();
    let (graph, summary) = import(&paths, options).unwrap();
    (Arc::new(graph), summary)
}

fn replayed(graph: &Arc<Graph>) -> ReplayResult {
    replay(graph, &ReplayOptions::new(Profile::from_toml(&graph.meta()["profile"]).unwrap())).unwrap()
}

/// A node with dependencies and a duration in us.
fn node(id: u64, node_type: u64, dependencies: &[u64], duration: u64) -> Message {
    let mut node = Message::default();
    node.number(1, id);
    node.bytes(2, format!("node {id}").as_bytes());
    node.number(3, node_type);
    node.packed(5, dependencies);
    node.number(7, duration);
    node
}

fn attribute(node: &mut Message, name: &str, field: u32, value: u64) {
    let mut message = Message::default();
    message.bytes(1, name.as_bytes());
    message.number_always(field, value);
    node.bytes(10, message.as_bytes());
}

fn file(nodes: &[Message]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut metadata = Message::default();
    metadata.bytes(1, b"0.0.4");
    metadata.write_delimited(&mut bytes).unwrap();
    for node in nodes {
        node.write_delimited(&mut bytes).unwrap();
    }
    bytes
}

#[test]
fn a_micro_benchmark_of_two_files_is_a_job_of_eight_ranks() {
    for (name, kind, count) in [
        ("all_reduce", CollectiveKind::AllReduce, 1 << 20),
        ("all_gather", CollectiveKind::AllGather, 1 << 20),
        ("reduce_scatter", CollectiveKind::ReduceScatter, 1 << 17),
        ("all_to_all", CollectiveKind::AllToAll, 1 << 17),
    ] {
        let file = |rank: u32| {
            shared(&format!(
                "traces/astra-sim/examples__workload__microbenchmarks__{name}__8npus_1MB__{name}.{rank}.et"
            ))
        };
        let (Some(first), Some(last)) = (file(0), file(7)) else { return };
        let (graph, summary) = import_ok(&[&first, &last], &Options::default());
        assert_eq!((summary.world_size, summary.ranks.as_slice()), (8, &[0, 7][..]));
        assert_eq!((summary.communications, summary.used_communications), (2, 2));
        assert_eq!(summary.repairs.count("absent_ranks"), 6);
        let op = graph.template(graph.rank_template(Rank(3))).op(0);
        assert!(matches!(op.kind, OpKind::Collective { kind: k, count: c, .. } if k == kind && c == count), "{op:?}");
        assert!(replayed(&graph).total_time_ns > 0);
    }
}

#[test]
fn an_all_reduce_takes_as_long_as_a_published_simulator_says_on_its_network() {
    let file = |rank| {
        shared(&format!(
            "traces/astra-sim/examples__workload__microbenchmarks__all_reduce__8npus_1MB__all_reduce.{rank}.et"
        ))
    };
    let (Some(first), Some(last)) = (file(0), file(7)) else { return };
    // 14 steps of 128 KiB at 50e9 B/s and 500 ns.
    let options = Options { profile: Some(flat_profile(500, 50_000_000_000)), ..Options::default() };
    let (graph, _) = import_ok(&[&first, &last], &options);
    assert_eq!(replayed(&graph).total_time_ns, 14 * (131_072 * 20 + 500_000) / 1000 + 1);
}

#[test]
fn every_rank_of_the_custom_ring_is_read() {
    let files: Vec<_> = (0..8)
        .filter_map(|rank| {
            shared(&format!("traces/astra-sim/examples__system__custom_collectives__custom_ring_allreduce_8npus_1MB__custom_allreduce.{rank}.et"))
        })
        .collect();
    if files.len() < 8 {
        return;
    }
    let paths: Vec<&Path> = files.iter().map(std::path::PathBuf::as_path).collect();
    let (graph, summary) = import_ok(&paths, &Options::default());
    assert_eq!(summary.schemas, ["1.0.2-chakra.0.0.4"]);
    assert_eq!(summary.communications, summary.used_communications + summary.repairs.count("unusable_communications"));
    assert_eq!(summary.used_communications, 8 * 28);
    // 14 steps of a message, and 7 us of computing behind half of them; all ranks alike.
    let flat = ReplayOptions::new(flat_profile(500, 50_000_000_000));
    assert_eq!(replay(&graph, &flat).unwrap().total_time_ns, (14 * 3_121_440 + 7 * 7_000_000) / 1000 + 1);
}

#[test]
fn the_feeders_trace_is_read_in_both_forms() {
    let (Some(messages), Some(json)) =
        (shared("traces/chakra/feeder_tests_trace.tar.gz"), shared("traces/chakra/json_trace.tar.gz"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    unpack(&messages, folder.path());
    let (graph, summary) = import_ok(&[&folder.path().join("chakra.0.et")], &Options::default());
    assert_eq!(summary.schemas, ["1.0.1"]);
    assert!(summary.nodes > 1000 && summary.ops > 1000, "{summary:?}");
    assert_eq!(summary.communications, summary.used_communications + summary.repairs.count("unusable_communications"));
    assert!(replayed(&graph).total_time_ns > 1_000_000);
    let folder = tempfile::tempdir().unwrap();
    unpack(&json, folder.path());
    let (_, from_json) = import_ok(&[&folder.path().join("chakra.0.json")], &Options::default());
    assert!(from_json.nodes > 1000);
    let (small, small_summary) = import_ok(&[&folder.path().join("small_chakra.0.json")], &Options::default());
    assert_eq!(small_summary.nodes, 7);
    assert_eq!(small_summary.repairs.count("dangling_dependencies"), 7);
    // Host: 318, 28, 85, 79 and 153 us one after the other, less what only the device's 4 us wait for.
    assert_eq!(replayed(&small).total_time_ns, (318 + 28 + 85 + 79 + 153) * 1000);
}

#[test]
fn a_trace_of_pytorch_without_times_is_refused_with_a_way_out() {
    let Some(archive) = shared("traces/chakra/1.0.2-chakra.0.0.4.tgz") else { return };
    let folder = tempfile::tempdir().unwrap();
    unpack(&archive, folder.path());
    let error = import(&[folder.path().join("1.0.2-chakra.0.0.4.json")], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("schema 1.0.2-chakra.0.0.4") && error.contains("prism import kineto"), "{error}");
}

#[test]
fn dangling_and_cyclic_dependencies_are_dropped_and_listed() {
    let folder = tempfile::tempdir().unwrap();
    let nodes = [node(1, 4, &[3], 5), node(2, 4, &[1, 99], 7), node(3, 4, &[2], 11), node(4, 4, &[4], 13)];
    std::fs::write(folder.path().join("t.0.et"), file(&nodes)).unwrap();
    let (graph, summary) = import_ok(&[folder.path()], &Options::default());
    assert_eq!(summary.repairs.count("dangling_dependencies"), 1);
    assert_eq!(summary.repairs.count("cyclic_dependencies"), 2);
    assert!(summary.repairs.0["cyclic_dependencies"].listed.iter().any(|text| text.contains("node 1 goes without")));
    assert_eq!(replayed(&graph).total_time_ns, 36_000);
}

#[test]
fn dependencies_between_streams_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = node(1, 4, &[], 100);
    attribute(&mut host, "is_cpu_op", 27, 1);
    let kernel = node(2, 4, &[1], 10);
    let mut after = node(3, 4, &[2], 1);
    attribute(&mut after, "is_cpu_op", 27, 1);
    std::fs::write(folder.path().join("t.0.et"), file(&[host, kernel, after])).unwrap();
    let (graph, _) = import_ok(&[folder.path()], &Options::default());
    assert_eq!(replayed(&graph).total_time_ns, 111_000);
}

#[test]
fn communication_that_cannot_be_told_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let mut unknown = node(1, 7, &[], 0);
    attribute(&mut unknown, "comm_type", 9, 77);
    let nodes = [unknown, node(2, 7, &[], 0), node(3, 5, &[], 0), node(4, 4, &[], 3)];
    std::fs::write(folder.path().join("t.0.et"), file(&nodes)).unwrap();
    let (_, summary) = import_ok(&[folder.path()], &Options { world_size: Some(2), ..Options::default() });
    assert_eq!((summary.communications, summary.used_communications), (3, 0));
    assert_eq!(summary.repairs.count("unusable_communications"), 3);
}

#[test]
fn what_is_written_is_read_back_as_the_same_job() {
    let profile = flat_profile(5_000, 50_000_000_000);
    for ep in [1, 2] {
        let step =
            TransformerStep { dp: 2, tp: 2, pp: 2, microbatches: 4, layers: 2, ep, ..TransformerStep::default() };
        let graph = Arc::new(step.graph_on(&profile).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let ranks: Vec<Rank> = (0..8).map(Rank).collect();
        let written = write_ranks(&graph, &ranks, &folder.path().join("job")).unwrap();
        let groups = std::fs::read_to_string(folder.path().join("job.groups.json")).unwrap();
        let options = Options { groups: Some(groups), profile: Some(profile.clone()), world_size: None };
        let files: Vec<_> = (0..8).map(|rank| folder.path().join(format!("job.{rank}.et"))).collect();
        let paths: Vec<&Path> = files.iter().map(std::path::PathBuf::as_path).collect();
        let (back, summary) = import_ok(&paths, &options);
        assert_eq!((summary.nodes, summary.communications), (written.nodes, written.communications));
        assert_eq!(summary.used_communications, written.communications);
        assert_eq!(replayed(&back).total_time_ns, replayed(&graph).total_time_ns);
    }
}

#[test]
fn host_gaps_and_synchronisations_survive_the_way_there_and_back() {
    let text = "\
prism-graph 1
world 1
name \"k\"
template \"t\"
  +5000000 s0 compute 10000000 Kernel Measured \"k\"
  +1000000 s0 event_record e0
  +0 s1 event_wait e0
  +0 s1 compute 3000000 Kernel Measured \"k\"
  +2000000 s1 stream_sync
  +4000000 s0 compute 1000000 Kernel Measured \"k\"
  +0 s0 device_sync
  +7000000 s1 compute 2000000 Kernel Measured \"k\"
rank 0 template 0 comms
";
    let graph = Arc::new(Graph::from_text(text).unwrap());
    let folder = tempfile::tempdir().unwrap();
    write_ranks(&graph, &[Rank(0)], &folder.path().join("job")).unwrap();
    let (back, _) = import_ok(&[&folder.path().join("job.0.et")], &Options::default());
    let options = ReplayOptions::new(Profile::builtin("h100-sxm").unwrap());
    assert_eq!(replay(&back, &options).unwrap().total_time_ns, replay(&graph, &options).unwrap().total_time_ns);
}

#[test]
fn files_that_are_none_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.0.et");
    for (bytes, what) in [
        (&b""[..], "it is empty"),
        (b"\xff\xff\xff\xff\x7f rest", "a message of"),
        (b"hello, this is text", "ends in the middle"),
        (b"{\"a\": 1}", "no list `workload_graph`"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = import(std::slice::from_ref(&path), &Options::default()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    std::fs::write(&path, file(&[])).unwrap();
    assert!(import(&[path], &Options::default()).unwrap_err().to_string().contains("it has no nodes"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_bytes_make_the_reader_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), at in 0..200_usize) {
        let folder = tempfile::tempdir().unwrap();
        let mut whole = file(&[node(1, 4, &[2], 5), node(2, 7, &[1], 7), node(3, 4, &[2], 11)]);
        let at = at % whole.len();
        bytes.truncate(3);
        whole.splice(at..(at + bytes.len()).min(whole.len()), bytes);
        let path = folder.path().join("t.0.et");
        std::fs::write(&path, whole).unwrap();
        if let Ok((_, summary)) = import(&[path], &Options { world_size: Some(2), ..Options::default() }) {
            let listed = summary.repairs.count("unusable_communications");
            prop_assert_eq!(summary.communications, summary.used_communications + listed);
        }
    }
}
