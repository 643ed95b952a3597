//! Graph files stay small: by role, and where every rank has durations of its own.

#![allow(clippy::print_stdout, reason = "how small they are is of interest")]

use prism_engine::graph::op::OpKind;
use prism_engine::graph::{Graph, GraphBuilder, GraphFile};
use prism_engine::ids::{CommId, Rank, TemplateId};
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;

fn step(dp: u32) -> Graph {
    let step = TransformerStep { dp, tp: 8, pp: 16, microbatches: 48, layers: 6, ..TransformerStep::default() };
    step.graph().expect("valid")
}

/// The same job in which every computation of every rank takes up to 5 % longer, in whole ns.
fn with_own_durations(graph: &Graph) -> Graph {
    let mut builder = GraphBuilder::new(graph.world_size());
    for comm in 0..graph.num_comms() as u32 {
        builder.add_comm(graph.comm_members(CommId(comm)).iter().copied().map(Rank).collect());
    }
    for name in 0..graph.num_names() as u32 {
        builder.intern_name(graph.name(prism_engine::ids::NameId(name)));
    }
    for template in 0..graph.num_templates() as u32 {
        let view = graph.template(TemplateId(template));
        builder.add_template(view.name(), &view.iter().collect::<Vec<_>>()).expect("as it was");
    }
    let mut state = 1_u64;
    for rank in (0..graph.world_size()).map(Rank) {
        let template = graph.rank_template(rank);
        builder.set_rank(rank, template, graph.rank_slots(rank).iter().copied().map(CommId).collect());
        for (index, op) in graph.template(template).iter().enumerate() {
            if let OpKind::Compute { duration, .. } = op.kind {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let longer = (state >> 33) as i64 % (duration.as_ns() / 20);
                builder.override_duration(rank, index as u32, duration + SimTime::from_ns(longer));
            }
        }
    }
    builder.finish().expect("as it was")
}

#[test]
fn roles_of_8192_ranks_fit_into_a_small_file() {
    let graph = step(64);
    assert_eq!(graph.world_size(), 8192);
    assert!(graph.num_ops() > 15_000_000, "{}", graph.num_ops());
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.prism");
    let bytes = graph.save(&path).expect("writable");
    println!("{bytes} bytes for {} ops", graph.num_ops());
    assert!(bytes <= 1 << 20, "{bytes} bytes");
    let file = GraphFile::open(&path).expect("its own file");
    assert_eq!((file.world_size(), file.num_ops()), (8192, graph.num_ops()));
}

#[test]
fn durations_of_every_rank_cost_less_than_an_op() {
    let graph = with_own_durations(&step(2));
    let per_op = graph.graph_bytes() as f64 / graph.num_ops() as f64;
    println!("{per_op:.3} bytes per op, {} ops", graph.num_ops());
    assert!(per_op <= 8.0, "{per_op}");
    let own = (0..graph.world_size()).map(|rank| graph.rank_overrides(Rank(rank)).count()).sum::<usize>();
    assert!(own as u64 > graph.num_ops() / 3, "{own} durations of ranks' own");
}
