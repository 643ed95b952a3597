//! Size of graphs, and what storing and opening them costs. Every case checks that the graph comes back before it is timed.
//!
//! `cargo bench -p prism-engine --bench graph [-- SECTION]` with the sections `own` (a transformer step in which every rank has
//! durations of its own, 64 to 65,536 ranks), `explicit` (every rank has a program of its own) and `layout` (8,192 ranks as TP 8 x PP
//! 16 x DP 64, six layers a stage, 48 microbatches: the limits of the file are checked). Sizes are bytes per op of
//! all ranks; CPU time, except for storing, which waits for the disk.

#![allow(clippy::print_stdout, reason = "the numbers are the output")]

mod meter;

use meter::{cpu, cpu_time};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder, GraphFile};
use prism_engine::ids::{CommId, NameId, Rank, SlotId, StreamId, TemplateId};
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;
use std::fs;
use std::path::Path;
use std::time::Instant;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let sections: [(&str, fn()); 3] = [("own", own), ("explicit", explicit), ("layout", layout)];
    for (name, section) in sections {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            section();
        }
    }
}

fn heading() {
    println!(
        "{:<28} {:>6} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "ranks", "ops", "build ms", "file MB", "file B/op", "mem B/op", "save ms", "open us", "check ms"
    );
}

/// Every rank is up to 5 % slower than the fastest, in whole ns and in ps.
fn own() {
    heading();
    for dp in [1, 8, 16, 128, 1024] {
        let step = TransformerStep { dp, ..TransformerStep::default() }.graph().expect("valid");
        measure("own durations, whole ns", || with_own_durations(&step, 1000));
        if dp == 128 {
            measure("own durations, ps", || with_own_durations(&step, 1));
            measure("one program per role", || with_own_durations(&step, 0));
        }
    }
}

/// A job as large as those the engine is for: what its file may have, by role and with durations of every rank.
fn layout() {
    heading();
    let step = TransformerStep { dp: 64, tp: 8, pp: 16, microbatches: 48, layers: 6, ..TransformerStep::default() };
    let step = step.graph().expect("valid");
    let bytes = measure("TP8 PP16 DP64, roles repeat", || with_own_durations(&step, 0));
    assert!(bytes <= 64 << 20, "{bytes} bytes where roles repeat");
    let bytes = measure("the same, own durations", || with_own_durations(&step, 1000));
    assert!(bytes <= 8 * step.num_ops(), "{bytes} bytes for {} ops", step.num_ops());
}

/// Programs that share nothing but their kinds of ops.
fn explicit() {
    heading();
    measure("a program per rank, ns", || programs(512, 4000, 1000));
    measure("a program per rank, ps", || programs(512, 4000, 1));
}

fn measure(what: &str, build: impl Fn() -> Graph) -> u64 {
    let (start, graph) = (cpu_time(), build());
    let built = cpu_time().saturating_sub(start);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("job.prism");
    let start = Instant::now();
    let bytes = graph.save(&path).expect("the folder is writable");
    let saved = start.elapsed();
    assert_eq!(fs::metadata(&path).expect("stored").len(), bytes);
    assert!(Graph::open(&path).expect("its own file") == graph, "the graph comes back");
    let opened = cpu(|| open(&path, &graph));
    let checked = cpu(|| GraphFile::open(&path).and_then(|file| file.graph()).expect("its own file"));
    let per_op = |bytes: u64| bytes as f64 / graph.num_ops() as f64;
    println!(
        "{what:<28} {:>6} {:>10} {:>9.1} {:>9.2} {:>9.3} {:>9.3} {:>9.1} {:>9.1} {:>9.2}",
        graph.world_size(),
        graph.num_ops(),
        built.as_secs_f64() * 1e3,
        bytes as f64 / 1e6,
        per_op(bytes),
        per_op(graph.memory_bytes()),
        saved.as_secs_f64() * 1e3,
        opened.as_secs_f64() * 1e6,
        checked.as_secs_f64() * 1e3,
    );
    bytes
}

fn open(path: &Path, graph: &Graph) {
    let file = GraphFile::open(path).expect("its own file");
    assert_eq!((file.world_size(), file.num_ops()), (graph.world_size(), graph.num_ops()));
}

/// The job with every compute op of every rank up to 5 % longer, in steps of so many ps; 0: as it is.
fn with_own_durations(graph: &Graph, step: u64) -> Graph {
    let mut builder = GraphBuilder::new(graph.world_size());
    for comm in 0..graph.num_comms() as u32 {
        builder.add_comm(graph.comm_members(CommId(comm)).iter().copied().map(Rank).collect());
    }
    let mut compute: Vec<Vec<(u32, u64)>> = Vec::new();
    for template in 0..graph.num_templates() as u32 {
        let view = graph.template(TemplateId(template));
        let mut ops: Vec<Op> = view.iter().collect();
        let mut own = Vec::new();
        for (index, op) in ops.iter_mut().enumerate() {
            if let OpKind::Compute { name, duration, .. } = &mut op.kind {
                *name = builder.intern_name(graph.name(*name));
                own.push((index as u32, duration.as_ps() as u64));
            }
        }
        builder.add_template(view.name(), &ops).expect("as it was");
        compute.push(own);
    }
    let mut random = Random(1);
    for rank in (0..graph.world_size()).map(Rank) {
        let template = graph.rank_template(rank);
        builder.set_rank(rank, template, graph.rank_slots(rank).iter().copied().map(CommId).collect());
        for (op, ps) in compute[template.index()].iter().filter(|_| step > 0) {
            let longer = random.below(ps / 20 / step) * step;
            builder.override_duration(rank, *op, SimTime::from_ps((ps + longer) as i64));
        }
    }
    builder.finish().expect("as it was")
}

/// Ranks with programs of their own: nine kernels of random length and host gap, then an all-reduce of a random slot.
fn programs(world_size: u32, num_ops: u32, step: u64) -> Graph {
    let mut builder = GraphBuilder::new(world_size);
    let names: Vec<NameId> = (0..40).map(|name| builder.intern_name(&format!("kernel {name}"))).collect();
    let all: Vec<Rank> = (0..world_size).map(Rank).collect();
    let comms: Vec<CommId> = (0..4).map(|_| builder.add_comm(all.clone())).collect();
    let mut random = Random(2);
    let mut op = |index: u32| {
        let kind = if index % 10 == 9 {
            OpKind::Collective {
                slot: SlotId(index / 10 % 4),
                kind: CollectiveKind::AllReduce,
                dtype: DataType::Bfloat16,
                reduce: ReduceOp::Sum,
                root: 0,
                count: 1 << (index / 10 % 20),
                group: 0,
            }
        } else {
            OpKind::Compute {
                duration: SimTime::from_ps((random.below(2_000_000_000 / step) * step) as i64),
                name: names[random.below(40) as usize],
                class: ComputeClass::Kernel,
                provenance: Provenance::Measured,
            }
        };
        let host_gap = SimTime::from_ps((random.below(20_000_000 / step) * step) as i64);
        Op { host_gap, stream: StreamId(u32::from(index % 10 == 9)), kind }
    };
    for rank in 0..world_size {
        let ops: Vec<Op> = (0..num_ops).map(&mut op).collect();
        let template = builder.add_template(&format!("rank {rank}"), &ops).expect("valid");
        builder.set_rank(Rank(rank), template, comms.clone());
    }
    builder.finish().expect("valid")
}

/// Numbers that look random and are the same every time (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit.max(1)
    }
}
