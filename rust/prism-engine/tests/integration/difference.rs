//! Graphs of one job are compared by what they mean, and differences are named.

use prism_engine::graph::{Graph, GraphDifference, Ignore};

/// Two stages of two ranks each, messages in pairs, gradients over the stage.
const JOB: &str = r#"prism-graph 1
world 4
name "gemm"
name "norm"
comm 0 2
comm 1 3
comm 0-1
comm 2-3
template "first"
  +5000 s0 alloc 100
  +5000 s0 compute 1000000 Gemm Modelled "gemm"
  +5000 s1 Send c0 Bfloat16 64 peer 1
  +5000 s0 compute 2000000 Kernel Modelled "norm"
  +5000 s2 AllReduce c1 Bfloat16 1024 Sum
  +5000 s0 iteration_end
template "second"
  +5000 s1 Recv c0 Bfloat16 64 peer 0
  +5000 s0 compute 1000000 Gemm Modelled "gemm"
  +5000 s2 AllReduce c1 Bfloat16 1024 Sum
  +5000 s0 iteration_end
rank 0 template 0 comms 0 2
rank 1 template 0 comms 1 2
rank 2 template 1 comms 0 3
rank 3 template 1 comms 1 3
"#;

fn graph(text: &str) -> Graph {
    Graph::from_text(text).expect("well-formed")
}

fn compare(left: &str, right: &str) -> GraphDifference {
    let found = graph(left).difference(&graph(right), Ignore::default());
    let back = graph(right).difference(&graph(left), Ignore::default());
    assert_eq!((found.equal, &found.differing), (back.equal, &back.differing), "both ways");
    found
}

#[test]
fn other_numbers_of_the_same_things_are_no_difference() {
    // Names, communicators, slots and templates in another order; a template for every rank; facts about the graph.
    let text = r#"prism-graph 1
world 4
meta "device" "other"
name "norm"
name "gemm"
comm 2-3
comm 0-1
comm 1 3
comm 0 2
template "a"
  +5000 s1 Recv c1 Bfloat16 64 peer 0
  +5000 s0 compute 1000000 Gemm Modelled "gemm"
  +5000 s2 AllReduce c0 Bfloat16 1024 Sum
  +5000 s0 iteration_end
template "b"
  +5000 s0 alloc 100
  +5000 s0 compute 1000000 Gemm Modelled "gemm"
  +5000 s1 Send c1 Bfloat16 64 peer 1
  +5000 s0 compute 7 Kernel Modelled "norm"
  +5000 s2 AllReduce c0 Bfloat16 1024 Sum
  +5000 s0 iteration_end
rank 0 template 1 comms 1 3
rank 1 template 1 comms 1 2
rank 2 template 0 comms 0 3
rank 3 template 0 comms 0 2
override 0 op 3 2000000
override 1 op 3 2000000
"#;
    let found = compare(JOB, text);
    assert!(found.equal && found.differing.is_empty() && found.first.is_empty(), "{found:?}");
    assert_eq!((found.world_size, found.ops, found.ranks_differing), ([4, 4], [20, 20], 0));
}

#[test]
fn every_kind_of_difference_is_named_with_rank_and_op() {
    let first = "+5000 s0 compute 1000000 Gemm Modelled \"gemm\"\n  +5000 s1";
    let cases: &[(&str, &str, &str, u32)] = &[
        ("s2 AllReduce c1 Bfloat16 1024 Sum", "s2 AllReduce c1 Bfloat16 1025 Sum", "bytes", 4),
        ("s2 AllReduce c1 Bfloat16 1024 Sum", "s2 AllReduce c1 Float16 1024 Sum", "bytes", 4),
        ("s2 AllReduce c1 Bfloat16 1024 Sum", "s2 AllReduce c1 Bfloat16 1024 Max", "reduction", 4),
        ("s2 AllReduce c1 Bfloat16 1024 Sum", "s3 AllReduce c1 Bfloat16 1024 Sum", "stream", 4),
        ("s2 AllReduce c1 Bfloat16 1024 Sum", "s2 AllGather c1 Bfloat16 1024 Sum", "kind", 4),
        (first, &first.replace("+5000 s0", "+5001 s0"), "host_gap", 2),
        (first, &first.replace("1000000", "1000001"), "duration", 2),
        (first, &first.replace("Modelled", "Measured"), "provenance", 2),
        (first, &first.replace("Gemm", "Operator"), "class", 2),
        ("alloc 100", "alloc 101", "bytes", 2),
    ];
    for (from, to, what, ranks) in cases {
        let found = compare(JOB, &JOB.replace(from, to));
        assert!(!found.equal, "{what}");
        assert_eq!(found.differing.keys().collect::<Vec<_>>(), [what], "{found:?}");
        assert_eq!(found.ranks_differing, *ranks, "{what}: {found:?}");
        let told = &found.first[0];
        assert_eq!((told.rank, told.what, told.ranks), (0, *what, 2), "{told:?}");
        assert_ne!(told.left, told.right);
    }
}

#[test]
fn inserted_ops_do_not_hide_what_comes_behind_them() {
    let longer = JOB.replace(
        "  +5000 s0 compute 2000000 Kernel Modelled \"norm\"\n",
        "  +5000 s0 event_record e0\n  +5000 s3 event_wait e0\n  +5000 s0 compute 2000000 Kernel Modelled \"norm\"\n",
    );
    let found = compare(JOB, &longer);
    assert_eq!(found.ops, [20, 24]);
    assert_eq!(found.ranks_differing, 2);
    let told = &found.first[0];
    assert_eq!((told.rank, told.ranks, told.what), (0, 2, "ops"), "{found:?}");
    assert_eq!((told.left.as_str(), told.right.as_str()), ("nothing", "2 ops, the first: +5000 s0 event_record e0"));
    // The collectives behind are each other's counterparts: no communicator differs.
    assert_eq!(found.differing.into_iter().collect::<Vec<_>>(), [("ops", 4)]);
}

#[test]
fn a_rank_of_another_communicator_is_found_although_programs_are_equal() {
    let swapped = JOB.replace("comm 1 3", "comm 3 1");
    let found = compare(JOB, &swapped);
    assert_eq!(found.differing.iter().collect::<Vec<_>>(), [(&"communicator", &2)]);
    let told = &found.first[0];
    assert_eq!((told.rank, told.ranks, told.op), (1, 1, 2));
    assert_eq!((told.left.as_str(), told.right.as_str()), ("ranks 1-3/2 (2)", "ranks 3-1/-2 (2)"));
}

#[test]
fn one_communicator_for_two_of_the_same_ranks_is_found() {
    let two = "prism-graph 1\nworld 2\ncomm 0-1\ncomm 0-1\ntemplate \"t\"\n  +0 s0 AllReduce c0 Float32 1 Sum\n  \
               +0 s0 AllReduce c1 Float32 1 Sum\nrank 0-1 template 0 comms 0 1\n";
    let one = two.replace("c1", "c0");
    let found = compare(two, &one);
    assert_eq!(found.differing.keys().collect::<Vec<_>>(), [&"communicator"], "{found:?}");
    assert!(found.first[0].left.contains("communicator"), "{found:?}");
    assert!(compare(two, &two.replace("comms 0 1", "comms 1 0")).equal, "the other way round it is the same job");
}

#[test]
fn durations_of_ranks_own_count_as_those_of_programs() {
    let own = format!("{JOB}override 3 op 1 1000001\n");
    let found = compare(JOB, &own);
    assert_eq!((found.ranks_differing, found.differing["duration"]), (1, 1));
    assert_eq!((found.first[0].rank, found.first[0].op), (3, 1));
    assert_eq!((found.first[0].left.as_str(), found.first[0].right.as_str()), ("1000000 ps", "1000001 ps"));
    assert!(compare(&own, &own).equal);
    let ignore = Ignore { durations: true, ..Ignore::default() };
    assert!(graph(JOB).difference(&graph(&own), ignore).equal);
}

#[test]
fn what_is_to_be_ignored_is_ignored_and_nothing_else() {
    // Without the allocation, with the host's time of it on the next call.
    let without = JOB.replace("  +5000 s0 alloc 100\n  +5000 s0 compute", "  +10000 s0 compute");
    assert!(!compare(JOB, &without).equal);
    let memory = Ignore { memory: true, ..Ignore::default() };
    assert!(graph(JOB).difference(&graph(&without), memory).equal);
    let slower = without.replace("+10000", "+9999");
    let found = graph(JOB).difference(&graph(&slower), memory);
    assert_eq!(found.differing.keys().collect::<Vec<_>>(), [&"host_gap"]);
    assert_eq!(found.first[0].op, 1, "indices are those of the programs");
    assert!(graph(JOB).difference(&graph(&slower), Ignore { host: true, ..memory }).equal);
}

#[test]
fn worlds_of_other_sizes_are_not_compared_further() {
    let small = "prism-graph 1\nworld 1\ntemplate \"t\"\n  +0 s0 iteration_end\nrank 0 template 0 comms\n";
    let found = compare(JOB, small);
    assert!(!found.equal && found.first.is_empty());
    assert_eq!(found.world_size, [4, 1]);
}
