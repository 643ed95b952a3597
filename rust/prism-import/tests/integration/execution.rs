//! Execution traces beside traces of the profiler.

use crate::support::{Trace, dlrm, import_folder, shared, unpack};
use prism_import::kineto::{Options, import};
use serde_json::{Value, json};
use std::path::Path;

/// Takes from every communication what the profiler says of it.
fn forget(folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let mut trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for event in trace["traceEvents"].as_array_mut().unwrap() {
            if event["name"].as_str().is_some_and(|name| name.starts_with("nccl:")) {
                event["args"] = json!({});
            }
        }
        std::fs::write(path, trace.to_string()).unwrap();
    }
}

#[test]
fn execution_traces_restore_the_sizes_that_the_profiler_did_not_write() {
    let (Some(folder), Some(archive)) = (dlrm(), shared("traces/param/inputs__dlrm_pytorch_et.tar.gz")) else { return };
    let whole = import_folder(folder.path());
    forget(folder.path());
    let without = import_folder(folder.path());
    // The archive's names tell no rank; its processes are those of the traces.
    let executions = tempfile::tempdir().unwrap();
    unpack(&archive, executions.path());
    let options = Options { execution_traces: vec![executions.path().to_owned()], ..Options::default() };
    let joined = import(&[folder.path().to_owned()], &options).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let bytes = |imported: &prism_import::kineto::Imported| {
        let path = scratch.path().join("job.prism");
        imported.graph.save(&path).unwrap();
        std::fs::read(path).unwrap()
    };
    assert_ne!(bytes(&without), bytes(&whole), "sizes matter");
    assert_eq!(bytes(&joined), bytes(&whole));
    let found = joined.summary.execution_traces;
    assert_eq!((found.files, found.by_order, found.by_id, found.unmatched, found.unused), (8, found.spans, 0, 0, 0));
    assert!(found.spans >= 64, "{found:?}");
    // Beside the traces they are found, too.
    unpack(&archive, folder.path());
    assert_eq!(bytes(&import_folder(folder.path())), bytes(&whole));
}

fn node(id: u64, collective: &str, elements: u64, group: &str) -> Value {
    let attribute = |name: &str, value: Value| json!({"name": name, "type": "", "value": value});
    json!({"id": id + 100, "name": "record_param_comms", "ctrl_deps": 1,
        "inputs": {"values": [], "shapes": [], "types": []}, "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [attribute("rf_id", json!(id)), attribute("collective_name", json!(collective)),
            attribute("dtype", json!("BFloat16")), attribute("in_msg_nelems", json!(elements)),
            attribute("out_msg_nelems", json!(elements)), attribute("pg_name", json!(group))]})
}

fn execution(nodes: &[Value]) -> String {
    let groups =
        json!([{"pg_name": "0", "ranks": [], "group_size": 4}, {"pg_name": "7", "ranks": [1, 3], "group_size": 2}]);
    let mut all = vec![json!({"id": 4, "name": "## process_group:init ##", "attrs": [],
        "inputs": {"values": [groups.to_string()], "types": ["String"]}})];
    all.extend_from_slice(nodes);
    // Its schema comes first, as PyTorch writes it.
    format!(r#"{{"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": {}}}"#, Value::Array(all))
}

/// Ranks 1 and 3 of four, with `calls` all-reduces of which the profiler knows record-function ids.
fn pair_of_traces(folder: &Path, calls: u64) {
    for rank in [1, 3] {
        let mut trace = Trace::of_rank(rank, 4);
        for call in 0..calls {
            let at = 1000.0 * call as f64;
            trace.span_with("record_param_comms", at, 50.0, &json!({"Record function id": 20 + call}));
            trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, (at + 10.0, at + 20.0, 100.0));
        }
        trace.write(folder, &format!("rank{rank}.json"));
    }
}

#[test]
fn ids_tell_group_and_size_of_a_communication() {
    let folder = tempfile::tempdir().unwrap();
    pair_of_traces(folder.path(), 2);
    // Of the second call nothing is told to rank 3, and something to rank 1 that the profiler has not.
    let text =
        execution(&[node(20, "allreduce", 5000, "7"), node(21, "allreduce", 600, "7"), node(90, "broadcast", 1, "7")]);
    std::fs::write(folder.path().join("et_rank1.json"), text).unwrap();
    std::fs::write(folder.path().join("et_rank3.json"), execution(&[node(20, "allreduce", 5000, "7")])).unwrap();
    let imported = import_folder(folder.path());
    let (summary, found) = (&imported.summary, imported.summary.execution_traces);
    assert_eq!(
        (found.files, found.spans, found.by_id, found.by_order, found.unmatched, found.unused),
        (2, 4, 3, 0, 1, 1)
    );
    assert_eq!(summary.repairs.count("execution_trace_unmatched"), 1);
    assert!(summary.repairs.0["execution_trace_unmatched"].listed[0].contains("rank 3, record_param_comms at 1000 us"));
    assert!(summary.repairs.0["execution_trace_unused"].listed[0].contains("rf_id 90"));
    assert_eq!((summary.collectives.kernels, summary.collectives.unmatched), (4, 0));
    assert_eq!(summary.late[0].group, "1,3", "{:?}", summary.late);
}

#[test]
fn what_execution_traces_tell_otherwise_is_listed_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::of_rank(0, 2);
    let mut told = Trace::metadata("allreduce", 64, &[0, 1]);
    told["Record function id"] = json!(20);
    trace.span_with("record_param_comms", 0.0, 50.0, &told);
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, (10.0, 20.0, 100.0));
    trace.write(folder.path(), "rank0.json");
    std::fs::write(folder.path().join("et_rank0.json"), execution(&[node(20, "allreduce", 65, "0")])).unwrap();
    let summary = import_folder(folder.path()).summary;
    assert_eq!((summary.execution_traces.by_id, summary.execution_traces.unmatched), (0, 1));
    assert_eq!(summary.repairs.count("execution_trace_disagrees"), 1);
}

#[test]
fn execution_traces_that_are_damaged_or_of_unknown_rank() {
    let folder = tempfile::tempdir().unwrap();
    pair_of_traces(folder.path(), 1);
    let whole = execution(&[node(20, "allreduce", 5000, "7"), node(21, "allreduce", 5000, "7")]);
    std::fs::write(folder.path().join("some.json"), &whole).unwrap();
    let named = |rank| Options { ranks: [("some.json".to_owned(), rank)].into(), ..Options::default() };
    let path = [folder.path().to_owned()];
    let error = import(&path, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("name it with --rank some.json=RANK"), "{error}");
    assert_eq!(import(&path, &named(3)).unwrap().summary.execution_traces.by_id, 1);
    let alone = import(&path, &named(2)).unwrap().summary;
    assert_eq!((alone.execution_traces.files, alone.repairs.count("execution_traces_alone")), (1, 1));
    std::fs::write(folder.path().join("some.json"), &whole[..whole.len() - 40]).unwrap();
    let cut = import(&path, &named(3)).unwrap().summary;
    assert_eq!((cut.execution_traces.by_id, cut.repairs.count("truncated_files")), (1, 1));
    std::fs::write(folder.path().join("some.json"), r#"{"schema": "1", "nodes": []}"#).unwrap();
    let error = import(&path, &named(3)).unwrap_err().to_string();
    assert!(error.contains("is not a PyTorch execution trace"), "{error}");
    std::fs::remove_file(folder.path().join("rank1.json")).unwrap();
    std::fs::remove_file(folder.path().join("rank3.json")).unwrap();
    std::fs::write(folder.path().join("some.json"), whole).unwrap();
    let error = import(&path, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("execution traces without times"), "{error}");
}
