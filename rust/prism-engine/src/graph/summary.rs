//! What is in a graph, for people and for `inspect --json`.

use crate::graph::Graph;
use crate::graph::columns::{compute_class, provenance, tag};
use crate::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance};
use crate::graph::store::{Run, runs};
use crate::ids::{CommId, Rank, TemplateId};
use serde::Serialize;
use std::collections::BTreeMap;

/// Contents of a graph. Times in ns, sizes in bytes, all totals over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GraphSummary {
    /// Number of ranks.
    pub world_size: u32,
    /// Op instances over all ranks.
    pub ops: u64,
    /// Size of the stored form.
    pub graph_bytes: u64,
    /// Size of the stored form per op instance; 0 for a graph without ops.
    pub bytes_per_op: f64,
    /// Op programs and who runs them.
    pub roles: Vec<RoleSummary>,
    /// Communicators by shape.
    pub communicators: Vec<CommFamily>,
    /// Op instances by kind (collectives and messages by their own names).
    pub ops_by_kind: BTreeMap<String, u64>,
    /// Calls and payload of communication by kind.
    pub communication: BTreeMap<String, KindTotal>,
    /// Device time of computation.
    pub device_time: DeviceTime,
    /// Compute ops whose duration is a rank's own.
    pub overrides: u64,
    /// Facts about the job.
    pub meta: BTreeMap<String, String>,
}

/// One op program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoleSummary {
    /// Name of the template.
    pub name: String,
    /// How many ranks run it.
    pub ranks: u32,
    /// The first of them.
    pub example_ranks: Vec<u32>,
    /// All of them as runs of first, last and step; the first 256 runs.
    pub rank_runs: Vec<[u32; 3]>,
    /// Length of the program.
    pub ops: u64,
    /// Streams it uses.
    pub streams: u32,
    /// Communicator slots it uses.
    pub slots: u32,
    /// Iterations it ends.
    pub iterations: u64,
    /// Most memory that it has reserved from the driver at a time.
    pub peak_device_bytes: u64,
    /// Device time of computation, with the program's durations.
    pub compute_ns: u64,
    /// What it gives NCCL: element count times element size over all calls.
    pub payload_bytes: u64,
}

/// Communicators of equal size and equal distance between neighbours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommFamily {
    /// Members of each.
    pub size: u32,
    /// Difference of neighbouring members' ranks; none for single members and uneven lists.
    pub stride: Option<i64>,
    /// How many communicators.
    pub count: u64,
    /// Members of the first, up to eight.
    pub example: Vec<u32>,
    /// Calls on them over all ranks, by kind.
    pub calls: BTreeMap<&'static str, u64>,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KindTotal {
    /// Calls over all ranks.
    pub calls: u64,
    /// Element count as given to NCCL times element size, over all calls.
    pub payload_bytes: u64,
}

/// Time of compute ops at full speed, with the ranks' own durations where they have them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceTime {
    /// All of it.
    pub total_ns: u64,
    /// By where the durations come from.
    pub by_provenance_ns: BTreeMap<Provenance, u64>,
    /// By class of work.
    pub by_class_ns: BTreeMap<ComputeClass, u64>,
}

const EXAMPLES: usize = 8;
const RUNS: usize = 256;

impl RoleSummary {
    fn count(&mut self, ops: impl Iterator<Item = Op>) {
        let (mut device, mut compute) = (0_u64, 0_i128);
        for op in ops {
            match op.kind {
                OpKind::Alloc { bytes } => device = device.saturating_add(bytes),
                OpKind::Free { bytes } => device = device.saturating_sub(bytes),
                OpKind::IterationEnd => self.iterations += 1,
                OpKind::Compute { duration, .. } => compute += i128::from(duration.as_ps()),
                OpKind::Collective { dtype, count, .. } | OpKind::PointToPoint { dtype, count, .. } => {
                    let bytes = count.saturating_mul(dtype.size_bytes());
                    self.payload_bytes = self.payload_bytes.saturating_add(bytes);
                }
                _ => {}
            }
            self.peak_device_bytes = self.peak_device_bytes.max(device);
        }
        self.compute_ns = u64::try_from(compute / 1000).unwrap_or(u64::MAX);
    }
}

impl Graph {
    /// Counts what is in the graph. O(template ops + ranks + memberships + overrides).
    pub fn summary(&self) -> GraphSummary {
        let roles = self.roles();
        let totals = Totals::of(self, &roles);
        let (ops, graph_bytes) = (self.num_ops(), self.graph_bytes());
        GraphSummary {
            world_size: self.world_size(),
            ops,
            graph_bytes,
            bytes_per_op: if ops == 0 { 0.0 } else { graph_bytes as f64 / ops as f64 },
            communicators: self.families(),
            device_time: totals.device_time(),
            overrides: totals.overrides,
            ops_by_kind: totals.kinds,
            communication: totals.communication,
            meta: self.meta.clone(),
            roles,
        }
    }

    fn roles(&self) -> Vec<RoleSummary> {
        let role = |template| {
            let view = self.template(TemplateId(template as u32));
            let mut role = RoleSummary {
                name: view.name().to_owned(),
                ranks: 0,
                example_ranks: Vec::new(),
                rank_runs: Vec::new(),
                ops: view.len() as u64,
                streams: view.num_streams(),
                slots: view.num_slots(),
                iterations: 0,
                peak_device_bytes: 0,
                compute_ns: 0,
                payload_bytes: 0,
            };
            role.count(view.iter());
            role
        };
        let mut roles: Vec<_> = (0..self.num_templates()).map(role).collect();
        let mut ranks = vec![Vec::new(); roles.len()];
        for rank in 0..self.world_size() {
            ranks[self.rank_template(Rank(rank)).index()].push(rank);
        }
        for (role, ranks) in roles.iter_mut().zip(&ranks) {
            role.ranks = ranks.len() as u32;
            role.example_ranks = ranks.iter().copied().take(EXAMPLES).collect();
            let run = |run: Run| [run.first, run.first + run.stride * (run.count - 1), run.stride.max(1)];
            role.rank_runs = runs(ranks).take(RUNS).map(run).collect();
        }
        roles
    }

    /// Calls on each communicator of the graph, by kind, over all its members.
    fn calls(&self) -> Vec<BTreeMap<&'static str, u64>> {
        let of_template = |template: usize| {
            let mut calls: BTreeMap<(u32, &'static str), u64> = BTreeMap::new();
            for op in self.template(TemplateId(template as u32)).iter() {
                if let OpKind::Collective { slot, .. } | OpKind::PointToPoint { slot, .. } = op.kind {
                    *calls.entry((slot.0, kind_name(&op.kind))).or_default() += 1;
                }
            }
            calls
        };
        let by_template: Vec<_> = (0..self.num_templates()).map(of_template).collect();
        let mut calls = vec![BTreeMap::new(); self.num_comms()];
        for rank in (0..self.world_size()).map(Rank) {
            let slots = self.rank_slots(rank);
            for ((slot, kind), count) in &by_template[self.rank_template(rank).index()] {
                *calls[slots[*slot as usize] as usize].entry(*kind).or_default() += count;
            }
        }
        calls
    }

    fn families(&self) -> Vec<CommFamily> {
        let mut families: BTreeMap<(u32, Option<i64>), CommFamily> = BTreeMap::new();
        for (comm, calls) in self.calls().into_iter().enumerate() {
            let members = self.comm_members(CommId(comm as u32));
            let (size, stride) = (members.len() as u32, stride(members));
            let example = || members.iter().copied().take(EXAMPLES).collect();
            let family = families.entry((size, stride));
            let new = || CommFamily { size, stride, count: 0, example: example(), calls: BTreeMap::new() };
            let family = family.or_insert_with(new);
            family.count += 1;
            for (kind, count) in calls {
                *family.calls.entry(kind).or_default() += count;
            }
        }
        families.into_values().rev().collect()
    }
}

/// The one difference between neighbours, if there is one.
fn stride(members: &[u32]) -> Option<i64> {
    let mut steps = members.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0]));
    let first = steps.next()?;
    steps.all(|step| step == first).then_some(first)
}

#[derive(Default)]
struct Totals {
    kinds: BTreeMap<String, u64>,
    communication: BTreeMap<String, KindTotal>,
    /// Picoseconds by class and provenance; wide enough for any sum.
    time: BTreeMap<(ComputeClass, Provenance), i128>,
    overrides: u64,
}

impl Totals {
    fn of(graph: &Graph, roles: &[RoleSummary]) -> Self {
        let mut totals = Self::default();
        for (template, role) in roles.iter().enumerate().filter(|(_, role)| role.ranks > 0) {
            graph.template(TemplateId(template as u32)).iter().for_each(|op| totals.add(&op, role.ranks.into()));
        }
        for rank in (0..graph.world_size()).map(Rank) {
            let view = graph.template(graph.rank_template(rank));
            for (index, duration) in graph.rank_overrides(rank) {
                totals.overrides += 1;
                let row = view.row(index as usize);
                debug_assert_eq!(row.tag, tag::COMPUTE, "only compute ops have overrides");
                let key = compute_class(row.a).zip(provenance(row.b)).expect("rows are checked when a graph is made");
                *totals.time.entry(key).or_default() += i128::from(duration.as_ps()) - i128::from(row.value as i64);
            }
        }
        totals
    }

    fn add(&mut self, op: &Op, ranks: u64) {
        let name = kind_name(&op.kind);
        match op.kind {
            OpKind::Compute { duration, class, provenance, .. } => {
                *self.time.entry((class, provenance)).or_default() += i128::from(duration.as_ps()) * i128::from(ranks);
            }
            OpKind::Collective { dtype, count, .. } | OpKind::PointToPoint { dtype, count, .. } => {
                self.add_payload(name, dtype, count, ranks);
            }
            _ => {}
        }
        if let Some(total) = self.kinds.get_mut(name) {
            *total += ranks;
        } else {
            self.kinds.insert(name.to_owned(), ranks);
        }
    }

    fn add_payload(&mut self, name: &str, dtype: DataType, count: u64, ranks: u64) {
        let bytes = count.saturating_mul(dtype.size_bytes()).saturating_mul(ranks);
        let total = self.communication.entry(name.to_owned()).or_default();
        total.calls += ranks;
        total.payload_bytes = total.payload_bytes.saturating_add(bytes);
    }

    fn device_time(&self) -> DeviceTime {
        // Sums first, rounds then: the shares add up to the total within a nanosecond each.
        let ns = |ps: i128| u64::try_from(ps / 1000).unwrap_or(u64::MAX);
        let mut by_class: BTreeMap<ComputeClass, i128> = BTreeMap::new();
        let mut by_provenance: BTreeMap<Provenance, i128> = BTreeMap::new();
        for (&(class, provenance), ps) in &self.time {
            *by_class.entry(class).or_default() += ps;
            *by_provenance.entry(provenance).or_default() += ps;
        }
        DeviceTime {
            total_ns: ns(self.time.values().sum()),
            by_provenance_ns: by_provenance.into_iter().map(|(key, ps)| (key, ns(ps))).collect(),
            by_class_ns: by_class.into_iter().map(|(key, ps)| (key, ns(ps))).collect(),
        }
    }
}

fn kind_name(kind: &OpKind) -> &'static str {
    match kind {
        OpKind::Compute { .. } => "compute",
        OpKind::Collective { kind, .. } => match kind {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::Reduce => "reduce",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Gather => "gather",
            CollectiveKind::Scatter => "scatter",
        },
        OpKind::PointToPoint { is_send: true, .. } => "send",
        OpKind::PointToPoint { is_send: false, .. } => "recv",
        OpKind::EventRecord { .. } => "event_record",
        OpKind::EventWait { .. } => "event_wait",
        OpKind::StreamSync => "stream_sync",
        OpKind::EventSync { .. } => "event_sync",
        OpKind::DeviceSync => "device_sync",
        OpKind::Alloc { .. } => "alloc",
        OpKind::Free { .. } => "free",
        OpKind::TrainingBegin => "training_begin",
        OpKind::IterationEnd => "iteration_end",
    }
}
