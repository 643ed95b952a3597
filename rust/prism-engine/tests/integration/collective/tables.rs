//! Tables computed elsewhere: read from the shared data folder beside the project, skipped where there is none.

use prism_engine::collective::dtree;
use prism_engine::collective::tuning::Tuning;
use prism_engine::collective::vectors;
use prism_engine::collective::{Algorithm, CollectiveCall, CollectiveKind, CommShape, choice, uniform_cost};
use prism_engine::profile::Profile;
use serde_json::Value;
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;

/// A file of the shared data folder, or `None` (with a message) where the folder is absent.
fn shared(path: &str) -> Option<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(path);
    match std::fs::read_to_string(&file) {
        Ok(text) => Some(serde_json::from_str(&text).expect("the shared table is JSON")),
        Err(error) => {
            #[allow(clippy::print_stderr)] // The only way to tell that the test was not made.
            {
                eprintln!("skipped: {}: {error}", file.display());
            }
            None
        }
    }
}

#[test]
fn vectors_agree() {
    let Some(table) = shared("collectives/vectors.json") else { return };
    let mut models = BTreeSet::new();
    for vector in table.as_array().expect("a list of vectors") {
        let model = vector["model"].as_str().expect("a model name");
        let answer = vectors::completion(model, &vector["inputs"]);
        let answer = answer.map(|answer| serde_json::to_value(answer).expect("numbers and texts"));
        assert_eq!(answer.as_ref(), Ok(&vector["expect"]), "{}", vector["id"]);
        models.insert(model);
    }
    assert_eq!(models, BTreeSet::from(vectors::MODELS), "every model has a vector, and every vector a model");
}

#[test]
fn double_trees_are_those_of_nccl() {
    let Some(table) = shared("nccl/golden_dtree.json") else { return };
    let table = table.as_object().expect("trees by number of nodes");
    let id = |node: Option<usize>| node.map_or(-1, |node| node as i64);
    for (nodes, rows) in table {
        let n: usize = nodes.parse().expect("a number of nodes");
        let trees = dtree::double_tree(n);
        let row = |tree: &dtree::NodeTree, node: usize| {
            [id(tree.parent[node]), id(tree.children[node][0]), id(tree.children[node][1])]
        };
        let ours: Vec<_> = (0..n).map(|node| [row(&trees[0], node), row(&trees[1], node)]).collect();
        assert_eq!(serde_json::json!(ours), *rows, "{n} nodes");
    }
    assert!(table.len() > 10);
}

/// One GPU and one 50 GB/s card per node, 5 us per hop and no other cost: published simulators give the same end for
/// this ring (0.047975787 s and so on, to the nanosecond for those without rounding).
#[test]
fn gigabyte_ring_takes_what_simulators_of_single_messages_say() {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    profile.network.tuning = Tuning::Fastest;
    profile.node.gpus = 1;
    profile.network.nic_bytes_per_s = 50_000_000_000;
    profile.network.nic_efficiency = 1.0;
    profile.network.latency_ns = 5_000;
    profile.network.collective_launch_ns = 0;
    profile.network.ring_slices_per_step = 1;
    (profile.network.ll, profile.network.ll128) = (None, None);
    profile.network.ring_step_bytes = u64::MAX;
    // The trees would be chosen for their logarithmic depth: chunks as large as the buffer make them slow.
    profile.network.tree_chunk_bytes = u64::MAX;
    for (ranks, expected_ns) in [(512, 47_975_787), (1_024, 53_137_730), (4_096, 83_889_187)] {
        let members: Vec<_> = (0..ranks).collect();
        let shape = CommShape::new(&members, &profile);
        let call = CollectiveCall { kind: CollectiveKind::AllReduce, bytes: 1 << 30, root: 0, ops: 1 };
        assert_eq!(choice(&shape, &call).algorithm, Algorithm::Ring);
        let ns = uniform_cost(&shape, &call).as_ns();
        assert!((ns - expected_ns).abs() <= 1, "{ranks} ranks: {ns} ns, expected {expected_ns} ns");
    }
}

/// Fields of a line of comma-separated values, of which some are quoted.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut is_quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => fields.push(String::new()),
            _ => fields.last_mut().expect("at least one").push(letter),
        }
    }
    fields
}

/// Published rows of nccl-tests beside the model, which was not fitted to them. Printed; only gross errors fail.
#[test]
fn published_all_reduces_beside_the_model() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/tables/nccl_allreduce_bandwidth.csv");
    let Ok(text) = std::fs::read_to_string(&file) else { return };
    let mut sets: BTreeMap<String, Vec<(u64, u32, u32, f64)>> = BTreeMap::new();
    for row in text.lines().skip(1).map(fields) {
        let number = |at: usize| row[at].parse::<f64>().expect("a number");
        sets.entry(row[0].clone()).or_default().push((number(7) as u64, number(2) as u32, number(3) as u32, number(9)));
    }
    for (set, rows) in sets {
        let Some(name) = ["h100", "a100"].iter().find(|gpu| set.to_lowercase().contains(**gpu)) else { continue };
        let name = format!("{name}-sxm");
        for tuning in ["fastest", "nccl-2.26", "nccl-2.30"] {
            let mut profile = Profile::builtin(&name).expect("built in");
            profile.network.tuning = Tuning::try_from(tuning.to_owned()).expect("known");
            // Sizes below 64 KiB, up to 4 MiB, and above.
            let mut ratios: [Vec<f64>; 3] = Default::default();
            for (bytes, gpus, nodes, measured_us) in rows.iter().filter(|row| row.0 > 0 && row.3 > 0.0) {
                let per_node = gpus / nodes;
                let members: Vec<u32> = (0..*gpus).map(|rank| rank / per_node * 8 + rank % per_node).collect();
                let call = CollectiveCall { kind: CollectiveKind::AllReduce, bytes: *bytes, root: 0, ops: 1 };
                let cost = uniform_cost(&CommShape::new(&members, &profile), &call).as_ps() as f64 / 1e6;
                let band = usize::from(*bytes >= 64 << 10) + usize::from(*bytes > 4 << 20);
                ratios[band].push(cost / measured_us);
            }
            let median = |list: &mut Vec<f64>| {
                list.sort_by(f64::total_cmp);
                list.get(list.len() / 2).copied()
            };
            let [small, middle, large] = ratios.each_mut().map(median);
            #[allow(clippy::print_stderr)] // The figures are what the test is for.
            {
                eprintln!(
                    "{set} {tuning}: model / measured {small:.2?} below 64 KiB, {middle:.2?} to 4 MiB, {large:.2?} above"
                );
            }
            let is_near = |ratio: Option<f64>| ratio.is_none_or(|ratio| (0.3..3.0).contains(&ratio));
            assert!(large.is_some() && [small, middle, large].into_iter().all(is_near));
        }
    }
}
