//! The engine: the execution graph of a distributed training job, and what happens when it runs.
//!
//! ```text
//!  slice::recording ──splice──► graph::Graph ──► replay            all ranks virtual
//!  (what one rank did)              │        └─► hybrid::Session   some ranks live, over prism-wire
//!                                   ▼                  │
//!            profile, cost ──► sim::Simulation ◄───────┘
//!            (durations)            │
//!                                   └─► collective (completion of a collective under skewed arrivals)
//! ```
//!
//! Time is integer (picoseconds inside, nanoseconds at interfaces), iteration order is fixed, nothing reads a clock that
//! matters to a result: the same input gives the same bytes. The crate knows neither Python nor the environment nor
//! standard output.
//!
//! ```
//! use prism_engine::graph::GraphBuilder;
//! use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
//! use prism_engine::ids::{Rank, SlotId, StreamId};
//! use prism_engine::profile::Profile;
//! use prism_engine::replay::{ReplayOptions, replay};
//! use prism_engine::units::SimTime;
//! use std::sync::Arc;
//!
//! let mut builder = GraphBuilder::new(2);
//! let name = builder.intern_name("gemm");
//! let world = builder.add_comm(vec![Rank(0), Rank(1)]);
//! let op = |kind| Op { host_gap: SimTime::from_ns(5_000), stream: StreamId(0), kind };
//! let compute = OpKind::Compute {
//!     duration: SimTime::from_ns(100_000),
//!     name,
//!     class: ComputeClass::Gemm,
//!     provenance: Provenance::Modelled,
//! };
//! let all_reduce = OpKind::Collective {
//!     slot: SlotId(0),
//!     kind: CollectiveKind::AllReduce,
//!     dtype: DataType::Bfloat16,
//!     reduce: ReduceOp::Sum,
//!     root: 0,
//!     count: 1 << 20,
//!     group: 0,
//! };
//! let template = builder.add_template("trainer", &[op(compute), op(all_reduce)])?;
//! builder.set_rank(Rank(0), template, vec![world]);
//! builder.set_rank(Rank(1), template, vec![world]);
//! let graph = Arc::new(builder.finish()?);
//!
//! let mut options = ReplayOptions::new(Profile::builtin("h100-sxm")?);
//! let healthy = replay(&graph, &options)?.total_time_ns;
//! options.slow.insert(Rank(1), 1.3);
//! assert_eq!(replay(&graph, &options)?.total_time_ns, healthy + 30_000);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod analysis;
pub mod collective;
pub mod contention;
pub mod cost;
pub mod export;
pub mod graph;
pub mod hybrid;
pub mod ids;
pub mod lower;
pub mod messages;
pub mod perturb;
pub mod profile;
pub mod prune;
pub mod replay;
pub mod sim;
pub mod slice;
pub mod spare;
pub mod synthetic;
pub mod units;

mod wide;
