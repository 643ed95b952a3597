//! NCCL's choice of algorithm, protocol, channels and threads: points worked out by hand from the published formula, and what
//! holds everywhere.

use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter};
use prism_engine::collective::tuning::{
    CpuVendor, Function, LinkKind, NcclSettings, Switches, Table, Topology, Tuning, Version, model,
};
use prism_engine::collective::{self, Scratch, p2p};
use prism_engine::collective::{Algorithm, CollectiveCall, CollectiveKind, CommShape, Protocol, choice, uniform_cost};
use prism_engine::cost::comm::Link;
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;
use proptest::prelude::*;

fn version(text: &str) -> Version {
    Version::parse(text).expect("a known version")
}

fn settings(pairs: &[(&str, &str)]) -> NcclSettings {
    NcclSettings::parse(pairs.iter().copied()).expect("settings that can be followed")
}

/// Eight H100 of a node: 12 searched channels of 30.9 GB/s.
fn one_node() -> Topology {
    Topology {
        ranks: 8,
        nodes: 1,
        searched_channels: 12,
        channels: 24,
        intra_bandwidth: 30.9,
        inter_bandwidth: 30.9,
        intra: LinkKind::NvLink,
        cpu: CpuVendor::Intel,
        compute_capability: 90,
        protocols: [true; 3],
        switches: None,
    }
}

/// The same with switches that reduce: 9 x 40 of 370.8 GB/s.
fn with_switches() -> Topology {
    let switches = Switches { gpus: 8, channels: 8, intra_bandwidth: 40.0, inter_bandwidth: 60.0 };
    Topology { switches: Some(switches), ..one_node() }
}

/// And over nodes, whose cards take 48 GB/s per channel.
fn nodes_with_switches(nodes: u32) -> Topology {
    let switches = Switches { gpus: 8, channels: 8, intra_bandwidth: 40.0, inter_bandwidth: 48.0 };
    Topology { ranks: 8 * nodes, nodes, switches: Some(switches), ..many_nodes() }
}

/// 64 nodes of them, with eight 50 GB/s cards each.
fn many_nodes() -> Topology {
    Topology {
        ranks: 512,
        nodes: 64,
        searched_channels: 8,
        channels: 16,
        intra_bandwidth: 48.0,
        inter_bandwidth: 48.0,
        ..one_node()
    }
}

fn is_near(found: Option<(f64, f64)>, latency: f64, bandwidth: f64) -> bool {
    found.is_some_and(|(l, b)| (l - latency).abs() < 1e-6 && (b - bandwidth).abs() < 0.01)
}

#[test]
fn entries_are_the_formula() {
    use Algorithm::{Ring, Tree};
    let all = NcclSettings::default();
    let entry = |table: &Table, function, algorithm, protocol| table.entry(function, algorithm, protocol);
    let table = model(version("2.30"), &one_node(), &all);
    // All-reduce of 8: 14 steps; bandwidth of the buffer is 8/14 of the bus, half of it for trees.
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 0), 6.6 + 14.0 * 0.6, 141.0 * 8.0 / 14.0));
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 1), 14.0 + 14.0 * 1.9, 370.8 * 0.92 * 8.0 / 14.0));
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 2), 8.4 + 14.0 * 3.4, 370.8 * 8.0 / 14.0));
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 0), 6.8 + 14.0 * 0.6, 370.8 * 0.92 / 3.8 / 2.0));
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 1), 14.0 + 14.0 * 1.25, 370.8 * 0.92 * 7.0 / 18.0));
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 2), 8.4 + 14.0 * 4.0, 370.8 * 0.92 / 2.0));
    assert!(is_near(entry(&table, Function::AllGather, Ring, 2), 8.4 + 7.0 * 3.4, 370.8 * 8.0 / 7.0));
    assert!(is_near(entry(&table, Function::Broadcast, Ring, 2), 8.4 + 3.4, 370.8));
    assert_eq!(entry(&table, Function::AllGather, Tree, 0), None);
    // 64 nodes: 126 of 1022 steps cross the network; the others cost at least the overhead of posting, thrice under Simple.
    let table = model(version("2.30"), &many_nodes(), &all);
    let steps = |inside: f64, network: f64| 896.0 * inside + 126.0 * network;
    let ring = 512.0 / 1022.0;
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 0), 6.6 + steps(1.0, 2.7), 20.4 * ring));
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 1), 14.0 + steps(1.9, 4.0), 8.0 * 36.7 * ring));
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 2), 8.4 + steps(3.4, 14.0), 384.0 * ring));
    let tree = |inside: f64, network: f64| 2.0 * (7.0 * inside + 6.0 * network);
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 0), 6.8 + tree(0.6, 5.0), 20.4 / 2.0));
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 1), 14.0 + tree(1.25, 8.5), 8.0 * 29.0 / 2.0));
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 2), 8.4 + tree(4.0, 14.0), 8.0 * 36.0 / 2.0));
    // Before 2.23: Simple trees without base latency and 28 us per hop; two more steps over the network in rings.
    let table = model(version("2.22"), &many_nodes(), &all);
    assert!(is_near(entry(&table, Function::AllReduce, Tree, 2), tree(28.0, 28.0), 8.0 * 36.0 / 2.0));
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 2), 8.4 + 894.0 * 3.4 + 128.0 * 14.0, 384.0 * ring));
    // Before 2.21 LL had a quarter (a third one way) of the bandwidth, and Hopper the limit of Ampere.
    let table = model(version("2.20"), &one_node(), &all);
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 0), 15.0, 87.7 * 8.0 / 14.0));
    let slow = Topology { intra_bandwidth: 10.0, ..one_node() };
    let table = model(version("2.20"), &slow, &all);
    assert!(is_near(entry(&table, Function::AllReduce, Ring, 0), 15.0, 30.0 * 8.0 / 14.0));
    assert!(is_near(entry(&table, Function::AllGather, Ring, 0), 10.8, 40.0 * 8.0 / 7.0));
    // One rank per node: the network's latency is that of trees.
    let sparse = Topology { ranks: 64, searched_channels: 2, channels: 4, ..many_nodes() };
    let table = model(version("2.27"), &sparse, &all);
    assert!(is_near(entry(&table, Function::AllGather, Ring, 0), 6.6 + 63.0 * 5.0, 20.4 * 64.0 / 63.0));
}

#[test]
fn blackwell_has_limits_of_its_own_from_2_25_on() {
    let blackwell = Topology { compute_capability: 100, searched_channels: 16, intra_bandwidth: 45.0, ..one_node() };
    let ll128 = |text: &str| {
        let table = model(version(text), &blackwell, &NcclSettings::default());
        table.entry(Function::AllReduce, Algorithm::Ring, 1).map(|(_, bandwidth)| bandwidth * 14.0 / 8.0)
    };
    assert_eq!(ll128("2.24"), None, "no LL128 on GPUs that the version does not know");
    let near = |found: Option<f64>, expected: f64| found.is_some_and(|found| (found - expected).abs() < 0.01);
    assert!(near(ll128("2.27"), 720.0 * 0.92));
    assert!(near(ll128("2.30"), 16.0 * 40.0));
}

fn chosen(table: &Table, function: Function, bytes: u64) -> (Algorithm, Protocol, u32, u32) {
    let chosen = table.choose(function, bytes, 1).expect("nothing is forbidden");
    (chosen.algorithm, chosen.protocol, chosen.channels, chosen.threads)
}

/// Times in microseconds of the best two, from the entries above: 1 KiB: ring LL 15.0, tree LL 15.2. 1 MiB: ring LL 28.0, tree
/// LL128 44.7. 4 MiB: ring LL128 62.1, ring LL 67.1. 1 GiB: ring Simple 5123, ring LL128 5549.
#[test]
fn choices_on_one_node() {
    use Algorithm::Ring;
    let table = model(version("2.30"), &one_node(), &NcclSettings::default());
    let at = |bytes| chosen(&table, Function::AllReduce, bytes);
    // 512 threads x 8 bytes x 8 ranks: one channel per 32 KiB, and half of the threads as long as even that is too much.
    assert_eq!(at(1 << 10), (Ring, Protocol::Ll, 1, 96));
    assert_eq!(at(100 << 10), (Ring, Protocol::Ll, 3, 512));
    assert_eq!(at(1 << 20), (Ring, Protocol::Ll, 24, 512));
    assert_eq!(at(4 << 20), (Ring, Protocol::Ll128, 24, 640));
    assert_eq!(at(1 << 30), (Ring, Protocol::Simple, 24, 544));
    let time = |bytes| table.choose(Function::AllReduce, bytes, 1).expect("chosen").expected_us;
    assert!((time(1 << 20) - (15.0 + 1_048_576.0 / (1e3 * 141.0 * 8.0 / 14.0))).abs() < 1e-6);
    // Fused ops pay a ring's latency one after the other, and a tree's only once: five ops take the tree.
    let of_five = |algorithm| table.time(Function::AllReduce, algorithm, 0, 1 << 20, 5).expect("allowed");
    assert!((of_five(Ring) - time(1 << 20) - 4.0 * 15.0).abs() < 1e-6);
    assert_eq!(table.choose(Function::AllReduce, 1 << 20, 5).expect("chosen").algorithm, Algorithm::Tree);
}

/// In microseconds: 1 KiB: tree LL 75.3, ring LL 1243. 64 MiB, with their corrections: tree LL128 776, tree Simple 815. 256 MiB:
/// tree Simple 2303, tree LL128 2447. 16 GiB: ring Simple 96,000 (latency x 1.4), tree Simple 119,500.
#[test]
fn choices_on_many_nodes() {
    use Algorithm::{Ring, Tree};
    let table = model(version("2.30"), &many_nodes(), &NcclSettings::default());
    let at = |bytes| chosen(&table, Function::AllReduce, bytes);
    assert_eq!(at(1 << 10), (Tree, Protocol::Ll, 1, 640));
    assert_eq!(at(64 << 20), (Tree, Protocol::Ll128, 16, 640));
    assert_eq!(at(256 << 20), (Tree, Protocol::Simple, 16, 640));
    assert_eq!(at(16 << 30), (Ring, Protocol::Simple, 16, 544));
    // Before 2.23 a tree under Simple cost so much more that LL128 trees reached further.
    let old = model(version("2.22"), &many_nodes(), &NcclSettings::default());
    assert_eq!(chosen(&old, Function::AllReduce, 256 << 20).1, Protocol::Ll128);
}

/// 2.30: a channel inside a node carries 40 x 0.85 x 7 / 8 GB/s, for an all-reduce in both directions at once. Before 2.28: 5 / 6
/// of it, one way.
#[test]
fn switches_are_the_formula() {
    use Algorithm::{Nvls, NvlsTree};
    let all = NcclSettings::default();
    let entry = |text: &str, topology: &Topology, function, algorithm| {
        model(version(text), topology, &all).entry(function, algorithm, 2)
    };
    let node = with_switches();
    assert!(is_near(entry("2.30", &node, Function::AllReduce, Nvls), 25.0, 8.0 * 59.5 * 8.0 / 14.0));
    assert!(is_near(entry("2.30", &node, Function::AllGather, Nvls), 25.0, 8.0 * 29.75 * 7.0 / 8.0));
    assert_eq!(entry("2.30", &node, Function::AllReduce, NvlsTree), None, "one node has no tree of nodes");
    assert_eq!(entry("2.30", &node, Function::Broadcast, Nvls), None);
    assert_eq!(entry("2.30", &one_node(), Function::AllReduce, Nvls), None, "no such switches");
    assert!(is_near(entry("2.27", &node, Function::AllReduce, Nvls), 25.0, 320.0 * 5.0 / 6.0));
    assert!(is_near(entry("2.27", &node, Function::ReduceScatter, Nvls), 25.0, 320.0 * 7.0 / 8.0));
    assert!(is_near(entry("2.24", &node, Function::ReduceScatter, Nvls), 25.0, 320.0));
    assert!(is_near(entry("2.19", &node, Function::ReduceScatter, Nvls), 23.0, 320.0 * 5.0 / 6.0));
    // Over nodes: the least of both sides and of a limit; two nodes have twice the network.
    let tree = |text: &str, nodes| entry(text, &nodes_with_switches(nodes), Function::AllReduce, NvlsTree);
    assert!(is_near(tree("2.30", 2), 25.0 + 2.0 * 20.9, 8.0 * 57.7 * 16.0 / 30.0));
    assert!(is_near(tree("2.30", 16), 25.0 + 8.0 * 20.9, 8.0 * 45.5 * 128.0 / 254.0));
    assert!(is_near(tree("2.27", 2), 25.0 + 2.0 * 14.0, 8.0 * 40.0 * 5.0 / 6.0));
    assert!(is_near(tree("2.27", 16), 25.0 + 8.0 * 14.0, 8.0 * 24.0 * 5.0 / 6.0));
    assert_eq!(
        entry("2.30", &nodes_with_switches(2), Function::AllReduce, Nvls),
        None,
        "over nodes NVLS needs CollNet"
    );
    // Two GPUs of a node from 2.28 on.
    let pair = Switches { gpus: 2, channels: 2, ..node.switches.expect("there") };
    let pair = Topology { ranks: 2, switches: Some(pair), ..node };
    assert!(entry("2.28", &pair, Function::AllReduce, Nvls).is_some());
    assert_eq!(entry("2.27", &pair, Function::AllReduce, Nvls), None);
    // Blackwell's trees are corrected by size from 2.29 on.
    let blackwell = Topology { compute_capability: 100, ..nodes_with_switches(16) };
    let time = |text: &str| {
        let table = model(version(text), &blackwell, &all);
        table.time(Function::AllReduce, NvlsTree, 2, 1 << 20, 1).expect("allowed")
    };
    let latency = 25.0 + 8.0 * 20.9;
    assert!(((time("2.29") - latency) * 0.5 - (time("2.28") - latency)).abs() < 1e-9, "a factor of 0.5 at 1 MiB");
}

#[test]
fn aggregated_trees_are_the_formula() {
    let sparse = Topology { ranks: 64, searched_channels: 2, channels: 4, ..many_nodes() };
    let entry = |text: &str, topology: &Topology, function| {
        model(version(text), topology, &NcclSettings::default()).entry(function, Algorithm::Pat, 2)
    };
    let latency = 8.0 + 6.0 * 14.0 / 3.5 + 64.0 * 2.8;
    assert!(is_near(entry("2.30", &sparse, Function::AllGather), latency, 96.0 * 0.75));
    assert!(is_near(entry("2.23", &sparse, Function::ReduceScatter), latency, 96.0 * 0.85));
    assert_eq!(entry("2.22", &sparse, Function::AllGather), None, "2.23 is the first to have it");
    assert_eq!(entry("2.30", &sparse, Function::AllReduce), None);
    assert_eq!(entry("2.30", &many_nodes(), Function::AllGather), None, "only where each rank is a node");
    let off = model(version("2.30"), &sparse, &settings(&[("NCCL_PAT_ENABLE", "0")]));
    assert_eq!(off.entry(Function::AllGather, Algorithm::Pat, 2), None);
}

/// In microseconds, of the best two: 1 MiB: ring LL 28.0, NVLS 28.9. 4 MiB: NVLS 40.4, ring LL128 62.1. Two nodes at 64 MiB: NVLS tree
/// 339, tree LL128 more.
#[test]
fn choices_with_switches() {
    let table = |pairs: &[(&str, &str)]| model(version("2.30"), &with_switches(), &settings(pairs));
    let at = |table: &Table, bytes| chosen(table, Function::AllReduce, bytes);
    assert_eq!(at(&table(&[]), 1 << 20).0, Algorithm::Ring);
    assert_eq!(at(&table(&[]), 4 << 20), (Algorithm::Nvls, Protocol::Simple, 16, 640));
    assert_eq!(at(&table(&[("NCCL_NVLS_ENABLE", "0")]), 4 << 20).0, Algorithm::Ring);
    assert_eq!(at(&table(&[("NCCL_ALGO", "NVLS")]), 8).0, Algorithm::Nvls);
    let nodes = model(version("2.30"), &nodes_with_switches(2), &NcclSettings::default());
    assert_eq!(at(&nodes, 64 << 20).0, Algorithm::NvlsTree);
    // Asked for where there are none: refused by name.
    let refusal = model(version("2.30"), &one_node(), &settings(&[("NCCL_ALGO", "NVLS")]));
    let refusal = refusal.choose(Function::AllReduce, 8, 1).expect_err("no such switches").to_string();
    assert!(refusal.contains("NCCL_ALGO=NVLS") && refusal.contains("AllReduce"), "{refusal}");
}

/// What the search finds on the built-in machines, seen through the time of a large all-reduce.
#[test]
fn the_search_for_switches() {
    let us = |name: &str, members: &[u32], bytes: u64| {
        let shape = CommShape::new(members, &Profile::builtin(name).expect("built in"));
        let call = CollectiveCall { kind: AllReduce, bytes, root: 0, ops: 1 };
        (choice(&shape, &call).algorithm, uniform_cost(&shape, &call).as_ps() as f64 / 1e6)
    };
    let ranks = |count: u32| (0..count).collect::<Vec<_>>();
    let gib = f64::from(1 << 30) / 1e3;
    let is = |found: (Algorithm, f64), algorithm, us: f64| found.0 == algorithm && (found.1 - us).abs() < 0.01;
    // Nine times 40 GB/s of a GPU's 370.8.
    assert!(is(us("h100-sxm", &ranks(8), 1 << 30), Algorithm::Nvls, 25.0 + gib / (8.0 * 59.5 * 8.0 / 14.0)));
    // Four channels of 60, the most that is tried, make 160 GB/s of the buffer; a ring has 247.
    assert_eq!(us("h100-sxm", &ranks(4), 1 << 30).0, Algorithm::Ring);
    // The pipeline's fill and the bandwidth beside the formula's are the profile's.
    let bytes = gib / (8.0 * 57.7 * 16.0 / 30.0) / 1.07;
    let tree = 66.8 + bytes + 0.84 * (66.8 * bytes).sqrt();
    assert!(is(us("h100-sxm", &ranks(16), 1 << 30), Algorithm::NvlsTree, tree));
    assert_ne!(us("a100-sxm", &ranks(8), 1 << 30).0, Algorithm::Nvls);
}

/// Everybody leaves so long after the last one: monotone, and never before.
#[test]
fn switches_wait_for_the_last() {
    let shape = CommShape::new(&(0..16).collect::<Vec<_>>(), &Profile::builtin("h100-sxm").expect("built in"));
    let call = CollectiveCall { kind: AllReduce, bytes: 64 << 20, root: 0, ops: 1 };
    let cost = uniform_cost(&shape, &call);
    assert_eq!(choice(&shape, &call).algorithm, Algorithm::NvlsTree);
    let arrivals: Vec<SimTime> = (0..16).map(|rank| SimTime::from_ns(rank * rank * 1000 % 70_001)).collect();
    let mut ends = arrivals.clone();
    collective::completion(&shape, &call, &arrivals, &mut ends, &mut Scratch::default());
    let last = arrivals.iter().copied().max().expect("sixteen");
    assert_eq!(ends, vec![last + cost; 16]);
}

/// A launch that takes longer than NCCL counts is paid by every way, and changes no choice.
#[test]
fn a_longer_launch_is_paid_by_switches_too() {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    let cost = |profile: &Profile, ranks: u32, bytes: u64| {
        let shape = CommShape::new(&(0..ranks).collect::<Vec<_>>(), profile);
        let call = CollectiveCall { kind: AllReduce, bytes, root: 0, ops: 1 };
        (choice(&shape, &call), uniform_cost(&shape, &call))
    };
    let calls = [(8, 1 << 30), (16, 64 << 20), (8, 1 << 10), (4, 1 << 30)];
    let before = calls.map(|(ranks, bytes)| cost(&profile, ranks, bytes));
    let longer = SimTime::from_ns(7_000);
    let network = &mut profile.network;
    network.collective_launch_ns += 7_000;
    for protocol in [&mut network.ll, &mut network.ll128] {
        protocol.as_mut().expect("has both").launch_ns += 7_000;
    }
    let after = calls.map(|(ranks, bytes)| cost(&profile, ranks, bytes));
    for ((way, time), (other_way, other_time)) in before.into_iter().zip(after) {
        assert_eq!(way, other_way);
        // Times of a formula are rounded once, with the launch in them.
        assert!(((other_time - time) - longer).as_ps().abs() <= 1, "{way:?}: {time:?} {other_time:?}");
    }
    assert_eq!(before.map(|(way, _)| way.algorithm)[..2], [Algorithm::Nvls, Algorithm::NvlsTree]);
}

#[test]
fn settings_restrict_the_choice() {
    let table = |pairs: &[(&str, &str)]| model(version("2.30"), &many_nodes(), &settings(pairs));
    let small = |table: &Table, function| table.choose(function, 1 << 10, 1).map(|chosen| chosen.algorithm);
    let ring = table(&[("NCCL_ALGO", "ring")]);
    assert_eq!(small(&ring, Function::AllReduce), Ok(Algorithm::Ring));
    let tree = table(&[("NCCL_ALGO", "Tree")]);
    assert_eq!(small(&tree, Function::AllReduce), Ok(Algorithm::Tree));
    let refusal = small(&tree, Function::Broadcast).expect_err("no tree for a broadcast").to_string();
    assert!(
        refusal.contains("2.30") && refusal.contains("Broadcast") && refusal.contains("NCCL_ALGO=Tree"),
        "{refusal}"
    );
    let old = model(version("2.22"), &many_nodes(), &settings(&[("NCCL_ALGO", "Tree")]));
    assert_eq!(small(&old, Function::Broadcast), Ok(Algorithm::Ring), "older versions fall back to the ring");
    let mixed = table(&[("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring")]);
    assert_eq!(small(&mixed, Function::AllReduce), Ok(Algorithm::Tree));
    assert_eq!(small(&mixed, Function::AllGather), Ok(Algorithm::Ring));
    let without = table(&[("NCCL_PROTO", "^LL,LL128")]);
    assert_eq!(chosen(&without, Function::AllReduce, 8).1, Protocol::Simple);
    let only = table(&[("NCCL_PROTO", "LL128;allreduce:^LL128")]);
    assert_eq!(chosen(&only, Function::AllGather, 8).1, Protocol::Ll128);
    assert_ne!(chosen(&only, Function::AllReduce, 4 << 20).1, Protocol::Ll128);
    let few = table(&[("NCCL_MAX_NCHANNELS", "4"), ("NCCL_NTHREADS", "256")]);
    assert_eq!(chosen(&few, Function::AllReduce, 16 << 30), (Algorithm::Ring, Protocol::Simple, 4, 288));
    let many = table(&[("NCCL_MIN_NCHANNELS", "32"), ("NCCL_MAX_CTAS", "8")]);
    assert_eq!(many.channels(), 32, "the minimum has the last word");
    assert_eq!(table(&[("NCCL_MAX_CTAS", "2")]).channels(), 2);
}

#[test]
fn settings_that_cannot_be_followed_are_named() {
    let error = |name: &str, value: &str| NcclSettings::parse([(name, value)]).expect_err("refused").to_string();
    for (name, value, part) in [
        ("NCCL_ALGO", "Rings", "`Rings` is unknown"),
        ("NCCL_ALGO", "CollNetDirect", "leaves only CollNetDirect for AllReduce, which is not modelled"),
        ("NCCL_ALGO", "ring;allgather:collnetdirect", "leaves only CollNetDirect for AllGather"),
        ("NCCL_ALGO", "^ring,tree,nvls,nvlstree", "CollNetDirect, CollNetChain"),
        ("NCCL_ALGO", "ring;tree", "names no function"),
        ("NCCL_ALGO", "ring;alltoall:ring", "function `alltoall` is unknown"),
        ("NCCL_PROTO", "LL256", "`LL256` is unknown"),
        ("NCCL_MAX_NCHANNELS", "0", "must be from 1"),
        ("NCCL_NTHREADS", "many", "must be a whole number"),
        ("NCCL_BUFFSIZE", "12", "must be from 32768"),
        ("NCCL_NTHREADS", "64\n", "control character"),
        ("NCCL_DEBUG", "INFO", "changes nothing in the model"),
    ] {
        let text = error(name, value);
        assert!(text.starts_with(&format!("{name}={value}: ")) && text.contains(part), "{text}");
    }
    let by_function = settings(&[("NCCL_ALGO", "allreduce:ring")]);
    assert!(by_function.check(version("2.23")).expect_err("an old version").to_string().contains("2.24"));
    assert!(by_function.check(version("2.24")).is_ok());
    // What is not modelled beside what is: left out.
    assert!(NcclSettings::parse([("NCCL_ALGO", "NVLS,Ring"), ("NCCL_NVLS_ENABLE", "0")]).is_ok());
}

#[test]
fn profiles_name_their_tuning() {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    assert_eq!(profile.network.tuning.to_string(), "nccl-2.30");
    profile.network.nccl = settings(&[("NCCL_ALGO", "allreduce:ring"), ("NCCL_BUFFSIZE", "8388608")]);
    let text = profile.to_toml();
    assert_eq!(Profile::from_toml(&text).expect("reads back"), profile);
    let error = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        Profile::from_toml(&text.replace(from, to)).expect_err("refused").to_string()
    };
    assert!(error("\"nccl-2.30\"", "\"nccl-2.31\"").contains("no tuning `nccl-2.31` (there are: fastest, nccl-2.19"));
    assert!(error("\"nccl-2.30\"", "\"nccl-2.23\"").contains("2.24 is the first"));
    assert!(error("\"nccl-2.30\"", "\"fastest\"").contains("only followed under NCCL's tuning"));
    assert!(error("node_channels = 24", "node_channels = 0").contains("network.node_channels"));
    assert!(error("allreduce:ring", "allreduce:collnetchain").contains("not modelled"));
    profile.network.tuning = Tuning::Fastest;
    profile.network.nccl = NcclSettings::default();
    let plain = profile.to_toml().replace("tuning = \"fastest\"\n", "");
    assert_eq!(Profile::from_toml(&plain).expect("reads").network.tuning, Tuning::Fastest);
}

#[test]
fn what_is_forbidden_never_ends_and_says_why() {
    let mut profile = Profile::builtin("h100-sxm").expect("built in");
    profile.network.nccl = settings(&[("NCCL_ALGO", "Tree")]);
    let shape = CommShape::new(&[0, 1, 8, 9], &profile);
    assert!(shape.refusal(Broadcast).is_some_and(|refusal| refusal.to_string().contains("NCCL_ALGO=Tree")));
    let call = |kind| CollectiveCall { kind, bytes: 1 << 20, root: 0, ops: 1 };
    assert_eq!(uniform_cost(&shape, &call(Broadcast)), SimTime::MAX);
    assert!(shape.refusal(AllReduce).is_none() && shape.refusal(AllToAll).is_none());
    assert_eq!(choice(&shape, &call(AllReduce)).algorithm, Algorithm::Tree);
    assert!(CommShape::new(&[3], &profile).refusal(Broadcast).is_none(), "nothing to do");
}

/// Inside and outside of the nodes at the same time, and the network's latency once per 32 channels' worth of batches of eight.
#[test]
fn all_to_all_overlaps_inside_and_outside() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let cost = |ranks: u32, bytes: u64| {
        let shape = CommShape::new(&(0..ranks).collect::<Vec<_>>(), &profile);
        let call = CollectiveCall { kind: AllToAll, bytes: bytes * u64::from(ranks), root: 0, ops: 1 };
        uniform_cost(&shape, &call) - SimTime::from_ns(profile.network.collective_launch_ns as i64)
    };
    let (nvlink, card) = (Link::nvlink(&profile), Link::network(&profile, 8));
    let each = 1u64 << 20;
    let near = nvlink.occupancy(7 * each);
    assert_eq!(cost(8, each), near + nvlink.latency);
    assert_eq!(cost(16, each), (card.occupancy(8 * 8 * each) + card.latency).max(near + nvlink.latency));
    // 256 nodes: one channel per peer, 256 batches on 32 channels.
    let waves = SimTime(8 * card.latency.0);
    assert_eq!(cost(2_048, 8), card.occupancy(8 * 2_040 * 8) + waves);
}

fn topologies() -> impl Strategy<Value = Topology> {
    let capability = prop::sample::select(&[70u32, 80, 90, 100][..]);
    (1u32..9, 1u32..200, 1u32..17, 5.0f64..60.0, any::<bool>(), capability).prop_map(
        |(per_node, nodes, searched, bandwidth, is_amd, compute_capability)| Topology {
            ranks: (per_node * nodes).max(2),
            nodes: if per_node * nodes < 2 { 1 } else { nodes },
            searched_channels: searched,
            channels: 2 * searched,
            intra_bandwidth: bandwidth,
            inter_bandwidth: bandwidth,
            cpu: if is_amd { CpuVendor::Amd } else { CpuVendor::Intel },
            compute_capability,
            ..one_node()
        },
    )
}

fn versions() -> impl Strategy<Value = Version> {
    prop::sample::select(Version::all().collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_shortest_is_chosen_and_limits_hold(
        topology in topologies(), version in versions(), bytes in 1u64..(1 << 36), most in 1u32..40, function in 0usize..5
    ) {
        let function = Function::ALL[function];
        let pairs = [("NCCL_MAX_NCHANNELS", most.to_string())];
        let limits = NcclSettings::parse(pairs).expect("a number");
        let table = model(version, &topology, &limits);
        let chosen = table.choose(function, bytes, 1).expect("nothing is forbidden");
        for algorithm in [Algorithm::Ring, Algorithm::Tree] {
            for protocol in 0..3 {
                if let Some(time) = table.time(function, algorithm, protocol, bytes, 1) {
                    prop_assert!(time >= chosen.expected_us);
                }
            }
        }
        prop_assert!(chosen.channels >= 1 && chosen.channels <= most.min(topology.channels));
        prop_assert!(chosen.threads.is_multiple_of(32) && (96..=640).contains(&chosen.threads));
        let ring = NcclSettings::parse([("NCCL_ALGO", "Ring")]).expect("known");
        let forced = model(version, &topology, &ring).choose(function, bytes, 1).expect("a ring");
        prop_assert_eq!(forced.algorithm, Algorithm::Ring);
        prop_assert!(forced.expected_us >= chosen.expected_us);
    }

    #[test]
    fn tiny_calls_take_ll_and_huge_ones_simple(topology in topologies(), version in versions()) {
        // PAT knows Simple only.
        let table = model(version, &topology, &settings(&[("NCCL_PAT_ENABLE", "0")]));
        for function in Function::ALL {
            prop_assert_eq!(table.choose(function, 8, 1).expect("free").protocol, Protocol::Ll);
            let huge = table.choose(function, 1 << 42, 1).expect("free");
            prop_assert_eq!(huge.protocol, Protocol::Simple);
            prop_assert_eq!(huge.channels, topology.channels);
        }
    }

    #[test]
    fn channels_and_threads_never_shrink_with_size(topology in topologies(), a in 1u64..(1 << 34), b in 1u64..(1 << 34)) {
        let only = NcclSettings::parse([("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")]).expect("known");
        let table = model(version("2.30"), &topology, &only);
        let at = |bytes| table.choose(Function::AllReduce, bytes, 1).expect("a ring");
        let (small, large) = (at(a.min(b)), at(a.max(b)));
        prop_assert!(small.channels <= large.channels && small.threads <= large.threads);
    }
}

#[test]
fn all_kinds_have_a_way_on_every_builtin_profile() {
    for name in Profile::builtin_names() {
        let profile = Profile::builtin(name).expect("built in");
        for members in [vec![0, 1], (0..8).collect(), vec![0, 8, 16], (0..64).collect::<Vec<u32>>()] {
            let shape = CommShape::new(&members, &profile);
            for kind in [AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll] {
                for bytes in [1, 1_000, 1 << 20, 1 << 30] {
                    let cost = uniform_cost(&shape, &CollectiveCall { kind, bytes, root: 1, ops: 1 });
                    assert!(cost > SimTime::ZERO && cost < SimTime::from_ns(1_000_000_000), "{name} {kind:?} {bytes}");
                }
            }
        }
    }
}

/// Rank 8 of two nodes of eight and one of four: groups of four, five of them.
#[test]
fn messages_follow_the_quadratic_schedule() {
    let rounds = p2p::rounds(&[8, 8, 4]);
    let of = |rank: usize| rounds.iter().map(|round| round[rank]).collect::<Vec<_>>();
    // Distances 0, 1, 3, 6 (no), 2 (10 mod 8), 7 (15 mod 8, no), 5 (no), 4 of groups, counted from group 2.
    let groups = |list: [usize; 5]| list.iter().flat_map(|g| (4 * g)..(4 * g + 4)).collect::<Vec<_>>();
    assert_eq!(of(8), groups([2, 3, 0, 4, 1]));
    assert_eq!(of(9)[..4], [9, 10, 11, 8]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_pair_meets_once_and_both_ends_in_the_same_round(nodes in prop::collection::vec(1u32..17, 1..9)) {
        let ranks: usize = nodes.iter().map(|size| *size as usize).sum();
        let rounds = p2p::rounds(&nodes);
        prop_assert_eq!(rounds.len(), ranks);
        for rank in 0..ranks {
            let mut peers: Vec<_> = rounds.iter().map(|round| round[rank]).collect();
            peers.sort_unstable();
            prop_assert!(peers.into_iter().eq(0..ranks), "everybody is sent to once");
        }
        for round in &rounds {
            let mut to = round.clone();
            to.sort_unstable();
            prop_assert!(to.into_iter().eq(0..ranks), "everybody receives once a round");
        }
    }

    /// Equal messages on equal links: all orders end when the busiest port has done everything, at the last arrival.
    #[test]
    fn equal_messages_take_as_long_in_any_order(nodes in prop::collection::vec(1u32..9, 1..6), cost in 1i64..1_000, at in 0i64..1_000) {
        let ranks = nodes.iter().sum::<u32>() as usize;
        let ends = p2p::scheduled_all_to_all(&p2p::rounds(&nodes), |_, _| cost, &vec![at; ranks]);
        prop_assert_eq!(ends, vec![at + cost * (ranks as i64 - 1); ranks]);
    }
}
