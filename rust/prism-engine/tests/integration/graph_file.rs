//! Durations of the ranks' own in both of their forms, and files that are read when they are used.

use crate::graph::{Files, seal, sections, walk};
use prism_engine::graph::op::{ComputeClass, Op, OpKind, Provenance};
use prism_engine::graph::{Graph, GraphBuilder, GraphError, GraphFile};
use prism_engine::ids::{Rank, StreamId, TemplateId};
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Names of the sections in file order, as errors give them.
const SECTIONS: [&str; 34] = [
    "Names",
    "Meta",
    "TemplateNames",
    "TemplateStart",
    "OpRow",
    "GapHeads",
    "GapData",
    "GroupHeads",
    "GroupData",
    "DurationHeads",
    "DurationData",
    "RowTag",
    "RowA",
    "RowB",
    "RowC",
    "RowStream",
    "RowSlot",
    "RowArg",
    "RowValue",
    "CommRuns",
    "RunFirst",
    "RunStride",
    "RunCount",
    "RankTemplate",
    "RankStart",
    "RankSlots",
    "OverrideRank",
    "OverrideStart",
    "OverrideOp",
    "OverridePs",
    "OwnTemplate",
    "OwnOp",
    "OwnHeads",
    "OwnData",
];

type Own = BTreeMap<(u32, u32), i64>;
/// World, templates, ops, and by rank and op durations in ps.
type Numbers = (u32, u32, u32, Vec<((u32, u32), i64)>);

/// A job of `templates` programs of `num_ops` ops (every third is a marker) whose ranks have these durations.
fn job(world_size: u32, templates: u32, num_ops: u32, own: &[((u32, u32), i64)]) -> Graph {
    let mut builder = GraphBuilder::new(world_size);
    let name = builder.intern_name("kernel");
    builder.set_meta("device", "test");
    let op = |index: u32| {
        let kind = if index % 3 == 2 {
            OpKind::StreamSync
        } else {
            OpKind::Compute {
                duration: SimTime::from_ns(i64::from(index)),
                name,
                class: ComputeClass::Gemm,
                provenance: Provenance::Measured,
            }
        };
        Op { host_gap: SimTime::from_ns(5), stream: StreamId(0), kind }
    };
    let ops: Vec<Op> = (0..num_ops).map(op).collect();
    for template in 0..templates {
        builder.add_template(&format!("role {template}"), &ops).expect("valid");
    }
    for rank in 0..world_size {
        builder.set_rank(Rank(rank), TemplateId(rank % templates), vec![]);
    }
    for ((rank, op), ps) in own {
        builder.override_duration(Rank(*rank), *op, SimTime::from_ps(*ps));
    }
    builder.finish().expect("valid")
}

/// Durations some of which are of ops of which nearly all ranks have one.
fn any_job() -> impl Strategy<Value = Numbers> {
    let step = prop_oneof![Just(1_i64), Just(1000), 1_i64..1 << 40];
    (1_u32..60, 1_u32..4, 1_u32..12, step).prop_flat_map(|(world, templates, num_ops, step)| {
        let templates = templates.min(world);
        let single = ((0..world, 0..num_ops), 0_i64..1 << 20);
        let many = (0..num_ops, any::<u64>(), 0_u32..4, 1_i64..1 << 20);
        let own = (prop::collection::vec(single, 0..12), prop::collection::vec(many, 0..4));
        own.prop_map(move |(mut own, many)| {
            for (op, seed, missing, range) in many {
                let ranks = (0..world).filter(|rank| missing == 0 || !(u64::from(*rank) ^ seed).is_multiple_of(4));
                let value = |rank: u32| (seed >> (1 + rank % 60)) as i64 % range;
                own.extend(ranks.map(|rank| ((rank, op), value(rank))));
            }
            let computes = |entry: &((u32, u32), i64)| entry.0.1 % 3 != 2;
            let own = own.into_iter().filter(computes).map(|(key, number)| (key, number.saturating_mul(step)));
            (world, templates, num_ops, own.collect::<Vec<_>>())
        })
    })
}

fn read(graph: &Graph) -> Own {
    let ranks = 0..graph.world_size();
    ranks.flat_map(|rank| graph.rank_overrides(Rank(rank)).map(move |(op, ps)| ((rank, op), ps.as_ps()))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn own_durations_come_back_in_order((world, templates, num_ops, own) in any_job()) {
        let graph = job(world, templates, num_ops, &own);
        // Of several the last counts.
        let expected: Own = own.iter().copied().collect();
        prop_assert_eq!(&read(&graph), &expected);
        for rank in 0..world {
            let ops: Vec<u32> = graph.rank_overrides(Rank(rank)).map(|(op, _)| op).collect();
            prop_assert!(ops.is_sorted());
            prop_assert_eq!(ops.len(), expected.keys().filter(|(of, _)| *of == rank).count());
        }
        prop_assert_eq!(graph.summary().overrides, expected.len() as u64);
        let files = Files::new();
        let bytes = files.bytes_of(&graph);
        let opened = Graph::open(&files.path()).expect("its own file");
        prop_assert_eq!(&read(&opened), &expected);
        prop_assert!(opened == graph);
        prop_assert_eq!(files.bytes_of(&opened), bytes);
        prop_assert!(Graph::from_text(&graph.to_text()).expect("its own text") == graph);
    }

    #[test]
    fn damage_in_any_section_is_named_and_forged_checksums_do_not_crash(
        (world, templates, num_ops, own) in any_job(),
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1_u8..=255), 1..4),
    ) {
        let graph = job(world, templates, num_ops, &own);
        let files = Files::new();
        let good = files.bytes_of(&graph);
        let known: Vec<_> = sections(&good).enumerate().filter(|(_, (_, _, len))| *len > 0).collect();
        let mut forged = good.clone();
        for (section, at, change) in picks {
            let (number, (_, offset, len)) = known[section.index(known.len())];
            let at = offset + at.index(len);
            let mut damaged = good.clone();
            damaged[at] ^= change;
            let error = files.open(&damaged).expect_err("the checksum is wrong").to_string();
            prop_assert!(error.contains(&format!("section {}: it is damaged", SECTIONS[number])), "{error}");
            forged[at] ^= change;
        }
        seal(&mut forged);
        match files.open(&forged) {
            Ok(opened) => _ = walk(&opened),
            Err(GraphError::Format { .. } | GraphError::Invalid { .. }) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn a_column_for_many_ranks_and_an_entry_for_one() {
    let bytes = |own: &[((u32, u32), i64)]| job(4096, 1, 10, own).graph_bytes();
    let none = bytes(&[]);
    let one = bytes(&[((77, 3), 5_000)]) - none;
    assert!(one <= 40, "{one} bytes for one duration");
    // Whole ns below 65.5 us from each other: two bytes each.
    let many: Vec<_> = (0..4096).map(|rank| ((rank, 3), 1_000_000 + i64::from(rank * 37 % 4096) * 1000)).collect();
    let all = bytes(&many) - none;
    assert!((2 * 4096..=2 * 4096 + 128).contains(&all), "{all} bytes for 4,096 durations");
    let graph = job(4096, 1, 10, &many);
    assert_eq!(graph.rank_overrides(Rank(5)).collect::<Vec<_>>(), [(3, SimTime::from_ps(1_185_000))]);
}

#[test]
fn every_rank_with_its_own_durations_takes_less_than_eight_bytes_per_op() {
    let own: Vec<_> = (0..8192_u32)
        .flat_map(|rank| (0..30_u32).filter(|op| op % 3 != 2).map(move |op| (rank, op)))
        .map(|(rank, op)| ((rank, op), 1_000_000_000 + i64::from((rank * 7919 + op * 104_729) % 50_000_000)))
        .collect();
    let graph = job(8192, 1, 30, &own);
    let per_op = |bytes: u64| bytes as f64 / graph.num_ops() as f64;
    assert!(per_op(graph.graph_bytes()) < 8.0, "{} bytes per op", per_op(graph.graph_bytes()));
    assert!(per_op(graph.memory_bytes()) < 8.0, "{} bytes per op in memory", per_op(graph.memory_bytes()));
}

#[test]
fn a_file_tells_its_size_without_being_read_and_damage_shows_when_it_is_used() {
    let graph = job(64, 2, 9, &[((3, 0), 7)]);
    let files = Files::new();
    let mut bytes = files.bytes_of(&graph);
    let file = GraphFile::open(&files.path()).expect("its own file");
    let facts = (file.world_size(), file.num_templates(), file.num_ops(), file.file_bytes());
    assert_eq!(facts, (64, 2, 64 * 9, bytes.len() as u64));
    assert_eq!(file.meta().expect("not damaged")["device"], "test");
    assert!(*file.graph().expect("not damaged") == graph);
    assert!(std::sync::Arc::ptr_eq(&file.graph().expect("kept"), &file.graph().expect("kept")), "read once");

    let (_, offset, _) = sections(&bytes).nth(4).expect("34 sections");
    bytes[offset] ^= 0xff;
    let path = files.path().with_file_name("damaged.prism");
    std::fs::write(&path, &bytes).expect("the folder is writable");
    let file = GraphFile::open(&path).expect("nothing but the header is looked at");
    assert_eq!((file.world_size(), file.meta().expect("another section").len()), (64, 1));
    for _ in 0..2 {
        let error = file.graph().expect_err("damaged").to_string();
        assert!(error.contains("section OpRow: it is damaged"), "{error}");
    }
}

#[test]
fn a_header_that_tells_other_numbers_is_found() {
    let files = Files::new();
    let bytes = files.bytes_of(&job(64, 2, 9, &[]));
    for at in [40, 44, 48] {
        let mut forged = bytes.clone();
        forged[at] += 1;
        seal(&mut forged);
        let error = files.open(&forged).expect_err("forged").to_string();
        assert!(error.contains("the header tells other numbers"), "{error}");
    }
}

#[test]
fn files_of_the_first_version_are_refused_by_name() {
    let files = Files::new();
    let mut bytes = files.bytes_of(&job(1, 1, 1, &[]));
    bytes[8] = 1;
    let error = files.open(&bytes).expect_err("an older version").to_string();
    assert!(error.contains("format version 1, this program reads version 2"), "{error}");
}
