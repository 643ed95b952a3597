//! The graph's forms are equivalent, its files are safe to open, and its checks find what is wrong.

use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder, GraphError};
use prism_engine::ids::{CommId, EventId, Rank, SlotId, StreamId, TemplateId};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::path::PathBuf;

/// Raw numbers of an op; `op_of` brings them into the range of a graph.
type RawOp = (u8, u8, u8, u8, u32, u32, u32, u64, u16);

fn op_of(raw: RawOp, slots: u32, peers: u32, names: u32, group: u32) -> Op {
    let (tag, a, b, c, stream, slot, arg, value, gap) = raw;
    let event = EventId(arg % 1000);
    let dtype = DataType::from_u8(b % 12).expect("0 to 11 are data types");
    let slot = SlotId(slot % slots.max(1));
    let kind = match tag % 12 {
        0 | 1 if slots > 0 => OpKind::Collective {
            slot,
            kind: CollectiveKind::from_u8(a % 8).expect("0 to 7 are collectives"),
            dtype,
            reduce: ReduceOp::from_u8(c % 6),
            root: arg % peers,
            count: value,
            group,
        },
        2 if slots > 0 => {
            OpKind::PointToPoint { slot, is_send: a.is_multiple_of(2), dtype, peer: arg % peers, count: value, group }
        }
        3 => OpKind::EventRecord { event },
        4 => OpKind::EventWait { event },
        5 => OpKind::EventSync { event },
        6 => OpKind::StreamSync,
        7 => OpKind::DeviceSync,
        8 => OpKind::Alloc { bytes: value },
        9 => OpKind::Free { bytes: value },
        10 => OpKind::TrainingBegin,
        11 => OpKind::IterationEnd,
        _ => OpKind::Compute {
            duration: SimTime::from_ps((value >> 1) as i64),
            name: prism_engine::ids::NameId(arg % names),
            class: [ComputeClass::Kernel, ComputeClass::Gemm, ComputeClass::Memset][a as usize % 3],
            provenance: [Provenance::Measured, Provenance::Modelled, Provenance::Default][c as usize % 3],
        },
    };
    Op { host_gap: SimTime::from_ps(gap.into()), stream: StreamId(stream % 5), kind }
}

/// Any graph of up to six ranks whose tables agree; its programs need not fit together.
fn any_graph() -> impl Strategy<Value = Graph> {
    let ranks = (1_u32..7).prop_flat_map(|world| {
        let all: Vec<u32> = (0..world).collect();
        let comm = proptest::sample::subsequence(all, 1..=world as usize).prop_shuffle();
        (Just(world), prop::collection::vec(comm, 0..5))
    });
    let programs = prop::collection::vec(prop::collection::vec(any::<RawOp>(), 0..40), 1..4);
    let names = prop::collection::vec(any::<String>(), 1..4);
    let meta = prop::collection::btree_map(any::<String>(), any::<String>(), 0..3);
    let overrides = prop::collection::vec((any::<u32>(), any::<u32>(), 0..i64::MAX), 0..6);
    (ranks, programs, names, meta, overrides).prop_map(|((world, comms), programs, names, meta, overrides)| {
        let mut builder = GraphBuilder::new(world);
        let names = names.iter().map(|name| builder.intern_name(name).0).max().expect("at least one name") + 1;
        let comms = &comms;
        let slots_of = |rank: u32| (0..comms.len() as u32).filter(move |c| comms[*c as usize].contains(&rank));
        let slots = (0..world).map(|rank| slots_of(rank).count()).min().expect("at least one rank") as u32;
        let peers = comms.iter().map(Vec::len).min().unwrap_or(1) as u32;
        let mut groups = 0;
        let mut programs = programs.iter().map(|program| {
            let mut next_group = |raw: &RawOp| {
                groups += u32::from(raw.3 % 2);
                if raw.1.is_multiple_of(2) { 0 } else { groups }
            };
            let mut ops: Vec<Op> =
                program.iter().map(|raw| op_of(*raw, slots, peers, names, next_group(raw))).collect();
            separate_groups(&mut ops);
            ops
        });
        let programs: Vec<Vec<Op>> = programs.by_ref().collect();
        let templates: Vec<TemplateId> = (programs.iter().enumerate())
            .map(|(index, ops)| builder.add_template(&format!("role {index}"), ops).expect("a valid program"))
            .collect();
        for members in comms {
            builder.add_comm(members.iter().copied().map(Rank).collect());
        }
        for rank in 0..world {
            let template = templates[rank as usize % templates.len()];
            builder.set_rank(Rank(rank), template, slots_of(rank).map(CommId).collect());
        }
        for (rank, op, duration) in overrides {
            let rank = rank % world;
            let program = &programs[rank as usize % programs.len()];
            let computes: Vec<_> =
                (0..program.len()).filter(|i| matches!(program[*i].kind, OpKind::Compute { .. })).collect();
            if let Some(op) = computes.get(op as usize % computes.len().max(1)) {
                builder.override_duration(Rank(rank), *op as u32, SimTime::from_ps(duration));
            }
        }
        for (key, value) in meta {
            builder.set_meta(key, value);
        }
        builder.finish().expect("the tables agree")
    })
}

/// Gives every run of equal group numbers a number of its own, rising.
fn separate_groups(ops: &mut [Op]) {
    let (mut previous, mut number) = (0, 0);
    for op in ops {
        let current = match &mut op.kind {
            OpKind::Collective { group, .. } | OpKind::PointToPoint { group, .. } => {
                let raw = *group;
                number += u32::from(raw != previous && raw != 0);
                *group = if raw == 0 { 0 } else { number };
                raw
            }
            _ => 0,
        };
        previous = current;
    }
}

pub(crate) struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("graph.prism")
    }

    pub(crate) fn bytes_of(&self, graph: &Graph) -> Vec<u8> {
        graph.save(&self.path()).expect("the folder is writable");
        std::fs::read(self.path()).expect("it was just written")
    }

    pub(crate) fn open(&self, bytes: &[u8]) -> Result<Graph, GraphError> {
        // Under a new name each time: a file that is mapped must not be cut.
        let path = self.folder.path().join("other.prism");
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).expect("the folder is writable");
        Graph::open(&path)
    }
}

fn small_graph() -> Graph {
    Graph::from_text(
        r#"prism-graph 1
world 4
meta "device" "h100-sxm"
name "gemm, large"
comm 0-3
comm 0-2/2
comm 1-3/2
template "stage"
  +5000 s0 compute 1000000 Gemm Modelled "gemm, large"
  +5000 s1 AllReduce c0 Float32 1024 Sum
  +0 s1 Broadcast c1 Bfloat16 8 Sum root 1 group 1
  +0 s1 AllGather c1 Bfloat16 8 Sum group 1
  +0 s1 event_record e3
  +0 s0 event_wait e3
  +10 s0 iteration_end
rank 0 template 0 comms 0 1
rank 1 template 0 comms 0 2
rank 2 template 0 comms 0 1
rank 3 template 0 comms 0 2
override 3 op 0 1300000
"#,
    )
    .expect("a valid text")
}

/// Reads everything a graph offers.
pub(crate) fn walk(graph: &Graph) -> u64 {
    let mut ops = 0;
    for rank in (0..graph.world_size()).map(Rank) {
        let template = graph.template(graph.rank_template(rank));
        ops += template.iter().count() as u64;
        for op in template.iter() {
            if let OpKind::Compute { name, .. } = op.kind {
                graph.name(name);
            }
        }
        assert!(graph.rank_overrides(rank).all(|(op, _)| (op as usize) < template.len()));
        for comm in graph.rank_slots(rank) {
            assert!(graph.comm_members(CommId(*comm)).contains(&rank.0));
        }
        assert!(graph.rank_slots(rank).len() >= template.num_slots() as usize);
    }
    assert_eq!(ops, graph.num_ops());
    let _ = graph.check();
    let _ = graph.summary();
    if let Ok(again) = Graph::from_text(&graph.to_text()) {
        assert_eq!(&again, graph);
    }
    ops
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn text_and_binary_forms_give_the_graph_back(graph in any_graph()) {
        let text = graph.to_text();
        prop_assert_eq!(&Graph::from_text(&text).expect("its own text"), &graph);
        let files = Files::new();
        let bytes = files.bytes_of(&graph);
        prop_assert_eq!(bytes.len() as u64, graph.graph_bytes());
        let opened = Graph::open(&files.path()).expect("its own file");
        prop_assert_eq!(&opened, &graph);
        prop_assert_eq!(opened.to_text(), text);
        prop_assert_eq!(opened.graph_bytes(), bytes.len() as u64);
        prop_assert_eq!(opened.summary(), graph.summary());
        prop_assert_eq!(files.bytes_of(&opened), bytes);
        walk(&opened);
    }

    #[test]
    fn a_changed_file_is_an_error_or_still_a_graph_but_never_a_crash(
        graph in any_graph(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..6), 1..6),
        reseal in any::<bool>(),
    ) {
        let files = Files::new();
        let mut bytes = files.bytes_of(&graph);
        for (at, value, how) in changes {
            let at = at.index(bytes.len());
            match how {
                0 => bytes.truncate(at.max(1)),
                1 => bytes.insert(at, value),
                2 => { bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff); }
                _ => bytes[at] = value,
            }
        }
        // With its checksums made right again the file reaches the checks behind them.
        if reseal {
            seal(&mut bytes);
        }
        if let Ok(opened) = files.open(&bytes) {
            walk(&opened);
            prop_assert!(reseal || opened == graph, "a change of an unsealed file went unnoticed");
        }
    }

    #[test]
    fn changed_columns_with_right_checksums_never_crash(
        graph in any_graph(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let files = Files::new();
        let mut bytes = files.bytes_of(&graph);
        let sections: Vec<_> = sections(&bytes).filter(|(_, _, len)| *len > 0).collect();
        for (section, at, value) in changes {
            let (_, offset, len) = sections[section.index(sections.len())];
            bytes[offset + at.index(len)] = value;
        }
        seal(&mut bytes);
        if let Ok(opened) = files.open(&bytes) {
            walk(&opened);
        }
    }

    #[test]
    fn any_text_is_a_graph_or_an_error(
        lines in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), ".{0,12}"), 0..4),
    ) {
        let mut text = small_graph().to_text().into_bytes();
        for (from, to, insert) in lines {
            let from = from.index(text.len());
            text.drain(from..(from + to.index(7)).min(text.len()));
            text.splice(from..from, insert.bytes());
        }
        let text = String::from_utf8_lossy(&text);
        if let Ok(graph) = Graph::from_text(&text) {
            walk(&graph);
        }
    }
}

/// Position of the table entry, offset and length of every section the table names (as far as they are inside).
pub(crate) fn sections(bytes: &[u8]) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize;
    let entries = (0..34).map(|index| 64 + 32 * index).filter(|at| at + 32 <= bytes.len());
    entries.map(move |at| (at, number(at + 8), number(at + 16)))
}

/// Makes length and checksums right, as somebody would who wants to do harm.
pub(crate) fn seal(bytes: &mut [u8]) {
    let all: Vec<_> = sections(bytes).collect();
    for (at, offset, len) in all {
        if let Some(section) = offset.checked_add(len).and_then(|end| bytes.get(offset..end)) {
            let crc = crc32fast::hash(section);
            bytes[at + 24..at + 28].copy_from_slice(&crc.to_le_bytes());
        }
    }
    if bytes.len() >= 64 + 34 * 32 {
        let length = (bytes.len() as u64).to_le_bytes();
        bytes[24..32].copy_from_slice(&length);
        let table = crc32fast::hash(&bytes[64..64 + 34 * 32]);
        bytes[36..40].copy_from_slice(&table.to_le_bytes());
        let header = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&header.to_le_bytes());
    }
}

#[test]
fn sealing_an_unchanged_file_changes_nothing() {
    let files = Files::new();
    let bytes = files.bytes_of(&small_graph());
    let mut sealed = bytes.clone();
    sealed[24..40].fill(0);
    sealed[60..64].fill(0);
    sealed[32..36].copy_from_slice(&bytes[32..36]);
    seal(&mut sealed);
    assert!(sealed == bytes, "the test's idea of the layout is not the writer's");
}

#[test]
fn every_single_flipped_bit_is_found() {
    let files = Files::new();
    let bytes = files.bytes_of(&small_graph());
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        match files.open(&flipped) {
            Err(GraphError::Format { .. }) => {}
            other => panic!("bit {bit}: {other:?}"),
        }
    }
}

#[test]
fn every_truncation_is_found_and_its_offset_told() {
    let files = Files::new();
    let bytes = files.bytes_of(&small_graph());
    for len in 0..bytes.len() {
        match files.open(&bytes[..len]) {
            Err(GraphError::Format { offset, .. }) => assert!(offset <= len as u64, "{len}: offset {offset}"),
            other => panic!("{len} bytes: {other:?}"),
        }
    }
}

#[test]
fn foreign_files_are_named_as_such() {
    let files = Files::new();
    for foreign in [&b"\x7fELF"[..], b"PK\x03\x04", b"{\"schemaVersion\": 1}"] {
        let mut bytes = foreign.to_vec();
        bytes.resize(4096, 0);
        let error = files.open(&bytes).expect_err("not a graph").to_string();
        assert!(error.contains("another kind of file") && error.contains("byte 0"), "{error}");
    }
    let mut newer = files.bytes_of(&small_graph());
    newer[8] = 9;
    let error = files.open(&newer).expect_err("a version of the future").to_string();
    assert!(error.contains("version 9"), "{error}");
    let missing = Graph::open(&files.folder.path().join("nothing.prism")).expect_err("there is none");
    assert!(matches!(missing, GraphError::Io { .. }) && missing.to_string().contains("nothing.prism"));
    assert!(matches!(Graph::open(files.folder.path()), Err(GraphError::Io { .. })), "a folder is no graph");
}

#[test]
fn huge_counts_in_a_small_file_are_refused_before_anything_is_allocated() {
    let files = Files::new();
    let bytes = files.bytes_of(&small_graph());
    // Run counts (section 23) and text counts (1, 2, 3), each with the highest values.
    for index in [0, 1, 2, 22] {
        let mut huge = bytes.clone();
        let (_, offset, _) = sections(&bytes).nth(index).expect("34 sections");
        huge[offset..offset + 4].fill(0xff);
        seal(&mut huge);
        assert!(matches!(files.open(&huge), Err(GraphError::Format { .. })), "section {index}");
    }
    let text = "prism-graph 1\nworld 4294967295\ncomm 0-4294967294\n";
    assert!(matches!(Graph::from_text(text), Err(GraphError::Format { .. })));
}

#[test]
fn a_graph_stays_readable_when_its_file_is_replaced() {
    let files = Files::new();
    let graph = small_graph();
    files.bytes_of(&graph);
    let opened = Graph::open(&files.path()).expect("its own file");
    let other = Graph::from_text("prism-graph 1\nworld 1\ntemplate \"t\"\nrank 0 template 0 comms\n").expect("valid");
    other.save(&files.path()).expect("replaces the file");
    assert_eq!(opened, graph);
    assert_eq!(Graph::open(&files.path()).expect("the new file"), other);
    let left: Vec<_> = std::fs::read_dir(files.folder.path()).expect("a folder").collect();
    assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");
}

#[test]
fn reading_gives_what_was_built() {
    let graph = small_graph();
    assert_eq!((graph.world_size(), graph.num_comms(), graph.num_templates(), graph.num_ops()), (4, 3, 1, 28));
    assert_eq!(graph.comm_members(CommId(2)), [1, 3]);
    assert_eq!(graph.rank_slots(Rank(3)), [0, 2]);
    assert_eq!(graph.rank_overrides(Rank(3)).collect::<Vec<_>>(), [(0, SimTime::from_ps(1_300_000))]);
    assert_eq!(graph.rank_overrides(Rank(2)).count(), 0);
    let template = graph.template(TemplateId(0));
    assert_eq!((template.num_streams(), template.num_events(), template.num_slots()), (2, 4, 2));
    let op = template.op(2);
    assert!(matches!(op.kind, OpKind::Collective { root: 1, group: 1, count: 8, slot: SlotId(1), .. }), "{op:?}");
    assert!(matches!(template.op(3).kind, OpKind::Collective { root: 0, group: 1, .. }));
    assert!(matches!(template.op(6).kind, OpKind::IterationEnd));
}

#[test]
fn the_summary_counts_ranks_ops_bytes_and_time() {
    let summary = small_graph().summary();
    assert_eq!((summary.world_size, summary.ops, summary.overrides), (4, 28, 1));
    assert_eq!(summary.roles.len(), 1);
    assert_eq!((summary.roles[0].ranks, summary.roles[0].example_ranks.clone()), (4, vec![0, 1, 2, 3]));
    let families: Vec<_> = summary.communicators.iter().map(|f| (f.size, f.stride, f.count)).collect();
    assert_eq!(families, [(4, Some(1), 1), (2, Some(2), 2)]);
    assert_eq!(summary.communication["all_reduce"].payload_bytes, 4 * 4096);
    assert_eq!(summary.communication["broadcast"].calls, 4);
    assert_eq!(summary.ops_by_kind["event_wait"], 4);
    assert_eq!(summary.device_time.total_ns, 3 * 1000 + 1300);
    assert_eq!(summary.device_time.by_provenance_ns[&Provenance::Modelled], 4300);
    assert_eq!(summary.device_time.by_class_ns[&ComputeClass::Gemm], 4300);
    let json = serde_json::to_value(&summary).expect("serialises");
    assert_eq!(json["device_time"]["by_class_ns"]["gemm"], 4300);
    assert_eq!(json["meta"]["device"], "h100-sxm");
}

/// The error that a change of the small graph's text gives.
fn error_after(from: &str, to: &str) -> String {
    let text = small_graph().to_text();
    assert!(text.contains(from), "{from:?} is not in {text}");
    let graph = Graph::from_text(&text.replacen(from, to, 1));
    graph.and_then(|graph| graph.check()).expect_err("the change is wrong").to_string()
}

#[test]
fn broken_structure_is_named() {
    let cases = [
        ("comms 0 1\n", "comms 0\n", "rank 0", "2 communicator slots, but only 1"),
        ("comms 0 1\n", "comms 0 7\n", "rank 0", "communicator 7 does not exist"),
        ("comms 0 1\n", "comms 0 2\n", "rank 0", "communicator 1 but has no slot for it"),
        ("comms 0 1\n", "comms 0 1 1\n", "rank 0", "has it twice"),
        ("comms 0 2\n", "comms 0 2 1\n", "rank 1", "communicator 1, of which it is no member"),
        ("comm 0-2/2", "comm 0 0", "rank 0", "listed twice"),
        ("root 1", "root 2", "rank 0, op 2", "group rank 2 does not exist in communicator 1"),
        ("rank 3 template 0", "rank 3 template 1", "rank 3", "template 1 does not exist"),
        ("rank 3 template 0 comms 0 2\n", "", "rank 3", "no program was set"),
        ("override 3 op 0", "override 3 op 1", "rank 3, op 1", "only compute ops"),
        ("override 3 op 0", "override 9 op 0", "rank 9", "not a rank of the world"),
        (
            "+5000 s1 AllReduce c0 Float32 1024 Sum",
            "+0 s1 AllReduce c0 Float32 1024 Sum group 1\n+0 s0 stream_sync",
            "op 3",
            "must be neighbours",
        ),
        ("+5000 s0", "+-1 s0", "op 0", "gap is negative"),
        ("compute 1000000", "compute -1", "op 0", "duration is negative"),
        ("event_wait e3", "event_wait e4294967295", "op 5", "not dense"),
        ("comm 1-3/2", "comm 1-4/3", "byte", "beyond the 4 ranks"),
        ("AllReduce", "AllReduceX", "byte", "\"AllReduceX\" is no op"),
    ];
    for (from, to, place, what) in cases {
        let error = error_after(from, to);
        assert!(error.contains(place) && error.contains(what), "{from:?} -> {to:?}: {error}");
    }
}

/// Two ranks with a program each, as text lines.
fn two_ranks(first: &str, second: &str) -> Graph {
    let text = format!(
        "prism-graph 1\nworld 2\ncomm 0-1\ntemplate \"a\"\n{first}\ntemplate \"b\"\n{second}\n\
         rank 0 template 0 comms 0\nrank 1 template 1 comms 0\n"
    );
    Graph::from_text(&text).expect("the structure is right")
}

#[test]
fn programs_that_do_not_fit_together_are_told_apart() {
    let reduce = "+0 s0 AllReduce c0 Float32 10 Sum";
    let cases = [
        (reduce, "+0 s0 AllReduce c0 Float32 11 Sum", "op 0", "AllReduce of 11 Float32"),
        (reduce, "+0 s0 AllReduce c0 Bfloat16 10 Sum", "op 0", "Bfloat16"),
        (reduce, "+0 s0 AllReduce c0 Float32 10 Max", "op 0", "Max"),
        (reduce, "+0 s0 AllGather c0 Float32 10 Sum", "op 0", "AllGather"),
        ("+0 s0 Broadcast c0 Int8 1 Sum", "+0 s0 Broadcast c0 Int8 1 Sum root 1", "op 0", "root 1"),
        (reduce, "", "rank 1", "rank 1 calls nothing more, but rank 0 calls AllReduce"),
        ("+0 s0 Send c0 Int8 4 peer 1", "+0 s0 Recv c0 Int8 3 peer 0", "rank 0", "differs in size"),
        ("+0 s0 Send c0 Int8 4 peer 1", "", "rank 0", "sends 1 messages to rank 1, which receives 0"),
        ("", "+0 s0 Recv c0 Int8 4 peer 0", "rank 1", "receives 1 messages from rank 0, which sends 0"),
    ];
    for (first, second, place, what) in cases {
        let error = two_ranks(first, second).check().expect_err("they do not fit").to_string();
        assert!(error.contains(place) && error.contains(what) && error.contains("communicator 0"), "{error}");
    }
    // Sizes count, not element types; the order of different directions is free.
    let first = "+0 s0 Send c0 Int8 4 peer 1\n+0 s0 Recv c0 Int8 2 peer 1";
    let second = "+7 s1 Send c0 Int8 2 peer 0\n+0 s0 Recv c0 Float32 1 peer 0";
    two_ranks(first, second).check().expect("they fit");
    two_ranks(reduce, &format!("+0 s3 stream_sync\n{reduce}")).check().expect("they fit");
}

#[test]
fn the_builder_says_which_rank_is_missing_or_too_many() {
    let mut builder = GraphBuilder::new(2);
    let template = builder.add_template("t", &[]).expect("an empty program");
    builder.set_rank(Rank(0), template, vec![]);
    builder.set_rank(Rank(5), template, vec![]);
    let error = builder.finish().expect_err("rank 5 of 2").to_string();
    assert!(error.contains("rank 5") && error.contains("only 2 ranks"), "{error}");
    let mut builder = GraphBuilder::new(1);
    let kind = OpKind::Compute {
        duration: SimTime::ZERO,
        name: prism_engine::ids::NameId(0),
        class: ComputeClass::Kernel,
        provenance: Provenance::Default,
    };
    let op = Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind };
    let error = builder.add_template("t", &[op]).expect_err("no such name").to_string();
    assert!(error.contains("never interned"), "{error}");
}

/// 8,192 ranks: tensor groups of 8, data groups of 1,024, the world; 3,000 ops each.
fn large_graph() -> Graph {
    const WORLD: u32 = 8192;
    let mut builder = GraphBuilder::new(WORLD);
    let name = builder.intern_name("kernel");
    let world = builder.add_comm((0..WORLD).map(Rank).collect());
    let tensor: Vec<_> = (0..WORLD / 8).map(|g| builder.add_comm((8 * g..8 * g + 8).map(Rank).collect())).collect();
    let data: Vec<_> = (0..8).map(|g| builder.add_comm((g..WORLD).step_by(8).map(Rank).collect())).collect();
    let op = |index: u32| {
        let kind = match index % 10 {
            0 => OpKind::Collective {
                slot: SlotId(index / 10 % 3),
                kind: CollectiveKind::AllReduce,
                dtype: DataType::Bfloat16,
                reduce: ReduceOp::Sum,
                root: 0,
                count: 1 << 20,
                group: index / 10 + 1,
            },
            _ => OpKind::Compute {
                duration: SimTime::from_ns(i64::from(1000 + index % 100)),
                name,
                class: ComputeClass::Kernel,
                provenance: Provenance::Modelled,
            },
        };
        Op { host_gap: SimTime::from_ns(5000), stream: StreamId(index % 10 / 9), kind }
    };
    let ops: Vec<_> = (0..3000).map(op).collect();
    let template = builder.add_template("all", &ops).expect("a valid program");
    for rank in 0..WORLD {
        builder.set_rank(Rank(rank), template, vec![world, tensor[rank as usize / 8], data[rank as usize % 8]]);
    }
    builder.finish().expect("the tables agree")
}

#[test]
fn a_large_job_is_small_on_disk() {
    let graph = large_graph();
    assert_eq!(graph.num_ops(), 8192 * 3000);
    graph.check().expect("the programs fit");
    let summary = graph.summary();
    assert!(summary.bytes_per_op < 0.05, "{} bytes per op", summary.bytes_per_op);
    let files = Files::new();
    files.bytes_of(&graph);
    assert_eq!(Graph::open(&files.path()).expect("its own file"), graph);
}
